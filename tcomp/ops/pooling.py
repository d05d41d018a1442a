"""Pooling windows over the spatial axes of (batch, channels, spatial...). Padding is an operator of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.dtypes import integer_range
from tcomp.ir.expr import Dim, Expr, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.loops import Buffer, If, Stmt, block, over, store
from tcomp.ir.simplify import simplify
from tcomp.ops.broadcast import widened
from tcomp.ops.nn import window_count
from tcomp.ops.reduction import fold, rounded

Windows = Sequence[int]


def _pooled(x: te.Tensor, kernel: Windows, strides: Windows, dilations: Windows, name: str, element: Callable[..., Expr]) -> te.Tensor:
    """`element(indices, taps, position)`: the value at output `indices`, `position` being where window tap `taps` reads."""
    if not len(kernel) == len(strides) == len(dilations) == x.ndim - 2 or any(v < 1 for v in (*kernel, *strides, *dilations)):
        raise IRError(f"pooling of {x} with kernel {kernel}, strides {strides}, dilations {dilations}")
    shape = [window_count(d, k, s, r) for d, k, s, r in zip(x.shape[2:], kernel, strides, dilations, strict=True)]
    taps = tuple(te.reduce_axis(k, f"rk{n}") for n, k in enumerate(kernel))

    def body(*i: Expr) -> Expr:
        at = [p * s + k * r for p, s, k, r in zip(i[2:], strides, taps, dilations, strict=True)]
        return element(i, taps, (*i[:2], *at))

    return te.compute((*x.shape[:2], *shape), body, name)


def max_pool(x: te.Tensor, kernel: Windows, strides: Windows, dilations: Windows) -> te.Tensor:
    """The largest element of each window; NaN if the window has one."""
    return _pooled(x, kernel, strides, dilations, "max_pool", lambda i, taps, at: te.max(x[at], taps))


def max_pool_indices(
    x: te.Tensor, kernel: Windows, strides: Windows, dilations: Windows, before: Sequence[Dim], shape: Sequence[Dim], column_major: bool
) -> te.Tensor:
    """Where the largest element of each window stands (the first of equals): flat index into the unpadded tensor of `shape`.

    `x` is padded by `before` in front of each spatial axis. `column_major` counts the spatial axes in reverse order.
    """
    largest = max_pool(x, kernel, strides, dilations)
    last = integer_range("int64")[1]

    def element(i: Sequence[Expr], taps: Sequence[Expr], at: Sequence[Expr]) -> Expr:
        own = [p - b for p, b in zip(at[2:], before, strict=True)]
        axes = list(zip(own, shape[2:], strict=True))
        flat = i[0] * shape[1] + i[1]
        inside = const(True, "bool")
        spatial, volume = const(0), const(1)
        for p, extent in axes if column_major else reversed(axes):
            inside = inside & (p >= 0) & (p < extent)
            spatial, volume = spatial + p * volume, volume * extent
        return te.min(select(inside & te.equal(x[tuple(at)], largest[tuple(i)]), flat * volume + spatial, last), taps)

    return _pooled(x, kernel, strides, dilations, "max_pool_indices", element)


def average_pool(x: te.Tensor, kernel: Windows, strides: Windows, dilations: Windows, counted: Sequence[Sequence[Dim] | None]) -> te.Tensor:
    """The mean of each window over the taps inside `counted`, a (begin, end) for each spatial axis, None where all taps count.

    Taps that do not count must read as zero.
    """

    def taps_before(bound: Dim, start: Expr, extent: int, step: int) -> Expr:
        return minimum(maximum((as_expr(bound) - start + (step - 1)) // step, 0), extent)

    def element(i: Sequence[Expr], taps: Sequence[Expr], at: Sequence[Expr]) -> Expr:
        count: Expr = const(1)
        for p, k, s, r, ends in zip(i[2:], kernel, strides, dilations, counted, strict=True):
            inside = as_expr(k) if ends is None else taps_before(ends[1], p * s, k, r) - taps_before(ends[0], p * s, k, r)
            count = count * inside
        total = te.sum(widened(x[tuple(at)]), taps)
        return cast(total / cast(simplify(count), total.dtype), x.dtype)

    return _pooled(x, kernel, strides, dilations, "average_pool", element)


def lp_pool(x: te.Tensor, kernel: Windows, strides: Windows, dilations: Windows, p: float) -> te.Tensor:
    """(sum of |x|^p)^(1/p) of each window."""

    def element(i: Sequence[Expr], taps: Sequence[Expr], at: Sequence[Expr]) -> Expr:
        magnitude = te.abs(widened(x[tuple(at)]))
        if p == 1:
            return cast(te.sum(magnitude, taps), x.dtype)
        if p == 2:
            return cast(te.sqrt(te.sum(magnitude * magnitude, taps)), x.dtype)
        return cast(te.power(te.sum(te.power(magnitude, p), taps), 1.0 / p), x.dtype)

    return _pooled(x, kernel, strides, dilations, "lp_pool", element)


def max_unpool(x: te.Tensor, indices: te.Tensor, shape: Sequence[Dim], source: Sequence[Dim]) -> te.Tensor:
    """Zeros of `shape` with the elements of `x` at the flat `indices` into a tensor of shape `source` (see `max_pool_indices`).

    Indices outside `source` or `shape` are ignored.
    """

    def program(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        values, places, result = *inputs, *outputs

        def scatter(i: tuple[Expr, ...]) -> Stmt:
            place = places[i]
            rest, at = place, []
            for extent in reversed(source):
                at.append(rest % extent)
                rest = rest // extent
            at.reverse()
            inside = (place >= 0) & te.equal(rest, 0)
            for p, extent in zip(at, shape, strict=True):
                inside = inside & (p < extent)
            return If(inside, store(result, at, values[i]))

        return block(over(shape, lambda i: store(result, i, 0), "z{}".format), over(x.shape, scatter))

    return te.extern((shape, x.dtype), [x, indices], program, "max_unpool")


def global_lp_pool(x: te.Tensor, p: float) -> te.Tensor:
    """(sum of |x|^p)^(1/p) over all spatial axes, kept with extent 1."""

    def power(v: Expr, exponent: float) -> Expr:
        return v if exponent == 1 else te.power(v, exponent)

    axes = range(2, x.ndim)
    return rounded(fold(x, axes, True, te.sum, "lp_pool", lambda v: power(te.abs(v), p), lambda v: power(v, 1 / p)), x.dtype)


MAX_POOL, MAX_POOL_INDICES = Operator("max_pool", max_pool), Operator("max_pool_indices", max_pool_indices)
AVERAGE_POOL, LP_POOL = Operator("average_pool", average_pool), Operator("lp_pool", lp_pool)
GLOBAL_LP_POOL = Operator("global_lp_pool", global_lp_pool)
MAX_UNPOOL = Operator("max_unpool", max_unpool)
