"""Complex numbers and arrays of keys, which are several arrays in the graph: what only moves or adds elements is done to each of them; the
functions of complex numbers are written in real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from tcomp.frontends.jax.context import Context, Handler, Operand, Parts, Table, is_complex, is_key, leaves
from tcomp.frontends.jax.handlers import linalg
from tcomp.frontends.jax.handlers.contraction import bilinear
from tcomp.frontends.jax.handlers.elementwise import convert, integer_power
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew

Pair = tuple[Any, Any]

PARTWISE = {
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "tile", "transpose", "concatenate", "stack", "split",
    "unstack", "rev", "pad", "empty", "empty2", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "select_n", "copy",
    "copy_p", "device_put", "stop_gradient", "optimization_barrier", "sharding_constraint", "name", "pvary", "random_clone",
}  # fmt: skip
"""What moves elements."""
LINEAR = {
    "neg",
    "add",
    "add_any",
    "sub",
    "scatter_add",
    "scatter-add",
    "scatter_sub",
    "scatter-sub",
    "reduce_sum",
    "cumsum",
    "reduce_window_sum",
}
"""What adds elements."""


def handler(name: str, eqn: Any, operands: Sequence[Operand], handlers: Table) -> Handler | None:
    """The handler of a primitive for these operands; None if there is none."""
    types = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]
    if not any(is_complex(t) or is_key(t) for t in types):
        return handlers.get(name)
    if name in PARTWISE or (name in LINEAR and not any(map(is_key, types))):
        return partial(_partwise, handlers[name])
    if any(map(is_complex, types)) and name not in linalg.TABLE:
        if name in BILINEAR:
            return partial(_product, handlers[name])
        return TABLE.get(name)
    return handlers.get(name)


def _partwise(each: Handler, ctx: Context, *operands: Operand, **params: Any) -> Any:
    parts = next(x for x in operands if isinstance(x, Parts))
    found = []
    for n in range(len(parts.values)):
        ctx.part = n
        results = each(ctx, *(x.values[n] if isinstance(x, Parts) else x for x in operands), **params)
        found.append(list(results) if isinstance(results, tuple | list) else [results])
    ctx.part = 0
    avals = [v.aval for v in ctx.eqn.outvars]
    return [
        Parts(tuple(same), aval.dtype) if is_complex(aval.dtype) or is_key(aval.dtype) else same[0]
        for same, aval in zip(zip(*found, strict=True), avals, strict=True)
    ]


BILINEAR = {"dot_general", "conv_general_dilated"}


def _product(real: Handler, ctx: Context, a: Operand, b: Operand, preferred_element_type: Any = None, **params: Any) -> Parts:
    wide = [_conj(ctx, x) if isinstance(x, Value) else x for x in (a, b)]
    return bilinear(ctx, real, wide[0], wide[1], ctx.eqn.outvars[0].aval.dtype, **params)


def _function(function: Callable[..., Any]) -> Handler:
    """A handler that is a function of pairs of JAX's arrays: real and imaginary parts. Its result is a pair, or one real array."""

    def handle(ctx: Context, *operands: Operand, **params: Any) -> Any:
        kinds = [isinstance(x, Parts) for x in operands]

        def flat(*arrays: Any) -> Any:
            given = iter(arrays)
            pairs = [(next(given), next(given)) if kind else (x := next(given), jnp.zeros_like(x)) for kind in kinds]
            return function(*pairs, **params)

        found = ctx.inline(flat, *leaves(operands))
        return Parts(tuple(found), ctx.eqn.outvars[0].aval.dtype) if isinstance(found, tuple) else found

    return handle


