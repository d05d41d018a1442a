"""The analytic model of GPUs: launches are those of the emitted code, and time grows with what it is made of."""

from __future__ import annotations

from math import isfinite, prod

import pytest
from hypothesis import given, settings

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.ir import te
from tcomp.ir.expr import as_expr, evaluate_int
from tcomp.ir.loops import Kernel, block, hoist_temporaries, launches as split_into
from tcomp.schedules import Schedule
from tcomp.schedules.analysis.footprint import at_sizes
from tcomp.schedules.cost import gpu
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.target import CudaTarget
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.schedules.gpu.test_default import MEDIUM
from tests.schedules.programs import Program, programs

SM80, HOPPER = CudaTarget.parse("cuda -arch=sm_80"), CudaTarget.parse("cuda -arch=sm_90a")


def product(m: int, n: int, depth: int, dtype: str = "float32", knobs: Knobs | None = None) -> Kernel:
    a, b, k = te.placeholder((m, depth), dtype, "A"), te.placeholder((n, depth), dtype, "B"), te.reduce_axis(depth, "k")
    c = te.compute((m, n), lambda i, j: te.sum(te.cast(a[i, k], "float32") * te.cast(b[j, k], "float32"), k), "C")
    return schedule(lower("kernel", [a, b], [c]), SM80, knobs).kernel


@given(MEDIUM | programs(largest=300, volume=100_000))
@settings(max_examples=30, deadline=None)
def test_launches_are_those_of_the_code(program: Program) -> None:
    kernel = schedule(lower("program", program.inputs, program.outputs), SM80).kernel
    _, launches = emit_kernel(hoist_temporaries(kernel)[0], SM80)
    sized = hoist_temporaries(at_sizes(kernel, program.dims))[0]
    found = [gpu.launch_of(sized.with_body(block(*stmts)), SM80) for stmts in split_into(sized.body)]
    blocks = [prod(evaluate_int(as_expr(d), program.dims) for d in x.grid) for x in launches]
    assert [(x.blocks, x.threads) for x in found] == [(n, prod(x.block)) for n, x in zip(blocks, launches, strict=True)]
    estimate = gpu.estimate(kernel, SM80, program.dims)
    assert all(isfinite(x) and x >= 0 for x in (*estimate.counts.values(), *estimate.seconds.values()))
    assert estimate.bound <= estimate.time and estimate.counts.get("launches", 1) == len(launches)


def test_more_work_takes_longer() -> None:
    times = [gpu.estimate(product(n, n, n), SM80).time for n in (64, 256, 1024, 2048)]
    assert times == sorted(times) and times[-1] > 100 * times[0] > 0
    wide, narrow = (gpu.estimate(product(1024, 1024, 1024), t).time for t in (HOPPER, SM80))
    assert wide < narrow


def test_a_thread_alone_is_slow() -> None:
    x = te.placeholder((1 << 16,), "float32", "x")
    kernel = lower("kernel", [x], [te.compute((1 << 16,), lambda i: x[i] * 2.0, "y")])
    s = Schedule(kernel)
    outer, inner = s.split("y.i", 1 << 10)
    s.set_kind(outer, "block.x")
    one = gpu.estimate(s.kernel, SM80)
    s.set_kind(inner, "thread.x")
    assert one.time > 3 * gpu.estimate(s.kernel, SM80).time
    assert gpu.estimate(kernel, SM80).seconds.keys() == {"roofline"}  # nothing is bound to an axis


def test_neighbours_read_neighbours() -> None:
    """Rows that neighbouring threads read each on their own pass the first cache in as many pieces."""
    x = te.placeholder((1 << 10, 1 << 10), "float32", "x")

    def pieces(turned: bool) -> float:
        y = te.compute((1 << 10, 1 << 10), lambda i, j: (x[j, i] if turned else x[i, j]) * 2.0, "y")
        return gpu.estimate(schedule(lower("kernel", [x], [y]), SM80).kernel, SM80).features["pieces"]

    assert pieces(True) > 4 * pieces(False)


def test_tensor_cores_multiply() -> None:
    plain, half = (gpu.estimate(product(1024, 1024, 1024, dtype), SM80).features for dtype in ("float32", "float16"))
    assert plain["products"] == 0 and half["products"] == 1024**3
    assert half["seconds"] < plain["seconds"] and half["seconds.tensor"] > 0 == plain["seconds.tensor"]


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shared_memory_and_registers_are_about_those_of_machine_code(dtype: str) -> None:
    knobs = Knobs()
    product(1024, 1024, 1024, dtype, knobs)
    for tile in knobs.asked["C.acc.tile"].options[:3]:
        kernel = product(1024, 1024, 1024, dtype, Knobs({"C.acc.tile": tile}))
        text, (launch,) = emit_kernel(hoist_temporaries(kernel)[0], SM80)
        (usage,) = nvrtc.compile_text(text, "sm_80").usage.values()
        found = gpu.estimate(kernel, SM80).features
        assert found["shared"] == usage.shared + launch.shared
        assert 0.6 < found["registers"] / usage.registers < 1.4
