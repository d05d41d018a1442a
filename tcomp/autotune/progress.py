"""The state of a tuning run: the progress of each kernel, which one gets the next trials, the division of time, and the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from random import Random

from tcomp.autotune.confirm import Confirmation
from tcomp.autotune.database.entries import Record
from tcomp.autotune.tasks import Task, instantiate
from tcomp.errors import InputError
from tcomp.schedules.knobs import encode
from tcomp.schedules.schedule import Schedule

BUDGET = 60.0  # seconds, if neither a budget nor a number of trials is given
_COMPARISON = 0.05  # the share of the budget for one comparison of whole models, within _COMPARISON_SECONDS
_COMPARISON_SECONDS = 1.0, 15.0
_FINALISTS, _FINALS = 4, 0.25  # candidates of a kernel that run in the model, and the share of the budget for that, at most
_EXTRA_COMPARISONS = 0.5  # beyond those of the finalists, for which there has to be time
_AT_BOUND_SHARE = 0.95  # of the present time that the bound is, from which on a kernel is done
_EXPLORE = 0.05  # how often a kernel is drawn at random
_RECENT = 8  # trials whose gain is expected to continue
_HOPE = 0.5  # the weight of what could be gained, against what was

_USEFUL = ("compile", "build", "measure", "confirm")  # what time is spent on; the rest is overhead


class StopReason(StrEnum):
    """Why a kernel gets no more trials."""

    AT_BOUND = "at its bound"
    EXHAUSTED = "nothing new is found"
    NOT_MEASURED = "not tuned"  # its default schedule cannot be measured


@dataclass(eq=False)
class TaskStatus:
    """The state of tuning of one kernel: `calls` of it in a run, the seconds that these take in the untuned model (`before`) and, as
    estimated by measurements of the kernel alone, by now (`after`), their roofline bound (`bound`). `stop` says why it gets no more trials.

    `base` is the record of its default schedule, `progress` the least cost after each trial, `seconds` were spent on it in this run; the
    first `earlier` records are those of earlier runs. `known` says whether `before` comes from a run of the model.
    """

    task: Task
    title: str
    calls: int
    bound: float
    before: float = 0.0
    trials: int = 0
    failed: int = 0
    gain: float = 1.0  # least cost over that of the default schedule
    stop: StopReason | None = None
    stop_detail: str = ""
    records: list[Record] = field(default_factory=list)
    base: Record | None = None
    best: Record | None = None
    progress: list[float] = field(default_factory=list)
    seconds: float = 0.0
    earlier: int = 0
    known: bool = False

    @property
    def stopped(self) -> str:
        """Why it gets no more trials, for people; "" if it does."""
        return ": ".join(filter(None, (self.stop, self.stop_detail)))

    @property
    def after(self) -> float:
        """Seconds by now, as estimated by measurements of the kernel alone."""
        return self.before * self.gain

    @property
    def measured(self) -> int:
        """Candidates that were measured in this run."""
        return len(self.records) - self.earlier

    @property
    def timed(self) -> bool:
        """Whether `before` was measured, in the model or alone; else it is a bound, or nothing yet."""
        return self.known or self.base is not None

    @property
    def share(self) -> float:
        """The bound over the present time: 1 is as fast as the machine can be."""
        return self.bound / self.after if self.after else 0.0

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

    def promise(self, usual: float) -> float:
        """Seconds that a run of the model is expected to gain for each second of tuning; a trial takes `usual` seconds if none was made.
        This is the estimate of L. Zheng et al. (Ansor, OSDI 2020)."""
        cost = max(self.seconds / self.measured if self.measured else usual, 1e-3)
        if self.base is None or not self.progress:
            return _HOPE * max(0.0, self.before - self.bound) / cost
        n = len(self.progress)
        recent = self.before / (self.base.cost or inf) * (self.progress[max(0, n - 1 - _RECENT)] - self.progress[-1]) / min(_RECENT, n)
        hope = max(0.0, min(self.after / n, self.after - self.bound))
        return ((1 - _HOPE) * recent + _HOPE * hope) / cost


def next_task(tasks: Sequence[TaskStatus], rng: Random) -> TaskStatus | None:
    """The kernel that gets the next batch of trials; None if all are done."""
    for task in tasks:
        if task.stop is None and task.base is not None and task.share >= _AT_BOUND_SHARE:
            task.stop = StopReason.AT_BOUND
    able, measured = [task for task in tasks if task.stop is None], sum(task.measured for task in tasks)
    usual = sum(task.seconds for task in tasks) / measured if measured else 1.0
    if able and rng.random() < _EXPLORE:
        return rng.choice(able)
    return max(able, key=lambda task: task.promise(usual), default=None)


class TimePlan:
    """The division of the budget (None: no limit) of a tuner's call, of which earlier calls spent `earlier` seconds: the search ends early
    enough to build and compare the winners. `comparison` are the seconds of runs in a comparison of whole models."""

    def __init__(self, start: float, budget: float | None, earlier: float) -> None:
        self.start, self.earlier = start, earlier
        self.budget = inf if budget is None else max(0.0, budget - earlier)
        self.deadline = start + self.budget  # when the budget is spent
        least, most = _COMPARISON_SECONDS
        self.comparison = min(max(_COMPARISON * (BUDGET if budget is None else budget), least), most)
        self.kernels: Sequence[TaskStatus] = ()  # that may have a winner
        self.loading = 1.0  # seconds of a comparison beyond those of its runs, for processes to start and models to load
        self._building, self._built = 0.0, 0  # seconds, in which so many candidates were built

    @property
    def elapsed(self) -> float:
        """Seconds since the start of this call."""
        return time.monotonic() - self.start

    @property
    def end(self) -> float:
        """When the search has to end."""
        return self.deadline - (self.finalists + _EXTRA_COMPARISONS) * self._comparison_seconds

    @property
    def finalists(self) -> int:
        """Candidates of a kernel that run in the model, at most."""
        return max(1, int(min(_FINALISTS, _FINALS * self.budget / self._comparison_seconds - _EXTRA_COMPARISONS)))

    @property
    def _comparison_seconds(self) -> float:
        return (sum(k.gain < 1 for k in self.kernels) + 1) * self._building / max(self._built, 1) + self.comparison + self.loading

    def built(self, candidates: int, seconds: float, process_start: bool) -> None:
        """So many candidates were built; the time of the first ones is that of `process_start`, if that is part of it."""
        if process_start and not self._built:
            self.loading, self._built = max(self.loading, seconds), 1
        else:
            self._building, self._built = self._building + seconds, self._built + candidates


class PhaseClock:
    """Seconds by phase of the work; a phase inside of another one does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since, self._phase = time.monotonic(), "overhead"

    def stop(self) -> dict[str, float]:
        """Seconds by phase until now."""
        now = time.monotonic()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._since = now
        return self.seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of the block counts for this phase."""
        self.stop()
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self.stop()
            self._phase = outer


@dataclass
class Status:
    """The state of tuning that a progress function gets, again and again. `error` is how far the cost model was off lately: the mean of
    |log(predicted / measured)|, None if nothing was predicted."""

    phase: str
    elapsed: float
    budget: float
    trials: int
    limit: int | None
    tasks: Sequence[TaskStatus]
    current: TaskStatus | None = None
    error: float | None = None


@dataclass
class Result:
    """The result of tuning; `print` shows it. `seconds` are those of each phase, `program` is the task of a user's own program."""

    database: str
    tasks: Sequence[TaskStatus]
    confirmation: Confirmation
    seconds: Mapping[str, float]
    trials: int
    interrupted: bool = False
    program: Task | None = None

    @property
    def ratio(self) -> float:
        """Tuned over untuned time of the whole model, as confirmed: 1 if nothing is gained."""
        return self.confirmation.ratio

    @property
    def overhead(self) -> float:
        """The share of the time that was neither compiling nor measuring."""
        return sum(s for name, s in self.seconds.items() if name not in _USEFUL) / (sum(self.seconds.values()) or 1.0)

    @property
    def schedule(self) -> Schedule:
        """Of a user's own program: the schedule to build, `tcomp.build(result.schedule)`. Raises `InputError` for a model."""
        if self.program is None:
            raise InputError("a model has as many schedules as kernels", hint="tcomp.compile(model, database=...) follows them all")
        return instantiate(self.program, self.confirmation.kept.get(self.program.key, {})).schedule

    def __str__(self) -> str:
        c, count, took = self.confirmation, len(self.tasks), f"{sum(self.seconds.values()):.1f} s, {self.overhead:.0%} of it overhead"
        lines = [f"{self.trials} trials of {count} kernel{'s'[: count > 1]} in {took}"]
        if c.comparisons and c.before:
            lines.append(f"{1e3 * c.before:.4g} ms -> {1e3 * c.after:.4g} ms, {c.ratio:.3f} of the time, in a fresh process")
        lines.append(f"kernels tuned: {len(c.kept)}, rolled back: {len(c.rolled_back)}")
        names = {s.task.key: s.title for s in self.tasks}
        noise = dict.fromkeys(c.within_noise, " (within noise)")
        kept = sorted(
            (after - before, before, after, names.get(key, key), noise.get(key, ""))
            for key, (before, after) in c.kernels.items()
            if key in c.kept
        )
        lines += [f"  {1e6 * before:.1f} -> {1e6 * after:.1f} us  {name}{noise}" for _, before, after, name, noise in kept]
        return "\n".join([*lines, *c.notes, *(["interrupted: `resume` goes on"] if self.interrupted else [])])
