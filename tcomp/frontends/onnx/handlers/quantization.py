"""ONNX operators: quantisation, and arithmetic on quantised tensors (int32 accumulators, scales applied at the end)."""

from __future__ import annotations

from typing import Any

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.nn import biased, convolution
from tcomp.frontends.onnx.reader import dtype_name
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import Operator, Value
from tcomp.ops.matmul import MATMUL
from tcomp.ops.quantization import CENTRED, DEQUANTIZE, DYNAMIC_RANGE, QUANTIZE, REQUANTIZE


def _axis_block(ctx: Context) -> dict[str, int]:
    axis = ctx.attrs.get("axis", 1)
    return {"axis": axis + len(ctx.value(0).shape) if axis < 0 else axis, "block": ctx.attrs.get("block_size", 0)}


def _dtype(ctx: Context, name: str, default: str) -> str:
    """The dtype that an attribute gives; 0 stands for the default."""
    wanted = ctx.attrs.get(name, 0)
    return dtype_name(wanted, ctx.where) if wanted else default


def _unfolded(ctx: Context, op: Operator, inputs: list[Value | None], **attrs: Any) -> Value:
    """A node, even where it could be computed now: passes want the integers behind small weights, not the numbers."""
    if inputs[0] is None or len(inputs[0].shape) < 2:
        return ctx.add(op, inputs, **attrs)
    return ctx.scope.builder.add(op, inputs, attrs, ctx.name)[0]


def _quantize_linear(ctx: Context) -> Value:
    x, scale, zero = ctx.value(0), ctx.value(1), ctx.input(2)
    dtype = zero.dtype if zero is not None else _dtype(ctx, "output_dtype", "uint8")
    if is_float(dtype):
        raise ctx.unsupported(f"quantisation to {dtype} is not supported")
    precision = _dtype(ctx, "precision", scale.dtype if is_float(x.dtype) else "float32")
    return ctx.add(QUANTIZE, [x, scale, zero], **_axis_block(ctx), dtype=dtype, precision=precision)


def _dequantize_linear(ctx: Context) -> Value:
    x, scale, zero = ctx.value(0), ctx.value(1), ctx.input(2)
    return _unfolded(ctx, DEQUANTIZE, [x, scale, zero], **_axis_block(ctx), dtype=_dtype(ctx, "output_dtype", scale.dtype))


def _dynamic_quantize_linear(ctx: Context) -> tuple[Value, ...]:
    """Scale and zero point are those of the data at hand."""
    x = ctx.value(0)
    scale, zero = ctx.add_several(DYNAMIC_RANGE, [x])
    y = ctx.add(QUANTIZE, [x, scale, zero], axis=0, block=0, dtype="uint8", precision="float32")
    return y, scale, zero


def _centred(ctx: Context, x: int, zero: int, axis: int) -> Value:
    return _unfolded(ctx, CENTRED, [ctx.value(x), ctx.input(zero)], axis=axis)


def _q_linear_conv(ctx: Context) -> Value:
    y = biased(ctx, convolution(ctx, _centred(ctx, 0, 2, 1), _centred(ctx, 3, 5, 0)), ctx.input(8))
    return ctx.add(REQUANTIZE, [y, ctx.value(1), ctx.value(4), ctx.value(6), ctx.value(7)], axis=1)


def _product(ctx: Context, a: tuple[int, int], b: tuple[int, int]) -> Value:
    """The int32 product; zero points of `a` are per row, those of `b` per column."""
    rows, columns = len(ctx.value(a[0]).shape) - 2, len(ctx.value(b[0]).shape) - 1
    return ctx.add(MATMUL, [_centred(ctx, *a, max(rows, 0)), _centred(ctx, *b, columns)])


def _q_linear_mat_mul(ctx: Context) -> Value:
    y, scale = _product(ctx, (0, 2), (3, 5)), ctx.value(1)
    if len(scale.shape) == 1 and scale.shape[0] != 1:
        raise ctx.unsupported("a scale for each row of the first factor is not supported")
    return ctx.add(REQUANTIZE, [y, scale, ctx.value(4), ctx.value(6), ctx.value(7)], axis=len(y.shape) - 1)


TABLE: Table = {
    "ConvInteger": lambda ctx: convolution(ctx, _centred(ctx, 0, 2, 1), _centred(ctx, 1, 3, 0)),
    "DequantizeLinear": _dequantize_linear, "DynamicQuantizeLinear": _dynamic_quantize_linear,
    "MatMulInteger": lambda ctx: _product(ctx, (0, 2), (1, 3)), "QLinearConv": _q_linear_conv, "QLinearMatMul": _q_linear_mat_mul,
    "QuantizeLinear": _quantize_linear,
}  # fmt: skip
