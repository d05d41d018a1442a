"""Time: what it is spent on, and when it is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self


class PhaseClock:
    """Seconds by phase of the work; a phase inside of another one does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since, self._phase = time.monotonic(), "overhead"

    def _switch(self, phase: str) -> str:
        now, before = time.monotonic(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._since, self._phase = now, phase
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of the block counts for this phase."""
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def stop(self) -> dict[str, float]:
        """Seconds by phase until now."""
        self._switch(self._phase)
        return self.seconds


class Watchdog:
    """Calls `end` from a thread once it is later than `deadline()` says, whatever is waited for then. `expired` says whether it did."""

    def __init__(self, deadline: Callable[[], float], end: Callable[[], None]) -> None:
        self._deadline, self._end, self._stop, self.expired = deadline, end, threading.Event(), False
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            if time.monotonic() > self._deadline():
                self.expired = True
                self._end()
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
