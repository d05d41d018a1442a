"""The building process, a program: decisions -> loops -> a shared object, or a launch plan with machine code for a GPU."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from tcomp.autotune.features import CandidateSummary
from tcomp.autotune.measurement.worker_process import Answer, reason_of, serve
from tcomp.autotune.tasks import Candidate, Program, Task, instantiate, task_from_json
from tcomp.backends import Backend, backend_of
from tcomp.backends.cpu import CpuBackend
from tcomp.errors import CodegenError, ScheduleError, TargetError
from tcomp.ir import loops as L
from tcomp.ir.expr import Expr, as_expr, dim, evaluate_int, variables
from tcomp.ir.layout import LINE
from tcomp.ir.loops import buffer_size
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.parser import parse_kernel
from tcomp.schedules.knobs import Decisions, decode, encode
from tcomp.target import CpuTarget

_CACHED = 64  # candidates whose loops may be requested again


def build_request(task: Task, decisions: Decisions) -> Answer:
    """The request for machine code: the decisions or, where only this process has the schedule function, the loops that it makes of them.
    Raises what the schedule function raises."""
    if not is_local(task):
        return {**summary_request(task, decisions), "do": "build"}
    candidate = instantiate(task, decisions)
    s, arguments = candidate.schedule, [a.to_json() for a in candidate.arguments]
    return {
        "do": "build loops",
        "target": task.target,
        "dims": task.dims,
        "loops": str(s.kernel),
        "source": str(s.source),
        "arguments": arguments,
    }


def summary_request(task: Task, decisions: Decisions) -> Answer:
    """The request for the `CandidateSummary` of decisions, where another process can find the schedule function."""
    return {"do": "summarize", "task": json.dumps(task.to_json()), "decisions": encode(decisions)}


def is_local(task: Task) -> bool:
    """Whether only this process has the schedule function."""
    return isinstance(task, Program) and not task.portable


def handle(request: Answer) -> Answer:
    """Answer one request: for the harness of a target (see `harness`), or for a candidate (see `summary_request`, `build_request`)."""
    try:
        match request["do"]:
            case "harness":
                code = harness(request["target"], request["threads"], request["flush_bytes"])
                return {"status": "ok", "harness": base64.b64encode(code).decode()}
            case "build loops":
                loops, source = parse_kernel(request["loops"]), parse_kernel(request["source"])
                return built(loops, source, request["arguments"], dict(request["dims"]), backend_of(request["target"]))
            case "summarize":
                return {"status": "ok", "summary": CandidateSummary.of(_candidate(request["task"], request["decisions"])).to_json()}
        c = _candidate(request["task"], request["decisions"])
        return built(c.schedule.kernel, c.schedule.source, [a.to_json() for a in c.arguments], dict(c.task.dims), c.task.backend)
    except (ScheduleError, CodegenError, TargetError) as error:
        return {"status": "refused" if isinstance(error, ScheduleError) else "build", "reason": reason_of(error)}


_candidates: dict[tuple[str, str], Candidate] = {}  # by task and decisions: after its summary a candidate is often built


def _candidate(task: str, decisions: str) -> Candidate:
    if (task, decisions) in _candidates:
        return _candidates[task, decisions]
    found = instantiate(task_from_json(json.loads(task)), decode(decisions))
    _candidates[task, encode(found.decisions)] = found
    if len(_candidates) > _CACHED:
        del _candidates[next(iter(_candidates))]
    return found


def built(kernel: L.Kernel, source: L.Kernel, arguments: list[list[Any]], dims: Mapping[str, int], backend: Backend) -> Answer:
    """The machine code of scheduled loops with what it takes to run it, for the measuring process (`worker.Built`)."""
    extended, temporaries = L.hoist_temporaries(replace(kernel, name="kernel"))
    sizes = {v: dims[v.name] for v in extended.scalars}
    return {
        "status": "ok", "code": base64.b64encode(backend.link_kernel(extended, sizes)).decode(), "arguments": arguments,
        "temporaries": [evaluate_int(buffer_size(b), sizes) for b in temporaries], "scalars": [sizes[v] for v in extended.scalars],
        "reduction_size": _reduction_size(source.body, {v: dims[v.name] for v in source.scalars}),
    }  # fmt: skip


def harness(target: str, threads: int, flush_bytes: int) -> bytes:
    """A shared object with a thread pool and two functions in which its threads share a buffer: `flush` stores to `flush_bytes` bytes,
    `touch` reads a number of cache lines for each thread and sums them up in another buffer."""
    lanes, count = LINE // 4, dim("count")
    other = L.Buffer("other", "int32", (threads, flush_bytes // 4 // threads // lanes, lanes))
    array, sums = L.Buffer("array", "int32", (threads, count, lanes)), L.Buffer("sums", "int32", (threads, lanes))

    def for_each(buffer: L.Buffer, body: Callable[[Expr, Expr, Expr], L.Stmt]) -> L.Stmt:
        def rows(t: Expr) -> L.Stmt:
            return L.loop("i", buffer.shape[1], lambda i: L.loop("v", lanes, lambda v: body(t, i, v), L.VECTORIZED))

        return L.loop("t", threads, rows, L.PARALLEL)

    store_all = for_each(other, lambda t, i, v: L.store(other, [t, i, v], other[t, i, v] + 1))
    read_all = for_each(array, lambda t, i, v: L.store(sums, [t, v], sums[t, v] + array[t, i, v]))
    kernels = [L.Kernel("flush", (other,), (other,), (), store_all), L.Kernel("touch", (array, sums), (sums,), (count,), read_all)]
    return CpuBackend(CpuTarget.parse(target)).link_functions(kernels)


def _reduction_size(stmt: L.Stmt, sizes: Mapping[Expr, int], around: tuple[L.For, ...] = ()) -> int:
    """How many elements are accumulated into one, at most. An extent that is not constant counts by its sizes, or as one."""
    if isinstance(stmt, L.Accumulate):
        used = set(variables(*stmt.indices))
        extents = [as_expr(x.extent) for x in around if x.var not in used]
        return prod(evaluate_int(as_dim(e), sizes) for e in extents if set(variables(e)) <= sizes.keys())
    inside = (*around, stmt) if isinstance(stmt, L.For) else around
    return max((_reduction_size(child, sizes, inside) for child in L.children(stmt)), default=1)


if __name__ == "__main__":
    serve(handle)
