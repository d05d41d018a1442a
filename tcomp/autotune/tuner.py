"""The tuner: which kernel gets the next trials, until time is up; then the winners must win in the whole model.

    result = tcomp.tune("model.onnx", budget=60, database="tune.db")
    module = tcomp.compile("model.onnx", database="tune.db")

Everything counts towards the budget, compiling and confirming included. Every candidate is entered in the database as soon as it is
measured; whatever ends the run, the best so far is what a compilation finds there, and `resume` goes on with what is left of the budget.

Trials are spent where the model gains most per second of tuning, by the estimate of L. Zheng et al. (Ansor, OSDI 2020): the mean of what a
kernel's latest trials gained, and of what it could gain at best, which shrinks with the number of trials and ends at its roofline bound.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf, log
from random import Random
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from tcomp.autotune.confirm import Confirmation, confirm
from tcomp.autotune.database import Database, Record, Session, Verdict, environment
from tcomp.autotune.measure import Limits, Measurement, Measurer
from tcomp.autotune.search import Search
from tcomp.autotune.space import realise
from tcomp.autotune.subject import Model, Single, Subject, bound, title
from tcomp.autotune.workload import ScheduleFunction, Task
from tcomp.errors import InputError, TcompError
from tcomp.ir.loops import Kernel
from tcomp.ir.te import Tensor
from tcomp.runtime import default_threads
from tcomp.schedules.knobs import Decisions, decode, encode
from tcomp.schedules.schedule import Program as Source
from tcomp.schedules.schedule import Schedule
from tcomp.target import Core, Target

if TYPE_CHECKING:
    import onnx

BUDGET = 60.0  # seconds, if nothing is said
NEAR = 0.05  # a kernel is done when it is within this share of its bound
_RECENT = 8  # trials whose gain is taken to go on
_HOPE = 0.5  # the weight of what could be gained, against what was
_EXPLORE = 0.05  # how often a kernel is drawn at random
_BATCH = 0.1  # the share of the time left that one batch may take
_WARM = 3  # winners of similar kernels that are tried first
_CONTEST = 0.05  # the share of the budget for one contest of whole models, within _CONTESTS seconds
_CONTESTS = 1.0, 15.0
_CONTESTED = 1.5  # contests for which there is to be time
_UNMEASURED = "not tuned"
_TELLING = 32  # the best of earlier runs that the search learns from: each costs as much as a candidate
_JUDGED = 64  # the latest predictions, of which the error of the model is told
_GRACE = 1.0  # seconds after which a candidate that is being measured when time is up is not waited for


# ---------------------------------------------------------------- what is told


@dataclass
class TaskStatus:
    """One kernel: `calls` of it in a run, the seconds that these take in the untuned model (`before`) and, as far as measurements alone
    tell, by now (`after`), the least they can take by the roofline (`bound`). `stopped` says why it gets no more trials."""

    task: Task
    title: str
    calls: int
    bound: float
    before: float = 0.0
    trials: int = 0
    failed: int = 0
    gain: float = 1.0  # least cost over that of the default schedule
    stopped: str = ""

    @property
    def after(self) -> float:
        return self.before * self.gain

    @property
    def share(self) -> float:
        """Of the bound: 1 is as fast as the machine can be."""
        return self.bound / self.after if self.after else 0.0


@dataclass
class Status:
    """What a progress function is told, again and again. `error` is how far the model of cost was off lately: the mean of |log(predicted /
    measured)|, None where nothing was predicted."""

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
    """What tuning came to; `print` shows it. `seconds` are what the time was spent on, `program` the task of a program of one's own."""

    database: str
    tasks: Sequence[TaskStatus]
    confirmation: Confirmation
    seconds: Mapping[str, float]
    trials: int
    interrupted: bool = False
    program: Task | None = None

    @property
    def ratio(self) -> float:
        """Tuned over untuned, of the whole, as confirmed: 1 where nothing is gained."""
        return self.confirmation.ratio

    @property
    def overhead(self) -> float:
        """The share of the time that was neither compiling nor measuring."""
        total = sum(self.seconds.values())
        return sum(s for name, s in self.seconds.items() if name not in _USEFUL) / total if total else 0.0

    @property
    def schedule(self) -> Schedule:
        """Of a program of one's own: the schedule to build, `tcomp.build(result.schedule)`. Raises `InputError` for a model."""
        if self.program is None:
            raise InputError("a model has as many schedules as kernels", hint="tcomp.compile(model, database=...) follows them all")
        return realise(self.program, self.confirmation.kept.get(self.program.key, {})).schedule

    def __str__(self) -> str:
        c = self.confirmation
        took = sum(self.seconds.values())
        lines = [
            f"{self.trials} trials of {len(self.tasks)} kernel{'s'[: len(self.tasks) > 1]} in {took:.1f} s, {self.overhead:.0%} of it overhead"
        ]
        if c.contests and c.before:
            lines.append(f"{1e3 * c.before:.4g} ms -> {1e3 * c.after:.4g} ms, {c.ratio:.3f} of the time, in a fresh process")
        lines.append(f"kernels tuned: {len(c.kept)}, rolled back: {len(c.rolled_back)}")
        ranked = sorted(c.kernels.items(), key=lambda item: item[1].after - item[1].before)
        names = {s.task.key: s.title for s in self.tasks}
        lines += [f"  {1e6 * g.before:.1f} -> {1e6 * g.after:.1f} us  {names.get(key, key)}" for key, g in ranked if key in c.kept]
        return "\n".join([*lines, *c.notes, *(["interrupted: `resume` goes on"] if self.interrupted else [])])


