"""Strassen's algorithm for products and for convolutions of single pixels: where it is chosen, and that nothing changes in value."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.ir import te
from tcomp.ir.expr import dim
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ops.elementwise import ADD, RELU
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import CONCAT
from tcomp.ops.nn import CONV
from tcomp.ops.reduction import REDUCE_MEAN
from tcomp.options import CompileOptions, Report
from tcomp.packaging import collect_weights
from tcomp.passes import algorithms
from tcomp.passes.algorithm_costs import Product, algorithm_costs, fastest
from tcomp.passes.algorithms import choose_algorithms
from tcomp.passes.rewrite import Notes
from tcomp.passes.runner import run_passes
from tcomp.pipeline import compile_graph, compile_model, graph_passes
from tcomp.runtime import Module
from tcomp.target import CpuTarget

RNG = np.random.default_rng(7)
TARGET, ZEN4, ZEN5 = (CpuTarget.parse(f"cpu -mcpu={name}") for name in ("skylake-avx512", "znver4", "znver5"))


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def operators(graph):
    return [node.op.name for node in graph.nodes]


STRASSEN = ["strassen_rows", "strassen_input", "matmul", "strassen_output"]


def product_of(shape, weights, dtype="float32", constant=True, **attrs):
    """relu(x @ w + b)"""
    b = GraphBuilder()
    x = b.input("x", dtype, shape)
    (y,) = b.add(MATMUL, [x, b.constant(weights) if constant else b.input("w", dtype, weights.shape)], attrs)
    return b.build(b.add(RELU, [b.add(ADD, [y, b.constant(array(y.shape[-1]).astype(dtype))])[0]]))


def always(monkeypatch):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: 1)


@pytest.mark.parametrize("shape, n", [((4, 32), 32), ((7, 64), 32), ((2, 5, 32), 96), ((2, 1, 6, 32), 64), ((5, 40), 56)], ids=str)
@pytest.mark.parametrize("turned", (False, True))
def test_products_keep_their_result(unchanged, monkeypatch, shape, n, turned):
    always(monkeypatch)
    before = product_of(shape, array(n, shape[-1]) if turned else array(shape[-1], n), transpose_b=turned)
    assert operators(unchanged(before, choose_algorithms(before, TARGET), rtol=1e-4)) == [*STRASSEN, "add", "relu"]
    assert operators(choose_algorithms(before, TARGET, direct=True)) == ["matmul", "add", "relu"]


PIXELS = ["strassen_pixels", "matmul", "strassen_image"]


@pytest.mark.parametrize(
    "shape, n", [((1, 32, 4, 6), 32), ((2, 64, 3, 5), 32), ((1, 32, 7), 96), ((1, 32, 2, 3, 3), 32), ((1, 56, 3, 2), 40)], ids=str
)
def test_convolutions_of_single_pixels_keep_their_result(unchanged, monkeypatch, shape, n):
    """Products of the channels of every pixel, as the bias and activation that follow see them."""
    always(monkeypatch)
    window = (1,) * (len(shape) - 2)
    b = GraphBuilder()
    attrs = {"strides": window, "dilations": window, "group": 1}
    (y,) = b.add(CONV, [b.input("x", "float32", shape), b.constant(array(n, shape[1], *window))], attrs)
    before = b.build(b.add(RELU, [y]))
    assert operators(unchanged(before, choose_algorithms(before, TARGET), rtol=1e-4)) == [*PIXELS, "relu"]
    assert operators(choose_algorithms(before, TARGET, direct=True)) == ["conv", "relu"]


@pytest.mark.parametrize("shape, weights, options", [
    ((1, 32, 4, 4), (32, 32, 3, 1), {}), ((1, 64, 4, 4), (32, 32, 1, 1), {"group": 2}), ((1, 32, 4, 4), (32, 32, 1, 1), {"strides": (2, 2)}),
    ((1, 44, 4, 4), (32, 44, 1, 1), {}), ((te.var("n"), 32, 4, 4), (32, 32, 1, 1), {}),
], ids=str)  # fmt: skip
def test_convolutions_of_single_pixels_that_are_left_alone(monkeypatch, shape, weights, options):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: int(isinstance(sizes, Product)))
    b = GraphBuilder()
    attrs = {"strides": (1, 1), "dilations": (1, 1), "group": 1} | options
    graph = b.build(b.add(CONV, [b.input("x", "float32", shape), b.constant(array(*weights))], attrs))
    assert operators(choose_algorithms(graph, TARGET)) == ["conv"]


def test_halves_of_an_odd_number_of_vectors_are_no_faster():
    """Register tiles are two vectors wide."""
    ways = [algorithm_costs(Product(14, 14, 1024, n), CpuTarget.parse("cpu -mcpu=znver4")) for n in (224, 256)]
    assert ways[0][1] > ways[0][0] and ways[1][1] < 0.95 * ways[1][0]


def test_products_with_a_symbolic_batch(unchanged, monkeypatch):
    always(monkeypatch)
    before = product_of((te.var("n"), 6, 32), array(32, 32))
    assert operators(unchanged(before, choose_algorithms(before, TARGET), rtol=1e-4))[:4] == STRASSEN
    notes = Notes()
    assert "matmul" in operators(choose_algorithms(product_of((te.var("n"), 32), array(32, 32)), TARGET, notes))
    assert notes.lines == {"matmul": ["strassen: there may be too few rows: 1"]}


def test_products_with_many_rows_at_least(unchanged):
    """The number of rows that there are for sure decides."""
    many, few = (product_of((dim("n", least, 4096), 512), array(512, 512)) for least in (512, 2))
    assert operators(unchanged(many, choose_algorithms(many, TARGET), rtol=1e-4, dims={dim("n", 512, 4096): 513}))[:4] == STRASSEN
    notes = Notes()
    assert "matmul" in operators(choose_algorithms(few, TARGET, notes))
    assert notes.lines == {"matmul": ["strassen: there may be too few rows: 2"]}


def dense_pair(*shape):
    """relu(x @ w + b) @ v + x, for x of this shape."""
    b, k = GraphBuilder(), shape[-1]
    x = b.input("x", "float32", shape)
    (wide,) = b.add(ADD, [*b.add(MATMUL, [x, b.constant(array(k, 2 * k))]), b.constant(array(2 * k))])
    (narrow,) = b.add(MATMUL, [*b.add(RELU, [wide]), b.constant(array(2 * k, k))])
    return b.build(b.add(ADD, [narrow, x]))


def prepared(graph, **options):
    return run_passes(graph, graph_passes(CompileOptions(ZEN4, **options), Report()), verify=True)[0]


def test_free_rows_get_a_version_for_many():
    """Strassen's algorithm runs from the number of rows on from which it pays, none at fewer; what both versions read is stored once."""
    n, s = dim("n", 1, 64), dim("s", 1, 4096)
    before = dense_pair(n, s, 256)
    graph = prepared(before)
    decision, versions = graph.nodes
    many, few = ([node.op.name for kernel in body.nodes for node in kernel.bodies[0].nodes] for body in versions.bodies)
    assert many.count("strassen_input") == 2 and "strassen_input" not in few and few.count("matmul") == 2
    weights, offsets = collect_weights(graph)
    assert len(offsets) == 6 and len(weights) == 5  # two matrices, each in two forms; one bias
    least = next(n for n in range(16, 256, 8) if fastest(Product(1, n, 256, 512), ZEN4) and fastest(Product(1, n, 512, 256), ZEN4))
    model = Module.load(compile_graph(before, CompileOptions(threads=1)))
    for sizes in ((1, 1), (5, 15), (1, least - 1), (1, least), (2, 33), (1, 257)):
        x = array(*sizes, 256)
        (want,) = evaluate_graph(before, {"x": x}).values()
        (enough,) = evaluate_graph(replace(graph, nodes=graph.nodes[:1], outputs=decision.outputs), {"x": x}).values()
        assert enough == (prod(sizes) >= least and sizes[1] >= 16), sizes
        for result in (*evaluate_graph(graph, {"x": x}).values(), *model.run({"x": x}).values()):
            np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_where_free_rows_get_one_version_only():
    """Where it would save little of the whole, as in a classifier behind convolutions, and for language models."""
    b, n = GraphBuilder(), dim("n", 1, 64)
    image, attrs = b.input("x", "float32", (n, 64, 32, 32)), {"strides": (1, 1), "dilations": (1, 1), "group": 1}
    (pixels,) = b.add(CONV, [image, b.constant(array(256, 64, 5, 5))], attrs)
    (pooled,) = b.add(REDUCE_MEAN, [pixels], {"axes": (2, 3), "keepdims": False})
    assert len(prepared(b.build(b.add(MATMUL, [pooled, b.constant(array(256, 256))]))).nodes) > 2
    assert [node.op.name for node in prepared(dense_pair(n, 256), state={}).nodes] == ["kernel"] * 2
    assert [node.op.name for node in prepared(dense_pair(n, 256), direct=True).nodes] == ["kernel"] * 2
    b = GraphBuilder()
    new, past = b.input("x", "float32", (n, 256)), b.input("past", "float32", (dim("m", 0, 64), 256))
    (rows,) = b.add(MATMUL, [new, b.constant(array(256, 512))])
    (present,) = b.add(CONCAT, [past, new], {"axis": 0})
    present.name = "present"
    assert "if" not in operators(prepared(b.build([rows, present])))


