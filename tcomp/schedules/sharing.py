"""Which part of a product, or of another fold, each core computes.

What one core has stored another has to fetch from afar, at a fraction of the speed of its own caches. As kernels that walk an image hand
out its rows in order, a core finds what it reads where it stored that before; but then all cores read all of the operand that the
lanes walk, weights say. So cores share rows where these weigh more, columns otherwise.
"""

from __future__ import annotations

from math import prod

from tcomp.ir import expr as E
from tcomp.ir.loops import For
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.roles import Nest, batch_axes, bytes_of, extent_of
from tcomp.schedules.shaping import divides
from tcomp.target import Target

SERIAL_FOLDS, SERIAL_BYTES = 1 << 19, 1 << 18  # below so many accumulations, of so many bytes, threads cost more than they save
READ_BY_ALL = 2.0  # times as large as what is divided among cores may be what all of them read


def parts(fold: Nest, target: Target, knobs: Knobs) -> tuple[For, int] | None:
    """The outermost axis of rows, and how many of these each core computes all columns of, where it can be divided into such parts."""
    axis = _outermost(fold)
    if axis is None or not divides(target.cores, axis.extent) or not _in_order(fold, axis, target, knobs):
        return None
    return axis, extent_of(axis.extent) // target.cores


def columns_inside(fold: Nest, target: Target, knobs: Knobs) -> bool:
    """Whether cores take rows in order, which cannot be divided into parts, and find the columns for each in the second-level cache."""
    axis = _outermost(fold)
    if axis is None or divides(target.cores, axis.extent) or not _in_order(fold, axis, target, knobs):
        return False
    return _read_by_all(fold, axis) <= target.l2 // 4


def _outermost(fold: Nest) -> For | None:
    return None if batch_axes(fold) else next((x for x in fold.spatial[:-1]), None)


def _in_order(fold: Nest, axis: For, target: Target, knobs: Knobs) -> bool:
    """Whether cores share the rows along an axis, each a part of them in order, instead of the columns."""
    divided = [fold.writes, *(r.attr for r in fold.reads if axis.var in E.variables(*r.args))]
    suggested = target.cores > 1 and worthwhile(fold) and _read_by_all(fold, axis) <= READ_BY_ALL * sum(map(bytes_of, divided))
    return knobs.flag(f"{fold.writes.name}.rows_in_order", suggested)


def _read_by_all(fold: Nest, axis: For) -> int:
    """Bytes that all cores read that share an axis."""
    lane = fold.spatial[-1].var
    return sum(bytes_of(r.attr) for r in fold.reads if axis.var not in (used := E.variables(*r.args)) and lane in used)


def worthwhile(fold: Nest) -> bool:
    """Whether there is enough to do for several threads."""
    return prod(extent_of(x.extent) for x in fold.loops) >= SERIAL_FOLDS or sum(bytes_of(r.attr) for r in fold.reads) >= SERIAL_BYTES
