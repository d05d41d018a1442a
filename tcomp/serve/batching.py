"""Requests of one model that wait, and the threads that compute them in batches.

An instance, a thread, takes its share of what waits as soon as it is free: rows of requests whose arrays have the same shapes but for the
first axis. So batches grow with the load, and nobody waits for others while an instance is free, unless `max_delay_us` says so.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from http import HTTPStatus
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError, StoppedError
from tcomp.serve.batch_sizes import BatchSizes
from tcomp.serve.metrics import ModelMetrics
from tcomp.serve.options import ModelOptions
from tcomp.serve.refusals import Refusal

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Signature: TypeAlias = tuple[tuple[int, ...], ...]
QUICK = 1e-4  # seconds: a run that is shorter takes less time than handing it to another thread and back
_STAGED = 64 << 20  # bytes of arrays for inputs of batches that an instance keeps
_RECENT_SHARE = 0.1  # of a new time in the running mean
_SURPRISE = 8.0  # means: a run that takes longer was interrupted, or is the first of many, which say so again


class Runs(Protocol):
    """What computes: a `tcomp.runtime.LoadedModel`."""

    def run(self, inputs: Mapping[str, object], out: Mapping[str, object] | None = None, timeout: float | None = None) -> Arrays:
        """The outputs."""
        ...


class Pending:
    """A request that waits or runs. `queued` is how long (seconds) it waited; `deadline` is by time.monotonic; `context` has its span."""

    __slots__ = ("abandoned", "arrived", "context", "deadline", "inputs", "queued", "result", "rows", "signature")

    def __init__(self, inputs: Arrays, rows: int, signature: Signature, deadline: float | None, result: asyncio.Future[Arrays]) -> None:
        self.inputs, self.rows, self.signature, self.deadline, self.result = inputs, rows, signature, deadline, result
        self.arrived, self.queued, self.abandoned, self.context = time.monotonic(), 0.0, False, copy_context()


class Batcher:
    """The queue and the instances of one model. It belongs to the event loop in which it was made; its methods are called there."""

    def __init__(
        self, name: str, models: tuple[Runs, Runs], sizes: BatchSizes, instances: int, options: ModelOptions, metrics: ModelMetrics
    ) -> None:
        """`models` are the model for a run that is alone, and for several at the same time; `sizes` says how many rows, along the first
        axis of all inputs and outputs, may be computed together."""
        self._model, self._crowded = models
        self._options, self._metrics, self._instances, self._sizes = options, metrics, instances, sizes
        self._batched = sizes.most > 1
        self._preferred = sorted(options.preferred) if self._batched else []
        self._delay = options.max_delay_us / 1e6 if self._batched else 0.0
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Pending] = deque()
        self._changed = threading.Condition()  # guards the queue, `_busy` and `_closing`
        self._busy, self._closing = 0, False
        self._mean = QUICK * 10  # seconds of a run
        self.on_slow: Callable[[Arrays, float], None] | None = None  # gets inputs and seconds of every run, in its thread, after its answer
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(instances)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    async def infer(self, inputs: Arrays, deadline: float | None = None) -> Arrays:
        """The outputs for one request. `deadline` is by time.monotonic. Raises Refusal where too many wait or the deadline passes, else as
        `LoadedModel.run`. Who cancels it takes the request out of the queue."""
        if deadline is None and self._options.timeout_ms is not None:
            deadline = time.monotonic() + self._options.timeout_ms / 1e3
        if self._mean < QUICK and not self._busy and not self._queue:
            return self._at_once(inputs, deadline)
        rows, signature = self._shape_of(inputs)
        pending = Pending(inputs, rows, signature, deadline, self._loop.create_future())
        with self._changed:
            if len(self._queue) >= self._options.max_queue:
                what = f"too many requests wait: {len(self._queue)}"
                raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, what, hint="try again later", retry_after=self._patience())
            self._queue.append(pending)
            self._changed.notify()
        alarm = self._loop.call_later(max(0.0, deadline - pending.arrived), _expire, pending) if deadline is not None else None
        try:
            outputs = await pending.result
        except (asyncio.CancelledError, Refusal):
            pending.abandoned = True
            with self._changed, suppress(ValueError):  # it is not there if it runs
                self._queue.remove(pending)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
        self._metrics.finished(pending.queued, time.monotonic() - pending.arrived)
        return outputs

    async def close(self) -> None:
        """Compute what waits, and end the instances. No more requests may come."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _at_once(self, inputs: Arrays, deadline: float | None) -> Arrays:
        """Run a model that is quick here, in the thread of the event loop."""
        start = time.monotonic()
        if deadline is not None and start >= deadline:
            raise _late()
        outputs = self._model.run(inputs)
        seconds = time.monotonic() - start
        self._ran(1 if not self._batched else self._shape_of(inputs)[0], seconds)
        self._metrics.finished(0.0, seconds)
        return outputs

    def _patience(self) -> float:
        """How long (seconds) it takes to compute what waits, about."""
        return max(0.01, self._mean * len(self._queue) / self._instances)

    def _shape_of(self, inputs: Arrays) -> tuple[int, Signature]:
        if not self._batched:
            return 1, ()
        rows = {array.shape[0] if array.ndim else -1 for array in inputs.values()}
        if len(rows) != 1 or -1 in rows:  # which the model will refuse
            return self._sizes.most, ()
        return rows.pop(), tuple([array.shape[1:] for array in inputs.values()])

    def _take(self) -> tuple[list[Pending], Runs] | None:
        """The next batch, once there is one, and what is to run it; None at the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                while self._queue and self._queue[0].abandoned:
                    self._queue.popleft()
                if not self._queue:
                    if self._closing:
                        return None
                    self._changed.wait()
                    continue
                batch, full = self._fitting()
                patience = batch[0].arrived + self._delay - now
                if not full and patience > 0 and not self._closing:
                    self._changed.wait(patience)
                    continue
                chosen = set(map(id, batch))
                self._queue = deque(p for p in self._queue if id(p) not in chosen) if len(chosen) < len(self._queue) else deque()
                self._busy += 1
                if self._queue:
                    self._changed.notify()  # another instance may be free
                for pending in batch:
                    pending.queued = now - pending.arrived
                return batch, self._crowded if self._queue or self._busy > 1 else self._model

    def _fitting(self) -> tuple[list[Pending], bool]:
        """The oldest request and those behind it that can be computed with it, and whether there is no use in waiting for more."""
        oldest = self._queue[0]
        batch, rows = [oldest], oldest.rows
        if not self._batched or oldest.signature == ():
            return batch, True
        limit = self._sizes.rows(sum(a.nbytes for a in oldest.inputs.values()) // max(1, rows))
        full = self._preferred[-1] if self._preferred else limit
        share = -(-sum(p.rows for p in self._queue) // (self._instances - self._busy)) if self._instances > 1 else limit
        most = limit if self._delay else min(limit, share)  # who waits for others means to have them
        cut, cut_rows = 1, rows
        for pending in self._queue:
            if pending is oldest or pending.abandoned or pending.signature != oldest.signature or rows + pending.rows > most:
                continue
            batch.append(pending)
            rows += pending.rows
            if rows in self._preferred:
                cut, cut_rows = len(batch), rows
            if rows >= most:
                break
        if self._preferred and rows > cut_rows and cut_rows in self._preferred:
            return batch[:cut], cut_rows >= full
        return batch, rows >= full

    def _work(self) -> None:
        staging = _Staging()
        while (taken := self._take()) is not None:
            batch, model = taken
            results = self._compute(batch, model, staging)
            with self._changed:
                self._busy -= 1
            with suppress(RuntimeError):  # the loop has ended: nobody waits any more
                self._loop.call_soon_threadsafe(_deliver, batch, results)
            if self.on_slow is not None and staging.inputs:
                batch[0].context.run(self.on_slow, staging.inputs, staging.seconds)
            staging.inputs = {}
            del taken, batch, results  # not kept while nothing happens

    def _compute(self, batch: Sequence[Pending], model: Runs, staging: _Staging) -> list[Arrays | Exception]:
        """The outputs, or what went wrong, for each request."""
        deadlines = [p.deadline for p in batch if p.deadline is not None]
        now = time.monotonic()
        timeout = max(deadlines) - now if len(deadlines) == len(batch) else None
        if timeout is not None and timeout <= 0:
            return [_late() for _ in batch]
        try:
            inputs = batch[0].inputs if len(batch) == 1 else staging.stacked(batch)
            outputs = model.run(inputs, timeout=timeout)
        except InputError as error:
            if len(batch) == 1:
                return [error]
            return [result for pending in batch for result in self._compute([pending], model, staging)]  # only one of them may be wrong
        except StoppedError:  # by the latest deadline of the batch
            return [_late() for _ in batch]
        except Exception as error:  # noqa: BLE001  whatever it is, the instance must go on
            return [error for _ in batch]
        staging.inputs, staging.seconds = inputs, time.monotonic() - now
        self._ran(sum(p.rows for p in batch), staging.seconds)
        if len(batch) == 1:
            return [outputs]
        results: list[Arrays | Exception] = []
        start = 0
        for pending in batch:
            end = start + pending.rows
            results.append({name: array[start:end] for name, array in outputs.items()})
            start = end
        return results

    def _ran(self, rows: int, seconds: float) -> None:
        self._mean += _RECENT_SHARE * (min(seconds, _SURPRISE * self._mean) - self._mean)
        self._metrics.ran(rows, seconds)


class _Staging:
    """What an instance keeps between runs: arrays for the inputs of batches, as new ones cost page faults; inputs and seconds of the last
    run."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, int, tuple[int, ...]], npt.NDArray[Any]] = {}
        self.inputs: Arrays = {}
        self.seconds = 0.0

    def stacked(self, batch: Sequence[Pending]) -> Arrays:
        """The inputs of all requests, one after the other; overwritten by the next batch."""
        rows = sum(p.rows for p in batch)
        found = {}
        for name, first in batch[0].inputs.items():
            key = name, rows, first.shape[1:]
            if (array := self._arrays.get(key)) is None or array.dtype != first.dtype:
                array = np.empty((rows, *first.shape[1:]), first.dtype)
                if sum(a.nbytes for a in self._arrays.values()) + array.nbytes > _STAGED:
                    self._arrays.clear()
                self._arrays[key] = array
            found[name] = np.concatenate([p.inputs[name] for p in batch], out=array)
        return found


def _late() -> Refusal:
    return Refusal(HTTPStatus.GATEWAY_TIMEOUT, "the deadline of the request has passed")


def _expire(pending: Pending) -> None:
    pending.abandoned = True
    if not pending.result.done():
        pending.result.set_exception(_late())


def _deliver(batch: Sequence[Pending], results: Sequence[Arrays | Exception]) -> None:
    for pending, result in zip(batch, results, strict=True):
        if pending.result.done():  # too late, or nobody waits
            continue
        if isinstance(result, Exception):
            pending.result.set_exception(result)
        else:
            pending.result.set_result(result)
