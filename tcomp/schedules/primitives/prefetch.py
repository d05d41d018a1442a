"""Prefetch: what a loop will read some iterations later is asked for now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.ir.loops import SERIAL, UNROLLED, VECTORIZED, For, Kernel, Prefetch, Stmt, block, children, expressions
from tcomp.ir.simplify import simplify
from tcomp.schedules.primitives.edit import find_buffer, find_loop, fresh, is_local, refuse, replace_loop
from tcomp.schedules.primitives.sites import path


def prefetch(kernel: Kernel, buffer: str, loop: str, distance: int, at: str = "") -> Kernel:
    """Every iteration of a serial loop first asks for the elements of `buffer` that it will read `distance` iterations later, one for
    each vector. With `at`, a serial loop inside of it, the asking is shared out evenly among all iterations of that one, in order.

    Legal where no index is read from memory: a prefetch reads nothing, and may point behind the end. Good for operands that come from far
    away at every use, such as weights which no cache holds: the hardware does not ask for the next page of its own accord. It costs an
    instruction for each vector, so it hurts where the operand is near. `at` is for operands that are walked as a whole again and again,
    before the next piece of them: to ask for all of that at once would be to wait for it.

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
    >>> s = Schedule(te.compute((2, 3, 8), lambda i, j, l: te.sum(A[k, l] * A[i * 8 + j, l], k), name="C"))
    >>> s.reorder("C.i", "C.j", "C.k", "C.l")
    >>> s.vectorize("C.l")
    >>> s.prefetch("A", "C.i", 1, at="C.j")
    >>> print(s.loops["C.i"])
    for C.i in 0..2 {
      for C.j in 0..3 {
        prefetch A[C.i * 8 + C.j + 8, 0]
        for C.k in 0..64 {
          vectorized C.l in 0..8 {
            C[C.i, C.j, C.l] += A[C.k, C.l] * A[C.i * 8 + C.j, C.l]
          }
        }
      }
    }
    """
    source, target = find_buffer(kernel, buffer, "prefetch"), find_loop(kernel, loop, "prefetch")
    inside = find_loop(kernel, at, "prefetch") if at else target
    if inside.kind != SERIAL or distance < 1:
        raise refuse(kernel, "prefetch", f"`{inside.var.name}` is {inside.kind}, the distance {distance}", "a serial loop, and at least 1 iteration")
    if is_local(source, target):
        raise refuse(kernel, "prefetch", f"`{buffer}` is another one in every iteration of `{loop}`")
    around = [s for s in path(target, inside) if isinstance(s, For)][1:]
    if inside is not target and not around:
        raise refuse(kernel, "prefetch", f"`{at}` is not inside `{loop}`")
    places: dict[tuple[Expr, ...], tuple[For, ...]] = {}

    def visit(s: Stmt, inner: tuple[For, ...]) -> None:
        for r in E.reads(*expressions(s)):
            if r.attr is source and target.var in E.variables(*r.args):
                places[r.args] = tuple(x for x in inner if x.var in E.variables(*r.args))
        for c in children(s):
            visit(c, (*inner, s) if isinstance(s, For) else inner)

    visit(inside.body, tuple(around))
    if E.reads(*(i for indices in places for i in indices)):
        raise refuse(kernel, "prefetch", f"where `{loop}` reads `{buffer}` depends on data", "an address far ahead cannot be looked up")
    if not places:
        raise refuse(kernel, "prefetch", f"nothing of `{buffer}` is read in another place at every iteration of `{loop}`")
    hints = []
    for indices, inner in places.items():
        walked = [x for x in inner if x.kind not in (UNROLLED, VECTORIZED)]
        share = _share(around, walked)
        if share is None:
            raise refuse(kernel, "prefetch", f"what `{loop}` reads of `{buffer}` depends on a loop inside it", "prefetch in that loop, or `at` one inside that")
        copies = {x.var: loop_var(fresh(kernel, f"{x.var.name}.p"), x.extent) for x in inner if x.kind == UNROLLED}
        moved = {target.var: target.var + distance, **{x.var: copies.get(x.var, as_expr(0)) for x in inner}, **share}
        hint: Stmt = Prefetch(source, tuple(simplify(E.substitute(i, moved)) for i in indices))
        for x in reversed([x for x in inner if x.var in copies]):
            hint = For(copies[x.var], x.extent, hint, UNROLLED)
        hints.append(hint)
    return replace_loop(kernel, inside, replace(inside, body=block(*hints, inside.body)))


def _share(around: Sequence[For], walked: Sequence[For]) -> dict[Expr, Expr] | None:
    """The iterations of the loops that a read walks, in order, for the iterations of the loops around; None if these are fewer."""
    if not walked:
        return {}
    if not all(isinstance(x.extent, int) for x in (*around, *walked)):
        return None
    rows = prod(int(x.extent) for x in walked)
    each = prod(int(x.extent) for x in around) // rows if rows else 0
    if not each:
        return None
    number: Expr = as_expr(0)
    for x in around:
        number = number * x.extent + x.var
    number = E.minimum(number // each, as_expr(rows - 1))
    found: dict[Expr, Expr] = {}
    for x in reversed(walked):
        found[x.var], number = number % x.extent, number // x.extent
    return found
