"""A refused step costs speed, not the kernel: the group stays plain, and the kernel says so."""

from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.schedules.cpu import default as cpu, elementwise
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

TARGET = CpuTarget.parse("cpu -mcpu=skylake-avx512")


def test_a_refused_group_is_left_as_lowered(monkeypatch):
    x = te.placeholder((64, 48), name="x")
    y = te.compute((64, 48), lambda i, j: te.exp(x[i, j]) + 1.0, name="y")
    kernel = lower("k", [x], [y])

    def refused(s, *rest):
        s.split(s.kernel.body.var.name, 16)
        raise ScheduleError("`vectorize` does not apply", why="no reason")

    monkeypatch.setattr(elementwise, "schedule", refused)
    s = cpu.schedule(kernel, TARGET)
    assert s.kernel.notes == ("`y` is left as lowered: no reason",)
    assert [step.primitive for step in s.trace] == ["collapse", "note", "clean"]
    assert str(Schedule(kernel).replay(s.trace)) == str(s.kernel)
