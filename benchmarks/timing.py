"""How benchmarks measure in one process: contenders in turns, least times, since what disturbs a run only adds to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

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


def least_by_clocks(
    calls: Mapping[str, Call], clocks: Sequence[Callable[[], float]], rounds: int, seconds: float = 0.0
) -> dict[str, list[float]]:
    """The least that each clock says of a run of each call, in turns of one run: `rounds`, and more until `seconds` are over."""
    least, end, turn = {name: [math.inf] * len(clocks) for name in calls}, time.perf_counter() + seconds, 0
    while turn < rounds or time.perf_counter() < end:
        for name, call in calls.items():
            before = [clock() for clock in clocks]
            call()
            least[name] = [min(best, clock() - start) for best, clock, start in zip(least[name], clocks, before, strict=True)]
        turn += 1
    return least


def geomean(ratios: Sequence[float]) -> float:
    """The geometric mean of positive numbers, at least one."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: of the ranks, those of equal numbers being the mean of their places. NaN for fewer than three."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        return ((last - counts + last - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1]) if len(a) > 2 else math.nan
