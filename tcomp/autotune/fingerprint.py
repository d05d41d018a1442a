"""What features mean, as a digest: a cost model is of use only where they mean what they did when it was learned.

Two programs are described: one under fixed steps, so that its numbers tell what is counted, estimated and hashed; and one under the default
schedule, of which only the names and the options of decisions are taken, as its loops may get better.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from tcomp.autotune.features import NAMES, features
from tcomp.autotune.space import instantiate
from tcomp.autotune.tasks import Program
from tcomp.ir import te
from tcomp.ir.te import Tensor
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.target import Target

_DIGITS = 3  # that have to agree


@cache
def fingerprint() -> str:
    """The digest; the same on every machine."""
    machine = Target.parse("cpu -march=x86_64 -mcpu=skylake-avx512")
    found = features(instantiate(Program.of(_tensors(), machine, 2, schedule=_steps), {"how": "far", "tile": (6, 2)}))
    asked = instantiate(Program.of(_tensors(), machine, 2), {}).answers
    parts = [*NAMES, *(f"{x:.{_DIGITS}g}" for x in (*found.vector, found.seconds)), *(f"{n} {a.options}" for n, a in sorted(asked.items()))]
    return sha256("\0".join(parts).encode()).hexdigest()


def _tensors() -> list[Tensor]:
    """exp(A B) / C, where C is read with a stride: an expression that affects each kind of count."""
    a, b, c = te.placeholder((300, 1000), name="A"), te.placeholder((1000, 500), name="B"), te.placeholder((500, 300), name="C")
    k = te.reduce_axis(1000, "k")
    product = te.compute((300, 500), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="P")
    return [a, b, c, te.compute((300, 500), lambda i, j: te.exp(product[i, j]) / c[j, i], name="R")]


def _steps(s: Schedule, knobs: Knobs) -> None:
    knobs.choice("how", ("near", "far"), "near")
    rows, vectors = knobs.choice("tile", ((4, 2), (6, 2)), (4, 2))
    column, inner = s.split("P.j", vectors * 16)
    row, unrolled = s.split("P.i", rows)
    part, lane = s.split(inner, 16)
    s.reorder(column, row, "P.k", unrolled, part, lane, reassociate=True)
    s.unroll(unrolled)
    s.unroll(part)
    s.vectorize(lane)
    s.vectorize(s.split("R.j", 16)[1])
    s.prefetch("B", "P.k", 4)
    s.parallel("R.i")
