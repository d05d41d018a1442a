"""Elementwise ATen operators. Types are promoted as PyTorch does (`torch._prims_common.elementwise_dtypes`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

from tcomp.frontends.torch.context import Context, Handler, Operand, Table, dtype_name, widened
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ops, special

aten = torch.ops.aten


def unary(op: Operator, kind: KIND = KIND.DEFAULT, **attrs: Any) -> Handler:
    """An operator on one tensor."""
    return lambda ctx, x: ctx.add(op, *ctx.promoted(x, kind=kind), **attrs)


def binary(op: Operator, kind: KIND = KIND.DEFAULT) -> Handler:
    """An operator on two tensors, or on a tensor and a number."""
    return lambda ctx, x, y: ctx.add(op, *ctx.promoted(x, y, kind=kind))


def composed(function: Callable[..., Value], kind: KIND = KIND.DEFAULT) -> Handler:
    """A function of the context and promoted operands."""
    return lambda ctx, *operands: widened(function)(ctx, *ctx.promoted(*operands, kind=kind))


def number(ctx: Context, value: float, like: Value) -> Value:
    """A number in the type of a tensor."""
    return ctx.constant(value, like.dtype)


def _sum(op: Operator, ctx: Context, x: Operand, y: Operand, alpha: float = 1) -> Value:
    a, b = ctx.promoted(x, y)
    return ctx.add(op, a, b if alpha == 1 else ctx.add(ops.MUL, b, number(ctx, alpha, b)))


def _div(ctx: Context, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    a, b = ctx.promoted(x, y, kind=KIND.INT_TO_FLOAT if rounding_mode is None else KIND.DEFAULT)
    if rounding_mode is None:
        return ctx.add(ops.DIV, a, b)
    if is_float(a.dtype):
        if rounding_mode == "floor":  # as PyTorch computes it: from the remainder, which is exact
            rest = ctx.add(ops.MOD, a, b)
            return ctx.add(ops.ROUND, ctx.add(ops.DIV, ctx.add(ops.SUB, a, rest), b))
        return ctx.add(ops.TRUNC, ctx.add(ops.DIV, a, b))
    if rounding_mode == "trunc":
        return ctx.add(ops.DIV, a, b)
    rest = ctx.add(ops.MOD, a, b)
    return ctx.add(ops.DIV, ctx.add(ops.SUB, a, rest), b)


def _rounded(op: Operator, ctx: Context, x: Value) -> Value:
    return ctx.add(op, x) if is_float(x.dtype) else x


def _logarithm(base: float, ctx: Context, x: Value) -> Value:
    return ctx.add(ops.DIV, ctx.add(ops.LOG, x), number(ctx, math.log(base), x))


def _rsqrt(ctx: Context, x: Value) -> Value:
    return ctx.add(ops.RECIPROCAL, ctx.add(ops.SQRT, x))


def _clamp(ctx: Context, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    given = [v for v in (x, low, high) if v is not None]
    operands = iter(ctx.promoted(*given, count=3))
    y = next(operands)
    y = y if low is None else ctx.add(ops.MAX, y, next(operands))
    return y if high is None else ctx.add(ops.MIN, y, next(operands))


def _where(ctx: Context, condition: Value, x: Operand, y: Operand) -> Value:
    dtype = dtype_name(ctx.node.meta["val"].dtype)
    return ctx.add(ops.WHERE, ctx.tensor(condition, "bool"), ctx.tensor(x, dtype), ctx.tensor(y, dtype))


def _compare(op: Operator, ctx: Context, x: Operand, y: Operand) -> Value:
    a, b = ctx.promoted(x, y)
    if a.dtype == "bool" and op not in (ops.EQUAL,):
        a, b = ctx.cast(a, "int32"), ctx.cast(b, "int32")
    return ctx.add(op, a, b)


def _logical(op: Operator, ctx: Context, *operands: Value) -> Value:
    return ctx.add(op, *(ctx.tensor(x, "bool") for x in operands))


def _signbit(ctx: Context, x: Value) -> Value:
    """Whether a number is negative, -0.0 included."""
    if not is_float(x.dtype):
        return ctx.add(ops.LESS, x, number(ctx, 0, x)) if x.dtype != "bool" else ctx.add(ops.XOR, x, x)
    return ctx.add(ops.SIGN_BIT, x)


def _copysign(ctx: Context, x: Operand, y: Operand) -> Value:
    a, b = ctx.promoted(x, y, kind=KIND.INT_TO_FLOAT)
    size = ctx.add(ops.ABS, a)
    return ctx.add(ops.WHERE, _signbit(ctx, b), ctx.add(ops.NEG, size), size)


def _round(ctx: Context, x: Value, decimals: int = 0) -> Value:
    if decimals == 0 or not is_float(x.dtype):
        return _rounded(ops.ROUND, ctx, x)
    factor = number(ctx, 10.0 ** abs(decimals), x)
    first, second = (ops.MUL, ops.DIV) if decimals > 0 else (ops.DIV, ops.MUL)
    return ctx.add(second, ctx.add(ops.ROUND, ctx.add(first, x, factor)), factor)


def _exp2(ctx: Context, x: Value) -> Value:
    return ctx.add(ops.POW, number(ctx, 2, x), x)


def _ldexp(ctx: Context, x: Operand, n: Operand) -> Value:
    a, b = ctx.promoted(x, n, kind=KIND.INT_TO_FLOAT)
    return ctx.add(ops.MUL, a, _exp2(ctx, b))


def _add_result(op: Operator, ctx: Context, x: Operand, y: Operand, z: Operand, value: float = 1) -> Value:
    """x + value * op(y, z)"""

    def apply(ctx: Context, a: Value, b: Value, c: Value) -> Value:
        scaled = b if value == 1 else ctx.add(ops.MUL, b, number(ctx, value, b))
        return ctx.add(ops.ADD, a, ctx.add(op, scaled, c))

    return widened(apply)(ctx, *ctx.promoted(x, y, z))


def _angle(ctx: Context, x: Value) -> Value:
    turned = ctx.add(ops.WHERE, ctx.add(ops.LESS, x, number(ctx, 0, x)), number(ctx, math.pi, x), number(ctx, 0, x))
    return ctx.add(ops.WHERE, ctx.add(ops.ISNAN, x), x, turned)


def _elu(ctx: Context, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    inner = x if input_scale == 1 else ctx.add(ops.MUL, x, number(ctx, input_scale, x))
    below = ctx.add(ops.ELU, inner, alpha=float(alpha))
    y = below if input_scale == 1 else ctx.add(ops.WHERE, ctx.add(ops.GREATER, x, number(ctx, 0, x)), x, below)
    return y if scale == 1 else ctx.add(ops.MUL, y, number(ctx, scale, x))


def _isinf(ctx: Context, x: Value) -> Value:
    if not is_float(x.dtype):
        return ctx.add(ops.NOT, ctx.add(ops.EQUAL, x, x))
    return ctx.add(ops.ISINF, x, positive=True, negative=True)


def _cast(ctx: Context, x: Value, dtype: torch.dtype | None = None, *rest: Any, **others: Any) -> Value:
    return x if dtype is None else ctx.cast(x, dtype_name(dtype))


def _fill(ctx: Context, x: Value, value: Operand) -> Value:
    from tcomp.ops.movement import EXPAND

    return ctx.add(EXPAND, ctx.tensor(value, x.dtype), shape=x.shape)


def _polygamma(ctx: Context, n: int, x: Value) -> Value:
    y = ctx.tensor(x, dtype_name(ctx.node.meta["val"].dtype))
    return ctx.add(special.DIGAMMA_DERIVATIVE, y, order=n) if n else _digamma(ctx, y)


def _digamma(ctx: Context, x: Value) -> Value:
    """Infinite at 0, with the sign that it has on that side."""
    pole = ctx.add(ops.EQUAL, x, number(ctx, 0, x))
    return ctx.add(ops.WHERE, pole, ctx.add(ops.DIV, number(ctx, -1, x), x), ctx.add(special.DIGAMMA, x))


def _grown(op: Operator, ctx: Context, x: Value) -> Value:
    """A Bessel function of what is scaled by exp(-abs(x))."""
    return ctx.add(ops.MUL, ctx.add(op, x), ctx.add(ops.EXP, ctx.add(ops.ABS, x)))


F = KIND.INT_TO_FLOAT
TABLE: Table = {
    aten.abs: unary(ops.ABS), aten.neg: unary(ops.NEG), aten.relu: unary(ops.RELU), aten.sign: unary(ops.SIGN),
    aten.acos: unary(ops.ACOS, F), aten.acosh: unary(ops.ACOSH, F), aten.asin: unary(ops.ASIN, F), aten.asinh: unary(ops.ASINH, F),
    aten.atan: unary(ops.ATAN, F), aten.atanh: unary(ops.ATANH, F), aten.cos: unary(ops.COS, F), aten.cosh: unary(ops.COSH, F),
    aten.sin: unary(ops.SIN, F), aten.sinh: unary(ops.SINH, F), aten.tan: unary(ops.TAN, F), aten.tanh: unary(ops.TANH, F),
    aten.exp: unary(ops.EXP, F), aten.log: unary(ops.LOG, F), aten.sqrt: unary(ops.SQRT, F), aten.erf: unary(ops.ERF, F),
    aten.sigmoid: unary(ops.SIGMOID, F), aten.reciprocal: unary(ops.RECIPROCAL, F), aten.rsqrt: composed(_rsqrt, F),
    aten.expm1: unary(ops.EXPM1, F), aten.log1p: unary(ops.LOG1P, F), aten.log2: composed(partial(_logarithm, 2.0), F),
    aten.log10: composed(partial(_logarithm, 10.0), F), aten.ceil: partial(_rounded, ops.CEIL), aten.floor: partial(_rounded, ops.FLOOR),
    aten.trunc: partial(_rounded, ops.TRUNC), aten.round: _round, aten.exp2: composed(_exp2, F), aten.atan2: binary(ops.ATAN2, F),
    aten.addcmul: partial(_add_result, ops.MUL), aten.addcdiv: partial(_add_result, ops.DIV), aten.angle: composed(_angle, F),
    aten.hypot: binary(ops.HYPOT), aten.copysign: _copysign, aten.signbit: _signbit, aten.ldexp: _ldexp,
    aten.fmax: binary(ops.FMAX), aten.fmin: binary(ops.FMIN),
    aten.bitwise_not: unary(ops.NOT), aten.logical_not: partial(_logical, ops.NOT),
    aten.erfinv: unary(special.ERF_INV, F), aten.erfc: unary(special.ERFC, F), aten.special_erfcx: unary(special.ERFCX, F),
    aten.lgamma: unary(special.LGAMMA, F), aten.digamma: composed(_digamma, F), aten.polygamma: _polygamma,
    aten.special_zeta: binary(special.ZETA, F), aten.special_i0e: unary(special.BESSEL_I0E, F),
    aten.special_i1e: unary(special.BESSEL_I1E, F), aten.i0: composed(partial(_grown, special.BESSEL_I0E), F),
    aten.special_i1: composed(partial(_grown, special.BESSEL_I1E), F),
    aten._assert_async: lambda ctx, condition, message="": ctx.require(ctx.tensor(condition, "bool")),
    aten.isinf: _isinf, aten.elu: _elu, aten._to_copy: _cast,
    aten.add: partial(_sum, ops.ADD), aten.sub: partial(_sum, ops.SUB), aten.mul: binary(ops.MUL), aten.div: _div,
    aten.pow: binary(ops.POW), aten.maximum: binary(ops.MAX), aten.minimum: binary(ops.MIN),
    aten.fmod: binary(ops.FMOD), aten.remainder: binary(ops.MOD),
    aten.bitwise_and: binary(ops.AND), aten.bitwise_or: binary(ops.OR), aten.bitwise_xor: binary(ops.XOR),
    aten.bitwise_left_shift: binary(ops.SHIFT_LEFT), aten.bitwise_right_shift: binary(ops.SHIFT_RIGHT),
    aten.logical_and: partial(_logical, ops.AND), aten.logical_or: partial(_logical, ops.OR), aten.logical_xor: partial(_logical, ops.XOR),
    aten.eq: partial(_compare, ops.EQUAL), aten.lt: partial(_compare, ops.LESS),
    aten.le: partial(_compare, ops.LESS_EQUAL), aten.gt: partial(_compare, ops.GREATER),
    aten.ge: partial(_compare, ops.GREATER_EQUAL), aten.where: _where,
    aten.clamp: _clamp, "prims.fma": lambda ctx, x, y, z: _add_result(ops.MUL, ctx, z, x, y),
    "prims.convert_element_type": _cast, aten.hardtanh: lambda ctx, x, low=-1, high=1: _clamp(ctx, x, low, high), aten.fill: _fill,
    aten.ne: lambda ctx, x, y: ctx.add(ops.NOT, _compare(ops.EQUAL, ctx, x, y)),
    aten.gelu: lambda ctx, x, approximate="none": ctx.add(ops.GELU, x, approximate=approximate),
    aten.leaky_relu: lambda ctx, x, slope=0.01: ctx.add(ops.LEAKY_RELU, x, alpha=float(slope)),
    aten.isnan: lambda ctx, x: ctx.add(ops.ISNAN, x) if is_float(x.dtype) else ctx.add(ops.NOT, ctx.add(ops.EQUAL, x, x)),
}  # fmt: skip
