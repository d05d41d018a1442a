"""Which part of a product, or of another fold, each core computes, and in which pieces.

What one core has stored another has to fetch from afar, at a fraction of the speed of its own caches. As kernels that walk an image hand
out its rows in order, a core finds what it reads where it stored that before; but then all cores read all of the operand that the
lanes walk, weights say. That is for nothing where each core has many rows, as what is asked for ahead arrives meanwhile. So cores share
rows where they have many, or where these weigh more, columns otherwise. A single core, too, takes rows in parts, where all of them together
would come from beyond its caches for every panel of columns again. A long sum of rows is cut into one for each core likewise.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.layout import Layout
from tcomp.ir.loops import For
from tcomp.schedules.analysis.access_patterns import Nest, batch_axes, bytes_of, extent_of, is_sum, nests, row_axis, stage_axes
from tcomp.schedules.cpu.lanes_and_threads import divides
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

SERIAL_FOLDS, SERIAL_BYTES = 1 << 19, 1 << 18  # below so many accumulations, of so many bytes, threads cost more than they save
TILES = range(6, 17)  # rows of a register tile: one of these divides a part
HIDING = 128  # rows that are multiplied by an operand while as much of it arrives from afar
STAYS, MANY = 0.6, 256  # of the second-level cache, for rows that are to stay there; which are so many at least


def parts(fold: Nest, target: CpuTarget, knobs: Knobs) -> tuple[For, int] | None:
    """The outermost axis of rows, and how many of these a core computes all columns of before the next part, where it can be divided into
    such parts: one for each core, or more, such that the second-level cache holds what is read for the rows of a part."""
    axis = _outermost(fold)
    if axis is None or not (each := _each(fold, axis, target)):
        return None
    part = each
    while _of_rows(fold, axis, part) > target.l2 * STAYS and part % 2 == 0 and part // 2 >= MANY and _in_tiles(fold, axis, part // 2):
        part //= 2
    if _of_rows(fold, axis, part) <= target.l2 * STAYS:
        each = part
    return (axis, each) if _in_order(fold, axis, target, knobs) and each < extent_of(axis.extent) else None


def columns_inside(fold: Nest, target: CpuTarget, knobs: Knobs) -> bool:
    """Whether cores take rows in order, which cannot be divided into parts, and find the columns for each in the second-level cache."""
    axis = _outermost(fold) if target.cores > 1 else None
    if axis is None or _each(fold, axis, target) or not _in_order(fold, axis, target, knobs):
        return False
    return _read_by_all(fold, axis) <= target.l2 // 4


def share_folds(s: Schedule, target: CpuTarget) -> None:
    """A long sum of rows is cut into one sum for each core, of those rows that it stored before: otherwise cores would share the columns,
    and read from each other."""
    for fold in nests(s.kernel) if target.cores > 1 else ():
        if fold.is_reduction and is_sum(fold) and len(fold.spatial) == len(fold.reads) == 1 and fold.reduction_loops:
            (read,), lane, rows = fold.reads, fold.spatial[0], fold.reduction_loops[0]
            long = divides(target.cores, rows.extent) and extent_of(lane.extent) <= extent_of(rows.extent)
            if long and stride(read, lane.var) == 1 and bytes_of(read.attr) >= SERIAL_BYTES:
                with suppress(ScheduleError), s.together():
                    _share(s, fold, rows, target)


def _share(s: Schedule, fold: Nest, rows: For, target: CpuTarget) -> None:
    each, _ = s.split(rows.var.attr.name, extent_of(rows.extent) // target.cores)
    partial = s.rfactor(fold.writes.name, each, target.cores)
    s.relayout(partial, Layout.permuted((1, 0)))
    for is_reduction in (False, True):
        s.reorder(*stage_axes(s.kernel, partial, is_reduction))


def _outermost(fold: Nest) -> For | None:
    return None if batch_axes(fold) else next((x for x in fold.spatial[:-1]), None)


def _each(fold: Nest, axis: For, target: CpuTarget) -> int:
    """How many of the rows a part has; 0 if there are none that register tiles divide."""
    if not divides(target.cores, axis.extent):
        return 0
    each = extent_of(axis.extent) // target.cores
    return each if _in_tiles(fold, axis, each) else 0


def _in_tiles(fold: Nest, axis: For, rows: int) -> bool:
    return axis is not row_axis(fold) or any(rows % tile == 0 for tile in TILES)


def _in_order(fold: Nest, axis: For, target: CpuTarget, knobs: Knobs) -> bool:
    """Whether cores share the rows along an axis, each a part of them in order, instead of the columns."""
    divided = [fold.writes, *(r.attr for r in fold.reads if axis.var in E.variables(*r.args))]
    rows = prod(extent_of(x.extent) for x in fold.spatial[:-1]) // target.cores
    waiting = _read_by_all(fold, axis) * max(0.0, 1 - rows / HIDING)
    suggested = worthwhile(fold) and waiting <= sum(map(bytes_of, divided)) / 2
    return knobs.flag(f"{fold.writes.name}.rows_in_order", suggested)


def _of_rows(fold: Nest, axis: For, rows: int) -> int:
    """Bytes that are read for so many rows, and not for all columns."""
    lane = fold.spatial[-1].var
    read = [r.attr for r in fold.reads if axis.var in (used := E.variables(*r.args)) and lane not in used]
    return sum(map(bytes_of, read)) * rows // extent_of(axis.extent)


def _read_by_all(fold: Nest, axis: For) -> int:
    """Bytes that all cores read that share an axis."""
    lane = fold.spatial[-1].var
    return sum(bytes_of(r.attr) for r in fold.reads if axis.var not in (used := E.variables(*r.args)) and lane in used)


def worthwhile(fold: Nest) -> bool:
    """Whether there is enough to do for several threads."""
    return prod(extent_of(x.extent) for x in fold.loops) >= SERIAL_FOLDS or sum(bytes_of(r.attr) for r in fold.reads) >= SERIAL_BYTES
