"""Models that mean harm, and models that are large or deep without meaning it: each compiles, or is refused with a clear error."""

import os
from itertools import pairwise

import numpy as np
import pytest
from onnx import TensorProto, helper

import tcomp
from tcomp.errors import ImportModelError, InputError, LimitError, TcompError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.ir.expr import bounds, const, var
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.linear import linear
from tcomp.ir.simplify import simplify
from tests.frontends import hostile
from tests.frontends.hostile import X, info, model, node


@pytest.mark.parametrize("name, wanted", [(name, m) for name, m in hostile.sample(6)], ids=lambda x: x if isinstance(x, str) else "")
def test_hostile_models_are_compiled_refused_or_ended(name, wanted):
    verdict, _, memory = hostile.attempt(wanted, seconds=60)
    assert verdict.split(":")[0] not in ("raw", "crash"), verdict
    assert memory < hostile.MEMORY >> 20


# ---------------------------------------------------------------- deep and wide


def test_a_concat_of_many_inputs():
    names = [f"x{n}" for n in range(600)]
    inputs = {name: np.full((1, 2), n, np.float32) for n, name in enumerate(names)}
    m = model([node("Concat", names, ["y"], axis=0)], [info(name, [1, 2]) for name in names], ["y"])
    np.testing.assert_array_equal(tcomp.compile(m, threads=1).run(inputs)["y"], np.concatenate(list(inputs.values())))


def test_deep_expressions_are_walked_without_recursion():
    a = var("a", 1, 5)
    total, product = a, a
    for n in range(5000):
        total = total + var(f"v{n}", 0, 1)
        product = simplify(product * product) if n < 40 else product
    assert len(linear(total)) == 5001
    assert bounds(total) == (1, 5005)
    assert simplify(total - total) is const(0)


def test_squares_of_sizes_do_not_explode():
    names = [f"s{n}" for n in range(31)]
    nodes = [node("Shape", ["x"], ["s0"]), *(node("Mul", [a, a], [b]) for a, b in pairwise(names))]
    y = tcomp.compile(model(nodes, [info("x", ["a", "b"])], names[-1:]), threads=1).run({"x": np.zeros((1, 3), np.float32)})[names[-1]]
    np.testing.assert_array_equal(y, [1, np.int64(pow(3, 1 << 30, 1 << 64) - (1 << 64 if pow(3, 1 << 30, 1 << 64) >> 63 else 0))])


def test_bodies_are_not_visited_once_for_each_level_around_them(monkeypatch):
    from tcomp.passes import dce

    visits = [0]
    original = dce._read_inputs
    monkeypatch.setattr(dce, "_read_inputs", lambda graph: (visits.__setitem__(0, visits[0] + 1), original(graph))[1])
    counts = []
    for depth in (4, 8):
        branch = hostile.branches(depth, True)
        nodes = [*branch.node, node("Identity", [branch.output[0].name], ["y"])]
        graph = import_model(model(nodes, [X, info("c", [], TensorProto.BOOL)], ["y"]))
        from tcomp.passes.simplify import simplify as simplify_graph

        visits[0] = 0
        simplify_graph(graph)
        counts.append(visits[0])
    assert counts[1] < 20 * counts[0]  # there are 16 times as many bodies, twice as deep


# ---------------------------------------------------------------- accepted though wrong


def relu():
    m = model([node("Relu", ["x"], ["y"])], [info("x", [2, 3])], ["y"])
    m.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return m


def declared(dims, kind=TensorProto.FLOAT):
    m = model([node("Relu", ["x"], ["h"]), node("Relu", ["h"], ["y"])], [info("x", [2, 3])], ["y"])
    m.graph.value_info.append(info("h", dims, kind))
    return m


def output(dims):
    m = relu()
    m.graph.output[0].CopyFrom(info("y", dims))
    return m


def version(number):
    m = relu()
    m.ir_version = number
    return m


def negative():
    m = relu()
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -3
    return m


def dead(op, inputs, **attrs):
    m = relu()
    m.graph.node.append(node(op, inputs, ["unused"], **attrs))
    return m


def dead_cycle():
    m = relu()
    m.graph.node.extend([node("Relu", ["q"], ["p"]), node("Relu", ["p"], ["q"])])
    return m


def half_out_of_range():
    w = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[1], int32_data=[70000])
    m = model([node("Cast", ["w"], ["y"], to=TensorProto.FLOAT)], [], ["y"])
    m.graph.initializer.append(w)
    return m


def weight(*dims):
    w = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims)
    return model([node("Add", ["x", "w"], ["y"])], [X], ["y"], w=w)


