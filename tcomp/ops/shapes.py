"""Operators about values as such: sizes written down as a tensor, and a plain copy."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_expr, cast, const, row_major, select
from tcomp.ir.graph import Operator


def dims(*, dims: Sequence[Dim], shape: Sequence[int], dtype: str = "int64") -> te.Tensor:
    """A tensor of `shape` whose elements, in row-major order, are the given sizes (or other scalar expressions)."""

    def element(*index: Expr) -> Expr:
        position = row_major(index, shape)
        result = cast(as_expr(dims[-1]) if dims else const(0), dtype)
        for number in range(len(dims) - 2, -1, -1):
            result = select(te.equal(position, number), cast(as_expr(dims[number]), dtype), result)
        return result

    return te.compute(tuple(shape), element, name="dims")


def identity(x: te.Tensor) -> te.Tensor:
    """A copy."""
    return te.compute(x.shape, lambda *i: x[i], name="identity")


DIMS = Operator("dims", dims)
IDENTITY = Operator("identity", identity)
