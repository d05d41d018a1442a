"""Quantised contractions: what becomes products of bytes, what stays, and that integers stay as they are."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.frontends.onnx import import_model
from tcomp.ir.graph import KERNEL
from tcomp.options import CompileOptions, Report
from tcomp.passes.quantized import use_bytes
from tcomp.passes.runner import run_passes
from tcomp.pipeline import compile_model, graph_passes
from tcomp.target import CpuTarget, Target

RNG = np.random.default_rng(3)
VNNI, PLAIN = CpuTarget.parse("cpu -mcpu=cascadelake"), CpuTarget.parse("cpu -mcpu=haswell")


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order():
    RNG.bit_generator.state = np.random.default_rng(3).bit_generator.state


def integers(dtype, *shape):
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def model(nodes, inputs, output, constants, opset=21):
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()]
    result = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(output)), None)
    held = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    return helper.make_model(
        helper.make_graph(nodes, "g", infos, [result], held), opset_imports=[helper.make_opsetid("", opset)], ir_version=10
    )


def products(proto, target=VNNI):
    """The (activation, weight) types of the contractions of a model after all passes."""
    graph, _ = run_passes(import_model(proto), graph_passes(CompileOptions(target), Report()), verify=True)
    inside = [n for node in graph.nodes if node.op is KERNEL for n in node.bodies[0].nodes]
    return [tuple(v.dtype for v in n.inputs) for n in inside if n.op.name in ("conv", "matmul")]


def exactly(proto, inputs, expected=None):
    """Native code computes the integers of the ONNX reference, with instructions for bytes and for integers of 16 bits."""
    if expected is None:
        (expected,) = ReferenceEvaluator(proto).run(None, inputs)
    for target in (None, PLAIN):
        if target is None or target.runs_on(Target.host()):
            artifact, _ = compile_model(proto, CompileOptions(target))
            found = tcomp.Module.load(artifact, threads=2).run(inputs)["y"]
            np.testing.assert_array_equal(found, expected)


BYTES = ("uint8", "int8")


@pytest.mark.parametrize("a", BYTES)
@pytest.mark.parametrize("b", BYTES)
@pytest.mark.parametrize("m, k, n", [(1, 64, 40), (7, 37, 33), (70, 128, 100), (13, 8, 16)])
def test_matmul_integer_is_exact(a, b, m, k, n):
    point = {"int8": 0, "uint8": 128}[b]  # such that weights are signed bytes
    x, w = integers(a, 2, m, k), integers(b, k, n)
    constants = {"w": w, "zw": np.array(point, b), "zx": np.array(11, a)}
    proto = model([helper.make_node("MatMulInteger", ["x", "w", "zx", "zw"], ["y"])], {"x": x}, "int32", constants)
    assert products(proto) == [("uint8", "int8")]
    exactly(proto, {"x": x})


def test_zero_points_that_are_computed():
    x, w = integers("int8", 5, 24), integers("int8", 24, 48)
    zero = np.array(-7, np.int8)
    proto = model([helper.make_node("MatMulInteger", ["x", "w", "z"], ["y"])], {"x": x, "z": zero}, "int32", {"w": w})
    assert products(proto) == [("uint8", "int8")]
    exactly(proto, {"x": x, "z": zero})


@pytest.mark.parametrize(
    "w, zw, zx",
    [
        (integers("uint8", 24, 16), np.array(3, np.uint8), None),  # 9 bits
        (integers("int8", 24, 16), integers("int8", 16), None),
        (integers("int8", 24, 16), None, integers("uint8", 5)),  # a zero point for each row
    ],
    ids=("9bits", "9bits_columns", "rows"),
)
def test_what_does_not_fit_into_bytes_is_exact_as_well(w, zw, zx):
    x = integers("uint8", 5, 24)
    constants = {"w": w} | {k: v for k, v in (("zw", zw), ("zx", zx)) if v is not None}
    names = ["x", "w", "zx" if zx is not None else "", "zw" if zw is not None else ""]
    proto = model([helper.make_node("MatMulInteger", names, ["y"])], {"x": x}, "int32", constants)
    assert products(proto) == [("int32", "int32")]
    rows, columns = 0 if zx is None else zx.astype(np.int32)[:, None], 0 if zw is None else zw.astype(np.int32)
    exactly(proto, {"x": x}, (x.astype(np.int32) - rows) @ (w.astype(np.int32) - columns))


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize(
    "shape, weights, attrs",
    [
        ((1, 3, 15, 17), (32, 3, 7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
        ((2, 16, 9, 9), (24, 16, 3, 3), {"pads": [1, 0, 1, 2]}),
        ((1, 64, 7, 7), (48, 64, 1, 1), {}),
        ((1, 16, 8, 8), (32, 8, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
        ((1, 16, 8, 8), (16, 1, 3, 3), {"group": 16, "pads": [1, 1, 1, 1]}),
        ((1, 8, 40), (20, 8, 5), {"dilations": [2]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", (0, 5))
def test_qlinear_conv_is_exact(dtype, shape, weights, attrs, zero):
    """Scales are powers of two: the only rounding is that to integers."""
    x, w = integers(dtype, *shape), integers("int8", *weights)
    bias = RNG.integers(-9999, 9999, weights[0], np.int32)
    constants = {
        "w": w, "sx": np.float32(0.5), "zx": np.array(zero + (-128 if dtype == "int8" else 0), dtype), "sw": np.exp2(RNG.integers(-12, -8, weights[0])).astype(np.float32),
        "zw": np.zeros(weights[0], np.int8), "sy": np.float32(0.25), "zy": np.array(3, dtype), "bias": bias,
    }  # fmt: skip
    names = ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy", "bias"]
    proto = model([helper.make_node("QLinearConv", names, ["y"], **attrs)], {"x": x}, dtype, constants)
    assert products(proto) == [("uint8", "int8")]
    numbers = {"x": x - constants["zx"].astype(np.float64), "w": w.astype(np.float64), "b": bias.astype(np.float64)}
    plain = model(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], **attrs)], {"x": numbers["x"]}, "float64", {k: numbers[k] for k in "wb"}
    )
    (sums,) = ReferenceEvaluator(plain).run(None, {"x": numbers["x"]})
    factor = 0.5 * constants["sw"].astype(np.float64) / 0.25
    limits = np.iinfo(dtype)
    expected = np.clip(np.rint(sums * factor.reshape(-1, *[1] * (x.ndim - 2))) + 3, limits.min, limits.max).astype(dtype)
    assert len(np.unique(expected)) > 60
    exactly(proto, {"x": x}, expected)


@pytest.mark.parametrize("dtype", BYTES)
def test_dequantized_operands_per_channel(dtype):
    """conv -> relu -> quantize -> pool -> residual -> quantize -> gemm, all between dequantize and quantize."""
    zero = np.array({"uint8": 117, "int8": -11}[dtype], dtype)
    low = np.array(np.iinfo(dtype).min, dtype)
    constants = {
        "s": np.float32(0.03), "z": zero, "low": low, "w1": integers("int8", 32, 3, 3, 3), "s1": RNG.uniform(0.001, 0.003, 32).astype(np.float32),
        "w2": integers("int8", 32, 32, 1, 1), "s2": np.float32(0.002), "b1": RNG.normal(size=32).astype(np.float32), "w3": integers("int8", 10, 32 * 16),
        "s3": RNG.uniform(0.001, 0.003, 10).astype(np.float32), "shape": np.array([1, -1], np.int64), "z10": np.zeros(10, np.int8),
    }  # fmt: skip
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q0"]), node("DequantizeLinear", ["q0", "s", "z"], ["d0"]),
        node("DequantizeLinear", ["w1", "s1"], ["dw1"], axis=0), node("Conv", ["d0", "dw1", "b1"], ["c1"], pads=[1, 1, 1, 1]), node("Relu", ["c1"], ["r1"]),
        node("QuantizeLinear", ["r1", "s", "low"], ["q1"]), node("DequantizeLinear", ["q1", "s", "low"], ["d1"]),
        node("MaxPool", ["d1"], ["p1"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("QuantizeLinear", ["p1", "s", "low"], ["q2"]), node("DequantizeLinear", ["q2", "s", "low"], ["d2"]),
        node("DequantizeLinear", ["w2", "s2"], ["dw2"]), node("Conv", ["d2", "dw2"], ["c2"]),
        node("QuantizeLinear", ["c2", "s", "z"], ["q3"]), node("DequantizeLinear", ["q3", "s", "z"], ["d3"]), node("Add", ["d2", "d3"], ["a"]),
        node("QuantizeLinear", ["a", "s", "z"], ["q4"]), node("DequantizeLinear", ["q4", "s", "z"], ["d4"]), node("Reshape", ["d4", "shape"], ["f"]),
        node("QuantizeLinear", ["f", "s", "z"], ["q5"]), node("DequantizeLinear", ["q5", "s", "z"], ["d5"]),
        node("DequantizeLinear", ["w3", "s3", "z10"], ["dw3"], axis=0), node("Gemm", ["d5", "dw3"], ["g"], transB=1), node("QuantizeLinear", ["g", "s", "z"], ["y"]),
    ]  # fmt: skip
    x = RNG.normal(size=(1, 3, 8, 8)).astype(np.float32)
    proto = model(nodes, {"x": x}, dtype, constants)
    assert products(proto) == [("uint8", "int8")] * 3 and products(proto, PLAIN) == [("int16", "int8")] * 3
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    for target in (None, PLAIN):
        artifact, report = compile_model(proto, CompileOptions(target, emit=("graph",)))
        found = tcomp.Module.load(artifact).run({"x": x})["y"]
        assert np.abs(found.astype(int) - expected).max() <= 1
    text = report.stages["graph"]
    assert "float32[1, 32" not in "".join(line for line in text.splitlines() if "= kernel(" in line)  # bytes go through memory


def test_dynamic_quantization():
    x, w = RNG.normal(size=(9, 64)).astype(np.float32), integers("int8", 64, 80)
    node = helper.make_node
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("Mul", ["s", "sw"], ["scale"]),
        node("MatMulInteger", ["q", "w", "z"], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["f", "scale"], ["y"]),
    ]
    proto = model(nodes, {"x": x}, "float32", {"w": w, "sw": np.float32(0.01)})
    assert products(proto) == [("uint8", "int8")]
    graph, _ = run_passes(import_model(proto), graph_passes(CompileOptions(VNNI), Report()))
    assert graph.nodes[-1].bodies[0].name == "matmul_add_cast_mul"  # zero point and scale are applied to the register tile
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    found = tcomp.compile(proto).run({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale", [0.5, 0.0, -1.0, 1e38])
def test_only_scales_that_keep_the_order_are_looked_through(scale):
    x = integers("uint8", 1, 2, 4, 4)
    node = helper.make_node
    nodes = [
        node("DequantizeLinear", ["x", "s"], ["d"]),
        node("MaxPool", ["d"], ["p"], kernel_shape=[2, 2]),
        node("QuantizeLinear", ["p", "s", "z"], ["y"]),
    ]
    graph = use_bytes(import_model(model(nodes, {"x": x}, "uint8", {"s": np.float32(scale), "z": np.uint8(0)})))
    assert [n.op.name for n in graph.nodes] == (["max_pool"] if scale == 0.5 else ["dequantize", "max_pool", "quantize"])


def test_a_symbolic_number_of_rows():
    w = integers("int8", 32, 48)
    proto = model([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], {"x": integers("uint8", 5, 32)}, "int32", {"w": w})
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    module = tcomp.compile(proto)
    for rows in (1, 5, 14, 31, 32, 55, 100):
        x = integers("uint8", rows, 32)
        np.testing.assert_array_equal(module.run({"x": x})["y"], x.astype(np.int32) @ w.astype(np.int32))


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("zero", (0, 3))
def test_a_zero_point_of_0_is_not_added(dtype, zero):
    x = np.array([-300, -0.6, -0.5, -0.4, -0.0, 0.4, 0.5, 1.5, 2.5, 127.5, 300], np.float32)
    proto = model(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])], {"x": x}, dtype, {"s": np.float32(1), "z": np.array(zero, dtype)}
    )
    if dtype == "uint8":
        (node,) = use_bytes(import_model(proto)).nodes
        assert (node.inputs[2] is None) == (zero == 0)
    exactly(proto, {"x": x})


def test_float_graphs_stay_as_they_are():
    x = RNG.normal(size=(2, 3)).astype(np.float32)
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": x}, "float32", {"w": RNG.normal(size=(3, 4)).astype(np.float32)})
    graph = import_model(proto)
    assert str(use_bytes(graph)) == str(graph)
