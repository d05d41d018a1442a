"""The cost model: it ranks candidates of a task before they are measured. Boosted trees (T. Chen, C. Guestrin, XGBoost, KDD 2016) correct
the logarithm of the analytic model's time. They learn from pairs of a task which of the two is faster (C. Burges et al., Learning to Rank
using Gradient Descent, ICML 2005), as times on a busy machine have no common scale. XGBoost is imported where it is used: the tuner's
process alone needs it, and must not be forked afterwards (XGBoost's threads would be lost)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tcomp.autotune.features import Features, fingerprint
from tcomp.errors import ArtifactError
from tcomp.runtime.artifact import replacing
from tcomp.target import Target

if TYPE_CHECKING:
    from xgboost import Booster

SAME = 0.02  # times whose relative difference is less are taken to be equal
FORMAT = 3
_MAX_BYTES = 1 << 20  # of a saved model
_PARAMETERS = {
    "eta": 0.1, "subsample": 0.8, "colsample_bytree": 0.5, "lambda": 2.0, "max_bin": 32, "max_depth": 4, "base_score": 0.0,
    "nthread": 1, "seed": 0, "verbosity": 0,
}  # fmt: skip
_SHIPPED = 150, 8.0  # boosting rounds, and the minimum weight of a leaf
_RUN = 40, 0.5  # of few samples, most of them alike: more trees would learn the noise
_STEEPNESS = 8.0  # a pair counts as surely ordered where the logarithms of its times differ by more than about 1 / _STEEPNESS


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """A measured candidate: its task's key, and its time on any scale that all samples of the task share."""

    task: str
    features: Features
    cost: float


