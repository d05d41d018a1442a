"""Schedules: how a program's loops are shaped.

`primitives/` are pure functions from a kernel to an equivalent kernel; a `Schedule` applies them and keeps the trace; `legality.py` judges
them. Whoever makes a trace is a *proposer*, nothing more: the structural defaults (`cpu.py` with `stencils.py`, `gpu.py`), the polyhedral
scheduler (`polyhedral/`), the tuner (`tcomp/autotune`, through `knobs.py`), or a person. Nothing else makes loops.
"""

from tcomp.errors import ScheduleError
from tcomp.schedules.schedule import Schedule

__all__ = ["Schedule", "ScheduleError"]
