"""Several texts at the same time: each step computes one more token of every one, and a part of a prompt that is new."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tcomp.errors import TcompError
from tcomp.generation.batch import Batch
from tcomp.generation.request import Piece, Request
from tcomp.generation.slots import Slot, largest_batch
from tcomp.runtime import Module


@dataclass(eq=False)
class Progress:
    """What a step did for a request: the next piece of its text, or why there is none."""

    request: Request
    piece: Piece | None = None
    error: TcompError | None = None


@dataclass
class Scheduler:
    """Requests join and leave between steps. One that begins like what a slot holds takes that slot, and computes what is new.

    model: Module, a language model with state
    most: int, how many texts grow at the same time; more wait, in the order in which they came. A model with a batch computes a token of
        each of them in one run

    One thread at a time uses it.
    """

    model: Module
    most: int = 1
    waiting: deque[Request] = field(default_factory=deque)
    _slots: list[Slot] = field(default_factory=list)
    _running: dict[Request, Slot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        largest = largest_batch(self.model)
        self._batch = Batch(self.model) if largest > 1 else None
        self.most = min(self.most, largest) if largest > 1 else self.most

    @property
    def running(self) -> list[Request]:
        """The requests that have a slot."""
        return list(self._running)

    def add(self, request: Request) -> None:
        """Take a request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if self._running.pop(request, None) is None and request in self.waiting:
            self.waiting.remove(request)

    def step(self, timeout: float | None = None) -> list[Progress]:
        """One more token of each text that grows, and one run towards the oldest prompt that is not read. A request leaves with its last
        token, or with what went wrong with it. `timeout` is in seconds, of each run."""
        while self.waiting and len(self._running) < self.most:
            self._join(self.waiting.popleft())
        behind = {request: len(request.tokens) - slot.common(request.tokens) for request, slot in self._running.items()}
        growing = [request for request, tokens in behind.items() if tokens == 1]
        reading = [request for request, tokens in behind.items() if tokens != 1][:1]
        found = self._together(growing, timeout) if self._batch is not None else self._apart(growing, timeout)
        found += self._apart(reading, timeout)
        for progress in found:
            if progress.error is not None or progress.request.finish is not None:
                del self._running[progress.request]
        return found

    def _apart(self, requests: Sequence[Request], timeout: float | None) -> list[Progress]:
        """A run for each request."""
        found = []
        for request in requests:
            try:
                logits = self._running[request].advance(request.tokens, timeout)
                if logits is not None:
                    found.append(Progress(request, request.advance(logits)))
            except TcompError as error:
                found.append(Progress(request, error=error))
        return found

    def _together(self, requests: Sequence[Request], timeout: float | None) -> list[Progress]:
        """One run for all requests, if there are several."""
        assert self._batch is not None
        self._batch.gather([self._running[request] for request in requests] if len(requests) > 1 else [])
        if len(requests) < 2:
            return self._apart(requests, timeout)
        try:
            logits = self._batch.advance([request.tokens[-1] for request in requests], timeout)
        except TcompError as error:
            return [Progress(request, error=error) for request in requests]
        found = []
        for request, row in zip(requests, logits, strict=True):
            try:
                found.append(Progress(request, request.advance(row)))
            except TcompError as error:
                found.append(Progress(request, error=error))
        return found

    def _join(self, request: Request) -> None:
        """Give it the free slot that holds most of it, if that is half of what the slot holds, or there may be no more slots; else a new
        one, so that others that go on find what they left. Of slots that are as good, it takes the one that was used least recently."""
        free = [slot for slot in self._slots if slot not in self._running.values()]
        best = max(free, key=lambda slot: slot.common(request.tokens), default=None)
        if best is None or (2 * best.common(request.tokens) < len(best.tokens) and len(self._slots) < self.most):
            best = Slot(self.model)
        else:
            self._slots.remove(best)
        self._slots.append(best)
        self._running[request] = best
