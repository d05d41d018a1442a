"""ONNX handlers of elementwise operators."""

from __future__ import annotations

from tcomp.frontends.onnx.context import Context, Handler, Versions
from tcomp.frontends.onnx.handlers.axes import axis_of
from tcomp.frontends.onnx.reader import dtype_name
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ops
from tcomp.ops.movement import RESHAPE


def _simple(op: Operator, *attributes: str) -> Handler:
    """The operator applied to all inputs, with the ONNX attributes of the same names."""

    def handler(ctx: Context) -> Value:
        return ctx.add(op, ctx.inputs, **{name: ctx.attrs[name] for name in attributes})

    return handler


def _unary(op: Operator, *attributes: str) -> Versions:
    return ((1, _simple(op, *attributes)),)


def _aligned(ctx: Context) -> tuple[Value, Value]:
    """Operands under the broadcasting of opsets before 7: the second one's axes start at `axis` of the first."""
    x, y = ctx.value(0), ctx.value(1)
    axis = ctx.attrs.get("axis")
    if ctx.attrs.get("broadcast") and axis is not None:
        behind = len(x.shape) - axis_of(ctx, axis, len(x.shape), 1) - len(y.shape)
        if behind > 0:
            shape: tuple[Dim, ...] = (*y.shape, *(1,) * behind)
            y = ctx.add(RESHAPE, [y], shape=shape)
    return x, y


def _aligned_binary(op: Operator) -> Handler:
    return lambda ctx: ctx.add(op, _aligned(ctx))


def _binary(op: Operator) -> Versions:
    """Operators that broadcast since opset 7."""
    return (1, _aligned_binary(op)), (7, _simple(op))


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


def _mod(ctx: Context) -> Value:
    """The sign is the divisor's, or with `fmod` the dividend's."""
    return ctx.add(ops.FMOD if ctx.attrs["fmod"] else ops.MOD, ctx.inputs)


def _bit_shift(ctx: Context) -> Value:
    return ctx.add(ops.SHIFT_LEFT if ctx.attrs["direction"] == "LEFT" else ops.SHIFT_RIGHT, ctx.inputs)


def _clip_attributes(ctx: Context) -> Value:
    return ctx.add(ops.CLIP_CONST, [ctx.value(0)], low=ctx.attrs.get("min"), high=ctx.attrs.get("max"))


def _clip(ctx: Context) -> Value:
    bounds = [ctx.input(1), ctx.input(2)]
    known = [None if b is None else ctx.scope.known(b) for b in bounds]
    if all(b is None or (k is not None and k.size == 1) for b, k in zip(bounds, known, strict=True)):
        low, high = (None if k is None else k.reshape(()).astype(object).item() for k in known)
        return ctx.add(ops.CLIP_CONST, [ctx.value(0)], low=low, high=high)
    return ctx.add(ops.CLIP, [ctx.value(0), *bounds])


def _cast(ctx: Context) -> Value:
    return ctx.add(ops.CAST, [ctx.value(0)], dtype=dtype_name(ctx.attrs["to"], ctx.where))


def _cast_by_name(ctx: Context) -> Value:
    """Opset 1 names the type."""
    name = {"FLOAT": "float32", "DOUBLE": "float64"}.get(ctx.attrs["to"].upper(), ctx.attrs["to"].lower())
    return ctx.add(ops.CAST, [ctx.value(0)], dtype=name)


def _cast_like(ctx: Context) -> Value:
    return ctx.add(ops.CAST, [ctx.value(0)], dtype=ctx.value(1).dtype)


def _bitcast(ctx: Context) -> Value:
    return ctx.add(ops.BITCAST, [ctx.value(0)], dtype=dtype_name(ctx.attrs["to"], ctx.where))


def _isinf(ctx: Context) -> Value:
    positive, negative = bool(ctx.attrs["detect_positive"]), bool(ctx.attrs["detect_negative"])
    return ctx.add(ops.ISINF, [ctx.value(0)], positive=positive, negative=negative)


TABLE: dict[str, Versions] = {
    **{
        name: _unary(op)
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
    "LeakyRelu": _unary(ops.LEAKY_RELU, "alpha"),
    "ThresholdedRelu": _unary(ops.THRESHOLDED_RELU, "alpha"),
    "Elu": _unary(ops.ELU, "alpha"),
    "Celu": _unary(ops.CELU, "alpha"),
    "Selu": _unary(ops.SELU, "alpha", "gamma"),
    "Gelu": _unary(ops.GELU, "approximate"),
    "Swish": _unary(ops.SWISH, "alpha"),
    "HardSigmoid": _unary(ops.HARD_SIGMOID, "alpha", "beta"),
    "Shrink": _unary(ops.SHRINK, "lambd", "bias"),
    "PRelu": ((1, _prelu_by_channel), (7, _simple(ops.PRELU))),
    "Pow": ((1, _pow),),
    "Mod": ((10, _mod),),
    "BitShift": ((11, _bit_shift),),
    "Clip": ((1, _clip_attributes), (11, _clip)),
    "Cast": ((1, _cast_by_name), (6, _cast)),
    "CastLike": ((15, _cast_like),),
    "BitCast": ((26, _bitcast),),
    "IsInf": ((10, _isinf),),
}  # fmt: skip
