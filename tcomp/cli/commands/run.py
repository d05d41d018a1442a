"""`tcomp run`: one run of a model, its outputs summarised, and where its time goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.files import check_writable
from tcomp.cli.kernels import profiled, show
from tcomp.cli.options import AnyModel, Inputs, Json, ModelOptions, Profile, Seed, Threads, option
from tcomp.errors import InputError

if TYPE_CHECKING:
    import numpy as np


def run(
    model: AnyModel,
    *,
    input: Inputs = None,
    save: Annotated[Path | None, option("--save", "FILE.npz", "Save the outputs, by name.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help=Profile)] = False,
    options: ModelOptions,
    threads: Threads = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run a model once and summarise its outputs.

    Inputs that are not given are random. An ONNX model is compiled first.
    """
    import numpy as np

    from tcomp.cli.inputs import open_model
    from tcomp.runtime import Module
    from tcomp.runtime.files import replacing

    if save is not None:
        save = save if save.suffix == ".npz" else save.with_name(save.name + ".npz")
        check_writable(save)
    with output.progress() as tell:
        opened = open_model(model, options, threads, tell)
    module = Module.load(opened.artifact, threads=threads)
    feeds = opened.feeds(input, seed)
    start = time.perf_counter()
    results = module.run(feeds.arrays)
    elapsed = time.perf_counter() - start
    if save is not None:
        if len({name.replace("/", "_") for name in results}) < len(results) or "file" in results:
            raise InputError(f"cannot write {save}", why="the outputs' names clash in a .npz file")
        with replacing(save, error=InputError) as (file,):
            np.savez(file, allow_pickle=False, **results)
    kernels = profiled(module, feeds.arrays) if profile else None

    summaries = [_summary(name, a) for name, a in results.items()]
    if as_json:
        record: dict[str, Any] = {"threads": module.threads, "seconds": elapsed, "random_inputs": feeds.random}
        record["inputs"] = {name: {"dtype": a.dtype.name, "shape": a.shape} for name, a in feeds.arrays.items()}
        optional = {"precision": opened.precision, "saved": save, "kernels": kernels}
        output.print_json(record | {"outputs": summaries} | {name: value for name, value in optional.items() if value is not None})
        return
    feeds.explain()
    output.table("", ("output", "dtype", "shape", "min>", "max>", "mean>", "first values"), [_row(s) for s in summaries])
    if opened.precision:
        output.line(f"float32 products of matrices in {opened.precision}", "dim")
    output.line(f"first run: {output.seconds(elapsed)}, {output.count(module.threads, 'thread')}", "dim")
    if save is not None:
        output.line(f"wrote {save}", "dim")
    if kernels is not None:
        output.line()
        show(f"{output.count(len(kernels), 'kernel')}, {output.seconds(sum(k['seconds'] for k in kernels))} a run (mean of 10)", kernels)


def _summary(name: str, array: np.ndarray) -> dict[str, Any]:
    """What a person wants to see of an array. Statistics are those of the finite elements."""
    import numpy as np

    numbers = array.astype(np.float64) if array.dtype.kind != "c" else np.abs(array)
    finite = numbers[np.isfinite(numbers)]
    record: dict[str, Any] = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
    record |= {key: getattr(finite, key)() if finite.size else None for key in ("min", "max", "mean")}
    return record | {"nonfinite": int(numbers.size - finite.size), "first": [x.item() for x in array.reshape(-1)[:5]]}


def _row(summary: dict[str, Any]) -> list[str]:
    numbers = ["-" if summary[key] is None else f"{summary[key]:.5g}" for key in ("min", "max", "mean")]
    first = " ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in summary["first"])
    if summary["nonfinite"]:
        first += f"  ({summary['nonfinite']} not finite)"
    return [summary["name"], summary["dtype"], "x".join(map(str, summary["shape"])) or "scalar", *numbers, first]
