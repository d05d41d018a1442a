"""How fast this machine is, measured once by small kernels that tcomp compiles, and stored in the cache.

Compilation does not depend on it: code is made for a `Target` and its tables, so that it is the same on every machine. Reports are: what
share of its bound a kernel reaches is a question about the machine at hand.
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from tcomp import cache
from tcomp.functions import build
from tcomp.ir import expr as E
from tcomp.ir.expr import Expr
from tcomp.ir.loops import PARALLEL, UNROLLED, VECTORIZED, Accumulate, Allocate, Buffer, Kernel, Stmt, block, loop, store
from tcomp.ir.reducers import Reducer
from tcomp.machines import Core
from tcomp.runtime.host import processor_name
from tcomp.target import CpuTarget, Target

_LEFT, _RIGHT = E.var("lhs", dtype="float32"), E.var("rhs", dtype="float32")
_SUM = Reducer("sum", _LEFT, _RIGHT, _LEFT + _RIGHT, E.const(0.0, "float32"))
_MEASURED = ("ghz", "l1_bandwidth", "l2_bandwidth", "l3_bandwidth", "memory_bandwidth", "total_memory_bandwidth")  # of `Core`
_CHAINS = 12  # independent accumulators: more than the FMA units have in flight, fewer than the registers of any target
_LARGEST = 512 << 20  # bytes read to measure memory, at most: beyond all caches, and in every machine's memory


@functools.cache
def measured() -> Core:
    """The rates of one core of this machine. The first call on a machine takes a few seconds; the result is stored."""
    target = Target.host()
    name = cache.name(str(target), processor_name())
    with suppress(ValueError, TypeError, KeyError):
        stored = cache.load("machines", name)
        rates: dict[str, Any] = {rate: float(stored[rate]) for rate in _MEASURED}
        return replace(target.core, **rates)
    core = measure(target)
    cache.store("machines", name, {rate: getattr(core, rate) for rate in _MEASURED})
    return core


def measure(target: CpuTarget) -> Core:
    """Run the kernels, now. Frequency is what makes the tables' multiply-adds a cycle come true."""
    core = target.core
    ghz = peak_flops(target) / (2 * core.fma * target.lanes(32)) / 1e9
    sizes = {"l1": target.l1 // 2, "l2": target.l2 // 2, "l3": min(target.l3 // 2, 8 * target.l2)}
    rates: dict[str, Any] = {f"{level}_bandwidth": bandwidth(target, size) / (ghz * 1e9) for level, size in sizes.items()}
    large = min(_LARGEST, max(2 * target.l3, 32 * target.l2))
    one, *more = (bandwidth(target, large, threads) / 1e9 for threads in sorted({1, target.cores}))
    return replace(core, ghz=ghz, **rates, memory_bandwidth=one, total_memory_bandwidth=max((one, *more)))


def peak_flops(target: CpuTarget, seconds: float = 0.002) -> float:
    """Operations a second of one core that does nothing but float32 multiply-adds in full vectors, for about `seconds` at a time."""
    lanes = target.lanes(32)
    steps = int(seconds * target.core.ghz * 1e9 / (_CHAINS / target.core.fma))
    x, y, out = Buffer("x", "float32", (lanes,)), Buffer("y", "float32", (lanes,)), Buffer("out", "float32", (_CHAINS, lanes))
    acc = Buffer("acc", "float32", (_CHAINS, lanes), "register")
    update = loop("k", steps, lambda k: _chains("", lanes, lambda r, j: Accumulate(acc, (r, j), x[j] * y[j], _SUM)))
    copy = _chains(".out", lanes, lambda r, j: store(out, (r, j), acc[r, j]))
    body = Allocate(acc, block(_cleared(acc, lanes), update, copy))
    run = build(Kernel("peak", (x, y, out), (out,), (), body), target, threads=1)
    arrays = [np.ones(lanes, np.float32), np.ones(lanes, np.float32), np.zeros((_CHAINS, lanes), np.float32)]
    return 2.0 * steps * _CHAINS * lanes / _least(lambda: run(*arrays), rounds=40)


def bandwidth(target: CpuTarget, size: int, threads: int = 1) -> float:
    """Bytes a second that `threads` cores together read from `size` bytes, again and again."""
    lanes, width = target.lanes(32), _CHAINS * target.lanes(32)
    rows = max(1, size // (4 * width * threads))
    times = max(1, (64 << 20) // (4 * width * rows * threads))
    x, out = Buffer("x", "float32", (threads, rows, width)), Buffer("out", "float32", (threads, lanes))
    acc = Buffer("acc", "float32", (_CHAINS, lanes), "register")

    def stream(t: Expr) -> Stmt:
        add = loop("i", rows, lambda i: _chains("", lanes, lambda r, j: Accumulate(acc, (r, j), x[t, i, r * lanes + j], _SUM)))
        reduce = _chains(".out", lanes, lambda r, j: Accumulate(out, (t, j), acc[r, j], _SUM))
        return Allocate(acc, block(_cleared(acc, lanes), loop("n", times, lambda n: add), reduce))

    run = build(Kernel("stream", (x, out), (out,), (), loop("t", threads, stream, PARALLEL)), target, threads)
    arrays = [np.ones((threads, rows, width), np.float32), np.zeros((threads, lanes), np.float32)]
    return times * arrays[0].nbytes / _least(lambda: run(*arrays), rounds=7)


def _chains(name: str, lanes: int, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
    """`body(chain, lane)` for every accumulator, in vector registers."""
    return loop(f"r{name}", _CHAINS, lambda r: loop(f"j{name}", lanes, lambda j: body(r, j), VECTORIZED), UNROLLED)


def _cleared(acc: Buffer, lanes: int) -> Stmt:
    return _chains(".clear", lanes, lambda r, j: store(acc, (r, j), 0.0))


def _least(run: Callable[[], object], rounds: int) -> float:
    """The least seconds of a run, after one that does not count."""
    run()
    return min(timeit.repeat(run, number=1, repeat=rounds))
