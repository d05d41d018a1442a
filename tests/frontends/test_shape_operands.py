"""Shape operands that are inputs of the model: their values are known before a run, and decide on sizes, places and axes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings, strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.errors import InputError
from tcomp.frontends.onnx import import_model
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.text.parser import parse_graph
from tcomp.options import CompileOptions
from tcomp.verification import verify

F, I, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) + 1


def one_node(op, inputs, outputs=1, opset=18, out=F, **attributes):
    """A model of one node, whose inputs are given as (name, element type, shape)."""
    names = [f"y{n}" for n in range(outputs)]
    made = helper.make_node(op, [i[0] for i in inputs], names, name="n", **attributes)
    infos = [helper.make_tensor_value_info(*i) for i in inputs if i[0]]
    kinds = [out, I] if op == "TopK" else [out] * outputs
    graph = helper.make_graph([made], "g", infos, [helper.make_tensor_value_info(n, k, None) for n, k in zip(names, kinds, strict=True)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


class Model:
    """A model in the reference, the interpreter and native code."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.reference, self.graph, self.module = ReferenceEvaluator(model), import_model(model), tcomp.compile(model, threads=1)

    def check(self, inputs, want=None, atol=1e-6):
        """Both levels give what the reference gives, or what is `want`ed."""
        want = self.reference.run(None, inputs) if want is None else want
        levels = evaluate_graph(self.graph, inputs), self.module.run(inputs)
        for found in levels:
            for a, b in zip(found.values(), want, strict=True):
                assert a.shape == np.shape(b)
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)

    def refuse(self, inputs, match):
        """Both levels refuse the inputs."""
        for run in (lambda: evaluate_graph(self.graph, inputs), lambda: self.module.run(inputs)):
            with pytest.raises(InputError, match=match):
                run()


_models: dict[object, Model] = {}


def cached(key, make) -> Model:
    """One model for all examples of a property."""
    if key not in _models:
        _models[key] = Model(make())
    return _models[key]


PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
i64 = lambda *values: np.array(values, np.int64)


@PROPERTY
@given(st.permutations([2, 3, 4]), st.sampled_from([None, 0, 1, 2]), st.sampled_from([None, 0, 1, 2]), st.booleans())
def test_reshape(order, minus, copied, allowzero):
    model = cached(("Reshape", allowzero), lambda: one_node("Reshape", [("x", F, [2, 3, 4]), ("s", I, [3])], allowzero=int(allowzero)))
    shape = i64(*order)
    if minus is not None:
        shape[minus] = -1
    if copied is not None and copied != minus and not allowzero and order[copied] == X.shape[copied]:
        shape[copied] = 0
    model.check({"x": X, "s": shape})


def test_shapes_that_do_not_fit():
    model = Model(one_node("Reshape", [("x", F, [2, 3, 4]), ("s", I, [3])]))
    for wrong in ([2, 3, 5], [-1, -1, 4], [-1, 7, 1], [-2, 3, 4], [1 << 40, 3, 4], [-(1 << 63), 1, 1], [1 << 31, 1 << 31, 4]):
        model.refuse({"x": X, "s": i64(*wrong)}, "values of input `s` do not fit")


def test_an_empty_tensor_takes_another_shape():
    model = Model(one_node("Reshape", [("x", F, [0, 3]), ("s", I, [2])], allowzero=1))
    for shape in ([5, 0], [0, 7], [0, 0]):
        model.check({"x": np.zeros((0, 3), np.float32), "s": i64(*shape)})


@PROPERTY
@given(st.lists(st.integers(-3, 2), min_size=2, max_size=2), st.booleans(), st.sampled_from(["ReduceSum", "ReduceMax", "ReduceL2"]))
def test_axes_of_reductions(axes, keepdims, op):
    assume(axes[0] % 3 != axes[1] % 3)
    model = cached((op, keepdims), lambda: one_node(op, [("x", F, [2, 3, 4]), ("a", I, [2])], keepdims=int(keepdims)))
    model.check({"x": X, "a": i64(*axes)})


def test_axes_that_do_not_fit():
    model = Model(one_node("ReduceSum", [("x", F, [2, 3, 4]), ("a", I, [2])]))
    model.refuse({"x": X, "a": i64(0, 3)}, "values of input `a` do not fit")
    model.refuse({"x": X, "a": i64(1, -2)}, "values of input `a` do not fit")


