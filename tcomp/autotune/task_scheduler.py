"""The task scheduler: which kernel gets the next trials, namely that where the model gains most per second of tuning.

By the estimate of L. Zheng et al. (Ansor, OSDI 2020): the mean of what a kernel's latest trials gained, and of what it could gain at best,
which shrinks with the number of trials and ends at its roofline bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from tcomp.autotune.database.records import Record
from tcomp.autotune.progress import StopReason, TaskStatus
from tcomp.schedules.knobs import encode

CLOSE = 0.05  # a kernel is done when it is within this share of its bound
_EXPLORE = 0.05  # how often a kernel is drawn at random
_RECENT = 8  # trials whose gain is expected to continue
_HOPE = 0.5  # the weight of what could be gained, against what was
_EARLIER = 32  # the best records of earlier runs that the search learns from: each costs as much as a candidate


@dataclass(eq=False)
class TaskState(TaskStatus):
    """What the tuner knows of one kernel. `base` is the record of its default schedule, `progress` the least cost after each trial, `seconds`
    were spent on it, with `measured` candidates; the first `earlier` records are those of earlier runs. `known` says whether `before` comes
    from a run of the model."""

    records: list[Record] = field(default_factory=list)
    base: Record | None = None
    best: Record | None = None
    progress: list[float] = field(default_factory=list)
    seconds: float = 0.0
    measured: int = 0
    earlier: int = 0
    known: bool = False

    def learn(self, record: Record) -> None:
        """Take a record into account."""
        self.records.append(record)
        if record.decisions == encode({}):
            self.base = self.base or (record if record.ok else None)
            if self.base is not None and not self.known:
                self.before = self.calls * (self.base.cost or 0.0)
        else:
            self.trials += 1
            self.failed += not record.ok
        if record.cost is not None and (self.best is None or record.cost < (self.best.cost or inf)):
            self.best = record
        if self.base is not None and self.best is not None:
            self.progress.append(self.best.cost or inf)
            self.gain = min(1.0, self.progress[-1] / (self.base.cost or inf))

    @property
    def training_records(self) -> list[Record]:
        """The records of this run, and the best of those before."""
        ok = sorted((r for r in self.records[: self.earlier] if r.ok), key=lambda r: r.cost or inf)
        return [*ok[:_EARLIER], *self.records[self.earlier :]]

    def promise(self, usual: float) -> float:
        """Seconds that a run of the model is expected to gain for each second of tuning; a trial takes `usual` seconds if none was made."""
        cost = self.seconds / self.measured if self.measured else usual
        if self.base is None or not self.progress:
            return _HOPE * max(0.0, self.before - self.bound) / max(cost, 1e-3)
        now, n = self.after, len(self.progress)
        lately = self.progress[max(0, n - 1 - _RECENT)] - self.progress[-1]
        recent = self.before / (self.base.cost or inf) * lately / min(_RECENT, n)
        hope = max(0.0, min(now / n, now - self.bound))
        return ((1 - _HOPE) * recent + _HOPE * hope) / max(cost, 1e-3)


def next_task(tasks: Sequence[TaskState], rng: Random) -> TaskState | None:
    """The kernel that gets the next batch of trials; None if all are done."""
    for task in tasks:
        if task.stop is None and task.base is not None and task.share >= 1 - CLOSE:
            task.stop = StopReason.AT_BOUND
    able = [task for task in tasks if task.stop is None]
    if not able:
        return None
    if rng.random() < _EXPLORE:
        return rng.choice(able)
    measured = sum(task.measured for task in tasks)
    usual = sum(task.seconds for task in tasks) / measured if measured else 1.0
    return max(able, key=lambda task: task.promise(usual))
