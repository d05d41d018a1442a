"""The backend of `torch.compile(model, backend="tcomp")`, which PyTorch finds by itself where tcomp is installed.

Dynamo traces a function, AOTAutograd makes functional graphs of ATen operators of it, of the derivatives as well, and each of these is
compiled. What tcomp has no operator for stays in PyTorch: the graph is cut there, and the logger "tcomp" says what and why, as it does when
a run ends with an error and is done again in PyTorch (`TORCH_LOGS="tcomp"`; `options={"strict": True}` makes both errors). Where no
derivatives are wanted, parameters are constants whose layout is chosen beforehand; one that is changed later in place becomes an input.

Options: strict (bool), threads (int, default: those of PyTorch), and tuning (float, seconds): how long to look for faster schedules of each
graph; `mode="max-autotune"` stands for a minute. They are kept in a database in the folder of PyTorch's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from tcomp import cache
from tcomp.errors import InputError, TcompError
from tcomp.frontends.torch import (
    SEED,
    TORCH_DTYPES,
    Imported,
    array_of,
    contiguous,
    corrected,
    decompositions,
    import_fx,
    partition,
    tensor_of,
    unsupported_nodes,
    with_scans,
)  # fmt: skip
from tcomp.ir.expr import Expr, evaluate_int, variables
from tcomp.ir.graph import Graph, canonical_graph_text
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_graph
from tcomp.runtime import Module
from tcomp.runtime.frame import Plan

Run = Callable[..., Any]
TUNING_SECONDS = 60.0  # of one graph
_logger = logging.getLogger("tcomp")


@dataclass(frozen=True)
class _Settings:
    strict: bool
    threads: int
    tuning: float | None = None  # seconds


def tcomp_backend(module: GraphModule, inputs: Sequence[Any], mode: str | None = None, options: Mapping[str, Any] | None = None) -> Run:
    """A function that computes what the FX graph does. Raises `InputError` for options that there are not, and, if `strict`, a `TcompError`
    for what cannot be compiled."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    given = dict(options or {})
    tuned = mode == "max-autotune"
    tuning = given.pop("tuning", TUNING_SECONDS if tuned else None)
    settings = _Settings(bool(given.pop("strict", False)), int(given.pop("threads", torch.get_num_threads())), tuning)
    if given or not (tuned or mode in (None, "default")):
        what = f"option `{next(iter(given))}`" if given else f"mode `{mode}`"
        raise InputError(f"the backend tcomp has no {what}", hint="options={'strict': True, 'threads': 2}, or none")
    static = {n: x for n, x in enumerate(inputs) if isinstance(x, torch.Tensor) and hasattr(x, "_dynamo_static_input_type")}

    def compiled(graph: GraphModule, examples: Sequence[Any]) -> Run:
        return make_boxed_func(_Compiled(graph, {}, settings))

    def for_inference(graph: GraphModule, examples: Sequence[Any]) -> Run:
        return make_boxed_func(_Compiled(graph, static, settings))

    compilers = {"fw_compiler": compiled, "bw_compiler": compiled, "inference_compiler": for_inference}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # which is made of operators that have derivatives
        make = aot_autograd(**compilers, decompositions=decompositions(), keep_inference_input_mutations=True, partition_fn=partition)
        return make(with_scans(corrected(module)), inputs)


class _Compiled:
    """A graph as code. `constants` are placeholders, by number, that always were these tensors with this content so far."""

    def __init__(self, module: GraphModule, constants: Mapping[int, torch.Tensor], settings: _Settings) -> None:
        self.module, self.settings, self.changed = module, settings, _without_writes(module)
        self.constants: dict[int, tuple[torch.Tensor, int, int]] = {
            n: (x, x.data_ptr(), x._version) for n, x in constants.items() if x.device.type == "cpu" and n not in self.changed
        }
        self.run = self._made()

    def _made(self) -> Run:
        with unset_fake_temporarily():  # PyTorch compiles where tensors have no elements, which parameters are to have here
            return _whole_or_pieces(self.module, {n: x for n, (x, _, _) in self.constants.items()}, self.settings, self.changed)

    def __call__(self, *args: Any) -> Any:
        changed = [n for n, (_, at, version) in self.constants.items() if args[n].data_ptr() != at or args[n]._version != version]
        if changed:
            for n in changed:
                del self.constants[n]
            self.run = self._made()
        results = self.run(*args)
        if not self.changed:
            return results
        rest = len(results) - len(self.changed)
        for n, result in zip(self.changed, results[rest:], strict=True):
            if result is args[n]:
                torch.autograd.graph.increment_version(result)
            else:
                args[n].copy_(result)
        return results[:rest]


