"""Optimisations that a stage of the compiler could not apply, and why, as data: read by code, printed for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FallbackKind(Enum):
    """What happens instead of the optimisation; the values are the words that are printed."""

    NOT_FUSED = "not fused"  # an edge of the graph: the value goes through memory
    LEFT_AS_LOWERED = "is left as lowered"  # no loop of the result is changed
    STAGE_BY_STAGE = "is computed stage by stage"  # no two stages share loops
    NOT_STAGED = "is not staged in shared memory"
    ONE_THREAD = "runs on one thread"  # of a GPU
    AS_WRITTEN = "runs as written"  # no polyhedral schedule of the kernel


@dataclass(frozen=True, slots=True)
class Fallback:
    """An optimisation that was not applied: `where` is the edge, the result or the loop (empty: the whole kernel), `reason` says why."""

    kind: FallbackKind
    where: str
    reason: str

    def __str__(self) -> str:
        where = {FallbackKind.NOT_FUSED: f"{self.where} ", FallbackKind.AS_WRITTEN: ""}.get(self.kind, f"`{self.where}` ")
        return f"{where}{self.kind.value}: {self.reason}"
