"""The NumPy reference of graphs: nodes, kernels and control flow."""

import numpy as np
import pytest

from tcomp.errors import InputError, IRError
from tcomp.ir import expr as E, te
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, GraphBuilder, Node, Operator, Value
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.layout import Layout
from tcomp.ir.verify.graph import verify_graph

N = E.dim("n", 1, 9)
ADD = Operator("add", lambda x, y, scale=1.0: te.compute(x.shape, lambda *i: x[i] + (y[i] if y.ndim else y[()]) * scale))
RELU = Operator("relu", lambda x: te.compute(x.shape, lambda *i: te.maximum(x[i], 0.0)))
POSITIVE = Operator("positive", lambda x: te.compute((), lambda: te.sum(x[te.reduce_axis(3)], axis=te.reduce_axis(3)) > 0.0))


def ones(*shape):
    return np.ones(shape, np.float32)


def chain(name, steps):
    builder = GraphBuilder(name)
    v = builder.input("x", "float32", (N, 3))
    for op in steps:
        (v,) = builder.add(op, [v, v] if op is ADD else [v])
    return builder.build([v])


def test_nodes_constants_attributes_and_dims():
    builder = GraphBuilder()
    x = builder.input("x", "float32", (N, 3))
    c = builder.constant(np.float32(2), "c")
    (y,) = builder.add(ADD, [x, c], {"scale": 3.0}, "y")
    (z,) = builder.add(RELU, [y])
    graph = builder.build([z, y])
    seen = []
    value = np.arange(-6, 6, dtype=np.float32).reshape(4, 3) * 2
    got = evaluate_graph(graph, {"x": value}, lambda v, a: seen.append((v.name, a.shape)))
    np.testing.assert_array_equal(got["y"], value + 6)
    np.testing.assert_array_equal(got["relu"], np.maximum(value + 6, 0))
    assert seen == [("y", (4, 3)), ("relu", (4, 3))]


def test_kernels_and_layouts_change_no_values():
    body = chain("body", [ADD, RELU])
    outer = GraphBuilder()
    x = outer.input("x", "float32", (N, 3), Layout.permuted((1, 0)))
    inner = Graph("body", (Value("x", "float32", (N, 3), x.layout),), body.outputs, body.nodes)
    inner = Graph("body", inner.inputs, body.outputs, tuple(_reread(n, body.inputs[0], inner.inputs[0]) for n in body.nodes))
    out = Value("out", "float32", (N, 3))
    outer.append(Node(KERNEL, (x,), (out,), {}, "kernel", (inner,)))
    graph = outer.build([out])
    verify_graph(graph)
    np.testing.assert_array_equal(evaluate_graph(graph, {"x": ones(2, 3)})["out"], 2 * ones(2, 3))


def _reread(node, old, new):
    return Node(node.op, tuple(new if v is old else v for v in node.inputs), node.outputs, node.attrs, node.name)


@pytest.mark.parametrize(("value", "expected"), [(1.0, 2.0), (-1.0, 0.0)])
def test_if(value, expected):
    builder = GraphBuilder()
    x, flags = builder.input("x", "float32", (N, 3)), builder.input("flags", "float32", (3,))
    (condition,) = builder.add(POSITIVE, [flags])
    out = Value("out", "float32", (N, 3))
    builder.append(Node(IF, (condition, x), (out,), {}, "if", (chain("then", [ADD]), chain("otherwise", [RELU]))))
    graph = builder.build([out])
    verify_graph(graph)
    got = evaluate_graph(graph, {"x": ones(2, 3) * value, "flags": np.full(3, value, np.float32)})["out"]
    np.testing.assert_array_equal(got, np.full((2, 3), expected))


def loop_graph(condition=False, reverse=False):
    """Running sums of the rows of x, weighted by a captured factor; stops, where asked, when a sum is beyond 4."""
    count = E.dim("t", 1)
    weigh = Operator("weigh", lambda s, row, f: te.compute((3,), lambda i: s[i] + row[i] * f[()]))
    small = Operator("small", lambda s: te.compute((), lambda: s[0] <= 4.0))
    body = GraphBuilder("body")
    _, s, row, f = (body.input(*a) for a in [("i", "int64", ()), ("s", "float32", (3,)), ("row", "float32", (3,)), ("f", "float32", ())])
    (total,) = body.add(weigh, [s, row, f], name="total")
    results = [total, total]
    if condition:
        results += body.add(small, [total], name="go")
    builder = GraphBuilder()
    x, start, factor = (builder.input(*a) for a in [("x", "float32", (count, 3)), ("s0", "float32", (3,)), ("f", "float32", ())])
    final, rows = Value("final", "float32", (3,)), Value("rows", "float32", (count, 3))
    flags = {"reverse_in": (reverse,), "reverse_out": (reverse,), "condition": condition}
    attrs = {"trips": count, "carried": 1, "scanned": 1, **flags}
    builder.append(Node(LOOP, (start, x, factor), (final, rows), attrs, "loop", (body.build(results),)))
    graph = builder.build([final, rows])
    verify_graph(graph)
    return graph


@pytest.mark.parametrize("reverse", [False, True])
def test_loop(reverse):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    got = evaluate_graph(loop_graph(reverse=reverse), {"x": x, "s0": ones(3), "f": np.float32(2)})
    rows = 1 + 2 * np.cumsum(x[::-1] if reverse else x, 0)
    np.testing.assert_array_equal(got["final"], rows[-1])
    np.testing.assert_array_equal(got["rows"], rows[::-1] if reverse else rows)


def test_loop_that_stops():
    got = evaluate_graph(loop_graph(condition=True), {"x": ones(5, 3), "s0": ones(3), "f": np.float32(2)})
    np.testing.assert_array_equal(got["final"], [5, 5, 5])
    np.testing.assert_array_equal(got["rows"][:, 0], [3, 5, 0, 0, 0])


def test_wrong_inputs_are_named():
    graph = chain("g", [RELU])
    with pytest.raises(InputError, match="no value for the input `x`"):
        evaluate_graph(graph, {})
    with pytest.raises(InputError, match="there is no input `y`"):
        evaluate_graph(graph, {"x": ones(2, 3), "y": ones(1)})
    with pytest.raises(InputError, match="dimension 1 of `x` is 4 instead of 3"):
        evaluate_graph(graph, {"x": ones(2, 4)})
    with pytest.raises(InputError, match="the dim `n` is 10"):
        evaluate_graph(graph, {"x": ones(10, 3)})
    with pytest.raises(InputError, match="`x` is int32 instead of float32"):
        evaluate_graph(graph, {"x": np.ones((2, 3), np.int32)})


def test_wrong_nodes_are_named():
    shift = Operator("shift", lambda x: te.compute(x.shape, lambda i, j: x[i, j + 1]))
    with pytest.raises(IRError, match="is read over 4 elements along axis 1\n  where: node `bad` \\(shift\\)"):
        builder = GraphBuilder()
        x = builder.input("x", "float32", (N, 3))
        (y,) = builder.add(shift, [x], name="bad")
        evaluate_graph(builder.build([y]), {"x": ones(1, 3)})
