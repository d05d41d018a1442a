"""Operators that users define, as primitives of JAX: types of results, code, derivatives forwards and backwards, batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tcomp.ir import te
from tcomp.ir.dtypes import is_float, to_numpy
from tcomp.ops.expression import TensorFunction

Run = Callable[[TensorFunction, Sequence[Any]], Sequence[Any]]  # of arrays

FUNCTIONS: dict[Any, TensorFunction] = {}
"""By primitive, what `primitive_of` has made."""
_primitives: dict[TensorFunction, Primitive] = {}


def primitive_of(function: TensorFunction, run: Run) -> Primitive:
    """The primitive of a function, which has several results. It is made when it is first asked for."""
    if function in _primitives:
        return _primitives[function]
    primitive = _primitives[function] = Primitive(function.name)
    primitive.multiple_results = True
    FUNCTIONS[primitive] = function

    def computed(*arrays: Any) -> list[Any]:
        return list(run(function, [np.asarray(a) for a in arrays]))

    def typed(*avals: Any) -> list[Any]:
        results = function([te.placeholder(a.shape, np.dtype(a.dtype).name) for a in avals])
        return [jax.core.ShapedArray(tuple(map(int, t.shape)), to_numpy(t.dtype)) for t in results]

    def called(*arrays: Any) -> Any:
        """Inside of what JAX compiles."""
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in typed(*map(jax.typeof, arrays))]
        return jax.pure_callback(computed, shapes, *arrays)

    def tangents(primals: Sequence[Any], given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [
            ad.instantiate_zeros(t) if isinstance(t, ad.Zero) else t for p, t in zip(primals, given, strict=True) if _moves(jax.typeof(p))
        ]
        results = primitive.bind(*primals)
        changes = iter(primitive_of(function.tangents(len(primals)), run).bind(*primals, *moving))
        return results, [next(changes) if _moves(x) else ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]

    def transposed(base: TensorFunction, cotangents: Sequence[Any], *operands: Any) -> list[Any]:
        count = len(operands) - sum(map(ad.is_undefined_primal, operands))
        given = [ad.instantiate_zeros(c) for c in cotangents]
        found = primitive_of(base.derivative(count), run).bind(*operands[:count], *given)
        return [None] * count + list(found)

    def batched(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], list[int]]:
        own = [None if axis is None else int(axis) for axis in axes]
        found = primitive_of(function.batched(own), run).bind(*operands)
        return found, [0] * len(found)

    primitive.def_impl(lambda *arrays: [jax.numpy.asarray(a) for a in computed(*arrays)])
    primitive.def_abstract_eval(typed)
    ad.primitive_jvps[primitive] = tangents
    if function.base is not None:
        ad.primitive_transposes[primitive] = partial(transposed, function.base)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(called, multiple_results=True))
    return primitive


def _moves(x: Any) -> bool:
    """Whether it has a tangent."""
    return is_float(np.dtype(x.dtype).name)
