"""Where stages stand: the sequence of statements that holds the nests of a stage next to a loop, and the nests over a part of the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.access import Box, in_range
from tcomp.ir.expr import Expr, as_expr
from tcomp.ir.simplify import prove
from tcomp.schedules.analysis.inverse_maps import inverse
from tcomp.schedules.analysis.legality import race
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import enclose, guard, path, reads, rebind, rebuild, refuse, scope_of, sequence, writes


@dataclass(frozen=True, slots=True)
class InsertionPoint:
    """The statements of one sequence, seen through blocks and allocations; `nests` among them compute a stage, and `items[at]` is or
    contains a loop. `shared` are the loops and conditions around the sequence inside the scope of the stage."""

    shared: tuple[L.Stmt, ...]
    items: tuple[L.Stmt, ...]
    nests: tuple[L.Stmt, ...]
    at: int

    @property
    def places(self) -> list[int]:
        """Positions of the nests."""
        return [self.items.index(nest) for nest in self.nests]


def find_insertion_point(kernel: L.Kernel, buffer: L.Buffer, target: L.For) -> InsertionPoint:
    """The innermost sequence that has the loop in one item and all that writes the buffer in others. Raises `ScheduleError`."""
    name, loop = buffer.name, target.var.name
    node, shared = scope_of(kernel, buffer), list[L.Stmt]()
    if not path(node, target):
        raise refuse(f"loop `{loop}` stands outside of the allocation of `{name}`")
    while True:
        items = sequence(node)
        at = next(n for n, item in enumerate(items) if path(item, target))
        nests = tuple(item for n, item in enumerate(items) if n != at and writes(item, buffer))
        if not writes(items[at], buffer):
            break
        if writes(target, buffer):
            raise refuse(f"loop `{loop}` is one of those that compute `{name}`")
        if nests:
            raise refuse(f"`{name}` is computed around loop `{loop}` and elsewhere")
        shared.append(items[at])
        node = next(c for c in L.children(items[at]) if path(c, target))
    if not nests:
        raise refuse(f"nothing computes `{name}`")
    return InsertionPoint(tuple(shared), items, nests, at)


def check_pure(nests: Sequence[L.Stmt], buffer: L.Buffer) -> None:
    """Refuses nests that do anything but compute the buffer from others."""
    for s in (s for nest in nests for s in L.walk(nest)):
        if isinstance(s, L.Store | L.Accumulate) and s.buffer is not buffer:
            raise refuse(f"the loops that compute `{buffer.name}` compute `{s.buffer.name}` too")
    if buffer in reads(nests):
        raise refuse(f"`{buffer.name}` is computed from its own elements")


def check_stable(kernel: L.Kernel, point: InsertionPoint, sources: Iterable[L.Buffer], first: int, last: int, target: L.For) -> None:
    """Refuses if a source is written by items first..last (those that compute the stage aside), or does not live where the loop stands."""
    for source in sorted(sources, key=lambda b: b.name):
        if not path(scope_of(kernel, source), target):
            raise refuse(f"`{source.name}`, which is needed, is not allocated around `{target.var.name}`")
        if any(writes(item, source) for item in point.items[first : last + 1] if item not in point.nests):
            raise refuse(f"`{source.name}`, which is needed, is written between the stage and loop `{target.var.name}`")


def check_no_race(changed: L.Kernel, loop: str, source: L.Buffer) -> L.Kernel:
    """The changed kernel, unless iterations that run at the same time around a loop touch more elements of the source now."""
    for s in path(changed.body, editing.find_loop(changed, loop)):
        together = isinstance(s, L.For) and s.kind in (L.PARALLEL, L.VECTORIZED) and writes(s, source)
        if isinstance(s, L.For) and together and (conflict := race(s, within=changed.body)) is not None:
            raise refuse(f"iterations of `{s.var.name}`", conflict=conflict)
    return changed


# ---------------------------------------------------------------- nests of one statement


@dataclass(frozen=True, slots=True)
class Chain:
    """One write, with the loops around it from the outside to the inside, and the conditions (no conjunctions) it stands under."""

    loops: tuple[L.For, ...]
    conditions: tuple[Expr, ...]
    write: L.Store | L.Accumulate

    @property
    def spatial(self) -> list[L.For]:
        """The loops that say which element is written."""
        return [x for x in self.loops if x.var in E.variables(*self.write.indices)]

    @property
    def reduction(self) -> list[L.For]:
        """The other loops: those of a reduction."""
        return [x for x in self.loops if x.var not in E.variables(*self.write.indices)]

    @property
    def of_elements(self) -> list[Expr]:
        """The conditions that say which elements are written: those in which no reduction loop occurs."""
        return [c for c in self.conditions if {x.var for x in self.reduction}.isdisjoint(E.variables(c))]


def chain_of(nest: L.Stmt) -> Chain | None:
    """What a nest of one statement is made of; None for any other."""
    loops, conditions = list[L.For](), list[Expr]()
    while True:
        match nest:
            case L.For(body=body):
                loops.append(nest)
                nest = body
            case L.If(cond, then, None):
                conditions += E.conjuncts(cond)
                nest = then
            case L.Store() | L.Accumulate():
                return Chain(tuple(loops), tuple(conditions), nest)
            case _:
                return None


def chain(nest: L.Stmt, buffer: L.Buffer) -> Chain:
    """A nest that computes a stage by one statement."""
    if (found := chain_of(nest)) is None:
        raise refuse(f"one nest computes `{buffer.name}` by several statements", "give each statement loops of its own")
    return found


def stores_all(nest: L.Stmt, buffer: L.Buffer) -> bool:
    """Whether a nest stores to every element of a buffer, and reads none."""
    found = chain_of(nest)
    if found is None or not isinstance(found.write, L.Store) or found.write.buffer is not buffer or found.conditions:
        return False
    inverted = inverse(found.write.indices, buffer.shape, found.loops)
    runs = all(x.var in inverted.values or prove(as_expr(x.extent) > 0) for x in found.loops)
    return runs and not inverted.conditions and {x.var for x in found.spatial} <= inverted.values.keys() and buffer not in reads([nest])


def restricted(
    kernel: L.Kernel,
    nest: L.Stmt,
    buffer: L.Buffer,
    box: Box,
    taken: set[str],
    local: L.Buffer | None = None,
    only: Callable[[Sequence[Expr]], list[Expr]] = lambda element: [],
) -> L.Stmt:
    """A stage's nest over a box of its buffer, one loop per dimension outside and the reduction loops inside.

    It writes into the box `local`, if given: then elements outside of the stage may be computed as well, as nobody uses them. `only` gives
    further conditions for an element. `taken` collects the names of the loops made.
    """
    found = chain(nest, buffer)
    inverted = inverse(found.write.indices, buffer.shape, found.loops)
    for x in found.spatial:
        if x.var not in inverted.values:
            raise refuse(f"the index of `{buffer.name}` does not tell which iteration of `{x.var.name}` computes an element")

    def leaf(outer: tuple[Expr, ...]) -> L.Stmt:
        element = tuple(b + v for b, v in zip(box.base, outer, strict=True))
        values, conditions = inverted.at(element)
        body = enclose([x for x in found.loops if x.var not in values], L.where(found.conditions, found.write))
        to, at = (buffer, element) if local is None else (local, outer)
        body = rebuild(rebind(body, values), lambda s: replace(s, buffer=to, indices=at) if isinstance(s, L.Store | L.Accumulate) else None)
        within = [c for e, n in zip(element, buffer.shape, strict=True) for c in (e >= 0, e < as_expr(n))]
        return guard([*([] if local is not None and _reads_in_range(body) else within), *conditions, *only(element)], body)

    names = [_name(kernel, found, d, taken) for d in range(len(box.extent))]
    return L.over(box.extent, leaf, names.__getitem__)


def _name(kernel: L.Kernel, found: Chain, d: int, taken: set[str]) -> str:
    """A loop over a dimension of a stage has the name of the loop over it, the outermost where there are several."""
    mentioned = set(E.variables(found.write.indices[d]))
    names = [x.var.name for x in found.loops if x.var in mentioned]
    name: str = next((n for n in names if n not in taken), "")
    number = d
    while not name or name in taken:
        name = editing.fresh(kernel, f"{(names or [found.write.buffer.name])[0]}.{number}")
        number += 1
    taken.add(name)
    return name


def _reads_in_range(stmt: L.Stmt) -> bool:
    """Whether every read is inside its buffer for all values of the loops around it, whatever guards say."""
    return all(in_range(r.args, r.attr.shape) for s in L.walk(stmt) for r in E.reads(*L.expressions(s)))
