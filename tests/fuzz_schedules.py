"""The schedule fuzzer: random programs under random schedules, as many as wanted.

    python -m tests.fuzz_schedules --cases 100000 [--seed 1] [--start 0] [--jobs 2]

A case is known by its seed and number, so that it can be had again: `--seed 1 --start 4711 --cases 1`. Each kind of failure is shown
once, made as small as possible, as a test for tests/schedules/test_regressions.py. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.schedules.dice import Seeded
from tests.schedules.fuzzing import Run, make
from tests.schedules.shrinking import Shrinker
from tests.schedules.subject import Failure, TooLong
from tests.schedules.together import run_native

BATCH = 40  # kernels compiled together
EVERY = 1000  # cases between reports
HANGS = "too slow"
DIES = "the process dies, or the fuzzer itself fails"
OPTIMISED = 8  # one batch in so many is compiled with optimisation
SLOW = 120  # seconds after which a case has failed


@dataclass
class Tally:
    """What a number of cases came to."""

    cases: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    witnesses: Counter[str] = field(default_factory=Counter)
    no_code: int = 0
    too_large: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)  # number, kind, text

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.no_code += other.no_code
        self.too_large += other.too_large
        self.accepted += other.accepted
        self.refused += other.refused
        self.witnesses += other.witnesses
        self.seconds += other.seconds
        self.failures += other.failures


def batch(seed: int, first: int, count: int) -> Tally:
    """Some cases: schedules and interpreter one by one, machine code together."""
    tally, runs = Tally(count), dict[int, Run]()
    signal.signal(signal.SIGALRM, _too_slow)
    for number in range(first, first + count):
        dice = Seeded(f"{seed}/{number}")
        started = time.process_time()
        run = Run(make(dice))
        made = time.process_time()
        signal.alarm(SLOW)
        try:
            run.roll(dice)
            runs[number] = run
        except Failure as failure:
            tally.failures.append((number, failure.kind, str(failure)))
        except (MemoryError, TooLong):
            tally.too_large += 1
        signal.alarm(0)
        tally.seconds.update(programs=made - started, schedules=time.process_time() - made)
        tally.accepted.update(step.primitive for step in run.schedule.trace)
        tally.refused.update(run.refused)
        tally.witnesses.update(run.witnesses)
    started = time.process_time()
    failures, tally.no_code = run_native([run.case for run in runs.values()], 2 if first // BATCH % OPTIMISED == 0 else 0)
    tally.seconds["machine code"] = time.process_time() - started
    numbers = list(runs)
    tally.failures += [(numbers[n], failure.kind, str(failure)) for n, failure in failures.items()]
    return tally


def _too_slow(*_: object) -> None:
    raise Failure(HANGS, f"more than {SLOW} seconds")


def explain(seed: int, number: int) -> tuple[tuple[str, ...], str] | None:
    """A case that fails, made small: what it has in common with similar ones, and a test; None if it does not fail alone."""
    dice = Seeded(f"{seed}/{number}")
    run = Run(make(dice))
    found: Failure | None = None
    try:
        run.roll(dice)
        for opt_level in (0, 2):
            found = found or run_native([run.case], opt_level)[0].get(0)
    except Failure as failure:
        found = failure
    if found is None:
        return None
    small = Shrinker(run.subject, run.steps, found)
    small.shrink()
    alike = (small.found.kind, *(step.primitive for step in small.steps))
    return alike, f"# case {number}: {small.found}\n{small.test(f'case_{seed}_{number}')}"


def _safely(seed: int, number: int) -> tuple[tuple[str, ...], str] | None:
    """`explain` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        future = pool.submit(explain, seed, number)
        return future.result() if future.exception() is None else None


def batches(seed: int, start: int, cases: int, jobs: int) -> Iterator[Tally]:
    """In new processes: a crash of machine code ends one of them and is reported with the cases that may have caused it."""
    todo = [(first, min(BATCH, start + cases - first)) for first in range(start, start + cases, BATCH)]
    while todo:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context) as pool:  # not max_tasks_per_child: Python 3.11 may wait forever
            futures = {pool.submit(batch, seed, *piece): piece for piece in todo[: 200 * jobs]}
            for future, piece in futures.items():
                if future.exception() is not None:
                    break
                yield future.result()
                todo.remove(piece)
            else:
                continue
        yield from _separately(seed, piece)
        todo.remove(piece)


def _separately(seed: int, piece: tuple[int, int]) -> Iterator[Tally]:
    """Case by case, each in a process of its own."""
    first, count = piece
    for number in range(first, first + count):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            future = pool.submit(batch, seed, number, 1)
            error = future.exception()
            yield future.result() if error is None else Tally(1, failures=[(number, DIES, repr(error))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--explain", type=int, default=20, help="how many cases of each kind of failure to make small")
    options = parser.parse_args()
    total, started = Tally(), time.perf_counter()
    kinds: Counter[str] = Counter()
    shown: set[tuple[str, ...]] = set()
    for tally in batches(options.seed, options.start, options.cases, options.jobs):
        total.add(tally)
        for number, kind, text in tally.failures:
            kinds[kind] += 1
            if kinds[kind] > options.explain:
                continue
            small = None if kind in (DIES, HANGS) else _safely(options.seed, number)
            if small is None:
                print(f"case {number}: {text[:300]}", flush=True)
            elif small[0] not in shown:
                shown.add(small[0])
                print(small[1], flush=True)
        if total.cases % EVERY < BATCH:
            elapsed = time.perf_counter() - started
            print(f"{total.cases} cases, {len(total.failures)} failures, {elapsed:.0f} s", file=sys.stderr, flush=True)
    elapsed = time.perf_counter() - started
    print(f"seed {options.seed}, cases {options.start}..{options.start + total.cases - 1}: {len(total.failures)} failures")
    print(f"{elapsed:.0f} s, {elapsed / total.cases * 1000:.1f} ms a case; per case and process: {_each(total.seconds, total.cases)}")
    print(f"accepted {total.accepted.total()}: {_listed(total.accepted)}")
    print(f"refused {total.refused.total()}: {_listed(total.refused)}")
    print(f"witnesses: {_listed(total.witnesses)}")
    print(f"{total.no_code} schedules make no machine code, {total.too_large} are too large to be interpreted")
    for kind, count in kinds.most_common():
        print(f"{count} x {kind}: {', '.join(str(n) for n, k, _ in total.failures if k == kind)[:200]}")
    return 1 if total.failures else 0


def _each(seconds: Counter[str], cases: int) -> str:
    return ", ".join(f"{name} {value / cases * 1000:.1f} ms" for name, value in seconds.items())


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
