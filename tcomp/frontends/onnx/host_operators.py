"""ONNX operators as host steps, whatever their opset: operands that older versions have as attributes become inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx.reader import DTYPES, TensorReader
from tcomp.runtime.host_steps.operators import OPERATORS
from tcomp.runtime.host_steps.steps import STRING, Step, saved_array, strings


def string_array(tensor: TensorProto, where: str) -> np.ndarray:
    """The array of a tensor message of strings. Raises `ImportModelError` if sizes do not match, or it is not UTF-8."""
    try:
        if any(d < 0 for d in tensor.dims):
            raise ValueError(f"its shape is {[*tensor.dims]}")
        return strings([text.decode() for text in tensor.string_data], tuple(tensor.dims))
    except ValueError as error:
        raise ImportModelError("a tensor of strings is malformed", where=where, why=str(error)) from None


class HostNode:
    """A node that becomes steps (`steps`)."""

    def __init__(self, node: NodeProto, name: str, opset: int, tensors: TensorReader, text: Sequence[bool]) -> None:
        """`text` says which of the inputs are strings."""
        self.node, self.name, self.opset, self.text = node, name, opset, text
        self.where = f"node `{name}` ({node.op_type}, opset {opset})"
        self.steps: list[Step] = []
        self.attrs: dict[str, Any] = {a.name: self._attribute(a, tensors) for a in node.attribute}

    def _attribute(self, attr: AttributeProto, tensors: TensorReader) -> Any:
        if attr.type == AttributeProto.TENSOR and attr.t.data_type == TensorProto.STRING:
            return string_array(attr.t, self.where)
        return tensors.attribute(attr, self.where)

    def given(self, position: int) -> bool:
        """Whether there is an input at this position."""
        return position < len(self.node.input) and bool(self.node.input[position])

    def constant(self, array: np.ndarray) -> str:
        """The name of a constant."""
        name = f"{self.name}/constant_{len(self.steps)}"
        self.steps.append(constant_step(name, array))
        return name

    def operand(self, position: int, attribute: str) -> list[str]:
        """The input at this position, or the attribute that older versions have instead; nothing where neither is there."""
        if self.given(position):
            return [self.node.input[position]]
        return [self.constant(np.asarray(self.attrs[attribute], np.int64))] if attribute in self.attrs else []

    def add(self, inputs: Sequence[str] | None = None, operator: str = "", **attributes: Any) -> None:
        """Add the step that gives the node's outputs."""
        operator, outputs = operator or self.node.op_type, list(self.node.output)
        wanted = OPERATORS[operator].outputs or len(outputs)
        outputs += [""] * (wanted - len(outputs))
        named = tuple(o or f"{self.name}/unused_{n}" for n, o in enumerate(outputs))
        taken = tuple(self.node.input if inputs is None else inputs)
        if not all(taken):
            raise UnsupportedError(f"`{self.node.op_type}` cannot be a host step with an input left out", where=self.where)
        self.steps.append(Step(operator, self.name, taken, named, attributes))


def constant_step(name: str, array: np.ndarray) -> Step:
    """A step that gives a constant."""
    return Step("Constant", name, (), (name,), {"value": saved_array(array)})


Convert: TypeAlias = Callable[[HostNode], None]


def _plain(node: HostNode) -> None:
    node.add()


def _along(default: int | None = None) -> Convert:
    def convert(node: HostNode) -> None:
        if (axis := node.attrs.get("axis", default)) is None:
            raise ImportModelError("the attribute `axis` is missing", where=node.where)
        node.add(axis=axis)

    return convert


def _normalizer(node: HostNode) -> None:
    sensitive, stopwords = bool(node.attrs.get("is_case_sensitive", 0)), list(node.attrs.get("stopwords", ()))
    node.add(case=node.attrs.get("case_change_action", "NONE"), is_case_sensitive=sensitive, stopwords=stopwords)


def _keys_or_values(node: HostNode, side: str) -> np.ndarray:
    for kind, dtype in (("int64s", np.int64), ("floats", np.float32)):
        if f"{side}_{kind}" in node.attrs:
            return np.asarray(node.attrs[f"{side}_{kind}"], dtype)
    if f"{side}_strings" in node.attrs:
        return strings(found := node.attrs[f"{side}_strings"], (len(found),))
    if f"{side}_tensor" in node.attrs:
        return np.asarray(node.attrs[f"{side}_tensor"]).reshape(-1)
    raise ImportModelError(f"no attribute gives its {side}", where=node.where)


