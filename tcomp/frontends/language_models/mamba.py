"""The graph of Mamba (Gu and Dao 2023), each of whose elements has state of its own: past.L.ssm is [states, inner]."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcomp.frontends.language_models.layers import Weights
from tcomp.frontends.language_models.state_space import Sizes, StateSpaceModel, common_sizes
from tcomp.frontends.language_models.values import Values
from tcomp.ir.graph import Graph, GraphBuilder, Operator, Value
from tcomp.ops import elementwise as ew
from tcomp.ops.movement import RESHAPE
from tcomp.ops.reduction import REDUCE_SUM, RMS_NORM

MAMBAS = ("mamba", "falcon_mamba")


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes; `rank` of time steps; `mixer_epsilon`: that of norms of time steps, inputs and outputs of the recurrence, None without
    these."""

    sizes: Sizes
    rank: int
    mixer_epsilon: float | None


def mamba_config(given: Mapping[str, Any], where: str) -> MambaConfig:
    """What a config says, checked. Raises `ImportModelError` for impossible sizes, `UnsupportedError` for another activation."""
    values = Values({key: value for key, value in given.items() if value is not None and value != "auto"}, where)
    sizes = common_sizes(values, 16, True)
    epsilon = values.real("mixer_rms_eps", 1e-6) if given.get("model_type") == "falcon_mamba" else None
    return MambaConfig(sizes, values.number("time_step_rank", -(-sizes.hidden // 16)), epsilon)


@dataclass
class _Mamba(StateSpaceModel):
    config: MambaConfig

    def mixer(self, x: Value, prefix: str, layer: int, conv: Value, ssm: Value) -> tuple[Value, Value, Value]:
        c, rank = self.sizes, self.config.rank
        both = self.linear(x, f"{prefix}.in_proj", 2 * c.inner, c.bias)
        u, rows = self.convolved(self.part(both, 0, c.inner), conv, prefix, layer)
        found = self.linear(u, f"{prefix}.x_proj", rank + 2 * c.states)
        step, into, out = (
            self.unit(self.part(found, first, size)) for first, size in ((0, rank), (rank, c.states), (rank + c.states, c.states))
        )
        step = self.add(ew.SOFTPLUS, [self.linear(step, f"{prefix}.dt_proj", c.inner, True)], f"{prefix}.steps")
        y, after = self.recurrence(u, step, into, out, prefix, layer, ssm)
        y = self.add(ew.ADD, [y, self.add(ew.MUL, [u, self.floats(f"{prefix}.D", c.inner)])])
        y = self.add(ew.MUL, [y, self.activated(self.part(both, c.inner, c.inner), c.activation)], f"{prefix}.gated")
        return self.linear(y, f"{prefix}.out_proj", c.hidden, c.bias), rows, after

    def unit(self, x: Value) -> Value:
        """x [..., size] over its root mean square, where the model has such norms."""
        epsilon = self.config.mixer_epsilon
        ones = np.ones(int(x.shape[-1]), np.float32)
        return x if epsilon is None else self.add(RMS_NORM, [x, self.g.constant(ones, "ones")], axis=len(x.shape) - 1, epsilon=epsilon)

    def recurrence(self, u: Value, step: Value, into: Value, out: Value, prefix: str, layer: int, ssm: Value) -> tuple[Value, Value]:
        """(y [tokens, inner], the last state [states, inner]): state = exp(step * a) * state + step * u * into, y = sum of state * out.

        u, step: [tokens, inner]; into, out: [tokens, states]
        """
        c = self.sizes
        a = -np.exp(self.array(f"{prefix}.A_log", c.inner, c.states).astype(np.float32)).T
        fixed = [self.g.constant(np.ascontiguousarray(a), f"{prefix}.A")]
        rows = [self.add(ew.MUL, [step, u]), step, into, out]
        return self.scanned(ssm, rows, fixed, _step(c.states, c.inner), (u.shape[0], c.inner), prefix, layer)


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
    sizes = config.sizes
    shape = sizes.states, sizes.inner
    return _Mamba(weights, sizes.epsilon, sizes, sizes.inner, shape, config, g=GraphBuilder("mamba")).graph()
