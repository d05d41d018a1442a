"""Kernels with code of their own for some sizes: the same results at these sizes, next to them, and far away."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tcomp.backends import backend_of
from tcomp.backends.kernel import build_loops, build_versions, operand_layouts
from tcomp.errors import InputError
from tcomp.ir.expr import dim
from tcomp.ir.graph import GraphBuilder, with_sizes
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ops.elementwise import RELU
from tcomp.ops.matmul import MATMUL
from tcomp.options import CompileOptions
from tcomp.passes.layout import with_layouts
from tcomp.pipeline import compile_model, import_graph
from tcomp.runtime import Module
from tcomp.schedules.analysis.access_patterns import nests
from tcomp.schedules.cpu.contraction import tile_of
from tcomp.schedules.knobs import Knobs

RNG = np.random.default_rng(3)


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def model(nodes, shape, weights):
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape), helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    constants = [numpy_helper.from_array(w, name) for name, w in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def convolution(group, channels, outputs, window):
    pads = [window // 2] * 4
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=pads, group=group), helper.make_node("Relu", ["c"], ["y"])]
    weights = {"w": array(outputs, channels // group, window, window), "b": array(outputs)}
    return model(nodes, ["n", channels, "h", "w"], weights), (channels, 9, 11)


def product(depth, columns):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Softmax", ["m"], ["y"])]
    return model(nodes, ["n", depth], {"w": array(depth, columns)}), (depth,)


def attention(length):
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("MatMul", ["p", "x"], ["y"]),
    ]
    return model(nodes, ["n", "l", 24], {}), (length, 24)


CASES = {
    "pointwise": lambda: convolution(1, 16, 40, 1),
    "winograd": lambda: convolution(1, 32, 32, 3),
    "depthwise": lambda: convolution(24, 24, 24, 3),
    "product": lambda: product(40, 37),
    "summed in blocks": lambda: product(900, 130),
    "attention": lambda: attention(13),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", (1, 2))
def test_the_same_at_all_sizes(case, threads):
    proto, rest = CASES[case]()
    artifact, _ = compile_model(proto, CompileOptions(threads=threads))
    module, graph = Module.load(artifact, threads=threads), import_graph(proto, CompileOptions())
    schedules = artifact.notes["schedules"]
    several = len(schedules) > len({name for s in schedules for name in s["kernels"]})  # some have code for a size of their own
    assert several == (case != "depthwise")  # whose images are outside of all else: code for all sizes is that for one image
    for n in (1, 2, 3, 17):
        x = array(n, *rest)
        found, expected = module.run({"x": x})["y"], evaluate_graph(graph, {"x": x})["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * abs(expected).max())


def test_versions_are_for_dims_that_may_be_one():
    backend = backend_of("cpu -mcpu=haswell")

    def versions(rows):
        b = GraphBuilder()
        x, w = b.input("x", "float32", (rows, 64)), b.input("w", "float32", (64, 32))
        body = b.build(b.add(RELU, b.add(MATMUL, [x, w])))
        return build_versions(body, build_loops(body, "kernel", backend), backend)

    ((sizes, schedule),) = versions(n := dim("n", 0))
    assert sizes == {n: 1} and schedule.kernel.scalars == () and schedule.kernel.name == "kernel.v0"
    assert versions(5) == versions(dim("n", 2)) == versions(dim("n", 1) * 4) == []


@pytest.mark.parametrize("threads", (1, 2))
def test_one_code_for_one_image_and_many(threads):
    """Many rows of each image: a batch is a loop around code that is the same for any, so that none has a version of its own."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    proto = model(nodes, ["n", 144, 24], {"w": array(24, 40)})
    artifact, _ = compile_model(proto, CompileOptions(threads=threads))
    module, graph = Module.load(artifact, threads=threads), import_graph(proto, CompileOptions())
    assert len(artifact.notes["schedules"]) == 1
    for n in (1, 3):
        x = array(n, 144, 24)
        np.testing.assert_allclose(module.run({"x": x})["y"], evaluate_graph(graph, {"x": x})["y"], rtol=1e-4, atol=1e-4)


def test_windows_that_may_be_larger_than_the_image():
    """Without padding, an image of free sizes has rows of w - 2 results: of whole tiles there are none, not fewer, where w is 1."""
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    proto = model(nodes, ["n", 3, "h", "w"], {"w": array(10, 3, 3, 3), "b": array(10)})
    artifact, _ = compile_model(proto, CompileOptions(threads=1))
    assert "left as lowered" not in str(artifact.notes)
    module, graph = Module.load(artifact, threads=1), import_graph(proto, CompileOptions())
    for h, w in ((3, 3), (4, 31), (9, 70)):
        x = array(2, 3, h, w)
        np.testing.assert_allclose(module.run({"x": x})["y"], evaluate_graph(graph, {"x": x})["y"], rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError):
        module.run({"x": array(1, 3, 1, 5)})


def test_a_version_takes_whole_panels():
    """Weights lie in panels as wide as the register tile for all sizes; few rows alone would have tiles of another width."""
    backend, n = backend_of("cpu -mcpu=znver4"), dim("n", 0)
    b = GraphBuilder()
    x, w = b.input("x", "float32", (n, 5, 512)), b.input("w", "float32", (512, 512))
    body = b.build(b.add(MATMUL, [x, w]))
    packed = with_layouts(body, layouts := operand_layouts(body, frozenset({1}), backend))

    def columns(graph):
        product = next(nest for nest in nests(backend.lower(graph, "kernel")) if nest.is_reduction)
        return tile_of(product, backend.target, Knobs()).vectors * 16

    panel = layouts[1].pieces[-1].mod
    assert columns(with_sizes(body, {n: 1})) % panel != 0 == columns(with_sizes(packed, {n: 1})) % panel


def test_tiles_divide_the_rows_of_each_image():
    """49 rows of each of any number of images: tiles of 7 rows, and no code for the last rows of the last tile."""
    backend = backend_of("cpu -mcpu=znver4")
    b = GraphBuilder()
    x, w = b.input("x", "float32", (dim("n", 1), 49, 64)), b.input("w", "float32", (64, 32))
    kernel = build_loops(b.build(b.add(RELU, b.add(MATMUL, [x, w]))), "kernel", backend).kernel
    assert "n * 7" in str(kernel) and "if " not in str(kernel)


def test_a_graph_with_fixed_sizes():
    proto, rest = attention(5)
    graph = import_graph(proto, CompileOptions())
    fixed = with_sizes(graph, {d: 3 for d in graph.dims() if d.name == "n"})
    assert fixed.inputs[0].shape[0] == fixed.outputs[0].shape[0] == 3 and [d.name for d in fixed.dims()] == ["l"]
    x = {"x": array(3, *rest)}
    np.testing.assert_array_equal(evaluate_graph(fixed, x)["y"], evaluate_graph(graph, x)["y"])
