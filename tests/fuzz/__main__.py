"""Fuzzers of the readers: of models of every format, artifacts, manifests, launch plans, printed IR and databases, by damage to valid ones.

    python -m tests.fuzz                                   a million cases, the shares below
    python -m tests.fuzz --target onnx --cases 50000 [--seed 1] [--start 0]
    python -m tests.fuzz --target onnx --show 4711         what case 4711 is, and what becomes of it
    python -m tests.fuzz --coverage --target kernel --seconds 60    guided by coverage, where atheris is installed

A case is known by target, seed and number. With `--log FILE`, blocks of cases that are finished are recorded there, and skipped when the
command is given again. Exits with 1 if there are findings: anything but a TcompError, more than 10 s, more than 2 GiB, a crash.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tcomp.errors import TcompError
from tests.fuzz.runner import BLOCK, Tally, generator, run_isolated
from tests.fuzz.targets import TARGETS

SHARES = {"manifest": 170_000, "host-steps": 50_000, "pattern": 10_000, "plan": 140_000, "artifact": 130_000, "expression": 80_000, "layout": 30_000, "program": 60_000, "kernel": 70_000,
          "te": 40_000, "graph": 40_000, "onnx": 40_000, "operators": 30_000, "texts": 10_000, "external": 40_000, "database": 40_000,
          "gguf": 10_000, "config": 10_000}  # fmt: skip


def show(target: str, seed: int, number: int) -> None:
    data = TARGETS[target].case(generator(target, seed, number))
    print(TARGETS[target].show(data))
    try:
        TARGETS[target].read(data)
        print("accepted")
    except TcompError as error:
        print(type(error).__name__, error)


def done_before(log: Path | None) -> dict[tuple[str, int, int, int], Tally]:
    """The blocks in a log."""
    if log is None or not log.exists():
        return {}
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {(r["target"], r["seed"], r["start"], r["stop"]): Tally.of(r["tally"]) for r in rows}


def run(target: str, seed: int, cases: range, log: Path | None) -> Tally:
    total, known = Tally(), done_before(log)
    for first in range(cases.start, cases.stop, BLOCK):
        block = range(first, min(first + BLOCK, cases.stop))
        tally = known.get((target, seed, block.start, block.stop))
        if tally is None:
            tally = run_isolated(target, seed, block)
            if log is not None:
                with log.open("a") as file:
                    row = {"target": target, "seed": seed, "start": block.start, "stop": block.stop, "tally": tally.data()}
                    file.write(json.dumps(row) + "\n")
        total.add(tally)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=[*TARGETS], action="append")
    parser.add_argument("--cases", type=int, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--show", type=int, metavar="NUMBER")
    parser.add_argument("--coverage", action="store_true", help="guided by coverage; needs atheris")
    parser.add_argument("--seconds", type=int, default=60, help="with --coverage")
    args = parser.parse_args()
    targets = args.target or [*SHARES]
    if args.show is not None:
        show(targets[0], args.seed, args.show)
        return 0
    if args.coverage:
        from tests.fuzz.coverage import explore

        return explore(targets[0], args.seed, args.seconds)
    total = Tally()
    print(f"{'target':12s} {'cases':>9s} {'accepted':>9s} {'refused':>9s} {'findings':>9s} {'seconds':>8s} {'slowest':>8s} {'peak':>9s}")
    for target in targets:
        start = time.monotonic()
        count = args.cases or SHARES[target]
        tally = run(target, args.seed, range(args.start, args.start + count), args.log)
        taken = time.monotonic() - start
        row = f"{target:12s} {tally.cases:9,d} {tally.accepted:9,d} {tally.refused.total():9,d} {tally.times.total():9,d}"
        print(f"{row} {taken:8.1f} {tally.slowest:7.2f}s {tally.peak >> 10:5d} MiB", flush=True)
        for kind, (number, text) in tally.findings.items():
            print(f"  {kind}, {tally.times[kind]} times; --target {target} --seed {args.seed} --show {number}\n{text}", flush=True)
        total.add(tally)
    print(f"{'total':12s} {total.cases:9,d} {total.accepted:9,d} {total.refused.total():9,d} {total.times.total():9,d}")
    return 1 if total.findings else 0


if __name__ == "__main__":
    sys.exit(main())
