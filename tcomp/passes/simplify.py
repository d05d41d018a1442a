"""Algebra with constants: per-channel factors and offsets move into weights, chains of them become one.

A node is *affine* where its tensor expression is  y[i] = s * x[i] + t  with s and t constants that vary along one axis at most (stored
batch normalisation, scale, bias). Chains compose; and behind an operator f that is linear in a constant w along the output's axis
(convolutions, matrix products) they become part of it. Results may differ by rounding, as is usual for batch normalisation in inference.

    (x * s + t) * u + v = x * (s * u) + (t * u + v)
    f(x, w) * s = f(x, w * s)        f(x, w, b) + t = f(x, w, b + t), where b is merely added
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from tcomp.ir import expr as E, te
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import Graph, Node, Value
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.scalar_operators import BINARY, UNARY
from tcomp.ops.elementwise import ADD, MUL
from tcomp.passes import structure
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, label, rewrite_graph

SHARED_LIMIT = 64 << 10  # bytes: a larger constant that others read as well is not copied, for the sake of the artifact's size
CANCELLATION = 2.0**-10  # sums of offsets smaller than this part of them are left alone: x + c - c may be there to round x
LARGE_OFFSET = 2.0**10  # the size of such a c; among smaller ones cancellation is a coincidence
MAX_OPERANDS = 3  # constant operands that take a factor together: bounds the number of combinations


def simplify(graph: Graph, notes: Notes | None = None) -> Graph:
    """The graph with affine nodes composed and moved into constant operands where that is possible."""
    return rewrite_graph(graph, (affine_chain,), notes)


@dataclass(frozen=True, slots=True)
class _Affine:
    """output = scale * source + shift; both are 0-d, or 1-d along `axis` of the output (float64). It takes so many `nodes` now, and
    arithmetic `operations` for each element."""

    source: Value
    axis: int | None
    scale: np.ndarray
    shift: np.ndarray
    nodes: int
    operations: int

    @property
    def scales(self) -> bool:
        return bool((self.scale != 1).any())

    @property
    def shifts(self) -> bool:
        return bool((self.shift != 0).any())


def affine_chain(node: Node, rewriter: Rewriter) -> Replacement:
    """f(x, w) * s + t = f(x, w * s) + t, and chains of  * s + t  made one; see above."""
    chain = _affine(node, rewriter)
    if chain is None:
        return None
    while (before := rewriter.producer(chain.source)) is not None and rewriter.used_once(chain.source):
        if (first := _affine(before, rewriter)) is None or (longer := _composed(first, chain)) is None:
            break
        chain = longer
    if not (np.isfinite(chain.scale).all() and np.isfinite(chain.shift).all()):
        return "a factor or an offset is not finite"
    producer = rewriter.producer(chain.source)
    body = structure.body_of(producer) if producer is not None and _affine(producer, rewriter) is None else None
    absorbed = None if producer is None or body is None else _absorbed(producer, body, chain, rewriter)
    left = chain.scales + chain.shifts
    if absorbed is not None and not isinstance(absorbed, str) or not (left < chain.nodes or (chain.nodes == 1 and left < chain.operations)):
        return absorbed
    return _written(chain.source, chain, label(node), rewriter)


def _composed(first: _Affine, then: _Affine) -> _Affine | None:
    """`then` after `first`; None where they vary along different axes, or cancel."""
    if None not in (first.axis, then.axis) and first.axis != then.axis:
        return None
    moved = first.shift * then.scale
    shift, largest = moved + then.shift, np.maximum(np.abs(moved), np.abs(then.shift))
    if not then.scales and ((np.abs(shift) < largest * CANCELLATION) & (largest > LARGE_OFFSET)).any():
        return None
    axis = first.axis if then.axis is None else then.axis
    return _Affine(first.source, axis, first.scale * then.scale, shift, first.nodes + then.nodes, first.operations + then.operations)


def _affine(node: Node, rewriter: Rewriter) -> _Affine | None:
    source, *others = {v for v in node.inputs if v is not None and v not in rewriter.constants} or (None,)
    floats = source is not None and not others and source.dtype in ("float32", "float64")
    body = structure.body_of(node) if floats else None
    if source is None or body is None or source.dtype != node.outputs[0].dtype:
        return None
    if (parts := structure.affine(body, source)) is None:
        return None
    coefficients = [E.substitute(e, structure.unit_axes(body.tensor)) for e in parts]
    used = E.variables(*coefficients)
    if len(used) > 1 or not set(used) <= set(body.tensor.axes):
        return None
    axis = body.tensor.axes.index(used[0]) if used else None
    scale, shift = (_elements(e, body, axis, rewriter) for e in coefficients)
    operations = sum(is_float(e.dtype) and e.op in (*BINARY, *UNARY) for e in E.walk(body.expr))
    return _Affine(source, axis, scale, shift, 1, operations)


def _elements(e: E.Expr, body: structure.Body, axis: int | None, rewriter: Rewriter) -> np.ndarray:
    """The values of an expression over constants, for all indices along `axis` if it mentions it."""
    if e.op == "const":
        return np.array(e.attr, np.float64)
    if axis is None or (old := body.tensor.axes[axis]) not in E.variables(e):
        tensor = te.compute((), lambda: e, "coefficient")
    else:
        tensor = te.compute((body.tensor.shape[axis],), lambda i: E.substitute(e, {old: i}), "coefficient")
    given = {t: rewriter.constants[v] for v, t in body.leaves.items() if v in rewriter.constants}
    return evaluate([tensor], given, {})[0].astype(np.float64)


def _absorbed(node: Node, body: structure.Body, chain: _Affine, rewriter: Rewriter) -> Replacement:
    """The node with the chain moved into its constant operands, as far as they take it; or why they do not."""
    constants = {v: a for v in body.leaves if v.dtype in ("float32", "float64") and (a := rewriter.array(v)) is not None}
    once = rewriter.used_once(chain.source)
    factors: dict[Value, np.ndarray] = {}
    if chain.scales:
        # Constants (with the dim that runs along the axis) that, all multiplied by a factor, multiply the output by it.
        axis = chain.axis if chain.scale.ndim else None
        dims = {v: dim for v in constants if (dim := structure.scaled_dim(body, v, axis)) is not None}
        choices = (chosen for count in range(min(len(dims), MAX_OPERANDS), 0, -1) for chosen in combinations(dims, count))
        operands = next(({v: dims[v] for v in chosen} for chosen in choices if structure.scales_with(body, chosen)), {})
        if not operands:
            contraction = any(e.op == "reduce" for e in E.walk(body.expr))
            return f"`{label(node)}` has no constant operand that the factor could move into" if contraction else None
        if not once:
            return f"the result of `{label(node)}` is needed without the factor as well"
        shared = [v.name for v in operands if not rewriter.used_once(v) and constants[v].nbytes > SHARED_LIMIT]
        if shared:
            return f"`{shared[0]}`, the operand of `{label(node)}`, is used by other nodes too"
        factors = {v: _along(chain.scale, v, dim) for v, dim in operands.items()}
    rest, offsets = chain.shift, dict[Value, np.ndarray]()
    added = [(v, structure.scaled_dim(body, v, chain.axis if chain.shift.ndim else None)) for v in constants if chain.shifts]
    bias = next(((v, dim) for v, dim in added if dim is not None and structure.shifts_with(body, v)), None)  # it is merely added
    if bias is not None and once and rewriter.used_once(bias[0]):
        offsets, rest = {bias[0]: _along(chain.shift, *bias)}, np.zeros(())
    if not factors and not offsets:
        return None

    def changed(v: Value) -> np.ndarray:
        """The constant scaled and shifted, rounded once; what is scaled alone may be large, and is never whole in float64."""
        array = constants[v]
        if v in offsets:
            return np.asarray(array * factors.get(v, 1.0) + offsets[v], array.dtype)
        np.multiply(array, factors[v], out=(scaled := np.empty_like(array)), dtype=np.float64, casting="unsafe")
        return scaled

    replaced = {v: rewriter.constant(changed(v), v.name, v.dtype) for v in factors | offsets}
    inputs = [v if v is None else replaced.get(v, v) for v in node.inputs]
    value = rewriter.add(node.op, inputs, node.attrs, node.name)[0]
    return _written(value, replace(chain, scale=np.ones(()), shift=rest), label(node), rewriter)


def _along(values: np.ndarray, operand: Value, dim: int) -> np.ndarray:
    """`values` shaped so that they broadcast along one dim of the operand."""
    return values if values.ndim == 0 else values.reshape([-1 if d == dim else 1 for d in range(len(operand.shape))])


def _written(value: Value, chain: _Affine, name: str, rewriter: Rewriter) -> Replacement:
    """value * scale + shift as nodes, as far as they are needed."""
    trailing = 0 if chain.axis is None else len(value.shape) - 1 - chain.axis
    for op, needed, array in ((MUL, chain.scales, chain.scale), (ADD, chain.shifts, chain.shift)):
        if needed:
            constant = array.reshape(-1, *[1] * trailing) if array.ndim else array
            operand = rewriter.constant(constant.astype(value.dtype), f"{name}.{op.name}")
            (value,) = rewriter.add(op, [value, operand], {}, name)
    return (value,)
