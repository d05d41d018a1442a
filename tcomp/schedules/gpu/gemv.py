"""Default GPU schedule of products with few rows: vectors by matrices, as steps of recurrent nets and of decoding are, and batches of them.

What counts is how fast the wide factor streams from memory, each element of which is used once for each of the rows. So a block takes a
strip of neighbouring columns, for all rows; its threads divide the reduction among them, as well as the columns, neighbours in neighbouring
vectors. The partial sums are reduced across threads in shared memory, always in the same order.

    strip of 32 columns, 256 threads      thread n: columns 4 (n mod 8) .. + 4, elements n / 8, n / 8 + 32, n / 8 + 64, ... of the reduction

Many bytes have to be under way for memory to be busy: strips are as narrow as it takes to fill the machine. Where even the narrowest are
too few, the reduction is split among blocks first (`split_k`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.access import linear_index, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import Accumulate, For, walk
from tcomp.ir.simplify import linear
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, is_sum, reduction_nest, result_nest, stage_axes
from tcomp.schedules.cost.gpu import LAUNCH_TIME
from tcomp.schedules.gpu.block_tiles import MIN_EXTENT
from tcomp.schedules.gpu.thread_mapping import fuse_all, lanes, partial_sums, split_reduction, widest_vector
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.cache_factors import product_of
from tcomp.schedules.schedule import Schedule
from tcomp.target import CudaTarget

MIN_LENGTH = 32  # elements of the reduction: shorter ones are left to one thread each, as a warp could not split them
MAX_COLUMNS = 1 << 17  # more columns fill a GPU with one thread for each (64 warps for each of 64 SMs)
LATENCY = 700  # nanoseconds from a load to its value when memory is busy, an estimate for current GPUs
LOADS_AHEAD = 8  # elements of the reduction that a thread loads before it needs the first: they take 32 registers
IN_FLIGHT = 48 << 10  # bytes of loads that an SM has under way at most; bandwidth times latency of an A100 asks for 13 KB of each
TREE_CYCLES = 12  # cycles that a partial sum takes in shared memory in the end: its load and addition


@dataclass(frozen=True, slots=True)
class Gemv:
    """`rows`: the axes of the result that do not move the wide factor. A block computes `width` columns, `each` of them a thread, by
    `parts` of the reduction; the reduction is divided among `blocks` blocks."""

    rows: tuple[int, ...]
    width: int
    each: int
    parts: int
    blocks: int


def find(reduction: Nest, out: Nest, target: CudaTarget) -> Gemv | None:
    """The best strip for a product of few rows, by an analytic model; None for other reductions."""
    if (
        not _is_sum_of_products(reduction)
        or not reduction.spatial
        or not reduction.reduction_loops
        or reduction.leaf.indices != tuple(x.var for x in reduction.spatial)
    ):
        return None
    lane, longest = reduction.spatial[-1], max(reduction.reduction_loops, key=lambda x: extent_of(x.extent))
    wide = [r for r in reduction.reads if lane.var in E.variables(r)]
    steps = [stride(r, lane.var) for r in wide] + [stride(E.read(out.writes, out.leaf.indices), out.loops[-1].var)]
    if not wide or set(steps) != {1} or extent_of(longest.extent) < MIN_LENGTH or extent_of(lane.extent) < MIN_EXTENT:
        return None
    rows = tuple(d for d, x in enumerate(reduction.spatial) if not any(x.var in E.variables(r) for r in wide))
    others = [x for d, x in enumerate(reduction.spatial) if d not in rows]
    few = (
        all(isinstance(reduction.spatial[d].extent, int) for d in rows)
        and prod(extent_of(reduction.spatial[d].extent) for d in rows) < MIN_EXTENT
    )
    if not few or prod(extent_of(x.extent) for x in others) > MAX_COLUMNS:
        return None
    each = _columns_per_thread(reduction, out, lane, wide)
    return min(_candidates(reduction, rows, each, longest), key=lambda strip: _nanoseconds(reduction, strip, wide, target), default=None)


def _is_sum_of_products(reduction: Nest) -> bool:
    """A sum of products of what is read, under a condition or not."""
    product = product_of(reduction.leaf)[0] if isinstance(reduction.leaf, Accumulate) else None
    return product is not None and is_sum(reduction) and all(E.reads(factor) for factor in product.args)


def _columns_per_thread(reduction: Nest, out: Nest, lane: For, wide: list[E.Expr]) -> int:
    """Neighbouring columns of a thread: as many as it can load and store at once."""
    width = widest_vector(reduction, out)
    strides = [c for r in wide for m, c in linear(linear_index(r.attr, r.args)).items() if m != (lane.var,)]
    while width > 1 and (not isinstance(lane.extent, int) or any(n % width for n in (lane.extent, *strides))):
        width //= 2
    return width


def _candidates(reduction: Nest, rows: tuple[int, ...], each: int, longest: For) -> Iterator[Gemv]:
    length = extent_of(longest.extent)
    fixed = all(isinstance(x.extent, int) for x in reduction.loops)
    for width in (16, 32, 64, 128):
        for threads in (32, 64, 128, 256, 512):
            parts = threads * each // width
            for blocks in (1, 2, 4, 8, 16, 32) if fixed else (1,):
                if (
                    (width == 16 or width < 2 * extent_of(reduction.spatial[-1].extent))
                    and parts > 1
                    and parts * blocks * 4 <= max(length, 8)
                ):
                    yield Gemv(rows, width, each, parts, blocks)


def _nanoseconds(reduction: Nest, strip: Gemv, wide: list[E.Expr], target: CudaTarget) -> float:
    """Until the wide factor has arrived, of which so many bytes are under way at a time; and until the partial sums are added up."""
    depth = prod(extent_of(x.extent) for x in reduction.reduction_loops)
    columns = [extent_of(x.extent) for d, x in enumerate(reduction.spatial) if d not in strip.rows]
    rows = prod(extent_of(reduction.spatial[d].extent) for d in strip.rows)
    size = max(itemsize(r.attr.dtype) for r in wide)
    blocks = prod(columns[:-1]) * -(-columns[-1] // strip.width) * strip.blocks
    threads = strip.width // strip.each * strip.parts
    share = depth / (strip.parts * strip.blocks)  # of a thread
    moved = depth * prod(columns) * size
    of_block = threads * strip.each * size * min(LOADS_AHEAD, share)
    flying = min(of_block * -(-blocks // target.gpu.sms), IN_FLIGHT) * min(blocks, target.gpu.sms)
    streamed = moved / target.gpu.memory + moved * LATENCY / flying  # the less is under way, the more often memory waits
    reduced = strip.parts * -(-rows * strip.width // threads) * TREE_CYCLES / target.gpu.ghz * max(1, blocks / (8 * target.gpu.sms))
    again = LAUNCH_TIME + 2 * rows * prod(columns) * strip.blocks * itemsize(reduction.writes.dtype) / target.gpu.cache
    return streamed + reduced + (again if strip.blocks > 1 else 0)


# ---------------------------------------------------------------- the schedule


def split_k(s: Schedule, acc: str, target: CudaTarget) -> str | None:
    """Cut the reduction of few strips into parts that fill the machine; the name of the stage of their sums."""
    reduction = reduction_nest(s.kernel, acc)
    strip = find(reduction, result_nest(s.kernel, acc), target)
    if strip is None or strip.blocks == 1:
        return None
    return split_reduction(s, acc, -(-max(extent_of(x.extent) for x in reduction.reduction_loops) // strip.blocks))


def schedule(s: Schedule, result: str, acc: str, target: CudaTarget) -> None:
    """One block a strip. Raises `ScheduleError` where a step is refused."""
    reduction, out = reduction_nest(s.kernel, acc), result_nest(s.kernel, result)
    strip = find(reduction, out, target)
    assert strip is not None
    longest = max(reduction.reduction_loops, key=lambda x: extent_of(x.extent))
    partial = partial_sums(s, acc, longest.var.attr.name, strip.parts)
    local = s.cache_write(partial, f"{partial}.acc")

    loops = [x.var.attr.name for x in out.loops]
    loops[-1], column = s.split(loops[-1], strip.width)
    rows = [loops[d] for d in strip.rows]
    s.reorder(*(x for x in loops if x not in rows), *rows, column)
    home = fuse_all(s, [x for x in loops if x not in rows])
    s.apply("set_kind", home, "block.x")
    for stage in (acc, partial):
        s.compute_at(stage, home, "shared")
    _partial_sums(s, partial, local, strip)
    for is_reduction in (False, True):
        _over_threads(s, stage_axes(s.kernel, acc, is_reduction), strip)
    _over_threads(s, [*rows, column], strip)


def _partial_sums(s: Schedule, partial: str, local: str, strip: Gemv) -> None:
    """Every thread sums up its part, for its columns and all rows, in registers."""
    lane, *axes = stage_axes(s.kernel, partial, False)
    axes[-1], vector = s.split(axes[-1], strip.each)
    rows = axes[:-1]
    s.reorder(lane, axes[-1], *rows, vector)
    thread = s.fuse(lane, axes[-1])
    s.apply("set_kind", thread, "thread.x")
    s.compute_at(local, thread, "register")
    lanes(s, [*rows, vector], strip.each)
    for is_reduction in (False, True):
        spatial = stage_axes(s.kernel, local, is_reduction)
        if is_reduction:
            reductions = _reduction_loops(s, local)
            s.reorder(*reductions, *spatial, reassociate=True)
            extent = editing.find_loop(s.kernel, reductions[-1]).extent
            ahead = max((n for n in range(2, LOADS_AHEAD + 1) if isinstance(extent, int) and extent % n == 0), default=1)
            if ahead > 1:
                s.unroll(reductions[-1] if extent == ahead else s.split(reductions[-1], ahead)[1])
        lanes(s, spatial, strip.each)


def _reduction_loops(s: Schedule, acc: str) -> list[str]:
    """The loops around a sum that do not say of what, outermost first."""
    update = next(x for x in walk(s.kernel.body) if isinstance(x, Accumulate) and x.buffer.name == acc)
    used = set(E.variables(*update.indices))
    return [x.var.attr.name for x in editing.enclosing(s.kernel, update) if x.kind == "serial" and x.var not in used]


def _over_threads(s: Schedule, loops: list[str], strip: Gemv) -> None:
    """Loops over the elements of a strip, by the threads of the block."""
    flat = fuse_all(s, loops)
    s.apply("distribute", flat, strip.width // strip.each * strip.parts, "serial", "thread.x", True)
