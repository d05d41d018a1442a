"""What the handler of one ONNX node sees, and the graph it adds to.

A handler is `def conv(ctx: Context) -> Value | tuple[Value, ...]`: it reads the node's inputs and attributes from `ctx`, adds
operators with `ctx.add`, and returns the node's outputs. Where it only passes these on to one operator, it is a row of data instead:
`forward(LAYER_NORM, "epsilon", inputs=3, axis=axis_of())`. A family file exports `TABLE: Table`.

`ctx.add` computes what is known at compile time, shape arithmetic included (see `symbolic`): a handler that needs a shape, an axis or a
pad width asks `ctx.require_dims(i, "the shape")` and never looks at how it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from onnx import GraphProto

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import symbolic
from tcomp.frontends.onnx.reader import dtype_name
from tcomp.frontends.onnx.scope import Scope, Type
from tcomp.frontends.onnx.signature import LARGEST
from tcomp.ir import shape_operands
from tcomp.ir.broadcasting import HINT
from tcomp.ir.dtypes import is_float, to_numpy
from tcomp.ir.expr import Dim, Expr, as_expr, const
from tcomp.ir.graph import Inputs, Operator, Value  # fmt: skip
from tcomp.ir.simplify import as_dim, prove, same_dim

T = TypeVar("T")

Handler = Callable[["Context"], "Value | tuple[Value | None, ...]"]
Types = Sequence[Type | np.ndarray]  # of the inputs of a sub-graph, some of which are known
Versions = tuple[tuple[int, Handler], ...]  # (first opset, handler), in increasing order
Table = dict[str, Handler | Versions]  # by operator
Reader = Callable[["Context"], Any]  # of an attribute


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

    def closed(self, body: GraphProto | Build, types: Types = (), conditional: bool = False, repeated: bool = False) -> Body:
        """The sub-graph, or what is built in it, as a graph of its own, with formal inputs of the given types, or known ones. A
        `conditional` one does not run in every run, a `repeated` one more than once."""

    def value(self, name: str) -> Value:
        """The value of a name that is visible to the node, whether it is an input of it or not."""

    def stream(self) -> int:
        """The number of this node among those that draw random numbers. Raises `UnsupportedError` in the body of a loop."""

    def attempt(self) -> AbstractContextManager[None]:
        """Where `UnsupportedError` ends this context, the report forgets its nodes, because they are imported again in another way."""


Build = Callable[[Scope, Bodies, Sequence[Value]], Sequence[Value]]  # (scope, its bodies, formal inputs) -> outputs


@dataclass(frozen=True)
class Context:
    """One ONNX node. `attrs` holds the schema's defaults for attributes that the node leaves out. Attribute values are int, float, str,
    bytes-free lists of these, `np.ndarray` (tensors) and `onnx.GraphProto`."""

    op_type: str
    name: str
    opset: int
    inputs: Inputs
    attrs: Mapping[str, Any]
    outputs: Sequence[str]  # names; empty where the output is not wanted
    scope: Scope
    bodies: Bodies

    @property
    def where(self) -> str:
        """The node, for messages."""
        return f"node `{self.name}` ({self.op_type}, opset {self.opset})"

    def wants(self, i: int) -> bool:
        """Whether output `i` is used by name."""
        return i < len(self.outputs) and self.outputs[i] != ""

    def input(self, i: int) -> Value | None:
        """Input `i`; None where it is left out."""
        return self.inputs[i] if i < len(self.inputs) else None

    def value(self, i: int) -> Value:
        """Input `i`, which must be there."""
        if (found := self.input(i)) is None:
            raise ImportModelError(f"input {i} of `{self.op_type}` is missing", where=self.where)
        return found

    def known(self, i: int) -> np.ndarray | None:
        """The value of input `i` where it is known at compile time (None as well where it is left out)."""
        value = self.input(i)
        return None if value is None else self.scope.known(value)

    def dims(self, i: int) -> tuple[Dim, ...] | None:
        """The elements of input `i`, row-major, as ints or expressions over symbolic sizes. None if they are not known, or are floats that
        are not whole for sure."""
        return self._whole(self.input(i), self.scope.known_elements)

    def _whole(self, value: Value | None, elements_of: Callable[[Value], tuple[Expr, ...] | None]) -> tuple[Dim, ...] | None:
        if value is None or (elements := elements_of(value)) is None:
            return None
        whole = symbolic.whole(elements) if is_float(value.dtype) else elements
        return None if whole is None else tuple(map(as_dim, whole))

    def require_dims(self, i: int, what: str) -> tuple[Dim, ...]:
        """`dims(i)`, or `UnsupportedError` saying that `what` must be known at compile time."""
        return self._required(i, what, self.dims(i))

    def given_dims(self, i: int, what: str) -> tuple[Dim, ...]:
        """`dims(i)`, or expressions over values of the model's inputs: any integers, of which `size` makes symbolic sizes. Raises
        `UnsupportedError` saying that `what` must be known before a run."""
        found = self.dims(i)
        return self._required(i, what, self._whole(self.input(i), self.scope.given_elements) if found is None else found)

    def given_numbers(self, i: int, what: str) -> tuple[Expr, ...]:
        """The elements of input `i` before a run: integers as int64, or floats. Raises `UnsupportedError` as `given_dims`."""
        return self._required(i, what, self.scope.given_elements(self.value(i)))

    def size(self, value: Dim, what: str, least: int = 0, most: int | None = LARGEST, valid: Expr | None = None) -> Dim:
        """A size of the result. One that depends on values of inputs gets a range, and runs for which it is not `valid` are refused."""
        return self.scope.size(value, f"{what} of `{self.name}` ({self.op_type})", self.name, least, most, valid)

    def _required(self, i: int, what: str, found: T | None) -> T:
        value = self.value(i)
        if found is not None:
            return found
        origin = "a graph input" if value in self.scope.builder.inputs else "computed from input data"
        why = f"input {i} (`{value.name}`, {value.dtype}{list(map(str, value.shape))}) is {origin}"
        hint = "make it a constant, or export the model so that it depends on shapes only"
        raise UnsupportedError(f"{what} of `{self.op_type}` is not known at compile time", where=self.where, why=why, hint=hint)

    def axis(self, axis: Dim, rank: int | None = None, end: bool = False) -> int:
        """`axis` as 0 <= result < rank, by default the rank of input 0; `end` allows the rank itself. Negative ones count from the end."""
        rank = len(self.value(0).shape) if rank is None else rank
        if not isinstance(axis, int):
            given_by = "values of an input" if shape_operands.depends_on_values(axis) else "a symbolic size"
            raise self.unsupported(
                f"an axis depends on {given_by}", "give that input's value when the model is compiled (values=, --value)"
            )
        if not -rank <= axis < rank + end:
            raise self.invalid(f"axis {axis} of a tensor of rank {rank}")
        return axis + rank if axis < 0 else axis

    def axes(self, axes: Iterable[Dim] | None, rank: int | None = None) -> tuple[int, ...]:
        """Axes, each valid and given once, in the order given; all where `axes` is None."""
        result = tuple(self.axis(axis, rank) for axis in (range(len(self.value(0).shape)) if axes is None else axes))
        if len(set(result)) != len(result):
            raise self.invalid(f"axes {list(map(str, axes or ()))} name one axis twice")
        return result

    def given_axes(self, position: int) -> tuple[Dim, ...] | None:
        """The attribute `axes` (old opsets) or the integer input at `position`; None where neither is given."""
        if self.attrs.get("axes") is not None:
            return tuple(self.attrs["axes"])
        return None if self.input(position) is None else self.given_dims(position, "the axes")

    def dtype(self, name: str, default: str | None = None) -> str:
        """The dtype that an attribute gives by the number of an ONNX element type; `default` where it is left out or 0."""
        number = self.attrs.get(name) or 0
        return default if default is not None and not number else dtype_name(number, self.where)

    def add(self, op: Operator, inputs: Inputs, **attrs: Any) -> Value:
        """Apply an operator that has one output."""
        (output,) = self.add_several(op, inputs, **attrs)
        return output

    def add_several(self, op: Operator, inputs: Inputs, **attrs: Any) -> tuple[Value, ...]:
        """Apply an operator: its outputs."""
        return self.scope.add(op, inputs, attrs, self.name)

    def constant(self, array: np.ndarray | float | bool, dtype: str | None = None) -> Value:
        """A compile-time array; with `dtype`, converted to it."""
        made = np.asarray(array)
        made = made if dtype is None else made.astype(to_numpy(dtype), copy=False)
        return self.scope.builder.constant(made, self.name + ".const", dtype or made.dtype.name)

    def counted(self, count: Value, bound: Dim) -> Dim:
        """The size that an int64 scalar holds, which is never more than `bound`."""
        return self.scope.counted(count, bound, self.name)

    def dims_value(self, dims: Sequence[Dim], shape: Sequence[int] | None = None) -> Value:
        """An integer tensor (1-D unless `shape` is given) that holds symbolic or known sizes."""
        return self.scope.from_elements([as_expr(d) for d in dims], "int64", (len(dims),) if shape is None else shape, self.name)

    def assumed(self, i: int, results: Sequence[Value]) -> tuple[Value, ...]:
        """`results`, which are those of the node if input `i` is true: other runs are refused."""
        (condition,) = self.scope.known_elements(self.value(i)) or (const(False, "bool"),)
        if self.scope.sizes is not None and self.scope.sizes.assume(condition, self.where):
            return tuple(results)
        return tuple(self.scope.with_shape(v, v.shape, condition, self.name) for v in results)

    def can_be(self, shape: Sequence[Dim], wanted: Sequence[Dim]) -> bool:
        """Whether a shape can be another. Where it can, this takes note that it is: symbolic sizes have to be those wanted."""
        pairs = list(zip(shape, wanted, strict=False))
        if len(shape) != len(wanted) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
            return False
        for have, want in pairs:
            self.require_same(have, want)
        return True

    def require_same(self, a: Dim, b: Dim) -> None:
        """Take note that two sizes are equal. Raises `UnsupportedError` where that is not known before a run."""
        sizes = self.scope.sizes
        if not same_dim(a, b) and not ((isinstance(a, Expr) or isinstance(b, Expr)) and sizes is not None and sizes.meet(a, b, self.where)):
            raise self.unsupported(f"{a} and {b} have to be the same size", HINT)

    def require(self, condition: Expr) -> None:
        """Take note that a condition on sizes holds: other runs are refused. Raises `UnsupportedError` where that is not known before a
        run."""
        if not prove(condition) and not (self.scope.sizes is not None and self.scope.sizes.assume(condition, self.where)):
            raise self.unsupported(f"it cannot be told before a run whether {condition}", HINT)

    def unsupported(self, why: str, hint: str = "") -> UnsupportedError:
        """The error to raise for a valid node that cannot be compiled."""
        return UnsupportedError(f"`{self.op_type}` cannot be compiled as it is used here", where=self.where, why=why, hint=hint)

    def invalid(self, why: str) -> ImportModelError:
        """The error to raise for a node that breaks the operator's specification."""
        return ImportModelError(f"`{self.op_type}` is not valid", where=self.where, why=why)


