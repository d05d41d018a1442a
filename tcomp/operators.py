"""Operators of your own: functions of tensor expressions that NumPy, PyTorch, JAX and ONNX models can call, and that have derivatives.

@tcomp.operator
def swish(x, w):
    y = x @ w
    return y * te.sigmoid(y)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tcomp.errors import InputError
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.te import Tensor
from tcomp.ops.expression import EXPRESSION, TensorFunction
from tcomp.pipeline import compile_graph
from tcomp.runtime import LoadedModel, Module


class OwnOperator:
    """What `tcomp.operator` makes of a function. Call it with tensors of one kind; see there."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.definition = TensorFunction(name, function)
        self.name, self.__doc__, self.__wrapped__ = name, function.__doc__, function

    def __repr__(self) -> str:
        return f"<tcomp operator {self.name}>"

    def __call__(self, *operands: Any) -> Any:
        found: Any
        torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
        if any(isinstance(x, Tensor) for x in operands):
            found = self.definition(operands)
        elif torch is not None and any(isinstance(x, torch.Tensor) for x in operands):
            from tcomp.frontends.torch.operators import operator_of

            found = operator_of(self.definition, run)(list(operands))
        elif jax is not None and any(isinstance(x, jax.Array) for x in operands):
            from tcomp.frontends.jax.operators import primitive_of

            found = primitive_of(self.definition, run).bind(*map(jax.numpy.asarray, operands))
        else:
            found = run(self.definition, [np.asarray(x) for x in operands])
        return found[0] if len(found) == 1 else tuple(found)


def operator(function: Callable[..., Any], name: str | None = None) -> OwnOperator:
    """A function of tensors, which returns a tensor or a tuple of them (`te.compute`, `A @ B`, ...), as an operator. It is called with

    - NumPy's arrays, PyTorch's tensors or JAX's arrays: machine code is made for their types when they first come;
    - tensors of `te`: the expression itself.

    In PyTorch it is an operator of `torch.library` (`torch.ops.tcomp.<name>`), in JAX a primitive, both with derivatives of any order
    (`te.vjp`, `te.jvp`) and batches (`te.vmap`); what `torch.compile(..., backend="tcomp")`, `tcomp.jax.jit` and `tcomp.compile` compile
    has it as one operator among others, scheduled with those around it. Nodes of ONNX models call it by its name in the domain `tcomp`
    (`tcomp.compile(model, operators=[...])`). Results must depend on the shapes and types of the arguments alone.

    `name` (default: that of the function) is an identifier. Raises `InputError` for another one.
    """
    name = function.__name__ if name is None else name
    if not name.isidentifier():
        raise InputError(f"an operator cannot be called `{name}`", hint="tcomp.operator(function, name='swish')")
    return OwnOperator(function, name)


_modules = WeakKeyDictionary[TensorFunction, dict[Any, LoadedModel]]()


def run(function: TensorFunction, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of an operator for these arrays, by machine code that is made for their types when they first come."""
    types = [(a.dtype.name, a.shape) for a in arrays]
    known = _modules.setdefault(function, {})
    if (module := known.get(key := (*types,))) is None:
        builder = GraphBuilder(function.name)
        inputs = [builder.input(f"x{n}", *kind) for n, kind in enumerate(types)]
        outputs = builder.add(EXPRESSION, inputs, function.attributes(types), function.name)
        module = known[key] = Module.load(compile_graph(builder.build(outputs)))
    return [*module.run({spec.name: a for spec, a in zip(module.inputs, arrays, strict=True)}).values()]


__all__ = ["OwnOperator", "operator"]
