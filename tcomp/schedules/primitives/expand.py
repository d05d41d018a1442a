"""Expand a dimension into two, the inverse of collapse: [n * c] read and written as [n, c]."""

from __future__ import annotations

from tcomp.ir.expr import Expr
from tcomp.ir.loops import Buffer, Kernel
from tcomp.schedules.primitives.edit import find_buffer, refuse, replace_buffer


def expand(kernel: Kernel, buffer: str, dim: int, factor: int) -> Kernel:
    """Dimension `dim` of a buffer becomes two: element [.., i, ..] is [.., i // factor, i % factor, ..] of the same memory.

    Legal when the extent is constant and `factor` divides it: buffers are dense and row-major, so it is only another view, of parameters
    as well. Good for indices that are quotients: after splitting the loops, the channels of a grouped convolution are two plain loops.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A = te.placeholder((3,), name="A")
    >>> s = Schedule(te.compute((12,), lambda i: A[i // 4], name="B"))
    >>> s.expand("B", 0, 4)
    >>> s.split("B.i", 4)
    ('B.i.o', 'B.i.i')
    >>> print(s)
    kernel B(A: float32[3], B: float32[3, 4]) -> (B) {
      for B.i.o in 0..3 {
        for B.i.i in 0..4 {
          B[B.i.o, B.i.i] = A[B.i.o]
        }
      }
    }
    """
    old = find_buffer(kernel, buffer, "expand")
    if not 0 <= dim < len(old.shape):
        raise refuse(kernel, "expand", f"`{buffer}` has {len(old.shape)} dimensions, none is number {dim}")
    extent = old.shape[dim]
    if not isinstance(extent, int) or factor < 1 or extent % factor:
        raise refuse(kernel, "expand", f"{factor} is no divisor of the extent {extent} of dimension {dim} of `{buffer}`")
    new = Buffer(old.name, old.dtype, (*old.shape[:dim], extent // factor, factor, *old.shape[dim + 1 :]), old.scope)

    def places(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        i = indices[dim]
        return (*indices[:dim], i // factor, i % factor, *indices[dim + 1 :])

    return replace_buffer(kernel, old, new, places)
