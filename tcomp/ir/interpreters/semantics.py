"""The semantics of every scalar operator, on NumPy arrays: the one definition behind both interpreters.

Results have exactly the dtype of the expression. Floats round once per operator: float16 and bfloat16 after every step, and
elementary functions are computed in float64 and rounded (so a float32 `exp` is right to 0.5 ulp). Integers wrap around; an
integer divided by zero gives 0 with remainder 0; shifts by the width or more push every bit out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from tcomp.errors import IRError
from tcomp.ir.dtypes import integer_range, is_float, to_numpy
from tcomp.ir.scalar_operators import ARITY

Array = np.ndarray[Any, Any]


def literal(value: Any, dtype: str) -> Array:
    """A constant as a 0-d array."""
    return np.array(value, to_numpy(dtype))


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which NumPy finds anew each time, for half of what an operator takes on a single element


def apply(op: str, dtype: str, args: Sequence[Array]) -> Array:
    """The value of `op` (one of `ARITY`, "cast", "bitcast") with result type `dtype`.

    Operands broadcast. Raises `IRError` where `op` is not defined for the operands' type.
    """
    kind = _name(args[0].dtype)
    with np.errstate(all="ignore"):
        match op:
            case "cast":
                return cast(args[0], dtype)
            case "checked":
                return args[0]
            case "bitcast":
                return cast(args[0], dtype) if dtype == "bool" else np.asarray(args[0]).view(to_numpy(dtype))
        function = (_BOOL if kind == "bool" else _FLOAT if is_float(kind) else _INTEGER).get(op)
        if function is not None:
            return np.asarray(function(*args))
    if op not in ARITY:
        raise IRError(f"`{op}` is not an elementwise operator")
    raise IRError(f"`{op}` is not defined for {kind}", hint="use floordiv or truncdiv, or cast to a float type" if op == "div" else "")


def _integer_power(a: Array, b: Array) -> Array:
    if b.dtype.kind == "u":
        return np.power(a, b)
    # a ** -n is 1 / a ** n truncated: zero but for a = 1 and a = -1.
    inverse = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b & 1), 0)).astype(a.dtype)
    return np.where(b < 0, inverse, np.power(a, np.maximum(b, 0)))


def _popcount(x: Array) -> Any:
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, x.itemsize)
    return np.unpackbits(octets, axis=-1).sum(axis=-1, dtype=x.dtype)


def _through_float64(function: Function, *args: Array) -> Array:
    return np.asarray(function(*(a.astype(np.float64, copy=False) for a in args))).astype(args[0].dtype, copy=False)


def erf(x: Array) -> Array:
    """The error function in float64, to about 1 ulp (W. J. Cody, Rational Chebyshev approximations for the error function, 1969)."""
    y = np.minimum(np.abs(x), 6.0)  # erf(6) rounds to 1; NaN stays
    square = y * y
    small = x * _rational(square, ERF_SMALL)
    middle = 1.0 - np.exp(-square) * _rational(np.minimum(y, 4.0), ERF_MIDDLE)
    inverse = 1.0 / np.maximum(square, 1.0)
    tail = 1.0 - np.exp(-square) / np.maximum(y, 1.0) * (0.5641895835477562869 - inverse * _rational(inverse, ERF_TAIL))
    return np.where(y <= 0.46875, small, np.copysign(np.where(y <= 4.0, middle, tail), x))


def _rational(x: Array, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Array:
    numerator, denominator = (np.zeros_like(x) for _ in range(2))
    for p, q in zip(*coefficients, strict=True):
        numerator, denominator = numerator * x + p, denominator * x + q
    return numerator / denominator


ERF_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
ERF_MIDDLE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1, 2.98635138197400131e2,
     8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)  # fmt: skip
ERF_TAIL = (
    (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
     1.60837851487422766e-2, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242e0, 1.87295284992346725e0, 5.27905102951428412e-1, 6.05183413124413191e-2,
     2.33520497626869185e-3),
)  # fmt: skip


def cast(x: Array, dtype: str) -> Array:
    """Conversion: float -> integer truncates and saturates (NaN gives 0), integer -> integer wraps, to bool tests != 0."""
    target = to_numpy(dtype)
    if x.dtype == target:
        return x
    if dtype == "bool":
        return np.asarray(x != literal(0, x.dtype.name))
    with np.errstate(all="ignore"):
        if not is_float(x.dtype.name) or is_float(dtype):
            return x.astype(target)
        (lo, hi), whole = integer_range(dtype), np.trunc(x.astype(np.float64, copy=False))
        # float(hi) may round up to hi + 1 (64 bits): >= sends exactly the values that do not fit to `hi`.
        converted = np.where((whole > lo) & (whole < hi), whole, 0.0).astype(target)  # a NaN becomes 0
        return np.where(whole >= hi, target.type(hi), np.where(whole <= lo, target.type(lo), converted))


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once, by error-free transformations (float64: correct but for ties at double precision)."""
    if a.dtype != np.float64:
        # The product is exact in float64. The sum is rounded to odd, so that rounding it again to `dtype` is harmless.
        total, error = _two_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
        bits, step = total.view(np.int64), np.where((error > 0) == (total > 0), 1, -1)
        inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        return np.where(inexact, (bits + step).view(np.float64), total).astype(a.dtype)
    product = a * b
    (a_hi, a_lo), (b_hi, b_lo) = _halves(a), _halves(b)
    below = a_lo * b_lo - (((product - a_hi * b_hi) - a_lo * b_hi) - a_hi * b_lo)
    total, error = _two_sum(product, c)
    exact = total + (error + below)
    return np.where(np.isfinite(exact), exact, product + c)


