"""Loops as one, and loops of a tile, as the default schedules of all targets want them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tcomp.schedules.schedule import Schedule


def fuse_all(s: Schedule, loops: Sequence[str]) -> str:
    """Perfectly nested loops as one; returns its name."""
    flat = loops[0]
    for following in loops[1:]:
        flat = s.fuse(flat, following)
    return flat


def unroll(s: Schedule, loops: Iterable[str], lane: str | None = None) -> None:
    """Unroll loops, and vectorize the one behind them."""
    for name in loops:
        s.unroll(name)
    if lane is not None:
        s.vectorize(lane)
