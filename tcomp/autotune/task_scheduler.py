"""Which kernel gets the next trials: that where the model gains most per second of tuning.

By the estimate of L. Zheng et al. (Ansor, OSDI 2020): the mean of what a kernel's latest trials gained, and of what it could gain at best,
which shrinks with the number of trials and ends at its roofline bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from tcomp.autotune.database.store import Record
from tcomp.autotune.progress import TaskStatus
from tcomp.autotune.tasks import Task
from tcomp.schedules.knobs import encode

_RECENT = 8  # trials whose gain is taken to go on
_HOPE = 0.5  # the weight of what could be gained, against what was
_TELLING = 32  # the best of earlier runs that the search learns from: each costs as much as a candidate


@dataclass(eq=False)
class Effort:
    """What is known of one task. `base` is the cost of its default schedule, `progress` the least cost after each trial."""

    status: TaskStatus
    task: Task
    records: list[Record]
    base: Record | None = None
    best: Record | None = None
    progress: list[float] = field(default_factory=list)
    seconds: float = 0.0  # spent on it
    measured: int = 0  # with these seconds
    earlier: int = 0  # records that are not of this run
    known: bool = False  # whether the model said how long its kernels take

    def learn(self, record: Record) -> None:
        self.records.append(record)
        if record.decisions == encode({}):
            self.base = self.base or (record if record.ok else None)
            if self.base is not None and not self.known:
                self.status.before = self.status.calls * (self.base.cost or 0.0)
        else:
            self.status.trials += 1
            self.status.failed += not record.ok
        if record.cost is not None and (self.best is None or record.cost < (self.best.cost or inf)):
            self.best = record
        if self.base is not None and self.best is not None:
            self.progress.append(self.best.cost or inf)
            self.status.gain = min(1.0, self.progress[-1] / (self.base.cost or inf))

    @property
    def telling(self) -> list[Record]:
        """The records of this run, and the best of those before."""
        ok = sorted((r for r in self.records[: self.earlier] if r.ok), key=lambda r: r.cost or inf)
        return [*ok[:_TELLING], *self.records[self.earlier :]]

    def promise(self, usual: float) -> float:
        """Seconds that a run of the model is expected to gain, for each second of tuning; a trial takes `usual` where none was made."""
        cost = self.seconds / self.measured if self.measured else usual
        if self.base is None or not self.progress:
            return _HOPE * max(0.0, self.status.before - self.status.bound) / max(cost, 1e-3)
        now, n = self.status.after, len(self.progress)
        lately = self.progress[max(0, n - 1 - _RECENT)] - self.progress[-1]
        scale = self.status.before / (self.base.cost or inf)
        recent = scale * lately / min(_RECENT, n)
        hope = max(0.0, min(now / n, now - self.status.bound))
        return ((1 - _HOPE) * recent + _HOPE * hope) / max(cost, 1e-3)
