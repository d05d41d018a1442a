"""The graph of an encoder, and of a decoder that looks at what it made of a source.

    inputs    source (what a family takes), ids int64 [1, tokens], and for each layer L of the decoder past.L.key and past.L.value
              float32 [past, heads, size], past.L.source_key and past.L.source_value float32 [past_source, heads, size]
    outputs   logits float32 [1, vocabulary] of the last token, present.L... of the same names, each with new rows behind the old ones

The first run is given the whole source and no rows of it; later ones are given a source of no elements and the rows of the first: then the
encoder has nothing to do. With `state` all rows stay where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from tcomp.frontends.language_models.layers import Layers
from tcomp.ir.expr import as_expr, dim
from tcomp.ir.graph import Graph, Value
from tcomp.ir.simplify import as_dim
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import ARANGE, CONCAT, TRANSPOSE
from tcomp.ops.nn import CAUSAL_MASK
from tcomp.ops.reduction import SOFTMAX

KINDS = ("key", "value", "source_key", "source_value")  # of caches of a layer
MAX_TOKENS = 1 << 16  # of a text of models that say no limit


@dataclass(frozen=True, slots=True)
class Part:
    """The names of weights of an attention, and of the norm before it."""

    attention: str
    norm: str


@dataclass
class EncoderDecoder(Layers, ABC):
    """Sizes: `heads` of `size` elements in all attentions, layers of both halves, the most tokens of a text."""

    heads: int
    size: int
    encoder_layers: int
    decoder_layers: int
    positions: int
    own_biases: bool = field(default=False, kw_only=True)

    @abstractmethod
    def source(self) -> Value:
        """Vectors [rows, hidden] of the source, which becomes an input."""

    @abstractmethod
    def embedded(self, ids: Value, places: Value) -> Value:
        """Vectors [tokens, hidden] of tokens at these places."""

    @abstractmethod
    def parts(self, half: str, layer: int) -> tuple[Part, ...]:
        """The attentions of a layer of the half "encoder" or "decoder": of itself, and of the source."""

    @abstractmethod
    def norm(self, x: Value, name: str) -> Value:
        """x [..., hidden] normalised."""

    @abstractmethod
    def projected(self, x: Value, prefix: str, which: str) -> Value:
        """Queries, keys or values ("q", "k", "v") of x, or what becomes of attention ("o")."""

    @abstractmethod
    def mlp(self, x: Value, half: str, layer: int) -> Value:
        """What the last part of a layer adds to x [..., hidden]."""

    @abstractmethod
    def bias(self, half: str, layer: int, queries: Value, keys: Value) -> Value | None:
        """What is added to scores [heads, queries, keys] of what stands at these places, int64 [queries, 1] and [keys], in a layer: the
        first, whose biases are those of the others, unless each layer has `own_biases`."""

    @abstractmethod
    def logits(self, x: Value) -> Value:
        """Those of x [1, hidden], which is what the last layer gave, normalised."""

    @abstractmethod
    def last_norm(self, half: str) -> str:
        """The name of the norm behind the layers of a half."""

    def graph(self) -> Graph:
        """The whole."""
        g, tokens, past = self.g, dim("tokens", 1, self.positions), dim("past", 0, self.positions)
        encoded = self.encoded(self.source())
        ids = g.input("ids", "int64", (1, tokens))
        of_source = dim("past_source", 0)
        caches = [
            [
                g.input(f"past.{n}.{kind}", "float32", (rows, self.heads, self.size))
                for kind, rows in zip(KINDS, (past, past, of_source, of_source), strict=True)
            ]
            for n in range(self.decoder_layers)
        ]
        places = self.add(ARANGE, [], "places", start=past, step=1, count=tokens, dtype="int64")
        keys = self.add(ARANGE, [], "keys", start=0, step=1, count=as_dim(as_expr(past) + tokens), dtype="int64")
        queries, bias = self.reshaped(places, tokens, 1), None
        x, present = self.embedded(self.reshaped(ids, tokens), places), list[Value]()
        for n, cache in enumerate(caches):
            itself, across = self.parts("decoder", n)
            if n == 0 or self.own_biases:
                bias = self.bias("decoder", n, queries, keys)
            h = self.norm(x, itself.norm)
            new = [self.by_heads(h, itself, "k"), self.by_heads(h, itself, "v")]
            new += [self.by_heads(encoded, across, "k"), self.by_heads(encoded, across, "v")]
            grown = [
                self.add(CONCAT, [old, rows], f"present.{n}.{kind}", axis=0) for old, rows, kind in zip(cache, new, KINDS, strict=True)
            ]
            x = self.attended(x, h, itself, grown[0], grown[1], bias, places)
            x = self.attended(x, self.norm(x, across.norm), across, grown[2], grown[3])
            x = self.add(ew.ADD, [x, self.mlp(x, "decoder", n)], f"decoder.{n}")
            present += grown
        return g.build([self.logits(self.norm(self.last(x), self.last_norm("decoder"))), *present])

    def encoded(self, x: Value) -> Value:
        """What the encoder makes of vectors [rows, hidden]."""
        rows = x.shape[0]
        places = self.add(ARANGE, [], "source_places", start=0, step=1, count=rows, dtype="int64")
        queries, bias = self.reshaped(places, rows, 1), None
        for n in range(self.encoder_layers):
            if n == 0 or self.own_biases:
                bias = self.bias("encoder", n, queries, places)
            (itself,) = self.parts("encoder", n)
            h = self.norm(x, itself.norm)
            keys, values = self.by_heads(h, itself, "k"), self.by_heads(h, itself, "v")
            x = self.attended(x, h, itself, keys, values, bias)
            x = self.add(ew.ADD, [x, self.mlp(x, "encoder", n)], f"encoder.{n}")
        return self.norm(x, self.last_norm("encoder"))

    def by_heads(self, x: Value, part: Part, which: str) -> Value:
        """Queries, keys or values of x [rows, hidden] as [rows, heads, size]."""
        return self.reshaped(self.projected(x, part.attention, which), x.shape[0], self.heads, self.size)

    def attended(
        self, x: Value, h: Value, part: Part, keys: Value, values: Value, bias: Value | None = None, places: Value | None = None
    ) -> Value:
        """x and the attention of h to keys and values [rows, heads, size]; with `places`, the rows of h among them, to none behind."""
        q, k, v = (self.add(TRANSPOSE, [y], perm=(1, 0, 2)) for y in (self.by_heads(h, part, "q"), keys, values))
        scores = self.add(MATMUL, [q, k], f"{part.attention}.scores", transpose_a=False, transpose_b=True)
        scores = scores if bias is None else self.add(ew.ADD, [scores, bias])
        scores = scores if places is None else self.add(CAUSAL_MASK, [scores, places, None])
        weights = self.add(SOFTMAX, [scores], f"{part.attention}.weights", axes=(2,))
        y = self.add(MATMUL, [weights, v], f"{part.attention}.values", transpose_a=False, transpose_b=False)
        y = self.reshaped(self.add(TRANSPOSE, [y], perm=(1, 0, 2)), x.shape[0], self.heads * self.size)
        return self.add(ew.ADD, [x, self.projected(y, part.attention, "o")], f"{part.attention}.out")
