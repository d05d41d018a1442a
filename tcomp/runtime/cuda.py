"""A compiled model on a GPU, by CuPy: weights uploaded once, one arena, and all launches of a run replayed as one CUDA graph.

A model whose launches depend on computed values (branches, loops that end early) is launched step by step instead, as is a model of
dynamic sizes at the first run of each size: one that comes back gets a graph. Inputs and outputs are NumPy arrays, or arrays on the device
of any library with DLPack: if every array given lies on the device, so do the results. A GPU that fails is a `DeviceError`; no fall-back.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from tcomp.errors import DeviceError, InputError
from tcomp.runtime.arrays import Array, admit, given_outputs
from tcomp.runtime.artifact import Artifact
from tcomp.runtime.bound import Call as BoundCall
from tcomp.runtime.loaded_model import LoadedModel, check_sizes
from tcomp.runtime.plan import KernelCode, Plan, dim_values, evaluate

Shapes = tuple[tuple[int, ...], ...]

MAX_SESSIONS = 16  # sets of input shapes whose memory (an arena each) and graph are remembered
MAX_GRAPH_NODES = 20_000  # launches of a CUDA graph: longer runs, which take seconds to capture, are launched step by step
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of a function: CUfunction_attribute of the driver
REPORT_BYTES = 24  # three int64: see the launch plan
_PINNED = 32 << 20  # bytes of the staging buffer for uploads: large enough that its copies run at the rate of the bus


class CudaModule(LoadedModel):
    """A compiled model that runs on a GPU. Calls from several threads take turns; several modules are independent of each other."""

    threads = 1  # it launches

    def __init__(self, artifact: Artifact, device: CupyDevice | None = None, max_memory: int | None = None) -> None:
        """Prefer `Module.load`. Raises DeviceError if there is no GPU that can run the code."""
        super().__init__(artifact, max_memory)
        manifest = artifact.manifest
        self._plan = Plan(artifact.code, len(manifest.dims), len(manifest.inputs), len(manifest.outputs))
        self._device = device if device is not None else CupyDevice()
        self._lock = threading.Lock()
        self._sessions: dict[Shapes, _Session] = {}
        with self._device.guarded():
            self._functions: dict[str, Any] = {}
            for kernel in self._plan.kernels.values():
                self._functions |= self._device.load(kernel)
            self._weights = self._device.allocate(artifact.weights.size)
            self._device.upload(self._device.address(self._weights), artifact.weights)
            self._device.synchronize()

    def _profile(self, inputs: Mapping[str, object], runs: int) -> list[tuple[str, float]]:
        totals = [0.0] * len(self._plan.labels)
        calls: list[tuple[int, Callable[[], float]]] = []  # with the moments of their starts; -1 is the end of a run
        with self._lock, self._device.guarded():
            session = self._session(self._admitted(self._ordered(inputs)))
            for _ in range(runs):
                mark = self._device.stopwatch()

                def watch(number: int, mark: Callable[[], Callable[[], float]] = mark) -> None:
                    calls.append((number, mark()))

                self._plan.execute(self._device, self._functions, session.dims, session.places, watch)
                calls.append((-1, mark()))
                self._device.synchronize()
            for (number, start), (_, end) in pairwise([(number, moment()) for number, moment in calls]):
                if number >= 0:
                    totals[number] += end - start
        return [(name, total / runs) for name, total in zip(self._plan.labels, totals, strict=True)]

    def replays(self, inputs: Mapping[str, object], runs: int = 20) -> list[float]:
        """Seconds of `runs` replays of all launches, by the device's clock, without transfers; after a run that does not count."""
        self.run(inputs)
        with self._lock, self._device.guarded():
            session = self._session(self._admitted(self._ordered(inputs)))
            mark = self._device.stopwatch()
            session.run()  # the second run of these sizes captures them
            marks = [mark()]
            for _ in range(runs):
                session.run()
                marks.append(mark())
            self._device.synchronize()
            return [end - start for start, end in pairwise([moment() for moment in marks])]

    def _admitted(self, values: list[Any]) -> list[Any]:
        """Arrays on the device as they are, all others as NumPy arrays."""
        admitted = []
        for value, (spec, dtype) in zip(values, self._admission, strict=True):
            there = self._device.on_device(value)
            if there is not None and there.dtype != _device_dtype(dtype):
                raise InputError(f"input {spec.name!r} has the wrong element type", why=f"expected {spec.dtype}, got {there.dtype}")
            admitted.append(admit(value, spec, dtype) if there is None else there)
        return admitted

    def _prepared(self, values: list[Any], out: Mapping[str, object] | None) -> tuple[list[Array], list[Array], BoundCall]:
        with self._lock, self._device.guarded():
            arrays = self._admitted(values)
            session = self._session(arrays)
        found = self._given(out or {}, session, arrays)
        outputs = [np.empty(s, d) if a is None else a for a, s, d in zip(found, session.shapes, self._output_dtypes, strict=True)]
        given = dict(zip(self._output_names, outputs, strict=True))
        return arrays, outputs, lambda: self._execute(list(arrays), given)

    def _given(self, out: Mapping[str, object], session: _Session, arrays: Sequence[Any]) -> list[Array | None]:
        wanted = [(s, d, prod(s) * d.itemsize) for s, d in zip(session.shapes, self._output_dtypes, strict=True)]
        return given_outputs(out, self.outputs, wanted, [a for a in arrays if isinstance(a, np.ndarray)])

    def cancel(self) -> None:
        """Raises DeviceError."""
        raise DeviceError("a run on a GPU cannot be stopped")

    def _execute(self, values: list[Any], out: Mapping[str, object] | None = None, timeout: float | None = None) -> list[Any]:
        if timeout is not None:
            raise DeviceError("a run on a GPU cannot be stopped", hint="leave the timeout away")
        start = time.perf_counter()
        with self._lock, self._device.guarded():
            device, arrays = self._device, self._admitted(values)
            session = self._session(arrays)
            for number, array in enumerate(arrays):
                if isinstance(array, np.ndarray):
                    device.upload(session.places["input", number], array)
                elif array.nbytes:
                    device.copy(session.places["input", number], array.data.ptr, array.nbytes)
            session.run()
            stays = out is None and bool(arrays) and not any(isinstance(a, np.ndarray) for a in arrays)
            given = self._given(out or {}, session, arrays)
            outputs: list[Any] = []
            for number, (shape, dtype) in enumerate(zip(session.shapes, self._output_dtypes, strict=True)):
                source = session.places["output", number]
                place = given[number]
                fresh = place if place is not None else np.empty(shape, dtype) if not stays else device.device_array(shape, dtype, source)
                outputs.append(fresh)
                if not stays and outputs[-1].nbytes:
                    device.download(outputs[-1], source)
            device.synchronize()
            report = self._reported(session)
        self._tell(start, time.perf_counter() - start, arrays, outputs, session.workspace, report[0])
        if report[0]:
            self._fail(*report)
        return outputs

    def _reported(self, session: _Session) -> list[int]:
        """What kernels have reported to be out of range in the last run: see `_fail`."""
        place, report = session.places.get(("report", 0)), np.zeros(REPORT_BYTES // 8, np.int64)
        if place is not None:
            self._device.download(report, place)
            self._device.synchronize()
            if report[0]:
                self._device.fill(place, REPORT_BYTES)
        return report.tolist()

    def _session(self, arrays: Sequence[Any]) -> _Session:
        """The session of these shapes of inputs; those used last are remembered."""
        shapes = tuple(tuple(a.shape) for a in arrays)
        if shapes not in self._sessions and len(self._sessions) >= MAX_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        session = self._sessions.pop(shapes, None) or _Session(self, shapes)
        self._sessions[shapes] = session
        return session


class _Session:
    """Memory for one set of input shapes, and the graph of all launches."""

    def __init__(self, module: CudaModule, shapes: Shapes) -> None:
        device, plan = module._device, module._plan
        self.dims = module._bind(shapes)
        values = dim_values(self.dims)
        self.workspace = workspace = plan.workspace_size(values)
        self.shapes = [tuple(evaluate(d, values) for d in shape) for shape in plan.outputs]
        check_sizes(workspace, self.shapes, dict(zip(module._dim_index, self.dims, strict=True)), module.manifest.checks)
        result_sizes = [prod(s) * d.itemsize for s, d in zip(self.shapes, module._output_dtypes, strict=True)]
        module._check_memory(workspace, sum(result_sizes))
        arrays = (("input", shapes, [d for _, d in module._admission]), ("output", self.shapes, module._output_dtypes))
        sizes = {(kind, n): prod(s) * dtypes[n].itemsize for kind, several, dtypes in arrays for n, s in enumerate(several)}
        self.memory = {key: device.allocate(size) for key, size in {("workspace", 0): workspace, **sizes}.items()}
        if plan.reports:
            self.memory["report", 0] = device.allocate(REPORT_BYTES)
        self.places = {key: device.address(m) for key, m in self.memory.items()} | {("weights", 0): device.address(module._weights)}
        if plan.reports:
            device.fill(self.places["report", 0], REPORT_BYTES)
        self._launch = partial(plan.execute, device, module._functions, self.dims, self.places)
        self._capture = device.capture
        self._static = not plan.branches and plan.count(self.dims) <= MAX_GRAPH_NODES
        self._graph: Callable[[], None] | None = None
        self._again = not self.dims  # sizes that may change each time are captured when they come back

    def run(self) -> None:
        """All launches, after each other on the device's stream."""
        if self._graph is None and self._static and self._again:
            self._graph = self._capture(self._launch)
        self._again = True
        (self._graph or self._launch)()


class CupyDevice:
    """The current device of CuPy, with a stream of its own."""

    def __init__(self) -> None:
        self.cupy = cupy = usable_cupy()
        with self.guarded():
            self.device = cupy.cuda.Device()
            self.capability = int(self.device.compute_capability)
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self.modules: list[int] = []  # loaded code stays as long as the process: kernels may still be running
        self.byte = np.zeros(1, np.uint8)
        self.staging: Any = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Errors of the device as `DeviceError`s. After some of them (an illegal access) CUDA refuses all further work of the process
        on this device; that too is reported, at the next call."""
        cupy = self.cupy
        try:
            device = getattr(self, "device", None) or cupy.cuda.Device()
            with device:
                device.use()  # the driver's functions need its context in this thread
                yield
        except cupy.cuda.memory.OutOfMemoryError as problem:
            raise DeviceError("the GPU has not enough memory", why=str(problem), hint="run with smaller inputs") from None
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as problem:
            raise DeviceError("the GPU reports an error", why=str(problem)) from None

    def allocate(self, size: int) -> Any:
        """Memory of `size` bytes. Raises an error of CuPy if there is not enough."""
        return self.cupy.cuda.alloc(max(size, 1))

    def address(self, memory: Any) -> int:
        """Where memory begins."""
        return int(memory.ptr)

    def load(self, kernel: KernelCode) -> dict[str, Any]:
        """Load the code of a kernel; its functions by name."""
        driver, found = self.cupy.cuda.driver, {}
        self.modules.append(module := driver.moduleLoadData(best_code(kernel, self.capability)))
        for launch in kernel.launches:
            function = driver.moduleGetFunction(module, launch.function)
            if launch.shared:
                driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared)
            found[launch.function] = function, launch.shared
        return found

    def unload(self) -> None:
        """Free the code that was loaded last; nothing of it may be running."""
        self.cupy.cuda.driver.moduleUnload(self.modules.pop())

    def launch(self, function: Any, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[int]) -> None:
        """Launch a loaded function on the stream."""
        handle, shared = function
        cells = (ctypes.c_int64 * max(1, len(arguments)))(*arguments)  # pointers and 64-bit integers alike
        start = ctypes.addressof(cells)
        places = (ctypes.c_void_p * max(1, len(arguments)))(*(start + 8 * n for n in range(len(arguments))))
        self.cupy.cuda.driver.launchKernel(handle, *grid, *block, shared, self.stream.ptr, ctypes.addressof(places), 0)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes on the device, on the stream."""
        self.cupy.cuda.runtime.memcpyAsync(target, source, size, self.cupy.cuda.runtime.memcpyDeviceToDevice, self.stream.ptr)

    def fill(self, target: int, size: int) -> None:
        """Zeros."""
        self.cupy.cuda.runtime.memsetAsync(target, 0, size, self.stream.ptr)

    def upload(self, target: int, array: Array) -> None:
        """Through pinned memory, piece by piece, so that the transfer runs at full speed."""
        runtime, data = self.cupy.cuda.runtime, array.reshape(-1).view(np.uint8)
        if not data.size:
            return
        if (size := min(data.size, _PINNED)) > (0 if self.staging is None else self.staging.nbytes):
            self.stream.synchronize()  # a copy from the one that goes may be under way
            self.staging = np.frombuffer(self.cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        for begin in range(0, data.size, self.staging.nbytes):
            piece = data[begin : begin + self.staging.nbytes]
            self.stream.synchronize()  # the staging buffer is free again
            self.staging[: piece.size] = piece
            address = self.staging.__array_interface__["data"][0]
            runtime.memcpyAsync(target + begin, address, piece.size, runtime.memcpyHostToDevice, self.stream.ptr)

    def download(self, array: Array, source: int) -> None:
        """Copy from the device to an array."""
        runtime, address = self.cupy.cuda.runtime, array.__array_interface__["data"][0]
        runtime.memcpyAsync(address, source, array.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)

    def read_byte(self, address: int) -> int:
        """The byte at an address, once the stream has reached it."""
        self.download(self.byte, address)
        self.stream.synchronize()
        return int(self.byte[0])

    def on_device(self, value: object) -> Any | None:
        """The value as a contiguous CuPy array if it lies on a GPU, else None."""
        where = getattr(value, "__dlpack_device__", None)
        if where is None or where()[0] != 2:  # kDLCUDA
            return None
        if where()[1] != self.device.id:
            why = f"it lies on GPU {where()[1]}, the model on GPU {self.device.id}"
            raise InputError("an input lies on another GPU", why=why, hint="copy it there first")
        array = self.cupy.ascontiguousarray(value if isinstance(value, self.cupy.ndarray) else self.cupy.from_dlpack(value))
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record())  # what computes it may still be running
        return array

    def device_array(self, shape: Sequence[int], dtype: np.dtype[Any], source: int) -> Any:
        """A new array on the device with the content at `source`."""
        result = self.cupy.empty(shape, _device_dtype(dtype))
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record())  # who had this memory before may still be using it
        if result.nbytes:
            self.copy(result.data.ptr, source, result.nbytes)
        return result

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of `work` as a CUDA graph; returns what replays them."""
        self.stream.begin_capture()
        try:
            work()
        except BaseException:
            with suppress(self.cupy.cuda.runtime.CUDARuntimeError):  # of a capture that the first error has broken
                self.stream.end_capture()
            raise
        return partial(self.stream.end_capture().launch, self.stream)

    def stopwatch(self) -> Callable[[], Callable[[], float]]:
        """Marks this moment of the stream; the function returned marks others. These tell the seconds in between, once the device is past
        them: as float32 by the driver, so that a stopwatch is good for seconds, not for hours."""
        start = self.stream.record()

        def mark() -> Callable[[], float]:
            event = self.stream.record()
            return lambda: float(self.cupy.cuda.get_elapsed_time(start, event)) / 1e3

        return mark

    def synchronize(self) -> None:
        """Wait until all earlier operations have ended."""
        self.stream.synchronize()


def usable_cupy() -> Any:
    """The module, if there is one, and a GPU that it can use. Raises DeviceError. No context is created on the device."""
    try:
        import cupy
    except ImportError as problem:
        raise DeviceError("models for CUDA need CuPy", why=str(problem), hint="pip install 'tcomp[cuda]'") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as problem:
        raise DeviceError("no GPU can be used", why=str(problem), hint="run on a machine with an NVIDIA GPU and its driver") from None
    if not count:
        raise DeviceError("this machine has no GPU", hint="compile the model for cpu")
    return cupy


def gpu_name() -> str:
    """Of the device that is used; "" if there is none."""
    try:
        cupy = usable_cupy()
    except DeviceError:
        return ""
    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


def best_code(kernel: KernelCode, capability: int) -> bytes:
    """Machine code that a GPU of this compute capability (80 for 8.0) runs, or portable code that its driver compiles. Code for sm_XY runs
    on GPUs of the same major version from that minor version on, code for sm_XYa on exactly that one."""
    best: tuple[int, bytes] = (0, b"")
    for arch, cubin in kernel.cubins.items():
        if match := re.fullmatch(r"sm_(\d+)(a?)", arch):
            number, own = int(match[1]), bool(match[2])
            if number == capability if own else number // 10 == capability // 10 and number <= capability:
                best = max(best, (2 * number + own, cubin))
    if best[1]:
        return best[1]
    oldest = re.search(rb"\.target sm_(\d+)(a?)", kernel.ptx)
    if oldest is None or int(oldest[1]) > capability or (oldest[2] and int(oldest[1]) != capability):
        known = ", ".join(kernel.cubins) or "none"
        hint = f"tcomp compile --target 'cuda -arch=sm_{capability}'"
        raise DeviceError(f"the artifact has no code for this GPU (sm_{capability})", why=f"it was compiled for {known}", hint=hint)
    return kernel.ptx + b"\0"


def _device_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of arrays on the device: CuPy has none of ml_dtypes' types of 8 bits and fewer, and holds their bits."""
    return np.dtype(np.uint8) if dtype.isbuiltin == 2 and dtype.itemsize == 1 else dtype