WRONG = {
    "version": lambda: version(1000), "no version": lambda: version(0), "negative version": lambda: version(-1), "size": lambda: output([2, 4]),
    "rank": lambda: output([2, 3, 1]), "input": negative, "value": lambda: declared([7, 3]),
    "type of value": lambda: declared([2, 3], TensorProto.INT32), "dead arity": lambda: dead("Add", ["x"]),
    "dead attribute": lambda: dead("Relu", ["x"], padz=1), "dead name": lambda: dead("Relu", ["nowhere"]), "dead cycle": dead_cycle,
    "half": half_out_of_range, "no elements, of a size too large for all memory": lambda: weight(0, 1 << 62),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_the_specification_refuses(what):
    with pytest.raises((ImportModelError, UnsupportedError)):
        import_model(WRONG[what]())


def test_sizes_of_the_caller_may_differ_from_declared_ones():
    graph = import_model(output([2, 3]), shapes={"x": (5, 3)})
    assert evaluate_graph(graph, {"x": np.zeros((5, 3), np.float32)})["y"].shape == (5, 3)


@pytest.mark.parametrize(
    "location", ["a\0b", "/dev/zero", "/proc/self/mem", "../w.bin", ".", "", "pipe", "folder", "out", "loop", "x" * 5000, "sub/../w"]
)
def test_odd_locations_of_external_data(location, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to("/etc/passwd")
    (tmp_path / "loop").symlink_to("loop")
    w = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    w.external_data.add(key="location", value=location)
    (tmp_path / "m.onnx").write_bytes(model([node("Add", ["x", "w"], ["y"])], [X], ["y"], w=w).SerializeToString())
    with pytest.raises(ImportModelError, match="external data"):
        import_model(tmp_path / "m.onnx")


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("version", [(1 << 63) - 1, 1 << 31, -(1 << 63)])
def test_opsets_of_more_than_32_bits(domain, version):
    m = model([helper.make_node("Gelu", ["x"], ["unused"], domain=domain), node("Relu", ["x"], ["y"])], [X], ["y"])
    del m.opset_import[:]
    m.opset_import.extend([helper.make_opsetid("", 20), helper.make_opsetid(domain, version)])
    with pytest.raises(ImportModelError, match=f"opset {version} of domain"):
        import_model(m)


def test_a_location_of_external_data_that_is_no_text(tmp_path):
    w = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    w.external_data.add(key="location", value="w.bin")
    data = model([node("Add", ["x", "w"], ["y"])], [X], ["y"], w=w).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data.replace(b"w.bin", b"w\xffbin"))
    with pytest.raises(ImportModelError, match="not valid UTF-8"):
        import_model(tmp_path / "m.onnx")


def test_names_do_not_steer_the_terminal():
    with pytest.raises(TcompError) as caught:
        import_model(model([node("Relu", ["\x1b[2Jx"], ["y"])], [], ["y"]))
    assert "\x1b" not in str(caught.value) and r"\x1b[2Jx" in str(caught.value)


# ---------------------------------------------------------------- a batch of no rows


def test_a_batch_of_no_rows():
    m = model([node("MatMul", ["x", "w"], ["y"])], [info("x", ["n", 4])], ["y"], w=np.ones((4, 5), np.float32))
    module = tcomp.compile(m, threads=1)
    empty, full = np.zeros((0, 4), np.float32), np.ones((2, 4), np.float32)
    assert module.run({"x": empty})["y"].shape == (0, 5)
    assert module.run({"x": full})["y"].sum() == 40
    assert module.run({"x": empty})["y"].shape == (0, 5)
    given = np.empty((0, 5), np.float32)
    assert module.run({"x": empty}, out={"y": given})["y"] is given


def test_reductions_of_nothing():
    total = model([node("ReduceSum", ["x"], ["y"], keepdims=0)], [info("x", ["n", 4])], ["y"])
    empty = {"x": np.zeros((0, 4), np.float32)}
    with pytest.raises(InputError, match=r"outside its range of 1 to(.|\n)*--dim n=0"):
        tcomp.compile(total, threads=1).run(empty)
    assert tcomp.compile(total, threads=1, dims={"n": (0, 9)}).run(empty)["y"] == 0


# ---------------------------------------------------------------- limits


def test_limits_of_a_compilation():
    m = relu()
    module = tcomp.compile(m, threads=1, max_seconds=600, max_memory=4 << 30)
    np.testing.assert_array_equal(module.run({"x": np.ones((2, 3), np.float32)})["y"], 1)
    with pytest.raises(LimitError, match="longer than 0.01 s"):
        tcomp.compile(m, threads=1, max_seconds=0.01)
    fold = [node("ConstantOfShape", ["s"], ["c"]), node("MatMul", ["c", "c"], ["d"]), node("Add", ["x", "d"], ["y"])]
    large = model(fold, [info("x", [1])], ["y"], s=np.array([4000, 4000]))
    with pytest.raises(LimitError, match="bytes of memory"):
        tcomp.compile(large, threads=1, max_memory=260 << 20)
    with pytest.raises(ImportModelError, match="not an ONNX model"):
        tcomp.compile(b"xx", threads=1, max_seconds=600)
    for wrong in ({"max_seconds": 0}, {"max_memory": 5}):
        with pytest.raises(InputError):
            tcomp.compile(m, **wrong)
