"""The process that compares two compiled models, a program that knows nothing but how to run them. They take turns in short blocks, the
order alternating, so that whatever disturbs one disturbs the other (see `results.Rounds`)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.autotune.measurement.results import MIN_ROUNDS
from tcomp.autotune.measurement.worker import difference
from tcomp.autotune.measurement.worker_process import Answer, serve
from tcomp.runtime import LoadedModel, Module
from tcomp.runtime.cuda import CudaModule
from tcomp.runtime.manifest import from_saved

_PAUSE = 0.01  # seconds before a block: threads of the one before stop spinning and go to sleep
_MAX_ROUNDS = 60
_BLOCK = 0.01  # seconds of runs in a block, if one run does not take longer
_PROFILE_SHARE = 0.4  # of the time, for the profiles
_TOLERANCE = 1e-2  # of float results, relative: kernels were compared before, this is about gross mistakes


def handle(request: Answer) -> Answer:
    """Answer one request: seconds of the fastest runs of each round, of either model ("runs"), and of each kernel call, in program order
    ("kernels"); "wrong" where the models disagree."""
    with np.load(Path(request["inputs"]), allow_pickle=False) as file:
        saved = {name: file[str(n)] for n, name in enumerate(request["names"])}
    modules = [Module.load(request[name], threads=request["threads"]).machine_code for name in ("untuned", "tuned")]
    inputs = {spec.name: from_saved(saved[spec.name], spec.dtype) for spec in modules[0].inputs}
    want, got = (module.run(inputs) for module in modules)
    for name, array in want.items():
        if array.dtype.kind == "f" and (gap := difference(got[name], array)) > _TOLERANCE:
            return {"status": "wrong", "reason": f"output `{name}` of the tuned model differs by {gap:.3g}"}
    gc.disable()

    def block(module: LoadedModel) -> float:
        module.run(inputs)
        start, times = time.perf_counter(), list[float]()
        while not times or time.perf_counter() - start < _BLOCK:
            if isinstance(module, CudaModule):
                times += module.replays(inputs)  # by the clock of the device, without transfers
            else:
                begin = time.perf_counter()
                module.run(inputs)
                times.append(time.perf_counter() - begin)
        return min(times)

    runs = _rounds(modules, block, request["seconds"] * (1 - _PROFILE_SHARE))
    profiles = _rounds(modules, lambda m: [s for _, s in m.profile(inputs, runs=1)], request["seconds"] * _PROFILE_SHARE)
    return {"status": "ok", "runs": runs, "kernels": [list(zip(*side, strict=True)) for side in profiles]}  # by kernel, not by round


def _rounds(modules: list[LoadedModel], measure: Callable[[LoadedModel], Any], seconds: float) -> tuple[list[Any], list[Any]]:
    """The times of both modules, round by round, measured for about `seconds` seconds."""
    found: tuple[list[Any], list[Any]] = ([], [])
    begin = time.perf_counter()
    for n in range(_MAX_ROUNDS):
        for which in (0, 1) if n % 2 else (1, 0):
            time.sleep(_PAUSE)
            found[which].append(measure(modules[which]))
        if n + 1 >= MIN_ROUNDS and time.perf_counter() - begin > seconds:
            break
    return found


if __name__ == "__main__":
    serve(handle)
