"""Conditions: moved into what is summed up, tested once in front of a loop, dropped; the clean-up that simplifies them; and notes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import coefficient, in_range, within, without
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, loop_var
from tcomp.ir.simplify import as_dim, difference, prove, same_dim, simplify
from tcomp.schedules.analysis.legality import out_of_bounds
from tcomp.schedules.handles import Loop, LoopCopy, Stage
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import find_buffer, find_loop, guard, nesting, rebind, rebuild, refuse, refuse_if, replaced

TRUE = E.const(True, "bool")


def masked(kernel: L.Kernel, conditions: Sequence[Expr], stmt: L.Stmt) -> L.Stmt:
    """Every statement inside under conditions of its own. An accumulation adds the identity where they do not hold, if its place is in
    range all the same, and then needs no `If`."""
    match stmt:
        case L.For(_, extent, body) if not E.reads(as_expr(extent)):
            return replace(stmt, body=masked(kernel, conditions, body))
        case L.Block() | L.Allocate():
            return L.with_children(stmt, [masked(kernel, conditions, s) for s in L.children(stmt)])
        case L.Accumulate():
            return masked_accumulation(kernel, conditions, stmt)
    return guard(conditions, stmt)


def masked_accumulation(kernel: L.Kernel, conditions: Sequence[Expr], stmt: L.Accumulate) -> L.Stmt:
    """`if c: s += v` as `s += c ? v : identity`. Conditions that the place of `s` may need to be in range stay an `If`; and so do those
    that may separate concurrent iterations, as the place is now read and written where they do not hold as well."""
    together = {s.var for s in L.walk(kernel.body) if isinstance(s, L.For) and s.kind in (L.PARALLEL, *L.GPU_AXES)}
    needed = range_depends_on(stmt, conditions) if not together else _related(stmt.indices, conditions) | together
    free = [c for c in conditions if needed.isdisjoint(E.variables(c)) and (E.variables(c) or always_in_range(stmt))]
    remaining = [c for c in conditions if c not in free]
    if any(E.reads(c) for c in remaining):  # it may be in range only where the others hold
        return guard(conditions, stmt)
    return guard(remaining, replace(stmt, value=E.select_where(free, stmt.value, stmt.reducer.identity)))


def always_in_range(stmt: L.Accumulate) -> bool:
    """Whether the place of an accumulation is in range whatever conditions say; what its indices read may be out of range themselves."""
    return not E.reads(*stmt.indices) and in_range(stmt.indices, stmt.buffer.shape)


def range_depends_on(stmt: L.Accumulate, conditions: Sequence[Expr]) -> set[Expr]:
    """The variables that, under the conditions, decide whether the place of an accumulation is in range; none if it always is."""
    return set() if always_in_range(stmt) else _related(stmt.indices, conditions)


def _related(indices: Sequence[Expr], conditions: Sequence[Expr]) -> set[Expr]:
    """The variables that the range of indices may depend on, through conditions and through extents of loops."""
    found = set(E.with_extents(*indices))
    while more := {v for c in conditions if not found.isdisjoint(E.variables(c)) for v in E.with_extents(c)} - found:
        found |= more
    return found


def mask(kernel: L.Kernel, stage: Stage) -> L.Kernel:
    """`if c: s += v` becomes `s += c ? v : identity` wherever `stage` is accumulated, so that its nest is free of control flow.

    Legal where the condition is not needed to keep the place of `s` in range, nor to separate concurrent iterations; what is stays an `If`.
    (What is read stays in range: the side of a selection that is not chosen is not evaluated.) Good for reductions over lanes.

    >>> A, k = te.placeholder((10,), name="A"), te.reduce_axis(10, "k")
    >>> s = Schedule(te.compute((), lambda: te.sum(A[k], k), "t"))
    >>> outer, inner = s.split("t.k", 4)
    >>> s.mask("t")
    >>> print(s.loops[outer])
    for t.k.o in 0..3 {
      for t.k.i in 0..4 {
        t[] += select(t.k.i + t.k.o * 4 < 10, A[t.k.i + t.k.o * 4], 0.0f)
      }
    }
    """
    buffer, masked, doubtful = find_buffer(kernel, stage), dict[L.Stmt, L.Stmt](), False
    for s in L.walk(kernel.body):
        if isinstance(s, L.If) and s.otherwise is None and isinstance(s.then, L.Accumulate) and s.then.buffer is buffer:
            doubtful |= not always_in_range(s.then)
            new = masked[s] = masked_accumulation(kernel, E.conjuncts(s.cond), s.then)
            stays = isinstance(new, L.If) and isinstance(new.then, L.Accumulate) and new.then.value is s.then.value
            refuse_if(stays, f"`{s.cond}` keeps places of `{stage}` in range, or separates concurrent iterations: it has to stay an `If`")
    changed = replaced(kernel, masked)
    if doubtful and (touch := out_of_bounds(changed.body)) is not None:
        raise refuse(f"out of range, where no condition stands around it: {touch}")
    return changed


def specialize(kernel: L.Kernel, loop: Loop) -> tuple[L.Kernel, LoopCopy]:
    """Two copies of a loop: one without its conditions, for where they hold in all iterations, and the loop as it is, for elsewhere.

    Conditions of `if` and `select` are meant. One that depends on loops inside is tested in front, for the iteration in which it is hardest
    to hold, if it is linear in them; others stay in both copies. Always legal. Good for tiles: most are full, and need neither guards nor
    masks, so that machine instructions that know no conditions may execute them (`tensorize`); those at an edge keep them. Costs code.
    `partition` divides the iterations of a loop around instead, where it is known at which one the edge begins. Returns the name of the
    second copy's loop, which knows the `copies` of the loops inside (they get `.e` as well).

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
    target, selections = find_loop(kernel, loop), list[Expr]()
    for s in L.walk(target):
        selections += [s.cond] if isinstance(s, L.If) else [e.args[0] for e in E.walk(*L.expressions(s)) if e.op == "select"]
    conditions = dict.fromkeys(c for root in selections for c in E.conjuncts(root) if not E.reads(c))
    inside = {x.var: as_expr(x.extent) for x in L.walk(target) if isinstance(x, L.For)}
    whole = {c: simplify(e) for c in conditions if (e := _extreme(c, inside, hardest=True)) is not None}
    whole = {c: e for c, e in whole.items() if e.op != "const" or e.attr}
    tests = [e for e in dict.fromkeys(whole.values()) if e.op != "const"]
    refuse_if(not tests, f"`{loop}` tests nothing that could be tested in front of it", "it is about conditions linear in the loops inside")
    other, names = editing.rename_inner(kernel, target, ".e")
    fast = rebuild(rebind(target, dict.fromkeys(whole, TRUE)), _settled)
    return nesting(replaced(kernel, {target: L.If(E.all_of(tests), fast, other)})), LoopCopy(names[target.var.name], copies=names)


