"""Loops without conditions, for where all of them hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tcomp.ir import expr as E
from tcomp.ir.access import coefficient
from tcomp.ir.expr import INDEX, Expr, as_expr
from tcomp.ir.loops import For, If, Kernel, Stmt, expressions, walk
from tcomp.ir.simplify import difference, simplify
from tcomp.schedules.handles import LoopCopy
from tcomp.schedules.primitives.editing import find_loop, nesting, rebind, rebuild, refuse, rename_inner, replace_loop

TRUE = E.const(True, "bool")


def specialize(kernel: Kernel, loop: str) -> tuple[Kernel, LoopCopy]:
    """Two copies of a loop: one for where what it asks is so in all iterations, which asks no more, and the loop as it is, for elsewhere.

    Asked are the conditions of `if` and `select` inside. One that depends on loops inside is asked in front for the iteration in which it is
    hardest to hold; that takes one that is linear in them. Others stay in both copies.

    Always legal. Good for tiles: most of them are full, and need neither guards nor masks; those that hang over an edge keep them, whatever they
    are. So machine instructions that know no conditions may execute full tiles (`tensorize`). The price is more code. `partition` divides the
    iterations of a loop around instead, where it is known at which one the edge begins. Returns the name of the second copy's loop, which
    knows the `copies` of the loops inside (they get `.e` as well).

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A = te.placeholder((10,), name="A")
    >>> s = Schedule(te.compute((10,), lambda i: A[i] * 2, name="B"))
    >>> outer, inner = s.split("B.i", 4)
    >>> s.specialize(inner)
    'B.i.i.e'
    >>> print(s.kernel.body)
    for B.i.o in 0..3 {
      if B.i.o < 2 {
        for B.i.i in 0..4 {
          B[B.i.i + B.i.o * 4] = A[B.i.i + B.i.o * 4] * 2.0f
        }
      } else {
        for B.i.i.e in 0..4 {
          if B.i.i.e + B.i.o * 4 < 10 {
            B[B.i.i.e + B.i.o * 4] = A[B.i.i.e + B.i.o * 4] * 2.0f
          }
        }
      }
    }
    """
    target = find_loop(kernel, loop, "specialize")
    inside = {x.var: as_expr(x.extent) for x in walk(target) if isinstance(x, For)}
    whole = {c: simplify(e) for c in dict.fromkeys(_asked(target)) if (e := _hardest(c, inside)) is not None}
    whole = {c: e for c, e in whole.items() if e.op != "const" or e.attr}
    if all(e.op == "const" for e in whole.values()):
        raise refuse(kernel, "specialize", f"`{loop}` asks nothing that could be asked in front of it", "it is about conditions linear in the loops inside")
    other, names = rename_inner(kernel, target, ".e")
    fast = rebuild(rebind(target, dict.fromkeys(whole, TRUE)), _settled)
    both = If(E.all_of([e for e in dict.fromkeys(whole.values()) if e.op != "const"]), fast, other)
    return nesting(kernel, "specialize", replace_loop(kernel, target, both)), LoopCopy(names[loop], names)


def _asked(s: Stmt) -> Iterator[Expr]:
    """The conditions in a statement that do not depend on data."""
    for x in walk(s):
        roots = [x.cond] if isinstance(x, If) else [e.args[0] for root in expressions(x) for e in E.walk(root) if e.op == "select"]
        yield from (c for root in roots for c in E.conjuncts(root) if not E.reads(c))


def _hardest(condition: Expr, inside: Mapping[Expr, Expr]) -> Expr | None:
    """What a condition says in those iterations of the loops inside in which it is hardest to hold; None where that is not known."""
    moving = [v for v in E.variables(condition) if v in inside]
    if not moving:
        return condition
    if condition.op not in ("lt", "le") or condition.args[0].dtype != INDEX:
        return None
    gap = difference(condition.args[1], condition.args[0])  # a < b is 0 < b - a
    ends: dict[Expr, Expr] = {}
    for v in moving:
        step = coefficient(gap, v)
        if step is None:
            return None
        ends[v] = as_expr(0) if step >= 0 else inside[v] - 1
    if set(inside) & set(E.variables(*ends.values())):
        return None
    return E.substitute(condition, ends)


def _settled(s: Stmt) -> Stmt | None:
    """What is left of an `if` that is known to hold."""
    return rebuild(s.then, _settled) if isinstance(s, If) and s.cond is TRUE else None
