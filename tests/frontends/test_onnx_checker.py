"""What onnx's own checker finds wrong in a file, the importer refuses: some models, each damaged in many ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, parser

from tcomp.errors import ImportModelError, InputError, UnsupportedError
from tcomp.frontends.onnx.importer import import_model

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
MODELS: Mapping[str, str] = {
    "dense": """g (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
        h = MatMul(x, w)
        y = LeakyRelu<alpha: float = 0.1>(h) }""",
    "convolution": """g (float[1, 1, 6, 6] x) => (float[1, 1, 4, 4] y) <float[1, 1, 3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
        c = Conv<kernel_shape: ints = [3, 3]>(x, w)
        y = Softmax<axis: int = 1>(c) }""",
    "shapes": """g (float[2, 6] x) => (float[4, 3] y) <int64[2] s = {4, 3}> {
        t = Transpose<perm: ints = [1, 0]>(x)
        y = Reshape(t, s) }""",
    "indices": """g (float[5, 2] x, int64[3] i) => (float[3, 2] y, int64[3] j) <int64 one = {1}> {
        y = Gather<axis: int = 0>(x, i)
        j = Add(i, one) }""",
    "branches": """g (bool b, float[2] x) => (float[2] y) {
        y = If (b) <then_branch = t () => (float[2] u) { u = Relu(x) }, else_branch = e () => (float[2] v) { v = Neg(x) }> }""",
}


def first(m: ModelProto) -> NodeProto:
    return m.graph.node[0]


def last(m: ModelProto) -> NodeProto:
    return m.graph.node[-1]


def renamed(m: ModelProto) -> None:
    last(m).output[0] = "another"


def twice(m: ModelProto) -> None:
    copied = NodeProto()
    copied.CopyFrom(last(m))
    m.graph.node.append(copied)


def wrong_type(m: ModelProto) -> None:
    for n in m.graph.node:
        for a in n.attribute:
            a.Clear()
            a.name, a.type, a.s = "axis" if n.op_type in ("Softmax", "Gather") else a.name, AttributeProto.STRING, b"x"


def typeless_attribute(m: ModelProto) -> None:
    first(m).attribute.add(name="axis")


def repeated_attribute(m: ModelProto) -> None:
    n = next((n for n in m.graph.node if n.attribute), first(m))
    for a in [*n.attribute]:
        n.attribute.add().CopyFrom(a)


def weights(m: ModelProto, change: Callable[[TensorProto], object]) -> None:
    for t in m.graph.initializer:
        change(t)


def longer(t: TensorProto) -> None:
    t.dims[:] = [*t.dims, 2]


def two_kinds(t: TensorProto) -> None:
    t.raw_data = b"\0" * 400
    t.float_data.append(1.0)


DAMAGES: Mapping[str, Callable[[ModelProto], object]] = {
    "no IR version": lambda m: m.ClearField("ir_version"),
    "future IR version": lambda m: setattr(m, "ir_version", 10_000),
    "no opset": lambda m: m.ClearField("opset_import"),
    "opset of another domain": lambda m: setattr(m.opset_import[0], "domain", "elsewhere"),
    "opset 0": lambda m: setattr(m.opset_import[0], "version", 0),
    "no graph": lambda m: m.ClearField("graph"),
    "input without type": lambda m: m.graph.input[0].ClearField("type"),
    "input without element type": lambda m: m.graph.input[0].type.tensor_type.ClearField("elem_type"),
    "input without name": lambda m: m.graph.input[0].ClearField("name"),
    "unknown element type": lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 99),
    "input of another type": lambda m: setattr(m.graph.input[-1].type.tensor_type, "elem_type", TensorProto.STRING),
    "input twice": lambda m: m.graph.input.add().CopyFrom(m.graph.input[0]),
    "output of another type": lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", TensorProto.UINT8),
    "output without producer": renamed,
    "output without name": lambda m: m.graph.output[0].ClearField("name"),
    "a node twice": twice,
    "an empty node": lambda m: m.graph.node.add(),
    "unknown operator": lambda m: setattr(first(m), "op_type", "Nothing"),
    "operator without name": lambda m: first(m).ClearField("op_type"),
    "unknown domain": lambda m: setattr(first(m), "domain", "elsewhere"),
    "no inputs": lambda m: last(m).ClearField("input"),
    "too many inputs": lambda m: last(m).input.extend([last(m).input[0]] * 9),
    "input from nowhere": lambda m: last(m).input.__setitem__(0, "nowhere"),
    "input that is left out": lambda m: last(m).input.__setitem__(0, ""),
    "input of itself": lambda m: last(m).input.__setitem__(0, last(m).output[0]),
    "too many outputs": lambda m: last(m).output.extend(["extra"] * 3),
    "no outputs": lambda m: last(m).ClearField("output"),
    "unknown attribute": lambda m: first(m).attribute.add(name="colour", type=AttributeProto.INT, i=1),
    "attribute without type": typeless_attribute,
    "attribute twice": repeated_attribute,
    "attributes of another type": wrong_type,
    "initializer without name": lambda m: weights(m, lambda t: t.ClearField("name")),
    "initializer without type": lambda m: weights(m, lambda t: t.ClearField("data_type")),
    "initializer of another type": lambda m: weights(m, lambda t: setattr(t, "data_type", TensorProto.DOUBLE)),
    "initializer of another size": lambda m: weights(m, longer),
    "initializer of negative size": lambda m: weights(m, lambda t: t.dims.append(-1)),
    "initializer with two kinds of data": lambda m: weights(m, two_kinds),
}


def damaged(model: str, damage: str) -> ModelProto:
    m = parser.parse_model(HEAD + MODELS[model])
    DAMAGES[damage](m)
    return m


def refused_by_checker(m: ModelProto) -> bool:
    try:
        onnx.checker.check_model(m.SerializeToString(), full_check=True)
    except Exception:  # noqa: BLE001  errors of many kinds
        return True
    return False


@pytest.mark.parametrize("model", MODELS)
def test_models_are_valid(model: str) -> None:
    m = parser.parse_model(HEAD + MODELS[model])
    assert not refused_by_checker(m)
    import_model(m)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("model", MODELS)
def test_what_the_checker_refuses(model: str, damage: str) -> None:
    m = damaged(model, damage)
    refused = refused_by_checker(m)
    try:
        import_model(m.SerializeToString())
    except (ImportModelError, UnsupportedError, InputError):
        return
    assert not refused, "the checker refuses it, the importer does not"
