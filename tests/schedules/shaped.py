"""What is computed stays the same: for schedules written by hand, and for random steps of random programs."""

from __future__ import annotations

from collections import Counter
from textwrap import dedent

import numpy as np

from tcomp.errors import ScheduleError
from tcomp.ir.dtypes import is_float
from tcomp.ir.loops import Kernel
from tcomp.ir.text.parser import parse_kernel
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tests.schedules.dice import Dice
from tests.schedules.programs import EXACT, Maker
from tests.schedules.random_loops import imperative
from tests.schedules.random_schedules import draw_step
from tests.schedules.subject import Subject, interpreted


def kernel(text: str) -> Kernel:
    return parse_kernel(dedent(text).strip())


def unchanged(s: Schedule, **sizes: int) -> None:
    """The schedule computes, at these sizes, what its source does, and replays."""
    verify_kernel(s.kernel)
    subject = Subject(s.source, {v: sizes[v.name] for v in s.kernel.scalars})
    for got, want in zip(interpreted(subject, s.kernel), subject.plain, strict=True):
        np.testing.assert_array_equal(got, want)
    assert str(Schedule(s.source).replay(s.trace)) == str(s.kernel)


SHAPES = ("split", "split", "split", "fuse", "partition", "reorder", "clean", "collapse")
FOLDS = ("rfactor", "rfactor", "decompose_reduction", "decompose_reduction", "mask", "split", "reorder", "fuse", "clean")


def subject_of(dice: Dice) -> Subject:
    if dice.flip():
        return Subject(*imperative(dice))
    program = dice.pick(*EXACT)(Maker(dice, 4, 40, dice.flip()))
    return Subject(lower("program", program.inputs, program.outputs), program.dims)


def check(dice: Dice, among: tuple[str, ...], steps: int) -> Counter[str]:
    """One case; counts the steps that were accepted, by primitive, and those that were refused."""
    subject = subject_of(dice)
    s, counts = Schedule(subject.kernel), Counter[str]()
    for _ in range(steps):
        step = draw_step(dice, s.kernel, among)
        try:
            s.apply(step.primitive, *step.arguments, **dict(step.options))
            counts[step.primitive] += 1
        except ScheduleError as error:
            assert error.why or error.hint
            counts["refused"] += 1
            continue
        try:
            verify_kernel(s.kernel)
            for b, got, want in zip(s.kernel.outputs, interpreted(subject, s.kernel), subject.plain, strict=True):
                if is_float(b.dtype):  # sums may be folded in another order
                    np.testing.assert_allclose(got, want, rtol=1e-3, err_msg=b.name)
                else:
                    np.testing.assert_array_equal(got, want, err_msg=b.name)
        except Exception as error:
            error.add_note(f"{subject.kernel}\n{s.trace}\n{s}")
            raise
    return counts
