"""Default CPU schedule of elementwise results that read some operand across its rows: transposes, changes of layout.

Vector lanes along the contiguous axis of the result would gather what lies far apart. Instead a tile of `rows` x `lanes` elements is read
along its rows into registers, turned there by shuffles (the code generator does that where a register tile is read across), and written
in whole lines: memory sees contiguous pieces on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from tcomp.ir import expr as E
from tcomp.ir.access import affine, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr
from tcomp.ir.loops import For
from tcomp.schedules.analysis.access_patterns import Nest
from tcomp.schedules.cpu.lanes_and_threads import divides, lanes_of, threads
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MOST_SIDE = 16  # lanes of a tile: what is turned stands in so many registers
PIECE = 128  # bytes written next to each other, where the extent allows: two lines, as memory likes them
MOST_PIECES = 4  # vectors next to each other


@dataclass(frozen=True, slots=True)
class Turned:
    """The loop along which the operands lie, the operands, and the tile: `vectors` x `lanes` rows of `lanes` elements."""

    across: For
    operands: tuple[Expr, ...]
    lanes: int
    vectors: int


def turned(nest: Nest, target: CpuTarget) -> Turned | None:
    """What to turn, where all that lanes would gather lies along one other loop."""
    lane = nest.loops[-1]
    far = tuple(r for r in nest.reads if stride(r, lane.var) not in (0, 1))
    along = [x for x in nest.loops[:-1] if far and all(stride(r, x.var) == 1 for r in far)]
    lanes = min(MOST_SIDE, lanes_of(target, [nest.writes, *(r.attr for r in nest.reads)]))
    if not along or lanes < 2 or not all(map(_plain, far)) or any(e.op == "select" for e in E.walk(nest.leaf.value)):
        return None
    if any(sum(r.attr is other.attr for other in nest.reads) > 1 for r in far):
        return None
    if not all(isinstance(x.extent, int) and x.extent >= lanes for x in (lane, along[-1])):
        return None
    tiles = int(lane.extent) // lanes
    wanted = max(1, min(tiles, MOST_PIECES, PIECE // (lanes * itemsize(nest.writes.dtype))))
    return Turned(along[-1], far, lanes, next((n for n in range(wanted, MOST_PIECES + 1) if tiles % n == 0), 1))


def _plain(read: Expr) -> bool:
    """No index depends on loops by anything but multiples."""
    return all(affine(i) is not None for i in read.args)


def schedule(s: Schedule, nest: Nest, found: Turned, worthwhile: bool, knobs: Knobs) -> None:
    """Schedule a result that reads an operand across its rows."""
    lane, across = nest.loops[-1], found.across
    others = [x.var.attr.name for x in nest.loops[:-1] if x is not across]
    side, height = found.lanes, found.lanes * found.vectors
    tall, inner = s.split(lane.var.attr.name, height)
    vector, lanes = s.split(inner, side)
    wide, line = s.split(across.var.attr.name, side)
    s.reorder(*others, tall, wide, line, vector, lanes)
    for r in found.operands:
        *rows, columns = s.cache_read(r.attr.name, wide, f"{r.attr.name}.tile", "register").loads
        for x in rows:
            s.unroll(x)
        s.vectorize(columns)
    s.unroll(line)
    s.unroll(vector)
    s.vectorize(lanes)
    nests_to_thread = [[*others, tall, wide]]
    for outer, loop, size in ((wide, across, side), (tall, lane, height)):
        if not divides(size, loop.extent):
            _, tail = s.partition(outer, int(loop.extent) // size)
            if outer is tall and not others:
                nests_to_thread.append([tail, tail.copies[wide]])
    for names in nests_to_thread:
        threads(s, names, worthwhile, knobs)
