"""Prefetching: hints that change nothing, where they stand, and what is refused."""

from __future__ import annotations

import pytest

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.errors import IRError, ParseError, ScheduleError
from tcomp.ir import te
from tcomp.ir.expr import as_expr
from tcomp.ir.loops import Block, Buffer, For, Kernel, Prefetch, walk
from tcomp.ir.text.parser import parse_kernel
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules import Schedule
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native


def product(m: int, k: int, n: int) -> Program:
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis(k, "k")
    return Program((a, b), (te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], r), name="C"),), {})


def hints(kernel: Kernel) -> list[str]:
    return [str(s).strip() for s in walk(kernel.body) if isinstance(s, Prefetch)]


def test_hints_stand_before_the_reads_and_change_nothing() -> None:
    p = product(6, 20, 37)
    s = Schedule(lower("p", p.inputs, p.outputs))
    s.split("C.j", 16)
    s.reorder("C.j.o", "C.k", "C.i", "C.j.i")
    s.unroll("C.i")
    s.vectorize("C.j.i")
    s.prefetch("B", "C.k", 7)
    assert hints(s.kernel) == ["prefetch B[C.k + 7, C.j.o * 16]"]
    assert str(parse_kernel(str(s.kernel))) == str(s.kernel)
    agree(p, s.kernel)  # the last hints point behind the end
    assert emit_kernel(s.kernel, HOST).count("call void @llvm.prefetch") == 1


def test_one_hint_for_each_vector() -> None:
    p = product(6, 20, 64)
    s = Schedule(lower("p", p.inputs, p.outputs))
    s.split("C.j", 16)
    s.reorder("C.k", "C.i", "C.j.o", "C.j.i")
    s.unroll("C.j.o")
    s.vectorize("C.j.i")
    s.prefetch("B", "C.k", 2)
    assert hints(s.kernel) == ["prefetch B[C.k + 2, C.j.o.p * 16]"]
    assert emit_kernel(s.kernel, HOST).count("call void @llvm.prefetch") == 4


@pytest.mark.parametrize(("level", "written", "locality"), [(1, "", 3), (2, " in l2", 2), (3, " in l3", 1)])
def test_a_hint_is_for_a_cache(level: int, written: str, locality: int) -> None:
    p = product(6, 20, 37)
    s = Schedule(lower("p", p.inputs, p.outputs))
    s.prefetch("B", "C.k", 7, level=level)
    assert hints(s.kernel) == [f"prefetch B[C.k + 7, C.j]{written}"]
    assert str(parse_kernel(str(s.kernel))) == str(s.kernel)
    agree(p, s.kernel)
    assert f", i32 0, i32 {locality}, i32 1)" in emit_kernel(s.kernel, HOST)


def test_caches_that_there_are_not() -> None:
    p, x = product(6, 20, 64), Buffer("x", "float32", (4,))
    s = Schedule(lower("p", p.inputs, p.outputs))
    for level in (0, 4):
        with pytest.raises(ScheduleError, match=f"a cache of level {level}"):
            s.prefetch("B", "C.k", 2, level=level)
        with pytest.raises(IRError, match=f"no cache of the level {level}"):
            verify_kernel(Kernel("k", (x,), (), (), Block((Prefetch(x, (as_expr(0),), level),))))
    s.prefetch("B", "C.k", 2, level=2)
    with pytest.raises(ParseError, match="a cache is called l1, l2 or l3"):
        parse_kernel(str(s.kernel).replace(" in l2", " in l4"))


def test_default_schedules_prefetch_weights_that_no_cache_of_a_core_holds() -> None:
    target = CpuTarget.parse("cpu -mcpu=skylake-avx512")
    for size, far in ((64, False), (1024, True)):
        p = product(32, size, size)
        assert bool(hints(cpu.schedule(lower("p", p.inputs, p.outputs), target).kernel)) == far


def test_the_last_rows_do_not_ask_for_the_next_ones() -> None:
    """Tiles of rows ask for the rows of the next one; the nest of the rows that are left, of which it is not known how many, does not."""
    n = te.var("n", 1, 1 << 20)
    a, b, r = te.placeholder((n, 3072), name="A"), te.placeholder((3072, 768), name="B"), te.reduce_axis(3072, "k")
    c = te.compute((n, 768), lambda i, j: te.sum(a[i, r] * b[r, j], r), name="C")
    kernel = cpu.schedule(lower("p", [a, b], [c]), CpuTarget.parse("cpu -march=x86_64 -mcpu=znver4 -cores=1")).kernel
    asked = {s.var.name: {x.buffer.name for x in walk(s) if isinstance(x, Prefetch)} for s in walk(kernel.body) if isinstance(s, For)}
    assert asked["C.0.o"] == {"A", "B.packed"} and asked["C.0.o.t"] == {"B.packed"}


