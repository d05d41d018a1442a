"""Quantised arithmetic: contractions of dequantised bytes become contractions of the bytes, summed exactly in int32.

    sum of (x - zx) * sx * (w - zw) * sw  =  (sum of x * (w - zw)  -  zx * sum of (w - zw)) * sx * sw

`w - zw` and its sums are constants. The `dequantize` after a contraction is a factor for each element: bias, activation, residual and the
next `quantize` fuse with it as with any sum. Bytes of activations are unsigned, those of weights signed, as instructions want them.
Integers are exact; floats keep their values up to the order of multiplications.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tcomp.ir.broadcasting import BYTES
from tcomp.ir.dtypes import NARROW, is_integer
from tcomp.ir.graph import Graph, Node, Value
from tcomp.ops.elementwise import ADD, CAST, MUL
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import PAD, TRANSPOSE
from tcomp.ops.nn import ADD_CHANNELS, CONV, MAX_POOL
from tcomp.ops.quantization import CENTRED, DEQUANTIZE, QUANTIZE, SWAP_SIGN
from tcomp.passes import structure
from tcomp.passes.canonicalize import uniform, zero_padding
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph, rule_for
from tcomp.passes.structure import body_of, movement, structural

GROUP = 4  # bytes whose products an instruction adds up in a lane: the channels that are summed are padded to a multiple
MAX_EPILOGUE = 8  # operators between a contraction and a `quantize` of its result: bounds a search; a residual block has five


def use_bytes(graph: Graph, notes: Notes | None = None) -> Graph:
    """The graph with integer contractions in the place of quantised ones: see the rules."""
    return rewrite_graph(
        graph, (unsigned_activations, two_swaps, swapped_numbers, byte_contraction, moved_bytes, inverse_scale, without_zero), notes
    )


def use_words(graph: Graph, notes: Notes | None = None) -> Graph:
    """The graph with products of bytes by integers of 16 bits in the place of those of two bytes, for processors that multiply such alone:
    activations are widened where they are computed, once, not where they are multiplied; weights stay bytes."""
    multiplied = set[Value | None]()
    for node in reversed(graph.nodes):
        if node.op in (PAD, MAX_POOL) and not multiplied.isdisjoint(node.outputs):
            multiplied.add(node.inputs[0])
        multiplied.add(_multiplied(node, graph.constants))

    def words(value: Value, rewriter: Rewriter) -> Value:
        """The bytes as integers of 16 bits: what is only moved is moved as such."""
        before, attrs = rewriter.producer(value, PAD, MAX_POOL), {"dtype": "int16"}
        if before is None:
            return rewriter.add(CAST, [value], attrs, f"{value.name}.words")[0]
        inputs = [None if v is None else words(v, rewriter) for v in before.inputs]
        return rewriter.add(before.op, inputs, before.attrs, before.name)[0]

    @rule_for(CONV, MATMUL)
    def word_contraction(node: Node, rewriter: Rewriter) -> Replacement:
        """f(x, w) = f(int16(x), w)"""
        if (x := _multiplied(node, rewriter.constants)) is None:
            return None
        return rewriter.add(node.op, [words(x, rewriter), node.inputs[1]], {**node.attrs, "dtype": "int32"}, node.name)

    @rule_for(DEQUANTIZE)
    def same_words(node: Node, rewriter: Rewriter) -> Replacement:
        """dequantize(x, s, z) = dequantize(int16(x), s, z), where x is multiplied as well: it is stored once"""
        x = node.inputs[0]
        if x is None or x.dtype != "uint8" or x not in multiplied:
            return None
        return rewriter.add(DEQUANTIZE, [words(x, rewriter), *node.inputs[1:]], node.attrs, node.name)

    return rewrite_graph(graph, (word_contraction, same_words), notes)


def _multiplied(node: Node, constants: Container[Value]) -> Value | None:
    """The bytes of activations that a contraction of several neighbours multiplies by constant ones."""
    if node.op not in (CONV, MATMUL):
        return None
    x, w = node.inputs
    if x is None or w is None or w not in constants or (x.dtype, w.dtype) != ("uint8", "int8"):
        return None
    return x if node.op is MATMUL or w.shape[1] != 1 else None


def _zero_point(value: Value | None, dtype: str, rewriter: Rewriter) -> np.ndarray | None:
    """The elements of a zero point, 0 where there is none; None where they are not known."""
    return np.zeros((), dtype) if value is None else rewriter.array(value)


@rule_for(QUANTIZE)
def unsigned_activations(node: Node, rewriter: Rewriter) -> Replacement:
    """quantize(x, s, z) as int8 = swap_sign(quantize(x, s, z + 128) as uint8)"""
    x, scale, zero = node.inputs
    if node.attrs["dtype"] != "int8" or (point := _zero_point(zero, "int8", rewriter)) is None:
        return None
    moved = rewriter.constant((point.astype(np.int16) + 128).astype(np.uint8), "zero_point")
    return rewriter.add(SWAP_SIGN, rewriter.add(QUANTIZE, [x, scale, moved], {**node.attrs, "dtype": "uint8"}, node.name), {}, node.name)


@rule_for(SWAP_SIGN)
def two_swaps(node: Node, rewriter: Rewriter) -> Replacement:
    """swap_sign(swap_sign(x)) = x"""
    before = rewriter.producer(node.inputs[0], SWAP_SIGN)
    return None if before is None else before.inputs


@rule_for(DEQUANTIZE, CENTRED)
def swapped_numbers(node: Node, rewriter: Rewriter) -> Replacement:
    """dequantize(swap_sign(x), s, z) = dequantize(x, s, z ± 128), and likewise without a scale"""
    before = rewriter.producer(node.inputs[0], SWAP_SIGN)
    if before is None or (point := _zero_point(node.inputs[-1], before.outputs[0].dtype, rewriter)) is None:
        return None
    flipped = rewriter.constant((point.view(np.uint8) ^ 128).view("uint8" if point.dtype == np.int8 else "int8"), "zero_point")
    return rewriter.add(node.op, [before.inputs[0], *node.inputs[1:-1], flipped], node.attrs, node.name)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """(bytes - zero) * scale; the scale is None where the numbers are int32. `before` and `after`: zeros around them along each axis."""

    bytes: Value
    zero: Value | None
    scale: Value | None
    before: tuple[Any, ...]
    after: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Weights:
    """Constant integers and their scale, which is a scalar or runs along `axis`."""

    name: str
    integers: np.ndarray
    scale: np.ndarray | None
    axis: int


def byte_contraction(node: Node, rewriter: Rewriter) -> Replacement:
    """f((x - zx) * sx, (w - zw) * sw) = (f(x, w - zw) - zx * sum(w - zw)) * (sx * sw)    for convolutions and matrix products"""
    x, w = (_numbers(node.inputs[0], rewriter), _weights(node.inputs[1], rewriter)) if len(node.inputs) == 2 else (None, None)
    if x is None or w is None or (x.scale is None) != (w.scale is None):
        return None
    convolution, product = structure.convolution(node), structure.matrix_product(node)
    if convolution is None and (product is None or product.transpose_left):
        return None
    if convolution is None and w.integers.ndim != 2:
        return "a batch of weights"
    channels = -1 if convolution is None else 1  # the axis of the data and of the result
    column = 1 if product is not None and not product.transpose_right else 0
    if w.scale is not None and w.scale.ndim and w.axis != column:
        return "the scale of the weights does not belong to a column of the result"
    low, high = int(w.integers.min(initial=0)), int(w.integers.max(initial=0))
    if low < -128 or high > 127:
        return f"weights from {low} to {high} are not signed bytes"
    sums = w.integers.sum(tuple(d for d in range(w.integers.ndim) if d != column), dtype=np.int32)
    data, zero = x.bytes, x.zero
    if data.dtype == "int8":
        (data,) = rewriter.add(SWAP_SIGN, [data], {}, f"{node.name}.unsigned")
        zero = rewriter.constant(np.array(128, np.uint8), "zero_point") if zero is None else rewriter.add(SWAP_SIGN, [zero], {})[0]
    x, integers = replace(x, bytes=data, zero=zero), w.integers.astype(np.int8)
    if (missing := -integers.shape[1 - column] % GROUP) and (convolution is None or convolution.group == 1):
        integers = np.pad(integers, [(0, missing if d == 1 - column else 0) for d in range(integers.ndim)])
        x = replace(x, after=tuple(d + (missing if n == channels % len(x.after) else 0) for n, d in enumerate(x.after)))
    if any(d != 0 for d in (*x.before, *x.after)):
        filling = None if zero is None or uniform(rewriter.array(zero)) == 0 else zero
        (data,) = rewriter.add(PAD, [data, filling], {"before": x.before, "after": x.after}, f"{node.name}.pad")
    shift = None  # before the contraction, so that of the two it is the contraction which the sum becomes one kernel with
    if zero is not None and sums.any() and uniform(rewriter.array(zero)) != 0:
        (point,) = rewriter.add(CAST, [zero], {"dtype": "int32"})
        (shift,) = rewriter.add(MUL, [point, rewriter.constant(-sums, f"{node.name}.sums")], {})
    (total,) = rewriter.add(node.op, [data, rewriter.constant(integers, f"{w.name}.bytes")], node.attrs, node.name)
    if shift is not None:
        (total,) = rewriter.add(ADD if convolution is None else ADD_CHANNELS, [total, shift], {}, f"{node.name}.centred")
    if x.scale is None or w.scale is None:
        return (total,)
    (scale,) = rewriter.add(MUL, [x.scale, rewriter.constant(w.scale, f"{node.name}.scale")], {})
    attrs = {"axis": channels % len(total.shape), "block": 0, "dtype": "float32"}
    return rewriter.add(DEQUANTIZE, [total, scale, None], attrs, f"{node.name}.scaled")


def _numbers(value: Value | None, rewriter: Rewriter) -> _Numbers | None:
    """The quantised form of a value, if it is one of bytes with one zero point and one scale."""
    before = after = (0,) * (0 if value is None else len(value.shape))
    if (pad := zero_padding(value, rewriter)) is not None:
        value, before, after = pad.inputs[0], tuple(pad.attrs["before"]), tuple(pad.attrs["after"])
    node = rewriter.producer(value, CENTRED, DEQUANTIZE)
    if node is None or node.outputs[0].dtype not in ("int32", "float32"):
        return None
    data, zero, scale = node.inputs[0], node.inputs[-1], node.inputs[1] if len(node.inputs) == 3 else None
    if data is None or data.dtype not in BYTES or any(p is not None and any(d != 1 for d in p.shape) for p in (zero, scale)):
        return None
    return _Numbers(data, zero, scale, before, after)


def _weights(value: Value | None, rewriter: Rewriter) -> _Weights | None:
    """The integers that constant weights are, the zero point subtracted."""
    if value is not None and (transpose := rewriter.producer(value, TRANSPOSE)) is not None:
        inner, perm = _weights(transpose.inputs[0], rewriter), transpose.attrs["perm"]
        return inner and _Weights(value.name, inner.integers.transpose(perm), inner.scale, perm.index(inner.axis))
    node = rewriter.producer(value, CENTRED, DEQUANTIZE)
    if value is None or node is None or node.outputs[0].dtype not in ("int32", "float32"):
        return None
    given = [None if v is None else rewriter.array(v) for v in node.inputs]
    if any(v is not None and a is None for v, a in zip(node.inputs, given, strict=True)) or node.attrs.get("block"):
        return None
    data, zero, scale, axis = given[0], given[-1], given[1] if len(given) == 3 else None, node.attrs["axis"]
    if data is None or data.dtype.name not in BYTES:
        return None
    along = [-1 if d == axis else 1 for d in range(data.ndim)]
    if zero is not None and not zero.ndim == data.ndim > 1:
        zero = zero.reshape(along if zero.size > 1 else ())
    integers = data.astype(np.int32) - (0 if zero is None else zero.astype(np.int32))
    scale = scale if scale is None or scale.size > 1 else scale.reshape(())
    return _Weights(value.name, integers, scale, axis)


@rule_for(QUANTIZE)
def moved_bytes(node: Node, rewriter: Rewriter) -> Replacement:
    """quantize(f(dequantize(x, s, z)), s, z) = f(x), where f moves elements or takes the largest of a window"""
    if (steps := _moves(node.inputs[0], rewriter)) is None:
        return None
    *moves, source = steps
    data = source.inputs[0]
    if data is None or data.dtype in NARROW or data.dtype != node.outputs[0].dtype or source.attrs["block"] or node.attrs["block"]:
        return None
    for ours, theirs in zip(source.inputs[1:], node.inputs[1:], strict=True):
        a, b = (uniform(rewriter.array(v)) if v is not None else 0 for v in (ours, theirs))
        if a is None or a != b or any(v is not None and any(d != 1 for d in v.shape) for v in (ours, theirs)):
            return None
    if not 1e-30 < (uniform(rewriter.array(node.inputs[1])) or 0) < 1e30:  # the order is kept, and nothing overflows
        return None
    lowest = rewriter.constant(np.array(np.iinfo(data.dtype).min, data.dtype), "lowest")
    for move in reversed(moves):
        (data,) = rewriter.add(move.op, [data, lowest][: len(move.inputs)], move.attrs, move.name)
    return (data,)


def _moves(value: Value | None, rewriter: Rewriter) -> list[Node] | None:
    """The nodes from a value back to the `dequantize` that it comes from, if those between do not care what numbers bytes stand for."""
    found, windowed = list[Node](), False  # `windowed`: what is read next are windows, of which the largest element is taken
    while (node := rewriter.producer(value)) is not None:
        found.append(node)
        if rewriter.producer(value, DEQUANTIZE):
            return found
        pooled = rewriter.producer(value, MAX_POOL) is not None
        below = windowed and rewriter.producer(value, PAD) is not None and uniform(rewriter.array(node.inputs[1])) == -np.inf
        if not pooled and not below and (len(node.inputs) != 1 or movement(body_of(node)) is None):
            return None
        value, windowed = node.inputs[0], pooled
    return None


@rule_for(QUANTIZE)
def inverse_scale(node: Node, rewriter: Rewriter) -> Replacement:
    """quantize(x, s, z) = quantize(x * (1 / s), 1, z), where x comes from a contraction, whose factor has been rounded already"""
    x, scale = node.inputs[0], rewriter.array(node.inputs[1])
    if scale is None or scale.size != 1 or scale.dtype != np.float32 or uniform(scale) == 1 or node.attrs["precision"] != "float32":
        return None
    if x is None or x.dtype != "float32":
        return None
    level: list[Value | None] = [x]
    for _ in range(MAX_EPILOGUE):  # back to the sums of products of bytes
        nodes = [n for v in level if (n := rewriter.producer(v)) is not None and not structural(n)]
        if any(n.op is DEQUANTIZE and n.inputs[0] is not None and n.inputs[0].dtype == "int32" for n in nodes):
            break
        level = [v for n in nodes for v in n.inputs]
    else:
        return None
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / scale.reshape(())
    if not np.isfinite(inverse) or abs(inverse) < np.finfo(np.float32).tiny:
        return None
    (scaled,) = rewriter.add(MUL, [x, rewriter.constant(np.asarray(inverse), "inverse_scale")], {}, f"{node.name}.scaled")
    return rewriter.add(QUANTIZE, [scaled, rewriter.constant(np.ones((), np.float32), "one"), node.inputs[2]], node.attrs, node.name)


@rule_for(QUANTIZE)
def without_zero(node: Node, rewriter: Rewriter) -> Replacement:
    """quantize(x, s, 0) = quantize(x, s), as integers, which have one zero"""
    x, scale, zero = node.inputs
    point = rewriter.array(zero)
    if point is None or point.any() or not is_integer(node.attrs["dtype"]):
        return None
    return rewriter.add(QUANTIZE, [x, scale, None], node.attrs, node.name)
