"""Default GPU schedule of products: tiles of the result in registers, slices of both factors in shared memory, copied in advance.

What counts is the structure of the sum: some axes of the result move one factor and not the other (its *rows*), some the other one (its
*columns*), the rest both (batches). So matrix products, convolutions in any layout, and products of what other operators computed on the
fly are one family. A block computes a tile of rows x columns (`block_tiles`) over the whole reduction, in slices; `cache_factors` makes
these, with zeros where a tile hangs over an edge, and whatever the factors are: boxes of a matrix or of a padded image, values computed
from either.

Tensor cores multiply by `mma`, on sm_90a by `wgmma` where the model finds that faster (`tensor_cores`). Where a result has too few
tiles to fill the machine and its reduction is long, the reduction is split among blocks first (`split_k`).
"""

from __future__ import annotations

from tcomp.ir import expr as E
from tcomp.ir.access import is_multiple, linear_index, without
from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import Accumulate, For, Store, walk
from tcomp.schedules.analysis.access_patterns import bytes_of, extent_of, reduction_nest, result_nest, stage_axes
from tcomp.schedules.cost.gpu import OTHER_REGISTERS
from tcomp.schedules.gpu import tensor_cores, thread_mapping as T
from tcomp.schedules.gpu.block_tiles import Product, Side, Tile, find
from tcomp.schedules.handles import BufferCopy
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import fuse_all, unroll
from tcomp.target import CudaTarget

MAX_UNROLLED = 16  # elements of a slice that a thread multiplies without a test of the loop: more only lengthens the code
MAX_STAGES = 4  # slices in shared memory: three that are under way hide the latency of memory
ASYNC_COPY_ARCHITECTURE = 80  # compute capability (times 10) from which on copies into shared memory pass no register (`cp.async`)
SPLIT_GAIN = 1.15  # factor by which the model must find a split reduction faster: a second launch must not be lost by an error of the model
MIN_SPLIT_PART = 128  # elements of the reduction in each part: several slices


