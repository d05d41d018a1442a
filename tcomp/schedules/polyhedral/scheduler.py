"""The polyhedral scheduler as a whole: operands, the plan from isl's order, `affine`, and the kinds of the loops it makes."""

from __future__ import annotations

from contextlib import suppress
from math import prod

import islpy as isl

from tcomp.errors import ScheduleError
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.loops import Accumulate, Kernel, Store
from tcomp.ir.polyhedral.model import TooHard, model
from tcomp.schedules.analysis.access_patterns import extent_of
from tcomp.schedules.cost.roofline import statements
from tcomp.schedules.polyhedral.bands import Planner
from tcomp.schedules.polyhedral.blocks import in_blocks
from tcomp.schedules.polyhedral.loop_kinds import set_kinds
from tcomp.schedules.polyhedral.operands import pack
from tcomp.schedules.polyhedral.plan import worth_threads
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

LONGEST_REASON = 183  # characters of a reason that is printed: with its beginning, a line of 200

def polyhedral(program: Kernel | Schedule, target: CpuTarget, threads: int = 1) -> Schedule:
    """The schedule of an affine loop program, made in place where a schedule is given.

    Raises `ScheduleError` where isl finds no order within its limits, or none that gains threads, lanes or chains side by side; the
    schedule is then as it was.
    """
    s = program if isinstance(program, Schedule) else Schedule(program)
    for x in model(s.kernel.body).instances:
        if not x.exact or not isinstance(x.stmt, Store | Accumulate):
            raise _no_schedule(s, f"whether `{x.stmt}` is executed depends on data")
    with s.together():
        pack(s)
        planner = _planner(s, None, target, threads)
        if not _in_blocks(s, planner):
            _ordered(s, None, planner)
        s.clean()
    return s


def _planner(s: Schedule, nest: str | None, target: CpuTarget, threads: int) -> Planner:
    """What plans a nest, or the whole kernel."""
    m = model(s.kernel.body) if nest is None else model(s.loops[nest], s.kernel.body)
    try:
        return Planner(m, target, threads)
    except TooHard as error:
        raise _no_schedule(s, f"isl gave up: {error}") from None


def _no_schedule(s: Schedule, why: str) -> ScheduleError:
    return ScheduleError(f"no polyhedral schedule of kernel `{s.kernel.name}`", why=why)


def _ordered(s: Schedule, nest: str | None, planner: Planner) -> None:
    """The order of a nest, or of the whole kernel, and the kinds of its loops."""
    for fused in (None, False):
        try:
            plan = planner.plan(fused)
            if not plan.gains():
                raise _no_schedule(s, "the loops that do most of the work depend on each other")
            made = s.affine(nest, plan.order(), plan.naming(), plan.parallel())
            break
        except TooHard as error:
            raise _no_schedule(s, f"isl gave up: {error}") from None
        except ScheduleError:
            if fused is False:
                raise
    set_kinds(s, {loop: plan.loops[name] for loop, name in made.items() if name in plan.loops}, planner.target)


def _in_blocks(s: Schedule, planner: Planner) -> bool:
    """The order in blocks of steps, where there is one in which updates are summed in registers; else nothing changes."""
    steps = len(s.trace)
    with suppress(ScheduleError, TooHard), s.together():
        for nest in in_blocks(s, planner.model, planner.tree()):
            with suppress(ScheduleError):  # stays as it is
                _ordered(s, nest, _planner(s, nest, planner.target, planner.threads))
        if not any(step.primitive == "promote" for step in s.trace[steps:]):
            raise _no_schedule(s, "no sum of a block of steps stays in registers")
        return True
    return False


def polyhedral_or_not(s: Schedule, target: CpuTarget, threads: int) -> Schedule:
    """The default for programs of which the structural schedules know nothing: as written, with a note, where there is nothing to gain."""
    if not worth_threads(sum(prod(extent_of(x.extent) for x in loops) for _, loops, _ in statements(s.kernel)) // 2):
        return s
    try:
        return polyhedral(s, target, threads)
    except (ScheduleError, isl.Error) as error:
        why = error.reason if isinstance(error, ScheduleError) else "isl gave up"
        s.fall_back(FallbackKind.AS_WRITTEN, "", why.partition("\n")[0][:LONGEST_REASON])
        return s