def _extreme(condition: Expr, inside: Mapping[Expr, Expr], hardest: bool) -> Expr | None:
    """A condition in the iterations of the loops inside in which it is hardest, or easiest, to satisfy; None where these are not known."""
    moving = [v for v in E.variables(condition) if v in inside]
    if not moving:
        return condition
    if condition.op not in ("lt", "le") or condition.args[0].dtype != INDEX:
        return None
    gap = difference(condition.args[1], condition.args[0])  # a < b is 0 < b - a
    steps = {v: coefficient(gap, v) for v in moving}
    ends = {v: as_expr(0) if (step >= 0) == hardest else inside[v] - 1 for v, step in steps.items() if step is not None}
    linear = len(ends) == len(moving) and inside.keys().isdisjoint(E.variables(*ends.values()))
    return E.substitute(condition, ends) if linear else None


def _settled(s: L.Stmt) -> L.Stmt | None:
    """The body of an `if` that is known to hold."""
    return rebuild(s.then, _settled) if isinstance(s, L.If) and s.cond is TRUE else None


def tighten(kernel: L.Kernel, loop: Loop) -> L.Kernel:
    """End a serial loop before the iterations that store nothing, because no condition inside holds there.

    Legal where all stores, but those into temporaries of one iteration, stand under one condition that is linear in the loop and in the
    loops inside: it holds nowhere in the iterations that are left out. Good for tiles at an edge: those behind it are not computed.

    >>> A = te.placeholder((te.var("n"),), name="A")
    >>> s = Schedule(te.compute(A.shape, lambda i: A[i] * 2, name="B"))
    >>> s.split("B.i", 32), s.split("B.i.i", 8)
    (('B.i.o', 'B.i.i'), ('B.i.i.o', 'B.i.i.i'))
    >>> s.tighten("B.i.i.o")
    >>> print(s.loops["B.i.i.o"])
    for B.i.i.o in 0..min(4, max(0, (n + 7) // 8 - B.i.o * 4)) {
      for B.i.i.i in 0..8 {
        if B.i.i.i + B.i.i.o * 8 + B.i.o * 32 < n {
          B[B.i.i.i + B.i.i.o * 8 + B.i.o * 32] = A[B.i.i.i + B.i.i.o * 8 + B.i.o * 32] * 2.0f
        }
      }
    }
    """
    target = find_loop(kernel, loop)
    refuse_if(target.kind != L.SERIAL, f"`{loop}` is {target.kind}", "only the number of serial iterations may differ")
    refuse_if(any(isinstance(s, L.While) for s in L.walk(target)), f"`{loop}` has a while loop inside")
    own = {s.buffer for s in L.walk(target) if isinstance(s, L.Allocate)}
    inside = {x.var: as_expr(x.extent) for x in L.walk(target.body) if isinstance(x, L.For)}
    stores = _store_conditions(target.body, own)
    found = [{end for c in known if (end := iterations(c, target.var, inside)) is not None} for known in stores]
    common = set.intersection(*found) if found else set[Expr]()
    refuse_if(not common, f"no condition around all stores in `{loop}` tells from which iteration on it does not hold")
    end = min(common, key=str)
    end = simplify(end if prove(end >= 0) else E.maximum(end, 0))
    extent = as_dim(end if prove(end <= target.extent) else simplify(E.minimum(end, target.extent)))
    refuse_if(same_dim(extent, target.extent), f"`{loop}` stores something in its last iteration")
    shorter = loop_var(target.var.name, extent)
    return replaced(kernel, {target: L.For(shorter, extent, rebuild(rebind(target.body, {target.var: shorter}), _settled), target.kind)})


