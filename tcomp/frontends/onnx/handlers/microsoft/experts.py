"""Mixtures of experts: each row of the input goes through the feed-forward networks of its best experts, chosen by the router's scores."""

from __future__ import annotations

from collections.abc import Callable

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.microsoft.common import halves, known
from tcomp.frontends.onnx.handlers.microsoft.fused import activated, swiglu
from tcomp.frontends.onnx.handlers.microsoft.quantized import unpacked, zero_points
from tcomp.frontends.onnx.handlers.movement import reshaped
from tcomp.ir.graph import Value
from tcomp.ops import elementwise as ew, reduction as red
from tcomp.ops.movement import GATHER, GATHER_ELEMENTS, TOP_K, product
from tcomp.ops.nn import EXPERT_DENSE
from tcomp.ops.quantization import BLOCK_PRODUCT

Layer = Callable[[Value, Value], Value]  # of all experts: (rows [rows, slots or 1, in], experts [rows, slots]) -> [rows, slots, out]


def _routed(ctx: Context, router: Value, mixing: Value | None) -> tuple[Value, Value]:
    """(experts, their weights) of each row, [rows, k]. The weights are those of a softmax over all experts, or over the chosen ones if they
    are to be normalised; or columns of `mixing`."""
    k, count = ctx.attrs["k"], known(ctx, router.shape[1], "the scores of the router")
    if not 1 <= k <= count:
        raise ctx.invalid(f"{k} of {count} experts are wanted")
    best, choice = ctx.add_several(TOP_K, [router], k=k, axis=1, largest=True)
    if mixing is None and ctx.attrs["normalize_routing_weights"] == 1:
        return choice, ctx.add(red.SOFTMAX, [best], axes=(1,))
    shares = ctx.add(GATHER_ELEMENTS, [mixing or ctx.add(red.SOFTMAX, [router], axes=(1,)), choice], axis=1)
    if ctx.attrs["normalize_routing_weights"] == 1:
        shares = ctx.add(ew.DIV, [shares, ctx.add(red.REDUCE_SUM, [shares], axes=(1,), keepdims=True)])
    return choice, shares


def _activated(ctx: Context, first: Value, third: Value | None) -> Value:
    name, fusion = ctx.attrs["activation_type"], ctx.attrs["swiglu_fusion"]
    if name == "swiglu":
        gate, linear = halves(ctx, first, interleaved=fusion == 1) if fusion else (first, third)
        if linear is None or ctx.attrs["swiglu_limit_after_activation"]:
            raise ctx.unsupported("SwiGLU without its linear part, or with a limit behind the activation")
        return swiglu(ctx, gate, linear, ctx.attrs["activation_alpha"], ctx.attrs["activation_beta"], ctx.attrs.get("swiglu_limit"))
    y = activated(ctx, first, name)
    return y if third is None else ctx.add(ew.MUL, [y, third])


def _mixed(ctx: Context, mixing: Value | None, first: Layer, second: Layer, third: Layer | None) -> Value:
    if ctx.attrs["use_sparse_mixer"]:
        raise ctx.unsupported("attribute `use_sparse_mixer` is set")
    x = ctx.value(0)
    rows = reshaped(ctx, x, (product(x.shape[:-1]), 1, x.shape[-1]))
    choice, shares = _routed(ctx, ctx.value(1), mixing)
    hidden = _activated(ctx, first(rows, choice), third and third(rows, choice))
    weighted = ctx.add(ew.MUL, [second(hidden, choice), reshaped(ctx, shares, (*shares.shape, 1))])
    return reshaped(ctx, ctx.add(red.REDUCE_SUM, [weighted], axes=(1,), keepdims=False), x.shape)


def _biased(ctx: Context, y: Value, bias: Value | None, choice: Value) -> Value:
    """y plus the bias [experts, out] of each expert."""
    return y if bias is None else ctx.add(ew.ADD, [y, ctx.add(GATHER, [bias, choice], axis=0)])


def _plain_layer(ctx: Context, at: int) -> Layer:
    w, bias = ctx.value(at), ctx.input(at + 1)
    return lambda x, choice: _biased(ctx, ctx.add(EXPERT_DENSE, [x, w, choice]), bias, choice)


def _experts(ctx: Context) -> Value:
    return _mixed(ctx, None, _plain_layer(ctx, 2), _plain_layer(ctx, 4), None if ctx.input(6) is None else _plain_layer(ctx, 6))


def _quantized_layer(ctx: Context, number: int) -> Layer:
    """Layer 1, 2 or 3: weights in bytes [experts, out, bytes] with scales for blocks of the last axis, or for whole rows."""
    at = 3 * number - 1
    w, scales, bias, zeros = ctx.value(at), ctx.value(at + 1), ctx.input(at + 2), ctx.input(10 + number)
    bits, block = ctx.attrs.get(f"fc{number}_expert_weight_bits") or ctx.attrs["expert_weight_bits"], ctx.attrs["block_size"]
    if bits not in (2, 4, 8) or len(w.shape) != 3:
        raise ctx.unsupported(f"experts of {bits} bits, in {w}")
    experts, rows, stored = (known(ctx, d, "the weights") for d in w.shape)
    size = stored * 8 // bits
    block = block if block > 0 else size
    blocks = -(-size // block)
    if zeros is not None:  # packed along the rows, or along the blocks of each
        whole = block == size and len(zeros.shape) == 2
        zeros = unpacked(ctx, zeros, bits, (experts, rows) if whole else (experts, rows, blocks))
    inputs = [w, reshaped(ctx, scales, (experts, rows, blocks)), zero_points(ctx, zeros, (experts, rows, blocks), bits)]
    return lambda x, choice: _biased(ctx, ctx.add(BLOCK_PRODUCT, [x, *inputs, choice], bits=bits, block=block), bias, choice)


def _quantized_experts(ctx: Context) -> Value:
    """Weights as quantised for the CPU (ONNX Runtime has layouts of their own for CUDA, which `weights_prepacked` = 1 says)."""
    if ctx.attrs["quant_type"] != "int" or ctx.attrs["weights_prepacked"] == 1 or any(ctx.input(i) is not None for i in range(15, 21)):
        raise ctx.unsupported("weights other than integers in their plain layout, or quantised activations, are not supported")
    if ctx.input(14) is None and ctx.attrs["normalize_routing_weights"] != 1:
        why = "without `normalize_routing_weights` ONNX Runtime does not do the same on all devices"
        raise ctx.unsupported(why, "set the attribute to 1, or pass `router_weights`")
    third = None if ctx.input(8) is None else _quantized_layer(ctx, 3)
    return _mixed(ctx, ctx.input(14), _quantized_layer(ctx, 1), _quantized_layer(ctx, 2), third)


TABLE: Table = {"MoE": _experts, "QMoE": _quantized_experts}
