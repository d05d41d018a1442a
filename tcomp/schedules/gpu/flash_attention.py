"""Default GPU schedule of products with a softmax, such as attention, in one pass over each row of scores (see
`primitives.online_softmax`).

    block for each tile of rows:            queries; with all columns of the result
      for block of the row:                 keys; the maximum so far, and the sums relative to it, go on from block to block
        scores, terms, weights              a tile in registers: a thread has the same elements of all three
        maximum, scale, sum of each row     each thread reduces what it has of a row, then one thread for each row what these have
        sums                                a tile in registers, scaled, and the products of weights and values added

The factors of both products are read from shared memory: slices of queries and keys, the weights of a block, the values of a block, which
are copied while the sums of the block before are added up. No array of rows x keys is ever stored, and what hangs over an edge is zero.

Tensor cores compute both products where their instruction computes the same as the sums (see `precision`). Their warps stand along the
rows, so that four neighbouring threads have a row; terms and weights lie in registers as the fragments of the scores do.

Sources: T. Dao et al., "FlashAttention" (2022); T. Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tcomp.errors import ScheduleError
from tcomp.ir.dtypes import itemsize
from tcomp.ir.instruction import WARP
from tcomp.ir.loops import Accumulate
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, reduction_nest, result_nest, stage_axes, write_nests
from tcomp.schedules.gpu import block_tiles, tensor_cores, thread_mapping as T
from tcomp.schedules.gpu.block_tiles import SINGLE_WAVE, SLICE_WAIT, Product, Side, Tile
from tcomp.schedules.gpu.gemm import ASYNC_COPY_ARCHITECTURE, hold_in_registers, map_elements, multiply_in_slices
from tcomp.schedules.groups import SoftmaxProduct, row_and_column_loops
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import fuse_all, unroll
from tcomp.target import CudaTarget

SIDE_THREADS = 16  # threads along each side of a tile: 256 in all
SLICE_DEPTH = 16  # elements of a slice of queries and keys: 64 bytes of each row, two sectors of memory
STAGES = 2  # slices, and blocks of values, in shared memory: the next ones are copied while these are used
EXPONENTIAL = 8  # cycles of a warp for an element of the scores: exponential, reductions of its row, store of its weight (an estimate)
MAX_ACCUMULATORS, MAX_TENSOR_ACCUMULATORS = 112, 160  # 32-bit registers of a thread for the elements of its tiles, of 255; by tensor cores
MIN_SM_ROWS = 16  # rows that each SM should get at least: half a tile of the smallest ones
WIDTHS = range(block_tiles.MIN_EXTENT, 257)  # numbers of columns for which there are tiles that keep a multiprocessor busy


@dataclass(frozen=True, slots=True)
class Products:
    """The products: the scores (None if these are read from memory), and the sums. `rank`: of the maximum, whose last axis are the rows."""

    scores: Product | None
    sums: Product
    rank: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles that a block computes: `scores` of one block of keys at a time, and `sums`. Both have the same rows and threads along
    rows."""

    scores: Tile
    sums: Tile

    def shared(self, size: int, stages: int) -> int:
        """Bytes of shared memory, at most, for elements of `size` bytes."""
        rows, keys = self.scores.rows.size, self.scores.columns.size
        depth, lanes = self.scores.depth, 4 if self.scores.tensor else SIDE_THREADS
        narrow = itemsize(self.scores.tensor) if self.scores.tensor else size
        staged = stages * ((rows + keys) * (depth + 8) + (keys + 8) * (self.sums.columns.size + 8)) + rows * (keys + 8)
        return narrow * staged + size * rows * (2 * lanes + 3)