def split_k(s: Schedule, acc: str, product: Product) -> str | None:
    """Cut the reduction of a product with few tiles into parts that fill the machine; the name of the stage of their sums."""
    if not all(isinstance(x.extent, int) for x in product.reduction.loops):
        return None
    if (parts := product.best_split(MIN_SPLIT_PART, SPLIT_GAIN)) < 2:
        return None
    length = -(-extent_of(T.longest(product.reduction.reduction_loops).extent) // parts)
    return T.split_reduction(s, acc, -(-length // 16) * 16 if length >= 16 else length)


def schedule(s: Schedule, result: str, acc: str, target: CudaTarget, knobs: Knobs) -> None:
    """One block a tile. Raises `ScheduleError` where a step is refused."""
    reduction, out = reduction_nest(s.kernel, acc), result_nest(s.kernel, result)
    product = find(reduction, out, target)
    assert product is not None
    best = product.tiles()
    sides = [[(x.axes, x.threads, x.per_thread) for x in (t.rows, t.columns)] for t in best]
    options = tuple((*a, *b, *(["wgmma"] if t.by_warpgroups else [])) for t, (a, b) in zip(best, sides, strict=True))
    tile = best[options.index(knobs.choice((acc, "tile"), options, options[0]))]
    width = T.vector_width(reduction, out, tile.columns.per_thread)
    if product.along_reduction[1] or (len(tile.columns.axes) > 1 and tile.columns.per_thread != width):
        width = 1

    blocks, inside = T.names(out.loops), dict[int, str]()
    for d, n in (tile.rows.extents() | tile.columns.extents()).items():
        blocks[d], inside[d] = s.split(blocks[d], n)
    s.reorder(*blocks, *inside.values())
    home = fuse_all(s, blocks)
    s.bind(home, "block.x")
    s.compute_at(acc, home, "register")
    map_elements(s, tile, inside, width)
    step, copies = multiply_in_slices(s, acc, product, tile, width)

    # As many slices are copied in advance as leave room for all the blocks that an SM gets, and has registers for.
    gpu, size = target.gpu, sum(bytes_of(editing.find_buffer(s.kernel, copy)) for copy in copies)
    steps = extent_of(editing.find_loop(s.kernel, step).extent)
    counts = tuple(n for n in range(1, MAX_STAGES + 1) if n == 1 or (n <= steps and n * size <= target.shared_per_block))
    resident = max(1, min(-(-product.blocks(tile) // gpu.sms), gpu.registers // (tile.threads * (tile.accumulators + OTHER_REGISTERS))))
    most = (gpu.shared << 10) // (size * resident) if target.compute_capability >= ASYNC_COPY_ARCHITECTURE else 1
    stages = knobs.choice((acc, "stages"), counts, max(n for n in counts if n == 1 or n <= most))
    if stages > 1:
        s.pipeline(step, stages, *copies, last=tile.by_warpgroups)  # while the tensor cores multiply in the background


def multiply_in_slices(
    s: Schedule, acc: str, product: Product, tile: Tile, width: int, owner: Tile | None = None
) -> tuple[str, tuple[BufferCopy, BufferCopy]]:
    """A tile of sums that has been moved to where it is read: slices of both factors in shared memory, accumulators in registers. Returns
    the loop over slices, and their names. `owner`: the tile whose elements the factor of the rows are; threads copy their own."""
    rows, columns = (f"{r[0].attr.name}.shared" for r in product.reads)
    names = editing.fresh(s.kernel, rows), editing.fresh(s.kernel, columns + "2" * (rows == columns))
    cleared = dict(enumerate(stage_axes(s.kernel, acc, False)))
    s.reorder(*(x for d, x in cleared.items() if d not in tile.axes), *(cleared[d] for d in tile.axes))
    spatial = stage_axes(s.kernel, acc, True)
    step, slice_ = s.split(product.sliced.var.name, tile.depth)
    others = T.names(x for x in product.reduction.reduction_loops if x is not product.sliced)
    units = [x for d, x in enumerate(spatial) if d not in tile.axes]
    s.reorder(*units, *others, step, *(spatial[d] for d in tile.axes), slice_, reassociate=True)
    step = fuse_all(s, [*others, step])
    made = s.cache_factors(step, names[1 - product.right], names[product.right], "shared")
    copies = made if product.right == 1 else made[::-1]
    for copy, along, side in zip(copies, product.along_reduction, (tile.rows, tile.columns), strict=True):
        if owner is not None and side is tile.rows:
            map_elements(s, owner, dict(zip(owner.axes, copy.loads, strict=True)), 1)
            if tile.tensor:
                s.relayout(copy, f"(a,b+0+{T.VECTOR_BYTES // itemsize(editing.find_buffer(s.kernel, copy).dtype)})")
        else:
            _copy_by_threads(s, _slice(s, copy, tile, side, along), tile, along)
    summed = dict(enumerate(stage_axes(s.kernel, acc, True)))
    map_elements(s, tile, cleared, width)
    update = next(x for x in walk(s.kernel.body) if isinstance(x, Accumulate) and x.buffer.name == acc)
    slice_ = editing.enclosing(s.kernel, update)[-1].var.name
    if tile.tensor:
        tensor_cores.multiply(s, tile, summed, slice_)
    else:
        _map_to_threads(s, tile, summed, width, slice_)
    hold_in_registers(s, acc, tile, width)
    return step, copies


def map_elements(s: Schedule, tile: Tile, axes: dict[int, str], width: int) -> None:
    """Map a nest over the elements of a tile, with these loops along its axes, to threads: each has its own."""
    if tile.tensor:
        tensor_cores.map_elements(s, tile, axes)
    else:
        _map_to_threads(s, tile, axes, width, None)


def hold_in_registers(s: Schedule, acc: str, tile: Tile, width: int) -> None:
    """Lay out the elements of a tile thread by thread, or by warp(group) and then as instructions of tensor cores want them."""
    (y, *rows), (x, *columns) = tile.pieces(lambda d, *factors: T.digits(T.LETTERS[d], *factors), width)
    s.relayout(acc, T.layout([*tile.outer_dims(len(editing.find_buffer(s.kernel, acc).shape)), y, x, *rows, *columns]))


def _map_to_threads(s: Schedule, tile: Tile, axes: dict[int, str], width: int, slice_: str | None) -> None:
    """The loops inside of a tile: threads outside, then the slice of the reduction if there is one, the elements of a thread inside."""
    (y, *rows), (x, *columns) = tile.pieces(lambda d, *factors: T.cut(s, axes[d], *factors), width)
    reductions = [] if slice_ is None else [slice_]
    if slice_ is not None and extent_of(editing.find_loop(s.kernel, slice_).extent) > MAX_UNROLLED:
        reductions = list(s.split(slice_, MAX_UNROLLED))
    s.reorder(y, x, *reductions, *rows, *columns)
    T.bind(s, {y: "thread.y", x: "thread.x"})
    unroll(s, reductions[-1:])
    T.lanes(s, [*rows, *columns], width)


def _slice(s: Schedule, copy: BufferCopy, tile: Tile, side: Side, along: bool) -> list[str]:
    """How a slice lies in shared memory; the loops that fill it.

    One that lies along the reduction in memory does so here, and is copied in vectors. Others lie along the tile, unless tensor cores want
    narrow elements side by side along the reduction, or whole rows of bytes. Of columns, neighbouring threads read neighbouring rows.
    """
    size, loops = itemsize(editing.find_buffer(s.kernel, copy).dtype), list(copy.loads)
    *dims, last = list(T.LETTERS[: len(loops)])
    pad = T.VECTOR_BYTES // size  # free elements behind each row
    if not along:
        loops = [loops[-1], *loops[:-1]]
        s.reorder(*loops)
    if tile.by_warpgroups:
        return loops  # as it is: in rows that the code generator swizzles
    if (tile.tensor and (along or size < 4)) or (along and side is tile.columns):  # neighbouring threads' rows begin in different banks
        s.relayout(copy, T.layout([*dims, f"{last}+0+{pad}"]))
    elif not along:
        s.relayout(copy, T.layout([last, *dims[:-1], dims[-1] + (f"+0+{2 * pad}" if tile.tensor else "")]))
    return loops


def _copy_by_threads(s: Schedule, loops: list[str], tile: Tile, along: bool) -> None:
    """A slice, by all threads of the block, in vectors."""
    width = _copy_width(editing.find_loop(s.kernel, loops[-1]))
    lane = []
    if width > 1:
        loops[-1], one = s.split(loops[-1], width)
        s.vectorize(one)
        lane = [one]
    rest, thread = s.split(fuse_all(s, loops), tile.threads)
    inner: list[str] = []
    for n in (tile.instruction_threads, tile.rows.threads) if tile.tensor else (tile.columns.threads,):
        thread, x = s.split(thread, n)
        inner.append(x)
    s.reorder(thread, *inner[::-1], rest, *lane)
    T.bind(s, dict(zip([*inner, thread], ("thread.x", "thread.y", "thread.z"), strict=False)))


def _copy_width(last: For) -> int:
    """How many neighbours a thread copies at once: as many as certainly lie aligned in a row, and are there or not together."""
    store = next(x for x in walk(last) if isinstance(x, Store))
    width = T.power_of_two(extent_of(last.extent), T.VECTOR_BYTES // itemsize(store.buffer.dtype))
    for r in E.reads(store.value):
        step, rest = without(linear_index(r.attr, r.args), last.var) or (0, None)
        if step != 1 or rest is None:
            return 1
        while not is_multiple(rest, width) or extent_of(r.attr.shape[-1]) % width:
            width //= 2
    return width
