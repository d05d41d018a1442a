"""Attributes of windows, normalisation and quantisation across opsets, against direct NumPy computations."""

import itertools

import numpy as np
import pytest
from onnx import TensorProto, helper

from tcomp.errors import ImportModelError
from tcomp.frontends.onnx import import_model

F = "float32"
RNG = np.random.default_rng(4)
X = RNG.standard_normal((2, 4, 7, 6)).astype(np.float32)


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs, outputs, **attrs)


def single(make_model, run_model, op, arrays, outputs=("y",), opset=17, dims=None, dtypes=None, **attrs):
    """Outputs of one node; the first array is an input (of symbolic `dims`), the others are constants."""
    names = [f"i{n}" for n in range(len(arrays))]
    used = ["" if a is None else n for n, a in zip(names, arrays, strict=True)]
    given = {names[0]: (arrays[0].dtype.name, dims or arrays[0].shape)}
    constants = {n: a for n, a in zip(names[1:], arrays[1:], strict=True) if a is not None}
    types = dict(zip(outputs, dtypes or [arrays[0].dtype.name] * len(outputs), strict=True))
    model = make_model([node(op, used, list(outputs), **attrs)], given, types, opset=opset, constants=constants)
    got = run_model(model, {names[0]: arrays[0]})
    return got["y"] if len(outputs) == 1 else got


def windows(x, kernel, strides, dilations, pads, value, shape):
    """Every window of the padded input: (output index, [n, c, taps])."""
    reach = [(o - 1) * s + r * (k - 1) + 1 for o, s, k, r in zip(shape, strides, kernel, dilations, strict=True)]
    behind = [max(w - b - d, 0) for w, b, d in zip(reach, pads, x.shape[2:], strict=True)]
    full = np.pad(x, ((0, 0), (0, 0), *zip(pads, behind, strict=True)), constant_values=value)
    for p in itertools.product(*map(range, shape)):
        cut = tuple(slice(i * s, i * s + r * (k - 1) + 1, r) for i, s, k, r in zip(p, strides, kernel, dilations, strict=True))
        yield p, full[(slice(None), slice(None), *cut)]


