"""Candidates for GPUs are made and built on any machine: those of a space, and what cannot be built."""

from __future__ import annotations

import base64
import json
from random import Random

import pytest

from tcomp.autotune.features import CandidateSummary
from tcomp.autotune.measurement import builder
from tcomp.autotune.tasks import Program, sample
from tcomp.target import CudaTarget
from tests.autotune.spaces import product
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.gpu import gpu_faults

pytestmark = needs_nvrtc


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_any_decisions_become_machine_code(arch: str) -> None:
    task = Program.of(product(96, 130, 64), CudaTarget.parse(f"cuda -arch={arch}"), 1)
    for seed in range(4):
        decisions = sample(task, Random(seed)).decisions
        made = json.loads(json.dumps(builder.handle(builder.summary_request(task, decisions))))
        assert made["status"] == "ok" and CandidateSummary.from_json(made["summary"]).decisions == decisions
        built = builder.handle(builder.build_request(task, decisions))
        assert built["status"] == "ok" and [a[0] for a in built["arguments"]] == ["A", "B", "C"]
        (kernel,) = json.loads(base64.b64decode(built["code"]))["kernels"].values()
        assert base64.b64decode(kernel["cubin"][arch]).startswith(b"\x7fELF") and kernel["launches"]


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("too_many_threads", "build", "at most 1024 are possible"),
        ("sharing_too_much", "build", "at most 166912 are possible on cuda -arch=sm_80"),
        ("refusing", "refused", "there is no loop"),
        ("losing", "ok", ""),
    ],
)
def test_what_cannot_be_built_says_why(fault: str, status: str, reason: str) -> None:
    found = builder.handle(builder.build_request(gpu_faults.task(), {"fault": fault}))
    assert found["status"] == status and reason in found.get("reason", "")
