"""The shape of loops: tiles, fused and partitioned loops, on triangular and imperative programs as on tensor expressions."""

from __future__ import annotations

from collections import Counter
from textwrap import dedent
from typing import Any

import pytest

from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.schedules import Schedule
from tests.schedules.dice import Seeded
from tests.schedules.shaped import SHAPES, check, kernel, unchanged


@pytest.mark.parametrize("part", range(4))
def test_random_shapes_of_random_programs(part: int) -> None:
    accepted = Counter[str]()
    for case in range(40):
        accepted += check(Seeded(f"shapes {part} {case}"), SHAPES, 4)
    assert set(accepted) >= {*SHAPES, "refused"}


TRIANGLE = """
    kernel k<n{1..}>(x: int64[n, n]) -> (x) {
      for i in 0..n {
        for j in 0..(n - i) {
          for k in 0..(j + 1) {
            x[i, j] += x[k, j] * 2
          }
        }
      }
    }
"""
MAY_BE_EMPTY = """
    kernel k<n{1..}, m{1..}>(x: int64[n, m]) -> (x) {
      for i in 0..(n - 3) {
        for j in 0..(m - 3) {
          x[i + 3, j + 3] = x[i + 3, j + 3] + i + j
        }
      }
    }
"""


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_inner_loops_follow_what_they_depend_on(n: int) -> None:
    s = Schedule(kernel(TRIANGLE))
    s.split("i", 2)
    s.split("j", 3, "peel")
    s.split("k", 2, "mask")
    s.partition("i.o", "(n + 1) // 2 - 1")
    unchanged(s, n=n)
    s.clean()
    unchanged(s, n=n)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (1, 5), (4, 5)])
def test_negative_extents_are_no_iterations(n: int, m: int) -> None:
    """Fused, (n - 3) * (m - 3) iterations would run where both are negative."""
    s = Schedule(kernel(MAY_BE_EMPTY))
    s.fuse("i", "j")
    unchanged(s, n=n, m=m)
    s = Schedule(kernel(MAY_BE_EMPTY))
    s.split("i", 2, "peel")
    s.split("j", 2, "guard")
    unchanged(s, n=n, m=m)


def test_a_point_may_depend_on_an_outer_loop() -> None:
    s = Schedule(kernel(TRIANGLE))
    s.partition("k", "j")
    unchanged(s, n=6)
    assert list(s.loops) == ["i", "j", "k", "k.t"]


def test_temporaries_are_copied_with_the_loops_around_them() -> None:
    s = Schedule(
        kernel("""
        kernel k(x: int64[7], y: int64[7]) -> (y) {
          for i in 0..7 {
            alloc t: int64[i + 1]
            for j in 0..(i + 1) {
              t[j] = x[j] + i
            }
            for k in 0..(i + 1) {
              y[k] += t[i - k]
            }
          }
        }
    """)
    )
    s.split("i", 3, "peel")
    s.fuse("i.o", "i.i")
    unchanged(s)
    assert sorted(s.stages) == ["t", "t.t", "y"]


def test_a_loop_of_one_iteration_leaves_a_triangle() -> None:
    s = Schedule(kernel(TRIANGLE))
    s.partition("i", 1)
    s.clean()
    assert list(s.loops)[:2] == ["j", "k"] and "i" not in s.loops
    unchanged(s, n=5)


def test_tiles() -> None:
    a, b = te.placeholder((10, 7), name="A"), te.placeholder((7, 10), name="B")
    c = te.compute((10, 10), lambda i, j: a[i, j % 7] - b[j % 7, i], "C")
    s = Schedule(c)
    assert s.tile("C.i", "C.j", 4, 3) == ("C.i.o", "C.j.o", "C.i.i", "C.j.i")
    assert [step.primitive for step in s.trace] == ["split", "split", "reorder"]
    unchanged(s)
    assert list(s.loops) == ["C.i.o", "C.j.o", "C.i.i", "C.j.i"]
    s.partition("C.i.o", 2)
    s.clean()
    unchanged(s)


@pytest.mark.parametrize("tail", ["guard", "mask", "shift_inwards"])
def test_tails_of_tiles(tail: str) -> None:
    a = te.placeholder((10, 7), name="A")
    s = Schedule(te.compute((7, 10), lambda i, j: a[j, i] * 2, "C"))
    s.tile("C.i", "C.j", 4, 3, tail)
    unchanged(s)


def test_steps_of_a_tile_are_all_refused_together() -> None:
    for arguments, why in ((("i", "j", 2, 2), "depends on a loop that would stand inside"), (("i", "j", 2, 0), "factor 0 is not positive")):
        s = Schedule(kernel(TRIANGLE))
        with pytest.raises(ScheduleError) as refusal:
            s.tile(*arguments)
        assert why in refusal.value.why and s.kernel is s.source and not s.trace


