"""What a program really does, execution by execution, and whether witnesses and dependences say the same.

The interpreter notes, for each execution of a store or accumulation, the loops around it and what it touches. Conditions and extents
around a statement belong to it: it reads what they read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import islpy as isl
import numpy as np

from tcomp.ir.expr import Expr
from tcomp.ir.interpreters.loops import Watcher, run_stmt
from tcomp.ir.loops import Accumulate, Allocate, Buffer, Kernel, Stmt, Store
from tcomp.ir.polyhedral.model import Model, model
from tcomp.schedules.analysis.legality import Dependence, Iteration, Witness, dependences


@dataclass(frozen=True)
class Element:
    """`number` counts the allocations of the buffer so far."""

    buffer: str
    number: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Event:
    """One execution of a statement."""

    stmt: Stmt
    loops: Mapping[str, int]
    reads: frozenset[Element]
    writes: Element

    def touched(self, buffer: str, indices: Sequence[int]) -> set[Element]:
        return {e for e in (*self.reads, self.writes) if e.buffer == buffer and e.indices == tuple(indices)}


class _Recorder(Watcher):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.reads: list[Element] = []  # by the statement being executed, and by what stands around it
        self.marks: list[int] = []  # how many reads there were before each statement around
        self.allocated: Counter[Buffer] = Counter()

    def enter(self, stmt: Stmt) -> None:
        self.marks.append(len(self.reads))
        if isinstance(stmt, Allocate):
            self.allocated[stmt.buffer] += 1

    def leave(self, stmt: Stmt) -> None:
        del self.reads[self.marks.pop() :]

    def read(self, b: Buffer, array: np.ndarray, written: np.ndarray | None, index: tuple[int, ...], loops: Mapping[str, int]) -> Any:
        self.reads.append(Element(b.name, self.allocated[b], index))
        return super().read(b, array, written, index, loops)

    def store(self, stmt: Store | Accumulate, array: np.ndarray, index: tuple[int, ...], loops: Mapping[str, int]) -> None:
        super().store(stmt, array, index, loops)
        self.events.append(Event(stmt, loops, frozenset(self.reads), Element(stmt.buffer.name, self.allocated[stmt.buffer], index)))


def history(kernel: Kernel, arrays: Mapping[Buffer, np.ndarray], sizes: Mapping[Expr, int]) -> list[Event]:
    """What a kernel does, in order."""
    recorder = _Recorder()
    run_stmt(kernel.body, arrays, sizes, garbage=True, watcher=recorder)
    return recorder.events


# ---------------------------------------------------------------- witnesses


def flaw(witness: Witness, events: Sequence[Event]) -> str:
    """Why a witness is not real; empty if it is. The iterations need not be executed if it is not exact."""
    if not witness.exact:
        return ""
    first, second = (list(_matching(i, witness.fixed, events)) for i in (witness.first, witness.second))
    for side, found in ((witness.first, first), (witness.second, second)):
        if not found:
            return f"{side} is never executed"
        if not any(events[n].touched(witness.buffer, witness.element) for n in found):
            return f"{side} does not touch {witness.buffer}{list(witness.element)}"
    for n in first:
        for m in second:
            a, b = events[n], events[m]
            shared = a.touched(witness.buffer, witness.element) & b.touched(witness.buffer, witness.element)
            if n < m and not shared.isdisjoint((a.writes, b.writes)):
                return ""
    return "the iterations do not touch the element in this order, one of them writing"


def _matching(iteration: Iteration, fixed: Mapping[str, int], events: Sequence[Event]) -> Iterator[int]:
    text = str(iteration.stmt).strip()
    wanted = {**iteration.loops, **fixed}
    for n, event in enumerate(events):
        if all(event.loops.get(v, value) == value for v, value in wanted.items()) and str(event.stmt).strip() == text:
            yield n


# ---------------------------------------------------------------- dependences

SAMPLE = 20  # pairs looked up where there may be too many to list
Point = tuple[str, tuple[int, ...]]  # name of an instance, values of the loops around it


def misjudged(kernel: Kernel, events: Sequence[Event], sizes: Mapping[Expr, int]) -> str:
    """A difference between the dependences of a kernel and the pairs of its executions that touch one element; empty if there is none.

    What is not affine may add dependences, but must not hide any.
    """
    m = model(kernel.body)
    found = [(d, _at(d.relation, m, sizes)) for d in dependences(m)]
    real = _conflicts(m, events)
    if all(i.exact and all(a.exact for a in i.accesses) for i in m.instances):
        claimed = {pair for d, relation in found for pair in _pairs(d, relation)}
        if invented := claimed - real:
            return f"a dependence tells of {min(invented)}, which do not touch one element"
        hidden = real - claimed
    else:  # too many pairs may be claimed to list them all
        hidden = {pair for pair in sorted(real)[:SAMPLE] if not any(_covers(d, relation, *pair) for d, relation in found)}
    return f"no dependence tells of {min(hidden)}" if hidden else ""


def _at(relation: isl.Map, m: Model, sizes: Mapping[Expr, int]) -> isl.Map:
    names = {name: sizes.get(v, v.attr.lo or 0) for v, name in m.parameters.items()}
    for n in range(relation.dim(isl.dim_type.param)):
        relation = relation.fix_val(isl.dim_type.param, n, isl.Val(names[str(relation.get_dim_name(isl.dim_type.param, n))]))
    return relation


def _pairs(d: Dependence, relation: isl.Map) -> Iterator[tuple[Point, Point]]:
    points: list[isl.Point] = []
    relation.wrap().foreach_point(points.append)
    split, count = relation.dim(isl.dim_type.in_), relation.dim(isl.dim_type.in_) + relation.dim(isl.dim_type.out)
    for p in points:
        values = tuple(p.get_coordinate_val(isl.dim_type.set, n).to_python() for n in range(count))
        yield (d.source.name, values[:split]), (d.target.name, values[split:])


def _covers(d: Dependence, relation: isl.Map, first: Point, second: Point) -> bool:
    if (d.source.name, d.target.name) != (first[0], second[0]):
        return False
    for kind, values in ((isl.dim_type.in_, first[1]), (isl.dim_type.out, second[1])):
        for n, value in enumerate(values):
            relation = relation.fix_val(kind, n, isl.Val(value))
    return not relation.is_empty()


def _conflicts(m: Model, events: Sequence[Event]) -> set[tuple[Point, Point]]:
    points = {i.stmt: (i.name, [x.var.name for x in i.loops]) for i in m.instances}
    touching: dict[Element, list[tuple[Point, bool]]] = {}
    pairs: set[tuple[Point, Point]] = set()
    for event in events:
        name, loops = points[event.stmt]
        here = name, tuple(event.loops[v] for v in loops)
        for element in {*event.reads, event.writes}:
            writes = element == event.writes
            before = touching.setdefault(element, [])
            pairs.update((other, here) for other, wrote in before if wrote or writes)
            before.append((here, writes))
    return pairs
