"""inline, compute_at, reverse_compute_at: what they make, that they keep the meaning, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir import te
from tcomp.schedules.schedule import Schedule
from tests.schedules.dice import Hypothesis
from tests.schedules.pipelines import staged
from tests.schedules.stepwise import accepted, refused, walked
from tests.schedules.together import run_native

MOVES = ("inline", "compute_at", "compute_at", "reverse_compute_at", "reverse_compute_at")
SHAPES = ("split", "reorder", "fuse", "partition", "set_kind", "cache_read", "cache_write", "relayout")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_random_steps_keep_the_meaning(data: st.DataObject) -> None:
    walked(Hypothesis(data.draw), 7, MOVES + SHAPES).replay()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_machine_code_after_random_steps(data: st.DataObject) -> None:
    for failure in run_native([walked(Hypothesis(data.draw), 5, MOVES + SHAPES).case], 1)[0].values():
        raise failure


# ---------------------------------------------------------------- inline


TRANSPOSED = """kernel k(A: int32[6, 5], C: int32[5, 6]) -> (C) {
  alloc B: int32[6, 5]
  for i in 0..6 {
    for j in 0..5 {
      B[i, j] = A[i, j] * 2i32
    }
  }
  for y in 0..5 {
    for x in 0..6 {
      C[y, x] = B[x, y] + 1i32
    }
  }
}
"""


def test_inline_follows_the_index_backwards() -> None:
    """The loops of a stage may have been reordered, fused and split."""
    shaped = accepted(TRANSPOSED, 's.reorder("j", "i")\ns.fuse("j", "i")\ns.split("j_i", 4)\ns.inline("B")')
    assert shaped == "for y in 0..5 {\n  for x in 0..6 {\n    C[y, x] = A[x, y] * 2i32 + 1i32\n  }\n}"


def test_inline_keeps_guards_as_selections() -> None:
    """What is not stored may be anything, but nothing is read out of range for it."""
    shaped = accepted(
        """kernel k(x: int32[4], y: int32[8]) -> (y) {
          alloc t: int32[8]
          for i in 0..8 {
            if i < 4 {
              t[i] = x[i]
            }
          }
          for j in 0..8 {
            y[j] = select(j < 3, t[j], 7i32)
          }
        }""",
        's.inline("t")',
    )
    assert "y[j] = select(j < 3, select(j < 4, x[j], 0i32), 7i32)" in shaped


def test_inline_into_indices_conditions_and_several_readers() -> None:
    shaped = accepted(
        """kernel k(x: int32[6], y: int32[9, 6], z: int32[6]) -> (y, z) {
          alloc t: int32[6]
          for i in 0..6 {
            t[i] = max(x[i], 0i32)
            z[i] = 0i32
          }
          for j in 0..6 {
            if t[j] < 3i32 {
              y[int64(t[j]), j] = 1i32
            }
            z[j] += t[j] - t[5 - j]
          }
        }""",
        's.inline("t")',
    )
    assert "if max(x[j], 0i32) < 3i32 {\n    y[int64(max(x[j], 0i32)), j] = 1i32" in shaped and "z[i] = 0i32" in shaped


ROW_BY_ROW = """kernel k(x: int32[4, 6], y: int32[4, 6]) -> (y) {
  alloc t: int32[6]
  for r in 0..4 {
    for i in 0..6 {
      t[i] = x[r, i] * 2i32
    }
    for j in 0..6 {
      y[r, j] = t[5 - j]
    }
  }
}"""


def test_inline_inside_of_a_shared_loop() -> None:
    shaped = accepted(ROW_BY_ROW, 's.inline("t")')
    assert "y[r, j] = x[r, j * -1 + 5] * 2i32" in shaped and "alloc" not in shaped


# ---------------------------------------------------------------- compute_at


WINDOW = """kernel k<n{1..}>(A: int32[n * 2 + 3], C: int32[n]) -> (C) {
  alloc B: int32[n * 2 + 3]
  for i in 0..(n * 2 + 3) {
    B[i] = A[i] * 3i32
  }
  for x in 0..n {
    C[x] = B[x * 2] + B[x * 2 + 3]
  }
}
"""


@pytest.mark.parametrize("n", [1, 4, 7])
def test_compute_at_takes_the_exact_window(n: int) -> None:
    """Stride 2, dilation 3: a tile of 4 needs 3 * 2 + 3 + 1 elements."""
    shaped = accepted(WINDOW, 's.split("x", 4)\ns.compute_at("B", "x.o")', n=n)
    assert "alloc B: int32[10]" in shaped and "for i in 0..10" in shaped


def test_compute_at_of_reshaped_stages() -> None:
    """The loops of the stage, split and reordered, become one per dimension again; the tail is a guard."""
    shaped = accepted(WINDOW, 's.split("i", 3)\ns.split("x", 4)\ns.compute_at("B", "x.i")', n=6)
    assert "alloc B: int32[4]" in shaped and "for i.o in 0..4 {\n" in shaped and "i.i" not in shaped


def test_compute_at_of_a_partitioned_stage() -> None:
    shaped = accepted(WINDOW, 's.partition("i", 3)\ns.split("x", 4)\ns.compute_at("B", "x.o")', n=6)
    assert "for i in 0..10" in shaped and "for i.t in 0..10" in shaped


def test_compute_at_into_fused_and_split_readers() -> None:
    shaped = accepted(TRANSPOSED, 's.fuse("y", "x")\ns.split("y_x", 6)\ns.compute_at("B", "y_x.o")')
    assert "alloc B: int32[6, 1]" in shaped


CLAMPED = """kernel k(A: int32[20], C: int32[20]) -> (C) {
  alloc B: int32[20]
  for i in 0..20 {
    B[i] = A[i] * 3i32
  }
  for x in 0..20 {
    C[x] = %s
  }
}
"""


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        ("B[min(max(x - 1, 0), 19)] + B[x]", 5),
        ("select((0 < x) & (x < 18), B[x - 1] + B[x + 2], 7i32)", 7),
        ("B[x // 2]", 2),
        ("B[x // 3]", 2),
        ("B[x % 4] + B[x // 4 * 4 + 3]", 20),
        ("B[x // 4 * 4 + x % 4]", 4),
        ("B[19 - x]", 4),
    ],
)
def test_bounds_of_what_four_iterations_read(value: str, elements: int) -> None:
    shaped = accepted(CLAMPED % value, 's.split("x", 4)\ns.compute_at("B", "x.o")')
    assert f"alloc B: int32[{elements}]" in shaped


def test_compute_at_inside_of_a_shared_loop() -> None:
    shaped = accepted(ROW_BY_ROW, 's.compute_at("t", "j")')
    assert "for j in 0..6 {\n    alloc t: int32[1]" in shaped


def test_compute_at_twice_moves_deeper() -> None:
    shaped = accepted(WINDOW, 's.split("x", 4)\ns.compute_at("B", "x.o")\ns.compute_at("B", "x.i", "register")', n=6)
    assert "alloc B: int32[4] register" in shaped


def test_compute_at_of_a_triangular_fold() -> None:
    """The bound of the fold follows the element."""
    shaped = accepted(
        """kernel k(A: int32[7], C: int32[7]) -> (C) {
          alloc B: int32[7]
          for i in 0..7 {
            B[i] = 0i32
          }
          for u in 0..7 {
            for k in 0..(u + 1) {
              B[u] += A[k]
            }
          }
          for x in 0..7 {
            C[x] = B[x] * 2i32
          }
        }""",
        's.compute_at("B", "x")',
    )
    assert "for k in 0..(u + x + 1)" in shaped


# ---------------------------------------------------------------- reverse_compute_at


def matmul() -> Schedule:
    a, b, bias = te.placeholder((8, 6), "int32", "A"), te.placeholder((6, 10), "int32", "B"), te.placeholder((10,), "int32", "bias")
    k = te.reduce_axis(6, "k")
    c = te.compute((8, 10), lambda i, j: te.sum(a[i, k] * b[k, j], k), "C")
    return Schedule(staged(a, b, bias, te.compute((8, 10), lambda i, j: te.maximum(c[i, j] + bias[j], 0), "D")))


TILED = 's.split("C.i", 4)\ns.split("C.j", 4)\ns.reorder("C.i.o", "C.j.o", "C.k", "C.i.i", "C.j.i")\n'


def test_the_epilogue_of_a_tiled_product() -> None:
    """Bias and relu follow each tile; the last tile of columns is cut by a guard."""
    shaped = accepted(str(matmul()), TILED + 's.reverse_compute_at("D", "C.j.o")')
    assert (
        "    for D.i in 0..4 {\n"
        "      for D.j in 0..4 {\n"
        "        if C.j.o * 4 + D.j < 10 {\n"
        "          D[C.i.o * 4 + D.i, C.j.o * 4 + D.j] = max(C[C.i.o * 4 + D.i, C.j.o * 4 + D.j] + bias[C.j.o * 4 + D.j], 0i32)\n"
    ) in shaped


def test_an_epilogue_in_a_fused_parallel_loop() -> None:
    shaped = accepted(
        str(matmul()), TILED + 's.fuse("C.i.o", "C.j.o")\ns.set_kind("C.i.o_o", "parallel")\ns.reverse_compute_at("D", "C.i.o_o")'
    )
    assert "D[C.i.o_o // 3 * 4 + D.i, C.i.o_o % 3 * 4 + D.j]" in shaped


POOLED = """kernel k(A: int32[%d], D: int32[%d]) -> (D) {
  alloc C: int32[%d]
  for i in 0..%d {
    C[i] = A[i] * 3i32
  }
  for o in 0..%d {
    D[o] = -99i32
  }
  for x in 0..%d {
    for r in 0..2 {
      D[x] max= C[x * 2 + r]
    }
  }
}
"""


def pooled(n: int) -> str:
    return POOLED % (n, n // 2, n, n, n // 2, n // 2)


def test_pooling_of_a_tile() -> None:
    """Both nests move; the window of two stays inside of a tile of four."""
    shaped = accepted(pooled(12), 's.split("i", 4)\ns.reverse_compute_at("D", "i.o")')
    assert "for o in 0..2 {\n    D[i.o * 2 + o] = -99i32" in shaped and "D[i.o * 2 + x] max= C[" in shaped


ELEMENTWISE = """kernel k(A: int32[12], D: int32[12]) -> (D) {
  alloc C: int32[12]
  for i in 0..12 {
    C[i] = A[i] * 3i32
  }
  for x in 0..12 {
    D[x] = C[x] + 1i32
  }
}
"""


def test_digits_that_are_no_box_are_told_apart_by_a_condition() -> None:
    """The loop runs over the lower digit of the element."""
    shaped = accepted(ELEMENTWISE, 's.split("i", 4)\ns.reorder("i.i", "i.o")\ns.reverse_compute_at("D", "i.i")')
    assert "for x in 0..12 {\n    if i.i == x % 4 {" in shaped


def test_reversed_loops_and_symbolic_sizes() -> None:
    shaped = accepted(
        """kernel k<n{1..}>(A: int32[n], D: int32[n]) -> (D) {
          alloc C: int32[n]
          for i in 0..n {
            C[n - 1 - i] = A[i] * 3i32
          }
          for x in 0..n {
            D[x] = C[x] + A[n - 1 - x]
          }
        }""",
        's.reverse_compute_at("D", "i")',
        n=5,
    )
    assert "for x in 0..1 {\n    D[n - i - 1 + x] = " in shaped
    tiled = accepted(
        """kernel k<n{1..}>(A: int32[n], D: int32[n]) -> (D) {
          alloc C: int32[n]
          for i in 0..n {
            C[i] = A[i] * 3i32
          }
          for x in 0..n {
            D[x] = C[x] + A[n - 1 - x]
          }
        }""",
        's.split("i", 4)\ns.reverse_compute_at("D", "i.o")',
        n=6,
    )
    assert "for x in 0..4 {\n    if i.o * 4 + x < n {" in tiled


def test_wrapped_indices_narrow_nothing() -> None:
    """(x + 1) % 12 is not a digit of x."""
    shaped = accepted(ELEMENTWISE.replace("C[x] + 1i32", "C[(x + 1) % 12]"), 's.reverse_compute_at("D", "i")')
    assert "for x in 0..12 {\n    if i == (x + 1) % 12 {" in shaped


# ---------------------------------------------------------------- refusals


TWO = """kernel k(x: int32[4], y: int32[4], z: int32[4]) -> (x, y, z) {
  alloc t: int32[4]
  for i in 0..4 {
    t[i] = x[i] * 2i32
  }
  for m in 0..4 {
    %s
  }
  for j in 0..4 {
    y[j] = t[j] + x[j]
  }
  for p in 0..4 {
    z[p] = %s
  }
}
"""
CARRIED = """kernel k(x: int32[3, 4], y: int32[3, 4]) -> (y) {
  alloc t: int32[4]
  for r in 0..3 {
    for i in 0..%s {
      %s
    }
    for j in 0..4 {
      y[r, j] = t[j]
    }
  }
}
"""
FOLD = """kernel k(A: int32[6, 5], D: int32[6]) -> (D) {
  alloc C: int32[6]
  for o in 0..6 {
    C[o] = 0i32
  }
  for k in 0..5 {
    for i in 0..6 {
      C[i] += A[i, k]
    }
  }
  for x in 0..6 {
    D[x] = %s
  }
}
"""
ITSELF = """kernel k(x: int32[6], y: int32[6]) -> (y) {
  alloc t: int32[6]
  for o in 0..6 {
    t[o] = x[o]
  }
  for i in 0..5 {
    t[i + 1] = t[i] + x[i]
  }
  for j in 0..6 {
    y[j] = t[j]
  }
}
"""


@pytest.mark.parametrize(
    ("kernel", "steps", "why"),
    [
        (TWO % ("z[m] = 1i32", "1i32"), 's.inline("y")', "`y` is a parameter, only temporaries vanish"),
        (FOLD % "C[x]", 's.inline("C")', "`C` is a reduction"),
        (ITSELF, 's.inline("t")', "2 statements store `t`"),
        (TWO % ("x[m] = 1i32", "1i32"), 's.inline("t")', "`x`, which `t` is computed from, may change before `t` is read"),
        (TWO % ("z[m] = 1i32", "1i32"), 's.compute_at("t", "j")\ns.inline("t")\ns.inline("t")', "there is no buffer `t`"),
        (CARRIED % ("4", "t[i] = t[3 - i]"), 's.inline("t")', "`t` is computed from its own elements"),
        (CARRIED % ("(r + 1)", "t[i] = x[r, i]"), 's.inline("t")', "`t[j]` may stem from an earlier iteration of `r`: it is stored where j < r + 1"),
        (CARRIED % ("4", "t[i % 2] = x[r, i]"), 's.inline("t")', "does not tell which iteration of `i` stores an element"),
        (TWO % ("z[m] = t[m]", "1i32"), 's.compute_at("t", "j")', "`t` is also read outside of loop `j`"),
        (TWO % ("x[m] = 1i32", "1i32"), 's.compute_at("t", "j")', "`x`, which is needed, is written between the stage and loop `j`"),
        (TWO % ("t[m] = 1i32", "1i32"), 's.compute_at("t", "m")', "loop `m` is one of those that compute `t`"),
        (TWO % ("z[m] = 1i32", "1i32"), 's.compute_at("t", "p")', "`t` is also read outside of loop `p`"),
        (ITSELF, 's.compute_at("t", "j")', "`t` is computed from its own elements"),
        (CARRIED % ("(r + 1)", "t[i] = x[r, i]"), 's.compute_at("t", "j")', "`t` may keep elements from an earlier iteration"),
        (CARRIED % ("4", "t[i] = x[r, i]"), 's.compute_at("t", "r")', "loop `r` is one of those that compute `t`"),
        (CARRIED % ("4", "t[i % 2 * 2] = x[r, i]"), 's.compute_at("t", "j")', "may keep elements"),
        (TWO % ("z[m] = 1i32", "1i32"), 's.set_kind("j", "thread.x")\ns.compute_at("t", "j", "shared")', "shared memory cannot be filled inside"),
        (FOLD % "C[x]", 's.reverse_compute_at("D", "k")', "`C` is complete only after all iterations of `k`"),
        (FOLD % "C[x]", 's.reverse_compute_at("D", "o")', "`C`, which is needed, is written between the stage and loop `o`"),
        (FOLD % "C[x] + C[5 - x]", 's.reorder("i", "k")\ns.reverse_compute_at("D", "i")', "needs elements of `C` from several iterations of `i`"),
        (FOLD % "A[x, 0]", 's.reverse_compute_at("D", "i")', "`D` uses nothing that loop `i` computes"),
        (FOLD % "C[A[x, 0]]", 's.reorder("i", "k")\ns.reverse_compute_at("D", "i")', "needs elements of `C` from several iterations of `i`"),
        (FOLD % "select(0 < x, C[x - 1], 0i32)", 's.reorder("i", "k")\ns.reverse_compute_at("D", "i")', "`D[a]` would be missing: no iteration of `i` goes with it unless 0 < a"),
        (FOLD % "C[x]", 's.reverse_compute_at("C", "x")', "`C` is computed before loop `x`"),
        (pooled(12), 's.split("i", 3)\ns.reverse_compute_at("D", "i.o")', "one element of `D` needs elements of `C` from several iterations of `i.o`"),
        (TWO % ("y[m] = x[m]", "y[p]"), 's.reverse_compute_at("z", "m")', "`y`, which is needed, is written between the stage and loop `m`"),
        (TWO % ("x[m] = z[m]", "x[p]"), 's.reverse_compute_at("z", "m")', "`z` is used before it is computed"),
    ],
)  # fmt: skip
def test_refusals(kernel: str, steps: str, why: str) -> None:
    refused(kernel, steps, why)
