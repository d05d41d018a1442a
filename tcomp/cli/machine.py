"""`tcomp doctor`: what this machine is, what is usable on it, and why something is not; `tcomp demo`: a real network, checked and timed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.options import Json, Threads, option, parse_choices
from tcomp.errors import InputError, TcompError

_OPTIONAL = {
    "onnxruntime": "a peer of `tcomp bench`",
    "openvino": "a peer of `tcomp bench`",
    "torch": "a peer of `tcomp bench`, with torchvision and onnx2torch",
    "cupy": "runs what is compiled for CUDA",
    "pillow": "decodes images (ImageDecoder)",
}
_REQUIRED = ("llvmlite", "numpy", "onnx", "ml_dtypes", "islpy", "xgboost")
_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"), "xgboost": ("xgboost-cpu", "xgboost")}
_MODELS = ("resnet50", "densenet121", "inception_v1", "inception_v2", "shufflenet", "squeezenet", "vgg19", "zfnet512", "bvlc_alexnet")
_RTOL, _ATOL = 1e-3, 1e-7  # those of the ONNX backend tests for these models


def doctor(as_json: Json = False) -> None:
    """Show this machine, the usable targets, optional parts, the cache; then compile and run a small kernel.

    Exit status: 0 if the self-test passes, 1 if not.
    """
    import llvmlite.binding as llvm

    import tcomp

    test = _self_test()
    report: dict[str, dict[str, Any]] = {
        "machine": _machine(),
        "targets": _targets(),
        "software": {
            "tcomp": f"{tcomp.__version__} ({Path(tcomp.__file__).parent})",
            "Python": f"{platform.python_version()} ({sys.executable})",
            "LLVM": ".".join(map(str, llvm.llvm_version_info)),
            **{name: _version(name) or "not installed" for name in _REQUIRED},
        },
        "optional parts": {
            name: f"{version} ({use})"
            if (version := _version(name))
            else f"not installed ({use}): pip install {_DISTRIBUTIONS.get(name, (name,))[0]}"
            for name, use in _OPTIONAL.items()
        },
        "cache": _cache(),
    }
    if as_json:
        output.print_json({**{k.replace(" ", "_"): v for k, v in report.items()}, "self_test": test})
    else:
        for title, rows in report.items():
            output.facts(title, rows)
            output.line()
        output.line(f"self-test: {'ok' if test['ok'] else 'FAILED'} ({test['detail']})", "green" if test["ok"] else "red")
    if not test["ok"]:
        raise typer.Exit(output.FINDING)


def _self_test() -> dict[str, Any]:
    """Compile and run a matrix product with an epilogue, and compare it with NumPy."""
    import numpy as np

    from tcomp import build, te

    n = 33  # no multiple of a vector: tails are tested too
    a, b = te.placeholder((n, n), name="a"), te.placeholder((n, n), name="b")
    k = te.reduce_axis(n, name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="c")
    x, y = np.random.default_rng(0).standard_normal((2, n, n), np.float32)
    start = time.perf_counter()
    try:
        result = build([a, b, c])(x, y)
    except Exception as error:  # noqa: BLE001  whatever goes wrong is what the doctor is there to tell
        text = error.what if isinstance(error, TcompError) else f"{type(error).__name__}: {error}"
        return {"ok": False, "detail": " ".join(text.split())[:300]}
    worst = float(np.abs(result - x @ y).max())
    return {"ok": worst < 1e-4, "detail": f"compiled and ran in {output.seconds(time.perf_counter() - start)}, largest error {worst:.1e}"}


def _machine() -> dict[str, Any]:
    from tcomp.runtime.host import cpu_quota, default_threads, processor_name
    from tcomp.target import Target

    facts: dict[str, Any] = {"processor": processor_name() or platform.processor() or platform.machine()}
    try:
        host = Target.host()
        caches = ", ".join(f"{level.upper()} {output.size(getattr(host, level))}" for level in ("l1", "l2", "l3"))
        facts |= {"LLVM calls it": host.cpu, "features used": " ".join(host.features) or "none beyond the baseline"}
        facts |= {"vectors": f"{host.vector_bits} bits", "caches": caches}
    except TcompError as error:
        facts["features used"] = f"unknown: {error.what}"
    quota, memory = cpu_quota(), {}
    with suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        memory = {name: output.size(int(number) << 10) for name, number, *_ in map(str.split, lines)}
    return facts | {
        "logical CPUs": f"{os.cpu_count()}, of which this process may use {len(os.sched_getaffinity(0))}",
        "CPU quota": "none" if quota is None else f"{quota:g} CPUs (control group)",
        "threads by default": default_threads(),
        "memory": f"{memory['MemTotal:']}, {memory['MemAvailable:']} available" if "MemAvailable:" in memory else "unknown",
        "platform": platform.platform(),
    }


def _targets() -> dict[str, Any]:
    from tcomp.codegen.cuda.nvrtc import architectures, version
    from tcomp.target import Target

    other = "x86_64" if platform.machine().lower() in ("aarch64", "arm64") else "aarch64"
    facts: dict[str, Any] = {"other processors": f"compile here, run there: 'cpu -mcpu=NAME', {other}"}
    try:
        facts["cpu"] = f"usable: {Target.host()}"
    except TcompError as error:
        facts["cpu"] = f"not usable: {error.what}"
    driver = "an" if Path("/proc/driver/nvidia/version").exists() else "no"
    try:
        facts["cuda"] = f"usable: NVRTC {version()} makes code for {', '.join(architectures())}; there is {driver} NVIDIA driver to run it"
    except TcompError as error:
        facts["cuda"] = f"not usable: {error.reason}; {error.hint}"
    return facts


def _version(name: str) -> str | None:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _cache() -> dict[str, Any]:
    from tcomp import cache

    why = cache.problem()
    files = [] if why else cache.entries()
    size = f"{output.size(sum(f.size for f in files))} of {output.size(cache.size_limit())} in {output.count(len(files), 'file')}"
    writable = f"no ({why}): kernels are compiled again each time; set TCOMP_CACHE to a folder that is" if why else "yes"
    return {"folder": cache.folder(), "size": size, "writable": writable}


def demo(
    model: Annotated[str, option("--model", "NAME", f"One of {', '.join(_MODELS)}.", show_default=True)] = "resnet50",
    threads: Threads = None,
    seconds: Annotated[float, option("--seconds", "S", "Time to measure.", min=0.01, max=600, show_default=True)] = 2.0,
    as_json: Json = False,
) -> None:
    """Compile a real network that the onnx package ships, run it, check and measure it.

    The network's weights are placeholders, its expected output is that of the ONNX backend tests. Exit status: 0 if it is right, else 1.
    """
    import numpy as np
    import onnx
    from onnx import numpy_helper

    from tcomp.backends.workers import python_environment
    from tcomp.cli import latency
    from tcomp.options import CompileOptions
    from tcomp.pipeline import compile_model
    from tcomp.runtime import Module

    name = parse_choices(model, _MODELS, "--model")[0]
    path, expected_path = _light(name)
    expected = numpy_helper.to_array(onnx.TensorProto.FromString(expected_path.read_bytes()))
    say = output.message if as_json else output.line
    say(f"{name}, from {path}")
    with tempfile.TemporaryDirectory(prefix="tcomp-demo-") as folder, output.progress() as tell:
        start = time.perf_counter()
        artifact, report = compile_model(path, CompileOptions(threads=threads, progress=tell))
        compile_seconds = time.perf_counter() - start
        file, inputs = Path(folder, f"{name}.tcomp"), Path(folder, "inputs.npz")
        artifact.save(file)
        start = time.perf_counter()
        module = Module.load(file, threads=threads)
        load_seconds = time.perf_counter() - start
        shape = [int(e) for e in module.inputs[0].shape]
        ramp = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / np.prod(shape)
        feeds = {module.inputs[0].name: ramp.astype(np.float32)}
        result = next(iter(module.run(feeds).values()))
        right = result.shape == expected.shape and bool(np.allclose(result, expected, _RTOL, _ATOL))
        error = float(np.abs(result - expected).max()) if result.shape == expected.shape else float("inf")
        np.savez(inputs, allow_pickle=False, **feeds)
        command = [sys.executable, "-P", "-m", "tcomp.cli.footprint", str(file), str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=python_environment())
        cost: dict[str, float] = json.loads(done.stdout)
        failures: dict[str, str] = {}
        peers = [] if (how_to_install := latency.missing("onnxruntime")) else ["onnxruntime"]
        ours, *theirs = latency.side_by_side(module, path, peers, feeds, seconds, failures, tell)

    if as_json:
        record: dict[str, Any] = {"model": name, "ok": right, "max_error": error, "threads": module.threads, "kernels": report.kernels}
        record |= {"compile_seconds": compile_seconds, "load_seconds": load_seconds, "artifact_bytes": len(artifact.image), "process": cost}
        output.print_json(record | {"latency": {x.contender: x.record() for x in (ours, *theirs)}})
    else:
        peer = f"failed: {failures['onnxruntime']}" if failures else f"not installed; to compare: {how_to_install}"
        rows = {
            "compile": f"{output.seconds(compile_seconds)} ({output.stages(report.seconds)})",
            "kernels": f"{report.kernels}, {report.distinct_kernels} distinct",
            "artifact": output.size(len(artifact.image)),
            "load": f"{output.seconds(load_seconds)}; in a new process {output.seconds(cost['load_s'])}",
            "peak memory": f"{output.size(cost['peak_bytes'])}, of which Python and NumPy {output.size(cost['import_peak_bytes'])}",
            "workspace": output.size(report.arena),
            "result": f"{'right' if right else 'WRONG'}: largest error {error:.1e}, largest value {np.abs(expected).max():.2g}",
            "latency": ours,
            "ONNX Runtime": f"{theirs[0]}: {theirs[0].ratio:.2f} times that of tcomp" if theirs else peer,
        }
        output.facts("", rows)
        output.line("the result is right" if right else "the result is wrong", "green" if right else "red")
    if not right:
        raise typer.Exit(output.FINDING)


def _light(name: str) -> tuple[Path, Path]:
    """The files of a light model: the network and its expected output. Raises `InputError`."""
    import onnx

    base = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    files = base / f"light_{name}.onnx", base / f"light_{name}_output_0.pb"
    if not all(f.is_file() for f in files):
        raise InputError(f"the installed onnx package does not ship {name}", hint="pip install --upgrade onnx")
    return files
