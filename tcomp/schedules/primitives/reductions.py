"""Reductions: partial results, where they are initialised, and guards inside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tcomp.ir import expr as E
from tcomp.ir.access import in_range
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import (
    GPU_AXES,
    PARALLEL,
    SERIAL,
    UNROLLED,
    Accumulate,
    Allocate,
    Block,
    Buffer,
    Call,
    For,
    If,
    Kernel,
    Stmt,
    Store,
    While,
    block,
    children,
    expressions,
    perfect,
    walk,
)
from tcomp.ir.simplify import linear, prove, simplify
from tcomp.schedules.analysis.dependence import determined
from tcomp.schedules.analysis.legality import out_of_bounds, race
from tcomp.schedules.handles import PartialResults
from tcomp.schedules.primitives.editing import (
    check_factor,
    enclosing,
    find_buffer,
    find_loop,
    fresh,
    guard,
    hoist_allocation,
    rebind,
    rebuild,
    refuse,
    refuse_conflict,
    renamed,
    replace_loop,
    touches,
)
from tcomp.schedules.primitives.tail_strategies import always_in_range, masked_accumulation, range_depends_on


@dataclass(frozen=True, slots=True)
class _Reduction:
    """One accumulation, and the loops and conditions around it, outermost first."""

    loops: tuple[For, ...]
    conditions: tuple[Expr, ...]
    update: Accumulate

    @property
    def spatial(self) -> list[For]:
        """The loops that say which element is accumulated into; the others are those of the reduction."""
        return [x for x in self.loops if x.var in E.variables(*self.update.indices)]

    @property
    def loops_reduced(self) -> list[For]:
        return [x for x in self.loops if x.var not in E.variables(*self.update.indices)]


def rfactor(kernel: Kernel, stage: str, loop: str, lanes: int) -> tuple[Kernel, PartialResults]:
    """Cut a reduction loop into `lanes` interleaved ones: partial[.., l] reduces the elements congruent to l modulo `lanes`; these partial
    results are then reduced, in order of l.

    Legal for a loop of a perfect nest around nothing but one accumulation into `stage`, each of whose elements belongs to one iteration
    of the other loops that it is indexed with. Floats are rounded otherwise (always in the same way). Good for vector lanes and threads
    along a reduction, and for long reductions to few results. Returns the name of the stage of partial results, which knows its loops
    (`PartialResults`).

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A, k = te.placeholder((12,), name="A"), te.reduce_axis(12, "k")
    >>> s = Schedule(te.compute((), lambda: te.sum(A[k], k), "t"))
    >>> s.rfactor("t", "t.k", 4)
    't.p'
    >>> print(s.kernel.body)
    alloc t.p: float32[4]
    for t.p.init.lane in 0..4 {
      t.p[t.p.init.lane] = 0.0f
    }
    for t.p.lane in 0..4 {
      for t.k.o in 0..3 {
        t.p[t.p.lane] += A[t.k.o * 4 + t.p.lane]
      }
    }
    t[] = 0.0f
    for t.lane in 0..4 {
      t[] += t.p[t.lane]
    }
    """
    buffer, target = find_buffer(kernel, stage, "rfactor"), find_loop(kernel, loop, "rfactor")
    nest = _top(kernel, target)
    found = _reduction(kernel, "rfactor", nest, buffer)
    alone = all(s is found.update for s in walk(nest) if not children(s))
    if not alone or len(perfect(nest)[0]) != len(found.loops):
        raise refuse(kernel, "rfactor", f"`{stage}` is not all that is computed in `{nest.var.name}`", "separate it first")
    if target not in found.loops_reduced:
        raise refuse(kernel, "rfactor", f"`{loop}` is no reduction loop of `{stage}`")
    check_factor(kernel, "rfactor", lanes, "number of lanes")
    for x in found.loops_reduced:
        if x.kind not in (SERIAL, UNROLLED):
            raise refuse(kernel, "rfactor", f"the reduction loop `{x.var.name}` is {x.kind} already", "make the lanes first")
    kept = _of_places(kernel, "rfactor", found)
    name = fresh(kernel, stage + ".p")
    partial = Buffer(name, buffer.dtype, (*buffer.shape, lanes))
    places, reducer = found.update.indices, found.update.reducer
    extent = as_expr(target.extent)
    outer_extent = as_dim((extent + (lanes - 1)) // lanes)
    outer, lane = loop_var(fresh(kernel, loop + ".o"), outer_extent), loop_var(f"{name}.lane", lanes)
    index = outer * lanes + lane
    update = guard(found.conditions, replace(found.update, buffer=partial, indices=(*places, lane)))
    for x in reversed(found.loops):
        update = (
            For(outer, outer_extent, guard([index < extent], rebind(update, {target.var: index})), target.kind)
            if x is target
            else replace(x, body=update)
        )
        if x is found.loops_reduced[0]:
            update = For(lane, lanes, update)

    def around(inner: Stmt) -> Stmt:
        inner = guard(kept, inner)
        for x in reversed(found.spatial):
            inner = replace(x, body=inner)
        return inner

    tails = [x.var.name.rsplit(".", 1)[-1] for x in found.spatial]
    unique = [t if [*tails, "lane"].count(t) == 1 else f"{t}{n}" for n, t in enumerate(tails)]
    unique = [t if unique.count(t) == 1 else f"{t}_{n}" for n, t in enumerate(unique)]
    tail = dict(zip((x.var.name for x in found.spatial), unique, strict=True))

    def within(prefix: str) -> Callable[[str], str]:
        return lambda n: fresh(kernel, f"{name}.{prefix}{tail[n]}") if n in tail else n

    init_lane, final_lane = loop_var(f"{name}.init.lane", lanes), loop_var(fresh(kernel, f"{stage}.lane"), lanes)
    init = renamed(around(For(init_lane, lanes, Store(partial, (*places, init_lane), reducer.identity))), within("init."))
    final = around(For(final_lane, lanes, Accumulate(buffer, places, E.read(partial, (*places, final_lane)), reducer)))
    clear = _clear_alone(kernel, nest, buffer)  # goes with the reduction of the partial results, so that these can be moved as one stage
    new = Allocate(partial, block(init, renamed(update, within("")), *clear, final))
    changed = kernel.with_body(rebuild(kernel.body, lambda s: new if s is nest else (Block(()) if s in clear else None)))
    for x in enclosing(changed, new):  # where nothing is accumulated, an element is read and written all the same
        if x.kind in (PARALLEL, *GPU_AXES) and (conflict := race(x, within=changed.body)) is not None:
            raise refuse_conflict(kernel, "rfactor", f"iterations of `{x.var.name}`", conflict)
    made = PartialResults(name, init_lane.name, lane.name, final_lane.name, outer.name)
    return changed if enclosing(changed, new) else changed.with_body(hoist_allocation(changed.body, partial)), made


def decompose_reduction(kernel: Kernel, stage: str, loop: str) -> Kernel:
    """Initialise the elements that a loop accumulates into just before that loop, instead of all of them before the whole nest.

    Legal when no reduction loop of the stage stands around the loop, the loops that initialise it are as lowered and stand beside its nest, and the
    loops around the accumulation reach every element once (they may have been split and reordered). Good for elements that then stay in
    registers, or in a cache, from their first value to the last. The loops of the initial values are named `stage.init...`.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A, k = te.placeholder((4, 6), name="A"), te.reduce_axis(6, "k")
    >>> s = Schedule(te.compute((4,), lambda i: te.sum(A[i, k], k), "B"))
    >>> print(s.kernel.body)
    for B.init.i in 0..4 {
      B[B.init.i] = 0.0f
    }
    for B.i in 0..4 {
      for B.k in 0..6 {
        B[B.i] += A[B.i, B.k]
      }
    }
    >>> s.decompose_reduction("B", "B.k")
    >>> print(s.kernel.body)
    for B.i in 0..4 {
      B[B.i] = 0.0f
      for B.k in 0..6 {
        B[B.i] += A[B.i, B.k]
      }
    }
    """
    step = "decompose_reduction"
    buffer, target = find_buffer(kernel, stage, step), find_loop(kernel, loop, step)
    nest = _top(kernel, target)
    found = _reduction(kernel, step, nest, buffer)
    if target not in found.loops:
        raise refuse(kernel, step, f"`{stage}` is not accumulated inside of `{loop}`")
    depth = found.loops.index(target)
    for x in found.loops[:depth]:
        if x in found.loops_reduced:
            raise refuse(kernel, step, f"`{x.var.name}`, a reduction loop of `{stage}`, stands around `{loop}`: each iteration would start anew")
    kept = _of_places(kernel, step, found)
    clear = _clearing(kernel, step, nest, buffer)
    if not _covers(buffer.shape, found, kept):
        why = f"cannot prove that the loops around the accumulation reach every element of `{stage}` once"
        raise refuse(kernel, step, why, "decompose before the loops are fused or partitioned")
    _, leaf = perfect(clear)
    assert isinstance(leaf, Store)
    value = E.substitute(leaf.value, dict(zip(leaf.indices, found.update.indices, strict=True)))
    init = guard(kept, Store(buffer, found.update.indices, simplify(value)))
    for x in reversed([x for x in found.loops[depth:] if x in found.spatial]):
        init = replace(x, body=init, kind=SERIAL)
    emptied = kernel.with_body(rebuild(kernel.body, lambda s: Block(()) if s is clear else None))
    init = renamed(init, lambda n: fresh(emptied, f"{stage}.init.{n.removeprefix(stage + '.')}"))
    return replace_loop(emptied, target, block(init, target))


def _top(kernel: Kernel, loop: For) -> For:
    """The outermost loop of the perfect nest in which a loop stands."""
    return next(s for s in walk(kernel.body) if isinstance(s, For) and loop in perfect(s)[0])


def _reduction(kernel: Kernel, step: str, nest: For, buffer: Buffer) -> _Reduction:
    """The one accumulation into `buffer` that stands in a nest; refuses if there are others, or other uses of it."""
    users = [s for s in walk(nest) if touches(s, buffer)]
    if len(users) != 1 or not isinstance(users[0], Accumulate) or any(r.attr is buffer for r in E.reads(*users[0].indices, users[0].value)):
        why = f"`{nest.var.name}` does more with `{buffer.name}` than to accumulate into it once"
        raise refuse(kernel, step, why if users else f"`{buffer.name}` is not accumulated inside of `{nest.var.name}`")
    update = users[0]
    loops: list[For] = []
    conditions: list[Expr] = []
    s: Stmt = nest
    while s is not update:
        if isinstance(s, For):
            loops.append(s)
        elif isinstance(s, If) and s.otherwise is None:
            conditions += E.conjuncts(s.cond)
        elif not isinstance(s, Block | Allocate):
            kind = {If: "a branch", While: "a while loop", Call: "an instruction"}[type(s)]
            raise refuse(kernel, step, f"`{buffer.name}` is accumulated inside of {kind}")
        s = next(c for c in children(s) if any(x is update for x in walk(c)))
    return _Reduction(tuple(loops), tuple(conditions), update)


def _of_places(kernel: Kernel, step: str, found: _Reduction) -> list[Expr]:
    """The conditions that say which elements are accumulated into. Refuses unless each element belongs to one iteration of the spatial loops."""
    name, reduced, places = found.update.buffer.name, {x.var for x in found.loops_reduced}, found.update.indices
    if not {x.var for x in found.spatial} <= determined([places], {x.var for x in found.loops}):
        raise refuse(kernel, step, f"iterations of {', '.join(x.var.name for x in found.spatial)} may accumulate into one element of `{name}`")
    if any(r for i in places for r in E.reads(i)):
        raise refuse(kernel, step, f"the places of `{name}` that are accumulated into depend on data")
    for x in found.spatial:
        if reduced & set(E.variables(as_expr(x.extent))):
            raise refuse(kernel, step, f"the extent of `{x.var.name}` depends on a reduction loop: {x.extent}")
    kept = [c for c in found.conditions if reduced.isdisjoint(E.variables(c))]
    if reduced & range_depends_on(found.update, found.conditions):
        raise refuse(kernel, step, f"which elements of `{name}` are accumulated into depends on the reduction")
    if not in_range(places, found.update.buffer.shape):
        for x in found.loops_reduced:
            if not prove(as_expr(x.extent) >= 1):
                raise refuse(kernel, step, f"elements may be out of range where `{x.var.name}` has no iterations")
    return kept


def _clearing(kernel: Kernel, step: str, nest: For, buffer: Buffer) -> Stmt:
    """The nest that stores the initial value of each element of a buffer, the last statement before `nest` that has to do with it."""
    before = _before(kernel, nest)
    number = max((n for n, s in enumerate(before) if any(touches(x, buffer) for x in walk(s))), default=None)
    if number is None:
        raise refuse(kernel, step, f"the loops that initialise `{buffer.name}` do not stand beside `{nest.var.name}`")
    clear = before[number]
    loops, leaf = perfect(clear)
    extents = {x.var: x.extent for x in loops}
    why = f"the loops that initialise `{buffer.name}` have been changed already"
    if not isinstance(leaf, Store) or leaf.buffer is not buffer or not len(set(leaf.indices)) == len(loops) == len(buffer.shape):
        raise refuse(kernel, step, why, "decompose before reshaping them")
    if any(as_dim(extents.get(i, -1)) != as_dim(n) for i, n in zip(leaf.indices, buffer.shape, strict=True)):
        raise refuse(kernel, step, why, "decompose before reshaping them")
    read = {r.attr for r in E.reads(leaf.value)}
    between = [x for s in (*before[number:], nest) for x in walk(s)]
    if any(isinstance(x, Store | Accumulate) and x.buffer in read for x in between):
        raise refuse(kernel, step, f"what `{buffer.name}` is initialised with changes before it is accumulated into")
    return clear


def _before(kernel: Kernel, nest: For) -> tuple[Stmt, ...]:
    """The statements ahead of a nest in its sequence."""
    around = next((s.stmts for s in walk(kernel.body) if isinstance(s, Block) and nest in s.stmts), (nest,))
    return around[: around.index(nest)]


def _clear_alone(kernel: Kernel, nest: For, buffer: Buffer) -> list[Stmt]:
    """The statement just before a nest, if all it does is to store values in `buffer` that are computed from nothing."""
    before = _before(kernel, nest)[-1:]
    inside = [x for s in before for x in walk(s)]
    only = all(x.buffer is buffer for x in inside if isinstance(x, Store | Accumulate))
    return list(before) if only and not any(E.reads(*expressions(x)) for x in inside) else []


def _covers(shape: Sequence[Dim], found: _Reduction, conditions: Sequence[Expr]) -> bool:
    """Whether the places take every value within the shape: along each dimension the loops are the digits of a number."""
    extents = {x.var: x.extent for x in found.spatial}
    allowed = {simplify(i < as_expr(n)) for i, n in zip(found.update.indices, shape, strict=True)}
    if not set(map(simplify, conditions)) <= allowed:
        return False
    for place, n in zip(found.update.indices, shape, strict=True):
        reach: Dim = 1
        for monomial, weight in sorted(linear(simplify(place)).items(), key=lambda term: term[1]):
            extent = extents.pop(monomial[0], None) if len(monomial) == 1 else None
            if extent is None or weight != reach or not {x.var for x in found.loops}.isdisjoint(E.variables(as_expr(extent))):
                return False
            reach = as_dim(as_expr(extent) * weight)
        if not prove(as_expr(reach) >= as_expr(n)):
            return False
    return True


def mask(kernel: Kernel, stage: str) -> Kernel:
    """`if c: s += v` becomes `s += c ? v : identity` wherever `stage` is accumulated, so that its nest is free of control flow.

    Legal where the condition is not needed to keep the place of `s` in range, nor concurrent iterations apart; a part of it that is stays
    an `If`. (What is read stays in range: the side of a selection that is not chosen is not evaluated.) Good for reductions over lanes.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A, k = te.placeholder((10,), name="A"), te.reduce_axis(10, "k")
    >>> s = Schedule(te.compute((), lambda: te.sum(A[k], k), "t"))
    >>> s.rfactor("t", "t.k", 4)
    't.p'
    >>> print(s.loops["t.p.lane"])
    for t.p.lane in 0..4 {
      for t.k.o in 0..3 {
        if t.k.o * 4 + t.p.lane < 10 {
          t.p[t.p.lane] += A[t.k.o * 4 + t.p.lane]
        }
      }
    }
    >>> s.mask("t.p")
    >>> print(s.loops["t.p.lane"])
    for t.p.lane in 0..4 {
      for t.k.o in 0..3 {
        t.p[t.p.lane] += select(t.k.o * 4 + t.p.lane < 10, A[t.k.o * 4 + t.p.lane], 0.0f)
      }
    }
    """
    buffer, doubtful = find_buffer(kernel, stage, "mask"), list[bool]()

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, If) and s.otherwise is None and isinstance(s.then, Accumulate) and s.then.buffer is buffer:
            doubtful.append(not always_in_range(s.then))
            masked = masked_accumulation(kernel, E.conjuncts(s.cond), s.then)
            if isinstance(masked, If) and isinstance(masked.then, Accumulate) and masked.then.value is s.then.value:
                why = f"`{s.cond}` keeps the places of `{stage}` in range, or concurrent iterations apart: it has to stay an `If`"
                raise refuse(kernel, "mask", why)
            return masked
        return None

    changed = kernel.with_body(rebuild(kernel.body, edit))
    if any(doubtful) and (touch := out_of_bounds(changed.body)) is not None:
        raise refuse(kernel, "mask", f"out of range, where no condition stands around it: {touch}")
    return changed
