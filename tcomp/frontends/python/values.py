"""Scalar values of a translated function: expressions that follow the type rules of NumPy (NEP 50).

Constants of Python are computed by Python, as they would be in the function. Other than in Python, integers wrap around at 64 bits,
and dividing by zero gives inf or nan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from tcomp.errors import InputError, IRError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS, is_float, is_integer, to_numpy
from tcomp.ir.expr import INDEX, Expr, const
from tcomp.ir.scalar_operators import BITWISE, COMPARISON, OPERATORS, PREDICATES

DOUBLE = "float64"
_WEAK = ("bool", INDEX, DOUBLE)  # in the order of Python's own promotion


class Type(NamedTuple):
    """An element type, or that of a Python number."""

    dtype: str
    weak: bool


class Value(NamedTuple):
    """A scalar: its expression, and whether it is *weak*, a number of Python: a literal, a size, a loop variable, or computed from these.
    Next to an array element a weak number takes the element's dtype; on its own it is an int64, a float64 or a bool."""

    expr: Expr
    weak: bool

    @property
    def type(self) -> Type:
        """Its type."""
        return Type(self.expr.dtype, self.weak)

    @property
    def known(self) -> bool:
        """Whether Python would compute with it here and now."""
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
        raise IRError(f"{what} is a {value.expr.dtype} instead of a truth value", hint="compare it, as in `x != 0`")
    return value.expr


_ON_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {**OPERATORS, "div": operator.truediv, "pow": operator.pow}


def apply(op: str, a: Value, b: Value) -> Value:
    """A binary operator of the loop IR, or a comparison, on values of any types. Raises `IRError` where Python or NumPy has none."""
    if a.known and b.known:
        x, y = a.expr.attr, b.expr.attr
        return _computed(lambda: _ON_NUMBERS[op](x, y), f"`{op}` of {x} and {y}")
    kind = join(a.type, b.type)
    if op == "div" and not is_float(kind.dtype):
        kind = Type(DOUBLE, kind.weak)
    if kind.dtype == "bool" and op not in (*BITWISE, "eq", "ne"):
        raise IRError(f"`{op}` of truth values", hint="convert them: int(x)")
    if op in BITWISE and is_float(kind.dtype):
        raise IRError(f"`{op}` of a {a.expr.dtype} and a {b.expr.dtype}", why="it is defined for integers and truth values")
    if op == "pow" and is_integer(kind.dtype):
        raise IRError("a power of integers that are not known here", hint="multiply: x * x")
    result = E.binary(op, a.to(kind.dtype), b.to(kind.dtype))
    return Value(result, kind.weak and op not in COMPARISON)


def _computed(function: Callable[[], Any], what: str) -> Value:
    """What Python computes of known numbers, as a value."""
    try:
        result = number(function())
    except (ArithmeticError, TypeError, ValueError) as error:
        raise IRError(what, why=str(error)) from None
    if result is None:
        raise IRError(f"{what} is not a real number")
    return result


def unary(op: str, a: Value) -> Value:
    """-a (`op` is "neg") or ~a ("not"). Raises `IRError` where Python or NumPy has none."""
    dtype = a.expr.dtype
    if op == "neg" and dtype == "bool":
        raise IRError("`-` of a truth value", hint="use `not`")
    if op == "not" and (is_float(dtype) or (a.weak and dtype == "bool")):
        raise IRError(f"`~` of a {dtype}", hint="use `not` for truth values")
    return Value(E.unary(op, a.expr), a.weak)


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


def assume(condition: bool) -> None:
    """A statement of a loop program, outside of its loops: `tcomp.assume(n <= m)`. It tells the compiler what holds of the sizes, so that
    accesses can be proved to be in range. Every call checks it, and raises `InputError` where it does not hold."""
    if isinstance(condition, Expr):
        raise IRError(f"`{condition}` is assumed outside of a program", hint="tcomp.build(tensors, assume=[n <= m])")
    if not condition:
        raise InputError("a condition that the program assumes does not hold")


_SAME_NAME = ("sqrt", "exp", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh", "floor", "ceil", "trunc", "isnan", "isinf")
_ARC = ("asin", "acos", "atan", "asinh", "acosh", "atanh")
_MATH: dict[Any, str] = {getattr(math, f): f for f in (*_SAME_NAME, *_ARC, "erf")} | {math.fabs: "abs"}
_NUMPY: dict[Any, str] = (
    {getattr(np, f): f for f in _SAME_NAME}
    | {getattr(np, "arc" + f[1:]): f for f in _ARC}
    | {np.rint: "round", np.abs: "abs", np.fabs: "abs", abs: "abs"}
)
_BINARY: dict[Any, str] = {np.minimum: "min", np.maximum: "max", np.power: "pow", math.pow: "pow"}
FUNCTIONS = "abs, min, max, int, float, the functions of math and of NumPy (sqrt, exp, ...), and dtypes such as np.float32"
_CONVERSIONS: dict[Any, str] = {int: INDEX, float: DOUBLE, bool: "bool"}


def call(function: Any, args: Sequence[Value]) -> Value:
    """The value of a function known from `math`, NumPy or Python. Raises `IRError` for any other one."""
    name = getattr(function, "__name__", str(function))
    hashable: bool = isinstance(function, Hashable)  # named, so that mypy does not take `function` for no more than that
    if hashable and function in (min, max) and len(args) > 1:
        return reduce(partial(apply, name), args)
    if hashable and function in _BINARY and len(args) == 2:
        return apply(_BINARY[function], *args)
    if hashable and len(args) == 1:
        (x,) = args
        if function in _CONVERSIONS:
            return Value(x.to(_CONVERSIONS[function]), True)
        if isinstance(function, type) and issubclass(function, np.generic) and np.dtype(function).name in BITS:
            return Value(x.to(np.dtype(function).name), False)
        if function in _NUMPY:
            return _elementary(_NUMPY[function], x)
        if function in _MATH and x.known:
            return _computed(lambda: function(x.expr.attr), f"`{name}` of {x.expr.attr}")
        if function in _MATH:  # `math` computes with Python's floats, whatever it is given; floor, ceil and trunc give an int
            value = _elementary(_MATH[function], Value(x.to(DOUBLE), True))
            return Value(value.to(INDEX), True) if function in (math.floor, math.ceil, math.trunc) else value
    if hashable and function in (min, max, *_BINARY, *_NUMPY, *_MATH):
        raise IRError(f"`{name}` with {len(args)} arguments")
    raise IRError(f"the function `{name}` is not known here", hint=f"known are {FUNCTIONS}")


def _elementary(op: str, x: Value) -> Value:
    if not is_float(x.expr.dtype) and op not in ("abs", *PREDICATES):
        x = Value(x.to(DOUBLE), x.weak)
    result = E.unary(op, x.expr)
    return Value(result, x.weak and result.dtype != "bool")
