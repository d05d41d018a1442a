"""Rows of matrices beside each other: what joining the heads of attention looks like in an expression."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir.expr import Dim, Expr
from tcomp.ir.simplify import simplify


def puts_beside(axes: Sequence[Expr], shape: Sequence[Dim], indices: Sequence[Expr]) -> bool:
    """Whether `x[..., c // n, ..., c % n]` is read at the element (..., c) of a tensor with such axes: rows of length n, those of matrices
    c // n beside each other. All other axes stand for themselves, so that no element is read twice."""
    if not axes or not indices:
        return False
    *others, last = map(simplify, indices)
    if last.op != "mod" or last.args[0] is not axes[-1] or last.args[1].op != "const" or not isinstance(shape[-1], int):
        return False
    rest = [i for i in others if i.op != "const"]
    long = {axis for axis, d in zip(axes[:-1], shape, strict=False) if d != 1}
    matrix = simplify(axes[-1] // last.args[1])
    return len(set(rest)) == len(rest) and {*long, matrix} <= set(rest) <= {*axes[:-1], matrix}
