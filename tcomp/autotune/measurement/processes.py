"""Processes that work for this one and may die: a program of tcomp at the other end of two pipes, one JSON line each way per request.

A child is a plain subprocess, not one of `multiprocessing`: scripts need no `if __name__ == "__main__"`, and nothing is inherited. It
has a process group of its own, so that Ctrl-C at the terminal does not reach it and all that it started can be killed with it; an
address space of limited size; and it ends when this process does, however that ends, because its pipe is closed then.

What becomes of a request is always an answer: a child that died ("crash") or did not answer in time ("timeout") is replaced.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import tcomp
from tcomp.errors import TcompError

Answer = dict[str, Any]

_START = 120.0  # seconds that a child may take to start, on a busy machine
_FILES = 256 << 20  # bytes that a child may write to one file: what candidates print is kept only to be quoted
_QUOTED = 300  # characters of that
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Child:
    """The program `python -m module`, started when first asked. `memory` bounds its address space (bytes; None: not), `cpus` where it runs."""

    def __init__(self, module: str, memory: int | None, cpus: Sequence[int] = ()) -> None:
        self._command = [sys.executable, "-P", "-m", module, json.dumps({"memory": memory, "cpus": list(cpus)})]
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._said = 0  # bytes of it, before the present request
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._busy = threading.RLock()
        self._closed = False
        self.starts = 0  # the state of a child is that of its latest start

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, request: Mapping[str, Any], timeout: float) -> Answer:
        """The answer, or {"status": "crash" or "timeout", "reason": ...}; then the next request is put to a new child."""
        with self._busy:
            try:
                self.start()
                assert self._process is not None and self._log is not None
                self._said = os.fstat(self._log.fileno()).st_size
                line = _exchange(self._process, json.dumps(request).encode() + b"\n", timeout)
                if line:
                    return dict(json.loads(line))
                if line is not None:
                    return {"status": "crash", "reason": self._how_it_ended()}
                self._kill()
                return {"status": "timeout", "reason": f"no answer within {timeout:g} s"}
            except BaseException as error:
                self._kill()  # what it would answer now, nobody waits for
                if not isinstance(error, Exception):
                    raise
                if self._closed:  # from another thread: whatever that made fail
                    raise ChildError("this process was closed") from error
                return {"status": "error", "reason": reason_of(error)}

    def start(self) -> None:
        """Start the child if there is none. Raises `ChildError` if it does not come up, or was closed."""
        if self._closed:
            raise ChildError("this process was closed")
        if self._process is not None and self._process.poll() is None:
            return
        self._kill()
        paths = [str(Path(tcomp.__file__).parents[1]), *(p or os.getcwd() for p in sys.path)]
        environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, start_new_session=True
        )
        self._finalizer = weakref.finalize(self, _kill_group, self._process)
        self.starts, self._said = self.starts + 1, 0
        if not _exchange(self._process, b"", _START):
            raise ChildError("a process for autotuning does not start", why=self._how_it_ended(), where=" ".join(self._command))

    def close(self) -> None:
        """End the child, whatever it is doing; further requests raise `ChildError`. May be called from any thread."""
        self._closed = True
        if (finalizer := self._finalizer) is not None:
            finalizer()
        with self._busy:  # whoever is asking has seen the pipe close by now
            self._kill()

    def _kill(self) -> None:
        process, log, finalizer = self._process, self._log, self._finalizer
        self._process = self._log = self._finalizer = None
        if finalizer is not None:
            finalizer()
        if process is not None:
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(OSError):
                    pipe.close()
        if log is not None:
            log.close()

    def _how_it_ended(self) -> str:
        """The status of a child that closed its pipe, and the end of what it said to stderr since it was asked."""
        process, log = self._process, self._log
        if process is None or log is None:
            return "it was closed"
        try:
            status = process.wait(5)
        except subprocess.TimeoutExpired:
            status = 0
        end = os.fstat(log.fileno()).st_size
        begin = max(self._said, end - _QUOTED)
        said = " ".join(os.pread(log.fileno(), end - begin, begin).decode(errors="replace").split())
        self._kill()
        ended = f"killed by {_signal_name(-status)}" if status < 0 else f"exit status {status}"
        return f"{ended}; {said}" if said else ended


class ChildError(TcompError):
    """A process that autotuning needs cannot be started, or was closed."""


def _exchange(process: subprocess.Popen[bytes], data: bytes, timeout: float) -> bytes | None:
    """Write, and read one line: empty if the child closed its pipe, None if it took too long. Both at once, as pipes are short."""
    assert process.stdin is not None and process.stdout is not None
    source, target, deadline, line = process.stdout.fileno(), process.stdin.fileno(), time.monotonic() + timeout, b""
    os.set_blocking(target, False)
    rest = memoryview(data)
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        readable, writable, _ = select.select([source], [target] if rest else [], [], left)
        if writable:
            try:
                rest = rest[os.write(target, rest) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                rest = memoryview(b"")
        if readable:
            piece = os.read(source, 1 << 20)
            if not piece:
                return b""
            line += piece
    return line


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---------------------------------------------------------------- in the child


def serve(handle: Callable[[Answer], Answer], ready: Callable[[], object] = lambda: None) -> None:
    """Be a child: answer requests until the pipe is closed. What `handle` raises is an answer as well ("memory", or "error"). `ready` is
    called first; if it raises a `TcompError`, there will be no child."""
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever is asking decides when to end
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries and candidates print must not get between the answers
    limits = {resource.RLIMIT_AS: options["memory"], resource.RLIMIT_FSIZE: _FILES, resource.RLIMIT_CORE: 0}
    for limit, value in ((limit, value) for limit, value in limits.items() if value is not None):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    if options["cpus"]:
        with suppress(OSError):
            os.sched_setaffinity(0, options["cpus"])
    try:
        ready()
    except TcompError as error:
        sys.exit(reason_of(error))
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    answers.write(b"{}\n")
    answers.flush()
    while True:
        request = json.loads(requests.get())
        try:
            answer = handle(request)
        except MemoryError as error:
            answer = {"status": "memory", "reason": str(error) or "out of memory"}
        except Exception as error:  # noqa: BLE001  whatever it is, it is the candidate's
            answer = {"status": "error", "reason": reason_of(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _receive(requests: SimpleQueue[bytes]) -> None:
    """Read requests as they come, also while one is worked on: so the end of the pipe is noticed, and ends this process."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def reason_of(error: BaseException) -> str:
    """Why something failed, in one line."""
    said = f"{error.what}: {error.why}" if isinstance(error, TcompError) and error.why else str(error)
    named = said if isinstance(error, TcompError) else f"{type(error).__name__}: {said}"
    return " ".join(named.split())[:500]
