"""Models that nobody should trust: each must be refused with a clear error, at once."""

import random

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper

from tcomp.errors import ImportModelError, TcompError
from tcomp.frontends.onnx import import_model, reader, signature

F = "float32"
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs, outputs, **attrs)


@pytest.fixture
def model(make_model):
    """A small model with weights, to be broken."""
    rng = np.random.default_rng(0)
    constants = {"w": rng.standard_normal((4, 3, 3, 3)).astype(np.float32), "b": np.zeros(4, np.float32), "s": np.array([0, -1])}
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]), node("Relu", ["c"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]), node("Reshape", ["p", "s"], ["y"]),
    ]  # fmt: skip
    return make_model(nodes, {"x": (F, ["n", 3, 8, 8])}, {"y": F}, constants=constants)


@pytest.mark.parametrize("content", [b"", b"\0", b"not a model", b"\x08\x09", bytes(range(256)), b"\x3a\xff\xff\xff\xff\x0f"])
def test_what_is_no_model(content, tmp_path):
    with pytest.raises(ImportModelError):
        import_model(content)
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ImportModelError, match="m.onnx"):
        import_model(tmp_path / "m.onnx")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ImportModelError, match="cannot be read"):
        import_model(tmp_path / "missing.onnx")
    with pytest.raises(ImportModelError, match="cannot be read"):
        import_model(tmp_path)


def break_cycle(m):
    m.graph.node[1].input[0] = "p"


def break_self_cycle(m):
    m.graph.node[1].input[0] = "r"


def break_missing_value(m):
    m.graph.node[1].input[0] = "nowhere"


def break_missing_output(m):
    m.graph.output[0].name = "nowhere"


def break_duplicate(m):
    m.graph.node[1].output[0] = "c"


def break_missing_operand(m):
    m.graph.node[0].input[1] = ""


def break_too_few_operands(m):
    del m.graph.node[0].input[1:]


def break_too_many_operands(m):
    m.graph.node[1].input.append("x")


def break_too_many_outputs(m):
    m.graph.node[1].output.append("more")


def break_type(m):
    m.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64


def break_mixed_types(m):
    m.graph.initializer[0].data_type = TensorProto.DOUBLE
    m.graph.initializer[0].raw_data *= 2


def break_unknown_type(m):
    m.graph.input[0].type.tensor_type.elem_type = 77


def break_no_type(m):
    m.graph.input[0].ClearField("type")


def break_rank(m):
    m.graph.initializer[0].dims[:] = [4, 27]


def break_data_size(m):
    m.graph.initializer[0].raw_data = m.graph.initializer[0].raw_data[:-4]


def break_huge_tensor(m):
    m.graph.initializer[0].dims[:] = [1 << 40, 1 << 40]


def break_negative_dim(m):
    m.graph.initializer[0].dims[0] = -4


def break_channels(m):
    m.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5


def break_attribute_name(m):
    m.graph.node[0].attribute[0].name = "padz"


def break_attribute_type(m):
    m.graph.node[0].attribute[0].type = AttributeProto.FLOAT


def break_attribute_length(m):
    m.graph.node[0].attribute[0].ints[:] = [1, 1]


def break_stride(m):
    m.graph.node[2].attribute[1].ints[:] = [0, 0]


def break_window(m):
    m.graph.node[2].attribute[0].ints[:] = [100, 100]


def break_required_attribute(m):
    del m.graph.node[2].attribute[:]


def break_reshape(m):
    m.graph.initializer[2].raw_data = np.array([-1, -1]).tobytes()


def break_absurd_pads(m):
    m.graph.node[0].attribute[0].ints[:] = [1 << 60] * 4


def break_input_size(m):
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1 << 62


def break_no_opset(m):
    del m.opset_import[:]


def break_opset_zero(m):
    m.opset_import[0].version = 0


def break_domain(m):
    m.graph.node[1].domain = "nobody"


def break_output_type(m):
    m.graph.output[0].type.tensor_type.elem_type = TensorProto.INT32


def break_ranks(m):
    m.graph.input[0].type.tensor_type.shape.dim.extend([m.graph.input[0].type.tensor_type.shape.dim[1]] * 100)


BREAKS = {name.removeprefix("break_"): f for name, f in list(globals().items()) if name.startswith("break_")}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_models(model, name):
    BREAKS[name](model)
    with pytest.raises(ImportModelError) as caught:
        import_model(model)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(TcompError):
        import_model(model.SerializeToString())


def test_an_opset_of_the_future(model):
    model.opset_import[0].version = 1000
    with pytest.raises(TcompError, match="newer than any known"):
        import_model(model)


def test_names_that_are_no_text(model):
    broken = model.SerializeToString().replace(b"\x0a\x01c", b"\x0a\x01\xff", 1)
    with pytest.raises(TcompError):
        import_model(broken)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes(model, seed):
    """A few hundred random changes of the encoded model: an error of ours, or a model."""
    pristine, rng = model.SerializeToString(), random.Random(seed)
    refused = 0
    for _ in range(150):
        content = bytearray(pristine)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(content))
            match rng.randrange(3):
                case 0:
                    content[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
                case 1:
                    del content[at : at + rng.randint(1, 9)]
                case 2:
                    start = rng.randrange(len(content))
                    content[at:at] = content[start : start + rng.randint(1, 30)]
        try:
            import_model(bytes(content))
        except TcompError:
            refused += 1
    assert refused > 20


def test_weights_cut_out_of_the_encoding_are_those_of_the_message(make_model):
    rng = np.random.default_rng(0)
    arrays = {f"w{n}": rng.standard_normal((n * 50, 20)).astype(np.float32) for n in range(5)}
    model = make_model([node("Identity", ["x"], ["y"])], {"x": X}, {"y": F}, constants=arrays)
    slim, weights = reader.split_weights(model.SerializeToString())
    assert set(weights) == {"w1", "w2", "w3", "w4"}  # w0 is too small to be worth it
    for name, data in weights.items():
        assert bytes(data) == arrays[name].tobytes()
    parsed = ModelProto.FromString(slim)
    assert [t.name for t in parsed.graph.initializer] == list(arrays)
    assert [tuple(t.dims) for t in parsed.graph.initializer] == [a.shape for a in arrays.values()]
    parsed.graph.initializer[0].CopyFrom(model.graph.initializer[0])
    for t, original in zip(parsed.graph.initializer, model.graph.initializer, strict=True):
        t.raw_data = original.raw_data
    assert parsed == model


def test_names_of_dims_that_look_like_odd_code_warn_nobody(recwarn):
    assert signature.formula("1or 2", lambda name: 7) == 7
    assert not recwarn.list
