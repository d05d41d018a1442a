"""`tcomp demo`: a real network, from file to checked result, on one page."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.options import Json, Threads
from tcomp.cli.syntax import parse_choices
from tcomp.errors import InputError

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
        spec = module.inputs[0]
        shape = [int(e) for e in spec.shape]
        ramp = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / np.prod(shape)
        feeds = {spec.name: ramp.astype(np.float32)}
        result = next(iter(module.run(feeds).values()))
        right = result.shape == expected.shape and bool(np.allclose(result, expected, _RTOL, _ATOL))
        error = float(np.abs(result - expected).max()) if result.shape == expected.shape else float("inf")
        np.savez(inputs, allow_pickle=False, **feeds)
        command = [sys.executable, "-P", "-m", "tcomp.cli.footprint", str(file), str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=python_environment())
        cost: dict[str, float] = json.loads(done.stdout)
        failures: dict[str, str] = {}
        peers = [] if latency.missing("onnxruntime") else ["onnxruntime"]
        ours, *theirs = latency.side_by_side(module, path, peers, feeds, seconds, failures, tell)

    if as_json:
        record: dict[str, Any] = {"model": name, "ok": right, "max_error": error, "threads": module.threads, "kernels": report.kernels}
        record |= {"compile_seconds": compile_seconds, "load_seconds": load_seconds, "artifact_bytes": len(artifact.image), "process": cost}
        record["latency"] = {x.contender: x.record() for x in (ours, *theirs)}
        output.print_json(record)
    else:
        rows = {
            "compile": f"{output.seconds(compile_seconds)} ({output.stages(report.seconds)})",
            "kernels": f"{report.kernels}, {report.distinct_kernels} distinct",
            "artifact": output.size(len(artifact.image)),
            "load": f"{output.seconds(load_seconds)}; in a new process {output.seconds(cost['load_s'])}",
            "peak memory": f"{output.size(cost['peak_bytes'])}, of which Python and NumPy {output.size(cost['import_peak_bytes'])}",
            "workspace": output.size(report.arena),
            "result": f"{'right' if right else 'WRONG'}: largest error {error:.1e}, largest value {np.abs(expected).max():.2g}",
            "latency": ours,
        }
        if theirs:
            rows["ONNX Runtime"] = f"{theirs[0]}: {theirs[0].ratio:.2f} times that of tcomp"
        else:
            how = f"not installed; to compare: {latency.missing('onnxruntime')}"
            rows["ONNX Runtime"] = f"failed: {failures['onnxruntime']}" if failures else how
        output.facts("", rows)
        output.line("the result is right" if right else "the result is wrong", "green" if right else "red")
    if not right:
        raise typer.Exit(1)


def _light(name: str) -> tuple[Path, Path]:
    """The files of a light model: the network and its expected output. Raises `InputError`."""
    spec = importlib.util.find_spec("onnx")
    for root in (spec.submodule_search_locations or []) if spec else []:
        base = Path(root, "backend", "test", "data", "light")
        files = base / f"light_{name}.onnx", base / f"light_{name}_output_0.pb"
        if all(f.is_file() for f in files):
            return files
    raise InputError(f"the installed onnx package does not ship {name}", hint="pip install --upgrade onnx")
