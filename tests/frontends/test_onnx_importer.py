"""The walk over a model: names, signature, constants, functions, and the report of what is missing."""

import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tcomp.errors import ImportModelError, InputError, UnsupportedError
from tcomp.frontends.onnx import check_model, import_model, importer
from tcomp.frontends.onnx.handlers import tables
from tcomp.ir.interpreters.graph import evaluate_graph

F = "float32"
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs, outputs, **attrs)


def test_no_operator_has_two_handlers():
    for families in tables.FAMILIES.values():
        names = [name for family in families for name in family]
        assert len(set(names)) == len(names)
        for versions in (v for family in families for v in family.values() if not callable(v)):
            assert [since for since, _ in versions] == sorted({since for since, _ in versions})


# ---------------------------------------------------------------- names, constants, outputs


def test_names_of_the_model_are_kept(make_model):
    model = make_model([node("Relu", ["x"], ["hidden/1"]), node("Neg", ["hidden/1"], ["y"])], {"x": X}, {"y": F})
    graph = import_model(model)
    assert [v.name for v in graph.inputs] == ["x"] and [v.name for v in graph.outputs] == ["y"]
    assert [n.outputs[0].name for n in graph.nodes] == ["hidden/1", "y"]


def test_outputs_that_are_inputs_constants_or_each_other(make_model, run_model):
    nodes = [node("Identity", ["x"], ["y"]), node("Neg", ["x"], ["z"]), node("Identity", ["z"], ["z2"]), node("Identity", ["w"], ["c"])]
    model = make_model(nodes, {"x": X}, {"y": F, "z": F, "z2": F, "c": F}, constants={"w": X * 2})
    got = run_model(model, {"x": X})
    assert list(got) == ["y", "z", "z2", "c"]
    for name, expected in {"y": X, "z": -X, "z2": -X, "c": X * 2}.items():
        np.testing.assert_array_equal(got[name], expected)


def test_dead_nodes_and_weights_are_dropped(make_model):
    model = make_model([node("Relu", ["x"], ["y"]), node("NonZero", ["w"], ["z"])], {"x": X}, {"y": F}, constants={"w": X})
    graph = import_model(model)
    assert len(graph.nodes) == 1 and not graph.constants


def test_nodes_may_be_listed_in_any_order(make_model, run_model):
    model = make_model([node("Neg", ["h"], ["y"]), node("Relu", ["x"], ["h"])], {"x": X}, {"y": F})
    np.testing.assert_array_equal(run_model(model, {"x": X})["y"], -X)


def test_an_input_with_a_default_is_a_constant_unless_given(make_model, run_model):
    model = make_model([node("Add", ["x", "w"], ["y"])], {"x": X, "w": X}, {"y": F}, constants={"w": X})
    assert [v.name for v in import_model(model).inputs] == ["x"]
    np.testing.assert_array_equal(run_model(model, {"x": X})["y"], 2 * X)
    np.testing.assert_array_equal(run_model(model, {"x": X}, values={"w": 5 * X})["y"], 6 * X)


def test_weights_are_views_of_the_file(make_model, tmp_path):
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model = make_model([node("MatMul", ["x", "w"], ["y"])], {"x": (F, [1, 64])}, {"y": F}, constants={"w": w})
    onnx.save(model, tmp_path / "m.onnx")
    (weights,) = import_model(tmp_path / "m.onnx").constants.values()
    assert not weights.flags.owndata and not weights.flags.writeable
    np.testing.assert_array_equal(weights, w)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "int64", "bool", "uint64"])
@pytest.mark.parametrize("raw", [True, False])
def test_tensor_encodings(make_model, run_model, dtype, raw):
    array = np.array([[0, 1, 3]]).astype(dtype)
    model = make_model([node("Identity", ["w"], ["y"])], {}, {"y": dtype})
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensor = helper.make_tensor("w", kind, array.shape, array.tobytes() if raw else array.ravel().tolist(), raw=raw)
    model.graph.initializer.append(tensor)
    got = run_model(model, {})["y"]
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


# ---------------------------------------------------------------- external data


def save_external(model, folder):
    onnx.save_model(model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    return onnx.load(folder / "m.onnx", load_external_data=False)


@pytest.fixture
def external(make_model, tmp_path):
    model = make_model([node("Add", ["x", "w"], ["y"])], {"x": X}, {"y": F}, constants={"w": X})
    return save_external(model, tmp_path)


def test_external_data(external, tmp_path, run_model):
    np.testing.assert_array_equal(run_model(tmp_path / "m.onnx", {"x": X})["y"], 2 * X)
    with pytest.raises(ImportModelError, match="without its folder"):
        import_model(external)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("location", "../w.bin", "outside the model's folder"),
        ("location", "/etc/hostname", "outside the model's folder"),
        ("location", "missing.bin", "cannot be read"),
        ("length", "12", "does not fit the tensor"),
        ("offset", "4096", "does not fit the tensor"),
        ("offset", "-8", "does not fit the tensor"),
        ("offset", "many", "malformed"),
    ],
)
def test_external_data_is_confined_and_checked(external, tmp_path, key, value, message):
    entries = external.graph.initializer[0].external_data
    kept = {e.key: e.value for e in entries} | {key: value}
    del entries[:]
    for k, v in kept.items():
        entries.add(key=k, value=v)
    (tmp_path / "m.onnx").write_bytes(external.SerializeToString())
    with pytest.raises(ImportModelError, match=message):
        import_model(tmp_path / "m.onnx")


