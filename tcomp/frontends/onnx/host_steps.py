"""The part of a model that no machine code computes: operators on strings, decoders of images. They become host steps, which the runtime
performs before the machine code, or after it (`runtime.host_steps`).

`split` cuts a model in three: nodes that depend on inputs alone and have to do with strings or encoded images; those that become machine
code; and what follows from their results. Encoders and classifiers that only take or give strings at their border are written anew with
numbers, and a look-up beside them. What would need machine code before and after one step is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper
from onnx.defs import SchemaError

from tcomp.errors import ArtifactError, ImportModelError, InputError, TcompError, UnsupportedError
from tcomp.frontends.onnx.host_operators import CONVERT, HostNode, constant_step, string_array
from tcomp.frontends.onnx.names import Reads, check_names, check_text, initializers, ordered
from tcomp.frontends.onnx.reader import DTYPES, ELEM_TYPES, TensorReader
from tcomp.frontends.onnx.schema import check_form, domain_of, opsets_of
from tcomp.frontends.onnx.signature import Dims, Shapes, Values
from tcomp.ir.graph import Graph, Value
from tcomp.runtime.host_steps.prepared import PreparedStep
from tcomp.runtime.host_steps.steps import ANY_SHAPE, STRING, Step, strings
from tcomp.runtime.manifest import HostSteps, TensorSpec

ML = "ai.onnx.ml"
_BEFORE, _MACHINE, _AFTER = range(3)
LABELS = "classlabels_strings"
_NUMBERED = {  # operators whose strings can be numbers: the attributes with the ones and with the others
    "LinearClassifier": (LABELS, "classlabels_ints"), "SVMClassifier": (LABELS, "classlabels_ints"),
    "TreeEnsembleClassifier": (LABELS, "classlabels_int64s"), "OneHotEncoder": ("cats_strings", "cats_int64s"),
    "TfIdfVectorizer": ("pool_strings", "pool_int64s"),
}  # fmt: skip
_OF_STRINGS = {"StringNormalizer", "StringConcat", "StringSplit", "RegexFullMatch", "CategoryMapper", "ImageDecoder"}
_STRING_ATTRIBUTES = {"keys_strings", "values_strings", "classes_strings", "classlabels_strings", "cats_strings", "pool_strings"}

Type: TypeAlias = tuple[str, list[int | str | None] | None]  # dtype and dims; None: unknown


@dataclass(frozen=True)
class Split:
    """A model in three parts: `model`, with the caller's `shapes`, `dims` and `values` for it, and the steps around it."""

    model: ModelProto
    shapes: Shapes
    dims: Dims
    values: Values
    inputs: Sequence[tuple[str, TensorSpec | None]]  # of the whole model; None: as the machine code has it
    outputs: Sequence[tuple[str, TensorSpec | None]]
    before: Sequence[Step]
    after: Sequence[Step]
    nodes: Sequence[tuple[NodeProto, int, bool]]  # that became steps: with their opset, and whether before

    def steps(self, graph: Graph) -> HostSteps:
        """The steps around the graph of `model`."""
        return HostSteps(_joined(self.inputs, graph.inputs), _joined(self.outputs, graph.outputs), tuple(self.before), tuple(self.after))


def _joined(wanted: Iterable[tuple[str, TensorSpec | None]], values: Sequence[Value]) -> tuple[TensorSpec, ...]:
    """All inputs or outputs in order; a sequence of the machine code's is several values there (`x.0`, `x.1`)."""
    found: list[TensorSpec] = []
    for name, spec in wanted:
        own = [v for v in values if v.name == name or (v.name.startswith(f"{name}.") and v.name[len(name) + 1 :].isdigit())]
        mine = [TensorSpec(v.name, v.dtype, tuple(d if isinstance(d, int) else str(d) for d in v.shape)) for v in own]
        found += mine if spec is None else [spec]
    return tuple(found)


def split(model: ModelProto, tensors: TensorReader, shapes: Shapes, dims: Dims, values: Values) -> Split | None:
    """The parts of a model; None for one without anything for host steps. Raises `UnsupportedError` for what cannot be split, and
    `ImportModelError` for what is malformed."""
    graph = model.graph
    if not _concerned(graph) and not any(_of_interest(node) for f in model.functions for node in f.node):
        return None
    if model.functions:
        from onnx.inliner import inline_local_functions  # only for these models

        model = inline_local_functions(model)
    check_names(model.graph)
    return _Splitter(model, tensors, shapes, dims, values).split()


