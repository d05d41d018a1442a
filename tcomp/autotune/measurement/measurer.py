"""How fast candidates are. Whatever a candidate does, it becomes a record, and the next one is measured.

Candidates are made and built in processes of their own, all of a batch at once; then, while nothing else runs, each is measured in one
long-lived process (`worker`, `worker_gpu`), which is replaced when a candidate takes it down.

    ok        timed, and its results are those of the default schedule
    refused   the schedule function, or a step of it, refuses the decisions
    build     no machine code can be made of it            memory    it needs more memory than it may have
    crash     a process died of it                         wrong     it computes something else
    timeout   it took too long to build or to run          error     anything else, for example an exception in the schedule function
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from tcomp.autotune.features import Made
from tcomp.autotune.measurement.builder import local, order, wish
from tcomp.autotune.measurement.processes import Answer, Child, ChildError, reason_of
from tcomp.autotune.space import realise
from tcomp.autotune.tasks import Task
from tcomp.codegen.cuda import nvrtc
from tcomp.errors import DeviceError, ScheduleError
from tcomp.runtime.cuda import usable_cupy
from tcomp.schedules.knobs import Decisions, encode
from tcomp.target import Target

OK, REFUSED, BUILD, CRASH, TIMEOUT, WRONG, MEMORY, ERROR = "ok", "refused", "build", "crash", "timeout", "wrong", "memory", "error"
STATUSES = (OK, REFUSED, BUILD, CRASH, TIMEOUT, WRONG, MEMORY, ERROR)

_SEED = 0
_KEPT = 64  # shared objects of candidates that may be asked for again


@dataclass(frozen=True)
class Measurement:
    """`seconds` of single runs, in order, if the status is "ok"; `incumbent` those of the runs of the incumbent between them: compare
    with these, as the machine may have been busy. `reason` says why the status is not "ok"."""

    status: str
    seconds: tuple[float, ...] = ()
    reason: str = ""
    incumbent: tuple[float, ...] = ()

    @property
    def least(self) -> float:
        """Seconds of the fastest run; infinite if there is none."""
        return min(self.seconds, default=float("inf"))

    @property
    def ratio(self) -> float:
        """The fastest run over the fastest one of the incumbent; infinite if there is none."""
        return self.least / min(self.incumbent) if self.incumbent else float("inf")


@dataclass(frozen=True)
class Limits:
    """Of one candidate: seconds to build it, to run it (all runs together), `rounds` and `seconds` of runs that are timed, and bytes of
    address space of the processes in which that happens (None: half of the machine's memory)."""

    building: float = 60.0
    running: float = 20.0
    rounds: int = 64
    seconds: float = 0.1
    memory: int | None = None

    @property
    def bytes(self) -> int:
        """`memory`, or what None stands for. Not for processes that use a GPU: CUDA reserves addresses for all memory of all devices."""
        return self.memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


LIMITS = Limits()


class Runner:
    """The measuring process of this machine, pinned to as many cores as there are threads. `Job`s of one task in a row are cheapest."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._child: Child | None = None
        self._kind: tuple[str, int] = "", 0  # the kind of machine, and the threads
        self._ready: tuple[str, int] | None = None  # the task that is prepared, in which start of the child
        self._failed: tuple[str, str] = "", ""  # a task whose default schedule cannot be run, and why

    def run(self, job: Mapping[str, Any]) -> Measurement:
        """Measure one candidate; see `Measurer.jobs` for what a job is."""
        kind = job["kind"], job["threads"]
        if self._child is None or self._kind != kind:
            self.close()
            self._child, self._kind = _worker(*kind, self._limits), kind
        try:
            self._child.start()
        except ChildError as error:
            return Measurement(ERROR, reason=reason_of(error))
        if self._failed[0] != job["key"] and self._ready != (job["key"], self._child.starts):
            self._prepare(self._child, job)
        if self._failed[0] == job["key"]:
            return Measurement(ERROR, reason=f"the default schedule cannot be measured: {self._failed[1]}")
        request = {"do": "measure", "incumbent": job["incumbent"], "candidate": job["candidate"], "rounds": self._limits.rounds}
        answer = self._child.ask({**request, "seconds": self._limits.seconds}, self._limits.running)
        seconds, incumbent = (tuple(map(float, answer.get(times, ()))) for times in ("seconds", "incumbent"))
        return Measurement(answer["status"], seconds, answer["reason"], incumbent)

    def _prepare(self, child: Child, job: Mapping[str, Any]) -> None:
        fields = {name: job[name] for name in ("threads", "ground", "room", "reference")}
        answer = child.ask({"do": "prepare", **fields, "fold": job["reference"]["fold"], "seed": _SEED}, self._limits.running)
        if answer["status"] == OK:
            self._ready = job["key"], child.starts
        else:
            self._failed = job["key"], f"{answer['status']}: {answer['reason']}"

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

    @property
    def pids(self) -> list[int]:
        return [self._child.pid] if self._child is not None and self._child.pid is not None else []


class Measurer:
    """Makes, builds and measures candidates on this machine. A context manager: its processes end with it.

    `builders` is the number of building processes (default: one for each core that this process may use).
    """

    def __init__(self, builders: int | None = None, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._builders = [Child("tcomp.autotune.measurement.builder", limits.bytes) for _ in range(builders or len(os.sched_getaffinity(0)))]
        self._pool = ThreadPoolExecutor(len(self._builders), "tcomp-build")
        self._runner = Runner(limits)
        self._built: dict[str, Answer] = {}
        self._maker: dict[str, int] = {}  # which builder made the loops of a candidate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._runner.close()
        for child in self._builders:
            child.close()
        self._pool.shutdown()

    @property
    def pids(self) -> list[int]:
        """The processes that work for this one now."""
        return [*self._runner.pids, *(child.pid for child in self._builders if child.pid is not None)]

    def make(self, task: Task, wanted: Sequence[Decisions]) -> list[Made | Measurement]:
        """The loops of candidates, in order; a record where there are none. Raises nothing on account of a candidate."""
        if local(task):
            return [_made_here(task, decisions) for decisions in wanted]
        keys = [_key(task, decisions) for decisions in wanted]
        answers = self._ask({key: wish(task, decisions) for key, decisions in zip(keys, wanted, strict=True)})
        found: list[Made | Measurement] = []
        for key in keys:
            builder, answer = answers[key]
            if answer["status"] == OK:
                made = Made.from_json(answer["made"])
                self._maker[_key(task, made.decisions)] = builder
                found.append(made)
            else:
                found.append(Measurement(answer["status"], reason=answer["reason"]))
        while len(self._maker) > _KEPT * len(self._builders):
            del self._maker[next(iter(self._maker))]
        return found

    def measure(self, task: Task, candidates: Sequence[Decisions], incumbent: Decisions | None = None) -> list[Measurement]:
        """Measure candidates beside the incumbent (default: the default schedule), in order. Raises nothing on account of a candidate."""
        return list(self.measure_each(task, candidates, incumbent))

    def measure_each(self, task: Task, candidates: Sequence[Decisions], incumbent: Decisions | None = None) -> Iterator[Measurement]:
        """`measure`, each result as soon as it is known: all are built before the first is run, so that nothing else runs then."""
        built = self._build(task, [{}, incumbent or {}, *candidates])
        reference, beside, *rest = built
        for answer in (reference, beside):
            if answer["status"] != OK:
                failed = Measurement(ERROR, reason=f"the {'default' if answer is reference else 'incumbent'} schedule: {answer['reason']}")
                yield from [failed] * len(rest)
                return
        ground = self._ground(task)
        if ground["status"] != OK:
            yield from [Measurement(ground["status"], reason=ground["reason"])] * len(rest)
            return
        machine = {"kind": task.machine.kind, "threads": task.threads, "ground": ground["ground"], "room": _room(task)}
        common = {"key": task.key, **machine, "reference": reference}
        jobs = [{**common, "incumbent": beside, "candidate": answer} for answer in rest]
        yield from self._run(task, jobs)

    def _run(self, task: Task, jobs: Sequence[Mapping[str, Any]]) -> Iterator[Measurement]:
        """The measurements of jobs, in order. A job holds all that `Runner.run` needs, as JSON; its candidate may have failed to build."""
        for job in jobs:
            yield unbuilt(job) or self._runner.run(job)

    # ------------------------------------------------------------ building

    def _build(self, task: Task, wanted: Sequence[Decisions]) -> list[Answer]:
        """What builders answer for some decisions of a task, in order."""
        keys = [_key(task, decisions) for decisions in wanted]
        found, requests = dict(self._built), dict[str, Answer]()
        for key, decisions in zip(keys, wanted, strict=True):
            if key not in found and key not in requests:
                try:
                    requests[key] = order(task, decisions)
                except Exception as error:  # noqa: BLE001  schedule functions of other people's raise what they like
                    found[key] = _failed(error)
        found.update((key, answer) for key, (_, answer) in self._ask(requests).items())
        for key in keys[:2]:  # the default schedule and the incumbent
            self._built.pop(key, None)
            if found[key]["status"] == OK:
                self._built[key] = found[key]
        while len(self._built) > _KEPT:
            del self._built[next(iter(self._built))]
        return [found[key] for key in keys]

    def _ground(self, task: Task) -> Answer:
        if task.machine.kind == "cuda":
            return {"status": OK, "ground": ""}
        key = f"{task.target} {task.threads}"
        if key not in self._built:
            request = {"do": "ground", "target": task.target, "threads": task.threads, "room": _room(task)}
            _, answer = self._ask({key: request})[key]
            if answer["status"] != OK:
                return answer
            self._built[key] = answer
        return self._built[key]

    def _ask(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, Answer]]:
        """Which builder answered each request, and what. An idle one takes what it has made the loops of, as long as there is such."""
        waiting, answers, lock = dict(requests), dict[str, tuple[int, Answer]](), Lock()

        def work(builder: int) -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    key = min(waiting, key=lambda k: (self._maker.get(k, builder) != builder, k not in self._maker))
                    request = waiting.pop(key)
                answers[key] = builder, self._builders[builder].ask(request, self.limits.building)

        list(self._pool.map(work, range(min(len(self._builders), len(requests)))))
        return answers


def _key(task: Task, decisions: Decisions) -> str:
    return f"{task.key} {encode(decisions)}"


def _made_here(task: Task, decisions: Decisions) -> Made | Measurement:
    try:
        return Made.of(realise(task, decisions))
    except Exception as error:  # noqa: BLE001  schedule functions of other people's raise what they like
        return Measurement(**_failed(error))


def _failed(error: Exception) -> Answer:
    return {"status": REFUSED if isinstance(error, ScheduleError) else ERROR, "reason": reason_of(error)}


def unbuilt(job: Mapping[str, Any]) -> Measurement | None:
    """The record of a job whose candidate could not be built."""
    answer = job["candidate"]
    return None if answer["status"] == OK else Measurement(answer["status"], reason=answer["reason"])


def _room(task: Task) -> int:
    """Bytes that fill the second-level caches of all threads, or that of the GPU, twice."""
    return 2 * (task.machine.gpu.l2 if task.machine.kind == "cuda" else task.machine.l2 * task.threads)


def _worker(kind: str, threads: int, limits: Limits) -> Child:
    """The measuring process for a kind of machine."""
    if kind == "cuda":
        return Child("tcomp.autotune.measurement.worker_gpu", None)
    return Child("tcomp.autotune.measurement.worker", limits.bytes, cores(threads))


def check_device(target: Target) -> None:
    """Raises `TargetError` where nothing can be compiled for a CUDA target here, `DeviceError` where there is no GPU of that architecture."""
    nvrtc.version()
    found = usable_cupy().cuda.Device().compute_capability
    if found not in [arch[3:].rstrip("a") for arch in target.cpu.split(",")]:
        why = f"the GPU of this machine is sm_{found}, and what is measured there says little about others"
        raise DeviceError(f"programs for `{target}` cannot be tuned here", why=why, hint=f"--target 'cuda -arch=sm_{found}', or --cluster")


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
