"""Runs are stopped by a timeout, by other threads and by Ctrl-C, and modules go on working."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from onnx import ModelProto, helper

import tcomp
from tcomp.errors import InputError, StoppedError
from tcomp.runtime import Module

LONG, SHORT = 1 << 25, 1 << 14  # products of two of these are summed: for days, for a tenth of a second


def outer_sum() -> ModelProto:
    """The sum of all products of an element of x and one of y: LONG * LONG operations that need no memory."""
    nodes = [helper.make_node("Mul", ["x", "y"], ["p"]), helper.make_node("ReduceSum", ["p"], ["s"], keepdims=0)]
    inputs = [helper.make_tensor_value_info(*given) for given in (("x", 1, ["a", 1]), ("y", 1, [1, "b"]))]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("s", 1, [])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def ones(count: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((count, 1), np.float32), "y": np.ones((1, count), np.float32)}


@pytest.fixture(scope="module", params=[1, 2])
def module(request: pytest.FixtureRequest) -> Module:
    return tcomp.compile(outer_sum(), threads=request.param)


def test_a_timeout_ends_a_run(module: Module) -> None:
    before = threading.enumerate()  # pytest-timeout has a timer too
    for _ in range(3):
        with pytest.raises(StoppedError, match="longer than 0.05 s"):
            module.run(ones(LONG), timeout=0.05)
    assert module.run(ones(8), timeout=60)["s"] == 64
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer) and t not in before]
    with pytest.raises(StoppedError):  # before it begins
        module.run(ones(LONG), timeout=1e-9)
    with pytest.raises(InputError, match="more than 0 seconds"):
        module.run(ones(8), timeout=0)


def test_timeouts_of_many_runs_at_the_same_time(module: Module) -> None:
    """One thread stops them all, and those that end before are left alone."""
    stopped = list[float]()

    def work(timeout: float) -> None:
        try:
            module.run(ones(LONG), timeout=timeout)
        except StoppedError:
            stopped.append(timeout)

    threads = [threading.Thread(target=work, args=(timeout,)) for timeout in (0.3, 0.1, 0.2)]
    for thread in threads:
        thread.start()
    while len(stopped) < 3:
        assert module.run(ones(8), timeout=60)["s"] == 64
    assert sorted(stopped) == [0.1, 0.2, 0.3]
    for thread in threads:
        thread.join()


def test_other_threads_cancel_runs_and_bound_runs(module: Module) -> None:
    bound, errors = module.bind(ones(LONG)), list[BaseException]()

    def work(run: object) -> None:
        try:
            run()
        except StoppedError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(run,)) for run in (bound.run, lambda: module.run(ones(LONG)))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        module.cancel()
        threads[0].join(0.01)
    assert len(errors) == 2 and all("cancel() was called" in str(error) for error in errors)
    assert module.run(ones(8))["s"] == 64
    module.cancel()  # of nothing
    assert module.run(ones(8))["s"] == 64


SCRIPT = """
import os, signal, sys, threading
import tcomp
from tests.runtime.test_stopping import LONG, SHORT, ones, outer_sum

module = tcomp.compile(outer_sum(), threads=int(sys.argv[1]))
seen = []
def answer(number, frame):
    seen.append(number)

def interrupt(): os.kill(os.getpid(), signal.SIGINT)

threading.Timer(0.1, interrupt).start()
try:
    module.run(ones(LONG))
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
signal.signal(signal.SIGINT, answer)  # a handler that returns
timer = threading.Timer(0.02, interrupt)
timer.start()
print(module.run(ones(SHORT))["s"] == SHORT * SHORT)
timer.join()
print(seen)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_control_c_ends_a_run_of_the_main_thread(threads: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(threads)], check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["interrupted", "True"], done.stderr
    assert done.stdout.split("\n")[2] == f"[{int(signal.SIGINT)}]"


def test_signals_of_a_child_do_not_reach_its_parent() -> None:
    tcomp.compile(outer_sum(), threads=1)
    if (child := os.fork()) == 0:
        taken = signal.set_wakeup_fd(-1)
        os._exit(0 if taken == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
