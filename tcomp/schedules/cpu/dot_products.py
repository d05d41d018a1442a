"""Products on a CPU whose instructions add several up in a 32-bit lane, so that operands lie in groups of as many:

    acc[row, column] += int32(a[row, k * 4 + g]) * int32(b[k, column, g])            a: uint8, b: int8
    acc[row, column] += int32(a[row, k * 2 + g]) * int32(b[k, column, g])            a: int16, b: int8 or int16
    acc[row, column] += float32(a[row, k * 2 + g]) * float32(b[k, column, g])        a, b: bfloat16

Channels-last activations are in such groups already; constant weights are packed. The register tile is that of any product (`contraction`);
in the end its update becomes the instruction. What no instruction fits stays in plain vector lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.expr import as_expr
from tcomp.ir.instruction import TILE, Instruction
from tcomp.ir.layout import Layout, Piece
from tcomp.ir.loops import SERIAL, Accumulate, Call, For, perfect, walk
from tcomp.ir.simplify import as_dim
from tcomp.schedules.analysis.access_patterns import Nest, nests, write_nests
from tcomp.schedules.cpu.common import divides, lanes_of
from tcomp.schedules.instructions import tdpbf16ps, tdpbusd, vdpbf16ps, vpdpbusd, vpmaddwd, vpmaddwd_bytes
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

GROUP = 4  # bytes that one lane of 32 bits multiplies and adds up
WORDS = 2  # integers of 16 bits, likewise

Tiles = Callable[[int, int, int, int], Instruction]  # rows, vectors, unroll, bits -> an instruction
Blocks = Callable[..., Instruction]  # rows, columns, steps and sizes of windows -> an instruction in tile registers


@dataclass(frozen=True, slots=True)
class DotProduct:
    """What an instruction adds up in a lane: a `group` of products of elements of rows by those of columns, which have these types. Where
    another instruction adds that to the sums, it is in a register of its own (`apart`). `tiles` does the same in tile registers (see
    `tile_products`)."""

    group: int
    rows: str
    columns: str
    sums: str
    instruction: Tiles
    apart: bool = False
    tiles: Blocks | None = None


BYTES = DotProduct(GROUP, "uint8", "int8", "int32", vpdpbusd, tiles=tdpbusd)
BYTES_BY_WORDS = DotProduct(WORDS, "int16", "int8", "int32", vpmaddwd_bytes, apart=True)
WORD_PAIRS = DotProduct(WORDS, "int16", "int16", "int32", vpmaddwd, apart=True)
BFLOATS = DotProduct(2, "bfloat16", "bfloat16", "float32", vdpbf16ps, tiles=tdpbf16ps)


def _lanes(target: CpuTarget, instruction: Tiles) -> int:
    """Lanes of 32 bits of the widest vectors of a target that an instruction multiplies; 0 for none."""
    usable = (bits for bits in (512, 256) if target.vector_bits >= bits and any(map(target.has, instruction(1, 1, 1, bits).features)))
    return next((bits // 32 for bits in usable), 0)


def byte_lanes(target: CpuTarget) -> int:
    """Lanes of 32 bits of the widest vectors of a target that multiply bytes; 0 for none."""
    return _lanes(target, vpdpbusd)


def word_lanes(target: CpuTarget) -> int:
    """Likewise, of the widest vectors that multiply integers of 16 bits."""
    return _lanes(target, vpmaddwd)


def dot_products(target: CpuTarget) -> list[DotProduct]:
    """Those that a target has instructions for."""
    return [kind for kind in (BYTES, BYTES_BY_WORDS, WORD_PAIRS, BFLOATS) if _lanes(target, kind.instruction)]


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum of such products: along this loop of the nest the operand of the rows is contiguous, in whole groups."""

    kind: DotProduct
    loop: For
    columns: E.Expr  # the read of the other operand

    def in_tiles(self, target: CpuTarget) -> bool:
        """Whether a target has the instruction in tile registers."""
        return self.kind.tiles is not None and any(map(target.has, self.kind.tiles(1, 1, 1).features))


def summed(nest: Nest, target: CpuTarget) -> Summed | None:
    """The sum of products of a nest that a target has an instruction for."""
    value, lane = nest.leaf.value, nest.spatial[-1].var if nest.spatial else None
    if lane is None or value.op != "mul" or any(x.op != "cast" or x.args[0].op != "read" for x in value.args):
        return None
    rows, columns = sorted((x.args[0] for x in value.args), key=lambda r: lane in E.variables(*r.args))
    types = rows.dtype, columns.dtype, value.dtype
    kind = next((k for k in dot_products(target) if types == (k.rows, k.columns, k.sums)), None)
    if kind is None or lane in E.variables(*rows.args) or lane not in E.variables(*columns.args):
        return None
    for x in nest.reduction_loops:
        if stride(rows, x.var) == 1 and x.var in E.variables(*columns.args) and isinstance(x.extent, int) and x.extent % kind.group == 0:
            return Summed(kind, x, columns)
    return None


