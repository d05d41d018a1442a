"""Reads of a known form in expressions: over the edges of a tensor, which finds zeros there (padding), and of rows of matrices next to
each other (what joining the heads of attention looks like)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, prod

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_expr, bounds
from tcomp.ir.simplify import prove, simplify

WIDEST = 16  # elements of a halo on one side
SMALL_WINDOW = 25  # elements of a window that checks each for being over the edge, at most; larger ones find zeros there

Widths = dict[int, tuple[int, int]]  # axis -> elements (before, behind)


def reach(e: Expr, filling: bool = False) -> tuple[Expr, Widths] | None:
    """For `select(the indices are inside, t[indices], 0)`: the read, and how far its indices reach before and behind each axis.

    None for any other expression, and where the reach is unknown or wide. With any other `filling` than zeros, too.
    """
    if e.op != "select" or e.args[1].op != "read" or e.args[2].op != "const" or not (filling or e.args[2].attr == 0):
        return None
    cond, read, _ = e.args
    edges: dict[Expr, int] = {}
    for axis, (index, extent) in enumerate(zip(read.args, read.attr.shape, strict=True)):
        edges |= {simplify(as_expr(0) <= index): axis, simplify(index < as_expr(extent)): axis}
    conditions = set(map(simplify, E.conjuncts(cond)))
    if not conditions <= edges.keys():
        return None
    widths = {}
    for axis in sorted({edges[c] for c in conditions}):
        index, extent = read.args[axis], as_expr(read.attr.shape[axis])
        low = bounds(simplify(index))[0]
        high = next((n for n in range(WIDEST + 1) if prove(index - extent + 1 <= n)), None)
        if low is None or high is None or max(-low, high) > WIDEST:
            return None
        widths[axis] = max(-low, 0), high
    return read, widths


def window_size(bodies: Iterable[Expr]) -> float:
    """How many elements are reduced to one, at most; infinity where the extent is not known."""
    reductions = [e for e in E.walk(*bodies) if e.op == "reduce"]
    return max((prod(inf if (last := bounds(a)[1]) is None else last + 1 for a in e.attr[1]) for e in reductions), default=1)


def joined(a: Widths, b: Widths) -> Widths:
    """Wide enough for both."""
    sides = {axis: (a.get(axis, (0, 0)), b.get(axis, (0, 0))) for axis in sorted({*a, *b})}
    return {axis: (max(one[0], other[0]), max(one[1], other[1])) for axis, (one, other) in sides.items()}


def covers(have: Widths, need: Widths) -> bool:
    """Whether a halo is as wide as needed on every side."""
    return joined(have, need) == joined(have, {})


def selections(e: Expr) -> list[Expr]:
    """The sub-expressions that may be padded reads, the arguments of `reach`."""
    return [x for x in E.walk(e) if x.op == "select" and x.args[1].op == "read"]


def concatenated_row_length(axes: Sequence[Expr], shape: Sequence[Dim], indices: Sequence[Expr]) -> int | None:
    """n, if `x[..., c // n, ..., c % n]` is read at the element (..., c) of a tensor with such axes: rows of length n, those of matrices
    c // n next to each other, as many as there is room for. All other axes stand for themselves, so that no element is read twice."""
    if not axes or not indices:
        return None
    *others, last = map(simplify, indices)
    if last.op != "mod" or last.args[0] is not axes[-1] or last.args[1].op != "const":
        return None
    length, whole = int(last.args[1].attr), shape[-1]
    if not isinstance(whole, int) or whole % length:
        return None
    rest = [i for i in others if i.op != "const"]
    long = {axis for axis, d in zip(axes[:-1], shape, strict=False) if d != 1}
    matrix = simplify(axes[-1] // length)
    once = len(set(rest)) == len(rest) and {*long, matrix} <= set(rest) <= {*axes[:-1], matrix}
    return length if once else None
