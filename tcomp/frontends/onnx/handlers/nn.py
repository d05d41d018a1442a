"""ONNX operators: convolution, matrix products, pooling, normalisation, dropout, and the same on quantised tensors (summed in int32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tcomp.frontends.onnx.context import Context, Table, axis_of, forward
from tcomp.frontends.onnx.handlers import movement
from tcomp.frontends.onnx.handlers.runtime_axes import sized
from tcomp.ir.dtypes import NARROW_FLOATS, is_float, lowest
from tcomp.ir.expr import Dim, Expr, as_expr, equal, maximum, minimum
from tcomp.ir.graph import Operator, Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import nn, reduction as ops
from tcomp.ops.elementwise import ADD, CAST, MUL, RECIPROCAL, SCALE, SQRT
from tcomp.ops.matmul import DET, EINSUM, MATMUL
from tcomp.ops.quantization import CENTRED, DEQUANTIZE, DYNAMIC_RANGE, QUANTIZE, REQUANTIZE

Pads = list[tuple[Dim, Dim]]  # (before, after) for each spatial axis


def per_axis(ctx: Context, name: str, rank: int) -> tuple[int, ...]:
    """An attribute with one positive integer for each spatial axis."""
    given = ctx.attrs.get(name) or [1] * rank
    if len(given) != rank or any(v < 1 for v in given):
        raise ctx.invalid(f"attribute `{name}` is {given}; the operator has {rank} spatial axes")
    return tuple(given)


def window_pads(ctx: Context, extents: Sequence[Dim], kernel: Sequence[Dim], strides: Sequence[int], dilations: Sequence[int]) -> Pads:
    """Padding of each spatial axis, from `pads` or `auto_pad`."""
    auto, rank = ctx.attrs.get("auto_pad") or "NOTSET", len(extents)
    if auto in ("VALID", "NOTSET"):
        pads = (ctx.attrs.get("pads") if auto == "NOTSET" else None) or [0] * (2 * rank)
        if len(pads) != 2 * rank:
            raise ctx.invalid(f"attribute `pads` is {pads}; the operator has {rank} spatial axes")
        return list(zip(pads[:rank], pads[rank:], strict=True))
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        raise ctx.invalid(f"attribute `auto_pad` is {auto}")
    result: Pads = []
    for extent, k, s, r in zip(extents, kernel, strides, dilations, strict=True):
        total = maximum((-((-as_expr(extent)) // s) - 1) * s + (as_expr(k) - 1) * r + 1 - extent, 0)
        pair = as_dim(total // 2), as_dim(total - total // 2)
        result.append(pair if auto == "SAME_UPPER" else pair[::-1])
    return result


def padded(ctx: Context, x: Value, pads: Pads, value: Value | None = None) -> Value:
    """`x` with its spatial axes padded by zeros (or `value`); `x` itself where there is nothing to do."""
    before, after = zip(*pads, strict=True)
    return movement.padded(ctx, x, (0, 0, *before), (0, 0, *after), filling=value)


def convolution(ctx: Context, x: Value, w: Value) -> Value:
    """Padding and convolution by the attributes of Conv; `x` and `w` have one dtype, zero is the neutral element."""
    strides, dilations = _steps(ctx, x, w)
    pads = window_pads(ctx, x.shape[2:], w.shape[2:], strides, dilations)
    return ctx.add(nn.CONV, [padded(ctx, x, pads), w], strides=strides, dilations=dilations, group=ctx.attrs["group"])


def _steps(ctx: Context, x: Value, w: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(strides, dilations) of a convolution, whose weights have to have the sizes that `kernel_shape` says, and channels in groups."""
    if len(x.shape) < 3 or len(w.shape) != len(x.shape):
        raise ctx.invalid(f"the input has {len(x.shape)} dimensions, the weights have {len(w.shape)}")
    kernel = ctx.attrs.get("kernel_shape") or w.shape[2:]
    if not ctx.can_be(w.shape[2:], kernel):
        raise ctx.invalid(f"attribute `kernel_shape` is {list(kernel)}, the weights have {list(map(str, w.shape[2:]))}")
    if isinstance(channels := w.shape[0], Expr):
        ctx.require(equal(channels % ctx.attrs["group"], 0))
    return per_axis(ctx, "strides", len(x.shape) - 2), per_axis(ctx, "dilations", len(x.shape) - 2)


