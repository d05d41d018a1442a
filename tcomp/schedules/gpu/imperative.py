"""Programs of loops on GPUs: programs that are not tensor expressions (a prefix sum, a sort, a scatter) run as written, on as many threads
as its outermost loops have independent iterations.

    for row in 0..6 {                         thread.x row: each thread runs its rows, with what they keep to themselves
      alloc running ..
      for k in 0..37 { .. }
    }
"""

from __future__ import annotations

from collections.abc import Iterator

from tcomp.errors import ScheduleError
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.instruction import WARP
from tcomp.ir.loops import Allocate, Block, For, Stmt, children, perfect, walk
from tcomp.schedules.analysis.access_patterns import bytes_of
from tcomp.schedules.gpu import thread_mapping as T
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import fuse_all

MAX_PRIVATE = 8 << 10  # private bytes of a thread: local memory, 1.8 GB for all threads that an A100 holds


def schedule(s: Schedule) -> None:
    """Each loop at the top is distributed if that is proved, one warp a block, as the work of threads differs and there may be few of them;
    a note says why another one is not."""
    for stmt in list(_statements(s.kernel.body)):
        loops = T.names(perfect(stmt)[0])
        if not loops:
            inner = T.names(x for x in walk(stmt) if isinstance(x, For))
            if inner:
                why = f"its iterations share {stmt.buffer.name}" if isinstance(stmt, Allocate) else "it may not run"
                s.fall_back(FallbackKind.ONE_THREAD, inner[0], why)
            continue
        private = [x.buffer for x in walk(stmt) if isinstance(x, Allocate)]
        size, unknown = sum(map(bytes_of, private)), [b.name for b in private if not all(isinstance(n, int) for n in b.shape)]
        reason = f"an iteration keeps {size} bytes to itself" if size > MAX_PRIVATE else ""
        reason = f"`{unknown[0]}` has no constant size" if unknown else reason
        for count in range(len(loops), 0, -1) if not reason else ():
            try:
                with s.together():
                    s.distribute(fuse_all(s, loops[:count]), WARP, "block.x", "thread.x")
                break
            except ScheduleError as error:
                reason = error.reason
        else:
            s.fall_back(FallbackKind.ONE_THREAD, loops[0], reason)


def _statements(body: Stmt) -> Iterator[Stmt]:
    """Those of the top level, which are launched one after the other."""
    if isinstance(body, Block) or (isinstance(body, Allocate) and body.buffer.scope == "global"):
        for stmt in children(body):
            yield from _statements(stmt)
    else:
        yield body
