"""The subject of tuning: a model, whose kernels are the tasks, or a user's own program, which is one task. Both are also measured as a
whole: `compare(decisions)` runs the tuned version against the untuned one, in a fresh process."""

from __future__ import annotations

import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tcomp.autotune.database.lookup import given
from tcomp.autotune.measurement.measurer import Measurer, cores
from tcomp.autotune.measurement.results import LIMITS, MIN_ROUNDS, Comparison, Limits, Measurement, Outcome, Rounds, summed
from tcomp.autotune.measurement.worker_process import Answer, WorkerProcess
from tcomp.autotune.tasks import Algorithm, Program, Task, Workload, kernel_workload, workloads
from tcomp.errors import InputError
from tcomp.ir.expr import Expr, as_expr, evaluate_int, variables
from tcomp.ir.graph import Graph
from tcomp.ir.text.parser import parse_kernel
from tcomp.machines import Core
from tcomp.options import CompileOptions, Report
from tcomp.passes.algorithm_costs import Sizes, algorithm_costs
from tcomp.passes.runner import run_passes
from tcomp.pipeline import compile_partitioned, graph_passes, import_graph, kernel_inputs
from tcomp.runtime import Artifact, numpy_dtype
from tcomp.runtime.loaded_model import random_array
from tcomp.runtime.manifest import to_saved
from tcomp.schedules.knobs import Decisions, decode, encode

if TYPE_CHECKING:
    from tcomp.frontends.onnx.importer import Source

_PATIENCE = 30.0  # seconds that a comparison may take beyond those that it is given, for loading
_ROUNDS, _TURNS = 100, 3  # of a comparison of programs: runs of each in a turn, and turns
_CACHED_GRAPHS = 2  # choices of algorithms whose graphs are cached: each has weights of its own
_ALGORITHM_DOUBT = 1.5  # the factor by which the model of an algorithm's cost may be off

_Algorithms = frozenset[tuple[str, str]]  # alternatives that are taken: keys of their tasks, and decisions as text


class TuningSubject(ABC):
    """A model or program to be tuned: `tasks`, each with the number of its calls in a run; `algorithms`, alternatives to those that the
    untuned model takes, the most promising first."""

    tasks: list[tuple[Task, int]]
    algorithms: list[tuple[Algorithm, Decisions]]

    @abstractmethod
    def compare(self, decisions: Mapping[str, Decisions], seconds: float) -> Comparison:
        """The version with these decisions, by the keys of tasks, against the untuned one. Tasks without decisions stay as they are."""

    def choose_algorithms(self, decisions: Mapping[str, Decisions]) -> None:  # noqa: B027  only a model has any
        """Take these algorithms, by the keys of their tasks, from now on: `tasks` are then the kernels of the model with them."""

    def seconds_by_task(self, seconds: float) -> dict[str, float]:
        """Seconds that the kernels of each task take in a run with the algorithms chosen, otherwise untuned, by key, as far as they are
        known; measured for `seconds`."""
        return {}