def biased(ctx: Context, y: Value, bias: Value | None) -> Value:
    """y + bias[channel], or y where there is no bias."""
    return y if bias is None else ctx.add(nn.ADD_CHANNELS, [y, bias])


def _conv_transpose(ctx: Context) -> Value:
    """Shape and padding by the equations of the operator's specification."""
    x, w, rank = ctx.value(0), ctx.value(1), len(ctx.value(0).shape) - 2
    strides, dilations = _steps(ctx, x, w)
    extra, pads = ctx.attrs.get("output_padding") or [0] * rank, ctx.attrs.get("pads") or [0] * (2 * rank)
    wanted, auto = ctx.attrs.get("output_shape"), ctx.attrs["auto_pad"]
    if len(extra) != rank or len(pads) != 2 * rank or (wanted and len(wanted) not in (rank, rank + 2)):
        raise ctx.invalid("`pads`, `output_padding` or `output_shape` do not fit the number of spatial axes")
    before, shape = list[Dim](), list[Dim]()
    for n, (extent, kernel) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True)):
        full = (as_expr(extent) - 1) * strides[n] + extra[n] + (as_expr(kernel) - 1) * dilations[n] + 1
        if wanted or auto in ("SAME_UPPER", "SAME_LOWER"):
            size: Expr = as_expr(wanted[n - rank]) if wanted else as_expr(extent) * strides[n]
            total = maximum(full - size, 0)  # what is missing is added at the end
            larger = auto == "SAME_LOWER" or (wanted and auto != "SAME_UPPER")  # half goes to the front
            before.append(as_dim(total - total // 2 if larger else total // 2))
        else:
            begin, end = (0, 0) if auto == "VALID" else (pads[n], pads[n + rank])
            size = full - begin - end
            before.append(begin)
        shape.append(as_dim(size))
    attrs = {"strides": strides, "dilations": dilations, "group": ctx.attrs["group"], "before": tuple(before), "shape": tuple(shape)}
    return biased(ctx, ctx.add(nn.CONV_TRANSPOSE, [x, w], **attrs), ctx.input(2))


def _deform_conv(ctx: Context) -> Value:
    if len(ctx.value(0).shape) != 4:
        raise ctx.unsupported("deformable convolution is supported for two spatial axes")
    attrs = {name: ctx.attrs[name] for name in ("group", "offset_group")} | {n: per_axis(ctx, n, 2) for n in ("strides", "dilations")}
    before, inputs = tuple((ctx.attrs.get("pads") or [0] * 4)[:2]), [ctx.value(0), ctx.value(1), ctx.value(2), ctx.input(4)]
    return biased(ctx, ctx.add(nn.DEFORM_CONV, inputs, **attrs, before=before), ctx.input(3))


def _windows(ctx: Context) -> tuple[dict[str, Any], Pads, Pads]:
    """(attributes of a pooling operator, padding as the node gives it, padding that covers windows which `ceil_mode` lets exceed the
    end)."""
    x = ctx.value(0)
    if (rank := len(x.shape) - 2) < 1:
        raise ctx.invalid(f"the input has {len(x.shape)} dimensions")
    kernel, strides, dilations = (per_axis(ctx, name, rank) for name in ("kernel_shape", "strides", "dilations"))
    given = window_pads(ctx, x.shape[2:], kernel, strides, dilations)
    pads = list(given)
    if ctx.attrs.get("ceil_mode", 0) and ctx.attrs["auto_pad"] in ("NOTSET", "VALID"):
        for n, (extent, (begin, end), k, s, r) in enumerate(zip(x.shape[2:], given, kernel, strides, dilations, strict=True)):
            reach, whole = (k - 1) * r + 1, as_expr(extent) + begin
            windows = minimum(-((reach - whole - end) // s) + 1, -((-whole) // s))  # none may start in the padding at the end
            pads[n] = (begin, as_dim((windows - 1) * s + reach - whole))
    return {"kernel": kernel, "strides": strides, "dilations": dilations}, given, pads


def max_pool(ctx: Context) -> Value | tuple[Value, ...]:
    """The largest element of each window, and where it stands if that is wanted."""
    x = ctx.value(0)
    attrs, _, pads = _windows(ctx)
    source = padded(ctx, x, pads, ctx.constant(lowest(x.dtype), x.dtype))
    y = ctx.add(nn.MAX_POOL, [source], **attrs)
    if not ctx.wants(1):
        return y
    attrs |= {"before": tuple(b for b, _ in pads), "shape": x.shape, "column_major": bool(ctx.attrs.get("storage_order", 0))}
    return y, ctx.add(nn.MAX_POOL_INDICES, [source], **attrs)


def average_pool(ctx: Context) -> Value:
    """The mean of each window."""
    x, with_pads = ctx.value(0), ctx.attrs.get("count_include_pad", 0)
    attrs, given, pads = _windows(ctx)
    counted: list[tuple[Dim, Dim] | None] = []
    for extent, own, pair in zip(x.shape[2:], given, pads, strict=True):
        begin, end = (0, as_expr(extent) + own[0] + own[1]) if with_pads else (pair[0], as_expr(extent) + pair[0])
        counted.append(None if pair == (0, 0) or (with_pads and pair == own) else (begin, as_dim(end)))
    return ctx.add(nn.AVERAGE_POOL, [padded(ctx, x, pads)], **attrs, counted=tuple(counted))


def _lp_pool(ctx: Context) -> Value:
    attrs, _, pads = _windows(ctx)
    return ctx.add(nn.LP_POOL, [padded(ctx, ctx.value(0), pads)], **attrs, p=float(ctx.attrs["p"]))


def _global(ctx: Context, op: Operator) -> Value:
    axes = tuple(range(2, len(ctx.value(0).shape)))
    return ctx.add(op, ctx.inputs, axes=axes, keepdims=True) if axes else ctx.value(0)


def _max_unpool(ctx: Context) -> Value:
    x, rank = ctx.value(0), len(ctx.value(0).shape) - 2
    kernel, strides = per_axis(ctx, "kernel_shape", rank), per_axis(ctx, "strides", rank)
    pads = window_pads(ctx, x.shape[2:], kernel, strides, (1,) * rank)
    spatial = [as_dim((as_expr(d) - 1) * s + k - b - a) for d, s, k, (b, a) in zip(x.shape[2:], strides, kernel, pads, strict=True)]
    source = (*x.shape[:2], *spatial)
    shape = source if ctx.input(2) is None else sized(ctx, ctx.given_dims(2, "the output shape"), "the result")
    return ctx.add(nn.MAX_UNPOOL, [x, ctx.value(1)], shape=shape, source=source)


def _batch_normalization(ctx: Context) -> Value | tuple[Value, ...]:
    """By stored statistics, or (`training_mode`) by those of the batch."""
    x, scale, bias, mean, variance = (ctx.value(i) for i in range(5))
    if not ctx.attrs.get("spatial", 1):
        raise ctx.unsupported("spatial=0 (statistics for each activation) is not supported")

    def normalized(mean: Value, variance: Value) -> Value:
        factor = ctx.add(ops.BATCH_SCALE, [scale, variance], epsilon=float(ctx.attrs["epsilon"]))
        return ctx.add(ops.SCALE_SHIFT, [x, factor, ctx.add(ops.BATCH_SHIFT, [bias, mean, factor])])

    if not (ctx.attrs["training_mode"] if ctx.opset >= 14 else any(ctx.wants(i) for i in range(1, 5))):
        return normalized(mean, variance)
    if ctx.opset < 14:
        raise ctx.unsupported("training outputs are supported from opset 14 on")
    moments = ctx.add_several(ops.BATCH_MOMENTS, [x])
    y, momentum = normalized(*moments), float(ctx.attrs["momentum"])
    return y, *(ctx.add(ops.RUNNING, [old, new], momentum=momentum) for old, new in zip((mean, variance), moments, strict=True))


def _simplified_layer_norm(ctx: Context) -> tuple[Value, ...]:
    """ONNX Runtime's RMS normalisation in the standard domain: (y, 1 / root of the mean square)."""
    x, axis, epsilon = ctx.value(0), ctx.axis(ctx.attrs["axis"]), float(ctx.attrs["epsilon"])
    y = ctx.add(ops.RMS_NORM, [x, ctx.value(1)], axis=axis, epsilon=epsilon)
    if not ctx.wants(1):
        return (y,)
    wide = ctx.add(CAST, [x], dtype="float64" if x.dtype == "float64" else "float32")
    mean = ctx.add(ops.REDUCE_MEAN, [ctx.add(MUL, [wide, wide])], axes=tuple(range(axis, len(x.shape))), keepdims=True)
    return y, ctx.add(RECIPROCAL, [ctx.add(SQRT, [ctx.add(ADD, [mean, ctx.constant(epsilon, mean.dtype)])])])


def _lp_normalization(ctx: Context) -> Value:
    if (p := ctx.attrs["p"]) not in (1, 2):
        raise ctx.invalid(f"attribute `p` is {p}; ONNX has 1 and 2")
    return ctx.add(ops.LP_NORMALIZE, [ctx.value(0)], axis=ctx.axis(ctx.attrs["axis"]), p=p)


def gemm(ctx: Context) -> Value:
    """alpha * A' B' + beta * C; scaling and bias are nodes of their own, which fuse with what follows."""

    def scaled(x: Value, factor: float) -> Value:
        return x if factor == 1.0 else ctx.add(SCALE, [x], factor=factor)

    a, b, c, beta = ctx.value(0), ctx.value(1), ctx.input(2), ctx.attrs["beta"]
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ctx.invalid("A and B must be matrices")
    transposed = {"transpose_a": bool(ctx.attrs["transA"]), "transpose_b": bool(ctx.attrs["transB"])}
    y = scaled(ctx.add(MATMUL, [a, b], **transposed), ctx.attrs["alpha"])
    return y if c is None or beta == 0.0 else ctx.add(ADD, [y, scaled(c, beta)])


def _axis_block(ctx: Context) -> dict[str, int]:
    axis = ctx.attrs.get("axis", 1)
    return {"axis": axis + len(ctx.value(0).shape) if axis < 0 else axis, "block": ctx.attrs.get("block_size", 0)}


def _unfolded(ctx: Context, op: Operator, inputs: list[Value | None], **attrs: Any) -> Value:
    """A node, even where it could be computed now: passes want the integers behind small weights, not the numbers."""
    if inputs[0] is None or len(inputs[0].shape) < 2:
        return ctx.add(op, inputs, **attrs)
    return ctx.scope.builder.add(op, inputs, attrs, ctx.name)[0]


def _quantize_linear(ctx: Context) -> Value:
    x, scale, zero = ctx.value(0), ctx.value(1), ctx.input(2)
    dtype = zero.dtype if zero is not None else ctx.dtype("output_dtype", "uint8")
    if is_float(dtype):
        raise ctx.unsupported(f"quantisation to {dtype} is not supported")
    precision = ctx.dtype("precision", scale.dtype if is_float(x.dtype) and is_float(scale.dtype) else "float32")
    attrs = {} if ctx.attrs.get("saturate", 1) or dtype not in NARROW_FLOATS else {"saturate": False}
    return ctx.add(QUANTIZE, [x, scale, zero], **_axis_block(ctx), dtype=dtype, precision=precision, **attrs)


def _dequantize_linear(ctx: Context) -> Value:
    inputs, dtype = [ctx.value(0), ctx.value(1), ctx.input(2)], ctx.dtype("output_dtype", ctx.value(1).dtype)
    if not is_float(dtype):
        raise ctx.invalid(f"its result would be {dtype}")
    return _unfolded(ctx, DEQUANTIZE, inputs, **_axis_block(ctx), dtype=dtype)


def _dynamic_quantize_linear(ctx: Context) -> tuple[Value, ...]:
    scale, zero = ctx.add_several(DYNAMIC_RANGE, [ctx.value(0)])
    y = ctx.add(QUANTIZE, [ctx.value(0), scale, zero], axis=0, block=0, dtype="uint8", precision="float32")
    return y, scale, zero


def _centred(ctx: Context, x: int, zero: int, axis: int) -> Value:
    return _unfolded(ctx, CENTRED, [ctx.value(x), ctx.input(zero)], axis=axis)


def q_linear_conv(ctx: Context) -> Value:
    """The convolution of quantised images, quantised."""
    y = biased(ctx, convolution(ctx, _centred(ctx, 0, 2, 1), _centred(ctx, 3, 5, 0)), ctx.input(8))
    return ctx.add(REQUANTIZE, [y, ctx.value(1), ctx.value(4), ctx.value(6), ctx.value(7)], axis=1)


def product(ctx: Context, a: tuple[int, int], b: tuple[int, int]) -> Value:
    """The int32 product; zero points of `a` are per row, those of `b` per column."""
    rows, columns = len(ctx.value(a[0]).shape) - 2, len(ctx.value(b[0]).shape) - 1
    return ctx.add(MATMUL, [_centred(ctx, *a, max(rows, 0)), _centred(ctx, *b, columns)])


def _q_linear_mat_mul(ctx: Context) -> Value:
    y, scale = product(ctx, (0, 2), (3, 5)), ctx.value(1)
    if len(scale.shape) == 1 and scale.shape[0] != 1:
        raise ctx.unsupported("a scale for each row of the first factor is not supported")
    return ctx.add(REQUANTIZE, [y, scale, ctx.value(4), ctx.value(6), ctx.value(7)], axis=len(y.shape) - 1)


def _group_normalization(ctx: Context) -> Value:
    groups = ctx.attrs["num_groups"]
    if isinstance(channels := ctx.value(0).shape[1], Expr):
        ctx.require(equal(channels % groups, 0))
    return ctx.add(ops.GROUP_NORM, [ctx.value(n) for n in range(3)], groups=groups, epsilon=ctx.attrs["epsilon"])


TABLE: Table = {
    "Conv": lambda ctx: biased(ctx, convolution(ctx, ctx.value(0), ctx.value(1)), ctx.input(2)),
    "ConvTranspose": _conv_transpose, "DeformConv": _deform_conv,
    "MatMul": forward(MATMUL), "Gemm": gemm, "Einsum": forward(EINSUM, "equation"), "Det": forward(DET),
    "AveragePool": average_pool, "MaxPool": max_pool, "LpPool": _lp_pool, "MaxUnpool": _max_unpool,
    "GlobalAveragePool": lambda ctx: _global(ctx, ops.REDUCE_MEAN), "GlobalMaxPool": lambda ctx: _global(ctx, ops.REDUCE_MAX),
    "GlobalLpPool": forward(nn.GLOBAL_LP_POOL, p=lambda ctx: float(ctx.attrs["p"])),
    "BatchNormalization": _batch_normalization, "LpNormalization": _lp_normalization,
    "GroupNormalization": _group_normalization,
    "InstanceNormalization": forward(ops.INSTANCE_NORM, "epsilon"), "LRN": forward(ops.LRN, "size", "alpha", "beta", "bias"),
    "LayerNormalization": forward(ops.LAYER_NORM, "epsilon", inputs=3, axis=axis_of()),
    "SimplifiedLayerNormalization": _simplified_layer_norm,
    "RMSNormalization": forward(ops.RMS_NORM, "epsilon", axis=axis_of()),
    "ConvInteger": lambda ctx: convolution(ctx, _centred(ctx, 0, 2, 1), _centred(ctx, 1, 3, 0)),
    "DequantizeLinear": _dequantize_linear, "DynamicQuantizeLinear": _dynamic_quantize_linear,
    "MatMulInteger": lambda ctx: product(ctx, (0, 2), (1, 3)), "QLinearConv": q_linear_conv, "QLinearMatMul": _q_linear_mat_mul,
    "QuantizeLinear": _quantize_linear,
}  # fmt: skip
