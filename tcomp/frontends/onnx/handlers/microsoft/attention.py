"""Attention: with merged projections (float or quantised), with several heads, with groups of heads and a cache; rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import sqrt

import numpy as np

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.microsoft.common import applied, cast, complex_product, known, merge_heads, split_heads, total, wide
from tcomp.frontends.onnx.handlers.microsoft.quantized import product_to_float
from tcomp.frontends.onnx.handlers.movement import cut, padded, parts, repeated, reshaped
from tcomp.ir.dtypes import lowest
from tcomp.ir.expr import Dim, as_expr, maximum
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import ARANGE, CONCAT, EXPAND, GATHER, TENSOR_SCATTER
from tcomp.ops.recurrent import PART, STACK
from tcomp.ops.reduction import RMS_NORM, SOFTMAX

MASKED = -10_000.0  # what ONNX Runtime adds to the scores of padding, unless `mask_filter_value` says something else


def _refuse(ctx: Context, *flags: str, **inputs: int) -> None:
    """Raises `UnsupportedError` for an attribute that is set, or an input (of that number) that is given."""
    found = [f"attribute `{flag}` is {ctx.attrs[flag]}" for flag in flags if ctx.attrs.get(flag)]
    found += [f"input {i} (`{name}`) is not supported" for name, i in inputs.items() if ctx.input(i) is not None]
    if found:
        raise ctx.unsupported(found[0], "export the model without it")


def _range(ctx: Context, count: Dim, *shape: Dim, start: Dim = 0) -> Value:
    """start, start + 1, ... (int64) along the one axis of `shape` that is not 1."""
    return reshaped(ctx, ctx.add(ARANGE, [], start=start, step=1, count=count, dtype="int64"), shape)


def _chosen(ctx: Context, conditions: Sequence[Value], other: float, dtype: str) -> Value:
    """0 where all conditions hold, else `other`."""
    where = reduce(lambda a, b: ctx.add(ew.AND, [a, b]), conditions)
    return ctx.add(ew.WHERE, [where, ctx.constant(0.0, dtype), ctx.constant(max(other, float(lowest(dtype))), dtype)])


def _attention(
    ctx: Context, q: Value, k: Value, v: Value, terms: Sequence[Value | None], sink: Value | None = None, softcap: float = 0.0
) -> Value:
    """softmax(scale * q k' + terms) v of [batch, heads, positions, size], as [batch, positions, heads * size]. `sink` [heads] is a further
    score of each row, without a value; softcap c replaces scores s by c * tanh(s / c)."""
    scale = ctx.attrs.get("scale") or 1 / sqrt(known(ctx, q.shape[3], "the size of a head"))
    scores = ctx.add(MATMUL, [ctx.add(ew.SCALE, [q], factor=float(scale)), k], transpose_b=True)
    if softcap:
        scores = ctx.add(ew.SCALE, [ctx.add(ew.TANH, [ctx.add(ew.SCALE, [scores], factor=1 / softcap)])], factor=softcap)
    scores = total(ctx, scores, *terms)
    if sink is None:
        weights = ctx.add(SOFTMAX, [scores], axes=(3,))
    else:
        column = ctx.add(EXPAND, [reshaped(ctx, sink, (*sink.shape, 1, 1))], shape=(*scores.shape[:3], 1))
        weights = cut(ctx, ctx.add(SOFTMAX, [ctx.add(CONCAT, [scores, column], axis=3)], axes=(3,)), 3, 0, scores.shape[3])
    return merge_heads(ctx, ctx.add(MATMUL, [weights, v]))


def _masks(ctx: Context, mask: Value | None, q: Value, k: Value) -> list[Value]:
    """What is added to the scores for padding, by a mask of one of the forms that ONNX Runtime accepts, and for later positions where the
    attribute `unidirectional` is set."""
    (batch, _, rows, _), columns, terms = q.shape, k.shape[2], list[Value]()
    if mask is not None:
        if len(mask.shape) == 1:  # ends of the sequences, then (where there are twice as many) their starts
            place, twice = _range(ctx, columns, 1, 1, 1, columns), mask.shape[0] == as_dim(as_expr(batch) * 2)
            if not twice and mask.shape[0] != batch:
                raise ctx.unsupported(f"a mask of {mask.shape[0]} elements for a batch of {batch} is that of packed sequences")
            ends, *starts = (
                cast(ctx, reshaped(ctx, cut(ctx, mask, 0, first, batch), (batch, 1, 1, 1)), "int64") for first in (0, batch)[: 1 + twice]
            )
            inside = [ctx.add(ew.LESS, [place, ends]), *(ctx.add(ew.LESS_EQUAL, [s, place]) for s in starts)]
        else:
            if len(mask.shape) not in (2, 3) or mask.shape[-1] != columns:
                raise ctx.unsupported(f"the mask {mask} does not fit {rows} queries and {columns} keys")
            wanted = (batch, 1, rows if len(mask.shape) == 3 else 1, columns)
            inside = [ctx.add(ew.GREATER, [reshaped(ctx, mask, wanted), ctx.constant(0, mask.dtype)])]
        terms.append(_chosen(ctx, inside, float(ctx.attrs.get("mask_filter_value", MASKED)), q.dtype))
    if ctx.attrs.get("unidirectional") == 1:
        at = _range(ctx, rows, rows, 1, start=as_dim(as_expr(columns) - as_expr(rows)))
        terms.append(_chosen(ctx, [ctx.add(ew.LESS_EQUAL, [_range(ctx, columns, 1, columns), at])], float(lowest(q.dtype)), q.dtype))
    return terms


def _merged(ctx: Context, qkv: Value, mask: Value | None, past: Value | None, bias: Value | None) -> tuple[Value, ...]:
    """(attention, new cache [2, batch, heads, positions, size]) of queries, keys and values that stand side by side."""
    _refuse(ctx, "do_rotary", "past_present_share_buffer")
    width, heads = known(ctx, qkv.shape[2], "the projection"), ctx.attrs["num_heads"]
    sizes = ctx.attrs.get("qkv_hidden_sizes") or [width // 3] * 3
    if sum(sizes) != width:
        raise ctx.invalid(f"a projection of {width} columns for queries, keys and values of {sizes}")
    q, k, v = (split_heads(ctx, x, heads) for x in parts(ctx, qkv, 2, sizes))
    if past is not None:
        k, v = (ctx.add(CONCAT, [ctx.add(PART, [past], index=n), new], axis=2) for n, new in enumerate((k, v)))
    y = _attention(ctx, q, k, v, [*_masks(ctx, mask, q, k), bias])
    return (y, ctx.add(STACK, [k, v], axis=0)) if ctx.wants(1) else (y,)


def _merged_attention(ctx: Context) -> tuple[Value, ...]:
    _refuse(ctx, past_sequence_length=6)
    qkv = total(ctx, ctx.add(MATMUL, [ctx.value(0), ctx.value(1)]), ctx.input(2))
    return _merged(ctx, qkv, ctx.input(3), ctx.input(4), ctx.input(5))


def _quantized_attention(ctx: Context) -> tuple[Value, ...]:
    """The projection in integers."""
    qkv = applied(ctx, product_to_float, [ctx.input(i) for i in (0, 1, 3, 4, 6, 7, 2)])
    return _merged(ctx, qkv, ctx.input(5), ctx.input(8), None)


def _multi_head(ctx: Context) -> tuple[Value | None, ...]:
    """Queries, keys and values apart, packed together ([batch, positions, heads, 3, size]), or keys and values packed or by heads."""
    _refuse(ctx, past_sequence_length=8, cache_indirection=9)
    if ctx.wants(3):
        raise ctx.unsupported("the scores are wanted as an output")
    heads, bias, given = ctx.attrs["num_heads"], ctx.input(3), [ctx.value(0), ctx.input(1), ctx.input(2)]
    packed = next((x for x in given if x is not None and len(x.shape) == 5), None)
    if packed is not None:
        count = known(ctx, packed.shape[3], "the axis of packed tensors")
        slices = [reshaped(ctx, x, (*packed.shape[:2], heads * int(packed.shape[4]))) for x in parts(ctx, packed, 3, [1] * count)]
        given = [*given[: 3 - count], *slices]
    first, made = 0, list[Value]()
    for x in given:
        if x is None:
            raise ctx.unsupported("keys or values are missing")
        if len(x.shape) != 4:  # those of an encoder are by heads, with their bias
            width = known(ctx, x.shape[2], "the hidden axis")
            x = split_heads(ctx, total(ctx, x, bias and cut(ctx, bias, 0, first, width)), heads)
            first += width
        made.append(x)
    q, k, v = made
    if ctx.input(6) is not None and ctx.input(7) is not None:
        k, v = ctx.add(CONCAT, [ctx.input(6), k], axis=2), ctx.add(CONCAT, [ctx.input(7), v], axis=2)
    return _attention(ctx, q, k, v, [*_masks(ctx, ctx.input(4), q, k), ctx.input(5)]), k, v


def _rotated(ctx: Context, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """x [..., positions, size] turned by angles [..., positions, width / 2] in its first `width` elements; these are pairs of neighbours if
    `interleaved`, else of the halves."""
    axis, width = len(x.shape) - 1, 2 * known(ctx, cos.shape[-1], "the rotary width")
    if width > known(ctx, x.shape[axis], "the size of a head"):
        raise ctx.invalid(f"a rotary width of {width} for heads of {x.shape[axis]}")
    turned = complex_product(ctx, wide(ctx, cut(ctx, x, axis, 0, width)), wide(ctx, cos), wide(ctx, sin), interleaved)
    y, rest = cast(ctx, turned, x.dtype), int(x.shape[axis]) - width
    return y if not rest else ctx.add(CONCAT, [y, cut(ctx, x, axis, width, rest)], axis=axis)


def _angles(ctx: Context, table: Value, positions: Value) -> Value:
    """Rows of a table at positions [batch or 1, n], for all heads: [batch or 1, 1, n, width / 2]."""
    rows = ctx.add(GATHER, [table, positions], axis=0)
    return reshaped(ctx, rows, (rows.shape[0], 1, *rows.shape[1:]))


def _rotary(ctx: Context) -> Value:
    x, positions, cos, sin = (ctx.value(i) for i in range(4))
    _refuse(ctx, "is_packed_batching")
    if ctx.attrs["scale"] != 1.0:
        raise ctx.unsupported(f"attribute `scale` is {ctx.attrs['scale']}")
    if flat := len(x.shape) == 3:
        if ctx.attrs["rotary_embedding_dim"] and not ctx.attrs["num_heads"]:
            raise ctx.invalid("`rotary_embedding_dim` needs `num_heads`")
        width = 2 * known(ctx, cos.shape[1], "the rotary width")
        x = split_heads(ctx, x, ctx.attrs["num_heads"] or known(ctx, x.shape[2], "the hidden axis") // width)
    if len(positions.shape) == 1:  # the first of consecutive ones
        steps = _range(ctx, x.shape[2], 1, x.shape[2])
        positions = ctx.add(ew.ADD, [steps, reshaped(ctx, positions, (1, 1))])
    y = _rotated(ctx, x, _angles(ctx, cos, positions), _angles(ctx, sin, positions), ctx.attrs["interleaved"] == 1)
    return merge_heads(ctx, y) if flat else y


def _grouped(ctx: Context) -> tuple[Value | None, ...]:
    """Attention in which several heads of queries share one of keys and values, with a cache. After the run sequence b has
    `lengths[b] + 1` positions in it; new ones are written behind the old ones."""
    _refuse(ctx, "sliding_window_cache", "qk_output", k_scale=12, v_scale=13)
    if {ctx.attrs["k_quant_type"], ctx.attrs["v_quant_type"]} != {"NONE"} or ctx.wants(3):
        raise ctx.unsupported("the cache is quantised, or the scores are an output")
    heads, kv_heads = ctx.attrs["num_heads"], ctx.attrs["kv_num_heads"]
    if kv_heads < 1 or heads % kv_heads:
        raise ctx.invalid(f"{heads} heads do not divide into groups that share {kv_heads}")
    x, group = ctx.value(0), heads // kv_heads
    if ctx.input(1) is None:
        size = known(ctx, x.shape[2], "the hidden axis") // (heads + 2 * kv_heads)
        given = parts(ctx, x, 2, [heads * size, kv_heads * size, kv_heads * size])
    else:
        given = x, ctx.value(1), ctx.value(2)
    q, k, v = (split_heads(ctx, x, n) for x, n in zip(given, (heads, kv_heads, kv_heads), strict=True))
    q, k = (
        ctx.add(RMS_NORM, [x, gamma], axis=3, epsilon=ctx.attrs.get(name, ctx.attrs["qk_norm_epsilon"])) if gamma else x
        for x, gamma, name in ((q, ctx.input(14), "q_norm_epsilon"), (k, ctx.input(15), "k_norm_epsilon"))
    )
    (batch, _, rows, size), dtype = q.shape, q.dtype
    # `first` [batch]: the position of the first new element
    end = ctx.add(ew.ADD, [cast(ctx, reshaped(ctx, ctx.value(5), (batch,)), "int64"), ctx.constant(1, "int64")])
    new = ctx.dims_value([rows]) if ctx.input(16) is None else cast(ctx, ctx.value(16), "int64")
    first = ctx.add(ew.MAX, [ctx.add(ew.SUB, [end, new]), ctx.constant(0, "int64")])
    places = ctx.add(ew.ADD, [_range(ctx, rows, 1, rows), reshaped(ctx, first, (batch, 1))])
    if ctx.attrs["do_rotary"] == 1:
        if (positions := ctx.input(9)) is None:  # rows of padding may lie behind the end of the tables
            positions = ctx.add(ew.MIN, [places, ctx.dims_value([as_dim(as_expr(ctx.value(7).shape[0]) - 1)])])
        cos, sin = (_angles(ctx, ctx.value(i), positions) for i in (7, 8))
        q, k = (_rotated(ctx, p, cos, sin, ctx.attrs["rotary_interleaved"] == 1) for p in (q, k))
    past = ctx.input(3), ctx.input(4)
    if past[0] is not None and past[1] is not None:
        before = past[0].shape[2]
        length = ctx.size(ctx.given_dims(6, "the total sequence length")[0], "the total sequence length", least=1)
        more = as_dim(maximum(as_expr(length) - before, 0))
        caches = [padded(ctx, cache, (0, 0, 0, 0), (0, 0, more, 0)) for cache in past if cache is not None]
        k, v = (ctx.add(TENSOR_SCATTER, [c, p, first], axis=2, circular=False) for c, p in zip(caches, (k, v), strict=True))
    columns = k.shape[2]
    at, key = reshaped(ctx, places, (batch, 1, rows, 1)), _range(ctx, columns, 1, 1, 1, columns)
    seen = [ctx.add(ew.LESS, [key, reshaped(ctx, end, (batch, 1, 1, 1))])]
    if ctx.attrs["causal"]:
        seen = [ctx.add(ew.LESS_EQUAL, [key, at])]
    if (window := ctx.attrs["local_window_size"]) > 0:
        seen.append(ctx.add(ew.LESS, [ctx.add(ew.SUB, [at, ctx.constant(window, "int64")]), key]))
    terms, sink = [_chosen(ctx, seen, float(lowest(dtype)), dtype), ctx.input(10)], ctx.input(11)
    if sink is None and ctx.attrs["smooth_softmax"] == 1:
        sink = ctx.constant(np.zeros(heads), dtype)
    return _attention(ctx, q, repeated(ctx, k, 1, group), repeated(ctx, v, 1, group), terms, sink, ctx.attrs["softcap"]), k, v


TABLE: Table = {
    "Attention": _merged_attention, "QAttention": _quantized_attention, "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _grouped, "RotaryEmbedding": _rotary,
}  # fmt: skip
