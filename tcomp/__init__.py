"""tcomp: a deep-learning compiler.

    module = tcomp.compile("resnet50.onnx", shapes={"data": (1, 3, 224, 224)})
    outputs = module.run({"data": x})
    module.save("resnet50.tcomp"); module = tcomp.load("resnet50.tcomp")

The names below are imported when first used, so that `import tcomp.runtime` needs nothing but NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcomp import jax, te
    from tcomp.api import compile
    from tcomp.autotune.tuner import tune
    from tcomp.errors import ScheduleError, TcompError
    from tcomp.frontends.python import assume, program
    from tcomp.functions import build
    from tcomp.generation import Generator
    from tcomp.operators import operator
    from tcomp.runtime import Module, State, load
    from tcomp.schedules import Schedule
    from tcomp.target import Target

__version__ = "0.1.0"
__all__ = [
    "Generator",
    "Module",
    "Schedule",
    "ScheduleError",
    "State",
    "Target",
    "TcompError",
    "assume",
    "build",
    "compile",
    "jax",
    "load",
    "operator",
    "program",
    "te",
    "tune",
]

_HOMES = {
    "build": "tcomp.functions", "compile": "tcomp.api", "ScheduleError": "tcomp.errors", "TcompError": "tcomp.errors",
    "operator": "tcomp.operators", "State": "tcomp.runtime", "Generator": "tcomp.generation",
    "Module": "tcomp.runtime", "load": "tcomp.runtime", "program": "tcomp.frontends.python", "assume": "tcomp.frontends.python",
    "Schedule": "tcomp.schedules", "Target": "tcomp.target", "tune": "tcomp.autotune.tuner",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("jax", "te"):  # modules; the first one loads JAX
        return importlib.import_module(f"tcomp.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tcomp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *(name for name in __all__ if name not in globals())]
