"""Where symbolic sizes meet, and inputs whose sizes are formulas of others."""

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.errors import InputError
from tcomp.frontends.onnx import import_model
from tcomp.ir.dims import solved_dims
from tcomp.ir.expr import dim, evaluate_int
from tcomp.ir.simplify import simplify
from tcomp.ir.text.parser import parse_graph

F = "float32"


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs, outputs, **attrs)


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(model, compiled, *runs):
    """Compiled and reference results agree on inputs of each of these shapes."""
    for shapes in runs:
        inputs = {name: array(*shape) for name, shape in shapes.items()}
        wanted = ReferenceEvaluator(model).run(None, inputs)
        for got, want in zip(compiled.run(inputs).values(), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def halved(make_model, x=("n", 3, "h", "w")):
    """x + (x halved and doubled)."""
    nodes = [
        node("MaxPool", ["x"], ["small"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", ["small", "", "scales"], ["large"], mode="nearest"),
        node("Add", ["x", "large"], ["y"]),
    ]
    return make_model(nodes, {"x": (F, list(x))}, {"y": F}, opset=17, constants={"scales": np.array([1, 1, 2, 2], np.float32)})


def test_names_in_given_shapes_are_the_callers(make_model):
    """`--shape x=n,3,h*2,w*2` where the model's own dims are called h and w, and dims given as well."""
    model = halved(make_model)
    compiled = tcomp.compile(model, shapes={"x": ["n", 3, "h*2", "w*2"]}, dims={"w": (1, 8)})
    assert str(compiled.inputs[0]) == "x: float32[n, 3, h * 2, w * 2]"
    check(model, compiled, {"x": (1, 3, 2, 2)}, {"x": (2, 3, 6, 16)})
    with pytest.raises(InputError, match=r"no h makes h \* 2 the size(.|\n)*h \* 2 = 5"):
        compiled.run({"x": array(1, 3, 5, 4)})
    with pytest.raises(InputError, match=r"w \* 2 is 18, outside its range of 2 to 16"):
        compiled.run({"x": array(1, 3, 4, 18)})


def test_a_size_that_is_a_sum(make_model):
    """A mask of past + new columns, as decoders take it, tells `past`."""
    model = make_model([node("MatMul", ["m", "v"], ["y"])], {"m": (F, ["n", "past + n"]), "v": (F, ["past + n", 4])}, {"y": F})
    compiled = tcomp.compile(model)
    check(model, compiled, {"m": (2, 5), "v": (5, 4)}, {"m": (3, 4), "v": (4, 4)})
    with pytest.raises(InputError, match="contradict each other: no past and n makes|no n and past makes"):
        compiled.run({"m": array(3, 3), "v": array(3, 4)})


def test_dims_from_extents():
    """What arrays tell of dims: one unknown, two digits, a sum, a contradiction."""
    h, r, a, b = dim("h", 1, 100), dim("r", -7, 0), dim("a", 1, 50), dim("b", 1, 50)
    extents = [simplify(h * 32 + r), a, simplify(a + b), simplify(a * 2)]
    found = solved_dims(extents)
    assert set(found.values) >= {h, r, a, b}
    for values in ({h: 3, r: -7, a: 4, b: 5}, {h: 1, r: 0, a: 1, b: 1}):
        sizes = {raw: evaluate_int(e, values) for e, raw in found.extents.items()}
        assert {v: evaluate_int(found.values[v], sizes) for v in values} == values
        assert all(simplify(c).op == "const" or evaluate_int(c, sizes) for c, _ in found.checks)
    broken = {raw: evaluate_int(e, values) for e, raw in found.extents.items()} | {found.extents[extents[3]]: 3}
    assert not all(evaluate_int(c, broken) for c, _ in found.checks)


def test_checks_of_a_graph_are_printed_and_read(make_model):
    graph = import_model(halved(make_model), shapes={"x": ["n", 3, "h*2", "w*2"]})
    n, h = (next(v for v in graph.dims() if v.name == name) for name in ("n", "h"))
    operators = {n.op.name: n.op for n in graph.nodes}
    graph.checks[n * n < h] = "a node"
    assert parse_graph(str(graph), operators).checks == {simplify(c): at for c, at in graph.checks.items()}
