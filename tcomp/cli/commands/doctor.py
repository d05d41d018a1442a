"""`tcomp doctor`: what this machine is, what is usable on it, and why something is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
import time
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
}
_REQUIRED = ("llvmlite", "numpy", "onnx", "ml_dtypes", "islpy", "xgboost")
_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"), "xgboost": ("xgboost-cpu", "xgboost")}


def doctor(as_json: Json = False) -> None:
    """Show this machine, the usable targets, optional parts, the cache; then compile and run a small kernel.

    Exit status: 0 if the self-test passes, 1 if not.
    """
    test = self_test()
    report: dict[str, dict[str, Any]] = {
        "machine": _machine(),
        "targets": _targets(),
        "software": _software(),
        "optional parts": {name: _optional(name, use) for name, use in _OPTIONAL.items()},
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
        raise typer.Exit(1)


def self_test() -> dict[str, Any]:
    """Compile and run a matrix product with an epilogue, and compare it with NumPy."""
    import numpy as np

    from tcomp import build, te

    n = 33  # no multiple of a vector: tails are tested too
    a, b = te.placeholder((n, n), name="a"), te.placeholder((n, n), name="b")
    k = te.reduce_axis(n, name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="c")
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((n, n), np.float32) for _ in range(2))
    start = time.perf_counter()
    try:
        result = build([a, b, c])(x, y)
    except Exception as error:  # noqa: BLE001  whatever goes wrong is what the doctor is asked for
        text = error.what if isinstance(error, TcompError) else f"{type(error).__name__}: {error}"
        return {"ok": False, "detail": " ".join(text.split())[:300]}
    worst = float(np.abs(result - x @ y).max())
    return {"ok": worst < 1e-4, "detail": f"compiled and ran in {output.seconds(time.perf_counter() - start)}, largest error {worst:.1e}"}


def _machine() -> dict[str, Any]:
    from tcomp.runtime import default_threads
    from tcomp.runtime.host import cpu_quota

    affinity, quota = os.sched_getaffinity(0), cpu_quota()
    facts: dict[str, Any] = {"processor": _cpuinfo("model name") or platform.processor() or platform.machine()}
    try:
        from tcomp.target import Target

        host = Target.host()
        facts["LLVM calls it"] = host.cpu
        facts["features used"] = " ".join(host.features) or "none beyond the baseline"
        facts["vectors"] = f"{host.vector_bits} bits"
        facts["caches"] = ", ".join(f"{level.upper()} {output.size(getattr(host, level))}" for level in ("l1", "l2", "l3"))
    except TcompError as error:
        facts["features used"] = f"unknown: {error.what}"
    facts["logical CPUs"] = f"{os.cpu_count()}, of which this process may use {len(affinity)}"
    facts["CPU quota"] = "none" if quota is None else f"{quota:g} CPUs (control group)"
    facts["threads by default"] = default_threads()
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    facts["memory"] = f"{output.size(total)}, {output.size(free)} available" if total else "unknown"
    facts["platform"] = platform.platform()
    return facts


def _targets() -> dict[str, Any]:
    from tcomp.codegen.cuda.nvrtc import architectures, version
    from tcomp.target import Target

    facts: dict[str, Any] = {}
    try:
        facts["cpu"] = f"usable: {Target.host()}"
    except TcompError as error:
        facts["cpu"] = f"not usable: {error.what}"
    arm = platform.machine().lower() in ("aarch64", "arm64")
    facts["other processors"] = f"compile here, run there: 'cpu -mcpu=NAME', {'x86_64' if arm else 'aarch64'}"
    gpu = "there is an NVIDIA driver to run it" if Path("/proc/driver/nvidia/version").exists() else "there is no NVIDIA driver to run it"
    try:
        facts["cuda"] = f"usable: NVRTC {version()} makes code for {', '.join(architectures())}; {gpu}"
    except TcompError as error:
        facts["cuda"] = f"not usable: {error.why or error.what}; {error.hint}"
    return facts


def _software() -> dict[str, Any]:
    import llvmlite.binding as llvm

    import tcomp

    facts = {"tcomp": f"{tcomp.__version__} ({Path(tcomp.__file__).parent})", "Python": f"{platform.python_version()} ({sys.executable})"}
    facts["LLVM"] = ".".join(map(str, llvm.llvm_version_info))
    return facts | {name: _version(name) or "not installed" for name in _REQUIRED}


def _optional(name: str, use: str) -> str:
    found = _version(name)
    return f"{found} ({use})" if found else f"not installed ({use}): pip install {_DISTRIBUTIONS.get(name, (name,))[0]}"


def _version(name: str) -> str | None:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _cache() -> dict[str, Any]:
    from tcomp import cache

    folder = cache.folder()
    files = [f for f in folder.rglob("*") if f.is_file()] if folder.is_dir() else []
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            writable = "yes"
    except OSError as error:
        writable = f"no ({error.strerror}): kernels are compiled anew each time; set TCOMP_CACHE to a folder that is"
    return {
        "folder": folder,
        "size": f"{output.size(sum(f.stat().st_size for f in files))} in {output.count(len(files), 'file')}",
        "writable": writable,
    }


def _cpuinfo(key: str) -> str:
    return _field(Path("/proc/cpuinfo"), key)


def _meminfo(key: str) -> int:
    text = _field(Path("/proc/meminfo"), key).split()
    return int(text[0]) << 10 if text else 0


def _field(path: Path, key: str) -> str:
    """The value of the first `key: value` line of a file."""
    try:
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return ""
