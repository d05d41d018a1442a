"""Schedules: how a program's loops are shaped. `primitives/` are pure functions from a kernel to an equivalent kernel; a `Schedule` applies
them and records the trace; `analysis/` judges them. Traces are only *proposed* by the structural defaults (`cpu/`, `gpu/`), the polyhedral
scheduler (`polyhedral/`), the tuner (`tcomp/autotune`, through `knobs.py`), or a person. Nothing else makes loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tcomp.errors import ScheduleError

if TYPE_CHECKING:
    from tcomp.schedules.schedule import Schedule

__all__ = ["Schedule", "ScheduleError"]


def __getattr__(name: str) -> Any:
    """`Schedule`, when it is first used: what needs knobs alone does not load all primitives."""
    if name == "Schedule":
        from tcomp.schedules.schedule import Schedule

        return Schedule
    raise AttributeError(f"module 'tcomp.schedules' has no attribute {name!r}")
