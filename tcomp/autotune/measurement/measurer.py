"""Building and measuring candidates. A candidate that fails is recorded with its outcome (see `Outcome`), and the next one is measured. A
batch is built in parallel processes; then, while nothing else runs, its candidates are measured one by one in a long-lived process
(`worker`, `worker_gpu`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeVar, cast

from tcomp.autotune.features import CandidateSummary
from tcomp.autotune.measurement.builder import build_request, is_local, summary_request
from tcomp.autotune.measurement.results import LIMITS, Limits, Measurement, Outcome
from tcomp.autotune.measurement.worker_process import Answer, WorkerProcess, reason_of
from tcomp.autotune.tasks import Task, instantiate
from tcomp.errors import InputError, ScheduleError
from tcomp.runtime.host import core_of
from tcomp.schedules.knobs import Decisions, encode
from tcomp.target import Target

_T = TypeVar("_T")

_SEED = 0  # of the inputs
_CACHED = 64  # shared objects of candidates that may be asked for again
_POLL = 5.0  # seconds between two queries of a cluster while waiting for a result


@dataclass(frozen=True)
class Job:
    """The input of `Runner.run`, which measures a candidate on this machine or another: the task's key, whether it runs on a device, its
    threads, and the requests that prepare the measuring process for the task and measure the candidate (see `worker`)."""

    key: str
    on_device: bool
    threads: int
    prepare: Answer
    measure: Answer


class Runner:
    """The measuring process of this machine, pinned to as many cores as there are threads. Jobs of one task in a row are cheapest."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._worker: WorkerProcess | None = None
        self._kind: tuple[bool, int] | None = None  # whether on a device, and the threads
        self._prepared: tuple[str, int | None, str] = "", None, ""  # a task, in which process, and why its default schedule cannot be run

    def run(self, job: Job) -> Measurement:
        """Measure one candidate."""
        if self._worker is None or self._kind != (job.on_device, job.threads):
            self.close()
            module, memory, cpus = ("worker_gpu", None, []) if job.on_device else ("worker", self._limits.bytes, cores(job.threads))
            self._worker, self._kind = WorkerProcess(f"tcomp.autotune.measurement.{module}", memory, cpus), (job.on_device, job.threads)
        key, pid, failure = self._prepared
        if key != job.key or (not failure and pid != self._worker.pid):
            answer = self._worker.ask(job.prepare, self._limits.running)
            failure = "" if answer["status"] == Outcome.OK else f"{answer['status']}: {answer['reason']}"
            self._prepared = job.key, self._worker.pid, failure
        if failure:
            return Measurement(Outcome.ERROR, reason=f"the default schedule cannot be measured: {failure}")
        return Measurement.from_answer(self._worker.ask(job.measure, self._limits.running))

    def close(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class Measurer(AbstractContextManager["Measurer"]):
    """Makes, builds and measures candidates on this machine; its processes end with the block. `builders` is the number of building
    processes (default: one for each core that this process may use)."""

    def __init__(self, builders: int | None = None, limits: Limits = LIMITS) -> None:
        self.limits = limits
        count = builders or len(os.sched_getaffinity(0))
        self._builders = [WorkerProcess("tcomp.autotune.measurement.builder", limits.bytes) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count, "tcomp-build")
        self._runner = Runner(limits)
        self._built: dict[str, Answer] = {}
        self._maker: dict[str, int] = {}  # which builder has the loops of a candidate

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._runner.close()
        for builder in self._builders:
            builder.close()
        self._pool.shutdown()

    def summarize(self, task: Task, wanted: Sequence[Decisions]) -> list[CandidateSummary | Measurement]:
        """The candidates of some decisions, in order; a record where there is none. Raises nothing on account of a candidate."""
        if is_local(task):
            return summarize_here(task, wanted)
        keys = [_key(task, decisions) for decisions in wanted]
        answers = self._ask({key: summary_request(task, decisions) for key, decisions in zip(keys, wanted, strict=True)})
        found: list[CandidateSummary | Measurement] = []
        for builder, answer in map(answers.__getitem__, keys):
            if answer["status"] == Outcome.OK:
                found.append(summary := CandidateSummary.from_json(answer["summary"]))
                self._maker[_key(task, summary.decisions)] = builder
            else:
                found.append(Measurement.from_answer(answer))
        _shorten(self._maker, _CACHED * len(self._builders))
        return found

    def measure(self, task: Task, candidates: Sequence[Decisions], incumbent: Decisions | None = None) -> list[Measurement]:
        """Measure candidates against the incumbent (default: the default schedule), in order. Raises nothing on account of a candidate."""
        return list(self.measure_each(task, candidates, incumbent))

    def measure_each(self, task: Task, candidates: Sequence[Decisions], incumbent: Decisions | None = None) -> Iterator[Measurement]:
        """As `measure`, but yields each result as soon as it is known. All candidates are built before the first is run, so that nothing
        else runs during measurements."""
        reference, opponent, *rest = self._build(task, [{}, incumbent or {}, *candidates])
        pool = {"threads": task.threads, "flush_bytes": task.backend.flush_bytes(task.threads)}
        harness = self._harness(task, pool)
        for what, answer in (("the default schedule: ", reference), ("the incumbent schedule: ", opponent), ("", harness)):
            if answer["status"] != Outcome.OK:
                yield from [Measurement(Outcome.ERROR, reason=what + answer["reason"])] * len(rest)
                return
        prepare = {"do": "prepare", **pool, "harness": harness["harness"], "reference": reference, "seed": _SEED}
        measure = {"do": "measure", "incumbent": opponent, "rounds": self.limits.rounds, "seconds": self.limits.seconds}
        make = partial(Job, task.key, task.backend.on_device, task.threads, prepare)
        built = [answer["status"] == Outcome.OK for answer in rest]
        jobs = [make({**measure, "candidate": a}) if ok else Measurement.from_answer(a) for a, ok in zip(rest, built, strict=True)]
        yield from self._run(task, jobs)

    def _run(self, task: Task, jobs: Sequence[Job | Measurement]) -> Iterator[Measurement]:
        """Measurements in order; that of a candidate that could not be built stands in place of its job."""
        yield from (job if isinstance(job, Measurement) else self._runner.run(job) for job in jobs)

    def _build(self, task: Task, wanted: Sequence[Decisions]) -> list[Answer]:
        """The answers of the builders for some decisions of a task, in order."""
        keys = [_key(task, decisions) for decisions in wanted]
        found, requests = dict(self._built), dict[str, Answer]()
        for key, decisions in zip(keys, wanted, strict=True):
            if key not in found and key not in requests:
                try:
                    requests[key] = build_request(task, decisions)
                except Exception as error:  # noqa: BLE001  a user's schedule function may raise anything
                    found[key] = _failed(error)
        found |= {key: answer for key, (_, answer) in self._ask(requests).items()}
        for key in keys[:2]:  # the default schedule and the incumbent
            self._built.pop(key, None)
            if found[key]["status"] == Outcome.OK:
                self._built[key] = found[key]
        _shorten(self._built, _CACHED)
        return [found[key] for key in keys]

    def _harness(self, task: Task, pool: Mapping[str, int]) -> Answer:
        """The harness of the measuring process; see `builder.harness`."""
        if task.backend.on_device:
            return {"status": Outcome.OK, "harness": ""}
        key = f"{task.target} {task.threads}"
        if key in self._built:
            return self._built[key]
        _, answer = self._ask({key: {"do": "harness", "target": task.target, **pool}})[key]
        if answer["status"] == Outcome.OK:
            self._built[key] = answer
        return answer

    def _ask(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, Answer]]:
        """Which builder answered each request, and what. An idle builder prefers candidates whose loops it has made."""
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


