"""Tuning for GPUs, on a CuPy and an NVRTC that the host plays, in the processes that tuning starts as well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "autotune"))
from emulation import text_as_code
from fake_cupy import FakeCupy
from gpu_faults import FAULTS, task
from test_cuda import needs_compiler

from tcomp.autotune.measure import Limits, Measurer
from tcomp.target import Target

pytestmark = needs_compiler
SM80 = Target.parse("cuda -arch=sm_80")
LIMITS = Limits(building=120, running=60, rounds=3, seconds=0.01)


@pytest.fixture(autouse=True)
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """Here, and in the processes that are started: these get the path of this one."""
    folder = tmp_path / "played"
    (folder / "cuda/bindings").mkdir(parents=True)
    (folder / "cupy.py").write_text("import sys\nfrom fake_cupy import FakeCupy\nsys.modules[__name__] = FakeCupy()\n")
    (folder / "cuda/__init__.py").touch()
    (folder / "cuda/bindings/__init__.py").write_text("import fake_nvrtc as nvrtc\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "cupy", fake := FakeCupy())
    with text_as_code():
        yield fake


EXPECTED = {
    "none": ("ok", ""),
    "losing": ("crash", "exit status 1; the GPU reports an error: cudaErrorIllegalAddress"),
    "endless": ("timeout", "no answer within 8 s"),
    "segfault": ("crash", "SIGSEGV"),
    "allocating": ("memory", "Out of memory allocating 100"),
    "wrong": ("wrong", "`B` differs by"),
    "straying": ("wrong", "it writes outside of its buffers"),
    "too_many_threads": ("build", "at most 1024 are possible"),
    "sharing_too_much": ("build", "a block would take 262144 bytes of shared memory"),
    "raising": ("error", "ZeroDivisionError: it divides by zero"),
    "refusing": ("refused", "there is no loop `no such loop`"),
    "printing": ("ok", ""),
    "one_thread": ("ok", ""),
}


def test_whatever_a_candidate_does_is_a_record() -> None:
    with Measurer(1, Limits(building=120, running=8, rounds=3, seconds=0.01)) as measurer:
        found = measurer.measure(task(), [{"fault": name} for name in EXPECTED])
        for (name, (status, reason)), got in zip(EXPECTED.items(), found, strict=True):
            assert got.status == status and reason in got.reason, (name, got)
            assert len(got.seconds) == len(got.incumbent) and (len(got.seconds) >= 2) == (status == "ok")
            assert status != "ok" or 0 < got.least < 1
    assert EXPECTED.keys() == FAULTS.keys()
