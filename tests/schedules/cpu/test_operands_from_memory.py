"""Operands that come from memory are prefetched, at odd sizes too; small ones are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tcomp.ir import te
from tcomp.ir.expr import Expr
from tcomp.ir.loops import Kernel, Prefetch, walk
from tcomp.ops.reduction import layer_norm, softmax_of
from tcomp.schedules import Schedule
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native

SMALL_CACHES = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell -l1=16K -l2=16K -l3=64K")  # what is checked natively must not take long


def elementwise(*shape: int) -> Program:
    a, b = te.placeholder(shape, name="a"), te.placeholder(shape, name="b")
    return Program((a, b), (te.compute(shape, lambda *i: a[i] * 2 + b[i], name="r"),), {})


def softmax(*shape: int) -> Program:
    a = te.placeholder(shape, "float64", "a")
    return Program((a,), (softmax_of(a, [len(shape) - 1]),), {}, exact=False)


def norm(*shape: int) -> Program:
    a, s, b = (te.placeholder(x, "float64", name) for x, name in ((shape, "a"), (shape[-1:], "s"), (shape[-1:], "b")))
    return Program((a, s, b), layer_norm(a, s, b, len(shape) - 1, 1e-5)[:1], {}, exact=False)


def windows(pad: int, *shape: int) -> Program:
    """Depthwise, lanes along rows of the image: of the last two axes, windows of 3 x 3."""
    c, h, w = shape
    a, k = te.placeholder(shape, name="a"), te.placeholder((c, 3, 3), name="k")
    i, j = te.reduce_axis(3, "i"), te.reduce_axis(3, "j")

    def pixel(n: Expr, y: Expr, x: Expr) -> Expr:
        inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
        return te.select(inside, a[n, y, x], 0.0) if pad else a[n, y, x]

    out = (c, h - 2 + 2 * pad, w - 2 + 2 * pad)
    r = te.compute(out, lambda n, y, x: te.sum(pixel(n, y + i - pad, x + j - pad) * k[n, i, j], [i, j]), name="r")
    return Program((a, k), (r,), {}, exact=False)


def product(m: int, k: int, n: int) -> Program:
    """`a` comes row by row; `b` stays."""
    a, b = te.placeholder((m, k), "float64", "a"), te.placeholder((k, n), "float64", "b")
    r = te.reduce_axis(k, "k")
    return Program((a, b), (te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], r), name="r"),), {}, exact=False)


def asked(kernel: Kernel) -> list[str]:
    return sorted({s.buffer.name for s in walk(kernel.body) if isinstance(s, Prefetch)})


@pytest.mark.skipif(not SMALL_CACHES.runs_on(HOST), reason="needs an x86 processor with AVX2")
@pytest.mark.parametrize(
    ("program", "operands"),
    [
        (elementwise(40_000), ["a", "b"]), (elementwise(40_003), ["a", "b"]), (elementwise(700), []), (softmax(100, 128), ["a"]),
        (softmax(67, 131), ["a"]), (softmax(4, 128), []), (norm(100, 128), ["a"]), (norm(90, 77), ["a"]), (softmax(3, 8192), []),
        (windows(0, 3, 130, 130), ["a", "r"]), (windows(0, 2, 131, 137), ["a", "r"]), (windows(0, 3, 20, 21), []),
        (windows(1, 3, 129, 131), ["a", "r"]), (windows(1, 3, 128, 128), ["a", "r"]), (windows(1, 2, 19, 17), []),
        (product(301, 60, 8), []), (product(301, 60, 24), ["b"]), (product(10, 60, 8), []),
    ],
    ids=lambda x: "",
)  # fmt: skip
def test_what_is_asked_for(program: Program, operands: list[str]) -> None:
    asks(program, operands, cpu.schedule(lower("p", program.inputs, program.outputs), SMALL_CACHES))


@pytest.mark.skipif(not SMALL_CACHES.runs_on(HOST), reason="needs an x86 processor with AVX2")
@pytest.mark.parametrize(("columns", "steps", "operands"), [(8, 1, ["a"]), (24, 1, ["b"]), (24, 4, ["a", "b", "r"])])
def test_the_next_tile_is_asked_for_where_steps_leave_time(columns: int, steps: int, operands: list[str]) -> None:
    """One step of a product has too few multiply-adds for the addresses of two operands' next lines; several steps have enough."""
    p, wide = product(301, 60, columns), replace(SMALL_CACHES, cpu="znver3")
    asks(p, operands, cpu.schedule(lower("p", p.inputs, p.outputs), wide, Knobs({"r.acc.unroll": steps})))


def asks(program: Program, operands: list[str], s: Schedule) -> None:
    """Whether the schedule of a program prefetches these operands, and computes what the program means."""
    assert asked(s.kernel) == operands
    runs = [native(program, s.kernel, target=SMALL_CACHES, threads=threads) for threads in (False, True)]
    for found in (interpreted(program, s.kernel, shuffle=1), *runs):
        for got, want in zip(found, expected(program), strict=True):
            program.same(got, want)
