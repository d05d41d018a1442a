"""One kernel by all contenders, in turns: right or wrong, and how fast."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import BENCHMARKS
from .contenders import CLANG, GCC, Run, aligned, available, compiled_c, contender, polly
from .suite import Arrays

PAUSE_S = 0.01  # before each run, for the spinning threads of the one before to go to sleep
SHORT_S = 0.2  # a contender is run at least this long in all, so that short kernels have many runs
MOST_RUNS = 50
WARM_MS = 20.0  # shorter ones run once untimed before each timed run: after the pause, all code would come from memory
Result = dict[str, Any]


def measure(name: str, dataset: str, threads: int, rounds: int) -> Result:
    """Times of one kernel in ms by contender, and the largest deviation from gcc's results."""
    benchmark = BENCHMARKS[name]
    kernel = benchmark.kernel(benchmark.sizes(dataset))
    result: Result = {"kernel": name, "sizes": benchmark.sizes(dataset), "min_ms": {}, "median_ms": {}, "errors": {}, "regions": {}}
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="polybench-") as folder:
        gcc = compiled_c(kernel, GCC, Path(folder), "gcc", threads)
        runs["gcc"] = gcc.run
        if available(CLANG):
            for c, made in polly(kernel, Path(folder), threads).items():
                runs[c] = made.run
                result["regions"][c] = made.regions
        start = time.perf_counter()
        runs["tcomp"] = contender(kernel, threads)
        result["compile_s"] = time.perf_counter() - start
        start_arrays = benchmark.arrays(benchmark.sizes(dataset))
        arrays = [aligned(b) for b in kernel.buffers]
        times: dict[str, list[float]] = {c: [] for c in runs}

        def reset() -> None:
            for array, initial in zip(arrays, start_arrays.values(), strict=True):
                np.copyto(array, initial)

        def once(run: Run, warm: bool = False) -> float:
            reset()
            time.sleep(PAUSE_S)
            if warm:
                run(arrays)
                reset()
            begin = time.perf_counter()
            run(arrays)
            return 1e3 * (time.perf_counter() - begin)

        expected: Arrays = {}
        for c, run in list(runs.items()):
            times[c].append(once(run))
            found = benchmark.results({b.name: a.copy() for b, a in zip(kernel.buffers, arrays, strict=True) if b in kernel.outputs})
            expected = expected or found
            result["errors"][c] = deviation(found, expected)
        while min(map(len, times.values())) < rounds or (
            max(map(len, times.values())) < MOST_RUNS and min(map(sum, times.values())) < 1e3 * SHORT_S
        ):
            for c, run in runs.items():
                times[c].append(once(run, warm=times[c][0] < WARM_MS))
    for c, taken in times.items():
        result["min_ms"][c], result["median_ms"][c] = min(taken), statistics.median(taken)
    return result


def deviation(found: Arrays, expected: Arrays) -> float:
    """The largest difference, relative to the largest magnitude of its array; nan where something is not finite."""
    return max(float(np.abs(a - expected[n]).max() / (np.abs(expected[n]).max() or 1)) for n, a in found.items())
