"""Work partitioning: which part of a product, or of another reduction, each core computes, and in which pieces. A core fetches what another
one has stored at a fraction of the speed of its own caches, and kernels that walk an image hand out its rows in order: so cores share rows
where they have many (all of them read the whole operand that the lanes walk, weights say, but prefetches arrive meanwhile) or where rows
weigh more, columns otherwise. A single core, too, takes rows in parts, where all of them would come from beyond its caches for every panel
of columns again. A long sum of rows is cut into one for each core likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.layout import Layout
from tcomp.ir.loops import For
from tcomp.schedules.analysis import access_patterns as patterns
from tcomp.schedules.analysis.access_patterns import Nest, bytes_of, extent_of, nests, row_axis, stage_axes
from tcomp.schedules.cost.register_tiles import MAX_TILE_VECTORS
from tcomp.schedules.cpu.common import divides, nest_lanes
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MIN_PARALLEL_STEPS = 1 << 19  # accumulations, or
MIN_PARALLEL_BYTES = 1 << 18  # bytes of operands, below which waking threads costs more than they save
TILE_ROWS = range(6, 17)  # rows of a register tile: one of these divides a part, so that no tile hangs over its edge
PART_ROWS = 84  # rows of a part are a multiple of these, where the last part is smaller: 14, 12, 7, 6 and 4 rows of a tile divide it
HIDING_ROWS = 128  # rows that are multiplied by an operand while as much of it arrives from beyond the core's caches
CACHED_ROWS_SHARE = 0.6  # of the second-level cache, for rows that are to stay there,
MIN_CACHED_ROWS = 256  # but at least this many: each part reads the other operand again


def row_parts(nest: Nest, target: CpuTarget, knobs: Knobs) -> tuple[For, int] | None:
    """The outermost axis of rows, and how many of these a core computes all columns of before the next part, where it can be divided into
    such parts: one for each core, or more, such that the second-level cache holds what is read for the rows of a part. Where it cannot, and
    all rows come from memory, the last-level cache does. On one core the last part may be smaller."""
    axis = _outermost(nest)
    if axis is None:
        return None
    each, rows = _rows_per_core(nest, axis, target), extent_of(axis.extent)
    read = _operand_bytes(nest, axis, False)  # bytes that are read for the rows, and not for all columns
    known = isinstance(axis.extent, int)  # another size is cut into halves alone, which divide most that it may be
    counts = (n for n in range(1, max(1, each // MIN_CACHED_ROWS) + 1) if each % n == 0 and (known or n.bit_count() == 1))
    parts = [each // n for n in counts if each and _in_tiles(nest, axis, each // n)]
    if cached := [part for part in parts if read * part // rows <= target.l2 * CACHED_ROWS_SHARE]:
        each = cached[0]
    elif known and target.cores == 1 and axis is row_axis(nest) and _read_again(nest, read, rows, target):
        count = -(-rows // max(MIN_CACHED_ROWS, int(target.l2 * CACHED_ROWS_SHARE * rows / read)))
        each = -(-rows // (count * PART_ROWS)) * PART_ROWS
    elif read > target.l3 // 2 and parts:
        each = parts[-1]
    return (axis, each) if each and _rows_in_order(nest, axis, target, knobs) and each < rows else None


def columns_inside(nest: Nest, target: CpuTarget, knobs: Knobs) -> bool:
    """Whether cores take rows in order, which cannot be divided into parts, and find the columns for each in the second-level cache."""
    axis = _outermost(nest) if target.cores > 1 else None
    if axis is None or _rows_per_core(nest, axis, target) or not _rows_in_order(nest, axis, target, knobs):
        return False
    return _operand_bytes(nest, axis, True) <= target.l2 // 4


def split_row_sums(s: Schedule, target: CpuTarget) -> None:
    """A long sum of rows is cut into one sum for each core, of those rows that it stored before: otherwise cores would share the columns,
    and read from each other."""
    for nest in nests(s.kernel) if target.cores > 1 else ():
        if nest.is_reduction and patterns.is_sum(nest) and len(nest.spatial) == len(nest.reads) == 1 and nest.reduction_loops:
            (read,), lane, rows = nest.reads, nest.spatial[0], nest.reduction_loops[0]
            long = divides(target.cores, rows.extent) and extent_of(lane.extent) <= extent_of(rows.extent)
            if long and stride(read, lane.var) == 1 and bytes_of(read.attr) >= MIN_PARALLEL_BYTES:
                with suppress(ScheduleError), s.together():
                    each, _ = s.split(rows.var.name, extent_of(rows.extent) // target.cores)
                    partial = s.rfactor(nest.writes.name, each, target.cores)
                    s.relayout(partial, Layout.permuted((1, 0)))
                    for is_reduction in (False, True):
                        s.reorder(*stage_axes(s.kernel, partial, is_reduction))


def _outermost(nest: Nest) -> For | None:
    repeated = patterns.repetitions(nest)
    return None if patterns.batch_axes(nest) else next((x for x in nest.spatial[:-1] if x not in repeated), None)


def _rows_per_core(nest: Nest, axis: For, target: CpuTarget) -> int:
    """How many rows along an axis each core has; 0 where these are not the same for all, or register tiles do not divide them."""
    each = extent_of(axis.extent) // target.cores
    return each if divides(target.cores, axis.extent) and _in_tiles(nest, axis, each) else 0


def _read_again(nest: Nest, read: int, rows: int, target: CpuTarget) -> bool:
    """Whether rows come from beyond the core's caches for each of several panels of columns, and are enough for two parts."""
    panels = extent_of(nest.spatial[-1].extent) > MAX_TILE_VECTORS * nest_lanes(target, nest)
    return panels and read > target.l2 and rows >= 2 * MIN_CACHED_ROWS


def _in_tiles(nest: Nest, axis: For, rows: int) -> bool:
    return axis is not row_axis(nest) or any(rows % tile == 0 for tile in TILE_ROWS)


def _rows_in_order(nest: Nest, axis: For, target: CpuTarget, knobs: Knobs) -> bool:
    """Whether cores share the rows along an axis, each a part of them in order, instead of the columns."""
    divided = [nest.writes, *(r.attr for r in nest.reads if axis.var in E.variables(*r.args))]
    repeated = patterns.repetitions(nest)
    rows = patterns.iterations(x for x in nest.spatial[:-1] if x not in repeated) // target.cores
    waiting = _operand_bytes(nest, axis, True) * max(0.0, 1 - rows / HIDING_ROWS)
    return knobs.flag(
        (nest.writes.name, "rows_in_order"), pays(nest, repeated) and waiting <= sum(bytes_of(b, repeated) for b in divided) / 2
    )


def _operand_bytes(nest: Nest, axis: For, of_columns: bool) -> int:
    """Bytes of the operands that lanes run along and rows of an axis share, or else of those that differ from row to row, and lanes
    share."""
    lane, repeated = nest.spatial[-1].var, patterns.repetitions(nest)
    used = [(r.attr, E.variables(*r.args)) for r in nest.reads]
    return sum(bytes_of(buffer, repeated) for buffer, variables in used if (axis.var in variables) != of_columns == (lane in variables))


def pays(nest: Nest, repeated: Sequence[For] = ()) -> bool:
    """Whether there is enough to do for several threads, in one iteration of `repeated` loops."""
    steps = patterns.iterations(x for x in nest.loops if x not in repeated)
    operands = sum(bytes_of(r.attr, repeated) for r in nest.reads)
    return steps >= MIN_PARALLEL_STEPS or operands >= MIN_PARALLEL_BYTES
