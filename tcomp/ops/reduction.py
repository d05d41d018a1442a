"""Operators that fold axes away: sums and their kin, arg-max, softmax, prefix sums.

`axes` are non-negative, increasing and distinct. 16-bit floats are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.ir import te
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_expr, cast, const, row_major, select
from tcomp.ir.graph import Operator
from tcomp.ir.loops import Allocate, Buffer, Stmt, block, loop, over, store
from tcomp.ops.broadcast import widened
from tcomp.ops.elementwise import divide

Axes = Sequence[int]
Fold = Callable[[Expr, Sequence[Expr]], Expr]


# ---------------------------------------------------------------- the shape of a reduction


def kept_shape(shape: Sequence[Dim], axes: Axes, keepdims: bool) -> tuple[Dim, ...]:
    """The shape that is left when `axes` are folded."""
    return tuple(1 if n in axes else d for n, d in enumerate(shape) if keepdims or n not in axes)


def fold(
    x: te.Tensor,
    axes: Axes,
    keepdims: bool,
    reducer: Fold,
    name: str,
    element: Callable[[Expr], Expr] = lambda value: value,
    finish: Callable[[Expr], Expr] = lambda value: value,
) -> te.Tensor:
    """finish(reducer(element(x[...])) over `axes`), one tensor; everything in at least float32."""
    folded = {n: te.reduce_axis(x.shape[n], f"r{n}") for n in axes}

    def body(*i: Expr) -> Expr:
        kept = iter(i[n] for n in range(x.ndim) if n not in folded) if keepdims else iter(i)
        at = [folded[n] if n in folded else next(kept) for n in range(x.ndim)]
        return finish(reducer(element(widened(x[tuple(at)])), tuple(folded.values())))

    return te.compute(kept_shape(x.shape, axes, keepdims), body, name)


def rounded(x: te.Tensor, dtype: str) -> te.Tensor:
    """The tensor in the type of the operator's input."""
    return x if x.dtype == dtype else te.compute(x.shape, lambda *i: cast(x[i], dtype), f"{x.name}.round")


def at_kept(x: te.Tensor, i: Sequence[Expr]) -> Expr:
    """The element of a tensor folded with keepdims that belongs to `i` of the whole."""
    return x[tuple(0 if isinstance(d, int) and d == 1 else index for d, index in zip(x.shape, i, strict=True))]


# ---------------------------------------------------------------- sums and their kin


def _reduction(
    name: str, reducer: Fold, element: Callable[[Expr], Expr] = lambda value: value, finish: Callable[[Expr], Expr] = lambda value: value
) -> Operator:
    def apply(x: te.Tensor, axes: Axes, keepdims: bool) -> te.Tensor:
        return rounded(fold(x, axes, keepdims, reducer, name, element, lambda v: _in_type(finish, v, x.dtype)), x.dtype)

    return Operator(name, apply)


def _in_type(finish: Callable[[Expr], Expr], value: Expr, dtype: str) -> Expr:
    """A square root or logarithm of integers goes through float64."""
    if is_float(value.dtype) or dtype == "bool":
        return finish(value)
    result = finish(cast(value, "float64"))
    return value if result.op == "cast" and result.args[0] is value else cast(result, dtype)


def _mean(x: te.Tensor, axes: Axes, keepdims: bool) -> te.Tensor:
    """Arithmetic mean; integers truncate towards zero."""
    count = as_expr(1)
    for n in axes:
        count = count * as_expr(x.shape[n])
    return rounded(fold(x, axes, keepdims, te.sum, "reduce_mean", finish=lambda v: divide(v, cast(count, v.dtype))), x.dtype)


def _extremum(name: str, reducer: Fold, of_bools: Fold) -> Operator:
    def apply(x: te.Tensor, axes: Axes, keepdims: bool) -> te.Tensor:
        return rounded(fold(x, axes, keepdims, of_bools if x.dtype == "bool" else reducer, name), x.dtype)

    return Operator(name, apply)


