"""What tuning reports: its progress while it runs, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tcomp.autotune.confirm import Confirmation
from tcomp.autotune.space import instantiate
from tcomp.autotune.tasks import Task
from tcomp.errors import InputError
from tcomp.schedules.schedule import Schedule

USEFUL = ("compile", "build", "measure", "confirm")  # what time is spent on; the rest is overhead


class StopReason(StrEnum):
    """Why a kernel gets no more trials."""

    AT_BOUND = "at its bound"
    EXHAUSTED = "nothing new is found"
    NOT_MEASURED = "not tuned"  # its default schedule cannot be measured


@dataclass
class TaskStatus:
    """One kernel: `calls` of it in a run, the seconds that these take in the untuned model (`before`) and, as far as measurements alone
    tell, by now (`after`), the least they can take by the roofline (`bound`). `stop` says why it gets no more trials."""

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

    @property
    def stopped(self) -> str:
        """Why it gets no more trials, for people; "" if it does."""
        return ": ".join(filter(None, (self.stop, self.stop_detail)))

    @property
    def after(self) -> float:
        """Seconds by now, as far as measurements of the kernel alone tell."""
        return self.before * self.gain

    @property
    def share(self) -> float:
        """The bound over the present time: 1 is as fast as the machine can be."""
        return self.bound / self.after if self.after else 0.0


@dataclass
class Status:
    """What a progress function is told, again and again. `error` is how far the cost model was off lately: the mean of |log(predicted /
    measured)|, None if nothing was predicted."""

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
    """What came of tuning; `print` shows it. `seconds` are those of each phase, `program` is the task of a user's own program."""

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
        total = sum(self.seconds.values())
        return sum(s for name, s in self.seconds.items() if name not in USEFUL) / total if total else 0.0

    @property
    def schedule(self) -> Schedule:
        """Of a user's own program: the schedule to build, `tcomp.build(result.schedule)`. Raises `InputError` for a model."""
        if self.program is None:
            raise InputError("a model has as many schedules as kernels", hint="tcomp.compile(model, database=...) follows them all")
        return instantiate(self.program, self.confirmation.kept.get(self.program.key, {})).schedule

    def __str__(self) -> str:
        c = self.confirmation
        took = sum(self.seconds.values())
        lines = [
            f"{self.trials} trials of {len(self.tasks)} kernel{'s'[: len(self.tasks) > 1]} in {took:.1f} s, {self.overhead:.0%} of it overhead"
        ]
        if c.comparisons and c.before:
            lines.append(f"{1e3 * c.before:.4g} ms -> {1e3 * c.after:.4g} ms, {c.ratio:.3f} of the time, in a fresh process")
        lines.append(f"kernels tuned: {len(c.kept)}, rolled back: {len(c.rolled_back)}")
        ranked = sorted(c.kernels.items(), key=lambda item: item[1].after - item[1].before)
        names = {s.task.key: s.title for s in self.tasks}
        lines += [f"  {1e6 * g.before:.1f} -> {1e6 * g.after:.1f} us  {names.get(key, key)}" for key, g in ranked if key in c.kept]
        return "\n".join([*lines, *c.notes, *(["interrupted: `resume` goes on"] if self.interrupted else [])])
