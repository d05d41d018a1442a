"""Loops that visit the instances of a polyhedral model in a given order.

The inverse of `model.py`: isl turns a relation from instances to time vectors into an abstract syntax tree (C. Bastoul, "Code
generation in the polyhedral model is easier than you think", 2004; T. Grosser, S. Verdoolaege, A. Cohen, "Polyhedral AST generation is
more than scanning polyhedra", 2015), which becomes loops that run from 0, guards, and the statements of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeAlias

import islpy as isl

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import indices_of, without
from tcomp.ir.expr import Dim, Expr, as_expr, bounds, const, loop_var
from tcomp.ir.loops import PARALLEL, SERIAL, Accumulate, Allocate, Buffer, For, If, Stmt, Store
from tcomp.ir.polyhedral.model import Model
from tcomp.ir.simplify import as_dim, simplify

PLACE = "_"  # the name of a time dimension that is a place in a sequence
_NODE: Any = isl.ast_node_type
_EXPR: Any = isl.ast_expr_type
_OP: Any = isl.ast_expr_op_type

Names: TypeAlias = Mapping[str, Sequence[str]]  # of the loops around each instance


def scan(stmt: Stmt, model: Model, schedule: isl.UnionMap, names: Names, fresh: Callable[[str], str], parallel: Sequence[str] = ()) -> Stmt:
    """`stmt` with its instances in the order of `schedule`, an injective map from all of them to time vectors of one length.

    The loop of time dimension `d` is called `names[x][d]` after the first instance `x` inside, made unique by `fresh`; `parallel` lists
    those that are. A dimension called `_` takes few values, each of which gets code of its own. Buffers allocated inside loops get a
    dimension for each of these loops, unless one element at a time is alive.
    """
    return _Scanner(stmt, model, names, fresh, parallel).scan(schedule)


def condition_of(sizes: isl.Set, values: Mapping[str, Expr]) -> Expr:
    """A set of parameters as a condition; `values` are the expressions of the parameters, by their names in isl."""
    return _condition(isl.AstBuild.from_context(isl.Set.universe(sizes.get_space())).expr_from_set(sizes), values)


def point_of(points: isl.Set, context: isl.Set, values: Mapping[str, Expr]) -> tuple[list[Expr], Expr]:
    """(coordinates, condition) of a set of one point, or none where the condition on the parameters does not hold. `context` is what is
    known of the parameters, `values` are their expressions."""
    build, place = isl.AstBuild.from_context(context), isl.PwMultiAff.from_set(points)
    coordinates = [simplify(_value(build.expr_from_pw_aff(place.get_pw_aff(d)), values)) for d in range(points.dim(isl.dim_type.set))]
    return coordinates, simplify(_condition(build.expr_from_set(points.params().gist(context)), values))


class _Scanner:
    def __init__(self, stmt: Stmt, model: Model, names: Names, fresh: Callable[[str], str], parallel: Sequence[str]) -> None:
        self.model, self.names, self.fresh, self.parallel = model, names, fresh, parallel
        self.instances = {x.name: x for x in model.instances}
        self.iterators = {f"t{d}": d for d in range(len(next(iter(names.values()))))}  # isl's names of the time dimensions
        self.guards: dict[Stmt, tuple[Expr, ...]] = {}
        self.homes: dict[Buffer, tuple[For, ...]] = {}
        self._survey(stmt, (), ())
        self.expanded: dict[Buffer, Buffer] = {}
        for b, loops in self.homes.items():
            inner = {x.var for x in loops}  # of a triangle, the longest row counts; a size of the whole program is what it is
            sizes = [x.extent if inner.isdisjoint(E.variables(as_expr(x.extent))) else _longest(x.extent) for x in loops]
            self.expanded[b] = Buffer(b.name, b.dtype, [*sizes, *b.shape], "global" if loops else b.scope)

    def _survey(self, stmt: Stmt, loops: tuple[For, ...], guards: tuple[Expr, ...]) -> None:
        self.guards[stmt] = guards
        if isinstance(stmt, Allocate):
            self.homes[stmt.buffer] = loops
        for child, condition in L.guarded_children(stmt):
            self._survey(child, (*loops, stmt) if isinstance(stmt, For) else loops, (*guards, condition))

    def scan(self, schedule: isl.UnionMap) -> Stmt:
        ids = reduce(isl.IdList.add, map(isl.Id, self.iterators), isl.IdList.alloc(isl.DEFAULT_CONTEXT, 0))
        build = isl.AstBuild.from_context(self.model.context).set_iterators(ids).set_options(self.constant(schedule))
        body = self.node(build.node_from_schedule_map(schedule), {name: v for v, name in self.model.parameters.items()})
        for b, loops in self.homes.items():
            body = _placed(body, self.expanded[b], b, len(loops))
        return body

    def constant(self, schedule: isl.UnionMap) -> isl.UnionMap:
        """isl's option to make no loops of the dimensions called `_`: their few values become pieces of code of their own."""
        options = isl.UnionMap("{}")
        for x, names in self.names.items():
            times = isl.Map.from_union_map(schedule.intersect_domain(isl.UnionSet.from_set(self.instances[x].domain))).range()
            for d, name in reversed([*enumerate(names)]):
                if name != PLACE:
                    times = times.project_out(isl.dim_type.set, d, 1).insert_dims(isl.dim_type.set, d, 1)
            for d, name in enumerate(names):
                if name == PLACE and not times.dim_min_val(d).eq(times.dim_max_val(d)):
                    unroll = isl.UnionSet(f"{{ unroll[{d}] }}")
                    options = options.union(isl.UnionMap.from_domain_and_range(isl.UnionSet.from_set(times), unroll))
        return options

    def node(self, node: Any, values: Mapping[str, Expr]) -> Stmt:
        match node.get_type():
            case _NODE.for_:
                return self.loop(node, values)
            case _NODE.if_:
                otherwise = self.node(node.if_get_else_node(), values) if node.if_has_else_node() else None
                cond = simplify(_condition(node.if_get_cond(), values))
                return If(cond, self.node(node.if_get_then_node(), values), otherwise)
            case _NODE.block:
                parts = node.block_get_children()
                return L.block(*(self.node(parts.get_at(n), values) for n in range(parts.n_ast_node())))
        return self.instance(node.user_get_expr(), values)

    def loop(self, node: Any, values: Mapping[str, Expr]) -> Stmt:
        iterator = node.for_get_iterator().id_get_id().get_name()
        start = simplify(_value(node.for_get_init(), values))
        if node.for_is_degenerate():
            return self.node(node.for_get_body(), {**values, iterator: start})
        step = int(node.for_get_inc().int_get_val().to_str())
        cond = node.for_get_cond()
        limit = _value(cond.op_get_arg(1), values) + (1 if cond.op_get_type() == _OP.le else 0)
        extent = as_dim(simplify(_distance(limit, start) + (step - 1)) // step)
        name = self.names[_first(node.for_get_body())][self.iterators[iterator]]
        v = loop_var(self.fresh(name), extent)
        body = self.node(node.for_get_body(), {**values, iterator: simplify(start + v * step)})
        return For(v, extent, body, PARALLEL if name in self.parallel else SERIAL)

    def instance(self, call: Any, values: Mapping[str, Expr]) -> Stmt:
        arguments = [_value(call.op_get_arg(n), values) for n in range(1, call.op_get_n_arg())]
        instance = self.instances[call.op_get_arg(0).id_get_id().get_name()]
        mapping = {x.var: simplify(a) for x, a in zip(instance.loops, arguments, strict=True)}
        stmt = L.map_expressions(instance.stmt, lambda e: simplify(E.substitute(self.renamed(e), mapping)))
        if isinstance(stmt, Store | Accumulate) and stmt.buffer in self.expanded:
            home = tuple(mapping[x.var] for x in self.homes[stmt.buffer])
            stmt = replace(stmt, buffer=self.expanded[stmt.buffer], indices=(*home, *stmt.indices))
        if not instance.exact:
            stmt = L.where([simplify(E.substitute(self.renamed(g), mapping)) for g in self.guards[instance.stmt]], stmt)
        return stmt

    def renamed(self, e: Expr) -> Expr:
        def rule(x: Expr) -> Expr | None:
            wide = self.expanded.get(x.attr) if x.op == "read" else None
            return None if wide is None else E.read(wide, (*(loop.var for loop in self.homes[x.attr]), *x.args))

        return E.rewrite(e, rule) if self.expanded else e


def _longest(extent: Dim) -> Dim:
    return extent if (high := bounds(extent)[1]) is None else high


def _distance(limit: Expr, start: Expr) -> Expr:
    """limit - start, with minima outermost: they are how codegen and simplifier see that a tile is at most so long."""
    if limit.op == "add" and limit.args[1].op == "const" and limit.args[0].op == "min":
        limit = E.minimum(*(a + limit.args[1] for a in limit.args[0].args))
    if limit.op == "min":
        return E.minimum(*(_distance(a, start) for a in limit.args))
    if start.op == "max":
        return E.minimum(*(_distance(limit, a) for a in start.args))
    return simplify(limit - start)


def _first(node: Any) -> str:
    """The name of the first instance in a node."""
    while (kind := node.get_type()) != _NODE.user:
        if kind == _NODE.block:
            node = node.block_get_children().get_at(0)
        else:
            node = node.for_get_body() if kind == _NODE.for_ else node.if_get_then_node()
    return str(node.user_get_expr().op_get_arg(0).id_get_id().get_name())


def _placed(body: Stmt, wide: Buffer, narrow: Buffer, homes: int) -> Stmt:
    """The allocation of an expanded buffer around its uses, without the dimensions that are constant there."""
    path, here, around = [], body, set[Expr]()
    while not _touches(here, wide) and len(users := [c for c in L.children(here) if any(_touches(s, wide) for s in L.walk(c))]) == 1:
        if isinstance(here, For):
            if not _distinguishes(here, wide, homes, around):  # an element lives through several iterations
                break
            around.add(here.var)
        path.append(here)
        here = users[0]
    found = indices_of(here, wide)
    varying = [d for d in range(homes) if len({p[d] for p in found}) > 1 or (found and not set(E.variables(found[0][d])) <= around)]
    if varying or not found:
        path, here = [], body
    dims = (*varying, *range(homes, len(wide.shape)))
    new = Buffer(narrow.name, narrow.dtype, [wide.shape[d] for d in dims], "global" if varying else narrow.scope)
    inside = L.redirect(here, lambda b, indices: (new, tuple(indices[d] for d in dims)) if b is wide else None)
    result: Stmt = Allocate(new, inside)
    for outer in reversed(path):
        result, here = L.with_children(outer, [result if c is here else c for c in L.children(outer)]), outer
    return result


def _distinguishes(loop: For, wide: Buffer, homes: int, around: Collection[Expr]) -> bool:
    """Whether different iterations touch different elements, as one of the expanded dimensions is an affine function of the variable."""
    found = indices_of(loop.body, wide)
    alike = [places[0] for places in zip(*(p[:homes] for p in found), strict=True) if len(set(places)) == 1]
    steps = [without(index, loop.var) or (0, index) for index in alike]
    return any(step and set(E.variables(rest)).issubset(around) for step, rest in steps)


def _touches(s: Stmt, b: Buffer) -> bool:
    return any(buffer is b for buffer, _ in L.places(s))


_BINARY = {
    _OP.add: "add", _OP.sub: "sub", _OP.mul: "mul", _OP.div: "floordiv", _OP.fdiv_q: "floordiv", _OP.pdiv_q: "floordiv", _OP.pdiv_r: "mod",
    _OP.zdiv_r: "mod", _OP.eq: "eq", _OP.le: "le", _OP.lt: "lt", _OP.and_: "and", _OP.and_then: "and", _OP.or_: "or", _OP.or_else: "or",
    _OP.min: "min", _OP.max: "max",
}  # fmt: skip


def _value(e: Any, values: Mapping[str, Expr]) -> Expr:
    """An isl AST expression, given its identifiers. Divisions are floor divisions, or exact."""
    match e.get_type():
        case _EXPR.int:
            return const(int(e.int_get_val().to_str()))
        case _EXPR.id:
            return values[e.id_get_id().get_name()]
    op = e.op_get_type()
    if op in (_OP.cond, _OP.select):
        return E.select(_condition(e.op_get_arg(0), values), _value(e.op_get_arg(1), values), _value(e.op_get_arg(2), values))
    args = [_value(e.op_get_arg(k), values) for k in range(e.op_get_n_arg())]
    if op == _OP.minus:
        return -args[0]
    if op in (_OP.ge, _OP.gt):
        return E.binary("le" if op == _OP.ge else "lt", args[1], args[0])
    return reduce(partial(E.binary, _BINARY[op]), args)


def _condition(e: Any, values: Mapping[str, Expr]) -> Expr:
    value = _value(e, values)
    return value if value.dtype == "bool" else E.binary("ne", value, 0)
