"""The graph of Mamba (Gu and Dao 2023), whose state has the same size after any number of tokens.

    inputs    ids int64 [1, tokens], past.L.conv float32 [kernel - 1, inner] and past.L.ssm float32 [states, inner] for each layer L
    outputs   logits float32 [1, vocabulary] of the last token, present.L.conv and present.L.ssm of the same shapes

Both are zeros in the beginning. With `state`, each run reads one of two places, and writes the other.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcomp.frontends.language_models.layers import Layers, Weights
from tcomp.frontends.language_models.values import MAX_LAYERS, MAX_SIZE, Values
from tcomp.ir.expr import dim
from tcomp.ir.graph import LOOP, Graph, GraphBuilder, Node, Operator, Value, loop_attrs
from tcomp.ops import elementwise as ew
from tcomp.ops.movement import CONCAT, RESHAPE
from tcomp.ops.reduction import REDUCE_SUM, RMS_NORM

MAMBAS = ("mamba", "falcon_mamba")
_TABLE = "backbone.embeddings.weight"
_MAX_KERNEL = 64  # tokens that a convolution sees: each is a product of its own


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes: `inner` of what a layer computes with, `states` of each of these elements, `rank` of time steps, `kernel` tokens that a
    convolution sees; `mixer_epsilon`: that of norms of time steps, inputs and outputs of the recurrence, None without these."""

    vocabulary: int
    hidden: int
    layers: int
    inner: int
    states: int
    rank: int
    kernel: int
    epsilon: float
    tied: bool
    bias: bool
    conv_bias: bool
    activation: str
    mixer_epsilon: float | None