def _log_sum_exp(x: te.Tensor, axes: Axes, keepdims: bool) -> te.Tensor:
    """log(sum(exp(x))), shifted by the maximum so that it does not overflow."""
    top = _finite_maximum(x, axes)
    kept = [n for n in range(x.ndim) if keepdims or n not in axes]
    total = _shifted_sum(x, top, axes)

    def element(*i: Expr) -> Expr:
        at = [as_expr(0)] * x.ndim
        for n, index in zip(kept, i, strict=True):
            at[n] = as_expr(0) if n in axes else index
        return te.log(total[tuple(at)]) + top[tuple(at)]

    return rounded(te.compute(kept_shape(x.shape, axes, keepdims), element, "reduce_log_sum_exp"), x.dtype)


def _finite_maximum(x: te.Tensor, axes: Axes) -> te.Tensor:
    """The maximum over `axes` with keepdims; 0 where it is infinite (so that x - maximum is never inf - inf)."""
    return fold(x, axes, True, te.max, "maximum", finish=lambda v: select(te.isinf(v), 0.0, v))


def _shifted_sum(x: te.Tensor, top: te.Tensor, axes: Axes) -> te.Tensor:
    """sum(exp(x - top)) over `axes` with keepdims."""
    folded = {n: te.reduce_axis(x.shape[n], f"r{n}") for n in axes}

    def element(*i: Expr) -> Expr:
        at = tuple(folded.get(n, index) for n, index in enumerate(i))
        return te.sum(te.exp(widened(x[at]) - at_kept(top, i)), tuple(folded.values()))

    return te.compute(kept_shape(x.shape, axes, True), element, "total")


REDUCE_SUM = _reduction("reduce_sum", te.sum)
REDUCE_PROD = _reduction("reduce_prod", te.prod)
REDUCE_MEAN = Operator("reduce_mean", _mean)
REDUCE_MAX = _extremum("reduce_max", te.max, te.any)
REDUCE_MIN = _extremum("reduce_min", te.min, te.all)
REDUCE_L1 = _reduction("reduce_l1", te.sum, te.abs)
REDUCE_L2 = _reduction("reduce_l2", te.sum, lambda v: v * v, te.sqrt)
REDUCE_SUM_SQUARE = _reduction("reduce_sum_square", te.sum, lambda v: v * v)
REDUCE_LOG_SUM = _reduction("reduce_log_sum", te.sum, finish=te.log)
REDUCE_LOG_SUM_EXP = Operator("reduce_log_sum_exp", _log_sum_exp)


# ---------------------------------------------------------------- arg-max


def _arg(name: str, reducer: Fold) -> Operator:
    """The position (int64) of the extreme element along `axis`: the first one, or the last where `last`. NaN counts as extreme."""

    def apply(x: te.Tensor, axis: int, keepdims: bool, last: bool) -> te.Tensor:
        extreme = fold(x, (axis,), True, reducer, f"{name}.extreme")
        k = te.reduce_axis(x.shape[axis], f"r{axis}")

        def element(*i: Expr) -> Expr:
            whole = list(i) if keepdims else [*i[:axis], as_expr(0), *i[axis:]]
            at = [*whole[:axis], k, *whole[axis + 1 :]]
            value = widened(x[tuple(at)])
            found = te.equal(value, at_kept(extreme, whole)) | te.isnan(value)
            return te.max(select(found, k, -1), k) if last else te.min(select(found, k, as_expr(x.shape[axis])), k)

        return te.compute(kept_shape(x.shape, (axis,), keepdims), element, name)

    return Operator(name, apply)


ARG_MAX, ARG_MIN = _arg("arg_max", te.max), _arg("arg_min", te.min)


# ---------------------------------------------------------------- softmax