@PROPERTY
@given(st.data())
def test_slice(data):
    """Starts, ends and steps of all signs and far outside; axes in any order."""
    far = st.sampled_from([*range(-6, 7), 1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63)])
    starts, ends = (data.draw(st.lists(far, min_size=2, max_size=2)) for _ in range(2))
    steps = data.draw(st.lists(st.sampled_from([-3, -2, -1, 1, 2, 3, 1 << 40]), min_size=2, max_size=2))
    axes = data.draw(st.sampled_from([(0, 1), (2, 0), (-1, -2), (1, -1)]))
    model = cached("Slice", lambda: one_node("Slice", [("x", F, [2, 3, 4]), *((n, I, [2]) for n in "sead")]))
    want = [slice(None)] * 3
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        stop = None if step < 0 and end < -X.shape[axis] else end  # NumPy counts a stop before the first element from the end
        want[axis] = slice(start, stop, step)
    model.check({"x": X, "s": i64(*starts), "e": i64(*ends), "a": i64(*axes), "d": i64(*steps)}, [X[tuple(want)]])


def test_slices_that_do_not_fit():
    model = Model(one_node("Slice", [("x", F, [2, 3, 4]), *((n, I, [2]) for n in "sead")]))
    fine = {"x": X, "s": i64(0, 0), "e": i64(1, 1), "a": i64(0, 1), "d": i64(1, 1)}
    model.refuse(fine | {"d": i64(1, 0)}, "`d`")
    model.refuse(fine | {"a": i64(0, 3)}, "`a`")
    model.refuse(fine | {"a": i64(1, 1)}, "`a`")


@PROPERTY
@given(st.sampled_from([[2, 3, 4], [1, 1, 1], [5, 2, 3, 4], [1, 1, 3, 1], [0, 2, 1, 4]]))
def test_expand(shape):
    rank = len(shape)
    x = X[:, :, :1]
    assume(len(shape) == rank)
    model = cached(("Expand", rank), lambda: one_node("Expand", [("x", F, [2, 3, 1]), ("s", I, [rank])]))
    model.check({"x": x, "s": i64(*shape)}, [np.broadcast_to(x, np.broadcast_shapes(x.shape, shape))])


def test_shapes_that_do_not_broadcast():
    model = Model(one_node("Expand", [("x", F, [2, 1]), ("s", I, [2])]))
    model.refuse({"x": X[:, 0, :1], "s": i64(3, 1)}, "values of input `s`")
    model.refuse({"x": X[:, 0, :1], "s": i64(2, -1)}, "values of input `s`")


