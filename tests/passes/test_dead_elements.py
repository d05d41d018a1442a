"""Elements that nothing reads are not computed, and what is read stays the same."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir.expr import dim
from tcomp.ir.graph import IF, GraphBuilder, Node, Value
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.simplify import as_dim
from tcomp.ir.verify.graph import verify_graph
from tcomp.ops.elementwise import ADD, MUL, NEG, RELU
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import CONCAT, EXPAND, GATHER, RESHAPE, SLICE, TRANSPOSE, TRILU
from tcomp.ops.nn import CONV
from tcomp.ops.reduction import LAYER_NORM, REDUCE_SUM, SOFTMAX
from tcomp.options import CompileOptions
from tcomp.passes.dead_elements import eliminate_dead_elements
from tcomp.passes.rewrite import Notes
from tcomp.pipeline import compile_graph
from tcomp.runtime import Module
from tcomp.target import CpuTarget

N = dim("n", 2)
RNG = np.random.default_rng(5)


def weights(b, *shape):
    return b.constant(RNG.standard_normal(shape).astype(np.float32), "w")


def taken(b, x, axis, start, extent, step=1):
    """x[..., start : start + extent * step : step, ...]"""
    starts, steps, shape = [0] * len(x.shape), [1] * len(x.shape), list(x.shape)
    starts[axis], steps[axis], shape[axis] = start, step, extent
    return b.add(SLICE, [x], {"starts": tuple(starts), "steps": tuple(steps), "shape": tuple(shape)}, "taken")[0]


def computed(graph):
    """(operator, shape of its first result), node by node, without what only cuts."""
    return [(node.op.name, node.outputs[0].shape) for node in graph.nodes if node.op is not SLICE]


def layer(b, x, heads, width):
    """A layer of a transformer on x: [1, n, heads * width]."""
    (normed, *_) = b.add(LAYER_NORM, [x, None, None], {"axis": 2, "epsilon": 1e-5}, "norm")
    apart = {"shape": (1, x.shape[1], heads, width)}
    q, k, v = (b.add(RESHAPE, b.add(MATMUL, [normed, weights(b, heads * width, heads * width)], {}, name), apart)[0] for name in "qkv")
    q, v = (b.add(TRANSPOSE, [t], {"perm": (0, 2, 1, 3)})[0] for t in (q, v))
    (k,) = b.add(TRANSPOSE, [k], {"perm": (0, 2, 3, 1)})
    (shares,) = b.add(SOFTMAX, b.add(MATMUL, [q, k], {}, "scores"), {"axes": (3,)})
    (mixed,) = b.add(TRANSPOSE, b.add(MATMUL, [shares, v], {}, "mixed"), {"perm": (0, 2, 1, 3)})
    (joined,) = b.add(RESHAPE, [mixed], {"shape": x.shape})
    (x,) = b.add(ADD, [x, *b.add(MATMUL, [joined, weights(b, heads * width, heads * width)], {}, "projected")])
    (wide,) = b.add(RELU, b.add(MATMUL, [x, weights(b, heads * width, 24)], {}, "wide"))
    return b.add(ADD, [*b.add(MATMUL, [wide, weights(b, 24, heads * width)], {}, "narrow"), x])[0]


@pytest.mark.parametrize("rows", [7, N], ids=["seven", "symbolic"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_classifier_of_one_token(unchanged, rows, place):
    """Of the last layer, all rows are needed of the norm, the keys and the values."""
    b, notes = GraphBuilder(), Notes()
    x = b.input("x", "float32", (1, rows, 8))
    y = taken(b, layer(b, layer(b, x, 2, 4), 2, 4), 1, 0 if place == "first" else as_dim(rows - 1), 1)
    before = b.build(b.add(MATMUL, [*b.add(RESHAPE, [y], {"shape": (1, 8)}), weights(b, 8, 3)], {}, "logits"))
    after = unchanged(before, eliminate_dead_elements(before, notes), rtol=1e-5, dims={"n": 6})
    half = len(computed(before)) // 2 - 1
    whole = [op for op, shape in computed(after)[half:] if rows in shape[:3] and op in ("matmul", "layer_norm", "softmax", "relu")]
    assert computed(after)[:half] == computed(before)[:half] and whole == ["layer_norm", "matmul", "matmul"]
    assert notes.lines["wide"] == [f"eliminate_dead_elements: of [1, {rows}, 24] only [1, 1, 24] is read"]


def test_a_gather_at_a_constant_position_is_a_cut(unchanged):
    b = GraphBuilder()
    (y,) = b.add(NEG, [b.input("x", "float32", (3, 8, 5))])
    before = b.build(b.add(RELU, b.add(GATHER, [y, b.constant(np.array(-2))], {"axis": 1})))
    after = unchanged(before, eliminate_dead_elements(before))
    assert computed(after) == [("neg", (3, 1, 5)), ("reshape", (3, 5)), ("relu", (3, 5))]


def test_a_box_around_what_several_read(unchanged):
    b = GraphBuilder()
    (y,) = b.add(NEG, [b.input("x", "float32", (16, 3))])
    before = b.build([*b.add(RELU, [taken(b, y, 0, 2, 3)]), *b.add(RELU, [taken(b, y, 0, 4, 6)])])
    assert computed(unchanged(before, eliminate_dead_elements(before))) == [("neg", (8, 3)), ("relu", (3, 3)), ("relu", (6, 3))]


def test_a_cut_of_a_cut(unchanged):
    b = GraphBuilder()
    (y,) = b.add(NEG, [b.input("x", "float32", (40, 3))])
    before = b.build(b.add(RELU, [taken(b, taken(b, y, 0, 3, 12, 3), 0, 2, 4, 1)]))
    after = unchanged(before, eliminate_dead_elements(before))
    assert computed(after) == [("neg", (10, 3)), ("relu", (4, 3))]


def test_where_nothing_is_left_out_the_graph_stays(unchanged):
    """Whole outputs; halves that are all read; nearly all; every second."""
    b = GraphBuilder()
    x = b.input("x", "float32", (8, 6))
    y, z, t, u = (b.add(NEG, [x], {}, name)[0] for name in "yztu")
    taken_apart = [b.add(RELU, [taken(b, z, 1, n, 3)])[0] for n in (0, 3)]
    before = b.build([y, taken(b, y, 0, 0, 1), *taken_apart, taken(b, t, 0, 1, 7), taken(b, u, 0, 0, 4, 2)])
    assert computed(unchanged(before, eliminate_dead_elements(before))) == computed(before)


CASES = {
    "rows of a product": (MATMUL, [(9, 4), (4, 5)], {}, 0, (2, 5)),
    "columns of a product": (MATMUL, [(9, 4), (4, 8)], {}, 1, (9, 2)),
    "matrices": (MATMUL, [(8, 3, 4), (4, 8)], {}, 0, (2, 3, 8)),
    "a transposed operand": (MATMUL, [(9, 4), (8, 4)], {"transpose_b": True}, 1, (9, 2)),
    "images": (CONV, [(4, 3, 6, 6), (5, 3, 3, 3)], "conv", 0, (2, 5, 4, 4)),
    "filters": (CONV, [(1, 3, 6, 6), (8, 3, 3, 3)], "conv", 1, (1, 2, 4, 4)),
    "repeated": (EXPAND, [(1, 5)], {"shape": (8, 5)}, 0, (2, 5)),
    "a row added": (ADD, [(8, 5), (5,)], {}, 0, (2, 5)),
    "a column added": (ADD, [(8, 5), (8, 1)], {}, 0, (2, 5)),
    "other rows": (SOFTMAX, [(8, 5)], {"axes": (1,)}, 0, (2, 5)),
    "sums": (REDUCE_SUM, [(8, 5)], {"axes": (1,), "keepdims": False}, 0, (2,)),
    "an axis split": (RESHAPE, [(8, 12)], {"shape": (8, 3, 4)}, 0, (2, 3, 4)),
    "axes merged behind": (RESHAPE, [(8, 3, 4)], {"shape": (8, 12)}, 0, (2, 12)),
    "axes merged before": (RESHAPE, [(3, 4, 8)], {"shape": (12, 8)}, 1, (12, 2)),
    "turned": (TRANSPOSE, [(3, 8)], {"perm": (1, 0)}, 0, (2, 3)),
    "beside each other": (CONCAT, [(8, 3), (8, 2)], {"axis": 1}, 0, (2, 5)),
}
WHOLE = {
    "its own rows": (SOFTMAX, [(8, 5)], {"axes": (0,)}, 0),
    "windows": (CONV, [(1, 3, 9, 6), (5, 3, 3, 3)], "conv", 2),
    "merged": (RESHAPE, [(4, 2, 5)], {"shape": (8, 5)}, 0),
    "by place": (TRILU, [(8, 8), None], {"diagonal": 0, "upper": True}, 0),
    "one below the other": (CONCAT, [(4, 3), (4, 3)], {"axis": 0}, 0),
    "in two roles": (MATMUL, [(8, 4), 0], {"transpose_b": True}, 0),
}
PLAIN = {"strides": (1, 1), "dilations": (1, 1), "group": 1}


def applied(op, shapes, attrs, axis):
    b = GraphBuilder()
    inputs = []
    for n, shape in enumerate(shapes):
        inputs.append(inputs[shape] if isinstance(shape, int) else None if shape is None else b.input(f"x{n}", "float32", shape))
    (y,) = b.add(op, inputs, PLAIN if attrs == "conv" else attrs, "op")
    return b.build(b.add(NEG, [taken(b, y, axis, 1, 2)]))


@pytest.mark.parametrize("case", CASES)
def test_operators_that_may_be_cut(unchanged, case):
    *what, shape = CASES[case]
    operator: Any = what[0]
    after = unchanged(before := applied(*what), eliminate_dead_elements(before), rtol=1e-6)
    assert computed(after) == [(operator.name, shape), ("neg", shape)]


@pytest.mark.parametrize("case", WHOLE)
def test_operators_that_may_not(unchanged, case):
    before = applied(*WHOLE[case])
    assert computed(unchanged(before, eliminate_dead_elements(before))) == computed(before)


def test_within_branches():
    """A body's outputs are whole; what it computes for them need not be."""
    f = ("float32", (8, 3))

    def body(start):
        b = GraphBuilder()
        (y,) = b.add(NEG, [b.input("x", *f)])
        return b.build(b.add(RELU, [taken(b, y, 0, start, 2)]))

    b = GraphBuilder()
    which, x, out = b.input("which", "bool", ()), b.input("x", *f), Value("out", "float32", (2, 3))
    b.append(Node(IF, (which, x), (out,), {}, "if", (body(0), body(5))))
    before = b.build([out])
    after = eliminate_dead_elements(before)
    verify_graph(after)
    assert [computed(body) for body in after.nodes[0].bodies] == [[("neg", (2, 3)), ("relu", (2, 3))]] * 2
    for which in (True, False):
        given_ = {"which": np.array(which), "x": RNG.standard_normal((8, 3)).astype(np.float32)}
        np.testing.assert_array_equal(evaluate_graph(after, given_)["out"], evaluate_graph(before, given_)["out"])