def same_pads(x, kernel, strides, dilations, lower):
    shape = [-(-d // s) for d, s in zip(x.shape[2:], strides, strict=True)]
    totals = [
        max((o - 1) * s + r * (k - 1) + 1 - d, 0) for o, s, k, r, d in zip(shape, strides, kernel, dilations, x.shape[2:], strict=True)
    ]
    return shape, [-(-t // 2) if lower else t // 2 for t in totals]


@pytest.mark.parametrize("dims", [None, ["n", 4, "h", "w"]], ids=["static", "symbolic"])
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize(("kernel", "strides", "dilations"), [((3, 3), (1, 1), (1, 1)), ((3, 2), (2, 3), (1, 1)), ((2, 3), (2, 1), (2, 1))])
def test_convolution_with_automatic_padding(make_model, run_model, auto_pad, kernel, strides, dilations, dims):
    w = RNG.standard_normal((6, 2, *kernel)).astype(np.float32)
    y = single(make_model, run_model, "Conv", [X, w], dims=dims, group=2, auto_pad=auto_pad, strides=strides, dilations=dilations)
    if auto_pad == "VALID":
        shape, pads = [(d - r * (k - 1) - 1) // s + 1 for d, k, s, r in zip(X.shape[2:], kernel, strides, dilations, strict=True)], [0, 0]
    else:
        shape, pads = same_pads(X, kernel, strides, dilations, auto_pad == "SAME_LOWER")
    assert list(y.shape) == [2, 6, *shape]
    for p, window in windows(X, kernel, strides, dilations, pads, 0, shape):
        for group in (0, 1):
            part = window[:, group * 2 : group * 2 + 2].reshape(2, -1) @ w[group * 3 : group * 3 + 3].reshape(3, -1).T
            np.testing.assert_allclose(y[(slice(None), slice(group * 3, group * 3 + 3), *p)], part, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dims", [None, ["n", 4, "h", "w"]], ids=["static", "symbolic"])
@pytest.mark.parametrize("count_include_pad", [0, 1])
@pytest.mark.parametrize(
    ("kernel", "strides", "pads"), [((3, 3), (2, 2), (1, 1, 1, 1)), ((2, 3), (3, 2), (0, 2, 1, 0)), ((2, 2), (2, 2), (0, 0, 0, 0))]
)
def test_pooling_that_rounds_up(make_model, run_model, kernel, strides, pads, count_include_pad, dims):
    attrs = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": 1}
    ends = list(zip(X.shape[2:], kernel, strides, pads[:2], pads[2:], strict=True))
    shape = [min(-(-(d + b + a - k) // s) + 1, -(-(d + b) // s)) for d, k, s, b, a in ends]
    largest = single(make_model, run_model, "MaxPool", [X], dims=dims, **attrs)
    mean = single(make_model, run_model, "AveragePool", [X], dims=dims, count_include_pad=count_include_pad, **attrs)
    assert list(largest.shape[2:]) == list(mean.shape[2:]) == shape
    ones = np.ones_like(X)
    inside = np.pad(ones, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))) * 0 + 1 if count_include_pad else ones
    before = (0, 0) if count_include_pad else pads[:2]
    counts = {p: w.sum((2, 3)) for p, w in windows(inside, kernel, strides, (1, 1), before, 0, shape)}
    for p, window in windows(X, kernel, strides, (1, 1), pads[:2], -np.inf, shape):
        np.testing.assert_array_equal(largest[(slice(None), slice(None), *p)], window.max((2, 3)))
        total = np.where(np.isfinite(window), window, 0).sum((2, 3))
        np.testing.assert_allclose(mean[(slice(None), slice(None), *p)], total / counts[p], rtol=1e-4, atol=1e-5)


def test_max_pooling_of_integers_pads_with_the_smallest(make_model, run_model):
    x = np.full((1, 1, 3, 3), -100, np.int8)
    y = single(make_model, run_model, "MaxPool", [x], kernel_shape=[2, 2], pads=[1, 1, 1, 1])
    np.testing.assert_array_equal(y, np.full((1, 1, 4, 4), -100))


def test_indices_of_padded_maxima_unpool(make_model, run_model):
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 0, 0, 0]}
    got = single(make_model, run_model, "MaxPool", [X], outputs=("y", "at"), dtypes=[F, "int64"], **attrs)
    flat = X.reshape(-1)
    np.testing.assert_array_equal(flat[got["at"]], got["y"])
    back = single(make_model, run_model, "MaxUnpool", [got["y"], got["at"]], **attrs)
    assert back.shape == X.shape
    np.testing.assert_array_equal(back.reshape(-1)[got["at"]], got["y"])
    assert (back != 0).sum() == got["y"].size


@pytest.mark.parametrize(
    ("attrs", "shape"),
    [
        ({"strides": [2, 3]}, (15, 18)), ({"strides": [2, 2], "pads": [1, 1, 1, 1]}, (13, 11)),
        ({"strides": [2, 2], "output_padding": [1, 0]}, (16, 13)), ({"strides": [2, 2], "auto_pad": "SAME_UPPER"}, (14, 12)),
        ({"strides": [2, 2], "output_shape": [14, 14]}, (14, 14)), ({"dilations": [2, 1]}, (11, 8)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dims", [None, ["n", 4, "h", "w"]], ids=["static", "symbolic"])
def test_shapes_of_transposed_convolution(make_model, run_model, attrs, shape, dims):
    w = RNG.standard_normal((4, 2, 3, 3)).astype(np.float32)
    y = single(make_model, run_model, "ConvTranspose", [X, w], dims=dims, **attrs)
    assert y.shape == (2, 2, *shape)
    if "pads" not in attrs and "auto_pad" not in attrs and "output_shape" not in attrs:
        np.testing.assert_allclose(y[:, :, 0, 0], X[:, :, 0, 0] @ w[:, :, 0, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [6, 7, 9, 15, 21])
def test_batch_normalization_across_opsets(make_model, run_model, opset):
    scale, bias, mean, variance = RNG.standard_normal((3, 4)).astype(np.float32).tolist() + [[0.5, 1, 2, 4]]
    parameters = [np.array(v, np.float32) for v in (scale, bias, mean, variance)]
    attrs = {"is_test": 1} if opset == 6 else {}
    y = single(make_model, run_model, "BatchNormalization", [X, *parameters], opset=opset, epsilon=1e-3, **attrs)
    s, b, m, v = (p[:, None, None] for p in parameters)
    np.testing.assert_allclose(y, (X - m) / np.sqrt(v + 1e-3) * s + b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [1, 6, 7, 10, 13])
def test_dropout_is_the_identity(make_model, run_model, opset):
    attrs = {"is_test": 1} if opset < 7 else {}
    assert single(make_model, run_model, "Dropout", [X], opset=opset, **attrs) is not None
    dtype = "bool" if opset >= 10 else F
    got = single(make_model, run_model, "Dropout", [X], outputs=("y", "mask"), dtypes=[F, dtype], opset=opset, **attrs)
    np.testing.assert_array_equal(got["y"], X)
    assert got["mask"].all()


@pytest.mark.parametrize("p", [-1, 0, 3])
def test_lp_normalization_by_another_norm_is_refused(make_model, p):
    model = make_model([node("LpNormalization", ["x"], ["y"], p=p)], {"x": (F, [2, 3])}, {"y": F})
    with pytest.raises(ImportModelError, match=f"attribute `p` is {p}"):
        import_model(model)


def test_quantised_convolution_pads_with_the_zero_point(make_model, run_model):
    x = RNG.integers(0, 255, (1, 2, 5, 5)).astype(np.uint8)
    w = RNG.integers(-127, 127, (3, 2, 3, 3)).astype(np.int8)
    xs, ws, ys = np.float32(0.02), np.array([0.01, 0.02, 0.03], np.float32), np.float32(0.1)
    xz, wz, yz = np.uint8(128), np.zeros(3, np.int8), np.uint8(100)
    bias = np.array([10, -20, 30], np.int32)
    y = single(make_model, run_model, "QLinearConv", [x, xs, xz, w, ws, wz, ys, yz, bias], pads=[1, 1, 1, 1])
    shifted = np.pad(x.astype(np.int64) - 128, ((0, 0), (0, 0), (1, 1), (1, 1)))
    for i, j in itertools.product(range(5), range(5)):
        total = shifted[0, :, i : i + 3, j : j + 3].reshape(-1) @ w.reshape(3, -1).astype(np.int64).T + bias
        expected = np.clip(np.rint(total * (np.float32(xs) * ws / ys)) + 100, 0, 255)
        assert np.abs(y[0, :, i, j].astype(int) - expected).max() <= 1  # a tie of rounding may fall either way


def test_quantised_products(make_model, run_model):
    a = RNG.integers(0, 255, (2, 3, 4)).astype(np.uint8)
    b = RNG.integers(-127, 127, (4, 5)).astype(np.int8)
    az, bz = np.uint8(7), np.array([1, 2, 3, 4, 5], np.int8)
    y = single(make_model, run_model, "MatMulInteger", [a, b, az, bz], dtypes=["int32"])
    np.testing.assert_array_equal(y, (a.astype(np.int32) - 7) @ (b.astype(np.int32) - bz.astype(np.int32)))


def test_constants_of_every_kind(make_model, run_model):
    tensor = helper.make_tensor("t", TensorProto.FLOAT, [2], [1.0, 2.0])
    sparse = helper.make_sparse_tensor(helper.make_tensor("v", TensorProto.FLOAT, [2], [3.0, 4.0]), helper.make_tensor("i", TensorProto.INT64, [2], [1, 3]), [2, 2])  # fmt: skip
    cases = {
        "value": (tensor, [1, 2]), "value_float": (1.5, 1.5), "value_floats": ([1.5, 2.5], [1.5, 2.5]), "value_int": (3, 3),
        "value_ints": ([3, 4], [3, 4]), "sparse_value": (sparse, [[0, 3], [0, 4]]),
    }  # fmt: skip
    for name, (value, expected) in cases.items():
        dtype = "int64" if "int" in name else F
        model = make_model([node("Constant", [], ["y"], **{name: value})], {}, {"y": dtype})
        np.testing.assert_array_equal(run_model(model, {})["y"], expected)
    with pytest.raises(ImportModelError, match="another element type than the string"):
        import_model(make_model([node("Constant", [], ["y"], value_string="text")], {}, {"y": F}))


@pytest.mark.parametrize(("start", "end"), [(None, None), (1, None), (-2, None), (0, -1), (3, 1), (-9, 9)])
def test_shape_of_a_part(make_model, run_model, start, end):
    attrs = {k: v for k, v in (("start", start), ("end", end)) if v is not None}
    y = single(make_model, run_model, "Shape", [X], dims=["n", 4, "h", 6], dtypes=["int64"], **attrs)
    np.testing.assert_array_equal(y, X.shape[slice(start, end)])
