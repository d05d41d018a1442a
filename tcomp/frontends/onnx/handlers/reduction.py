"""ONNX operators: reductions, arg-max, softmax, prefix sums, losses."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Handler, Table, Versions, attribute, flag, forward
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise
from tcomp.ops import reduction as ops


def _reduce(op: Operator) -> Handler:
    """`axes` as attribute or second input; without axes all are reduced, unless `noop_with_empty_axes`."""

    def handler(ctx: Context) -> Value:
        axes = tuple(sorted(ctx.axes(ctx.given_axes(1) or ())))
        if not axes and ctx.attrs.get("noop_with_empty_axes"):
            return ctx.value(0)
        return ctx.add(op, [ctx.value(0)], axes=axes or ctx.axes(None), keepdims=bool(ctx.attrs["keepdims"]))

    return handler


def _searched_axis(ctx: Context) -> int:
    axis = ctx.axis(ctx.attrs["axis"])
    if ctx.value(0).shape[axis] == 0:
        raise ctx.invalid("the axis is empty")
    return axis


def _arg(op: Operator) -> Handler:
    return forward(op, axis=_searched_axis, keepdims=flag("keepdims"), last=flag("select_last_index"))


def _softmax(op: Operator) -> Versions:
    """Before opset 13 all axes from `axis` on are normalised together, since then `axis` alone."""
    flattened = forward(op, axes=lambda ctx: tuple(range(ctx.axis(ctx.attrs["axis"], end=True), len(ctx.value(0).shape))))
    return (1, flattened), (13, forward(op, axes=lambda ctx: (ctx.axis(ctx.attrs["axis"]),)))


def _prefix(op: Operator) -> Handler:
    def axis(ctx: Context) -> int:
        return 0 if len(ctx.value(0).shape) == 1 else ctx.axis(ctx.require_dims(1, "the axis")[0])

    return forward(op, inputs=1, axis=axis, exclusive=flag("exclusive"), reverse=flag("reverse"))


def _mean_variance_normalization(ctx: Context) -> Value:
    """(x - mean) / (standard deviation + 1e-9) over `axes`."""
    x, axes = ctx.value(0), tuple(sorted(ctx.axes(ctx.attrs["axes"])))
    centred = ctx.add(elementwise.SUB, [x, ctx.add(ops.REDUCE_MEAN, [x], axes=axes, keepdims=True)])
    variance = ctx.add(ops.REDUCE_MEAN, [ctx.add(elementwise.MUL, [centred, centred])], axes=axes, keepdims=True)
    deviation = ctx.add(elementwise.ADD, [ctx.add(elementwise.SQRT, [variance]), ctx.constant(1e-9, x.dtype)])
    return ctx.add(elementwise.DIV, [centred, deviation])


def _softmax_cross_entropy_loss(ctx: Context) -> tuple[Value, Value]:
    log_prob = ctx.add(ops.LOG_SOFTMAX, [ctx.value(0)], axes=(1,))
    attrs = {"ignore_index": ctx.attrs.get("ignore_index"), "reduction": ctx.attrs["reduction"]}
    return ctx.add(ops.NLL_LOSS, [log_prob, ctx.value(1), ctx.input(2)], **attrs), log_prob


TABLE: Table = {
    "ReduceSum": _reduce(ops.REDUCE_SUM), "ReduceProd": _reduce(ops.REDUCE_PROD), "ReduceMean": _reduce(ops.REDUCE_MEAN),
    "ReduceMax": _reduce(ops.REDUCE_MAX), "ReduceMin": _reduce(ops.REDUCE_MIN), "ReduceL1": _reduce(ops.REDUCE_L1),
    "ReduceL2": _reduce(ops.REDUCE_L2), "ReduceSumSquare": _reduce(ops.REDUCE_SUM_SQUARE), "ReduceLogSum": _reduce(ops.REDUCE_LOG_SUM),
    "ReduceLogSumExp": _reduce(ops.REDUCE_LOG_SUM_EXP), "ArgMax": _arg(ops.ARG_MAX), "ArgMin": _arg(ops.ARG_MIN),
    "Softmax": _softmax(ops.SOFTMAX), "LogSoftmax": _softmax(ops.LOG_SOFTMAX), "Hardmax": _softmax(ops.HARDMAX),
    "CumSum": _prefix(ops.CUM_SUM), "CumProd": _prefix(ops.CUM_PROD), "MeanVarianceNormalization": _mean_variance_normalization,
    "NegativeLogLikelihoodLoss": forward(ops.NLL_LOSS, "reduction", inputs=3, ignore_index=attribute("ignore_index")),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
}  # fmt: skip
