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
from tcomp.schedules.cost.cpu import estimate
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, compile_kernel
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native

SKYLAKE = CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512 -l2=1M -l3=32M")


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
    return [x.non_temporal for x in walk(kernel.body) if isinstance(x, Store)]


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


def test_the_model_counts_no_fetch() -> None:
    p = addition(1 << 12, 1 << 10)
    s = cpu.schedule(lower("p", p.inputs, p.outputs), SKYLAKE)
    plain = Schedule(lower("p", p.inputs, p.outputs))
    plain.vectorize(plain.split("C.j", 16)[1])
    moved = [estimate(x.kernel, SKYLAKE).counts["bytes.memory"] for x in (s, plain)]
    assert moved[0] / moved[1] == pytest.approx(3 / 4, rel=0.01)
