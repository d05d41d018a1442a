"""Tiles of products on tensor cores: the loops inside of a tile become warps (thread.y, thread.z), the fragments of their threads
(thread.x), and instructions.

A sum is cleared and used by the thread that holds it, where the fragments of `mma` put it: a thread has, of each tile of 16 x 8, two
neighbours in each of two rows.

    row = 8 * high + t // 4, column = 2 * (t % 4) + low
"""

from __future__ import annotations

from tcomp.schedules.gpu.block_tiles import Side, Tile
from tcomp.schedules.schedule import Schedule

_LETTERS = "abcdefghijklmnop"


def elements(s: Schedule, tile: Tile, axes: dict[int, str]) -> None:
    """A nest over the elements of a tile: each thread has those that it holds."""
    y, rows, i = _units(s, tile.rows, axes)
    z, columns, j = _units(s, tile.columns, axes)
    high, quad = s.split(i, 8)
    pair, low = s.split(j, 2)
    s.reorder(y, z, quad, pair, *rows, *columns, high, low)
    thread = s.fuse(quad, pair)
    for loop, kind in ((y, "thread.y"), (z, "thread.z"), (thread, "thread.x")):
        s.apply("set_kind", loop, kind)
    for x in (*rows, *columns, high):
        s.unroll(x)
    s.vectorize(low)


def multiply(s: Schedule, tile: Tile, axes: dict[int, str], slice_: str) -> None:
    """The nest that sums products: instructions."""
    instruction = tile.instruction
    y, rows, i = _units(s, tile.rows, axes)
    z, columns, j = _units(s, tile.columns, axes)
    steps, k = s.split(slice_, tile.instruction_depth)
    s.reorder(y, z, steps, *rows, *columns, i, j, k, reassociate=True)
    s.apply("set_kind", y, "thread.y")
    s.apply("set_kind", z, "thread.z")
    for x in (steps, *rows, *columns):
        s.unroll(x)
    s.tensorize(i, instruction, reassociate=instruction.reassociates)


def _units(s: Schedule, side: Side, axes: dict[int, str]) -> tuple[str, list[str], str]:
    """(the loop over warps, loops over the units of one, the loop inside of a unit)"""
    if len(side.axes) == 2:
        warp, many = s.split(axes[side.axes[0]], side.per_thread // side.unit)
        return warp, [many], axes[side.axes[1]]
    warp, mine = s.split(axes[side.axes[0]], side.per_thread)
    many, unit = s.split(mine, side.unit)
    return warp, [many], unit


def layout(tile: Tile, rank: int) -> str:
    """How the sums lie in registers: first by warp, then as they lie in the tile of the warp."""
    warps, rest = [], []
    for side in (tile.rows, tile.columns):
        axis, each = _LETTERS[side.axes[0]], side.per_thread if len(side.axes) == 1 else side.per_thread // side.unit
        warps.append(f"{axis}/{each}")
        rest += [f"{axis}%{each}", *(_LETTERS[d] for d in side.axes[1:])]
    units = [_LETTERS[d] for d in range(rank) if d not in tile.axes]
    return f"({','.join([*units, *warps, *rest])})"


def held(tile: Tile, rank: int) -> str:
    """How what a thread computes from its elements of a sum lies in registers, of warps along the rows: first by warp, and by thread."""
    rows, columns, each = _LETTERS[tile.rows.axes[0]], _LETTERS[tile.columns.axes[0]], tile.rows.per_thread
    units = [_LETTERS[d] for d in range(rank) if d not in tile.axes]
    threads = [f"{rows}/{each}", f"{rows}%8", f"{columns}/2%4"]
    return f"({','.join([*units, *threads, f'{rows}/8%{each // 8}', f'{columns}/8', f'{columns}%2'])})"


def lanes_of_row(s: Schedule, reduction: str) -> tuple[str, int]:
    """A reduction over the columns of a tile: the loop over the threads that have elements of a row, and how many these are."""
    _, unit = s.split(reduction, 8)
    pair, _ = s.split(unit, 2)
    return pair, 4


def rows_by_lanes(s: Schedule, tile: Tile, row: str, lane: str) -> str:
    """A nest over the rows of a tile and the threads that have elements of each; returns the loop inside of a thread."""
    warp, mine = s.split(row, tile.rows.per_thread)
    high, quad = s.split(mine, 8)
    s.reorder(warp, quad, lane, high)
    s.apply("set_kind", warp, "thread.y")
    s.apply("set_kind", s.fuse(quad, lane), "thread.x")
    return high
