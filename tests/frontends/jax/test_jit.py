"""`tcomp.jax.jit`: pytrees, types, control flow, derivatives, batches, random numbers, refusals; results are those of `jax.jit`."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax==0.10.2")

import jax.numpy as jnp
from jax import lax

import tcomp
import tcomp.jax
from tcomp.errors import InputError, UnsupportedError
from tcomp.frontends.jax import import_jaxpr

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def same(function: Any, *args: Any, rtol: float = 1e-5, atol: float = 1e-5) -> Any:
    """The results of a function, which are those of `jax.jit`, in structure, type and value."""
    found, wanted = tcomp.jax.jit(function, strict=True, threads=1)(*args), jax.jit(function)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(a, jax.Array) and (a.dtype, a.shape) == (b.dtype, b.shape)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)
    return found


def test_trees_and_types():
    same(lambda a, b: {"sum": a["x"] + b, "others": (b, [a["y"]], None)}, {"x": X, "y": jnp.arange(3)}, 2)
    same(lambda x: (x.astype(jnp.bfloat16) * 3, x > 0, (x * 9).astype(jnp.int8) // 2, (x * 9).astype(jnp.uint32) >> 1), X)
    same(lambda x: (x, x, x), X)
    same(lambda x: (), X)


def test_one_code_for_each_type():
    calls = []

    @tcomp.jax.jit
    def function(x: Any, scale: Any = 2.0) -> Any:
        calls.append(x.shape)
        return x * scale

    for x in (X, X + 1, X[:2], X.astype(np.float16), X):
        np.testing.assert_allclose(function(x), x * x.dtype.type(2))
    assert len(calls) == 3
    np.testing.assert_allclose(function(X, scale=3.0), X * 3)
    assert function.__name__ == "function"


def test_64_bits():
    with jax.enable_x64(True):
        assert same(lambda x: (jnp.sin(x), jnp.arange(3)), X.astype(np.float64), rtol=1e-13)[0].dtype == jnp.float64
    assert same(jnp.sin, X.astype(np.float64)).dtype == jnp.float32


def test_static_arguments():
    power = tcomp.jax.jit(lambda x, n, *, name="up": x**n if name == "up" else -x, static_argnums=1, static_argnames="name", strict=True)
    np.testing.assert_allclose(power(X, 3), X**3, rtol=1e-5)
    np.testing.assert_allclose(power(X, 2), X**2, rtol=1e-5)
    np.testing.assert_allclose(power(X, 2, name="down"), -X)
    with pytest.raises(InputError, match="not hashable"):
        power(X, [2])


def test_a_method():
    class Model:
        @partial(tcomp.jax.jit, static_argnums=0, strict=True)
        def __call__(self, x: Any) -> Any:
            return x + 1

    np.testing.assert_allclose(Model()(X), X + 1)


def test_control_flow():
    same(lambda x: lax.scan(lambda c, a: (c + a, (c * 2, a)), x[0], x), X)
    same(lambda x: lax.scan(lambda c, a: (c * 0.5 + a, c), x[0], x, reverse=True), X)
    same(lambda x: lax.fori_loop(0, 5, lambda i, v: v * 0.5 + i, x), X)
    for least in (-1, 4):
        same(lambda n, x: lax.while_loop(lambda c: c[0] > n, lambda c: (c[0] - 1, c[1] + c[0]), (3, x)), least, X)
    for sign in (1, -1):
        same(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda y: y * 2, x), sign * X)
    for n in (-1, 0, 1, 2, 5):
        same(lambda i, x: lax.switch(i, [lambda y: y, lambda y: y * 2, jnp.sin], x), n, X)
    same(jax.vmap(lambda n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0))), jnp.arange(4))


def test_derivatives_and_batches():
    def loss(w: Any, x: Any) -> Any:
        y = jax.checkpoint(lambda v: jnp.tanh(v @ w))(x)
        return jnp.mean(jax.nn.relu(y) ** 2) + jax.nn.logsumexp(y)

    w = X.T[:, :3]
    same(jax.value_and_grad(loss), w, X)
    same(jax.vmap(jax.grad(loss), (None, 0)), w, X[:, None])
    same(jax.hessian(lambda x: jnp.sum(jnp.sin(x) * x[::-1])), X[0])
    same(lambda x: jax.jvp(lambda v: lax.scan(lambda c, a: (c * a, c), v[0], v)[0], (x,), (x,)), X)
    same(jax.grad(lambda x: jnp.sum(jnp.sort(x, 0)[1:] * x[2])), X)


def test_convolutions_and_windows():
    x, w = np.random.default_rng(1).normal(size=(2, 9, 8, 4)).astype(np.float32), np.ones((3, 2, 2, 6), np.float32)
    numbers = ("NHWC", "HWIO", "NHWC")

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=numbers, feature_group_count=2)

    same(conv, x, w, rtol=1e-4)
    same(jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1)), x, w, rtol=1e-4, atol=1e-3)
    same(jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), "SAME") ** 2)), x)
    same(lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4, x)
    same(lambda x: jnp.cumsum(x, 1)[:, ::2] + lax.cummax(x, 2, reverse=True)[:, ::2], x)


def test_places_that_data_tells():
    i = np.array([3, -1, 0, 9])
    same(lambda x, i: (x[i], x.at[i].get(mode="clip"), x[:, i % 6]), X, i)
    same(lambda x, i: ((x + 1j).at[i].get(mode="fill"), (x > 0).at[i].get(mode="fill"), jnp.arange(4).at[i].get(mode="fill")), X, i)
    same(lambda x, i: (x + 1j).at[i].get(mode="fill", fill_value=2 - 3j), X, i)
    same(lambda x, i: (x.at[i].add(1.0), x.at[i, i].set(7.0), x.at[i].max(0.5, mode="drop")), X, i)
    same(lambda x, n: (lax.dynamic_slice(x, (n, n), (2, 3)), lax.dynamic_update_slice(x, x[:2, :2], (n, 0))), X, 3)
    same(lambda x: (jnp.argsort(x, 1), lax.top_k(x, 3), jnp.argmax(x, 0), jnp.median(x, 1), jnp.unique(x > 0, size=2)), X)
    same(lambda x: (jnp.searchsorted(jnp.sort(x[0]), x), jnp.histogram(x, 4)), X)


def test_random_numbers_are_those_of_jax():
    for key in (jax.random.key(7), jax.random.PRNGKey(7)):
        same(lambda k: (jax.random.split(k, 3), jax.random.fold_in(k, 5), jax.random.normal(k, (3, 2)), jax.random.permutation(k, 5)), key)
    same(lambda n: jax.random.bernoulli(jax.random.key(n), 0.3, (8,)), 3)
    known = jax.random.key(3)  # a constant
    same(lambda x: (jax.random.uniform(known, (3,)) + x, lax.fori_loop(0, 2, lambda i, k: jax.random.split(k)[0], known)), 1.0)


def test_complex_numbers():
    same(lambda x: (jnp.abs(jnp.exp(1j * x) / (2 + x + 1j)), (x + 1j) @ (x.T - 2j), jnp.angle(x * 1j), jnp.conj(x + 1j)[1:]), X)
    same(lambda x: (jnp.max(x + 1j, 0), jnp.prod(x + 1j, 1), jnp.cumprod(x + 1j, 1), jnp.minimum(x + 1j, 0)), X, rtol=1e-4)


def test_special_functions():
    s = jax.scipy.special
    same(lambda x: (s.gammaln(x), s.erfinv(jnp.tanh(x)), s.erfc(x), s.i0e(x), s.i1e(x), jnp.cbrt(x), jnp.expm1(x), jnp.log1p(x * x)), X)
    same(lambda x: (s.zeta(jnp.abs(x) + 2, 1.5), s.polygamma(1, jnp.abs(x) + 0.1)), X, rtol=1e-4)
    same(lambda x: (s.digamma(jnp.abs(x) + 0.1), s.gammainc(jnp.abs(x) + 1, 1.0), s.betainc(2.0, 3.0, jax.nn.sigmoid(x))), X, rtol=1e-4)


def test_linear_algebra_and_transforms():
    a = X[:, :4] @ X[:, :4].T + 4 * np.eye(4, dtype=np.float32)
    same(lambda a, b: (jnp.linalg.cholesky(a), jnp.linalg.solve(a, b), jnp.linalg.inv(a), jnp.linalg.slogdet(a)), a, X, rtol=1e-4)
    same(lambda a, b: jax.scipy.linalg.solve_triangular(a + 1j, b, lower=True, trans=2), a, X, rtol=1e-4)
    same(lambda x: (jnp.fft.fft(x), jnp.fft.rfft2(x), jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.ifft2(x)), X, rtol=1e-4)


def test_attention_is_one_kernel():
    """A softmax is recognised, and joined with the product behind it."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / 8) @ v

    given = [np.random.default_rng(n).normal(size=(2, 32, 16)).astype(np.float32) for n in range(3)]
    same(attention, *given, rtol=1e-4)
    graph = import_jaxpr(jax.jit(attention).trace(*given).jaxpr).graph
    assert "softmax" in [node.op.name for node in graph.nodes]
    same(jax.grad(lambda *x: jnp.sum(attention(*x) ** 2), (0, 1, 2)), *given, rtol=1e-4)


