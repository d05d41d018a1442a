"""Dividing a loop among the blocks and threads of a GPU, in one step; and folds whose guards stand in their values.

Split and bound one after the other, the two loops would have to be proved independent from indices that are quotients and remainders of
their sum. The iterations of the one loop are proved independent instead: then any two of them may run at the same time.
"""

from __future__ import annotations

from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.loops import GPU_AXES, SERIAL, Accumulate, If, Kernel, Stmt
from tcomp.schedules import primitives as P
from tcomp.schedules.dependence import conflict


def distribute(kernel: Kernel, loop: str, factor: int, outer: str, inner: str, strided: bool = False) -> tuple[Kernel, str, str]:
    """`for i in n` becomes `loop.o` in ceil(n / factor) of kind `outer` around `loop.i` in factor of kind `inner`, guarded.

    The kinds are serial or GPU axes. With `strided` the loops change places. Legal when no iteration writes what another one touches.
    Returns the kernel and the names of the loops.
    """
    target = P.find_loop(kernel, loop, "distribute")
    for kind in (outer, inner):
        if kind not in (SERIAL, *GPU_AXES):
            raise P.refuse(kernel, "distribute", f"`{kind}` is not an axis of a GPU")
    shared = conflict(target.body, [target.var], may_fold=False)
    if shared is not None:
        raise P.refuse(kernel, "distribute", f"iterations of `{loop}` may touch the same element of `{shared.name}`")
    kernel, outer_name, inner_name = P.split(kernel, loop, factor)
    first = P.find_loop(kernel, outer_name)
    second = P.find_loop(kernel, inner_name)
    a, b = replace(first, kind=outer), replace(second, kind=inner)
    new = replace(b, body=replace(a, body=second.body)) if strided else replace(a, body=b)
    return P.replace_loop(kernel, first, new), outer_name, inner_name


def mask(kernel: Kernel, stage: str) -> Kernel:
    """`if c: s += v` becomes `s += c ? v : identity` wherever `stage` is accumulated, so that its nest is perfect again.

    Always legal: a side of a selection that is not chosen is not evaluated.
    """
    buffer = P.find_buffer(kernel, stage, "mask")

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, If) and s.otherwise is None and isinstance(s.then, Accumulate) and s.then.buffer is buffer:
            return replace(s.then, value=E.select(s.cond, s.then.value, s.then.reducer.identity))
        return None

    return kernel.with_body(P.rebuild(kernel.body, edit))
