"""The model of cost: how candidates of a task rank, before they are measured.

It is the analytic model (`schedules.cost`), corrected: boosted trees (T. Chen, C. Guestrin, XGBoost, KDD 2016) are added to the logarithm
of its time. Only the order within a task matters, and times on a busy machine have no common scale, so the trees learn from pairs of a task:
which of the two is faster (C. Burges et al., Learning to Rank using Gradient Descent, ICML 2005). A second layer of trees learns, from the
measurements of this run, what the shipped ones leave over.

A saved model is JSON: XGBoost's own format for the trees, with what they were learned from. It is read as a stranger's file.

A shipped model is of use only while features mean what they did when it was learned: it holds their fingerprint.

XGBoost is imported where it is used: only the tuner's process needs it, and that must not be forked afterwards (a child would wait for
threads that it does not have).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tcomp.autotune.features import NAMES, Features
from tcomp.autotune.fingerprint import fingerprint
from tcomp.errors import ArtifactError
from tcomp.machines import INTEL_AVX512
from tcomp.target import Target

if TYPE_CHECKING:
    from xgboost import Booster

SAME = 0.02  # times that differ by less are taken to be equal
FORMAT = 2
_BYTES, _TREES, _NODES = 1 << 20, 1000, 512  # of a saved model, at most
_LEARNT = {"eta": 0.1, "subsample": 0.8, "colsample_bytree": 0.5, "lambda": 2.0, "max_bin": 32, "nthread": 1, "seed": 0, "verbosity": 0}
_SHIPPED = 150, 8.0  # rounds, and how much a leaf weighs at least
_RUN = 40, 0.5  # of few samples, most of them alike: more trees would learn the noise
_DEPTH = 4  # of a tree
_SHARP = 8.0  # a pair is ordered for certain, about, where the logarithms of its times differ by more than 1 / _SHARP or so


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """A measured candidate: its task's key, and its time on any scale that is the task's."""

    task: str
    features: Features
    cost: float


class CostModel:
    """Ranks candidates. `facts` tell of the shipped part ({} of none): what it was learned from, and how well it ranks. `note` says why
    there is none though there should be."""

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
        """The logarithms of the times, up to a number that is the task's: the least is the best."""
        if not features:
            return np.zeros(0)
        vectors = np.stack([f.vector for f in features])
        scores = np.log([f.seconds for f in features])
        for booster in (self._shipped, self._latest):
            if booster is not None:
                scores = scores + booster.inplace_predict(vectors)
        return scores

    def fit(self, samples: Sequence[Sample], thorough: bool = False) -> None:
        """Learn what the shipped part does not know, from these samples alone: what was learned by an earlier call is forgotten.
        `thorough` is for samples of many tasks, that a model is to be shipped of."""
        self._latest = None
        if len(samples) > 1:
            start, vectors = self.scores([s.features for s in samples]), np.stack([s.features.vector for s in samples])
            self._latest = _ordering(
                vectors, start, np.log([s.cost for s in samples]), [s.task for s in samples], *(_SHIPPED if thorough else _RUN)
            )

    # ------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
        """Write what `fit` learned, so that it is the shipped part of a model that is loaded."""
        assert self._latest is not None, "nothing was learned"
        trees = json.loads(self._latest.save_raw("json"))
        text = json.dumps(
            {"tcomp": "model of cost", "format": FORMAT, "facts": facts, "features": fingerprint(), "trees": trees}, separators=(",", ":")
        )
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """What `save` wrote. Raises `ArtifactError` for anything else."""
        try:
            with open(path, "rb") as file:
                content = file.read(_BYTES + 1)
            if len(content) > _BYTES:
                raise _Malformed(f"it has more than {_BYTES} bytes")
            record = json.loads(content, parse_constant=_refuse)
            _check(isinstance(record, dict) and record.get("tcomp") == "model of cost", "it does not say that it is one")
            _check(record.get("format") == FORMAT, f"this is format {FORMAT}")
            _check(record.get("features") == fingerprint(), "it was learned from features that meant something else")
            _check(isinstance(record.get("facts"), dict), "its facts are no JSON object")
            return cls(_booster(record.get("trees")), record["facts"])
        except (OSError, ValueError, RecursionError, _Malformed) as error:
            hint = "python -m benchmarks.tuning record, then train, makes a new one"
            raise ArtifactError(f"{path} is no model of cost that can be used", why=str(error)[:500], hint=hint) from None


