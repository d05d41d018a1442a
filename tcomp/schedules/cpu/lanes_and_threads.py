"""Lanes, tails and threads for the loops of a nest: what default schedules for a CPU have in common, whatever the nest computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, as_dim, as_expr
from tcomp.ir.loops import VECTORIZED, Buffer, For, Kernel, perfect
from tcomp.schedules.analysis.access_patterns import Nest, extent_of
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MAX_LANES = 64  # elements of a vectorized loop: bytes of a vector of 512 bits, as wide as code generators accept
MIN_PARALLEL_ELEMENTS = 1 << 15  # below so many elements waking threads costs more than they save: a parallel region takes half a microsecond
MIN_ITERATIONS = 64  # of the loop over threads, where outer loops have so many: enough for an even partition among any number of cores


def lanes_of(target: CpuTarget, buffers: Iterable[Buffer]) -> int:
    """Elements of the widest type involved that fill a vector register."""
    return min(MAX_LANES, max(1, target.vector_bits // 8 // max(itemsize(b.dtype) for b in buffers)))


def nest_lanes(target: CpuTarget, nest: Nest) -> int:
    """Elements of the widest type of a nest that fill a vector register."""
    return lanes_of(target, [nest.writes, *(r.attr for r in nest.reads)])


def divides(n: int, extent: Dim) -> bool:
    """Whether an extent is certainly a multiple of n."""
    return isinstance(extent, int) and extent % n == 0


def extent(s: Schedule, loop: str) -> Dim:
    """The extent of a loop."""
    return editing.find_loop(s.kernel, loop).extent


def size(s: Schedule, loop: str) -> int:
    """The extent of a loop as a number to reason with: see `extent_of`."""
    return extent_of(extent(s, loop))


def unroll(s: Schedule, loops: Iterable[str], lane: str | None = None) -> None:
    """Unroll loops, and vectorize the one behind them."""
    for name in loops:
        s.unroll(name)
    if lane is not None:
        s.vectorize(lane)


def split_tiles(s: Schedule, axes: Sequence[tuple[str, int]]) -> tuple[list[str], list[str], dict[str, Dim]]:
    """Split loops by the sizes of a tile: (loops around tiles, loops of a tile, where those around are to be cut, as the last tile is
    smaller)."""
    around, inside, cuts = list[str](), list[str](), dict[str, Dim]()
    for name, n in axes:
        whole = extent(s, name)
        outer, inner = s.split(name, n)
        if not divides(n, whole):
            cuts[outer] = as_dim(as_expr(whole) // n)
        around.append(outer)
        inside.append(inner)
    return around, inside, cuts


def partition_tails(s: Schedule, around: Sequence[str], cuts: Mapping[str, Dim]) -> list[list[str]]:
    """Cut nested loops where their last iterations are smaller; the nests of loops that threads share: these, and the tail of the first one.
    From the inside, as a loop that is cut has names of its own behind the cut."""
    shared = [list(around)]
    for name in reversed(around):
        if name in cuts:
            _, tail = s.partition(name, cuts[name])
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
    if not divides(lanes, whole):
        s.partition(outer, as_dim(as_expr(whole) // lanes))
    return outer


def threads(s: Schedule, loops: Sequence[str], pays: bool, knobs: Knobs) -> None:
    """Fuse perfectly nested outer loops until there are enough iterations, and run them on threads, by default if that pays."""
    if not loops:
        return
    nested, enough, iterations = 1, 1, size(s, loops[0])
    for name, following in pairwise(loops):
        inner = editing.find_loop(s.kernel, name).body
        if not isinstance(inner, For) or inner.var.name != following or inner.kind == VECTORIZED:
            break
        nested += 1
        if iterations < MIN_ITERATIONS:
            enough, iterations = nested, iterations * extent_of(inner.extent)
    count = knobs.choice(f"{loops[0]}.threads", range(nested + 1), enough if pays else 0)
    if count:
        current = loops[0]
        for following in loops[1:count]:
            current = s.fuse(current, following)
        s.parallel(current)


def nest_loops(kernel: Kernel, loop: str) -> list[str]:
    """The loops of the perfect nest that a loop stands at the top of (or in), from that loop inwards."""
    return [x.var.name for x in perfect(editing.find_loop(kernel, loop))[0]]
