"""Clean-up: nothing that is not needed stands in the loops; and notes, for people who read them."""

from __future__ import annotations

from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import (
    VECTORIZED,
    Allocate,
    Block,
    For,
    If,
    Kernel,
    Stmt,
    block,
    children,
    expressions,
    map_expressions,
    perfect,
    walk,
    with_children,
)
from tcomp.ir.simplify import simplify
from tcomp.schedules.primitives.editing import rebind, touches


def clean(kernel: Kernel) -> Kernel:
    """Simplify expressions, turn guards on a loop variable into shorter extents, drop empty and one-trip loops, and unused temporaries.

    Always legal. Good as the last step: it leaves what a person would write. Loops that vanish can no longer be named.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A = te.placeholder((6,), name="A")
    >>> s = Schedule(te.compute((6,), lambda i: A[i] * 2, name="B"))
    >>> s.split("B.i", 4)
    ('B.i.o', 'B.i.i')
    >>> s.partition("B.i.o", 1)
    ('B.i.o', 'B.i.o.t')
    >>> s.clean()
    >>> print(s.kernel.body)
    for B.i.i in 0..4 {
      B[B.i.i] = A[B.i.i] * 2.0f
    }
    for B.i.i.t in 0..2 {
      B[B.i.i.t + 4] = A[B.i.i.t + 4] * 2.0f
    }
    """
    return kernel.with_body(_clean(kernel.body))


def note(kernel: Kernel, text: str) -> Kernel:
    """A remark for people, printed with the kernel: why a step was not taken, say.

    Always legal: it changes nothing that is computed.

      >>> from tcomp import te
      >>> from tcomp.schedules import Schedule
      >>> A = te.placeholder((4,), name="A")
      >>> s = Schedule(te.compute((4,), lambda i: A[i] * 2, name="B"))
      >>> s.note("too short for lanes")
      >>> print(s)
      kernel B(A: float32[4], B: float32[4]) -> (B) {
        note "too short for lanes"
        for B.i in 0..4 {
          B[B.i] = A[B.i] * 2.0f
        }
      }
    """
    return replace(kernel, notes=(*kernel.notes, text))


def _clean(s: Stmt) -> Stmt:
    match s:
        case Block(stmts):
            return block(*(c for c in map(_clean, stmts) if not _empty(c)))
        case For(v, extent, body, kind):
            extent = as_dim(simplify(as_expr(extent)))
            if isinstance(extent, int) and extent <= 0:
                return Block(())
            if extent == 1 and kind != VECTORIZED:
                return _clean(rebind(body, {v: as_expr(0)}))
            body = _clean(body)
            if _empty(body):
                return Block(())
            if kind != VECTORIZED and (shorter := _limit(v, extent, body)) is not None:
                w = loop_var(v.attr.name, shorter)
                return _clean(For(w, shorter, rebind(body, {v: w}), kind))
            return For(v, extent, body, kind)
        case If(cond, then, otherwise):
            cond = simplify(cond)
            if cond.op == "const":
                return _clean(then) if cond.attr else (Block(()) if otherwise is None else _clean(otherwise))
            then = _clean(then)
            return Block(()) if _empty(then) and otherwise is None else If(cond, then, None if otherwise is None else _clean(otherwise))
        case Allocate(b, body):
            body = _clean(body)
            return body if not any(True for x in walk(body) if touches(x, b)) else Allocate(b, body)
    stmt = map_expressions(s, simplify) if expressions(s) and not children(s) else s
    return stmt if not children(stmt) else with_children(stmt, [_clean(c) for c in children(stmt)])


def _empty(s: Stmt) -> bool:
    return isinstance(s, Block) and not s.stmts


def _limit(v: Expr, extent: Dim, body: Stmt) -> Dim | None:
    """A smaller extent, where everything inside the loop stands under a guard `v < constant`."""
    _, leaf = perfect(body)
    if not isinstance(leaf, If) or leaf.otherwise is not None or not isinstance(extent, int):
        return None
    for condition in E.conjuncts(leaf.cond):
        if condition.op == "lt" and condition.args[0] is v and condition.args[1].op == "const" and 0 <= condition.args[1].attr < extent:
            return int(condition.args[1].attr)
    return None
