"""Graph: a model as SSA dataflow over operators.

A `Value` is a typed edge: dtype, logical shape (ints or symbolic), memory layout. A `Node` applies an `Operator` (a function from TE
tensors to TE tensors) with attributes. Three structural operators carry sub-graphs, which are closed: everything they use is passed in.
A fourth gives a symbolic dim its value, which the run counts; nodes that need the dim come after it. A fifth continues state in place.

    KERNEL  bodies = (graph,)            the nodes of `graph` become one kernel
    IF      bodies = (then, otherwise)   inputs: bool condition, then the inputs of both bodies
    LOOP    bodies = (body,)             inputs: carried values, scanned values, captured values
            attrs: trips (number of iterations, a dim), carried, scanned (counts), reverse_in, reverse_out (one flag for each
            scanned input / stacked output), condition (whether the body's last output says "go on")
            body inputs: iteration number (int64 scalar), carried, one slice of each scanned (axis 0), captured
            body outputs: carried, stacked slices, [condition]; node outputs: final carried, stacked (new axis 0)
            attr sizes, if there: dims that carried values grow or shrink in; as many int64 scalars come last among the body's outputs,
            which are what the dims are in the next iteration, or after the last one. SIZE nodes before the loop give the first ones
    APPEND  no bodies                    inputs: an input of the graph, and rows to stand behind its own (axis 0, or the first of more than
            one element); output: all of them, an output of the graph, which may lie in the memory of the input
    SIZE    no bodies, no outputs        inputs: an int64 scalar; attrs: dim (the symbolic dim), bound (what it never exceeds, a dim)

Graphs are immutable; `GraphBuilder` makes new ones. Types of node outputs are derived by running the operator on placeholders.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.errors import IRError, TcompError
from tcomp.ir import te
from tcomp.ir.access import out_of_bounds_accesses, out_of_bounds_reads
from tcomp.ir.broadcasting import SizeMismatch
from tcomp.ir.dims import upper_bound
from tcomp.ir.dtypes import NARROW, integer_range
from tcomp.ir.expr import Dim, Expr, const, substitute, variables
from tcomp.ir.layout import Layout
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.printer import SUFFIXES, Names, Printer, as_html, quoted, unused

if TYPE_CHECKING:
    from tcomp.runtime.manifest import HostSteps


class Value:
    """An edge: `name`, `dtype`, logical `shape`, and `layout` (None = row-major). Compared by identity."""

    __slots__ = ("__weakref__", "dtype", "layout", "name", "shape")

    def __init__(self, name: str, dtype: str, shape: Sequence[Dim], layout: Layout | None = None) -> None:
        self.name, self.dtype, self.shape = name, dtype, tuple(as_dim(d) for d in shape)
        self.layout = None if layout is None or layout.is_identity else layout

    @property
    def physical_shape(self) -> tuple[Dim, ...]:
        """The shape in memory: that of the layout, padding and halo included."""
        return self.shape if self.layout is None else self.layout.shape(self.shape)

    def placeholder(self) -> te.Tensor:
        """A TE placeholder of this type (logical shape)."""
        return te.placeholder(self.shape, self.dtype, self.name)

    def __repr__(self) -> str:
        return f"%{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]" + ("" if self.layout is None else f" {self.layout}")


Inputs: TypeAlias = Sequence[Value | None]  # of a node; None where an optional one is left out


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: `function(*tensors, **attrs)` returns one TE tensor or a tuple. Optional inputs left out are None."""

    name: str
    function: Callable[..., Any] | None = None

    def apply(self, inputs: Sequence[te.Tensor | None], attrs: Mapping[str, Any]) -> tuple[te.Tensor, ...]:
        """The results of the function for these inputs and attributes, as a tuple."""
        assert self.function is not None, self.name
        result = self.function(*inputs, **attrs)
        return result if isinstance(result, tuple) else (result,)


KERNEL, IF, LOOP, SIZE, APPEND = (Operator(name) for name in ("kernel", "if", "loop", "size", "append"))
STRUCTURAL = (KERNEL, IF, LOOP, SIZE, APPEND)


