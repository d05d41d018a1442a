"""Sequences and optionals: lists of values while a model is imported; their elements as inputs, outputs and captured values."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import tcomp
from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tests.frontends.conftest import value_info

F, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
RNG = np.random.default_rng(0)
n = helper.make_node


def sequence(name, dims=None, kind=F):
    return helper.make_value_info(name, helper.make_sequence_type_proto(helper.make_tensor_type_proto(kind, dims)))


def optional(name, dims=None):
    return helper.make_value_info(name, helper.make_optional_type_proto(helper.make_tensor_type_proto(F, dims)))


def model_of(nodes, inputs, outputs, constants=None):
    """A model whose inputs and outputs are `ValueInfoProto`s, or pairs of a name and an array or (dtype, dims)."""
    infos = [[i if not isinstance(i, tuple) else value_info(*i) for i in side] for side in (inputs, outputs)]
    arrays = [helper.make_tensor(k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a.ravel()) for k, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", infos[0], infos[1], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def both(run_model, model, inputs, **options):
    """The outputs by the interpreter, which are those of native code."""
    expected, found = run_model(model, inputs, **options), tcomp.compile(model, **options).run(inputs)
    assert list(expected) == list(found)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)
    return expected


def test_construct_insert_erase_at_length(run_model):
    nodes = [
        n("SequenceConstruct", ["a", "b"], ["s"]), n("SequenceInsert", ["s", "c", "minus"], ["t"]), n("SequenceErase", ["t"], ["u"]),
        n("SequenceAt", ["u", "minus"], ["y"]), n("SequenceLength", ["t"], ["k"]), n("SequenceInsert", ["u", "b"], ["v"]),
    ]  # fmt: skip
    x = {name: RNG.random((3, size), np.float32) for name, size in zip("abc", (2, 3, 4), strict=True)}
    model = model_of(nodes, list(x.items()), [("y", ("float32", None)), ("k", ("int64", [])), sequence("v")], {"minus": np.array(-1)})
    found = both(run_model, model, x)
    assert list(found) == ["y", "k", "v.0", "v.1", "v.2"] and found["k"] == 3
    for name, source in {"y": "c", "v.0": "a", "v.1": "c", "v.2": "b"}.items():
        np.testing.assert_array_equal(found[name], x[source])


@pytest.mark.parametrize("split, sizes", [(None, [1] * 7), (3, [3, 3, 1]), ([2, 0, 5], [2, 0, 5])])
@pytest.mark.parametrize("axis", [0, -1])
def test_split_and_concat_are_inverse(run_model, split, sizes, axis):
    x = RNG.random((7, 4, 7), np.float32)
    nodes = [
        n("SplitToSequence", ["x"] if split is None else ["x", "k"], ["s"], axis=axis),
        n("ConcatFromSequence", ["s"], ["y"], axis=axis),
    ]
    model = model_of(nodes, [("x", x)], [("y", x), sequence("s")], {} if split is None else {"k": np.array(split)})
    found = both(run_model, model, {"x": x})
    np.testing.assert_array_equal(found["y"], x)
    assert [found[f"s.{i}"].shape[axis] for i in range(len(sizes))] == sizes


def test_sizes_of_parts_may_be_input(run_model):
    x, sizes = RNG.random((7, 2), np.float32), np.array([3, 4])
    nodes = [n("SplitToSequence", ["x", "k"], ["s"]), n("SequenceAt", ["s", "one"], ["y"])]
    model = model_of(nodes, [("x", x), ("k", sizes)], [("y", ("float32", None))], {"one": np.array(1)})
    np.testing.assert_array_equal(both(run_model, model, {"x": x, "k": sizes})["y"], x[3:])


def test_slices_are_stacked_and_looked_up(run_model):
    x = RNG.random((3, 5), np.float32)
    nodes = [
        n("SplitToSequence", ["x"], ["s"], axis=1, keepdims=0), n("ConcatFromSequence", ["s"], ["y"], axis=-1, new_axis=1),
        n("SequenceAt", ["s", "i"], ["z"]),
    ]  # fmt: skip
    model = model_of(nodes, [("x", x), ("i", np.array(0))], [("y", x), ("z", x[:, 0])])
    found = both(run_model, model, {"x": x, "i": np.array(-2)})
    np.testing.assert_array_equal(found["y"], x)
    np.testing.assert_array_equal(found["z"], x[:, -2])


def test_map_passes_tensors_to_every_element(run_model):
    infos = [helper.make_tensor_value_info(name, F, None) for name in ("a", "b", "sum", "same")]
    body = helper.make_graph([n("Add", ["a", "b"], ["sum"]), n("Identity", ["a"], ["same"])], "body", infos[:2], infos[2:])
    model = model_of([n("SequenceMap", ["s", "x"], ["y", "z"], body=body)], [sequence("s", ["N"]), ("x", ("float32", [1]))],
                     [sequence("y"), sequence("z")])  # fmt: skip
    inputs = {"s.0": RNG.random(3, np.float32), "s.1": RNG.random(5, np.float32), "x": np.ones(1, np.float32)}
    found = both(run_model, model, inputs, shapes={"s.0": (3,), "s.1": ("m",)})
    for i in range(2):
        np.testing.assert_allclose(found[f"y.{i}"], inputs[f"s.{i}"] + 1, rtol=1e-6)
        np.testing.assert_array_equal(found[f"z.{i}"], inputs[f"s.{i}"])


def bags(count):
    """What torch's exporter makes of an EmbeddingBag: the mean of the rows `offsets[i]..offsets[i + 1]` names, bag by bag."""
    infos = {"i": ([], I64), "go": ([], BOOL), "on": ([], BOOL)}
    i, go, on = (helper.make_tensor_value_info(name, kind, dims) for name, (dims, kind) in infos.items())
    nodes = [
        n("Identity", ["go"], ["on"]), n("Unsqueeze", ["i", "zero"], ["at"]), n("Add", ["at", "one"], ["next"]),
        n("Slice", ["offsets", "at", "next"], ["from"]), n("Slice", ["offsets", "next", "behind"], ["unused"]),
        n("Gather", ["ends", "at"], ["to"]), n("Slice", ["indices", "from", "to"], ["own"]), n("Add", ["next", "one"], ["behind"]),
        n("Gather", ["table", "own"], ["rows"]), n("ReduceMean", ["rows", "zero"], ["bag"], keepdims=0),
        n("SequenceInsert", ["before", "bag"], ["after"]),
    ]  # fmt: skip
    body = helper.make_graph(nodes, "bag", [i, go, sequence("before")], [on, sequence("after")])
    outer = [
        n("SequenceEmpty", [], ["none"]), n("Loop", ["count", "true", "none"], ["all"], body=body),
        n("ConcatFromSequence", ["all"], ["y"], axis=0, new_axis=1),
    ]  # fmt: skip
    offsets = np.arange(count) * 2
    constants = {
        "offsets": offsets, "ends": offsets + 2, "count": np.array(count), "true": np.array(True), "zero": np.array([0]),
        "one": np.array([1]),
    }  # fmt: skip
    inputs = [("indices", ("int64", [2 * count])), ("table", ("float32", [10, 4]))]
    return model_of(outer, inputs, [("y", ("float32", [count, 4]))], constants)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_loop_that_appends_to_a_sequence(run_model, count):
    indices, table = RNG.integers(0, 10, 2 * count), RNG.random((10, 4), np.float32)
    found = both(run_model, bags(count), {"indices": indices, "table": table})
    np.testing.assert_allclose(found["y"], table[indices].reshape(count, 2, 4).mean(1), rtol=1e-6)


