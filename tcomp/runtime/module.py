"""A loaded model that runs in this process: arrays in, arrays out, by its shared object in workspaces of native memory."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy import broadcast_to, ndarray, zeros

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime.arrays import Array, Shape, admit, given_outputs
from tcomp.runtime.artifact import Artifact, Source, read_artifact
from tcomp.runtime.bound import Call as BoundCall
from tcomp.runtime.frame import OWN_BYTES, Frame, Plan, address_of, new_arrays
from tcomp.runtime.host import check_target, default_threads
from tcomp.runtime.loaded_model import MEMORY_LIMIT, LoadedModel, check_sizes, misfit
from tcomp.runtime.native_code import NativeCode
from tcomp.runtime.pool import shared_pool
from tcomp.runtime.stopping import answer_interrupts, run_frame, stop, stoppable
from tcomp.runtime.trace import Events, Span, TracedView
from tcomp.runtime.workspace import Workspace, give_back, take

if TYPE_CHECKING:
    from tcomp.runtime.signing import Key

PlanKey: TypeAlias = tuple[Shape | bytes, ...]  # the shapes of the inputs, then the values of those that give dims
Run: TypeAlias = Callable[[int], int]  # takes the address of the call

_log = logging.getLogger("tcomp")
USABLE = 0x101  # NumPy's flags C_CONTIGUOUS and ALIGNED
MAX_PLANS = 256  # sets of input shapes remembered, a few hundred bytes each
MAX_FRAMES = 16  # idle frames, of at most 65 KiB each: as many calls at the same time need no new ones


class Module(LoadedModel):
    """A compiled model that runs in this process.

    Calls are safe from any number of Python threads, and from signal handlers: each runs in a workspace of its own, and none waits for
    another. All modules of a process share one thread pool; a parallel loop that finds its workers busy runs on its caller alone. They
    start when they are first needed, on the CPUs that the thread needing them may use. A forked child starts its own.
    """

    def __init__(
        self, artifact: Artifact, threads: int | None = None, code_path: str | os.PathLike[str] | None = None, max_memory: int | None = None
    ) -> None:
        """Prefer `Module.load`. Raises ArtifactError if this machine cannot run the code, InputError for a bad number of threads."""
        check_target(artifact.manifest.triple, artifact.manifest.features)
        if threads is not None and (not isinstance(threads, int) or not 1 <= threads <= 4096):
            raise InputError(f"threads must be between 1 and 4096, not {threads!r}")
        super().__init__(artifact, max_memory)
        self._code = NativeCode(artifact.code, code_path)
        if self._code.pool_create is None:
            if threads not in (None, 1):
                raise InputError(f"cannot run with {threads} threads: the model was compiled for one", hint="compile it with more")
            threads = 1
        self.threads = threads or self.manifest.threads or default_threads()
        self._pool = shared_pool(self._code) if self.threads > 1 else None  # kept as long as the view below is used
        self._view = self._pool.view(self.threads) if self._pool is not None else None
        self._pool_at = ctypes.addressof(self._view) if self._view is not None else None
        self._binds = any(dim.what for dim in self.manifest.dims)
        if self._binds and self._code.bind is None:
            raise ArtifactError("the artifact's code lacks the function tcomp_bind", where=artifact.where)
        self._grows = any(dim.data_dependent for dim in self.manifest.dims)
        self._continued = {s.output: self._names.index(s.input) for s in self.manifest.state}
        self._plans: dict[PlanKey, Plan] = {}
        _log.debug("loaded %s for %d threads", artifact.where, self.threads)
        answer_interrupts()
        self._frames: list[Frame] = []  # of no call; taken and given back without a lock, by single operations
        self._events: list[Events] = []  # likewise, for runs with a hook

    @classmethod
    def load(
        cls,
        source: Source | Artifact,
        threads: int | None = None,
        verify: bool = False,
        code_path: str | os.PathLike[str] | None = None,
        max_memory: int | None = None,
        mmap: bool = True,
        trusted: Key | None = None,
    ) -> LoadedModel:
        """Load an artifact: a path, an open file, the bytes of one, or an `Artifact`.

        `threads` overrides the number stored in the artifact. `verify` also checks the weights, which reads all of
        them (20 ms for 100 MB). The shared object lives in memory unless `code_path` names a file to load it from, where
        profilers and debuggers find its symbols; it is written unless it holds that code already. `max_memory` is the most bytes
        that a run may take for its workspace and outputs: more is refused before it is allocated.

        The file is mapped: whoever changes it in place changes the model, or ends the process; without `mmap` it is read into
        memory. `trusted` is a public key of Ed25519 (a file in PEM, or its contents): only what its owner signed (`tcomp sign`)
        is loaded, weights included, and it is read into memory, so that what was checked is what runs.

        Raises ArtifactError if the file is damaged, not signed by that key, or for another machine; InputError for a bad key.
        """
        artifact = source if isinstance(source, Artifact) else read_artifact(source, mmap and trusted is None)
        if trusted is not None:
            from tcomp.runtime.signing import check_signature  # not needed for others

            check_signature(artifact, trusted)
        elif verify:
            artifact.verify()
        loaded: LoadedModel
        if artifact.manifest.triple == "cuda":
            from tcomp.runtime.cuda import CudaModule  # not needed for others

            loaded = CudaModule(artifact, max_memory=max_memory)
        else:
            loaded = cls(artifact, threads, code_path, max_memory)
        if artifact.manifest.host is None:
            return loaded
        from tcomp.runtime.host_steps.model import HostedModel  # not needed for others

        return HostedModel(loaded, artifact.manifest.host)

    def _profiled(self) -> tuple[list[str], Callable[..., int]]:
        """The names of the kernels, and the function that takes their times."""
        names, run_profiled = self.artifact.notes.get("kernels"), self._code.run_profiled
        if run_profiled is None or not isinstance(names, list):
            raise ArtifactError("the artifact cannot be profiled", where=self.artifact.where, hint="compile it again")
        return [*map(str, names)], run_profiled

    def _trace(self, inputs: Mapping[str, object]) -> list[Span]:
        names, run_profiled = self._profiled()
        events, ticks = Events(), (ctypes.c_int64 * len(names))()
        frame, plan, *_ = self._bound_frame([admit(v, *a) for v, a in zip(self._ordered(inputs), self._admission, strict=True)], None)
        if plan.empty:
            return []
        _kept = self._record(frame, events)
        start = time.perf_counter()
        error = run_profiled(frame.address, ticks, events.address)
        seconds = time.perf_counter() - start
        if error:
            self._fail(error, frame.call.index, frame.call.extent)
        return events.spans(names, threading.get_native_id(), seconds)

    def _profile(self, inputs: Mapping[str, object], runs: int) -> list[tuple[str, float]]:
        names, run_profiled = self._profiled()
        ticks, wall = (ctypes.c_int64 * len(names))(), 0.0

        def timed(call: int) -> int:
            nonlocal wall
            start = time.perf_counter()
            error = int(run_profiled(call, ticks, None))
            wall += time.perf_counter() - start
            return error

        for _ in range(runs):
            self._execute(self._ordered(inputs), run=timed)
        rate = wall / runs / (sum(ticks) or 1)
        return [(name, count * rate) for name, count in zip(names, ticks, strict=True)]

    def _observed(self, run: Run, frame: Frame, timeout: float | None, inputs: list[Array], outputs: list[Array]) -> int:
        """The status of a run with a hook."""
        try:
            events = self._events.pop()
        except IndexError:
            events = Events()
        traced = self._record(frame, events)
        start = time.perf_counter()
        try:
            error = run_frame(run, frame, timeout)
            seconds = time.perf_counter() - start
        finally:
            frame.call.pool = self._pool_at
        waited = events.waited(threading.get_native_id(), seconds) if traced is not None else 0.0
        self._events.append(events)
        self._tell(start, seconds, inputs, outputs, frame.plan.workspace if frame.plan is not None else 0, error, waited)
        return error

    def _record(self, frame: Frame, events: Events) -> TracedView | None:
        """Have the pool record what its threads do in runs of a frame; None where there is no pool. The result must outlive the run."""
        if self._view is None or self._code.pool_trace is None:
            return None
        traced = TracedView(self._view, events.address)
        self._code.pool_trace(ctypes.addressof(traced))
        frame.call.pool = ctypes.addressof(traced)
        return traced

    def _execute(
        self,
        values: list[Any],
        out: Mapping[str, object] | None = None,
        timeout: float | None = None,
        run: Run | None = None,
        ready: Callable[[Plan], list[Array]] | None = None,
    ) -> list[Array]:
        """The outputs; `run` takes the place of the native function that is called, and `ready` tells where the outputs are to be."""
        shapes, places = [], []
        for index, (spec, dtype) in enumerate(self._admission):
            value = values[index]
            if type(value) is not ndarray or value.dtype is not dtype or value.flags.num & USABLE != USABLE:
                values[index] = value = admit(value, spec, dtype)
            shapes.append(value.shape)
            places.append(address_of(value))
        key: PlanKey = tuple(shapes)
        if self._deciding:
            key = (*key, *[values[n].tobytes() for n in self._deciding])
        if (plan := self._plans.get(key)) is None and (plan := self._make_plan(key, values)).empty:
            return self._outputs(plan, values, out or {})
        if ready is not None:
            outputs = ready(plan)
        else:
            outputs = new_arrays(plan.outputs) if out is None else self._outputs(plan, values, out)
        for array in outputs:
            places.append(address_of(array))
        dims = self._run_plan(plan, places, values, outputs, timeout, run)
        return self._slice(outputs, plan, dims) if self._grows else outputs

    def fixed_plan(self) -> Plan | None:
        """What each run takes where all sizes are known, else None."""
        if self.manifest.dims:
            return None
        arrays = [broadcast_to(zeros((), dtype), [int(d) for d in spec.shape]) for spec, dtype in self._admission]
        plan = self._make_plan(tuple([array.shape for array in arrays]), arrays)
        return None if plan.empty else plan

    def run_at(self, plan: Plan, places: list[int]) -> None:
        """Run on memory at the addresses of all inputs, then of all outputs, whose types, sizes and alignment are not checked. `plan` is
        the `fixed_plan`. Raises as `run`."""
        self._run_plan(plan, places, [], [])

    def _run_plan(
        self, plan: Plan, places: list[int], values: list[Any], outputs: list[Array], timeout: float | None = None, run: Run | None = None
    ) -> list[int]:
        """The sizes that a run has counted; none, if there are no such."""
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = self._frame()
        if frame.plan is not plan or self._grows:
            frame.prepare(plan)
        workspace = None
        if plan.workspace > OWN_BYTES:
            workspace = take(plan.workspace)
            frame.call.workspace = workspace.address
        frame.fill(places)
        run = run or self._code.run
        if self.hook is None:
            error = run_frame(run, frame, timeout)
        else:
            error = self._observed(run, frame, timeout, values, outputs)
        if error:  # the frame is not used again: the code left a status in it
            self._fail(error, frame.call.index, frame.call.extent)
        dims = list(frame.dims) if self._grows else []
        if workspace is not None:
            give_back(workspace)
        if len(self._frames) < MAX_FRAMES:
            self._frames.append(frame)
        return dims

    def _prepared(self, values: list[Any], out: Mapping[str, object] | None) -> tuple[list[Array], list[Array], BoundCall]:
        arrays = [admit(value, spec, dtype, copy=False) for value, (spec, dtype) in zip(values, self._admission, strict=True)]
        frame, plan, workspace, outputs = self._bound_frame(arrays, out)
        if plan.empty:
            return arrays, outputs, lambda: None
        run = self._code.run
        deciding = [(arrays[n], arrays[n].tobytes(), self._names[n]) for n in self._deciding]

        def call() -> None:
            for array, planned, name in deciding:
                if array.tobytes() != planned:
                    why = "sizes depend on them, and memory is bound for these sizes"
                    raise InputError(f"the values of input `{name}` have changed", why=why, hint="bind the model again")
            error = run_frame(run, frame) if self.hook is None else self._observed(run, frame, None, arrays, outputs)
            if error:
                try:
                    self._fail(error, frame.call.index, frame.call.extent)
                finally:  # ready for the next run
                    frame.call.index = frame.call.extent = 0

        def call_and_slice() -> list[Array]:
            frame.prepare(plan)
            frame.call.workspace = workspace.address
            call()
            return self._slice(outputs, plan, list(frame.dims))

        return arrays, outputs, call_and_slice if self._grows else call

    def cancel(self) -> None:
        """Stop all runs that are under way in other threads, those of bound calls included: they raise StoppedError."""
        stop(self._code, "cancel() was called")

    def _bound_frame(self, arrays: list[Array], out: Mapping[str, object] | None) -> tuple[Frame, Plan, Workspace, list[Array]]:
        """A frame of these inputs and outputs, with a workspace of its own."""
        plan = self._make_plan((*[array.shape for array in arrays], *[arrays[n].tobytes() for n in self._deciding]), arrays)
        outputs = self._outputs(plan, arrays, out or {})
        workspace, frame = Workspace(plan.workspace), self._frame()
        frame.prepare(plan)
        frame.call.workspace = workspace.address
        frame.fill([*map(address_of, arrays), *map(address_of, outputs)])
        frame.alive = workspace, arrays, outputs
        return frame, plan, workspace, outputs

    def _frame(self) -> Frame:
        frame = Frame(self.artifact.weights, len(self._names), len(self._output_names), len(self._dim_index), self._pool_at)
        frame.owner = self._code
        return stoppable(frame)

    def _outputs(self, plan: Plan, inputs: list[Array], out: Mapping[str, object]) -> list[Array]:
        """The arrays that the caller gave, and new ones for the others."""
        given = given_outputs(out, self.outputs, plan.outputs, inputs, self._continued)
        return [array if array is not None else new_arrays([output])[0] for array, output in zip(given, plan.outputs, strict=True)]

    def _dims_of(self, arrays: Sequence[Array]) -> list[int]:
        dims = self._bind(tuple([array.shape for array in arrays]))
        if self._binds:
            assert self._code.bind is not None
            values = (ctypes.c_int64 * len(dims))(*dims)
            places = (ctypes.c_void_p * len(arrays))(*map(address_of, arrays))
            if refused := self._code.bind(places, values):
                dim = self.manifest.dims[refused - 1]
                raise misfit(dim.values, dim.what, values[refused - 1], dim.min, dim.max)
            dims = [*values]
        return dims

    def _make_plan(self, key: PlanKey, arrays: Sequence[Array]) -> Plan:
        shapes = tuple([array.shape for array in arrays])
        dims = self._dims_of(arrays) if self._binds else self._bind(shapes, empty=True)
        # Code made for sizes from 1 on must not run for a batch of no rows, and need not: all that it would compute is nothing.
        zero = not self._binds and any(size == 0 and dim.min == 1 for size, dim in zip(dims, self.manifest.dims, strict=True))
        try:
            workspace, extents = self._sizes(dims)
        except InputError:
            self._bind(shapes)  # says which size is out of range, if one is
            raise
        if zero and (self._grows or any(map(prod, extents))):
            self._bind(shapes)
        workspace = 0 if zero else workspace
        outputs = [(shape, d, prod(shape) * d.itemsize) for shape, d in zip(extents, self._output_dtypes, strict=True)]
        for shape, _, size in outputs:
            if size > MEMORY_LIMIT:
                raise InputError(f"an output would have the shape {shape}: {size >> 40} TiB", hint="run with smaller inputs")
        self._check_memory(workspace, sum(size for _, _, size in outputs))
        if zero:
            return Plan(dims, workspace, outputs, empty=True)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        return self._plans.setdefault(key, Plan(dims, workspace, outputs))

    def _sizes(self, dims: list[int]) -> tuple[int, list[Shape]]:
        """Bytes of workspace and the shapes of the outputs for these dims, as the code tells them."""
        sizes = (ctypes.c_int64 * (1 + sum(len(spec.shape) for spec in self.outputs)))()
        self._code.plan((ctypes.c_int64 * max(1, len(dims)))(*dims), sizes)
        workspace, extents = sizes[0], iter(sizes[1:])
        shapes = [tuple(islice(extents, len(spec.shape))) for spec in self.outputs]
        check_sizes(workspace, shapes, dict(zip(self._dim_index, dims, strict=True)), self.manifest.checks)
        for spec, shape in zip(self.outputs, shapes, strict=True):
            if any(isinstance(promised, int) and promised != extent for promised, extent in zip(spec.shape, shape, strict=True)):
                raise ArtifactError(f"the code makes output {spec} of the shape {shape}, against its manifest")
        return workspace, shapes

    def _slice(self, outputs: list[Array], plan: Plan, dims: list[int]) -> list[Array]:
        """The valid parts of the outputs, now that the data-dependent dims are known."""
        text = " ".join(extent for spec in self.outputs for extent in spec.shape if isinstance(extent, str))
        unknown = {dim.name for dim, value in zip(self.manifest.dims, dims, strict=True) if dim.data_dependent and value < 0}
        if not unknown.isdisjoint(re.findall(r"[\w.]+", text)):  # others are sizes in branches that were not taken
            raise ArtifactError(f"the code did not determine its data-dependent dims: {dims}")
        _, extents = self._sizes(dims)
        for spec, shape, (bound, _, _) in zip(self.outputs, extents, plan.outputs, strict=True):
            if prod(shape) > prod(bound):
                raise ArtifactError(f"output {spec} grew to {shape}, beyond its bound {bound}")
        return [a if a.shape == shape else a.reshape(-1)[: prod(shape)].reshape(shape) for a, shape in zip(outputs, extents, strict=True)]
