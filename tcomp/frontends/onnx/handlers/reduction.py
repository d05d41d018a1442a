"""ONNX handlers of reductions, arg-max, softmax and prefix sums."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Handler, Versions
from tcomp.frontends.onnx.handlers.axes import axes_of, axis_of, given_axes
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise
from tcomp.ops import reduction as ops


def _reduce(op: Operator) -> Handler:
    """`axes` as attribute or second input; without axes all are folded, unless `noop_with_empty_axes`."""

    def handler(ctx: Context) -> Value:
        x = ctx.value(0)
        rank = len(x.shape)
        axes = tuple(sorted(axes_of(ctx, given_axes(ctx, 1) or (), rank)))
        if not axes:
            if ctx.attrs.get("noop_with_empty_axes"):
                return x
            axes = tuple(range(rank))
        return ctx.add(op, [x], axes=axes, keepdims=bool(ctx.attrs["keepdims"]))

    return handler


def _arg(op: Operator) -> Handler:
    def handler(ctx: Context) -> Value:
        x = ctx.value(0)
        axis = axis_of(ctx, ctx.attrs["axis"], len(x.shape))
        if x.shape[axis] == 0:
            raise ctx.invalid("the axis is empty")
        keepdims, last = bool(ctx.attrs["keepdims"]), bool(ctx.attrs.get("select_last_index"))
        return ctx.add(op, [x], axis=axis, keepdims=keepdims, last=last)

    return handler


def _softmax(op: Operator) -> Versions:
    """Before opset 13 all axes from `axis` on are normalised together, since then `axis` alone."""

    def flattened(ctx: Context) -> Value:
        x = ctx.value(0)
        axis = axis_of(ctx, ctx.attrs["axis"], len(x.shape), 1)
        return ctx.add(op, [x], axes=tuple(range(axis, len(x.shape))))

    def single(ctx: Context) -> Value:
        x = ctx.value(0)
        return ctx.add(op, [x], axes=(axis_of(ctx, ctx.attrs["axis"], len(x.shape)),))

    return (1, flattened), (13, single)


def _prefix(op: Operator) -> Handler:
    def handler(ctx: Context) -> Value:
        x = ctx.value(0)
        (axis,) = (0,) if len(x.shape) == 1 else ctx.require_dims(1, "the axis")
        exclusive, reverse = bool(ctx.attrs["exclusive"]), bool(ctx.attrs["reverse"])
        return ctx.add(op, [x], axis=axis_of(ctx, axis, len(x.shape)), exclusive=exclusive, reverse=reverse)

    return handler


def _mean_variance_normalization(ctx: Context) -> Value:
    """(x - mean) / (standard deviation + 1e-9) over `axes`."""
    x = ctx.value(0)
    axes = tuple(sorted(axes_of(ctx, ctx.attrs["axes"], len(x.shape))))
    centred = ctx.add(elementwise.SUB, [x, ctx.add(ops.REDUCE_MEAN, [x], axes=axes, keepdims=True)])
    variance = ctx.add(ops.REDUCE_MEAN, [ctx.add(elementwise.MUL, [centred, centred])], axes=axes, keepdims=True)
    deviation = ctx.add(elementwise.ADD, [ctx.add(elementwise.SQRT, [variance]), ctx.constant(1e-9, x.dtype)])
    return ctx.add(elementwise.DIV, [centred, deviation])


TABLE: dict[str, Versions] = {
    "ReduceSum": ((1, _reduce(ops.REDUCE_SUM)),),
    "ReduceProd": ((1, _reduce(ops.REDUCE_PROD)),),
    "ReduceMean": ((1, _reduce(ops.REDUCE_MEAN)),),
    "ReduceMax": ((1, _reduce(ops.REDUCE_MAX)),),
    "ReduceMin": ((1, _reduce(ops.REDUCE_MIN)),),
    "ReduceL1": ((1, _reduce(ops.REDUCE_L1)),),
    "ReduceL2": ((1, _reduce(ops.REDUCE_L2)),),
    "ReduceSumSquare": ((1, _reduce(ops.REDUCE_SUM_SQUARE)),),
    "ReduceLogSum": ((1, _reduce(ops.REDUCE_LOG_SUM)),),
    "ReduceLogSumExp": ((1, _reduce(ops.REDUCE_LOG_SUM_EXP)),),
    "ArgMax": ((1, _arg(ops.ARG_MAX)),),
    "ArgMin": ((1, _arg(ops.ARG_MIN)),),
    "Softmax": _softmax(ops.SOFTMAX),
    "LogSoftmax": _softmax(ops.LOG_SOFTMAX),
    "Hardmax": _softmax(ops.HARDMAX),
    "CumSum": ((11, _prefix(ops.CUM_SUM)),),
    "CumProd": ((26, _prefix(ops.CUM_PROD)),),
    "MeanVarianceNormalization": ((9, _mean_variance_normalization),),
}
