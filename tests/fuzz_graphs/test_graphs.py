"""Some random graphs in the default run: right, and compiled wherever ONNX Runtime accepts them."""

from __future__ import annotations

import pytest

from tests.fuzz_graphs.judge import FINDINGS, batch

SEED, COUNT, PARTS = 2026, 500, 20


@pytest.mark.parametrize("part", range(PARTS))
def test_random_graphs(part: int) -> None:
    count = COUNT // PARTS
    outcomes, _, found = batch(SEED, part * count, count)
    assert outcomes["right"] > count // 2
    assert not [(number, outcome, detail) for number, outcome, detail in found if outcome in FINDINGS]
