"""The cost of a scheduled loop program on a CPU: an analytic model of the machine.

The loops consist of *regions*: the straight-line code of one iteration of a serial loop, unrolled and vectorized loops included. For each
region the instructions are counted as the code generator emits them (an expression that does not depend on an unrolled loop is computed
once; what no iteration changes is computed outside of the loop), then the cycles that each kind of execution port needs. The traffic
between memories comes from footprints: the outermost loop whose body works on a set that fits into a cache fetches, for each of its own
executions, what it touches as a whole; inner loops find the rest in the cache.

Arithmetic and the movement of data overlap for the most part, as processors prefetch; looking up addresses is waited for. (The
execution-cache-memory model of J. Treibig, G. Hager 2010 adds up the movements between memories; that ranked schedules less well.)

Sizes are numbers here. A condition that depends on data is taken to hold, and a `while` loop to run once. GPUs: see `cost.gpu`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd, log2, prod
from typing import NamedTuple

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import Access, Loops, accesses, by_buffer, coefficient, inside, lane_span, linear_index, loop_extents
from tcomp.ir.dtypes import BITS, itemsize
from tcomp.ir.expr import Expr
from tcomp.ir.instruction import Instruction, TileOp, VectorOp
from tcomp.ir.layout import LINE
from tcomp.ir.loops import Accumulate, Buffer, For, Kernel, Stmt, Store, bypasses_caches
from tcomp.ir.simplify import simplify
from tcomp.machines import Core
from tcomp.schedules.analysis.footprint import Footprints, at_sizes, instances
from tcomp.schedules.cost.roofline import CLASSES, MAX_POINTS, Estimate, Roof, Work, cpu_roof, operations, operators, work
from tcomp.target import CpuTarget

LOOP_OVERHEAD = 1.0  # cycles of a loop's iteration that nothing hides: processors take one branch a cycle
WASTED_PREFETCH = 1.0  # cycles of a prefetch of what its loop does not read: it fetches a line, or looks up a page, in vain
SHUFFLES = 3  # instructions that each halving of a vector takes when its lanes are summed up: move, shuffle, add
LIVE_OPERANDS = 8  # vectors of operands that the code generator has at hand at most: it loads later ones when they are needed
COUNTS = (
    "operations.fma", "operations.add", "operations.mul", "operations.div", "operations.special", "operations.other",
    "loads.vector", "loads.scalar", "loads.gather", "stores.vector", "stores.scalar", "spills", "prefetches", "prefetches.missed",
    "bytes.l2", "bytes.l3", "bytes.memory", "pages", "flops", "bytes", "intensity", "instructions", "flops.instruction",
    "iterations", "guards", "accumulators", "working_set", "regions", "parallel", "balance",
)  # fmt: skip
SECONDS = ("arithmetic", "registers", "l2", "l3", "memory", "pages", "overhead")
"""Names of the counts, and of the parts of the time, in an `Estimate`. They are features of the learned cost model."""


def estimate(
    kernel: Kernel, target: CpuTarget, dims: Mapping[Expr, int] | None = None, threads: int = 1, core: Core | None = None
) -> Estimate:
    """The modelled time of a kernel, scheduled or not. `core` gives measured rates in the place of the tables'.

    Raises `IRError` if a symbolic dim has no value in `dims`.
    """
    kernel = at_sizes(kernel, dims or {})
    return _Model(kernel, target, core or target.core, threads).estimate(work(kernel, MAX_POINTS), cpu_roof(target, threads, core))


def bound(kernel: Kernel, target: CpuTarget, dims: Mapping[Expr, int] | None = None, threads: int = 1, core: Core | None = None) -> float:
    """The least seconds that a kernel takes, by the roofline. Raises as `estimate`."""
    return _least_seconds(work(at_sizes(kernel, dims or {}), MAX_POINTS), cpu_roof(target, threads, core))


def _least_seconds(todo: Work, top: Roof) -> float:
    return top.seconds(*map(float, (todo.slots, todo.divisions, todo.bytes, todo.narrow)))[0]


class _Move(NamedTuple):
    """An access in straight-line code: the unrolled loops and the lanes around it there."""

    access: Access
    unrolled: Loops
    lane: For | None


class _Here(NamedTuple):
    """Where a statement stands: its region, the loops and conditions around it, the unrolled loops and the lanes between region and it."""

    region: _Region
    loops: Loops = ()
    conditions: tuple[Expr, ...] = ()
    unrolled: Loops = ()
    lane: For | None = None


@dataclass(eq=False, slots=True)
class _Region:
    """Straight-line code: one iteration of `loop` (None: what stands outside of all serial loops)."""

    loop: For | None
    parent: _Region | None
    around: Loops
    trips: float  # executions in all
    share: float  # of a thread, where the work is divided among threads
    writes: frozenset[Buffer]
    instructions: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    loads: list[_Move] = field(default_factory=list)
    stores: list[_Move] = field(default_factory=list)
    in_registers: list[_Move] = field(default_factory=list)  # accesses to buffers there
    prefetches: float = 0.0
    operands: float = 0.0  # loads of the operands of machine instructions that take groups
    missed: float = 0.0  # of these, those of what the loop does not read
    chain: float = 0.0  # cycles from one iteration to the next that depends on it

    def home(self, depends: Collection[Expr], buffers: Collection[Buffer]) -> _Region:
        """The outermost region where a value can be computed that depends on these variables and buffers: loops that change
        neither are left, unless threads would share the result."""
        region, read = self, set(buffers)
        while region.parent is not None and region.loop is not None and region.loop.kind != L.PARALLEL:
            if region.loop.var in depends or region.writes & read:
                break
            region = region.parent
        return region


def _offset(place: Expr) -> int:
    """A linear index where all variables are zero."""
    zero = simplify(E.substitute(place, {v: E.const(0, v.dtype) for v in E.variables(place)}))
    return int(zero.attr) if zero.op == "const" else 0


class _Model:
    def __init__(self, kernel: Kernel, target: CpuTarget, core: Core, threads: int) -> None:
        self.kernel, self.target, self.core, self.threads = kernel, target, core, threads
        found = accesses(kernel.body)
        self.footprints = Footprints(found, MAX_POINTS)
        self.own: dict[Stmt, list[Access]] = {}
        for a in found:
            self.own.setdefault(a.statement, []).append(a)
        self.sets: dict[Stmt, dict[str, float]] = {}
        caches = {"l2": target.l1, "l3": target.l2, "memory": target.l3}
        self.rooms = {**{level: size * core.usable_cache for level, size in caches.items()}, "pages": core.tlb_entries}
        self.spans = {"l2": core.l1_span, "l3": max(core.l1_span, target.l2 // core.l2_ways)}  # bytes between addresses of the same set
        self.regions: list[_Region] = []
        self.kinds: dict[Stmt, str] = {}  # of loops of machine instructions: lanes along the result, copies across it
        self.instructions: dict[Stmt, Instruction] = {}  # that execute a statement
        for call in (s for s in L.walk(kernel.body) if isinstance(s, L.Call)):
            leaf = next(s for s in L.walk(call.body) if isinstance(s, Store | Accumulate))
            self.instructions[leaf] = call.instruction
            place = linear_index(leaf.buffer, leaf.indices)
            loops = [s for s in L.walk(call.body) if isinstance(s, For)]
            self.kinds |= {s: L.VECTORIZED if coefficient(place, s.var) == 1 else L.UNROLLED for s in loops}
        self.parallel, self.balance, self.guards = 0.0, 1.0, 0.0  # regions of threads that are started; their balance; tests of conditions
        self._visit(kernel.body, _Here(self._region(None, None, (), (), 1.0, kernel.body)))

    def _region(
        self, loop: For | None, parent: _Region | None, around: Loops, conditions: Sequence[Expr], share: float, body: Stmt
    ) -> _Region:
        own = {x.var for x in around}
        trips = instances(around, [c for c in conditions if set(E.variables(c)) <= own], MAX_POINTS)
        written = frozenset(s.buffer for s in L.walk(body) if isinstance(s, Store | Accumulate))
        self.regions.append(_Region(loop, parent, around, trips, share, written))
        return self.regions[-1]

    def _visit(self, s: Stmt, here: _Here) -> None:
        region = here.region
        match s:
            case Store() | Accumulate():
                return self._leaf(s, here)
            case L.Prefetch():
                hints = self._copies(here.unrolled)
                region.prefetches += hints
                region.missed += hints * self._missed(s, region.loop)
                return
            case For() if self.kinds.get(s, s.kind) == L.VECTORIZED:
                here = here._replace(lane=s)
            case For() if self.kinds.get(s, s.kind) == L.UNROLLED or here.lane is not None:
                here = here._replace(unrolled=(*here.unrolled, s))
            case For():
                share = region.share
                if s.kind == L.PARALLEL and self.threads > 1 and not any(x.kind == L.PARALLEL for x in here.loops):
                    share = self._share((s,))
                    self.parallel += region.trips
                    self.balance = min(self.balance, 1 / (share * self.threads))
                inner = self._region(s, region, (*here.loops, s), here.conditions, share, s.body)
                here = here._replace(region=inner, unrolled=(), lane=None)
            case L.If() | L.While():
                region.instructions["other"] += 1
                self.guards += region.trips * self._copies(here.unrolled)
        for child, loops, conditions in inside(s):
            self._visit(child, here._replace(loops=here.loops + loops, conditions=here.conditions + conditions))

    def _copies(self, unrolled: Iterable[For]) -> int:
        return prod(self.footprints.extent(x) for x in unrolled)

    def _missed(self, s: L.Prefetch, loop: For | None) -> float:
        """The share of a loop's prefetches that fetch what no later iteration reads: those of its last ones, as many as the prefetch
        distance."""
        place = linear_index(s.buffer, s.indices)
        if loop is None or not (step := coefficient(place, loop.var)):
            return 0.0
        reads = [linear_index(r.attr, r.args) for x in L.walk(loop.body) for r in E.reads(*L.expressions(x)) if r.attr is s.buffer]
        steps = min((abs(_offset(place) - _offset(r)) / abs(step) for r in reads), default=0.0)
        return min(1.0, steps / max(1, self.footprints.extent(loop)))

    def _vectors(self, lane: For | None, bits: int) -> float:
        """Instructions for all lanes of a vectorized loop; one on half of a vector is the share of one that it takes."""
        if lane is None:
            return 1.0
        vectors = self.footprints.extent(lane) * bits / self.target.vector_bits
        return self.core.half_vector if vectors <= 0.5 else float(ceil(vectors))

    def _leaf(self, s: Store | Accumulate, here: _Here) -> None:
        region, loops, conditions, unrolled, lane = here
        instruction = self.instructions.get(s)
        op = None if instruction is None else instruction.emission
        if instruction is not None and isinstance(op, TileOp):
            region.instructions["fma"] += instruction.cycles * self.core.fma  # loads of tiles take no longer
            return
        self._compute(s, here)
        reads = E.reads(s.value, *s.indices)
        if instruction is not None and isinstance(op, VectorOp) and op.group > 1:  # operands are loaded 32 bits at a time
            products = prod(self.footprints.extent(x) for x in instruction.loops) / (op.lanes * op.group)
            region.operands += self._copies(x for x in unrolled if x not in self.kinds) * (instruction.uops - products)
            reads = E.reads(*s.indices)
        for r in reads:
            move = _Move(Access(r.attr, r.args, loops, conditions, False, s), unrolled, lane)
            (region.in_registers if r.attr.scope == "register" else region.home(E.variables(*r.args), {r.attr}).loads).append(move)
        result = _Move(Access(s.buffer, s.indices, loops, conditions, True, s), unrolled, lane)
        if s.buffer.scope == "register":
            region.in_registers.append(result)
        else:
            home = region.parent if region.parent is not None and self._promoted(s, region) else region
            home.stores.append(result)
            if isinstance(s, Accumulate):
                home.loads.append(result)
        if isinstance(s, Accumulate):
            used = E.variables(*s.indices)
            if region.loop is not None and region.loop.var not in used:  # each iteration waits for the sum of the one before
                region.chain = max(region.chain, self.core.latency * self._copies(x for x in unrolled if x.var not in used))
            if lane is not None and lane.var not in used:  # lanes are summed up, in halves
                instructions = self._vectors(lane, BITS[s.value.dtype]) + SHUFFLES * log2(max(2, self.footprints.extent(lane)))
                region.instructions["across"] += self._copies(unrolled) * instructions

    def _compute(self, s: Store | Accumulate, here: _Here) -> None:
        """Count the operators of a statement where they are evaluated, once for all copies that agree on them, for the share of its copies
        that conditions let run. Conditions on lanes mask them: they run all the same."""
        region, lane, inner = here.region, here.lane, {x.var for x in here.unrolled}
        asked = [c for c in here.conditions if inner & set(E.variables(c)) and (lane is None or lane.var not in E.variables(c))]
        copies, part = region.trips * self._copies(here.unrolled), 1.0
        if asked and copies:
            part = min(1.0, instances(tuple(x for x in here.loops if x is not lane), asked, MAX_POINTS) / copies)
        for e, cost in operators(s, narrow=s in self.instructions):
            combines = isinstance(s, Accumulate) and e is s.value
            depends = set(E.variables(e, *s.indices) if combines else E.variables(e))
            home = region if combines else region.home(depends, {r.attr for r in E.reads(e)})
            wide = lane if lane is not None and lane.var in depends else None
            bits = BITS[e.args[0].dtype if e.dtype == "bool" and e.args else e.dtype]
            times = part * self._copies(x for x in here.unrolled if combines or x.var in depends) * self._vectors(wide, bits)
            each = 2.0 if cost.kind == "fma" and not self.target.fma else 1.0
            if cost.narrow:
                each = cost.narrow
            if cost.kind in ("special", "other"):
                each = max(1.0, cost.slots / (bits / 32))
            home.instructions[cost.kind] += times * each
            home.instructions["division"] += times * cost.divisions / max(1.0, bits / 32)

    def _promoted(self, s: Store | Accumulate, region: _Region) -> bool:
        """Whether a sum in memory stays in a register while its loop runs: nothing else there reads it or writes it."""
        loop = region.loop
        if not isinstance(s, Accumulate) or loop is None or loop.kind == L.PARALLEL or loop.var in E.variables(*s.indices):
            return False
        return all(x is s or all(b is not s.buffer for b, _ in L.places(x)) for x in L.walk(loop.body))

    def _distinct(self, listed: Iterable[_Move]) -> tuple[float, float, float]:
        """(vectors, scalars, gathered elements) that accesses move: copies of a loop that ask for the same element move it once."""
        vectors = scalars = gathered = 0.0
        groups: dict[tuple[Buffer, For | None, int | None], list[tuple[Access, Loops]]] = {}
        for access, unrolled, lane in listed:
            step = 0 if lane is None else coefficient(linear_index(access.buffer, access.indices), lane.var)
            groups.setdefault((access.buffer, lane if step != 0 else None, step), []).append((access, unrolled))
        for (buffer, lane, step), members in groups.items():
            copies = {x.var for _, unrolled in members for x in unrolled}
            number = self.footprints.touched([a for a, _ in members], copies).elements if copies or len(members) > 1 else 1
            if lane is None:
                scalars += number
            elif step in (1, -1) or (step is None and self._picked(members[0][0], lane)):
                vectors += number * self._vectors(lane, BITS[buffer.dtype])
            else:
                gathered += number * self.footprints.extent(lane)
        return vectors, scalars, gathered

    def _picked(self, access: Access, lane: For) -> bool:
        """Whether lanes pick what they read from one vector, which takes a shuffle for each pick, as much as a load."""
        extent = self.footprints.extent(lane)
        return lane_span(linear_index(access.buffer, access.indices), lane.var, extent) < extent and not E.reads(*access.indices)

    def _tile(self, region: _Region) -> float:
        """Registers that a region's accumulators take."""
        return sum(self._distinct([k for k in region.in_registers if k.access.writes])[:2])

    def _spills(self, region: _Region) -> float:
        """Vectors of accumulators and operands that registers do not hold."""
        tile = self._tile(region)
        if not tile:
            return 0.0
        tiled = {v for k in region.in_registers if k.access.writes for v in E.variables(*k.access.indices)}
        operands = [k._replace(unrolled=tuple(x for x in k.unrolled if x.var in tiled)) for k in region.loads if k.lane is not None]
        live = self._distinct(operands)[0] + 1
        return max(0.0, tile + min(live, LIVE_OPERANDS) - self.target.vector_registers)

    def _cycles(self, region: _Region) -> dict[str, float]:
        """Cycles of one execution on each resource, and the instructions that move data."""
        count, core = region.instructions, self.core
        vectors, scalars, gathered = self._distinct(region.loads)
        out_vectors, out_scalars, scattered = self._distinct(region.stores)
        spills = self._spills(region)
        arithmetic = sum(count[k] for k in ("fma", "add", "mul", "special", "other", "across"))
        loads = vectors + scalars + gathered + region.operands + spills + region.prefetches + WASTED_PREFETCH * region.missed * core.loads
        stores = out_vectors + out_scalars + scattered + spills
        return {
            "arithmetic": max(arithmetic / core.fma, count["division"] * core.divide, region.chain),
            "registers": max(loads / core.loads, stores / core.stores),
            "issue": (arithmetic + count["div"] + loads + stores) / core.issue,
            "loads.vector": vectors, "loads.scalar": scalars, "loads.gather": gathered,
            "stores.vector": out_vectors, "stores.scalar": out_scalars + scattered, "spills": spills,
            "prefetches": region.prefetches, "prefetches.missed": region.missed,
        }  # fmt: skip

    def _traffic(self, stmt: Stmt, level: str, room: float, loops: Loops = ()) -> tuple[float, float]:
        """(bytes or pages, those of the busiest thread) that a cache of `room` does not hold."""
        if isinstance(stmt, For):
            if self._working_set(stmt.body)[level] > room:
                return self._traffic(stmt.body, level, room, (*loops, stmt))
        elif not isinstance(stmt, Store | Accumulate) and self._working_set(stmt)[level] > room:
            parts = [self._traffic(child, level, room, loops) for child in L.children(stmt)]
            return sum(p[0] for p in parts), sum(p[1] for p in parts)
        moved = self._working_set(stmt)["pages" if level == "pages" else "moved"] * instances(loops, limit=MAX_POINTS)
        return moved, moved * self._share((*loops, stmt) if isinstance(stmt, For) else loops)

    def _share(self, loops: Loops) -> float:
        """The part of a nest's work that the busiest thread gets."""
        shared = max(1, next((self.footprints.extent(x) for x in loops if x.kind == L.PARALLEL), 1))
        return ceil(shared / self.threads) / shared

    def _working_set(self, stmt: Stmt) -> dict[str, float]:
        """What a statement touches: the bytes that it takes in the cache before each level (the pages of the address translation), and the
        bytes "moved": what is written is fetched, unless non-temporal, and written back."""
        if stmt not in self.sets:
            size, page = dict.fromkeys((*self.rooms, "moved"), 0.0), self.core.page
            running = loop_extents(stmt).keys()
            for buffer, group in by_buffer(a for s in L.walk(stmt) for a in self.own.get(s, ())).items():
                if buffer.scope == "register":
                    continue
                touched = self.footprints.touched(group, running)
                row = int(buffer.shape[-1]) * itemsize(buffer.dtype) if buffer.shape else LINE
                for level, span in self.spans.items():  # rows whose stride is a multiple of the span share a part of the sets
                    piece = touched.lines * LINE / max(1, touched.rows)
                    size[level] += touched.lines * LINE * max(1.0, gcd(row, span) / piece if touched.rows > 1 and piece else 1.0)
                size["memory"] += touched.lines * LINE
                size["pages"] += max(ceil(touched.lines * LINE / page), ceil(touched.rows * min(row, page) / page))
                fetched = any(a.writes and not (isinstance(a.statement, Store) and bypasses_caches(a.statement)) for a in group)
                size["moved"] += touched.lines * LINE * (2 if fetched else 1)
            self.sets[stmt] = size
        return self.sets[stmt]

    def estimate(self, todo: Work, top: Roof) -> Estimate:
        bound, flops, compulsory = _least_seconds(todo, top), float(todo.flops), float(todo.bytes)
        core, hertz = self.core, self.core.ghz * 1e9
        totals, busiest, inside_core = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
        for region in self.regions:
            cycles, own = self._cycles(region), region.trips * region.share
            for name, n in cycles.items():
                totals[name] += region.trips * n
                busiest[name] += own * n
            steps = 0.0 if region.loop is None else LOOP_OVERHEAD
            totals["iterations"] += region.trips * (region.loop is not None)
            busiest["loops"] += own * steps
            hidden = max(cycles["arithmetic"], cycles["registers"], cycles["issue"] + steps) + core.spill * cycles["spills"]
            inside_core += own * hidden
        memory = min(core.memory_bandwidth, core.total_memory_bandwidth / self.threads) / core.ghz
        rates = {"l2": core.l2_bandwidth, "l3": core.l3_bandwidth, "memory": memory, "pages": 1 / core.tlb_miss}
        whole = self._working_set(self.kernel.body)
        traffic = {  # none where all fits: then it is there from the run before
            level: (0.0, 0.0) if whole[level] <= room else self._traffic(self.kernel.body, level, room)
            for level, room in self.rooms.items()
        }
        waiting = {level: slowest / rates[level] for level, (_, slowest) in traffic.items()}
        threads = self.parallel * core.parallel_region / hertz * (self.threads > 1)
        parts = (inside_core, waiting["l2"], waiting["l3"], waiting["memory"])
        time = (max(parts) + core.exposed_transfer * (sum(parts) - max(parts)) + waiting["pages"]) / hertz + threads
        seconds = {
            "arithmetic": busiest["arithmetic"] / hertz,
            "registers": busiest["registers"] / hertz,
            **{level: cycles / hertz for level, cycles in waiting.items()},
            "overhead": busiest["loops"] / hertz + threads,
        }
        used = sum(r.trips * sum(r.instructions[k] for k in CLASSES) for r in self.regions)
        counts = {
            **{f"operations.{k}": n for k, n in operations(self.kernel, MAX_POINTS).items()},
            **{k: totals[k] for k in COUNTS if k.startswith(("loads", "stores", "spills", "prefetches"))},
            **{"pages" if level == "pages" else f"bytes.{level}": moved for level, (moved, _) in traffic.items()},
            "flops": flops, "bytes": compulsory, "intensity": flops / max(1.0, compulsory),
            "instructions": used, "flops.instruction": flops / max(1.0, used), "iterations": totals["iterations"], "guards": self.guards,
            "accumulators": max((self._tile(r) for r in self.regions), default=0.0), "working_set": whole["memory"],
            "regions": len(self.regions), "parallel": self.parallel, "balance": self.balance,
        }  # fmt: skip
        return Estimate(max(time, bound), bound, seconds, {name: float(n) for name, n in counts.items()})