def test_external_data_behind_a_link_out_of_the_folder(external, tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "m.onnx").write_bytes(external.SerializeToString())
    os.symlink(tmp_path / "w.bin", inner / "w.bin")
    with pytest.raises(ImportModelError, match="outside the model's folder"):
        import_model(inner / "m.onnx")


# ---------------------------------------------------------------- shapes and dims


@pytest.fixture
def dynamic(make_model):
    inputs = {"x": (F, ["n", 3]), "past": (F, ["n", "past", 4]), "mask": (F, ["n", "past + 1"]), "z": (F, [None, 2])}
    nodes = [node("Relu", [name], [name + "_out"]) for name in inputs]
    return make_model(nodes, inputs, {name + "_out": F for name in inputs})


def shapes_of(graph):
    return {v.name: tuple(map(str, v.shape)) for v in graph.inputs}


def test_dims_have_the_names_of_the_model(dynamic):
    graph = import_model(dynamic)
    assert shapes_of(graph) == {"x": ("n", "3"), "past": ("n", "past", "4"), "mask": ("n", "past + 1"), "z": ("z_0", "2")}
    x, past, mask, _ = graph.inputs
    assert x.shape[0] is past.shape[0] is mask.shape[0]


def test_dims_may_be_fixed_and_bounded(dynamic):
    graph = import_model(dynamic, dims={"n": 2, "past": (1, 7), "z_0": 5})
    assert shapes_of(graph) == {"x": ("2", "3"), "past": ("2", "past", "4"), "mask": ("2", "past + 1"), "z": ("5", "2")}
    past = graph.inputs[1].shape[1]
    assert (past.attr.lo, past.attr.hi) == (1, 7)


def test_shapes_fix_the_dims_they_name(dynamic):
    graph = import_model(dynamic, shapes={"past": [2, 6, 4], "z": ["2*k", 2]})
    assert shapes_of(graph) == {"x": ("2", "3"), "past": ("2", "6", "4"), "mask": ("2", "7"), "z": ("k * 2", "2")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": {"m": 3}}, r"no dim `m`(.|\n)*n, past, z_0"),
        ({"shapes": {"y": [1]}}, r"no input `y`(.|\n)*x, past, mask, z"),
        ({"values": {"y": X}}, r"no input `y`"),
        ({"values": {"x": X.astype(np.int32)}}, "int32"),
        ({"values": {"x": X[:, :2]}}, "declares"),
        ({"shapes": {"x": [1]}}, "has 2 dimensions"),
        ({"shapes": {"x": [-1, 3]}}, "size -1"),
        ({"shapes": {"x": [2, 3], "past": [4, 1, 4]}}, "both 2 and 4"),
        ({"shapes": {"x": [2, 3]}, "dims": {"n": 3}}, "given as 3, and as 2"),
        ({"dims": {"n": (5, 2)}}, "given as"),
        ({"dims": {"n": 1.5}}, "given as"),
    ],
)
def test_shapes_and_dims_that_do_not_fit(dynamic, options, message):
    with pytest.raises(InputError, match=message):
        import_model(dynamic, **options)


def test_an_input_of_unknown_rank_needs_a_shape(make_model, run_model):
    model = make_model([node("Relu", ["x"], ["y"])], {"x": (F, None)}, {"y": F})
    with pytest.raises(UnsupportedError, match="number of dimensions"):
        import_model(model)
    np.testing.assert_array_equal(run_model(model, {"x": X}, shapes={"x": [2, 3]})["y"], X)


# ---------------------------------------------------------------- functions


def test_onnx_definitions_stand_in_for_missing_handlers(make_model):
    shape = (1, 2, 3, 4)
    model = make_model([node("Attention", ["q", "k", "v"], ["y"])], {n: (F, shape) for n in "qkv"}, {"y": F}, opset=23)
    (record,) = check_model(model)
    assert record.status == "decomposed" and record.dtypes == (F, F, F)
    q, k, v = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    scores = np.exp(q @ k.transpose(0, 1, 3, 2) / 2)
    expected = scores / scores.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(evaluate_graph(import_model(model), {"q": q, "k": k, "v": v})["y"], expected, rtol=1e-4, atol=1e-5)


