"""3. Look inside a compilation: kernels, layouts, what was not fused and why, and every stage as text.

Run me:  python tutorials/03_look_inside.py
"""

import os
import tempfile
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model

# conv -> batch norm -> relu -> conv, plus the input: a residual block.
rng = np.random.default_rng(0)
weights = {
    "w1": rng.standard_normal((16, 16, 3, 3), np.float32),
    "w2": rng.standard_normal((16, 16, 3, 3), np.float32),
    **{name: rng.uniform(0.5, 1.5, 16).astype(np.float32) for name in ("scale", "shift", "mean", "var")},
}
graph = helper.make_graph(
    [
        helper.make_node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", "scale", "shift", "mean", "var"], ["bn"]),
        helper.make_node("Relu", ["bn"], ["r"]),
        helper.make_node("Conv", ["r", "w2"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "x"], ["y"]),
    ],
    "block",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 28, 28])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 28, 28])],
    [numpy_helper.from_array(a, name) for name, a in weights.items()],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

with tempfile.TemporaryDirectory() as folder:
    os.environ["TCOMP_DUMP"] = folder
    artifact, report = compile_model(model, CompileOptions(emit=("graph",)))
    del os.environ["TCOMP_DUMP"]

    # Each `kernel` is one function of the artifact. The batch norm has vanished into the weights of the first convolution; the second one
    # takes the addition along. The activations lie channels-last, the weights in panels as wide as a register tile.
    print(report.stages["graph"])
    print(f"\n{report.kernels} kernels; workspace {report.arena} bytes, at least {report.arena_lower_bound} are alive at once")
    print("\nNot fused:")
    for reason in report.edges_not_fused:
        print(" ", reason)
    print("\nSeconds:", {stage: round(s, 3) for stage, s in report.seconds.items()})

    print("\nEvery stage as text, and what each pass changed:")
    for path in sorted(Path(folder).iterdir()):
        print(f"  {path.name:28} {path.stat().st_size:8} bytes")
