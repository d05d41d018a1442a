"""If, Loop and Scan."""

import numpy as np
import onnx
import pytest
from onnx import helper

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import check_model, import_model
from tcomp.ir.graph import IF, LOOP

F = "float32"
X = np.arange(6, dtype=np.float32).reshape(2, 3)
TRUE, FALSE = np.array(True), np.array(False)


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs, outputs, **attrs)


def body(nodes, inputs, outputs, **constants):
    """A sub-graph; inputs and outputs are (name, dtype, dims)."""

    def info(name, dtype, dims):
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims)

    initializers = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    return helper.make_graph(nodes, "body", [info(*i) for i in inputs], [info(*o) for o in outputs], initializers)


def ops_of(graph):
    return [n.op for n in graph.nodes]


# ---------------------------------------------------------------- If


def branches(**kinds):
    return {name: body([node(op, ["x"], [f"{name}_o"])], [], [(f"{name}_o", F, None)]) for name, op in kinds.items()}


def test_if_that_depends_on_data(make_model, run_model):
    model = make_model([node("If", ["c"], ["y"], **branches(then_branch="Neg", else_branch="Exp"))], {"x": X, "c": TRUE}, {"y": F})
    assert IF in ops_of(import_model(model))
    np.testing.assert_array_equal(run_model(model, {"x": X, "c": TRUE})["y"], -X)
    np.testing.assert_allclose(run_model(model, {"x": X, "c": FALSE})["y"], np.exp(X), rtol=1e-6)


def test_if_that_depends_on_shapes_is_resolved(make_model, run_model):
    nodes = [
        node("Shape", ["x"], ["s"]), node("Size", ["s"], ["rank"]), node("Equal", ["rank", "two"], ["c"]),
        node("If", ["c"], ["y"], **branches(then_branch="Neg", else_branch="Frobnicate")),
    ]  # fmt: skip
    model = make_model(nodes, {"x": (F, ["n", "m"])}, {"y": F}, constants={"two": np.array(2)})
    assert [op.name for op in ops_of(import_model(model))] == ["neg"]
    np.testing.assert_array_equal(run_model(model, {"x": X})["y"], -X)


def test_branches_of_different_shapes(make_model):
    pick = body([node("ReduceSum", ["x"], ["o"], keepdims=0)], [], [("o", F, None)])
    model = make_model([node("If", ["c"], ["y"], then_branch=pick, **branches(else_branch="Neg"))], {"x": X, "c": TRUE}, {"y": F})
    with pytest.raises(UnsupportedError, match="depends on input data"):
        import_model(model)


def test_nested_ifs_capture_from_all_levels(make_model, run_model):
    inner = {
        "then_branch": body([node("Add", ["x", "t"], ["a"])], [], [("a", F, None)]),
        "else_branch": body([node("Mul", ["x", "w"], ["b"])], [], [("b", F, None)]),
    }
    outer = body([node("Neg", ["x"], ["t"]), node("If", ["d"], ["o"], **inner)], [], [("o", F, None)])
    model = make_model(
        [node("If", ["c"], ["y"], then_branch=outer, **branches(else_branch="Identity"))],
        {"x": X, "c": TRUE, "d": TRUE}, {"y": F}, constants={"w": np.full((2, 3), 3, np.float32)},
    )  # fmt: skip
    for c, d, expected in ((TRUE, TRUE, X * 0), (TRUE, FALSE, X * 3), (FALSE, TRUE, X)):
        np.testing.assert_array_equal(run_model(model, {"x": X, "c": c, "d": d})["y"], expected)


# ---------------------------------------------------------------- Loop


STATE = [("i", "int64", []), ("go", "bool", []), ("s", F, None)]


def test_loop_with_a_known_trip_count(make_model, run_model):
    """s += x * i, stacking s; the trip count is a symbolic size."""
    step = body(
        [node("Cast", ["i"], ["f"], to=1), node("Mul", ["x", "f"], ["p"]), node("Add", ["s", "p"], ["t"]),
         node("Identity", ["t"], ["row"]), node("Identity", ["go"], ["on"])],
        STATE, [("on", "bool", []), ("t", F, None), ("row", F, None)],
    )  # fmt: skip
    nodes = [
        node("Shape", ["x"], ["sh"]),
        node("Gather", ["sh", "zero"], ["n"]),
        node("Loop", ["n", "", "start"], ["y", "rows"], body=step),
    ]
    model = make_model(nodes, {"x": (F, ["n", 3]), "start": (F, ["n", 3])}, {"y": F, "rows": F}, constants={"zero": np.array(0)})
    graph = import_model(model)
    assert LOOP in ops_of(graph) and tuple(map(str, graph.outputs[1].shape)) == ("n", "n", "3")
    for n in (1, 4):
        x, start = np.random.default_rng(n).standard_normal((2, n, 3)).astype(np.float32)
        got = run_model(model, {"x": x, "start": start})
        rows = [start + x * sum(range(i + 1)) for i in range(n)]
        np.testing.assert_allclose(got["rows"], rows, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got["y"], rows[-1], rtol=1e-5, atol=1e-5)


def test_loop_that_stops_on_data(make_model, run_model):
    step = body([node("Add", ["s", "s"], ["t"]), node("Less", ["t", "limit"], ["on"])], STATE, [("on", "bool", []), ("t", F, None)])
    model = make_model(
        [node("Loop", ["n", "", "x"], ["y"], body=step)], {"x": np.array(1, np.float32), "limit": np.array(1, np.float32)}, {"y": F},
        constants={"n": np.array(20)},
    )  # fmt: skip
    assert run_model(model, {"x": np.array(1, np.float32), "limit": np.array(100, np.float32)})["y"] == 128
    assert run_model(model, {"x": np.array(1, np.float32), "limit": np.array(1e9, np.float32)})["y"] == 2**20


