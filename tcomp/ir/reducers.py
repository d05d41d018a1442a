"""The operations that reductions combine elements with: sum, product, maximum, and those of users."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tcomp.ir.dtypes import highest, lowest
from tcomp.ir.expr import Expr, ExprLike, binary, const, substitute, var
from tcomp.ir.scalar_operators import COMMUTATIVE


@dataclass(frozen=True)
class Reducer:
    """An associative operation for reductions: `combine` is an expression over the variables `lhs` and `rhs`.

    A reduction starts from the constant `identity`. All four have one dtype.
    """

    name: str
    lhs: Expr
    rhs: Expr
    combine: Expr
    identity: Expr

    @property
    def op(self) -> str:
        """The commutative operator ("add", "max") that combines `lhs` and `rhs`; empty for any other combination, whatever its name."""
        combine = self.combine
        return combine.op if combine.op in COMMUTATIVE and set(combine.args) == {self.lhs, self.rhs} else ""

    def __call__(self, a: Expr, b: Expr) -> Expr:
        return substitute(self.combine, {self.lhs: a, self.rhs: b})


_STANDARD: dict[str, tuple[str, Callable[[str], ExprLike]]] = {
    "sum": ("add", lambda dtype: 0), "prod": ("mul", lambda dtype: 1), "max": ("max", lowest), "min": ("min", highest),
    "all": ("and", lambda dtype: True), "any": ("or", lambda dtype: False),
}  # fmt: skip


@functools.cache
def standard_reducers(dtype: str) -> dict[str, Reducer]:
    """The reducers of one dtype that programs need not declare, by name."""
    lhs, rhs = var("lhs", dtype=dtype), var("rhs", dtype=dtype)
    return {name: Reducer(name, lhs, rhs, binary(op, lhs, rhs), const(start(dtype), dtype)) for name, (op, start) in _STANDARD.items()}