def test_the_iterations_of_an_inner_loop_ask_for_all_of_the_next_panel() -> None:
    p = product(15, 20, 64)
    s = Schedule(lower("p", p.inputs, p.outputs))
    s.split("C.j", 16)
    s.split("C.i", 3)
    s.split("C.k", 4)
    s.reorder("C.j.o", "C.i.o", "C.k.o", "C.k.i", "C.i.i", "C.j.i")
    s.unroll("C.i.i")
    s.vectorize("C.j.i")
    s.prefetch("B", "C.j.o", 1, at="C.k.o")
    assert hints(s.kernel) == ["prefetch B[min(C.i.o * 5 + C.k.o, 19), C.j.o * 16 + 16]"]
    s.prefetch("B", "C.j.o", 1, at="C.i.o")
    assert "prefetch B[C.i.o * 4 + C.i.o.p, C.j.o * 16 + 16]" in hints(s.kernel)  # four lines together
    with pytest.raises(ScheduleError, match="`C.j.o` is not inside `C.k.o`"):
        s.prefetch("B", "C.k.o", 1, at="C.j.o")
    agree(p, s.kernel)


def test_what_is_written_is_asked_for_as_well_and_once_for_each_line() -> None:
    p = product(15, 64, 48)
    s = Schedule(lower("p", p.inputs, p.outputs))
    s.split("C.j", 16)
    s.split("C.i", 3)
    s.reorder("C.j.o", "C.i.o", "C.k", "C.i.i", "C.j.i", reassociate=True)
    s.unroll("C.i.i")
    s.vectorize("C.j.i")
    s.prefetch("C", "C.i.o", 1, at="C.k")  # three rows of a vector
    s.prefetch("A", "C.i.o", 1, at="C.k")  # three rows of four lines
    assert hints(s.kernel) == [
        "prefetch A[C.i.o * 3 + min(11, C.k // 5) % 3 + 3, min(11, C.k // 5) // 3 * 16]",
        "prefetch C[C.i.o * 3 + min(2, C.k // 21) + 3, C.j.o * 16]",
    ]
    agree(p, s.kernel)


def test_each_line_under_a_window_is_asked_for_once() -> None:
    x, k = te.placeholder((8, 50, 16), name="x"), [te.reduce_axis(n, name=f"k{i}") for i, n in enumerate((3, 3, 16))]
    p = Program((x,), (te.compute((6, 48), lambda i, j: te.sum(x[i + k[0], j + k[1], k[2]], k), name="y"),), {})
    s = Schedule(lower("p", p.inputs, p.outputs))
    s.split("y.j", 4)
    s.reorder("y.i", "y.j.o", "y.k0", "y.k1", "y.k2", "y.j.i", reassociate=True)
    s.unroll("y.j.i")
    for at in ("y.k2", "y.k1", "y.k0"):
        s.prefetch("x", "y.j.o", 1, at=at)
    assert hints(s.kernel) == [  # of a row six pixels, a line each, of which two are under the window already
        "prefetch x[y.i + y.k0, y.j.o * 4 + y.k0.p + 6, 0]",
        "prefetch x[y.i + min(y.k0 * 6 + y.k1 * 2 + y.k1.p, 11) // 4, y.j.o * 4 + min(y.k0 * 6 + y.k1 * 2 + y.k1.p, 11) % 4 + 6, 0]",
        "prefetch x[y.i + y.k0, y.j.o * 4 + (y.k1 * 16 + y.k2) // 12 + 6, 0]",
    ]
    with pytest.raises(ScheduleError, match="depends on a loop inside it"):
        s.prefetch("x", "y.i", 1, at="y.j.o", lines=4)  # 50 lines in 12 iterations
    s.prefetch("x", "y.i", 1, at="y.j.o")
    assert "prefetch x[y.i + 3, min(y.j.o * 5 + y.j.o.p, 49), 0]" in hints(s.kernel)  # of three rows one is new
    agree(p, s.kernel)


def agree(p: Program, kernel: Kernel) -> None:
    for got, want in zip(native(p, kernel), expected(p), strict=True):
        p.same(got, want)
    for got, want in zip(interpreted(p, kernel), expected(p), strict=True):
        p.same(got, want)


@pytest.mark.parametrize(
    ("buffer", "loop", "distance", "why"),
    [
        ("B", "C.k", 0, "the distance 0"),
        ("B", "C.i", 2, "nothing of `B` is read in another place at every iteration of `C.i`"),
        ("A", "C.i", 2, "what `C.i` reads of `A` depends on a loop inside it"),
        ("D", "C.k", 2, "there is no buffer `D`"),
        ("B", "C.q", 2, "there is no loop `C.q`"),
    ],
)
def test_refused(buffer: str, loop: str, distance: int, why: str) -> None:
    p = product(6, 20, 64)
    with pytest.raises(ScheduleError, match=why):
        Schedule(lower("p", p.inputs, p.outputs)).prefetch(buffer, loop, distance)


def test_a_hint_names_an_element() -> None:
    x = Buffer("x", "float32", (4, 4))
    with pytest.raises(IRError, match="no element of `x` is prefetched"):
        verify_kernel(Kernel("k", (x,), (), (), Block((Prefetch(x, (as_expr(0),)),))))