def _without_writes(module: GraphModule) -> tuple[int, ...]:
    """Have a graph return, behind its results, what it writes to its inputs in the end. Gives the numbers of these."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    writes = []
    for node in [node for node in module.graph.nodes if node.target is torch.ops.aten.copy_.default]:
        if node.args[0] is not node.args[1]:
            writes.append(node.args)
        node.replace_all_uses_with(node.args[1])
        module.graph.erase_node(node)
    if writes:
        output.args = ([*output.args[0], *(value for _, value in writes)],)
        module.recompile()
    return tuple(placeholders.index(target) for target, _ in writes)


def _whole_or_pieces(module: GraphModule, constants: Mapping[int, torch.Tensor], settings: _Settings, changed: Sequence[int]) -> Run:
    try:
        return _Call(module, constants, settings, changed)
    except TcompError as error:
        if settings.strict:
            raise
        missing = unsupported_nodes(module)
        if not missing:
            _logger.warning("a graph of %d operators runs in PyTorch: %s", len(module.graph.nodes), error)
            return module
    reasons = ", ".join(dict.fromkeys(f"{node.target} ({why})" for node, why in missing.items()))
    if any(getattr(node.target, "overloadpacket", None) is torch.ops.aten.as_strided for node in module.graph.nodes):
        # It reads memory as the operators before it have left it, which pieces do not.
        _logger.warning("a graph of %d operators runs in PyTorch: it reads memory by strides; %s", len(module.graph.nodes), reasons)
        return module
    count = sum(node.op == "call_function" for node in module.graph.nodes)
    _logger.warning("%d of %d operators run in PyTorch: %s", len(missing), count, reasons)
    return _pieces(module, constants, settings, missing)


class _Supported(OperatorSupportBase):
    def __init__(self, missing: Mapping[Node, str]) -> None:
        self.missing = missing

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        """A call of an operator that can be compiled; parts of results are taken where the results are."""
        picked = node.all_input_nodes if getattr(node.target, "__name__", "") == "getitem" else []
        return node.op == "call_function" and node not in self.missing and not any(n in self.missing for n in picked)


def _pieces(module: GraphModule, constants: Mapping[int, torch.Tensor], settings: _Settings, missing: Mapping[Node, str]) -> Run:
    """The graph in PyTorch, with parts of it compiled."""
    cut = CapabilityBasedPartitioner(module, _Supported(missing), allows_single_node_partition=True).partition_and_fuse()
    numbers = {node: n for n, node in enumerate(node for node in cut.graph.nodes if node.op == "placeholder")}
    for node in [node for node in cut.graph.nodes if node.op == "call_module"]:
        part = getattr(cut, str(node.target))
        known = {n: constants[numbers[a]] for n, a in enumerate(node.args) if isinstance(a, Node) and numbers.get(a) in constants}
        try:
            delattr(cut, str(node.target))
            setattr(cut, str(node.target), _Part(_Call(part, known, settings)))
        except TcompError as error:
            _logger.warning("%d operators run in PyTorch: %s", len(part.graph.nodes), error)
            setattr(cut, str(node.target), part)
    cut.recompile()
    return cut


class _Part(torch.nn.Module):
    """A call as a module, which FX graphs can call."""

    def __init__(self, call: Run) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


class _Call:
    """A whole graph as one compiled model. Its last results are to be written to the inputs whose numbers are `changed`: where the code can
    do that itself, the inputs are these results."""

    def __init__(
        self, module: GraphModule, constants: Mapping[int, torch.Tensor], settings: _Settings, changed: Sequence[int] = ()
    ) -> None:
        self.imported: Imported = import_fx(module, constants, passed=lambda number: number not in changed)
        graph, results = self.imported.graph, self.imported.results
        self.model: Module | None = None
        self.plan: Plan | None = None
        self.types: list[tuple[Any, torch.dtype]] = []  # of the outputs
        self.places: dict[int, int] = {}  # of outputs, by number, in the memory of which input
        if graph.outputs:
            artifact = compile_graph(graph, _tuned(graph, settings))
            self.model = Module(artifact, settings.threads)
            allowed = {(self.imported.inputs[n], m) for n, m in artifact.notes["overwritten"]}
            rest = len(results) - len(changed)
            self.places = {r: n for n, (kind, r) in zip(changed, results[rest:], strict=True) if kind == "output" and (n, r) in allowed}
            fixed = all(isinstance(d, int) for v in graph.outputs for d in v.shape)  # by the inputs; a run may count others
            self.plan = self.model.fixed_plan() if fixed else None
            self.types = [(tuple(v.shape), TORCH_DTYPES[v.dtype]) for v in graph.outputs]
        self.module, self.strict, self.count = module, settings.strict, sum(n.op == "call_function" for n in module.graph.nodes)
        self.single = not isinstance(next(n for n in module.graph.nodes if n.op == "output").args[0], list | tuple)

    def __call__(self, *args: Any) -> Any:
        found: Sequence[Any] = ()
        if self.model is not None:
            given = [_seed() if n == SEED else args[n] for n in self.imported.inputs]
            try:
                if self.plan is None:
                    found = [tensor_of(a) for a in self.model._execute([array_of(x) for x in given])]
                else:
                    found = self.run_at(self.model, self.plan, [contiguous(x) for x in given], args)
            except InputError as error:  # what the data are wrong for, which PyTorch is to tell in its own words
                if self.places or self.strict:
                    raise
                _logger.warning("a run of %d operators ended with an error, and is done again in PyTorch: %s", self.count, error)
                return self.module(*args)
        results = [
            found[r] if kind == "output" else args[r] if kind == "input" else self.size(r, args, found) for kind, r in self.imported.results
        ]
        return results[0] if self.single else results

    def run_at(self, model: Module, plan: Plan, given: list[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
        """The outputs; some may be tensors among `args`."""
        found = list[torch.Tensor]()
        for r, (shape, dtype) in enumerate(self.types):
            place = args[self.places[r]] if r in self.places else None
            found.append(place if place is not None and contiguous(place) is place else torch.empty(shape, dtype=dtype))
        model.run_at(plan, [x.data_ptr() for x in (*given, *found)])
        return found

    def size(self, value: Any, args: Sequence[Any], found: Sequence[Any]) -> Any:
        """A result that is not a tensor."""
        if not isinstance(value, Expr):
            return value
        known = {}
        for symbol in variables(value):
            number, axis = self.imported.sizes[symbol]
            tensor = args[number] if number >= 0 else found[~number]
            known[symbol] = tensor if axis is None else tensor.shape[axis]
        return evaluate_int(value, known)


def _tuned(graph: Graph, settings: _Settings) -> CompileOptions:
    """How a graph is compiled: with the schedules that were found for it; if it was not tuned before, it is tuned now. Free sizes have no
    schedules that are the fastest at all of them, and stay as they are."""
    options = CompileOptions(threads=settings.threads)
    if settings.tuning is None or graph.dims():
        return options
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from tcomp.autotune.database.lookup import recorded  # half of what this module takes to load
    from tcomp.autotune.tuner import tune

    database, threads = Path(cache_dir()) / "tcomp.db", settings.threads

    def found() -> float:
        return tune(graph, budget=settings.tuning, database=database, threads=threads).ratio

    name = cache.name(canonical_graph_text(graph), str(database), str(threads), str(settings.tuning), *options.backend.identity)
    cache.recall("tuned", name, found)
    return replace(options, decide=recorded(database, options.backend, threads))


def _seed() -> torch.Tensor:
    """A new seed, from the generator of PyTorch."""
    return torch.randint(1 << 32, (1,)).to(torch.uint32)
