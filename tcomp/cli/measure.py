"""Latency, measured so that contenders do not disturb each other more than they must: warm, in turns, in short blocks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tcomp.options import Progress

_ROUNDS = 5
_PAUSE = 0.02  # seconds before a block: threads of the one before stop spinning and go to sleep
_FEWEST = 3  # runs that are timed in a block


@dataclass(frozen=True)
class Latency:
    """Seconds of single runs."""

    times: tuple[float, ...]

    @property
    def least(self) -> float:
        """Seconds of the fastest run."""
        return min(self.times)

    @property
    def median(self) -> float:
        """Median seconds of a run."""
        return statistics.median(self.times)


def interleaved(
    contenders: Mapping[str, Callable[[], object]], seconds: float, progress: Progress = lambda stage, done, total: None
) -> dict[str, Latency]:
    """Run each contender for about `seconds`, in blocks that take turns, each after runs that do not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    clock, block = time.perf_counter, seconds / _ROUNDS
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(_ROUNDS):
            for name, run in contenders.items():
                time.sleep(_PAUSE)
                run()
                run()
                begin, done = clock(), 0
                while done < _FEWEST or clock() - begin < block:
                    start = clock()
                    run()
                    times[name].append(clock() - start)
                    done += 1
            progress("measuring", number + 1, _ROUNDS)
    finally:
        if was_enabled:
            gc.enable()
    return {name: Latency(tuple(values)) for name, values in times.items()}
