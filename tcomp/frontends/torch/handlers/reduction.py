"""ATen operators that reduce axes, or normalise along them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tcomp.frontends.torch.context import Context, Table, dtype_name, widened
from tcomp.ir.broadcasting import HALF
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import as_expr
from tcomp.ir.graph import Operator, Value
from tcomp.ops import movement, reduction as ops
from tcomp.ops.elementwise import ABS, ADD, AND, DIV, EQUAL, ISNAN, LESS_EQUAL, MIN, MUL, NOT, OR, POW, RECIPROCAL, SQRT, SUB, WHERE

aten = torch.ops.aten
Axes = int | Sequence[int] | None


def result_dtype(ctx: Context) -> str:
    """The element type that PyTorch says the (first) result has."""
    example = ctx.node.meta["val"]
    return dtype_name((example[0] if isinstance(example, tuple | list) else example).dtype)


def reduced(op: Operator, ctx: Context, x: Value, axes: Axes = None, keepdim: bool = False, *rest: Any, **others: Any) -> Value:
    """A reduction in the type of its result."""
    chosen = ctx.axes(x, axes)
    x = ctx.cast(x, result_dtype(ctx))
    return ctx.add(op, x, axes=chosen, keepdims=keepdim) if chosen else x


def _logical(op: Operator, ctx: Context, x: Value, axes: Axes = None, keepdim: bool = False) -> Value:
    chosen, x = ctx.axes(x, axes), ctx.cast(x, "bool")
    return ctx.cast(ctx.add(op, x, axes=chosen, keepdims=keepdim) if chosen else x, result_dtype(ctx))


def _extreme(op: Operator, arg: Operator, ctx: Context, x: Value, axis: int | None = None, keepdim: bool = False) -> Any:
    if axis is None:
        return ctx.add(op, x, axes=ctx.axes(x, None), keepdims=False) if x.shape else x
    if not x.shape:
        return x, ctx.constant(0, "int64")
    n = ctx.axis(x, axis)
    return ctx.add(op, x, axes=(n,), keepdims=keepdim), ctx.add(arg, x, axis=n, keepdims=keepdim, last=False)


def _position(op: Operator, ctx: Context, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
    if not x.shape:
        return ctx.constant(0, "int64")
    if axis is None:
        count = movement.product(x.shape)
        found = ctx.add(op, ctx.add(movement.RESHAPE, x, shape=(count,)), axis=0, keepdims=False, last=False)
        return ctx.add(movement.RESHAPE, found, shape=(1,) * len(x.shape)) if keepdim else found
    return ctx.add(op, x, axis=ctx.axis(x, axis), keepdims=keepdim, last=False)


def _var(ctx: Context, x: Value, axes: Axes = None, correction: float | None = None, keepdim: bool = False) -> Value:
    chosen, less = ctx.axes(x, axes), 1 if correction is None else correction
    mean = ctx.add(ops.REDUCE_MEAN, x, axes=chosen, keepdims=True)
    centred = ctx.add(SUB, x, mean)
    total = ctx.add(ops.REDUCE_SUM, ctx.add(MUL, centred, centred), axes=chosen, keepdims=keepdim)
    count = movement.product([x.shape[n] for n in chosen])
    if isinstance(count, int):
        return ctx.add(DIV, total, ctx.constant(max(0.0, count - less), x.dtype))
    return ctx.add(DIV, total, ctx.add(SUB, ctx.tensor(as_expr(count), x.dtype), ctx.constant(less, x.dtype)))


def _var_mean(ctx: Context, x: Value, axes: Axes = None, correction: float | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    chosen = ctx.axes(x, axes)
    return _var(ctx, x, axes, correction, keepdim), ctx.add(ops.REDUCE_MEAN, x, axes=chosen, keepdims=keepdim)


def _distances(ctx: Context, x: Value, y: Value, p: float, mode: int | None = None) -> Value:
    """The p-norms of x[..., i, :] - y[..., j, :]: [..., i, j]."""
    rows = ctx.add(movement.RESHAPE, x, shape=(*x.shape[:-1], 1, x.shape[-1]))
    columns = ctx.add(movement.RESHAPE, y, shape=(*y.shape[:-2], 1, *y.shape[-2:]))
    return _vector_norm(ctx, ctx.add(SUB, rows, columns), p, -1)


def _vector_norm(ctx: Context, x: Value, order: float = 2, axes: Axes = None, keepdim: bool = False, dtype: Any = None) -> Value:
    wide = "float32" if (found := result_dtype(ctx)) in HALF else found  # powers would overflow
    chosen, x = ctx.axes(x, axes), ctx.cast(x, wide)
    if not chosen:
        if order == 0:
            raise ctx.unsupported("the order of the norm of a scalar is 0")
        return ctx.add(ABS, x)
    size = ctx.add(ABS, x)
    if order in (float("inf"), float("-inf")):
        return ctx.add(ops.REDUCE_MAX if order > 0 else ops.REDUCE_MIN, size, axes=chosen, keepdims=keepdim)
    if order == 0:
        nonzero = ctx.cast(ctx.add(NOT, ctx.add(EQUAL, x, ctx.constant(0, x.dtype))), x.dtype)
        return ctx.add(ops.REDUCE_SUM, nonzero, axes=chosen, keepdims=keepdim)
    if order == 1:
        return ctx.add(ops.REDUCE_SUM, size, axes=chosen, keepdims=keepdim)
    if order == 2:
        return ctx.add(SQRT, ctx.add(ops.REDUCE_SUM_SQUARE, x, axes=chosen, keepdims=keepdim))
    total = ctx.add(ops.REDUCE_SUM, ctx.add(POW, size, ctx.constant(order, x.dtype)), axes=chosen, keepdims=keepdim)
    return ctx.add(POW, total, ctx.constant(1 / order, x.dtype))


def _softmax(op: Operator, ctx: Context, x: Value, axis: int, half_to_float: bool = False) -> Value:
    x = ctx.cast(x, result_dtype(ctx))
    return ctx.add(op, x, axes=(ctx.axis(x, axis),)) if x.shape else ctx.add(op, ctx.add(movement.RESHAPE, x, shape=(1,)), axes=(0,))


def _cumulative(op: Operator, ctx: Context, x: Value, axis: int, dtype: Any = None) -> Value:
    x = ctx.cast(x, result_dtype(ctx))
    return ctx.add(op, x, axis=ctx.axis(x, axis), exclusive=False, reverse=False) if x.shape else x


def _running(op: Operator, ctx: Context, x: Value, axis: int) -> tuple[Value, Value]:
    """Running extremes, and where the last of equal ones is so far: the largest place of an element that is the extreme so far."""
    if not x.shape:
        return x, ctx.constant(0, "int64")
    n = ctx.axis(x, axis)
    wide = ctx.cast(x, "int32") if x.dtype == "bool" else x
    found = ctx.add(op, wide, axis=n, exclusive=False, reverse=False)
    hit = ctx.add(EQUAL, wide, found)
    hit = ctx.add(OR, hit, ctx.add(ISNAN, wide)) if is_float(wide.dtype) else hit
    places = ctx.add(movement.ARANGE, start=0, step=1, count=x.shape[n], dtype="int64")
    places = ctx.add(movement.RESHAPE, places, shape=tuple(d if k == n else 1 for k, d in enumerate(x.shape)))
    hits = ctx.add(WHERE, hit, places, ctx.constant(0, "int64"))
    return ctx.cast(found, x.dtype), ctx.add(ops.CUM_MAX, hits, axis=n, exclusive=False, reverse=False)


def _histogram(ctx: Context, x: Value, bins: int = 100, low: float = 0, high: float = 0) -> Value:
    """How many elements are in each of equal parts of a range, by default that of the elements; its end is in the last part."""
    flat = ctx.add(movement.RESHAPE, x, shape=(movement.product(x.shape),))
    first, last = ctx.constant(low, x.dtype), ctx.constant(high, x.dtype)
    if low == high:
        if 0 in flat.shape:
            raise ctx.unsupported("there are no elements, of which the range is to be found")
        first, last = (ctx.add(op, flat, axes=(0,), keepdims=False) for op in (ops.REDUCE_MIN, ops.REDUCE_MAX))
        one, none = ctx.constant(1, x.dtype), ctx.add(EQUAL, first, last)
        first, last = ctx.add(WHERE, none, ctx.add(SUB, first, one), first), ctx.add(WHERE, none, ctx.add(ADD, last, one), last)
    inside = ctx.add(AND, ctx.add(LESS_EQUAL, first, flat), ctx.add(LESS_EQUAL, flat, last))
    part = ctx.add(DIV, ctx.add(MUL, ctx.add(SUB, flat, first), ctx.constant(bins, x.dtype)), ctx.add(SUB, last, first))
    place = ctx.add(MIN, ctx.cast(ctx.add(WHERE, inside, part, ctx.constant(0, x.dtype)), "int64"), ctx.constant(bins - 1, "int64"))
    return _counts(ctx, place, inside, bins, x.dtype)


def _counts(ctx: Context, places: Value, counted: Value, size: int, dtype: str) -> Value:
    """How many of the places 0, 1, ... that are `counted` there are: [size]."""
    at = ctx.add(movement.RESHAPE, places, shape=(*places.shape, 1))
    return ctx.add(movement.SCATTER_ND, ctx.constant(0, dtype, (size,)), at, ctx.cast(counted, dtype), reduction="add")


def _group_norm(
    ctx: Context, x: Value, weight: Value | None, bias: Value | None, n: Any, channels: int, size: Any, groups: int, epsilon: float
) -> tuple[Value, ...]:
    c = int(channels)
    scale = ctx.constant(1, x.dtype, (c,)) if weight is None else weight
    shift = ctx.constant(0, x.dtype, (c,)) if bias is None else bias
    wide = "float32" if x.dtype in ("float16", "bfloat16") else x.dtype
    count = movement.product([c // groups, *x.shape[2:]])
    grouped = ctx.cast(ctx.add(movement.RESHAPE, x, shape=(x.shape[0], groups, count)), wide)
    mean, inverse = moments(ctx, grouped, (2,), epsilon, False)
    return ctx.add(ops.GROUP_NORM, x, scale, shift, groups=groups, epsilon=epsilon), mean, inverse


def moments(ctx: Context, x: Value, axes: tuple[int, ...], epsilon: float, keepdims: bool) -> tuple[Value, Value]:
    """(mean, 1 / standard deviation) over axes."""
    mean = ctx.add(ops.REDUCE_MEAN, x, axes=axes, keepdims=True)
    centred = ctx.add(SUB, x, mean)
    variance = ctx.add(ops.REDUCE_MEAN, ctx.add(MUL, centred, centred), axes=axes, keepdims=keepdims)
    inverse = ctx.add(RECIPROCAL, ctx.add(SQRT, ctx.add(ADD, variance, ctx.constant(epsilon, variance.dtype))))
    kept = mean if keepdims else ctx.add(ops.REDUCE_MEAN, x, axes=axes, keepdims=False)
    return kept, inverse


def _scaled(ctx: Context, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value, epsilon: float) -> Value:
    channels = int(x.shape[1])
    scale = ctx.constant(1, x.dtype, (channels,)) if weight is None else weight
    shift = ctx.constant(0, x.dtype, (channels,)) if bias is None else bias
    factor = ctx.add(ops.BATCH_SCALE, scale, variance, epsilon=epsilon)
    return ctx.add(ops.SCALE_SHIFT, x, factor, ctx.add(ops.BATCH_SHIFT, shift, mean, factor))


def _batch_norm_inference(
    ctx: Context, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value, momentum: float, epsilon: float
) -> tuple[Value | None, ...]:
    empty = ctx.constant(0, mean.dtype, (0,))
    return _scaled(ctx, x, weight, bias, mean, variance, epsilon), empty, empty


def _batch_norm(
    ctx: Context, x: Value, weight: Value | None, bias: Value | None, old_mean: Value | None, old_variance: Value | None, training: bool,
    momentum: float, epsilon: float,
) -> tuple[Value | None, ...]:  # fmt: skip
    """(y, mean, 1 / deviation, the running mean, the running variance)"""
    if not training:
        assert old_mean is not None and old_variance is not None
        return *_batch_norm_inference(ctx, x, weight, bias, old_mean, old_variance, momentum, epsilon), old_mean, old_variance
    wide = x if is_float(x.dtype) and x.dtype in ("float32", "float64") else ctx.cast(x, "float32")
    mean, variance = ctx.results(ops.BATCH_MOMENTS, wide)
    inverse = ctx.add(RECIPROCAL, ctx.add(SQRT, ctx.add(ADD, variance, ctx.constant(epsilon, variance.dtype))))
    count = movement.product([d for n, d in enumerate(x.shape) if n != 1])
    if not isinstance(count, int):
        raise ctx.unsupported("the number of rows is symbolic")

    def running(old: Value | None, new: Value) -> Value | None:
        if old is None:
            return None
        kept, added = (ctx.add(MUL, v, ctx.constant(f, v.dtype)) for v, f in ((old, 1 - momentum), (new, momentum)))
        return ctx.add(ADD, kept, ctx.cast(added, old.dtype))

    unbiased = ctx.add(MUL, variance, ctx.constant(count / max(1, count - 1), variance.dtype))
    y = _scaled(ctx, x, weight, bias, mean, variance, epsilon)
    return y, mean, inverse, running(old_mean, mean), running(old_variance, unbiased)


def _batch_norm_alone(
    ctx: Context, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, epsilon: float
) -> tuple[Value | None, ...]:
    return _batch_norm(ctx, x, weight, bias, None, None, training, momentum, epsilon)[:3]


TABLE: Table = {
    aten.sum: partial(reduced, ops.REDUCE_SUM), aten.mean: partial(reduced, ops.REDUCE_MEAN),
    aten.amax: partial(reduced, ops.REDUCE_MAX), aten.amin: partial(reduced, ops.REDUCE_MIN),
    aten.any: partial(_logical, ops.REDUCE_MAX), aten.all: partial(_logical, ops.REDUCE_MIN),
    aten.max: partial(_extreme, ops.REDUCE_MAX, ops.ARG_MAX), aten.min: partial(_extreme, ops.REDUCE_MIN, ops.ARG_MIN),
    aten.argmax: partial(_position, ops.ARG_MAX), aten.argmin: partial(_position, ops.ARG_MIN), aten.var: widened(_var),
    aten.var_mean: widened(_var_mean), aten.linalg_vector_norm: _vector_norm, aten._cdist_forward: _distances,
    aten._softmax: partial(_softmax, ops.SOFTMAX), aten._log_softmax: partial(_softmax, ops.LOG_SOFTMAX),
    aten._safe_softmax: partial(_softmax, ops.SAFE_SOFTMAX),
    aten.cumsum: partial(_cumulative, ops.CUM_SUM), aten.cumprod: partial(_cumulative, ops.CUM_PROD),
    aten.cummax: partial(_running, ops.CUM_MAX), aten.cummin: partial(_running, ops.CUM_MIN), aten.histc: _histogram,
    aten.logcumsumexp: partial(_cumulative, ops.CUM_LOG_SUM_EXP), aten.native_group_norm: _group_norm,
    aten._native_batch_norm_legit_no_training: widened(_batch_norm_inference),
    aten._native_batch_norm_legit: widened(_batch_norm_alone),  # without statistics from before
    aten._native_batch_norm_legit_functional: widened(_batch_norm),
    aten.prod: lambda ctx, x, axis=None, keepdim=False, dtype=None: reduced(ops.REDUCE_PROD, ctx, x, axis, keepdim),
    aten.native_layer_norm: lambda ctx, x, shape, weight, bias, epsilon: ctx.results(
        ops.LAYER_NORM, x, weight, bias, axis=len(x.shape) - len(shape), epsilon=epsilon),
}  # fmt: skip
