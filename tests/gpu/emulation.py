"""A GPU played by the host: artifacts whose machine code is the emitted text, and a device that runs it."""

from __future__ import annotations

import base64
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from tcomp import cache
from tcomp.backends import workers
from tcomp.codegen.cuda import launch_plan, nvrtc
from tcomp.runtime.cuda import CupyDevice
from tcomp.runtime.plan import KernelCode
from tests.codegen.cuda import cuda_host


@contextmanager
def text_as_code() -> Iterator[None]:
    """Kernels are compiled in this process, to the text itself; nothing is kept in the cache."""

    def compiled(text: str, arch: str, name: str = "kernel") -> nvrtc.Binary:
        return nvrtc.Binary(text.encode(), b"", {})

    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(launch_plan, "compile_text", compiled),
            mock.patch.object(nvrtc, "version", lambda: "text"),
            mock.patch.object(workers, "_jobs", lambda: 1),
            mock.patch.object(cache, "load", lambda kind, name: None),
            mock.patch.object(cache, "store", lambda kind, name, record: None),
        ):
            stack.enter_context(patch)
        yield


class HostDevice(CupyDevice):
    """What a `CudaModule` asks of a `CupyDevice`. Memory is NumPy's; launches run one after the other, threads in ascending or descending order."""

    def __init__(self, descending: bool = False) -> None:
        self.descending = descending
        self.launches: list[str] = []
        self.captured = 0

    def allocate(self, size: int) -> Any:
        room = np.full(size + 320, 0xA5, np.uint8)  # whoever reads what was never written sees garbage
        start = -room.ctypes.data % 256
        return room[start : start + size + 64]

    def address(self, memory: Any) -> int:
        return int(memory.ctypes.data)

    def load(self, kernel: KernelCode) -> dict[str, Any]:
        text = next(iter(kernel.cubins.values())).decode()
        return {launch.function: (text, launch.function) for launch in kernel.launches}

    def launch(self, function: Any, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[int]) -> None:
        text, name = function
        self.launches.append(name)
        cuda_host.launch(text, name, grid, block, arguments, self.descending)

    def copy(self, target: int, source: int, size: int) -> None:
        _at(target, size)[:] = _at(source, size)

    def fill(self, target: int, size: int) -> None:
        _at(target, size)[:] = 0

    def upload(self, target: int, array: np.ndarray) -> None:
        _at(target, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def download(self, array: np.ndarray, source: int) -> None:
        array.reshape(-1).view(np.uint8)[:] = _at(source, array.nbytes)

    def read_byte(self, address: int) -> int:
        return int(_at(address, 1)[0])

    def on_device(self, value: object) -> Any | None:
        return None

    def device_array(self, shape: Sequence[int], dtype: np.dtype, source: int) -> Any:
        raise AssertionError("no array lies on this device")

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        return work

    def stopwatch(self) -> Callable[[], Callable[[], float]]:
        def mark() -> Callable[[], float]:
            number = next(_ticks)
            return lambda: float(number)

        return mark

    @contextmanager
    def guarded(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        pass


_ticks = itertools.count()


def _at(address: int, size: int) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def decoded(entry: dict[str, Any]) -> str:
    """The text of a kernel's entry in an artifact made by `text_as_code`."""
    return base64.b64decode(next(iter(entry["cubin"].values()))).decode()
