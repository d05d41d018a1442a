"""What the handler of one ONNX node sees, and the graph it adds to.

A handler is `def conv(ctx: Context) -> Value | tuple[Value, ...]`: it reads the node's inputs and attributes from `ctx`, adds
operators with `ctx.add`, and returns the node's outputs. A family file exports `TABLE: dict[str, Versions]`.

`ctx.add` computes at once what is known at compile time: small constants by evaluating the operator, small integer tensors made
of symbolic sizes (shape arithmetic) element by element as expressions, see `symbolic`. So a handler that needs a shape, an axis
or a pad width asks `ctx.require_dims(i, "the shape")` and never looks at how it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from onnx import GraphProto

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import symbolic
from tcomp.ir import te
from tcomp.ir.dtypes import is_float, itemsize, to_numpy
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr
from tcomp.ir.graph import Graph, GraphBuilder, Node, Operator, Value, application, materialised
from tcomp.ir.interpreters.te import evaluate
from tcomp.ops.shapes import DIMS

FOLD_LIMIT = 4096  # elements: constants up to this size are computed while importing; larger ones are left to the passes
MAX_RANK = 32
MAX_BYTES = 1 << 42  # of one value; anything larger is a damaged or hostile model

Handler = Callable[["Context"], "Value | tuple[Value | None, ...]"]
Versions = tuple[tuple[int, Handler], ...]  # (first opset, handler), in increasing order


class Scope:
    """A graph under construction and what is known at compile time about its values.

    `elements[v]` lists the elements of `v` in row-major order as expressions over symbolic sizes (integers as `int64`).
    """

    def __init__(self, name: str) -> None:
        self.builder = GraphBuilder(name)
        self.elements: dict[Value, tuple[Expr, ...]] = {}

    def constant(self, array: np.ndarray, name: str = "const", dtype: str | None = None) -> Value:
        """A compile-time array; kept, not copied."""
        return self.builder.constant(array, name, dtype)

    def known(self, value: Value) -> np.ndarray | None:
        """The array of a value that is known completely."""
        return materialised(self.builder.constants.get(value))

    def known_elements(self, value: Value) -> tuple[Expr, ...] | None:
        """The elements of a small value as expressions, or None."""
        found = self.elements.get(value)
        if found is None:
            array = self.known(value)
            if array is not None and array.size <= FOLD_LIMIT:
                found = self.elements[value] = symbolic.literals(array, value.dtype)
        return found

    def from_elements(self, elements: Sequence[Expr], dtype: str, shape: Sequence[int], name: str) -> Value:
        """A value made of known elements: a constant where all are literals, else a node that writes the sizes down."""
        if all(e.op == "const" for e in elements):
            array = np.array([e.attr for e in elements], to_numpy(dtype)).reshape(tuple(shape))
            return self.constant(array, name, dtype)
        attrs = {"dims": tuple(as_dim(e) if e.dtype == "int64" else e for e in elements), "shape": tuple(shape), "dtype": dtype}
        (value,) = self.builder.add(DIMS, (), attrs, name)
        self.elements[value] = tuple(elements)
        return value

    def add(self, op: Operator, inputs: Sequence[Value | None], attrs: Mapping[str, Any], name: str) -> tuple[Value, ...]:
        """Apply an operator; what can be computed now is. Raises `IRError` if inputs and attributes do not fit it."""
        made = application(op, inputs, attrs)
        for tensor in made.outputs:
            check_type(tensor.shape, tensor.dtype, name)
        folded = self._folded(made.outputs, inputs, made.inputs, f"{name}.{op.name}")
        if folded is not None:
            return folded
        values = tuple(Value(self.builder.fresh(f"{name}.{op.name}"), t.dtype, t.shape) for t in made.outputs)
        self.builder.append(Node(op, tuple(inputs), values, dict(attrs), name))
        return values

    def _folded(
        self, outputs: Sequence[te.Tensor], inputs: Sequence[Value | None], placeholders: Sequence[te.Tensor | None], name: str
    ) -> tuple[Value, ...] | None:
        """The outputs as known values, or None."""
        shapes = [tuple(d for d in t.shape if isinstance(d, int)) for t in outputs]
        if any(len(s) != t.ndim or prod(s) > FOLD_LIMIT for s, t in zip(shapes, outputs, strict=True)):
            return None
        given = [(v, p) for v, p in zip(inputs, placeholders, strict=True) if v is not None and p is not None]
        arrays = {p: self.builder.constants[v] for v, p in given if v in self.builder.constants}
        if len(arrays) == len(given) and sum(a.size for a in arrays.values()) <= 16 * FOLD_LIMIT and symbolic.closed(outputs):
            results = evaluate(outputs, arrays, {})
            return tuple(self.constant(a, name, t.dtype) for a, t in zip(results, outputs, strict=True))
        if sum(map(prod, shapes)) > symbolic.LIMIT:
            return None
        known = {p: e for v, p in given if (e := self.known_elements(v)) is not None}
        if given and not known:
            return None
        elements = symbolic.propagate(outputs, known)
        if elements is None:
            return None
        return tuple(self.from_elements(e, t.dtype, s, name) for e, t, s in zip(elements, outputs, shapes, strict=True))

    def finish(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> Graph:
        """The closed graph; only what the outputs need is kept."""
        needed, nodes = set(outputs), []
        for node in reversed(self.builder.nodes):
            if any(o in needed for o in node.outputs):
                nodes.append(node)
                needed.update(v for v in node.inputs if v is not None)
        constants = {v: a for v, a in self.builder.constants.items() if v in needed}
        return Graph(self.builder.name, tuple(inputs), tuple(outputs), tuple(reversed(nodes)), constants)

    def structural(
        self,
        op: Operator,
        inputs: Sequence[Value],
        results: Sequence[tuple[str, Sequence[Dim]]],
        attrs: Mapping[str, Any],
        bodies: Sequence[Graph],
        name: str,
    ) -> tuple[Value, ...]:
        """Append an `IF` or `LOOP` node whose outputs have the given (dtype, shape)."""
        values = tuple(Value(self.builder.fresh(f"{name}.{op.name}"), dtype, shape) for dtype, shape in results)
        for value in values:
            check_type(value.shape, value.dtype, name)
        self.builder.append(Node(op, tuple(inputs), values, dict(attrs), name, tuple(bodies)))
        return values


def check_type(shape: Sequence[Dim], dtype: str, where: str) -> None:
    """Raises `ImportModelError` for a shape that no real model has."""
    if len(shape) > MAX_RANK:
        raise ImportModelError(f"a value has {len(shape)} dimensions", where=where, why=f"at most {MAX_RANK} are accepted")
    size = itemsize(dtype)
    for d in shape:
        if isinstance(d, int):
            if d < 0:
                raise ImportModelError(f"a value has a negative dimension: {list(map(str, shape))}", where=where)
            size *= max(d, 1)
    if size > MAX_BYTES:
        raise ImportModelError(
            f"a value of shape {list(map(str, shape))} ({dtype}) would take {size:.3g} bytes",
            where=where,
            why=f"more than {MAX_BYTES:.3g} bytes cannot be meant",
        )


@dataclass(frozen=True)
class Body:
    """An imported sub-graph: `inputs` are its formal ones; `captured` maps values of the graphs around it to further inputs."""

    scope: Scope
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    captured: Mapping[Value, Value]


class Bodies(Protocol):
    """How the handlers of control flow import the sub-graphs of their node."""

    def inline(self, proto: GraphProto, inputs: Sequence[Value] = ()) -> list[Value]:
        """The outputs of a sub-graph whose nodes are added to the graph around it."""

    def closed(self, proto: GraphProto, types: Sequence[tuple[str, Sequence[Dim]] | np.ndarray] = ()) -> Body:
        """The sub-graph as a graph of its own, with formal inputs of the given (dtype, shape), or known ones."""

    def mark(self) -> int:
        """How many nodes the report has; see `forget`."""

    def forget(self, mark: int) -> None:
        """Drop what the report says of the nodes since `mark`, because they are imported again in another way."""


class Context:
    """One ONNX node. `attrs` holds the schema's defaults for attributes that the node leaves out.

    Attribute values are int, float, str, bytes-free lists of these, `np.ndarray` (tensors) and `onnx.GraphProto`.
    """

    def __init__(
        self,
        op_type: str,
        name: str,
        domain: str,
        opset: int,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any],
        outputs: Sequence[str],
        scope: Scope,
        bodies: Bodies,
    ) -> None:
        self.op_type, self.name, self.domain, self.opset = op_type, name, domain, opset
        self.inputs, self.attrs, self.scope = list(inputs), dict(attrs), scope
        self.outputs = list(outputs)  # names; empty where the output is not wanted
        self.bodies = bodies

    # ------------------------------------------------------------ inputs

    @property
    def num_outputs(self) -> int:
        """Outputs the node lists, unwanted ones included."""
        return len(self.outputs)

    def wants(self, i: int) -> bool:
        """Whether output `i` is used by name."""
        return i < len(self.outputs) and self.outputs[i] != ""

    def input(self, i: int) -> Value | None:
        """Input `i`; None where it is left out."""
        return self.inputs[i] if i < len(self.inputs) else None

    def value(self, i: int) -> Value:
        """Input `i`, which must be there."""
        found = self.input(i)
        if found is None:
            raise ImportModelError(f"input {i} of `{self.op_type}` is missing", where=self.where)
        return found

    @property
    def where(self) -> str:
        """The node, for messages."""
        return f"node `{self.name}` ({self.op_type}, opset {self.opset})"

    # ------------------------------------------------------------ what is known

    def known(self, i: int) -> np.ndarray | None:
        """The value of input `i` where it is known at compile time (None as well where it is left out)."""
        value = self.input(i)
        return None if value is None else self.scope.known(value)

    def dims(self, i: int) -> tuple[Dim, ...] | None:
        """The elements of input `i`, row-major, as ints or expressions over symbolic sizes.

        None if they are not known, or are floats that are not whole for sure.
        """
        value = self.input(i)
        elements = None if value is None else self.scope.known_elements(value)
        if elements is not None and value is not None and is_float(value.dtype):
            elements = symbolic.whole(elements)
        return None if elements is None else tuple(as_dim(e) for e in elements)

    def require_known(self, i: int, what: str) -> np.ndarray:
        """`known(i)`, or `UnsupportedError` saying that `what` must be known at compile time."""
        self.value(i)
        found = self.known(i)
        if found is None:
            raise self._unknown(i, what)
        return found

    def require_dims(self, i: int, what: str) -> tuple[Dim, ...]:
        """`dims(i)`, or `UnsupportedError` saying that `what` must be known at compile time."""
        self.value(i)
        found = self.dims(i)
        if found is None:
            raise self._unknown(i, what)
        return found

    def _unknown(self, i: int, what: str) -> UnsupportedError:
        value = self.value(i)
        origin = "a graph input" if value in self.scope.builder.inputs else "computed from input data"
        return UnsupportedError(
            f"{what} of `{self.op_type}` is not known at compile time",
            where=self.where,
            why=f"input {i} (`{value.name}`, {value.dtype}{list(map(str, value.shape))}) is {origin}",
            hint="make it a constant, or export the model so that it depends on shapes only",
        )

    # ------------------------------------------------------------ making things

    def add(self, op: Operator, inputs: Sequence[Value | None], **attrs: Any) -> Value:
        """Apply an operator that has one output."""
        (output,) = self.add_several(op, inputs, **attrs)
        return output

    def add_several(self, op: Operator, inputs: Sequence[Value | None], **attrs: Any) -> tuple[Value, ...]:
        """Apply an operator: its outputs."""
        return self.scope.add(op, inputs, attrs, self.name)

    def constant(self, array: np.ndarray | float | bool, dtype: str | None = None) -> Value:
        """A compile-time array; with `dtype`, converted to it."""
        made = np.asarray(array)
        if dtype is not None and made.dtype != to_numpy(dtype):
            made = made.astype(to_numpy(dtype))
        return self.scope.constant(made, self.name + ".const", dtype or made.dtype.name)

    def dims_value(self, dims: Sequence[Dim], shape: Sequence[int] | None = None) -> Value:
        """An integer tensor (1-D unless `shape` is given) that holds symbolic or known sizes."""
        return self.scope.from_elements([as_expr(d) for d in dims], "int64", (len(dims),) if shape is None else shape, self.name)

    def unsupported(self, why: str, hint: str = "") -> UnsupportedError:
        """The error to raise for a valid node that cannot be compiled."""
        return UnsupportedError(f"`{self.op_type}` cannot be compiled as it is used here", where=self.where, why=why, hint=hint)

    def invalid(self, why: str) -> ImportModelError:
        """The error to raise for a node that breaks the operator's specification."""
        return ImportModelError(f"`{self.op_type}` is not valid", where=self.where, why=why)
