"""Default CPU schedule of one reduction that is read at the element stored (matmul, convolution, pooling, column sums): a tile of
accumulators stays in registers over the whole reduction; lanes run along an output axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from itertools import permutations
from math import gcd, prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.layout import Layout, Piece
from tcomp.ir.linear import known_factor
from tcomp.ir.loops import SERIAL, UNROLLED, VECTORIZED, Accumulate, Buffer, For, If, walk
from tcomp.schedules.analysis import access_patterns as patterns
from tcomp.schedules.analysis.access_patterns import Nest, bytes_of, extent_of, is_product, reduction_nest, result_nest, row_axis
from tcomp.schedules.cost.register_tiles import MAX_TILE_ROWS, Tile, choose_tile, least_rows, outer_row_counts, tiles
from tcomp.schedules.cpu import common, elementwise, panel_blocking, tile_products, work_partition
from tcomp.schedules.cpu.common import divides, extent, nest_lanes, threads, whole_tiles
from tcomp.schedules.cpu.dot_products import group_loop, summed
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.memory_latency import MAX_TOGETHER
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

MAX_ORDERED = 3  # reduction loops whose order is a decision: six orders
UNROLL_FACTORS = (2, 4, 8)  # steps of a reduction that may be unrolled, where they divide it
PANEL_SHARE = 0.6  # of a cache, for the panel of an operand that is to stay there: the rest is for the other operand and the result
PREFETCHED_SHARE = 1 / 2  # of the second-level cache: what takes more is prefetched for the next tile by default; it may be evicted before,
PREFETCHABLE_SHARE = 1 / 8  # what takes more than this, if the tuner says so
PREFETCH_INSTRUCTIONS = 16  # for the addresses of an operand's next cache lines, in each iteration that prefetches some
PRODUCT_LATENCIES = 24  # how many times fewer elements that are not products are summed up one after the other than products
MIN_PACKED_ROWS = 6  # rows that share a strided operand, which is copied first; with fewer, dot products (measured for 4 and 7)
MIN_PACKED_PAGE_ROWS = 8  # the same for one that is not strided, but whose rows of lanes lie on different pages
LARGE_STRIDE = 1024  # bytes from one row of lanes to the next, from where on few of them share a page and hardware does not prefetch them
OPERAND_WAYS = 3 / 4  # of the ways of a set of the first-level cache, for rows of a tile: the others are left to other data
MAX_WINDOW_STEPS = 64  # steps of the inner two reduction loops that may be unrolled: bounds the length of the code
MAX_WINDOW_FMAS = 512  # multiply-adds of a tile that are unrolled by default, where rows share vectors: they stay in the instruction cache
WINDOW_LINES = 64  # of the caches, which a tile of windows prefetches at most: windows of five with a stride of two ask for about as many
ROW_SHARE = 1 / 4  # of the second-level cache, for the next row of tiles, which waits there while one is computed
WINDOW_REGISTERS = 3  # registers, besides a quarter, for the accumulators of a window whose vectors are loaded once: these take the others


def schedule(s: Schedule, result: str, acc: str, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a result and the reduction that is read where it is stored, by register tiles."""
    lanes = nest_lanes(target, reduction_nest(s.kernel, acc))
    if (group := group_loop(reduction_nest(s.kernel, acc), target)) is None:
        pack(s, acc, lanes, target, knobs)
    nest, out = reduction_nest(s.kernel, acc), result_nest(s.kernel, result)
    loop_of = {x.var.name: out.loops[n].var.name for n, x in enumerate(nest.spatial)}  # loop of the reduction -> that of the result
    tile, tile_axes = tile_of(nest, target, knobs), _tile_axes(nest, target)
    in_tiles = group is not None and tile_products.multiplies_tiles(nest, target)
    outer_rows, rows = (None if x is None else loop_of[x.var.name] for x in tile_axes)
    repeated = patterns.repetitions(nest)
    batch_axes = {loop_of[name] for name in (*patterns.batch_axes(nest), *(x.var.name for x in repeated))}
    *others, columns = (x.var.name for x in out.loops)
    batch = [x for x in others if x in batch_axes]
    others = [x for x in others if x not in batch_axes]
    part, of_part, rest = None, "", 0
    if (parts := work_partition.row_parts(nest, target, knobs)) is not None:
        whole = loop_of[parts[0].var.name]
        part, of_part = s.split(whole, parts[1])
        rest = extent_of(parts[0].extent) % parts[1]
        others[others.index(whole)] = of_part
        outer_rows, rows = (of_part if x == whole else x for x in (outer_rows, rows))
    cut = {x: n for x, n in ((outer_rows, tile.outer_rows), (rows, tile.rows)) if x is not None and (x is rows or n > 1)}
    inside, cuts = common.split_tiles(s, [*cut.items(), (columns, tile.vectors * lanes)])
    *tiles_of_rows, column = cuts
    others = [*(x for x in others if x not in cut), *tiles_of_rows]
    vectors, lane = s.split(inside.pop(), lanes)
    inside.append(vectors)
    overlapping = _overlapping(nest, tile_axes)
    # Columns are outside of the rows that reuse their vectors; but a column of an image is scattered over cache lines.
    cached = not overlapping or max(bytes_of(r.attr, repeated) for r in nest.reads) <= target.l2
    row, lane_axis = row_axis(nest), nest.spatial[-1].var
    used = [E.variables(*r.args) for r in nest.reads]
    reused = row is not None and any(lane_axis in variables and row.var not in variables for variables in used)  # by all rows of a tile
    outside = reused and cached and extent(s, column) != 1 and not work_partition.columns_inside(nest, target, knobs)
    around = [*batch, column, *others] if knobs.flag((acc, "columns_outside"), outside) else [*batch, *others, column]
    around = around if part is None else [*batch, part, *around[len(batch) :]]
    s.reorder(*around, *inside, lane)
    unroll(s, inside[-1:] if in_tiles else inside, lane)
    suggested = tuple(x.var.name for x in _memory_order(nest) if group is None or x is not group.loop)
    orders = tuple(permutations(suggested)) if len(suggested) <= MAX_ORDERED else (suggested,)
    loops = knobs.choice((acc, "folds"), orders, suggested)
    in_panels = loops and group is None and around[-1] is not column
    p = panel_blocking.panels(s, nest, loops, tile.vectors * lanes, column, others, target) if in_panels else None
    p = p if p is not None and knobs.flag((p.operand, "panels"), True) else None
    next_tile = ""  # the loop whose next iteration is prefetched
    if p is not None and p.in_blocks:
        if part is not None:  # sums wait for all rows of a part, and for no more: a tile that hangs over its edge is cut before
            in_panel = around[around.index(column) + 1 :]
            common.partition_tails(s, in_panel, cuts)
            s.clean()
            cuts = {x: n for x, n in cuts.items() if x not in in_panel}
        axes = [(x.var.name, n) for x, n in zip(tile_axes, (tile.outer_rows, tile.rows), strict=True) if x is not None]
        panel_blocking.accumulate_in_blocks(s, acc, axes, lanes, column, p)
    else:
        block = _summation_block(s, nest, loops, 1 if p is None else p.steps) if group is None else None
        s.compute_at(acc, around[-1], "register" if block is None and not in_tiles else "global")
        tile_loops(s, acc, lanes, loops, group is None, in_tiles)
        walked = loops[-1] if loops else ""
        if block is not None:
            _, inner = s.split(loops[block[0]], block[1])
            s.promote(inner, acc, f"{acc}.tile", anew=True)
            loops = (*loops[: block[0]], inner, *loops[block[0] + 1 :])
        if p is not None:  # a part of the next panel at a time
            outer, steps = s.split(loops[-1], p.steps)
            s.prefetch(p.operand, column, 1, outer)
            s.unroll(steps)
        elif loops and group is None:  # a reduction of one element has no loop left
            _prefetch_vectors(s, nest, walked, loops[-1], target, knobs)
            window = min(MAX_WINDOW_FMAS // prod(astuple(tile)), target.core.unrolled_steps**2) if overlapping else 1
            loops = _unroll_steps(s, acc, loops, window, knobs)
            next_tile = next((x for x in reversed(around) if extent(s, x) != 1), around[-1]) if is_product(nest) and not overlapping else ""
            if overlapping and around[-1] is column and len(around) > 1:
                # From column to column, tiles prefetch the next row of tiles and its results, where these come from memory; where the
                # second-level cache does not hold a row until it is read, the next tiles of the same row.
                sizes = {b: common.size_of(b) for b in (*(r.attr for r in nest.reads), out.writes)}
                if sizes[out.writes] > target.l2 and common.is_streamed(s, out.writes, target, knobs):
                    del sizes[out.writes]
                row_bytes = max(sizes.values(), default=0) / prod(common.size(s, x) for x in around[:-2])
                ahead = around[-3] if len(around) > 2 and row_bytes <= target.l2 * ROW_SHARE else around[-2]
                _prefetch_next(s, sizes, ahead, [column], target.l2, common.stream_bytes(target), knobs, WINDOW_LINES, 2)
    if rest:
        tiles = dict(zip(cut, cuts, strict=False)).get(of_part, of_part)
        _smaller_part(s, around[len(batch) :], cuts, tiles, cut.get(of_part, 1), rest)
    shared = common.partition_tails(s, around, cuts)
    if next_tile:  # the last tile, which has a nest of its own now, needs no next one
        _prefetch_next_tile(s, nest, out, next_tile, loops, tile, target, knobs)
    common.unguard_lanes(s)
    for name in _tested_steps(s):
        s.set_kind(name, SERIAL)
    for names in shared if part is None else [[*batch, part]]:
        threads(s, names, work_partition.pays(nest), knobs)


def _smaller_part(s: Schedule, around: Sequence[str], cuts: Mapping[str, E.Dim | None], rows: str, tile: int, rest: int) -> None:
    """The last part of the rows, which has only the `rest` of them, becomes a nest of its own: `rows` walks the tiles of a part."""
    _, tail = s.partition(around[0], common.size(s, around[0]) - 1)
    _, behind = s.partition(tail.copies[rows], rest // tile)
    if rest % tile:
        s.partition(behind, 1)
    columns = {tail.copies[x]: n for x, n in cuts.items() if x != rows}
    common.partition_tails(s, [tail.copies[x] for x in around[1:]], columns)


def _tested_steps(s: Schedule) -> list[str]:
    """Unrolled steps of a reduction that accumulate under conditions on symbolic dims: those of the last tile of rows, of which it is not
    known how many it has. Each step tests every row, so that unrolled ones are long, and no faster."""
    symbolic, found = set(s.kernel.scalars), list[str]()
    for x in walk(s.kernel.body):
        if isinstance(x, For) and x.kind == UNROLLED:
            tested = [y for y in walk(x.body) if isinstance(y, If) and isinstance(y.then, Accumulate)]
            sums = [y.then for y in tested if not symbolic.isdisjoint(E.variables(y.cond))]
            if sums and all(isinstance(y, Accumulate) and x.var not in E.variables(*y.indices) for y in sums):
                found.append(x.var.name)
    return found


def tile_loops(s: Schedule, acc: str, lanes: int, loops: Sequence[str], update: bool, in_memory: bool = False) -> None:
    """Shape the nests that clear and update the accumulators: reduction loops outside, the tile unrolled in vector registers. Without
    `update` the second one is put in order only (see `dot_products`). Of rows `in_memory` the vectors are unrolled alone."""
    for is_reduction in (False, True):
        spatial = patterns.stage_axes(s.kernel, acc, is_reduction)
        if is_reduction and not update:
            s.reorder(*loops, *spatial, reassociate=True)
            continue
        vectors, lane = s.split(spatial[-1], lanes)
        s.reorder(*(loops if is_reduction else []), *spatial[:-1], vectors, lane, reassociate=is_reduction)
        unroll(s, [vectors] if in_memory else [*spatial[:-1], vectors], lane)


def _summation_block(s: Schedule, nest: Nest, loops: Sequence[str], steps: int) -> tuple[int, int] | None:
    """For a long sum, whose rounding errors grow with its length: (which of the loops to cut, at what length; of the last one a multiple of
    `steps`). What is inside of the cut is summed up one after the other. None for a short sum, or where nothing fits."""
    if not is_float(nest.writes.dtype) or not patterns.is_sum(nest) or not all(isinstance(x.extent, int) for x in nest.reduction_loops):
        return None
    extents = [common.size(s, x) for x in loops]
    longest = panel_blocking.MAX_SUMMED if is_product(nest) else panel_blocking.MAX_SUMMED // PRODUCT_LATENCIES
    n, inside = len(loops), 1
    while n and inside * extents[n - 1] <= longest:
        n, inside = n - 1, inside * extents[n - 1]
    if not n:
        return None
    unit, whole = steps if n == len(loops) else 1, extents[n - 1]
    lengths = [k for k in range(unit, whole, unit) if whole % k == 0 and max(2, longest // 8) <= k * inside <= longest]
    return (n - 1, lengths[-1]) if lengths else None


def _memory_order(nest: Nest) -> list[For]:
    """Reduction loops in the order in which the vector operand lies in memory, its slowest first."""
    lane = nest.spatial[-1].var
    reads = [r for r in nest.reads if stride(r, lane) == 1] or nest.reads
    operand = max(reads, key=lambda r: len(E.variables(*r.args)), default=None)

    def place(x: For) -> int:
        step = stride(operand, x.var) if operand is not None else 0
        return -(1 << 40) if step is None else -abs(step)

    return sorted(nest.reduction_loops, key=lambda x: (x.var in _row_windows(nest), place(x)))


def _row_windows(nest: Nest) -> set[E.Expr]:
    """Where lanes pick what they read from vectors: the reduction loops that move along with the rows of a tile. In the innermost loop, the
    rows find there what has just been picked for their neighbours."""
    lane, row = nest.spatial[-1].var, row_axis(nest)
    picked = [i for r in nest.reads if row is not None and stride(r, lane) is None for i in r.args if row.var in E.variables(i)]
    return {x.var for x in nest.reduction_loops if any(x.var in E.variables(i) for i in picked)}


def _prefetch_vectors(s: Schedule, nest: Nest, walked: str, loop: str, target: CpuTarget, knobs: Knobs) -> None:
    """Prefetch the operand that the lanes read, where it exceeds the second-level cache: in `loop`, in a block of the loop `walked`."""
    row, lanes, along = row_axis(nest), nest_lanes(target, nest), next(x.var for x in nest.reduction_loops if x.var.name == walked)
    for r in panel_blocking.walked_by_lanes(nest, walked):
        if E.reads(*r.args):  # where the next one lies depends on data
            continue
        once = row is None or row.var not in E.variables(*r.args)
        step = stride(r, along)
        new_line = step is None or abs(step) >= lanes  # else the next step is in the cache already
        suggested = 16 if once and new_line and panel_blocking.exceeds_cache(r, target) else 0
        if distance := knobs.choice((r.attr.name, "prefetch"), (0, 2, 4, 8, 16, 32), suggested):
            s.prefetch(r.attr.name, loop, distance)


def _prefetch_next_tile(
    s: Schedule, nest: Nest, out: Nest, loop: str, loops: Sequence[str], tile: Tile, target: CpuTarget, knobs: Knobs
) -> None:
    """While a tile is summed up, prefetch what the next one stores and adds there, and its rows, where caches do not hold these, and the
    multiply-adds leave time for the addresses. (Not where vectors are loaded once for several steps: LLVM takes it that what is prefetched
    may change.)"""
    if not all(isinstance(extent(s, x), int) for x in loops) or extent(s, loop) == 1:
        return
    sizes: dict[Buffer, float] = {}
    for r in nest.reads:  # a window with a stride may leave out most of an operand
        if nest.spatial[-1].var not in (used := E.variables(*r.args)):
            touched = prod(common.most(x.extent) for x in nest.loops if x.var in used) * itemsize(r.attr.dtype)
            sizes[r.attr] = min(common.most_of(r.attr), touched)
    sizes |= {r.attr: common.most_of(r.attr) for r in out.reads if out.loops[-1].var in E.variables(*r.args) and r.attr is not nest.writes}
    if not common.is_streamed(s, out.writes, target, knobs):  # such stores would have to evict what was prefetched
        sizes[out.writes] = common.most_of(out.writes)
    least, usual = target.l2 * PREFETCHABLE_SHARE, target.l2 * PREFETCHED_SHARE
    needed = PREFETCH_INSTRUCTIONS * sum(size > usual for size in sizes.values())
    places = [x for x in loops if _spare_instructions(s, x, tile, target) >= needed]
    if places:
        _prefetch_next(s, sizes, loop, places, least, usual, knobs)


def _spare_instructions(s: Schedule, loop: str, tile: Tile, target: CpuTarget) -> float:
    """How many instructions a core can issue beside those of an iteration of a reduction loop, in the time of its multiply-adds."""
    x, rows = editing.find_loop(s.kernel, loop), tile.outer_rows * tile.rows
    update = next(y for y in walk(x.body) if isinstance(y, Accumulate))
    around = editing.enclosing(s.kernel, update)
    inside = [y for y in around[around.index(x) + 1 :] if y.kind != VECTORIZED]
    fmas, loads = prod(extent_of(y.extent) for y in inside), (rows + tile.vectors) / (rows * tile.vectors)
    return fmas * (target.core.issue / target.core.fma - 1 - loads)


def _prefetch_next(
    s: Schedule,
    sizes: Mapping[Buffer, float],
    loop: str,
    places: Sequence[str],
    least: float,
    usual: float,
    knobs: Knobs,
    lines: int = MAX_TOGETHER,
    level: int = 1,
) -> None:
    """Prefetch what the next iteration of `loop` touches of buffers of more than `usual` bytes (tuner: `least`), in the outermost of the
    loops `places` that has enough iterations for so many `lines` of the caches in each: further inside, the same lines would be prefetched
    several times."""
    for buffer, size in sizes.items():
        if size > least and knobs.flag((buffer.name, "ahead"), size > usual):
            for at in places:
                with suppress(ScheduleError):  # the next iteration has it too, or there are too few steps to prefetch all of it
                    s.prefetch(buffer.name, loop, 1, at, lines, level)
                    break


def _unroll_steps(s: Schedule, acc: str, loops: tuple[str, ...], steps: int, knobs: Knobs) -> tuple[str, ...]:
    """Unroll several steps of the innermost reduction loop: more loads are under way at once, at the price of more code. Or all steps of
    the window that the inner two loops walk, by default as long as these are no more than `steps`. Returns the loops that are left."""
    extents = [extent(s, x) for x in loops]
    window = [n for n in extents[-2:] if isinstance(n, int)]
    if len(window) == 2 and prod(window) <= MAX_WINDOW_STEPS and knobs.flag((acc, "window"), prod(window) <= steps):
        unroll(s, loops[-2:])
        return loops[:-2]
    whole = [extents[-1]] if isinstance(extents[-1], int) and extents[-1] <= max(UNROLL_FACTORS) else []
    options = sorted({1, *(n for n in UNROLL_FACTORS if divides(n, extents[-1])), *whole})
    factor = knobs.choice((acc, "unroll"), options, next((n for n in whole if n <= steps), 1))
    if factor == 1:
        return loops
    outer, inner = s.split(loops[-1], factor)
    s.unroll(inner)
    return *loops[:-1], outer


def _overlapping(nest: Nest, axes: Sequence[For | None]) -> bool:
    """Whether neighbouring rows of a tile read the same vectors at different steps of the reduction."""
    rows, lane, reduced = {x.var for x in axes if x is not None}, nest.spatial[-1].var, {x.var for x in nest.reduction_loops}
    vectors = [r for r in nest.reads if lane in E.variables(*r.args)]
    return any(rows & (used := set(E.variables(i))) and reduced & used for r in vectors for i in r.args)


def pack(s: Schedule, acc: str, lanes: int, target: CpuTarget, knobs: Knobs) -> None:
    """Copy the operands of a contraction that `strided_operands` names into panels, as wide as the register tile."""
    nest = reduction_nest(s.kernel, acc)
    for buffer, dim in strided_operands(s, nest, target, knobs):
        pack_panels(s, buffer, dim, tile_of(nest, target, knobs).vectors * lanes, lanes, target, knobs)


def strided_operands(s: Schedule, nest: Nest, target: CpuTarget, knobs: Knobs) -> list[tuple[str, int]]:
    """(operand, the dimension that lanes run along) where the lanes of a product would walk an operand with a stride, or its rows lie on
    different pages, and enough rows share it."""
    lane, row = nest.spatial[-1], row_axis(nest)
    if not is_product(nest) or row is None:
        return []
    rows, found = extent_of(row.extent), list[tuple[str, int]]()
    for r in nest.reads:
        step = stride(r, lane.var)
        dims = [d for d, i in enumerate(r.args) if lane.var in E.variables(i)]
        computed = r.attr.name in s.stages  # by this kernel
        if computed or row.var in E.variables(*r.args) or step in (0, None) or len(dims) != 1 or r.args[dims[0]] is not lane.var:
            continue
        # Large: successive rows of lanes lie on different pages, and the operand exceeds the first-level cache.
        row_stride = min((abs(n) for x in nest.reduction_loops if (n := stride(r, x.var))), default=0) * itemsize(r.attr.dtype)
        large = bytes_of(r.attr) > 2 * target.l1 and row_stride >= LARGE_STRIDE
        pays = rows >= MIN_PACKED_ROWS if step != 1 else rows >= MIN_PACKED_PAGE_ROWS and large
        if knobs.flag((r.attr.name, "pack"), pays):
            found.append((r.attr.name, dims[0]))
    return found


def pack_panels(
    s: Schedule, buffer: str, dim: int, panel: int, lanes: int, target: CpuTarget, knobs: Knobs, whole: int = 1, loop: str | None = None
) -> None:
    """Copy a buffer, or what an iteration of `loop` reads of it, into panels of `panel` elements of dimension `dim`. Where their
    number is not known, memory is allocated for a multiple of `whole` elements: masked loads from unmapped addresses are slow."""
    packed = s.cache_read(buffer, loop, f"{buffer}.packed")
    order = [dim, *(d for d in range(len(packed.loads)) if d != dim)]
    column = packed.loads[dim]
    rest, columns = [x for x in packed.loads if x != column], extent(s, column)
    s.relayout(packed, Layout.blocked(order, dim, panel))
    # Whole lines of the copy are written, vector by vector; what lies along another axis is transposed in registers.
    s.reorder(*rest, column)
    filling = next(n for n in patterns.write_nests(s.kernel.body) if n.writes.name == packed)
    if (transposed := elementwise.transpose_tiles(filling, target, free=True)) is not None and panel % transposed.lanes == 0:
        elementwise.transpose(s, filling, replace(transposed, vectors=panel // transposed.lanes), loop is None, knobs)
    else:
        outer, inner = s.split(column, panel)
        vectors, vector = s.split(inner, lanes)
        s.reorder(outer, *rest, vectors, vector)
        unroll(s, [vectors], vector)
        threads(s, [outer, *rest], loop is None, knobs, {outer: whole_tiles(columns, panel)})
    if not isinstance(columns, int) and whole > panel and whole % panel == 0:
        inside = tuple(Piece(d) for d in range(1, len(order) + 1))
        s.relayout(packed, Layout(len(order) + 1, (Piece(0, whole // panel), Piece(0, 1, whole // panel), *inside)))


def tile_of(nest: Nest, target: CpuTarget, knobs: Knobs, packable: Collection[str] = ()) -> Tile:
    """The register tile for a reduction: rows along the axes that reuse the vector operand, vectors along the lanes. `packable` operands
    may be laid out in groups."""
    outer, row = _tile_axes(nest, target)
    lanes, columns = nest_lanes(target, nest), extent_of(nest.spatial[-1].extent)
    part = work_partition.row_parts(nest, target, knobs)
    rows, outer_rows = (1 if x is None else extent_of(x.extent) if part is None or part[0] is not x else part[1] for x in (row, outer))
    of_part, outer_multiple = (part[1] if part is not None and part[0] is x else 0 for x in (row, outer))
    equal = part is not None and isinstance(part[0].extent, int) and part[0].extent % part[1] == 0
    products = summed(nest, target)
    # What tiles divide. Each of equal parts may have a tail, whose rows are tested, as those of instructions cannot be.
    multiple = 0 if equal and products is None else of_part
    free = 0  # how many rows there are at least, where their number is not known
    if row is not None and not isinstance(row.extent, int):  # for example, the rows of several images: whole tiles only
        known, exact = known_factor(row.extent), row.extent.op == "var" and row.extent.attr.exact
        multiple = known if any(known % n == 0 for n in work_partition.TILE_ROWS) else 0
        free = 0 if multiple or exact else least_rows(row.extent)
    # Rows whose distance is a multiple of `Core.l1_span` share one set of the first-level cache, of half of it two: more evict each other.
    step = 0 if row is None else max((abs(stride(r, row.var) or 0) * itemsize(r.attr.dtype) for r in nest.reads), default=0)
    in_sets = int(target.l1 // gcd(step, target.core.l1_span) * OPERAND_WAYS)
    registers, cached_rows = target.vector_registers, min(MAX_TILE_ROWS, in_sets) if step else MAX_TILE_ROWS
    panel = _panel_vectors(nest, lanes)
    groups = products is not None and (group_loop(nest, target) is not None or products.columns.attr.name in packable)
    if groups and tile_products.multiplies_tiles(nest, target):
        blocks = [(t.rows, t.vectors) for t in tile_products.blocks_of_tiles(nest, target, rows, multiple, panel, columns)]
        return Tile(*knobs.choice((nest.writes.name, "tile"), blocks, blocks[0]))

    def loading(vectors: int) -> tuple[float, float]:
        """Cycles for a step's vectors of the operand that the lanes walk, which all rows of tiles read again: (at least, on top of the
        rest)."""
        panel = patterns.iterations(nest.reduction_loops) * vectors * lanes * itemsize(nest.writes.dtype)
        if panel > target.l2 * PANEL_SHARE:
            return vectors * target.core.memory_vector_load, 0.0
        return 0.0, vectors * target.core.l2_vector_load if panel > target.l1 * PANEL_SHARE else 0.0

    held = target.tile_registers - (products is not None and products.kind.apart)

    def suggested(outer_options: Sequence[int]) -> Tile:
        if _overlapping(nest, (outer, row)):  # vectors are loaded once for a window: these need registers as well
            held_for_windows = registers // 4 + WINDOW_REGISTERS
            return choose_tile(rows, lanes, lanes, held_for_windows, target.core, multiple=multiple, part=of_part)
        return choose_tile(
            rows, columns, lanes, held, target.core, cached_rows, outer_rows, outer_options, loading, multiple, of_part, panel, free
        )

    counts = [n for n in outer_row_counts(outer_rows) if outer_multiple % n == 0]
    best = suggested(counts)
    count = 1 if outer is None else knobs.choice((nest.writes.name, "lines"), counts, best.outer_rows)
    best = best if count == best.outer_rows else suggested((count,))
    possible = tiles(min(rows, MAX_TILE_ROWS), -(-columns // lanes), registers, count, panel=panel)
    options = [(t.rows, t.vectors) for t in possible if multiple % t.rows == 0]
    return Tile(*knobs.choice((nest.writes.name, "tile"), options, (best.rows, best.vectors)), count)


def _panel_vectors(nest: Nest, lanes: int) -> int:
    """The width, in vectors, of the packed panels of the operand that the lanes walk; 0 if it is not packed."""
    lane = nest.spatial[-1].var
    inside = {e.args[1].attr for r in nest.reads for i in r.args for e in E.walk(i) if e.op == "mod" and e.args[0] is lane}
    widths = {n // lanes for n in inside if isinstance(n, int) and n % lanes == 0}
    return min(widths, default=0)


def _tile_axes(nest: Nest, target: CpuTarget) -> tuple[For | None, For | None]:
    """(outer rows, rows) of a register tile. Tiles of groups have no outer rows: instructions for them take rows along one axis."""
    row = row_axis(nest)
    rest = replace(nest, loops=tuple(x for x in nest.loops if x is not row))
    outer = None if row is None or summed(nest, target) is not None else row_axis(rest)
    return outer if outer is not None and isinstance(outer.extent, int) else None, row


def panel_order(nest: Nest, r: E.Expr) -> tuple[list[int], int] | None:
    """(dimensions of the operand from slowest to fastest, the one that the lanes run along); None if lanes do not index it alone."""
    lane = nest.spatial[-1].var
    along = [d for d, i in enumerate(r.args) if lane in E.variables(i)]
    if len(along) != 1 or r.args[along[0]] is not lane:
        return None
    others = [o for o in nest.reads if o is not r]

    def place(d: int) -> int:
        return -max((abs(stride(o, v) or 0) for o in others for v in E.variables(r.args[d])), default=1 << 40)

    batch_axes = set(patterns.batch_axes(nest))
    batch = [d for d, i in enumerate(r.args) if i.op == "var" and i.name in batch_axes]
    rest = sorted((d for d in range(len(r.args)) if d != along[0] and d not in batch), key=place)
    return [*batch, along[0], *rest], along[0]
