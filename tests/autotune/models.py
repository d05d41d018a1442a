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
    graph = helper.make_graph(nodes, "net", *ends, [numpy_helper.from_array(a, name) for name, a in weights.items()])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
