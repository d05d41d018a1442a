"""Results whose size the run counts, natively: NonZero, Compress, and what follows them."""

import numpy as np
import pytest
from onnx import helper

import tcomp
from tcomp.frontends.onnx import import_model
from tcomp.ir.graph import SIZE
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.text.parser import parse_graph
from tcomp.ir.verify import verify_graph
from tcomp.ops import OPERATORS

F, I = "float32", "int64"
HITS = {"none": 0.0, "some": 0.4, "all": 1.0}


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs, outputs, **attrs)


def checked(model, *cases, **options):
    """The outputs of machine code for each case, after they have been compared with those of the graph interpreter."""
    graph = import_model(model)
    verify_graph(graph)
    assert str(parse_graph(str(graph), OPERATORS, {})) == str(graph)
    module, results = tcomp.compile(model, **options), []
    for case in cases:
        got, expected = module.run(case), evaluate_graph(graph, case)
        for name, array in expected.items():
            assert got[name].shape == array.shape and got[name].dtype == array.dtype
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)
        results.append(got)
    return results


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64"])
def test_non_zero(make_model, dtype):
    rng = np.random.default_rng(0)
    arrays = [(rng.random((2, 3, 5)) < share).astype(dtype) for share in HITS.values()]
    model = make_model([node("NonZero", ["x"], ["y"])], {"x": arrays[0]}, {"y": I})
    for got, x in zip(checked(model, *({"x": x} for x in arrays)), arrays, strict=True):
        np.testing.assert_array_equal(got["y"], np.stack(np.nonzero(x)))


def test_non_zero_of_scalars_nan_negative_zero_and_nothing(make_model):
    scalar = make_model([node("NonZero", ["x"], ["y"])], {"x": np.array(1, np.float32)}, {"y": I})
    one, none = checked(scalar, {"x": np.array(3, np.float32)}, {"x": np.array(0, np.float32)})
    assert one["y"].tolist() == [[0]] and none["y"].shape == (1, 0)
    x = np.array([np.nan, -0.0, 0.0, -1.0, np.inf], np.float32)
    (got,) = checked(make_model([node("NonZero", ["x"], ["y"])], {"x": x}, {"y": I}), {"x": x})
    assert got["y"].tolist() == [[0, 3, 4]]
    empty = np.zeros((2, 0, 3), np.float32)
    (got,) = checked(make_model([node("NonZero", ["x"], ["y"])], {"x": empty}, {"y": I}), {"x": empty})
    assert got["y"].shape == (3, 0)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_compress(make_model, axis):
    rng, attrs = np.random.default_rng(1), {} if axis is None else {"axis": axis}
    x = rng.standard_normal((4, 5, 3)).astype(np.float32)
    length = (60, 4, 5, 3)[(None, 0, 1, -1).index(axis)]
    model = make_model([node("Compress", ["x", "c"], ["y"], **attrs)], {"x": x, "c": np.zeros(length, bool)}, {"y": F})
    conditions = [rng.random(length) < share for share in HITS.values()]
    for got, c in zip(checked(model, *({"x": x, "c": c} for c in conditions)), conditions, strict=True):
        np.testing.assert_array_equal(got["y"], np.compress(c, x, axis))


def test_counted_sizes_flow_on(make_model):
    """Shape, ConstantOfShape, Range, Gather, Reshape, Concat, reductions, and a second count, all over a size that the run counts."""
    nodes = [
        node("NonZero", ["x"], ["at"]),
        node("Transpose", ["at"], ["rows"], perm=[1, 0]),
        node("GatherND", ["x", "rows"], ["found"]),
        node("Shape", ["found"], ["size"]),
        node("ConstantOfShape", ["size"], ["zeros"]),
        node("Squeeze", ["size"], ["n"]),
        node("Range", ["zero", "n", "one"], ["numbers"]),
        node("ReduceSum", ["found"], ["sum"], keepdims=0),
        node("Softmax", ["found"], ["soft"], axis=0),
        node("Reshape", ["rows", "flat"], ["line"]),
        node("Concat", ["found", "zeros", "found"], ["twice"], axis=0),
        node("Greater", ["found", "limit"], ["large"]),
        node("Compress", ["found", "large"], ["larger"], axis=0),
        node("MatMul", ["found", "found"], ["norm"]),
    ]
    constants = {"zero": np.array(0), "one": np.array(1), "flat": np.array([-1]), "limit": np.array(0.5, np.float32)}
    outputs = {"size": I, "numbers": I, "sum": F, "soft": F, "line": I, "twice": F, "larger": F, "norm": F}
    model = make_model(nodes, {"x": (F, ["a", 7])}, outputs, constants=constants)
    assert sum(n.op is SIZE for n in import_model(model).nodes) == 2
    rng = np.random.default_rng(2)
    cases = [{"x": (rng.random((n, 7)) * (rng.random((n, 7)) < share)).astype(np.float32)} for n in (1, 3) for share in (0.4, 1.0)]
    for got, case in zip(checked(model, *cases, {"x": np.zeros((2, 7), np.float32)}), cases, strict=False):
        found = case["x"][np.nonzero(case["x"])]
        np.testing.assert_array_equal(got["twice"], np.concatenate([found, 0 * found, found]))
        np.testing.assert_array_equal(got["larger"], found[found > 0.5])
        assert got["size"].tolist() == [len(found)] and got["numbers"].tolist() == list(range(len(found)))


def test_counted_outputs_may_be_given_and_bound(make_model):
    x = np.array([[1, 0, 2], [0, 0, 3]], np.float32)
    module = tcomp.compile(make_model([node("NonZero", ["x"], ["y"])], {"x": x}, {"y": I}))
    place = np.empty((2, 6), np.int64)
    got = module.run({"x": x}, out={"y": place})["y"]
    assert got.tolist() == [[0, 0, 1], [0, 2, 2]] and np.shares_memory(got, place)
    bound = module.bind({"x": x})
    assert bound.run()["y"].tolist() == [[0, 0, 1], [0, 2, 2]]
    bound.inputs["x"][...] = 0
    assert bound.run()["y"].shape == (2, 0)
