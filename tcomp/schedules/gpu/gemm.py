"""Default GPU schedule of products: tiles of the result in registers, slices of both factors in shared memory, copied ahead.

What counts is the structure of the sum: some axes of the result move one factor and not the other (its *rows*), some the other one (its
*columns*), the rest both (batches). So matrix products, convolutions in any layout, and products of what other operators computed on the
fly are one family. A block computes a tile of rows x columns over the whole reduction, in slices; `cache_factors` makes the slices, with
zeros where a tile hangs over an edge, and whatever the factors are: boxes of a matrix, shifted and padded boxes of an image (an implicit
product of matrices), values computed from either.

A side of a tile runs along one axis (each thread takes neighbouring elements), or along two, as the pixels of an image do: the threads
along the outer one, the elements of a thread along the inner one.

Tensor cores multiply by `mma`; on sm_90a alone a decision may also choose tiles of `wgmma`, which are not the default one before they were
seen on hardware (`wgmma`).

From sm_90 on a decision may have slices copied in bulk (`bulk_copies`); by default all threads copy them.

Where a result has too few tiles to fill the machine and its reduction is long, the reduction is split among blocks first (`split_k`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.ir import expr as E
from tcomp.ir.access import is_multiple, linear_index, without
from tcomp.ir.dtypes import itemsize
from tcomp.ir.instruction import WARPGROUP
from tcomp.ir.loops import Accumulate, For, Store, walk
from tcomp.schedules.analysis.access_patterns import Nest, bytes_of, extent_of, reduction_nest, result_nest, stage_axes
from tcomp.schedules.cost.gpu import OTHER_REGISTERS
from tcomp.schedules.gpu import bulk_copies, mma, wgmma
from tcomp.schedules.gpu.block_tiles import Product, Side, Tile, all_contiguous, best_split, find, reads_of, tiles
from tcomp.schedules.gpu.thread_mapping import VECTOR_BYTES, fuse_all, lanes, split_reduction, vector_width
from tcomp.schedules.handles import BufferCopy
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CudaTarget

MAX_UNROLLED = 16  # elements of a slice that a thread multiplies without a test of the loop: more only lengthens the code
MAX_STAGES = 4  # slices in shared memory: latency of memory is hidden by 3 ahead
ASYNC_COPY_ARCHITECTURE = 80  # compute capability (times 10) from which on copies into shared memory pass no register (`cp.async`)
SPLIT_GAIN = 1.15  # factor by which the model must find a split reduction faster: a second launch must not be lost by an error of the model
MIN_SPLIT_PART = 128  # elements of the reduction in each part: several slices


# ---------------------------------------------------------------- split-K


def split_k(s: Schedule, acc: str, target: CudaTarget) -> str | None:
    """Cut the reduction of a product with few tiles into parts that fill the machine; the name of the stage of their sums."""
    reduction = reduction_nest(s.kernel, acc)
    product = find(reduction, result_nest(s.kernel, acc), target)
    if product is None or not all(isinstance(x.extent, int) for x in reduction.loops):
        return None
    count = best_split(reduction, product, target, MIN_SPLIT_PART, SPLIT_GAIN)
    if count < 2:
        return None
    chunk = -(-max(extent_of(x.extent) for x in reduction.reduction_loops) // count)
    return split_reduction(s, acc, -(-chunk // 16) * 16 if chunk >= 16 else chunk)


# ---------------------------------------------------------------- the schedule


def schedule(s: Schedule, result: str, acc: str, target: CudaTarget, knobs: Knobs) -> None:
    """One block a tile. Raises `ScheduleError` where a step is refused."""
    reduction, out = reduction_nest(s.kernel, acc), result_nest(s.kernel, result)
    product = find(reduction, out, target)
    assert product is not None
    best = tiles(reduction, product, target)
    options = tuple(map(_option, best))
    tile = best[options.index(knobs.choice(f"{acc}.tile", options, options[0]))]
    width = vector_width(reduction, out, tile.columns.per_thread)
    if all_contiguous(reads_of(reduction, product)[1], product.sliced) or (len(tile.columns.axes) > 1 and tile.columns.per_thread != width):
        width = 1

    home, inside = _blocks(s, [x.var.attr.name for x in out.loops], tile)
    s.compute_at(acc, home, "register")
    elements(s, tile, inside, width)
    step, names = multiply_in_slices(
        s, acc, reduction, product, tile, width, bulk=lambda slices: _in_bulk(s, acc, slices, tile, target, knobs)
    )
    _pipeline(s, acc, step, names, tile, tile.blocks(reduction), target, knobs)


def multiply_in_slices(
    s: Schedule,
    acc: str,
    reduction: Nest,
    product: Product,
    tile: Tile,
    width: int,
    owner: Tile | None = None,
    bulk: Callable[[list[list[str]]], list[list[str]]] = lambda slices: [],
) -> tuple[str, tuple[BufferCopy, BufferCopy]]:
    """A tile of sums that has been moved to where it is read: slices of both factors in shared memory, accumulators in registers. Returns
    the loop over slices, and their names. `owner`: the tile whose elements the factor of the rows are; threads copy their own. `bulk` says
    which of the slices, given by the loops that fill them, are copied in bulk."""
    reads = reads_of(reduction, product)
    along = [all_contiguous(r, product.sliced) for r in reads]
    rows, columns = (f"{r[0].attr.name}.shared" for r in reads)
    names = [editing.fresh(s.kernel, rows), editing.fresh(s.kernel, columns + "2" * (rows == columns))]
    cleared = dict(enumerate(stage_axes(s.kernel, acc, False)))
    s.reorder(*(x for d, x in cleared.items() if d not in tile.axes), *(cleared[d] for d in tile.axes))
    step = _slice_loop(s, acc, reduction, product, tile)
    left, right = names if product.right == 1 else names[::-1]
    made = s.cache_factors(step, left, right, "shared")
    copies = made if product.right == 1 else made[::-1]
    slices = list[tuple[list[str], bool]]()
    for name, reads_along, side in zip(copies, along, (tile.rows, tile.columns), strict=True):
        if owner is not None and side is tile.rows:
            elements(s, owner, dict(zip(owner.axes, name.loads, strict=True)), 1)
            if tile.tensor:
                s.relayout(name, f"(a,b+0+{VECTOR_BYTES // itemsize(editing.find_buffer(s.kernel, name).dtype)})")
        else:
            slices.append((_slice(s, name, tile, side, reads_along), reads_along))
    in_bulk = bulk([loops for loops, _ in slices])
    for loops, reads_along in slices:
        others = (
            bulk_copies.fill(s, loops, tile.instruction_threads if tile.tensor else tile.columns.threads) if loops in in_bulk else loops
        )
        if others:
            _copy_by_threads(s, others, tile, reads_along)
    summed = dict(enumerate(stage_axes(s.kernel, acc, True)))
    elements(s, tile, cleared, width)
    if tile.tensor:
        cores = wgmma if tile.instruction_threads == WARPGROUP else mma
        cores.multiply(s, tile, summed, _innermost_loop(s, acc))
    else:
        _map_to_threads(s, tile, summed, width, _innermost_loop(s, acc))
    in_registers(s, acc, tile, width)
    return step, copies


def elements(s: Schedule, tile: Tile, axes: dict[int, str], width: int) -> None:
    """A nest over the elements of a tile, with these loops along its axes: each thread has its own."""
    if tile.tensor:
        (wgmma if tile.instruction_threads == WARPGROUP else mma).elements(s, tile, axes)
    else:
        _map_to_threads(s, tile, axes, width, None)


def in_registers(s: Schedule, acc: str, tile: Tile, width: int) -> None:
    """The elements of a tile lie thread by thread, or as instructions of tensor cores want them."""
    rank = len(editing.find_buffer(s.kernel, acc).shape)
    if tile.tensor:
        s.relayout(acc, (wgmma if tile.instruction_threads == WARPGROUP else mma).layout(tile, rank))
    else:
        _register_layout(s, acc, rank, tile, width)


def _option(tile: Tile) -> tuple[object, ...]:
    """What a decision records of a tile."""
    sides = (x for side in (tile.rows, tile.columns) for x in (side.axes, side.threads, side.per_thread))
    return (*sides, *(["wgmma"] if tile.instruction_threads == WARPGROUP else []))


def _blocks(s: Schedule, names: list[str], tile: Tile) -> tuple[str, dict[int, str]]:
    """The loop over tiles, and the loops inside of a tile by their axes."""
    inside = {}
    for d, n in (tile.rows.extents() | tile.columns.extents()).items():
        names[d], inside[d] = s.split(names[d], n)
    s.reorder(*names, *inside.values())
    home = fuse_all(s, names)
    s.apply("set_kind", home, "block.x")
    return home, inside


def _map_to_threads(s: Schedule, tile: Tile, axes: dict[int, str], width: int, slice_: str | None) -> None:
    """The loops inside of a tile: threads outside, then the slice of the reduction if there is one, the elements of a thread inside."""
    threads, elements = [], []
    for side in (tile.rows, tile.columns):
        if len(side.axes) == 2:
            thread, inner = axes[side.axes[0]], [axes[side.axes[1]]]
        elif side.per_thread == width or side is tile.rows:
            thread, one = s.split(axes[side.axes[0]], side.per_thread)
            inner = [one]
        else:  # as many elements side by side as an access takes, the next ones behind those of the other threads
            many, rest = s.split(axes[side.axes[0]], side.threads * width)
            if width > 1:
                thread, one = s.split(rest, width)
                inner = [many, one]
            else:
                thread, inner = rest, [many]
        threads.append(thread)
        elements += inner
    reductions = [] if slice_ is None else [slice_]
    if slice_ is not None and extent_of(editing.find_loop(s.kernel, slice_).extent) > MAX_UNROLLED:
        reductions = list(s.split(slice_, MAX_UNROLLED))
    s.reorder(*threads, *reductions, *elements)
    s.apply("set_kind", threads[0], "thread.y")
    s.apply("set_kind", threads[1], "thread.x")
    if reductions:
        s.unroll(reductions[-1])
    lanes(s, elements, width)


def _slice_loop(s: Schedule, acc: str, reduction: Nest, product: Product, tile: Tile) -> str:
    """The loop over slices of the reduction, outside of all that is inside of a tile."""
    spatial = stage_axes(s.kernel, acc, True)
    step, slice_ = s.split(product.sliced.var.attr.name, tile.depth)
    others = [x.var.attr.name for x in reduction.reduction_loops if x is not product.sliced]
    units = [spatial[d] for d in range(len(spatial)) if d not in tile.axes]
    s.reorder(*units, *others, step, *(spatial[d] for d in tile.axes), slice_, reassociate=True)
    return fuse_all(s, [*others, step])


def _innermost_loop(s: Schedule, acc: str) -> str:
    """The innermost loop around the sum: the slice."""
    found = ""
    for x in walk(s.kernel.body):
        if isinstance(x, For):
            found = x.var.attr.name
        if isinstance(x, Accumulate) and x.buffer.name == acc:
            break
    return found


def _in_bulk(s: Schedule, acc: str, slices: list[list[str]], tile: Tile, target: CudaTarget, knobs: Knobs) -> list[list[str]]:
    """Those of the slices that are copied in bulk, if a decision says so where some can be."""
    if tile.instruction_threads == WARPGROUP or not target.executes(bulk_copies.ARCH):
        return []
    possible = [loops for loops in slices if bulk_copies.is_possible(s, loops)]
    return possible if possible and knobs.choice(f"{acc}.copies", ("threads", "bulk"), "threads") == "bulk" else []


def _slice(s: Schedule, name: BufferCopy, tile: Tile, side: Side, along: bool) -> list[str]:
    """How a slice lies in shared memory; the loops that fill it.

    One that lies along the reduction in memory does so here, and is copied in vectors. Others lie along the tile, unless tensor cores want
    narrow elements side by side along the reduction, or all in core matrices. Of columns, neighbouring threads read neighbouring rows.
    """
    buffer = editing.find_buffer(s.kernel, name)
    loops = list(name.loads)
    letters = "abcdefghijklmnop"[: len(loops)]
    beside = VECTOR_BYTES // itemsize(buffer.dtype)  # free elements behind each row
    narrow = tile.tensor and (along or itemsize(buffer.dtype) < 4)
    if not along:
        s.reorder(loops[-1], *loops[:-1])
        loops = [loops[-1], *loops[:-1]]
    if tile.instruction_threads == WARPGROUP:
        s.relayout(name, wgmma.cores(tile, side))
        if along and len(side.axes) == 1:
            loops[:1] = s.split(loops[0], wgmma.ROWS)
    elif narrow or (along and side is tile.columns):  # neighbouring threads read rows that begin in different banks
        s.relayout(name, f"({','.join([*letters[:-1], f'{letters[-1]}+0+{beside}'])})")
    elif not along:
        last = letters[-2] + (f"+0+{2 * beside}" if tile.tensor else "")
        s.relayout(name, f"({','.join([letters[-1], *letters[:-2], last])})")
    return loops


def _copy_by_threads(s: Schedule, loops: list[str], tile: Tile, along: bool) -> None:
    """A slice, by all threads of the block, in vectors."""
    width = _copy_width(editing.find_loop(s.kernel, loops[-1]))
    lane = None
    if width > 1:
        loops[-1], lane = s.split(loops[-1], width)
        s.vectorize(lane)
    if tile.instruction_threads == WARPGROUP and along:  # neighbouring threads fill a core matrix, whose rows lie in other rows
        loops = [loops[0], loops[2], loops[1]]
        s.reorder(*loops)
    flat = fuse_all(s, loops)
    rest, thread = s.split(flat, tile.threads)
    axes: list[str] = []
    for n in (tile.instruction_threads, tile.rows.threads) if tile.tensor else (tile.columns.threads,):
        thread, x = s.split(thread, n)
        axes.append(x)
    axes.append(thread)
    s.reorder(*axes[::-1], rest, *([lane] if lane else []))
    for kind, x in zip(("thread.x", "thread.y", "thread.z"), axes, strict=False):
        s.apply("set_kind", x, kind)


def _copy_width(last: For) -> int:
    """How many neighbours a thread copies at once: as many as certainly lie aligned in a row, and are there or not together."""
    store = next(x for x in walk(last) if isinstance(x, Store))
    width = VECTOR_BYTES // itemsize(store.buffer.dtype)
    while extent_of(last.extent) % width:
        width //= 2
    for r in E.reads(store.value):
        step, rest = without(linear_index(r.attr, r.args), last.var) or (0, None)
        if step != 1 or rest is None:
            return 1
        while not is_multiple(rest, width) or extent_of(r.attr.shape[-1]) % width:
            width //= 2
    return width


def _register_layout(s: Schedule, acc: str, rank: int, tile: Tile, width: int) -> None:
    """The loops over threads index dimensions of their own."""
    threads, elements = [], []
    letters = "abcdefghijklmnop"
    for side in (tile.rows, tile.columns):
        axis = letters[side.axes[0]]
        if len(side.axes) == 2:
            threads.append(axis)
            elements.append(letters[side.axes[1]])
        elif side.per_thread == width or side is tile.rows:
            threads.append(f"{axis}/{side.per_thread}")
            elements.append(f"{axis}%{side.per_thread}")
        elif width > 1:
            threads.append(f"{axis}/{width}%{side.threads}")
            elements += [f"{axis}/{side.threads * width}", f"{axis}%{width}"]
        else:
            threads.append(f"{axis}%{side.threads}")
            elements.append(f"{axis}/{side.threads}")
    units = [letters[d] for d in range(rank) if d not in tile.axes]
    s.relayout(acc, f"({','.join([*units, *threads, *elements])})")


def _pipeline(s: Schedule, acc: str, step: str, copies: Sequence[str], tile: Tile, blocks: int, target: CudaTarget, knobs: Knobs) -> None:
    """Copy some slices ahead: as many as leave room for all the blocks that an SM gets, and has registers for.

    GPUs without copies in the background have one slice: a thread would keep what it copies in registers meanwhile.
    """
    size = sum(bytes_of(b) for b in (editing.find_buffer(s.kernel, copy) for copy in copies))
    steps = extent_of(editing.find_loop(s.kernel, step).extent)
    most = target.shared_per_block
    options = tuple(n for n in range(1, MAX_STAGES + 1) if n == 1 or (n <= steps and n * size <= most))
    together = min(-(-blocks // target.gpu.sms), target.gpu.registers // (tile.threads * (tile.accumulators + OTHER_REGISTERS)))
    fitting = [
        n
        for n in options
        if n == 1 or (n * size * max(1, together) <= target.gpu.shared << 10 and target.compute_capability >= ASYNC_COPY_ARCHITECTURE)
    ]
    stages = knobs.choice(f"{acc}.stages", options, max(fitting))
    if stages > 1:
        s.pipeline(step, stages, *copies)
