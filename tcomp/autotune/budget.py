"""Time: what it is spent on, and when it is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self


class Clock:
    """Seconds by what they were spent on; what is inside of another phase counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since, self._phase = time.monotonic(), "overhead"

    def _switch(self, phase: str) -> str:
        now, before = time.monotonic(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._since, self._phase = now, phase
        return before

    @contextmanager
    def spent(self, phase: str) -> Iterator[None]:
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def stop(self) -> dict[str, float]:
        self._switch(self._phase)
        return self.seconds


class Watch:
    """Calls `end` once it is later than `when()` says, from a thread: whatever is waited for then. `over` says whether that happened."""

    def __init__(self, when: Callable[[], float], end: Callable[[], None]) -> None:
        self._when, self._end, self._stop, self.over = when, end, threading.Event(), False
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            if time.monotonic() > self._when():
                self.over = True
                self._end()
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
