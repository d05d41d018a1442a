"""What ONNX itself says of an operator: its formal inputs, attribute defaults and function body, checked against a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto
from onnx.defs import OpSchema, SchemaError

from tcomp.errors import ImportModelError
from tcomp.frontends.onnx.reader import ELEM_TYPES
from tcomp.ir.expr import Expr
from tcomp.ir.graph import Value

_TYPE_NAMES = {f"tensor({name})": dtype for name, dtype in {
    **{d: d for d in ELEM_TYPES}, "float": "float32", "double": "float64",
}.items()}  # fmt: skip


@dataclass(frozen=True)
class Formal:
    """A formal input: accepted dtypes, the type variable it binds ("" if none), and how often it occurs."""

    name: str
    dtypes: frozenset[str]
    variable: str
    optional: bool
    variadic: bool


@dataclass(frozen=True)
class Schema:
    """The parts of an ONNX operator schema that importing needs."""

    schema: Any  # onnx.defs.OpSchema, whose type stubs lack half of it
    inputs: tuple[Formal, ...]
    min_inputs: int
    max_inputs: int
    max_outputs: int
    defaults: Mapping[str, AttributeProto]
    attributes: Mapping[str, tuple[int, bool]]  # name -> (type, required)

    @property
    def since(self) -> int:
        """The opset that introduced this version of the operator."""
        return int(self.schema.since_version)


@lru_cache(maxsize=1024)
def find(op_type: str, opset: int, domain: str) -> Schema | None:
    """The schema in force at an opset; None for an operator that ONNX does not define."""
    try:
        schema: Any = onnx.defs.get_schema(op_type, opset, domain)
    except SchemaError:
        return None
    if schema.deprecated:
        return None
    formals = tuple(
        Formal(
            f.name,
            frozenset(_TYPE_NAMES[t] for t in f.types if t in _TYPE_NAMES),
            f.type_str if not f.type_str.startswith("tensor(") and f.is_homogeneous else "",
            f.option == OpSchema.FormalParameterOption.Optional,
            f.option == OpSchema.FormalParameterOption.Variadic,
        )
        for f in schema.inputs
    )
    attributes = schema.attributes
    return Schema(
        schema,
        formals,
        schema.min_input,
        schema.max_input,
        schema.max_output,
        {name: a.default_value for name, a in attributes.items() if a.default_value.name},
        {name: (int(a.type.value), a.required) for name, a in attributes.items()},
    )


def check_node(schema: Schema, node: NodeProto, inputs: Sequence[Value | None], where: str) -> None:
    """Raises `ImportModelError` if number or types of inputs, or the attributes, are not what the operator takes."""
    if not schema.min_inputs <= len(inputs) <= schema.max_inputs:
        raise ImportModelError(f"{len(inputs)} inputs", where=where, why=f"the operator takes {schema.min_inputs} to {schema.max_inputs}")
    if len(node.output) > schema.max_outputs:
        raise ImportModelError(f"{len(node.output)} outputs", where=where, why=f"the operator has {schema.max_outputs}")
    bound: dict[str, str] = {}
    for number, value in enumerate(inputs):
        formal = schema.inputs[min(number, len(schema.inputs) - 1)]
        if value is None:
            if not formal.optional and not formal.variadic:
                raise ImportModelError(f"input {number} (`{formal.name}`) is missing", where=where)
            continue
        expected = bound.setdefault(formal.variable, value.dtype) if formal.variable else value.dtype
        if value.dtype not in formal.dtypes or value.dtype != expected:
            accepted = expected if value.dtype in formal.dtypes else ", ".join(sorted(formal.dtypes))
            raise ImportModelError(
                f"input {number} (`{formal.name}`) is {value.dtype}", where=where, why=f"the operator takes {accepted} there"
            )
    for attr in node.attribute:
        known = schema.attributes.get(attr.name)
        if known is None:
            raise ImportModelError(f"unknown attribute `{attr.name}`", where=where, why=f"this opset has {sorted(schema.attributes)}")
        if attr.type != known[0] and not attr.ref_attr_name:
            raise ImportModelError(f"attribute `{attr.name}` has the wrong type", where=where)
    given = {attr.name for attr in node.attribute}
    for name, (_, required) in schema.attributes.items():
        if required and name not in given:
            raise ImportModelError(f"attribute `{name}` is missing", where=where)


def function_body(schema: Schema, node: NodeProto, inputs: Sequence[Value | None], opset: int) -> FunctionProto | None:
    """The definition of an operator by simpler ones, as ONNX gives it for this node; None if there is none."""
    s = schema.schema
    if s.has_function:
        versions = [v for v in s.function_opset_versions if v <= opset] or list(s.function_opset_versions)
        definition: FunctionProto = FunctionProto.FromString(s.get_function_with_opset_version(max(versions)))
        return definition
    if s.has_context_dependent_function:
        types = [_type_proto(v).SerializeToString() for v in inputs]
        declared = list(s.context_dependent_function_opset_versions)
        versions = [v for v in declared if v <= opset] or declared
        body = s.get_context_dependent_function_with_opset_version(max(versions), node.SerializeToString(), types)
        return FunctionProto.FromString(body) if body else None
    return None


def _type_proto(value: Value | None) -> onnx.TypeProto:
    if value is None:
        return onnx.TypeProto()
    dims = [str(d) if isinstance(d, Expr) else d for d in value.shape]
    return onnx.helper.make_tensor_type_proto(ELEM_TYPES[value.dtype], dims)
