"""ONNX operators of `ai.onnx.ml`: tree ensembles. All kinds of tests become `x[feature] <= threshold`, which `tcomp.ops.trees` walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.ml import TRANSFORMS, class_count, decided, matrix, transformed
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew, trees as ops

MODES = ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ", "MEMBER")  # by their numbers in TreeEnsemble
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
MANY_TREES = 64  # whose tests lanes make side by side, so that one table for links and thresholds pays


class _Forest:
    """Nodes (feature, threshold, missing, passed, failed): a walk goes to `passed` where x[feature] <= threshold (or NaN, and `missing`),
    else to `failed`. Both are the node itself in leaves."""

    def __init__(self, dtype: str, count: int) -> None:
        """`count` leaves, to be made into tests by `branch`; thresholds are of `dtype`."""
        self.dtype, self.nodes = dtype, list[tuple[int, float, bool, int, int]]()
        for _ in range(count):
            self.leaf()

    def leaf(self) -> int:
        """A new leaf."""
        self.nodes.append((0, np.nan, False, len(self.nodes), len(self.nodes)))
        return len(self.nodes) - 1

    def branch(self, at: int, mode: str, feature: int, values: Sequence[float], missing: bool, yes: int, no: int) -> None:
        """Make node `at` the test `x[feature] MODE value`, or one of the values; NaN goes to `yes` where `missing`, or it is unequal."""
        if mode in ("EQ", "NEQ", "MEMBER"):
            members = sorted({v for v in values if not np.isnan(v)}) or [np.nan]
            found, other, missing = (no, yes, False) if mode == "NEQ" else (yes, no, missing)
            ends = [end for m in members for end in (self.below(m), m)]
            self.search(at, feature, ends, [other, found] * len(members) + [other], 1 if missing else len(ends))
        else:
            (value,), above = values, mode in ("GT", "GTE")
            threshold = np.inf if above and np.isnan(value) else self.below(value) if mode in ("LT", "GTE") else value
            self.nodes[at] = (feature, threshold, missing != above, *((no, yes) if above else (yes, no)))

    def search(self, at: int, feature: int, ends: Sequence[float], results: Sequence[int], nan: int) -> None:
        """Make node `at` a binary search: x goes to the result of the first end that it does not exceed, or the last one; NaN to that
        number `nan`."""
        middle, sides = len(ends) // 2, list[int]()
        for part, first in ((slice(middle), 0), (slice(middle + 1, None), middle + 1)):
            sides.append(self.leaf() if ends[part] else results[first])
            if ends[part]:
                self.search(sides[-1], feature, ends[part], results[first:], nan - first)
        self.nodes[at] = (feature, ends[middle], nan <= middle, sides[0], sides[1])

    def below(self, value: float) -> float:
        """The largest number less than `value`; NaN, which no test passes, where there is none."""
        kind = np.dtype(self.dtype).type
        return np.nan if value == -np.inf else float(np.nextafter(kind(value), kind(-np.inf)))


@dataclass(frozen=True)
class _Weights:
    """What leaves add to targets: entry k says that leaf[k], of tree[k], adds weight[k] to target[k]."""

    leaf: np.ndarray
    tree: np.ndarray
    target: np.ndarray
    weight: np.ndarray


def _numbers(ctx: Context, name: str, dtype: str = "float32") -> np.ndarray:
    """An attribute that is a list of floats, or a tensor of the same name with `_as_tensor`; without elements if neither is given."""
    return np.asarray(ctx.attrs.get(f"{name}_as_tensor", np.asarray(ctx.attrs.get(name, ()), dtype))).ravel()


def _listed(ctx: Context, kind: str) -> tuple[_Forest, np.ndarray, _Weights]:
    """(nodes, roots, weights) of a TreeEnsembleClassifier (`kind` is "class") or Regressor ("target")."""

    def ints(name: str) -> list[int]:
        return list(ctx.attrs.get(name, ()))

    names = ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    trees, numbers, feature, yes, no = (ints(f"nodes_{name}") for name in names)
    values, modes, count = _numbers(ctx, "nodes_values"), ctx.attrs.get("nodes_modes", ()), len(trees)
    missing = ints("nodes_missing_value_tracks_true") or [0] * count
    if not count or {len(a) for a in (numbers, values, feature, modes, yes, no, missing)} != {count}:
        raise ctx.invalid("the attributes that describe its nodes do not have the same number of elements")
    at = {node: n for n, node in enumerate(zip(trees, numbers, strict=True))}
    forest = _Forest(values.dtype.name, count)
    try:
        for n, mode in enumerate(modes):
            if mode != "LEAF":
                if (short := mode.removeprefix("BRANCH_")) not in MODES[:6]:
                    raise ctx.invalid(f"unknown mode `{mode}` of a node")
                forest.branch(n, short, feature[n], [float(values[n])], bool(missing[n]), at[trees[n], yes[n]], at[trees[n], no[n]])
        owners = list(zip(ints(f"{kind}_treeids"), ints(f"{kind}_nodeids"), strict=True))
        leaf = np.array([at[o] for o in owners], np.int64)
    except (KeyError, ValueError) as error:
        raise ctx.invalid(f"a node that does not exist is named: {error}") from None
    targets, weight = np.array(ints(f"{kind}_ids"), np.int64), _numbers(ctx, f"{kind}_weights")
    if len(at) != count or not len(leaf) == len(targets) == len(weight):
        raise ctx.invalid("two nodes have the same number, or the attributes that describe its weights are not of one length")
    known, first = np.unique(trees, return_index=True)
    return forest, first, _Weights(leaf, np.searchsorted(known, [tree for tree, _ in owners]), targets, weight)


def _newer(ctx: Context) -> tuple[_Forest, np.ndarray, _Weights]:
    """(nodes, roots, weights) of a TreeEnsemble, whose leaves have one weight each."""
    splits, modes, feature = (np.asarray(ctx.attrs[f"nodes_{n}"]).ravel() for n in ("splits", "modes", "featureids"))
    yes, no, yes_leaf, no_leaf = (list(ctx.attrs[f"nodes_{n}"]) for n in ("truenodeids", "falsenodeids", "trueleafs", "falseleafs"))
    missing, roots = ctx.attrs.get("nodes_missing_value_tracks_true") or [0] * len(splits), list(ctx.attrs["tree_roots"])
    weight, targets, count = np.asarray(ctx.attrs["leaf_weights"]).ravel(), np.array(ctx.attrs["leaf_targetids"], np.int64), len(splits)
    if {len(a) for a in (modes, feature, yes, no, yes_leaf, no_leaf, missing)} != {count} or len(weight) != len(targets):
        raise ctx.invalid("the attributes that describe its nodes or leaves do not have the same number of elements")
    limits = {0: count, 1: len(weight)}
    ends = [*zip(yes, yes_leaf, strict=True), *zip(no, no_leaf, strict=True), *((r, 0) for r in roots)]
    if not roots or modes.max(initial=0) >= len(MODES) or not all(0 <= node < limits[bool(leaf)] for node, leaf in ends):
        raise ctx.invalid("there is no root, a mode is unknown, or a node or leaf that does not exist is named")
    members = iter(np.split(m := np.asarray(ctx.attrs.get("membership_values", ())).ravel(), np.flatnonzero(np.isnan(m)) + 1))
    forest = _Forest("float64" if splits.dtype == np.float64 else "float32", count + len(weight))
    for n, mode in enumerate(modes):
        own = [float(v) for v in next(members, ())] if MODES[mode] == "MEMBER" else [float(splits[n])]
        children = yes[n] + count * bool(yes_leaf[n]), no[n] + count * bool(no_leaf[n])
        forest.branch(n, MODES[mode], int(feature[n]), own, bool(missing[n]), *children)
    return forest, np.array(roots), _Weights(count + np.arange(len(weight)), np.full(len(weight), -1), targets, weight)


def _scores(ctx: Context, nodes: tuple[_Forest, np.ndarray, _Weights], targets: int, aggregate: str, base: np.ndarray) -> Value:
    """[rows, targets]: what the leaves of each row add up to (or their mean, minimum, maximum), plus the base values."""
    forest, roots, weights = nodes
    dtype = "float64" if "float64" in (ctx.value(0).dtype, forest.dtype, weights.weight.dtype.name) else "float32"
    x = matrix(ctx, dtype)
    features = x.shape[1]
    if not isinstance(features, int):
        raise ctx.unsupported("the number of features is symbolic", "give the shape of the input (--shape)")
    if base.size not in (0, 1, targets):
        raise ctx.invalid(f"{base.size} base values are given for {targets} targets")
    if weights.target.size and not 0 <= weights.target.min() <= weights.target.max() < targets:
        raise ctx.invalid(f"it has {targets} targets, and weights for number {weights.target.max()}")
    if not 0 <= min(tested := [node[0] for node in forest.nodes]) <= max(tested) < features:
        raise ctx.invalid(f"the input has {features} features, and number {max(tested)} is tested")
    neutral = {"MIN": np.inf, "MAX": -np.inf}.get(aggregate, 0.0)
    if (groups := _by_target(weights, targets, len(roots))) is not None:
        roots = np.append(roots, forest.leaf())[groups.ravel()]  # the leaf stands for trees that make groups equally large
    feature, threshold, missing, passed, failed = map(np.array, zip(*forest.nodes, strict=True))
    together = len(roots) // (targets if groups is not None else 1) >= MANY_TREES
    tables = ops.node_tables(feature, threshold.astype(dtype), missing, passed, failed, roots, together=together)
    if tables is None:
        raise ctx.invalid("its nodes form a cycle")
    values = np.full((len(feature), *(() if groups is not None else (targets,))), neutral, dtype)
    combine = {"MIN": np.minimum, "MAX": np.maximum}.get(aggregate, np.add)
    combine.at(values, weights.leaf if groups is not None else (weights.leaf, weights.target), weights.weight)
    walk = {"trees": len(roots), "steps": tables.steps, "feature_bits": tables.feature_bits, "missing": tables.missing}
    arrays = tables.links, tables.thresholds, tables.tests, tables.limits
    operands = [x, *(None if a is None else ctx.constant(a) for a in arrays)]
    values_of = ctx.constant(values[tables.slots])
    if groups is not None:
        scores = ctx.add(ops.TREE_SCORES, [*operands, values_of], targets=targets, aggregate=aggregate, **walk)
    else:
        scores = ctx.add(ops.LEAF_SCORES, [ctx.add(ops.TREE_LEAVES, operands, **walk), values_of], aggregate=aggregate)
    if neutral:
        none = ctx.add(ew.EQUAL, [scores, ctx.constant(neutral, dtype)])
        scores = ctx.add(ew.WHERE, [none, ctx.constant(0.0, dtype), scores])
    if aggregate == "AVERAGE":
        scores = ctx.add(ew.DIV, [scores, ctx.constant(float(len(nodes[1])), dtype)])
    return ctx.add(ew.ADD, [scores, ctx.constant(base, dtype)]) if base.size else scores


def _by_target(weights: _Weights, targets: int, trees: int) -> np.ndarray | None:
    """[targets, trees of each]: the trees that add to a target, where each adds to one, filled up by the number `trees`; None where that
    is not so, or would be much longer than the list of trees."""
    if targets == 1:
        return np.arange(trees)[None]
    pairs = np.unique(np.stack([weights.tree, weights.target]), axis=1)
    if (pairs[0] < 0).any() or len(np.unique(pairs[0])) < pairs.shape[1]:
        return None
    groups = [pairs[0, pairs[1] == t] for t in range(targets)]
    most = max(map(len, groups), default=0)
    if most * targets > 2 * trees:
        return None
    return np.stack([np.append(g, np.full(most - len(g), trees)) for g in groups])


def _regressor(ctx: Context) -> Value:
    targets, base = ctx.attrs.get("n_targets", 1), _numbers(ctx, "base_values")
    scores = transformed(ctx, _scores(ctx, _listed(ctx, "target"), targets, ctx.attrs["aggregate_function"], base))
    return ctx.add(ew.CAST, [scores], dtype="float32")


def _ensemble(ctx: Context) -> Value:
    nodes = _newer(ctx)
    number, transform = ctx.attrs["aggregate_function"], ctx.attrs["post_transform"]
    if not (0 <= number < len(AGGREGATES) and 0 <= transform < len(TRANSFORMS)):
        raise ctx.invalid(f"unknown aggregate_function {number} or post_transform {transform}")
    targets = ctx.attrs.get("n_targets") or int(nodes[2].target.max(initial=0)) + 1
    scores = _scores(ctx, nodes, targets, AGGREGATES[number], np.zeros(0))
    return ctx.add(ew.CAST, [transformed(ctx, scores, list(TRANSFORMS)[transform])], dtype=ctx.value(0).dtype)


def _classifier(ctx: Context) -> tuple[Value, Value]:
    """(labels, scores). Of two classes the second one may have the only score, given as that of class 0: a probability where no weight is
    negative."""
    nodes, classes, base = _listed(ctx, "class"), class_count(ctx), _numbers(ctx, "base_values")
    single = not nodes[2].target.any() and classes <= 2 and base.size < 2
    scores = ctx.add(ew.CAST, [_scores(ctx, nodes, 1 if single else classes, "SUM", base)], dtype="float32")
    probability = bool((nodes[2].weight >= 0).all()) and ctx.attrs["post_transform"] != "LOGISTIC"
    return decided(ctx, scores, 0.5 if probability else 0.0, probability)


TABLE: Table = {"TreeEnsembleRegressor": _regressor, "TreeEnsembleClassifier": _classifier, "TreeEnsemble": _ensemble}
