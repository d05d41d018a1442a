"""Rows of matrices next to each other: what joining the heads of attention looks like in an expression."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir.expr import Dim, Expr
from tcomp.ir.simplify import simplify


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