def grouped(panels: Layout, nest: Nest, target: CpuTarget) -> Layout:
    """The layout of packed weights with the reduction axis in groups, as instructions add them up; unchanged where there is none for the
    product."""
    found = summed(nest, target)
    axes = [d for d, i in enumerate(found.columns.args) if i is found.loop.var] if found is not None else []
    if found is None or len(axes) != 1 or any(p.axis == axes[0] and p != Piece(axes[0]) for p in panels.pieces):
        return panels
    pieces = [replace(p, div=found.kind.group) if p.axis == axes[0] else p for p in panels.pieces]
    return Layout(panels.rank, (*pieces, Piece(axes[0], 1, found.kind.group)))


def split_groups(s: Schedule, target: CpuTarget) -> None:
    """A loop of their own for groups, where the weights have been packed into them."""
    for found in [found for n in nests(s.kernel) if n.is_reduction and (found := summed(n, target)) is not None]:
        x, group = found.loop.var, found.kind.group
        if any(i.op == "mod" and i.args[0] is x and i.args[1].op == "const" and i.args[1].attr == group for i in found.columns.args):
            s.split(x.name, group)


def group_loop(nest: Nest, target: CpuTarget) -> Summed | None:
    """The sum whose loop is over one group, where there is one."""
    found = summed(nest, target)
    whole = found is not None and found.loop.extent == found.kind.group and stride(found.columns, found.loop.var) == 1
    return found if whole else None


def separate_rows(s: Schedule, target: CpuTarget) -> None:
    """The last rows of register tiles, where a run alone knows how many these are, one by one: instructions cannot test each row. Those of
    blocks on the stack, for tile registers, in as many tiles as they fill first, and in smaller ones."""
    for nest in [n for n in write_nests(s.kernel.body) if n.is_reduction and group_loop(n, target) is not None]:
        tested = {v for c in nest.conditions for v in E.variables(c)}
        rows = [x for x in nest.spatial[:-1] if x.kind == SERIAL and (x.var in tested or not isinstance(x.extent, int))]
        if len(rows) != 1 or nest.spatial[-1].var in tested:
            continue
        with suppress(ScheduleError), s.together():
            row, others = rows[0].var.name, [x.var.name for x in nest.loops if x is not rows[0]]
            if tested:
                s.tighten(row)
            for size in (TILE[0], TILE[0] // 4) if nest.writes.scope == "global" else ():
                whole = as_dim(as_expr(editing.find_loop(s.kernel, row).extent) // size)
                tiles, inner = s.split(row, size)
                s.reorder(tiles, *others[:-2], inner, *others[-2:], reassociate=True)
                _, tail = s.partition(tiles, whole)
                row, others = tail.copies[inner], [tail.copies[x] for x in others]
                s.tighten(row)
            s.reorder(row, *others, reassociate=True)
            s.clean()


def updates(s: Schedule, scope: str, target: CpuTarget) -> Iterator[tuple[Nest, Summed]]:
    """The updates of sums in buffers of a scope that add up groups, and are no instruction yet."""
    for leaf in [x for x in walk(s.kernel.body) if isinstance(x, Accumulate) and x.buffer.scope == scope]:
        if any(isinstance(x, Call) for x in editing.path(s.kernel.body, leaf)):
            continue
        around = editing.enclosing(s.kernel, leaf)
        top = next((n for n, x in enumerate(around) if perfect(x)[1] is leaf), len(around))
        known = next((n for n in range(len(around), top, -1) if not isinstance(around[n - 1].extent, int)), top)  # the others are inside
        tile = Nest(tuple(around[known:]), leaf)
        if all(x.kind == SERIAL for x in tile.loops) and (found := group_loop(tile, target)) is not None:
            yield tile, found


def add_up_groups(s: Schedule, target: CpuTarget) -> None:
    """The update of every register tile of groups that is none yet: one instruction, if its sizes are constant and fill vectors."""
    for tile, found in updates(s, "register", target):
        _update(s, tile, found, target)


def _update(s: Schedule, tile: Nest, found: Summed, target: CpuTarget) -> None:
    (*rows, columns), group = tile.spatial, found.loop
    loops, down, across = [x.var.name for x in tile.reduction_loops if x is not group], [x.var.name for x in rows], columns.var.name
    lanes, sizes = lanes_of(target, [tile.writes]), [x.extent for x in rows if x.extent != 1]
    width = next((n for n in (lanes, 8) if divides(n, columns.extent)), 0)
    if width and len(sizes) < 2 and all(isinstance(n, int) for n in sizes) and stride(found.columns, columns.var) == found.kind.group:
        s.reorder(*loops, *down, across, group.var.name, reassociate=True)
        instruction = found.kind.instruction(prod(map(int, sizes)), int(columns.extent) // width, 1, width * 32)
        s.tensorize([*down, across][0], instruction, reassociate=True)
        return
    vectors, lane = s.split(across, lanes)
    s.reorder(*loops, group.var.name, *down, vectors, lane, reassociate=True)
    unroll(s, [*(x.var.name for x in rows if isinstance(x.extent, int)), vectors], lane)
