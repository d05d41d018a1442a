"""Loops that end before the iterations that store nothing."""

from __future__ import annotations

import pytest

from tcomp.errors import ScheduleError
from tcomp.ir.loops import If, walk
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules import Schedule
from tests.schedules.fuzzing import check

TILES = """
    kernel tiles<n{0..40}>(A: float32[n, 8], y: float32[n]) -> (y) {
      for b in 0..((n + 11) // 12) {
        for p in 0..3 {
          alloc t: float32[4] register
          for z in 0..4 {
            t[z] = 0.0f
          }
          for k in 0..8 {
            for i in 0..4 {
              if i + p * 4 + b * 12 < n {
                t[i] += A[i + p * 4 + b * 12, k]
              }
            }
          }
          for j in 0..4 {
            if j + p * 4 + b * 12 < n {
              y[j + p * 4 + b * 12] = t[j] * 2.0f
            }
          }
        }
      }
    }
"""


@pytest.mark.parametrize("n", [0, 1, 4, 13, 24])
def test_tiles_behind_the_edge_are_not_computed(n: int) -> None:
    run = check(TILES, 's.tighten("p")', n=n)
    assert "for p in 0..min(3, max(0, " in str(run.schedule.kernel)


def test_a_condition_that_always_holds_then_is_dropped() -> None:
    text = """
        kernel first<n{0..9}>(A: float32[9], y: float32[9]) -> (y) {
          for i in 0..9 {
            y[i] = 0.0f
          }
          for j in 0..9 {
            if j < n {
              y[j] = A[j]
            }
          }
        }
    """
    run = check(text, 's.tighten("j")', n=5)
    assert not any(isinstance(s, If) for s in walk(run.schedule.kernel.body))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("for p in 0..3", "unrolled p in 0..3", "serial"),
        ("y[j + p * 4 + b * 12] = t[j] * 2.0f", "y[j + p * 4 + b * 12] = t[j]\n            }\n            if j < 4 {\n              y[0] = 1.0f", "all stores"),
        ("if j + p * 4 + b * 12 < n {", "if b * 12 + j < n + p * 4 {", "all stores"),
        ("t: float32[4] register", "u: float32[1]", "all stores"),
    ],
)  # fmt: skip
def test_refused(old: str, new: str, why: str) -> None:
    text = TILES.replace(old, new)
    if new.startswith("u:"):  # the sums outlive the loop
        text = TILES.replace("alloc t: float32[4] register", "alloc u: float32[1]").replace(
            "for b in", "alloc t: float32[4]\n      for b in"
        )
    with pytest.raises(ScheduleError, match=why):
        Schedule(parse_kernel(text)).tighten("p")
