"""Scalar values of a translated function: expressions that follow the type rules of NumPy.

A value is *weak* where plain Python has one of its own numbers: literals, sizes, loop variables and what is computed from these alone.
Beside an array element a weak number takes the element's dtype (NEP 50); on its own it is an int64, a float64 or a bool. Weak constants are
computed by Python here and now, as they would be in the function. Python's unbounded integers wrap around at 64 bits, and a division
of Python numbers by zero gives inf or nan instead of an exception.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS, is_float, is_integer, to_numpy
from tcomp.ir.expr import INDEX, Expr, const

DOUBLE = "float64"
_WEAK = ("bool", INDEX, DOUBLE)  # in the order of Python's own promotion


class Type(NamedTuple):
    """An element type, or that of a Python number."""

    dtype: str
    weak: bool


class Value(NamedTuple):
    """A scalar: its expression, and whether it is a number of Python."""

    expr: Expr
    weak: bool

    @property
    def type(self) -> Type:
        """The name of its element type."""
        return Type(self.expr.dtype, self.weak)

    @property
    def known(self) -> bool:
        """Its value, where that is a constant."""
        return self.weak and self.expr.op == "const"

    def to(self, dtype: str) -> Expr:
        """It, converted to another element type."""
        return E.cast(self.expr, dtype)


def number(value: Any) -> Value | None:
    """A number of Python or NumPy as a value; None for anything else."""
    if isinstance(value, np.generic):
        return Value(const(value, value.dtype.name), False) if value.dtype.name in BITS else None
    if isinstance(value, bool | int | float):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise IRError(f"the integer {value} has more than 64 bits")
        return Value(const(value, "bool" if isinstance(value, bool) else INDEX if isinstance(value, int) else DOUBLE), True)
    return None


def join(a: Type, b: Type) -> Type:
    """The type that both convert to. Raises `IRError` where NumPy has none."""
    if a.weak and b.weak:
        return Type(max(a.dtype, b.dtype, key=_WEAK.index), True)
    if a.weak or b.weak:
        weak, strong = (a, b) if a.weak else (b, a)
        if weak.dtype == DOUBLE and not is_float(strong.dtype):
            return Type(DOUBLE, False)
        return Type(weak.dtype if strong.dtype == "bool" else strong.dtype, False)
    if a.dtype == b.dtype:
        return a
    try:
        dtype = np.promote_types(to_numpy(a.dtype), to_numpy(b.dtype)).name
    except TypeError:
        dtype = ""
    if dtype not in BITS:
        raise IRError(f"{a.dtype} and {b.dtype} have no common type", hint=f"convert one, as in np.{a.dtype}(x)")
    return Type(dtype, False)


def truth(value: Value, what: str) -> Expr:
    """A condition. Raises `IRError` for numbers, whose truth Python would test."""
    if value.expr.dtype != "bool":
        raise IRError(f"{what} is {_a(value)} instead of a truth value", hint="compare it, as in `x != 0`")
    return value.expr


def _a(value: Value) -> str:
    return f"a {value.expr.dtype}"


# ---------------------------------------------------------------- operators

_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "floordiv": operator.floordiv,
    "mod": operator.mod, "pow": operator.pow, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift,
    "shr": operator.rshift, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne, "min": min, "max": max,
}  # fmt: skip


def apply(op: str, a: Value, b: Value) -> Value:
    """A binary operator of the loop IR, or a comparison, on values of any types. Raises `IRError` where Python or NumPy has none."""
    if a.known and b.known:
        return _folded(op, a, b)
    kind = join(a.type, b.type)
    if op == "div" and not is_float(kind.dtype):
        kind = Type(DOUBLE, kind.weak)
    if kind.dtype == "bool" and op not in (*E.BITWISE, "eq", "ne"):
        raise IRError(f"`{op}` of truth values", hint="convert them: int(x)")
    if op in E.BITWISE and is_float(kind.dtype):
        raise IRError(f"`{op}` of {_a(a)} and {_a(b)}", why="it is defined for integers and truth values")
    if op == "pow" and is_integer(kind.dtype):
        raise IRError("a power of integers that are not known here", hint="multiply: x * x")
    result = E.binary(op, a.to(kind.dtype), b.to(kind.dtype))
    return Value(result, kind.weak and op not in E.COMPARISON)


def _folded(op: str, a: Value, b: Value) -> Value:
    try:
        result = number(_FOLD[op](a.expr.attr, b.expr.attr))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise IRError(f"`{op}` of {a.expr.attr} and {b.expr.attr}", why=str(error)) from None
    if result is None:
        raise IRError(f"`{op}` of {a.expr.attr} and {b.expr.attr} is no real number")
    return result


def negative(a: Value) -> Value:
    """Unary minus."""
    if a.expr.dtype == "bool":
        raise IRError("`-` of a truth value", hint="use `not`")
    return Value(E.unary("neg", a.expr), a.weak)


def inverted(a: Value) -> Value:
    """Bitwise or logical not."""
    if is_float(a.expr.dtype) or (a.weak and a.expr.dtype == "bool"):
        raise IRError(f"`~` of {_a(a)}", hint="use `not` for truth values")
    return Value(E.unary("not", a.expr), a.weak)


def select(test: Expr, a: Value, b: Value) -> Value:
    """`a if test else b`."""
    kind = join(a.type, b.type)
    return Value(E.select(test, a.to(kind.dtype), b.to(kind.dtype)), kind.weak)


def both(a: Expr, b: Expr) -> Expr:
    """`a and b`: where evaluating `b` needs `a` to hold (it reads an array), it is evaluated only then."""
    return E.select(a, b, False) if E.reads(b) else E.binary("and", a, b)


def either(a: Expr, b: Expr) -> Expr:
    """`a or b`."""
    return E.select(a, True, b) if E.reads(b) else E.binary("or", a, b)


def fold(op: str, values: Sequence[Value]) -> Value:
    """The least or largest of several values."""
    result = values[0]
    for value in values[1:]:
        result = apply(op, result, value)
    return result


# ---------------------------------------------------------------- functions

_SAME_NAME = (
    "sqrt", "exp", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh", "floor", "ceil", "trunc", "isnan", "isinf",
)  # fmt: skip
_ARC = ("asin", "acos", "atan", "asinh", "acosh", "atanh")
_MATH: dict[Any, str] = {getattr(math, f): f for f in (*_SAME_NAME, *_ARC, "erf")} | {math.fabs: "abs"}
_NUMPY: dict[Any, str] = (
    {getattr(np, f): f for f in _SAME_NAME}
    | {getattr(np, "arc" + f[1:]): f for f in _ARC}
    | {np.rint: "round", np.abs: "abs", np.fabs: "abs", abs: "abs"}
)
_BINARY: dict[Any, str] = {np.minimum: "min", np.maximum: "max", np.power: "pow", math.pow: "pow"}
FUNCTIONS = "abs, min, max, int, float, the functions of math and of NumPy (sqrt, exp, ...), and dtypes such as np.float32"


def call(function: Any, args: Sequence[Value]) -> Value:
    """The value of a function known from `math`, NumPy or Python. Raises `IRError` for any other one."""
    if function in (min, max) and len(args) > 1:
        return fold(function.__name__, args)
    if function in (int, float, bool) and len(args) == 1:
        dtype = {int: INDEX, float: DOUBLE, bool: "bool"}[function]
        return Value(args[0].to(dtype), True)
    if isinstance(function, type) and issubclass(function, np.generic) and len(args) == 1:
        dtype = np.dtype(function).name
        if dtype in BITS:
            return Value(args[0].to(dtype), False)
    if _hashable(function):
        if function in _BINARY and len(args) == 2:
            return apply(_BINARY[function], *args)
        if function in _NUMPY and len(args) == 1:
            return _elementary(_NUMPY[function], args[0])
        if function in _MATH and len(args) == 1:
            return _of_math(function, args[0])
    name = getattr(function, "__name__", str(function))
    if function in (min, max) or (_hashable(function) and function in {**_BINARY, **_NUMPY, **_MATH}):
        raise IRError(f"`{name}` with {len(args)} arguments")
    raise IRError(f"the function `{name}` is not known here", hint=f"known are {FUNCTIONS}")


def _hashable(thing: Any) -> bool:
    return getattr(type(thing), "__hash__", None) is not None


def _elementary(op: str, x: Value) -> Value:
    if not is_float(x.expr.dtype) and op not in ("abs", *E.PREDICATES):
        x = Value(x.to(DOUBLE), x.weak)
    result = E.unary(op, x.expr)
    return Value(result, x.weak and result.dtype != "bool")


def _of_math(function: Any, x: Value) -> Value:
    """`math` computes with Python's floats, whatever it is given; floor, ceil and trunc give an int."""
    if x.known:
        try:
            result = number(function(x.expr.attr))
        except (ArithmeticError, ValueError) as error:
            raise IRError(f"`{function.__name__}` of {x.expr.attr}", why=str(error)) from None
        assert result is not None
        return result
    value = _elementary(_MATH[function], Value(x.to(DOUBLE), True))
    return Value(value.to(INDEX), True) if function in (math.floor, math.ceil, math.trunc) else value
