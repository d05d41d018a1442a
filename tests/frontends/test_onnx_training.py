"""Adagrad, Adam, Momentum of ai.onnx.preview.training, against NumPy transcriptions of their specification, and Gradient."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import tcomp
from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.ir.interpreters.graph import evaluate_graph
from tests.frontends.conftest import value_info

DOMAIN = "ai.onnx.preview.training"


def adagrad(r, t, x, g, h):
    g = g + 0.1 * x
    h = h + g * g
    return x - r / (1 + t * 0.2) * g / (np.sqrt(h) + 1e-3), h


def adam(r, t, x, g, v, h):
    g = g + 0.1 * x
    v, h = 0.8 * v + 0.2 * g, 0.95 * h + 0.05 * g * g
    r = r * np.sqrt(1 - 0.95**t) / (1 - 0.8**t) if t > 0 else r
    return 0.7 * (x - r * v / (np.sqrt(h) + 1e-3)), v, h


def momentum(r, t, x, g, v, nesterov=False):
    g = g + 0.1 * x
    v = 0.8 * v + (0.95 if t > 0 else 1) * g
    return x - r * (g + 0.8 * v if nesterov else v), v


CASES = {
    "Adagrad": (adagrad, {"decay_factor": 0.2, "epsilon": 1e-3}),
    "Adam": (adam, {"alpha": 0.8, "beta": 0.95, "epsilon": 1e-3, "norm_coefficient_post": 0.3}),
    "Momentum": (momentum, {"alpha": 0.8, "beta": 0.95, "mode": "standard"}),
    "Nesterov": (lambda *a: momentum(*a, nesterov=True), {"alpha": 0.8, "beta": 0.95, "mode": "nesterov"}),
}


def model_of(op, inputs, outputs, attrs):
    node = helper.make_node(op, list(inputs), outputs, domain=DOMAIN, **attrs)
    infos = [value_info(n, a) for n, a in inputs.items()]
    graph = helper.make_graph([node], "g", infos, [value_info(o, (inputs["x0"].dtype.name, None)) for o in outputs])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)], ir_version=10)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step, dtype", [(0, "float32"), (3, "float32"), (3, "float64")])
def test_two_tensors(name, step, dtype):
    reference, attrs = CASES[name]
    rng, states = np.random.default_rng(1), "xgvh"[: 4 if name == "Adam" else 3]
    inputs: dict[str, np.ndarray] = {"r": np.array(0.1, np.float32), "t": np.array(step, np.int64)}
    shapes = [(2, 17), (5,)]
    inputs |= {f"{s}{n}": rng.random(shape).astype(dtype) for s in states for n, shape in enumerate(shapes)}
    outputs = [f"{s}{n}_new" for s in states if s != "g" for n in range(2)]
    model = model_of("Momentum" if name == "Nesterov" else name, inputs, outputs, {"norm_coefficient": 0.1, **attrs})
    expected = {}
    for n in range(2):
        results = reference(0.1, step, *(inputs[f"{s}{n}"].astype(np.float64) for s in states))
        expected |= dict(zip([f"{s}{n}_new" for s in states if s != "g"], results, strict=True))
    for found in (evaluate_graph(import_model(model), inputs), tcomp.compile(model).run(inputs)):
        for output, array in expected.items():
            assert found[output].dtype == dtype
            np.testing.assert_allclose(found[output], array, rtol=1e-5, atol=1e-6)


def test_what_is_refused():
    x, t, r = np.zeros(3, np.float32), np.array(0, np.int64), np.array(0.1, np.float32)
    attrs = {"norm_coefficient": 0.1, **CASES["Momentum"][1]}
    inputs = {"r": r, "t": t, "x0": x, "g0": x, "v0": x}
    with pytest.raises(ImportModelError, match="3 for each tensor"):
        import_model(model_of("Momentum", {**inputs, "x1": x}, ["y0"], attrs))
    with pytest.raises(ImportModelError, match="not the same extent"):
        import_model(model_of("Momentum", {**inputs, "v0": np.zeros(4, np.float32)}, ["y0", "y1"], attrs))
    with pytest.raises(ImportModelError, match="nesterov and standard"):
        import_model(model_of("Momentum", inputs, ["y0", "y1"], {**attrs, "mode": "other"}))
    with pytest.raises(UnsupportedError, match="others than the tensors"):
        import_model(model_of("Gradient", {"x0": x, "x1": x}, ["y"], {"xs": ["x1"], "y": "x1"}))


def test_gradients_of_a_network():
    """loss = mean((relu(x w + b) v - t)^2): the gradients by hand; and those of a node that stands first, and of what does not matter."""
    rng = np.random.default_rng(3)
    shapes = {"x": (5, 4), "w": (4, 6), "b": (6,), "v": (6, 2), "t": (5, 2), "unused": (3,)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    names = ["w", "b", "v", "unused"]
    gradient = helper.make_node("Gradient", names, [f"d{n}" for n in names], domain="ai.onnx.preview.training", xs=names, y="loss")
    forward = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Add", ["xw", "b"], ["a"]), helper.make_node("Relu", ["a"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["y"]), helper.make_node("Sub", ["y", "t"], ["e"]), helper.make_node("Mul", ["e", "e"], ["s"]),
        helper.make_node("ReduceMean", ["s"], ["loss"], keepdims=0),
    ]  # fmt: skip
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in group.items()]
            for group in (shapes, {f"d{n}": shapes[n] for n in names})]  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.preview.training", 1)]
    proto = helper.make_model(helper.make_graph([gradient, *forward], "g", *ends), opset_imports=opsets, ir_version=10)
    found = tcomp.compile(proto).run(given)
    x, w, b, v, t = (given[n] for n in "xwbvt")
    a = x @ w + b
    e = (np.maximum(a, 0) @ v - t) * 2 / t.size
    da = e @ v.T * (a > 0)
    for name, expected in (("dw", x.T @ da), ("db", da.sum(0)), ("dv", np.maximum(a, 0).T @ e), ("dunused", np.zeros(3))):
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)
