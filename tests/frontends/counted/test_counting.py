"""Results whose size the run counts, natively: NonZero, Compress, Unique, NonMaxSuppression, and what follows them."""

import numpy as np
import pytest
from onnx import helper

import tcomp
from tcomp.errors import InputError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.ir.expr import dim
from tcomp.ir.graph import SIZE
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.program import Program
from tcomp.ir.text.parser import parse_graph, parse_program
from tcomp.ir.verify.graph import verify_graph
from tcomp.ops import OPERATORS
from tcomp.options import CompileOptions
from tcomp.pipeline import check_graph
from tcomp.target import CudaTarget

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


def unique_by_numpy(x, axis, ordered):
    """All four outputs, as ONNX defines them."""
    y, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not ordered:
        order = np.argsort(first)
        place = np.argsort(order)
        y, first, inverse, counts = np.take(y, order, 0 if axis is None else axis), first[order], place[inverse], counts[order]
    return {"y": y, "first": first, "inverse": inverse, "counts": counts}


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"])
def test_unique(make_model, dtype, ordered):
    rng = np.random.default_rng(3)
    names = ["y", "first", "inverse", "counts"]
    for axis, shape in ((None, (4, 6)), (0, (9, 2)), (-1, (2, 2, 7))):
        attrs = {"sorted": ordered} | ({} if axis is None else {"axis": axis})
        arrays = [(rng.integers(-2, 3, shape) if dtype[0] in "if" else rng.integers(0, 3, shape)).astype(dtype), np.ones(shape, dtype)]
        model = make_model([node("Unique", ["x"], names, **attrs)], {"x": arrays[0]}, {"y": dtype, **dict.fromkeys(names[1:], I)})
        for got, x in zip(checked(model, *({"x": x} for x in arrays)), arrays, strict=True):
            for name, expected in unique_by_numpy(x, axis, ordered).items():
                np.testing.assert_array_equal(got[name], expected)


def test_unique_of_nans_symbolic_sizes_and_nothing(make_model):
    model = make_model([node("Unique", ["x"], ["y", "first"])], {"x": (F, ["n"])}, {"y": F, "first": I})
    x = np.array([np.nan, 2, -0.0, 0.0, np.nan, -np.inf, 2], np.float32)
    got, one = checked(model, {"x": x}, {"x": x[:1]})
    np.testing.assert_array_equal(got["y"], [-np.inf, 0, 2, np.nan])
    assert got["first"].tolist() == [5, 2, 1, 0] and one["first"].tolist() == [0]
    names = ["y", "first", "inverse", "counts"]
    empty = make_model([node("Unique", ["x"], names)], {"x": np.zeros((0, 3), np.float32)}, {"y": F, **dict.fromkeys(names[1:], I)})
    (got,) = checked(empty, {"x": np.zeros((0, 3), np.float32)})
    assert all(got[name].shape == (0,) for name in names)


def by_onnxruntime(model, case):
    session = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, case), strict=True))


@pytest.mark.parametrize("centered", [0, 1])
@pytest.mark.parametrize("fixed", [True, False])
def test_non_max_suppression(make_model, centered, fixed):
    rng = np.random.default_rng(4)
    suppress = node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["y"], center_point_box=centered)
    for batch, classes, n in ((1, 1, 1), (2, 3, 17), (1, 2, 40)):
        for most, overlap, least in ((n, 0.5, 0.0), (2, 0.0, 0.3), (0, 0.5, 0.1), (100, 1.0, -1.0), (5, 0.3, 2.0)):
            boxes = rng.random((batch, n, 4)).astype(np.float32)  # corners in any order
            scores = (rng.integers(0, 6, (batch, classes, n)) / 5).astype(np.float32)  # many are equal
            limits = {"most": np.array([most]), "overlap": np.array([overlap], np.float32), "least": np.array([least], np.float32)}
            given = {"boxes": boxes, "scores": scores}
            inputs = dict(given) if fixed else {"boxes": (F, ["b", "n", 4]), "scores": (F, ["b", classes, "n"]), **limits}
            model = make_model([suppress], inputs, {"y": I}, opset=11, constants=limits if fixed else {})
            case = given if fixed else given | limits
            (got,) = checked(model, case)
            np.testing.assert_array_equal(got["y"], by_onnxruntime(model, case)["y"])


def test_non_max_suppression_without_limits(make_model):
    rng = np.random.default_rng(5)
    case = {"boxes": rng.random((1, 6, 4)).astype(np.float32), "scores": rng.random((1, 1, 6)).astype(np.float32)}
    none = make_model([node("NonMaxSuppression", ["boxes", "scores"], ["y"])], case, {"y": I}, opset=11)
    assert checked(none, case)[0]["y"].shape == (0, 3)
    some = make_model(
        [node("NonMaxSuppression", ["boxes", "scores", "most"], ["y"])], case, {"y": I}, opset=10, constants={"most": np.array(9)}
    )
    np.testing.assert_array_equal(checked(some, case)[0]["y"], by_onnxruntime(some, case)["y"])