def loop_attrs(
    trips: Dim, carried: int, backwards: Sequence[bool], out: Sequence[bool], condition: bool = False, sizes: Sequence[Expr] = ()
) -> dict[str, Any]:
    """The attributes of a LOOP, whose `reverse_in` is `backwards`, a flag for each scanned value, and `reverse_out` is `out`."""
    flags = {"reverse_in": tuple(backwards), "reverse_out": tuple(out), "condition": condition}
    return {"trips": trips, "carried": carried, "scanned": len(backwards), **flags, **({"sizes": tuple(sizes)} if sizes else {})}


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One application. `attrs` values: None, bool, int, float, str, dims (`Expr`) and nested tuples of these."""

    op: Operator
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    bodies: tuple[Graph, ...] = ()

    def tensors(self, inputs: Sequence[te.Tensor | None]) -> tuple[te.Tensor, ...]:
        """The TE of the outputs, given that of the inputs."""
        return self.op.apply(inputs, self.attrs)


@dataclass(frozen=True, eq=False, slots=True)
class LazyConstant:
    """A lazy constant: the array `make(source, *arguments)` in this shape, computed each time `np.asarray` asks for its elements.

    Large weights are transformed only while the artifact is written, so that they are not in memory twice.
    """

    shape: tuple[int, ...]
    make: Callable[..., np.ndarray]
    source: np.ndarray
    arguments: tuple[Hashable, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the elements, that of `source`."""
        return self.source.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def key(self) -> Hashable:
        """Equal for lazy constants with the same elements: the same function of the same arrays."""
        return self.make, id(self.source), self.arguments

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.make(self.source, *self.arguments).reshape(self.shape), dtype)


Constant = np.ndarray | LazyConstant


def materialised(constant: Constant | None) -> np.ndarray | None:
    """The elements of a constant; None for a lazy one, whose elements are not in memory."""
    return None if isinstance(constant, LazyConstant) else constant


