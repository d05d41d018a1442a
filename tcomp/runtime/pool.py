"""The thread pool of this process, which all modules share: as many workers as the module with the most threads uses.

The code of the pool is linked into every model. That of the first module makes the pool, and stays loaded as long as any module uses it;
the others leave theirs idle. A module sees the pool through a `View` that says how many threads it may use. Nothing waits for the pool: a
region that finds its workers taken runs on its caller alone (see `tcomp.codegen.llvm.thread_pool`), so that calls from any number of
threads, or from a signal handler, need no lock. A child made by fork has no workers: the pool forgets them, and starts new ones when they
are needed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime.native_code import NativeCode

_log = logging.getLogger("tcomp")
VERSION = 2  # of the pool's interface in the code of models


class View(ctypes.Structure):
    """`tcomp_pool` of include/tcomp.h."""

    _fields_ = [("parallel_for", ctypes.c_void_p), ("threads", ctypes.c_int32), ("workers", ctypes.c_void_p)]


class Pool:
    """A thread pool made by the code of a module, which it keeps loaded. Its workers end with the last reference to it."""

    def __init__(self, code: NativeCode) -> None:
        """Raises InputError if there is no memory."""
        address = code.pool_create(1, None) if code.pool_create is not None else None
        if not address:
            raise InputError("no memory for a thread pool", hint="load the model with threads=1")
        self.address: int = address
        self._code = code
        # Not at exit: other threads may still be running a model then, and the process takes its threads with it anyway.
        weakref.finalize(self, _destroy, code, address).atexit = False

    def view(self, threads: int) -> View:
        """What a call gets that may use so many threads. It must not outlive the pool."""
        whole = View.from_address(self.address)
        return View(whole.parallel_for, threads, whole.workers)

    def forget(self) -> None:
        """In a child of fork: the workers are gone, and whoever held them."""
        assert self._code.pool_forget is not None
        self._code.pool_forget(self.address)


def _destroy(code: NativeCode, address: int) -> None:
    assert code.pool_destroy is not None
    code.pool_destroy(address)


class _Current:
    """The pool of this process, while a module uses it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may load a module, too
        self.pool: weakref.ref[Pool] | None = None
        self.all = weakref.WeakSet[Pool]()  # also one that a signal handler made while another was being made
        self.watches_forks = False

    def after_fork(self) -> None:
        self.lock = threading.RLock()  # another thread may have held it, which the child does not have
        for pool in self.all:
            pool.forget()


_current = _Current()


def shared_pool(code: NativeCode) -> Pool:
    """The pool of this process; made by `code` if there is none. Raises ArtifactError if the code was made for another kind of pool."""
    version = code.pool_version() if code.pool_version is not None else 1
    if version != VERSION:
        what = f"the artifact's code expects thread pools of version {version}, this runtime has version {VERSION}"
        raise ArtifactError(what, hint="compile the model again")
    with _current.lock:
        pool = _current.pool() if _current.pool is not None else None
        if pool is None:
            _current.all.add(pool := Pool(code))
            _current.pool = weakref.ref(pool)
            _log.debug("made the thread pool of process %d", os.getpid())
            if not _current.watches_forks:
                os.register_at_fork(after_in_child=_current.after_fork)
                _current.watches_forks = True
        return pool
