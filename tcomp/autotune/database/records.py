"""The entries of the tuning database: records of candidates, verdicts of whole models, and sessions of the tuner."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import llvmlite.binding
import numpy as np

import tcomp
from tcomp.autotune.measurement.results import Measurement
from tcomp.autotune.tasks import Task
from tcomp.backends import Backend, backend_of
from tcomp.cache import source_version
from tcomp.runtime.host import processor_name
from tcomp.target import Target


@dataclass(frozen=True)
class Record:
    """One candidate. `decisions` are as `knobs.encode` writes them; `trace`, as `Trace.to_json` writes it, are the steps that they make,
    entered for winners only ("" for others), as they follow from the decisions.

    `cost` is its time in seconds, on the scale of the task's first measurement (see `tuner`); None if it failed. `predicted` is what the
    cost model expected, on the same scale. `when` is in seconds since 1970.
    """

    task: Task
    decisions: str
    trace: str
    measurement: Measurement
    cost: float | None
    predicted: float | None
    environment: Mapping[str, str]
    when: float

    @property
    def ok(self) -> bool:
        """Whether it ran and computed the right result."""
        return self.cost is not None


class Judgement(StrEnum):
    """What became of a task's winner in a whole model."""

    KEPT = "kept"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class Verdict:
    """What a whole model said of a task's winner; `before` and `after` are the seconds that its kernels take in a run of the untuned and of
    the tuned model."""

    task: Task
    decisions: str
    judgement: Judgement
    before: float
    after: float
    environment: Mapping[str, str]
    when: float

    @property
    def kept(self) -> bool:
        """Whether compilations follow the decisions."""
        return self.judgement is Judgement.KEPT


class SessionState(StrEnum):
    """How far a call of the tuner got. One that was killed stays "running"."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"


@dataclass
class Session:
    """One call of the tuner. `subject` is a digest of what is tuned, `options` say how (JSON), `spent` is in seconds."""

    subject: str
    options: Mapping[str, Any]
    started: float
    state: SessionState = SessionState.RUNNING
    spent: float = 0.0
    trials: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


def environment(target: Target | Backend) -> dict[str, str]:
    """What a record says of the machine and the software that it was measured with."""
    usable = len(os.sched_getaffinity(0))
    backend = backend_of(target)
    return backend.environment() | {
        "tcomp": tcomp.__version__, "compiler": source_version()[:16], "python": platform.python_version(), "numpy": np.__version__,
        "llvm": ".".join(map(str, llvmlite.binding.llvm_version_info)), "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(), "cores": f"{usable} of {os.cpu_count()}", "host": str(Target.host()), "target": str(backend.target),
    }  # fmt: skip