@pytest.mark.parametrize("shape, weights, options", [
    ((32,), (32, 32), {}), ((1, 32), (32, 32), {}), ((8, 44), (44, 32), {}), ((8, 32), (32, 44), {}), ((8, 32), (32,), {}),
    ((2, 8, 32), (2, 32, 32), {}), ((32, 8), (32, 32), {"transpose_a": True}), ((8, 32), (32, 32), {"constant": False}),
    ((8, 32), (32, 32), {"dtype": "float64"}), ((8, 32), (32, 32), {"dtype": "float16"}),
], ids=str)  # fmt: skip
def test_products_that_are_left_alone(monkeypatch, shape, weights, options):
    always(monkeypatch)
    graph = product_of(shape, array(*weights).astype(options.get("dtype", "float32")), **options)
    assert operators(choose_algorithms(graph, TARGET)) == operators(graph)


def test_matrices_whose_columns_differ_are_left_alone(monkeypatch):
    always(monkeypatch)
    notes, weights = Notes(), array(32, 64)
    weights[:, 40] = 0
    assert operators(choose_algorithms(product_of((8, 32), weights), TARGET, notes)) == ["matmul", "add", "relu"]
    assert notes.lines == {"matmul": ["strassen: columns of the matrix differ too much in size"]}


def test_the_rule_for_products():
    sizes = [
        (1, 1, 768, 768),
        (1, 16, 768, 3072),
        (1, 64, 768, 768),
        (1, 128, 768, 768),
        (1, 128, 128, 128),
        (1, 1024, 64, 256),
        (1, 4096, 512, 512),
    ]
    assert [fastest(Product(*x), ZEN5) for x in sizes] == [0, 0, 1, 1, 0, 0, 0]
    assert str(Product(*sizes[2])) == "product 1x64x768 by 768x768"


