"""`tcomp demo`: a real network, from file to checked result, on one page."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tcomp
from tcomp.cli import output
from tcomp.cli.options import Json, Threads, parse_choices
from tcomp.errors import InputError

if TYPE_CHECKING:
    import numpy as np

_MODELS = ("resnet50", "densenet121", "inception_v1", "inception_v2", "shufflenet", "squeezenet", "vgg19", "zfnet512", "bvlc_alexnet")
_RTOL, _ATOL = 1e-3, 1e-7  # those of the ONNX backend tests for these models


def demo(
    model: Annotated[str, typer.Option("--model", metavar="NAME", help=f"One of {', '.join(_MODELS)}.")] = "resnet50",
    threads: Threads = None,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.01, max=600, help="Time to measure.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Compile a real network that the onnx package ships, run it, check and measure it.

    The network's weights are placeholders, its expected output is that of the ONNX backend tests. Exit status: 0 if the result is
    right, 1 if not.
    """
    import numpy as np

    from tcomp.cli import peers
    from tcomp.cli.measure import interleaved
    from tcomp.options import CompileOptions
    from tcomp.pipeline import compile_model
    from tcomp.runtime import Module

    name = parse_choices(model, _MODELS, "--model")[0]
    path, expected_path = _light(name)
    expected = _read_tensor(expected_path)
    say = output.message if as_json else output.line
    say(f"{name}, from {path}")
    with tempfile.TemporaryDirectory(prefix="tcomp-demo-") as folder, output.progress() as tell:
        start = time.perf_counter()
        artifact, report = compile_model(path, CompileOptions(threads=threads, progress=tell))
        compile_seconds = time.perf_counter() - start
        file = Path(folder, f"{name}.tcomp")
        artifact.save(file)
        start = time.perf_counter()
        module = Module.load(file, threads=threads)
        load_seconds = time.perf_counter() - start
        spec = module.inputs[0]
        shape = [int(e) for e in spec.shape]
        ramp = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / np.prod(shape)
        feeds = {spec.name: ramp.astype(np.float32)}
        result = next(iter(module.run(feeds).values()))
        right = result.shape == expected.shape and bool(np.allclose(result, expected, _RTOL, _ATOL))
        error = float(np.abs(result - expected).max()) if result.shape == expected.shape else float("inf")
        cost = _footprint(file, feeds, Path(folder, "inputs.npz"))
        contenders: dict[str, Callable[[], object]] = {"tcomp": partial(module.run, feeds)}
        if peers.is_installed("onnxruntime"):
            tell("loading ONNX Runtime", 0, 1)
            contenders["onnxruntime"] = partial(peers.onnxruntime(path, module.threads, feeds), feeds)
        latency = interleaved(contenders, seconds, tell)

    ours, theirs = latency["tcomp"], latency.get("onnxruntime")
    if as_json:
        record: dict[str, Any] = {"model": name, "ok": right, "max_error": error, "threads": module.threads, "kernels": report.kernels}
        record |= {"compile_seconds": compile_seconds, "load_seconds": load_seconds, "artifact_bytes": len(artifact.image), "process": cost}
        record["latency"] = {n: {"min_seconds": t.least, "median_seconds": t.median, "runs": len(t.times)} for n, t in latency.items()}
        output.print_json(record)
    else:
        stages = ", ".join(f"{stage} {output.seconds(s)}" for stage, s in report.seconds.items())
        workspace = output.size(report.arena) if isinstance(report.arena, int) else str(report.arena)
        rows = {
            "compile": f"{output.seconds(compile_seconds)} ({stages})",
            "kernels": f"{report.kernels}, {report.distinct_kernels} distinct",
            "artifact": output.size(len(artifact.image)),
            "load": f"{output.seconds(load_seconds)}; in a new process {output.seconds(cost['load_s'])}",
            "peak memory": f"{output.size(cost['peak_bytes'])}, of which Python and NumPy {output.size(cost['import_peak_bytes'])}",
            "workspace": workspace,
            "result": f"{'right' if right else 'WRONG'}: largest error {error:.1e}, largest value {np.abs(expected).max():.2g}",
            "latency": _latency(ours, module.threads),
        }
        if theirs is not None:
            rows["ONNX Runtime"] = f"{_latency(theirs, module.threads)}: {theirs.median / ours.median:.2f} times that of tcomp"
        else:
            rows["ONNX Runtime"] = f"not installed; to compare: {peers.how_to_install('onnxruntime')}"
        output.facts("", rows)
        output.line("the result is right" if right else "the result is wrong", "green" if right else "red")
    if not right:
        raise typer.Exit(1)


def _latency(found: Any, threads: int) -> str:
    runs = f"{output.count(len(found.times), 'run')}, {output.count(threads, 'thread')}"
    return f"median {output.seconds(found.median)}, min {output.seconds(found.least)} ({runs})"


def _light(name: str) -> tuple[Path, Path]:
    """The files of a light model: the network and its expected output. Raises `InputError`."""
    spec = importlib.util.find_spec("onnx")
    for root in (spec.submodule_search_locations or []) if spec else []:
        base = Path(root, "backend", "test", "data", "light", f"light_{name}")
        files = base.with_name(base.name + ".onnx"), base.with_name(base.name + "_output_0.pb")
        if all(f.is_file() for f in files):
            return files
    raise InputError(f"the installed onnx package does not ship {name}", hint="pip install --upgrade onnx")


def _read_tensor(path: Path) -> np.ndarray:
    import onnx
    from onnx import numpy_helper

    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def _footprint(artifact: Path, feeds: dict[str, np.ndarray], inputs: Path) -> dict[str, float]:
    import numpy as np

    np.savez(inputs, allow_pickle=False, **feeds)
    command = [sys.executable, "-P", "-m", "tcomp.cli.footprint", str(artifact), str(inputs)]
    path = os.pathsep.join([str(Path(tcomp.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    record: dict[str, float] = json.loads(done.stdout)
    return record
