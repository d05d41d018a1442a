"""What a compilation is given (`CompileOptions`), and what it tells (`Report`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy.typing as npt

from tcomp.backends import backend_of
from tcomp.backends.protocol import Backend
from tcomp.errors import InputError
from tcomp.ir.expr import Dim
from tcomp.ir.fallback import Fallback
from tcomp.ir.graph import Graph
from tcomp.ops.expression import TensorFunction
from tcomp.passes.algorithm_costs import Sizes
from tcomp.passes.quantized_weights import QuantizedWeight, check_kind
from tcomp.passes.rewrite import Notes
from tcomp.schedules.knobs import Decisions
from tcomp.target import Target

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True)
class Chosen:
    """Decisions for a kernel ({}: the default schedule), and what is to be said about them, "" if nothing."""

    decisions: Decisions
    note: str = ""


class Decide(Protocol):
    """Who decides how kernels are scheduled: for example the records of a tuning database."""

    def __call__(self, body: Graph, constants: frozenset[int], /) -> Chosen:
        """The decisions for a KERNEL body, those of its inputs being constants that have these numbers."""

    def algorithm(self, sizes: Sizes, suggested: int, /) -> int:
        """The algorithm for a convolution or a product (see `passes.algorithms`)."""


@dataclass(frozen=True)
class CompileOptions:
    """How a model is compiled.

    `target` is a `Target`, its line of text, or a backend (default: this machine). `shapes`, `dims`, `values`, `threads`, `direct`,
    `weights` and `state` are those of `tcomp.compile`, `operators` those of the caller, by name. `decide` says how kernels are scheduled
    (default: as the analytic model suggests).
    `emit` names stages whose text goes into the report: graph, te, schedule, loops, and those of the backend. `progress` gets (stage,
    done, total). The artifact is written to `file`, open for writing and reading, from its start (default: an unnamed one), and mapped
    from there. `dump` is a folder for the text of every stage, `verify` checks the graph after every pass.
    """

    target: Target | Backend | str | None = None
    shapes: Mapping[str, Sequence[int | str]] | None = None
    dims: Mapping[str, int | tuple[int, int] | list[int]] | None = None
    threads: int | None = None
    values: Mapping[str, npt.ArrayLike] | None = None
    direct: bool = False
    weights: str | None = None
    state: Mapping[str, str] | str | None = None
    operators: Mapping[str, TensorFunction] = field(default_factory=dict)
    decide: Decide | None = None
    emit: Sequence[str] = ()
    progress: Progress = lambda stage, done, total: None
    file: BinaryIO | None = None
    dump: Path | None = field(default_factory=lambda: Path(os.environ["TCOMP_DUMP"]) if os.environ.get("TCOMP_DUMP") else None)
    verify: bool = field(default_factory=lambda: bool(os.environ.get("TCOMP_VERIFY")))

    def __post_init__(self) -> None:
        """Raises `InputError` for an impossible number of threads, or kind of weights."""
        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise InputError(f"threads must be between 1 and 4096, not {self.threads!r}")
        if self.weights is not None:
            check_kind(self.weights)

    @cached_property
    def backend(self) -> Backend:
        """The backend of the target. Raises `TargetError` for an unknown one."""
        return backend_of(self.target)


@dataclass
class Report:
    """What happened during a compilation: seconds per stage, notes on what was not done and why, the stages of `emit` as text."""

    seconds: dict[str, float] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    not_fused: list[tuple[str, Fallback]] = field(default_factory=list)  # (value, why a reader of it is another kernel)
    stages: dict[str, str] = field(default_factory=dict)
    kernels: int = 0
    distinct_kernels: int = 0
    arena: Dim = 0
    arena_lower_bound: int | None = None
    tuned: int = 0  # kernels whose schedules were decided otherwise than by default
    quantized: list[QuantizedWeight] = field(default_factory=list)  # weights that were given fewer bits
    not_followed: list[tuple[str, str]] = field(default_factory=list)  # kernels with records that are not used, and why

    @property
    def edges_not_fused(self) -> list[str]:
        """`not_fused` as lines for people."""
        return [f"%{value}: {fallback}" for value, fallback in self.not_fused]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a block to that of a stage."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
