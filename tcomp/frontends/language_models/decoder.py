"""The graph of a decoder with a cache.

    inputs    ids int64 [1, tokens], past.L.key and past.L.value float32 [past, kv_heads, head_size] for each layer L
    outputs   logits float32 [1, vocabulary] of the last token, present.L.key and present.L.value [past + tokens, kv_heads, head_size]

The cache grows along its first axis, so that new positions lie behind the old ones: with `state`, they are all that is written.

With a batch, several sequences are continued in one run, whose caches end at the same row, wherever they begin:

    inputs    ids int64 [batch, tokens], starts int64 [batch] (the row where each sequence begins; those before are not looked at),
              past.L.key and past.L.value float32 [past, batch, kv_heads, head_size]
    outputs   logits float32 [batch, vocabulary], present.L.key and present.L.value [past + tokens, batch, kv_heads, head_size]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from tcomp.frontends.language_models.config import DecoderConfig
from tcomp.ir.expr import Dim, as_expr, dim
from tcomp.ir.graph import Graph, GraphBuilder, Operator, Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import ARANGE, CONCAT, GATHER, RESHAPE, SLICE, TRANSPOSE
from tcomp.ops.quantization import BLOCK_PRODUCT
from tcomp.ops.reduction import RMS_NORM, SOFTMAX


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix [out, in] in few bits: `numbers` uint8 [out, bytes], the lowest bits first, `scales` [out, blocks], and the number that
    stands for zero. See `ops.quantization.block_product`."""

    numbers: np.ndarray
    scales: np.ndarray
    zero: int
    bits: int
    block: int


# (name as in Hugging Face's files, shape) -> float32 or 16-bit floats; of matrices of products also blocks
Weights = Callable[[str, tuple[int, ...]], np.ndarray | StoredBlocks]
HIDDEN = -1e30  # added to the score of a position that a query must not see


