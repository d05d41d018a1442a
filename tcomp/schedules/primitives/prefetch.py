"""Prefetch: what a loop will read some iterations later is asked for now."""

from __future__ import annotations

from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.ir.loops import SERIAL, UNROLLED, VECTORIZED, For, Kernel, Prefetch, Stmt, block, children, expressions
from tcomp.ir.simplify import simplify
from tcomp.schedules.primitives.edit import find_buffer, find_loop, fresh, is_local, refuse, replace_loop


def prefetch(kernel: Kernel, buffer: str, loop: str, distance: int) -> Kernel:
    """Every iteration of a serial loop first asks for the elements of `buffer` that it will read `distance` iterations later, one for
    each vector.

    Legal where no index is read from memory: a prefetch reads nothing, and may point behind the end. Good for operands that come from far
    away at every use, such as weights which no cache holds: the hardware does not ask for the next page of its own accord. It costs an
    instruction for each vector, so it hurts where the operand is near.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A = te.placeholder((64, 8), name="A")
    >>> k = te.reduce_axis(64, "k")
    >>> s = Schedule(te.compute((8,), lambda i: te.sum(A[k, i], k), name="B"))
    >>> s.reorder("B.k", "B.i")
    >>> s.vectorize("B.i")
    >>> s.prefetch("A", "B.k", 4)
    >>> print(s.loops["B.k"])
    for B.k in 0..64 {
      prefetch A[B.k + 4, 0]
      vectorized B.i in 0..8 {
        B[B.i] += A[B.k, B.i]
      }
    }
    """
    source, target = find_buffer(kernel, buffer, "prefetch"), find_loop(kernel, loop, "prefetch")
    if target.kind != SERIAL or distance < 1:
        raise refuse(kernel, "prefetch", f"`{loop}` is {target.kind}, the distance {distance}", "a serial loop, and at least 1 iteration")
    if is_local(source, target):
        raise refuse(kernel, "prefetch", f"`{buffer}` is another one in every iteration of `{loop}`")
    places: dict[tuple[Expr, ...], tuple[For, ...]] = {}

    def visit(s: Stmt, inner: tuple[For, ...]) -> None:
        for r in E.reads(*expressions(s)):
            if r.attr is source and target.var in E.variables(*r.args):
                places[r.args] = tuple(x for x in inner if x.var in E.variables(*r.args))
        for c in children(s):
            visit(c, (*inner, s) if isinstance(s, For) else inner)

    visit(target.body, ())
    if E.reads(*(i for indices in places for i in indices)):
        raise refuse(kernel, "prefetch", f"where `{loop}` reads `{buffer}` depends on data", "an address far ahead cannot be looked up")
    if not places:
        raise refuse(kernel, "prefetch", f"nothing of `{buffer}` is read in another place at every iteration of `{loop}`")
    hints = []
    for indices, inner in places.items():
        if any(x.kind not in (UNROLLED, VECTORIZED) for x in inner):
            raise refuse(kernel, "prefetch", f"what `{loop}` reads of `{buffer}` depends on a loop inside it", "prefetch in that loop")
        copies = {x.var: loop_var(fresh(kernel, f"{x.var.name}.p"), x.extent) for x in inner if x.kind == UNROLLED}
        moved = {target.var: target.var + distance, **{x.var: copies.get(x.var, as_expr(0)) for x in inner}}
        hint: Stmt = Prefetch(source, tuple(simplify(E.substitute(i, moved)) for i in indices))
        for x in reversed([x for x in inner if x.var in copies]):
            hint = For(copies[x.var], x.extent, hint, UNROLLED)
        hints.append(hint)
    return replace_loop(kernel, target, replace(target, body=block(*hints, target.body)))
