"""Guards that only spare what nobody reads: dropped where that is so, and refused where it is not."""

from __future__ import annotations

import pytest

from tcomp.errors import ScheduleError
from tcomp.ir.loops import If, walk
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules import Schedule
from tests.schedules.fuzzing import check

SUMS = """
    kernel sums(A: float32[9, 32], y: float32[3, 20]) -> (y) {
      for r in 0..3 {
        alloc t: float32[2, 16]
        for z in 0..2 {
          for l in 0..16 {
            t[z, l] = 0.0f
          }
        }
        for k in 0..9 {
          for v in 0..2 {
            for i in 0..16 {
              if i + v * 16 < 20 {
                t[v, i] += A[k, i + v * 16]
              }
            }
          }
        }
        for w in 0..2 {
          for j in 0..16 {
            if j + w * 16 < 20 {
              y[r, j + w * 16] = t[w, j]
            }
          }
        }
      }
    }
"""


def guards(text: str) -> int:
    return sum(isinstance(s, If) for s in walk(parse_kernel(text).body))


def test_lanes_that_nobody_looks_at_are_summed_up_as_well() -> None:
    run = check(SUMS, 's.unguard("i")')
    assert guards(str(run.schedule.kernel)) == 1


def test_one_of_several_conditions() -> None:
    text = SUMS.replace("if i + v * 16 < 20 {", "if (i + v * 16 < 20) & (k * 2 < i) {")
    run = check(text, 's.unguard("i")')
    assert "if k * 2 < i {" in str(run.schedule.kernel)


def test_elements_at_one_index() -> None:
    text = """
        kernel sums(A: float32[9, 16], y: float32[10]) -> (y) {
          alloc t: float32[16] register
          for l in 0..16 {
            t[l] = 0.0f
          }
          for k in 0..9 {
            for i in 0..8 {
              for o in 0..2 {
                if i + o * 8 < 10 {
                  t[i + o * 8] += A[k, i + o * 8]
                }
              }
            }
          }
          for j in 0..10 {
            y[j] = t[j]
          }
        }
    """
    assert guards(str(check(text, 's.unguard("o")').schedule.kernel)) == 0


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("A: float32[9, 32]", "A: float32[9, 20]", "keeps places in range"),
        ("if j + w * 16 < 20 {", "if (j + w * 16 < 20) & (t[1, 15] < 1.0f) {", "tested by all that read"),
        ("y[r, j + w * 16] = t[w, j]", "y[r, j + w * 16] = t[1 - w, j]", "tested by all that read"),
        ("if i + v * 16 < 20 {", "if i + v * 16 < 19 {", "tested by all that read"),
        ("if i + v * 16 < 20 {", "if i + v * 16 < 20 + k {", "tested by all that read"),
        ("t[v, i] += A[k, i + v * 16]", "y[v, i] += A[k, i + v * 16]", "not a temporary"),
        ("t[v, i] += A[k, i + v * 16]", "t[v, i] = A[k, i + v * 16]", "not a loop around an accumulation"),
    ],
)  # fmt: skip
def test_refused(old: str, new: str, why: str) -> None:
    assert old in SUMS
    with pytest.raises(ScheduleError, match=why):
        Schedule(parse_kernel(SUMS.replace(old, new))).unguard("i")


def test_a_condition_that_changes_while_the_sums_live() -> None:
    """What is not read in one round is read in another one."""
    text = """
        kernel sums(A: float32[2, 8], y: float32[2, 8]) -> (y) {
          alloc t: float32[8]
          for l in 0..8 {
            t[l] = 0.0f
          }
          for r in 0..2 {
            for i in 0..8 {
              if i < r * 8 {
                t[i] += A[r, i]
              }
            }
            for j in 0..8 {
              if j < r * 8 {
                y[r, j] = t[j]
              }
            }
          }
        }
    """
    with pytest.raises(ScheduleError, match="tested by all that read"):
        Schedule(parse_kernel(text)).unguard("i")
