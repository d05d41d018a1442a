"""Regions: which box of a buffer a piece of program touches, as symbolic base and constant (or symbolic) extent per dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_expr, bounds
from tcomp.ir.loops import Accumulate, Buffer, For, Stmt, Store, expressions, walk
from tcomp.ir.simplify import difference, linear, prove, simplify


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


def loop_extents(stmt: Stmt) -> dict[Expr, Dim]:
    """All loop variables bound inside, with their extents."""
    return {s.var: s.extent for s in walk(stmt) if isinstance(s, For)}


def region(stmt: Stmt, buffer: Buffer, clip: bool = True) -> Region:
    """The box of `buffer` that `stmt` touches, over all values of the loops inside it.

    Indices that are not affine in the inner loops, and boxes that cannot be compared, widen to the whole dimension. With `clip` a box
    is not larger than the buffer; without, it keeps the size of the loops' tile, which guards may cut.
    """
    inner = loop_extents(stmt)
    boxes = [[_interval(i, inner) for i in indices] for indices in accesses(stmt, buffer)]
    base: list[Expr] = []
    extent: list[Dim] = []
    for d, whole in enumerate(buffer.shape):
        hull = _hull([box[d] for box in boxes])
        if hull is None or (clip and isinstance(whole, int) and prove(as_expr(hull[1]) >= whole)):
            base.append(as_expr(0))
            extent.append(whole)
        else:
            base.append(hull[0])
            extent.append(hull[1])
    return Region(tuple(base), tuple(extent))


def _interval(index: Expr, inner: dict[Expr, Dim]) -> tuple[Expr, Expr] | None:
    """(lowest, highest) value of the index over the inner loops, as expressions of the outer ones; None if unknown."""
    index = simplify(index)
    low: Expr = as_expr(0)
    high: Expr = as_expr(0)
    for monomial, coefficient in linear(index).items():
        mentioned = set(E.variables(*monomial)) & inner.keys()
        term = as_expr(coefficient)
        for atom in monomial:
            term = term * atom
        if not mentioned:
            low, high = low + term, high + term
        elif len(monomial) == 1 and monomial[0] in inner:
            reach = (as_expr(inner[monomial[0]]) - 1) * coefficient
            low, high = (low, high + reach) if coefficient > 0 else (low + reach, high)
        else:
            lo, hi = bounds(term)
            if lo is None or hi is None:
                return None
            low, high = low + lo, high + hi
    return simplify(low), simplify(high)


def _hull(intervals: Sequence[tuple[Expr, Expr] | None]) -> tuple[Expr, Dim] | None:
    """(base, extent) of the union; None if it cannot be bounded by one symbolic base."""
    known = [i for i in intervals if i is not None]
    if len(known) < len(intervals) or not known:
        return None
    low, high = known[0]
    for other_low, other_high in known[1:]:
        if prove(other_low <= low):
            low = other_low
        elif not prove(low <= other_low):
            return None
        if prove(high <= other_high):
            high = other_high
        elif not prove(other_high <= high):
            return None
    extent = E.as_dim(difference(high, low) + 1)
    if isinstance(extent, Expr) and set(E.variables(extent)) & set(E.variables(low)) and not _constant_in_loops(extent):
        return None
    return low, extent


def _constant_in_loops(extent: Expr) -> bool:
    """Sizes must not depend on where the box stands: only symbolic dims (variables without an enclosing loop) may occur."""
    return all(v.attr.extent is None and v.attr.lo != 0 for v in E.variables(extent))
