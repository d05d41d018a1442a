"""The memory planner, checked by running programs on a pretended memory: nodes read what was written for them."""

import itertools
import random

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import IRError
from tcomp.ir.expr import dim, evaluate_int
from tcomp.ir.graph import IF, LOOP, Graph, GraphBuilder, Node, Operator, Value
from tcomp.ir.layout import Layout
from tcomp.ops.elementwise import ADD, EXP
from tcomp.ops.movement import RESHAPE
from tcomp.passes.memory_plan import ALIGNMENT, byte_size, overwritten, plan_memory

WORK = Operator("work")
N, M = dim("n", 1, 64), dim("m", 1)


class Memory:
    """Executes a planned graph; a cell of `ALIGNMENT` bytes holds the number of the write that filled it."""

    def __init__(self, graph, plan, in_place, temporaries, dims):
        self.plan, self.dims, self.in_place, self.temporaries = plan, dims, in_place, temporaries
        self.arena = [0] * (evaluate_int(plan.size, dims) // ALIGNMENT)
        self.outside = {}
        self.stamps = itertools.count(1)
        self.known = {}  # cells of values
        self.holds = {}  # value -> the stamp it must hold
        for v in (*graph.inputs, *graph.constants):
            self.write(v)
        self.run(graph)
        for v in graph.outputs:
            self.check(v)

    def cells(self, value):
        root = self.plan.root(value)
        if value not in self.known:
            self.known[value] = None
            if root in self.plan.offset:
                start = evaluate_int(self.plan.offset[root], self.dims)
                self.known[value] = self.span(start, evaluate_int(byte_size(value), self.dims))
        return self.known[value], root

    def span(self, start, size):
        assert start % ALIGNMENT == 0 and start >= 0
        cells = range(start // ALIGNMENT, start // ALIGNMENT + -(-size // ALIGNMENT))
        assert cells.stop <= len(self.arena)
        return cells

    def write(self, value, stamp=None):
        stamp = next(self.stamps) if stamp is None else stamp
        cells, root = self.cells(value)
        if cells is None:
            self.outside[root] = stamp
        else:
            for c in cells:
                self.arena[c] = stamp
        self.holds[value] = stamp

    def check(self, value):
        cells, root = self.cells(value)
        found = {self.outside[root]} if cells is None else {self.arena[c] for c in cells}
        assert found <= {self.holds[value]}, value

    def run(self, graph):
        for v in graph.constants:
            self.write(v)
        for node in graph.nodes:
            for v in node.inputs:
                self.check(v)
            scratch = self.plan.temporaries.get(node, [])
            for start, size in zip(scratch, self.temporaries.get(node, ()), strict=True):
                for c in self.span(evaluate_int(start, self.dims), evaluate_int(size, self.dims)):
                    self.arena[c] = -1
            {"work": self.work, "if": self.branch, "loop": self.loop}[node.op.name](node)

    def work(self, node):
        overwritten = set()
        for v in node.outputs:
            self.write(v)
            overwritten |= {u for u in node.inputs if self.in_place is not None and self.in_place(node, u, v)}
        for v in (*node.outputs, *(v for v in node.inputs if v not in overwritten)):
            self.check(v)

    def branch(self, node):
        for body in node.bodies:  # one after the other is harder than one of them
            for inner, outer in zip(body.inputs, node.inputs[1:], strict=True):
                self.holds[inner] = self.holds[outer]
            self.run(body)
            for v, outer in zip(body.outputs, node.outputs, strict=True):
                self.check(v)
                if self.plan.storage.get(v) is not outer:
                    self.write(outer, self.holds[v])
                self.holds[outer] = self.holds[v]
            for outer in node.outputs:
                self.check(outer)

    def loop(self, node):
        body, carried = node.bodies[0], node.attrs["carried"]
        for v, start in zip(node.outputs[:carried], node.inputs[:carried], strict=True):
            self.write(v, self.holds[start])
        for _ in range(3):
            self.write(body.inputs[0])
            for inner, v in zip(body.inputs[1 : carried + 1], node.outputs, strict=False):
                self.holds[inner] = self.holds[v]
            for inner, v in zip(body.inputs[carried + 1 :], node.inputs[carried:], strict=True):
                self.holds[inner] = self.holds[v]
            self.run(body)
            for v in (*body.inputs[:1], *body.inputs[carried + 1 :]):
                self.check(v)
            for v in body.outputs:
                self.check(v)
            for v, outer in zip(body.outputs[:carried], node.outputs, strict=False):
                self.write(outer, self.holds[v])


def random_graph(rng, symbolic, depth=2, inputs=None, shape_out=None):
    """A random DAG of work, branches and loops; all dims are among those of the graph's inputs."""
    extents = [1, 3, 16, 100, N, M, 4 * N, N + 5, M * N] if symbolic else [1, 3, 16, 100, 1000]
    names = (f"v{i}" for i in itertools.count())

    def value():
        layout = Layout.blocked((0, 1), 1, 16) if rng.random() < 0.2 else None
        return Value(next(names), rng.choice(["float32", "int8"]), (rng.choice(extents), rng.choice(extents)), layout)

    def alike(v):
        return Value(next(names), v.dtype, v.shape, v.layout)

    inputs = [Value("x", "float32", (N, M) if symbolic else (4, 4)), value()] if inputs is None else inputs
    constants = {value(): None for _ in range(rng.randrange(2))}
    pool, nodes = [*inputs, *constants], []
    for number in range(rng.randrange(1, 9)):
        recent = pool[-4:] if rng.random() < 0.7 else pool
        read = [rng.choice(recent) for _ in range(rng.randrange(1, 4))]
        kind = rng.random()
        if depth and kind < 0.15:
            branches = [random_graph(rng, symbolic, depth - 1, [alike(v) for v in read], 2) for _ in range(2)]
            outputs = tuple(alike(v) for v in branches[0].outputs)
            # Both branches must give values of the same types.
            branches[1] = retyped(branches[1], outputs, alike)
            nodes.append(Node(IF, (pool[0], *read), outputs, {}, f"if{number}", tuple(branches)))
        elif depth and kind < 0.3:
            carried = rng.randrange(len(read) + 1)
            body_inputs = [Value(next(names), "int64", ()), *map(alike, read)]
            body = retyped(random_graph(rng, symbolic, depth - 1, body_inputs, 1), read[:carried], alike)
            attrs = {"trips": 3, "carried": carried, "scanned": 0}
            outputs = tuple(alike(v) for v in read[:carried])
            if not outputs:
                continue
            nodes.append(Node(LOOP, tuple(read), outputs, attrs, f"loop{number}", (body,)))
        else:
            outputs = tuple(alike(rng.choice(read)) if rng.random() < 0.5 else value() for _ in range(rng.randrange(1, 3)))
            nodes.append(Node(WORK, tuple(read), outputs, {}, f"work{number}"))
        pool += outputs
    outputs = [rng.choice(pool) for _ in range(shape_out or 2)]
    return Graph("g", tuple(inputs), tuple(outputs), tuple(nodes), constants)


def retyped(body, outer, alike):
    """The body with outputs of the types of `outer`, made by one more node where they differ."""
    made = tuple(alike(v) for v in outer)
    last = Node(WORK, tuple(dict.fromkeys(body.outputs)), made, {}, "last")
    return Graph(body.name, body.inputs, made, (*body.nodes, *([last] if made else [])), body.constants)


def nodes_of(graph):
    for node in graph.nodes:
        yield node
        for body in node.bodies:
            yield from nodes_of(body)


@pytest.mark.parametrize("symbolic", [False, True])
@given(seed=st.integers(0, 10**9), overwrite=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_value_is_overwritten_while_alive(symbolic, seed, overwrite):
    rng = random.Random(seed)
    graph = random_graph(rng, symbolic)
    sizes = [64, 100, 4 * N, 8 * M * N] if symbolic else [1, 64, 3000]
    temporaries = {node: rng.sample(sizes, 2) for node in nodes_of(graph) if rng.random() < 0.3}
    in_place = (lambda node, a, b: node.op is WORK) if overwrite else None
    allowed = (lambda node, a, b: node.op is WORK and byte_size(a) == byte_size(b)) if overwrite else None
    plan = plan_memory(graph, temporaries, in_place)
    outside = {*graph.inputs, *graph.outputs, *graph.constants}
    assert not outside & set(plan.offset)
    assert {v for node in graph.nodes for v in node.outputs} - outside <= set(plan.offset)
    for n, m in [(1, 1), (2, 200), (64, 3), (33, 17)] if symbolic else [(1, 1)]:
        Memory(graph, plan, allowed, temporaries, {N: n, M: m})
    if not symbolic:
        assert plan.lower_bound <= plan.size <= 2 * plan.lower_bound


def chain(*shapes, inputs=((1,),)):
    """x -> v1 -> v2 -> ... -> y, one node each."""
    values = [Value("x", "float32", inputs[0]), *(Value(f"v{i}", "float32", s) for i, s in enumerate(shapes))]
    nodes = tuple(Node(WORK, (a,), (b,), {}, f"n{i}") for i, (a, b) in enumerate(itertools.pairwise(values)))
    return Graph("chain", (values[0],), (values[-1],), nodes), values


def test_a_chain_needs_two_buffers_and_one_in_place():
    graph, _ = chain(*[(1000,)] * 6)
    plan = plan_memory(graph)
    assert plan.size == plan.lower_bound == 2 * 4032
    assert plan_memory(graph, in_place=lambda *_: True).size == 4032


def test_outputs_in_the_memory_of_inputs_that_nothing_reads_later():
    x, y, a, b, c = (Value(name, "float32", (4,)) for name in "xyabc")
    nodes = Node(WORK, (x,), (a,), {}, "first"), Node(WORK, (x, y), (b,), {}, "second"), Node(WORK, (y, b), (c,), {}, "third")
    graph = Graph("g", (x, y), (a, b, c), nodes)
    assert overwritten(graph, lambda *_: True) == [(0, 1), (1, 2)]
    assert overwritten(graph, lambda node, source, result: source is y) == [(1, 2)]


def test_a_reshape_is_the_same_memory():
    b = GraphBuilder()
    x = b.input("x", "float32", (4, 6))
    (y,) = b.add(EXP, [x])
    (row,), (out,) = b.add(RESHAPE, [y], {"shape": (24,)}), b.add(RESHAPE, [y], {"shape": (6, 4)}, "out")
    (z,) = b.add(ADD, [y, b.add(RESHAPE, [row], {"shape": (4, 6)})[0]])
    graph = b.build([out, z])
    plan = plan_memory(graph, in_place=lambda *_: True)
    assert plan.root(row) is plan.root(y) is out and plan.size == 0
    plan = plan_memory(b.build([z]), in_place=lambda *_: True)
    assert plan.root(row) is y and y in plan.offset and z not in plan.storage
    assert overwritten(b.build(b.add(EXP, b.add(RESHAPE, [x], {"shape": (24,)}))), lambda *_: True) == []


@pytest.mark.parametrize("late", [False, True])
def test_results_of_an_iteration_where_the_next_one_finds_them(late):
    """Not while the state before is read: by the second node, or by the first one, which may not overwrite what it reads."""
    number, state, row, result, stacked = (Value(n, "float32", (8,)) for n in ("number", "state", "row", "result", "stacked"))
    nodes = Node(WORK, (state,), (result,), {}, "first"), Node(WORK, (state if late else result,), (stacked,), {}, "second")
    body = Graph("body", (number, state), (result, stacked), nodes)
    last, rows = Value("last", "float32", (8,)), Value("rows", "float32", (3, 8))
    attrs = {"trips": 3, "carried": 1, "scanned": 0}
    graph = Graph("g", (row,), (last, rows), (Node(LOOP, (row,), (last, rows), attrs, "loop", (body,)),))
    for in_place in (None, lambda *_: True):
        storage = plan_memory(graph, in_place=in_place).storage
        assert storage[stacked] is rows and (storage.get(result) is last) == (not late and in_place is not None)


def test_a_residual_network_reaches_the_lower_bound():
    x = Value("x", "float32", (3, 224, 224))
    nodes, current, size, channels = [], x, 112, 64

    def node(*inputs, shape):
        out = Value(f"v{len(nodes)}", "float32", shape)
        nodes.append(Node(WORK, inputs, (out,), {}, out.name))
        return out

    current = node(current, shape=(64, size, size))
    for stage in range(4):
        size, channels = 56 >> stage, 256 << stage
        for block in range(3):
            a = node(current, shape=(channels // 4, size, size))
            a = node(a, shape=(channels // 4, size, size))
            a = node(a, shape=(channels, size, size))
            shortcut = node(current, shape=(channels, size, size)) if block == 0 else current
            current = node(a, shortcut, shape=(channels, size, size))
    out = node(current, shape=(1000,))
    plan = plan_memory(Graph("residual", (x,), (out,), tuple(nodes)))
    assert plan.size <= 1.1 * plan.lower_bound


def test_symbolic_sizes_share_storage_like_static_ones():
    graph, _ = chain((N, 256), (N, 1024), (N, 256), (N, 1024), (N, 256), inputs=((N, 3),))
    plan = plan_memory(graph)
    assert plan.lower_bound is None
    for n in (1, 7, 64):
        assert evaluate_int(plan.size, {N: n}) == n * (256 + 1024) * 4


def test_incomparable_sizes_are_stacked_by_their_maximum():
    graph, _ = chain((N, 100), (M, 100), (N, 100), (M, 100), (1,), inputs=((N, M),))
    plan = plan_memory(graph)
    for n, m in [(1, 50), (60, 1), (10, 10)]:
        assert evaluate_int(plan.size, {N: n, M: m}) <= 400 * (n + m) + 3 * ALIGNMENT


def test_a_size_not_known_before_the_run_takes_its_bound():
    found = dim("found", 0, 300)
    graph, _ = chain((found, 4), (2,), (1,))
    assert plan_memory(graph).size == 300 * 16 + ALIGNMENT
    graph, _ = chain((dim("found", 0), 4), (1,), inputs=((N,),))
    with pytest.raises(IRError, match="not bounded.*\n.*not known from the shapes"):
        plan_memory(graph)


def test_a_body_of_two_nodes_is_refused():
    body, _ = chain((4,), (4,), inputs=((4,),))
    c, x = Value("c", "bool", ()), Value("x", "float32", (4,))
    nodes = tuple(Node(IF, (c, x), (Value(f"y{i}", "float32", (4,)),), {}, f"if{i}", (body, body)) for i in range(2))
    with pytest.raises(IRError, match="belongs to two nodes"):
        plan_memory(Graph("g", (c, x), tuple(n.outputs[0] for n in nodes), nodes))


def test_nothing_to_plan():
    x = Value("x", "float32", (4,))
    plan = plan_memory(Graph("g", (x,), (x,), ()))
    assert (plan.offset, plan.temporaries, plan.size, plan.lower_bound) == ({}, {}, 0, 0)
