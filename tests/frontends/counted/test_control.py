"""Control flow whose results have sizes that only the run tells, natively: If, Loop, nested, compared with ONNX Runtime."""

import numpy as np
import pytest

import tcomp
from tcomp.errors import InputError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.verify.graph import verify_graph
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tests.frontends.test_onnx_control import body, node

F, I, B = "float32", "int64", "bool"
X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)


def checked(model, *cases):
    """Machine code = graph interpreter = ONNX Runtime; the outputs."""
    session = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    graph = import_model(model)
    verify_graph(graph)
    artifact, _ = compile_model(model, CompileOptions(verify=True))
    module, results = tcomp.Module.load(artifact), []
    for case in cases:
        expected = dict(zip([o.name for o in session.get_outputs()], session.run(None, case), strict=True))
        got, interpreted = module.run(case), evaluate_graph(graph, case)
        for name, array in expected.items():
            assert got[name].shape == array.shape == interpreted[name].shape, name
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(interpreted[name], array, rtol=1e-5, atol=1e-6)
        results.append(got)
    return results


def test_branches_of_different_sizes(make_model):
    then = body([node("Concat", ["x", "x"], ["a"], axis=0), node("Neg", ["x"], ["a2"])], [], [("a", F, None), ("a2", F, None)])
    other = body([node("Exp", ["x"], ["b"]), node("Concat", ["x", "x"], ["b2"], axis=1)], [], [("b", F, None), ("b2", F, None)])
    nodes = [
        node("If", ["c"], ["y", "z"], then_branch=then, else_branch=other),
        node("ReduceSum", ["y"], ["sum"], keepdims=0),
        node("Shape", ["z"], ["shape"]),
        node("Relu", ["y"], ["relu"]),
    ]
    for shape in (X.shape, ["n", "m"]):
        model = make_model(nodes, {"x": (F, shape), "c": (B, [])}, {"y": F, "z": F, "sum": F, "shape": I, "relu": F})
        yes, no = checked(model, *({"x": X, "c": np.array(c)} for c in (True, False)))
        assert yes["y"].shape == (4, 3) and no["y"].shape == (2, 3) and no["shape"].tolist() == [2, 6]


def test_a_branch_counts(make_model):
    inner = body([node("NonZero", ["x"], ["t"]), node("Transpose", ["t"], ["a"])], [], [("a", I, None)])
    other = body([], [], [("none", I, None)], none=np.zeros((0, 2), np.int64))
    outer = body([node("If", ["d"], ["o"], then_branch=inner, else_branch=other)], [], [("o", I, None)])
    empty = body([], [], [("one", I, None)], one=np.ones((1, 2), np.int64))
    nodes = [node("If", ["c"], ["at"], then_branch=outer, else_branch=empty), node("GatherND", ["x", "at"], ["y"])]
    model = make_model(nodes, {"x": X, "c": (B, []), "d": (B, [])}, {"at": I, "y": F})
    checked(model, *({"x": X * (X > 2), "c": np.array(c), "d": np.array(d)} for c in (True, False) for d in (True, False)))


def test_branches_of_different_ranks_are_refused(make_model):
    then, other = (
        body([node("ReduceSum", ["x"], ["o"], keepdims=0)], [], [("o", F, None)]),
        body([node("Neg", ["x"], ["p"])], [], [("p", F, None)]),
    )
    model = make_model([node("If", ["c"], ["y"], then_branch=then, else_branch=other)], {"x": X, "c": (B, [])}, {"y": F})
    with pytest.raises(UnsupportedError, match="depends on input data"):
        import_model(model)


STEP = [("i", I, []), ("go", B, []), ("s", F, None)]


def test_a_loop_that_stops_and_stacks(make_model):
    """Collatz: how many rows there are depends on data."""
    step = body(
        [
            node("Mod", ["s", "two"], ["odd"]), node("Cast", ["odd"], ["is"], to=9), node("Mul", ["s", "three"], ["m"]),
            node("Add", ["m", "one"], ["up"]), node("Div", ["s", "two"], ["down"]), node("Where", ["is", "up", "down"], ["t"]),
            node("Greater", ["t", "one"], ["on"]), node("Identity", ["t"], ["row"]),
        ],
        [("i", I, []), ("go", B, []), ("s", I, [])], [("on", B, []), ("t", I, []), ("row", I, [])],
    )  # fmt: skip
    constants = {"one": np.array(1), "two": np.array(2), "three": np.array(3), "most": np.array(100)}
    nodes = [node("Loop", ["most", "", "x"], ["last", "rows"], body=step), node("Size", ["rows"], ["n"])]
    model = make_model(nodes, {"x": (I, [])}, {"last": I, "rows": I, "n": I}, constants=constants)
    got = checked(model, *({"x": np.array(n)} for n in (2, 6, 27)))
    assert got[1]["rows"].tolist() == [3, 10, 5, 16, 8, 4, 2, 1] and got[2]["n"] == 100


