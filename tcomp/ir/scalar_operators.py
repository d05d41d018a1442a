"""The operators of scalar expressions, on plain numbers: their names, those of NumPy's functions that mean the same, the values of
literals, and the ranges of results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from tcomp.errors import IRError
from tcomp.ir.dtypes import BITS, SIGNED, is_float, is_integer

Bounds = tuple[int | None, int | None]  # an inclusive range of integers; None stands for unbounded

ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "mod", "truncdiv", "truncmod", "min", "max", "pow")
BITWISE = ("and", "or", "xor", "shl", "shr")
COMPARISON = ("lt", "le", "eq", "ne")
COMMUTATIVE = ("add", "mul", "min", "max", "and", "or", "xor")
BINARY = ARITHMETIC + BITWISE + COMPARISON
UNARY = (
    "neg", "abs", "not", "floor", "ceil", "round", "trunc", "sqrt", "exp", "log", "tanh", "erf", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "isnan", "isinf", "popcount",
)  # fmt: skip
PREDICATES = ("isnan", "isinf")
ARITY = {"select": 3, "fma": 3, "checked": 3, "ldexp": 2} | dict.fromkeys(UNARY, 1) | dict.fromkeys(BINARY, 2)  # of what `operation` makes

NUMPY = {
    "absolute": "abs", "fabs": "abs", "negative": "neg", "invert": "not", "rint": "round", "add": "add", "subtract": "sub",
    "multiply": "mul", "divide": "div", "floor_divide": "floordiv", "remainder": "mod", "fmod": "truncmod", "power": "pow",
    "minimum": "min", "maximum": "max",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "left_shift": "shl", "right_shift": "shr", "less": "lt",
    "less_equal": "le", "equal": "eq", "not_equal": "ne", "bitwise_count": "popcount",
    **{f"arc{f[1:]}": f for f in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
    **{f: f for f in ("floor", "ceil", "trunc", "sqrt", "exp", "log", "tanh", "sin", "cos", "tan", "sinh", "cosh", "isnan", "isinf")},
}  # fmt: skip
"""Operators by the names of NumPy's functions that mean the same."""


def numpy_operator(ufunc: Any, method: str, options: Mapping[str, Any]) -> str:
    """The operator of a call of a NumPy function. Raises `IRError` if there is none."""
    if method != "__call__" or options or ufunc.__name__ not in NUMPY:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        raise IRError(f"`np.{name}` of an expression", why="it has no operator in tensor expressions", hint=f"known are {', '.join(NUMPY)}")
    return NUMPY[ufunc.__name__]


# ---------------------------------------------------------------- values


def fold_binary(op: str, a: Any, b: Any, dtype: str) -> Any:
    """Value of `a op b` for two literals of `dtype`; None where it is undefined or not folded (float rounding is left to run time)."""
    exact = op in COMPARISON or (op in ("and", "or", "xor") and not is_float(dtype))
    undefined = (op in ("floordiv", "mod", "truncdiv", "truncmod") and b == 0) or (op in ("shl", "shr") and not 0 <= b < 64)
    return OPERATORS[op](a, b) if exact or (is_integer(dtype) and op in OPERATORS and not undefined) else None


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {  # on Python numbers
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max, "floordiv": operator.floordiv,
    "mod": operator.mod, "truncdiv": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "truncmod": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift,
    "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


def wrap(value: int, dtype: str) -> int:
    """`value` modulo 2**bits, in the range of the integer type `dtype`."""
    bits = BITS[dtype]
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype in SIGNED and value >> (bits - 1) else value


# ---------------------------------------------------------------- ranges


def hull(x: Bounds, y: Bounds) -> Bounds:
    """The range of a number that is in one range or in the other."""
    return _if_known(min, x[0], y[0]), _if_known(max, x[1], y[1])


def binary_bounds(op: str, x: Bounds, y: Bounds) -> Bounds | None:
    """The range of `x op y`, for the names of operators that expressions have; None where nothing is known but the type."""
    (a, b), (c, d) = x, y
    below = None if d is None else d - 1  # the largest remainder
    match op:
        case "add":
            return _if_known(operator.add, a, c), _if_known(operator.add, b, d)
        case "sub":
            return _if_known(operator.sub, a, d), _if_known(operator.sub, b, c)
        case "mul" if a is not None and b is not None and c is not None and d is not None:
            products = a * c, a * d, b * c, b * d
            return min(products), max(products)
        case "mul" if a is not None and a >= 0 and c is not None and c >= 0:
            return a * c, _if_known(operator.mul, b, d)
        case "floordiv" | "truncdiv" if c is not None and c > 0 and (op == "floordiv" or (a is not None and a >= 0)):
            # Towards the divisor that makes it smallest (largest); an unbounded divisor drives the quotient to 0 or -1.
            lo = None if a is None else (a // c if a < 0 else (a // d if d is not None else 0))
            hi = None if b is None else (b // c if b >= 0 else (b // d if d is not None else -1))
            return lo, hi
        case "mod" if c is not None and c > 0:
            if a is None or a < 0 or b is None:
                return 0, below
            return (a, b) if b < c else (0, _of_known(min, b, below))
        case "truncmod" if a is not None and a >= 0 and c is not None and c > 0:
            return 0, _of_known(min, b, below)
        case "min":
            return _if_known(min, a, c), _of_known(min, b, d)
        case "max":
            return _of_known(max, a, c), _if_known(max, b, d)
    return None


def _if_known(function: Callable[[int, int], int], a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else function(a, b)


def _of_known(pick: Callable[[int, int], int], a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else pick(a, b)
