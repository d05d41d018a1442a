"""Constant folding."""

import numpy as np

from tcomp.ir.expr import dim
from tcomp.ir.graph import IF, LOOP, GraphBuilder, Node, Value
from tcomp.ops.elementwise import ADD, EXP, MUL, NEG
from tcomp.ops.movement import ARANGE, EXPAND, GATHER, TRANSPOSE
from tcomp.passes.fold import fold_constants
from tcomp.passes.rewrite import Notes

F = ("float32", (3,))


def operators(graph):
    return [node.op.name for node in graph.nodes]


def test_what_is_constant_is_computed(unchanged):
    b = GraphBuilder()
    x, c = b.input("x", "float32", (3, 4)), b.constant(np.arange(12, dtype=np.float32).reshape(4, 3))
    (w,) = b.add(TRANSPOSE, b.add(EXP, [c]), {"perm": (1, 0)})
    (i,) = b.add(ARANGE, [], {"start": 2, "step": 3, "count": 4, "dtype": "float32"})
    before = b.build(b.add(MUL, b.add(ADD, [x, w]) + (i,)))
    after = unchanged(before, fold_constants(before))
    assert operators(after) == ["add", "mul"] and len(after.constants) == 2


def test_a_constant_output_is_copied(unchanged):
    b = GraphBuilder()
    c = b.constant(np.ones(3, np.float32))
    y, z = b.add(NEG, [c], name="y")[0], b.add(EXP, [c], name="z")[0]
    before = b.build([y, z])
    after = unchanged(before, fold_constants(before))
    assert operators(after) == ["identity"] * 2 and after.outputs == (y, z)
    assert operators(unchanged(after, fold_constants(after))) == ["identity"] * 2


def test_expansions_beyond_the_limit_stay_and_say_so(unchanged):
    b, notes = GraphBuilder(), Notes()
    x = b.input("x", "float32", (64, 64))
    (wide,) = b.add(EXPAND, [b.constant(np.ones(64, np.float32))], {"shape": (64, 64)}, "wide")
    (same,) = b.add(NEG, [b.constant(np.ones((64, 64), np.float32))], {}, "same")
    before = b.build(b.add(ADD, b.add(ADD, [x, wide]) + (same,)))
    after = unchanged(before, fold_constants(before, notes, limit=1000))
    assert operators(after) == ["expand", "add", "add"]
    assert notes.lines["wide"] == ["constant_node: the constant result would take 16384 bytes"]
    assert operators(fold_constants(before)) == ["add", "add"]


def test_sizes_of_the_run_are_not_constants(unchanged):
    n = dim("n")
    b = GraphBuilder()
    x = b.input("x", "float32", (n,))
    (i,) = b.add(ARANGE, [], {"start": 0, "step": 1, "count": n, "dtype": "float32"})
    before = b.build(b.add(ADD, [x, i]))
    assert operators(unchanged(before, fold_constants(before))) == ["arange", "add"]


def test_an_undefined_constant_is_left_to_the_run():
    b, notes = GraphBuilder(), Notes()
    c = b.constant(np.arange(3, dtype=np.float32))
    x = b.input("x", *F)
    (y,) = b.add(GATHER, [c, b.constant(np.array([0, 1, 3]))], {"axis": 0}, "out of range")
    graph = b.build(b.add(ADD, [x, y]))
    assert operators(fold_constants(graph, notes)) == ["gather", "add"]
    assert notes.lines["out of range"][0].startswith("constant_node: the constant result is undefined")


def branches(condition):
    def body(op, name):
        g = GraphBuilder(name)
        x, y = g.input("x", *F), g.input("y", *F)
        (z,) = g.add(ADD, [x, g.constant(np.full(3, 2, np.float32))])
        return g.build([*g.add(op, [z]), y])

    b = GraphBuilder()
    x, y = b.input("x", *F), b.input("y", *F)
    c = b.constant(np.array(condition)) if isinstance(condition, bool) else b.input("c", "bool", ())
    outputs = (Value("p", *F), Value("q", *F))
    b.append(Node(IF, (c, x, y), outputs, {}, "if", (body(NEG, "then"), body(EXP, "else"))))
    return b.build(outputs)


def test_a_known_branch_is_taken(unchanged):
    for condition, name in [(True, "neg"), (False, "exp")]:
        before = branches(condition)
        after = unchanged(before, fold_constants(before))
        assert operators(after) == ["add", name, "identity"]
    before = branches(None)
    assert operators(unchanged(before, fold_constants(before))) == ["if"]


def test_constants_move_into_bodies_and_fold_there(unchanged):
    def body(first):
        g = GraphBuilder("body")
        inputs = [*(g.input(f"i{n}", *t) for n, t in enumerate(first)), g.input("x", *F), g.input("w", *F)]
        (w2,) = g.add(NEG, g.add(EXP, [inputs[-1]]))
        return g.build(g.add(MUL, [inputs[-2], w2]))

    b = GraphBuilder()
    c, x, w = b.input("c", "bool", ()), b.input("x", *F), b.constant(np.arange(3, dtype=np.float32))
    y, z = Value("y", *F), Value("z", *F)
    b.append(Node(IF, (c, x, w), (y,), {}, "if", (body([]), body([]))))
    attrs = {"trips": 2, "carried": 1, "scanned": 0, "reverse_in": (), "reverse_out": (), "condition": False}
    b.append(Node(LOOP, (y, w), (z,), attrs, "loop", (body([("int64", ())]),)))
    before = b.build([z])
    after = unchanged(before, fold_constants(before))
    assert [node.inputs for node in after.nodes] == [(c, x), after.nodes[0].outputs]
    assert [operators(g) for node in after.nodes for g in node.bodies] == [["mul"]] * 3
    assert not after.constants


def test_a_loop_still_counts_its_carried_inputs(unchanged):
    g = GraphBuilder("body")
    g.input("i", "int64", ())
    x = g.input("x", *F)
    body = g.build(g.add(ADD, [x, x]))
    b = GraphBuilder()
    w, z = b.constant(np.ones(3, np.float32)), Value("z", *F)
    attrs = {"trips": 3, "carried": 1, "scanned": 0, "reverse_in": (), "reverse_out": (), "condition": False}
    b.append(Node(LOOP, (w,), (z,), attrs, "loop", (body,)))
    before = b.build([z])
    assert unchanged(before, fold_constants(before)).nodes[0].inputs == (w,)
