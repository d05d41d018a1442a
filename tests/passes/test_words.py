"""Products of bytes by integers of 16 bits, for processors without instructions for bytes: sums are exact, by every algorithm."""

import numpy as np
import pytest

import tcomp
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ops import bilinear
from tcomp.ops.elementwise import ADD
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import PAD
from tcomp.ops.nn import CONV, MAX_POOL
from tcomp.ops.quantization import DEQUANTIZE, QUANTIZE
from tcomp.options import CompileOptions
from tcomp.passes import algorithms
from tcomp.passes.algorithm_costs import Product, algorithm_costs, fastest, winograd_tiles
from tcomp.passes.algorithms import choose_algorithms
from tcomp.passes.cse import merge_equal
from tcomp.passes.quantized import use_words
from tcomp.pipeline import compile_graph
from tcomp.target import CpuTarget, Target

HASWELL, WIDE = CpuTarget.parse("cpu -mcpu=haswell"), CpuTarget.parse("cpu -mcpu=skylake-avx512")
RNG = np.random.default_rng(5)


def integers(dtype, *shape):
    """Numbers of any size, a third of them the extreme ones."""
    limits = np.iinfo(dtype)
    found = RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return np.where(RNG.random(shape) < 0.3, RNG.choice([limits.min, limits.max], shape), found).astype(dtype)


def convolution(shape, weights, strides, pads=0, group=1):
    b = GraphBuilder()
    x = y = b.input("x", "uint8", shape)
    if pads:
        around = (0, 0, *[pads] * (len(shape) - 2))
        (y,) = b.add(PAD, [x, b.constant(np.array(7, np.uint8))], {"before": around, "after": around})
    attrs = {"strides": strides, "dilations": (1,) * len(strides), "group": group}
    return b.build(b.add(CONV, [y, b.constant(weights)], attrs))


def product(shape, weights, transpose_b=False):
    b = GraphBuilder()
    return b.build(b.add(MATMUL, [b.input("x", "uint8", shape), b.constant(weights)], {"transpose_b": transpose_b}))


def evaluated(graph, x):
    (found,) = evaluate_graph(graph, {graph.inputs[0].name: x}).values()
    return found


def operators(graph):
    return [node.op.name for node in graph.nodes]


