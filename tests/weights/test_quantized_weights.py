"""Weights of float models in fewer bits: what changes, by how much, and what stays."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp.errors import InputError
from tcomp.options import CompileOptions
from tcomp.passes import quantized_weights
from tcomp.passes.quantized_weights import dequantized, quantized
from tcomp.pipeline import compile_model

RNG = np.random.default_rng(11)
W, V = RNG.normal(size=(256, 128)).astype(np.float32), RNG.normal(size=(96, 128)).astype(np.float32)


BITS = {"int8": 8, "int4": 4, "w8a8": 8, "w4a8": 4}


def two_products():
    """y = relu(x @ w) @ v'; the second as Gemm with transposed weights."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "v", "c"], ["y"], transB=1),
    ]
    held = [numpy_helper.from_array(a, n) for n, a in {"w": W, "v": V, "c": np.ones(96, np.float32)}.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 256])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def reference(x, kind):
    """What the model computes with weights that were rounded, and all else in float64."""

    def rounded(rows):
        if kind in BITS:
            bits = BITS[kind]
            return dequantized(*quantized(rows, bits), 1 << (bits - 1)).astype(np.float64)
        if kind == "fp16":
            return rows.astype(np.float16).astype(np.float64)
        return (((rows.view(np.uint32) + 0x7FFF + (rows.view(np.uint32) >> 16 & 1)) & 0xFFFF0000).astype(np.uint32)).view(np.float32)

    return np.maximum(x @ rounded(np.ascontiguousarray(W.T)).T, 0) @ rounded(V).T + 1


@pytest.mark.parametrize("kind", quantized_weights.KINDS)
def test_numbers_are_those_of_the_rounded_weights(kind):
    artifact, report = compile_model(two_products(), CompileOptions(weights=kind))
    floats, _ = compile_model(two_products(), CompileOptions())
    smaller = {8: 1.9, 4: 3.1, 16: 1.7}[BITS.get(kind, 16)]
    assert artifact.weights.nbytes * smaller < floats.weights.nbytes + 4096
    assert [(w.shape, w.kind) for w in report.quantized] == [((256, 128), kind), ((128, 96), kind)]
    worst = {"bf16": 2e-3, "fp16": 3e-4}.get(kind) or {8: 0.008, 4: 0.12}[BITS[kind]]
    assert all(0 < w.error < worst for w in report.quantized) and kind in quantized_weights.summary(report.quantized)
    for rows in (1, 5):
        x = RNG.normal(size=(rows, 256)).astype(np.float32)
        found = [tcomp.Module.load(artifact, threads=n).run({"x": x})["y"] for n in (1, 2)]
        wanted = reference(x, kind)
        tolerance = 2e-2 if kind.endswith("a8") else 1e-4 if kind in BITS else 1e-5  # activations are rounded to bytes, or to 16 bits
        assert np.abs(found[0] - wanted).max() < tolerance * np.abs(wanted).max()
        np.testing.assert_array_equal(*found)


def test_blocks_hold_their_largest_elements():
    rows = RNG.normal(size=(4, 64)).astype(np.float32)
    rows[0, :32], rows[1, :32] = 0, 1e-7
    for bits in (4, 8):
        numbers, scales = quantized(rows, bits)
        near = dequantized(numbers, scales, 1 << (bits - 1))
        assert scales.dtype == np.float32  # 1e-7 needs a scale that float16 has not
        assert not near[0, :32].any()
        blocks = rows.reshape(4, 2, 32)
        largest = np.abs(blocks).max(-1, keepdims=True)
        assert (np.abs(near.reshape(blocks.shape) - blocks) <= largest / (8 if bits == 4 else 126)).all()


def test_kinds_are_checked_and_small_weights_stay():
    with pytest.raises(InputError, match="cannot be stored as `int3`"):
        CompileOptions(weights="int3")
    found = []
    graph = two_products()
    graph.graph.initializer[0].CopyFrom(numpy_helper.from_array(W[:, :16].copy(), "w"))
    graph.graph.initializer[1].CopyFrom(numpy_helper.from_array(V[:, :16].copy(), "v"))
    _, report = compile_model(graph, CompileOptions(weights="int4"))
    assert report.quantized == found and "no weights" in quantized_weights.summary(found)
