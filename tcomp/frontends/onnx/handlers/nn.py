"""ONNX operators: convolution, pooling, normalisation, dropout."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.frontends.onnx.context import Context, Versions
from tcomp.frontends.onnx.handlers import movement
from tcomp.frontends.onnx.handlers.axes import axis_of
from tcomp.ir.dtypes import lowest
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, maximum, minimum
from tcomp.ir.graph import Operator, Value
from tcomp.ops.elementwise import FULL
from tcomp.ops.nn import ADD_CHANNELS, CONV, CONV_TRANSPOSE, DEFORM_CONV
from tcomp.ops.normalization import (
    BATCH_MOMENTS,
    BATCH_SCALE,
    BATCH_SHIFT,
    GROUP_NORM,
    INSTANCE_NORM,
    LAYER_NORM,
    LP_NORMALIZE,
    LRN,
    RMS_NORM,
    RUNNING,
    SCALE_SHIFT,
)
from tcomp.ops.pooling import AVERAGE_POOL, GLOBAL_LP_POOL, LP_POOL, MAX_POOL, MAX_POOL_INDICES, MAX_UNPOOL
from tcomp.ops.reduction import REDUCE_MAX, REDUCE_MEAN

Pads = list[tuple[Dim, Dim]]  # (before, after) for each spatial axis


# ---------------------------------------------------------------- windows


def per_axis(ctx: Context, name: str, rank: int) -> tuple[int, ...]:
    """An attribute with one positive integer for each spatial axis."""
    given = ctx.attrs.get(name) or [1] * rank
    if len(given) != rank or any(v < 1 for v in given):
        raise ctx.invalid(f"attribute `{name}` is {given}; the operator has {rank} spatial axes")
    return tuple(given)


def window_pads(ctx: Context, extents: Sequence[Dim], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Pads:
    """Padding of each spatial axis, from `pads` or `auto_pad`."""
    auto = ctx.attrs.get("auto_pad", "NOTSET") or "NOTSET"
    rank = len(extents)
    if auto == "VALID":
        return [(0, 0)] * rank
    if auto == "NOTSET":
        pads = ctx.attrs.get("pads") or [0] * (2 * rank)
        if len(pads) != 2 * rank:
            raise ctx.invalid(f"attribute `pads` is {pads}; the operator has {rank} spatial axes")
        return list(zip(pads[:rank], pads[rank:], strict=True))
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        raise ctx.invalid(f"attribute `auto_pad` is {auto}")
    result: Pads = []
    for extent, k, s, r in zip(extents, kernel, strides, dilations, strict=True):
        windows = -((-as_expr(extent)) // s)
        total = maximum((windows - 1) * s + (k - 1) * r + 1 - extent, 0)
        smaller = as_dim(total // 2)
        larger = as_dim(total - smaller)
        result.append((smaller, larger) if auto == "SAME_UPPER" else (larger, smaller))
    return result


def padded(ctx: Context, x: Value, pads: Pads, value: Value | None = None) -> Value:
    """`x` with its spatial axes padded by zeros (or `value`); `x` itself where there is nothing to do."""
    before, after = zip(*pads, strict=True)
    return movement.padded(ctx, x, (0, 0, *before), (0, 0, *after), filling=value)


# ---------------------------------------------------------------- convolution


def convolution(ctx: Context, x: Value, w: Value) -> Value:
    """Padding and convolution by the attributes of Conv; `x` and `w` have one dtype, zero is the neutral element."""
    rank = len(x.shape) - 2
    if rank < 1 or len(w.shape) != rank + 2:
        raise ctx.invalid(f"the input has {len(x.shape)} dimensions, the weights have {len(w.shape)}")
    kernel = [ctx.attrs["kernel_shape"][n] if ctx.attrs.get("kernel_shape") else d for n, d in enumerate(w.shape[2:])]
    if not all(isinstance(d, int) for d in w.shape):
        raise ctx.unsupported(f"the shape of the weights, {list(map(str, w.shape))}, is symbolic")
    if kernel != list(w.shape[2:]):
        raise ctx.invalid(f"attribute `kernel_shape` is {kernel}, the weights have {list(w.shape[2:])}")
    strides, dilations = per_axis(ctx, "strides", rank), per_axis(ctx, "dilations", rank)
    pads = window_pads(ctx, x.shape[2:], kernel, strides, dilations)
    group = ctx.attrs.get("group", 1)
    return ctx.add(CONV, [padded(ctx, x, pads), w], strides=strides, dilations=dilations, group=group)


def conv(ctx: Context) -> Value:
    """ONNX Conv."""
    return _biased(ctx, convolution(ctx, ctx.value(0), ctx.value(1)), ctx.input(2))


def _biased(ctx: Context, y: Value, bias: Value | None) -> Value:
    return y if bias is None else ctx.add(ADD_CHANNELS, [y, bias])


def conv_transpose(ctx: Context) -> Value:
    """ONNX ConvTranspose."""
    x, w = ctx.value(0), ctx.value(1)
    rank, group = len(x.shape) - 2, ctx.attrs.get("group", 1)
    if rank < 1 or len(w.shape) != rank + 2:
        raise ctx.invalid(f"the input has {len(x.shape)} dimensions, the weights have {len(w.shape)}")
    strides, dilations = per_axis(ctx, "strides", rank), per_axis(ctx, "dilations", rank)
    extra = ctx.attrs.get("output_padding") or [0] * rank
    wanted = ctx.attrs.get("output_shape")
    auto = ctx.attrs.get("auto_pad", "NOTSET")
    pads = ctx.attrs.get("pads") or [0] * (2 * rank)
    if len(extra) != rank or len(pads) != 2 * rank or (wanted and len(wanted) not in (rank, rank + 2)):
        raise ctx.invalid("`pads`, `output_padding` or `output_shape` do not fit the number of spatial axes")
    before: list[Dim] = []
    shape: list[Dim] = []
    for n in range(rank):
        # Shape and padding by the equations of the operator's specification.
        full = (as_expr(x.shape[n + 2]) - 1) * strides[n] + extra[n] + (as_expr(w.shape[n + 2]) - 1) * dilations[n] + 1
        if wanted or auto in ("SAME_UPPER", "SAME_LOWER"):
            size: Expr = as_expr(wanted[n - rank]) if wanted else as_expr(x.shape[n + 2]) * strides[n]
            total = maximum(full - size, 0)  # what is missing is added behind
            half = total // 2
            before.append(as_dim(total - half if auto == "SAME_LOWER" or (wanted and auto != "SAME_UPPER") else half))
        else:
            begin, end = (0, 0) if auto == "VALID" else (pads[n], pads[n + rank])
            size = full - begin - end
            before.append(begin)
        shape.append(as_dim(size))
    attrs = {"strides": strides, "dilations": dilations, "group": group, "before": tuple(before), "shape": tuple(shape)}
    return _biased(ctx, ctx.add(CONV_TRANSPOSE, [x, w], **attrs), ctx.input(2))


def deform_conv(ctx: Context) -> Value:
    """ONNX DeformConv."""
    x, w = ctx.value(0), ctx.value(1)
    if len(x.shape) != 4:
        raise ctx.unsupported("deformable convolution is supported for two spatial axes")
    pads = ctx.attrs.get("pads") or [0] * 4
    y = ctx.add(
        DEFORM_CONV,
        [x, w, ctx.value(2), ctx.input(4)],
        strides=per_axis(ctx, "strides", 2),
        dilations=per_axis(ctx, "dilations", 2),
        before=tuple(pads[:2]),
        group=ctx.attrs["group"],
        offset_group=ctx.attrs["offset_group"],
    )
    return _biased(ctx, y, ctx.input(3))


# ---------------------------------------------------------------- pooling


class _Pool:
    """Window attributes of a pooling node; `pads` already covers windows that `ceil_mode` lets hang over the end."""

    def __init__(self, ctx: Context) -> None:
        x = ctx.value(0)
        rank = len(x.shape) - 2
        if rank < 1:
            raise ctx.invalid(f"the input has {len(x.shape)} dimensions")
        self.kernel = per_axis(ctx, "kernel_shape", rank)
        self.strides, self.dilations = per_axis(ctx, "strides", rank), per_axis(ctx, "dilations", rank)
        self.given = window_pads(ctx, x.shape[2:], self.kernel, self.strides, self.dilations)
        self.pads = list(self.given)
        if ctx.attrs.get("ceil_mode", 0) and ctx.attrs.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
            for n, (extent, (begin, end)) in enumerate(zip(x.shape[2:], self.given, strict=True)):
                reach, s = (self.kernel[n] - 1) * self.dilations[n] + 1, self.strides[n]
                whole = as_expr(extent) + begin
                windows = minimum(-((reach - whole - end) // s) + 1, -((-whole) // s))  # none may start in the padding behind
                self.pads[n] = (begin, as_dim((windows - 1) * s + reach - whole))

    @property
    def attrs(self) -> dict[str, tuple[int, ...]]:
        return {"kernel": self.kernel, "strides": self.strides, "dilations": self.dilations}


def max_pool(ctx: Context) -> Value | tuple[Value, ...]:
    """ONNX MaxPool, with indices where they are asked for."""
    x, pool = ctx.value(0), _Pool(ctx)
    source = padded(ctx, x, pool.pads, ctx.constant(lowest(x.dtype), x.dtype))
    y: Value = ctx.add(MAX_POOL, [source], **pool.attrs)
    if not ctx.wants(1):
        return y
    before = tuple(b for b, _ in pool.pads)
    column_major = bool(ctx.attrs.get("storage_order", 0))
    places = ctx.add(MAX_POOL_INDICES, [source], **pool.attrs, before=before, shape=x.shape, column_major=column_major)
    return y, places


def average_pool(ctx: Context) -> Value:
    """ONNX AveragePool."""
    x, pool = ctx.value(0), _Pool(ctx)
    counted: list[tuple[Dim, Dim] | None] = []
    for extent, given, (begin, end) in zip(x.shape[2:], pool.given, pool.pads, strict=True):
        if begin == 0 and end == 0:
            counted.append(None)
        elif ctx.attrs.get("count_include_pad", 0):
            counted.append(None if given == (begin, end) else (0, as_dim(as_expr(extent) + given[0] + given[1])))
        else:
            counted.append((begin, as_dim(as_expr(extent) + begin)))
    return ctx.add(AVERAGE_POOL, [padded(ctx, x, pool.pads)], **pool.attrs, counted=tuple(counted))


def lp_pool(ctx: Context) -> Value:
    """ONNX LpPool."""
    pool, p = _Pool(ctx), float(ctx.attrs.get("p", 2))
    return ctx.add(LP_POOL, [padded(ctx, ctx.value(0), pool.pads)], **pool.attrs, p=p)


def _global(op: Operator, ctx: Context) -> Value:
    x = ctx.value(0)
    if len(x.shape) < 3:
        return x
    return ctx.add(op, [x], axes=tuple(range(2, len(x.shape))), keepdims=True)


def global_average_pool(ctx: Context) -> Value:
    """ONNX GlobalAveragePool."""
    return _global(REDUCE_MEAN, ctx)


def global_max_pool(ctx: Context) -> Value:
    """ONNX GlobalMaxPool."""
    return _global(REDUCE_MAX, ctx)


def global_lp_pool(ctx: Context) -> Value:
    """ONNX GlobalLpPool."""
    return ctx.add(GLOBAL_LP_POOL, [ctx.value(0)], p=float(ctx.attrs.get("p", 2)))


def max_unpool(ctx: Context) -> Value:
    """ONNX MaxUnpool."""
    x, rank = ctx.value(0), len(ctx.value(0).shape) - 2
    kernel, strides = per_axis(ctx, "kernel_shape", rank), per_axis(ctx, "strides", rank)
    pads = window_pads(ctx, x.shape[2:], kernel, strides, (1,) * rank)
    spatial = [as_dim((as_expr(d) - 1) * s + k - b - a) for d, s, k, (b, a) in zip(x.shape[2:], strides, kernel, pads, strict=True)]
    source = (*x.shape[:2], *spatial)
    shape = ctx.require_dims(2, "the output shape") if ctx.input(2) is not None else source
    return ctx.add(MAX_UNPOOL, [x, ctx.value(1)], shape=tuple(shape), source=source)


# ---------------------------------------------------------------- normalisation


def batch_normalization(ctx: Context) -> Value | tuple[Value, ...]:
    """ONNX BatchNormalization by stored statistics."""
    x, scale, bias, mean, variance = (ctx.value(i) for i in range(5))
    epsilon = float(ctx.attrs.get("epsilon", 1e-5))
    if not ctx.attrs.get("spatial", 1):
        raise ctx.unsupported("spatial=0 (statistics for each activation) is not supported")
    training = bool(ctx.attrs.get("training_mode", 0)) if ctx.opset >= 14 else any(ctx.wants(i) for i in range(1, 5))
    if not training:
        return _normalized(ctx, x, scale, bias, mean, variance, epsilon)
    if ctx.opset < 14:
        raise ctx.unsupported("training outputs are supported from opset 14 on")
    momentum = float(ctx.attrs.get("momentum", 0.9))
    now, spread = ctx.add_several(BATCH_MOMENTS, [x])
    y = _normalized(ctx, x, scale, bias, now, spread, epsilon)
    kept = [ctx.add(RUNNING, [old, new], momentum=momentum) for old, new in ((mean, now), (variance, spread))]
    return y, *kept


def _normalized(ctx: Context, x: Value, scale: Value, bias: Value, mean: Value, variance: Value, epsilon: float) -> Value:
    factor = ctx.add(BATCH_SCALE, [scale, variance], epsilon=epsilon)
    return ctx.add(SCALE_SHIFT, [x, factor, ctx.add(BATCH_SHIFT, [bias, mean, factor])])


def instance_normalization(ctx: Context) -> Value:
    """ONNX InstanceNormalization."""
    epsilon = float(ctx.attrs.get("epsilon", 1e-5))
    return ctx.add(INSTANCE_NORM, [ctx.value(0), ctx.value(1), ctx.value(2)], epsilon=epsilon)


def _axis(ctx: Context) -> int:
    return axis_of(ctx, ctx.attrs.get("axis", -1), len(ctx.value(0).shape))


def layer_normalization(ctx: Context) -> tuple[Value, ...]:
    """ONNX LayerNormalization."""
    attrs = {"axis": _axis(ctx), "epsilon": float(ctx.attrs.get("epsilon", 1e-5))}
    return ctx.add_several(LAYER_NORM, [ctx.value(0), ctx.value(1), ctx.input(2)], **attrs)


def rms_normalization(ctx: Context) -> Value:
    """ONNX RMSNormalization."""
    attrs = {"axis": _axis(ctx), "epsilon": float(ctx.attrs.get("epsilon", 1e-5))}
    return ctx.add(RMS_NORM, [ctx.value(0), ctx.value(1)], **attrs)


def group_normalization(ctx: Context) -> Value:
    """ONNX GroupNormalization."""
    attrs = {"groups": ctx.attrs["num_groups"], "epsilon": float(ctx.attrs.get("epsilon", 1e-5))}
    return ctx.add(GROUP_NORM, [ctx.value(0), ctx.value(1), ctx.value(2)], **attrs)


def lrn(ctx: Context) -> Value:
    """ONNX LRN: local response normalisation across channels."""
    attrs = {name: float(ctx.attrs[name]) for name in ("alpha", "beta", "bias")}
    return ctx.add(LRN, [ctx.value(0)], size=ctx.attrs["size"], **attrs)


def lp_normalization(ctx: Context) -> Value:
    """ONNX LpNormalization."""
    if ctx.attrs.get("p", 2) not in (1, 2):
        raise ctx.invalid(f"attribute `p` is {ctx.attrs['p']}")
    return ctx.add(LP_NORMALIZE, [ctx.value(0)], axis=_axis(ctx), p=ctx.attrs.get("p", 2))


def dropout(ctx: Context) -> Value | tuple[Value, ...]:
    """The identity; a random mask is refused."""
    x = ctx.value(0)
    if ctx.opset >= 12 and ctx.input(2) is not None:
        training = bool(ctx.require_known(2, "training_mode").item())
        ratio = ctx.require_known(1, "the ratio").item() if training and ctx.input(1) is not None else 0.5
        if training and ratio != 0:
            raise ctx.unsupported("training_mode draws a random mask", hint="export the model for inference")
    if not ctx.wants(1):
        return x
    return x, ctx.add(FULL, [], shape=x.shape, value=1, dtype="bool" if ctx.opset >= 10 else x.dtype)


TABLE: dict[str, Versions] = {
    "AveragePool": ((1, average_pool),),
    "BatchNormalization": ((1, batch_normalization),),
    "Conv": ((1, conv),),
    "ConvTranspose": ((1, conv_transpose),),
    "DeformConv": ((19, deform_conv),),
    "Dropout": ((1, dropout),),
    "GlobalAveragePool": ((1, global_average_pool),),
    "GlobalLpPool": ((1, global_lp_pool),),
    "GlobalMaxPool": ((1, global_max_pool),),
    "GroupNormalization": ((18, group_normalization),),
    "InstanceNormalization": ((1, instance_normalization),),
    "LRN": ((1, lrn),),
    "LayerNormalization": ((17, layer_normalization),),
    "LpNormalization": ((1, lp_normalization),),
    "LpPool": ((1, lp_pool),),
    "MaxPool": ((1, max_pool),),
    "MaxUnpool": ((9, max_unpool),),
    "RMSNormalization": ((23, rms_normalization),),
}
