"""Products one of whose operands comes from far away, as weights do that no near cache holds: its panels of columns are asked for ahead.

    for column:                              a panel of the operand: all folds, as many columns as the register tile has
      for block of the folds:                as much of the panel as lies in the second-level cache beside the next one
        for tile of rows:                    each asks for a part of the next block
          for fold in block: accumulate      in registers

Where the panel is one block, the tiles of rows go over to the result at once. Otherwise sums wait for the next block in a buffer of all
rows (the blocking of the folds in K. Goto, R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr
from tcomp.schedules.analysis.access_patterns import Nest, bytes_of, extent_of, is_product, stage_axes
from tcomp.schedules.cpu.lanes_and_threads import split_tiles
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

FAR = 4  # an operand of more than one part in so many of the second-level cache is asked for ahead
BLOCK = 16  # a block of a panel is at most one part in so many of it
SUMS = 32  # what waits for the next block is at most one part in so many of it (it is on the stack of a thread)
WHOLE = 4  # a panel in one block is, where that cannot be
SHARES = 4  # panels for each thread at least, where these do not share the rows of a panel
SUMMED = 384  # products that are summed up one after the other, at most: rounding errors grow with their number
UNKNOWN = 2  # tiles of rows, where their number is not known: as many share what is asked for (see `prefetch`)
STEPS = (2, 4, 8)  # of a fold that stand in a row, between two requests


@dataclass(frozen=True, slots=True)
class Panels:
    """How the panels of an operand are walked: the folds `outside`, and `pieces` of the first one `inside`, walk the blocks of a panel (none,
    and 1, where it is one block), those `inside` a block; `steps` of the innermost fold stand in a row between two requests."""

    operand: str
    steps: int
    outside: tuple[str, ...]
    inside: tuple[str, ...]
    pieces: int

    @property
    def in_blocks(self) -> bool:
        """Whether the sum is taken in blocks."""
        return self.pieces > 1 or bool(self.outside)


def panels(s: Schedule, fold: Nest, folds: Sequence[str], width: int, column: str, rows: Sequence[str], target: CpuTarget) -> Panels | None:
    """For a product that is scheduled in panels of `width` columns, `column` being the loop over panels, `rows` those over the tiles of
    one; `None` where no operand is far that all rows share, or where there are too few tiles of rows to fetch a panel meanwhile."""
    sizes = {x.var.attr.name: x.extent for x in fold.loops}
    sizes |= {name: editing.find_loop(s.kernel, name).extent for name in rows}
    extents = {name: n for name, n in sizes.items() if isinstance(n, int)}
    unknown = sizes.keys() - extents.keys()
    if not is_product(fold) or not unknown <= {*rows, *(x.var.attr.name for x in fold.spatial[:-1])}:
        return None
    operands = [set(E.variables(*r.args)) for r in fold.reads]
    inside_columns = {x.var for x in fold.spatial[:-1] if not all(x.var in used for used in operands)}
    far = [r for r in walked_by_lanes(fold, folds[-1]) if is_far(r, target) and inside_columns.isdisjoint(E.variables(*r.args))]
    tiles = prod(extents.get(x, UNKNOWN) for x in rows)
    steps = max((n for n in STEPS if extents[folds[-1]] % n == 0 and n <= tiles), default=0)
    if len(far) != 1 or not steps:
        return None
    line = width * itemsize(fold.writes.dtype)  # bytes: a step of the folds in a panel, or a row of its sums
    room, outside, inside = target.l2 // BLOCK // line, list[str](), list(folds)
    if prod(extents[x] for x in inside) > room:
        room = min(room, SUMMED)
    while len(inside) > 1 and prod(extents[x] for x in inside) > room:
        outside.append(inside.pop(0))
    extent, unit = extents[inside[0]], steps if len(inside) == 1 else 1
    pieces = next((n for n in range(1, extent // unit + 1) if extent % (n * unit) == 0 and extent // n <= room), 0)
    waiting = inf if unknown else line * prod(extents[x.var.attr.name] for x in fold.spatial[:-1] if x.var in inside_columns)
    found = Panels(far[0].attr.name, steps, tuple(outside), tuple(inside), pieces)
    shared = extent_of(editing.find_loop(s.kernel, column).extent) >= SHARES * target.cores
    if pieces and (not found.in_blocks or shared and waiting <= target.l2 // SUMS):
        return found
    whole = line * prod(extents[x] for x in folds) <= target.l2 // WHOLE
    return Panels(far[0].attr.name, steps, (), tuple(folds), 1) if whole else None


def walked_by_lanes(fold: Nest, loop: str) -> list[Expr]:
    """The reads that depend on the lanes and on a fold."""
    both = {x.var for x in fold.loops if x is fold.spatial[-1] or x.var.attr.name == loop}
    return [r for r in fold.reads if both <= set(E.variables(*r.args))]


def is_far(r: Expr, target: CpuTarget) -> bool:
    """Whether an operand is not at home in the second-level cache: weights are read once a run."""
    return bytes_of(r.attr) > target.l2 // FAR


def ask_for_next(s: Schedule, p: Panels, column: str, loop: str) -> None:
    """Every few steps of the innermost fold, ask for a part of what the next iteration of `column` reads."""
    outer, inner = s.split(loop, p.steps)
    s.prefetch(p.operand, column, 1, outer)
    s.unroll(inner)


def accumulate_in_blocks(s: Schedule, acc: str, axes: Sequence[tuple[str, int]], lanes: int, column: str, p: Panels) -> None:
    """Sum up a panel block by block: `axes` are the loops over rows, and how many of each a tile has."""
    s.compute_at(acc, column, "global")
    vectors, lane = s.split(stage_axes(s.kernel, acc, False)[-1], lanes)
    s.unroll(vectors)
    s.vectorize(lane)
    *spatial, last = stage_axes(s.kernel, acc, True)
    others = [name for name in spatial if name not in {x for x, _ in axes}]
    around, tile, partial = split_tiles(s, axes)
    others += around
    vectors, lane = s.split(last, lanes)
    tile.append(vectors)
    outside, inside = list(p.outside), list(p.inside)
    if p.pieces > 1:
        outer, inside[0] = s.split(inside[0], extent_of(editing.find_loop(s.kernel, inside[0]).extent) // p.pieces)
        outside.append(outer)
    inside[-1], steps = s.split(inside[-1], p.steps)
    s.reorder(*outside, *others, *inside, steps, *tile, lane, reassociate=True)
    for name in tile:
        s.unroll(name)
    s.vectorize(lane)
    s.prefetch(p.operand, outside[-1], 1, inside[-1])
    s.unroll(steps)
    s.promote(inside[0], acc, f"{acc}.tile", anew=True)
    for name in reversed(others):
        if name in partial:
            s.partition(name, partial[name])
