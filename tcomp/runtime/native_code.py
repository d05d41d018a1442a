"""A model's shared object in this process: loaded from memory or from a file, its functions, and the structure that they take."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import weakref
from _ctypes import dlclose
from pathlib import Path
from typing import Any

from tcomp.errors import ArtifactError
from tcomp.runtime.artifact import replacing


class Call(ctypes.Structure):
    """`tcomp_call` of include/tcomp.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("inputs", "outputs", "weights", "workspace", "dims", "pool")),
        ("status", ctypes.c_int64), ("index", ctypes.c_int64), ("extent", ctypes.c_int64),
    ]  # fmt: skip


class NativeCode:
    """A model's shared object, loaded until the last reference to this object is gone. Functions of the pool are None in code built for one
    thread, `run_profiled` in code that cannot be profiled, `bind` where no values of inputs give sizes."""

    def __init__(self, code: bytes, path: str | os.PathLike[str] | None = None) -> None:
        """Load `code` from memory, or from a file written to `path`. Raises ArtifactError if it cannot be loaded."""
        self._library = open_library(code, path)
        # Not at exit: other threads may still be running the model then.
        weakref.finalize(self, dlclose, self._library._handle).atexit = False
        pointer, status = ctypes.c_void_p, ctypes.c_int32
        run, plan = self._function("tcomp_run", status, pointer), self._function("tcomp_plan", None, pointer, pointer)
        if run is None or plan is None:
            raise ArtifactError(f"the artifact's code lacks the function {'tcomp_run' if run is None else 'tcomp_plan'}")
        self.run, self.plan = run, plan
        self.bind = self._function("tcomp_bind", status, pointer, pointer)
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


def open_library(code: bytes, path: str | os.PathLike[str] | None = None) -> ctypes.CDLL:
    """Load a shared object that `codegen.elf.linker` linked: from memory, or from a file at `path`, which is written unless it holds that
    code already. No descriptor stays open: the mapping alone keeps the code. Raises ArtifactError.

    Without memory files (or where there is no /proc to name them by), code goes through a temporary file.
    """
    try:
        return _open_in_memory(code) if path is None else _open_file(code, path)
    except (OSError, ValueError) as problem:  # a NUL in the path is a ValueError
        reason = str(problem)
    hint = "give a code_path in a folder that code may be executed from"
    if path is None:
        import tempfile  # which most systems do without

        try:
            with tempfile.TemporaryDirectory(prefix="tcomp-", ignore_cleanup_errors=True) as folder:
                return _open_file(code, os.path.join(folder, "model.so"))
        except (OSError, ArtifactError) as problem:
            why = problem.reason if isinstance(problem, ArtifactError) else problem
            reason, hint = f"{reason}, as a memory file; {why}, as a temporary file", f"set TMPDIR, or {hint}"
    raise ArtifactError("the artifact's code cannot be loaded", where=str(path or ""), why=reason, hint=hint)


def _open_in_memory(code: bytes) -> ctypes.CDLL:
    descriptor = os.memfd_create("tcomp-model", os.MFD_CLOEXEC)
    try:
        rest = memoryview(code)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        return _open_as("/proc/self/fd/", str(descriptor), code)
    finally:
        os.close(descriptor)


def _open_file(code: bytes, path: str | os.PathLike[str]) -> ctypes.CDLL:
    """By a file that is never changed, since other processes may have mapped it: it is used as it is, or replaced."""
    where = Path(os.path.abspath(path))
    if not _holds(where, code):
        with replacing(where) as (file,):
            file.write(code)
    return _open_as(f"{where.parent}/", where.name, code)


def _holds(path: Path, code: bytes) -> bool:
    """Whether a file holds this code, and only its owner, this user, can change that."""
    try:
        status = path.lstat()
        private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o022 and status.st_uid == os.geteuid()
        return private and status.st_size == len(code) and path.read_bytes() == code
    except OSError:
        return False


def _open_as(folder: str, name: str, code: bytes) -> ctypes.CDLL:
    """The shared object in a file, which must hold `code`. The C library takes two files of one name for one library, and the name of a
    memory file is a number that is used again, that of a file outlives its contents: so every library gets a spelling of its own, by a
    random number written with `/` and `./`, which mean nothing in a path."""
    spelling = "".join("./" if bit == "1" else "/" for bit in f"{int.from_bytes(os.urandom(8)):b}")
    try:
        library = ctypes.CDLL(folder + spelling + name)
    except OSError as problem:
        raise OSError(str(problem).replace(spelling, "")) from None
    if not _is_loaded(library, code):
        dlclose(library._handle)
        why = f"what was loaded from {folder}{name} is other code"
        raise ArtifactError("the artifact's code cannot be loaded", why=why, hint="give each model a code_path of its own")
    return library


_HEADER = struct.Struct("<32xQ14xHH6x")  # of an ELF file: where its program headers lie, the size of one, and their number
_SEGMENT = struct.Struct("<IIQQQQ16x")  # a program header: type, flags, offset, address, another address, bytes in the file
_PAGE = 4096  # bytes: the least that is mapped of any library


def _is_loaded(library: ctypes.CDLL, code: bytes) -> bool:
    """Whether the segments that a library has in memory, those that are not written to, are those of this ELF file (gABI, chapter 5).
    That compares machine code with machine code, at the speed of memory, where a digest in the library would only name it."""
    table, size, count = _HEADER.unpack_from(code)
    end = table + size * count
    # The library's handle points to its entry in the list of the debugger's interface, `struct link_map`: first the load address.
    base = ctypes.c_size_t.from_address(library._handle).value
    # Equal headers mean segments of equal sizes, so that all of them can be read.
    if size != _SEGMENT.size or end > _PAGE or ctypes.string_at(base, end) != code[:end]:
        return False
    for kind, flags, offset, address, _, stored in _SEGMENT.iter_unpack(code[table:end]):
        loaded, written = kind == 1, flags & 2  # PT_LOAD, PF_W
        if loaded and not written and ctypes.string_at(base + address, stored) != code[offset : offset + stored]:
            return False
    return True
