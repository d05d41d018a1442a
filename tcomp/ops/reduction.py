"""Operators that reduce axes: sums and the like, arg-max, softmax, prefix sums, losses, normalisation (by mean and variance, mean first).

`axes` are non-negative, increasing and distinct. 16-bit floats are accumulated in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import add, mul

from tcomp.errors import IRError
from tcomp.ir import loops as L, te
from tcomp.ir.broadcasting import require_broadcast, require_same, require_same_shape, widened
from tcomp.ir.dtypes import highest, is_float, lowest
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast, const, maximum, minimum, row_major, select
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import as_dim, simplify
from tcomp.ir.te import Tensor, broadcast_read, rounded
from tcomp.ops.elementwise import divide, log_add_exp
from tcomp.ops.movement import product, valid_index

Axes = Sequence[int]
Index = tuple[Expr, ...]
Reducer = Callable[[Expr, Sequence[Expr]], Expr]
Scalar = Callable[[Expr], Expr]


def same(value: Expr) -> Expr:
    """The value itself."""
    return value


def square(value: Expr) -> Expr:
    """The value times itself."""
    return value * value


def p_norm(p: float) -> tuple[Scalar, Scalar]:
    """(function of the elements, function of their sum) that together compute the p-norm, (sum of |x|^p)^(1/p)."""
    if p in (1, 2):
        return (te.abs, same) if p == 1 else (square, te.sqrt)
    return lambda v: te.power(te.abs(v), p), lambda v: te.power(v, 1.0 / p)


def reduced_shape(shape: Sequence[Dim], axes: Axes, keepdims: bool) -> tuple[Dim, ...]:
    """The shape that is left when `axes` are reduced."""
    return tuple(1 if n in axes else d for n, d in enumerate(shape) if keepdims or n not in axes)


def reduce(x: Tensor, axes: Axes, keepdims: bool, reducer: Reducer, name: str, element: Scalar = same, finish: Scalar = same) -> Tensor:
    """finish(reducer(element(x[...])) over `axes`), one tensor; everything in at least float32."""
    return reduce_at(x.shape, axes, keepdims, reducer, name, lambda at: element(widened(x[at])), finish)


def reduce_at(
    shape: Sequence[Dim], axes: Axes, keepdims: bool, reducer: Reducer, name: str, element: Callable[[Index], Expr], finish: Scalar = same
) -> Tensor:
    """finish(reducer(element(index)) over `axes`) of the indices of `shape`."""
    reduced, rank = {n: te.reduce_axis(shape[n], f"r{n}") for n in axes}, len(shape)
    own, over = reduced_shape(shape, axes, keepdims), tuple(reduced.values())
    return te.compute(own, lambda *i: finish(reducer(element(_whole_index(i, rank, reduced, keepdims)), over)), name)


def _whole_index(i: Index, rank: int, reduced: Mapping[int, Expr], keepdims: bool) -> Index:
    """Index `i` of the result of a reduction as one of what is reduced, with the given expressions along the reduced axes."""
    kept = iter(i[n] for n in range(rank) if n not in reduced) if keepdims else iter(i)
    return tuple(reduced[n] if n in reduced else next(kept) for n in range(rank))


def element_count(shape: Sequence[Dim], axes: Axes, dtype: str) -> Expr:
    """How many elements a reduction over `axes` takes together, as a number of this type."""
    return cast(as_expr(product([shape[n] for n in axes])), dtype)


def _reduction(name: str, reducer: Reducer, element: Scalar = same, finish: Scalar = same, of_bools: Reducer | None = None) -> Operator:
    """A reduction; a square root or logarithm of integers goes through float64."""

    def apply(x: Tensor, axes: Axes, keepdims: bool) -> Tensor:
        def in_type(value: Expr) -> Expr:
            exact = finish is same or is_float(value.dtype) or x.dtype == "bool"
            return finish(value) if exact else cast(finish(cast(value, "float64")), x.dtype)

        chosen = of_bools if of_bools is not None and x.dtype == "bool" else reducer
        return rounded(reduce(x, axes, keepdims, chosen, name, element, in_type), x.dtype)

    return Operator(name, apply)


def _mean(x: Tensor, axes: Axes, keepdims: bool, name: str, element: Scalar = same) -> Tensor:
    """The mean of element(x) over `axes`; integers truncate towards zero."""
    return reduce(x, axes, keepdims, te.sum, name, element, lambda v: divide(v, element_count(x.shape, axes, v.dtype)))


def _log_sum_exp(x: Tensor, axes: Axes, keepdims: bool) -> Tensor:
    """log(sum(exp(x))), shifted by the maximum so that it does not overflow, or by 0 where that is infinite (never inf - inf)."""
    top = reduce(x, axes, True, te.max, "maximum", finish=lambda v: select(te.isinf(v), 0.0, v))
    total = _shifted_sum(x, top, axes)

    def element(*i: Expr) -> Expr:
        at = _whole_index(i, x.ndim, dict.fromkeys(axes, as_expr(0)), keepdims)
        return te.log(total[at]) + top[at]

    return rounded(te.compute(reduced_shape(x.shape, axes, keepdims), element, "reduce_log_sum_exp"), x.dtype)


def _shifted_sum(x: Tensor, top: Tensor, axes: Axes) -> Tensor:
    """sum(exp(x - top)) over `axes` with keepdims."""
    return reduce_at(x.shape, axes, True, te.sum, "total", lambda at: te.exp(widened(x[at]) - broadcast_read(top, at)))


REDUCE_SUM = _reduction("reduce_sum", te.sum)
REDUCE_PROD = _reduction("reduce_prod", te.prod)
REDUCE_MEAN = Operator("reduce_mean", lambda x, axes, keepdims: rounded(_mean(x, axes, keepdims, "reduce_mean"), x.dtype))
REDUCE_MAX = _reduction("reduce_max", te.max, of_bools=te.any)
REDUCE_MIN = _reduction("reduce_min", te.min, of_bools=te.all)
REDUCE_L1 = _reduction("reduce_l1", te.sum, te.abs)
REDUCE_L2 = _reduction("reduce_l2", te.sum, square, te.sqrt)
REDUCE_SUM_SQUARE = _reduction("reduce_sum_square", te.sum, square)
REDUCE_LOG_SUM = _reduction("reduce_log_sum", te.sum, finish=te.log)
REDUCE_LOG_SUM_EXP = Operator("reduce_log_sum_exp", _log_sum_exp)


def _arg(name: str, reducer: Reducer) -> Operator:
    """The position (int64) of the extreme element along `axis`: the first one, or the last where `last`. NaN counts as extreme."""

    def apply(x: Tensor, axis: int, keepdims: bool, last: bool) -> Tensor:
        extreme = reduce(x, (axis,), True, reducer, f"{name}.extreme")

        def position(at: Index) -> Expr:
            value = widened(x[at])
            found = te.equal(value, broadcast_read(extreme, at)) | te.isnan(value)
            return select(found, at[axis], -1 if last else as_expr(x.shape[axis]))

        return reduce_at(x.shape, (axis,), keepdims, te.max if last else te.min, name, position)

    return Operator(name, apply)


ARG_MAX, ARG_MIN = _arg("arg_max", te.max), _arg("arg_min", te.min)


def softmax_weights(x: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
    """(exp(x - maximum), their sum with keepdims) over `axes` jointly; the sum is 1 or more."""
    top = reduce(x, axes, True, te.max, "softmax.max")
    weight = te.compute(x.shape, lambda *i: te.exp(widened(x[i]) - broadcast_read(top, i)), "softmax.exp")
    return weight, reduce(weight, axes, True, te.sum, "softmax.sum")


def softmax_of(x: Tensor, axes: Axes) -> Tensor:
    """exp(x) / sum(exp(x)) over `axes` jointly, in float32 for 16-bit inputs; the sum is inverted once."""
    weight, total = softmax_weights(x, axes)
    inverse = te.compute(total.shape, lambda *i: 1.0 / total[i], "softmax.inverse")
    return te.compute(x.shape, lambda *i: weight[i] * broadcast_read(inverse, i), "softmax")


def _safe_softmax(x: Tensor, axes: Axes) -> Tensor:
    """`softmax_of`, and 0 where all elements are -inf: rows of attention that are masked as a whole."""
    top = reduce(x, axes, True, te.max, "softmax.max")
    shift = te.compute(top.shape, lambda *i: select(te.equal(widened(top[i]), -math.inf), 0.0, widened(top[i])), "softmax.shift")
    weight = te.compute(x.shape, lambda *i: te.exp(widened(x[i]) - broadcast_read(shift, i)), "softmax.exp")
    total = reduce(weight, axes, True, te.sum, "softmax.sum")
    inverse = te.compute(total.shape, lambda *i: 1.0 / select(te.equal(total[i], 0.0), 1.0, total[i]), "softmax.inverse")
    return rounded(te.compute(x.shape, lambda *i: weight[i] * broadcast_read(inverse, i), "softmax"), x.dtype)


def _log_softmax(x: Tensor, axes: Axes) -> Tensor:
    """x - log(sum(exp(x))) over `axes` jointly."""
    top = reduce(x, axes, True, te.max, "log_softmax.max")
    total = _shifted_sum(x, top, axes)
    y = te.compute(x.shape, lambda *i: widened(x[i]) - broadcast_read(top, i) - te.log(broadcast_read(total, i)), "log_softmax")
    return rounded(y, x.dtype)


def _hardmax(x: Tensor, axes: Axes) -> Tensor:
    """1 at the first maximum over `axes` jointly, 0 elsewhere."""
    top = reduce(x, axes, True, te.max, "hardmax.max")

    def position(at: Sequence[Expr]) -> Expr:
        return row_major([at[n] for n in axes], [x.shape[n] for n in axes])

    def candidate(at: Index) -> Expr:  # the position, or what is larger than any
        return select(te.equal(widened(x[at]), broadcast_read(top, at)), position(at), position([as_expr(d) for d in x.shape]))

    first = reduce_at(x.shape, axes, True, te.min, "hardmax.first", candidate)
    return te.compute(x.shape, lambda *i: cast(te.equal(position(i), broadcast_read(first, i)), x.dtype), "hardmax")


SOFTMAX = Operator("softmax", lambda x, axes: rounded(softmax_of(x, axes), x.dtype))
SAFE_SOFTMAX = Operator("safe_softmax", _safe_softmax)
LOG_SOFTMAX, HARDMAX = Operator("log_softmax", _log_softmax), Operator("hardmax", _hardmax)


def _prefix(name: str, combine: Callable[[Expr, Expr], Expr], identity: Callable[[str], float]) -> Operator:
    """Running sums, products or extremes along `axis`; `exclusive` leaves the element itself out, `reverse` runs from the end."""

    def apply(x: Tensor, axis: int, exclusive: bool, reverse: bool) -> Tensor:
        wide = widened(x[(0,) * x.ndim]).dtype
        extent = as_expr(x.shape[axis])
        running = L.Buffer("running", wide, (1,), "register")

        def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
            (source,), (target,) = inputs, outputs

            def lane(outer: Index) -> L.Stmt:
                def step(k: Expr) -> L.Stmt:
                    at = (*outer[:axis], extent - 1 - k if reverse else k, *outer[axis:])
                    update = L.store(running, (0,), combine(running[0], widened(source[at])))
                    write = L.store(target, at, cast(running[0], x.dtype))
                    return L.block(write, update) if exclusive else L.block(update, write)

                return L.Allocate(running, L.block(L.store(running, (0,), const(identity(wide), wide)), L.loop("k", extent, step)))

            return L.over([d for n, d in enumerate(x.shape) if n != axis], lane)

        def rows(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
            """Row by row, where others follow the axis: lanes run along these, and the row before holds what has been added up."""
            (source,), (target,) = inputs, outputs

            def matrix(outer: Index) -> L.Stmt:
                def over(name: str, element: Callable[[Callable[[ExprLike], Index]], L.Stmt]) -> L.Stmt:
                    def inside(inner: Index) -> L.Stmt:
                        return element(lambda k: (*outer, simplify(extent - 1 - k) if reverse else as_expr(k), *inner))

                    return L.over(x.shape[axis + 1 :], inside, f"{name}{{}}".format)

                def step(k: Expr) -> L.Stmt:
                    added = k if exclusive else k + 1
                    return over("c", lambda at: L.store(target, at(k + 1), combine(target[at(k)], source[at(added)])))

                first = over("f", lambda at: L.store(target, at(0), const(identity(wide), wide) if exclusive else source[at(0)]))
                return L.block(first, L.loop("k", extent - 1, step))

            return L.over(x.shape[:axis], matrix)

        in_rows = wide == x.dtype and axis < x.ndim - 1 and isinstance(x.shape[axis], int) and x.shape[axis] != 0
        return te.extern((x.shape, x.dtype), [x], rows if in_rows else program, name)

    return Operator(name, apply)


CUM_SUM, CUM_PROD = _prefix("cum_sum", add, lambda dtype: 0), _prefix("cum_prod", mul, lambda dtype: 1)
CUM_MAX, CUM_MIN = _prefix("cum_max", maximum, lowest), _prefix("cum_min", minimum, highest)
CUM_LOG_SUM_EXP = _prefix("cum_log_sum_exp", log_add_exp, lambda dtype: -math.inf)


def nll_loss(log_prob: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int | None, reduction: str) -> Tensor:
    """-weight[t] * log_prob[n, t, d...] for the classes t = target[n, d...]; 0 where t is `ignore_index`.

    log_prob [n, classes, d...], target [n, d...] integer, weight [classes]. reduction: none, sum, or mean (by the sum of the
    weights that count).
    """
    dtype = widened(const(0.0, log_prob.dtype)).dtype
    require_same_shape((log_prob.shape[0], *log_prob.shape[2:]), target.shape, "probabilities and targets")
    if weight is not None:
        require_same(weight.shape[0], log_prob.shape[1], "weights of classes, and classes")

    def weight_of(*i: Expr) -> Expr:
        t = target[i]
        own = const(1.0, dtype) if weight is None else widened(weight[valid_index(t, log_prob.shape[1])])
        return own if ignore_index is None else select(te.equal(t, cast(const(ignore_index), t.dtype)), 0.0, own)

    def element(*i: Expr) -> Expr:
        value, w = widened(log_prob[(i[0], valid_index(target[i], log_prob.shape[1]), *i[1:])]), weight_of(*i)
        return select(te.equal(w, 0.0), 0.0, -value * w)

    loss = te.compute(target.shape, element, "nll_loss")
    total = loss if reduction == "none" else reduce(loss, range(target.ndim), False, te.sum, "nll_loss.sum")
    if reduction == "mean":
        weights = reduce(te.compute(target.shape, weight_of, "nll_loss.weights"), range(target.ndim), False, te.sum, "weight")
        return rounded(te.compute((), lambda: total[()] / weights[()], "nll_loss.mean"), log_prob.dtype)
    return rounded(total, log_prob.dtype)


NLL_LOSS = Operator("nll_loss", nll_loss)


def moments(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(mean, variance) over `axes`, which are kept with extent 1; variance is that of the population."""
    mean = _mean(x, axes, True, "mean")
    deviation = te.compute(x.shape, lambda *i: widened(x[i]) - broadcast_read(mean, i), "deviation")
    return mean, _mean(deviation, axes, True, "variance", square)


