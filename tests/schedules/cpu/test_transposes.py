"""Operands read across their rows: tiles transposed in registers, at odd sizes, for narrow and wide vectors and elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.ir import te
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native

SKYLAKE = CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512")
HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell")
ARM = CpuTarget.parse("cpu -march=aarch64 -mcpu=neoverse-n1")
TARGETS = [t for t in (HOST, SKYLAKE, HASWELL) if t.runs_on(HOST)]


def matrix(rows: int, columns: int, dtype: str) -> Program:
    a, b = te.placeholder((rows, columns), dtype, "A"), te.placeholder((columns,), dtype, "B")
    c = te.placeholder((columns, rows), dtype, "C")
    return Program((a, b, c), (te.compute((columns, rows), lambda i, j: a[j, i] * b[i] + c[i, j], name="R"),), {})


def channels_last(rows: int, columns: int, dtype: str) -> Program:
    a = te.placeholder((2, rows, 3, columns), dtype, "A")
    return Program((a,), (te.compute((2, 3, columns, rows), lambda n, h, w, c: te.maximum(a[n, c, h, w], 0), name="R"),), {})


def blocked(rows: int, columns: int, dtype: str) -> Program:
    a = te.placeholder((2 * 16, columns), dtype, "A")
    return Program((a,), (te.compute((2, columns, 16), lambda c, w, i: a[c * 16 + i, w], name="R"),), {})


def both_ways(rows: int, columns: int, dtype: str) -> Program:
    a, b = te.placeholder((rows, columns), dtype, "A"), te.placeholder((rows, columns), dtype, "B")
    return Program((a, b), (te.compute((columns, rows), lambda i, j: a[j, i] + b[j, i], name="R"),), {})


def symmetric(rows: int, columns: int, dtype: str) -> Program:
    a = te.placeholder((rows, rows), dtype, "A")
    return Program((a,), (te.compute((rows, rows), lambda i, j: a[j, i] + a[i, j], name="R"),), {})


def scores(rows: int, columns: int, dtype: str) -> Program:
    """The second operand of the product lies across its panels."""
    a, b, k = te.placeholder((9, columns), dtype, "A"), te.placeholder((rows, columns), dtype, "B"), te.reduce_axis(columns, "k")
    return Program((a, b), (te.compute((9, rows), lambda i, j: te.sum(a[i, k] * b[j, k], axis=k), name="R"),), {})


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from([matrix, channels_last, blocked, both_ways, symmetric, scores]), st.integers(1, 100), st.integers(1, 70),
    st.sampled_from(["float32", "float32", "float64", "int8", "float16", "bool"]), st.sampled_from(TARGETS),
)  # fmt: skip
def test_the_meaning_stays(make: Callable[[int, int, str], Program], rows: int, columns: int, dtype: str, target: CpuTarget) -> None:
    if dtype == "bool" and make is not blocked:
        dtype = "uint8"
    p = make(rows, columns, dtype)
    s = cpu.schedule(lower("p", p.inputs, p.outputs), target)
    for found in (
        interpreted(p, s.kernel, shuffle=1),
        native(p, s.kernel, target=target),
        native(p, s.kernel, target=target, threads=True),
    ):
        for got, want in zip(found, expected(p), strict=True):
            p.same(got, want)


@pytest.mark.parametrize("target", [SKYLAKE, HASWELL, ARM], ids=str)
@pytest.mark.parametrize("make", [matrix, channels_last, blocked, both_ways, scores])
def test_nothing_is_gathered(make: Callable[[int, int, str], Program], target: CpuTarget) -> None:
    p = make(64, 96, "float32")
    s = cpu.schedule(lower("p", p.inputs, p.outputs), target)
    text = emit_kernel(s.kernel, target)
    assert "gather" not in text and "shufflevector" in text
    assert not s.fallbacks


def test_tiles_that_change_are_turned_again() -> None:
    """Both copies of the loop use the same place on the stack."""
    n = HOST.lanes(32)
    a = te.placeholder((2, n, n), name="A")
    p = Program((a,), (te.compute((2, n), lambda t, j: a[t, j, 0] + a[t, j, n - 1], name="R"),), {})
    s = Schedule(lower("p", p.inputs, p.outputs))
    s.cache_read("A", "R.t", "T", "register")
    s.unroll("R.t")
    s.vectorize("R.j")
    assert emit_kernel(s.kernel, HOST).count("shufflevector") >= 2 * n
    for found in (interpreted(p, s.kernel), native(p, s.kernel)):
        for got, want in zip(found, expected(p), strict=True):
            p.same(got, want)
