"""A loaded model that runs in this process: arrays in, arrays out, by its shared object in workspaces of native memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime.artifact import Artifact, Source, read_artifact
from tcomp.runtime.host import check_target, default_threads
from tcomp.runtime.loaded_model import MEMORY_LIMIT, Array, LoadedModel, Shape, admit, check_sizes
from tcomp.runtime.native_code import Call, NativeCode

_HUGE = 2 << 20  # bytes of a huge page of x86-64 and AArch64
MAX_PLANS = 256  # sets of input shapes remembered, a few hundred bytes each


class Module(LoadedModel):
    """A compiled model that runs in this process.

    Calls are safe from any number of Python threads. With one thread (`threads == 1`) they run at the same time, each
    in a workspace of its own; with more, they take turns at the module's thread pool, which is the faster choice when
    latency matters. A forked child starts a pool of its own at its first call.
    """

    def __init__(self, artifact: Artifact, threads: int | None = None, code_path: str | os.PathLike[str] | None = None) -> None:
        """Prefer `Module.load`. Raises ArtifactError if this machine cannot run the code, InputError for a bad number of threads."""
        check_target(artifact.manifest.triple, artifact.manifest.features)
        if threads is not None and (not isinstance(threads, int) or not 1 <= threads <= 4096):
            raise InputError(f"threads must be between 1 and 4096, not {threads}")
        super().__init__(artifact)
        self._code = NativeCode(artifact.code, code_path)
        self._processes: dict[int, _Process] = {}
        # Not at exit: other threads may still be running the model then, and the process takes its threads with it anyway.
        weakref.finalize(self, _release, self._code, self._processes).atexit = False
        if self._code.pool_create is None:
            if threads not in (None, 1):
                raise InputError(f"cannot run with {threads} threads: the model was compiled for one", hint="compile it with more")
            threads = 1
        self.threads = threads or self.manifest.threads or default_threads()
        self._grows = any(dim.data_dependent for dim in self.manifest.dims)
        self._plans: dict[tuple[Shape, ...], _Plan] = {}

    @classmethod
    def load(
        cls, source: Source | Artifact, threads: int | None = None, verify: bool = False, code_path: str | os.PathLike[str] | None = None
    ) -> LoadedModel:
        """Load an artifact: a path, an open file, the bytes of one, or an `Artifact`.

        `threads` overrides the number stored in the artifact. `verify` also checks the weights, which reads all of
        them. The shared object lives in memory unless `code_path` names a file to load it from, where profilers and
        debuggers find its symbols. Raises ArtifactError if the file is damaged or this machine cannot run it.
        """
        artifact = source if isinstance(source, Artifact) else read_artifact(source)
        if verify:
            artifact.verify()
        if artifact.manifest.triple == "cuda":
            from tcomp.runtime.cuda import CudaModule  # not needed for others

            return CudaModule(artifact)
        return cls(artifact, threads, code_path)

    def _profile(self, inputs: Mapping[str, object], runs: int) -> list[tuple[str, float]]:
        names = self.manifest.notes.get("kernels")
        run_profiled = self._code.run_profiled
        if run_profiled is None or not isinstance(names, list):
            raise ArtifactError("the artifact cannot be profiled", where=self.artifact.where, hint="compile it again")
        ticks, wall = (ctypes.c_int64 * len(names))(), 0.0

        def timed(call: int) -> int:
            nonlocal wall
            start = time.perf_counter()
            error = int(run_profiled(call, ticks))
            wall += time.perf_counter() - start
            return error

        for _ in range(runs):
            self._execute(self._ordered(inputs), timed)
        rate = wall / runs / (sum(ticks) or 1)
        return [(str(name), count * rate) for name, count in zip(names, ticks, strict=True)]

    def _execute(self, values: list[Any], run: Callable[[int], int] | None = None) -> list[Array]:
        """The outputs; `run` takes the place of the native function that is called."""
        for index, (spec, dtype) in enumerate(self._admission):
            value = values[index]
            if type(value) is not np.ndarray or value.dtype is not dtype or not (value.flags.c_contiguous and value.flags.aligned):
                values[index] = admit(value, spec, dtype)
        shapes = tuple([value.shape for value in values])
        plan = self._plans.get(shapes) or self._make_plan(shapes)
        try:
            outputs = [_allocate(*output) for output in plan.outputs]
        except (MemoryError, ValueError) as problem:
            raise InputError("no memory for the outputs", why=str(problem), hint="run with smaller inputs") from None

        pid = os.getpid()
        process = self._processes.get(pid) or self._processes.setdefault(pid, _Process())
        run = run or self._code.run
        if self.threads == 1:
            error, dims = self._call(process, plan, values, outputs, run)
        else:
            with process.lock:
                if process.pool is None and self._code.pool_create is not None:
                    process.pool = self._code.pool_create(self.threads, None)
                error, dims = self._call(process, plan, values, outputs, run)
        if error:
            messages = self.manifest.errors
            raise InputError(f"the model stopped: {messages[error - 1] if 1 <= error <= len(messages) else f'unknown error {error}'}")
        return outputs if dims is None else self._slice(outputs, plan, dims)

    def _call(
        self, process: _Process, plan: _Plan, inputs: list[Array], outputs: list[Array], run: Callable[[int], int]
    ) -> tuple[int, list[int] | None]:
        """The error code, and the dims if the run determined some."""
        try:
            frame = process.frames.pop()
        except IndexError:
            frame = _Frame(self.artifact.weights, len(self._names), len(self._output_names), len(self._dim_index))
        frame.prepare(plan, process.pool, self._grows)
        for places, arrays in ((frame.inputs, inputs), (frame.outputs, outputs)):
            for index, array in enumerate(arrays):
                places[index] = array.__array_interface__["data"][0]
        error = run(frame.address)
        dims = list(frame.dims) if self._grows else None
        process.frames.append(frame)
        return error, dims

    def _make_plan(self, shapes: tuple[Shape, ...]) -> _Plan:
        dims = self._bind(shapes)
        workspace, extents = self._sizes(dims)
        outputs = [(shape, d, prod(shape) * d.itemsize) for shape, d in zip(extents, self._output_dtypes, strict=True)]
        for shape, _, size in outputs:
            if size > MEMORY_LIMIT:
                raise InputError(f"an output would have the shape {shape}: {size >> 40} TiB", hint="run with smaller inputs")
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        return self._plans.setdefault(shapes, _Plan(dims, workspace, outputs))

    def _sizes(self, dims: list[int]) -> tuple[int, list[Shape]]:
        """Bytes of workspace and the shapes of the outputs for these dims, as the code tells them."""
        sizes = (ctypes.c_int64 * (1 + sum(len(spec.shape) for spec in self.outputs)))()
        self._code.plan((ctypes.c_int64 * max(1, len(dims)))(*dims), sizes)
        workspace, extents = sizes[0], iter(sizes[1:])
        shapes = [tuple(islice(extents, len(spec.shape))) for spec in self.outputs]
        check_sizes(workspace, shapes, dict(zip(self._dim_index, dims, strict=True)))
        for spec, shape in zip(self.outputs, shapes, strict=True):
            if any(isinstance(promised, int) and promised != extent for promised, extent in zip(spec.shape, shape, strict=True)):
                raise ArtifactError(f"the code makes output {spec} of the shape {shape}, against its manifest")
        return workspace, shapes

    def _slice(self, outputs: list[Array], plan: _Plan, dims: list[int]) -> list[Array]:
        """The valid parts of the outputs, now that the data-dependent dims are known."""
        if any(dim.data_dependent and value < 0 for dim, value in zip(self.manifest.dims, dims, strict=True)):
            raise ArtifactError(f"the code did not determine its data-dependent dims: {dims}")
        _, extents = self._sizes(dims)
        for spec, shape, (bound, _, _) in zip(self.outputs, extents, plan.outputs, strict=True):
            if any(extent > most for extent, most in zip(shape, bound, strict=True)):
                raise ArtifactError(f"output {spec} grew to {shape}, beyond its bound {bound}")
        return [a if a.shape == shape else a[tuple(map(slice, shape))] for a, shape in zip(outputs, extents, strict=True)]


class _Plan(NamedTuple):
    """What is known once the shapes of the inputs are."""

    dims: list[int]
    workspace: int
    outputs: list[tuple[Shape, np.dtype[Any], int]]


@dataclass(slots=True)
class _Process:
    """What belongs to one process: a child made by fork has no worker threads, and its copy of a lock may be held by none."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pool: int | None = None
    frames: list[_Frame] = field(default_factory=list)


