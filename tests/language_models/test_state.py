"""State in place: the same numbers as with copies, wherever the axis is that grows; what is not state is refused."""

from itertools import pairwise

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp.errors import InputError, StoppedError, TcompError
from tcomp.frontends.language_models.config import DecoderConfig
from tcomp.frontends.language_models.decoder import decoder_graph
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_graph, compile_model

RNG = np.random.default_rng(2)
W = RNG.normal(size=(3, 3)).astype(np.float32)


def cumulative(axis=2, shape=(1, 2, "p", 3), present="present.key"):
    """A cache [1, 2, past, 3] grows by x @ w along an axis; y are the sums of the whole, z what was there before, twice."""
    new = ["n" if d == "p" else d for d in shape]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["rows"]),
        helper.make_node("Concat", ["past.key", "rows"], [present], axis=axis),
        helper.make_node("ReduceSum", [present, "axes"], ["y"], keepdims=0),
        helper.make_node("Add", ["past.key", "past.key"], ["z"]),
    ]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", new), ("past.key", shape))]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", present, "z")]
    held = [numpy_helper.from_array(W, "w"), numpy_helper.from_array(np.array([axis]), "axes")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(("axis", "shape"), [(2, (1, 2, "p", 3)), (1, (1, "p", 3)), (0, ("p", 2, 3))])
def test_rows_are_appended_in_place(axis, shape):
    artifact, _ = compile_model(cumulative(axis, shape), CompileOptions(state="auto", dims={"p": (0, 100)}, verify=True))
    model = tcomp.Module.load(artifact, threads=2)
    state, whole, first = tcomp.State(model, capacity=3), np.zeros([0 if d == "p" else d for d in shape], np.float32), None
    for rows in (2, 1, 1, 7):
        x = RNG.normal(size=[rows if d == "p" else d for d in shape]).astype(np.float32)
        before, whole = whole, np.concatenate([whole, x @ W], axis)
        y = state.run({"x": x})
        assert set(y) == {"y", "z"} and state.length == whole.shape[axis] <= state.capacity
        np.testing.assert_allclose(y["y"], whole.sum(axis), rtol=1e-4, atol=1e-5)
        given = np.moveaxis(before, axis, 0) if shape[0] == 1 and axis == 2 else before
        np.testing.assert_allclose(y["z"], 2 * before, rtol=1e-4, atol=1e-5)
        copied = model.run({"x": x, "past.key": np.ascontiguousarray(given)})  # nothing is shared: old rows are copied
        np.testing.assert_allclose(copied["y"], y["y"], rtol=1e-4, atol=1e-5)
        (held,) = state.values().values()
        old, kept = copied["present.key"].reshape(-1), held.reshape(-1)[: given.size]
        np.testing.assert_allclose(kept, old[: given.size], rtol=1e-6, atol=1e-6)  # `given` was rounded by NumPy's products
        first = held if first is None else first
    state.truncate(2)
    np.testing.assert_array_equal(state.values()["past.key"], first)
    x = np.zeros([1 if d == "p" else d for d in shape], np.float32)
    assert state.run({"x": x})["y"].shape == y["y"].shape and state.length == 3


def test_a_run_that_fails_leaves_the_state_as_it_was(monkeypatch):
    """Also one that made room for more rows."""
    state = tcomp.State(tcomp.compile(cumulative(0, ("p", 2, 3)), state="auto", dims={"p": (0, 100)}), capacity=2)
    x = RNG.normal(size=(2, 2, 3)).astype(np.float32)
    state.run({"x": x})

    def stopped(*_):
        raise StoppedError("the run was stopped")

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(tcomp.runtime.module, "run_frame", stopped)
        state.run({"x": x})
    assert state.length == 2 and state.capacity > 2
    state.truncate(1)
    np.testing.assert_allclose(state.values()["past.key"], (x @ W)[:1], rtol=1e-5)
    state.run({"x": x})
    np.testing.assert_allclose(state.values()["past.key"], np.concatenate([x[:1], x]) @ W, rtol=1e-5)


def test_rows_may_be_written_from_outside():
    state = tcomp.State(tcomp.compile(cumulative(0, ("p", 2, 3)), state="auto", dims={"p": (0, 100)}), capacity=2)
    x = RNG.normal(size=(2, 2, 3)).astype(np.float32)
    state.run({"x": x})
    (rows,) = state.extend(5).values()  # more than there is room for
    np.testing.assert_allclose(rows, np.concatenate([x @ W, np.zeros((3, 2, 3))]), rtol=1e-5, atol=1e-6)
    rows[2:] = 1
    np.testing.assert_allclose(state.run({"x": x})["z"], 2 * np.concatenate([x @ W, np.ones((3, 2, 3))]), rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="3 rows in place of 7"):
        state.extend(3)


def test_arrays_of_state_lie_in_one_memory():
    """Aligned, and apart from each other, before and after there is room for more rows: a cache that is large is in huge pages."""
    config = DecoderConfig("llama", 32, 16, 16, 2, 2, 1, 8, 64, 1e-6, 1e4, True)
    artifact = compile_graph(decoder_graph(config, lambda _, shape: np.ones(shape, np.float32)), CompileOptions(state="auto"))
    state = tcomp.State(tcomp.Module.load(artifact, threads=1), capacity=3)
    for rows in (3, 5):
        places = sorted((a.ctypes.data, a.nbytes) for a in state.extend(rows).values())
        assert len(places) == 4 and all(place % 64 == 0 for place, _ in places)
        assert all(place + size <= following for (place, size), (following, _) in pairwise(places))
        assert places[-1][0] - places[0][0] < 4096


def test_state_for_which_there_is_no_memory(monkeypatch):
    state = tcomp.State(tcomp.compile(cumulative(0, ("p", 2, 3)), state="auto", dims={"p": (0, 100)}), capacity=2)

    def refused(*_, **__):
        raise OSError("cannot allocate memory")

    with monkeypatch.context() as patch, pytest.raises(InputError, match="no memory for state"):
        patch.setattr("tcomp.runtime.workspace.mmap.mmap", refused)
        state.extend(3)
    assert state.capacity == 2 and state.length == 0
    assert state.run({"x": np.ones((1, 2, 3), np.float32)})["y"].shape == (2, 3)


def test_an_array_that_is_continued_may_be_the_output():
    model = tcomp.compile(cumulative(), state={"past.key": "present.key"}, dims={"p": (0, 100)}, threads=1)
    room = np.zeros((5, 1, 2, 3), np.float32)
    room[:4] = RNG.normal(size=(4, 1, 2, 3))
    old, x = room[:4].copy(), RNG.normal(size=(1, 2, 1, 3)).astype(np.float32)
    found = model.run({"x": x, "past.key": room[:4]}, out={"present.key": room})
    np.testing.assert_array_equal(room[:4], old)
    np.testing.assert_allclose(room[4], (x @ W)[0][None, :, 0], rtol=1e-5)
    np.testing.assert_allclose(found["y"], room.transpose(1, 2, 0, 3).sum(2), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="overlaps"):
        model.run({"x": x, "past.key": room[1:]}, out={"present.key": room})


def test_a_model_with_host_steps_is_refused():
    nodes = [
        helper.make_node("LabelEncoder", ["s"], ["x"], domain="ai.onnx.ml", keys_strings=["a"], values_floats=[1.0], default_float=0.0),
        helper.make_node("Concat", ["past", "x"], ["present"], axis=0),
    ]
    inputs = [
        helper.make_tensor_value_info("s", TensorProto.STRING, ["n"]),
        helper.make_tensor_value_info("past", TensorProto.FLOAT, ["p"]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("present", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    model = tcomp.compile(helper.make_model(graph, opset_imports=opsets, ir_version=10), state={"past": "present"}, dims={"p": (0, 100)})
    with pytest.raises(InputError, match="host steps"):
        tcomp.State(model)


def test_what_is_no_state_is_refused():
    for state, what in (
        ({"nothing": "present.key"}, "no input `nothing`"),
        ({"past.key": "nothing"}, "no output `nothing`"),
        ({"past.key": "y"}, "does not continue"),
        ({"x": "present.key"}, "does not continue"),
        ("always", "says nothing of state"),
    ):
        with pytest.raises(InputError, match=what):
            tcomp.compile(cumulative(), state=state)
    with pytest.raises(TcompError, match="state in place"):
        compile_model(cumulative(), CompileOptions("cuda -arch=sm_80", state="auto"))
    other = tcomp.compile(cumulative(present="grown"), state="auto", dims={"p": (0, 9)})
    with pytest.raises(InputError, match="has no state"):
        tcomp.State(other)
    model = tcomp.compile(cumulative(), state="auto", dims={"p": (0, 100)})
    state = tcomp.State(model)
    with pytest.raises(InputError, match="is state"):
        state.run({"x": np.zeros((1, 2, 1, 3), np.float32), "past.key": np.zeros((0, 1, 2, 3), np.float32)})
    with pytest.raises(InputError, match="holds 0"):
        state.truncate(1)
    with pytest.raises(InputError, match="expected float32"):
        state.run({"x": np.zeros((1, 2, 1, 3))})
    assert state.length == 0
