"""Default CPU schedule of elementwise results that read some operand across its rows: transposes, changes of layout.

Vector lanes along the contiguous axis of the result would gather elements with a large stride. Instead a tile of `rows` x `lanes` elements is
read along its rows into registers, transposed there by shuffles (the code generator does that where a register tile is read across), and
written in whole lines: memory sees contiguous pieces on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from tcomp.ir import expr as E
from tcomp.ir.access import affine, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr
from tcomp.ir.loops import For
from tcomp.schedules.analysis.access_patterns import Nest
from tcomp.schedules.cpu.lanes_and_threads import divides, nest_lanes, partition_tails, threads, unroll
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MAX_TILE_LANES = 16  # lanes of a tile, which stands in as many registers: half of what machines with wide vectors have
MIN_WRITTEN = 128  # bytes written next to each other, where the extent allows: two lines of the cache, which hardware fetches as a pair
MAX_VECTORS = 4  # next to each other: bounds the length of the code


@dataclass(frozen=True, slots=True)
class TransposeTiles:
    """The loop along which the operands lie, the operands, and the tile: `vectors` x `lanes` rows of `lanes` elements."""

    across: For
    operands: tuple[Expr, ...]
    lanes: int
    vectors: int


def transpose_tiles(nest: Nest, target: CpuTarget) -> TransposeTiles | None:
    """What to transpose, where all that lanes would gather lies along one other loop."""
    lane, lanes = nest.loops[-1], min(MAX_TILE_LANES, nest_lanes(target, nest))
    strided = tuple(r for r in nest.reads if stride(r, lane.var) not in (0, 1))
    along = [x for x in nest.loops[:-1] if strided and all(stride(r, x.var) == 1 for r in strided)]
    if not along or lanes < 2 or any(affine(i) is None for r in strided for i in r.args) or any(e.op == "select" for e in E.walk(nest.leaf.value)):
        return None
    if any(sum(r.attr is other.attr for other in nest.reads) > 1 for r in strided):
        return None
    if not all(isinstance(x.extent, int) and x.extent >= lanes for x in (lane, along[-1])):
        return None
    tiles = int(lane.extent) // lanes
    wanted = max(1, min(tiles, MAX_VECTORS, MIN_WRITTEN // (lanes * itemsize(nest.writes.dtype))))
    return TransposeTiles(along[-1], strided, lanes, next((n for n in range(wanted, MAX_VECTORS + 1) if tiles % n == 0), 1))


def schedule(s: Schedule, nest: Nest, tiles: TransposeTiles, pays: bool, knobs: Knobs) -> None:
    """Schedule a result that reads an operand across its rows, on threads if that `pays`."""
    lane, across, side, height = nest.loops[-1], tiles.across, tiles.lanes, tiles.lanes * tiles.vectors
    others = [x.var.name for x in nest.loops[:-1] if x is not across]
    tall, inner = s.split(lane.var.name, height)
    vector, lanes = s.split(inner, side)
    wide, line = s.split(across.var.name, side)
    s.reorder(*others, tall, wide, line, vector, lanes)
    for r in tiles.operands:
        *rows, columns = s.cache_read(r.attr.name, wide, f"{r.attr.name}.tile", "register").loads
        unroll(s, rows, columns)
    unroll(s, [line, vector], lanes)
    cuts: dict[str, Dim] = {outer: int(x.extent) // n for outer, x, n in ((wide, across, side), (tall, lane, height)) if not divides(n, x.extent)}
    for names in partition_tails(s, [*others, tall, wide], cuts):
        threads(s, names, pays, knobs)
