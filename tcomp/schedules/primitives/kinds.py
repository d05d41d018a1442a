"""How the iterations of a loop run: in order, in lanes, unrolled, on threads, on the axes of a GPU."""

from __future__ import annotations

from dataclasses import replace

from tcomp.ir.loops import (
    GPU_AXES,
    KINDS,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Kernel,
)
from tcomp.schedules.legality import race
from tcomp.schedules.primitives.edit import find_loop, nesting, refuse, refuse_conflict, replace_loop
from tcomp.schedules.primitives.shape import split


def set_kind(kernel: Kernel, loop: str, kind: str, reassociate: bool = False) -> Kernel:
    """parallel, vectorized, unrolled or serial.

    vectorized and unrolled need a constant extent; parallel and vectorized need iterations that do not write what others touch. A
    loop that accumulates into one element may be vectorized, or bound to thread.x, with `reassociate`: the lanes (threads) are then folded as a binary tree.
    """
    target = find_loop(kernel, loop, kind)
    if kind not in KINDS:
        raise refuse(kernel, kind, f"unknown loop kind; one of {', '.join(KINDS)}")
    if kind in (VECTORIZED, UNROLLED) and not isinstance(target.extent, int):
        raise refuse(kernel, kind, f"the extent of `{loop}` is symbolic: {target.extent}", "split it by a constant first")
    if kind not in (SERIAL, UNROLLED) and (conflict := race(target, kind in (VECTORIZED, "thread.x") and reassociate, kernel.body)) is not None:
        raise refuse_conflict(kernel, kind, f"iterations of `{loop}`", conflict)
    return nesting(kernel, kind, replace_loop(kernel, target, replace(target, kind=kind)))


def distribute(kernel: Kernel, loop: str, factor: int, outer: str, inner: str, strided: bool = False) -> tuple[Kernel, str, str]:
    """`for i in n` becomes `loop.o` in ceil(n / factor) of kind `outer` around `loop.i` in factor of kind `inner`, guarded.

    The kinds are serial or GPU axes. With `strided` the loops change places. Legal when no iteration writes what another one touches.
    Returns the kernel and the names of the loops.
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