def mul(x: Pair, y: Pair, **params: Any) -> Pair:
    """x y."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def div(x: Pair, y: Pair) -> Pair:
    """x / y, both scaled by the larger part of y (R. Smith, 1962)."""
    wide = jnp.abs(y[0]) >= jnp.abs(y[1])
    large, small = jnp.where(wide, y[0], y[1]), jnp.where(wide, y[1], y[0])
    r = small / large
    d = large + small * r
    return (jnp.where(wide, x[0] + x[1] * r, x[0] * r + x[1]) / d, jnp.where(wide, x[1] - x[0] * r, x[1] * r - x[0]) / d)


def size(x: Pair) -> Any:
    """|x|, without overflow."""
    a, b = jnp.abs(x[0]), jnp.abs(x[1])
    large, small = jnp.maximum(a, b), jnp.minimum(a, b)
    q = small / jnp.where(large == 0, 1, large)
    found = jnp.where(large == 0, 0, large * jnp.sqrt(1 + q * q))
    return jnp.where(jnp.isinf(a) | jnp.isinf(b), jnp.inf, found)


def exp(x: Pair, **params: Any) -> Pair:
    """e^x."""
    r = jnp.exp(x[0])
    return r * jnp.cos(x[1]), jnp.where(x[1] == 0, x[1], r * jnp.sin(x[1]))


def log(x: Pair, **params: Any) -> Pair:
    """The principal logarithm."""
    return jnp.log(size(x)), jnp.arctan2(x[1], x[0])


def sqrt(x: Pair, **params: Any) -> Pair:
    """The root with a real part that is not negative."""
    r = size(x)
    t = jnp.sqrt((r + jnp.abs(x[0])) * 0.5)
    other = jnp.abs(x[1]) / jnp.where(t == 0, 1, 2 * t)
    real, imag = jnp.where(x[0] >= 0, t, other), jnp.where(x[0] >= 0, other, t)
    return real, jnp.where(x[1] < 0, -imag, imag)


def sin(x: Pair, **params: Any) -> Pair:
    """sin x."""
    return jnp.sin(x[0]) * jnp.cosh(x[1]), jnp.cos(x[0]) * jnp.sinh(x[1])


def cos(x: Pair, **params: Any) -> Pair:
    """cos x."""
    return jnp.cos(x[0]) * jnp.cosh(x[1]), -jnp.sin(x[0]) * jnp.sinh(x[1])


def sinh(x: Pair, **params: Any) -> Pair:
    """sinh x."""
    return jnp.sinh(x[0]) * jnp.cos(x[1]), jnp.cosh(x[0]) * jnp.sin(x[1])


def cosh(x: Pair, **params: Any) -> Pair:
    """cosh x."""
    return jnp.cosh(x[0]) * jnp.cos(x[1]), jnp.sinh(x[0]) * jnp.sin(x[1])


def tanh(x: Pair, **params: Any) -> Pair:
    """tanh x, by tangents (W. Kahan, 1987)."""
    t, b = jnp.tanh(x[0]), jnp.tan(x[1])
    s = jnp.cosh(jnp.clip(x[0], -80, 80))
    beta = 1 + b * b
    rho = s * jnp.sinh(jnp.clip(x[0], -80, 80))
    d = 1 + beta * jnp.square(jnp.sinh(jnp.clip(x[0], -40, 40)))
    far = jnp.abs(x[0]) > 20
    return jnp.where(far, t, beta * rho / d), jnp.where(far, 0, b / d)


def tan(x: Pair, **params: Any) -> Pair:
    """tan x = -i tanh(i x)."""
    re, im = tanh((-x[1], x[0]))
    return im, -re


def power(x: Pair, y: Pair) -> Pair:
    """x^y = exp(y log x); 1 where y is 0, and 0 where x is."""
    none = (x[0] == 0) & (x[1] == 0)
    safe = jnp.where(none, 1, x[0]), x[1]
    re, im = exp(mul(y, log(safe)))
    unit = (y[0] == 0) & (y[1] == 0)
    return jnp.where(unit, 1, jnp.where(none, 0, re)), jnp.where(unit | none, 0, im)


def whole_power(x: Pair, y: int) -> Pair:
    """x^y for a whole y."""
    one = jnp.ones_like(x[0]), jnp.zeros_like(x[0])
    found = integer_power(mul, x, abs(y)) if y else one
    return div(one, found) if y < 0 else found


def sign(x: Pair) -> Pair:
    """x / |x|; 0 where x is."""
    r = size(x)
    safe = jnp.where(r == 0, 1, r)
    return x[0] / safe, x[1] / safe


def log1p(x: Pair, **params: Any) -> Pair:
    """log(1 + x), whose real part is log1p(2a + a^2 + b^2) / 2 where 1 + x is near 1."""
    near = size(x) < 0.5
    return jnp.where(near, 0.5 * jnp.log1p(x[0] * 2 + x[0] * x[0] + x[1] * x[1]), log((1 + x[0], x[1]))[0]), jnp.arctan2(x[1], 1 + x[0])


def expm1(x: Pair, **params: Any) -> Pair:
    """exp(x) - 1 = expm1(a) cos(b) - 2 sin(b / 2)^2 + i exp(a) sin(b)."""
    half = jnp.sin(x[1] * 0.5)
    return jnp.expm1(x[0]) * jnp.cos(x[1]) - 2 * half * half, jnp.exp(x[0]) * jnp.sin(x[1])


def _extreme(largest: bool) -> Callable[[Pair, Pair], Pair]:
    """The larger or smaller number in the order of real parts, of equal ones in that of imaginary parts."""

    def choose(x: Pair, y: Pair) -> Pair:
        (a, c), (b, d) = (x, y) if largest else (y, x)
        first = jnp.where(x[0] == y[0], c > d, a > b)
        return jnp.where(first, x[0], y[0]), jnp.where(first, x[1], y[1])

    return choose


def _running(combine: Callable[[Pair, Pair], Pair]) -> Handler:
    """Running values along an axis."""
    return _function(lambda x, axis, reverse: lax.associative_scan(combine, x, axis=axis, reverse=reverse))


def _reduced(combine: Callable[[Pair, Pair], Pair]) -> Handler:
    """A reduction: the last of the running values of all axes that are reduced."""

    def reduce(x: Pair, axes: Sequence[int], **params: Any) -> Pair:
        kept = [n for n in range(x[0].ndim) if n not in axes]
        flat = tuple(jnp.transpose(p, (*axes, *kept)).reshape(-1, *(p.shape[n] for n in kept)) for p in x)
        re, im = lax.associative_scan(combine, flat)
        return re[-1], im[-1]

    return _function(reduce)


def logistic(x: Pair, **params: Any) -> Pair:
    """1 / (1 + exp(-x))."""
    e = exp((-x[0], -x[1]))
    return div((jnp.ones_like(x[0]), jnp.zeros_like(x[0])), (1 + e[0], e[1]))


def _equal(x: Pair, y: Pair) -> Any:
    return (x[0] == y[0]) & (x[1] == y[1])


def _conj(ctx: Context, x: Operand, **params: Any) -> Parts:
    dtype = ctx.eqn.outvars[0].aval.dtype
    if isinstance(x, Value):
        return Parts((x, ctx.full(0.0, x.dtype, x.shape)), dtype)
    return Parts((x.values[0], ctx.add(ew.NEG, x.values[1])), dtype)


TABLE: Table = {
    "real": lambda ctx, x: x.values[0], "imag": lambda ctx, x: x.values[1], "conj": _conj,
    "convert_element_type": convert, "mul": _function(mul), "div": _function(div), "abs": _function(size),
    "exp": _function(exp), "log": _function(log), "sqrt": _function(sqrt), "sin": _function(sin), "cos": _function(cos),
    "sinh": _function(sinh), "cosh": _function(cosh), "tanh": _function(tanh), "tan": _function(tan), "pow": _function(power),
    "integer_pow": _function(whole_power), "square": _function(lambda x, **params: mul(x, x)), "sign": _function(sign),
    "log1p": _function(log1p), "expm1": _function(expm1), "eq": _function(_equal), "ne": _function(lambda x, y: ~_equal(x, y)),
    "rsqrt": _function(lambda x, **params: div((jnp.ones_like(x[0]), jnp.zeros_like(x[0])), sqrt(x))),
    "exp2": _function(lambda x, **params: exp((x[0] * jnp.log(2.0).astype(x[0].dtype), x[1] * jnp.log(2.0).astype(x[0].dtype)))),
    "logistic": _function(logistic),
    **{f"{kind}{name}": make(f) for name, f in (("max", _extreme(True)), ("min", _extreme(False)), ("prod", mul))
       for kind, make in (("", _function), ("cum", _running), ("reduce_", _reduced)) if name != "prod" or kind},
    "is_finite": _function(lambda x: jnp.isfinite(x[0]) & jnp.isfinite(x[1])),
    "complex": lambda ctx, x, y: Parts((x, y), ctx.eqn.outvars[0].aval.dtype),
}  # fmt: skip
