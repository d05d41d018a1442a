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
MONOIDS = {
    "add": "sum", "add_any": "sum", "mul": "prod", "max": "max", "min": "min", "and": "all", "or": "any",
}  # fmt: skip
"""What a reduction by a primitive is called."""
PAIRWISE = {"sum": ew.ADD, "prod": ew.MUL, "max": ew.MAX, "min": ew.MIN, "all": ew.AND, "any": ew.OR}
"""The operator on two elements that a reduction applies, by its name."""


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


def _sorted(axes: Ints) -> tuple[int, ...]:
    return tuple(sorted(map(int, axes)))


def _reduced(op: Operator, ctx: Context, x: Value, axes: Ints, **params: Any) -> Value:
    return ctx.add(op, x, axes=_sorted(axes), keepdims=False) if axes else x


def _logical(op: Operator, ctx: Context, x: Value, axes: Ints, **params: Any) -> Value:
    if x.dtype == "bool":
        return _reduced(op, ctx, x, axes)
    return _by_halves(ctx, [x], axes, lambda a, b: (lax.bitwise_and(*a, *b) if op is ops.REDUCE_MIN else lax.bitwise_or(*a, *b),))[0]


def _arg(op: Operator, ctx: Context, x: Value, axes: Ints, **params: Any) -> Value:
    if x.dtype == "bool":
        x = ctx.cast(x, "int32")
    return ctx.add(op, x, axis=int(axes[0]), keepdims=False, last=False)


def _by_halves(ctx: Context, xs: Sequence[Value], axes: Ints, combine: Any) -> Sequence[Value]:
    """A reduction by any associative function of tuples of arrays: halves of the elements are combined until one is left."""
    rank = len(xs[0].shape)
    kept = [n for n in range(rank) if n not in axes]

    def run(*arrays: Any) -> Any:
        arrays = tuple(jnp.transpose(a, (*axes, *kept)).reshape(-1, *(a.shape[n] for n in kept)) for a in arrays)
        while (count := arrays[0].shape[0]) > 1:
            half = count // 2
            found = combine([a[:half] for a in arrays], [a[half : 2 * half] for a in arrays])
            arrays = tuple(jnp.concatenate([f, a[2 * half :]]) for f, a in zip(found, arrays, strict=True))
        return tuple(a[0] for a in arrays)

    found: Sequence[Value] = ctx.inline(run, *xs)
    return found


def _reduce(ctx: Context, *operands: Value, jaxpr: Any, dimensions: Ints, **params: Any) -> Sequence[Value]:
    xs, initial = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    function = jax.extend.core.jaxpr_as_fun(jaxpr)

    def combine(a: Any, b: Any) -> Any:
        flat = [v.reshape(-1) for v in (*a, *b)]
        return [v.reshape(a[0].shape) for v in jax.vmap(function)(*flat)]

    def with_initial(*arrays: Any) -> Any:
        half = len(arrays) // 2
        return tuple(combine([jnp.broadcast_to(v, w.shape) for v, w in zip(arrays[:half], arrays[half:], strict=True)], arrays[half:]))

    if len(xs) == 1 and (name := monoid(jaxpr, xs[0].dtype)) is not None:
        op = {"sum": ops.REDUCE_SUM, "prod": ops.REDUCE_PROD, "max": ops.REDUCE_MAX, "min": ops.REDUCE_MIN, "all": ops.REDUCE_MIN,
              "any": ops.REDUCE_MAX}[name]  # fmt: skip
        return [ctx.add(PAIRWISE[name], initial[0], _reduced(op, ctx, xs[0], dimensions))]
    if 0 in xs[0].shape:
        raise ctx.unsupported("there is nothing to reduce")
    found = _by_halves(ctx, xs, _sorted(dimensions), combine)
    result: Sequence[Value] = ctx.inline(with_initial, *initial, *found)
    return result


def _cumulative(op: Operator, ctx: Context, x: Value, axis: int, reverse: bool) -> Value:
    return ctx.add(op, x, axis=int(axis), exclusive=False, reverse=bool(reverse))


TABLE: Table = {
    "reduce_sum": partial(_reduced, ops.REDUCE_SUM), "reduce_prod": partial(_reduced, ops.REDUCE_PROD),
    "reduce_max": partial(_reduced, ops.REDUCE_MAX), "reduce_min": partial(_reduced, ops.REDUCE_MIN),
    "reduce_and": partial(_logical, ops.REDUCE_MIN), "reduce_or": partial(_logical, ops.REDUCE_MAX),
    "reduce_xor": lambda ctx, x, axes, **params: _by_halves(ctx, [x], axes, lambda a, b: (lax.bitwise_xor(*a, *b),))[0],
    "argmax": partial(_arg, ops.ARG_MAX), "argmin": partial(_arg, ops.ARG_MIN), "reduce": _reduce,
    "cumsum": partial(_cumulative, ops.CUM_SUM), "cumprod": partial(_cumulative, ops.CUM_PROD),
    "cummax": partial(_cumulative, ops.CUM_MAX), "cummin": partial(_cumulative, ops.CUM_MIN),
    "cumlogsumexp": partial(_cumulative, ops.CUM_LOG_SUM_EXP),
}  # fmt: skip
