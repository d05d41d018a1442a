"""The work of a loop program, whatever its schedule: operations by class, compulsory bytes, and the least time that these take.

    class       float and integer operations that count                              vector instructions
    fma         a product accumulated into a sum, fma(a, b, c)                       1
    add         + - min max neg abs and rounding                                     1
    mul         *                                                                    1
    div         / and square root                                                    1, on a unit that takes `Core.divide` cycles
    special     elementary functions, and division with remainder of floats          as many as the function's polynomial has
    other       comparisons, selections, conversions, integer and bit operations     1

A *slot* is one lane of 32 bits in one vector instruction; a float64 operation takes two, those on 8 bits a quarter. The roofline bound
(S. Williams, A. Waterman, D. Patterson 2009) is the larger of the slots over the machine's peak and the compulsory bytes over bandwidths.
Products of narrow numbers (integers of 8 or 16 bits, bfloat16), which machines multiply and add up several at a time, or in units of their
own, have slots of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from operator import mul

from tcomp.ir import expr as E
from tcomp.ir.access import Loops, accesses, by_buffer
from tcomp.ir.dtypes import BITS, is_float, itemsize
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr
from tcomp.ir.instruction import TILE
from tcomp.ir.loops import Accumulate, For, Kernel, Store
from tcomp.ir.simplify import as_dim, simplify
from tcomp.machines import Core
from tcomp.schedules.analysis.footprint import ENUMERATED, Footprints, instances
from tcomp.target import CpuTarget, CudaTarget

MAX_POINTS = 1 << 12  # points counted one by one where there is no closed form: an estimate is asked for thousands of candidates
CLASSES = ("fma", "add", "mul", "div", "special", "other")

# Operations and divisions of the functions' polynomials in `codegen.math`, in float64; and in float32, where those differ. (Of those with
# an exponential AVX-512 needs up to eleven fewer: it scales by powers of two in one.)
_SPECIAL = {
    "exp": (32, 1), "log": (39, 1), "tanh": (54, 3), "erf": (95, 6), "sin": (44, 0), "cos": (43, 0), "tan": (43, 1), "asin": (33, 2),
    "acos": (39, 2), "atan": (36, 3), "sinh": (54, 3), "cosh": (36, 2), "asinh": (67, 3), "acosh": (64, 4), "atanh": (65, 3),
    "pow": (136, 3), "floordiv": (47, 1), "mod": (43, 1), "truncdiv": (2, 1), "truncmod": (28, 1),
}  # fmt: skip
_SPECIAL32 = {
    "exp": (29, 0), "log": (37, 0), "tanh": (17, 1), "erf": (15, 1), "floordiv": (50, 1), "mod": (46, 1), "truncdiv": (2, 1),
    "truncmod": (31, 1),
}  # fmt: skip
_INTEGER_DIVISION = 20  # slots of a division of integers: there is no vector instruction (an estimate)
_GPU_DIVISION = 8  # slots of a division of float32 on a GPU: a reciprocal of the special unit, and Newton's steps (an estimate)
_ADD = ("add", "sub", "min", "max", "neg", "abs", "floor", "ceil", "round", "trunc")
_SIMPLE = {"fma": ("fma", 2), "mul": ("mul", 1), **dict.fromkeys(_ADD, ("add", 1))}  # (class, operations)
_NARROW = frozenset({"int8", "uint8", "int16", "bfloat16"})
_NOTHING = frozenset({"const", "var", "read", "bitcast"})
_MAX_CASES = 256  # cases of one value that are looked at one by one: bounds the time of counting


@dataclass(frozen=True, slots=True)
class Cost:
    """One operator on one element: its class, operations, slots, divisions of float32 vectors, and slots of narrow products."""

    kind: str
    flops: int
    slots: float
    divisions: float = 0.0
    narrow: float = 0.0


def cost_of(e: Expr) -> Cost | None:
    """The cost of one operator without its operands; None for what costs nothing."""
    if e.op in _NOTHING:
        return None
    dtype = e.args[0].dtype if e.dtype == "bool" or e.op == "cast" else e.dtype
    bits = 32 if dtype in ("float16", "bfloat16") else BITS[dtype]
    slots = bits / 32
    if e.op in _SPECIAL and not is_float(dtype):
        return Cost("other", 1, _INTEGER_DIVISION * slots)
    if e.op in _SPECIAL32 and bits == 32:
        count, divisions = _SPECIAL32[e.op]
        return Cost("special", count, count, divisions)
    if e.op in _SPECIAL:  # float32 goes through float64
        count, divisions = _SPECIAL[e.op]
        return Cost("special", count, 2 * count, 2 * divisions)
    if e.op == "div" and e.args[1].op == "const":
        return Cost("mul", 1, 2 * slots)  # see tcomp.codegen.division
    if e.op in ("div", "sqrt"):
        return Cost("div", 1, slots, slots)
    kind, flops = _SIMPLE.get(e.op, ("other", 0))
    return Cost(kind, flops, slots)


def operators(statement: Store | Accumulate, cases: Mapping[Expr, int] | None = None, narrow: bool = False) -> Iterator[tuple[Expr, Cost]]:
    """The operators that one execution of a statement evaluates, each once, and the combination of an accumulation last.

    Indices are free, as address arithmetic is. Both sides of a selection count, as in vector code. With `cases` (see `cases_of`), the
    minimum over all schedules for one execution of each case: what cases have in common counts once, as it can be shared, and conditions on
    indices alone do not count, as loops can be partitioned there. With `narrow`, products of narrow numbers are counted as such, with the
    conversions of their factors."""
    value = statement.value
    sums = isinstance(statement, Accumulate) and statement.reducer.op == "add"
    bits = _narrow_bits(value) if narrow and sums else 0
    fused = sums and value.op == "mul" and (is_float(value.dtype) or bits > 0)
    for e in _evaluated(value, cases or {}):
        cost = None if fused and (e is value or bits and e in value.args) else cost_of(e)
        if cost is not None and not (cases is not None and _of_place(e)):
            yield e, cost
    if isinstance(statement, Accumulate):
        fma = Cost("fma", 2, 0.0, 0.0, bits / 32) if bits else Cost("fma", 2, max(32, BITS[value.dtype]) / 32)
        combined = [fma] if fused else [c for e in _evaluated(statement.reducer.combine, {}) if (c := cost_of(e)) is not None]
        yield from ((value, cost) for cost in combined * prod((cases or {}).values()))


def _narrow_bits(value: Expr) -> int:
    """The bits of the factors of a product of narrow numbers; 0 for any other value."""
    if value.op != "mul" or any(x.op != "cast" or x.args[0].dtype not in _NARROW for x in value.args):
        return 0
    return max(BITS[x.args[0].dtype] for x in value.args)


def cases_of(value: Expr, loops: Loops) -> dict[Expr, int]:
    """The indices (a loop, its remainder or its quotient by a constant) on which a value is defined by cases, `select(index == 0, ...,
    select(index == 1, ...))`, as in fast algorithms, with the number of cases of each; empty where there are too many combinations."""
    extents, found = {x.var: x.extent for x in loops}, dict[Expr, int]()
    for e in E.walk(value):
        if e.op == "eq" and e.args[1].op == "const":
            index = e.args[0]
            v, by = division(index) or (index, 1)
            if isinstance(extent := extents.get(v), int) and extent > 0:
                found[index] = min(by, extent) if index.op == "mod" else -(-extent // by)
    return found if prod(found.values()) <= _MAX_CASES else {}


def division(index: Expr) -> tuple[Expr, int] | None:
    """(what, by what) of a quotient or a remainder."""
    return (index.args[0], index.args[1].attr) if index.op in ("mod", "floordiv") and index.args[1].op == "const" else None


def _evaluated(value: Expr, cases: Mapping[Expr, int]) -> Iterator[Expr]:
    """Every distinct operator of a value in all cases, those of indices excepted, and selections between cases."""
    mentions: dict[Expr, list[int]] = {}  # the cases, by number, that an expression depends on
    for e in E.walk(value) if cases else ():
        own = {n for n, index in enumerate(cases) if e is index}
        if not own and (e.op == "var" or e.args and e.args[0].op == "var" and division(e)):
            same = [(n, index) for n, index in enumerate(cases) if E.variables(index) == E.variables(e)]
            # The quotient and the remainder by one number are independent.
            own = {n for n, index in same if {index.op, e.op} != {"mod", "floordiv"} or division(index) != division(e)}
        elif not own:
            own = {n for a in e.args for n in mentions[a]}
        mentions[e] = sorted(own)
    seen = set()
    for values in product(*map(range, cases.values())):
        here, stack = dict(zip(cases, values, strict=True)), [value]
        while stack:
            e = stack.pop()
            key = (e, *(values[n] for n in mentions[e])) if cases else e
            if key in seen or e.dtype == INDEX and e.op == "var":
                continue
            seen.add(key)
            if e.op == "select" and e.args[0].op == "eq" and e.args[0].args[0] in here and e.args[0].args[1].op == "const":
                index, constant = e.args[0].args
                stack.append(e.args[1 if here[index] == constant.attr else 2])
                continue
            yield e
            if e.op != "read":
                stack.extend(e.args)


def _of_place(e: Expr) -> bool:
    """Whether an operator computes an index, or compares or selects by indices alone."""
    return _of_place(e.args[0]) if e.op == "select" else e.dtype in (INDEX, "bool") and not E.reads(e)


@dataclass(frozen=True, slots=True)
class Work:
    """Operations, slots and compulsory bytes of a kernel; symbolic where its dims are. `divisions` are of float32 lanes, `narrow` the
    slots of products of narrow numbers."""

    flops: Dim
    slots: Dim
    divisions: Dim
    bytes: Dim
    narrow: Dim


def statements(kernel: Kernel) -> Iterator[tuple[Store | Accumulate, Loops, tuple[Expr, ...]]]:
    """Every store and accumulation with the loops around it and the conditions under which it is executed."""
    for a in accesses(kernel.body):
        if isinstance(a.statement, Store | Accumulate) and a.writes:
            yield a.statement, a.loops, a.conditions


def executions(kernel: Kernel, limit: int) -> Iterator[tuple[Store | Accumulate, float]]:
    """Every store and accumulation of a kernel of known size with how often it runs (see `instances` on the limit)."""
    return ((s, instances(loops, conditions, limit)) for s, loops, conditions in statements(kernel))


def operations(kernel: Kernel, limit: int = ENUMERATED) -> dict[str, float]:
    """Operations of each class, of a kernel of known size: exact for affine programs (see `instances` on the limit)."""
    counts = dict.fromkeys(CLASSES, 0.0)
    for s, times in executions(kernel, limit):
        for _, cost in operators(s):
            counts[cost.kind] += times
    return counts


def work(kernel: Kernel, limit: int = 1 << 14) -> Work:
    """The work of a kernel as lowered, exact as far as `limit` points suffice to count it.

    With symbolic dims, conditions are taken to hold and indices to reach whole dimensions.
    """
    totals = [as_expr(0)] * 4  # flops; slots, divisions and those of narrow products in quarters
    known = all(isinstance(n, int) for b in kernel.buffers for n in b.shape) and not kernel.scalars
    for s, loops, conditions in statements(kernel):
        times = as_expr(round(instances(loops, conditions, limit))) if known else _volume(loops)
        cases = cases_of(s.value, loops)
        costs, copies = [cost for _, cost in operators(s, cases, narrow=True)], prod(cases.values())
        quarters = (round(4 * sum(n)) for n in ([c.slots for c in costs], [c.divisions for c in costs], [c.narrow for c in costs]))
        own = sum(c.flops for c in costs), *quarters
        totals = [total + times * n // copies for total, n in zip(totals, own, strict=True)]
    flops, slots, divisions, narrow = totals[0], *(E.binary("floordiv", simplify(e), 4) for e in totals[1:])
    return Work(*map(as_dim, (flops, slots, divisions, _compulsory(kernel, known, limit), narrow)))


def _volume(loops: Sequence[For]) -> Expr:
    """How many iterations a nest of symbolic size has; of a triangular loop, the average."""
    own = {x.var for x in loops}
    triangular = {x.var for x in loops if own & set(E.variables(as_expr(x.extent)))}
    extents = (as_expr(E.bounds(x.extent)[1] or 2) // 2 if x.var in triangular else as_expr(x.extent) for x in loops)
    return reduce(mul, extents, as_expr(1))


def _compulsory(kernel: Kernel, known: bool, limit: int) -> Expr:
    """Bytes of the parameters that the kernel touches, each once."""
    found = [a for a in accesses(kernel.body) if a.buffer in kernel.buffers]
    counts = Footprints(found, limit) if known else None
    total: Expr = as_expr(0)
    for buffer, group in by_buffer(found).items():
        if counts is not None:
            elements = as_expr(counts.touched(group, counts.extents).elements)
        else:  # of an index that is read, a row for each iteration that asks for one
            index, loops = group[0].indices, group[0].loops
            asked = [[x for x in loops if x.var in E.variables(i)] if E.reads(i) else None for i in index]
            elements = reduce(mul, (as_expr(n) if a is None else _volume(a) for n, a in zip(buffer.shape, asked, strict=True)), as_expr(1))
        total = total + elements * itemsize(buffer.dtype)
    return total


@dataclass(frozen=True, slots=True)
class Roof:
    """The peak rates of a machine: slots, divisions and slots of narrow products per second, and (capacity in bytes, bytes per second) of
    each memory, nearest first."""

    slots: float
    divisions: float
    narrow: float
    memories: tuple[tuple[float, float], ...]

    def seconds(self, slots: float, divisions: float, bytes: float, narrow: float = 0.0) -> tuple[float, str]:
        """(the roofline bound of this work, what limits it: "arithmetic" or "memory"). Data fills the nearest memories first."""
        arithmetic = max(slots / self.slots, divisions / self.divisions, narrow / self.narrow)
        memory = nearer = 0.0
        for room, rate in self.memories:
            memory += max(0.0, min(bytes, room) - nearer) / rate
            nearer = max(nearer, room)
        return (arithmetic, "arithmetic") if arithmetic >= memory else (memory, "memory")


def cpu_roof(target: CpuTarget, threads: int = 1, core: Core | None = None) -> Roof:
    """The roof of a CPU for a number of threads. `core` gives measured rates in the place of the tables'."""
    core = core or target.core
    cycles, lanes = core.ghz * 1e9 * threads, target.vector_bits / 32
    memory = min(core.memory_bandwidth * threads, core.total_memory_bandwidth)
    rates = (core.l1_bandwidth * cycles, core.l2_bandwidth * cycles, core.l3_bandwidth * cycles, memory * 1e9)
    rooms = (target.l1 * threads, target.l2 * threads, target.l3, float("inf"))
    tiles = prod(TILE) * TILE[0] / core.tile_product if target.has("amx-tile") else 0.0  # a product in tile registers
    narrow = max(core.fma * lanes, tiles) * cycles
    return Roof(core.fma * lanes * cycles, lanes / core.divide * cycles, narrow, tuple(zip(rooms, rates, strict=True)))