def _ldexp(a: Array, n: Array) -> Array:
    return np.asarray(np.ldexp(a, np.clip(np.nan_to_num(n), -5000, 5000).astype(np.int32)), a.dtype)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = np.asarray(a + b)
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _halves(x: Array) -> tuple[Array, Array]:
    scaled = x * 134217729.0  # 2**27 + 1 (Veltkamp)
    high = scaled - (scaled - x)
    return high, x - high


Function = Callable[..., Any]
_ELEMENTARY: dict[str, Function] = {
    "pow": np.power, "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "tanh": np.tanh, "erf": erf, "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh,
}  # fmt: skip
_COMPARISON: dict[str, Function] = {"lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal}
_NUMBERS: dict[str, Function] = _COMPARISON | {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "floordiv": np.floor_divide,
    "mod": np.remainder, "truncmod": np.fmod, "neg": np.negative, "abs": np.abs,
}  # fmt: skip
_EXACT: dict[str, Function] = {"not": np.invert} | dict.fromkeys(("isnan", "isinf"), lambda x: np.zeros(x.shape, bool))
_FLOAT: dict[str, Function] = _NUMBERS | {op: partial(_through_float64, function) for op, function in _ELEMENTARY.items()} | {
    "div": np.divide, "truncdiv": lambda a, b: np.trunc(a / b), "isnan": np.isnan, "isinf": np.isinf, "floor": np.floor, "ceil": np.ceil,
    "round": np.rint, "trunc": np.trunc, "fma": _fma, "ldexp": _ldexp,
}  # fmt: skip
_INTEGER: dict[str, Function] = _NUMBERS | _EXACT | dict.fromkeys(("floor", "ceil", "round", "trunc"), lambda x: x) | {
    "truncdiv": lambda a, b: (a - np.fmod(a, b)) // b, "pow": _integer_power, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift, "popcount": _popcount,
}  # fmt: skip
_BOOL: dict[str, Function] = _COMPARISON | _EXACT | {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "min": np.logical_and, "max": np.logical_or,
    "mul": np.logical_and, "add": np.logical_or, "abs": lambda x: x, "select": np.where,
}  # fmt: skip
