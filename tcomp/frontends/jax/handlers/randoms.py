"""Random numbers: by the functions of JAX that define its generators, on the words of keys, so that the numbers are JAX's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.random import core, prng, threefry2x32

from tcomp.frontends.jax.context import Context, Parts, Table
from tcomp.frontends.jax.handlers.movement import TABLE as MOVEMENT
from tcomp.ir.graph import Value


def _unwrapped(ctx: Context, keys: Parts) -> Value:
    """The words of keys as an array, along its last axes."""
    words: Value = MOVEMENT["stack"](ctx, *keys.values, axis=len(keys.shape))
    return ctx.reshape(words, (*keys.shape, *keys.dtype._impl.key_shape))


def _wrapped(ctx: Context, words: Value, dtype: Any) -> Parts:
    count = len(dtype._impl.key_shape)
    shape = [int(d) for d in words.shape[: len(words.shape) - count]]
    flat = ctx.reshape(words, (*shape, int(np.prod(dtype._impl.key_shape))))
    return Parts(tuple(ctx.reshape(ctx.cut(flat, len(shape), n, 1), shape) for n in range(int(flat.shape[-1]))), dtype)


def _seed(ctx: Context, seeds: Value, impl: Any) -> Parts:
    return _wrapped(ctx, ctx.inline(partial(prng.random_seed_impl_base, impl=impl), seeds), ctx.eqn.outvars[0].aval.dtype)


def _split(ctx: Context, keys: Parts, shape: Any) -> Parts:
    split = partial(prng.random_split_impl_base, keys.dtype._impl, keys_ndim=len(keys.shape), shape=shape)
    return _wrapped(ctx, ctx.inline(split, _unwrapped(ctx, keys)), keys.dtype)


def _fold_in(ctx: Context, keys: Parts, messages: Value) -> Parts:
    fold = partial(prng.random_fold_in_impl_base, keys.dtype._impl, keys_shape=keys.shape)
    return _wrapped(ctx, ctx.inline(fold, _unwrapped(ctx, keys), messages), keys.dtype)


def _bits(ctx: Context, keys: Parts, bit_width: int, shape: Any) -> Any:
    bits = partial(prng.random_bits_impl_base, keys.dtype._impl, keys_ndim=len(keys.shape), bit_width=bit_width, shape=shape)
    return ctx.inline(bits, _unwrapped(ctx, keys))


def _gamma(ctx: Context, keys: Parts, a: Value, log_space: bool) -> Any:
    def draw(words: Any, shape: Any) -> Any:
        return core._gamma_impl(jax.random.wrap_key_data(words, impl=keys.dtype._impl.name), shape, log_space=log_space, use_vmap=True)

    return ctx.inline(draw, _unwrapped(ctx, keys), a)


def _counts(ctx: Context, shape: Any) -> Any:
    """The high and low words of positions."""
    count = np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(shape)
    return [ctx.builder.constant((count >> np.uint64(n)).astype(np.uint32)) for n in (32, 0)]


TABLE: Table = {
    "random_seed": _seed, "random_split": _split, "random_fold_in": _fold_in, "random_bits": _bits, "random_gamma": _gamma,
    "random_wrap": lambda ctx, words, impl: _wrapped(ctx, words, ctx.eqn.outvars[0].aval.dtype), "random_unwrap": _unwrapped,
    "threefry2x32": lambda ctx, *words: ctx.inline(partial(threefry2x32._threefry2x32_lowering, use_rolled_loops=False), *words),
    "iota_2x32_shape": _counts,
}  # fmt: skip
