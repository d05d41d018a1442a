"""Register tiles: how many rows and vectors of accumulators a product keeps in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log

from tcomp.ir.expr import Dim, as_expr
from tcomp.ir.linear import known_factor, linear
from tcomp.machines import Core

MAX_TILE_ROWS = 32  # rows of a register tile: as many as any machine has vector registers
MAX_TILE_VECTORS = 8  # vectors of a row of a tile: bounds the search
MAX_OUTER_ROWS = 4  # rows of a tile along the outer of two axes: bounds the search, and the length of the code
LOAD_CONTENTION = 1.1  # factor by which loads take longer than their ports alone would: other instructions use these (an estimate)
STEP_OVERHEAD = 0.5  # cycles of a step of the reduction that nothing hides: its share of the loop's counter and branch (an estimate)
LONGER_CODE_GAIN = 0.97  # share of the cycles of the best tile so far that one with longer code may take: with more outer rows, or a tail
FEW_ROWS = 8  # from where on a free dim may be, each power of two as likely as another
TILE_GAIN = 0.999  # the same for any other tile: of equal ones, the first


@dataclass(frozen=True, slots=True)
class Tile:
    """Accumulators: `outer_rows` x `rows` x `vectors` vector registers."""

    rows: int
    vectors: int
    outer_rows: int = 1

    def cycles(self, core: Core, eviction: float = 1.0, least: float = 0.0, on_top: float = 0.0) -> float:
        """Cycles of a step of the reduction: a multiply-add for each accumulator (counted as if there were as many units as load ports, so
        that of tiles bound by multiplications those with few loads win); a load for each vector of one operand, a broadcast for each row of
        the other; no less than a multiply-add waits for the one before. Evictions from the first-level cache take a factor `eviction`,
        operands from a further one `least` cycles, or more of them `on_top`."""
        rows, fmas = self.outer_rows * self.rows, max(core.fma, core.loads)
        loads = (rows + self.vectors) * LOAD_CONTENTION / core.loads + STEP_OVERHEAD
        return max(eviction * max(rows * self.vectors / fmas, loads) + on_top, core.latency, least) + STEP_OVERHEAD


def choose_tile(
    rows: int,
    columns: int,
    lanes: int,
    registers: int,
    core: Core,
    cached_rows: int = MAX_TILE_ROWS,
    outer_rows: int = 1,
    outer_options: Iterable[int] = (1,),
    loading: Callable[[int], tuple[float, float]] = lambda vectors: (0.0, 0.0),
    multiple: int = 0,
    part: int = 0,
    panel: int = 0,
    free: int = 0,
) -> Tile:
    """The register tile with the least modelled cycles (`Tile.cycles`) for an outer_rows x rows x columns result, among the tiles whose
    number of outer rows is one of `outer_options`, whose rows divide `multiple`, and a `part` of the rows if others gain little, and which
    fit panels of `panel` vectors (see `tiles`).

    More rows than `cached_rows` evict each other from the first-level cache. `loading(vectors)` is (minimum, additional) cycles for
    loading a step's vectors of the operand again for other rows. Where the number of rows is not known, it is between
    `free` and `rows`, and the last rows take as long as a whole tile, as each of them is tested."""
    vector_count = max(1, -(-columns // lanes))

    def step(outer: int, r: int, v: int) -> float:
        """Cycles of a step of a tile that may hang over an edge."""
        least, on_top = loading(v) if v and outer * r < rows * outer_rows else (0.0, 0.0)
        eviction = core.row_eviction if outer * r > cached_rows else 1.0
        return Tile(r, v, outer).cycles(core, eviction, least, on_top) if outer and r and v else 0.0

    def cycles(tile: Tile, outer: int) -> float:
        full_v, rest_v = divmod(vector_count, tile.vectors)
        if free:
            return tiles_of_a_row(tile.rows, rows, free) * (full_v * step(outer, tile.rows, tile.vectors) + step(outer, tile.rows, rest_v))
        full_r, rest_r = divmod(rows, tile.rows)
        inside, right = full_r * full_v * step(outer, tile.rows, tile.vectors), full_r * step(outer, tile.rows, rest_v)
        return inside + right + full_v * step(outer, rest_r, tile.vectors) + step(outer, rest_r, rest_v)

    best, best_cost = Tile(1, 1), float("inf")
    for outer in outer_options:
        for tile in tiles(min(rows, MAX_TILE_ROWS), vector_count, registers, outer, core.loads_first, panel):
            # The operand of a row that one vector multiplies is overwritten by the sum (`vfmadd213ps`): sums go from register to register,
            # and where these are all in use, to memory.
            full = tile.vectors == 1 < tile.rows and outer * tile.rows + 2 >= registers
            if multiple % tile.rows == 0 and not full:
                cost = outer_rows // outer * cycles(tile, outer) + cycles(tile, outer_rows % outer)
                longer = outer != best.outer_rows or (part % tile.rows != 0 == part % best.rows)
                if cost < best_cost * (LONGER_CODE_GAIN if longer else TILE_GAIN):
                    best, best_cost = tile, cost
    return best


def tiles_of_a_row(tile_rows: int, most: int, least: int = FEW_ROWS) -> float:
    """Tiles that are computed for each row, the last one as a whole: the mean over what their number may be."""
    inverse = (1 / least - 1 / most) / log(most / least) if most > least else 1 / max(most, 1)  # the mean of 1 / their number
    return (1 + (tile_rows - 1) / 2 * inverse) / tile_rows


def least_rows(extent: Dim) -> int:
    """From where on a number of rows that is not known may be: one of several free dims is a batch, which may be 1."""
    terms = linear(as_expr(extent))
    free = max(map(len, terms), default=0)
    return max(FEW_ROWS, known_factor(extent) * int(FEW_ROWS ** (free - 1)))


def outer_row_counts(outer_rows: int) -> range:
    """The numbers of outer rows that a tile may have, if there are `outer_rows`."""
    return range(1, max(1, min(outer_rows, MAX_OUTER_ROWS)) + 1)


def tiles(rows: int, vectors: int, registers: int, outer_rows: int = 1, loads_first: bool = False, panel: int = 0) -> list[Tile]:
    """All tiles of at most `rows` rows and `vectors` vectors, with `outer_rows`, whose accumulators and operands fit into the registers;
    with `loads_first`, the operands of all rows and a product are in registers at once. Where the lanes walk panels of `panel` vectors,
    tiles are whole panels or divide them."""
    widths = (v for v in range(1, min(vectors, MAX_TILE_VECTORS) + 1) if not panel or v % panel == 0 or panel % v == 0)
    sizes = ((r, v) for v in widths for r in range(1, rows + 1))
    spread = {r: r * outer_rows + 1 if loads_first else 1 for r in range(1, rows + 1)}
    return [Tile(r, v, outer_rows) for r, v in sizes if r * v * outer_rows + v + spread[r] <= registers] or [Tile(1, 1, outer_rows)]
