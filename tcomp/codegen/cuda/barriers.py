"""Where the threads of a block wait: for each other, and for the copies that they have started.

A *phase* is a thread loop, or a statement outside of such loops. A barrier stands in front of a phase that touches what another thread
may have written since the last one, or writes what it read; what a copy touches is left alone until all threads have waited for its group
in front of a barrier. Both are found by following the phases in the order in which they run, loops until a state repeats.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from math import lcm

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import accesses, coefficient
from tcomp.ir.expr import Expr, as_expr, bounds, evaluate_int
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.simplify import prove

MAX_TRACKED = 16  # iterations, and groups of copies, up to which each is distinguished: it bounds how often a loop is followed


def is_thread_loop(s: Stmt) -> bool:
    """Whether a statement is a loop bound to `thread.x`, `thread.y` or `thread.z`."""
    return isinstance(s, L.For) and s.kind in L.THREAD_AXES


def has_threads(s: Stmt) -> bool:
    """Whether a statement is or holds a thread loop."""
    return any(is_thread_loop(x) for x in L.walk(s))


def is_phase(s: Stmt) -> bool:
    """Whether a statement is a phase; else its parts are, or hold some."""
    match s:
        case L.Block():
            return False
        case L.Allocate(buffer, body):
            return buffer.scope != "shared" and not has_threads(body)
        case L.For(_, _, body, kind):
            return is_thread_loop(s) or not (kind in L.BLOCK_AXES or has_threads(body))
        case L.If():
            return not has_threads(s)
    return True


def phases(s: Stmt) -> list[Stmt]:
    """The phases of a statement, in order."""
    return [s] if is_phase(s) else [phase for child in L.children(s) for phase in phases(child)]


def threads_along(s: Stmt, sizes: list[int]) -> None:
    """Raise `sizes` (along x, y, z) to the extents of the thread loops of a statement, which are constant."""
    for x in L.walk(s):
        if isinstance(x, L.For) and is_thread_loop(x) and isinstance(x.extent, int):
            axis = L.THREAD_AXES.index(x.kind)
            sizes[axis] = max(sizes[axis], x.extent)


def plain_statements(s: Stmt) -> Iterator[Stmt]:
    """A statement and those inside that no instruction executes."""
    if not isinstance(s, L.Call):
        yield s
        for child in L.children(s):
            yield from plain_statements(child)


@dataclass(frozen=True, slots=True)
class Touch:
    """One way in which a phase touches a buffer. `own`: the dimensions that are indexed by the number of the thread, with the axis, if they
    say which thread it is: threads stay with elements of their own. `places`: the indices, where they are known and the same for all
    threads."""

    buffer: Buffer
    writes: bool
    own: frozenset[tuple[int, str]] | None
    places: tuple[Expr | int | None, ...]

    def conflicts(self, other: Touch) -> bool:
        """Whether both may touch one element of the buffer, and one of them writes it."""
        if self.buffer is not other.buffer or not (self.writes or other.writes):
            return False
        return not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(self.places, other.places, strict=True))


Touched = frozenset[Touch]
_NOTHING: Touched = frozenset()


def touched(phase: Stmt) -> Touched:
    """The accesses of a phase to memory that threads share."""
    found: set[Touch] = set()
    in_instructions = {s for call in L.walk(phase) if isinstance(call, L.Call) for s in L.walk(call.body)}
    one_thread = None if has_threads(phase) else frozenset({(0, "one thread")})
    for a in accesses(phase):
        if a.buffer.scope == "register":
            continue
        threads, inside = [x for x in a.loops if x.kind in L.THREAD_AXES], {x.var for x in a.loops}
        numbers = frozenset((d, t.kind) for t in threads for d, i in enumerate(a.indices) if i is t.var)
        own = numbers if {kind for _, kind in numbers} == {t.kind for t in threads} else None
        own = None if a.statement in in_instructions else own if threads else one_thread
        shared = a.buffer.scope == "shared"
        places = tuple(i if shared and not E.reads(i) and inside.isdisjoint(E.variables(i)) else None for i in a.indices)
        found.add(Touch(a.buffer, a.writes, own, places))
    return frozenset(found)


@dataclass(slots=True)
class Placement:
    """`before`: statements with a barrier in front, and how many groups of copies may still be under way there (None: all).
    `groups`: the phases whose copies complete a group."""

    before: dict[Stmt, int | None]
    groups: set[Stmt]


def place(body: Stmt, copies: Collection[Stmt]) -> Placement:
    """The barriers of a function, some of whose phases are `copies`."""
    accesses = {s: touched(s) for s in phases(body)}

    def completed(found: Placement, waits: bool) -> Placement:
        """Followed until nothing is missing any more."""
        known: tuple[object, ...] = ()
        while known != (known := (dict(found.before), set(found.groups))):
            _Run(found, accesses, copies, waits).follow(body, _State())
        return found

    found = completed(Placement({}, set(_group_ends(body, copies))), False)  # needed anyway: copies can be waited for there
    for branches in (x for x in L.walk(body) if isinstance(x, L.If)):  # one in front of both stands for those at their beginnings
        firsts = [next(iter(phases(branch)), branches) for branch in L.children(branches)]
        if len(firsts) == 2 and all(x in found.before for x in firsts):
            one = completed(
                Placement({x: n for x, n in found.before.items() if x not in firsts} | {branches: None}, set(found.groups)), False
            )
            found = min(found, one, key=lambda p: len(p.before))
    for s in list(found.before):  # one that was found later may stand for it: what comes first in a loop is also reached from its end
        fewer = completed(Placement({x: n for x, n in found.before.items() if x is not s}, set(found.groups)), False)
        found = min(found, fewer, key=lambda p: len(p.before))
    return completed(found, True)


def unproved(body: Stmt, copies: Collection[Stmt], placement: Placement) -> list[Stmt]:
    """The statements where threads may conflict in spite of a placement: what they touch, another thread may have written since the last
    barrier, or may be copying; or barriers that not all threads may reach, as they stand under what threads do not share."""
    check = _Run(placement, {s: touched(s) for s in phases(body)}, copies, True, changes=False)
    check.follow(body, _State())
    return list(dict.fromkeys(check.faults + list(_divergent_barriers(body, placement.before, False))))


def _divergent_barriers(s: Stmt, barriers: Collection[Stmt], divergent: bool) -> Iterator[Stmt]:
    """Barriers under conditions and loops that a thread decides by what it keeps to itself."""
    if divergent and s in barriers:
        yield s
    if not is_phase(s):
        divergent = divergent or any(r.attr.scope == "register" for r in E.reads(*L.expressions(s)))
        for child in L.children(s):
            yield from _divergent_barriers(child, barriers, divergent)


def _group_ends(s: Stmt, copies: Collection[Stmt], more: bool = False) -> Iterator[Stmt]:
    """The copies that no other one follows at once: they complete a group."""
    if s in copies:
        if not more:
            yield s
    elif not is_phase(s):
        following: Iterable[Stmt | None] = (*s.stmts[1:], None) if isinstance(s, L.Block) else itertools.repeat(None)
        for child, after in zip(L.children(s), following, strict=False):
            yield from _group_ends(child, copies, after in copies)


@dataclass(frozen=True, slots=True)
class _State:
    """The state in front of a phase on which later placements depend."""

    touched: Touched = _NOTHING  # since the last barrier
    groups: tuple[Touched, ...] = ()  # of copies that have not been waited for, the newest first
    started: Touched = _NOTHING  # by copies of the group that is not complete
    copy: Stmt | None = None  # the last of those
    barrier: Stmt | None = None  # the last one stands in front of this; None if it is not the same on all ways here
    since: int = 0  # groups completed after it

    def passed(self, barrier: Stmt, pending: int | None) -> _State:
        """Behind a barrier, and a wait for all groups but some."""
        return replace(self, touched=_NOTHING, groups=self.groups[:pending], barrier=barrier, since=0)

    def with_group(self) -> _State:
        """Behind the end of a group."""
        groups = (self.started, *self.groups)
        if len(groups) > MAX_TRACKED:  # the oldest ones are no longer distinguished
            groups = (*groups[: MAX_TRACKED - 1], groups[MAX_TRACKED - 1] | groups[MAX_TRACKED])
        barrier, since = (self.barrier, self.since + 1) if self.since < MAX_TRACKED else (None, 0)
        return replace(self, groups=groups, started=_NOTHING, copy=None, barrier=barrier, since=since)


def _join(a: _State, b: _State) -> _State:
    """The union of two states: accesses that may have happened in either."""
    barrier, since = (a.barrier, a.since) if a.barrier is b.barrier and a.since == b.since else (None, 0)
    groups = tuple(x | y for x, y in itertools.zip_longest(a.groups, b.groups, fillvalue=_NOTHING))
    return _State(a.touched | b.touched, groups, a.started | b.started, a.copy or b.copy, barrier, since)


@dataclass(slots=True)
class _Run:
    """Follows the phases and adds what is missing in `placement`; `waits`: the waits for copies as well. Without `changes` it is only
    noted."""

    placement: Placement
    accesses: Mapping[Stmt, Touched]
    copies: Collection[Stmt]
    waits: bool
    changes: bool = True
    faults: list[Stmt] = field(default_factory=list)  # where a barrier or a wait is missing
    values: dict[Expr, int] = field(default_factory=dict)  # of the variables of loops around

    def follow(self, s: Stmt, state: _State) -> _State:
        """The state behind a statement."""
        if is_phase(s):
            return self.phase(s, state)
        match s:
            case L.For(_, extent, body, kind):
                state = self.arrive(s, self.read(as_expr(extent)), state)
                return self.follow(body, state) if kind in L.BLOCK_AXES else self.loop(s, state)
            case L.If(cond, then, otherwise):
                state = self.arrive(s, self.read(cond), state)
                return _join(self.follow(then, state), state if otherwise is None else self.follow(otherwise, state))
        for child in L.children(s):
            state = self.follow(child, state)
        return state

    def loop(self, s: L.For, state: _State) -> _State:
        """The state behind a loop: it is followed until a state repeats."""
        moving = [e for x in phases(s.body) for a in self.accesses[x] for e in a.places if isinstance(e, Expr) and s.var in E.variables(e)]
        exact = bool(moving) and _short(s.var)
        period = lcm(*(int(e.args[1].attr) for e in moving if _ring(e, s.var)))
        ends = [] if prove(as_expr(s.extent) > 0) else [state]
        seen, last = set(), bounds(s.var)[1]
        for iteration in itertools.count() if last is None else range(last + 1):  # how many there are is not known, but no more than these
            self.values[s.var] = iteration
            state = self.follow(s.body, state)
            moment = (iteration if exact else iteration % period, state)
            if moment in seen:
                break
            seen.add(moment)
            ends.append(state)
            if iteration + 1 == s.extent:
                ends = [state]
                break
        self.values.pop(s.var, None)
        return replace(reduce(_join, ends), barrier=None, since=0)  # a wait inside would be repeated by all iterations

    def phase(self, s: Stmt, state: _State) -> _State:
        found = frozenset(replace(a, places=tuple(map(self.place, a.places))) for a in self.accesses[s])
        state = self.arrive(s, found, state)
        if s not in self.copies:
            return replace(state, touched=state.touched | found)
        state = replace(state, started=state.started | found, copy=s)
        return state.with_group() if s in self.placement.groups else state

    def arrive(self, s: Stmt, found: Touched, state: _State) -> _State:
        """In front of a statement: with the barrier and the wait that it needs."""
        before = self.placement.before
        if s in before:
            state = state.passed(s, before[s])
        conflict = _conflict(state.touched, found, s not in self.copies)  # a copy and a thread are two, even if the thread has started it
        if not self.changes:
            if conflict or any(_conflict(group, found) for group in (state.started, *state.groups)):
                self.faults.append(s)
            return state
        if conflict:
            state = state.passed(s, before.setdefault(s, None))
        if not self.waits:
            return state
        if _conflict(state.started, found):
            assert state.copy is not None
            self.placement.groups.add(state.copy)
            state = state.with_group()
        needed = next((n for n, group in enumerate(state.groups) if _conflict(group, found)), None)
        if needed is None:
            return state
        if state.barrier is None or needed < state.since:
            state = state.passed(s, before.setdefault(s, None))
        assert state.barrier is not None
        most, pending = needed - state.since, before[state.barrier]
        before[state.barrier] = most if pending is None else min(most, pending)
        return replace(state, groups=state.groups[:needed])

    def read(self, e: Expr) -> Touched:
        """The accesses of the evaluation of a condition or an extent."""
        return frozenset(Touch(r.attr, False, None, (None,) * len(r.args)) for r in E.reads(e) if r.attr.scope != "register")

    def place(self, place: Expr | int | None) -> int | None:
        """An index in this iteration; None where it is not known, or another one in each of many iterations."""
        if not isinstance(place, Expr):
            return place
        variables = E.variables(place)
        if not all(v in self.values and (_short(v) or _ring(place, v)) for v in variables):
            return None
        return evaluate_int(place, self.values)


def _short(v: Expr) -> bool:
    """Whether a loop has few iterations, each of which is distinguished."""
    return (high := bounds(v)[1]) is not None and high < MAX_TRACKED


def _ring(place: Expr, v: Expr) -> bool:
    """Whether an index repeats in the iterations of a loop: it is the remainder of something linear."""
    return place.op == "mod" and place.args[1].op == "const" and coefficient(place.args[0], v) is not None


def _conflict(before: Touched, found: Touched, own_elements: bool = False) -> bool:
    """Whether some of both may touch one element that one of them writes; not if threads that index alike have elements of their own."""
    return any(a.conflicts(b) and not (own_elements and a.own is not None and a.own == b.own) for a in before for b in found)
