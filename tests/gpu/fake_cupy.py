"""What `runtime.cuda` uses of CuPy, played by the host: kernels are emitted text, memory is NumPy's, and a stream does nothing until it is
waited for. So what is read too early, freed too early, or overwritten while a copy is under way shows. A kernel whose text says `LOST` takes the
device's context with it: all that follows fails, as after an illegal access."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from tests.codegen.cuda import cuda_host

LOST = "the context of the device is lost"  # as a note in a kernel

SIGNATURES = {
    "driver.moduleLoadData": ("image",),
    "driver.moduleUnload": ("module",),
    "driver.moduleGetFunction": ("module", "funcname"),
    "driver.funcSetAttribute": ("f", "attribute", "value"),
    "driver.launchKernel": (
        *("f", "grid_dim_x", "grid_dim_y", "grid_dim_z", "block_dim_x", "block_dim_y", "block_dim_z"),
        *("shared_mem_bytes", "stream", "kernel_params", "extra"),
    ),
    "runtime.getDeviceProperties": ("device",),
    "runtime.memcpyAsync": ("dst", "src", "size", "kind", "stream"),
    "runtime.memsetAsync": ("ptr", "value", "size", "stream"),
    "Stream.begin_capture": ("self", "mode"),
    "Stream.end_capture": ("self",),
    "Stream.record": ("self", "event"),
    "Stream.wait_event": ("self", "event"),
    "Stream.synchronize": ("self",),
    "Device.use": ("self",),
    "Graph.launch": ("self", "stream"),
    "alloc": ("size",),
    "alloc_pinned_memory": ("size",),
    "get_elapsed_time": ("start_event", "end_event"),
}
"""The parameters of CuPy's functions as of version 14."""


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class Memory:
    """Garbage when it is allocated, and when it is freed. Like memory of CuPy's pool it stays mapped for a while: work that is still in a
    queue may write to it."""

    freed: ClassVar[deque[np.ndarray]] = deque(maxlen=256)

    def __init__(self, size: int) -> None:
        self.room = np.full(size + 320, 0xA5, np.uint8)
        self.ptr = -(-self.room.ctypes.data // 256) * 256

    def __del__(self) -> None:
        self.room[:] = 0x5A
        self.freed.append(self.room)


class Array:
    """An array on the device."""

    def __init__(self, shape: Sequence[int], dtype: Any, device: int = 0) -> None:
        self.shape, self.dtype = tuple(int(n) for n in shape), np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.data, self.device = Memory(self.nbytes), device

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    @property
    def host(self) -> np.ndarray:
        return at(self.data.ptr, self.nbytes).view(self.dtype).reshape(self.shape)


def at(address: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8) if size else np.zeros(0, np.uint8)


class FakeCupy:
    """The module. `log` names what was done, in order."""

    ndarray = Array

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken = ""  # what the next launch fails with
        self.lost = ""  # what all fails with from now on
        self.clock: Callable[[], float] = time.perf_counter
        self.room = 1 << 30
        self.threads: set[int] = set()  # in which the device's context is current
        self.handles: dict[int, Any] = {}
        self.streams: dict[int, Any] = {}
        numbers = itertools.count(1)
        cupy = self

        class Stream:
            def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
                self.ptr = next(numbers)
                self.queue: list[Callable[[], None]] = []
                self.captured: list[Callable[[], None]] | None = None
                cupy.streams[self.ptr] = self

            def add(self, work: Callable[[], None]) -> None:
                (self.queue if self.captured is None else self.captured).append(work)

            def synchronize(self) -> None:
                if self.captured is not None:
                    raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
                while self.queue and not cupy.lost:
                    self.queue.pop(0)()
                cupy.check()

            def record(self, event: Any = None) -> Any:
                event = SimpleNamespace(time=None)
                self.add(lambda: setattr(event, "time", cupy.clock() * 1e3))
                return event

            def wait_event(self, event: Any) -> None:
                pass  # the current stream of the host is always idle

            def begin_capture(self, mode: Any = None) -> None:
                self.captured = []

            def end_capture(self) -> Any:
                nodes, self.captured = self.captured or [], None
                cupy.log.append(f"capture {len(nodes)}")

                def launch(stream: Stream) -> None:
                    cupy.log.append("graph")
                    stream.queue.extend(nodes)

                return SimpleNamespace(launch=launch)

        class Device:
            id, compute_capability = 0, "80"

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *problem: object) -> None:
                pass

            def use(self) -> None:
                cupy.threads.add(threading.get_ident())

        def alloc(size: int) -> Memory:
            cupy.check()
            if size > cupy.room:
                raise OutOfMemoryError(f"Out of memory allocating {size} bytes")
            return Memory(size)

        null = Stream()
        self.cuda = SimpleNamespace(
            Stream=Stream, Device=Device, alloc=alloc, driver=SimpleNamespace(CUDADriverError=CUDADriverError), Graph=SimpleNamespace,
            runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError, memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyDeviceToDevice=3),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError), get_current_stream=lambda: null,
            alloc_pinned_memory=lambda size: (ctypes.c_uint8 * -(-size // 512 * 512))(),
            get_elapsed_time=lambda start_event, end_event: float(end_event.time - start_event.time),
        )  # fmt: skip
        self.cuda.runtime.getDeviceCount = lambda: 1
        self.cuda.runtime.getDeviceProperties = lambda device: {"name": b"a host"}
        self.cuda.runtime.memcpyAsync, self.cuda.runtime.memsetAsync = self.copy, self.fill
        for name in ("moduleLoadData", "moduleUnload", "moduleGetFunction", "funcSetAttribute", "launchKernel"):
            setattr(self.cuda.driver, name, getattr(self, name))
        self.numbers = numbers

    def check(self) -> None:
        if self.lost:
            raise CUDARuntimeError(self.lost)

    # ---- the driver

    def handle(self, value: Any) -> int:
        if threading.get_ident() not in self.threads:
            raise CUDADriverError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
        self.check()
        number = next(self.numbers)
        self.handles[number] = value
        return number

    def moduleLoadData(self, image: bytes) -> int:
        assert type(image) is bytes
        return self.handle(image.decode())

    def moduleUnload(self, module: int) -> None:
        self.check()
        del self.handles[module]

    def moduleGetFunction(self, module: int, funcname: str) -> int:
        assert funcname in self.handles[module]
        return self.handle((self.handles[module], funcname))

    def funcSetAttribute(self, f: int, attribute: int, value: int) -> None:
        assert f in self.handles and attribute == 8
        self.log.append(f"shared {value}")

    def launchKernel(self, f: int, *rest: int) -> None:
        assert len(rest) == 10 and all(type(n) is int for n in rest)
        (x, y, z, bx, by, bz, _, stream, parameters, extra), (text, name) = rest, self.handles[f]
        assert extra == 0
        if threading.get_ident() not in self.threads:
            raise CUDADriverError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
        if self.broken:
            raise CUDADriverError(self.broken)
        head = text[text.index(f"{name}(") :]
        count = head[: head.index("{")].count(",") + 1
        places = (ctypes.c_void_p * count).from_address(parameters)
        values = [ctypes.c_int64.from_address(p or 0).value for p in places]  # the driver copies them before it returns

        def work() -> None:
            if LOST in text:
                self.lost = "cudaErrorIllegalAddress: an illegal memory access was encountered"
            else:
                cuda_host.launch(text, name, (x, y, z), (bx, by, bz), values)

        self.streams[stream].add(work)

    # ---- the runtime

    def copy(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert kind in (1, 2, 3) and size > 0
        self.log.append(f"copy {kind}")

        def work() -> None:
            at(dst, size)[:] = at(src, size)

        self.streams[stream].add(work)

    def fill(self, ptr: int, value: int, size: int, stream: int) -> None:
        assert 0 <= value < 256 and size > 0
        self.log.append(f"fill {size}")

        def work() -> None:
            at(ptr, size)[:] = value

        self.streams[stream].add(work)

    # ---- arrays

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return Array(shape, dtype)

    def ascontiguousarray(self, array: Array) -> Array:
        return array

    def from_dlpack(self, value: Any) -> Array:
        raise AssertionError("all arrays are of this library")
