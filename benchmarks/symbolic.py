"""Models compiled with free sizes against the same models compiled for one size: `python -m benchmarks.symbolic [--only PATTERNS]`.

    python -m benchmarks.symbolic --only 'squeezenet,vit*' --batch 1,8 --json symbolic.json

Each input of a model gets as many free sizes as its graph allows (batch, sequence, height, width): the first of `freed` with which the model
is imported and keeps one. Both run in this process, in turns, on the same inputs; reported are the least times of many runs, with the seconds
that compiling took and the size of the machine code. Where the batch is free, the file's inputs are repeated or cut to the batches asked for.
Both results are compared with each other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table

from tcomp.errors import TcompError, UnsupportedError
from tcomp.ir.expr import as_expr, variables
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model, import_graph
from tcomp.runtime import LoadedModel, Module

from .contenders.worker import difference
from .models import Arrays, Model, Unavailable, load_arrays, obtain, select
from .timing import geomean, least_times

Shapes = dict[str, Sequence[int | str]]
LARGEST_CHANNELS = 4  # of an image: an axis of so few elements holds its channels


def freed(feeds: Arrays) -> Iterator[Shapes]:
    """Shapes with free sizes, the most at first."""

    def shapes(batch: bool, inner: bool, unit: int) -> Shapes:
        sizes = dict[str, int]()  # of the names: an axis of another size keeps it

        def name(size: int, wanted: str, unit: int = 1) -> int | str:
            return size if size % unit or sizes.setdefault(wanted, size) != size else wanted if unit == 1 else f"{unit}*{wanted}"

        def shape(a: np.ndarray) -> Sequence[int | str]:
            free: list[int | str] = list(a.shape)
            if batch and a.ndim > 1:
                free[0] = name(a.shape[0], "batch")
            if inner and a.ndim == 4:
                channels = 1 if a.shape[1] <= LARGEST_CHANNELS else 3
                for axis, wanted in zip((n for n in (1, 2, 3) if n != channels), "hw", strict=True):
                    free[axis] = name(a.shape[axis], wanted, unit if a.shape[axis] % unit == 0 else 1)
            elif inner and a.ndim in (2, 3):
                free[1] = name(a.shape[1], "sequence")
            return free

        return {name: shape(a) for name, a in feeds.items()}

    for batch, inner in ((True, True), (True, False), (False, True)):
        for unit in (1, 32) if inner else (1,):  # of the height and width of images
            yield shapes(batch, inner, unit)


def without_batch(path: Path) -> onnx.ModelProto:
    """The model with the batch of 1 that exporters write into the constant shapes of Reshape copied from its input instead."""
    model = onnx.load(path)
    shapes = {n.input[1] for n in model.graph.node if n.op_type == "Reshape"}
    tensors = {t.name: t for t in model.graph.initializer} | {
        n.output[0]: a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
    }
    for name in shapes & tensors.keys():
        sizes = onnx.numpy_helper.to_array(tensors[name]).copy()
        if sizes.ndim == 1 and sizes.size > 1 and sizes[0] == 1:
            sizes[0] = 0
            tensors[name].CopyFrom(onnx.numpy_helper.from_array(sizes, tensors[name].name))
    return model


def free_shapes(model: Model, path: Path, feeds: Arrays) -> tuple[onnx.ModelProto, dict[str, Any], list[str]]:
    """(the model, arguments of `tcomp.compile`, the sizes that stay free): the most that need no check in a run, else the most with one.
    Raises `TcompError` where none does."""
    values = {name: feeds[name].tolist() for name in model.fixed}
    inputs, error = {name: a for name, a in feeds.items() if name not in values}, None
    checked = None
    for load in (onnx.load, without_batch):
        proto = load(path)
        for shapes in freed(inputs):
            try:
                graph = import_graph(proto, CompileOptions(shapes=shapes, values=values))
            except TcompError as refused:
                error = error or refused
                continue
            names = sorted({v.name for value in graph.inputs for d in value.shape for v in variables(as_expr(d))})
            found = proto, {"shapes": shapes, "values": values}, names
            if names and not graph.checks:
                return found
            checked = checked or (found if names else None)
    if checked is None:
        raise error or UnsupportedError("the graph fixes all sizes")
    return checked


def compiled(proto: onnx.ModelProto, threads: int, arguments: Mapping[str, Any]) -> tuple[LoadedModel, float, int]:
    """(the model, seconds that compiling took, bytes of its machine code)"""
    start = time.perf_counter()
    artifact, _ = compile_model(proto, CompileOptions(threads=threads, **arguments))
    return Module.load(artifact, threads=threads), time.perf_counter() - start, len(artifact.code)


def measure(model: Model, batches: Sequence[int], threads: int, seconds: float, rounds: int) -> Iterator[dict[str, Any]]:
    """One row a batch."""
    path = obtain(model)
    feeds = load_arrays(path, "inputs")
    proto, arguments, names = free_shapes(model, path, feeds)
    general, general_s, general_bytes = compiled(proto, threads, arguments)
    for batch in batches if "batch" in names else (0,):
        batched = {n for n, shape in arguments["shapes"].items() if "batch" in shape}
        scaled = {n: np.resize(a, (batch, *a.shape[1:])) if batch and n in batched else a for n, a in feeds.items()}
        shapes = {n: scaled[n].shape for n in arguments["shapes"]}
        fixed, fixed_s, fixed_bytes = compiled(proto, threads, {**arguments, "shapes": shapes})
        calls = {kind: partial(m.run, {i.name: scaled[i.name] for i in m.inputs}) for kind, m in (("symbolic", general), ("fixed", fixed))}
        results = [call() for call in calls.values()]
        symbolic_ms, fixed_ms = (t * 1e3 for t in least_times(calls, seconds, rounds).values())
        yield {
            "model": model.name, "free": names, "batch": batch, "symbolic_ms": symbolic_ms, "fixed_ms": fixed_ms, "ratio": symbolic_ms / fixed_ms,
            "difference": difference(*results), "compile_s": [general_s, fixed_s], "code": [general_bytes, fixed_bytes],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.symbolic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", metavar="PATTERNS", help="names or glob patterns, comma-separated; default: all but light_*")
    parser.add_argument("--batch", default="1", help="comma-separated; default: 1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each turn")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    rows, table = list[dict[str, Any]](), Table(box=box.SIMPLE)
    for title in ("model", "free", "batch", "symbolic ms", "fixed ms", "ratio", "difference", "compile s", "code kB"):
        table.add_column(title, justify="left" if title in ("model", "free") else "right")
    console = Console(width=140)
    for model in (m for m in select(options.only) if options.only or not m.name.startswith("light_")):
        try:
            for row in measure(model, [int(n) for n in options.batch.split(",")], options.threads, options.seconds, options.rounds):
                rows.append(row)
                console.print(f"{model.name}: {row['ratio']:.3f}", end="  ", highlight=False)
                size = f"{row['code'][0] / 1e3:.0f}/{row['code'][1] / 1e3:.0f}"
                seconds = f"{row['compile_s'][0]:.1f}/{row['compile_s'][1]:.1f}"
                figures = (f"{row['symbolic_ms']:.3f}", f"{row['fixed_ms']:.3f}", f"{row['ratio']:.3f}", f"{row['difference']:.1e}")
                table.add_row(model.name, " ".join(row["free"]), str(row["batch"] or ""), *figures, seconds, size)
        except (TcompError, Unavailable) as error:
            console.print(f"{model.name} has no free size: {str(error).splitlines()[0]:.100}", highlight=False, markup=False)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1))
    console.print(table)
    if ratios := [row["ratio"] for row in rows]:
        worst = max(rows, key=lambda row: float(row["ratio"]))
        console.print(f"{len(ratios)} cases: geomean {geomean(ratios):.3f}, worst {worst['ratio']:.3f} ({worst['model']})", highlight=False)


if __name__ == "__main__":
    main()
