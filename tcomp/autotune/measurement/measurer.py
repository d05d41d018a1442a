"""How fast candidates are. Whatever a candidate does, it becomes a record (see `Outcome`), and the next one is measured.

Candidates are made and built in processes of their own, all of a batch at once; then, while nothing else runs, each is measured in one
long-lived process (`worker`, `worker_gpu`), which is replaced when a candidate makes it crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

from tcomp.autotune.features import CandidateSummary
from tcomp.autotune.measurement.builder import build_request, is_local, summary_request
from tcomp.autotune.measurement.results import LIMITS, Limits, Measurement, Outcome
from tcomp.autotune.measurement.worker_process import Answer, WorkerError, WorkerProcess, reason_of
from tcomp.autotune.space import instantiate
from tcomp.autotune.tasks import Task
from tcomp.errors import ScheduleError
from tcomp.schedules.knobs import Decisions, encode

_SEED = 0
_CACHED = 64  # shared objects of candidates that may be asked for again


@dataclass(frozen=True)
class Job:
    """All that `Runner.run` needs to measure a candidate, on this machine or another: the task's key, whether it runs on a device, what the
    measuring process needs, and what builders answered for the default schedule, the incumbent and the candidate."""

    key: str
    on_device: bool
    threads: int
    harness: str
    flush_bytes: int
    reference: Answer
    incumbent: Answer
    candidate: Answer

    @property
    def build_failure(self) -> Measurement | None:
        """The record of a candidate that could not be built."""
        return None if self.candidate["status"] == Outcome.OK else Measurement.from_answer(self.candidate)


class Runner:
    """The measuring process of this machine, pinned to as many cores as there are threads. Jobs of one task in a row are cheapest."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._worker: WorkerProcess | None = None
        self._kind: tuple[bool, int] | None = None  # whether on a device, and the threads
        self._ready: tuple[str, int] | None = None  # the task that is prepared, and in which start of the process
        self._failed: tuple[str, str] = "", ""  # a task whose default schedule cannot be run, and why

    def run(self, job: Job) -> Measurement:
        """Measure one candidate."""
        kind = job.on_device, job.threads
        if self._worker is None or self._kind != kind:
            self.close()
            self._worker, self._kind = _measuring_process(*kind, self._limits), kind
        try:
            self._worker.start()
        except WorkerError as error:
            return Measurement(Outcome.ERROR, reason=reason_of(error))
        if self._failed[0] != job.key and self._ready != (job.key, self._worker.starts):
            self._prepare(self._worker, job)
        if self._failed[0] == job.key:
            return Measurement(Outcome.ERROR, reason=f"the default schedule cannot be measured: {self._failed[1]}")
        request = {"do": "measure", "incumbent": job.incumbent, "candidate": job.candidate, "rounds": self._limits.rounds}
        return Measurement.from_answer(self._worker.ask({**request, "seconds": self._limits.seconds}, self._limits.running))

    def _prepare(self, worker: WorkerProcess, job: Job) -> None:
        fields = {name: getattr(job, name) for name in ("threads", "harness", "flush_bytes", "reference")}
        answer = worker.ask({"do": "prepare", **fields, "seed": _SEED}, self._limits.running)
        if answer["status"] == Outcome.OK:
            self._ready = job.key, worker.starts
        else:
            self._failed = job.key, f"{answer['status']}: {answer['reason']}"

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    @property
    def pids(self) -> list[int]:
        """The number of the process, if it runs."""
        return [self._worker.pid] if self._worker is not None and self._worker.pid is not None else []


