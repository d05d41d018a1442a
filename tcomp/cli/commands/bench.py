"""`tcomp bench`: latency, side by side with other runtimes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.files import is_artifact
from tcomp.cli.options import AnyModel, Inputs, Json, ModelOptions, Profile, Seed, option
from tcomp.cli.syntax import parse_choices, parse_threads
from tcomp.errors import InputError

_PEERS = ("onnxruntime", "openvino", "torch")


def bench(
    model: AnyModel,
    *,
    against: Annotated[
        str | None, option("--against", "PEERS", f"Some of {','.join(_PEERS)}. Default: ONNX Runtime, where installed.")
    ] = None,
    threads: Annotated[str | None, option("--threads", "N,M", "Numbers of threads. Default: all physical cores.")] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.01, max=3600, help="Time for each contender and number of threads.")
    ] = 1.0,
    kernels: Annotated[bool, typer.Option("--kernels", help=Profile)] = False,
    input: Inputs = None,
    options: ModelOptions,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure the latency of a model, side by side with other runtimes.

    Contenders are warmed up and take turns. The ratio is a contender's median over tcomp's: above 1 it is slower than tcomp.
    """
    from tcomp.cli import latency
    from tcomp.cli.inputs import open_model
    from tcomp.cli.kernels import profiled, show
    from tcomp.runtime import Module

    counts, chosen = parse_threads(threads), parse_choices(against, _PEERS, "--against")
    compiled = is_artifact(model)
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
                profiles[module.threads] = profiled(module, feeds.arrays)

    if as_json:
        document = {"results": [x.record() for x in found], "failed": failures, "random_inputs": feeds.random, "dims": feeds.chosen}
        document |= {"precision": opened.precision} if opened.precision else {}
        output.print_json(document | ({"kernels": profiles} if kernels else {}))
        return
    feeds.explain()
    rows = [
        (x.contender, x.threads, output.seconds(min(x.times)), output.seconds(x.median), len(x.times), f"{x.ratio:.2f}",
         "-" if x.contender == "tcomp" else f"{x.difference:.1e}")
        for x in found
    ]  # fmt: skip
    output.table("", ("", "threads>", "min>", "median>", "runs>", "ratio>", "difference>"), rows)
    if opened.precision:
        output.line(f"float32 products of matrices in {opened.precision}", "dim")
    for number, records in profiles.items():
        output.line()
        show(f"{output.count(len(records), 'kernel')}, {output.count(number, 'thread')}", records)
    for peer, reason in failures.items():
        output.line(f"{peer} failed: {reason}", "yellow")
    if against is None and not compiled and not chosen:
        output.line(f"to compare with ONNX Runtime: {latency.missing('onnxruntime')}", "dim")
