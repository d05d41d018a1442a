"""Elementwise ATen operators. Types are promoted as PyTorch does (`torch._prims_common.elementwise_dtypes`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

from tcomp.frontends.torch.context import Context, Handler, Operand, Table
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ops, special
from tcomp.ops.xla import NEXT_AFTER

aten = torch.ops.aten
F = KIND.INT_TO_FLOAT


def forward(op: Operator, kind: KIND = KIND.DEFAULT, **attrs: Any) -> Handler:
    """An operator on tensors, or on tensors and numbers."""
    return lambda ctx, *operands: ctx.add(op, *ctx.promoted(*operands, kind=kind), **attrs)


def _sum(op: Operator, ctx: Context, x: Operand, y: Operand, alpha: float = 1) -> Value:
    a, b = ctx.promoted(x, y)
    return ctx.add(op, a, b if alpha == 1 else ctx.add(ops.MUL, b, ctx.number(alpha, b.dtype)))


def _div(ctx: Context, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    op = {None: ops.DIV, "floor": ops.FLOOR_DIVIDE, "trunc": ops.TRUNC_DIVIDE}[rounding_mode]
    return ctx.add(op, *ctx.promoted(x, y, kind=F if rounding_mode is None else KIND.DEFAULT))


def _clamp(ctx: Context, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    operands = iter(ctx.promoted(*(v for v in (x, low, high) if v is not None), count=3))
    y = next(operands)
    y = y if low is None else ctx.add(ops.MAX, y, next(operands))
    return y if high is None else ctx.add(ops.MIN, y, next(operands))


def _where(ctx: Context, condition: Value, x: Operand, y: Operand) -> Value:
    return ctx.add(ops.WHERE, ctx.tensor(condition, "bool"), ctx.tensor(x, ctx.dtype), ctx.tensor(y, ctx.dtype))


def _logical(op: Operator, ctx: Context, *operands: Value) -> Value:
    return ctx.add(op, *(ctx.tensor(x, "bool") for x in operands))


def _fma(ctx: Context, *operands: Operand) -> Value:
    x, y, z = (ctx.wide(ctx.tensor(v, ctx.dtype)) for v in operands)
    return ctx.add(ops.ADD, ctx.add(ops.MUL, x, y), z)


def _cast(ctx: Context, x: Value, dtype: torch.dtype | None = None, *rest: Any, **others: Any) -> Value:
    return x if dtype is None else ctx.cast(x, ctx.dtype)


def _polygamma(ctx: Context, n: int, x: Value) -> Value:
    y = ctx.tensor(x, ctx.dtype)
    return ctx.add(special.DIGAMMA_DERIVATIVE, y, order=n) if n else _digamma(ctx, y)


def _digamma(ctx: Context, x: Value) -> Value:
    """Infinite at 0, with the sign that it has on that side."""
    y = ctx.wide(ctx.tensor(x, ctx.dtype))
    pole = ctx.add(ops.EQUAL, y, ctx.number(0, y.dtype))
    return ctx.add(ops.WHERE, pole, ctx.add(ops.NEG, ctx.add(ops.RECIPROCAL, y)), ctx.add(special.DIGAMMA, y))


TABLE: Table = {
    **{getattr(aten, op.name): forward(op) for op in (
        ops.ABS, ops.NEG, ops.RELU, ops.SIGN, ops.CEIL, ops.FLOOR, ops.TRUNC, ops.ROUND, ops.HYPOT, ops.FMAX, ops.FMIN, ops.ANGLE,
        ops.ISNAN, ops.MUL, ops.POW, ops.FMOD)},
    **{getattr(aten, op.name): forward(op, F) for op in (
        ops.ACOS, ops.ACOSH, ops.ASIN, ops.ASINH, ops.ATAN, ops.ATANH, ops.COS, ops.COSH, ops.SIN, ops.SINH, ops.TAN, ops.TANH, ops.EXP,
        ops.LOG, ops.SQRT, ops.ERF, ops.SIGMOID, ops.RECIPROCAL, ops.RSQRT, ops.EXPM1, ops.LOG1P, ops.LOG2, ops.LOG10, ops.EXP2, ops.ATAN2,
        special.ERFC, special.LGAMMA)},
    aten.copysign: forward(ops.COPY_SIGN, F), aten.signbit: forward(ops.SIGN_BIT), aten.nextafter: forward(NEXT_AFTER),
    aten.isinf: forward(ops.ISINF, positive=True, negative=True), aten.erfinv: forward(special.ERF_INV, F),
    aten.special_erfcx: forward(special.ERFCX, F), aten.special_zeta: forward(special.ZETA, F),
    aten.i0: forward(special.BESSEL_I0, F), aten.special_i0e: forward(special.BESSEL_I0E, F),
    aten.special_i1: forward(special.BESSEL_I1, F), aten.special_i1e: forward(special.BESSEL_I1E, F),
    aten.digamma: _digamma, aten.polygamma: _polygamma,
    aten.add: partial(_sum, ops.ADD), aten.sub: partial(_sum, ops.SUB), aten.div: _div, aten.remainder: forward(ops.MOD),
    aten.maximum: forward(ops.MAX), aten.minimum: forward(ops.MIN), aten.clamp: _clamp,
    aten.eq: forward(ops.EQUAL), aten.ne: forward(ops.NOT_EQUAL), aten.lt: forward(ops.LESS), aten.le: forward(ops.LESS_EQUAL),
    aten.gt: forward(ops.GREATER), aten.ge: forward(ops.GREATER_EQUAL), aten.where: _where,
    aten.bitwise_and: forward(ops.AND), aten.bitwise_or: forward(ops.OR), aten.bitwise_xor: forward(ops.XOR),
    aten.bitwise_not: forward(ops.NOT),
    aten.bitwise_left_shift: forward(ops.SHIFT_LEFT), aten.bitwise_right_shift: forward(ops.SHIFT_RIGHT),
    aten.logical_and: partial(_logical, ops.AND), aten.logical_or: partial(_logical, ops.OR), aten.logical_xor: partial(_logical, ops.XOR),
    aten.logical_not: partial(_logical, ops.NOT), aten._to_copy: _cast, "prims.convert_element_type": _cast,
    "prims.fma": _fma,
    aten.hardtanh: lambda ctx, x, low=-1, high=1: _clamp(ctx, x, low, high),
    aten.gelu: lambda ctx, x, approximate="none": ctx.add(ops.GELU, x, approximate=approximate),
    aten.leaky_relu: lambda ctx, x, slope=0.01: ctx.add(ops.LEAKY_RELU, x, alpha=float(slope)),
    aten._assert_async: lambda ctx, condition, message="": ctx.require(ctx.tensor(condition, "bool")),
}  # fmt: skip
