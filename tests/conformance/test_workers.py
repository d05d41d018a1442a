"""Crash isolation: a case that kills its process or never ends costs no other case."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import pytest

from .pool import run_cases
from .suite import CRASHED, HUNG, PASSED, Result


def misbehave(connection: Connection, level: str) -> None:
    connection.send("ready")
    while True:
        case, _ = connection.recv()
        if case == "crash":
            os.abort()
        if case == "hang":
            time.sleep(60)
        connection.send(Result(case, PASSED, level, 0.0))


def test_a_crash_and_a_hang_cost_one_case_each() -> None:
    cases = ["a", "crash", "b", "hang", "c"]
    results = {r.case: r for r in run_cases(cases, "level", {}, workers=2, timeout=5.0, work=misbehave)}
    assert {case: r.outcome for case, r in results.items()} == {"a": PASSED, "b": PASSED, "c": PASSED, "crash": CRASHED, "hang": HUNG}
    assert "exit code" in results["crash"].detail and results["a"].detail == "level"


def stillborn(connection: Connection, level: str) -> None:
    raise SystemExit(3)


def test_workers_that_cannot_start_end_the_run() -> None:
    with pytest.raises(RuntimeError, match="could not start"):
        list(run_cases(["a"], "level", {}, workers=1, timeout=5.0, work=stillborn))
