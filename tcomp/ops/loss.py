"""Losses: negative log-likelihood over class probabilities."""

from __future__ import annotations

from tcomp.ir import te
from tcomp.ir.expr import Expr, cast, const, select
from tcomp.ir.graph import Operator
from tcomp.ops.broadcast import widened
from tcomp.ops.indexing import valid_index
from tcomp.ops.reduction import fold, rounded


def nll_loss(log_prob: te.Tensor, target: te.Tensor, weight: te.Tensor | None, ignore_index: int | None, reduction: str) -> te.Tensor:
    """-weight[t] * log_prob[n, t, d...] for the classes t = target[n, d...]; 0 where t is `ignore_index`.

    log_prob [n, classes, d...], target [n, d...] integer, weight [classes]. reduction: none, sum, or mean (by the sum of the
    weights that count).
    """
    dtype = widened(const(0.0, log_prob.dtype)).dtype

    def weight_of(i: tuple[Expr, ...]) -> Expr:
        t = target[i]
        own = const(1.0, dtype) if weight is None else widened(weight[valid_index(t, log_prob.shape[1])])
        return own if ignore_index is None else select(te.equal(t, cast(const(ignore_index), t.dtype)), 0.0, own)

    def element(*i: Expr) -> Expr:
        value = widened(log_prob[(i[0], valid_index(target[i], log_prob.shape[1]), *i[1:])])
        w = weight_of(i)
        return select(te.equal(w, 0.0), 0.0, -value * w)

    loss = te.compute(target.shape, element, "nll_loss")
    if reduction != "none":
        every = tuple(range(target.ndim))
        loss = fold(loss, every, False, te.sum, "nll_loss.sum")
        if reduction == "mean":
            total = fold(te.compute(target.shape, lambda *i: weight_of(i), "nll_loss.weights"), every, False, te.sum, "weight")
            loss = te.compute((), lambda sum_=loss: sum_[()] / total[()], "nll_loss.mean")
    return rounded(loss, log_prob.dtype)


NLL_LOSS = Operator("nll_loss", nll_loss)
