"""Elementwise primitives. Their operands are of one shape, or scalars."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tcomp.frontends.jax.context import Context, Handler, Operand, Parts, Table, decomposed, is_complex, part_types
from tcomp.ir.dtypes import BITS, NARROW, integer_range, is_float
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ops, movement, reduction, xla

SOFTMAX_NODES = 16  # in which a softmax is looked for, the last ones


def forward(op: Operator) -> Handler:
    """The operator on the same operands; parameters are hints alone."""
    return lambda ctx, *operands, **params: ctx.add(op, *ctx.aligned(*operands))


def _arithmetic(op: Operator, of_bools: Operator | None = None) -> Handler:
    """The operator, or another one for bools; numbers of 4 bits and 8-bit floats are computed wider."""

    def handle(ctx: Context, *operands: Value, **params: Any) -> Value:
        dtype = operands[0].dtype
        if dtype == "bool" and of_bools is not None:
            return ctx.add(of_bools, *operands)
        if dtype in NARROW:
            wide = "float32" if "float" in dtype else "int8"
            return ctx.add(op, *(ctx.cast(x, wide) for x in operands))
        return ctx.add(op, *ctx.aligned(*operands))

    return handle


def _rounding(op: Operator, ctx: Context, x: Value, **params: Any) -> Value:
    return ctx.add(op, x) if is_float(x.dtype) else x


def _compare(op: Operator, ctx: Context, x: Value, y: Value) -> Value:
    if x.dtype == "bool" or x.dtype in NARROW:
        wide = "float32" if "float" in x.dtype else "int32"
        x, y = ctx.cast(x, wide), ctx.cast(y, wide)
    return ctx.add(op, x, y)


def total_order(ctx: Context, x: Value) -> Value:
    """Integers in the order of floats that IEEE 754 calls total: -NaN, -inf, ..., -0, 0, ..., inf, NaN."""
    kind = f"int{BITS[x.dtype]}"
    bits = ctx.add(ops.BITCAST, x, dtype=kind)
    sign = ctx.add(ops.SHIFT_RIGHT, bits, ctx.number(BITS[x.dtype] - 1, kind))
    return ctx.add(ops.XOR, bits, ctx.add(ops.AND, sign, ctx.number(integer_range(kind)[1], kind)))


def _compare_in_order(op: Operator, ctx: Context, x: Value, y: Value) -> Value:
    """A comparison in the order of all floats, NaN and -0 included."""
    return _compare(op, ctx, *((total_order(ctx, x), total_order(ctx, y)) if is_float(x.dtype) else (x, y)))


def _is_finite(ctx: Context, x: Value) -> Value:
    return ctx.add(ops.NOT, ctx.add(ops.OR, ctx.add(ops.ISNAN, x), ctx.add(ops.ISINF, x, positive=True, negative=True)))


def _shift_right_logical(ctx: Context, x: Value, y: Value) -> Value:
    unsigned = f"uint{BITS[x.dtype]}"
    bits = [ctx.add(ops.BITCAST, v, dtype=unsigned) if v.dtype != unsigned else v for v in (x, y)]
    found = ctx.add(xla.SHIFT_BITS_RIGHT, *bits)
    return found if x.dtype == unsigned else ctx.add(ops.BITCAST, found, dtype=x.dtype)


def convert(ctx: Context, x: Operand, new_dtype: Any, **params: Any) -> Operand:
    """An array, real or complex, in another element type."""
    to = part_types(new_dtype)[0]
    if isinstance(x, Parts):
        if is_complex(new_dtype):
            return Parts(tuple(ctx.cast(v, to) for v in x.values), new_dtype)
        x = x.values[0]
    if to in NARROW and "float" in to:  # what is too large becomes what the type has for it
        return x if x.dtype == to else ctx.add(ops.CAST, x, dtype=to, saturate=False)
    found = ctx.cast(x, to)
    return Parts((found, ctx.full(0.0, to, x.shape)), new_dtype) if is_complex(new_dtype) else found


def _bitcast(ctx: Context, x: Value, new_dtype: Any, **params: Any) -> Value:
    """Types of other widths than the operand's have one axis more or less, of the parts of an element."""
    to = ctx.dtype
    few, many = sorted((BITS[x.dtype], BITS[to]))
    if few == many:
        return ctx.add(ops.BITCAST, x, dtype=to)
    if to in NARROW or x.dtype in NARROW or "bool" in (to, x.dtype):
        raise ctx.unsupported(f"bits of {x.dtype} as {to}")

    def parts(v: Any) -> Any:
        if BITS[x.dtype] < BITS[to]:
            shifts = jnp.arange(many // few, dtype=f"uint{many}") * few
            joined = jnp.sum(v.view(f"uint{few}").astype(f"uint{many}") << shifts, axis=-1, dtype=f"uint{many}")
            return lax.bitcast_convert_type(joined, new_dtype)
        shifts = jnp.arange(many // few, dtype=f"uint{many}") * few
        pieces = (lax.bitcast_convert_type(v, f"uint{many}")[..., None] >> shifts).astype(f"uint{few}")
        return lax.bitcast_convert_type(pieces, new_dtype)

    found: Value = ctx.inline(parts, x)
    return found


def _select(ctx: Context, which: Value, *cases: Value) -> Value:
    if which.dtype == "bool":
        return ctx.add(ops.WHERE, which, cases[1], cases[0])
    found = cases[-1]
    for n in reversed(range(len(cases) - 1)):
        found = ctx.add(ops.WHERE, ctx.add(ops.LESS_EQUAL, which, ctx.number(n, which.dtype)), cases[n], found)
    return found


def _div(ctx: Context, x: Value, y: Value, **params: Any) -> Value:
    """A quotient; of exponentials by their sum, which nothing else uses, it is a softmax, which has kernels of its own."""
    source = _softmax_of(ctx, x, y) if ctx.uses == (2, 1) else None
    return ctx.add(xla.QUOTIENT, *ctx.aligned(x, y)) if source is None else ctx.add(reduction.SOFTMAX, source[0], axes=source[1])


def _softmax_of(ctx: Context, exponentials: Value, total: Value) -> tuple[Value, tuple[int, ...]] | None:
    """(x, axes), if the operands are exp(x - max(x)) and its sum over the axes."""
    made = {v: node for node in ctx.builder.nodes[-SOFTMAX_NODES:] for v in node.outputs}

    def operands(x: Value | None, op: Operator) -> tuple[Any, ...]:
        while x in made and made[x].op in (movement.RESHAPE, ops.MAX):  # -inf is the least number anyway
            rest = [v for v in made[x].inputs if v not in ctx.builder.constants or not np.isneginf(ctx.builder.constants[v]).all()]
            x = rest[0] if len(rest) == 1 else None
        return (*made[x].inputs, made[x].attrs.get("axes")) if x in made and made[x].op is op else ()

    if not (summed := operands(total, reduction.REDUCE_SUM)) or summed[0] is not exponentials:
        return None
    if not (shifted := operands(exponentials, ops.EXP)) or not (pair := operands(shifted[0], ops.SUB)):
        return None
    largest = operands(pair[1], reduction.REDUCE_MAX)
    return (pair[0], summed[1]) if largest == (pair[0], summed[1]) else None


def _mul(ctx: Context, x: Value, y: Value, out_dtype: Any = None, **params: Any) -> Value:
    if out_dtype is not None:
        x, y = (ctx.cast(v, part_types(out_dtype)[0]) for v in (x, y))
    return _arithmetic(ops.MUL, ops.AND)(ctx, x, y)


def integer_power(multiply: Callable[[Any, Any], Any], x: Any, n: int) -> Any:
    """x to the power of n > 0, by repeated squaring."""
    factors = []
    while n:
        if n & 1:
            factors.append(x)
        n >>= 1
        x = multiply(x, x) if n else x
    return reduce(multiply, factors)


def _integer_pow(ctx: Context, x: Value, y: int, **params: Any) -> Value:
    if y == 0:
        return ctx.full(1, x.dtype, x.shape)
    found: Value = integer_power(lambda a, b: ctx.add(ops.MUL, a, b), ctx.wide(x), abs(y))
    return ctx.cast(ctx.add(ops.RECIPROCAL, found) if y < 0 else found, x.dtype)


def _round(ctx: Context, x: Value, rounding_method: Any = 0, **params: Any) -> Value:
    def away(v: Any) -> Any:
        whole = jnp.trunc(v)
        return jnp.where(jnp.abs(v - whole) >= 0.5, whole + jnp.sign(v), whole)

    return ctx.add(ops.ROUND, x) if int(rounding_method) == 1 else decomposed(away)(ctx, x)


def _cbrt(x: Any, **params: Any) -> Any:
    """Of exp(log(x) / 3), with a step of Newton's method."""
    a = jnp.abs(x)
    safe = jnp.where((a == 0) | jnp.isinf(a), 1, a)
    y = jnp.exp(jnp.log(safe) / 3)
    y = y - (y * y * y - safe) / (3 * y * y)
    return jnp.where((a == 0) | jnp.isinf(a) | jnp.isnan(a), x, jnp.where(x < 0, -y, y))


def _nextafter(x: Any, y: Any) -> Any:
    kind = f"int{x.dtype.itemsize * 8}"
    bits, least = lax.bitcast_convert_type(x, kind), jnp.ones((), kind)
    away = (x < y) == (bits >= 0)  # from zero
    stepped = jnp.where(away, bits + 1, bits - 1)
    tiny = jnp.where(jnp.signbit(y), jnp.bitwise_or(least, jnp.iinfo(kind).min), least)
    found = lax.bitcast_convert_type(jnp.where(x == 0, tiny, stepped), x.dtype)
    return jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.nan, jnp.where(x == y, y, found)).astype(x.dtype)


def _clz(x: Any) -> Any:
    kind = x.dtype
    x = lax.bitcast_convert_type(x, f"uint{kind.itemsize * 8}")
    shift = 1
    while shift < kind.itemsize * 8:
        x = x | (x >> jnp.asarray(shift, x.dtype))
        shift *= 2
    return lax.population_count(~x).astype(kind)


def _reduce_precision(x: Any, exponent_bits: int, mantissa_bits: int, **params: Any) -> Any:
    """With fewer bits: rounded to the nearest, of two to the even one; what is too large is infinite, what is too small is 0."""
    info, kind = jnp.finfo(x.dtype), f"uint{x.dtype.itemsize * 8}"

    def bits(n: int) -> Any:
        return jnp.asarray(n, kind)

    given = lax.bitcast_convert_type(x, kind)
    found, drop = given, info.nmant - mantissa_bits
    if drop > 0:
        odd = (found >> bits(drop)) & bits(1)
        found = (found + odd + bits((1 << (drop - 1)) - 1)) & bits(((1 << info.bits) - 1) ^ ((1 << drop) - 1))
    exponents = ((1 << info.nexp) - 1) << info.nmant
    if exponent_bits < info.nexp:
        bias, least = (1 << (info.nexp - 1)) - 1, (1 << (exponent_bits - 1)) - 1
        exponent, sign = found & bits(exponents), found & bits(1 << (info.bits - 1))
        found = jnp.where(exponent > bits((bias + least) << info.nmant), sign | bits(exponents), found)
        found = jnp.where(exponent <= bits((bias - least) << info.nmant), sign, found)
    return jnp.where(jnp.isnan(x), x, lax.bitcast_convert_type(found, x.dtype))


def _mulhi(ctx: Context, x: Value, y: Value) -> Value:
    bits = BITS[x.dtype]
    if bits == 64:
        raise ctx.unsupported("products of 128 bits")
    wide = f"{'uint' if x.dtype[0] == 'u' else 'int'}{2 * bits}"
    product = ctx.add(ops.MUL, ctx.cast(x, wide), ctx.cast(y, wide))
    return ctx.cast(ctx.add(ops.SHIFT_RIGHT, product, ctx.number(bits, wide)), x.dtype)


def _same(ctx: Context, *operands: Operand, **params: Any) -> Any:
    return operands if len(ctx.eqn.outvars) > 1 else operands[0]


TABLE: Table = {
    "neg": _arithmetic(ops.NEG), "abs": _arithmetic(ops.ABS), "sign": _arithmetic(ops.SIGN), "not": forward(ops.NOT),
    "floor": partial(_rounding, ops.FLOOR), "ceil": partial(_rounding, ops.CEIL), "round": _round, "is_finite": _is_finite,
    **{name: forward(op) for name, op in {
        "exp": ops.EXP, "log": ops.LOG, "sqrt": ops.SQRT, "sin": ops.SIN, "cos": ops.COS, "tan": ops.TAN, "asin": ops.ASIN,
        "acos": ops.ACOS, "atan": ops.ATAN, "sinh": ops.SINH, "cosh": ops.COSH, "tanh": ops.TANH, "asinh": ops.ASINH,
        "acosh": ops.ACOSH, "atanh": ops.ATANH, "logistic": ops.SIGMOID, "erf": ops.ERF, "and": ops.AND, "or": ops.OR, "xor": ops.XOR,
        "shift_left": xla.SHIFT_BITS_LEFT, "shift_right_arithmetic": xla.SHIFT_BITS_RIGHT, "population_count": xla.POPCOUNT,
        "rem": xla.REMAINDER, "expm1": ops.EXPM1, "log1p": ops.LOG1P, "atan2": ops.ATAN2,
    }.items()},
    "add": _arithmetic(ops.ADD, ops.OR), "add_any": _arithmetic(ops.ADD, ops.OR), "sub": _arithmetic(ops.SUB), "mul": _mul,
    "max": _arithmetic(ops.MAX, ops.OR), "min": _arithmetic(ops.MIN, ops.AND), "integer_pow": _integer_pow,
    "square": lambda ctx, x, **params: ctx.add(ops.MUL, x, x), "mulhi": _mulhi,
    "eq": partial(_compare, ops.EQUAL), "lt": partial(_compare, ops.LESS), "le": partial(_compare, ops.LESS_EQUAL),
    "eq_to": partial(_compare_in_order, ops.EQUAL), "lt_to": partial(_compare_in_order, ops.LESS),
    "le_to": partial(_compare_in_order, ops.LESS_EQUAL),
    "gt": partial(_compare, ops.GREATER), "ge": partial(_compare, ops.GREATER_EQUAL),
    "div": _div, "shift_right_logical": _shift_right_logical, "select_n": _select,
    "convert_element_type": convert, "bitcast_convert_type": _bitcast,
    "exp2": decomposed(lambda x, **params: jnp.power(jnp.asarray(2, x.dtype), x)),
    "cbrt": decomposed(_cbrt),
    "nextafter": lambda ctx, x, y: ctx.inline(_nextafter, x, y), "clz": lambda ctx, x: ctx.inline(_clz, x),
    "reduce_precision": lambda ctx, x, **params: ctx.inline(partial(_reduce_precision, **params), x),
    **dict.fromkeys(("copy", "copy_p", "device_put", "stop_gradient", "optimization_barrier", "sharding_constraint", "name", "pvary",
                     "reduced_vary_cast_p", "layout_constraint", "tie", "reshard", "random_clone"), _same),
    "ne": lambda ctx, x, y: ctx.add(ops.NOT, _compare(ops.EQUAL, ctx, x, y)),
    "pow": lambda ctx, x, y: ctx.add(ops.POW, x, ctx.cast(y, x.dtype)),
    "clamp": lambda ctx, low, x, high: ctx.add(ops.MIN, ctx.add(ops.MAX, x, low), high),
    "rsqrt": lambda ctx, x, **params: ctx.cast(ctx.add(ops.RECIPROCAL, ctx.add(ops.SQRT, ctx.wide(x))), x.dtype),
}  # fmt: skip
