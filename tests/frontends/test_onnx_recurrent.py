"""LSTM, GRU and RNN against a NumPy transcription of their specification."""

import itertools

import numpy as np
import pytest
from onnx import helper

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.ir.graph import LOOP

RNG = np.random.default_rng(3)
STEPS, BATCH, WIDTH, HIDDEN = 4, 3, 5, 2
F = "float32"
DIRECTIONS = ["forward", "reverse", "bidirectional"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "Sigmoid": sigmoid, "Tanh": np.tanh, "Relu": lambda x: np.maximum(x, 0), "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "Softsign": lambda x: x / (1 + np.abs(x)), "Softplus": lambda x: np.log1p(np.exp(x)), "Affine": lambda x: 1.5 * x + 0.25,
    "LeakyRelu": lambda x: np.where(x < 0, 0.1 * x, x), "Elu": lambda x: np.where(x < 0, np.expm1(x), x),
    "ScaledTanh": lambda x: 1.5 * np.tanh(0.25 * x), "ThresholdedRelu": lambda x: np.where(x >= 1.5, x, 0),
}  # fmt: skip


def cell_of(kind, names, clip, linear_before_reset, input_forget):
    functions = [FUNCTIONS[n] for n in names]

    def limited(v):
        return v if clip is None else np.clip(v, -clip, clip)

    def lstm(x, state, w, r, wb, rb, p):
        h, c = state
        i, o, f, g = np.split(x @ w.T + h @ r.T + wb + rb, 4, axis=1)
        pi, po, pf = np.split(p, 3)
        i = functions[0](limited(i + pi * c))
        f = 1 - i if input_forget else functions[0](limited(f + pf * c))
        c = f * c + i * functions[1](limited(g))
        return functions[0](limited(o + po * c)) * functions[2](c), c

    def gru(x, state, w, r, wb, rb, p):
        (h,) = state
        n = h.shape[1]
        z, reset, _ = np.split(x @ w.T + h @ r.T + wb + rb, 3, axis=1)
        z, reset = functions[0](limited(z)), functions[0](limited(reset))
        if linear_before_reset:
            inner = reset * (h @ r[2 * n :].T + rb[2 * n :])
        else:
            inner = (reset * h) @ r[2 * n :].T + rb[2 * n :]
        return ((1 - z) * functions[1](limited(x @ w[2 * n :].T + wb[2 * n :] + inner)) + z * h,)

    def rnn(x, state, w, r, wb, rb, p):
        return (functions[0](limited(x @ w.T + state[0] @ r.T + wb + rb)),)

    return {"LSTM": lstm, "GRU": gru, "RNN": rnn}[kind]


def reference(kind, x, w, r, b, lengths, states, p, direction, activations, clip=None, linear_before_reset=0, input_forget=0):
    """(Y, final states), layout 0."""
    backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    count = len(activations) // len(backwards)
    y = np.zeros((len(x), len(backwards), x.shape[1], r.shape[2]))
    finals = [s.astype(np.float64).copy() for s in states]
    for d, backward in enumerate(backwards):
        cell = cell_of(kind, activations[d * count : (d + 1) * count], clip, linear_before_reset, input_forget)
        wb, rb = np.split(b[d], 2)
        for n in range(x.shape[1]):
            state = tuple(s[d, n : n + 1] for s in finals)
            order = range(lengths[n])
            for t in reversed(order) if backward else order:
                state = cell(x[t, n : n + 1], state, w[d], r[d], wb, rb, p[d])
                y[t, d, n] = state[0]
            for s, new in zip(finals, state, strict=True):
                s[d, n] = new[0]
    return y, finals


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def case(kind, direction="forward", steps=STEPS, dynamic=False, lengths=None, bias=True, initial=True, peephole=False, constant=True, layout=0, **attrs):  # fmt: skip
    """(nodes, inputs, constants, outputs, reference outputs)"""
    directions = 2 if direction == "bidirectional" else 1
    gates, states = GATES[kind], 2 if kind == "LSTM" else 1
    x = RNG.standard_normal((steps, BATCH, WIDTH)).astype(np.float32)
    w, r = (RNG.standard_normal((directions, gates * HIDDEN, n)).astype(np.float32) for n in (WIDTH, HIDDEN))
    b = RNG.standard_normal((directions, 2 * gates * HIDDEN)).astype(np.float32) * bias
    p = RNG.standard_normal((directions, 3 * HIDDEN)).astype(np.float32) * peephole
    initials = [RNG.standard_normal((directions, BATCH, HIDDEN)).astype(np.float32) * initial for _ in range(states)]
    own = {k: v for k, v in attrs.items() if k in ("linear_before_reset", "input_forget", "clip")}
    activations = attrs.get("activations", DEFAULTS[kind] * directions)
    full = [steps] * BATCH if lengths is None else lengths
    y, finals = reference(kind, x, w, r, b, full, initials, p, direction, activations, **own)
    values = {"x": x, "w": w, "r": r, "b": b if bias else None, "l": None if lengths is None else np.array(lengths, np.int32)}
    values |= {f"s{n}": s if initial else None for n, s in enumerate(initials)} | ({"p": p} if peephole else {})
    expected = [y, *finals]
    if layout:
        values["x"] = np.ascontiguousarray(x.swapaxes(0, 1))
        values |= {k: np.ascontiguousarray(v.swapaxes(0, 1)) for k, v in values.items() if k in ("s0", "s1") and v is not None}
        expected = [y.transpose(2, 0, 1, 3), *(f.swapaxes(0, 1) for f in finals)]
    outputs = ["y", "h", "c"][: states + 1]
    node = helper.make_node(kind, [n if v is not None else "" for n, v in values.items()], outputs, hidden_size=HIDDEN, direction=direction, layout=layout, **attrs)  # fmt: skip
    given = {n: v for n, v in values.items() if v is not None}
    weights = {n: given.pop(n) for n in ("w", "r", "b", "p") if constant and n in given}
    return [node], given, weights, outputs, expected


