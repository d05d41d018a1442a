"""Complex numbers and arrays of keys, which are several arrays in the graph: what only moves or adds elements is done to each of them; the
functions of complex numbers are written in real ones, a number being the pair of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log as natural
from typing import Any

import jax.numpy as jnp
from jax import lax

from tcomp.frontends.jax.context import Context, Handler, Operand, Parts, Table, is_complex, is_key, is_split, leaves, part_types
from tcomp.frontends.jax.handlers import linalg, movement
from tcomp.frontends.jax.handlers.elementwise import convert
from tcomp.frontends.jax.handlers.reduction import by_halves
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew
from tcomp.ops.xla import integer_power

Pair = tuple[Any, Any]

PARTWISE = {
    *(movement.TABLE.keys() - {"iota"}), "transpose", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "select_n", "copy",
    "copy_p", "device_put", "stop_gradient", "optimization_barrier", "sharding_constraint", "name", "pvary", "random_clone",
}  # fmt: skip
"""What moves elements."""
LINEAR = {
    "neg", "add", "add_any", "sub", "scatter_add", "scatter-add", "scatter_sub", "scatter-sub", "reduce_sum", "cumsum", "reduce_window_sum",
}  # fmt: skip
"""What adds elements."""
BILINEAR = {"dot_general", "conv_general_dilated"}


def handler(name: str, eqn: Any, operands: Sequence[Operand], handlers: Table) -> Handler | None:
    """The handler of a primitive for these operands; None if there is none."""
    types = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]
    if not any(map(is_split, types)):
        return handlers.get(name)
    if name in PARTWISE or (name in LINEAR and not any(map(is_key, types))):
        return partial(_partwise, handlers[name])
    if any(map(is_complex, types)) and name not in linalg.TABLE:
        return partial(_product, handlers[name]) if name in BILINEAR else TABLE.get(name)
    return handlers.get(name)


def _partwise(each: Handler, ctx: Context, *operands: Operand, **params: Any) -> Any:
    avals, found = [v.aval for v in ctx.eqn.outvars], []
    for n in range(max(len(part_types(aval.dtype)) for aval in avals)):
        ctx.part = n
        results = each(ctx, *(x.values[n] if isinstance(x, Parts) else x for x in operands), **params)
        found.append(results if isinstance(results, tuple | list) else [results])
    ctx.part = 0
    return [Parts(same, a.dtype) if is_split(a.dtype) else same[0] for same, a in zip(zip(*found, strict=True), avals, strict=True)]


def _product(real: Handler, ctx: Context, a: Operand, b: Operand, preferred_element_type: Any = None, **params: Any) -> Parts:
    """By four products of real numbers."""
    (ar, ai), (br, bi) = ((x if isinstance(x, Parts) else _conj(ctx, x)).values for x in (a, b))
    re = ctx.add(ew.SUB, real(ctx, ar, br, **params), real(ctx, ai, bi, **params))
    im = ctx.add(ew.ADD, real(ctx, ar, bi, **params), real(ctx, ai, br, **params))
    return Parts((re, im), ctx.eqn.outvars[0].aval.dtype)


def _conj(ctx: Context, x: Operand, **params: Any) -> Parts:
    """The conjugate, a complex number of a real one as well."""
    parts = (x, ctx.full(0.0, x.dtype, x.shape)) if isinstance(x, Value) else (x.values[0], ctx.add(ew.NEG, x.values[1]))
    return Parts(parts, ctx.eqn.outvars[0].aval.dtype)


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


def _of_parts(function: Callable[[Any, Any], Any]) -> Handler:
    """As `_function`, of the parts of one number, without parameters."""
    return _function(lambda x, **params: function(*x))


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


def reciprocal(x: Pair) -> Pair:
    """1 / x."""
    return div((jnp.ones_like(x[0]), jnp.zeros_like(x[0])), x)


def exp(a: Any, b: Any) -> Pair:
    """e^x."""
    r = jnp.exp(a)
    return r * jnp.cos(b), jnp.where(b == 0, b, r * jnp.sin(b))


def log(a: Any, b: Any) -> Pair:
    """The principal logarithm."""
    return jnp.log(jnp.hypot(a, b)), jnp.arctan2(b, a)


def sqrt(a: Any, b: Any) -> Pair:
    """The root with a real part that is not negative."""
    t = jnp.sqrt((jnp.hypot(a, b) + jnp.abs(a)) * 0.5)
    other = jnp.abs(b) / jnp.where(t == 0, 1, 2 * t)
    real, imag = jnp.where(a >= 0, t, other), jnp.where(a >= 0, other, t)
    return real, jnp.where(b < 0, -imag, imag)


def tanh(a: Any, b: Any) -> Pair:
    """tanh x, by tangents (W. Kahan, 1987)."""
    t = jnp.tan(b)
    near = jnp.clip(a, -80, 80)
    beta = 1 + t * t
    d = 1 + beta * jnp.square(jnp.sinh(jnp.clip(a, -40, 40)))
    far = jnp.abs(a) > 20
    return jnp.where(far, jnp.tanh(a), beta * jnp.cosh(near) * jnp.sinh(near) / d), jnp.where(far, 0, t / d)


def power(x: Pair, y: Pair) -> Pair:
    """x^y = exp(y log x); 1 where y is 0, and 0 where x is."""
    none, unit = (x[0] == 0) & (x[1] == 0), (y[0] == 0) & (y[1] == 0)
    re, im = exp(*mul(y, log(jnp.where(none, 1, x[0]), x[1])))
    return jnp.where(unit, 1, jnp.where(none, 0, re)), jnp.where(unit | none, 0, im)


def whole_power(x: Pair, y: int) -> Pair:
    """x^y for a whole y."""
    found = integer_power(mul, x, abs(y)) if y else (jnp.ones_like(x[0]), jnp.zeros_like(x[0]))
    return reciprocal(found) if y < 0 else found


def sign(a: Any, b: Any) -> Pair:
    """x / |x|; 0 where x is."""
    r = jnp.hypot(a, b)
    safe = jnp.where(r == 0, 1, r)
    return a / safe, b / safe


def log1p(a: Any, b: Any) -> Pair:
    """log(1 + x), whose real part is log1p(2a + a^2 + b^2) / 2 where 1 + x is near 1."""
    far, angle = log(1 + a, b)
    return jnp.where(jnp.hypot(a, b) < 0.5, 0.5 * jnp.log1p(a * 2 + a * a + b * b), far), angle


def expm1(a: Any, b: Any) -> Pair:
    """exp(x) - 1 = expm1(a) cos(b) - 2 sin(b / 2)^2 + i exp(a) sin(b)."""
    half = jnp.sin(b * 0.5)
    return jnp.expm1(a) * jnp.cos(b) - 2 * half * half, jnp.exp(a) * jnp.sin(b)


def tan(a: Any, b: Any) -> Pair:
    """tan x = -i tanh(i x)."""
    re, im = tanh(-b, a)
    return im, -re


def logistic(a: Any, b: Any) -> Pair:
    """1 / (1 + exp(-x))."""
    re, im = exp(-a, -b)
    return reciprocal((1 + re, im))


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
    """A reduction."""
    return _function(lambda x, axes, **params: by_halves(combine, x, axes))


TABLE: Table = {
    "real": lambda ctx, x: x.values[0], "imag": lambda ctx, x: x.values[1], "conj": _conj, "convert_element_type": convert,
    "complex": lambda ctx, x, y: Parts((x, y), ctx.eqn.outvars[0].aval.dtype),
    **{name: _of_parts(function) for name, function in {
        "abs": jnp.hypot, "exp": exp, "log": log, "sqrt": sqrt, "tanh": tanh, "tan": tan, "sign": sign, "log1p": log1p, "expm1": expm1,
        "logistic": logistic, "sin": lambda a, b: (jnp.sin(a) * jnp.cosh(b), jnp.cos(a) * jnp.sinh(b)),
        "cos": lambda a, b: (jnp.cos(a) * jnp.cosh(b), -jnp.sin(a) * jnp.sinh(b)),
        "sinh": lambda a, b: (jnp.sinh(a) * jnp.cos(b), jnp.cosh(a) * jnp.sin(b)),
        "cosh": lambda a, b: (jnp.cosh(a) * jnp.cos(b), jnp.sinh(a) * jnp.sin(b)),
        "exp2": lambda a, b: exp(a * natural(2), b * natural(2)), "rsqrt": lambda a, b: reciprocal(sqrt(a, b)),
        "square": lambda a, b: mul((a, b), (a, b)), "is_finite": lambda a, b: jnp.isfinite(a) & jnp.isfinite(b),
    }.items()},
    "mul": _function(mul), "div": _function(div), "pow": _function(power), "integer_pow": _function(whole_power),
    "eq": _function(lambda x, y: (x[0] == y[0]) & (x[1] == y[1])), "ne": _function(lambda x, y: (x[0] != y[0]) | (x[1] != y[1])),
    **{f"{kind}{name}": make(f) for name, f in (("max", _extreme(True)), ("min", _extreme(False)), ("prod", mul))
       for kind, make in (("", _function), ("cum", _running), ("reduce_", _reduced)) if name != "prod" or kind},
}  # fmt: skip