def test_native_code(unchanged):
    b = GraphBuilder()
    y = taken(b, layer(b, b.input("x", "float32", (1, 37, 32)), 2, 16), 1, 0, 1)
    before = b.build(b.add(NEG, [y], {}, "y"))
    feeds = {"x": RNG.standard_normal((1, 37, 32)).astype(np.float32)}
    found = Module.load(compile_graph(before, CompileOptions(CpuTarget.parse("cpu"), threads=1))).run(feeds)
    np.testing.assert_allclose(found["y"], evaluate_graph(before, feeds)["y"], rtol=1e-4, atol=1e-4)


def _steps(b, x, choice, other):
    """One more operator over x: [rows, columns]; `other` is an earlier value of the same shape, or x."""
    rows, columns = x.shape
    match choice:
        case "neg":
            return b.add(NEG, [x])
        case "add":
            return b.add(ADD, [x, other if other.shape == x.shape else x])
        case "scale":
            return b.add(MUL, [x, weights(b, columns)])
        case "product":
            return b.add(MATMUL, [x, weights(b, columns, 6)])
        case "rows mixed":
            return b.add(MATMUL, [weights(b, 6, rows), x])
        case "norm":
            return b.add(LAYER_NORM, [x, None, None], {"axis": 1, "epsilon": 1e-5})
        case "turn":
            return b.add(TRANSPOSE, [x], {"perm": (1, 0)})
        case "split":
            return b.add(RESHAPE, b.add(NEG, b.add(RESHAPE, [x], {"shape": (rows, 2, columns // 2)})), {"shape": (rows, columns)})
        case "cut":
            return (taken(b, x, 0, rows // 3, rows // 2),)
        case "softmax":
            return b.add(SOFTMAX, [x], {"axes": (0,)})
    raise AssertionError(choice)


CHOICES = ["neg", "add", "scale", "product", "rows mixed", "norm", "turn", "split", "cut", "softmax"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 5)), min_size=1, max_size=9), st.integers(0, 3), st.integers(1, 2))
def test_random_graphs(choices, start, extent):
    b = GraphBuilder()
    values = [b.input("x", "float32", (8, 6))]
    for choice, earlier in choices:
        x = values[-1]
        if choice == "cut" and x.shape[0] < 4 or choice == "split" and x.shape[1] % 2:
            continue
        values.append(_steps(b, x, choice, values[earlier % len(values)])[0])
    start = min(start, values[-1].shape[0] - 1)
    before = b.build(b.add(NEG, [taken(b, values[-1], 0, start, min(extent, values[-1].shape[0] - start))]))
    after = eliminate_dead_elements(before)
    verify_graph(after)
    feeds = {"x": RNG.standard_normal((8, 6)).astype(np.float32)}
    expected, found = evaluate_graph(before, feeds), evaluate_graph(after, feeds)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_nothing_is_read_of_an_axis_of_one():
    b = GraphBuilder()
    x = b.input("x", "float32", (2, 3, 1))
    one = taken(b, b.add(NEG, [x])[0], 1, 1, 1)
    after = eliminate_dead_elements(b.build(b.add(NEG, [taken(b, one, 2, 0, 0)])))
    verify_graph(after)
    assert evaluate_graph(after, {"x": np.ones((2, 3, 1), np.float32)})[after.outputs[0].name].shape == (2, 1, 0)
