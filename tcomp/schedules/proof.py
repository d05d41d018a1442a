"""Proving saved schedules: a trace is applied again to the kernel it starts from, and isl, not the quick test, judges every step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tcomp.errors import ScheduleError
from tcomp.ir.loops import Kernel
from tcomp.schedules.analysis.legality import proving
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of proving a trace: how many of its steps hold, how often isl was asked, seconds in all and in isl, and the refusal
    that ended it, if one did."""

    kernel: str
    steps: int
    proved: int
    questions: int
    seconds: float
    isl_seconds: float
    refused: ScheduleError | None

    @property
    def ok(self) -> bool:
        """Whether all steps are proved."""
        return self.refused is None


def prove(kernel: Kernel, trace: Iterable[Step]) -> Proof:
    """Judge each step of a trace that starts from a kernel. A refused step ends the proof; it raises nothing."""
    trace, started = Trace(tuple(trace)), time.perf_counter()
    s, refused = Schedule(kernel), None
    with proving() as asked:
        for step in trace:
            try:
                s.replay([step])
            except ScheduleError as error:
                refused = error
                break
    return Proof(kernel.name, len(trace), len(s.trace), asked.questions, time.perf_counter() - started, asked.seconds, refused)
