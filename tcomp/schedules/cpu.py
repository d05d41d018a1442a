"""Default CPU schedules, chosen by the structure of the loops and a model of the machine; never by an operator's name.

A kernel is cut into groups: a nest that stores a result, with the reductions that only it reads.

    elementwise   no reduction               vector lanes along the contiguous axis, threads along the outer loops
    tiled         one reduction, read at     a tile of accumulators stays in registers over the whole fold; lanes along an
                  the element stored         output axis (matmul, convolution, depthwise, pooling, column sums)
    rows          reductions over the rest   everything about one row in one place; each fold runs in vector lanes
                  of a row                   (softmax, normalisation, row sums, dot products)

Reductions read by several groups are stored whole and scheduled as a group of their own.

Stages that read windows of each other come before all that: see `stencils`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr
from tcomp.ir.layout import Layout
from tcomp.ir.loops import For, Kernel
from tcomp.ir.simplify import linear, simplify
from tcomp.schedules import stencils
from tcomp.schedules.byte_products import add_up_groups, group_loop, grouped, multiplies_bytes, split_groups
from tcomp.schedules.groups import Group, attachments, schedule_each
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.polyhedral import polyhedral_or_not
from tcomp.schedules.primitives import edit
from tcomp.schedules.roles import (
    Nest,
    contiguous,
    extent_of,
    fold_axis,
    fold_nest,
    grouped_axis,
    imperative,
    is_product,
    nests,
    result_nest,
    row_axis,
    row_loops,
    stage_axes,
    stride,
)
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.shaping import MOST_LANES, divides, lanes_of, nest_loops, threads, vector_tail
from tcomp.schedules.tiles import MOST_ROWS, Tile, choose_tile, tiles
from tcomp.target import Target

SERIAL_ELEMENTS = 1 << 15  # below this many elements (or SERIAL_FOLDS accumulations) threads cost more than they save
SERIAL_FOLDS = 1 << 19
MOST_PIECES = 12  # a loop is cut into at most so many, for the sake of code size
MOST_CASES = 8  # of a loop that is unrolled because its iterations differ
MOST_ORDERED = 3  # folds whose order is a decision
REPEATED = (2, 4, 8)  # steps of a fold that may be unrolled, where they divide it


def schedule(kernel: Kernel, target: Target, knobs: Knobs | None = None) -> Schedule:
    """The schedule of a kernel as lowered: the default one, unless `knobs` decide otherwise.

    Where a step is refused (its independence cannot be proved, say), the group stays as it was before, and a note in the kernel says so.
    """
    knobs = knobs or Knobs()
    s = _prepared(kernel)
    if imperative(s.kernel):
        s = polyhedral_or_not(s, target, target.cores)
        s.clean()
        return s
    schedule_each(s, stencils.chains(s.kernel), lambda chain: stencils.schedule(s, chain, target, knobs), "is computed stage by stage")
    if multiplies_bytes(target):
        split_groups(s)
    schedule_each(s, _groups(s, target), lambda group: _schedule_group(s, group, target, knobs), "is left as lowered")
    s.clean()
    if multiplies_bytes(target):
        add_up_groups(s, target)
    return s


def _prepared(kernel: Kernel) -> Schedule:
    """The kernel with as few, but plain, dimensions as its accesses allow."""
    s = Schedule(kernel)
    s.collapse()
    if not imperative(s.kernel) and (found := grouped_axis(s.kernel)) is not None:
        _expand(s, *found)
    return s


def _expand(s: Schedule, loop: str, size: int) -> None:
    """Split an axis into groups of `size`, in all nests that walk it and in the buffers that they write."""
    extent = edit.find_loop(s.kernel, loop).extent
    todo, done = [loop], set[str]()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        v = edit.find_loop(s.kernel, name).var
        written = {n.writes for n in nests(s.kernel) if n.writes.shape}
        accesses = [a for n in nests(s.kernel) for a in ((n.writes, n.leaf.indices), *((r.attr, r.args) for r in n.reads))]
        places = {(b, d) for b, indices in accesses for d, i in enumerate(indices) if i is v and b in written and b.shape[d] == extent}
        todo += [i.attr.name for b, indices in accesses for d, i in enumerate(indices) if (b, d) in places and i.op == "var"]
        s.split(name, size)
        for b, d in sorted(places, key=lambda place: (place[0].name, -place[1])):
            s.expand(b.name, d, size)


# ---------------------------------------------------------------- grouping


def _groups(s: Schedule, target: Target, packable: frozenset[str] = frozenset()) -> list[Group]:
    """Attach each temporary to the one result that reads it, where the structure allows; detach it otherwise.

    `packable` names buffers whose layout may still be chosen (weights).
    """
    return [g for result, inside in attachments(s.kernel) for g in _formed(s, result, inside, target, packable)]


def _formed(s: Schedule, result: str, inside: tuple[str, ...], target: Target, packable: frozenset[str]) -> list[Group]:
    if any(n.is_fold for n in nests(s.kernel) if n.writes.name == result):
        local = f"{result}.acc"
        s.cache_write(result, local)
        inside = (*inside, local)
    shape = _shape(s, result, inside, target, packable)
    if shape is not None:
        return [Group(result, inside, shape)]
    groups = []
    for name in inside:  # the structure does not allow one nest for all: every stage is stored whole
        groups += _formed(s, name, (), target, packable)
    return [*groups, Group(result, (), "elementwise")]


def _shape(s: Schedule, result: str, inside: tuple[str, ...], target: Target, packable: frozenset[str]) -> str | None:
    if not inside:
        return "elementwise"
    out = result_nest(s.kernel, result)
    folds = [n for n in nests(s.kernel) if n.is_fold and n.writes.name in inside]
    if not folds:
        return None
    rows = row_loops(s.kernel, out, inside)
    if rows is None:
        return None
    everything = len(rows) == len(out.loops)
    if everything:
        if len(inside) > 1:
            return None
        return "tiled" if _lanes_along_output(folds[0], out, target, packable) else "rows"
    if out.loops and out.loops[-1].var in rows:
        return None  # the contiguous axis is outside: a row would be strided
    return "rows"


def _lanes_along_output(fold: Nest, out: Nest, target: Target, packable: frozenset[str]) -> bool:
    """Whether vector lanes should run along the contiguous axis of the result rather than along the fold."""
    if not out.loops or not fold.spatial:
        return False
    lane = fold.spatial[-1]
    width = lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
    wide = extent_of(lane.extent) * 2 >= width
    if not wide:
        return fold_axis(fold) is None
    fixed = [r for r in fold.reads if not (is_product(fold) and r.attr.name in packable)]
    if contiguous(fixed, lane.var):
        return True
    if is_product(fold) and _reuse(fold) >= 4:
        return True  # the operand is packed first
    along = fold_axis(fold)
    return along is None or extent_of(along.extent) < width


def _reuse(fold: Nest) -> int:
    """How often the operand that is contiguous in no output axis would be read again: the extent of the best row axis."""
    rows = row_axis(fold)
    return extent_of(rows.extent) if rows is not None else 1


# ---------------------------------------------------------------- the three shapes


def _schedule_group(s: Schedule, group: Group, target: Target, knobs: Knobs) -> None:
    if group.shape == "elementwise":
        _elementwise(s, group.result, target, knobs)
    elif group.shape == "tiled":
        _tiled(s, group.result, group.inside[0], target, knobs)
    else:
        _rows(s, group, target, knobs)


def _elementwise(s: Schedule, result: str, target: Target, knobs: Knobs) -> None:
    nest = result_nest(s.kernel, result)
    if not nest.loops:
        return
    loops = [x.var.attr.name for x in nest.loops]
    lanes = lanes_of(target, [nest.writes, *(r.attr for r in nest.reads)])
    work = prod(extent_of(x.extent) for x in nest.loops)
    others, cases = _cases(s, nest)
    if cases:
        _cases_inside(s, others, cases, lanes, work >= SERIAL_ELEMENTS, knobs)
        return
    pieces = _cut(s, nest)
    outer = [vector_tail(s, piece, edit.find_loop(s.kernel, piece).extent, lanes) for piece in pieces]
    threads(s, [*loops[:-1], *([outer[0]] if len(outer) == 1 and outer[0] else [])], work >= SERIAL_ELEMENTS, knobs)


def _cases(s: Schedule, nest: Nest) -> tuple[dict[str, Dim | None], list[str]]:
    """(other loops, loops over few cases): the value tells the cases apart by `select(i == 0, ..., select(i == 1, ...))`, where `i` is a
    loop or a loop modulo a constant; that one is split into rounds and cases. With each other loop comes the number of its rounds that
    are whole, None if all are."""
    periods: dict[Expr, int] = {}
    for e in E.walk(nest.leaf.value):
        if e.op == "eq" and e.args[1].op == "const":
            i = e.args[0]
            v, period = (i.args[0], i.args[1].attr) if i.op == "mod" and i.args[1].op == "const" else (i, 0)
            periods[v] = max(periods.get(v, 0), period)
    others: dict[str, Dim | None] = {}
    cases = []
    for x in nest.loops:
        name, period = x.var.attr.name, periods.get(x.var, MOST_CASES + 1) or x.extent
        if x is nest.loops[-1] or not isinstance(period, int) or period > MOST_CASES:
            others[name] = None
        elif period == x.extent:
            cases.append(name)
        else:
            rounds, case = s.split(name, period)
            others[rounds] = None if divides(period, x.extent) else as_dim(as_expr(x.extent) // period)
            cases.append(case)
    return others, cases


def _cases_inside(s: Schedule, others: Mapping[str, Dim | None], cases: Sequence[str], lanes: int, worthwhile: bool, knobs: Knobs) -> None:
    """All cases of a vector stand together, unrolled: they read the same elements and have most of their arithmetic in common."""
    *rest, last = others
    extent = edit.find_loop(s.kernel, last).extent
    lanes = min(lanes, 1 << (extent_of(extent) - 1).bit_length())
    outer, lane = s.split(last, lanes)
    around = [*rest, outer]
    s.reorder(*around, *cases, lane)
    for name in cases:
        s.unroll(name)
    s.vectorize(lane)
    whole = {**others, outer: None if divides(lanes, extent) else as_dim(as_expr(extent) // lanes)}
    to_thread = [around]
    for name in reversed(around):  # from the inside: a loop that is cut has names of its own behind the cut
        if (point := whole[name]) is not None:
            _, tail = s.partition(name, point)
            if name == around[0]:
                to_thread.append([tail, *(f"{x}.t" for x in around[1:])])
    for names in to_thread:
        threads(s, names, worthwhile, knobs)


def _cut(s: Schedule, nest: Nest) -> list[str]:
    """Partition the lane loop where conditions on it change (the seams of a concatenation, the edges of a padding)."""
    lane = nest.loops[-1]
    if not isinstance(lane.extent, int):
        return [lane.var.attr.name]
    points: set[int] = set()
    for e in E.walk(nest.leaf.value):
        if e.op in ("lt", "le") and set(E.variables(e)) == {lane.var}:
            gap = linear(simplify(e.args[1] - e.args[0]))  # 0 < gap, or 0 <= gap
            slope, offset = gap.get((lane.var,), 0), gap.get((), 0) + (e.op == "le")
            if slope and gap.keys() <= {(lane.var,), ()}:
                points.add(-offset // slope + 1 if slope > 0 else -(offset // slope))
    inner = sorted(p for p in points if 0 < p < lane.extent)
    if len(inner) > MOST_PIECES:
        return [lane.var.attr.name]
    pieces, start = [lane.var.attr.name], 0
    for p in inner:
        head, tail = s.partition(pieces.pop(), p - start)
        pieces += [head, tail]
        start = p
    return pieces


def _tiled(s: Schedule, result: str, acc: str, target: Target, knobs: Knobs) -> None:
    fold = fold_nest(s.kernel, acc)
    lanes = lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
    group = group_loop(fold)
    if group is None:
        _pack(s, acc, lanes, target, knobs)
    fold, out = fold_nest(s.kernel, acc), result_nest(s.kernel, result)
    positions = {x.var.attr.name: n for n, x in enumerate(fold.spatial)}
    row = row_axis(fold)
    row_loop = out.loops[positions[row.var.attr.name]] if row is not None else None
    columns = out.loops[-1]
    tile = tile_of(fold, target, knobs)
    work = prod(extent_of(x.extent) for x in fold.loops)
    column, inner = s.split(columns.var.attr.name, tile.vectors * lanes)
    vectors, lane = s.split(inner, lanes)
    shared = {out.loops[positions[name]].var for name in _batch(fold)}
    batch = [x.var.attr.name for x in out.loops[:-1] if x.var in shared]
    others = [x.var.attr.name for x in out.loops[:-1] if x is not row_loop and x.var not in shared]
    inside = [vectors]
    if row_loop is not None:
        row_outer, row_inner = s.split(row_loop.var.attr.name, tile.rows)
        others, inside = [*others, row_outer], [row_inner, vectors]
    around = [*batch, column, *others] if knobs.flag(f"{acc}.columns_outside", True) else [*batch, *others, column]
    s.reorder(*around, *inside, lane)
    s.compute_at(acc, around[-1], "register")
    for name in inside:
        s.unroll(name)
    s.vectorize(lane)
    suggested = tuple(x.var.attr.name for x in _fold_order(fold) if x is not group)
    orders = tuple(permutations(suggested)) if len(suggested) <= MOST_ORDERED else (suggested,)
    folds = knobs.choice(f"{acc}.folds", orders, suggested)
    _tile_loops(s, acc, lanes, folds, group is None)
    if folds and group is None:  # a fold over one element has no loop left
        _prefetch(s, fold, folds[-1], target, knobs)
        _repeat(s, acc, folds[-1], knobs)
    if row_loop is not None and not divides(tile.rows, row_loop.extent):
        s.partition(row_outer, as_dim(as_expr(row_loop.extent) // tile.rows))
    width = tile.vectors * lanes
    nests_to_thread = [around]
    if not divides(width, columns.extent):
        column, tail = s.partition(column, as_dim(as_expr(columns.extent) // width))
        if around[0] == column:  # else both parts are inside of the same loops
            nests_to_thread.append([tail, *(f"{name}.t" for name in others)])
    for names in nests_to_thread:
        threads(s, names, work >= SERIAL_FOLDS, knobs)


def _batch(fold: Nest) -> list[str]:
    """Output axes that index every operand: between their iterations nothing is shared, so that they come first."""
    if not is_product(fold):
        return []
    operands = [set(E.variables(*r.args)) for r in fold.reads]
    return [x.var.attr.name for x in fold.spatial[:-1] if all(x.var in used for used in operands)]


def _prefetch(s: Schedule, fold: Nest, loop: str, target: Target, knobs: Knobs) -> None:
    """Ask ahead for the operand that the lanes read, where it is not at home in the second-level cache: weights are read once a run."""
    lane, along = fold.spatial[-1].var, edit.find_loop(s.kernel, loop).var
    for r in fold.reads:
        if {lane, along} <= set(E.variables(*r.args)):
            size = prod(extent_of(n) for n in r.attr.shape) * itemsize(r.attr.dtype)
            distance = knobs.choice(f"{r.attr.name}.prefetch", (0, 2, 4, 8, 16, 32), 16 if size > target.l2 // 4 else 0)
            if distance:
                s.prefetch(r.attr.name, loop, distance)


def _repeat(s: Schedule, acc: str, loop: str, knobs: Knobs) -> None:
    """Several steps of the innermost fold stand in a row: more loads are under way at once, at the price of more code."""
    extent = edit.find_loop(s.kernel, loop).extent
    steps = knobs.choice(f"{acc}.unroll", [1, *(n for n in REPEATED if divides(n, extent))], 1)
    if steps > 1:
        s.unroll(s.split(loop, steps)[1])


def _tile_loops(s: Schedule, acc: str, lanes: int, folds: Sequence[str], update: bool) -> None:
    """Shape the nests that clear and update the accumulators: folds outside, the tile unrolled in vector registers.

    Without `update` the second one is put in order only (see `byte_products`)."""
    for is_fold in (False, True):
        if is_fold and not update:
            s.reorder(*folds, *stage_axes(s.kernel, acc, True), reassociate=True)
            continue
        spatial = stage_axes(s.kernel, acc, is_fold)
        vectors, lane = s.split(spatial[-1], lanes)
        s.reorder(*(folds if is_fold else []), *spatial[:-1], vectors, lane, reassociate=is_fold)
        for x in [*spatial[:-1], vectors]:
            s.unroll(x)
        s.vectorize(lane)


def _rows(s: Schedule, group: Group, target: Target, knobs: Knobs) -> None:
    out = result_nest(s.kernel, group.result)
    rows = row_loops(s.kernel, out, group.inside)
    assert rows is not None
    loops = [x.var.attr.name for x in out.loops]
    leading = [x.var.attr.name for x in out.loops if x.var in rows]
    rest = [n for n in loops if n not in leading]
    work = prod(extent_of(x.extent) for n in nests(s.kernel) if n.writes.name in group.inside for x in n.loops[-2:])
    partials: dict[str, tuple[str, str, Dim, int]] = {}
    for name in group.inside:
        fold = next((n for n in nests(s.kernel) if n.writes.name == name and n.is_fold), None)
        axis = fold_axis(fold) if fold is not None else None
        if fold is not None and axis is not None:
            width = lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
            wide = min(width * 4, MOST_LANES) if extent_of(axis.extent) >= width * 4 else width
            lanes = knobs.choice(f"{name}.lanes", tuple(width << n for n in range(4) if width << n <= MOST_LANES), wide)
            partial = s.rfactor(name, axis.var.attr.name, lanes)
            partials[name] = (partial, axis.var.attr.name, axis.extent, lanes)
    if not leading:
        _whole(s, group, partials, target, knobs)
        return
    if rest:
        s.reorder(*leading, *rest)
    home = leading[-1]
    for name in reversed(group.inside):
        is_fold = any(n.is_fold for n in nests(s.kernel) if n.writes.name == name)
        s.compute_at(name, home, "register" if is_fold else "global")
        if name in partials:
            s.compute_at(partials[name][0], home, "register")
    for name in group.inside:
        if name in partials:
            _partial_loops(s, name, *partials[name])
        elif not stage_axes(s.kernel, name, True):
            lane = stage_axes(s.kernel, name, False)[-1]
            vector_tail(s, lane, edit.find_loop(s.kernel, lane).extent, lanes_of(target, [edit.find_buffer(s.kernel, name)]))
    if rest:
        nest = edit.find_loop(s.kernel, rest[-1])
        vector_tail(s, rest[-1], nest.extent, lanes_of(target, [out.writes, *(r.attr for r in out.reads)]))
    threads(s, leading, work * prod(extent_of(edit.find_loop(s.kernel, x).extent) for x in leading) >= SERIAL_ELEMENTS * 4, knobs)


def _whole(s: Schedule, group: Group, partials: dict[str, tuple[str, str, Dim, int]], target: Target, knobs: Knobs) -> None:
    """One row is the whole result: stages stay where they are, each in vector lanes."""
    for name in group.inside:
        if name in partials:
            partial = partials[name]
            s.set_scope(name, "register")
            s.set_scope(partial[0], "register")
            _partial_loops(s, name, *partial)
    _elementwise(s, group.result, target, knobs)


def _partial_loops(s: Schedule, name: str, partial: str, fold: str, extent: Dim, lanes: int) -> None:
    """Vector lanes for the three nests that an rfactor leaves: clear, accumulate, and fold the lanes."""
    s.vectorize(f"{partial}.init.lane")
    others = [x for x in nest_loops(s.kernel, f"{partial}.lane")]
    lane = f"{partial}.lane"
    s.reorder(*[x for x in others if x != lane], lane)
    s.vectorize(lane)
    s.vectorize(f"{name}.lane", reassociate=True)
    if not divides(lanes, extent):
        s.partition(f"{fold}.o", as_dim(as_expr(extent) // lanes))


# ---------------------------------------------------------------- parts


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

    return sorted(fold.folds, key=place)


def _pack(s: Schedule, acc: str, lanes: int, target: Target, knobs: Knobs) -> None:
    """Copy an operand of a contraction into panels when the lanes would walk it with a stride, or far apart."""
    fold = fold_nest(s.kernel, acc)
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
        if not knobs.flag(f"{r.attr.name}.pack", (step != 1 or _far_apart(r, fold, lane, target)) and reuse >= 8):
            continue
        tile = tile_of(fold, target, knobs)
        name = f"{r.attr.name}.packed"
        s.cache_read(r.attr.name, None, name)
        order = [dims[0], *(d for d in range(len(r.args)) if d != dims[0])]
        s.relayout(name, Layout.blocked(order, dims[0], tile.vectors * lanes))
        _packing_loops(s, name, dims[0], tile.vectors * lanes, lanes, knobs)


def _far_apart(r: Expr, fold: Nest, lane: For, target: Target) -> bool:
    """Whether successive rows of lanes lie on different pages while the operand exceeds the first-level cache."""
    size = prod(extent_of(n) for n in r.attr.shape) * itemsize(r.attr.dtype)
    steps = [abs(stride(r, x.var) or 0) for x in fold.folds]
    return size > 2 * target.l1 and max(steps, default=0) * itemsize(r.attr.dtype) >= 1024


def _packing_loops(s: Schedule, name: str, dim: int, panel: int, lanes: int, knobs: Knobs) -> None:
    loop = f"{name}.{dim}"
    rest = [x for x in nest_loops(s.kernel, f"{name}.0") if x != loop]
    extent = edit.find_loop(s.kernel, loop).extent
    outer, inner = s.split(loop, panel)
    vectors, lane = s.split(inner, lanes)
    s.reorder(outer, *rest, vectors, lane)
    s.unroll(vectors)
    s.vectorize(lane)
    nests_to_thread = [[outer, *rest]]
    if not divides(panel, extent):
        outer, tail = s.partition(outer, as_dim(as_expr(extent) // panel))
        nests_to_thread.append([tail, *(f"{x}.t" for x in rest)])
    for names in nests_to_thread:
        threads(s, names, True, knobs)


# ---------------------------------------------------------------- the register tile


def tile_of(fold: Nest, target: Target, knobs: Knobs) -> Tile:
    """The register tile for a fold: rows along the axis that reuses the vector operand, vectors along the lanes."""
    row = row_axis(fold)
    lanes = lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
    columns, rows = extent_of(fold.spatial[-1].extent), 1 if row is None else extent_of(row.extent)
    most = 1 if row is None else _rows_in_cache(fold, row)
    suggested = choose_tile(rows, columns, lanes, target.vector_registers, most)
    options = [(t.rows, t.vectors) for t in tiles(min(rows, MOST_ROWS), -(-columns // lanes), target.vector_registers)]
    return Tile(*knobs.choice(f"{fold.writes.name}.tile", options, (suggested.rows, suggested.vectors)))


def _rows_in_cache(fold: Nest, row: For) -> int:
    """How many rows may be walked side by side before their cache lines evict each other.

    Rows that lie a multiple of 4096 bytes apart fall into one set of a first-level cache of 64 sets, which has 8 ways or more.
    """
    steps = [abs(stride(r, row.var) or 0) * itemsize(r.attr.dtype) for r in fold.reads]
    step = max(steps, default=0)
    return 6 if step and step % 4096 == 0 else 12 if step and step % 2048 == 0 else MOST_ROWS


# ---------------------------------------------------------------- weights


def operand_layouts(kernel: Kernel, constants: frozenset[int], target: Target, knobs: Knobs | None = None) -> dict[int, Layout]:
    """The packed layouts that the default schedule of an unscheduled kernel wants for constant parameters.

    A contraction reads its vector operand in panels as wide as the register tile, one panel after the other, in the order of the
    folds: [column / width][folds...][column % width].
    """
    knobs = knobs or Knobs()
    s = _prepared(kernel)
    if imperative(s.kernel):
        return {}
    wishes: dict[int, Layout] = {}
    names = {b.name: n for n, b in enumerate(kernel.buffers)}
    packable = frozenset(kernel.buffers[n].name for n in constants)
    original = {n.writes.name: n for n in nests(kernel) if n.is_fold}
    for group in _groups(s, target, packable):
        if group.shape != "tiled":
            continue
        fold = fold_nest(s.kernel, group.inside[0])
        width = tile_of(fold, target, knobs).vectors * lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
        columns = fold.spatial[-1].extent
        source = original.get(fold.writes.name.removesuffix(".acc")) or original.get(fold.writes.name)
        if source is None or not is_product(source):
            continue
        for r in source.reads:
            number = names.get(r.attr.name, -1)  # temporaries are no parameters
            if number in constants and (order := _panel_order(source, r)) is not None:
                whole = isinstance(columns, int) and columns != source.spatial[-1].extent and columns % width  # a group is not cut
                panels = Layout.blocked(order[0], order[1], extent_of(columns) if whole else width)
                wishes[number] = grouped(panels, source) if multiplies_bytes(target) else panels
    return wishes


def _panel_order(fold: Nest, r: Expr) -> tuple[list[int], int] | None:
    """(dimensions of the operand from slowest to fastest, the one that the lanes run along); None if lanes do not index it alone."""
    lane = fold.spatial[-1].var
    along = [d for d, i in enumerate(r.args) if lane in E.variables(i)]
    if len(along) != 1 or r.args[along[0]] is not lane:
        return None
    others = [o for o in fold.reads if o is not r]

    def place(d: int) -> int:
        steps = [abs(stride(o, v) or 0) for o in others for v in E.variables(r.args[d])]
        return -max(steps, default=1 << 40)

    shared = set(_batch(fold))
    batch = [d for d, i in enumerate(r.args) if i.op == "var" and i.attr.name in shared]
    rest = sorted((d for d in range(len(r.args)) if d != along[0] and d not in batch), key=place)
    return [*batch, along[0], *rest], along[0]
