"""Panel blocking (GEBP): products one of whose operands the second-level cache does not hold, as weights, prefetch its panels of columns.

    for column:                              a panel of the operand: the whole reduction, as many columns as the register tile has
      for block of the reduction:            as much of the panel as lies in the second-level cache next to the following one
        for tile of rows:                    each prefetches a part of the next block
          for step in block: accumulate      in registers

Where the panel is one block, the tiles of rows go over to the result at once. Otherwise sums wait for the next block in a buffer of all
rows (the blocking of the reduction in K. Goto, R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.schedules.analysis.access_patterns import Nest, bytes_of, is_product, repetitions, stage_axes
from tcomp.schedules.cpu.common import extent, partition_tails, size, split_tiles
from tcomp.schedules.primitives.memory_latency import UNKNOWN_ITERATIONS
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

CACHED_SHARE = 4  # an operand larger than 1 / CACHED_SHARE of the second-level cache is prefetched: other kernels evict it between runs
BLOCK_SHARE = 16  # a block of a panel is at most 1 / BLOCK_SHARE of that cache: this block, the next one, and rows fit
SUMS_SHARE = 32  # partial sums between blocks are at most 1 / SUMS_SHARE of it, as they are on the stack of a thread
WHOLE_SHARE = 4  # a panel that cannot be divided into blocks is at most 1 / WHOLE_SHARE of it
PANELS_PER_CORE = 4  # at least, for blocks: cores share panels then, not the rows of one, so that the last ones leave few cores idle
MAX_SUMMED = 384  # products that are summed up one after the other: rounding errors grow with their number
UNROLL_FACTORS = (2, 4, 8)  # steps of a reduction between two prefetches: a line of the operand each


@dataclass(frozen=True, slots=True)
class Panels:
    """How the panels of an operand are walked: the reduction loops `outside`, and `pieces` of the first one `inside`, walk the blocks of a
    panel (none, and 1, where it is one block), those `inside` a block; `steps` of the innermost loop are unrolled between two
    prefetches."""

    operand: str
    steps: int
    outside: tuple[str, ...]
    inside: tuple[str, ...]
    pieces: int

    @property
    def in_blocks(self) -> bool:
        """Whether the sum is taken in blocks."""
        return self.pieces > 1 or bool(self.outside)


def panels(s: Schedule, nest: Nest, loops: Sequence[str], width: int, column: str, rows: Sequence[str], target: CpuTarget) -> Panels | None:
    """The blocking of a product with these reduction loops in panels of `width` columns; `column` is the loop over panels, `rows` are the
    loops over the tiles of a panel. None if no large operand is shared by all rows, or there are too few tiles of rows to hide fetching."""
    repeated = repetitions(nest)
    loops_of_rows = [x for x in nest.spatial[:-1] if x not in repeated]
    sizes = {x.var.name: x.extent for x in nest.loops if x not in repeated} | {name: extent(s, name) for name in rows}
    extents = {name: n for name, n in sizes.items() if isinstance(n, int)}
    unknown = sizes.keys() - extents.keys()
    if not is_product(nest) or not unknown <= {*rows, *(x.var.name for x in loops_of_rows)}:
        return None
    operands = [set(E.variables(*r.args)) for r in nest.reads]
    inside_columns = {x.var for x in loops_of_rows if not all(x.var in used for used in operands)}
    large = [r for r in walked_by_lanes(nest, loops[-1]) if exceeds_cache(r, target) and inside_columns.isdisjoint(E.variables(*r.args))]
    tiles = prod(extents.get(x, UNKNOWN_ITERATIONS) for x in rows)
    factors = [n for n in UNROLL_FACTORS if n <= target.core.unrolled_steps] or [1]
    steps = max((n for n in factors if extents[loops[-1]] % n == 0 and n <= tiles), default=0)
    if len(large) != 1 or not steps:
        return None
    line = width * itemsize(nest.writes.dtype)  # bytes: a step of the reduction in a panel, or a row of its sums
    room, outside, inside = target.l2 // BLOCK_SHARE // line, list[str](), list(loops)
    if prod(extents[x] for x in inside) > room:
        room = min(room, MAX_SUMMED)
    while len(inside) > 1 and prod(extents[x] for x in inside) > room:
        outside.append(inside.pop(0))
    whole, unit = extents[inside[0]], steps if len(inside) == 1 else 1
    pieces = next((n for n in range(1, whole // unit + 1) if whole % (n * unit) == 0 and whole // n <= room), 0)
    waiting = inf if unknown else line * prod(extents[x.var.name] for x in loops_of_rows if x.var in inside_columns)
    found = Panels(large[0].attr.name, steps, tuple(outside), tuple(inside), pieces)
    shared = size(s, column) >= PANELS_PER_CORE * target.cores
    if pieces and (not found.in_blocks or shared and waiting <= target.l2 // SUMS_SHARE):
        return found
    fits = line * prod(extents[x] for x in loops) <= target.l2 // WHOLE_SHARE
    return Panels(found.operand, steps, (), tuple(loops), 1) if fits else None


def walked_by_lanes(nest: Nest, loop: str) -> list[E.Expr]:
    """The reads that depend on the lanes and on a reduction loop."""
    both = {x.var for x in nest.loops if x is nest.spatial[-1] or x.var.name == loop}
    return [r for r in nest.reads if both <= set(E.variables(*r.args))]


def exceeds_cache(r: E.Expr, target: CpuTarget) -> bool:
    """Whether the second-level cache does not hold an operand from one run to the next: weights are read once a run."""
    return bytes_of(r.attr) > target.l2 // CACHED_SHARE


def accumulate_in_blocks(s: Schedule, acc: str, axes: Sequence[tuple[str, int]], lanes: int, column: str, p: Panels) -> None:
    """Sum up a panel block by block: `axes` are the loops over rows, and how many of each a tile has."""
    s.compute_at(acc, column, "global")
    vectors, lane = s.split(stage_axes(s.kernel, acc, False)[-1], lanes)
    unroll(s, [vectors], lane)
    *spatial, last = stage_axes(s.kernel, acc, True)
    others = [name for name in spatial if name not in dict(axes)]
    tile, cuts = split_tiles(s, axes)
    others += cuts
    vectors, lane = s.split(last, lanes)
    tile.append(vectors)
    outside, inside = list(p.outside), list(p.inside)
    if p.pieces > 1:
        outer, inside[0] = s.split(inside[0], size(s, inside[0]) // p.pieces)
        outside.append(outer)
    inside[-1], steps = s.split(inside[-1], p.steps)
    s.reorder(*outside, *others, *inside, steps, *tile, lane, reassociate=True)
    unroll(s, tile, lane)
    s.prefetch(p.operand, outside[-1], 1, inside[-1])
    s.unroll(steps)
    s.promote(inside[0], acc, f"{acc}.tile", anew=True)
    partition_tails(s, others, cuts)
