"""How many instructions a function of this process executes: exact where times are not, as on machines that others use, too.

A forked child calls the function, and stops after each instruction (ptrace(2), PTRACE_SINGLESTEP): some 100,000 a second. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_TRACEME, _SINGLESTEP = 0, 9  # requests of ptrace
_UNTRACED = 77  # the status of a child that may not be traced

_libc = ctypes.CDLL(None, use_errno=True)
_ptrace = _libc.ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_ptrace.restype = ctypes.c_long


def instructions(run: Callable[[], Any]) -> int:
    """Those of a call of `run` in a child of this process, without those of a call of nothing. Raises `PermissionError` where processes may
    not be traced, and `RuntimeError` if the child ends early."""
    return _traced(run) - _traced(_nothing)


def _nothing() -> None:
    pass


def _traced(run: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            if _ptrace(_TRACEME, 0, None, None) < 0:
                os._exit(_UNTRACED)
            stop, me = signal.SIGSTOP, os.getpid()
            os.kill(me, stop)
            run()
            os.kill(me, stop)
        finally:
            os._exit(1)  # whatever `run` raises: this is a copy of the process
    try:
        _wait(child)
        steps = 0
        while True:
            if _ptrace(_SINGLESTEP, child, None, None) < 0:
                raise OSError(ctypes.get_errno(), "ptrace")
            if (reason := _wait(child)) == signal.SIGSTOP:
                return steps
            if reason != signal.SIGTRAP:
                raise RuntimeError(f"the child was stopped by signal {reason}")
            steps += 1
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _wait(child: int) -> int:
    """The signal that has stopped a child."""
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _UNTRACED:
        raise PermissionError("processes may not be traced here")
    if not os.WIFSTOPPED(status):
        raise RuntimeError(f"the child ended with status {status}")
    return os.WSTOPSIG(status)