_Proposals = dict[str, float | None]  # decisions as text, and the costs that the model expects
_USEFUL = ("compile", "build", "measure", "confirm")


def tune(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | Source,
    *,
    budget: float | None = None,
    trials: int | None = None,
    database: str | os.PathLike[str] = "tune.db",
    target: Target | str | None = None,
    threads: int | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    schedule: ScheduleFunction | None = None,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    values: Mapping[str, npt.ArrayLike] | None = None,
    sizes: Mapping[str, int] | None = None,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    seed: int = 0,
) -> Result:
    """Find faster schedules for the kernels of an ONNX model, or for a program of one's own, and enter them in a database.

    `model` is what `tcomp.compile` takes, or what `tcomp.Schedule` takes; then `schedule(s, knobs)` may be a space of one's own.
    `budget` are seconds in all (60 if `trials` is not given either), `trials` the number of candidates. `target`, `threads`, `shapes`,
    `dims` and `values` are those of `tcomp.compile`, to which the same are to be given; `sizes` are those at which symbolic dims that stay
    open are measured. `workers` is the number of building processes, `cluster` the address of a Dask scheduler whose workers measure.
    `resume` goes on with an earlier call for the same model, with what is left of its budget unless another one is given.

    Ctrl-C ends the search, not the confirmation; a second one ends all. What was measured is in the database in any case.

    Raises `TcompError` as `tcomp.compile`; `DatabaseError` for a database that cannot be used; `InputError` if there is nothing to resume.
    """
    start = time.monotonic()
    machine = target if isinstance(target, Target) else Target.parse(target or "cpu")
    if machine.kind != "cpu":
        raise InputError(f"programs for `{machine}` cannot be tuned", why="candidates are measured on CPUs")
    for name, number in (("budget", budget), ("trials", trials), ("workers", workers), ("threads", threads)):
        if number is not None and not 0 < number < 1e9:
            raise InputError(f"{name} is to be positive, not {number}")
    count = threads or default_threads()
    options: dict[str, Any] = {
        "model": os.path.abspath(model) if isinstance(model, str | os.PathLike) else None, "target": str(machine), "threads": threads, "workers": workers,
        "cluster": cluster, "shapes": _plain(shapes), "dims": _plain(dims), "values": _plain(values), "sizes": _plain(sizes), "seed": seed,
    }  # fmt: skip
    clock = _Clock()
    with Database(database) as entries:
        with clock.spent("compile"):
            subject: Subject
            if isinstance(model, Kernel | Tensor) or (isinstance(model, Sequence) and not isinstance(model, str | bytes)):
                subject = Single(model, machine, count, sizes, schedule)
            elif schedule is not None:
                raise InputError("a schedule function is for a program of one's own", hint="tcomp.tune([A, B, C], schedule=f)")
            else:
                subject = Model(model, machine, count, shapes, dims, values, sizes, seed)
        session = _session(entries, subject, options, budget, trials, resume)
        tuning = _Tuning(subject, entries, session, start, clock, progress or (lambda status: None), Random(f"{seed} {session.trials}"))
        return tuning.run(workers, cluster)


