"""Operators of one's own in JAX: derivatives of both modes and any order, batches, inside of `tcomp.jax.jit` and of `jax.jit`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax==0.10.2")

import jax.numpy as jnp

import tcomp
import tcomp.jax
from tcomp import te

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


@tcomp.operator
def mixed(x: Any, i: Any) -> Any:
    return te.tanh(x) * x, te.compute((i.shape[0],), lambda n: x[te.cast(i[n], "int64"), 0] * 2.0), te.compute(i.shape, lambda n: i[n] + 1)


def by_jax(x: Any, i: Any) -> Any:
    return jnp.tanh(x) * x, x[i, 0] * 2, i + 1


def test_a_primitive_of_jax():
    i = np.array([2, 0], np.int32)

    def same(transform: Any, *args: Any) -> None:
        expected = jax.jit(transform(by_jax))(*args)
        for jit in (lambda f: f, jax.jit, lambda f: tcomp.jax.jit(f, strict=True, threads=1)):
            for a, b in zip(jax.tree.leaves(jit(transform(mixed))(*args)), jax.tree.leaves(expected), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    def loss(f: Any) -> Any:
        def total(x: Any) -> Any:
            y, z, _ = f(jnp.sin(x), i)
            return jnp.sum(y**2) + jnp.sum(z**3)

        return total

    same(lambda f: f, jnp.asarray(X), i)
    same(lambda f: jax.value_and_grad(loss(f)), X)
    same(lambda f: jax.vmap(lambda x: f(x, jnp.asarray(i))), jnp.stack([X, X + 1]))
    same(lambda f: jax.hessian(loss(f)), X)
