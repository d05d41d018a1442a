"""Register tiles: how many rows and vectors of accumulators a product keeps in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MOST_ROWS = 32  # of a register tile
DEEPEST = 4  # lines whose rows a tile has
LOAD = 0.55  # cycles
EVICTING = 1.05  # how much longer products take whose rows do
WORTHWHILE = 0.97  # of the cycles: rows of several lines make more code


@dataclass(frozen=True, slots=True)
class Tile:
    """Accumulators: `rows` x `vectors` vector registers, for each of `deep` lines of rows."""

    rows: int
    vectors: int
    deep: int = 1


def choose_tile(
    rows: int,
    columns: int,
    lanes: int,
    registers: int,
    apart: int = MOST_ROWS,
    lines: int = 1,
    among: Iterable[int] = (1,),
    loading: Callable[[int], tuple[float, float]] = lambda vectors: (0.0, 0.0),
    divided: int = 0,
) -> Tile:
    """The register tile with the least modelled cycles for a rows x columns result, or `lines` of such, of which a tile has rows of as
    many as one of `among` says.

    Per step of the fold a tile issues rows * vectors FMAs (two a cycle), loads `vectors` vectors and `rows` broadcasts (two a
    cycle), and cannot go faster than the FMA latency of 4 cycles; one register holds the broadcast, `vectors` the operand. More rows
    than `apart` evict each other from the first-level cache. `loading` says how many cycles it takes to load so many vectors of the
    operand again for other rows: at least, and beside the rest. The rows of the tile divide `divided`.
    """
    vector_count = max(1, -(-columns // lanes))

    def cycles(r: int, v: int, deep: int) -> float:
        def tile(a: int, b: int) -> float:
            if not (deep and a and b):
                return 0.0
            least, beside = loading(b) if deep * a < rows * lines else (0.0, 0.0)
            evicting = EVICTING if deep * a > apart else 1.0
            return max(evicting * max(deep * a * b / 2, (deep * a + b) * LOAD + 0.5) + beside, 4.0, least) + 0.5

        full_r, rest_r = divmod(rows, r)
        full_v, rest_v = divmod(vector_count, v)
        return full_r * full_v * tile(r, v) + full_r * tile(r, rest_v) + full_v * tile(rest_r, v) + tile(rest_r, rest_v)

    best, best_cost = Tile(1, 1), float("inf")
    for deep in among:
        for tile in (t for t in tiles(min(rows, MOST_ROWS), vector_count, registers, deep) if divided % t.rows == 0):
            cost = lines // deep * cycles(tile.rows, tile.vectors, deep) + cycles(tile.rows, tile.vectors, lines % deep)
            if cost < best_cost * (0.999 if deep == best.deep else WORTHWHILE):
                best, best_cost = tile, cost
    return best


def depths(lines: int) -> range:
    """Of how many lines a tile may have rows."""
    return range(1, max(1, min(lines, DEEPEST)) + 1)


def tiles(rows: int, vectors: int, registers: int, deep: int = 1) -> list[Tile]:
    """All tiles of at most so many rows and vectors, of `deep` lines, whose accumulators and operands fit into the registers."""
    sizes = ((r, v) for v in range(1, min(vectors, 8) + 1) for r in range(1, rows + 1))
    return [Tile(r, v, deep) for r, v in sizes if r * v * deep + v + 1 <= registers] or [Tile(1, 1, deep)]
