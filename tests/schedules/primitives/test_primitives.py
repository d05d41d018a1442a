"""Schedule primitives: any sequence of steps that is accepted keeps the meaning of the program, replays, and leaves no race."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import CodegenError, ScheduleError
from tcomp.ir import te
from tcomp.ir.loops import Accumulate, For, Kernel, Stmt, loop
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules.lowering import lower
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tests.schedules.dice import Hypothesis
from tests.schedules.programs import Program, programs
from tests.schedules.races import races
from tests.schedules.random_schedules import draw_step
from tests.schedules.running import expected, interpreted, native


def nest_at(kernel: Kernel, loop: str) -> list[str]:
    """The loops that stand directly inside each other from `loop` inwards."""
    names, s = [], editing.find_loop(kernel, loop)
    inner: Stmt = s
    while isinstance(inner, For):
        names.append(inner.var.name)
        inner = inner.body
    return names


@st.composite
def scheduled(draw: st.DrawFn, of: st.SearchStrategy[Program], steps: int) -> tuple[Program, Schedule]:
    """A program and a schedule of it: the steps that were accepted. Refused ones change nothing and show the loops."""
    program = draw(of)
    s = Schedule(lower("program", program.inputs, program.outputs))
    for _ in range(draw(st.integers(1, steps))):
        step = draw_step(Hypothesis(draw), s.kernel)
        before, length = s.kernel, len(s.trace)
        try:
            s.apply(step.primitive, *step.arguments, **dict(step.options))
            verify_kernel(s.kernel)
        except ScheduleError as error:
            assert s.kernel is before and len(s.trace) == length
            assert "kernel `program`" in error.what + error.where and error.why
        except Exception as error:
            error.add_note(f"{program}{s.kernel}\n{step}")
            raise
    return program, s


@settings(max_examples=250, deadline=None, derandomize=True)
@given(scheduled(programs(largest=4, volume=60), 7))
def test_random_schedules_keep_the_meaning(case: tuple[Program, Schedule]) -> None:
    program, s = case
    for got, want in zip(interpreted(program, s.kernel, shuffle=1), expected(program), strict=True):
        program.same(got, want)
    assert str(Schedule(lower("program", program.inputs, program.outputs)).replay(s.trace)) == str(s.kernel)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(scheduled(programs(largest=4, volume=40), 5))
def test_no_schedule_makes_a_race(case: tuple[Program, Schedule]) -> None:
    program, s = case
    assert not races(s.kernel, program.dims)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scheduled(programs(largest=6, volume=300), 6))
def test_machine_code_of_random_schedules(case: tuple[Program, Schedule]) -> None:
    """Some schedules make no code (a vectorized loop inside another, lanes that are not a power of two); the others are right."""
    program, s = case
    try:
        found = native(program, s.kernel, threads=True)
    except CodegenError:
        return
    for got, want in zip(found, expected(program), strict=True):
        program.same(got, want)


# ---------------------------------------------------------------- what each step makes


def matmul(n: int = 6) -> Schedule:
    a, b = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B")
    k = te.reduce_axis(n, "k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], k), "C")
    return Schedule(lower("matmul", [a, b], [c]))


def body(s: Schedule) -> str:
    return str(s.kernel.body)


def test_split_guards_the_rest() -> None:
    s = matmul()
    assert s.split("C.i", 4) == ("C.i.o", "C.i.i")
    assert "for C.i.o in 0..2 {\n  for C.i.i in 0..4 {" in body(s)
    assert "if C.i.i + C.i.o * 4 < 6 {" in body(s)


def test_partition_removes_the_guard_from_the_first_part() -> None:
    s = matmul()
    outer, _ = s.split("C.i", 4)
    assert s.partition(outer, 1) == ("C.i.o", "C.i.o.t")
    assert "if true {" in body(s)
    s.clean()
    assert "if" not in body(s) and nest_at(s.kernel, "C.i.i.t") == ["C.i.i.t", "C.j.t", "C.k.t"]
    assert editing.find_loop(s.kernel, "C.i.i").extent == 4 and editing.find_loop(s.kernel, "C.i.i.t").extent == 2


def test_fuse_and_reorder() -> None:
    s = matmul()
    s.reorder("C.k", "C.i")
    assert nest_at(s.kernel, "C.k") == ["C.k", "C.j", "C.i"]
    assert s.fuse("C.k", "C.j") == "C.k_j"
    assert "C[C.i, C.k_j % 6] += A[C.i, C.k_j // 6] * B[C.k_j // 6, C.k_j % 6]" in body(s)


def test_a_product_in_registers() -> None:
    """The steps of a tiled product; the accumulators are cleared, updated and copied inside one tile of the result."""
    s = matmul(8)
    s.cache_write("C", "acc")
    i, rows = s.split("C.0", 2)
    j, lanes = s.split("C.1", 4)
    s.reorder(i, j, rows, lanes)
    s.compute_at("acc", j, "register")
    s.reorder("C.k", "C.i", "C.j")
    s.vectorize(lanes)
    s.unroll(rows)
    s.parallel(i)
    s.clean()
    assert str(s.kernel.body) == (
        "parallel C.0.o in 0..4 {\n"
        "  for C.1.o in 0..2 {\n"
        "    alloc acc: float32[2, 4] register\n"
        "    for C.init.i in 0..2 {\n"
        "      for C.init.j in 0..4 {\n"
        "        acc[C.init.i, C.init.j] = 0.0f\n"
        "      }\n"
        "    }\n"
        "    for C.k in 0..8 {\n"
        "      for C.i in 0..2 {\n"
        "        for C.j in 0..4 {\n"
        "          acc[C.i, C.j] += A[C.0.o * 2 + C.i, C.k] * B[C.k, C.1.o * 4 + C.j]\n"
        "        }\n"
        "      }\n"
        "    }\n"
        "    unrolled C.0.i in 0..2 {\n"
        "      vectorized C.1.i in 0..4 {\n"
        "        C[C.0.i + C.0.o * 2, C.1.i + C.1.o * 4] = acc[C.0.i, C.1.i]\n"
        "      }\n"
        "    }\n"
        "  }\n"
        "}"
    )
    assert str(s.trace[4]) == 's.compute_at("acc", "C.1.o", scope="register")'


def test_rfactor_splits_a_fold_into_lanes() -> None:
    x = te.placeholder((100,), name="x")
    k = te.reduce_axis(100, "k")
    s = Schedule(lower("total", [x], [te.compute((), lambda: te.sum(x[k], k), "t")]))
    assert s.rfactor("t", "t.k", 8) == "t.p"
    assert "t.p[t.p.lane] += x[t.k.o * 8 + t.p.lane]" in body(s) and "t[] += t.p[t.lane]" in body(s)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("step", "arguments", "why"),
    [
        ("split", ("C.x", 2), "there is no loop `C.x`"),
        ("split", ("C.i", 0), "factor 0 is not positive"),
        ("reorder", ("C.i", "C.init.i"), "is not in one perfect nest with"),
        ("reorder", ("C.i", "C.i"), "each once"),
        ("reorder", (), "each once"),
        ("fuse", ("C.i", "C.k"), "`C.k` does not stand directly inside `C.i`"),
        ("partition", ("C.i", 7), "cannot prove that 7 lies between 0 and the extent of `C.i`, 6"),
        ("partition", ("C.i", -1), "cannot prove that -1"),
        ("set_kind", ("C.k", "parallel"), "iterations of `C.k` may touch the same element of `C`"),
        ("set_kind", ("C.k", "vectorized"), "iterations of `C.k` may touch the same element of `C`"),
        ("set_kind", ("C.i", "sideways"), "unknown loop kind"),
        ("compute_at", ("C", "C.init.i"), "`C` is a parameter"),
        ("compute_at", ("D", "C.i"), "there is no buffer `D`"),
        ("cache_read", ("C", "C.i", "c"), "`C` is written where the copy would be read"),
        ("cache_read", ("A", "C.init.i", "a"), "`A` is not read there"),
        ("cache_read", ("A", "C.i", "a", "attic"), "unknown scope `attic`"),
        ("precompute", ("C", "c"), "`C` is written"),
        ("precompute", ("A", "a"), "nothing is computed from elements of `A` alone"),
        ("relayout", ("A", "(b,a)"), "`A` is a parameter"),
        ("set_scope", ("A", "register"), "`A` is a parameter"),
        ("rfactor", ("C", "C.i", 4), "`C.i` is not a reduction loop of `C`"),
        ("rfactor", ("C", "C.k", 0), "number of lanes 0 is not positive"),
    ],
    ids=str,
)
def test_refusals(step: str, arguments: tuple[Any, ...], why: str) -> None:
    s = matmul()
    before = str(s)
    with pytest.raises(ScheduleError) as found:
        s.apply(step, *arguments)
    assert why in found.value.why and "for C.i in 0..6" in found.value.where
    assert str(s) == before and not s.trace


def test_unknown_step() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule primitive `tensorise`"):
        matmul().apply("tensorise")


def test_a_fold_may_be_vectorized_where_that_is_asked_for() -> None:
    s = matmul()
    s.vectorize("C.k", reassociate=True)
    assert "vectorized C.k in 0..6" in body(s)
    with pytest.raises(ScheduleError, match="the parallel loop `C.j` would stand inside"):
        t = matmul()
        t.vectorize("C.i")
        t.parallel("C.j")


def test_loops_of_different_kinds_do_not_fuse() -> None:
    s = matmul()
    s.parallel("C.i")
    with pytest.raises(ScheduleError, match="`C.i` is parallel, `C.j` is serial"):
        s.fuse("C.i", "C.j")


def test_threads_must_not_share_a_fused_element() -> None:
    s = matmul()
    s.reorder("C.i", "C.k", "C.j")
    fused = s.fuse("C.i", "C.k")
    with pytest.raises(ScheduleError, match="may touch the same element of `C`"):
        s.parallel(fused)


def test_loop_carried_values_keep_their_order() -> None:
    n = te.var("n")
    x = te.placeholder((n, n), "int32", "x")
    add = te.sum(x[0, 0], te.reduce_axis(1)).attr[0]
    prefix = te.extern(
        ((n, n), "int32"),
        [x],
        lambda ins, outs: loop(
            "i", n, lambda i: loop("j", n, lambda j: Accumulate(outs[0], (i, j), ins[0][i, j] + outs[0][i, j - 1], add))
        ),
        "prefix",
    )
    s = Schedule(lower("prefix", [x], [prefix]))
    with pytest.raises(ScheduleError, match="may touch the same element of `prefix`"):
        s.parallel("j")
    s.reorder("j", "i")  # each row's values still follow each other
    s.parallel("i")


def test_a_stage_moves_only_to_all_of_its_readers() -> None:
    x = te.placeholder((4,), name="x")
    k = te.reduce_axis(4, "k")
    total = te.compute((), lambda: te.sum(x[k], k), "total")
    first, second = te.compute((4,), lambda i: x[i] + total[()], "first"), te.compute((4,), lambda i: x[i] * total[()], "second")
    s = Schedule(lower("both", [x], [first, second]))
    with pytest.raises(ScheduleError, match="`total` is also read outside of loop `first.i`"):
        s.compute_at("total", "first.i")
    with pytest.raises(ScheduleError, match="loop `total.k` is one of those that compute `total`"):
        s.compute_at("total", "total.k")
