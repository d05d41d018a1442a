"""The tuner: which kernel gets the next trials, until time is up; then the winners must win in the whole model.

    result = tcomp.tune("model.onnx", budget=60, database="tune.db")
    module = tcomp.compile("model.onnx", database="tune.db")

Everything counts towards the budget, compiling and confirming included. Every candidate is entered in the database as soon as it is
measured; whatever ends the run, the best so far is what a compilation finds there, and `resume` goes on with what is left of the budget.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import inf, log
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tcomp.autotune.budget import Clock, Watch
from tcomp.autotune.confirm import Confirmation, Gain, confirm
from tcomp.autotune.database.lookup import counted
from tcomp.autotune.database.store import Database, Record, Session, Verdict, environment
from tcomp.autotune.features import Made
from tcomp.autotune.measurement.ab_comparison import Rounds
from tcomp.autotune.measurement.measurer import ERROR, REFUSED, STATUSES, Limits, Measurement, Measurer, check_device
from tcomp.autotune.progress import Result, Status, TaskStatus
from tcomp.autotune.search import Search
from tcomp.autotune.space import realise
from tcomp.autotune.subject import Model, Single, Subject, bound, title
from tcomp.autotune.task_scheduler import Effort
from tcomp.autotune.tasks import ScheduleFunction, Task
from tcomp.errors import InputError, TcompError
from tcomp.ir.loops import Kernel
from tcomp.ir.te import Tensor
from tcomp.machines import Core
from tcomp.schedules.knobs import Decisions, decode, encode
from tcomp.schedules.schedule import Program as Source
from tcomp.target import Target

if TYPE_CHECKING:
    import onnx

BUDGET = 60.0  # seconds, if nothing is said
NEAR = 0.05  # a kernel is done when it is within this share of its bound
_EXPLORE = 0.05  # how often a kernel is drawn at random
_BATCH = 0.1  # the share of the time left that one batch may take
_WARM = 3  # winners of similar kernels that are tried first
_CONTEST = 0.05  # the share of the budget for one contest of whole models, within _CONTESTS seconds
_CONTESTS = 1.0, 15.0
_ALGORITHMS = 0.2  # the share of the budget that is left after compiling, and of the trials, for contests of algorithms
_FINALISTS, _FINALS = 4, 0.25  # candidates of a kernel that run in the model, and the share of the budget for that, at most
_AGAIN = 0.5  # contests beyond those of the finalists for which there is to be time
_UNMEASURED = "not tuned"
_JUDGED = 64  # the latest predictions, of which the error of the model is told
_GRACE = 1.0  # seconds after which a candidate that is being measured when time is up is not waited for
_DEFAULT = encode({})

_Proposals = dict[str, float | None]  # decisions as text, and the costs that the model expects


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
    direct: bool = False,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    seed: int = 0,
) -> Result:
    """Find faster schedules for the kernels of an ONNX model, or for a program of one's own, and enter them in a database.

    `model` is what `tcomp.compile` takes, or what `tcomp.Schedule` takes; then `schedule(s, knobs)` may be a space of one's own.
    `budget` are seconds in all (60 if `trials` is not given either), `trials` the number of candidates. `target`, `threads`, `shapes`,
    `dims`, `values` and `direct` are those of `tcomp.compile`, to which the same are to be given (for CUDA, `threads` means nothing);
    `sizes` are those at which symbolic dims that stay open are measured. `workers` is the number of building processes, `cluster` the address of a Dask scheduler whose workers measure.
    `resume` goes on with an earlier call for the same model, with what is left of its budget unless another one is given.

    Ctrl-C ends the search, not the confirmation; a second one ends all. What was measured is in the database in any case.

    Raises `TcompError` as `tcomp.compile`; `DeviceError` for a CUDA target without a GPU of its architectures; `DatabaseError` for a database
    that cannot be used; `InputError` if there is nothing to resume.
    """
    start = time.monotonic()
    machine = target if isinstance(target, Target) else Target.parse(target or "cpu")
    for name, number in (("budget", budget), ("trials", trials), ("workers", workers), ("threads", threads)):
        if number is not None and not 0 < number < 1e9:
            raise InputError(f"{name} is to be positive, not {number}")
    if machine.kind == "cuda" and cluster is None:
        check_device(machine)
    count = counted(machine, threads)
    options: dict[str, Any] = {
        "model": os.path.abspath(model) if isinstance(model, str | os.PathLike) else None, "target": str(machine), "threads": threads, "workers": workers,
        "cluster": cluster, "shapes": _plain(shapes), "dims": _plain(dims), "values": _plain(values), "sizes": _plain(sizes), "seed": seed, "direct": direct,
    }  # fmt: skip
    clock = Clock()
    with Database(database) as entries:
        with clock.spent("compile"):
            subject: Subject
            if isinstance(model, Kernel | Tensor) or (isinstance(model, Sequence) and not isinstance(model, str | bytes)):
                subject = Single(model, machine, count, sizes, schedule)
            elif schedule is not None:
                raise InputError("a schedule function is for a program of one's own", hint="tcomp.tune([A, B, C], schedule=f)")
            else:
                subject = Model(model, machine, count, shapes, dims, values, sizes, seed, direct)
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


# ---------------------------------------------------------------- the loop


class _Tuning:
    def __init__(
        self,
        subject: Subject,
        entries: Database,
        session: Session,
        start: float,
        clock: Clock,
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
        self._notes: list[str] = []
        self._kernels: list[Effort] = []
        self._current: Effort | None = None
        self._choices: list[TaskStatus] = []  # of algorithms
        self._algorithms: dict[str, Decisions] = {}

    # ------------------------------------------------------------ the run

    def run(self, workers: int | None, cluster: str | None) -> Result:
        interrupted = False
        try:
            self._choose_algorithms()
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
        confirmation.notes += self._notes
        confirmation.notes += dict.fromkeys(k.status.stopped for k in self._kernels if k.status.stopped.startswith(_UNMEASURED))
        self._session.state = "interrupted" if interrupted else "finished"
        self._enter_session(confirmation)
        self._phase = "done"
        self._show()
        program = self._subject.task if isinstance(self._subject, Single) else None
        statuses = [*self._choices, *(k.status for k in self._kernels)]
        return Result(str(self._entries.path), statuses, confirmation, self._clock.stop(), self._session.trials, interrupted, program)

    def _choose_algorithms(self) -> None:
        """Alternatives to the algorithms that the model takes, each in a contest of whole models; the kernels to come are those of the model
        with the winners."""
        longest, limit, end = 0.0, inf, self._start + self._compiled + _ALGORITHMS * (self._budget - self._compiled)
        if self._limit is not None:
            limit = self._session.trials + _ALGORITHMS * (self._limit - self._session.trials)
        for task, decisions in self._subject.algorithms:
            status = next((s for s in self._choices if s.task == task), None) or TaskStatus(task, title(task), 1, 0.0)
            record = next((r for r in self._entries.records(task.key) if r.decisions == encode(decisions)), None)
            begin = time.monotonic()
            if record is None and begin + longest < end and self._session.trials < limit:
                self._phase = "algorithms"
                self._show()
                with self._clock.spent("measure"):
                    record = self._tried(status, encode(decisions))
                longest = max(longest, time.monotonic() - begin)
            if record is not None:
                self._judge(status, record)
        self._subject.settle(self._algorithms)

    def _tried(self, status: TaskStatus, decisions: str) -> Record:
        """The record of an alternative. The cost of what the model takes untuned is the time of all kernels that differ."""
        contest = self._subject.contest({status.task.key: decode(decisions)}, self._contest / 2)
        rounds, base = contest.kernels.get(status.task.key, Rounds()), self._entries.best(status.task.key)
        if rounds.before and base is None:
            base = self._record(status.task, _DEFAULT, Measurement("ok", rounds.before), min(rounds.before))
        if base is None or not rounds.before:
            reason = contest.reason or "no kernel differs"
            found = next((s for s in STATUSES if reason.startswith(f"{s}:")), ERROR)
            return self._record(status.task, decisions, Measurement(found, (), reason), None)
        measured = Measurement("ok", rounds.after, "", rounds.before)
        return self._record(status.task, decisions, measured, rounds.ratio * (base.cost or 0.0))

    def _record(self, task: Task, decisions: str, measurement: Measurement, cost: float | None, predicted: float | None = None) -> Record:
        """Enter it, with what is spent by now."""
        record = Record(task, decisions, "", measurement, cost, predicted, self._machine, time.time())
        self._session.trials += decisions != _DEFAULT
        self._session.spent = self._earlier + time.monotonic() - self._start
        self._entries.add(record, self._session)
        return record

    def _judge(self, status: TaskStatus, record: Record) -> None:
        """Take an alternative if it is the best so far, and was not rolled back before."""
        if status not in self._choices:
            self._choices.append(status)
        status.trials, status.failed = status.trials + 1, status.failed + (not record.ok)
        rounds = Rounds(record.measurement.incumbent, record.measurement.seconds)
        lost = any(v.decisions == record.decisions and not v.kept for v in self._entries.verdicts(record.task.key))
        if record.ok and rounds.before and rounds.won and rounds.ratio < status.gain and not lost:
            status.before, status.gain = min(rounds.before), rounds.ratio
            self._algorithms[record.task.key] = decode(record.decisions)

    def _survey(self) -> None:
        """What is known of the kernels: bounds, earlier records, and their shares of the untuned model's time."""
        with self._clock.spent("measure"):
            core = _core(self._subject)
        for task, calls in self._subject.tasks:
            status = TaskStatus(task, title(task), calls, calls * bound(task, core))
            kernel = Effort(status, task, [])
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
        with self._measurer(workers, cluster) as measurer, Watch(lambda: self._end + _GRACE, measurer.close) as watch:
            try:
                search = Search(
                    Target.parse(self._subject.tasks[0][0].target), make=lambda task, wanted: self._made(measurer, task, wanted)
                )
                while (kernel := self._next()) is not None:
                    self._batch(kernel, measurer, search)
            except (TcompError, OSError, RuntimeError):
                if not watch.over:
                    raise

    def _measurer(self, workers: int | None, cluster: str | None) -> Measurer:
        running = min(20.0, max(3.0, self._budget / 10))
        limits = Limits(building=min(60.0, max(10.0, self._budget / 4)), running=running)
        if cluster is None:
            return Measurer(workers, limits)
        from tcomp.autotune.measurement.cluster import ClusterMeasurer  # needs an optional package

        return ClusterMeasurer(cluster, workers, limits)

    @property
    def _end(self) -> float:
        """When the search is to end, so that the winners can be compiled and confirmed."""
        if self._budget == inf:
            return inf
        return self._deadline - (self._finalists + _AGAIN) * self._contesting

    @property
    def _contesting(self) -> float:
        """Seconds for a contest, with building the winners."""
        winners = sum(k.status.gain < 1 for k in self._kernels)
        each = self._building[0] / self._building[1] if self._building[1] else 0.0
        return (winners + 1) * each + self._contest + self._judging

    @property
    def _finalists(self) -> int:
        """Candidates of a kernel that run in the model, at most."""
        return _FINALISTS if self._budget == inf else max(1, min(_FINALISTS, int(_FINALS * self._budget / self._contesting - _AGAIN)))

    def _next(self) -> Effort | None:
        """The kernel that gets the next batch; None when the search is over, or there is none."""
        if time.monotonic() >= self._end or (self._limit is not None and self._session.trials >= self._limit):
            return None
        for kernel in self._kernels:
            if not kernel.status.stopped and kernel.base is not None and kernel.status.share >= 1 - NEAR:
                kernel.status.stopped = "at its bound"
        able = [k for k in self._kernels if not k.status.stopped]
        if not able:
            return None
        if self._rng.random() < _EXPLORE:
            return self._rng.choice(able)
        return max(able, key=lambda k: k.promise(self._usual))

    @property
    def _usual(self) -> float:
        """Seconds for a candidate, so far."""
        measured = sum(k.measured for k in self._kernels)
        return sum(k.seconds for k in self._kernels) / measured if measured else 1.0

    def _batch(self, kernel: Effort, measurer: Measurer, search: Search) -> None:
        self._current = kernel
        self._show()
        start, before = time.monotonic(), len(kernel.records)
        predicted: _Proposals = {_DEFAULT: None} if kernel.base is None else {}
        with self._clock.spent("search"):
            predicted |= self._proposed(kernel, search)
        if not predicted:
            kernel.status.stopped = "nothing new is found"
            return
        wanted, incumbent = [decode(text) for text in predicted], kernel.best  # at the start: all of the batch is measured beside it
        for (text, guess), measurement in zip(predicted.items(), self._measured(kernel, measurer, wanted, incumbent), strict=False):
            measurement = self._doubted(kernel, measurer, decode(text), measurement, incumbent)
            self._enter(kernel, text, guess, measurement, incumbent or kernel.base)
            if time.monotonic() >= self._end or kernel.base is None:
                break
        kernel.seconds += time.monotonic() - start
        kernel.measured += len(kernel.records) - before
        if kernel.base is None:
            kernel.status.stopped = f"{_UNMEASURED}: {kernel.records[-1].measurement.reason}"

    def _made(self, measurer: Measurer, task: Task, wanted: Sequence[Decisions]) -> list[Made | None]:
        """The loops of candidates; what fails at that otherwise than by a refusal is a record."""
        with self._clock.spent("build"):
            found = measurer.make(task, wanted)
        kernel = next(k for k in self._kernels if k.task is task)
        for decisions, made in zip(wanted, found, strict=True):
            if isinstance(made, Measurement) and made.status != REFUSED and kernel.base is not None:
                self._enter(kernel, encode(decisions), None, made, None)
        return [made if isinstance(made, Made) else None for made in found]

    def _size(self, kernel: Effort) -> int:
        """Trials of the next batch: enough to keep the builders busy, few enough to look again soon."""
        size = 2 * len(os.sched_getaffinity(0))
        if kernel.measured and self._budget < inf:
            each = kernel.seconds / kernel.measured
            size = max(4, min(16, round(_BATCH * (self._end - time.monotonic()) / each)))
        return size if self._limit is None else min(size, self._limit - self._session.trials)

    def _measured(self, kernel: Effort, measurer: Measurer, wanted: Sequence[Decisions], incumbent: Record | None) -> Iterator[Measurement]:
        results = measurer.measure_each(kernel.task, wanted, _decisions(incumbent))
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

    def _doubted(
        self, kernel: Effort, measurer: Measurer, decisions: Decisions, found: Measurement, incumbent: Record | None
    ) -> Measurement:
        """What seems to be the best is measured again, and the worse of both counts: the best of many is a lucky one."""
        best, beside = kernel.best, incumbent or kernel.base
        if found.status != "ok" or best is None or beside is None or found.ratio * (beside.cost or inf) >= (best.cost or inf):
            return found
        with self._clock.spent("measure"):
            (again,) = measurer.measure(kernel.task, [decisions], _decisions(incumbent))
        return again if again.ratio > found.ratio else found

    def _proposed(self, kernel: Effort, search: Search) -> _Proposals:
        """New candidates, as text, with their predicted costs; winners of similar kernels are among the first ones."""
        count, known = self._size(kernel), {_DEFAULT, *(r.decisions for r in kernel.records)}
        similar = self._similar(kernel) if not kernel.status.trials else []
        found = search(kernel.task, kernel.telling, count, self._rng, similar)
        return {text: search.predicted(kernel.task, d) for d in found if (text := encode(d)) not in known}

    def _similar(self, kernel: Effort) -> list[Decisions]:
        """Winners of kernels of the same structure, those of the nearest sizes first."""

        def distance(other: Task) -> float:
            pairs = zip(kernel.task.sizes, other.sizes, strict=True)
            return sum(abs(log((a + 1) / (b + 1))) for a, b in pairs)

        tasks = [
            t for t in self._entries.near(kernel.task.structure) if t.key != kernel.task.key and len(t.sizes) == len(kernel.task.sizes)
        ]
        winners = [self._entries.choice(t.key) for t in sorted(tasks, key=distance)[:_WARM]]
        return [decode(text) for text in winners if text is not None]

    # ------------------------------------------------------------ what comes of it

    def _enter(self, kernel: Effort, decisions: str, predicted: float | None, measurement: Measurement, incumbent: Record | None) -> None:
        """One record, in the database and here. `incumbent` is what the candidate was measured beside: as the machine may be busier or
        faster since, its cost is on the scale of that one's; None for the first."""
        cost = None
        if measurement.status == "ok":
            cost = measurement.least if incumbent is None else measurement.ratio * (incumbent.cost or inf)
        if cost is not None and predicted is not None:
            self._errors = [*self._errors, abs(log(predicted / cost))][-_JUDGED:]
        kernel.learn(self._record(kernel.task, decisions, measurement, cost, predicted))
        self._show()

    def _confirm(self) -> Confirmation:
        candidates = {key: [decisions] for key, decisions in self._algorithms.items()}
        for kernel in self._kernels:
            base = inf if kernel.base is None else kernel.base.cost or inf
            better = [r for r in self._entries.ranked(kernel.task.key) if r.decisions != _DEFAULT and (r.cost or inf) < base < inf]
            if better:
                candidates[kernel.task.key] = [decode(r.decisions) for r in better[: self._finalists]]
        self._show()
        found = confirm(self._subject, candidates, self._contest, self._deadline, lambda contests: self._show())
        when = time.time()
        for task in (status.task for status in (*self._choices, *(k.status for k in self._kernels))):
            gain, kept = found.kernels.get(task.key, Gain(0.0, 0.0)), found.kept.get(task.key)
            for decisions in sorted(found.tried.get(task.key, ()), key=lambda d: d == kept):  # what holds is said last
                self._entries.add(Verdict(task, encode(decisions), decisions == kept, gain.before, gain.after, self._machine, when))
        for kernel in self._kernels:
            if kernel.task.key in found.kept:
                record = next(r for r in self._entries.ranked(kernel.task.key) if decode(r.decisions) == found.kept[kernel.task.key])
                self._entries.describe(record, realise(kernel.task, found.kept[kernel.task.key]).schedule.trace.to_json())
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


def _decisions(record: Record | None) -> Decisions:
    return {} if record is None else decode(record.decisions)


def _core(subject: Subject) -> Core | None:
    """The measured rates of this machine, if it is the one that is tuned for."""
    from tcomp.machine import measured

    return measured() if subject.tasks and subject.tasks[0][0].target == str(Target.host()) else None
