"""Normalisation: by stored statistics, or by mean and variance computed over some axes (in two stages, mean first).

Statistics are computed in at least float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, cast, const, select
from tcomp.ir.graph import Operator
from tcomp.ops.broadcast import read as broadcast_read
from tcomp.ops.broadcast import require_same, widened
from tcomp.ops.reduction import at_kept, fold


def _count(shape: Sequence[Dim], axes: Sequence[int], dtype: str) -> Expr:
    extents = [shape[a] for a in axes]
    if all(isinstance(d, int) for d in extents):
        return as_expr(float(prod(int(d) for d in extents)), dtype)
    return cast(as_expr(as_dim(prod(map(as_expr, extents), start=as_expr(1)))), dtype)


def moments(x: te.Tensor, axes: Sequence[int]) -> tuple[te.Tensor, te.Tensor]:
    """(mean, variance) over `axes`, which are kept with extent 1; variance is that of the population."""
    count = _count(x.shape, axes, widened(x[tuple(0 for _ in x.shape)]).dtype)
    mean = fold(x, axes, True, te.sum, "mean", finish=lambda v: v / count)
    deviation = te.compute(x.shape, lambda *i: widened(x[i]) - at_kept(mean, i), "deviation")
    variance = fold(deviation, axes, True, te.sum, "variance", lambda v: v * v, lambda v: v / count)
    return mean, variance


def batch_scale(scale: te.Tensor, variance: te.Tensor, epsilon: float) -> te.Tensor:
    """scale / sqrt(variance + epsilon): what batch normalisation multiplies each channel with."""
    require_same(scale.shape[0], variance.shape[0], "channels of batch normalisation")
    return te.compute(
        scale.shape, lambda c: widened(scale[c]) / te.sqrt(cast(variance[c], widened(scale[c]).dtype) + epsilon), "batch_scale"
    )


def batch_shift(bias: te.Tensor, mean: te.Tensor, scale: te.Tensor) -> te.Tensor:
    """bias - mean * scale: what batch normalisation adds to each channel, `scale` coming from `batch_scale`."""
    require_same(bias.shape[0], mean.shape[0], "channels of batch normalisation")
    return te.compute(bias.shape, lambda c: cast(bias[c], scale.dtype) - cast(mean[c], scale.dtype) * scale[c], "batch_shift")


def scale_shift(x: te.Tensor, scale: te.Tensor, shift: te.Tensor) -> te.Tensor:
    """x * scale[channel] + shift[channel], the channel being axis 1 (the only axis of a vector)."""
    axis = min(1, x.ndim - 1)
    require_same(x.shape[axis], scale.shape[0], "a scale for each channel")

    def element(*i: Expr) -> Expr:
        return cast(cast(x[i], scale.dtype) * scale[i[axis]] + shift[i[axis]], x.dtype)

    return te.compute(x.shape, element, "scale_shift")


def batch_moments(x: te.Tensor) -> tuple[te.Tensor, te.Tensor]:
    """(mean, population variance) of each channel over the batch and the spatial axes, 1-D."""
    axes = [a for a in range(x.ndim) if a != 1]
    mean, variance = moments(x, axes)

    def flat(t: te.Tensor, name: str) -> te.Tensor:
        def element(c: Expr) -> Expr:
            return cast(t[tuple(c if a == 1 else 0 for a in range(x.ndim))], x.dtype)

        return te.compute((x.shape[1],), element, name)

    return flat(mean, "batch_mean"), flat(variance, "batch_variance")


def running(old: te.Tensor, new: te.Tensor, momentum: float) -> te.Tensor:
    """old * momentum + new * (1 - momentum)."""

    def element(*i: Expr) -> Expr:
        before = widened(old[i])
        return cast(before * momentum + cast(new[i], before.dtype) * (1.0 - momentum), old.dtype)

    return te.compute(old.shape, element, "running")


def instance_norm(x: te.Tensor, scale: te.Tensor, bias: te.Tensor, epsilon: float) -> te.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the spatial axes of each instance and channel."""
    require_same(x.shape[1], scale.shape[0], "a scale for each channel")
    mean, variance = moments(x, range(2, x.ndim))

    def element(*i: Expr) -> Expr:
        normal = (widened(x[i]) - at_kept(mean, i)) / te.sqrt(at_kept(variance, i) + epsilon)
        return cast(normal * widened(scale[i[1]]) + widened(bias[i[1]]), x.dtype)

    return te.compute(x.shape, element, "instance_norm")


