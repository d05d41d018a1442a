"""What the cost model is told about a candidate: a vector of fixed length, under stable names.

Three parts: what the analytic model counts and estimates (`schedules.cost`), on a logarithmic scale and as shares; the steps of the
trace; the decisions. The names of the last two are those of programs and schedule functions, of which there is no list: they are hashed
into a fixed number of places (K. Weinberger et al., Feature Hashing for Large Scale Multitask Learning, ICML 2009); values that meet in a
place are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import log2
from typing import Any, Self
from zlib import crc32

import numpy as np

from tcomp.autotune.space import Candidate
from tcomp.errors import TcompError
from tcomp.schedules.cost.cpu import COUNTS, SECONDS
from tcomp.schedules.knobs import Answer, Option, chosen, option_of
from tcomp.schedules.trace import Step

STEPS, DECISIONS = 32, 48  # places
NAMES = (
    *COUNTS, *(f"seconds.{name}" for name in SECONDS), "bound",
    *(f"step.{n}" for n in range(STEPS)), *(f"decision.{n}" for n in range(DECISIONS)),
)  # fmt: skip

Vector = np.ndarray  # float32


@dataclass(frozen=True, eq=False, slots=True)
class Features:
    """`vector` has a number for each of `NAMES`; of a GPU, the first part has those of `schedules.cost.gpu`, and zeros.
    `seconds` is the time by the analytic model."""

    vector: Vector
    seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class CandidateSummary:
    """A candidate without its loops, as plain data: loops are made in other processes, and stay there. The fields are those of `Candidate`, and
    its features."""

    answers: Mapping[str, Answer]
    identity: str
    features: Features

    @classmethod
    def of(cls, candidate: Candidate) -> Self:
        """The summary of a candidate."""
        return cls(candidate.answers, candidate.identity, features(candidate))

    @property
    def decisions(self) -> dict[str, Option]:
        """Those that are not the default."""
        return chosen(self.answers)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        answers = {name: [a.value, a.options, a.default] for name, a in self.answers.items()}
        return {"answers": answers, "identity": self.identity, "vector": self.features.vector.tolist(), "seconds": self.features.seconds}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """What `to_json` wrote."""
        answers = {
            name: Answer(option_of(value), tuple(map(option_of, options)), option_of(default))
            for name, (value, options, default) in record["answers"].items()
        }
        return cls(answers, record["identity"], Features(np.array(record["vector"], np.float32), record["seconds"]))


def features(candidate: Candidate) -> Features:
    """The features of a candidate, which takes some milliseconds. The first part is zero where the analytic model cannot tell."""
    task, kernel = candidate.task, candidate.schedule.kernel
    model = task.backend.cost_model(task.threads)
    try:
        found = model.estimate(kernel, task.sizes_of(kernel.scalars)).features
    except TcompError:
        found = {"seconds": 1.0, "bound": 0.0}
    seconds = max(found["seconds"], 1e-9)
    counts = [log2(1 + found.get(name, 0.0)) for name in model.counts] + [0.0] * (len(COUNTS) - len(model.counts))
    shares = [found.get(f"seconds.{name}", 0.0) / seconds for name in model.seconds]
    steps = _hashed((token for step in candidate.schedule.trace for token in _step_tokens(step)), STEPS)
    decided = decision_vector({name: answer.value for name, answer in candidate.answers.items()})
    return Features(np.concatenate([np.array([*counts, *shares, found["bound"] / seconds], np.float32), steps, decided]), seconds)


def decision_vector(values: Mapping[str, Option]) -> Vector:
    """The last part alone, of all decisions by name: cheap, as it needs no loops."""
    return _hashed((token for name, value in values.items() for token in _decision_tokens(name, value)), DECISIONS)


def _hashed(tokens: Iterable[tuple[str, float]], places: int) -> Vector:
    vector = np.zeros(places, np.float32)
    for token, value in tokens:
        vector[crc32(token.encode()) % places] += value
    return vector


def _step_tokens(step: Step) -> Iterator[tuple[str, float]]:
    """How often a primitive is used (with which kind of loop or scope, if that is among its arguments), and with which numbers."""
    values = [*step.arguments[1:], *(value for _, value in step.options)]
    kind = next((v for v in values if isinstance(v, str) and v.isidentifier()), "") if step.primitive in ("set_kind", "compute_at") else ""
    yield f"{step.primitive} {kind}", 1.0
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{step.primitive} number", log2(1 + abs(value))


def _decision_tokens(name: str, value: Option) -> Iterator[tuple[str, float]]:
    """By full name and by its last word: names of buffers are those of a program, `tile` means the same in all."""
    for key in (name, name.rpartition(".")[2]):
        for n, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, int | float):
                yield f"{key} {n}", float(part)
            else:
                yield f"{key} {n} {str(part).rpartition('.')[2]}", 1.0
