"""Ten thousand cases of the fuzzers of all readers; `python -m tests.fuzz` runs a million."""

from __future__ import annotations

import pytest

from tests.fuzz.runner import Tally, run_here
from tests.fuzz.targets import TARGETS

CASES = {"manifest": 2500, "notes": 500, "host-steps": 1500, "pattern": 200, "plan": 2000, "artifact": 2000, "expression": 800, "layout": 300, "program": 300, "kernel": 300, "te": 150,
         "graph": 350, "onnx": 800, "external": 800, "database": 400, "gguf": 400, "config": 300, "texts": 600}  # fmt: skip


@pytest.mark.parametrize("target", CASES)
def test_readers_refuse_what_is_damaged(target: str) -> None:
    tally = Tally()
    run_here(target, 0, range(CASES[target]), tally)
    assert not tally.findings, [f"python -m tests.fuzz --target {target} --show {n}\n{text}" for n, text in tally.findings.values()]
    assert tally.accepted and tally.refused  # some damage does no harm, and is read to its end


def test_every_reader_is_fuzzed() -> None:
    assert set(TARGETS) - set(CASES) == {"operators"}  # takes 10 seconds to start
