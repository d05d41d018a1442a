"""Kernels -> machine code: each distinct kernel of a model is lowered, scheduled and compiled once, in parallel processes.

The printed text of a kernel (canonical names), the decisions of its schedule that are not the default, the target and the version of
the compiler make its key in the `cache`.

Run as a program, this module is a worker: it reads (kernel, target, decisions) and writes compiled kernels, one JSON line each. A worker is
a plain subprocess, not a `multiprocessing` child, so that scripts need no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tcomp
from tcomp import cache
from tcomp.codegen.cuda import nvrtc
from tcomp.errors import CodegenError, TcompError
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, as_dim, as_expr
from tcomp.ir.graph import Graph, canonical_graph_text
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Buffer, Kernel, hoist_temporaries
from tcomp.ir.text.graph_parser import parse_graph, parse_layout
from tcomp.schedules.knobs import Decisions, Knobs, decode, encode
from tcomp.target import Target

if TYPE_CHECKING:
    from tcomp.schedules.schedule import Schedule

_DEFAULT: Decisions = MappingProxyType({})

IN_PROCESS = 3  # up to so many missing kernels are compiled here: starting workers takes longer


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code of one kernel: `symbol` takes (pool, buffers..., temporaries..., scalars...).

    `scalars` are names of symbolic dims; `temporaries` are sizes in bytes, as printed expressions over dims; `schedule` is what
    `Schedule.to_json` says of the loops that the code was made of, `work` the fields of `schedules.work.Work`, printed likewise.
    `overwrites` are pairs of numbers of buffers: the first, an input, may be the memory of the second, an output.
    """

    symbol: str
    code: bytes
    scalars: tuple[str, ...]
    temporaries: tuple[str, ...]
    schedule: str
    work: tuple[str, ...]
    overwrites: tuple[tuple[int, int], ...]


def operand_layouts(body: Graph, constants: frozenset[int], target: Target, knobs: Knobs | None = None) -> Mapping[int, Layout]:
    """The layouts in which the schedule of a KERNEL body wants those of its inputs that are constants (given by number)."""
    if not constants:
        return {}
    if knobs is not None:
        return _operand_layouts(body, constants, target, knobs)
    name = cache.name(canonical_graph_text(body), str(sorted(constants)), str(target), cache.source_version())
    kept = cache.load("layouts", name)
    if kept is None:
        kept = [(n, str(layout)) for n, layout in _operand_layouts(body, constants, target, None).items()]
        cache.store("layouts", name, kept)
    return {n: parse_layout(text, len(body.inputs[n].shape)) for n, text in kept}


def _operand_layouts(body: Graph, constants: frozenset[int], target: Target, knobs: Knobs | None) -> Mapping[int, Layout]:
    from tcomp.schedules.cpu import default as cpu
    from tcomp.schedules.gpu import default as gpu
    from tcomp.schedules.gpu.precision import with_precision
    from tcomp.schedules.lowering import lower_graph

    kernel = with_precision(lower_graph(body, "kernel"), target.precision)
    return gpu.operand_layouts(kernel, constants, target) if target.kind == "cuda" else cpu.operand_layouts(kernel, constants, target, knobs)


def predicted_seconds(body: Graph, target: Target) -> float:
    """How long the analytic model says a KERNEL body takes on one core, with its default schedule; symbolic dims are taken at some size."""
    name = cache.name(canonical_graph_text(body), str(target), cache.source_version())
    kept = cache.load("seconds", name)
    if kept is None:
        from tcomp.schedules.analysis.access_patterns import extent_of
        from tcomp.schedules.cost.cpu import estimate

        kernel = build_loops(body, "kernel", target).kernel
        kept = estimate(kernel, target, {v: extent_of(v) for v in kernel.scalars}).time
        cache.store("seconds", name, kept)
    return float(kept)


def default_schedule(kernel: Kernel, target: Target, knobs: Knobs | None = None) -> Schedule:
    """The default schedule of a kernel as lowered, for the kind of machine; `knobs` may decide otherwise."""
    from tcomp.schedules.cpu import default as cpu
    from tcomp.schedules.gpu import default as gpu

    return gpu.schedule(kernel, target, knobs) if target.kind == "cuda" else cpu.schedule(kernel, target, knobs)


def build_loops(graph: Graph, symbol: str, target: Target, knobs: Knobs | None = None) -> Schedule:
    """The scheduled loop program of a KERNEL body."""
    from tcomp.schedules.gpu.precision import with_precision
    from tcomp.schedules.lowering import lower_graph

    return default_schedule(with_precision(lower_graph(graph, symbol), target.precision), target, knobs)


def compile_loops(schedule: Schedule, target: Target) -> CompiledKernel:
    """Machine code of a scheduled kernel."""
    from tcomp.codegen.cuda.launch_plan import kernel_code
    from tcomp.codegen.llvm.kernel import emit_kernel
    from tcomp.codegen.llvm.machine_code import compile_ir
    from tcomp.schedules.analysis.in_place import reusable_in_place
    from tcomp.schedules.cost.roofline import work

    kernel, temporaries = hoist_temporaries(schedule.kernel)
    over = reusable_in_place(schedule.kernel) if target.kind == "cpu" else []
    if target.kind == "cuda":
        code = kernel_code(kernel, target, schedule.trace)
    else:
        code = compile_ir(emit_kernel(kernel, target, over), target)
    scalars, sizes = tuple(v.name for v in kernel.scalars), tuple(str(buffer_size(b)) for b in temporaries)
    todo = tuple(str(n) for n in astuple(work(schedule.source)))
    overwrites = tuple((kernel.buffers.index(a), kernel.buffers.index(b)) for a, b in over)
    return CompiledKernel(kernel.name, code, scalars, sizes, schedule.to_json(), todo, overwrites)


