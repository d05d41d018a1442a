"""What handlers of PyTorch's operators and of JAX's primitives both work with: a graph in the making, to which they add operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tcomp.errors import UnsupportedError
from tcomp.ir.broadcasting import HALF
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import Dim, as_expr
from tcomp.ir.graph import LOOP, Graph, GraphBuilder, Node, Operator, Value, loop_attrs
from tcomp.ir.simplify import as_dim
from tcomp.ops.elementwise import CAST, FULL
from tcomp.ops.expression import EXPRESSION, TensorFunction
from tcomp.ops.movement import EXPAND, IDENTITY, RESHAPE, SLICE, TRANSPOSE

Values: TypeAlias = Sequence[Value]
Types: TypeAlias = "Sequence[tuple[str, Sequence[Dim]]]"  # (element type, shape) of each


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

    def structured(self, op: Operator, inputs: Values, types: Types, attrs: dict[str, Any], *bodies: Graph) -> list[Value]:
        """The results, of these types, of one more operator with bodies."""
        values = [Value(self.builder.fresh(self.name), dtype, tuple(shape)) for dtype, shape in types]
        self.builder.append(Node(op, tuple(inputs), tuple(values), attrs, self.name, bodies))
        return values

    def scan(
        self, length: Dim, carry: Values, xs: Values, captured: Values, reverse: bool,
        body: Callable[[GraphBuilder, list[Value], list[Value], list[Value]], tuple[Values, Values, Graph]],
    ) -> list[Value]:  # fmt: skip
        """The last states of a loop over the rows of `xs`, then the rows that it makes, stacked, all from the last row on if `reverse`.
        `body(builder, states, rows, captured)` returns (new states, new rows, the graph of both)."""
        inner = GraphBuilder("body")
        inner.input("i", "int64", ())
        states, rows, others = (
            [inner.input(v.name, v.dtype, v.shape[first:]) for v in values] for values, first in ((carry, 0), (xs, 1), (captured, 0))
        )
        after, made, graph = body(inner, states, rows, others)
        attrs = loop_attrs(length, len(after), (reverse,) * len(xs), (reverse,) * len(made))
        types = [*((v.dtype, v.shape) for v in after), *((v.dtype, (length, *v.shape)) for v in made)]
        return self.structured(LOOP, [*carry, *xs, *captured], types, attrs, graph)

    def finished(self, outputs: Values, names: Sequence[str] = ()) -> Graph:
        """The graph with these outputs, each a value of its own. `names` are those of the outputs, where they have some."""
        found, taken = list[Value](), {*self.builder.inputs, *self.builder.constants}
        for n, x in enumerate(outputs):
            if x in taken or names:
                (x,) = self.builder.add(IDENTITY, [x], {}, names[n] if n < len(names) else x.name)
            taken.add(x)
            found.append(x)
        return self.builder.build(found)

    @abstractmethod
    def unsupported(self, why: str) -> UnsupportedError:
        """The error to raise for what cannot be compiled."""

    def number(self, number: Any, dtype: str, shape: Sequence[int] = ()) -> Value:
        """A scalar, equal elements, or those of an array."""
        return self.builder.constant(np.broadcast_to(np.asarray(number).astype(to_numpy(dtype)), shape or np.shape(number)), "c", dtype)

    def fitting(self, x: Value, dtype: str, shape: Sequence[Dim]) -> Value:
        """A result in the element type that is expected. Raises `UnsupportedError` if it is of another shape."""
        if len(x.shape) != len(shape) or any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(x.shape, shape, strict=True)
        ):
            raise self.unsupported(f"its result would be {x}, and should have the shape {tuple(shape)}")
        return self.cast(x, dtype)

    def full(self, number: Any, dtype: str, shape: Sequence[Dim]) -> Value:
        """Equal elements."""
        return self.add(FULL, shape=tuple(shape), value=number, dtype=dtype)

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """The elements in another shape."""
        return x if tuple(shape) == x.shape else self.add(RESHAPE, x, shape=tuple(shape))

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """The axes in another order."""
        return x if list(perm) == list(range(len(perm))) else self.add(TRANSPOSE, x, perm=tuple(map(int, perm)))

    def expand(self, x: Value, shape: Sequence[Dim]) -> Value:
        """The elements, repeated along axes of extent 1 and further axes in front."""
        return x if tuple(shape) == x.shape else self.add(EXPAND, x, shape=tuple(shape))

    def cut(self, x: Value, axis: int, start: Dim, count: Dim, step: int = 1) -> Value:
        """`count` elements along an axis."""
        given = [(start, step, count) if n == axis else (0, 1, d) for n, d in enumerate(x.shape)]
        starts, steps, shape = zip(*given, strict=True)
        return self.add(SLICE, x, starts=starts, steps=steps, shape=shape)

    def reversed(self, x: Value, axes: Sequence[int]) -> Value:
        """The elements in reverse order along axes."""
        starts = tuple(as_dim(as_expr(d) - 1) if n in axes else 0 for n, d in enumerate(x.shape))
        steps = tuple(-1 if n in axes else 1 for n in range(len(x.shape)))
        return x if 0 in x.shape else self.add(SLICE, x, starts=starts, steps=steps, shape=x.shape)

    def cast(self, x: Value, dtype: str) -> Value:
        """The value in another element type."""
        return x if x.dtype == dtype else self.add(CAST, x, dtype=dtype)

    def wide(self, x: Any) -> Any:
        """A value of 16-bit floats in float32; whatever else as it is."""
        return self.cast(x, "float32") if isinstance(x, Value) and x.dtype in HALF else x
