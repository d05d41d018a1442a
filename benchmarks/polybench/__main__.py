"""PolyBench's kernels by tcomp, by gcc -O3, and by clang -O3 with Polly (tiled, parallel), from the same loop programs.

    python -m benchmarks.polybench [--kernels gemm,lu] [--size large|small|mini] [--threads 2] [--rounds 3] [--json out.json]

Each kernel has a process of its own. All contenders work in place on the same arrays, which are set anew before each run, outside of the
timing; they are checked against gcc's results first, then timed in turns, short ones warm. Ratios are of the minima: where other
programs run, a spinning OpenMP thread may wait for a whole time slice. Of Polly the faster of two settings counts (see `contenders.py`);
`p` is the number of parallel regions in its code.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from . import BENCHMARKS
from .measure import Result, measure
from .suite import Benchmark


def tolerance(benchmark: Benchmark) -> float:
    """Float32 recursions and float64 sums, by compilers that fuse and order operations as they like."""
    return 1e-4 if benchmark.name == "deriche" else 1e-8


def best_polly(result: Result) -> str | None:
    variants = [c for c in result["min_ms"] if c.startswith("polly")]
    return min(variants, key=result["min_ms"].__getitem__, default=None)


def table(results: list[Result], dataset: str, threads: int) -> Table:
    shown = Table(
        "kernel", "sizes", "gcc", "Polly", "p", "tcomp", "gcc / tcomp", "Polly / tcomp", "gcc / Polly",
        box=box.MARKDOWN, title=f"{dataset.upper()}, {threads} threads: min / median in ms, ratios of the minima (more is better for tcomp)",
    )  # fmt: skip
    ratios: dict[str, list[float]] = {"gcc / tcomp": [], "Polly / tcomp": [], "gcc / Polly": []}
    for r in results:
        if "failure" in r:
            shown.add_row(r["kernel"], r["failure"])
            continue
        polly, limit = best_polly(r), tolerance(BENCHMARKS[r["kernel"]])
        wrong = {c for c, error in r["errors"].items() if not error <= limit}

        def times(c: str | None, r: Result = r, wrong: set[str] = wrong) -> str:
            return (
                "–"
                if c is None
                else f"{r['min_ms'][c]:.4g} / {r['median_ms'][c]:.4g}" + (f" wrong: {r['errors'][c]:.1g}" if c in wrong else "")
            )

        regions = r["regions"].get(polly)
        row = [
            r["kernel"],
            " ".join(map(str, r["sizes"].values())),
            times("gcc"),
            times(polly),
            "–" if regions is None else str(regions),
            times("tcomp"),
        ]
        for label, (a, b) in {"gcc / tcomp": ("gcc", "tcomp"), "Polly / tcomp": (polly, "tcomp"), "gcc / Polly": ("gcc", polly)}.items():
            usable = a is not None and b is not None and not {a, b} & wrong
            if usable:
                ratios[label].append(r["min_ms"][a] / r["min_ms"][b])
            row.append(f"{ratios[label][-1]:.2f}" if usable else "–")
        shown.add_row(*row)
    means = [f"{math.exp(statistics.fmean(map(math.log, x))):.2f}" if x else "–" for x in ratios.values()]
    shown.add_row("geomean", *[""] * 5, *means)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.polybench", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kernels", default=",".join(BENCHMARKS), help="names, separated by commas")
    parser.add_argument("--size", choices=("mini", "small", "large"), default="large")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender, at least")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    names = args.kernels.split(",")
    if unknown := [n for n in names if n not in BENCHMARKS]:
        parser.error(f"unknown kernel {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    results = []
    for name in names:  # a process for each: a crash of generated code costs one row
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                results.append(process.submit(measure, name, args.size, args.threads, args.rounds).result())
            except Exception as error:  # noqa: BLE001  (a failure costs one row, which says why)
                results.append({"kernel": name, "failure": f"{type(error).__name__}: {error}"[:200]})
        print(f"{name}: {results[-1].get('median_ms', results[-1].get('failure'))}", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 240).print(table(results, args.size, args.threads))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
