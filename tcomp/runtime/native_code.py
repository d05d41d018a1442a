"""A model's shared object in this process: loaded from memory or from a file, its functions, and the structure that they take."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from _ctypes import dlclose
from contextlib import suppress
from pathlib import Path
from typing import Any

from tcomp.errors import ArtifactError


class Call(ctypes.Structure):
    """`tcomp_call` of include/tcomp.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("inputs", "outputs", "weights", "workspace", "dims", "pool")),
        ("status", ctypes.c_int64), ("index", ctypes.c_int64), ("extent", ctypes.c_int64),
    ]  # fmt: skip


class NativeCode:
    """A model's shared object, loaded until the last reference to this object is gone. Functions of the pool are None in code built for one
    thread, `run_profiled` in code that cannot be profiled."""

    def __init__(self, code: bytes, path: str | os.PathLike[str] | None = None) -> None:
        """Load `code` from memory, or from a file written to `path`. Raises ArtifactError if it cannot be loaded."""
        self._library, descriptor = open_library(code, path)
        # Not at exit: other threads may still be running the model then.
        weakref.finalize(self, _unload, self._library._handle, descriptor).atexit = False
        pointer, status = ctypes.c_void_p, ctypes.c_int32
        run, plan = self._function("tcomp_run", status, pointer), self._function("tcomp_plan", None, pointer, pointer)
        if run is None or plan is None:
            raise ArtifactError(f"the artifact's code lacks the function {'tcomp_run' if run is None else 'tcomp_plan'}")
        self.run, self.plan = run, plan
        self.run_profiled = self._function("tcomp_run_profiled", status, pointer, pointer, pointer)
        self.pool_create = self._function("tcomp_pool_create", pointer, status, pointer)
        self.pool_destroy = self._function("tcomp_pool_destroy", None, pointer)
        self.pool_forget = self._function("tcomp_pool_forget", None, pointer)
        self.pool_trace = self._function("tcomp_pool_trace", None, pointer)
        self.pool_version = self._function("tcomp_pool_version", status)

    def _function(self, name: str, result: type[ctypes._SimpleCData[Any]] | None, *arguments: type) -> ctypes._NamedFuncPointer | None:
        if not hasattr(self._library, name):
            return None
        function = self._library[name]
        function.restype, function.argtypes = result, arguments
        return function


def _unload(handle: int, descriptor: int | None) -> None:
    dlclose(handle)
    if descriptor is not None:
        os.close(descriptor)


def open_library(code: bytes, path: str | os.PathLike[str] | None = None) -> tuple[ctypes.CDLL, int | None]:
    """Load a shared object, from memory or from a file written to `path`; returns also what to close after `dlclose`, if anything. The
    descriptor stays open as long as the library is loaded: the loader knows libraries by path, and would take a later one with the same
    descriptor number, hence the same path, for this one. Raises ArtifactError."""
    if path is None:
        with suppress(OSError):  # no memory files or no /proc, or memory files may not be executed here
            return _open_in_memory(code)
    try:
        if path is not None:
            return _open_file(code, Path(path)), None
        with tempfile.TemporaryDirectory(prefix="tcomp-") as folder:
            return _open_file(code, Path(folder, "model.so")), None
    except OSError as problem:
        raise ArtifactError("the artifact's code cannot be loaded", why=str(problem)) from None


def _open_in_memory(code: bytes) -> tuple[ctypes.CDLL, int]:
    descriptor = os.memfd_create("tcomp-model", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(code)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}"), descriptor
    except OSError:
        os.close(descriptor)
        raise


def _open_file(code: bytes, path: Path) -> ctypes.CDLL:
    path.unlink(missing_ok=True)  # a library already loaded from there must not change
    path.write_bytes(code)
    return ctypes.CDLL(os.path.abspath(path))
