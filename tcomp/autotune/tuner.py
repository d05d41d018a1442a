"""The tuner: it gives trials to the kernels that promise most, until time is up; then the winners must win in the whole model.

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

from tcomp.autotune.budget import PhaseClock, Watchdog
from tcomp.autotune.confirm import Confirmation, Gain, confirm
from tcomp.autotune.database.records import Judgement, Record, Session, SessionState, Verdict, environment
from tcomp.autotune.database.store import Database
from tcomp.autotune.features import CandidateSummary
from tcomp.autotune.measurement.measurer import Measurer
from tcomp.autotune.measurement.results import Limits, Measurement, Outcome, Rounds
from tcomp.autotune.progress import Result, Status, StopReason, TaskStatus
from tcomp.autotune.search import Search
from tcomp.autotune.space import instantiate
from tcomp.autotune.subject import ModelSubject, ProgramSubject, TuningSubject, roofline_seconds, title
from tcomp.autotune.task_scheduler import TaskState, next_task
from tcomp.autotune.tasks import ScheduleFunction, Task
from tcomp.backends import backend_of
from tcomp.calibration import measured
from tcomp.errors import InputError, TcompError
from tcomp.ir.loops import Kernel
from tcomp.ir.te import Tensor
from tcomp.options import CompileOptions
from tcomp.schedules.knobs import Decisions, decode, encode
from tcomp.schedules.schedule import Program as Source
from tcomp.target import Target

if TYPE_CHECKING:
    import onnx

BUDGET = 60.0  # seconds, if neither a budget nor a number of trials is given
_BATCH = 0.1  # the share of the time left that one batch may take
_SIMILAR = 3  # winners of similar kernels that are tried first
_COMPARISON = 0.05  # the share of the budget for one comparison of whole models, within _COMPARISON_SECONDS
_COMPARISON_SECONDS = 1.0, 15.0
_ALGORITHMS = 0.2  # the share of the budget that is left after compiling, and of the trials, for comparisons of algorithms
_FINALISTS, _FINALS = 4, 0.25  # candidates of a kernel that run in the model, and the share of the budget for that, at most
_EXTRA_COMPARISONS = 0.5  # beyond those of the finalists, for which there has to be time
_RECENT_ERRORS = 64  # the latest predictions, from which the error of the cost model is computed
_GRACE = 1.0  # seconds after which a candidate that is being measured when time is up is not waited for
_DEFAULT = encode({})

_Proposals = dict[str, float | None]  # decisions as text, and the costs that the cost model expects


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
    """Find faster schedules for the kernels of an ONNX model, or for a user's own program, and enter them in a database.

    `model` is what `tcomp.compile` takes, or what `tcomp.Schedule` takes; then `schedule(s, knobs)` may be a search space of the user's own.
    `budget` is the total time in seconds (60 if `trials` is not given either), `trials` the number of candidates. `target`, `threads`,
    `shapes`, `dims`, `values` and `direct` are those of `tcomp.compile`, which has to be given the same ones (for CUDA, `threads` has no
    effect); `sizes` are those at which symbolic dims that stay open are measured. `workers` is the number of building processes, `cluster`
    the address of a Dask scheduler whose workers measure. `resume` goes on with an earlier call for the same model, with what is left of its
    budget unless another one is given.

    Ctrl-C ends the search, not the confirmation; a second one ends that too. What was measured is in the database in any case.

    Raises `TcompError` as `tcomp.compile`; `DeviceError` for a CUDA target without a GPU of its architectures; `DatabaseError` for a database
    that cannot be used; `InputError` if there is nothing to resume.
    """
    start = time.monotonic()
    backend = backend_of(target)
    for name, number in (("budget", budget), ("trials", trials), ("workers", workers), ("threads", threads)):
        if number is not None and not 0 < number < 1e9:
            raise InputError(f"{name} is to be positive, not {number}")
    if cluster is None:
        backend.check_device()
    options: dict[str, Any] = {
        "model": os.path.abspath(model) if isinstance(model, str | os.PathLike) else None, "target": str(backend.target), "threads": threads, "workers": workers,
        "cluster": cluster, "shapes": _plain(shapes), "dims": _plain(dims), "values": _plain(values), "sizes": _plain(sizes), "seed": seed, "direct": direct,
    }  # fmt: skip
    clock = PhaseClock()
    with Database(database) as entries:
        with clock.phase("compile"):
            subject: TuningSubject
            if isinstance(model, Kernel | Tensor) or (isinstance(model, Sequence) and not isinstance(model, str | bytes)):
                subject = ProgramSubject(model, backend.target, backend.threads(threads), sizes, schedule)
            elif schedule is not None:
                raise InputError("a schedule function is for a program, not for a model", hint="tcomp.tune([A, B, C], schedule=f)")
            else:
                subject = ModelSubject(model, CompileOptions(backend, shapes, dims, threads, values, direct), sizes, seed)
        session = _session(entries, subject, options, budget, trials, resume)
        run = _TuningRun(subject, entries, session, start, clock, progress or (lambda status: None), Random(f"{seed} {session.trials}"))
        return run.run(workers, cluster)


def _plain(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """As JSON."""
    return None if given is None else {str(name): np.asarray(v).tolist() for name, v in given.items()}


def _session(
    entries: Database, subject: TuningSubject, options: dict[str, Any], budget: float | None, trials: int | None, resume: bool
) -> Session:
    """A new session, or the latest one about the same tasks, with limits for what is left."""
    digest = sha256("\0".join(sorted(task.key for task, _ in subject.tasks)).encode()).hexdigest()
    if not resume:
        limits = {"budget": BUDGET if budget is None and trials is None else budget, "trials": trials}
        session = Session(digest, {**options, **limits}, time.time())
        entries.begin(session)
        return session
    earlier = [s for s in entries.sessions() if s.subject == digest]
    if not earlier:
        raise InputError(f"there is nothing to resume in {entries.path}", why="this was not tuned there with these options")
    session = earlier[-1]
    spent: dict[str, float] = {"budget": session.spent, "trials": session.trials}
    limits = {name: session.options.get(name) for name in spent}
    limits |= {name: spent[name] + more for name, more in (("budget", budget), ("trials", trials)) if more is not None}
    session.options = {**session.options, **limits}
    over = [name for name, limit in limits.items() if limit is not None and spent[name] >= limit]
    if over and session.state is SessionState.FINISHED:
        raise InputError(f"nothing is left of the {over[0]} of {limits[over[0]]:g}", hint=f"give a further {over[0]}")
    session.state = SessionState.RUNNING
    return session


# ---------------------------------------------------------------- the loop


class _TuningRun:
    def __init__(
        self,
        subject: TuningSubject,
        entries: Database,
        session: Session,
        start: float,
        clock: PhaseClock,
        tell: Callable[[Status], None],
        rng: Random,
    ) -> None:
        self._subject, self._entries, self._session, self._clock, self._tell, self._rng = subject, entries, session, clock, tell, rng
        self._target = Target.parse(str(session.options["target"]))
        self._environment = environment(self._target)
        budget, self._limit = session.options["budget"], session.options["trials"]
        self._start, self._earlier = start, session.spent
        self._budget = inf if budget is None else max(0.0, budget - session.spent)
        least, most = _COMPARISON_SECONDS
        self._comparison = min(max(_COMPARISON * (BUDGET if budget is None else budget), least), most)
        self._compiled = time.monotonic() - start
        self._building = [0.0, 0]  # seconds, and candidates that were built in them
        self._loading = 1.0  # seconds of a comparison beyond those of its runs, for processes to start and models to load
        self._phase = "compile"
        self._errors: list[float] = []
        self._kernels: list[TaskState] = []
        self._current: TaskState | None = None
        self._choices: list[TaskStatus] = []  # of algorithms
        self._algorithms: dict[str, Decisions] = {}

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
            with self._clock.phase("confirm"):
                confirmation = self._confirm()
        except KeyboardInterrupt:
            interrupted = True
        confirmation.notes += dict.fromkeys(k.stopped for k in self._kernels if k.stop is StopReason.NOT_MEASURED)
        self._session.state = SessionState.INTERRUPTED if interrupted else SessionState.FINISHED
        self._enter_session(confirmation)
        self._phase = "done"
        self._show()
        program = self._subject.task if isinstance(self._subject, ProgramSubject) else None
        statuses = [*self._choices, *self._kernels]
        return Result(str(self._entries.path), statuses, confirmation, self._clock.stop(), self._session.trials, interrupted, program)

    # ------------------------------------------------------------ algorithms

    def _choose_algorithms(self) -> None:
        """Try alternatives to the algorithms that the model takes, each in a comparison of whole models. The kernels that are tuned then are
        those of the model with the winners."""
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
                with self._clock.phase("measure"):
                    record = self._try_algorithm(task, encode(decisions))
                longest = max(longest, time.monotonic() - begin)
            if record is not None:
                self._judge_algorithm(status, record)
        self._subject.choose_algorithms(self._algorithms)

    def _try_algorithm(self, task: Task, decisions: str) -> Record:
        """The record of an alternative. The cost of what the untuned model takes is the time of all kernels that differ."""
        comparison = self._subject.compare({task.key: decode(decisions)}, self._comparison / 2)
        rounds, base = comparison.kernels.get(task.key, Rounds()), self._entries.best(task.key)
        if not rounds.before:
            failure = comparison.failure or Measurement(Outcome.ERROR, reason="no kernel differs")
            return self._record(task, decisions, failure, None)
        if base is None:
            base = self._record(task, _DEFAULT, Measurement(Outcome.OK, rounds.before), min(rounds.before))
        return self._record(task, decisions, Measurement(Outcome.OK, rounds.after, "", rounds.before), rounds.ratio * (base.cost or 0.0))

    def _judge_algorithm(self, status: TaskStatus, record: Record) -> None:
        """Take an alternative if it is the best so far, and was not rolled back before."""
        if status not in self._choices:
            self._choices.append(status)
        status.trials, status.failed = status.trials + 1, status.failed + (not record.ok)
        rounds = Rounds(record.measurement.incumbent, record.measurement.seconds)
        lost = any(v.decisions == record.decisions and not v.kept for v in self._entries.verdicts(record.task.key))
        if record.ok and rounds.before and rounds.won and rounds.ratio < status.gain and not lost:
            status.before, status.gain = min(rounds.before), rounds.ratio
            self._algorithms[record.task.key] = decode(record.decisions)

    # ------------------------------------------------------------ the search

    def _survey(self) -> None:
        """Collect what is known of the kernels: bounds, earlier records, and their shares of the untuned model's time."""
        with self._clock.phase("measure"):
            here = bool(self._subject.tasks) and self._target == Target.host()
            core = measured() if here else None  # the rates of this machine, if it is the one that is tuned for
        for task, calls in self._subject.tasks:
            kernel = TaskState(task, title(task), calls, calls * roofline_seconds(task, core))
            for record in self._entries.records(task.key):
                kernel.learn(record)
            kernel.earlier = len(kernel.records)
            self._kernels.append(kernel)
        self._show()
        with self._clock.phase("measure"):
            begin = time.monotonic()
            seconds = self._subject.seconds_by_task(self._comparison / 2)
        self._loading = max(self._loading, time.monotonic() - begin - self._comparison / 2)
        for kernel in self._kernels:
            if kernel.task.key in seconds:
                kernel.before, kernel.known = seconds[kernel.task.key], True
            elif kernel.base is None:
                kernel.before = kernel.bound  # until more is known

    def _search(self, workers: int | None, cluster: str | None) -> None:
        self._phase = "search"
        with self._measurer(workers, cluster) as measurer, Watchdog(lambda: self._end + _GRACE, measurer.close) as watchdog:
            try:
                search = Search(self._target, summarize=lambda task, wanted: self._summarized(measurer, task, wanted))
                while time.monotonic() < self._end and (self._limit is None or self._session.trials < self._limit):
                    if (kernel := next_task(self._kernels, self._rng)) is None:
                        break
                    self._batch(kernel, measurer, search)
            except (TcompError, OSError, RuntimeError):
                if not watchdog.expired:
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
        """When the search has to end, so that the winners can be compiled and confirmed."""
        return self._start + self._budget - (self._finalists + _EXTRA_COMPARISONS) * self._comparison_seconds

    @property
    def _comparison_seconds(self) -> float:
        """Seconds for a comparison, with building the winners."""
        winners = sum(k.gain < 1 for k in self._kernels)
        each = self._building[0] / self._building[1] if self._building[1] else 0.0
        return (winners + 1) * each + self._comparison + self._loading

    @property
    def _finalists(self) -> int:
        """Candidates of a kernel that run in the model, at most."""
        if self._budget == inf:
            return _FINALISTS
        return max(1, min(_FINALISTS, int(_FINALS * self._budget / self._comparison_seconds - _EXTRA_COMPARISONS)))

    def _batch(self, kernel: TaskState, measurer: Measurer, search: Search) -> None:
        self._current = kernel
        self._show()
        start, before = time.monotonic(), len(kernel.records)
        proposals: _Proposals = {_DEFAULT: None} if kernel.base is None else {}
        with self._clock.phase("search"):
            proposals |= self._proposed(kernel, search)
        if not proposals:
            kernel.stop = StopReason.EXHAUSTED
            return
        wanted, incumbent = [decode(text) for text in proposals], kernel.best  # at the start: the whole batch is measured beside it
        for (text, guess), measurement in zip(proposals.items(), self._measured(kernel, measurer, wanted, incumbent), strict=False):
            measurement = self._measured_again(kernel, measurer, decode(text), measurement, incumbent)
            self._enter(kernel, text, guess, measurement, incumbent or kernel.base)
            if time.monotonic() >= self._end or kernel.base is None:
                break
        kernel.seconds += time.monotonic() - start
        kernel.measured += len(kernel.records) - before
        if kernel.base is None:
            kernel.stop, kernel.stop_detail = StopReason.NOT_MEASURED, kernel.records[-1].measurement.reason

    def _summarized(self, measurer: Measurer, task: Task, wanted: Sequence[Decisions]) -> list[CandidateSummary | None]:
        """What candidates are. A failure to make their loops that is not a refusal becomes a record."""
        with self._clock.phase("build"):
            found = measurer.summarize(task, wanted)
        kernel = next(k for k in self._kernels if k.task is task)
        for decisions, made in zip(wanted, found, strict=True):
            if isinstance(made, Measurement) and made.status != Outcome.REFUSED and kernel.base is not None:
                self._enter(kernel, encode(decisions), None, made, None)
        return [made if isinstance(made, CandidateSummary) else None for made in found]

    def _size(self, kernel: TaskState) -> int:
        """Trials of the next batch: enough to keep the builders busy, few enough to decide again soon."""
        size = 2 * len(os.sched_getaffinity(0))
        if kernel.measured and self._budget < inf:
            each = kernel.seconds / kernel.measured
            size = max(4, min(16, round(_BATCH * (self._end - time.monotonic()) / each)))
        return size if self._limit is None else min(size, self._limit - self._session.trials)

    def _measured(
        self, kernel: TaskState, measurer: Measurer, wanted: Sequence[Decisions], incumbent: Record | None
    ) -> Iterator[Measurement]:
        results = measurer.measure_each(kernel.task, wanted, _decisions(incumbent))
        start = time.monotonic()
        with self._clock.phase("build"):  # all are built before the first is measured
            first = next(results)
        took = time.monotonic() - start
        if self._building[1] or isinstance(self._subject, ModelSubject):
            self._building[0] += took
            self._building[1] += len(wanted)
        else:
            self._loading = max(self._loading, took)  # processes were started: so they are for a comparison of programs
            self._building[1] = 1
        yield first
        while True:
            with self._clock.phase("measure"):
                found = next(results, None)
            if found is None:
                return
            yield found

    def _measured_again(
        self, kernel: TaskState, measurer: Measurer, decisions: Decisions, found: Measurement, incumbent: Record | None
    ) -> Measurement:
        """A candidate that seems to be the best is measured again, and the worse result counts: the best of many is partly luck."""
        best, beside = kernel.best, incumbent or kernel.base
        if found.status != Outcome.OK or best is None or beside is None or found.ratio * (beside.cost or inf) >= (best.cost or inf):
            return found
        with self._clock.phase("measure"):
            (again,) = measurer.measure(kernel.task, [decisions], _decisions(incumbent))
        return again if again.ratio > found.ratio else found

    def _proposed(self, kernel: TaskState, search: Search) -> _Proposals:
        """New candidates, as text, with their predicted costs; winners of similar kernels are among the first ones."""
        count, known = self._size(kernel), {_DEFAULT, *(r.decisions for r in kernel.records)}
        similar = self._winners_of_similar_tasks(kernel.task) if not kernel.trials else []
        found = search(kernel.task, kernel.training_records, count, self._rng, similar)
        return {text: search.predicted(kernel.task, d) for d in found if (text := encode(d)) not in known}

    def _winners_of_similar_tasks(self, task: Task) -> list[Decisions]:
        """Winners of kernels of the same structure, those of the nearest sizes first."""

        def distance(other: Task) -> float:
            return sum(abs(log((a + 1) / (b + 1))) for a, b in zip(task.sizes, other.sizes, strict=True))

        others = [t for t in self._entries.similar(task.structure) if t.key != task.key and len(t.sizes) == len(task.sizes)]
        winners = [self._entries.choice(t.key) for t in sorted(others, key=distance)[:_SIMILAR]]
        return [decode(text) for text in winners if text is not None]

    # ------------------------------------------------------------ records and results

    def _record(self, task: Task, decisions: str, measurement: Measurement, cost: float | None, predicted: float | None = None) -> Record:
        """Enter a record, and what is spent by now."""
        record = Record(task, decisions, "", measurement, cost, predicted, self._environment, time.time())
        self._session.trials += decisions != _DEFAULT
        self._session.spent = self._earlier + time.monotonic() - self._start
        self._entries.add(record, self._session)
        return record

    def _enter(self, kernel: TaskState, decisions: str, predicted: float | None, measurement: Measurement, incumbent: Record | None) -> None:
        """Enter one record, in the database and here. `incumbent` is what the candidate was measured beside: as the machine may have become
        busier or faster since, the cost is on the scale of the incumbent's; None for the first."""
        cost = None
        if measurement.status == Outcome.OK:
            cost = measurement.least if incumbent is None else measurement.ratio * (incumbent.cost or inf)
        if cost is not None and predicted is not None:
            self._errors = [*self._errors, abs(log(predicted / cost))][-_RECENT_ERRORS:]
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
        found = confirm(self._subject, candidates, self._comparison, self._start + self._budget, lambda comparisons: self._show())
        when = time.time()
        for task in (status.task for status in (*self._choices, *self._kernels)):
            gain, kept = found.kernels.get(task.key, Gain(0.0, 0.0)), found.kept.get(task.key)
            for decisions in sorted(found.tried.get(task.key, ()), key=lambda d: d == kept):  # the latest verdict is what holds
                judgement = Judgement.KEPT if decisions == kept else Judgement.ROLLED_BACK
                self._entries.add(Verdict(task, encode(decisions), judgement, gain.before, gain.after, self._environment, when))
        for kernel in self._kernels:
            if kernel.task.key in found.kept:
                record = next(r for r in self._entries.ranked(kernel.task.key) if decode(r.decisions) == found.kept[kernel.task.key])
                self._entries.set_trace(record, instantiate(kernel.task, found.kept[kernel.task.key]).schedule.trace.to_json())
        return found

    def _enter_session(self, confirmation: Confirmation) -> None:
        self._session.spent = self._earlier + time.monotonic() - self._start
        c = confirmation
        self._session.summary = {
            "before": c.before, "after": c.after, "ratio": c.ratio, "contests": c.comparisons, "kept": sorted(c.kept), "notes": c.notes,
            "rolled_back": sorted(c.rolled_back), "kernels": {key: [g.before, g.after] for key, g in c.kernels.items()},
            "seconds": self._clock.stop(),
        }  # fmt: skip
        self._entries.update(self._session)

    def _show(self) -> None:
        error = sum(self._errors) / len(self._errors) if self._errors else None
        budget = self._budget if self._budget < inf else 0.0
        elapsed = time.monotonic() - self._start
        self._tell(Status(self._phase, elapsed, budget, self._session.trials, self._limit, self._kernels, self._current, error))


def _decisions(record: Record | None) -> Decisions:
    return {} if record is None else decode(record.decisions)
