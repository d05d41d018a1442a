"""ONNX operators: elementwise arithmetic, activations, conversions; reductions, softmax, prefix sums, losses, MeanVarianceNormalization."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Handler, Table, Versions, attribute, flag, forward
from tcomp.frontends.onnx.handlers.runtime_axes import chosen_axes, sized
from tcomp.ir.dtypes import NARROW_FLOATS
from tcomp.ir.expr import Dim, as_expr, select
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ew, reduction as red
from tcomp.ops.movement import RESHAPE, VIEW


def _aligned(ctx: Context) -> tuple[Value, Value]:
    """Operands under the broadcasting of opsets before 7: the second one's axes start at `axis` of the first."""
    x, y = ctx.value(0), ctx.value(1)
    if ctx.attrs.get("broadcast") and ctx.attrs.get("axis") is not None:
        trailing = len(x.shape) - ctx.axis(ctx.attrs["axis"], end=True) - len(y.shape)
        if trailing > 0:
            y = ctx.add(RESHAPE, [y], shape=(*y.shape, *(1,) * trailing))
    return x, y


def _binary(op: Operator) -> Versions:
    """Operators that broadcast since opset 7."""
    return (1, lambda ctx: ctx.add(op, _aligned(ctx))), (7, forward(op))


def _prelu_by_channel(ctx: Context) -> Value:
    """Before opset 7: one slope for all, or one a channel (axis 1)."""
    x, slope = ctx.value(0), ctx.value(1)
    if len(slope.shape) == 1 and slope.shape[0] != 1 and len(x.shape) > 2:
        slope = ctx.add(RESHAPE, [slope], shape=(*slope.shape, *(1,) * (len(x.shape) - 2)))
    return ctx.add(ew.PRELU, [x, slope])


def _clip(ctx: Context) -> Value:
    bounds = [ctx.input(1), ctx.input(2)]
    known = [None if b is None else ctx.scope.known(b) for b in bounds]
    if all(b is None or (k is not None and k.size == 1) for b, k in zip(bounds, known, strict=True)):
        low, high = (None if k is None else k.reshape(()).astype(object).item() for k in known)
        return ctx.add(ew.CLIP_CONST, [ctx.value(0)], low=low, high=high)
    return ctx.add(ew.CLIP, [ctx.value(0), *bounds])


def _reduce(op: Operator) -> Handler:
    """`axes` as attribute or second input; without axes all are reduced, unless `noop_with_empty_axes`."""

    def handler(ctx: Context) -> Value:
        named = ctx.given_axes(1) or ()
        if (chosen := chosen_axes(ctx, named, len(ctx.value(0).shape))) is not None:
            shape, inner = ctx.value(0).shape, tuple(range(1, 2 * chosen.count, 2))
            result = [select(hit, 1, as_expr(d)) for hit, d in zip(chosen.hits, shape, strict=True)]
            result = result if ctx.attrs["keepdims"] else chosen.kept(shape)
            reduced = ctx.add(op, [chosen.view(ctx, ctx.value(0))], axes=inner, keepdims=False)
            return ctx.add(VIEW, [reduced], shape=sized(ctx, result, "the result", chosen.valid))
        axes = tuple(sorted({ctx.axis(axis) for axis in named}))  # ONNX Runtime allows one to be named twice
        if not axes and ctx.attrs.get("noop_with_empty_axes"):
            return ctx.value(0)
        return ctx.add(op, [ctx.value(0)], axes=axes or ctx.axes(None), keepdims=bool(ctx.attrs["keepdims"]))

    return handler


def _arg(op: Operator) -> Handler:
    def axis(ctx: Context) -> int:
        if ctx.value(0).shape[found := ctx.axis(ctx.attrs["axis"])] == 0:
            raise ctx.invalid("the axis is empty")
        return found

    return forward(op, axis=axis, keepdims=flag("keepdims"), last=flag("select_last_index"))


def _softmax(op: Operator) -> Versions:
    """Before opset 13 all axes from `axis` on are normalised together, since then `axis` alone."""
    flattened = forward(op, axes=lambda ctx: tuple(range(ctx.axis(ctx.attrs["axis"], end=True), len(ctx.value(0).shape))))
    return (1, flattened), (13, forward(op, axes=lambda ctx: (ctx.axis(ctx.attrs["axis"]),)))


def _prefix(op: Operator) -> Handler:
    def handler(ctx: Context) -> Value:
        x, attrs = ctx.value(0), {name: bool(ctx.attrs[name]) for name in ("exclusive", "reverse")}
        given: tuple[Dim, ...] = (0,) if len(x.shape) == 1 else ctx.given_dims(1, "the axis")
        if (chosen := chosen_axes(ctx, given, len(x.shape))) is None:
            return ctx.add(op, [x], axis=ctx.axis(given[0]), **attrs)
        return ctx.add(VIEW, [ctx.add(op, [chosen.view(ctx, x)], axis=1, **attrs)], shape=x.shape)

    return handler


def _mean_variance_normalization(ctx: Context) -> Value:
    """(x - mean) / (standard deviation + 1e-9) over `axes`."""
    x, axes = ctx.value(0), tuple(sorted(ctx.axes(ctx.attrs["axes"])))
    centred = ctx.add(ew.SUB, [x, ctx.add(red.REDUCE_MEAN, [x], axes=axes, keepdims=True)])
    variance = ctx.add(red.REDUCE_MEAN, [ctx.add(ew.MUL, [centred, centred])], axes=axes, keepdims=True)
    deviation = ctx.add(ew.ADD, [ctx.add(ew.SQRT, [variance]), ctx.constant(1e-9, x.dtype)])
    return ctx.add(ew.DIV, [centred, deviation])


