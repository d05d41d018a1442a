"""What handlers of PyTorch's operators and of JAX's primitives both work with: a graph in the making, to which they add operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tcomp.ir.broadcasting import HALF
from tcomp.ir.graph import GraphBuilder, Operator, Value
from tcomp.ops.elementwise import CAST
from tcomp.ops.expression import EXPRESSION, TensorFunction


@dataclass
class GraphContext(ABC):
    """A graph in the making. What is added to it gets the name of what is imported just then."""

    builder: GraphBuilder

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of what is imported."""

    def results(self, op: Operator, *inputs: Value | None, **attrs: Any) -> tuple[Value, ...]:
        """All results of one more operator."""
        return self.builder.add(op, inputs, attrs, self.name)

    def add(self, op: Operator, *inputs: Value | None, **attrs: Any) -> Value:
        """The first result of one more operator."""
        return self.results(op, *inputs, **attrs)[0]

    def own(self, function: TensorFunction, *inputs: Value) -> tuple[Value, ...]:
        """The results of an operator that a user has defined."""
        return self.results(EXPRESSION, *inputs, **function.attributes([(v.dtype, v.shape) for v in inputs]))

    def cast(self, x: Value, dtype: str) -> Value:
        """The value in another element type."""
        return x if x.dtype == dtype else self.add(CAST, x, dtype=dtype)

    def wide(self, x: Any) -> Any:
        """A value of 16-bit floats in float32; whatever else as it is."""
        return self.cast(x, "float32") if isinstance(x, Value) and x.dtype in HALF else x


__all__ = ["GraphContext"]
