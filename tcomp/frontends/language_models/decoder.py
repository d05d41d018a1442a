"""The graph of a decoder with a cache.

    inputs    ids int64 [1, tokens], past.L.key and past.L.value float32 [past, kv_heads, head_size] for each layer L
    outputs   logits float32 [1, vocabulary] of the last token, present.L.key and present.L.value [past + tokens, kv_heads, head_size]

With drafts, logits are those of the last tokens, [min(tokens, 1 + drafts), vocabulary], so that as many guesses are checked in one run.
The cache grows along its first axis, so that new positions lie behind the old ones: with `state`, they are all that is written.

With a batch, several sequences are continued in one run, whose caches end at the same row, wherever they begin:

    inputs    ids int64 [batch, tokens], starts int64 [batch] (the row where each sequence begins; those before are not looked at),
              past.L.key and past.L.value float32 [past, batch, kv_heads, head_size]
    outputs   logits float32 [batch, vocabulary], present.L.key and present.L.value [past + tokens, batch, kv_heads, head_size]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt

import numpy as np

from tcomp.errors import InputError
from tcomp.frontends.language_models.config import DecoderConfig, Experts
from tcomp.frontends.language_models.layers import Layers, Weights
from tcomp.frontends.language_models.stored import StoredBlocks
from tcomp.ir.expr import Dim, as_expr, dim, minimum
from tcomp.ir.graph import Graph, GraphBuilder, Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import ARANGE, CONCAT, GATHER, RESHAPE, SLICE, TOP_K, TRANSPOSE, product
from tcomp.ops.nn import CAUSAL_MASK, EXPERT_DENSE
from tcomp.ops.reduction import REDUCE_SUM, SOFTMAX

PROMPT_PART = 512  # tokens of a prompt that `tcomp.generation` gives at a time


@dataclass
class _Decoder(Layers):
    config: DecoderConfig
    batch: Dim = 1
    drafts: int = 0

    def norm(self, x: Value, name: str) -> Value:
        return self.layer_norm(x, name) if self.config.layer_norm else self.rms_norm(x, name, float(self.config.unit_offset))

    def capped(self, x: Value, cap: float, name: str = "") -> Value:
        """cap * tanh(x / cap)"""
        return self.add(ew.SCALE, [self.add(ew.TANH, [self.add(ew.SCALE, [x], factor=1 / cap)])], name, factor=cap) if cap else x

    def heads(self, x: Value, prefix: str, which: str, count: int) -> Value:
        """A projection as [..., heads, size]."""
        c = self.config
        y = self.linear(x, f"{prefix}.{which}_proj", count * c.head_size, c.bias)
        y = self.add(RESHAPE, [y], shape=(*x.shape[:-1], count, c.head_size))
        return self.norm(y, f"{prefix}.{which}_norm") if c.normalised_heads and which != "v" else y

    def rotated(self, x: Value, cos: Value, sin: Value) -> Value:
        """x [..., heads, size] turned by angles [..., 1, rotated / 2], pairs being of the two halves of what is turned."""
        size, rank = self.config.head_size, len(x.shape)
        turned = size if self.config.rotated is None else self.config.rotated
        half = turned // 2

        a, b = self.part(x, 0, half), self.part(x, half, half)
        rest = [self.part(x, turned, size - turned)] if turned < size else []
        left = self.add(ew.SUB, [self.add(ew.MUL, [a, cos]), self.add(ew.MUL, [b, sin])])
        right = self.add(ew.ADD, [self.add(ew.MUL, [b, cos]), self.add(ew.MUL, [a, sin])])
        return self.add(CONCAT, [left, right, *rest], axis=rank - 1)

    def graph(self) -> Graph:
        c, g = self.config, self.g
        several = () if self.batch == 1 else (self.batch,)
        # Where there is a batch, it is the outermost size: one token of each sequence has code of its own, and so has a part of a prompt.
        likely = (1, 1 + self.drafts, PROMPT_PART) if several or self.drafts else ()
        own_code = tuple(sorted({n for n in likely if n <= c.positions}))
        tokens, past = dim("tokens", 1, c.positions, own_code), dim("past", 0, c.positions)
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
            own = self.add(ew.SUB, [place, self.add(RESHAPE, [starts], shape=(*several, 1))], "own_places")
        masks = self.masks(place, starts, length)
        turns: dict[bool, Callable[[Value], Value]] = {windowed: lambda x: x for windowed in masks}
        if not c.alibi and c.positions_from is None:
            positions = self.add(RESHAPE, [self.add(ew.CAST, [own], "positions", dtype="float32")], shape=(*several, tokens, 1, 1))
            for windowed in masks:
                angle = self.add(ew.MUL, [positions, g.constant(_frequencies(c, windowed), "frequencies")], "angles")
                cos, sin = self.add(ew.COS, [angle], "cos"), self.add(ew.SIN, [angle], "sin")
                turns[windowed] = partial(self.rotated, cos=cos, sin=sin)
        x = self.embedded(ids if several else self.add(RESHAPE, [ids], shape=(tokens,)), own)
        present = list[Value]()
        for n, cache in enumerate(caches):
            windowed = self.has_window(n)
            x, grown = self.layer(x, n, cache, turns[windowed], masks[windowed])
            present += grown
        axes, wanted = len(x.shape), as_dim(minimum(tokens, 1 + self.drafts)) if self.drafts else 1
        begin = (*(0 for _ in several), as_dim(as_expr(tokens) - wanted), 0)
        last = self.add(SLICE, [x], "last", starts=begin, steps=(1,) * axes, shape=(*several, wanted, c.hidden))
        y = self.norm(self.add(RESHAPE, [last], shape=(*several, c.hidden)) if several else last, "model.norm")
        result = "" if c.logit_cap else "logits"
        if c.tied:
            logits = self.by_table(y, "model.embed_tokens.weight", c.vocabulary, result)
        else:
            logits = self.linear(y, "lm_head", c.vocabulary, c.head_bias, result)
        return g.build([self.capped(logits, c.logit_cap, "logits"), *present])

    def has_window(self, layer: int) -> bool:
        """Whether queries of a layer see but some positions before them."""
        c = self.config
        return c.window > 0 and (c.windowed is None or layer in c.windowed)

    def masks(self, place: Value, starts: Value | None, length: Dim) -> dict[bool, Callable[[Value], Value]]:
        """What hides scores [..., tokens, length] of queries at the rows `place` of the cache, for layers without and with a window; with a
        batch, sequences begin at the rows `starts` [batch]. Biases of heads are added before."""
        c, bias = self.config, list[Value]()
        if c.alibi:
            key = self.add(ARANGE, [], "keys", start=0, step=1, count=length, dtype="float32")
            slopes = self.g.constant(_slopes(c.heads).reshape(c.kv_heads, -1, 1, 1), "slopes")
            bias.append(self.add(ew.MUL, [slopes, key], "biases"))

        def hidden(scores: Value, window: int) -> Value:
            scores = self.add(ew.ADD, [scores, *bias]) if bias else scores
            return self.add(CAUSAL_MASK, [scores, place, starts], window=window)

        return {windowed: partial(hidden, window=c.window if windowed else 0) for windowed in {self.has_window(n) for n in range(c.layers)}}

    def embedded(self, ids: Value, place: Value) -> Value:
        """Vectors [..., hidden] of tokens [...] at positions [...]."""
        c, g = self.config, self.g
        name = "model.embed_tokens.weight"
        x = self.rows(self.array(name, c.vocabulary, c.hidden), ids, name)
        if c.scaled_embedding:
            x = self.add(ew.SCALE, [x], factor=sqrt(c.hidden))
        if c.positions_from is not None:
            vectors = self.floats("model.positions.weight", c.positions + c.positions_from, c.hidden)
            row = self.add(ew.ADD, [place, g.constant(np.array(c.positions_from), "first_position")]) if c.positions_from else place
            x = self.add(ew.ADD, [x, self.add(GATHER, [vectors, row], axis=0)], "placed")
        return self.norm(x, "model.embed_norm") if c.normalised_embedding else x

    def layer(
        self, x: Value, number: int, cache: tuple[Value, ...], turn: Callable[[Value], Value], hide: Callable[[Value], Value]
    ) -> tuple[Value, list[Value]]:
        """(x [..., hidden] after a layer, its longer cache)"""
        c, prefix = self.config, f"model.layers.{number}"
        h = self.norm(x, f"{prefix}.input_layernorm")
        y, grown = self.attention(h, f"{prefix}.self_attn", number, cache, turn, hide)
        y = self.linear(y, f"{prefix}.self_attn.o_proj", c.hidden, c.output_bias)
        y = self.norm(y, f"{prefix}.self_attn.norm") if c.post_norms else y
        if not c.parallel:
            x = self.add(ew.ADD, [x, y], f"{prefix}.attended")
        h = h if c.shared_norm else self.norm(x, f"{prefix}.post_attention_layernorm")
        if c.experts is not None and number in c.experts.layers:
            z = self.mixture(h, f"{prefix}.mlp", c.experts)
        else:
            z = self.mlp(h, f"{prefix}.mlp", c.intermediate)
        z = self.norm(z, f"{prefix}.mlp.norm") if c.post_norms else z
        z = self.add(ew.ADD, [y, z]) if c.parallel else z
        return self.add(ew.ADD, [x, z], f"{prefix}.out"), grown

    def mlp(self, x: Value, prefix: str, size: int) -> Value:
        """A layer of `size` elements inside, of x [..., hidden]."""
        c = self.config
        h = self.activated(self.linear(x, f"{prefix}.{'gate' if c.gated else 'up'}_proj", size, c.mlp_bias), c.activation)
        if c.gated:
            h = self.add(ew.MUL, [h, self.linear(x, f"{prefix}.up_proj", size, c.mlp_bias)], f"{prefix}.gated")
        return self.linear(h, f"{prefix}.down_proj", c.hidden, c.mlp_bias)

    def mixture(self, x: Value, prefix: str, experts: Experts) -> Value:
        """The layers of the experts that each row of x [..., hidden] has, by their shares; only those are computed."""
        c, e = self.config, experts
        shares = self.add(SOFTMAX, [self.linear(x, f"{prefix}.gate", e.count)], f"{prefix}.shares", axes=(len(x.shape) - 1,))
        rows, slots = product(x.shape[:-1]), (product(x.shape[:-1]), e.chosen)
        shares = self.add(RESHAPE, [shares], shape=(rows, e.count))
        best, choice = self.g.add(TOP_K, [shares], {"k": e.chosen, "axis": 1, "largest": True}, f"{prefix}.best")
        if e.normalised:
            best = self.add(ew.DIV, [best, self.add(REDUCE_SUM, [best], axes=(1,), keepdims=True)])

        def dense(rows: Value, which: str, out: int, size: int) -> Value:
            name = f"{prefix}.experts.{which}_proj"
            found = self.weights(f"{name}.weight", (e.count, out, size))
            if isinstance(found, StoredBlocks):
                return self.block_product(rows, found, name, name, choice)
            return self.add(EXPERT_DENSE, [rows, self.g.constant(found.astype(np.float32), f"{name}.weight"), choice], name)

        flat = self.add(RESHAPE, [x], shape=(rows, 1, c.hidden))
        h = self.add(ew.MUL, [self.activated(dense(flat, "gate", e.size, c.hidden), c.activation), dense(flat, "up", e.size, c.hidden)])
        y = self.add(ew.MUL, [dense(h, "down", c.hidden, e.size), self.add(RESHAPE, [best], shape=(*slots, 1))])
        y = self.add(RESHAPE, [self.add(REDUCE_SUM, [y], axes=(1,), keepdims=False)], prefix, shape=x.shape)
        if not e.shared:
            return y
        gate = self.add(ew.SIGMOID, [self.linear(x, f"{prefix}.shared_expert_gate", 1)])
        return self.add(ew.ADD, [y, self.add(ew.MUL, [gate, self.mlp(x, f"{prefix}.shared_expert", e.shared)])])

    def attention(
        self, x: Value, prefix: str, layer: int, cache: tuple[Value, ...], turn: Callable[[Value], Value], hide: Callable[[Value], Value]
    ) -> tuple[Value, list[Value]]:
        """(attention of x [..., hidden] as [..., heads * size], the longer cache)"""
        c, lead = self.config, x.shape[:-1]
        group, several = c.heads // c.kv_heads, lead[:-1]
        first = tuple(range(len(several)))  # axes of the batch, where there is one

        def after(*axes: int) -> tuple[int, ...]:
            return (*first, *(a + len(first) for a in axes))

        q, k = turn(self.heads(x, prefix, "q", c.heads)), turn(self.heads(x, prefix, "k", c.kv_heads))
        v = self.heads(x, prefix, "v", c.kv_heads)
        rows = (k, v) if not several else [self.add(TRANSPOSE, [new], perm=(1, 0, 2, 3)) for new in (k, v)]
        grown = [
            self.add(CONCAT, [old, new], f"present.{layer}.{kind}", axis=0)
            for kind, old, new in zip(("key", "value"), cache, rows, strict=True)
        ]
        q = self.add(ew.SCALE, [q], factor=1 / sqrt(c.query_scalar or c.head_size))
        q = self.add(TRANSPOSE, [self.add(RESHAPE, [q], shape=(*lead, c.kv_heads, group, c.head_size))], perm=after(1, 2, 0, 3))
        by_head = (1, 2, 0, 3) if several else (1, 0, 2)
        keys, values = (
            self.add(RESHAPE, [self.add(TRANSPOSE, [part], perm=by_head)], shape=(*several, c.kv_heads, 1, part.shape[0], c.head_size))
            for part in grown
        )
        scores = self.add(MATMUL, [q, keys], f"{prefix}.scores", transpose_a=False, transpose_b=True)
        weights = self.add(SOFTMAX, [hide(self.capped(scores, c.score_cap))], f"{prefix}.weights", axes=(len(scores.shape) - 1,))
        y = self.add(MATMUL, [weights, values], f"{prefix}.values", transpose_a=False, transpose_b=False)
        y = self.add(TRANSPOSE, [y], perm=after(2, 0, 1, 3))
        return self.add(RESHAPE, [y], prefix, shape=(*lead, c.heads * c.head_size)), grown


def decoder_graph(config: DecoderConfig, weights: Weights, batch: Dim = 1, drafts: int = 0) -> Graph:
    """The graph of a decoder whose weights are asked for by name and shape, one after the other; for one sequence, or a
    `batch` of them at a time; `drafts`: how many tokens besides the last one have logits, too. Raises `InputError` for both, and what
    `weights` raises."""
    if drafts and batch != 1:
        raise InputError("a batch of sequences cannot have drafts", hint="leave out the dim `batch`, or `drafts`")
    return _Decoder(weights, config.epsilon, config, batch, drafts, g=GraphBuilder("decoder")).graph()


def _frequencies(config: DecoderConfig, windowed: bool) -> np.ndarray:
    """Angles of a position, float32 [size / 2], in layers with or without a window. Su et al. 2021, scaled as `RotaryScaling` says."""
    size = config.head_size if config.rotated is None else config.rotated
    even = np.arange(0, size, 2, dtype=np.int64).astype(np.float32)
    own = windowed and config.window_theta is not None
    theta = np.float32(config.window_theta if own else config.theta)
    found: np.ndarray = (1.0 / theta ** (even / np.float32(size))).astype(np.float32)
    s = config.scaling
    if s is None or own:
        return found
    if not s.low:
        return (found / np.float32(s.factor)).astype(np.float32)
    wavelength = 2 * np.pi / found
    smooth = (s.original / wavelength - s.low) / (s.high - s.low)
    between = (1 - smooth) * found / s.factor + smooth * found
    scaled = np.where(wavelength > s.original / s.low, found / s.factor, found)
    middle = (wavelength >= s.original / s.high) & (wavelength <= s.original / s.low)
    return np.where(middle, between, scaled).astype(np.float32)


def _slopes(heads: int) -> np.ndarray:
    """How much less a head sees of a position for each step away, float32 [heads]. Press et al. 2021."""
    most = 1 << (heads.bit_length() - 1)
    found = [2 ** (-8 * (n + 1) / most) for n in range(most)] + [2 ** (-4 * (2 * n + 1) / most) for n in range(heads - most)]
    return np.array(found, np.float32)
