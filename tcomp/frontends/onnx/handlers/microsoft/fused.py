"""What ONNX Runtime's graph optimiser makes of several standard operators: activations with biases, products and convolutions with what
follows them, normalisations of sums, embeddings, and the same in other layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tcomp.frontends.onnx.context import Context, Handler, Table, forward
from tcomp.frontends.onnx.handlers import nn
from tcomp.frontends.onnx.handlers.microsoft.common import applied, cast, channels_last, halves, operand, standard, total, wide, widened
from tcomp.frontends.onnx.handlers.movement import moved, reshaped
from tcomp.ir.graph import Operator, Value
from tcomp.ops import elementwise as ew, reduction as red
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import ARANGE, GATHER

CONV = standard(nn.TABLE, "Conv", 22)
ACTIVATIONS: Mapping[str, tuple[Operator, Mapping[str, Any]]] = {  # by name; with parameters in their order
    "Relu": (ew.RELU, {}), "Tanh": (ew.TANH, {}), "Sigmoid": (ew.SIGMOID, {}), "Elu": (ew.ELU, {"alpha": 1.0}),
    "LeakyRelu": (ew.LEAKY_RELU, {"alpha": 0.01}), "HardSigmoid": (ew.HARD_SIGMOID, {"alpha": 0.2, "beta": 0.5}),
    "Clip": (ew.CLIP_CONST, {"low": None, "high": None}),
    "relu": (ew.RELU, {}), "gelu": (ew.GELU, {"approximate": "tanh"}), "silu": (ew.SWISH, {"alpha": 1.0}),
}  # fmt: skip


def activated(ctx: Context, y: Value, name: str, given: Sequence[float] = ()) -> Value:
    """`y` through an activation, by name and parameters."""
    if name in ("", "identity"):
        return y
    op, parameters = ACTIVATIONS.get(name, (None, {}))
    parameters = {**parameters, **dict(zip(parameters, given, strict=False))}
    if op is None or None in parameters.values():
        raise ctx.unsupported(f"the activation `{name}` with parameters {list(given)} is not known")
    return ctx.add(op, [y], **parameters)


def _fused_matmul(ctx: Context) -> Value:
    """alpha * A' B'. `transBatchA` says that the rows of A stand in front of its batch axes."""

    def factor(i: int) -> Value:
        x = ctx.value(i)
        return moved(ctx, x, 0, -2) if ctx.attrs.get(f"transBatch{'AB'[i]}") and len(x.shape) > 2 else x

    flags = {f"transpose_{n.lower()}": bool(ctx.attrs[f"trans{n}"]) and len(ctx.value(i).shape) > 1 for i, n in enumerate("AB")}
    y, alpha = ctx.add(MATMUL, [factor(0), factor(1)], **flags), ctx.attrs["alpha"]
    return y if alpha == 1.0 else ctx.add(ew.SCALE, [y], factor=alpha)


def _fused_gemm(ctx: Context) -> Value:
    parameters = [ctx.attrs[n] for n in ("activation_alpha", "activation_beta", "activation_gamma") if n in ctx.attrs]
    return activated(ctx, applied(ctx, nn.gemm, ctx.inputs), ctx.attrs.get("activation", ""), parameters)


def _fused_conv(ctx: Context) -> Value:
    """activation(Conv(x, w, bias) + z)."""
    y = total(ctx, applied(ctx, CONV, ctx.inputs[:3]), ctx.input(3))
    return activated(ctx, y, ctx.attrs.get("activation", ""), ctx.attrs.get("activation_params") or ())


def _gelu(approximate: str) -> Handler:
    """Of the sum of the inputs."""
    return widened(lambda ctx: ctx.add(ew.GELU, [total(ctx, *ctx.inputs)], approximate=approximate))


def _bias_split_gelu(ctx: Context) -> Value:
    left, right = halves(ctx, total(ctx, *ctx.inputs))
    return ctx.add(ew.MUL, [left, ctx.add(ew.GELU, [right], approximate="none")])


def _skip_norm(op: Operator, bias: int) -> Handler:
    """`op` of input + skip + bias (the input of that number; its parameters stand before it); that sum is the fourth output."""

    def handler(ctx: Context) -> tuple[Value | None, ...]:
        if ctx.wants(1) or ctx.wants(2):
            raise ctx.unsupported("mean and deviation are outputs of training alone, which ONNX Runtime leaves empty")
        x = total(ctx, ctx.value(0), ctx.value(1), ctx.input(bias))
        return _normalized(ctx, op, x, *(ctx.input(i) for i in range(2, bias))), None, None, x

    return widened(handler)


def _normalized(ctx: Context, op: Operator, x: Value, *parameters: Value | None) -> Value:
    return ctx.add_several(op, [x, *parameters], axis=len(x.shape) - 1, epsilon=ctx.attrs["epsilon"])[0]


def _embed_layer_norm(ctx: Context) -> tuple[Value | None, ...]:
    """(normalised sum of word, position and segment embeddings, number of ones in each row of the mask, the sum)."""
    ids, words, mask = ctx.value(0), ctx.value(2), ctx.input(7)
    places = ctx.input(8) or ctx.add(ARANGE, [], start=0, step=1, count=ids.shape[1], dtype="int32")
    tables = (words, ids), (ctx.value(3), places), (ctx.input(4), ctx.input(1))
    x = total(ctx, *(wide(ctx, ctx.add(GATHER, [t, n], axis=0)) for t, n in tables if t is not None and n is not None))
    if mask is None:
        count = ctx.add(ew.FULL, [], shape=ids.shape[:1], value=0, dtype="int32")
    else:
        ones = cast(ctx, ctx.add(ew.EQUAL, [mask, ctx.constant(1, "int32")]), "int32")
        count = ctx.add(red.REDUCE_SUM, [ones], axes=(1,), keepdims=False)
    y = _normalized(ctx, red.LAYER_NORM, x, *(wide(ctx, ctx.value(i)) for i in (5, 6)))
    return cast(ctx, y, words.dtype), count, cast(ctx, x, words.dtype)


def _quantized_embed_layer_norm(ctx: Context) -> tuple[Value | None, ...]:
    values = [ctx.input(i) and operand(ctx, i, 6, 11) for i in range(2, 7)]
    return _embed_layer_norm(replace(ctx, inputs=(*ctx.inputs[:2], *values, ctx.input(7))))[:2]


def _group_norm(ctx: Context) -> Value:
    """Of images, then SiLU if `activation` is 1."""
    if len(ctx.value(0).shape) != 4 or (activation := ctx.attrs["activation"]) not in (0, 1):
        why = (
            f"rank {len(ctx.value(0).shape)} and activation {ctx.attrs['activation']}: images, and no activation (0) or SiLU (1) are known"
        )
        raise ctx.unsupported(why)
    y = ctx.add(red.GROUP_NORM, ctx.inputs, groups=ctx.attrs["groups"], epsilon=ctx.attrs["epsilon"])
    return ctx.add(ew.SWISH, [y], alpha=1.0) if activation else y


def _skip_group_norm(ctx: Context) -> tuple[Value, ...]:
    """Of x + skip + bias; that sum is the second output. The skip may be one vector for each image."""
    skip = ctx.value(3)
    if not ctx.attrs["channels_last"]:
        raise ctx.unsupported("a sum is normalised with channels last")
    skip = reshaped(ctx, skip, (skip.shape[0], 1, 1, skip.shape[1])) if len(skip.shape) == 2 else skip
    x = total(ctx, ctx.value(0), skip, ctx.input(4))
    return applied(ctx, channels_last(_group_norm, 0), [x, *ctx.inputs[1:3]]), x


def swiglu(ctx: Context, gate: Value, linear: Value, alpha: float, beta: float, limit: float | None) -> Value:
    """g * sigmoid(alpha * g) * (l + beta), g at most `limit`, l within it on both sides."""
    if limit is not None:
        gate, linear = ctx.add(ew.CLIP_CONST, [gate], low=None, high=limit), ctx.add(ew.CLIP_CONST, [linear], low=-limit, high=limit)
    linear = linear if beta == 0 else ctx.add(ew.ADD, [linear, ctx.constant(beta, linear.dtype)])
    return ctx.add(ew.MUL, [ctx.add(ew.SWISH, [gate], alpha=float(alpha)), linear])


TABLE: Table = {
    "BiasAdd": widened(lambda ctx: total(ctx, *ctx.inputs)),
    "BiasGelu": _gelu("none"), "FastGelu": _gelu("tanh"), "BiasSplitGelu": widened(_bias_split_gelu),
    "Gelu": forward(ew.GELU, approximate=lambda ctx: "none"), "QuickGelu": forward(ew.SWISH, "alpha"),
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul"), _fused_matmul), "FusedGemm": _fused_gemm, 
    "GemmFastGelu": widened(lambda ctx: applied(ctx, _gelu("tanh"), [ctx.add(MATMUL, ctx.inputs[:2]), *ctx.inputs[2:]])),
    "FusedConv": _fused_conv, "NhwcConv": channels_last(CONV, 0, 1), "NhwcMaxPool": channels_last(nn.max_pool, 0),
    "SkipLayerNormalization": _skip_norm(red.LAYER_NORM, 4), "SkipSimplifiedLayerNormalization": _skip_norm(red.RMS_NORM, 3),
    "EmbedLayerNormalization": _embed_layer_norm, "QEmbedLayerNormalization": _quantized_embed_layer_norm,
    "GroupNorm": widened(channels_last(_group_norm, 0)), "SkipGroupNorm": widened(_skip_group_norm),
}  # fmt: skip
