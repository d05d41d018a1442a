"""`tcomp verify` agrees with right code, and finds the pass or the kernel that is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from tcomp import driver, verification
from tcomp.frontends.onnx import import_model
from tcomp.kernels import compile_kernel
from tcomp.target import Target


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
    original = driver.graph_passes

    def with_a_wrong_one(target, report):
        passes = original(target, report)
        place = [name for name, _ in passes].index("partition")
        return [*passes[:place], ("double-weights", double), *passes[place:]]

    def double(graph):
        return replace(graph, constants={v: a * np.float32(2 if v.name == "w" else 1) for v, a in graph.constants.items()})

    monkeypatch.setattr(driver, "graph_passes", with_a_wrong_one)
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
    original = driver.compile_kernels

    def miscompiling(texts, target, on_progress=lambda done, total: None):
        compiled = original(texts, target, on_progress)
        for text, kernel in compiled.items():
            if right in text and wrong not in text:
                compiled[text] = compile_kernel(text.replace(right, wrong), kernel.symbol, target)
        return compiled

    monkeypatch.setattr(driver, "compile_kernels", miscompiling)
    monkeypatch.setattr(verification, "compile_kernels", miscompiling)
    record = tcomp.json("verify", models[name], status=1)
    assert all(p["ok"] for p in record["passes"])
    assert [k["ok"] for k in record["kernels"]] == [True] * (len(record["kernels"]) - 1) + [False]
    worst = record["kernels"][-1]
    assert culprit in (worst["name"], *worst["operators"]) and worst["name"] in record["verdict"]
    assert "DIFFERS" in tcomp("verify", models[name], status=1).stdout


def test_a_fault_between_the_kernels(models, monkeypatch):
    """All kernels are right alone: what puts them together is to blame."""
    graph = import_model(models["mlp"])
    original = verification.compile_graph

    def misplaced(graph, *arguments, **options):
        constants = {v: a[::-1].copy() if v.name == "w" else a for v, a in graph.constants.items()}
        return original(replace(graph, constants=constants), *arguments, **options)

    monkeypatch.setattr(verification, "compile_graph", misplaced)
    found = verification.verify(graph, Target.parse("cpu"), {"x": np.arange(24, dtype=np.float32).reshape(3, 8)})
    assert not found.ok and "memory plan" in found.verdict()


def test_compare():
    a = np.array([1.0, np.nan, np.inf, -4.0], np.float32)
    assert verification.compare("a", a, a.copy()).error == 0
    assert verification.compare("a", a + np.float32([0.4, 0, 0, 0]), a).error == pytest.approx(0.1)
    for other in (a[:3], a.astype(np.float64), np.array([1, 0, np.inf, -4], np.float32), np.array([1, np.nan, -np.inf, -4], np.float32)):
        assert verification.compare("a", other, a).error == np.inf
    integers = verification.compare("n", np.array([3]), np.array([4]))
    assert integers.tolerance == 0 and not integers.ok
    assert verification.compare("e", np.zeros((0, 2)), np.zeros((0, 2))).ok
