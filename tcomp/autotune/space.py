"""The search space of a task: the candidates of given decisions, or of random ones, made by running the schedule function with these answers.

A candidate is what the schedule function made of some decisions: these, as far as they were asked for and differ from the defaults,
and the loops. Decisions are written as JSON, the same text for equal ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random

from tcomp.autotune.arguments import Argument
from tcomp.autotune.tasks import Task
from tcomp.errors import ScheduleError
from tcomp.ir.fallback import FallbackKind
from tcomp.schedules.knobs import Answer, Decisions, Knobs, Option, chosen, encode
from tcomp.schedules.schedule import Schedule


@dataclass(frozen=True)
class Candidate:
    """`answers` are all that was asked, by name; `arguments` the buffers that the loops take."""

    task: Task
    schedule: Schedule
    arguments: tuple[Argument, ...]
    answers: Mapping[str, Answer]

    @cached_property
    def decisions(self) -> dict[str, Option]:
        """Those that are not the default."""
        return chosen(self.answers)

    @cached_property
    def identity(self) -> str:
        """Equal for candidates of equal loops, whatever the decisions that led to them."""
        return hashlib.sha256(str(self.schedule.kernel).encode()).hexdigest()


def instantiate(task: Task, decisions: Decisions) -> Candidate:
    """The candidate of some decisions. Those that are not asked for, or not an option any more, are ignored.

    Raises `ScheduleError` where they are refused, also where they leave a part as lowered that the default schedule transforms.
    """
    return _candidate(task, Knobs(decisions))


def sample(task: Task, rng: Random) -> Candidate:
    """All decisions at random. Raises as `instantiate`."""
    return _candidate(task, Knobs(pick=lambda name, options, default: rng.choice(options)))


def _candidate(task: Task, knobs: Knobs) -> Candidate:
    s, arguments = task.make(knobs)
    if new := _left(s) - _left_by_default(task):
        notes = [str(f) for f in s.fallbacks if f.kind is FallbackKind.LEFT_AS_LOWERED and f.where in new]
        raise ScheduleError(
            f"these decisions cannot be followed for {', '.join(sorted(new))}", where=encode(knobs.decisions), why="; ".join(notes)
        )
    return Candidate(task, s, arguments, knobs.asked)


def _left(s: Schedule) -> frozenset[str]:
    """The results that a schedule left as lowered."""
    return frozenset(f.where for f in s.fallbacks if f.kind is FallbackKind.LEFT_AS_LOWERED)


@lru_cache(maxsize=256)
def _left_by_default(task: Task) -> frozenset[str]:
    return _left(task.schedule(Knobs()))
