"""The graph fuzzer: `python -m tests.fuzz_graphs --cases 100000 [--seed 0] [--start 0] [--jobs 2] [--save FOLDER]`.

A case is known by its seed and number. Graphs of up to nine nodes of more than 110 operators, with symbolic sizes, sizes of 0, and floats,
integers and booleans, are computed by onnx's reference implementation; where tcomp differs, ONNX Runtime settles it. Shows each finding, and
exits with 1 if a result was wrong, a process died, or a graph was refused that ONNX Runtime accepts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import onnx

from tests.fuzz_graphs.judge import FINDINGS, RIGHT, Found, batch, build

BATCH = 50  # cases of a task
TASKS = 20  # of a process: LLVM's pass managers, as llvmlite runs them, leak 0.1 MB a kernel


def batches(seed: int, start: int, cases: int, jobs: int) -> Iterator[tuple[Counter[str], Counter[str], Found]]:
    """The results of all batches; a process that dies is a finding."""
    tasks = [(first, min(BATCH, start + cases - first)) for first in range(start, start + cases, BATCH)]
    context = multiprocessing.get_context("spawn")
    while tasks:  # by pools of their own: in Python 3.11, processes that are replaced (max_tasks_per_child) may wait forever
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            running = {pool.submit(batch, seed, *task): task for task in tasks[: TASKS * jobs]}
            for future in as_completed(running):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    break
                tasks.remove(running[future])
            else:
                continue
        first, count = tasks.pop(0)  # one of the first that were not finished: its cases one by one
        tasks[:0] = [(n, 1) for n in range(first, first + count)] if count > 1 else []
        if count == 1:
            yield Counter({"crashed": 1}), Counter(), [(first, "crashed", "the process died")]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz_graphs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--save", type=Path, help="a folder for the models of the findings")
    args = parser.parse_args()
    os.environ.setdefault("TCOMP_JOBS", "1")  # each graph would start compilers of its own, for several times what its few kernels take
    outcomes, operators, started, kinds = Counter[str](), Counter[str](), time.monotonic(), Counter[str]()
    for some, ops, found in batches(args.seed, args.start, args.cases, args.jobs):
        outcomes += some
        operators += ops
        if (count := sum(outcomes.values())) % (BATCH * TASKS) == 0:
            print(f"{count} graphs in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        for number, outcome, detail in sorted(found):
            if outcome == RIGHT:
                kinds[detail.removeprefix("the reference differs: ").partition(" ")[0]] += 1
                continue
            print(f"{number} {outcome}: {detail}", flush=True)
            if args.save is not None:
                args.save.mkdir(parents=True, exist_ok=True)
                onnx.save(build(args.seed, number).model(), args.save / f"{args.seed}-{number}.onnx")
    seconds = time.monotonic() - started
    print(
        f"{sum(outcomes.values())} graphs of seed {args.seed} from {args.start}, {len(operators)} operators, {seconds:.0f} s: {dict(outcomes)}; the reference differs: {dict(kinds)}"
    )
    return int(any(outcomes[bad] for bad in (*FINDINGS, "crashed")))


if __name__ == "__main__":
    sys.exit(main())
