"""Products of matrices in less than float32, where that was asked for: what is summed changes, so this comes before any schedule."""

from __future__ import annotations

from collections.abc import Callable

from tcomp.ir import expr as E
from tcomp.ir.expr import Expr
from tcomp.ir.loops import Accumulate, Kernel, Stmt
from tcomp.schedules.instructions import tf32
from tcomp.schedules.primitives.editing import rebuild
from tcomp.schedules.primitives.reductions import product_of

_ROUNDED: dict[str, Callable[[Expr], Expr]] = {
    "tf32": tf32,
    "fp16": lambda x: E.cast(E.cast(x, "float16"), "float32"),
    "bf16": lambda x: E.cast(E.cast(x, "bfloat16"), "float32"),
}


def with_precision(kernel: Kernel, precision: str) -> Kernel:
    """The kernel with the factors of float32 products of matrices in tf32, fp16 or bf16; with "fp32" it stays as it is.

    Such a product is a sum of which some axes of the result move one factor and not the other, and some the other one: matrix products,
    convolutions; neither norms nor depthwise filters. Sums stay float32.
    """
    if precision == "fp32":
        return kernel

    def edit(s: Stmt) -> Stmt | None:
        product, conditions = product_of(s) if isinstance(s, Accumulate) else (None, [])
        if not isinstance(s, Accumulate) or product is None or s.value.dtype != "float32" or not all(map(E.reads, product.args)):
            return None
        left, right = (set(E.variables(factor)) & set(E.variables(*s.indices)) for factor in product.args)
        if left <= right or right <= left:
            return None
        value = E.binary("mul", *map(_ROUNDED[precision], product.args))
        for c in reversed(conditions):
            value = E.select(c, value, s.reducer.identity)
        return Accumulate(s.buffer, s.indices, value, s.reducer)

    return kernel.with_body(rebuild(kernel.body, edit))
