"""Schedules: how a program's loops are shaped. Primitives, traces of them, and the default schedules per target."""

from tcomp.errors import ScheduleError
from tcomp.schedules.schedule import Schedule

__all__ = ["Schedule", "ScheduleError"]
