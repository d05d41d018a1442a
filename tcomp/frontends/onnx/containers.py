"""Sequences and optionals: while a model is imported, lists of values whose length is known. No node computes one; what a graph takes,
returns or passes into a body are their elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from onnx import TypeProto, ValueInfoProto

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx.reader import dtype_name
from tcomp.ir.graph import Value


class Container(Value):
    """A sequence, or an optional that holds one item or none. `dtype` is its type, such as "seq(float32)" and "optional(seq(int64))"."""

    __slots__ = ("items",)

    def __init__(self, name: str, dtype: str, items: Iterable[Value]) -> None:
        super().__init__(name, dtype, ())
        self.items = tuple(items)

    @property
    def is_optional(self) -> bool:
        """Whether it is an optional."""
        return self.dtype.startswith("optional(")

    def __repr__(self) -> str:
        return f"%{self.name}: {self.dtype} of {len(self.items)}"


def leaves(values: Iterable[Value]) -> list[Value]:
    """The tensors of some values, in order."""
    return [leaf for v in values for leaf in (leaves(v.items) if isinstance(v, Container) else [v])]


def rebuilt(value: Value, tensors: Iterator[Value]) -> Value:
    """The value, or a container of the same structure, made of the next `tensors`."""
    if isinstance(value, Container):
        return Container(value.name, value.dtype, [rebuilt(v, tensors) for v in value.items])
    return next(tensors)


def alike(a: Sequence[Value], b: Sequence[Value]) -> bool:
    """Whether values have the same structure, whatever their tensors are."""
    if len(a) != len(b):
        return False
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, Container) or isinstance(y, Container)]
    return all(isinstance(x, Container) and isinstance(y, Container) and x.dtype == y.dtype and alike(x.items, y.items) for x, y in pairs)


def type_name(proto: TypeProto, where: str) -> str:
    """The type of a tensor (its dtype), of a sequence or an optional. Raises `UnsupportedError` for others."""
    kind = proto.WhichOneof("value")
    match kind:
        case "tensor_type":
            return dtype_name(proto.tensor_type.elem_type, where)
        case "sequence_type":
            return f"seq({type_name(proto.sequence_type.elem_type, where)})"
        case "optional_type":
            return f"optional({type_name(proto.optional_type.elem_type, where)})"
        case None:
            raise ImportModelError("a value has no type", where=where)
    raise UnsupportedError(f"values of type `{kind.removesuffix('_type')}` are not supported", where=where)


def elements(info: ValueInfoProto, shaped: Iterable[str]) -> list[ValueInfoProto]:
    """The tensors that stand for an input: itself, those of a sequence `x`, called `x.0`, `x.1`, ..., or that in an optional, which has its
    name. How many there are is known by the inputs that the caller gives a shape (`shaped`). Raises `UnsupportedError` where it is not."""
    kind, name = info.type, info.name
    if kind.HasField("optional_type") or kind.HasField("sequence_type"):
        type_name(kind, f"input `{name}`")
    if kind.HasField("optional_type"):
        inner = ValueInfoProto(name=name, type=kind.optional_type.elem_type)
        found = elements(inner, shaped) if inner.type.HasField("sequence_type") or name in shaped else []
        if not found:
            hint = f"give it a shape if it does: --shape {name}=..."
            raise UnsupportedError("whether an optional input holds a value is not known", where=f"input `{name}`", hint=hint)
        return found
    if not kind.HasField("sequence_type"):
        return [info]
    count, given = 0, set(shaped)
    while f"{name}.{count}" in given:
        count += 1
    if not count:
        hint = f"give the shape of each element: --shape {name}.0=... --shape {name}.1=..."
        raise UnsupportedError("how many elements an input that is a sequence has is not known", where=f"input `{name}`", hint=hint)
    found = [ValueInfoProto(name=f"{name}.{n}", type=kind.sequence_type.elem_type) for n in range(count)]
    for size in (d for element in found for d in element.type.tensor_type.shape.dim if d.HasField("dim_param")):
        size.ClearField("dim_param")  # elements may differ in what their type calls by one name
    return found


def contained(name: str, dtype: str, tensors: Sequence[Value]) -> Value:
    """The value of type `dtype` whose tensors are given: see `elements`."""
    if dtype.startswith("optional("):
        return Container(name, dtype, [contained(name, dtype.removeprefix("optional(").removesuffix(")"), tensors)])
    return Container(name, dtype, tensors) if dtype.startswith("seq(") else tensors[0]
