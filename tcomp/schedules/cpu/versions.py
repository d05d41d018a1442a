"""Which kernels get code of their own for some sizes, chosen when they run: see `Backend.versions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from tcomp.ir.expr import Expr, as_expr, bounds, const, reads, substitute
from tcomp.ir.loops import Kernel
from tcomp.ir.simplify import simplify
from tcomp.schedules.analysis import access_patterns as patterns

MAX_VERSIONS = 16  # of a kernel: each takes as long to compile, and as much code, as the kernel itself


def versions(kernel: Kernel) -> Sequence[Mapping[Expr, int]]:
    """The sizes for which a kernel is specialised. One with reductions is, for each combination of the exact sizes of its dims, or for each
    exact size alone if there are too many combinations. One with a product or a gather is also specialised to 1 in the outermost symbolic
    axis of its result (a batch, or rows), where that is a dim that may be 1: other axes are then the rows of register tiles, or there are
    none and lanes run along the reduction."""
    if patterns.is_imperative(kernel):
        return ()
    reductions = [n for n in patterns.nests(kernel) if n.is_reduction]
    found = [*_exact(kernel)] if reductions else []
    for nest in (n for n in reductions if patterns.is_product(n) or any(reads(*r.args) for r in n.reads)):
        size = next((x.extent for x in nest.spatial if isinstance(x.extent, Expr)), None)
        if size is not None and size in kernel.scalars and (bounds(size)[0] or 0) <= 1 and _may_run(kernel, {size: 1}):
            return found if {size: 1} in found else [*found, {size: 1}]
    return found


def _exact(kernel: Kernel) -> Sequence[Mapping[Expr, int]]:
    dims = [v for v in kernel.scalars if v.attr.exact]
    if not dims:
        return []
    sizes: list[tuple[int, ...]] = [v.attr.exact for v in dims]
    if prod(map(len, sizes)) <= MAX_VERSIONS:
        found = [dict(zip(dims, combination, strict=True)) for combination in product(*sizes)]
    else:
        found = [{v: size} for v, own in zip(dims, sizes, strict=True) for size in own][:MAX_VERSIONS]
    return [sizes for sizes in found if _may_run(kernel, sizes)]


def _may_run(kernel: Kernel, sizes: Mapping[Expr, int]) -> bool:
    """Whether no buffer gets a negative size: a window of 3 has n - 2 results, and is refused by the run where n is 1."""
    known = {v: const(n) for v, n in sizes.items()}
    dims = (as_expr(d) for b in kernel.buffers for d in b.shape)
    return all((bounds(simplify(substitute(d, known)))[1] or 0) >= 0 for d in dims)