def softmax_of(x: te.Tensor, axes: Axes) -> te.Tensor:
    """exp(x) / sum(exp(x)) over `axes` jointly, in float32 for 16-bit inputs; the sum, which is 1 or more, is inverted once."""
    top = fold(x, axes, True, te.max, "softmax.max")
    weight = te.compute(x.shape, lambda *i: te.exp(widened(x[i]) - at_kept(top, i)), "softmax.exp")
    total = fold(weight, axes, True, te.sum, "softmax.sum")
    inverse = te.compute(total.shape, lambda *i: 1.0 / total[i], "softmax.inverse")
    return te.compute(x.shape, lambda *i: weight[i] * at_kept(inverse, i), "softmax")


def log_softmax_of(x: te.Tensor, axes: Axes) -> te.Tensor:
    """x - log(sum(exp(x))) over `axes` jointly, in float32 for 16-bit inputs."""
    top = fold(x, axes, True, te.max, "log_softmax.max")
    total = _shifted_sum(x, top, axes)
    return te.compute(x.shape, lambda *i: widened(x[i]) - at_kept(top, i) - te.log(at_kept(total, i)), "log_softmax")


def _hardmax(x: te.Tensor, axes: Axes) -> te.Tensor:
    """1 at the first maximum over `axes` jointly, 0 elsewhere."""
    top = fold(x, axes, True, te.max, "hardmax.max")
    folded = {n: te.reduce_axis(x.shape[n], f"r{n}") for n in axes}

    def position(at: Sequence[Expr]) -> Expr:
        return row_major([at[n] for n in axes], [x.shape[n] for n in axes])

    def first(*i: Expr) -> Expr:
        at = [folded.get(n, index) for n, index in enumerate(i)]
        count = position([as_expr(d) for d in x.shape])  # larger than any position
        return te.min(select(te.equal(widened(x[tuple(at)]), at_kept(top, i)), position(at), count), tuple(folded.values()))

    where = te.compute(kept_shape(x.shape, axes, True), first, "hardmax.first")
    return te.compute(x.shape, lambda *i: cast(te.equal(position(i), at_kept(where, i)), x.dtype), "hardmax")


SOFTMAX = Operator("softmax", lambda x, axes: rounded(softmax_of(x, axes), x.dtype))
LOG_SOFTMAX = Operator("log_softmax", lambda x, axes: rounded(log_softmax_of(x, axes), x.dtype))
HARDMAX = Operator("hardmax", _hardmax)


# ---------------------------------------------------------------- prefix sums


def _prefix(name: str, combine: Callable[[Expr, Expr], Expr], identity: int) -> Operator:
    """Running folds along `axis`; `exclusive` leaves the element itself out, `reverse` runs from the end."""

    def apply(x: te.Tensor, axis: int, exclusive: bool, reverse: bool) -> te.Tensor:
        wide = widened(x[(0,) * x.ndim]).dtype
        extent = as_expr(x.shape[axis])

        def program(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
            (source,), (target,) = inputs, outputs
            running = Buffer("running", wide, (1,), "register")

            def step(k: Expr, outer: tuple[Expr, ...]) -> Stmt:
                at = [*outer[:axis], extent - 1 - k if reverse else k, *outer[axis:]]
                add = store(running, (0,), combine(running[0], widened(source[tuple(at)])))
                write = store(target, at, cast(running[0], x.dtype))
                return block(write, add) if exclusive else block(add, write)

            def lane(outer: tuple[Expr, ...]) -> Stmt:
                return Allocate(running, block(store(running, (0,), const(identity, wide)), loop("k", extent, lambda k: step(k, outer))))

            return over([d for n, d in enumerate(x.shape) if n != axis], lane)

        return te.extern((x.shape, x.dtype), [x], program, name)

    return Operator(name, apply)


CUM_SUM = _prefix("cum_sum", lambda a, b: a + b, 0)
CUM_PROD = _prefix("cum_prod", lambda a, b: a * b, 1)
