"""The measuring process: loads candidates, checks their results, and times them. Run as a program, it is a child (see `children.py`).

It knows how arrays lie in memory and nothing of the compiler: a candidate arrives as a shared object that imports nothing. One request
readies a task ("prepare"): inputs are drawn, and the default schedule computes what candidates have to compute. The others ("measure")
run a candidate of that task beside the incumbent, in turns, so that whatever disturbs one disturbs the other. Each run finds what a kernel
in the middle of a model finds: caches close to the cores hold what else is computed, then what it reads but for constants; the threads
of the pool are awake. And it pays for what it leaves: results that are read back slower than others, for example as they bypass the caches.
"""

from __future__ import annotations

import base64
import ctypes
import os
import resource
import time
from _ctypes import dlclose
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf, prod, sqrt
from typing import Any, Self

import numpy as np

from tcomp.autotune.children import Answer, serve
from tcomp.ir.dtypes import integer_range, is_float, is_integer, to_numpy
from tcomp.ir.layout import LINE, Layout, Piece
from tcomp.runtime.native import open_library

Array = np.ndarray
Built = Mapping[str, Any]
"""{"code": a shared object with the function `kernel`, "arguments": of `Argument`s the fields, "temporaries": bytes, "scalars": sizes}"""

_TOLERANCES = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-9}  # relative, where up to _FOLD elements are folded
_FOLD = 1024
_FEWEST = 3  # rounds, in each of which both run once
_TRIES = 4
_GUARD = 256  # bytes on either side of what a candidate writes
_HOPELESS = 2.0  # times as slow as the incumbent after two rounds or more: measured no further
_SURE = 0.02  # seconds after which that is believed: what disturbs short runs may do so for some of them
_KEPT = 3  # layouts of an input, on average
_INTEGERS = 100  # inputs that are integers are up to so large


def handle(request: Answer) -> Answer:
    """Answer one request; see `prepare` and `measure`."""
    if request.pop("do") == "prepare":
        _state.clear()
        _state.append(_Prepared.of(**request))
        return {"status": "ok"}
    return _state[0].measure(**request)


# ---------------------------------------------------------------- one task


@dataclass
class _Prepared:
    """A task readied for measuring. `given` are the logical inputs by position, `expected` the logical results."""

    surroundings: _Surroundings
    given: list[Array | None]
    expected: list[Array]
    fold: int
    physical: dict[tuple[int, Layout | None], Array] = field(default_factory=dict)

    @classmethod
    def of(cls, threads: int, ground: str, room: int, reference: Built, fold: int, seed: int) -> _Prepared:
        """`ground` is what `builder.ground` makes."""
        surroundings = _Surroundings.of(threads, ground, room)
        arguments = [_argument(a) for a in reference["arguments"]]
        best: _Prepared | None = None
        for signed in (True, False):  # what is not defined for negative numbers is not judged by what it makes of them
            given = [_drawn(a, np.random.default_rng([seed, n]), signed) if a.given else None for n, a in enumerate(arguments)]
            made = cls(surroundings, given, [], fold)
            with _Loaded(reference, made) as loaded:
                loaded.run()
                made.expected = loaded.results()
            if best is None or _finite(made.expected) > _finite(best.expected):
                best = made
            if _finite(best.expected) == 1.0:
                break
        assert best is not None
        return best

    def measure(self, incumbent: Built, candidate: Built, rounds: int, seconds: float) -> Answer:
        """Both run in turns for up to so many rounds or seconds, whichever is first."""
        with _Loaded(candidate, self) as new:
            new.run()
            if reason := self._wrong(new):
                return {"status": "wrong", "reason": reason}
            with _Loaded(incumbent, self) as old:
                old.run()
                times: tuple[list[float], list[float]] = ([], [])
                left = [inf, inf]  # seconds to read the results
                begin = time.perf_counter()
                for n in range(rounds):
                    for which in (0, 1) if n % 2 else (1, 0):
                        times[which].append((new, old)[which].run())
                        left[which] = min(left[which], (new, old)[which].read_back())
                    spent = time.perf_counter() - begin
                    hopeless = n + 1 >= 2 and spent > _SURE and min(times[0]) > _HOPELESS * min(times[1])
                    if hopeless or (n + 1 >= _FEWEST and spent > seconds):
                        break
            if reason := self._wrong(new):
                return {"status": "wrong", "reason": f"not every time: {reason}"}
        paid = [[t + more - min(left) for t in side] for side, more in zip(times, left, strict=True)]
        return {"status": "ok", "reason": "", "seconds": paid[0], "incumbent": paid[1]}

    def input(self, number: int, layout: Layout | None) -> Array:
        """An input as it lies in memory; kept, since most candidates agree on that."""
        key = (number, layout)
        if key not in self.physical:
            given = self.given[number]
            assert given is not None
            laid = given if layout is None else layout.to_physical(given)
            if len(self.physical) > _KEPT * len(self.given):
                del self.physical[next(iter(self.physical))]
            self.physical[key] = allocate(laid.shape, laid.dtype)
            self.physical[key][...] = laid
        return self.physical[key]

    def _wrong(self, loaded: _Loaded) -> str:
        if loaded.strayed:
            return "it writes outside of its buffers"
        for a, got, want in zip(loaded.written, loaded.results(), self.expected, strict=True):
            tolerance = _TOLERANCES.get(a.dtype, 0.0) * max(1.0, sqrt(self.fold / _FOLD))
            if (error := difference(got, want)) > tolerance:
                return f"`{a.name}` differs by {error:.3g} from what the default schedule computes; {tolerance:.3g} would be right"
        return ""


