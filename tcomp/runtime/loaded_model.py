"""What all loaded models have in common, wherever they run: the signature, and inputs that are checked against it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import numpy.typing as npt

from tcomp.errors import InputError
from tcomp.runtime.artifact import Artifact
from tcomp.runtime.facts import KernelFacts, kernel_facts
from tcomp.runtime.inputs import admit
from tcomp.runtime.manifest import Manifest, TensorSpec, numpy_dtype

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]

_UNKNOWN = -1  # a data-dependent dim before the run


class LoadedModel(ABC):
    """A compiled model that can be run: a `Module` on CPUs, a `CudaModule` on a GPU."""

    def __init__(self, artifact: Artifact) -> None:
        manifest = artifact.manifest
        self._artifact = artifact
        self._names = [spec.name for spec in manifest.inputs]
        self._admission = [(spec, numpy_dtype(spec.dtype)) for spec in manifest.inputs]
        self._output_names = [spec.name for spec in manifest.outputs]
        self._output_dtypes = [numpy_dtype(spec.dtype) for spec in manifest.outputs]
        self._dim_index = {dim.name: index for index, dim in enumerate(manifest.dims)}

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of this machine that run the model."""

    @abstractmethod
    def profile(self, inputs: Mapping[str, object], runs: int = 10) -> list[tuple[str, float]]:
        """(name, seconds) of every kernel call in program order: means over `runs` runs, after one that does not count."""

    @abstractmethod
    def _execute(self, values: list[Any]) -> list[Any]:
        """The outputs, in order, for inputs in order."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs, in the order of the graph."""
        """The inputs, in graph order."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, in the order of the graph."""
        """The outputs, in graph order."""
        return self.manifest.outputs

    @property
    def manifest(self) -> Manifest:
        """What the artifact says of itself."""
        """The manifest of the artifact."""
        return self._artifact.manifest

    @property
    def artifact(self) -> Artifact:
        """What was loaded."""
        """What was loaded."""
        return self._artifact

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact to a file, atomically."""
        self._artifact.save(path)

    def run(self, inputs: Mapping[str, object]) -> dict[str, Array]:
        """Run the model on named inputs: output name -> fresh ndarray (aligned to 64 bytes).

        Inputs are arrays (NumPy, or anything with `__dlpack__` or `__array__`) of exactly the declared element type, or
        Python numbers and lists whose values fit it. bfloat16 is ml_dtypes.bfloat16 where that is installed, else
        uint16 holding the bits. An output with data-dependent extents is a view of the leading corner of a larger
        array. Raises InputError if a name, type, rank or extent does not fit, or if the model itself reports an error
        (an index out of bounds, ...).
        """
        return dict(zip(self._output_names, self._execute(self._ordered(inputs)), strict=True))

    def __call__(self, *inputs: object) -> Array | tuple[Array, ...]:
        """Run the model on inputs in graph order: one array, or a tuple of them if the model has not exactly one
        output.
        """
        if len(inputs) != len(self._names):
            raise InputError(f"expected {len(self._names)} inputs ({', '.join(self._names)}), got {len(inputs)}")
        outputs = self._execute(list(inputs))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def facts(self, inputs: Mapping[str, object]) -> list[KernelFacts]:
        """What each kernel has to do for inputs of these shapes, and how it came about; in the order of `profile`.

        Raises ArtifactError for an artifact that does not say, else as `run`.
        """
        values = zip(self._ordered(inputs), self._admission, strict=True)
        return kernel_facts(self.manifest, self._bind(tuple(admit(value, *admission).shape for value, admission in values)))

    def _ordered(self, inputs: Mapping[str, object]) -> list[object]:
        """The values of named inputs, in the order of the graph."""
        try:
            values = [inputs[name] for name in self._names]
        except KeyError:
            self._refuse_names(inputs)
        if len(inputs) != len(values):
            self._refuse_names(inputs)
        return values

    # ---- shapes ----------------------------------------------------------------------------------

    def _bind(self, shapes: tuple[Shape, ...]) -> list[int]:
        """The values of all dims, from the shapes of the inputs."""
        dims: list[int] = [_UNKNOWN] * len(self._dim_index)
        binder: dict[str, str] = {}
        for spec, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(spec.shape):
                self._refuse_shape(spec, shape, f"it has {len(shape)} axes instead of {len(spec.shape)}")
            for axis, (expected, extent) in enumerate(zip(spec.shape, shape, strict=True)):
                if isinstance(expected, int):
                    if extent != expected:
                        self._refuse_shape(spec, shape, f"axis {axis} has {extent} elements instead of {expected}")
                    continue
                index = self._dim_index[expected]
                dim = self.manifest.dims[index]
                if dims[index] not in (_UNKNOWN, extent):
                    self._refuse_shape(spec, shape, f"{expected} is {extent} here, but {dims[index]} in input {binder[expected]!r}")
                if extent < dim.min or (dim.max is not None and extent > dim.max):
                    limit = "no limit" if dim.max is None else dim.max
                    self._refuse_shape(spec, shape, f"{expected} is {extent}, outside its range of {dim.min} to {limit}")
                dims[index], binder[expected] = extent, spec.name
        return dims

    # ---- refusals --------------------------------------------------------------------------------

    def _refuse_names(self, inputs: Mapping[str, object]) -> NoReturn:
        missing = [name for name in self._names if name not in inputs]
        unknown = [str(name) for name in inputs if name not in self._names]
        what = [f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise InputError(f"the inputs do not match the model: {'; '.join(what)}", hint=f"it takes {', '.join(map(str, self.inputs))}")

    def _refuse_shape(self, spec: TensorSpec, shape: Shape, why: str) -> NoReturn:
        expected = f"({', '.join(map(str, spec.shape))})"
        raise InputError(f"input {spec.name!r} has the wrong shape: expected {expected}, got {shape}", why=why)