def test_what_is_not_supported_runs_in_jax(caplog):
    def function(x: Any) -> Any:
        return jnp.linalg.eigh(x @ x.T)[0]

    with caplog.at_level(logging.WARNING, "tcomp"):
        np.testing.assert_allclose(tcomp.jax.jit(function)(X), jax.jit(function)(X), rtol=1e-4)
    assert "eigh" in caplog.text
    with pytest.raises(UnsupportedError, match="eigh") as refused:
        tcomp.jax.jit(function, strict=True)(X)
    assert "test_jit.py" in refused.value.where
    with pytest.raises(UnsupportedError, match="`fft` is not supported for more than 1024 elements"):
        tcomp.jax.jit(jnp.fft.fft, strict=True)(np.zeros(2000, np.float32))


def test_inside_of_what_jax_traces():
    double = tcomp.jax.jit(lambda x: x * 2 + 1, strict=True)
    np.testing.assert_allclose(jax.jit(lambda x: double(x) + 1)(X), X * 2 + 2)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(double(x)))(X), np.full_like(X, 2))


def test_an_artifact(tmp_path):
    model = tcomp.compile(lambda x, w: {"y": jnp.tanh(x @ w)}, args=(X, X.T))
    model.save(tmp_path / "model.tcomp")
    found = tcomp.load(tmp_path / "model.tcomp").run({"x": X, "w": X.T})
    np.testing.assert_allclose(found["y"], np.tanh(X @ X.T), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="example"):
        tcomp.compile(lambda x: x)


