"""Default GPU schedule of products with a softmax, attention say, in one pass over each row of scores (see `primitives.online`).

    block for each tile of rows:            queries; with all columns of the result
      for block of the row:                 keys; the maximum so far, and the sums relative to it, go on from block to block
        scores, terms, weights              a tile in registers: a thread has the same elements of all three
        maximum, scale, sum of each row     each thread reductions what it has of a row, then one thread for each row what these have
        sums                                a tile in registers, scaled, and the products of weights and values added

The factors of both products are read from shared memory: slices of queries and keys, the weights of a block, the values of a block, which
are copied while the sums of the block before are added up. No array of rows x keys is ever stored, and what hangs over an edge is zero.

Tensor cores compute both products where their instruction computes the same as the sums (see `precision`). Their warps stand along the
rows, so that four neighbouring threads have a row, and no other ones; terms and weights lie in registers as the fragments of the scores do.

Sources: T. Dao et al., "FlashAttention" (2022); T. Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from tcomp.errors import ScheduleError
from tcomp.ir.dtypes import itemsize
from tcomp.ir.instruction import WARP
from tcomp.ir.loops import Accumulate
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, reduction_nest, result_nest, stage_axes
from tcomp.schedules.cpu.flash_attention import SoftmaxProduct, loop_along, row_and_column_loops, write_nests
from tcomp.schedules.gpu import mma
from tcomp.schedules.gpu.block_tiles import (
    MIN_EXTENT,
    SLICE_WAIT,
    Product,
    Side,
    Tile,
    all_contiguous,
    cycles_of_block,
    find,
    reads_of,
    tensor_depth,
)
from tcomp.schedules.gpu.gemm import ASYNC_COPY_ARCHITECTURE, elements, in_registers, multiply_in_slices
from tcomp.schedules.gpu.thread_mapping import fuse_all, vector_width
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives.insertion_points import Chain
from tcomp.schedules.schedule import Schedule
from tcomp.target import CudaTarget

SIDE_THREADS = 16  # threads along each side of a tile: 256 in all
SLICE_DEPTH = 16  # elements of a slice of queries and keys: 64 bytes of each row, two sectors of memory
STAGES = 2  # of slices, and of values: the next ones are copied while these are used
EXPONENTIAL = 8  # cycles of a warp for one element of the scores: its exponential, the reductions of its row, the weight for others to read
MAX_ACCUMULATORS, MAX_TENSOR_ACCUMULATORS = 112, 160  # 32-bit registers of a thread for the elements of its tiles, of 255; by tensor cores
MIN_SM_ROWS = 16  # rows that each SM should get at least: half a tile of the smallest ones
WIDTHS = range(MIN_EXTENT, 257)  # numbers of columns for which there are tiles that keep a multiprocessor busy
_LETTERS = "abcdefghijklmnop"


@dataclass(frozen=True, slots=True)
class Parts:
    """The nests of the products, with the roles of their axes: of the scores (None if these are read from memory), and of the sums."""

    scores: tuple[Nest, Product] | None
    sums: tuple[Nest, Product]
    rank: int  # of the maximum: its last axis are the rows


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a block computes: `scores` of a block of the row at a time, and `sums`. Both have the same rows, and threads along them."""

    scores: Tile
    sums: Tile

    def shared(self, size: int, stages: int) -> int:
        """Bytes of shared memory, at most, for elements of so many."""
        rows, keys = self.scores.rows.size, self.scores.columns.size
        depth, lanes = self.scores.depth, 4 if self.scores.tensor else SIDE_THREADS
        narrow = itemsize(self.scores.tensor) if self.scores.tensor else size
        staged = stages * ((rows + keys) * (depth + 8) + (keys + 8) * (self.sums.columns.size + 8)) + rows * (keys + 8)
        return narrow * staged + size * rows * (2 * lanes + 3)


