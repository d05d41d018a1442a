"""16-bit floats by float32 arithmetic: rounded where the graph rounds, or where it matters; weights widened once, or kept where memory or
an instruction for their products decides."""

import ml_dtypes
import numpy as np
import pytest

from tcomp.ir.expr import dim
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.interpreters import graph as interpreter
from tcomp.ops.elementwise import ADD, CAST, CLIP, DIV, EQUAL, MUL, SIGMOID, SUB
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import CONCAT, GATHER, RESHAPE, TRANSPOSE
from tcomp.ops.nn import CONV
from tcomp.options import CompileOptions
from tcomp.passes.cse import merge_equal
from tcomp.passes.half_floats import widen_half_floats
from tcomp.pipeline import compile_graph
from tcomp.runtime import Module
from tcomp.target import CpuTarget

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
HOST = CpuTarget.parse("cpu -mcpu=skylake-avx512")  # without instructions for 16-bit floats
RNG = np.random.default_rng(5)


def widened(graph):
    return widen_half_floats(graph, HOST)


def operators(graph):
    return [node.op.name for node in graph.nodes]


def given(graph, inputs):
    return {v.name: a for v, a in zip(graph.inputs, inputs, strict=True)}


def interpreted(graph, inputs):
    return list(interpreter.evaluate_graph(graph, given(graph, inputs)).values())


def native(graph, inputs):
    return list(Module(compile_graph(graph, CompileOptions(threads=1))).run(given(graph, inputs)).values())


def chain(dtype):
    """(x + y) / (x * y), clipped, - x; and whether x * y == y * x."""
    b = GraphBuilder()
    x, y = b.input("x", dtype, (7, 33)), b.input("y", dtype, (7, 33))
    (s,), (p,) = b.add(ADD, [x, y]), b.add(MUL, [x, y])
    (q,) = b.add(DIV, [s, p])
    (d,) = b.add(SUB, [b.add(CLIP, [q, b.constant(np.array(-2, DTYPES[dtype]), dtype=dtype), None])[0], x])
    (equal,) = b.add(EQUAL, [p, b.add(MUL, [y, x])[0]])
    return b.build([d, equal])


def test_chains_of_elementwise_operators_are_rounded_where_the_graph_rounds():
    """Sums, products and quotients in float32 that are rounded again are the nearest numbers, so that nothing differs."""
    graph, dtype = chain("float16"), "float16"
    after = widened(graph)
    assert all(v.dtype in ("float32", "bool") for n in after.nodes if n.op is not CAST for v in n.outputs)
    assert operators(merge_equal(after)).count("round_to") == 3 + 1  # of s, p, q (clipped numbers are none but these), and of y * x
    inputs = [(RNG.standard_normal((7, 33)) * 4).astype(DTYPES[dtype]) for _ in range(2)]
    expected = interpreted(graph, inputs)
    for got in (interpreted(after, inputs), native(graph, inputs)):
        for a, e in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), e.view(np.uint8))


def test_chains_of_bfloat16_are_rounded_where_they_are_compared():
    """What is computed without steps keeps more bits than the graph says, so that results are nearer to those without rounding."""
    graph, dtype = chain("bfloat16"), DTYPES["bfloat16"]
    after = widened(graph)
    assert operators(merge_equal(after)).count("round_to") == 2  # of what is compared
    inputs = [(RNG.standard_normal((7, 33)) * 4).astype(dtype) for _ in range(2)]
    x, y = (a.astype(np.float64) for a in inputs)
    exact = np.maximum((x + y) / (x * y), -2) - x
    rounded, equal = interpreted(graph, inputs)
    for got, same in (interpreted(after, inputs), native(graph, inputs)):
        np.testing.assert_array_equal(same, equal)
        errors = [np.abs(a.astype(np.float64) - exact).mean() for a in (got, rounded)]
        assert errors[0] < errors[1]
        np.testing.assert_allclose(got.astype(np.float64), exact, rtol=float(ml_dtypes.finfo(dtype).eps))


def dense_layers(channels, outputs):
    """Pixels times weights, scaled, times weights again; and the sum of both."""
    b = GraphBuilder()
    x, dtype = b.input("x", "bfloat16", (1, channels, 9, 7)), DTYPES["bfloat16"]
    attrs = {"strides": (1, 1), "dilations": (1, 1), "group": 1}

    def weights(*shape):
        return b.constant((RNG.standard_normal(shape) / np.sqrt(shape[1])).astype(dtype), dtype="bfloat16")

    (first,) = b.add(SIGMOID, b.add(CONV, [x, weights(outputs, channels, 1, 1)], attrs))
    (second,) = b.add(CONV, [first, weights(outputs, outputs, 1, 1)], attrs)
    (rows,) = b.add(RESHAPE, [b.add(ADD, [first, second])[0]], {"shape": (outputs, 63)})
    (rows,) = b.add(TRANSPOSE, [rows], {"perm": (1, 0)})
    return b.build(b.add(MATMUL, [rows, weights(40, outputs)], {"transpose_b": True}))


