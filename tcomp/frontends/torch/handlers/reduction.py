"""ATen operators that reduce axes, or normalise along them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tcomp.frontends.torch.context import Context, Table, widened
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import Operator, Value
from tcomp.ops import movement, reduction as ops
from tcomp.ops.elementwise import ADD, EQUAL, ISNAN, MUL, OR, RSQRT, SUB, WHERE

aten = torch.ops.aten
Axes = int | Sequence[int] | None


def _reduced(op: Operator, ctx: Context, x: Value, axes: Axes = None, keepdim: bool = False, *rest: Any, **others: Any) -> Value:
    """A reduction in the type of its result."""
    chosen, x = ctx.axes(x, axes), ctx.cast(x, ctx.dtype)
    return ctx.add(op, x, axes=chosen, keepdims=keepdim) if chosen else x


def _logical(op: Operator, ctx: Context, x: Value, axes: Axes = None, keepdim: bool = False) -> Value:
    chosen, x = ctx.axes(x, axes), ctx.cast(x, "bool")
    return ctx.add(op, x, axes=chosen, keepdims=keepdim) if chosen else x


def _position(op: Operator, ctx: Context, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
    if not x.shape:
        return ctx.number(0, "int64")
    flat, n = (ctx.reshape(x, (movement.product(x.shape),)), 0) if axis is None else (x, ctx.axis(x, axis))
    return ctx.reshape(ctx.add(op, flat, axis=n, keepdims=keepdim, last=False), ctx.shape)


def _softmax(op: Operator, ctx: Context, x: Value, axis: int, half_to_float: bool = False) -> Value:
    x = ctx.cast(x, ctx.dtype)
    return ctx.add(op, x, axes=(ctx.axis(x, axis),)) if x.shape else ctx.add(op, ctx.reshape(x, (1,)), axes=(0,))


def _cumulative(op: Operator, ctx: Context, x: Value, axis: int, dtype: Any = None) -> Value:
    x = ctx.cast(x, ctx.dtype)
    return ctx.add(op, x, axis=ctx.axis(x, axis), exclusive=False, reverse=False) if x.shape else x


def _running(op: Operator, ctx: Context, x: Value, axis: int) -> tuple[Value, Value]:
    """Running extremes, and where the last of equal ones is so far: the largest place of an element that is the extreme so far."""
    if not x.shape:
        return x, ctx.number(0, "int64")
    n = ctx.axis(x, axis)
    wide = ctx.cast(x, "int32") if x.dtype == "bool" else x
    found = ctx.add(op, wide, axis=n, exclusive=False, reverse=False)
    hit = ctx.add(EQUAL, wide, found)
    hit = ctx.add(OR, hit, ctx.add(ISNAN, wide)) if is_float(wide.dtype) else hit
    places = ctx.add(movement.ARANGE, start=0, step=1, count=x.shape[n], dtype="int64")
    places = ctx.reshape(places, [d if k == n else 1 for k, d in enumerate(x.shape)])
    hits = ctx.add(WHERE, hit, places, ctx.number(0, "int64"))
    return ctx.cast(found, x.dtype), ctx.add(ops.CUM_MAX, hits, axis=n, exclusive=False, reverse=False)


def _group_norm(
    ctx: Context, x: Value, weight: Value | None, bias: Value | None, n: Any, channels: int, size: Any, groups: int, epsilon: float
) -> tuple[Value, ...]:
    """(y, means, 1 / deviations)"""
    c = int(channels)
    grouped = ctx.wide(ctx.reshape(x, (x.shape[0], groups, movement.product([c // groups, *x.shape[2:]]))))
    mean = ctx.add(ops.REDUCE_MEAN, grouped, axes=(2,), keepdims=True)
    centred = ctx.add(SUB, grouped, mean)
    variance = ctx.add(ops.REDUCE_MEAN, ctx.add(MUL, centred, centred), axes=(2,), keepdims=False)
    y = ctx.add(ops.GROUP_NORM, x, *_affine(ctx, x, weight, bias), groups=groups, epsilon=epsilon)
    inverse = ctx.add(RSQRT, ctx.add(ADD, variance, ctx.number(epsilon, variance.dtype)))
    return y, ctx.reshape(mean, variance.shape), inverse


def _affine(ctx: Context, x: Value, weight: Value | None, bias: Value | None) -> tuple[Value, Value]:
    """The factor and the summand of each channel."""
    factor, summand = ((ctx.number(n, x.dtype, (int(x.shape[1]),)) if v is None else v) for n, v in ((1, weight), (0, bias)))
    return factor, summand


def _batch_norm(
    ctx: Context, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value, momentum: float, epsilon: float
) -> tuple[Value, ...]:
    """By these moments; `definitions/moments.py` computes those of training."""
    scale, shift = _affine(ctx, x, weight, bias)
    factor = ctx.add(ops.BATCH_SCALE, scale, variance, epsilon=epsilon)
    y = ctx.add(ops.SCALE_SHIFT, x, factor, ctx.add(ops.BATCH_SHIFT, shift, mean, factor))
    return y, *[ctx.number(0, mean.dtype, (0,))] * 2


TABLE: Table = {
    aten.sum: partial(_reduced, ops.REDUCE_SUM), aten.mean: partial(_reduced, ops.REDUCE_MEAN),
    aten.prod: partial(_reduced, ops.REDUCE_PROD), aten.amax: partial(_reduced, ops.REDUCE_MAX),
    aten.amin: partial(_reduced, ops.REDUCE_MIN),
    aten.any: partial(_logical, ops.REDUCE_MAX), aten.all: partial(_logical, ops.REDUCE_MIN),
    aten.argmax: partial(_position, ops.ARG_MAX), aten.argmin: partial(_position, ops.ARG_MIN),
    aten._softmax: partial(_softmax, ops.SOFTMAX), aten._log_softmax: partial(_softmax, ops.LOG_SOFTMAX),
    aten._safe_softmax: partial(_softmax, ops.SAFE_SOFTMAX),
    aten.cumsum: partial(_cumulative, ops.CUM_SUM), aten.cumprod: partial(_cumulative, ops.CUM_PROD),
    aten.logcumsumexp: partial(_cumulative, ops.CUM_LOG_SUM_EXP),
    aten.cummax: partial(_running, ops.CUM_MAX), aten.cummin: partial(_running, ops.CUM_MIN), aten.native_group_norm: _group_norm,
    aten._native_batch_norm_legit_no_training: widened(_batch_norm),
    aten.native_layer_norm: lambda ctx, x, shape, weight, bias, epsilon: ctx.results(
        ops.LAYER_NORM, x, weight, bias, axis=len(x.shape) - len(shape), epsilon=epsilon),
}  # fmt: skip
