"""The measuring process: loads candidates, checks their results, and times them. Run as a program, it is a worker process for CPUs;
`worker_gpu` does the same for GPUs, with another `Device`. Each run finds what a kernel in the middle of a model finds: the caches close to
the cores hold other data, then the inputs of the kernel except its constants; the threads of the pool are awake. A candidate also pays for
the state it leaves, such as results that bypass the caches and take longer to read back."""

from __future__ import annotations

import base64
import ctypes
import resource
import time
from _ctypes import dlclose
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf, prod, sqrt
from typing import Any, Protocol

import numpy as np

from tcomp.autotune.arguments import Argument
from tcomp.autotune.measurement.worker_process import Answer, serve
from tcomp.ir.dtypes import NARROW_FLOATS, integer_range, is_float, is_integer, to_numpy
from tcomp.ir.layout import LINE, Layout
from tcomp.runtime.native_code import Call, open_library

Array = np.ndarray
Built = Mapping[str, Any]
"""{"code": a shared object with the function `kernel` (for a GPU, a launch plan that calls it once), "arguments": those of
`Argument.to_json`, "temporaries": bytes of each, "scalars": sizes, "reduction_size": elements that are accumulated into one}"""

_TOLERANCES = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-9}  # relative, for reductions of _TOLERANCE_SIZE elements
_TOLERANCE_SIZE = 1024
_MIN_ROUNDS = 3  # in each of which both run once
_RETRIES = 4
GUARD = 256  # bytes on either side of what a candidate writes
_TOO_SLOW = 2.0  # a candidate this many times as slow as the incumbent after two rounds or more is measured no further
_TOO_SLOW_AFTER = 0.02  # seconds after which that is believed: what disturbs short runs may do so for some of them
_CACHED_LAYOUTS = 3  # of an input, on average
_INTEGERS = 100  # inputs that are integers are at most that large


