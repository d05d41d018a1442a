"""Where symbolic sizes meet, and inputs whose sizes are formulas of others."""

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.autotune.subject import ModelSubject
from tcomp.errors import InputError
from tcomp.frontends.onnx import import_model
from tcomp.ir.dims import solved_dims
from tcomp.ir.expr import dim, evaluate_int
from tcomp.ir.simplify import simplify
from tcomp.ir.text.parser import parse_graph
from tcomp.options import CompileOptions, Report
from tcomp.pipeline import graph_passes
from tcomp.runtime import Module
from tcomp.target import Target
from tcomp.verification import verify

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
    with pytest.raises(InputError, match=r"no h in 1..\d+ makes h \* 2 the size(.|\n)*h \* 2 = 5"):
        compiled.run({"x": array(1, 3, 5, 4)})
    with pytest.raises(InputError, match=r"w \* 2 is 18, outside its range of 2 to 16"):
        compiled.run({"x": array(1, 3, 4, 18)})


def test_a_size_that_is_a_sum(make_model):
    """A mask of past + new columns, as decoders take it, tells `past`."""
    model = make_model([node("MatMul", ["m", "v"], ["y"])], {"m": (F, ["n", "past + n"]), "v": (F, ["past + n", 4])}, {"y": F})
    compiled = tcomp.compile(model)
    check(model, compiled, {"m": (2, 5), "v": (5, 4)}, {"m": (3, 4), "v": (4, 4)})
    with pytest.raises(InputError, match=r"contradict each other: no (past|n) in \S+ and (past|n) in \S+ makes"):
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


def pooled(source, result):
    return node("MaxPool", [source], [result], kernel_shape=[2, 2], strides=[2, 2])


def test_sizes_are_multiples_where_they_have_to_be(make_model):
    model = halved(make_model)
    compiled = tcomp.compile(model)
    assert str(compiled.inputs[0]) == "x: float32[n, 3, h * 2, w * 2]"
    check(model, compiled, {"x": (2, 3, 8, 10)}, {"x": (1, 3, 2, 4)})
    with pytest.raises(InputError, match="no w in (.|\n)*w . 2 = 9"):
        compiled.run({"x": array(1, 3, 4, 9)})


def test_the_last_row_is_stretched(make_model):
    """As EdgeNeXt scales positions: the last row of an image of h // 2 rows has one of them where there is any, and not as many as it."""
    constants = {"last": np.array([-1]), "end": np.array([2**31 - 1]), "rows": np.array([2])}
    nodes = [pooled("x", "half"), node("Slice", ["half", "last", "end", "rows"], ["row"]), node("Div", ["half", "row"], ["y"])]
    model = make_model(nodes, {"x": (F, ["n", 3, "h", "w"])}, {"y": F}, opset=17, constants=constants)
    check(model, tcomp.compile(model), {"x": (2, 3, 8, 10)}, {"x": (1, 3, 2, 4)})


def test_images_rolled_in_whole_windows(make_model):
    """As Swin's, with free sizes: padded to a multiple of 4, put together of the parts below and above a row, cut into windows."""
    integers = {"zero": [0], "one": [1], "two": [2], "four": [4], "ends": [0, 0, 0], "cut": [2**31 - 1]}
    nodes = [
        node("Shape", ["x"], ["shape"]), node("Slice", ["shape", "one", "two"], ["h"]), node("Neg", ["h"], ["less"]), node("Mod", ["less", "four"], ["more"]),
        node("Concat", ["ends", "zero", "more", "zero"], ["pads"], axis=0), node("Pad", ["x", "pads"], ["padded"]),
        node("Slice", ["padded", "two", "cut", "one"], ["below"]), node("Slice", ["padded", "zero", "two", "one"], ["above"]),
        node("Concat", ["below", "above"], ["rolled"], axis=1), node("Reshape", ["rolled", "windows"], ["cut_up"]),
        node("ReduceMax", ["cut_up"], ["y"], axes=[2], keepdims=0),
    ]  # fmt: skip
    constants = {name: np.array(value, np.int64) for name, value in integers.items()} | {"windows": np.array([0, -1, 4, 5], np.int64)}
    model = make_model(nodes, {"x": (F, ["n", "h", 5])}, {"y": F}, opset=17, constants=constants)
    compiled = tcomp.compile(model)
    assert str(compiled.outputs[0]) == "y: float32[n, (h + 3) // 4, 5]"
    check(model, compiled, {"x": (2, 8, 5)}, {"x": (1, 3, 5)}, {"x": (3, 13, 5)})


