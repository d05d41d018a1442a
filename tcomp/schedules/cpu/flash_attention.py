"""Default CPU schedule of products with a softmax, such as attention, in one pass over each row of scores (see
`primitives.online_softmax`).

    for block of rows (threads):
      for block of the row:                  keys; the maximum so far, and the sums relative to it, go on from block to block
        terms                                scores, by register tiles of rows x keys
        maximum, scale, weights              lanes along the row
        sums                                 scaled, and the block's terms added, by register tiles of rows x values

No array of rows x keys is ever stored: a block of scores, its weights and the sums stay in the nearest caches. Keys whose rows the lanes
would walk with a stride are packed: before everything else where several blocks of rows read them, else (a single new token, whose heads
are the rows) panel by panel where they are read, while what the next block reads is prefetched.
"""

from __future__ import annotations

from contextlib import suppress

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import as_expr
from tcomp.ir.loops import SERIAL, STACK_LIMIT, Accumulate, For, If, Store, walk
from tcomp.ir.simplify import as_dim
from tcomp.schedules.analysis.access_patterns import Nest, batch_axes, extent_of, is_product, reduction_nest, row_axis, write_nests
from tcomp.schedules.cost.register_tiles import Tile, tiles
from tcomp.schedules.cpu.common import MAX_LANES, divides, extent, nest_lanes, size, threads, unguard_lanes, whole_tiles
from tcomp.schedules.cpu.contraction import pack_panels, strided_operands, tile_loops
from tcomp.schedules.cpu.row_reductions import partial_loops
from tcomp.schedules.groups import SoftmaxProduct, row_and_column_loops
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

BLOCK_BYTES = STACK_LIMIT // 2  # bytes of what a block has of one kind (scores, weights, or sums): they are on the stack of a thread
MAX_ROWS = 64  # of a block: with more, reading keys and values again costs next to nothing already
MIN_ROWS = 16  # of a block, where there are so many: each reads all keys and values
BLOCK_KEYS = 128  # elements of a row in one block, about: enough steps for a register tile of sums, few enough for the first-level cache
STREAMED_KEYS = 32  # the same for few rows, the only ones that read a key: the last block is short, and what is prefetched stays near
RELOAD_CYCLES = 2.0  # cycles to load a vector of keys or values for the rows of another block (from the second-level cache; an estimate)
TAIL_SLOWDOWN = 3  # how many times longer rows take in the last block, where that is not whole (an estimate: its tiles are small)
UNROLL_FACTORS = (8, 4, 2)  # steps of a reduction that are unrolled, the first that divides it
PREFETCHED_LINES = 64  # at a step of a reduction, at most: more than a core has under way at once
UNROLLED_VECTORS = 4  # vectors of a row that are unrolled: the latency of an exponential is hidden by the others


