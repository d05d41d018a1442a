"""What Mamba and Mamba-2 have in common: state that has the same size after any number of tokens.

    inputs    ids int64 [1, tokens], past.L.conv float32 [kernel - 1, channels] and past.L.ssm float32 [states, ...] for each layer L
    outputs   logits float32 [1, vocabulary] of the last token, present.L.conv and present.L.ssm of the same shapes

Both are zeros in the beginning. With `state`, each run reads one of two places, and writes the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tcomp.frontends.language_models.layers import Layers
from tcomp.frontends.language_models.values import MAX_LAYERS, MAX_SIZE, Values
from tcomp.ir.expr import Dim, dim
from tcomp.ir.graph import LOOP, Graph, Node, Value, loop_attrs
from tcomp.ops import elementwise as ew
from tcomp.ops.movement import CONCAT

MAX_KERNEL = 64  # tokens that a convolution sees: each is a product of its own
_TABLE = "backbone.embeddings.weight"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: `inner` of what a layer computes with, `states` of each of these elements, `kernel` tokens that a convolution sees."""

    vocabulary: int
    hidden: int
    layers: int
    inner: int
    states: int
    kernel: int
    epsilon: float
    tied: bool
    bias: bool
    conv_bias: bool
    activation: str


def common_sizes(values: Values, states: int, tied: bool) -> Sizes:
    """What a config says, or else these defaults. Raises `ImportModelError` for impossible sizes, `UnsupportedError` for another
    activation."""
    hidden = values.number("hidden_size")
    return Sizes(
        values.number("vocab_size"), hidden, values.number("num_hidden_layers", most=MAX_LAYERS),
        values.number("intermediate_size", int(values.real("expand", 2) * hidden)), values.number("state_size", states),
        values.number("conv_kernel", 4, MAX_KERNEL), values.real("layer_norm_epsilon", 1e-5), values.flag("tie_word_embeddings", tied),
        values.flag("use_bias"), values.flag("use_conv_bias", True), values.activation("hidden_act", "silu"),
    )  # fmt: skip


@dataclass
class StateSpaceModel(Layers, ABC):
    """A graph in the making; `channels` are what the convolution of a layer sees, `shape` that of the rest of its state."""

    sizes: Sizes
    channels: int
    shape: tuple[int, ...]

    @abstractmethod
    def mixer(self, x: Value, prefix: str, layer: int, conv: Value, ssm: Value) -> tuple[Value, Value, Value]:
        """(what a layer adds to x [tokens, hidden], its state after these tokens)"""

    def graph(self) -> Graph:
        """The whole."""
        c, g = self.sizes, self.g
        tokens = dim("tokens", 1, MAX_SIZE)
        ids = g.input("ids", "int64", (1, tokens))
        shapes = {"conv": (c.kernel - 1, self.channels), "ssm": self.shape}
        past = [{kind: g.input(f"past.{n}.{kind}", "float32", shape) for kind, shape in shapes.items()} for n in range(c.layers)]
        x = self.rows(self.array(_TABLE, c.vocabulary, c.hidden), self.reshaped(ids, tokens), _TABLE)
        present = list[Value]()
        for n, state in enumerate(past):
            prefix = f"backbone.layers.{n}"
            y, conv, ssm = self.mixer(self.rms_norm(x, f"{prefix}.norm"), f"{prefix}.mixer", n, state["conv"], state["ssm"])
            x = self.add(ew.ADD, [x, y], f"{prefix}.out")
            present += conv, ssm
        y = self.rms_norm(self.last(x), "backbone.norm_f")
        logits = self.by_table(y, _TABLE, c.vocabulary) if c.tied else self.linear(y, "lm_head", c.vocabulary, result="logits")
        return g.build([logits, *present])

    def convolved(self, x: Value, conv: Value, prefix: str, layer: int) -> tuple[Value, Value]:
        """(the activated convolution of x [tokens, channels] along tokens, the last of its rows for the next ones)"""
        c, tokens = self.sizes, x.shape[0]
        before = self.add(CONCAT, [conv, x], f"{prefix}.before", axis=0)
        kernel = self.array(f"{prefix}.conv1d.weight", self.channels, 1, c.kernel).astype(np.float32)
        u: Value | None = self.floats(f"{prefix}.conv1d.bias", self.channels) if c.conv_bias else None
        for n in range(c.kernel):
            weight = self.g.constant(np.ascontiguousarray(kernel[:, 0, n]), f"{prefix}.conv1d.{n}")
            term = self.add(ew.MUL, [self.part(before, n, tokens, 0), weight])
            u = term if u is None else self.add(ew.ADD, [u, term])
        assert u is not None
        return self.activated(u, c.activation), self.part(before, tokens, c.kernel - 1, 0, f"present.{layer}.conv")

    def scanned(
        self, ssm: Value, rows: Sequence[Value], fixed: Sequence[Value], step: Graph, shape: tuple[Dim, ...], prefix: str, layer: int
    ) -> tuple[Value, Value]:
        """(the results [tokens, ...] of `shape` of a step for each of the rows, the state after them)"""
        types = [("float32", self.shape), ("float32", shape)]
        names = f"present.{layer}.ssm", f"{prefix}.scanned"
        after, y = (Value(self.g.fresh(name), *kind) for name, kind in zip(names, types, strict=True))
        attrs = loop_attrs(shape[0], 1, (False,) * len(rows), (False,))
        self.g.append(Node(LOOP, (ssm, *rows, *fixed), (after, y), attrs, f"{prefix}.scan", (step,)))
        return y, after
