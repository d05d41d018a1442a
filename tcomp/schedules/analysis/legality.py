"""The judge of schedule steps: exact dependences as isl relations, and witnesses of what would go wrong.

Two iterations *conflict* when they touch the same element and at least one writes it; a legal step keeps the order of all conflicting
pairs, but for those of accumulations by one reducer into one element where it may reassociate. What is not affine is over-approximated by
the model: such a step is refused, its witness says "may". The quick symbolic test of `dependence.py` is asked first, as it settles nearly
all steps in microseconds; isl decides the rest, and all under `proving()`.

Source: P. Feautrier, "Dataflow analysis of array and scalar references" (1991); S. Verdoolaege, "isl: an integer set library" (2010).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import islpy as isl

from tcomp.ir.loops import Buffer, For, Stmt
from tcomp.ir.polyhedral.model import REDUCE, Access, Instance, Model, Relation, TooHard, limited, map_of, model
from tcomp.schedules.analysis import dependence


@dataclass(frozen=True, eq=False, slots=True)
class Dependence:
    """Pairs of iterations, first -> second in program order, that touch the same element. `kind`: flow, anti, output or reduce."""

    kind: str
    source: Instance
    target: Instance
    first: Access
    second: Access
    relation: Relation


@dataclass(frozen=True, slots=True)
class Iteration:
    """One execution of a statement: the values of the loops around it."""

    stmt: Stmt
    loops: Mapping[str, int]

    def __str__(self) -> str:
        at = ", ".join(f"{name}={value}" for name, value in self.loops.items())
        return f"`{str(self.stmt).strip()}`" + (f" at {at}" if at else "")


@dataclass(frozen=True, slots=True)
class Witness:
    """Two iterations, in program order, that touch one element, for given values of sizes and of loops around the step; or one iteration
    that touches an element which is not there. Not `exact`: what is not affine keeps it from being known whether they really do."""

    first: Iteration
    second: Iteration | None
    buffer: str
    element: tuple[int, ...]
    fixed: Mapping[str, int]
    exact: bool

    def __str__(self) -> str:
        touch = "touch" if self.exact else "may touch"
        who = f"{self.first} touches" if self.second is None else f"{self.first} and then {self.second} both {touch}"
        fixed = f" (with {', '.join(f'{n}={v}' for n, v in self.fixed.items())})" if self.fixed else ""
        return f"{who} {self.buffer}[{', '.join(map(str, self.element))}]{fixed}"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a step is refused: the buffer, and a pair of iterations unless isl gave up."""

    buffer: Buffer
    witness: Witness | None

    def __str__(self) -> str:
        return f"may touch the same element of `{self.buffer.name}`" + (f": {self.witness}" if self.witness else "")


@dataclass(slots=True)
class Proofs:
    """Statistics of the questions to isl while it decides every step."""

    questions: int = 0
    seconds: float = 0.0


_proofs: ContextVar[Proofs | None] = ContextVar("proofs", default=None)


@contextmanager
def proving() -> Iterator[Proofs]:
    """Inside, isl decides every question; the quick test is not used."""
    proofs = Proofs()
    token = _proofs.set(proofs)
    try:
        yield proofs
    finally:
        _proofs.reset(token)


def _judge(quick: Callable[[], Buffer | None], exact: Callable[[], Conflict | None]) -> Conflict | None:
    proofs = _proofs.get()
    if proofs is None and quick() is None:
        return None
    started = time.perf_counter()
    try:
        with limited():
            return exact()
    except TooHard:
        suspect = quick()
        return None if suspect is None else Conflict(suspect, None)
    finally:
        if proofs is not None:
            proofs.questions += 1
            proofs.seconds += time.perf_counter() - started


def race(loop: For, may_reassociate: bool = False, within: Stmt | None = None) -> Conflict | None:
    """A conflict between different iterations of a loop, which keeps them from running concurrently or in another order. The loops and
    conditions around the loop in the program `within` are taken into account."""

    def exact() -> Conflict | None:
        m = model(loop, within)
        moments = {i.name: _only(i.order, [1]) for i in m.instances}
        bad = ((d, moments[d.source.name].lex_lt_map(moments[d.target.name])) for d in dependences(m, may_reassociate))
        return next((c for d, order in bad if (c := conflict_of(m, d, d.relation.intersect(order))) is not None), None)

    return _judge(lambda: dependence.conflict(loop.body, [loop.var], may_reassociate), exact)


def disorder(loops: Sequence[For], order: Sequence[For], may_reassociate: bool = False, within: Stmt | None = None) -> Conflict | None:
    """A conflict whose order changes when perfectly nested `loops` take another order; `within` as for `race`."""
    leaf = loops[-1].body

    def exact() -> Conflict | None:
        m = model(loops[0], within)
        places = [2 * loops.index(x) + 1 for x in order]
        rest = range(2 * len(loops), m.instances[0].order.dim(isl.dim_type.out)) if m.instances else ()
        return violated(m, dependences(m, may_reassociate), {i.name: _only(i.order, [*places, *rest]) for i in m.instances})

    return _judge(lambda: dependence.disorder(leaf, [x.var for x in loops], [x.var for x in order], may_reassociate), exact)