def schedule(s: Schedule, found: SoftmaxProduct, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a product with a softmax in one pass over each row of scores."""
    for name in found.elements:
        s.inline(name)
    product = next(n for x in found.sums if is_product(n := reduction_nest(s.kernel, x)))
    (keys,) = reduction_nest(s.kernel, found.maximum).reduction_loops
    rows, columns, others = row_and_column_loops(s, found, product)
    lanes, room = nest_lanes(target, product), BLOCK_BYTES // itemsize(product.writes.dtype)
    max_rows = room // max(BLOCK_KEYS, extent_of(columns.extent))
    if max_rows < 1 or not isinstance(columns.extent, int):
        raise ScheduleError("the sums of a block do not fit", why=f"{columns.extent} sums of each row are too many to stay in the cache")
    height = knobs.choice((found.maximum, "rows"), *_heights(rows.extent, max_rows, target, lanes))
    operands, streamed = list[tuple[str, int]](), list[str]()  # what is packed, and what a single block of rows reads, once
    if found.scores is not None:
        scores = reduction_nest(s.kernel, found.scores)
        operands = strided_operands(s, scores, target, knobs)
        shared_keys = [x for x in scores.spatial[:-1] if x is not row_axis(scores) and x.var.name not in batch_axes(scores)]
        if isinstance(rows.extent, int) and rows.extent <= height and not shared_keys:
            streamed = [r.attr.name for r in product.reads if product.spatial[-1].var in E.variables(*r.args)]
    usual = STREAMED_KEYS if streamed and height < MIN_ROWS else BLOCK_KEYS
    lengths = list(range(lanes, max(min(2 * usual, room // height), lanes) + 1, lanes))
    dividing = [n for n in lengths if divides(n, keys.extent) and usual // 2 <= n]
    length = knobs.choice((found.maximum, "block"), lengths, min(dividing or lengths, key=lambda n: (abs(n - usual), n)))
    panel = _tile(height, length // lanes, target).vectors * lanes
    for name, dim in operands if not streamed else ():
        pack_panels(s, name, dim, panel, lanes, target, knobs, length)
    around, inside = s.split(rows.var.name, height)
    s.reorder(*others, around, inside, columns.var.name)
    for name in (*found.sums, found.maximum):
        s.compute_at(name, around)
    blocks, terms, *derived = s.online(found.maximum, keys.var.name, length)
    if found.scores is not None:
        s.compute_at(found.scores, blocks)
    original: dict[str, str] = {}  # of the loops and buffers of tails: those that they copy

    def cut(loop: str, point: E.Dim) -> str:
        _, tail = s.partition(loop, point)
        original.update((new, original.get(old, old)) for old, new in {loop: tail, **tail.copies}.items())
        return tail

    shared = [[*others, around]]
    if (whole := whole_tiles(rows.extent, height)) is not None:  # the last rows are in nests of their own
        tail, outside, of_tail = cut(around, whole), others, others
        for name in reversed(others):
            main, behind = s.fission(name)
            outside, of_tail = [main if x == name else x for x in outside], [behind if x == name else x for x in of_tail]
        shared = [[*outside, around], [*of_tail, tail]]
    if (whole := whole_tiles(keys.extent, length)) is not None:
        for name in [x for x in s.loops if original.get(x, x) == blocks]:
            cut(name, as_dim(E.minimum(as_expr(whole), as_expr(extent(s, name)))))  # of a causal mask, there may be fewer
    s.clean()
    for c in write_nests(s.kernel.body):
        name = original.get(c.leaf.buffer.name, c.leaf.buffer.name)
        loop, row = next(iter(c.reduction_loops), None), c.loop_along(-1)
        if name == terms:
            found_loops = _scores(s, c, lanes, target)
            if found_loops is None or not streamed:
                continue
            for buffer, dim in operands:
                pack_panels(s, buffer, dim, panel, lanes, target, knobs, loop=found_loops[0])
                if c.loops[0].var.name not in original:
                    _prefetch(s, buffer, blocks, found_loops[1])
        elif isinstance(c.leaf, Store) and name in (*derived, found.maximum, *found.sums, found.result):
            _in_lanes(s, c, lanes)
        elif loop is not None and name == product.writes.name:  # tiles are in registers while the terms of a block are added
            if _register_tile(s, c, lanes, target, loop.var.name) is not None:
                with suppress(ScheduleError):  # in the last block of a row whose length is not known, sums stay where they are
                    s.promote(loop.var.name, c.leaf.buffer.name, f"{c.leaf.buffer.name}.tile")
                step = _unroll_steps(s, loop.var.name, c)
                for buffer in streamed if loop.var.name not in original else ():
                    _prefetch(s, buffer, blocks, step)
        elif loop is not None and row is not None and name in (found.maximum, *found.sums):  # partial results in lanes, then one of them
            width = next((n for n in (4 * lanes, 2 * lanes) if n <= MAX_LANES and extent_of(loop.extent) % n == 0), lanes)
            partial = s.rfactor(c.leaf.buffer.name, loop.var.name, width)
            s.compute_at(partial, row, "register")
            partial_loops(s, partial, loop.extent, width)
    for loops in shared:
        threads(s, [x for x in loops if x in s.loops], True, knobs)
    tested = {v for c in walk(s.kernel.body) if isinstance(c, If) for v in E.variables(c.cond)}
    for name in [x.var.name for x in walk(s.kernel.body) if isinstance(x, For) and x.kind == SERIAL and x.var in tested]:
        with suppress(ScheduleError):
            s.tighten(name)  # rows and keys behind the last ones are not computed
    unguard_lanes(s)


def _heights(extent: E.Dim, most: int, target: CpuTarget, lanes: int) -> tuple[list[int], int]:
    """(numbers of rows that a block may have, the one that takes the least time for all rows)."""
    most = min(MAX_ROWS, extent_of(extent), most)
    options = list(range(min(MIN_ROWS, most), most + 1))

    def cycles(height: int) -> float:
        tile = _tile(height, BLOCK_KEYS // lanes, target)
        whole, rest = divmod(extent, height) if isinstance(extent, int) else (1, 0)
        longer = (whole * height + (TAIL_SLOWDOWN * max(rest, MIN_ROWS) if rest else 0)) / (whole * height + rest)
        return longer * tile.cycles(target.core) / (tile.rows * tile.vectors) + RELOAD_CYCLES / height

    return options, min(options, key=lambda n: (round(cycles(n), 3), -n))


def _tile(rows: int, vectors: int, target: CpuTarget) -> Tile:
    """The register tile that does most for what it loads; tiles have no remainder."""
    among = [t for t in tiles(rows, vectors, target.vector_registers) if rows % t.rows == 0 and vectors % t.vectors == 0]
    return min(among, key=lambda t: t.cycles(target.core) / (t.rows * t.vectors))


def _register_tile(s: Schedule, c: Nest, lanes: int, target: CpuTarget, loop: str | None = None) -> tuple[str, str] | None:
    """Make a register tile of rows and vectors, in the reduction `loop`: the loops over panels of columns, and over tiles of rows in one.
    None where there is but a row or a column."""
    row, column = c.loop_along(-2), c.loop_along(-1)
    if row is None or column is None:
        return None
    tile = _tile(size(s, row), -(-size(s, column) // lanes), target)
    outer = [x.var.name for x in c.loops if x.var.name not in (row, column, loop)]
    panel, width = s.split(column, tile.vectors * lanes)
    vectors, lane = s.split(width, lanes)
    tiles_of_rows, inner = s.split(row, tile.rows)
    s.reorder(*outer, panel, tiles_of_rows, *([loop] if loop else []), inner, vectors, lane)
    unroll(s, [inner, vectors], lane)
    return panel, tiles_of_rows


def _scores(s: Schedule, c: Nest, lanes: int, target: CpuTarget) -> tuple[str, str] | None:
    """Scores: tiles of them are summed up in registers. Returns the loops over panels of columns and over steps of the sum, if they are."""
    around, read = _register_tile(s, c, lanes, target), {r.attr for r in E.reads(c.leaf.value)}
    sums = [n for n in write_nests(s.kernel.body) if isinstance(n.leaf, Accumulate) and n.leaf.buffer in read]
    if around is not None and len({n.leaf.buffer for n in sums}) == 1:
        name, loops = sums[0].leaf.buffer.name, [x.var.name for x in sums[0].reduction_loops]
        s.compute_at(name, around[1], "register")
        tile_loops(s, name, lanes, loops, True)
        if loops:
            return around[0], _unroll_steps(s, loops[-1], c)
    return None


def _in_lanes(s: Schedule, c: Nest, lanes: int) -> None:
    """Lanes along the last dimension, a few vectors of it unrolled."""
    if (column := c.loop_along(-1)) is None:
        return
    vectors, lane = s.split(column, lanes)
    s.vectorize(lane)
    count = extent(s, vectors)
    few = isinstance(count, int) and count <= UNROLLED_VECTORS
    if few or divides(UNROLLED_VECTORS, count):
        s.unroll(vectors if few else s.split(vectors, UNROLLED_VECTORS)[1])


def _unroll_steps(s: Schedule, loop: str, c: Nest) -> str:
    """Unroll several steps of a reduction, unless they stand under conditions: these are the last blocks, and long enough as they are.
    Returns the loop around them."""
    factor = next((n for n in UNROLL_FACTORS if divides(n, extent(s, loop))), 1)
    if factor == 1 or c.conditions:
        return loop
    outer, steps = s.split(loop, factor)
    s.unroll(steps)
    return outer


def _prefetch(s: Schedule, buffer: str, blocks: str, step: str) -> None:
    """While a block is computed, step by step, what the next one reads of a buffer arrives in the second-level cache. (Hardware prefetches
    what a phase of a block reads in order, but nothing while other phases compute.)"""
    with suppress(ScheduleError):  # there are too few steps to prefetch all of it
        s.prefetch(buffer, blocks, 1, step, PREFETCHED_LINES, level=2)
