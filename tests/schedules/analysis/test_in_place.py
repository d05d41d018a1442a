"""In-place buffer reuse: proved where it holds, refused where it does not, and what runs so computes the same."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ir import te
from tcomp.ir.expr import as_expr, evaluate_int
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import PARALLEL, SERIAL, VECTORIZED, Buffer, Kernel, Stmt, block, hoist_temporaries, loop, store
from tcomp.schedules.analysis import in_place
from tcomp.schedules.analysis.in_place import reusable_in_place
from tcomp.schedules.cpu.default import schedule
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tests.codegen.jit import HOST, compile_kernel
from tests.schedules.programs import Program, bound, programs
from tests.schedules.running import POOL, expected

N = 24
X, Y = Buffer("X", "float32", (N,)), Buffer("Y", "float32", (N,))


def over(body: Stmt) -> bool:
    pairs = reusable_in_place(Kernel("k", (X, Y), (Y,), (), body))
    assert pairs in ([], [(X, Y)])
    return bool(pairs)


@pytest.mark.parametrize(
    ("read", "orders"),
    [
        (lambda i: i, {SERIAL, PARALLEL, VECTORIZED}),
        (lambda i: i + 1, {SERIAL}),  # not written yet
        (lambda i: i - 1, set()),
        (lambda i: N - 3 - i, set()),
    ],
    ids=["same", "next", "last", "reversed"],
)
def test_what_is_read_must_not_have_been_written_over(read, orders: set[str]) -> None:
    for kind in (SERIAL, PARALLEL, VECTORIZED):
        body = loop("i", N - 2, lambda i: store(Y, (i + 1,), X[read(i + 1)] * 2), kind)
        assert over(body) == (kind in orders), kind


def test_rows_may_be_read_several_times_before_they_are_written() -> None:
    def rows(kind: str, late: bool) -> Stmt:
        t = Buffer("T", "float32", (4,))
        return loop("r", 4, lambda r: block(
            loop("c", 6, lambda c: store(t, (r,), X[r * 6 + c])),
            loop("d", 6, lambda d: store(Y, (r * 6 + d,), X[r * 6 + d] - t[r])),
            *([loop("e", 6, lambda e: store(t, (r,), X[r * 6 + e]))] if late else []),
        ), kind)  # fmt: skip

    assert over(rows(SERIAL, False)) and over(rows(PARALLEL, False))
    assert not over(rows(SERIAL, True)) and not over(rows(PARALLEL, True))


def test_tiles_that_overlap_read_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile begins earlier, so that it is whole: some of its elements are computed twice, from what is no longer there."""

    def two(begin: int) -> Stmt:
        return block(*(loop("i", 10, lambda i, at=at: store(Y, (at + i,), X[at + i] * 2)) for at in (0, begin)))

    assert over(two(10)) and not over(two(7))
    with monkeypatch.context() as patch:
        patch.setattr(in_place, "model", None)  # isl is not asked about tiles that have nothing in common
        assert over(two(10))


def test_a_bound_that_is_looked_up_counts_as_read_late() -> None:
    count, out = Buffer("C", "int64", (N,)), Buffer("D", "int64", (N,))
    body = loop("i", N, lambda i: loop("j", count[i], lambda j: store(out, (i,), j)))
    assert reusable_in_place(Kernel("k", (count, out), (out,), (), body)) == []


def test_stores_that_bypass_the_caches_stay_elsewhere() -> None:
    s = Schedule(Kernel("k", (X, Y), (Y,), (), loop("i", N, lambda i: store(Y, (i,), X[i]))))
    assert reusable_in_place(s.kernel)
    s.stream("Y")
    assert not reusable_in_place(s.kernel)


def test_a_product_with_a_residual_is_written_over_it() -> None:
    """The default schedule, tails and all; what all rows read stays."""
    a, b, r, k = (
        te.placeholder((37, 37), name="a"),
        te.placeholder((37, 37), name="b"),
        te.placeholder((37, 37), name="r"),
        te.reduce_axis(37, "k"),
    )
    c = te.compute((37, 37), lambda i, j: te.sum(a[i, k] * b[k, j], k), "c")
    kernel = schedule(lower("p", [a, b, r], [te.compute((37, 37), lambda i, j: c[i, j] + r[i, j], "y")]), HOST).kernel
    found = [x.name for x, _ in reusable_in_place(kernel)]
    assert "r" in found and "b" not in found


def test_softmax_is_computed_in_place() -> None:
    x, k, j = te.placeholder((19, 45), name="x"), te.reduce_axis(45, "k"), te.reduce_axis(45, "j")
    largest = te.compute((19,), lambda i: te.max(x[i, k], k), "largest")
    total = te.compute((19,), lambda i: te.sum(te.exp(x[i, j] - largest[i]), j), "total")
    y = te.compute((19, 45), lambda i, j: te.exp(x[i, j] - largest[i]) / total[i], "y")
    kernel = schedule(lower("p", [x], [y]), HOST).kernel
    assert [(a.name, b.name) for a, b in reusable_in_place(kernel)] == [("x", "y")]


def run_over(program: Program, kernel: Kernel, source: Buffer, output: Buffer, natively: bool) -> list[np.ndarray]:
    """The results, where `output` has the memory of `source`."""
    arrays = [
        program.arrays()[t] if t in program.inputs else np.zeros(program.shape(t), t.dtype) for t in (*program.inputs, *program.outputs)
    ]
    views = bound(kernel, arrays, program.dims)
    views[output] = views[source]
    if natively:
        extended, temporaries = hoist_temporaries(kernel)
        places = [np.zeros([evaluate_int(as_expr(d), program.dims) for d in b.shape], b.dtype) for b in temporaries]
        sizes = [program.dims[v] for v in kernel.scalars]
        compile_kernel(extended, HOST, [(source, output)])(*views.values(), *places, *sizes, pool=ctypes.addressof(POOL))
    else:
        run_kernel(kernel, views, program.dims, shuffle=1, garbage=True)
    return [views[b].reshape(program.shape(t)) for b, t in zip(kernel.outputs, program.outputs, strict=True)]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.one_of(programs(), programs(largest=60, volume=4000)))
def test_results_are_the_same_over_an_input(program: Program) -> None:
    kernel = schedule(lower("program", program.inputs, program.outputs), HOST).kernel
    for pair in reusable_in_place(kernel):
        for natively in (False, True):
            for got, want in zip(run_over(program, kernel, *pair, natively), expected(program), strict=True):
                program.same(got, want)
