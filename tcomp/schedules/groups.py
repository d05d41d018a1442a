"""How default schedules of all targets cut a kernel into groups: each result with the temporaries that only it reads."""

from __future__ import annotations

from dataclasses import dataclass

from tcomp.ir.loops import Kernel
from tcomp.schedules.analysis.access_patterns import nests


@dataclass(frozen=True, slots=True)
class Group:
    """A result, the temporaries computed inside its loops, in order, and the kind of schedule that suits them."""

    result: str
    inside: tuple[str, ...]
    shape: str


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