def test_loop_whose_shapes_grow_is_unrolled(make_model, run_model):
    step = body([node("Concat", ["s", "x"], ["t"], axis=0), node("Identity", ["go"], ["on"])], STATE, [("on", "bool", []), ("t", F, None)])
    model = make_model([node("Loop", ["n", "", "x"], ["y"], body=step)], {"x": (F, ["n", 3])}, {"y": F}, constants={"n": np.array(3)})
    assert LOOP not in ops_of(import_model(model))
    np.testing.assert_array_equal(run_model(model, {"x": X})["y"], np.concatenate([X] * 4))
    assert [r.op_type for r in check_model(model)].count("Concat") == 1


def test_loop_that_never_runs(make_model, run_model):
    step = body([node("Neg", ["s"], ["t"]), node("Neg", ["s"], ["r"]), node("Identity", ["go"], ["on"])], STATE, [("on", "bool", []), ("t", F, None), ("r", F, [2, 3])])  # fmt: skip
    loop = node("Loop", ["n", "go0", "x"], ["y", "rows"], body=step)
    model = make_model([loop], {"x": X}, {"y": F, "rows": F}, constants={"n": np.array(5), "go0": FALSE})
    got = run_model(model, {"x": X})
    np.testing.assert_array_equal(got["y"], X)
    assert got["rows"].shape == (0, 2, 3)


@pytest.mark.parametrize("trips", [-1, 0, 3])
@pytest.mark.parametrize("first", [False, True])
def test_trip_counts_that_are_inputs(make_model, run_model, trips, first):
    step = body([node("Neg", ["s"], ["t"]), node("Neg", ["s"], ["r"]), node("Identity", ["go"], ["on"])], STATE, [("on", "bool", []), ("t", F, None), ("r", F, [2, 3])])  # fmt: skip
    inputs = {"x": X, "m": np.array(trips), "c": np.array(first)}
    model = make_model([node("Loop", ["m", "c", "x"], ["y", "rows"], body=step)], inputs, {"y": F, "rows": F})
    got, count = run_model(model, inputs), max(trips, 0) if first else 0
    np.testing.assert_array_equal(got["y"], X if count % 2 == 0 else -X)
    assert got["rows"].shape == (count, 2, 3)


def test_loops_without_end_are_refused(make_model):
    step = body([node("Neg", ["s"], ["t"]), node("Identity", ["go"], ["on"])], STATE, [("on", "bool", []), ("t", F, None)])
    with pytest.raises(UnsupportedError, match="never ends"):
        import_model(make_model([node("Loop", ["", "", "x"], ["y"], body=step)], {"x": X}, {"y": F}))


def test_bodies_with_the_wrong_number_of_inputs(make_model):
    step = body([node("Neg", ["s"], ["t"]), node("Identity", ["go"], ["on"])], STATE[1:], [("on", "bool", []), ("t", F, None)])
    model = make_model([node("Loop", ["n", "", "x"], ["y"], body=step)], {"x": X}, {"y": F}, constants={"n": np.array(3)})
    with pytest.raises(ImportModelError):
        import_model(model)


# ---------------------------------------------------------------- Scan


@pytest.mark.parametrize("backwards", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scan(make_model, run_model, backwards, axis):
    """A running sum, and the scaled running sum stacked along the last axis in both directions."""
    step = body(
        [node("Add", ["s", "row"], ["t"]), node("Mul", ["t", "k"], ["o"])],
        [("s", F, None), ("row", F, None)],
        [("t", F, None), ("o", F, None)],
    )
    scan = node("Scan", ["s0", "x"], ["y", "ys"], body=step, num_scan_inputs=1, scan_input_axes=[axis], scan_input_directions=[backwards],
                scan_output_axes=[-1], scan_output_directions=[backwards])  # fmt: skip
    length = 3 if axis == 0 else 2
    given = {"s0": np.zeros(length, np.float32), "x": X, "k": np.array(2, np.float32)}
    got = run_model(make_model([scan], given, {"y": F, "ys": F}), given)
    rows = np.moveaxis(X, axis, 0)
    sums = np.cumsum(rows[::-1] if backwards else rows, axis=0)
    np.testing.assert_array_equal(got["y"], sums[-1])
    np.testing.assert_array_equal(got["ys"], np.moveaxis(2 * (sums[::-1] if backwards else sums), 0, -1))


@pytest.mark.parametrize("attribute", ["scan_input_axes", "scan_output_axes"])
def test_scan_along_an_axis_that_is_not_there(make_model, attribute):
    step = body([node("Identity", ["row"], ["o"])], [("row", F, None)], [("o", F, None)])
    scan = node("Scan", ["x"], ["ys"], body=step, num_scan_inputs=1, **{attribute: [2]})
    with pytest.raises(ImportModelError, match="axis 2 of a tensor of rank 2"):
        import_model(make_model([scan], {"x": X}, {"ys": F}))


def test_scan_over_a_symbolic_length(make_model, run_model):
    step = body([node("Add", ["s", "row"], ["t"]), node("Identity", ["t"], ["o"])], [("s", F, None), ("row", F, None)], [("t", F, None), ("o", F, None)])  # fmt: skip
    scan = node("Scan", ["s0", "x"], ["y", "ys"], body=step, num_scan_inputs=1)
    model = make_model([scan], {"s0": (F, [3]), "x": (F, ["n", 3])}, {"y": F, "ys": F})
    got = run_model(model, {"s0": np.zeros(3, np.float32), "x": X})
    np.testing.assert_array_equal(got["ys"], np.cumsum(X, 0))
