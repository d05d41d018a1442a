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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

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
    maker = *backend.identity, backend.toolchain
    wanted = {t: cache.name(t, *maker, *([encode(decisions[t])] if decisions.get(t) else []))[:32] for t in dict.fromkeys(texts)}
    results: dict[str, CompiledKernel] = {}
    for text, name in wanted.items():
        with suppress(ValueError, KeyError, TypeError):  # not stored, or damaged
            if (found := CompiledKernel.from_json(cache.load("kernels", name))).symbol == _symbol(name):
                results[text] = found
    missing = [text for text in wanted if text not in results]
    on_progress(len(results), len(wanted))
    for text, compiled in _compiled(missing, wanted, backend, decisions):
        cache.store("kernels", wanted[text], compiled.to_json())
        results[text] = compiled
        on_progress(len(results), len(wanted))
    return results


def _compiled(
    missing: Sequence[str], names: Mapping[str, str], backend: Backend, decisions: Mapping[str, Decisions]
) -> Iterator[tuple[str, CompiledKernel]]:
    unknown_to_workers = backend_of(backend.target) != backend  # they get the target alone
    if len(missing) <= IN_PROCESS or _jobs() == 1 or unknown_to_workers:
        for text in missing:
            with _naming(text):
                yield text, compile_kernel(text, _symbol(names[text]), backend, decisions.get(text, DEFAULT))
        return
    with ExitStack() as stack:
        idle = SimpleQueue[_Worker]()
        for worker in [_Worker() for _ in range(_jobs())]:
            stack.callback(worker.close)
            idle.put(worker)

        def compiled(text: str) -> tuple[str, CompiledKernel]:
            worker = idle.get()
            try:
                with _naming(text):
                    return text, worker.compile(text, _symbol(names[text]), backend, decisions.get(text, DEFAULT))
            finally:
                idle.put(worker)

        pool = stack.enter_context(ThreadPoolExecutor(_jobs()))
        stack.callback(pool.shutdown, cancel_futures=True)
        # Long texts are long compilations: first, so that none is left over at the end.
        for future in as_completed([pool.submit(compiled, text) for text in sorted(missing, key=len, reverse=True)]):
            yield future.result()


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
