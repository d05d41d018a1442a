"""Common subexpression elimination: equal constants, and equal operators on the same values, become one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from tcomp.ir.graph import Constant, Graph, LazyConstant, Node, Value, attributes_key, content_hash
from tcomp.passes.rewrite import Rewriter

SAMPLE = 64  # elements of a constant, which tell most constants of one shape apart without reading all of them


def merge_equal(graph: Graph) -> Graph:
    """The graph without repetitions, within it and within each body. Constants are equal when all bits are."""
    rewriter = Rewriter(graph)
    for value, first in _equal_constants(graph.constants).items():
        rewriter.merge(value, first)
    seen: dict[Hashable, Node] = {}
    for original in graph.nodes:
        node = rewriter.resolved(original)
        if node.bodies:
            rewriter.append(replace(node, bodies=tuple(map(merge_equal, node.bodies))))
            continue
        key = (node.op, node.inputs, attributes_key(node.attrs), tuple(v.layout for v in node.outputs))
        earlier = seen.setdefault(key, node)
        if rewriter.is_copy(node) or earlier is node or not rewriter.replace(node, earlier.outputs):
            rewriter.append(node)
    return rewriter.finish()


def _equal_constants(constants: Mapping[Value, Constant]) -> dict[Value, Value]:
    """Each constant that repeats an earlier one -> that one. Contents are hashed only where type, shape and a few elements agree."""
    groups: dict[Hashable, list[Value]] = {}
    for value, array in constants.items():
        sample = array.key if isinstance(array, LazyConstant) else array.flat[:: array.size // SAMPLE + 1].tobytes()
        groups.setdefault((value.dtype, value.shape, value.layout, sample), []).append(value)
    repeats: dict[Value, Value] = {}
    for group in groups.values():
        first, digests = dict[Hashable, Value](), dict[int, Hashable]()  # digests by identity of the array: several values may share one
        for value in group if len(group) > 1 else ():
            array = constants[value]
            if id(array) not in digests:
                digests[id(array)] = array.key if isinstance(array, LazyConstant) else content_hash(array)
            if (earlier := first.setdefault(digests[id(array)], value)) is not value:
                repeats[value] = earlier
    return repeats