@pytest.mark.parametrize(
    ("channels", "outputs", "kept"), [(16, 32, 3), (3, 32, 3), (16, 33, 2)], ids=["even", "a channel of zeros", "odd rows"]
)
def test_numbers_are_multiplied_as_they_are_where_an_instruction_does_so(channels, outputs, kept):
    graph = dense_layers(channels, outputs)
    after = widen_half_floats(graph, CpuTarget.parse("cpu -mcpu=znver4"))
    assert [v.dtype for v in after.constants].count("bfloat16") == kept
    assert {v.dtype for v in widen_half_floats(graph, CpuTarget.parse("cpu -mcpu=znver3")).constants} == {"float32"}
    inputs = [RNG.standard_normal((1, channels, 9, 7)).astype(DTYPES["bfloat16"])]
    (expected,) = interpreted(graph, inputs)
    for (got,) in (interpreted(after, inputs), native(graph, inputs)):
        np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), atol=2e-2)


def test_tile_registers_multiply_more_than_winograd_saves():
    b = GraphBuilder()
    x, w = (
        b.input("x", "bfloat16", (1, 128, 30, 30)),
        b.constant(RNG.standard_normal((128, 128, 3, 3)).astype(DTYPES["bfloat16"]), dtype="bfloat16"),
    )
    graph = b.build(b.add(CONV, [x, w], {"strides": (1, 1), "dilations": (1, 1), "group": 1}))
    for cpu, dtype in (("cooperlake", "float32"), ("sapphirerapids", "bfloat16")):
        (constant,) = widen_half_floats(graph, CpuTarget.parse(f"cpu -mcpu={cpu}")).constants
        assert constant.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_widened_once(dtype):
    b = GraphBuilder()
    x, w = b.input("x", dtype, (5, 24)), b.constant(RNG.standard_normal((24, 17)).astype(DTYPES[dtype]), dtype=dtype)
    (y,) = b.add(SIGMOID, b.add(MATMUL, [x, w]))
    graph = b.build([y])
    after = widened(graph)
    assert {v.dtype for v in after.constants} == {"float32"}
    inputs = [RNG.standard_normal((5, 24)).astype(DTYPES[dtype])]
    (expected,), eps = interpreted(graph, inputs), float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    for (got,) in (interpreted(after, inputs), native(graph, inputs)):
        np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("rows, kept", [(1, True), (256, False), ("n", True)])
def test_large_weights_stay_where_few_rows_use_them(rows, kept):
    b = GraphBuilder()
    x = b.input("x", "float16", (dim("n") if rows == "n" else rows, 1024))
    columns = HOST.l2 // 1024
    (y,) = b.add(MATMUL, [x, b.constant(np.ones((1024, columns), np.float16))])
    after = widened(b.build([y]))
    assert ({v.dtype for v in after.constants} == {"float16"}) is kept


def test_movements_do_not_round_and_casts_of_the_model_stay():
    b = GraphBuilder()
    x = b.input("x", "float32", (3, 4))
    (half,) = b.add(CAST, [x], {"dtype": "float16"})
    (moved,) = b.add(TRANSPOSE, [half], {"perm": (1, 0)})
    (again,) = b.add(CAST, [moved], {"dtype": "float32"})
    graph = b.build([b.add(MUL, [again, again])[0], b.add(CAST, [half], {"dtype": "int32"})[0]])
    after = widened(graph)
    assert operators(after).count("round_to") >= 1 and not any(v.dtype == "float16" for n in after.nodes for v in n.inputs if v)
    inputs = [RNG.standard_normal((3, 4)).astype(np.float32) * 100]
    for got in (interpreted(after, inputs), native(graph, inputs)):
        for a, e in zip(got, interpreted(graph, inputs), strict=True):
            np.testing.assert_array_equal(a, e)


def test_caches_are_joined_as_they_are():
    """A row is rounded and joined to what comes from outside in 16 bits: it is that which goes out and is read again."""
    b = GraphBuilder()
    past, row = b.input("past", "float16", (9, 8)), b.input("row", "float16", (1, 8))
    (new,) = b.add(MUL, [row, row])
    (joined,) = b.add(CONCAT, [past, new], {"axis": 0})
    graph = b.build([joined, b.add(MATMUL, [new, b.add(TRANSPOSE, [joined], {"perm": (1, 0)})[0]])[0]])
    after = widened(graph)
    assert [v.dtype for n in after.nodes if n.op is CONCAT for v in n.outputs] == ["float16"]
    inputs = [RNG.standard_normal((rows, 8)).astype(np.float16) for rows in (9, 1)]
    for got, expected in zip(native(graph, inputs), interpreted(graph, inputs), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=2e-3, atol=2e-3)


def test_overflow_is_infinite_as_in_16_bits():
    b = GraphBuilder()
    x = b.input("x", "float16", (4,))
    (large,) = b.add(MUL, [x, x])
    graph = b.build(b.add(DIV, [x, large]))
    inputs = [np.array([1, 300, -2, 60000], np.float16)]
    with np.errstate(over="ignore"):
        (expected,) = interpreted(graph, inputs)
    np.testing.assert_array_equal(native(graph, inputs)[0], expected)
    assert expected[1] == 0


def test_tables_stay_as_they_are():
    b = GraphBuilder()
    table = RNG.standard_normal((50, 8)).astype(np.float16)
    (rows,) = b.add(GATHER, [b.constant(table, "table"), b.input("i", "int64", (3,))], {"axis": 0})
    graph = b.build(b.add(CAST, [rows], {"dtype": "float32"}, "y"))
    assert [a.dtype for a in widened(graph).constants.values()] == [np.float16]
    index = np.array([7, 0, 49])
    np.testing.assert_array_equal(native(graph, [index])[0], table[index].astype(np.float32))
