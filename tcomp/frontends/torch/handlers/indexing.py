"""ATen operators that read and write at positions which data tells, and sort."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tcomp.frontends.torch.context import Context, Operand, Table
from tcomp.frontends.torch.handlers.movement import cut, permute
from tcomp.ir.broadcasting import broadcast_shape
from tcomp.ir.dtypes import integer_range, is_float
from tcomp.ir.expr import as_expr
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import movement as ops
from tcomp.ops.counting import POSITIONS, UNRAVELLED
from tcomp.ops.elementwise import DIV, EQUAL, FULL, ISNAN, LESS, LESS_EQUAL, MAX, MIN, MOD, NOT, OR, SUB, WHERE
from tcomp.ops.movement import product
from tcomp.ops.reduction import ARG_MAX, CUM_SUM, REDUCE_MAX, REDUCE_SUM

aten = torch.ops.aten


def _index_select(ctx: Context, x: Value, dim: int, indices: Value) -> Value:
    if not x.shape:
        return x
    return ctx.add(ops.GATHER, x, indices if indices.shape else ctx.add(ops.RESHAPE, indices, shape=(1,)), axis=ctx.axis(x, dim))


def _placed(ctx: Context, x: Value, indices: Sequence[Value | None]) -> tuple[Value, Value, list[int]]:
    """(`x` with the indexed axes first, index tuples, the order of its axes)."""
    given = [(n, i) for n, i in enumerate(indices) if i is not None]
    if any(i.dtype == "bool" for _, i in given):
        raise ctx.unsupported("an index is a mask")
    shape = given[0][1].shape
    for _, i in given[1:]:
        shape = broadcast_shape(shape, i.shape)
    columns = [ctx.add(ops.RESHAPE, ctx.add(ops.EXPAND, ctx.cast(i, "int64"), shape=shape), shape=(*shape, 1)) for _, i in given]
    tuples = ctx.add(ops.CONCAT, *columns, axis=len(shape)) if len(columns) > 1 else columns[0]
    order = [n for n, _ in given] + [n for n in range(len(x.shape)) if n not in dict(given)]
    return permute(ctx, x, order), tuples, order


def _nonzero(ctx: Context, x: Value) -> Value:
    if not x.shape:
        raise ctx.unsupported("it has no axes")
    places, count = ctx.positions(x, ctx.node.meta["val"].shape[0])
    return permute(ctx, ctx.add(UNRAVELLED, places, shape=x.shape, count=count), (1, 0))


def _masked(ctx: Context, x: Value, mask: Value, axis: int) -> Value:
    """The parts of `x` along the axes of the mask, from `axis` on, where that is true."""
    end = axis + len(mask.shape)
    flat = ctx.add(ops.RESHAPE, x, shape=(*x.shape[:axis], product(x.shape[axis:end]), *x.shape[end:]))
    places, count = ctx.positions(mask, ctx.node.meta["val"].shape[axis])
    return ctx.add(ops.GATHER, flat, cut(ctx, places, 0, 0, count), axis=axis)


def _masked_select(ctx: Context, x: Value, mask: Value) -> Value:
    shape = broadcast_shape(x.shape, mask.shape) or (1,)
    return _masked(ctx, ctx.add(ops.EXPAND, x, shape=shape), ctx.add(ops.EXPAND, mask, shape=shape), 0)


def _index(ctx: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    """The axes of the indices stand where the indexed axes were if these are neighbours, else in front, as in NumPy."""
    given = [(n, i) for n, i in enumerate(indices) if i is not None]
    if len(given) == 1 and given[0][1].dtype == "bool" and given[0][1].shape:
        return _masked(ctx, x, given[0][1], given[0][0])
    moved, tuples, order = _placed(ctx, x, indices)
    y, width, count = ctx.add(ops.GATHER_ND, moved, tuples, batch_dims=0), int(tuples.shape[-1]), len(tuples.shape) - 1
    axes = order[:width]
    if axes[0] == 0 or axes != list(range(axes[0], axes[0] + width)):
        return y
    before = list(range(count, count + axes[0]))
    return permute(ctx, y, [*before, *range(count), *range(count + axes[0], len(y.shape))])


def _put_masked(ctx: Context, x: Value, mask: Value, values: Value, accumulate: bool) -> Value:
    """`x` with values, one after the other, where a mask of its first axes is true; there are as many as that."""
    rest = x.shape[len(mask.shape) :]
    if len(values.shape) != 1 + len(rest) or values.shape[1:] != rest:
        raise ctx.unsupported("an index is a mask, and values are broadcast")
    places = cut(ctx, ctx.results(POSITIONS, mask)[0], 0, 0, values.shape[0])
    flat = ctx.add(ops.RESHAPE, x, shape=(product(mask.shape), *rest))
    at = ctx.add(ops.RESHAPE, places, shape=(values.shape[0], 1))
    written = ctx.add(ops.SCATTER_ND, flat, at, ctx.cast(values, x.dtype), reduction="add" if accumulate else "none")
    return ctx.add(ops.RESHAPE, written, shape=x.shape)


def _index_put(ctx: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == "bool" and values.shape in ((), (1,)) and not accumulate:
        mask = indices[0]
        wide = ctx.add(ops.RESHAPE, mask, shape=(*mask.shape, *[1] * (len(x.shape) - len(mask.shape))))
        return ctx.add(WHERE, wide, ctx.cast(values, x.dtype), x)
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == "bool" and 0 not in x.shape:
        return _put_masked(ctx, x, indices[0], values, accumulate)
    moved, tuples, order = _placed(ctx, x, indices)
    width, count = int(tuples.shape[-1]), len(tuples.shape) - 1
    before, shape = order[0], (*tuples.shape[:-1], *moved.shape[width:])
    if before and order[:width] == list(range(before, before + width)):  # values have the axes before those of the indices first
        turned = (*range(count, count + before), *range(count), *range(count + before, len(shape)))
        updates = ctx.add(ops.EXPAND, ctx.cast(values, x.dtype), shape=tuple(shape[n] for n in turned))
        updates = permute(ctx, updates, [turned.index(n) for n in range(len(shape))])
    else:
        updates = ctx.add(ops.EXPAND, ctx.cast(values, x.dtype), shape=shape)
    written = ctx.add(ops.SCATTER_ND, moved, tuples, updates, reduction="add" if accumulate else "none")
    return written if order == sorted(order) else permute(ctx, written, [order.index(n) for n in range(len(order))])


def _scatter(ctx: Context, x: Value, dim: int, indices: Value, source: Operand, reduce: str | None = None) -> Value:
    if isinstance(source, Value) and source.shape:
        updates = ctx.cast(source, x.dtype)
        for axis, size in enumerate(indices.shape):
            updates = updates if updates.shape[axis] == size else cut(ctx, updates, axis, 0, size)
    else:
        updates = ctx.add(ops.EXPAND, ctx.tensor(source, x.dtype), shape=indices.shape)
    if not x.shape:
        return ctx.add(ops.RESHAPE, updates, shape=())
    combine = {None: "none", "add": "add", "multiply": "mul"}[reduce]
    return ctx.add(ops.SCATTER_ELEMENTS, x, indices, updates, axis=ctx.axis(x, dim), reduction=combine)


def _scatter_reduce(ctx: Context, x: Value, dim: int, indices: Value, source: Value, reduce: str, include_self: bool = True) -> Value:
    if not x.shape or not indices.shape or 0 in indices.shape:
        raise ctx.unsupported("it has no axes, or nothing to scatter")
    axis, source = ctx.axis(x, dim), ctx.cast(source, x.dtype)
    for n, size in enumerate(indices.shape):
        source = source if source.shape[n] == size else cut(ctx, source, n, 0, size)

    def scattered(target: Value, given: Value, how: str) -> Value:
        return ctx.add(ops.SCATTER_ELEMENTS, target, indices, given, axis=axis, reduction=how)

    def filled(value: float, shape: Sequence[Any]) -> Value:
        return ctx.add(FULL, shape=tuple(shape), value=value, dtype=x.dtype)

    low, high = (-math.inf, math.inf) if is_float(x.dtype) else (0, 1) if x.dtype == "bool" else integer_range(x.dtype)
    combine, neutral = {"sum": ("add", 0), "mean": ("add", 0), "prod": ("mul", 1), "amax": ("max", low), "amin": ("min", high)}[reduce]
    start = x if include_self else scattered(x, filled(neutral, indices.shape), "none")
    y = scattered(start, source, combine)
    if reduce != "mean":
        return y
    count = scattered(filled(int(include_self), x.shape), filled(1, indices.shape), "add")
    count = ctx.add(MAX, count, ctx.constant(1, x.dtype))
    if is_float(x.dtype):
        return ctx.add(DIV, y, count)
    return ctx.add(DIV, ctx.add(SUB, y, ctx.add(MOD, y, count)), count)  # rounded down


def _index_reduce(ctx: Context, x: Value, dim: int, indices: Value, source: Value, reduce: str, include_self: bool = True) -> Value:
    if not x.shape:
        one, given = (ctx.add(ops.RESHAPE, v, shape=(1,)) for v in (x, source))
        return ctx.add(ops.RESHAPE, _index_reduce(ctx, one, 0, indices, given, reduce, include_self), shape=())
    indices = indices if indices.shape else ctx.add(ops.RESHAPE, indices, shape=(1,))
    axis = ctx.axis(x, dim)
    spread = ctx.add(ops.RESHAPE, indices, shape=tuple(indices.shape[0] if n == axis else 1 for n in range(len(x.shape))))
    return _scatter_reduce(ctx, x, axis, ctx.add(ops.EXPAND, spread, shape=source.shape), source, reduce, include_self)


def _masked_scatter(ctx: Context, x: Value, mask: Value, source: Value) -> Value:
    """The elements of the source, one after the other, where the mask is true."""
    shape, count, available = tuple(map(ctx.dims, ctx.node.meta["val"].shape)), product(x.shape), product(source.shape)
    if shape != x.shape or 0 in (count, available):
        raise ctx.unsupported("the mask has more axes, or there is nothing to scatter")
    chosen = ctx.add(ops.RESHAPE, ctx.add(ops.EXPAND, mask, shape=shape), shape=(count,))
    place = ctx.add(CUM_SUM, ctx.cast(chosen, "int64"), axis=0, exclusive=True, reverse=False)
    place = ctx.add(MIN, place, ctx.tensor(as_expr(available) - 1, "int64"))
    found = ctx.add(ops.GATHER, ctx.add(ops.RESHAPE, source, shape=(available,)), place, axis=0)
    return ctx.add(WHERE, ctx.add(ops.RESHAPE, chosen, shape=shape), ctx.add(ops.RESHAPE, found, shape=shape), x)


def _kth(ctx: Context, x: Value, k: Any, dim: int, keepdim: bool) -> tuple[Value, ...]:
    """The k-th smallest element along an axis, counted from 0, and where it is."""
    if not x.shape:
        return x, ctx.constant(0, "int64")
    axis = ctx.axis(x, dim)
    found = (cut(ctx, v, axis, k, 1) for v in ctx.results(ops.TOP_K, x, k=x.shape[axis], axis=axis, largest=False))
    shape = tuple(d for n, d in enumerate(x.shape) if n != axis)
    return tuple(v if keepdim else ctx.add(ops.RESHAPE, v, shape=shape) for v in found)


def _median(ctx: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower of two medians; NaN, where the first one is, if there is one."""
    if dim is None:
        return _median(ctx, ctx.add(ops.RESHAPE, x, shape=(product(x.shape),)), 0)[0]
    if not x.shape:
        return x, ctx.constant(0, "int64")
    axis = ctx.axis(x, dim)
    value, place = _kth(ctx, x, as_dim((as_expr(x.shape[axis]) - 1) // 2), axis, keepdim)
    if not is_float(x.dtype):
        return value, place
    unknown = ctx.cast(ctx.add(ISNAN, x), "int32")
    some = ctx.cast(ctx.add(REDUCE_MAX, unknown, axes=(axis,), keepdims=keepdim), "bool")
    first = ctx.add(ARG_MAX, unknown, axis=axis, keepdims=keepdim, last=False)
    return ctx.add(WHERE, some, ctx.constant(math.nan, x.dtype), value), ctx.add(WHERE, some, first, place)


def _searchsorted(
    ctx: Context, edges: Value, x: Operand, out_int32: bool = False, right: bool = False, *, side: str | None = None, sorter: Any = None
) -> Value:
    """How many edges are below: more comparisons than needed, but these are vectorized."""
    if sorter is not None or not isinstance(x, Value) or edges.dtype != x.dtype:
        raise ctx.unsupported("edges are given by their order or in another type, or there is but a number")
    last = ctx.add(ops.RESHAPE, x, shape=(*x.shape, 1))
    rows = edges if len(edges.shape) == 1 else ctx.add(ops.RESHAPE, edges, shape=(*edges.shape[:-1], 1, edges.shape[-1]))
    below = ctx.add(LESS_EQUAL if right or side == "right" else LESS, rows, last)
    if is_float(x.dtype):  # NaN is above all
        below = ctx.add(OR, below, ctx.add(ISNAN, last))
    return ctx.add(REDUCE_SUM, ctx.cast(below, "int64"), axes=(len(x.shape),), keepdims=False)


def _embedding_backward(ctx: Context, grad: Value, indices: Value, count: int, padding: int, by_frequency: bool) -> Value:
    if by_frequency:
        raise ctx.unsupported("gradients are scaled by frequency")
    if padding >= 0:
        kept = ctx.add(NOT, ctx.add(EQUAL, indices, ctx.constant(padding, indices.dtype)))
        kept = ctx.add(ops.RESHAPE, kept, shape=(*indices.shape, 1))
        grad = ctx.add(WHERE, kept, grad, ctx.constant(0, grad.dtype))
    zeros = ctx.constant(0, grad.dtype, (int(count), int(grad.shape[-1])))
    tuples = ctx.add(ops.RESHAPE, indices, shape=(*indices.shape, 1))
    return ctx.add(ops.SCATTER_ND, zeros, tuples, grad, reduction="add")


def _sort(ctx: Context, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, ...]:
    if not x.shape:
        return x, ctx.constant(0, "int64")
    axis = ctx.axis(x, dim)
    return ctx.results(ops.TOP_K, x, k=x.shape[axis], axis=axis, largest=descending)


def _stable_sort(ctx: Context, x: Value, *args: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    return _sort(ctx, x, *args) if args else _sort(ctx, x, dim, descending)


def _topk(ctx: Context, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, ...]:
    return ctx.results(ops.TOP_K, x, k=as_expr(k) if not isinstance(k, int) else k, axis=ctx.axis(x, dim), largest=largest)


TABLE: Table = {
    aten.index_select: _index_select, aten.index: _index, aten.nonzero: _nonzero, aten.masked_select: _masked_select,
    aten.index_put: _index_put,
    aten.scatter: _scatter, aten.scatter_reduce: _scatter_reduce, aten.embedding_dense_backward: _embedding_backward,
    aten.scatter_add: lambda ctx, x, dim, indices, source: _scatter(ctx, x, dim, indices, source, "add"),
    aten.index_reduce: _index_reduce, aten.masked_scatter: _masked_scatter, aten.median: _median, aten.searchsorted: _searchsorted,
    aten.kthvalue: lambda ctx, x, k, dim=-1, keepdim=False: _kth(ctx, x, k - 1, dim, keepdim),
    aten.sort: _stable_sort, aten.topk: _topk,
    aten.embedding: lambda ctx, weight, indices, *rest: ctx.add(ops.GATHER, weight, indices, axis=0),
    aten.gather: lambda ctx, x, dim, indices, sparse_grad=False: ctx.add(ops.GATHER_ELEMENTS, x, indices, axis=ctx.axis(x, dim)),
}  # fmt: skip