def appending(count):
    """A loop without a trip count that appends `x` times 0, 1, ... until there are `count`, as torch's newer exporter writes it."""
    typed = helper.make_tensor_value_info
    nodes = [
        n("Cast", ["k"], ["f"], to=F), n("Mul", ["x", "f"], ["row"]), n("SequenceInsert", ["before", "row"], ["after"]),
        n("Add", ["k", "one"], ["next"]), n("Less", ["next", "count"], ["on"]),
    ]  # fmt: skip
    body = helper.make_graph(
        nodes, "body", [typed("i", I64, []), typed("go", BOOL, []), typed("k", I64, []), sequence("before")],
        [typed("on", BOOL, []), typed("next", I64, []), sequence("after")],
    )  # fmt: skip
    outer = [
        n("SequenceEmpty", [], ["none"]), n("Loop", ["", "true", "zero", "none"], ["last", "all"], body=body),
        n("ConcatFromSequence", ["all"], ["y"], axis=0),
    ]  # fmt: skip
    constants = {"count": np.array(count), "true": np.array(True), "zero": np.array(0), "one": np.array(1)}
    return model_of(outer, [("x", ("float32", ["n"]))], [("y", ("float32", None))], constants)


def test_a_loop_that_appends_while_a_known_condition_holds(run_model):
    x = RNG.random(3, np.float32)
    np.testing.assert_allclose(both(run_model, appending(5), {"x": x})["y"], np.concatenate([x * k for k in range(5)]), rtol=1e-6)
    with pytest.raises(UnsupportedError, match="runs more than 1024 times"):
        import_model(appending(2000))


def branch(name, nodes, output):
    return helper.make_graph(nodes, name, [], [output])


