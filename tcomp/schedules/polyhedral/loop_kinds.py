"""Kinds for the loops that `affine` made, as planned: lanes, and copies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import is_multiple, linear_index, without
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import as_expr
from tcomp.ir.loops import UNROLLED, Accumulate, Buffer, For, Stmt, Store, expressions, walk
from tcomp.ir.simplify import linear
from tcomp.schedules.handles import LoopCopy
from tcomp.schedules.polyhedral.plan import Loop
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

ALIGNED_FROM = 8  # vectors of a loop for which one more, to align the others, is cheap


def set_kinds(s: Schedule, planned: dict[str, Loop], target: CpuTarget) -> None:
    """Vectorizes and unrolls the loops as planned; one that cannot be runs in order. (`affine` makes the parallel loops.)"""
    for role in ("lanes", "vector", UNROLLED, "sum"):
        for name, loop in list(s.loops.items()):
            if name in planned and planned[name].role == role and name in s.loops:
                with suppress(ScheduleError), s.together():
                    for tail in _set_kind(s, name, loop, planned[name], target):
                        planned |= {copy: planned[x] for x, copy in tail.copies.items() if x in planned}


def _set_kind(s: Schedule, name: str, loop: For, plan: Loop, target: CpuTarget) -> Sequence[LoopCopy]:
    """Gives one loop its kind; returns the tails that this takes."""
    match plan.role:
        case "unrolled" if loop.extent == plan.size:
            s.unroll(name)
        case "lanes" if loop.extent == plan.size:
            s.vectorize(name)
        case "lanes":
            s.vectorize(name, plan.size)
        case "vector":
            return _vectorize(s, name, target)
        case "sum":
            _promote(s, loop)
    return ()


def _promote(s: Schedule, loop: For) -> None:
    """Sums go to registers; where their buffer is not read as well, the code generator sees to that."""
    inside = list(walk(loop))
    for b in {x.buffer for x in inside if isinstance(x, Accumulate)} & {r.attr for x in inside for r in E.reads(*expressions(x))}:
        s.promote(loop.var.name, b.name, f"{b.name}.sums")


def _vectorize(s: Schedule, name: str, target: CpuTarget) -> list[LoopCopy]:
    """Full vectors, and the rest in masked ones: at the end, and at the start where full ones then stay within cache lines."""
    tails = list[LoopCopy]()
    lanes = target.lanes(8 * max(itemsize(b.dtype) for x in walk(s.loops[name].body) for b in _touched(x)))
    if s.loops[name].extent == lanes:
        s.vectorize(name)
        return tails
    if ahead := _unaligned(s.loops[name], lanes):
        head, name = s.partition(name, ahead)
        tails.append(name)
        with suppress(ScheduleError):
            s.vectorize(head, lanes)
    _, inner, rest = s.split(name, lanes, "peel")
    tails.append(rest)
    s.vectorize(inner)
    with suppress(ScheduleError):
        s.vectorize(rest, lanes)
    return tails


def _unaligned(loop: For, lanes: int) -> int:
    """Iterations of a loop before the first that stores at a multiple of `lanes`, if that is the same for all stores and outer loops."""
    found = set()
    for x in walk(loop.body):
        if isinstance(x, Store | Accumulate):
            along, start = without(linear_index(x.buffer, x.indices), loop.var) or (0, as_expr(0))
            offset = linear(start).get((), 0)
            found.add(-offset % lanes if along == 1 and is_multiple(start - offset, lanes) else 0)
    ahead = found.pop() if len(found) == 1 else 0
    return ahead if isinstance(loop.extent, int) and loop.extent >= ALIGNED_FROM * lanes else 0


def _touched(x: Stmt) -> list[Buffer]:
    return [x.buffer, *(r.attr for r in E.reads(x.value))] if isinstance(x, Store | Accumulate) else []
