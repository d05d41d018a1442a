"""ATen operators of neural networks: convolutions, pooling, images at positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from tcomp.frontends.torch.context import Context, Table, widened
from tcomp.frontends.torch.definitions.windows import per_axis
from tcomp.ir.dtypes import integer_range, is_float
from tcomp.ir.expr import Dim, as_expr
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import movement, nn as ops
from tcomp.ops.elementwise import MOD, SCALE
from tcomp.ops.expression import TensorFunction
from tcomp.ops.image import GRID_SAMPLE, grid_sample

aten = torch.ops.aten
Ints = Sequence[int]


def _padded(ctx: Context, x: Value, before: Ints, after: Ints, value: float = 0) -> Value:
    """Spatial axes with elements around."""
    if not any(before) and not any(after):
        return x
    filling = ctx.number(value, x.dtype)
    return ctx.add(movement.PAD, x, filling, before=(0, 0, *before), after=(0, 0, *after), mode="constant")


def _convolution(
    ctx: Context, x: Value, w: Value, bias: Value | None, stride: Ints, padding: Ints, dilation: Ints, transposed: bool, extra: Ints,
    groups: int,
) -> Value:  # fmt: skip
    rank = len(w.shape) - 2
    if len(x.shape) != len(w.shape):
        raise ctx.unsupported("the input has no batch")
    strides, pads, dilations = (tuple(per_axis(v, rank)) for v in (stride, padding, dilation))
    settings = {"strides": strides, "dilations": dilations, "group": groups}
    if transposed:
        y = ctx.add(ops.CONV_TRANSPOSE, x, w, **settings, before=pads, shape=ctx.shape[2:])
    else:
        y = ctx.add(ops.CONV, _padded(ctx, x, pads, pads), w, **settings)
    return y if bias is None else ctx.add(ops.ADD_CHANNELS, y, bias)


def _windows(
    ctx: Context, x: Value, kernel: Ints, stride: Ints, padding: Ints | int, dilation: Ints | int, ceil_mode: bool
) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, tuple[int, ...]]]:
    """(what is added before and after each spatial axis, attributes of windows), so that all windows of the result lie inside."""
    rank = len(x.shape) - 2
    if ceil_mode and not all(isinstance(d, int) for d in x.shape[2:]):
        raise ctx.unsupported("windows that reach outside of a symbolic size")
    k, before, d = (tuple(per_axis(v, rank)) for v in (kernel, padding, dilation))
    s = tuple(per_axis(stride, rank)) if stride else k
    after = []
    for size, count, a, b, c, e in zip(x.shape[2:], ctx.shape[-rank:], k, s, before, d, strict=True):
        whole = isinstance(size, int) and isinstance(count, int)
        after.append(max(c, (int(count) - 1) * b + (a - 1) * e + 1 - int(size) - c) if whole else c)
    return before, tuple(after), {"kernel": k, "strides": s, "dilations": d}


def _max_pool(
    ctx: Context, x: Value, kernel: Ints, stride: Ints = (), padding: Ints | int = 0, dilation: Ints | int = 1, ceil_mode: bool = False
) -> tuple[Value, Value]:
    """(y, places in each plane, of which the operator knows those in the whole tensor)"""
    before, after, windows = _windows(ctx, x, kernel, stride, padding, dilation, ceil_mode)
    inside = _padded(ctx, x, before, after, -np.inf if is_float(x.dtype) else integer_range(x.dtype)[0])
    flat = ctx.add(ops.MAX_POOL_INDICES, inside, **windows, before=before, shape=x.shape, column_major=False)
    plane = movement.product(x.shape[2:])
    return ctx.add(ops.MAX_POOL, inside, **windows), ctx.add(MOD, flat, ctx.tensor(plane, "int64"))


def _avg_pool(
    ctx: Context, x: Value, kernel: Ints, stride: Ints = (), padding: Ints | int = 0, ceil_mode: bool = False, count_pads: bool = True,
    divisor: int | None = None,
) -> Value:  # fmt: skip
    if not is_float(x.dtype):
        raise ctx.unsupported("means of integers")
    before, after, windows = _windows(ctx, x, kernel, stride, padding, 1, ceil_mode)
    counted = list[tuple[Dim, Dim] | None]()
    for b, a, n in zip(before, after, x.shape[2:], strict=True):  # windows count their elements inside, or inside and in the margins
        margin = b if count_pads else 0
        whole = divisor is not None or (a <= margin and b <= margin)
        counted.append(None if whole else (b - margin, as_dim(as_expr(n) + b + margin)))
    y = ctx.add(ops.AVERAGE_POOL, _padded(ctx, x, before, after), **windows, counted=tuple(counted))
    return y if divisor is None else ctx.add(SCALE, y, factor=prod(windows["kernel"]) / divisor)


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


TABLE: Table = {
    aten.convolution: widened(_convolution),
    **dict.fromkeys((aten.max_pool2d_with_indices, aten.max_pool3d_with_indices), _max_pool),
    **dict.fromkeys((aten.avg_pool2d, aten.avg_pool3d), _avg_pool),
    **dict.fromkeys((aten.grid_sampler_2d, aten.grid_sampler_3d), _grid_sample),
    **dict.fromkeys((aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward), _grid_sample_backward),
}  # fmt: skip
