"""The graph of Mamba-2 (Dao and Gu 2024): all elements of a head forget at one rate, and groups of heads share what is written to their
state and read from it; past.L.ssm is [states, groups, heads of a group, elements of a head]."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import isinf
from typing import Any

import numpy as np

from tcomp.errors import ImportModelError
from tcomp.frontends.language_models.layers import Weights
from tcomp.frontends.language_models.state_space import Sizes, StateSpaceModel, common_sizes
from tcomp.frontends.language_models.values import Values
from tcomp.ir.graph import Graph, GraphBuilder, Operator, Value
from tcomp.ops import elementwise as ew
from tcomp.ops.movement import RESHAPE, TRANSPOSE
from tcomp.ops.reduction import REDUCE_SUM, RMS_NORM


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Sizes, heads and their groups, and between which numbers steps of time are."""

    sizes: Sizes
    heads: int
    groups: int
    shortest: float
    longest: float


def mamba2_config(given: Mapping[str, Any], where: str) -> Mamba2Config:
    """What a config says, checked. Raises `ImportModelError` for impossible sizes, `UnsupportedError` for another activation."""
    values = Values({key: value for key, value in given.items() if value is not None}, where)
    sizes, heads, groups = common_sizes(values, 128, False), values.number("num_heads", 128), values.number("n_groups", 8)
    if sizes.inner != heads * values.number("head_dim", 64) or heads % groups:
        raise ImportModelError(f"{sizes.inner} elements do not divide into {heads} heads in {groups} groups", where=where)
    limit = given.get("time_step_limit") or (0.0, float("inf"))
    try:
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limit)  # JSON has no infinity of its own
    except (TypeError, ValueError, KeyError):
        raise ImportModelError(f"`time_step_limit` is {limit!r:.40}", where=where, why="two numbers are needed") from None
    return Mamba2Config(sizes, heads, groups, low, high)


@dataclass
class _Mamba2(StateSpaceModel):
    config: Mamba2Config

    def mixer(self, x: Value, prefix: str, layer: int, conv: Value, ssm: Value) -> tuple[Value, Value, Value]:
        c, s, tokens = self.config, self.sizes, x.shape[0]
        found = self.linear(x, f"{prefix}.in_proj", s.inner + self.channels + c.heads, s.bias)
        gate, step = self.part(found, 0, s.inner), self.part(found, s.inner + self.channels, c.heads)
        mixed, rows = self.convolved(self.part(found, s.inner, self.channels), conv, prefix, layer)
        of_head = (tokens, c.groups, c.heads // c.groups)
        u = self.reshaped(self.part(mixed, 0, s.inner), *of_head, s.inner // c.heads)
        into, out = (
            self.add(TRANSPOSE, [self.reshaped(self.part(mixed, first, c.groups * s.states), tokens, c.groups, s.states)], perm=(0, 2, 1))
            for first in (s.inner, s.inner + c.groups * s.states)
        )
        step = self.add(ew.SOFTPLUS, [self.add(ew.ADD, [step, self.floats(f"{prefix}.dt_bias", c.heads)])])
        low, high = c.shortest or None, None if isinf(c.longest) else c.longest  # softplus is positive
        step = step if low is None and high is None else self.add(ew.CLIP_CONST, [step], low=low, high=high)
        a = self.g.constant(-np.exp(self.array(f"{prefix}.A_log", c.heads).astype(np.float32)), f"{prefix}.A")
        kept = self.reshaped(self.add(ew.EXP, [self.add(ew.MUL, [step, a])]), *of_head, 1, name=f"{prefix}.kept")
        change = self.add(ew.MUL, [self.reshaped(step, *of_head, 1), u], f"{prefix}.change")
        y, after = self.scanned(ssm, [kept, change, into, out], [], _step(self.shape), (tokens, *self.shape[1:]), prefix, layer)
        by_head = self.reshaped(self.floats(f"{prefix}.D", c.heads), c.groups, c.heads // c.groups, 1)
        y = self.reshaped(self.add(ew.ADD, [y, self.add(ew.MUL, [u, by_head])]), tokens, s.inner)
        y = self.add(ew.MUL, [y, self.activated(gate, "silu")], f"{prefix}.gated")
        return self.linear(self.group_norm(y, f"{prefix}.norm"), f"{prefix}.out_proj", s.hidden, s.bias), rows, after

    def group_norm(self, x: Value, name: str) -> Value:
        """x [tokens, inner], each group over its root mean square, times weights."""
        parts = self.reshaped(x, x.shape[0], self.config.groups, self.sizes.inner // self.config.groups)
        weights = self.array(f"{name}.weight", self.sizes.inner).astype(np.float32)
        ones = self.g.constant(np.ones(int(parts.shape[-1]), np.float32), "ones")
        y = self.reshaped(self.add(RMS_NORM, [parts, ones], axis=2, epsilon=self.epsilon), *x.shape)
        return self.add(ew.MUL, [y, self.g.constant(weights, f"{name}.weight")], name)


def _step(shape: tuple[int, ...]) -> Graph:
    """What one token does to the state: state = kept * state + change * into, y = sum of state * out."""
    g, (states, groups, heads, size) = GraphBuilder("step"), shape

    def add(op: Operator, *inputs: Value, **attrs: Any) -> Value:
        return g.add(op, inputs, attrs)[0]

    g.input("i", "int64", ())
    state, kept, change = (
        g.input(name, "float32", own) for name, own in (("state", shape), ("kept", (groups, heads, 1)), ("change", (groups, heads, size)))
    )
    into, out = (add(RESHAPE, g.input(name, "float32", (states, groups)), shape=(states, groups, 1, 1)) for name in ("into", "out"))
    after = add(ew.ADD, add(ew.MUL, state, kept), add(ew.MUL, change, into))
    return g.build([after, add(REDUCE_SUM, add(ew.MUL, after, out), axes=(0,), keepdims=False)])


def mamba2_graph(given: Mapping[str, Any], weights: Weights, names: Container[str] = (), where: str = "config.json") -> Graph:
    """The graph of the Mamba-2 that a config describes, of weights that have `names`. Raises as `mamba2_config` and `weights` do."""
    config = mamba2_config(given, where)
    sizes, groups, heads = config.sizes, config.groups, config.heads
    channels, shape = sizes.inner + 2 * groups * sizes.states, (sizes.states, groups, heads // groups, sizes.inner // heads)
    return _Mamba2(weights, sizes.epsilon, sizes, channels, shape, config, g=GraphBuilder("mamba2")).graph()