class Device(Protocol):
    """The device that candidates run on: its memory and arrays, its clock, and the state of its caches before a run."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], guards: list[Any]) -> Any:
        """Zeros. Raises `MemoryError`. The zeros on either side of them are added to `guards`."""

    def put(self, content: Array) -> Any:
        """An array of this content. Raises `MemoryError`."""

    def get(self, array: Any) -> Array:
        """Its content; valid until the next run, as it may be the array itself."""

    def load(self, built: Built, arrays: Sequence[Any], cleanup: ExitStack) -> Callable[[], object]:
        """A candidate as a function that runs it on these arrays, until `cleanup` is closed."""

    def seconds(self, run: Callable[[], object], restored: Sequence[tuple[Any, Any]], cached: Sequence[Any]) -> float:
        """Of one run, after which it has ended. Before it, the second array of each pair in `restored` is copied to the first, and caches
        are filled with other data, then with the arrays in `cached`."""

    def read_back(self, results: Sequence[Any]) -> float:
        """Seconds to read the results of the last run; 0 where it makes no difference how they were stored."""
        return 0.0


def request_handler(device: Callable[[int, str, int], Device]) -> Callable[[Answer], Answer]:
    """The handler of requests; see `_PreparedTask.of` and `_PreparedTask.measure`. `device` takes the threads, the harness and
    `flush_bytes`."""
    state: list[_PreparedTask] = []  # the present task

    def handle(request: Answer) -> Answer:
        if request.pop("do") == "measure":
            return state[0].measure(**request)
        state.clear()
        state.append(_PreparedTask.of(device(*(request.pop(name) for name in ("threads", "harness", "flush_bytes"))), **request))
        return {"status": "ok"}

    return handle


@dataclass
class _PreparedTask:
    """A task that is ready to be measured. `given` are the logical inputs by position, `expected` the logical results."""

    device: Device
    given: list[Array | None]
    reduction_size: int
    expected: list[Array] = field(default_factory=list)
    physical: dict[tuple[int, Layout | None], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, device: Device, reference: Built, seed: int) -> _PreparedTask:
        """Draw inputs and run the default schedule on them."""
        arguments = [Argument.from_json(a) for a in reference["arguments"]]

        def prepared(signed: bool) -> _PreparedTask:
            given = [_drawn(a, np.random.default_rng([seed, n]), signed) if a.given else None for n, a in enumerate(arguments)]
            task = cls(device, given, reference["reduction_size"])
            with _LoadedCandidate(reference, task) as loaded:
                loaded.run()
                task.expected = loaded.results()
            return task

        task = prepared(signed=True)
        # A function that is not defined for negative numbers is judged by positive ones.
        return min(task, prepared(signed=False), key=_PreparedTask.undefined) if task.undefined() else task

    def undefined(self) -> int:
        """How many elements of the results are not finite."""
        return sum(int((~np.isfinite(a.astype(np.float64))).sum()) for a in self.expected)

    def measure(self, incumbent: Built, candidate: Built, rounds: int, seconds: float) -> Answer:
        """Both run in turns for up to that many rounds or seconds, whichever is first."""
        with _LoadedCandidate(candidate, self) as new:
            new.run()
            if reason := self.wrong(new):
                return {"status": "wrong", "reason": reason}
            with _LoadedCandidate(incumbent, self) as old:
                old.run()
                times: tuple[list[float], list[float]] = ([], [])
                reading, begin = [inf, inf], time.perf_counter()  # seconds to read the results
                for n in range(rounds):
                    for which in (0, 1) if n % 2 else (1, 0):
                        times[which].append((new, old)[which].run())
                        reading[which] = min(reading[which], (new, old)[which].read_back())
                    spent = time.perf_counter() - begin
                    too_slow = n + 1 >= 2 and spent > _TOO_SLOW_AFTER and min(times[0]) > _TOO_SLOW * min(times[1])
                    if too_slow or (n + 1 >= _MIN_ROUNDS and spent > seconds):
                        break
            if reason := self.wrong(new):
                return {"status": "wrong", "reason": f"not every time: {reason}"}
        seconds_of = [[t + more - min(reading) for t in side] for side, more in zip(times, reading, strict=True)]
        return {"status": "ok", "reason": "", "seconds": seconds_of[0], "incumbent": seconds_of[1]}

    def input(self, number: int, layout: Layout | None) -> Any:
        """An input in a physical layout; cached, since most candidates agree on that."""
        if (number, layout) not in self.physical:
            given = self.given[number]
            assert given is not None
            if len(self.physical) > _CACHED_LAYOUTS * len(self.given):
                del self.physical[next(iter(self.physical))]
            self.physical[number, layout] = self.device.put(given if layout is None else layout.to_physical(given))
        return self.physical[number, layout]

    def wrong(self, loaded: _LoadedCandidate) -> str:
        """The error in the results of the last run of a candidate; "" if they are right."""
        if any(self.device.get(guard).any() for guard in loaded.guards):
            return "it writes outside of its buffers"
        for (a, _), got, want in zip(loaded.written, loaded.results(), self.expected, strict=True):
            tolerance = _TOLERANCES.get(a.dtype, 0.0) * max(1.0, sqrt(self.reduction_size / _TOLERANCE_SIZE))
            if (error := difference(got, want)) > tolerance:
                return f"`{a.name}` differs by {error:.3g} from what the default schedule computes; {tolerance:.3g} would be right"
        return ""


class _LoadedCandidate(ExitStack):
    """A candidate in this process, with its arrays, until the end of a block."""

    def __init__(self, built: Built, task: _PreparedTask) -> None:
        super().__init__()
        self.device, arguments = task.device, [Argument.from_json(a) for a in built["arguments"]]
        self.guards: list[Any] = []  # next to its arrays
        inputs = {n: task.input(n, a.layout) for n, a in enumerate(arguments) if a.given}
        results = {n: self.device.array(a.physical_shape, to_numpy(a.dtype), self.guards) for n, a in enumerate(arguments) if a.written}
        self.written = [(arguments[n], array) for n, array in results.items()]
        self.arrays = [results[n] if n in results else inputs[n] for n in range(len(arguments))]  # alive while their addresses are used
        self.arrays += [self.device.array((size,), np.dtype(np.uint8), self.guards) for size in built["temporaries"]]
        restored = [(array, inputs[n]) for n, array in results.items() if n in inputs]
        # What preceding kernels have written, the latest last.
        cached = [inputs[n] for n in reversed(inputs) if n not in results and not arguments[n].constant]
        self.run = partial(self.device.seconds, self.device.load(built, self.arrays, self), restored, cached)
        self.read_back = partial(self.device.read_back, [*results.values()])

    def results(self) -> list[Array]:
        """The logical elements of its results after the last run."""
        pairs = [(a, self.device.get(array)) for a, array in self.written]
        return [array.copy() if a.layout is None else a.layout.from_physical(array, a.shape) for a, array in pairs]


class _Cpu(Device):
    """The thread pool, and the other data of a model. Arrays are those of NumPy. `harness` is what `builder.harness` makes."""

    def __init__(self, threads: int, harness: str, flush_bytes: int) -> None:
        self.threads, self.library = threads, open_library(base64.b64decode(harness))
        self.call = Call()
        if threads > 1:
            self.library.tcomp_pool_create.restype = ctypes.c_void_p
            self.call.pool = self.library.tcomp_pool_create(threads, None)
        self.other, self.sums = (self.array((size,), np.dtype(np.uint8), []) for size in (flush_bytes, threads * LINE))

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], guards: list[Array]) -> Array:
        """Aligned as the arrays of a model are."""
        size = prod(shape) * dtype.itemsize
        room = np.zeros(size + 2 * GUARD + 64, np.uint8)
        start = GUARD + -(room.ctypes.data + GUARD) % 64
        guards += room[:start], room[start + size :]
        return room[start : start + size].view(dtype).reshape(shape)

    def put(self, content: Array) -> Array:
        array = self.array(content.shape, content.dtype, [])
        array[...] = content
        return array

    def get(self, array: Array) -> Array:
        return array

    def load(self, built: Built, arrays: Sequence[Array], cleanup: ExitStack) -> Callable[[], object]:
        library = open_library(base64.b64decode(built["code"]))
        cleanup.callback(dlclose, library._handle)
        places = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        return partial(library.kernel, ctypes.byref(self.call), *places, *map(ctypes.c_int64, built["scalars"]))

    def seconds(self, run: Callable[[], object], restored: Sequence[tuple[Array, Array]], cached: Sequence[Array]) -> float:
        """Of one run; of another one, a few times, where a thread lost its core to another process meanwhile."""
        for _ in range(_RETRIES):
            for array, content in restored:
                array[...] = content
            self.library.flush(ctypes.byref(self.call), ctypes.c_void_p(self.other.ctypes.data))
            self.touch(cached)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before:
                break
        return seconds

    def read_back(self, results: Sequence[Array]) -> float:
        start = time.perf_counter()
        self.touch(results)
        return time.perf_counter() - start

    def touch(self, arrays: Sequence[Array]) -> None:
        """Read arrays, each thread its share."""
        for array in arrays:
            if count := array.nbytes // LINE // self.threads:
                self.library.touch(
                    ctypes.byref(self.call), *(ctypes.c_void_p(a.ctypes.data) for a in (array, self.sums)), ctypes.c_int64(count)
                )


def _drawn(a: Argument, rng: np.random.Generator, signed: bool) -> Array:
    if is_float(a.dtype) and a.below is None:
        values = rng.standard_normal(a.shape, np.float32) if signed else rng.uniform(0.1, 0.9, a.shape)
        return np.asarray(values).astype(to_numpy(a.dtype))
    low, high = 0, 1 if a.below is None else max(0, a.below - 1)
    if is_integer(a.dtype) and a.below is None:
        lowest, highest = integer_range(a.dtype)
        low, high = max(lowest, -_INTEGERS if signed else 1), min(highest, _INTEGERS)
    return rng.integers(low, high, a.shape, endpoint=True).astype(to_numpy(a.dtype))


def difference(got: Array, want: Array) -> float:
    """max |got - want| / max |want|; infinite where one is not finite and the other is another such or finite. Integers: 0 or infinite."""
    if not want.size or got.tobytes() == want.tobytes():
        return 0.0
    if not is_float(want.dtype.name) and want.dtype.name not in NARROW_FLOATS:
        return inf
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return inf
    gap, scale = (float(np.max(np.abs(x), where=finite, initial=0.0)) for x in (a - b, b))
    return gap / scale if scale else inf if gap else 0.0


if __name__ == "__main__":
    serve(request_handler(lru_cache(maxsize=4)(_Cpu)))