@dataclass(frozen=True, eq=False, slots=True)
class Graph:
    """A closed dataflow graph; `nodes` are in topological order; `constants` hold *logical* arrays by value. `checks` are conditions on the
    dims of the inputs without which it must not be run, and where each comes from. `host` is what the runtime computes around it, no
    part of the graph's text or meaning."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[Value, Constant] = field(default_factory=dict)
    checks: Mapping[Expr, str] = field(default_factory=dict)
    host: HostSteps | None = None

    def __str__(self) -> str:
        return "\n".join(_GraphPrinter().graph(self, "", outermost=True))

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def producers(self) -> dict[Value, Node]:
        """The node that computes each node output."""
        return {v: node for node in self.nodes for v in node.outputs}

    def consumers(self) -> dict[Value, list[Node]]:
        """Nodes that read each value (a node once, however often it reads it)."""
        users: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for v in dict.fromkeys(filter(None, node.inputs)):
                users.setdefault(v, []).append(node)
        return users

    def dims(self) -> list[Expr]:
        """The symbolic dims of all values, in order of first use (inputs first)."""
        return list(variables(*(d for value in self.values() for d in value.shape if isinstance(d, Expr))))

    def uses(self) -> Counter[Value]:
        """How often each value is read: by nodes, in order, and as an output."""
        return Counter([*(v for node in self.nodes for v in node.inputs if v is not None), *self.outputs])

    def values(self) -> Iterator[Value]:
        """Inputs, constants, and node outputs in order."""
        yield from self.inputs
        yield from self.constants
        for node in self.nodes:
            yield from node.outputs

    def counted(self) -> dict[Expr, Dim]:
        """The dims that a run counts, those of bodies included, in order; each with what it never exceeds, in dims of the inputs. Raises
        `IRError` where there is no such bound."""
        limits: dict[Expr, Dim] = {}
        for node in _sizes(self):
            limits[node.attrs["dim"]] = node.attrs["bound"]
        while open_ := [d for d, limit in limits.items() if isinstance(limit, Expr) and not limits.keys().isdisjoint(variables(limit))]:
            for d in open_:
                known = {v: limit for v, limit in limits.items() if v is not d}
                if (limit := upper_bound(limits[d], known)) is None:
                    raise IRError(f"the size {d} that is counted at run time has no bound", where=f"graph `{self.name}`")
                limits[d] = limit
        return limits


def _sizes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        if node.op is SIZE:
            yield node
        elif node.op is not KERNEL:
            for body in node.bodies:
                yield from _sizes(body)


Needed: TypeAlias = set["Value | Expr | None"]  # values, and dims that are counted


def is_needed(node: Node, needed: Needed) -> bool:
    """Whether a node computes something that is needed."""
    return node.attrs["dim"] in needed if node.op is SIZE else not needed.isdisjoint(node.outputs)


def needs(node: Node) -> Iterator[Value | Expr | None]:
    """The operands of a node: its inputs, and the dims in its shapes and attributes."""
    yield from node.inputs
    yield from variables(*(d for d in _mentioned(node) if isinstance(d, Expr)))


def _mentioned(node: Node) -> Iterator[Any]:
    stack: list[Any] = [v.shape for v in (*node.inputs, *node.outputs) if v is not None]
    stack += node.attrs.values()
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            stack += item
        else:
            yield item
    for body in node.bodies:
        for inner in body.nodes:
            yield from _mentioned(inner)


class GraphBuilder:
    """Collects nodes; names are made unique; output types are inferred."""

    def __init__(self, name: str = "graph") -> None:
        self.name, self._names = name, set[str]()
        self.nodes, self.inputs = list[Node](), list[Value]()
        self.constants: dict[Value, Constant] = {}

    def fresh(self, name: str) -> str:
        """`name`, with a number behind it if it is taken."""
        name = unused(name or "v", self._names)
        self._names.add(name)
        return name

    def input(self, name: str, dtype: str, shape: Sequence[Dim], layout: Layout | None = None) -> Value:
        """A new input of the graph, with a unique name."""
        value = Value(self.fresh(name), dtype, shape, layout)
        self.inputs.append(value)
        return value

    def constant(self, array: Constant, name: str = "c", dtype: str | None = None) -> Value:
        """`array` is kept, not copied; `dtype` only where it is not `array.dtype.name`."""
        value = Value(self.fresh(name), dtype or array.dtype.name, array.shape)
        self.constants[value] = array
        return value

    def add(self, op: Operator, inputs: Inputs, attrs: Mapping[str, Any] | None = None, name: str = "") -> tuple[Value, ...]:
        """Append a node of a non-structural operator; returns its outputs. Raises `IRError` (with the node named) if it does not fit."""
        attrs = dict(attrs or {})
        label, outputs = name or op.name, infer(op, inputs, attrs, name).outputs
        values = tuple(Value(self.fresh(label if n == 0 else f"{label}.{n}"), t.dtype, t.shape) for n, t in enumerate(outputs))
        self.nodes.append(Node(op, tuple(inputs), values, attrs, name))
        return values

    def append(self, node: Node) -> None:
        """Append a node whose outputs exist already."""
        self.nodes.append(node)

    def build(self, outputs: Iterable[Value]) -> Graph:
        """The graph of what has been added, with these outputs."""
        return Graph(self.name, tuple(self.inputs), tuple(outputs), tuple(self.nodes), dict(self.constants))


@dataclass(frozen=True, slots=True)
class Application:
    """An operator over placeholders: `inputs` are one for each distinct value (None where left out)."""

    inputs: tuple[te.Tensor | None, ...]
    outputs: tuple[te.Tensor, ...]


_applications: dict[Hashable, Application] = {}
_MAX_APPLICATIONS = 4096  # the cache is dropped as a whole when full, so that long sessions do not grow


def application(op: Operator, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Application:
    """The TE of an operator for inputs of these types; nodes that agree in types and attributes share it: its names may be another's."""
    types = tuple(None if v is None else (inputs.index(v), v.dtype, v.shape) for v in inputs)  # with the first input that is the same value
    key = op, types, attributes_key(attrs)
    if (found := _applications.get(key)) is None:
        placeholder = {v: v.placeholder() for v in inputs if v is not None}
        given = tuple(None if v is None else placeholder[v] for v in inputs)
        if len(_applications) >= _MAX_APPLICATIONS:
            _applications.clear()
        outputs = op.apply(given, attrs)
        _require_inside(outputs)
        found = _applications[key] = Application(given, outputs)
    return found


