"""Dead code elimination, bodies of branches and loops included."""

import numpy as np

from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, GraphBuilder, Node, Value
from tcomp.ops.elementwise import ADD, EXP, LESS, MUL, NEG
from tcomp.passes.dce import eliminate_dead


def operators(graph):
    return [node.op.name for node in graph.nodes]


def test_dead_nodes_and_constants_go(unchanged):
    b = GraphBuilder()
    x = b.input("x", "float32", (3,))
    c, d = b.constant(np.ones(3, np.float32), "c"), b.constant(np.ones(3, np.float32), "d")
    (y,) = b.add(ADD, [x, c])
    b.add(MUL, [x, d])
    b.add(EXP, b.add(NEG, [y]))
    before = b.build([y])
    after = unchanged(before, eliminate_dead(before))
    assert operators(after) == ["add"] and list(after.constants) == [c] and after.inputs == (x,)


def body_of(inputs, make, name="body"):
    b = GraphBuilder(name)
    values = [b.input(f"i{n}", dtype, shape) for n, (dtype, shape) in enumerate(inputs)]
    return b.build(make(b, *values))


def test_a_branch_keeps_what_one_side_needs(unchanged):
    b = GraphBuilder()
    c, x, y, z = b.input("c", "bool", ()), *(b.input(n, "float32", (2,)) for n in "xyz")
    types = [("float32", (2,))] * 3
    then = body_of(types, lambda g, x, y, z: [*g.add(NEG, [x]), *g.add(EXP, [z])])
    other = body_of(types, lambda g, x, y, z: [*g.add(EXP, [y]), *g.add(NEG, [z])])
    outputs = (Value("p", "float32", (2,)), Value("q", "float32", (2,)))
    b.append(Node(IF, (c, x, y, z), outputs, {}, "if", (then, other)))
    before = b.build(outputs[:1])
    after = unchanged(before, eliminate_dead(before))
    (node,) = after.nodes
    assert node.inputs == (c, x, y) and node.outputs == outputs[:1]
    assert [operators(body) for body in node.bodies] == [["neg"], ["exp"]]
    assert [len(body.inputs) for body in node.bodies] == [2, 2]


def test_a_kernel_loses_outputs_nobody_reads():
    body = body_of([("float32", (2,))] * 2, lambda g, x, y: [*g.add(NEG, [x]), *g.add(NEG, [y])])
    x, y, p, q = (Value(n, "float32", (2,)) for n in "xypq")
    graph = eliminate_dead(Graph("g", (x, y), (q,), (Node(KERNEL, (x, y), (p, q), {}, "k", (body,)),)))
    (node,) = graph.nodes
    assert node.inputs == (y,) and node.outputs == (q,) and len(node.bodies[0].nodes) == 1


def loop(needed):
    """Carries a (fed by b), b (fed by itself), d (fed by itself); scans s, t; captures u, w; stacks a * s and t."""
    f = ("float32", (2,))
    types = [("int64", ()), f, f, f, f, f, f, f]

    def make(g, i, a, b, d, s, t, u, w):
        (a2,), (b2,), (d2,) = g.add(ADD, [a, b]), g.add(ADD, [b, u]), g.add(MUL, [d, w])
        return [a2, b2, d2, *g.add(MUL, [a, s]), *g.add(NEG, [t])]

    g = GraphBuilder()
    inputs = [g.input(n, "float32", (4, 2) if n in "st" else (2,)) for n in "abdstuw"]
    outputs = tuple(Value(f"o{n}", "float32", (2,) if n < 3 else (4, 2)) for n in range(5))
    attrs = {"trips": 4, "carried": 3, "scanned": 2, "reverse_in": (False, True), "reverse_out": (True, False), "condition": False}
    g.append(Node(LOOP, tuple(inputs), outputs, attrs, "loop", (body_of(types, make),)))
    return g.build([outputs[n] for n in needed])


def test_a_loop_keeps_the_states_that_needed_ones_read(unchanged):
    before = loop([0])
    (node,) = unchanged(before, eliminate_dead(before)).nodes
    assert [v.name for v in node.inputs] == ["a", "b", "u"] and [v.name for v in node.outputs] == ["o0", "o1"]
    assert (node.attrs["carried"], node.attrs["scanned"], node.attrs["reverse_in"], node.attrs["reverse_out"]) == (2, 0, (), ())
    before = loop([4, 2])
    (node,) = unchanged(before, eliminate_dead(before)).nodes
    assert [v.name for v in node.inputs] == ["d", "t", "w"] and [v.name for v in node.outputs] == ["o2", "o4"]
    assert (node.attrs["carried"], node.attrs["reverse_in"], node.attrs["reverse_out"]) == (1, (True,), (False,))
    before = loop(range(5))
    assert len(unchanged(before, eliminate_dead(before)).nodes[0].inputs) == 7


def test_a_condition_keeps_its_state_alive(unchanged):
    f = ("float32", (2,))

    def make(g, i, a, b, n):
        (n2,) = g.add(ADD, [n, n])
        return [*g.add(NEG, [a]), *g.add(EXP, [b]), n2, *g.add(LESS, [n2, g.constant(np.float32(100), "limit")])]

    g = GraphBuilder()
    a, b, n = g.input("a", *f), g.input("b", *f), g.input("n", "float32", ())
    outputs = (Value("o0", *f), Value("o1", *f), Value("o2", "float32", ()))
    attrs = {"trips": 6, "carried": 3, "scanned": 0, "reverse_in": (), "reverse_out": (), "condition": True}
    g.append(Node(LOOP, (a, b, n), outputs, attrs, "loop", (body_of([("int64", ()), f, f, ("float32", ())], make),)))
    before = g.build(outputs[:1])
    (node,) = unchanged(before, eliminate_dead(before)).nodes
    assert [v.name for v in node.inputs] == ["a", "n"]
