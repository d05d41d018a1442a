"""Scratch memory of native calls, which all modules of a process share.

A call takes a workspace and gives it back. Those given back stay, since pages that were touched are far cheaper than new ones, but not more
of them than `IDLE_BYTES` in all, or else the one that was used last: a process with many models, or that once had many callers, keeps what
one call at a time needs. No lock: lists are changed by single operations, so that a signal handler may run a model in the midst of it.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from tcomp.errors import InputError

IDLE_BYTES = 256 << 20  # in all: the workspaces of about a dozen vision models at batch size 1
MAX_IDLE = 64  # workspaces, which are searched one by one
HUGE_PAGE = 2 << 20  # bytes, of x86-64 and AArch64


def new_memory(size: int, purpose: str) -> tuple[mmap.mmap, int, int]:
    """(memory, its address, the offset of the first byte to use) of at least so many bytes from there on, zeros, aligned to 64 bytes at
    least; where it is large, huge pages are asked for. Raises InputError, which names the purpose, if there is none."""
    large = size >= 2 * HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE if large else max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as problem:
        raise InputError(f"no memory for {purpose} of {size >> 20} MiB", why=str(problem), hint="run with smaller inputs") from None
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if large:
        with suppress(AttributeError, OSError):  # a kernel without huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, address, -address % HUGE_PAGE if large else 0


class Workspace:
    """Scratch memory for one call at a time, aligned to 64 bytes at least; large ones ask for huge pages. InputError if there is none."""

    __slots__ = ("_memory", "address", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory, start, offset = new_memory(size, "a workspace")
        self.address = start + offset


_idle: list[Workspace] = []  # those used last at the end


def take(size: int) -> Workspace:
    """A workspace of at least `size` bytes: the smallest of those idle, or a new one, which takes the place of one half as large. Raises
    InputError if there is no memory."""
    while True:
        found = min((w for w in reversed(_idle) if w.size >= size), key=lambda w: w.size, default=None)
        if found is None:
            nearly = max(_idle.copy(), key=lambda w: w.size, default=None)
            if nearly is not None and 2 * nearly.size > size:  # a size that grows from call to call leaves no trail of workspaces
                with suppress(ValueError):
                    _idle.remove(nearly)
            return Workspace(size)
        with suppress(ValueError):  # another thread was faster
            _idle.remove(found)
            return found


def give_back(workspace: Workspace) -> None:
    """Let others use a workspace."""
    _idle.append(workspace)
    while len(_idle) > 1 and (len(_idle) > MAX_IDLE or idle_bytes() > IDLE_BYTES):
        with suppress(IndexError):
            _idle.pop(0)


def idle_bytes() -> int:
    """Bytes of the workspaces that no call uses."""
    return sum(w.size for w in _idle)
