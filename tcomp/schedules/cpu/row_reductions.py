"""Default CPU schedule of reductions over the rest of a row: everything about one row in one place; each fold runs in vector lanes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tcomp.ir.expr import Dim, as_dim, as_expr
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Buffer
from tcomp.schedules.analysis.access_patterns import contiguous_reduction, extent_of, nests, result_nest, row_loops, stage_axes
from tcomp.schedules.cpu import elementwise
from tcomp.schedules.cpu.lanes_and_threads import MOST_LANES, SERIAL_ELEMENTS, divides, lanes_of, nest_loops, threads, vector_tail
from tcomp.schedules.cpu.prefetching import PAGE, ask_ahead
from tcomp.schedules.groups import Group
from tcomp.schedules.handles import PartialResults
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

SHORT = 8  # elements of a row at most, where lanes run across rows


def schedule(s: Schedule, group: Group, target: CpuTarget, knobs: Knobs) -> None:
    """Schedule a result with its reductions over the rest of a row."""
    out = result_nest(s.kernel, group.result)
    rows = row_loops(s.kernel, out, group.inside)
    assert rows is not None
    loops = [x.var.attr.name for x in out.loops]
    leading = [x.var.attr.name for x in out.loops if x.var in rows]
    rest = [n for n in loops if n not in leading]
    work = prod(extent_of(x.extent) for n in nests(s.kernel) if n.writes.name in group.inside for x in n.loops[-2:])
    if _short(s, group, leading, rest, target):
        _across(s, group, leading, rest, target, knobs)
        return
    partials: dict[str, tuple[PartialResults, Dim, int]] = {}
    for name in group.inside:
        fold = next((n for n in nests(s.kernel) if n.writes.name == name and n.is_reduction), None)
        axis = contiguous_reduction(fold) if fold is not None else None
        if fold is not None and axis is not None:
            width = lanes_of(target, [fold.writes, *(r.attr for r in fold.reads)])
            wide = min(width * 4, MOST_LANES) if extent_of(axis.extent) >= width * 4 else width
            lanes = knobs.choice(f"{name}.lanes", tuple(width << n for n in range(4) if width << n <= MOST_LANES), wide)
            partials[name] = (s.rfactor(name, axis.var.attr.name, lanes), axis.extent, lanes)
    if not leading:
        _whole(s, group, partials, target, knobs)
        return
    if rest:
        s.reorder(*leading, *rest)
    home = leading[-1]
    for name in reversed(group.inside):
        is_reduction = any(n.is_reduction for n in nests(s.kernel) if n.writes.name == name)
        s.compute_at(name, home, "register" if is_reduction else "global")
        if name in partials:
            s.compute_at(partials[name][0], home, "register")
    passes: list[str | None] = []
    for name in group.inside:
        if name in partials:
            partial_loops(s, *partials[name])
        elif not stage_axes(s.kernel, name, True):
            lane = stage_axes(s.kernel, name, False)[-1]
            passes.append(vector_tail(s, lane, editing.find_loop(s.kernel, lane).extent, lanes_of(target, [editing.find_buffer(s.kernel, name)])))
    if rest:
        nest = editing.find_loop(s.kernel, rest[-1])
        passes.append(vector_tail(s, rest[-1], nest.extent, lanes_of(target, [out.writes, *(r.attr for r in out.reads)])))
    _ask_for_next_rows(s, [x for x in passes if x is not None], target, knobs)
    threads(s, leading, work * prod(extent_of(editing.find_loop(s.kernel, x).extent) for x in leading) >= SERIAL_ELEMENTS * 4, knobs)


def _short(s: Schedule, group: Group, leading: Sequence[str], rest: Sequence[str], target: CpuTarget) -> bool:
    """Whether rows are so short that lanes are better filled by many of them."""
    if not leading or extent_of(editing.find_loop(s.kernel, leading[-1]).extent) < MOST_LANES:
        return False
    folds = [x for n in nests(s.kernel) if n.writes.name in group.inside and n.is_reduction for x in n.reduction_loops]
    return all(isinstance(n, int) and n <= SHORT for n in (*(x.extent for x in folds), *(editing.find_loop(s.kernel, x).extent for x in rest)))


def _across(s: Schedule, group: Group, leading: Sequence[str], rest: Sequence[str], target: CpuTarget, knobs: Knobs) -> None:
    """Each lane works on a row of its own; what is along a row is written out."""
    out = result_nest(s.kernel, group.result)
    lanes = lanes_of(target, [out.writes, *(r.attr for r in out.reads)])
    extent = editing.find_loop(s.kernel, leading[-1]).extent
    folds = {n.writes.name: [x.var.attr.name for x in n.reduction_loops] for n in nests(s.kernel) if n.is_reduction}
    outer, lane = s.split(leading[-1], lanes)
    s.reorder(*leading[:-1], outer, *rest, lane)
    for name in reversed(group.inside):
        s.compute_at(name, outer, "global")
    for name in group.inside:
        for is_reduction in (False, True):
            if axes := stage_axes(s.kernel, name, is_reduction):
                row = next(x for x in axes if editing.find_loop(s.kernel, x).extent == lanes)
                others = [x for x in axes if x != row] + (folds[name] if is_reduction else [])
                s.reorder(*others, row, reassociate=is_reduction)
                for x in others:
                    s.unroll(x)
                s.vectorize(row)
        dims = [n for n, d in enumerate(editing.find_buffer(s.kernel, name).shape) if d != lanes]
        s.relayout(name, Layout.permuted([*dims, *(n for n in range(len(editing.find_buffer(s.kernel, name).shape)) if n not in dims)]))
    for x in rest:
        s.unroll(x)
    s.vectorize(lane)
    nests_to_thread = [[*leading[:-1], outer]]
    if not divides(lanes, extent):
        _, tail = s.partition(outer, as_dim(as_expr(extent) // lanes))
        if len(leading) == 1:
            nests_to_thread.append([tail])
    work = prod(extent_of(editing.find_loop(s.kernel, x).extent) for x in nests_to_thread[0]) * lanes
    for names in nests_to_thread:
        threads(s, names, work >= SERIAL_ELEMENTS // SHORT, knobs)


def _ask_for_next_rows(s: Schedule, passes: Sequence[str], target: CpuTarget, knobs: Knobs) -> None:
    """The last of the passes over a row that are not folds asks for the rows to come, a page ahead or more: while a row is worked on,
    memory would wait."""
    done: set[Buffer] = set()
    for name in reversed(passes):
        extent = editing.find_loop(s.kernel, name).extent
        if isinstance(extent, int) and 0 < extent * target.vector_bits // 8 <= target.l1:
            page = PAGE * 8 // target.vector_bits
            done |= ask_ahead(s, name, extent * -(-page // extent), done, target, knobs)


def _whole(s: Schedule, group: Group, partials: dict[str, tuple[PartialResults, Dim, int]], target: CpuTarget, knobs: Knobs) -> None:
    """One row is the whole result: stages stay where they are, each in vector lanes."""
    for name in group.inside:
        if name in partials:
            partial = partials[name]
            s.set_scope(name, "register")
            s.set_scope(partial[0], "register")
            partial_loops(s, *partial)
    elementwise.schedule(s, group.result, target, knobs)


def partial_loops(s: Schedule, partial: PartialResults, extent: Dim, lanes: int) -> None:
    """Vector lanes for the three nests that an rfactor leaves: clear, accumulate, and fold the lanes."""
    s.vectorize(partial.init_lane)
    s.reorder(*[x for x in nest_loops(s.kernel, partial.lane) if x != partial.lane], partial.lane)
    s.vectorize(partial.lane)
    s.vectorize(partial.final_lane, reassociate=True)
    if not divides(lanes, extent):
        s.partition(partial.outer, as_dim(as_expr(extent) // lanes))
