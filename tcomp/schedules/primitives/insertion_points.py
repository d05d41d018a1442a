"""Where stages stand: the sequence of statements that holds the nests of a stage beside a loop, and the nests over a part of the stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tcomp.ir import expr as E
from tcomp.ir.access import in_range
from tcomp.ir.expr import Dim, Expr, as_expr, loop_var
from tcomp.ir.loops import (
    PARALLEL,
    VECTORIZED,
    Accumulate,
    Allocate,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Stmt,
    Store,
    children,
    expressions,
    walk,
    where,
)
from tcomp.ir.simplify import prove
from tcomp.schedules.analysis.inverse_maps import inverse
from tcomp.schedules.analysis.legality import race
from tcomp.schedules.primitives.editing import find_loop, fresh, guard, rebind, rebuild, refuse, refuse_conflict


@dataclass(frozen=True, slots=True)
class InsertionPoint:
    """The statements of one sequence, seen through blocks and allocations; `nests` among them compute a stage, and `items[at]` is or
    contains a loop. `shared` are the loops and conditions around the sequence inside the scope of the stage."""

    shared: tuple[Stmt, ...]
    items: tuple[Stmt, ...]
    nests: tuple[Stmt, ...]
    at: int

    @property
    def places(self) -> list[int]:
        """Positions of the nests."""
        return [self.items.index(nest) for nest in self.nests]


def find_insertion_point(kernel: Kernel, step: str, buffer: Buffer, target: For) -> InsertionPoint:
    """The innermost sequence that has the loop in one item and all that writes the buffer in others. Raises `ScheduleError`."""
    name, loop = buffer.name, target.var.name
    node, shared = scope_of(kernel, buffer), list[Stmt]()
    if not path(node, target):
        raise refuse(kernel, step, f"loop `{loop}` stands outside of the allocation of `{name}`")
    while True:
        items = sequence(node)
        at = next(n for n, item in enumerate(items) if path(item, target))
        nests = tuple(item for n, item in enumerate(items) if n != at and writes(item, buffer))
        if not writes(items[at], buffer):
            break
        if writes(target, buffer):
            raise refuse(kernel, step, f"loop `{loop}` is one of those that compute `{name}`")
        if nests:
            raise refuse(kernel, step, f"`{name}` is computed around loop `{loop}` and elsewhere")
        shared.append(items[at])
        node = next(c for c in children(items[at]) if path(c, target))
    if not nests:
        raise refuse(kernel, step, f"nothing computes `{name}`")
    return InsertionPoint(tuple(shared), items, nests, at)


def sequence(stmt: Stmt) -> tuple[Stmt, ...]:
    """The statements in a sequence, through blocks and allocations."""
    if isinstance(stmt, Block | Allocate):
        return tuple(item for c in children(stmt) for item in sequence(c))
    return (stmt,)


def scope_of(kernel: Kernel, buffer: Buffer) -> Stmt:
    """The statement during which a buffer lives."""
    return next((s.body for s in walk(kernel.body) if isinstance(s, Allocate) and s.buffer is buffer), kernel.body)


def path(root: Stmt, target: Stmt) -> list[Stmt]:
    """The statements from `root` down to `target`, both included; empty if it is not inside."""
    if root is target:
        return [root]
    for c in children(root):
        if below := path(c, target):
            return [root, *below]
    return []


def writes(stmt: Stmt, buffer: Buffer) -> bool:
    """Whether a statement stores to a buffer."""
    return any(isinstance(s, Store | Accumulate) and s.buffer is buffer for s in walk(stmt))


def reads(stmts: Sequence[Stmt]) -> set[Buffer]:
    """The buffers that statements read, in values, indices, conditions and bounds of loops."""
    return {r.attr for stmt in stmts for s in walk(stmt) for r in E.reads(*expressions(s))}


def bounds_loops(stmt: Stmt, buffer: Buffer) -> bool:
    """Whether the extent of a loop is read from the buffer."""
    return any(isinstance(s, For) and any(r.attr is buffer for r in E.reads(as_expr(s.extent))) for s in walk(stmt))


def check_pure(kernel: Kernel, step: str, nests: Sequence[Stmt], buffer: Buffer) -> None:
    """Refuses nests that do anything but compute the buffer from others."""
    for s in (s for nest in nests for s in walk(nest)):
        if isinstance(s, Store | Accumulate) and s.buffer is not buffer:
            raise refuse(kernel, step, f"the loops that compute `{buffer.name}` compute `{s.buffer.name}` too")
    if buffer in reads(nests):
        raise refuse(kernel, step, f"`{buffer.name}` is computed from its own elements")


def check_stable(kernel: Kernel, step: str, point: InsertionPoint, sources: set[Buffer], first: int, last: int, target: For) -> None:
    """Refuses if a source is written by items first..last (those that compute the stage aside), or does not live where the loop stands."""
    for source in sorted(sources, key=lambda b: b.name):
        if not path(scope_of(kernel, source), target):
            raise refuse(kernel, step, f"`{source.name}`, which is needed, is not allocated around `{target.var.name}`")
        if any(writes(item, source) for item in point.items[first : last + 1] if item not in point.nests):
            raise refuse(kernel, step, f"`{source.name}`, which is needed, is written between the stage and loop `{target.var.name}`")


# ---------------------------------------------------------------- a part of a stage


@dataclass(frozen=True, slots=True)
class Chain:
    """One write, with the loops around it from the outside to the inside, and the conditions it stands under."""

    loops: tuple[For, ...]
    conditions: tuple[Expr, ...]
    write: Store | Accumulate


def chain_of(nest: Stmt) -> Chain | None:
    """What a nest of one statement is made of; None for any other."""
    loops, conditions = list[For](), list[Expr]()
    while True:
        match nest:
            case For(body=body):
                loops.append(nest)
                nest = body
            case If(cond, then, None):
                conditions.append(cond)
                nest = then
            case Store() | Accumulate():
                return Chain(tuple(loops), tuple(conditions), nest)
            case _:
                return None


def chain(kernel: Kernel, step: str, nest: Stmt, buffer: Buffer) -> Chain:
    """A nest that computes a stage by one statement."""
    found = chain_of(nest)
    if found is None:
        raise refuse(kernel, step, f"one nest computes `{buffer.name}` by several statements", "give each statement loops of its own")
    return found


def stores_all(nest: Stmt, buffer: Buffer) -> bool:
    """Whether a nest stores to every element of a buffer, and reads none."""
    found = chain_of(nest)
    if not isinstance(found, Chain) or not isinstance(found.write, Store) or found.write.buffer is not buffer or found.conditions:
        return False
    inverted = inverse(found.write.indices, buffer.shape, found.loops)
    runs = all(x.var in inverted.values or prove(as_expr(x.extent) > 0) for x in found.loops)
    known = {x.var for x in found.loops} - inverted.values.keys()
    return runs and not inverted.conditions and not known & set(E.variables(*found.write.indices)) and buffer not in reads([nest])


def restricted(
    kernel: Kernel,
    step: str,
    nest: Stmt,
    buffer: Buffer,
    base: Sequence[Expr],
    extent: Sequence[Dim],
    taken: set[str],
    local: Buffer | None = None,
    only: Callable[[Sequence[Expr]], list[Expr]] = lambda element: [],
) -> Stmt:
    """A stage's nest over the box [base, base + extent) of its buffer, one loop per dimension outside and the reduction loops inside.

    It writes into the box `local`, if given: then elements outside of the stage may be computed as well, as nobody uses them. `only` gives
    further conditions for an element. `taken` collects the names of the loops made.
    """
    found = chain(kernel, step, nest, buffer)
    inverted = inverse(found.write.indices, buffer.shape, found.loops)
    used = set(E.variables(*found.write.indices))
    for x in found.loops:
        if x.var in used and x.var not in inverted.values:
            raise refuse(kernel, step, f"the index of `{buffer.name}` does not tell which iteration of `{x.var.name}` computes an element")
    outer = [loop_var(_name(kernel, found, d, taken), n) for d, n in enumerate(extent)]
    element = [b + v for b, v in zip(base, outer, strict=True)]
    values, conditions = inverted.at(element)
    body = where(found.conditions, found.write)
    for x in reversed([x for x in found.loops if x.var not in values]):
        body = replace(x, body=body)
    body = rebind(body, values)
    places = tuple(outer) if local is not None else tuple(element)
    body = rebuild(
        body,
        lambda s: replace(s, buffer=local or buffer, indices=places) if isinstance(s, Store | Accumulate) and s.buffer is buffer else None,
    )
    within = [c for e, n in zip(element, buffer.shape, strict=True) for c in (e >= 0, e < as_expr(n))]
    needed = [] if local is not None and _reads_in_range(body) else within
    body = guard([*needed, *conditions, *only(element)], body)
    for v, n in reversed(list(zip(outer, extent, strict=True))):
        body = For(v, n, body)
    return body


def _name(kernel: Kernel, found: Chain, d: int, taken: set[str]) -> str:
    """A loop over a dimension of a stage has the name of the loop over it, the outermost where there are several."""
    mentioned = set(E.variables(found.write.indices[d]))
    names = [x.var.attr.name for x in found.loops if x.var in mentioned]
    name: str = next((n for n in names if n not in taken), "")
    number = d
    while not name or name in taken:
        name = fresh(kernel, f"{(names or [found.write.buffer.name])[0]}.{number}")
        number += 1
    taken.add(name)
    return name


def _reads_in_range(stmt: Stmt) -> bool:
    """Whether every read is inside its buffer for all values of the loops around it, whatever guards say."""
    return all(
        in_range(r.args, r.attr.shape)
        for s in walk(stmt)
        for r in E.reads(*expressions(s))
    )


def check_shared_memory(kernel: Kernel, step: str, scope: str, target: For) -> None:
    """Refuses memory shared by the threads of a block inside a loop over them: each iteration would fill the one copy anew."""
    if scope == "shared":
        for s in path(kernel.body, target):
            if isinstance(s, For) and s.kind.startswith("thread"):
                raise refuse(
                    kernel, step, f"shared memory cannot be filled inside the {s.kind} loop `{s.var.name}`", "name a loop outside of it"
                )


def check_no_race(kernel: Kernel, step: str, changed: Kernel, loop: str, sources: Sequence[Buffer]) -> Kernel:
    """The changed kernel, unless iterations that run at the same time around a loop touch more elements of the sources now."""
    for s in path(changed.body, find_loop(changed, loop)):
        if isinstance(s, For) and s.kind in (PARALLEL, VECTORIZED) and any(writes(s, b) for b in sources):
            conflict = race(s, within=changed.body)
            if conflict is not None:
                raise refuse_conflict(kernel, step, f"iterations of `{s.var.name}`", conflict)
    return changed
