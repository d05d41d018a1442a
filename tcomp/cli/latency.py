"""Latency of a model, side by side with that of other runtimes where they are installed; all are warm, and take turns in short blocks."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.cli import output
from tcomp.errors import TcompError
from tcomp.options import Progress
from tcomp.runtime import LoadedModel
from tcomp.verification import compare

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Arrays]

ROUNDS = 5  # blocks of each contender: enough that a disturbance of the machine does not hit one of them alone
PAUSE = 0.02  # seconds before a block: threads of the one before stop spinning and go to sleep
MIN_RUNS = 3  # that are timed in a block, whatever its time


@dataclass(frozen=True)
class Latency:
    """One contender at one number of threads: seconds of its runs, their median relative to tcomp's, and the difference of its outputs from
    tcomp's, relative to their largest magnitude."""

    contender: str
    threads: int
    times: tuple[float, ...]
    ratio: float
    difference: float

    @property
    def median(self) -> float:
        """Median seconds of a run."""
        return statistics.median(self.times)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        times = {"min_seconds": min(self.times), "median_seconds": self.median, "runs": len(self.times)}
        return {"contender": self.contender, "threads": self.threads, **times, "ratio": self.ratio, "difference": self.difference}

    def __str__(self) -> str:
        runs = f"{output.count(len(self.times), 'run')}, {output.count(self.threads, 'thread')}"
        return f"median {output.seconds(self.median)}, min {output.seconds(min(self.times))} ({runs})"


def side_by_side(
    module: LoadedModel, path: Path, peers: Sequence[str], arrays: Arrays, seconds: float, failures: dict[str, str], tell: Progress
) -> list[Latency]:
    """tcomp, and other runtimes with as many threads. A runtime that cannot run the model goes to `failures`."""
    want = module.run(arrays)
    contenders: dict[str, Callable[[], object]] = {"tcomp": partial(module.run, arrays)}
    difference = {"tcomp": 0.0}
    for peer in peers:
        tell(f"loading {peer}", 0, 1)
        try:
            run = _LOADERS[peer](path, module.threads, arrays)
            got = run(arrays)
        except TcompError:
            raise
        except Exception as error:  # noqa: BLE001  a peer may refuse a model in any way; the others are still worth measuring
            failures[peer] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            continue
        contenders[peer] = partial(run, arrays)
        difference[peer] = max((compare(n, got[n], a).error for n, a in want.items() if n in got), default=0.0)
    times = _interleaved(contenders, seconds, tell)
    ours = statistics.median(times["tcomp"])
    return [Latency(name, module.threads, tuple(t), statistics.median(t) / ours, difference[name]) for name, t in times.items()]


def _interleaved(contenders: Mapping[str, Callable[[], object]], seconds: float, tell: Progress) -> dict[str, list[float]]:
    """Times of runs of each contender, for about `seconds`, in blocks that take turns, each after runs that do not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    clock, was_enabled = time.perf_counter, gc.isenabled()
    gc.disable()
    try:
        for number in range(ROUNDS):
            for name, run in contenders.items():
                time.sleep(PAUSE)
                run()
                run()
                begin, first = clock(), len(times[name])
                while len(times[name]) - first < MIN_RUNS or clock() - begin < seconds / ROUNDS:
                    start = clock()
                    run()
                    times[name].append(clock() - start)
            tell("measuring", number + 1, ROUNDS)
    finally:
        if was_enabled:
            gc.enable()
    return times


def _onnxruntime(path: Path, threads: int, inputs: Arrays) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _openvino(path: Path, threads: int, inputs: Arrays) -> Run:
    import openvino as ov

    core = ov.Core()
    model = core.read_model(str(path))
    model.reshape({name: list(array.shape) for name, array in inputs.items()})
    config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    names = [(name, n) for n, port in enumerate(compiled.outputs) for name in port.get_names()]  # with aliases

    def run(feeds: Arrays) -> Arrays:
        results = request.infer(dict(feeds), share_inputs=True, share_outputs=True)
        return {name: results[n] for name, n in names}

    return run


def _torch(path: Path, threads: int, inputs: Arrays) -> Run:
    """PyTorch, through onnx2torch."""
    import onnx
    import onnx2torch
    import torch as pytorch

    proto = onnx.load(str(path))
    module, names = onnx2torch.convert(proto).eval(), [o.name for o in proto.graph.output]

    def run(feeds: Arrays) -> Arrays:
        pytorch.set_num_threads(threads)
        with pytorch.inference_mode():
            results: Any = module(*(pytorch.from_numpy(feeds[name]) for name in inputs))
        several = results if isinstance(results, tuple | list) else (results,)
        return {name: r.numpy() for name, r in zip(names, several, strict=True)}

    return run


_LOADERS: Mapping[str, Callable[[Path, int, Arrays], Run]] = {"onnxruntime": _onnxruntime, "openvino": _openvino, "torch": _torch}
_NEEDS = {"onnxruntime": ("onnxruntime",), "openvino": ("openvino",), "torch": ("torch", "torchvision", "onnx2torch")}


def missing(peer: str) -> str:
    """The command that installs a peer; "" where it is installed."""
    there = all(importlib.util.find_spec(package) is not None for package in _NEEDS[peer])
    return "" if there else f"pip install {' '.join(_NEEDS[peer])}"