def compile_kernel(text: str, symbol: str, target: Target, decisions: Decisions = _DEFAULT) -> CompiledKernel:
    """Lower, schedule (as decided) and compile the KERNEL body printed in `text`."""
    from tcomp.ops import OPERATORS

    return compile_loops(build_loops(parse_graph(text, OPERATORS, {}), symbol, target, Knobs(decisions)), target)


def object_code(ir_text: str, target: Target) -> bytes:
    """LLVM IR that is no kernel, compiled to a relocatable object, or found in the cache."""
    name = cache.name(ir_text, str(target), cache.source_version())
    kept = cache.load("objects", name)
    if kept is None:
        from tcomp.codegen.llvm.machine_code import compile_ir

        kept = base64.b64encode(compile_ir(ir_text, target)).decode()
        cache.store("objects", name, kept)
    return base64.b64decode(kept)


def buffer_size(buffer: Buffer) -> Dim:
    """Bytes of a buffer."""
    size = as_expr(itemsize(buffer.dtype))
    for extent in buffer.shape:
        size = size * as_expr(extent)
    return as_dim(size)


def compile_kernels(
    texts: Sequence[str],
    target: Target,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    decisions: Mapping[str, Decisions] = MappingProxyType({}),
) -> dict[str, CompiledKernel]:
    """Each distinct text compiled, from the cache where possible. `on_progress` gets (kernels done, kernels in all), `decisions` are those
    of the schedules, by text.

    Raises `CodegenError`, naming the kernel, when one cannot be compiled.
    """
    wanted = {text: _symbol(text, target, decisions.get(text, {})) for text in dict.fromkeys(texts)}
    results = {text: found for text, symbol in wanted.items() if (found := _load(symbol)) is not None}
    missing = [text for text in wanted if text not in results]
    on_progress(len(results), len(wanted))
    for text, compiled in _compiled(missing, wanted, target, decisions):
        _store(compiled)
        results[text] = compiled
        on_progress(len(results), len(wanted))
    return results


def _compiled(
    missing: Sequence[str], symbols: Mapping[str, str], target: Target, decisions: Mapping[str, Decisions]
) -> Iterator[tuple[str, CompiledKernel]]:
    if len(missing) <= IN_PROCESS or _jobs() == 1:
        for text in missing:
            with _named(text):
                yield text, compile_kernel(text, symbols[text], target, decisions.get(text, {}))
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
                    finished.put((text, worker.compile(text, symbols[text], target, decisions.get(text, {}))))
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

    def compile(self, text: str, symbol: str, target: Target, decisions: Decisions) -> CompiledKernel:
        if self.process is None:
            root = str(Path(tcomp.__file__).parent.parent)
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tcomp.kernels"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([text, symbol, str(target), encode(decisions)]).encode() + b"\n")
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
        return _decoded(answer)

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
            answer = _encoded(compile_kernel(text, symbol, Target.parse(target), decode(decisions)))
        except TcompError as error:
            answer = {"error": {"what": error.what, "where": error.where, "why": error.why, "hint": error.hint}}
        except Exception as error:  # noqa: BLE001  a bug in the compiler: named, not lost with the process
            answer = {"error": {"what": f"internal error: {type(error).__name__}: {error}", "hint": "report this as a bug of tcomp"}}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


# ---------------------------------------------------------------- the cache


def _symbol(text: str, target: Target, decisions: Decisions) -> str:
    tool = nvrtc.version() if target.kind == "cuda" else ""
    return "kernel_" + cache.name(text, str(target), cache.source_version(), tool, *([encode(decisions)] if decisions else []))[:32]


def _load(symbol: str) -> CompiledKernel | None:
    try:
        compiled = _decoded(cache.load("kernels", symbol.removeprefix("kernel_")))
    except (ValueError, KeyError, TypeError):
        return None
    return compiled if compiled.symbol == symbol else None


def _store(compiled: CompiledKernel) -> None:
    cache.store("kernels", compiled.symbol.removeprefix("kernel_"), _encoded(compiled))


def _encoded(compiled: CompiledKernel) -> dict[str, Any]:
    return {**asdict(compiled), "code": base64.b64encode(compiled.code).decode()}


def _decoded(record: Mapping[str, Any]) -> CompiledKernel:
    code = base64.b64decode(record["code"], validate=True)
    scalars, temporaries, todo = (tuple(map(str, record[field])) for field in ("scalars", "temporaries", "work"))
    overwrites = tuple((int(n), int(m)) for n, m in record["overwrites"])
    return CompiledKernel(str(record["symbol"]), code, scalars, temporaries, str(record["schedule"]), todo, overwrites)


if __name__ == "__main__":
    _serve()
