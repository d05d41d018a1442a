"""ONNX operators: elementwise arithmetic, comparisons, logic, activations, conversions."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Table, Versions, dtype_of, flag, forward
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ops
from tcomp.ops.movement import RESHAPE


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


def _pow(ctx: Context) -> Value:
    """Small constant exponents become products and roots."""
    x, y = _aligned(ctx) if ctx.opset < 7 else (ctx.value(0), ctx.value(1))
    exponent = ctx.scope.known(y)
    if exponent is not None and exponent.size == 1 and len(y.shape) <= len(x.shape) and is_float(x.dtype):
        match float(exponent.reshape(())):
            case 2.0:
                return ctx.add(ops.MUL, [x, x])
            case 3.0:
                return ctx.add(ops.MUL, [ctx.add(ops.MUL, [x, x]), x])
            case 0.5:
                return ctx.add(ops.SQRT, [x])
    return ctx.add(ops.POW, [x, y])


def _prelu_by_channel(ctx: Context) -> Value:
    """Before opset 7: one slope for all, or one a channel (axis 1)."""
    x, slope = ctx.value(0), ctx.value(1)
    if len(slope.shape) == 1 and slope.shape[0] != 1 and len(x.shape) > 2:
        slope = ctx.add(RESHAPE, [slope], shape=(*slope.shape, *(1,) * (len(x.shape) - 2)))
    return ctx.add(ops.PRELU, [x, slope])


def _clip(ctx: Context) -> Value:
    bounds = [ctx.input(1), ctx.input(2)]
    known = [None if b is None else ctx.scope.known(b) for b in bounds]
    if all(b is None or (k is not None and k.size == 1) for b, k in zip(bounds, known, strict=True)):
        low, high = (None if k is None else k.reshape(()).astype(object).item() for k in known)
        return ctx.add(ops.CLIP_CONST, [ctx.value(0)], low=low, high=high)
    return ctx.add(ops.CLIP, [ctx.value(0), *bounds])


def _dtype_by_name(ctx: Context) -> str:
    """Opset 1 names the type."""
    name: str = ctx.attrs["to"]
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(name.upper(), name.lower())


TABLE: Table = {
    **{
        name: forward(op)
        for name, op in {
            "Abs": ops.ABS, "Neg": ops.NEG, "Not": ops.NOT, "BitwiseNot": ops.NOT, "Sign": ops.SIGN,
            "Acos": ops.ACOS, "Acosh": ops.ACOSH, "Asin": ops.ASIN, "Asinh": ops.ASINH, "Atan": ops.ATAN, "Atanh": ops.ATANH,
            "Cos": ops.COS, "Cosh": ops.COSH, "Sin": ops.SIN, "Sinh": ops.SINH, "Tan": ops.TAN, "Tanh": ops.TANH,
            "Ceil": ops.CEIL, "Floor": ops.FLOOR, "Round": ops.ROUND, "Exp": ops.EXP, "Log": ops.LOG, "Sqrt": ops.SQRT,
            "Erf": ops.ERF, "Reciprocal": ops.RECIPROCAL, "Sigmoid": ops.SIGMOID, "Relu": ops.RELU, "Mish": ops.MISH,
            "HardSwish": ops.HARD_SWISH, "Softplus": ops.SOFTPLUS, "Softsign": ops.SOFTSIGN, "IsNaN": ops.ISNAN,
            "Where": ops.WHERE, "Max": ops.MAX, "Min": ops.MIN, "Sum": ops.SUM, "Mean": ops.MEAN,
            "GreaterOrEqual": ops.GREATER_EQUAL, "LessOrEqual": ops.LESS_EQUAL,
            "BitwiseAnd": ops.AND, "BitwiseOr": ops.OR, "BitwiseXor": ops.XOR,
        }.items()
    },
    **{
        name: _binary(op)
        for name, op in {
            "Add": ops.ADD, "Sub": ops.SUB, "Mul": ops.MUL, "Div": ops.DIV, "And": ops.AND, "Or": ops.OR, "Xor": ops.XOR,
            "Equal": ops.EQUAL, "Less": ops.LESS, "Greater": ops.GREATER,
        }.items()
    },
    "LeakyRelu": forward(ops.LEAKY_RELU, "alpha"),
    "ThresholdedRelu": forward(ops.THRESHOLDED_RELU, "alpha"),
    "Elu": forward(ops.ELU, "alpha"),
    "Celu": forward(ops.CELU, "alpha"),
    "Selu": forward(ops.SELU, "alpha", "gamma"),
    "Gelu": forward(ops.GELU, "approximate"),
    "Swish": forward(ops.SWISH, "alpha"),
    "HardSigmoid": forward(ops.HARD_SIGMOID, "alpha", "beta"),
    "Shrink": forward(ops.SHRINK, "lambd", "bias"),
    "PRelu": ((1, _prelu_by_channel), (7, forward(ops.PRELU))),
    "Pow": _pow,
    "Mod": lambda ctx: ctx.add(ops.FMOD if ctx.attrs["fmod"] else ops.MOD, ctx.inputs),  # the sign of the dividend, or of the divisor
    "BitShift": lambda ctx: ctx.add(ops.SHIFT_LEFT if ctx.attrs["direction"] == "LEFT" else ops.SHIFT_RIGHT, ctx.inputs),
    "Clip": ((1, lambda ctx: ctx.add(ops.CLIP_CONST, ctx.inputs, low=ctx.attrs.get("min"), high=ctx.attrs.get("max"))), (11, _clip)),
    "Cast": ((1, forward(ops.CAST, dtype=_dtype_by_name)), (6, forward(ops.CAST, dtype=dtype_of("to")))),
    "CastLike": forward(ops.CAST, inputs=1, dtype=lambda ctx: ctx.value(1).dtype),
    "BitCast": forward(ops.BITCAST, dtype=dtype_of("to")),
    "IsInf": forward(ops.ISINF, positive=flag("detect_positive"), negative=flag("detect_negative")),
}  # fmt: skip
