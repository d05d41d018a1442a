"""All kernels of a model -> machine code: each distinct one is compiled once, in parallel processes, and cached.

The printed text of a kernel (canonical names), the decisions of its schedule that are not the default, the target and the version of
the compiler make its key in the `cache`.

Run as a program, this module is a worker: it reads (kernel, symbol, target, decisions) and writes compiled kernels, one JSON line each. A
worker is a plain subprocess, not one of `multiprocessing`, so that scripts need no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from heapq import heappop, heappush
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Self

import tcomp
from tcomp import cache
from tcomp.backends import backend_of
from tcomp.backends.kernel import DEFAULT, CompiledKernel, compile_kernel
from tcomp.backends.protocol import Backend
from tcomp.errors import CodegenError, TcompError
from tcomp.garbage import seldom_collected
from tcomp.schedules.knobs import Decisions, decode, encode

IN_PROCESS = 3  # up to so many missing kernels are compiled here: starting workers takes longer


def compile_kernels(
    texts: Sequence[str],
    backend: Backend,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    decisions: Mapping[str, Decisions] = MappingProxyType({}),
) -> dict[str, CompiledKernel]:
    """Each distinct text compiled, from the cache where possible. `on_progress` gets (kernels done, kernels in all), `decisions` are those
    of the schedules, by text. Raises `CodegenError`, naming the kernel, when one cannot be compiled."""
    with Compilation(backend) as compilation:
        return compilation.finish(texts, on_progress, decisions)


class Compilation:
    """Kernels on their way to machine code. Those that are known early are begun while graph passes still make others; leaving the context
    ends the processes."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._maker = *backend.identity, backend.toolchain
        self._names: dict[str, str] = {}  # of all texts that were begun, in the cache
        self._missing: dict[str, Decisions] = {}  # those of them that the cache does not hold
        self._results: dict[str, CompiledKernel] = {}
        self._waiting: list[tuple[int, str]] = []  # a heap of what no worker has taken: long texts, which are long compilations, come first
        self._taken = threading.Lock()
        self._futures: list[Future[tuple[str, CompiledKernel]]] = []
        self._idle = SimpleQueue[_Worker]()
        self._pool: ThreadPoolExecutor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self, text: str, decisions: Decisions = DEFAULT) -> None:
        """Compile a kernel, unless that was begun before: in other processes, once there are enough kernels for these."""
        if text in self._names:
            return
        name = self._names[text] = cache.name(text, *self._maker, *([encode(decisions)] if decisions else []))[:32]
        with suppress(ValueError, KeyError, TypeError):  # not stored, or damaged
            if (found := CompiledKernel.from_json(cache.load("kernels", name))).symbol == _symbol(name):
                self._results[text] = found
                return
        self._missing[text] = decisions
        unknown_to_workers = backend_of(self.backend.target) != self.backend  # they get the target alone
        if len(self._missing) > IN_PROCESS and _jobs() > 1 and not unknown_to_workers:
            self._hand_out([text] if self._pool is not None else [*self._missing])

    def finish(
        self,
        texts: Sequence[str],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        decisions: Mapping[str, Decisions] = MappingProxyType({}),
    ) -> dict[str, CompiledKernel]:
        """See `compile_kernels`."""
        wanted = dict.fromkeys(texts)
        for text in sorted(wanted, key=len, reverse=True):
            self.begin(text, decisions.get(text, DEFAULT))
        on_progress(len(wanted.keys() & self._results.keys()), len(wanted))
        for text, compiled in self._compiled():
            cache.store("kernels", self._names[text], compiled.to_json())
            self._results[text] = compiled
            on_progress(len(wanted.keys() & self._results.keys()), len(wanted))
        return {text: self._results[text] for text in wanted}

    def _compiled(self) -> Iterator[tuple[str, CompiledKernel]]:
        if self._pool is not None:
            for future in as_completed(self._futures):
                yield future.result()
            return
        for text, decisions in self._missing.items():
            with _naming(text):
                yield text, compile_kernel(text, _symbol(self._names[text]), self.backend, decisions)

    def _hand_out(self, texts: Sequence[str]) -> None:
        """Let workers compile these, too."""
        if self._pool is None:
            for worker in [_Worker() for _ in range(_jobs())]:
                self._stack.callback(worker.close)
                self._idle.put(worker)
            self._pool = self._stack.enter_context(ThreadPoolExecutor(_jobs()))
            self._stack.callback(self._pool.shutdown, cancel_futures=True)
        for text in texts:
            with self._taken:
                heappush(self._waiting, (-len(text), text))
            self._futures.append(self._pool.submit(self._compile_next))

    def _compile_next(self) -> tuple[str, CompiledKernel]:
        worker = self._idle.get()
        try:
            with self._taken:
                _, text = heappop(self._waiting)
            with _naming(text):
                return text, worker.compile(text, _symbol(self._names[text]), self.backend, self._missing[text])
        finally:
            self._idle.put(worker)


@contextmanager
def _naming(text: str) -> Iterator[None]:
    try:
        yield
    except TcompError as error:
        raise error.restated(type(error), where=f"{error.where}\nin kernel\n{text}".strip()) from error


def _jobs() -> int:
    """Processes that compile at once: `$TCOMP_JOBS`, by default as many as there are cores."""
    given = os.environ.get("TCOMP_JOBS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else max(1, len(os.sched_getaffinity(0)))


def python_environment() -> dict[str, str]:
    """The environment of a Python process that imports this tcomp (with option -P: not one in the working directory)."""
    paths = [str(Path(tcomp.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class _Worker:
    """A compiler subprocess. If it dies (LLVM crashed), the kernel is reported and the next one gets a new process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()

    def compile(self, text: str, symbol: str, backend: Backend, decisions: Decisions) -> CompiledKernel:
        if self.process is None:
            command = [sys.executable, "-P", "-m", "tcomp.backends.workers"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=python_environment())
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([text, symbol, str(backend.target), encode(decisions)]).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            status, self.process = self.process.wait(), None
            raise CodegenError("the compiler process died", why=f"exit status {status}", hint="report this kernel as a bug of tcomp")
        answer = json.loads(line)
        if "error" in answer:
            raise CodegenError(**answer["error"])
        return CompiledKernel.from_json(answer)


@seldom_collected()
def _serve() -> None:
    """The worker's loop."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole process group: end without a traceback
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not get between the answers
    for line in sys.stdin.buffer:
        text, symbol, target, decisions = json.loads(line)
        try:
            answer = compile_kernel(text, symbol, backend_of(target), decode(decisions)).to_json()
        except TcompError as error:
            answer = {"error": error.parts}
        except Exception as error:  # noqa: BLE001  a bug in the compiler: named, not lost with the process
            answer = {"error": {"what": f"internal error: {type(error).__name__}: {error}", "hint": "report this as a bug of tcomp"}}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


def _symbol(name: str) -> str:
    return f"kernel_{name}"


if __name__ == "__main__":
    _serve()
