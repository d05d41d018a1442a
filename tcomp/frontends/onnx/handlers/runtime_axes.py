"""Axes that are chosen by values of inputs: which ones is known before a run, how many of them when the model is compiled.

Everything follows from one condition an axis, whether it is among the chosen ones. A sum over chosen axes reads its input as [o0, n0, o1,
n1, ..., om], where n0, n1, ... are the extents of the chosen axes in order, and o0, o1, ... the products of what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add, mul, or_

from tcomp.frontends.onnx.context import Context
from tcomp.ir.expr import Dim, Expr, as_expr, const, select
from tcomp.ir.graph import Value
from tcomp.ir.shape_operands import depends_on_values
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import equal
from tcomp.ops.movement import VIEW

TRUE = const(True, "bool")


class Chosen:
    """Axes of a tensor of rank `rank`. `hits[k]`: whether axis k is one of them; `valid`: whether each is an axis, and none given twice."""

    def __init__(self, ctx: Context, axes: Sequence[Dim], rank: int, behind: int) -> None:
        if len(axes) > rank:
            raise ctx.invalid(f"{len(axes)} axes of a tensor of rank {rank}")
        self.rank, self.count = rank, len(axes)
        counted = [select(as_expr(a) < 0, as_expr(a) + rank + behind, as_expr(a)) for a in axes]
        self.axes = [as_expr(ctx.size(as_dim(a), f"axis {n}", most=rank - 1)) for n, a in enumerate(counted)]
        self.hits = [every(or_, [equal(a, k) for a in self.axes], const(False, "bool")) for k in range(rank)]
        ones = [select(hit, 1, 0) for hit in self.hits]
        self.valid = equal(every(add, ones, const(0)), self.count)
        self.before = [every(add, ones[:k], const(0)) for k in range(rank)]  # how many chosen axes lie before axis k

    def kept(self, shape: Sequence[Dim]) -> list[Expr]:
        """The extents of the axes that are not chosen."""

        def extent(number: int) -> Expr:
            parts = [(k, ~hit & equal(k - before, number)) for k, (hit, before) in enumerate(zip(self.hits, self.before, strict=True))]
            return every(add, [select(test, as_expr(shape[k]), 0) for k, test in parts], const(0))

        return [extent(number) for number in range(self.rank - self.count)]

    def spread(self, shape: Sequence[Dim], filling: Dim) -> list[Expr]:
        """The extents of a tensor whose axes that are not chosen have `shape`, and the chosen ones `filling`."""

        def other(k: int) -> Expr:
            place = k - self.before[k]
            return every(add, [select(equal(place, n), as_expr(d), 0) for n, d in enumerate(shape)], const(0))

        return [select(hit, as_expr(filling), other(k)) for k, hit in enumerate(self.hits)]

    def at(self, k: int, values: Sequence[Dim], otherwise: Dim) -> Expr:
        """What `values`, one for each chosen axis in the order given, say of axis k."""
        found = as_expr(otherwise)
        for axis, value in zip(self.axes, values, strict=True):
            found = select(equal(axis, k), as_expr(value), found)
        return found

    def view(self, ctx: Context, x: Value) -> Value:
        """`x` as [o0, n0, o1, n1, ..., om]."""
        return ctx.add(VIEW, [x], shape=self.view_shape(ctx, x.shape))

    def view_shape(self, ctx: Context, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        """The extents o0, n0, o1, n1, ..., om of a shape."""

        def extent(number: int, chosen: bool) -> Expr:
            tests = [(hit if chosen else ~hit) & equal(before, number) for hit, before in zip(self.hits, self.before, strict=True)]
            return every(mul, [select(test, as_expr(d), 1) for test, d in zip(tests, shape, strict=True)], const(1))

        parts = [extent(n // 2, n % 2 == 1) for n in range(2 * self.count + 1)]
        return tuple(ctx.size(p, f"part {n} of the input, cut at the axes", valid=self.valid) for n, p in enumerate(parts))


def every(combine: Callable[[Expr, Expr], Expr], parts: Sequence[Expr], identity: Expr) -> Expr:
    """All parts combined."""
    return reduce(combine, parts) if parts else identity


def chosen_axes(ctx: Context, axes: Sequence[Dim] | None, rank: int, behind: int = 0) -> Chosen | None:
    """The chosen ones of the first `rank` axes, with `behind` more behind these; None where they are known when the model is compiled."""
    return Chosen(ctx, axes, rank, behind) if axes is not None and any(map(depends_on_values, axes)) else None


def sized(ctx: Context, shape: Sequence[Dim], what: str, valid: Expr = TRUE) -> tuple[Dim, ...]:
    """The extents of a result."""
    return tuple(ctx.size(as_dim(d), f"extent {n} of {what}", valid=valid) for n, d in enumerate(shape))
