"""How exact and how frugal compiled models are: `python -m benchmarks.exactness [--only PATTERNS]`.

Error: tcomp with and without its fast algorithms (`--direct`), and ONNX Runtime, against the same model computed in float64 (every float32 of the
file made a float64, compiled by tcomp; were that wrong, both would be far from it). An error is the largest over the outputs of
max |got - reference| / max |reference|; of several random inputs the root of the mean square counts, since a single one is a matter of luck.
Allowed are twice the error of ONNX Runtime, and where Winograd's algorithm takes part, 1e-3 with it and that without.
Quantised models are left out: float64 does not say what they should compute.

Memory: the peak of a process that loads the artifact and runs it once, beside the weights (the artifact's size), the arena, and what Python with
NumPy and the inputs took before; and the arena over the largest number of bytes that are alive at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table

from tcomp.errors import TcompError
from tcomp.ops.bilinear import WINOGRAD_PRODUCT
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime import Module

from .contenders.worker import Run, difference, load_onnxruntime
from .models import Arrays, Model, Unavailable, compile_arguments, inputs, load_arrays, obtain, select

ALLOWED, FLOOR = 2.0, 1e-7  # times ONNX Runtime's error; differences below that are the rounding of the outputs
WINOGRAD = 1e-3  # where Winograd's algorithm takes part
ROOM = 60.0  # MB beside weights and arena
FLOATS_KEPT = {
    "Resize": (1, 2),
    "Upsample": (1,),
    "QuantizeLinear": (1,),
    "DequantizeLinear": (1,),
}  # inputs that the standard wants in float32


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float64 in the place of float32."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _widen(wide.graph)
    return wide


def _widen(graph: onnx.GraphProto) -> None:
    kept = {n.input[k] for n in graph.node for k in FLOATS_KEPT.get(n.op_type, ()) if k < len(n.input)}
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    del graph.value_info[:]
    for tensor in graph.initializer:
        if tensor.name not in kept:
            _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and not kept.intersection(node.output):
                _widen_tensor(attribute.t)
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
            if attribute.name == "value_float":
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(np.array(attribute.f, np.float64))))
            for inner in (attribute.g, *attribute.graphs):
                _widen(inner)
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1, np.float64))))


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def made(model: Model, source: Any, feeds: Arrays, threads: int, **options: Any) -> Any:
    arguments = compile_arguments(model, feeds)
    if model.dynamic:
        arguments = {"dims": arguments["dims"]}
    return compile_model(source, CompileOptions(threads=threads, **arguments, **options))


def exactness(model: Model, path: Path, threads: int, draws: int) -> dict[str, Any]:
    feeds = load_arrays(path, "inputs")
    artifact, report = made(model, str(path), feeds, threads, emit=("graph",))
    found: dict[str, Any] = {"arena": report.arena, "bound": report.arena_lower_bound, **memory(artifact, feeds)}
    found["winograd"] = WINOGRAD_PRODUCT.name in report.stages["graph"]
    if "int8" in model.name:
        return found
    exact = loaded(made(model, widened(onnx.load(path)), wide(feeds), threads)[0], threads)
    direct = made(model, str(path), feeds, threads, direct=True)[0]
    runs = {"tcomp": loaded(artifact, threads), "direct": loaded(direct, threads),
            "onnxruntime": load_onnxruntime(path, path, threads, {"fixed": {}}, feeds)}  # fmt: skip
    errors: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(draws):
        given = inputs(model, path, seed) | {name: feeds[name] for name in model.fixed}
        reference = exact(wide(given))
        for name, run in runs.items():
            got = {key: np.asarray(a).astype(reference[key].dtype) for key, a in run(given).items()}
            errors[name].append(difference(got, reference))
    return found | {name: float(np.sqrt(np.mean(np.square(e)))) for name, e in errors.items()}


def loaded(artifact: Any, threads: int) -> Run:
    module = Module.load(artifact, threads=threads)
    return lambda given: dict(module.run({i.name: given[i.name] for i in module.inputs}))


def wide(feeds: Arrays) -> Arrays:
    return {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in feeds.items()}


def memory(artifact: Any, feeds: Arrays) -> dict[str, float]:
    """MB."""
    with tempfile.TemporaryDirectory(prefix="tcomp-bench-") as folder:
        files = [str(Path(folder) / name) for name in ("model.tcomp", "inputs.npz")]
        artifact.save(files[0])
        names = {i.name for i in Module.load(files[0], threads=1).inputs}
        np.savez(files[1], allow_pickle=False, **{name: a for name, a in feeds.items() if name in names})
        done = subprocess.run([sys.executable, "-m", "tcomp.cli.footprint", *files], capture_output=True, text=True, check=True)
        spent = json.loads(done.stdout)
        return {
            "weights": Path(files[0]).stat().st_size / 1e6,
            "peak": spent["peak_bytes"] / 1e6,
            "before": spent["import_peak_bytes"] / 1e6,
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", metavar="PATTERNS", help="names or glob patterns, comma-separated; default: all but light_*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draws", type=int, default=8, help="random inputs of each model")
    args = parser.parse_args(argv)
    errors = Table(
        "model", "tcomp", "direct", "ONNX Runtime", "ratio", "direct", "Winograd", box=box.MARKDOWN, title="Error against float64"
    )
    sizes = Table("model", "weights MB", "arena MB", "arena / bound", "before MB", "peak MB", "beyond MB", box=box.MARKDOWN, title="Memory")
    missed, console = 0, Console(width=160)
    for model in (m for m in select(args.only) if args.only or not m.name.startswith("light_")):
        try:
            found = exactness(model, obtain(model), args.threads, args.draws)
        except (TcompError, Unavailable, subprocess.CalledProcessError) as e:
            errors.add_row(model.name, f"failed: {e}"[:100])
            missed += 1
            continue
        if "tcomp" in found:
            ratios = [max(found[k], FLOOR) / max(found["onnxruntime"], FLOOR) for k in ("tcomp", "direct")]
            missed += ratios[1] > ALLOWED or (found["tcomp"] > WINOGRAD if found["winograd"] else ratios[0] > ALLOWED)
            row = [*(f"{found[k]:.1e}" for k in ("tcomp", "direct", "onnxruntime")), *(f"{r:.2f}" for r in ratios)]
            errors.add_row(model.name, *row, "yes" if found["winograd"] else "no")
        arena = found["arena"] / 1e6 if isinstance(found["arena"], int) else None
        beyond = None if arena is None else found["peak"] - found["weights"] - arena
        missed += beyond is not None and beyond > ROOM
        tight = "-" if not found["bound"] else f"{found['arena'] / found['bound']:.3f}"
        figures = (found["weights"], arena, tight, found["before"], found["peak"], beyond)
        sizes.add_row(model.name, *("-" if f is None else f if isinstance(f, str) else f"{f:.1f}" for f in figures))
        print(model.name, file=sys.stderr, flush=True)
    console.print(errors)
    console.print(sizes)
    print(
        f"{missed} beyond what is allowed: {ALLOWED:g} times the error of ONNX Runtime ({WINOGRAD:g} where Winograd's algorithm takes part), {ROOM:g} MB beside weights and arena"
    )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
