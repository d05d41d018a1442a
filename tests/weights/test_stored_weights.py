"""Weights stored in few bits: which products keep them, and that numbers are those of the model."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.frontends.onnx import import_model
from tcomp.ir.graph import KERNEL
from tcomp.options import CompileOptions, Report
from tcomp.passes.runner import run_passes
from tcomp.pipeline import graph_passes
from tcomp.target import CpuTarget

RNG = np.random.default_rng(5)
VNNI, PLAIN = CpuTarget.parse("cpu -mcpu=icelake-server"), CpuTarget.parse("cpu -mcpu=x86-64-v2")


def operators(proto, target):
    """The operators of a model after all passes, with the types of the constants that they read."""
    graph, _ = run_passes(import_model(proto), graph_passes(CompileOptions(target), Report()), verify=True)
    kernels = [n for n in graph.nodes if n.op is KERNEL]
    types = {v.dtype for n in kernels for v in n.inputs if v in graph.constants}
    return [m.op.name for n in kernels for m in n.bodies[0].nodes], types


def nbits(rows, k, n, level, zeros=False, bits=4, block=32, scale="float32"):
    """(MatMulNBits, the weights it stands for)"""
    blocks = k // block
    numbers = RNG.integers(0, 1 << bits, (n, blocks, block), np.uint8)
    packed = numbers if bits == 8 else numbers[..., 0::2] | numbers[..., 1::2] << 4
    scales, points = RNG.random((n, blocks)).astype(scale).astype(np.float32), np.full((n, blocks), 1 << (bits - 1), np.uint8)
    held = {"w": packed, "s": scales}
    if zeros:
        points = RNG.integers(0, 1 << bits, (n, blocks), np.uint8)
        held["z"] = points if bits == 8 else points[..., 0::2] | points[..., 1::2] << 4
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", *held], ["y"], domain="com.microsoft", **attrs)
    floats = (numbers.astype(np.float32) - points[..., None]) * scales[..., None]
    return model([node], rows, k, held), floats.reshape(n, k)


def model(nodes, rows, k, held):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, k])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    constants = [a if isinstance(a, TensorProto) else numpy_helper.from_array(a, name) for name, a in held.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10)


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, True)])
def test_activations_are_rounded_where_that_is_allowed(bits, zeros):
    proto, weights = nbits(5, 128, 64, 4, zeros, bits)
    found, types = operators(proto, VNNI)
    assert found == ["byte_blocks", "reshape", "byte_block_product"] or found == ["byte_blocks", "byte_block_product"]
    assert types == {"uint8", "float32"}
    x = RNG.normal(size=(5, 128)).astype(np.float32)
    wanted = x @ weights.T
    for threads in (1, 2):
        y = tcomp.compile(proto, threads=threads).run({"x": x})["y"]
        assert np.abs(y - wanted).max() < 2e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("columns", [5, 50, 91])
def test_columns_that_fill_no_vectors_are_filled_up(columns, zeros):
    proto, weights = nbits(2, 64, columns, 4, zeros)
    found, _ = operators(proto, VNNI)
    assert "byte_block_product" in found and "block_product" not in found
    x = RNG.normal(size=(2, 64)).astype(np.float32)
    wanted, y = x @ weights.T, tcomp.compile(proto).run({"x": x})["y"]
    assert y.shape == wanted.shape and np.abs(y - wanted).max() < 2e-2 * np.abs(wanted).max()


def test_scales_take_half_the_bytes_where_nothing_is_lost():
    """Most formats have float16 scales, which models then hold as float32."""
    proto, weights = nbits(5, 128, 64, 4, scale="float16")
    assert operators(proto, VNNI)[1] == {"uint8", "float16"}
    x = RNG.normal(size=(5, 128)).astype(np.float32)
    wanted, y = x @ weights.T, tcomp.compile(proto).run({"x": x})["y"]
    assert np.abs(y - wanted).max() < 2e-2 * np.abs(wanted).max()


def test_activations_stay_floats_otherwise():
    found, _ = operators(nbits(5, 128, 64, 0)[0], VNNI)
    assert "block_product" in found and "byte_blocks" not in found
    assert "block_product" in operators(nbits(5, 128, 64, 4)[0], PLAIN)[0]
    assert "matmul" in operators(nbits(64, 128, 64, 4)[0], PLAIN)[0]  # many rows: weights are written out


def test_explanations_name_the_rule():
    report = Report()
    run_passes(import_model(nbits(5, 128, 64, 0)[0]), graph_passes(CompileOptions(VNNI), report))
    assert ["rounded_activations: activations may not be rounded"] in report.notes.lines.values()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8])
def test_blocks_of_dequantised_weights_are_kept(dtype, transposed):
    signed, bits = dtype != TensorProto.UINT4, 8 if dtype == TensorProto.INT8 else 4
    low = -(1 << (bits - 1)) if signed else 0
    shape, along = ((48, 64), 1) if transposed else ((64, 48), 0)
    numbers = RNG.integers(low, low + (1 << bits), shape)
    scales = RNG.random([d // 32 if a == along else d for a, d in enumerate(shape)]).astype(np.float32)
    held = {"w": helper.make_tensor("w", dtype, shape, numbers.reshape(-1)), "s": scales}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=along, block_size=32)]
    if transposed:
        nodes.append(helper.make_node("Transpose", ["f"], ["t"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["x", "t" if transposed else "f"], ["y"]))
    proto = model(nodes, 3, 64, held)
    found, types = operators(proto, VNNI)
    assert "block_product" in found and "matmul" not in found and "uint8" in types
    x = RNG.normal(size=(3, 64)).astype(np.float32)
    floats = numbers * np.repeat(scales, 32, along)
    np.testing.assert_allclose(tcomp.compile(proto).run({"x": x})["y"], x @ (floats.T if transposed else floats), rtol=1e-3, atol=1e-3)


def test_weights_of_whole_rows_are_no_blocks():
    held = {"w": RNG.integers(-128, 128, (64, 48), np.int8), "s": RNG.random(48).astype(np.float32)}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=1), helper.make_node("MatMul", ["x", "f"], ["y"])]
    proto = model(nodes, 3, 64, held)
    assert "block_product" not in operators(proto, VNNI)[0]
    x = RNG.normal(size=(3, 64)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(tcomp.compile(proto).run({"x": x})["y"], wanted, rtol=1e-3, atol=1e-3)
