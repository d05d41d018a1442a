"""Graphs with symbolic sizes that random ones (`tests.fuzz_graphs`) have shown to be compiled wrongly, or not at all."""

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.errors import ImportModelError, InputError, UnsupportedError
from tcomp.frontends.onnx import import_model

RNG = np.random.default_rng(0)


def model(nodes, inputs, outputs, **constants):
    """`inputs`: dtype and shape by name."""
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(t)), shape) for n, (t, shape) in inputs.items()]
    results = [helper.make_tensor_value_info(n, 0, None) for n in outputs]
    held = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph([helper.make_node(*n[:3], **(n[3] if len(n) > 3 else {})) for n in nodes], "g", infos, results, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def agrees(proto, inputs, rtol=1e-5):
    expected = ReferenceEvaluator(proto).run(None, inputs)
    for got, wanted in zip(tcomp.compile(proto, threads=1).run(inputs).values(), expected, strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol)


def test_a_constant_that_a_node_reads_twice():
    """Its product with itself was taken for a formula of sizes, and an element that was 1.05 for the size 1."""
    agrees(model([("Mul", ["c", "c"], ["m"]), ("Selu", ["m"], ["y"])], {}, ["y"], c=np.array([1.75, -3.25, 1, 4], np.float32)), {})


def test_squeezed_sizes_that_may_be_one():
    """Without axes, the rank of the result depends on them: runs in which one is 1 are refused, instead of keeping that axis."""
    module = tcomp.compile(model([("Squeeze", ["x"], ["y"])], {"x": ("float32", ["n", 1, "h", 4])}, ["y"]), threads=1)
    assert module.run({"x": np.ones((2, 1, 3, 4), np.float32)})["y"].shape == (2, 3, 4)
    for shape, dim in (((1, 1, 3, 4), "n"), ((2, 1, 1, 4), "h")):
        with pytest.raises(InputError, match=f"{dim} != 1 does not hold, in node"):
            module.run({"x": np.ones(shape, np.float32)})


@pytest.mark.parametrize("shape, node", [
    ((3, "n", 1), ("Softmax", ["x"], ["y"], {"axis": 1})),
    ((1, 4, "n", 5), ("InstanceNormalization", ["x", "one", "one"], ["y"])),
])  # fmt: skip
def test_rows_of_symbolic_length_that_several_passes_read(shape, node):
    """What is stored of such a row has no constant size; it was stored where the last axis was short."""
    proto = model(
        [("Softsign", ["x"], ["s"]), (node[0], ["s", *node[1][1:]], *node[2:])],
        {"x": ("float32", shape)},
        ["y"],
        one=np.ones(4, np.float32),
    )
    for n in (1, 7, 70):
        agrees(proto, {"x": RNG.standard_normal([n if d == "n" else d for d in shape]).astype(np.float32)})


def test_remainders_of_half_floats():
    """LLVM joined two roundings into one by a function that no artifact has."""
    proto = model(
        [("Mod", ["x", "c"], ["y"], {"fmod": 1})], {"x": ("float16", (5, 2, 33))}, ["y"], c=np.array([[3.5], [-2.25]], np.float16)
    )
    agrees(proto, {"x": (RNG.standard_normal((5, 2, 33)) * 9).round(1).astype(np.float16)})


@pytest.mark.parametrize("op, gates", [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_weights_of_recurrent_operators_have_the_sizes_that_attributes_say(op, gates):
    inputs = {
        "x": ("float32", ["t", 2, "i"]),
        "w": ("float32", ["d", "g", 3]),
        "r": ("float32", ["d", "g", "h"]),
        "h": ("float32", ["e", 2, "k"]),
    }
    node = (op, ["x", "w", "r", "", "", "h"], ["y"], {"hidden_size": 4, "direction": "bidirectional"})
    module = tcomp.compile(model([node], inputs, ["y"]), threads=1)
    arrays = {
        n: RNG.standard_normal(s).astype(np.float32)
        for n, s in {"x": (5, 2, 3), "w": (2, gates * 4, 3), "r": (2, gates * 4, 4), "h": (2, 2, 4)}.items()
    }
    assert module.run(arrays)["y"].shape == (5, 2, 2, 4)
    with pytest.raises(InputError):  # one direction
        module.run(arrays | {"h": arrays["h"][:1]})
    with pytest.raises(ImportModelError, match="input 5 is %h"):
        tcomp.compile(model([node], inputs | {"h": ("float32", [1, 2, 4])}, ["y"]))


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_windows_have_the_sizes_that_kernel_shape_says(op):
    proto = model(
        [(op, ["x", "w"], ["y"], {"kernel_shape": [3, 2]})], {"x": ("float32", ["n", 3, 8, 8]), "w": ("float32", [3, 3, "k", "l"])}, ["y"]
    )
    agrees(
        proto, {"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32), "w": RNG.standard_normal((3, 3, 3, 2)).astype(np.float32)}, 1e-4
    )


@pytest.mark.parametrize("op, weights, attrs", [
    ("Conv", ["o", "c", "k", "l"], {"pads": [1, 0, 1, 0]}),
    ("Conv", ["o", "c", "k", "l"], {"auto_pad": "SAME_UPPER"}),
    ("ConvTranspose", ["c", "o", "k", "l"], {"strides": [2, 1]}),
])  # fmt: skip
def test_channels_and_windows_of_convolutions_are_free(op, weights, attrs):
    proto = model([(op, ["x", "w"], ["y"], attrs)], {"x": ("float32", ["n", "c", "h", 7]), "w": ("float32", weights)}, ["y"])
    module = tcomp.compile(proto, threads=1)
    for n, c, o, h, k, ell in ((1, 1, 3, 6, 3, 2), (2, 5, 2, 9, 1, 1)):
        w = (o, c, k, ell) if op == "Conv" else (c, o, k, ell)
        given = {"x": RNG.standard_normal((n, c, h, 7)).astype(np.float32), "w": RNG.standard_normal(w).astype(np.float32)}
        (wanted,) = ReferenceEvaluator(proto).run(None, given)
        np.testing.assert_allclose(module.run(given)["y"], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("node, weights", [
    (("Conv", ["x", "w"], ["y"], {"group": 2}), ["o", 2, 3]),
    (("GroupNormalization", ["x", "w", "w"], ["y"], {"num_groups": 2}), ["o"]),
])  # fmt: skip
def test_free_channels_divide_into_groups(node, weights):
    channels = 4 if node[0] == "Conv" else "o"
    proto = model([node], {"x": ("float32", ["n", channels, 8]), "w": ("float32", weights)}, ["y"])
    module = tcomp.compile(proto, threads=1)
    given = {"x": RNG.standard_normal((2, 4, 8)).astype(np.float32), "w": RNG.standard_normal([4, *weights[1:]]).astype(np.float32)}
    (wanted,) = ReferenceEvaluator(proto).run(None, given)
    np.testing.assert_allclose(module.run(given)["y"], wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError):
        odd = {"w": np.ones([3, *weights[1:]], np.float32)} | ({"x": np.ones((2, 3, 8), np.float32)} if channels == "o" else {})
        module.run(given | odd)


def test_the_range_of_zeros():
    """Their scale was 0, by which others then divide; ONNX's reference has a range of 1."""
    agrees(
        model([("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])], {"x": ("float32", ["n"])}, ["y", "s", "z"]),
        {"x": np.zeros(5, np.float32)},
    )


def test_what_is_left_of_a_shape_with_a_size_that_may_be_nothing():
    """Of wav2vec 2.0, as PyTorch exports it: windows are max(0, n // 10 - 1), the shape says n // 10 - 1. They were taken for 0, as 4 was not
    seen to be what is left."""
    nodes = [
        ("Slice", ["x", "start", "end", "zero", "steps"], ["rows"]),
        ("Shape", ["x"], ["size"], {"end": 1}),
        ("Div", ["size", "steps"], ["tens"]),
        ("Sub", ["tens", "one"], ["count"]),
        ("Concat", ["count", "minus", "eight"], ["shape"], {"axis": 0}),
        ("Reshape", ["rows", "shape"], ["y"], {"allowzero": 1}),
    ]
    numbers = {"start": [19], "end": [1 << 40], "steps": [10], "zero": [0], "one": [1], "minus": [-1], "eight": [8]}
    proto = model(nodes, {"x": ("float32", ["n", 32])}, ["y"], **{n: np.array(v, np.int64) for n, v in numbers.items()})
    for n in (40, 57):
        agrees(proto, {"x": RNG.standard_normal((n, 32)).astype(np.float32)})


def test_index_tuples_of_free_length():
    """A vector has indices of one axis; where there are more, the length decides the rank of the result."""
    vector, matrix = (
        model([("GatherND", ["x", "at"], ["y"])], {"x": ("float32", shape), "at": ("int64", ["m", "k"])}, ["y"])
        for shape in (["n"], ["n", 3])
    )
    graph = import_model(vector)
    assert [str(d) for d in graph.inputs[1].shape] == ["m", "1"] and [str(d) for d in graph.outputs[0].shape] == ["m"]
    with pytest.raises(UnsupportedError, match="the rank of its result depends on k"):
        import_model(matrix)
    assert len(import_model(matrix, dims={"k": 2}).outputs[0].shape) == 1


def test_a_window_larger_than_a_version():
    """For rows of one element a version was wanted, in which a window of 3 has n - 2 = -1 results."""
    nodes = [
        ("LpPool", ["x"], ["p"], {"kernel_shape": [1, 3], "strides": [2, 1], "p": 2}),
        ("ReduceMax", ["p", "axes"], ["y"], {"keepdims": 1}),
    ]
    proto = model(nodes, {"x": ("float32", [2, "n", "m", "n"])}, ["y"], axes=np.array([2, 0]))
    for n, m in ((3, 1), (5, 4)):
        agrees(proto, {"x": RNG.standard_normal((2, n, m, n)).astype(np.float32)})
    with pytest.raises(InputError):
        tcomp.compile(proto, threads=1).run({"x": np.ones((2, 1, 3, 1), np.float32)})


def test_as_many_of_a_free_axis():
    """That two of n elements were read was taken for n = 2."""
    proto = model([("TopK", ["x", "k"], ["y", "i"], {"axis": -2})], {"x": ("float32", [2, "n", "m"])}, ["y", "i"], k=np.array([2]))
    for n, m in ((2, 3), (7, 1)):
        agrees(proto, {"x": RNG.standard_normal((2, n, m)).astype(np.float32)})


def test_an_axis_named_twice():
    """As ONNX Runtime takes it; onnx's reference refuses it."""
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    proto = model([("ReduceMax", ["x", "axes"], ["y"], {"keepdims": 0})], {"x": ("float32", [2, "n", 4])}, ["y"], axes=np.array([1, -2]))
    np.testing.assert_array_equal(tcomp.compile(proto, threads=1).run({"x": x})["y"], x.max(1))


def test_a_size_by_two_formulas():
    """That m and h // 2 are equal is checked by the run; of n elements, m were taken for a slice."""
    nodes = [("Resize", ["x", "", "scales"], ["r"], {"mode": "nearest"}), ("Where", ["c", "r", "z"], ["y"])]
    inputs = {"x": ("float32", [1, 5, "h"]), "c": ("bool", [1, 1, "n"]), "z": ("float32", [1, 5, "m"])}
    proto = model(nodes, inputs, ["y"], scales=np.array([1, 1, 0.5], np.float32))
    values = {"x": RNG.standard_normal((1, 5, 6)).astype(np.float32), "c": np.array([[[True, False, True]]])}
    agrees(proto, values | {"z": np.zeros((1, 5, 3), np.float32)})
    with pytest.raises(InputError):
        tcomp.compile(proto, threads=1).run(values | {"z": np.zeros((1, 5, 2), np.float32)})


def test_every_second_element_of_none():
    """Steps of two reach over -1 elements where there is none."""
    nodes = [("Relu", ["x"], ["r"]), ("Unsqueeze", ["r", "one"], ["u"]), ("Slice", ["u", "starts", "ends", "axes", "steps"], ["y"])]
    slices = {"starts": [3, 3, 0], "ends": [2, 0, 9], "axes": [0, 1, 2], "steps": [2, 2, 2], "one": [1]}
    proto = model(nodes, {"x": ("float32", [4, 5])}, ["y"], **{name: np.array(n) for name, n in slices.items()})
    agrees(proto, {"x": RNG.standard_normal((4, 5)).astype(np.float32)})
