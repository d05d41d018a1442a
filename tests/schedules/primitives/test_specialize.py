"""specialize: tiles without conditions beside those that keep them, on constant, symbolic and triangular loops; what it cannot ask in front."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E, te
from tcomp.ir.loops import For, If, expressions, walk
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules import Schedule
from tests.schedules.fuzzing import check
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native

TILES = """
    kernel tiles<n{1..}>(A: float32[n, 10], y: float32[n, 10]) -> (y) {
      for I in 0..((n + 3) // 4) {
        for J in 0..3 {
          for i in 0..4 {
            for j in 0..4 {
              if (i + I * 4 < n) & (j + J * 4 < 10) {
                y[i + I * 4, j + J * 4] = select(1 <= i + I * 4, A[i + I * 4 - 1, j + J * 4], 0.0f) + 1.0f
              }
            }
          }
        }
      }
    }
"""


def conditions(s: Schedule, loop: str) -> int:
    """How many stand inside of a loop."""
    inside = list(walk(s.loops[loop]))
    selects = sum(e.op == "select" for x in inside for root in expressions(x) for e in E.walk(root))
    return sum(isinstance(x, If) for x in inside) + selects


def asked(s: Schedule, loop: str) -> str:
    """The condition of the copy of a loop that asks no more."""
    return next(str(x.cond) for x in walk(s.kernel.body) if isinstance(x, If) and x.then is s.loops[loop])


def test_a_tile_with_all_of_its_loops() -> None:
    s = check(TILES, 's.specialize("i")', n=9).schedule
    assert conditions(s, "i") == 0 and conditions(s, "i.e") == 2
    assert {x.var.name for x in walk(s.loops["i.e"]) if isinstance(x, For)} == {"i.e", "j.e"}
    assert asked(s, "i") == "(I * 4 < n - 3) & (J < 2) & (0 < I)"


def test_the_innermost_loop_alone() -> None:
    """What it does not move is asked in front of it as it is."""
    s = check(TILES, 's.specialize("j")', n=9).schedule
    assert conditions(s, "j") == 0 and conditions(s, "j.e") == 2 and "(I * 4 + i < n) & (J < 2)" in asked(s, "j")


def test_twice_and_under_other_steps() -> None:
    steps = [
        's.specialize("i")',
        's.specialize("j.e")',
        's.set_kind("j", "vectorized")',
        's.set_kind("i.e", "unrolled")',
        's.set_kind("I", "parallel")',
        "s.clean()",
    ]
    for n in (1, 3, 8, 13):
        assert not check(TILES, "\n".join(steps), n=n).refused
        assert not check(TILES, 's.reorder("J", "I")\ns.specialize("I")\ns.reorder("j", "i")\ns.fuse("j", "i")', n=n).refused


def test_extents_that_depend_on_loops() -> None:
    text = """
        kernel triangle<n{1..}>(x: float32[n, n], y: float32[n, n]) -> (y) {
          for i in 0..n {
            for j in 0..(i + 1) {
              if (j < 3) & (i < j + 5) {
                y[i, j] = x[j, i]
              }
            }
          }
        }
    """
    s = check(text, 's.specialize("j")', n=9).schedule
    assert conditions(s, "j") == 0 and asked(s, "j") == "(i < 3) & (i < 5)"
    with pytest.raises(ScheduleError, match="`i` tests nothing that could be tested in front of it"):
        Schedule(parse_kernel(text.replace(" & (i < j + 5)", ""))).specialize("i")  # how far `j` goes depends on it


@pytest.mark.parametrize(
    "condition",
    ["j * j < 40", "j // 2 < 1", "x[j] < 2.0f", "j == 2", "(j < 1) | (2 < j)", "j < 0"],
    ids=["not linear", "a quotient", "data", "an equation", "alternatives", "never"],
)
def test_what_cannot_be_tested_in_front(condition: str) -> None:
    text = f"""
        kernel k(x: float32[9], y: float32[9]) -> (y) {{
          for j in 0..9 {{
            y[j] = select({condition}, x[j], 0.0f)
          }}
        }}
    """
    with pytest.raises(ScheduleError, match=r"`specialize` does not apply(?s:.)*`j` tests nothing that could be tested in front of it"):
        Schedule(parse_kernel(text)).specialize("j")


def test_conditions_that_stay() -> None:
    text = """
        kernel k<n{1..}>(x: float32[9], y: float32[9]) -> (y) {
          for j in 0..9 {
            if j < n {
              y[j] = select((j // 2 < 2) & (j < n + 1), x[j], 0.0f)
            }
          }
        }
    """
    s = check(text, 's.specialize("j")', n=9).schedule
    assert asked(s, "j") == "(0 < n - 8) & (0 < n - 7)" and conditions(s, "j") == 1 and conditions(s, "j.e") == 2


def test_guards_of_a_pipeline_stand_in_both_copies() -> None:
    """So each of them is a copy in every step, of nothing in the last ones."""
    a, k = te.placeholder((30,), name="A"), te.reduce_axis(30, "k")
    program = Program((a,), (te.compute((), lambda: te.sum(a[k] * a[k], k), "C"),), {})
    s = Schedule([a, *program.outputs])
    outer, _ = s.split("C.k", 4)
    s.cache_read("A", outer, "P")
    s.specialize("P.0")
    s.pipeline(outer, 3, "P")
    (branches,) = (x for x in walk(s.loops[outer]) if isinstance(x, If) and x.otherwise is not None)
    assert isinstance(branches.then, For) and isinstance(branches.otherwise, For)
    assert "C.k.o < 6" in str(branches.then) and "C.k.o < 6" in str(branches.otherwise)
    for got, want in zip(interpreted(program, s.kernel), expected(program), strict=True):
        program.same(got, want)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_products_in_tiles_of_any_size(rows: int, columns: int, depth: int, first: int, second: int, symbolic: bool) -> None:
    n = te.var("n", 1, None) if symbolic else rows
    a, b, k = te.placeholder((n, depth), name="A"), te.placeholder((depth, columns), name="B"), te.reduce_axis(depth, "k")
    program = Program((a, b), (te.compute((n, columns), lambda i, j: te.sum(a[i, k] * b[k, j], k), "C"),), {n: rows} if symbolic else {})
    s = Schedule([a, b, program.outputs[0]])
    io, ii = s.split("C.i", first)
    jo, ji = s.split("C.j", second)
    s.reorder(io, jo, "C.k", ii, ji)
    try:
        s.specialize("C.k")
    except ScheduleError:
        assert not symbolic and rows % first == columns % second == 0 or rows < first or columns < second
    for run in (interpreted, native):
        for got, want in zip(run(program, s.kernel), expected(program), strict=True):
            program.same(got, want)
