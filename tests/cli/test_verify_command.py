"""`tcomp verify` agrees with right code, finds the pass or the kernel that is wrong, and proves schedules."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tcomp import pipeline, te, verification
from tcomp.backends.kernel import compile_kernel
from tcomp.backends.workers import Compilation
from tcomp.errors import ArtifactError
from tcomp.frontends.onnx import import_model
from tcomp.options import CompileOptions
from tcomp.runtime import read_artifact
from tcomp.schedules import Schedule


@pytest.mark.parametrize("name", ["mlp", "plain", "gather", "scan"])
def test_right_code(tcomp, models, name):
    record = tcomp.json("verify", models[name], "--full")
    assert record["ok"] and record["repeatable"]
    assert record["passes"][-1]["name"] == "layout" and record["kernels"]
    assert all(c["error"] <= c["tolerance"] for c in record["outputs"])


def test_symbolic_sizes(tcomp, models):
    assert tcomp.json("verify", models["mlp"])["dims"] == {"batch": 3}
    assert tcomp.json("verify", models["mlp"], "--dim", "batch=17")["dims"] == {}
    assert "agrees" in tcomp("verify", models["mlp"], "--shape", "x=9x8").stdout


def test_a_tolerance_nothing_meets(tcomp, models):
    record = tcomp.json("verify", models["mlp"], "--dim", "batch=64", "--tolerance", "0", status=1)
    assert not record["ok"] and record["outputs"][0]["error"] > 0


def test_the_first_wrong_pass_is_named(tcomp, models, monkeypatch):
    original = pipeline.graph_passes

    def with_a_wrong_one(*arguments, **options):
        passes = original(*arguments, **options)
        place = [name for name, _ in passes].index("partition")
        return [*passes[:place], ("double-weights", double), *passes[place:]]

    def double(graph):
        return replace(graph, constants={v: a * np.float32(2 if v.name == "w" else 1) for v, a in graph.constants.items()})

    monkeypatch.setattr(pipeline, "graph_passes", with_a_wrong_one)
    monkeypatch.setattr(verification, "graph_passes", with_a_wrong_one)
    record = tcomp.json("verify", models["mlp"], status=1)
    assert [p["name"] for p in record["passes"] if not p["ok"]] == ["double-weights"] == [record["passes"][-1]["name"]]
    assert record["passes"][-1]["node"] == "h" and "double-weights" in record["verdict"] and record["kernels"] == []


@pytest.mark.parametrize(("name", "right", "wrong", "culprit"), [
    ("mlp", "softmax(", "log_softmax(", "softmax"),
    ("mlp", "relu(", "neg(", "relu"),
    ("scan", "tanh(", "sin(", "loop"),
])  # fmt: skip
def test_the_first_wrong_kernel_is_named(tcomp, models, monkeypatch, name, right, wrong, culprit):
    """A kernel of another operator takes the place of the right one."""
    original = Compilation.finish

    def miscompiling(self, texts, *options):
        compiled = original(self, texts, *options)
        for text, kernel in compiled.items():
            if right in text and wrong not in text:
                compiled[text] = compile_kernel(text.replace(right, wrong), kernel.symbol, self.backend)
        return compiled

    monkeypatch.setattr(Compilation, "finish", miscompiling)
    record = tcomp.json("verify", models[name], status=1)
    assert all(p["ok"] for p in record["passes"])
    assert [k["ok"] for k in record["kernels"]] == [True] * (len(record["kernels"]) - 1) + [False]
    worst = record["kernels"][-1]
    assert culprit in (worst["name"], *worst["operators"]) and worst["name"] in record["verdict"]
    assert "DIFFERS" in tcomp("verify", models[name], status=1).stdout


def test_a_fault_between_the_kernels(models, monkeypatch):
    """All kernels are right alone: what puts them together is to blame."""
    graph = import_model(models["mlp"])
    original = pipeline.compile_graph

    def misplaced(graph, *arguments, **options):
        constants = {v: a[::-1].copy() if v.name == "w" else a for v, a in graph.constants.items()}
        return original(replace(graph, constants=constants), *arguments, **options)

    monkeypatch.setattr(verification, "compile_graph", misplaced)
    found = verification.verify(graph, {"x": np.arange(24, dtype=np.float32).reshape(3, 8)}, CompileOptions())
    assert not found.ok and "memory plan" in found.verdict()


def test_products_in_less_than_float32_may_be_further_off():
    near, want = np.array([1.004, 1], np.float32), np.array([1, 1], np.float32)
    allowed = {p: verification.compare("y", near, want, precision=p).ok for p in ("fp32", "tf32", "fp16", "bf16")}
    assert allowed == {"fp32": False, "tf32": True, "fp16": True, "bf16": True}
    assert not verification.compare("y", near.astype(np.int64) + [1, 0], want.astype(np.int64), precision="bf16").ok
    assert not verification.compare("y", near, want, 1e-3, "bf16").ok


def test_compare():
    a = np.array([1.0, np.nan, np.inf, -4.0], np.float32)
    assert verification.compare("a", a, a.copy()).error == 0
    assert verification.compare("a", a + np.array([0.4, 0, 0, 0], np.float32), a).error == pytest.approx(0.1)
    for other in (a[:3], a.astype(np.float64), np.array([1, 0, np.inf, -4], np.float32), np.array([1, np.nan, -np.inf, -4], np.float32)):
        assert verification.compare("a", other, a).error == np.inf
    integers = verification.compare("n", np.array([3]), np.array([4]))
    assert integers.tolerance == 0 and not integers.ok
    assert verification.compare("e", np.zeros((0, 2)), np.zeros((0, 2))).ok


# ---------------------------------------------------------------- --proofs


def test_schedules_of_a_model_and_of_its_artifact_are_proved(tcomp, models, artifact):
    found = tcomp.json("verify", models["mlp"], "--proofs", "--dim", "batch=1..64")
    again = tcomp.json("verify", artifact, "--proofs")
    assert found["ok"] and again["ok"] and "proved" in found["verdict"]
    for record in (found, again):
        assert [k["nodes"] for k in record["kernels"]] == [["r"], ["r"], ["y"]]  # of one there is code for a batch of 1, too
        assert all(k["ok"] and k["proved"] == k["steps"] > 0 and k["refused"] is None and k["seconds"] > 0 for k in record["kernels"])
    assert found["kernels"][0]["questions"] > 0 and [k["steps"] for k in found["kernels"]] == [k["steps"] for k in again["kernels"]]
    assert "3 kernels proved" in tcomp("verify", artifact, "--proofs").stdout


def test_a_model_with_control_flow_is_proved(tcomp, models):
    assert tcomp.json("verify", models["scan"], "--proofs")["ok"]


def saved(path, change=lambda steps: None):
    """A schedule of a row sum, its steps changed, in a file."""
    a, k = te.placeholder((8, 8), name="A"), te.reduce_axis(8, "k")
    s = Schedule(te.compute((8,), lambda i: te.sum(a[i, k], k), name="B"))
    s.split("B.i", 4)
    s.parallel("B.i.o")
    record = json.loads(s.to_json())
    change(record["steps"])
    path.write_text(json.dumps(record))
    return path


def test_a_saved_schedule_is_proved(tcomp, tmp_path):
    record = tcomp.json("verify", saved(tmp_path / "s.json"), "--proofs")
    assert record["ok"] and record["kernels"][0]["nodes"] == ["B"] and record["kernels"][0]["steps"] == 2
    assert "2 steps of 1 kernel proved" in tcomp("verify", tmp_path / "s.json", "--proofs").stdout


def test_a_step_that_changes_the_result_is_refused(tcomp, tmp_path):
    def race(steps):
        steps[1][1][0] = "B.k"

    record = tcomp.json("verify", saved(tmp_path / "s.json", race), "--proofs", status=2)
    (kernel,) = record["kernels"]
    assert not record["ok"] and not kernel["ok"] and (kernel["proved"], kernel["steps"]) == (1, 2)
    for part in ("step 2", "may touch the same element of `B`", "at B.k=0", "at B.k=1"):
        assert part in kernel["refused"]
    text = tcomp("verify", tmp_path / "s.json", "--proofs", status=2).stdout
    assert "REFUSED" in text and "1 kernel refused" in text and "B.k=1" in text


def test_artifacts_whose_schedules_are_missing_or_malformed(artifact):
    whole = read_artifact(artifact)

    class Changed:
        where = "m.tcomp"

        def __init__(self, notes):
            self.notes = notes

    assert len(verification.saved_schedules(Changed(whole.notes))) == 3
    for schedules in (None, {}, [3], [{}], [{"kernels": 3}]):
        with pytest.raises(ArtifactError, match="does not carry its schedules"):
            verification.saved_schedules(Changed({"schedules": schedules}))
    for schedule in (None, {}, {"version": 1, "steps": []}, {"version": 1, "steps": [], "kernel": "kernel"}):
        with pytest.raises(ArtifactError, match="a schedule in the artifact is malformed(.|\n)*m.tcomp, kernel r"):
            verification.saved_schedules(Changed({"schedules": [{"kernels": ["r"], "schedule": schedule}]}))
