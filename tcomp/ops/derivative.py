"""The derivative of another operator, as an operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ir.transforms.vjp import vjp


def vjp_of(operators: Mapping[str, Operator]) -> Operator:
    """The operator `vjp` of these operators."""

    def function(*tensors: Tensor | None, op: str, attrs: tuple[tuple[str, Any], ...], outputs: int, wrt: int) -> Tensor:
        """The derivative of the sum of cotangent * output over the outputs of the operator `op` with `attrs`, for its input number `wrt`.
        `tensors` are the operator's inputs, then a cotangent for each of its `outputs`. Raises `IRError` where it has no derivative."""
        inputs, cotangents = tensors[: len(tensors) - outputs], [t for t in tensors[len(tensors) - outputs :] if t is not None]
        wanted = inputs[wrt]
        if wanted is None:
            raise IRError(f"input {wrt} of `{op}` is left out, and has no derivative")
        if inputs.count(wanted) > 1:  # a copy tells the one of them that is meant
            wanted = te.compute(wanted.shape, lambda *i, x=wanted: x[i], f"{wanted.name}.{wrt}")
        outputs_of = operators[op].apply([wanted if n == wrt else t for n, t in enumerate(inputs)], dict(attrs))
        return vjp(outputs_of, wanted, cotangents)

    return Operator("vjp", function)
