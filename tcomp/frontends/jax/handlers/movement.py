"""Primitives that move elements, or make them of nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tcomp.frontends.jax.context import Context, Table
from tcomp.ir.expr import Dim, as_expr
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import movement as ops, xla

Ints = Sequence[int]


def cut(ctx: Context, x: Value, start_indices: Sequence[Dim], limit_indices: Sequence[Dim], strides: Ints | None = None) -> Value:
    """x[start:limit:stride] along each axis."""
    steps = [1] * len(x.shape) if strides is None else strides
    starts, limits = ctx.dims(start_indices), ctx.dims(limit_indices)
    shape = tuple(as_dim((as_expr(b) - a + (int(s) - 1)) // int(s)) for a, b, s in zip(starts, limits, steps, strict=True))
    shape = tuple(max(d, 0) if isinstance(d, int) else d for d in shape)
    return ctx.add(ops.SLICE, x, starts=starts, steps=tuple(map(int, steps)), shape=shape)


def _broadcast(ctx: Context, x: Value, *rest: Any, broadcast_dimensions: Ints, **params: Any) -> Value:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return ctx.expand(ctx.reshape(x, [sizes.get(n, 1) for n in range(len(ctx.shape))]), ctx.shape)


def _reshape(ctx: Context, x: Value, *rest: Any, dimensions: Ints | None = None, **params: Any) -> Value:
    return ctx.reshape(x if dimensions is None else ctx.transpose(x, dimensions), ctx.shape)


def _concatenate(ctx: Context, *xs: Value, dimension: int) -> Value:
    return ctx.add(ops.CONCAT, *xs, axis=dimension) if len(xs) > 1 else xs[0]


def _stack(ctx: Context, *xs: Value, axis: int) -> Value:
    shape = xs[0].shape
    return _concatenate(ctx, *(ctx.reshape(x, [*shape[:axis], 1, *shape[axis:]]) for x in xs), dimension=axis)


def _split(ctx: Context, x: Value, sizes: Ints, axis: int) -> list[Value]:
    ends = [int(n) for n in accumulate(sizes)]
    return [ctx.cut(x, axis, end - int(size), int(size)) for end, size in zip(ends, sizes, strict=True)]


def _unstack(ctx: Context, x: Value, axis: int) -> list[Value]:
    pieces = _split(ctx, x, [1] * int(x.shape[axis]), axis)
    return [ctx.reshape(p, (*p.shape[:axis], *p.shape[axis + 1 :])) for p in pieces]


def padded(ctx: Context, x: Value, value: Value, padding_config: Sequence[tuple[int, int, int]]) -> Value:
    """With elements before, after (negative: cut off) and between those along each axis."""
    if any(inside for _, _, inside in padding_config):
        x = ctx.add(xla.DILATE, x, value, steps=tuple(int(inside) + 1 for _, _, inside in padding_config))
    before, after = (tuple(int(c[n]) for c in padding_config) for n in (0, 1))
    if not any(before) and not any(after):
        return x
    return ctx.add(ops.PAD, x, value, before=before, after=after, mode="constant")


def places(ctx: Context, shape: Sequence[Dim], axis: int, dtype: str) -> Value:
    """The place of each element along an axis."""
    along = ctx.add(ops.ARANGE, start=0, step=1, count=shape[axis], dtype=dtype)
    return ctx.expand(ctx.reshape(along, [d if n == axis else 1 for n, d in enumerate(shape)]), shape)


def _empty(ctx: Context, *rest: Any, **params: Any) -> Value:
    return ctx.full(0, ctx.dtype, ctx.shape)


def _shaped(ctx: Context, x: Value, **params: Any) -> Value:
    return ctx.reshape(x, ctx.shape)


TABLE: Table = {
    "broadcast_in_dim": _broadcast, "reshape": _reshape, "squeeze": _shaped, "expand_dims": _shaped, "slice": cut,
    "concatenate": _concatenate, "stack": _stack, "split": _split, "unstack": _unstack, "pad": padded, "empty": _empty, "empty2": _empty,
    "rev": lambda ctx, x, dimensions: ctx.reversed(x, dimensions),
    "dim_as_value": lambda ctx, dim: ctx.add(ops.DIMS, dims=ctx.dims([dim]), shape=(), dtype=ctx.dtype),
    "iota": lambda ctx, *sizes, dimension, **params: places(ctx, ctx.shape, dimension, ctx.dtype),
    "tile": lambda ctx, x, reps: ctx.add(ops.TILE, x, repeats=tuple(map(int, reps))),
}  # fmt: skip