def check(make_model, run_model, *args, shapes=None, **options):
    nodes, inputs, constants, outputs, expected = case(*args, **options)
    types = {n: (a.dtype.name, shapes[n]) if shapes and n in shapes else a for n, a in inputs.items()}
    model = make_model(nodes, types, dict.fromkeys(outputs, F), constants=constants)
    got = run_model(model, inputs)
    for name, value in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    return model


@pytest.mark.parametrize(("kind", "direction", "layout"), list(itertools.product(GATES, DIRECTIONS, [0, 1])))
def test_directions_and_layouts(make_model, run_model, kind, direction, layout):
    check(make_model, run_model, kind, direction, layout=layout)


@pytest.mark.parametrize(("kind", "direction"), list(itertools.product(GATES, DIRECTIONS)))
def test_sequences_of_different_lengths(make_model, run_model, kind, direction):
    check(make_model, run_model, kind, direction, lengths=[4, 1, 2])


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("steps", [1, 2])
def test_optional_inputs_left_out_and_weights_as_inputs(make_model, run_model, kind, steps):
    check(make_model, run_model, kind, "bidirectional", steps=steps, bias=False, initial=False)
    check(make_model, run_model, kind, "bidirectional", steps=steps, constant=False)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("lengths", [None, [2, 4, 3]])
def test_peepholes_clip_and_coupled_gates(make_model, run_model, direction, lengths):
    check(make_model, run_model, "LSTM", direction, peephole=True, lengths=lengths)
    check(make_model, run_model, "LSTM", direction, peephole=True, clip=0.3, input_forget=1, lengths=lengths)


@pytest.mark.parametrize("bias", [True, False])
def test_gru_may_reset_after_the_product(make_model, run_model, bias):
    check(make_model, run_model, "GRU", "bidirectional", linear_before_reset=1, bias=bias)
    check(make_model, run_model, "GRU", "reverse", linear_before_reset=1, bias=bias, lengths=[1, 3, 2], clip=0.5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations(make_model, run_model, name):
    alpha = {"Affine": 1.5, "LeakyRelu": 0.1, "ScaledTanh": 1.5, "ThresholdedRelu": 1.5, "Elu": 1.0, "HardSigmoid": 0.2}
    beta = {"Affine": 0.25, "ScaledTanh": 0.25, "HardSigmoid": 0.5}
    names = ["Sigmoid", name, "Tanh"] * 2
    lists = {key: [table[n] for n in names if n in table] for key, table in (("activation_alpha", alpha), ("activation_beta", beta))}
    check(make_model, run_model, "LSTM", "bidirectional", activations=names, **{k: v for k, v in lists.items() if v})


def test_symbolic_batch_and_length(make_model, run_model):
    model = check(make_model, run_model, "LSTM", "bidirectional", initial=False, shapes={"x": ["t", "n", WIDTH]})
    graph = import_model(model)
    assert [tuple(map(str, v.shape)) for v in graph.outputs] == [("t", "2", "n", "2"), ("2", "n", "2"), ("2", "n", "2")]
    assert sum(n.op is LOOP for n in graph.nodes) == 2


def test_one_step_needs_no_loop(make_model):
    nodes, inputs, constants, outputs, _ = case("LSTM", steps=1)
    graph = import_model(make_model(nodes, inputs, dict.fromkeys(outputs, F), constants=constants))
    assert not any(n.op is LOOP for n in graph.nodes)


def test_the_input_projection_is_outside_the_loop(make_model):
    nodes, inputs, constants, outputs, _ = case("GRU")
    graph = import_model(make_model(nodes, inputs, dict.fromkeys(outputs, F), constants=constants))
    (loop,) = (n for n in graph.nodes if n.op is LOOP)
    assert sum(n.op.name == "matmul" for n in graph.nodes) == 1
    assert sum(n.op.name == "matmul" for n in loop.bodies[0].nodes) == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"direction": "sideways"}, ImportModelError, "direction `sideways`"),
        ({"direction": "bidirectional"}, ImportModelError, "input 1 is %w.*; with direction `bidirectional`"),
        ({"hidden_size": 7}, ImportModelError, "`hidden_size` 7 it has the shape"),
        ({"activations": ["Sigmoid"]}, ImportModelError, "1 activations"),
        ({"activations": ["Sigmoid", "Frobnicate", "Tanh"]}, UnsupportedError, "frobnicate"),
    ],
)
def test_refusals(make_model, change, error, message):
    nodes, inputs, constants, outputs, _ = case("LSTM")
    (old,) = nodes
    attrs = {a.name: helper.get_attribute_value(a) for a in old.attribute} | change
    node = helper.make_node("LSTM", old.input, old.output, **attrs)
    with pytest.raises(error, match=message):
        import_model(make_model([node], inputs, dict.fromkeys(outputs, F), constants=constants))
