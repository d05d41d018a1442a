"""Affine transformations of the order of iterations, each proved legal by isl: any affine one, `skew`, `shift`, loop fission and fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import islpy as isl

from tcomp.ir import expr as E, loops as L
from tcomp.ir.expr import as_expr, loop_var
from tcomp.ir.polyhedral.model import Model, Relation, map_of, model
from tcomp.ir.polyhedral.scanning import PLACE, scan
from tcomp.ir.simplify import as_dim, same_dim, simplify
from tcomp.ir.text.printer import unused
from tcomp.schedules.analysis.legality import Conflict, Dependence, conflict_of, dependences, violated
from tcomp.schedules.handles import Loop, Stage
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import find_loop, proof, rebind, refuse, refuse_conflict, refuse_if, replaced

ISL_OPERATIONS = 50_000_000  # of isl for one proof and the loops it makes: some seconds


def affine(kernel: L.Kernel, loop: Loop | None, order: str, names: str, parallel: str = "") -> tuple[L.Kernel, dict[str, str]]:
    """The instances of a nest (of the whole kernel, where `loop` is None) in any affine order: interchange, tiling, skewing, shifting,
    distribution and fusion of loops in one step.

    `order` maps the instances `S0[i0, i1, ...], S1[...], ...` of the stores inside, counted in the order of the text with one dimension
    for each loop around them below and including `loop`, to time vectors of one length, in isl's notation; sizes and the variables of
    loops around are the parameters `p0, p1, ...` in the order of their use. `names` are those of the loops of the time dimensions, either
    for all instances, or `S0: a b c; S1: a d e`; a dimension called `_` is a place in a sequence and gets no loop. Loops that are not
    needed vanish; a name that several loops need gets a number. Those named in `parallel` share their iterations among threads. Returns
    the loops created, each with the name in `names` that it stands for.

    Legal when the order is a one-to-one function of all instances and keeps that of every pair that touches one element, one of them
    writing it, and no such pair is divided between iterations of a parallel loop. Good for what the other primitives cannot say: loops
    that are not nested perfectly, triangular tiles, stencils in time.

      >>> from tcomp.ir.loops import Buffer, Kernel, loop, store
      >>> A = Buffer("A", "float32", (9, 9))
      >>> body = loop("i", 8, lambda i: loop("j", 8, lambda j: store(A, (i + 1, j + 1), A[i, j + 1] + A[i + 1, j])))
      >>> s = Schedule(Kernel("sums", (A,), (A,), (), body))
      >>> s.affine(None, "{ S0[i, j] -> [i + j, j] }", "front j", parallel="j")  # all of a front depends on earlier fronts only
      {'front': 'front', 'j': 'j'}
      >>> print(s.kernel.body)
      for front in 0..15 {
        parallel j in 0..min(min(front + 1, front * -1 + 15), 8) {
          A[front - j - max(0, front - 7) + 1, j + max(0, front - 7) + 1] = ...
        }
      }
    """
    target: L.Stmt = kernel.body if loop is None else find_loop(kernel, loop)
    m = _serial_model(kernel, target)
    try:
        relation = isl.UnionMap(order)
    except isl.Error:
        raise refuse(f"`{order}` is not a relation in isl's notation", "for example { S0[i, j] -> [j, i] }") from None
    space = relation.get_space()
    sizes = {str(space.get_dim_name(isl.dim_type.param, n)) for n in range(space.dim(isl.dim_type.param))}
    if unknown := sizes - set(m.parameters.values()):
        known = ", ".join(f"{name} is {v.name}" for v, name in m.parameters.items())
        raise refuse(f"the order mentions {', '.join(sorted(unknown))}", known and f"of the sizes and loops around, {known}")
    return _reordered(kernel, target, m, relation, names, parallel.split())


def skew(kernel: L.Kernel, outer: Loop, inner: Loop, factor: int) -> L.Kernel:
    """Iteration `inner` of iteration `outer` becomes number `inner + factor * outer` of a longer loop, which is guarded.

    Always legal: the order stays as it is. Good for stencils in time: afterwards all dependences point forward in both loops, which may
    then be interchanged and tiled.

      >>> from tcomp.ir.loops import Buffer, Kernel, loop, store
      >>> A = Buffer("A", "float32", (10,))
      >>> s = Schedule(Kernel("k", (A,), (A,), (), loop("t", 4, lambda t: loop("i", 8, lambda i: store(A, (i + 1,), A[i] + A[i + 2])))))
      >>> s.skew("t", "i", 2)
      >>> s.reorder("i", "t")
      >>> print(s.kernel.body)
      for i in 0..14 {
        for t in 0..4 {
          if (t * 2 < i + 1) & (i < t * 2 + 8) {
            A[i - t * 2 + 1] = A[i - t * 2] + A[i - t * 2 + 2]
          }
        }
      }
    """
    around, target = find_loop(kernel, outer), find_loop(kernel, inner)
    refuse_if(target is around or not any(s is target for s in L.walk(around)), f"`{inner}` does not stand inside `{outer}`")
    moving = {s.var for s in L.walk(around) if isinstance(s, L.For)} & set(E.variables(as_expr(target.extent)))
    refuse_if(moving, f"the extent of `{inner}` depends on a loop from `{outer}` inwards: {target.extent}")
    refuse_if(target.kind != L.SERIAL, f"`{inner}` is {target.kind}", "skew first")
    reach = abs(factor) * (as_expr(around.extent) - 1)
    extent = as_dim(simplify(as_expr(target.extent) + reach))
    v = loop_var(target.var.name, extent)
    index = simplify(v - factor * around.var - (reach if factor < 0 else 0))
    body = editing.guard([index >= 0, index < as_expr(target.extent)], rebind(target.body, {target.var: index}))
    return replaced(kernel, {target: replace(target, var=v, extent=extent, body=body)})


def shift(kernel: L.Kernel, loop: Loop, stage: Stage, offset: int) -> L.Kernel:
    """The statements in a loop that compute `stage` run `offset` iterations later, all under guards where only some of them run.

    Legal when the order of dependent iterations is kept. Good for bringing a value's use to the iteration that makes it.

      >>> from tcomp.ir.loops import Buffer, Kernel, block, loop, store
      >>> A, B, C = (Buffer(name, "float32", (9,)) for name in "ABC")
      >>> body = loop("i", 8, lambda i: block(store(B, (i + 1,), A[i] * 2.0), store(C, (i,), B[i] + 1.0)))
      >>> s = Schedule(Kernel("k", (A, B, C), (B, C), (), body))
      >>> s.shift("i", "C", 1)
      >>> print(s.kernel.body)
      for i in 0..9 {
        if i < 8 {
          B[i + 1] = A[i] * 2.0f
        }
        if 0 < i {
          C[i - 1] = B[i - 1] + 1.0f
        }
      }
    """
    target, buffer = find_loop(kernel, loop), editing.find_buffer(kernel, stage)
    found = [s for s in editing.stores(target) if s.buffer is buffer]
    refuse_if(not found, f"nothing in `{loop}` computes `{stage}`")
    m = _serial_model(kernel, target)
    order, names = isl.UnionMap("{}"), []
    for x in m.instances:  # time vectors `t0, t1, ...`: places and loops in turn, the first loop being the one that is shifted
        count = x.order.dim(isl.dim_type.out)
        times = [f"t{d}" for d in range(count)]
        new = [times[0], f"t1 + {offset}", *times[2:]] if x.stmt in found else times
        order = order.union(isl.UnionMap.from_map(x.order.apply_range(map_of(times, new))))
        dims = [PLACE] * count
        dims[1 : 2 * len(x.loops) : 2] = [around.var.name for around in x.loops]
        names.append(f"{x.name}: {' '.join(dims)}")
    return _reordered(kernel, target, m, order, "; ".join(names), ())[0]


def _serial_model(kernel: L.Kernel, target: L.Stmt) -> Model:
    kinds = {s.kind for s in L.walk(target) if isinstance(s, L.For)}
    refuse_if(kinds - {L.SERIAL}, "a loop inside is not serial", "change the order first, the kinds of the loops then")
    return model(target, kernel.body)


def _reordered(
    kernel: L.Kernel, target: L.Stmt, m: Model, order: isl.UnionMap, names: str, parallel: Sequence[str]
) -> tuple[L.Kernel, dict[str, str]]:
    """The kernel with the instances of a part of it in another order, and the loops made; refuses what `affine` says is not legal."""
    calls = any(isinstance(s, L.Call) for s in L.walk(target))
    refuse_if(calls, "an instruction executes some of the loops", "change the order first, tensorize then")
    refuse_if(not m.instances, "nothing is stored there")
    # A condition of one statement is tested for each instance; others, and extents, are decided once for several.
    alone = [s for s in L.walk(target) if isinstance(s, L.If) and isinstance(s.then, L.Store | L.Accumulate) and s.otherwise is None]
    for s in (s for s in L.walk(target) if isinstance(s, L.If | L.For) and s not in alone):
        for b in (r.attr for r in E.reads(*L.expressions(s)) if editing.writes(s, r.attr)):
            why = f"each statement gets the condition for itself, but `{b.name}`, which is read by it, is written where it holds"
            raise refuse(why, "name a loop inside of the condition")
    with proof(f"`{order}`", ISL_OPERATIONS):
        maps, domains = {}, isl.UnionSet("{}")
        for x in m.instances:
            shown, known = f"{x.name}, `{str(x.stmt).strip()}`", x.domain.intersect_params(m.context)
            domains = domains.union(isl.UnionSet.from_set(known))
            own = order.intersect_domain(isl.UnionSet.from_set(x.domain)).get_map_list()
            refuse_if((count := own.n_map()) != 1, f"the order has {count} time vectors for {shown}", "one for each instance")
            maps[x.name] = time = own.get_at(0)
            function = known.is_subset(time.domain()) and time.is_single_valued()
            refuse_if(not function, f"the order is not a function of all instances of {shown}")
        lengths = {x.dim(isl.dim_type.out) for x in maps.values()}
        parts = (part.partition(":") for part in names.split(";"))
        named = {x.strip(): rest.split() for x, _, rest in parts} if ":" in names else dict.fromkeys(maps, names.split())
        if missing := [x for x in maps if x not in named]:
            raise refuse(f"`{names}` has no names of loops for {', '.join(missing)}", "a b c, or S0: a b c; S1: a d e")
        uneven = len(lengths) > 1 or any(len(n) not in lengths for n in named.values())
        refuse_if(uneven, f"time vectors of lengths {sorted(lengths)} for {len(next(iter(named.values())))} names")
        order = order.intersect_domain(domains)
        refuse_if(not order.is_injective(), "two instances have the same time vector")
        found = dependences(m)
        refuse_conflict("the new order reverses a dependence: iterations", violated(m, found, maps))
        for name in parallel:
            places = {x: names.index(name) for x, names in named.items() if name in names}
            refuse_if(not places, f"`{name}`, which should be parallel, names no loop")
            _check_parallel(m, found, maps, places, name)
        taken = {*editing.loops_of(kernel), *editing.buffers_of(kernel)} - {s.var.name for s in L.walk(target) if isinstance(s, L.For)}
        made: dict[str, str] = {}

        def unique(name: str) -> str:
            loop = unused(name, {*taken, *made}, "{}.{}", 2)
            made[loop] = name
            return loop

        return editing.nesting(replaced(kernel, {target: scan(target, m, order, named, unique, parallel)})), made


def _check_parallel(m: Model, found: Sequence[Dependence], order: Mapping[str, Relation], dims: Mapping[str, int], loop: str) -> None:
    """Refuses a dependence between different iterations of a loop, within one iteration of the loops around it."""

    def until(x: str, d: int) -> Relation:
        return order[x].project_out(isl.dim_type.out, d, order[x].dim(isl.dim_type.out) - d)

    for d in found:
        a, b = d.source.name, d.target.name
        if a in dims and dims.get(b) == dims[a]:
            around, inside = (until(a, n).apply_range(until(b, n).reverse()) for n in (dims[a], dims[a] + 1))
            refuse_conflict(f"iterations of the parallel loop `{loop}`", conflict_of(m, d, d.relation.intersect(around.subtract(inside))))


def fission(kernel: L.Kernel, loop: Loop) -> tuple[L.Kernel, *tuple[str, ...]]:
    """A loop around statements in sequence becomes one loop around each (loop distribution). Returns their names; the first keeps its own.

    Legal when no iteration of a statement needs what an earlier iteration of a later statement did. Good for giving the statements
    different schedules, and for freeing one that has independent iterations from one that has not.

      >>> from tcomp.ir.loops import Buffer, Kernel, block, loop, store
      >>> A, B, C = (Buffer(name, "float32", (9,)) for name in "ABC")
      >>> body = loop("i", 8, lambda i: block(store(B, (i + 1,), A[i] * 2.0), store(C, (i,), B[i] + 1.0)))
      >>> s = Schedule(Kernel("k", (A, B, C), (B, C), (), body))
      >>> s.fission("i")
      ('i', 'i.1')
      >>> print(s.kernel.body)
      for i in 0..8 {
        B[i + 1] = A[i] * 2.0f
      }
      for i.1 in 0..8 {
        C[i.1] = B[i.1] + 1.0f
      }
    """
    target = find_loop(kernel, loop)
    if not isinstance(target.body, L.Block) or len(target.body.stmts) < 2 or target.kind != L.SERIAL:
        raise refuse(f"`{loop}` is not a serial loop around several statements")
    first, *others = target.body.stmts
    variables = [loop_var(editing.fresh(kernel, f"{target.var.name}.{n}"), target.extent) for n in range(1, len(others) + 1)]
    copies = [replace(target, var=v, body=rebind(s, {target.var: v})) for v, s in zip(variables, others, strict=True)]
    parts = [replace(target, body=first), *copies]
    conflict = _reversed(target, L.block(*parts), kernel.body)
    refuse_conflict(f"in loops of their own, iterations of `{loop}` would change places that", conflict)
    return replaced(kernel, {target: L.block(*parts)}), *(x.var.name for x in parts)


def fuse_loops(kernel: L.Kernel, first: Loop, second: Loop) -> L.Kernel:
    """Two loops of one extent that follow each other become one, around both bodies (loop fusion).

    Legal when no iteration of the second needs what a later iteration of the first does. Good for values that are then still in
    registers or caches when they are used. The loop has the name of the first.

      >>> from tcomp.ir.loops import Buffer, Kernel, block, loop, store
      >>> A, B, C = (Buffer(name, "float32", (8,)) for name in "ABC")
      >>> body = block(loop("i", 8, lambda i: store(B, (i,), A[i] * 2.0)), loop("j", 8, lambda j: store(C, (j,), B[j] + 1.0)))
      >>> s = Schedule(Kernel("k", (A, B, C), (B, C), (), body))
      >>> s.fuse_loops("i", "j")
      >>> print(s.kernel.body)
      for i in 0..8 {
        B[i] = A[i] * 2.0f
        C[i] = B[i] + 1.0f
      }
    """
    one, two = find_loop(kernel, first), find_loop(kernel, second)
    refuse_if(one.kind != L.SERIAL or two.kind != L.SERIAL, f"`{first}` is {one.kind}, `{second}` is {two.kind}; both should be serial")
    refuse_if(not same_dim(one.extent, two.extent), f"`{first}` has {one.extent} iterations, `{second}` has {two.extent}")
    home = next((s for s in L.walk(kernel.body) if isinstance(s, L.Block) and one in s.stmts), L.Block((one,)))
    n = home.stmts.index(one)
    refuse_if(home.stmts[n + 1 : n + 2] != (two,), f"`{second}` does not follow `{first}` directly")
    joint = replace(one, body=L.block(one.body, rebind(two.body, {two.var: one.var})))
    pair = L.Block((one, two))
    before = editing.rebuild(kernel.body, lambda s: L.Block((*home.stmts[:n], pair, *home.stmts[n + 2 :])) if s is home else None)
    refuse_conflict(f"in one loop, iterations of `{first}` and `{second}` would change places that", _reversed(pair, joint, before))
    return replaced(kernel.with_body(before), {pair: joint})


def _reversed(old: L.Stmt, new: L.Stmt, within: L.Stmt) -> Conflict | None:
    """A dependence of `old`, a part of `within`, that `new`, which has the same statements in the same sequence, does not keep."""
    with proof("the proof"):
        m = model(old, within)
        return violated(m, dependences(m), {x.name: x.order for x in model(new, like=m).instances})
