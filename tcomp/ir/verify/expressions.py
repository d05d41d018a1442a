"""Verifies scalar expressions: operators, operands, dtypes, ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS, NARROW, is_float, is_integer
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, bounds
from tcomp.ir.reducers import Reducer
from tcomp.ir.scalar_operators import ARITHMETIC, ARITY, BITWISE, COMPARISON, PREDICATES, wrap
from tcomp.ir.simplify import prove, same_dim

Place: TypeAlias = object  # printed only if something is wrong there: a string, expression, statement, or tuple of places, outermost first
Require: TypeAlias = Callable[..., None]  # `require_at` at one place: (whether a rule holds, what is wrong, its arguments, why, hint)


def require_at(place: Place, holds: object, rule: str, *args: object, why: str = "", hint: str = "") -> None:
    """Raises `IRError` if a rule does not hold; `rule` says what is wrong, with `{}` for each of `args`, which are printed only then."""
    if not holds:
        where = _shown(place)
        raise IRError(rule.format(*args), where=where if len(where) <= 300 else where[:300] + " ...", why=why, hint=hint)


def _shown(place: Place) -> str:
    return ": ".join(filter(None, map(_shown, place))) if isinstance(place, tuple) else str(place).split("\n", 1)[0]


def verify_expr(e: Expr, where: Place = "", guarded: bool = False) -> None:
    """Operators, operand counts and dtypes; reads with one index per dimension; no access that is certainly out of range.

    `guarded` says that a condition outside may keep the expression from being evaluated: then ranges are not checked.
    """

    def evaluated(x: Expr) -> Sequence[Expr]:
        """The operands that are evaluated whenever `x` is."""
        return () if x.op == "reduce" and any(map(is_empty, x.attr[1])) else x.args[:1] if x.op == "select" else x.args

    require = partial(require_at, (where, e))
    for node in E.walk(e):
        _verify_node(node, require)
    for node in () if guarded else E.walk(e, operands=evaluated):
        if node.op == "read":
            verify_range(node.attr, node.args, require)


def _verify_node(e: Expr, require: Require) -> None:
    types = [a.dtype for a in e.args]
    require(e.dtype in BITS, "unknown dtype `{}`", e.dtype)
    match e.op:
        case "const":
            kind = float if is_float(e.dtype) else bool if e.dtype == "bool" else int
            fits = not e.args and type(e.attr) is kind and (kind is not int or wrap(int(e.attr), e.dtype) == e.attr)
            require(fits, "the constant {!r} is not of {}", e.attr, e.dtype)
        case "var":
            pass
        case "read":
            name, rank = e.attr.name, len(e.attr.shape)
            require(len(types) == rank, "`{}` has {} dimensions and is read with {} indices", name, rank, len(types))
            for t in types:
                require(t == INDEX, "an index of `{}` is {} instead of {}", name, t, INDEX)
            require(e.dtype == e.attr.dtype, "a read of `{}` is {} instead of {}", name, e.dtype, e.attr.dtype)
        case "reduce":
            reducer, axes = e.attr
            require(types == [e.dtype], "a reduction of {} gives {}", ", ".join(types), e.dtype)
            for t in dtypes(reducer):
                require(t == e.dtype, "the reducer `{}` of {} reduces {}", reducer.name, t, e.dtype)
            closed = reducer.identity.op == "const" and set(E.variables(reducer.combine)) <= {reducer.lhs, reducer.rhs}
            why = "its identity must be a constant, its combination must use nothing but lhs and rhs"
            require(closed, "the reducer `{}` depends on something outside of it", reducer.name, why=why)
            different = len(set(axes)) == len(axes) and all(v.op == "var" and v.dtype == INDEX and v.attr.lo == 0 for v in axes)
            require(different, "reduction axes must be different variables that start at 0")
        case "cast" | "bitcast":
            fits = len(types) == 1 and (e.op == "cast" or BITS[types[0]] == BITS[e.dtype])
            why = "it takes one operand, and a bitcast keeps its width"
            require(fits, "{} of {} to {}", e.op, ", ".join(types), e.dtype, why=why)
        case op if op in ARITY:
            operands = types[1:] if op == "select" and types[:1] == ["bool"] else types
            fits = len(types) == ARITY[op] and len(set(operands)) == 1
            fits = fits and e.dtype == ("bool" if op in COMPARISON or op in PREDICATES else operands[0])
            require(fits, "`{}` of ({}) gives {}", op, ", ".join(types), e.dtype)
            require(_defined(op, operands[0]), "`{}` is not defined for {}", op, operands[0])
        case _:
            require(False, "unknown operator `{}`", e.op)


def _defined(op: str, dtype: str) -> bool:
    if op == "checked":
        return dtype == INDEX
    if dtype in NARROW:
        return op == "select"
    if op in COMPARISON or op in ("min", "max", "select"):
        return True
    if dtype == "bool":
        return op in ("and", "or", "xor", "not")
    if op in BITWISE or op in ("not", "popcount"):
        return is_integer(dtype)
    return is_float(dtype) or (op in ("neg", "abs", *ARITHMETIC) and op != "div")


def dtypes(reducer: Reducer) -> list[str]:
    """Those of all parts of a reducer, which must be one."""
    return [part.dtype for part in (reducer.lhs, reducer.rhs, reducer.combine, reducer.identity)]


def is_empty(v: Expr) -> bool:
    """Whether the variable has no value at all."""
    return v.attr.hi is not None and v.attr.lo is not None and v.attr.lo > v.attr.hi


def verify_range(source: Any, indices: Sequence[Expr], require: Require) -> None:
    """No index of an access may be out of range for certain."""
    for position, (index, extent) in enumerate(zip(indices, source.shape, strict=True)):
        (lo, hi), largest = bounds(index), bounds(extent)[1]
        outside = (hi is not None and hi < 0) or (lo is not None and largest is not None and lo >= largest)
        possible, what = not outside or any(map(is_empty, E.variables(index))), "index {} of `{}` is {}, its extent is {}"
        require(possible, what, position, source.name, index, extent, why="this is never in range")


def verify_loop_range(v: Expr, extent: Dim, require: Require) -> None:
    """The range of a loop variable must cover its loop: proofs rely on it."""
    fits = v.op == "var" and v.dtype == INDEX and v.attr.lo is not None and v.attr.lo <= 0
    require(fits, "`{}` cannot be the variable of a loop", v, why=f"it must be an {INDEX} variable whose range holds 0")
    for limit in (v.attr.extent, None if v.attr.hi is None else v.attr.hi + 1):
        covers, what = limit is None or same_dim(limit, extent) or prove(as_expr(extent) <= limit), "its declared range ends below {}"
        require(covers, "`{}` runs below {}, " + what, v.name, extent, limit, why="proofs rely on the range")