def test_branches_return_and_capture_sequences(run_model):
    nodes = [
        n("SequenceConstruct", ["x", "w"], ["s"]),
        n("If", ["c"], ["r"],
          then_branch=branch("then", [n("SequenceErase", ["s", "zero"], ["a"]), n("SequenceInsert", ["a", "x"], ["t"])], sequence("t")),
          else_branch=branch("else", [n("Identity", ["s"], ["e"])], sequence("e"))),
    ]  # fmt: skip
    x, w = np.arange(3, dtype=np.float32), np.full(3, 7, np.float32)
    model = model_of(nodes, [("x", x), ("w", w), ("c", np.array(True))], [sequence("r")], {"zero": np.array(0)})
    for c, expected in {True: [w, x], False: [x, w]}.items():
        found = both(run_model, model, {"x": x, "w": w, "c": np.array(c)})
        np.testing.assert_array_equal([found["r.0"], found["r.1"]], expected)


def test_branches_of_different_lengths_are_refused():
    nodes = [n("If", ["c"], ["r"], then_branch=branch("then", [n("SequenceConstruct", ["x"], ["t"])], sequence("t")),
               else_branch=branch("else", [n("SequenceConstruct", ["x", "x"], ["e"])], sequence("e")))]  # fmt: skip
    x = np.zeros(3, np.float32)
    with pytest.raises(UnsupportedError, match="sequences of different lengths"):
        import_model(model_of(nodes, [("x", x), ("c", np.array(True))], [sequence("r")]))


def test_optionals(run_model):
    kind = helper.make_tensor_type_proto(F, [3])
    nodes = [
        n("Optional", [], ["none"], type=kind), n("Optional", ["x"], ["some"]), n("OptionalHasElement", ["none"], ["a"]),
        n("OptionalHasElement", ["some"], ["b"]), n("OptionalHasElement", ["o"], ["c"]), n("OptionalGetElement", ["o"], ["y"]),
    ]  # fmt: skip
    x = np.arange(3, dtype=np.float32)
    flags = [(name, ("bool", [])) for name in "abc"]
    model = model_of(nodes, [("x", x), optional("o", [3])], [*flags, ("y", x), optional("some", [3])])
    found = both(run_model, model, {"x": x, "o": x + 1}, shapes={"o": (3,)})
    assert [bool(found[name]) for name in "abc"] == [False, True, True]
    np.testing.assert_array_equal(found["y"], x + 1)
    np.testing.assert_array_equal(found["some"], x)
    with pytest.raises(UnsupportedError, match="whether an optional input holds a value is not known"):
        import_model(model)
    with pytest.raises(UnsupportedError, match="an optional that holds nothing"):
        import_model(model_of(nodes[:1], [], [optional("none", [3])]))
    with pytest.raises(ImportModelError, match="the optional is empty"):
        import_model(model_of([nodes[0], n("OptionalGetElement", ["none"], ["y"])], [], [("y", x)]))


X = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    "nodes, error, message",
    [
        ([n("SequenceConstruct", ["x"], ["s"]), n("SequenceAt", ["s", "two"], ["y"])], ImportModelError, "position 2 among 1"),
        ([n("SequenceConstruct", ["x"], ["s"]), n("SequenceInsert", ["s", "two"], ["t"]), n("SequenceAt", ["t", "two"], ["y"])],
         ImportModelError, "cannot hold"),
        ([n("SequenceEmpty", [], ["s"]), n("ConcatFromSequence", ["s"], ["y"], axis=0)], UnsupportedError, "the sequence is empty"),
        ([n("SequenceEmpty", [], ["s"]), n("SequenceErase", ["s"], ["t"]), n("SequenceAt", ["t", "two"], ["y"])], ImportModelError,
         "the sequence is empty"),
        ([n("SequenceConstruct", ["x"], ["s"]), n("Add", ["s", "x"], ["y"])], ImportModelError, "input 0 .* is seq"),
        ([n("SequenceConstruct", ["x"], ["y"])], ImportModelError, "another element type than the seq"),
    ],
)  # fmt: skip
def test_what_is_not_valid(nodes, error, message):
    with pytest.raises(error, match=message):
        import_model(model_of(nodes, [("x", X)], [("y", ("float32", None))], {"two": np.array(2)}))


def test_an_output_without_a_declared_type():
    model = model_of([n("SequenceEmpty", [], ["y"])], [], [("y", ("float32", None))])
    model.graph.output[0].ClearField("type")
    with pytest.raises(UnsupportedError, match="a sequence without elements"):
        import_model(model)


def test_a_sequence_input_needs_the_shapes_of_its_elements():
    model = model_of([n("SequenceLength", ["s"], ["y"])], [sequence("s", [None])], [("y", ("int64", []))])
    with pytest.raises(UnsupportedError, match=r"how many elements") as caught:
        import_model(model)
    assert "--shape s.0=" in caught.value.hint
    assert [v.name for v in import_model(model, shapes={"s.0": (2,), "s.1": (4,)}).inputs] == ["s.0", "s.1"]
