"""cache_factors: copies of the factors of a sum of products, for any sizes and whatever the factors are; what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.ir.expr import Expr, cast, select
from tcomp.schedules.schedule import Schedule
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted


def filtered(size: int, taps: int, features: int, pad: int, dtype: str = "float32") -> Program:
    """Windows of a padded line, times filters."""
    x, w = te.placeholder((size,), dtype, "x"), te.placeholder((features, taps), dtype, "w")
    k = te.reduce_axis(taps, "k")

    def at(i: Expr) -> Expr:
        return cast(select((i >= 0) & (i < size), x[i], 0) if pad else x[i], "float32")

    width = size + 2 * pad - taps + 1
    c = te.compute((features, width), lambda f, i: te.sum(at(i + k - pad) * cast(w[f, k], "float32"), k), "c")
    return Program((x, w), (te.compute((features, width), lambda f, i: c[f, i] + 1, "out"),), {})


def tiled(program: Program, rows: int, columns: int, depth: int) -> Schedule:
    s = Schedule([*program.inputs, *program.outputs])
    outer, f = s.split("out.f", rows)
    across, i = s.split("out.i", columns)
    s.reorder(outer, across, f, i)
    s.compute_at("c", across, "register")
    step, inner = s.split("c.k", depth)
    s.reorder(step, "c.f", "c.i", inner)
    s.cache_factors(step, "X", "W")
    return s


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(5, 12), st.integers(1, 5), st.integers(1, 7), st.integers(0, 2), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_tiles_over_any_edge(size: int, taps: int, features: int, pad: int, rows: int, columns: int, depth: int) -> None:
    program = filtered(size, taps, features, pad)
    s = tiled(program, rows, columns, depth)
    for got, want in zip(interpreted(program, s.kernel), expected(program), strict=True):
        program.same(got, want)


def test_the_sum_is_without_conditions_and_copies_are_small() -> None:
    s = tiled(filtered(10, 3, 5, 1, "float16"), 4, 4, 2)
    assert s.stages["X"].dtype == s.stages["W"].dtype == "float16"
    text = str(s.kernel)
    assert "c[c.f, c.i] += float32(X[c.i, c.k.i]) * float32(W[c.f, c.k.i])" in text
    assert text.count("select(") == 2


def test_what_is_refused() -> None:
    a, b, k = te.placeholder((6, 6), name="a"), te.placeholder((6,), name="b"), te.reduce_axis(6, "k")

    def schedule(value: Expr) -> Schedule:
        s = Schedule([a, b, te.compute((6,), lambda i: te.sum(value(i), k), name="c")])
        s.split("c.k", 2)
        s.reorder("c.k.o", "c.i", "c.k.i")
        return s

    with pytest.raises(ScheduleError, match="not one sum of products"):
        schedule(lambda i: a[i, k] + b[k]).cache_factors("c.k.o", "A", "B")
    with pytest.raises(ScheduleError, match="depends on data"):
        schedule(lambda i: select(b[k] > 0, a[i, k] * b[k], 0)).cache_factors("c.k.o", "A", "B")
    with pytest.raises(ScheduleError, match="the other one finite"):  # infinity times the zero would not be zero
        schedule(lambda i: select(i + k < 5, a[i, k] * b[k], 0)).cache_factors("c.k.o", "A", "B")
    with pytest.raises(ScheduleError, match="different names"):
        schedule(lambda i: a[i, k] * b[k]).cache_factors("c.k.o", "A", "A")
    with pytest.raises(ScheduleError, match="the other one finite"):  # the result itself: its elements are read by whoever calls
        schedule(lambda i: select(i < 5, a[i, k] * b[k], 0)).cache_factors("c.k.o", "A", "B")


def test_operands_that_only_a_condition_keeps_in_range() -> None:
    """`j` is out of range of `b` where nothing is summed, and the condition goes to the other factor."""
    a, b, k = te.placeholder((4, 3), name="a"), te.placeholder((2, 3), name="b"), te.reduce_axis(3, "k")
    c = te.compute((3, 2), lambda j, i: te.sum(select(i + j * 2 < 4, a[i + j * 2, k] * b[j, k], 0), k), name="c")
    s = Schedule([a, b, te.compute((3, 2), lambda j, i: select(i + j * 2 < 4, c[j, i], 0), name="d")])
    s.reorder("c.j", "c.k", "c.i")
    with pytest.raises(ScheduleError, match="may be out of range|the other one finite"):
        s.cache_factors("c.j", "A", "B")
