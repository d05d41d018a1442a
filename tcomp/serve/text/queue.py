"""The texts that clients ask one model for, and the thread that computes them, a token of each at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple, Self

from tcomp.generation import Generator, Piece, Request, Scheduler
from tcomp.generation.request import Finish
from tcomp.serve.metrics import ModelMetrics
from tcomp.serve.options import ModelOptions
from tcomp.serve.refusals import Refusal

_log = logging.getLogger("tcomp.serve")


class Progress(NamedTuple):
    """One more piece of the text with this number, and why it ends, if it does."""

    number: int
    piece: Piece
    finish: Finish | None


class Texts:
    """Texts that one client waits for. Used in a `with`, at whose end those that are not whole are given up."""

    def __init__(self, queue: TextQueue, requests: Sequence[Request], deadline: float | None) -> None:
        self.requests, self.deadline, self.arrived = requests, deadline, time.monotonic()
        self._left = sum(request.finish is None for request in requests)  # now: the thread may end them before somebody asks
        self._queue, self._found = queue, asyncio.Queue[Progress | Exception]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.leave(self)

    async def pieces(self) -> AsyncIterator[Progress]:
        """What is computed, until all texts are whole. Raises what any of them ended with."""
        while self._left:
            found = await self._found.get()
            if isinstance(found, Exception):
                raise found
            self._left -= found.finish is not None
            yield found

    def deliver(self, found: Sequence[Progress | Exception]) -> None:
        """In the event loop: what the thread has computed."""
        for one in found:
            self._found.put_nowait(one)


class TextQueue:
    """It belongs to the event loop in which it was made; its methods are called there."""

    def __init__(self, name: str, generator: Generator, options: ModelOptions, metrics: ModelMetrics) -> None:
        self.generator = generator
        self._scheduler = Scheduler(generator.model, options.max_batch)
        self._options, self._metrics, self._loop = options, metrics, asyncio.get_running_loop()
        self._changed = threading.Condition()  # guards the next three
        self._joining, self._leaving = deque[Texts](), deque[Texts]()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"{name}-text", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return len(self._scheduler.waiting) + sum(len(texts.requests) for texts in self._joining)

    def join(self, requests: Sequence[Request]) -> Texts:
        """Have texts computed, together with those of others. Raises Refusal where too many wait."""
        if self.waiting + len(requests) > self._options.max_queue + self._options.max_batch:
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, f"too many texts wait: {self.waiting}", hint="try again later", retry_after=1.0)
        limit = self._options.timeout_ms
        texts = Texts(self, requests, None if limit is None else time.monotonic() + limit / 1e3)
        with self._changed:
            self._joining.append(texts)
            self._changed.notify()
        return texts

    def leave(self, texts: Texts) -> None:
        """Nobody waits for these any more."""
        with self._changed:
            self._leaving.append(texts)
            self._changed.notify()

    async def close(self) -> None:
        """Compute what is asked for, and end the thread. No more requests may come."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        owners: dict[Request, tuple[Texts, int]] = {}
        while True:
            with self._changed:
                while not (owners or self._joining or self._leaving or self._closing):
                    self._changed.wait()
                if self._closing and not owners and not self._joining:
                    return
                joining, leaving = list(self._joining), list(self._leaving)
                self._joining.clear()
                self._leaving.clear()
            for texts in joining:
                for number, request in enumerate(texts.requests):
                    if request.finish is None:
                        owners[request] = texts, number
                        self._scheduler.add(request)
            now = time.monotonic()
            for texts in {texts for texts, _ in owners.values() if texts.deadline is not None and now > texts.deadline}:
                self._tell(texts, [Refusal(HTTPStatus.GATEWAY_TIMEOUT, "the deadline of the request has passed")])
                leaving.append(texts)
            for texts in leaving:
                for request in texts.requests:
                    self._scheduler.remove(request)
                    owners.pop(request, None)
            if owners:
                self._step(owners)

    def _step(self, owners: dict[Request, tuple[Texts, int]]) -> None:
        start, found = time.monotonic(), dict[Texts, list[Progress | Exception]]()
        try:
            for done in self._scheduler.step():
                texts, number = owners[done.request]
                if done.piece is None or done.error is not None:
                    found.setdefault(texts, []).append(done.error or RuntimeError("a step without a result"))
                else:
                    found.setdefault(texts, []).append(Progress(number, done.piece, done.request.finish))
                if done.error is not None or done.request.finish is not None:
                    del owners[done.request]
                    self._metrics.finished(start - texts.arrived, time.monotonic() - texts.arrived)
        except Exception as error:  # noqa: BLE001  whatever it is, the thread must go on
            _log.exception("a step of texts failed")
            for request, (texts, _) in owners.items():
                self._scheduler.remove(request)
                found[texts] = [error]
            owners.clear()
        self._metrics.ran(max(1, sum(map(len, found.values()))), time.monotonic() - start)
        for texts, progress in found.items():
            self._tell(texts, progress)

    def _tell(self, texts: Texts, found: Sequence[Progress | Exception]) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(texts.deliver, found)
