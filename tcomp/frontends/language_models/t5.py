"""T5 (Raffel et al. 2020), and mT5 and UMT5: `source` int64 [1, source] are tokens; positions are biases of scores by distance, in UMT5
(Chung et al. 2023) other ones in each layer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from tcomp.errors import ImportModelError
from tcomp.frontends.language_models.encoder_decoder import MAX_TOKENS, EncoderDecoder, Part
from tcomp.frontends.language_models.layers import Weights
from tcomp.frontends.language_models.values import MAX_LAYERS, Values
from tcomp.ir.expr import dim
from tcomp.ir.graph import Graph, GraphBuilder, Value
from tcomp.ops import elementwise as ew
from tcomp.ops.movement import GATHER

T5S = ("t5", "mt5", "umt5")
_TABLE = "shared.weight"
_ATTENTIONS = {"encoder": ("SelfAttention",), "decoder": ("SelfAttention", "EncDecAttention")}


@dataclass(frozen=True, slots=True)
class T5Config:
    """Sizes; `buckets` of distances, all from `distance` on in the last one; `scaled`: what becomes logits is divided by a root first;
    `own_head`: logits have a matrix of their own."""

    vocabulary: int
    hidden: int
    inner: int
    buckets: int
    distance: int
    gated: bool
    activation: str
    scaled: bool
    own_head: bool


@dataclass
class _T5(EncoderDecoder):
    config: T5Config

    def source(self) -> Value:
        rows = dim("source", 0, MAX_TOKENS)
        return self.vectors(self.reshaped(self.g.input("source", "int64", (1, rows)), rows))

    def vectors(self, ids: Value) -> Value:
        return self.rows(self.array(_TABLE, self.config.vocabulary, self.config.hidden), ids, _TABLE)

    def embedded(self, ids: Value, places: Value) -> Value:
        return self.vectors(ids)

    def parts(self, half: str, layer: int) -> tuple[Part, ...]:
        prefix = f"{half}.block.{layer}.layer"
        return tuple(Part(f"{prefix}.{n}.{name}", f"{prefix}.{n}.layer_norm") for n, name in enumerate(_ATTENTIONS[half]))

    def last_norm(self, half: str) -> str:
        return f"{half}.final_layer_norm"

    def norm(self, x: Value, name: str) -> Value:
        return self.rms_norm(x, name)

    def projected(self, x: Value, prefix: str, which: str) -> Value:
        return self.linear(x, f"{prefix}.{which}", self.config.hidden if which == "o" else self.heads * self.size)

    def mlp(self, x: Value, half: str, layer: int) -> Value:
        c, prefix = self.config, f"{half}.block.{layer}.layer.{len(_ATTENTIONS[half])}"
        x, dense = self.norm(x, f"{prefix}.layer_norm"), f"{prefix}.DenseReluDense"
        h = self.activated(self.linear(x, f"{dense}.{'wi_0' if c.gated else 'wi'}", c.inner), c.activation)
        h = self.add(ew.MUL, [h, self.linear(x, f"{dense}.wi_1", c.inner)]) if c.gated else h
        return self.linear(h, f"{dense}.wo", c.hidden)

    def bias(self, half: str, layer: int, queries: Value, keys: Value) -> Value | None:
        c = self.config
        found = self.array(f"{half}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight", c.buckets, self.heads)
        away = np.arange(-c.distance, c.distance + 1)
        of_distance = found.astype(np.float32)[_buckets(away, c.buckets, c.distance, half == "encoder")].T
        table = self.g.constant(np.ascontiguousarray(of_distance), f"{half}.{layer}.biases")
        middle = self.g.constant(np.array(c.distance), "middle")
        place = self.add(ew.ADD, [self.add(ew.SUB, [keys, queries]), middle], f"{half}.distances")
        place = self.add(ew.CLIP_CONST, [place], low=0, high=2 * c.distance)
        return self.add(GATHER, [table, place], f"{half}.bias", axis=1)

    def logits(self, x: Value) -> Value:
        c = self.config
        x = self.add(ew.SCALE, [x], factor=c.hidden**-0.5) if c.scaled else x
        return self.linear(x, "lm_head", c.vocabulary, result="logits") if c.own_head else self.by_table(x, _TABLE, c.vocabulary)


def _buckets(away: np.ndarray, count: int, distance: int, both: bool) -> np.ndarray:
    """The buckets of keys that are so many places behind the query: half of them for each direction where there are `both`, half of these
    for one distance each, and the others for more and more."""
    later = np.zeros(away.shape, np.int64)
    if both:
        count //= 2
        later = (away > 0) * count
    steps = np.abs(away) if both else np.maximum(-away, 0)
    exact = count // 2
    with np.errstate(divide="ignore"):
        far = np.log(steps.astype(np.float32) / np.float32(exact)) / np.float32(log(distance / exact)) * np.float32(count - exact)
    large = exact + np.where(steps < exact, 0, far).astype(np.int64)
    found: np.ndarray = later + np.where(steps < exact, steps, np.minimum(large, count - 1))
    return found


def t5_graph(given: Mapping[str, Any], weights: Weights, names: Container[str], where: str = "config.json") -> Graph:
    """The graph of the T5 that a config describes, of weights that have these names. Raises `ImportModelError` for impossible sizes, and
    what `weights` raises."""
    values = Values({key: value for key, value in given.items() if value is not None}, where)
    heads, layers = values.number("num_heads", 8), values.number("num_layers", 6, MAX_LAYERS)
    kind = given.get("model_type")
    form = given.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
    first, _, last = str(form).rpartition("-")
    if first not in ("", "gated"):
        raise ImportModelError(f"`feed_forward_proj` is {form!r:.40}", where=where)
    activation = "gelu_new" if form == "gated-gelu" else Values({"activation": last}, where).activation("activation", "relu")
    buckets, distance = values.number("relative_attention_num_buckets", 32), values.number("relative_attention_max_distance", 128)
    if buckets < 4 or buckets % 4 or distance <= buckets // 2 or distance > MAX_TOKENS:
        raise ImportModelError(f"{buckets} buckets for distances up to {distance}", where=where)
    scaled = kind != "mt5" and values.flag("scale_decoder_outputs", given.get("tie_word_embeddings") is not False)
    config = T5Config(
        values.number("vocab_size"), values.number("d_model"), values.number("d_ff"), buckets, distance, first == "gated", activation,
        scaled, "lm_head.weight" in names,
    )  # fmt: skip
    decoder_layers = values.number("num_decoder_layers", layers, MAX_LAYERS)
    sizes = heads, values.number("d_kv", 64), layers, decoder_layers, MAX_TOKENS
    return _T5(weights, values.real("layer_norm_epsilon", 1e-6), *sizes, config, own_biases=kind == "umt5", g=GraphBuilder("t5")).graph()
