"""The schemas of operators: what a node may look like, and the functions that define some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import onnx
from onnx import FunctionProto, NodeProto
from onnx.defs import OpSchema, SchemaError

from tcomp.errors import ImportModelError
from tcomp.frontends.onnx.microsoft_schemas import find_signature
from tcomp.frontends.onnx.reader import ELEM_TYPES
from tcomp.ir.expr import Expr
from tcomp.ir.graph import Value

_TYPE_NAMES = {f"tensor({onnx.TensorProto.DataType.Name(number).lower()})": dtype for dtype, number in ELEM_TYPES.items()}
_TYPE_NAMES |= {f"seq({t})": f"seq({d})" for t, d in _TYPE_NAMES.items()}
_TYPE_NAMES |= {f"optional({t})": f"optional({d})" for t, d in _TYPE_NAMES.items()}
_OPTIONAL = (OpSchema.FormalParameterOption.Optional, OpSchema.FormalParameterOption.Variadic)


class Schema:
    """The schema of an ONNX operator, with what is asked of it for every node copied out of the library."""

    def __init__(self, schema: Any) -> None:  # onnx.defs.OpSchema, whose type stubs lack half of it
        self.schema = schema
        self.inputs = [(f, frozenset(_TYPE_NAMES[t] for t in f.types if t in _TYPE_NAMES)) for f in schema.inputs]
        self.attributes: Mapping[str, Any] = schema.attributes
        self.defaults = {name: a.default_value for name, a in self.attributes.items() if a.default_value.name}

    def check_node(self, node: NodeProto, inputs: Sequence[Value | None], where: str) -> None:
        """Raises `ImportModelError` if number or types of inputs, or the attributes, are not what the operator takes."""
        bound: dict[str, str] = {}
        self.check_form(node, where)
        for number, value in enumerate(inputs):
            formal, dtypes = self.inputs[min(number, len(self.inputs) - 1)]
            if value is None:
                if formal.option not in _OPTIONAL:
                    raise ImportModelError(f"input {number} (`{formal.name}`) is missing", where=where)
                continue
            binds = formal.is_homogeneous and not formal.type_str.startswith("tensor(")  # the same type for all inputs of that variable
            expected = bound.setdefault(formal.type_str, value.dtype) if binds else value.dtype
            if value.dtype not in dtypes or value.dtype != expected:
                accepted = expected if value.dtype in dtypes else ", ".join(sorted(dtypes))
                what = f"input {number} (`{formal.name}`) is {value.dtype}"
                raise ImportModelError(what, where=where, why=f"the operator takes {accepted} there")

    def check_form(self, node: NodeProto, where: str) -> None:
        """What `check_node` checks without knowing the inputs: how many there are, the number of outputs, and the attributes."""
        s, count = self.schema, len(node.input)
        if not s.min_input <= count <= s.max_input:
            raise ImportModelError(f"{count} inputs", where=where, why=f"the operator takes {s.min_input} to {s.max_input}")
        if len(node.output) > s.max_output:
            raise ImportModelError(f"{len(node.output)} outputs", where=where, why=f"the operator has {s.max_output}")
        for attr in node.attribute:
            if attr.name not in self.attributes:
                raise ImportModelError(f"unknown attribute `{attr.name}`", where=where, why=f"this opset has {sorted(self.attributes)}")
            if attr.type != self.attributes[attr.name].type.value and not attr.ref_attr_name:
                raise ImportModelError(f"attribute `{attr.name}` has the wrong type", where=where)
        given = Counter(attr.name for attr in node.attribute)
        if twice := [name for name, times in given.items() if times > 1]:
            raise ImportModelError(f"attribute `{twice[0]}` is given twice", where=where)
        if missing := [name for name, a in self.attributes.items() if a.required and name not in given]:
            raise ImportModelError(f"attribute `{missing[0]}` is missing", where=where)

    def function_body(self, node: NodeProto, inputs: Sequence[Value | None], opset: int) -> FunctionProto | None:
        """The definition of the operator by simpler ones, as ONNX gives it for this node; None if there is none."""
        s, body = self.schema, b""

        def version(declared: Sequence[int]) -> int:
            return max([v for v in declared if v <= opset] or declared)

        if s.has_function:
            body = s.get_function_with_opset_version(version(s.function_opset_versions))
        elif s.has_context_dependent_function:
            types, chosen = [_type_proto(v).SerializeToString() for v in inputs], version(s.context_dependent_function_opset_versions)
            body = s.get_context_dependent_function_with_opset_version(chosen, node.SerializeToString(), types)
        definition: FunctionProto | None = FunctionProto.FromString(body) if body else None
        return definition


@lru_cache(maxsize=1024)
def domain_of(domain: str) -> str:
    """The name of a domain, that of standard operators being ""."""
    return "" if domain == "ai.onnx" else domain


def opsets_of(imports: Iterable[Any]) -> dict[str, int]:
    """The versions of the operators of each domain. Raises `ImportModelError` for one that cannot be."""
    opsets = {domain_of(o.domain): int(o.version) for o in imports}
    for domain, version in opsets.items():
        if abs(version) >> 31 or (domain == "" and version < 1):  # the versions of schemas have 32 bits
            raise ImportModelError(f"opset {version} of domain `{domain or 'ai.onnx'}` does not exist")
    return opsets


def find_schema(op_type: str, opset: int, domain: str) -> Schema | None:
    """The schema in force at an opset, deprecated or not; None for an operator that neither ONNX nor ONNX Runtime defines."""
    try:
        return Schema(onnx.defs.get_schema(op_type, opset, domain))
    except SchemaError:
        signature = find_signature(op_type, domain)
        return None if signature is None else Schema(signature)


def check_form(node: NodeProto, visible: Container[str], opsets: Mapping[str, int], where: str) -> Schema | None:
    """The schema of a node, None where there is none. Raises `ImportModelError` where the node does not fit it, as far as that can be told
    without its inputs, or reads a name that is not visible."""
    if unknown := [name for name in node.input if name not in visible]:
        raise ImportModelError(f"`{unknown[0]}` is used but defined nowhere", where=where)
    domain = domain_of(node.domain)
    if (found := find_schema(node.op_type, opsets.get(domain, 0), domain)) is not None:
        found.check_form(node, where)
    return found


def _type_proto(value: Value | None) -> onnx.TypeProto:
    if value is None:
        return onnx.TypeProto()
    return onnx.helper.make_tensor_type_proto(ELEM_TYPES[value.dtype], [str(d) if isinstance(d, Expr) else d for d in value.shape])
