"""What default schedules have in common for all targets: a kernel is cut into groups, and each group is scheduled or left as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tcomp.errors import ScheduleError
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.loops import Kernel
from tcomp.schedules.analysis.access_patterns import nests
from tcomp.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Group:
    """A result, the temporaries computed inside its loops, in order, and the kind of schedule that suits them."""

    result: str
    inside: tuple[str, ...]
    shape: str


class HasResult(Protocol):
    """Anything that is scheduled as a whole, named by a buffer that it computes."""

    @property
    def result(self) -> str:
        """The name of that buffer."""


G = TypeVar("G", bound=HasResult)


def attachments(kernel: Kernel) -> list[tuple[str, tuple[str, ...]]]:
    """Results in order, each with the temporaries that only it reads, directly or through each other."""
    order = list(dict.fromkeys(n.writes.name for n in nests(kernel)))
    outputs = {b.name for b in kernel.outputs}
    homes: dict[str, str] = {}
    for name in reversed(order):
        readers = {n.writes.name for n in nests(kernel) if name in {r.attr.name for r in n.reads}} - {name}
        places = {homes.get(r, r) for r in readers}
        homes[name] = next(iter(places)) if name not in outputs and len(places) == 1 else name
    return [(name, tuple(n for n in order if homes[n] == name and n != name)) for name in order if homes[name] == name]


def schedule_each(s: Schedule, groups: Sequence[G], apply: Callable[[G], None], otherwise: FallbackKind) -> None:
    """Apply a schedule to each group. Where a step is refused (its independence cannot be proved, say), the group stays as it was
    before, and the schedule records it as a fallback of the kind `otherwise`."""
    for group in groups:
        try:
            with s.together():
                apply(group)
        except ScheduleError as error:
            s.fall_back(otherwise, group.result, error.reason)
