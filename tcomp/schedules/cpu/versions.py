"""Which kernels get code of their own for some sizes, chosen when they run: see `Backend.versions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tcomp.ir.expr import Expr, bounds
from tcomp.ir.loops import Kernel
from tcomp.schedules.analysis import access_patterns as patterns


def versions(kernel: Kernel) -> Sequence[Mapping[Expr, int]]:
    """A plain kernel with a product is compiled once more for 1 in the outermost symbolic axis of its result, where that is a dim that may
    be 1: a batch, or rows. Other axes are then the rows of register tiles, or there are none, and lanes run along the sum."""
    if patterns.is_imperative(kernel):
        return ()
    for nest in (n for n in patterns.nests(kernel) if n.is_reduction and patterns.is_product(n)):
        size = next((x.extent for x in nest.spatial if isinstance(x.extent, Expr)), None)
        if size is not None and size in kernel.scalars and (bounds(size)[0] or 0) <= 1:
            return ({size: 1},)
    return ()