def test_a_size_divided_by_another_one(make_model):
    """The remainder of sizes is a size; no code can be made for a check inside of it, so that a run by 0 is refused."""
    nodes = [
        node("Shape", ["x"], ["shape"]), node("Slice", ["shape", "zero", "one"], ["n"]), node("Slice", ["shape", "one", "two"], ["h"]),
        node("Mod", ["n", "h"], ["rest"]), node("Concat", ["rest", "two"], ["wanted"], axis=0), node("ConstantOfShape", ["wanted"], ["y"]),
    ]  # fmt: skip
    constants = {name: np.array([value], np.int64) for name, value in {"zero": 0, "one": 1, "two": 2}.items()}
    model = make_model(nodes, {"x": (F, ["n", "h"])}, {"y": F}, opset=17, constants=constants)
    compiled = tcomp.compile(model, dims={"n": (0, 9), "h": (0, 9)})
    check(model, compiled, {"x": (7, 4)}, {"x": (3, 5)})
    with pytest.raises(InputError, match="contradict"):
        compiled.run({"x": array(3, 0)})


def test_sizes_between_multiples(make_model):
    """Two rounded-up halves, and back by 2: heights of 3, 4, 7, 8, ... fit."""
    nodes = [
        node("MaxPool", ["x"], ["half"], kernel_shape=[3], strides=[2], pads=[1, 1]),
        node("MaxPool", ["half"], ["quarter"], kernel_shape=[3], strides=[2], pads=[1, 1]),
        node("Resize", ["quarter", "", "scales"], ["large"], mode="nearest"),
        node("Concat", ["half", "large"], ["y"], axis=1),
    ]
    model = make_model(nodes, {"x": (F, [1, 2, "h"])}, {"y": F}, opset=17, constants={"scales": np.array([1, 1, 2], np.float32)})
    compiled = tcomp.compile(model)
    check(model, compiled, *({"x": (1, 2, h)} for h in (3, 4, 7, 12)))
    for h in (1, 2, 5, 6):
        with pytest.raises(InputError, match="contradict|outside its range"):
            compiled.run({"x": array(1, 2, h)})


def test_each_input_has_its_own_name_for_the_batch(make_model):
    model = make_model([node("Add", ["a", "b"], ["y"])], {"a": (F, ["unk__1", 3]), "b": (F, ["unk__2", 3])}, {"y": F})
    compiled = tcomp.compile(model)
    check(model, compiled, {"a": (2, 3), "b": (2, 3)})
    with pytest.raises(InputError, match="unk__1 is 4 here, but 2 in input 'a'"):
        compiled.run({"a": array(2, 3), "b": array(4, 3)})


def test_a_table_of_positions_limits_the_length(make_model):
    """x + table[:, :len(x)]: min(s, 16) has to be s."""
    nodes = [
        node("Shape", ["x"], ["s"], start=1, end=2),
        node("Slice", ["table", "zero", "s", "one"], ["p"]),
        node("Add", ["x", "p"], ["y"]),
    ]
    constants = {"table": array(1, 16, 4), "zero": np.array([0]), "one": np.array([1])}
    model = make_model(nodes, {"x": (F, ["n", "s", 4])}, {"y": F}, opset=17, constants=constants)
    compiled = tcomp.compile(model)
    check(model, compiled, {"x": (2, 5, 4)}, {"x": (1, 16, 4)})
    with pytest.raises(InputError, match="s is 17, outside its range of 1 to 16"):
        compiled.run({"x": array(2, 17, 4)})


def test_a_slice_in_steps_of_the_last_rows_but_four(make_model):
    """Of a product, of which no more is computed than the slice takes: as many rows as it says, by whatever formula."""
    nodes = [node("Mul", ["x", "x"], ["p"]), node("Slice", ["p", "starts", "ends", "axes", "steps"], ["y"])]
    constants = {"starts": [2, -6, -4], "ends": [1, -5, 5], "axes": [2, 1, 0], "steps": [-2, 2, 2]}
    model = make_model(nodes, {"x": (F, [2, "n", 5])}, {"y": F}, constants={name: np.array(v) for name, v in constants.items()})
    check(model, tcomp.compile(model), *({"x": (2, n, 5)} for n in (1, 5, 6, 9)))


