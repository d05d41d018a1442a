"""Halos: padding between kernels costs no copy, and windows over the edges find zeros."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.ir import te
from tcomp.ir.layout import Layout, Piece
from tcomp.ir.read_patterns import covers, joined, reach
from tcomp.ir.text.parser import parse_layout
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime import Module
from tcomp.target import CpuTarget

RNG = np.random.default_rng(3)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(RNG.integers(-3, 4, shape).astype("float32"), name)


def chain(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], shape: list[Any]) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None)))
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def conv(source: str, w: str, result: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Conv", [source, w], [result], **attributes)


POINTWISE = conv("x", "w1", "a")
CASES: dict[str, tuple[list[onnx.NodeProto], list[onnx.TensorProto]]] = {
    "same": ([conv("a", "w2", "y", pads=[1, 1, 1, 1])], [weight("w2", 5, 6, 3, 3)]),
    "strided": ([conv("a", "w2", "y", pads=[1, 1, 1, 1], strides=[2, 2])], [weight("w2", 5, 6, 3, 3)]),
    "one side": ([conv("a", "w2", "y", pads=[0, 2, 1, 0], strides=[2, 1])], [weight("w2", 5, 6, 3, 3)]),
    "dilated": ([conv("a", "w2", "y", pads=[2, 2, 2, 2], dilations=[2, 2])], [weight("w2", 5, 6, 3, 3)]),
    "depthwise": ([conv("a", "w2", "y", pads=[1, 1, 1, 1], group=6)], [weight("w2", 6, 1, 7, 7)]),
    "grouped": ([conv("a", "w2", "y", pads=[1, 1, 1, 1], group=2)], [weight("w2", 8, 3, 3, 3)]),
    "two readers": (
        [conv("a", "w2", "b", pads=[1, 1, 1, 1]), conv("a", "w3", "c", pads=[2, 2, 2, 2]), helper.make_node("Add", ["b", "c"], ["y"])],
        [weight("w2", 5, 6, 3, 3), weight("w3", 5, 6, 5, 5)],
    ),
    "a reader without padding": (
        [conv("a", "w2", "b", pads=[1, 1, 1, 1]), helper.make_node("Mul", ["a", "b"], ["y"])], [weight("w2", 6, 6, 3, 3)]
    ),
    "three in a row": (
        [conv("a", "w2", "b", pads=[1, 1, 1, 1]), helper.make_node("Relu", ["b"], ["r"]), conv("r", "w2", "y", pads=[1, 1, 1, 1])],
        [weight("w2", 6, 6, 3, 3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("sizes", ["fixed", "symbolic"])
@pytest.mark.parametrize("case", CASES)
def test_no_kernel_copies_padding(case: str, sizes: str) -> None:
    nodes, weights = CASES[case]
    model = chain([POINTWISE, *nodes], [weight("w1", 6, 4, 1, 1), *weights], [1, 4, 9, 11] if sizes == "fixed" else [1, 4, "h", "w"])
    artifact, report = compile_model(model, CompileOptions(emit=("graph",), dims={} if sizes == "fixed" else {"h": (4, 64), "w": (4, 64)}))
    assert "graph pad(" not in report.stages["graph"] and re.search(r"c\+\d\+\d", report.stages["graph"])
    x = RNG.integers(-3, 4, (1, 4, 9, 11)).astype("float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    module = Module.load(artifact)
    for _ in range(2):  # the zeros are still there
        np.testing.assert_array_equal(module.run({"x": x})["y"], expected)


def test_padding_of_an_input_is_copied() -> None:
    model = chain([conv("x", "w", "y", pads=[1, 1, 1, 1])], [weight("w", 5, 4, 3, 3)], [1, 4, 9, 11])
    x = RNG.integers(-3, 4, (1, 4, 9, 11)).astype("float32")
    np.testing.assert_array_equal(tcomp.compile(model).run({"x": x})["y"], ReferenceEvaluator(model).run(None, {"x": x})[0])


@pytest.mark.parametrize("window", ["pool", "mean", "depthwise"])
def test_small_windows_ask_what_is_over_the_edge(window: str) -> None:
    """Nothing is copied, no zeros are stored."""
    node = {
        "pool": helper.make_node("MaxPool", ["a"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        "mean": helper.make_node("AveragePool", ["a"], ["y"], kernel_shape=[3, 3], pads=[1] * 4),
        "depthwise": conv("a", "w2", "y", pads=[2, 2, 2, 2], group=6),
    }[window]
    model = chain([POINTWISE, node], [weight("w1", 6, 4, 1, 1), weight("w2", 6, 1, 5, 5)], [1, 4, 9, 11])
    artifact, report = compile_model(model, CompileOptions(emit=("graph",)))
    assert "graph pad(" not in report.stages["graph"] and not re.search(r"c\+\d\+\d", report.stages["graph"])
    x = RNG.integers(-3, 4, (1, 4, 9, 11)).astype("float32")
    np.testing.assert_allclose(Module.load(artifact).run({"x": x})["y"], ReferenceEvaluator(model).run(None, {"x": x})[0], rtol=1e-6)


@pytest.mark.parametrize(("channels", "spaced"), [(512, True), (1024, True), (520, False)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_rows_that_would_evict_each_other_lie_apart(channels: int, spaced: bool, kernel: int) -> None:
    weights = [weight("w1", channels, 4, 1, 1), weight("w2", 5, channels, kernel, kernel)]
    model = chain([POINTWISE, conv("a", "w2", "y", pads=[kernel // 2] * 4)], weights, [1, 4, 5, 7])
    artifact, report = compile_model(model, CompileOptions(emit=("loops",)))
    assert bool(re.search(rf"float32\[[0-9, ]*{channels + 16}\]", report.stages["loops"])) == spaced
    x = RNG.integers(-3, 4, (1, 4, 5, 7)).astype("float32")
    np.testing.assert_array_equal(Module.load(artifact).run({"x": x})["y"], ReferenceEvaluator(model).run(None, {"x": x})[0])


@pytest.mark.parametrize(("channels", "groups", "spaced"), [(512, 32, True), (512, 512, True), (1024, 1024, True), (520, 520, False)])
@pytest.mark.parametrize("stride", [1, 2])
def test_rows_that_windows_of_groups_walk_lie_apart(channels: int, groups: int, spaced: bool, stride: int) -> None:
    """Grouped convolutions sum groups of neighbours, depthwise ones none: the pixels of a window lie at the same distances."""
    weights = [weight("w1", channels, 4, 1, 1), weight("w2", channels, channels // groups, 3, 3)]
    model = chain([POINTWISE, conv("a", "w2", "y", pads=[1] * 4, group=groups, strides=[stride] * 2)], weights, [1, 4, 8, 8])
    artifact, report = compile_model(model, CompileOptions(emit=("loops",), direct=True))
    assert bool(re.search(rf"float32\[[0-9, ]*{channels + 16}\]", report.stages["loops"])) == spaced
    x = RNG.integers(-3, 4, (1, 4, 8, 8)).astype("float32")
    np.testing.assert_array_equal(Module.load(artifact).run({"x": x})["y"], ReferenceEvaluator(model).run(None, {"x": x})[0])


@pytest.mark.parametrize(("channels", "groups", "pitch"), [(512, 32, 528), (512, 16, 544), (512, 4, 640), (512, 128, 528)])
def test_rows_of_groups_lie_apart_by_whole_groups(channels: int, groups: int, pitch: int) -> None:
    """So that a grouped convolution writes them group by group: none of its kernels stays as lowered."""
    nodes = [POINTWISE, conv("a", "w2", "g", pads=[1] * 4, group=groups), conv("g", "w3", "y")]
    weights = [weight("w1", channels, 4, 1, 1), weight("w2", channels, channels // groups, 3, 3), weight("w3", 5, channels, 1, 1)]
    model = chain(nodes, weights, [1, 4, 4, 3])
    target = CpuTarget.parse("cpu -mcpu=skylake-avx512")
    report = compile_model(model, CompileOptions(target, emit=("graph", "schedule")))[1]
    assert f"b+0+{pitch - channels})" in report.stages["graph"]
    grouped = re.split(r"^# ", report.stages["schedule"], flags=re.MULTILINE)[2]
    assert "s.compute_at(" in grouped
    x = RNG.integers(-3, 4, (1, 4, 4, 3)).astype("float32")
    module = Module.load(compile_model(model, CompileOptions())[0])
    np.testing.assert_array_equal(module.run({"x": x})["y"], ReferenceEvaluator(model).run(None, {"x": x})[0])


def test_reach() -> None:
    x = te.placeholder((8, 10), name="x")
    i, j = te.reduce_axis(10, "i"), te.reduce_axis(10, "j")
    inside = te.all_of([i - 1 >= 0, i - 1 < 8])
    zero = te.const(0.0, "float32")
    assert reach(te.select(inside, x[i - 1, j], zero)) == (x[i - 1, j], {0: (1, 1)})
    assert reach(te.select(i - 1 < 8, x[i - 1, j], zero)) == (x[i - 1, j], {0: (1, 1)})
    assert reach(te.select(inside, x[i - 1, j], te.const(1.0, "float32"))) is None
    assert reach(te.select(i < j, x[i - 1, j], zero)) is None
    assert reach(te.select(inside, x[i - 1, j] * 2.0, zero)) is None
    assert reach(te.select((i * 5 - 20 >= 0) & (i * 5 - 20 < 8), x[i * 5 - 20, j], zero)) is None  # wider than any halo
    assert covers({0: (2, 1)}, {0: (1, 1)}) and not covers({0: (2, 1)}, {1: (1, 0)})
    assert joined({0: (2, 1)}, {0: (1, 3), 1: (1, 0)}) == {0: (2, 3), 1: (1, 0)}


def test_a_layout_with_a_halo() -> None:
    layout = Layout.permuted((0, 2, 3, 1)).with_halo({2: (1, 2), 3: (0, 1)})
    assert str(layout) == "(a,c+1+2,d+0+1,b)" and parse_layout(str(layout), 4) == layout
    assert layout.shape((2, 3, 4, 5)) == (2, 7, 6, 3)
    array = RNG.standard_normal((2, 3, 4, 5)).astype("float32")
    physical = layout.to_physical(array)
    assert physical.shape == (2, 7, 6, 3) and np.count_nonzero(physical) == array.size
    np.testing.assert_array_equal(layout.from_physical(physical, array.shape), array)
    assert [int(i) for i in layout.indices((1, 2, 3, 4))] == [1, 4, 4, 2]
    assert [int(i) for i in layout.logical((1, 4, 4, 2))] == [1, 2, 3, 4]
    assert layout.with_halo({}) == Layout.permuted((0, 2, 3, 1))
    assert Layout(1, (Piece(0, 1, None, 1, 1),)) != Layout.identity(1)
