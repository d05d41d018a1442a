"""Measuring: whatever a candidate does becomes a record, the next one is measured, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tcomp.autotune.measurement.measurer import Measurer, cores
from tcomp.autotune.measurement.results import Limits, Measurement, Outcome
from tcomp.autotune.measurement.worker import difference
from tcomp.autotune.measurement.worker_process import WorkerError, WorkerProcess
from tcomp.autotune.tasks import Program, workloads
from tcomp.ir.expr import as_expr
from tcomp.ir.graph import Graph, GraphBuilder
from tcomp.ir.loops import Buffer, Kernel, loop, store
from tcomp.ops import OPERATORS
from tcomp.options import CompileOptions, Report
from tcomp.passes.runner import run_passes
from tcomp.pipeline import graph_passes
from tcomp.schedules import Schedule
from tcomp.schedules.knobs import Knobs
from tcomp.target import Target
from tests.autotune.faults import FAULTS, pids, task
from tests.autotune.spaces import product, scaled, split_scaled

HOST = Target.host()
PATIENT = Limits(building=120, running=60, rounds=4, seconds=0.01)


@pytest.fixture(scope="module")
def measurer() -> Iterator[Measurer]:
    with Measurer(1, PATIENT) as made:
        yield made


def alive(pid: int) -> bool:
    """Whether any thread of a process is; the first may end before the others do."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # one ended meanwhile
        return Path(f"/proc/{pid}").exists()
    return any(state not in "ZX" for state in states)