@dataclass
class _Decoder:
    config: DecoderConfig
    weights: Weights
    batch: Dim = 1
    g: GraphBuilder = field(default_factory=lambda: GraphBuilder("decoder"))

    def add(self, op: Operator, inputs: list[Value | None], name: str = "", **attrs: Any) -> Value:
        return self.g.add(op, inputs, attrs, name)[0]

    def floats(self, name: str, *shape: int) -> Value:
        found = self.weights(name, shape)
        assert isinstance(found, np.ndarray), name
        return self.g.constant(np.ascontiguousarray(found.astype(np.float32)), name)

    def linear(self, x: Value, name: str, columns: int, bias: bool = False, result: str = "") -> Value:
        """x [..., in] times weights [columns, in]; the name of the product is `result`, or that of the weights."""
        found = self.weights(f"{name}.weight", (columns, int(x.shape[-1])))
        if isinstance(found, StoredBlocks):
            zeros = np.full(found.scales.shape, found.zero, np.uint8)
            parts = {"weight": found.numbers, "scales": found.scales, "zeros": zeros}
            stored = [self.g.constant(np.ascontiguousarray(a), f"{name}.{part}") for part, a in parts.items()]
            y = self.add(BLOCK_PRODUCT, [x, *stored, None], result or name, bits=found.bits, block=found.block, activations="int8")
        else:
            matrix = self.g.constant(np.ascontiguousarray(found.astype(np.float32)), f"{name}.weight")
            y = self.add(MATMUL, [x, matrix], result or name, transpose_a=False, transpose_b=True)
        return self.add(ew.ADD, [y, self.floats(f"{name}.bias", columns)], f"{name}.bias") if bias else y

    def norm(self, x: Value, name: str) -> Value:
        scale = self.floats(f"{name}.weight", int(x.shape[-1]))
        return self.add(RMS_NORM, [x, scale], name, axis=len(x.shape) - 1, epsilon=self.config.epsilon)

    def heads(self, x: Value, prefix: str, which: str, count: int) -> Value:
        """A projection as [..., heads, size]."""
        c = self.config
        y = self.linear(x, f"{prefix}.{which}_proj", count * c.head_size, c.bias)
        y = self.add(RESHAPE, [y], shape=(*x.shape[:-1], count, c.head_size))
        return self.norm(y, f"{prefix}.{which}_norm") if c.normalised_heads and which != "v" else y

    def rotated(self, x: Value, cos: Value, sin: Value) -> Value:
        """x [..., heads, size] turned by angles [..., 1, size / 2], pairs being of the two halves."""
        half, rank = self.config.head_size // 2, len(x.shape)
        shape = (*x.shape[:-1], half)
        a, b = (self.add(SLICE, [x], starts=(0,) * (rank - 1) + (first,), steps=(1,) * rank, shape=shape) for first in (0, half))
        left = self.add(ew.SUB, [self.add(ew.MUL, [a, cos]), self.add(ew.MUL, [b, sin])])
        right = self.add(ew.ADD, [self.add(ew.MUL, [b, cos]), self.add(ew.MUL, [a, sin])])
        return self.add(CONCAT, [left, right], axis=rank - 1)

    def graph(self) -> Graph:
        c, g = self.config, self.g
        several = () if self.batch == 1 else (self.batch,)
        # Where there is a batch, rows of products are its sequences: one token of each has code of its own.
        tokens, past = dim("tokens", 1, c.positions, exact=(1,) if several else ()), dim("past", 0, c.positions)
        length = as_dim(as_expr(past) + tokens)
        ids = g.input("ids", "int64", (*(several or (1,)), tokens))
        starts = g.input("starts", "int64", several) if several else None
        caches = [
            tuple(g.input(f"past.{n}.{kind}", "float32", (past, *several, c.kv_heads, c.head_size)) for kind in ("key", "value"))
            for n in range(c.layers)
        ]
        place = self.add(ARANGE, [], "places", start=past, step=1, count=tokens, dtype="int64")
        own = place
        if starts is not None:
            starts = self.add(RESHAPE, [starts], shape=(*several, 1))
            own = self.add(ew.SUB, [place, starts], "own_places")
        positions = self.add(RESHAPE, [self.add(ew.CAST, [own], "positions", dtype="float32")], shape=(*several, tokens, 1, 1))
        angle = self.add(ew.MUL, [positions, g.constant(_frequencies(c), "frequencies")], "angles")
        cos, sin = self.add(ew.COS, [angle], "cos"), self.add(ew.SIN, [angle], "sin")
        at = self.add(RESHAPE, [place], shape=(tokens, 1))
        key = self.add(ARANGE, [], "keys", start=0, step=1, count=length, dtype="int64")
        seen = self.add(ew.LESS_EQUAL, [key, at], "seen")
        if c.window:
            first = self.add(ew.SUB, [at, g.constant(np.array(c.window), "window")])
            seen = self.add(ew.AND, [seen, self.add(ew.LESS, [first, key])])
        if starts is not None:
            begun = self.add(ew.LESS_EQUAL, [self.add(RESHAPE, [starts], shape=(*several, 1, 1, 1, 1)), key], "begun")
            seen = self.add(ew.AND, [seen, begun])
        zero, hidden = (g.constant(np.array(n, np.float32), name) for n, name in ((0, "zero"), (HIDDEN, "hidden")))
        mask = self.add(ew.WHERE, [seen, zero, hidden], "mask")

        rows = self.weights("model.embed_tokens.weight", (c.vocabulary, c.hidden))
        assert isinstance(rows, np.ndarray)
        table = g.constant(rows, "model.embed_tokens.weight")
        x = self.add(GATHER, [table, ids if several else self.add(RESHAPE, [ids], shape=(tokens,))], "embedding", axis=0)
        x = x if x.dtype == "float32" else self.add(ew.CAST, [x], dtype="float32")
        present = list[Value]()
        for n, cache in enumerate(caches):
            prefix = f"model.layers.{n}"
            h = self.norm(x, f"{prefix}.input_layernorm")
            y, grown = self.attention(h, f"{prefix}.self_attn", n, cache, cos, sin, mask)
            present += grown
            x = self.add(ew.ADD, [x, self.linear(y, f"{prefix}.self_attn.o_proj", c.hidden)], f"{prefix}.attended")
            h = self.norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = (self.linear(h, f"{prefix}.mlp.{which}_proj", c.intermediate) for which in ("gate", "up"))
            h = self.add(ew.MUL, [self.add(ew.SWISH, [gate], alpha=1.0), up], f"{prefix}.mlp.gated")
            x = self.add(ew.ADD, [x, self.linear(h, f"{prefix}.mlp.down_proj", c.hidden)], f"{prefix}.out")
        axes, end = len(x.shape), as_dim(as_expr(tokens) - 1)
        last = self.add(SLICE, [x], "last", starts=(*(0 for _ in several), end, 0), steps=(1,) * axes, shape=(*several, 1, c.hidden))
        y = self.norm(self.add(RESHAPE, [last], shape=(*several, c.hidden)) if several else last, "model.norm")
        if c.tied:
            head = self.floats("model.embed_tokens.weight", c.vocabulary, c.hidden)
            logits = self.add(MATMUL, [y, head], "logits", transpose_a=False, transpose_b=True)
        else:
            logits = self.linear(y, "lm_head", c.vocabulary, result="logits")
        return g.build([logits, *present])

    def attention(
        self, x: Value, prefix: str, layer: int, cache: tuple[Value, ...], cos: Value, sin: Value, mask: Value
    ) -> tuple[Value, list[Value]]:
        """(attention of x [..., hidden] as [..., heads * size], the longer cache)"""
        c, lead = self.config, x.shape[:-1]
        group, several = c.heads // c.kv_heads, lead[:-1]
        first = tuple(range(len(several)))  # axes of the batch, where there is one

        def after(*axes: int) -> tuple[int, ...]:
            return (*first, *(a + len(first) for a in axes))

        q = self.rotated(self.heads(x, prefix, "q", c.heads), cos, sin)
        k = self.rotated(self.heads(x, prefix, "k", c.kv_heads), cos, sin)
        v = self.heads(x, prefix, "v", c.kv_heads)
        rows = (k, v) if not several else [self.add(TRANSPOSE, [new], perm=(1, 0, 2, 3)) for new in (k, v)]
        grown = [
            self.add(CONCAT, [old, new], f"present.{layer}.{kind}", axis=0)
            for kind, old, new in zip(("key", "value"), cache, rows, strict=True)
        ]
        q = self.add(ew.SCALE, [q], factor=1 / sqrt(c.head_size))
        q = self.add(TRANSPOSE, [self.add(RESHAPE, [q], shape=(*lead, c.kv_heads, group, c.head_size))], perm=after(1, 2, 0, 3))
        by_head = (1, 2, 0, 3) if several else (1, 0, 2)
        keys, values = (
            self.add(RESHAPE, [self.add(TRANSPOSE, [part], perm=by_head)], shape=(*several, c.kv_heads, 1, part.shape[0], c.head_size))
            for part in grown
        )
        scores = self.add(MATMUL, [q, keys], f"{prefix}.scores", transpose_a=False, transpose_b=True)
        weights = self.add(SOFTMAX, [self.add(ew.ADD, [scores, mask])], f"{prefix}.weights", axes=(len(scores.shape) - 1,))
        y = self.add(MATMUL, [weights, values], f"{prefix}.values", transpose_a=False, transpose_b=False)
        y = self.add(TRANSPOSE, [y], perm=after(2, 0, 1, 3))
        return self.add(RESHAPE, [y], prefix, shape=(*lead, c.heads * c.head_size)), grown


def decoder_graph(config: DecoderConfig, weights: Weights, batch: Dim = 1) -> Graph:
    """The graph of a decoder whose weights are asked for by name and shape, one after the other; for one sequence, or a
    `batch` of them at a time. Raises what `weights` raises."""
    return _Decoder(config, weights, batch).graph()


def _frequencies(config: DecoderConfig) -> np.ndarray:
    """Angles of a position, float32 [size / 2]. Su et al. 2021, scaled as `RotaryScaling` says."""
    even = np.arange(0, config.head_size, 2, dtype=np.int64).astype(np.float32)
    found: np.ndarray = (1.0 / np.float32(config.theta) ** (even / np.float32(config.head_size))).astype(np.float32)
    s = config.scaling
    if s is None:
        return found
    if not s.low:
        return (found / np.float32(s.factor)).astype(np.float32)
    wavelength = 2 * np.pi / found
    smooth = (s.original / wavelength - s.low) / (s.high - s.low)
    between = (1 - smooth) * found / s.factor + smooth * found
    scaled = np.where(wavelength > s.original / s.low, found / s.factor, found)
    middle = (wavelength >= s.original / s.high) & (wavelength <= s.original / s.low)
    return np.where(middle, between, scaled).astype(np.float32)
