"""The compiler on one page: an ONNX model goes in, an artifact comes out. Each line of `compile_graph` is one step; read it first."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

import tcomp
from tcomp.assemble import assemble, collect_weights, suited_to
from tcomp.codegen import elf
from tcomp.codegen.llvm import thread_pool
from tcomp.codegen.llvm.entry import emit_program
from tcomp.errors import InputError, UnsupportedError
from tcomp.facts import kernel_facts
from tcomp.ir.expr import Dim, Expr, as_dim, bounds, variables
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, Node, Value, canonical_graph_text
from tcomp.ir.layout import Layout
from tcomp.ir.program import Program
from tcomp.ir.text.parser import parse_expr
from tcomp.kernels import CompiledKernel, compile_kernels, object_code, operand_layouts, predicted_seconds
from tcomp.passes.algorithms import as_suggested, choose_algorithms
from tcomp.passes.attention import Blocks, join_attention
from tcomp.passes.canonicalize import canonicalize
from tcomp.passes.cse import merge_equal
from tcomp.passes.dce import eliminate_dead
from tcomp.passes.dead_elements import eliminate_dead_elements
from tcomp.passes.fold import fold_constants
from tcomp.passes.layout import choose_layouts
from tcomp.passes.memory_plan import plan_memory
from tcomp.passes.partition import partition
from tcomp.passes.quantized import use_bytes
from tcomp.passes.rewrite import Notes
from tcomp.passes.runner import run_passes
from tcomp.passes.simplify import simplify
from tcomp.runtime import Artifact, Module, read_artifact, write_artifact
from tcomp.schedules.knobs import Decisions, Knobs
from tcomp.target import Target

if TYPE_CHECKING:
    import onnx

    from tcomp.autotune.database.lookup import Lookup

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass
class Report:
    """What happened during a compilation: seconds per stage, notes on what was not done and why, texts of the stages asked for."""

    seconds: dict[str, float] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    not_fused: list[str] = field(default_factory=list)
    stages: dict[str, str] = field(default_factory=dict)
    kernels: int = 0
    distinct_kernels: int = 0
    arena: Dim = 0
    arena_lower_bound: int | None = None
    tuned: int = 0  # kernels whose schedules were decided otherwise than by default
    not_followed: list[tuple[str, str]] = field(default_factory=list)  # kernels with records that are not used, and why

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def compile(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    target: Target | str | None = None,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    threads: int | None = None,
    values: Mapping[str, npt.ArrayLike] | None = None,
    progress: Progress | None = None,
    database: str | os.PathLike[str] | None = None,
    direct: bool = False,
) -> Module:
    """Compile an ONNX model for this machine and load it.

    `model` is a path, the bytes of a file, or a `ModelProto`. `target` defaults to this machine. `shapes` fixes input shapes by input
    name, `dims` fixes (int) or bounds ((lowest, highest)) symbolic dims by name; the others stay symbolic. `threads` is the number of
    threads of `Module.run` (default: all cores the process may use). `values` fixes inputs for good (by name), so that shapes and
    branches may depend on them; they are no longer inputs then. `database` is a file that `tcomp.tune` wrote: kernels that it has
    records for are scheduled as these say. `direct` does without Winograd's and Strassen's algorithms: slower, more exact,
    with less memory for weights (see `passes.algorithms`).

    Raises `ImportModelError` for a file that is no valid model, `UnsupportedError` listing everything tcomp cannot compile,
    `TargetError` for an unknown target.
    """
    options: dict[str, Any] = {"values": values, "progress": progress, "database": database, "direct": direct}
    artifact, _ = compile_model(model, target, shapes, dims, threads, **options)
    return Module.load(artifact, threads=threads)


def compile_model(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    target: Target | str | None = None,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    threads: int | None = None,
    *,
    values: Mapping[str, npt.ArrayLike] | None = None,
    emit: Sequence[str] = (),
    progress: Progress | None = None,
    database: str | os.PathLike[str] | None = None,
    direct: bool = False,
    file: BinaryIO | None = None,
) -> tuple[Artifact, Report]:
    """Compile an ONNX model to an artifact (see `compile`). `emit` names stages whose text goes into the report:
    graph, te, schedule, loops, and llvm, asm for a CPU, cuda, ptx, sass-stats for CUDA. The artifact is written to `file`, open for writing
    and reading, from its start (default: an unnamed one), and mapped from there."""
    from tcomp.frontends.onnx import import_model  # a fifth of what the compiler takes to load, and nothing that `tcomp.build` needs

    target = target if isinstance(target, Target) else Target.parse(target or "cpu")
    report = Report()
    with report.timed("import"):
        graph = import_model(model, shapes, dims, {name: np.asarray(v) for name, v in (values or {}).items()})
    decide = None
    if database is not None:
        from tcomp.autotune.database.lookup import recorded  # which itself compiles

        decide = recorded(database, target, threads)
    return compile_graph(graph, target, threads, report, emit, progress, decide, direct, file), report


def compile_graph(
    graph: Graph,
    target: Target,
    threads: int | None = None,
    report: Report | None = None,
    emit: Sequence[str] = (),
    progress: Progress | None = None,
    decide: Lookup | None = None,
    direct: bool = False,
    file: BinaryIO | None = None,
) -> Artifact:
    """Graph -> artifact. `decide` says how kernels are scheduled; by default as the analytic model suggests. `direct`: see `compile`, `file`:
    see `compile_model`."""
    report, tell = report or Report(), progress or (lambda stage, done, total: None)
    dump = Path(os.environ["TCOMP_DUMP"]) if os.environ.get("TCOMP_DUMP") else None
    verify = bool(os.environ.get("TCOMP_VERIFY"))
    tell("graph", 0, 1)
    with report.timed("passes"):
        graph, _ = run_passes(graph, graph_passes(target, report, decide, direct), verify=verify, dump=dump)
    return compile_partitioned(graph, target, threads, report, emit, progress, decide, file)


def compile_partitioned(
    graph: Graph,
    target: Target,
    threads: int | None,
    report: Report,
    emit: Sequence[str] = (),
    progress: Progress | None = None,
    decide: Lookup | None = None,
    file: BinaryIO | None = None,
) -> Artifact:
    """Graph after all passes -> artifact."""
    tell = progress or (lambda stage, done, total: None)
    dump = Path(os.environ["TCOMP_DUMP"]) if os.environ.get("TCOMP_DUMP") else None
    target = suited_to(target, graph)
    nodes = list(kernel_nodes(graph))
    texts = {node: canonical_graph_text(node.bodies[0]) for node in nodes}
    decisions = _decisions(graph, texts, report, decide)
    with report.timed("kernels"):
        compiled = compile_kernels(list(texts.values()), target, lambda done, total: tell("kernels", done, total), decisions)
    with report.timed("link"):
        artifact = package(graph, {node: compiled[texts[node]] for node in nodes}, target, threads, report, file)
    if emit or dump is not None:
        from tcomp.listings import listings  # schedules and code generators, which a compilation out of the cache does without

        report.stages.update(listings(emit, graph, texts, compiled, target, decisions))
    if dump is not None:
        stages = ("graph", "te", "schedule", "loops", *(("cuda",) if target.kind == "cuda" else ("llvm", "asm")))
        for stage, text in listings(stages, graph, texts, compiled, target, decisions).items():
            (dump / f"90-{stage}.txt").write_text(text, encoding="utf-8")
    tell("done", 1, 1)
    return artifact


def graph_passes(
    target: Target, report: Report, decide: Lookup | None = None, direct: bool = False
) -> list[tuple[str, Callable[[Graph], Graph]]]:
    """Graph -> Graph, in order. Each is verified, timed and dumped on request by the runner."""
    notes = report.notes
    halos = target.kind == "cpu"  # one thread of a GPU would store all the zeros

    def layouts(body: Graph, constants: frozenset[int]) -> Mapping[int, Layout]:
        return operand_layouts(body, constants, target, Knobs(decide(body, constants).decisions) if decide else None)

    def attention(g: Graph) -> Graph:
        if target.kind == "cpu":
            return join_attention(g, target.l2, notes)
        from tcomp.schedules.gpu import flash_attention

        return join_attention(g, target.shared_of_block, notes, Blocks(flash_attention.MIN_SM_ROWS * target.gpu.sms, flash_attention.WIDTHS))

    def algorithms(g: Graph) -> Graph:
        choose = decide.algorithm if decide else as_suggested
        return choose_algorithms(g, target.lanes(32), notes, choose, target.streamed, direct)

    return [
        ("use-bytes", lambda g: use_bytes(g, notes)),
        ("fold", lambda g: fold_constants(g, notes)),
        ("eliminate-dead-elements", lambda g: eliminate_dead_elements(g, notes)),
        ("canonicalize", lambda g: canonicalize(g, notes)),
        ("simplify", lambda g: simplify(g, notes)),
        ("fold-again", lambda g: fold_constants(g, notes)),
        ("merge-equal", merge_equal),
        ("eliminate-dead", eliminate_dead),
        *([("algorithms", algorithms), ("merge-again", merge_equal)] if target.kind == "cpu" else []),
        ("attention", attention),
        ("partition", lambda g: partition(g, report.not_fused.append, halos, quotients=halos)),
        ("layout", lambda g: choose_layouts(g, layouts, halos, (lambda body: predicted_seconds(body, target)) if halos else None)),
    ]


def kernel_nodes(graph: Graph) -> Iterator[Node]:
    """All KERNEL nodes, those inside control flow included, in program order."""
    return (node for node, _ in kernel_inputs(graph))


def kernel_inputs(graph: Graph) -> Iterator[tuple[Node, frozenset[int]]]:
    """`kernel_nodes`, each with the numbers of its inputs that are constants."""
    for node in graph.nodes:
        if node.op is KERNEL:
            yield node, frozenset(n for n, v in enumerate(node.inputs) if v in graph.constants)
        elif node.op in (IF, LOOP):
            for body in node.bodies:
                yield from kernel_inputs(body)


def _decisions(graph: Graph, texts: Mapping[Node, str], report: Report, decide: Lookup | None) -> dict[str, Decisions]:
    """What was decided for the kernels of a graph, by text, where that is not the default; with notes on what was not followed."""
    found: dict[str, Decisions] = {}
    for node, constants in kernel_inputs(graph) if decide is not None else ():
        assert decide is not None
        chosen = decide(node.bodies[0], constants)
        if chosen.note:
            report.notes.add(node, chosen.note)
            report.not_followed.append((node.name, chosen.note))
        if chosen.decisions:
            found.setdefault(texts[node], chosen.decisions)
            report.tuned += 1
    return found


def package(
    graph: Graph,
    kernels: Mapping[Node, CompiledKernel],
    target: Target,
    threads: int | None,
    report: Report,
    file: BinaryIO | None = None,
) -> Artifact:
    """A partitioned graph and its compiled kernels -> artifact: memory plan, entry function, linking, weights.

    The artifact is `file` (default: an unnamed one), mapped: weights are in memory once, as pages of that file.
    """
    if threads is not None and not 1 <= threads <= 4096:
        raise InputError(f"threads must be between 1 and 4096, not {threads}")
    dims = _dims(graph)
    names = {d.name: d for d in dims}
    sizes = {n: [as_dim(parse_expr(t, names)) for t in k.temporaries] for n, k in kernels.items() if k.temporaries}

    def in_place(node: Node, source: Value, result: Value) -> bool:
        buffers = [v for v in (*node.inputs, *node.outputs) if v is not None]
        return all((n, buffers.index(result)) in kernels[node].overwrites for n, v in enumerate(buffers) if v is source)

    plan = plan_memory(graph, sizes, in_place)
    weights = collect_weights(graph)
    program = assemble(graph, dims, kernels, plan, weights)
    distinct = {k.symbol: k.code for k in kernels.values()}
    code = _linked(program, distinct, target)
    report.kernels, report.distinct_kernels = len(kernels), len(distinct)
    report.arena, report.arena_lower_bound = plan.size, plan.lower_bound
    with nullcontext(file) if file is not None else tempfile.TemporaryFile() as image:
        write_artifact(image, code, weights.named, _manifest(graph, dims, target, threads, kernels, report))
        return read_artifact(image)


def _linked(program: Program, kernels: Mapping[str, bytes], target: Target) -> bytes:
    """A shared object: the kernels, the entry function that calls them, and the thread pool; for CUDA a plan of launches."""
    if target.kind == "cuda":
        from tcomp.codegen.cuda.launch_plan import program_code

        return program_code(program, kernels, target)
    objects = [object_code(emit_program(program, target), target), *kernels.values(), object_code(thread_pool.pool_ir(target.triple), target)]
    return elf.link(objects, ["tcomp_run", "tcomp_run_profiled", "tcomp_plan", *thread_pool.EXPORTS], imports=thread_pool.IMPORTS)


def _dims(graph: Graph) -> list[Expr]:
    """The symbolic dims that input shapes bind; all others must be computable from these."""
    bound = [d for v in graph.inputs for d in v.shape if isinstance(d, Expr) and d.op == "var"]
    dims = list(dict.fromkeys(bound))
    free = [v for value in graph.values() for d in value.shape if isinstance(d, Expr) for v in variables(d) if v not in dims]
    if free:
        names = ", ".join(sorted({v.name for v in free}))
        raise UnsupportedError(
            f"the size {names} is not given by any input's shape", hint="fix it with dims={'name': size} or --dim name=size"
        )
    for v in graph.inputs:
        if composite := [d for d in v.shape if isinstance(d, Expr) and d.op != "var"]:
            hint = "give it a size of its own, or build a tcomp.Schedule, which takes arrays of such shapes"
            raise UnsupportedError(f"the extent {composite[0]} of input `{v.name}` is neither a number nor a single size", hint=hint)
    return dims


def _manifest(
    graph: Graph,
    dims: Sequence[Expr],
    target: Target,
    threads: int | None,
    kernels: Mapping[Node, CompiledKernel],
    report: Report,
) -> dict[str, Any]:
    number = {d: n for n, d in enumerate(dims)}
    schedules: dict[str, list[str]] = {}  # of each distinct kernel, with the names of the nodes that it computes
    for node, compiled in kernels.items():
        schedules.setdefault(compiled.schedule, []).append(node.name)

    def extent(d: Dim) -> Any:
        return d if isinstance(d, int) else {"dim": number[d]}

    return {
        "producer": f"tcomp {tcomp.__version__}",
        "target": {"triple": target.triple, "cpu": target.cpu, "features": list(target.features)},
        "inputs": [{"name": v.name, "dtype": v.dtype, "shape": [extent(d) for d in v.shape]} for v in graph.inputs],
        "outputs": [
            {"name": v.name, "dtype": v.dtype, "shape": [d if isinstance(d, int) else str(d) for d in v.shape]} for v in graph.outputs
        ],
        "dims": [{"name": d.name, "min": bounds(d)[0] or 0, "max": bounds(d)[1], "data_dependent": False} for d in dims],
        "threads": threads,
        "errors": [],
        "notes": {
            "kernels": [node.name for node in kernels],
            "facts": kernel_facts(graph, dims, kernels, report.not_fused),
            "schedules": [{"kernels": names, "schedule": json.loads(schedule)} for schedule, names in schedules.items()],
            "target": str(target),
        },
    }
