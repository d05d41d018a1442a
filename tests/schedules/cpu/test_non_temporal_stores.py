"""Stores that pass the caches by: a hint in the text and the trace, stores of machine code where they may be, and when default schedules ask."""

from __future__ import annotations

import numpy as np
import pytest

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.ir.loops import Kernel, Store, walk
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules import Schedule
from tcomp.schedules.analysis.in_place import reusable_in_place
from tcomp.schedules.cost.cpu import estimate
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.cpu.common import is_streamed, stream_bytes
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, compile_kernel
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native

SKYLAKE = CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512 -l2=1M -l3=32M")
HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell -l2=256K -l3=32M")


def addition(rows: int, columns: int) -> Program:
    a, b = te.placeholder((rows, columns), name="A"), te.placeholder((rows, columns), name="B")
    return Program((a, b), (te.compute((rows, columns), lambda i, j: a[i, j] + b[i, j], name="C"),), {})


def scheduled(p: Program, threads: bool = False) -> Schedule:
    s = Schedule(lower("p", p.inputs, p.outputs))
    lanes = HOST.lanes(32)
    if int(p.outputs[0].shape[1]) > lanes:
        s.vectorize(s.split("C.j", lanes, "peel")[1])
    else:
        s.vectorize(s.split("C.j", lanes)[1])
    if threads:
        s.parallel("C.i")
    s.stream("C")
    return s


def streamed(kernel: Kernel) -> list[bool]:
    return [x.streamed_above == 0 for x in walk(kernel.body) if isinstance(x, Store)]


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("columns", [64, 67, 5])
def test_a_hint_changes_nothing(columns: int, threads: bool) -> None:
    """Rows of 67 elements begin anywhere within a vector."""
    p = addition(9, columns)
    s = scheduled(p, threads)
    assert all(streamed(s.kernel)) and str(parse_kernel(str(s.kernel))) == str(s.kernel)
    assert str(Schedule(s.source).replay(s.trace)) == str(s.kernel)
    for found in (interpreted(p, s.kernel), native(p, s.kernel, threads=threads)):
        for got, want in zip(found, expected(p), strict=True):
            p.same(got, want)


@pytest.mark.parametrize("above", [0, 4 * 64 * 5, 1 << 40])
def test_the_size_decides_in_a_run(above: int) -> None:
    """With free rows, the code has both stores, and takes one of them by the bytes of the result."""
    n = te.var("n")
    a, b = te.placeholder((n, 64), name="A"), te.placeholder((n, 64), name="B")
    p = Program((a, b), (te.compute((n, 64), lambda i, j: a[i, j] + b[i, j], name="C"),), {n: 1})
    s = Schedule(lower("p", p.inputs, p.outputs))
    s.vectorize(s.split("C.j", HOST.lanes(32))[1])
    s.stream("C", above)
    assert (f"stream({above}) C" if above else "stream C") in str(s.kernel) and str(parse_kernel(str(s.kernel))) == str(s.kernel)
    assert str(Schedule(s.source).replay(s.trace)) == str(s.kernel)
    assert emit_kernel(s.kernel, HOST).count("!nontemporal") == 1
    for rows in (1, 5, 6, 9):
        sized = Program(p.inputs, p.outputs, {n: rows})
        for found in (interpreted(sized, s.kernel), native(sized, s.kernel, threads=True)):
            for got, want in zip(found, expected(sized), strict=True):
                p.same(got, want)


def test_machine_code() -> None:
    """Whole vectors are stored past the caches, tails are not; on x86 a fence stands behind them."""
    text = emit_kernel(scheduled(addition(9, 67)).kernel, HOST)
    assert text.count("!nontemporal") == 1
    assert text.count("call void @llvm.x86.sse.sfence()") == (HOST.arch == "x86_64")
    assert "!nontemporal" not in emit_kernel(scheduled(addition(9, 5)).kernel, HOST)
    p = addition(9, 64)
    assert "sfence" not in emit_kernel(lower("p", p.inputs, p.outputs), HOST)