def shipped(target: Target) -> Path:
    """Where the model for a target's family is, if there is one."""
    return Path(__file__).parent / "models" / f"{family(target)}.json"


def family(target: Target) -> str:
    """The machines that a model trained on one of them serves: GPUs, Intel's processors with AVX-512, else processors of one name.

    The model that is shipped was trained on one of Intel's servers with AVX-512 (which one, its system did not say). On AMD's, which have
    other units and caches, it would order candidates by what is slow elsewhere.
    """
    if target.kind == "cuda":
        return "cuda"
    return "intel-avx512" if target.cpu in INTEL_AVX512 and target.vector_bits == 512 else target.cpu


# ---------------------------------------------------------------- learning and judging


def regression(vectors: np.ndarray, values: np.ndarray) -> Booster:
    """Trees that map rows of `vectors` to `values`. One thread; the same for the same rows."""
    import xgboost

    parameters = {**_LEARNT, "max_depth": _DEPTH, "min_child_weight": 4.0, "objective": "reg:squarederror", "base_score": 0.0}
    return xgboost.train(parameters, xgboost.DMatrix(vectors, values, nthread=1), 80)


def _ordering(
    vectors: np.ndarray, start: np.ndarray, logs: np.ndarray, tasks: Sequence[str], rounds: int, min_child_weight: float
) -> Booster:
    """Trees that, added to `start`, order rows of a task as the logarithms of their times: each pair that differs costs log(1 + exp(-gap)),
    `gap` being how far it is apart, in the right direction, times `_SHARP`."""
    import xgboost

    pairs: list[tuple[np.ndarray, np.ndarray]] = []  # rows of a task, 1 or -1 where the one is slower or faster than the other
    numbers = np.unique(tasks, return_inverse=True)[1]
    for number in range(numbers.max() + 1):
        rows = np.flatnonzero(numbers == number)
        apart = logs[rows][:, None] - logs[rows]
        pairs.append((rows, np.sign(apart) * (np.abs(apart) > np.log1p(SAME))))

    def gradients(scores: np.ndarray, _: object) -> tuple[np.ndarray, np.ndarray]:
        first, second = np.zeros(len(scores)), np.full(len(scores), 1e-3)
        for rows, signs in pairs:
            wrong = np.abs(signs) / (1 + np.exp(np.clip(signs * (scores[rows][:, None] - scores[rows]) * _SHARP, -30, 30)))
            weight = _SHARP / max(1.0, float(np.abs(signs).sum(axis=1).mean()))  # a task counts by its rows, not by its pairs
            first[rows] = -(signs * wrong).sum(axis=1) * weight
            second[rows] += (wrong * (1 - wrong)).sum(axis=1) * weight * _SHARP
        return first, second

    parameters = {**_LEARNT, "max_depth": _DEPTH, "min_child_weight": min_child_weight, "base_score": 0.0, "disable_default_eval_metric": True}
    return xgboost.train(parameters, xgboost.DMatrix(vectors, base_margin=start, nthread=1), rounds, obj=gradients)


def accuracy(scores: np.ndarray, costs: np.ndarray, same: float = SAME) -> float:
    """Of the pairs of one task's candidates whose times differ by more than `same`, the share that scores order rightly; a tie is half
    right."""
    gap, guess = np.log(costs)[:, None] - np.log(costs)[None], np.sign(np.subtract.outer(scores, scores))
    slower = gap > np.log1p(same)
    return float((guess[slower] + 1).mean() / 2) if slower.any() else 1.0


