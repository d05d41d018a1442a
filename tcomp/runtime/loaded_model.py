"""What all loaded models have in common, wherever they run: the signature, and inputs that are checked against it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from tcomp.errors import ArtifactError, InputError, OutOfRangeError
from tcomp.runtime.arrays import Array, Shape, admit
from tcomp.runtime.artifact import Artifact
from tcomp.runtime.bound import Bound, Call
from tcomp.runtime.manifest import TensorSpec, numpy_dtype
from tcomp.runtime.plan import size_of
from tcomp.runtime.trace import Span

MEMORY_LIMIT = 1 << 46  # bytes; more than any machine has, less than overflows
UNKNOWN = -1  # a data-dependent dim before the run, or one that values give before these are looked at
_WORK = ("flops", "slots", "divisions", "bytes", "narrow")


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


class RunRecord(NamedTuple):
    """One run of a model: `start` by time.perf_counter and its `seconds`, both without the checks before; bytes of inputs, outputs and
    workspace; `status`, 0 if all went well (see tcomp_run_fn in include/tcomp.h); and how long (seconds) its caller `waited` for other
    threads (0 on a GPU)."""

    model: LoadedModel
    start: float
    seconds: float
    inputs: int
    outputs: int
    workspace: int
    status: int = 0
    waited: float = 0.0


class LoadedModel(ABC):
    """A compiled model that can be run: a `Module` on CPUs, a `CudaModule` on a GPU.

    artifact: Artifact, what was loaded
    manifest: Manifest, what the artifact says of itself
    inputs, outputs: tuples of TensorSpec, in the order of the graph
    threads: int, those of this machine that run the model
    max_memory: int | None, the most bytes of workspace and outputs of a run
    hook: None, or a function that is called after every run, with its RunRecord, in the thread that ran it; what it raises, the run raises
    """

    threads: int
    hook: Callable[[RunRecord], object] | None = None

    def __init__(self, artifact: Artifact, max_memory: int | None = None) -> None:
        if max_memory is not None and (isinstance(max_memory, bool) or not isinstance(max_memory, int) or max_memory < 0):
            raise InputError(f"max_memory must be a number of bytes, not {max_memory!r:.40}")
        self.artifact, self.manifest, self.max_memory = artifact, artifact.manifest, max_memory
        self.inputs, self.outputs = self.manifest.inputs, self.manifest.outputs
        self._names, self._output_names = ([spec.name for spec in specs] for specs in (self.inputs, self.outputs))
        self._admission = [(spec, numpy_dtype(spec.dtype)) for spec in self.inputs]
        self._output_dtypes = [numpy_dtype(spec.dtype) for spec in self.outputs]
        self._dim_index = {dim.name: index for index, dim in enumerate(self.manifest.dims)}
        deciding = {name for dim in self.manifest.dims for name in dim.values}
        self._deciding = [n for n, name in enumerate(self._names) if name in deciding]  # inputs whose values give dims

    @abstractmethod
    def _execute(self, values: list[Any], out: Mapping[str, object] | None = None, timeout: float | None = None) -> list[Any]:
        """The outputs, in order, for inputs in order; those that `out` names, there."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop all runs that are under way in other threads, within milliseconds: they raise StoppedError. Raises DeviceError on a GPU,
        where a kernel cannot be stopped."""

    @abstractmethod
    def _prepared(self, values: list[Any], out: Mapping[str, object] | None) -> tuple[list[Array], list[Array], Call]:
        """See `bind`: the inputs and outputs, and what computes the latter from the former."""

    @abstractmethod
    def _profile(self, inputs: Mapping[str, object], runs: int) -> list[tuple[str, float]]:
        """See `profile`; the model has run once with these inputs."""

    @property
    def machine_code(self) -> LoadedModel:
        """The model without host steps: what the compiler has made, with inputs and outputs of its own."""
        return self

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"<tcomp.{type(self).__name__} ({inputs}) -> ({outputs}), {self.threads} thread{'s'[: self.threads > 1]}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact to a file, atomically."""
        self.artifact.save(path)

    def run(self, inputs: Mapping[str, object], out: Mapping[str, object] | None = None, timeout: float | None = None) -> dict[str, Array]:
        """Run the model on named inputs: output name -> ndarray, fresh unless `out` has one for it (from 1 KiB on, aligned to 64 bytes).

        Inputs are arrays (NumPy, or anything with `__dlpack__` or `__array__`) of exactly the declared element type, or Python numbers and
        lists whose values fit it. Types that NumPy lacks (bfloat16, float8_e4m3fn, int4, ...) are those of ml_dtypes where that is
        installed, else unsigned integers holding the bits: uint16, or uint8 (one for each element, also of 2 and 4 bits). An output with
        data-dependent extents is a view of the first elements of a larger array.

        `out` has arrays for some or all outputs, by name: writeable, C-contiguous, of the output's element type and shape (with upper
        bounds for data-dependent extents), which overlap neither inputs nor each other. They are NumPy's, or of any library with
        `__dlpack__`, and are returned as NumPy arrays over the same memory. Runs are fastest where they are aligned to 64 bytes.

        `timeout` is in seconds: what runs longer is stopped. Ctrl-C stops a run of the main thread, and `cancel` those of all threads.

        Raises StoppedError for a run that was stopped, InputError if a name, type, rank or extent does not fit, if the memory needed is
        beyond `max_memory`, or if the model itself reports an error (an index out of bounds, ...).
        """
        outputs, named = self._execute(self._ordered(inputs), out, timeout), {}
        for index, name in enumerate(self._output_names):  # half of the time of `dict(zip(...))`
            named[name] = outputs[index]
        return named

    def bind(self, inputs: Mapping[str, object], out: Mapping[str, object] | None = None) -> Bound:
        """The model bound to these inputs and outputs, as for `run`: all checks and allocations are done now, once, so that `.run()` of
        what is returned computes at once on what the arrays hold by then.

        Arrays are bound where they lie: those that `run` would have to copy are refused; Python values become arrays. Outputs that `out`
        does not name are allocated. Raises InputError as `run` does.
        """
        arrays, outputs, call = self._prepared(self._ordered(inputs), out)
        return Bound(dict(zip(self._names, arrays, strict=True)), dict(zip(self._output_names, outputs, strict=True)), call)

    def __call__(self, *inputs: object) -> Array | tuple[Array, ...]:
        """Run the model on inputs in graph order: one array, or a tuple of them if the model has not exactly one output."""
        if len(inputs) != len(self._names):
            several = "s" * (len(self._names) != 1)
            raise InputError(f"expected {len(self._names)} input{several} ({', '.join(self._names)}), got {len(inputs)}")
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

    def trace(self, inputs: Mapping[str, object]) -> list[Span]:
        """When each kernel ran, and its parts in each thread, in one run, after one that is not recorded; see `tcomp.runtime.chrome_trace`.

        On a GPU, kernels follow each other, with what passes between them left out. Raises as `profile` does.
        """
        self.run(inputs)
        return self._trace(inputs)

    def _trace(self, inputs: Mapping[str, object]) -> list[Span]:
        """See `trace`; the model has run once with these inputs."""
        spans, start = [], 0.0
        for name, seconds in self._profile(inputs, 1):
            spans.append(Span(name, False, 0, start, seconds))
            start += seconds
        return spans

    def facts(self, inputs: Mapping[str, object]) -> list[KernelFacts]:
        """What each kernel has to do for inputs of these shapes, and how it came about; in the order of `profile`. Raises ArtifactError for
        an artifact that does not say, else as `run`."""
        arrays = [admit(value, *admission) for value, admission in zip(self._ordered(inputs), self._admission, strict=True)]
        dims = self._dims_of(arrays)
        names, facts = (self.artifact.notes.get(key) for key in ("kernels", "facts"))
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
        if type(inputs) is dict and len(inputs) == len(self._names):
            try:
                return [inputs[name] for name in self._names]
            except KeyError:
                pass
        if not isinstance(inputs, Mapping):
            why = f"it is a {type(inputs).__name__}"
            raise InputError("the inputs must be a mapping from names to arrays", why=why, hint="or call the model itself: module(x, ...)")
        if len(inputs) == len(self._names) and all(map(inputs.__contains__, self._names)):
            return [*map(inputs.__getitem__, self._names)]
        wrong = {"missing": [n for n in self._names if n not in inputs], "unknown": [str(n) for n in inputs if n not in self._names]}
        what = [f"{word} {', '.join(names)}" for word, names in wrong.items() if names]
        raise InputError(f"the inputs do not match the model: {'; '.join(what)}", hint=f"it takes {', '.join(map(str, self.inputs))}")

    def _tell(self, start: float, seconds: float, inputs: Sequence[Array], outputs: Sequence[Array], workspace: int, *end: Any) -> None:
        """Call the hook; `end` are the last fields of its record."""
        if self.hook is not None:
            sizes = sum(a.nbytes for a in inputs), sum(a.nbytes for a in outputs), workspace
            self.hook(RunRecord(self, start, seconds, *sizes, *end))

    def _fail(self, error: int, index: int, extent: int) -> NoReturn:
        """Raises the error of a run that ended with the status `error`, about an index where there are `extent` elements."""
        messages = self.manifest.errors
        what = messages[error - 1] if 1 <= error <= len(messages) else f"unknown error {error}"
        if 0 <= index < extent:  # as no index is that is reported
            raise InputError(f"the model stopped: {what}", why="an integer is divided by zero")
        raise OutOfRangeError(f"the model stopped: {what}", why=f"the index is {index}, and there are {extent} elements")

    def _check_memory(self, workspace: int, outputs: int) -> None:
        """Raises InputError if so many bytes are more than the caller allows for a run."""
        if self.max_memory is not None and workspace + outputs > self.max_memory:
            what = f"the run needs {workspace + outputs} bytes, more than max_memory={self.max_memory}"
            raise InputError(what, why=f"{workspace} for its workspace and {outputs} for its outputs", hint="run with smaller inputs")

    def _dims_of(self, arrays: Sequence[Array]) -> list[int]:
        """The values of all dims that are known before a run, from the inputs."""
        return self._bind(tuple([array.shape for array in arrays]))

    def _bind(self, shapes: tuple[Shape, ...], empty: bool = False) -> list[int]:
        """The values of all dims, from the shapes of the inputs. `empty` also accepts 0 where 1 is the least, for empty outputs."""
        dims: list[int] = [UNKNOWN] * len(self._dim_index)
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
                if dims[index] not in (UNKNOWN, extent):
                    _refuse_shape(spec, shape, f"{expected} is {extent} here, but {dims[index]} in input {binder[expected]!r}")
                if (extent < dim.min and not (empty and extent == 0 and dim.min == 1)) or (dim.max is not None and extent > dim.max):
                    limit = "no limit" if dim.max is None else dim.max
                    hint = "" if extent or " " in expected else f"for sums and the like of nothing, compile with --dim {expected}=0..N"
                    _refuse_shape(spec, shape, f"{expected} is {extent}, outside its range of {dim.min} to {limit}", hint)
                dims[index], binder[expected] = extent, spec.name
        return dims


