"""Jaxprs → Graph, equation by equation; calls of jaxprs are inlined."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from tcomp.errors import TcompError, UnsupportedError
from tcomp.frontends.jax.context import Context, Operand, Parts, Table, is_complex, is_key, leaves, part_types, rebuilt
from tcomp.frontends.jax.handlers import (
    complexes,
    contraction,
    control,
    elementwise,
    indexing,
    linalg,
    movement,
    randoms,
    reduction,
    windows,
)
from tcomp.frontends.jax.operators import FUNCTIONS
from tcomp.ir.graph import Graph, GraphBuilder

_FAMILIES = (contraction, elementwise, indexing, linalg, movement, randoms, reduction, windows)
HANDLERS: Table = {name: handler for family in _FAMILIES for name, handler in family.TABLE.items()}
INLINED = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_vmap_call": "call",
    "composite": "jaxpr", "custom_lin": "jaxpr", "run_state": "jaxpr",
}  # fmt: skip
"""Primitives that call a jaxpr, and the parameter that has it."""

MISFITS = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, NotImplementedError,
    jax.errors.InconclusiveDimensionOperation,
)  # fmt: skip
"""What handlers, and definitions of JAX that they trace, raise for parameters that they were not written for, as another version of JAX may
have: a refusal, so that `jax.jit` can run the function."""


@dataclass(frozen=True)
class Imported:
    """A graph, and what its inputs and outputs are: an aval of JAX for each argument and result, which are one value of the graph or, if
    they are complex or keys, several."""

    graph: Graph
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]


def import_jaxpr(closed: Any, names: Sequence[str] = (), outputs: Sequence[str] = ()) -> Imported:
    """The graph of a closed jaxpr. `names` of the inputs and outputs are made up where they are not given. Raises `UnsupportedError`, which
    names the primitive and where it comes from, for what cannot be compiled."""
    importer = Importer(GraphBuilder("jax"))
    avals = [v.aval for v in closed.jaxpr.invars]
    values = []
    for n, aval in enumerate(avals):
        kinds = part_types(aval.dtype)
        for k, dtype in enumerate(kinds):
            name = names[n] if n < len(names) else f"x{n}"
            values.append(importer.builder.input(name if len(kinds) == 1 else f"{name}.{k}", dtype, importer.dims(aval.shape)))
    found = importer.evaluate(closed, rebuilt(avals, iter(values)))
    return Imported(importer.finished(leaves(found), outputs), tuple(avals), tuple(v.aval for v in closed.jaxpr.outvars))


def trace(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What JAX traces of a function for example arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`."""
    return jax.jit(function).trace(*args)


def import_traced(traced: Any) -> Graph:
    """The graph of a traced function. Inputs have the names of arguments, and of what leads to an array inside (`params.w.0`), outputs
    those that lead there from the result (`y` of a dictionary), or `result`. Raises `UnsupportedError` as `import_jaxpr`."""
    told = traced.jaxpr.jaxpr.debug_info
    names = [_dotted(path) for path in told.arg_names or ()]
    outputs = [_dotted(path) for path in told.result_paths or ()]
    outputs = [p if re.match(r"result(\.\d|$)", p) else p.removeprefix("result.") for p in outputs]
    complete = len(names) == len(traced.jaxpr.jaxpr.invars) and len(outputs) == len(traced.jaxpr.jaxpr.outvars)
    return import_jaxpr(traced.jaxpr, *((names, outputs) if complete else ())).graph


def _dotted(path: str) -> str:
    """`params['w'][0]` as `params.w.0`."""
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", path)