CASES = {
    "window": (convolution((1, 20, 7, 9), integers("int8", 24, 20, 3, 3), (1, 1), 1), 2, "winograd_product"),
    "window of a row": (convolution((2, 16, 1, 11), integers("int8", 16, 16, 1, 3), (1, 1)), 2, "winograd_product"),
    "stride": (convolution((1, 17, 9, 8), integers("int8", 16, 17, 3, 3), (2, 2), 1), 2, "winograd_product"),
    "groups": (convolution((1, 32, 6, 6), integers("int8", 32, 16, 3, 3), (1, 1), 1, 2), 2, "winograd_product"),
    "pixels": (convolution((1, 64, 5, 3), integers("int8", 96, 64, 1, 1), (1, 1)), 1, "strassen_pixels"),
    "rows": (product((2, 7, 64), integers("int8", 64, 96)), 1, "strassen_input"),
    "columns of the transpose": (product((8, 64), integers("int8", 32, 64), True), 1, "strassen_input"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_is_exact(name, monkeypatch):
    graph, algorithm, expected = CASES[name]
    x = integers("uint8", *graph.inputs[0].shape)
    want = evaluated(graph, x)
    direct = use_words(graph)
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: algorithm)
    changed = choose_algorithms(direct, HASWELL)
    assert "int16" in str(direct) and expected in operators(changed) and want.dtype == np.int32
    for g in (direct, changed):
        np.testing.assert_array_equal(evaluated(g, x), want, strict=True)
    for target in (HASWELL, WIDE):
        if target.runs_on(Target.host()):
            artifact = compile_graph(graph, CompileOptions(target))
            np.testing.assert_array_equal(*tcomp.Module.load(artifact, threads=2).run({"x": x}).values(), want)


def test_tiles_whose_points_are_sums_and_differences():
    assert [winograd_tiles(*form, words=True) for form in (((3, 3), 1), ((3, 3), 2), ((1, 3), 1), ((5, 5), 1))] == [(2,), (2,), (2,), ()]
    assert [bilinear.denominator(2, n, s) for n, s in ((3, 1), (3, 2), (1, 1), (5, 1))] == [2, 1, 1, 0]
    w = np.full((2, 500, 3, 3), 127, np.int8)
    assert bilinear.exact_sums(w, 2, 1, 255) and not bilinear.exact_sums(np.repeat(w, 4, 1), 2, 1, 255)
    assert bilinear.exact_sums(np.repeat(w, 4, 1), 2, 2, 255)  # nothing is divided


def test_a_sum_that_might_exceed_32_bits_is_direct(monkeypatch):
    monkeypatch.setattr(algorithms, "fastest", lambda sizes, target: 2)
    graph = use_words(convolution((1, 2000, 4, 4), np.full((16, 2000, 3, 3), -128, np.int8), (1, 1)))
    assert operators(choose_algorithms(graph, HASWELL)) == ["cast", "conv"]


def test_the_rule():
    """As many integers as floats are multiplied in two thirds of the time; few rows or columns are not worth the additions."""
    sizes = [(1, rows, 768, columns) for rows, columns in ((128, 3072), (16, 3072), (128, 32))]
    words, floats = (algorithm_costs(Product(*sizes[0], of_words), HASWELL) for of_words in (True, False))
    assert words[0] < floats[0] and words[1] < floats[1]
    assert [fastest(Product(*x, True), HASWELL) for x in sizes] == [1, 0, 0]
    assert str(Product(1, 2, 3, 4, True)) == "product 1x2x3 by 3x4 of 16-bit integers"


def test_activations_are_widened_where_they_are_computed():
    """quantize, then a pool, a padded convolution, and a residual that reads the same numbers: bytes are stored nowhere."""
    b = GraphBuilder()
    x, s = b.input("x", "float32", (1, 16, 12, 12)), b.constant(np.array(0.05, np.float32))
    (q,) = b.add(QUANTIZE, [x, s, None], {"axis": 1, "block": 0, "dtype": "uint8", "precision": "float32"})
    (pooled,) = b.add(MAX_POOL, [q], {"kernel": (2, 2), "strides": (2, 2), "dilations": (1, 1)})
    (padded,) = b.add(PAD, [pooled, None], {"before": (0, 0, 1, 1), "after": (0, 0, 1, 1)})
    attrs = {"strides": (1, 1), "dilations": (1, 1), "group": 1}
    (sums,) = b.add(CONV, [padded, b.constant(integers("int8", 16, 16, 3, 3))], attrs)
    scaled = {"axis": 1, "block": 0, "dtype": "float32"}
    (y,) = b.add(DEQUANTIZE, [sums, s, None], scaled)
    graph = b.build(b.add(ADD, [y, b.add(DEQUANTIZE, [pooled, s, None], scaled)[0]]))
    widened = merge_equal(use_words(graph))
    readers = {n.op.name for n in widened.nodes for v in n.inputs if v is not None and v.dtype == "uint8"}
    assert readers == {"cast"} and operators(widened).count("max_pool") == 1
    given = RNG.standard_normal((1, 16, 12, 12)).astype(np.float32) * 4
    want = evaluated(graph, given)
    np.testing.assert_array_equal(evaluated(widened, given), want)
    if HASWELL.runs_on(Target.host()):
        artifact = compile_graph(graph, CompileOptions(HASWELL))
        np.testing.assert_allclose(*tcomp.Module.load(artifact).run({"x": given}).values(), want, rtol=1e-6)


def test_bytes_that_no_product_sums_stay_bytes():
    depthwise = convolution((1, 8, 6, 6), integers("int8", 8, 1, 3, 3), (1, 1), group=8)
    assert str(use_words(depthwise)) == str(depthwise)
