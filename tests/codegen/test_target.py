"""Targets as text, and what they say about a machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import TargetError
from tcomp.target import CpuTarget

LINES = ["cpu -mcpu=skylake-avx512", "cpu -mcpu=haswell", "cpu -mcpu=x86-64", "aarch64", "cpu -march=aarch64 -mcpu=neoverse-n1", "arm64"]


@pytest.mark.parametrize("line", LINES)
def test_text_round_trips(line: str) -> None:
    target = CpuTarget.parse(line)
    assert CpuTarget.parse(str(target)) == target
    assert str(CpuTarget.parse(str(target))) == str(target)


def test_host_round_trips_with_its_caches_and_features() -> None:
    host = CpuTarget.host()
    assert CpuTarget.parse(str(host)) == host == CpuTarget.parse("cpu") == CpuTarget.parse("native")
    assert host.runs_on(host) and host.cores >= 1 and 4096 <= host.l1 < host.l2
    assert (host.vector_bits == 512) == ({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"} <= set(host.features))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sampled_from(LINES[:3]),
    st.sets(st.sampled_from(["fma", "avx512fp16", "f16c", "avx2"])),
    st.booleans(),
    st.integers(1, 99999),
    st.integers(1, 64),
)
def test_changes_round_trip(line: str, features: set[str], add: bool, kib: int, cores: int) -> None:
    changes = ",".join(("+" if add else "-") + f for f in sorted(features))
    target = CpuTarget.parse(f"{line} -mattr={changes} -l2={kib}K -cores={cores}" if changes else line)
    assert CpuTarget.parse(str(target)) == target
    assert all(target.has(f) == add for f in features)


def test_what_instruction_sets_offer() -> None:
    avx512, haswell, baseline, arm = (CpuTarget.parse(line) for line in (LINES[0], LINES[1], LINES[2], LINES[4]))
    assert [(t.vector_bits, t.vector_registers, t.fma) for t in (avx512, haswell, baseline, arm)] == [
        (512, 32, True), (256, 16, True), (128, 16, False), (128, 32, True),
    ]  # fmt: skip
    assert [t.lanes(32) for t in (avx512, haswell, arm)] == [16, 8, 4]
    assert (haswell.half_conversion, haswell.half_arithmetic, baseline.half_conversion, arm.half_arithmetic) == (True, False, False, True)
    assert haswell.runs_on(avx512) and not avx512.runs_on(haswell) and not arm.runs_on(haswell)
    assert CpuTarget.parse("cpu -mcpu=sapphirerapids").half_arithmetic
    assert CpuTarget.parse("cpu -mcpu=haswell -l1=48K").l1 == 48 << 10
    assert avx512.tile_registers == 32 > CpuTarget.parse("cpu -mcpu=znver5").tile_registers
    assert CpuTarget.parse("cpu -mcpu=skylake-avx512 -mattr=-avx512bw").vector_bits == 256


@pytest.mark.parametrize(
    "line, message",
    [
        ("", "unknown target"), ("gpu", "unknown target"), ("cpu -mcpu=i486", "skylake-avx512"), ("cpu -march=mips", "x86_64, aarch64"),
        ("cpu -mcpu=haswell -mattr=+sse9", "avx512f"), ("cpu -mcpu=haswell -mattr=fma", "unknown feature"), ("cpu -fast", "-mcpu="),
        ("cpu -mcpu=haswell -l1=0", "not a size"), ("cpu -mcpu=haswell -l2=lots", "not a size"), ("cpu -mcpu=haswell -cores=-1", "not a count"),
        ("cpu -march=aarch64 -mcpu=haswell", "neoverse-n1"),
    ],
)  # fmt: skip
def test_bad_text_lists_what_is_possible(line: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        CpuTarget.parse(line)


def test_the_module_does_not_need_llvm() -> None:
    code = "import sys; sys.modules['llvmlite'] = None; from tcomp.target import Target; print(Target.parse('cpu -mcpu=haswell'))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "cpu -march=x86_64 -mcpu=haswell\n"
    )