def test_cores_that_share_the_memory_stream_no_more_weights_than_they_must():
    direct, halved = ([algorithm_costs(Product(1, 128, 768, 3072), CpuTarget.parse(f"cpu -mcpu=znver5 -cores={n}"))[way]
                       for n in (1, 4, 32)] for way in (0, 1))  # fmt: skip
    assert direct[0] == direct[1] and halved[1] < direct[1] and halved[2] > direct[2]


def test_layers_with_the_same_weights_keep_one_of_them(monkeypatch):
    always(monkeypatch)
    b = GraphBuilder()
    x, w = b.input("x", "float32", (4, 32)), b.constant(array(32, 32))
    for _ in range(3):
        (x,) = b.add(RELU, [b.add(MATMUL, [x, w])[0]])
    graph, _ = run_passes(b.build([x]), graph_passes(CompileOptions(CpuTarget.parse("cpu -mcpu=skylake-avx512")), Report()))
    assert [a.shape[0] for a in graph.constants.values()] == [7]


@pytest.mark.parametrize("rows", (32, 37))
def test_products_of_compiled_models(monkeypatch, rows):
    """Seven products in native code: with a bias, an activation, and a residual that is added, even and odd rows."""
    always(monkeypatch)
    w, v = array(64, 96), array(96, 64)
    names = ("w", "v", "b")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["s"]), helper.make_node("Tanh", ["s"], ["t"]),
             helper.make_node("MatMul", ["t", "v"], ["u"]), helper.make_node("Add", ["u", "x"], ["y"])]  # fmt: skip
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, rows, 64])] for name in ("x", "y")]
    weights = [numpy_helper.from_array(a, name) for a, name in zip((w, v, array(96)), names, strict=True)]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", ends[0], ends[1], weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    artifact, report = compile_model(proto, CompileOptions(emit=("graph",)))
    assert report.stages["graph"].count("strassen_output") >= 2
    x = array(1, rows, 64)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert np.abs(tcomp.Module.load(artifact).run({"x": x})["y"] - expected).max() < 2e-6 * np.abs(expected).max()
