"""Tuning tasks: a program together with its search space, a schedule function that asks knobs. Tasks are plain data, so that they can be
stored, hashed and sent to other processes. A `Candidate` is the result of the schedule function for some decisions."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from random import Random
from typing import Any, ClassVar

from tcomp import cache
from tcomp.autotune.arguments import Argument, kernel_arguments
from tcomp.backends import Backend, backend_of
from tcomp.backends.kernel import build_loops, operand_layouts
from tcomp.errors import InputError, ScheduleError
from tcomp.ir.expr import Expr
from tcomp.ir.fallback import FallbackKind
from tcomp.ir.graph import KERNEL, LOOP, Graph, Node, canonical_graph_text
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Kernel
from tcomp.ir.text.parser import parse_graph, parse_kernel
from tcomp.ir.verify.loops import verify_kernel
from tcomp.ops import OPERATORS
from tcomp.passes.layout import with_layouts
from tcomp.schedules.knobs import Answer, Decisions, Knobs, Option, chosen, encode
from tcomp.schedules.schedule import Program as Source, Schedule, kernel_of
from tcomp.target import Target

ScheduleFunction = Callable[[Schedule, Knobs], None]
"""A search space of the user's own: transforms the loops by what it asks of the knobs. Deterministic, given their answers."""

_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


@dataclass(frozen=True)
class Task(ABC):
    """A program together with its search space. `dims` are the sizes of symbolic dims at which it is measured."""

    text: str
    target: str
    threads: int
    dims: tuple[tuple[str, int], ...] = ()

    @property
    @abstractmethod
    def identity(self) -> tuple[str, ...]:
        """The part of the key, besides text, target, threads and dims, that identifies the program and its space."""

    @abstractmethod
    def make(self, knobs: Knobs) -> tuple[Schedule, tuple[Argument, ...]]:
        """The scheduled loops and the buffers that they take, in order, temporaries aside. Raises `ScheduleError` where the decisions
        cannot be followed, `InputError` where a dim has no size."""

    def to_json(self) -> dict[str, Any]:
        """The fields, as `task_from_json` reads them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}

    @property
    def backend(self) -> Backend:
        """The backend of the target."""
        return _backend(self.target)

    @property
    def key(self) -> str:
        """Equal for equal programs and spaces, measured at the same sizes on the same target with the same number of threads."""
        return cache.name(self.text, *self.identity, self.target, str(self.threads), *(f"{name}={size}" for name, size in self.dims))

    @property
    def structure(self) -> str:
        """The key of all tasks that differ from this one in sizes and threads only; see `sizes`."""
        return cache.name(_NUMBER.sub("_", self.text), *self.identity, self.target)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers in the text, in order, then those of the dims: as many for every task of one structure and dims."""
        return (*map(int, _NUMBER.findall(self.text)), *(size for _, size in self.dims))

    def sizes_of(self, variables: Sequence[Expr]) -> dict[Expr, int]:
        """The sizes of symbolic dims. Raises `InputError` naming those that have none."""
        given = dict(self.dims)
        if missing := sorted({v.name for v in variables} - given.keys()):
            raise InputError(f"the size {', '.join(missing)} is not known", hint="say at which size to measure: dims={'name': size}")
        return {v: given[v.name] for v in variables}


@dataclass(frozen=True)
class Workload(Task):
    """A KERNEL body: `text` is its canonical text, with those inputs row-major that are `constants` (their numbers)."""

    constants: tuple[int, ...] = ()

    @property
    def identity(self) -> tuple[str, ...]:
        """The kind of task, and which inputs are constants."""
        return ("kernel", *map(str, self.constants))

    def layouts(self, knobs: Knobs) -> Mapping[int, Layout]:
        """The layouts of constants, by number of the input, as decided."""
        return operand_layouts(_graph(self.text), frozenset(self.constants), self.backend, knobs)

    def body(self, layouts: Mapping[int, Layout]) -> Graph:
        """The KERNEL body with its constants in these layouts."""
        return with_layouts(_graph(self.text), layouts)

    def make(self, knobs: Knobs) -> tuple[Schedule, tuple[Argument, ...]]:
        """The scheduled loops and their buffers. Layouts are chosen before loops are scheduled, as in a compilation, and both ask the
        knobs: a default answer of the first phase does not bind the second one, any other holds for both."""
        body = self.body(self.layouts(knobs))
        settled = frozenset(knobs.asked)
        later = {name: value for name, value in knobs.given.items() if name not in settled}
        inner = Knobs(
            {**later, **knobs.decisions}, lambda name, options, default: default if name in settled else knobs.pick(name, options, default)
        )
        s = build_loops(body, "kernel", self.backend, inner)
        knobs.asked.update((name, answer) for name, answer in inner.asked.items() if name not in settled)
        values = (*body.inputs, *body.outputs)
        layouts = {n: v.layout for n, v in enumerate(values)}
        return s, kernel_arguments(s.source, self.sizes_of(body.dims()), layouts, [v.shape for v in values], self.constants)