def _require_inside(outputs: Sequence[te.Tensor]) -> None:
    """Raises `SizeMismatch` where extents that tensors are read over are not those of the tensors: of inputs that do not fit each other."""
    for t in te.tensors(outputs):
        found: Iterator[tuple[Expr, int, Dim]] = iter(())
        if t.body is not None and 0 not in t.shape:
            found = out_of_bounds_reads(t.body, t.axes)
        elif t.extern is not None and t.index == 0:  # temporaries of the program have sizes of their own: of n positions, k are read
            buffers = {*t.extern.parameters, *t.extern.results}
            found = (access for access in out_of_bounds_accesses(t.extern.body) if access[0].attr in buffers)
        if (first := next(found, None)) is not None:
            read, axis, needed = first
            given = read.attr.shape[axis]
            what = (
                f"`{read.attr.name}`, of shape [{', '.join(map(str, read.attr.shape))}], is read over {needed} elements along axis {axis}"
            )
            raise SizeMismatch(what, (needed, given))


def attributes_key(attrs: Mapping[str, Any]) -> Hashable:
    """A key that is equal for attributes of equal types and bits: 1, 1.0 and True differ, and so do 0.0 and -0.0."""

    def key(attr: Any) -> Hashable:
        if isinstance(attr, tuple | list):
            return tuple(map(key, attr))
        return attr if isinstance(attr, Expr) else (type(attr).__name__, attr.hex() if isinstance(attr, float) else attr)

    return tuple((name, key(attrs[name])) for name in sorted(attrs)) if attrs else ()


def infer(op: Operator, inputs: Sequence[Value | None], attrs: Mapping[str, Any], name: str = "") -> Application:
    """The TE of one node over placeholders; the shapes and dtypes of its outputs are the node's output types."""
    try:
        return application(op, inputs, attrs)
    except TcompError as error:
        where = f"node `{name}` ({op.name}) of {', '.join(str(v) for v in inputs)}"
        raise error.restated(IRError, where=where, why=error.why or error.where) from error


INLINE = 8  # elements: larger constants are printed as their `content_hash`


def with_sizes(graph: Graph, sizes: Mapping[Expr, int]) -> Graph:
    """The graph with symbolic dims fixed."""
    known, values = {v: const(n) for v, n in sizes.items()}, dict[Value, Value]()

    def fixed(part: Any) -> Any:
        match part:
            case Expr():
                return as_dim(substitute(part, known))
            case tuple() | list():
                return tuple(map(fixed, part))
        return part

    def value(v: Value) -> Value:
        return values.setdefault(v, Value(v.name, v.dtype, fixed(v.shape), v.layout))

    def inside(g: Graph) -> Graph:
        inputs = tuple(map(value, g.inputs))
        nodes = tuple(
            Node(
                node.op,
                tuple(None if v is None else value(v) for v in node.inputs),
                tuple(map(value, node.outputs)),
                {name: fixed(attr) for name, attr in node.attrs.items()},
                node.name,
                tuple(map(inside, node.bodies)),
            )
            for node in g.nodes
        )
        checks = {substitute(c, known): where for c, where in g.checks.items()}
        return Graph(g.name, inputs, tuple(map(value, g.outputs)), nodes, {value(v): a for v, a in g.constants.items()}, checks, g.host)

    return inside(graph)


def canonical_graph_text(graph: Graph) -> str:
    """The printed graph with values renamed in order (v0, v1, ...), unused constants and the names of graph and nodes left out: equal
    for graphs that compute the same in the same way. The key of compiled kernels."""
    return "\n".join(_GraphPrinter(canonical=True).graph(graph, "", outermost=True))


