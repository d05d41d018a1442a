"""Canonical form: equivalent forms of a graph are rewritten to one, so that later passes need to recognise one only.

No rule here changes a result, except that a power with a small exponent is as accurate as products are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, as_expr, bounds, const, row_major, substitute, walk
from tcomp.ir.graph import Graph, Node, Operator, Value
from tcomp.ir.simplify import as_dim, difference, same_dim, same_shape
from tcomp.ops.elementwise import CAST, DIV, MUL, POW, RECIPROCAL, SQRT
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import PAD, RESHAPE, TRANSPOSE, product
from tcomp.ops.reduction import GROUP_NORM, INSTANCE_NORM
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph, rule_for
from tcomp.passes.structure import Movement, bodies, body_of, canonical, lossless, matrix_product, movement, structural, with_constants

MAX_EPILOGUE = 4  # operators behind a product that are looked at
UNIFORM_LIMIT = 1 << 16  # elements of a constant that is searched for different ones: bounds compile time


def canonicalize(graph: Graph, notes: Notes | None = None) -> Graph:
    """The graph in canonical form: see the rules."""
    rules = (no_operation, one_movement, early_transpose, product_of_batches, late_reshape)
    return rewrite_graph(graph, (*rules, two_pads, two_casts, small_power, exact_division, norm_of_groups), notes)


def no_operation(node: Node, rewriter: Rewriter) -> Replacement:
    """f(x)[i] == x[i]  =>  f(x) = x,  read off the tensor expression: x + 0, x * 1, a reshape to the same shape, ..."""
    inputs = [v for v in node.inputs if v is not None]
    if structural(node) or not any(v.dtype == u.dtype and same_shape(v.shape, u.shape) for v in inputs for u in node.outputs):
        return None
    values = {v: value for v in inputs if (value := uniform(rewriter.array(v))) is not None}
    moves = [None if body is None else movement(with_constants(body, values)) for body in bodies(node)]
    result = [move.source if move is not None and move.is_identity else None for move in moves]
    if None in result:  # the node stays, and must not be found again for a result that nobody reads any more
        result = [v if rewriter.is_read(u) else None for v, u in zip(result, node.outputs, strict=True)]
    return result if any(v is not None for v in result) else None


def uniform(array: np.ndarray | None) -> bool | int | float | None:
    """The value that all elements of a constant have; None where they differ (or it is large)."""
    if array is None or not 0 < array.size <= UNIFORM_LIMIT:
        return None
    first = array.reshape(-1)[0]
    return first.item() if (array == first).all() else None


def one_movement(node: Node, rewriter: Rewriter) -> Replacement:
    """move(move(x)) = x, reshape(x) or transpose(x)    transpose(x) = reshape(x), where only axes of extent 1 move; by any operators."""

    def moved(n: Node | None) -> Movement | None:
        return movement(body_of(n)) if n is not None and len(n.inputs) == 1 else None

    def add(op: Operator, move: Movement, **attrs: Any) -> Sequence[Value]:
        return rewriter.add(op, [move.source], attrs, node.name)

    if (outer := moved(node)) is None:
        return None
    if (inner := moved(rewriter.producer(outer.source))) is None:
        return add(RESHAPE, outer, shape=outer.tensor.shape) if node.op is not RESHAPE and _keeps_order(outer) else None
    at = dict(zip(inner.tensor.axes, outer.indices, strict=True))
    both = Movement(inner.source, outer.tensor, canonical(outer.tensor, [substitute(i, at) for i in inner.indices]))
    if both.is_identity:
        return (both.source,)
    if _keeps_order(both):
        return add(RESHAPE, both, shape=both.tensor.shape)
    return add(TRANSPOSE, both, perm=order) if (order := _permutation(both)) else None


def _keeps_order(move: Movement) -> bool:
    """Whether every element keeps its row-major position."""
    source, target = move.source.shape, move.tensor.shape
    place = row_major(canonical(move.tensor, move.tensor.axes), target)
    return same_dim(product(source), product(target)) and difference(row_major(move.indices, source), place) is const(0)


def _permutation(move: Movement) -> tuple[int, ...] | None:
    """The order of the source's axes, if those that are longer than 1 are permuted."""
    tensor, source = move.tensor, move.source
    place = {axis: d for d, axis in enumerate(tensor.axes) if tensor.shape[d] != 1}
    perm = {place[i]: dim for dim, i in enumerate(move.indices) if i in place}
    units = [dim for dim in range(tensor.ndim) if dim not in perm.values()]
    if tensor.ndim != len(source.shape) or len(perm) != len(place) or any(source.shape[dim] != 1 for dim in units):
        return None
    order = tuple(perm[d] if d in perm else units.pop(0) for d in range(tensor.ndim))
    return order if same_shape([source.shape[d] for d in order], tensor.shape) else None


def _batch(node: Node | None) -> tuple[Dim, ...] | None:
    """The batch axes that a node makes one of, in front of two axes that it keeps; None for any other node."""
    if node is None or node.op is not RESHAPE or node.inputs[0] is None:
        return None
    source, target = node.inputs[0].shape, node.outputs[0].shape
    merged = len(target) == 3 < len(source) and same_shape(source[-2:], target[1:]) and same_dim(product(source[:-2]), target[0])
    return tuple(source[:-2]) if merged else None


