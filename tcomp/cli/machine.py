"""`tcomp doctor`: what this machine is, what is usable on it, and why something is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from tcomp.cli import output
from tcomp.cli.options import Json
from tcomp.errors import TcompError

_OPTIONAL = {
    "onnxruntime": "a peer of `tcomp bench`",
    "openvino": "a peer of `tcomp bench`",
    "torch": "a peer of `tcomp bench`, with torchvision and onnx2torch",
    "cupy": "runs what is compiled for CUDA",
    "pillow": "decodes images (ImageDecoder)",
}
_REQUIRED = ("llvmlite", "numpy", "onnx", "ml_dtypes", "islpy", "xgboost")
_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"), "xgboost": ("xgboost-cpu", "xgboost")}


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
