"""Products of bytes on a CPU whose instructions add four products up in a 32-bit lane, so that operands lie in groups of four:

    acc[row, column] += int32(a[row, k * 4 + g]) * int32(b[k, column, g])        a: uint8, b: int8

Channels-last activations are in such groups already; constant weights are packed. The register tile is that of any product (`contraction`);
in the end its update becomes the instruction. What no instruction fits stays in plain vector lanes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.layout import Layout, Piece
from tcomp.ir.loops import SERIAL, Accumulate, For, perfect, walk
from tcomp.schedules.analysis.access_patterns import Nest, nests
from tcomp.schedules.cpu.common import divides, lanes_of
from tcomp.schedules.instructions import vpdpbusd, vpmaddwd
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

GROUP = 4  # bytes that one lane of 32 bits multiplies and adds up
WORDS = 2  # integers of 16 bits, likewise


def byte_lanes(target: CpuTarget) -> int:
    """Lanes of 32 bits of the widest vectors of a target that multiply bytes; 0 for none."""
    usable = (bits for bits in (512, 256) if target.vector_bits >= bits and any(map(target.has, vpdpbusd(1, 1, 1, bits).features)))
    return next((bits // 32 for bits in usable), 0)


def word_lanes(target: CpuTarget) -> int:
    """Likewise, of the widest vectors that multiply integers of 16 bits."""
    usable = (bits for bits in (512, 256) if target.vector_bits >= bits and any(map(target.has, vpmaddwd(1, 1, 1, bits).features)))
    return next((bits // 32 for bits in usable), 0)


def multiplies_bytes(target: CpuTarget) -> bool:
    """Whether the vectors of a target do."""
    return byte_lanes(target) > 0


def summed_bytes(nest: Nest) -> tuple[For, E.Expr] | None:
    """(a reduction loop, the signed operand) of a sum of products of uint8 by int8, widened to int32: one along which the unsigned operand,
    that of the rows, is contiguous, in whole groups."""
    value, lane = nest.leaf.value, nest.spatial[-1].var if nest.spatial else None
    if value.op != "mul" or value.dtype != "int32" or any(x.op != "cast" or x.args[0].op != "read" for x in value.args):
        return None
    rows, columns = sorted((x.args[0] for x in value.args), key=lambda r: r.dtype, reverse=True)
    if (rows.dtype, columns.dtype) != ("uint8", "int8") or lane in E.variables(*rows.args) or lane not in E.variables(*columns.args):
        return None
    for x in nest.reduction_loops:
        if stride(rows, x.var) == 1 and x.var in E.variables(*columns.args) and isinstance(x.extent, int) and x.extent % GROUP == 0:
            return x, columns
    return None


def grouped(panels: Layout, nest: Nest) -> Layout:
    """The layout of packed weights with the reduction axis in groups, as instructions add them up; unchanged if the product is not of
    bytes."""
    found = summed_bytes(nest)
    axes = [d for d, i in enumerate(found[1].args) if i is found[0].var] if found is not None else []
    if len(axes) != 1 or any(p.axis == axes[0] and p != Piece(axes[0]) for p in panels.pieces):
        return panels
    pieces = [replace(p, div=GROUP) if p.axis == axes[0] else p for p in panels.pieces]
    return Layout(panels.rank, (*pieces, Piece(axes[0], 1, GROUP)))


def split_groups(s: Schedule) -> None:
    """A loop of their own for groups, where the weights have been packed into them."""
    for x, weights in [found for n in nests(s.kernel) if n.is_reduction and (found := summed_bytes(n)) is not None]:
        if any(i.op == "mod" and i.args[0] is x.var and i.args[1].op == "const" and i.args[1].attr == GROUP for i in weights.args):
            s.split(x.var.name, GROUP)


def group_loop(nest: Nest) -> For | None:
    """The loop over a group, where there is one."""
    found = summed_bytes(nest)
    return found[0] if found is not None and found[0].extent == GROUP and stride(found[1], found[0].var) == 1 else None


def add_up_groups(s: Schedule, target: CpuTarget) -> None:
    """The update of every register tile of bytes: one instruction, if its sizes are constant and fill vectors."""
    for leaf in [x for x in walk(s.kernel.body) if isinstance(x, Accumulate) and x.buffer.scope == "register"]:
        around = editing.enclosing(s.kernel, leaf)
        top = next((n for n, x in enumerate(around) if perfect(x)[1] is leaf), len(around))
        tile = Nest(tuple(around[top:]), leaf)
        if all(x.kind == SERIAL for x in tile.loops) and (group := group_loop(tile)) is not None:
            _update(s, tile, group, target)


def _update(s: Schedule, tile: Nest, group: For, target: CpuTarget) -> None:
    *rows, columns = tile.spatial
    loops, down, across = [x.var.name for x in tile.reduction_loops if x is not group], [x.var.name for x in rows], columns.var.name
    lanes, sizes = lanes_of(target, [tile.writes]), [x.extent for x in rows if x.extent != 1]
    weights = next(r for r in tile.reads if r.dtype == "int8")
    width = next((n for n in (lanes, 8) if divides(n, columns.extent)), 0)
    if width and len(sizes) < 2 and all(isinstance(n, int) for n in sizes) and stride(weights, columns.var) == GROUP:
        s.reorder(*loops, *down, across, group.var.name, reassociate=True)
        s.tensorize([*down, across][0], vpdpbusd(prod(map(int, sizes)), int(columns.extent) // width, 1, width * 32))
        return
    vectors, lane = s.split(across, lanes)
    s.reorder(*loops, group.var.name, *down, vectors, lane, reassociate=True)
    unroll(s, [*(x.var.name for x in rows if isinstance(x.extent, int)), vectors], lane)
