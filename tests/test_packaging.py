"""Control flow in artifacts: branches and loops over memory, against the reference interpreter of graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tcomp
from tcomp.ir.expr import Expr, dim
from tcomp.ir.graph import IF, LOOP, Graph, GraphBuilder, Node, Value
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.layout import Layout
from tcomp.ops import elementwise as ew
from tcomp.ops.matmul import MATMUL
from tcomp.options import CompileOptions
from tcomp.packaging import collect_weights
from tcomp.pipeline import compile_graph
from tcomp.target import Target

RNG = np.random.default_rng(0)
F = "float32"


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def body(carried: int, scanned: int = 0, captured: int = 0, shape: tuple[Any, ...] = (3,)) -> tuple[GraphBuilder, list[Value]]:
    b = GraphBuilder("body")
    values = [b.input("turn", "int64", ())]
    for name, count in (("c", carried), ("s", scanned), ("k", captured)):
        values += [b.input(f"{name}{n}", F, shape) for n in range(count)]
    return b, values


def loop(
    b: GraphBuilder, trips: Any, inside: Graph, inputs: list[Value], carried: int, scanned: int = 0, *,
    reverse_in: tuple[bool, ...] = (), reverse_out: tuple[bool, ...] = (), condition: bool = False,
) -> tuple[Value, ...]:  # fmt: skip
    stacked = inside.outputs[carried : len(inside.outputs) - condition]
    outputs = [Value(b.fresh("out"), v.dtype, v.shape) for v in inside.outputs[:carried]]
    outputs += [Value(b.fresh("stack"), v.dtype, (trips, *v.shape)) for v in stacked]
    attrs = {
        "trips": trips, "carried": carried, "scanned": scanned, "reverse_in": reverse_in or (False,) * scanned,
        "reverse_out": reverse_out or (False,) * len(stacked), "condition": condition,
    }  # fmt: skip
    b.append(Node(LOOP, tuple(inputs), tuple(outputs), attrs, "loop", (inside,)))
    return tuple(outputs)


def check(graph: Graph, *cases: dict[str, np.ndarray]) -> None:
    module = tcomp.Module.load(compile_graph(graph, CompileOptions(Target.host())))
    for arrays in cases:
        wanted, got = evaluate_graph(graph, arrays), module.run(arrays)
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_carried_values() -> None:
    g, (_, c, k) = body(1, captured=1)
    inside = g.build(g.add(ew.ADD, g.add(ew.TANH, [c]) + (k,)))
    b = GraphBuilder()
    x, y = b.input("x", F, (3,)), b.input("y", F, (3,))
    (out,) = loop(b, 5, inside, [x, y], 1)
    check(b.build([out, *b.add(ew.NEG, [out])]), {"x": random(3), "y": random(3)})


@pytest.mark.parametrize("trips", [0, 1, 2, 3])
def test_carried_values_that_change_places(trips: int) -> None:
    """(a, b, c) -> (b, c, a + 1): no value may be overwritten before it is read."""
    g, (_, p, q, r) = body(3)
    inside = g.build([q, r, *g.add(ew.ADD, [p, g.constant(np.array([1], np.float32))])])
    b = GraphBuilder()
    check(b.build(loop(b, trips, inside, [b.input(n, F, (3,)) for n in "abc"], 3)), {n: random(3) for n in "abc"})


def test_carried_values_that_stay_or_coincide() -> None:
    g, (_, p, q, r) = body(3)
    (s,) = g.add(ew.ADD, [p, q])
    inside = g.build([s, s, r])
    b = GraphBuilder()
    check(b.build(loop(b, 3, inside, [b.input(n, F, (3,)) for n in "abc"], 3)), {n: random(3) for n in "abc"})


@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True), (True, True)])
def test_scans_in_both_directions(reverse: tuple[bool, bool]) -> None:
    g, (_, c, s) = body(1, scanned=1)
    (total,) = g.add(ew.ADD, [c, s])
    inside = g.build([total, *g.add(ew.MUL, [total, s])])
    b = GraphBuilder()
    n = dim("n", 0, 100)
    x, start = b.input("x", F, (n, 3)), b.input("start", F, (3,))
    outputs = loop(b, n, inside, [start, x], 1, 1, reverse_in=reverse[:1], reverse_out=reverse[1:])
    check(b.build(outputs), *({"x": random(k, 3), "start": random(3)} for k in (1, 2, 9)))


def test_slices_that_no_vector_divides() -> None:
    g, (_, c, s) = body(1, scanned=1, shape=(7,))
    inside = g.build([*g.add(ew.ADD, [c, s]), *g.add(ew.EXP, [s])])
    b = GraphBuilder()
    check(b.build(loop(b, 6, inside, [b.input("a", F, (7,)), b.input("x", F, (6, 7))], 1, 1)), {"a": random(7), "x": random(6, 7)})


def test_a_loop_that_stops() -> None:
    g, (turn, c) = body(1)
    (doubled,) = g.add(ew.ADD, [c, c])
    (go,) = g.add(ew.LESS, [turn, g.constant(np.int64(2))])
    inside = g.build([doubled, doubled, go])
    b = GraphBuilder()
    out, stacked = loop(b, 10, inside, [b.input("x", F, (3,))], 1, condition=True)
    graph = b.build([out])
    check(graph, {"x": random(3)})
    module = tcomp.Module.load(compile_graph(b.build([out, stacked]), CompileOptions(Target.host())))
    x = random(3)
    last, rows = module(x)
    np.testing.assert_allclose(last, x * 8, rtol=1e-6)
    np.testing.assert_allclose(rows[:3], np.stack([x * 2, x * 4, x * 8]), rtol=1e-6)


def test_loops_in_loops() -> None:
    inner, (_, c, k) = body(1, captured=1)
    innermost = inner.build(inner.add(ew.ADD, [c, k]))
    g, (_, c, s) = body(1, scanned=1)
    (r,) = loop(g, 3, innermost, [c, s], 1)
    outer = g.build([r, *g.add(ew.NEG, [r])])
    b = GraphBuilder()
    check(b.build(loop(b, 4, outer, [b.input("a", F, (3,)), b.input("x", F, (4, 3))], 1, 1)), {"a": random(3), "x": random(4, 3)})


def branch(op: Any, weight: np.ndarray | None = None) -> Graph:
    g = GraphBuilder("branch")
    x = g.input("x", F, (2, 3))
    (y,) = g.add(op, [x])
    return g.build([y] if weight is None else g.add(MATMUL, [y, g.constant(weight, "w")]))


def test_branches_with_weights_of_their_own() -> None:
    b = GraphBuilder()
    c, x = b.input("c", "bool", ()), b.input("x", F, (2, 3))
    y = Value("y", F, (2, 3))
    b.append(Node(IF, (c, *b.add(ew.NEG, [x])), (y,), {}, "if", (branch(ew.EXP, random(3, 3)), branch(ew.RELU, random(3, 3)))))
    graph = b.build(b.add(ew.ADD, [y, x]))
    check(graph, *({"c": np.array(flag), "x": random(2, 3)} for flag in (True, False)))


def test_a_branch_that_hands_its_input_through() -> None:
    g = GraphBuilder("through")
    same = g.build([g.input("x", F, (2, 3))])
    b = GraphBuilder()
    c, x = b.input("c", "bool", ()), b.input("x", F, (2, 3))
    y = Value("y", F, (2, 3))
    b.append(Node(IF, (c, x), (y,), {}, "if", (same, branch(ew.EXP))))
    check(b.build([y]), *({"c": np.array(flag), "x": random(2, 3)} for flag in (True, False)))


def test_weights_are_collected_in_their_layout() -> None:
    b = GraphBuilder()
    x = b.input("x", F, (2, 3))
    w = random(3, 5)
    blocked = Value("w", F, (3, 5), Layout.blocked((1, 0), 1, 4))
    b.constants[blocked] = w
    c, y = b.input("c", "bool", ()), Value("y", F, (2, 3))
    b.append(Node(IF, (c, x), (y,), {}, "if", (branch(ew.EXP, random(3, 3)), branch(ew.EXP, random(3, 3)))))
    graph = b.build([*b.add(MATMUL, [x, blocked]), y])
    named, offsets = collect_weights(graph)
    assert len(named) == 3 and len({name for name, _ in named}) == 3
    first = np.asarray(dict(zip(offsets, [w for _, w in named], strict=True))[blocked])
    assert first.shape == (2, 3, 4) and not first[1, :, 1:].any()  # padded with zeros
    np.testing.assert_array_equal(first.transpose(1, 0, 2).reshape(3, 8)[:, :5], w)
    assert all(offset % 64 == 0 for offset in offsets.values())


def test_sizes_are_given_by_dims() -> None:
    n: Expr = dim("n", 1)
    g, (_, c, k) = body(1, captured=1, shape=(n, 2))
    inside = g.build(g.add(ew.ADD, [c, k]))
    b = GraphBuilder()
    x, y = b.input("x", F, (n, 2)), b.input("y", F, (n, 2))
    check(b.build(loop(b, n, inside, [x, y], 1)), *({"x": random(k, 2), "y": random(k, 2)} for k in (1, 4)))
