"""One kernel: its body is lowered, scheduled and compiled; its stages as text; and what graph passes ask of its schedule beforehand."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tcomp import cache
from tcomp.backends.protocol import Backend
from tcomp.errors import CodegenError, ScheduleError
from tcomp.ir.expr import Expr, as_expr, maximum
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.graph import Graph, Node, canonical_graph_text, with_sizes
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Buffer, Kernel, buffer_size, hoist_temporaries
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.parser import parse_graph, parse_layout
from tcomp.schedules.analysis.equality import same_loops
from tcomp.schedules.knobs import Decisions, Knobs

if TYPE_CHECKING:
    from tcomp.schedules.schedule import Schedule

DEFAULT: Decisions = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code of one kernel: `symbol` takes (call, buffers..., temporaries..., scalars...).

    `scalars` are names of symbolic dims; `temporaries` are sizes in bytes, as printed expressions over dims; `schedule` is the
    `Schedule.to_json` of the loops that were compiled, `work` the fields of `schedules.cost.roofline.Work`, printed likewise.
    `in_place` are pairs of numbers of buffers: the first, an input, may be the memory of the second, an output. `versions` are like
    `schedule`, of the loops for certain sizes.
    """

    symbol: str
    code: bytes
    scalars: tuple[str, ...]
    temporaries: tuple[str, ...]
    schedule: str
    work: tuple[str, ...]
    in_place: tuple[tuple[int, int], ...]
    versions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields, as `from_json` reads them."""
        return {**asdict(self), "code": base64.b64encode(self.code).decode()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CompiledKernel:
        """Raises `ValueError`, `KeyError` or `TypeError` for what is not a kernel."""
        code, in_place = base64.b64decode(record["code"], validate=True), tuple((int(n), int(m)) for n, m in record["in_place"])
        scalars, temporaries, todo = (tuple(map(str, record[field])) for field in ("scalars", "temporaries", "work"))
        versions = tuple(map(str, record["versions"]))
        return cls(str(record["symbol"]), code, scalars, temporaries, str(record["schedule"]), todo, in_place, versions)


def compile_kernel(text: str, symbol: str, backend: Backend, decisions: Decisions = DEFAULT) -> CompiledKernel:
    """Lower, schedule (as decided) and compile the KERNEL body printed in `text`."""
    from tcomp.ops import OPERATORS

    try:
        body = parse_graph(text, OPERATORS, {})
        schedule = build_loops(body, symbol, backend, Knobs(decisions))
        return compile_loops(schedule, backend, build_versions(body, schedule, backend))
    except RecursionError as error:
        raise CodegenError("the expressions of a kernel are nested too deeply", hint="compute parts of them on their own") from error


def build_loops(body: Graph, symbol: str, backend: Backend, knobs: Knobs | None = None) -> Schedule:
    """The scheduled loop program of a KERNEL body. Where the default schedule is refused as a whole, the loops stay as lowered, which is
    recorded in its `fallbacks`: a step that cannot be proved costs speed, and does not fail the compilation. Raises `ScheduleError` for
    decisions that are refused."""
    kernel = backend.lower(body, symbol)
    try:
        return backend.schedule(kernel, knobs)
    except ScheduleError as error:
        if knobs is not None and (knobs.given or knobs.decisions):
            raise
        return _as_lowered(kernel, error)


def _as_lowered(kernel: Kernel, refused: ScheduleError) -> Schedule:
    from tcomp.schedules.schedule import Schedule

    logging.getLogger("tcomp").warning("a kernel runs slowly, as lowered: its default schedule was refused: %s", refused.reason)
    s = Schedule(kernel)
    s.fall_back(FallbackKind.LEFT_AS_LOWERED, ", ".join(b.name for b in kernel.outputs), refused.reason)
    return s


def build_versions(body: Graph, schedule: Schedule, backend: Backend) -> list[tuple[Mapping[Expr, int], Schedule]]:
    """The scheduled loop programs for certain sizes of a KERNEL body whose schedule for all sizes is given (see `Backend.versions`), where
    these differ from that."""
    wanted = backend.versions(schedule.source) if body.dims() else ()
    found = [(sizes, build_loops(with_sizes(body, sizes), f"{schedule.source.name}.v{n}", backend)) for n, sizes in enumerate(wanted)]
    return [(sizes, version) for sizes, version in found if not same_loops(schedule.kernel, sizes, version.kernel)]


def compile_loops(schedule: Schedule, backend: Backend, versions: Sequence[tuple[Mapping[Expr, int], Schedule]] = ()) -> CompiledKernel:
    """Machine code of a scheduled kernel, and of others for certain sizes."""
    from tcomp.schedules.cost.roofline import work

    kernel, temporaries = hoist_temporaries(schedule.kernel)
    pairs, sizes = list(backend.reusable_in_place(schedule)), [*map(buffer_size, temporaries)]
    others = list[tuple[Mapping[Expr, int], Kernel]]()
    for known, version in versions:
        loops, needed = hoist_temporaries(version.kernel)
        others.append((known, loops))
        sizes = [as_dim(maximum(as_expr(a), as_expr(b))) for a, b in zip_longest(sizes, map(buffer_size, needed), fillvalue=0)]
        also = {(a.name, b.name) for a, b in backend.reusable_in_place(version)}
        pairs = [pair for pair in pairs if (pair[0].name, pair[1].name) in also]
    if more := [Buffer(f"temporary{n}", "uint8", (size,)) for n, size in enumerate(sizes) if n >= len(temporaries)]:
        kernel = replace(kernel, buffers=(*kernel.buffers, *more), outputs=(*kernel.outputs, *more))
    return CompiledKernel(
        symbol=kernel.name,
        code=backend.emit(kernel, schedule.trace, pairs, others),
        scalars=tuple(v.name for v in kernel.scalars),
        temporaries=tuple(map(str, sizes)),
        schedule=schedule.to_json(),
        work=tuple(str(n) for n in astuple(work(schedule.source))),
        in_place=tuple((kernel.buffers.index(a), kernel.buffers.index(b)) for a, b in pairs),
        versions=tuple(version.to_json() for _, version in versions),
    )


def listings(
    stages: Sequence[str],
    graph: Graph,
    texts: Mapping[Node, str],
    compiled: Mapping[str, CompiledKernel],
    backend: Backend,
    decisions: Mapping[str, Decisions],
) -> dict[str, str]:
    """Stages as text, for `--emit` and `TCOMP_DUMP`: graph, te, schedule, loops, and those of the backend; each distinct kernel once."""

    def listing(stage: str, text: str, body: Graph) -> str:
        from tcomp.ir.te import print_te
        from tcomp.schedules.lowering import tensors_of

        if stage == "te":
            return print_te(tensors_of(body)[1])
        symbol = compiled[text].symbol
        general = build_loops(body, symbol, backend, Knobs(decisions.get(text, {})))
        several = [general, *(s for _, s in build_versions(body, general, backend))]
        if stage == "schedule":
            return "\n".join(str(s.trace) for s in several)
        return "\n".join(str(s.kernel) if stage == "loops" else backend.listing(stage, s) for s in several)

    nodes = {text: node for node, text in reversed(list(texts.items()))}  # the first of each text
    result = {}
    for stage in stages:
        comment = {"c": "//", "cuda": "//", "ptx": "//", "schedule": "#"}.get(stage, ";")
        kernels = (f"{comment} {nodes[text].name}\n{listing(stage, text, nodes[text].bodies[0])}" for text in dict.fromkeys(texts.values()))
        result[stage] = str(graph) if stage == "graph" else "\n".join(kernels)
    return result


def operand_layouts(body: Graph, constants: frozenset[int], backend: Backend, knobs: Knobs | None = None) -> Mapping[int, Layout]:
    """The layouts in which the schedule of a KERNEL body wants those of its inputs that are constants (given by number); none where the
    default schedule is refused."""
    if not constants:
        return {}
    if knobs is not None:
        return backend.operand_layouts(backend.lower(body, "kernel"), constants, knobs)

    def layouts() -> list[tuple[int, str]]:
        try:
            wanted = backend.operand_layouts(backend.lower(body, "kernel"), constants)
        except ScheduleError:  # which `build_loops` will tell
            return []
        return [(n, str(layout)) for n, layout in wanted.items()]

    found = cache.recall("layouts", cache.name(canonical_graph_text(body), str(sorted(constants)), *backend.identity), layouts)
    return {n: parse_layout(text, len(body.inputs[n].shape)) for n, text in found}


def predicted_seconds(body: Graph, backend: Backend) -> float:
    """How long the analytic model says a KERNEL body takes on one core, with its default schedule; symbolic dims are taken at some size."""

    def modelled() -> float:
        from tcomp.schedules.analysis.access_patterns import extent_of

        kernel = build_loops(body, "kernel", backend).kernel
        return float(backend.cost_model().estimate(kernel, {v: extent_of(v) for v in kernel.scalars}).time)

    return cache.recall("seconds", cache.name(canonical_graph_text(body), *backend.identity), modelled)