def test_what_was_counted_may_be_too_small(make_model):
    """A window of four over what is above 0."""
    nodes = [
        node("Greater", ["x", "zero"], ["c"]),
        node("Compress", ["x", "c"], ["found"], axis=0),
        node("Reshape", ["found", "line"], ["row"]),
        node("MaxPool", ["row"], ["y"], kernel_shape=[4]),
    ]
    constants = {"zero": np.array(0, F), "line": np.array([1, 1, -1])}
    module = tcomp.compile(make_model(nodes, {"x": (F, ["n"])}, {"y": F}, constants=constants))
    assert module.run({"x": np.array([1, -1, 2, 3, 5, 4], F)})["y"].tolist() == [[[5, 5]]]
    assert module.run({"x": np.array([1, 2, 3], F)})["y"].shape == (1, 1, 0)
    for few in ([1, -1, -2], [1, 2], [1], [-1, -1, -1, -1]):  # what is found, or already what is looked through
        with pytest.raises(InputError, match="too small"):
            module.run({"x": np.array(few, F)})


def test_counts_of_no_rows(make_model):
    model = make_model([node("NonZero", ["x"], ["y"])], {"x": (F, ["n", 2])}, {"y": I})
    assert tcomp.compile(model, dims={"n": (0, 9)}).run({"x": np.zeros((0, 2), np.float32)})["y"].shape == (2, 0)


def test_sizes_that_meet_are_checked_when_they_are_counted(make_model):
    """What is found is added to a vector of three: other numbers end the run."""
    nodes = [node("Compress", ["x", "c"], ["found"], axis=0), node("Add", ["found", "w"], ["y"])]
    model = make_model(nodes, {"x": (F, [5]), "c": ("bool", [5]), "w": (F, [3])}, {"y": F})
    module, case = tcomp.compile(model), {"x": np.arange(5, dtype=F), "w": np.ones(3, F)}
    assert module.run({**case, "c": np.array([1, 0, 1, 0, 1], bool)})["y"].tolist() == [1, 3, 5]
    with pytest.raises(InputError):
        module.run({**case, "c": np.ones(5, bool)})


def test_programs_with_counted_sizes_print_and_parse():
    n, m = dim("n", 1, 100), dim("m", 0)
    program = Program((n, m), n * 8, ((m,),), (), (n - 4,), (), ((m, n * 2),))
    assert str(parse_program(str(program))) == str(program)


def test_gpus_refuse_counted_sizes(make_model):
    proto = make_model([node("NonZero", ["x"], ["y"])], {"x": np.zeros(5, np.float32)}, {"y": I})
    with pytest.raises(UnsupportedError, match="that a run counts cannot be compiled for `cuda"):
        check_graph(import_model(proto), CompileOptions(CudaTarget(("sm_80",))))
    check_graph(import_model(proto), CompileOptions())


def test_slices_and_top_k_by_what_is_computed(make_model):
    nodes = [
        node("ReduceSum", ["m"], ["k"], keepdims=1),
        node("TopK", ["x", "k"], ["best", "at"]),
        node("Neg", ["k"], ["low"]),
        node("Slice", ["x", "low", "far"], ["last"]),
        node("Slice", ["x", "one", "k"], ["middle"]),
        node("Sub", ["k", "one"], ["rest"]),
        node("Slice", ["x", "rest", "low"], ["inner"]),
    ]
    constants = {"far": np.array([1 << 62]), "one": np.array([1])}
    outputs = {"best": F, "at": I, "last": F, "middle": F, "inner": F}
    for shape in ([6], ["n"]):
        model = make_model(nodes, {"x": (F, shape), "m": (I, ["w"])}, outputs, constants=constants)
        x = np.array([3, 1, 4, 1, 5, 9], F)
        cases = [{"x": x, "m": np.full(k, 1)} for k in (1, 2, 5, 6)]
        for got, k in zip(checked(model, *cases), (1, 2, 5, 6), strict=True):
            np.testing.assert_array_equal(got["best"], np.sort(x)[::-1][:k])
            np.testing.assert_array_equal(got["last"], x[-k:])
            np.testing.assert_array_equal(got["middle"], x[1:k])
            np.testing.assert_array_equal(got["inner"], x[k - 1 : -k])
        with pytest.raises(InputError):
            tcomp.compile(model).run({"x": x, "m": np.full(7, 1)})
