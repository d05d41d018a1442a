"""Shape arithmetic at compile time."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper

import tcomp
from tcomp.errors import ImportModelError, InputError, UnsupportedError
from tcomp.frontends.onnx import import_model, symbolic
from tcomp.ir import te
from tcomp.ir.expr import const, evaluate_int, variables
from tcomp.ir.simplify import simplify

F = "float32"
B, S = te.var("b", 1, 1 << 20), te.var("s", 1, 1 << 20)


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs, outputs, **attrs)


def shape_of_output(make_model, nodes, dims=("b", "s", 64), opset=17, **constants):
    """The shape of `y`, as text; `x` has the given dims."""
    model = make_model(nodes, {"x": (F, list(dims))}, {"y": F}, opset=opset, constants=constants)
    graph = import_model(model)
    return [str(d) for d in graph.outputs[0].shape], graph


def i64(*values):
    return np.array(values, np.int64)


def test_reshape_by_computed_sizes(make_model):
    """The way attention splits heads: Reshape(x, Concat(b, s, 4, -1)), and back."""
    nodes = [
        node("Shape", ["x"], ["sh"]), node("Gather", ["sh", "zero"], ["b"]), node("Gather", ["sh", "one"], ["s"]),
        node("Unsqueeze", ["b", "ax"], ["b1"]), node("Unsqueeze", ["s", "ax"], ["s1"]),
        node("Concat", ["b1", "s1", "four", "rest"], ["split"], axis=0), node("Reshape", ["x", "split"], ["h"]),
        node("Transpose", ["h"], ["t"], perm=[0, 2, 1, 3]), node("Transpose", ["t"], ["u"], perm=[0, 2, 1, 3]),
        node("Mul", ["b", "s"], ["bs"]), node("Unsqueeze", ["bs", "ax"], ["bs1"]),
        node("Concat", ["bs1", "rest"], ["flat"], axis=0), node("Reshape", ["u", "flat"], ["y"]),
    ]  # fmt: skip
    shape, graph = shape_of_output(make_model, nodes, zero=np.array(0), one=np.array(1), ax=i64(0), four=i64(4), rest=i64(-1))
    assert shape in (["b * s", "64"], ["s * b", "64"])
    assert {n.op.name for n in graph.nodes} == {"reshape", "transpose"}  # nothing of the shape arithmetic is left


def test_floats_that_scale_sizes(make_model):
    """sizes = floor(cast(h) * 0.5), the way exporters write interpolation."""
    nodes = [
        node("Shape", ["x"], ["sh"]), node("Slice", ["sh", "start", "end"], ["tail"]), node("Cast", ["tail"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["f", "half"], ["g"]), node("Floor", ["g"], ["fl"]), node("Cast", ["fl"], ["n"], to=TensorProto.INT64),
        node("ConstantOfShape", ["n"], ["y"]),
    ]  # fmt: skip
    shape, _ = shape_of_output(make_model, nodes, start=i64(1), end=i64(3), half=np.array(0.5, np.float32))
    assert shape == ["s // 2", "32"]


def test_minus_one_of_a_symbolic_reshape(make_model):
    shape, _ = shape_of_output(make_model, [node("Reshape", ["x", "shape"], ["y"])], shape=i64(0, -1))
    assert shape == ["b", "s * 64"]
    with pytest.raises(ImportModelError):
        shape_of_output(make_model, [node("Reshape", ["x", "shape"], ["y"])], shape=i64(7, 7))


def test_sizes_that_are_never_equal_are_named(make_model):
    """As one of PyTorch's exporters writes Cohere: heads of queries in the number of those of keys."""
    model = make_model(
        [node("Reshape", ["x", "shape"], ["y"])], {"x": ("float32", ["n", 32])}, {"y": "float32"}, constants={"shape": i64(0, 2, 8)}
    )
    with pytest.raises(ImportModelError, match=r"reshape of \[n, 32\] to \[n, 2, 8\](.|\n)*no sizes of the inputs make them equal"):
        import_model(model)


def test_where_and_equal_on_sizes(make_model):
    """Expand by Where(shape == -1, ones, shape), as PyTorch exports `expand`."""
    nodes = [
        node("Shape", ["x"], ["sh"]), node("Equal", ["sh", "minus"], ["m"]), node("Where", ["m", "ones", "sh"], ["target"]),
        node("Expand", ["c", "target"], ["y"]),
    ]  # fmt: skip
    shape, _ = shape_of_output(make_model, nodes, minus=i64(-1), ones=i64(1, 1, 1), c=np.ones(1, np.float32))
    assert shape == ["b", "s", "64"]


def test_sizes_that_are_results(make_model, run_model):
    """A symbolic size may be data: it is written down by a node."""
    nodes = [node("Shape", ["x"], ["sh"]), node("Add", ["sh", "ten"], ["y"])]
    model = make_model(nodes, {"x": (F, ["b", "s"])}, {"y": "int64"}, constants={"ten": i64(10)})
    got = run_model(model, {"x": np.zeros((3, 5), np.float32)})
    np.testing.assert_array_equal(got["y"], [13, 15])


