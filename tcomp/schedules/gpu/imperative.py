"""Programs of loops on GPUs: what is no tensor expression (a prefix sum, a sort, a scatter) runs as it is written, on as many threads as
its outermost loops have independent iterations.

    for row in 0..6 {                         thread.x row: each thread runs its rows, with what they keep to themselves
      alloc running ..
      for k in 0..37 { .. }
    }
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from tcomp.errors import ScheduleError
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.loops import Allocate, Block, For, Stmt, perfect, walk
from tcomp.schedules.analysis.access_patterns import extent_of
from tcomp.schedules.gpu.thread_mapping import fuse_all
from tcomp.schedules.schedule import Schedule

MAX_PRIVATE = 8 << 10  # bytes that a thread keeps to itself: local memory, 1.8 GB for all threads that an A100 holds
WARP = 32


def schedule(s: Schedule) -> None:
    """Each loop at the top is distributed if that is proved; a note says why another one is not."""
    for stmt in list(_statements(s.kernel.body)):
        loops = [x.var.attr.name for x in perfect(stmt)[0]]
        if not loops:
            inner = [x.var.attr.name for x in walk(stmt) if isinstance(x, For)]
            if inner:
                why = f"its iterations share {stmt.buffer.name}" if isinstance(stmt, Allocate) else "it may not run"
                s.fall_back(FallbackKind.ONE_THREAD, inner[0], why)
            continue
        reason = _own(stmt)
        for count in range(len(loops), 0, -1) if not reason else ():
            try:
                with s.together():
                    _distributed(s, loops[:count])
                break
            except ScheduleError as error:
                reason = error.reason
        else:
            s.fall_back(FallbackKind.ONE_THREAD, loops[0], reason)


def _distributed(s: Schedule, loops: list[str]) -> None:
    """One warp a block: the work of threads differs, and there may be few of them."""
    s.apply("distribute", fuse_all(s, loops), WARP, "block.x", "thread.x")


def _statements(body: Stmt) -> Iterator[Stmt]:
    """Those of the top level, which are launched one after the other."""
    if isinstance(body, Block):
        for stmt in body.stmts:
            yield from _statements(stmt)
    elif isinstance(body, Allocate) and body.buffer.scope == "global":
        yield from _statements(body.body)
    else:
        yield body


def _own(stmt: Stmt) -> str:
    """Why an iteration cannot be a thread's for what it keeps to itself; nothing if it can."""
    shapes: list[tuple[str, tuple[Dim, ...], str]] = [
        (x.buffer.name, x.buffer.shape, x.buffer.dtype) for x in walk(stmt) if isinstance(x, Allocate)
    ]
    if unknown := [name for name, shape, _ in shapes if not all(isinstance(n, int) for n in shape)]:
        return f"`{unknown[0]}` has no constant size"
    size = sum(prod(extent_of(n) for n in shape) * itemsize(dtype) for _, shape, dtype in shapes)
    return f"an iteration keeps {size} bytes to itself" if size > MAX_PRIVATE else ""
