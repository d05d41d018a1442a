"""Decisions of the tuning database in a compilation, for each kernel of a model. As they come from an earlier compiler or from anyone, the
default schedule is used where a kernel's schedule function does not follow all of them any more, and a note says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tcomp import cache
from tcomp.autotune.database.store import Database
from tcomp.autotune.tasks import Algorithm, Task, Workload, instantiate, kernel_workload
from tcomp.backends import Backend, backend_of
from tcomp.errors import ScheduleError
from tcomp.ir.graph import Graph
from tcomp.options import Chosen
from tcomp.passes.algorithm_costs import Sizes, algorithm_costs
from tcomp.schedules.knobs import Decisions, decode, encode
from tcomp.target import Target


@dataclass
class Lookup:
    """Decides for KERNEL bodies: `lookup(body, which of its inputs are constants)`. `find` is called once for each distinct kernel, with 1
    for the sizes of symbolic dims. `algorithm` decides for convolutions and products; `suggested` are the sizes that it was asked
    about, each with what the model of the algorithms' cost suggests."""

    find: Callable[[Task], Chosen]
    backend: Backend
    threads: int
    suggested: dict[Sizes, int] = field(default_factory=dict)
    _found: dict[Workload, Chosen] = field(default_factory=dict)

    def __call__(self, body: Graph, constants: frozenset[int]) -> Chosen:
        workload = kernel_workload(body, constants, self.backend.target, self.threads, {v.name: 1 for v in body.dims()})
        if workload not in self._found:
            chosen = self.find(workload)
            if chosen.decisions and (reason := refusal(workload, chosen.decisions)):
                chosen = Chosen({}, f"the default schedule is used, since the recorded decisions are refused: {reason}")
            self._found[workload] = chosen
        return self._found[workload]

    def algorithm(self, sizes: Sizes, suggested: int) -> int:
        """The algorithm for a convolution or a product (see `passes.algorithms`)."""
        self.suggested[sizes] = suggested
        target = self.backend.graph_options.algorithms_for
        found = self.find(Algorithm(str(sizes), str(self.backend.target), self.threads)).decisions.get(Algorithm.NAME, suggested)
        return found if isinstance(found, int) and target and found in algorithm_costs(sizes, target) else suggested


def recorded(path: str | os.PathLike[str], target: Target | Backend, threads: int | None) -> Lookup:
    """The decisions in a database for a target and a number of threads (default: the cores of this machine). Kernels of symbolic size take
    the decisions of the sizes that were tuned last. Raises `DatabaseError`."""
    backend = backend_of(target)
    count = backend.threads(threads)
    choices: dict[Task, Decisions] = {}
    with Database(path, create=False) as database:
        for task in database.tasks():
            if (
                isinstance(task, Workload | Algorithm)
                and task.target == str(backend.target)
                and (text := database.choice(task.key)) is not None
            ):
                choices[replace(task, dims=())] = decode(text)

    def find(task: Task) -> Chosen:
        unsized, note = replace(task, dims=()), ""
        if unsized not in choices and (
            tuned := sorted(t.threads for t in choices if t.text == task.text and replace(t, threads=count) == unsized)
        ):
            note = f"the default schedule is used, since records are for {', '.join(map(str, tuned))} threads, not for {count}"
        return Chosen(choices.get(unsized, {}), note)

    return Lookup(find, backend, count)


def given(decisions: Mapping[str, Decisions], target: Target | Backend, threads: int, dims: Mapping[str, int]) -> Lookup:
    """Decisions by the keys of tasks measured at these sizes."""

    def find(task: Task) -> Chosen:
        return Chosen(decisions.get(replace(task, dims=tuple((name, dims[name]) for name, _ in task.dims)).key, {}))

    return Lookup(find, backend_of(target), threads)


def refusal(workload: Workload, decisions: Decisions) -> str:
    """Why the decisions are not followed, "" if they are. The answer is cached with the compiled kernels, as finding out takes long."""

    def compute() -> str:
        try:
            answers = instantiate(workload, decisions).answers
        except ScheduleError as error:
            return " ".join(f"{error.what}: {error.why}".split())[:500]
        odd = [n for n, value in decisions.items() if n not in answers or answers[n].value != value]
        return f"there is no such choice any more: {', '.join(odd)}"[:500] if odd else ""

    name = cache.name(workload.text, *workload.identity, workload.target, encode(decisions), cache.source_version())
    return cache.recall("decisions", name, compute)
