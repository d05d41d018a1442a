"""The isl bridge: a loop program as integer sets and maps (S. Verdoolaege, "Presburger Formulas and Polyhedral Compilation", 2016, ch. 5).

What is not affine (products of variables, indices read from memory, data-dependent conditions, `while`) is over-approximated, never
ignored: the access may touch any element within the known bounds, the instance may or may not be executed, and `exact` is False.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import mul
from typing import TypeAlias

import islpy as isl

from tcomp.ir import expr as E, loops as L
from tcomp.ir.expr import INDEX, Expr, as_expr, bounds
from tcomp.ir.linear import linear
from tcomp.ir.loops import Accumulate, Allocate, Buffer, For, If, Stmt, Store, While
from tcomp.ir.reducers import Reducer
from tcomp.ir.simplify import simplify

READ, WRITE, REDUCE = "read", "write", "reduce"
Relation = isl.Map
Conditional: TypeAlias = tuple[Expr, tuple[Expr, ...]]  # an expression, and the conditions under which it is evaluated


def map_of(point: Sequence[str], image: Sequence[str], where: str = "") -> Relation:
    """A map of integer vectors from text: the dimensions of its points, what each becomes, and the conditions, in isl's notation."""
    return isl.Map(f"{{ [{', '.join(point)}] -> [{', '.join(image)}]{where and f' : {where}'} }}")


@dataclass(frozen=True, eq=False, slots=True)
class Access:
    """Elements of a buffer that an instance touches: `relation` maps `S0[iterations]` to `B0[outer loops..., indices...]`, where the outer
    loops are those around the allocation: a buffer allocated inside loops is new in every iteration.

    A reduction reads and writes an element by `reducer`. Without `exact` it may touch them, or only some of them.
    """

    kind: str
    buffer: Buffer
    relation: Relation
    exact: bool
    reducer: Reducer | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Instance:
    """A statement with all iterations it is executed for. Loops of all kinds count as serial: that is what they mean."""

    name: str
    stmt: Stmt  # Store, Accumulate or While (one opaque step)
    loops: tuple[For, ...]  # around it, outermost first: the dimensions of its domain
    domain: isl.Set
    order: Relation  # to time vectors compared lexicographically: [place in a sequence, loop, place, loop, ..., place]
    accesses: tuple[Access, ...]
    exact: bool


@dataclass(frozen=True, eq=False, slots=True)
class Model:
    """A statement as its instances; `parameters` are the variables that are free in it, with their names in isl."""

    instances: tuple[Instance, ...]
    parameters: Mapping[Expr, str]
    context: isl.Set  # what is known of the parameters
    boxes: Mapping[Buffer, isl.Set]  # the elements that each buffer has, where its shape is affine


def model(stmt: Stmt, within: Stmt | None = None, like: Model | None = None) -> Model:
    """The polyhedral model of a statement. If it is inside the statement `within`, the bounds of the loops and the conditions around it
    are constraints on the parameters, as far as they are affine. Parameters have the names of the model `like`, so that relations can be
    compared."""
    given = [] if within is None else _known_at(within, stmt) or []
    return _Builder(stmt, given, {} if like is None else like.parameters).model()


def written_twice(stmt: Stmt) -> Buffer | None:
    """A buffer of which several instances in a statement may write one element; None if it is proved that there is none."""
    seen: dict[Buffer, isl.Set] = {}
    for domain, access in [(i.domain, a) for i in model(stmt).instances for a in i.accesses if a.kind != READ]:
        try:
            with limited():
                relation = access.relation.intersect_domain(domain)
                before, elements = seen.get(access.buffer), relation.range()
                if not relation.is_injective() or (before is not None and not before.is_disjoint(elements)):
                    return access.buffer
                seen[access.buffer] = elements if before is None else before.union(elements)
        except TooHard:
            return access.buffer
    return None


class TooHard(Exception):
    """isl gave up on a question within its limit of operations."""


