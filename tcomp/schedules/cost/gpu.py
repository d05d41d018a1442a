"""How long a scheduled loop program takes on a GPU: an analytic model, launch by launch.

Of each launch is counted what the units of a multiprocessor (SM) have to do: arithmetic, products on tensor cores, accesses to shared memory,
accesses through the first cache; what blocks fetch from the second one, each what it touches, once; and what the launch as a whole touches
there or in memory. These overlap for the most part, copies ahead of their use or not. SMs without a block do nothing; one with few warps waits
for what these wait for.

Accesses are counted for all threads of a block at once: in memory in pieces of `LINE` bytes, in shared memory (without conflicts) in rows of
`BANKS` bytes, at least one for each warp; an access that an unrolled loop does not move is made once, and neighbours that such a loop visits
together. Registers are estimated: those of the schedule's buffers, and some. Nothing here was fitted to measurements so far: what is learned
while tuning corrects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, gcd, prod

from tcomp.ir import expr as E
from tcomp.ir.access import Access, accesses, by_buffer, coefficient, linear_index, loop_extents
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import INDEX, Expr
from tcomp.ir.instruction import WARP
from tcomp.ir.layout import LINE
from tcomp.ir.loops import (
    GPU_AXES,
    UNROLLED,
    VECTORIZED,
    Accumulate,
    Allocate,
    Buffer,
    Call,
    For,
    Kernel,
    Stmt,
    Store,
    block,
    children,
    hoist_temporaries,
    launches,
    walk,
)
from tcomp.schedules.analysis.footprint import Footprints, at_sizes, instances
from tcomp.schedules.cost.estimate import MOST_POINTS, Estimate
from tcomp.schedules.cost.roofline import Cost, gpu_roof, operators, statements, work
from tcomp.schedules.primitives.cache_factors import core_of, product_of
from tcomp.target import CudaTarget

MOST = 255  # registers of a thread
BUSY, FETCHING = 8, 16  # warps of an SM that hide most of what each waits for: results of arithmetic, and what comes from memory
BANKS = 128  # bytes that an SM moves from or to shared memory a cycle
FIRST = 64  # and through its first cache
ALONE = 4  # how much more of the bandwidth than its share an SM draws if others are idle
EXPOSED = 0.25  # the share of a unit's time that is waited for though another takes longer
LAUNCH_TIME = 3000  # nanoseconds that another launch takes, with the wait for the one before (CUDA graphs, as commonly reported)
OTHER_REGISTERS = 48  # registers of a thread beside its accumulators: addresses, and elements at hand (an estimate)
COUNTS = (
    "launches", "blocks", "threads", "shared", "registers", "resident", "waves", "balance", "slots", "divisions", "products", "banks", "pieces",
    "fetched", "touched", "flops", "bytes", "intensity",
)  # fmt: skip
SECONDS = ("arithmetic", "tensor", "shared", "l1", "l2", "memory", "launch")
"""Names of the counts, and of the parts of the time, in an `Estimate`. They are features of the learned cost model."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch in numbers: `blocks` of `threads`, each block with bytes of `shared` memory, each thread with `registers`; then, of all blocks
    together: `slots` of arithmetic and `divisions` (see `work`), `products` of float16 on tensor cores, `banks` (cycles of shared memory),
    `pieces` of `LINE` bytes that pass the first cache, bytes `fetched` by each block and bytes `touched` by any."""

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
        gpu = target.gpu
        room = gpu.shared << 10
        registers = min(self.registers, MOST) * self.threads
        return max(1, int(min(gpu.threads // self.threads, gpu.blocks, room // max(1.0, self.shared), gpu.registers // registers)))

    def seconds(self, target: CudaTarget) -> dict[str, float]:
        """Of each unit of the busiest SM, or of what all share."""
        gpu, top = target.gpu, gpu_roof(target)
        each = ceil(self.blocks / gpu.sms)
        share = each / self.blocks  # of the work, for the busiest SM
        of_block = ceil(self.threads / WARP)
        warps = min(each, self.resident(target)) * of_block
        second = share / (gpu.ghz * 1e9)
        cycle, waiting = (second * max(1.0, many / (warps + 1)) for many in (BUSY, FETCHING))
        idle = of_block * WARP / self.threads  # lanes of a warp, for each that computes
        spilled = max(0.0, self.registers - MOST) / MOST
        used = min(1.0, ALONE * self.blocks / gpu.sms)
        rate = next(rate for room, rate in top.memories if self.touched <= room)
        return {
            "arithmetic": max(self.slots / top.slots, self.divisions / top.divisions) * gpu.sms * gpu.ghz * 1e9 * idle * cycle,
            "tensor": self.products / gpu.tensor * cycle,
            "shared": self.banks * cycle,
            "l1": self.pieces * LINE / FIRST * waiting * (1 + spilled),
            "l2": self.fetched / (gpu.cache * 1e9) / used,
            "memory": self.touched / rate / used,
            "launch": LAUNCH_TIME * 1e-9,
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
    todo = work(kernel, MOST_POINTS)
    least = _bound(kernel, target, float(todo.bytes))
    counts = {"flops": float(todo.flops), "bytes": float(todo.bytes), "intensity": float(todo.flops) / max(1.0, float(todo.bytes))}
    if not any(isinstance(s, For) and s.kind in GPU_AXES for s in walk(kernel.body)):
        return Estimate(least, least, {"roofline": least}, counts)
    time, seconds, more = modelled(kernel, target)
    return Estimate(max(time, least), least, seconds, {**more, **counts})


def bound(kernel: Kernel, target: CudaTarget, dims: Mapping[Expr, int] | None = None) -> float:
    """The least seconds that a kernel takes, by the roofline. Raises as `estimate`."""
    kernel = at_sizes(kernel, dims or {})
    return _bound(kernel, target, float(work(kernel, MOST_POINTS).bytes))


def _bound(kernel: Kernel, target: CudaTarget, compulsory: float) -> float:
    """The roofline of a kernel of known size that has to move so many bytes: see `work`, but that what is no operation of numbers need not
    be done for each element (a padding's conditions), and sums of products of converted factors are those of tensor cores, at the rate of
    warpgroups."""
    slots = divisions = products = 0.0
    for s, loops, conditions in statements(kernel):
        times = instances(loops, conditions, MOST_POINTS)
        product = product_of(s)[0] if isinstance(s, Accumulate) else None
        if product is not None and all(core_of(f) is not f for f in product.args):
            products += times * _halves(product)
        else:
            costs = [c for c in _costs(s) if c.flops]
            slots, divisions = slots + times * sum(c.slots for c in costs), divisions + times * sum(c.divisions for c in costs)
    gpu = target.gpu
    return max(gpu_roof(target).seconds(slots, divisions, compulsory)[0], products / (2 * gpu.tensor * gpu.sms * gpu.ghz * 1e9))


def _costs(s: Store | Accumulate) -> list[Cost]:
    """Of the operators of a statement; those of indices and conditions are free, as address arithmetic is."""
    return [cost for e, cost in operators(s) if e.dtype not in (INDEX, "bool")]


def _halves(product: Expr) -> float:
    """The size of what is multiplied, as of a float16."""
    return min(itemsize(e.dtype) for f in product.args for e in E.walk(f) if e.dtype not in (INDEX, "bool")) / 2


def modelled(kernel: Kernel, target: CudaTarget) -> tuple[float, dict[str, float], dict[str, float]]:
    """(seconds, those of each unit, counts) of a kernel of known size: sums over its launches, and of those that a block has, its extremes."""
    kernel = hoist_temporaries(kernel)[0]
    found = [launch_of(replace(kernel, body=block(*stmts))) for stmts in launches(kernel.body)]
    times = [launch.seconds(target) for launch in found]
    slowest = found[max(range(len(times)), key=lambda n: time_of(times[n]))]
    totals = {f.name: sum(getattr(x, f.name) for x in found) for f in fields(Launch)}
    counts = {**totals, **{name: getattr(slowest, name) for name in ("blocks", "threads", "shared", "registers")}}
    each = slowest.blocks / target.gpu.sms
    counts |= {"launches": len(found), "resident": slowest.resident(target), "waves": each, "balance": each / ceil(each)}
    return sum(map(time_of, times)), {name: sum(t[name] for t in times) for name in SECONDS}, {n: float(x) for n, x in counts.items()}


def launch_of(kernel: Kernel) -> Launch:
    """What is counted of one launch, of known size."""
    body = kernel.body
    found = accesses(body)
    footprints = Footprints(found, MOST_POINTS)
    axes = dict.fromkeys(GPU_AXES, 1)
    for x in walk(body):
        if isinstance(x, For) and x.kind in axes:
            axes[x.kind] = max(axes[x.kind], _extent(x, footprints))
    blocks, threads = (prod(n for axis, n in axes.items() if axis.startswith(level)) for level in ("block", "thread"))
    together = {s for call in walk(body) if isinstance(call, Call) for s in walk(call.body)}
    slots = divisions = products = 0.0
    for s, loops, conditions in statements(kernel):
        costs = _costs(s)
        times = instances(loops, conditions, MOST_POINTS) if costs else 0.0
        product = product_of(s)[0] if s in together and isinstance(s, Accumulate) else None
        if product is not None:
            products += times * _halves(product)
        else:
            slots, divisions = slots + times * sum(c.slots for c in costs), divisions + times * sum(c.divisions for c in costs)
    moved = {"shared": 0.0, "global": 0.0}
    for a in found:
        if a.buffer.scope in moved:
            moved[a.buffer.scope] += _moved(a, footprints, together, ceil(threads / WARP))
    own = {x.var for x in walk(body) if isinstance(x, For) and not x.kind.startswith("block")}
    lines = {"own": 0.0, "all": 0.0}
    for buffer, group in by_buffer(found).items():
        if buffer.scope == "global":
            lines["own"] += footprints.touched(group, own).lines * blocks
            lines["all"] += footprints.touched(group, loop_extents(body).keys()).lines
    return Launch(
        blocks, threads, sum(_bytes(b) for b, _ in _allocated(body, False) if b.scope == "shared"), _registers(body, threads), slots, divisions,
        products, moved["shared"], moved["global"], lines["own"] * LINE, lines["all"] * LINE,
    )  # fmt: skip


def _moved(a: Access, footprints: Footprints, together: set[Stmt], warps: int) -> float:
    """Lines, or rows of banks, that an access moves in all: those of all threads at once, as often as they make it."""
    at_once = {x.var for x in a.loops if x.kind.startswith("thread") or x.kind == VECTORIZED or x in together}
    moving = set(E.variables(*a.indices))
    around = tuple(x for x in a.loops if x.var not in at_once and (x.kind != UNROLLED or x.var in moving))
    known = {x.var for x in around}
    times = instances(around, [c for c in a.conditions if set(E.variables(c)) <= known], MOST_POINTS)
    touched, size = footprints.touched([a], at_once), itemsize(a.buffer.dtype)
    if a.buffer.scope == "global":
        return times * max(touched.lines, warps if at_once else 1)
    place = linear_index(a.buffer, a.indices)
    wide = max(
        (gcd(_extent(x, footprints), 16 // size) for x in around if x.kind == UNROLLED and coefficient(place, x.var) == 1), default=1
    )
    return times / wide * max(touched.elements * wide * size / BANKS, warps if at_once else 1)


def _registers(body: Stmt, threads: int) -> float:
    """Of a thread. A buffer outside of the loops over threads is divided among these."""
    return OTHER_REGISTERS + sum(
        _bytes(b) / 4 / (1 if inside else threads) for b, inside in _allocated(body, False) if b.scope == "register"
    )


def _allocated(s: Stmt, inside: bool) -> Iterator[tuple[Buffer, bool]]:
    """The buffers that are allocated in a statement, each with whether that is inside of a loop over threads."""
    if isinstance(s, Allocate):
        yield s.buffer, inside
    inside = inside or (isinstance(s, For) and s.kind.startswith("thread"))
    for child in children(s):
        yield from _allocated(child, inside)


def _bytes(b: Buffer) -> int:
    return prod(int(n) for n in b.shape) * itemsize(b.dtype)


def _extent(x: For, footprints: Footprints) -> int:
    return max(1, x.extent if isinstance(x.extent, int) else 2 * footprints.middle.get(x.var, 0))
