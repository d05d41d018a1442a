"""Products whose weights no near cache holds: panels that are asked for ahead, sums in blocks of the folds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tcomp.ir import te
from tcomp.ir.expr import Dim
from tcomp.ir.loops import Kernel, Prefetch, walk
from tcomp.schedules.cpu.default import schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget
from tests.schedules.programs import Program
from tests.schedules.running import expected, interpreted, native

HASWELL = "cpu -march=x86_64 -mcpu=haswell"


def product(m: Dim, k: int, n: int) -> Program:
    a, b, c = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B"), te.placeholder((n,), name="c")
    r = te.reduce_axis(k, "k")
    total = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], r), name="T")
    return Program((a, b, c), (te.compute((m, n), lambda i, j: te.maximum(total[i, j] + c[j], 0.0), name="C"),), {})


def convolution(size: int, channels: int, outputs: int) -> Program:
    x, w = te.placeholder((size + 2, size + 2, channels), name="x"), te.placeholder((3, 3, channels, outputs), name="w")
    p, q, c = te.reduce_axis(3, "p"), te.reduce_axis(3, "q"), te.reduce_axis(channels, "c")
    return Program(
        (x, w), (te.compute((size, size, outputs), lambda i, j, o: te.sum(x[i + p, j + q, c] * w[p, q, c, o], [p, q, c]), name="y"),), {}
    )


def scheduled(p: Program, l2: str, **decisions: bool) -> Schedule:
    return schedule(lower("p", p.inputs, p.outputs), CpuTarget.parse(f"{HASWELL} -l2={l2} -cores=1"), Knobs(decisions))


def hints(kernel: Kernel) -> list[str]:
    return [str(s).strip() for s in walk(kernel.body) if isinstance(s, Prefetch)]


@pytest.mark.parametrize(
    ("p", "l2", "blocks"),
    [
        (product(30, 16, 200), "48K", False),
        (product(37, 48, 70), "40K", False),
        (product(40, 96, 64), "80K", True),
        (product(29, 120, 100), "96K", True),
        (convolution(5, 24, 70), "96K", True),
        (convolution(6, 40, 100), "160K", True),
    ],
)
def test_panels_are_asked_for_ahead(p: Program, l2: str, blocks: bool) -> None:
    s = scheduled(p, l2)
    assert not s.kernel.notes and hints(s.kernel)
    assert any(step.primitive == "promote" for step in s.trace) == blocks
    assert str(Schedule(lower("p", p.inputs, p.outputs)).replay(s.trace)) == str(s.kernel)
    for run in (interpreted, native):
        for got, want in zip(run(p, s.kernel), expected(p), strict=True):
            p.same(got, want)


@pytest.mark.parametrize("rows", [1, 5, 12, 30])
def test_panels_of_any_number_of_rows(rows: int) -> None:
    """Every eighth tile of rows asks for the same part of the next panel."""
    m = te.var("m", 1, 64)
    p = replace(product(m, 48, 200), dims={m: rows})
    s = scheduled(p, "64K")
    assert not s.kernel.notes and all("% 8" in hint for hint in hints(s.kernel)) and hints(s.kernel)
    for run in (interpreted, native):
        for got, want in zip(run(p, s.kernel), expected(p), strict=True):
            p.same(got, want)


def test_near_operands_are_not_asked_for() -> None:
    for p in (product(40, 24, 64), convolution(5, 8, 20)):
        assert not hints(scheduled(p, "1M").kernel)


def test_operands_that_differ_between_rows_have_no_panels() -> None:
    """As the weights of a transposed convolution, whose rows and columns alternate between them."""
    x, w, c = te.placeholder((6, 5, 24), name="x"), te.placeholder((24, 2, 2, 70), name="w"), te.reduce_axis(24, "c")
    y = te.compute((12, 10, 70), lambda i, j, o: te.sum(x[i // 2, j // 2, c] * w[c, i % 2, j % 2, o], c), name="y")
    s = scheduled(Program((x, w), (y,), {}), "48K")
    assert not s.kernel.notes


def test_panels_are_a_decision() -> None:
    p = product(40, 96, 64)
    s = scheduled(p, "80K", **{"B.panels": False, "B.packed.panels": False})
    assert not any(step.primitive == "promote" for step in s.trace)
