"""Promotion to registers: the same sums, kept in a local buffer while a loop runs; and what is refused."""

from __future__ import annotations

import pytest

from tcomp.errors import ScheduleError
from tcomp.ir.loops import Accumulate, Allocate, walk
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules import Schedule
from tcomp.schedules.analysis.legality import Witness
from tests.schedules.fuzzing import check

IN_PLACE = """
    kernel update(A: float32[24, 24]) -> (A) {
      for k in 0..8 {
        for i in 0..3 {
          for j in 0..4 {
            A[i + 12, j + 16] += A[i + 12, k] * A[k, j + 16]
          }
        }
      }
    }
"""


def test_a_product_in_place_is_summed_in_registers() -> None:
    run = check(IN_PLACE, 's.promote("k", "A", "acc")')
    local = next(s.buffer for s in walk(run.schedule.kernel.body) if isinstance(s, Allocate))
    assert (local.name, local.shape, local.scope) == ("acc", (3, 4), "register")
    assert [s.buffer for s in walk(run.schedule.kernel.body) if isinstance(s, Accumulate)] == [local]


def test_sums_in_blocks_start_from_nothing() -> None:
    run = check(IN_PLACE, """
        s.split("k", 4)
        s.promote("k.i", "A", "acc", anew=True)
    """)  # fmt: skip
    text = str(run.schedule.kernel)
    assert "acc[acc.0, acc.1] = 0.0f" in text and "A[A.0 + 12, A.1 + 16] += acc[A.0, A.1]" in text


def test_copies_have_the_kinds_of_the_loops() -> None:
    steps = """
        s.split("j", 4)
        s.set_kind("j.i", "vectorized")
        s.set_kind("i", "unrolled")
        s.promote("k", "A", "acc")
    """
    text = str(check(IN_PLACE, steps).schedule.kernel)
    assert text.count("unrolled") == text.count("vectorized") == 3


def test_guards_stand_around_the_copies_as_well() -> None:
    check(
        """
        kernel rows<n{1..1000}>(A: float32[n, 8], x: float32[8]) -> (A) {
          for i in 0..n {
            for k in 0..5 {
              for j in 0..4 {
                if i + j < n {
                  A[i + j, 7] += x[k]
                }
              }
            }
          }
        }
        """,
        's.promote("k", "A", "acc")',
        n=6,
    )


REFUSED = [
    ("k", "it reads what it writes", "A[i + 12, j + 16] += A[i + 12, k + 10] * A[k, j]", "uses of what `k` accumulates into"),
    ("k", "two iterations of a loop inside meet", "A[12, j + i] += A[i, k]", "uses of what `k` accumulates into"),
    ("k", "other elements in each iteration", "A[i + 12, k] += A[i, j]", "accumulate into different elements"),
    ("k", "a store", "A[i, j] = 1.0f", "no statements in `k` accumulate into `A`"),
    ("j", "the wrong loop", "A[i + 12, j + 16] += A[i, k]", "accumulate into different elements"),
    ("k", "data tell where", "A[i + 12, int64(A[0, 0])] += A[i, k]", "depends on data"),
]


@pytest.mark.parametrize(("loop", "what", "statement", "why"), REFUSED, ids=[r[1] for r in REFUSED])
def test_refusals(loop: str, what: str, statement: str, why: str) -> None:
    kernel = parse_kernel(IN_PLACE.replace("A[i + 12, j + 16] += A[i + 12, k] * A[k, j + 16]", statement))
    s = Schedule(kernel)
    with pytest.raises(ScheduleError) as caught:
        s.promote(loop, "A", "acc")
    assert why in str(caught.value)
    assert s.kernel is kernel


def test_a_witness_is_shown() -> None:
    kernel = parse_kernel(IN_PLACE.replace("A[i + 12, k] * A[k, j + 16]", "A[i + 12, k + 10] * A[k, j]"))
    with pytest.raises(ScheduleError) as caught:
        Schedule(kernel).promote("k", "A", "acc")
    assert isinstance(caught.value.witness, Witness) and caught.value.witness.exact


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("for k in 0..8", "for k in 0..n"), "may have no iteration"),
        (("for k in 0..8", "parallel k in 0..8"), "is parallel"),
        (("for j in 0..4", "for j in 0..n"), "registers are for loops of constant extent"),
    ],
)
def test_refused_loops(change: tuple[str, str], why: str) -> None:
    text = IN_PLACE.replace("kernel update(A", "kernel update<n{0..4}>(A").replace(*change)
    with pytest.raises(ScheduleError, match=why):
        Schedule(parse_kernel(text)).promote("k", "A", "acc")