def local_function(name, nodes, inputs, outputs, attributes=()):
    return helper.make_function(
        "custom", name, inputs, outputs, nodes, [helper.make_opsetid("", 21), helper.make_opsetid("custom", 1)], attributes
    )


def with_functions(model, *functions):
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid("custom", 1))
    return model


def test_functions_of_the_model(make_model, run_model):
    alpha = node("LeakyRelu", ["a"], ["t"])
    alpha.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    leaky = local_function("Leaky", [alpha, node("Neg", ["t"], ["b"])], ["a"], ["b"], ["slope"])
    twice = local_function("Twice", [node("Leaky", ["a"], ["m"], domain="custom", slope=0.5), node("Leaky", ["m"], ["b"], domain="custom", slope=2.0)], ["a"], ["b"])  # fmt: skip
    model = with_functions(make_model([node("Twice", ["x"], ["y"], domain="custom")], {"x": X}, {"y": F}), leaky, twice)
    np.testing.assert_array_equal(run_model(model, {"x": X - 2})["y"], np.where(X - 2 >= 0, 2 * (X - 2), (X - 2) * 0.5))
    assert check_model(model)[0].status == "decomposed"


def test_a_function_that_calls_itself(make_model):
    endless = local_function("Endless", [node("Endless", ["a"], ["b"], domain="custom")], ["a"], ["b"])
    model = with_functions(make_model([node("Endless", ["x"], ["y"], domain="custom")], {"x": X}, {"y": F}), endless)
    with pytest.raises(ImportModelError, match="nested too deeply"):
        import_model(model)


def test_functions_that_explode(make_model, monkeypatch):
    monkeypatch.setattr(importer, "MAX_NODES", 1000)
    bodies = []
    for level in range(20):
        inner = "Neg" if level == 0 else f"F{level - 1}"
        domain = "" if level == 0 else "custom"
        steps = [node(inner, ["a" if i == 0 else f"t{i - 1}"], ["b" if i == 7 else f"t{i}"], domain=domain) for i in range(8)]
        bodies.append(local_function(f"F{level}", steps, ["a"], ["b"]))
    model = with_functions(make_model([node("F19", ["x"], ["y"], domain="custom")], {"x": (F, [])}, {"y": F}), *bodies)
    with pytest.raises(ImportModelError, match="more than .* nodes"):
        import_model(model)


# ---------------------------------------------------------------- the report


def test_everything_missing_is_reported_at_once(make_model):
    nodes = [
        node("Frobnicate", ["x"], ["a"], name="first"),
        node("Relu", ["a"], ["b"], name="after"),
        node("Gobble", ["x", "c"], ["d"], name="second"),
        node("Gelu", ["x"], ["e"], name="fine"),
    ]
    model = make_model(nodes, {"x": X, "c": ("bool", [2])}, {"b": F, "d": F, "e": F})
    statuses = {r.name: r.status for r in check_model(model)}
    assert statuses == {"first": "missing", "after": "unchecked", "second": "missing", "fine": "supported"}
    with pytest.raises(UnsupportedError) as caught:
        import_model(model)
    assert "first" in str(caught.value) and "second" in str(caught.value) and "after" not in str(caught.value)


def test_missing_inside_functions_and_branches(make_model):
    branch = helper.make_graph([node("Frobnicate", ["x"], ["o"], name="inner")], "b", [], [helper.make_tensor_value_info("o", 1, None)])
    model = make_model([node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=branch)], {"x": X, "c": ("bool", [])}, {"y": F})
    records = {r.name: r.status for r in check_model(model)}
    assert records["if"] == "unchecked" and "missing" in records.values()


@pytest.mark.parametrize("kind", ["sequence", "optional", "complex"])
def test_types_that_are_not_supported(make_model, kind):
    model = make_model([node("Identity", ["x"], ["y"])], {"x": X}, {"y": F})
    tensor = helper.make_tensor_type_proto(TensorProto.COMPLEX64, [2])
    makers = {"sequence": helper.make_sequence_type_proto, "optional": helper.make_optional_type_proto}
    model.graph.input[0].type.CopyFrom(makers[kind](tensor) if kind in makers else tensor)
    with pytest.raises(UnsupportedError, match="not supported"):
        import_model(model)


@pytest.mark.parametrize("operator", ["GatherElements", "ScatterElements"])
def test_an_index_for_each_element_has_the_rank_of_the_elements(make_model, operator):
    inputs = ["x", "i", *(["u"] if operator == "ScatterElements" else [])]
    constants = {"i": np.zeros((2, 1), np.int64), "u": np.ones((2, 1), np.float32)}
    model = make_model(
        [node(operator, inputs, ["y"], axis=-1)], {"x": (F, [5, 4, 1])}, {"y": F}, constants={n: constants[n] for n in inputs[1:]}
    )
    with pytest.raises(ImportModelError, match="indices of rank 2 for elements of rank 3"):
        import_model(model)