def content_hash(array: np.ndarray) -> str:
    """The first 24 hex digits of the SHA-256 of dtype, shape and elements (row-major)."""
    digest = hashlib.sha256(f"{array.dtype.name}{list(array.shape)}".encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()[:24]


class _GraphPrinter(Printer):
    """Text of graphs; `text.parser` reads it back."""

    def __init__(self, canonical: bool = False) -> None:
        super().__init__()
        self.values, self.canonical, self.sources = Names(), canonical, not canonical

    def graph(self, graph: Graph, indent: str, outermost: bool = False) -> list[str]:
        outer, self.values = self.values, Names()
        inputs, inside = ", ".join(map(self.declared, graph.inputs)), indent + "  "
        used = graph.uses()
        constants = [v for v in (used if self.canonical else graph.constants) if v in graph.constants]
        lines = [f"{inside}const {self.declared(v)} = {self.constant(np.asarray(graph.constants[v]), v.dtype)}" for v in constants]
        lines += [line for node in graph.nodes for line in self.node(node, inside)]
        outputs, name = ", ".join(map(self.value, graph.outputs)), "g" if self.canonical else quoted(graph.name)
        dims = self.dims(self.variables.free) if outermost else ""
        self.values = outer
        checks = "" if self.canonical else "".join(f" check ({self.term(c, 0, '')}) @{quoted(at)}" for c, at in graph.checks.items())
        return [f"{indent}graph {name}{dims}({inputs}) -> ({outputs}){checks} {{", *lines, indent + "}"]

    def value(self, v: Value) -> str:
        return "%" + (self.values(v, v.name) if not self.canonical or v in self.values.of else self.values.bind(v, "v", numbered=True))

    def declared(self, v: Value) -> str:
        return f"{self.value(v)}: {v.dtype}{self.shape(v.shape)}" + ("" if v.layout is None else f" {v.layout}")

    def node(self, node: Node, indent: str) -> list[str]:
        arguments = ["_" if v is None else self.value(v) for v in node.inputs]
        arguments += [f"{quoted(name, ())}={self.attribute(value)}" for name, value in sorted(node.attrs.items())]
        outputs = ", ".join(self.declared(v) for v in node.outputs)
        label = f" @{quoted(node.name)}" if node.name and not self.canonical else ""
        line = f"{indent}{outputs}{' = ' if outputs else ''}{quoted(node.op.name, ())}({', '.join(arguments)}){label}"
        bodies = [text for body in node.bodies for text in self.graph(body, indent + "  ")]
        return [line + " {", *bodies, indent + "}"] if bodies else [line]

    def attribute(self, value: Any) -> str:
        match value:
            case None:
                return "none"
            case bool() | np.bool_():
                return "true" if value else "false"
            case int() | np.integer() | float() | np.floating():
                return repr(value.item() if isinstance(value, np.generic) else value)
            case str():
                return json.dumps(value)
            case Expr():
                return f"{{{self.term(value, 0, '')}}}" if value.op != "const" else self.attribute(value.attr)
            case tuple() | list():
                return f"({', '.join(map(self.attribute, value))}{',' if len(value) == 1 else ''})"
        raise IRError(f"an attribute is a {type(value).__name__}", hint="attributes are None, bool, int, float, str, dims and tuples")

    def constant(self, array: np.ndarray, dtype: str) -> str:
        if array.size > INLINE:
            return f'sha256 "{content_hash(array)}"'
        elements = array.reshape(-1).tolist() if dtype == "bfloat16" or dtype in NARROW else array.reshape(-1)
        if dtype == "uint64":  # a number without a suffix is an int64
            most = integer_range("int64")[1]
            return f"[{', '.join(f'{x}{SUFFIXES[dtype] if x > most else str()}' for x in elements)}]"
        return f"[{', '.join(str(x).lower() if dtype == 'bool' else str(x) for x in elements)}]"
