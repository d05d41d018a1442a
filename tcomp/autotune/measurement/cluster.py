"""Measuring on many machines: candidates are built here and measured by the workers of a Dask cluster, each by `Runner.run`.

A worker says which target it is, so that the machine that builds may be another one. It takes one job at a time:

    dask worker tcp://scheduler:8786 --nthreads 1 --no-nanny --resources "x86_64-cascadelake=1"      # the name is `target.machine`

A job whose worker is lost is given to another one. Where all are lost for long, the rest are records that say so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from tcomp.autotune.measurement.measurer import Job, Measurer, Runner
from tcomp.autotune.measurement.results import LIMITS, Limits, Measurement, Outcome
from tcomp.autotune.measurement.worker_process import reason_of
from tcomp.autotune.tasks import Task
from tcomp.errors import InputError
from tcomp.target import Target

try:
    from distributed import Client
except ImportError:
    raise InputError("measuring on a cluster needs the package `distributed`", hint="pip install 'tcomp[cluster]'") from None

_POLL = 5.0  # seconds between two queries of the cluster while waiting for a result


class ClusterMeasurer(Measurer):
    """Builds here, measures on the workers of a Dask cluster. `address` is that of the scheduler. If there is no worker for the target
    for `patience` seconds, candidates are not measured. Raises `InputError` if there is no such cluster.
    """

    def __init__(self, address: str, builders: int | None = None, limits: Limits = LIMITS, patience: float = 60.0) -> None:
        super().__init__(builders, limits)
        self._patience = patience
        try:
            self._client: Any = Client(address, timeout=patience, set_as_default=False)
        except (OSError, ValueError) as error:
            super().close()
            raise InputError(f"there is no Dask cluster at {address}", why=str(error)) from None

    def close(self) -> None:
        """Leave the cluster, and end all processes here."""
        super().close()
        self._client.close()

    def workers(self, target: Target) -> int:
        """How many workers are machines of this target."""
        known = self._client.scheduler_info(n_workers=-1)["workers"].values()
        return sum(worker["resources"].get(target.machine, 0) >= 1 for worker in known)

    def _run(self, task: Task, jobs: Sequence[Job]) -> Iterator[Measurement]:
        resources = {task.backend.target.machine: 1}
        # One call for each job, though they have much in common: a worker that joins later needs all of it.
        futures = [
            None if job.build_failure else self._client.submit(run_job, job, self.limits, resources=resources, pure=False, retries=1)
            for job in jobs
        ]
        try:
            for job, future in zip(jobs, futures, strict=True):
                yield job.build_failure or self._result(task, future)
        finally:
            with suppress(OSError, RuntimeError):  # the scheduler is gone, or the client was closed
                self._client.cancel([f for f in futures if f is not None and not f.done()])

    def _result(self, task: Task, future: Any) -> Measurement:
        waited = 0.0
        try:
            while waited < self._patience:
                try:
                    found: Measurement = future.result(timeout=_POLL)
                    return found
                except TimeoutError:
                    if future.done():
                        raise
                    waited = 0.0 if self.workers(task.backend.target) else waited + _POLL
        except Exception as error:  # noqa: BLE001  lost with several workers, or whatever a worker raised
            return Measurement(Outcome.ERROR, reason=f"the cluster: {reason_of(error)}")
        return Measurement(Outcome.ERROR, reason=f"no worker of the cluster is a `{task.backend.target.machine}`")


def run_job(job: Job, limits: Limits) -> Measurement:
    """On a worker of the cluster: measure one candidate, in the measuring process of that machine."""
    with _one_at_a_time:
        return _runner(limits).run(job)


_one_at_a_time = threading.Lock()


@lru_cache(maxsize=1)
def _runner(limits: Limits) -> Runner:
    return Runner(limits)
