"""Native code against the reference interpreter, and where they part; and proofs of the schedules that the code was made by.

`verify` runs a model natively and by the interpreter on the same inputs. Where the outputs differ (or on request) it looks for the
culprit: each graph pass is judged by interpreting its result, then each kernel by running it alone, on the interpreter's values.
`saved_schedules` and `prove_schedules` run nothing: they judge every step from the plain loops of each kernel to those compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tcomp.backends import Backend
from tcomp.backends.workers import compile_kernels
from tcomp.errors import ArtifactError, ScheduleError
from tcomp.ir.dims import bind_dims
from tcomp.ir.expr import Expr
from tcomp.ir.graph import KERNEL, Graph, Node, Value, canonical_graph_text
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Kernel
from tcomp.ir.shape_operands import bind_values, sizes_in
from tcomp.ir.simplify import as_dim
from tcomp.options import CompileOptions, Progress, Report
from tcomp.pipeline import compile_graph, graph_passes, kernel_nodes, package
from tcomp.runtime import Artifact, Module
from tcomp.schedules.schedule import Proof, parse_source, prove
from tcomp.schedules.trace import Trace, read_record

Array = np.ndarray

_TOLERANCES = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-9}  # relative; other types must agree exactly
_PRECISIONS = {"tf32": "float16", "fp16": "float16", "bf16": "bfloat16"}  # products of float32: as exact as this type


@dataclass(frozen=True)
class Comparison:
    """Two arrays that should be equal. `error` is max |got - want| / max |want|, infinite where shapes, dtypes or NaNs differ."""

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the results agree."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class PassResult:
    """What one pass did to the outputs. Where it changed them, `node` is the first node whose value changed (if that can be told)."""

    name: str
    worst: Comparison
    node: str = ""


@dataclass(frozen=True)
class KernelResult:
    """One node of the final graph run alone, natively, on the interpreter's values."""

    name: str
    operators: tuple[str, ...]
    worst: Comparison


@dataclass
class Verification:
    """What `verify` found. `passes` and `kernels` are only filled where it looked for a culprit; they end with the first that is one."""

    outputs: list[Comparison]
    threads: int = 1
    repeatable: bool = True  # one thread gives the same bits
    passes: list[PassResult] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return self.repeatable and all(c.ok for c in (*self.outputs, *(p.worst for p in self.passes), *(k.worst for k in self.kernels)))

    def verdict(self) -> str:
        """One sentence."""
        if self.ok:
            return "native code agrees with the reference"
        if bad := [p for p in self.passes if not p.worst.ok]:
            return f"the pass `{bad[0].name}` changes the result" + (f", first at node `{bad[0].node}`" if bad[0].node else "")
        if wrong := [k for k in self.kernels if not k.worst.ok]:
            return f"the native code of `{wrong[0].name}` ({' + '.join(wrong[0].operators)}) is wrong"
        if all(c.ok for c in self.outputs):
            return f"{self.threads} threads and 1 thread give different bits"
        return "every pass and every kernel alone is right: the fault lies in the memory plan, the entry function or the linking"


