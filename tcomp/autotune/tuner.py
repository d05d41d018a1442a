"""The tuner: it gives trials to the kernels that promise most, until time is up; then the winners must win in the whole model.

Everything counts towards the budget, compiling and confirming included. Every candidate is entered in the database as soon as it is
measured: whatever ends the run, compilations find the best so far there, and `resume` goes on with what is left of the budget."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, log
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tcomp import cache
from tcomp.autotune.confirm import Confirmation, confirm
from tcomp.autotune.database.entries import Record, Session, SessionState, Verdict, environment
from tcomp.autotune.database.store import Database
from tcomp.autotune.features import CandidateSummary
from tcomp.autotune.measurement.measurer import Cluster, ClusterMeasurer, Measurer
from tcomp.autotune.measurement.results import Limits, Measurement, Outcome, Rounds
from tcomp.autotune.progress import BUDGET, PhaseClock, Result, Status, StopReason, TaskStatus, TimePlan, next_task
from tcomp.autotune.search import Search
from tcomp.autotune.subject import ModelSubject, ProgramSubject, TuningSubject, roofline_seconds, title
from tcomp.autotune.tasks import Program, ScheduleFunction, Task, instantiate
from tcomp.backends import backend_of
from tcomp.calibration import measured
from tcomp.errors import InputError, TcompError
from tcomp.ir.graph import Graph
from tcomp.ir.loops import Kernel
from tcomp.ir.te import Tensor
from tcomp.options import CompileOptions
from tcomp.schedules.knobs import Decisions, decode, encode
from tcomp.schedules.schedule import Program as Source
from tcomp.target import Target

if TYPE_CHECKING:
    import onnx

_BATCH = 0.1  # the share of the time left that one batch may take
_SIMILAR = 3  # winners of similar kernels that are tried first
_EARLIER = 32  # the best records of earlier runs that the search learns from: each costs as much as a candidate
_ALGORITHMS = 0.2  # the share of the budget that is left after compiling, and of the trials, for comparisons of algorithms
_RECENT_ERRORS = 64  # the latest predictions, from which the error of the cost model is computed
_GRACE = 1.0  # seconds after which a candidate that is being measured when time is up is not waited for
_DEFAULT = encode({})


def tune(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | Source | Graph,
    *,
    budget: float | None = None,
    trials: int | None = None,
    database: str | os.PathLike[str] = "tune.db",
    target: Target | str | None = None,
    threads: int | None = None,
    workers: int | None = None,
    cluster: Cluster | str | None = None,
    schedule: ScheduleFunction | None = None,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    dims: Mapping[str, int | tuple[int, int] | list[int]] | None = None,
    values: Mapping[str, npt.ArrayLike] | None = None,
    sizes: Mapping[str, int] | None = None,
    direct: bool = False,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    seed: int = 0,
) -> Result:
    """Find faster schedules for the kernels of an ONNX model, or for a user's own program, and enter them in a database.

    `model` is what `tcomp.compile` takes, a graph, or what `tcomp.Schedule` takes; then `schedule(s, knobs)` may be a search space of the
    user's own. `budget` is the total time in seconds (60 if `trials` is not given either), `trials` the number of candidates. `target`,
    `threads`, `shapes`, `dims`, `values` and `direct` are those of `tcomp.compile`, which has to be given the same ones (for CUDA,
    `threads` has no effect); `sizes` are those at which symbolic dims that stay open are measured. `workers` is the number of building
    processes, `cluster` a Dask cluster whose workers measure, or the address of its scheduler (see `Cluster`: whom you trust then); it is
    not entered in the database. `resume` goes on with an earlier call for the same model, with what is left of its budget unless another
    one is given.

    Ctrl-C ends the search, not the confirmation; a second one ends that too. What was measured is in the database in any case.

    Raises `TcompError` as `tcomp.compile`; `DeviceError` for a CUDA target without a GPU of its architectures; `DatabaseError` for a
    database that cannot be used; `InputError` if there is nothing to resume.
    """
    start = time.monotonic()
    backend = backend_of(target)
    limits = {"budget": budget, "trials": trials}
    for name, number in {**limits, "workers": workers, "threads": threads}.items():
        if number is not None and not 0 < number < 1e9:
            raise InputError(f"{name} is to be positive, not {number}")
    if cluster is None:
        backend.check_device()

    def plain(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
        return None if given is None else {str(name): np.asarray(v).tolist() for name, v in given.items()}

    exact = {str(name): {"exact": sizes} for name, sizes in (dims or {}).items() if isinstance(sizes, list)}  # a range is a list in JSON
    written = None if dims is None else {**(plain(dims) or {}), **exact}
    options: dict[str, Any] = {
        "model": os.path.abspath(model) if isinstance(model, str | os.PathLike) else None, "target": str(backend.target),
        "threads": threads, "workers": workers, "shapes": plain(shapes), "dims": written, "values": plain(values),
        "sizes": plain(sizes), "seed": seed, "direct": direct,
    }  # fmt: skip
    clock = PhaseClock()
    with Database(database) as entries:
        with clock.phase("compile"):
            subject: TuningSubject
            if isinstance(model, Kernel | Tensor) or (isinstance(model, Sequence) and not isinstance(model, str | bytes)):
                subject = ProgramSubject(Program.of(model, backend.target, backend.threads(threads), sizes, schedule))
            elif schedule is not None:
                raise InputError("a schedule function is for a program, not for a model", hint="tcomp.tune([A, B, C], schedule=f)")
            else:
                subject = ModelSubject(model, CompileOptions(backend, shapes, dims, threads, values, direct), sizes, seed)
        session = _session(entries, subject, options, limits, resume)
        plan = TimePlan(start, session.options["budget"], session.spent)
        run = _TuningRun(subject, entries, session, plan, clock, progress or (lambda status: None), Random(f"{seed} {session.trials}"))
        return run.run(workers, cluster)


def _session(entries: Database, subject: TuningSubject, options: dict[str, Any], limits: dict[str, float | None], resume: bool) -> Session:
    """A new session, or the latest one about the same tasks, with limits for what is left."""
    digest = cache.name(*sorted(task.key for task, _ in subject.tasks))
    if not resume:
        session = Session(digest, options | limits | ({} if any(limits.values()) else {"budget": BUDGET}), time.time())
        entries.add(session)
        return session
    resumed = next((s for s in reversed(entries.sessions()) if s.subject == digest), None)
    if resumed is None:
        raise InputError(f"there is nothing to resume in {entries.path}", why="this was not tuned there with these options")
    spent = {"budget": resumed.spent, "trials": resumed.trials}
    total = {name: resumed.options.get(name) if limits[name] is None else spent[name] + (limits[name] or 0) for name in spent}
    resumed.options = {**resumed.options, **total}
    over = [name for name, limit in total.items() if limit is not None and spent[name] >= limit]
    if over and resumed.state is SessionState.FINISHED:
        raise InputError(f"nothing is left of the {over[0]} of {total[over[0]]:g}", hint=f"give a further {over[0]}")
    resumed.state = SessionState.RUNNING
    return resumed


@dataclass(eq=False)
class _TuningRun:
    """One call of the tuner."""

    subject: TuningSubject
    entries: Database
    session: Session
    plan: TimePlan
    clock: PhaseClock
    tell: Callable[[Status], None]
    rng: Random
    phase: str = "compile"
    kernels: list[TaskStatus] = field(default_factory=list)
    current: TaskStatus | None = None
    choices: dict[str, TaskStatus] = field(default_factory=dict)  # of algorithms, by the keys of their tasks
    algorithms: dict[str, Decisions] = field(default_factory=dict)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_ERRORS))  # of the cost model

    def __post_init__(self) -> None:
        self.target = Target.parse(str(self.session.options["target"]))
        self.environment = environment(self.target)
        self.limit = self.session.options["trials"]
        self.plan.kernels = self.kernels

    def run(self, workers: int | None, cluster: Cluster | str | None) -> Result:
        interrupted, c = True, Confirmation()
        with suppress(KeyboardInterrupt):
            self.choose_algorithms()
            self.survey()
            self.search(workers, cluster)
            interrupted = False
        self.phase = "confirm"
        try:
            with self.clock.phase("confirm"):
                c = self.confirm()
        except KeyboardInterrupt:
            interrupted = True
        c.notes += dict.fromkeys(k.stopped for k in self.kernels if k.stop is StopReason.NOT_MEASURED)
        self.phase = "done"
        self.session.state = SessionState.INTERRUPTED if interrupted else SessionState.FINISHED
        self.session.spent = self.plan.earlier + self.plan.elapsed
        self.session.summary = {
            "before": c.before, "after": c.after, "ratio": c.ratio, "comparisons": c.comparisons, "kept": sorted(c.kept), "notes": c.notes,
            "rolled_back": sorted(c.rolled_back), "kernels": c.kernels, "seconds": self.clock.stop(),
        }  # fmt: skip
        self.entries.add(self.session)
        self.show()
        program = self.subject.task if isinstance(self.subject, ProgramSubject) else None
        statuses = [*self.choices.values(), *self.kernels]
        return Result(str(self.entries.path), statuses, c, self.clock.stop(), self.session.trials, interrupted, program)

    def choose_algorithms(self) -> None:
        """Try alternatives to the algorithms that the model takes, each in a comparison of whole models. The kernels that are tuned then
        are those of the model with the winners."""
        longest, now = 0.0, time.monotonic()
        end = now + _ALGORITHMS * (self.plan.deadline - now)
        limit = inf if self.limit is None else self.session.trials + _ALGORITHMS * (self.limit - self.session.trials)
        for task, decisions in self.subject.algorithms:
            record = next((r for r in self.entries.records(task.key) if r.decisions == encode(decisions)), None)
            begin = time.monotonic()
            if record is None and begin + longest < end and self.session.trials < limit:
                self.phase = "algorithms"
                self.show()
                with self.clock.phase("measure"):
                    record = self.try_algorithm(task, encode(decisions))
                longest = max(longest, time.monotonic() - begin)
            if record is not None:
                self.judge_algorithm(record)
        self.subject.choose_algorithms(self.algorithms)

    def try_algorithm(self, task: Task, decisions: str) -> Record:
        """The record of an alternative. The cost of what the untuned model takes is the time of all kernels that differ."""
        comparison = self.subject.compare({task.key: decode(decisions)}, self.plan.comparison / 2)
        rounds = comparison.kernels.get(task.key, Rounds())
        if not rounds.before:
            return self.record(task, decisions, comparison.failure or Measurement(Outcome.ERROR, reason="no kernel differs"), None)
        base = self.entries.best(task.key) or self.record(task, _DEFAULT, Measurement(Outcome.OK, rounds.before), min(rounds.before))
        return self.record(task, decisions, Measurement(Outcome.OK, rounds.after, "", rounds.before), rounds.ratio * (base.cost or 0.0))

    def judge_algorithm(self, record: Record) -> None:
        """Take an alternative if it is the best so far, and was not rolled back before."""
        status = self.choices.setdefault(record.task.key, TaskStatus(record.task, title(record.task), 1, 0.0))
        status.trials, status.failed = status.trials + 1, status.failed + (not record.ok)
        rounds = Rounds(record.measurement.incumbent, record.measurement.seconds)
        lost = any(v.decisions == record.decisions and not v.kept for v in self.entries.verdicts(record.task.key))
        if record.ok and rounds.before and rounds.won and rounds.ratio < status.gain and not lost:
            status.before, status.gain = min(rounds.before), rounds.ratio
            self.algorithms[record.task.key] = decode(record.decisions)

    def survey(self) -> None:
        """Collect what is known of the kernels: bounds, earlier records, and their shares of the untuned model's time."""
        with self.clock.phase("measure"):  # the rates of this machine, if it is the one that is tuned for
            core = measured() if self.subject.tasks and self.target == Target.host() else None
        for task, calls in self.subject.tasks:
            self.kernels.append(kernel := TaskStatus(task, title(task), calls, calls * roofline_seconds(task, core)))
            for record in self.entries.records(task.key):
                kernel.learn(record)
            kernel.earlier = len(kernel.records)
        self.show()
        with self.clock.phase("measure"):
            begin = time.monotonic()
            seconds = self.subject.seconds_by_task(self.plan.comparison / 2)
        self.plan.loading = max(self.plan.loading, time.monotonic() - begin - self.plan.comparison / 2)
        for kernel in self.kernels:
            if kernel.task.key in seconds:
                kernel.before, kernel.known = seconds[kernel.task.key], True
            elif kernel.base is None:
                kernel.before = kernel.bound  # until more is known

    def search(self, workers: int | None, cluster: Cluster | str | None) -> None:
        self.phase = "search"
        budget = self.plan.budget
        limits = Limits(building=min(60.0, max(10.0, budget / 4)), running=min(20.0, max(3.0, budget / 10)))
        measurer = Measurer(workers, limits) if cluster is None else ClusterMeasurer(cluster, workers, limits)
        with measurer, _watchdog(lambda: self.plan.end + _GRACE, measurer.close) as expired:
            try:
                search = Search(self.target, summarize=partial(self.summarized, measurer))
                while time.monotonic() < self.plan.end and (self.limit is None or self.session.trials < self.limit):
                    if (kernel := next_task(self.kernels, self.rng)) is None:
                        break
                    self.batch(kernel, measurer, search)
            except (TcompError, OSError, RuntimeError):
                if not expired.is_set():
                    raise

    def batch(self, kernel: TaskStatus, measurer: Measurer, search: Search) -> None:
        self.current = kernel
        self.show()
        start = time.monotonic()
        proposals: dict[str, float | None] = {_DEFAULT: None} if kernel.base is None else {}  # and the costs that the cost model expects
        with self.clock.phase("search"):
            proposals |= self.proposed(kernel, search)
        if not proposals:
            kernel.stop = StopReason.EXHAUSTED
            return
        incumbent = kernel.best  # at the start: the whole batch is measured against it
        opponent = decode(incumbent.decisions) if incumbent else None
        results = measurer.measure_each(kernel.task, [*map(decode, proposals)], opponent)
        for n, (text, guess) in enumerate(proposals.items()):
            begin = time.monotonic()
            with self.clock.phase("measure" if n else "build"):  # all are built before the first is measured
                measurement = next(results)
            if not n:
                # A comparison of programs starts processes as well.
                self.plan.built(len(proposals), time.monotonic() - begin, process_start=isinstance(self.subject, ProgramSubject))
            scale = incumbent or kernel.base
            if (
                measurement.status == Outcome.OK
                and kernel.best
                and scale
                and measurement.ratio * (scale.cost or inf) < (kernel.best.cost or inf)
            ):
                with self.clock.phase("measure"):  # the best of many is partly luck: it is measured again, and the worse result counts
                    (again,) = measurer.measure(kernel.task, [decode(text)], opponent)
                measurement = max(measurement, again, key=lambda m: m.ratio)
            self.enter(kernel, text, guess, measurement, scale)
            if time.monotonic() >= self.plan.end or kernel.base is None:
                break
        kernel.seconds += time.monotonic() - start
        if kernel.base is None:
            kernel.stop, kernel.stop_detail = StopReason.NOT_MEASURED, kernel.records[-1].measurement.reason

    def summarized(self, measurer: Measurer, task: Task, wanted: Sequence[Decisions]) -> list[CandidateSummary | Measurement]:
        """The summaries of candidates. A failure to make their loops, other than a refusal, is recorded."""
        with self.clock.phase("build"):
            found = measurer.summarize(task, wanted)
        kernel = next(k for k in self.kernels if k.task is task)
        for decisions, summary in zip(wanted, found, strict=True):
            if isinstance(summary, Measurement) and summary.status != Outcome.REFUSED and kernel.base is not None:
                self.enter(kernel, encode(decisions), None, summary, None)
        return found

    def proposed(self, kernel: TaskStatus, search: Search) -> dict[str, float | None]:
        """New candidates, as text, with their predicted costs; winners of similar kernels, those of the nearest sizes first, are among the
        first ones. They are enough to keep the builders busy, few enough to decide again soon."""
        count = 2 * len(os.sched_getaffinity(0))
        if kernel.measured and self.plan.budget < inf:
            count = max(4, min(16, round(_BATCH * (self.plan.end - time.monotonic()) * kernel.measured / kernel.seconds)))
        if self.limit is not None:
            count = min(count, self.limit - self.session.trials)
        known, task = {_DEFAULT, *(r.decisions for r in kernel.records)}, kernel.task
        others = [] if kernel.trials else self.entries.tasks(task.structure)
        similar = [t for t in others if t.key != task.key and len(t.sizes) == len(task.sizes)]
        similar.sort(key=lambda t: sum(abs(log((a + 1) / (b + 1))) for a, b in zip(task.sizes, t.sizes, strict=True)))
        winners = [decode(text) for t in similar[:_SIMILAR] if (text := self.entries.choice(t.key)) is not None]
        earlier = sorted((r for r in kernel.records[: kernel.earlier] if r.ok), key=lambda r: r.cost or inf)
        found = search(task, [*earlier[:_EARLIER], *kernel.records[kernel.earlier :]], count, self.rng, winners)
        return {text: search.predicted(task, d) for d in found if (text := encode(d)) not in known}

    def record(self, task: Task, decisions: str, measurement: Measurement, cost: float | None, predicted: float | None = None) -> Record:
        record = Record(task, decisions, "", measurement, cost, predicted, self.environment, time.time())
        self.session.trials += decisions != _DEFAULT
        self.session.spent = self.plan.earlier + self.plan.elapsed
        self.entries.add(record, self.session)
        return record

    def enter(
        self, kernel: TaskStatus, decisions: str, predicted: float | None, measurement: Measurement, incumbent: Record | None
    ) -> None:
        """Enter one record, in the database and here. `incumbent` is what the candidate was measured against: as the machine may have
        become busier or faster since, the cost is on the scale of the incumbent's; None for the first."""
        cost = None
        if measurement.status == Outcome.OK:
            cost = measurement.least if incumbent is None else measurement.ratio * (incumbent.cost or inf)
        if cost is not None and predicted is not None:
            self.errors.append(abs(log(predicted / cost)))
        kernel.learn(self.record(kernel.task, decisions, measurement, cost, predicted))
        self.show()

    def confirm(self) -> Confirmation:
        candidates = {key: [decisions] for key, decisions in self.algorithms.items()}
        for kernel in self.kernels:
            base = inf if kernel.base is None else kernel.base.cost or inf
            better = [r for r in self.entries.ranked(kernel.task.key) if r.decisions != _DEFAULT and (r.cost or inf) < base < inf]
            if better:
                candidates[kernel.task.key] = [decode(r.decisions) for r in better[: self.plan.finalists]]
        self.show()
        found = confirm(self.subject, candidates, self.plan.comparison, self.plan.deadline, self.show)
        when = time.time()
        for task in (status.task for status in (*self.choices.values(), *self.kernels)):
            seconds, kept = found.kernels.get(task.key, (0.0, 0.0)), found.kept.get(task.key)
            for decisions in sorted(found.tried.get(task.key, ()), key=lambda d: d == kept):  # the latest verdict is what holds
                self.entries.add(Verdict(task, encode(decisions), decisions == kept, *seconds, self.environment, when))
        for task in (kernel.task for kernel in self.kernels if kernel.task.key in found.kept):
            kept = found.kept[task.key]
            record = next(r for r in self.entries.ranked(task.key) if decode(r.decisions) == kept)
            self.entries.set_trace(record, instantiate(task, kept).schedule.trace.to_json())
        return found

    def show(self) -> None:
        error, budget = fmean(self.errors) if self.errors else None, self.plan.budget if self.plan.budget < inf else 0.0
        self.tell(Status(self.phase, self.plan.elapsed, budget, self.session.trials, self.limit, self.kernels, self.current, error))


@contextmanager
def _watchdog(deadline: Callable[[], float], end: Callable[[], None]) -> Iterator[threading.Event]:
    """Calls `end` from a thread once it is later than `deadline()` says, whatever the block waits for then; sets the event that is
    yielded."""
    done, expired = threading.Event(), threading.Event()

    def watch() -> None:
        while time.monotonic() <= deadline():
            if done.wait(0.2):
                return
        expired.set()
        end()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield expired
    finally:
        done.set()
        thread.join()
