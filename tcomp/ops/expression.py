"""Operators by their expression, such as those that users define: its text is an attribute, so that graphs stay data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_expr, substitute, var, variables
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor, print_te
from tcomp.ir.text.parser import parse_te
from tcomp.ir.transforms.jvp import jvp
from tcomp.ir.transforms.vjp import vjp
from tcomp.ir.transforms.vmap import vmap

INPUT, SIZE = "input.{}", "size.{}"  # what inputs and symbolic sizes are called in the text: no names that Python has


def _expression(*tensors: Tensor, text: str, sizes: Sequence[Dim] = ()) -> tuple[Tensor, ...]:
    """The tensors that a printed expression computes, of these inputs and for these symbolic sizes, both known to the text by number."""
    given: dict[str, Any] = {INPUT.format(n): t for n, t in enumerate(tensors)}
    return parse_te(text, given | {SIZE.format(n): as_expr(d) for n, d in enumerate(sizes)})


EXPRESSION = Operator("expression", _expression)


@dataclass(eq=False)
class TensorFunction:
    """A function from tensors to a tensor or several, called `name`, and the functions that follow from it: all are operators."""

    name: str
    function: Callable[..., Any]
    base: TensorFunction | None = None  # whose tangents these are: linear in the inputs behind those of `base`
    _derived: dict[Any, TensorFunction] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results, none of which is an input. Raises `IRError` where the function returns something else than tensors."""
        found = self.function(*inputs)
        results = list(found) if isinstance(found, tuple | list) else [found]
        if not results or not all(isinstance(t, Tensor) for t in results):
            raise IRError(f"the operator `{self.name}` returns {found!r:.80}", hint="a tensor (te.compute, A @ B, ...), or a tuple of them")
        return [te.compute(t.shape, lambda *i, t=t: t[i], t.name) if te.is_placeholder(t) else t for t in results]

    def attributes(self, types: Sequence[tuple[str, Sequence[Dim]]]) -> dict[str, Any]:
        """The attributes of `EXPRESSION` for inputs of these types, (dtype, shape) each."""
        sizes = variables(*(d for _, shape in types for d in shape if isinstance(d, Expr)))
        own = {v: var(SIZE.format(n), v.attr.lo, v.attr.hi) for n, v in enumerate(sizes)}
        shapes = [[substitute(d, own) if isinstance(d, Expr) else d for d in shape] for _, shape in types]
        inputs = [te.placeholder(shape, dtype, INPUT.format(n)) for n, ((dtype, _), shape) in enumerate(zip(types, shapes, strict=True))]
        return {"text": print_te(self(inputs)), "sizes": sizes}

    def derivative(self, count: int, wrt: tuple[int, ...] | None = None) -> TensorFunction:
        """Of its `count` inputs, and a cotangent for each result of floats: the derivatives by the inputs of these numbers, or by all of
        floats."""

        def function(*tensors: Tensor) -> list[Tensor]:
            inputs = tensors[:count]
            results = [t for t in self(inputs) if is_float(t.dtype)]
            variables = [t for t in inputs if is_float(t.dtype)] if wrt is None else [inputs[n] for n in wrt]
            return vjp(results, variables, tensors[count:])

        return self._derived.setdefault(("derivative", count, wrt), TensorFunction(f"{self.name}_derivative", function))

    def tangents(self, count: int) -> TensorFunction:
        """Of its `count` inputs, and a tangent for each input of floats: the tangent of each result of floats."""

        def function(*tensors: Tensor) -> list[Tensor]:
            inputs = tensors[:count]
            results = [t for t in self(inputs) if is_float(t.dtype)]
            return jvp(results, [t for t in inputs if is_float(t.dtype)], tensors[count:])

        return self._derived.setdefault(("tangents", count), TensorFunction(f"{self.name}_tangents", function, self))

    def batched(self, axes: Sequence[int | None]) -> TensorFunction:
        """Of inputs that have a batch along these axes (None: they have none): results with a batch along axis 0."""
        key = ("batched", *axes)
        return self._derived.setdefault(key, TensorFunction(f"{self.name}_batched", vmap(self.function, list(axes))))