def mamba_config(given: Mapping[str, Any], where: str) -> MambaConfig:
    """What a config says, checked. Raises `ImportModelError` for impossible sizes, `UnsupportedError` for another activation."""
    values = Values({key: value for key, value in given.items() if value is not None and value != "auto"}, where)
    hidden = values.number("hidden_size")
    inner = values.number("intermediate_size", int(values.real("expand", 2) * hidden))
    return MambaConfig(
        values.number("vocab_size"), hidden, values.number("num_hidden_layers", most=MAX_LAYERS), inner, values.number("state_size", 16),
        values.number("time_step_rank", -(-hidden // 16)), values.number("conv_kernel", 4, _MAX_KERNEL),
        values.real("layer_norm_epsilon", 1e-5), values.flag("tie_word_embeddings", True), values.flag("use_bias"),
        values.flag("use_conv_bias", True), values.activation("hidden_act", "silu"),
        values.real("mixer_rms_eps", 1e-6) if given.get("model_type") == "falcon_mamba" else None,
    )  # fmt: skip


@dataclass
class _Mamba(Layers):
    config: MambaConfig

    def graph(self) -> Graph:
        c, g = self.config, self.g
        tokens = dim("tokens", 1, MAX_SIZE)
        ids = g.input("ids", "int64", (1, tokens))
        sizes = {"conv": c.kernel - 1, "ssm": c.states}
        past = [{kind: g.input(f"past.{n}.{kind}", "float32", (rows, c.inner)) for kind, rows in sizes.items()} for n in range(c.layers)]
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

    def mixer(self, x: Value, prefix: str, layer: int, conv: Value, ssm: Value) -> tuple[Value, Value, Value]:
        """(what a layer adds to x [tokens, hidden], its state after these tokens)"""
        c, tokens = self.config, x.shape[0]
        both = self.linear(x, f"{prefix}.in_proj", 2 * c.inner, c.bias)
        before = self.add(CONCAT, [conv, self.part(both, 0, c.inner)], f"{prefix}.before", axis=0)
        kernel = self.array(f"{prefix}.conv1d.weight", c.inner, 1, c.kernel).astype(np.float32)
        u: Value | None = self.floats(f"{prefix}.conv1d.bias", c.inner) if c.conv_bias else None
        for n in range(c.kernel):
            weight = self.g.constant(np.ascontiguousarray(kernel[:, 0, n]), f"{prefix}.conv1d.{n}")
            term = self.add(ew.MUL, [self.part(before, n, tokens, 0), weight])
            u = term if u is None else self.add(ew.ADD, [u, term])
        assert u is not None
        u = self.activated(u, c.activation)
        found = self.linear(u, f"{prefix}.x_proj", c.rank + 2 * c.states)
        step, into, out = (
            self.unit(self.part(found, first, size)) for first, size in ((0, c.rank), (c.rank, c.states), (c.rank + c.states, c.states))
        )
        step = self.add(ew.SOFTPLUS, [self.linear(step, f"{prefix}.dt_proj", c.inner, True)], f"{prefix}.steps")
        y, after = self.recurrence(u, step, into, out, prefix, layer, ssm)
        y = self.add(ew.ADD, [y, self.add(ew.MUL, [u, self.floats(f"{prefix}.D", c.inner)])])
        y = self.add(ew.MUL, [y, self.activated(self.part(both, c.inner, c.inner), c.activation)], f"{prefix}.gated")
        return (
            self.linear(y, f"{prefix}.out_proj", c.hidden, c.bias),
            self.part(before, tokens, c.kernel - 1, 0, f"present.{layer}.conv"),
            after,
        )

    def unit(self, x: Value) -> Value:
        """x [..., size] over its root mean square, where the model has such norms."""
        epsilon = self.config.mixer_epsilon
        ones = np.ones(int(x.shape[-1]), np.float32)
        return x if epsilon is None else self.add(RMS_NORM, [x, self.g.constant(ones, "ones")], axis=len(x.shape) - 1, epsilon=epsilon)

    def recurrence(self, u: Value, step: Value, into: Value, out: Value, prefix: str, layer: int, ssm: Value) -> tuple[Value, Value]:
        """(y [tokens, inner], the last state [states, inner]): state = exp(step * a) * state + step * u * into, y = sum of state * out.

        u, step: [tokens, inner]; into, out: [tokens, states]
        """
        c, tokens = self.config, u.shape[0]
        a = self.g.constant(
            np.ascontiguousarray(-np.exp(self.array(f"{prefix}.A_log", c.inner, c.states).astype(np.float32)).T), f"{prefix}.A"
        )
        rows = [self.add(ew.MUL, [step, u]), step, into, out]
        types = [("float32", (c.states, c.inner)), ("float32", (tokens, c.inner))]
        names = f"present.{layer}.ssm", f"{prefix}.scanned"
        after, y = (Value(self.g.fresh(name), *kind) for name, kind in zip(names, types, strict=True))
        attrs = loop_attrs(tokens, 1, (False,) * len(rows), (False,))
        self.g.append(Node(LOOP, (ssm, *rows, a), (after, y), attrs, f"{prefix}.scan", (_step(c.states, c.inner),)))
        return y, after


def _step(states: int, inner: int) -> Graph:
    """What one token does to the state: the body of a loop, whose outputs are (state [states, inner], y [inner])."""
    g = GraphBuilder("step")

    def add(op: Operator, *inputs: Value, **attrs: Any) -> Value:
        return g.add(op, inputs, attrs)[0]

    g.input("i", "int64", ())
    state, change, step = (
        g.input(name, "float32", shape) for name, shape in (("state", (states, inner)), ("change", (inner,)), ("step", (inner,)))
    )
    into, out = (add(RESHAPE, g.input(name, "float32", (states,)), shape=(states, 1)) for name in ("into", "out"))
    a = g.input("a", "float32", (states, inner))
    after = add(ew.ADD, add(ew.MUL, state, add(ew.EXP, add(ew.MUL, step, a))), add(ew.MUL, change, into))
    return g.build([after, add(REDUCE_SUM, add(ew.MUL, after, out), axes=(0,), keepdims=False)])


def mamba_graph(given: Mapping[str, Any], weights: Weights, names: Container[str] = (), where: str = "config.json") -> Graph:
    """The graph of the Mamba that a config describes, of weights that have `names`. Raises as `mamba_config` and `weights` do."""
    config = mamba_config(given, where)
    return _Mamba(weights, config.epsilon, config, g=GraphBuilder("mamba")).graph()
