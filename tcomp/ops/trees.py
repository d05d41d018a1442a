"""Ensembles of decision trees: every tree is walked down for a fixed number of steps without branches, by gathers from one table of nodes.

A node is a test `x[feature] <= threshold`; its two children stand side by side in the table, the one for a test that fails first. A leaf
is a node whose test always fails and whose first child is itself, so that walks of any length end in it. The roots come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcomp.ir import loops as L, te
from tcomp.ir.expr import Expr, bitcast, cast, maximum, minimum
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor

MAX_UNROLLED = 32  # steps of a walk that are one expression; longer walks are a loop program
NEVER, ALWAYS, BY_NODE = "never", "always", "by node"  # whether a missing value (NaN) passes a test

# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class NodeTables:
    """The nodes of an ensemble. `links` holds (first child << shift) + (missing values pass) * 2^feature_bits + feature. In one
    table, thresholds are the upper 32 bits: a gather takes about as long for both as for one of the two."""

    links: np.ndarray  # [nodes], int32 where that is enough, else int64; with thresholds in the upper half int64
    thresholds: np.ndarray | None  # [nodes]; None where they are in `links`
    slots: np.ndarray  # [nodes]: the node as it was given
    steps: int  # of the longest walk
    feature_bits: int
    missing: str


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
    be, which pays where lanes run across trees, and not where they run across rows, which are then half as many. None where the nodes
    form a cycle."""
    inner = failed != np.arange(len(failed))
    how = NEVER if not missing[inner].any() else ALWAYS if missing[inner].all() and not np.isnan(threshold[inner]).any() else BY_NODE
    children = np.stack([passed, failed] if how == ALWAYS else [failed, passed], -1)
    slots, first, place, end = [roots], np.full(len(failed), -1), roots, len(roots)
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
    packed = (links << (bits + 1)) + ((missing & inner)[nodes].astype(np.int64) << bits) + np.where(inner, feature, 0)[nodes]
    small = packed.max(initial=0) <= np.iinfo(np.int32).max
    thresholds = np.where(inner, threshold, np.nan)[nodes].astype(threshold.dtype)
    if together and small and thresholds.dtype == np.float32:
        both = (thresholds.view(np.int32).astype(np.int64) << 32) | packed  # neither part is negative below bit 32
        return NodeTables(both, None, nodes, steps, bits, how)
    return NodeTables(packed.astype(np.int32 if small else np.int64), thresholds, nodes, steps, bits, how)


# ---------------------------------------------------------------- walks

Step = Callable[[Expr, Expr], Expr]  # (row, node) -> the next node of the walk


def _step(x: Tensor | L.Buffer, links: Tensor | L.Buffer, thresholds: Tensor | L.Buffer | None, feature_bits: int, missing: str) -> Step:
    nodes, features = links.shape[0], x.shape[1]
    assert isinstance(nodes, int) and isinstance(features, int)

    def parts(node: Expr) -> tuple[Expr, Expr]:
        """Link and threshold."""
        if thresholds is not None:
            return links[node], thresholds[node]
        both = links[node]
        return cast(both, "int32"), bitcast(cast(both // (1 << 32), "int32"), "float32")

    def step(row: Expr, node: Expr) -> Expr:
        link, threshold = parts(node)
        value = x[row, minimum(link % (1 << feature_bits), features - 1)]
        passes = threshold < value if missing == ALWAYS else value <= threshold  # the opposite, and the children are swapped
        if missing == BY_NODE:
            passes = passes | (te.isnan(value) & te.not_equal((link // (1 << feature_bits)) % 2, 0))
        return _inside(link // (1 << (feature_bits + 1)) + cast(passes, link.dtype), nodes)

    return step


def _leaves(
    x: Tensor, links: Tensor, thresholds: Tensor | None, trees: int, steps: int, feature_bits: int, missing: str
) -> Callable[[Expr, Expr], Expr]:
    """The function from a row and a tree to the leaf in which the walk ends."""
    nodes = links.shape[0]
    assert isinstance(nodes, int)

    def walk(row: Expr, tree: Expr) -> Expr:
        node, step = tree, _step(x, links, thresholds, feature_bits, missing)
        for _ in range(steps):
            node = step(row, node)
        return node

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (leaves,), step = outputs, _step(inputs[0], inputs[1], None if thresholds is None else inputs[2], feature_bits, missing)

        def one(at: tuple[Expr, ...]) -> L.Stmt:
            go = L.loop("step", steps, lambda _: L.store(leaves, at, step(at[0], _inside(leaves[at], nodes))))
            return L.block(L.store(leaves, at, cast(at[1], leaves.dtype)), go)

        return L.over(leaves.shape, one)

    if steps <= MAX_UNROLLED:
        return walk
    given = [x, links] if thresholds is None else [x, links, thresholds]
    leaves = te.extern(((x.shape[0], trees), links.dtype if thresholds is not None else "int32"), given, program, "leaves")
    return lambda row, tree: _inside(leaves[row, tree], nodes)


def _inside(node: Expr, nodes: int) -> Expr:
    return maximum(minimum(node, nodes - 1), 0)


def tree_leaves(x: Tensor, links: Tensor, thresholds: Tensor | None, *, trees: int, **tables: Any) -> Tensor:
    """[rows, trees]: the leaves in which the walks of rows x [rows, features] end; the roots are the first nodes of the tables."""
    return te.compute((x.shape[0], trees), _leaves(x, links, thresholds, trees, **tables), "tree_leaves")


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
    x: Tensor, links: Tensor, thresholds: Tensor | None, values: Tensor, *, trees: int, targets: int, aggregate: str, **tables: Any
) -> Tensor:
    """[rows, targets] as `leaf_scores`, where each tree has one target: the first of as many trees as the others have, then those of the
    second one, ... `values` [nodes] are those of leaves."""
    leaf, each = _leaves(x, links, thresholds, trees, **tables), trees // targets

    def element(n: Expr, c: Expr) -> Expr:
        t = te.reduce_axis(each, "t")
        return _REDUCERS[aggregate](values[leaf(n, c * each + t)], t)

    return te.compute((x.shape[0], targets), element, "tree_scores")


TREE_LEAVES, LEAF_SCORES, TREE_SCORES = (
    Operator("tree_leaves", tree_leaves),
    Operator("leaf_scores", leaf_scores),
    Operator("tree_scores", tree_scores),
)
