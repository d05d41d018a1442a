"""ONNX handlers of losses."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Versions
from tcomp.ir.graph import Value
from tcomp.ops.loss import NLL_LOSS
from tcomp.ops.reduction import LOG_SOFTMAX


def _nll(ctx: Context, log_prob: Value) -> Value:
    attrs = {"ignore_index": ctx.attrs.get("ignore_index"), "reduction": ctx.attrs["reduction"]}
    return ctx.add(NLL_LOSS, [log_prob, ctx.value(1), ctx.input(2)], **attrs)


def _nll_loss(ctx: Context) -> Value:
    return _nll(ctx, ctx.value(0))


def _softmax_cross_entropy_loss(ctx: Context) -> tuple[Value, Value]:
    log_prob = ctx.add(LOG_SOFTMAX, [ctx.value(0)], axes=(1,))
    return _nll(ctx, log_prob), log_prob


TABLE: dict[str, Versions] = {
    "NegativeLogLikelihoodLoss": ((12, _nll_loss),),
    "SoftmaxCrossEntropyLoss": ((12, _softmax_cross_entropy_loss),),
}
