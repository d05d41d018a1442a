"""Crash isolation: cases run in long-lived worker processes; one that dies or hangs costs its case and is replaced.

Workers are forked from a server process that has made the suite once, which takes as long as compiling some hundred cases.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess

from .suite import CRASHED, HUNG, LEVELS, Result

Work = Callable[[Connection, str], None]


def work_on_suite(connection: Connection, level: str) -> None:
    """A worker: receives cases with their tolerances, sends results, until it is ended."""
    from .loaded import SUITE

    connection.send("ready")
    while True:
        name, tolerance = connection.recv()
        connection.send(SUITE.run(name, LEVELS[level], tolerance))


def case_names() -> list[str]:
    """The names of all cases, as a worker process knows them."""
    ours, theirs = (context := _context()).Pipe(duplex=False)
    process = context.Process(target=_send_names, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    names = list(ours.recv())
    process.join()
    return names


def _send_names(connection: Connection) -> None:
    from .loaded import SUITE

    connection.send(list(SUITE.cases))


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.loaded"])
    return context


class _Worker:
    """One process and the case it works on."""

    def __init__(self, context: ForkServerContext | SpawnContext, work: Work, level: str) -> None:
        self.connection, theirs = context.Pipe()
        self.process: ForkServerProcess | SpawnProcess = context.Process(target=work, args=(theirs, level), daemon=True)
        self.process.start()
        theirs.close()
        self.case = ""
        self.since = time.monotonic()

    def give(self, case: str, tolerance: tuple[float, float]) -> None:
        self.case, self.since = case, time.monotonic()
        self.connection.send((case, tolerance))

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_cases(
    cases: Sequence[str],
    level: str,
    tolerances: Mapping[str, tuple[float, float]],
    workers: int = 2,
    timeout: float = 120.0,
    work: Work = work_on_suite,
) -> Iterator[Result]:
    """Results in the order in which cases finish. `timeout` in seconds a case; starting a worker takes as much at most.

    `work` is what a worker process does with its end of a pipe.
    """
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
    if work is work_on_suite:  # what needs no suite does not wait for one
        context = _context()
    waiting = list(reversed(cases))
    active = [_Worker(context, work, level) for _ in range(min(workers, len(cases)))]
    try:
        while active:
            wait([w.connection for w in active], timeout=1.0)
            for worker in list(active):
                result = _poll(worker, timeout)
                if result is None:
                    continue
                if isinstance(result, Result):
                    yield result
                    if result.outcome in (CRASHED, HUNG):
                        worker.end()
                        active.remove(worker)
                        if waiting:
                            active.append(_Worker(context, work, level))
                        continue
                if waiting:
                    case = waiting.pop()
                    worker.give(case, tolerances.get(case, (0.0, 0.0)))
                else:
                    worker.end()
                    active.remove(worker)
    finally:
        for worker in active:
            worker.end()


def _poll(worker: _Worker, timeout: float) -> Result | str | None:
    """What the worker has to say: a result, "ready", or nothing yet. Raises `RuntimeError` if it cannot even start."""
    seconds = time.monotonic() - worker.since
    try:
        if worker.connection.poll():
            return worker.connection.recv()
        outcome, detail = (HUNG, f"no result within {timeout:.0f} s") if seconds > timeout else ("", "")
    except (EOFError, ConnectionError):
        worker.process.join()
        outcome, detail = CRASHED, f"the process ended with exit code {worker.process.exitcode}"
    if not outcome:
        return None
    if not worker.case:
        raise RuntimeError(f"a worker could not start: {detail}")
    return Result(worker.case, outcome, detail, seconds)
