"""The measuring process for GPUs: the loop of `worker`, with the memory and the clock of a device (CuPy). A run is timed between two events
of its own, after the second-level cache was filled with other data; short ones run several times, all queued at once, and the mean counts.
(Many launches between two events would find their weights in the cache, and a kernel that works in place its own results.) After some
errors of the device CUDA refuses all further work of the process: so it ends at any of them, and says why."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from statistics import fmean
from typing import Any

import numpy as np

from tcomp.autotune.measurement.worker import GUARD, Array, Built, Device, request_handler
from tcomp.autotune.measurement.worker_process import Answer, reason_of, serve
from tcomp.errors import DeviceError
from tcomp.runtime.cuda import CupyDevice
from tcomp.runtime.plan import Plan

_REPEATS, _LONG = 16, 200e-6  # runs of one measurement, and seconds that they take together, about, if one does not take longer


@dataclass(frozen=True)
class _DeviceArray:
    """An array on the device: a part of `memory`."""

    memory: Any
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


_cupy_device = cache(CupyDevice)


class _Gpu(Device):
    """The device and, in `flush_bytes` bytes of its memory, the other data of a model. All its stores go through the cache that is read
    next: `read_back` takes no time."""

    def __init__(self, threads: int, harness: str, flush_bytes: int) -> None:
        self._device = _cupy_device()
        self._other = self.array((flush_bytes,), np.dtype(np.uint8), [])

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], guards: list[Any]) -> _DeviceArray:
        size, device, byte = prod(shape) * dtype.itemsize, self._device, np.dtype(np.uint8)
        memory = device.allocate(size + 2 * GUARD)  # not guarded: CuPy raises a `MemoryError`
        start = device.address(memory)
        with device.guarded():
            device.fill(start, size + 2 * GUARD)
        guards += (_DeviceArray(memory, at, (GUARD,), byte) for at in (start, start + GUARD + size))
        return _DeviceArray(memory, start + GUARD, shape, dtype)

    def put(self, content: Array) -> _DeviceArray:
        array = self.array(content.shape, content.dtype, [])
        with self._device.guarded():
            self._device.upload(array.address, np.ascontiguousarray(content))
            self._device.synchronize()
        return array

    def get(self, array: _DeviceArray) -> Array:
        found = np.empty(array.shape, array.dtype)
        with self._device.guarded():
            if found.nbytes:
                self._device.download(found, array.address)
            self._device.synchronize()
        return found

    def load(self, built: Built, arrays: Sequence[_DeviceArray], cleanup: ExitStack) -> Callable[[], object]:
        def unload() -> None:
            with self._device.guarded():  # after an error, this is one as well
                self._device.unload()

        plan, functions = Plan(base64.b64decode(built["code"]), 0, len(arrays), 0), {}
        with self._device.guarded():
            for kernel in plan.kernels.values():
                functions.update(self._device.load(kernel))
                cleanup.callback(unload)
        return partial(plan.execute, self._device, functions, [], {("input", n): a.address for n, a in enumerate(arrays)})

    def seconds(
        self, run: Callable[[], object], restored: Sequence[tuple[_DeviceArray, _DeviceArray]], cached: Sequence[_DeviceArray]
    ) -> float:
        device = self._device

        def copy(target: _DeviceArray, source: _DeviceArray) -> None:
            if size := min(target.nbytes, source.nbytes):
                device.copy(target.address, source.address, size)

        def times(count: int) -> list[float]:
            found = []
            for _ in range(count):
                for array, content in restored:
                    copy(array, content)
                device.fill(self._other.address, self._other.nbytes)
                for array in cached:
                    copy(self._other, array)
                mark = device.stopwatch()
                run()
                found.append(mark())
            device.synchronize()
            return [time() for time in found]

        with device.guarded():
            (first,) = times(1)
            more = min(_REPEATS, int(_LONG / max(first, 1e-9)))
            return fmean(times(more)) if more > 1 else first


def handle(request: Answer) -> Answer:
    """Answer one request, as `worker.request_handler` does; an error of the device ends the process."""
    try:
        return _answer(request)
    except DeviceError as error:
        print(reason_of(error), file=sys.stderr, flush=True)
        os._exit(1)


_answer = request_handler(cache(_Gpu))

if __name__ == "__main__":
    serve(handle)
