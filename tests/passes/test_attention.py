"""Products with a softmax become one operator, and one kernel with their scores, where rows are long: when, and that it computes the same."""

import numpy as np
import pytest

from tcomp.ir import te
from tcomp.ir.fallback import Fallback
from tcomp.ir.graph import KERNEL, GraphBuilder
from tcomp.ops.elementwise import ADD, FULL, RELU
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import TRANSPOSE
from tcomp.ops.reduction import REDUCE_MAX, SOFTMAX
from tcomp.options import CompileOptions, Report
from tcomp.passes.algorithms import AttentionTiles, join_attention
from tcomp.passes.partition import partition
from tcomp.passes.rewrite import Notes
from tcomp.pipeline import graph_passes
from tcomp.target import CudaTarget

NEAR = 1 << 16


def attention(rows=160, keys=256, dtype="float32", axis=2, after=(), also=None, batch=(2,), transposed=None, width=4):
    """softmax(q k + mask) v, each of them an input; `also` reads the softmax, or the scores, for a second result."""
    b = GraphBuilder()
    q, k = b.input("q", dtype, (*batch, rows, 8)), b.input("k", dtype, (*batch, 8, keys))
    v, mask = b.input("v", dtype, (*batch, keys, width)), b.input("mask", dtype, (*(1 for _ in batch), 1, keys))
    (scores,) = b.add(MATMUL, [q, k])
    (scores,) = b.add(ADD, [scores, mask])
    (weights,) = b.add(SOFTMAX, [scores], {"axes": (axis,)})
    values = weights
    for op in after:
        (values,) = b.add(op, [values])
    (y,) = b.add(MATMUL, [values, v], transposed or {})
    more = {"weights": weights, "scores": scores}
    return b.build([y, *(b.add(RELU, [more[also]]) if also else ())])


def operators(graph):
    return [node.op.name for node in graph.nodes]


