"""What each command does when all is well, or when it finds something."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import tcomp as package
from tcomp.cli import demo_networks
from tcomp.runtime import load
from tests.cli.conftest import save

COMMANDS = ("compile", "run", "bench", "check", "verify", "explain", "package", "serve", "sign", "doctor", "demo")


def expected(models, x):
    h = np.maximum(x @ models["w"] + models["b"], 0)
    e = np.exp(h - h.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(tcomp, command):
    text = tcomp(command, "--help").stdout
    assert "Examples:" in text and f"tcomp {command}" in text.partition("Examples:")[2]
    assert "--debug" in text and "--json" in text


def test_root_help_lists_the_commands(tcomp):
    text = tcomp("--help").stdout
    assert all(f" {command} " in text for command in COMMANDS)
    assert "--install-completion" in text


def test_version(tcomp):
    assert tcomp("--version").stdout.startswith(f"tcomp {package.__version__} ")


def test_help_imports_neither_numpy_nor_the_compiler():
    """It takes 0.2 s on a slow machine; importing NumPy, onnx and LLVM alone takes longer."""
    program = "import sys, tcomp.cli.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=root()).stdout.split()
    assert not {"numpy", "onnx", "llvmlite", "tcomp.pipeline"}.intersection(loaded)


def root():
    return Path(package.__file__).parents[1]


# ---------------------------------------------------------------- compile


def test_compile_writes_an_artifact_here(tcomp, models, tmp_path):
    done = tcomp("compile", models["mlp"])
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.tcomp"]
    assert "wrote mlp.tcomp" in done.stdout
    x = np.random.default_rng(1).standard_normal((6, 8), np.float32)
    np.testing.assert_allclose(load("mlp.tcomp")(x), expected(models, x), rtol=1e-5)


def test_compile_for_bounded_dims_and_threads(tcomp, models):
    record = tcomp.json("compile", models["mlp"], "-o", "a.tcomp", "--dim", "batch=2..8", "--threads", 1)
    assert record["artifact"] == "a.tcomp" and record["bytes"] == os.path.getsize("a.tcomp")
    manifest = load("a.tcomp").manifest
    assert [(d.name, d.min, d.max) for d in manifest.dims] == [("batch", 2, 8)]
    assert manifest.threads == 1


def test_compile_with_an_input_fixed(tcomp, models):
    model = models["reshape"]
    np.save("shape.npy", np.array([2, 3]))
    tcomp("compile", model)
    assert [i.name for i in load("reshape.tcomp").inputs] == ["x", "shape"]
    tcomp("run", "reshape.tcomp", "--input", "shape=shape.npy")
    assert "values of input `shape`" in tcomp("run", "reshape.tcomp", "--input", "shape=5", status=2).output
    tcomp("compile", model, "--value", "shape=shape.npy")
    module = load("reshape.tcomp")
    assert [i.name for i in module.inputs] == ["x"]
    np.testing.assert_array_equal(module(np.arange(6, dtype=np.float32)), np.arange(6).reshape(2, 3))
    assert "no input" in tcomp("compile", model, "--value", "size=3", status=2).output


def test_compile_for_a_shape_and_a_target(tcomp, models):
    tcomp("compile", models["mlp"], "--shape", "x=4x8", "--target", "cpu -mcpu=x86-64-v3")
    manifest = load("mlp.tcomp", threads=1).manifest
    assert manifest.inputs[0].shape == (4, 8) and manifest.cpu == "x86-64-v3"
    for multiple in ("n*4,8", "4*n,8"):
        tcomp("compile", models["mlp"], "--shape", f"x={multiple}")
        assert load("mlp.tcomp", threads=1).manifest.inputs[0].shape == ("n * 4", 8)


def test_emit_writes_listings_beside_the_artifact(tcomp, models, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    done = tcomp("compile", models["mlp"], "-o", folder / "m.tcomp", "--emit", "graph,te,loops,llvm,asm")
    texts = {stage: (folder / f"m.{stage}.txt").read_text() for stage in ("graph", "te", "loops", "llvm", "asm")}
    assert len(list(folder.iterdir())) == 6
    for stage, mark in (("graph", "graph net"), ("te", "sum("), ("loops", "for "), ("llvm", "define "), ("asm", ".text")):
        assert mark in texts[stage]
        assert f"wrote {folder / f'm.{stage}.txt'}" in done.stdout


def test_emit_to_stdout_prints_listings_alone(tcomp, models, tmp_path):
    done = tcomp("compile", models["mlp"], "--emit", "graph", "--emit-to", "-")
    assert done.stdout.startswith("graph net") and "wrote" not in done.stdout
    assert "wrote mlp.tcomp" in done.stderr
    record = tcomp.json("compile", models["mlp"], "--emit", "te", "--emit-to", "-")
    assert list(record["stages"]) == ["te"]


# ---------------------------------------------------------------- run


def test_run_with_random_inputs_says_so(tcomp, artifact):
    done = tcomp("run", artifact, "--dim", "batch=3")
    assert "random inputs" in done.stderr and "x;" in done.stderr
    assert "3x5" in done.stdout and "float32" in done.stdout


def test_run_chooses_sizes_nobody_gave_and_says_so(tcomp, artifact):
    assert "sizes chosen: batch=1" in tcomp("run", artifact).stderr


def test_run_on_files_and_save(tcomp, models, artifact):
    x = np.random.default_rng(2).standard_normal((4, 8), np.float32)
    np.save("x.npy", x)
    record = tcomp.json("run", artifact, "--input", "x=x.npy", "--save", "out")
    assert record["saved"] == "out.npz" and record["random_inputs"] == []
    with np.load("out.npz", allow_pickle=False) as saved:
        np.testing.assert_allclose(saved["y"], expected(models, x), rtol=1e-5)
    (y,) = record["outputs"]
    assert y["shape"] == [4, 5] and y["mean"] == pytest.approx(0.2) and len(y["first"]) == 5
    np.savez("all.npz", x=x)
    assert tcomp.json("run", artifact, "--input", "all.npz")["outputs"] == record["outputs"]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_trace_has_the_kernels_of_each_thread(tcomp, tmp_path, threads):
    nodes = [("MatMul", ["x", "x"], ["p"]), ("Softmax", ["p"], ["q"]), ("MatMul", ["q", "x"], ["y"])]
    model = save(tmp_path / "m.onnx", nodes, {"x": ("float32", [512, 512])}, {"y": ("float32", [512, 512])})
    record = tcomp.json("run", model, "--trace", "t.json", "--profile", "--threads", threads)
    assert record["trace"] == "t.json"
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert [e["name"] for e in kernels] == [k["name"] for k in record["kernels"]]
    caller = {e["tid"] for e in kernels}
    assert len(caller) == 1 and all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(kernels))
    chunks = [e for e in events if e.get("cat") == "chunk"]
    assert len({e["tid"] for e in chunks} | caller) == threads
    for chunk in chunks:  # lies within its kernel, which waits for it
        assert any(
            k["name"] == chunk["name"] and k["ts"] <= chunk["ts"] and chunk["ts"] + chunk["dur"] <= k["ts"] + k["dur"] + 1e-6
            for k in kernels
        )
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"caller", "worker 1"} - ({"worker 1"} if threads == 1 else set())


HOSTILE = ["allow_pickle", "file", "../../up", "a/b", ".hidden", "\x1b]0;title\x07", "\x9b2J\u202e", "n" * 300]  # names of outputs


@pytest.fixture
def hostile(tmp_path):
    nodes = [("Relu", ["x" if not n else HOSTILE[n - 1]], [name]) for n, name in enumerate(HOSTILE)]
    return save(tmp_path / "hostile.onnx", nodes, {"x": ("float32", [2])}, {name: ("float32", [2]) for name in HOSTILE})


def test_saved_outputs_stay_in_the_folder_of_their_archive(tcomp, hostile):
    tcomp("run", hostile, "--input", "x=2", "--save", "out.npz")
    with np.load("out.npz", allow_pickle=False) as saved:
        arrays = dict(saved)
    assert list(arrays) == ["allow_pickle", "file", "_._.._up", "a_b", "_hidden", "_]0;title_", "_2J_", "n" * 200]
    assert all(a.tolist() == [2, 2] for a in arrays.values())


LINES = ["check", "compile", "compile --emit graph --emit-to -", "run", "run --profile", "explain"]


@pytest.mark.parametrize("form", ["", " --json"])
def test_names_do_not_control_the_terminal(tcomp, hostile, form):
    for line, status in [*((line, 0) for line in LINES), ("run --input z=1", 2)]:
        command, *options = (line + form).split()
        done = tcomp(command, hostile, *options, status=status)
        text = done.stdout + done.stderr
        assert text.replace("\n", "").isprintable(), (line, text)
        if (line, form) == ("run", " --json"):
            assert [out["name"] for out in json.loads(done.stdout)["outputs"]] == HOSTILE


def test_run_fills_inputs_with_numbers(tcomp, models):
    record = tcomp.json("run", models["plain"], "--input", "p=1.5", "--input", "q=-1")
    total, power = record["outputs"]
    assert total["min"] == total["max"] == 0.5
    assert power["mean"] == pytest.approx(np.exp(0.5), rel=1e-6)


def test_run_is_repeatable_by_its_seed(tcomp, artifact):
    first, same, other = (tcomp.json("run", artifact, "--seed", seed)["outputs"] for seed in (1, 1, 2))
    assert first == same != other


def test_run_reports_what_is_not_finite(tcomp, models):
    record = tcomp.json("run", models["plain"], "--input", "p=100", "--input", "q=1")
    assert record["outputs"][1]["nonfinite"] == 6 and record["outputs"][1]["first"][0] == "inf"
    assert "6 not finite" in tcomp("run", models["plain"], "--input", "p=100", "--input", "q=1").stdout


def test_profile_names_every_kernel(tcomp, artifact):
    record = tcomp.json("run", artifact, "--profile", "--dim", "batch=64")
    assert [k["name"] for k in record["kernels"]] == load(artifact).artifact.notes["kernels"]
    assert all(k["seconds"] > 0 and 0 < k["bound"] and k["light"] == k["bound"] / k["seconds"] for k in record["kernels"])
    least = 4 * (64 * 8 + 8 * 5 + 5 + 64 * 5)  # weights are packed, and may be padded up to a vector
    assert record["kernels"][0]["flops"] == 64 * 5 * (2 * 8 + 2) and least <= record["kernels"][0]["bytes"] <= least + 4 * 8 * 11
    assert "not fused" in record["kernels"][0]["not_fused"][0]
    text = tcomp("run", artifact, "--profile").stdout
    assert "2 kernels" in text and text.count("%") == 4 and "of bound" in text


def test_module_profile_adds_up_to_the_run(artifact):
    module = load(artifact, threads=1)
    x = np.ones((64, 8), np.float32)
    start = time.perf_counter()
    found = module.profile({"x": x}, runs=20)
    assert 0 < sum(s for _, s in found) <= (time.perf_counter() - start) / 20
    assert [name for name, _ in load(artifact, threads=2).profile({"x": x}, runs=1)] == [name for name, _ in found]
    with pytest.raises(package.TcompError, match="at least 1"):
        module.profile({"x": x}, runs=0)
    vars(module)["_code"].run_profiled = None
    with pytest.raises(package.TcompError, match="cannot be profiled"):
        module.profile({"x": x})


# ---------------------------------------------------------------- bench


def test_bench_of_an_artifact(tcomp, artifact):
    (line,) = tcomp.json("bench", artifact, "--seconds", "0.02", "--threads", "1")["results"]
    assert line["contender"] == "tcomp" and line["threads"] == 1 and line["ratio"] == 1 and line["runs"] >= 15
    assert 0 < line["min_seconds"] <= line["median_seconds"]


def test_bench_against_onnxruntime(tcomp, models):
    pytest.importorskip("onnxruntime")
    arguments = ("bench", models["mlp"], "--dim", "batch=4", "--against", "onnxruntime", "--threads", "1,2", "--seconds", "0.02")
    record = tcomp.json(*arguments)
    assert [(r["contender"], r["threads"]) for r in record["results"]] == [(c, n) for n in (1, 2) for c in ("tcomp", "onnxruntime")]
    assert all(r["difference"] < 1e-5 for r in record["results"]) and record["failed"] == {}
    text = tcomp(*arguments).stdout
    assert "ratio" in text and text.count("onnxruntime") == 2


# ---------------------------------------------------------------- check, explain


def test_check_of_a_supported_model(tcomp, models):
    record = tcomp.json("check", models["mlp"])
    assert record["ok"] and record["counts"] == {"supported": 4} and record["missing"] == []
    assert record["nodes"][0] == {
        "name": "h", "op": "MatMul", "opset": 17, "dtypes": ["float32", "float32"], "status": "supported", "reason": ""
    }  # fmt: skip
    assert "can be compiled" in tcomp("check", models["mlp"]).stdout


def test_check_lists_what_is_missing(tcomp, models):
    text = tcomp("check", models["missing"], status=1).stdout
    assert "Frobnicate" in text and "unchecked" in text and "cannot be compiled" in text
    record = tcomp.json("check", models["missing"], status=1)
    assert [n["name"] for n in record["missing"]] == ["nz"] and record["missing"][0]["reason"]
    assert record["counts"] == {"supported": 1, "missing": 1, "unchecked": 1}


def test_check_runs_what_compile_would(tcomp, tmp_path):
    path = save(tmp_path / "nz.onnx", [("NonZero", ["x"], ["y"])], {"x": ("float32", [5])}, {"y": ("int64", [1, "n"])})
    assert tcomp.json("check", path)["ok"]
    record = tcomp.json("check", path, "--target", "cuda", "--arch", "sm_80", status=1)
    assert not record["ok"] and record["counts"] == {"supported": 1} and "that a run counts" in record["missing"][0]["reason"]
    text = tcomp("check", path, "--target", "cuda", "--arch", "sm_80", status=1).stdout
    assert "compile for a CPU" in text and "cannot be compiled" in text


def test_check_shows_decomposition_of_functions(tcomp, models):
    statuses = {n["op"]: n["status"] for n in tcomp.json("check", models["gather"])["nodes"]}
    assert statuses["Gather"] == "supported" and statuses["HardSwish"] in ("supported", "decomposed")


def test_explain(tcomp, models):
    record = tcomp.json("explain", models["mlp"])
    operators = [op for k in record["kernels"] for op in k["operators"]]
    assert operators == ["matmul", "add", "relu", "softmax"]
    assert any("softmax" in line for line in record["not_fused"])
    assert [p["name"] for p in record["passes"]].count("partition") == 1
    text = tcomp("explain", models["mlp"]).stdout
    assert "matmul + add + relu" in text and "edges not fused" in text and "s.collapse(" not in text
    steps = [k["schedule"] for k in record["kernels"]]
    assert all(s[0] == "s.collapse(apart=128)" and s[-1] == "s.clean()" for s in steps)
    lines = tcomp("explain", models["mlp"], "--schedules").stdout.splitlines()
    assert "schedule of r" in lines and [line.strip() for line in lines].count("s.clean()") == len(steps)


# ---------------------------------------------------------------- doctor, demo


def test_doctor(tcomp, cache):
    record = tcomp.json("doctor")
    assert record["self_test"]["ok"]
    assert record["cache"]["folder"] == str(cache) and record["cache"]["writable"] == "yes"
    assert record["targets"]["cuda"].startswith(
        "usable: NVRTC" if importlib.util.find_spec("cuda") else "not usable: NVRTC is not installed"
    )
    assert all(record["software"][name][0].isdigit() for name in ("islpy", "xgboost"))
    text = tcomp("doctor").stdout
    assert "self-test: ok" in text and all(" ".join(part.split()) in " ".join(text.split()) for part in record["optional_parts"].values())


def test_doctor_reports_a_failed_self_test(tcomp, monkeypatch):
    def broken(*arguments):
        raise package.TcompError("the linker is gone")

    monkeypatch.setattr("tcomp.functions.build", broken)
    assert "self-test: FAILED (the linker is gone)" in tcomp("doctor", status=1).stdout


def test_demo(tcomp):
    record = tcomp.json("demo", "--model", "squeezenet", "--seconds", "0.05", "--threads", 1)
    assert record["ok"] and record["model"] == "squeezenet" and record["latency"]["tcomp"]["min_seconds"] > 0
    assert record["process"]["peak_bytes"] > record["process"]["import_peak_bytes"] > 0


def test_the_demo_reads_a_picture(tcomp, tmp_path):
    if absent := demo_networks.missing_for_text():
        pytest.skip(f"not installed: {', '.join(absent)}")
    picture = tmp_path / "text.png"
    # The network sees a space at the margin of this one.
    record = tcomp.json("demo", "--text", "Shipping 2026", "--picture", picture, "--seconds", "0.05")
    assert record["ok"] and record["read"] == "Shipping 2026" and record["confidence"] > 0.8
    assert picture.read_bytes().startswith(b"\x89PNG")
    for text, message in (("", "1 to 40 characters"), ("a  b", "single spaces"), ("\u0e04", "knows no")):
        assert message in tcomp("demo", "--model", "text", "--text", text, status=2).output


def test_the_demo_without_its_extra(tcomp, monkeypatch):
    monkeypatch.setattr(demo_networks, "missing_for_text", lambda: ["pillow"])
    assert "pip install 'tcomp[demo]'" in tcomp("demo", "--model", "text", status=2).output
    assert "tcomp[demo]" in tcomp("demo", "--text", "x", status=2).output


# ---------------------------------------------------------------- as a program


def test_as_a_program(models, tmp_path, cache):
    environment = {**os.environ, "PYTHONPATH": str(root())}

    def call(*arguments):
        command = [sys.executable, "-m", "tcomp", *map(str, arguments)]
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment)

    done = call("compile", models["mlp"], "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["kernels"] == 2 and done.stderr == ""
    wrong = call("run", "mlp.tcomp", "--input", "z=1")
    assert wrong.returncode == 2 and wrong.stdout == "" and "no input `z`" in wrong.stderr and "Traceback" not in wrong.stderr
    assert call("--help").returncode == 0