@contextmanager
def limited(operations: int = 5_000_000) -> Iterator[None]:
    """Questions asked inside raise `TooHard` instead of taking exponential time. `operations` are isl's elementary steps, ~10 ns each.
    Nested uses count on their own, and the count of the outer one starts again after them."""
    context = isl.DEFAULT_CONTEXT
    around = context.get_max_operations()
    context.set_max_operations(operations)
    context.reset_operations()
    try:
        yield
    except isl.Error as error:
        raise TooHard(str(error)) from None
    finally:
        context.set_max_operations(around)
        context.reset_operations()


class Formula:
    """A conjunction in isl's notation, with an existentially quantified variable for each part that is not affine. A condition on such
    parts is left out, unless `compares_unknowns`: then each part has one value, which all conditions and indices are about."""

    compares_unknowns = False

    def __init__(self, names: Mapping[Expr, str], parent: Formula | None = None) -> None:
        self.names = names
        self.exact: bool = parent.exact if parent else True
        self.constraints: list[str] = list(parent.constraints) if parent else []
        self.unknowns: dict[Expr, str] = dict(parent.unknowns) if parent else {}

    def text(self, *more: str) -> str:
        """The conjunction; `more` may mention unknowns."""
        body = " and ".join([*self.constraints, *more]) or "true"
        return f"exists ({', '.join(self.unknowns.values())}: {body})" if self.unknowns else body

    def add(self, condition: Expr) -> None:
        """Adds a condition; its parts that are not affine are dropped."""
        for part in E.conjuncts(condition):
            if (text := self.condition(part)) is None:
                self.exact = False
            else:
                self.constraints.append(text)

    def condition(self, e: Expr) -> str | None:
        """A condition as text; None when it is not affine."""
        match e.op:
            case "const":
                return "true" if e.attr else "false"
            case "and" | "or" | "not":
                parts = [self.condition(a) for a in e.args]
                if None in parts:
                    return None
                return f"(not ({parts[0]}))" if e.op == "not" else f"(({parts[0]}) {e.op} ({parts[1]}))"
            case "lt" | "le" | "eq" | "ne" if e.args[0].dtype == INDEX:
                trial = type(self)(self.names, self)
                trial.exact = True
                a, b = map(trial.value, e.args)
                if not (trial.exact or self.compares_unknowns):  # an unknown must not be negated: say nothing
                    return None
                self.unknowns, self.constraints, self.exact = trial.unknowns, trial.constraints, self.exact and trial.exact
                return f"{a} {_COMPARISONS[e.op]} {b}"
        return None

    def value(self, e: Expr) -> str:
        """An index expression as text."""
        terms = [f"{c}*{self.atom(reduce(mul, monomial))}" if monomial else str(c) for monomial, c in linear(e).items()]
        return f"({' + '.join(terms)})" if terms else "0"

    def atom(self, e: Expr) -> str:
        """An expression that is not a sum, as isl's text."""
        if e in self.names:
            return self.names[e]
        match e.op, e.args:
            case ("floordiv" | "mod", (a, b)) if b.op == "const" and b.attr > 0:
                return f"floor({self.value(a)} / {b.attr})" if e.op == "floordiv" else f"({self.value(a)} mod {b.attr})"
            case ("min" | "max", (a, b)) if e.dtype == INDEX:
                return f"{e.op}({self.value(a)}, {self.value(b)})"
            case ("select", (c, a, b)) if e.dtype == INDEX and e not in self.unknowns and (condition := self.condition(c)) is not None:
                sides = self.value(a), self.value(b)
                before, name = self.exact, self.unknown(e)
                self.exact = before
                self.constraints.append(f"((({condition}) and {name} = {sides[0]}) or ((not ({condition})) and {name} = {sides[1]}))")
                return name
        return self.unknown(e)

    def unknown(self, e: Expr) -> str:
        """The isl variable that represents a sub-expression that is not affine."""
        if e not in self.unknowns:
            self.exact = False
            self.unknowns[e] = name = f"e{len(self.unknowns)}"
            self.between(name, *bounds(e))
        return self.unknowns[e]

    def between(self, name: str, lo: int | None, hi: int | None) -> None:
        """The range of a variable."""
        self.constraints += [f"{name} >= {lo}"] * (lo is not None) + [f"{name} <= {hi}"] * (hi is not None)

    def box(self, b: Buffer) -> list[str]:
        """The names of the indices of a buffer's elements, which are constrained to its shape."""
        places = [f"x{d}" for d in range(len(b.shape))]
        self.constraints += [f"0 <= {x} < {self.value(simplify(as_expr(n)))}" for x, n in zip(places, b.shape, strict=True)]
        return places