def group_norm(x: te.Tensor, scale: te.Tensor, bias: te.Tensor, groups: int, epsilon: float) -> te.Tensor:
    """Normalises each of `groups` blocks of channels over channels and spatial axes; scale and bias per channel, or per group."""
    channels = x.shape[1]
    if not isinstance(channels, int) or groups < 1 or channels % groups:
        raise IRError(f"{channels} channels do not divide into {groups} groups")
    size = channels // groups
    split = _grouped(x, groups, size)
    mean, variance = moments(split, range(2, split.ndim))
    per_group = scale.shape[0] == groups and groups != channels

    def element(n: Expr, c: Expr, *p: Expr) -> Expr:
        at = (n, c // size, *[const(0)] * (split.ndim - 2))
        normal = (widened(x[(n, c, *p)]) - mean[at]) / te.sqrt(variance[at] + epsilon)
        own = c // size if per_group else c
        return cast(normal * widened(scale[own]) + widened(bias[own]), x.dtype)

    return te.compute(x.shape, element, "group_norm")


def _grouped(x: te.Tensor, groups: int, size: int) -> te.Tensor:
    def element(*i: Expr) -> Expr:
        return widened(x[(i[0], i[1] * size + i[2], *i[3:])])

    return te.compute((x.shape[0], groups, size, *x.shape[2:]), element, "grouped")


def layer_norm(
    x: te.Tensor, scale: te.Tensor | None, bias: te.Tensor | None, axis: int, epsilon: float
) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """(y, mean, 1 / standard deviation) normalised over the axes from `axis` on; `scale` and `bias` broadcast to x."""
    mean, variance = moments(x, range(axis, x.ndim))
    inverse = te.compute(variance.shape, lambda *i: 1.0 / te.sqrt(variance[i] + epsilon), "inverse_deviation")

    def element(*i: Expr) -> Expr:
        value = (widened(x[i]) - at_kept(mean, i)) * at_kept(inverse, i)
        value = value if scale is None else value * widened(broadcast_read(scale, i))
        return cast(value if bias is None else value + widened(broadcast_read(bias, i)), x.dtype)

    return te.compute(x.shape, element, "layer_norm"), mean, inverse


def rms_norm(x: te.Tensor, scale: te.Tensor, axis: int, epsilon: float) -> te.Tensor:
    """x / sqrt(mean of squares + epsilon) * scale over the axes from `axis` on (Zhang & Sennrich 2019)."""
    axes = range(axis, x.ndim)
    count = _count(x.shape, axes, widened(x[tuple(0 for _ in x.shape)]).dtype)
    square = fold(x, axes, True, te.sum, "mean_square", lambda v: v * v, lambda v: v / count)

    def element(*i: Expr) -> Expr:
        normal = widened(x[i]) / te.sqrt(at_kept(square, i) + epsilon)
        factor = broadcast_read(scale, i)
        return cast(cast(normal, x.dtype), factor.dtype) * factor

    return te.compute(x.shape, element, "rms_norm")


def local_response_norm(x: te.Tensor, size: int, alpha: float, beta: float, bias: float) -> te.Tensor:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta (Krizhevsky et al. 2012)."""
    lead = (size - 1) // 2
    r = te.reduce_axis(size, "rc")

    def square(*i: Expr) -> Expr:
        c = i[1] + r - lead
        value = widened(x[(i[0], c, *i[2:])])
        return te.sum(select((c >= 0) & (c < x.shape[1]), value * value, 0), r)

    squares = te.compute(x.shape, square, "square_sum")

    def element(*i: Expr) -> Expr:
        return cast(widened(x[i]) / te.power(squares[i] * (alpha / size) + bias, beta), x.dtype)

    return te.compute(x.shape, element, "lrn")


def lp_normalize(x: te.Tensor, axis: int, p: int) -> te.Tensor:
    """x / its p-norm along `axis` (p 1 or 2); 0 where the norm is 0."""
    if p == 1:
        norm = fold(x, [axis], True, te.sum, "norm", te.abs)
    else:
        norm = fold(x, [axis], True, te.sum, "norm", lambda v: v * v, te.sqrt)

    def element(*i: Expr) -> Expr:
        length = at_kept(norm, i)
        return cast(select(te.equal(length, 0.0), 0.0, widened(x[i]) / length), x.dtype)

    return te.compute(x.shape, element, "lp_normalize")


BATCH_SCALE, BATCH_SHIFT = Operator("batch_scale", batch_scale), Operator("batch_shift", batch_shift)
SCALE_SHIFT, BATCH_MOMENTS = Operator("scale_shift", scale_shift), Operator("batch_moments", batch_moments)
RUNNING = Operator("running", running)
INSTANCE_NORM, GROUP_NORM = Operator("instance_norm", instance_norm), Operator("group_norm", group_norm)
LAYER_NORM, RMS_NORM = Operator("layer_norm", layer_norm), Operator("rms_norm", rms_norm)
LRN, LP_NORMALIZE = Operator("lrn", local_response_norm), Operator("lp_normalize", lp_normalize)