class ModelSubject(TuningSubject):
    """A model, compiled as `options` say, and its kernels. `sizes` are those at which symbolic dims are measured.

    The untuned artifact is made at once. Raises as `tcomp.compile`; `InputError` if a size is missing.
    """

    def __init__(self, model: Source | Graph, options: CompileOptions, sizes: Mapping[str, int] | None = None, seed: int = 0) -> None:
        self._backend, self._sizes = options.backend, dict(sizes or {})
        self._threads = self._backend.threads(options.threads)
        self._options = replace(options, threads=self._threads)
        self._graph = model if isinstance(model, Graph) else import_graph(model, options)
        self.inputs = _inputs(self._graph, self._sizes, seed)
        self._suggested: dict[Sizes, int] = {}
        self._before_layouts = lru_cache(_CACHED_GRAPHS)(self._run_passes)
        self._keys = lru_cache(None)(self._kernel_keys)
        self.algorithms = []  # none is known until the passes have run
        self.choose_algorithms({})
        options = self._deciding({})
        self._untuned = compile_partitioned(self._with_layouts(frozenset(), options), options, Report())
        self.algorithms = self._alternatives()

    def _deciding(self, decisions: Mapping[str, Decisions]) -> CompileOptions:
        """The options of a compilation that follows these decisions."""
        return replace(self._options, decide=given(decisions, self._backend, self._threads, self._sizes))

    def _chosen(self, decisions: Mapping[str, Decisions]) -> _Algorithms:
        return frozenset((task.key, encode(d)) for task, d in self.algorithms if decisions.get(task.key) == d)

    def _run_passes(self, chosen: _Algorithms) -> Graph:
        """The graph after all passes but the last, which alone depends on decisions other than the choice of algorithms."""
        lookup = given({key: decode(text) for key, text in chosen}, self._backend, self._threads, self._sizes)
        graph, _ = run_passes(self._graph, graph_passes(replace(self._options, decide=lookup), Report())[:-1])
        self._suggested |= lookup.suggested
        return graph

    def _with_layouts(self, chosen: _Algorithms, options: CompileOptions) -> Graph:
        *_, (_, layout) = graph_passes(options, Report())
        return layout(self._before_layouts(chosen))

    def _alternatives(self) -> list[tuple[Algorithm, Decisions]]:
        """Algorithms other than those that the model of their cost suggests, but not far from these; the most promising first."""
        found: list[tuple[float, Algorithm, Decisions]] = []
        if target := self._backend.graph_options.algorithms_for:
            for sizes, suggested in self._suggested.items():
                costs = algorithm_costs(sizes, target)
                task, most = Algorithm(str(sizes), str(self._backend.target), self._threads), _ALGORITHM_DOUBT * costs[suggested]
                found += [(cost - most, task, {Algorithm.NAME: tile}) for tile, cost in costs.items() if tile != suggested and cost < most]
        return [(task, decisions) for _, task, decisions in sorted(found, key=itemgetter(0))]

    def choose_algorithms(self, decisions: Mapping[str, Decisions]) -> None:
        """From now on, the tasks are the kernels of the model with these algorithms."""
        self._algorithms_taken = dict(decisions)
        graph = self._with_layouts(self._chosen(decisions), self._deciding(decisions))
        self.tasks = [*workloads(graph, self._backend.target, self._threads, self._sizes)]

    def _kernel_keys(self, chosen: _Algorithms) -> list[str]:
        measured_at = self._backend.target, self._threads, self._sizes
        kernels = kernel_inputs(self._with_layouts(chosen, self._deciding({})))
        return [kernel_workload(node.bodies[0], constants, *measured_at).key for node, constants in kernels]

    def artifact(self, decisions: Mapping[str, Decisions]) -> Artifact:
        """The model with these decisions on algorithms and kernels, by the keys of their tasks; others by default."""
        if not decisions:
            return self._untuned
        options = self._deciding(decisions)
        return compile_partitioned(self._with_layouts(self._chosen(decisions), options), options, Report())

    def compare(self, decisions: Mapping[str, Decisions], seconds: float) -> Comparison:
        """The model with these decisions against the untuned one. The kernels that a choice of algorithms changes count together, under the
        key of each such choice."""
        answer = self._run_both(decisions, seconds)
        if answer["status"] != Outcome.OK:
            return Comparison(failure=Measurement.from_answer(answer))
        before, after = self._by_task(answer, decisions)
        kernels = {key: Rounds(before[key], after[key]) for key in before if key in after}
        changed = Rounds(*(summed([times for key, times in side.items() if key not in kernels]) for side in (before, after)))
        if changed.before and changed.after:
            kernels |= {key: changed for key, _ in self._chosen(decisions)}
        return Comparison(Rounds(*map(tuple, answer["runs"])), kernels)

    def _run_both(self, decisions: Mapping[str, Decisions], seconds: float) -> Answer:
        with tempfile.TemporaryDirectory(prefix="tcomp-") as folder:
            paths = {name: str(Path(folder) / name) for name in ("untuned", "tuned", "inputs")}
            self._untuned.save(paths["untuned"])
            self.artifact(decisions).save(paths["tuned"])
            with open(paths["inputs"], "wb") as file:
                np.savez(file, allow_pickle=False, **{str(n): to_saved(a) for n, a in enumerate(self.inputs.values())})
            memory = None if self._backend.on_device else LIMITS.bytes
            worker = WorkerProcess("tcomp.autotune.measurement.ab_comparison", memory, cores(self._threads))
            request = {"names": list(self.inputs), **paths, "threads": self._threads, "seconds": seconds}
            with closing(worker):
                return worker.ask(request, 2 * seconds + _PATIENCE)

    def _by_task(self, answer: Answer, decisions: Mapping[str, Decisions]) -> list[dict[str, tuple[float, ...]]]:
        """The times of kernel calls on either side, round by round, summed for each task."""
        sides: list[dict[str, tuple[float, ...]]] = [{}, {}]
        for side, chosen, calls in zip(sides, (_Algorithms(), self._chosen(decisions)), answer["kernels"], strict=True):
            for key, times in zip(self._keys(chosen), calls, strict=True):
                side[key] = summed([side[key], times]) if key in side else tuple(times)
        return sides

    def seconds_by_task(self, seconds: float) -> dict[str, float]:
        """Seconds that the kernels of each task take; empty if the model cannot be run."""
        taken, answer = self._algorithms_taken, self._run_both(self._algorithms_taken, seconds)
        return {key: min(times) for key, times in self._by_task(answer, taken)[1].items()} if answer["status"] == Outcome.OK else {}


