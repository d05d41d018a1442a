"""Reductions of windows, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tcomp.frontends.jax.context import Context, Table
from tcomp.frontends.jax.handlers.movement import padded
from tcomp.frontends.jax.handlers.reduction import REDUCTIONS, monoid, of_type
from tcomp.ir.dtypes import integer_range, is_float
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew, xla

Ints = Sequence[int]
Pads = Sequence[tuple[int, int]]


def _neutral(name: str, dtype: str) -> float | int | bool:
    """The element that changes no reduction."""
    if name in ("max", "min"):
        low, high = (-math.inf, math.inf) if is_float(dtype) else integer_range(dtype)
        return low if name == "max" else high
    return {"sum": 0, "prod": 1, "all": True, "any": False}[name]


def _windows(
    name: str, ctx: Context, x: Value, window_dimensions: Ints, window_strides: Ints, padding: Pads, base_dilation: Ints,
    window_dilation: Ints, **params: Any,
) -> Value:  # fmt: skip
    name = of_type(name, x.dtype) or name
    around = [(int(a), int(b), int(d) - 1) for (a, b), d in zip(padding, base_dilation, strict=True)]
    inside = padded(ctx, x, ctx.number(_neutral(name, x.dtype), x.dtype), around)
    kernel, strides, dilations = (tuple(map(int, v)) for v in (window_dimensions, window_strides, window_dilation))
    if 0 in ctx.shape:
        return ctx.full(0, x.dtype, ctx.shape)
    return ctx.add(xla.REDUCE_WINDOWS, inside, kernel=kernel, strides=strides, dilations=dilations, reduction=name)


def _reduce_window(ctx: Context, x: Value, initial: Value, *rest: Value, jaxpr: Any, consts: Any = (), **params: Any) -> list[Value]:
    name = None if rest else monoid(jaxpr, x.dtype)
    if name is None:
        raise ctx.unsupported("windows are reduced by a function of several operations, or several arrays are")
    return [ctx.add(REDUCTIONS[name][0], initial, _windows(name, ctx, x, **params))]


def _place(
    ctx: Context, x: Value, select_prim: Any, window_dimensions: Ints, window_strides: Ints, padding: Pads, dilation: Ints
) -> tuple[Value, dict[str, Any]]:
    """Where the element that `select_prim` prefers stands in each window, and what describes the windows."""
    if select_prim.name not in ("ge", "le"):
        raise ctx.unsupported(f"elements are chosen by `{select_prim.name}`")
    best = x if select_prim.name == "ge" else ctx.add(ew.NEG if is_float(x.dtype) else ew.NOT, x)
    found = {"kernel": tuple(map(int, window_dimensions)), "strides": tuple(map(int, window_strides))}
    before, after = (tuple(int(p[n]) for p in padding) for n in (0, 1))
    dilations = tuple(map(int, dilation))
    return ctx.add(xla.WINDOW_ARGMAX, best, **found, dilations=dilations, before=before, after=after), found | {"before": before}


def _select_and_scatter_add(
    ctx: Context, source: Value, operand: Value, select_prim: Any, window_dimensions: Ints, window_strides: Ints, padding: Pads
) -> Value:
    place, windows = _place(ctx, operand, select_prim, window_dimensions, window_strides, padding, [1] * len(operand.shape))
    return ctx.add(xla.SCATTER_TO_ARGMAX, place, source, shape=ctx.shape, **windows)


def _select_and_gather_add(
    ctx: Context, tangents: Value, operand: Value, select_prim: Any, window_dimensions: Ints, window_strides: Ints, padding: Pads,
    base_dilation: Ints, window_dilation: Ints,
) -> Value:  # fmt: skip
    if any(np.asarray(base_dilation) != 1):
        raise ctx.unsupported("elements are apart in windows")
    place, windows = _place(ctx, operand, select_prim, window_dimensions, window_strides, padding, window_dilation)
    return ctx.add(xla.GATHER_ARGMAX, place, tangents, dilations=tuple(map(int, window_dilation)), **windows)


TABLE: Table = {
    "reduce_window_sum": partial(_windows, "sum"), "reduce_window_max": partial(_windows, "max"),
    "reduce_window_min": partial(_windows, "min"), "reduce_window": _reduce_window,
    "select_and_scatter_add": _select_and_scatter_add, "select_and_gather_add": _select_and_gather_add,
}  # fmt: skip
