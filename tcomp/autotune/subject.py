"""What the tuner is given: a model, whose kernels are the tasks, or a program of one's own, which is one task.

Both can be judged as a whole: `contest(decisions)` runs what was tuned beside what was not, in a fresh process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tcomp.autotune.children import Child
from tcomp.autotune.contest import FEWEST, Contest, Rounds
from tcomp.autotune.lookup import given
from tcomp.autotune.measure import LIMITS, Limits, Measurer, cores
from tcomp.autotune.workload import Program, ScheduleFunction, Task, Workload, kernel_workload, workloads
from tcomp.driver import Report, compile_partitioned, graph_passes, kernel_inputs
from tcomp.errors import InputError, TcompError
from tcomp.frontends.onnx import import_model
from tcomp.ir.expr import Expr, as_expr, evaluate_int, variables
from tcomp.ir.graph import Graph
from tcomp.ir.loops import Kernel
from tcomp.ir.parser import parse_graph, parse_kernel
from tcomp.ops import OPERATORS
from tcomp.passes.runner import run_passes
from tcomp.runtime import Artifact, numpy_dtype
from tcomp.runtime.inputs import random_array
from tcomp.schedules.footprint import at_sizes
from tcomp.schedules.knobs import Decisions
from tcomp.schedules.lower import lower_graph
from tcomp.schedules.schedule import Program as Source
from tcomp.schedules.work import roof, work
from tcomp.target import Core, Target

if TYPE_CHECKING:
    import onnx

_PATIENCE = 30.0  # seconds that a contest may take beyond those that it is given, for loading
_ROUNDS, _TURNS = 100, 3  # of a contest of programs: runs of each in a turn, and turns
_POINTS = 1 << 12  # of a kernel that are counted one by one, to find its work


class Subject(Protocol):
    """What is tuned: `tasks`, each with how often a run calls it."""

    tasks: list[tuple[Task, int]]

    def contest(self, decisions: Mapping[str, Decisions], seconds: float) -> Contest:
        """What was tuned so, by the keys of tasks, against what was not; some of it by default."""

    def shares(self, seconds: float) -> dict[str, float]:
        """Seconds that each task's kernels take in an untuned run, by key, as far as that is known."""


class Model:
    """An ONNX model, compiled for a target and a number of threads, and its kernels. `sizes` are those at which symbolic dims are measured.

    The untuned artifact is made at once: it is the measure of all. Raises as `tcomp.compile`; `InputError` where a size is missing.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | onnx.ModelProto,
        target: Target,
        threads: int,
        shapes: Mapping[str, Sequence[int | str]] | None = None,
        dims: Mapping[str, int | tuple[int, int]] | None = None,
        values: Mapping[str, npt.ArrayLike] | None = None,
        sizes: Mapping[str, int] | None = None,
        seed: int = 0,
        winograd: bool = True,
    ) -> None:
        self._target, self._threads, self._sizes = target, threads, dict(sizes or {})
        graph = import_model(model, shapes, dims, {name: np.asarray(v) for name, v in (values or {}).items()})
        self.inputs = _inputs(graph, self._sizes, seed)
        *first, (_, self._layout) = graph_passes(target, Report(), winograd=winograd)
        self._partitioned, _ = run_passes(graph, first)
        laid = self._layout(self._partitioned)
        self.tasks: list[tuple[Task, int]] = [*workloads(laid, target, threads, self._sizes)]
        self._keys = [kernel_workload(n.bodies[0], constants, target, threads, self._sizes).key for n, constants in kernel_inputs(laid)]
        self._untuned = compile_partitioned(laid, target, threads, Report())

    def artifact(self, decisions: Mapping[str, Decisions]) -> Artifact:
        """The model with its kernels scheduled as decided, by the keys of their tasks; those that are not named by default."""
        if not decisions:
            return self._untuned
        lookup = given(decisions, self._target, self._threads, self._sizes)
        *_, (_, layout) = graph_passes(self._target, Report(), lookup)
        return compile_partitioned(layout(self._partitioned), self._target, self._threads, Report(), decide=lookup)

    def contest(self, decisions: Mapping[str, Decisions], seconds: float) -> Contest:
        """The model tuned so against the untuned one."""
        tuned = self.artifact(decisions)
        with tempfile.TemporaryDirectory(prefix="tcomp-") as folder:
            paths = {name: str(Path(folder) / name) for name in ("untuned", "tuned", "inputs.npz")}
            self._untuned.save(paths["untuned"])
            tuned.save(paths["tuned"])
            np.savez(paths["inputs.npz"], allow_pickle=False, **{str(n): a for n, a in enumerate(self.inputs.values())})
            child = Child("tcomp.autotune.contest", LIMITS.bytes, cores(self._threads))
            request = {"names": list(self.inputs), "inputs": paths["inputs.npz"], "untuned": paths["untuned"], "tuned": paths["tuned"]}
            try:
                answer = child.ask({**request, "threads": self._threads, "seconds": seconds}, 2 * seconds + _PATIENCE)
            finally:
                child.close()
        if answer["status"] != "ok":
            return Contest(reason=f"{answer['status']}: {answer['reason']}")
        sides = [self._by_task(calls) for calls in answer["kernels"]]
        return Contest(Rounds(*map(tuple, answer["runs"])), {key: Rounds(sides[0][key], sides[1][key]) for key in sides[0]})

    def _by_task(self, calls: Sequence[Sequence[float]]) -> dict[str, tuple[float, ...]]:
        """Of the times of kernel calls, round by round, those of each task's together."""
        found: dict[str, tuple[float, ...]] = {}
        for key, times in zip(self._keys, calls, strict=True):
            found[key] = tuple(map(add, found.get(key, (0.0,) * len(times)), times))
        return found

    def shares(self, seconds: float) -> dict[str, float]:
        """Seconds that each task's kernels take in a run of the untuned model; empty where that cannot be found out."""
        return {key: min(rounds.before) for key, rounds in self.contest({}, seconds).kernels.items()}


