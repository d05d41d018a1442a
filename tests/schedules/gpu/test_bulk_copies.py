"""Schedules of products whose slices are copied in bulk, which a decision chooses from sm_90 on: any sizes, as the loops say, as the emitted
text does on the host, and as machine code."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.ir.loops import hoist_temporaries
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.knobs import Knobs, Option, decode, encode
from tcomp.schedules.schedule import Schedule
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.schedules.gpu.test_default import agree, emulated, lowered, product
from tests.schedules.gpu.test_pipeline import races, stages_of
from tests.schedules.gpu.test_warps import product as on_tensor_cores
from tests.schedules.programs import Program
from tests.schedules.running import interpreted

HOPPER = CudaTarget.parse("cuda -arch=sm_90a")
needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")


def in_bulk(program: Program, stages: int = 3, tile: int = 0) -> tuple[Schedule, Knobs]:
    """The schedule with the tile of that number (not of `wgmma`) and about so many stages."""

    def pick(name: str, options: tuple[Option, ...], default: Option) -> Option:
        if name.endswith(".tile"):
            plain = [o for o in options if not isinstance(o, tuple) or o[-1] != "wgmma"]
            return plain[tile % len(plain)]
        if name.endswith(".stages"):
            return min(options, key=lambda o: abs(int(str(o)) - stages))
        return "bulk" if name.endswith(".copies") else default

    knobs = Knobs(pick=pick)
    return schedule(lowered(program), HOPPER, knobs), knobs


PROGRAMS = {
    "full tiles": product(64, 64, 64),
    "edges": product(70, 48, 52),
    "edges, both along the fold": product(33, 20, 64, True),
    "one factor": product(64, 45, 96),
    "tensor cores": on_tensor_cores(96, 64, 80, "float16", True),
    "tensor cores, edges": on_tensor_cores(67, 200, 104, "bfloat16", True),
    "tensor cores, bytes": on_tensor_cores(70, 144, 40, "int8", True),
}


@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_families_on_the_host(name: str) -> None:
    program = PROGRAMS[name]
    s, knobs = in_bulk(program)
    assert not s.kernel.notes and "call `bulk_copy(" in str(s.kernel)
    assert str(Schedule(lowered(program)).replay(s.trace)) == str(s.kernel)
    again = schedule(lowered(program), HOPPER, Knobs(decode(encode(knobs.decisions))))  # a record of the tuner
    assert str(again.kernel) == str(s.kernel)
    agree(program, interpreted(program, s.kernel, shuffle=1))
    for descending in (False, True):
        agree(program, emulated(program, s.kernel, descending, target=HOPPER))


@needs_compiler
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(16, 80),
    st.integers(4, 20),
    st.integers(4, 20),
    st.sampled_from(["float16", "float32"]),
    st.integers(0, 7),
    st.integers(1, 4),
)
def test_any_sizes_on_the_host(rows: int, columns: int, depth: int, dtype: str, tile: int, stages: int) -> None:
    program = on_tensor_cores(rows, 8 * depth, 8 * columns, dtype, dtype == "float16")
    s, _ = in_bulk(program, stages, tile)
    assert not s.kernel.notes
    agree(program, emulated(program, s.kernel, stages % 2 == 0, target=HOPPER))


def test_thread_by_thread() -> None:
    program = product(19, 20, 36)
    s, _ = in_bulk(program)
    assert "bulk_copy" in str(s.kernel) and stages_of(s) and not races(s.kernel, {})


def test_it_is_a_decision_and_not_the_default() -> None:
    program = PROGRAMS["edges"]
    knobs = Knobs()
    assert "bulk_copy" not in str(schedule(lowered(program), HOPPER, knobs).kernel)
    (answer,) = (a for name, a in knobs.asked.items() if name.endswith(".copies"))
    assert answer.options == ("threads", "bulk")
    newer = Knobs()
    schedule(lowered(program), CudaTarget.parse("cuda -arch=sm_90,sm_100"), newer)
    assert any(name.endswith(".copies") for name in newer.asked)
    for target, other in (
        ("cuda", program),
        ("cuda -arch=sm_80", program),
        ("cuda -arch=sm_80,sm_90a", program),
        ("cuda -arch=sm_90a", product(33, 45, 19)),
    ):
        knobs = Knobs()
        schedule(lowered(other), CudaTarget.parse(target), knobs)
        assert not any(name.endswith(".copies") for name in knobs.asked)


def test_one_barrier_a_step() -> None:
    """Of full tiles and of those over an edge alike, behind a wait for what is not ahead."""
    for program, groups in ((product(64, 96, 64), 1), (product(70, 96, 52), 2)):
        s, _ = in_bulk(program, 3)
        text = emit_kernel(hoist_temporaries(s.kernel)[0], HOPPER)[0].split("__global__")[1]
        assert stages_of(s) == [3] and text.count("__syncthreads();") == 2  # the first one is behind the barrier objects
        assert f"for (; waited + {groups} < started; ++waited) {{" in text


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_large_products_fit(dtype: str) -> None:
    for rows in (4096, 4100):
        program = on_tensor_cores(rows, 4096, 4096, dtype, True) if dtype == "float16" else product(rows, 4096, 4096)
        s, _ = in_bulk(program)
        text, (launch,) = emit_kernel(hoist_temporaries(s.kernel)[0], HOPPER)
        binary = nvrtc.compile_text(text, "sm_90a")
        usage, ptx = binary.usage[launch.function], binary.ptx.decode()
        assert usage.spilled == usage.stack == 0 and usage.registers * prod(launch.block) <= 1 << 16
        assert usage.shared + launch.shared <= HOPPER.shared_per_block
        assert "cp.async.bulk.shared::cluster.global.mbarrier" in ptx and "mbarrier.try_wait.parity" in ptx
        assert ("cp.async.cg" in ptx) == (rows == 4100)
