"""ATen operators that move elements, or make them of nothing. Shapes of results are those that PyTorch has found (`meta["val"]`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from tcomp.frontends.torch.context import Context, Operand, Table
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_expr, maximum, minimum
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import movement as ops

aten = torch.ops.aten


def _shaped(ctx: Context, x: Value, *rest: Any) -> Value:
    return ctx.reshape(x, ctx.shape)


def _same(ctx: Context, x: Value, *rest: Any, **others: Any) -> Value:
    """The value itself: memory is not shared between values."""
    return x


def _permute(ctx: Context, x: Value, axes: Sequence[int]) -> Value:
    return ctx.transpose(x, ctx.axes(x, axes))


def _expand(ctx: Context, x: Value, *rest: Any, **others: Any) -> Value:
    return ctx.expand(x, ctx.shape)


def _start(x: Value, axis: int, start: int | Expr | None) -> Dim:
    """Where a slice begins, with negative numbers counted from the end, kept inside."""
    size, begin = as_expr(x.shape[axis]), as_expr(0 if start is None else start)
    begin = begin + size if isinstance(start, int) and start < 0 else begin
    return as_dim(maximum(minimum(begin, size), 0))


def _slice(ctx: Context, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    axis = ctx.axis(x, dim)
    count = ctx.shape[axis]
    return x if count == x.shape[axis] and step == 1 else ctx.cut(x, axis, 0 if count == 0 else _start(x, axis, start), count, step)


def _select(ctx: Context, x: Value, dim: int, index: Any) -> Value:
    axis = ctx.axis(x, dim)
    return ctx.reshape(ctx.cut(x, axis, _start(x, axis, index), 1), ctx.shape)


def _cat(ctx: Context, parts: Sequence[Value], dim: int = 0) -> Value:
    kept = [ctx.cast(p, ctx.dtype) for p in parts if p.shape != (0,)] or [ctx.cast(parts[0], ctx.dtype)]  # no elements fit anything
    return ctx.add(ops.CONCAT, *kept, axis=ctx.axis(kept[0], dim)) if len(kept) > 1 else kept[0]


def _pad(ctx: Context, x: Value, pads: Sequence[int], value: float = 0) -> Value:
    before, after = ([0] * (len(x.shape) - len(pads) // 2) + list(pads[n::2])[::-1] for n in (0, 1))
    return ctx.add(ops.PAD, x, ctx.number(value, x.dtype), before=tuple(before), after=tuple(after), mode="constant")


def _repeat(ctx: Context, x: Value, repeats: Sequence[int]) -> Value:
    return ctx.add(ops.TILE, ctx.reshape(x, (*[1] * (len(repeats) - len(x.shape)), *x.shape)), repeats=tuple(repeats))


def _triangle(upper: bool, ctx: Context, x: Value, diagonal: int = 0) -> Value:
    return ctx.add(ops.TRILU, x, None, diagonal=diagonal, upper=upper)


def _full(ctx: Context, size: Any, value: Operand, **others: Any) -> Value:
    if isinstance(value, Expr):
        return ctx.expand(ctx.tensor(value, ctx.dtype), ctx.shape)
    assert not isinstance(value, Value)
    return ctx.full((bool if ctx.dtype == "bool" else float if is_float(ctx.dtype) else int)(value), ctx.dtype, ctx.shape)


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
    in_order = ctx.transpose(stored, sorted(range(base.ndim), key=lambda n: (-base.stride(n), base.shape[n] > 1)))  # as in memory
    return ctx.add(ops.GATHER, ctx.reshape(in_order, (base.numel(),)), ctx.number(np.broadcast_to(places, tuple(size)), "int64"), axis=0)


def _split(ctx: Context, x: Value, sizes: Sequence[Any], dim: int = 0) -> tuple[Value, ...]:
    axis, starts = ctx.axis(x, dim), accumulate(sizes, lambda start, size: as_expr(start) + size, initial=as_expr(0))
    return tuple(ctx.cut(x, axis, as_dim(start), size) for start, size in zip(starts, sizes, strict=False))


def _diagonal(ctx: Context, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    rows, columns = ctx.axis(x, dim1), ctx.axis(x, dim2)
    if not (isinstance(x.shape[rows], int) and isinstance(x.shape[columns], int)):
        raise ctx.unsupported("a matrix has a symbolic size")
    rest = [n for n in range(len(x.shape)) if n not in (rows, columns)]
    *batch, m, n = (x.shape[axis] for axis in (*rest, rows, columns))
    flat = ctx.reshape(ctx.transpose(x, [*rest, rows, columns]), (*batch, int(m) * int(n)))
    return ctx.cut(flat, len(rest), -offset * int(n) if offset < 0 else offset, ctx.shape[-1], int(n) + 1)


TABLE: Table = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.view_copy), _shaped),
    **dict.fromkeys((aten.unsqueeze_copy, aten.squeeze_copy, aten.alias_copy), _shaped),
    **dict.fromkeys((aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy), _same),
    **dict.fromkeys((aten.permute, aten.permute_copy), _permute), **dict.fromkeys((aten.expand, aten.expand_copy), _expand),
    **dict.fromkeys((aten.empty, aten.empty_like, aten.zeros, aten.zeros_like), lambda ctx, *given, **others: _full(ctx, None, 0)),
    **dict.fromkeys((aten.ones, aten.ones_like), lambda ctx, *given, **others: _full(ctx, None, 1)),
    **dict.fromkeys((aten.full, aten.full_like), _full),
    aten.copy: lambda ctx, x, y, non_blocking=False: ctx.expand(ctx.cast(y, x.dtype), x.shape),
    aten.as_strided: _as_strided, aten.slice: _slice, aten.select: _select, aten.cat: _cat,
    aten.constant_pad_nd: _pad, aten.repeat: _repeat, aten.tril: partial(_triangle, False), aten.triu: partial(_triangle, True),
    aten.diagonal: _diagonal, aten.split_with_sizes: _split,
    "prims.iota": lambda ctx, count, *, start, step, **others: ctx.add(
        ops.ARANGE, start=start, step=step, count=ctx.shape[0], dtype=ctx.dtype),
    aten.flip: lambda ctx, x, dims: ctx.flip(x, tuple(sorted(ctx.axes(x, dims)))) if dims and x.shape else x,
    aten.scalar_tensor: lambda ctx, value, **others: ctx.tensor(value, ctx.dtype),
}  # fmt: skip
