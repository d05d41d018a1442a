"""Random steps among some primitives on random pipelines, and steps as text on programs as text; every accepted step is judged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tcomp.errors import ScheduleError
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules.schedule import Schedule
from tests.schedules.dice import Dice
from tests.schedules.fuzzing import Run, check, parsed
from tests.schedules.pipelines import pipeline
from tests.schedules.random_schedules import draw_step


def walked(dice: Dice, most: int, among: Sequence[str]) -> Run:
    """A random pipeline after up to `most` steps, the interpreter run after each."""
    run = Run(pipeline(dice))
    for _ in range(dice.number(1, most)):
        taken = len(run.schedule.trace)
        run.take(draw_step(dice, run.schedule.kernel, among))
        if len(run.schedule.trace) > taken:
            run.interpret()
    return run


def accepted(kernel: str, steps: str, **sizes: int) -> str:
    """The loops after steps that are all accepted and right, in the interpreter and natively."""
    run = check(kernel, steps, **sizes)
    assert len(run.schedule.trace) == len(run.steps), run.schedule.trace
    return str(run.schedule.kernel.body)


def refused(kernel: str, steps: str, why: str) -> None:
    """The last of the steps is refused, and says so."""
    s = Schedule(parse_kernel(kernel.strip()))
    *before, last = parsed(steps)
    s.replay(before)
    shown, trace = str(s), s.trace
    with pytest.raises(ScheduleError) as found:
        s.apply(last.primitive, *last.arguments, **dict(last.options))
    assert why in found.value.why, found.value.why
    assert str(s) == shown and s.trace == trace and "for " in found.value.where
