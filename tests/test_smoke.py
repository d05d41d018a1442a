"""Runs first, in seconds: a model and a tensor expression, all the way to the result, through the API and the command."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp import te

RNG = np.random.default_rng(0)
W, X = (RNG.standard_normal(shape, np.float32) for shape in ((8, 5), (3, 8)))
EXPECTED = np.maximum(X @ W, 0)


def model() -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", k]) for n, k in (("x", 8), ("y", 5)))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(W, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_model(tmp_path: Path) -> None:
    module = tcomp.compile(model())
    np.testing.assert_allclose(module.run({"x": X})["y"], EXPECTED, rtol=1e-5, atol=1e-6)
    module.save(tmp_path / "m.tcomp")
    np.testing.assert_array_equal(tcomp.load(tmp_path / "m.tcomp")(X), module(X))


def test_tensor_expression() -> None:
    a, b, k = te.placeholder((3, 8), name="a"), te.placeholder((8, 5), name="b"), te.reduce_axis(8, "k")
    c = te.compute((3, 5), lambda i, j: te.sum(a[i, k] * b[k, j], k), "c")
    d = te.compute((3, 5), lambda i, j: te.maximum(c[i, j], 0), "d")
    np.testing.assert_allclose(tcomp.build([a, b, d])(X, W), EXPECTED, rtol=1e-5, atol=1e-6)


def test_command(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", X)
    environment = {**os.environ, "PYTHONPATH": str(Path(tcomp.__file__).parents[1])}  # works in a checkout that is not installed, too
    for arguments in (["compile", "m.onnx", "--dim", "n=1..9"], ["run", "m.tcomp", "--input", "x=x.npy", "--save", "out.npz"]):
        command = [sys.executable, "-m", "tcomp", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["y"], EXPECTED, rtol=1e-5, atol=1e-6)
