"""Steps that must be refused: what the message says, and the witness, which is checked by running the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import dedent

import pytest

from tcomp.ir import te
from tcomp.ir.expr import Expr
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules import Schedule, ScheduleError
from tcomp.schedules.analysis.legality import Witness
from tests.schedules.subject import Subject
from tests.schedules.witness import flaw, history

PROGRAMS = {
    "recurrence": """
        kernel k<n{1..}>(X: float32[n + 1]) -> (X) {
          for i in 0..n {
            X[i + 1] = X[i]
          }
        }
    """,
    "downwards": """
        kernel k<n{1..}>(X: float32[n + 1]) -> (X) {
          for i in 0..n {
            X[i] = X[i + 1]
          }
        }
    """,
    "distance two": """
        kernel k<n{1..}>(X: int32[n + 2]) -> (X) {
          for i in 0..n {
            X[i + 2] += X[i]
          }
        }
    """,
    "same element": """
        kernel k<n{1..}>(X: float32[n], s: float32[1]) -> (s) {
          for i in 0..n {
            s[0] = X[i]
          }
        }
    """,
    "pairs": """
        kernel k<n{1..}>(X: float32[2 * n], Y: float32[n]) -> (Y) {
          for i in 0..(2 * n) {
            Y[i // 2] = X[i]
          }
        }
    """,
    "wrapped": """
        kernel k<n{1..}>(X: float32[n], Y: float32[3]) -> (Y) {
          for i in 0..n {
            Y[i % 3] = X[i]
          }
        }
    """,
    "reversed": """
        kernel k<n{1..}>(X: float32[n]) -> (X) {
          for i in 0..n {
            X[i] = X[n - 1 - i]
          }
        }
    """,
    "scatter": """
        kernel k<n{1..}>(P: int64[n], X: float32[n], Y: float32[n]) -> (Y) {
          for i in 0..n {
            Y[P[i] % n] = X[i]
          }
        }
    """,
    "histogram": """
        kernel k<n{1..}>(P: int64[n], H: int32[16]) -> (H) {
          for i in 0..n {
            H[P[i] % 16] += 1i32
          }
        }
    """,
    "gather": """
        kernel k<n{1..}>(P: int64[n], X: float32[n]) -> (X) {
          for i in 0..n {
            X[i] = X[P[i] % n]
          }
        }
    """,
    "sum": """
        kernel k<n{1..}>(A: float32[n, 8], s: float32[1]) -> (s) {
          for i in 0..n {
            for j in 0..8 {
              s[0] += A[i, j]
            }
          }
        }
    """,
    "matmul": """
        kernel k(A: float32[8, 8], B: float32[8, 8], C: float32[8, 8]) -> (C) {
          for a in 0..8 {
            for b in 0..8 {
              C[a, b] = 0.0f
            }
          }
          for i in 0..8 {
            for j in 0..8 {
              for k in 0..8 {
                C[i, j] += A[i, k] * B[k, j]
              }
            }
          }
        }
    """,
    "two folds": """
        kernel k(A: float32[8, 8], s: float32[8]) -> (s) {
          for i in 0..8 {
            for j in 0..8 {
              s[j] += A[i, j]
              s[j] max= A[j, i]
            }
          }
        }
    """,
    "read while folded": """
        kernel k(A: float32[8], s: float32[1], Y: float32[8]) -> (s, Y) {
          for i in 0..8 {
            s[0] += A[i]
            Y[i] = s[0]
          }
        }
    """,
    "diagonal": """
        kernel k<n{1..}>(A: float32[n + 1, n + 1]) -> (A) {
          for i in 0..n {
            for j in 0..n {
              A[i + 1, j] = A[i, j + 1]
            }
          }
        }
    """,
    "seidel": """
        kernel k<T{1..}, n{1..}>(X: float32[n + 2]) -> (X) {
          for t in 0..T {
            for i in 0..n {
              X[i + 1] = X[i] + X[i + 2]
            }
          }
        }
    """,
    "jacobi": """
        kernel k<T{1..}, n{1..}>(X: float32[n + 2], Y: float32[n + 2]) -> (X, Y) {
          for t in 0..T {
            for i in 0..n {
              Y[i + 1] = X[i] + X[i + 2]
            }
            for j in 0..n {
              X[j + 1] = Y[j + 1]
            }
          }
        }
    """,
    "shared temporary": """
        kernel k<n{1..}>(X: float32[n], Y: float32[n]) -> (Y) {
          alloc t: float32[1]
          for i in 0..n {
            t[0] = X[i]
            Y[i] = t[0] * t[0]
          }
        }
    """,
    "triangle": """
        kernel k<n{1..}>(L: float32[n, n], X: float32[n]) -> (X) {
          for i in 0..n {
            for j in 0..i {
              X[i] = X[i] - L[i, j] * X[j]
            }
          }
        }
    """,
    "guarded": """
        kernel k<n{2..}>(X: float32[n]) -> (X) {
          for i in 0..n {
            if n // 2 <= i {
              X[i] = X[i - n // 2]
            }
          }
        }
    """,
    "flag": """
        kernel k<n{1..}>(F: int32[n], X: float32[n]) -> (F, X) {
          for i in 0..n {
            if F[0] < 3i32 {
              F[i] = 5i32
            }
          }
        }
    """,
    "neighbour": """
        kernel k<n{1..}>(A: float32[n + 1], X: float32[n + 1], Y: float32[n + 1]) -> (X, Y) {
          for i in 0..n {
            X[i] = A[i]
            Y[i] = X[i + 1]
          }
        }
    """,
    "rows": """
        kernel k<n{1..}>(A: float32[n + 1, n]) -> (A) {
          for i in 0..n {
            for j in 0..n {
              A[i + 1, j] = A[i, j] + A[i, n - 1 - j]
            }
          }
        }
    """,
    "three deep": """
        kernel k(A: float32[10, 10, 10]) -> (A) {
          for i in 0..9 {
            for j in 0..9 {
              for k in 0..9 {
                A[i + 1, j, k + 1] = A[i, j + 1, k]
              }
            }
          }
        }
    """,
    "overlapping blocks": """
        kernel k(X: float32[64], Y: float32[64]) -> (Y) {
          for b in 0..7 {
            for i in 0..9 {
              Y[b * 8 + i] = X[b * 8 + i]
            }
          }
        }
    """,
    "stage": """
        kernel k<n{1..}>(X: float32[n], Y: float32[n]) -> (X, Y) {
          alloc t: float32[n]
          for a in 0..n {
            t[a] = X[a] * 2.0f
          }
          for i in 0..n {
            X[n - 1 - i] = t[i]
          }
          for j in 0..n {
            Y[j] = X[j]
          }
        }
    """,
    "producer of one": """
        kernel k<n{1..}>(X: float32[n], Y: float32[n], Z: float32[n]) -> (Y, Z) {
          alloc t: float32[n]
          for a in 0..n {
            t[a] = X[a] * 2.0f
          }
          for i in 0..n {
            Y[i] = t[i]
          }
          for j in 0..n {
            Z[j] = t[n - 1 - j]
          }
        }
    """,
    "prefix": """
        kernel k<n{2..}>(X: float32[n], Y: float32[n]) -> (Y) {
          alloc t: float32[n]
          t[0] = X[0]
          for a in 0..(n - 1) {
            t[a + 1] = t[a] + X[a + 1]
          }
          for i in 0..n {
            Y[i] = t[i]
          }
        }
    """,
    "ahead": """
        kernel k<n{1..}>(A: float32[n + 1], B: float32[n + 1], C: float32[n + 1]) -> (B, C) {
          for i in 0..n {
            B[i] = A[i]
          }
          for j in 0..n {
            C[j] = B[j + 1] + B[j]
          }
        }
    """,
    "loop of two": """
        kernel k<n{1..}>(A: float32[n + 1], X: float32[n + 1], Y: float32[n + 1]) -> (X, Y) {
          for i in 0..n {
            X[i] = A[i]
            Y[i] = X[i + 1]
          }
        }
    """,
    "carried": """
        kernel k<n{1..}>(X: float32[n + 1], Y: float32[n + 1]) -> (X, Y) {
          for i in 0..n {
            X[i + 1] = Y[i]
            Y[i + 1] = X[i + 1]
          }
        }
    """,
}


def refusal(program: str, step: Callable[[Schedule], object]) -> tuple[Schedule, ScheduleError]:
    """The step is refused, says where, and changes nothing; steps before it are taken."""
    s = Schedule(parse_kernel(dedent(PROGRAMS[program]).strip()))
    with pytest.raises(ScheduleError) as caught:
        step(s)
    error = caught.value
    assert "kernel `k`" in error.what + error.where and error.why
    assert str(Schedule(s.source).replay(s.trace)) == str(s.kernel)
    return s, error


def listed(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def short(w: Witness) -> str:
    """`first iteration -> second iteration: element with sizes and loops around`; of accesses that are not affine, "perhaps"."""
    element = f"{'' if w.exact else 'perhaps '}{w.buffer}{list(w.element)}"
    return f"{listed(w.first.loops)} -> {listed(w.second.loops)}: {element}" + (f" with {listed(w.fixed)}" if w.fixed else "")


@pytest.mark.parametrize(
    ("program", "step", "expected"),
    [
        # races of parallel loops
        ("recurrence", lambda s: s.parallel("i"), "i=0 -> i=1: X[1] with n=2"),
        ("downwards", lambda s: s.parallel("i"), "i=0 -> i=1: X[1] with n=2"),
        ("distance two", lambda s: s.parallel("i"), "i=0 -> i=2: X[2] with n=3"),
        ("same element", lambda s: s.parallel("i"), "i=0 -> i=1: s[0] with n=2"),
        ("pairs", lambda s: s.parallel("i"), "i=0 -> i=1: Y[0] with n=1"),
        ("wrapped", lambda s: s.parallel("i"), "i=0 -> i=3: Y[0] with n=4"),
        ("reversed", lambda s: s.parallel("i"), "i=0 -> i=1: X[1] with n=2"),
        ("scatter", lambda s: s.parallel("i"), "i=0 -> i=1: perhaps Y[0] with n=2"),
        ("histogram", lambda s: s.parallel("i"), "i=0 -> i=1: perhaps H[15] with n=2"),
        ("gather", lambda s: s.parallel("i"), "i=0 -> i=1: perhaps X[1] with n=2"),
        ("sum", lambda s: s.parallel("i"), "i=0, j=0 -> i=1, j=0: s[0] with n=2"),
        ("sum", lambda s: s.parallel("j"), "j=0 -> j=1: s[0] with n=1, i=0"),
        ("matmul", lambda s: s.parallel("k"), "k=0 -> k=1: C[0, 0] with i=0, j=0"),
        ("two folds", lambda s: s.parallel("i"), "i=0, j=0 -> i=1, j=0: s[0]"),
        ("read while folded", lambda s: s.parallel("i"), "i=0 -> i=1: s[0]"),
        ("diagonal", lambda s: s.parallel("i"), "i=0, j=1 -> i=1, j=0: A[1, 1] with n=2"),
        ("seidel", lambda s: s.parallel("t"), "t=0, i=1 -> t=1, i=0: X[1] with n=2, T=2"),
        ("seidel", lambda s: s.parallel("i"), "i=0 -> i=1: X[2] with n=2, t=0, T=1"),
        ("jacobi", lambda s: s.parallel("t"), "t=0, i=1 -> t=1, j=0: X[1] with n=2, T=2"),
        ("shared temporary", lambda s: s.parallel("i"), "i=0 -> i=1: t[0] with n=2"),
        ("triangle", lambda s: s.parallel("i"), "i=1, j=0 -> i=2, j=1: X[1] with n=3"),
        ("triangle", lambda s: s.parallel("j"), "j=0 -> j=1: X[2] with n=3, i=2"),
        ("guarded", lambda s: s.parallel("i"), "i=1 -> i=2: X[1] with n=3"),
        ("flag", lambda s: s.parallel("i"), "i=0 -> i=1: perhaps F[0] with n=2"),
        ("neighbour", lambda s: s.parallel("i"), "i=0 -> i=1: X[1] with n=2"),
        ("rows", lambda s: s.parallel("i"), "i=0, j=0 -> i=1, j=0: A[1, 0] with n=2"),
        ("overlapping blocks", lambda s: s.parallel("b"), "b=0, i=8 -> b=1, i=0: Y[8]"),
        # lanes
        ("matmul", lambda s: s.vectorize("k"), "k=0 -> k=1: C[0, 0] with i=0, j=0"),
        ("two folds", lambda s: s.vectorize("i", reassociate=True), "i=0, j=0 -> i=1, j=0: s[0]"),
        ("read while folded", lambda s: s.vectorize("i", reassociate=True), "i=0 -> i=1: s[0]"),
        ("distance two", lambda s: s.vectorize(s.split("i", 4)[1], reassociate=True), "i.i=0 -> i.i=2: X[2] with n=3, i.o=0"),
        ("recurrence", lambda s: s.vectorize(s.split("i", 8)[1]), "i.i=0 -> i.i=1: X[1] with n=2, i.o=0"),
        ("same element", lambda s: s.vectorize(s.split("i", 8)[1], reassociate=True), "i.i=0 -> i.i=1: s[0] with n=2, i.o=0"),
        ("scatter", lambda s: s.vectorize(s.split("i", 8)[1], reassociate=True), "i.i=0 -> i.i=1: perhaps Y[0] with n=2, i.o=0"),
        ("histogram", lambda s: s.vectorize(s.split("i", 8)[1]), "i.i=0 -> i.i=1: perhaps H[15] with n=2, i.o=0"),
        ("three deep", lambda s: s.vectorize(s.fuse("i", "j")), "i_j=1, k=0 -> i_j=9, k=1: A[1, 1, 1]"),
        ("overlapping blocks", lambda s: s.vectorize("b"), "b=0, i=8 -> b=1, i=0: Y[8]"),
        # axes of a GPU
        ("recurrence", lambda s: s.set_kind("i", "block.x"), "i=0 -> i=1: X[1] with n=2"),
        ("sum", lambda s: s.set_kind("j", "thread.x"), "j=0 -> j=1: s[0] with n=1, i=0"),
        ("two folds", lambda s: s.set_kind("i", "thread.x", reassociate=True), "i=0, j=0 -> i=1, j=0: s[0]"),
        ("sum", lambda s: s.set_kind("i", "block.y", reassociate=True), "i=0, j=0 -> i=1, j=0: s[0] with n=2"),
        ("matmul", lambda s: s.distribute("k", 4, "block.x", "thread.x"), "k=0 -> k=1: C[0, 0] with i=0, j=0"),
        ("reversed", lambda s: s.distribute("i", 4, "block.x", "thread.x", strided=True), "i=0 -> i=1: X[1] with n=2"),
        # orders
        ("diagonal", lambda s: s.reorder("j", "i"), "i=0, j=1 -> i=1, j=0: A[1, 1] with n=2"),
        ("seidel", lambda s: s.reorder("i", "t"), "t=0, i=1 -> t=1, i=0: X[1] with n=2, T=2"),
        ("sum", lambda s: s.reorder("j", "i"), "i=0, j=1 -> i=1, j=0: s[0] with n=2"),
        ("rows", lambda s: s.reorder("j", "i"), "i=0, j=1 -> i=1, j=0: A[1, 1] with n=2"),
        ("three deep", lambda s: s.reorder("j", "i", "k"), "i=0, j=1, k=0 -> i=1, j=0, k=1: A[1, 1, 1]"),
        (
            "diagonal",
            lambda s: [s.split("i", 2), s.split("j", 2), s.reorder("i.o", "j.o", "i.i", "j.i")],
            "i.o=0, i.i=0, j.o=1, j.i=0 -> i.o=0, i.i=1, j.o=0, j.i=1: A[1, 2] with n=3",
        ),
        ("overlapping blocks", lambda s: s.reorder("i", "b"), "b=0, i=8 -> b=1, i=0: Y[8]"),
        # several statements and loops
        ("ahead", lambda s: s.fuse_loops("i", "j"), "i=1 -> j=0: B[1] with n=2"),
        ("jacobi", lambda s: s.fuse_loops("i", "j"), "i=1 -> j=0: X[1] with n=2, t=0, T=1"),
        ("stage", lambda s: s.fuse_loops("a", "i"), "a=1 -> i=0: X[1] with n=2"),
        ("producer of one", lambda s: [s.fuse_loops("a", "i"), s.fuse_loops("a", "j")], "a=1 -> j=0: t[1] with n=2"),
        ("loop of two", lambda s: s.fission("i"), "i=0 -> i=1: X[1] with n=2"),
        ("carried", lambda s: s.fission("i"), "i=0 -> i=1: Y[1] with n=2"),
        ("read while folded", lambda s: s.fission("i"), "i=0 -> i=1: s[0]"),
        ("shared temporary", lambda s: s.fission("i"), "i=0 -> i=1: t[0] with n=2"),
        ("loop of two", lambda s: s.shift("i", "X", -1), "i=0 -> i=1: X[1] with n=2"),
        ("loop of two", lambda s: s.shift("i", "Y", 1), "i=0 -> i=1: X[1] with n=2"),
        ("carried", lambda s: s.shift("i", "Y", 1), "i=0 -> i=1: Y[1] with n=2"),
        ("carried", lambda s: s.shift("i", "X", 1), "i=0 -> i=0: X[1] with n=1"),
        ("carried", lambda s: s.shift("i", "Y", -1), "i=0 -> i=0: X[1] with n=1"),
        ("recurrence", lambda s: s.affine("i", "{ S0[i] -> [-i] }", "a"), "i=0 -> i=1: X[1] with n=2"),
        ("seidel", lambda s: s.affine("t", "{ S0[t, i] -> [i, t] }", "a b"), "t=0, i=1 -> t=1, i=0: X[1] with n=2, T=2"),
        ("seidel", lambda s: s.affine("t", "{ S0[t, i] -> [t, 2t + i] }", "a b", parallel="a"), "t=0, i=1 -> t=1, i=0: X[1] with n=2, T=2"),
        ("diagonal", lambda s: s.affine("i", "{ S0[i, j] -> [i + 2j, j] }", "a b"), "i=0, j=1 -> i=1, j=0: A[1, 1] with n=2"),
        ("diagonal", lambda s: s.affine("i", "{ S0[i, j] -> [i + j, j] }", "a b"), "i=0, j=1 -> i=1, j=0: A[1, 1] with n=2"),
        ("sum", lambda s: s.affine("i", "{ S0[i, j] -> [j, i] }", "a b"), "i=0, j=1 -> i=1, j=0: s[0] with n=2"),
    ],
)
def test_a_witness(program: str, step: Callable[[Schedule], object], expected: str) -> None:
    s, error = refusal(program, step)
    witness = error.witness
    assert isinstance(witness, Witness) and short(witness) == expected
    assert str(s.kernel.body) in error.where and "iterations" in error.why and error.why.endswith(str(witness))
    sizes = {v: witness.fixed.get(v.name, 1) for v in s.kernel.scalars}
    arrays = dict(zip(s.kernel.buffers, Subject(s.kernel, sizes).arrays(), strict=True))
    assert not flaw(witness, history(s.kernel, arrays, sizes))


@pytest.mark.parametrize(
    ("program", "step", "why"),
    [
        ("matmul", lambda s: s.reorder("i", "b"), "i is not in one perfect nest with b"),
        ("triangle", lambda s: s.reorder("j", "i"), "the extent of j depends on a loop that would stand inside it"),
        ("matmul", lambda s: [s.vectorize("j"), s.vectorize("i")], "the vectorized loop `j` would stand inside the vectorized loop `i`"),
        ("matmul", lambda s: [s.vectorize("i"), s.parallel("j")], "the parallel loop `j` would stand inside the vectorized loop `i`"),
        ("matmul", lambda s: [s.parallel("i"), s.fuse("i", "j")], "`i` is parallel, `j` is serial"),
        (
            "matmul",
            lambda s: [s.set_kind("i", "thread.x"), s.set_kind("j", "thread.x")],
            "the thread.x loop `j` would stand inside the thread.x",
        ),
        ("sum", lambda s: s.unroll("i"), "the extent of `i` is symbolic: n"),
        ("pairs", lambda s: s.vectorize("i"), "the extent of `i` is symbolic: 2 * n"),
        ("matmul", lambda s: s.set_kind("i", "sideways"), "unknown loop kind"),
        ("matmul", lambda s: s.fuse("i", "k"), "`k` does not stand directly inside `i`"),
        ("jacobi", lambda s: s.fuse("t", "i"), "`i` does not stand directly inside `t`"),
        ("triangle", lambda s: s.fuse("i", "j"), "the extent of `j` depends on `i`"),
        ("matmul", lambda s: s.split("i", 0), "factor 0 is not positive"),
        ("matmul", lambda s: s.partition("i", 9), "cannot prove that 9 lies between 0 and the extent of `i`, 8"),
        ("recurrence", lambda s: s.partition("i", "n - 2"), "cannot prove that n - 2 lies between 0 and the extent of `i`, n"),
        ("recurrence", lambda s: s.partition("i", "m"), "nothing is called `m` here"),
        ("matmul", lambda s: s.split("x", 2), "there is no loop `x`"),
        ("matmul", lambda s: s.reorder("i", "i"), "the order (i, i) should name some loops, each once"),
        ("stage", lambda s: s.compute_at("t", "i"), "`X`, which is needed, is written between the stage and loop `i`"),
        ("stage", lambda s: s.inline("t"), "`X`, which `t` is computed from, may change before `t` is read"),
        ("producer of one", lambda s: s.compute_at("t", "i"), "`t` is also read outside of loop `i`"),
        ("prefix", lambda s: s.compute_at("t", "i"), "`t` is computed from its own elements"),
        ("prefix", lambda s: s.inline("t"), "2 statements store `t`"),
        ("matmul", lambda s: s.inline("C"), "`C` is a parameter, only temporaries vanish"),
        ("matmul", lambda s: s.compute_at("C", "i"), "`C` is a parameter, only temporaries move"),
        ("prefix", lambda s: s.set_scope("t", "register"), "`t` has the symbolic shape [n] and cannot live in registers"),
        ("jacobi", lambda s: s.cache_read("X", "t", "x"), "`X` is written where the copy would be read"),
        ("seidel", lambda s: s.cache_write("X", "x"), "`X` may keep some of what it holds before"),
        ("recurrence", lambda s: s.cache_read("X", None, "x"), "`X` is written where the copy would be read"),
        ("matmul", lambda s: s.set_scope("A", "register"), "`A` is a parameter, it is in global memory"),
        ("matmul", lambda s: s.rfactor("C", "j", 4), "`j` is not a reduction loop of `C`"),
        ("read while folded", lambda s: s.rfactor("s", "i", 4), "`i` does more with `s` than to accumulate into it once"),
        ("two folds", lambda s: s.rfactor("s", "i", 4), "`i` does more with `s` than to accumulate into it once"),
        ("prefix", lambda s: s.fuse_loops("a", "i"), "`a` has n - 1 iterations, `i` has n"),
        ("two folds", lambda s: s.fission("i"), "`i` is not a serial loop around several statements"),
        ("recurrence", lambda s: s.fission("i"), "`i` is not a serial loop around several statements"),
    ],
)
def test_a_reason(program: str, step: Callable[[Schedule], object], why: str) -> None:
    _, error = refusal(program, step)
    assert why in error.why


@pytest.mark.parametrize(
    ("program", "step"),
    [
        ("two folds", lambda s: s.reorder("j", "i")),  # each element's folds stay in order
        ("three deep", lambda s: s.reorder("k", "j", "i")),  # distance (1, -1, 1) begins with 1 again
        ("three deep", lambda s: s.parallel("j")),
        ("diagonal", lambda s: s.parallel("j")),
        ("sum", lambda s: s.vectorize("j", reassociate=True)),
        ("sum", lambda s: s.reorder("j", "i", reassociate=True)),
        ("sum", lambda s: s.set_kind("j", "thread.x", reassociate=True)),
        ("distance two", lambda s: s.vectorize(s.split("i", 2)[1])),
        ("wrapped", lambda s: s.vectorize(s.split("i", 3)[1])),
        ("pairs", lambda s: s.parallel(s.split("i", 2)[0])),
        ("jacobi", lambda s: [s.parallel("i"), s.parallel("j")]),
        ("overlapping blocks", lambda s: s.parallel("i")),
        ("producer of one", lambda s: s.inline("t")),
        ("producer of one", lambda s: s.fuse_loops("i", "j")),
        ("two folds", lambda s: s.fission("j")),
        ("loop of two", lambda s: s.shift("i", "Y", -2)),
        ("loop of two", lambda s: s.shift("i", "X", 1)),
        ("seidel", lambda s: s.affine("t", "{ S0[t, i] -> [t + i, t] }", "a b")),
        ("seidel", lambda s: s.affine("t", "{ S0[t, i] -> [2t + i, t] }", "a b")),
        ("seidel", lambda s: s.affine("t", "{ S0[t, i] -> [2t + i, t] }", "a b", parallel="b")),
        ("diagonal", lambda s: s.affine("i", "{ S0[i, j] -> [i + j, i] }", "a b", parallel="a")),
        ("seidel", lambda s: [s.skew("t", "i", 1), s.reorder("i", "t")]),
        ("seidel", lambda s: [s.skew("t", "i", 2), s.reorder("i", "t")]),
        ("triangle", lambda s: s.affine("i", "{ S0[i, j] -> [j, i] }", "a b")),
    ],
)
def test_what_looks_alike_and_is_legal(program: str, step: Callable[[Schedule], object]) -> None:
    s = Schedule(parse_kernel(dedent(PROGRAMS[program]).strip()))
    step(s)
    assert s.trace


@pytest.mark.parametrize("size", [te.var("n"), te.var("n") // 2, te.placeholder((4,), "int64", "P")[0]], ids=str)
def test_an_unknown_size_is_no_integer(size: Expr) -> None:
    s = Schedule(parse_kernel(dedent(PROGRAMS["recurrence"]).strip()))
    with pytest.raises(ScheduleError, match="`factor` cannot be"):
        s.split("i", size)