def test_what_depends_on_data_is_named(make_model):
    nodes = [node("ReduceMax", ["v"], ["shape"], keepdims=1), node("Reshape", ["x", "shape"], ["y"])]
    model = make_model(nodes, {"x": (F, [2, 3]), "v": ("int64", ["n"])}, {"y": F})
    with pytest.raises(UnsupportedError, match=r"the shape of `Reshape` is not known(.|\n)*`shape`(.|\n)*computed from input data"):
        import_model(model)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_elements_agree_with_evaluation(data):
    """Random chains of arithmetic on (b, s, constants), at every size in a small range."""
    pool = [B, S, const(2), const(3)]
    table = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": te.truncdiv, "min": te.minimum, "max": te.maximum}  # fmt: skip
    expressions = list(pool)
    for _ in range(data.draw(st.integers(1, 4))):
        op = data.draw(st.sampled_from(sorted(table)))
        left = te.placeholder((2,), "int64", "left")
        right = te.placeholder((2,), "int64", "right")
        picks = [data.draw(st.sampled_from(expressions if op != "div" else pool)) for _ in range(4)]
        result = te.compute((2,), lambda i, op=op, left=left, right=right: table[op](left[i], right[i]), "r")
        elements = symbolic.propagate([result], {left: tuple(picks[:2]), right: tuple(picks[2:])})
        assert elements is not None
        for element, x, y in zip(elements[0], picks[:2], picks[2:], strict=True):
            expected = table[op](x, y)
            for b, s in ((1, 1), (2, 7), (5, 3), (16, 9)):
                values = {B: b, S: s}
                assert evaluate_int(element, values) == evaluate_int(expected, values)
        expressions += elements[0]


@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0, 1.5])
@pytest.mark.parametrize("rounding", [te.floor, te.ceil])
def test_fractions_agree_with_floating_point(factor, rounding):
    x = te.placeholder((1,), "int64")
    y = te.compute((1,), lambda i: te.cast(rounding(te.cast(x[i], "float32") * factor), "int64"))
    ((element,),) = symbolic.propagate([y], {x: (S,)})
    for s in (1, 2, 3, 7, 1001, 999_999):
        exact = np.float32(s) * np.float32(factor)
        assert evaluate_int(element, {S: s}) == int(np.floor(exact) if rounding is te.floor else np.ceil(exact))


def test_what_is_no_exact_fraction_is_not_known():
    x = te.placeholder((1,), "int64")
    y = te.compute((1,), lambda i: te.cast(te.floor(te.cast(x[i], "float32") * 0.1), "int64"))
    assert symbolic.propagate([y], {x: (S,)}) is None
    narrow = te.compute((1,), lambda i: te.cast(x[i], "int8"))
    assert symbolic.propagate([narrow], {x: (S,)}) is None


def test_expressions_do_not_grow_without_bound():
    """Squaring a sum forty times would have 2^40 terms."""
    element = S + 1
    for _ in range(40):
        x = te.placeholder((1,), "int64")
        elements = symbolic.propagate([te.compute((1,), lambda i, x=x: x[i] * (x[i] + B))], {x: (element,)})
        if elements is None:
            break
        ((element,),) = elements
    else:
        raise AssertionError("the expression kept growing")
    assert len(variables(simplify(element))) == 2


def test_reductions_and_gathers_of_known_elements():
    x, at = te.placeholder((3,), "int64"), te.placeholder((), "int64")
    k = te.reduce_axis(3)
    total = te.compute((), lambda: te.prod(x[k], k))
    picked = te.compute((), lambda: x[at[()]])
    elements = symbolic.propagate([total, picked], {x: (B, S, const(4)), at: (const(1),)})
    assert elements is not None
    ((product,), (pick,)) = elements
    assert evaluate_int(product, {B: 3, S: 5}) == 60 and pick is S


@pytest.mark.parametrize("op", ["CumSum", "ReduceSum"])
def test_sizes_beyond_all_memory_are_refused(make_model, op):
    """Sums of x[a, 1, 1] + y[1, b, 1] + z[1, 1, c]: 2^65 bytes, of which 64 bits are 0."""
    nodes = [
        node("Add", ["x", "y"], ["xy"]),
        node("Add", ["xy", "z"], ["all"]),
        node(op, ["all", "axis"], ["sums"]),
        node("ReduceMax", ["sums"], ["m"]),
    ]
    inputs = {"x": (F, ["a", 1, 1]), "y": (F, [1, "b", 1]), "z": (F, [1, 1, "c"])}
    model = tcomp.compile(make_model(nodes, inputs, {"m": F}, opset=17, constants={"axis": i64(0) if op == "ReduceSum" else np.array(0)}))
    n = 1 << 21
    with pytest.raises(InputError, match=f"too large(.|\n)*a = {n}, b = {n}, c = {n}"):
        model.run({"x": np.zeros((n, 1, 1), np.float32), "y": np.zeros((1, n, 1), np.float32), "z": np.zeros((1, 1, n), np.float32)})
    small = {"x": np.ones((2, 1, 1), np.float32), "y": np.ones((1, 3, 1), np.float32), "z": np.ones((1, 1, 4), np.float32)}
    assert model.run(small)["m"] == 6
