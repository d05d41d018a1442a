"""ATen operators that read and write at positions which data tells, and sort."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tcomp.frontends.torch.context import Context, Operand, Table
from tcomp.ir.broadcasting import broadcast_shape
from tcomp.ir.expr import as_expr
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import movement as ops
from tcomp.ops.counting import POSITIONS, UNRAVELLED
from tcomp.ops.elementwise import WHERE
from tcomp.ops.movement import product

aten = torch.ops.aten


def _index_select(ctx: Context, x: Value, dim: int, indices: Value) -> Value:
    return ctx.add(ops.GATHER, x, indices if indices.shape else ctx.reshape(indices, (1,)), axis=ctx.axis(x, dim)) if x.shape else x


def _gather(ctx: Context, x: Value, dim: int, indices: Value, sparse_grad: bool = False) -> Value:
    if not x.shape:
        return ctx.expand(x, ctx.shape)
    return ctx.add(ops.GATHER_ELEMENTS, x, indices, axis=ctx.axis(x, dim))


def _mask_of(x: Value, indices: Sequence[Value | None]) -> tuple[Value | None, int]:
    """A mask that is the only index, and the axis that it begins at."""
    given = [(i, n) for n, i in enumerate(indices) if i is not None]
    return given[0] if len(given) == 1 and given[0][0].dtype == "bool" else (None, 0)


def _placed(ctx: Context, x: Value, indices: Sequence[Value | None]) -> tuple[Value, Value, list[int]]:
    """(`x` with the indexed axes first, index tuples, the order of its axes)."""
    given = {n: i for n, i in enumerate(indices) if i is not None}
    if any(i.dtype == "bool" for i in given.values()):
        raise ctx.unsupported("an index is a mask")
    shape = broadcast_shape(*(i.shape for i in given.values()))
    columns = [ctx.reshape(ctx.expand(ctx.cast(i, "int64"), shape), (*shape, 1)) for i in given.values()]
    tuples = ctx.add(ops.CONCAT, *columns, axis=len(shape)) if len(columns) > 1 else columns[0]
    order = [*given, *(n for n in range(len(x.shape)) if n not in given)]
    return ctx.transpose(x, order), tuples, order


def _stay(axes: Sequence[int]) -> bool:
    """Whether the axes of indices stand where the indexed axes were, since these are neighbours behind others, as in NumPy."""
    return axes[0] > 0 and list(axes) == list(range(axes[0], axes[0] + len(axes)))


def _nonzero(ctx: Context, x: Value) -> Value:
    if not x.shape:
        raise ctx.unsupported("it has no axes")
    places, count = ctx.positions(x, ctx.result.shape[0])
    return ctx.transpose(ctx.add(UNRAVELLED, places, shape=x.shape, count=count), (1, 0))


def _masked(ctx: Context, x: Value, mask: Value, axis: int) -> Value:
    """The parts of `x` along the axes of the mask, from `axis` on, where that is true."""
    end = axis + len(mask.shape)
    flat = ctx.reshape(x, (*x.shape[:axis], product(x.shape[axis:end]), *x.shape[end:]))
    places, count = ctx.positions(mask, ctx.result.shape[axis])
    return ctx.add(ops.GATHER, flat, ctx.cut(places, 0, 0, count), axis=axis)


def _masked_select(ctx: Context, x: Value, mask: Value) -> Value:
    shape = broadcast_shape(x.shape, mask.shape) or (1,)
    return _masked(ctx, ctx.expand(x, shape), ctx.expand(mask, shape), 0)


def _index(ctx: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    mask, axis = _mask_of(x, indices)
    if mask is not None and mask.shape:
        return _masked(ctx, x, mask, axis)
    moved, tuples, order = _placed(ctx, x, indices)
    y, width, count = ctx.add(ops.GATHER_ND, moved, tuples, batch_dims=0), int(tuples.shape[-1]), len(tuples.shape) - 1
    before = order[0] if _stay(order[:width]) else 0
    return ctx.transpose(y, [*range(count, count + before), *range(count), *range(count + before, len(y.shape))])


def _put_masked(ctx: Context, x: Value, mask: Value, values: Value, accumulate: bool) -> Value:
    """`x` with values, one after the other, where a mask of its first axes is true; there are as many as that."""
    rest = x.shape[len(mask.shape) :]
    if values.shape in ((), (1,)) and not accumulate:
        return ctx.add(WHERE, ctx.reshape(mask, (*mask.shape, *[1] * len(rest))), values, x)
    if 0 in x.shape or len(values.shape) != 1 + len(rest) or values.shape[1:] != rest:
        raise ctx.unsupported("an index is a mask, and values are broadcast, or there are none")
    at = ctx.reshape(ctx.cut(ctx.results(POSITIONS, mask)[0], 0, 0, values.shape[0]), (values.shape[0], 1))
    flat = ctx.reshape(x, (product(mask.shape), *rest))
    return ctx.reshape(ctx.add(ops.SCATTER_ND, flat, at, values, reduction="add" if accumulate else "none"), x.shape)


def _index_put(ctx: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    mask, axis = _mask_of(x, indices)
    values = ctx.cast(values, x.dtype)
    if mask is not None and axis == 0:
        return _put_masked(ctx, x, mask, values, accumulate)
    moved, tuples, order = _placed(ctx, x, indices)
    width, count = int(tuples.shape[-1]), len(tuples.shape) - 1
    shape, before = (*tuples.shape[:-1], *moved.shape[width:]), order[0] if _stay(order[:width]) else 0
    turned = (*range(count, count + before), *range(count), *range(count + before, len(shape)))  # as values have their axes
    updates = ctx.transpose(ctx.expand(values, [shape[n] for n in turned]), [turned.index(n) for n in range(len(shape))])
    written = ctx.add(ops.SCATTER_ND, moved, tuples, updates, reduction="add" if accumulate else "none")
    return ctx.transpose(written, [order.index(n) for n in range(len(order))])


COMBINED = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min", None: "none"}


def _scatter(ctx: Context, x: Value, dim: int, indices: Value, source: Operand, reduce: str | None = None, *rest: Any) -> Value:
    if not x.shape:
        whole, at, given = (ctx.reshape(v, (1,)) for v in (x, indices, ctx.tensor(source, x.dtype)))
        return ctx.reshape(_scatter(ctx, whole, 0, at, given, reduce), ())
    updates = ctx.tensor(source, x.dtype)
    for axis, size in enumerate(indices.shape if updates.shape else ()):
        updates = updates if updates.shape[axis] == size else ctx.cut(updates, axis, 0, size)
    updates = ctx.expand(updates, indices.shape)
    return ctx.add(ops.SCATTER_ELEMENTS, x, indices, updates, axis=ctx.axis(x, dim), reduction=COMBINED[reduce])


def _kth(ctx: Context, x: Value, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Value, ...]:
    """The k-th smallest element along an axis, counted from 1, and where it is."""
    if not x.shape:
        return x, ctx.number(0, "int64")
    axis = ctx.axis(x, dim)
    found = ctx.results(ops.TOP_K, x, k=x.shape[axis], axis=axis, largest=False)
    return tuple(ctx.reshape(ctx.cut(v, axis, as_dim(as_expr(k) - 1), 1), ctx.shape) for v in found)


def _sort(ctx: Context, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, ...]:
    if not x.shape:
        return x, ctx.number(0, "int64")
    axis = ctx.axis(x, dim)
    return ctx.results(ops.TOP_K, x, k=x.shape[axis], axis=axis, largest=descending)


def _stable_sort(ctx: Context, x: Value, *args: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    return _sort(ctx, x, *args) if args else _sort(ctx, x, dim, descending)


def _topk(ctx: Context, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, ...]:
    return ctx.results(ops.TOP_K, x, k=k, axis=ctx.axis(x, dim), largest=largest)


TABLE: Table = {
    aten.index_select: _index_select, aten.index: _index, aten.nonzero: _nonzero, aten.masked_select: _masked_select,
    aten.index_put: _index_put, aten.scatter: _scatter, aten.scatter_add: partial(_scatter, reduce="add"), aten.scatter_reduce: _scatter,
    aten.kthvalue: _kth, aten.sort: _stable_sort, aten.topk: _topk,
    aten.embedding: lambda ctx, weight, indices, *rest: ctx.add(ops.GATHER, weight, indices, axis=0),
    aten.gather: _gather,
}  # fmt: skip
