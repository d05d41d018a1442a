"""What a call costs besides the model, and what callers at the same time get: `python -m benchmarks.latency [--callers MODEL.onnx]`.

Calls: a model that copies four numbers, one thread; the least of many short series, in turns, since what disturbs only adds.
Callers: runs per second of one caller with one thread, and of two at the same time, in turns; the medians, and that of their ratios. Both cores
must be quiet. The model is a product of two matrices of 256 x 256, or MODEL.onnx (static shapes).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from rich import box
from rich.console import Console
from rich.table import Table

import tcomp
from tcomp.runtime import LoadedModel, numpy_dtype
from tcomp.runtime.loaded_model import random_array

SERIES, CALLS = 400, 500
SECONDS = 0.5  # of each turn of the callers


def graph(op: str, shape: list[int], inputs: int) -> onnx.ModelProto:
    """One operator on inputs of one shape."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in [*"ab"[:inputs], "y"]]
    made = helper.make_graph([helper.make_node(op, [*"ab"[:inputs]], ["y"])], op, ends[:-1], ends[-1:])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def compiled(model: onnx.ModelProto | str, threads: int) -> LoadedModel:
    if isinstance(model, str):
        return tcomp.compile(model, threads=threads)
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, path := Path(folder, "model.onnx"))
        return tcomp.compile(path, threads=threads)


def arrays(module: LoadedModel) -> Mapping[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {s.name: random_array(generator, tuple(map(int, s.shape)), numpy_dtype(s.dtype)) for s in module.inputs}


def calls() -> dict[str, float]:
    """Seconds of a call, by its kind."""
    module = compiled(graph("Identity", [1, 4], 1), 1)
    inputs = arrays(module)
    out, bound, (x,) = module.run(inputs), module.bind(inputs), inputs.values()
    kinds: dict[str, Callable[[], object]] = {
        "bound.run()": bound.run,
        "module(x)": lambda: module(x),
        "module.run(dict)": lambda: module.run(inputs),
        "module.run(dict, out)": lambda: module.run(inputs, out),
    }
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(SERIES):
        for name, call in kinds.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS)
    return best


def rate(module: LoadedModel, inputs: Mapping[str, np.ndarray], callers: int) -> float:
    """Runs per second of so many callers at the same time."""
    counts, begin = [0] * callers, threading.Barrier(callers + 1)

    def work(number: int) -> None:
        begin.wait()
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            module.run(inputs)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    begin.wait()
    for thread in threads:
        thread.join()
    return sum(counts) / SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--callers", metavar="MODEL.onnx", help="the model of the callers")
    parser.add_argument("--rounds", type=int, default=10, help="turns of the callers; default: 10")
    options = parser.parse_args()
    table = Table("call", "µs", box=box.SIMPLE)
    for name, seconds in calls().items():
        table.add_row(name, f"{seconds * 1e6:.2f}")
    module = compiled(options.callers or graph("MatMul", [256, 256], 2), 1)
    inputs = arrays(module)
    rate(module, inputs, 2)
    turns = [(rate(module, inputs, 1), rate(module, inputs, 2)) for _ in range(options.rounds)]
    one, two = (statistics.median(column) for column in zip(*turns, strict=True))
    console = Console()
    console.print(table)
    console.print(
        f"runs/s: 1 caller {one:.0f}, 2 callers {two:.0f}, ratio {statistics.median(b / a for a, b in turns):.2f}", highlight=False
    )
    console.print(f"ratios of the turns: {', '.join(f'{b / a:.2f}' for a, b in turns)}", highlight=False)


if __name__ == "__main__":
    main()
