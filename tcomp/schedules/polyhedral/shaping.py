"""Kinds for the loops that `affine` made, as planned: lanes, and copies side by side."""

from __future__ import annotations

from contextlib import suppress

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.loops import UNROLLED, Accumulate, Buffer, For, Stmt, Store, walk
from tcomp.schedules.polyhedral.plan import Loop, Plan
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.shaping import lanes_of
from tcomp.target import Target


def shape(s: Schedule, plan: Plan, target: Target) -> None:
    """Vectorizes and unrolls the loops that the plan wants so; one that cannot be runs in order. (`affine` proves and makes parallel loops.)"""
    for role in ("lanes", "vector", UNROLLED):
        for name, loop in list(s.loops.items()):
            found = plan.loop(name)
            if found is not None and found[1].role == role and name in s.loops:
                before = s.copy()
                try:
                    _shaped(s, name, loop, found[1], target)
                except ScheduleError:
                    s.kernel, s.trace = before.kernel, before.trace


def _shaped(s: Schedule, name: str, loop: For, plan: Loop, target: Target) -> None:
    match plan.role:
        case "unrolled" if loop.extent == plan.size:
            s.unroll(name)
        case "lanes" if loop.extent == plan.size:
            s.vectorize(name)
        case "lanes":
            s.vectorize(name, plan.size)
        case "vector":
            _vectorize(s, name, target)


def _vectorize(s: Schedule, name: str, target: Target) -> None:
    """Full vectors, and the rest in masked ones."""
    lanes = lanes_of(target, [b for x in walk(s.loops[name].body) for b in _touched(x)])
    if s.loops[name].extent == lanes:
        return s.vectorize(name)
    _, inner, rest = s.split(name, lanes, "peel")
    s.vectorize(inner)
    with suppress(ScheduleError):
        s.vectorize(rest, lanes)


def _touched(x: Stmt) -> list[Buffer]:
    return [x.buffer, *(r.attr for r in E.reads(x.value))] if isinstance(x, Store | Accumulate) else []
