"""Networks of Flax and Equinox, a step of Optax, an equation that Diffrax solves: as `jax.jit` computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax==0.10.2")

import jax.numpy as jnp

import tcomp.jax
from tests.frontends.jax.test_jit import same

KEY = jax.random.key(0)


def test_flax_transformer_and_a_step_of_optax():
    linen: Any = pytest.importorskip("flax.linen", reason="Flax is not installed: pip install flax")
    optax = pytest.importorskip("optax", reason="Optax is not installed: pip install optax")

    class Transformer(linen.Module):
        @linen.compact
        def __call__(self, ids: Any) -> Any:
            x = linen.Embed(20, 16)(ids) + linen.Embed(8, 16)(jnp.arange(8))
            mask = linen.make_causal_mask(ids)
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x), mask=mask)
            x = x + linen.Dense(16)(linen.gelu(linen.Dense(32)(linen.LayerNorm()(x))))
            return linen.Dense(20)(x)

    model, ids = Transformer(), jax.random.randint(KEY, (3, 8), 0, 20)
    params, optimizer = model.init(KEY, ids), optax.adamw(1e-2, eps=1e-3)
    same(model.apply, params, ids, rtol=1e-4, atol=1e-4)

    def step(params: Any, state: Any, ids: Any) -> Any:
        def loss(p: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(p, ids)[:, :-1], ids[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    same(step, params, optimizer.init(params), ids, rtol=1e-3, atol=1e-3)


def test_flax_convolutions():
    linen: Any = pytest.importorskip("flax.linen", reason="Flax is not installed: pip install flax")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(linen.Conv(8, (3, 3))(x)))
            x = linen.max_pool(x, (2, 2), (2, 2))
            x = linen.avg_pool(linen.relu(linen.Conv(8, (3, 3), (2, 2), feature_group_count=8)(x)), (2, 2))
            return linen.Dense(5)(x.reshape(x.shape[0], -1))

    model, x = Net(), jax.random.normal(KEY, (2, 16, 16, 3))
    variables = model.init(KEY, x)
    same(model.apply, variables, x, rtol=1e-4, atol=1e-4)

    def loss(variables: Any, x: Any) -> Any:
        y, changed = model.apply(variables, x, train=True, mutable=["batch_stats"])
        return jnp.sum(y**2), changed

    same(jax.grad(loss, has_aux=True), variables, x, rtol=1e-3, atol=1e-2)


def test_equinox():
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")
    model = equinox.nn.MLP(4, 2, 16, 2, activation=jax.nn.silu, key=KEY)
    x = jax.random.normal(KEY, (5, 4))
    arrays, rest = equinox.partition(model, equinox.is_array)

    def loss(arrays: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(equinox.combine(arrays, rest))(x) ** 2)

    same(jax.value_and_grad(loss), arrays, x)


def test_errors_of_equinox():
    """A branch that reports an error ends the run; JAX then raises it."""
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")

    def function(x: Any) -> Any:
        return equinox.error_if(x, x < 0, "it is negative") * 2

    same(function, jnp.float32(3))
    with pytest.raises(Exception, match="it is negative"):
        jax.block_until_ready(tcomp.jax.jit(function, strict=True)(jnp.float32(-3)))


def test_diffrax():
    diffrax = pytest.importorskip("diffrax", reason="Diffrax is not installed: pip install diffrax")

    def solve(y: Any, rate: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: jnp.stack([y[1], args * (1 - y[0] ** 2) * y[1] - y[0]]))
        saved = diffrax.SaveAt(ts=jnp.linspace(0, 2, 5))
        control = diffrax.PIDController(rtol=1e-5, atol=1e-5)
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 2, 0.1, y, args=rate, saveat=saved, stepsize_controller=control).ys

    found = same(solve, jnp.array([1.0, 0.0]), 1.5, rtol=1e-3, atol=1e-3)
    assert np.isfinite(np.asarray(found)).all()
