"""Primitives that read and write at positions which data tells, and sort."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from tcomp.frontends.jax.context import Context, Table
from tcomp.frontends.jax.handlers.movement import places
from tcomp.ir.dtypes import integer_range, is_float
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew, xla

Ints = Sequence[int]


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))


def _filling(ctx: Context, dtype: str, given: Any) -> float | int | bool:
    """What is read outside of an array: what is given, or JAX's default: NaN, True, the largest unsigned number, the least signed one."""
    if is_float(dtype):
        number = math.nan if given is None else given
        return float(number.imag if ctx.part else number.real)
    if dtype == "bool":
        return given is None or bool(given)
    low, high = integer_range(dtype)
    number = int(given) if given is not None else high if low == 0 else low
    return number - (1 << 64) if number > integer_range("int64")[1] else number  # the same bits


def _gather(
    ctx: Context, x: Value, indices: Value, dimension_numbers: Any, slice_sizes: Ints, mode: Any, fill_value: Any = None, **params: Any
) -> Value:
    d = dimension_numbers
    if 0 in ctx.shape:
        return ctx.full(0, ctx.dtype, ctx.shape)
    inside = "CLIP" in str(mode) or "PROMISE" in str(mode)  # what is promised to be inside is moved inside: nothing is read elsewhere
    fill = None if inside else _filling(ctx, x.dtype, fill_value)
    if 0 in x.shape:
        return ctx.full(fill or 0, x.dtype, ctx.shape)
    return ctx.add(
        xla.GATHER_WINDOWS, x, indices, offset_dims=_ints(d.offset_dims), collapsed=_ints(d.collapsed_slice_dims),
        batching=_ints(d.operand_batching_dims), index_batching=_ints(d.start_indices_batching_dims), index_map=_ints(d.start_index_map),
        sizes=ctx.dims(slice_sizes), fill=fill,
    )  # fmt: skip


def _scatter(
    reduction: str, ctx: Context, x: Value, indices: Value, updates: Value, dimension_numbers: Any, mode: Any, **params: Any
) -> Value:
    d = dimension_numbers
    if 0 in updates.shape or 0 in x.shape:
        return x
    jaxpr = params.get("update_jaxpr")
    if reduction == "none" and jaxpr is not None and len(getattr(jaxpr, "jaxpr", jaxpr).eqns):
        raise ctx.unsupported("what is stored is a function of what was there before")
    if x.dtype == "bool":
        reduction = {"add": "or", "max": "or", "mul": "and", "min": "and"}.get(reduction, reduction)
    return ctx.add(
        xla.SCATTER_WINDOWS, x, indices, updates, window_dims=_ints(d.update_window_dims), inserted=_ints(d.inserted_window_dims),
        batching=_ints(d.operand_batching_dims), index_batching=_ints(d.scatter_indices_batching_dims),
        index_map=_ints(d.scatter_dims_to_operand_dims), reduction=reduction, clip="CLIP" in str(mode),
    )  # fmt: skip


def _dynamic_slice(ctx: Context, x: Value, *starts: Value, slice_sizes: Ints, **params: Any) -> Value:
    return ctx.add(xla.SLICE_AT, x, *starts, shape=ctx.dims(slice_sizes)) if 0 not in slice_sizes else ctx.full(0, x.dtype, ctx.shape)


def _dynamic_update_slice(ctx: Context, x: Value, update: Value, *starts: Value, **params: Any) -> Value:
    return ctx.add(xla.STORE_AT, x, update, *starts) if 0 not in update.shape else x


def _sort(ctx: Context, *xs: Value, dimension: int, num_keys: int, **params: Any) -> Sequence[Value]:
    if int(xs[0].shape[dimension]) < 2:
        return xs
    return ctx.results(xla.SORT_BY, *xs, axis=int(dimension), keys=int(num_keys))


def _extremes(ctx: Context, x: Value, k: int, axis: int, largest: bool) -> list[Value]:
    """The k largest or smallest elements, sorted, and where they are; of equal ones the first come first."""
    key = ctx.add(xla.TOTAL_ORDER, x)
    key = ctx.add(ew.NOT, key) if largest else key
    _, found, where = ctx.results(xla.SORT_BY, key, x, places(ctx, _ints(x.shape), axis, "int32"), axis=axis, keys=1)
    return [ctx.cut(v, axis, 0, k) for v in (found, where)]


TABLE: Table = {
    "gather": _gather, "scatter": partial(_scatter, "none"), "dynamic_slice": _dynamic_slice, "sort": _sort,
    **{f"scatter{dash}{name}": partial(_scatter, name) for name in ("add", "sub", "mul", "min", "max") for dash in "_-"},
    "dynamic_update_slice": _dynamic_update_slice,
    "approx_top_k": lambda ctx, x, k, reduction_dimension, is_max_k, **params: _extremes(  # exactly, which is one of the approximations
        ctx, x, int(k), int(reduction_dimension) % len(x.shape), bool(is_max_k)),
    "top_k": lambda ctx, x, *rest, k, axis=-1, **params: _extremes(ctx, x, int(k), int(axis) % len(x.shape), True),
}  # fmt: skip