def schedule(s: Schedule, found: SoftmaxProduct, target: CudaTarget, knobs: Knobs) -> None:
    """One block for each tile of rows. Raises `ScheduleError` where the structure is another one, or a step is refused."""
    products = _products(s, found, target)
    product, acc = products.sums, products.sums.reduction.writes.name
    options = _options(products, target)
    sizes = tuple((t.scores.rows.threads, t.scores.rows.per_thread, t.scores.columns.per_thread) for t in options)
    tiles = options[sizes.index(knobs.choice((found.maximum, "tile"), sizes, sizes[0]))]
    out = result_nest(s.kernel, found.result)
    width = 1 if product.along_reduction[1] else T.vector_width(product.reduction, out, tiles.sums.columns.per_thread)
    (reduction,) = reduction_nest(s.kernel, found.maximum).reduction_loops

    for name in found.elements:
        s.inline(name)
    rows, columns, others = row_and_column_loops(s, found, reduction_nest(s.kernel, acc))
    around, row = s.split(rows.var.name, tiles.scores.rows.size)
    once, column = s.split(columns.var.name, tiles.sums.columns.size)
    s.reorder(*others, around, once, row, column)
    home = fuse_all(s, [*others, around, once])
    for name in (*found.sums, found.maximum):
        s.compute_at(name, home, "register")  # whole tiles, where there are fewer rows
    blocks, terms, weights, scale = s.online(found.maximum, reduction.var.name, tiles.scores.columns.size)
    of_rows = [name for name in (found.maximum, scale, *found.sums) if name != acc]
    for name in (terms, weights, *of_rows):
        s.set_scope(name, "shared" if name in of_rows else "register")
    if found.scores is not None:
        s.compute_at(found.scores, blocks, "register")
    s.bind(home, "block.x")

    for c in write_nests(s.kernel.body):
        name, sides = c.leaf.buffer.name, (c.loop_along(-2), c.loop_along(-1))
        if name in of_rows:
            _map_rows(s, c, tiles.scores)
        elif name in (terms, weights):
            map_elements(s, tiles.scores, _by_axis(tiles.scores, sides), 1)
        elif name == acc and isinstance(c.leaf, Accumulate):
            product = replace(product, reduction=c, sliced=c.reduction_loops[0])
        elif name == acc and c.leaf.value.op != "const":  # `multiply_in_slices` makes the nest that clears them
            map_elements(s, tiles.sums, _by_axis(tiles.sums, sides), width)
    map_elements(s, tiles.sums, _by_axis(tiles.sums, (row, column)), width)
    for name in of_rows:
        s.relayout(name, _layout_of_rows(products.rank, tiles.scores))
    for name in (terms, weights):
        if tiles.scores.tensor:
            s.relayout(name, tensor_cores.fragment_layout(tiles.scores, products.rank + 1))
        else:
            hold_in_registers(s, name, tiles.scores, 1)
    if products.scores is not None:
        assert found.scores is not None
        step, slices = multiply_in_slices(s, found.scores, products.scores, tiles.scores, 1)
        _pipeline(s, step, slices, target)
    _, (_, copied) = multiply_in_slices(s, acc, product, tiles.sums, width, owner=tiles.scores)
    s.clean()  # of the values of a block there is one slice
    _pipeline(s, blocks, [copied], target)


def _pipeline(s: Schedule, loop: str, copies: Sequence[str], target: CudaTarget) -> None:
    """Copy for the next iteration of a loop, if it has several."""
    if target.compute_capability >= ASYNC_COPY_ARCHITECTURE and loop in s.loops and s.loops[loop].extent != 1:
        s.pipeline(loop, STAGES, *copies)


def _no_tiles(why: str) -> ScheduleError:
    return ScheduleError("there are no tiles of rows and columns", why=why)


def _by_axis(tile: Tile, loops: tuple[str | None, str | None]) -> dict[int, str]:
    first, second = loops
    if first is None or second is None:
        raise _no_tiles("a nest has no loop for one of them")
    return dict(zip(tile.axes, (first, second), strict=True))


def _layout_of_rows(rank: int, tile: Tile, lanes: str = "") -> str:
    """How what belongs to the rows of a tile lies: its last dimension is cut as the rows are among the threads."""
    thread, one = T.digits(T.LETTERS[rank - 1], tile.rows.per_thread)
    return T.layout([*T.LETTERS[: rank - 1], *((one, thread, lanes) if lanes else (thread, one))])


def _map_rows(s: Schedule, c: Nest, tile: Tile) -> None:
    """Map a stage with one element for each row. A reduction along the row: each thread reduces its elements, then one thread these partial
    results."""
    row, name = c.loop_along(-1), c.leaf.buffer.name
    assert row is not None
    if isinstance(c.leaf, Accumulate):
        (reduction,) = _reduction_loops(s, name)
        partial = s.rfactor(name, *(tensor_cores.lanes_of_row(s, reduction) if tile.tensor else (reduction, tile.columns.threads)))
        s.set_scope(partial, "shared")
        for is_reduction in (False, True):
            *_, line, lane = stage_axes(s.kernel, partial, is_reduction)
            if tile.tensor:
                one = tensor_cores.map_rows(s, tile, line, lane)
            else:
                thread, one = s.split(line, tile.rows.per_thread)
                s.reorder(thread, lane, one)
                T.bind(s, {thread: "thread.y", lane: "thread.x"})
            s.unroll(one)
        unroll(s, _reduction_loops(s, partial))
        if not tile.tensor:
            rank = len(c.leaf.indices)
            s.relayout(partial, _layout_of_rows(rank, tile, T.LETTERS[rank]))
        *_, row = stage_axes(s.kernel, name, True)
        unroll(s, _reduction_loops(s, name))
    thread, one = s.split(row, tile.rows.per_thread)
    T.bind(s, {thread: "thread.y", one: "thread.x"})