@PROPERTY
@given(st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_tile(repeats):
    cached("Tile", lambda: one_node("Tile", [("x", F, [2, 3, 4]), ("r", I, [3])])).check({"x": X, "r": i64(*repeats)})


@PROPERTY
@given(st.lists(st.integers(-1, 3), min_size=4, max_size=4), st.sampled_from(["constant", "edge", "reflect", "wrap"]), st.booleans())
def test_pad(pads, mode, swapped):
    model = cached(("Pad", mode), lambda: one_node("Pad", [("x", F, [3, 4]), ("p", I, [4]), ("", 0, []), ("a", I, [2])], mode=mode))
    assume(mode == "constant" or min(pads) >= 0)
    assume(mode != "reflect" or (max(pads[0::2]) < 3 and max(pads[1::2]) < 3))
    order = [1, 0] if swapped else [0, 1]
    widths = [(pads[order.index(n)], pads[2 + order.index(n)]) for n in range(2)]
    assume(mode != "reflect" or (max(widths[0]) < 3 and max(widths[1]) < 4))
    want = np.pad(X[0], [(max(b, 0), max(a, 0)) for b, a in widths], mode=mode)
    want = want[tuple(slice(max(-b, 0), d - max(-a, 0)) for (b, a), d in zip(widths, want.shape, strict=True))]
    model.check({"x": X[0], "p": i64(*pads), "a": i64(*order)}, [want])


@PROPERTY
@given(st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([-4, -3, -1, 1, 2, 5]))
def test_range(start, limit, step):
    scalars = [(n, I, []) for n in "abc"]
    model = cached("Range", lambda: one_node("Range", scalars, out=I))
    model.check(dict(zip("abc", map(np.int64, (start, limit, step)), strict=True)))
    floats = cached("Range of floats", lambda: one_node("Range", [(n, F, []) for n in "abc"]))
    floats.check(dict(zip("abc", map(np.float32, (start, limit / 2, step / 4)), strict=True)))


def test_ranges_that_do_not_end():
    model = Model(one_node("Range", [(n, I, []) for n in "abc"], out=I))
    model.refuse({"a": np.int64(0), "b": np.int64(5), "c": np.int64(0)}, "the length of")
    model.refuse({"a": np.int64(-(1 << 63)), "b": np.int64((1 << 63) - 1), "c": np.int64(1)}, "the length of")
    floats = Model(one_node("Range", [(n, F, []) for n in "abc"]))
    for bad in ((0, 5, 0), (0, np.inf, 1), (0, np.nan, 1)):
        floats.refuse(dict(zip("abc", map(np.float32, bad), strict=True)), "the length of")


@PROPERTY
@given(st.integers(0, 4), st.integers(-3, 2))
def test_split_topk_and_others(k, axis):
    split = cached("Split", lambda: one_node("Split", [("x", F, [2, 3, 4]), ("s", I, [3])], outputs=3, axis=2))
    parts = i64(k, (4 - k) // 2, 4 - k - (4 - k) // 2)
    split.check({"x": X, "s": parts}, np.split(X, [k, k + parts[1]], axis=2))
    top = cached("TopK", lambda: one_node("TopK", [("x", F, [2, 3, 4]), ("k", I, [1])], outputs=2, largest=0))
    top.check({"x": X, "k": i64(k)}, [X[..., :k], np.broadcast_to(np.arange(k), (2, 3, k))])
    squeeze = cached("Squeeze", lambda: one_node("Squeeze", [("x", F, [1, 3, 1, 4]), ("a", I, [1])]))
    squeeze.check({"x": X[:1, :, None], "a": i64(0 if k % 2 else -2)})
    unsqueeze = cached("Unsqueeze", lambda: one_node("Unsqueeze", [("x", F, [2, 3, 4]), ("a", I, [2])]))
    unsqueeze.check({"x": X, "a": i64(k, (k + 2) % 5 - 5)})
    sums = cached("CumSum", lambda: one_node("CumSum", [("x", F, [2, 3, 4]), ("a", I, [])], exclusive=1, reverse=1))
    sums.check({"x": X, "a": np.int64(axis)})
    filled = cached("ConstantOfShape", lambda: one_node("ConstantOfShape", [("s", I, [2])]))
    filled.check({"s": i64(k, 3)})
    hot = cached("OneHot", lambda: one_node("OneHot", [("i", I, [3]), ("d", F, []), ("v", F, [2])], axis=0))
    hot.check({"i": i64(0, 3, -1), "d": np.float32(k + 1), "v": np.array([0, 1], np.float32)})


def test_parts_that_do_not_add_up():
    model = Model(one_node("Split", [("x", F, [4]), ("s", I, [2])], outputs=2))
    for wrong in ([2, 3], [5, -1], [1, 1]):
        model.refuse({"x": X[0, 0], "s": i64(*wrong)}, "values of input `s`")
    Model(one_node("TopK", [("x", F, [4]), ("k", I, [1])], outputs=2)).refuse({"x": X[0, 0], "k": i64(5)}, "values of input `k`")
    Model(one_node("Squeeze", [("x", F, [1, 4]), ("a", I, [1])])).refuse({"x": X[0, :1], "a": i64(1)}, "values of input `a`")


@PROPERTY
@given(st.integers(2, 9), st.booleans(), st.integers(-4, -2), st.booleans())
def test_signals(size, periodic, axis, inverse):
    window = cached(("HannWindow", periodic), lambda: one_node("HannWindow", [("n", I, [])], periodic=int(periodic)))
    window.check({"n": np.int64(size)})
    model = cached(
        ("DFT", inverse), lambda: one_node("DFT", [("x", F, [2, 3, 4, 2]), ("l", I, []), ("a", I, [])], opset=20, inverse=int(inverse))
    )
    x = np.stack([X, X[::-1]], axis=-1)
    model.check({"x": x, "l": np.int64(size), "a": np.int64(axis)}, atol=1e-4)


RESIZED = [("nearest", "half_pixel"), ("linear", "align_corners"), ("linear", "pytorch_half_pixel"), ("cubic", "asymmetric")]


@PROPERTY
@given(st.sampled_from(RESIZED), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans())
def test_resize(mode, height, width, by_sizes, antialias):
    """Sizes or scales of the run, and free extents of the image."""
    attributes = {
        "mode": mode[0],
        "coordinate_transformation_mode": mode[1],
        "antialias": int(antialias and mode[0] != "nearest"),
        "axes": [2, 3],
    }
    operands = [("x", F, [1, "c", "h", "w"]), ("", 0, []), *([("", 0, []), ("s", I, [2])] if by_sizes else [("s", F, [2])])]
    model = cached(("Resize", mode, by_sizes, antialias), lambda: one_node("Resize", operands, opset=19, **attributes))
    x = np.arange(2 * 4 * 5, dtype=np.float32).reshape(1, 2, 4, 5) / 8
    model.check({"x": x, "s": i64(height, width) if by_sizes else np.array([height / 4, width / 3], np.float32)}, atol=1e-4)


def test_a_resize_of_free_sizes_by_known_scales():
    scales = onnx.numpy_helper.from_array(np.array([1, 1, 1.5, 0.75], np.float32), "s")
    made = one_node("Resize", [("x", F, ["b", 2, "h", "w"]), ("", 0, []), ("s", F, [4])], mode="linear")
    del made.graph.input[1]
    made.graph.initializer.append(scales)
    model = Model(made)
    for shape in ((1, 2, 4, 4), (2, 2, 7, 5)):
        model.check({"x": np.random.default_rng(0).standard_normal(shape, np.float32)}, atol=1e-5)
    model = Model(one_node("Resize", [("x", F, [1, 1, "h", "w"]), ("", 0, []), ("s", F, [4])]))
    for wrong in (0.0, -1.0, np.nan, np.inf):
        model.refuse({"x": np.ones((1, 1, 2, 2), np.float32), "s": np.array([1, 1, wrong, 1], np.float32)}, "values of input `s`")


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_computed_operand(n):
    """Arithmetic on inputs, together with sizes of other inputs, that another node uses as data."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Concat", ["shape", "n"], ["both"], axis=0),
        helper.make_node("Mul", ["both", "two"], ["wanted"]),
        helper.make_node("ConstantOfShape", ["wanted"], ["y"]),
        helper.make_node("Neg", ["wanted"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", F, ["b"]), helper.make_tensor_value_info("n", I, [1])],
        [helper.make_tensor_value_info("y", F, None), helper.make_tensor_value_info("z", I, None)], [onnx.numpy_helper.from_array(i64(2), "two")],
    )  # fmt: skip
    model = cached("computed", lambda: helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    model.check({"x": np.zeros(2, np.float32), "n": i64(n)})


def test_equal_operands_give_equal_sizes():
    """Results of two nodes with one operand can be added."""
    nodes = [
        helper.make_node("Expand", ["x", "s"], ["a"]),
        helper.make_node("ConstantOfShape", ["s"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    infos = [helper.make_tensor_value_info("x", F, [1, 1]), helper.make_tensor_value_info("s", I, [2])]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", F, None)])
    model = Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    model.check({"x": X[0, :1, :1], "s": i64(3, 5)})


def test_graphs_show_where_sizes_come_from():
    graph = import_model(one_node("Reshape", [("x", F, [2, 3, 4]), ("s", I, [2])]))
    assert "input1[0]: int64" in str(graph)
    again = parse_graph(str(graph), {n.op.name: n.op for n in graph.nodes})
    assert str(again) == str(graph)
    np.testing.assert_array_equal(evaluate_graph(again, {"x": X, "s": i64(6, -1)})["y0"], X.reshape(6, 4))


def test_images_of_columns():
    model = Model(one_node("Col2Im", [("x", F, [1, 12, "n"]), ("i", I, [2]), ("b", I, [2])]))
    for image, block in (((5, 5), (2, 3)), ((4, 6), (3, 2)), ((3, 4), (3, 4))):
        count = (image[0] - block[0] + 1) * (image[1] - block[1] + 1)
        model.check({"x": np.arange(12 * count, dtype=np.float32).reshape(1, 12, count), "i": i64(*image), "b": i64(*block)})
    for image, block in (((5, 5), (2, 3)), ((5, 5), (5, 1))):  # 12 and 5 positions
        with pytest.raises(InputError):
            model.module.run({"x": np.ones((1, 12, 9), np.float32), "i": i64(*image), "b": i64(*block)})


def test_verify():
    """Kernels alone take the sizes that values give them, negative ones as well."""
    model = one_node("Slice", [("x", F, [2, 3, 4]), *((n, I, [2]) for n in "sead")])
    given = {"x": X, "s": i64(3, 0), "e": i64(0, 2), "a": i64(2, 0), "d": i64(-2, 1)}
    assert verify(import_model(model), given, CompileOptions(), full=True).ok


def test_bound_calls_notice_other_values():
    module = tcomp.compile(one_node("Reshape", [("x", F, [2, 3, 4]), ("s", I, [2])]), threads=1)
    shape = i64(6, 4)
    bound = module.bind({"x": X, "s": shape})
    np.testing.assert_array_equal(bound.run()["y0"], X.reshape(6, 4))
    shape[:] = 4, 6
    with pytest.raises(InputError, match="have changed"):
        bound.run()


def test_values_at_compile_time_leave_nothing_to_the_run():
    model = one_node("Reshape", [("x", F, [2, 3, 4]), ("s", I, [2])])
    assert not tcomp.compile(model, values={"s": i64(6, 4)}).manifest.dims
