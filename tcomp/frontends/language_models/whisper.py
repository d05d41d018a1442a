"""Whisper (Radford et al. 2022): `source` float32 [1, mels, frames] are logarithms of a spectrogram, two frames of which become a row."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from tcomp.errors import ImportModelError
from tcomp.frontends.language_models.encoder_decoder import MAX_TOKENS, EncoderDecoder, Part
from tcomp.frontends.language_models.layers import Weights
from tcomp.frontends.language_models.values import MAX_LAYERS, Values
from tcomp.ir.expr import dim
from tcomp.ir.graph import Graph, GraphBuilder, Value
from tcomp.ops import elementwise as ew
from tcomp.ops.movement import ARANGE, GATHER, PAD, TRANSPOSE
from tcomp.ops.nn import CONV

_EPSILON = 1e-5  # of all norms, which configs do not say
_TABLE = "model.decoder.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """Sizes: `inner` of the layers of each half, `rows` of the longest source."""

    vocabulary: int
    mels: int
    hidden: int
    inner: Mapping[str, int]
    rows: int
    activation: str


@dataclass
class _Whisper(EncoderDecoder):
    config: WhisperConfig

    def source(self) -> Value:
        c = self.config
        x = self.g.input("source", "float32", (1, c.mels, dim("frames", 0, 2 * c.rows)))
        for number, stride in ((1, 1), (2, 2)):
            name = f"model.encoder.conv{number}"
            weights, bias = self.floats(f"{name}.weight", c.hidden, int(x.shape[1]), 3), self.floats(f"{name}.bias", c.hidden)
            x = self.add(PAD, [x, None], before=(0, 0, 1), after=(0, 0, 1))
            x = self.add(CONV, [x, weights], name, strides=(stride,), dilations=(1,), group=1)
            x = self.add(ew.GELU, [self.add(ew.ADD, [x, self.reshaped(bias, c.hidden, 1)])], approximate="none")
        rows = x.shape[2]
        x = self.reshaped(self.add(TRANSPOSE, [x], perm=(0, 2, 1)), rows, c.hidden)
        places = self.add(ARANGE, [], "rows", start=0, step=1, count=rows, dtype="int64")
        return self.placed(x, places, "encoder", c.rows)

    def placed(self, x: Value, places: Value, half: str, count: int) -> Value:
        table = self.floats(f"model.{half}.embed_positions.weight", count, self.config.hidden)
        return self.add(ew.ADD, [x, self.add(GATHER, [table, places], axis=0)], f"{half}.placed")

    def embedded(self, ids: Value, places: Value) -> Value:
        c = self.config
        x = self.rows(self.array(_TABLE, c.vocabulary, c.hidden), ids, _TABLE)
        return self.placed(x, places, "decoder", self.positions)

    def parts(self, half: str, layer: int) -> tuple[Part, ...]:
        names = ("self_attn",) if half == "encoder" else ("self_attn", "encoder_attn")
        return tuple(Part(f"model.{half}.layers.{layer}.{name}", f"model.{half}.layers.{layer}.{name}_layer_norm") for name in names)

    def last_norm(self, half: str) -> str:
        return f"model.{half}.layer_norm"

    def norm(self, x: Value, name: str) -> Value:
        return self.layer_norm(x, name)

    def projected(self, x: Value, prefix: str, which: str) -> Value:
        y = self.linear(x, f"{prefix}.{'out' if which == 'o' else which}_proj", self.config.hidden, which != "k")
        return self.add(ew.SCALE, [y], factor=self.size**-0.5) if which == "q" else y

    def mlp(self, x: Value, half: str, layer: int) -> Value:
        c, prefix = self.config, f"model.{half}.layers.{layer}"
        h = self.linear(self.norm(x, f"{prefix}.final_layer_norm"), f"{prefix}.fc1", c.inner[half], True)
        return self.linear(self.activated(h, c.activation), f"{prefix}.fc2", c.hidden, True)

    def bias(self, half: str, layer: int, queries: Value, keys: Value) -> Value | None:
        return None

    def logits(self, x: Value) -> Value:
        return self.by_table(x, _TABLE, self.config.vocabulary)


def whisper_graph(given: Mapping[str, Any], weights: Weights, names: Container[str], where: str = "config.json") -> Graph:
    """The graph of the Whisper that a config describes. Raises `ImportModelError` for impossible sizes, and what `weights` raises."""
    values = Values({key: value for key, value in given.items() if value is not None}, where)
    hidden, heads = values.number("d_model"), values.number("encoder_attention_heads")
    if values.number("decoder_attention_heads") != heads or hidden % heads:
        raise ImportModelError(f"{hidden} elements do not divide into the heads of both halves", where=where)
    config = WhisperConfig(
        values.number("vocab_size"), values.number("num_mel_bins", 80), hidden,
        {half: values.number(f"{half}_ffn_dim") for half in ("encoder", "decoder")}, values.number("max_source_positions", 1500),
        values.activation("activation_function", "gelu"),
    )  # fmt: skip
    layers = {half: values.number(f"{half}_layers", most=MAX_LAYERS) for half in ("encoder", "decoder")}
    positions, builder = values.number("max_target_positions", 448, MAX_TOKENS), GraphBuilder("whisper")
    return _Whisper(weights, _EPSILON, heads, hidden // heads, layers["encoder"], layers["decoder"], positions, config, g=builder).graph()
