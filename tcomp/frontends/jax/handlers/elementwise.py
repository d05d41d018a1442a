"""Elementwise primitives, special functions among them. Their operands are of one shape, or scalars."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lax import special as definitions

from tcomp.frontends.jax.context import Context, Handler, Operand, Parts, Table, decomposed, is_complex, part_types
from tcomp.ir.dtypes import BITS, NARROW_FLOATS
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ops, movement, reduction, special, xla

SOFTMAX_NODES = 16  # in which a softmax is looked for, the last ones


def forward(op: Operator, of_bools: Operator | None = None) -> Handler:
    """The operator on the same operands, or another one for bools; parameters are hints alone."""

    def handle(ctx: Context, *operands: Value, **params: Any) -> Value:
        return ctx.add(of_bools if of_bools is not None and operands[0].dtype == "bool" else op, *ctx.aligned(*operands))

    return handle


def _in_order(op: Operator) -> Handler:
    """A comparison in the order of all floats, NaN and -0 included."""
    return lambda ctx, *operands: ctx.add(op, *(ctx.add(xla.TOTAL_ORDER, x) for x in operands))


def convert(ctx: Context, x: Operand, new_dtype: Any, **params: Any) -> Operand:
    """An array, real or complex, in another element type."""
    to = part_types(new_dtype)[0]
    if isinstance(x, Parts):
        if is_complex(new_dtype):
            return Parts(tuple(ctx.cast(v, to) for v in x.values), new_dtype)
        x = x.values[0]
    if to in NARROW_FLOATS:  # what is too large becomes what the type has for it
        return x if x.dtype == to else ctx.add(ops.CAST, x, dtype=to, saturate=False)
    found = ctx.cast(x, to)
    return Parts((found, ctx.full(0.0, to, x.shape)), new_dtype) if is_complex(new_dtype) else found


def _select(ctx: Context, which: Value, *cases: Value) -> Value:
    return ctx.add(ops.WHERE, which, *cases[::-1]) if which.dtype == "bool" else ctx.add(xla.SELECT_N, which, *cases)


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
    found: Value = forward(ops.MUL, ops.AND)(ctx, x, y)
    return found


def _typed(function: Any) -> Handler:
    """A function of JAX that needs operands of one shape, and their type."""
    return decomposed(lambda *xs, **params: function(*jnp.broadcast_arrays(*xs), dtype=xs[0].dtype))


def _same(ctx: Context, *operands: Operand, **params: Any) -> Any:
    return operands if len(ctx.eqn.outvars) > 1 else operands[0]


TABLE: Table = {
    **{name: forward(op) for name, op in {
        "neg": ops.NEG, "abs": ops.ABS, "sign": ops.SIGN, "not": ops.NOT, "floor": ops.FLOOR, "ceil": ops.CEIL, "is_finite": xla.IS_FINITE,
        "exp": ops.EXP, "exp2": ops.EXP2, "log": ops.LOG, "sqrt": ops.SQRT, "rsqrt": ops.RSQRT, "cbrt": xla.CBRT, "sin": ops.SIN,
        "cos": ops.COS, "tan": ops.TAN, "asin": ops.ASIN, "acos": ops.ACOS, "atan": ops.ATAN, "atan2": ops.ATAN2, "sinh": ops.SINH,
        "cosh": ops.COSH, "tanh": ops.TANH, "asinh": ops.ASINH, "acosh": ops.ACOSH, "atanh": ops.ATANH, "logistic": ops.SIGMOID,
        "erf": ops.ERF, "expm1": ops.EXPM1, "log1p": ops.LOG1P, "sub": ops.SUB, "and": ops.AND, "or": ops.OR, "xor": ops.XOR,
        "eq": ops.EQUAL, "ne": ops.NOT_EQUAL, "lt": ops.LESS, "le": ops.LESS_EQUAL, "gt": ops.GREATER, "ge": ops.GREATER_EQUAL,
        "shift_left": xla.SHIFT_BITS_LEFT, "shift_right_arithmetic": xla.SHIFT_BITS_RIGHT, "shift_right_logical": xla.SHIFT_RIGHT_LOGICAL,
        "population_count": xla.POPCOUNT, "clz": xla.LEADING_ZEROS, "mulhi": xla.HIGH_PRODUCT, "rem": xla.REMAINDER,
        "nextafter": xla.NEXT_AFTER, "erf_inv": special.ERF_INV, "erfc": special.ERFC, "lgamma": special.LGAMMA,
        "digamma": special.DIGAMMA, "zeta": special.ZETA, "polygamma": special.POLYGAMMA, "bessel_i0e": special.BESSEL_I0E,
        "bessel_i1e": special.BESSEL_I1E,
    }.items()},
    "add": forward(ops.ADD, ops.OR), "add_any": forward(ops.ADD, ops.OR), "mul": _mul, "div": _div, "max": forward(ops.MAX, ops.OR),
    "min": forward(ops.MIN, ops.AND), "select_n": _select, "convert_element_type": convert, 
    "bitcast_convert_type": lambda ctx, x, **params: ctx.add(
        ops.BITCAST if BITS[x.dtype] == BITS[ctx.dtype] else xla.BITCAST_PARTS, x, dtype=ctx.dtype),
    "eq_to": _in_order(ops.EQUAL), "lt_to": _in_order(ops.LESS), "le_to": _in_order(ops.LESS_EQUAL),
    **dict.fromkeys(("copy", "copy_p", "device_put", "stop_gradient", "optimization_barrier", "sharding_constraint", "name", "pvary",
                     "reduced_vary_cast_p", "layout_constraint", "tie", "reshard", "random_clone"), _same),
    "pow": lambda ctx, x, y: ctx.add(ops.POW, x, ctx.cast(y, x.dtype)),
    "square": lambda ctx, x, **params: ctx.add(ops.MUL, x, x),
    "integer_pow": lambda ctx, x, y, **params: ctx.add(xla.INTEGER_POW, x, exponent=y),
    "clamp": lambda ctx, low, x, high: ctx.add(ops.MIN, ctx.add(ops.MAX, x, low), high),
    "round": lambda ctx, x, rounding_method: ctx.add(ops.ROUND if int(rounding_method) == 1 else xla.ROUND_AWAY, x),
    "reduce_precision": lambda ctx, x, exponent_bits, mantissa_bits, **params: ctx.add(
        xla.REDUCE_PRECISION, x, exponent_bits=int(exponent_bits), mantissa_bits=int(mantissa_bits)),
    **{name: _typed(function) for name, function in {
        "igamma": definitions.igamma_impl, "igammac": definitions.igammac_impl, "igamma_grad_a": definitions.igamma_grad_a_impl,
        "random_gamma_grad": definitions.random_gamma_grad_impl,
        "regularized_incomplete_beta": definitions.regularized_incomplete_beta_impl,
    }.items()},
}  # fmt: skip
