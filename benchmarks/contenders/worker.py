"""One contender in its own process: loads one model, checks it, times it, as requests on stdin say.

    python -m benchmarks.contenders.worker CONTENDER

Requests are JSON: {"do": "hello" | "compile" | "load" | "check" | "time" | "rss", ...}, one a line; every one is answered
by one line, {"ok": true, ...} or {"ok": false, "error": "..."}. A worker holds one model at one thread count, so that
its peak memory and its threads are its own. Whatever a library prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..models import Arrays, load_arrays

Run = Callable[[Arrays], Arrays]

# Each contender has a function that loads a model: (path, artifact, threads, arguments, inputs) → how to run it.


def load_tcomp(path: Path, artifact: Path, threads: int, arguments: dict[str, Any], feeds: Arrays) -> Run:
    import tcomp

    module = tcomp.load(str(artifact), threads=threads)
    names = [i.name for i in module.inputs]
    return lambda given: module.run({name: given[name] for name in names})


def load_onnxruntime(path: Path, artifact: Path, threads: int, arguments: dict[str, Any], feeds: Arrays) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    for name, size in arguments["fixed"].items():
        options.add_free_dimension_override_by_name(name, size)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def load_openvino(path: Path, artifact: Path, threads: int, arguments: dict[str, Any], feeds: Arrays) -> Run:
    import openvino

    core = openvino.Core()
    model = core.read_model(str(path))
    if "shapes" in arguments:
        model.reshape(arguments["shapes"])
    config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    names = [(name, k) for k, output in enumerate(compiled.outputs) for name in output.get_names()]  # has aliases

    def run(feeds: Arrays) -> Arrays:
        results = request.infer(feeds, share_inputs=True, share_outputs=True)
        return {name: results[k] for name, k in names}

    return run


CONTENDERS = {"tcomp": load_tcomp, "onnxruntime": load_onnxruntime, "openvino": load_openvino}


def difference(got: Arrays, reference: Arrays) -> float:
    """The largest over the outputs of max |got - reference| / max |reference|; infinite where shapes or NaNs differ."""
    worst = 0.0
    for name, want in reference.items():
        have = np.asarray(got[name])
        if have.shape != want.shape or have.dtype != want.dtype:
            return float("inf")
        if want.size:
            a, b = have.astype(np.float64), want.astype(np.float64)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            error = np.where(same, 0.0, np.abs(a - b)).max() / (np.abs(b[np.isfinite(b)]).max(initial=0.0) or 1.0)
            worst = max(worst, float("inf") if np.isnan(error) else float(error))
    return worst


def peak_rss_mb() -> float:
    """Of this process image; getrusage would also count the parent it was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class Worker:
    def __init__(self, contender: str) -> None:
        self.contender = contender
        self.run: Run
        self.feeds: Arrays
        self.path: Path

    def hello(self) -> dict[str, Any]:
        package = importlib.import_module(self.contender)
        if self.contender == "tcomp":
            package.compile, package.load  # noqa: B018  AttributeError says which one is missing
        return {"version": getattr(package, "__version__", "?").split("-")[0]}

    def compile(self, path: str, artifact: str, threads: int, arguments: dict[str, Any]) -> dict[str, Any]:
        import tcomp

        known = {k: v for k, v in arguments.items() if k != "fixed"}
        ranges = {k: tuple(v) for k, v in known.pop("dims", {}).items()}
        shapes = {k: tuple(v) for k, v in known.pop("shapes", {}).items()}
        start = time.perf_counter()
        module = tcomp.compile(path, shapes=shapes or None, dims=ranges or None, threads=threads, values=known.get("values"))
        seconds = time.perf_counter() - start
        module.save(artifact)
        return {"compile_s": seconds}

    def load(self, path: str, artifact: str, threads: int, arguments: dict[str, Any]) -> dict[str, Any]:
        importlib.import_module(self.contender)  # not part of the load time
        self.path, self.feeds = Path(path), load_arrays(Path(path), "inputs")
        start = time.perf_counter()
        self.run = CONTENDERS[self.contender](self.path, Path(artifact), threads, arguments, self.feeds)
        loaded = time.perf_counter()
        self.run(self.feeds)
        first = time.perf_counter() - loaded
        return {"load_ms": (loaded - start) * 1e3, "first_run_ms": first * 1e3}

    def check(self) -> dict[str, Any]:
        return {"error": difference(self.run(self.feeds), load_arrays(self.path, "outputs"))}

    def time(self, seconds: float) -> dict[str, Any]:
        """Runs for about `seconds`, at least three times, after one run that is not counted."""
        run, feeds, clock = self.run, self.feeds, time.perf_counter_ns
        times: list[float] = []
        run(feeds)
        end = clock() + int(seconds * 1e9)
        while len(times) < 3 or clock() < end:
            start = clock()
            run(feeds)
            times.append((clock() - start) / 1e6)
        return {"times_ms": times}

    def rss(self) -> dict[str, Any]:
        return {"peak_rss_mb": peak_rss_mb()}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(sys.argv[1])
    actions = (worker.hello, worker.compile, worker.load, worker.check, worker.time, worker.rss)
    by_name = {action.__name__: action for action in actions}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"ok": True, **by_name[request.pop("do")](**request)}
        except Exception as e:  # noqa: BLE001  a contender's trouble is its answer
            reply = {"ok": False, "error": f"{type(e).__name__}: {e}"}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
