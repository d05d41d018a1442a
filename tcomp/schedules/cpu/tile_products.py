"""Products in tile registers (AMX): a block of up to four tiles of sums stays in registers over a whole reduction, of which one instruction
adds up as many steps as a tile has lanes. It is cleared, and read, in a buffer on the stack.

Operands lie as for dot products in vector lanes (`dot_products`). These take few rows, short reductions, and windows over images whose size
only a run knows.
"""

from __future__ import annotations

from math import prod

from tcomp.ir.access import stride
from tcomp.ir.expr import as_expr
from tcomp.ir.instruction import TILE, TILES, tile_depth
from tcomp.ir.linear import linear
from tcomp.ir.loops import For
from tcomp.machines import Core
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, row_axis
from tcomp.schedules.cost.register_tiles import Tile
from tcomp.schedules.cpu.common import nest_lanes
from tcomp.schedules.cpu.dot_products import Summed, summed, updates
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MAX_WALKED = 3  # loops of a reduction that an instruction walks


def multiplies_tiles(nest: Nest, target: CpuTarget) -> bool:
    """Whether a sum of products whose operands lie in groups takes less time in tile registers than in vector lanes."""
    found, row = summed(nest, target), row_axis(nest)
    if found is None or row is None or not found.in_tiles(target) or nest_lanes(target, nest) != TILE[1]:
        return False
    walked, core = _walked(nest, found), target.core
    if not walked or len(walked) > MAX_WALKED or not all(isinstance(x.extent, int) for x in nest.reduction_loops):
        return False
    if () in linear(as_expr(row.extent)) and not isinstance(row.extent, int):  # of `n - 2` rows the last ones cannot be cut into tiles
        return False
    rows, steps = extent_of(row.extent), _steps(walked[-1], found)
    repeated = prod(int(x.extent) for x in walked[:-1])
    in_lanes = rows * 2 * steps * repeated / core.fma
    return _cycles(Tile(min(rows, 2 * TILE[0]), 2), steps, repeated, core) * rows / min(rows, 2 * TILE[0]) < in_lanes


def blocks_of_tiles(nest: Nest, target: CpuTarget, rows: int, multiple: int, panel: int, columns: int) -> list[Tile]:
    """The blocks that a sum of products may be computed in, the one with the least modelled time first: rows, and vectors of columns. The
    rows divide `multiple`, and the vectors a panel of weights of so many."""
    found = summed(nest, target)
    assert found is not None
    *windows, along = _walked(nest, found)
    vectors = -(-columns // TILE[1])
    repeated, steps = prod(int(x.extent) for x in windows), _steps(along, found)

    def total(tile: Tile) -> float:
        """Cycles of all blocks."""
        sizes = [(Tile(r, v), n * m) for r, n in _parts(rows, tile.rows) for v, m in _parts(vectors, tile.vectors)]
        return sum(times * _cycles(part, steps, repeated, target.core) for part, times in sizes)

    possible = (Tile(r, v) for v in range(min(vectors, TILES), 0, -1) for r in range(min(rows, TILES * TILE[0]), 0, -1))
    fitting = [t for t in possible if _registers(t) <= TILES and multiple % t.rows == 0 and (not panel or panel % t.vectors == 0)]
    return sorted(fitting, key=total)


def _parts(whole: int, size: int) -> list[tuple[int, int]]:
    """(size, number) of the parts that a number is cut into."""
    return [(n, times) for n, times in ((size, whole // size), (whole % size, 1)) if n and times]


def _registers(tile: Tile) -> int:
    down = -(-tile.rows // TILE[0])
    return down * tile.vectors + down + tile.vectors


def _cycles(tile: Tile, steps: int, repeated: int, core: Core) -> float:
    """Modelled cycles of a block: its products, or the loads of their operands; and its sums, which are loaded and stored."""
    down = -(-tile.rows // TILE[0])
    product = max(down * tile.vectors * core.tile_product, (down + tile.vectors) * core.tile_load, core.tile_latency)
    return product * repeated * (steps // tile_depth(steps)) + down * tile.vectors * core.tile_sums


def _walked(nest: Nest, found: Summed) -> list[For]:
    """The loops of a reduction around a group, the one along which operands lie in groups last; none where there is no such loop."""
    rows = next(r for r in nest.reads if r is not found.columns)
    if found.loop.extent != found.kind.group:  # not split into groups yet
        return [*(x for x in nest.reduction_loops if x is not found.loop), found.loop]
    others = [x for x in nest.reduction_loops if x is not found.loop]
    along = max((x for x in others if stride(rows, x.var) == found.kind.group), key=lambda x: x.extent, default=None)
    return [] if along is None else [*(x for x in others if x is not along), along]


def _steps(along: For, found: Summed) -> int:
    """The groups along a loop."""
    return int(along.extent) // (found.kind.group if along is found.loop else 1)


def multiply_tiles(s: Schedule, target: CpuTarget) -> None:
    """The update of every block of sums on the stack becomes one instruction, if its sizes are constant and fit the registers."""
    for update, found in updates(s, "global", target):
        (*others, columns), group, walked = update.spatial, found.loop, _walked(update, found)
        rows = [x for x in others if x.extent != 1]
        sizes = [x.extent for x in (*rows, columns, *walked)]
        if (
            found.kind.tiles is None
            or not found.in_tiles(target)
            or not walked
            or len(rows) > 1
            or not all(isinstance(n, int) for n in sizes)
        ):
            continue
        height, width, steps = prod(int(x.extent) for x in rows), int(columns.extent), int(walked[-1].extent)
        if len(walked) <= MAX_WALKED and _registers(Tile(height, -(-width // TILE[1]))) <= TILES and group.extent == found.kind.group:
            loops = [x.var.name for x in walked]
            s.reorder(*loops, *(x.var.name for x in others), columns.var.name, group.var.name, reassociate=True)
            instruction = found.kind.tiles(height, width, steps, *(int(x.extent) for x in walked[:-1]))
            s.tensorize(loops[0], instruction, reassociate=True)
