"""The cost of a scheduled loop program on a GPU: an analytic model, launch by launch.

Of each launch is counted what the units of a multiprocessor (SM) have to do: arithmetic, products on tensor cores, accesses to shared
memory, accesses through the first cache; what blocks fetch from the second one, each what it touches, once; and what the launch as a whole
touches there or in memory. These overlap for the most part. SMs without a block do nothing; one with few warps waits for what these wait
for.

Accesses are counted for all threads of a block at once: in memory in pieces of `LINE` bytes, in shared memory (without conflicts) in rows
of banks, at least one for each warp; an access that an unrolled loop does not move is made once, and neighbours that such a loop visits
together. Nothing here was fitted to measurements so far: what is learned while tuning corrects it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, gcd, prod

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import Access, accesses, by_buffer, coefficient, linear_index, loop_extents
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import INDEX, Expr
from tcomp.ir.instruction import WARP
from tcomp.ir.layout import LINE
from tcomp.ir.loops import Accumulate, For, Kernel, Stmt
from tcomp.schedules.analysis.access_patterns import bytes_of
from tcomp.schedules.analysis.footprint import Footprints, at_sizes, instances
from tcomp.schedules.cost.roofline import MAX_POINTS, Estimate, executions, gpu_roof, operators, work
from tcomp.schedules.primitives.reductions import core_of, product_of
from tcomp.target import CudaTarget

MAX_REGISTERS = 255  # registers of a thread: more lie in memory
HIDING_WARPS = 8  # warps of an SM that hide nearly all of what each waits for: results of arithmetic (an estimate)
HIDING_LOADS = 16  # warps of an SM that hide nearly all of the latency of loads
IDLE_SHARE = 4  # factor by which an SM draws more than its share of the bandwidth if others are idle (an estimate)
EXPOSED = 0.25  # share of a unit's time that is waited for though another takes longer (an estimate)
OTHER_REGISTERS = 48  # registers of a thread other than its accumulators: addresses, and elements at hand (an estimate)
WIDEST = 16  # bytes of the widest access of a thread
COUNTS = (
    "launches", "blocks", "threads", "shared", "registers", "resident", "waves", "balance", "slots", "divisions", "products", "banks",
    "pieces", "fetched", "touched", "flops", "bytes", "intensity",
)  # fmt: skip
SECONDS = ("arithmetic", "tensor", "shared", "l1", "l2", "memory", "launch")
"""Names of the counts, and of the parts of the time, in an `Estimate`. They are features of the learned cost model."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch in numbers: `blocks` of `threads`, each block with bytes of `shared` memory, each thread with `registers`; then, of all
    blocks together: `slots` of arithmetic and `divisions` (see `work`), `products` of float16 on tensor cores, `banks` (cycles of shared
    memory), `pieces` of `LINE` bytes that pass the first cache, bytes `fetched` by each block and bytes `touched` by any."""

    blocks: float
    threads: float
    shared: float
    registers: float
    slots: float
    divisions: float
    products: float
    banks: float
    pieces: float
    fetched: float
    touched: float

    def resident(self, target: CudaTarget) -> int:
        """Blocks that an SM holds at once."""
        gpu, registers = target.gpu, min(self.registers, MAX_REGISTERS) * self.threads
        shared = (gpu.shared << 10) // max(1.0, self.shared)
        return max(1, int(min(gpu.threads // self.threads, gpu.blocks, shared, gpu.registers // registers)))

    def seconds(self, target: CudaTarget) -> dict[str, float]:
        """Of each unit of the busiest SM, or of what all share."""
        gpu, top = target.gpu, gpu_roof(target)
        each = ceil(self.blocks / gpu.sms)
        of_block = ceil(self.threads / WARP)
        warps = min(each, self.resident(target)) * of_block
        second = each / self.blocks / (gpu.ghz * 1e9)  # for a cycle of all SMs, on the busiest one
        cycle, waiting = (second * max(1.0, many / (warps + 1)) for many in (HIDING_WARPS, HIDING_LOADS))
        idle = of_block * WARP / self.threads  # lanes of a warp, for each that computes
        spilled = max(0.0, self.registers - MAX_REGISTERS) / MAX_REGISTERS
        used = min(1.0, IDLE_SHARE * self.blocks / gpu.sms)
        rate = next(rate for room, rate in top.memories if self.touched <= room)
        return {
            "arithmetic": max(self.slots / top.slots, self.divisions / top.divisions) * gpu.sms * gpu.ghz * 1e9 * idle * cycle,
            "tensor": self.products / gpu.tensor * cycle,
            "shared": self.banks * cycle,
            "l1": self.pieces * LINE / gpu.l1_bandwidth * waiting * (1 + spilled),
            "l2": self.fetched / (gpu.cache * 1e9) / used,
            "memory": self.touched / rate / used,
            "launch": gpu.launch * 1e-9,
        }


def time_of(seconds: dict[str, float]) -> float:
    """Units overlap; a launch waits for the one before."""
    parts = [s for name, s in seconds.items() if name != "launch"]
    return max(parts) + EXPOSED * (sum(parts) - max(parts)) + seconds["launch"]


def estimate(kernel: Kernel, target: CudaTarget, dims: Mapping[Expr, int] | None = None) -> Estimate:
    """The modelled time of a kernel; by the roofline where no loop is bound to an axis of the GPU.

    Raises `IRError` if a symbolic dim has no value in `dims`.
    """
    kernel = at_sizes(kernel, dims or {})
    todo = work(kernel, MAX_POINTS)
    least = _bound(kernel, target, float(todo.bytes))
    counts = {"flops": float(todo.flops), "bytes": float(todo.bytes), "intensity": float(todo.flops) / max(1.0, float(todo.bytes))}
    if not any(isinstance(s, For) and s.kind in L.GPU_AXES for s in L.walk(kernel.body)):
        return Estimate(least, least, {"roofline": least}, counts)
    kernel = L.hoist_temporaries(kernel)[0]
    found = [launch_of(replace(kernel, body=L.block(*stmts)), target) for stmts in L.launches(kernel.body)]
    times = [launch.seconds(target) for launch in found]
    slowest = found[max(range(len(times)), key=lambda n: time_of(times[n]))]
    each = slowest.blocks / target.gpu.sms
    counts |= {f.name: sum(getattr(x, f.name) for x in found) for f in fields(Launch)}  # of all launches; of what a block has, the extremes
    counts |= {name: getattr(slowest, name) for name in ("blocks", "threads", "shared", "registers")}
    counts |= {"launches": len(found), "resident": slowest.resident(target), "waves": each, "balance": each / ceil(each)}
    seconds, time = {name: sum(t[name] for t in times) for name in SECONDS}, sum(map(time_of, times))
    return Estimate(max(time, least), least, seconds, {n: float(x) for n, x in counts.items()})


def bound(kernel: Kernel, target: CudaTarget, dims: Mapping[Expr, int] | None = None) -> float:
    """The least seconds that a kernel takes, by the roofline. Raises as `estimate`."""
    kernel = at_sizes(kernel, dims or {})
    return _bound(kernel, target, float(work(kernel, MAX_POINTS).bytes))


def _bound(kernel: Kernel, target: CudaTarget, compulsory: float) -> float:
    """The roofline of a kernel of known size that moves `compulsory` bytes: see `work`, except that conditions and selections of a padding
    are not counted for each element, and sums of products of converted factors run on tensor cores, at the rate of warpgroups."""
    slots, divisions, products = _arithmetic(kernel, lambda s, product: all(core_of(f) is not f for f in product.args), 1)
    gpu = target.gpu
    return max(gpu_roof(target).seconds(slots, divisions, compulsory)[0], products / (2 * gpu.tensor * gpu.sms * gpu.ghz * 1e9))


def _arithmetic(kernel: Kernel, is_tensor: Callable[[Accumulate, Expr], bool], min_flops: int) -> tuple[float, float, float]:
    """(slots, divisions, products of float16 on tensor cores, by `is_tensor`) of a kernel. Only operators of so many operations count, and
    neither those of indices nor conditions, as address arithmetic is free."""
    slots = divisions = products = 0.0
    for s, times in executions(kernel, MAX_POINTS):
        product = product_of(s)[0] if isinstance(s, Accumulate) else None
        if isinstance(s, Accumulate) and product is not None and is_tensor(s, product):
            products += times * min(itemsize(e.dtype) for f in product.args for e in E.walk(f) if e.dtype not in (INDEX, "bool")) / 2
        else:
            costs = [c for e, c in operators(s) if e.dtype not in (INDEX, "bool") and c.flops >= min_flops]
            slots, divisions = slots + times * sum(c.slots for c in costs), divisions + times * sum(c.divisions for c in costs)
    return slots, divisions, products


def launch_of(kernel: Kernel, target: CudaTarget) -> Launch:
    """The counts of one launch of known size."""
    body, found = kernel.body, accesses(kernel.body)
    footprints = Footprints(found, MAX_POINTS)
    loops = [x for x in L.walk(body) if isinstance(x, For)]
    axes = {axis: max([1, *(footprints.extent(x) for x in loops if x.kind == axis)]) for axis in L.GPU_AXES}
    blocks, threads = (prod(axes[axis] for axis in level) for level in (L.BLOCK_AXES, L.THREAD_AXES))
    together = {s for call in L.walk(body) if isinstance(call, L.Call) for s in L.walk(call.body)}
    buffers = [s.buffer for s in L.walk(body) if isinstance(s, L.Allocate)]
    of_threads = {s.buffer for x in loops if x.kind in L.THREAD_AXES for s in L.walk(x) if isinstance(s, L.Allocate)}
    moved = dict.fromkeys(L.SCOPES, 0.0)
    for a in found:
        if a.buffer.scope != "register":
            moved[a.buffer.scope] += _moved(a, footprints, together, ceil(threads / WARP), target)
    of_block, everything = {x.var for x in loops if x.kind not in L.BLOCK_AXES}, loop_extents(body).keys()
    groups = [group for buffer, group in by_buffer(found).items() if buffer.scope == "global"]
    fetched = sum(footprints.touched(group, of_block).lines * blocks for group in groups)
    touched = sum(footprints.touched(group, everything).lines for group in groups)
    # Of a thread. A buffer outside of the loops over threads is divided among these.
    registers = sum(bytes_of(b) / 4 / (1 if b in of_threads else threads) for b in buffers if b.scope == "register")
    return Launch(
        blocks, threads, sum(bytes_of(b) for b in buffers if b.scope == "shared"), OTHER_REGISTERS + registers,
        *_arithmetic(kernel, lambda s, product: s in together, 0), moved["shared"], moved["global"], fetched * LINE, touched * LINE,
    )  # fmt: skip


def _moved(a: Access, footprints: Footprints, together: set[Stmt], warps: int, target: CudaTarget) -> float:
    """Lines, or rows of banks, that an access moves in all: those of all threads at once, as often as they make it."""
    at_once = {x.var for x in a.loops if x.kind in L.THREAD_AXES or x.kind == L.VECTORIZED or x in together}
    moving = set(E.variables(*a.indices))
    around = tuple(x for x in a.loops if x.var not in at_once and (x.kind != L.UNROLLED or x.var in moving))
    known = {x.var for x in around}
    times = instances(around, [c for c in a.conditions if set(E.variables(c)) <= known], MAX_POINTS)
    touched, size, least = footprints.touched([a], at_once), itemsize(a.buffer.dtype), warps if at_once else 1
    if a.buffer.scope == "global":
        return times * max(touched.lines, least)
    place = linear_index(a.buffer, a.indices)
    neighbours = (x for x in around if x.kind == L.UNROLLED and coefficient(place, x.var) == 1)
    wide = max((gcd(footprints.extent(x), WIDEST // size) for x in neighbours), default=1)
    return times / wide * max(touched.elements * wide * size / target.gpu.shared_bandwidth, least)