JOINED = ["matmul", "add", "softmax_product"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_the_rewrite_keeps_the_result(unchanged, batch, dtype):
    before = attention(batch=batch, axis=len(batch) + 1, dtype=dtype)
    assert operators(unchanged(before, join_attention(before, NEAR), rtol=1e-5)) == JOINED


def test_16_bits_on_gpus(unchanged):
    """Exponentials are rounded instead of the softmax, and the sums once."""
    before = attention(dtype="float16")
    assert operators(unchanged(before, join_attention(before, NEAR, None, AttentionTiles(1, range(1, 9))), rtol=1e-2)) == JOINED


def test_scores_that_are_read_elsewhere_may_stay(unchanged):
    before = attention(also="scores")
    assert operators(unchanged(before, join_attention(before, NEAR), rtol=1e-5)) == [*JOINED, "relu"]


def test_nodes_without_inputs_are_passed_over():
    b = GraphBuilder()
    x = b.input("x", "float32", (3,))
    (ones,) = b.add(FULL, [], {"shape": (3,), "value": 1.0, "dtype": "float32"})
    graph = b.build(b.add(ADD, [x, ones]))
    assert operators(join_attention(graph, NEAR)) == ["full", "add"]


@pytest.mark.parametrize(
    "options, why",
    [
        ({"rows": 64}, "the scores stay in the cache"),
        ({"rows": 1000, "keys": 255}, "the scores stay in the cache"),
        ({"axis": 1}, "the sums are not along the rows of the softmax"),
        ({"also": "weights"}, "the softmax is used elsewhere"),
        ({"dtype": "float16"}, "not for float16"),
        ({"rows": te.var("n")}, "the number of scores is not bounded"),
        ({"rows": te.var("n", 1, 64)}, "the scores stay in the cache"),
        ({"after": (RELU,)}, None),
    ],
    ids=["few rows", "short rows", "columns", "weights", "float16", "unbounded", "bounded", "another operator"],
)
def test_what_is_left_alone(options, why):
    graph, notes = attention(**options), Notes()
    assert operators(join_attention(graph, NEAR, notes)) == operators(graph)
    found = [line for lines in notes.lines.values() for line in lines]
    assert found == ([] if why is None else [f"one_pass: {why}"])


def test_symbolic_sizes_count_with_their_bounds(unchanged):
    n = te.var("n", 1, 4096)
    before = attention(rows=n, keys=n)
    assert operators(unchanged(before, join_attention(before, NEAR), rtol=1e-5, dims={n: 7})) == JOINED


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scores_are_computed_in_the_kernel_of_their_reader(dtype):
    edges: list[tuple[str, Fallback]] = []
    graph = partition(join_attention(attention(dtype=dtype), NEAR, None, AttentionTiles(1, range(1, 9))), edges)
    (kernel,) = (n for n in graph.nodes if n.op is KERNEL)
    assert operators(kernel.bodies[0]) == JOINED and not edges


def test_nothing_else_is_computed_in_the_kernel_of_another_reduction():
    """A softmax of scores, and their maximum, are not folds of a product."""
    assert len(partition(attention()).nodes) == 3
    b = GraphBuilder()
    q, k = b.input("q", "float32", (160, 8)), b.input("k", "float32", (8, 256))
    (scores,) = b.add(MATMUL, [q, k])
    graph = b.build(b.add(REDUCE_MAX, [scores], {"axes": (1,), "keepdims": True}))
    assert len(partition(graph).nodes) == 2


def test_scores_with_two_readers_stay_a_kernel_of_their_own():
    graph = partition(join_attention(attention(also="scores"), NEAR))
    assert len(graph.nodes) == 3


def test_a_product_of_weights_that_are_no_softmax_of_a_product(unchanged):
    """x may come from anywhere: the kernel reads it."""
    b = GraphBuilder()
    x, v = b.input("x", "float32", (2, 160, 256)), b.input("v", "float32", (2, 256, 4))
    (t,) = b.add(TRANSPOSE, [x], {"perm": (0, 1, 2)})
    (weights,) = b.add(SOFTMAX, [t], {"axes": (2,)})
    before = b.build(b.add(MATMUL, [weights, v]))
    assert operators(unchanged(before, join_attention(before, NEAR), rtol=1e-5)) == ["transpose", "softmax_product"]


@pytest.mark.parametrize("batch, joined", [((2,), False), ((3,), True), ((te.var("b", 1, 3),), True), ((te.var("b", 1),), False)], ids=str)
def test_few_rows_stay_apart_where_many_are_wanted(batch, joined):
    """A GPU has to be kept busy; of matrices whose number is not bounded there may be one."""
    graph, notes = attention(batch=batch), Notes()
    assert (operators(join_attention(graph, NEAR, notes, AttentionTiles(400, range(1, 9)))) == JOINED) == joined
    assert joined or "too few rows" in str(notes.lines)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_on_gpus(precision):
    """Where the scores would not stay in a block's shared memory, rows are enough for half of the multiprocessors, and a block can compute all
    columns of some rows."""
    joined = dict(graph_passes(CompileOptions(CudaTarget.parse(f"cuda -arch=sm_80 -precision={precision}")), Report()))["attention"]
    sizes = (
        ((512, 512, 12, 64), (256, 256, 12, 64)),
        ((256, 256, 4, 64), (160, 255, 64, 64), (1, 4096, 512, 64), (512, 512, 12, 8), (512, 512, 12, 600)),
    )
    for wanted, several in zip((JOINED, ["matmul", "add", "softmax", "matmul"]), sizes, strict=True):
        for rows, keys, batch, width in several:
            assert operators(joined(attention(rows, keys, batch=(batch,), width=width))) == wanted
    assert operators(joined(attention(512, 512, batch=(12,), width=64, dtype="float16"))) == JOINED


def test_infinite_scores():
    """Rows of -inf give NaN, as they did."""
    from tcomp.ir.interpreters.graph import evaluate_graph

    rng = np.random.default_rng(2)
    before = attention()
    inputs = {v.name: rng.normal(size=v.shape).astype("float32") for v in before.inputs}
    inputs["q"][0, 3], inputs["k"][0] = -np.inf, np.abs(inputs["k"][0])
    inputs["mask"][..., :100] = -np.inf
    with np.errstate(all="ignore"):
        (wanted,), (found,) = (list(evaluate_graph(g, inputs).values()) for g in (before, join_attention(before, NEAR)))
    assert np.isnan(wanted[0, 3]).all() and not np.isnan(wanted[1]).any()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