def _store_conditions(s: L.Stmt, own: Collection[L.Buffer], known: tuple[Expr, ...] = ()) -> list[tuple[Expr, ...]]:
    """Of each store into other buffers than `own`, the conditions around it."""
    if isinstance(s, L.Store | L.Accumulate):
        return [] if s.buffer in own else [known]
    found = []
    for c in L.children(s):
        more = E.conjuncts(s.cond) if isinstance(s, L.If) and c is s.then else ()
        found += _store_conditions(c, own, (*known, *more))
    return found


def iterations(condition: Expr, v: Expr, inside: Mapping[Expr, Expr]) -> Expr | None:
    """After how many iterations of a loop a condition holds in no iteration of the loops inside; None where that is not known."""
    easiest = None if E.reads(condition) else _extreme(condition, inside, hardest=False)
    if easiest is None or easiest.op not in ("lt", "le") or easiest.args[0].dtype != INDEX:
        return None
    gap = difference(easiest.args[1], easiest.args[0])
    if (parts := without(gap, v)) is None or parts[0] >= 0:
        return None
    step, rest = -parts[0], parts[1] if easiest.op == "lt" else parts[1] + 1  # it holds while v * step < rest
    return simplify((rest + (step - 1)) // step)


def unguard(kernel: L.Kernel, loop: Loop) -> L.Kernel:
    """Drop conditions under which an iteration of a loop accumulates into a temporary, where they only spare elements that nobody reads.

    Legal when the loop holds such an accumulation of floats and nothing else, all places in it are in range whatever the conditions say,
    and everybody else reads only elements for which they hold. Good for the lanes of the last vector of a row: a masked accumulation
    costs a second instruction, and a register for the old sum. Conditions that do not qualify stay; one is dropped at least.

    >>> A, k = te.placeholder((9, 16), name="A"), te.reduce_axis(9, "k")
    >>> s = Schedule(te.compute((10,), lambda i: te.sum(A[k, i], k), name="C"))
    >>> s.cache_write("C", "sum")
    'sum'
    >>> s.split("C.init.i", 16, "round_up")
    ('C.init.i.o', 'C.init.i.i')
    >>> s.split("C.i", 16)
    ('C.i.o', 'C.i.i')
    >>> s.reorder("C.i.o", "C.k", "C.i.i")
    >>> s.unguard("C.i.i")
    >>> print(s.loops["C.i.i"])
    for C.i.i in 0..16 {
      sum[C.i.i + C.i.o * 16] += A[C.k, C.i.i + C.i.o * 16]
    }
    """
    target = find_loop(kernel, loop)
    body = target.body
    if not isinstance(body, L.If) or body.otherwise is not None or not isinstance(body.then, L.Accumulate):
        raise refuse(f"`{loop}` is not a loop around an accumulation under conditions")
    update, conditions = body.then, E.conjuncts(body.cond)
    name, life = update.buffer.name, editing.scope_of(kernel, update.buffer)
    refuse_if(update.buffer in kernel.buffers, f"`{name}` is not a temporary", "what is written there may be looked at")
    refuse_if(not is_float(update.buffer.dtype) or E.reads(*update.indices), f"`{loop}` accumulates integers, or where data says")
    readers = guarded_reads(kernel.body, update)
    # Loops that run between the steps by which one element is computed: a condition that depends on one is not the same for all steps.
    moving = {s.var for s in L.walk(life) if isinstance(s, L.For)} - set(E.variables(*update.indices))
    checked = [c for c in conditions if moving.isdisjoint(E.variables(c)) and _in_range(update, c)]
    idle = [c for c in checked if all(_implied(c, update, r, known) for r, known in readers)]
    refuse_if(not idle, f"no condition in `{loop}` is known to be tested by all that read `{name}`, or it keeps places in range")
    return replaced(kernel, {target: replace(target, body=guard([c for c in conditions if c not in idle], update))})


def guarded_reads(s: L.Stmt, update: L.Accumulate, known: frozenset[Expr] = frozenset()) -> list[tuple[Expr, frozenset[Expr]]]:
    """All other reads of what is accumulated into, with the conditions around them, simplified."""
    found = [(r, known) for r in E.reads(*L.expressions(s)) if r.attr is update.buffer and s is not update]
    for c in L.children(s):
        more = map(simplify, E.conjuncts(s.cond)) if isinstance(s, L.If) and c is s.then else ()
        found += guarded_reads(c, update, known.union(more))
    return found


def _in_range(update: L.Accumulate, condition: Expr) -> bool:
    """Whether all places that the variables of a condition choose are in range even where it does not hold."""
    places = ((i, n) for b, indices in L.places(update) for i, n in zip(indices, b.shape, strict=True))
    chosen = [(i, n) for i, n in places if not set(E.variables(condition)).isdisjoint(E.variables(i))]
    return not E.reads(condition) and all(not E.reads(i) and within(i, n) for i, n in chosen)


def _implied(condition: Expr, update: L.Accumulate, read: Expr, known: Collection[Expr]) -> bool:
    """Whether a read finds only elements for which the condition held."""
    if condition.op not in ("lt", "le"):
        return False
    below, above = condition.args
    own = set(E.variables(*update.indices))
    wanted = [E.substitute(condition, {i: a for i, a in zip(update.indices, read.args, strict=True) if i.op == "var"})]
    for index, there in zip(update.indices, read.args, strict=True):
        rest = simplify(above - below + index)  # the condition: index < rest
        wanted += [there < rest if condition.op == "lt" else there <= rest] if own.isdisjoint(E.variables(rest)) else []
    return any(prove(w) or simplify(w) in known for w in wanted if own.isdisjoint(E.variables(w)))


def clean(kernel: L.Kernel) -> L.Kernel:
    """Simplify expressions, turn guards on a loop variable into shorter extents, drop empty and one-trip loops, and unused temporaries.

    Always legal. Good as the last step: it leaves what a person would write. Loops that vanish can no longer be named.

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


def _clean(s: L.Stmt) -> L.Stmt:
    match s:
        case L.Block(stmts):
            return L.block(*map(_clean, stmts))
        case L.For(v, extent, body, kind):
            extent = as_dim(simplify(as_expr(extent)))
            if extent == 1 and kind != L.VECTORIZED:
                return _clean(rebind(body, {v: as_expr(0)}))
            if (isinstance(extent, int) and extent <= 0) or _empty(body := _clean(body)):
                return L.Block(())
            if kind != L.VECTORIZED and (shorter := _limit(v, extent, body)) is not None:
                w = loop_var(v.name, shorter)
                return _clean(L.For(w, shorter, rebind(body, {v: w}), kind))
            return L.For(v, extent, body, kind)
        case L.If(cond, then, otherwise):
            cond = simplify(cond)
            if cond.op == "const":
                return _clean(then if cond.attr else otherwise or L.Block(()))
            then, otherwise = _clean(then), None if otherwise is None or _empty(rest := _clean(otherwise)) else rest
            if _empty(then):
                return L.Block(()) if otherwise is None else L.If(simplify(~cond), otherwise)
            return L.If(cond, then, otherwise)
        case L.Allocate(b, body):
            body = _clean(body)
            return L.Allocate(b, body) if _is_read(body, b) else _clean(_without_stores(body, b))
    return L.with_children(s, [_clean(c) for c in L.children(s)]) if L.children(s) else L.map_expressions(s, simplify)


def _is_read(s: L.Stmt, b: L.Buffer) -> bool:
    """Whether anything may read a buffer: an expression, or an instruction that is given it."""
    return any(isinstance(x, L.Call) or any(r.attr is b for r in E.reads(*L.expressions(x))) for x in L.walk(s))


def _without_stores(s: L.Stmt, b: L.Buffer) -> L.Stmt:
    if isinstance(s, L.Store | L.Accumulate | L.Prefetch):
        return L.Block(()) if s.buffer is b else s
    return L.with_children(s, [_without_stores(c, b) for c in L.children(s)])


def _empty(s: L.Stmt) -> bool:
    return isinstance(s, L.Block) and not s.stmts


def _limit(v: Expr, extent: Dim, body: L.Stmt) -> Dim | None:
    """A smaller extent, where everything inside the loop stands under a guard `v < constant`."""
    _, leaf = L.perfect(body)
    conditions = E.conjuncts(leaf.cond) if isinstance(leaf, L.If) and leaf.otherwise is None and isinstance(extent, int) else []
    limits = (c.args[1] for c in conditions if c.op == "lt" and c.args[0] is v)
    return next((int(n.attr) for n in limits if n.op == "const" and 0 <= n.attr < extent), None)


def note(kernel: L.Kernel, text: str) -> L.Kernel:
    """A remark for people, printed with the kernel: for example, why a step was not taken. Always legal: it changes nothing that is
    computed.

    >>> A = te.placeholder((4,), name="A")
    >>> s = Schedule(te.compute((4,), lambda i: A[i] * 2, name="B"))
    >>> s.note("too short for lanes")
    >>> s.kernel.notes
    ('too short for lanes',)
    """
    return replace(kernel, notes=(*kernel.notes, text))
