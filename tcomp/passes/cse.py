"""Common subexpression elimination: equal constants, and equal operators on the same values, become one."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tcomp.ir.expr import Expr
from tcomp.ir.graph import Graph, Node, Value
from tcomp.passes.rewrite import Rewriter


def merge_equal(graph: Graph) -> Graph:
    """The graph without repetitions, within it and within each body. Constants are equal when all bits are."""
    rewriter = Rewriter(graph)
    for value, first in _equal_constants(graph.constants).items():
        rewriter.merge_constant(value, first)
    seen: dict[Hashable, Node] = {}
    for original in graph.nodes:
        node = rewriter.resolved(original)
        if node.bodies:
            rewriter.append(replace(node, bodies=tuple(map(merge_equal, node.bodies))))
            continue
        key = (node.op, node.inputs, _key(tuple(sorted(node.attrs.items()))), tuple(v.layout for v in node.outputs))
        first_node = seen.setdefault(key, node)
        if rewriter.is_copy(node) or first_node is node or not rewriter.replace(node, first_node.outputs):
            rewriter.append(node)
    return rewriter.finish()


def _key(attr: Any) -> Hashable:
    """Attributes told apart by type and bits: 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    if isinstance(attr, tuple | list):
        return tuple(map(_key, attr))
    if isinstance(attr, float):
        return "float", attr.hex()
    return attr if isinstance(attr, Expr) else (type(attr).__name__, attr)


def _equal_constants(constants: Mapping[Value, np.ndarray]) -> dict[Value, Value]:
    """Each constant that repeats an earlier one -> that one. Contents are hashed only where type and shape agree."""
    groups: dict[Hashable, list[Value]] = {}
    for value in constants:
        groups.setdefault((value.dtype, value.shape, value.layout), []).append(value)
    repeats: dict[Value, Value] = {}
    for group in groups.values():
        first: dict[Hashable, Value] = {}
        digests: dict[int, bytes] = {}  # by identity of the array: several values may share one
        for value in group if len(group) > 1 else ():
            array = constants[value]
            if id(array) not in digests:
                digests[id(array)] = _digest(array)
            earlier = first.setdefault(digests[id(array)], value)
            if earlier is not value:
                repeats[value] = earlier
    return repeats


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16).digest()