def _concerned(graph: GraphProto) -> bool:
    return (
        any(i.type.tensor_type.elem_type == TensorProto.STRING for i in graph.input)
        or any(t.data_type == TensorProto.STRING for t in graph.initializer)
        or any(map(_of_interest, graph.node))
    )


def _of_interest(node: NodeProto) -> bool:
    """Whether a node has to do with strings or encoded images, as far as it says so itself."""
    if node.op_type in _OF_STRINGS:
        return True
    if node.op_type == "Cast":
        return any(a.name == "to" and a.i == TensorProto.STRING for a in node.attribute)
    if node.op_type == "Constant":
        return any(a.name.startswith("value_string") or a.t.data_type == TensorProto.STRING for a in node.attribute)
    if node.domain == ML or node.op_type == "TfIdfVectorizer":
        return node.op_type != "ZipMap" and any(
            (a.name in _STRING_ATTRIBUTES and len(a.strings) > 0) or a.t.data_type == TensorProto.STRING for a in node.attribute
        )
    return False


class _Splitter:
    def __init__(self, model: ModelProto, tensors: TensorReader, shapes: Shapes, dims: Dims, values: Values) -> None:
        self.model, self.tensors, self.shapes, self.dims, self.values = model, tensors, shapes, dims, values
        self.opsets = opsets_of(model.opset_import)
        self.reads = Reads()
        graph = model.graph
        defaults = {*initializers(graph)}
        self.inputs = {i.name: self._shaped(i) for i in graph.input if i.name not in defaults}
        nodes = ordered(graph.node, [o.name for o in graph.output], f"graph `{graph.name}`", self.reads)
        self._check(nodes)
        self.constants = {t.name: t for t in graph.initializer} | {n.output[0]: t for n in nodes if (t := _constant(n)) is not None}
        self.nodes = [new for node in nodes if node.output[0] not in self.constants for new in self._with_numbers(node)]
        self.text = self._texts()

    def _shaped(self, info: ValueInfoProto) -> ValueInfoProto:
        """An input with the sizes that the caller gives it."""
        result = ValueInfoProto()
        result.CopyFrom(info)
        tensor = result.type.tensor_type
        if (given := self.shapes.get(info.name)) is not None and result.type.HasField("tensor_type"):
            if tensor.HasField("shape") and len(tensor.shape.dim) != len(given):
                raise InputError(f"input `{info.name}` has {len(tensor.shape.dim)} dimensions, the shape given has {len(given)}")
            tensor.ClearField("shape")
            tensor.shape.SetInParent()
            for d in given:
                tensor.shape.dim.add(**({"dim_value": d} if isinstance(d, int) else {"dim_param": d}))
        for size in tensor.shape.dim:
            if isinstance(fixed := self.dims.get(size.dim_param or ""), int):
                size.dim_value = fixed
        return result

    def _check(self, nodes: Sequence[NodeProto]) -> None:
        """Raises `ImportModelError` for nodes of another form than their schemas say, and for names of nothing: onnx's inference of shapes
        crashes where the type of an input is missing."""
        known = {"", *self.inputs, *initializers(self.model.graph), *(output for node in nodes for output in node.output)}
        for node in nodes:
            where = f"node `{title(node)}` ({node.op_type})"
            if not node.output or any(a.ref_attr_name for a in node.attribute) or (node.op_type == "Constant" and len(node.attribute) != 1):
                raise ImportModelError("its attributes give no value", where=where)
            if check_form(node, known, self.opsets, where) is None and (node.op_type in CONVERT or node.op_type in _NUMBERED):
                raise UnsupportedError("no such operator is known", where=where, why=f"its domain is `{node.domain}`")

    # ---------------------------------------------------------------- borders

    def _with_numbers(self, node: NodeProto) -> Iterator[NodeProto]:
        """The node, or others that do the same: strings only go into, and come out of, look-ups."""
        strings_in, numbers_in = _NUMBERED.get(node.op_type, ("", ""))
        given = [text for a in node.attribute if a.name == strings_in for text in a.strings]
        if not given:
            yield node
            return
        number = {text: n for n, text in enumerate(dict.fromkeys(given))}
        new, numbers, words = NodeProto(), range(len(number)), [*number]
        new.CopyFrom(node)
        del new.attribute[:]
        new.attribute.extend(a for a in node.attribute if not a.name.endswith("_strings"))
        new.attribute.append(helper.make_attribute(numbers_in, [number[text] for text in given]))
        table, name, between = partial(helper.make_node, "LabelEncoder", domain=ML), f"{title(node)}/strings", f"{node.output[0]}/number"
        if strings_in != LABELS:
            new.input[0] = between
            yield table(node.input[:1], [between], name, keys_strings=words, values_int64s=numbers, default_int64=-1)
            yield new
            return
        if len(words) == 1:
            raise UnsupportedError("a classifier with one label is not supported", where=f"node `{title(node)}` ({node.op_type})")
        new.output[0] = between
        yield new
        yield table([between], node.output[:1], name, keys_int64s=numbers, values_strings=words, default_string="")

    # ---------------------------------------------------------------- which values are strings

    def _texts(self) -> set[str]:
        found = {i.name for i in self.inputs.values() if i.type.tensor_type.elem_type == TensorProto.STRING}
        found |= {name for name, t in self.constants.items() if t.data_type == TensorProto.STRING}
        for node in self.nodes:
            found.update(output for output, is_text in zip(node.output, self._outputs(node, found), strict=False) if is_text and output)
        return found

    def _outputs(self, node: NodeProto, text: set[str]) -> list[bool]:
        """Which outputs of a node are strings, given those of its inputs."""
        attrs = {a.name: a for a in node.attribute}
        match node.op_type:
            case "Cast":
                return [attrs["to"].i == TensorProto.STRING if "to" in attrs else False]
            case "CastLike":
                return [node.input[1] in text]
            case "LabelEncoder" if "classes_strings" not in attrs:
                return [
                    "values_strings" in attrs or ("values_tensor" in attrs and attrs["values_tensor"].t.data_type == TensorProto.STRING)
                ]
            case "LabelEncoder" | "CategoryMapper":
                return [node.input[0] not in text]
        domain = domain_of(node.domain)
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opsets.get(domain, 1), domain)
        except SchemaError:
            return [False] * len(node.output)
        formal = [schema.inputs[min(n, len(schema.inputs) - 1)] for n in range(len(node.input))] if schema.inputs else []
        variables = {"tensor(string)", *(f.type_str for f, name in zip(formal, node.input, strict=True) if name in text)}
        variables -= {f.type_str for f in formal if f.type_str.startswith("tensor(") and f.type_str != "tensor(string)"}
        last = len(schema.outputs) - 1
        return [last >= 0 and schema.outputs[min(n, last)].type_str in variables for n in range(len(node.output))]

    # ---------------------------------------------------------------- before, machine code, after

    def _hosted(self, node: NodeProto) -> bool:
        return node.op_type == "ImageDecoder" or any(name in self.text for name in (*self.reads.of_node(node), *node.output))

    def _stages(self, early: set[int]) -> tuple[dict[int, int], int | None]:
        """The stage of each node that it can be given, and the first that cannot. Numeric nodes in `early` are computed before."""
        stages: dict[str, int] = dict.fromkeys((*self.constants, *self.inputs), _BEFORE)
        found: dict[int, int] = {}
        for n, node in enumerate(self.nodes):
            latest = max((stages.get(name, _BEFORE) for name in self.reads.of_node(node)), default=_BEFORE)
            if self._hosted(node):
                stage = _BEFORE if latest == _BEFORE else _AFTER
            elif latest == _AFTER:
                if not _convertible(node):
                    return found, n
                stage = _AFTER
            else:
                stage = _BEFORE if n in early else _MACHINE
            stages.update(dict.fromkeys(node.output, stage))
            found[n] = stage
        return found, None

    def _early(self) -> set[int]:
        """Numeric nodes that steps can compute from inputs alone, and that steps need."""
        possible, ready = set[int](), {*self.constants, *self.inputs}
        for n, node in enumerate(self.nodes):
            if ready.issuperset(self.reads.of_node(node)) and _convertible(node):
                possible.add(n)
                ready.update(node.output)
        needed: set[str] = set()
        for node in reversed(self.nodes):
            if self._hosted(node) or needed.intersection(node.output):
                needed.update(self.reads.of_node(node))
        return {n for n in possible if needed.intersection(self.nodes[n].output)}

    def split(self) -> Split:
        """See the function `split`."""
        stages, stuck = self._stages(set())
        if stuck is not None:
            stages, again = self._stages(self._early())
            if again is not None:
                node = self.nodes[again]
                what = "the model computes with numbers, then with strings, then with numbers that depend on these"
                hint = "cut it into two models before that node"
                raise UnsupportedError(what, where=f"node `{title(node)}` ({node.op_type})", hint=hint)
        parts = [[node for n, node in enumerate(self.nodes) if stages[n] == stage] for stage in (_BEFORE, _MACHINE, _AFTER)]
        before, machine, after = parts
        types, source = self._types(before), self.model.graph
        read, by_steps = ({name for node in some for name in self.reads.of_node(node)} for some in (machine, (*before, *after)))
        made = self.text.union(output for node in (*before, *after) for output in node.output if output)
        own = {name for name in self.inputs if name in read or (name not in by_steps and name not in self.text)}  # inputs of machine code
        free = [(name, info) for name, info in self.inputs.items() if name not in self.values]
        inputs = [(name, None if name in own else _spec(name, _type_of(info.type))) for name, info in free]
        outputs: list[tuple[str, TensorSpec | None]] = []
        for info in source.output:
            name, declared = info.name, _type_of(info.type)
            dtype = STRING if name in self.text else types.get(name, declared)[0]
            if name in made and dtype and declared[0] and declared[0] != dtype:
                raise ImportModelError(f"output `{name}` is declared with another element type than the {dtype} it has")
            outputs.append((name, _spec(name, types.get(name, declared), declared) if name in made else None))
        results = dict.fromkeys(o.name for o in source.output if o.name not in made)
        results |= dict.fromkeys(name for node in machine for name in node.output if name in by_steps)
        given = [i for i in source.input if i.name in own or (i.name not in self.inputs and i.name not in self.text)]
        given += [_crossing(name, *types[name]) for node in before for name in node.output if name in read]
        model = self._model(machine, given, [*results])
        known = {i.name for i in given}
        hosted = _dims_of(source.input) - _dims_of(given)
        return Split(
            model,
            {n: s for n, s in self.shapes.items() if n in known or n not in self.inputs},
            {n: d for n, d in self.dims.items() if n not in hosted},
            {n: v for n, v in self.values.items() if n in own or n not in self.inputs},
            inputs,
            outputs,
            [*self._constants(by_steps.union(o.name for o in source.output if o.name in self.text)), *self._steps(before, types)],
            [*self._steps(after, types)],
            [(node, self._opset(node), stage is before) for stage in (before, after) for node in stage],
        )

    def _model(self, nodes: Sequence[NodeProto], inputs: Sequence[ValueInfoProto], outputs: Sequence[str]) -> ModelProto:
        """The part that becomes machine code."""
        source, known = self.model.graph, {i.name for i in inputs} | {output for node in nodes for output in node.output}
        declared = {o.name: o for o in source.output}
        results = [declared.get(name, ValueInfoProto(name=name)) for name in outputs]
        constants = [t for t in self.constants.values() if t.data_type != TensorProto.STRING]
        types = [i for i in source.value_info if i.name in known]
        graph = helper.make_graph(
            nodes, source.name, inputs, results, constants, value_info=types, sparse_initializer=source.sparse_initializer
        )
        return helper.make_model(graph, ir_version=self.model.ir_version, opset_imports=self.model.opset_import)

    def _opset(self, node: NodeProto) -> int:
        return self.opsets.get(domain_of(node.domain), 0)

    def _constants(self, needed: set[str]) -> Iterator[Step]:
        """The constants that steps need."""
        for name in sorted(needed):
            if name in self.values and name in self.inputs:
                array = np.asarray(self.values[name])
                yield constant_step(name, strings(map(str, array.flat), array.shape) if name in self.text else array)
            elif (tensor := self.constants.get(name)) is not None:
                where = f"tensor `{name}`"
                is_text = tensor.data_type == TensorProto.STRING
                raw = None if is_text else self.tensors.weights.get(name)
                yield constant_step(name, string_array(tensor, where) if is_text else self.tensors.array(tensor, where, raw))

    def _steps(self, nodes: Iterable[NodeProto], types: Mapping[str, Type]) -> Iterator[Step]:
        refused = []
        for node in nodes:
            place = f"{title(node)} ({node.op_type}, opset {self._opset(node)})"
            if (convert := CONVERT.get(node.op_type)) is None:
                refused.append(f"{place}: an operator on strings that is not supported")
                continue
            hosted = HostNode(node, title(node), self._opset(node), self.tensors, [name in self.text for name in node.input])
            try:
                convert(hosted)
                for step in hosted.steps:
                    PreparedStep(step, (step.name,))
            except UnsupportedError as error:
                refused.append(f"{place}: {error.what}")
            except (ArtifactError, InputError) as error:
                raise error.restated(ImportModelError, where=hosted.where) from error
            except TcompError:
                raise
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                what, why = "the node's inputs and attributes do not fit together", f"{type(error).__name__}: {error}"
                raise ImportModelError(what, where=hosted.where, why=why) from error
            yield from hosted.steps
        if refused:
            hint = "compute it outside of the model"
            raise UnsupportedError(f"{len(refused)} nodes cannot be host steps", where="\n    ".join(refused), hint=hint)

    # ---------------------------------------------------------------- types

    def _stand_in(self, node: NodeProto) -> NodeProto:
        """The node, or one of the same shape: onnx's inference crashes for some where the type of their input is not known."""
        if node.op_type not in ("LabelEncoder", "CategoryMapper", "RegexFullMatch"):
            return node
        number = TensorProto.STRING if node.output[0] in self.text else ELEM_TYPES[_dtype_of(node)]
        return helper.make_node("Cast", node.input[:1], node.output[:1], to=number)

    def _types(self, nodes: Sequence[NodeProto]) -> dict[str, Type]:
        """The types of what the first steps compute, as far as they are known."""
        found = {name: _type_of(info.type) for name, info in self.inputs.items()}
        graph = helper.make_graph([self._stand_in(node) for node in nodes], "before", list(self.inputs.values()), [])
        read = {name for node in nodes for name in node.input}
        graph.initializer.extend(t for name, t in self.constants.items() if name in read and name not in self.tensors.weights)
        outer = ModelProto(ir_version=self.model.ir_version, graph=graph)
        outer.opset_import.extend(self.model.opset_import)
        try:
            inferred = onnx.shape_inference.infer_shapes(outer)
        except Exception:  # noqa: BLE001  onnx raises what it likes for models that are odd; what is not known is asked for below
            inferred = outer
        found |= {info.name: _type_of(info.type) for info in inferred.graph.value_info}
        for node in nodes:
            for output in node.output:
                dtype, dims = found.get(output, ("", None))
                found[output] = STRING if output in self.text else dtype or _dtype_of(node), dims
        return found


