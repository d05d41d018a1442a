"""Convolution, its transpose, and dense layers.

Activations are (batch, channels, spatial...), weights (out channels, in channels / groups, kernel...). Padding is an operator of
its own, so that every read here is in range. 16-bit floats are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ops.broadcast import factor, product_dtype, require_same, widened


def window_count(extent: Dim, kernel: int, stride: int, dilation: int) -> Dim:
    """How many windows of `kernel` elements, `dilation` apart, fit into `extent` at steps of `stride`."""
    return as_dim((as_expr(extent) - (dilation * (kernel - 1) + 1)) // stride + 1)


def sizes(shape: Sequence[Dim], what: str) -> tuple[int, ...]:
    """Extents that must be known at compile time. Raises `IRError`."""
    known = tuple(d for d in shape if isinstance(d, int))
    if len(known) != len(shape):
        raise IRError(f"{what} must have constant sizes", where=f"[{', '.join(map(str, shape))}]")
    return known


def _check(x: te.Tensor, w: te.Tensor, group: int, *per_axis: Sequence[int]) -> None:
    if x.ndim < 3 or w.ndim != x.ndim:
        raise IRError(f"convolution of a {x.ndim}-dimensional input with {w.ndim}-dimensional weights", hint="both have at least 3")
    if any(len(values) != x.ndim - 2 or any(v < 1 for v in values) for values in per_axis) or group < 1:
        raise IRError(f"strides, dilations {per_axis} and group {group} must be positive, one for each spatial axis")


def conv(x: te.Tensor, w: te.Tensor, strides: Sequence[int], dilations: Sequence[int], group: int) -> te.Tensor:
    """Cross-correlation: y[n, o, p...] = sum over c, k of x[n, g*C/G + c, p*stride + k*dilation] * w[o, c, k...].

    Any number of spatial axes; `group` divides channels in `group` independent convolutions (depthwise where it equals them).
    Integers wrap around in their own type, except that 8-bit ones, which may differ in sign, give int32.
    """
    _check(x, w, group, strides, dilations)
    out_channels, in_channels, *kernel = sizes(w.shape, "weights of a convolution")
    require_same(x.shape[1], in_channels * group, f"channels of a convolution with weights {list(w.shape)} in {group} groups")
    if out_channels % group:
        raise IRError(f"{out_channels} output channels do not divide into {group} groups")
    spatial = [window_count(d, k, s, r) for d, k, s, r in zip(x.shape[2:], kernel, strides, dilations, strict=True)]
    channel = te.reduce_axis(in_channels, "rc")
    offsets = [te.reduce_axis(k, f"rk{n}") for n, k in enumerate(kernel)]
    folded = [axis for axis, extent in zip([channel, *offsets], [in_channels, *kernel], strict=True) if extent != 1]

    def element(n: Expr, o: Expr, *p: Expr) -> Expr:
        inner: Expr = channel if in_channels != 1 else const(0)
        source = inner if group == 1 else o // (out_channels // group) * in_channels + inner
        taps = [k if extent != 1 else const(0) for k, extent in zip(offsets, kernel, strict=True)]
        at = [i * s + k * r for i, s, k, r in zip(p, strides, taps, dilations, strict=True)]
        product = factor(x[(n, source, *at)]) * factor(w[(o, inner, *taps)])
        return cast(te.sum(product, folded), product_dtype(x.dtype))

    return te.compute((x.shape[0], out_channels, *spatial), element, "conv")


def conv_transpose(
    x: te.Tensor, w: te.Tensor, strides: Sequence[int], dilations: Sequence[int], group: int, before: Sequence[Dim], shape: Sequence[Dim]
) -> te.Tensor:
    """The adjoint of `conv` with weights (in channels, out channels / groups, kernel...), as a gather.

    y[n, o, q] = sum over c, k with (q + before - k*dilation) divisible by the stride of x[n, c, that / stride] * w[c, o, k].
    `shape` is the spatial output shape; `before` is cut off in front of it. Where the kernel equals the stride (and nothing
    is cut off), each output has exactly one tap and the sum over the kernel vanishes.
    """
    _check(x, w, group, strides, dilations)
    in_channels, out_channels, *kernel = sizes(w.shape, "weights of a transposed convolution")
    require_same(x.shape[1], in_channels, f"channels of a transposed convolution with weights {list(w.shape)}")
    if in_channels % group:
        raise IRError(f"{in_channels} input channels do not divide into {group} groups")
    depth = in_channels // group
    channel = te.reduce_axis(depth, "rc")
    single = [k == s and r == 1 for k, s, r in zip(kernel, strides, dilations, strict=True)]
    taps = [te.reduce_axis(1 if one else k, f"rk{n}") for n, (k, one) in enumerate(zip(kernel, single, strict=True))]

    def element(n: Expr, o: Expr, *q: Expr) -> Expr:
        source = channel if group == 1 else o // out_channels * depth + channel
        valid, at, weights = const(True, "bool"), [], []
        for axis, index in enumerate(q):
            full, stride, extent = index + before[axis], strides[axis], x.shape[axis + 2]
            if single[axis]:
                reach, tap = full, full % stride
            else:
                tap = taps[axis]
                reach = full - tap * dilations[axis]
                valid = valid & te.equal(reach % stride, 0) if stride != 1 else valid
            position = reach // stride
            valid = valid & (position >= 0) & (position < extent)
            at.append(position)
            weights.append(tap)
        product = widened(x[(n, source, *at)]) * widened(w[(source, o if group == 1 else o % out_channels, *weights)])
        folded = [channel, *(t for t, one in zip(taps, single, strict=True) if not one)]
        return cast(te.sum(select(valid, product, 0), folded), x.dtype)

    result = (x.shape[0], out_channels * group, *shape)
    return te.compute(result, element, "conv_transpose")


def deform_conv(
    x: te.Tensor,
    w: te.Tensor,
    offset: te.Tensor,
    mask: te.Tensor | None,
    strides: Sequence[int],
    dilations: Sequence[int],
    before: Sequence[int],
    group: int,
    offset_group: int,
) -> te.Tensor:
    """Deformable convolution (Dai et al. 2017; with `mask`, Zhu et al. 2019) over two spatial axes.

    Tap k of output p reads x at p*stride - before + k*dilation + offset, bilinearly, zero outside. `offset` is
    (batch, offset groups * kernel size * 2, out...), `mask` (batch, offset groups * kernel size, out...).
    """
    _check(x, w, group, strides, dilations)
    if x.ndim != 4:
        raise IRError(f"deformable convolution of a {x.ndim}-dimensional input", why="two spatial axes are supported")
    out_channels, in_channels, *kernel = sizes(w.shape, "weights of a convolution")
    height, width = x.shape[2:]
    channels = in_channels * group
    require_same(x.shape[1], channels, "channels of a deformable convolution")
    channel = te.reduce_axis(in_channels, "rc")
    taps = [te.reduce_axis(k, f"rk{n}") for n, k in enumerate(kernel)]

    def pixel(n: Expr, c: Expr, row: Expr, column: Expr) -> Expr:
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        safe = [minimum(maximum(i, 0), as_expr(d) - 1) for i, d in ((row, height), (column, width))]
        return select(inside, x[(n, c, *safe)], 0)

    def element(n: Expr, o: Expr, p: Expr, q: Expr) -> Expr:
        source = o // (out_channels // group) * in_channels + channel
        tap = (source // (channels // offset_group) * kernel[0] + taps[0]) * kernel[1] + taps[1]
        at = [
            cast(i * s + k * r - b, x.dtype) + offset[(n, tap * 2 + axis, p, q)]
            for axis, (i, s, k, r, b) in enumerate(zip((p, q), strides, taps, dilations, before, strict=True))
        ]
        row, column = (cast(te.floor(v), "int64") for v in at)
        down, right = (v - te.floor(v) for v in at)
        value = (
            pixel(n, source, row, column) * (1.0 - down) * (1.0 - right)
            + pixel(n, source, row, column + 1) * (1.0 - down) * right
            + pixel(n, source, row + 1, column) * down * (1.0 - right)
            + pixel(n, source, row + 1, column + 1) * down * right
        )
        value = value if mask is None else value * mask[(n, tap, p, q)]
        return te.sum(value * w[(o, channel, *taps)], [channel, *taps])

    return te.compute((x.shape[0], out_channels, *offset.shape[2:]), element, "deform_conv")


def add_channels(x: te.Tensor, bias: te.Tensor) -> te.Tensor:
    """x + bias[channel], the channel being axis 1."""
    require_same(x.shape[1], bias.shape[0], "a bias for each channel")
    return te.compute(x.shape, lambda *i: x[i] + bias[i[1]], "bias")


def dense(x: te.Tensor, w: te.Tensor) -> te.Tensor:
    """y[..., o] = sum over k of x[..., k] * w[o, k]."""
    require_same(x.shape[-1], w.shape[1], "features of a dense layer")
    k = te.reduce_axis(w.shape[1], "rk")

    def element(*i: Expr) -> Expr:
        return cast(te.sum(widened(x[(*i[:-1], k)]) * widened(w[i[-1], k]), k), x.dtype)

    return te.compute((*x.shape[:-1], w.shape[0]), element, "dense")


CONV, CONV_TRANSPOSE = Operator("conv", conv), Operator("conv_transpose", conv_transpose)
DEFORM_CONV = Operator("deform_conv", deform_conv)
ADD_CHANNELS, DENSE = Operator("add_channels", add_channels), Operator("dense", dense)
