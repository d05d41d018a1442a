"""Runs cases of a fuzz target in child processes, which may crash, hang or ask for all memory: each of these is a finding."""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, NoReturn

from tcomp.errors import TcompError
from tests.fuzz.targets import TARGETS

HANG = 10  # seconds that a case may take
STUCK = 60  # seconds after which a process that does not even answer an alarm is ended
MEMORY = 2 << 30  # bytes that a process may have above what it started with
BLOCK = 5000  # cases of one process


class Hang(BaseException):
    """A case took too long."""


@dataclass
class Tally:
    """What cases came to. `findings`: for each kind of failure its first case, its text, and how many there were."""

    cases: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    findings: dict[str, tuple[int, str]] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    peak: int = 0  # KiB of memory above what a process started with

    def found(self, kind: str, number: int, text: str, times: int = 1) -> None:
        self.findings.setdefault(kind, (number, text))
        self.times[kind] += times

    def add(self, other: Tally) -> None:
        self.cases, self.accepted = self.cases + other.cases, self.accepted + other.accepted
        self.refused += other.refused
        self.slowest, self.peak = max(self.slowest, other.slowest), max(self.peak, other.peak)
        for kind, (number, text) in other.findings.items():
            self.found(kind, number, text, other.times[kind])

    def data(self) -> dict[str, Any]:
        return {**vars(self), "refused": dict(self.refused), "times": dict(self.times)}

    @staticmethod
    def of(data: dict[str, Any]) -> Tally:
        findings = {kind: (int(number), str(text)) for kind, (number, text) in data["findings"].items()}
        return Tally(**{**data, "refused": Counter(data["refused"]), "times": Counter(data["times"]), "findings": findings})


def generator(target: str, seed: int, number: int) -> Random:
    """Where a case gets its choices from."""
    return Random(f"{target} {seed} {number}")


def run_case(target: str, seed: int, number: int, tally: Tally) -> None:
    """One case, in this process."""
    reader = TARGETS[target]
    data = reader.case(generator(target, seed, number))
    tally.cases += 1
    start = time.perf_counter()
    try:
        reader.read(data)
        tally.accepted += 1
    except TcompError as error:
        tally.refused[type(error).__name__] += 1
        str(error)
    except (Exception, Hang) as error:  # noqa: BLE001  whatever else a reader raises is a finding
        inner = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(inner) if "/tcomp/" in f.filename), inner[-1])
        kind = f"{type(error).__name__} in {os.path.basename(place.filename)}:{place.name}"
        tally.found(kind, number, "".join(traceback.format_exception(error)[-8:])[-3000:])
    taken = time.perf_counter() - start
    if taken > HANG and "Hang" not in "".join(tally.findings):  # SQLite takes what its callbacks raise for an order to stop
        tally.found("Hang that was swallowed", number, f"{taken:.1f} s")
    tally.slowest = max(tally.slowest, taken)


@contextmanager
def alarmed() -> Iterator[Any]:
    """Within, what is yielded starts the time of a case, after which `Hang` is raised."""

    def ring(number: int, frame: object) -> NoReturn:
        raise Hang(f"no result within {HANG} s")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, HANG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_here(target: str, seed: int, cases: range, tally: Tally, at: Any = None) -> None:
    """Cases in this process; the number of each is written to `at` before it starts."""
    with alarmed() as start:
        for number in cases:
            if at is not None:
                at[:8] = number.to_bytes(8, "little")
            start()
            run_case(target, seed, number, tally)


def run_isolated(target: str, seed: int, cases: range) -> Tally:
    """Cases in child processes; one that ends before its time costs the case it was at."""
    total = Tally()
    assert TARGETS[target].corpus  # made once, before processes are
    while cases:
        tally, reached = _child(target, seed, cases)
        total.add(tally)
        cases = range(reached, cases.stop)
    return total


def _child(target: str, seed: int, cases: range) -> tuple[Tally, int]:
    """What a process found, and the first case that it did not come to."""
    at = mmap.mmap(-1, 8)
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        try:
            limit = _size() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            tally, start = Tally(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            run_here(target, seed, cases, tally, at)
            tally.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
            with open(into, "wb") as file:
                file.write(json.dumps(tally.data()).encode())
        except BaseException:  # noqa: BLE001  no child may go on as if it were its parent
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(into)
    result, number, since = b"", -1, time.monotonic()
    with open(out, "rb", buffering=0) as file:
        while True:
            if select.select([file], [], [], 1.0)[0]:
                piece = file.read(1 << 16)
                if not piece:
                    break
                result += piece
            now = int.from_bytes(at[:8], "little")
            if now != number:
                number, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK:
                os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if result:
        return Tally.of(json.loads(result)), cases.stop
    number = int.from_bytes(at[:8], "little")
    tally = Tally(cases=number - cases.start + 1)
    tally.found(f"the process ended with {status}", number, "killed: it hung" if status == -signal.SIGKILL else "")
    return tally, number + 1


def _size() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE
