"""Operators that compute each element on its own: arithmetic, comparisons, logic, activations, conversions.

Every operator broadcasts by NumPy's rules and computes 16-bit floats in float32, rounding once at the end. The functions over
`Expr` at the top are the scalar definitions; other families fuse them into their own bodies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.dtypes import BITS, SIGNED, is_float
from tcomp.ir.expr import Dim, Expr, bitcast, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ops.broadcast import elementwise

# ---------------------------------------------------------------- scalar definitions


def divide(x: Expr, y: Expr) -> Expr:
    """x / y; integers truncate towards zero."""
    return x / y if is_float(x.dtype) else te.truncdiv(x, y)


def power(x: Expr, y: Expr) -> Expr:
    """x ** y in the type of x; the exponent may be of another type."""
    if not is_float(x.dtype) and is_float(y.dtype):
        exponent = cast(y, "float64")
        result = te.power(cast(x, "float64"), exponent)
        whole = te.equal(te.trunc(exponent), exponent)  # then an error in the last place must not cost a whole unit
        return cast(select(whole, te.round(result), result), x.dtype)
    return te.power(x, cast(y, x.dtype))


def sign(x: Expr) -> Expr:
    """1, 0 or -1; NaN stays."""
    if x.dtype not in SIGNED and not is_float(x.dtype):
        return minimum(x, 1)
    return select(x > 0, 1, select(x < 0, const(-1, x.dtype), x))


def relu(x: Expr) -> Expr:
    """max(x, 0)."""
    return maximum(x, 0)


def clip(x: Expr, low: Expr | float | None, high: Expr | float | None) -> Expr:
    """min(max(x, low), high); a bound may be left out."""
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


def log1p(x: Expr) -> Expr:
    """log(1 + x) for x >= 0, accurate near 0 (Kahan: the rounding of 1 + x cancels in x / (u - 1))."""
    u = 1.0 + x
    return select(te.equal(u, 1.0), x, te.log(u) * (x / select(te.equal(u, 1.0), 1.0, u - 1.0)))


def softplus(x: Expr) -> Expr:
    """log(1 + exp(x)) without overflow."""
    return maximum(x, 0.0) + log1p(te.exp(-te.abs(x)))


def leaky_relu(x: Expr, alpha: Expr | float) -> Expr:
    """x, or alpha x where it is negative."""
    return select(x < 0, x * alpha, x)


def elu(x: Expr, alpha: float) -> Expr:
    """x, or alpha (exp(x) - 1) where it is negative."""
    return select(x < 0, (te.exp(x) - 1.0) * alpha, x)


def selu(x: Expr, alpha: float, gamma: float) -> Expr:
    """The scaled exponential linear unit."""
    return select(x > 0, x, (te.exp(x) - 1.0) * alpha) * gamma


def celu(x: Expr, alpha: float) -> Expr:
    """max(x, 0) + min(alpha (exp(x / alpha) - 1), 0)."""
    return maximum(x, 0) + minimum(0.0 * x, (te.exp(x / alpha) - 1.0) * alpha) if alpha else maximum(x, 0)


def gelu(x: Expr, approximate: str) -> Expr:
    """x times the normal distribution function at x, by erf, or by tanh where `approximate` is "tanh"."""
    if approximate == "tanh":
        return 0.5 * x * (1.0 + te.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + te.erf(x * math.sqrt(0.5)))


def hard_sigmoid(x: Expr, alpha: float, beta: float) -> Expr:
    """alpha x + beta, clipped to [0, 1]."""
    return clip(x * alpha + beta, 0.0, 1.0)


def shrink(x: Expr, lambd: float, bias: float) -> Expr:
    """x moved towards 0 by the bias, 0 where |x| is at most lambda."""
    return select(x < -lambd, x + bias, select(x > lambd, x - bias, 0))


def convert(x: Expr, dtype: str) -> Expr:
    """Cast; float16 <-> bfloat16 goes through float32."""
    if {x.dtype, dtype} == {"float16", "bfloat16"}:
        x = cast(x, "float32")
    return cast(x, dtype)


# ---------------------------------------------------------------- operators


def _operator(name: str, function: Callable[..., Expr]) -> Operator:
    """An operator of one or two tensors without attributes."""

    def apply(*tensors: te.Tensor) -> te.Tensor:
        return elementwise(name, function, *tensors)

    return Operator(name, apply)


def _unary(name: str, function: Callable[..., Expr]) -> Operator:
    """An operator of one tensor; attributes are passed on to the scalar definition."""

    def apply(x: te.Tensor, **attrs: float | str) -> te.Tensor:
        return elementwise(name, lambda v: function(v, **attrs), x)

    return Operator(name, apply)


def _folded(name: str, function: Callable[[Expr, Expr], Expr]) -> Operator:
    """An operator of any number of tensors, folded from the left."""

    def element(first: Expr, *others: Expr) -> Expr:
        for other in others:
            first = function(first, other)
        return first

    return _operator(name, element)


ABS, NEG, NOT = _unary("abs", te.abs), _unary("neg", lambda x: -x), _unary("not", lambda x: ~x)
ACOS, ACOSH, ASIN, ASINH, ATAN, ATANH = (_unary(f.__name__, f) for f in (te.acos, te.acosh, te.asin, te.asinh, te.atan, te.atanh))
COS, COSH, SIN, SINH, TAN, TANH = (_unary(f.__name__, f) for f in (te.cos, te.cosh, te.sin, te.sinh, te.tan, te.tanh))
CEIL, FLOOR, ROUND, TRUNC = (_unary(f.__name__, f) for f in (te.ceil, te.floor, te.round, te.trunc))
EXP, LOG, SQRT, ERF = (_unary(f.__name__, f) for f in (te.exp, te.log, te.sqrt, te.erf))
RECIPROCAL = _unary("reciprocal", lambda x: 1.0 / x)
SIGMOID = _unary("sigmoid", te.sigmoid)
SIGN = _unary("sign", sign)
RELU = _unary("relu", relu)
LEAKY_RELU = _unary("leaky_relu", leaky_relu)
THRESHOLDED_RELU = _unary("thresholded_relu", lambda x, alpha: select(x > alpha, x, 0))
ELU, SELU, CELU = _unary("elu", elu), _unary("selu", selu), _unary("celu", celu)
GELU = _unary("gelu", gelu)
SWISH = _unary("swish", lambda x, alpha: x * te.sigmoid(x * alpha))
MISH = _unary("mish", lambda x: x * te.tanh(softplus(x)))
HARD_SIGMOID = _unary("hard_sigmoid", hard_sigmoid)
HARD_SWISH = _unary("hard_swish", lambda x: x * hard_sigmoid(x, 1 / 6, 0.5))
SOFTPLUS = _unary("softplus", softplus)
SOFTSIGN = _unary("softsign", lambda x: x / (1.0 + te.abs(x)))
SHRINK = _unary("shrink", shrink)
SCALE = _unary("scale", lambda x, factor: x * cast(const(factor, "float64"), x.dtype))
CLIP_CONST = _unary("clip_const", clip)

ADD = _operator("add", lambda x, y: x + y)
SUB = _operator("sub", lambda x, y: x - y)
MUL = _operator("mul", lambda x, y: x * y)
DIV = _operator("div", divide)
MOD, FMOD = _operator("mod", lambda x, y: x % y), _operator("fmod", te.truncmod)
PRELU = _operator("prelu", leaky_relu)
AND, OR, XOR = _operator("and", lambda x, y: x & y), _operator("or", lambda x, y: x | y), _operator("xor", lambda x, y: x ^ y)
SHIFT_LEFT, SHIFT_RIGHT = _operator("shift_left", lambda x, y: x << y), _operator("shift_right", lambda x, y: x >> y)
LESS, LESS_EQUAL = _operator("less", lambda x, y: x < y), _operator("less_equal", lambda x, y: x <= y)
GREATER, GREATER_EQUAL = _operator("greater", lambda x, y: x > y), _operator("greater_equal", lambda x, y: x >= y)
EQUAL, NOT_EQUAL = _operator("equal", te.equal), _operator("not_equal", te.not_equal)
WHERE = _operator("where", select)
MAX, MIN = _folded("max", maximum), _folded("min", minimum)
SUM = _folded("sum", lambda x, y: x + y)


def _pow(x: te.Tensor, y: te.Tensor) -> te.Tensor:
    """x ** y in the type of x; the exponent may be of another type."""
    result = elementwise("pow", power, x, y)
    return result if result.dtype == x.dtype else elementwise("pow.cast", lambda v: convert(v, x.dtype), result)


def _mean(*tensors: te.Tensor) -> te.Tensor:
    """Arithmetic mean of broadcast tensors."""

    def element(*values: Expr) -> Expr:
        total = values[0]
        for value in values[1:]:
            total = total + value
        return divide(total, const(len(values), total.dtype))

    return elementwise("mean", element, *tensors)


def _clip(x: te.Tensor, low: te.Tensor | None, high: te.Tensor | None) -> te.Tensor:
    """Elements kept within [low, high]; the bounds are scalars (or tensors of one element) or left out."""
    for bound in (low, high):
        if bound is not None and any(d != 1 for d in bound.shape):
            raise IRError("a bound of clip has more than one element", where=repr(bound))
    at = [None if bound is None else bound[(0,) * bound.ndim] for bound in (low, high)]
    return te.compute(x.shape, lambda *i: clip(x[i], *at), "clip")


def _cast(x: te.Tensor, dtype: str) -> te.Tensor:
    return te.compute(x.shape, lambda *i: convert(x[i], dtype), "cast")


def _bitcast(x: te.Tensor, dtype: str) -> te.Tensor:
    if BITS[dtype] != BITS[x.dtype]:
        raise IRError(f"bitcast of {x.dtype} to {dtype}: types of different width")
    if "bool" in (dtype, x.dtype):  # a bool is stored as 0 or 1
        return _cast(x, dtype)
    return te.compute(x.shape, lambda *i: bitcast(x[i], dtype), "bitcast")


def _isinf(x: te.Tensor, positive: bool, negative: bool) -> te.Tensor:
    """Whether an element is infinite, of the signs asked for."""

    def element(value: Expr) -> Expr:
        found = te.isinf(value)
        if not positive:
            found = found & (value < 0)
        return found if negative else found & (value > 0)

    return elementwise("isinf", element, x)


def _constant(shape: tuple[Dim, ...], value: float | bool, dtype: str) -> te.Tensor:
    """A tensor filled with one value."""
    return te.compute(shape, lambda *i: const(value, dtype), "full")


POW, MEAN = Operator("pow", _pow), Operator("mean", _mean)
CLIP = Operator("clip", _clip)
CAST, BITCAST = Operator("cast", _cast), Operator("bitcast", _bitcast)
ISNAN, ISINF = _unary("isnan", te.isnan), Operator("isinf", _isinf)
FULL = Operator("full", _constant)