@rule_for(TRANSPOSE)
def early_transpose(node: Node, rewriter: Rewriter) -> Replacement:
    """transpose(reshape(x)) = reshape(transpose(x)), where batches of matrices are made one, and matrices transposed"""
    before = rewriter.producer(node.inputs[0])
    if (batch := _batch(before)) is None or before is None or tuple(node.attrs["perm"]) != (0, 2, 1):
        return None
    n = len(batch)
    moved = rewriter.add(TRANSPOSE, before.inputs, {"perm": (*range(n), n + 1, n)}, node.name)
    return rewriter.add(RESHAPE, moved, {"shape": node.outputs[0].shape}, node.name)


def product_of_batches(node: Node, rewriter: Rewriter) -> Replacement:
    """matmul(reshape(x), reshape(y)) = reshape(matmul(x, y)), where batches of matrices are made one: heads of attention stay an axis"""
    makers = [rewriter.producer(v) for v in node.inputs]
    batch = next((found for maker in makers if (found := _batch(maker)) is not None), None)
    if batch is None or len(makers) != 2 or any(v is None or len(v.shape) != 3 for v in node.inputs):
        return None
    if (form := matrix_product(node)) is None or not all(same_dim(v.shape[0], node.outputs[0].shape[0]) for v in node.inputs if v):
        return None
    operands = list[Value | None]()
    for v, maker in zip(node.inputs, makers, strict=True):
        assert v is not None
        same = maker is not None and same_shape(_batch(maker) or (), batch)
        operands += maker.inputs if maker and same else rewriter.add(RESHAPE, [v], {"shape": (*batch, *v.shape[1:])}, node.name)
    attrs = {"transpose_a": form.transpose_left, "transpose_b": form.transpose_right}
    products = rewriter.add(MATMUL, operands, {name: True for name, wanted in attrs.items() if wanted}, node.name)
    return rewriter.add(RESHAPE, products, {"shape": node.outputs[0].shape}, node.name)


def late_reshape(node: Node, rewriter: Rewriter) -> Replacement:
    """f(reshape(x), y) = reshape(f(x, reshape(y))), for f element by element: it becomes part of the kernel that sums x up"""
    if structural(node) or len(node.outputs) != 1:
        return None
    target, before = node.outputs[0].shape, [rewriter.producer(v, RESHAPE) for v in node.inputs]
    used = [p for v, p in zip(node.inputs, before, strict=True) if p is not None and v is not None and rewriter.used_once(v)]
    sums = [p for p in used if _of_product(p.inputs[0], rewriter)]
    if not sums or any(isinstance(a, tuple | list) for a in node.attrs.values()) or "axis" in node.attrs:
        return None
    source = sums[0].inputs[0]
    body = body_of(node)
    if source is None or body is None or any(e.op == "reduce" for e in walk(body.expr)):
        return None
    if not same_dim(product(source.shape), product(target)):
        return None  # x is stretched
    kept = 0  # axes at the end
    while kept < min(len(source.shape), len(target)) and same_dim(source.shape[~kept], target[~kept]):
        kept += 1
    operands = list[Value | None]()
    for v, maker in zip(node.inputs, before, strict=True):
        if v is None or product(v.shape) == 1 and len(v.shape) <= kept:
            operands.append(v)
            continue
        own = len(v.shape)
        if not (whole := same_shape(v.shape, target)) and own > kept:
            return None
        if any(r.args != tuple(body.tensor.axes[len(target) - own :]) for r in body.reads_of(v)):
            return None
        if whole and maker is not None and maker.inputs[0] is not None and same_shape(maker.inputs[0].shape, source.shape):
            operands += maker.inputs
        else:
            operands += rewriter.add(RESHAPE, [v], {"shape": source.shape}, node.name) if whole else [v]
    computed = rewriter.add(node.op, operands, node.attrs, node.name)
    return rewriter.add(RESHAPE, computed, {"shape": target}, node.name)


def _of_product(value: Value | None, rewriter: Rewriter, depth: int = MAX_EPILOGUE) -> bool:
    """Whether a value, which is read once, is a product of matrices, or computed of one by a few operators on elements."""
    maker = rewriter.producer(value)
    if value is None or maker is None or structural(maker) or not rewriter.used_once(value):
        return False
    if matrix_product(maker) is not None:
        return True
    sources = [v for v in maker.inputs if v is not None and same_shape(v.shape, value.shape)]
    return depth > 0 and any(_of_product(v, rewriter, depth - 1) for v in sources)


