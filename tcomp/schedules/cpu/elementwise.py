"""Default CPU schedule of results without a reduction: vector lanes along the contiguous axis, threads along the outer loops. Transposes
and changes of layout would gather elements with a large stride: instead a tile of `rows` x `lanes` elements is read along its rows into
registers, transposed there by shuffles (the code generator's work), and written in whole lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tcomp.ir import expr as E
from tcomp.ir.access import affine, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import For
from tcomp.ir.simplify import simplify
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, iterations, nest_of, result_nest
from tcomp.schedules.cost.roofline import division
from tcomp.schedules.cpu import common
from tcomp.schedules.cpu.common import divides, extent, nest_lanes, threads, whole_tiles
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

MAX_CUTS = 64  # of a loop where conditions on it change: bounds the length of the code
MAX_QUOTIENTS = 2  # changes of one at which a loop is cut: of an index that is mirrored at both ends
MAX_CASES = 11  # of a loop that is unrolled because its iterations differ: the points of Winograd's largest transform along an axis
MAX_TILE_LANES = 16  # lanes of a transposed tile, which takes as many registers: half of what machines with wide vectors have
MIN_WRITTEN = 128  # bytes written next to each other, where the extent allows: two lines of the cache, which hardware fetches as a pair
MAX_VECTORS = 4  # of a transposed tile, next to each other: bounds the length of the code


def schedule(s: Schedule, result: str, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a result without a reduction."""
    nest = result_nest(s.kernel, result)
    if not nest.loops:
        return
    lanes, pays = nest_lanes(target, nest), iterations(nest.loops) >= common.MIN_PARALLEL_ELEMENTS
    if (tiles := transpose_tiles(nest, target)) is not None:
        transpose(s, nest, tiles, pays, knobs)
        return
    others, cases = _split_cases(s, nest)
    if cases:  # all of a vector stand together, unrolled: they read the same elements and have most of their arithmetic in common
        whole = extent(s, last := list(others)[-1])
        del others[last]
        lanes = min(lanes, 1 << (extent_of(whole) - 1).bit_length())
        outer, lane = s.split(last, lanes)
        others[outer] = whole_tiles(whole, lanes)
        s.reorder(*others, *cases, lane)
        unroll(s, cases, lane)
        threads(s, list(others), pays, knobs, others)
        return
    outer_loops = [common.vector_tail(s, piece, lanes) for piece in _cut_where_it_changes(s, nest.loops[-1].var.name, lanes)]
    loops = [x.var.name for x in nest.loops[:-1]]
    if len(outer_loops) == 1 and (vectors := outer_loops[0]):
        shared, page, count = vectors, common.vectors_of_page(target), extent(s, vectors)
        large = any(common.size_of(r.attr) > target.l2 for r in nest.reads)
        if large and isinstance(count, int) and count >= 2 * page:  # operands that come from memory are prefetched by a page
            if not loops:  # threads share pages then
                shared, vectors, *_ = s.split(vectors, page, "guard" if divides(page, count) else "peel")
            common.prefetch_vectors(s, vectors, page, set(), target, knobs)
        loops.append(shared)
    threads(s, loops, pays, knobs)


def _split_cases(s: Schedule, nest: Nest) -> tuple[dict[str, E.Dim | None], list[str]]:
    """(other loops, with the number of their whole rounds, None for all; loops over few cases, told apart by `select(i == 0, ...,
    select(i == 1, ...))`): `i` is a loop, a loop modulo a constant or its quotient by one; these are split, into rounds and cases."""
    periods, quotients = dict[E.Expr, int](), dict[E.Expr, int]()
    for e in E.walk(nest.leaf.value):
        if e.op == "eq" and e.args[1].op == "const":
            v, by = division(e.args[0]) or (e.args[0], 0)
            found = quotients if e.args[0].op == "floordiv" else periods
            found[v] = max(found.get(v, 0), by)
    others, cases = dict[str, E.Dim | None](), list[str]()
    for x in nest.loops:
        name, period, piece = x.var.name, periods.get(x.var, MAX_CASES + 1) or x.extent, quotients.get(x.var, 0)
        if piece and isinstance(x.extent, int) and x.extent % piece == 0 and x.extent // piece <= MAX_CASES:
            case, inside = s.split(name, piece)
            others[inside] = None
            cases.append(case)
        elif x is nest.loops[-1] or not isinstance(period, int) or period > MAX_CASES:
            others[name] = None
        elif period == x.extent:
            cases.append(name)
        else:
            rounds, case = s.split(name, period)
            others[rounds] = whole_tiles(x.extent, period)
            cases.append(case)
    return others, cases