def _plain(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """As JSON."""
    return None if given is None else {str(name): np.asarray(v).tolist() for name, v in given.items()}


def _session(
    entries: Database, subject: Subject, options: dict[str, Any], budget: float | None, trials: int | None, resume: bool
) -> Session:
    """A new session, or the latest one about the same tasks, with limits for what is left."""
    about = sha256("\0".join(sorted(task.key for task, _ in subject.tasks)).encode()).hexdigest()
    if not resume:
        limits = {"budget": BUDGET if budget is None and trials is None else budget, "trials": trials}
        session = Session(about, {**options, **limits}, time.time())
        entries.begin(session)
        return session
    earlier = [s for s in entries.sessions() if s.subject == about]
    if not earlier:
        raise InputError(f"there is nothing to resume in {entries.path}", why="this was not tuned there with these options")
    session = earlier[-1]
    left = {name: session.options.get(name) for name in ("budget", "trials")}
    if budget is not None:
        left["budget"] = session.spent + budget
    if trials is not None:
        left["trials"] = session.trials + trials
    session.options = {**session.options, **left}
    spent = {"budget": session.spent, "trials": session.trials}
    over = [name for name, limit in left.items() if limit is not None and spent[name] >= limit]
    if over and session.state == "finished":
        raise InputError(f"nothing is left of the {over[0]} of {left[over[0]]:g}", hint=f"give a further {over[0]}")
    session.state = "running"
    return session


class _Clock:
    """Seconds by what they were spent on; what is inside of another phase counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since, self._phase = time.monotonic(), "overhead"

    def _switch(self, phase: str) -> str:
        now, before = time.monotonic(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._since, self._phase = now, phase
        return before

    @contextmanager
    def spent(self, phase: str) -> Iterator[None]:
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def stop(self) -> dict[str, float]:
        self._switch(self._phase)
        return self.seconds


# ---------------------------------------------------------------- one kernel


@dataclass(eq=False)
class _Kernel:
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

    @property
    def incumbent(self) -> Decisions:
        return decode(self.best.decisions) if self.best is not None else {}

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


class _Watch:
    """Calls `end` once it is later than `when()` says, from a thread: whatever is waited for then. `over` says whether that happened."""

    def __init__(self, when: Callable[[], float], end: Callable[[], None]) -> None:
        self._when, self._end, self._stop, self.over = when, end, threading.Event(), False
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            if time.monotonic() > self._when():
                self.over = True
                self._end()
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# ---------------------------------------------------------------- the loop


class _Tuning:
    def __init__(
        self,
        subject: Subject,
        entries: Database,
        session: Session,
        start: float,
        clock: _Clock,
        tell: Callable[[Status], None],
        rng: Random,
    ) -> None:
        self._subject, self._entries, self._session, self._clock, self._tell, self._rng = subject, entries, session, clock, tell, rng
        self._machine = environment(Target.parse(subject.tasks[0][0].target)) if subject.tasks else {}
        budget, self._limit = session.options["budget"], session.options["trials"]
        self._start, self._earlier = start, session.spent
        self._budget = inf if budget is None else max(0.0, budget - session.spent)
        self._deadline = start + self._budget
        total = BUDGET if budget is None else budget
        self._contest = min(max(_CONTEST * total, _CONTESTS[0]), _CONTESTS[1])
        self._compiled = time.monotonic() - start
        self._building = [0.0, 0]  # seconds, and candidates built in these
        self._judging = 1.0  # seconds of a contest beyond those of its runs, for processes to start and models to load
        self._phase = "compile"
        self._errors: list[float] = []
        self._kernels: list[_Kernel] = []
        self._current: _Kernel | None = None
        self._ahead: tuple[_Kernel, Future[_Proposals]] | None = None  # a kernel that is searched for while another one is measured
        self._searching = Random(rng.random())  # of the search alone
        self._propose = Search(Target.parse(subject.tasks[0][0].target))

    # ------------------------------------------------------------ the run

    def run(self, workers: int | None, cluster: str | None) -> Result:
        interrupted = False
        try:
            self._survey()
            self._search(workers, cluster)
        except KeyboardInterrupt:
            interrupted = True
        self._phase = "confirm"
        confirmation = Confirmation()
        try:
            with self._clock.spent("confirm"):
                confirmation = self._confirm()
        except KeyboardInterrupt:
            interrupted = True
        confirmation.notes += dict.fromkeys(k.status.stopped for k in self._kernels if k.status.stopped.startswith(_UNMEASURED))
        self._session.state = "interrupted" if interrupted else "finished"
        self._enter_session(confirmation)
        self._phase = "done"
        self._show()
        program = self._subject.task if isinstance(self._subject, Single) else None
        statuses = [k.status for k in self._kernels]
        return Result(str(self._entries.path), statuses, confirmation, self._clock.stop(), self._session.trials, interrupted, program)

    def _survey(self) -> None:
        """What is known of the kernels: bounds, earlier records, and their shares of the untuned model's time."""
        with self._clock.spent("measure"):
            core = _core(self._subject)
        for task, calls in self._subject.tasks:
            status = TaskStatus(task, title(task), calls, calls * bound(task, core))
            kernel = _Kernel(status, task, [])
            for record in self._entries.records(task.key):
                kernel.learn(record)
            kernel.earlier = len(kernel.records)
            self._kernels.append(kernel)
        self._show()
        with self._clock.spent("measure"):
            begin = time.monotonic()
            shares = self._subject.shares(self._contest / 2)
        self._judging = max(self._judging, time.monotonic() - begin - self._contest / 2)
        for kernel in self._kernels:
            if kernel.task.key in shares:
                kernel.status.before, kernel.known = shares[kernel.task.key], True
            elif kernel.base is None:
                kernel.status.before = kernel.status.bound  # until more is known

    def _search(self, workers: int | None, cluster: str | None) -> None:
        self._phase = "search"
        with (
            self._measurer(workers, cluster) as measurer,
            _Watch(lambda: self._end + _GRACE, measurer.close) as watch,
            ThreadPoolExecutor(1) as ahead,
        ):
            try:
                while (kernel := self._next()) is not None:
                    self._batch(kernel, measurer, ahead)
            except (TcompError, OSError, RuntimeError):
                if not watch.over:
                    raise

    def _measurer(self, workers: int | None, cluster: str | None) -> Measurer:
        running = min(20.0, max(3.0, self._budget / 10))
        limits = Limits(building=min(60.0, max(10.0, self._budget / 4)), running=running)
        if cluster is None:
            return Measurer(workers, limits)
        from tcomp.autotune.cluster import ClusterMeasurer  # needs an optional package

        return ClusterMeasurer(cluster, workers, limits)

    @property
    def _end(self) -> float:
        """When the search is to end, so that the winners can be compiled and confirmed."""
        if self._budget == inf:
            return inf
        winners = sum(k.status.gain < 1 for k in self._kernels)
        each = self._building[0] / self._building[1] if self._building[1] else 0.0
        return self._deadline - (winners + 1) * each - _CONTESTED * (self._contest + self._judging)

    def _next(self, current: _Kernel | None = None) -> _Kernel | None:
        """The kernel that gets the next batch, another one than the current; None when the search is over, or there is none."""
        if time.monotonic() >= self._end or (self._limit is not None and self._session.trials >= self._limit):
            return None
        for kernel in self._kernels:
            if not kernel.status.stopped and kernel.base is not None and kernel.status.share >= 1 - NEAR:
                kernel.status.stopped = "at its bound"
        able = [k for k in self._kernels if not k.status.stopped and k is not current]
        if not able:
            return None
        if current is None and self._ahead is not None and self._ahead[0] in able:
            return self._ahead[0]
        if self._rng.random() < _EXPLORE:
            return self._rng.choice(able)
        return max(able, key=lambda k: k.promise(self._usual))

    @property
    def _usual(self) -> float:
        """Seconds for a candidate, so far."""
        measured = sum(k.measured for k in self._kernels)
        return sum(k.seconds for k in self._kernels) / measured if measured else 1.0

    def _batch(self, kernel: _Kernel, measurer: Measurer, ahead: ThreadPoolExecutor) -> None:
        self._current = kernel
        self._show()
        start, before = time.monotonic(), len(kernel.records)
        predicted: _Proposals = {encode({}): None}
        if kernel.base is not None:
            with self._clock.spent("search"):
                predicted = self._proposed(kernel)
        if not predicted:
            kernel.status.stopped = "nothing new is found"
            return
        if isinstance(self._subject, Model):
            self._look_ahead(kernel if kernel.base is None else self._next(kernel), ahead)
        wanted = [decode(text) for text in predicted]
        for (text, guess), measurement in zip(predicted.items(), self._measured(kernel, measurer, wanted), strict=False):
            self._enter(kernel, text, guess, self._doubted(kernel, measurer, decode(text), measurement))
            if time.monotonic() >= self._end:
                break
        kernel.seconds += time.monotonic() - start
        kernel.measured += len(kernel.records) - before
        if kernel.base is None:
            kernel.status.stopped = f"{_UNMEASURED}: {kernel.records[-1].measurement.reason}"

    def _look_ahead(self, kernel: _Kernel | None, ahead: ThreadPoolExecutor) -> None:
        """Search for a kernel while this process would only wait for builders and measurements."""
        if self._ahead is not None or kernel is None or (kernel.base is None and kernel is not self._current):
            return
        size = self._size(kernel)
        if size > 0 and self._end - time.monotonic() > 2 * size * self._usual:  # else nothing would come of it
            self._ahead = kernel, ahead.submit(self._propose_for, kernel, list(kernel.telling), self._similar(kernel), size)

    def _size(self, kernel: _Kernel) -> int:
        """Trials of the next batch: enough to keep the builders busy, few enough to look again soon."""
        size = 2 * len(os.sched_getaffinity(0))
        if kernel.measured and self._budget < inf:
            each = kernel.seconds / kernel.measured
            size = max(4, min(16, round(_BATCH * (self._end - time.monotonic()) / each)))
        return size if self._limit is None else min(size, self._limit - self._session.trials)

    def _measured(self, kernel: _Kernel, measurer: Measurer, wanted: Sequence[Decisions]) -> Iterator[Measurement]:
        results = measurer.measure_each(kernel.task, wanted, kernel.incumbent)
        start = time.monotonic()
        with self._clock.spent("build"):  # all are built before the first is measured
            first = next(results)
        took = time.monotonic() - start
        if self._building[1] or isinstance(self._subject, Model):
            self._building[0] += took
            self._building[1] += len(wanted)
        else:
            self._judging = max(self._judging, took)  # processes were started: a contest of programs starts such, too
            self._building[1] = 1
        yield first
        while True:
            with self._clock.spent("measure"):
                found = next(results, None)
            if found is None:
                return
            yield found

    def _doubted(self, kernel: _Kernel, measurer: Measurer, decisions: Decisions, found: Measurement) -> Measurement:
        """What seems to beat the incumbent is measured again, and the worse of both counts: the best of many is a lucky one."""
        if found.status != "ok" or found.ratio >= 1 or kernel.best is None:
            return found
        with self._clock.spent("measure"):
            (again,) = measurer.measure(kernel.task, [decisions], kernel.incumbent)
        return again if again.ratio > found.ratio else found

    def _proposed(self, kernel: _Kernel) -> _Proposals:
        """New candidates, as text, with their predicted costs. What was looked for ahead is waited for in any case: one search at a time."""
        found: _Proposals = {}
        if self._ahead is not None:
            (searched, future), self._ahead = self._ahead, None
            found = future.result()
            if searched is not kernel:
                found = {}
        known = {r.decisions for r in kernel.records}
        if not found.keys() - known:
            found = self._propose_for(kernel, kernel.telling, self._similar(kernel), self._size(kernel))
        return {text: guess for text, guess in found.items() if text not in known}

    def _propose_for(self, kernel: _Kernel, records: Sequence[Record], similar: Sequence[Decisions], count: int) -> _Proposals:
        """Winners of similar kernels first. Runs in a thread, of which there is one at a time: all that is in it happens nowhere else then."""
        texts = dict.fromkeys(encode(d) for d in (*similar, *self._propose(kernel.task, records, count, self._searching)))
        return {text: self._propose.predicted(kernel.task, decode(text)) for text in list(texts)[:count] if text != encode({})}

    def _similar(self, kernel: _Kernel) -> list[Decisions]:
        """Winners of kernels of the same structure, those of the nearest sizes first, for a kernel that has no trials yet."""
        if kernel.status.trials:
            return []

        def distance(other: Task) -> float:
            pairs = zip(kernel.task.sizes, other.sizes, strict=True)
            return sum(abs(log((a + 1) / (b + 1))) for a, b in pairs)

        tasks = [
            t for t in self._entries.near(kernel.task.structure) if t.key != kernel.task.key and len(t.sizes) == len(kernel.task.sizes)
        ]
        winners = [self._entries.choice(t.key) for t in sorted(tasks, key=distance)[:_WARM]]
        return [made for text in winners if text is not None and (made := _fitting(kernel.task, decode(text)))]

    # ------------------------------------------------------------ what comes of it

    def _enter(self, kernel: _Kernel, decisions: str, predicted: float | None, measurement: Measurement) -> None:
        """One record, in the database and here."""
        cost = self._cost(kernel, measurement)
        if cost is not None and predicted is not None:
            self._errors = [*self._errors, abs(log(predicted / cost))][-_JUDGED:]
        record = Record(kernel.task, decisions, "", measurement, cost, predicted, self._machine, time.time())
        kernel.learn(record)
        self._session.trials += decisions != encode({})
        self._session.spent = self._earlier + time.monotonic() - self._start
        self._entries.add(record, self._session)
        self._show()

    def _cost(self, kernel: _Kernel, measurement: Measurement) -> float | None:
        """Seconds on the scale of the first measurement: the machine may be busier or faster since, for the incumbent as well."""
        if measurement.status != "ok":
            return None
        if kernel.best is None or kernel.best.cost is None:
            return measurement.least
        return measurement.ratio * kernel.best.cost

    def _confirm(self) -> Confirmation:
        wanted: dict[str, Decisions] = {}
        for kernel in self._kernels:
            best = self._entries.best(kernel.task.key)
            if (
                kernel.base is not None
                and best is not None
                and best.decisions != encode({})
                and (best.cost or inf) < (kernel.base.cost or 0.0)
            ):
                wanted[kernel.task.key] = decode(best.decisions)
                self._entries.describe(best, realise(kernel.task, wanted[kernel.task.key]).schedule.trace.to_json())
        self._show()
        found = confirm(self._subject, wanted, self._contest, self._deadline, lambda contests: self._show())
        when = time.time()
        for kernel in self._kernels:
            key = kernel.task.key
            if key in wanted:
                gain = found.kernels.get(key)
                times = (gain.before, gain.after) if gain is not None else (0.0, 0.0)
                self._entries.add(Verdict(kernel.task, encode(wanted[key]), key in found.kept, *times, self._machine, when))
        return found

    def _enter_session(self, confirmation: Confirmation) -> None:
        self._session.spent = self._earlier + time.monotonic() - self._start
        c = confirmation
        self._session.summary = {
            "before": c.before, "after": c.after, "ratio": c.ratio, "contests": c.contests, "kept": sorted(c.kept), "notes": c.notes,
            "rolled_back": sorted(c.rolled_back), "kernels": {key: [g.before, g.after] for key, g in c.kernels.items()},
            "seconds": self._clock.stop(),
        }  # fmt: skip
        self._entries.update(self._session)

    def _show(self) -> None:
        error = sum(self._errors) / len(self._errors) if self._errors else None
        budget = self._budget if self._budget < inf else 0.0
        current = self._current.status if self._current is not None else None
        statuses = [k.status for k in self._kernels]
        elapsed = time.monotonic() - self._start
        self._tell(Status(self._phase, elapsed, budget, self._session.trials, self._limit, statuses, current, error))


def _fitting(task: Task, decisions: Decisions) -> Decisions:
    """Those decisions that a task asks for, if it can follow them; else {}."""
    try:
        return realise(task, decisions).decisions
    except TcompError:
        return {}


def _core(subject: Subject) -> Core | None:
    """The measured rates of this machine, if it is the one that is tuned for."""
    from tcomp.machine import measured

    return measured() if subject.tasks and subject.tasks[0][0].target == str(Target.host()) else None
