"""A schedule function for a GPU whose candidates do what candidates should not do, as decided; beside those of `faults`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tcomp.autotune.tasks import Program
from tcomp.ir import expr as E
from tcomp.ir.loops import Allocate, Buffer, block, loop, store
from tcomp.schedules import Schedule
from tcomp.schedules.knobs import Knobs
from tcomp.target import CudaTarget
from tests.autotune.faults import FAULTS as EVERYWHERE
from tests.autotune.spaces import scaled
from tests.gpu.fake_cupy import LOST


def faulty(s: Schedule, knobs: Knobs) -> None:
    FAULTS[knobs.choice("fault", tuple(FAULTS), "none")](s)


def task(arch: str = "sm_80") -> Program:
    return Program.of(scaled(), CudaTarget.parse(f"cuda -arch={arch}"), 1, schedule=faulty)


def none(s: Schedule) -> None:
    outer, inner = s.split("B.i", 128)
    s.set_kind(outer, "block.x")
    s.set_kind(inner, "thread.x")


def losing(s: Schedule) -> None:
    none(s)
    s.note(LOST)


def too_many_threads(s: Schedule) -> None:
    s.set_kind(s.split("B.i", 2000)[1], "thread.x")


def sharing_too_much(s: Schedule) -> None:
    a, b = s.kernel.buffers
    staged = Buffer("staged", "float32", (1 << 16,), "shared")
    whole = loop("i", 1000, lambda i: store(staged, [i], a[i] + a[i]), "thread.x")
    out = loop("j", 1000, lambda j: store(b, [j], staged[j]), "thread.x")
    s.kernel = replace(s.kernel, body=loop("o", 1, lambda o: Allocate(staged, block(whole, out)), "block.x"))


def one_thread(s: Schedule) -> None:
    """Right, and slow."""


def wrong(s: Schedule) -> None:
    a, b = s.kernel.buffers
    s.kernel = replace(s.kernel, body=loop("i", 1000, lambda i: store(b, [i], E.select(E.equal(i, 999), a[i], a[i] + a[i])), "thread.x"))


FAULTS: dict[str, Callable[[Schedule], None]] = {
    **{name: EVERYWHERE[name] for name in ("endless", "allocating", "straying", "raising", "refusing", "printing", "segfault")},
    **{f.__name__: f for f in (none, losing, too_many_threads, sharing_too_much, one_thread, wrong)},
}