@dataclass(frozen=True)
class Program(Task):
    """A user's own loops, printed as they are before any step. `space` names a schedule function as `module:name`; "" is the default
    one. `function` is that function, where this process has it (see `portable`)."""

    space: str = ""
    function: ScheduleFunction | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, source: Source, target: Target, threads: int, dims: Mapping[str, int] | None = None, schedule: ScheduleFunction | None = None
    ) -> Program:
        """The task of tensors or a kernel, as `Schedule` takes them, with a schedule function of the user's own, if given."""
        kernel = kernel_of(source)
        space = "" if schedule is None else f"{schedule.__module__}:{schedule.__qualname__}"
        task = cls(str(kernel), str(target), threads, _dims(dims, kernel.scalars), space, schedule)
        task.sizes_of(kernel.scalars)
        return task

    @property
    def identity(self) -> tuple[str, ...]:
        """The kind of task, and the schedule function."""
        return "program", self.space

    @property
    def portable(self) -> bool:
        """Whether another process finds the schedule function by importing the module that defines it."""
        return self.function is None or (not self.space.startswith("__main__:") and _find_function(self.space) is self.function)

    def make(self, knobs: Knobs) -> tuple[Schedule, tuple[Argument, ...]]:
        """The scheduled loops and their buffers."""
        kernel = _kernel(self.text)
        if not self.space:
            s = self.backend.schedule(kernel, knobs)
        elif function := self.function or _find_function(self.space):
            function(s := Schedule(kernel), knobs)
        else:
            raise ScheduleError(f"there is no schedule function `{self.space}`", hint="it was renamed, or its module cannot be imported")
        return s, kernel_arguments(kernel, self.sizes_of(kernel.scalars), {}, [b.shape for b in kernel.buffers])


@dataclass(frozen=True)
class Algorithm(Task):
    """Which algorithm convolutions or products of some sizes (`text`) take. Alternatives are judged in whole models, since an algorithm is
    several kernels and others around them change as well: there are no loops to make."""

    kind: str = "algorithm"

    NAME: ClassVar[str] = "tile"  # of the decision: the edge of Winograd's tiles, or 1 for Strassen's algorithm; 0 for the direct sum

    @property
    def identity(self) -> tuple[str, ...]:
        """The kind of task."""
        return (self.kind,)

    def make(self, knobs: Knobs) -> tuple[Schedule, tuple[Argument, ...]]:
        """Raises `ScheduleError`."""
        raise ScheduleError(f"no one kernel is a {self.text}", hint="the kernels of a model that takes it are tasks themselves")


def task_from_json(record: Mapping[str, Any]) -> Workload | Program | Algorithm:
    """The task that `to_json` wrote."""
    dims = tuple((str(name), int(size)) for name, size in record["dims"])
    common = str(record["text"]), str(record["target"]), int(record["threads"]), dims
    if "kind" in record:
        return Algorithm(*common)
    return Program(*common, str(record["space"])) if "space" in record else Workload(*common, tuple(map(int, record["constants"])))