@pytest.mark.parametrize("kind", ["count", "condition", "both"])
def test_trips_that_depend_on_data(make_model, kind):
    step = body([node("Add", ["s", "s"], ["t"]), node("Less", ["t", "limit"], ["on"])], STEP, [("on", B, []), ("t", F, [])])
    inputs = {"x": (F, []), "limit": (F, [])}
    inputs |= {"n": (I, [])} if kind != "condition" else {}
    inputs |= {"first": (B, [])} if kind != "count" else {}
    names = ["n" if "n" in inputs else "", "first" if "first" in inputs else "", "x"]
    model = make_model([node("Loop", names, ["y"], body=step)], inputs, {"y": F})
    for n in (0, 1, 3, 50):
        for first in (True, False):
            case = {"x": np.array(1, F), "limit": np.array(100, F), "n": np.array(n), "first": np.array(first)}
            checked(model, {name: case[name] for name in inputs})


def test_values_grow(make_model):
    """By a constant, by the size of an input, and by what is counted; more trips than are unrolled."""
    step = body([node("Concat", ["s", "x"], ["t"], axis=0), node("Identity", ["go"], ["on"])], STEP, [("on", B, []), ("t", F, None)])
    nodes = [node("Loop", ["n", "", "x"], ["y"], body=step), node("ReduceSum", ["y"], ["sum"], keepdims=0)]
    for shape in (X.shape, ["a", 3]):
        model = make_model(nodes, {"x": (F, shape)}, {"y": F, "sum": F}, constants={"n": np.array(40)})
        (got,) = checked(model, {"x": X})
        assert got["y"].shape == (82, 3)


def test_values_grow_until_data_says_stop(make_model):
    nodes = [
        node("Concat", ["s", "x"], ["t"], axis=0), node("ReduceSum", ["t"], ["sum"], keepdims=0), node("Less", ["sum", "limit"], ["on"]),
    ]  # fmt: skip
    step = body(nodes, STEP, [("on", B, []), ("t", F, None)])
    model = make_model(
        [node("Loop", ["n", "", "x"], ["y"], body=step)], {"x": (F, ["a"]), "limit": (F, [])}, {"y": F}, constants={"n": np.array(99)}
    )
    checked(model, *({"x": X[0], "limit": np.array(limit, F)} for limit in (0, 30, 1e6)))


def test_values_shrink_without_a_trip_count(make_model):
    """Keep what is above the mean, until one is left: sizes are counted in each iteration."""
    nodes = [
        node("ReduceMean", ["s"], ["mean"], keepdims=0), node("GreaterOrEqual", ["s", "mean"], ["keep"]),
        node("Compress", ["s", "keep"], ["t"], axis=0), node("Size", ["t"], ["n"]), node("Greater", ["n", "one"], ["on"]),
    ]  # fmt: skip
    step = body(nodes, STEP, [("on", B, []), ("t", F, None)])
    model = make_model([node("Loop", ["", "", "x"], ["y"], body=step)], {"x": (F, ["a"])}, {"y": F}, constants={"one": np.array(1)})
    x = np.random.default_rng(0).random(50).astype(np.float32)
    (got, _) = checked(model, {"x": x}, {"x": x[:1]})
    assert got["y"].tolist() == [x.max()]