def in_force(versions: Handler | Versions, opset: int) -> Handler | None:
    """The handler that holds at an opset; None where there is none yet."""
    return versions if callable(versions) else next((handler for since, handler in reversed(versions) if since <= opset), None)


def forward(op: Operator, *names: str, inputs: int | None = None, **readers: Reader) -> Handler:
    """A handler that applies one operator to the first `inputs` inputs (None where one is left out), or to all that are given. `names` are
    attributes of the node that the operator takes as they are, `readers` compute its other ones."""

    def handler(ctx: Context) -> tuple[Value, ...]:
        given = ctx.inputs if inputs is None else [ctx.input(i) for i in range(inputs)]
        attrs = {name: ctx.attrs[name] for name in names} | {name: read(ctx) for name, read in readers.items()}
        return ctx.add_several(op, given, **attrs)

    return handler


def attribute(name: str, default: Any = None) -> Reader:
    """Reads an attribute, with a default for opsets that do not have it."""
    return lambda ctx: ctx.attrs.get(name, default)


def flag(name: str) -> Reader:
    """Reads an attribute as a bool; False for opsets that do not have it."""
    return lambda ctx: bool(ctx.attrs.get(name, 0))


def axis_of(name: str = "axis") -> Reader:
    """Reads an attribute as an axis of input 0."""
    return lambda ctx: ctx.axis(ctx.attrs[name])
