"""Stream: what is stored need not enter the caches."""

from __future__ import annotations

from dataclasses import replace

from tcomp.ir.loops import Kernel, Stmt, Store
from tcomp.schedules.primitives.edit import find_buffer, rebuild, refuse


def stream(kernel: Kernel, buffer: str) -> Kernel:
    """All stores to `buffer` in whole vectors pass the caches by, where the machine has such stores; accumulations do not.

    Always legal. Good for results that no cache could hold until they are read: a line of memory is then not fetched before it is
    overwritten, which is a third of the traffic of an addition, and nothing else is evicted for it. Where the next kernel would have
    found the result in a cache, it costs more than it saves.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A = te.placeholder((64, 16), name="A")
    >>> s = Schedule(te.compute((64, 16), lambda i, j: A[i, j] * 2, name="B"))
    >>> s.vectorize("B.j")
    >>> s.stream("B")
    >>> print(s.loops["B.i"])
    for B.i in 0..64 {
      vectorized B.j in 0..16 {
        stream B[B.i, B.j] = A[B.i, B.j] * 2.0f
      }
    }
    """
    stored = find_buffer(kernel, buffer, "stream")
    found = False

    def edit(s: Stmt) -> Stmt | None:
        nonlocal found
        if isinstance(s, Store) and s.buffer is stored:
            found = True
            return replace(s, streamed=True)
        return None

    body = rebuild(kernel.body, edit)
    if not found:
        raise refuse(kernel, "stream", f"nothing is stored to `{buffer}`", "accumulations read what is there before")
    return kernel.with_body(body)