def verify(
    graph: Graph, inputs: Mapping[str, Array], options: CompileOptions, *, tolerance: float | None = None, full: bool = False
) -> Verification:
    """Compare the native code of an imported graph with its interpretation. `tolerance` bounds the relative error; by default it depends on
    the dtype (1e-4 for float32, 0 for integers), and on the precision of the target (1e-2 for tf32 and fp16, 5e-2 for bf16). `full` judges
    every pass and kernel even where the outputs agree. Raises `TcompError` as compilation does."""
    tell, precision = options.progress, options.backend.target.precision
    artifact = compile_graph(graph, options)
    module = Module.load(artifact, threads=options.threads).machine_code
    native = module.run(inputs)
    want, _ = _interpret(graph, inputs, "reference", tell)
    result = Verification([compare(name, native[name], want[name], tolerance, precision) for name in want], module.threads)
    if module.threads > 1:
        alone = Module.load(artifact, threads=1).machine_code.run(inputs)
        result.repeatable = all(a.tobytes() == native[name].tobytes() for name, a in alone.items())
    if full or not all(c.ok for c in result.outputs):
        _, before = _interpret(graph, inputs, "values before passes", tell)
        for name, function in graph_passes(options, Report()):
            graph = function(graph)
            outputs, after = _interpret(graph, inputs, f"values after {name}", tell)
            worst = _worst(compare(n, outputs[n], want[n], tolerance) for n in want)
            same = (n for n, a in after.items() if n in before and a.shape == before[n].shape)
            changed = (n for n in same if not compare(n, after[n], before[n], tolerance).ok)
            result.passes.append(PassResult(name, worst, "" if worst.ok else next(changed, "")))
            if not worst.ok:
                return result
            before = after
        for judged in _judge_kernels(graph, options, inputs, tolerance):
            result.kernels.append(judged)
            if not judged.worst.ok:
                break
    return result


def _interpret(graph: Graph, inputs: Mapping[str, Array], stage: str, tell: Progress) -> tuple[dict[str, Array], dict[str, Array]]:
    """The outputs of a graph, and the values of its own nodes, not those inside bodies, by name."""
    own = {v for node in graph.nodes for v in node.outputs}
    values: dict[str, Array] = {}

    def see(value: Value, array: Array) -> None:
        if value in own:
            values[value.name] = array
            tell(stage, len(values), len(own))

    return evaluate_graph(graph, inputs, see), values


def _worst(found: Iterable[Comparison]) -> Comparison:
    return max(found, key=lambda c: (not c.ok, c.error))


def compare(name: str, got: Array, want: Array, tolerance: float | None = None, precision: str | None = None) -> Comparison:
    """Compare an array with what it should be, where products of float32 were computed in `precision` (None: in float32)."""
    if tolerance is None:
        dtype = want.dtype.name
        tolerance = _TOLERANCES.get(_PRECISIONS.get(precision or "", dtype) if dtype == "float32" else dtype, 0.0)
    if got.shape != want.shape or got.dtype != want.dtype:
        return Comparison(name, float("inf"), tolerance)
    if np.array_equal(got, want):
        return Comparison(name, 0.0, tolerance)
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b)).max()
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0) or 1.0
    return Comparison(name, float("inf") if np.isnan(difference) else float(difference / scale), tolerance)


def _judge_kernels(graph: Graph, options: CompileOptions, inputs: Mapping[str, Array], tolerance: float | None) -> Iterator[KernelResult]:
    """Each node of a partitioned graph, in order. A node of control flow is judged as a whole."""
    values: dict[Value, Array] = {v: np.asarray(a) for v, a in graph.constants.items()} | {v: inputs[v.name] for v in graph.inputs}
    shapes = bind_dims([(v.name, v.shape, values[v].shape) for v in graph.inputs])
    dims = bind_values(graph, [values[v] for v in graph.inputs], shapes)
    uses, precision = graph.uses(), options.backend.target.precision
    for number, node in enumerate(graph.nodes, 1):
        options.progress("kernels alone", number, len(graph.nodes))
        given = {v: values[v] for v in node.inputs if v is not None}
        single, renamed = _isolated(node, lambda name, v: Value(name, v.dtype, v.shape, v.layout))
        results = evaluate_graph(single, {renamed[v].name: a for v, a in given.items()}, dims=dims)
        want = [results[renamed[v].name] for v in node.outputs]
        values.update(zip(node.outputs, want, strict=True))
        found = _run_alone(node, given, want, dims, options.backend)
        worst = _worst(compare(v.name, a, b, tolerance, precision) for v, a, b in zip(node.outputs, found, want, strict=True))
        inner = [n for body in node.bodies for n in body.nodes] if node.op is KERNEL else [node]
        yield KernelResult(node.name or node.outputs[0].name, tuple(n.op.name for n in inner), worst)
        uses.subtract(v for v in node.inputs if v is not None)
        for v in given:
            if uses[v] <= 0:
                del values[v]