def violated(m: Model, found: Sequence[Dependence], order: Mapping[str, Relation]) -> Conflict | None:
    """A dependence whose pairs are not in order after `order`, which maps each instance (by name) to time vectors of one length."""
    bad = ((d, order[d.source.name].lex_ge_map(order[d.target.name])) for d in found)
    return next((c for d, late in bad if (c := conflict_of(m, d, d.relation.intersect(late))) is not None), None)


def dependences(m: Model, may_reassociate: bool = False) -> list[Dependence]:
    """All memory-based dependences of a model; with `may_reassociate` without those between accumulations by one reducer."""
    touching: dict[Buffer, list[tuple[Instance, Access]]] = {}
    for i in m.instances:
        for a in i.accesses:
            touching.setdefault(a.buffer, []).append((i, a))

    @cache  # most pairs of instances have no buffer in common
    def before(i: Instance, j: Instance) -> Relation:
        return i.order.lex_lt_map(j.order)

    found = []
    for (source, first), (target, second) in itertools.chain(*(itertools.product(x, repeat=2) for x in touching.values())):
        if (kind := _kind(first, second)) is not None and not (kind == REDUCE and may_reassociate):
            relation = first.relation.apply_range(second.relation.reverse()).intersect(before(source, target)).intersect_params(m.context)
            if not relation.is_empty():
                found.append(Dependence(kind, source, target, first, second, relation))
    return found


def _kind(first: Access, second: Access) -> str | None:
    match first.kind, second.kind:
        case ("read", "read"):
            return None
        case ("reduce", "reduce") if first.reducer == second.reducer:
            return REDUCE
        case ("write" | "reduce", "read" | "reduce"):
            return "flow"
        case ("read", _):
            return "anti"
    return "output"


def _only(order: Relation, dims: Sequence[int]) -> Relation:
    """A time vector's chosen dimensions, in the order given."""
    names = [f"t{n}" for n in range(order.dim(isl.dim_type.out))]
    return order.apply_range(map_of(names, [names[d] for d in dims]))


def conflict_of(m: Model, d: Dependence, bad: Relation) -> Conflict | None:
    """The conflict of a dependence some of whose pairs, `bad`, would be out of order; None if there are no such pairs."""
    bad = bad.intersect_params(m.context)
    if bad.is_empty():
        return None
    sizes, values = _smallest(bad)
    split, buffer = len(d.source.loops), d.first.buffer
    touched = _touched_by(d.first.relation, sizes, values[:split]).intersect(_touched_by(d.second.relation, sizes, values[split:]))
    element = tuple(_point(touched)[-len(buffer.shape) or len(values) :])
    sides = _iteration(d.source, values[:split]), _iteration(d.target, values[split:])
    return Conflict(buffer, Witness(*sides, buffer.name, element, _fixed(m, sizes), d.first.exact and d.second.exact))


def _smallest(relation: Relation) -> tuple[dict[str, int], list[int]]:
    """The first pair of a relation for the smallest sizes: the sizes (by their names in isl), and the values of all dimensions."""
    count = relation.dim(isl.dim_type.param)
    names = [str(relation.get_dim_name(isl.dim_type.param, n)) for n in range(count)]
    flat = relation.wrap().flatten().move_dims(isl.dim_type.set, 0, isl.dim_type.param, 0, count)
    values = _point(flat.lexmin())
    return dict(zip(names, values[:count], strict=True)), values[count:]


def _point(points: isl.Set) -> list[int]:
    point = points.sample_point()
    return [point.get_coordinate_val(isl.dim_type.set, n).to_python() for n in range(points.dim(isl.dim_type.set))]


def _touched_by(relation: Relation, sizes: Mapping[str, int], iteration: Sequence[int]) -> isl.Set:
    """The elements touched by one iteration."""
    for n in range(relation.dim(isl.dim_type.param)):
        relation = relation.fix_val(isl.dim_type.param, n, isl.Val(sizes[str(relation.get_dim_name(isl.dim_type.param, n))]))
    for n, value in enumerate(iteration):
        relation = relation.fix_val(isl.dim_type.in_, n, isl.Val(value))
    return relation.range()


def _iteration(i: Instance, values: Sequence[int]) -> Iteration:
    return Iteration(i.stmt, {x.var.name: v for x, v in zip(i.loops, values, strict=True)})


def _fixed(m: Model, sizes: Mapping[str, int]) -> dict[str, int]:
    return {v.name: sizes[name] for v, name in m.parameters.items() if name in sizes}


def out_of_bounds(stmt: Stmt) -> Witness | None:
    """An iteration that touches an element outside of its buffer. Only affine accesses are judged."""
    m = model(stmt)
    for instance, a in ((i, a) for i in m.instances for a in i.accesses if a.exact and a.buffer in m.boxes):
        bad = a.relation.subtract_range(m.boxes[a.buffer]).intersect_params(m.context)
        if not bad.is_empty():
            (sizes, values), split = _smallest(bad), len(instance.loops)
            element = tuple(values[split:][-len(a.buffer.shape) :])
            return Witness(_iteration(instance, values[:split]), None, a.buffer.name, element, _fixed(m, sizes), True)
    return None
