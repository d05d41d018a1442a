"""ONNX operators whose results have a size that the run counts: NonZero, Compress."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.movement import cut, reshaped
from tcomp.ir.expr import Dim, as_dim, as_expr, minimum
from tcomp.ir.graph import Value
from tcomp.ops import counting as ops
from tcomp.ops.movement import GATHER, product


def _positions(ctx: Context, x: Value, bound: Dim | None = None) -> tuple[Value, Dim]:
    """The positions of elements that are not zero, in an array that is longer than that, and their number."""
    if (known := ctx.scope.known(x)) is not None:
        found = np.flatnonzero(known).astype(np.int64)
        return ctx.constant(found), len(found)
    places, count = ctx.add_several(ops.POSITIONS, [x])
    return places, ctx.counted(count, product(x.shape) if bound is None else bound)


def _non_zero(ctx: Context) -> Value:
    x = ctx.value(0)
    x = x if x.shape else reshaped(ctx, x, (1,))
    if product(x.shape) == 0:
        return ctx.constant(np.zeros((len(x.shape), 0), np.int64))
    places, count = _positions(ctx, x)
    return ctx.add(ops.UNRAVELLED, [places], shape=x.shape, count=count)


def _compress(ctx: Context) -> Value:
    x, condition, axis = ctx.value(0), ctx.value(1), ctx.attrs.get("axis")
    if axis is None:
        x, axis = reshaped(ctx, x, (product(x.shape),)), 0
    axis = ctx.axis(axis, len(x.shape))
    places, count = _positions(ctx, condition, as_dim(minimum(as_expr(x.shape[axis]), as_expr(product(condition.shape)))))
    return ctx.add(GATHER, [x, cut(ctx, places, 0, 0, count)], axis=axis)


TABLE: Table = {"NonZero": _non_zero, "Compress": _compress}
