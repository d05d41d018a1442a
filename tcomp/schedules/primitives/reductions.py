"""Reductions: partial results, where they are initialised, and copies of the factors of sums of products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import digit, in_range, indices_of
from tcomp.ir.dtypes import integer_range, is_float, is_integer, itemsize
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, loop_var
from tcomp.ir.linear import linear
from tcomp.ir.simplify import as_dim, prove, simplify
from tcomp.schedules.analysis.access_patterns import Nest, nest_of
from tcomp.schedules.analysis.dependence import determined
from tcomp.schedules.analysis.legality import race
from tcomp.schedules.handles import BufferCopy, Loop, PartialResults, Stage
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import enclose, find_buffer, find_loop, fresh, guard, refuse, refuse_conflict, refuse_if, replaced
from tcomp.schedules.primitives.guards import always_in_range, guarded_reads, range_depends_on


def rfactor(kernel: L.Kernel, stage: Stage, loop: Loop, lanes: int) -> tuple[L.Kernel, PartialResults]:
    """Cut a reduction loop into `lanes` interleaved ones: partial[.., l] reduces the elements congruent to l modulo `lanes`; these partial
    results are then reduced, in order of l. Returns the name of their stage, which knows its loops (`PartialResults`).

    Legal for a loop of a perfect nest around nothing but one accumulation into `stage`, each of whose elements belongs to one iteration
    of the other loops that it is indexed with. Floats are rounded otherwise (always in the same way). Good for vector lanes and threads
    along a reduction, and for long reductions to few results.

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
    buffer, target = find_buffer(kernel, stage), find_loop(kernel, loop)
    nest, found, update = _accumulation(kernel, target, buffer)
    more = any(s is not update for s in L.walk(nest) if not L.children(s)) or len(L.perfect(nest)[0]) != len(found.loops)
    refuse_if(more, f"`{stage}` is not all that is computed in `{nest.var.name}`", "separate it first")
    refuse_if(target not in found.reduction_loops, f"`{loop}` is not a reduction loop of `{stage}`")
    editing.check_factor(lanes, "number of lanes")
    for x in found.reduction_loops:
        refuse_if(x.kind not in (L.SERIAL, L.UNROLLED), f"the reduction loop `{x.var.name}` is {x.kind} already", "make the lanes first")
    _check_elements(found)
    name, extent = fresh(kernel, f"{buffer.name}.p"), as_expr(target.extent)
    partial, outer_extent = L.Buffer(name, buffer.dtype, (*buffer.shape, lanes)), as_dim((extent + (lanes - 1)) // lanes)
    places, reducer = update.indices, update.reducer
    outer, lane = loop_var(fresh(kernel, f"{target.var.name}.o"), outer_extent), loop_var(f"{name}.lane", lanes)
    init_lane, final_lane = loop_var(f"{name}.init.lane", lanes), loop_var(fresh(kernel, f"{buffer.name}.lane"), lanes)
    index, depth = outer * lanes + lane, found.loops.index(target)
    body = guard(found.conditions, replace(update, buffer=partial, indices=(*places, lane)))
    body = editing.rebind(enclose(found.loops[depth + 1 :], body), {target.var: index})
    around = [*found.loops[:depth], L.For(outer, outer_extent, body, target.kind)]
    around.insert(found.loops.index(found.reduction_loops[0]), L.For(lane, lanes, body))

    last = [editing.last_part(x.var.name) for x in found.spatial]  # the loops of partial results: numbered where names are not unique
    last = [t if [*last, "lane"].count(t) == 1 else f"{t}{n}" for n, t in enumerate(last)]
    last = [t if last.count(t) == 1 else f"{t}_{n}" for n, t in enumerate(last)]
    short = {x.var.name: t for x, t in zip(found.spatial, last, strict=True)}

    def renamed(stmt: L.Stmt, prefix: str) -> L.Stmt:
        return editing.renamed(stmt, lambda n: fresh(kernel, f"{prefix}.{short[n]}") if n in short else n)

    def for_each_element(v: Expr, leaf: L.Stmt) -> L.Stmt:
        return enclose(found.spatial, guard(found.element_conditions, L.For(v, lanes, leaf)))

    init = renamed(for_each_element(init_lane, L.Store(partial, (*places, init_lane), reducer.identity)), f"{name}.init")
    final = for_each_element(final_lane, L.Accumulate(buffer, places, E.read(partial, (*places, final_lane)), reducer))
    # What clears the result goes with the reduction of the partial results, so that these can be moved as one stage.
    clear = [s for s in _before(kernel, nest)[-1:] if all(x.buffer is buffer for x in editing.stores(s)) and not editing.reads([s])]
    new = L.Allocate(partial, L.block(init, renamed(enclose(around, guard([index < extent], body)), name), *clear, final))
    changed = replaced(kernel, {nest: new, **dict.fromkeys(clear, L.Block(()))})
    outside = editing.enclosing(changed, new)
    for x in outside:  # where nothing is accumulated, an element is read and written all the same
        if x.kind in (L.PARALLEL, *L.GPU_AXES):
            refuse_conflict(f"iterations of `{x.var.name}`", race(x, within=changed.body))
    if not outside:  # allocations of temporaries enclose the whole body, so that all nests stay siblings in one block
        inner, temporaries = editing.without_allocation(changed.body, partial), list[L.Buffer]()
        while isinstance(inner, L.Allocate):
            temporaries.append(inner.buffer)
            inner = inner.body
        changed = changed.with_body(L.allocated([*temporaries, partial], inner))
    return changed, PartialResults(name, init_lane=init_lane.name, lane=lane.name, final_lane=final_lane.name, outer=outer.name)


def decompose_reduction(kernel: L.Kernel, stage: Stage, loop: Loop) -> L.Kernel:
    """Initialise the elements that a loop accumulates into just before that loop, instead of all of them before the whole nest.

    Legal when no reduction loop of the stage stands around the loop, the loops that initialise it are as lowered and stand next to its
    nest, and the loops around the accumulation reach every element once (they may have been split and reordered). Good for elements that
    then stay in registers, or in a cache, from their first value to the last. The new loops are named `stage.init...`.

    >>> A, k = te.placeholder((4, 6), name="A"), te.reduce_axis(6, "k")
    >>> s = Schedule(te.compute((4,), lambda i: te.sum(A[i, k], k), "B"))
    >>> s.decompose_reduction("B", "B.k")
    >>> print(s.kernel.body)
    for B.i in 0..4 {
      B[B.i] = 0.0f
      for B.k in 0..6 {
        B[B.i] += A[B.i, B.k]
      }
    }
    """
    buffer, target = find_buffer(kernel, stage), find_loop(kernel, loop)
    nest, found, update = _accumulation(kernel, target, buffer)
    refuse_if(target not in found.loops, f"`{stage}` is not accumulated inside of `{loop}`")
    depth = found.loops.index(target)
    for x in found.loops[:depth]:
        why = f"`{x.var.name}`, a reduction loop of `{stage}`, stands around `{loop}`: each iteration would clear the elements again"
        refuse_if(x in found.reduction_loops, why)
    _check_elements(found)
    clear, leaf = _clearing(kernel, nest, buffer)
    why = f"cannot prove that the loops around the accumulation reach every element of `{stage}` once"
    refuse_if(not _covers(buffer, found), why, "decompose before the loops are fused or partitioned")
    value = E.substitute(leaf.value, dict(zip(leaf.indices, update.indices, strict=True)))
    init = guard(found.element_conditions, L.Store(buffer, update.indices, simplify(value)))
    init = enclose([replace(x, kind=L.SERIAL) for x in found.loops[depth:] if x in found.spatial], init)
    emptied = replaced(kernel, {clear: L.Block(())})
    init = editing.renamed(init, lambda n: editing.part_name(emptied, f"{buffer.name}.init", buffer, n))
    return replaced(emptied, {target: L.block(init, target)})


def _accumulation(kernel: L.Kernel, loop: L.For, buffer: L.Buffer) -> tuple[L.For, Nest, L.Accumulate]:
    """The outermost loop of the perfect nest that a loop stands in, and the one accumulation into `buffer` in it, the only use of that."""
    nest = next(s for s in L.walk(kernel.body) if isinstance(s, L.For) and loop in L.perfect(s)[0])
    users = [s for s in L.walk(nest) if any(b is buffer for b, _ in L.places(s))]
    refuse_if(not users, f"`{buffer.name}` is not accumulated inside of `{nest.var.name}`")
    update = users[0]
    if len(users) != 1 or not isinstance(update, L.Accumulate) or buffer in editing.reads([update]):
        raise refuse(f"`{nest.var.name}` does more with `{buffer.name}` than to accumulate into it once")
    around = editing.path(nest, update)[:-1]
    for s in around:
        kind = {L.If: "a branch", L.While: "a while loop", L.Call: "an instruction"}.get(type(s))
        refuse_if(kind and not (isinstance(s, L.If) and s.otherwise is None), f"`{buffer.name}` is accumulated inside of {kind}")
    conditions = tuple(c for s in around if isinstance(s, L.If) for c in E.conjuncts(s.cond))
    return nest, Nest(tuple(s for s in around if isinstance(s, L.For)), update, conditions), update


def _check_elements(found: Nest) -> None:
    """Refuses unless each element belongs to one iteration of the spatial loops, whichever that of the reduction loops is."""
    assert isinstance(found.leaf, L.Accumulate)
    name, reduced, places = found.writes.name, {x.var for x in found.reduction_loops}, found.leaf.indices
    shared = {x.var for x in found.spatial} - determined([places], {x.var for x in found.loops})
    refuse_if(shared, f"iterations of {', '.join(x.var.name for x in found.spatial)} may accumulate into one element of `{name}`")
    refuse_if(E.reads(*places), f"the places of `{name}` that are accumulated into depend on data")
    for x in found.spatial:
        refuse_if(reduced & set(E.variables(as_expr(x.extent))), f"the extent of `{x.var.name}` depends on a reduction loop: {x.extent}")
    moving = reduced & range_depends_on(found.leaf, found.conditions)
    refuse_if(moving, f"which elements of `{name}` are accumulated into depends on the reduction")
    for x in found.reduction_loops if not in_range(places, found.writes.shape) else ():
        refuse_if(not prove(as_expr(x.extent) >= 1), f"elements may be out of range where `{x.var.name}` has no iterations")


def _clearing(kernel: L.Kernel, nest: L.For, buffer: L.Buffer) -> tuple[L.Stmt, L.Store]:
    """The last statement before `nest` that touches a buffer, a nest that stores the initial value of each element; and its store."""
    before = _before(kernel, nest)
    number = max((n for n, s in enumerate(before) if indices_of(s, buffer)), default=None)
    if number is None:
        raise refuse(f"the loops that initialise `{buffer.name}` do not stand next to `{nest.var.name}`")
    loops, leaf = L.perfect(before[number])
    extents = {x.var: x.extent for x in loops}
    plain = isinstance(leaf, L.Store) and leaf.buffer is buffer and len(set(leaf.indices)) == len(loops) == len(buffer.shape)
    if not isinstance(leaf, L.Store) or not plain or [extents.get(i, -1) for i in leaf.indices] != [*buffer.shape]:
        raise refuse(f"the loops that initialise `{buffer.name}` have been changed already", "decompose before reshaping them")
    changes = any(editing.writes(s, r.attr) for s in (*before[number:], nest) for r in E.reads(leaf.value))
    refuse_if(changes, f"what `{buffer.name}` is initialised with changes before it is accumulated into")
    return before[number], leaf


def _before(kernel: L.Kernel, nest: L.For) -> tuple[L.Stmt, ...]:
    """The statements in front of a nest in its sequence."""
    around = next((s.stmts for s in L.walk(kernel.body) if isinstance(s, L.Block) and nest in s.stmts), (nest,))
    return around[: around.index(nest)]


def _covers(buffer: L.Buffer, found: Nest) -> bool:
    """Whether the places take every value within the shape: along each dimension the loops are the digits of a number."""
    extents = {x.var: x.extent for x in found.spatial}
    indices = [*zip(found.leaf.indices, buffer.shape, strict=True)]
    if not set(map(simplify, found.element_conditions)) <= {simplify(i < as_expr(n)) for i, n in indices}:
        return False
    for place, n in indices:
        reach: Dim = 1
        for monomial, weight in sorted(linear(simplify(place)).items(), key=lambda term: term[1]):
            extent = extents.pop(monomial[0], None) if len(monomial) == 1 else None
            if extent is None or weight != reach or not {x.var for x in found.loops}.isdisjoint(E.variables(as_expr(extent))):
                return False
            reach = as_dim(as_expr(extent) * weight)
        if not prove(as_expr(reach) >= as_expr(n)):
            return False
    return True


def cache_factors(
    kernel: L.Kernel, loop: Loop, left: str, right: str, scope: str = "global", dtype: str = ""
) -> tuple[L.Kernel, BufferCopy, BufferCopy]:
    """Copy the factors of the products that a loop's body sums into new buffers first, and multiply these.

    A buffer has one dimension for each loop inside that its factor depends on, in their order, and one nest that fills it, with the loops
    `left.0`, `left.1`, ... (the names returned know them). Conditions of the sum go to the copies: an element whose product is not summed
    is zero. What widens a factor for the product (a conversion to a type that holds all its values, a cut to tf32) is left to the product,
    so that copies are small; with a `dtype` of integers, smaller ones are widened to it in the copies, as an instruction takes them.

    Legal where the body is one sum of products over loops of constant extent, and each of its conditions depends on what both factors
    depend on, or holds for a whole element of the sum, which nobody may use where it does not hold. A sum that is a negative zero may
    become a positive one. Good for products whose operands are used many times: the copies are read without conditions and without the
    index arithmetic of the operands (a convolution becomes a product of matrices, made tile by tile). `cache_read` copies a box of a
    buffer instead, in which elements lie as they do there.

      >>> A, B, k = te.placeholder((9,), name="A"), te.placeholder((3,), name="B"), te.reduce_axis(3, "k")
      >>> s = Schedule(te.compute((7,), lambda i: te.sum(A[i + k] * B[k], k), name="C"))
      >>> outer, inner = s.split("C.k", 2)
      >>> s.reorder(outer, "C.i", inner, reassociate=True)
      >>> s.cache_factors(outer, "a", "b")
      ('a', 'b')
      >>> print(s.loops[outer])
      for C.k.o in 0..2 {
        alloc a: float32[7, 2]
        alloc b: float32[2]
        for a.0 in 0..7 {
          for a.1 in 0..2 {
            a[a.0, a.1] = select(C.k.o * 2 + a.1 < 3, A[C.k.o * 2 + a.0 + a.1], 0.0f)
          }
        }
        for b.0 in 0..2 {
          b[b.0] = select(C.k.o * 2 + b.0 < 3, B[C.k.o * 2 + b.0], 0.0f)
        }
        for C.i in 0..7 {
          for C.k.i in 0..2 {
            C[C.i] += a[C.i, C.k.i] * b[C.k.i]
          }
        }
      }
    """
    target = find_loop(kernel, loop)
    editing.check_shared_memory(kernel, scope, target)
    found = nest_of(target.body)
    update = found.leaf if found is not None else None
    product, masks = product_of(update) if isinstance(update, L.Accumulate) else (None, [])
    if found is None or product is None or not isinstance(update, L.Accumulate):
        raise refuse(f"the body of `{loop}` is not one sum of products")
    for x in found.loops:
        if x.kind not in (L.SERIAL, L.UNROLLED) or not isinstance(x.extent, int):
            raise refuse(f"loop `{x.var.name}` is {x.kind} and runs {x.extent} times", "shape the loops afterwards")
    factors = [core_of(x) for x in product.args]
    conditions = [*found.conditions, *(c for mask in masks for c in E.conjuncts(mask))]
    own = any(r.attr is update.buffer for r in E.reads(*factors, *conditions))
    refuse_if(own, f"a factor, or a condition of the sum, is read from `{update.buffer.name}`")
    used = [[x for x in found.loops if x.var in E.variables(f)] for f in factors]
    tested_by = {c: _factors_that_test(kernel, found, update, c, used) for c in conditions}
    given = [[c for c in conditions if n in tested_by[c]] for n in range(2)]
    for core, known in zip(factors, given, strict=True):
        for c in (c for c in conditions if c not in known):
            refuse_if(not _protects_nothing(c, core, found.loops), f"`{core}` may be out of range where {c} does not hold")
    refuse_if(not always_in_range(update), f"`{E.read(update.buffer, update.indices)}` may be out of range where nothing is summed")
    names = [fresh(kernel, left), fresh(kernel, right)]
    refuse_if(names[0] == names[1], "the copies need different names")
    buffers, nests, copies, staged = [], list[L.Stmt](), [], []
    for name, whole, core, loops, known in zip(names, product.args, factors, used, given, strict=True):
        held = _widened(core, whole.dtype, dtype)
        buffers.append(local := editing.temporary(name, held.dtype, [x.extent for x in loops], scope))
        nest, loads = _copy(kernel, local, held, loops, known)
        nests.append(nest)
        copies.append(BufferCopy(name, loads=loads))
        staged.append(E.substitute(whole, {core: E.read(local, [x.var for x in loops])}))
    total = enclose(found.loops, L.Accumulate(update.buffer, update.indices, E.binary("mul", *staged), update.reducer))
    new = L.For(target.var, target.extent, L.allocated(buffers, L.block(*nests, total)), target.kind)
    return editing.nesting(replaced(kernel, {target: new})), copies[0], copies[1]


def _widened(core: Expr, whole: str, dtype: str) -> Expr:
    """A factor in `dtype`, if that is given, holds all its values, and is no more than what its product has."""
    if not dtype:
        return core
    (low, high), (least, most), (_, limit) = (integer_range(t) if is_integer(t) else (1, 0) for t in (core.dtype, dtype, whole))
    refuse_if(least > most or limit < most, f"factors of {whole} are not widened to {dtype} first")
    return E.cast(core, dtype) if low <= high and least <= low and high <= most else core


def _copy(kernel: L.Kernel, buffer: L.Buffer, factor: Expr, loops: Sequence[L.For], known: Sequence[Expr]) -> tuple[L.Stmt, list[str]]:
    """The nest that fills a buffer with a factor for each iteration of loops, zeros where a condition does not hold; and its loops."""
    zero, conditions = E.const(0, factor.dtype), list(known)
    while factor.op == "select" and factor.args[2] is zero:  # a padded operand
        conditions += E.conjuncts(factor.args[0])
        factor = factor.args[1]
    element, variables = E.select_where(conditions, factor, zero), [x.var for x in loops]

    def store(at: tuple[Expr, ...]) -> L.Stmt:
        return L.Store(buffer, at, simplify(E.substitute(element, dict(zip(variables, at, strict=True)))))

    return editing.nest_over(kernel, buffer.name, buffer.shape, store)


def product_of(update: L.Accumulate) -> tuple[Expr | None, list[Expr]]:
    """The product that is summed, and the conditions under which it is; None for any other accumulation."""
    r, value, conditions = update.reducer, update.value, list[Expr]()
    while value.op == "select" and value.args[2] is r.identity:
        conditions.append(value.args[0])
        value = value.args[1]
    adds = r.op == "add" and r.identity.op == "const" and r.identity.attr == 0
    return (value if adds and value.op == "mul" else None), conditions


def core_of(factor: Expr) -> Expr:
    """A factor without the conversions that make it fit the product: they keep zero zero, and copies of what they convert are smaller."""
    while factor.args:
        x = factor.args[0]
        widens = factor.op == "cast" and itemsize(x.dtype) <= itemsize(factor.dtype) and is_float(x.dtype) <= is_float(factor.dtype)
        cut = factor.op == "bitcast" or (factor.op == "and" and factor.args[1].op == "const" and factor.dtype == "uint32")
        if not (widens and x.dtype != "bool") and not cut:
            break
        factor = x
    return factor


def _factors_that_test(kernel: L.Kernel, found: Nest, update: L.Accumulate, condition: Expr, used: Sequence[Sequence[L.For]]) -> list[int]:
    """The factors whose copies are zero where a condition of the sum does not hold."""
    refuse_if(E.reads(condition), f"whether something is summed depends on data: {condition}")
    moving = [x for x in found.loops if x.var in E.variables(condition)]
    holders = [n for n, loops in enumerate(used) if set(moving) <= set(loops)]
    needed = len(holders) < 2
    if needed and editing.is_local(update.buffer, kernel.body) and all(x.var in update.indices for x in moving):
        # It holds for all iterations of an element of the sum or for none: is the element read in the latter case?
        number = {x.var: update.indices.index(x.var) for x in moving}
        tests = [(E.substitute(condition, {v: r.args[d] for v, d in number.items()}), k) for r, k in guarded_reads(kernel.body, update)]
        needed = not all(simplify(test) in known or prove(test) for test, known in tests)
    why = f"where {condition} does not hold, a factor would have to be zero, and the other one finite"
    refuse_if(needed or not holders, why, "make the sum's own conditions those of both factors")
    return holders


def _protects_nothing(condition: Expr, factor: Expr, inside: Sequence[L.For]) -> bool:
    """Whether a condition says nothing about where a factor is read: they depend on different digits of a fused loop, if on one loop."""
    moving = {x.var for x in inside}
    indices = [i for r in E.reads(factor) for i in r.args]
    if not moving.isdisjoint(set(E.variables(condition)) & set(E.variables(*indices))):
        return False
    tested, read = ([a for i in several if i.dtype == INDEX for m in linear(i) for a in m] for several in (condition.args, indices))
    return not any(_overlap(a, b) for a in tested for b in read if not moving >= {*E.variables(a, b)})


def _overlap(a: Expr, b: Expr) -> bool:
    if {v for v in E.variables(a) if v.attr.extent is not None}.isdisjoint(E.variables(b)):  # sizes are the same for all iterations
        return False
    one, other = digit(a), digit(b)
    ends = [(high, low) for high, low in ((one.high, other.low), (other.high, one.low)) if high is not None]
    return one.whole is not other.whole or not any(prove(high <= low) or prove(E.equal(low % high, 0)) for high, low in ends)
