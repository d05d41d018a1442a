"""`tcomp.jax.jit` and `jax.jit`, side by side: `python -m benchmarks.jax_jit [--only mlp,scan] [--threads 2]`.

Networks of Flax and Equinox with parameters closed over, their derivatives with a step of Optax (parameters are arguments), batches,
recurrences, an equation solved by Diffrax. Both are called in turns, least times are taken, results are compared first. A ratio below 1
says that tcomp is faster. XLA takes all cores there are, so that `taskset` says for both how many.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tcomp.jax
from benchmarks.timing import geomean, least_times

Made = tuple[Callable[..., Any], tuple[Any, ...]]
KEY = jax.random.key(0)


def _linen() -> Any:
    import flax.linen

    return flax.linen


def _normal(*shape: int) -> Any:
    return jax.random.normal(KEY, shape)


def mlp() -> Made:
    linen: Any = _linen()
    model = linen.Sequential([linen.Dense(1024), linen.gelu, linen.Dense(1024), linen.gelu, linen.Dense(10)])
    x = _normal(32, 256)
    return model.apply, (model.init(KEY, x), x)


def of_inference(make: Callable[[], Made]) -> Callable[[], Made]:
    """With parameters that are known when it is compiled."""

    def made() -> Made:
        apply, (params, x) = make()
        return lambda x: apply(params, x), (x,)

    return made


def cnn() -> Made:
    linen: Any = _linen()

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for width in (32, 64, 128):
                x = linen.relu(linen.GroupNorm(8)(linen.Conv(width, (3, 3))(x)))
                x = linen.max_pool(x, (2, 2), (2, 2))
            return linen.Dense(10)(x.reshape(x.shape[0], -1))

    x = _normal(8, 64, 64, 3)
    return Net().apply, (Net().init(KEY, x), x)


def transformer() -> Made:
    linen: Any = _linen()

    class Net(linen.Module):
        @linen.compact
        def __call__(self, ids: Any) -> Any:
            x = linen.Embed(1000, 256)(ids) + linen.Embed(64, 256)(jnp.arange(64))
            mask = linen.make_causal_mask(ids)
            for _ in range(4):
                x = x + linen.MultiHeadDotProductAttention(num_heads=4)(linen.LayerNorm()(x), mask=mask)
                x = x + linen.Dense(256)(linen.gelu(linen.Dense(1024)(linen.LayerNorm()(x))))
            return linen.Dense(1000)(linen.LayerNorm()(x))

    ids = jax.random.randint(KEY, (4, 64), 0, 1000)
    return Net().apply, (Net().init(KEY, ids), ids)


def of_step(make: Callable[[], Made]) -> Callable[[], Made]:
    """A step of Adam."""

    def made() -> Made:
        import optax

        apply, (params, x) = make()
        optimizer = optax.adam(1e-3, eps=1e-3)

        def step(params: Any, state: Any, x: Any) -> Any:
            def loss(p: Any) -> Any:
                scores = apply(p, x)
                labels = jnp.arange(scores[..., 0].size).reshape(scores.shape[:-1]) % scores.shape[-1]
                return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state, params)
            return value, optax.apply_updates(params, updates), state

        return step, (params, optimizer.init(params), x)

    return made


def equinox_mlp() -> Made:
    import equinox

    model = equinox.nn.MLP(64, 16, 512, 3, activation=jax.nn.silu, key=KEY)
    arrays, rest = equinox.partition(model, equinox.is_array)
    return lambda arrays, x: jax.vmap(equinox.combine(arrays, rest))(x), (arrays, _normal(64, 64))


def hessians() -> Made:
    """A batch of second derivatives."""
    return jax.vmap(jax.hessian(lambda x: jnp.sum(jnp.tanh(x[:, None] * x) ** 2))), (_normal(64, 16),)


def recurrent() -> Made:
    """A gated cell over 128 steps."""

    def cell(w: Any, h: Any, x: Any) -> Any:
        gates = jax.nn.sigmoid(jnp.concatenate([x, h], 1) @ w["gates"])
        new = jnp.tanh(jnp.concatenate([x, h * gates[:, :128]], 1) @ w["new"])
        h = h + gates[:, 128:] * (new - h)
        return h, h

    w = {"gates": _normal(192, 256) * 0.1, "new": _normal(192, 128) * 0.1}
    return lambda w, x: jax.lax.scan(lambda h, a: cell(w, h, a), jnp.zeros((16, 128)), x)[1], (w, _normal(128, 16, 64))


def equation() -> Made:
    """1,000 oscillators of van der Pol by a method of Runge and Kutta with steps of their own."""
    import diffrax

    def solve(y: Any, rate: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: jnp.stack([y[1], args * (1 - y[0] ** 2) * y[1] - y[0]]))
        control = diffrax.PIDController(rtol=1e-4, atol=1e-4)
        found = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 5, 0.1, y, args=rate, stepsize_controller=control, max_steps=1000)
        return found.ys

    return solve, (_normal(2, 1000), jnp.linspace(0.5, 1.5, 1000))


def random_numbers() -> Made:
    return lambda key: jax.random.normal(key, (256, 1024)).sum(0), (KEY,)


CASES: dict[str, Callable[[], Made]] = {
    "mlp": of_inference(mlp), "cnn": of_inference(cnn), "transformer": of_inference(transformer),
    "equinox_mlp": of_inference(equinox_mlp), "mlp_step": of_step(mlp), "cnn_step": of_step(cnn),
    "transformer_step": of_step(transformer), "hessians": hessians, "scan": recurrent, "diffrax": equation, "random": random_numbers,
}  # fmt: skip


def measured(name: str, threads: int, seconds: float, rounds: int) -> float:
    """The ratio of one case."""
    function, args = CASES[name]()
    calls: dict[str, Callable[[], Any]] = {}
    results, first = [], []
    for who, jit in (("tcomp", lambda f: tcomp.jax.jit(f, threads=threads, strict=True)), ("jax", jax.jit)):
        run, start = jit(function), time.perf_counter()
        results.append(jax.block_until_ready(run(*args)))
        first.append(time.perf_counter() - start)
        calls[who] = lambda run=run: jax.block_until_ready(run(*args))
    errors = [
        float(np.max(np.abs(np.asarray(a, np.float64) - b), initial=0) / max(1e-6, float(np.max(np.abs(b), initial=0))))
        for a, b in zip(*map(jax.tree.leaves, results), strict=True)
    ]
    times = least_times(calls, seconds, rounds)
    ratio = times["tcomp"] / times["jax"]
    ms = "  ".join(f"{who} {t * 1e3:8.3f} ms" for who, t in times.items())
    print(f"{name:18} {ms}  ratio {ratio:.3f}  first {first[0]:.2f} / {first[1]:.2f} s  error {max(errors):.0e}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or glob patterns, comma-separated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.5, help="of each in each round")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    chosen = [n for n in CASES if any(fnmatch.fnmatch(n, p) for p in options.only.split(","))]
    ratios = [measured(name, options.threads, options.seconds, options.rounds) for name in chosen]
    print(f"{len(ratios)} cases, {options.threads} threads: geomean {geomean(ratios):.3f}, worst {max(ratios):.3f}")


if __name__ == "__main__":
    main()