def _reduction_loops(s: Schedule, name: str) -> list[str]:
    """The loops that a stage is reduced over."""
    c = next(c for c in write_nests(s.kernel.body) if isinstance(c.leaf, Accumulate) and c.leaf.buffer.name == name)
    return T.names(c.reduction_loops)


def _products(s: Schedule, found: SoftmaxProduct, target: CudaTarget) -> Products:
    """Raises `ScheduleError` unless the scores are a product of rows and keys, if they are one, and the sums one of rows and columns."""

    def of(name: str) -> Product:
        reduction = reduction_nest(s.kernel, name)
        product, rank = block_tiles.find(reduction, result_nest(s.kernel, name), target), len(reduction.leaf.indices)
        if product is None or (product.rows[-1], product.columns[-1]) != (rank - 2, rank - 1):
            raise _no_tiles(f"`{name}` is not a product of matrices that a block computes in tiles")
        return product

    rank = len(reduction_nest(s.kernel, found.maximum).leaf.indices)
    wide = [name for name in found.sums if len(reduction_nest(s.kernel, name).leaf.indices) > rank]
    if len(wide) != 1:
        raise ScheduleError("there is not one product with the weights", why=f"there are {len(wide)}")
    products = Products(of(found.scores) if found.scores else None, of(wide[0]), rank)
    if products.scores and products.scores.tensor != products.sums.tensor:
        raise _no_tiles("tensor cores compute one of the products, and not the other")
    reduction = products.sums.reduction
    if len(reduction.reduction_loops) != 1 or not isinstance(reduction.spatial[-1].extent, int):
        why = f"the number of columns of `{wide[0]}` is not known, or it is a sum over several axes"
        raise ScheduleError("there are no tiles of sums", why=why)
    return products


def _options(products: Products, target: CudaTarget) -> list[Tiles]:
    """The tiles that fit, best first."""
    stages = STAGES if target.compute_capability >= ASYNC_COPY_ARCHITECTURE else 1
    values = products.sums.reduction
    size, most = itemsize(values.writes.dtype), MAX_TENSOR_ACCUMULATORS if products.sums.tensor else MAX_ACCUMULATORS
    options = [t for t in _candidates(products) if t.shared(size, stages) <= target.shared_per_block]
    options = [t for t in options if (t.sums.accumulators + 3 * t.scores.accumulators) * size <= 4 * most]  # scores, terms, weights
    if not options:
        why = f"{values.spatial[-1].extent} of each row are too many for the threads of a block"
        raise ScheduleError("the sums of a row do not fit", why=why)
    return sorted(options, key=lambda t: _cycles(products, t, t.shared(size, stages), target))


def _candidates(products: Products) -> Iterator[Tiles]:
    """With all columns. Warps of tensor cores stand along the rows, so that four neighbours have a row."""
    values, tensor, row_axis = products.sums.reduction, products.sums.tensor, products.rank - 1
    rank, columns = len(values.leaf.indices), extent_of(values.spatial[-1].extent)
    if tensor:
        wide, across, depth, together = -(-columns // 8) * 8, 1, 2 * block_tiles.tensor_depth(tensor), WARP
        shapes = itertools.product((2, 4, 8), (16, 32), (16, 32, 64))
    else:
        wide, across, depth, together = -(-columns // SIDE_THREADS), SIDE_THREADS, SLICE_DEPTH, 1
        shapes = itertools.product((SIDE_THREADS,), (2, 4, 8), (1, 2, 4))
    for threads, each, keys in shapes:
        row, key, column = (16, 8, 8) if tensor else (each, keys, wide)
        scores = Side((row_axis,), threads, each, row), Side((row_axis + 1,), across, keys, key)
        sums = Side((rank - 2,), threads, each, row), Side((rank - 1,), across, wide, column)
        yield Tiles(Tile(*scores, depth, tensor, together), Tile(*sums, across * keys, tensor, together))


def _cycles(products: Products, tiles: Tiles, shared: int, target: CudaTarget) -> float:
    """How long the busiest SM computes all its rows (see `block_tiles`)."""
    product, keys = products.sums, tiles.scores.columns.size
    alone = SINGLE_WAVE if (target.gpu.shared << 10) // shared < 2 else 1.0  # nobody else computes while threads wait for each other
    exponentials = tiles.scores.accumulators * EXPONENTIAL * (tiles.scores.threads // WARP)
    each = keys * product.cycles_of_block(tiles.sums) + exponentials + 4 * SLICE_WAIT
    if products.scores is not None:
        each += products.scores.length * (products.scores.cycles_of_block(tiles.scores) + SLICE_WAIT / tiles.scores.depth)
    return each * block_tiles.waves(product.blocks(tiles.sums), target) * alone * -(-product.length // keys)
