"""The compiler on one page: an ONNX model goes in, an artifact comes out. Read `compile_model`, then downwards.

import     ONNX -> graph                               `frontends.onnx`
passes     graph -> graph of kernels, with layouts     `graph_passes`
kernels    each distinct kernel is lowered to loops, scheduled, and emitted as code: `backends.kernel.compile_kernel`;
           `Compilation` does so in parallel processes, or finds the code in the cache
link       memory plan, host program, linked code
package    code, weights and manifest -> artifact
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tcomp.backends.kernel import CompiledKernel, listings, operand_layouts, predicted_seconds
from tcomp.backends.protocol import Backend
from tcomp.backends.workers import Compilation
from tcomp.errors import InputError, UnsupportedError
from tcomp.garbage import seldom_collected
from tcomp.ir.dims import SolvedDims, upper_bound
from tcomp.ir.graph import IF, KERNEL, LOOP, STRUCTURAL, Graph, Node, Value, canonical_graph_text
from tcomp.ir.layout import Layout
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.expression_parser import parse_expr
from tcomp.options import CompileOptions, Report
from tcomp.packaging import assemble, collect_weights, manifest, symbolic_dims
from tcomp.passes import (
    algorithms,
    canonicalize,
    cse,
    dce,
    dead_elements,
    fold,
    half_floats,
    layout,
    partition,
    quantized,
    quantized_weights,
    simplify,
    state,
    stored_weights,
)
from tcomp.passes.memory_plan import overwritten, plan_memory
from tcomp.passes.runner import each_version, run_passes, versions
from tcomp.runtime import Artifact, read_artifact, write_artifact
from tcomp.runtime.artifact import scratch_file
from tcomp.schedules.knobs import Decisions, Knobs

MAX_DRAFTS = 64  # tokens of a language model that are guessed at a time

if TYPE_CHECKING:
    from tcomp.frontends.onnx.importer import NodeRecord, Source


@seldom_collected()
def compile_model(model: Source, options: CompileOptions | None = None) -> tuple[Artifact, Report]:
    """ONNX model -> artifact, and what happened. Raises as `tcomp.compile`."""
    options, report = options or CompileOptions(), Report()
    with report.timed("import"):
        graph = import_graph(model, options)
    return compile_graph(graph, options, report), report


def import_graph(model: Source, options: CompileOptions) -> Graph:
    """ONNX model, program of PyTorch, or function that JAX has traced, -> graph, with the shapes, dims and values of the options."""
    if (importer := _other_importer(model)) is not None:
        return importer(model, options)
    from tcomp.frontends.onnx import import_model  # a fifth of what the compiler takes to load, and nothing that `tcomp.build` needs

    return import_model(model, options.shapes or {}, options.dims or {}, _values(options), options.operators)


def examine_model(model: Source, options: CompileOptions) -> tuple[Graph | None, list[NodeRecord]]:
    """The graph of a model, None where something of it cannot be compiled, and one record per node of an ONNX model. `check_graph` says
    what else compiling would refuse."""
    if (importer := _other_importer(model)) is not None:
        return importer(model, options), []
    from tcomp.frontends.onnx import importer as onnx_importer

    return onnx_importer.examine_model(model, options.shapes or {}, options.dims or {}, _values(options), options.operators)


def _values(options: CompileOptions) -> dict[str, np.ndarray]:
    return {name: np.asarray(v) for name, v in (options.values or {}).items()}


def _other_importer(model: Source) -> Callable[[Any, CompileOptions], Graph] | None:
    """What imports a model that is not of ONNX."""
    if from_torch(model):
        return _import_torch
    if isinstance(model, str | os.PathLike) and (os.path.isdir(model) or os.fspath(model).endswith(".gguf")):
        return _import_language_model
    return _import_jax if from_jax(model) else None


def from_torch(model: object) -> bool:
    """Whether it is a module or program of PyTorch, or the path of such a program."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model).endswith(".pt2")
    torch = sys.modules.get("torch")  # which has made it, or is not needed
    return torch is not None and isinstance(model, torch.nn.Module | torch.export.ExportedProgram)


