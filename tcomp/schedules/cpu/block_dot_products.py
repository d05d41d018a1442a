"""Products with weights of few bits (`ops.stored_weights`), on a CPU whose instructions add up four products of bytes in a 32-bit lane, or
two of integers of 16 bits, as which activations and weights are taken then:

    for panel of columns (threads), tile of rows:
      for block:                              sums of the tile stay in registers, as floats over all blocks
        for four elements of the block:       and as integers over one
          numbers of the panel                taken out of their bytes once for all rows of the tile
          vpdpbusd, vpmaddwd                  numbers of four elements by those of activations, which all lanes share
        sums += float(integers) * scales

Weights lie panel by panel in the order in which this reads them. What is recognised is the structure: a sum over blocks of sums of
integers, each a product of a signed one of 8 or 16 bits and of what is computed from an unsigned byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.expr import as_expr
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.layout import LINE, Layout, Piece
from tcomp.ir.loops import SERIAL, Accumulate, Kernel, perfect, walk
from tcomp.ir.simplify import as_dim, difference, simplify
from tcomp.schedules.analysis import access_patterns as patterns
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, nests, reduction_nest, result_nest
from tcomp.schedules.cost.register_tiles import tiles_of_a_row
from tcomp.schedules.cpu.common import divides, extent, most, size, size_of, threads
from tcomp.schedules.cpu.dot_products import GROUP, WORDS, byte_lanes, word_lanes
from tcomp.schedules.groups import attachments
from tcomp.schedules.instructions import vpdpbusd_unsigned, vpmaddwd
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

PANEL_VECTORS = 4  # vectors of columns whose weights lie together: one row then sums up four chains at once
UNPACKING = 1.5  # instructions that unpack the numbers of a vector, relative to one that multiplies them
ROW_COST = 0.5  # of a step for another row: its activations are loaded
MAX_UNROLLED = 8  # steps of four elements of a block
MAX_ROWS = 12  # of a tile: with two vectors of columns and more, fewer fit into the registers of any machine
UNKNOWN_ROWS = 1 << 12  # rows to choose a tile for, where no limit of their number is known
AHEAD_PRODUCTS = 3  # instructions that multiply a line of weights; with fewer, those under way in a core load enough at a time
_FACTORS = [("int8", "uint8", "uint8"), ("int16", "uint8", "uint8"), ("int16", "int16", "uint8")]  # activations, numbers, what holds them
MIN_PARALLEL_BYTES = 1 << 15  # of weights; threads cost more than they save with fewer


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """`result` is computed from `sums` over blocks (itself, or a temporary) of `integers`, which are sums of products of bytes: one for
    each of the `parts`, bytes of an activation. A lane adds up a `group` of them."""

    result: str
    sums: str
    integers: str
    activations: E.Expr
    weights: E.Expr
    block: E.Expr  # the loop variable of `sums` over blocks
    parts: int

    def lanes(self, target: CpuTarget) -> int:
        """Lanes of 32 bits of the vectors that multiply such integers; 0 for none."""
        return word_lanes(target) if self.group == WORDS else byte_lanes(target)

    @property
    def group(self) -> int:
        """Products that a lane adds up at a time."""
        return WORDS if self.activations.dtype == "int16" else GROUP


def block_lanes(target: CpuTarget) -> int:
    """Lanes of 32 bits of the vectors that multiply blocks, of bytes or else of integers of 16 bits; 0 for none."""
    return byte_lanes(target) or word_lanes(target)


def found(kernel: Kernel, result: str, inside: Sequence[str]) -> BlockProduct | None:
    """The block product that computes a result, None if it is computed otherwise; `inside` are the temporaries that only it reads."""
    reductions = [n for n in nests(kernel) if n.is_reduction and n.writes.name in (*inside, result)]
    if len(reductions) != 2 or any(n.writes.name not in (*inside, result) for n in reductions):
        return None
    first, second = reductions
    reads = [r for r in second.reads if r.attr is first.writes]
    bytes_ = _bytes(first)
    if bytes_ is None or not reads or second.writes.dtype != "float32" or len(second.reduction_loops) != 1:
        return None
    (block,) = second.reduction_loops
    at = (*second.leaf.indices, block.var)  # and, of integers of two bytes, one of these
    if any(tuple(i for i in r.args if i.op != "const") != at for r in reads):
        return None
    if [x.var for x in first.spatial] != list(first.leaf.indices):
        return None
    if not (patterns.is_sum(first) and patterns.is_sum(second)) or len(inside) != (1 if second.writes.name == result else 2):
        return None
    return BlockProduct(result, second.writes.name, first.writes.name, *bytes_, block.var, len({r.args for r in reads}))


def _bytes(nest: Nest) -> tuple[E.Expr, E.Expr] | None:
    """(read of the signed integer, read of the unsigned byte) of a sum of products, the second of which may have been unpacked."""
    value = nest.leaf.value
    if value.op != "mul" or value.dtype != "int32" or any(x.op != "cast" or len(E.reads(x)) != 1 for x in value.args):
        return None
    columns, rows = sorted((x.args[0] for x in value.args), key=lambda x: E.reads(x)[0].dtype != "uint8")
    lane, weights = nest.spatial[-2:-1], E.reads(columns)[0]
    if rows.op != "read" or (rows.dtype, columns.dtype, weights.dtype) not in _FACTORS or not lane:
        return None
    column = lane[0].var
    return (rows, weights) if column in E.variables(*weights.args) and column not in E.variables(*rows.args) else None


def operand_layouts(kernel: Kernel, constants: frozenset[int], target: CpuTarget) -> dict[int, Layout]:
    """The packed layouts of all such products: of weights by panel, block, group of elements, column, element; of scales and zero points by
    panel, block, column."""
    wishes: dict[int, Layout] = {}
    names = {b.name: n for n, b in enumerate(kernel.buffers)}
    for result, inside in attachments(kernel) if block_lanes(target) else ():
        if (product := found(kernel, result, inside)) is None or not (lanes := product.lanes(target)):
            continue
        second = reduction_nest(kernel, product.sums)
        column = second.spatial[-1]
        if not isinstance(column.extent, int):
            continue
        panel = next((n * lanes for n in (PANEL_VECTORS, 2) if column.extent % (n * lanes) == 0), lanes)
        for r in (product.weights, *second.reads):
            number = names.get(r.attr.name, -1)
            if number not in constants or len(r.args) < 2:
                continue
            if r is product.weights and len(r.args) == 3:
                group = product.group
                pieces = (Piece(0, panel), Piece(1), Piece(2, group), Piece(0, 1, panel), Piece(2, 1, group))
                wishes[number] = Layout(3, pieces)
            elif r.args == (column.var, product.block):
                wishes[number] = Layout(2, (Piece(0, panel), Piece(1), Piece(0, 1, panel)))
    return wishes


def _panel(weights: E.Expr, column: E.Expr, group: int) -> int:
    """Columns of a panel, if that is how weights lie, in such groups; else 0."""
    place = E.row_major(weights.args, weights.attr.shape)
    first, second = (simplify(E.substitute(place, {column: as_expr(n)})) for n in (0, 1))
    panel = weights.attr.shape[-2]
    return panel if isinstance(panel, int) and weights.attr.shape[-1] == group and difference(second, first) is as_expr(group) else 0


def in_registers(s: Schedule, target: CpuTarget, knobs: Knobs) -> set[str]:
    """Schedule all such products; returns the buffers whose nests are shaped."""
    done = set[str]()
    for result, inside in attachments(s.kernel) if block_lanes(target) else ():
        if (product := found(s.kernel, result, inside)) is not None and product.lanes(target):
            before = set(s.stages)
            with s.attempt(result, FallbackKind.STAGE_BY_STAGE):
                schedule(s, product, target, knobs)
                done |= {result, *inside, *(set(s.stages) - before)}
    return done


def _tile(rows: int, vectors: int, parts: int, target: CpuTarget, known: bool = True) -> tuple[int, int]:
    """(rows, vectors) of a tile: sums as floats, as integers for each part, and a step's weights stay in registers. Where the number of
    rows is not `known` but at most this, the last ones are a whole tile whose every row is tested."""
    best: tuple[float, int, int] | None = None
    for v in (n for n in (4, 2, 1) if vectors % n == 0):
        for r in range(1, min(rows, MAX_ROWS) + 1):
            if r > 1 and (1 + parts) * r * v + 2 * v + 4 > target.vector_registers:
                continue
            whole, rest = divmod(rows, r)
            tiles = ((r, whole), (rest, 1)) if known else ((r, rows * tiles_of_a_row(r, rows)),)
            cost = sum(times * (parts * n * v + UNPACKING * v + ROW_COST * parts * n) for n, times in tiles if n) / v
            best = min(best or (cost, r, v), (cost, r, v), key=lambda x: (x[0], -x[2]))
    assert best is not None
    return best[1:]


def schedule(s: Schedule, product: BlockProduct, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a result and its sums by tiles in registers. Raises `ScheduleError` where sizes or layouts do not fit."""
    lanes, result, weights = product.lanes(target), product.result, product.weights
    integers = reduction_nest(s.kernel, product.integers)
    each = prod(extent_of(x.extent) for x in integers.reduction_loops if x.var not in E.variables(*weights.args))  # numbers of a byte
    panel = _panel(weights, integers.spatial[-2].var, product.group)
    out = result_nest(s.kernel, result) if product.sums != result else reduction_nest(s.kernel, result)
    if not panel or panel % lanes or not divides(panel, out.spatial[-1].extent):
        raise ScheduleError("weights are in no panels", why=f"`{weights.attr.name}` has the shape {list(weights.attr.shape)}")
    sums = s.cache_write(result, f"{result}.acc") if product.sums == result else product.sums
    out = result_nest(s.kernel, result)
    *others, column = (x.var.name for x in out.loops)
    row = others.pop() if others else None
    known = row is None or isinstance(extent(s, row), int)
    rows = 1 if row is None else size(s, row) if known else int(min(most(extent(s, row)), UNKNOWN_ROWS))
    best = _tile(rows, panel // lanes, product.parts, target, known)
    options = [(r, v) for v in (4, 2, 1) for r in (1, 2, 3, 4, 6, 8) if panel // lanes % v == 0 and r <= rows]
    options = [(r, v) for r, v in options if (1 + product.parts) * r * v <= target.vector_registers]
    height, vectors = knobs.choice((sums, "tile"), sorted({best, *options}), best)
    columns, of_panel = s.split(column, panel)
    part, of_part = s.split(of_panel, vectors * lanes)
    vector, lane = s.split(of_part, lanes)
    around, inside = [columns, *others], [vector]
    if row is not None:
        whole = extent(s, row)
        tiles, of_tile = s.split(row, height)
        around, inside = [*around, tiles], [of_tile, vector]
    s.reorder(*around, part, *inside, lane)
    unroll(s, inside, lane)
    s.compute_at(sums, part, "register")
    steps = _shape(s, sums, product, lanes)
    if row is not None and not divides(height, whole):
        s.partition(tiles, as_dim(as_expr(whole) // height))
    s.clean()
    _multiply(s, lanes)
    if rows == 1 and each * product.parts * LINE >= AHEAD_PRODUCTS * lanes * product.group:
        bytes_of_block = size_of(weights.attr) // (weights.attr.shape[0] * weights.attr.shape[1])
        ahead = target.core.memory_bandwidth * target.core.memory_latency  # bytes under way
        s.prefetch(weights.attr.name, product.block.name, ceil(ahead / bytes_of_block), steps, MAX_UNROLLED)
    threads(s, [x for x in around if x in s.loops], size_of(weights.attr) >= MIN_PARALLEL_BYTES, knobs)


def _shape(s: Schedule, sums: str, product: BlockProduct, lanes: int) -> str:
    """The nests that clear and update the sums of a tile, in lanes; in the latter, integers of a block. Returns the loop over its steps."""
    for is_reduction in (False, True):
        axes = patterns.stage_axes(s.kernel, sums, is_reduction)
        loops = [product.block.name] if is_reduction else []
        vector, lane = s.split(axes[-1], lanes)
        s.reorder(*loops, *axes[:-1], vector, lane, reassociate=is_reduction)
        unroll(s, [*axes[:-1], vector], lane)
    s.compute_at(product.integers, product.block.name, "register")
    *rows, column, _ = patterns.stage_axes(s.kernel, product.integers, False)
    vector, lane = s.split(column, lanes)
    s.reorder(*rows, vector, lane)
    unroll(s, [*rows, vector], lane)
    update = next(n for n in patterns.write_nests(s.kernel.body) if n.is_reduction and n.writes.name == product.integers)
    *rows, column, block = patterns.stage_axes(s.kernel, product.integers, True)
    others = [x.var.name for x in update.reduction_loops]
    along_both = (x for x in update.reduction_loops if all(x.var in E.variables(*r.args) for r in update.reads))
    bytes_of_block = next(x for x in along_both if divides(product.group, x.extent))
    others.remove(bytes_of_block.var.name)
    steps, group = s.split(bytes_of_block.var.name, product.group)
    s.reorder(block, steps, *others, *rows, column, group, reassociate=True)
    # Where steps are unrolled, LLVM loads ahead for later ones. That is good for rows that share what is unpacked, and bad for what memory
    # delivers: it does so best in order.
    several = rows if product.parts == 1 else rows[:-1]
    if others and any(extent(s, x) != 1 for x in several) and extent(s, steps) <= MAX_UNROLLED:
        s.unroll(steps)
    unroll(s, others)  # the numbers in a byte
    names, words = (f"{product.integers}.a", f"{product.integers}.w"), "int16" if product.group == WORDS else ""
    activations, numbers = s.cache_factors([steps, *others][-1], *names, "register", words)
    unroll(s, activations.loads[:-1], activations.loads[-1])
    vector, lane = s.split(s.fuse(*numbers.loads), lanes * product.group)
    unroll(s, [vector], lane)
    return steps


def _multiply(s: Schedule, lanes: int) -> None:
    """One instruction for each update of integers, where its sizes are constant."""
    for leaf in [x for x in walk(s.kernel.body) if isinstance(x, Accumulate) and x.buffer.dtype == "int32"]:
        loops = [x for x in editing.enclosing(s.kernel, leaf) if x.kind == SERIAL and perfect(x)[1] is leaf]
        if len(loops) >= 2:
            *rows, columns, _ = (x.var.name for x in loops)
            height = size(s, rows[-1]) if rows else 1
            unroll(s, rows[:-1])
            words = any(r.dtype == "int16" for r in E.reads(leaf.value))
            instruction = vpmaddwd if words else vpdpbusd_unsigned
            s.tensorize([*rows, columns][max(0, len(rows) - 1)], instruction(height, size(s, columns) // lanes, 1, 32 * lanes))
