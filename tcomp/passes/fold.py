"""Constant folding: operators on constants are computed at compile time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr, walk
from tcomp.ir.graph import IF, LOOP, Graph, Node, Value
from tcomp.ir.interpreters.te import evaluate
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph, same_type
from tcomp.passes.structure import structural

MAX_BYTES = 64 << 20  # bytes of a constant result, unless what it is computed from is larger: bounds artifacts and memory
MAX_STEPS = 1 << 32  # elements of a stage, times the steps of a reduction in it: some 10 s in NumPy
MAX_IMPERATIVE_ELEMENTS = 1 << 16  # elements of the results of an imperative program, which is interpreted: some seconds


def fold_constants(graph: Graph, notes: Notes | None = None, limit: int = MAX_BYTES) -> Graph:
    """The graph with constant nodes computed, constant branches chosen, and constants handed into bodies made constants there. A node is
    left alone where its result has more than `limit` bytes and is larger than its inputs (an expansion is cheaper to repeat than to
    load)."""

    def mentions_dim(attr: Any) -> bool:  # a size that is known at run time only
        return any(map(mentions_dim, attr)) if isinstance(attr, tuple | list) else isinstance(attr, Expr) and attr.op != "const"

    def is_quick(t: te.Tensor) -> bool:
        sums = [e for e in walk(t.body) if e.op == "reduce"] if t.body is not None else []
        steps = max((prod(axis.attr.hi + 1 for axis in e.attr[1]) for e in sums), default=1)
        return prod(map(int, t.shape)) * steps <= (MAX_STEPS if t.extern is None else MAX_IMPERATIVE_ELEMENTS)

    def constant_node(node: Node, rewriter: Rewriter) -> Replacement:
        """op(constants) = a constant."""
        given = [v for v in node.inputs if v is not None]
        dims = [*node.attrs.values(), *(v.shape for v in node.outputs)]
        if structural(node) or not all(v in rewriter.constants for v in given) or any(map(mentions_dim, dims)):
            return None
        size = sum(prod(v.shape) * itemsize(v.dtype) for v in node.outputs)
        if size > max(limit, sum(rewriter.constants[v].nbytes for v in given)):
            return f"the constant result would take {size} bytes"
        leaves = {v: v.placeholder() for v in given}
        outputs = node.tensors([None if v is None else leaves[v] for v in node.inputs])
        if not all(map(is_quick, te.tensors(outputs))):
            return "computing the constant result would take long"
        try:
            arrays = evaluate(outputs, {leaves[v]: rewriter.constants[v] for v in given}, {})
        except IRError as error:  # it may stand in a branch that is never taken
            return f"the constant result is undefined: {error.what}"
        return [rewriter.constant(a, v.name, v.dtype) for a, v in zip(arrays, node.outputs, strict=True)]

    return rewrite_graph(graph, (known_branch, captured_constants, constant_node), notes)


def known_branch(node: Node, rewriter: Rewriter) -> Replacement:
    """if(true, x; f, g) = f(x)    if(false, x; f, g) = g(x)"""
    condition = rewriter.array(node.inputs[0]) if node.op is IF else None
    if condition is None:
        return None
    body = node.bodies[0 if condition.item() else 1]
    given = dict(zip(body.inputs, node.inputs[1:], strict=True))
    if not all(outer is not None and same_type(inner, outer) for inner, outer in given.items()):
        return "an input of the branch has a more general type than what is passed"
    if not all(map(same_type, body.outputs, node.outputs)):
        return "an output of the branch has a more special type than the node's"
    inside: dict[Value | None, Value | None] = {None: None}
    inside.update(given.items())
    inside |= {v: rewriter.constant(array, v.name, v.dtype) for v, array in body.constants.items()}
    for inner in body.nodes:
        outputs = _renamed(inner, rewriter)
        rewriter.append(replace(inner, inputs=tuple(inside[v] for v in inner.inputs), outputs=outputs))
        inside.update(zip(inner.outputs, outputs, strict=True))
    return [v for u in body.outputs if (v := inside[u]) is not None]


def _renamed(node: Node, rewriter: Rewriter) -> tuple[Value, ...]:
    return tuple(Value(rewriter.fresh(v.name), v.dtype, v.shape, v.layout) for v in node.outputs)


def captured_constants(node: Node, rewriter: Rewriter) -> Sequence[Value] | None:
    """A constant that bodies only read = a constant of the bodies."""
    if node.op not in (IF, LOOP):
        return None
    # The first input that is captured, and what to add to get from the number of a node's input to that of the body's.
    first, shift = (1, -1) if node.op is IF else (node.attrs["carried"] + node.attrs["scanned"], 1)
    constants = {n: v for n, v in enumerate(node.inputs) if n >= first and v is not None and v in rewriter.constants}
    moved = {n: v for n, v in constants.items() if all(same_type(body.inputs[n + shift], v) for body in node.bodies)}
    if not moved:
        return None
    bodies = []
    for body in node.bodies:
        inside = {body.inputs[n + shift]: rewriter.constants[v] for n, v in moved.items()}
        left = tuple(v for v in body.inputs if v not in inside)
        bodies.append(replace(body, inputs=left, constants={**body.constants, **inside}))
    inputs, outputs = tuple(v for n, v in enumerate(node.inputs) if n not in moved), _renamed(node, rewriter)
    rewriter.append(replace(node, inputs=inputs, outputs=outputs, bodies=tuple(bodies)))
    return outputs
