"""Tails of a split: what each strategy makes, on constant, symbolic and triangular extents, and what it refuses."""

from __future__ import annotations

from textwrap import dedent

import numpy as np
import pytest

from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.ir.loops import If, walk
from tcomp.schedules import Schedule
from tcomp.schedules.primitives.loop_structure import TAILS
from tests.schedules.programs import Program
from tests.schedules.running import expected, native
from tests.schedules.shaped import kernel, unchanged
from tests.schedules.subject import Subject, interpreted


def matmul(n: te.Expr | int, m: int, depth: te.Expr | int) -> Program:
    a, b = te.placeholder((n, depth), name="A"), te.placeholder((depth, m), name="B")
    k = te.reduce_axis(depth, "k")
    c = te.compute((n, m), lambda i, j: te.sum(a[i, k] * b[k, j], k), "C")
    return Program((a, b), (c,), {v: 7 for v in (n, depth) if not isinstance(v, int)})


STENCIL = """
    kernel k<n{1..}>(x: int64[n + 2], y: int64[n]) -> (y) {
      for i in 0..n {
        y[i] = x[i] + x[i + 2]
      }
    }
"""
TRIANGLE = """
    kernel k<n{1..}>(x: int64[n, n], y: int64[n]) -> (x, y) {
      for i in 0..n {
        for j in 0..i {
          x[i, j] = x[j, i] + 1
          y[i] += x[i, j]
        }
      }
    }
"""
STARTED = """
    kernel k<n{1..}>(x: int64[n, n]) -> (x) {
      for i in 0..n {
        for j in 0..(i - 3) {
          for k in 0..(i - j) {
            x[i, j] = x[i, j] * 3 + x[k, j]
          }
        }
      }
    }
"""


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("tail", ["guard", "mask", "peel"])
@pytest.mark.parametrize(
    ("program", "loop"), [(STENCIL, "i"), (TRIANGLE, "i"), (TRIANGLE, "j"), (STARTED, "i"), (STARTED, "j"), (STARTED, "k")]
)
def test_symbolic_and_triangular_extents(program: str, loop: str, tail: str, factor: int) -> None:
    for n in (1, 2, 5, 8):
        s = Schedule(kernel(program))
        s.split(loop, factor, tail)
        unchanged(s, n=n)
        s.clean()
        unchanged(s, n=n)


@pytest.mark.parametrize("tail", TAILS)
def test_where_the_factor_divides_all_are_the_same(tail: str) -> None:
    s, plain = Schedule(kernel(STENCIL.replace("n{1..}", "n{1..}").replace("0..n", "0..(n * 4)").replace("[n", "[4 * n"))), None
    names = s.split("i", 4, tail)
    assert names[:2] == ("i.o", "i.i") and names[2:] == (("i.t",) if tail == "peel" else ())
    s.clean()
    plain = str(s.kernel.body)
    assert plain == "for i.o in 0..n {\n  for i.i in 0..4 {\n    y[i.i + i.o * 4] = x[i.i + i.o * 4] + x[i.i + i.o * 4 + 2]\n  }\n}"


@pytest.mark.parametrize("tail", ["guard", "mask", "peel", "shift_inwards"])
def test_vectors_over_symbolic_rows_compute_the_same(tail: str) -> None:
    n = te.var("n", 4)
    x = te.placeholder((n,), name="x")
    program = Program((x,), (te.compute((n,), lambda i: x[i] * 2 + 1, "y"),), {n: 11})
    s = Schedule([x, *program.outputs])
    s.vectorize("y.i", 4, tail=tail)
    assert s.loops["y.i.i"].kind == "vectorized"
    np.testing.assert_array_equal(native(program, s.kernel)[0], expected(program)[0])


def test_a_masked_fold_needs_no_branch() -> None:
    program = matmul(5, 4, te.var("K"))
    s = Schedule([*program.inputs, *program.outputs])
    s.split("C.k", 4, "mask")
    assert not any(isinstance(x, If) for x in walk(s.kernel.body))
    s.reorder("C.k.o", "C.j", "C.k.i", reassociate=True)
    np.testing.assert_array_equal(native(program, s.kernel)[0], expected(program)[0])


