"""JAX's door: `tcomp.jax.jit`, which compiles what `jax.jit` compiles. Needs JAX (`pip install 'tcomp[jax]'`).

    step = tcomp.jax.jit(jax.value_and_grad(loss))

A function is traced by JAX for the types of its arguments, once for each, and its jaxpr is compiled. Derivatives, batches and random
numbers are JAX's: `jax.grad`, `jax.vmap` and the like are applied before `jit`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client

from tcomp.errors import InputError, TcompError
from tcomp.frontends.jax import import_jaxpr
from tcomp.frontends.jax.context import is_complex, is_key
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_graph
from tcomp.runtime import LoadedModel, Module

_logger = logging.getLogger("tcomp")
Run = Callable[..., Any]


def jit(
    function: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    threads: int | None = None,
    strict: bool = False,
) -> Run:
    """A function that computes what `function` does, by code that is compiled when it is first called with arguments of new types.

    Arguments and results are pytrees of arrays. `static_argnums` and `static_argnames` are those of `jax.jit`: arguments that are no
    arrays, and are hashable. `threads` is the number of threads of a run (default: all cores the process may use). Inside another function
    that JAX traces (`jax.jit`, `jax.grad`, ...), it is `jax.jit(function)`.

    What cannot be compiled runs by `jax.jit`, which the logger "tcomp" tells with the reason; if `strict`, it raises `UnsupportedError`,
    which names the primitive and where it comes from.
    """
    return functools.wraps(function)(_Jitted(function, static_argnums, static_argnames, threads, strict))


class _Jitted:
    def __init__(self, function: Run, static_argnums: Any, static_argnames: Any, threads: int | None, strict: bool) -> None:
        self.by_jax = jax.jit(function, static_argnums=static_argnums, static_argnames=static_argnames)
        self.numbers = frozenset([static_argnums] if isinstance(static_argnums, int) else static_argnums or ())
        self.names = frozenset([static_argnames] if isinstance(static_argnames, str) else static_argnames or ())
        self.static = bool(self.numbers or self.names)
        self.threads, self.strict = threads, strict
        self.compiled: dict[Hashable, Run] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method, where a method is compiled."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: Any = args, kwargs
        chosen: Hashable = ()
        if self.static:
            numbers = {n % len(args) for n in self.numbers if -len(args) <= n < len(args)}
            named = self.names & kwargs.keys()
            chosen = tuple((n, type(x), x) for n, x in (*((n, args[n]) for n in sorted(numbers)), *((n, kwargs[n]) for n in sorted(named))))
            dynamic = {n: x for n, x in kwargs.items() if n not in self.names}
            given = tuple(x for n, x in enumerate(args) if n not in numbers), dynamic
        leaves, tree = jax.tree_util.tree_flatten(given)
        key = tree, chosen, tuple([_type(x) for x in leaves]), jax.config.jax_enable_x64
        try:
            run = self.compiled.get(key)
        except TypeError as error:
            raise InputError("a static argument, or a leaf of a tree, is not hashable", why=str(error)) from error
        if run is None:
            if any(isinstance(x, jax.core.Tracer) for x in leaves):
                return self.by_jax(*args, **kwargs)
            run = self.compiled[key] = self.made(args, kwargs)
        if run is self.by_jax:
            return run(*args, **kwargs)
        try:
            return run(leaves)
        except InputError:  # a run that ended with an error, which JAX is to tell
            return self.by_jax(*args, **kwargs)

    def made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        try:
            traced = self.by_jax.trace(*args, **kwargs)
            return _Call(traced.jaxpr, jax.tree_util.tree_structure(traced.out_info), self.threads)
        except TcompError as error:
            if self.strict:
                raise
            _logger.warning("`%s` runs by jax.jit: %s", getattr(self.by_jax, "__name__", "function"), error)
            return self.by_jax


def _type(x: Any) -> Hashable:
    """What a trace depends on of an argument."""
    if isinstance(x, jax.Array):
        return None if isinstance(x, jax.core.Tracer) else (x.shape, x.dtype, getattr(x, "weak_type", False))
    return (x.shape, x.dtype, False) if isinstance(x, np.ndarray | np.generic) else x.__class__


class _Call:
    """A jaxpr as a compiled model."""

    def __init__(self, closed: Any, tree: Any, threads: int | None) -> None:
        imported = import_jaxpr(closed)
        self.tree = tree
        self.takes = [_taken(aval) for aval in imported.arguments]
        self.gives = [_given(aval) for aval in imported.results]
        self.model: LoadedModel | None = None
        if imported.graph.outputs:
            self.model = Module.load(compile_graph(imported.graph, CompileOptions(threads=threads)), threads=threads)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        arrays: list[Any] = []
        for take, x in zip(self.takes, leaves, strict=True):
            arrays += take(x)
        found = iter(() if self.model is None else self.model._execute(arrays))
        return jax.tree_util.tree_unflatten(self.tree, [give(found) for give in self.gives])


def _taken(aval: Any) -> Callable[[Any], list[Any]]:
    """What makes the inputs of the model of an argument of this type."""
    if is_key(aval.dtype):
        words = int(np.prod(aval.dtype._impl.key_shape))

        def of_key(x: Any) -> list[Any]:
            flat = np.asarray(jax.random.key_data(x)).reshape(*aval.shape, words)
            return [np.ascontiguousarray(flat[..., n]).reshape(aval.shape) for n in range(words)]

        return of_key
    dtype, shape = np.dtype(aval.dtype), tuple(aval.shape)
    if is_complex(dtype):
        return lambda x: [np.ascontiguousarray(part(np.asarray(x, dtype))).reshape(shape) for part in (np.real, np.imag)]
    return lambda x: [np.asarray(x, dtype)]


def _given(aval: Any) -> Callable[[Any], Any]:
    """What makes a result of this type of the outputs of the model."""
    if is_key(aval.dtype):
        count, impl = int(np.prod(aval.dtype._impl.key_shape)), aval.dtype._impl

        def of_words(found: Any) -> Any:
            words = np.stack([next(found) for _ in range(count)], -1).reshape(*aval.shape, *impl.key_shape)
            return jax.random.wrap_key_data(jax.numpy.asarray(words), impl=impl.name)

        return of_words
    dtype = np.dtype(aval.dtype)
    if is_complex(dtype):
        return lambda found: jax.device_put((next(found) + 1j * next(found)).astype(dtype))
    device = jax.devices("cpu")[0]
    sharding, known = jax.sharding.SingleDeviceSharding(device), jax.core.ShapedArray(aval.shape, dtype)

    def of_array(found: Any) -> Any:
        """The array as one of JAX, in about a sixth of the time of `jax.device_put`, which calls the same at the end."""
        return xla_client.batched_device_put(known, sharding, [next(found)], [device])

    return of_array


__all__ = ["jit"]
