"""What all loaded models have in common, wherever they run: the signature, and inputs that are checked against it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime.artifact import Artifact
from tcomp.runtime.manifest import TensorSpec, numpy_dtype
from tcomp.runtime.plan import size_of

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]

MEMORY_LIMIT = 1 << 46  # bytes; more than any machine has, less than overflows
_UNKNOWN = -1  # a data-dependent dim before the run
_WORK = ("flops", "slots", "divisions", "bytes")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What an artifact says of one kernel besides its code. `work` is what all its calls of a run have to do: "flops" (floating-point and
    integer operations), "slots" (lanes of 32 bits in vector instructions), "divisions" (lanes of divisions and roots), "bytes" (that must
    be moved); None where that depends on data. `layout` is that of its results where it is not row-major; `not_fused` says why they are
    stored instead of passed on."""

    name: str
    work: dict[str, int] | None
    layout: str
    not_fused: tuple[str, ...]


class LoadedModel(ABC):
    """A compiled model that can be run: a `Module` on CPUs, a `CudaModule` on a GPU.

    artifact: Artifact, what was loaded
    manifest: Manifest, what the artifact says of itself
    inputs, outputs: tuples of TensorSpec, in the order of the graph
    threads: int, those of this machine that run the model
    """

    threads: int

    def __init__(self, artifact: Artifact) -> None:
        self.artifact, self.manifest = artifact, artifact.manifest
        self.inputs, self.outputs = self.manifest.inputs, self.manifest.outputs
        self._names, self._output_names = ([spec.name for spec in specs] for specs in (self.inputs, self.outputs))
        self._admission = [(spec, numpy_dtype(spec.dtype)) for spec in self.inputs]
        self._output_dtypes = [numpy_dtype(spec.dtype) for spec in self.outputs]
        self._dim_index = {dim.name: index for index, dim in enumerate(self.manifest.dims)}

    @abstractmethod
    def _execute(self, values: list[Any]) -> list[Any]:
        """The outputs, in order, for inputs in order."""

    @abstractmethod
    def _profile(self, inputs: Mapping[str, object], runs: int) -> list[tuple[str, float]]:
        """See `profile`; the model has run once with these inputs."""

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"<tcomp.{type(self).__name__} ({inputs}) -> ({outputs}), {self.threads} thread{'s'[: self.threads > 1]}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact to a file, atomically."""
        self.artifact.save(path)

    def run(self, inputs: Mapping[str, object]) -> dict[str, Array]:
        """Run the model on named inputs: output name -> fresh ndarray (aligned to 64 bytes).

        Inputs are arrays (NumPy, or anything with `__dlpack__` or `__array__`) of exactly the declared element type, or Python numbers and
        lists whose values fit it. bfloat16 is ml_dtypes.bfloat16 where that is installed, else uint16 holding the bits. An output with
        data-dependent extents is a view of the leading corner of a larger array. Raises InputError if a name, type, rank or extent does
        not fit, or if the model itself reports an error (an index out of bounds, ...).
        """
        return dict(zip(self._output_names, self._execute(self._ordered(inputs)), strict=True))

    def __call__(self, *inputs: object) -> Array | tuple[Array, ...]:
        """Run the model on inputs in graph order: one array, or a tuple of them if the model has not exactly one output."""
        if len(inputs) != len(self._names):
            raise InputError(f"expected {len(self._names)} inputs ({', '.join(self._names)}), got {len(inputs)}")
        outputs = self._execute(list(inputs))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def profile(self, inputs: Mapping[str, object], runs: int = 10) -> list[tuple[str, float]]:
        """(name, seconds) of every kernel call in program order: means over `runs` runs, after one that does not count.

        On CPUs, kernels are timed by a cycle counter. Its rate comes from the wall-clock time of the same runs, so that the times add up to
        that of a whole run, and what passes between kernels is shared out among them. On a GPU they are launched one by one. Raises
        ArtifactError for code that cannot be profiled, else as `run`.
        """
        if runs < 1:
            raise InputError(f"runs must be at least 1, not {runs}")
        self.run(inputs)
        return self._profile(inputs, runs)

    def facts(self, inputs: Mapping[str, object]) -> list[KernelFacts]:
        """What each kernel has to do for inputs of these shapes, and how it came about; in the order of `profile`. Raises ArtifactError for
        an artifact that does not say, else as `run`."""
        values = zip(self._ordered(inputs), self._admission, strict=True)
        dims = self._bind(tuple(admit(value, *admission).shape for value, admission in values))
        names, facts = (self.manifest.notes.get(key) for key in ("kernels", "facts"))
        if not isinstance(names, list) or not isinstance(facts, list) or [*map(type, facts)] != [dict] * len(names):
            raise ArtifactError("the artifact says nothing of its kernels", hint="compile it again")
        found = []
        for name, fact in zip(names, facts, strict=True):
            work, reasons = fact.get("work"), fact.get("not_fused")
            known = {key: size_of(work[key], dims) for key in _WORK} if isinstance(work, dict) and work.keys() >= set(_WORK) else None
            not_fused = tuple(map(str, reasons)) if isinstance(reasons, list) else ()
            found.append(KernelFacts(str(name), known, str(fact.get("layout", "")), not_fused))
        return found

    def _ordered(self, inputs: Mapping[str, object]) -> list[object]:
        """The values of named inputs, in the order of the graph."""
        if len(inputs) == len(self._names) and all(name in inputs for name in self._names):
            return [inputs[name] for name in self._names]
        wrong = {"missing": [n for n in self._names if n not in inputs], "unknown": [str(n) for n in inputs if n not in self._names]}
        what = [f"{word} {', '.join(names)}" for word, names in wrong.items() if names]
        raise InputError(f"the inputs do not match the model: {'; '.join(what)}", hint=f"it takes {', '.join(map(str, self.inputs))}")

    def _bind(self, shapes: tuple[Shape, ...]) -> list[int]:
        """The values of all dims, from the shapes of the inputs."""
        dims: list[int] = [_UNKNOWN] * len(self._dim_index)
        binder: dict[str, str] = {}  # the input that a dim is known from
        for spec, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(spec.shape):
                _refuse_shape(spec, shape, f"it has {len(shape)} axes instead of {len(spec.shape)}")
            for axis, (expected, extent) in enumerate(zip(spec.shape, shape, strict=True)):
                if isinstance(expected, int):
                    if extent != expected:
                        _refuse_shape(spec, shape, f"axis {axis} has {extent} elements instead of {expected}")
                    continue
                index = self._dim_index[expected]
                dim = self.manifest.dims[index]
                if dims[index] not in (_UNKNOWN, extent):
                    _refuse_shape(spec, shape, f"{expected} is {extent} here, but {dims[index]} in input {binder[expected]!r}")
                if extent < dim.min or (dim.max is not None and extent > dim.max):
                    limit = "no limit" if dim.max is None else dim.max
                    _refuse_shape(spec, shape, f"{expected} is {extent}, outside its range of {dim.min} to {limit}")
                dims[index], binder[expected] = extent, spec.name
        return dims