class CostModel:
    """Ranks candidates. `facts` describe the shipped part ({} if there is none): what it was learned from, and how well it ranks. `note`
    says why there is none though there should be."""

    def __init__(self, shipped: Booster | None = None, facts: Mapping[str, Any] | None = None, note: str = "") -> None:
        self._shipped = shipped
        self._latest: Booster | None = None
        self.facts, self.note = dict(facts or {}), note

    @classmethod
    def of(cls, target: Target) -> CostModel:
        """With the model that is shipped for the family of a target; the analytic one alone where there is none that can be used."""
        path = shipped(target)
        try:
            return cls.load(path) if path.is_file() else cls()
        except ArtifactError as error:
            return cls(note=f"candidates are ranked by the analytic model: {error.what}: {error.why}")

    def scores(self, features: Sequence[Features]) -> np.ndarray:
        """The logarithms of the times, up to a constant of the task: the least is the best."""
        if not features:
            return np.zeros(0)
        vectors, analytic = np.stack([f.vector for f in features]), np.log([f.seconds for f in features])
        return sum((booster.inplace_predict(vectors) for booster in (self._shipped, self._latest) if booster is not None), analytic)

    def fit(self, samples: Sequence[Sample], thorough: bool = False) -> None:
        """Learn what the shipped part does not know, from these samples alone: what was learned by an earlier call is forgotten.
        `thorough` is for samples of many tasks, from which a model to be shipped is made."""
        self._latest = None
        if len(samples) > 1:
            self._latest = _ranking_trees(samples, self.scores([s.features for s in samples]), *(_SHIPPED if thorough else _RUN))

    def save(self, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
        """Write what `fit` learned, so that it is the shipped part of a model that is loaded."""
        assert self._latest is not None, "nothing was learned"
        trees = json.loads(self._latest.save_raw("json"))
        record = {
            "tcomp": "model of cost",
            "format": FORMAT,
            "facts": facts,
            "features": fingerprint(),
            "sha256": _digest(trees),
            "trees": trees,
        }
        with replacing(Path(path)) as (file,):
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """The model in a file that `save` wrote. Raises `ArtifactError` for anything else, or a damaged file."""
        import xgboost

        try:
            with open(path, "rb") as file:
                text = file.read(_MAX_BYTES + 1)
            record = json.loads(text) if len(text) <= _MAX_BYTES else None
            if not isinstance(record, dict) or (record.get("tcomp"), record.get("format")) != ("model of cost", FORMAT):
                raise ValueError(f"it is not a cost model of format {FORMAT}")
            if record.get("sha256") != _digest(record.get("trees")) or not isinstance(record.get("facts"), dict):
                raise ValueError("it is damaged")
            if record.get("features") != fingerprint():
                raise ValueError("it was learned from features that meant something else")
            booster = xgboost.Booster({"nthread": 1})
            booster.load_model(bytearray(json.dumps(record["trees"]).encode()))
            return cls(booster, record["facts"])
        except (OSError, ValueError, RecursionError) as error:
            hint = "python -m benchmarks.tuning record, then train, makes a new one"
            raise ArtifactError(f"{path} is not a usable cost model", why=str(error)[:500], hint=hint) from None


def _digest(trees: Any) -> str:
    return hashlib.sha256(json.dumps(trees, sort_keys=True).encode()).hexdigest()


def shipped(target: Target) -> Path:
    """Where the model for a target's family is, if there is one."""
    return Path(__file__).parent / "models" / f"{target.family}.json"


def regression(vectors: np.ndarray, values: np.ndarray) -> Booster:
    """Trees that map rows of `vectors` to `values`. One thread; the same for the same rows."""
    import xgboost

    parameters = {**_PARAMETERS, "min_child_weight": 4.0, "objective": "reg:squarederror"}
    return xgboost.train(parameters, xgboost.DMatrix(vectors, values, nthread=1), 80)


def _ranking_trees(samples: Sequence[Sample], start: np.ndarray, rounds: int, min_child_weight: float) -> Booster:
    """Trees that, added to `start`, order the samples of a task as the logarithms of their times: each pair that differs costs
    log(1 + exp(-gap)), where `gap` is the distance of its scores, in the right direction, times `_STEEPNESS`."""
    import xgboost

    logs = np.log([s.cost for s in samples])
    pairs: list[tuple[np.ndarray, np.ndarray]] = []  # the rows of a task; 1 or -1 where one is slower or faster than another
    for task in dict.fromkeys(s.task for s in samples):
        rows = np.array([n for n, s in enumerate(samples) if s.task == task])
        difference = logs[rows][:, None] - logs[rows]
        pairs.append((rows, np.sign(difference) * (np.abs(difference) > np.log1p(SAME))))

    def gradients(scores: np.ndarray, _: object) -> tuple[np.ndarray, np.ndarray]:
        first, second = np.zeros(len(scores)), np.full(len(scores), 1e-3)
        for rows, signs in pairs:
            wrong = np.abs(signs) / (1 + np.exp(np.clip(signs * (scores[rows][:, None] - scores[rows]) * _STEEPNESS, -30, 30)))
            weight = _STEEPNESS / max(1.0, float(np.abs(signs).sum(axis=1).mean()))  # a task counts by its rows, not by its pairs
            first[rows] = -(signs * wrong).sum(axis=1) * weight
            second[rows] += (wrong * (1 - wrong)).sum(axis=1) * weight * _STEEPNESS
        return first, second

    parameters = {**_PARAMETERS, "min_child_weight": min_child_weight, "disable_default_eval_metric": True}
    vectors = np.stack([s.features.vector for s in samples])
    return xgboost.train(parameters, xgboost.DMatrix(vectors, base_margin=start, nthread=1), rounds, obj=gradients)


def accuracy(scores: np.ndarray, costs: np.ndarray, same: float = SAME) -> float:
    """Of the pairs of one task's candidates whose times differ by more than `same`, the share that scores order rightly; a tie is half
    right."""
    gap, guess = np.log(costs)[:, None] - np.log(costs)[None], np.sign(np.subtract.outer(scores, scores))
    slower = gap > np.log1p(same)
    return float((guess[slower] + 1).mean() / 2) if slower.any() else 1.0
