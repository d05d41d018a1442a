"""Register tiles: how many rows and vectors of accumulators a product keeps in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_TILE_ROWS = 32  # rows of a register tile: as many as any machine has vector registers
MAX_TILE_VECTORS = 8  # vectors of a row of a tile: bounds the search
MAX_OUTER_ROWS = 4  # rows of a tile along the outer of two axes: bounds the search, and the length of the code
FMAS = 2  # multiply-adds a cycle: that of most processors with wide vectors
FMA_LATENCY = 4.0  # cycles until a step may add to the accumulators of the one before, likewise
LOAD_CYCLES = 0.55  # cycles of a load: two a cycle, less a tenth for what else takes their ports (an estimate for skylake-avx512)
EVICTION = 1.05  # factor by which products take longer whose rows evict each other from the first-level cache (likewise)
OUTER_ROWS_GAIN = 0.97  # share of the cycles of the best tile so far that one with more outer rows may take: its code is longer
TILE_GAIN = 0.999  # likewise of any other tile: of equal ones, the first


@dataclass(frozen=True, slots=True)
class Tile:
    """Accumulators: `outer_rows` x `rows` x `vectors` vector registers."""

    rows: int
    vectors: int
    outer_rows: int = 1


def choose_tile(
    rows: int,
    columns: int,
    lanes: int,
    registers: int,
    cached_rows: int = MAX_TILE_ROWS,
    outer_rows: int = 1,
    outer_options: Iterable[int] = (1,),
    loading: Callable[[int], tuple[float, float]] = lambda vectors: (0.0, 0.0),
    multiple: int = 0,
) -> Tile:
    """The register tile with the least modelled cycles for an outer_rows x rows x columns result, of those with as many outer rows as one
    of `outer_options` says, whose rows divide `multiple`.

    Per step of the reduction a tile issues rows * vectors FMAs (two a cycle), loads `vectors` vectors and `rows` broadcasts (two a cycle),
    and cannot go faster than the FMA latency of 4 cycles; one register holds the broadcast, `vectors` the operand. More rows than
    `cached_rows` evict each other from the first-level cache. `loading` says how many cycles it takes to load so many vectors of the
    operand again for other rows: (at least, on top of the rest)."""
    vector_count = max(1, -(-columns // lanes))

    def step(outer: int, r: int, v: int) -> float:
        """Cycles of a step of a tile that may hang over an edge."""
        if not (outer and r and v):
            return 0.0
        least, on_top = loading(v) if outer * r < rows * outer_rows else (0.0, 0.0)
        eviction = EVICTION if outer * r > cached_rows else 1.0
        return max(eviction * max(outer * r * v / FMAS, (outer * r + v) * LOAD_CYCLES + 0.5) + on_top, FMA_LATENCY, least) + 0.5

    def cycles(tile: Tile, outer: int) -> float:
        (full_r, rest_r), (full_v, rest_v) = divmod(rows, tile.rows), divmod(vector_count, tile.vectors)
        inside, right = full_r * full_v * step(outer, tile.rows, tile.vectors), full_r * step(outer, tile.rows, rest_v)
        return inside + right + full_v * step(outer, rest_r, tile.vectors) + step(outer, rest_r, rest_v)

    best, best_cost = Tile(1, 1), float("inf")
    for outer in outer_options:
        for tile in tiles(min(rows, MAX_TILE_ROWS), vector_count, registers, outer):
            if multiple % tile.rows == 0:
                cost = outer_rows // outer * cycles(tile, outer) + cycles(tile, outer_rows % outer)
                if cost < best_cost * (TILE_GAIN if outer == best.outer_rows else OUTER_ROWS_GAIN):
                    best, best_cost = tile, cost
    return best


def outer_row_counts(outer_rows: int) -> range:
    """How many outer rows a tile may have, of so many."""
    return range(1, max(1, min(outer_rows, MAX_OUTER_ROWS)) + 1)


def tiles(rows: int, vectors: int, registers: int, outer_rows: int = 1) -> list[Tile]:
    """All tiles of at most so many rows and vectors, with `outer_rows`, whose accumulators and operands fit into the registers."""
    sizes = ((r, v) for v in range(1, min(vectors, MAX_TILE_VECTORS) + 1) for r in range(1, rows + 1))
    return [Tile(r, v, outer_rows) for r, v in sizes if r * v * outer_rows + v + 1 <= registers] or [Tile(1, 1, outer_rows)]