def test_names_are_hints(make_model):
    """One name for axes that have to be 5 and 4: they are different sizes."""
    nodes = [node("MatMul", ["a", "w"], ["y"]), node("MatMul", ["b", "v"], ["z"])]
    constants = {"w": array(5, 3), "v": array(4, 3)}
    model = make_model(nodes, {"a": (F, ["N", "N"]), "b": (F, ["N", "N"])}, {"y": F, "z": F}, constants=constants)
    check(model, tcomp.compile(model), {"a": (2, 5), "b": (3, 4)})


def test_a_computed_size_of_one_is_stretched(make_model):
    """Where halves meet two columns, or a few elements of a row all of it: runs in which they are as many, and those in which it is one."""
    model = make_model(
        [node("MaxPool", ["x"], ["p"], kernel_shape=[2], strides=[2]), node("Add", ["p", "c"], ["y"])],
        {"x": (F, [1, 3, "n"])},
        {"y": F},
        constants={"c": array(3, 2)},
    )
    compiled = tcomp.compile(model)
    check(model, compiled, *({"x": (1, 3, n)} for n in (2, 3, 4, 5)))
    with pytest.raises(InputError, match="contradict"):
        compiled.run({"x": array(1, 3, 6)})
    nodes = [node("MaxPool", ["x"], ["p"], kernel_shape=[3]), node("Add", ["p", "c"], ["y"])]
    model = make_model(nodes, {"x": (F, [1, 3, "n"])}, {"y": F}, constants={"c": array(3, 4)})
    check(model, tcomp.compile(model), {"x": (1, 3, 3)}, {"x": (1, 3, 6)})
    nodes = [node("SpaceToDepth", ["x"], ["d"], blocksize=2), node("Expand", ["d", "shape"], ["y"])]
    model = make_model(nodes, {"x": (F, [3, 3, "h", "w"])}, {"y": F}, constants={"shape": np.array([1, 1, 2, 1])})
    check(model, tcomp.compile(model), {"x": (3, 3, 2, 6)}, {"x": (3, 3, 4, 2)})
    nodes = [node("Slice", ["x", "start", "end", "axis", "step"], ["few"]), node("Mul", ["few", "x"], ["y"])]
    constants = {"start": np.array([-6]), "end": np.array([6]), "axis": np.array([0]), "step": np.array([3])}
    model = make_model(nodes, {"x": (F, ["n"])}, {"y": F}, constants=constants)
    compiled = tcomp.compile(model)
    check(model, compiled, *({"x": (n,)} for n in (1, 2, 3)))
    with pytest.raises(InputError, match="contradict"):
        compiled.run({"x": array(7)})


@pytest.mark.parametrize("name", ["k", "i0", "n"])
def test_sizes_may_be_called_like_loops(make_model, name):
    model = make_model([node("CumSum", ["x", "axis"], ["y"])], {"x": (F, [3, name])}, {"y": F}, constants={"axis": np.array(1)})
    check(model, tcomp.compile(model), {"x": (3, 5)})


def test_what_is_not_decided_is_checked(make_model):
    """Halves that have to be equal, though sizes need not; a product that has to be a multiple."""
    nodes = [pooled("a", "p"), pooled("b", "q"), node("Add", ["p", "q"], ["s"]), node("Reshape", ["s", "shape"], ["y"])]
    inputs = {"a": (F, ["n", 1, "h", "w"]), "b": (F, ["m", 1, "i", "j"])}
    model = make_model(nodes, inputs, {"y": F}, constants={"shape": np.array([4, -1])})
    compiled = tcomp.compile(model)
    check(model, compiled, {"a": (2, 1, 8, 10), "b": (2, 1, 9, 11)}, {"a": (1, 1, 5, 9), "b": (1, 1, 4, 8)})
    with pytest.raises(InputError, match=r"h // 2 == i // 2 does not hold, in s(.|\n)*h = 8(.|\n)*i = 6"):
        compiled.run({"a": array(1, 1, 8, 8), "b": array(1, 1, 6, 8)})
    with pytest.raises(InputError, match="contradict"):
        compiled.run({"a": array(1, 1, 6, 6), "b": array(1, 1, 6, 6)})


