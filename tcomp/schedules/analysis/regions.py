"""Regions: which box of a buffer a piece of program touches, as symbolic base and constant (or symbolic) extent per dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_expr, bounds
from tcomp.ir.loops import Accumulate, Allocate, Buffer, For, Stmt, Store, expressions, walk
from tcomp.ir.simplify import difference, from_linear, linear, prove, simplify


@dataclass(frozen=True, slots=True)
class Region:
    """A box: elements base[d] <= index[d] < base[d] + extent[d]."""

    base: tuple[Expr, ...]
    extent: tuple[Dim, ...]


def accesses(stmt: Stmt, buffer: Buffer, writes: bool = True) -> list[tuple[Expr, ...]]:
    """Index tuples of all reads (and stores) of `buffer`."""
    found: dict[tuple[Expr, ...], None] = {}
    for s in walk(stmt):
        if writes and isinstance(s, Store | Accumulate) and s.buffer is buffer:
            found[s.indices] = None
        for e in E.reads(*expressions(s)):
            if e.attr is buffer:
                found[e.args] = None
    return list(found)


def always_within(indices: Sequence[Expr], shape: Sequence[Dim]) -> bool:
    """Whether an element is in range for all values of the loops around it, whatever conditions say."""
    return all(prove(i >= 0) and prove(i < as_expr(n)) for i, n in zip(indices, shape, strict=True))


def loop_extents(stmt: Stmt) -> dict[Expr, Dim]:
    """All loop variables bound inside, with their extents."""
    return {s.var: s.extent for s in walk(stmt) if isinstance(s, For)}


def region(stmt: Stmt, buffer: Buffer, clip: bool = True) -> Region:
    """The box of `buffer` that `stmt` touches, over all values of the loops inside it.

    Exact for sums of loop variables and for what splitting, fusing, strides, dilation and clamping make of them, where one access
    reaches lowest and one highest. Indices of other forms (gathers), and boxes that cannot be compared, widen to the whole dimension.
    With `clip` a box is not larger than the buffer; without, it keeps the size of the loops' tile, which guards may cut.
    """
    inner, made = loop_extents(stmt), {s.buffer for s in walk(stmt) if isinstance(s, Allocate | Store | Accumulate)}
    boxes = [[interval(i, inner) for i in indices] for indices in accesses(stmt, buffer)]
    base: list[Expr] = []
    extent: list[Dim] = []
    for d, whole in enumerate(buffer.shape):
        hull = _hull([box[d] for box in boxes])
        if hull is not None and any(r.attr in made or not always_within(r.args, r.attr.shape) for r in E.reads(hull[0])):
            hull = None  # where the box stands is not known before the statement, or where its conditions do not hold
        if hull is None or (clip and isinstance(whole, int) and prove(as_expr(hull[1]) >= whole)):
            base.append(as_expr(0))
            extent.append(whole)
        else:
            base.append(hull[0])
            extent.append(hull[1])
    return Region(tuple(base), tuple(extent))


Interval = tuple[Expr, Expr]


def interval(index: Expr, inner: Mapping[Expr, Dim]) -> Interval | None:
    """(lowest, highest) value of the index over the inner loops, as expressions of the outer ones; None if unknown.

    The highest is the lowest plus something that does not depend on outer loops, wherever that can be had.
    """
    low: Expr = as_expr(0)
    high: Expr = as_expr(0)
    for monomial, coefficient in linear(simplify(index)).items():
        factor = from_linear({tuple(a for a in monomial if not _mentions(a, inner)): coefficient})
        varying = [a for a in monomial if _mentions(a, inner)]
        if not varying:
            low, high = low + factor, high + factor
            continue
        reach = _of_atom(varying[0], inner) if len(varying) == 1 else None
        if reach is not None and (prove(factor >= 0) or prove(factor <= 0)):
            first, last = reach if prove(factor >= 0) else reach[::-1]
            low, high = low + first * factor, high + last * factor
        else:
            lo, hi = bounds(from_linear({monomial: coefficient}))
            if lo is None or hi is None:
                return None
            low, high = low + lo, high + hi
    return simplify(low), simplify(high)


def _mentions(e: Expr, inner: Mapping[Expr, Dim]) -> bool:
    return any(v in inner for v in E.variables(e))


def _of_atom(atom: Expr, inner: Mapping[Expr, Dim]) -> Interval | None:
    """The range of a loop variable, or of a function that never moves further than its operands do."""
    if atom in inner:
        last = interval(as_expr(inner[atom]) - 1, inner)  # of a triangular loop: that of its longest run
        return None if last is None else (as_expr(0), last[1])
    if atom.op in ("floordiv", "mod") and atom.args[1].op == "const" and atom.args[1].attr > 0:
        x = interval(atom.args[0], inner)
        return None if x is None else _divided(x, int(atom.args[1].attr), atom.op)
    if atom.op in ("min", "max"):
        first, second = (interval(a, inner) for a in atom.args)
        if first is None or second is None:
            return None
        (a, b), (c, d) = first, second
        low = simplify(E.binary(atom.op, a, c))
        return low, simplify(low + E.maximum(b - a, d - c))
    return None


def _divided(x: Interval, divisor: int, op: str) -> Interval | None:
    """The range of a quotient or remainder of what lies in `x`."""
    low, high = x
    reach = difference(high, low)
    aligned = prove(E.equal(low % divisor, 0))
    if op == "mod":
        within = prove(reach < divisor) and (aligned or prove(E.equal(low // divisor, high // divisor)))
        return (simplify(low % divisor), simplify(low % divisor + reach)) if within else (as_expr(0), as_expr(divisor - 1))
    first, last = simplify(low // divisor), simplify(high // divisor)
    if difference(last, first).op == "const":
        return first, last
    return first, simplify(first + (reach if aligned else reach + (divisor - 1)) // divisor)


def _hull(intervals: Sequence[Interval | None]) -> tuple[Expr, Dim] | None:
    """(base, extent) of the union; None if it cannot be bounded by one symbolic base."""
    known = [i for i in intervals if i is not None]
    if len(known) < len(intervals) or not known:
        return None
    low, high = known[0]
    for other_low, other_high in known[1:]:
        if _at_most(other_low, low):
            low = other_low
        elif not _at_most(low, other_low):
            return None
        if _at_most(high, other_high):
            high = other_high
        elif not _at_most(other_high, high):
            return None
    extent = E.as_dim(difference(high, low) + 1)
    if isinstance(extent, Expr) and not _constant_in_loops(extent):
        most = _most(extent)  # sizes must not depend on where the box stands
        return None if most is None else (low, max(most, 0))
    return low, max(extent, 0) if isinstance(extent, int) else extent  # loops that never run touch nothing


def _at_most(a: Expr, b: Expr) -> bool:
    if prove(a <= b):
        return True
    most = _most(difference(a, b))
    return most is not None and most <= 0


def _most(e: Expr) -> int | None:
    """A number that an expression does not exceed; a clamped index beside another one is taken apart."""
    for monomial, coefficient in linear(e).items():
        if len(monomial) == 1 and monomial[0].op in ("min", "max"):
            ends = [_most(simplify(E.substitute(e, {monomial[0]: a}))) for a in monomial[0].args]
            known = [end for end in ends if end is not None]
            if (monomial[0].op == "min") == (coefficient > 0):
                return min(known, default=None)
            return max(known) if len(known) == len(ends) else None
    return bounds(e)[1]


def _constant_in_loops(extent: Expr) -> bool:
    """Only symbolic dims (variables without an enclosing loop) occur, and nothing that is looked up."""
    return not E.reads(extent) and all(v.attr.extent is None and v.attr.lo != 0 for v in E.variables(extent))
