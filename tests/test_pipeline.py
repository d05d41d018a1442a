"""The whole pipeline: from a model (or tensor expressions) to an artifact that runs; sizes, threads, bytes, dumps, errors."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp import te
from tcomp.backends.kernel import CompiledKernel
from tcomp.backends.workers import Compilation
from tcomp.errors import ArtifactError, ImportModelError, InputError, IRError, TargetError, UnsupportedError
from tcomp.ir.graph import GraphBuilder
from tcomp.ir.text.parser import parse_program
from tcomp.ir.verify.program import verify_program
from tcomp.ops import elementwise as ew
from tcomp.options import CompileOptions, Report
from tcomp.pipeline import compile_graph, compile_model
from tcomp.target import CpuTarget, Target

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[int | str]],
    outputs: dict[str, Sequence[int | str] | None],
    weights: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """A float32 model."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


W, B = random(20, 37), random(37)
WC = random(10, 3, 3, 3)


def dense(batch: int | str = "n") -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], "product"),
        helper.make_node("Add", ["p", "b"], ["q"], "bias"),
        helper.make_node("Relu", ["q"], ["r"], "relu"),
        helper.make_node("Softmax", ["r"], ["y"], "softmax", axis=-1),
    ]
    return model(nodes, {"x": (batch, 20)}, {"y": (batch, 37)}, {"w": W, "b": B})


def dense_in_numpy(x: np.ndarray) -> np.ndarray:
    r = np.maximum(x.astype(np.float64) @ W + B, 0)
    e = np.exp(r - r.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def convolution(pad: int = 0) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[pad] * 4),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["y"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
    ]
    return model(nodes, {"x": ("n", 3, "h", "w")}, {"y": None}, {"w": WC})


def convolution_in_numpy(x: np.ndarray, pad: int = 0) -> np.ndarray:
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    y = np.maximum(np.einsum("nchwpq,ocpq->nohw", windows, WC), 0)
    n, c, h, w = y.shape
    return y[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).max((3, 5))


# ---------------------------------------------------------------- compile, run, save, load


