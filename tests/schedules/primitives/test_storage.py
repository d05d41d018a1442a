"""cache_read, cache_write, relayout, set_scope: copies and their layouts, that they keep the meaning, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir.layout import Layout
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.trace import Trace
from tests.schedules.dice import Hypothesis
from tests.schedules.stepwise import accepted, refused, walked
from tests.schedules.together import run_native

COPIES = ("cache_read", "cache_read", "cache_write", "relayout", "relayout", "set_scope")
SHAPES = ("split", "reorder", "fuse", "partition", "set_kind", "compute_at")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_random_steps_keep_the_meaning(data: st.DataObject) -> None:
    walked(Hypothesis(data.draw), 7, COPIES + SHAPES).replay()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_machine_code_after_random_steps(data: st.DataObject) -> None:
    for failure in run_native([walked(Hypothesis(data.draw), 5, COPIES + SHAPES).case], 1)[0].values():
        raise failure


PRODUCT = """kernel k<n{1..}>(A: int32[6, n], B: int32[n, 10], C: int32[6, 10]) -> (C) {
  for r in 0..6 {
    for c in 0..10 {
      C[r, c] = 0i32
    }
  }
  for i in 0..6 {
    for j in 0..10 {
      for k in 0..n {
        C[i, j] += A[i, k] * B[k, j]
      }
    }
  }
}
"""


@pytest.mark.parametrize("n", [1, 7])
def test_panels_are_packed_by_a_layout(n: int) -> None:
    """[N / 4][K][4]: the last panel is padded, and the padding is not read from the source."""
    shaped = accepted(PRODUCT, 's.cache_read("B", None, "P", layout="(b/4,a,b%4)")', n=n)
    assert "alloc P: int32[3, n, 4]" in shaped
    assert "if P.0 * 4 + P.2 < 10 {\n        P[P.0, P.1, P.2] = B[P.1, P.0 * 4 + P.2]" in shaped
    assert "A[i, k] * P[j // 4, k, j % 4]" in shaped


def test_panels_inside_of_the_loop_that_reads_them() -> None:
    steps = 's.split("j", 4)\ns.reorder("j.o", "i", "k", "j.i")\ns.cache_read("B", "j.o", "P", layout="(b/2,a,b%2)")'
    shaped = accepted(PRODUCT, steps, n=5)
    assert "alloc P: int32[2, n, 2]" in shaped and "P[j.i // 2, k, j.i % 2]" in shaped


def test_a_pitch_leaves_elements_free_behind_each_row() -> None:
    shaped = accepted(PRODUCT, 's.cache_read("A", None, "P", layout="(a,b+0+1)")\ns.cache_write("C", "W", layout="(a,b%16)")', n=8)
    assert "alloc P: int32[6, n + 1]" in shaped and "alloc W: int32[6, 16]" in shaped


def test_layouts_compose() -> None:
    steps = 's.cache_read("B", None, "P")\ns.relayout("P", "(b,a)")\ns.relayout("P", "(b/4,a/2,b%4,a%2)")\ns.relayout("P", "(d,a,b,c)")'
    shaped = accepted(PRODUCT, steps, n=6)
    assert "alloc P: int32[2, (n + 3) // 4, 5, 4]" in shaped


def test_layouts_are_text_in_traces() -> None:
    source = parse_kernel(PRODUCT)
    s = Schedule(source)
    s.cache_read("B", None, "P", layout=Layout.blocked([1, 0], 1, 4))
    s.relayout("P", Layout.permuted([2, 1, 0]))
    assert str(s.trace) == 's.cache_read("B", None, "P", layout="(b/4,a,b%4)")\ns.relayout("P", "(c,b,a)")'
    assert str(Schedule(source).replay(Trace.from_json(s.trace.to_json()))) == str(s.kernel)


def test_accumulators_in_a_layout_of_their_own() -> None:
    steps = (
        's.cache_write("C", "acc", layout="(b,a)")\ns.split("C.1", 5)\ns.reorder("C.1.o", "C.0", "C.1.i")\n'
        's.compute_at("acc", "C.1.o", "register")'
    )
    shaped = accepted(PRODUCT, steps, n=4)
    assert "alloc acc: int32[5, 6] register" in shaped and "C[C.0, C.1.i + C.1.o * 5] = acc[C.1.i, C.0]" in shaped


NESTED = """kernel k(x: int32[3, 4], y: int32[3, 4]) -> (y) {
  for r in 0..3 {
    alloc t: int32[4]
    for i in 0..4 {
      t[i] = x[r, i] * 2i32
    }
    for j in 0..4 {
      y[r, j] = t[3 - j]
    }
  }
}
"""


def test_temporaries_inside_of_loops_are_copied_there() -> None:
    shaped = accepted(NESTED, 's.cache_write("t", "u")\ns.cache_read("t", "j", "v")\ns.relayout("u", "(a/2,a%2)")')
    assert "  alloc u: int32[2, 2]\n" in shaped and "alloc v: int32[1]" in shaped


INPLACE = """kernel k(x: int32[6], y: int32[6]) -> (x, y) {
  %s
  for j in 0..6 {
    y[j] = x[j] + %s
  }
}
"""
ROWS = """kernel k(x: int32[4], y: int32[4, 4]) -> (y) {
  alloc t: int32[4]
  parallel p in 0..4 {
    t[p] = x[p]
    for q in 0..4 {
      y[p, q] = %s
    }
  }
}
"""
LONG = 's.cache_read("A", None, "P", layout="%s")'


@pytest.mark.parametrize(
    ("kernel", "steps", "why"),
    [
        (INPLACE % ("for i in 0..6 {\n    x[i] += 1i32\n  }", "1i32"), 's.cache_write("x", "t")', "`x` may keep some of what it holds before"),
        (INPLACE % ("for i in 0..3 {\n    x[i * 2] = 1i32\n  }", "1i32"), 's.cache_write("x", "t")', "`x` may keep some of what it holds"),
        (INPLACE % ("for i in 0..6 {\n    if 1i32 < y[0] {\n      x[i] = 1i32\n    }\n  }", "1i32"),
         's.cache_write("x", "t")', "`x` may keep some of what it holds"),
        (INPLACE % ("for i in 0..6 {\n    x[i] = x[5 - i]\n  }", "1i32"), 's.cache_write("x", "t")', "`x` may keep some of what it holds"),
        (INPLACE % ("", "1i32"), 's.cache_write("x", "t")', "nothing computes `x`"),
        (INPLACE % ("for i in 0..6 {\n    x[i] = 1i32\n  }", "1i32"), 's.cache_write("x", "t", layout="(a%4)")',
         "the layout (a%4) does not give each of the 6 elements along `a` one place"),
        (INPLACE % ("", "y[5 - j]"), 's.cache_read("y", "j", "t")', "`y` is written where the copy would be read"),
        (INPLACE % ("for i in 0..6 {\n    x[i] = 1i32\n  }", "1i32"), 's.cache_read("x", None, "t")', "`x` is written where the copy would be read"),
        (PRODUCT, 's.cache_read("B", "r", "t")', "`B` is not read there"),
        (PRODUCT, 's.cache_read("B", "j", "t", "register")', "cannot live in registers"),
        (PRODUCT, 's.set_kind("j", "thread.x")\ns.cache_read("B", "j", "t", "shared")', "shared memory cannot be filled inside the thread.x loop `j`"),
        (PRODUCT, LONG % "(a,c)", "`(a,c)` is not a layout of 2 dimensions: `c` is not an axis of 2 dimensions"),
        (PRODUCT, LONG % "(a,b", "`(a,b` is not a layout of 2 dimensions"),
        (PRODUCT, LONG % "(a,b//2)", "is not a layout of 2 dimensions"),
        (PRODUCT, LONG % "(b)", "does not give each of the 6 elements along `a` one place"),
        (PRODUCT, LONG % "(a,b,b%4)", "does not give each of the n elements along `b` one place"),
        (PRODUCT, LONG % "(a,b%64)", "does not give each of the n elements along `b` one place"),
        (PRODUCT, LONG % "(a/4+1+1,b,a%4)", "does not give each of the 6 elements along `a` one place"),
        (PRODUCT, 's.relayout("A", "(b,a)")', "`A` is a parameter; its layout is part of the kernel's signature"),
        (PRODUCT, 's.set_scope("C", "register")', "`C` is a parameter, it is in global memory"),
        (PRODUCT, 's.cache_read("B", None, "t")\ns.set_scope("t", "cupboard")', "unknown scope `cupboard`"),
        (NESTED, 's.set_kind("r", "thread.x")\ns.set_scope("t", "shared")', "shared memory cannot be filled inside the thread.x loop `r`"),
    ],
)  # fmt: skip
def test_refusals(kernel: str, steps: str, why: str) -> None:
    refused(kernel, steps, why)


def test_a_copy_must_not_read_what_other_threads_write() -> None:
    """The box of a data-dependent place is the whole buffer."""
    refused(ROWS % "t[select(x[q] < 99i32, p, 0)]", 's.cache_read("t", "q", "u")', "iterations of `p`")
    accepted(ROWS % "t[p]", 's.cache_read("t", "q", "u")')
