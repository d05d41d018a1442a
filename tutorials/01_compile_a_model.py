"""1. Compile a model, run it, save it, load it again.

Run me:  python tutorials/01_compile_a_model.py
"""

import tempfile
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tcomp

# A small network, as an exporter would write it: softmax(relu(x w + b)) with a batch size that is left open.
rng = np.random.default_rng(0)
w, b = rng.standard_normal((64, 10), np.float32), rng.standard_normal(10, np.float32)
graph = helper.make_graph(
    [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"], axis=-1),
    ],
    "net",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
    [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

# One compilation serves every batch size from 1 to 64.
module = tcomp.compile(model, dims={"batch": (1, 64)})
print(module)

for batch in (1, 7, 64):
    x = rng.standard_normal((batch, 64), np.float32)
    y = module.run({"x": x})["y"]
    h = np.maximum(x @ w + b, 0)
    expected = np.exp(h - h.max(1, keepdims=True)) / np.exp(h - h.max(1, keepdims=True)).sum(1, keepdims=True)
    print(f"batch {batch:2}: largest difference {np.abs(y - expected).max():.1e}")
    assert np.allclose(y, expected, atol=1e-5)

# The artifact is one file: code, weights, signature. Loading it needs NumPy alone.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "net.tcomp"
    module.save(path)
    again = tcomp.load(path, threads=1)
    x = rng.standard_normal((3, 64), np.float32)
    assert np.array_equal(again(x), module(x)), "the same bits, whatever the number of threads"
    print(f"saved and loaded {path.stat().st_size} bytes")

# Mistakes are refused with one message.
try:
    module(np.zeros((65, 64), np.float32))
except tcomp.TcompError as error:
    print(error)
