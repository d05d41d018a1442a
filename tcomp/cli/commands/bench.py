"""`tcomp bench`: latency, side by side with other runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.files import is_artifact
from tcomp.cli.options import AnyModel, Inputs, Json, ModelOptions, Profile, Seed, option, parse_choices, parse_threads
from tcomp.errors import InputError, TcompError

if TYPE_CHECKING:
    import numpy as np

    from tcomp.cli.measure import Latency
    from tcomp.options import Progress
    from tcomp.runtime import LoadedModel

_PEERS = ("onnxruntime", "openvino", "torch")


@dataclass(frozen=True)
class Line:
    """One contender at one number of threads; `difference` is that of its outputs from tcomp's, relative to their largest magnitude."""

    contender: str
    threads: int
    latency: Latency
    ratio: float
    difference: float

    def record(self) -> dict[str, Any]:
        """The line as JSON."""
        times = {"min_seconds": self.latency.least, "median_seconds": self.latency.median, "runs": len(self.latency.times)}
        return {"contender": self.contender, "threads": self.threads, **times, "ratio": self.ratio, "difference": self.difference}


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
    from tcomp.cli import peers
    from tcomp.cli.inputs import make_feeds, read_inputs, signature_of
    from tcomp.cli.kernels import profiled
    from tcomp.cli.kernels import show as show_kernels
    from tcomp.cli.models import open_model
    from tcomp.runtime import Module

    counts, chosen = parse_threads(threads), parse_choices(against, _PEERS, "--against") if against is not None else None
    if is_artifact(model):
        if chosen:
            raise InputError(f"{chosen[0]} cannot run a compiled artifact", where="--against", hint="give `tcomp bench` the ONNX model")
        chosen = ()
    chosen = tuple(p for p in ("onnxruntime",) if peers.is_installed(p)) if chosen is None else chosen
    for peer in chosen:
        peers.check_installed(peer)
    lines: list[Line] = []
    failures: dict[str, str] = {}
    profiles: dict[int, list[dict[str, Any]]] = {}
    with output.progress() as tell:
        opened = open_model(model, options, None, tell)
        modules = [Module.load(opened.artifact, threads=n) for n in counts]
        signature = signature_of(modules[0])
        feeds = make_feeds(signature, read_inputs(input, signature), opened.sizes, seed)
        for module in modules:
            lines += _take_turns(module, model, chosen, feeds.arrays, seconds, failures, tell)
            if kernels:
                profiles[module.threads] = profiled(module, feeds.arrays)

    if as_json:
        results = [entry.record() for entry in lines]
        document = {"results": results, "failed": failures, "random_inputs": feeds.random, "dims": feeds.chosen}
        document |= {"precision": opened.precision} if opened.precision else {}
        output.print_json(document | ({"kernels": profiles} if kernels else {}))
        return
    feeds.explain()
    show(lines)
    if opened.precision:
        output.line(f"float32 products of matrices in {opened.precision}", "dim")
    for number, records in profiles.items():
        output.line()
        show_kernels(f"{output.count(len(records), 'kernel')}, {output.count(number, 'thread')}", records)
    for peer, reason in failures.items():
        output.line(f"{peer} failed: {reason}", "yellow")
    if against is None and not is_artifact(model) and not chosen:
        output.line(f"to compare with ONNX Runtime: {peers.how_to_install('onnxruntime')}", "dim")


def _take_turns(
    module: LoadedModel,
    path: Path,
    others: Sequence[str],
    arrays: dict[str, np.ndarray],
    seconds: float,
    failures: dict[str, str],
    tell: Progress,
) -> list[Line]:
    """tcomp and other runtimes at one number of threads. A runtime that cannot run the model goes to `failures`."""
    from tcomp.cli import peers
    from tcomp.cli.measure import interleaved
    from tcomp.verification import compare

    want = module.run(arrays)
    contenders: dict[str, Callable[[], object]] = {"tcomp": partial(module.run, arrays)}
    difference = {"tcomp": 0.0}
    for peer in others:
        tell(f"loading {peer}", 0, 1)
        try:
            run = peers.LOADERS[peer](path, module.threads, arrays)
            got = run(arrays)
        except TcompError:
            raise
        except Exception as error:  # noqa: BLE001  a peer may refuse a model in any way; the others are still worth measuring
            failures[peer] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            continue
        contenders[peer] = partial(run, arrays)
        difference[peer] = max((compare(n, got[n], a).error for n, a in want.items() if n in got), default=0.0)
    found = interleaved(contenders, seconds, tell)
    return [Line(name, module.threads, t, t.median / found["tcomp"].median, difference[name]) for name, t in found.items()]


def show(lines: list[Line]) -> None:
    """Print the table."""
    rows = [
        (x.contender, x.threads, output.seconds(x.latency.least), output.seconds(x.latency.median), len(x.latency.times), f"{x.ratio:.2f}",
         "-" if x.contender == "tcomp" else f"{x.difference:.1e}")
        for x in lines
    ]  # fmt: skip
    output.table("", ("", "threads>", "min>", "median>", "runs>", "ratio>", "difference>"), rows)
