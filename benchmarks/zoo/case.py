"""One network at one batch and number of threads, in this process: is tcomp right, and how long do it and its peers take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..timing import least_by_clocks

Arrays = Mapping[str, np.ndarray]
TOLERANCE = 5e-3  # of the largest element, between results in float32 of random networks that may amplify differences
ROUNDING = 1e-5  # of an input's elements: about what fast algorithms round away in a layer. A network that turns so little into more than
SAMPLES = 8  # the tolerance, in any of so many samples, has results that float32 does not determine better than that


def measured(path: Path, threads: int, seconds: float, kernels: bool) -> dict[str, Any]:
    """What is found out of a model: "outcome" ("right", "wrong" or an error), the least times in milliseconds of a run by the clock and by
    the process's own time, "compile_s" without a cache, and with `kernels` for each kernel what the model of the machine predicts and what a
    profile measured, in microseconds."""
    import onnxruntime

    result: dict[str, Any] = {"outcome": "right", "threads": threads}
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads, settings.log_severity_level = threads, 1, 4
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {i.name: _random(rng, i.name, i.shape, i.type) for i in session.get_inputs()}
    wanted = session.run(None, feeds)[0]
    runs: dict[str, Callable[[], Any]] = {"onnxruntime": lambda: session.run(None, feeds)}
    run = _openvino(path, threads, feeds)
    if (difference := _difference(run(), wanted)) <= TOLERANCE:
        runs["openvino"] = run
    result["openvino_difference"] = difference
    try:
        module, predicted, result["compile_s"] = _compiled(path, threads, kernels)
        bound = module.bind({i.name: feeds[i.name] for i in module.inputs})
        found = bound.run()
        result["difference"] = _difference(next(iter(found.values())), wanted)
        if not result["difference"] <= TOLERANCE:
            result["amplified"] = _amplified(lambda feeds: session.run(None, feeds)[0], feeds, wanted, rng)
            result["outcome"] = "right" if result["difference"] <= result["amplified"] else "wrong"
        runs["tcomp"] = bound.run
    except Exception as error:  # noqa: BLE001  every failure is a finding
        return result | {"outcome": type(error).__name__, "detail": " ".join(str(error).split())[:400]}
    least = least_by_clocks(runs, [time.perf_counter, time.process_time], 5, seconds)
    result |= {f"{clock}_ms": {name: times[n] * 1e3 for name, times in least.items()} for n, clock in enumerate(("wall", "own"))}
    if kernels:
        profiles = [module.profile({i.name: feeds[i.name] for i in module.inputs}) for _ in range(5)]
        times = [min(p[n][1] for p in profiles) for n in range(len(profiles[0]))]
        names = [name for name, _ in profiles[0]]
        if len(predicted) == len(times):
            pairs = zip(names, predicted, times, strict=True)
            result["kernels"] = [[name, round(a * 1e6, 2), round(b * 1e6, 2)] for name, a, b in pairs]
    return result


def _amplified(run: Callable[[Arrays], np.ndarray], feeds: Arrays, wanted: np.ndarray, rng: np.random.Generator) -> float:
    """The largest difference between results of one runtime for inputs that differ by `ROUNDING`."""
    found = 0.0
    for _ in range(SAMPLES):
        near = {
            name: a if a.dtype != np.float32 else (a * (1 + ROUNDING * rng.standard_normal(a.shape))).astype(a.dtype)
            for name, a in feeds.items()
        }
        found = max(found, _difference(run(near), wanted))
    return found


def _random(rng: np.random.Generator, name: str, shape: list[int], dtype: str) -> np.ndarray:
    if dtype == "tensor(int64)":
        return np.ones(shape, np.int64) if len(shape) < 2 or "mask" in name else rng.integers(1, 99, shape)
    return rng.standard_normal(shape).astype(np.float32)


def _openvino(path: Path, threads: int, feeds: Arrays) -> Callable[[], np.ndarray]:
    try:
        import openvino
    except ImportError:
        return lambda: np.array(np.nan)
    config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    try:
        request = openvino.Core().compile_model(str(path), "CPU", config).create_infer_request()
    except RuntimeError:
        return lambda: np.array(np.nan)
    known = {name for i in request.model_inputs for name in i.get_names()}
    given = {name: a for name, a in feeds.items() if name in known}
    return lambda: request.infer(given, share_inputs=True, share_outputs=True)[0]


def _difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference over the largest element; infinite for other shapes, and where only one has NaN."""
    if found.shape != wanted.shape or not np.array_equal(np.isnan(found), np.isnan(wanted)):
        return float("inf")
    return float(np.nanmax(np.abs(found - wanted), initial=0.0) / max(1e-12, float(np.nanmax(np.abs(wanted), initial=0.0))))


def _compiled(path: Path, threads: int, kernels: bool) -> tuple[Any, list[float], float]:
    """(the loaded model, the predicted seconds of its kernels in order, 0 for those that run several times, seconds to compile)."""
    from tcomp.backends.kernel import predicted_seconds
    from tcomp.backends.workers import Compilation
    from tcomp.ir.graph import KERNEL
    from tcomp.options import CompileOptions, Report
    from tcomp.passes.runner import run_passes
    from tcomp.pipeline import compile_partitioned, graph_passes, import_graph, kernel_nodes
    from tcomp.runtime import Module

    options, report, start = CompileOptions(threads=threads), Report(), time.perf_counter()
    with Compilation(options.backend) as compilation:
        graph, _ = run_passes(import_graph(os.fspath(path), options), graph_passes(options, report, compilation))
        artifact = compile_partitioned(graph, options, report, compilation)
    module, spent = Module.load(artifact, threads=threads), time.perf_counter() - start
    once = {n for n in graph.nodes if n.op is KERNEL}  # not those of loops, of which a profile tells the sum of all steps
    asked = kernel_nodes(graph) if kernels else ()
    return module, [predicted_seconds(n.bodies[0], options.backend) if n in once else 0.0 for n in asked], spent
