"""`tcomp demo`: a real network, compiled, checked and timed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.options import Json, Threads, check_writable, option, parse_choices
from tcomp.errors import InputError

_MODEL = "`text` (which the extra `demo` brings), resnet50, densenet121, squeezenet, ... Default: text, else resnet50."
_TEXT = "What the network of `text` reads. Default: Hello, world!"


def demo(
    model: Annotated[str | None, option("--model", "NAME", _MODEL)] = None,
    text: Annotated[str | None, option("--text", "TEXT", _TEXT)] = None,
    picture: Annotated[Path | None, option("--picture", "FILE.png", "Save the picture that it reads.")] = None,
    threads: Threads = None,
    seconds: Annotated[float, option("--seconds", "S", "Time to measure.", min=0.01, max=600, show_default=True)] = 2.0,
    as_json: Json = False,
) -> None:
    """Compile a real network that a package ships, run it, check and measure it.

    `text` was trained to read, and reads a picture of a text. The others are of the onnx package: their weights are placeholders, their
    expected outputs those of the ONNX backend tests. Exit status: 0 if the result is right, else 1.
    """
    import numpy as np

    from tcomp.backends.workers import python_environment
    from tcomp.cli import demo_networks, latency
    from tcomp.options import CompileOptions
    from tcomp.pipeline import compile_model
    from tcomp.runtime import Module

    absent = demo_networks.missing_for_text()
    names = (demo_networks.TEXT, *demo_networks.LIGHT)
    name = parse_choices(model, names, "--model")[0] if model else demo_networks.LIGHT[0] if absent else demo_networks.TEXT
    if name != demo_networks.TEXT and (given := [option for option, value in {"--text": text, "--picture": picture}.items() if value]):
        raise InputError(f"{given[0]} is for the model `text`", hint="--model text" if not absent else demo_networks.EXTRA)
    if picture is not None:
        check_writable(picture)
    network = demo_networks.reading("Hello, world!" if text is None else text) if name == demo_networks.TEXT else demo_networks.light(name)
    if picture is not None and network.picture is not None:
        network.picture.save(picture, format="png")
    say = output.message if as_json else output.line
    say(f"{name}, from {network.path}")
    if model is None and absent:
        say(f"({demo_networks.EXTRA} brings a network that was trained to read, and the demo has it read a picture)")
    with tempfile.TemporaryDirectory(prefix="tcomp-demo-") as folder, output.progress() as tell:
        start = time.perf_counter()
        shapes = {input: array.shape for input, array in network.feeds.items()}
        artifact, report = compile_model(network.path, CompileOptions(threads=threads, progress=tell, shapes=shapes))
        compile_seconds = time.perf_counter() - start
        file, inputs = Path(folder, f"{name}.tcomp"), Path(folder, "inputs.npz")
        artifact.save(file)
        start = time.perf_counter()
        module = Module.load(file, threads=threads)
        load_seconds = time.perf_counter() - start
        verdict = network.judge(next(iter(module.run(network.feeds).values())))
        np.savez(inputs, allow_pickle=False, **network.feeds)
        command = [sys.executable, "-P", "-m", "tcomp.cli.footprint", str(file), str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=python_environment())
        cost: dict[str, float] = json.loads(done.stdout)
        failures: dict[str, str] = {}
        peers = [] if (how_to_install := latency.missing("onnxruntime")) else ["onnxruntime"]
        ours, *theirs = latency.side_by_side(module, network.path, peers, network.feeds, seconds, failures, tell)

    if as_json:
        record: dict[str, Any] = {
            "model": name,
            "ok": verdict.right,
            "threads": module.threads,
            "kernels": report.kernels,
            **verdict.record,
        }
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
            **verdict.rows,
            "latency": ours,
            "ONNX Runtime": f"{theirs[0]}: {theirs[0].ratio:.2f} times that of tcomp" if theirs else peer,
        }
        output.facts("", rows)
        output.line("the result is right" if verdict.right else "the result is wrong", "green" if verdict.right else "red")
    if not verdict.right:
        raise typer.Exit(output.FINDING)