def test_what_is_checked_outlives_every_pass(make_model, tmp_path):
    """In the graphs that `tcomp verify --full` interprets, and in the artifacts that the tuner makes, with layouts chosen anew."""
    nodes = [pooled("a", "p"), pooled("b", "q"), node("Add", ["p", "q"], ["s"])]
    inputs = {name: (F, [1, 1, f"{name}1", f"{name}2"]) for name in "ab"}
    model, options = make_model(nodes, inputs, {"s": F}), CompileOptions(Target.host(), threads=1)
    graph = import_model(model)
    checks = graph.checks
    assert len(checks) == 2
    for name, function in graph_passes(options, Report()):
        graph = function(graph)
        assert graph.checks == checks, name
    fitting = {"a": array(1, 1, 8, 8), "b": array(1, 1, 9, 9)}
    assert verify(import_model(model), fitting, options, full=True).ok
    onnx.save(model, tmp_path / "m.onnx")
    tuned = Module.load(ModelSubject(tmp_path / "m.onnx", options, {"a1": 8, "a2": 8, "b1": 8, "b2": 8}).artifact({}), threads=1)
    assert tuned.run(fitting)["s"].shape == (1, 1, 4, 4)
    with pytest.raises(InputError, match="does not hold, in s"):
        tuned.run(fitting | {"b": array(1, 1, 6, 8)})


def test_a_branch_that_may_not_run_says_nothing(make_model):
    """One of two branches needs x to have 4 columns, the other one 5: each run is checked when it gets there."""
    graphs = [
        helper.make_graph([node("MatMul", ["x", f"w{n}"], [f"o{n}"])], f"g{n}", [], [helper.make_empty_tensor_value_info(f"o{n}")])
        for n in (4, 5)
    ]
    branches = node("If", ["c"], ["y"], then_branch=graphs[0], else_branch=graphs[1])
    constants = {"w4": array(4, 3), "w5": array(5, 3)}
    model = make_model([branches], {"c": ("bool", []), "x": (F, ["n", "k"])}, {"y": F}, constants=constants)
    compiled = tcomp.compile(model)
    for taken, columns in ((True, 4), (False, 5)):
        x = array(2, columns)
        got = compiled.run({"c": np.array(taken), "x": x})["y"]
        np.testing.assert_allclose(got, x @ constants[f"w{columns}"], rtol=1e-5, atol=1e-6)
        with pytest.raises(InputError, match="which needs k == "):
            compiled.run({"c": np.array(not taken), "x": x})
    with pytest.raises(InputError, match="axis 1 has 5 elements instead of 4"):
        tcomp.compile(model, values={"c": np.array(True)}).run({"x": array(2, 5)})


def test_a_branch_that_drops_an_axis(make_model):
    """`squeeze` as torch exports it: if an axis is 1, it is dropped, and what follows needs that."""
    then = helper.make_graph([node("Squeeze", ["p", "axis"], ["t"])], "t", [], [helper.make_empty_tensor_value_info("t")])
    other = helper.make_graph([node("Identity", ["p"], ["o"])], "o", [], [helper.make_empty_tensor_value_info("o")])
    nodes = [
        node("MaxPool", ["x"], ["p"], kernel_shape=[4], strides=[4]),
        node("Shape", ["p"], ["shape"]),
        node("Gather", ["shape", "two"], ["length"]),
        node("Equal", ["length", "one"], ["c"]),
        node("If", ["c"], ["s"], then_branch=then, else_branch=other),
        node("MatMul", ["s", "w"], ["y"]),
    ]
    constants = {"two": np.array(2), "one": np.array(1), "axis": np.array([2]), "w": array(3, 5)}
    model = make_model(nodes, {"x": (F, ["n", 3, "length"])}, {"y": F}, constants=constants)
    compiled = tcomp.compile(model)
    check(model, compiled, {"x": (2, 3, 4)}, {"x": (1, 3, 7)})
    with pytest.raises(InputError, match="outside its range of 4 to 7"):
        compiled.run({"x": array(1, 3, 8)})


def test_computed_sizes_have_to_agree_as_well():
    """A bias for each channel, of which there are as many as two inputs have together."""
    text = """<ir_version: 10, opset_import: ["" : 17]>
    g (float[1,n,4] a, float[1,m,4] b, float[s] scale, float[t] bias) => (float[1,c,4] y) {
        x = Concat <axis = 1> (a, b)
        y = InstanceNormalization (x, scale, bias)
    }"""
    module = tcomp.compile(onnx.parser.parse_model(text), threads=1)
    given = {"a": np.ones((1, 3, 4), np.float32), "b": np.ones((1, 2, 4), np.float32), "scale": np.ones(5, np.float32)}
    assert module.run(given | {"bias": np.ones(5, np.float32)})["y"].shape == (1, 5, 4)
    with pytest.raises(InputError, match="input 'bias' has the wrong shape"):
        module.run(given | {"bias": np.ones(2, np.float32)})
