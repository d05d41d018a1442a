"""Forms of operators that only old opsets have, and forms the backend suite leaves out, against NumPy."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from tcomp.errors import ImportModelError
from tcomp.frontends.onnx.importer import import_model
from tcomp.ir.expr import evaluate_int
from tcomp.ir.interpreters.graph import evaluate_graph

F = np.float32
X = np.arange(24, dtype=F).reshape(2, 3, 4)


def model(op, arrays, opset, shapes=None, constants=(), outputs=1, **attrs):
    """A model of one node; inputs numbered in `constants` are initializers."""
    names = [f"x{n}" if a is not None else "" for n, a in enumerate(arrays)]
    results = [f"y{n}" for n in range(outputs)]
    node = helper.make_node(op, names, results, **attrs)
    kinds = [None if a is None else helper.np_dtype_to_tensor_dtype(a.dtype) for a in arrays]
    inputs = [
        helper.make_tensor_value_info(n, k, (shapes or {}).get(n, a.shape))
        for i, (n, k, a) in enumerate(zip(names, kinds, arrays, strict=True))
        if a is not None and i not in constants
    ]
    initializers = [helper.make_tensor(names[i], kinds[i], arrays[i].shape, arrays[i].ravel()) for i in constants]
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info(r, TensorProto.UNDEFINED, None) for r in results], initializers
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run(op, *arrays, opset, constants=(), outputs=1, **attrs):
    graph = import_model(model(op, arrays, opset, constants=constants, outputs=outputs, **attrs))
    found = evaluate_graph(graph, {v.name: arrays[int(v.name[1:])] for v in graph.inputs})
    results = [found[v.name] for v in graph.outputs]
    return results[0] if outputs == 1 else results


@pytest.mark.parametrize(("op", "function"), [("Add", np.add), ("Mul", np.multiply), ("Greater", np.greater), ("Pow", np.power)])
def test_broadcasting_along_an_axis(op, function):
    y = np.arange(1, 4, dtype=F)
    np.testing.assert_array_equal(run(op, X, y, opset=6, broadcast=1, axis=1), function(X, y[:, None]))
    np.testing.assert_array_equal(run(op, X, X[0, 0] + 1, opset=6, broadcast=1), function(X, X[0, 0] + 1))


def test_slope_by_channel():
    slope = F([0.1, 0.2, 0.3])
    np.testing.assert_allclose(run("PRelu", -X, slope, opset=6), -X * slope[:, None])


@pytest.mark.parametrize("opset", [6, 9])
def test_clip_by_attributes(opset):
    np.testing.assert_array_equal(run("Clip", X, opset=opset, min=2.0, max=9.0), X.clip(2, 9))
    np.testing.assert_array_equal(run("Clip", X, opset=opset, max=9.0), X.clip(None, 9))


def test_clip_by_inputs_known_or_not():
    low = np.array(3, F)
    for constants in ((), (1,)):
        np.testing.assert_array_equal(run("Clip", X, low, None, opset=13, constants=constants), X.clip(3))


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, -1.5])
def test_constant_exponents(exponent):
    np.testing.assert_allclose(run("Pow", X + 1, np.array(exponent, F), opset=13, constants=(1,)), (X + 1) ** F(exponent), rtol=1e-6)


def test_softmax_of_flattened_axes():
    e = np.exp(X - X.max((1, 2), keepdims=True))
    np.testing.assert_allclose(run("Softmax", X, opset=11, axis=1), e / e.sum((1, 2), keepdims=True), rtol=1e-5)


def test_gemm_with_scalars_and_transposes():
    a, b, c = X[0], X[1][:, :3].copy(), F([1, 2, 3])
    expected = 0.5 * (a.T @ b) + 2 * c
    for opset, attrs in ((6, {"broadcast": 1}), (9, {}), (13, {})):
        np.testing.assert_allclose(run("Gemm", a, b, c, opset=opset, alpha=0.5, beta=2.0, transA=1, **attrs), expected)


def test_reshape_by_attribute_and_input():
    np.testing.assert_array_equal(run("Reshape", X, opset=1, shape=[0, -1]), X.reshape(2, 12))
    np.testing.assert_array_equal(run("Reshape", X, np.array([4, -1, 2]), opset=13, constants=(1,)), X.reshape(4, 3, 2))
    np.testing.assert_array_equal(run("Reshape", X, np.array([4, 6]), opset=13), X.reshape(4, 6))
    for wrong in ([5, -1], [-1, -1], [0, 0, 0, 0], [-2, 12], [4, 7]):
        with pytest.raises(ImportModelError):
            run("Reshape", X, np.array(wrong), opset=13, constants=(1,))


@pytest.mark.parametrize("opset", [1, 9, 13])
def test_slices(opset):
    for starts, ends, steps in (([1, -3], [3, 2**63 - 1], [1, 1]), ([-1, 9], [-(2**63), 0], [-1, -2]), ([2, 1], [1, 3], [1, 1])):
        expected = X[:, slice(starts[0], ends[0] if ends[0] > -(2**62) else None, steps[0]), :]
        expected = expected[..., slice(starts[1], ends[1] if ends[1] < 2**62 else None, steps[1])]
        if opset < 10:
            if steps == [1, 1]:
                np.testing.assert_array_equal(run("Slice", X, opset=opset, starts=starts, ends=ends, axes=[1, 2]), expected)
        else:
            given = [np.array(v) for v in (starts, ends, [1, -1], steps)]
            np.testing.assert_array_equal(run("Slice", X, *given, opset=opset, constants=(1, 2, 3, 4)), expected)


def test_slice_of_a_symbolic_axis():
    """x[:, -2:], x[:, :n] and x[:, 1::2] of an axis of unknown size n >= 1."""
    for start, end, step, wanted in ((-2, 2**62, 1, slice(-2, None)), (0, 2**62, 1, slice(None)), (1, 9, 2, slice(1, 9, 2))):
        arrays = [np.zeros((2, 5), F), np.array([start]), np.array([end]), np.array([1]), np.array([step])]
        graph = import_model(model("Slice", arrays, 13, {"x0": (2, "n")}, (1, 2, 3, 4)))
        for n in (1, 2, 5, 12):
            x = np.arange(2 * n, dtype=F).reshape(2, n)
            result = evaluate_graph(graph, {"x0": x})["y0"] if graph.outputs else None
            np.testing.assert_array_equal(result, x[:, wanted])
            (n_dim,) = graph.dims()
            assert evaluate_int(graph.outputs[0].shape[1], {n_dim: n}) == x[:, wanted].shape[1]


def test_split_by_attribute_and_evenly():
    for part, expected in zip(run("Split", X, opset=2, outputs=2, axis=2, split=[1, 3]), np.split(X, [1], 2), strict=True):
        np.testing.assert_array_equal(part, expected)
    for part, expected in zip(
        run("Split", X, opset=18, outputs=3, axis=2, num_outputs=3), (X[..., :2], X[..., 2:4], X[..., 4:]), strict=True
    ):
        np.testing.assert_array_equal(part, expected)
    with pytest.raises(ImportModelError, match="add up"):
        run("Split", X, opset=2, outputs=2, axis=2, split=[1, 2])


def test_squeeze_and_unsqueeze_by_attribute():
    x = X[:, None, :, :, None].copy()
    np.testing.assert_array_equal(run("Squeeze", x, opset=11, axes=[1, -1]), X)
    np.testing.assert_array_equal(run("Squeeze", x, opset=13), X)
    np.testing.assert_array_equal(run("Unsqueeze", X, opset=11, axes=[1, 4]), x)
    with pytest.raises(ImportModelError, match="cannot be squeezed"):
        run("Squeeze", X, opset=11, axes=[1])


def test_pad_by_attributes():
    np.testing.assert_array_equal(
        run("Pad", X[0], opset=2, pads=[1, 0, 0, 2], value=7.0), np.pad(X[0], ((1, 0), (0, 2)), constant_values=7)
    )
    np.testing.assert_array_equal(run("Pad", X[0], opset=2, pads=[1, 1, 1, 1], mode="reflect"), np.pad(X[0], 1, "reflect"))


def test_top_k_by_attribute():
    values, positions = run("TopK", X, opset=1, outputs=2, k=2, axis=1)
    np.testing.assert_array_equal(values, X[:, [2, 1]])
    np.testing.assert_array_equal(positions, np.broadcast_to([[[2], [1]]], (2, 2, 4)))


def test_tiles_along_one_axis():
    np.testing.assert_array_equal(run("Tile", X, np.array(2, F), np.array(1, F), opset=1, constants=(1, 2)), np.tile(X, (1, 2, 1)))
    with pytest.raises(ImportModelError, match="axis 0"):
        run("Tile", np.array(1, F), np.array(2, F), np.array(0, F), opset=1, constants=(1, 2))


def test_constant_gather_is_a_slice():
    """x[:, -1] costs no gather."""
    graph = import_model(model("Gather", [X, np.array(-1)], 13, constants=(1,), axis=1))
    assert "gather" not in {n.op.name for n in graph.nodes}
    np.testing.assert_array_equal(evaluate_graph(graph, {"x0": X})["y0"], X[:, -1])
    with pytest.raises(ImportModelError, match="index 3"):
        run("Gather", X, np.array(3), opset=13, constants=(1,), axis=1)


def test_known_conditions_compress():
    keep = np.array([True, False, True])
    np.testing.assert_array_equal(run("Compress", X, keep, opset=11, constants=(1,), axis=1), X[:, keep])
    np.testing.assert_array_equal(run("Compress", X, np.array([False, True]), opset=11, constants=(1,)), [1])
    np.testing.assert_array_equal(run("Compress", X, keep, opset=11, axis=1), X[:, keep])


def test_upsample_with_scales_as_attribute_or_input():
    x = X[None]
    np.testing.assert_array_equal(run("Upsample", x, opset=7, scales=[1.0, 1.0, 2.0, 3.0]), x.repeat(2, 2).repeat(3, 3))
    scales = F([1, 1, 2, 2])
    for op, opset in (("Upsample", 9), ("Resize", 10)):
        np.testing.assert_array_equal(run(op, x, scales, opset=opset, constants=(1,)), x.repeat(2, 2).repeat(2, 3))


@pytest.mark.parametrize("mode", ["asymmetric", "half_pixel"])
def test_symbolic_images_are_repeated(mode):
    """Resizing works for any size."""
    nearest = "floor" if mode == "asymmetric" else "round_prefer_floor"
    attrs = {"coordinate_transformation_mode": mode, "nearest_mode": nearest}
    arrays, shapes = [X[None], None, F([1, 1, 2, 2])], {"x0": (1, 2, "h", "w")}
    graph = import_model(model("Resize", arrays, 13, shapes, (2,), mode="nearest", **attrs))
    np.testing.assert_array_equal(evaluate_graph(graph, {"x0": X[None]})["y0"], X[None].repeat(2, 2).repeat(2, 3))
    free, fixed = (import_model(model("Resize", arrays, 13, s, (2,), mode="linear", **attrs)) for s in (shapes, {"x0": (1, *X.shape)}))
    found, wanted = (evaluate_graph(g, {"x0": X[None]})["y0"] for g in (free, fixed))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
