"""ONNX → Graph, node by node, and the report of what can be compiled.

`import_model` walks the nodes in topological order. A node is imported by the handler that `HANDLERS` lists for its domain, type and
opset; where there is none, by expanding its definition as a function (the model's own, or ONNX's). What cannot be compiled is
collected, values that depend on it are set aside, and at the end one `UnsupportedError` lists everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto
from onnx.compose import add_prefix_graph

from tcomp.errors import ImportModelError, InputError, TcompError, UnsupportedError
from tcomp.frontends.onnx import reader
from tcomp.frontends.onnx.containers import contained, elements, leaves, rebuilt, type_name
from tcomp.frontends.onnx.context import Body, Build, Context, Types
from tcomp.frontends.onnx.handlers.tables import find_handler
from tcomp.frontends.onnx.host_steps import split, title
from tcomp.frontends.onnx.names import Reads, check_names, initializers, ordered
from tcomp.frontends.onnx.outputs import renamable, with_outputs
from tcomp.frontends.onnx.schema import check_form, domain_of, find_schema, opsets_of
from tcomp.frontends.onnx.scope import FOLD_LIMIT, Scope, check_type
from tcomp.frontends.onnx.signature import LARGEST, Dims, Shapes, Values, signature
from tcomp.ir.broadcasting import HINT
from tcomp.ir.equations import Contradiction, Sizes
from tcomp.ir.expr import Dim, Expr, bounds, variables
from tcomp.ir.graph import Graph, Inputs, Value
from tcomp.ops.expression import EXPRESSION, TensorFunction

MAX_DEPTH = 24  # functions inside functions, and sub-graphs inside sub-graphs
MAX_NODES = 100_000  # nodes after expansion
MAX_ROUNDS = 8  # of imports, each with what the one before found out about sizes

LAYOUTS = "it is of a layout that ONNX Runtime chose for one processor: save the model at ORT_ENABLE_EXTENDED or below"
SUPPORTED, DECOMPOSED, MISSING, UNCHECKED, HOST = "supported", "decomposed", "missing", "unchecked", "host step"

Source = str | PathLike[str] | bytes | ModelProto
Own = Mapping[str, TensorFunction]  # by the name of an operator of the domain OWN

OWN = "tcomp"
NONE: Mapping[str, Any] = MappingProxyType({})  # of them


@dataclass(frozen=True)
class NodeRecord:
    """How one node of a model is compiled. `status` is "supported" (by a handler), "decomposed" (into simpler operators by its ONNX
    definition), "missing", "unchecked" (it depends on a missing one), or "host step" (the runtime computes it itself: strings, images).
    `dtypes` are those of the inputs."""

    name: str
    op_type: str
    domain: str
    opset: int
    dtypes: tuple[str, ...]
    status: str
    reason: str = ""


def import_model(source: Source, shapes: Shapes = NONE, dims: Dims = NONE, values: Values = NONE, own: Own = NONE) -> Graph:
    """The graph of an ONNX model.

    `shapes` gives inputs another shape: ints, and names (or formulas such as "32*h") for symbolic dims. `dims` fixes a symbolic dim
    (int), bounds it (lowest, highest), or lists sizes for which kernels get code of their own. Symbolic dims have the name the model gives
    them; open ones are called `<input>_<axis>`. `values` fixes inputs for good: they are constants of the graph, and shapes may depend on
    them. `own` are operators that the caller has defined, by name: those of the domain `tcomp`.

    Raises `ImportModelError` for what is not a valid model, `InputError` for shapes and dims that do not fit it, and `UnsupportedError`
    naming every node that cannot be compiled.
    """
    graph, records = examine_model(source, shapes, dims, values, own)
    missing = [r for r in records if r.status == MISSING]
    if missing:
        lines = [f"{r.name} ({r.domain + '.' if r.domain else ''}{r.op_type}, opset {r.opset}): {r.reason}" for r in missing]
        what, hint = f"{len(missing)} of {len(records)} nodes cannot be compiled", "`tcomp check` shows all nodes of the model"
        raise UnsupportedError(what, where="\n    ".join(lines), hint=hint)
    assert graph is not None
    return graph


def check_model(source: Source, shapes: Shapes = NONE, dims: Dims = NONE, values: Values = NONE) -> list[NodeRecord]:
    """One record per node of a model, supported or not. Arguments and other errors as for `import_model`."""
    return examine_model(source, shapes, dims, values)[1]


def examine_model(
    source: Source, shapes: Shapes = NONE, dims: Dims = NONE, values: Values = NONE, own: Own = NONE
) -> tuple[Graph | None, list[NodeRecord]]:
    """The graph of a model, None where something of it cannot be compiled, and one record per node. Otherwise as `import_model`."""
    model, tensors = reader.read_model(source)
    hosted = split(model, tensors, shapes, dims, values)
    if hosted is None:
        return _import_graph(model, tensors, shapes, dims, values, own)
    graph, records = _import_graph(hosted.model, tensors, hosted.shapes, hosted.dims, hosted.values, own)
    steps = [(NodeRecord(title(node), node.op_type, node.domain, opset, (), HOST), early) for node, opset, early in hosted.nodes]
    records = [*(r for r, early in steps if early), *records, *(r for r, early in steps if not early)]
    return (None if graph is None else replace(graph, host=hosted.steps(graph))), records


def _import_graph(
    model: ModelProto, tensors: reader.TensorReader, shapes: Shapes, dims: Dims, values: Values, own: Own
) -> tuple[Graph | None, list[NodeRecord]]:
    sizes, distinct = Sizes(LARGEST), False
    for _ in range(MAX_ROUNDS):  # equations that a walk over the nodes finds are solved for the next one, which sees sizes as they are
        importer, solved = _Importer(model, tensors, sizes, distinct, own), len(sizes.values)
        try:
            graph = importer.run(shapes, dims, values)
        except RecursionError as error:
            raise ImportModelError("the model nests graphs or expressions too deeply") from error
        except TcompError as error:
            if isinstance(error.__cause__, Contradiction) and not distinct:  # equal names may have been a wrong hint
                sizes, distinct = Sizes(LARGEST), True
            elif len(sizes.values) == solved:
                raise
        else:
            if len(sizes.values) == solved:
                return graph, importer.records
    raise UnsupportedError(f"the sizes of the model are not settled after {MAX_ROUNDS} walks over its nodes", hint=HINT)


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
    repeated: bool = False  # it is, or is in, the body of a loop

    def inner(self, scope: Scope, name: str, parent: Frame | None, **changes: Any) -> Frame:
        """The frame of a sub-graph or function of node `name`."""
        return replace(self, scope=scope, parent=parent, prefix=f"{name}/", depth=self.depth + 1, values={}, captured={}, **changes)

    def lookup(self, name: str) -> Value:
        """The value of a name, here or in a graph around this one."""
        if name not in self.values:
            if self.parent is None:
                raise ImportModelError(f"`{name}` is used but defined nowhere", where=f"graph `{self.scope.builder.name}`")
            outer, around = self.parent.lookup(name), self.parent.scope
            here = around is self.scope or outer is _POISON
            self.values[name] = outer if here else rebuilt(outer, (self._captured(v, around) for v in leaves([outer])))
        return self.values[name]

    def operands(self, node: NodeProto) -> list[Value | None]:
        """The inputs of a node."""
        return [self.lookup(i) if i else None for i in node.input]

    def _captured(self, outer: Value, around: Scope) -> Value:
        if outer not in self.captured:
            array, elements = around.known(outer), around.known_elements(outer)
            if array is not None and array.size <= FOLD_LIMIT:
                return self.scope.builder.constant(array, outer.name, outer.dtype)
            if elements is not None:
                return self.scope.from_elements(elements, outer.dtype, [int(d) for d in outer.shape], outer.name)
            inner = self.captured[outer] = self.scope.builder.input(outer.name, outer.dtype, outer.shape)
            self.scope.origin[inner] = around, outer
        return self.captured[outer]


class _Importer:
    def __init__(self, model: ModelProto, tensors: reader.TensorReader, sizes: Sizes, distinct: bool, own: Own) -> None:
        self.model, self.tensors, self.sizes, self.distinct, self.own = model, tensors, sizes, distinct, own
        self.records: list[NodeRecord] = []
        self.reported: set[str] = set()  # names in the records
        self.reads = Reads()
        self.count = self.streams = 0
        self.titled: set[Value] = set()  # values that bear the name the model gives them
        self.opsets = opsets_of(model.opset_import)
        self.declared: dict[str, ValueInfoProto] = {}  # what the model says of its values, unless the caller changes sizes
        self.functions = {(domain_of(f.domain), f.name, getattr(f, "overload", "")): f for f in model.functions}

    def run(self, shapes: Shapes, dims: Dims, values: Values) -> Graph | None:
        """The graph; None where something of it cannot be compiled."""
        proto = self.model.graph
        frame = Frame(Scope(proto.name or "model", self.sizes), self.opsets)
        defaults, builder = set(initializers(proto)), frame.scope.builder
        check_names(proto)
        for info in [*proto.input, *proto.output]:
            builder.fresh(info.name)  # reserves the names of the signature
        fixed = {i.name: i for i in proto.input if i.name in values}
        if unknown := [name for name in values if name not in fixed]:
            raise InputError(f"the model has no input `{unknown[0]}`", hint=f"its inputs are {', '.join(i.name for i in proto.input)}")
        for name, info in fixed.items():
            frame.values[name] = builder.constant(_fitting(values[name], info), name)
        free = [i for i in proto.input if i.name not in defaults and i.name not in fixed]
        tensors = {i.name: elements(i, shapes) for i in free}
        infos = [t for group in tensors.values() for t in group]
        declared = {d.dim_param for i in infos for d in i.type.tensor_type.shape.dim}
        trips = {n: most if isinstance(most, int) else max(most) for n, most in dims.items() if n.endswith("_trips") and n not in declared}
        frame.scope.bounds.update(trips)
        for name, dtype, given in signature(infos, shapes, dims, self.distinct, trips):
            shape = tuple(map(self.sizes.now, given))
            check_type(shape, dtype, f"input `{name}`")
            frame.values[name] = value = Value(name, dtype, shape)
            builder.inputs.append(value)
            for d in variables(*(d for d in shape if isinstance(d, Expr))):
                builder.fresh(d.name)  # reserves the name for no size that the run counts
        for info in (i for i in free if not i.type.HasField("tensor_type")):
            kind = type_name(info.type, f"input `{info.name}`")
            frame.values[info.name] = contained(info.name, kind, [frame.values[t.name] for t in tensors[info.name]])
        self.sizes.start(value.shape for value in builder.inputs)
        if not (shapes or dims or values or "ai.onnx.ml" in self.opsets):  # ONNX infers no shapes there, and converters declare wrong ones
            self.declared = {i.name: i for i in (*proto.value_info, *proto.output)}
        results = self.graph(frame, proto, frozenset(i.name for i in proto.output))
        if wrong := sorted(trips.keys() - frame.scope.asked):
            raise InputError(f"the model has no dim, and no loop without a trip count, of the name `{wrong[0]}`")
        if any(value is _POISON for value in results):
            return None
        return replace(with_outputs(frame.scope, results, proto), checks=self.sizes.conditions())

    def graph(self, frame: Frame, proto: GraphProto, reserved: frozenset[str] = frozenset()) -> list[Value]:
        """Import the initializers and nodes of a graph; returns its outputs. Formal inputs are already in `frame.values`."""
        for tensor in proto.initializer:
            if tensor.name not in frame.values:  # else the caller gave an input that has a default another value
                cut = None if frame.depth else self.tensors.weights.get(tensor.name)
                self.constant(frame, tensor.name, partial(self.tensors.array, tensor, raw=cut))
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            self.constant(frame, name, partial(self.tensors.dense, sparse, f"sparse tensor `{name}`"))
        nodes = ordered(proto.node, [o.name for o in proto.output], where := f"graph `{proto.name}`", self.reads)
        if frame.depth == 0 and len(nodes) < len(proto.node):
            self.check_unused(frame, proto, {o for node in nodes for o in node.output}, where)
        for node in nodes:
            self.node(frame, node, reserved)
        return [frame.lookup(o.name) for o in proto.output]

    def check_unused(self, frame: Frame, proto: GraphProto, used: set[str], where: str) -> None:
        """Raises `ImportModelError` for a node that no output of the graph needs (none of its own is `used`) and no model may have."""
        visible = {"", *frame.values, *(i.name for i in proto.input), *(o for node in proto.node for o in node.output)}
        for node in (node for node in proto.node if used.isdisjoint(node.output)):
            place = f"{where}, node `{node.name}` ({node.op_type})"
            found, domain = check_form(node, visible, frame.opsets, place), domain_of(node.domain)
            if found is None and domain == "" and ("", node.op_type, "") not in self.functions:
                raise ImportModelError(f"ONNX has no operator `{node.op_type}` in opset {frame.opsets.get('', 0)}", where=place)

    def constant(self, frame: Frame, name: str, array: Callable[[], Any]) -> None:
        """An initializer; one of a type that is not supported only matters where it is used."""
        try:
            frame.values[name] = frame.scope.builder.constant(array(), name)
        except UnsupportedError as error:
            self.records.append(NodeRecord(name, "initializer", "", self.opsets.get("", 0), (), MISSING, _reason(error)))
            frame.values[name] = _POISON

    def node(self, frame: Frame, node: NodeProto, reserved: frozenset[str]) -> None:
        """Import one node and record how. Its outputs become visible in the frame."""
        name, inputs = _title(frame, node), frame.operands(node)
        number, reason = len(self.records), ""  # a control-flow node stands before the nodes of its bodies
        try:
            status, results = self.apply(frame, node, name, inputs)
            self.bind(frame, node, name, results, reserved)
        except UnsupportedError as error:
            status, reason = (UNCHECKED, error.what) if isinstance(error, _Poisoned) else (MISSING, _reason(error))
            frame.values.update((output, _POISON) for output in node.output if output)
        if frame.depth == 0 or name not in self.reported:  # an unrolled body is reported once
            domain = domain_of(node.domain)
            dtypes = tuple(v.dtype for v in inputs if v is not None and v is not _POISON)
            self.records.insert(number, NodeRecord(name, node.op_type, domain, frame.opsets.get(domain, 0), dtypes, status, reason))
            self.reported.add(name)

    def bind(self, frame: Frame, node: NodeProto, name: str, results: Sequence[Value | None], reserved: frozenset[str]) -> None:
        """Make the results of a node visible under the names of its outputs."""
        for i, output in enumerate(node.output):
            if not output:
                continue
            value = results[i] if i < len(results) else None
            if value is None:
                raise ImportModelError(f"output {i} (`{output}`) is not computed by `{node.op_type}`", where=f"node `{name}`")
            untitled = value not in self.titled or (output in reserved and value.name not in reserved)
            if untitled and renamable(frame.scope, value):
                value.name = output if output in reserved else frame.scope.builder.fresh(frame.prefix + output)
                self.titled.add(value)
            frame.values[output] = value
            if frame.depth == 0 and (declared := self.declared.get(output)) is not None and value is not _POISON:
                _check_declared(declared, value)

    def apply(self, frame: Frame, node: NodeProto, name: str, inputs: Inputs) -> tuple[str, Sequence[Value | None]]:
        """(status, outputs) of one node. Raises `UnsupportedError` or `ImportModelError`."""
        domain = domain_of(node.domain)
        opset = frame.opsets.get(domain, 0)
        where = f"node `{name}` ({node.op_type}, opset {opset})"
        if any(v is _POISON for v in inputs):
            raise _Poisoned("depends on a value that cannot be compiled")
        self.count += 1
        if self.count > MAX_NODES:
            raise ImportModelError(f"the model has more than {MAX_NODES} nodes after expanding its functions", where=where)
        if frame.depth > MAX_DEPTH:
            raise ImportModelError("functions or graphs are nested too deeply", where=where, why=f"more than {MAX_DEPTH} levels")
        attributes = _resolved(node, frame.attributes)
        function = self.functions.get((domain, node.op_type, getattr(node, "overload", "")))
        try:
            if function is not None:
                defaults = {a.name: a for a in function.attribute_proto}
                return DECOMPOSED, self.expand(frame, function, node, name, inputs, {**defaults, **attributes})
            if domain not in frame.opsets:
                raise ImportModelError(f"domain `{domain or 'ai.onnx'}` is used but not imported", where=where)
            if domain == "" and opset > (newest := onnx.defs.onnx_opset_version()):
                raise UnsupportedError(f"opset {opset} is newer than any known here ({newest})", where=where, hint="update `onnx`")
            if domain == OWN and node.op_type in self.own:
                given = [v for v in inputs if v is not None]
                expression = self.own[node.op_type].attributes([(v.dtype, v.shape) for v in given])
                return SUPPORTED, frame.scope.add(EXPRESSION, given, expression, name)
            if (found := find_schema(node.op_type, opset, domain)) is None:
                why = (
                    LAYOUTS
                    if domain.startswith(("com.microsoft.nchwc", "com.ms.internal"))
                    else f"domain `{domain or 'ai.onnx'}`, opset {opset}"
                )
                raise UnsupportedError(f"unknown operator `{node.op_type}`", why=why)
            found.check_node(node, inputs, where)
            actual = {**found.defaults, **attributes}
            if (handler := find_handler(domain, node.op_type, opset)) is not None:
                values = {n: self.tensors.attribute(a, where) for n, a in actual.items()}
                bodies = _Bodies(self, frame, name)
                result = handler(Context(node.op_type, name, opset, inputs, values, list(node.output), frame.scope, bodies))
                return SUPPORTED, result if isinstance(result, tuple) else (result,)
            resolved = deepcopy(node)
            del resolved.attribute[:]
            resolved.attribute.extend(attributes.values())
            outer = self.named_apart(frame, [a.g for a in resolved.attribute if a.type == AttributeProto.GRAPH])
            definition = found.function_body(resolved, inputs, opset)
            if definition is None:
                raise UnsupportedError(f"operator `{node.op_type}` is not supported")
            return DECOMPOSED, self.expand(frame, definition, node, name, inputs, actual, outer)
        except (ImportModelError, UnsupportedError):
            raise
        except TcompError as error:
            raise error.restated(ImportModelError, where=where, why=error.why or error.where) from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, AssertionError, MemoryError) as error:
            what, why = "the node cannot be imported: its inputs and attributes do not fit together", f"{type(error).__name__}: {error}"
            hint = "`onnx.checker.check_model(path, full_check=True)` may say more"
            raise ImportModelError(what, where=where, why=why, hint=hint) from error

    def named_apart(self, frame: Frame, graphs: Sequence[GraphProto]) -> dict[str, Value]:
        """The values that sub-graphs read from outside, under names that no definition of an operator has; the graphs use these names."""
        outer: dict[str, Value] = {}
        for graph in graphs:
            names = {name: f"{name} (outside)" for name in self.reads.of_graph(graph)}
            outer |= {new: frame.lookup(name) for name, new in names.items()}
            add_prefix_graph(graph, "", inplace=True, name_map=names)
        return outer

    def expand(
        self, frame: Frame, function: FunctionProto, node: NodeProto, name: str, inputs: Inputs, attributes: Mapping[str, AttributeProto],
        outer: Mapping[str, Value] = NONE,
    ) -> list[Value | None]:  # fmt: skip
        """The outputs of a node, by the nodes of its definition, which may read values that are `outer` by name."""
        formal = list(function.input)
        if len(inputs) > len(formal):
            what, why = f"{len(inputs)} inputs for the function `{function.name}`", f"it has {len(formal)} parameters"
            raise ImportModelError(what, where=f"node `{name}`", why=why)
        inner = frame.inner(frame.scope, name, None, opsets={**frame.opsets, **opsets_of(function.opset_import)}, attributes=attributes)
        inner.values.update(outer)
        inner.values.update((p, v) for p, v in zip(formal, inputs, strict=False) if v is not None)
        absent = {p for p in formal if p not in inner.values}
        wanted = [o for o, actual in zip(function.output, node.output, strict=False) if actual]
        for step in ordered(function.node, wanted, f"function `{function.name}`", self.reads):
            if absent.intersection(step.input):
                step = deepcopy(step)
                step.input[:] = ["" if n in absent else n for n in step.input]
            title = _title(inner, step)
            try:
                _, results = self.apply(inner, step, title, inner.operands(step))
            except UnsupportedError as error:
                raise UnsupportedError(f"its definition uses {step.op_type}: {error.what}", where=error.where, why=error.why) from error
            self.bind(inner, step, title, results, frozenset())
        return [inner.lookup(o) if o in wanted else None for o in function.output]


@dataclass(frozen=True)
class _Bodies:
    """How the handlers of control flow import the sub-graphs of their node: see `context.Bodies`."""

    importer: _Importer
    frame: Frame
    name: str

    def inline(self, proto: GraphProto, inputs: Sequence[Value] = ()) -> list[Value]:
        return self._outputs(self.frame.inner(self.frame.scope, self.name, self.frame), proto, inputs)

    def closed(self, body: GraphProto | Build, types: Types = (), conditional: bool = False, repeated: bool = False) -> Body:
        name, names = ("body", [f"item{n}" for n in range(len(types))]) if callable(body) else (body.name, [i.name for i in body.input])
        around = self.frame.scope
        scope = Scope(f"{self.name}.{name or 'body'}", None if conditional else around.sizes, around)
        frame, builder = self.frame.inner(scope, self.name, self.frame, repeated=repeated or self.frame.repeated), scope.builder
        inputs = tuple(
            builder.constant(t, n) if isinstance(t, np.ndarray) else builder.input(n, *t) for n, t in zip(names, types, strict=False)
        )
        outputs = body(scope, replace(self, frame=frame), inputs) if callable(body) else self._outputs(frame, body, inputs)
        return Body(scope, inputs, tuple(outputs), frame.captured)

    def value(self, name: str) -> Value:
        if (found := self.frame.lookup(name)) is _POISON:
            raise _Poisoned("depends on a value that cannot be compiled")
        return found

    def stream(self) -> int:
        if self.frame.repeated:
            what = "random numbers in the body of a loop would be the same in every iteration"
            raise UnsupportedError(what, where=f"node `{self.name}`", hint="draw them before the loop, and scan over them")
        self.importer.streams += 1
        return self.importer.streams - 1

    @contextmanager
    def attempt(self) -> Iterator[None]:
        records, mark = self.importer.records, len(self.importer.records)
        try:
            yield
        except UnsupportedError:
            self.importer.reported.difference_update(r.name for r in records[mark:])
            del records[mark:]
            raise

    def _outputs(self, frame: Frame, proto: GraphProto, inputs: Sequence[Value]) -> list[Value]:
        if len(proto.input) != len(inputs):
            raise ImportModelError(f"a body has {len(proto.input)} inputs, its node passes {len(inputs)}", where=f"graph `{proto.name}`")
        frame.values.update((i.name, v) for i, v in zip(proto.input, inputs, strict=True))
        if frame.depth > MAX_DEPTH:
            raise ImportModelError("graphs are nested too deeply", where=f"node `{self.name}`", why=f"more than {MAX_DEPTH} levels")
        check_names(proto)
        outputs = self.importer.graph(frame, proto)
        if any(v is _POISON for v in outputs):
            raise _Poisoned("its body contains something that cannot be compiled")
        return outputs


def _title(frame: Frame, node: NodeProto) -> str:
    """The name of a node, unique enough for messages."""
    return frame.prefix + title(node)


def _fitting(value: np.ndarray, info: ValueInfoProto) -> np.ndarray:
    """The value of an input that the caller fixes. Raises `InputError` if it is of another type."""
    dtype, dims = reader.tensor_type(info.type, f"input `{info.name}`")
    array = np.asarray(value)
    declared = [d if isinstance(d, int) else n for d, n in zip(dims or (), array.shape, strict=False)]
    if array.dtype.name != dtype or (dims is not None and (len(dims) != array.ndim or declared != list(array.shape))):
        what = f"the value given for input `{info.name}` is {array.dtype.name}{list(array.shape)}"
        raise InputError(what, why=f"the model declares {dtype}{dims}")
    return array


def _resolved(node: NodeProto, caller: Mapping[str, AttributeProto]) -> dict[str, AttributeProto]:
    """The node's attributes, references to attributes of the function around it replaced by their values."""
    result = {attr.name: attr for attr in node.attribute if not attr.ref_attr_name}
    for attr in node.attribute:
        if attr.ref_attr_name and attr.ref_attr_name in caller:
            result[attr.name] = deepcopy(caller[attr.ref_attr_name])
            result[attr.name].name = attr.name
    return result


def _reason(error: UnsupportedError) -> str:
    return "; ".join(text for text in (error.what, error.why) if text)


def _check_declared(info: ValueInfoProto, value: Value) -> None:
    """Raises `ImportModelError` where the type that a model declares for a value is not the one that its nodes give it."""
    declared, shape = info.type.tensor_type, [d.dim_value if d.HasField("dim_value") else None for d in info.type.tensor_type.shape.dim]
    where = f"value `{info.name}`"
    if declared.elem_type and reader.DTYPES.get(declared.elem_type) != value.dtype:
        raise ImportModelError(f"it is declared with another element type than the {value.dtype} it has", where=where)

    def may_be(size: Dim, given: int | None) -> bool:
        lo, hi = bounds(size)
        return given is None or given < 0 or ((lo is None or lo <= given) and (hi is None or given <= hi))

    if declared.HasField("shape") and not (len(shape) == len(value.shape) and all(map(may_be, value.shape, shape))):
        what = f"it is declared with the shape {['?' if d is None else d for d in shape]}"
        raise ImportModelError(what, where=where, why=f"its nodes give it the shape [{', '.join(map(str, value.shape))}]")
