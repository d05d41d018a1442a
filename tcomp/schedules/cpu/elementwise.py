"""Default CPU schedule of results without a reduction: vector lanes along the contiguous axis, threads along the outer loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.access import affine
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr
from tcomp.ir.simplify import simplify
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, result_nest
from tcomp.schedules.cost.roofline import division
from tcomp.schedules.cpu import transposes
from tcomp.schedules.cpu.lanes_and_threads import (
    MIN_PARALLEL_ELEMENTS,
    divides,
    extent,
    nest_lanes,
    partition_tails,
    threads,
    unroll,
    vector_tail,
)
from tcomp.schedules.cpu.prefetching import PREFETCH_DISTANCE, prefetch_vectors, size_of
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MAX_CUTS = 12  # of a loop where conditions on it change: bounds the length of the code
MAX_CASES = 11  # of a loop that is unrolled because its iterations differ: Winograd's largest transform of two axes has so many points along each


def schedule(s: Schedule, result: str, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a result without a reduction."""
    nest = result_nest(s.kernel, result)
    if not nest.loops:
        return
    loops, lanes = [x.var.name for x in nest.loops], nest_lanes(target, nest)
    pays = prod(extent_of(x.extent) for x in nest.loops) >= MIN_PARALLEL_ELEMENTS
    if (tiles := transposes.transpose_tiles(nest, target)) is not None:
        transposes.schedule(s, nest, tiles, pays, knobs)
        return
    others, cases = _split_cases(s, nest)
    if cases:
        _unroll_cases(s, others, cases, lanes, pays, knobs)
        return
    outer = [vector_tail(s, piece, lanes) for piece in _cut_at_conditions(s, nest)]
    if len(outer) == 1 and outer[0]:
        large = any(size_of(r.attr) > target.l2 for r in nest.reads)
        loops[-1] = _prefetch_pages(s, outer[0], len(loops) == 1, target, knobs) if large else outer[0]
    else:
        del loops[-1]
    threads(s, loops, pays, knobs)


def _prefetch_pages(s: Schedule, outer: str, alone: bool, target: CpuTarget, knobs: Knobs) -> str:
    """Prefetch the operands of a loop over vectors, where they come from memory, by a page. A loop that stands alone is for threads; its
    iterations are then pages. Returns the loop that threads may share."""
    page, whole = PREFETCH_DISTANCE * 8 // target.vector_bits, extent(s, outer)
    if not isinstance(whole, int) or whole < 2 * page:
        return outer
    vectors = outer
    if alone:
        outer, vectors, *_ = s.split(outer, page, "guard" if divides(page, whole) else "peel")
    prefetch_vectors(s, vectors, page, set(), target, knobs)
    return outer


def _split_cases(s: Schedule, nest: Nest) -> tuple[dict[str, Dim | None], list[str]]:
    """(other loops, loops over few cases): the value tells the cases apart by `select(i == 0, ..., select(i == 1, ...))`, where `i` is a
    loop, a loop modulo a constant or its quotient by one; these are split, into rounds and cases. With each other loop comes the number of
    its rounds that are whole, None if all are."""
    periods: dict[Expr, int] = {}
    quotients: dict[Expr, int] = {}
    for e in E.walk(nest.leaf.value):
        if e.op == "eq" and e.args[1].op == "const":
            i = e.args[0]
            v, by = division(i) or (i, 0)
            found = quotients if i.op == "floordiv" else periods
            found[v] = max(found.get(v, 0), by)
    others: dict[str, Dim | None] = {}
    cases = []
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
            others[rounds] = None if divides(period, x.extent) else as_dim(as_expr(x.extent) // period)
            cases.append(case)
    return others, cases


def _unroll_cases(s: Schedule, others: Mapping[str, Dim | None], cases: Sequence[str], lanes: int, pays: bool, knobs: Knobs) -> None:
    """All cases of a vector stand together, unrolled: they read the same elements and have most of their arithmetic in common."""
    *rest, last = others
    whole = extent(s, last)
    lanes = min(lanes, 1 << (extent_of(whole) - 1).bit_length())
    outer, lane = s.split(last, lanes)
    around = [*rest, outer]
    s.reorder(*around, *cases, lane)
    unroll(s, cases, lane)
    ends = {**others, outer: None if divides(lanes, whole) else as_dim(as_expr(whole) // lanes)}
    for names in partition_tails(s, around, {name: end for name in around if (end := ends[name]) is not None}):
        threads(s, names, pays, knobs)


def _cut_at_conditions(s: Schedule, nest: Nest) -> list[str]:
    """Partition the lane loop where conditions on it change (the seams of a concatenation, the edges of a padding)."""
    lane = nest.loops[-1]
    pieces, points, start = [lane.var.name], set[int](), 0
    for e in E.walk(nest.leaf.value) if isinstance(lane.extent, int) else ():
        if e.op in ("lt", "le") and set(E.variables(e)) == {lane.var}:
            gap = affine(simplify(e.args[1] - e.args[0]))  # 0 < gap, or 0 <= gap
            if gap is not None and gap.terms:
                slope, offset = gap.terms[lane.var], gap.constant + (e.op == "le")
                points.add(-offset // slope + 1 if slope > 0 else -(offset // slope))
    inner = sorted(p for p in points if 0 < p < extent_of(lane.extent))
    for p in inner if len(inner) <= MAX_CUTS else ():
        head, tail = s.partition(pieces.pop(), p - start)
        pieces += [head, tail]
        start = p
    return pieces
