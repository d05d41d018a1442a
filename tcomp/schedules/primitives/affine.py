"""Any affine order of the instances of a nest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import islpy as isl

from tcomp.ir.loops import SERIAL, Call, For, Kernel, Stmt, walk
from tcomp.ir.polyhedral import Model, Relation, TooHard, limited, model
from tcomp.ir.scanning import scan
from tcomp.schedules.legality import Conflict, Dependence, conflict_of, dependences, violated
from tcomp.schedules.primitives.edit import buffer_names, find_loop, loop_names, nesting, rebuild, refuse, refuse_conflict


def affine(kernel: Kernel, loop: str | None, order: str, names: str, parallel: str = "") -> Kernel:
    """The instances of a nest (of the whole kernel, where `loop` is None) in another order.

    `order` maps the instances `S0[i0, i1, ...], S1[...], ...` of the stores inside, counted in the order of the text with one dimension
    for each loop around them below and including `loop`, to time vectors of one length, in isl's notation; sizes and the variables of
    loops around are the parameters `p0, p1, ...` in the order of their use. `names` are those of the loops of the time dimensions, either
    for all instances, or `S0: a b c; S1: a d e`. Loops that are not needed vanish; a name that several loops need gets a number.
    Those named in `parallel` share their iterations among threads.

    Legal when the order is a one-to-one function of all instances and keeps that of every pair that touches one element, one of them writing it; the
    two stand in one iteration of a parallel loop.
    """
    target: Stmt = kernel.body if loop is None else find_loop(kernel, loop, "affine")
    if any(isinstance(s, For) and s.kind != SERIAL for s in walk(target)):
        raise refuse(kernel, "affine", "a loop inside is not serial", "change the order first, the kinds of the loops then")
    m = model(target, kernel.body)
    relation = _relation(kernel, m, order)
    try:
        with limited(50_000_000):
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
        raise refuse(kernel, "affine", f"the order mentions {', '.join(sorted(unknown))}", known and f"of the sizes and loops around, {known}")
    return relation


def reordered(kernel: Kernel, step: str, target: Stmt, m: Model, order: isl.UnionMap, names: str, parallel: Sequence[str]) -> Kernel:
    if any(isinstance(s, Call) for s in walk(target)):
        raise refuse(kernel, step, "an instruction executes some of the loops", "change the order first, tensorize then")
    if not m.instances:
        raise refuse(kernel, step, "nothing is stored there")
    maps = {}
    for x in m.instances:
        own = order.intersect_domain(isl.UnionSet.from_set(x.domain)).get_map_list()
        if own.n_map() != 1:
            raise refuse(kernel, step, f"the order has {own.n_map()} time vectors for {x.name}, `{str(x.stmt).strip()}`", "one for each instance")
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

    def unique(name: str) -> str:
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{name}.{number}"
        taken.add(candidate)
        return candidate

    new = scan(target, m, order.intersect_domain(_domains(m)), named, unique, parallel)
    return nesting(kernel, step, kernel.with_body(rebuild(kernel.body, lambda s: new if s is target else None)))


def _shared(m: Model, found: Sequence[Dependence], order: Mapping[str, Relation], names: Mapping[str, Sequence[str]], loop: str) -> Conflict | None:
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
