"""Register tiles: how many rows and vectors of accumulators a product keeps in registers."""

from __future__ import annotations

from dataclasses import dataclass

MOST_ROWS = 32  # of a register tile


@dataclass(frozen=True, slots=True)
class Tile:
    """Accumulators: `rows` x `vectors` vector registers."""

    rows: int
    vectors: int


def choose_tile(rows: int, columns: int, lanes: int, registers: int, most_rows: int = MOST_ROWS) -> Tile:
    """The register tile with the least modelled cycles for a rows x columns result.

    Per step of the fold a tile issues rows * vectors FMAs (two a cycle), loads `vectors` vectors and `rows` broadcasts (two a
    cycle), and cannot go faster than the FMA latency of 4 cycles; one register holds the broadcast, `vectors` the operand.
    """
    vector_count = max(1, -(-columns // lanes))
    best, best_cost = Tile(1, 1), float("inf")
    for tile in tiles(min(rows, most_rows), vector_count, registers):
        cost = _cycles(rows, vector_count, tile.rows, tile.vectors)
        if cost < best_cost * 0.999:
            best, best_cost = tile, cost
    return best


def tiles(rows: int, vectors: int, registers: int) -> list[Tile]:
    """All tiles of at most so many rows and vectors whose accumulators and operands fit into the registers."""
    sizes = ((r, v) for v in range(1, min(vectors, 8) + 1) for r in range(1, rows + 1))
    return [Tile(r, v) for r, v in sizes if r * v + v + 1 <= registers] or [Tile(1, 1)]


def _cycles(rows: int, vector_count: int, r: int, v: int) -> float:
    def tile(a: int, b: int) -> float:
        return max(a * b / 2, (a + b) / 2 + 0.5, 4.0) + 0.5 if a and b else 0.0

    full_r, rest_r = divmod(rows, r)
    full_v, rest_v = divmod(vector_count, v)
    return full_r * full_v * tile(r, v) + full_r * tile(r, rest_v) + full_v * tile(rest_r, v) + tile(rest_r, rest_v)