class Single:
    """A program of one's own: see `Program.of`."""

    def __init__(
        self, source: Source, target: Target, threads: int, sizes: Mapping[str, int] | None, schedule: ScheduleFunction | None
    ) -> None:
        self.task = Program.of(source, target, threads, sizes, schedule)
        self.tasks: list[tuple[Task, int]] = [(self.task, 1)]

    def contest(self, decisions: Mapping[str, Decisions], seconds: float) -> Contest:
        """The program as decided against its default schedule."""
        before: tuple[float, ...] = ()
        after: tuple[float, ...] = ()
        with Measurer(1, Limits(rounds=_ROUNDS, seconds=seconds)) as measurer:
            for _ in range(_TURNS):  # what seems hopeless for a moment gets another chance
                (found,) = measurer.measure(self.task, [decisions.get(self.task.key, {})])
                if found.status != "ok":
                    return Contest(reason=f"{found.status}: {found.reason}")
                before, after = before + found.incumbent, after + found.seconds
                if len(before) >= FEWEST:
                    break
        rounds = Rounds(before, after)
        return Contest(rounds, {self.task.key: rounds})

    def shares(self, seconds: float) -> dict[str, float]:
        """Nothing but the task's own measurements is known."""
        return {}


def bound(task: Task, core: Core | None) -> float:
    """The least seconds that a call of a task's kernel takes, by the roofline. `core` has measured rates, if there are any."""
    kernel = at_sizes(_loops(task), task.sizes_of(_loops(task).scalars))
    todo = work(kernel, _POINTS)
    return roof(task.machine, task.threads, core).seconds(float(todo.slots), float(todo.divisions), float(todo.bytes))[0]


def title(task: Task) -> str:
    """For people: the operators of a kernel and the shape of its results, or the name of a program. The text may be anyone's."""
    try:
        if isinstance(task, Workload):
            body = parse_graph(task.text, OPERATORS, {})
            results = ", ".join(f"{v.dtype}[{', '.join(map(str, v.shape))}]" for v in body.outputs)
            return f"{' + '.join(node.op.name for node in body.nodes)} -> {results}"
        return parse_kernel(task.text).name
    except TcompError:
        return task.key[:12]


def _loops(task: Task) -> Kernel:
    return lower_graph(task.body({}), "kernel") if isinstance(task, Workload) else parse_kernel(task.text)


def _inputs(graph: Graph, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Random arrays. Raises `InputError` naming the symbolic dims that have no size."""
    symbols = {v.name: v for value in graph.inputs for d in value.shape if isinstance(d, Expr) for v in variables(d)}
    if missing := [name for name in symbols if name not in sizes]:
        hint = f"say at which one to measure (size={missing[0]}=128), or fix it for good (dim={missing[0]}=128)"
        raise InputError(f"the size {', '.join(missing)} is open", hint=hint)
    if unknown := [name for name in sizes if name not in symbols]:
        hint = f"its symbolic dims are {', '.join(symbols)}" if symbols else "all its shapes are fixed"
        raise InputError(f"the model has no symbolic dim `{unknown[0]}`", hint=hint)
    known, rng = {v: sizes[name] for name, v in symbols.items()}, np.random.default_rng(seed)
    return {v.name: random_array(rng, tuple(evaluate_int(as_expr(d), known) for d in v.shape), numpy_dtype(v.dtype)) for v in graph.inputs}