def _crossing(name: str, dtype: str, dims: Sequence[int | str | None] | None) -> ValueInfoProto:
    """What machine code takes from a host step."""
    if dtype not in ELEM_TYPES or dims is None:
        unknown = "number of dimensions" if dtype in ELEM_TYPES else "element type"
        raise UnsupportedError(f"the {unknown} of what a host step computes is not known", where=f"value `{name}`")
    return helper.make_tensor_value_info(name, ELEM_TYPES[dtype], dims)


def _dims_of(infos: Iterable[ValueInfoProto]) -> set[str]:
    return {d.dim_param for i in infos for d in i.type.tensor_type.shape.dim}


def _constant(node: NodeProto) -> TensorProto | None:
    """What a Constant node gives, under the name of its output; None for another node, or a sparse tensor."""
    if node.op_type != "Constant" or domain_of(node.domain) or (kind := node.attribute[0].name) == "sparse_value":
        return None
    value, kinds = helper.get_attribute_value(node.attribute[0]), {"int": np.int64, "float": np.float32, "string": object}
    if kind != "value":
        return numpy_helper.from_array(np.asarray(value, kinds[kind.removeprefix("value_").removesuffix("s")]), node.output[0])
    result = TensorProto()
    result.CopyFrom(value)
    result.name = node.output[0]
    return result


