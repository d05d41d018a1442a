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
from tcomp.schedules.cpu.lanes_and_threads import SERIAL_ELEMENTS, divides, lanes_of, threads, vector_tail
from tcomp.schedules.cpu.prefetching import PAGE, ask_ahead, size_of
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

MOST_PIECES = 12  # a loop is cut into at most so many, for the sake of code size
MOST_CASES = 11  # of a loop that is unrolled because its iterations differ


def schedule(s: Schedule, result: str, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a result without a reduction."""
    nest = result_nest(s.kernel, result)
    if not nest.loops:
        return
    loops = [x.var.attr.name for x in nest.loops]
    lanes = lanes_of(target, [nest.writes, *(r.attr for r in nest.reads)])
    work = prod(extent_of(x.extent) for x in nest.loops)
    if (found := transposes.turned(nest, target)) is not None:
        transposes.schedule(s, nest, found, work >= SERIAL_ELEMENTS, knobs)
        return
    others, cases = _cases(s, nest)
    if cases:
        _cases_inside(s, others, cases, lanes, work >= SERIAL_ELEMENTS, knobs)
        return
    pieces = _cut(s, nest)
    outer = [vector_tail(s, piece, editing.find_loop(s.kernel, piece).extent, lanes) for piece in pieces]
    if len(outer) == 1 and outer[0]:
        far = any(size_of(r.attr) > target.l2 for r in nest.reads)
        loops[-1] = _in_pages(s, outer[0], len(loops) == 1, target, knobs) if far else outer[0]
    else:
        del loops[-1]
    threads(s, loops, work >= SERIAL_ELEMENTS, knobs)


def _in_pages(s: Schedule, outer: str, alone: bool, target: CpuTarget, knobs: Knobs) -> str:
    """Ask ahead for the operands of a loop over vectors, where they come from memory: by a page. A loop that stands alone is for threads;
    its iterations are then pages. Returns the loop that threads may share."""
    page, extent = PAGE * 8 // target.vector_bits, editing.find_loop(s.kernel, outer).extent
    if not isinstance(extent, int) or extent < 2 * page:
        return outer
    if not alone:
        ask_ahead(s, outer, page, set(), target, knobs)
        return outer
    pages, vectors, *_ = s.split(outer, page, "guard" if divides(page, extent) else "peel")
    ask_ahead(s, vectors, page, set(), target, knobs)
    return pages


def _cases(s: Schedule, nest: Nest) -> tuple[dict[str, Dim | None], list[str]]:
    """(other loops, loops over few cases): the value tells the cases apart by `select(i == 0, ..., select(i == 1, ...))`, where `i` is a
    loop, a loop modulo a constant or its quotient by one; these are split, into rounds and cases. With each other loop comes the number of
    its rounds that are whole, None if all are."""
    periods: dict[Expr, int] = {}
    pieces: dict[Expr, int] = {}
    for e in E.walk(nest.leaf.value):
        if e.op == "eq" and e.args[1].op == "const":
            i = e.args[0]
            v, by = division(i) or (i, 0)
            found = pieces if i.op == "floordiv" else periods
            found[v] = max(found.get(v, 0), by)
    others: dict[str, Dim | None] = {}
    cases = []
    for x in nest.loops:
        name, extent, period, piece = x.var.attr.name, x.extent, periods.get(x.var, MOST_CASES + 1) or x.extent, pieces.get(x.var, 0)
        if piece and isinstance(extent, int) and extent % piece == 0 and extent // piece <= MOST_CASES:
            case, inside = s.split(name, piece)
            others[inside] = None
            cases.append(case)
        elif x is nest.loops[-1] or not isinstance(period, int) or period > MOST_CASES:
            others[name] = None
        elif period == extent:
            cases.append(name)
        else:
            rounds, case = s.split(name, period)
            others[rounds] = None if divides(period, extent) else as_dim(as_expr(extent) // period)
            cases.append(case)
    return others, cases


def _cases_inside(s: Schedule, others: Mapping[str, Dim | None], cases: Sequence[str], lanes: int, worthwhile: bool, knobs: Knobs) -> None:
    """All cases of a vector stand together, unrolled: they read the same elements and have most of their arithmetic in common."""
    *rest, last = others
    extent = editing.find_loop(s.kernel, last).extent
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
                to_thread.append([tail, *(tail.copies[x] for x in around[1:])])
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
            gap = affine(simplify(e.args[1] - e.args[0]))  # 0 < gap, or 0 <= gap
            if gap is not None and gap.terms:
                slope, offset = gap.terms[lane.var], gap.constant + (e.op == "le")
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