class Importer(Context):
    """A graph in the making."""

    def evaluate(self, jaxpr: Any, operands: Sequence[Operand]) -> list[Operand]:
        """The results of a jaxpr, closed or without constants, for these operands, added to the graph."""
        constants, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, Operand] = dict(zip(jaxpr.constvars, map(self.constant, constants), strict=True))
        env |= zip(jaxpr.invars, operands, strict=True)

        def read(atom: Any) -> Operand:
            return self.constant(atom.val, atom.aval.dtype) if isinstance(atom, core.Literal) else env[atom]

        outer, callers = self.eqn, self.callers
        if outer is not None:
            self.callers = outer, *callers
        uses = Counter(map(id, (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars)))
        for eqn in jaxpr.eqns:
            self.eqn, self.uses = eqn, tuple([uses[id(v)] for v in eqn.invars])
            found = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env |= zip(eqn.outvars, found, strict=True)
        self.eqn, self.callers = outer, callers
        return [read(atom) for atom in jaxpr.outvars]

    def constant(self, array: Any, dtype: Any = None) -> Operand:
        """An array as constants of the graph."""
        dtype = getattr(array, "dtype", None) if dtype is None else dtype
        if dtype is not None and is_key(dtype):
            words = np.asarray(jax.random.key_data(array))
            flat = words.reshape(*words.shape[: words.ndim - len(dtype._impl.key_shape)], -1)
            return Parts(tuple(self.builder.constant(flat[..., n].copy()) for n in range(flat.shape[-1])), dtype)
        given = np.asarray(array, dtype)
        if is_complex(given.dtype):
            parts = (np.ascontiguousarray(p).reshape(given.shape) for p in (given.real, given.imag))
            return Parts(tuple(map(self.builder.constant, parts)), given.dtype)
        (name,) = part_types(given.dtype)
        return self.builder.constant(np.ascontiguousarray(given).reshape(given.shape), "c", name)

    def equation(self, eqn: Any, operands: list[Operand]) -> Sequence[Operand]:
        """The results of an equation. Raises `UnsupportedError`."""
        name, params = eqn.primitive.name, eqn.params
        if name in INLINED and INLINED[name] in params:
            return self.evaluate(params[INLINED[name]], operands)
        try:
            if eqn.primitive in FUNCTIONS:
                return self.own(FUNCTIONS[eqn.primitive], *leaves(operands))
            if name in control.TABLE:
                return list(control.TABLE[name](self, *operands, **params))
            handler = complexes.handler(name, eqn, operands, HANDLERS)
            found = self.by_definition(eqn, operands) if handler is None else handler(self, *operands, **params)
        except TcompError as error:
            if isinstance(error, UnsupportedError) and error.where:
                raise
            where = self.where
            what = error.what if isinstance(error, UnsupportedError) else f"JAX's primitive `{name}` cannot be compiled as it is used here"
            raise UnsupportedError(what, where=where, why=error.why or ("" if what == error.what else str(error))) from error
        except MISFITS as error:
            raise self.unsupported(f"{type(error).__name__}: {error}"[:300]) from error
        results = list(found) if isinstance(found, tuple | list) else [found]
        return [self.checked(x, v.aval) for x, v in zip(results, eqn.outvars, strict=True)]

    def by_definition(self, eqn: Any, operands: Sequence[Operand]) -> Any:
        """A primitive of another library, by the function of JAX that it says it is. Raises `UnsupportedError` for those of JAX."""
        function = eqn.primitive.impl
        if getattr(inspect.unwrap(getattr(function, "func", function)), "__module__", "jax").split(".")[0] in ("jax", "jaxlib"):
            raise UnsupportedError(f"JAX's primitive `{eqn.primitive.name}` is not supported")
        return self.inline(functools.partial(function, **eqn.params), *operands)

    def checked(self, x: Operand, aval: Any) -> Operand:
        """The operand in the type that JAX says it has. Raises `UnsupportedError` if it is of another shape."""
        found = [self.fitting(v, dtype, self.dims(aval.shape)) for v, dtype in zip(leaves([x]), part_types(aval.dtype), strict=True)]
        return replace(x, values=tuple(found)) if isinstance(x, Parts) else found[0]
