"""Default CPU schedule of reductions over the rest of a row: everything about one row in one place; each reduction runs in vector lanes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tcomp.ir.expr import Dim, reads
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Buffer, perfect
from tcomp.schedules.analysis.access_patterns import (
    Nest,
    contiguous_reduction,
    extent_of,
    iterations,
    nests,
    result_nest,
    row_loops,
    stage_axes,
)
from tcomp.schedules.cpu import common, elementwise
from tcomp.schedules.cpu.common import MAX_LANES, extent, nest_lanes, size, threads, whole_tiles
from tcomp.schedules.groups import Group
from tcomp.schedules.handles import PartialResults
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

MAX_SHORT = 8  # elements of a row where lanes run across rows: longer ones fill vectors, and would make much straight-line code
MAX_VECTORS = 4  # of partial results: they hide the latency of an addition
MAX_GATHERED = 8  # the same for gathers whose indices are gathered: 500 trees take 0.7 of the time with twice as many


def schedule(s: Schedule, group: Group, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a result with its reductions over the rest of a row."""
    out = result_nest(s.kernel, group.result)
    rows = row_loops(s.kernel, out, group.inside)
    assert rows is not None
    leading = [x.var.name for x in out.loops if x.var in rows]
    rest = [x.var.name for x in out.loops if x.var not in rows]
    work = sum(_steps(n, target) for n in nests(s.kernel) if n.writes.name in group.inside)  # an element of a row takes several passes
    reduced = (x.extent for n in nests(s.kernel) if n.writes.name in group.inside and n.is_reduction for x in n.reduction_loops)
    short = all(isinstance(n, int) and n <= MAX_SHORT for n in (*reduced, *(extent(s, x) for x in rest)))
    if short and leading and size(s, leading[-1]) >= MAX_LANES:  # lanes are better filled by many rows
        _lanes_across_rows(s, group, leading, rest, target, knobs)
        return
    partials: dict[str, tuple[PartialResults, Dim, int]] = {}
    reductions = {n.writes.name: n for n in nests(s.kernel) if n.is_reduction}
    for name in group.inside:
        if name in reductions and (axis := contiguous_reduction(reductions[name])) is not None:
            width = nest_lanes(target, reductions[name])
            gathered = any(reads(*r.args) for r in reductions[name].reads)  # one after the other, which takes longer than additions
            most = min(width * (MAX_GATHERED if gathered else MAX_VECTORS), MAX_LANES)
            wide = most if extent_of(axis.extent) >= most else width
            lanes = knobs.choice((name, "lanes"), tuple(width << n for n in range(4) if width << n <= MAX_LANES), wide)
            partials[name] = (s.rfactor(name, axis.var.name, lanes), axis.extent, lanes)
    if not leading:  # one row is the whole result: stages stay where they are, each in vector lanes
        for name, partial in partials.items():
            s.set_scope(name, "register")
            s.set_scope(partial[0], "register")
            partial_loops(s, *partial)
        elementwise.schedule(s, group.result, target, knobs)
        return
    if rest:
        s.reorder(*leading, *rest)
    for name in reversed(group.inside):
        s.compute_at(name, leading[-1], "register" if name in reductions else "global")
        if name in partials:
            s.compute_at(partials[name][0], leading[-1], "register")
    passes: list[str | None] = []  # loops over the vectors of a row that are not reductions
    for name in group.inside:
        if name in partials:
            partial_loops(s, *partials[name])
        elif not stage_axes(s.kernel, name, True):
            lane = stage_axes(s.kernel, name, False)[-1]
            passes.append(common.vector_tail(s, lane, common.lanes_of(target, [editing.find_buffer(s.kernel, name)])))
    if rest:
        passes.append(common.vector_tail(s, rest[-1], nest_lanes(target, out)))
    # The last of them prefetches the rows to come, a page in advance or more: while a row is worked on, memory would wait.
    done, page = set[Buffer](), common.vectors_of_page(target)
    for loop in filter(None, reversed(passes)):
        whole = extent(s, loop)
        if isinstance(whole, int) and 0 < whole * target.vector_bits // 8 <= target.l1:
            done |= common.prefetch_vectors(s, loop, whole * -(-page // whole), done, target, knobs)
    threads(s, leading, work >= common.MIN_PARALLEL_ELEMENTS, knobs)


def _steps(nest: Nest, target: CpuTarget) -> int:
    """How many elements of vectors a nest takes as long as: gathers are made one after the other."""
    gathered = any(reads(*r.args) for r in nest.reads)
    return iterations(nest.loops) * (nest_lanes(target, nest) if gathered else 1)


def _lanes_across_rows(s: Schedule, group: Group, leading: Sequence[str], rest: Sequence[str], target: CpuTarget, knobs: Knobs) -> None:
    """Each lane works on a row of its own; what is along a row is unrolled."""
    lanes, whole = nest_lanes(target, result_nest(s.kernel, group.result)), extent(s, leading[-1])
    loops = {n.writes.name: [x.var.name for x in n.reduction_loops] for n in nests(s.kernel) if n.is_reduction}
    outer, lane = s.split(leading[-1], lanes)
    around = [*leading[:-1], outer]
    s.reorder(*around, *rest, lane)
    for name in reversed(group.inside):
        s.compute_at(name, outer, "global")
    for name in group.inside:
        for is_reduction in (False, True):
            if axes := stage_axes(s.kernel, name, is_reduction):
                row = next(x for x in axes if extent(s, x) == lanes)
                others = [x for x in axes if x != row] + (loops[name] if is_reduction else [])
                s.reorder(*others, row, reassociate=is_reduction)
                unroll(s, others, row)
        shape = editing.find_buffer(s.kernel, name).shape
        s.relayout(name, Layout.permuted(sorted(range(len(shape)), key=lambda d: shape[d] == lanes)))
    unroll(s, rest, lane)
    pays = prod(size(s, x) for x in around) * lanes * MAX_SHORT >= common.MIN_PARALLEL_ELEMENTS
    threads(s, around, pays, knobs, {outer: whole_tiles(whole, lanes)})


def partial_loops(s: Schedule, partial: PartialResults, whole: Dim, lanes: int) -> None:
    """Vector lanes for the three nests that an rfactor leaves: clear, accumulate, and reduce the lanes."""
    s.vectorize(partial.init_lane)
    s.reorder(*[x.var.name for x in perfect(editing.find_loop(s.kernel, partial.lane))[0][1:]], partial.lane)
    s.vectorize(partial.lane)
    s.vectorize(partial.final_lane, reassociate=True)
    common.partition_tails(s, [partial.outer], {partial.outer: whole_tiles(whole, lanes)})
