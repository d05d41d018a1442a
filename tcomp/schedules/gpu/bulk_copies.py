"""Slices of products that are copied in bulk (`bulk_copy`, from sm_90 on): a thread has a whole row copied, by one instruction.

    full tiles              a row each thread of a warp, or several, none of whose elements passes a register
    tiles over an edge      by all threads, as slices are otherwise: `specialize` keeps them apart

A slice is copied so if its rows follow the source, in multiples of 16 bytes on both sides. So those of `wgmma` are not: a row of a core
matrix has 16 bytes. This is an option of a decision, and never the default one: that stays copies by all threads (`cp.async`) before both
were measured on hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import is_multiple, linear_index, without
from tcomp.ir.dtypes import itemsize
from tcomp.ir.instruction import RUN
from tcomp.ir.loops import For, Store, perfect, walk
from tcomp.schedules.analysis.access_patterns import extent_of
from tcomp.schedules.gpu import thread_mapping as T
from tcomp.schedules.instructions import bulk_copy
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.specialize import specialize
from tcomp.schedules.primitives.tensorize import tensorize
from tcomp.schedules.schedule import Schedule

ARCH = "sm_90"  # the oldest architecture with copies in bulk


def is_possible(s: Schedule, loops: Sequence[str]) -> bool:
    """Whether the innermost of the loops that fill a slice is a run in both memories, at multiples of 16 bytes, in full tiles."""
    first, last = (editing.find_loop(s.kernel, x) for x in (loops[0], loops[-1]))
    store = _store(last)
    source = store.value.args[1] if store.value.op == "select" else store.value
    if source.op != "read" or not isinstance(last.extent, int):
        return False
    starts = [without(linear_index(b, indices), last.var) for b, indices in ((store.buffer, store.indices), (source.attr, source.args))]
    if not all(start is not None and is_multiple(start[1] * itemsize(store.buffer.dtype), RUN) for start in starts):
        return False
    try:
        kernel = specialize(s.kernel, loops[0])[0] if _has_edges(first) else s.kernel
        tensorize(kernel, loops[-1], _run(last))
    except ScheduleError:
        return False
    return True


def fill(s: Schedule, loops: Sequence[str], threads: int) -> list[str]:
    """Full tiles are copied by so many threads; returns the loops over a tile that hangs over an edge, none if there are no such tiles."""
    edges: list[str] = []
    if _has_edges(editing.find_loop(s.kernel, loops[0])):
        edge = s.specialize(loops[0])
        edges = T.names(perfect(editing.find_loop(s.kernel, edge))[0])
    *rows, last = loops
    s.tensorize(last, _run(editing.find_loop(s.kernel, last)))
    if rows:
        rest, thread = s.split(T.fuse_all(s, rows), threads)
        s.reorder(thread, rest)
        s.bind(thread, "thread.x")
    return edges


def _store(loop: For) -> Store:
    return next(x for x in walk(loop) if isinstance(x, Store))


def _has_edges(loop: For) -> bool:
    return any(e.op == "select" for e in E.walk(_store(loop).value))


def _run(last: For) -> str:
    return bulk_copy(_store(last).buffer.dtype, extent_of(last.extent)).name