@dataclass(frozen=True)
class Candidate:
    """The result of the schedule function for some decisions: `answers` are all decisions that it asked for, by name; `arguments` the
    buffers of the loops."""

    task: Task
    schedule: Schedule
    arguments: tuple[Argument, ...]
    answers: Mapping[str, Answer]

    @cached_property
    def decisions(self) -> dict[str, Option]:
        """Those that are not the default."""
        return chosen(self.answers)

    @cached_property
    def identity(self) -> str:
        """Equal for candidates of equal loops, whatever the decisions that led to them."""
        return cache.name(str(self.schedule.kernel))


def instantiate(task: Task, decisions: Decisions) -> Candidate:
    """The candidate of some decisions. Those that are not asked for, or not an option any more, are ignored. Raises `ScheduleError` where
    they are refused, also where they leave a part as lowered that the default schedule transforms."""
    return _candidate(task, Knobs(decisions))


def sample(task: Task, rng: Random) -> Candidate:
    """All decisions at random. Raises as `instantiate`."""
    return _candidate(task, Knobs(pick=lambda name, options, default: rng.choice(options)))


def _candidate(task: Task, knobs: Knobs) -> Candidate:
    s, arguments = task.make(knobs)
    by_default = _left_as_lowered(task)
    if new := {f.where: str(f) for f in s.fallbacks if f.kind is FallbackKind.LEFT_AS_LOWERED and f.where not in by_default}:
        what = f"these decisions cannot be followed for {', '.join(sorted(new))}"
        raise ScheduleError(what, where=encode(knobs.decisions), why="; ".join(new.values()))
    return Candidate(task, s, arguments, knobs.asked)


@lru_cache(maxsize=256)
def _left_as_lowered(task: Task) -> frozenset[str]:
    """The results that the default schedule leaves as lowered."""
    return frozenset(f.where for f in task.make(Knobs())[0].fallbacks if f.kind is FallbackKind.LEFT_AS_LOWERED)


def workloads(graph: Graph, target: Target, threads: int, dims: Mapping[str, int] | None = None) -> list[tuple[Workload, int]]:
    """The distinct kernels of a graph after `choose_layouts`, in order, each with the number of its calls in a run (branches count as
    taken). `dims` are the sizes at which symbolic dims are measured. Raises `InputError` naming those it lacks."""
    calls = Counter[Workload]()
    for node, constants, times in _kernels(graph, 1):
        calls[kernel_workload(node.bodies[0], constants, target, threads, dims)] += times
    return [*calls.items()]


def kernel_workload(
    body: Graph, constants: frozenset[int], target: Target, threads: int, dims: Mapping[str, int] | None = None
) -> Workload:
    """The workload of one KERNEL body; `constants` are the numbers of its inputs that are constants, whose layouts do not matter."""
    plain = with_layouts(body, dict.fromkeys(constants))
    workload = Workload(canonical_graph_text(plain), str(target), threads, _dims(dims, plain.dims()), tuple(sorted(constants)))
    workload.sizes_of(plain.dims())
    return workload


def _kernels(graph: Graph, times: int) -> Iterator[tuple[Node, frozenset[int], int]]:
    for node in graph.nodes:
        if node.op is KERNEL:
            yield node, frozenset(n for n, v in enumerate(node.inputs) if v in graph.constants), times
            continue
        trips = node.attrs["trips"] if node.op is LOOP else 1
        for body in node.bodies:
            yield from _kernels(body, times * (trips if isinstance(trips, int) else 1))


def _dims(sizes: Mapping[str, int] | None, variables: Sequence[Expr]) -> tuple[tuple[str, int], ...]:
    """The sizes of these variables, by name, as far as they are given."""
    return tuple(sorted({v.name: sizes[v.name] for v in variables if v.name in sizes}.items())) if sizes else ()


@lru_cache(maxsize=64)
def _kernel(text: str) -> Kernel:
    kernel = parse_kernel(text)
    verify_kernel(kernel)
    return kernel


_graph = lru_cache(maxsize=64)(partial(parse_graph, operators=OPERATORS, constants={}))
_backend = lru_cache(maxsize=16)(backend_of)


def _find_function(space: str) -> ScheduleFunction | None:
    """The function that a name `module:name` stands for in this process."""
    module, _, path = space.partition(":")
    with suppress(ImportError, AttributeError):
        function: ScheduleFunction = attrgetter(path)(importlib.import_module(module))
        return function
    return None
