"""Lanes and threads for the loops of a nest: what default schedules for a CPU have in common, whatever the nest computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, as_dim, as_expr
from tcomp.ir.loops import VECTORIZED, Buffer, For, Kernel, perfect
from tcomp.schedules.analysis.access_patterns import extent_of
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MOST_LANES = 64  # of a vectorized loop
SERIAL_ELEMENTS = 1 << 15  # below this many elements threads cost more than they save
SHARED = 64  # iterations of the loop over threads, where outer loops have so many


def lanes_of(target: CpuTarget, buffers: Sequence[Buffer]) -> int:
    """Elements of the widest type involved that fill a vector register."""
    return min(MOST_LANES, max(1, target.vector_bits // 8 // max(itemsize(b.dtype) for b in buffers)))


def divides(n: int, extent: Dim) -> bool:
    """Whether an extent is certainly a multiple of n."""
    return isinstance(extent, int) and extent % n == 0


def split_tiles(s: Schedule, axes: Sequence[tuple[str, int]]) -> tuple[list[str], list[str], dict[str, Dim]]:
    """Split loops by the sizes of a tile: (loops around tiles, loops of a tile, where those around are to be cut, as the last tile is
    smaller)."""
    around, inside, partial = list[str](), list[str](), dict[str, Dim]()
    for name, n in axes:
        extent = editing.find_loop(s.kernel, name).extent
        outer, inner = s.split(name, n)
        if not divides(n, extent):
            partial[outer] = as_dim(as_expr(extent) // n)
        around.append(outer)
        inside.append(inner)
    return around, inside, partial


def vector_tail(s: Schedule, loop: str, extent: Dim, lanes: int) -> str | None:
    """Vector lanes along a loop, the remainder in a masked vector of its own; returns the loop over full vectors, if any."""
    if isinstance(extent, int) and extent < lanes:
        width = 1 << (extent - 1).bit_length()
        if width <= 1:
            return None
        _, lane = s.split(loop, width)
        s.vectorize(lane)
        return None
    outer, lane = s.split(loop, lanes)
    s.vectorize(lane)
    if not divides(lanes, extent):
        s.partition(outer, as_dim(as_expr(extent) // lanes))
    return outer


def threads(s: Schedule, loops: Sequence[str], worthwhile: bool, knobs: Knobs) -> None:
    """Fuse perfectly nested outer loops until there is enough to share, and run them on threads."""
    if not loops:
        return
    nested, enough, iterations = 1, 1, extent_of(editing.find_loop(s.kernel, loops[0]).extent)
    for name, following in pairwise(loops):
        inner = editing.find_loop(s.kernel, name).body
        if not isinstance(inner, For) or inner.var.attr.name != following or inner.kind == VECTORIZED:
            break
        nested += 1
        if iterations < SHARED:
            enough, iterations = nested, iterations * extent_of(inner.extent)
    count = knobs.choice(f"{loops[0]}.threads", range(nested + 1), enough if worthwhile else 0)
    if count:
        current = loops[0]
        for following in loops[1:count]:
            current = s.fuse(current, following)
        s.parallel(current)


def nest_loops(kernel: Kernel, loop: str) -> list[str]:
    """The loops of the perfect nest that a loop stands at the top of (or in), from that loop inwards."""
    return [x.var.name for x in perfect(editing.find_loop(kernel, loop))[0]]