def test_a_mask_goes_to_each_statement() -> None:
    s = Schedule(kernel(TRIANGLE))
    s.split("j", 4, "mask")
    assert str(s.loops["j.i"].body) == dedent("""\
        if j.i + j.o * 4 < i {
          x[i, j.i + j.o * 4] = x[j.i + j.o * 4, i] + 1
        }
        y[i] += select(j.i + j.o * 4 < i, x[i, j.i + j.o * 4], 0)""")


def test_a_mask_keeps_threads_apart() -> None:
    """Elements that only another thread's iterations touch are not touched where the condition does not hold."""
    s = Schedule(
        kernel("""
        kernel k(x: int64[14], y: int64[16]) -> (y) {
          parallel p in 0..2 {
            for i in 0..6 {
              y[p * 6 + i] += x[i]
            }
          }
        }
    """)
    )
    s.split("i", 4, "mask")
    assert isinstance(s.loops["i.i"].body, If)


def test_peeled_tiles_have_no_conditions() -> None:
    for extent in (10, te.var("n")):
        x = te.placeholder((extent,), name="x")
        s = Schedule(te.compute((extent,), lambda i: x[i] * 2, "y"))  # noqa: B023
        assert s.split("y.i", 4, "peel") == ("y.i.o", "y.i.i", "y.i.t")
        assert not any(isinstance(s, If) for s in walk(s.kernel.body))
        assert s.loops["y.i.i"].extent == 4


def test_shifted_tiles_may_overlap_under_an_outer_time_loop() -> None:
    s = Schedule(
        kernel("""
        kernel k(x: int64[12], y: int64[10]) -> (y) {
          for t in 0..3 {
            for i in 0..10 {
              y[i] = x[i + t] * 2
            }
          }
        }
    """)
    )
    s.split("i", 4, "shift_inwards")
    assert "y[i.i + min(6, i.o * 4)]" in str(s)
    unchanged(s)


def test_padding_is_written_and_read_but_used_by_nobody() -> None:
    """All loops of a product run over whole tiles; only its copy into the result has a tail."""
    program = matmul(te.var("n"), 4, 6)
    s = Schedule([*program.inputs, *program.outputs])
    s.cache_write("C", "t")
    s.cache_read("A", None, "a")
    for loop in ("C.init.i", "C.i"):
        s.split(loop, 4, "round_up")
    assert [b.shape for b in (s.stages["t"], s.stages["a"])] == [s.stages["t"].shape, s.stages["a"].shape]
    assert str(s.stages["t"].shape[0]) == str(s.stages["a"].shape[0]) == "(n + 3) // 4 * 4"
    assert not any(isinstance(x, If) for x in walk(s.kernel.body))
    np.testing.assert_array_equal(interpreted(Subject(s.source, program.dims), s.kernel)[0], Subject(s.source, program.dims).plain[0])
    np.testing.assert_array_equal(native(program, s.kernel)[0], expected(program)[0])


# ---------------------------------------------------------------- refusals

IN_PLACE = """
    kernel k<n{4..}>(x: int64[n + 1], s: int64[1]) -> (x, s) {
      for i in 0..n {
        x[i + 1] = x[i] + 1
      }
      for r in 0..n {
        s[0] += x[r]
      }
    }
"""
TEMPORARIES = """
    kernel k<n{1..}>(x: int64[n], y: int64[n]) -> (y) {
      alloc t: int64[n]
      alloc u: int64[2 * n]
      for i in 0..n {
        t[i] = x[i]
      }
      for j in 0..n {
        u[j] = j
      }
      for j2 in 0..n {
        u[j2 + n] = j2
      }
      for a in 0..n {
        t[a] = t[a] * u[n - 1 - a]
      }
      for b in 0..n {
        y[b] = t[b] + u[b + n]
      }
    }
"""
COUNTED = """
    kernel k(x: int64[9], y: int64[9]) -> (x, y) {
      for i in 0..x[0] {
        x[i] = 3
      }
      for a in 0..9 {
        for b in 0..9 {
          y[b] = y[b] + a
        }
      }
    }
"""


