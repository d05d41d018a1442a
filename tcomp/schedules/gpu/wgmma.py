"""Tiles of products on the tensor cores of sm_90a: the loops inside of a tile become warpgroups (thread.y, thread.z), the fragments of
their 128 threads (thread.x), and `wgmma` instructions of 64 rows x all columns of a warpgroup.

Slices of both factors lie in shared memory as core matrices: 8 rows of 16 bytes along the reduction that follow each other (`cores`). A
side of a tile along two axes has 8 elements along the inner one, the rows of a core matrix. A thread has, of 64 rows, two neighbours in
each of two rows, every 8 columns:

    row = 16 * (t // 32) + 8 * high + t // 4 % 8, column = 8 * many + 2 * (t % 4) + low

These tiles are options of a decision, and never the default one: that stays `mma` before wgmma was seen on hardware.
"""

from __future__ import annotations

from tcomp.ir.dtypes import itemsize
from tcomp.ir.instruction import CORE
from tcomp.schedules.gpu.block_tiles import Side, Tile
from tcomp.schedules.schedule import Schedule

_LETTERS = "abcdefghijklmnop"
ROWS = CORE[0]


def elements(s: Schedule, tile: Tile, axes: dict[int, str]) -> None:
    """A nest over the elements of a tile: each thread has those that it holds."""
    (y, rows, io, quad), (z, columns, jo, ji) = _units(s, tile, axes)
    warp, high = s.split(io, 2)
    pair, low = s.split(ji, 2)
    s.reorder(y, z, warp, quad, pair, rows, columns, jo, high, low)
    thread = s.fuse(s.fuse(warp, quad), pair)
    for loop, kind in ((y, "thread.y"), (z, "thread.z"), (thread, "thread.x")):
        s.apply("set_kind", loop, kind)
    for x in (rows, columns, jo, high):
        s.unroll(x)
    s.vectorize(low)


def multiply(s: Schedule, tile: Tile, axes: dict[int, str], slice_: str) -> None:
    """The nest that sums products: instructions."""
    instruction = tile.instruction
    (y, rows, io, ii), (z, columns, jo, ji) = _units(s, tile, axes)
    steps, k = s.split(slice_, tile.instruction_depth)
    ko, ki = s.split(k, _row(tile))
    s.reorder(y, z, steps, rows, columns, io, ii, jo, ji, ko, ki, reassociate=True)
    s.apply("set_kind", y, "thread.y")
    s.apply("set_kind", z, "thread.z")
    for x in (steps, rows, columns):
        s.unroll(x)
    s.tensorize(io, instruction, reassociate=instruction.reassociates)


def _units(s: Schedule, tile: Tile, axes: dict[int, str]) -> list[tuple[str, str, str, str]]:
    """Of the rows and of the columns: (the loop over warpgroups, over the instructions of one, over core matrices, over rows of these)"""
    found = []
    for side, covered in zip((tile.rows, tile.columns), tile.instruction_shape, strict=True):
        first = axes[side.axes[0]]
        if len(side.axes) == 2:
            group, mine = s.split(first, side.per_thread // ROWS)
            many, core = s.split(mine, covered // ROWS)
            found.append((group, many, core, axes[side.axes[1]]))
        else:
            group, mine = s.split(first, side.per_thread)
            many, unit = s.split(mine, covered)
            core, row = s.split(unit, ROWS)
            found.append((group, many, core, row))
    return found


def layout(tile: Tile, rank: int) -> str:
    """How the sums lie in registers: first by warpgroup, then by core matrices of its tile."""
    groups, rest = [], []
    for side in (tile.rows, tile.columns):
        first, last = _LETTERS[side.axes[0]], _LETTERS[side.axes[-1]]
        cores = side.per_thread // ROWS
        if len(side.axes) == 2:
            groups.append(f"{first}/{cores}")
            rest += [f"{first}%{cores}", last]
        else:
            groups.append(f"{first}/{side.per_thread}")
            rest += [f"{first}/{ROWS}%{cores}", f"{last}%{ROWS}"]
    units = [_LETTERS[d] for d in range(rank) if d not in tile.axes]
    return f"({','.join([*units, *groups, *rest])})"


def cores(tile: Tile, side: Side) -> str:
    """How the slice of a factor lies in shared memory: its dimensions are those of its side, and the reduction."""
    row = _row(tile)
    return f"(a,c/{row},b,c%{row})" if len(side.axes) == 2 else f"(a/{ROWS},b/{row},a%{ROWS},b%{row})"


def _row(tile: Tile) -> int:
    """Elements of a row of a core matrix."""
    return CORE[1] // itemsize(tile.tensor)
