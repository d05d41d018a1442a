"""Any affine order of the instances of a nest, and its everyday cases `skew` and `shift`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import islpy as isl

from tcomp.ir import expr as E
from tcomp.ir.expr import as_dim, as_expr, loop_var
from tcomp.ir.loops import SERIAL, Accumulate, Buffer, Call, For, If, Kernel, Stmt, Store, expressions, walk
from tcomp.ir.names import unused
from tcomp.ir.polyhedral.model import Instance, Model, Relation, TooHard, limited, map_of, model
from tcomp.ir.polyhedral.scanning import PLACE, scan
from tcomp.ir.simplify import simplify
from tcomp.schedules.analysis.legality import Conflict, Dependence, conflict_of, dependences, violated
from tcomp.schedules.primitives.editing import (
    buffer_names,
    find_loop,
    guard,
    loop_names,
    nesting,
    rebind,
    rebuild,
    refuse,
    refuse_conflict,
    replace_loop,
)

ISL_OPERATIONS = 50_000_000  # of isl for one proof and the loops it makes: some seconds


def affine(kernel: Kernel, loop: str | None, order: str, names: str, parallel: str = "") -> tuple[Kernel, dict[str, str]]:
    """The instances of a nest (of the whole kernel, where `loop` is None) in any affine order: interchange, tiling, skewing, shifting,
    distribution and fusion of loops in one step.

    `order` maps the instances `S0[i0, i1, ...], S1[...], ...` of the stores inside, counted in the order of the text with one dimension
    for each loop around them below and including `loop`, to time vectors of one length, in isl's notation; sizes and the variables of
    loops around are the parameters `p0, p1, ...` in the order of their use. `names` are those of the loops of the time dimensions, either
    for all instances, or `S0: a b c; S1: a d e`; a dimension called `_` is a place in a sequence and gets no loop. Loops that are not
    needed vanish; a name that several loops need gets a number. Those named in `parallel` share their iterations among threads. Returns
    the loops made, each with the name in `names` that it stands for.

    Legal when the order is a one-to-one function of all instances and keeps that of every pair that touches one element, one of them
    writing it, and no such pair is divided between iterations of a parallel loop. Good for what the other primitives cannot say: loops
    that are not nested perfectly, triangular tiles, stencils in time.

      >>> from tcomp.ir.loops import Buffer, Kernel, loop, store
      >>> from tcomp.schedules import Schedule
      >>> A = Buffer("A", "float32", (9, 9))
      >>> body = loop("i", 8, lambda i: loop("j", 8, lambda j: store(A, (i + 1, j + 1), A[i, j + 1] + A[i + 1, j])))
      >>> s = Schedule(Kernel("sums", (A,), (A,), (), body))
      >>> s.affine(None, "{ S0[i, j] -> [i + j, j] }", "front j", parallel="j")  # all of a front depends on earlier fronts only
      {'front': 'front', 'j': 'j'}
      >>> print(s)
      kernel sums(A: float32[9, 9]) -> (A) {
        for front in 0..15 {
          parallel j in 0..min(min(front + 1, front * -1 + 15), 8) {
            A[front - j - max(0, front - 7) + 1, j + max(0, front - 7) + 1] = ...
          }
        }
      }
    """
    target: Stmt = kernel.body if loop is None else find_loop(kernel, loop, "affine")
    if any(isinstance(s, For) and s.kind != SERIAL for s in walk(target)):
        raise refuse(kernel, "affine", "a loop inside is not serial", "change the order first, the kinds of the loops then")
    m = model(target, kernel.body)
    relation = _relation(kernel, m, order)
    try:
        with limited(ISL_OPERATIONS):
            return reordered(kernel, "affine", target, m, relation, names, parallel.split())
    except TooHard as error:
        raise refuse(kernel, "affine", f"isl gave up on `{order}`: {error}") from None


def _relation(kernel: Kernel, m: Model, order: str) -> isl.UnionMap:
    try:
        relation = isl.UnionMap(order)
    except isl.Error:
        raise refuse(kernel, "affine", f"`{order}` is no relation in isl's notation", "for example { S0[i, j] -> [j, i] }") from None
    space = relation.get_space()
    sizes = {str(space.get_dim_name(isl.dim_type.param, n)) for n in range(space.dim(isl.dim_type.param))}
    if unknown := sizes - set(m.parameters.values()):
        known = ", ".join(f"{name} is {v.name}" for v, name in m.parameters.items())
        raise refuse(
            kernel, "affine", f"the order mentions {', '.join(sorted(unknown))}", known and f"of the sizes and loops around, {known}"
        )
    return relation


def skew(kernel: Kernel, outer: str, inner: str, factor: int) -> Kernel:
    """Iteration `inner` of iteration `outer` becomes number `inner + factor * outer` of a longer loop, which is guarded.

    Always legal: the order stays as it is. Good for stencils in time: afterwards all dependences point forward in both loops, which may
    then be interchanged and tiled.

      >>> from tcomp.ir.loops import Buffer, Kernel, loop, store
      >>> from tcomp.schedules import Schedule
      >>> A = Buffer("A", "float32", (10,))
      >>> s = Schedule(Kernel("k", (A,), (A,), (), loop("t", 4, lambda t: loop("i", 8, lambda i: store(A, (i + 1,), A[i] + A[i + 2])))))
      >>> s.skew("t", "i", 2)
      >>> s.reorder("i", "t")
      >>> print(s)
      kernel k(A: float32[10]) -> (A) {
        for i in 0..14 {
          for t in 0..4 {
            if (t * 2 < i + 1) & (i < t * 2 + 8) {
              A[i - t * 2 + 1] = A[i - t * 2] + A[i - t * 2 + 2]
            }
          }
        }
      }
    """
    around, target = find_loop(kernel, outer, "skew"), find_loop(kernel, inner, "skew")
    if target is around or not any(s is target for s in walk(around)):
        raise refuse(kernel, "skew", f"`{inner}` does not stand inside `{outer}`")
    if any(isinstance(s, For) and s.var in E.variables(as_expr(target.extent)) for s in walk(around)):
        raise refuse(kernel, "skew", f"the extent of `{inner}` depends on a loop from `{outer}` inwards: {target.extent}")
    if target.kind != SERIAL:
        raise refuse(kernel, "skew", f"`{inner}` is {target.kind}", "skew first")
    reach = abs(factor) * (as_expr(around.extent) - 1)
    extent = as_dim(simplify(as_expr(target.extent) + reach))
    v = loop_var(inner, extent)
    index = simplify(v - factor * around.var - (reach if factor < 0 else 0))
    body = guard([index >= 0, index < as_expr(target.extent)], rebind(target.body, {target.var: index}))
    return replace_loop(kernel, target, replace(target, var=v, extent=extent, body=body))


def shift(kernel: Kernel, loop: str, stage: str, offset: int) -> Kernel:
    """The statements in a loop that compute `stage` run `offset` iterations later, all under guards where only some of them run.

    Legal when the order of dependent iterations is kept. Good for bringing a value's use to the iteration that makes it.

      >>> from tcomp.ir.loops import Buffer, Kernel, block, loop, store
      >>> from tcomp.schedules import Schedule
      >>> A, B, C = (Buffer(name, "float32", (9,)) for name in "ABC")
      >>> body = loop("i", 8, lambda i: block(store(B, (i + 1,), A[i] * 2.0), store(C, (i,), B[i] + 1.0)))
      >>> s = Schedule(Kernel("k", (A, B, C), (B, C), (), body))
      >>> s.shift("i", "C", 1)
      >>> print(s)
      kernel k(A: float32[9], B: float32[9], C: float32[9]) -> (B, C) {
        for i in 0..9 {
          if i < 8 {
            B[i + 1] = A[i] * 2.0f
          }
          if 0 < i {
            C[i - 1] = B[i - 1] + 1.0f
          }
        }
      }
    """
    target = find_loop(kernel, loop, "shift")
    found = [s for s in walk(target) if isinstance(s, Store | Accumulate) and s.buffer.name == stage]
    if not found:
        raise refuse(kernel, "shift", f"nothing in `{loop}` computes `{stage}`")
    return _moved(kernel, "shift", target, lambda x: {1: str(offset)} if x.stmt in found else {})


def _moved(kernel: Kernel, step: str, target: For, terms: Callable[[Instance], Mapping[int, str]]) -> Kernel:
    """The instances of a loop with terms added to dimensions of their time vectors, `t0, t1, ...`: places and loops in turn."""
    if any(isinstance(s, For) and s.kind != SERIAL for s in walk(target)):
        raise refuse(kernel, step, "a loop inside is not serial", "change the order first, the kinds of the loops then")
    m = model(target, kernel.body)
    order, names = isl.UnionMap("{}"), []
    for x in m.instances:
        count = x.order.dim(isl.dim_type.out)
        more = terms(x)
        times = [f"t{d}" for d in range(count)]
        new = [f"{t} + {more[d]}" if d in more else t for d, t in enumerate(times)]
        order = order.union(isl.UnionMap.from_map(x.order.apply_range(map_of(times, new))))
        loops = [PLACE] * count
        loops[1 : 2 * len(x.loops) : 2] = [loop.var.name for loop in x.loops]
        names.append(f"{x.name}: {' '.join(loops)}")
    try:
        with limited(ISL_OPERATIONS):
            return reordered(kernel, step, target, m, order, "; ".join(names), ())[0]
    except TooHard as error:
        raise refuse(kernel, step, f"isl gave up on the proof: {error}") from None


def _decided_once(target: Stmt) -> Buffer | None:
    """A buffer that a condition (or an extent) inside reads, and that is written under it by more than one instance of one statement."""
    for s in walk(target):
        if isinstance(s, If) and isinstance(s.then, Store | Accumulate) and s.otherwise is None:
            continue
        tested = {r.attr for r in E.reads(*expressions(s))} if isinstance(s, If | For) else set()
        for inside in walk(s) if tested else ():
            if isinstance(inside, Store | Accumulate) and inside.buffer in tested:
                return inside.buffer
    return None


def reordered(kernel: Kernel, step: str, target: Stmt, m: Model, order: isl.UnionMap, names: str, parallel: Sequence[str]) -> tuple[Kernel, dict[str, str]]:
    """The kernel with the instances of a part of it in another order, and the loops made; refuses what `affine` says is not legal."""
    if any(isinstance(s, Call) for s in walk(target)):
        raise refuse(kernel, step, "an instruction executes some of the loops", "change the order first, tensorize then")
    if not m.instances:
        raise refuse(kernel, step, "nothing is stored there")
    if (shared := _decided_once(target)) is not None:
        why = f"each statement gets the condition for itself, but `{shared.name}`, which is read by it, is written where it holds"
        raise refuse(kernel, step, why, "name a loop inside of the condition")
    maps = {}
    for x in m.instances:
        own = order.intersect_domain(isl.UnionSet.from_set(x.domain)).get_map_list()
        if own.n_map() != 1:
            raise refuse(
                kernel, step, f"the order has {own.n_map()} time vectors for {x.name}, `{str(x.stmt).strip()}`", "one for each instance"
            )
        maps[x.name] = own.get_at(0)
        if not x.domain.intersect_params(m.context).is_subset(maps[x.name].domain()) or not maps[x.name].is_single_valued():
            raise refuse(kernel, step, f"the order is no function of all instances of {x.name}, `{str(x.stmt).strip()}`")
    lengths = {x.dim(isl.dim_type.out) for x in maps.values()}
    named = _names(names, list(maps))
    if missing := [x for x in maps if x not in named]:
        raise refuse(kernel, step, f"`{names}` has no names of loops for {', '.join(missing)}", "a b c, or S0: a b c; S1: a d e")
    if len(lengths) > 1 or any(len(n) not in lengths for n in named.values()):
        raise refuse(kernel, step, f"time vectors of lengths {sorted(lengths)} for {len(next(iter(named.values())))} names")
    if not order.intersect_domain(_domains(m)).is_injective():
        raise refuse(kernel, step, "two instances have the same time vector")
    found = dependences(m)
    conflict = violated(m, found, maps)
    if conflict is not None:
        raise refuse_conflict(kernel, step, "the new order reverses a dependence: iterations", conflict)
    for name in parallel:
        if not any(name in names for names in named.values()):
            raise refuse(kernel, step, f"`{name}`, which should be parallel, names no loop")
        if (conflict := _shared(m, found, maps, named, name)) is not None:
            raise refuse_conflict(kernel, step, f"iterations of the parallel loop `{name}`", conflict)
    replaced = {s.var.attr.name for s in walk(target) if isinstance(s, For)}
    taken = {*loop_names(kernel), *buffer_names(kernel)} - replaced
    made: dict[str, str] = {}

    def unique(name: str) -> str:
        loop = unused(name, {*taken, *made}, "{}.{}", 2)
        made[loop] = name
        return loop

    new = scan(target, m, order.intersect_domain(_domains(m)), named, unique, parallel)
    return nesting(kernel, step, kernel.with_body(rebuild(kernel.body, lambda s: new if s is target else None))), made


def _shared(
    m: Model, found: Sequence[Dependence], order: Mapping[str, Relation], names: Mapping[str, Sequence[str]], loop: str
) -> Conflict | None:
    """A dependence between different iterations of a loop, within one iteration of the loops around it."""
    dims = {x: names[x].index(loop) for x in names if loop in names[x]}

    def until(x: str, d: int) -> Relation:
        return order[x].project_out(isl.dim_type.out, d, order[x].dim(isl.dim_type.out) - d)

    for d in found:
        a, b = d.source.name, d.target.name
        if a in dims and dims.get(b) == dims[a]:
            around, inside = (until(a, n).apply_range(until(b, n).reverse()) for n in (dims[a], dims[a] + 1))
            if (conflict := conflict_of(m, d, d.relation.intersect(around.subtract(inside)))) is not None:
                return conflict
    return None


def _domains(m: Model) -> isl.UnionSet:
    result = isl.UnionSet("{}")
    for x in m.instances:
        result = result.union(isl.UnionSet.from_set(x.domain.intersect_params(m.context)))
    return result


def _names(text: str, instances: Sequence[str]) -> dict[str, list[str]]:
    if ":" not in text:
        return dict.fromkeys(instances, text.split())
    parts = (part.partition(":") for part in text.split(";"))
    return {name.strip(): rest.split() for name, _, rest in parts}