@dataclass(frozen=True)
class Cluster:
    """A Dask cluster: the `address` of its scheduler ("tcp://host:8786" or "tls://host:8786") and, for TLS, the names of PEM files: the
    certificate of the authority that has signed those of the cluster (`ca`), this client's `certificate` and its private `key`. Without
    them, what Dask's configuration says of `distributed.comm.tls` holds.

    Scheduler and workers run what clients send them, and clients load what they answer (pickles): all of them have to trust each other.
    Over tcp://, that is everyone who can reach the scheduler; over tls://, those with a certificate of this authority. Host names in
    certificates are not compared, so the authority should be one for this cluster alone.
    """

    address: str
    ca: str = ""
    certificate: str = ""
    key: str = ""

    def connect(self, timeout: float) -> Any:
        """A client of the cluster. Raises `InputError` if there is none within `timeout` seconds, it is not to be trusted, or the package
        `distributed` is not installed."""
        files = {"--cluster-ca": self.ca, "--cluster-cert": self.certificate, "--cluster-key": self.key}
        encrypted = self.address.startswith("tls://")
        if missing := [name for name, file in files.items() if not file and any(files.values())]:
            raise InputError(f"{', '.join(missing)} is missing", why="TLS takes an authority, a certificate and a key")
        if any(files.values()) and not encrypted:
            raise InputError(
                f"{self.address} is not encrypted", why="certificates are for tls:// addresses", hint="--cluster tls://host:8786"
            )
        try:
            from distributed import Client  # an optional package
            from distributed.security import Security

            given = {"tls_ca_file": self.ca, "tls_client_cert": self.certificate, "tls_client_key": self.key} if self.ca else {}
            security = Security(require_encryption=True, **given) if encrypted else None

            def connected() -> Any:
                client = Client.__new__(Client)
                try:
                    client.__init__(self.address, timeout=timeout, set_as_default=False, security=security)
                except BaseException:
                    # Not left to the garbage collector: it deadlocks if it finalizes a client while another one is starting.
                    with suppress(AttributeError, TimeoutError):  # it failed before it had anything to close; it does not answer
                        client.close()
                    raise
                return client

            return _within(2 * timeout, connected)
        except ImportError:
            raise InputError("measuring on a cluster needs the package `distributed`", hint="pip install 'tcomp[cluster]'") from None
        except (OSError, ValueError, TypeError, RuntimeError) as error:  # TypeError, RuntimeError: TLS without certificates
            raise InputError(f"there is no Dask cluster at {self.address}", why=str(error)) from None


