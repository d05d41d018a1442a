"""Sizes that a dim is likely to have: kernels that sum have code of their own for them, and the same results at all sizes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp.errors import InputError
from tcomp.frontends.onnx import import_model
from tcomp.ir.graph import Graph, canonical_graph_text
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.text.parser import parse_graph
from tcomp.ops import OPERATORS
from tcomp.passes.partition import partition

RNG = np.random.default_rng(5)


def network():
    """x [n, 40] -> softmax(relu(x w) v) and its sums over rows [n] and over the batch [10]."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "v"], ["c"]),
        helper.make_node("Softmax", ["c"], ["y"]),
        helper.make_node("ReduceSum", ["y", "first"], ["s"], keepdims=0),
    ]
    weights = {"w": RNG.standard_normal((40, 24), np.float32), "v": RNG.standard_normal((24, 10), np.float32), "first": np.array([0])}
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["n", 40]), ("y", ["n", 10]), ("s", [10]))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(w, name) for name, w in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def schedules(module):
    return module.artifact.notes["schedules"]


def check(module, graph: Graph, sizes):
    for n in sizes:
        x = RNG.standard_normal((n, 40), np.float32)
        found, expected = module.run({"x": x}), evaluate_graph(graph, {"x": x})
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def test_versions_for_each_size():
    proto = network()
    module, usual = tcomp.compile(proto, dims={"n": [8, 1, 32]}), tcomp.compile(proto)
    check(module, import_model(proto), (1, 2, 8, 9, 32, 33))
    assert len(schedules(module)) > len(schedules(usual))
    of_last = [s for s in schedules(module) if "s" in s["kernels"] or any("s" in k.split() for k in s["kernels"])]
    assert 1 < len(of_last) <= 4  # also a sum without a product, at those of the sizes where its loops differ
    fixed = {len(s["schedule"]) for s in schedules(tcomp.compile(proto, dims={"n": 32}))}
    assert fixed  # compiles for the size alone as well


def test_dims_keep_their_exact_sizes():
    graph = import_model(network(), dims={"n": [4, 2, 4]})
    (n,) = graph.dims()
    assert n.attr.exact == (2, 4) and (n.attr.lo, n.attr.hi) == (1, (1 << 29) - 1)
    kernel = next(node.bodies[0] for node in partition(graph).nodes)
    text = canonical_graph_text(kernel)
    assert "| 2, 4}" in text and canonical_graph_text(parse_graph(text, OPERATORS, {})) == text


@pytest.mark.parametrize("sizes", [[], [0], [1.5], [True], list(range(1, 40)), [1 << 40]])
def test_lists_that_are_refused(sizes):
    with pytest.raises(InputError, match="is given as"):
        import_model(network(), dims={"n": sizes})


def test_within_limits_and_on_the_command_line(tmp_path):
    from tcomp.cli.options import parse_dims

    assert parse_dims(["n=1,8", "m=1..8", "k=3"]) == {"n": [1, 8], "m": (1, 8), "k": 3}
    onnx.save(network(), tmp_path / "m.onnx")
    exact, ranged = (tcomp.compile(tmp_path / "m.onnx", dims={"n": d}, max_seconds=200) for d in ([1, 8], (1, 8)))
    assert exact.manifest.dims[0].max > 8 and ranged.manifest.dims[0].max == 8
    assert len(schedules(exact)) > len(schedules(ranged))
