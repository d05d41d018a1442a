"""Phases: the statements of a `__global__` function that the threads of a block execute without waiting for each other.

A thread loop is a phase with all that it holds, and so is a statement outside of thread loops, which one thread executes.
"""

from __future__ import annotations

from collections.abc import Iterator

from tcomp.ir import loops as L
from tcomp.ir.loops import Stmt


def is_thread_loop(s: Stmt) -> bool:
    """Whether a statement is a loop bound to `thread.x`, `thread.y` or `thread.z`."""
    return isinstance(s, L.For) and s.kind in L.THREAD_AXES


def has_threads(s: Stmt) -> bool:
    """Whether a statement is or holds a thread loop."""
    return any(is_thread_loop(x) for x in L.walk(s))


def is_phase(s: Stmt) -> bool:
    """Whether a statement is a phase; else its parts are, or hold some."""
    match s:
        case L.Block():
            return False
        case L.Allocate(buffer, body):
            return buffer.scope != "shared" and not has_threads(body)
        case L.For(_, _, body, kind):
            return is_thread_loop(s) or not (kind in L.BLOCK_AXES or has_threads(body))
        case L.If():
            return not has_threads(s)
    return True


def phases(s: Stmt) -> Iterator[Stmt]:
    """The phases of a statement, in order."""
    if is_phase(s):
        yield s
    else:
        for child in L.children(s):
            yield from phases(child)


def threads_along(s: Stmt, sizes: list[int]) -> None:
    """Raise `sizes` (along x, y, z) to the extents of the thread loops of a statement, which are constant."""
    for x in L.walk(s):
        if isinstance(x, L.For) and is_thread_loop(x) and isinstance(x.extent, int):
            axis = "xyz".index(x.kind[-1])
            sizes[axis] = max(sizes[axis], x.extent)


def plain_statements(s: Stmt) -> Iterator[Stmt]:
    """A statement and those inside that no instruction executes."""
    if not isinstance(s, L.Call):
        yield s
        for child in L.children(s):
            yield from plain_statements(child)
