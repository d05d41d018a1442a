"""Operators that users define, as operators of PyTorch (`torch.library`): types of results, code, derivatives, batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcomp.frontends.torch.context import TORCH_DTYPES, Dims, array_of, dtype_name, tensor_of
from tcomp.ir.dtypes import is_float
from tcomp.ir.graph import Value
from tcomp.ops.expression import TensorFunction

Run = Callable[[TensorFunction, Sequence[Any]], Sequence[Any]]  # of arrays

FUNCTIONS: dict[Any, TensorFunction] = {}
"""By operator of PyTorch, what `operator_of` has made."""
_operators: dict[TensorFunction, Any] = {}


def operator_of(function: TensorFunction, run: Run) -> Any:
    """The operator of PyTorch of a function: of a list of tensors, with a list of results. It is made when it is first asked for."""
    if function in _operators:
        return _operators[function]
    name = f"tcomp::{function.name}"
    torch.library.define(name, "(Tensor[] tensors) -> Tensor[]")

    def computed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor_of(a) for a in run(function, [array_of(t) for t in tensors])]

    def typed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        dims = Dims()
        given = [Value("", dtype_name(t.dtype), [dims(d) for d in t.shape]).placeholder() for t in tensors]
        return [tensors[0].new_empty([dims.symint(d) for d in t.shape], dtype=TORCH_DTYPES[t.dtype]) for t in function(given)]

    def kept(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[0])
        ctx.floats = [t.dtype.is_floating_point for t in output]

    def derivatives(ctx: Any, cotangents: Sequence[Any]) -> Any:
        tensors = ctx.saved_tensors
        given = [c for c, floats in zip(cotangents, ctx.floats, strict=True) if floats]
        found = iter(operator_of(function.derivative(len(tensors)), run)([*tensors, *given]))
        return [next(found) if is_float(dtype_name(t.dtype)) else None for t in tensors]

    def batched(info: Any, axes: Any, tensors: Sequence[torch.Tensor]) -> Any:
        found = operator_of(function.batched(axes[0]), run)(tensors)
        return found, [0] * len(found)

    torch.library.impl(name, "CPU", computed)
    torch.library.register_fake(name, typed)
    torch.library.register_autograd(name, derivatives, setup_context=kept)
    torch.library.register_vmap(name, batched)
    operator = getattr(torch.ops.tcomp, function.name)
    FUNCTIONS[operator] = function
    _operators[function] = operator
    return operator