@pytest.mark.parametrize(
    ("program", "loop", "tail", "why"),
    [
        (IN_PLACE, "i", "shift_inwards", "iterations of `i` read `x`, which they write: executed twice, one may find what it wrote"),
        (IN_PLACE, "r", "shift_inwards", "iterations of `r` accumulate into `s`: one executed twice would count twice"),
        (STENCIL, "i", "shift_inwards", "cannot prove that `i` has the 3 iterations of one tile; its extent is n"),
        (TRIANGLE, "j", "shift_inwards", "cannot prove that `j` has the 3 iterations of one tile; its extent is i"),
        (STENCIL, "i", "round_up", "additional iterations of `i` would write beyond the end of the parameter `y`"),
        (IN_PLACE, "r", "round_up", "additional iterations of `r` would write beyond the end of the parameter `s`"),
        (TRIANGLE, "j", "round_up", "the extent of `j` depends on a loop: i"),
        (TEMPORARIES, "i", "round_up", "cannot prove that `x[i.i + i.o * 3]` is in range in additional iterations of `i.o`"),
        (TEMPORARIES, "j", "round_up", "additional iterations of `j` may write elements of `u` that are read"),
        (TEMPORARIES, "j2", "round_up", "additional iterations of `j2` may write elements of `u` that are read"),
        (TEMPORARIES, "a", "round_up", "is in range in additional iterations of `a.o`"),
        (COUNTED, "i", "guard", "the extent of `i` reads `x`, which is written inside the loop"),
        (COUNTED, "i", "peel", "the extent of `i` reads `x`, which is written inside the loop"),
        (STENCIL, "i", "wrap", "unknown tail `wrap`; one of guard, mask, peel, shift_inwards, round_up"),
        (STENCIL, "x", "peel", "there is no loop `x`"),
    ],
)
def test_refused(program: str, loop: str, tail: str, why: str) -> None:
    s = Schedule(kernel(program))
    with pytest.raises(ScheduleError) as refusal:
        s.split(loop, 3, tail)
    assert why in refusal.value.why
    assert s.kernel is s.source and not s.trace


def test_a_while_loop_is_not_run_on_padding() -> None:
    s = Schedule(
        kernel("""
        kernel k(x: int64[10], y: int64[10]) -> (y) {
          alloc t: int64[10]
          for i in 0..10 {
            t[i] = 0
            while t[i] < 4 {
              t[i] = t[i] + 1
            }
          }
          for j in 0..10 {
            y[j] = t[j]
          }
        }
    """)
    )
    with pytest.raises(ScheduleError, match="there is a while loop inside `i`, which may not end in additional iterations"):
        s.split("i", 4, "round_up")
    s.split("i", 4, "mask")
    unchanged(s)


def test_a_read_waits_for_its_guard() -> None:
    """A condition, or an extent, that reads a buffer at the place of the loop is evaluated only where that place is in range."""
    for text in ("if x[i] < 3 {\n y[i] = 1\n}", "for j in 0..(x[i] % 4) {\n y[i] = y[i] + 2\n}"):
        s = Schedule(kernel("kernel k(x: int64[10], y: int64[10]) -> (y) {\n for i in 0..10 {\n " + text + "\n }\n}"))
        s.split("i", 4)
        unchanged(s)


def test_clean_drops_what_is_only_written() -> None:
    """The tiles of accumulators behind the last row, of which nothing is stored."""
    s = Schedule(
        kernel("""
        kernel k(x: float32[6], y: float32[6]) -> (y) {
          for i in 0..3 {
            alloc a: float32[4] register
            for j in 0..4 {
              a[j] = 0.0f
            }
            for j2 in 0..4 {
              if i * 4 + j2 < 6 {
                a[j2] += x[i * 4 + j2]
              }
            }
            for j3 in 0..4 {
              if i * 4 + j3 < 6 {
                y[i * 4 + j3] = a[j3]
              }
            }
          }
        }
    """)
    )
    s.partition("i", 2)
    s.clean()
    assert str(s.kernel.body).count("alloc") == 1
    unchanged(s)


def test_clean_may_leave_nothing_of_a_branch_or_of_a_program() -> None:
    source = """
        kernel k(x: float32[6], y: float32[6]) -> (y) {
          for i in 0..6 {
            alloc a: float32[6]
            if x[i] < 0.0f {
              a[i] = x[i]
            } else {
              OTHERWISE[i] = x[i]
            }
          }
        }
    """
    for otherwise in ("y", "a"):
        s = Schedule(kernel(source.replace("OTHERWISE", otherwise)))
        s.clean()
        assert ("if" in str(s.kernel.body)) == (otherwise == "y") and "alloc" not in str(s.kernel.body)
        unchanged(s)