@rule_for(PAD)
def two_pads(node: Node, rewriter: Rewriter) -> Replacement:
    """pad(pad(x, b, a), d, c) = pad(x, b + d, a + c), for the same filling and no amount below zero"""
    before = rewriter.producer(node.inputs[0], PAD)
    if before is None:
        return None
    if any(n.attrs.get("mode", "constant") != "constant" for n in (node, before)):
        return "a pad that mirrors or repeats is not merged"
    filling = [0 if (v := n.inputs[1]) is None else uniform(rewriter.array(v)) for n in (node, before)]
    if node.inputs[1] is not before.inputs[1] and (None in filling or filling[0] != filling[1]):
        return "two pads with different fillings are not merged"
    pairs = {side: list(zip(node.attrs[side], before.attrs[side], strict=True)) for side in ("before", "after")}
    if any((least := bounds(d)[0]) is None or least < 0 for both in pairs.values() for pair in both for d in pair):
        return "a pad that may cut off is not merged"
    amounts = {side: tuple(as_dim(as_expr(a) + as_expr(b)) for a, b in both) for side, both in pairs.items()}
    return rewriter.add(PAD, before.inputs[:2], {**node.attrs, **amounts}, node.name)


def zero_padding(value: Value | None, rewriter: Rewriter) -> Node | None:
    """The node that computes a value, if it puts zeros around its input."""
    pad = rewriter.producer(value, PAD)
    constant = pad is not None and pad.attrs.get("mode", "constant") == "constant"
    return pad if pad and constant and (pad.inputs[1] is None or uniform(rewriter.array(pad.inputs[1])) == 0) else None


@rule_for(CAST)
def two_casts(node: Node, rewriter: Rewriter) -> Replacement:
    """cast(cast(x, a), b) = cast(x, b), where `a` holds every value of x"""
    before = rewriter.producer(node.inputs[0], CAST)
    if before is None or (source := before.inputs[0]) is None:
        return None
    if not lossless(source.dtype, middle := before.outputs[0].dtype):
        return f"the cast to {middle} may change values"
    target = node.outputs[0].dtype
    if is_float(middle) and not is_float(source.dtype) and not is_float(target) and target != "bool" and not lossless(source.dtype, target):
        return f"floats saturate to {target}, integers wrap around"
    return (source,) if source.dtype == node.outputs[0].dtype else rewriter.add(CAST, [source], node.attrs, node.name)


@rule_for(POW)
def small_power(node: Node, rewriter: Rewriter) -> Replacement:
    """x ** 2 = x * x    x ** 3 = x * x * x    x ** 0.5 = sqrt(x)    x ** -0.5 = 1 / sqrt(x)    x ** -1 = 1 / x
    (As in PyTorch, the root of minus infinity is NaN.)"""
    base, exponent = node.inputs[0], uniform(rewriter.array(node.inputs[1]))
    if base is None or exponent not in (2, 3, 0.5, -0.5, -1) or not is_float(base.dtype):
        return None
    root = rewriter.add(SQRT, [base], {}, node.name) if exponent in (0.5, -0.5) else (base,)
    if exponent < 1:
        return root if exponent == 0.5 else rewriter.add(RECIPROCAL, root, {}, node.name)
    power = rewriter.add(MUL, [base, base], {}, node.name)
    return power if exponent == 2 else rewriter.add(MUL, [*power, base], {}, node.name)


@rule_for(DIV)
def exact_division(node: Node, rewriter: Rewriter) -> Replacement:
    """x / c = x * (1 / c), where c is a power of two"""
    divisor = rewriter.array(node.inputs[1])
    if divisor is None or divisor.size > UNIFORM_LIMIT or divisor.dtype.name not in ("float16", "float32", "float64"):
        return None
    with np.errstate(all="ignore"):
        mantissa, inverse = np.frexp(divisor)[0], 1 / divisor
    normal = np.isfinite(inverse) & (np.abs(inverse) >= np.finfo(divisor.dtype).tiny)
    if not (normal & (np.abs(mantissa) == 0.5)).all():
        return None
    return rewriter.add(MUL, [node.inputs[0], rewriter.constant(inverse, "reciprocal")], {}, node.name)


@rule_for(RESHAPE)
def norm_of_groups(node: Node, rewriter: Rewriter) -> Replacement:
    """reshape(instance_norm(reshape(x), scale, bias)) = group_norm(x, scale, bias), where the inner shape has groups of channels of x in
    the place of its channels. (Exporters write it so where ONNX has no group norm.)"""
    norm = rewriter.producer(node.inputs[0], INSTANCE_NORM)
    before = None if norm is None else rewriter.producer(norm.inputs[0], RESHAPE)
    if norm is None or before is None or (x := before.inputs[0]) is None or len(x.shape) < 3:
        return None
    grouped, channels = before.outputs[0].shape, x.shape[1]
    if not same_shape(x.shape, node.outputs[0].shape) or not same_dim(grouped[0], x.shape[0]):
        return "what is normalised has another shape, or other instances"
    groups = grouped[1]
    if not isinstance(groups, int) or not isinstance(channels, int) or channels % groups:
        return f"{groups} groups do not divide {channels} channels"
    if groups == channels:
        return rewriter.add(INSTANCE_NORM, [x, *norm.inputs[1:]], norm.attrs, node.name)
    return rewriter.add(GROUP_NORM, [x, *norm.inputs[1:]], {**norm.attrs, "groups": groups}, node.name)