def schedule(s: Schedule, found: SoftmaxProduct, target: CudaTarget, knobs: Knobs) -> None:
    """One block for each tile of rows. Raises `ScheduleError` where the structure is another one, or a step is refused."""
    parts = _parts(s, found, target)
    (values, product), acc = parts.sums, parts.sums[0].writes.name
    options = _options(parts, target)
    sizes = tuple((t.scores.rows.threads, t.scores.rows.per_thread, t.scores.columns.per_thread) for t in options)
    tiles = options[sizes.index(knobs.choice(f"{found.maximum}.tile", sizes, sizes[0]))]
    transposed = all_contiguous(reads_of(values, product)[1], product.sliced)
    width = 1 if transposed else vector_width(values, result_nest(s.kernel, found.result), tiles.sums.columns.per_thread)
    (reduction,) = reduction_nest(s.kernel, found.maximum).reduction_loops

    for name in found.elements:
        s.inline(name)
    rows, columns, others = row_and_column_loops(s, found, reduction_nest(s.kernel, acc))
    around, row = s.split(rows.var.attr.name, tiles.scores.rows.size)
    once, column = s.split(columns.var.attr.name, tiles.sums.columns.size)
    s.reorder(*others, around, once, row, column)
    home = fuse_all(s, [*others, around, once])
    for name in (*found.sums, found.maximum):
        s.compute_at(name, home, "register")  # whole tiles, where there are fewer rows
    blocks, terms, weights, scale = s.online(found.maximum, reduction.var.attr.name, tiles.scores.columns.size)
    of_rows = [name for name in (found.maximum, scale, *found.sums) if name != acc]
    for name in (terms, weights, *of_rows):
        s.set_scope(name, "shared" if name in of_rows else "register")
    if found.scores is not None:
        s.compute_at(found.scores, blocks, "register")
    s.apply("set_kind", home, "block.x")

    for c in write_nests(s.kernel.body):
        name, sides = c.write.buffer.name, (loop_along(c, -2), loop_along(c, -1))
        if name in of_rows:
            _row(s, c, tiles.scores)
        elif name in (terms, weights):
            elements(s, tiles.scores, _by_axis(tiles.scores, sides), 1)
        elif name == acc and isinstance(c.write, Accumulate):
            values = Nest(c.loops, c.write)
        elif name == acc and c.write.value.op != "const":  # `multiply_in_slices` makes the nest that clears them
            elements(s, tiles.sums, _by_axis(tiles.sums, sides), width)
    elements(s, tiles.sums, _by_axis(tiles.sums, (row, column)), width)
    for name in of_rows:
        s.relayout(name, _rows_by_threads(parts.rank, tiles.scores))
    for name in (terms, weights):
        if tiles.scores.tensor:
            s.relayout(name, mma.held(tiles.scores, parts.rank + 1))
        else:
            in_registers(s, name, tiles.scores, 1)
    if parts.scores is not None:
        assert found.scores is not None
        step, slices = multiply_in_slices(s, found.scores, *parts.scores, tiles.scores, 1)
        _pipeline(s, step, slices, target)
    product = replace(product, sliced=values.reduction_loops[0])
    _, (_, copied) = multiply_in_slices(s, acc, values, product, tiles.sums, width, owner=tiles.scores)
    s.clean()  # of the values of a block there is one slice
    _pipeline(s, blocks, [copied], target)


def _pipeline(s: Schedule, loop: str, copies: Sequence[str], target: CudaTarget) -> None:
    """Copy for the next iteration of a loop, if it has several."""
    if target.compute_capability >= ASYNC_COPY_ARCHITECTURE and loop in s.loops and s.loops[loop].extent != 1:
        s.pipeline(loop, STAGES, *copies)


def _by_axis(tile: Tile, loops: tuple[str | None, str | None]) -> dict[int, str]:
    found = {axis: loop for axis, loop in zip(tile.axes, loops, strict=True) if loop is not None}
    if len(found) < 2:
        raise ScheduleError("there are no tiles of rows and columns", why="a nest has no loop for one of them")
    return found


def _rows_by_threads(rank: int, tile: Tile, lanes: str = "") -> str:
    """How what belongs to the rows of a tile lies: its last dimension is cut as the rows are among the threads."""
    units, row = list(_LETTERS[: rank - 1]), _LETTERS[rank - 1]
    thread, one = f"{row}/{tile.rows.per_thread}", f"{row}%{tile.rows.per_thread}"
    return f"({','.join([*units, *((one, thread, lanes) if lanes else (thread, one))])})"


def _row(s: Schedule, c: Chain, tile: Tile) -> None:
    """What is computed for each row. A reduction along the row: by each thread for the elements that it has, then by one for what these
    have."""
    row, name = loop_along(c, -1), c.write.buffer.name
    assert row is not None
    if isinstance(c.write, Accumulate):
        (reduction,) = _reduction_loops(s, name)
        partial = s.rfactor(name, *(mma.lanes_of_row(s, reduction) if tile.tensor else (reduction, tile.columns.threads)))
        s.set_scope(partial, "shared")
        for is_reduction in (False, True):
            *_, line, lane = stage_axes(s.kernel, partial, is_reduction)
            s.unroll((mma.rows_by_lanes if tile.tensor else _rows_by_lanes)(s, tile, line, lane))
        for x in _reduction_loops(s, partial):
            s.unroll(x)
        if not tile.tensor:
            rank = len(c.write.indices)
            s.relayout(partial, _rows_by_threads(rank, tile, _LETTERS[rank]))
        *_, row = stage_axes(s.kernel, name, True)
        (last,) = _reduction_loops(s, name)
        s.unroll(last)
    thread, one = s.split(row, tile.rows.per_thread)
    s.apply("set_kind", thread, "thread.y")
    s.apply("set_kind", one, "thread.x")


def _rows_by_lanes(s: Schedule, tile: Tile, row: str, lane: str) -> str:
    """As `mma.rows_by_lanes`."""
    thread, one = s.split(row, tile.rows.per_thread)
    s.reorder(thread, lane, one)
    s.apply("set_kind", thread, "thread.y")
    s.apply("set_kind", lane, "thread.x")
    return one


def _reduction_loops(s: Schedule, name: str) -> list[str]:
    """The loops that a stage is reduced over."""
    c = next(c for c in write_nests(s.kernel.body) if isinstance(c.write, Accumulate) and c.write.buffer.name == name)
    return [x.var.attr.name for x in Nest(c.loops, c.write).reduction_loops]


