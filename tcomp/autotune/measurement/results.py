"""Results of measurements: a candidate against the incumbent, and a tuned model against the untuned one. A shared machine is slower at
times, by a third or so, for seconds. So only the faster rounds of an A/B comparison count, and significance is estimated by resampling the
rounds (the bootstrap: B. Efron 1979)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

import numpy as np

MIN_ROUNDS = 9  # of an A/B comparison
_SIGNIFICANCE = 0.1  # the probability that chance alone makes what is taken for a difference
_DRAWS = 400


class Outcome(StrEnum):
    """How building and measuring a candidate ended."""

    OK = "ok"  # timed, and its results are those of the default schedule
    REFUSED = "refused"  # the schedule function, or a step of it, refuses the decisions
    BUILD = "build"  # no machine code can be made of it
    CRASH = "crash"  # a process died of it
    TIMEOUT = "timeout"  # it took too long to build or to run
    WRONG = "wrong"  # it computes something else
    MEMORY = "memory"  # it needs more memory than it may have
    ERROR = "error"  # anything else, for example an exception in the schedule function


@dataclass(frozen=True)
class Measurement:
    """`seconds` of single runs, in order, if the status is OK; `incumbent` those of the incumbent's runs between them: compare with these,
    as the machine may have been busy. `reason` says why the status is not OK."""

    status: Outcome
    seconds: tuple[float, ...] = ()
    reason: str = ""
    incumbent: tuple[float, ...] = ()

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Measurement:
        """The measurement in what a worker process answered."""
        seconds, incumbent = (tuple(map(float, answer.get(name, ()))) for name in ("seconds", "incumbent"))
        return cls(Outcome(answer["status"]), seconds, answer.get("reason", ""), incumbent)

    @property
    def least(self) -> float:
        """Seconds of the fastest run; infinite if there is none."""
        return min(self.seconds, default=inf)

    @property
    def ratio(self) -> float:
        """The fastest run over the fastest one of the incumbent; infinite if there is none."""
        return self.least / min(self.incumbent) if self.incumbent else inf


@dataclass(frozen=True)
class Limits:
    """Of one candidate: seconds to build it and to run it (all runs together), `rounds` and `seconds` of runs that are timed, and bytes of
    address space of the processes in which that happens (None: half of the machine's memory)."""

    building: float = 60.0
    running: float = 20.0
    rounds: int = 64
    seconds: float = 0.1
    memory: int | None = None

    @property
    def bytes(self) -> int:
        """The limit of memory, with the default for None. Not for processes that use a GPU: CUDA reserves addresses for all memory of all
        devices."""
        return self.memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


LIMITS = Limits()


@dataclass(frozen=True)
class Rounds:
    """Seconds of the untuned version (`before`) and of the tuned one (`after`), round by round, from neighbouring runs."""

    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(self.before + other.before, self.after + other.after)

    @property
    def seconds(self) -> tuple[float, float]:
        """(before, after) of the faster rounds. Infinite where there were none."""
        return (_faster(np.array(self.before)).item(), _faster(np.array(self.after)).item()) if self.before else (inf, inf)

    @property
    def ratio(self) -> float:
        """Tuned over untuned; infinite where there were no rounds."""
        return self.seconds[1] / self.seconds[0] if self.before else inf

    @property
    def won(self) -> bool:
        """Whether the tuned version is faster, by more than chance explains: in most draws of the rounds."""
        return self.ratio < 1.0 and self._drawn(np.less) >= 1 - _SIGNIFICANCE

    @property
    def lost(self) -> bool:
        """Whether the tuned version is slower, by more than chance explains."""
        return self.ratio > 1.0 and self._drawn(np.greater) >= 1 - _SIGNIFICANCE

    def _drawn(self, compare: np.ufunc) -> float:
        """In which share of the draws of rounds the tuned version compares so with the untuned one."""
        draws = np.random.default_rng(0).integers(0, len(self.before), (_DRAWS, len(self.before)))
        return float(np.mean(compare(_faster(np.array(self.after)[draws]), _faster(np.array(self.before)[draws]))))


def _faster(seconds: np.ndarray) -> Any:
    """How fast the faster rounds are: along the last axis, the mean of the least quarter without the very least."""
    count = seconds.shape[-1]
    return np.sort(seconds, axis=-1)[..., min(1, count - 1) : max(2, -(-count // 4) + 1)].mean(axis=-1)


def summed(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Of several kernels' times, those of all together, round by round."""
    return tuple(map(sum, zip(*rounds, strict=True)))


@dataclass(frozen=True)
class Comparison:
    """The rounds of whole models, and of all kernels of one task together, by its key. `failure` says why there are none."""

    whole: Rounds = Rounds()
    kernels: Mapping[str, Rounds] = field(default_factory=dict)
    failure: Measurement | None = None
