"""How benchmarks measure in one process: contenders in turns, least times, since what disturbs a run only adds to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = Callable[[], Any]


def least_times(calls: Mapping[str, Call], seconds: float, rounds: int) -> dict[str, float]:
    """The seconds of the fastest of many runs of each call, in `rounds` turns of `seconds` each; every other round in reverse order."""
    best = dict.fromkeys(calls, math.inf)
    for turn in range(rounds):
        for name in calls if turn % 2 else reversed(list(calls)):
            calls[name]()  # what the others left in the caches is replaced
            end, runs = time.perf_counter() + seconds, 0
            while runs < 3 or time.perf_counter() < end:
                start = time.perf_counter()
                calls[name]()
                best[name], runs = min(best[name], time.perf_counter() - start), runs + 1
    return best


def geomean(ratios: Sequence[float]) -> float:
    """The geometric mean of positive numbers, at least one."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
