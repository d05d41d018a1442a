"""A schedule: a kernel, and the trace of the steps that shaped it.

The trace is data: a tuple of `Step`s that print as Python, store as JSON, and replay on the same kernel to the same loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tcomp.errors import ScheduleError
from tcomp.ir.expr import Dim, Expr
from tcomp.ir.loops import PARALLEL, UNROLLED, VECTORIZED, Kernel
from tcomp.ir.te import Tensor, is_placeholder, tensors
from tcomp.schedules.lower import lower
from tcomp.schedules.primitives.clean import clean
from tcomp.schedules.primitives.collapse import collapse
from tcomp.schedules.primitives.kinds import distribute, set_kind
from tcomp.schedules.primitives.reduction import mask, rfactor
from tcomp.schedules.primitives.shape import fuse, partition, reorder, split
from tcomp.schedules.primitives.stages import compute_at
from tcomp.schedules.primitives.storage import cache_read, cache_write, relayout, set_scope

_PRIMITIVES: dict[str, Callable[..., Any]] = {
    p.__name__: p
    for p in (
        split, reorder, fuse, partition, set_kind, distribute, compute_at, cache_read, cache_write, relayout, set_scope, rfactor, mask,
        collapse, clean,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive with its arguments: names of loops and buffers, integers, or symbolic dims."""

    primitive: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"s.{self.primitive}({', '.join(repr(a) if not isinstance(a, Expr) else str(a) for a in self.arguments)})"


Program = Kernel | Tensor | Sequence[Tensor]


def kernel_of(program: Program) -> Kernel:
    """A program as loops, before any schedule: a kernel stays itself; a tensor is computed from its placeholders, in the order of their
    first use; a sequence lists the placeholders first, then the tensors to compute.

    Raises `ScheduleError` for anything else, `IRError` for a placeholder that is used but not listed.
    """
    if isinstance(program, Kernel):
        return program
    if isinstance(program, Tensor):
        program = [*(t for t in tensors([program]) if is_placeholder(t) and t is not program), program]
    hint = "a tensor to compute, a list of placeholders and then tensors to compute, or a kernel"
    if not isinstance(program, Sequence) or not all(isinstance(t, Tensor) for t in program):
        raise ScheduleError(f"a schedule of {program!r}, which is no program", hint=hint)
    inputs = [t for t in program if is_placeholder(t)]
    outputs = [t for t in program if not is_placeholder(t)]
    if not outputs or list(program) != [*inputs, *outputs]:
        raise ScheduleError("a program takes the placeholders first, then at least one tensor to compute", where=str(list(program)), hint=hint)
    return lower(re.sub(r"\W", "_", outputs[-1].name), inputs, outputs)


class Schedule:
    """Applies primitives to a kernel and records them; every method documents its primitive in `primitives.py`."""

    def __init__(self, program: Program) -> None:
        self.kernel = kernel_of(program)
        self.trace: list[Step] = []

    def apply(self, primitive: str, *arguments: Any) -> Any:
        """Apply a primitive by name; returns the names it made, if any. Raises `ScheduleError` and leaves the schedule as it was."""
        if primitive not in _PRIMITIVES:
            raise ScheduleError(f"unknown schedule primitive `{primitive}`", hint="one of " + ", ".join(sorted(_PRIMITIVES)))
        result = _PRIMITIVES[primitive](self.kernel, *arguments)
        self.kernel, names = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
        self.trace.append(Step(primitive, arguments))
        return names[0] if len(names) == 1 else (names or None)

    def split(self, loop: str, factor: int) -> tuple[str, str]:
        return self.apply("split", loop, factor)  # type: ignore[no-any-return]

    def reorder(self, *order: str) -> None:
        self.apply("reorder", *order)

    def fuse(self, outer: str, inner: str) -> str:
        return self.apply("fuse", outer, inner)  # type: ignore[no-any-return]

    def partition(self, loop: str, point: Dim) -> tuple[str, str]:
        return self.apply("partition", loop, point)  # type: ignore[no-any-return]

    def vectorize(self, loop: str, reassociate: bool = False) -> None:
        self.apply("set_kind", loop, VECTORIZED, reassociate)

    def unroll(self, loop: str) -> None:
        self.apply("set_kind", loop, UNROLLED)

    def parallel(self, loop: str) -> None:
        self.apply("set_kind", loop, PARALLEL)

    def compute_at(self, stage: str, loop: str, scope: str = "global") -> None:
        self.apply("compute_at", stage, loop, scope)

    def cache_write(self, stage: str, name: str) -> None:
        self.apply("cache_write", stage, name)

    def cache_read(self, buffer: str, loop: str | None, name: str, scope: str = "global") -> None:
        self.apply("cache_read", buffer, loop, name, scope)

    def relayout(self, buffer: str, dim: int, factor: int) -> None:
        self.apply("relayout", buffer, dim, factor)

    def rfactor(self, stage: str, fold: str, lanes: int) -> str:
        return self.apply("rfactor", stage, fold, lanes)  # type: ignore[no-any-return]

    def set_scope(self, buffer: str, scope: str) -> None:
        self.apply("set_scope", buffer, scope)

    def clean(self) -> None:
        self.apply("clean")

    def collapse(self) -> None:
        self.apply("collapse")

    def __str__(self) -> str:
        return str(self.kernel)


def replay(kernel: Kernel, trace: Sequence[Step]) -> Kernel:
    """The kernel after the steps of a trace."""
    schedule = Schedule(kernel)
    for step in trace:
        schedule.apply(step.primitive, *step.arguments)
    return schedule.kernel
