"""Broadcasting, and operators that compute each element on its own: arithmetic, comparisons, logic, activations, conversions.

Every operator broadcasts by NumPy's rules and computes 16-bit floats in float32, rounding once at the end. The functions over
`Expr` are scalar definitions that other families use in their own bodies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add, ge, gt, le, lt
from typing import Any

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.dtypes import BITS, NARROW, NARROW_FLOATS, SIGNED, is_float, is_integer
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, bitcast, bounds, cast, checked, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.narrow import convert
from tcomp.ir.te import Tensor, elementwise

TABLE = 64  # values chosen by their number, compared with one after the other: default schedules unroll such loops; of more, as below
CHAIN = 8  # values that are chosen by one condition after the other; of more, halves are chosen first


def pick(number: Expr, values: Sequence[Expr]) -> Expr:
    """values[number]; which one is known where the loop over numbers is unrolled."""
    if len(values) > TABLE:
        return piecewise(number, range(1, len(values) + 1), values)
    *others, found = values
    for n in reversed(range(len(others))):
        found = select(te.equal(number, n), others[n], found)
    return found


def piecewise(at: Expr, ends: Sequence[Dim], values: Sequence[Expr]) -> Expr:
    """The first value whose end is above `at`, the last one if there is none; ends increase. Many values are halved repeatedly, so that
    expressions are no deeper than the logarithm of their number."""
    if len(values) > CHAIN:
        half = len(values) // 2
        low, high = (piecewise(at, ends[part], values[part]) for part in (slice(half), slice(half, None)))
        return select(at < as_expr(ends[half - 1]), low, high)
    *others, found = values
    for value, end in zip(reversed(others), reversed(ends[: len(others)]), strict=True):
        found = select(at < as_expr(end), value, found)
    return found


def divisor(y: Expr) -> Expr:
    """A divisor that is checked: the run ends with an error where an integer is 0, which is replaced by 1."""
    low, high = bounds(y)
    if not is_integer(y.dtype) or (low is not None and low > 0) or (high is not None and high < 0):
        return y
    return y + cast(checked(cast(te.equal(y, 0), INDEX), 1, as_expr(0)), y.dtype)


def divide(x: Expr, y: Expr) -> Expr:
    """x / y; integers truncate towards zero."""
    return x / y if is_float(x.dtype) else te.truncdiv(x, divisor(y))


def clip(x: Expr, low: Expr | float | None, high: Expr | float | None) -> Expr:
    """min(max(x, low), high); a bound may be left out."""
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


def softplus(x: Expr) -> Expr:
    """log(1 + exp(x)) without overflow, and accurate where exp(x) is small (Kahan: the rounding of u = 1 + y cancels in y / (u - 1))."""
    y = te.exp(-te.abs(x))
    u = 1.0 + y
    return maximum(x, 0.0) + select(te.equal(u, 1.0), y, te.log(u) * (y / select(te.equal(u, 1.0), 1.0, u - 1.0)))


def _expm1(x: Expr) -> Expr:
    """exp(x) - 1, as 2 t / (1 - t) with t = tanh(x / 2) where the difference would lose digits."""
    t = te.tanh(x * 0.5)
    return select(te.abs(x) < 0.5, 2.0 * t / (1.0 - t), te.exp(x) - 1.0)


def log1p(x: Expr) -> Expr:
    """log(u) * (x / (u - 1)) with u = 1 + x, whose rounding cancels (Kahan)."""
    u = 1.0 + x
    exact = te.equal(u, 1.0) | (te.isinf(x) & (x > 0))
    return select(exact, x, te.log(u) * (x / select(exact, 1.0, u - 1.0)))


def log_add_exp(x: Expr, y: Expr) -> Expr:
    """log(exp(x) + exp(y)), without overflow."""
    top = maximum(x, y)
    return select(te.isinf(top), top, top + log1p(te.exp(-te.abs(x - y))))


def sign_bit(x: Expr) -> Expr:
    """Whether an integer, or a float of 32 or 64 bits, is negative, -0.0 and NaN with a sign included."""
    if x.dtype not in SIGNED and not is_float(x.dtype):
        return const(False, "bool")
    return (bitcast(x, f"int{BITS[x.dtype]}") if is_float(x.dtype) else x) < 0


def _floor_divide(x: Expr, y: Expr) -> Expr:
    """x / y, rounded down: from the remainder, which is exact."""
    quotient = divide(x - x % divisor(y), y)
    return te.round(quotient) if is_float(x.dtype) else quotient


def _trunc_divide(x: Expr, y: Expr) -> Expr:
    """x / y, rounded towards zero."""
    return te.trunc(x / y) if is_float(x.dtype) else divide(x, y)


def _ordered(compare: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    """A comparison by size, in which False is less than True."""
    return lambda x, y: compare(*(cast(v, "int32") if v.dtype == "bool" else v for v in (x, y)))


def _of_floats(function: Callable[..., Expr], otherwise: Callable[[Expr], Expr] = lambda x: x) -> Callable[..., Expr]:
    """A function of floats, and what it is of other numbers: by default these themselves."""
    return lambda x, **attrs: function(x, **attrs) if is_float(x.dtype) else otherwise(x)


def _atan2(y: Expr, x: Expr) -> Expr:
    """The angle of (x, y), by the arc tangent of a quotient that is at most 1 in size, in each of four sectors."""
    wide, tall = te.abs(x), te.abs(y)
    small, large = minimum(wide, tall), maximum(wide, tall)
    angle = te.atan(select(te.isinf(small), 1.0, small / select(te.equal(large, 0.0), 1.0, large)))
    angle = select(tall > wide, math.pi / 2 - angle, angle)
    angle = select(sign_bit(x), math.pi - angle, angle)
    return select(te.isnan(x) | te.isnan(y), const(math.nan, x.dtype), select(sign_bit(y), -angle, angle))


def _hypot(x: Expr, y: Expr) -> Expr:
    """Of the larger one times sqrt(1 + the square of the quotient), which does not overflow."""
    small, large = minimum(te.abs(x), te.abs(y)), maximum(te.abs(x), te.abs(y))
    q = small / select(te.equal(large, 0.0), 1.0, large)
    return select(te.isinf(large), large, large * te.sqrt(1.0 + q * q))


def _without_nan(op: Callable[[Expr, Expr], Expr], x: Expr, y: Expr) -> Expr:
    """The larger or smaller one of two numbers; the other one, where one is NaN (maximumNumber and minimumNumber of IEEE 754)."""
    return op(x, y) if not is_float(x.dtype) else select(te.isnan(x), y, select(te.isnan(y), x, op(x, y)))


def leaky_relu(x: Expr, alpha: Expr | float) -> Expr:
    """x, or alpha x where it is negative."""
    return select(x < 0, x * alpha, x)


def elu(x: Expr, alpha: float) -> Expr:
    """x, or alpha (exp(x) - 1) where it is negative."""
    return select(x < 0, (te.exp(x) - 1.0) * alpha, x)


def hard_sigmoid(x: Expr, alpha: float, beta: float) -> Expr:
    """alpha x + beta, clipped to [0, 1]."""
    return clip(x * alpha + beta, 0.0, 1.0)


def _power(x: Expr, y: Expr) -> Expr:
    if not is_float(x.dtype) and is_float(y.dtype):
        exponent = cast(y, "float64")
        result = te.power(cast(x, "float64"), exponent)
        whole = te.equal(te.trunc(exponent), exponent)  # then an error in the last place must not cost a whole unit
        return cast(select(whole, te.round(result), result), x.dtype)
    return te.power(x, cast(y, x.dtype))


def _sign(x: Expr) -> Expr:
    """1, 0 or -1; NaN stays."""
    if x.dtype not in SIGNED and not is_float(x.dtype):
        return minimum(x, 1)
    return select(x > 0, 1, select(x < 0, const(-1, x.dtype), x))


def _gelu(x: Expr, approximate: str) -> Expr:
    """x times the normal distribution function at x, by erf, or by tanh where `approximate` is "tanh"."""
    if approximate == "tanh":
        return 0.5 * x * (1.0 + te.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + te.erf(x * math.sqrt(0.5)))


def _isinf(x: Expr, positive: bool, negative: bool) -> Expr:
    found = te.isinf(x) if positive else te.isinf(x) & (x < 0)
    return found if negative else found & (x > 0)


def _convert(x: Expr, dtype: str, **narrowed: Any) -> Expr:
    """Cast; float16 <-> bfloat16 goes through float32. To narrow types as by `narrow.convert`."""
    if narrowed:
        return convert(x, dtype, **narrowed)
    return cast(cast(x, "float32") if {x.dtype, dtype} == {"float16", "bfloat16"} else x, dtype)


def pointwise(name: str, function: Callable[..., Expr]) -> Operator:
    """The operator that applies a scalar definition to broadcast tensors, its attributes passed on by name."""
    return Operator(name, lambda *tensors, **attrs: elementwise(name, partial(function, **attrs), *tensors))


ABS, NEG, NOT = pointwise("abs", te.abs), pointwise("neg", lambda x: -x), pointwise("not", lambda x: ~x)
ACOS, ACOSH, ASIN, ASINH, ATAN, ATANH = (pointwise(f.__name__, f) for f in (te.acos, te.acosh, te.asin, te.asinh, te.atan, te.atanh))
COS, COSH, SIN, SINH, TAN, TANH = (pointwise(f.__name__, f) for f in (te.cos, te.cosh, te.sin, te.sinh, te.tan, te.tanh))
CEIL, FLOOR, ROUND, TRUNC = (pointwise(f.__name__, _of_floats(f)) for f in (te.ceil, te.floor, te.round, te.trunc))
EXPM1, LOG1P, SIGN_BIT = pointwise("expm1", _expm1), pointwise("log1p", log1p), pointwise("sign_bit", sign_bit)
ATAN2, HYPOT = pointwise("atan2", _atan2), pointwise("hypot", _hypot)
FMAX, FMIN = pointwise("fmax", partial(_without_nan, maximum)), pointwise("fmin", partial(_without_nan, minimum))
EXP, LOG, SQRT, ERF = (pointwise(f.__name__, f) for f in (te.exp, te.log, te.sqrt, te.erf))
RECIPROCAL, RSQRT = pointwise("reciprocal", lambda x: 1.0 / x), pointwise("rsqrt", lambda x: 1.0 / te.sqrt(x))
LOG2, LOG10 = pointwise("log2", lambda x: te.log(x) / math.log(2)), pointwise("log10", lambda x: te.log(x) / math.log(10))
EXP2, SIGN = pointwise("exp2", lambda x: te.power(const(2.0, x.dtype), x)), pointwise("sign", _sign)
COPY_SIGN = pointwise("copy_sign", lambda x, y: select(sign_bit(y), -te.abs(x), te.abs(x)))
ANGLE = pointwise("angle", lambda x: select(te.isnan(x), x, select(x < 0, const(math.pi, x.dtype), 0)))
SIGMOID, SOFTPLUS = pointwise("sigmoid", te.sigmoid), pointwise("softplus", softplus)
RELU, LEAKY_RELU = pointwise("relu", lambda x: maximum(x, 0)), pointwise("leaky_relu", leaky_relu)
THRESHOLDED_RELU = pointwise("thresholded_relu", lambda x, alpha: select(x > alpha, x, 0))
ELU = pointwise("elu", elu)
CELU = pointwise("celu", lambda x, alpha: maximum(x, 0) + minimum(0.0 * x, (te.exp(x / alpha) - 1.0) * alpha) if alpha else maximum(x, 0))
SELU = pointwise("selu", lambda x, alpha, gamma: select(x > 0, x, (te.exp(x) - 1.0) * alpha) * gamma)
GELU = pointwise("gelu", _gelu)
SWISH = pointwise("swish", lambda x, alpha: x * te.sigmoid(x * alpha))
MISH = pointwise("mish", lambda x: x * te.tanh(softplus(x)))
HARD_SIGMOID = pointwise("hard_sigmoid", hard_sigmoid)
HARD_SWISH = pointwise("hard_swish", lambda x: x * hard_sigmoid(x, 1 / 6, 0.5))
SOFTSIGN = pointwise("softsign", lambda x: x / (1.0 + te.abs(x)))
SHRINK = pointwise("shrink", lambda x, lambd, bias: select(x < -lambd, x + bias, select(x > lambd, x - bias, 0)))
SCALE = pointwise("scale", lambda x, factor: x * cast(const(factor, "float64"), x.dtype))
CLIP_CONST = pointwise("clip_const", clip)
_FALSE = const(False, "bool")
ISNAN, ISINF = pointwise("isnan", _of_floats(te.isnan, lambda x: _FALSE)), pointwise("isinf", _of_floats(_isinf, lambda x: _FALSE))

ADD, SUB = pointwise("add", lambda x, y: x + y), pointwise("sub", lambda x, y: x - y)
MUL, DIV = pointwise("mul", lambda x, y: x * y), pointwise("div", divide)
FLOOR_DIVIDE, TRUNC_DIVIDE = pointwise("floor_divide", _floor_divide), pointwise("trunc_divide", _trunc_divide)
MOD, FMOD = pointwise("mod", lambda x, y: x % divisor(y)), pointwise("fmod", lambda x, y: te.truncmod(x, divisor(y)))
PRELU = pointwise("prelu", leaky_relu)
AND, OR, XOR = pointwise("and", lambda x, y: x & y), pointwise("or", lambda x, y: x | y), pointwise("xor", lambda x, y: x ^ y)
SHIFT_LEFT, SHIFT_RIGHT = pointwise("shift_left", lambda x, y: x << y), pointwise("shift_right", lambda x, y: x >> y)
LESS, LESS_EQUAL = pointwise("less", _ordered(lt)), pointwise("less_equal", _ordered(le))
GREATER, GREATER_EQUAL = pointwise("greater", _ordered(gt)), pointwise("greater_equal", _ordered(ge))
EQUAL, NOT_EQUAL = pointwise("equal", te.equal), pointwise("not_equal", te.not_equal)
WHERE = pointwise("where", select)
MAX, MIN = pointwise("max", lambda *values: reduce(maximum, values)), pointwise("min", lambda *values: reduce(minimum, values))
SUM = pointwise("sum", lambda *values: reduce(add, values))
MEAN = pointwise("mean", lambda *values: divide(total := reduce(add, values), const(len(values), total.dtype)))


def _required(x: Expr, condition: Expr) -> Expr:
    """x; the run ends with an error where the condition is false."""
    return select(te.equal(checked(cast(~condition, INDEX), 1), 0), x, cast(const(0), x.dtype))


REQUIRED = pointwise("required", _required)


def _pow(x: Tensor, y: Tensor) -> Tensor:
    result = elementwise("pow", _power, x, y)
    return result if result.dtype == x.dtype else elementwise("pow.cast", lambda v: _convert(v, x.dtype), result)


def _clip(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """Elements kept within [low, high]; the bounds are scalars (or tensors of one element) or left out."""
    if wide := [bound for bound in (low, high) if bound is not None and any(d != 1 for d in bound.shape)]:
        raise IRError("a bound of clip has more than one element", where=repr(wide[0]))
    at = [None if bound is None else bound[(0,) * bound.ndim] for bound in (low, high)]
    return te.compute(x.shape, lambda *i: clip(x[i], *at), "clip")


def _cast(x: Tensor, dtype: str, **narrowed: Any) -> Tensor:
    return te.compute(x.shape, lambda *i: _convert(x[i], dtype, **narrowed), "cast")


def _bitcast(x: Tensor, dtype: str) -> Tensor:
    if (NARROW.get(dtype) or BITS[dtype]) != (NARROW.get(x.dtype) or BITS[x.dtype]):
        raise IRError(f"bitcast of {x.dtype} to {dtype}: types of different width")
    boolean = "bool" in (dtype, x.dtype)  # stored as 0 or 1
    if boolean and (dtype in NARROW_FLOATS or x.dtype in NARROW_FLOATS):
        raise IRError(f"bitcast of {x.dtype} to {dtype}", hint="by way of uint8")
    return _cast(x, dtype) if boolean else te.compute(x.shape, lambda *i: bitcast(x[i], dtype), "bitcast")


POW, CLIP, CAST, BITCAST = Operator("pow", _pow), Operator("clip", _clip), Operator("cast", _cast), Operator("bitcast", _bitcast)
ROUND_TO = pointwise("round_to", lambda x, dtype: cast(cast(x, dtype), x.dtype))  # the nearest number of a 16-bit type
FULL = Operator("full", lambda shape, value, dtype: te.compute(shape, lambda *i: const(value, dtype), "full"))