def test_an_artifact_of_symbolic_sizes():
    from jax import export

    rows, columns = export.symbolic_shape("rows, columns")

    def function(x):
        mixed = jax.nn.softmax(x @ x.swapaxes(1, 2), -1) @ x
        sums = lax.scan(lambda s, row: (s + row, s * 2), jnp.zeros((x.shape[0], 3)), x.swapaxes(0, 1))
        flat = jnp.concatenate([mixed, x], -1).reshape(-1, 6).sum(0) / x.shape[0]
        return flat, jnp.flip(mixed, 1)[:, 1:], lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 1, 1), "SAME"), sums

    module = tcomp.compile(function, args=(jax.ShapeDtypeStruct((rows, columns, 3), np.float32),), threads=1)
    for shape in ((2, 4, 3), (1, 7, 3)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        for found, wanted in zip(module(x), jax.tree.leaves(function(x)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedError, match="fft"):
        tcomp.compile(jnp.fft.rfft, args=(jax.ShapeDtypeStruct((rows,), np.float32),))


def test_symbolic_sizes_in_the_body_of_a_loop():
    (size,) = jax.export.symbolic_shape("size")

    def function(x, rows):
        return lax.scan(lambda state, row: (jnp.nextafter(state, row), state), x, rows)

    shapes = jax.ShapeDtypeStruct((size,), np.float32), jax.ShapeDtypeStruct((3, size), np.float32)
    x, rows = np.float32([1, -2]), np.float32([[5, 5], [-5, -5], [0, 0]])
    for found, wanted in zip(tcomp.compile(function, args=shapes, threads=1)(x, rows), function(x, rows), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_tcomp_does_not_load_jax():
    done = subprocess.run(
        [sys.executable, "-c", "import tcomp, sys; print('jax' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