def test_vectorize_and_unroll_with_a_factor_are_splits() -> None:
    s = Schedule(kernel(MAY_BE_EMPTY))
    s.vectorize("j", 4)
    s.unroll("i", 2)
    s.parallel("i.o")
    assert [s.loops[n].kind for n in ("i.o", "i.i", "j.o", "j.i")] == ["parallel", "unrolled", "serial", "vectorized"]
    assert str(s.trace) == dedent("""\
        s.split("j", 4)
        s.set_kind("j.i", "vectorized")
        s.split("i", 2)
        s.set_kind("i.i", "unrolled")
        s.set_kind("i.o", "parallel")""")
    unchanged(s, n=6, m=8)


def test_axes_of_a_gpu_are_bound() -> None:
    s = Schedule(kernel(MAY_BE_EMPTY))
    s.bind("i", "block.x")
    s.bind("j", "thread.x")
    assert [s.loops[n].kind for n in "ij"] == ["block.x", "thread.x"]
    unchanged(s, n=6, m=8)


# ---------------------------------------------------------------- refusals

COUNTED = """
    kernel k<n{1..}>(x: int64[n], y: int64[n, n]) -> (x, y) {
      for i in 0..n {
        for j in 0..(x[0] % n) {
          for l in 0..3 {
            x[i] += 1
          }
        }
      }
      for a in 0..n {
        if (a < n - 2) {
          for b in 0..n {
            y[a, b] = y[b, a]
          }
        }
      }
    }
"""
PAIR = """
    kernel k<n{1..}>(x: int64[n, n]) -> (x) {
      parallel i in 0..n {
        for j in 0..n {
          x[i, j] = 1
        }
      }
    }
"""


@pytest.mark.parametrize(
    ("program", "step", "arguments", "why"),
    [
        (TRIANGLE, "fuse", ("i", "j"), "the extent of `j` depends on `i`"),
        (TRIANGLE, "fuse", ("j", "k"), "the extent of `k` depends on `j`"),
        (TRIANGLE, "fuse", ("i", "k"), "`k` does not stand directly inside `i`"),
        (PAIR, "fuse", ("i", "j"), "`i` is parallel, `j` is serial"),
        (COUNTED, "fuse", ("i", "j"), "the extent of `j` reads `x`, which is written inside the loop"),
        (COUNTED, "partition", ("j", 0), "the extent of `j` reads `x`, which is written inside the loop"),
        (COUNTED, "reorder", ("j", "l"), "the extent of `j` reads `x`, which is written inside the loop"),
        (COUNTED, "reorder", ("a", "b"), "b is not in one perfect nest with a"),
        (TRIANGLE, "reorder", ("j", "i"), "the extent of j depends on a loop that would stand inside it"),
        (TRIANGLE, "reorder", ("i", "nowhere"), "there is no loop `nowhere`"),
        (TRIANGLE, "partition", ("k", "i"), "cannot prove that i lies between 0 and the extent of `k`, j + 1"),
        (TRIANGLE, "partition", ("k", "j - 1"), "cannot prove that j - 1 lies between 0"),
        (TRIANGLE, "partition", ("j", "k"), "`k` is neither a size nor a loop around `j`"),
        (MAY_BE_EMPTY, "partition", ("i", "n - 2"), "cannot prove that n - 2 lies between 0 and the extent of `i`, n - 3"),
        (TRIANGLE, "split", ("k", -1), "factor -1 is not positive"),
        (TRIANGLE, "split", ("k", 2**70), "factor 1180591620717411303424 is more than 2147483648"),
        (TRIANGLE, "set_kind", ("k", "unrolled"), "the extent of `k` is symbolic: j + 1"),
        (TRIANGLE, "set_kind", ("i", "parallel"), "iterations of `i`"),
        (TRIANGLE, "distribute", ("i", 4, "block.x", "thread.x"), "iterations of `i`"),
        (TRIANGLE, "distribute", ("i", 4, "parallel", "thread.x"), "`parallel` is not an axis of a GPU"),
        (TRIANGLE, "set_kind", ("i", "warp"), "unknown loop kind"),
    ],
)
def test_refused(program: str, step: str, arguments: tuple[Any, ...], why: str) -> None:
    s = Schedule(kernel(program))
    with pytest.raises(ScheduleError) as refusal:
        s.apply(step, *arguments)
    assert why in refusal.value.why
    assert s.kernel is s.source and not s.trace


def test_fewer_iterations_than_none() -> None:
    """A window may be larger than what a run counts: n - 3 is negative then, and no tile is whole. As many as min(0, ...) would leave a tail
    that begins before the array."""
    n = te.var("n", 0)
    x, k = te.placeholder((n,), name="x"), te.reduce_axis(4, "k")
    s = Schedule(te.compute((n - 3,), lambda i: te.max(x[i + k], k), name="y"))
    s.split("y.i", 48)
    with pytest.raises(ScheduleError, match="cannot prove"):
        s.partition("y.i.o", "(n + 45) // 48 - 1")
    s.partition("y.i.o", "max((n + 45) // 48 - 1, 0)")
    assert str(s.loops["y.i.o"].extent) == "max(0, (n + 45) // 48 - 1)"
