"""Tiles of products on tensor cores: the loops inside of a tile become warps or warpgroups (thread.y, thread.z), the fragments of their
threads (thread.x), and instructions.

    mma       by a warp: units of 16 x 8; a thread has two neighbours in each of two rows of a unit
              row = 8 * high + t // 4, column = 2 * (t % 4) + low
    wgmma     by a warpgroup, on sm_90a alone: units of 64 rows x all columns of the warpgroup; a thread has likewise, every 8 columns,
              row = 16 * (t // 32) + 8 * high + t // 4 % 8, column = 8 * many + 2 * (t % 4) + low

Slices of both factors lie for `wgmma` in shared memory in rows of 32, 64, or 128 bytes along the reduction, which the code generator
swizzles. A side of a tile along two axes has 8 elements along the inner one, as 8 rows are read together. A sum is cleared and used by the
thread that holds it.
"""

from __future__ import annotations

from tcomp.ir.dtypes import itemsize
from tcomp.ir.instruction import CORE
from tcomp.schedules.gpu import thread_mapping as T
from tcomp.schedules.gpu.block_tiles import Tile, tensor_depth
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import fuse_all, unroll


def map_elements(s: Schedule, tile: Tile, axes: dict[int, str]) -> None:
    """Map a nest over the elements of a tile, with these loops along its axes, to threads: each has those that it holds."""
    (y, rows, *i), (z, columns, *j) = _units(s, tile, axes)
    outer, inner = s.split(i[0], 2 if tile.by_warpgroups else 8)
    threads, high = ([outer, i[1]], inner) if tile.by_warpgroups else ([inner], outer)
    pair, low = s.split(j[-1], 2)
    own = [rows, columns, *j[:-1], high]
    s.reorder(y, z, *threads, pair, *own, low)
    thread = fuse_all(s, [*threads, pair])
    T.bind(s, {y: "thread.y", z: "thread.z", thread: "thread.x"})
    unroll(s, own)
    s.vectorize(low)


def multiply(s: Schedule, tile: Tile, axes: dict[int, str], slice_: str) -> None:
    """The nest that sums products over a slice of the reduction: instructions."""
    (y, rows, *i), (z, columns, *j) = _units(s, tile, axes)
    steps, *k = T.cut(s, slice_, tensor_depth(tile.tensor), *([_row(tile)] if tile.by_warpgroups else []))
    s.reorder(y, z, steps, rows, columns, *i, *j, *k, reassociate=True)
    T.bind(s, {y: "thread.y", z: "thread.z"})
    unroll(s, (steps, rows, columns))
    s.tensorize(i[0], tile.instruction, reassociate=tile.instruction.reassociates)


def _units(s: Schedule, tile: Tile, axes: dict[int, str]) -> tuple[list[str], list[str]]:
    """Of the rows and of the columns: the loops over warps(groups), over the units of one, and inside of a unit (of core matrices, and of
    their rows)."""
    return tile.pieces(lambda d, *factors: T.cut(s, axes[d], *factors), 1, by_instruction=True)


def fragment_layout(tile: Tile, rank: int) -> str:
    """How what a thread computes from its elements of a sum lies in registers, of warps along the rows: first by warp, and by thread."""
    warp, high, quad = T.digits(T.LETTERS[tile.rows.axes[0]], tile.rows.per_thread, 8)
    unit, pair, low = T.digits(T.LETTERS[tile.columns.axes[0]], 8, 2)
    return T.layout([*tile.outer_dims(rank), warp, quad, pair, high, unit, low])


def lanes_of_row(s: Schedule, reduction: str) -> tuple[str, int]:
    """A reduction over the columns of a tile: the loop over the threads that have elements of a row, and how many these are."""
    return T.cut(s, reduction, 8, 2)[1], 4


def map_rows(s: Schedule, tile: Tile, row: str, lane: str) -> str:
    """Map a nest over the rows of a tile and the threads that have elements of each; returns the loop inside of a thread."""
    warp, high, quad = T.cut(s, row, tile.rows.per_thread, 8)
    s.reorder(warp, quad, lane, high)
    s.bind(warp, "thread.y")
    s.bind(s.fuse(quad, lane), "thread.x")
    return high


def _row(tile: Tile) -> int:
    """Elements of the 16 bytes of a row that are read together."""
    return CORE[1] // itemsize(tile.tensor)
