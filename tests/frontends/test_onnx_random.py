"""RandomNormal, RandomUniform, Bernoulli, Multinomial, Dropout: by the interpreter, by native code, with any number of threads."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import tcomp
from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import import_model

N = 5000


def like(op, x="x", y="y", **attrs):
    return helper.make_node(op, [x], [y], **attrs)


def test_native_code_draws_the_numbers_of_the_interpreter_with_any_number_of_threads(make_model, run_model):
    nodes = [
        like("RandomUniformLike", y="u", seed=5.0), like("RandomNormalLike", y="n"), like("RandomNormalLike", y="d", dtype=TensorProto.DOUBLE),
        like("RandomUniformLike", y="h", dtype=TensorProto.FLOAT16, low=-1.0), like("Bernoulli", y="b", dtype=TensorProto.BOOL),
        helper.make_node("Dropout", ["x", "ratio", "training"], ["o", "m"]),
        helper.make_node("Multinomial", ["x"], ["c"], sample_size=9, dtype=TensorProto.INT64),
    ]  # fmt: skip
    types = {"u": "float32", "n": "float32", "d": "float64", "h": "float16", "b": "bool", "o": "float32", "m": "bool", "c": "int64"}
    inputs = {"x": ("float32", ["rows", "n"]), "ratio": ("float32", []), "training": ("bool", [])}
    model = make_model(nodes, inputs, types, opset=22)
    x = np.random.default_rng(0).random((7, 301), np.float32)
    data = {"x": x, "ratio": np.array(0.25, np.float32), "training": np.array(True)}
    expected = run_model(model, data)
    one, three = (tcomp.compile(model, threads=t).run(data) for t in (1, 3))
    for name, array in expected.items():
        np.testing.assert_array_equal(one[name], three[name])
        if array.dtype.kind == "f":
            np.testing.assert_allclose(one[name], array, rtol=1e-3 if name == "h" else 1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(one[name], array)


def test_every_node_draws_its_own_numbers_and_each_seed_others(make_model, run_model):
    nodes = [helper.make_node("RandomUniform", [], [y], shape=[100], **attrs) for y, attrs in
             {"a": {"seed": 1.0}, "b": {"seed": 1.0}, "c": {}, "d": {}}.items()]  # fmt: skip
    model = make_model(nodes, {}, dict.fromkeys("abcd", "float32"))
    drawn = run_model(model, {})
    assert len({a.tobytes() for a in drawn.values()}) == 4
    again = run_model(model, {})
    assert all(drawn[n].tobytes() == again[n].tobytes() for n in drawn)
    first = helper.make_node("RandomUniform", [], ["a"], shape=[100], seed=2.0)
    assert run_model(make_model([first], {}, {"a": "float32"}), {})["a"].tobytes() != drawn["a"].tobytes()


def test_multinomial_draws_by_log_probabilities(make_model, run_model):
    model = make_model([like("Multinomial", sample_size=N)], {"x": ("float32", [2, 3])}, {"y": "int32"})
    p = np.array([[0.2, 0.3, 0.5], [0, 1, 0]], np.float32)
    with np.errstate(divide="ignore"):
        y = run_model(model, {"x": np.log(p) + 100})["y"]
    shares = np.array([np.bincount(row, minlength=3) / N for row in y])
    np.testing.assert_allclose(shares, p, atol=0.03)
    with pytest.raises(ImportModelError, match="it takes \\[batch, classes\\]"):
        import_model(make_model([like("Multinomial")], {"x": ("float32", [3])}, {"y": "int32"}))


@pytest.mark.parametrize("training, expected", [(None, "identity"), (False, "identity"), (True, "dropped")])
def test_dropout_is_the_identity_unless_it_trains(make_model, run_model, training, expected):
    node = helper.make_node("Dropout", ["x", "", "" if training is None else "t"], ["y", "m"])
    constants = {} if training is None else {"t": np.array(training)}
    x = np.ones(N, np.float32)
    found = run_model(make_model([node], {"x": x}, {"y": "float32", "m": "bool"}, constants=constants), {"x": x})
    assert set(np.unique(found["y"])) == ({1} if expected == "identity" else {0, 2})
    np.testing.assert_array_equal(found["m"], found["y"] != 0)


def body(trips):
    """A loop whose body draws a number: (nodes, trip count)."""
    scalar, flag, number = (helper.make_tensor_value_info(n, t, []) for n, t in
                            (("i", TensorProto.INT64), ("c", TensorProto.BOOL), ("r", TensorProto.FLOAT)))  # fmt: skip
    nodes = [
        helper.make_node("RandomUniform", [], ["v"], shape=[1]), helper.make_node("Squeeze", ["v"], ["r"]),
        helper.make_node("Identity", ["c"], ["go"]),
    ]  # fmt: skip
    out = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "body", [scalar, flag], [out, number])
    return [helper.make_node("Loop", ["trips", ""], ["y"], body=graph)], {"trips": np.array(trips)}


def test_a_loop_draws_other_numbers_in_each_iteration_or_is_refused(make_model, run_model):
    nodes, constants = body(5)
    drawn = run_model(make_model(nodes, {}, {"y": "float32"}, constants=constants), {})["y"]
    assert len(set(drawn.tolist())) == 5
    nodes, constants = body(1000)
    with pytest.raises(UnsupportedError, match="random numbers in the body of a loop"):
        import_model(make_model(nodes, {}, {"y": "float32"}, constants=constants))