def _cast(ctx: Context, dtype: str) -> Value:
    narrowed = {"saturate": bool(ctx.attrs.get("saturate", 1)), "rounding": ctx.attrs.get("round_mode", "up")}
    return ctx.add(ew.CAST, [ctx.value(0)], dtype=dtype, **(narrowed if dtype in NARROW_FLOATS else {}))


_NAMED = {"FLOAT": "float32", "DOUBLE": "float64"}  # types at opset 1; all others have the name of their dtype
TABLE: Table = {
    **{name: forward(op) for name, op in {
        "Abs": ew.ABS, "Neg": ew.NEG, "Not": ew.NOT, "BitwiseNot": ew.NOT, "Sign": ew.SIGN,
        "Acos": ew.ACOS, "Acosh": ew.ACOSH, "Asin": ew.ASIN, "Asinh": ew.ASINH, "Atan": ew.ATAN, "Atanh": ew.ATANH,
        "Cos": ew.COS, "Cosh": ew.COSH, "Sin": ew.SIN, "Sinh": ew.SINH, "Tan": ew.TAN, "Tanh": ew.TANH,
        "Ceil": ew.CEIL, "Floor": ew.FLOOR, "Round": ew.ROUND, "Exp": ew.EXP, "Log": ew.LOG, "Sqrt": ew.SQRT,
        "Erf": ew.ERF, "Reciprocal": ew.RECIPROCAL, "Sigmoid": ew.SIGMOID, "Relu": ew.RELU, "Mish": ew.MISH,
        "HardSwish": ew.HARD_SWISH, "Softplus": ew.SOFTPLUS, "Softsign": ew.SOFTSIGN, "IsNaN": ew.ISNAN,
        "Where": ew.WHERE, "Max": ew.MAX, "Min": ew.MIN, "Sum": ew.SUM, "Mean": ew.MEAN,
        "GreaterOrEqual": ew.GREATER_EQUAL, "LessOrEqual": ew.LESS_EQUAL,
        "BitwiseAnd": ew.AND, "BitwiseOr": ew.OR, "BitwiseXor": ew.XOR,
    }.items()},
    **{name: _binary(op) for name, op in {
        "Add": ew.ADD, "Sub": ew.SUB, "Mul": ew.MUL, "Div": ew.DIV, "Pow": ew.POW, "And": ew.AND, "Or": ew.OR, "Xor": ew.XOR,
        "Equal": ew.EQUAL, "Less": ew.LESS, "Greater": ew.GREATER,
    }.items()},
    "LeakyRelu": forward(ew.LEAKY_RELU, "alpha"), "ThresholdedRelu": forward(ew.THRESHOLDED_RELU, "alpha"),
    "Elu": forward(ew.ELU, "alpha"), "Celu": forward(ew.CELU, "alpha"), "Selu": forward(ew.SELU, "alpha", "gamma"),
    "Gelu": forward(ew.GELU, "approximate"), "Swish": forward(ew.SWISH, "alpha"), "Shrink": forward(ew.SHRINK, "lambd", "bias"),
    "HardSigmoid": forward(ew.HARD_SIGMOID, "alpha", "beta"),
    "PRelu": ((1, _prelu_by_channel), (7, forward(ew.PRELU))),
    "Mod": lambda ctx: ctx.add(ew.FMOD if ctx.attrs["fmod"] else ew.MOD, ctx.inputs),  # the sign of the dividend, or of the divisor
    "BitShift": lambda ctx: ctx.add(ew.SHIFT_LEFT if ctx.attrs["direction"] == "LEFT" else ew.SHIFT_RIGHT, ctx.inputs),
    "Clip": ((1, lambda ctx: ctx.add(ew.CLIP_CONST, ctx.inputs, low=ctx.attrs.get("min"), high=ctx.attrs.get("max"))), (11, _clip)),
    "Cast": (
        (1, forward(ew.CAST, dtype=lambda ctx: _NAMED.get(ctx.attrs["to"].upper(), ctx.attrs["to"].lower()))),
        (6, lambda ctx: _cast(ctx, ctx.dtype("to"))),
    ),
    "CastLike": lambda ctx: _cast(ctx, ctx.value(1).dtype),
    "BitCast": forward(ew.BITCAST, dtype=lambda ctx: ctx.dtype("to")),
    "IsInf": forward(ew.ISINF, positive=flag("detect_positive"), negative=flag("detect_negative")),
    **{f"Reduce{name}": _reduce(op) for name, op in {
        "Sum": red.REDUCE_SUM, "Prod": red.REDUCE_PROD, "Mean": red.REDUCE_MEAN, "Max": red.REDUCE_MAX, "Min": red.REDUCE_MIN,
        "L1": red.REDUCE_L1, "L2": red.REDUCE_L2, "SumSquare": red.REDUCE_SUM_SQUARE, "LogSum": red.REDUCE_LOG_SUM,
        "LogSumExp": red.REDUCE_LOG_SUM_EXP,
    }.items()},
    "ArgMax": _arg(red.ARG_MAX), "ArgMin": _arg(red.ARG_MIN),
    "Softmax": _softmax(red.SOFTMAX), "LogSoftmax": _softmax(red.LOG_SOFTMAX), "Hardmax": _softmax(red.HARDMAX),
    "CumSum": _prefix(red.CUM_SUM), "CumProd": _prefix(red.CUM_PROD), "MeanVarianceNormalization": _mean_variance_normalization,
    "NegativeLogLikelihoodLoss": forward(red.NLL_LOSS, "reduction", inputs=3, ignore_index=attribute("ignore_index")),
}  # fmt: skip