def misfit(inputs: Sequence[str], what: str, value: int, lo: int | None, hi: int | None) -> InputError:
    """The error that values of inputs make a size what it cannot be; the value just below its range stands for none at all."""
    names = ", ".join(f"`{name}`" for name in inputs)
    limits = f"from {lo} to {hi}" if hi is not None else f"{lo} or more"
    invalid = lo is not None and value == lo - 1
    why = f"they do not determine {what}, which is {limits}" if invalid else f"{what} would be {value}, and it is {limits}"
    origin = f"values of {'inputs' if len(inputs) > 1 else 'input'} {names}" if inputs else "sizes of the inputs"
    return InputError(f"the {origin} do not fit the model", why=why)


def check_sizes(workspace: int, shapes: Sequence[Shape], dims: Mapping[str, int], checks: Sequence[str] = ()) -> None:
    """Check the sizes that the code of a model tells for these dims, since memory depends on them. Raises InputError or ArtifactError."""
    known = ", ".join(f"{name} = {size}" for name, size in dims.items() if size != UNKNOWN)
    if workspace == -1 or (workspace >= 0 and any(extent < 0 for shape in shapes for extent in shape)):
        raise InputError("the inputs are too small for the model", where=known, why="a result would have a negative size")
    if workspace == -2 or workspace > MEMORY_LIMIT:
        raise InputError("the inputs are too large for the model", where=known, why="an intermediate result would be beyond all memory")
    if 0 <= -3 - workspace < len(checks):
        hint = "run with inputs of sizes that fit together, or compile for the sizes that you have, by --dim or --shape"
        raise InputError(f"the sizes of the inputs contradict each other: {checks[-3 - workspace]}", where=known, hint=hint)
    if workspace < 0:
        raise ArtifactError(f"the code asks for an impossible size: {workspace} bytes of workspace")


def _refuse_shape(spec: TensorSpec, shape: Shape, why: str, hint: str = "") -> NoReturn:
    expected = f"({', '.join(map(str, spec.shape))})"
    raise InputError(f"input {spec.name!r} has the wrong shape: expected {expected}, got {shape}", why=why, hint=hint)


def random_array(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Normally distributed numbers; integers and booleans are 0 or 1, which is a valid index, mask and token nearly everywhere."""
    if dtype.kind in "iub":
        return generator.integers(0, 2, shape).astype(dtype)
    numbers = generator.standard_normal(shape, np.float32)
    return (np.abs(numbers) if dtype.name == "float8_e8m0fnu" else numbers).astype(dtype)  # which has no sign
