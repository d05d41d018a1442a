"""Helpers of all default schedules for a CPU: lanes, tails, threads, prefetching, non-temporal stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf, prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.loops import UNROLLED, VECTORIZED, Accumulate, Buffer, For, If, Store, expressions, walk
from tcomp.ir.simplify import as_dim, simplify
from tcomp.schedules.analysis.access_patterns import Nest, extent_of
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import fuse_all
from tcomp.target import CpuTarget

MAX_LANES = 64  # elements of a vectorized loop: bytes of a vector of 512 bits, as wide as code generators accept
MIN_PARALLEL_ELEMENTS = 1 << 15  # with fewer elements threads cost more than they save: a parallel region takes half a microsecond
MIN_ITERATIONS = 64  # of the loop over threads, if outer loops have as many: enough for an even partition among any number of cores
STREAM_CACHES = 16  # second-level caches that a result exceeds, where it is to be stored past them: no reader finds it there


def lanes_of(target: CpuTarget, buffers: Iterable[Buffer]) -> int:
    """Elements of the widest type involved that fill a vector register."""
    return min(MAX_LANES, max(1, target.vector_bits // 8 // max(itemsize(b.dtype) for b in buffers)))


def nest_lanes(target: CpuTarget, nest: Nest) -> int:
    """Elements of the widest type of a nest that fill a vector register, or half of one: where rows of an odd number of halves follow each
    other without a gap (grouped convolutions), the lanes of the last vector that belong to the next row are masked at every step, which
    takes another instruction."""
    lanes = lanes_of(target, [nest.writes, *(r.attr for r in nest.reads)])
    columns = nest.spatial[-1] if nest.is_reduction and nest.spatial else None
    if columns is None or not isinstance(columns.extent, int) or columns.extent % lanes != lanes // 2 or not is_float(nest.writes.dtype):
        return lanes
    shared = any(stride(r, columns.var) == 0 for r in nest.reads)
    rows = any(r.args and r.args[-1] is columns.var and r.attr.shape[-1] == columns.extent for r in nest.reads)
    whole, halves = columns.extent // lanes + 2, columns.extent // (lanes // 2) * target.core.half_vector
    return lanes // 2 if shared and rows and lanes < columns.extent and halves <= whole else lanes


def divides(n: int, extent: E.Dim) -> bool:
    """Whether an extent is certainly a multiple of n."""
    return isinstance(extent, int) and extent % n == 0


def whole_tiles(extent: E.Dim, n: int) -> E.Dim | None:
    """How many tiles of `n` elements of a loop are whole, where the last one may not be; None where all are."""
    return None if as_dim(simplify(E.as_expr(extent) % n)) == 0 else as_dim(E.as_expr(extent) // n)


def extent(s: Schedule, loop: str) -> E.Dim:
    """The extent of a loop."""
    return editing.find_loop(s.kernel, loop).extent


def size(s: Schedule, loop: str) -> int:
    """The extent of a loop as a number to reason with: see `extent_of`."""
    return extent_of(extent(s, loop))


def split_tiles(s: Schedule, axes: Sequence[tuple[str, int]]) -> tuple[list[str], dict[str, E.Dim | None]]:
    """Split loops by the sizes of a tile: (the loops of a tile, the loops around with the number of their whole tiles; see
    `whole_tiles`)."""
    inside, around = list[str](), dict[str, E.Dim | None]()
    for name, n in axes:
        whole = extent(s, name)
        outer, inner = s.split(name, n)
        inside.append(inner)
        around[outer] = whole_tiles(whole, n)
    return inside, around


def partition_tails(s: Schedule, around: Sequence[str], cuts: Mapping[str, E.Dim | None]) -> list[list[str]]:
    """Cut nested loops where their last iterations are smaller; the nests of loops that threads share: these, and the tail of the first
    one. From the inside, as a loop that is cut has names of its own behind the cut."""
    shared = [list(around)]
    for name in reversed(around):
        if (whole := cuts.get(name)) is not None:
            try:
                _, tail = s.partition(name, whole)
            except ScheduleError:  # below 0 where a window is larger than the image, which never runs
                _, tail = s.partition(name, as_dim(simplify(E.maximum(whole, 0))))
            if name == around[0]:
                shared.append([tail, *(tail.copies[x] for x in around[1:])])
    return shared


def vector_tail(s: Schedule, loop: str, lanes: int) -> str | None:
    """Vector lanes along a loop, the remainder in a masked vector of its own; returns the loop over full vectors, if any."""
    whole = extent(s, loop)
    if isinstance(whole, int) and whole < lanes:
        width = 1 << (whole - 1).bit_length()
        if width > 1:
            s.vectorize(s.split(loop, width)[1])
        return None
    outer, lane = s.split(loop, lanes)
    s.vectorize(lane)
    partition_tails(s, [outer], {outer: whole_tiles(whole, lanes)})
    return outer


def threads(s: Schedule, loops: Sequence[str], pays: bool, knobs: Knobs, cuts: Mapping[str, E.Dim | None] | None = None) -> None:
    """Fuse perfectly nested outer loops until there are enough iterations, and run them on threads, by default if that pays; with `cuts`,
    once they have been cut there (see `partition_tails`)."""
    for names in partition_tails(s, loops, cuts or {}) if loops else ():
        nested, enough, iterations = 1, 1, least(extent(s, names[0]))
        for name, following in pairwise(names):
            inner = editing.find_loop(s.kernel, name).body
            if not isinstance(inner, For) or inner.var.name != following or inner.kind == VECTORIZED:
                break
            nested += 1
            if iterations < MIN_ITERATIONS:
                enough, iterations = nested, iterations * least(inner.extent)
        if count := knobs.choice((names[0], "threads"), range(nested + 1), enough if pays else 0):
            s.parallel(fuse_all(s, names[:count]))


def unguard_lanes(s: Schedule) -> None:
    """Accumulate the last vector of a row without a mask, where that is legal."""
    for x in list(walk(s.kernel.body)):
        if isinstance(x, For) and x.kind == VECTORIZED and isinstance(x.body, If) and isinstance(x.body.then, Accumulate):
            with suppress(ScheduleError):
                s.unguard(x.var.name)


def least(extent: E.Dim) -> int:
    """The fewest iterations of a loop that are of interest: one at least."""
    return max(1, E.bounds(extent)[0] or 0)


def size_of(b: Buffer) -> int:
    """Bytes that a buffer has at least, if any."""
    return prod(map(least, b.shape)) * itemsize(b.dtype)


def most(extent: E.Dim) -> float:
    """The most iterations that a loop may have: infinite where no limit is known."""
    limit = E.bounds(extent)[1]
    return inf if limit is None else limit


def most_of(b: Buffer) -> float:
    """Bytes that a buffer may have; without a limit, infinite."""
    return prod(map(most, b.shape)) * itemsize(b.dtype)


def is_streamed(s: Schedule, b: Buffer, target: CpuTarget, knobs: Knobs) -> bool:
    """Whether a buffer is a result that is stored past the caches, where its size is symbolic in runs in which it exceeds `stream_bytes`.
    Rows have to begin with a whole vector: such stores are aligned."""
    size = most_of(b) if b.name in {result.name for result in s.kernel.outputs} else 0
    aligned = size > target.l2 and (len(b.shape) == 1 or divides(target.vector_bits // 8 // itemsize(b.dtype), b.shape[-1]))
    return aligned and _fills_lines(s, b, target) and knobs.flag((b.name, "stream"), size > stream_bytes(target))


def stream(s: Schedule, b: Buffer, target: CpuTarget, knobs: Knobs) -> None:
    """Store a buffer past the caches if `is_streamed` says so: always, or where its size is known in a run alone, by that."""
    if is_streamed(s, b, target, knobs):
        limit = stream_bytes(target)
        s.stream(b.name, limit if size_of(b) <= limit < most_of(b) else 0)


def _fills_lines(s: Schedule, b: Buffer, target: CpuTarget) -> bool:
    """Whether the vectors of one cache line of a buffer are stored one after the other: the few buffers that collect stores past the caches
    write lines that are not complete to memory in parts, which takes several times as long."""
    vectors = target.core.line * 8 // target.vector_bits
    stores = [x for x in walk(s.kernel.body) if isinstance(x, Store) and x.buffer is b]
    return vectors <= 1 or all(_walks_along(s, x, target.vector_bits // 8 // itemsize(b.dtype), vectors) for x in stores)


def _walks_along(s: Schedule, store: Store, lanes: int, vectors: int) -> bool:
    """Whether the innermost loop that moves a vectorized store moves it by its lanes, for a multiple of so many vectors."""
    place = E.read(store.buffer, store.indices)
    around = [x for x in editing.enclosing(s.kernel, store) if x.kind != VECTORIZED and x.extent != 1]
    inner = next((x for x in reversed(around) if x.var in E.variables(*store.indices)), None)
    return inner is None or (stride(place, inner.var) == lanes and (inner.kind != UNROLLED or divides(vectors, inner.extent)))


def stream_bytes(target: CpuTarget) -> int:
    """Bytes beyond which results are stored past the caches: with smaller ones, the next kernel finds some in the last-level cache, which
    is shared, and on a virtual machine often slower than its size promises, hence the limit by the core's own."""
    return min(target.l3 // 4, STREAM_CACHES * target.l2)


def vectors_of_page(target: CpuTarget) -> int:
    """Vectors of a page, at whose end hardware stops to prefetch."""
    return target.core.page * 8 // target.vector_bits


def prefetch_vectors(s: Schedule, loop: str, vectors: int, done: set[Buffer], target: CpuTarget, knobs: Knobs) -> set[Buffer]:
    """Prefetch operands that come from memory `vectors` iterations before a serial loop reads them, one vector each; returns them.
    Those in `done` have been prefetched. Loads then overlap with computation, across pages as well."""
    x, found = editing.find_loop(s.kernel, loop), set[Buffer]()
    for b, r in {r.attr: r for statement in walk(x.body) for r in E.reads(*expressions(statement))}.items():
        dense = stride(r, x.var) == target.vector_bits // 8 // itemsize(b.dtype) and not E.reads(*r.args)
        large = b not in done and dense and size_of(b) > target.l2
        if large and (distance := knobs.choice((b.name, "prefetch"), (0, vectors, 2 * vectors), vectors)):
            s.prefetch(b.name, loop, distance)
            found.add(b)
    return found
