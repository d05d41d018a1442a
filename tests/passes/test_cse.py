"""Common subexpressions and equal constants."""

import numpy as np
import pytest

from tcomp.ir.graph import IF, GraphBuilder, Node, Value
from tcomp.ops.elementwise import ADD, CAST, EXP, LEAKY_RELU, MUL, NEG
from tcomp.passes.cse import merge_equal


def operators(graph):
    return [node.op.name for node in graph.nodes]


def test_equal_nodes_merge_transitively(unchanged):
    b = GraphBuilder()
    x, y = b.input("x", "float32", (3,)), b.input("y", "float32", (3,))
    (p,), (q,) = b.add(EXP, [x], name="p"), b.add(EXP, [x], name="q")
    (r,), (s,), (t,) = b.add(ADD, [p, y]), b.add(ADD, [q, y]), b.add(ADD, [y, p])
    (z,) = b.add(MUL, b.add(MUL, [r, s]) + (t,))
    before = b.build([z])
    assert operators(unchanged(before, merge_equal(before))) == ["exp", "add", "add", "mul", "mul"]


@pytest.mark.parametrize("other", [{"alpha": 0.25}, {"alpha": -0.0}])
def test_attributes_are_compared_by_bits(unchanged, other):
    b = GraphBuilder()
    x = b.input("x", "float32", (3,))
    values = [b.add(LEAKY_RELU, [x], attrs)[0] for attrs in ({"alpha": 0.0}, other, {"alpha": 0.0})]
    (y,) = b.add(ADD, b.add(ADD, values[:2]) + (values[2],))
    before = b.build([y])
    assert operators(unchanged(before, merge_equal(before))).count("leaky_relu") == 2


def test_equal_constants_merge(unchanged):
    b = GraphBuilder()
    x = b.input("x", "float32", (2, 2))
    shared = np.arange(4, dtype=np.float32).reshape(2, 2)
    arrays = [shared, shared, np.asfortranarray(shared), -shared, np.zeros((2, 2), np.float32), -np.zeros((2, 2), np.float32)]
    for array in arrays:
        (x,) = b.add(ADD, [x, b.constant(array)])
    before = b.build([x])
    after = unchanged(before, merge_equal(before))
    assert len(after.constants) == 4 and len(after.nodes) == 6


def test_equal_outputs_stay_two_values(unchanged):
    b = GraphBuilder()
    x = b.input("x", "float32", (3,))
    (p,), (q,) = b.add(EXP, [x], name="p"), b.add(EXP, [x], name="q")
    before = b.build([p, q])
    after = unchanged(before, merge_equal(before))
    assert after.outputs == (p, q) and operators(after) == ["exp", "identity"]
    assert operators(merge_equal(after)) == ["exp", "identity"]


def test_types_and_bodies(unchanged):
    def body():
        g = GraphBuilder("body")
        x = g.input("x", "float32", (3,))
        return g.build(g.add(ADD, g.add(NEG, [x]) + g.add(NEG, [x])))

    b = GraphBuilder()
    c, x = b.input("c", "bool", ()), b.input("x", "float32", (3,))
    y = Value("y", "float32", (3,))
    b.append(Node(IF, (c, x), (y,), {}, "if", (body(), body())))
    outputs = [y, *b.add(CAST, [x], {"dtype": "float64"}), *b.add(CAST, [x], {"dtype": "float16"})]
    before = b.build(outputs)
    after = unchanged(before, merge_equal(before))
    assert operators(after) == ["if", "cast", "cast"]
    assert [operators(g) for g in after.nodes[0].bodies] == [["neg", "add"]] * 2
