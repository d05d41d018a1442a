"""ONNX operators whose results have a size that the run counts: NonZero, Compress, Unique, NonMaxSuppression."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.movement import cut, moved, reshaped
from tcomp.ir.expr import Dim, as_expr, minimum
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import counting as ops
from tcomp.ops.movement import GATHER, product


def _positions(ctx: Context, x: Value, bound: Dim | None = None) -> tuple[Value, Dim]:
    """The positions of elements that are not zero, in an array that is longer than that, and their number."""
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


def _unique(ctx: Context) -> tuple[Value, ...]:
    """Outputs: the different elements (slices along the axis), where each stands first, the number of each of all, how often it stands."""
    x, axis = ctx.value(0), ctx.attrs.get("axis")
    if axis is None:
        x, axis = reshaped(ctx, x, (product(x.shape),)), 0
    axis = ctx.axis(axis, len(x.shape))
    n, rest = x.shape[axis], [d for k, d in enumerate(x.shape) if k != axis]
    if n == 0:
        return x, *(ctx.constant(np.zeros(0, np.int64)) for _ in range(3))
    rows = reshaped(ctx, moved(ctx, x, axis, 0), (n, product(rest)))
    first, counts, inverse, count = ctx.add_several(ops.UNIQUE, [rows], in_order=not ctx.attrs["sorted"])
    size = ctx.counted(count, n)
    first, counts = (cut(ctx, v, 0, 0, size) for v in (first, counts))
    return ctx.add(GATHER, [x, first], axis=axis), first, inverse, counts


def _non_max_suppression(ctx: Context) -> Value:
    boxes, scores = ctx.value(0), ctx.value(1)
    if len(boxes.shape) != 3 or len(scores.shape) != 3 or boxes.shape[2] != 4:
        raise ctx.invalid(f"its inputs are {boxes} and {scores}, instead of boxes [batch, n, 4] and scores [batch, classes, n]")
    if ctx.attrs["center_point_box"] not in (0, 1):
        raise ctx.invalid(f"`center_point_box` is {ctx.attrs['center_point_box']}, and neither 0 nor 1")
    most, overlap, least = ctx.input(2), ctx.input(3), ctx.input(4)
    known, n = ctx.dims(2), scores.shape[2]
    per_class = as_dim(minimum(as_expr(n), as_expr(known[0]))) if known else n
    if most is None or 0 in (*scores.shape, *boxes.shape) or (isinstance(per_class, int) and per_class <= 0):
        return ctx.constant(np.zeros((0, 3), np.int64))
    overlap = ctx.constant(0.0, boxes.dtype) if overlap is None else overlap
    bound, centered = product([*scores.shape[:2], per_class]), bool(ctx.attrs["center_point_box"])
    selected, count = ctx.add_several(ops.NON_MAX_SUPPRESSION, [boxes, scores, most, overlap, least], centered=centered, bound=bound)
    return cut(ctx, selected, 0, 0, ctx.counted(count, bound))


TABLE: Table = {"NonZero": _non_zero, "Compress": _compress, "Unique": _unique, "NonMaxSuppression": _non_max_suppression}
