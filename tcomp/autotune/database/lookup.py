"""What a compilation takes from tuning: decisions for each kernel of a model, checked before they are followed.

Decisions come from an earlier compiler, or from a file that anyone may have written. If a kernel's schedule function does not follow all of
them any more, the default schedule is used and a note says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tcomp import cache
from tcomp.autotune.database.store import Database
from tcomp.autotune.space import instantiate
from tcomp.autotune.tasks import Algorithm, Task, Workload, kernel_workload
from tcomp.errors import ScheduleError
from tcomp.ir.graph import Graph
from tcomp.passes.algorithms import Sizes, algorithm_costs
from tcomp.runtime import default_threads
from tcomp.schedules.knobs import Decisions, decode, encode
from tcomp.target import Target


@dataclass(frozen=True)
class Chosen:
    """Decisions for a kernel ({}: the default schedule), and a note on why recorded ones are not followed, or ""."""

    decisions: Decisions
    note: str = ""


@dataclass
class Lookup:
    """Decides for KERNEL bodies: `lookup(body, which of its inputs are constants)`. `find` is asked once for each distinct kernel, with 1
    for the sizes of symbolic dims. `algorithm` decides for convolutions and products; `suggested` are the sizes that it was asked
    about, each with what the model of the algorithms' cost suggests."""

    find: Callable[[Task], Chosen]
    target: Target
    threads: int
    suggested: dict[Sizes, int] = field(default_factory=dict)
    _found: dict[Workload, Chosen] = field(default_factory=dict)

    def __call__(self, body: Graph, constants: frozenset[int]) -> Chosen:
        workload = kernel_workload(body, constants, self.target, self.threads, {v.name: 1 for v in body.dims()})
        if workload not in self._found:
            chosen = self.find(workload)
            if chosen.decisions and (reason := refusal(workload, chosen.decisions)):
                chosen = Chosen({}, f"the default schedule is used, since the recorded decisions are refused: {reason}")
            self._found[workload] = chosen
        return self._found[workload]

    def algorithm(self, sizes: Sizes, suggested: int) -> int:
        """The algorithm for a convolution or a product (see `passes.algorithms`)."""
        self.suggested[sizes] = suggested
        found = self.find(Algorithm(str(sizes), str(self.target), self.threads)).decisions.get(Algorithm.NAME, suggested)
        return found if isinstance(found, int) and found in algorithm_costs(sizes, self.target.lanes(32), self.target.streamed) else suggested


def counted(target: Target, threads: int | None) -> int:
    """The number of threads of a task (default: the cores of this machine); 1 for a GPU, whose kernels do not depend on the CPU's threads."""
    return 1 if target.kind == "cuda" else threads or default_threads()


def recorded(path: str | os.PathLike[str], target: Target, threads: int | None) -> Lookup:
    """What a database holds for a target and a number of threads (default: the cores of this machine).

    Kernels of symbolic size take the decisions of the sizes that were tuned last. Raises `DatabaseError`.
    """
    count = counted(target, threads)
    choices: dict[Task, Decisions] = {}
    others: dict[Task, set[int]] = {}
    with Database(path, create=False) as database:
        for task in database.tasks():
            if not isinstance(task, Workload | Algorithm) or task.target != str(target):
                continue
            text = database.choice(task.key)
            if text is not None and task.threads == count:
                choices[replace(task, dims=())] = decode(text)
            elif text is not None:
                others.setdefault(replace(task, dims=(), threads=count), set()).add(task.threads)

    def find(task: Task) -> Chosen:
        assert isinstance(task, Workload | Algorithm)
        unsized = replace(task, dims=())
        if unsized in choices:
            return Chosen(choices[unsized])
        if unsized in others:
            tuned = ", ".join(map(str, sorted(others[unsized])))
            return Chosen({}, f"the default schedule is used, since records are for {tuned} threads, not for {count}")
        return Chosen({})

    return Lookup(find, target, count)


def given(decisions: Mapping[str, Decisions], target: Target, threads: int, dims: Mapping[str, int]) -> Lookup:
    """Decisions by the keys of tasks measured at these sizes."""

    def find(task: Task) -> Chosen:
        assert isinstance(task, Workload | Algorithm)
        return Chosen(decisions.get(replace(task, dims=tuple((name, dims[name]) for name, _ in task.dims)).key, {}))

    return Lookup(find, target, threads)


# ---------------------------------------------------------------- checking


def refusal(workload: Workload, decisions: Decisions) -> str:
    """Why the decisions are not followed, "" if they are. The answer is cached beside the compiled kernels, as finding out takes long."""
    name = cache.name(workload.text, *workload.identity, workload.target, encode(decisions), cache.source_version())
    found = cache.load("decisions", name)
    if found is None:
        found = _refusal(workload, decisions)
        cache.store("decisions", name, found)
    return str(found)


def _refusal(workload: Workload, decisions: Decisions) -> str:
    try:
        answers = instantiate(workload, decisions).answers
    except ScheduleError as error:
        return " ".join(f"{error.what}: {error.why}".split())[:500]
    if odd := [name for name, value in decisions.items() if name not in answers or answers[name].value != value]:
        return f"there is no such choice any more: {', '.join(odd)}"[:500]
    return ""