def test_loops_that_grow_in_loops_that_grow(make_model):
    inner = body([node("Concat", ["u", "x"], ["v"], axis=0), node("Identity", ["go2"], ["on2"])],
                 [("j", I, []), ("go2", B, []), ("u", F, None)], [("on2", B, []), ("v", F, None)])  # fmt: skip
    outer = body([node("Loop", ["m", "", "s"], ["w"], body=inner), node("Concat", ["w", "x"], ["t"], axis=0), node("Identity", ["go"], ["on"])],
                 STEP, [("on", B, []), ("t", F, None)])  # fmt: skip
    model = make_model(
        [node("Loop", ["n", "", "x"], ["y"], body=outer)], {"x": (F, ["a"]), "m": (I, [])}, {"y": F}, constants={"n": np.array(40)}
    )
    for m in (0, 2, 5):  # given before the run
        (got,) = checked(model, {"x": X[0], "m": np.array(m)})
        assert got["y"].shape == (3 + 40 * (m + 1) * 3,)
    known = make_model(
        [node("Loop", ["n", "", "x"], ["y"], body=outer)], {"x": (F, ["a"])}, {"y": F}, constants={"n": np.array(40), "m": np.array(35)}
    )
    (got,) = checked(known, {"x": X[0]})
    assert got["y"].shape == (3 + 40 * 36 * 3,)


def test_rows_of_different_sizes_are_refused(make_model):
    step = body([node("Concat", ["s", "x"], ["t"], axis=0), node("Identity", ["t"], ["row"]), node("Identity", ["go"], ["on"])], STEP,
                [("on", B, []), ("t", F, None), ("row", F, None)])  # fmt: skip
    model = make_model(
        [node("Loop", ["n", "", "x"], ["y", "rows"], body=step)], {"x": X}, {"y": F, "rows": F}, constants={"n": np.array(40)}
    )
    with pytest.raises(UnsupportedError, match="sizes differ"):
        import_model(model)


@pytest.mark.parametrize("count", ["", "m"])
def test_rows_without_a_bound_need_the_callers(make_model, count):
    step = body([node("Add", ["s", "s"], ["t"]), node("Less", ["t", "limit"], ["on"]), node("Identity", ["t"], ["row"])], STEP,
                [("on", B, []), ("t", F, []), ("row", F, [])])  # fmt: skip
    nodes = [node("ReduceSum", ["k"], ["m"], keepdims=0), node("Loop", [count, "", "x"], ["y", "rows"], body=step, name="again")]
    model = make_model(nodes, {"x": (F, []), "limit": (F, []), "k": (I, ["w"])}, {"y": F, "rows": F})
    with pytest.raises(UnsupportedError, match="--dim again_trips=0..N"):
        import_model(model)
    with pytest.raises(InputError, match="no loop"):
        import_model(model, dims={"another_trips": (0, 5), "again_trips": (0, 5)})
    module = tcomp.compile(model, dims={"again_trips": (0, 5)})
    case = {"x": np.array(1, F), "k": np.array([2, 3])}
    for limit, trips in ((0, 1), (5, 3), (32, 5)):
        got = module.run({**case, "limit": np.array(limit, F)})
        assert got["rows"].tolist() == [2.0 ** (n + 1) for n in range(trips)] and got["y"] == 2.0**trips
    with pytest.raises(InputError):
        module.run({**case, "limit": np.array(33, F), "k": np.array([4, 2])})


@pytest.mark.parametrize("shape", [[3, 4, 2], ["b", "t", 2]])
def test_scan_of_opset_8(make_model, shape):
    """A batch of sequences, one backwards, with a captured weight; states and stacked rows."""
    nodes = [node("Add", ["s", "e"], ["t"]), node("Mul", ["t", "w"], ["r0"]), node("Add", ["r0", "g"], ["r"])]
    step = body(nodes, [("s", F, [2]), ("e", F, [2]), ("g", F, [2])], [("t", F, [2]), ("r", F, [2])])
    scan = node("Scan", ["", "start", "x", "z"], ["last", "rows"], body=step, num_scan_inputs=2, directions=[0, 1])
    inputs = {"start": (F, [shape[0], 2]), "x": (F, shape), "z": (F, shape), "w": (F, [2])}
    model = make_model([scan], inputs, {"last": F, "rows": F}, opset=8)
    rng = np.random.default_rng(0)
    start, x, z, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 2), (3, 4, 2), (3, 4, 2), (2,)))
    artifact, _ = compile_model(model, CompileOptions(verify=True))
    case = {"start": start, "x": x, "z": z, "w": w}
    got, interpreted = tcomp.Module.load(artifact).run(case), evaluate_graph(import_model(model), case)
    sums = start[:, None] + np.cumsum(x, axis=1)
    for result in (got, interpreted):
        np.testing.assert_allclose(result["last"], sums[:, -1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result["rows"], sums * w + z[:, ::-1], rtol=1e-5, atol=1e-6)