def test_one_value_for_all_lanes() -> None:
    """It is broadcast before the branch between aligned and other stores, both of which take it."""
    a = te.placeholder((9,), name="A")
    p = Program((a,), (te.compute((9, 64), lambda i, j: a[i], name="C"),), {})
    for got, want in zip(native(p, scheduled(p).kernel), expected(p), strict=True):
        p.same(got, want)


@pytest.mark.parametrize("offset", [0, 4, 32, 60])
def test_unaligned_memory(offset: int) -> None:
    p = addition(4, 64)
    memory = np.zeros(4 * 64 * 4 + 128, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64 + offset
    out = memory[start : start + 4 * 64 * 4].view(np.float32).reshape(4, 64)
    a = np.arange(256, dtype=np.float32).reshape(4, 64)
    compile_kernel(scheduled(p).kernel)(a, a, out)
    np.testing.assert_array_equal(out, a + a)


def test_refused() -> None:
    p = addition(4, 4)
    s = Schedule(lower("p", p.inputs, p.outputs))
    with pytest.raises(ScheduleError, match="nothing is stored to `A`"):
        s.stream("A")


def test_default_schedules_stream_what_no_cache_holds() -> None:
    for rows, wanted in ((1 << 6, False), (1 << 12, True)):
        p = addition(rows, 1 << 10)
        s = cpu.schedule(lower("p", p.inputs, p.outputs), SKYLAKE)
        assert streamed(s.kernel) == [wanted]
    p = addition(1 << 10, 1 << 10)
    assert streamed(cpu.schedule(lower("p", p.inputs, p.outputs), SKYLAKE).kernel) == [False]
    assert streamed(cpu.schedule(lower("p", p.inputs, p.outputs), SKYLAKE, Knobs({"C.stream": True})).kernel) == [True]  # as a tuner found


def test_by_size_where_sizes_are_free() -> None:
    """The result of a run may then still take the memory of an input: that the store passes the caches by is not certain."""
    n = te.var("n")
    a, b = te.placeholder((n, 64), name="A"), te.placeholder((n, 64), name="B")
    s = cpu.schedule(lower("p", (a, b), (te.compute((n, 64), lambda i, j: a[i, j] + b[i, j], name="C"),)), SKYLAKE)
    assert [x.streamed_above for x in walk(s.kernel.body) if isinstance(x, Store)] == [stream_bytes(SKYLAKE)]
    assert len(reusable_in_place(s.kernel)) == 2


def test_lines_are_stored_whole() -> None:
    """Where a vector is half of a line, its other half has to follow at once: 16 results side by side, each of them in rows of its own,
    would be 16 lines of which a half is stored."""
    x = te.placeholder((1 << 12, 256), name="x")
    points = te.compute((16, 1 << 12, 256), lambda p, i, j: x[i, j] * te.cast(p, "float32"), name="y")
    kernel = lower("p", (x,), (points,))
    for target, wanted in ((SKYLAKE, True), (HASWELL, False)):
        s = Schedule(kernel)
        _, lanes = s.split("y.j", target.lanes(32))
        s.reorder("y.i", "y.j.o", "y.p", lanes)
        s.vectorize(lanes)
        assert is_streamed(s, s.kernel.outputs[0], target, Knobs()) is wanted
        s.reorder("y.p", "y.i", "y.j.o", lanes)
        assert is_streamed(s, s.kernel.outputs[0], target, Knobs())


def test_the_model_counts_no_fetch() -> None:
    p = addition(1 << 12, 1 << 10)
    s = cpu.schedule(lower("p", p.inputs, p.outputs), SKYLAKE)
    plain = Schedule(lower("p", p.inputs, p.outputs))
    plain.vectorize(plain.split("C.j", 16)[1])
    moved = [estimate(x.kernel, SKYLAKE).counts["bytes.memory"] for x in (s, plain)]
    assert moved[0] / moved[1] == pytest.approx(3 / 4, rel=0.01)
