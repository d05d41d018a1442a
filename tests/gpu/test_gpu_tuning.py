"""Tuning for GPUs, on a CuPy and an NVRTC that the host plays, in the processes that tuning starts as well."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import tcomp
from tcomp.api import with_records
from tcomp.autotune import progress
from tcomp.autotune.database.entries import Verdict
from tcomp.autotune.database.store import Database
from tcomp.autotune.measurement import ab_comparison, builder, worker, worker_gpu
from tcomp.autotune.measurement.measurer import Measurer
from tcomp.autotune.measurement.results import MIN_ROUNDS, Limits
from tcomp.errors import DeviceError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime.cuda import CudaModule
from tcomp.target import CudaTarget
from tests.autotune.spaces import product, scaled
from tests.codegen.cuda.test_cuda import needs_compiler
from tests.gpu.emulation import text_as_code
from tests.gpu.fake_cupy import CUDARuntimeError, FakeCupy, at
from tests.gpu.gpu_faults import FAULTS, task
from tests.gpu.test_models import compiled, floats, model, node, reference

pytestmark = needs_compiler
SM80 = CudaTarget.parse("cuda -arch=sm_80")
LIMITS = Limits(building=120, running=60, rounds=3, seconds=0.01)
SQUARE = ("float32", [32, 32])
LAYER = model([node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["y"])], {"x": SQUARE}, {"y": SQUARE}, {"w": floats(32, 32)})


@pytest.fixture(autouse=True)
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """Here, and in the processes that are started: these get the path of this one."""
    folder = tmp_path / "played"
    (folder / "cuda/bindings").mkdir(parents=True)
    (folder / "cupy.py").write_text("import sys\nfrom tests.gpu.fake_cupy import FakeCupy\nsys.modules[__name__] = FakeCupy()\n")
    (folder / "cuda/__init__.py").touch()
    (folder / "cuda/bindings/__init__.py").write_text("from tests.gpu import fake_nvrtc as nvrtc\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "cupy", fake := FakeCupy())
    monkeypatch.setattr(progress, "_COMPARISON_SECONDS", (0.1, 0.1))  # as short as can be
    worker_gpu._cupy_device.cache_clear()
    with text_as_code():
        yield fake
    worker_gpu._cupy_device.cache_clear()


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


# ---------------------------------------------------------------- the clock


def test_short_kernels_run_several_times_each_after_the_caches_were_filled(played: FakeCupy) -> None:
    gpu, size = worker_gpu._Gpu(1, "", 1 << 20), np.dtype(np.float32)
    given, made = gpu.put(np.arange(100, dtype=np.float32)), gpu.array((100,), size, [])
    runs: list[bool] = []
    played.clock = map(float, count(0, 1e-5)).__next__

    def run() -> None:
        played.log.append("run")
        gpu._device.stream.add(lambda: runs.append(np.array_equal(at(made.address, 400), at(given.address, 400))))
        gpu._device.stream.add(lambda: at(made.address, 400).fill(0))  # as one that works in place

    played.log.clear()
    assert gpu.seconds(run, [(made, given)], [given]) == pytest.approx(1e-5)
    assert len(runs) == 1 + worker_gpu._REPEATS and all(runs)
    assert played.log == ["copy 3", "fill 1048576", "copy 3", "run"] * len(runs)
    assert not gpu.get(made).any() and gpu.get(given)[3] == 3


def test_a_long_one_runs_once(played: FakeCupy) -> None:
    gpu, runs = worker_gpu._Gpu(1, "", 1 << 20), list[int]()
    played.clock = map(float, count(0, 0.01)).__next__
    assert gpu.seconds(lambda: runs.append(1), [], []) == pytest.approx(0.01)
    assert len(runs) == 1


def test_code_is_freed(played: FakeCupy) -> None:
    """A tuner loads thousands of candidates."""
    answer = builder.handle({**builder.summary_request(task(), {}), "do": "build"})
    assert answer["status"] == "ok"
    measure = {"do": "measure", "incumbent": answer, "candidate": answer, "rounds": 3, "seconds": 0.0}
    handle = worker.request_handler(worker_gpu._Gpu)
    prepare = {"threads": 1, "harness": "", "flush_bytes": 1 << 20, "reference": answer, "seed": 0}
    assert handle({"do": "prepare", **prepare}) == {"status": "ok"}
    for _ in range(2):
        found = handle(dict(measure))
        assert found["status"] == "ok" and len(found["seconds"]) == 3
    assert len([text for text in played.handles.values() if isinstance(text, str)]) == 0


# ---------------------------------------------------------------- without a GPU


def test_where_nothing_can_be_measured_it_is_said_before_anything_is_done(played: FakeCupy, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"cannot be tuned here(?s:.*)the GPU of this machine is sm_80(?s:.*)arch=sm_80"):
        tcomp.tune(scaled(), target="cuda -arch=sm_90a", trials=1, database=tmp_path / "t.db")

    def fails() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    played.cuda.runtime.getDeviceCount = fails
    with pytest.raises(DeviceError, match="no GPU can be used"):
        tcomp.tune(scaled(), target=SM80, trials=1, database=tmp_path / "t.db")
    assert not (tmp_path / "t.db").exists()


def test_a_gpu_that_is_gone_is_a_record(tmp_path: Path) -> None:
    played = tmp_path / "played/cupy.py"
    played.write_text(played.read_text() + "sys.modules[__name__].cuda.runtime.getDeviceCount = lambda: 0\n")
    with Measurer(1, LIMITS) as measurer:
        (got,) = measurer.measure(task(), [{}])
    assert got.status == "error" and "this machine has no GPU" in got.reason


# ---------------------------------------------------------------- whole runs


def test_a_program_is_tuned(tmp_path: Path) -> None:
    result = tcomp.tune(product(32, 32, 16), target=SM80, trials=2, threads=3, database=tmp_path / "t.db")
    assert result.trials == 2 and not result.interrupted and 0 < result.ratio <= 1
    with Database(tmp_path / "t.db") as database:
        (found,) = database.tasks()
        records = database.records(found.key)
    assert (found.target, found.threads) == (str(SM80), 1)
    assert [r.measurement.status for r in records] == ["ok"] * 3 and [r.decisions == "{}" for r in records] == [True, False, False]


def test_a_model_is_tuned_and_compiled_as_found(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(LAYER)
    result = tcomp.tune(tmp_path / "net.onnx", target=SM80, trials=1, database=tmp_path / "t.db")
    assert result.trials == 1 and result.confirmation.comparisons >= bool(result.confirmation.tried)
    (status,) = result.tasks
    assert status.before > 0 and status.bound > 0
    with Database(tmp_path / "t.db") as database:
        (found,) = database.tasks()
        decisions = next(r.decisions for r in database.records(found.key) if r.decisions != "{}")
        database.add(Verdict(found, decisions, True, 2.0, 1.0, {}, time.time()))
    plain, (tuned, report) = compiled(LAYER, SM80), compile_model(LAYER, with_records(CompileOptions(SM80, threads=7), tmp_path / "t.db"))
    assert report.tuned == 1 and not report.not_followed and tuned.code != plain.code
    x = floats(32, 32)
    for artifact in (plain, tuned):
        np.testing.assert_allclose(CudaModule(artifact).run({"x": x})["y"], reference(LAYER, {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_models_race_by_the_clock_of_the_device(tmp_path: Path) -> None:
    artifact = compiled(LAYER, SM80)
    artifact.save(tmp_path / "net.tcomp")
    np.savez(tmp_path / "inputs.npz", **{"0": floats(32, 32)})
    path = str(tmp_path / "net.tcomp")
    request = {"names": ["x"], "inputs": str(tmp_path / "inputs.npz"), "untuned": path, "tuned": path, "threads": 1, "seconds": 0.0}
    answer = ab_comparison.handle(request)
    assert answer["status"] == "ok" and all(len(side) == MIN_ROUNDS and min(side) > 0 for side in answer["runs"])
    assert [len(side) for side in answer["kernels"]] == [1, 1]
