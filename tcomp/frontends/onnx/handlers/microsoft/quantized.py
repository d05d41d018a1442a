"""Quantised operators: those on integers (QLinear*, QGemm, products of bytes), and weights of 2, 4 or 8 bits in blocks.

Elementwise ones, poolings and the like are computed in float32 between dequantisation and quantisation; products sum integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tcomp.frontends.onnx.context import Context, Handler, Table
from tcomp.frontends.onnx.handlers import arithmetic, nn, recurrent
from tcomp.frontends.onnx.handlers.microsoft.common import applied, cast, channels_last, known, operand, quantized, standard, total
from tcomp.frontends.onnx.handlers.movement import cut, padded, reshaped
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import CONCAT, GATHER, TRANSPOSE, product
from tcomp.ops.quantization import BLOCK_PRODUCT, CENTRED, DEQUANTIZE, DYNAMIC_RANGE, MANY_ROWS, QUANTIZE, REQUANTIZE, UNPACK

BYTES_ALLOWED = 4  # the accuracy level that allows activations to be rounded to bytes


def _on_floats(handler: Handler, *operands: int, result: int = 3) -> Handler:
    """A handler of dequantised inputs (and conditions); its result is quantised by the inputs `result` and `result + 1`."""

    def by_floats(ctx: Context) -> Value:
        y = applied(ctx, handler, [v if (v := ctx.value(i)).dtype == "bool" else operand(ctx, i) for i in operands])
        return quantized(ctx, y, result, ctx.value(operands[-1]).dtype)

    return by_floats


def _concat(ctx: Context) -> Value:
    """Inputs after the first two are triples (x, scale, zero point)."""
    if len(ctx.inputs) < 5 or len(ctx.inputs) % 3 != 2:
        raise ctx.invalid(f"{len(ctx.inputs)} inputs; scale and zero point and triples are needed")
    parts = [operand(ctx, i) for i in range(2, len(ctx.inputs), 3)]
    y = parts[0] if len(parts) == 1 else ctx.add(CONCAT, parts, axis=ctx.axis(ctx.attrs["axis"], len(parts[0].shape)))
    return quantized(ctx, y, 0, ctx.value(1).dtype)


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


def product_to_float(ctx: Context) -> Value:
    """The product of bytes times both scales, plus a bias."""
    scale = ctx.add(ew.MUL, [ctx.value(2), ctx.value(3)])
    return total(ctx, ctx.add(ew.MUL, [cast(ctx, nn.product(ctx, (0, 4), (1, 5)), scale.dtype), scale]), ctx.input(6))


def _dynamic_product(ctx: Context) -> Value:
    """The left factor is quantised by its range."""
    scale, zero = ctx.add_several(DYNAMIC_RANGE, [ctx.value(0)])
    a = ctx.add(QUANTIZE, [ctx.value(0), scale, zero], axis=0, block=0, dtype="uint8", precision="float32")
    return applied(ctx, product_to_float, [a, ctx.value(1), scale, ctx.value(2), zero, ctx.input(3), ctx.input(4)])


def _dynamic_lstm(ctx: Context) -> Value | tuple[Value | None, ...]:
    """An LSTM with quantised weights [directions, in, gates]. Activations stay in float32: ONNX Runtime quantises them as well, which
    costs accuracy and is no part of what the operator means."""

    def weights(i: int, scale: int) -> Value:
        parameters = ctx.value(scale), ctx.value(scale + 1)  # for each direction, and perhaps each column
        factor, zero = (reshaped(ctx, v, (v.shape[0], 1, *(v.shape[1:] or (1,)))) for v in parameters)
        centred = cast(ctx, ctx.add(CENTRED, [ctx.value(i), zero], axis=0), factor.dtype)
        return ctx.add(TRANSPOSE, [ctx.add(ew.MUL, [centred, factor])], perm=(0, 2, 1))

    inputs = [ctx.value(0), weights(1, 8), weights(2, 10), *ctx.inputs[3:8]]
    return standard(recurrent.TABLE, "LSTM", 14)(replace(ctx, inputs=inputs))


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


def _bits(ctx: Context) -> int:
    if (bits := ctx.attrs["bits"]) not in (2, 4, 8):
        raise ctx.unsupported(f"weights of {bits} bits; 2, 4, 8 are supported")
    return int(bits)


def _product_n_bits(ctx: Context) -> Value:
    """x times block-wise quantised weights, which are stored as [out, blocks, bytes of a block]."""
    x, scales, zeros, groups = ctx.value(0), ctx.value(2), ctx.input(3), ctx.input(4)
    k, n, block = (ctx.attrs[name] for name in ("K", "N", "block_size"))
    if ctx.attrs["weight_prepacked"]:
        raise ctx.unsupported("the weights are in a layout of CUDA kernels", "quantise for the CPU, with weight_prepacked=0")
    if min(k, n, block) < 1:
        raise ctx.invalid(f"{n} rows of {k} elements in blocks of {block}")
    bits, blocks = _bits(ctx), -(-k // block)
    if zeros is not None and zeros.dtype == "uint8":
        zeros = unpacked(ctx, zeros, bits, (n, blocks))
    scales, zeros = reshaped(ctx, scales, (n, blocks)), zero_points(ctx, zeros, (n, blocks), bits)
    rows, rounded = product(x.shape[:-1]), ctx.attrs["accuracy_level"] == BYTES_ALLOWED
    if groups is None and (rounded or not (isinstance(rows, int) and rows > MANY_ROWS)):
        more = (*[0] * (len(x.shape) - 1), blocks * block - k)
        inputs = [padded(ctx, x, [0] * len(more), more), reshaped(ctx, ctx.value(1), (n, blocks * block * bits // 8)), scales, zeros, None]
        return total(ctx, ctx.add(BLOCK_PRODUCT, inputs, bits=bits, block=block, rounded=8 if rounded else 0), ctx.input(5))
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
    bits, count = _bits(ctx), known(ctx, table.shape[axis], "the table")
    if packed and (axis != 0 or (bits < 8 and axis == block_axis)) or ctx.attrs["block_size"] < 1 or not table.shape[-1]:
        raise ctx.invalid("packed tables are gathered along their first axis, and have their blocks along another one")
    index = cast(ctx, ctx.value(1), "int64")
    safe = ctx.add(ew.CLIP_CONST, [index], low=-count, high=count - 1)
    inside = ctx.add(ew.EQUAL, [safe, index])
    rows, scale = (ctx.add(GATHER, [v, safe], axis=axis) for v in (table, scales))
    zero = zeros and ctx.add(GATHER, [zeros, safe], axis=axis)
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
    **{f"QLinear{name}": _on_floats(standard(arithmetic.TABLE, name, 13), 0, 3, result=6) for name in ("Add", "Mul")},
    **{f"QLinear{name}": _on_floats(standard(arithmetic.TABLE, name, 13), 0) for name in ("Sigmoid", "LeakyRelu", "ReduceMean")},
    "QLinearSoftmax": lambda ctx: _on_floats(standard(arithmetic.TABLE, "Softmax", ctx.attrs["opset"]), 0)(ctx),
    "QLinearAveragePool": channels_last(_on_floats(nn.average_pool, 0), 0), "QLinearConv": channels_last(nn.q_linear_conv, 0),
    "QLinearGlobalAveragePool": channels_last(_on_floats(standard(nn.TABLE, "GlobalAveragePool", 1), 0), 0),
    "QLinearConcat": _concat, 
    "QLinearWhere": _on_floats(standard(arithmetic.TABLE, "Where", 16), 0, 1, 4, result=7),
    "QGemm": _gemm, "MatMulIntegerToFloat": product_to_float, "DynamicQuantizeMatMul": _dynamic_product,
    "QuantizeLinear": standard(nn.TABLE, "QuantizeLinear", 21), "DequantizeLinear": standard(nn.TABLE, "DequantizeLinear", 21),
    "DynamicQuantizeLSTM": _dynamic_lstm, "MatMulNBits": _product_n_bits, "GatherBlockQuantized": _gather_blocks,
}  # fmt: skip
