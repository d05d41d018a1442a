"""ONNX → Graph, node by node, and the report of what can be compiled.

`import_model` walks the nodes in topological order. A node is imported by the handler that `table` lists for its domain, type and
opset; where there is none, by expanding its definition as a function (the model's own, or ONNX's). What cannot be compiled is
collected, values that depend on it are set aside, and at the end one `UnsupportedError` lists everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto

from tcomp.errors import ImportModelError, InputError, TcompError, UnsupportedError
from tcomp.frontends.onnx import reader, schema, table
from tcomp.frontends.onnx.context import FOLD_LIMIT, Body, Context, Scope, check_type
from tcomp.frontends.onnx.order import check_names, ordered
from tcomp.frontends.onnx.signature import signature
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Graph, Node, Value
from tcomp.ops.shapes import IDENTITY

_MAX_DEPTH = 24  # of functions inside functions, and of sub-graphs inside sub-graphs
_MAX_NODES = 100_000  # after expansion

SUPPORTED, DECOMPOSED, MISSING, UNCHECKED = "supported", "decomposed", "missing", "unchecked"


@dataclass(frozen=True)
class NodeRecord:
    """How one node of a model is compiled.

    `status` is "supported" (by a handler), "decomposed" (into simpler operators by its ONNX definition), "missing", or
    "unchecked" (it depends on a missing one). `dtypes` are those of the inputs.
    """

    name: str
    op_type: str
    domain: str
    opset: int
    dtypes: tuple[str, ...]
    status: str
    reason: str = ""


def import_model(
    source: str | PathLike[str] | bytes | ModelProto,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    values: Mapping[str, np.ndarray] | None = None,
) -> Graph:
    """The graph of an ONNX model.

    `shapes` gives inputs another shape: ints, and names (or formulas such as "32*h") for symbolic dims. `dims` fixes a symbolic dim
    (int) or bounds it (lowest, highest). Symbolic dims have the name the model gives them; open ones are called `<input>_<axis>`.
    `values` fixes inputs for good: they are constants of the graph, and shapes may depend on them.

    Raises `ImportModelError` for what is no valid model, `InputError` for shapes and dims that do not fit it, and `UnsupportedError`
    naming every node that cannot be compiled.
    """
    graph, records = _import(source, shapes, dims, values)
    missing = [r for r in records if r.status == MISSING]
    if missing:
        lines = [f"{r.name} ({r.domain + '.' if r.domain else ''}{r.op_type}, opset {r.opset}): {r.reason}" for r in missing]
        raise UnsupportedError(
            f"{len(missing)} of {len(records)} nodes cannot be compiled",
            where="\n    ".join(lines),
            hint="`tcomp check` shows all nodes of the model",
        )
    assert graph is not None
    return graph


def check_model(
    source: str | PathLike[str] | bytes | ModelProto,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    values: Mapping[str, np.ndarray] | None = None,
) -> list[NodeRecord]:
    """One record per node of a model, supported or not. Arguments and other errors as for `import_model`."""
    return _import(source, shapes, dims, values)[1]


def _import(
    source: str | PathLike[str] | bytes | ModelProto,
    shapes: Mapping[str, Sequence[int | str]] | None,
    dims: Mapping[str, int | tuple[int, int]] | None,
    values: Mapping[str, np.ndarray] | None,
) -> tuple[Graph | None, list[NodeRecord]]:
    model, tensors = reader.read_model(source)
    try:
        return _Importer(model, tensors).run(shapes or {}, dims or {}, values or {})
    except RecursionError as error:
        raise ImportModelError("the model nests graphs or expressions too deeply") from error


# ---------------------------------------------------------------- names


_POISON = Value("unsupported", "bool", ())  # stands for a value whose producer cannot be compiled


class _Poisoned(UnsupportedError):
    """Something depends on a value that cannot be compiled; already reported where that value is made."""


@dataclass
class Frame:
    """The names visible to the nodes of one graph, and where its nodes are added.

    A body of `If`, `Loop` or `Scan` has a scope of its own; values of the graphs around it become inputs when they are first used
    (`captured`: outer value → input of this body). A branch or function that is expanded in place shares the scope around it.
    """

    scope: Scope
    opsets: Mapping[str, int]
    values: dict[str, Value] = field(default_factory=dict)
    parent: Frame | None = None
    attributes: Mapping[str, AttributeProto] = field(default_factory=dict)  # of the function being expanded
    prefix: str = ""
    depth: int = 0
    captured: dict[Value, Value] = field(default_factory=dict)

    def lookup(self, name: str) -> Value:
        """The value of a name, here or in a graph around this one."""
        found = self.values.get(name)
        if found is not None:
            return found
        if self.parent is None:
            raise ImportModelError(f"`{name}` is used but defined nowhere", where=f"graph `{self.scope.builder.name}`")
        outer = self.parent.lookup(name)
        if self.parent.scope is not self.scope and outer is not _POISON:
            outer = self._capture(outer)
        self.values[name] = outer
        return outer

    def _capture(self, outer: Value) -> Value:
        assert self.parent is not None
        if outer in self.captured:
            return self.captured[outer]
        array, elements = self.parent.scope.known(outer), self.parent.scope.known_elements(outer)
        if array is not None and array.size <= FOLD_LIMIT:
            return self.scope.constant(array, outer.name, outer.dtype)
        if elements is not None:
            return self.scope.from_elements(elements, outer.dtype, [int(d) for d in outer.shape], outer.name)
        inner = self.captured[outer] = self.scope.builder.input(outer.name, outer.dtype, outer.shape)
        return inner


# ---------------------------------------------------------------- the walk


class _Importer:
    def __init__(self, model: ModelProto, tensors: reader.TensorReader) -> None:
        self.model, self.tensors = model, tensors
        self.records: list[NodeRecord] = []
        self.reported: set[str] = set()  # names in the records
        self.count = 0
        self.titled: set[Value] = set()  # values that bear the name the model gives them
        self.opsets = _opsets(model.opset_import)
        self.functions: dict[tuple[str, str, str], FunctionProto] = {}
        for f in model.functions:
            self.functions[_domain(f.domain), f.name, getattr(f, "overload", "")] = f

    def run(
        self, shapes: Mapping[str, Sequence[int | str]], dims: Mapping[str, int | tuple[int, int]], values: Mapping[str, np.ndarray]
    ) -> tuple[Graph | None, list[NodeRecord]]:
        proto = self.model.graph
        frame = Frame(Scope(proto.name or "model"), self.opsets)
        initializers = {t.name for t in proto.initializer} | {t.values.name for t in proto.sparse_initializer}
        check_names(proto)
        builder = frame.scope.builder
        for info in [*proto.input, *proto.output]:
            builder.fresh(info.name)  # reserves the names of the signature
        fixed = {i.name: i for i in proto.input if i.name in values}
        if unknown := [name for name in values if name not in fixed]:
            raise InputError(f"the model has no input `{unknown[0]}`", hint=f"its inputs are {', '.join(i.name for i in proto.input)}")
        for name, info in fixed.items():
            frame.values[name] = frame.scope.constant(_fitting(values[name], info), name)
        free = [i for i in proto.input if i.name not in initializers and i.name not in fixed]
        for name, dtype, shape in signature(free, shapes, dims):
            check_type(shape, dtype, f"input `{name}`")
            frame.values[name] = value = Value(name, dtype, shape)
            builder.inputs.append(value)
        results = self.graph(frame, proto, frozenset(i.name for i in proto.output))
        if any(value is _POISON for value in results):
            return None, self.records
        return _finish(frame.scope, results, proto), self.records

    def graph(self, frame: Frame, proto: GraphProto, reserved: frozenset[str] = frozenset()) -> list[Value]:
        """Import the initializers and nodes of a graph; returns its outputs. Formal inputs are already in `frame.values`."""
        for tensor in proto.initializer:
            if tensor.name in frame.values:
                continue  # the caller gave an input that has a default another value
            read = self.tensors.array if frame.depth else self.tensors.initializer
            self.constant(frame, tensor.name, partial(read, tensor))
        for sparse in proto.sparse_initializer:
            where = f"sparse tensor `{sparse.values.name}`"
            self.constant(frame, sparse.values.name, partial(self.tensors.dense, sparse, where))
        for node in ordered(proto.node, [o.name for o in proto.output], f"graph `{proto.name}`"):
            self.node(frame, node, reserved)
        return [frame.lookup(o.name) for o in proto.output]

    def constant(self, frame: Frame, name: str, array: Callable[[], Any]) -> None:
        """An initializer; one of a type that is not supported only matters where it is used."""
        try:
            frame.values[name] = frame.scope.constant(array(), name)
        except UnsupportedError as error:
            self.records.append(NodeRecord(name, "initializer", "", self.opsets.get("", 0), (), MISSING, _reason(error)))
            frame.values[name] = _POISON

    def node(self, frame: Frame, node: NodeProto, reserved: frozenset[str]) -> None:
        """Import one node and record how. Its outputs become visible in the frame."""
        domain = _domain(node.domain)
        opset = frame.opsets.get(domain, 0)
        name = frame.prefix + (node.name or next((o for o in node.output if o), node.op_type))
        inputs = [frame.lookup(i) if i else None for i in node.input]
        dtypes = tuple(v.dtype for v in inputs if v is not None and v is not _POISON)
        number = len(self.records)  # a control-flow node stands before the nodes of its bodies
        results: Sequence[Value | None] = ()
        try:
            reason = ""
            status, results = self.apply(frame, node, name, domain, opset, inputs)
        except _Poisoned as error:
            status, reason = UNCHECKED, error.what
        except UnsupportedError as error:
            status, reason = MISSING, _reason(error)
        if frame.depth == 0 or name not in self.reported:  # an unrolled body is reported once
            self.records.insert(number, NodeRecord(name, node.op_type, domain, opset, dtypes, status, reason))
            self.reported.add(name)
        self.bind(frame, node, name, status, results, reserved)

    def bind(
        self, frame: Frame, node: NodeProto, name: str, status: str, results: Sequence[Value | None], reserved: frozenset[str]
    ) -> None:
        for i, output in enumerate(node.output):
            if not output:
                continue
            if status in (MISSING, UNCHECKED):
                frame.values[output] = _POISON
                continue
            value = results[i] if i < len(results) else None
            if value is None:
                raise ImportModelError(f"output {i} (`{output}`) is not computed by `{node.op_type}`", where=f"node `{name}`")
            fresh = value not in self.titled or (output in reserved and value.name not in reserved)
            if fresh and _renamable(frame.scope, value):
                value.name = output if output in reserved else frame.scope.builder.fresh(frame.prefix + output)
                self.titled.add(value)
            frame.values[output] = value

    def apply(
        self, frame: Frame, node: NodeProto, name: str, domain: str, opset: int, inputs: Sequence[Value | None]
    ) -> tuple[str, Sequence[Value | None]]:
        """(status, outputs) of one node. Raises `UnsupportedError` or `ImportModelError`."""
        where = f"node `{name}` ({node.op_type}, opset {opset})"
        if any(v is _POISON for v in inputs):
            raise _Poisoned("depends on a value that cannot be compiled")
        self.count += 1
        if self.count > _MAX_NODES:
            raise ImportModelError(f"the model has more than {_MAX_NODES} nodes after expanding its functions", where=where)
        if frame.depth > _MAX_DEPTH:
            raise ImportModelError("functions or graphs are nested too deeply", where=where, why=f"more than {_MAX_DEPTH} levels")
        attributes = _resolved(node, frame.attributes)
        function = self.functions.get((domain, node.op_type, getattr(node, "overload", "")))
        try:
            if function is not None:
                return DECOMPOSED, self.expand(frame, function, node, name, inputs, _defaults(function, attributes))
            if domain not in frame.opsets:
                raise ImportModelError(f"domain `{domain or 'ai.onnx'}` is used but not imported", where=where)
            if domain == "" and opset > reader.newest_opset(domain):
                raise UnsupportedError(
                    f"opset {opset} is newer than any known here ({reader.newest_opset(domain)})", where=where, hint="update `onnx`"
                )
            found = schema.find(node.op_type, opset, domain)
            handler = table.find(domain, node.op_type, opset)
            if found is not None:
                schema.check_node(found, node, inputs, where)
            if handler is not None:
                defaults = {} if found is None else {n: a for n, a in found.defaults.items() if n not in attributes}
                values = {n: self.tensors.attribute(a, where) for n, a in {**defaults, **attributes}.items()}
                body = _Bodies(self, frame, name)
                ctx = Context(node.op_type, name, domain, opset, inputs, values, list(node.output), frame.scope, body)
                result = handler(ctx)
                return SUPPORTED, result if isinstance(result, tuple) else (result,)
            if found is None:
                raise UnsupportedError(f"unknown operator `{node.op_type}`", why=f"domain `{domain or 'ai.onnx'}`, opset {opset}")
            if any(a.type == AttributeProto.GRAPH for a in node.attribute):
                raise UnsupportedError(f"operator `{node.op_type}` is not supported")
            resolved = NodeProto()
            resolved.CopyFrom(node)
            del resolved.attribute[:]
            resolved.attribute.extend(attributes.values())
            definition = schema.function_body(found, resolved, inputs, opset)
            if definition is None:
                raise UnsupportedError(f"operator `{node.op_type}` is not supported")
            actual = {**found.defaults, **attributes}
            return DECOMPOSED, self.expand(frame, definition, node, name, inputs, actual)
        except ImportModelError:
            raise
        except UnsupportedError:
            raise
        except TcompError as error:
            raise ImportModelError(error.what, where=where, why=error.why or error.where, hint=error.hint) from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, AssertionError, MemoryError) as error:
            raise ImportModelError(
                "the node cannot be imported: its inputs and attributes do not fit together",
                where=where,
                why=f"{type(error).__name__}: {error}",
                hint="`onnx.checker.check_model(path, full_check=True)` may say more",
            ) from error

    def expand(
        self,
        frame: Frame,
        function: FunctionProto,
        node: NodeProto,
        name: str,
        inputs: Sequence[Value | None],
        attributes: Mapping[str, AttributeProto],
    ) -> list[Value | None]:
        """The outputs of a node, by the nodes of its definition."""
        opsets = {**frame.opsets, **_opsets(function.opset_import)}
        formal = list(function.input)
        if len(inputs) > len(formal):
            raise ImportModelError(
                f"{len(inputs)} inputs for the function `{function.name}`", where=f"node `{name}`", why=f"it has {len(formal)} parameters"
            )
        inner = Frame(frame.scope, opsets, attributes=attributes, prefix=name + "/", depth=frame.depth + 1)
        absent = set(formal[len(inputs) :])
        for parameter, value in zip(formal, inputs, strict=False):
            if value is None:
                absent.add(parameter)
            else:
                inner.values[parameter] = value
        wanted = [o for o, actual in zip(function.output, node.output, strict=False) if actual]
        for step in ordered(function.node, wanted, f"function `{function.name}`"):
            if absent.intersection(step.input):
                kept = NodeProto()
                kept.CopyFrom(step)
                for i, n in enumerate(kept.input):
                    kept.input[i] = "" if n in absent else n
                step = kept
            title = inner.prefix + (step.name or next((o for o in step.output if o), step.op_type))
            domain = _domain(step.domain)
            operands = [inner.lookup(i) if i else None for i in step.input]
            try:
                _, results = self.apply(inner, step, title, domain, opsets.get(domain, 0), operands)
            except UnsupportedError as error:
                raise UnsupportedError(f"its definition uses {step.op_type}: {error.what}", where=error.where, why=error.why) from error
            self.bind(inner, step, title, SUPPORTED, results, frozenset())
        return [inner.lookup(o) if o in wanted else None for o in function.output]


@dataclass(frozen=True)
class _Bodies:
    """How the handlers of control flow import the sub-graphs of their node (`Context.bodies`)."""

    importer: _Importer
    frame: Frame
    name: str

    def inline(self, proto: GraphProto, inputs: Sequence[Value] = ()) -> list[Value]:
        """The outputs of a sub-graph whose nodes are added to the graph around it."""
        frame = self._frame(self.frame.scope)
        frame.values.update(_bound(proto, inputs))
        return self._outputs(frame, proto)

    def closed(self, proto: GraphProto, types: Sequence[tuple[str, Sequence[Dim]] | np.ndarray] = ()) -> Body:
        """The sub-graph as a graph of its own, with formal inputs of the given (dtype, shape), or known ones."""
        scope = Scope(f"{self.name}.{proto.name or 'body'}")
        frame = self._frame(scope)
        inputs = tuple(
            scope.constant(t, i.name) if isinstance(t, np.ndarray) else scope.builder.input(i.name, *t)
            for i, t in zip(proto.input, types, strict=False)
        )
        frame.values.update(_bound(proto, inputs))
        outputs = tuple(self._outputs(frame, proto))
        return Body(scope, inputs, outputs, frame.captured)

    def mark(self) -> int:
        return len(self.importer.records)

    def forget(self, mark: int) -> None:
        self.importer.reported.difference_update(r.name for r in self.importer.records[mark:])
        del self.importer.records[mark:]

    def _frame(self, scope: Scope) -> Frame:
        f = self.frame
        return Frame(scope, f.opsets, {}, f, f.attributes, f"{self.name}/", f.depth + 1)

    def _outputs(self, frame: Frame, proto: GraphProto) -> list[Value]:
        if frame.depth > _MAX_DEPTH:
            raise ImportModelError("graphs are nested too deeply", where=f"node `{self.name}`", why=f"more than {_MAX_DEPTH} levels")
        check_names(proto)
        outputs = self.importer.graph(frame, proto)
        if any(v is _POISON for v in outputs):
            raise _Poisoned("its body contains something that cannot be compiled")
        return outputs


def _bound(proto: GraphProto, inputs: Sequence[Value]) -> dict[str, Value]:
    if len(proto.input) != len(inputs):
        raise ImportModelError(f"a body has {len(proto.input)} inputs, its node passes {len(inputs)}", where=f"graph `{proto.name}`")
    return dict(zip((i.name for i in proto.input), inputs, strict=True))


# ---------------------------------------------------------------- attributes and ends


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _fitting(value: np.ndarray, info: ValueInfoProto) -> np.ndarray:
    """The value of an input that the caller fixes. Raises `InputError` if it is of another type."""
    dtype, dims = reader.tensor_type(info.type, f"input `{info.name}`")
    array = np.asarray(value)
    declared = [d if isinstance(d, int) else n for d, n in zip(dims or (), array.shape, strict=False)]
    if array.dtype.name != dtype or (dims is not None and (len(dims) != array.ndim or declared != list(array.shape))):
        raise InputError(
            f"the value given for input `{info.name}` is {array.dtype.name}{list(array.shape)}", why=f"the model declares {dtype}{dims}"
        )
    return array


def _opsets(imports: Iterable[Any]) -> dict[str, int]:
    opsets = {_domain(o.domain): int(o.version) for o in imports}
    for domain, version in opsets.items():
        if version < 1 and domain == "":
            raise ImportModelError(f"opset {version} of domain `ai.onnx` does not exist")
    return opsets


def _resolved(node: NodeProto, caller: Mapping[str, AttributeProto]) -> dict[str, AttributeProto]:
    """The node's attributes, references to attributes of the function around it replaced by their values."""
    result = {}
    for attr in node.attribute:
        if not attr.ref_attr_name:
            result[attr.name] = attr
        elif attr.ref_attr_name in caller:
            actual = AttributeProto()
            actual.CopyFrom(caller[attr.ref_attr_name])
            actual.name = attr.name
            result[attr.name] = actual
    return result


def _defaults(function: FunctionProto, attributes: Mapping[str, AttributeProto]) -> dict[str, AttributeProto]:
    return {**{a.name: a for a in function.attribute_proto}, **attributes}


def _reason(error: UnsupportedError) -> str:
    return "; ".join(text for text in (error.what, error.why) if text)


def _renamable(scope: Scope, value: Value) -> bool:
    return value not in scope.builder.constants and all(value is not i for i in scope.builder.inputs)


def _finish(scope: Scope, results: Sequence[Value], proto: GraphProto) -> Graph:
    """The pruned graph with the model's output names; an output that is an input, a constant or another output is copied."""
    outputs: list[Value] = []
    for info, value in zip(proto.output, results, strict=True):
        kind = info.type.tensor_type.elem_type
        if kind and reader.DTYPES.get(kind) != value.dtype:
            raise ImportModelError(f"output `{info.name}` is declared with another element type than the {value.dtype} it has")
        if value.name != info.name or not _renamable(scope, value) or value in outputs:
            copy = Value(info.name, value.dtype, value.shape)
            scope.builder.append(Node(IDENTITY, (value,), (copy,), {}, info.name))
            value = copy
        outputs.append(value)
    return scope.finish(scope.builder.inputs, outputs)
