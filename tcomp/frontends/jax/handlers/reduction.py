"""Primitives that reduce axes, or run along them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tcomp.frontends.jax.context import Context, Table
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ew, reduction as ops

Ints = Sequence[int]
MONOIDS = {"add": "sum", "add_any": "sum", "mul": "prod", "max": "max", "min": "min", "and": "all", "or": "any"}
"""What a reduction by a primitive is called."""
REDUCTIONS = {
    "sum": (ew.ADD, ops.REDUCE_SUM), "prod": (ew.MUL, ops.REDUCE_PROD), "max": (ew.MAX, ops.REDUCE_MAX), "min": (ew.MIN, ops.REDUCE_MIN),
    "all": (ew.AND, ops.REDUCE_MIN), "any": (ew.OR, ops.REDUCE_MAX),
}  # fmt: skip
"""The operators that a reduction applies, by its name: on two elements, and along axes."""


def monoid(jaxpr: Any, dtype: str) -> str | None:
    """What a reduction by a jaxpr is, if that applies one primitive of `MONOIDS` to its two operands; None if it is another."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # JAX has them open and closed
    if len(inner.eqns) != 1 or len(inner.invars) != 2 or {*map(id, inner.eqns[0].invars)} != {*map(id, inner.invars)}:
        return None
    if inner.eqns[0].outvars != inner.outvars:
        return None
    return of_type(MONOIDS.get(inner.eqns[0].primitive.name), dtype)


def of_type(name: str | None, dtype: str) -> str | None:
    """A reduction of bools is one of `all` and `any`, and these are of bools alone."""
    if dtype == "bool":
        return {"sum": "any", "max": "any", "prod": "all", "min": "all"}.get(name or "", name)
    return None if name in ("all", "any") else name


def _reduced(op: Operator, ctx: Context, x: Value, axes: Ints, **params: Any) -> Value:
    return ctx.add(op, x, axes=tuple(sorted(map(int, axes))), keepdims=False) if axes else x


def _bitwise(op: Operator | None, combine: Any, ctx: Context, x: Value, axes: Ints, **params: Any) -> Value:
    """`op` is for bools."""
    if op is not None and x.dtype == "bool":
        return _reduced(op, ctx, x, axes)
    (found,) = ctx.inline(lambda v: by_halves(lambda a, b: (combine(*a, *b),), (v,), axes), x)
    return found


def _arg(op: Operator, ctx: Context, x: Value, axes: Ints, **params: Any) -> Value:
    return ctx.add(op, ctx.cast(x, "int32") if x.dtype == "bool" else x, axis=int(axes[0]), keepdims=False, last=False)


def by_halves(combine: Any, arrays: Sequence[Any], axes: Ints) -> tuple[Any, ...]:
    """A reduction of JAX's arrays by any associative function of tuples: halves of the elements are combined until one is left."""
    kept = [n for n in range(arrays[0].ndim) if n not in axes]
    arrays = [jnp.transpose(a, (*axes, *kept)).reshape(-1, *(a.shape[n] for n in kept)) for a in arrays]
    while (count := arrays[0].shape[0]) > 1:
        half = count // 2
        found = combine([a[:half] for a in arrays], [a[half : 2 * half] for a in arrays])
        arrays = [jnp.concatenate([f, a[2 * half :]]) for f, a in zip(found, arrays, strict=True)]
    return tuple(a[0] for a in arrays)


def _reduce(ctx: Context, *operands: Value, jaxpr: Any, dimensions: Ints, **params: Any) -> Sequence[Value]:
    count = len(operands) // 2
    xs, function = operands[:count], jax.extend.core.jaxpr_as_fun(jaxpr)

    def combine(a: Any, b: Any) -> Any:
        return [v.reshape(a[0].shape) for v in jax.vmap(function)(*(v.reshape(-1) for v in (*a, *b)))]

    def run(*arrays: Any) -> Any:
        found = by_halves(combine, arrays[:count], sorted(dimensions))
        return tuple(combine([jnp.broadcast_to(v, w.shape) for v, w in zip(arrays[count:], found, strict=True)], found))

    if len(xs) == 1 and (name := monoid(jaxpr, xs[0].dtype)) is not None:
        pairwise, op = REDUCTIONS[name]
        return [ctx.add(pairwise, operands[1], _reduced(op, ctx, xs[0], dimensions))]
    if 0 in xs[0].shape:
        raise ctx.unsupported("there is nothing to reduce")
    result: Sequence[Value] = ctx.inline(run, *operands)
    return result


def _cumulative(op: Operator, ctx: Context, x: Value, axis: int, reverse: bool) -> Value:
    return ctx.add(op, x, axis=int(axis), exclusive=False, reverse=bool(reverse))


TABLE: Table = {
    **{f"reduce_{name}": partial(_reduced, REDUCTIONS[name][1]) for name in ("sum", "prod", "max", "min")},
    "reduce_and": partial(_bitwise, ops.REDUCE_MIN, lax.bitwise_and), "reduce_or": partial(_bitwise, ops.REDUCE_MAX, lax.bitwise_or),
    "reduce_xor": partial(_bitwise, None, lax.bitwise_xor),
    "argmax": partial(_arg, ops.ARG_MAX), "argmin": partial(_arg, ops.ARG_MIN), "reduce": _reduce,
    **{name: partial(_cumulative, op) for name, op in (
        ("cumsum", ops.CUM_SUM), ("cumprod", ops.CUM_PROD), ("cummax", ops.CUM_MAX), ("cummin", ops.CUM_MIN),
        ("cumlogsumexp", ops.CUM_LOG_SUM_EXP))},
}  # fmt: skip
