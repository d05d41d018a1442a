"""Ensembles of decision trees: every tree is walked down for a fixed number of steps without branches, by gathers from one table of nodes.

A node is a test `x[feature] <= threshold`; its two children stand side by side in the table, the one for a test that fails first. A leaf
is a node whose test always fails and whose first child is itself, so that walks of any length end in it. The roots come first.

Where lanes run across trees, the first levels need no gathers: all tests of a level are read, side by side for all trees, and the one of
each tree is chosen by how the tests above came out. The nodes of the next level then take the place of the roots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcomp.ir import loops as L, te
from tcomp.ir.expr import Expr, as_expr, bitcast, cast, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor

MAX_UNROLLED = 32  # steps of a walk that are one expression; longer walks are a loop program
MAX_ABREAST = 4  # levels whose tests are all read: one more has as many as all before, while a gather takes as long as ever
NEVER, ALWAYS, BY_NODE = "never", "always", "by node"  # whether a missing value (NaN) passes a test

# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class NodeTables:
    """The nodes of an ensemble. `links` holds (first child << shift) + (missing values pass) * 2^feature_bits + feature. In one
    table, thresholds are the upper 32 bits: a gather takes about as long for both as for one of the two.

    The first levels, where they are `abreast`, are not among the nodes: row 2^level - 1 + n has test n of a level for each tree, those of
    its children are 2 n and 2 n + 1 of the next one, and n * trees + tree is the node where the walk goes on behind the last one."""

    links: np.ndarray  # [nodes], int32 where that is enough, else int64; with thresholds in the upper half int64
    thresholds: np.ndarray | None  # [nodes]; None where they are in `links`
    slots: np.ndarray  # [nodes]: the node as it was given
    steps: int  # of the longest walk, without those abreast
    feature_bits: int
    missing: str
    tests: np.ndarray | None = None  # [tests, trees], uint8 or int32: (missing values pass) * 2^feature_bits + feature
    limits: np.ndarray | None = None  # [tests, trees]: their thresholds


def node_tables(
    feature: np.ndarray,
    threshold: np.ndarray,
    missing: np.ndarray,
    passed: np.ndarray,
    failed: np.ndarray,
    roots: np.ndarray,
    together: bool = False,
) -> NodeTables | None:
    """The tables of trees given by arrays over their nodes: node i goes to `passed[i]` where `x[feature[i]] <= threshold[i]`, else to
    `failed[i]`, which is i itself in leaves; `missing[i]` says that NaN passes. Nodes may be shared. `together`: one table, if that can
    be, and the first levels abreast, which pays where lanes run across trees, and not where they run across rows, which are then half as
    many. None where the nodes form a cycle."""
    inner = failed != np.arange(len(failed))
    how = NEVER if not missing[inner].any() else ALWAYS if missing[inner].all() and not np.isnan(threshold[inner]).any() else BY_NODE
    children = np.stack([passed, failed] if how == ALWAYS else [failed, passed], -1)
    levels, place = list[np.ndarray](), roots[None]
    while together and len(levels) < MAX_ABREAST and inner[place].any():
        levels.append(place)
        place = children[place].transpose(0, 2, 1).reshape(-1, len(roots))
    place = place.ravel()
    slots, first, end = [place], np.full(len(failed), -1), len(place)
    while (new := np.unique(place[inner[place] & (first[place] < 0)])).size:  # level by level, the nodes of the next one behind this one's
        first[new] = end + 2 * np.arange(new.size)
        end += 2 * new.size
        place = children[new].ravel()
        slots.append(place)
    nodes = np.concatenate(slots)
    links = np.where(inner[nodes], first[nodes], np.arange(end))
    steps, heights = 0, np.zeros(end, np.int64)
    below = links + inner[nodes]
    while not np.array_equal(heights, higher := np.where(inner[nodes], 1 + np.maximum(heights[links], heights[below]), 0)):
        heights, steps = higher, steps + 1
        if steps > inner.sum():
            return None
    bits = int(max(feature.max(initial=0), 1)).bit_length()
    tested = ((missing & inner).astype(np.int64) << bits) + np.where(inner, feature, 0)
    limits = np.where(inner, threshold, np.nan).astype(threshold.dtype)
    packed, thresholds = (links << (bits + 1)) + tested[nodes], limits[nodes]
    small = packed.max(initial=0) <= np.iinfo(np.int32).max
    above: tuple[np.ndarray, ...] = ()
    if levels:
        abreast = np.concatenate(levels)
        above = tested[abreast].astype(np.uint8 if bits < 8 else np.int32), limits[abreast]
    if together and small and thresholds.dtype == np.float32:
        both = (thresholds.view(np.int32).astype(np.int64) << 32) | packed  # neither part is negative below bit 32
        return NodeTables(both, None, nodes, steps, bits, how, *above)
    return NodeTables(packed.astype(np.int32 if small else np.int64), thresholds, nodes, steps, bits, how, *above)


# ---------------------------------------------------------------- walks

Array = Tensor | L.Buffer
Walk = Callable[[Expr, Expr], Expr]  # (row, node) -> the next node; or (row, tree) -> its leaf


@dataclass(frozen=True)
class Ensemble:
    """The inputs of a walk through the trees: the rows, and the tables of `NodeTables`."""

    x: Array
    links: Array
    thresholds: Array | None
    tests: Array | None
    limits: Array | None
    feature_bits: int
    missing: str

    def passes(self, row: Expr, test: Expr, threshold: Expr) -> Expr:
        """Whether a row passes a test, which is known by the bits of its feature and the one for missing values."""
        features = self.x.shape[1]
        assert isinstance(features, int)
        value = self.x[row, minimum(test % (1 << self.feature_bits), features - 1)]
        passed = threshold < value if self.missing == ALWAYS else value <= threshold  # the opposite, and the children are swapped
        if self.missing == BY_NODE:
            passed = passed | (te.isnan(value) & te.not_equal((test // (1 << self.feature_bits)) % 2, 0))
        return passed

    def step(self, row: Expr, node: Expr) -> Expr:
        """The next node of a walk."""
        nodes, link = self.links.shape[0], self.links[node]
        assert isinstance(nodes, int)
        if self.thresholds is None:
            link, threshold = cast(link, "int32"), bitcast(cast(link // (1 << 32), "int32"), "float32")
        else:
            threshold = self.thresholds[node]
        return _inside(link // (1 << (self.feature_bits + 1)) + cast(self.passes(row, link, threshold), link.dtype), nodes)

    def start(self, row: Expr, tree: Expr) -> Expr:
        """The node behind the tests that are abreast."""
        if self.tests is None or self.limits is None:
            return tree
        (count, trees), nodes = self.tests.shape, self.links.shape[0]
        assert isinstance(count, int) and isinstance(trees, int) and isinstance(nodes, int)
        place, passed = cast(as_expr(0), "int32"), list[Expr]()
        while (first := (1 << len(passed)) - 1) < count:
            some = [(self.tests[n, tree], self.limits[n, tree]) for n in range(first, 2 * first + 1)]
            for p in passed:  # the first one says which half
                half = len(some) // 2
                some = [(select(p, b, a), select(p, d, c)) for (a, c), (b, d) in zip(some[:half], some[half:], strict=True)]
            passed.append(self.passes(row, cast(some[0][0], "int32"), some[0][1]))
            place = place * 2 + cast(passed[-1], "int32")
        return _inside(place * trees + cast(tree, "int32"), nodes)


def _leaves(
    x: Tensor, links: Tensor, thresholds: Tensor | None, tests: Tensor | None, limits: Tensor | None,
    *, trees: int, steps: int, feature_bits: int, missing: str,
) -> Walk:  # fmt: skip
    """The function from a row and a tree to the leaf in which the walk ends."""
    ensemble, nodes = Ensemble(x, links, thresholds, tests, limits, feature_bits, missing), links.shape[0]
    given = [a for a in (x, links, thresholds, tests, limits) if a is not None]
    assert isinstance(nodes, int)

    def walk(row: Expr, tree: Expr) -> Expr:
        node = ensemble.start(row, tree)
        for _ in range(steps):
            node = ensemble.step(row, node)
        return node

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (leaves,), held = outputs, dict(zip(given, inputs, strict=True))
        optional = [None if a is None else held[a] for a in (thresholds, tests, limits)]
        stored = Ensemble(held[x], held[links], optional[0], optional[1], optional[2], feature_bits, missing)

        def one(at: tuple[Expr, ...]) -> L.Stmt:
            go = L.loop("step", steps, lambda _: L.store(leaves, at, stored.step(at[0], _inside(leaves[at], nodes))))
            return L.block(L.store(leaves, at, cast(stored.start(*at), leaves.dtype)), go)

        return L.over(leaves.shape, one)

    if steps <= MAX_UNROLLED:
        return walk
    leaves = te.extern(((x.shape[0], trees), links.dtype if thresholds is not None else "int32"), given, program, "leaves")
    return lambda row, tree: _inside(leaves[row, tree], nodes)


def _inside(node: Expr, nodes: int) -> Expr:
    return maximum(minimum(node, nodes - 1), 0)


def tree_leaves(
    x: Tensor, links: Tensor, thresholds: Tensor | None, tests: Tensor | None, limits: Tensor | None, *, trees: int, **tables: Any
) -> Tensor:
    """[rows, trees]: the leaves in which the walks of rows x [rows, features] end, by the tables of `NodeTables`."""
    return te.compute((x.shape[0], trees), _leaves(x, links, thresholds, tests, limits, trees=trees, **tables), "tree_leaves")


_REDUCERS = {"SUM": te.sum, "AVERAGE": te.sum, "MIN": te.min, "MAX": te.max}


def leaf_scores(leaves: Tensor, values: Tensor, aggregate: str) -> Tensor:
    """[rows, targets]: the values [nodes, targets] of the leaves [rows, trees] of each row, added up, or the least or largest of them."""
    nodes = values.shape[0]
    assert isinstance(nodes, int)

    def element(n: Expr, c: Expr) -> Expr:
        t = te.reduce_axis(leaves.shape[1], "t")
        return _REDUCERS[aggregate](values[_inside(leaves[n, t], nodes), c], t)

    return te.compute((leaves.shape[0], values.shape[1]), element, "leaf_scores")


def tree_scores(
    x: Tensor, links: Tensor, thresholds: Tensor | None, tests: Tensor | None, limits: Tensor | None, values: Tensor,
    *, trees: int, targets: int, aggregate: str, **tables: Any,
) -> Tensor:  # fmt: skip
    """[rows, targets] as `leaf_scores`, where each tree has one target: the first of as many trees as the others have, then those of the
    second one, ... `values` [nodes] are those of leaves."""
    leaf, each = _leaves(x, links, thresholds, tests, limits, trees=trees, **tables), trees // targets

    def element(n: Expr, c: Expr) -> Expr:
        t = te.reduce_axis(each, "t")
        return _REDUCERS[aggregate](values[leaf(n, c * each + t)], t)

    return te.compute((x.shape[0], targets), element, "tree_scores")


TREE_LEAVES, LEAF_SCORES, TREE_SCORES = (
    Operator("tree_leaves", tree_leaves),
    Operator("leaf_scores", leaf_scores),
    Operator("tree_scores", tree_scores),
)
