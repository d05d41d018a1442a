"""Quantised operators: those on integers (QLinear*, QGemm, products of bytes), and weights of 2, 4 or 8 bits in blocks.

Elementwise ones, poolings and the like are computed in float32 between dequantisation and quantisation; products sum integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tcomp.frontends.onnx.context import Context, Handler, Table
from tcomp.frontends.onnx.handlers import nn, recurrent
from tcomp.frontends.onnx.handlers.microsoft.common import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    applied,
    cast,
    given,
    known,
    operand,
    quantized,
    standard,
    total,
    transposed,
)
from tcomp.frontends.onnx.handlers.movement import cut, padded, reshaped
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ew, reduction as red
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import CONCAT, GATHER, TRANSPOSE, product
from tcomp.ops.quantization import BLOCK_PRODUCT, CENTRED, DEQUANTIZE, DYNAMIC_RANGE, MANY_ROWS, QUANTIZE, REQUANTIZE, UNPACK

BYTES_ALLOWED = 4  # the accuracy level that allows activations to be rounded to bytes


def _binary(op: Operator) -> Handler:
    return lambda ctx: quantized(ctx, ctx.add(op, [operand(ctx, 0), operand(ctx, 3)]), 6, ctx.value(0).dtype)


def _unary(op: Operator, *names: str) -> Handler:
    return lambda ctx: quantized(ctx, ctx.add(op, [operand(ctx, 0)], **{n: ctx.attrs[n] for n in names}), 3, ctx.value(0).dtype)


def _concat(ctx: Context) -> Value:
    """Inputs after the first two are triples (x, scale, zero point)."""
    if len(ctx.inputs) < 5 or len(ctx.inputs) % 3 != 2:
        raise ctx.invalid(f"{len(ctx.inputs)} inputs; scale and zero point and triples are needed")
    parts = [operand(ctx, i) for i in range(2, len(ctx.inputs), 3)]
    y = parts[0] if len(parts) == 1 else ctx.add(CONCAT, parts, axis=ctx.axis(ctx.attrs["axis"], len(parts[0].shape)))
    return quantized(ctx, y, 0, ctx.value(1).dtype)


def _where(ctx: Context) -> Value:
    return quantized(ctx, ctx.add(ew.WHERE, [ctx.value(0), operand(ctx, 1), operand(ctx, 4)]), 7, ctx.value(1).dtype)


def _softmax(ctx: Context) -> Value:
    """Before opset 13 (attribute `opset`) over all axes from `axis` on."""
    axis = ctx.axis(ctx.attrs["axis"])
    axes = (axis,) if ctx.attrs["opset"] >= 13 else tuple(range(axis, len(ctx.value(0).shape)))
    return quantized(ctx, ctx.add(red.SOFTMAX, [operand(ctx, 0)], axes=axes), 3, ctx.value(0).dtype)


def _reduce_mean(ctx: Context) -> Value:
    axes = tuple(sorted(ctx.axes(ctx.attrs["axes"])))
    y = ctx.add(red.REDUCE_MEAN, [operand(ctx, 0)], axes=axes, keepdims=bool(ctx.attrs["keepdims"]))
    return quantized(ctx, y, 3, ctx.value(0).dtype)


def _by_channel(ctx: Context, handler: Handler) -> Value:
    """A pooling, with channels last where the attribute says so."""
    last, x = ctx.attrs["channels_last"], operand(ctx, 0)
    y = applied(ctx, handler, [transposed(ctx, x, CHANNELS_FIRST) if last else x], opset=19)
    return quantized(ctx, transposed(ctx, y, CHANNELS_LAST) if last else y, 3, ctx.value(0).dtype)


def _conv(ctx: Context) -> Value:
    """QLinearConv; with channels last in data (not in weights) where the attribute says so."""
    if not ctx.attrs["channels_last"]:
        return nn.q_linear_conv(ctx)
    inputs = [transposed(ctx, ctx.value(0), CHANNELS_FIRST), *ctx.inputs[1:]]
    return transposed(ctx, applied(ctx, nn.q_linear_conv, inputs), CHANNELS_LAST)


def _gemm(ctx: Context) -> Value:
    """alpha * (A' B' + C) * scales, in float32 where there is no scale of the result."""
    a, b = ctx.value(0), ctx.value(3)
    flags = {"transpose_a": bool(ctx.attrs["transA"]), "transpose_b": bool(ctx.attrs["transB"])}
    columns = 0 if flags["transpose_b"] else 1
    centred = [ctx.add(CENTRED, [a, ctx.value(2)], axis=0), ctx.add(CENTRED, [b, ctx.value(5)], axis=columns)]
    y = total(ctx, ctx.add(MATMUL, centred, **flags), ctx.input(6))
    scale = ctx.add(ew.SCALE, [ctx.value(1)], factor=float(ctx.attrs["alpha"]))
    if ctx.input(7) is None:
        return ctx.add(ew.MUL, [cast(ctx, y, scale.dtype), ctx.add(ew.MUL, [scale, ctx.value(4)])])
    zero = ctx.input(8) or ctx.constant(0, a.dtype)
    return ctx.add(REQUANTIZE, [y, scale, ctx.value(4), ctx.value(7), zero], axis=1)


def _product_to_float(ctx: Context) -> Value:
    y = nn.product(ctx, (0, 4), (1, 5))
    scale = ctx.add(ew.MUL, [ctx.value(2), ctx.value(3)])
    return total(ctx, ctx.add(ew.MUL, [cast(ctx, y, scale.dtype), scale]), ctx.input(6))


def _dynamic_product(ctx: Context) -> Value:
    """The left factor is quantised by its range."""
    x, bias = ctx.value(0), ctx.input(4)
    scale, zero = ctx.add_several(DYNAMIC_RANGE, [x])
    a = ctx.add(QUANTIZE, [x, scale, zero], axis=0, block=0, dtype="uint8", precision="float32")
    return applied(ctx, _product_to_float, [a, ctx.value(1), scale, ctx.value(2), zero, ctx.input(3), bias])


def _dynamic_lstm(ctx: Context) -> tuple[Value | None, ...]:
    """An LSTM with quantised weights [directions, in, gates]. Activations stay in float32: ONNX Runtime quantises them as well, which
    costs accuracy and is no part of what the operator means."""

    def weights(i: int, scale: int) -> Value:
        x, factor, zero = ctx.value(i), ctx.value(scale), ctx.value(scale + 1)
        if len(factor.shape) == 2:  # a scale for each column
            factor, zero = (reshaped(ctx, v, (v.shape[0], 1, *v.shape[1:])) for v in (factor, zero))
        elif factor.shape != (1,):
            factor, zero = (reshaped(ctx, v, (*v.shape, 1, 1)) for v in (factor, zero))
        centred = cast(ctx, ctx.add(CENTRED, [x, zero], axis=0), factor.dtype)
        return ctx.add(TRANSPOSE, [ctx.add(ew.MUL, [centred, factor])], perm=(0, 2, 1))

    inputs = [ctx.value(0), weights(1, 8), weights(2, 10), *(ctx.input(i) for i in range(3, 8))]
    result = standard(recurrent.TABLE, "LSTM", 14)(given(ctx, *inputs))
    return result if isinstance(result, tuple) else (result,)


def unpacked(ctx: Context, x: Value, bits: int, shape: Sequence[int]) -> Value:
    """The numbers of `bits` bits in bytes, as many of each row as the last axis of `shape` wants."""
    rows, stored = (*shape[:-1], -(-shape[-1] * bits // 8)), shape[-1]
    if any(not isinstance(d, int) for d in x.shape) or prod(map(int, x.shape)) != prod(rows):
        raise ctx.invalid(f"{x} does not hold {list(shape)} numbers of {bits} bits")
    x = reshaped(ctx, x, rows)
    return x if bits == 8 else ctx.add(UNPACK, [x], bits=bits, count=stored)


def zero_points(ctx: Context, zeros: Value | None, shape: Sequence[Dim], bits: int) -> Value:
    """Zero points of blocks as float32; half of the range where they are left out."""
    if zeros is None:
        return ctx.add(ew.FULL, [], shape=tuple(shape), value=float(1 << (bits - 1)), dtype="float32")
    return reshaped(ctx, cast(ctx, zeros, "float32"), shape)


def _packed(ctx: Context, *allowed: int) -> int:
    if (bits := ctx.attrs["bits"]) not in allowed:
        raise ctx.unsupported(f"weights of {bits} bits; {', '.join(map(str, allowed))} are supported")
    return int(bits)


def _product_n_bits(ctx: Context) -> Value:
    """x times block-wise quantised weights, which are stored as [out, blocks, bytes of a block]."""
    x, scales, zeros, groups = ctx.value(0), ctx.value(2), ctx.input(3), ctx.input(4)
    k, n, block = (ctx.attrs[name] for name in ("K", "N", "block_size"))
    if ctx.attrs["weight_prepacked"]:
        raise ctx.unsupported("the weights are in a layout of CUDA kernels", "quantise for the CPU, with weight_prepacked=0")
    if min(k, n, block) < 1:
        raise ctx.invalid(f"{n} rows of {k} elements in blocks of {block}")
    bits, blocks = _packed(ctx, 2, 4, 8), -(-k // block)
    if zeros is not None and zeros.dtype == "uint8":
        zeros = unpacked(ctx, zeros, bits, (n, blocks))
    scales, zeros = reshaped(ctx, scales, (n, blocks)), zero_points(ctx, zeros, (n, blocks), bits)
    rows, rounded = product(x.shape[:-1]), ctx.attrs["accuracy_level"] == BYTES_ALLOWED
    if groups is None and (rounded or not (isinstance(rows, int) and rows > MANY_ROWS)):
        more = (*[0] * (len(x.shape) - 1), blocks * block - k)
        inputs = [padded(ctx, x, [0] * len(more), more), reshaped(ctx, ctx.value(1), (n, blocks * block * bits // 8)), scales, zeros, None]
        activations = "int8" if rounded else "float"
        return total(ctx, ctx.add(BLOCK_PRODUCT, inputs, bits=bits, block=block, activations=activations), ctx.input(5))
    weights = cut(ctx, unpacked(ctx, ctx.value(1), bits, (n, blocks * block)), 1, 0, k)
    if groups is not None:  # the block of each element
        chosen = cut(ctx, groups, 0, 0, k)
        scales, zeros, block = ctx.add(GATHER, [scales, chosen], axis=1), ctx.add(GATHER, [zeros, chosen], axis=1), 1
    weights = ctx.add(DEQUANTIZE, [weights, scales, zeros], axis=1, block=block, dtype=x.dtype)
    return total(ctx, ctx.add(MATMUL, [x, weights], transpose_b=True), ctx.input(5))


def _gather_blocks(ctx: Context) -> Value:
    """Rows of a quantised table, dequantised; 0 where an index is out of range. Tables of bytes are packed along their last axis."""
    table, scales, zeros = ctx.value(0), ctx.value(2), ctx.input(3)
    axis, block_axis, packed = ctx.axis(ctx.attrs["gather_axis"]), ctx.axis(ctx.attrs["quantize_axis"]), table.dtype == "uint8"
    bits, count = _packed(ctx, 2, 4, 8), known(ctx, table.shape[axis], "the table")
    if packed and (axis != 0 or (bits < 8 and axis == block_axis)) or ctx.attrs["block_size"] < 1 or not table.shape[-1]:
        raise ctx.invalid("packed tables are gathered along their first axis, and have their blocks along another one")
    index = cast(ctx, ctx.value(1), "int64")
    limits = ctx.constant(-count, "int64"), ctx.constant(count, "int64")
    inside = ctx.add(ew.AND, [ctx.add(ew.LESS_EQUAL, [limits[0], index]), ctx.add(ew.LESS, [index, limits[1]])])
    safe = ctx.add(ew.WHERE, [inside, index, ctx.constant(0, "int64")])
    rows, scale = (ctx.add(GATHER, [v, safe], axis=axis) for v in (table, scales))
    zero = None if zeros is None else ctx.add(GATHER, [zeros, safe], axis=axis)
    if packed and bits < 8:
        rows = ctx.add(UNPACK, [rows], bits=bits, count=known(ctx, rows.shape[-1], "the table") * 8 // bits)
        zero = zero and ctx.add(UNPACK, [zero], bits=bits, count=known(ctx, scale.shape[-1], "the scales"))
    if zero is None and packed:
        zero = ctx.add(ew.FULL, [], shape=scale.shape, value=1 << (bits - 1), dtype="uint8")
    place = block_axis if block_axis < axis else block_axis + len(index.shape) - 1
    y = ctx.add(DEQUANTIZE, [rows, scale, zero], axis=place, block=ctx.attrs["block_size"], dtype=scale.dtype)
    column = reshaped(ctx, inside, (*inside.shape, *(1,) * (len(table.shape) - axis - 1)))
    return ctx.add(ew.WHERE, [column, y, ctx.constant(0.0, y.dtype)])


TABLE: Table = {
    "QLinearAdd": _binary(ew.ADD), "QLinearMul": _binary(ew.MUL),
    "QLinearSigmoid": _unary(ew.SIGMOID), "QLinearLeakyRelu": _unary(ew.LEAKY_RELU, "alpha"),
    "QLinearConcat": _concat, "QLinearWhere": _where, "QLinearSoftmax": _softmax, "QLinearReduceMean": _reduce_mean,
    "QLinearAveragePool": lambda ctx: _by_channel(ctx, nn.average_pool), "QLinearConv": _conv,
    "QLinearGlobalAveragePool": lambda ctx: _by_channel(ctx, standard(nn.TABLE, "GlobalAveragePool", 1)),
    "QGemm": _gemm, "MatMulIntegerToFloat": _product_to_float, "DynamicQuantizeMatMul": _dynamic_product,
    "QuantizeLinear": standard(nn.TABLE, "QuantizeLinear", 21), "DequantizeLinear": standard(nn.TABLE, "DequantizeLinear", 21),
    "DynamicQuantizeLSTM": _dynamic_lstm, "MatMulNBits": _product_n_bits, "GatherBlockQuantized": _gather_blocks,
}  # fmt: skip
