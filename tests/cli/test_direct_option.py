"""`--direct` means the same to every command that compiles."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


@pytest.fixture(scope="module")
def conv(tmp_path_factory):
    """A convolution that Winograd's algorithm computes faster, followed by another one."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((64, 64, 3, 3), np.float32), "v": rng.standard_normal((64, 64, 3, 3), np.float32)}
    nodes = [helper.make_node("Conv", [a, w], [b], pads=[1, 1, 1, 1]) for a, w, b in (("x", "w", "h"), ("h", "v", "y"))]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64, 24, 24])] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "net", ends[0], ends[1], [numpy_helper.from_array(a, name) for name, a in weights.items()])
    path = tmp_path_factory.mktemp("conv") / "conv.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("command", ["compile", "tune", "verify", "explain"])
def test_it_is_an_option_of(tcomp, command):
    assert "--direct" in tcomp(command, "--help").stdout


def test_explain(tcomp, conv):
    used = [any("winograd_product" in k["operators"] for k in tcomp.json("explain", conv, *o)["kernels"]) for o in ((), ("--direct",))]
    assert used == [True, False]


def test_verify(tcomp, conv, artifact):
    done = [tcomp.json("verify", conv, "--full", *o) for o in ((), ("--direct",))]
    assert [any("winograd_product" in k["operators"] for k in record["kernels"]) for record in done] == [True, False]
    assert "--direct comes too late" in tcomp("verify", artifact, "--proofs", "--direct", status=2).output


def test_tune(tcomp, conv):
    options = ("--trials", 1, "--threads", 1, "--workers", 1, "--direct", "--database", "t.db")
    titles = [k["kernel"] for k in tcomp.json("tune", conv, *options)["kernels"]]
    assert titles and not any("winograd" in title for title in titles)
    assert tcomp.json("compile", conv, "--threads", 1, "--database", "t.db", "--direct")["not_followed"] == []
    assert "--direct comes with a model" in tcomp("tune", "--resume", "--database", "t.db", "--direct", status=2).output
