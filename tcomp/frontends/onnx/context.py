"""What the handler of one ONNX node sees, and the graph it adds to.

A handler is `def conv(ctx: Context) -> Value | tuple[Value, ...]`: it reads the node's inputs and attributes from `ctx`, adds
operators with `ctx.add`, and returns the node's outputs. Where it only passes these on to one operator, it is a row of data instead:
`forward(LAYER_NORM, "epsilon", inputs=3, axis=axis_of())`. A family file exports `TABLE: Table`.

`ctx.add` computes what is known at compile time, shape arithmetic included (see `symbolic`): a handler that needs a shape, an axis or a
pad width asks `ctx.require_dims(i, "the shape")` and never looks at how it was computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np
from onnx import GraphProto

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import symbolic
from tcomp.frontends.onnx.reader import dtype_name
from tcomp.frontends.onnx.signature import LARGEST
from tcomp.ir import shape_operands
from tcomp.ir.broadcasting import HINT, SizeMismatch
from tcomp.ir.dtypes import NARROW, is_float, itemsize, to_numpy
from tcomp.ir.equations import Contradiction, Sizes
from tcomp.ir.expr import Dim, Expr, as_expr, binary, bounds, const, dim, equal, variables, walk, with_sources
from tcomp.ir.graph import (
    SIZE,
    STRUCTURAL,
    Application,
    Graph,
    GraphBuilder,
    Inputs,
    Needed,
    Node,
    Operator,
    Value,
    application,
    is_needed,
    materialised,
    needs,
)  # fmt: skip
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.simplify import as_dim, prove, same_dim, simplify
from tcomp.ops.movement import DIMS, RESHAPE, WITH_SHAPE

T = TypeVar("T")
FOLD_LIMIT = 4096  # elements: constants up to this size are computed while importing; larger ones are left to the passes
MAX_RANK = 32
MAX_EQUATIONS = 32  # between sizes that one operator needs
MAX_BYTES = 1 << 42  # of one value; anything larger is a damaged or hostile model

Handler = Callable[["Context"], "Value | tuple[Value | None, ...]"]
Versions = tuple[tuple[int, Handler], ...]  # (first opset, handler), in increasing order
Table = dict[str, Handler | Versions]  # by operator
Reader = Callable[["Context"], Any]  # of an attribute
Type = tuple[str, Sequence[Dim]]  # (dtype, shape)


class Scope:
    """A graph under construction and what is known at compile time about its values. `elements[v]` lists the elements of `v` in row-major
    order as expressions over symbolic sizes (integers as `int64`). `sizes` takes the equations between symbolic sizes that operators need;
    None in a graph that only some runs execute. `given[v]` lists the elements that values of the model's inputs give before a run: of
    operands of shapes, when they are asked for. `origin` says of which value around it an input of a body is."""

    def __init__(self, name: str, sizes: Sizes | None = None, around: Scope | None = None) -> None:
        self.builder, self.sizes = GraphBuilder(name), sizes
        self.root: Scope = self if around is None else around.root
        self.elements: dict[Value, tuple[Expr, ...]] = {}
        self.names: GraphBuilder = around.names if around is not None else self.builder  # where names of counted sizes are unique
        self.given: dict[Value, tuple[Expr, ...] | None] = {}
        self.origin: dict[Value, tuple[Scope, Value]] = {}
        self.producer: dict[Value, Node] = {}
        self.given_sizes: dict[tuple[Expr, int, int | None, Expr | None], Dim] = {}  # that are computed of given elements
        self.bounds: dict[str, int] = {}  # of numbers of trips, by the names that the caller knows them by
        self.asked: set[str] = set()  # names of bounds that may be given
        self.counted_sizes: set[Expr] = set()  # those that only a run tells

    def known(self, value: Value) -> np.ndarray | None:
        """The array of a value that is known completely."""
        return materialised(self.builder.constants.get(value))

    def known_elements(self, value: Value) -> tuple[Expr, ...] | None:
        """The elements of a small value as expressions, or None."""
        if value.dtype in NARROW:
            return None
        if value not in self.elements and (array := self.known(value)) is not None and array.size <= FOLD_LIMIT:
            self.elements[value] = symbolic.literals(array, value.dtype)
        return self.elements.get(value)

    def given_elements(self, value: Value) -> tuple[Expr, ...] | None:
        """The elements of a small value before a run, as expressions over symbolic sizes and elements of the model's inputs, or None."""
        stack = [value]
        while stack:  # no recursion along what may be a long chain
            last = stack[-1]
            if (node := self._waits_for(last)) and (missing := [v for v in node.inputs if v is not None and v not in self.given]):
                stack += missing
            else:
                self.given.setdefault(stack.pop(), self._given(last, node))
        return self.given[value]

    def _waits_for(self, value: Value) -> Node | None:
        """The node whose inputs have to be known before `value` can be."""
        if value in self.given or self.known_elements(value) is not None or not _few(value):
            return None
        if value not in self.producer:
            self.producer.update((v, node) for node in self.builder.nodes for v in node.outputs)
        node = self.producer.get(value)
        return None if node is None or node.op in STRUCTURAL else node

    def _given(self, value: Value, node: Node | None) -> tuple[Expr, ...] | None:
        if (known := self.known_elements(value)) is not None or not _few(value):
            return known
        if value in self.origin:
            scope, outer = self.origin[value]
            return scope.given_elements(outer)
        if self.root is self and value in self.builder.inputs:
            number = self.builder.inputs.index(value)
            found = [shape_operands.element(value.name, number, n, value.dtype) for n in range(prod(map(int, value.shape)))]
            return tuple(binary("ne", e, 0) if value.dtype == "bool" else e for e in found)
        if node is None or not all(map(_few, node.outputs)):
            return None
        made = application(node.op, node.inputs, node.attrs)
        inputs = [(p, v) for p, v in zip(made.inputs, node.inputs, strict=True) if p is not None and v is not None]
        results = symbolic.propagate(made.outputs, {p: e for p, v in inputs if (e := self.given[v]) is not None}, exact=True)
        return None if results is None else dict(zip(node.outputs, results, strict=True))[value]

    def size(self, value: Dim, what: str, name: str, least: int = 0, most: int | None = LARGEST, valid: Expr | None = None) -> Dim:
        """A size, with its range where it depends on values of inputs, or is computed by way of floats; equal ones are one. Runs for which
        it is not `valid` are refused."""
        if not any(
            isinstance(e, Expr) and (shape_operands.depends_on_values(e) or any(is_float(part.dtype) for part in walk(e)))
            for e in (value, valid)
        ):
            return as_dim(value)
        value, valid = simplify(value), None if valid is None or prove(valid) else simplify(valid)
        if late := self.root.counted_sizes.intersection(with_sources(variables(value, *([] if valid is None else [valid])))):
            why = f"it depends on values of inputs, and on `{next(iter(late)).name}`, which only a run counts"
            raise UnsupportedError(f"{what} is not known before a run", why=why)
        sizes, key = self.root.given_sizes, (value, least, most, valid)  # of all graphs together, so that names differ
        if key not in sizes:
            sizes[key] = shape_operands.derived(self.root.builder.fresh(f"{name}.size"), value, least, most, what, valid)
        return sizes[key]

    def from_elements(self, elements: Sequence[Expr], dtype: str, shape: Sequence[int], name: str) -> Value:
        """A value made of known elements: a constant where all are literals, else a node that writes the sizes down."""
        if all(e.op == "const" for e in elements):
            array = np.array([e.attr for e in elements], to_numpy(dtype)).reshape(tuple(shape))
            return self.builder.constant(array, name, dtype)
        attrs = {"dims": tuple(as_dim(e) if e.dtype == "int64" else e for e in elements), "shape": tuple(shape), "dtype": dtype}
        (value,) = self.builder.add(DIMS, (), attrs, name)
        self.elements[value] = tuple(elements)
        return value

    def add(self, op: Operator, inputs: Inputs, attrs: Mapping[str, Any], name: str) -> tuple[Value, ...]:
        """Apply an operator; what can be computed now is. Raises `IRError` if inputs and attributes do not fit it."""
        made, inputs, attrs = self._fitted(op, inputs, attrs, name)
        for tensor in made.outputs:
            check_type(tensor.shape, tensor.dtype, name)
        if (folded := self._folded(made, inputs, f"{name}.{op.name}")) is not None:
            return folded
        return self.append(op, inputs, [(t.dtype, t.shape) for t in made.outputs], attrs, name)

    def _fitted(self, op: Operator, inputs: Inputs, attrs: Mapping[str, Any], name: str) -> tuple[Application, Inputs, Mapping[str, Any]]:
        """The TE of an operator; where sizes have to be equal, its inputs and attributes are rewritten in terms of one of them."""
        for _ in range(MAX_EQUATIONS):
            try:
                return application(op, inputs, attrs), inputs, attrs
            except SizeMismatch as error:
                first, second = error.sizes
                if not (isinstance(first, Expr) or isinstance(second, Expr)):
                    raise
                try:
                    noted = self.sizes is not None and self.sizes.meet(first, second, name)
                except Contradiction as never:
                    raise Contradiction(error.what, why=never.why or "no sizes of the inputs make them equal") from never
                a, b = (d if self.sizes is None else self.sizes.now(d) for d in error.sizes)

                symbolic_first = (a, b) if isinstance(a, Expr) else (b, a)

                def now(x: Any, pair: tuple[Dim, Dim] = symbolic_first) -> Any:
                    if isinstance(x, tuple | list):
                        return tuple(map(now, x))
                    size = self.sizes.now(x) if isinstance(x, Expr) and self.sizes is not None else x
                    return pair[1] if isinstance(size, Expr) and same_dim(size, pair[0]) else size

                shapes: list[Any] = [None if v is None else now(v.shape) for v in inputs]
                if op is RESHAPE and shapes == [v.shape for v in inputs if v is not None]:  # of a product that is equal to another one
                    (flat,) = self.add(RESHAPE, inputs, {"shape": (a,)}, name)
                    inputs, shapes = [flat], [(b,)]
                condition = None if noted else equal(as_expr(a), as_expr(b))
                pairs = list(zip(inputs, shapes, strict=True))
                inputs = [v if v is None or s == v.shape else self.with_shape(v, s, condition, name) for v, s in pairs]
                attrs = {key: now(value) for key, value in attrs.items()}
        raise UnsupportedError("the sizes of its inputs depend on each other in too complex a way", where=name)

    def with_shape(self, x: Value, shape: Sequence[Dim], condition: Expr | None, name: str) -> Value:
        """`x` under a shape that is its own in every run where `condition` holds; other runs end here. None: there are no others."""
        title = name if condition is None else f"{name} (which needs {condition})"
        return self.append(WITH_SHAPE, [x], [(x.dtype, shape)], {"shape": tuple(shape), "condition": condition}, title)[0]

    def append(
        self, op: Operator, inputs: Inputs, results: Sequence[Type], attrs: Mapping[str, Any], name: str, bodies: Sequence[Graph] = ()
    ) -> tuple[Value, ...]:
        """Append a node whose outputs have the given types."""
        for dtype, shape in results:
            check_type(shape, dtype, name)
        values = tuple(Value(self.builder.fresh(f"{name}.{op.name}"), dtype, shape) for dtype, shape in results)
        self.builder.append(Node(op, tuple(inputs), values, dict(attrs), name, tuple(bodies)))
        return values

    def counted(self, count: Value, bound: Dim, name: str) -> Dim:
        """A size that the run counts: the value of an int64 scalar, which is never more than `bound`, or less than 0."""
        if (elements := self.known_elements(count)) is not None:
            return as_dim(elements[0])
        size = self.new_size(name, bounds(bound)[1])
        self.set_size(size, count, bound, name)
        return size

    def trips_bound(self, name: str) -> int | None:
        """The caller's bound of a number of trips."""
        self.root.asked.add(name)
        return self.root.bounds.get(name)

    def limits(self) -> dict[Expr, Dim]:
        """The sizes that the run counts in this graph, each with what it never exceeds, over the dims around it."""
        return self.builder.build(()).counted()

    def new_size(self, name: str, hi: int | None = None) -> Expr:
        """A dim for a size that the run counts."""
        size = dim(self.names.fresh(re.sub(r"\W", "_", f"{name}_size")), 0, hi)
        self.root.counted_sizes.add(size)
        return size

    def set_size(self, size: Expr, count: Value, bound: Dim, name: str) -> None:
        """Give such a dim its value, that of an int64 scalar, which is never more than `bound`."""
        self.builder.append(Node(SIZE, (count,), (), {"dim": size, "bound": bound}, name))

    def _folded(self, made: Application, inputs: Inputs, name: str) -> tuple[Value, ...] | None:
        """The outputs as known values, or None."""
        outputs = made.outputs
        shapes = [tuple(d for d in t.shape if isinstance(d, int)) for t in outputs]
        if any(len(s) != t.ndim or prod(s) > FOLD_LIMIT for s, t in zip(shapes, outputs, strict=True)):
            return None
        given = [(v, p) for v, p in zip(inputs, made.inputs, strict=True) if v is not None and p is not None]
        arrays = {p: self.builder.constants[v] for v, p in given if v in self.builder.constants}
        if all(p in arrays for _, p in given) and sum(a.size for a in arrays.values()) <= 16 * FOLD_LIMIT and symbolic.closed(outputs):
            results = evaluate(outputs, arrays, {})
            return tuple(self.builder.constant(a, name, t.dtype) for a, t in zip(results, outputs, strict=True))
        if sum(map(prod, shapes)) > symbolic.LIMIT:
            return None
        known = {p: e for v, p in given if (e := self.known_elements(v)) is not None}
        if given and not known:
            return None
        elements = symbolic.propagate(
            outputs, known, assume=lambda condition: self.sizes is not None and self.sizes.assume(condition, name)
        )
        if elements is None:
            return None
        return tuple(self.from_elements(e, t.dtype, s, name) for e, t, s in zip(elements, outputs, shapes, strict=True))

    def finish(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> Graph:
        """The closed graph; only what the outputs need is kept."""
        needed: Needed = {*outputs, *variables(*(d for v in outputs for d in v.shape if isinstance(d, Expr)))}
        nodes, counts = [], any(node.op is SIZE for node in self.builder.nodes)
        for node in reversed(self.builder.nodes):
            if is_needed(node, needed):
                nodes.append(node)
                needed.update(needs(node) if counts else node.inputs)
        constants = {v: a for v, a in self.builder.constants.items() if v in needed}
        return Graph(self.builder.name, tuple(inputs), tuple(outputs), tuple(reversed(nodes)), constants)


def _few(value: Value) -> bool:
    """Whether a value has a fixed number of elements, few enough to be looked at one by one."""
    return all(isinstance(d, int) for d in value.shape) and prod(map(int, value.shape)) <= symbolic.LIMIT


def check_type(shape: Sequence[Dim], dtype: str, where: str) -> None:
    """Raises `ImportModelError` for a shape that no real model has."""
    if len(shape) > MAX_RANK:
        raise ImportModelError(f"a value has {len(shape)} dimensions", where=where, why=f"at most {MAX_RANK} are accepted")
    known = [d for d in shape if isinstance(d, int)]
    if min(known, default=0) < 0:
        raise ImportModelError(f"a value has a negative dimension: {list(map(str, shape))}", where=where)
    if any(symbolic.too_complex(d) for d in shape if isinstance(d, Expr)):
        what, why = "the size of a value depends on symbolic sizes in too complex a way", "its formula has too many operators or sizes"
        raise UnsupportedError(what, where=where, why=why, hint="fix symbolic sizes with --dim")
    if (size := itemsize(dtype) * prod(max(d, 1) for d in known)) > MAX_BYTES:
        what = f"a value of shape {list(map(str, shape))} ({dtype}) would take {size:.3g} bytes"
        raise ImportModelError(what, where=where, why=f"more than {MAX_BYTES:.3g} bytes cannot be meant")


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

    def closed(self, proto: GraphProto, types: Sequence[Type | np.ndarray] = (), conditional: bool = False, repeated: bool = False) -> Body:
        """The sub-graph as a graph of its own, with formal inputs of the given types, or known ones. A `conditional` one does not run in
        every run, a `repeated` one more than once."""

    def value(self, name: str) -> Value:
        """The value of a name that is visible to the node, whether it is an input of it or not."""

    def stream(self) -> int:
        """The number of this node among those that draw random numbers. Raises `UnsupportedError` in the body of a loop."""

    def attempt(self) -> AbstractContextManager[None]:
        """Where `UnsupportedError` ends this context, the report forgets its nodes, because they are imported again in another way."""


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

    def require_known(self, i: int, what: str) -> np.ndarray:
        """`known(i)`, or `UnsupportedError` saying that `what` must be known at compile time."""
        return self._required(i, what, self.known(i))

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
