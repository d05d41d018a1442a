"""The plan: when every instance is executed, and what the loops are for; and the axes of a nest, of which time vectors are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import islpy as isl

from tcomp.ir.loops import SERIAL
from tcomp.ir.polyhedral.model import Instance
from tcomp.schedules.analysis.access_patterns import SYMBOLIC, iterations

PARALLEL_INSTANCES = 1 << 14  # of statements, below which waking threads (about a microsecond) costs more than they save
JAM = 8  # iterations of unroll-and-jam: independent chains side by side that hide the latency (4 or 5 cycles) of each


def worth_threads(instances: int) -> bool:
    """Whether this number of instances is worth threads."""
    return instances >= PARALLEL_INSTANCES


@dataclass(slots=True)
class Loop:
    """The treatment of the loops of one time dimension. `role`: parallel, serial, unrolled (`size` iterations), lanes (`size` of them),
    vector (any number of iterations, in lanes), or sum (what is accumulated into stays in registers)."""

    role: str
    size: int = 0


@dataclass(slots=True)
class Plan:
    """Time vectors of the instances, built up dimension by dimension, and what the dimensions are for."""

    instances: dict[str, Instance]
    context: isl.Set
    time: dict[str, isl.Map] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    loops: dict[str, Loop] = field(default_factory=dict)
    recurrences: int = 0  # instances whose iterations depend on each other, along all loops but outer ones

    def add(self, name: str, more: isl.Map, names: Sequence[str]) -> None:
        """Add time dimensions to a statement."""
        self.time[name] = self.time[name].flat_range_product(more) if name in self.time else more
        self.names.setdefault(name, []).extend(names)

    def place(self, names: Sequence[str], position: int) -> None:
        """Put statements at a position among their neighbours."""
        for n in names:
            space = self.instances[n].domain.get_space()
            zero = isl.Aff.val_on_domain(isl.LocalSpace.from_space(space), isl.Val(position))
            self.add(n, isl.Map.from_aff(zero), ["_"])

    def rows(self, name: str) -> list[tuple[int, ...]]:
        """The coefficients of the time dimensions that are planned already."""
        return coefficients(self.time[name], self.instances[name]) if name in self.time else []

    def order(self) -> str:
        """The order of all instances, as isl's text."""
        longest = max(map(len, self.names.values()))
        for name, own in self.names.items():
            while len(own) < longest:
                self.place([name], 0)
        return str(union(self.time[name].intersect_domain(x.domain).coalesce() for name, x in self.instances.items()))

    def naming(self) -> str:
        """The names of the loops, as `affine` takes them."""
        return "; ".join(f"{name}: {' '.join(names)}" for name, names in self.names.items())

    def gains(self) -> bool:
        """Whether most of the work runs on threads, in lanes, or side by side."""
        gaining = {name for name, loop in self.loops.items() if loop.role not in (SERIAL, "sum")}
        shaped = [n for n, names in self.names.items() if not gaining.isdisjoint(names)]
        return 2 * self.work(shaped) > self.work()

    def work(self, names: Sequence[str] | None = None) -> int:
        """About how many instances there are."""
        return sum(iterations(x.loops) for n, x in self.instances.items() if names is None or n in names)

    def parallel(self) -> str:
        """The loops that run on threads, as `affine` takes them."""
        return " ".join(name for name, loop in self.loops.items() if loop.role == "parallel")


def coefficients(value: isl.Map, x: Instance) -> list[tuple[int, ...]]:
    """Those of the loops around a statement in each dimension of an affine map."""
    time = isl.PwMultiAff.from_map(value)
    affs = [time.get_pw_aff(d).get_pieces()[0][1] for d in range(time.dim(isl.dim_type.out))]
    return [tuple(a.get_coefficient_val(isl.dim_type.in_, k).to_python() for k in range(len(x.loops))) for a in affs]


def union(maps: Iterable[isl.Map]) -> isl.UnionMap:
    """The union of maps between any spaces."""
    return reduce(isl.UnionMap.union, map(isl.UnionMap.from_map, maps), isl.UnionMap("{}"))


def component(band: isl.Map, d: int) -> isl.Map:
    """One dimension of what a band maps to."""
    count = band.dim(isl.dim_type.out)
    return band.project_out(isl.dim_type.out, d + 1, count - d - 1).project_out(isl.dim_type.out, 0, d)


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a nest of a single statement: its value, its row of coefficients, whether its iterations are independent."""

    value: isl.Map
    row: tuple[int, ...]
    free: bool
    low: int
    extent: int

    def blocks(self, y: str, size: int) -> tuple[str, str, str]:
        """(0 for full blocks of `size` iterations and 1 for the rest, the block, the place in it), each as a term of isl."""
        full = max(self.extent // size, 1) * size
        return f"floor(({y} - {self.low}) / {full})", f"floor(({y} - {self.low}) / {size})", f"({y} - {self.low}) mod {size}"


def axis(x: Instance, value: isl.Map, free: bool, context: isl.Set) -> Axis:
    """The axis of a statement along which `value` grows."""
    (row,), hull = coefficients(value, x), x.domain.apply(value).intersect_params(context)
    low, high = hull.dim_min_val(0), hull.dim_max_val(0)
    if not (low.is_int() and high.is_int()):
        return Axis(value, row, free, 0, SYMBOLIC)
    return Axis(value, row, free, low.to_python(), high.sub(low).to_python() + 1)
