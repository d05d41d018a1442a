"""Loading and running compiled models: all that a deployed program needs, on NumPy alone.

    module = tcomp.runtime.load("model.tcomp")
    outputs = module.run({"x": x})

C programs use `include/tcomp.h` and the files that `Artifact.extract` writes.
"""

from tcomp.runtime.artifact import Artifact, plan_weights, read_artifact, write_artifact
from tcomp.runtime.host import default_threads
from tcomp.runtime.loaded_model import LoadedModel, RunRecord
from tcomp.runtime.manifest import Dim, Manifest, TensorSpec, numpy_dtype
from tcomp.runtime.module import Module
from tcomp.runtime.state import State
from tcomp.runtime.trace import Span, chrome_trace

load = Module.load

__all__ = [
    "Artifact", "Dim", "LoadedModel", "Manifest", "Module", "RunRecord", "Span", "State", "TensorSpec", "chrome_trace", "default_threads",
    "load", "numpy_dtype", "plan_weights", "read_artifact", "write_artifact",
]  # fmt: skip
