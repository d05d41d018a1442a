"""What is tuned: the same kernel has one key wherever it comes from; its default schedule is that of a compilation."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tcomp.autotune.tasks import Program, Workload, kernel_workload, task_from_json, workloads
from tcomp.backends import backend_of
from tcomp.backends.kernel import build_loops
from tcomp.errors import InputError, ScheduleError
from tcomp.ir import te
from tcomp.ir.expr import as_expr, dim
from tcomp.ir.graph import LOOP, Graph, GraphBuilder, Node, Value, canonical_graph_text
from tcomp.ir.loops import Buffer, Kernel, loop, store
from tcomp.ir.text.parser import parse_graph
from tcomp.ops import OPERATORS
from tcomp.options import CompileOptions, Report
from tcomp.passes.runner import run_passes
from tcomp.pipeline import graph_passes, kernel_inputs, kernel_nodes
from tcomp.schedules import Schedule
from tcomp.schedules.knobs import Knobs
from tcomp.target import CpuTarget
from tests.autotune.spaces import product, scaled, split_scaled

HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell")
CONV = {"strides": (1, 1), "dilations": (1, 1), "group": 1}


def two_convolutions(channels: int = 32, same: bool = False) -> Graph:
    b, rng = GraphBuilder("net"), np.random.default_rng(0)
    value = b.input("x", "float32", (1, channels if same else 16, 9, 9))
    for n in range(2):
        weight = b.constant(rng.standard_normal((channels, value.shape[1], 1, 1)).astype(np.float32), f"w{n}")
        (value,) = b.add(OPERATORS["conv"], [value, weight], CONV)
        (value,) = b.add(OPERATORS["relu"], [value])
    return run_passes(b.build([value]), graph_passes(CompileOptions(HASWELL), Report()))[0]


def at_random(seed: int) -> Knobs:
    rng = random.Random(seed)
    return Knobs(pick=lambda name, options, default: rng.choice(options))


def test_the_default_schedule_is_that_of_a_compilation() -> None:
    graph = two_convolutions()
    found = workloads(graph, HASWELL, 2)
    assert [count for _, count in found] == [1, 1, 1]  # the last one turns the result
    for (workload, _), node in zip(found, kernel_nodes(graph), strict=True):
        text = canonical_graph_text(node.bodies[0])
        body = workload.body(workload.layouts(Knobs()))
        assert canonical_graph_text(body) == text
        compiled = build_loops(parse_graph(text, OPERATORS, {}), "kernel", backend_of(HASWELL))
        assert str(workload.make(Knobs())[0].kernel) == str(compiled.kernel)


@pytest.mark.parametrize("seed", range(6))
def test_decisions_give_the_same_loops_again_and_in_a_compilation(seed: int) -> None:
    workload = workloads(two_convolutions(), HASWELL, 1)[seed % 2][0]
    knobs = at_random(seed)
    s = workload.make(knobs)[0]
    assert str(workload.make(Knobs(knobs.decisions))[0].kernel) == str(s.kernel)
    body = workload.body(workload.layouts(Knobs(knobs.decisions)))  # as compiled: layouts first, then, elsewhere, the loops
    text = canonical_graph_text(body)
    assert str(build_loops(parse_graph(text, OPERATORS, {}), "kernel", backend_of(HASWELL), Knobs(knobs.decisions)).kernel) == str(s.kernel)


def test_weights_lie_as_decided() -> None:
    workload = workloads(two_convolutions(), HASWELL, 1)[0][0]
    widths = set()
    for rows, vectors in ((4, 1), (4, 2)):
        _, (x, w, y) = workload.make(Knobs({"conv.tile": (rows, vectors)}))
        assert w.layout is not None and w.given and not w.written
        widths.add(w.layout.pieces[-1].mod)
        assert (x.shape, w.shape, y.shape) == ((1, 16, 9, 9), (32, 16, 1, 1), (1, 32, 9, 9))
        assert y.written and not y.given
    assert widths == {8, 16}


def test_equal_kernels_are_one_workload() -> None:
    graph = two_convolutions(same=True)
    kernels = [kernel_workload(n.bodies[0], constants, HASWELL, 1) for n, constants in kernel_inputs(graph)]
    found = workloads(graph, HASWELL, 1)
    assert {w for w, _ in found} == set(kernels) and sum(count for _, count in found) == len(kernels) == 3


def test_keys() -> None:
    small, large = (workloads(two_convolutions(c), HASWELL, 1)[0][0] for c in (32, 64))
    assert small.key != large.key and small.structure == large.structure
    assert len(small.sizes) == len(large.sizes) and small.sizes != large.sizes
    other = workloads(two_convolutions(32), HASWELL, 2)[0][0]
    assert other.key != small.key and other.structure == small.structure
    assert small.structure != workloads(two_convolutions(32), HASWELL, 1)[1][0].structure  # its result lies elsewhere
    again = task_from_json(small.to_json())
    assert isinstance(again, Workload) and again == small and again.key == small.key


def test_kernels_in_loops_count_as_often_as_they_run() -> None:
    inner = workload_graph()
    carried = Value("c", "float32", (4,))
    node = Node(
        LOOP, (carried,), (Value("y", "float32", (4,)),), {"trips": 5, "carried": 1, "scanned": 0, "condition": False}, "", (inner,)
    )
    graph = Graph("g", (carried,), node.outputs, (node,))
    assert [count for _, count in workloads(graph, HASWELL, 1)] == [5]


def workload_graph() -> Graph:
    b = GraphBuilder("inner")
    number, x = b.input("n", "int64", ()), b.input("x", "float32", (4,))
    (y,) = b.add(OPERATORS["relu"], [x])
    graph = run_passes(b.build([y]), graph_passes(CompileOptions(HASWELL), Report()))[0]
    assert number in graph.inputs
    return graph


def test_symbolic_dims_are_measured_at_given_sizes() -> None:
    b = GraphBuilder("net")
    x = b.input("x", "float32", (dim("n"), 8))
    graph = run_passes(b.build(b.add(OPERATORS["relu"], [x])), graph_passes(CompileOptions(HASWELL), Report()))[0]
    with pytest.raises(InputError, match="the size n is not known"):
        workloads(graph, HASWELL, 1)
    ((workload, _),) = workloads(graph, HASWELL, 1, {"n": 5, "unrelated": 3})
    assert workload.dims == (("n", 5),)
    assert [a.shape for a in workload.make(Knobs())[1]] == [(5, 8), (5, 8)]


def test_elements_that_serve_as_indices_are_small() -> None:
    b = GraphBuilder("net")
    table, numbers = b.input("table", "float32", (7, 8)), b.input("i", "int64", (20,))
    graph = run_passes(b.build(b.add(OPERATORS["gather"], [table, numbers], {"axis": 0})), graph_passes(CompileOptions(HASWELL), Report()))[
        0
    ]
    ((workload, _),) = workloads(graph, HASWELL, 1)
    assert [a.below for a in workload.make(Knobs())[1]] == [None, 7, None]


# ---------------------------------------------------------------- programs of one's own


def test_a_program_has_the_default_space() -> None:
    task = Program.of(product(), HASWELL, 1)
    knobs = Knobs()
    s, (a, b, c) = task.make(knobs)
    assert "C.acc.tile" in knobs.asked and knobs.decisions == {} and len(s.trace) > 3
    assert [x.shape for x in (a, b, c)] == [(32, 24), (24, 48), (32, 48)] and c.written and not c.given
    again = task_from_json(task.to_json())
    assert again == task and again.key == task.key and str(again.make(Knobs())[0].kernel) == str(s.kernel)


def test_a_program_has_a_space_of_its_own() -> None:
    task = Program.of(scaled(), HASWELL, 1, schedule=split_scaled)
    assert task.portable and task.space == "tests.autotune.spaces:split_scaled"
    knobs = Knobs({"factor": 8})
    assert task.make(knobs)[0].loops["B.i.i"].extent == 8
    assert list(knobs.asked) == ["factor", "vectorize", "threads"]
    elsewhere = task_from_json(task.to_json())
    assert str(elsewhere.make(Knobs({"factor": 8}))[0].kernel) == str(task.make(Knobs({"factor": 8}))[0].kernel)
    assert task.key != Program.of(scaled(), HASWELL, 1).key


def test_a_function_without_a_name_stays_here() -> None:
    task = Program.of(scaled(), HASWELL, 1, schedule=lambda s, knobs: None)
    assert not task.portable and not task.make(Knobs())[0].trace
    with pytest.raises(ScheduleError, match="there is no schedule function"):
        task_from_json(task.to_json()).make(Knobs())


def test_a_program_that_works_in_place_is_given_its_results() -> None:
    a = Buffer("a", "float32", (10,))
    kernel = Kernel("k", (a,), (a,), (), loop("i", 10, lambda i: store(a, [i], a[i] + as_expr(1.0, "float32"))))
    (argument,) = Program.of(kernel, HASWELL, 1).make(Knobs())[1]
    assert argument.given and argument.written
    assert isinstance(Program.of(kernel, HASWELL, 1).make(Knobs())[0], Schedule)


def test_a_program_of_symbolic_size() -> None:
    n = dim("n")
    a = te.placeholder((n,), name="A")
    with pytest.raises(InputError, match="the size n is not known"):
        Program.of([a, te.compute((n,), lambda i: a[i] + 1.0, name="B")], HASWELL, 1)
    task = Program.of([a, te.compute((n,), lambda i: a[i] + 1.0, name="B")], HASWELL, 1, {"n": 12})
    assert [x.shape for x in task.make(Knobs())[1]] == [(12,), (12,)]
