"""Programs, and schedule functions for them that another process can import by name."""

from __future__ import annotations

from tcomp.ir import te
from tcomp.ir.te import Tensor
from tcomp.schedules import Schedule
from tcomp.schedules.knobs import Knobs


def scaled(size: int = 1000, name: str = "B") -> list[Tensor]:
    """[A, B], B = 2 A."""
    a = te.placeholder((size,), name="A")
    return [a, te.compute((size,), lambda i: a[i] * 2.0, name=name)]


def product(m: int = 32, n: int = 48, depth: int = 24) -> list[Tensor]:
    """[A, B, C], C = A B."""
    a, b = te.placeholder((m, depth), name="A"), te.placeholder((depth, n), name="B")
    k = te.reduce_axis(depth, "k")
    return [a, b, te.compute((m, n), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="C")]


def split_scaled(s: Schedule, knobs: Knobs) -> None:
    """A space of one's own for `scaled`."""
    factor = knobs.choice("factor", (1, 4, 8, 16), 4)
    if factor > 1:
        outer, inner = s.split("B.i", factor)
        if knobs.flag("vectorize", True):
            s.vectorize(inner)
        if knobs.flag("threads", False):
            s.parallel(outer)


def refused(s: Schedule, knobs: Knobs) -> None:
    """What cannot be scheduled for some decisions."""
    if knobs.flag("impossible", False):
        s.split("no such loop", 4)
