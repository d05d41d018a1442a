"""What a loop means to the accesses below it: the structure that default schedules look at, instead of operator names."""

from __future__ import annotations

from dataclasses import dataclass

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_expr
from tcomp.ir.loops import Accumulate, Buffer, For, Store
from tcomp.ir.simplify import linear, simplify


@dataclass(frozen=True, slots=True)
class Nest:
    """A perfect nest at the top level of a kernel: its loops, outermost first, and the store inside."""

    loops: tuple[For, ...]
    leaf: Store | Accumulate

    @property
    def writes(self) -> Buffer:
        return self.leaf.buffer

    @property
    def is_fold(self) -> bool:
        return isinstance(self.leaf, Accumulate)

    @property
    def spatial(self) -> tuple[For, ...]:
        """Loops that run over elements of the result."""
        used = set(E.variables(*self.leaf.indices))
        return tuple(x for x in self.loops if x.var in used)

    @property
    def folds(self) -> tuple[For, ...]:
        """Loops that run over what is accumulated."""
        used = set(E.variables(*self.leaf.indices))
        return tuple(x for x in self.loops if x.var not in used)

    @property
    def reads(self) -> list[Expr]:
        return E.reads(self.leaf.value)


def stride(read: Expr, v: Expr) -> int | None:
    """How many elements the address moves when `v` grows by one; None if that is not a constant."""
    return coefficient(linear_index(read.attr, read.args), v)


def linear_index(buffer: Buffer, indices: tuple[Expr, ...]) -> Expr:
    """Row-major position of an element."""
    position: Expr = as_expr(0)
    for index, extent in zip(indices, buffer.shape, strict=True):
        position = position * as_expr(extent) + index
    return simplify(position)


def coefficient(index: Expr, v: Expr) -> int | None:
    """The constant factor of `v` in an affine index; None if `v` occurs in any other way."""
    found = 0
    for monomial, c in linear(index).items():
        if monomial == (v,):
            found = c
        elif v in E.variables(*monomial):
            return None
    return found


def contiguous(reads: list[Expr], v: Expr) -> bool:
    """Every read is a unit-stride vector or the same element for neighbouring values of `v`."""
    return all(stride(r, v) in (0, 1) for r in reads)


def extent_of(extent: Dim, default: int) -> int:
    """A number to reason with, where the extent is symbolic: its upper bound if small, else `default`."""
    if isinstance(extent, int):
        return extent
    hi = E.bounds(extent)[1]
    return default if hi is None else min(hi, default)
