"""What an ONNX graph returns, under the names that it declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import GraphProto, ValueInfoProto

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import reader
from tcomp.frontends.onnx.containers import Container, type_name
from tcomp.frontends.onnx.scope import Scope
from tcomp.ir.graph import Graph, Node, Value
from tcomp.ops.movement import IDENTITY


def with_outputs(scope: Scope, results: Sequence[Value], proto: GraphProto) -> Graph:
    """The pruned graph with the model's output names; an output that is an input, a constant or another output is copied."""
    outputs: list[Value] = []
    for info, value in _returned(scope, results, proto):
        kind = info.type.tensor_type.elem_type
        if kind and reader.DTYPES.get(kind) != value.dtype:
            raise ImportModelError(f"output `{info.name}` is declared with another element type than the {value.dtype} it has")
        if value.name != info.name or not renamable(scope, value) or value in outputs:
            copy = Value(info.name, value.dtype, value.shape)
            scope.builder.append(Node(IDENTITY, (value,), (copy,), {}, info.name))
            value = copy
        outputs.append(value)
    return scope.finish(scope.builder.inputs, outputs)


def _returned(scope: Scope, results: Sequence[Value], proto: GraphProto) -> Iterator[tuple[ValueInfoProto, Value]]:
    """The tensors that are returned, and as what: those of a sequence `y` as `y.0`, `y.1`, ..., that of an optional by its name."""
    for info, value in zip(proto.output, results, strict=True):
        where = f"output `{info.name}`"
        maps = info.type.sequence_type.elem_type.HasField("map_type")  # of ZipMap, which gives a tensor instead
        declared = info.type.tensor_type.elem_type or info.type.WhichOneof("value") not in (None, "tensor_type")
        kind = type_name(info.type, where) if declared and not maps else value.dtype
        if kind != value.dtype and (isinstance(value, Container) or not info.type.HasField("tensor_type")):
            raise ImportModelError(f"it is declared as {kind}, its nodes give it the type {value.dtype}", where=where)
        while isinstance(value, Container) and value.is_optional:
            if not value.items:
                raise UnsupportedError("an output is an optional that holds nothing", where=where, hint="remove this output")
            value = value.items[0]
        if not isinstance(value, Container):
            yield ValueInfoProto(name=info.name, type=info.type if info.type.HasField("tensor_type") else None), value
            continue
        if not value.items:
            raise UnsupportedError("an output is a sequence without elements", where=where, hint="remove this output")
        yield from ((ValueInfoProto(name=scope.builder.fresh(f"{info.name}.{n}")), v) for n, v in enumerate(value.items))


def renamable(scope: Scope, value: Value) -> bool:
    """Whether a value may get another name: it is made by a node."""
    return value not in scope.builder.constants and all(value is not i for i in scope.builder.inputs)
