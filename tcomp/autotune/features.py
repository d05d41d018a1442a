"""The features of a candidate for the cost model: a vector of fixed length. It holds what the analytic model (`schedules.cost`) counts and
estimates, on a logarithmic scale and as shares, then the steps of the trace and the decisions. Names of the last two are hashed into a
fixed number of places (K. Weinberger et al., Feature Hashing for Large Scale Multitask Learning, ICML 2009), where values are added."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import log2
from typing import Any, Self
from zlib import crc32

import numpy as np

from tcomp import cache
from tcomp.autotune.tasks import Candidate, Program, instantiate
from tcomp.errors import TcompError
from tcomp.ir import te
from tcomp.ir.te import Tensor
from tcomp.schedules.cost.cpu import COUNTS, SECONDS
from tcomp.schedules.knobs import Answer, Knobs, Option, chosen, option_of
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.trace import Step
from tcomp.target import Target

STEPS, DECISIONS = 32, 48  # places
NAMES = (
    *COUNTS, *(f"seconds.{name}" for name in SECONDS), "bound",
    *(f"step.{n}" for n in range(STEPS)), *(f"decision.{n}" for n in range(DECISIONS)),
)  # fmt: skip
_DIGITS = 3  # of features that the fingerprint holds

Vector = np.ndarray  # float32


@dataclass(frozen=True, eq=False, slots=True)
class Features:
    """`vector` has a number for each of `NAMES`; of a GPU, the first part has those of `schedules.cost.gpu`, and zeros.
    `seconds` is the time by the analytic model."""

    vector: Vector
    seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class CandidateSummary:
    """The fields of a `Candidate` without its loops, which stay in the process that made them, and its features: plain data."""

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

    def to_json(self) -> list[Any]:
        """The fields, as `from_json` reads them."""
        return [{name: astuple(a) for name, a in self.answers.items()}, self.identity, self.features.vector.tolist(), self.features.seconds]

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> Self:
        """The summary that `to_json` wrote."""
        asked, identity, vector, seconds = record
        answers = {
            n: Answer(option_of(v), tuple(map(option_of, options)), option_of(d), kind) for n, (v, options, d, kind) in asked.items()
        }
        return cls(answers, identity, Features(np.array(vector, np.float32), seconds))


def features(candidate: Candidate) -> Features:
    """The features of a candidate, which takes some milliseconds. The first part is zero where the analytic model has no estimate."""
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
    decided = decision_vector((name, answer.kind, answer.value) for name, answer in candidate.answers.items())
    return Features(np.concatenate([np.array([*counts, *shares, found["bound"] / seconds], np.float32), steps, decided]), seconds)


def decision_vector(decisions: Iterable[tuple[str, str, Option]]) -> Vector:
    """The last part alone, of all decisions as (name, kind, value): cheap, as it needs no loops. They count by full name and by kind: names
    of buffers are those of a program, `tile` means the same in all."""
    tokens = (
        (f"{key} {n}", float(part)) if isinstance(part, int | float) else (f"{key} {n} {str(part).rpartition('.')[2]}", 1.0)
        for name, kind, value in decisions
        for key in (name, kind)
        for n, part in enumerate(value if isinstance(value, tuple) else (value,))
    )
    return _hashed(tokens, DECISIONS)


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


@functools.cache
def fingerprint() -> str:
    """A digest of the meaning of features, the same on every machine: a cost model is valid only while features mean what they did when it
    was trained. The digest covers two programs: one under fixed steps, whose numbers change with counting, estimating and hashing; and one
    under the default schedule, of which only the names and options of decisions count, as its loops may change."""
    machine = Target.parse("cpu -march=x86_64 -mcpu=skylake-avx512")
    found = features(instantiate(Program.of(_tensors(), machine, 2, schedule=_steps), {"how": "far", "tile": (6, 2)}))
    asked = instantiate(Program.of(_tensors(), machine, 2), {}).answers
    parts = [*NAMES, *(f"{x:.{_DIGITS}g}" for x in (*found.vector, found.seconds)), *(f"{n} {a.options}" for n, a in sorted(asked.items()))]
    return cache.name(*parts)


def _tensors() -> list[Tensor]:
    """exp(A B) / C, where C is read with a stride: an expression that affects each kind of count."""
    a, b, c = te.placeholder((300, 1000), name="A"), te.placeholder((1000, 500), name="B"), te.placeholder((500, 300), name="C")
    k = te.reduce_axis(1000, "k")
    product = te.compute((300, 500), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="P")
    return [a, b, c, te.compute((300, 500), lambda i, j: te.exp(product[i, j]) / c[j, i], name="R")]


def _steps(s: Schedule, knobs: Knobs) -> None:
    knobs.choice("how", ("near", "far"), "near")
    rows, vectors = knobs.choice("tile", ((4, 2), (6, 2)), (4, 2))
    column, inner = s.split("P.j", vectors * 16)
    row, unrolled = s.split("P.i", rows)
    part, lane = s.split(inner, 16)
    s.reorder(column, row, "P.k", unrolled, part, lane, reassociate=True)
    s.unroll(unrolled)
    s.unroll(part)
    s.vectorize(lane)
    s.vectorize(s.split("R.j", 16)[1])
    s.prefetch("B", "P.k", 4)
    s.parallel("R.i")
