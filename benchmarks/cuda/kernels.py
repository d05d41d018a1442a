"""Every model of `benchmarks.models` compiled for GPUs on any machine: what its kernels take, and whether all of it fits.

Called by `python -m benchmarks.cuda --compile-only`. A barrier that is not proved is an error of the compiler, which makes no such kernel.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from math import prod
from typing import Any

from tcomp.errors import TcompError
from tcomp.ir.fallback import FallbackKind
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.runtime import Artifact
from tcomp.target import CudaTarget

from .. import models

SPILLED = 32  # bytes that a thread may store and load aside: a few registers that the assembler gives up, for more warps
REGISTERS = 1 << 16  # of an SM
NOTES = (FallbackKind.ONE_THREAD.value, FallbackKind.NOT_STAGED.value)  # of schedules that are not what they could be


@dataclass(frozen=True)
class Figures:
    """Of a model: its kernels, launches and barriers; the most that a launch takes on any architecture; launches of a single thread;
    kernels with each of `NOTES`; what is beyond a limit."""

    kernels: int
    launches: int
    barriers: int
    registers: int
    shared: int
    spilled: int
    single: int
    notes: tuple[int, ...]
    beyond: tuple[str, ...]


def figures(artifact: Artifact, target: CudaTarget) -> Figures:
    """What an artifact says of its kernels."""
    kernels = json.loads(bytes(artifact.code))["kernels"].values()
    steps = [entry["schedule"]["steps"] for entry in artifact.notes["schedules"]]
    said = [[step[1][0] for step in each if step[0] == "note"] for each in steps]
    taken: list[tuple[int, int, int]] = []
    beyond = []
    launches: list[dict[str, Any]] = [launch for entry in kernels for launch in entry["launches"]]
    for entry in kernels:
        for arch, usage in entry["usage"].items():
            for launch in entry["launches"]:
                registers, shared, spilled, _ = usage[launch["function"]]
                shared += launch["shared"]
                taken.append((registers, shared, spilled))
                if registers * prod(launch["block"]) > REGISTERS or shared > target.shared_per_block or spilled > SPILLED:
                    what = f"{registers} registers of {prod(launch['block'])} threads, {shared} bytes shared, {spilled} spilled"
                    beyond.append(f"{launch['function']} on {arch}: {what}")
    single = sum(prod(launch["block"]) == 1 and launch["grid"] == [1, 1, 1] for launch in launches)
    registers, shared, spilled = (max(column) for column in zip(*taken, strict=True)) if taken else (0, 0, 0)
    notes = tuple(sum(any(note in text for text in texts) for texts in said) for note in NOTES)
    return Figures(
        len(kernels), len(launches), sum(x["barriers"] for x in launches), registers, shared, spilled, single, notes, tuple(beyond)
    )


def compile_all(patterns: str | None, target: CudaTarget) -> bool:
    """Compile the models and print a line for each. Returns whether all could be compiled and are within the limits."""
    good = True
    print(f"{target}, float32 products of matrices in {target.precision}")
    heads = ("kernels", "launches", "barriers", "registers", "shared", "spilled", "1 thread", *("not parallel", "not staged"))
    print(f"{'':20} {'seconds':>8} " + " ".join(f"{head:>12}" for head in heads))
    for model in models.select(patterns):
        start = time.perf_counter()
        try:
            path = models.obtain(model)
            arguments = models.compile_arguments(model, models.load_arrays(path, "inputs"))
            found = figures(compile_model(path, CompileOptions(target, **arguments))[0], target)
        except models.Unavailable as reason:
            print(f"{model.name:20} skipped: {reason}", flush=True)
            continue
        except TcompError as problem:
            good = False
            print(f"{model.name:20} {type(problem).__name__}: {problem}", flush=True)
            continue
        numbers = [found.kernels, found.launches, found.barriers, found.registers, found.shared, found.spilled, found.single, *found.notes]
        print(f"{model.name:20} {time.perf_counter() - start:8.1f} " + " ".join(f"{n:12}" for n in numbers), flush=True)
        for line in found.beyond:
            good = False
            print(f"  beyond the limits: {line}")
    return good
