"""Normalisation: by stored statistics, or by mean and variance computed over some axes (in two stages, mean first).

Statistics are computed in at least float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Expr, cast, const, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.broadcast import broadcast_read, require_same, widened
from tcomp.ops.reduction import Scalar, element_count, reduce, same


def _mean_over(x: Tensor, axes: Sequence[int], name: str, element: Scalar = same) -> Tensor:
    """The mean of element(x) over `axes` with keepdims."""
    return reduce(x, axes, True, te.sum, name, element, lambda v: v / element_count(x.shape, axes, v.dtype))


def moments(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(mean, variance) over `axes`, which are kept with extent 1; variance is that of the population."""
    mean = _mean_over(x, axes, "mean")
    deviation = te.compute(x.shape, lambda *i: widened(x[i]) - broadcast_read(mean, i), "deviation")
    return mean, _mean_over(deviation, axes, "variance", lambda v: v * v)


def batch_scale(scale: Tensor, variance: Tensor, epsilon: float) -> Tensor:
    """scale / sqrt(variance + epsilon): what batch normalisation multiplies each channel with."""
    require_same(scale.shape[0], variance.shape[0], "channels of batch normalisation")

    def element(c: Expr) -> Expr:
        own = widened(scale[c])
        return own / te.sqrt(cast(variance[c], own.dtype) + epsilon)

    return te.compute(scale.shape, element, "batch_scale")


