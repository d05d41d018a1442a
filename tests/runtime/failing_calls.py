"""System calls that fail: the n-th call of a block of code, whichever it is, reports an error of the operating system."""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from tcomp.runtime import artifact

ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.EACCES)
CALLS = ("open", "close", "read", "write", "pwrite", "pread", "ftruncate", "fstat", "stat", "lstat", "replace", "rename", "unlink", "rmdir", "mkdir",
         "memfd_create", "listdir", "scandir", "chmod", "fchmod", "fsync", "utime", "link", "dup", "fcntl", "access", "readlink", "preadv")  # fmt: skip


class Shim:
    """Counts calls; the one numbered `fails` (from 1) fails with `code`. A call that closes or starts something has its effect first, as
    the kernel closes what it reports an error for."""

    def __init__(self, fails: int, code: int) -> None:
        self.fails, self.code, self.count, self.failed, self.lock = fails, code, 0, "", threading.Lock()

    def due(self, name: str) -> bool:
        with self.lock:
            self.count += 1
            if self.count != self.fails:
                return False
            self.failed = name
            return True

    def error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.due(name):
                if name == "close":
                    function(*args, **kwargs)
                raise self.error()
            return function(*args, **kwargs)

        return call


@contextmanager
def failing(fails: int, code: int) -> Iterator[Shim]:
    """Within, calls of `os`, `open` and its files, `mmap`, the loader of shared objects and the start of threads are counted, and one
    fails."""
    shim = Shim(fails, code)
    whole = open

    class File(io.FileIO):
        def readinto(self, buffer: Any) -> Any:
            return shim.wrapped("read", super().readinto)(buffer)

        def readall(self) -> Any:
            return shim.wrapped("read", super().readall)()

        def write(self, data: Any) -> Any:
            return shim.wrapped("write", super().write)(data)

        def close(self) -> None:
            if not self.closed and shim.due("close"):
                super().close()
                raise shim.error()
            super().close()

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, closefd: bool = True, opener: Any = None, **kwargs: Any) -> Any:
        if "b" not in mode:
            return shim.wrapped("open", whole)(file, mode, buffering, *args, closefd=closefd, opener=opener, **kwargs)
        if shim.due("open"):
            raise shim.error()
        raw = File(file, mode.replace("b", ""), closefd, opener)
        if buffering == 0:
            return raw
        kind: Any = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        return kind(raw)

    def start(thread: threading.Thread) -> None:
        if shim.due("clone"):
            raise RuntimeError("can't start new thread")  # what Python makes of it
        original_start(thread)

    original_start = threading.Thread.start
    library_map, *others = artifact._libc()

    def mapped(*args: Any) -> int | None:
        if shim.due("mmap of a file"):
            ctypes.set_errno(code)
            return ctypes.c_void_p(-1).value
        return library_map(*args)

    with ExitStack() as stack:
        for name in CALLS:
            if hasattr(os, name):
                stack.enter_context(patch.object(os, name, shim.wrapped(name, getattr(os, name))))
        for place, name, value in (
            (builtins, "open", opened),
            (io, "open", opened),
            (mmap, "mmap", shim.wrapped("mmap", mmap.mmap)),
            (ctypes, "CDLL", shim.wrapped("dlopen", ctypes.CDLL)),
            (threading.Thread, "start", start),
            (artifact, "_libc", lambda: (mapped, *others)),
        ):
            stack.enter_context(patch.object(place, name, value))
        yield shim