# ---------------------------------------------------------------- structure and sizes


def _parts(s: Schedule, found: SoftmaxProduct, target: CudaTarget) -> Parts:
    """Raises `ScheduleError` unless the scores are a product of rows and keys, if they are one, and the sums one of rows and columns."""

    def of(name: str) -> tuple[Nest, Product]:
        reduction = reduction_nest(s.kernel, name)
        product, rank = find(reduction, result_nest(s.kernel, name), target), len(reduction.leaf.indices)
        if product is None or (product.rows[-1], product.columns[-1]) != (rank - 2, rank - 1):
            why = f"`{name}` is no product of matrices that a block computes in tiles"
            raise ScheduleError("there are no tiles of rows and columns", why=why)
        return reduction, product

    rank = len(reduction_nest(s.kernel, found.maximum).leaf.indices)
    wide = [name for name in found.sums if len(reduction_nest(s.kernel, name).leaf.indices) > rank]
    if len(wide) != 1:
        raise ScheduleError("there is not one product with the weights", why=f"there are {len(wide)}")
    parts = Parts(of(found.scores) if found.scores else None, of(wide[0]), rank)
    if parts.scores and parts.scores[1].tensor != parts.sums[1].tensor:
        raise ScheduleError("there are no tiles of rows and columns", why="tensor cores compute one of the products, and not the other")
    reduction = parts.sums[0]
    if len(reduction.reduction_loops) != 1 or not isinstance(reduction.spatial[-1].extent, int):
        why = f"the number of columns of `{wide[0]}` is not known, or it is a sum over several axes"
        raise ScheduleError("there are no tiles of sums", why=why)
    return parts


def _options(parts: Parts, target: CudaTarget) -> list[Tiles]:
    """The tiles that fit, best first."""
    stages = STAGES if target.compute_capability >= ASYNC_COPY_ARCHITECTURE else 1
    size, most = itemsize(parts.sums[0].writes.dtype), MAX_TENSOR_ACCUMULATORS if parts.sums[1].tensor else MAX_ACCUMULATORS
    kept = [t for t in _candidates(parts) if (t.sums.accumulators + 3 * t.scores.accumulators) * size <= 4 * most]  # scores, terms, weights
    options = [t for t in kept if t.shared(size, stages) <= target.shared_per_block]
    if not options:
        why = f"{parts.sums[0].spatial[-1].extent} of each row are too many for the threads of a block"
        raise ScheduleError("the sums of a row do not fit", why=why)
    return sorted(options, key=lambda t: _cycles(parts, t, t.shared(size, stages), target))


def _candidates(parts: Parts) -> Iterator[Tiles]:
    """With all columns. Warps of tensor cores stand along the rows, so that four neighbours have a row."""
    (values, product), rank = parts.sums, len(parts.sums[0].leaf.indices)
    above, tensor, columns = parts.rank - 1, product.tensor, extent_of(values.spatial[-1].extent)

    def tiles(threads: int, each: int, across: int, keys: int, wide: int, units: tuple[int, int, int], depth: int, together: int) -> Tiles:
        row, key, column = units
        scores = Tile(Side((above,), threads, each, row), Side((above + 1,), across, keys, key), depth, tensor, together)
        below = Side((rank - 2,), threads, each, row), Side((rank - 1,), across, wide, column)
        return Tiles(scores, Tile(*below, across * keys, tensor, together))

    if tensor:
        for warps, each, keys in itertools.product((2, 4, 8), (16, 32), (16, 32, 64)):
            yield tiles(warps, each, 1, keys, -(-columns // 8) * 8, (16, 8, 8), 2 * tensor_depth(tensor), WARP)
    else:
        wide = -(-columns // SIDE_THREADS)
        for each, keys in itertools.product((2, 4, 8), (1, 2, 4)):
            yield tiles(SIDE_THREADS, each, SIDE_THREADS, keys, wide, (each, keys, wide), SLICE_DEPTH, 1)


def _cycles(parts: Parts, tiles: Tiles, shared: int, target: CudaTarget) -> float:
    """How long the busiest SM computes all its rows (see `block_tiles`)."""
    values, product = parts.sums
    blocks, (length,) = tiles.sums.blocks(values), (extent_of(x.extent) for x in values.reduction_loops)
    keys = tiles.scores.columns.size
    waves = -(-blocks // target.gpu.sms) if blocks > target.gpu.sms else 1.5
    alone = 1.5 if (target.gpu.shared << 10) // shared < 2 else 1.0  # nobody else computes while threads wait for each other
    exponentials = tiles.scores.accumulators * EXPONENTIAL * (tiles.scores.threads // 32)
    each = keys * cycles_of_block(values, product, tiles.sums, target) + exponentials + 4 * SLICE_WAIT
    if parts.scores is not None:
        depth = prod(extent_of(x.extent) for x in parts.scores[0].reduction_loops)
        each += depth * (cycles_of_block(*parts.scores, tiles.scores, target) + SLICE_WAIT / tiles.scores.depth)
    return each * waves * alone * -(-length // keys)
