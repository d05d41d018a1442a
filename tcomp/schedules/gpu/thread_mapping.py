"""Helpers of all default GPU schedules: loops by name and by axis, cuts of loops and the layouts that follow them, lanes, partial
sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import For
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, is_product, is_sum, reduction_nest, stage_axes
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import fuse_all, unroll

VECTOR_BYTES = 16  # bytes of the widest access of a thread, on every CUDA architecture
LETTERS = "abcdefghijklmnop"  # dimensions of a buffer, as layouts name them


def names(loops: Iterable[For]) -> list[str]:
    """The names of loops."""
    return [x.var.name for x in loops]


def bind(s: Schedule, axes: Mapping[str, str]) -> None:
    """Bind loops to the axes of a GPU: {loop: axis}."""
    for loop, axis in axes.items():
        s.bind(loop, axis)


def cut(s: Schedule, loop: str, *factors: int) -> list[str]:
    """Split a loop by the first factor, the inner loop by the next one, and so on; all loops, outermost first."""
    loops = [loop]
    for factor in factors:
        loops[-1:] = s.split(loops[-1], factor)
    return loops


def digits(dim: str, *factors: int) -> list[str]:
    """The pieces of a layout that correspond to the loops of `cut`: ["a/8", "a/2%4", "a%2"] for dimension a with factors 8 and 2."""
    highest = [f"{dim}/{factors[0]}" if factors else dim]
    return highest + [f"{dim}/{low}%{high // low}" if low > 1 else f"{dim}%{high}" for high, low in pairwise([*factors, 1])]


def layout(dims: Iterable[str]) -> str:
    """The text of a layout with these dimensions."""
    return f"({','.join(dims)})"


def over_threads(s: Schedule, loops: Sequence[str], threads: int) -> None:
    """Distribute perfectly nested loops, if there are any, over `threads` threads of a block; neighbours run neighbouring iterations."""
    if loops:
        s.distribute(fuse_all(s, loops), threads, "serial", "thread.x", strided=True)


def lanes(s: Schedule, loops: Sequence[str], width: int) -> None:
    """Loops over a register tile: unrolled, the last in vectors of `width`."""
    loops = list(loops)
    if loops and width > 1:
        whole = editing.find_loop(s.kernel, loops[-1]).extent == width
        loops[-1:] = [loops[-1]] if whole else s.split(loops[-1], width)
        s.vectorize(loops.pop())
    unroll(s, loops)


def is_contraction(reduction: Nest) -> bool:
    """A sum of products of what is read."""
    return is_sum(reduction) and is_product(reduction)


def longest(loops: Iterable[For]) -> For:
    """The loop with most iterations, the first of equal ones."""
    return max(loops, key=lambda x: extent_of(x.extent))


def widest_vector(reduction: Nest, out: Nest) -> int:
    """Lanes of a vector access that fits all that two nests read and write."""
    buffers = (reduction.writes, out.writes, *(r.attr for n in (reduction, out) for r in n.reads))
    return VECTOR_BYTES // max(itemsize(b.dtype) for b in buffers)


def power_of_two(n: int, most: int) -> int:
    """The largest power of two up to the power of two `most` that divides a number."""
    while n % most:
        most //= 2
    return most


def vector_width(reduction: Nest, out: Nest, columns: int) -> int:
    """Lanes of a vector access along the columns of a register tile."""
    return power_of_two(columns, widest_vector(reduction, out))


def partial_sums(s: Schedule, acc: str, reduction: str, parts: int) -> str:
    """Split a sum into partial sums, numbered by the first index of their stage, whose name is returned."""
    partial = s.rfactor(acc, reduction, parts)
    s.mask(partial)
    *dims, last = list(LETTERS[: len(editing.find_buffer(s.kernel, partial).shape)])
    s.relayout(partial, layout([last, *dims]))
    return partial


def split_reduction(s: Schedule, acc: str, length: int) -> str | None:
    """Split the longest reduction loop of a sum into parts of a length, each with partial sums (split-K); the name of their stage, None for
    one part."""
    outer, _ = s.split(longest(reduction_nest(s.kernel, acc).reduction_loops).var.name, length)
    parts = extent_of(editing.find_loop(s.kernel, outer).extent)
    if parts < 2:
        return None
    partial = partial_sums(s, acc, outer, parts)
    for is_reduction in (False, True):
        s.reorder(*stage_axes(s.kernel, partial, is_reduction))
    return partial
