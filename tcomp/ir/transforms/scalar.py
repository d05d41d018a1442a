"""Derivatives of scalar expressions: for each operator and operand a linear function, which serves both modes.

Where an operator has no derivative, these are the conventions:

- `min` and `max` of two equal values give each half of the derivative, as torch's `maximum`; next to a constant, the other operand counts
  where it is strictly larger (smaller), so that `max(x, 0)` has the derivative 0 at 0, as torch's `relu`;
- `abs` has the derivative 0 at 0; floor, ceil, round and trunc have the derivative 0 everywhere;
- what a `select` does not choose contributes nothing, though its own derivative be infinite or undefined;
- `x ** y` has the derivative 0 by y where x is 0.

Integers and bools have no derivative, nor have floats of fewer than 16 bits; nothing passes through a conversion from or to them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Expr, const, select, unary
from tcomp.ir.scalar_operators import UNARY

Linear: TypeAlias = Callable[[Expr], Expr]
Term: TypeAlias = tuple[int, Expr | None, Linear]  # number of an operand, where it counts (None: everywhere), what its tangent is mapped to
Guards: TypeAlias = tuple[Expr, ...]  # conditions, each evaluated only where those before it hold


def same(g: Expr) -> Expr:
    """The identity."""
    return g


def terms(e: Expr) -> list[Term]:
    """The derivative of an operator by each float operand: the tangent of `e` is the sum over the terms (n, where, f) of f(tangent of
    operand n), where `where` holds. Raises `IRError` for what is not an operator on floats."""
    if e.op in UNARY:
        linear = _of_function(e, *e.args)
        return [] if linear is None else [(0, None, linear)]
    match e.op, e.args:
        case "add", _:
            return [(0, None, same), (1, None, same)]
        case "sub", _:
            return [(0, None, same), (1, None, operator.neg)]
        case "mul", (a, b):
            return [(0, None, lambda g: g * b), (1, None, lambda g: g * a)]
        case "div", (_, b):
            return [(0, None, lambda g: g / b), (1, None, lambda g: -(g * e / b))]
        case "fma", (a, b, _):
            return [(0, None, lambda g: g * b), (1, None, lambda g: g * a), (2, None, same)]
        case "ldexp", (_, n):
            return [(0, None, lambda g: E.ldexp(g, n)), (1, None, lambda g: g * e * math.log(2))]
        case "mod", (a, b):
            return [(0, None, same), (1, None, lambda g: -(g * unary("floor", a / b)))]
        case "truncmod", (a, b):
            return [(0, None, same), (1, None, lambda g: -(g * unary("trunc", a / b)))]
        case (("floordiv" | "truncdiv"), _):
            return []
        case (("min" | "max"), _):
            return _of_extreme(e)
        case "pow", (a, b):
            return _of_power(e, a, b)
        case "select", (c, _, _):
            return [(1, c, same), (2, unary("not", c), same)]
        case "cast", (a,):
            return [(0, None, lambda g: E.cast(g, a.dtype if g.dtype == e.dtype else e.dtype))] if is_float(a.dtype) else []
        case "bitcast", _:
            return []
    raise IRError(f"`{e.op}` of floats has no derivative", where=str(e))


def _of_extreme(e: Expr) -> list[Term]:
    found = list[Term]()
    for n, (own, other) in enumerate((e.args, e.args[::-1])):
        low, high = (own, other) if e.op == "min" else (other, own)
        if other.op == "const":
            found.append((n, low < high, same))
        else:
            found.append((n, low <= high, lambda g: select(E.equal(e.args[0], e.args[1]), g * 0.5, g)))
    return found


def _of_power(e: Expr, a: Expr, b: Expr) -> list[Term]:
    def by_base(g: Expr) -> Expr:
        if b.op == "const" and b.attr in (1.0, 2.0):
            return g if b.attr == 1.0 else g * a * 2.0
        if b.op == "const":
            return g * E.binary("pow", a, b.attr - 1.0) * b
        return g * b * E.binary("pow", a, b - 1.0)

    somewhere = None if b.op == "const" and b.attr != 0.0 else E.not_equal(b, 0.0)  # a ** 0 is 1 at 0, too
    return [(0, somewhere, by_base), (1, E.not_equal(a, 0.0), lambda g: g * e * unary("log", a))]


def _of_function(e: Expr, x: Expr) -> Linear | None:
    """The derivative of a function of one operand; None where it is 0."""
    one = const(1.0, e.dtype)
    derivatives: dict[str, Linear] = {
        "neg": operator.neg,
        "abs": lambda g: select(x > 0.0, g, select(x < 0.0, -g, 0.0)),
        "sqrt": lambda g: g * 0.5 / e,
        "exp": lambda g: g * e,
        "log": lambda g: g / x,
        "tanh": lambda g: g * (one - e * e),
        "erf": lambda g: g * unary("exp", -(x * x)) * (2 / math.sqrt(math.pi)),
        "sin": lambda g: g * unary("cos", x),
        "cos": lambda g: -(g * unary("sin", x)),
        "tan": lambda g: g * (e * e + 1.0),
        "asin": lambda g: g / unary("sqrt", one - x * x),
        "acos": lambda g: -(g / unary("sqrt", one - x * x)),
        "atan": lambda g: g / (x * x + 1.0),
        "sinh": lambda g: g * unary("cosh", x),
        "cosh": lambda g: g * unary("sinh", x),
        "asinh": lambda g: g / unary("sqrt", x * x + 1.0),
        "acosh": lambda g: g / unary("sqrt", x * x - 1.0),
        "atanh": lambda g: g / (one - x * x),
    }
    if e.op in ("floor", "ceil", "round", "trunc", "isnan", "isinf"):
        return None
    if e.op not in derivatives:
        raise IRError(f"`{e.op}` of floats has no derivative", where=str(e))
    return derivatives[e.op]


def _active(body: Expr, wanted: Callable[[Expr], bool]) -> tuple[list[Expr], set[Expr]]:
    """The sub-expressions, operands first, and which of them have a derivative by a wanted read."""
    order, active = list(E.walk(body, operands=E.value_operands)), set[Expr]()
    for e in order:
        if is_float(e.dtype) and (wanted(e) if e.op == "read" else any(a in active for a in e.args)):
            active.add(e)
    return order, active


def reverse(body: Expr, seed: Expr, guards: Guards, wanted: Callable[[Expr], bool]) -> Iterator[tuple[Expr, Guards, Expr]]:
    """For every wanted read in `body`: (the read, guards, value), its adjoint being the value where all guards hold, else 0. The adjoint of
    the body is `seed` where `guards` hold."""
    order, active = _active(body, wanted)
    pending: dict[Expr, list[tuple[Guards, Expr]]] = {body: [(guards, seed)]}
    for e in reversed(order):
        if e not in active or e not in pending:
            continue
        guards, value = _merged(pending[e])
        if e.op == "read":
            yield e, guards, value
            continue
        for n, where, linear in terms(e):
            if e.args[n] in active:
                inner = guards if where is None or (where.op == "const" and where.attr) else (*guards, where)
                pending.setdefault(e.args[n], []).append((inner, linear(value)))


def _merged(parts: Sequence[tuple[Guards, Expr]]) -> tuple[Guards, Expr]:
    """The sum of guarded values, as one under the guards that they have in common, and under that of any."""
    if len({guards for guards, _ in parts}) == 1:
        return parts[0][0], functools.reduce(operator.add, (value for _, value in parts))
    lengths = range(min(len(guards) for guards, _ in parts) + 1)
    common = max(n for n in lengths if len({guards[:n] for guards, _ in parts}) == 1)
    rest = [(conjunction(guards[common:]), value) for guards, value in parts]
    total = functools.reduce(operator.add, (select(where, value, 0.0) for where, value in rest))
    anywhere = functools.reduce(_either, (where for where, _ in rest))
    prefix = parts[0][0][:common]
    return prefix if anywhere.op == "const" else (*prefix, anywhere), total


def conjunction(guards: Guards) -> Expr:
    """One condition that tests each guard only where those before it hold."""
    found = const(True, "bool")
    for guard in reversed(guards):
        found = guard & found if not E.reads(found) else select(guard, found, const(False, "bool"))
    return found


def _either(a: Expr, b: Expr) -> Expr:
    return const(True, "bool") if any(c.op == "const" and c.attr for c in (a, b)) else a | b


def forward(body: Expr, tangent: Callable[[Expr], Expr | None]) -> Expr | None:
    """The tangent of an expression, given those of its reads (None: 0)."""
    order, active = _active(body, lambda r: tangent(r) is not None)
    found: dict[Expr, Expr] = {}
    for e in order:
        if e not in active:
            continue
        if e.op == "read":
            own = tangent(e)
            assert own is not None
            found[e] = own
        elif e.op == "select":
            found[e] = select(e.args[0], *(found.get(a, const(0.0, e.dtype)) for a in e.args[1:]))
        else:
            parts = [(where, linear(found[e.args[n]])) for n, where, linear in terms(e) if e.args[n] in found]
            values = [value if where is None else select(where, value, 0.0) for where, value in parts]
            if values:
                found[e] = functools.reduce(operator.add, values)
    return found.get(body)
