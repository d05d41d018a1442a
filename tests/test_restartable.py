"""Long runs of benchmarks go on where they were ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.restartable import results_of, run_missing

SCRIPT = """
import json, os, sys, time
kind = sys.argv[2]
if kind == "crash": os._exit(3)
if kind == "slow": time.sleep(60)
print("chatter")
print(json.dumps({"outcome": "right", "given": sys.argv[3:]}) if kind != "silent" else "no object")
"""


def test_cases_that_are_missing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cases_of_a_test.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out.jsonl"
    out.write_text('{"kind": "done", "outcome": "right"}\n{"kind": "cut')
    assert [r["kind"] for r in results_of(out)] == ["done"]
    kinds = [["done"], ["fine"], ["crash"], ["silent"]]
    found = {r["kind"]: r for r in run_missing(out, "cases_of_a_test", kinds, ["kind"], ["--more"])}
    found |= {r["kind"]: r for r in run_missing(out, "cases_of_a_test", [["slow"]], ["kind"], timeout=0.5)}
    assert {kind: r["outcome"] for kind, r in found.items()} == {
        "fine": "right", "crash": "exit code 3", "silent": "no result", "slow": "timeout",
    }  # fmt: skip
    assert found["fine"]["given"] == ["--more"]
    assert not list(run_missing(out, "cases_of_a_test", kinds, ["kind"]))
    assert len(results_of(out)) == 5
