"""A schedule function whose candidates do everything that candidates should not do, as decided."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tcomp.autotune.tasks import Program
from tcomp.ir import expr as E
from tcomp.ir.loops import Allocate, Buffer, Kernel, Stmt, While, block, loop, store
from tcomp.schedules import Schedule
from tcomp.schedules.knobs import Knobs
from tcomp.target import Target
from tests.autotune.spaces import scaled

if TYPE_CHECKING:
    from tcomp.autotune.measurement.measurer import Measurer

HUGE = 25_000_000_000  # elements of float32: 100 GB


def faulty(s: Schedule, knobs: Knobs) -> None:
    FAULTS[knobs.choice("fault", tuple(FAULTS), "none")](s)


def task(threads: int = 1) -> Program:
    return Program.of(scaled(), Target.host(), threads, schedule=faulty)


def pids(measurer: Measurer) -> list[int]:
    """The processes that work for a measurer now."""
    workers = [worker for worker in (measurer._runner._worker, *measurer._builders) if worker is not None]
    return [worker.pid for worker in workers if worker.pid is not None]


def none(s: Schedule) -> None:
    s.vectorize(s.split("B.i", 16)[1])


def segfault(s: Schedule) -> None:
    _body(s, lambda a, b: loop("i", 10, lambda i: store(b, [i * (1 << 40)], a[i])))


def endless(s: Schedule) -> None:
    _body(s, lambda a, b: While(E.const(True, "bool"), store(b, [0], a[0])))


def allocating(s: Schedule) -> None:
    huge = Buffer("huge", "float32", (HUGE,))
    _body(s, lambda a, b: Allocate(huge, block(loop("i", HUGE, lambda i: store(huge, [i], a[0])), store(b, [0], huge[HUGE - 1]))))


def wrong(s: Schedule) -> None:
    _body(s, lambda a, b: loop("i", 1000, lambda i: store(b, [i], E.select(E.equal(i, 999), a[i], a[i] + a[i]))))


def straying(s: Schedule) -> None:
    _body(s, lambda a, b: block(loop("i", 1000, lambda i: store(b, [i], a[i] + a[i])), store(b, [1003], E.const(1.0, "float32"))))


def raising(s: Schedule) -> None:
    raise ZeroDivisionError("it divides by zero")


def refusing(s: Schedule) -> None:
    s.split("no such loop", 4)


def printing(s: Schedule) -> None:
    none(s)
    print('{"status": "ok"}\n' * 1000, flush=True)
    os.write(1, b"garbage\n" * 1000)
    print("more of it", file=sys.stderr)


def aborting(s: Schedule) -> None:
    os.write(2, b"the compiler says farewell\n")
    os.abort()


def building_endlessly(s: Schedule) -> None:
    while True:
        time.sleep(0.01)


def building_hugely(s: Schedule) -> None:
    bytearray(4 * HUGE)


def without_code(s: Schedule) -> None:
    a, b = s.kernel.buffers
    s.kernel = replace(s.kernel, body=loop("i", 1000, lambda i: store(b, [i], a[i]), "thread.x"))


def _body(s: Schedule, make: Callable[[Buffer, Buffer], Stmt]) -> None:
    a, b = s.kernel.buffers
    s.kernel = Kernel(s.kernel.name, (a, b), (b,), (), make(a, b))


FAULTS: dict[str, Callable[[Schedule], None]] = {
    f.__name__: f
    for f in (
        none,
        segfault,
        endless,
        allocating,
        wrong,
        straying,
        raising,
        refusing,
        printing,
        aborting,
        building_endlessly,
        building_hugely,
        without_code,
    )
}