def check_sizes(workspace: int, shapes: Sequence[Shape], dims: Mapping[str, int]) -> None:
    """Check the sizes that the code of a model tells for these dims, since memory depends on them. Raises InputError or ArtifactError."""
    known = ", ".join(f"{name} = {size}" for name, size in dims.items() if size != _UNKNOWN)
    if workspace == -1:
        raise InputError("the inputs are too small for the model", where=known, why="an intermediate result would have a negative size")
    if workspace == -2 or workspace > MEMORY_LIMIT:
        raise InputError("the inputs are too large for the model", where=known, why="an intermediate result would be beyond all memory")
    if workspace < 0 or any(extent < 0 for shape in shapes for extent in shape):
        raise ArtifactError(f"the code asks for impossible sizes: {workspace} bytes of workspace, outputs {list(shapes)}")


def _refuse_shape(spec: TensorSpec, shape: Shape, why: str) -> NoReturn:
    expected = f"({', '.join(map(str, spec.shape))})"
    raise InputError(f"input {spec.name!r} has the wrong shape: expected {expected}, got {shape}", why=why)


def admit(value: object, spec: TensorSpec, dtype: np.dtype[Any]) -> Array:
    """`value` as a C-contiguous, aligned ndarray of exactly `dtype`; its shape is not checked. Arrays (NumPy's, or of any library with
    DLPack or `__array__`) must have the right element type and are copied only if they are not contiguous or not aligned. Python numbers
    and nested lists of them are converted if every value survives: integers exactly, floats up to rounding but not to infinity. Raises
    InputError naming the input."""
    if not isinstance(value, np.ndarray | np.generic) and isinstance(value, bool | int | float | complex | list | tuple):
        return _convert(value, spec, dtype)
    array: Array = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else _import(value, spec)
    if array.dtype != dtype:
        why = f"expected {spec.dtype}{'' if dtype.name == spec.dtype else f' (as {dtype.name})'}, got {array.dtype}"
        hint = f"convert it, for example with .astype({dtype.name!r})"
        raise InputError(f"input {spec.name!r} has the wrong element type", why=why, hint=hint)
    return array if array.flags.c_contiguous and array.flags.aligned else np.array(array, order="C")


def _import(value: Any, spec: TensorSpec) -> Array:
    """An array of another library, without a copy where that is possible."""
    problem: Exception | None = None
    for attribute, convert in (("__dlpack__", np.from_dlpack), ("__array__", np.asarray)):
        if hasattr(value, attribute):
            try:
                return convert(value)
            except Exception as error:  # noqa: BLE001  libraries raise what they like: a tensor on a device, one that needs a gradient
                problem = problem or error
    why = str(problem) if problem else f"expected {spec} as an ndarray, or an object with __dlpack__ or __array__"
    raise InputError(f"input {spec.name!r} is not an array", where=f"{type(value).__module__}.{type(value).__qualname__}", why=why)


def _convert(value: object, spec: TensorSpec, dtype: np.dtype[Any]) -> Array:
    try:
        given: Array = np.asarray(value)
    except (ValueError, OverflowError) as problem:
        raise InputError(f"input {spec.name!r} is not a rectangular list of numbers", why=str(problem)) from None
    if given.size == 0 and given.dtype == np.float64:  # an empty list says nothing about its type
        return np.empty(given.shape, dtype)
    # Kinds of types, each holding the ones before; element types that NumPy does not know count as floats. Where the names differ, the
    # elements are the bits of a type that NumPy lacks.
    rank = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    if dtype.name == spec.dtype and rank.get(given.dtype.kind, 4) <= rank.get(dtype.kind, 2):
        with np.errstate(all="ignore"):
            array = given.astype(dtype)
            if given.dtype.kind in "iu":
                survives = (array.astype(given.dtype) == given) & ((array < 0) == (given < 0))
            else:
                survives = np.isfinite(array.astype(np.complex128)) | ~np.isfinite(given.astype(np.complex128))
        if np.all(survives):
            return array
    what, why = f"input {spec.name!r} cannot be converted without loss", f"expected {spec.dtype}, got Python values of type {given.dtype}"
    raise InputError(what, why=why, hint="pass an array of the right element type")


def random_array(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Normally distributed numbers; integers and booleans are 0 or 1, which is a valid index, mask and token nearly everywhere."""
    if dtype.kind in "iub":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.standard_normal(shape, np.float32).astype(dtype)