def from_jax(model: object) -> bool:
    """Whether it is a function that JAX has traced."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(model, jax.stages.Traced)


def _import_jax(model: object, options: CompileOptions) -> Graph:
    _refuse_sizes(options, "functions of JAX", "compile them for other examples")
    from tcomp.frontends.jax import import_traced  # loads JAX

    return import_traced(model)


def _import_language_model(path: str | os.PathLike[str], options: CompileOptions) -> Graph:
    """The language model of a folder (config.json and safetensors), or of a GGUF file; with a dim `batch`, for several sequences, with
    `drafts`, for tokens that are guessed."""
    from tcomp.frontends.onnx.signature import size_in

    dims = dict(options.dims or {})
    batch, drafts = size_in(dims.pop("batch", 1), "batch", "batch"), dims.pop("drafts", 0)
    if not isinstance(drafts, int) or not 0 <= drafts <= MAX_DRAFTS:
        raise InputError(f"{drafts!r:.40} drafts", hint=f"a number up to {MAX_DRAFTS}")
    hint = "the numbers of tokens, and of those before, stay free; there are `batch` (sequences) and `drafts` (tokens that are guessed)"
    _refuse_sizes(replace(options, dims=dims), "language models", hint)
    try:
        if os.path.isdir(path):
            from tcomp.frontends.language_models.folder import import_folder

            return import_folder(path, batch, drafts)
        from tcomp.frontends.language_models.gguf_file import import_gguf

        return import_gguf(path, batch, drafts)
    except ImportError as error:
        raise InputError("this language model needs a package to be read", why=str(error), hint="pip install 'tcomp[generate]'") from error


def _refuse_sizes(options: CompileOptions, what: str, hint: str) -> None:
    for name in ("shapes", "dims", "values"):
        if getattr(options, name):
            raise InputError(f"{what} have no {name} to be given", hint=hint)


def _import_torch(model: object, options: CompileOptions) -> Graph:
    _refuse_sizes(options, "programs of PyTorch", "export them for other inputs, or dynamic_shapes")
    try:
        from tcomp.frontends.torch import exported  # loads PyTorch
    except ImportError as error:
        raise InputError("this model needs PyTorch to be read", why=str(error), hint="pip install 'tcomp[torch]'") from error
    return exported.import_program(exported.read_program(model) if isinstance(model, str | os.PathLike) else exported.exported(model, None))


@seldom_collected()
def compile_graph(graph: Graph, options: CompileOptions | None = None, report: Report | None = None) -> Artifact:
    """Graph -> artifact."""
    options, report = options or CompileOptions(), report or Report()
    options.progress("graph", 0, 1)
    with Compilation(options.backend) as compilation:
        with report.timed("passes"):
            passes = graph_passes(options, report, compilation if options.decide is None else None)
            graph, _ = run_passes(graph, passes, verify=options.verify, dump=options.dump)
        return compile_partitioned(graph, options, report, compilation)


def graph_passes(
    options: CompileOptions, report: Report, compilation: Compilation | None = None
) -> list[tuple[str, Callable[[Graph], Graph]]]:
    """Graph -> Graph, in order. Each is verified, timed and dumped on request by the runner. A `compilation` begins kernels as soon as they
    are final."""
    backend, decide, notes, wanted = options.backend, options.decide, report.notes, options.backend.graph_options
    halos, choose = wanted.halos, decide.algorithm if decide else None
    predict = partial(predicted_seconds, backend=backend) if halos else None

    def weight_layouts(body: Graph, constants: frozenset[int]) -> Mapping[int, Layout]:
        return operand_layouts(body, constants, backend, Knobs(decide(body, constants).decisions) if decide else None)

    def choose_algorithms(g: Graph) -> Graph:
        """In two versions, where that for many rows pays; not with state: language models mostly run one row, with large weights."""
        target = wanted.algorithms_for
        assert target is not None
        one = options.state is not None or state.state_pairs(g, "auto") or any(node.op in STRUCTURAL for node in g.nodes)
        free: list[algorithms.FreeRows] | None = None if one else []
        chosen = algorithms.choose_algorithms(g, target, notes, choose, options.direct, free)
        if not free or (enough := algorithms.enough_rows(g, free, target)) is None:
            return chosen
        condition, least = enough
        return versions(condition, algorithms.choose_algorithms(g, target, notes, choose, least=least), chosen)

    def fewer_bits(g: Graph) -> Graph:
        assert options.weights is not None
        return quantized_weights.quantize_weights(g, options.weights, report.quantized, notes)

    def widen(g: Graph) -> Graph:
        assert wanted.algorithms_for is not None
        return half_floats.widen_half_floats(g, wanted.algorithms_for, notes, options.direct)

    def decided(body: Graph) -> None:
        if compilation is not None:
            compilation.begin(canonical_graph_text(body))

    pairs: dict[str, str] = {}

    def grown(g: Graph) -> Graph:
        assert options.state is not None
        if not backend.data_sizes:
            raise UnsupportedError(f"state in place for `{backend.target}`", hint="compile for a CPU")
        pairs.update(state.state_pairs(g, options.state))
        return state.rows_first(g, pairs)

    return [
        *([("state", grown)] if options.state is not None else []),
        ("use-bytes", lambda g: quantized.use_bytes(g, notes)),
        *([("use-words", lambda g: quantized.use_words(g, notes))] if wanted.words else []),
        ("keep-blocks", lambda g: stored_weights.keep_blocks(g, notes)),
        ("fold", lambda g: fold.fold_constants(g, notes)),
        *([("widen-half-floats", widen)] if wanted.algorithms_for else []),
        ("eliminate-dead-elements", lambda g: dead_elements.eliminate_dead_elements(g, notes)),
        ("canonicalize", lambda g: canonicalize.canonicalize(g, notes)),
        ("simplify", lambda g: simplify.simplify(g, notes)),
        *([("quantize-weights", fewer_bits)] if options.weights is not None else []),
        ("multiply-blocks", lambda g: stored_weights.multiply_blocks(g, wanted.block_lanes, notes, wanted.words, wanted.block_panel)),
        ("fold-again", lambda g: fold.fold_constants(g, notes)),
        ("merge-equal", cse.merge_equal),
        ("eliminate-dead", dce.eliminate_dead),
        *([("algorithms", choose_algorithms), ("merge-again", each_version(cse.merge_equal))] if wanted.algorithms_for else []),
        ("attention", each_version(lambda g: algorithms.join_attention(g, wanted.attention_bytes, notes, wanted.attention_blocks))),
        *([("append", lambda g: state.append_rows(g, pairs))] if options.state is not None else []),
        ("partition", each_version(lambda g: partition.partition(g, report.not_fused, halos))),
        ("layout", each_version(lambda g: layout.choose_layouts(g, weight_layouts, halos, predict, decided))),
    ]


def compile_partitioned(graph: Graph, options: CompileOptions, report: Report, compilation: Compilation | None = None) -> Artifact:
    """Graph after all passes -> artifact. Its kernels may have been begun by a `compilation`, which counts where it is for their target."""
    options = replace(options, target=options.backend.suited_to(graph))
    texts = {node: canonical_graph_text(node.bodies[0]) for node in kernel_nodes(graph)}
    decisions = _decisions(graph, texts, options, report)
    with report.timed("kernels"), Compilation(options.backend) as other:
        begun = compilation if compilation is not None and compilation.backend == options.backend else other
        compiled = begun.finish(list(texts.values()), partial(options.progress, "kernels"), decisions)
    with report.timed("link"):
        artifact = package(graph, {node: compiled[text] for node, text in texts.items()}, options, report)
    report.stages.update(listings(options.emit, graph, texts, compiled, options.backend, decisions))
    if options.dump is not None:
        stages = ("graph", "te", "schedule", "loops", *options.backend.stages[: options.backend.dumped])
        for stage, text in listings(stages, graph, texts, compiled, options.backend, decisions).items():
            (options.dump / f"90-{stage}.txt").write_text(text, encoding="utf-8")
    options.progress("done", 1, 1)
    return artifact


def package(graph: Graph, kernels: Mapping[Node, CompiledKernel], options: CompileOptions, report: Report | None = None) -> Artifact:
    """A partitioned graph and its compiled kernels -> artifact: memory plan, host program, linking, weights. The artifact is
    `options.file`, mapped: weights are in memory once, as pages of that file."""
    report, dims = report or Report(), symbolic_dims(graph)
    names = {d.name: d for d in dims.values}
    temporaries = {n: [as_dim(parse_expr(t, names)) for t in k.temporaries] for n, k in kernels.items() if k.temporaries}

    def in_place(node: Node, source: Value, result: Value) -> bool:
        buffers = [v for v in (*node.inputs, *node.outputs) if v is not None]
        return all((n, buffers.index(result)) in kernels[node].in_place for n, v in enumerate(buffers) if v is source)

    require_data_sizes(graph, dims, options.backend)
    plan = plan_memory(graph, temporaries, in_place)
    weights, offsets = collect_weights(graph)
    program = assemble(graph, dims, kernels, plan, offsets)
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
        (options.dump / "95-program.txt").write_text(str(program), encoding="utf-8")
    code = options.backend.link(program, distinct := {k.symbol: k.code for k in kernels.values()})
    report.kernels, report.distinct_kernels = len(kernels), len(distinct)
    report.arena, report.arena_lower_bound = plan.size, plan.lower_bound
    with nullcontext(options.file) if options.file is not None else scratch_file() as image:
        described = manifest(graph, dims, options.backend.target, options.threads, kernels, report.not_fused, plan.size)
        replaced = {} if options.state is None else state.replaced_pairs(graph, options.state)
        described["replaced"] = [{"input": past, "output": present} for past, present in replaced.items()]
        described["notes"]["overwritten"] = overwritten(graph, in_place)
        write_artifact(image, code, weights, described)
        return read_artifact(image)


def check_graph(graph: Graph, options: CompileOptions) -> None:
    """Raises what `compile_graph` would, but for what is wrong with the code of a kernel, which is not made: all passes run, and memory is
    planned."""
    graph, _ = run_passes(graph, graph_passes(options, Report()), verify=options.verify)
    require_data_sizes(graph, symbolic_dims(graph), options.backend)
    plan_memory(graph)


def require_data_sizes(graph: Graph, dims: SolvedDims, backend: Backend) -> None:
    """Raises `UnsupportedError` where sizes depend on data, and the target's programs cannot have such, or an output has no bound."""
    counted_sizes = graph.counted()
    for value in graph.outputs:
        if endless := [d for d in value.shape if upper_bound(d, counted_sizes) is None]:
            hint = "bound the dims that it depends on, with --dim NAME=LOWEST..HIGHEST"
            raise UnsupportedError(f"the size {endless[0]} of output `{value.name}` has no bound", hint=hint)
    if backend.data_sizes:
        return
    if given := [d.name for d in dims.extents if d.attr.source is not None]:
        what, why = f"sizes that depend on values of inputs cannot be compiled for `{backend.target}`", f"`{given[0]}` does"
        raise UnsupportedError(what, why=why, hint="give the values when it is compiled (values=, --value), or compile for a CPU")
    if counted := [d.name for d in counted_sizes]:
        what, why = f"sizes that a run counts cannot be compiled for `{backend.target}`", f"`{counted[0]}` depends on data"
        raise UnsupportedError(
            what, why=why, hint="compile for a CPU, or cut the model before what counts (NonZero, NonMaxSuppression, ...)"
        )


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


def _decisions(graph: Graph, texts: Mapping[Node, str], options: CompileOptions, report: Report) -> dict[str, Decisions]:
    """What was decided for the kernels of a graph, by text, where that is not the default; with notes on what was not followed."""
    found: dict[str, Decisions] = {}
    if options.decide is None:
        return found
    for node, constants in kernel_inputs(graph):
        chosen = options.decide(node.bodies[0], constants)
        if chosen.note:
            report.notes.add(node, "", chosen.note)
            report.not_followed.append((node.name, chosen.note))
        if chosen.decisions:
            found.setdefault(texts[node], chosen.decisions)
            report.tuned += 1
    return found
