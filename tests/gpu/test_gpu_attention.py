"""Attention as exporters write it, on a GPU played by the host: one kernel for scores, softmax and products where rows are long; and its
machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.cuda.kernels import figures
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime import Artifact
from tcomp.runtime.cuda import CudaModule
from tcomp.target import CudaTarget
from tests.codegen.cuda.test_cuda import needs_compiler, needs_nvrtc
from tests.gpu.emulation import HostDevice
from tests.gpu.test_models import compiled
from tests.passes.test_long_attention import attention, inputs, reference


def in_one_pass(artifact: Artifact) -> list[bool]:
    """For each kernel."""
    return [any(step[0] == "online" for step in entry["schedule"]["steps"]) for entry in artifact.notes["schedules"]]


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (256, 256, {"heads": 8}),
    "mask-added": (251, 259, {"heads": 7, "size": 20, "mask": "add"}),
    "conditions": (601, 263, {"heads": 3, "size": 18, "mask": "where"}),
    "shared-keys": (450, 300, {"heads": 4, "size": 16, "repeated": 4}),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_long_rows_on_the_host(name: str) -> None:
    rows, keys, options = CASES[name]
    model = attention(rows, keys, **options)
    arrays = inputs(model)
    artifact = compiled(model.SerializeToString())
    assert sorted(in_one_pass(artifact)) == [False, True], "the heads are put together in the second kernel"
    (found,) = CudaModule(artifact, HostDevice()).run(arrays).values()
    np.testing.assert_allclose(found, reference(options["heads"], *arrays.values()), rtol=1e-4, atol=1e-5)


@needs_compiler
def test_symbolic_lengths_on_the_host() -> None:
    """The upper bounds decide; the kernel is for all lengths."""
    model = attention("n", "m", size=20, mask="add")
    assert True not in in_one_pass(compiled(model.SerializeToString()))
    module = CudaModule(artifact := compiled(model.SerializeToString(), dims={"n": (1, 4096), "m": (1, 4096)}), HostDevice())
    assert True in in_one_pass(artifact)
    for n, m in ((1, 1), (57, 3), (130, 257)):
        arrays = inputs(model, n=n, m=m)
        (found,) = module.run(arrays).values()
        np.testing.assert_allclose(found, reference(2, *arrays.values()), rtol=1e-4, atol=1e-5)


def test_where_operators_stay_apart() -> None:
    for rows, keys, size in ((64, 1024, 32), (4096, 64, 32), (2048, 2048, 520)):
        assert True not in in_one_pass(compiled(attention(rows, keys, size=size).SerializeToString()))


@needs_compiler
@pytest.mark.parametrize("precision, dtype", [("tf32", "float32"), ("fp16", "float32"), ("bf16", "float32"), ("fp32", "float16")])
def test_tensor_cores_on_the_host(precision: str, dtype: str) -> None:
    """As the precision says, or in that of the model."""
    model = attention(331, 259, heads=6, size=20, mask="add", dtype=dtype)
    arrays = inputs(model)
    artifact = compiled(model.SerializeToString(), f"cuda -precision={precision}")
    assert sorted(in_one_pass(artifact)) == [False, True]
    (found,) = CudaModule(artifact, HostDevice()).run(arrays).values()
    np.testing.assert_allclose(found, reference(6, *arrays.values()), rtol=0, atol=0.05 if precision == "bf16" else 0.01)


@needs_nvrtc
@pytest.mark.parametrize("precision, dtype", [("fp32", "float32"), ("bf16", "float32"), ("fp32", "float16")])
def test_machine_code_and_memory(precision: str, dtype: str) -> None:
    """As large as models have it: within the limits of both architectures, and no scores are stored."""
    target = CudaTarget.parse(f"cuda -arch=sm_80,sm_90a -precision={precision}")
    artifact, report = compile_model(attention(2048, 2048, heads=12, size=64, mask="add", dtype=dtype), CompileOptions(target))
    found = figures(artifact, target)
    assert not found.beyond and found.kernels == 2 and found.single == 0 and found.notes == (0, 0)
    linear = 4 * 2048 * 12 * 64  # bytes of queries, or keys, or values, of all heads, at most
    assert isinstance(report.arena, int) and report.arena <= 3 * linear < 4 * 12 * 2048 * 2048
