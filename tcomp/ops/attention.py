"""Attention: the mean of values, weighted by the softmax of scores."""

from __future__ import annotations

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Expr, cast
from tcomp.ir.graph import Operator
from tcomp.ops.broadcast import HALF, require_same, widened
from tcomp.ops.matmul import matmul
from tcomp.ops.reduction import at_kept, fold, rounded


def softmax_product(x: te.Tensor, v: te.Tensor) -> te.Tensor:
    """matmul(softmax(x), v), the softmax along the last axis of x: [..., m, k] x [..., k, n] -> [..., m, n], batches broadcast.

    The same numbers in another order: exponentials are multiplied with v, and the sums divided by those of the exponentials at the end. So
    a row of x is needed for folds alone, and these need it in any order (see `schedules.online`). Of 16-bit floats, exponentials are rounded
    before they are multiplied, as the softmax is; sums are of float32.
    """
    if x.ndim < 2 or v.ndim < 2:
        raise IRError("the product of a softmax needs matrices")
    require_same(x.shape[-1], v.shape[-2], f"contraction of {x!r} with {v!r}")
    axes = (x.ndim - 1,)
    top = fold(x, axes, True, te.max, "softmax.max")
    weight = te.compute(x.shape, lambda *i: te.exp(widened(x[i]) - at_kept(top, i)), "softmax.exp")
    total = fold(weight, axes, True, te.sum, "softmax.sum")
    factor, values = weight, v
    if v.dtype in HALF:
        factor = te.compute(weight.shape, lambda *i: widened(cast(weight[i], v.dtype)), "softmax.round")
        values = te.compute(v.shape, lambda *i: widened(v[i]), "values")
    product = matmul(factor, values)

    def element(*i: Expr) -> Expr:
        own = i[len(i) - x.ndim :]
        row = tuple(0 if d == 1 else n for d, n in zip(total.shape, own, strict=True))
        return product[i] * (1.0 / total[row])

    return rounded(te.compute(product.shape, element, "softmax_product"), v.dtype)


SOFTMAX_PRODUCT = Operator("softmax_product", softmax_product)