def _isolated(node: Node, plain: Callable[[str, Value], Value]) -> tuple[Graph, dict[Value, Value]]:
    """A graph of one node, whose values are replaced by `plain(unique name, value)`."""
    renamed = {v: plain(f"{n}:{v.name}", v) for n, v in enumerate(v for v in (*node.inputs, *node.outputs) if v is not None)}
    inputs = tuple(renamed[v] for v in dict.fromkeys(node.inputs) if v is not None)
    outputs = tuple(renamed[v] for v in node.outputs)
    moved = replace(node, inputs=tuple(None if v is None else renamed[v] for v in node.inputs), outputs=outputs)
    return Graph(node.name or "node", inputs, outputs, (moved,)), renamed


def _run_alone(node: Node, given: Mapping[Value, Array], want: list[Array], dims: Mapping[Expr, int], backend: Backend) -> list[Array]:
    """The outputs of one node, by native code; `want` tells their shapes. The node's values become plain arrays in their physical layouts;
    a symbolic dim that no input's shape gives is given by the shape of an input of its own."""
    graph, plain = _isolated(node, lambda name, v: Value(name, v.dtype, v.physical_shape))
    bound = {d for v in graph.inputs for d in v.shape if isinstance(d, Expr) and d.op == "var"}
    needed = sizes_in(graph)
    free = {d: d if n >= 0 else as_dim(0 - d) for d, n in dims.items() if d in needed and d not in bound}
    extra = {Value(f"dim:{d.name}", "bool", (extent,)): d for d, extent in free.items()}
    graph = replace(graph, inputs=(*graph.inputs, *extra))

    texts = {n: canonical_graph_text(n.bodies[0]) for n in kernel_nodes(graph)}
    compiled = compile_kernels(list(texts.values()), backend)
    module = Module.load(package(graph, {n: compiled[text] for n, text in texts.items()}, CompileOptions(backend, threads=1)), threads=1)
    feeds = {plain[v].name: _layout(v).to_physical(np.asarray(a)) for v, a in given.items()}
    feeds |= {v.name: np.zeros(abs(dims[d]), bool) for v, d in extra.items()}
    results = module.run(feeds)
    return [_layout(v).from_physical(results[plain[v].name], a.shape) for v, a in zip(node.outputs, want, strict=True)]


def _layout(value: Value) -> Layout:
    return value.layout or Layout.identity(len(value.shape))


@dataclass(frozen=True, slots=True)
class SavedSchedule:
    """The plain loops of a kernel and the steps that were taken from there; `nodes` names what it computes in the model."""

    nodes: tuple[str, ...]
    source: Kernel
    trace: Trace


def saved_schedules(artifact: Artifact) -> list[SavedSchedule]:
    """The schedules of an artifact's kernels, each distinct one once. Raises `ArtifactError` where they are missing or malformed."""
    entries = artifact.notes.get("schedules")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get("kernels"), list) for e in entries):
        raise ArtifactError("the artifact does not carry its schedules", where=artifact.where, hint="compile the model again")
    found = []
    for entry in entries:
        nodes = tuple(str(name) for name in entry["kernels"])
        try:
            trace, source = read_record(entry.get("schedule"))
            found.append(SavedSchedule(nodes, parse_source(source), trace))
        except ScheduleError as error:
            where = f"{artifact.where}, kernel {', '.join(nodes)[:200]}\n{error.where}".rstrip()
            raise ArtifactError(f"a schedule in the artifact is malformed: {error.what}", where=where, why=error.why) from None
    return found


def prove_schedules(schedules: Sequence[SavedSchedule], progress: Progress) -> Iterator[Proof]:
    """The proof of each schedule, in order."""
    for number, saved in enumerate(schedules):
        progress("proofs", number, len(schedules))
        yield prove(saved.source, saved.trace)
