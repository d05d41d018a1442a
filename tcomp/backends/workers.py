"""All kernels of a model -> machine code: each distinct one is compiled once, in parallel processes, and kept.

The printed text of a kernel (canonical names), the decisions of its schedule that are not the default, the target and the version of
the compiler make its key in the `cache`.

Run as a program, this module is a worker: it reads (kernel, symbol, target, decisions) and writes compiled kernels, one JSON line each. A
worker is a plain subprocess, not a `multiprocessing` child, so that scripts need no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

import tcomp
from tcomp import cache
from tcomp.backends import backend_of
from tcomp.backends.kernel import DEFAULT, CompiledKernel, compile_kernel
from tcomp.backends.protocol import Backend
from tcomp.errors import CodegenError, TcompError
from tcomp.schedules.knobs import Decisions, decode, encode

IN_PROCESS = 3  # up to so many missing kernels are compiled here: starting workers takes longer


def compile_kernels(
    texts: Sequence[str],
    backend: Backend,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    decisions: Mapping[str, Decisions] = MappingProxyType({}),
) -> dict[str, CompiledKernel]:
    """Each distinct text compiled, from the cache where possible. `on_progress` gets (kernels done, kernels in all), `decisions` are those
    of the schedules, by text.

    Raises `CodegenError`, naming the kernel, when one cannot be compiled.
    """
    wanted = {text: _symbol(text, backend, decisions.get(text, DEFAULT)) for text in dict.fromkeys(texts)}
    results = {text: found for text, symbol in wanted.items() if (found := _load(symbol)) is not None}
    missing = [text for text in wanted if text not in results]
    on_progress(len(results), len(wanted))
    for text, compiled in _compiled(missing, wanted, backend, decisions):
        _store(compiled)
        results[text] = compiled
        on_progress(len(results), len(wanted))
    return results


def _compiled(
    missing: Sequence[str], symbols: Mapping[str, str], backend: Backend, decisions: Mapping[str, Decisions]
) -> Iterator[tuple[str, CompiledKernel]]:
    unknown_to_workers = backend_of(backend.target) != backend  # they are told the target alone
    if len(missing) <= IN_PROCESS or _jobs() == 1 or unknown_to_workers:
        for text in missing:
            with _named(text):
                yield text, compile_kernel(text, symbols[text], backend, decisions.get(text, DEFAULT))
        return
    finished: SimpleQueue[tuple[str, CompiledKernel | BaseException]] = SimpleQueue()
    pending = iter(sorted(missing, key=len, reverse=True))  # long texts are long compilations: first, so that none is left over at the end
    lock = threading.Lock()

    def work() -> None:
        worker = _Worker()
        try:
            while True:
                with lock:
                    text = next(pending, None)
                if text is None:
                    return
                try:
                    finished.put((text, worker.compile(text, symbols[text], backend, decisions.get(text, DEFAULT))))
                except TcompError as error:
                    finished.put((text, error))
        finally:
            worker.close()

    with ThreadPoolExecutor(_jobs()) as pool:
        threads = [pool.submit(work) for _ in range(_jobs())]
        try:
            for _ in missing:
                text, result = finished.get()
                if isinstance(result, BaseException):
                    with _named(text):
                        raise result
                yield text, result
        finally:
            with lock:
                pending = iter(())
    for thread in threads:
        thread.result()


@contextmanager
def _named(text: str) -> Iterator[None]:
    try:
        yield
    except TcompError as error:
        raise type(error)(error.what, where=f"{error.where}\nin kernel\n{text}".strip(), why=error.why, hint=error.hint) from error


def _jobs() -> int:
    """Processes that compile at once: `$TCOMP_JOBS`, by default as many as there are cores."""
    given = os.environ.get("TCOMP_JOBS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else max(1, len(os.sched_getaffinity(0)))


class _Worker:
    """A compiler subprocess. If it dies (LLVM crashed), the kernel is reported and the next one gets a new process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def compile(self, text: str, symbol: str, backend: Backend, decisions: Decisions) -> CompiledKernel:
        if self.process is None:
            root = str(Path(tcomp.__file__).parent.parent)
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tcomp.backends.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([text, symbol, str(backend.target), encode(decisions)]).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            status = self.process.wait()
            self.process = None
            raise CodegenError("the compiler process died", why=f"exit status {status}", hint="report this kernel as a bug of tcomp")
        answer = json.loads(line)
        if "error" in answer:
            raise CodegenError(**answer["error"])
        return CompiledKernel.from_json(answer)

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


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
            answer = {"error": {"what": error.what, "where": error.where, "why": error.why, "hint": error.hint}}
        except Exception as error:  # noqa: BLE001  a bug in the compiler: named, not lost with the process
            answer = {"error": {"what": f"internal error: {type(error).__name__}: {error}", "hint": "report this as a bug of tcomp"}}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


# ---------------------------------------------------------------- the cache


def _symbol(text: str, backend: Backend, decisions: Decisions) -> str:
    return "kernel_" + cache.name(text, *backend.identity, backend.toolchain, *([encode(decisions)] if decisions else []))[:32]


def _load(symbol: str) -> CompiledKernel | None:
    try:
        compiled = CompiledKernel.from_json(cache.load("kernels", symbol.removeprefix("kernel_")))
    except (ValueError, KeyError, TypeError):
        return None
    return compiled if compiled.symbol == symbol else None


def _store(compiled: CompiledKernel) -> None:
    cache.store("kernels", compiled.symbol.removeprefix("kernel_"), compiled.to_json())


if __name__ == "__main__":
    _serve()
