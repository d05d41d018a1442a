"""`tcomp run`: one run of a model, its outputs summarised; `tcomp bench`: latency, next to other runtimes; and profiles of both."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tcomp.cli import options as opt, output
from tcomp.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from tcomp.runtime import LoadedModel

_PEERS = ("onnxruntime", "openvino", "torch")
_AGAINST = f"Some of {','.join(_PEERS)}. Default: ONNX Runtime, where installed."
_TRACE = "Write when each kernel ran in which thread, in a second run, for https://ui.perfetto.dev or chrome://tracing."
_TRUSTED = "Run only artifacts signed with this Ed25519 key (see `tcomp sign`)."
_SECONDS = "Time for each contender and number of threads."
MAX_ROWS = 30  # kernels of a profile that get a line of their own: what fits a screen


def run(
    model: opt.AnyModel,
    *,
    input: opt.Inputs = None,
    save: Annotated[
        Path | None, opt.option("--save", "FILE.npz", "Save the outputs, by name (with _ for / and other signs of paths).")
    ] = None,
    profile: Annotated[bool, opt.flag("--profile", opt.PROFILE)] = False,
    trace: Annotated[Path | None, opt.option("--trace", "FILE.json", _TRACE)] = None,
    trusted: Annotated[Path | None, opt.option("--trusted", "PUBLIC.pem", _TRUSTED)] = None,
    options: opt.ModelOptions,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Run a model once and summarise its outputs.

    Inputs that are not given are random. An ONNX model is compiled first.
    """
    from tcomp.cli.inputs import open_model
    from tcomp.runtime import Module, chrome_trace
    from tcomp.runtime.array_files import npz_path, save_arrays
    from tcomp.runtime.artifact import replacing

    if trace is not None:
        opt.check_writable(trace)
    if save is not None:
        save = npz_path(save)
        opt.check_writable(save)
    with output.progress() as tell:
        opened = open_model(model, options, threads, tell, signed=trusted is not None)
    module = Module.load(opened.artifact, threads=threads, trusted=trusted)
    feeds = opened.feeds(input, seed)
    start = time.perf_counter()
    results = module.run(feeds.arrays)
    elapsed = time.perf_counter() - start
    if save is not None:
        save_arrays(save, results)
    kernels = _profiled(module, feeds.arrays) if profile else None
    if trace is not None:
        spans = module.trace(feeds.arrays)
        with replacing(trace, error=InputError) as (file,):
            file.write(json.dumps(chrome_trace(spans)).encode())

    summaries = [_summary(name, a) for name, a in results.items()]
    if as_json:
        record: dict[str, Any] = {"threads": module.threads, "seconds": elapsed, "random_inputs": feeds.random}
        record["inputs"] = {
            name: {"dtype": "string" if a.dtype == object else a.dtype.name, "shape": a.shape} for name, a in feeds.arrays.items()
        }
        optional = {"precision": opened.precision, "saved": save, "trace": trace, "kernels": kernels}
        return output.print_json(record | {"outputs": summaries} | {name: value for name, value in optional.items() if value is not None})
    feeds.explain()
    rows = []
    for s in summaries:
        numbers = ["-" if s[key] is None else f"{s[key]:.5g}" for key in ("min", "max", "mean")]
        first = " ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in s["first"])
        first += f"  ({s['nonfinite']} not finite)" if s["nonfinite"] else ""
        rows.append((s["name"], s["dtype"], "x".join(map(str, s["shape"])) or "scalar", *numbers, first))
    output.table("", ("output", "dtype", "shape", "min>", "max>", "mean>", "first values"), rows)
    if opened.precision:
        output.line(output.PRODUCTS_IN.format(opened.precision), "dim")
    output.line(f"first run: {output.seconds(elapsed)}, {output.count(module.threads, 'thread')}", "dim")
    if (host := opened.artifact.manifest.host) is not None and host.computing:
        output.line(f"host steps: {', '.join(f'{step.name} ({step.operator})' for step in host.computing)}", "dim")
    for written in filter(None, (save, trace)):
        output.line(f"wrote {written}", "dim")
    if kernels is not None:
        _show(f"{output.count(len(kernels), 'kernel')}, {output.seconds(sum(k['seconds'] for k in kernels))} a run (mean of 10)", kernels)


def _summary(name: str, array: np.ndarray) -> dict[str, Any]:
    """What a person wants to see of an array. Statistics are those of the finite elements."""
    import numpy as np

    if array.dtype == object:  # strings
        nothing: dict[str, Any] = {"min": None, "max": None, "mean": None, "nonfinite": 0}
        return {"name": name, "dtype": "string", "shape": [*array.shape], "first": [str(x) for x in array.reshape(-1)[:5]]} | nothing
    numbers = array.astype(np.float64) if array.dtype.kind != "c" else np.abs(array)
    finite = numbers[np.isfinite(numbers)]
    record: dict[str, Any] = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
    record |= {key: getattr(finite, key)() if finite.size else None for key in ("min", "max", "mean")}
    return record | {"nonfinite": int(numbers.size - finite.size), "first": [x.item() for x in array.reshape(-1)[:5]]}