_COMPARISONS = {"lt": "<", "le": "<=", "eq": "=", "ne": "!="}


class _Builder:
    def __init__(self, stmt: Stmt, given: Sequence[Expr], parameters: Mapping[Expr, str]) -> None:
        self.stmt, self.given = stmt, given
        inside = {s.var for s in L.walk(stmt) if isinstance(s, For)}
        used = [e for s in L.walk(stmt) for e in L.expressions(s)]
        for s in L.walk(stmt):
            written = [s.buffer] if isinstance(s, Store | Accumulate | Allocate) else []
            used += [as_expr(n) for b in (*written, *(e.attr for e in E.reads(*L.expressions(s)))) for n in b.shape]
        self.parameters = dict(parameters)
        for e in (*E.with_extents(*used), *E.with_extents(*given)):
            if e not in inside and e not in self.parameters and e.dtype == INDEX:
                self.parameters[e] = f"p{len(self.parameters)}"
        self.prefix, self.depth = f"[{', '.join(self.parameters.values())}] -> ", _depth(stmt)
        self.instances: list[Instance] = []
        self.homes: dict[Buffer, tuple[Expr, ...]] = {}  # the loops around the allocation of a buffer
        self.buffers: dict[Buffer, str] = {}

    def model(self) -> Model:
        known = Formula(self.parameters)
        for v, name in self.parameters.items():
            known.between(name, v.attr.lo, v.attr.hi)
            if v.attr.extent is not None:
                known.add(v < v.attr.extent)
        for condition in self.given:
            known.add(simplify(condition))
        context = isl.Set(f"{self.prefix}{{ : {known.text()} }}")
        self.visit(self.stmt, Formula(self.parameters), (), (), itertools.count(), ())
        boxes = {b: box for b in self.buffers if (box := self.box(b)) is not None}
        return Model(tuple(self.instances), self.parameters, context, boxes)

    def visit(
        self, stmt: Stmt, known: Formula, loops: tuple[For, ...], time: tuple[str, ...], places: Iterator[int], guards: tuple[Expr, ...]
    ) -> None:
        """`time` is the time vector so far: place and iteration of the loops around; `places` numbers the statements in the innermost."""
        match stmt:
            case For(v, extent, body):
                name = f"i{len(loops)}"
                inner = Formula({**known.names, v: name}, known)
                inner.constraints.append(f"0 <= {name} < {inner.value(simplify(as_expr(extent)))}")
                moment = (*time, str(next(places)), name)
                self.visit(body, inner, (*loops, stmt), moment, itertools.count(), (*guards, as_expr(extent)))
            case If(cond):
                for branch, side in L.guarded_children(stmt):
                    inner = Formula(known.names, known)
                    inner.add(simplify(side))
                    self.visit(branch, inner, loops, time, places, (*guards, cond))
            case Store() | Accumulate() | While():
                self.leaf(stmt, known, loops, (*time, str(next(places))), guards)
            case _:  # a call is what its body means
                if isinstance(stmt, Allocate):
                    self.homes[stmt.buffer] = tuple(x.var for x in loops)
                for s in L.children(stmt):
                    self.visit(s, known, loops, time, places, guards)

    def leaf(self, stmt: Stmt, known: Formula, loops: tuple[For, ...], time: tuple[str, ...], guards: tuple[Expr, ...]) -> None:
        name = f"S{len(self.instances)}"
        point = f"{name}[{', '.join(known.names[x.var] for x in loops)}]"
        domain = isl.Set(f"{self.prefix}{{ {point} : {known.text()} }}")
        moment = [*time, *["0"] * (2 * self.depth + 1 - len(time))]
        order = isl.Map(f"{self.prefix}{{ {point} -> [{', '.join(moment)}] : {known.text()} }}")
        access = partial(self.access, point, known)
        found = [access(READ, e) for e in E.reads(*guards)]
        if isinstance(stmt, Store | Accumulate):
            found += [access(READ, e, conditions) for e, conditions in _reads_under(stmt.value)]
            found += [access(READ, e) for e in E.reads(*stmt.indices)]
            reducer = stmt.reducer if isinstance(stmt, Accumulate) else None
            found.append(access(REDUCE if reducer else WRITE, E.read(stmt.buffer, stmt.indices), (), reducer))
        else:
            inner = list(L.walk(stmt))
            touched = [(READ, b) for s in inner for b, _ in L.places(s)]
            touched += [(WRITE, s.buffer) for s in inner if isinstance(s, Store | Accumulate)]
            local = {s.buffer for s in inner if isinstance(s, Allocate)}
            found += [self.whole(point, known, kind, b) for kind, b in dict.fromkeys(touched) if b not in local]
        exact = known.exact and not isinstance(stmt, While)
        self.instances.append(Instance(name, stmt, loops, domain, order, tuple(found), exact))

    def access(self, point: str, known: Formula, kind: str, e: Expr, under: Sequence[Expr] = (), reducer: Reducer | None = None) -> Access:
        formula = Formula(known.names, known)
        for condition in under:
            formula.add(simplify(condition))
        element = [known.names[v] for v in self.homes.get(e.attr, ())] + [formula.value(simplify(i)) for i in e.args]
        outputs = [f"x{d}" for d in range(len(element))]
        equal = formula.text(*(f"{x} = {text}" for x, text in zip(outputs, element, strict=True)))
        relation = isl.Map(f"{self.prefix}{{ {point} -> {self.name_of(e.attr)}[{', '.join(outputs)}] : {equal} }}")
        return Access(kind, e.attr, relation, formula.exact, reducer)

    def whole(self, point: str, known: Formula, kind: str, b: Buffer) -> Access:
        formula = Formula(known.names, known)
        home = [known.names[v] for v in self.homes.get(b, ()) if v in known.names]
        element = ", ".join(home + formula.box(b))
        return Access(kind, b, isl.Map(f"{self.prefix}{{ {point} -> {self.name_of(b)}[{element}] : {formula.text()} }}"), False)

    def box(self, b: Buffer) -> isl.Set | None:
        formula = Formula(self.parameters)
        element = ", ".join([f"h{n}" for n in range(len(self.homes.get(b, ())))] + formula.box(b))
        return isl.Set(f"{self.prefix}{{ {self.name_of(b)}[{element}] : {formula.text()} }}") if formula.exact else None

    def name_of(self, b: Buffer) -> str:
        return self.buffers.setdefault(b, f"B{len(self.buffers)}")


