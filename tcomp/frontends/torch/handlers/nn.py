"""ATen operators of neural networks: products, convolutions, pooling, and the derivatives that PyTorch has operators of their own for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from tcomp.frontends.torch.context import Context, Handler, Table, widened
from tcomp.frontends.torch.handlers.movement import cut, permute
from tcomp.ir.dtypes import integer_range, is_float
from tcomp.ir.expr import Dim, as_expr
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import movement, nn as ops, reduction
from tcomp.ops.elementwise import ADD, DIV, MOD, MUL
from tcomp.ops.expression import TensorFunction
from tcomp.ops.image import GRID_SAMPLE, grid_sample
from tcomp.ops.matmul import MATMUL

aten = torch.ops.aten
Ints = Sequence[int]


def _scaled(ctx: Context, x: Value, factor: float) -> Value:
    return x if factor == 1 else ctx.add(MUL, x, ctx.constant(factor, x.dtype))


def _add_product(ctx: Context, bias: Value, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> Value:
    return _add_scaled(ctx, bias, ctx.add(MATMUL, a, b), beta, alpha)


def _add_products(ctx: Context, bias: Value, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> Value:
    """With the sum of a batch of products."""
    total = ctx.add(reduction.REDUCE_SUM, ctx.add(MATMUL, a, b), axes=(0,), keepdims=False)
    return _add_scaled(ctx, bias, total, beta, alpha)


def _add_scaled(ctx: Context, bias: Value, product: Value, beta: float, alpha: float) -> Value:
    product = _scaled(ctx, product, alpha)
    return product if beta == 0 else ctx.add(ADD, product, _scaled(ctx, bias, beta))


def per_axis(given: Ints | int, rank: int) -> tuple[int, ...]:
    """A number for each spatial axis; one stands for all."""
    several = (given,) if isinstance(given, int) else tuple(given)
    return several * rank if len(several) == 1 else several


def padded(ctx: Context, x: Value, before: Ints, after: Ints, value: float = 0) -> Value:
    """Spatial axes with elements around."""
    if not any(before) and not any(after):
        return x
    filling = ctx.constant(value, x.dtype)
    return ctx.add(movement.PAD, x, filling, before=(0, 0, *before), after=(0, 0, *after), mode="constant")


def _convolution(
    ctx: Context, x: Value, w: Value, bias: Value | None, stride: Ints, padding: Ints, dilation: Ints, transposed: bool, extra: Ints,
    groups: int,
) -> Value:  # fmt: skip
    rank = len(w.shape) - 2
    if len(x.shape) != len(w.shape):
        raise ctx.unsupported("the input has no batch")
    strides, pads, dilations, more = (per_axis(v, rank) for v in (stride, padding, dilation, extra))
    if transposed:
        sizes = zip(x.shape[2:], w.shape[2:], strides, pads, dilations, more, strict=True)
        shape = tuple(as_dim((as_expr(n) - 1) * s - 2 * p + (as_expr(k) - 1) * d + e + 1) for n, k, s, p, d, e in sizes)
        y = ctx.add(ops.CONV_TRANSPOSE, x, w, strides=strides, dilations=dilations, group=groups, before=pads, shape=shape)
    else:
        y = ctx.add(ops.CONV, padded(ctx, x, pads, pads), w, strides=strides, dilations=dilations, group=groups)
    return y if bias is None else ctx.add(ops.ADD_CHANNELS, y, bias)


def _convolution_backward(
    ctx: Context, grad: Value, x: Value, w: Value, bias: Any, stride: Ints, padding: Ints, dilation: Ints, transposed: bool, extra: Ints,
    groups: int, wanted: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    """The adjoint of a convolution is the transposed one; that of the weights correlates the inputs with the gradients, batches summed."""
    rank = len(w.shape) - 2
    if transposed:
        raise ctx.unsupported("derivatives of transposed convolutions are not supported")
    strides, pads, dilations = (per_axis(v, rank) for v in (stride, padding, dilation))
    to_x = to_w = to_bias = None
    if wanted[0]:
        to_x = ctx.add(ops.CONV_TRANSPOSE, grad, w, strides=strides, dilations=dilations, group=groups, before=pads, shape=x.shape[2:])
    if wanted[1]:
        batch, channels = x.shape[:2]
        inside = padded(ctx, x, pads, pads)
        for axis, (n, k, s, d) in enumerate(zip(grad.shape[2:], w.shape[2:], strides, dilations, strict=True), 2):
            read = as_dim((as_expr(n) - 1) * s + (as_expr(k) - 1) * d + 1)  # by the windows; with a stride, there may be more
            inside = inside if inside.shape[axis] == read else cut(ctx, inside, axis, 0, read)
        per_group = int(channels) // groups
        split = ctx.add(movement.RESHAPE, inside, shape=(batch, groups, per_group, *inside.shape[2:]))
        turned = permute(ctx, split, (2, 1, 0, *range(3, 3 + rank)))
        turned = ctx.add(movement.RESHAPE, turned, shape=(per_group, as_dim(as_expr(batch) * groups), *inside.shape[2:]))
        factors = permute(ctx, grad, (1, 0, *range(2, 2 + rank)))
        found = ctx.add(ops.CONV, turned, factors, strides=dilations, dilations=strides, group=groups)
        to_w = permute(ctx, found, (1, 0, *range(2, 2 + rank)))
    if wanted[2]:
        to_bias = ctx.add(reduction.REDUCE_SUM, grad, axes=(0, *range(2, 2 + rank)), keepdims=False)
    return to_x, to_w, to_bias


def _windows(ctx: Context, x: Value, kernel: Ints, stride: Ints, padding: Ints | int, dilation: Ints | int) -> tuple[tuple[int, ...], ...]:
    """(kernel, strides, what is added before and after each spatial axis, dilations), so that all windows of the result lie inside."""
    rank = len(x.shape) - 2
    k, p, d = (per_axis(v, rank) for v in (kernel, padding, dilation))
    s = per_axis(stride, rank) if stride else k
    example = ctx.node.meta["val"]
    shape = (example[0] if isinstance(example, tuple | list) else example).shape[-rank:]
    after = []
    for size, count, a, b, c, e in zip(x.shape[2:], shape, k, s, p, d, strict=True):
        whole = isinstance(size, int) and isinstance(count, int)
        after.append(max(c, (int(count) - 1) * b + (a - 1) * e + 1 - int(size) - c) if whole else c)
    return k, s, p, tuple(after), d


def _max_pool(
    ctx: Context, x: Value, kernel: Ints, stride: Ints = (), padding: Ints | int = 0, dilation: Ints | int = 1, ceil_mode: bool = False
) -> tuple[Value, Value]:
    if ceil_mode and not all(isinstance(d, int) for d in x.shape[2:]):
        raise ctx.unsupported("windows that reach outside of a symbolic size")
    k, s, before, after, d = _windows(ctx, x, kernel, stride, padding, dilation)
    lowest = -np.inf if is_float(x.dtype) else integer_range(x.dtype)[0]
    inside = padded(ctx, x, before, after, lowest)
    y = ctx.add(ops.MAX_POOL, inside, kernel=k, strides=s, dilations=d)
    flat = ctx.add(
        ops.MAX_POOL_INDICES, inside, kernel=k, strides=s, dilations=d, before=before, shape=x.shape, column_major=False
    )  # into the whole tensor; PyTorch counts in each plane
    plane = movement.product(x.shape[2:])
    size = ctx.tensor(as_expr(plane) if not isinstance(plane, int) else plane, "int64")
    return y, ctx.add(MOD, flat, size)


def _planes(ctx: Context, x: Value) -> Value:
    return ctx.add(movement.RESHAPE, x, shape=(*x.shape[:2], movement.product(x.shape[2:])))


def _max_pool_backward(
    ctx: Context, grad: Value, x: Value, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool, indices: Value
) -> Value:
    zeros = ctx.add(MUL, _planes(ctx, x), ctx.constant(0, x.dtype)) if not _fixed(x.shape) else _zeros(ctx, _planes(ctx, x))
    found = ctx.add(movement.SCATTER_ELEMENTS, zeros, _planes(ctx, indices), _planes(ctx, grad), axis=2, reduction="add")
    return ctx.add(movement.RESHAPE, found, shape=x.shape)


def _fixed(shape: Sequence[Dim]) -> bool:
    return all(isinstance(d, int) for d in shape)


def _zeros(ctx: Context, like: Value) -> Value:
    from tcomp.ops.elementwise import FULL

    return ctx.add(FULL, shape=like.shape, value=0.0, dtype=like.dtype)


def _avg_pool(
    ctx: Context, x: Value, kernel: Ints, stride: Ints = (), padding: Ints | int = 0, ceil_mode: bool = False, count_pads: bool = True,
    divisor: int | None = None,
) -> Value:  # fmt: skip
    if not is_float(x.dtype) or (ceil_mode and not _fixed(x.shape[2:])):
        raise ctx.unsupported("means of integers, or windows that reach outside of a symbolic size")
    k, s, before, after, d = _windows(ctx, x, kernel, stride, padding, 1)
    inside, counted = padded(ctx, x, before, after), list[tuple[Dim, Dim] | None]()
    for b, a, n in zip(before, after, x.shape[2:], strict=True):  # windows count their elements inside, or inside and in the margins
        margin = b if count_pads else 0
        whole = divisor is not None or (a <= margin and b <= margin)
        counted.append(None if whole else (b - margin, as_dim(as_expr(n) + b + margin)))
    y = ctx.add(ops.AVERAGE_POOL, inside, kernel=k, strides=s, dilations=d, counted=tuple(counted))
    return y if divisor is None else ctx.add(DIV, ctx.add(MUL, y, ctx.constant(prod(k), y.dtype)), ctx.constant(divisor, y.dtype))


def _avg_pool_backward(
    ctx: Context, grad: Value, x: Value, kernel: Ints, stride: Ints, padding: Ints, ceil_mode: bool, count_pads: bool, divisor: int | None
) -> Value:
    rank, channels = len(x.shape) - 2, int(x.shape[1])
    if ceil_mode or (any(per_axis(padding, rank)) and not count_pads):
        raise ctx.unsupported("windows that reach outside")
    k, pads = per_axis(kernel, rank), per_axis(padding, rank)
    weights = ctx.constant(1 / (divisor or prod(k)), grad.dtype, (channels, 1, *k))
    strides = per_axis(stride, rank) if stride else k
    return ctx.add(
        ops.CONV_TRANSPOSE, grad, weights, strides=strides, dilations=(1,) * rank, group=channels, before=pads, shape=x.shape[2:]
    )


def _adaptive_avg_pool(ctx: Context, x: Value, size: Sequence[int]) -> Value:
    spatial = x.shape[2:]
    if not _fixed(spatial):
        raise ctx.unsupported("windows of a symbolic size")
    if any(int(n) % int(k) for n, k in zip(spatial, size, strict=True)):  # of different sizes: sums along one axis after the other
        for axis, (n, count) in enumerate(zip(spatial, size, strict=True)):
            last = ctx.axis(x, axis - len(spatial))
            order = [*(a for a in range(len(x.shape)) if a != last), last]
            y = ctx.add(MATMUL, permute(ctx, x, order), ctx.constant(_window_means(int(n), int(count)), x.dtype))
            x = permute(ctx, y, [order.index(a) for a in range(len(order))])
        return x
    k = tuple(int(n) // int(m) for n, m in zip(spatial, size, strict=True))
    return ctx.add(ops.AVERAGE_POOL, x, kernel=k, strides=k, dilations=(1,) * len(k), counted=(None,) * len(k))


def _window_means(size: int, count: int) -> np.ndarray:
    """A matrix [size, count] whose product with a row is the means of `count` windows that cover it, as adaptive pooling has them."""
    places, windows = np.arange(size)[:, None], np.arange(count)
    first, end = windows * size // count, -(-(windows + 1) * size // count)
    return ((places >= first) & (places < end)) / (end - first)


def _sampling(mode: int, padding: int, align_corners: bool) -> dict[str, Any]:
    """The attributes of `GRID_SAMPLE`."""
    modes, paddings = ("linear", "nearest", "cubic"), ("zeros", "edge" if mode == 2 else "border", "reflection")
    return {"mode": modes[mode], "padding": paddings[padding], "align_corners": align_corners}


def _grid_sample(ctx: Context, x: Value, grid: Value, *settings: Any) -> Value:
    return ctx.add(GRID_SAMPLE, x, grid, **_sampling(*settings))


def _grid_sample_backward(ctx: Context, grad: Value, x: Value, grid: Value, *settings: Any) -> tuple[Value | None, ...]:
    *sampling, mask = settings
    sample = TensorFunction("grid_sample", partial(grid_sample, **_sampling(*sampling)))
    wanted = tuple(n for n, asked in enumerate(mask) if asked)
    found = iter(ctx.own(sample.derivative(2, wanted), x, grid, grad))
    return tuple(next(found) if asked else None for asked in mask)


def _batched(handler: Handler, rank: int) -> Handler:
    """A handler for inputs of `rank` axes, applied to one without a batch as well."""

    def handle(ctx: Context, x: Value, *rest: Any, **others: Any) -> Any:
        if len(x.shape) == rank:
            return handler(ctx, x, *rest, **others)
        found = handler(ctx, ctx.add(movement.RESHAPE, x, shape=(1, *x.shape)), *rest, **others)
        return tuple(map(partial(_unbatched, ctx), found)) if isinstance(found, tuple) else _unbatched(ctx, found)

    return handle


def _unbatched(ctx: Context, x: Value) -> Value:
    return ctx.add(movement.RESHAPE, x, shape=x.shape[1:])


TABLE: Table = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), lambda ctx, a, b: ctx.add(MATMUL, a, b)),
    **dict.fromkeys((aten.addmm, aten.addmv, aten.baddbmm), widened(_add_product)),
    aten.convolution: widened(_convolution), aten.convolution_backward: _convolution_backward,
    aten.max_pool2d_with_indices: _batched(_max_pool, 4), aten.max_pool3d_with_indices: _batched(_max_pool, 5),
    aten.avg_pool2d: _batched(_avg_pool, 4), aten.avg_pool3d: _batched(_avg_pool, 5), aten.grid_sampler_2d: _grid_sample,
    aten.grid_sampler_2d_backward: _grid_sample_backward, aten.grid_sampler_3d_backward: _grid_sample_backward,
    aten.grid_sampler_3d: _grid_sample, aten._adaptive_avg_pool3d: _batched(widened(_adaptive_avg_pool), 5),
    aten.addbmm: widened(_add_products),
    aten.max_pool2d_with_indices_backward: _max_pool_backward, aten.avg_pool2d_backward: _avg_pool_backward,
    aten._adaptive_avg_pool2d: _batched(widened(_adaptive_avg_pool), 4),
}  # fmt: skip
