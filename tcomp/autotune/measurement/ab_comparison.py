"""Two compiled models against each other, in a process that knows nothing but how to run them. Run as a program, it is a child
(see `children.py`).

They take turns in short blocks, the order alternating, so that whatever disturbs one disturbs the other. A machine that is shared is slower at
times, by a third or so, for seconds: so what counts is how fast either is in its faster rounds, and chance is judged by drawing the rounds
again (the bootstrap: B. Efron 1979). Kernels are timed likewise, by the models' own profiles.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.autotune.measurement.processes import Answer, serve
from tcomp.autotune.measurement.worker import difference
from tcomp.runtime import Module
from tcomp.runtime.cuda import CudaModule

_PAUSE = 0.01  # seconds before a block: threads of the one before stop spinning and go to sleep
FEWEST, _MOST = 9, 60  # rounds
_DOUBT = 0.1  # how likely chance may be to make what is taken for a difference
_DRAWS = 400
_BLOCK = 0.01  # seconds of runs in a block, if one run does not take longer
_KERNELS = 0.4  # the share of the time for the profiles
_TOLERANCE = 1e-2  # of float results, relative: kernels were compared before, this is about gross mistakes


@dataclass(frozen=True)
class Rounds:
    """Seconds of the untuned one and of the tuned one, round by round, from neighbouring runs."""

    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(self.before + other.before, self.after + other.after)

    @property
    def seconds(self) -> tuple[float, float]:
        """(before, after): of the faster rounds. Infinite where there were none."""
        return (float(_faster(np.array(self.before))), float(_faster(np.array(self.after)))) if self.before else (float("inf"),) * 2

    @property
    def ratio(self) -> float:
        """Tuned over untuned; infinite where there were no rounds."""
        return self.seconds[1] / self.seconds[0] if self.before else float("inf")

    @property
    def won(self) -> bool:
        """Whether the tuned one is faster, by more than chance explains."""
        return self.ratio < 1.0 and self._likely(self.after, self.before)

    @property
    def lost(self) -> bool:
        """Whether it is slower, likewise."""
        return self.ratio > 1.0 and self._likely(self.before, self.after)

    def _likely(self, less: Sequence[float], more: Sequence[float]) -> bool:
        """Whether the one is less than the other in most draws of the rounds, with their neighbours, from these rounds."""
        draws = np.random.default_rng(0).integers(0, len(less), (_DRAWS, len(less)))
        return bool(np.mean(_faster(np.array(less)[draws]) < _faster(np.array(more)[draws])) >= 1 - _DOUBT)


def _faster(seconds: np.ndarray) -> Any:
    """How fast the faster rounds are: along the last axis, the mean of the least quarter, but for the very least."""
    count = seconds.shape[-1]
    return np.sort(seconds, axis=-1)[..., min(1, count - 1) : max(2, -(-count // 4) + 1)].mean(axis=-1)


@dataclass(frozen=True)
class Contest:
    """The rounds of whole models, and of all kernels of one task together, by its key. `reason` says why there was no contest, "" if there
    was."""

    whole: Rounds = Rounds()
    kernels: Mapping[str, Rounds] = field(default_factory=dict)
    reason: str = ""


def summed(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Of several kernels' times, those of all together, round by round."""
    return tuple(map(sum, zip(*rounds, strict=True)))


def handle(request: Answer) -> Answer:
    """Answer one request: seconds of the fastest runs of each round, of either model ("runs"), and of each kernel call, in program order
    ("kernels"); "wrong" where the models disagree."""
    with np.load(Path(request["inputs"]), allow_pickle=False) as file:
        inputs = {name: file[str(n)] for n, name in enumerate(request["names"])}
    untuned, tuned = (Module.load(request[name], threads=request["threads"]) for name in ("untuned", "tuned"))
    want, got = untuned.run(inputs), tuned.run(inputs)
    for name, array in want.items():
        if array.dtype.kind == "f" and (gap := difference(got[name], array)) > _TOLERANCE:
            return {"status": "wrong", "reason": f"output `{name}` of the tuned model differs by {gap:.3g}"}
    gc.disable()
    runs, profiles = _rounds(untuned, tuned, inputs, request["seconds"])
    kernels = [list(zip(*side, strict=True)) for side in profiles]  # by kernel, not by round
    return {"status": "ok", "runs": runs, "kernels": kernels}


def _rounds(
    untuned: Module, tuned: Module, inputs: Mapping[str, Any], seconds: float
) -> tuple[tuple[list[float], list[float]], tuple[list[list[float]], list[list[float]]]]:
    modules, clock = (untuned, tuned), time.perf_counter
    runs: tuple[list[float], list[float]] = ([], [])
    begin = clock()
    for n in range(_MOST):
        for which in (0, 1) if n % 2 else (1, 0):
            time.sleep(_PAUSE)
            modules[which].run(inputs)
            start, least = clock(), float("inf")
            while clock() - start < _BLOCK or least == float("inf"):
                least = min(least, _run(modules[which], inputs))
            runs[which].append(least)
        if n + 1 >= FEWEST and clock() - begin > seconds * (1 - _KERNELS):
            break
    profiles: tuple[list[list[float]], list[list[float]]] = ([], [])
    begin = clock()
    for n in range(_MOST):
        for which in (0, 1) if n % 2 else (1, 0):
            time.sleep(_PAUSE)
            profiles[which].append([s for _, s in modules[which].profile(inputs, runs=1)])
        if n + 1 >= FEWEST and clock() - begin > seconds * _KERNELS:
            break
    return runs, profiles


def _run(module: Module, inputs: Mapping[str, Any]) -> float:
    """Seconds of a run; on a GPU by the clock of the device, without transfers."""
    if isinstance(module, CudaModule):
        return min(module.replays(inputs))
    start = time.perf_counter()
    module.run(inputs)
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(handle)