def gone(pids: list[int], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


# ---------------------------------------------------------------- faults

EXPECTED = {
    "none": ("ok", ""),
    "segfault": ("crash", "SIGSEGV"),
    "endless": ("timeout", "no answer within 4 s"),
    "allocating": ("memory", "93.1 GiB"),
    "wrong": ("wrong", "`B` differs by"),
    "straying": ("wrong", "it writes outside of its buffers"),
    "raising": ("error", "ZeroDivisionError: it divides by zero"),
    "refusing": ("refused", "there is no loop `no such loop`"),
    "printing": ("ok", ""),
    "aborting": ("crash", "SIGABRT; the compiler says farewell"),
    "building_hugely": ("memory", ""),
    "without_code": ("build", "a CPU has no such axis"),
}


def test_whatever_a_candidate_does_is_a_record() -> None:
    with Measurer(2, Limits(building=120, running=4, rounds=4, seconds=0.01)) as measurer:
        found = measurer.measure(task(), [{"fault": name} for name in EXPECTED])
        for (name, (status, reason)), got in zip(EXPECTED.items(), found, strict=True):
            assert got.status == status and reason in got.reason, (name, got)
            assert len(got.seconds) == len(got.incumbent) and (len(got.seconds) >= 2) == (status == "ok")
        (again,) = measurer.measure(task(), [{"fault": "printing"}])  # nothing that was printed before is taken for an answer
        assert again.status == "ok" and 0 < again.least < 1 and again.ratio > 0
        running = pids(measurer)
        assert 2 <= len(running) <= 3  # a builder that died is started again when there is work for it
    assert gone(running)
    assert EXPECTED.keys() == FAULTS.keys() - {"building_endlessly"}


def test_a_schedule_function_may_not_end() -> None:
    with Measurer(1, Limits(building=60, running=60, rounds=3)) as measurer:
        assert measurer.measure(task(), [{}])[0].status == "ok"
        measurer.limits = Limits(building=1.5)
        (got,) = measurer.measure(task(), [{"fault": "building_endlessly"}])
        assert (got.status, got.reason) == ("timeout", "no answer within 1.5 s")


def test_where_the_default_schedule_cannot_be_run_nothing_is_measured(measurer: Measurer) -> None:
    bad = Program.of(scaled(), HOST, 1, schedule=crashing_by_default)
    assert [m.status for m in measurer.measure(bad, [{}, {"better": True}])] == ["error", "error"]
    (got,) = measurer.measure(bad, [{"better": True}])
    assert "the default schedule cannot be measured: crash: killed by SIGSEGV" in got.reason
    assert measurer.measure(task(), [{}])[0].status == "ok"


def crashing_by_default(s: Schedule, knobs: Knobs) -> None:
    if not knobs.flag("better", False):
        FAULTS["segfault"](s)


def test_an_incumbent_that_is_refused_is_said(measurer: Measurer) -> None:
    (got,) = measurer.measure(task(), [{}], {"fault": "refusing"})
    assert got.status == "error" and got.reason.startswith("the incumbent schedule: `split` does not apply")


# ---------------------------------------------------------------- what is measured


def convolution(size: int = 6) -> Graph:
    b, rng = GraphBuilder("net"), np.random.default_rng(0)
    x = b.input("x", "float32", (1, 4, size, size))
    weight = b.constant(rng.standard_normal((20, 4, 3, 3)).astype(np.float32))
    (y,) = b.add(OPERATORS["conv"], [x, weight], {"strides": (1, 1), "dilations": (1, 1), "group": 1})
    (z,) = b.add(
        OPERATORS["conv"], [y, b.constant(np.ones((20, 20, 1, 1), np.float32))], {"strides": (1, 1), "dilations": (1, 1), "group": 1}
    )
    return run_passes(b.build([z]), graph_passes(CompileOptions(HOST), Report()))[0]


def test_kernels_of_a_model_whose_weights_lie_otherwise(measurer: Measurer) -> None:
    for workload, _ in workloads(convolution(), HOST, 1):
        found = measurer.measure(workload, [{}, {"conv.tile": (4, 1)}, {"conv.tile": (2, 2)}, {"conv.tile": (1, 1)}])
        assert [m.status for m in found] == ["ok"] * 4, found


def test_threads(measurer: Measurer) -> None:
    both = Program.of(product(), HOST, 2)
    asked = Knobs()
    both.make(asked)
    threads = {name: answer.options[-1] for name, answer in asked.asked.items() if name.endswith(".threads")}
    assert threads
    assert [m.status for m in measurer.measure(both, [{}, threads])] == ["ok", "ok"]


def test_a_kernel_that_works_in_place_starts_anew_each_time(measurer: Measurer) -> None:
    a = Buffer("a", "int32", (64,))
    kernel = Kernel("k", (a,), (a,), (), loop("i", 64, lambda i: store(a, [i], a[i] * as_expr(3, "int32") + as_expr(1, "int32"))))
    assert [m.status for m in measurer.measure(Program.of(kernel, HOST, 1, schedule=vectorizing), [{"vectorize": True}])] == ["ok"]


def vectorizing(s: Schedule, knobs: Knobs) -> None:
    if knobs.flag("vectorize", False):
        s.vectorize("i")


def test_indices_stay_inside(measurer: Measurer) -> None:
    b = GraphBuilder("net")
    table, numbers = b.input("table", "float32", (3, 1 << 12)), b.input("i", "int64", (20,))
    graph = run_passes(b.build(b.add(OPERATORS["gather"], [table, numbers], {"axis": 0})), graph_passes(CompileOptions(HOST), Report()))[0]
    assert [m.status for m in measurer.measure(workloads(graph, HOST, 1)[0][0], [{}])] == ["ok"]


def test_what_negative_numbers_do_not_define_is_judged_by_positive_ones(measurer: Measurer) -> None:
    b = GraphBuilder("net")
    (y,) = b.add(OPERATORS["log"], [b.input("x", "float32", (500,))])
    graph = run_passes(b.build([y]), graph_passes(CompileOptions(HOST), Report()))[0]
    assert [m.status for m in measurer.measure(workloads(graph, HOST, 1)[0][0], [{}])] == ["ok"]


def test_a_function_that_only_this_process_has(measurer: Measurer) -> None:
    def local(s: Schedule, knobs: Knobs) -> None:
        split_scaled(s, knobs)
        if knobs.flag("raise", False):
            raise KeyError("here")

    mine = Program.of(scaled(), HOST, 1, schedule=local)
    found = measurer.measure(mine, [{"factor": 16}, {"raise": True}, {"factor": 1}])
    assert [m.status for m in found] == ["ok", "error", "ok"] and found[1].reason == "KeyError: 'here'"


def test_the_hopeless_are_not_measured_for_long() -> None:
    slow = Program.of(product(256, 256, 256), HOST, 1, schedule=stepping)
    with Measurer(1, Limits(building=120, running=60, rounds=10, seconds=60)) as measurer:
        fast, hopeless = measurer.measure(slow, [{}, {"slow": True}])
        assert len(fast.seconds) == 10 and len(hopeless.seconds) < 6 and hopeless.ratio > 2


def stepping(s: Schedule, knobs: Knobs) -> None:
    if not knobs.flag("slow", False):
        s.reorder("C.i", "C.k", "C.j")
        s.vectorize(s.split("C.j", 16)[1])


def test_measurements() -> None:
    got = Measurement(Outcome.OK, (3.0, 2.0), "", (4.0, 5.0))
    assert got.least == 2.0 and got.ratio == 0.5
    assert Measurement(Outcome.CRASH).least == Measurement(Outcome.CRASH).ratio == float("inf")


def test_differences() -> None:
    one = np.array([1.0, -4.0, np.nan, np.inf], np.float32)
    other = np.array([1.0, -4.0, np.nan, -np.inf], np.float32)
    assert difference(one, one.copy()) == 0 and difference(one, other) == float("inf")
    assert difference(np.array([1.0, np.nan], np.float32), np.array([1.0, 2.0], np.float32)) == float("inf")
    assert difference(np.array([1.5, 4.0], np.float32), np.array([1.0, 4.0], np.float32)) == 0.125
    assert difference(np.array([1e-9], np.float32), np.zeros(1, np.float32)) == float("inf")
    assert difference(np.array([1, 2]), np.array([1, 3])) == float("inf")
    assert difference(np.zeros(0), np.zeros(0)) == 0
    bits = np.array([1.0, 2.0]).astype("float16")
    assert 0 < difference(bits, bits + np.float16(0.001)) < 0.001


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert cores(2, tmp_path) == [2, 3] and cores(9, tmp_path) == [0, 1, 2, 3]
    for cpu in range(4):
        path = tmp_path / f"cpu{cpu}/topology"
        path.mkdir(parents=True)
        (path / "thread_siblings_list").write_text("0-1" if cpu < 2 else "2-3")
    assert cores(2, tmp_path) == [1, 3] and cores(3, tmp_path) == [0, 1, 3] or cores(3, tmp_path) == [1, 2, 3]


# ---------------------------------------------------------------- processes


def test_a_process_that_was_killed_is_replaced(measurer: Measurer) -> None:
    assert measurer.measure(task(), [{}])[0].status == "ok"
    before = pids(measurer)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert gone(before)
    (got,) = measurer.measure(task(), [{"fault": "printing"}])
    assert got.status == "ok", got
    assert not set(before) & set(pids(measurer))


def test_a_closed_child_is_not_started_again() -> None:
    child = WorkerProcess("tcomp.autotune.measurement.worker", 8 << 30)
    child.close()
    with pytest.raises(WorkerError, match="was closed"):
        child.ask({}, 1)


def test_a_child_that_is_closed_while_it_works_says_so() -> None:
    for seconds in (0.0, 0.02, 0.5):  # while it starts, and while it works
        child, found = WorkerProcess("tcomp.autotune.measurement.builder", 8 << 30), list[BaseException]()

        def ask(child: WorkerProcess = child, found: list[BaseException] = found) -> None:
            try:
                while True:
                    child.ask({"do": "harness", "target": "no target", "threads": 1, "flush_bytes": 1}, 60)
            except WorkerError as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(seconds)
        child.close()
        thread.join(60)
        assert len(found) == 1


def test_a_child_that_does_not_start_is_an_answer() -> None:
    child = WorkerProcess("tcomp.autotune.no_such_module", 8 << 30)
    answer = child.ask({}, 1)
    assert answer["status"] == "error" and "No module named" in answer["reason"]


TUNER = """
import sys, threading, time
sys.path.insert(0, {tests!r})
from tests.autotune.faults import pids, task
from tcomp.autotune.measurement.measurer import Measurer
from tcomp.autotune.measurement.results import Limits
measurer = Measurer(1, Limits(running=600))
print(measurer.measure(task(), [{{}}])[0].status, flush=True)
threading.Thread(target=lambda: (time.sleep(1), print(*pids(measurer), flush=True)), daemon=True).start()
try:
    with measurer:
        measurer.measure(task(), [{{"fault": "endless"}}])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGKILL, lambda p: p.wait() == -9), (signal.SIGINT, lambda p: "interrupted" in p.stdout.read())]
)
def test_nothing_is_left_of_a_tuner_that_is_killed(number: int, ending: Callable[[subprocess.Popen[str]], bool]) -> None:
    """While a candidate runs that does not end."""
    command = [sys.executable, "-c", TUNER.format(tests=str(Path(__file__).parents[2]))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as tuner:
        assert tuner.stdout is not None and tuner.stdout.readline() == "ok\n"
        pids = [int(word) for word in tuner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        tuner.send_signal(number)
        assert ending(tuner)
    assert gone(pids)