class _Frame:
    """The arguments and the workspace of one native call; reused by later calls."""

    __slots__ = ("_plan", "_workspace", "address", "call", "dims", "inputs", "outputs")

    def __init__(self, weights: npt.NDArray[np.uint8], inputs: int, outputs: int, dims: int) -> None:
        self.inputs = (ctypes.c_void_p * inputs)()
        self.outputs = (ctypes.c_void_p * outputs)()
        self.dims = (ctypes.c_int64 * dims)()
        self._plan: _Plan | None = None
        self._workspace = Workspace(0)
        at, weights_at = ctypes.addressof, weights.__array_interface__["data"][0]
        self.call = Call(at(self.inputs), at(self.outputs), weights_at, self._workspace.address, at(self.dims))
        self.address = ctypes.addressof(self.call)

    def prepare(self, plan: _Plan, pool: int | None, dims_were_written: bool) -> None:
        self.call.pool = pool
        if plan is self._plan and not dims_were_written:
            return
        self._plan = None  # if there is no memory, the next call must not take this frame for prepared
        if plan.workspace > self._workspace.size:
            self._workspace = Workspace(plan.workspace)
            self.call.workspace = self._workspace.address
        self.dims[:] = [*plan.dims]
        self._plan = plan


def _allocate(shape: Shape, dtype: np.dtype[Any], size: int) -> Array:
    """An uninitialised array whose data is aligned to 64 bytes."""
    room = np.empty(size + 63, np.uint8)
    return np.ndarray(shape, dtype, room, -room.__array_interface__["data"][0] & 63)


def _release(code: NativeCode, processes: dict[int, _Process]) -> None:
    here = processes.get(os.getpid())
    if here is not None and here.pool is not None and code.pool_destroy is not None:
        code.pool_destroy(here.pool)
    code.close()


class Workspace:
    """Scratch memory for one call at a time, aligned to 64 bytes at least; large ones ask for huge pages. InputError if there is none."""

    __slots__ = ("_memory", "address", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        large = size >= 2 * _HUGE
        try:
            self._memory = mmap.mmap(-1, size + _HUGE if large else max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as problem:
            raise InputError(f"no memory for a workspace of {size >> 20} MiB", why=str(problem), hint="run with smaller inputs") from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if large:
            self.address = -(-self.address // _HUGE) * _HUGE
            with suppress(AttributeError, OSError):  # a kernel without huge pages: only slower
                self._memory.madvise(mmap.MADV_HUGEPAGE)
