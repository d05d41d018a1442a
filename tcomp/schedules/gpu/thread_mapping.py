"""What the default GPU schedules have in common: lanes of a thread, the width of its accesses, axes of a block, partial sums."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import Accumulate
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, is_product, reduction_nest, stage_axes
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule

VECTOR_BYTES = 16  # the widest access of a thread, on every CUDA architecture


def is_contraction(reduction: Nest) -> bool:
    """A sum of products of what is read."""
    leaf = reduction.leaf
    return isinstance(leaf, Accumulate) and leaf.reducer.combine.op == "add" and is_product(reduction)


def widest_vector(reduction: Nest, out: Nest) -> int:
    """Lanes of a vector access that fits all that two nests read and write."""
    buffers = (reduction.writes, out.writes, *(r.attr for n in (reduction, out) for r in n.reads))
    return VECTOR_BYTES // max(itemsize(b.dtype) for b in buffers)


def vector_width(reduction: Nest, out: Nest, columns: int) -> int:
    """Lanes of a vector access along the columns of a register tile."""
    width = widest_vector(reduction, out)
    while columns % width:
        width //= 2
    return width


def lanes(s: Schedule, loops: Sequence[str], width: int) -> None:
    """Loops over a register tile: unrolled, the last in vectors of `width`."""
    loops = list(loops)
    if loops and width > 1:
        extent = editing.find_loop(s.kernel, loops[-1]).extent
        if extent != width:
            loops[-1], lane = s.split(loops[-1], width)
        else:
            lane = loops.pop()
        s.vectorize(lane)
    for x in loops:
        s.unroll(x)


def fuse_all(s: Schedule, loops: Sequence[str]) -> str:
    """Perfectly nested loops as one; returns its name."""
    flat = loops[0]
    for following in loops[1:]:
        flat = s.fuse(flat, following)
    return flat


def partial_sums(s: Schedule, acc: str, reduction: str, parts: int) -> str:
    """Split a sum into partial sums, numbered by the first index of their stage, whose name is returned."""
    partial = s.rfactor(acc, reduction, parts)
    s.apply("mask", partial)
    letters = "abcdefghijklmnop"[: len(editing.find_buffer(s.kernel, partial).shape)]
    s.relayout(partial, f"({','.join([letters[-1], *letters[:-1]])})")
    return partial


def split_reduction(s: Schedule, acc: str, length: int) -> str | None:
    """Split the longest reduction loop of a sum into parts of a length, each with partial sums; the name of their stage, None for one
    part."""
    cut = max(reduction_nest(s.kernel, acc).reduction_loops, key=lambda x: extent_of(x.extent))
    outer, _ = s.split(cut.var.attr.name, length)
    number = extent_of(editing.find_loop(s.kernel, outer).extent)
    if number < 2:
        return None
    partial = partial_sums(s, acc, outer, number)
    for is_reduction in (False, True):
        s.reorder(*stage_axes(s.kernel, partial, is_reduction))
    return partial