def batch_scale(scale: Tensor, variance: Tensor, epsilon: float) -> Tensor:
    """scale / sqrt(variance + epsilon): what batch normalisation multiplies each channel with."""
    require_same(scale.shape[0], variance.shape[0], "channels of batch normalisation")

    def element(c: Expr) -> Expr:
        own = widened(scale[c])
        return own / te.sqrt(cast(variance[c], own.dtype) + epsilon)

    return te.compute(scale.shape, element, "batch_scale")


def batch_shift(bias: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """bias - mean * scale: what batch normalisation adds to each channel, `scale` coming from `batch_scale`."""
    for other in (mean, scale):
        require_same(bias.shape[0], other.shape[0], "channels of batch normalisation")
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
    require_same_shape(old.shape, new.shape, "running statistics")

    def element(*i: Expr) -> Expr:
        before = widened(old[i])
        return cast(before * momentum + cast(new[i], before.dtype) * (1.0 - momentum), old.dtype)

    return te.compute(old.shape, element, "running")


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the spatial axes of each instance and channel."""
    for factor in (scale, bias):
        require_same(x.shape[1], factor.shape[0], "a scale and a bias for each channel")
    mean, variance = moments(x, range(2, x.ndim))

    def element(*i: Expr) -> Expr:
        normal = (widened(x[i]) - broadcast_read(mean, i)) / te.sqrt(broadcast_read(variance, i) + epsilon)
        return cast(normal * widened(scale[i[1]]) + widened(bias[i[1]]), x.dtype)

    return te.compute(x.shape, element, "instance_norm")


def group_norm(x: Tensor, scale: Tensor, bias: Tensor, groups: int, epsilon: float) -> Tensor:
    """Normalises each of `groups` blocks of channels over channels and spatial axes; scale and bias per channel, or per group."""
    channels = x.shape[1]
    if groups < 1 or (isinstance(channels, int) and channels % groups):
        raise IRError(f"{channels} channels do not divide into {groups} groups")
    size = as_expr(channels) // groups  # the caller guarantees that a symbolic number of channels divides
    shape = (x.shape[0], groups, as_dim(size), *x.shape[2:])
    grouped = te.compute(shape, lambda *i: widened(x[(i[0], i[1] * size + i[2], *i[3:])]), "grouped")
    mean, variance = moments(grouped, range(2, grouped.ndim))
    per_group = scale.shape[0] == groups and groups != channels
    for factor in (scale, bias):
        require_same(groups if per_group else channels, factor.shape[0], "a scale and a bias for each channel, or each group")

    def element(n: Expr, c: Expr, *p: Expr) -> Expr:
        at = (n, c // size, *[const(0)] * (grouped.ndim - 2))
        normal = (widened(x[(n, c, *p)]) - mean[at]) / te.sqrt(variance[at] + epsilon)
        own = c // size if per_group else c
        return cast(normal * widened(scale[own]) + widened(bias[own]), x.dtype)

    return te.compute(x.shape, element, "group_norm")


def layer_norm(x: Tensor, scale: Tensor | None, bias: Tensor | None, axis: int, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1 / standard deviation) normalised over the axes from `axis` on; `scale` and `bias` broadcast to x."""
    for factor in filter(None, (scale, bias)):
        require_broadcast(factor.shape, x.shape)
    mean, variance = moments(x, range(axis, x.ndim))
    inverse = te.compute(variance.shape, lambda *i: 1.0 / te.sqrt(variance[i] + epsilon), "inverse_deviation")

    def element(*i: Expr) -> Expr:
        value = (widened(x[i]) - broadcast_read(mean, i)) * broadcast_read(inverse, i)
        value = value if scale is None else value * widened(broadcast_read(scale, i))
        return cast(value if bias is None else value + widened(broadcast_read(bias, i)), x.dtype)

    return te.compute(x.shape, element, "layer_norm"), mean, inverse


def rms_norm(x: Tensor, scale: Tensor, axis: int, epsilon: float) -> Tensor:
    """x / sqrt(mean of squares + epsilon) * scale over the axes from `axis` on (Zhang & Sennrich 2019)."""
    require_broadcast(scale.shape, x.shape)
    mean = _mean(x, range(axis, x.ndim), True, "mean_square", square)

    def element(*i: Expr) -> Expr:
        normal = widened(x[i]) / te.sqrt(broadcast_read(mean, i) + epsilon)
        factor = broadcast_read(scale, i)
        return cast(cast(normal, x.dtype), factor.dtype) * factor

    return te.compute(x.shape, element, "rms_norm")


def local_response_norm(x: Tensor, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta (Krizhevsky et al. 2012)."""
    r = te.reduce_axis(size, "rc")

    def square_sum(*i: Expr) -> Expr:
        c = i[1] + r - (size - 1) // 2
        return te.sum(select((c >= 0) & (c < x.shape[1]), square(widened(x[(i[0], c, *i[2:])])), 0), r)

    squares = te.compute(x.shape, square_sum, "square_sum")
    return te.compute(x.shape, lambda *i: cast(widened(x[i]) / te.power(squares[i] * (alpha / size) + bias, beta), x.dtype), "lrn")


def lp_normalize(x: Tensor, axis: int, p: int) -> Tensor:
    """x / its p-norm along `axis`; 0 where the norm is 0."""
    norm = reduce(x, [axis], True, te.sum, "norm", *p_norm(p))

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
