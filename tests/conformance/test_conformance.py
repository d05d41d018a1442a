"""The whole ONNX backend suite by native code: nothing wrong, nothing crashes or hangs, refusals are listed one by one."""

from __future__ import annotations

import os
from collections.abc import Callable

from . import report
from .pool import case_names, run_cases

REAL = {
    "test_bvlc_alexnet", "test_densenet121", "test_inception_v1", "test_inception_v2", "test_resnet50", "test_shufflenet",
    "test_squeezenet", "test_vgg19", "test_zfnet512",
}  # fmt: skip


def test_backend_suite(record_property: Callable[[str, object], None]) -> None:
    cases = case_names()
    workers = max(2, min(len(os.sched_getaffinity(0)), 8))
    results = list(run_cases(cases, "native", report.TOLERANCES, workers, timeout=300.0))
    record_property("summary", f"ONNX backend suite\n{report.table(results)}")
    failures = [f"{r.outcome} {r.case}: {r.detail}" for r in report.failures(results)]
    assert not failures, "\n".join(failures)
    disagreements = report.disagreements(results, report.read_exclusions())
    assert not disagreements, "\n".join(disagreements)
    assert len(results) == len(cases)
    assert report.passed(results) >= 2020
    assert REAL <= {r.case for r in results if r.outcome == "passed"}
