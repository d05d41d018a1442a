"""Small models as ONNX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def two_layers(path: Path, batch: int | str = 64) -> Path:
    """softmax(relu(x w + b) v): two products that are worth a schedule, and a softmax."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((96, 160), np.float32),
        "b": rng.standard_normal(160, np.float32),
        "v": rng.standard_normal((160, 64), np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Add", ["xw", "b"], ["xwb"]), helper.make_node("Relu", ["xwb"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["hv"]), helper.make_node("Softmax", ["hv"], ["y"], axis=-1),
    ]  # fmt: skip
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, size])] for name, size in (("x", 96), ("y", 64))]
    graph = helper.make_graph(nodes, "net", ends[0], ends[1], [numpy_helper.from_array(a, name) for name, a in weights.items()])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def convolutions(path: Path, channels: int = 32, size: int = 16) -> Path:
    """A 3x3 convolution between two pointwise ones."""
    rng = np.random.default_rng(0)
    shapes = [(channels, 3, 1, 1), (channels, channels, 3, 3), (8, channels, 1, 1)]
    weights = [numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 8, f"w{n}") for n, shape in enumerate(shapes)]
    nodes = []
    for n, shape in enumerate(shapes):
        nodes.append(helper.make_node("Conv", [f"r{n}" if n else "x", f"w{n}"], [f"c{n}"], pads=[shape[-1] // 2] * 4))
        nodes.append(helper.make_node("Relu", [f"c{n}"], [f"r{n + 1}"]))
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, c, size, size])] for name, c in (("x", 3), (f"r{len(shapes)}", 8))]
    graph = helper.make_graph(nodes, "convolutions", ends[0], ends[1], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