def _convertible(node: NodeProto) -> bool:
    return node.op_type in CONVERT and all(a.type != AttributeProto.GRAPH for a in node.attribute)


def title(node: NodeProto) -> str:
    """The name of a node, or of what it computes."""
    return node.name or next((o for o in node.output if o), node.op_type)


def _dtype_of(node: NodeProto) -> str:
    """The element type of the first output of a step, where shape inference does not say."""
    attrs = {a.name: a for a in node.attribute}
    if "values_tensor" in attrs:
        return DTYPES.get(attrs["values_tensor"].t.data_type, "")
    if node.op_type == "Cast":
        return DTYPES.get(attrs["to"].i, "")
    kinds = {"RegexFullMatch": "bool", "Equal": "bool", "ImageDecoder": "uint8"}
    return kinds.get(node.op_type, "float32" if "values_floats" in attrs else "int64")


def _type_of(proto: TypeProto) -> Type:
    tensor = proto.tensor_type
    dtype = STRING if tensor.elem_type == TensorProto.STRING else DTYPES.get(tensor.elem_type, "")
    if not tensor.HasField("shape"):
        return dtype, None
    dims: list[int | str | None] = []
    for d in tensor.shape.dim:
        check_text(d.dim_param)
        named = d.dim_param if d.dim_param and not d.dim_param.startswith("unk__") else None  # a name that shape inference made up
        dims.append(d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else named)
    return dtype, dims


def _spec(name: str, found: Type, declared: Type = ("", None)) -> TensorSpec:
    dtype, dims = found[0] or declared[0] or STRING, found[1] if found[1] is not None else declared[1]
    return TensorSpec(name, dtype, (ANY_SHAPE,) if dims is None else tuple(f"{name}_{n}" if d is None else d for n, d in enumerate(dims)))