def _known_at(root: Stmt, target: Stmt) -> list[Expr] | None:
    """The conditions under which a statement inside another one is executed; None if it is not inside."""
    if root is target:
        return []
    for child, condition in L.guarded_children(root):
        if (inner := _known_at(child, target)) is not None:
            return [condition, *inner]
    return None


def _reads_under(value: Expr) -> list[Conditional]:
    """The reads of a value, each with the conditions of the selects around it."""

    def operands(node: Conditional) -> list[Conditional]:
        e, conditions = node
        more = [(), (e.args[0],), (E.unary("not", e.args[0]),)] if e.op == "select" else [()] * len(e.args)
        return [(a, conditions + condition) for a, condition in zip(e.args, more, strict=True)]

    found = list(itertools.islice(E.postorder([(value, tuple[Expr, ...]())], operands), _MAX_WAYS + 1))
    if len(found) <= _MAX_WAYS:
        return [node for node in found if node[0].op == "read"]
    # Selects inside the operands of selects are met once for each way to them. A condition that is not an affine one says "perhaps".
    return [(e, (E.cast(e, "float64") < 0.0,)) for e in E.reads(value)]


_MAX_WAYS = 5000  # pairs of an expression and the conditions under which it is reached


def _depth(stmt: Stmt) -> int:
    """How many loops are around the innermost instance; a `While` is one instance."""
    inner = 0 if isinstance(stmt, While) else max(map(_depth, L.children(stmt)), default=0)
    return inner + isinstance(stmt, For)