_state: list[_Prepared] = []  # the task at hand


@dataclass(frozen=True)
class _Surroundings:
    """The thread pool, and the other data of a model."""

    library: ctypes.CDLL
    pool: ctypes.c_void_p
    threads: int
    other: Array
    sums: Array

    @staticmethod
    @lru_cache(maxsize=4)
    def of(threads: int, ground: str, room: int) -> _Surroundings:
        library = open_library(base64.b64decode(ground))[0]
        pool = None
        if threads > 1:
            library.tcomp_pool_create.restype = ctypes.c_void_p
            pool = library.tcomp_pool_create(threads, None)
        other, sums = (allocate((size,), np.dtype(np.uint8)) for size in (room, threads * LINE))
        return _Surroundings(library, ctypes.c_void_p(pool), threads, other, sums)

    def flush(self) -> None:
        """Fill the caches close to the cores."""
        self.library.flush(self.pool, ctypes.c_void_p(self.other.ctypes.data))

    def touch(self, array: Array) -> None:
        """Read an array, each thread its share."""
        if count := array.nbytes // LINE // self.threads:
            self.library.touch(self.pool, *(ctypes.c_void_p(a.ctypes.data) for a in (array, self.sums)), ctypes.c_int64(count))


class _Loaded:
    """A candidate in this process, with its arrays; a context manager."""

    def __init__(self, built: Built, task: _Prepared) -> None:
        self._task, self._cleanup = task, ExitStack()
        library, descriptor = open_library(base64.b64decode(built["code"]))
        self._cleanup.callback(dlclose, library._handle)
        if descriptor is not None:
            self._cleanup.callback(os.close, descriptor)
        arguments = [_argument(a) for a in built["arguments"]]
        self.written = [a for a in arguments if a.written]
        self._results: list[Array] = []
        self._renewed: list[tuple[Array, Array]] = []
        self._near: list[Array] = []  # what the kernels before have made, the latest last
        self._guards: list[Array] = []
        arrays = []
        for n, a in enumerate(arguments):
            if not a.written:
                arrays.append(task.input(n, a.layout))
                self._near[:0] = [] if a.constant else [arrays[-1]]
                continue
            arrays.append(allocate(a.physical_shape, to_numpy(a.dtype), self._guards))
            self._results.append(arrays[-1])
            if a.given:
                self._renewed.append((arrays[-1], task.input(n, a.layout)))
        arrays += [allocate((size,), np.dtype(np.uint8), self._guards) for size in built["temporaries"]]
        self._arrays = arrays  # alive as long as their addresses are used
        places = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        self._call = partial(library.kernel, task.surroundings.pool, *places, *map(ctypes.c_int64, built["scalars"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def run(self) -> float:
        """Seconds of one run; of another one, a few times, where a thread lost its core to another process meanwhile."""
        for _ in range(_TRIES):
            for array, content in self._renewed:
                array[...] = content
            self._task.surroundings.flush()
            for array in self._near:
                self._task.surroundings.touch(array)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            start = time.perf_counter()
            self._call()
            seconds = time.perf_counter() - start
            if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before:
                break
        return seconds

    def read_back(self) -> float:
        """Seconds to read the results of the last run."""
        start = time.perf_counter()
        for array in self._results:
            self._task.surroundings.touch(array)
        return time.perf_counter() - start

    @property
    def strayed(self) -> bool:
        """Whether it wrote beside its arrays."""
        return any(guard.any() for guard in self._guards)

    def results(self) -> list[Array]:
        """The logical elements of what it wrote last."""
        pairs = zip(self.written, self._results, strict=True)
        return [array.copy() if a.layout is None else a.layout.from_physical(array, a.shape) for a, array in pairs]


# ---------------------------------------------------------------- arrays


@dataclass(frozen=True)
class _Argument:
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None
    given: bool
    written: bool
    constant: bool
    below: int | None

    @property
    def physical_shape(self) -> tuple[int, ...]:
        return self.shape if self.layout is None else tuple(int(d) for d in self.layout.shape(self.shape))


def _argument(record: Sequence[Any]) -> _Argument:
    name, dtype, shape, pieces, *rest = record
    layout = None if pieces is None else Layout(len(shape), tuple(Piece(*p) for p in pieces))
    return _Argument(name, dtype, tuple(shape), layout, *rest)


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], guards: list[Array] | None = None) -> Array:
    """Zeros, aligned as the arrays of a model are. Raises `MemoryError`. The zeros around them are added to `guards`."""
    size = prod(shape) * dtype.itemsize
    room = np.zeros(size + 2 * _GUARD + 64, np.uint8)
    start = _GUARD + -(room.ctypes.data + _GUARD) % 64
    if guards is not None:
        guards += room[:start], room[start + size :]
    return room[start : start + size].view(dtype).reshape(shape)


def _drawn(a: _Argument, rng: np.random.Generator, signed: bool) -> Array:
    if a.below is not None:
        return rng.integers(0, max(1, a.below), a.shape).astype(to_numpy(a.dtype))
    if is_float(a.dtype):
        values = rng.standard_normal(a.shape, np.float32) if signed else rng.uniform(0.1, 0.9, a.shape)
        return np.asarray(values).astype(to_numpy(a.dtype))
    if is_integer(a.dtype):
        lowest, highest = integer_range(a.dtype)
        return rng.integers(max(lowest, -_INTEGERS if signed else 1), min(highest, _INTEGERS), a.shape, endpoint=True).astype(a.dtype)
    return rng.integers(0, 2, a.shape).astype(bool)


def _finite(arrays: Sequence[Array]) -> float:
    """The share of finite elements."""
    total = sum(a.size for a in arrays)
    return sum(int(np.isfinite(a.astype(np.float64)).sum()) for a in arrays) / total if total else 1.0


def difference(got: Array, want: Array) -> float:
    """max |got - want| / max |want|; infinite where one is not finite and the other is another such or finite. Integers: 0 or infinite."""
    if not want.size or got.tobytes() == want.tobytes():
        return 0.0
    if not is_float(want.dtype.name):
        return float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    gap, scale = (float(np.max(np.abs(x), where=finite, initial=0.0)) for x in (a - b, b))
    return gap / scale if scale else float("inf") if gap else 0.0


if __name__ == "__main__":
    serve(handle)
