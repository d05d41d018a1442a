"""Default CPU schedule of one reduction that is read at the element stored (matmul, convolution, pooling, column sums): a tile of
accumulators stays in registers over the whole fold; lanes run along an output axis."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from itertools import permutations
from math import prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import Expr, as_dim, as_expr
from tcomp.ir.layout import Layout
from tcomp.ir.loops import VECTORIZED, Accumulate, For, If, walk
from tcomp.schedules.analysis.access_patterns import (
    Nest,
    batch_axes,
    bytes_of,
    extent_of,
    is_product,
    is_sum,
    reduction_nest,
    result_nest,
    row_axis,
    stage_axes,
)
from tcomp.schedules.cost.register_tiles import MAX_TILE_ROWS, Tile, choose_tile, outer_row_counts, tiles
from tcomp.schedules.cpu import transposes
from tcomp.schedules.cpu.int8_dot_products import group_loop, summed_bytes
from tcomp.schedules.cpu.lanes_and_threads import divides, lanes_of, split_tiles, threads
from tcomp.schedules.cpu.panel_blocking import SUMMED, accumulate_in_blocks, ask_for_next, is_far, panels, walked_by_lanes
from tcomp.schedules.cpu.prefetching import STREAMED, is_streamed, size_of
from tcomp.schedules.cpu.work_partition import columns_inside, parts, worthwhile
from tcomp.schedules.handles import BufferCopy
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MOST_ORDERED = 3  # folds whose order is a decision
REPEATED = (2, 4, 8)  # steps of a fold that may be unrolled, where they divide it
PANEL = 0.6  # of a cache, for the panel of an operand that is to stay there
NEAR, BEYOND = 0.5, 8.0  # cycles to load a vector from the second-level cache, and from beyond
AHEAD, MAYBE = 2, 8  # what takes more than one part in so many of the second-level cache is asked for ahead, may be
FEWER = 24  # so many fewer elements that are no products are summed up one after the other than products
PACKED = 6  # rows from which on an operand that lies across the lanes is copied; fewer are dot products (measured for 4 and 7 heads that share keys)
PACKED_APART = 8  # ... from which on one is whose rows of lanes lie on pages far apart
WINDOW = 64  # steps of two folds that may be unrolled
WINDOW_CODE = 512  # multiply-adds of a tile that are unrolled by default, where they have operands in common


def schedule(s: Schedule, result: str, acc: str, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a result and the reduction that is read where it is stored, by register tiles."""
    fold = reduction_nest(s.kernel, acc)
    lanes = lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
    group = group_loop(fold)
    if group is None:
        pack(s, acc, lanes, target, knobs)
    fold, out = reduction_nest(s.kernel, acc), result_nest(s.kernel, result)
    positions = {x.var.attr.name: n for n, x in enumerate(fold.spatial)}
    columns = out.loops[-1]
    tile = tile_of(fold, target, knobs)
    lines, rows = (None if x is None else out.loops[positions[x.var.attr.name]].var.attr.name for x in _tile_axes(fold))
    shared = {out.loops[positions[name]].var for name in batch_axes(fold)}
    batch = [x.var.attr.name for x in out.loops[:-1] if x.var in shared]
    others = [x.var.attr.name for x in out.loops[:-1] if x.var not in shared]
    part = None
    if (divided := parts(fold, target, knobs)) is not None:
        whole = out.loops[positions[divided[0].var.attr.name]].var.attr.name
        part, inner = s.split(whole, divided[1])
        others[others.index(whole)] = inner
        lines, rows = (inner if x == whole else x for x in (lines, rows))
    cut = [(x, n) for x, n in ((lines, tile.outer_rows), (rows, tile.rows)) if x is not None and (x is rows or n > 1)]
    others = [x for x in others if x not in dict(cut)]
    (*tiles_of_rows, column), inside, cuts = split_tiles(s, [*cut, (columns.var.attr.name, tile.vectors * lanes)])
    others += tiles_of_rows
    vectors, lane = s.split(inside.pop(), lanes)
    inside.append(vectors)
    overlapping = _overlapping(fold, _tile_axes(fold))
    # Columns are outside of the rows that use their vectors again; but a column of an image has a line of the cache here and there.
    near = _uses_again(fold) and (not overlapping or _largest(fold) <= target.l2) and editing.find_loop(s.kernel, column).extent != 1
    near = near and not columns_inside(fold, target, knobs)
    around = [*batch, column, *others] if knobs.flag(f"{acc}.columns_outside", near) else [*batch, *others, column]
    around = around if part is None else [part, *around]
    s.reorder(*around, *inside, lane)
    for name in inside:
        s.unroll(name)
    s.vectorize(lane)
    suggested = tuple(x.var.attr.name for x in _fold_order(fold) if x is not group)
    orders = tuple(permutations(suggested)) if len(suggested) <= MOST_ORDERED else (suggested,)
    folds = knobs.choice(f"{acc}.folds", orders, suggested)
    p = None
    if folds and group is None and around[-1] is not column:
        p = panels(s, fold, folds, tile.vectors * lanes, column, others, target)
        p = p if p is not None and knobs.flag(f"{p.operand}.panels", True) else None
    if p is not None and p.in_blocks:
        axes = [(x.var.attr.name, n) for x, n in zip(_tile_axes(fold), (tile.outer_rows, tile.rows), strict=True) if x is not None]
        accumulate_in_blocks(s, acc, axes, lanes, column, p)
    else:
        blocks = _blocks(s, fold, folds, 1 if p is None else p.steps) if group is None else None
        s.compute_at(acc, around[-1], "register" if blocks is None else "global")
        tile_loops(s, acc, lanes, folds, group is None)
        walked = folds[-1] if folds else ""
        if blocks is not None:
            _, block = s.split(folds[blocks[0]], blocks[1])
            s.promote(block, acc, f"{acc}.tile", anew=True)
            folds = (*folds[: blocks[0]], block, *folds[blocks[0] + 1 :])
        if p is not None:
            ask_for_next(s, p, column, folds[-1])
        elif folds and group is None:  # a fold over one element has no loop left
            if is_product(fold) and not overlapping:
                tiles = next((x for x in reversed(around) if editing.find_loop(s.kernel, x).extent != 1), around[-1])
                _ask_for_next_tile(s, fold, out, tiles, folds, target, knobs)
            _prefetch(s, fold, walked, folds[-1], target, knobs)
            _repeat(s, acc, folds, WINDOW_CODE // prod(astuple(tile)) if overlapping else 1, knobs)
            if overlapping and around[-1] is column and len(around) > 1:
                _ask_for_next_rows(s, fold, out, around[-2], column, target, knobs)
    nests_to_thread = [around if part is None else [part]]
    for name in reversed(around):  # from the inside: a loop that is cut has names of its own behind the cut
        if name in cuts:
            _, tail = s.partition(name, cuts[name])
            if name == around[0]:
                nests_to_thread.append([tail, *(tail.copies[x] for x in around[1:])])
    _unguard(s)
    for names in nests_to_thread:
        threads(s, names, worthwhile(fold), knobs)


def _unguard(s: Schedule) -> None:
    """The last tile of a row sums up whole vectors, if that does no harm."""
    guarded = [x for x in walk(s.kernel.body) if isinstance(x, For) and x.kind == VECTORIZED and isinstance(x.body, If)]
    for x in guarded:
        if isinstance(x.body, If) and isinstance(x.body.then, Accumulate):
            with suppress(ScheduleError):
                s.unguard(x.var.attr.name)


def tile_loops(s: Schedule, acc: str, lanes: int, folds: Sequence[str], update: bool) -> None:
    """Shape the nests that clear and update the accumulators: folds outside, the tile unrolled in vector registers.

    Without `update` the second one is put in order only (see `byte_products`)."""
    for is_reduction in (False, True):
        if is_reduction and not update:
            s.reorder(*folds, *stage_axes(s.kernel, acc, True), reassociate=True)
            continue
        spatial = stage_axes(s.kernel, acc, is_reduction)
        vectors, lane = s.split(spatial[-1], lanes)
        s.reorder(*(folds if is_reduction else []), *spatial[:-1], vectors, lane, reassociate=is_reduction)
        for x in [*spatial[:-1], vectors]:
            s.unroll(x)
        s.vectorize(lane)


def _blocks(s: Schedule, fold: Nest, folds: Sequence[str], steps: int) -> tuple[int, int] | None:
    """For a long sum (which of the folds to cut, at what length): what is inside of the cut is summed up in a row. The rounding errors of one
    long sum grow with its length. Blocks of the last fold are a multiple of `steps` long. None for a short one, or where nothing fits."""
    extents = [extent_of(editing.find_loop(s.kernel, x).extent) for x in folds]
    known = all(isinstance(x.extent, int) for x in fold.reduction_loops)
    if not is_float(fold.writes.dtype) or not is_sum(fold) or not known:
        return None
    longest = SUMMED if is_product(fold) else SUMMED // FEWER
    n, inside = len(folds), 1
    while n and inside * extents[n - 1] <= longest:
        n, inside = n - 1, inside * extents[n - 1]
    unit = steps if n == len(folds) else 1
    lengths = [k for k in range(unit, extents[n - 1], unit) if extents[n - 1] % k == 0 and max(2, longest // 8) <= k * inside <= longest] if n else []
    return (n - 1, lengths[-1]) if lengths else None


def _fold_order(fold: Nest) -> list[For]:
    """Folds in the order in which the vector operand lies in memory, its slowest first."""
    lane = fold.spatial[-1].var
    reads = [r for r in fold.reads if stride(r, lane) == 1] or fold.reads
    reads = sorted(reads, key=lambda r: -len(E.variables(*r.args)))

    def place(x: For) -> int:
        if not reads:
            return 0
        step = stride(reads[0], x.var)
        return -(1 << 40) if step is None else -abs(step)

    return sorted(fold.reduction_loops, key=place)


def _prefetch(s: Schedule, fold: Nest, walked: str, loop: str, target: CpuTarget, knobs: Knobs) -> None:
    """Ask ahead for the operand that the lanes read, where it comes from far away: in `loop`, which walks a block of the fold `walked`, or
    all of it."""
    row, along = row_axis(fold), next(x.var for x in fold.reduction_loops if x.var.attr.name == walked)
    lanes = lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
    for r in walked_by_lanes(fold, walked):
        once = row is None or row.var not in E.variables(*r.args)
        apart = stride(r, along) is None or abs(stride(r, along) or 0) >= lanes  # else the next step is there already
        distance = knobs.choice(f"{r.attr.name}.prefetch", (0, 2, 4, 8, 16, 32), 16 if once and apart and is_far(r, target) else 0)
        if distance:
            s.prefetch(r.attr.name, loop, distance)


def _ask_for_next_tile(s: Schedule, fold: Nest, out: Nest, loop: str, folds: Sequence[str], target: CpuTarget, knobs: Knobs) -> None:
    """While a tile is summed up, ask for what the next one stores and adds there, and for its rows, where these come from afar. (Not
    where vectors are loaded once for several steps: LLVM takes it that what is asked for may change.)"""
    walked = editing.find_loop(s.kernel, loop)
    steps, lane = [editing.find_loop(s.kernel, x).extent for x in folds], out.loops[-1].var
    if not all(isinstance(n, int) for n in steps) or walked.extent == 1:
        return
    ends = [r.attr for r in out.reads if lane in E.variables(*r.args) and r.attr is not fold.writes]
    rows = {r.attr: _touched(r, fold) for r in fold.reads if fold.spatial[-1].var not in E.variables(*r.args)}
    if not is_streamed(s, out.writes, target, knobs):  # such stores would have to put out of the caches what was asked for
        ends.append(out.writes)
    for buffer, size in {**rows, **{b: bytes_of(b) for b in ends}}.items():
        known = all(isinstance(n, int) for n in buffer.shape)  # else it may be near
        if known and size > target.l2 // MAYBE and knobs.flag(f"{buffer.name}.ahead", size > target.l2 // AHEAD):
            with suppress(ScheduleError):  # the next tile has it too, or there are too few steps to ask for all of it
                s.prefetch(buffer.name, loop, 1, folds[-1])


def _ask_for_next_rows(s: Schedule, fold: Nest, out: Nest, loop: str, column: str, target: CpuTarget, knobs: Knobs) -> None:
    """While the tiles of some rows are summed up, from column to column, ask for the next rows, and for what is stored there, where that
    comes from memory. (Within a tile there is no loop to ask in: windows are unrolled.)"""
    for buffer in dict.fromkeys([*(r.attr for r in fold.reads), out.writes]):
        size = size_of(buffer)
        stored = buffer is out.writes and is_streamed(s, buffer, target, knobs)
        if size > target.l2 and not stored and knobs.flag(f"{buffer.name}.ahead", size > STREAMED * target.l2):
            with suppress(ScheduleError):  # they are the same for the next rows
                s.prefetch(buffer.name, loop, 1, column)


def _touched(r: Expr, fold: Nest) -> int:
    """Bytes of a buffer that a fold reads, at most: a window with a stride may leave out most of it."""
    used = E.variables(*r.args)
    return min(bytes_of(r.attr), prod(extent_of(x.extent) for x in fold.loops if x.var in used) * itemsize(r.attr.dtype))


def _repeat(s: Schedule, acc: str, folds: Sequence[str], code: int, knobs: Knobs) -> None:
    """Several steps of the innermost fold stand in a row: more loads are under way at once, at the price of more code. Or all steps of
    the window that the inner two folds walk, by default as long as these are no more than `code`."""
    extents = [editing.find_loop(s.kernel, x).extent for x in folds]
    window = [n for n in extents[-2:] if isinstance(n, int)]
    if len(window) == 2 and prod(window) <= WINDOW and knobs.flag(f"{acc}.window", prod(window) <= code):
        for name in folds[-2:]:
            s.unroll(name)
        return
    extent, loop = extents[-1], folds[-1]
    options = sorted(
        {1, *(n for n in REPEATED if divides(n, extent)), *(n for n in (extent,) if isinstance(n, int) and n <= max(REPEATED))}
    )
    steps = knobs.choice(f"{acc}.unroll", options, extent if isinstance(extent, int) and extent <= min(code, max(REPEATED)) else 1)
    if steps > 1:
        s.unroll(s.split(loop, steps)[1])


def _largest(fold: Nest) -> int:
    """Bytes of the largest operand."""
    return max(bytes_of(r.attr) for r in fold.reads)


def _uses_again(fold: Nest) -> bool:
    """Whether all rows of a tile have the vectors of an operand in common."""
    row, lane = row_axis(fold), fold.spatial[-1].var
    return row is not None and any(lane in used and row.var not in used for used in (set(E.variables(*r.args)) for r in fold.reads))


def _overlapping(fold: Nest, axes: Sequence[For | None]) -> bool:
    """Whether neighbouring rows of a tile read the same vectors at different steps of the fold."""
    rows, lane = {x.var for x in axes if x is not None}, fold.spatial[-1].var
    folds = {x.var for x in fold.reduction_loops}
    vectors = [r for r in fold.reads if lane in E.variables(*r.args)]
    return any(rows & (used := set(E.variables(i))) and folds & used for r in vectors for i in r.args)


def pack(s: Schedule, acc: str, lanes: int, target: CpuTarget, knobs: Knobs, width: int | None = None) -> None:
    """Copy an operand of a contraction into panels when the lanes would walk it with a stride, or far apart; they are as wide as the register
    tile unless `width` says otherwise."""
    fold = reduction_nest(s.kernel, acc)
    lane = fold.spatial[-1]
    if not is_product(fold):
        return
    row = row_axis(fold)
    if row is None:
        return
    reuse = extent_of(row.extent)
    for r in fold.reads:
        step = stride(r, lane.var)
        if row.var in E.variables(*r.args):
            continue
        dims = [d for d, i in enumerate(r.args) if lane.var in E.variables(i)]
        if step in (0, None) or len(dims) != 1 or r.args[dims[0]] is not lane.var:
            continue
        pays = reuse >= PACKED if step != 1 else reuse >= PACKED_APART and _far_apart(r, fold, lane, target)
        if not knobs.flag(f"{r.attr.name}.pack", pays):
            continue
        panel = width or tile_of(fold, target, knobs).vectors * lanes
        packed = s.cache_read(r.attr.name, None, f"{r.attr.name}.packed")
        order = [dims[0], *(d for d in range(len(r.args)) if d != dims[0])]
        s.relayout(packed, Layout.blocked(order, dims[0], panel))
        _packing_loops(s, packed, dims[0], panel, lanes, target, knobs)


def _far_apart(r: Expr, fold: Nest, lane: For, target: CpuTarget) -> bool:
    """Whether successive rows of lanes lie on different pages while the operand exceeds the first-level cache."""
    size = bytes_of(r.attr)
    steps = [abs(stride(r, x.var) or 0) for x in fold.reduction_loops]
    return size > 2 * target.l1 and max(steps, default=0) * itemsize(r.attr.dtype) >= 1024


def _packing_loops(s: Schedule, packed: BufferCopy, dim: int, panel: int, lanes: int, target: CpuTarget, knobs: Knobs) -> None:
    """Whole lines of the packed operand are written, vector by vector; what lies along another axis is turned."""
    loop = packed.loads[dim]
    rest = [x for x in packed.loads if x != loop]
    extent = editing.find_loop(s.kernel, loop).extent
    s.reorder(*rest, loop)
    nest = result_nest(s.kernel, packed)
    if (across := transposes.turned(nest, target)) is not None and panel % across.lanes == 0:
        transposes.schedule(s, nest, replace(across, vectors=panel // across.lanes), True, knobs)
        return
    outer, inner = s.split(loop, panel)
    vectors, lane = s.split(inner, lanes)
    s.reorder(outer, *rest, vectors, lane)
    s.unroll(vectors)
    s.vectorize(lane)
    nests_to_thread = [[outer, *rest]]
    if not divides(panel, extent):
        outer, tail = s.partition(outer, as_dim(as_expr(extent) // panel))
        nests_to_thread.append([tail, *(tail.copies[x] for x in rest)])
    for names in nests_to_thread:
        threads(s, names, True, knobs)


def tile_of(fold: Nest, target: CpuTarget, knobs: Knobs) -> Tile:
    """The register tile for a fold: rows along the axes that reuse the vector operand, vectors along the lanes."""
    line, row = _tile_axes(fold)
    lanes = lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
    part = parts(fold, target, knobs)
    rows, lines = (1 if x is None else extent_of(x.extent) if part is None or part[0] is not x else part[1] for x in (row, line))
    columns = extent_of(fold.spatial[-1].extent)
    whole, deeper = (part[1] if part is not None and part[0] is x else 0 for x in (row, line))  # what tiles divide
    registers, apart = target.vector_registers, MAX_TILE_ROWS if row is None else _rows_in_cache(fold, row, target)

    def suggested(among: Sequence[int]) -> Tile:
        if _overlapping(fold, (line, row)):  # vectors are loaded once for a window: these need registers as well
            return choose_tile(rows, lanes, lanes, registers // 4 + 2, multiple=whole)
        loading = partial(_loading, fold, lanes=lanes, target=target)
        return choose_tile(rows, columns, lanes, target.tile_registers, apart, lines, among, loading, whole)

    depth = [n for n in outer_row_counts(lines) if deeper % n == 0]
    best = suggested(depth)
    deep = 1 if line is None else knobs.choice(f"{fold.writes.name}.lines", depth, best.outer_rows)
    best = best if deep == best.outer_rows else suggested((deep,))
    options = [(t.rows, t.vectors) for t in tiles(min(rows, MAX_TILE_ROWS), -(-columns // lanes), registers, deep) if whole % t.rows == 0]
    return Tile(*knobs.choice(f"{fold.writes.name}.tile", options, (best.rows, best.vectors)), deep)


def _tile_axes(fold: Nest) -> tuple[For | None, For | None]:
    """(lines, rows) of a register tile. Tiles of bytes have no lines: instructions for them take rows along one axis."""
    row = row_axis(fold)
    rest = replace(fold, loops=tuple(x for x in fold.loops if x is not row))
    line = None if row is None or summed_bytes(fold) is not None else row_axis(rest)
    return line if line is not None and isinstance(line.extent, int) else None, row


def _loading(fold: Nest, vectors: int, lanes: int, target: CpuTarget) -> tuple[float, float]:
    """Cycles for a step's vectors of the operand that the lanes walk, which all rows of tiles read anew: (at least, beside the rest)."""
    panel = prod(extent_of(x.extent) for x in fold.reduction_loops) * vectors * lanes * itemsize(fold.writes.dtype)
    if panel > target.l2 * PANEL:
        return vectors * BEYOND, 0.0
    return 0.0, vectors * NEAR if panel > target.l1 * PANEL else 0.0


def _rows_in_cache(fold: Nest, row: For, target: CpuTarget) -> int:
    """How many rows may be walked side by side before their cache lines evict each other.

    Rows that lie a multiple of 4096 bytes apart fall into one set of a first-level cache of 64 sets; a quarter is left to other data.
    """
    steps = [abs(stride(r, row.var) or 0) * itemsize(r.attr.dtype) for r in fold.reads]
    step, ways = max(steps, default=0), target.l1 // 4096
    return ways * 3 // 4 if step and step % 4096 == 0 else ways * 3 // 2 if step and step % 2048 == 0 else MAX_TILE_ROWS


def panel_order(fold: Nest, r: Expr) -> tuple[list[int], int] | None:
    """(dimensions of the operand from slowest to fastest, the one that the lanes run along); None if lanes do not index it alone."""
    lane = fold.spatial[-1].var
    along = [d for d, i in enumerate(r.args) if lane in E.variables(i)]
    if len(along) != 1 or r.args[along[0]] is not lane:
        return None
    others = [o for o in fold.reads if o is not r]

    def place(d: int) -> int:
        steps = [abs(stride(o, v) or 0) for o in others for v in E.variables(r.args[d])]
        return -max(steps, default=1 << 40)

    shared = set(batch_axes(fold))
    batch = [d for d, i in enumerate(r.args) if i.op == "var" and i.attr.name in shared]
    rest = sorted((d for d in range(len(r.args)) if d != along[0] and d not in batch), key=place)
    return [*batch, along[0], *rest], along[0]