class Measurer:
    """Makes, builds and measures candidates on this machine. A context manager: its processes end with it.

    `builders` is the number of building processes (default: one for each core that this process may use).
    """

    def __init__(self, builders: int | None = None, limits: Limits = LIMITS) -> None:
        self.limits = limits
        count = builders or len(os.sched_getaffinity(0))
        self._builders = [WorkerProcess("tcomp.autotune.measurement.builder", limits.bytes) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count, "tcomp-build")
        self._runner = Runner(limits)
        self._built: dict[str, Answer] = {}
        self._made_by: dict[str, int] = {}  # which builder has the loops of a candidate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._runner.close()
        for builder in self._builders:
            builder.close()
        self._pool.shutdown()

    @property
    def pids(self) -> list[int]:
        """The processes that work for this one now."""
        return [*self._runner.pids, *(builder.pid for builder in self._builders if builder.pid is not None)]

    def summarize(self, task: Task, wanted: Sequence[Decisions]) -> list[CandidateSummary | Measurement]:
        """The candidates of some decisions, in order; a record where there is none. Raises nothing on account of a candidate."""
        if is_local(task):
            return [_summarize_here(task, decisions) for decisions in wanted]
        keys = [_key(task, decisions) for decisions in wanted]
        answers = self._ask({key: summary_request(task, decisions) for key, decisions in zip(keys, wanted, strict=True)})
        found: list[CandidateSummary | Measurement] = []
        for builder, answer in map(answers.__getitem__, keys):
            if answer["status"] != Outcome.OK:
                found.append(Measurement.from_answer(answer))
                continue
            summary = CandidateSummary.from_json(answer["summary"])
            self._made_by[_key(task, summary.decisions)] = builder
            found.append(summary)
        while len(self._made_by) > _CACHED * len(self._builders):
            del self._made_by[next(iter(self._made_by))]
        return found

    def measure(self, task: Task, candidates: Sequence[Decisions], incumbent: Decisions | None = None) -> list[Measurement]:
        """Measure candidates beside the incumbent (default: the default schedule), in order. Raises nothing on account of a candidate."""
        return list(self.measure_each(task, candidates, incumbent))

    def measure_each(self, task: Task, candidates: Sequence[Decisions], incumbent: Decisions | None = None) -> Iterator[Measurement]:
        """`measure`, each result as soon as it is known: all are built before the first is run, so that nothing else runs then."""
        reference, beside, *rest = self._build(task, [{}, incumbent or {}, *candidates])
        for name, answer in (("default", reference), ("incumbent", beside)):
            if answer["status"] != Outcome.OK:
                yield from [Measurement(Outcome.ERROR, reason=f"the {name} schedule: {answer['reason']}")] * len(rest)
                return
        harness = self._harness(task)
        if harness["status"] != Outcome.OK:
            yield from [Measurement.from_answer(harness)] * len(rest)
            return
        common = task.key, task.backend.on_device, task.threads, harness["harness"], task.backend.flush_bytes(task.threads), reference, beside
        yield from self._run(task, [Job(*common, answer) for answer in rest])

    def _run(self, task: Task, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """The measurements of jobs, in order."""
        for job in jobs:
            yield job.build_failure or self._runner.run(job)

    # ------------------------------------------------------------ building

    def _build(self, task: Task, wanted: Sequence[Decisions]) -> list[Answer]:
        """What builders answer for some decisions of a task, in order."""
        keys = [_key(task, decisions) for decisions in wanted]
        found, requests = dict(self._built), dict[str, Answer]()
        for key, decisions in zip(keys, wanted, strict=True):
            if key not in found and key not in requests:
                try:
                    requests[key] = build_request(task, decisions)
                except Exception as error:  # noqa: BLE001  a user's schedule function may raise anything
                    found[key] = _failed(error)
        found.update((key, answer) for key, (_, answer) in self._ask(requests).items())
        for key in keys[:2]:  # the default schedule and the incumbent
            self._built.pop(key, None)
            if found[key]["status"] == Outcome.OK:
                self._built[key] = found[key]
        while len(self._built) > _CACHED:
            del self._built[next(iter(self._built))]
        return [found[key] for key in keys]

    def _harness(self, task: Task) -> Answer:
        """What the measuring process needs beside candidates; see `builder.harness`."""
        if task.backend.on_device:
            return {"status": Outcome.OK, "harness": ""}
        key = f"{task.target} {task.threads}"
        if key not in self._built:
            request = {"do": "harness", "target": task.target, "threads": task.threads, "flush_bytes": task.backend.flush_bytes(task.threads)}
            _, answer = self._ask({key: request})[key]
            if answer["status"] != Outcome.OK:
                return answer
            self._built[key] = answer
        return self._built[key]

    def _ask(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, Answer]]:
        """Which builder answered each request, and what. An idle builder prefers candidates whose loops it has made."""
        waiting, answers, lock = dict(requests), dict[str, tuple[int, Answer]](), Lock()

        def work(builder: int) -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    key = min(waiting, key=lambda k: (self._made_by.get(k, builder) != builder, k not in self._made_by))
                    request = waiting.pop(key)
                answers[key] = builder, self._builders[builder].ask(request, self.limits.building)

        list(self._pool.map(work, range(min(len(self._builders), len(requests)))))
        return answers


def _key(task: Task, decisions: Decisions) -> str:
    return f"{task.key} {encode(decisions)}"


def _summarize_here(task: Task, decisions: Decisions) -> CandidateSummary | Measurement:
    try:
        return CandidateSummary.of(instantiate(task, decisions))
    except Exception as error:  # noqa: BLE001  a user's schedule function may raise anything
        return Measurement.from_answer(_failed(error))


def _failed(error: Exception) -> Answer:
    return {"status": Outcome.REFUSED if isinstance(error, ScheduleError) else Outcome.ERROR, "reason": reason_of(error)}


def _measuring_process(on_device: bool, threads: int, limits: Limits) -> WorkerProcess:
    """The measuring process: for a device, or for the cores of this machine."""
    if on_device:
        return WorkerProcess("tcomp.autotune.measurement.worker_gpu", None)
    return WorkerProcess("tcomp.autotune.measurement.worker", limits.bytes, cores(threads))


def cores(threads: int, root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """As many processors as threads, of different cores where there are enough; all that this process may use if it may use fewer."""
    usable, taken, siblings = sorted(os.sched_getaffinity(0), reverse=True), [], set()
    for cpu in usable:
        try:
            core = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        if core not in siblings:
            siblings.add(core)
            taken.append(cpu)
    taken += [cpu for cpu in usable if cpu not in taken]
    return sorted(taken[:threads])