class ProgramSubject(TuningSubject):
    """A user's own program."""

    def __init__(self, task: Program) -> None:
        self.task, self.tasks, self.algorithms = task, [(task, 1)], []

    def compare(self, decisions: Mapping[str, Decisions], seconds: float) -> Comparison:
        """The program with these decisions against its default schedule."""
        rounds = Rounds()
        with Measurer(1, Limits(rounds=_ROUNDS, seconds=seconds)) as measurer:
            for _ in range(_TURNS):  # a candidate that seems too slow for a moment gets another chance
                (found,) = measurer.measure(self.task, [decisions.get(self.task.key, {})])
                if found.status != Outcome.OK:
                    return Comparison(failure=found)
                rounds += Rounds(found.incumbent, found.seconds)
                if len(rounds.before) >= MIN_ROUNDS:
                    break
        return Comparison(rounds, {self.task.key: rounds})


def roofline_seconds(task: Task, core: Core | None) -> float:
    """The least seconds that a call of a task's kernel takes, by the roofline. `core` has measured rates, if there are any."""
    kernel = task.backend.lower(task.body({}), "kernel") if isinstance(task, Workload) else parse_kernel(task.text)
    return task.backend.cost_model(task.threads, core).bound(kernel, task.sizes_of(kernel.scalars))


_TITLE_LIMIT = 400  # characters
_NODE = re.compile(r"^  (%[^=\n]*) = ([\w.]+)\(", re.MULTILINE)  # of a graph as it is printed: its results, its operator
_RESULT = re.compile(r"(%\S+): (\w+\[[^\]\n]*\])")
_OUTPUTS = re.compile(r"^graph [^\n]*-> \(([^)\n]*)\) \{$", re.MULTILINE)


def title(task: Task) -> str:
    """For people: the operators of a kernel and the shape of its results, or the name of a program. The text may come from anyone, so it is
    searched, in linear time, not parsed."""
    found = ""
    if isinstance(task, Algorithm):
        found = task.text
    elif isinstance(task, Workload):
        nodes, outputs = _NODE.findall(task.text), _OUTPUTS.search(task.text)
        types = dict(result for left, _ in nodes for result in _RESULT.findall(left))
        if outputs:
            results = ", ".join(types.get(name.strip(), "?") for name in outputs[1].split(","))
            found = f"{' + '.join(operator for _, operator in nodes)} -> {results}"
    elif named := re.match(r"kernel (\S+?)\(", task.text):
        found = named[1]
    return (found or task.key[:12])[:_TITLE_LIMIT]


def _inputs(graph: Graph, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Random arrays. Raises `InputError` naming the symbolic dims that have no size."""
    symbols = {v.name: v for value in graph.inputs for d in value.shape if isinstance(d, Expr) for v in variables(d)}
    if missing := [name for name in symbols if name not in sizes]:
        hint = f"say at which size to measure (size={missing[0]}=128), or fix it for good (dim={missing[0]}=128)"
        raise InputError(f"the size {', '.join(missing)} is open", hint=hint)
    if unknown := [name for name in sizes if name not in symbols]:
        hint = f"its symbolic dims are {', '.join(symbols)}" if symbols else "all its shapes are fixed"
        raise InputError(f"the model has no symbolic dim `{unknown[0]}`", hint=hint)
    known, rng = {v: sizes[name] for name, v in symbols.items()}, np.random.default_rng(seed)
    return {v.name: random_array(rng, tuple(evaluate_int(as_expr(d), known) for d in v.shape), numpy_dtype(v.dtype)) for v in graph.inputs}