def bench(
    model: opt.AnyModel,
    *,
    against: Annotated[str | None, opt.option("--against", "PEERS", _AGAINST)] = None,
    threads: Annotated[str | None, opt.option("--threads", "N,M", "Numbers of threads. Default: all physical cores.")] = None,
    seconds: Annotated[float, opt.option("--seconds", "S", _SECONDS, min=0.01, max=3600, show_default=True)] = 1.0,
    kernels: Annotated[bool, opt.flag("--kernels", opt.PROFILE)] = False,
    input: opt.Inputs = None,
    options: opt.ModelOptions,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Measure the latency of a model, side by side with other runtimes.

    Contenders are warmed up and take turns. The ratio is a contender's median over tcomp's: above 1 it is slower than tcomp.
    """
    from tcomp.cli import latency
    from tcomp.cli.inputs import open_model
    from tcomp.runtime import Module

    counts, chosen = opt.parse_threads(threads), opt.parse_choices(against, _PEERS, "--against")
    compiled = opt.is_artifact(model)
    if compiled and chosen:
        raise InputError(f"{chosen[0]} cannot run a compiled artifact", where="--against", hint="give `tcomp bench` the ONNX model")
    for peer in chosen:
        if command := latency.missing(peer):
            raise InputError(f"{peer} is not installed", where="--against", hint=command)
    if against is None and not compiled and not latency.missing("onnxruntime"):
        chosen = ("onnxruntime",)
    found: list[latency.Latency] = []
    failures: dict[str, str] = {}
    profiles: dict[int, list[dict[str, Any]]] = {}
    with output.progress() as tell:
        opened = open_model(model, options, None, tell)
        feeds = opened.feeds(input, seed)
        for module in [Module.load(opened.artifact, threads=n) for n in counts]:
            found += latency.side_by_side(module, model, chosen, feeds.arrays, seconds, failures, tell)
            if kernels:
                profiles[module.threads] = _profiled(module, feeds.arrays)

    if as_json:
        document = {"results": [x.record() for x in found], "failed": failures, "random_inputs": feeds.random, "dims": feeds.chosen}
        document |= {"precision": opened.precision} if opened.precision else {}
        return output.print_json(document | ({"kernels": profiles} if kernels else {}))
    feeds.explain()
    rows = [
        (x.contender, x.threads, output.seconds(min(x.times)), output.seconds(x.median), len(x.times), f"{x.ratio:.2f}",
         "-" if x.contender == "tcomp" else f"{x.difference:.1e}")
        for x in found
    ]  # fmt: skip
    output.table("", ("", "threads>", "min>", "median>", "runs>", "ratio>", "difference>"), rows)
    if opened.precision:
        output.line(output.PRODUCTS_IN.format(opened.precision), "dim")
    for number, records in profiles.items():
        _show(f"{output.count(len(records), 'kernel')}, {output.count(number, 'thread')}", records)
    for peer, reason in failures.items():
        output.line(f"{peer} failed: {reason}", "yellow")
    if against is None and not compiled and not chosen:
        output.line(f"to compare with ONNX Runtime: {latency.missing('onnxruntime')}", "dim")


def _profiled(module: LoadedModel, inputs: Mapping[str, object]) -> list[dict[str, Any]]:
    """One record for each kernel, in program order. "bound" is the least time that the kernel's work takes by the roofline of this machine,
    measured at the first use on it (of a GPU: by its data sheet); "light" the share of it in the time taken, the speed of light being 1.
    Both are None where work depends on data."""
    from tcomp.backends import backend_of
    from tcomp.calibration import measured

    on_gpu = module.manifest.triple == "cuda"
    model = backend_of(f"cuda -arch={module.manifest.cpu}").cost_model() if on_gpu else backend_of().cost_model(module.threads, measured())
    records = []
    for (name, seconds), facts in zip(module.profile(inputs), module.facts(inputs), strict=True):
        record: dict[str, Any] = {"name": name, "seconds": seconds, "flops": None, "bytes": None, "bound": None, "light": None}
        if facts.work is not None:
            bound, limit = model.roof.seconds(**{key: facts.work[key] for key in ("slots", "divisions", "bytes", "narrow")})
            record |= {"flops": facts.work["flops"], "bytes": facts.work["bytes"], "bound": bound, "limit": limit}
            record["light"] = bound / seconds if seconds > 0 else None
        records.append(record | {"layout": facts.layout, "not_fused": list(facts.not_fused)})
    return records


def _show(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of a profile, the kernels that take longest first."""
    total = sum(r["seconds"] for r in records) or 1.0
    ranked = sorted(enumerate(records), key=lambda item: -item[1]["seconds"])
    rows = []
    for number, r in ranked[:MAX_ROWS]:
        rate, share = "-", "-"
        if r["light"] is not None:  # the rate of what limits the kernel, and its share of the bound
            amount, unit = (r["flops"], "GFLOP/s") if r["limit"] == "arithmetic" else (r["bytes"], "GB/s")
            rate, share = f"{amount / r['seconds'] / 1e9:.3g} {unit}", f"{r['light']:.0%}"
        time = output.seconds(r["seconds"]), f"{r['seconds'] / total:.1%}"
        rows.append((str(number), r["name"], *time, rate, share, r["layout"], "; ".join(r["not_fused"])))
    if rest := ranked[MAX_ROWS:]:
        spent = sum(r["seconds"] for _, r in rest)
        rows.append(("", output.count(len(rest), "other kernel"), output.seconds(spent), f"{spent / total:.1%}", "", "", "", ""))
    if all(r["light"] is not None for r in records):
        title += f", the bound is {output.seconds(sum(r['bound'] for r in records))}"
    output.table(f"\n{title}", ("#>", "kernel", "time>", "share>", "speed>", "of bound>", "layout", "not fused"), rows)