# ---------------------------------------------------------------- what is believed


class _Malformed(Exception):
    """A file is no model; says why."""


def _check(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _Malformed(otherwise)


def _refuse(constant: str) -> None:
    raise _Malformed(f"{constant} is no number")


def _booster(trees: Any) -> Booster:
    """A booster of checked trees: XGBoost follows whatever indices it is given."""
    import xgboost

    try:
        learner = trees["learner"]
        parameters, model = learner["learner_model_param"], learner["gradient_booster"]["model"]
        _check(
            learner["gradient_booster"]["name"] == "gbtree" and learner["objective"]["name"] == "reg:squarederror", "it is of another kind"
        )
        sizes = {name: parameters[name] for name in ("num_class", "num_feature", "num_target")}
        _check(sizes == {"num_class": "0", "num_feature": str(len(NAMES)), "num_target": "1"}, "it is for other features")
        count = len(model["trees"])
        _check(
            count <= _TREES and model["gbtree_model_param"] == {"num_parallel_tree": "1", "num_trees": str(count)},
            "the number of trees is odd",
        )
        _check(model["tree_info"] == [0] * count and model["iteration_indptr"] == list(range(count + 1)), "the order of trees is odd")
        _check(not any(learner[name] for name in ("attributes", "feature_names", "feature_types")), "it has attributes")
        _check(not any(model.get("cats", {}).values()), "it has categories")
        for n, tree in enumerate(model["trees"]):
            _check_tree(tree, n)
    except (KeyError, TypeError, AttributeError) as error:
        raise _Malformed(f"it is not of XGBoost's form: {error!r}") from None
    booster = xgboost.Booster({"nthread": 1})
    booster.load_model(bytearray(json.dumps(trees).encode()))
    return booster


_INTEGERS = ("left_children", "right_children", "parents", "split_indices", "split_type", "default_left")
_NUMBERS = ("split_conditions", "base_weights", "loss_changes", "sum_hessian")


def _check_tree(tree: Mapping[str, Any], number: int) -> None:
    nodes = len(tree["left_children"])
    where = f"tree {number}"
    _check(0 < nodes <= _NODES and set(tree) == {*_INTEGERS, *_NUMBERS, *_NO_CATEGORIES, "id", "tree_param"}, f"{where} is odd")
    shape = {"num_deleted": "0", "num_feature": str(len(NAMES)), "num_nodes": str(nodes), "size_leaf_vector": "1"}
    _check(tree["tree_param"] == shape and tree["id"] == number, f"{where} has another shape")
    _check(all(len(tree[name]) == nodes for name in (*_INTEGERS, *_NUMBERS)), f"the lengths in {where} differ")
    _check(all(type(v) is int for name in _INTEGERS for v in tree[name]), f"indices in {where} are no integers")
    _check(all(type(v) in (int, float) and abs(v) < 1e30 for name in _NUMBERS for v in tree[name]), f"{where} has other than numbers")
    _check(not any(tree[name] for name in _NO_CATEGORIES) and not any(tree["split_type"]), f"{where} has categories")
    _check(all(0 <= i < len(NAMES) for i in tree["split_indices"]), f"{where} asks for other features")
    _check(set(tree["default_left"]) <= {0, 1}, f"{where} is odd")
    pairs = list(zip(tree["left_children"], tree["right_children"], strict=True))
    children = sorted(c for pair in pairs for c in pair if pair != (-1, -1))
    _check(children == list(range(1, nodes)), f"{where} is no tree")  # each node but the root is the child of one
    for n, pair in enumerate(pairs):
        _check(pair == (-1, -1) or min(pair) > n, f"{where} goes in circles")
        _check(pair == (-1, -1) or [tree["parents"][c] for c in pair] == [n, n], f"the parents in {where} are others")


_NO_CATEGORIES = ("categories", "categories_nodes", "categories_segments", "categories_sizes")
