"""ATen operators that move elements, or make them of nothing. Shapes of results are those that PyTorch has found (`meta["val"]`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from tcomp.frontends.torch.context import Context, Operand, Table, dtype_name
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_expr, maximum, minimum
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import movement as ops
from tcomp.ops.elementwise import ADD, FULL, MUL

aten = torch.ops.aten


def result_shape(ctx: Context) -> tuple[Dim, ...]:
    """The shape that PyTorch says the result has."""
    return tuple(map(ctx.dims, ctx.node.meta["val"].shape))


def same(ctx: Context, x: Value, *rest: Any, **others: Any) -> Value:
    """The value itself: memory is not shared between values."""
    return x


def reshape(ctx: Context, x: Value, *rest: Any) -> Value:
    """Another shape of the same elements."""
    shape = result_shape(ctx)
    return x if shape == x.shape else ctx.add(ops.RESHAPE, x, shape=shape)


def permute(ctx: Context, x: Value, axes: Sequence[int]) -> Value:
    """Axes in another order."""
    return ctx.add(ops.TRANSPOSE, x, perm=ctx.axes(x, axes)) if len(axes) > 1 else x


def _expand(ctx: Context, x: Value, *rest: Any, **others: Any) -> Value:
    return ctx.add(ops.EXPAND, x, shape=result_shape(ctx))


def cut(ctx: Context, x: Value, axis: int, start: Dim, count: Dim, step: int = 1) -> Value:
    """`count` elements along an axis."""
    others: list[Dim] = [0] * len(x.shape)
    steps, shape = [1] * len(x.shape), [*x.shape]
    others[axis], steps[axis], shape[axis] = start, step, count
    return ctx.add(ops.SLICE, x, starts=tuple(others), steps=tuple(steps), shape=tuple(shape))


def start_of(ctx: Context, x: Value, axis: int, start: int | Expr | None) -> Dim:
    """Where a slice begins, with negative numbers counted from the end, kept inside."""
    size, begin = as_expr(x.shape[axis]), as_expr(0 if start is None else start)
    begin = begin + size if isinstance(start, int) and start < 0 else begin
    return as_dim(maximum(minimum(begin, size), 0))


def _slice(ctx: Context, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    axis = ctx.axis(x, dim)
    count = result_shape(ctx)[axis]
    return x if count == x.shape[axis] and step == 1 else cut(ctx, x, axis, 0 if count == 0 else start_of(ctx, x, axis, start), count, step)


def _select(ctx: Context, x: Value, dim: int, index: Any) -> Value:
    axis = ctx.axis(x, dim)
    return reshape(ctx, cut(ctx, x, axis, start_of(ctx, x, axis, index), 1))


def _joined(ctx: Context, x: Value, part: Value, axis: int, start: Dim, count: Dim) -> Value:
    """`x` with `count` elements along an axis, from `start` on, replaced by those of `part`."""
    after = as_dim(as_expr(start) + count)
    rest = as_dim(as_expr(x.shape[axis]) - after)
    parts = [cut(ctx, x, axis, 0, start), ctx.cast(part, x.dtype), cut(ctx, x, axis, after, rest)]
    return ctx.add(ops.CONCAT, *(p for p in parts if p.shape[axis] != 0), axis=axis)


def _slice_scatter(ctx: Context, x: Value, part: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    if step != 1:
        raise ctx.unsupported("its step is not 1")
    axis = ctx.axis(x, dim)
    return _joined(ctx, x, part, axis, start_of(ctx, x, axis, start), part.shape[axis])


def _select_scatter(ctx: Context, x: Value, part: Value, dim: int, index: Any) -> Value:
    axis = ctx.axis(x, dim)
    part = ctx.add(ops.RESHAPE, part, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return _joined(ctx, x, part, axis, start_of(ctx, x, axis, index), 1)


def _cat(ctx: Context, parts: Sequence[Value], dim: int = 0) -> Value:
    dtype = dtype_name(ctx.node.meta["val"].dtype)
    kept = [ctx.cast(p, dtype) for p in parts if p.shape != (0,)] or [ctx.cast(parts[0], dtype)]  # vectors of no elements fit anything
    return ctx.add(ops.CONCAT, *kept, axis=ctx.axis(kept[0], dim)) if len(kept) > 1 else kept[0]


def _pad(ctx: Context, x: Value, pads: Sequence[int], value: float = 0) -> Value:
    before, after = [0] * len(x.shape), [0] * len(x.shape)
    for n in range(len(pads) // 2):
        before[-1 - n], after[-1 - n] = pads[2 * n], pads[2 * n + 1]
    return ctx.add(ops.PAD, x, ctx.constant(value, x.dtype), before=tuple(before), after=tuple(after), mode="constant")


def _repeat(ctx: Context, x: Value, repeats: Sequence[int]) -> Value:
    x = ctx.add(ops.RESHAPE, x, shape=(*[1] * (len(repeats) - len(x.shape)), *x.shape)) if len(repeats) > len(x.shape) else x
    return ctx.add(ops.TILE, x, repeats=tuple(repeats))


def _triangle(upper: bool, ctx: Context, x: Value, diagonal: int = 0) -> Value:
    return ctx.add(ops.TRILU, x, None, diagonal=diagonal, upper=upper)


def _full(ctx: Context, size: Any, value: Operand, **others: Any) -> Value:
    dtype, shape = dtype_name(ctx.node.meta["val"].dtype), result_shape(ctx)
    if isinstance(value, Expr):
        return ctx.add(ops.EXPAND, ctx.tensor(value, dtype), shape=shape)
    assert not isinstance(value, Value)
    number = bool(value) if dtype == "bool" else float(value) if is_float(dtype) else int(value)
    return ctx.add(FULL, shape=shape, value=number, dtype=dtype)


def _arange(ctx: Context, *numbers: Any, **others: Any) -> Value:
    """Of (end), (start, end) or (start, end, step)."""
    start, step = numbers[0] if len(numbers) > 1 else 0, numbers[2] if len(numbers) > 2 else 1
    dtype, (count,) = dtype_name(ctx.node.meta["val"].dtype), result_shape(ctx)
    if not any(isinstance(n, float) for n in (start, step)):
        return ctx.add(ops.ARANGE, start=start, step=step, count=count, dtype=dtype)
    places = ctx.add(ops.ARANGE, start=0, step=1, count=count, dtype="float64")
    scaled = ctx.add(MUL, places, ctx.constant(step, "float64"))
    return ctx.cast(ctx.add(ADD, scaled, ctx.constant(start, "float64")), dtype)


def _unfold(ctx: Context, x: Value, dim: int, size: int, step: int) -> Value:
    if not x.shape:
        return ctx.add(ops.RESHAPE, x, shape=(1,))
    axis = ctx.axis(x, dim)
    count = result_shape(ctx)[axis]
    if not isinstance(count, int):
        raise ctx.unsupported("the number of windows is symbolic")
    places = ctx.constant(np.arange(count)[:, None] * step + np.arange(size), "int64")
    windows = ctx.add(ops.GATHER, x, places, axis=axis)
    rest = [n for n in range(len(windows.shape)) if n != axis + 1]
    return permute(ctx, windows, [*rest, axis + 1])


def _lies_in(tensor: Any, memory: torch.UntypedStorage) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata == memory._cdata


def _as_strided(ctx: Context, x: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Value:
    """Elements of the memory in which the tensor lies: that of the tensor of which it is a view, which has to be all of the memory."""
    view = whole = ctx.node.args[0]
    memory = view.meta["val"].untyped_storage()
    while whole.op == "call_function" and isinstance(source := whole.args[0], Node) and _lies_in(source.meta.get("val"), memory):
        whole = source
    base, stored = whole.meta["val"], ctx.values.get(whole)
    fixed = all(isinstance(n, int) for n in (*base.shape, *base.stride(), *size, *stride, offset or 0))
    if not fixed or not isinstance(stored, Value) or base.storage_offset() or memory.nbytes() != base.nbytes:
        raise ctx.unsupported("it reads memory beyond the tensor, or sizes are symbolic")
    places = sum(
        (np.arange(n).reshape(-1, *[1] * (len(size) - k - 1)) * s for k, (n, s) in enumerate(zip(size, stride, strict=True))),
        np.asarray(view.meta["val"].storage_offset() if offset is None else offset),
    )
    in_order = permute(ctx, stored, sorted(range(base.ndim), key=lambda n: (-base.stride(n), base.shape[n] > 1)))  # as in memory
    flat = ctx.add(ops.RESHAPE, in_order, shape=(base.numel(),))
    return ctx.add(ops.GATHER, flat, ctx.constant(np.broadcast_to(places, tuple(size)), "int64"), axis=0)


def _split(ctx: Context, x: Value, sizes: Sequence[Any], dim: int = 0) -> tuple[Value, ...]:
    axis, parts, start = ctx.axis(x, dim), list[Value](), as_expr(0)
    for size in sizes:
        parts.append(cut(ctx, x, axis, as_dim(start), size))
        start = start + size
    return tuple(parts)


def _diagonal(ctx: Context, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    rows, columns = ctx.axis(x, dim1), ctx.axis(x, dim2)
    if not (isinstance(x.shape[rows], int) and isinstance(x.shape[columns], int)):
        raise ctx.unsupported("a matrix has a symbolic size")
    rest = [n for n in range(len(x.shape)) if n not in (rows, columns)]
    x = ctx.add(ops.TRANSPOSE, x, perm=(*rest, rows, columns))
    *_, m, n = x.shape
    count = result_shape(ctx)[-1]
    first = as_dim(as_expr(-offset) * n if offset < 0 else as_expr(offset))
    flat = ctx.add(ops.RESHAPE, x, shape=(*x.shape[:-2], as_dim(as_expr(m) * n)))
    return cut(ctx, flat, len(rest), first, count, int(n) + 1 if isinstance(n, int) else 1)


TABLE: Table = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.view_copy), reshape),
    **dict.fromkeys((aten.unsqueeze_copy, aten.squeeze_copy, aten.alias_copy), reshape),
    **dict.fromkeys((aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy), same),
    aten.copy: lambda ctx, x, y, non_blocking=False: ctx.add(ops.EXPAND, ctx.cast(y, x.dtype), shape=x.shape),
    aten.permute: permute, aten.permute_copy: permute, aten.expand_copy: _expand, aten.unfold: _unfold, aten.as_strided: _as_strided,
    aten.expand: _expand, aten.slice: _slice, aten.select: _select, aten.cat: _cat,
    aten.constant_pad_nd: _pad, aten.repeat: _repeat, aten.tril: partial(_triangle, False),
    aten.triu: partial(_triangle, True), aten.full: _full, aten.arange: _arange, aten.diagonal: _diagonal,
    aten.full_like: lambda ctx, x, value, **others: _full(ctx, None, value),
    **dict.fromkeys((aten.empty, aten.empty_like, aten.zeros, aten.zeros_like), lambda ctx, *given, **others: _full(ctx, None, 0)),
    **dict.fromkeys((aten.ones, aten.ones_like), lambda ctx, *given, **others: _full(ctx, None, 1)),
    aten.split_with_sizes: _split, aten.slice_scatter: _slice_scatter, aten.select_scatter: _select_scatter,
    aten.t: lambda ctx, x: permute(ctx, x, (1, 0)) if len(x.shape) == 2 else x,
    aten.flip: lambda ctx, x, dims: ctx.flip(x, tuple(sorted(ctx.axes(x, dims)))) if dims and x.shape else x,
    aten.scalar_tensor: lambda ctx, value, **others: ctx.tensor(value, dtype_name(ctx.node.meta["val"].dtype)),
}  # fmt: skip
