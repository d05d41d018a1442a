"""Arithmetic on ranges of integers: `Bounds` are inclusive, and None stands for unbounded."""

from __future__ import annotations

import operator
from collections.abc import Callable

Bounds = tuple[int | None, int | None]


def hull(x: Bounds, y: Bounds) -> Bounds:
    """The range of a number that is in one range or in the other."""
    return _if_known(min, x[0], y[0]), _if_known(max, x[1], y[1])


def of_binary(op: str, x: Bounds, y: Bounds) -> Bounds | None:
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
