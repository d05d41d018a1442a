"""What ONNX Runtime's graph optimiser makes of several standard operators: activations with biases, products and convolutions with what
follows them, normalisations of sums, embeddings, and the same in other layouts."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.frontends.onnx.context import Context, Table, forward
from tcomp.frontends.onnx.handlers import nn
from tcomp.frontends.onnx.handlers.microsoft.common import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    applied,
    cast,
    dequantized,
    halves,
    total,
    transposed,
    wide,
    with_bias,
)
from tcomp.frontends.onnx.handlers.movement import reshaped
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew, reduction as red
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import ARANGE, GATHER, TRANSPOSE


def scaled(ctx: Context, x: Value, factor: float) -> Value:
    """`x` times a number."""
    return x if factor == 1.0 else ctx.add(ew.SCALE, [x], factor=float(factor))


def activated(ctx: Context, y: Value, parameters: Sequence[float]) -> Value:
    """`y` through the attribute `activation`, where there is one."""
    alpha, beta = ([*parameters, None, None])[:2]
    match ctx.attrs.get("activation") or "":
        case "":
            return y
        case "Relu":
            return ctx.add(ew.RELU, [y])
        case "Tanh":
            return ctx.add(ew.TANH, [y])
        case "Sigmoid":
            return ctx.add(ew.SIGMOID, [y])
        case "Elu":
            return ctx.add(ew.ELU, [y], alpha=1.0 if alpha is None else alpha)
        case "LeakyRelu":
            return ctx.add(ew.LEAKY_RELU, [y], alpha=0.01 if alpha is None else alpha)
        case "HardSigmoid":
            return ctx.add(ew.HARD_SIGMOID, [y], alpha=0.2 if alpha is None else alpha, beta=0.5 if beta is None else beta)
        case "Clip" if alpha is not None and beta is not None:
            return ctx.add(ew.CLIP_CONST, [y], low=alpha, high=beta)
    raise ctx.unsupported(f"the activation `{ctx.attrs['activation']}` with parameters {list(parameters)} is not known")


def _fused_matmul(ctx: Context) -> Value:
    """alpha * A' B'. `transBatchA` says that the rows of A stand in front of its batch axes."""

    def operand(i: int) -> Value:
        x, rank = ctx.value(i), len(ctx.value(i).shape)
        if not ctx.attrs.get(f"transBatch{'AB'[i]}"):
            return x
        return ctx.add(TRANSPOSE, [x], perm=(*range(1, rank - 1), 0, rank - 1)) if rank > 2 else x

    flags = {f"transpose_{n.lower()}": bool(ctx.attrs[f"trans{n}"]) and len(ctx.value(i).shape) > 1 for i, n in enumerate("AB")}
    return scaled(ctx, ctx.add(MATMUL, [operand(0), operand(1)], **flags), ctx.attrs["alpha"])


def _fused_gemm(ctx: Context) -> Value:
    parameters = [ctx.attrs[n] for n in ("activation_alpha", "activation_beta", "activation_gamma") if n in ctx.attrs]
    return activated(ctx, applied(ctx, nn.gemm, ctx.inputs), parameters)


def _fused_conv(ctx: Context) -> Value:
    """activation(Conv(x, w, bias) + z)."""
    y = nn.biased(ctx, nn.convolution(ctx, ctx.value(0), ctx.value(1)), ctx.input(2))
    return activated(ctx, total(ctx, y, ctx.input(3)), ctx.attrs.get("activation_params") or [])


def _nhwc_conv(ctx: Context) -> Value:
    """Conv with channels last, in the weights [out, kernel..., in] as well."""
    x, w = (transposed(ctx, ctx.value(i), CHANNELS_FIRST) for i in range(2))
    return transposed(ctx, nn.biased(ctx, nn.convolution(ctx, x, w), ctx.input(2)), CHANNELS_LAST)


def _nhwc_max_pool(ctx: Context) -> Value:
    x = transposed(ctx, ctx.value(0), CHANNELS_FIRST)
    return transposed(ctx, applied(ctx, nn.max_pool, [x]), CHANNELS_LAST)


def _gemm_fast_gelu(ctx: Context) -> Value:
    y = ctx.add(MATMUL, [wide(ctx, ctx.value(0)), wide(ctx, ctx.value(1))])
    bias = ctx.input(2)
    return cast(ctx, ctx.add(ew.GELU, [total(ctx, y, bias and wide(ctx, bias))], approximate="tanh"), ctx.value(0).dtype)


def _summed(ctx: Context, *positions: int) -> Value:
    """The sum of the inputs at these positions, in at least float32; a vector of channels broadcasts."""
    return total(ctx, *(wide(ctx, v) for i in positions if (v := ctx.input(i)) is not None))


def _layer_norm(ctx: Context, x: Value, gamma: Value, beta: Value | None, dtype: str) -> Value:
    inputs = [x, wide(ctx, gamma), None if beta is None else wide(ctx, beta)]
    y, _, _ = ctx.add_several(red.LAYER_NORM, inputs, axis=len(x.shape) - 1, epsilon=ctx.attrs["epsilon"])
    return cast(ctx, y, dtype)


def _refuse_statistics(ctx: Context) -> None:
    if ctx.wants(1) or ctx.wants(2):
        raise ctx.unsupported("mean and deviation are outputs of training alone, which ONNX Runtime leaves empty")


def _skip_layer_norm(ctx: Context) -> tuple[Value | None, ...]:
    """Layer normalisation of input + skip + bias; that sum is the fourth output."""
    _refuse_statistics(ctx)
    x, dtype = _summed(ctx, 0, 1, 4), ctx.value(0).dtype
    return _layer_norm(ctx, x, ctx.value(2), ctx.input(3), dtype), None, None, cast(ctx, x, dtype)


def _skip_rms_norm(ctx: Context) -> tuple[Value | None, ...]:
    _refuse_statistics(ctx)
    x, dtype = _summed(ctx, 0, 1, 3), ctx.value(0).dtype
    y = ctx.add(red.RMS_NORM, [x, wide(ctx, ctx.value(2))], axis=len(x.shape) - 1, epsilon=ctx.attrs["epsilon"])
    return cast(ctx, y, dtype), None, None, cast(ctx, x, dtype)


def _embedded(
    ctx: Context, tables: Sequence[Value | None], gamma: Value, beta: Value, mask: Value | None, places: Value | None
) -> tuple[Value | None, ...]:
    """(normalised sum of word, position and segment embeddings, number of ones in each row of the mask, the sum)."""
    ids, segments = ctx.value(0), ctx.input(1)
    words, positions, table = tables
    assert words is not None and positions is not None
    if places is None:
        places = ctx.add(ARANGE, [], start=0, step=1, count=ids.shape[1], dtype="int32")
    rows = [ctx.add(GATHER, [words, ids], axis=0), ctx.add(GATHER, [positions, places], axis=0)]
    if segments is not None and table is not None:
        rows.append(ctx.add(GATHER, [table, segments], axis=0))
    x = total(ctx, *(wide(ctx, r) for r in rows))
    if mask is None:
        count = ctx.add(ew.FULL, [], shape=ids.shape[:1], value=0, dtype="int32")
    else:
        ones = cast(ctx, ctx.add(ew.EQUAL, [mask, ctx.constant(1, "int32")]), "int32")
        count = ctx.add(red.REDUCE_SUM, [ones], axes=(1,), keepdims=False)
    return _layer_norm(ctx, x, gamma, beta, words.dtype), count, cast(ctx, x, words.dtype)


def _embed_layer_norm(ctx: Context) -> tuple[Value | None, ...]:
    return _embedded(ctx, [ctx.input(i) for i in (2, 3, 4)], ctx.value(5), ctx.value(6), ctx.input(7), ctx.input(8))


def _quantized_embed_layer_norm(ctx: Context) -> tuple[Value | None, ...]:
    values = [None if ctx.input(i) is None else dequantized(ctx, ctx.value(i), ctx.value(i + 6), ctx.input(i + 11)) for i in range(2, 7)]
    *tables, gamma, beta = values
    assert gamma is not None and beta is not None
    return _embedded(ctx, tables, gamma, beta, ctx.input(7), None)[:2]


def _group_norm(ctx: Context) -> tuple[Value, ...]:
    """Group normalisation of x (+ skip + bias), then SiLU if `activation` is 1; the sum is the second output. Channels are last by default;
    skip may be one vector for each image."""
    x, last, dtype = wide(ctx, ctx.value(0)), ctx.attrs["channels_last"], ctx.value(0).dtype
    if len(x.shape) != 4 or ctx.attrs["activation"] not in (0, 1):
        why = f"rank {len(x.shape)} and activation {ctx.attrs['activation']}: images, and no activation (0) or SiLU (1) are known"
        raise ctx.unsupported(why)
    if ctx.op_type == "SkipGroupNorm":
        if not last:
            raise ctx.unsupported("a sum is normalised with channels last")
        skip = wide(ctx, ctx.value(3))
        skip = reshaped(ctx, skip, (skip.shape[0], 1, 1, skip.shape[1])) if len(skip.shape) == 2 else skip
        x = total(ctx, x, skip, None if ctx.input(4) is None else wide(ctx, ctx.value(4)))
    images = transposed(ctx, x, CHANNELS_FIRST) if last else x
    inputs = [images, *(cast(ctx, ctx.value(i), images.dtype) for i in (1, 2))]
    y = ctx.add(red.GROUP_NORM, inputs, groups=ctx.attrs["groups"], epsilon=ctx.attrs["epsilon"])
    y = ctx.add(ew.SWISH, [y], alpha=1.0) if ctx.attrs["activation"] else y
    return cast(ctx, transposed(ctx, y, CHANNELS_LAST) if last else y, dtype), cast(ctx, x, dtype)


def _bias_split_gelu(ctx: Context) -> Value:
    left, right = halves(ctx, _summed(ctx, 0, 1))
    return cast(ctx, ctx.add(ew.MUL, [left, ctx.add(ew.GELU, [right], approximate="none")]), ctx.value(0).dtype)


def swiglu(ctx: Context, gate: Value, linear: Value, alpha: float, beta: float, limit: float | None) -> Value:
    """g * sigmoid(alpha * g) * (l + beta), g at most `limit`, l within it on both sides."""
    if limit is not None:
        gate, linear = ctx.add(ew.CLIP_CONST, [gate], low=None, high=limit), ctx.add(ew.CLIP_CONST, [linear], low=-limit, high=limit)
    linear = linear if beta == 0 else ctx.add(ew.ADD, [linear, ctx.constant(beta, linear.dtype)])
    return ctx.add(ew.MUL, [ctx.add(ew.SWISH, [gate], alpha=float(alpha)), linear])


TABLE: Table = {
    "BiasAdd": lambda ctx: cast(ctx, _summed(ctx, 0, 1, 2), ctx.value(0).dtype),
    "BiasGelu": with_bias(ew.GELU, approximate="none"), "FastGelu": with_bias(ew.GELU, approximate="tanh"),
    "BiasSplitGelu": _bias_split_gelu,
    "Gelu": forward(ew.GELU, approximate=lambda ctx: "none"), "QuickGelu": forward(ew.SWISH, "alpha"),
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul"), _fused_matmul), "FusedGemm": _fused_gemm, "GemmFastGelu": _gemm_fast_gelu,
    "FusedConv": _fused_conv, "NhwcConv": _nhwc_conv, "NhwcMaxPool": _nhwc_max_pool,
    "SkipLayerNormalization": _skip_layer_norm, "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "EmbedLayerNormalization": _embed_layer_norm, "QEmbedLayerNormalization": _quantized_embed_layer_norm,
    **dict.fromkeys(("GroupNorm", "SkipGroupNorm"), _group_norm),
}  # fmt: skip