class ClusterMeasurer(Measurer):
    """Builds on this machine and measures on the workers of a Dask cluster. A worker declares its target by a resource (`target.machine`)
    and takes one job at a time: `dask worker tcp://scheduler:8786 --nthreads 1 --no-nanny --resources "x86_64-cascadelake=1"`.

    `cluster` is a `Cluster`, or the address of its scheduler. If there is no worker for the target for `patience` seconds, candidates are
    not measured. Raises `InputError` if there is no such cluster, or no package for it."""

    def __init__(self, cluster: Cluster | str, builders: int | None = None, limits: Limits = LIMITS, patience: float = 60.0) -> None:
        self._client = (Cluster(cluster) if isinstance(cluster, str) else cluster).connect(patience)
        super().__init__(builders, limits)
        self._patience = patience

    def close(self) -> None:
        """Leave the cluster, and end all processes here."""
        super().close()
        self._client.close()

    def workers(self, target: Target) -> int:
        """How many workers are machines of this target. Raises `TimeoutError` if the scheduler does not answer."""
        info = _within(self._patience, lambda: self._client.scheduler_info(n_workers=-1))
        return sum(worker["resources"].get(target.machine, 0) >= 1 for worker in info["workers"].values())

    def _run(self, task: Task, jobs: Sequence[Job | Measurement]) -> Iterator[Measurement]:
        # One call for each job, though they have much in common: a worker that joins later needs all of it.
        options = {"resources": {task.backend.target.machine: 1}, "pure": False, "retries": 1}
        found = [job if isinstance(job, Measurement) else self._client.submit(_run_job, job, self.limits, **options) for job in jobs]
        try:
            yield from (result if isinstance(result, Measurement) else self._result(task, result) for result in found)
        finally:
            rest = [future for future in found if not isinstance(future, Measurement) and not future.done()]
            with suppress(OSError, RuntimeError):  # the scheduler is gone, or the client was closed
                _within(self._patience, lambda: self._client.cancel(rest))

    def _result(self, task: Task, future: Any) -> Measurement:
        waited = 0.0
        try:
            while waited < self._patience:
                try:
                    return cast(Measurement, future.result(timeout=_POLL))
                except TimeoutError:
                    if future.done():
                        raise
                    waited = 0.0 if self.workers(task.backend.target) else waited + _POLL
        except Exception as error:  # noqa: BLE001  lost with several workers, or whatever a worker raised
            return Measurement(Outcome.ERROR, reason=f"the cluster: {reason_of(error)}")
        return Measurement(Outcome.ERROR, reason=f"no worker of the cluster is a `{task.backend.target.machine}`")


def _within(seconds: float, ask: Callable[[], _T]) -> _T:
    """The result of `ask()`. Raises `TimeoutError` after `seconds`; the asking thread is left behind then. Dask bounds the time of
    connecting, but not that of the handshake that follows, nor of questions to a scheduler."""
    answer = Future[_T]()

    def asking() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001  handed to the caller
            answer.set_exception(error)

    thread = Thread(target=asking, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()


_one_at_a_time = Lock()
_cluster_runner = lru_cache(maxsize=1)(Runner)  # the measuring process of a worker of the cluster


def _run_job(job: Job, limits: Limits) -> Measurement:
    with _one_at_a_time:
        return _cluster_runner(limits).run(job)


def _key(task: Task, decisions: Decisions) -> str:
    return f"{task.key} {encode(decisions)}"


def _shorten(cache: dict[str, Any], size: int) -> None:
    while len(cache) > size:
        del cache[next(iter(cache))]


def summarize_here(task: Task, wanted: Iterable[Decisions]) -> list[CandidateSummary | Measurement]:
    """`Measurer.summarize`, in this process."""
    found: list[CandidateSummary | Measurement] = []
    for decisions in wanted:
        try:
            found.append(CandidateSummary.of(instantiate(task, decisions)))
        except Exception as error:  # noqa: BLE001  a user's schedule function may raise anything
            found.append(Measurement.from_answer(_failed(error)))
    return found


def _failed(error: Exception) -> Answer:
    return {"status": Outcome.REFUSED if isinstance(error, ScheduleError) else Outcome.ERROR, "reason": reason_of(error)}


def cores(threads: int, root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """As many processors as threads, of different cores where there are enough; all that this process may use if it may use fewer."""
    usable = sorted(os.sched_getaffinity(0))
    first = {core_of(cpu, root): cpu for cpu in usable}.values()  # the last of each core, as the first ones have more interrupts to handle
    return sorted(sorted(usable, key=lambda cpu: (cpu not in first, -cpu))[:threads])
