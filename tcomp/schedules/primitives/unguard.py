"""Guards that keep lanes from computing what nobody looks at are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.access import within
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Expr
from tcomp.ir.loops import Accumulate, Allocate, For, If, Kernel, Stmt, children, expressions, places, walk
from tcomp.ir.simplify import prove, simplify
from tcomp.schedules.primitives.editing import find_loop, guard, refuse, replace_loop


def unguard(kernel: Kernel, loop: str) -> Kernel:
    """Conditions under which an iteration of a loop accumulates into a temporary are dropped, where they only spare elements that nobody
    reads.

    Legal when the loop holds such an accumulation of floats and nothing else, all places in it are in range whatever the conditions say, and
    everybody else reads only elements for which they hold. Good for the lanes of the last vector of a row: a masked accumulation costs a
    second instruction, and a register for the old sum. Costs nothing; conditions that do not qualify stay, one is dropped at least.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A, k = te.placeholder((9, 16), name="A"), te.reduce_axis(9, "k")
    >>> s = Schedule(te.compute((10,), lambda i: te.sum(A[k, i], k), name="C"))
    >>> s.cache_write("C", "sum")
    'sum'
    >>> s.split("C.init.i", 16, "round_up")
    ('C.init.i.o', 'C.init.i.i')
    >>> s.split("C.i", 16)
    ('C.i.o', 'C.i.i')
    >>> s.reorder("C.i.o", "C.k", "C.i.i")
    >>> print(s.loops["C.i.i"])
    for C.i.i in 0..16 {
      if C.i.i + C.i.o * 16 < 10 {
        sum[C.i.i + C.i.o * 16] += A[C.k, C.i.i + C.i.o * 16]
      }
    }
    >>> s.unguard("C.i.i")
    >>> print(s.loops["C.i.i"])
    for C.i.i in 0..16 {
      sum[C.i.i + C.i.o * 16] += A[C.k, C.i.i + C.i.o * 16]
    }
    """
    target = find_loop(kernel, loop, "unguard")
    body = target.body
    if not isinstance(body, If) or body.otherwise is not None or not isinstance(body.then, Accumulate):
        raise refuse(kernel, "unguard", f"`{loop}` is no loop around an accumulation under conditions")
    update, conditions = body.then, E.conjuncts(body.cond)
    life = next((s for s in walk(kernel.body) if isinstance(s, Allocate) and s.buffer is update.buffer), None)
    if life is None:
        raise refuse(kernel, "unguard", f"`{update.buffer.name}` is no temporary", "what is written there may be looked at")
    if not is_float(update.buffer.dtype) or E.reads(*update.indices):
        raise refuse(kernel, "unguard", f"`{loop}` accumulates integers, or where data says")
    readers = _readers(kernel.body, update, ())
    moving = {s.var for s in walk(life) if isinstance(s, For)} - set(E.variables(*update.indices))  # not the same for all that an element goes through
    checked = [c for c in conditions if moving.isdisjoint(E.variables(c)) and _in_range(update, c)]
    idle = [c for c in checked if all(_implied(c, update, r, known) for r, known in readers)]
    if not idle:
        raise refuse(kernel, "unguard", f"nothing that `{loop}` asks is known to be asked by all who read `{update.buffer.name}`, or it keeps places in range")
    return replace_loop(kernel, target, replace(target, body=guard([c for c in conditions if c not in idle], update)))


def _readers(s: Stmt, update: Accumulate, known: tuple[Expr, ...]) -> list[tuple[Expr, tuple[Expr, ...]]]:
    """All other reads of what is accumulated into, with the conditions around them."""
    if s is update:
        return []
    found = [(r, known) for r in E.reads(*expressions(s)) if r.attr is update.buffer]
    for c in children(s):
        found += _readers(c, update, (*known, *E.conjuncts(s.cond)) if isinstance(s, If) and c is s.then else known)
    return found


def _in_range(update: Accumulate, condition: Expr) -> bool:
    """Whether all places that the variables of a condition choose are in range even where it does not hold."""
    chosen = set(E.variables(condition))
    return not E.reads(condition) and all(
        chosen.isdisjoint(E.variables(i)) or (not E.reads(i) and within(i, n))
        for b, indices in places(update)
        for i, n in zip(indices, b.shape, strict=True)
    )


def _implied(condition: Expr, update: Accumulate, read: Expr, known: Sequence[Expr]) -> bool:
    """Whether a read finds only elements for which the condition held."""
    if condition.op not in ("lt", "le"):
        return False
    below, above = condition.args
    own = set(E.variables(*update.indices))
    wanted = [E.substitute(condition, {i: a for i, a in zip(update.indices, read.args, strict=True) if i.op == "var"})]
    for index, there in zip(update.indices, read.args, strict=True):
        rest = simplify(above - below + index)  # the condition: index < rest
        wanted += [there < rest if condition.op == "lt" else there <= rest] if own.isdisjoint(E.variables(rest)) else []
    facts = set(map(simplify, known))
    return any(prove(w) or simplify(w) in facts for w in wanted if own.isdisjoint(E.variables(w)))
