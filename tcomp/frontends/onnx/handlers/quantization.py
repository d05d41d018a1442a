"""ONNX operators: quantisation, and arithmetic on quantised tensors (int32 accumulators, scales applied at the end)."""

from __future__ import annotations

from typing import Any

from tcomp.frontends.onnx.context import Context, Versions
from tcomp.frontends.onnx.handlers.nn import convolution
from tcomp.frontends.onnx.reader import dtype_name
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import Operator, Value
from tcomp.ops.matmul import MATMUL
from tcomp.ops.nn import ADD_CHANNELS
from tcomp.ops.quantization import CENTRED, DEQUANTIZE, DYNAMIC_RANGE, QUANTIZE, REQUANTIZE


def _axis_block(ctx: Context) -> dict[str, int]:
    rank = len(ctx.value(0).shape)
    axis = ctx.attrs.get("axis", 1) if ctx.opset >= 13 else 1
    return {"axis": axis + rank if axis < 0 else axis, "block": ctx.attrs.get("block_size", 0)}


def _kept(ctx: Context, op: Operator, inputs: list[Value | None], **attrs: Any) -> Value:
    """A node, even where it could be computed now: passes want the integers behind small weights, not the numbers."""
    if inputs[0] is None or len(inputs[0].shape) < 2:
        return ctx.add(op, inputs, **attrs)
    return ctx.scope.builder.add(op, inputs, attrs, ctx.name)[0]


def quantize_linear(ctx: Context) -> Value:
    """ONNX QuantizeLinear."""
    x, scale, zero = ctx.value(0), ctx.value(1), ctx.input(2)
    wanted = ctx.attrs.get("output_dtype", 0)
    dtype = zero.dtype if zero is not None else dtype_name(wanted, ctx.where) if wanted else "uint8"
    if is_float(dtype):
        raise ctx.unsupported(f"quantisation to {dtype} is not supported")
    precision = ctx.attrs.get("precision", 0)
    at = dtype_name(precision, ctx.where) if precision else "float32" if not is_float(x.dtype) else scale.dtype
    return ctx.add(QUANTIZE, [x, scale, zero], **_axis_block(ctx), dtype=dtype, precision=at)


def dequantize_linear(ctx: Context) -> Value:
    """ONNX DequantizeLinear."""
    x, scale, zero = ctx.value(0), ctx.value(1), ctx.input(2)
    wanted = ctx.attrs.get("output_dtype", 0)
    dtype = dtype_name(wanted, ctx.where) if wanted else scale.dtype
    return _kept(ctx, DEQUANTIZE, [x, scale, zero], **_axis_block(ctx), dtype=dtype)


def dynamic_quantize_linear(ctx: Context) -> tuple[Value, ...]:
    """ONNX DynamicQuantizeLinear: scale and zero point of the data at hand."""
    x = ctx.value(0)
    scale, zero = ctx.add_several(DYNAMIC_RANGE, [x])
    y = ctx.add(QUANTIZE, [x, scale, zero], axis=0, block=0, dtype="uint8", precision="float32")
    return y, scale, zero


def _centred(ctx: Context, x: int, zero: int, axis: int) -> Value:
    return _kept(ctx, CENTRED, [ctx.value(x), ctx.input(zero)], axis=axis)


def conv_integer(ctx: Context) -> Value:
    """ONNX ConvInteger."""
    return convolution(ctx, _centred(ctx, 0, 2, 1), _centred(ctx, 1, 3, 0))


def q_linear_conv(ctx: Context) -> Value:
    """ONNX QLinearConv."""
    y = convolution(ctx, _centred(ctx, 0, 2, 1), _centred(ctx, 3, 5, 0))
    if ctx.input(8) is not None:
        y = ctx.add(ADD_CHANNELS, [y, ctx.value(8)])
    return ctx.add(REQUANTIZE, [y, ctx.value(1), ctx.value(4), ctx.value(6), ctx.value(7)], axis=1)


def _product(ctx: Context, a: tuple[int, int], b: tuple[int, int]) -> Value:
    """The int32 product; zero points of `a` are per row, those of `b` per column."""
    rows, columns = len(ctx.value(a[0]).shape) - 2, len(ctx.value(b[0]).shape) - 1
    return ctx.add(MATMUL, [_centred(ctx, *a, max(rows, 0)), _centred(ctx, *b, columns)])


def mat_mul_integer(ctx: Context) -> Value:
    """ONNX MatMulInteger."""
    return _product(ctx, (0, 2), (1, 3))


def q_linear_mat_mul(ctx: Context) -> Value:
    """ONNX QLinearMatMul."""
    y = _product(ctx, (0, 2), (3, 5))
    scale = ctx.value(1)
    if len(scale.shape) == 1 and scale.shape[0] != 1:
        raise ctx.unsupported("a scale for each row of the first factor is not supported")
    return ctx.add(REQUANTIZE, [y, scale, ctx.value(4), ctx.value(6), ctx.value(7)], axis=len(y.shape) - 1)


TABLE: dict[str, Versions] = {
    "ConvInteger": ((10, conv_integer),),
    "DequantizeLinear": ((10, dequantize_linear),),
    "DynamicQuantizeLinear": ((11, dynamic_quantize_linear),),
    "MatMulInteger": ((10, mat_mul_integer),),
    "QLinearConv": ((10, q_linear_conv),),
    "QLinearMatMul": ((10, q_linear_mat_mul),),
    "QuantizeLinear": ((10, quantize_linear),),
}
