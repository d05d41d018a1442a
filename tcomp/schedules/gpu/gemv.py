"""Default GPU schedule of products with few rows: vectors by matrices, as steps of recurrent nets and of decoding are, and batches of them.

What counts is how fast the wide factor streams from memory, each element of which is used once for each of the rows. So a block takes a
strip of neighbouring columns, for all rows; its threads divide the reduction among them, as well as the columns, neighbours in neighbouring
vectors. The partial sums are reduced across threads in shared memory, always in the same order.

    strip of 32 columns, 256 threads      thread n: columns 4 (n mod 8) .. + 4, elements n / 8, n / 8 + 32, n / 8 + 64, ... of the reduction

Strips are as narrow as it takes to fill the machine. Where even the narrowest are too few, the reduction is split among blocks first
(`split_k`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.access import linear_index, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.linear import linear
from tcomp.ir.loops import SERIAL, Accumulate, walk
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, iterations, reduction_nest, result_nest, stage_axes
from tcomp.schedules.gpu import thread_mapping as T
from tcomp.schedules.gpu.block_tiles import MIN_EXTENT, factors_of
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import fuse_all
from tcomp.target import CudaTarget

MIN_LENGTH = 32  # elements of the reduction: shorter ones are left to one thread each, as a warp could not split them
MAX_COLUMNS = 1 << 17  # more columns fill a GPU with one thread for each (64 warps for each of 64 SMs)
MAX_PENDING_LOADS = 8  # elements of the reduction that a thread loads before it needs the first: they take 32 registers
TREE_CYCLES = 12  # cycles that a partial sum takes in shared memory in the end: its load and addition
WIDTHS = (16, 32, 64, 128)  # columns of a block: bounds the search, as the next two do
THREADS = (32, 64, 128, 256, 512)  # threads of a block: from one warp on
SPLITS = (1, 2, 4, 8, 16, 32)  # blocks of a strip
MIN_SHARE = 4  # elements of the reduction for each thread, at least


@dataclass(frozen=True, slots=True)
class Gemv:
    """`rows`: the axes of the result that do not move the wide factor. A block computes `width` columns, `each` of them a thread, by
    `parts` of the reduction; the reduction is split among `blocks` blocks."""

    rows: tuple[int, ...]
    width: int
    each: int
    parts: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.width // self.each * self.parts


def find(reduction: Nest, out: Nest, target: CudaTarget) -> Gemv | None:
    """The best strip for a product of few rows, by an analytic model; None for other reductions."""
    axes = reduction.spatial
    if not factors_of(reduction) or not axes or not reduction.reduction_loops or reduction.leaf.indices != tuple(x.var for x in axes):
        return None
    lane, longest = axes[-1], T.longest(reduction.reduction_loops)
    wide = [r for r in reduction.reads if lane.var in E.variables(r)]
    steps = [stride(r, lane.var) for r in wide] + [stride(E.read(out.writes, out.leaf.indices), out.loops[-1].var)]
    if not wide or set(steps) != {1} or extent_of(longest.extent) < MIN_LENGTH or extent_of(lane.extent) < MIN_EXTENT:
        return None
    rows = tuple(d for d, x in enumerate(axes) if not any(x.var in E.variables(r) for r in wide))
    if not all(isinstance(axes[d].extent, int) for d in rows) or iterations(axes[d] for d in rows) >= MIN_EXTENT:
        return None
    if iterations(x for d, x in enumerate(axes) if d not in rows) > MAX_COLUMNS:
        return None
    each = T.widest_vector(reduction, out)  # neighbouring columns of a thread: as many as it can load and store at once
    strides = [c for r in wide for m, c in linear(linear_index(r.attr, r.args)).items() if m != (lane.var,)]
    while each > 1 and (not isinstance(lane.extent, int) or any(n % each for n in (lane.extent, *strides))):
        each //= 2
    length, columns = extent_of(longest.extent), extent_of(lane.extent)
    splits = SPLITS if all(isinstance(x.extent, int) for x in reduction.loops) else (1,)
    strips = (
        Gemv(rows, width, each, parts, blocks)
        for width, threads, blocks in itertools.product(WIDTHS, THREADS, splits)
        if (parts := threads * each // width) > 1 and parts * blocks * MIN_SHARE <= max(length, 2 * MIN_SHARE)
        if width == WIDTHS[0] or width < 2 * columns
    )
    return min(strips, key=lambda strip: _nanoseconds(reduction, strip, wide, target), default=None)


def _nanoseconds(reduction: Nest, strip: Gemv, wide: list[E.Expr], target: CudaTarget) -> float:
    """The time to load the wide factor, limited by the bytes in flight, and to add up the partial sums."""
    gpu, depth = target.gpu, iterations(reduction.reduction_loops)
    columns = [extent_of(x.extent) for d, x in enumerate(reduction.spatial) if d not in strip.rows]
    rows = iterations(reduction.spatial[d] for d in strip.rows)
    size = max(itemsize(r.attr.dtype) for r in wide)
    blocks = prod(columns[:-1]) * -(-columns[-1] // strip.width) * strip.blocks
    share = depth / (strip.parts * strip.blocks)  # of a thread
    moved = depth * prod(columns) * size
    of_block = strip.threads * strip.each * size * min(MAX_PENDING_LOADS, share)
    flying = min(of_block * -(-blocks // gpu.sms), gpu.in_flight) * min(blocks, gpu.sms)
    streamed = moved / gpu.memory + moved * gpu.latency / flying  # the less is under way, the more often memory waits
    reduced = strip.parts * -(-rows * strip.width // strip.threads) * TREE_CYCLES / gpu.ghz * max(1, blocks / (8 * gpu.sms))
    again = gpu.launch + 2 * rows * prod(columns) * strip.blocks * itemsize(reduction.writes.dtype) / gpu.cache
    return streamed + reduced + (again if strip.blocks > 1 else 0)


def split_k(s: Schedule, acc: str, reduction: Nest, strip: Gemv) -> str | None:
    """Cut the reduction of few strips into parts that fill the machine; the name of the stage of their sums."""
    if strip.blocks == 1:
        return None
    return T.split_reduction(s, acc, -(-extent_of(T.longest(reduction.reduction_loops).extent) // strip.blocks))


def schedule(s: Schedule, result: str, acc: str, target: CudaTarget) -> None:
    """One block a strip. Raises `ScheduleError` where a step is refused."""
    reduction, out = reduction_nest(s.kernel, acc), result_nest(s.kernel, result)
    strip = find(reduction, out, target)
    assert strip is not None
    partial = T.partial_sums(s, acc, T.longest(reduction.reduction_loops).var.name, strip.parts)
    local = s.cache_write(partial, f"{partial}.acc")

    loops = T.names(out.loops)
    loops[-1], column = s.split(loops[-1], strip.width)
    rows = [loops[d] for d in strip.rows]
    around = [x for x in loops if x not in rows]
    s.reorder(*around, *rows, column)
    home = fuse_all(s, around)
    s.bind(home, "block.x")
    for stage in (acc, partial):
        s.compute_at(stage, home, "shared")
    _partial_sums(s, partial, local, strip)
    for elements in (stage_axes(s.kernel, acc, False), stage_axes(s.kernel, acc, True), [*rows, column]):
        T.over_threads(s, elements, strip.threads)


def _partial_sums(s: Schedule, partial: str, local: str, strip: Gemv) -> None:
    """Every thread sums up its part, for its columns and all rows, in registers."""
    lane, *axes = stage_axes(s.kernel, partial, False)
    axes[-1], vector = s.split(axes[-1], strip.each)
    rows = axes[:-1]
    s.reorder(lane, axes[-1], *rows, vector)
    thread = s.fuse(lane, axes[-1])
    s.bind(thread, "thread.x")
    s.compute_at(local, thread, "register")
    T.lanes(s, [*rows, vector], strip.each)
    T.lanes(s, stage_axes(s.kernel, local, False), strip.each)
    spatial = stage_axes(s.kernel, local, True)
    update = next(x for x in walk(s.kernel.body) if isinstance(x, Accumulate) and x.buffer.name == local)
    used = E.variables(*update.indices)
    reductions = T.names(x for x in editing.enclosing(s.kernel, update) if x.kind == SERIAL and x.var not in used)
    s.reorder(*reductions, *spatial, reassociate=True)
    extent = editing.find_loop(s.kernel, reductions[-1]).extent
    steps = max((n for n in range(2, MAX_PENDING_LOADS + 1) if isinstance(extent, int) and extent % n == 0), default=1)
    if steps > 1:
        s.unroll(reductions[-1] if extent == steps else s.split(reductions[-1], steps)[1])
    T.lanes(s, spatial, strip.each)