def gpu_roof(target: CudaTarget) -> Roof:
    """The roof of a GPU, by its data sheet."""
    gpu = target.gpu
    rate = gpu.sms * gpu.lanes * gpu.ghz * 1e9
    tensor = gpu.tensor * gpu.sms * gpu.ghz * 1e9  # twice as many products of float16 by warpgroups, each half a slot
    return Roof(rate, rate / _GPU_DIVISION, tensor, ((gpu.l2, gpu.cache * 1e9), (float("inf"), gpu.memory * 1e9)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a cost model for a kernel: seconds, in total and by component, and the counts behind them; `print` shows a table.

    `seconds` are those of the components, on a CPU of one of the threads that share the work: "arithmetic" (the ports of the vector
    units, and chains of accumulations), "registers" (loads and stores), "l2", "l3", "memory" (traffic from that level), "pages"
    (translation of addresses), "overhead" (loops, threads). `bound` is the roofline; `counts` are numbers, by name."""

    time: float
    bound: float
    seconds: Mapping[str, float]
    counts: Mapping[str, float]

    @property
    def features(self) -> dict[str, float]:
        """The features of a learned model: counts and seconds, under stable names."""
        return {**self.counts, **{f"seconds.{name}": s for name, s in self.seconds.items()}, "seconds": self.time, "bound": self.bound}

    def __str__(self) -> str:
        rows = {**self.seconds, "predicted": self.time, "bound": self.bound}
        share = f"   {self.bound / self.time:.0%} of the prediction" if self.time else ""
        return "\n".join(f"{name:<12}{s * 1e6:12.2f} µs" for name, s in rows.items()) + share
