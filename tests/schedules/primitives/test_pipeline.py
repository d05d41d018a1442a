"""pipeline: copies run ahead of the loop that reads them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tests.schedules.dice import Hypothesis
from tests.schedules.stepwise import accepted, refused, walked
from tests.schedules.together import run_native

STEPS = ("pipeline", "pipeline", "cache_read", "cache_read", "compute_at", "split", "reorder", "partition", "set_kind", "relayout")


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_random_steps_keep_the_meaning(data: st.DataObject) -> None:
    walked(Hypothesis(data.draw), 8, STEPS).replay()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_machine_code_after_random_steps(data: st.DataObject) -> None:
    for failure in run_native([walked(Hypothesis(data.draw), 6, STEPS).case], 1)[0].values():
        raise failure


PRODUCT = """kernel k<n{1..}>(A: int32[6, n], B: int32[n, 10], C: int32[6, 10]) -> (C) {
  for r in 0..6 {
    for c in 0..10 {
      C[r, c] = 0i32
    }
  }
  for k in 0..n {
    for i in 0..6 {
      for j in 0..10 {
        C[i, j] += A[i, k] * B[k, j]
      }
    }
  }
}
"""
TILES = 's.split("k", 4)\ns.cache_read("A", "k.o", "a", "shared")\ns.cache_read("B", "k.o", "b", "shared", layout="(b/2,a,b%2)")\n'


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 4, 9, 23])
def test_two_tiles_run_ahead_together(n: int, stages: int) -> None:
    """Any number of iterations, fewer than stages too."""
    shaped = accepted(PRODUCT, TILES + f's.pipeline("k.o", {stages}, "a", "b")', n=n)
    assert f"alloc a: int32[{stages}, 6, 4] shared" in shaped and f"alloc b: int32[{stages}, 5, 4, 2] shared" in shaped
    assert f"for k.o.p in 0..{stages - 1} {{" in shaped and f"k.o % {stages}" in shaped


def test_the_epilogue_is_the_last_part_of_the_loop() -> None:
    """With known sizes the prologue has no condition, and a partition takes it out of the steady state."""
    known = PRODUCT.replace("<n{1..}>", "").replace("n]", "32]").replace("[n", "[32").replace("0..n", "0..32")
    shaped = accepted(known, TILES + 's.pipeline("k.o", 3, "a", "b")\ns.partition("k.o", 6)\ns.clean()')
    assert "if" not in shaped
    assert "for k.o.p in 0..2 {" in shaped and "for k.o in 0..6 {" in shaped and "for k.o.t in 0..2 {" in shaped
    assert shaped.count("a[(k.o + 2) % 3, ") == 1 and "a[k.o.t, " in shaped.replace("(k.o.t + 6) % 3", "k.o.t")


def test_a_chain_of_buffers_runs_ahead() -> None:
    """A buffer may be filled from another one that runs ahead as well."""
    chained = """kernel k(x: int32[20], y: int32[20]) -> (y) {
      for i in 0..5 {
        alloc a: int32[4]
        alloc b: int32[4]
        for u in 0..4 {
          a[u] = x[i * 4 + u]
        }
        for v in 0..4 {
          b[v] = a[3 - v] * 2i32
        }
        for w in 0..4 {
          y[i * 4 + w] = b[w] + a[w]
        }
      }
    }
    """
    shaped = accepted(chained, 's.pipeline("i", 2, "b", "a")')
    assert "b[(i + 1) % 2, v] = a[(i + 1) % 2, v * -1 + 3] * 2i32" in shaped
    refused(chained, 's.pipeline("i", 2, "b")', "`a`, which `b` is filled from, is written in `i`")


def test_buffers_are_filled_where_they_were() -> None:
    """Copies may start late in an iteration, behind what it computes from other buffers."""
    late = """kernel k(x: int32[20], y: int32[20]) -> (y) {
      for i in 0..5 {
        for u in 0..4 {
          y[i * 4 + u] = x[u] * 3i32
        }
        alloc a: int32[4]
        for v in 0..4 {
          a[v] = x[i * 4 + v]
        }
        for w in 0..4 {
          y[i * 4 + w] += a[3 - w]
        }
      }
    }
    """
    shaped = accepted(late, 's.pipeline("i", 3, "a")')
    assert shaped.index("for i.p in 0..2") < shaped.index("for u in") < shaped.index("a[(i + 2) % 3, v]") < shaped.index("for w in")


STEP = """kernel k(x: int32[20], y: int32[20]) -> (x, y) {
  alloc c: int32[4]
  for i in 0..5 {
    alloc a: int32[4]
    for u in 0..4 {
      a[u] = x[%s]
      %s
    }
    for w in 0..4 {
      %s = a[w]
    }
  }
}
"""
READY = STEP % ("i * 4 + u", "", "y[i * 4 + w]")


@pytest.mark.parametrize(
    ("kernel", "steps", "why"),
    [
        (READY, 's.pipeline("i", 1, "a")', "1 stages: with two, one iteration fills what the next one reads"),
        (READY, 's.pipeline("i", 2)', "it needs the buffers that earlier iterations fill"),
        (READY, 's.pipeline("i", 2, "c")', "`c` is not allocated in the body of `i`"),
        (READY, 's.pipeline("w", 2, "a")', "`a` is not allocated in the body of `w`"),
        (READY, 's.pipeline("i", 2, "z")', "there is no buffer `z`"),
        (READY, 's.set_kind("i", "parallel")\ns.pipeline("i", 2, "a")', "`i` is parallel: its iterations do not follow each other"),
        (STEP % ("i * 4 + u", "", "x[w]"), 's.pipeline("i", 2, "a")', "`x`, which `a` is filled from, is written in `i`"),
        (STEP % ("i * 4 + u", "c[u] = 1i32", "y[w]"), 's.pipeline("i", 2, "a")', "what fills `a` computes `c` too"),
        (STEP % ("i * 4 + u", "c[u] = 1i32", "a[3 - w]"), 's.pipeline("i", 2, "a")', "what fills `a` computes `c` too"),
        (READY.replace("for w in 0..4 {\n      y[i * 4 + w] = a[w]\n    }", "y[i] = a[0]\n    a[0] = 3i32\n    y[i + 1] = a[0]"),
         's.pipeline("i", 2, "a")', "`a` is read in `i` before it is filled"),
        (READY.replace("alloc a: int32[4]", "alloc a: int32[i + 4]"), 's.pipeline("i", 2, "a")', "the shape of `a` depends on `i`"),
        (READY.replace("a[u] = x[i * 4 + u]", "y[u] = 1i32").replace("= a[w]", "= 2i32"), 's.pipeline("i", 2, "a")', "nothing in `i` fills `a`"),
    ],
)  # fmt: skip
def test_refusals(kernel: str, steps: str, why: str) -> None:
    refused(kernel, steps, why)
