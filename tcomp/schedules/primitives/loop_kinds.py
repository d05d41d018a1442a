"""How the iterations of a loop run: in order, in lanes, unrolled, on threads, on the axes of a GPU."""

from __future__ import annotations

from dataclasses import replace

from tcomp.ir.loops import GPU_AXES, KINDS, SERIAL, UNROLLED, VECTORIZED, Kernel
from tcomp.schedules.analysis.legality import race
from tcomp.schedules.primitives.editing import find_loop, nesting, refuse, refuse_conflict, replace_loop
from tcomp.schedules.primitives.loop_structure import split

MOST_COPIES = 1 << 12  # of the body of one loop


def set_kind(kernel: Kernel, loop: str, kind: str, reassociate: bool = False) -> Kernel:
    """How the iterations of a loop run: serial, parallel, vectorized, unrolled, or bound to an axis of a GPU (block.x ... thread.z).

    Legal for parallel, vectorized and bound loops when no iteration writes what another one touches; vectorized and unrolled need a
    constant extent of at most 4096. A loop that accumulates into one element may be vectorized, or bound to thread.x, with `reassociate`:
    the lanes (threads) are then reduced as a binary tree. `s.parallel(loop)`, `s.vectorize(loop)`, `s.unroll(loop)`, `s.bind(loop, axis)`
    are short for it. Good for: threads on outer loops, lanes on inner loops along neighbouring elements, copies of short innermost loops.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A = te.placeholder((4, 8), name="A")
    >>> s = Schedule(te.compute((4, 8), lambda i, j: A[i, j] * 2, name="B"))
    >>> s.set_kind("B.i", "parallel")
    >>> s.vectorize("B.j")
    >>> print(s.kernel.body)
    parallel B.i in 0..4 {
      vectorized B.j in 0..8 {
        B[B.i, B.j] = A[B.i, B.j] * 2.0f
      }
    }
    """
    target = find_loop(kernel, loop, kind)
    if kind not in KINDS:
        raise refuse(kernel, kind, f"unknown loop kind; one of {', '.join(KINDS)}")
    if kind in (VECTORIZED, UNROLLED) and not isinstance(target.extent, int):
        raise refuse(kernel, kind, f"the extent of `{loop}` is symbolic: {target.extent}", "split it by a constant first")
    if kind in (VECTORIZED, UNROLLED) and isinstance(target.extent, int) and target.extent > MOST_COPIES:
        raise refuse(kernel, kind, f"`{loop}` has {target.extent} iterations: the code would be too long", "split it first")
    may_reassociate = reassociate and kind in (VECTORIZED, "thread.x")
    if kind not in (SERIAL, UNROLLED) and (conflict := race(target, may_reassociate, kernel.body)) is not None:
        raise refuse_conflict(kernel, kind, f"iterations of `{loop}`", conflict)
    return nesting(kernel, kind, replace_loop(kernel, target, replace(target, kind=kind)))


def distribute(kernel: Kernel, loop: str, factor: int, outer: str, inner: str, strided: bool = False) -> tuple[Kernel, str, str]:
    """Split a loop for a GPU: `i.o` of kind `outer` around `i.i` of `factor` iterations of kind `inner`, guarded.

    The kinds are serial or GPU axes. With `strided` the loops change places: thread number i.i takes every factor-th iteration, so that
    neighbouring threads touch neighbouring elements. Legal when no iteration writes what another one touches. Good for one loop over
    all threads of a grid, or over those of a block. Returns the names of the loops.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A = te.placeholder((1000,), name="A")
    >>> s = Schedule(te.compute((1000,), lambda i: A[i] * 2, name="B"))
    >>> s.distribute("B.i", 256, "block.x", "thread.x")
    ('B.i.o', 'B.i.i')
    >>> print(s.kernel.body)
    block.x B.i.o in 0..4 {
      thread.x B.i.i in 0..256 {
        if B.i.i + B.i.o * 256 < 1000 {
          B[B.i.i + B.i.o * 256] = A[B.i.i + B.i.o * 256] * 2.0f
        }
      }
    }
    """
    target = find_loop(kernel, loop, "distribute")
    for kind in (outer, inner):
        if kind not in (SERIAL, *GPU_AXES):
            raise refuse(kernel, "distribute", f"`{kind}` is not an axis of a GPU")
    if (conflict := race(target, within=kernel.body)) is not None:
        raise refuse_conflict(kernel, "distribute", f"iterations of `{loop}`", conflict)
    kernel, *(outer_name, inner_name) = split(kernel, loop, factor)
    first = find_loop(kernel, outer_name)
    second = find_loop(kernel, inner_name)
    a, b = replace(first, kind=outer), replace(second, kind=inner)
    new = replace(b, body=replace(a, body=second.body)) if strided else replace(a, body=b)
    return nesting(kernel, "distribute", replace_loop(kernel, first, new)), outer_name, inner_name
