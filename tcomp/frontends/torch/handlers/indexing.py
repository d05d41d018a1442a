"""ATen operators that read and write at positions which data tells, and sort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tcomp.frontends.torch.context import Context, Operand, Table
from tcomp.frontends.torch.handlers.movement import cut, permute
from tcomp.ir.broadcasting import broadcast_shape
from tcomp.ir.expr import as_expr
from tcomp.ir.graph import Value
from tcomp.ops import movement as ops
from tcomp.ops.elementwise import EQUAL, NOT, WHERE

aten = torch.ops.aten


def _embedding(ctx: Context, weight: Value, indices: Value, *rest: Any) -> Value:
    return ctx.add(ops.GATHER, weight, indices, axis=0)


def _index_select(ctx: Context, x: Value, dim: int, indices: Value) -> Value:
    return ctx.add(ops.GATHER, x, indices, axis=ctx.axis(x, dim))


def _gather(ctx: Context, x: Value, dim: int, indices: Value, sparse_grad: bool = False) -> Value:
    return ctx.add(ops.GATHER_ELEMENTS, x, indices, axis=ctx.axis(x, dim))


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


def _index(ctx: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    """The axes of the indices stand where the indexed axes were if these are neighbours, else in front, as in NumPy."""
    moved, tuples, order = _placed(ctx, x, indices)
    y, width, count = ctx.add(ops.GATHER_ND, moved, tuples, batch_dims=0), int(tuples.shape[-1]), len(tuples.shape) - 1
    axes = order[:width]
    if axes[0] == 0 or axes != list(range(axes[0], axes[0] + width)):
        return y
    before = list(range(count, count + axes[0]))
    return permute(ctx, y, [*before, *range(count), *range(count + axes[0], len(y.shape))])


def _index_put(ctx: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == "bool" and values.shape in ((), (1,)) and not accumulate:
        mask = indices[0]
        wide = ctx.add(ops.RESHAPE, mask, shape=(*mask.shape, *[1] * (len(x.shape) - len(mask.shape))))
        return ctx.add(WHERE, wide, ctx.cast(values, x.dtype), x)
    moved, tuples, order = _placed(ctx, x, indices)
    axes = order[: int(tuples.shape[-1])]
    if axes != list(range(len(axes))):
        raise ctx.unsupported("axes that are not the first are written at indices")
    shape = (*tuples.shape[:-1], *moved.shape[len(axes) :])
    updates = ctx.add(ops.EXPAND, ctx.cast(values, x.dtype), shape=shape)
    return ctx.add(ops.SCATTER_ND, moved, tuples, updates, reduction="add" if accumulate else "none")


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
    combine = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}.get(reduce)
    if combine is None or not include_self:
        raise ctx.unsupported(f"it reduces by `{reduce}`{'' if include_self else ' without the elements that were there'}")
    return ctx.add(ops.SCATTER_ELEMENTS, x, indices, ctx.cast(source, x.dtype), axis=ctx.axis(x, dim), reduction=combine)


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
    aten.embedding: _embedding, aten.index_select: _index_select, aten.gather: _gather, aten.index: _index, aten.index_put: _index_put,
    aten.scatter: _scatter, aten.scatter_reduce: _scatter_reduce, aten.embedding_dense_backward: _embedding_backward,
    aten.scatter_add: lambda ctx, x, dim, indices, source: _scatter(ctx, x, dim, indices, source, "add"),
    aten.sort: _stable_sort, aten.topk: _topk,
}  # fmt: skip