def _default(node: HostNode, values: np.ndarray) -> np.ndarray:
    if "default_tensor" in node.attrs:
        return np.asarray(node.attrs["default_tensor"]).reshape(-1)
    if values.dtype == object:
        return strings([node.attrs.get("default_string", "_Unused")], (1,))
    given = node.attrs.get("default_float", -0.0) if values.dtype.kind == "f" else node.attrs.get("default_int64", -1)
    return np.asarray([given], values.dtype)


def _looked_up(node: HostNode, keys: np.ndarray, values: np.ndarray) -> None:
    if keys.size != values.size:
        raise ImportModelError(f"{keys.size} keys and {values.size} values are given", where=node.where)
    default = _default(node, values)
    node.add(operator="LookUp", keys=saved_array(keys), values=saved_array(values), default=saved_array(default))


def _label_encoder(node: HostNode) -> None:
    if "classes_strings" in node.attrs:  # of version 1, which maps both ways
        classes = node.attrs["classes_strings"]
        pair = strings(classes, (len(classes),)), np.arange(len(classes), dtype=np.int64)
        return _looked_up(node, *(pair if node.text[0] else pair[::-1]))
    _looked_up(node, _keys_or_values(node, "keys"), _keys_or_values(node, "values"))


def _category_mapper(node: HostNode) -> None:
    names = node.attrs.get("cats_strings", ())
    pair = strings(names, (len(names),)), np.asarray(node.attrs.get("cats_int64s", ()), np.int64)
    _looked_up(node, *(pair if node.text[0] else pair[::-1]))


def _cast(node: HostNode) -> None:
    number = node.attrs.get("to")
    to = STRING if number == TensorProto.STRING else DTYPES.get(number or 0, "")
    if to == "bool" or not to:
        raise UnsupportedError(f"a cast of strings to {to or number} is not supported", where=node.where)
    node.add(to=to)


def _cast_like(node: HostNode) -> None:
    if not node.text[1]:
        raise UnsupportedError("a cast of strings to the type of another input is not supported", where=node.where, hint="use Cast")
    node.add(node.node.input[:1], "Cast", to=STRING)


def _split(node: HostNode) -> None:
    node.add([node.node.input[0], *node.operand(1, "split")], axis=node.attrs.get("axis", 0), parts=len(node.node.output))


def _cut(node: HostNode) -> None:
    operands = [name for n, key in enumerate(("starts", "ends", "axes", "steps"), 1) for name in node.operand(n, key)]
    if node.given(4) and not node.given(3):
        operands.insert(2, node.constant(np.zeros(0, np.int64)))  # the first axes, as many as there are starts
    node.add([node.node.input[0], *operands])


def _shape(node: HostNode) -> None:
    node.add(start=node.attrs.get("start", 0), end=node.attrs.get("end"))


CONVERT: Mapping[str, Convert] = {
    "StringNormalizer": _normalizer,
    "StringConcat": _plain,
    "StringSplit": lambda node: node.add(delimiter=node.attrs.get("delimiter") or "", most=node.attrs.get("maxsplit")),
    "RegexFullMatch": lambda node: node.add(pattern=node.attrs.get("pattern", "")),
    "LabelEncoder": _label_encoder,
    "CategoryMapper": _category_mapper,
    "Cast": _cast,
    "CastLike": _cast_like,
    "ImageDecoder": lambda node: node.add(pixel_format=node.attrs.get("pixel_format", "RGB")),
    "Identity": _plain,
    "Reshape": lambda node: node.add([node.node.input[0], *node.operand(1, "shape")], allow_zero=bool(node.attrs.get("allowzero", 0))),
    "Squeeze": lambda node: node.add([node.node.input[0], *node.operand(1, "axes")]),
    "Unsqueeze": lambda node: node.add([node.node.input[0], *node.operand(1, "axes")]),
    "Flatten": _along(1),
    "Transpose": lambda node: node.add(perm=list(node.attrs.get("perm", ()))),
    "Concat": _along(),
    "Gather": _along(0),
    "GatherElements": _along(0),
    "ArrayFeatureExtractor": _plain,
    "Slice": _cut,
    "Split": _split,
    "Expand": _plain,
    "Tile": _plain,
    "Where": _plain,
    "Equal": _plain,
    "Shape": _shape,
    "Size": _plain,
    "Compress": lambda node: node.add(axis=node.attrs.get("axis")),
}
"""By the type of an operator, of whatever domain: how its nodes become steps."""