@pytest.mark.parametrize("source", ["proto", "bytes", "path", "string"])
def test_compile_and_run(tmp_path: Path, source: str) -> None:
    proto = dense(4)
    onnx.save(proto, tmp_path / "m.onnx")
    given = {"proto": proto, "bytes": proto.SerializeToString(), "path": tmp_path / "m.onnx", "string": str(tmp_path / "m.onnx")}
    module = tcomp.compile(given[source])
    x = random(4, 20)
    np.testing.assert_allclose(module.run({"x": x})["y"], dense_in_numpy(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(module(x), module.run({"x": x})["y"])
    assert [str(s) for s in (*module.inputs, *module.outputs)] == [str(s) for s in tcomp.compile(proto).inputs] + [
        str(s) for s in tcomp.compile(proto).outputs
    ]


def test_save_and_load(tmp_path: Path) -> None:
    module = tcomp.compile(dense())
    module.save(tmp_path / "m.tcomp")
    again = tcomp.load(tmp_path / "m.tcomp")
    x = random(3, 20)
    np.testing.assert_array_equal(again(x), module(x))
    again.save(tmp_path / "n.tcomp")
    assert (tmp_path / "m.tcomp").read_bytes() == (tmp_path / "n.tcomp").read_bytes()


def test_what_was_compiled_before_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time neither LLVM nor a schedule is asked, and the artifact is the same to the bit."""
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path))
    first = [compile_model(proto)[0] for proto in (dense(), convolution())]

    def fail(*args: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr("tcomp.codegen.llvm.machine_code._optimised", fail)
    monkeypatch.setattr("tcomp.backends.cpu.CpuBackend.operand_layouts", fail)
    for proto, before in zip((dense(), convolution()), first, strict=True):
        assert bytes(compile_model(proto)[0].image) == bytes(before.image)


def test_a_saved_model_runs_without_the_compiler(tmp_path: Path) -> None:
    tcomp.compile(dense()).save(tmp_path / "m.tcomp")
    np.save(tmp_path / "x.npy", x := random(2, 20))
    program = (
        "import sys, numpy as np\n"
        "sys.modules.update(dict.fromkeys(['llvmlite', 'onnx', 'ml_dtypes', 'typer', 'rich']))\n"  # importing these fails
        "import tcomp\n"
        "y = tcomp.load(sys.argv[1])(np.load(sys.argv[2])); np.save(sys.argv[3], y)\n"
        "assert not [m for m in sys.modules if m.startswith(('tcomp.ir', 'tcomp.pipeline', 'tcomp.codegen'))]\n"
    )
    root = Path(tcomp.__file__).parents[1]
    files = [str(tmp_path / name) for name in ("m.tcomp", "x.npy", "y.npy")]
    subprocess.run([sys.executable, "-c", program, *files], check=True, env={**os.environ, "PYTHONPATH": str(root)})
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), dense_in_numpy(x), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- sizes


def test_symbolic_batch_runs_at_every_size() -> None:
    module = tcomp.compile(dense())
    for n in (1, 2, 7, 16, 33, 100):
        x = random(n, 20)
        np.testing.assert_allclose(module(x), dense_in_numpy(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pad", [0, 1])
def test_symbolic_images(pad: int) -> None:
    module = tcomp.compile(convolution(pad))
    for shape in ((1, 3, 4, 4), (2, 3, 5, 9), (1, 3, 17, 30), (3, 3, 33, 4)):
        x = random(*shape)
        np.testing.assert_allclose(module(x), convolution_in_numpy(x, pad), rtol=1e-4, atol=1e-5)


def test_images_without_room_for_a_window_give_nothing() -> None:
    module = tcomp.compile(convolution())
    for size in ((2, 2), (3, 3), (2, 3)):
        assert module(random(1, 3, *size)).shape == (1, 10, 0, 0)


def test_images_too_small_for_the_model_are_refused() -> None:
    """An extent would be negative: of the output, or of an intermediate result only."""
    proto = convolution()
    proto.graph.node.append(helper.make_node("GlobalMaxPool", ["y"], ["top"]))
    proto.graph.output[0].name = "top"
    for module in (tcomp.compile(convolution()), tcomp.compile(proto)):
        for size in ((1, 1), (1, 9), (9, 1)):
            with pytest.raises(InputError, match="too small for the model"):
                module(random(1, 3, *size))
        assert module(random(1, 3, 8, 8)).shape[:2] == (1, 10)


def test_bounded_dims() -> None:
    module = tcomp.compile(dense(), dims={"n": (2, 8)})
    for n in (2, 8):
        x = random(n, 20)
        np.testing.assert_allclose(module(x), dense_in_numpy(x), rtol=1e-5, atol=1e-6)
    for n in (1, 9):
        with pytest.raises(InputError, match=f"n is {n}, outside its range of 2 to 8"):
            module(random(n, 20))


def test_fixed_dims_and_shapes() -> None:
    for module in (tcomp.compile(dense(), dims={"n": 5}), tcomp.compile(dense(), shapes={"x": (5, 20)})):
        assert module.inputs[0].shape == (5, 20) and not module.manifest.dims
        with pytest.raises(InputError, match="axis 0 has 4 elements instead of 5"):
            module(random(4, 20))


def test_one_dim_in_two_inputs() -> None:
    nodes = [helper.make_node("Concat", ["a", "b"], ["y"], axis=1)]
    module = tcomp.compile(model(nodes, {"a": ("n", 2), "b": ("n", "k")}, {"y": None}))
    a, b = random(3, 2), random(3, 5)
    np.testing.assert_array_equal(module(a, b), np.concatenate([a, b], 1))
    with pytest.raises(InputError, match="n is 4 here, but 3"):
        module(a, random(4, 5))


# ---------------------------------------------------------------- threads


@pytest.mark.parametrize("proto", [dense("n"), convolution(1)], ids=["dense", "convolution"])
def test_any_number_of_threads_gives_the_same_bits(proto: onnx.ModelProto) -> None:
    artifact, _ = compile_model(proto)
    modules = [tcomp.Module.load(artifact, threads=n) for n in (1, 2, 3, 5)]
    x = random(300, 20) if proto.graph.node[0].op_type == "MatMul" else random(2, 3, 61, 47)
    first = modules[0](x)
    for module in modules:
        for _ in range(3):
            assert module(x).tobytes() == first.tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_concurrent_calls(threads: int) -> None:
    module = tcomp.compile(dense(), threads=threads)
    inputs = [random(n, 20) for n in (1, 3, 40, 200)]
    wanted = [module(x) for x in inputs]
    wrong: list[str] = []

    def call(number: int) -> None:
        for turn in range(60):
            n = (number + turn) % len(inputs)
            if module(inputs[n]).tobytes() != wanted[n].tobytes():
                wrong.append(f"thread {number}, turn {turn}")

    callers = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for t in callers:
        t.start()
    for t in callers:
        t.join(60)
    assert not wrong and not any(t.is_alive() for t in callers)


# ---------------------------------------------------------------- the same bytes


PROGRAM = """
import hashlib, sys
import numpy as np
from tests import test_pipeline
from tcomp.options import CompileOptions
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
for proto in (test_pipeline.dense(), test_pipeline.convolution(1)):
    artifact, _ = compile_model(proto)
    artifact.save(sys.argv[1])
    print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())
"""


def test_artifacts_are_reproducible(tmp_path: Path) -> None:
    """Another process, another hash seed, an empty cache, kernels compiled in another order: the same bytes."""
    found = set()
    root = Path(tcomp.__file__).parents[1]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TCOMP_CACHE": str(tmp_path / seed), "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "artifact")]
        found.add(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    assert len(found) == 1
    for proto, digest in zip((dense(), convolution(1)), found.pop().split(), strict=True):
        artifact, _ = compile_model(proto)
        artifact.save(tmp_path / "here")
        assert hashlib.sha256((tmp_path / "here").read_bytes()).hexdigest() == digest


# ---------------------------------------------------------------- looking inside


@pytest.mark.parametrize("rows", [40, "n"])
def test_results_lie_over_inputs_that_end_with_them(rows: int | str) -> None:
    """The weights of attention take the place of the scores, and a sum that of its residual: what is alive at once is x and one more."""
    nodes = [("MatMul", ["x", "k"], "scores"), ("Softmax", ["scores"], "weights"), ("MatMul", ["weights", "v"], "y"), ("Tanh", ["y"], "tanh"),
             ("MatMul", ["tanh", "o"], "z"), ("Add", ["z", "tanh"], "sum"), ("ReduceMax", ["sum"], "out")]  # fmt: skip
    size, keys = 64, 200
    shapes = {"k": (size, keys), "v": (keys, size), "o": (size, size)}
    arrays = {name: random(*shape) for name, shape in shapes.items()}
    made = model([helper.make_node(op, ins, [out]) for op, ins, out in nodes], {"x": [rows, size]}, {"out": None}, arrays)
    compiled, report = compile_model(made, CompileOptions(dims={"n": (1, 100)} if rows == "n" else None))
    x = random(40, size)
    e = np.exp(x @ arrays["k"])
    tanh = np.tanh(e / e.sum(1, keepdims=True) @ arrays["v"])
    got = tcomp.Module.load(compiled).run({"x": x})["out"]
    np.testing.assert_allclose(got, (tanh @ arrays["o"] + tanh).max(keepdims=True), rtol=1e-4)
    if rows == 40:
        assert report.arena == 40 * keys * 4 + 40 * size * 4  # one array of scores, and what is made of it


def test_outputs_in_the_memory_of_inputs_of_the_caller() -> None:
    builder = GraphBuilder()
    x, y = (builder.input(name, "float32", (3, 5)) for name in "xy")
    (total,) = builder.add(ew.ADD, [x, y])
    (artifact, a, b) = compile_graph(builder.build([total]), CompileOptions(threads=1)), random(3, 5), random(3, 5)
    module, wanted = tcomp.Module(artifact), a + b
    assert [[*pair] for pair in artifact.notes["overwritten"]] == [[0, 0], [1, 0]]
    plan = module.fixed_plan()
    assert plan is not None
    module.run_at(plan, [v.ctypes.data for v in (a, b, a)])
    assert np.array_equal(a, wanted)


def test_report_and_texts() -> None:
    told: list[tuple[str, int, int]] = []
    _, report = compile_model(
        dense(),
        CompileOptions(emit=("graph", "te", "loops", "llvm", "asm"), progress=lambda stage, done, total: told.append((stage, done, total))),
    )
    assert report.kernels == 2 == report.distinct_kernels
    assert set(report.seconds) == {"import", "passes", "kernels", "link"}
    assert report.edges_not_fused == ["%r: relu -> softmax (softmax) not fused: both sides reduce"]
    assert "matmul(" in report.stages["graph"] and "sum(" in report.stages["te"]
    assert "vectorized" in report.stages["loops"] and "define " in report.stages["llvm"] and ".text" in report.stages["asm"]
    assert told[0][0] == "graph" and told[-1] == ("done", 1, 1)
    assert ("kernels", 2, 2) in told


def test_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCOMP_DUMP", str(tmp_path / "dump"))
    tcomp.compile(dense(3))
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names[0] == "00-input.txt" and {"90-graph.txt", "90-te.txt", "90-loops.txt", "90-llvm.txt", "90-asm.txt"} <= set(names)
    steps = sorted({name.split(".")[0] for name in names if name.endswith(".diff")})
    assert [s.split("-", 1)[1] for s in steps] == [name for name, _ in tcomp.pipeline.graph_passes(CompileOptions(Target.host()), Report())]
    assert "kernel(" in (tmp_path / "dump" / "90-graph.txt").read_text()
    assert "\ns.collapse(apart=128)\n" in (tmp_path / "dump" / "90-schedule.txt").read_text()
    verify_program(parse_program((tmp_path / "dump" / "95-program.txt").read_text()))
    partition = next(n for n in names if n.endswith("partition.diff"))
    assert "+" in (tmp_path / "dump" / partition).read_text()


def test_every_pass_leaves_a_well_formed_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCOMP_VERIFY", "1")
    x = random(1, 3, 9, 9)
    np.testing.assert_allclose(tcomp.compile(convolution(1))(x), convolution_in_numpy(x, 1), rtol=1e-4, atol=1e-5)


def test_profile_names_kernels() -> None:
    module = tcomp.compile(dense())
    found = module.profile({"x": random(8, 20)}, runs=2)
    assert [name for name, _ in found] == ["relu", "softmax"] and all(seconds > 0 for _, seconds in found)


# ---------------------------------------------------------------- other machines


@pytest.mark.parametrize("line", ["cpu -mcpu=x86-64", "cpu -mcpu=haswell", "cpu -mcpu=znver4", "aarch64"])
def test_cross_compilation(line: str) -> None:
    target = CpuTarget.parse(line)
    artifact, _ = compile_model(convolution(1), CompileOptions(target))
    assert artifact.manifest.triple == target.triple
    if target.runs_on(Target.host()):
        x = random(1, 3, 20, 21)
        np.testing.assert_allclose(tcomp.Module.load(artifact)(x), convolution_in_numpy(x, 1), rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(ArtifactError, match="machine|processor|built for|made for"):
            tcomp.Module.load(artifact)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda: tcomp.compile("/no/such/model.onnx"), ImportModelError, "no/such/model"),
        (lambda: tcomp.compile(b"this is not a model"), ImportModelError, "model"),
        (lambda: tcomp.compile(dense(), "gameboy"), TargetError, "gameboy"),
        (lambda: tcomp.compile(dense(), dims={"m": 3}), InputError, "m"),
        (lambda: tcomp.compile(dense(), shapes={"z": (3, 20)}), InputError, "z"),
        (lambda: tcomp.compile(dense(), shapes={"x": (3, 21)}), InputError, "21"),
        (lambda: tcomp.compile(dense(), threads=0), InputError, "threads"),
    ],
    ids=["path", "bytes", "target", "dim", "input", "shape", "threads"],
)
def test_refusals(action: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(tcomp.TcompError, match=message) as found:
        action()
    assert isinstance(found.value, error | ImportModelError)


def test_unsupported_operators_are_listed_together() -> None:
    nodes = [helper.make_node("Frobnicate", ["x"], ["a"], domain="mine"), helper.make_node("Twist", ["a"], ["y"], domain="mine")]
    proto = model(nodes, {"x": (2, 2)}, {"y": (2, 2)})
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    with pytest.raises(UnsupportedError) as found:
        tcomp.compile(proto)
    assert "Frobnicate" in str(found.value)


def test_a_size_that_an_input_has_twice() -> None:
    from tcomp.ir.expr import dim

    b = GraphBuilder()
    x = b.input("x", "float32", (dim("n", 1) * 2,))
    module = tcomp.Module.load(compile_graph(b.build(b.add(ew.NEG, [x])), CompileOptions(Target.host())))
    assert module(np.ones(6, np.float32)).tolist() == [-1] * 6
    with pytest.raises(InputError, match="n in 1.. makes n \\* 2 the size"):
        module(np.ones(5, np.float32))


# ---------------------------------------------------------------- tensor expressions


def product(n: Any = 33) -> tuple[Any, Any, Any]:
    a, b = te.placeholder((n, 20), name="a"), te.placeholder((20, 7), name="b")
    k = te.reduce_axis(20, name="k")
    return a, b, te.compute((n, 7), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")


def test_build() -> None:
    f = tcomp.build(product())
    x, y = random(33, 20), random(20, 7)
    np.testing.assert_allclose(f(x, y), x @ y, rtol=1e-4, atol=1e-5)
    out = np.full((33, 7), np.nan, np.float32)
    assert f(x, y, out) is None
    np.testing.assert_array_equal(out, f(x, y))


def test_build_with_a_symbolic_size_and_several_outputs() -> None:
    n = te.var("n")
    a, b, c = product(n)
    top = te.compute((n,), lambda i: te.max(c[i, k], axis=k) if (k := te.reduce_axis(7, "k7")) is not None else 0, name="top")
    f = tcomp.build([a, b, c, top])
    y = random(20, 7)
    for size in (1, 5, 40):
        x = random(size, 20)
        product_, best = f(x, y)
        np.testing.assert_allclose(product_, x @ y, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(best, product_.max(1))
        outs = np.empty((size, 7), np.float32), np.empty(size, np.float32)
        f(x, y, *outs)
        np.testing.assert_array_equal(outs[1], best)


def test_build_refuses_what_makes_no_sense() -> None:
    a, b, c = product()
    for bad in ([a, b], [c, a, b], [a, c, b], []):
        with pytest.raises(IRError, match="placeholders first"):
            tcomp.build(bad)
    with pytest.raises(IRError, match="`b` is read but is not among the inputs"):
        tcomp.build([a, c])
    f = tcomp.build([a, b, c])
    x, y = random(33, 20), random(20, 7)
    with pytest.raises(InputError):
        f(x)
    with pytest.raises(InputError):
        f(x, y.T.copy())
    with pytest.raises((InputError, TypeError, ValueError)):
        f(x, y, np.empty((33, 7), np.float16))
    with pytest.raises((InputError, ValueError)):
        f(x, y, np.empty((3, 7), np.float32))
    with pytest.raises((InputError, ValueError)):
        f(x, y, np.empty((33, 7), np.float32), np.empty((33, 7), np.float32))


def test_build_of_imperative_programs() -> None:
    from tcomp.ir.loops import block, loop, store

    n = te.var("n")
    x = te.placeholder((n,), "int32", "x")
    total = te.extern(
        ((n,), "int32"),
        [x],
        lambda ins, outs: block(
            store(outs[0], (0,), ins[0][0]), loop("i", n - 1, lambda i: store(outs[0], (i + 1,), outs[0][i] + ins[0][i + 1]))
        ),
        "prefix",
    )
    f = tcomp.build([x, total])
    for size in (1, 2, 100):
        values = RNG.integers(-9, 9, size).astype(np.int32)
        np.testing.assert_array_equal(f(values), np.cumsum(values, dtype=np.int32))


def test_kernels_are_begun_when_their_layouts_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are compiled, copies of outputs and kernels of loops included, while the passes still run."""
    begun, finish = list[set[str]](), Compilation.finish

    def finished(self: Compilation, texts: Sequence[str], *rest: Any) -> dict[str, CompiledKernel]:
        begun.append(set(self._names))
        assert begun[-1] == set(texts)
        return finish(self, texts, *rest)

    monkeypatch.setattr(Compilation, "finish", finished)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["p"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["p"], ["q"], "relu"),
        helper.make_node("GlobalAveragePool", ["q"], ["r"], "pool"),
        helper.make_node("Softmax", ["r"], ["y"], "softmax", axis=1),
    ]
    compile_model(model(nodes, {"x": (1, 3, 12, 12)}, {"p": (1, 10, 12, 12), "y": (1, 10, 1, 1)}, {"w": WC}))
    assert len(begun) == 1 and len(begun[0]) > 2
