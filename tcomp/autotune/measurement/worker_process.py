"""Worker processes that may die: a program of tcomp at the other end of a socket, one JSON message each way per request. It is a plain
subprocess, not one of `multiprocessing`: scripts need no `if __name__ == "__main__"`, and nothing is inherited. It has a process group of
its own, so that Ctrl-C at the terminal does not reach it and all that it started is killed with it, and ends when this process does, as its
socket is closed then. Each request gets an answer: a worker that died ("crash") or did not answer in time ("timeout") is replaced."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import tcomp
from tcomp.errors import TcompError

Answer = dict[str, Any]

_START = 120.0  # seconds that a worker may take to start, on a busy machine
_LOG_LIMIT = 256 << 20  # bytes that a worker may write to one file: what candidates print is only quoted
_QUOTED = 300  # characters of that
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorkerError(TcompError):
    """A process that autotuning needs cannot be started, or was closed."""


class WorkerProcess:
    """The program `python -m module`, started at the first request, with an address space of `memory` bytes at most, on these `cpus`."""

    def __init__(self, module: str, memory: int | None, cpus: Sequence[int] = ()) -> None:
        self._command, self._options = [sys.executable, "-P", "-m", module], {"memory": memory, "cpus": list(cpus)}
        self._running: _Running | None = None
        self._busy, self._closed = threading.RLock(), False

    @property
    def pid(self) -> int | None:
        """The number of the process, if it runs."""
        running = self._running
        return running.process.pid if running is not None and running.process.poll() is None else None

    def ask(self, request: Mapping[str, Any], timeout: float) -> Answer:
        """The answer, or {"status": "crash" or "timeout", "reason": ...}, after which the next request goes to a new process."""
        with self._busy:
            try:
                running = self._start()
                running.log_start = os.fstat(running.log.fileno()).st_size
                running.connection.send_bytes(json.dumps(request).encode())
                if running.connection.poll(timeout):
                    return dict(json.loads(running.connection.recv_bytes()))
                self._end()
                return {"status": "timeout", "reason": f"no answer within {timeout:g} s"}
            except (EOFError, ConnectionError):
                return {"status": "crash", "reason": self._exit_reason()}
            except BaseException as error:
                self._end()  # nobody waits for its answer any more
                if not isinstance(error, Exception):
                    raise
                if self._closed:  # by another thread, which made this fail
                    raise WorkerError("this process was closed") from error
                return {"status": "error", "reason": reason_of(error)}

    def _start(self) -> _Running:
        """The process, started if it does not run. Raises `WorkerError` if it does not come up, or was closed."""
        if self._closed:
            raise WorkerError("this process was closed")
        if self._running is not None and self.pid:
            return self._running
        self._end()
        self._running = running = _Running(self._command, self._options)
        with suppress(EOFError, ConnectionError):
            if running.connection.poll(_START):
                running.connection.recv_bytes()  # it is ready
                return running
        raise WorkerError("a process for autotuning does not start", why=self._exit_reason(), where=" ".join(self._command))

    def close(self) -> None:
        """End the process, whatever it is doing; further requests raise `WorkerError`. May be called from any thread."""
        self._closed = True
        if (running := self._running) is not None:
            running.kill()
        with self._busy:  # whoever is asking has seen the socket close by now
            self._end()

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.kill()
            running.connection.close()
            running.log.close()

    def _exit_reason(self) -> str:
        """The status of a process that closed its socket, and the end of what it printed since it was asked."""
        if (running := self._running) is None:
            return "it was closed"
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(5)
        status = running.process.returncode or 0
        names = {-int(s): s.name for s in signal.Signals}
        ended = f"killed by {names.get(status, f'signal {-status}')}" if status < 0 else f"exit status {status}"
        log = running.log.fileno()
        printed = os.pread(log, _QUOTED, max(running.log_start, os.fstat(log).st_size - _QUOTED)).decode(errors="replace").split()
        self._end()
        return "; ".join(filter(None, (ended, " ".join(printed))))


class _Running:
    """A process that was started: the socket to it, and the file that it prints to. It is killed when this object is no longer used."""

    def __init__(self, command: Sequence[str], options: Mapping[str, Any]) -> None:
        paths = [str(Path(tcomp.__file__).parents[1]), *(p or os.getcwd() for p in sys.path)]
        environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self.log_start = 0  # where in the log the present request begins
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [*command, json.dumps({**options, "socket": theirs.fileno()})], pass_fds=[theirs.fileno()], env=environment,
                stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True,
            )  # fmt: skip
        self.kill = weakref.finalize(self, _kill_group, self.process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(handle: Callable[[Answer], Answer]) -> None:
    """The main loop of a worker: answer requests until the socket is closed. An exception of `handle` is answered as "memory" or
    "error"."""
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever is asking decides when to end
    connection: Connection = Connection(options["socket"])
    for limit, value in ((resource.RLIMIT_AS, options["memory"]), (resource.RLIMIT_FSIZE, _LOG_LIMIT), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        if value is not None:
            resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    if options["cpus"]:
        with suppress(OSError):
            os.sched_setaffinity(0, options["cpus"])
    requests: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:  # also while a request is worked on: so the end of the socket is noticed, and ends this process
        with suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv_bytes())
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    connection.send_bytes(b"{}")
    while True:
        request = json.loads(requests.get())
        try:
            answer = handle(request)
        except MemoryError as error:
            answer = {"status": "memory", "reason": str(error) or "out of memory"}
        except Exception as error:  # noqa: BLE001  whatever it is, the candidate caused it
            answer = {"status": "error", "reason": reason_of(error)}
        connection.send_bytes(json.dumps(answer).encode())


def reason_of(error: BaseException) -> str:
    """Why something failed, in one line."""
    said = f"{error.what}: {error.why}" if isinstance(error, TcompError) and error.why else str(error)
    named = said if isinstance(error, TcompError) else f"{type(error).__name__}: {said}"
    return " ".join(named.split())[:500]