def _cut_where_it_changes(s: Schedule, loop: str, lanes: int) -> list[str]:
    """Partition the lane loop where what is computed changes: the seams of a concatenation, the edges of a padding, of one that mirrors or
    repeats as well. In each part conditions are known, and lanes read neighbours. Returns the parts."""
    x = editing.find_loop(s.kernel, loop)
    nest, whole = nest_of(x), extent_of(x.extent)
    points = {p for e in E.walk(nest.leaf.value) for p in _changes(e, x.var, whole, lanes)} if nest and x.extent == whole else set[int]()
    inner, pieces, start = sorted(p for p in points if 0 < p < whole), [loop], 0
    if not inner or len(inner) > MAX_CUTS:
        return pieces
    for p in inner:
        pieces += s.partition(pieces.pop(), p - start)
        start = p
    return [part for piece in pieces for part in _cut_where_it_changes(s, piece, lanes)]  # conditions on remainders are plain there


def _changes(e: E.Expr, lane: E.Expr, whole: int, lanes: int) -> Iterable[int]:
    """The values of a variable from which on a comparison, the smaller or larger index, or a quotient is another, as long as these are few;
    where quotients of whole vectors are the same, these do not count."""
    if e.op in ("lt", "le", "min", "max", "mod", "floordiv") and e.args[0].dtype == E.INDEX and set(E.variables(e)) == {lane}:
        by = int(e.args[1].attr) if e.op in ("mod", "floordiv") and e.args[1].op == "const" else 0
        form = affine(e.args[0] if by else simplify(e.args[1] - e.args[0]))  # 0 < gap, or 0 <= gap
        if form is None or not form.terms or (e.op in ("mod", "floordiv") and not by):
            return ()
        slope, offset = form.terms[lane], form.constant
        if not by:
            offset += e.op == "le"
            return (-offset // slope + 1 if slope > 0 else -(offset // slope),)
        first, last = sorted((offset // by, (offset + slope * (whole - 1)) // by))
        if slope == 1 and last - first <= MAX_QUOTIENTS and (by % lanes or offset % lanes):
            return [q * by - offset for q in range(first + 1, last + 1)]
    return ()


@dataclass(frozen=True, slots=True)
class TransposeTiles:
    """The loop along which the operands lie, the operands, and the tile: `vectors` x `lanes` rows of `lanes` elements."""

    across: For
    operands: tuple[E.Expr, ...]
    lanes: int
    vectors: int


def transpose_tiles(nest: Nest, target: CpuTarget, free: bool = False) -> TransposeTiles | None:
    """The tiles to transpose in registers, if all operands that lanes would gather are contiguous along one other loop. With `free`, the
    extent of the lane loop need not be known."""
    lane, lanes = nest.loops[-1], min(MAX_TILE_LANES, nest_lanes(target, nest))
    strided = tuple(r for r in nest.reads if stride(r, lane.var) not in (0, 1))
    along = [x for x in nest.loops[:-1] if strided and all(stride(r, x.var) == 1 for r in strided)]
    plain = all(affine(i) is not None for r in strided for i in r.args) and all(e.op != "select" for e in E.walk(nest.leaf.value))
    read_twice = any(sum(r.attr is other.attr for other in nest.reads) > 1 for r in strided)
    if (
        not along
        or lanes < 2
        or not plain
        or read_twice
        or not all((isinstance(x.extent, int) or (free and x is lane)) and extent_of(x.extent) >= lanes for x in (lane, along[-1]))
    ):
        return None
    tiles = extent_of(lane.extent) // lanes
    wanted = max(1, min(tiles, MAX_VECTORS, MIN_WRITTEN // (lanes * itemsize(nest.writes.dtype))))
    return TransposeTiles(along[-1], strided, lanes, next((n for n in range(wanted, MAX_VECTORS + 1) if tiles % n == 0), 1))


def transpose(s: Schedule, nest: Nest, tiles: TransposeTiles, pays: bool, knobs: Knobs) -> None:
    """Schedule a result that reads an operand across its rows, on threads if that `pays`."""
    lane, across, side, height = nest.loops[-1], tiles.across, tiles.lanes, tiles.lanes * tiles.vectors
    others = [x.var.name for x in nest.loops[:-1] if x is not across]
    tall, inner = s.split(lane.var.name, height)
    vector, lanes = s.split(inner, side)
    wide, row = s.split(across.var.name, side)
    s.reorder(*others, tall, wide, row, vector, lanes)
    for r in tiles.operands:
        *rows, columns = s.cache_read(r.attr.name, wide, f"{r.attr.name}.tile", "register").loads
        unroll(s, rows, columns)
    unroll(s, [row, vector], lanes)
    threads(s, [*others, tall, wide], pays, knobs, {wide: whole_tiles(across.extent, side), tall: whole_tiles(lane.extent, height)})