def batch_shift(bias: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """bias - mean * scale: what batch normalisation adds to each channel, `scale` coming from `batch_scale`."""
    require_same(bias.shape[0], mean.shape[0], "channels of batch normalisation")
    return te.compute(bias.shape, lambda c: cast(bias[c], scale.dtype) - cast(mean[c], scale.dtype) * scale[c], "batch_shift")


def scale_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale[channel] + shift[channel], the channel being axis 1 (the only axis of a vector)."""
    axis = min(1, x.ndim - 1)
    require_same(x.shape[axis], scale.shape[0], "a scale for each channel")
    return te.compute(x.shape, lambda *i: cast(cast(x[i], scale.dtype) * scale[i[axis]] + shift[i[axis]], x.dtype), "scale_shift")


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, population variance) of each channel over the batch and the spatial axes, 1-D."""

    def by_channel(t: Tensor, name: str) -> Tensor:
        return te.compute((x.shape[1],), lambda c: cast(t[tuple(c if a == 1 else 0 for a in range(x.ndim))], x.dtype), name)

    mean, variance = moments(x, [a for a in range(x.ndim) if a != 1])
    return by_channel(mean, "batch_mean"), by_channel(variance, "batch_variance")


def running(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """old * momentum + new * (1 - momentum)."""

    def element(*i: Expr) -> Expr:
        before = widened(old[i])
        return cast(before * momentum + cast(new[i], before.dtype) * (1.0 - momentum), old.dtype)

    return te.compute(old.shape, element, "running")


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the spatial axes of each instance and channel."""
    require_same(x.shape[1], scale.shape[0], "a scale for each channel")
    mean, variance = moments(x, range(2, x.ndim))

    def element(*i: Expr) -> Expr:
        normal = (widened(x[i]) - broadcast_read(mean, i)) / te.sqrt(broadcast_read(variance, i) + epsilon)
        return cast(normal * widened(scale[i[1]]) + widened(bias[i[1]]), x.dtype)

    return te.compute(x.shape, element, "instance_norm")


def group_norm(x: Tensor, scale: Tensor, bias: Tensor, groups: int, epsilon: float) -> Tensor:
    """Normalises each of `groups` blocks of channels over channels and spatial axes; scale and bias per channel, or per group."""
    channels = x.shape[1]
    if not isinstance(channels, int) or groups < 1 or channels % groups:
        raise IRError(f"{channels} channels do not divide into {groups} groups")
    size = channels // groups
    shape = (x.shape[0], groups, size, *x.shape[2:])
    grouped = te.compute(shape, lambda *i: widened(x[(i[0], i[1] * size + i[2], *i[3:])]), "grouped")
    mean, variance = moments(grouped, range(2, grouped.ndim))
    per_group = scale.shape[0] == groups and groups != channels

    def element(n: Expr, c: Expr, *p: Expr) -> Expr:
        at = (n, c // size, *[const(0)] * (grouped.ndim - 2))
        normal = (widened(x[(n, c, *p)]) - mean[at]) / te.sqrt(variance[at] + epsilon)
        own = c // size if per_group else c
        return cast(normal * widened(scale[own]) + widened(bias[own]), x.dtype)

    return te.compute(x.shape, element, "group_norm")


def layer_norm(x: Tensor, scale: Tensor | None, bias: Tensor | None, axis: int, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1 / standard deviation) normalised over the axes from `axis` on; `scale` and `bias` broadcast to x."""
    mean, variance = moments(x, range(axis, x.ndim))
    inverse = te.compute(variance.shape, lambda *i: 1.0 / te.sqrt(variance[i] + epsilon), "inverse_deviation")

    def element(*i: Expr) -> Expr:
        value = (widened(x[i]) - broadcast_read(mean, i)) * broadcast_read(inverse, i)
        value = value if scale is None else value * widened(broadcast_read(scale, i))
        return cast(value if bias is None else value + widened(broadcast_read(bias, i)), x.dtype)

    return te.compute(x.shape, element, "layer_norm"), mean, inverse


def rms_norm(x: Tensor, scale: Tensor, axis: int, epsilon: float) -> Tensor:
    """x / sqrt(mean of squares + epsilon) * scale over the axes from `axis` on (Zhang & Sennrich 2019)."""
    square = _mean_over(x, range(axis, x.ndim), "mean_square", lambda v: v * v)

    def element(*i: Expr) -> Expr:
        normal = widened(x[i]) / te.sqrt(broadcast_read(square, i) + epsilon)
        factor = broadcast_read(scale, i)
        return cast(cast(normal, x.dtype), factor.dtype) * factor

    return te.compute(x.shape, element, "rms_norm")


def local_response_norm(x: Tensor, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta (Krizhevsky et al. 2012)."""
    r = te.reduce_axis(size, "rc")

    def square(*i: Expr) -> Expr:
        c = i[1] + r - (size - 1) // 2
        value = widened(x[(i[0], c, *i[2:])])
        return te.sum(select((c >= 0) & (c < x.shape[1]), value * value, 0), r)

    squares = te.compute(x.shape, square, "square_sum")
    return te.compute(x.shape, lambda *i: cast(widened(x[i]) / te.power(squares[i] * (alpha / size) + bias, beta), x.dtype), "lrn")


def lp_normalize(x: Tensor, axis: int, p: int) -> Tensor:
    """x / its p-norm along `axis` (p 1 or 2); 0 where the norm is 0."""
    element, finish = (te.abs, same) if p == 1 else (lambda v: v * v, te.sqrt)
    norm = reduce(x, [axis], True, te.sum, "norm", element, finish)

    def quotient(*i: Expr) -> Expr:
        length = broadcast_read(norm, i)
        return cast(select(te.equal(length, 0.0), 0.0, widened(x[i]) / length), x.dtype)

    return te.compute(x.shape, quotient, "lp_normalize")


BATCH_SCALE, BATCH_SHIFT = Operator("batch_scale", batch_scale), Operator("batch_shift", batch_shift)
SCALE_SHIFT, BATCH_MOMENTS = Operator("scale_shift", scale_shift), Operator("batch_moments", batch_moments)
RUNNING = Operator("running", running)
INSTANCE_NORM, GROUP_NORM = Operator("instance_norm", instance_norm), Operator("group_norm", group_norm)
LAYER_NORM, RMS_NORM = Operator("layer_norm", layer_norm), Operator("rms_norm", rms_norm)
LRN, LP_NORMALIZE = Operator("lrn", local_response_norm), Operator("lp_normalize", lp_normalize)
