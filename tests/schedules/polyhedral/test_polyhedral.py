"""The polyhedral scheduler on PolyBench's kernels: what it makes computes the same, and the loops that matter are parallel."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.polybench import BENCHMARKS
from tcomp.errors import ScheduleError
from tcomp.ir import expr as E, te
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Accumulate,
    Allocate,
    Buffer,
    For,
    Kernel,
    hoist_temporaries,
    loop,
    perfect,
    store,
    walk,
)
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules import Schedule
from tcomp.schedules.polyhedral import blocks, plan, polyhedral, polyhedral_or_not
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST, compile_kernel

TARGET = CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512 -cores=2")
WORTHLESS = {"trisolv"}  # small, and sequential unless sums are reassociated


def kinds(kernel: Kernel) -> set[str]:
    return {s.kind for s in walk(kernel.body) if isinstance(s, For)}


def scheduled(name: str, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int] | None = None) -> tuple[Kernel, Kernel]:
    monkeypatch.setattr(plan, "PARALLEL_INSTANCES", 1)
    benchmark = BENCHMARKS[name]
    kernel = benchmark.kernel(sizes or benchmark.sizes("mini"))
    s = polyhedral(kernel, TARGET, threads=2)
    verify_kernel(s.kernel)
    again = Schedule(kernel)
    again.replay(s.trace)
    assert str(again) == str(s)
    return kernel, s.kernel


@pytest.mark.parametrize("name", [n for n in BENCHMARKS if n not in WORTHLESS])
def test_polybench(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, made = scheduled(name, monkeypatch)
    assert kinds(made) & {PARALLEL, VECTORIZED} or name in ("deriche", "seidel-2d")  # this one is a single tile
    compare(name, kernel, made)


def compare(name: str, kernel: Kernel, made: Kernel, sizes: dict[str, int] | None = None) -> None:
    """What was made computes the same, in the interpreter and natively."""
    benchmark = BENCHMARKS[name]
    sizes = sizes or benchmark.sizes("mini")
    results = []
    for k, shuffle in ((kernel, None), (made, 1)):
        arrays = benchmark.arrays(sizes)
        with np.errstate(all="ignore"):
            run_kernel(k, dict(zip(k.buffers, arrays.values(), strict=True)), shuffle=shuffle)
        results.append(benchmark.results(arrays))
    for array in results[0]:
        np.testing.assert_array_equal(results[1][array], results[0][array])
    runnable, temporaries = hoist_temporaries(made)
    arrays = benchmark.arrays(sizes)
    compile_kernel(runnable, HOST)(*arrays.values(), *(np.zeros(b.shape, b.dtype) for b in temporaries))
    tolerance = 2e-3 if "float32" in {b.dtype for b in kernel.outputs} else 1e-7
    for array, value in benchmark.results(arrays).items():
        np.testing.assert_allclose(value, results[0][array], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["seidel-2d", "heat-3d", "jacobi-2d", "fdtd-2d", "adi"])
def test_stencils_in_time_are_parallel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PARALLEL in kinds(scheduled(name, monkeypatch, BENCHMARKS[name].sizes("large"))[1])


def test_a_stencil_of_short_regions_in_the_cache_runs_step_by_step() -> None:
    """Threads would meet every few microseconds, and there is nothing that tiles would keep in the cache."""
    benchmark = BENCHMARKS["jacobi-1d"]
    s = polyhedral(benchmark.kernel({"tsteps": 500, "n": 2000}), TARGET, threads=2)
    assert PARALLEL not in kinds(s.kernel)
    assert [x.extent for x in s.loops.values() if x.kind == SERIAL] == [
        500,
        248,
        248,
    ]  # masked vectors around: full ones are stored within cache lines


@pytest.mark.parametrize(("name", "n"), [("lu", 75), ("cholesky", 40)])
def test_steps_of_a_factorisation_in_blocks(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_STEPS", 8)
    kernel, made = scheduled(name, monkeypatch, {"n": n})
    compare(name, kernel, made, {"n": n})
    outermost = next(s for s in walk(made.body) if isinstance(s, For))
    assert (outermost.var.name, outermost.extent) == (blocks.BLOCK_LOOP, -(-n // 8))
    sums = [s.buffer for s in walk(outermost) if isinstance(s, Allocate)]
    assert sums
    assert {b.scope for b in sums} == {"register"}
    assert PARALLEL in kinds(made)


def test_few_steps_stay_as_they_are() -> None:
    benchmark = BENCHMARKS["lu"]
    s = polyhedral(benchmark.kernel({"n": (blocks.MIN_BLOCKS - 1) * blocks.BLOCK_STEPS}), TARGET, threads=2)
    assert blocks.BLOCK_LOOP not in s.loops


def test_rows_side_by_side_along_a_diagonal_of_varying_length() -> None:
    benchmark = BENCHMARKS["nussinov"]
    s = polyhedral(benchmark.kernel(benchmark.sizes("small")), TARGET, threads=1)
    assert any(x.kind == UNROLLED and x.extent == plan.JAM for x in s.loops.values())


def test_the_rows_of_a_product_are_accumulated_in_registers() -> None:
    benchmark = BENCHMARKS["gemm"]
    s = polyhedral(benchmark.kernel({"ni": 96, "nj": 96, "nk": 64}), TARGET, threads=2)
    nests = [perfect(x)[0] for x in walk(s.kernel.body) if isinstance(x, For)]
    tiles = [n[1:] for n in nests if [x.kind for x in n] == [SERIAL, UNROLLED, UNROLLED, VECTORIZED]]
    assert any(rows.extent * vectors.extent >= 8 and lanes.extent == 8 for rows, vectors, lanes in tiles)


@pytest.mark.parametrize("name", ["syrk", "syr2k"])
def test_operands_of_a_product_are_packed_along_its_lanes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduled(name, monkeypatch)[1]
    lanes = [x for x in walk(made.body) if isinstance(x, For) and x.kind == VECTORIZED]
    products = [(x.var, s) for x in lanes for s in walk(x.body) if isinstance(s, Accumulate) and s.reducer.name == "sum"]
    assert products
    for lane, s in products:
        assert not any(e.op == "const" and e.dtype == "float64" for e in E.walk(s.value))  # alpha is in the packed factor
        for r in E.reads(s.value):
            assert not any(lane in E.variables(i) for i in r.args[:-1])


def test_operands_that_cannot_be_precomputed_do_not_prevent_a_schedule() -> None:
    A, B, C = Buffer("A", "int8", (64, 64)), Buffer("B", "float64", (64, 64)), Buffer("C", "float64", (64, 64))
    add = te.sum(te.placeholder((1,), "float64")[0], te.reduce_axis(1)).attr[0]

    def product(i: E.Expr, j: E.Expr, k: E.Expr) -> Accumulate:
        return Accumulate(C, (i, j), E.cast(A[i, k], "float64") * B[k, j], add)

    body = loop("i", 64, lambda i: loop("j", 64, lambda j: loop("k", 64, lambda k: product(i, j, k))))
    s = polyhedral(Kernel("product", (A, B, C), (C,), (), body), TARGET, threads=2)
    assert {PARALLEL, VECTORIZED} <= kinds(s.kernel)
    assert "precompute" not in str(s.trace)


def test_what_cannot_gain_is_refused_and_stays_as_it_was() -> None:
    A = Buffer("A", "float64", (100_000,))
    s = Schedule(Kernel("sums", (A,), (A,), (), loop("i", 99_999, lambda i: store(A, (i + 1,), A[i + 1] + A[i]))))
    before = s.kernel
    with pytest.raises(ScheduleError, match="depend on each other"):
        polyhedral(s, TARGET, threads=2)
    assert s.kernel is before and len(s.trace) == 0
    assert "runs as written" in str(polyhedral_or_not(s, TARGET, 2))
