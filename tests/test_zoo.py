"""The report of the zoo, and its table of networks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.timing import rank_correlation
from benchmarks.zoo.networks import networks
from benchmarks.zoo.report import page, ratios

RESULTS: list[dict[str, Any]] = [
    {
        "name": "a", "batch": "1", "threads": "1", "structure": "text", "outcome": "right", "compile_s": 2.0,
        "wall_ms": {"tcomp": 1.0, "onnxruntime": 2.0, "openvino": 0.5}, "own_ms": {"tcomp": 1.0, "onnxruntime": 4.0},
        "kernels": [["k", 1.0, 2.0], ["l", 3.0, 3.0], ["m", 5.0, 9.0]],
    },
    {"name": "b", "batch": "1", "threads": "1", "structure": "text", "outcome": "wrong", "difference": 0.5},
]  # fmt: skip


def test_ratios_are_over_the_first_and_over_the_fastest_peer() -> None:
    assert ratios(RESULTS[0], "wall") == (0.5, 2.0) and ratios(RESULTS[0], "own") == (0.25, 0.25)


def test_the_page_shows_what_is_wrong_and_what_is_slow() -> None:
    text = page(RESULTS)
    assert "1 of 2 results are right" in text and "<td>wrong</td>" in text and "rank correlation 1.000" in text


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [2, 4, 8, 16]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 3], [5, 5, 6, 7]) == pytest.approx(1)


def test_there_are_many_networks_of_many_structures() -> None:
    found = networks()
    assert len(found) >= 120 and len({n.structure for n in found.values()}) >= 15
