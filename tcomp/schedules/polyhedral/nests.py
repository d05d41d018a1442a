"""The nest of one statement: the template that suits its accesses (see `polyhedral`), as time dimensions made of its axes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod

import islpy as isl

from tcomp.ir import expr as E
from tcomp.ir.access import coefficient, linear_index
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr
from tcomp.ir.loops import SERIAL, UNROLLED, Accumulate, Store
from tcomp.ir.polyhedral.model import Instance, map_of
from tcomp.schedules.cost.register_tiles import choose_tile
from tcomp.schedules.polyhedral.plan import JAM, Axis, Loop, Plan, worth_threads
from tcomp.target import CpuTarget

LANE_COST: dict[int | None, float] = {0: 0.2, 1: 1.0, -1: 2.0}  # of a vector access, relative to one load, by the distance between lanes in elements
GATHER_COST = 9.0  # of one with any other distance: lane by lane
CHUNK = 1024  # elements of an array that one thread takes at a time
MOST_ROWS = 6  # at most of a register tile: the others are vectors side by side, of which fewer pages are touched


class Nest:
    """The plan for the loops around one statement."""

    def __init__(self, plan: Plan, x: Instance, axes: Sequence[Axis], name: str, target: CpuTarget, threads: int, tilable: bool) -> None:
        self.tilable = tilable  # all axes may be tiled together
        self.result, self.x, self.axes, self.name, self.target = plan, x, list(axes), name, target
        self.threads = threads if worth_threads(prod(a.extent for a in axes)) else 1
        assert isinstance(x.stmt, Store | Accumulate)
        self.write = E.read(x.stmt.buffer, x.stmt.indices)
        self.reads = E.reads(x.stmt.value)
        outer = _independent([*plan.rows(x.name), *(a.row for a in axes)])[: -len(axes)]
        inverse = _inverse([*outer, *(a.row for a in axes)])
        self.steps = {e: [self.step(e, column) for column in inverse[len(outer) :]] for e in {self.write, *self.reads}} if inverse else None
        widest = max(itemsize(e.attr.dtype) for e in [self.write, *self.reads])
        self.lanes = target.vector_bits // 8 // widest

    def step(self, e: Expr, delta: Sequence[Fraction]) -> int | None:
        """How far the address moves along an axis; None if that varies."""
        index = linear_index(e.attr, e.args)
        total = Fraction(0)
        for x, d in zip(self.x.loops, delta, strict=True):
            c = coefficient(index, x.var)
            if d and c is None:
                return None
            total += d * (c or 0)
        return int(total) if total.denominator == 1 else None

    def plan(self) -> None:
        """Choose the template, and add its time dimensions."""
        if self.steps is None:
            return self.plain()
        lane = self.lane()
        reduced = [n for n, a in enumerate(self.axes) if self.steps[self.write][n] == 0]
        if lane is not None and reduced and self.tilable:
            rows = [
                n for n, a in enumerate(self.axes)
                if n != lane and n not in reduced and any(s[lane] and s[n] == 0 for s in self.steps.values())
            ]  # fmt: skip
            return self.contraction(lane, max(rows, key=lambda n: self.axes[n].extent, default=None), reduced[-1])
        if lane is None and reduced and self.tilable and any(a.free for a in self.axes):
            return self.columns(next(n for n, a in enumerate(self.axes) if a.free), reduced[-1])
        if lane is None and self.x.name not in self.result.time and (cuts := self.cuts()):
            return self.cut(cuts)
        if lane is None and not reduced and any(a.free for a in self.axes):
            self.result.recurrences += self.result.work([self.x.name])
        self.plain(lane)

    def cuts(self) -> set[tuple[int, int]]:
        """Pairs of loops (inner, outer) of this nest such that the statement reads the element it writes where they are equal."""
        loops = [x.var for x in self.x.loops]
        found = set()
        for r in self.reads:
            if r.attr is not self.write.attr:
                continue
            differing = [(a, b) for a, b in zip(self.write.args, r.args, strict=True) if a is not b]
            if len(differing) == 1 and all(e in loops for e in differing[0]):
                a, b = (loops.index(e) for e in differing[0])
                found.add((max(a, b), min(a, b)))
        return found

    def cut(self, cuts: set[tuple[int, int]]) -> None:
        """The loops in their order, the inner one of each pair in three parts: before, at, and behind the outer one."""
        count = len(self.x.loops)
        point = [f"i{d}" for d in range(count)]
        parts: list[tuple[list[str], list[str]]] = [([], [])]  # (time dimensions, conditions)
        names: list[str] = []
        for d in range(count):
            for inner, outer in sorted(cuts):
                if inner == d:
                    sides = (("-1", "<"), ("0", "="), ("1", ">"))
                    parts = [([*time, s], [*known, f"i{d} {op} i{outer}"]) for time, known in parts for s, op in sides]
                    names.append("_")
            parts = [([*time, point[d]], known) for time, known in parts]
            role = "vector" if d == count - 1 else "parallel" if d == 1 and self.threads > 1 else SERIAL
            names.append(self.label(f"y{d}", role))
        texts = (f"{self.x.name}[{', '.join(point)}] -> [{', '.join(time)}] : {' and '.join(known)}" for time, known in parts)
        self.add(isl.Map(f"{{ {'; '.join(texts)} }}").intersect_domain(self.x.domain), names)

    def lane(self) -> int | None:
        """The independent axis along which lanes cost least."""
        assert self.steps is not None
        best: tuple[float, int] | None = None
        for n, a in enumerate(self.axes):
            if not a.free or a.extent < 2 or self.steps[self.write][n] in (0, None):
                continue
            cost = sum(LANE_COST.get(s[n], GATHER_COST) for s in self.steps.values())
            if cost < GATHER_COST and (best is None or cost <= best[0]):
                best = cost, n
        return best[1] if best else None

    def add(self, pieces: isl.Map, names: Sequence[str]) -> None:
        """Add time dimensions."""
        self.result.add(self.x.name, pieces, names)

    def label(self, suffix: str, role: str = SERIAL, size: int = 0) -> str:
        """The name of a new time dimension, and what its loop is for."""
        name = f"{self.name}.{suffix}"
        self.result.loops[name] = Loop(role, size)
        return name

    def all_axes(self, order: Sequence[int]) -> isl.Map:
        """The axes in this order, as a map."""
        result = self.axes[order[0]].value
        for n in order[1:]:
            result = result.flat_range_product(self.axes[n].value)
        return result

    def plain(self, lane: int | None = None) -> None:
        """Outer loops as they are, the first independent one on threads; lanes innermost."""
        order = [n for n in range(len(self.axes)) if n != lane] + ([lane] if lane is not None else [])
        shared = next((n for n in order if self.axes[n].free), None) if self.threads > 1 else None
        names = [self.label(f"y{n}", "vector" if n == lane else "parallel" if n == shared else SERIAL) for n in order]
        time = self.all_axes(order)
        if shared is not None and shared == lane:
            y = [f"y{n}" for n in order]
            time = time.apply_range(map_of(y, [*y[:-1], f"floor({y[-1]} / {CHUNK})", y[-1]]))
            names.insert(-1, self.label("yt", "parallel"))
        self.add(time, names)

    def columns(self, row: int, reduction: int) -> None:
        """Several rows side by side, each with a chain of accumulations of its own; those that make no full block, one by one."""
        others = [n for n in range(len(self.axes)) if n not in (row, reduction)]
        i, k = f"y{row}", f"y{reduction}"
        _, block, place = self.axes[row].blocks(i, JAM)
        own, outer = [f"y{n}" for n in others], f"floor({block} / 8)"
        rows, around = self.all_axes([*others, row, reduction]), []
        if (before := self.result.time.get(self.x.name)) is not None:
            rows, around = before.flat_range_product(rows), [f"t{n}" for n in range(before.dim(isl.dim_type.out))]
        head = [*around, *own]
        y = [*head, i, k]
        points = self.x.domain.intersect_params(self.result.context).apply(rows)
        places = points.apply(map_of(y, [*head, block, k, place]))
        z = [*head, "b", "k"]
        box = map_of([*z, "p"], [*z, "q"], f"0 <= q < {JAM}")
        broken = places.apply(box).subtract(places).apply(map_of([*z, "p"], z[:-1]))
        single = points.intersect(broken.apply(map_of(y, [*head, block]).reverse()))
        full, rest = map_of(y, [*own, "0", outer, block, k, place]), map_of(y, [*own, "1", outer, i, k, "0"])
        names = [*(self.label(f"y{n}") for n in others), "_", self.label("rt", "parallel" if self.threads > 1 else SERIAL)]
        names += [self.label("rb"), self.label("k", "sum"), self.label("r", UNROLLED, JAM)]
        pieces = full.intersect_domain(points.subtract(single)).union(rest.intersect_domain(single))
        self.add(rows.apply_range(pieces).coalesce(), names)

    def contraction(self, lane: int, row: int | None, reduction: int) -> None:
        """The template of a contraction: register tiles along a row and lanes."""
        target = self.target
        others = [n for n in range(len(self.axes)) if n not in (lane, row, reduction)]
        if row is None:
            return self.matrix_vector(others, lane, reduction)
        tile = choose_tile(
            self.axes[row].extent, self.axes[lane].extent, self.lanes, target.vector_registers, 4 if self.scaled(lane) else MOST_ROWS
        )
        width = tile.vectors * self.lanes
        share = max(1, -(-self.axes[row].extent // self.threads))
        rows = max(1, min(96, share) // tile.rows) * tile.rows
        # The threads share the rows, or columns where rows depend on each other.
        by_rows = self.axes[row].free or self.threads == 1
        share = 1 << 40 if by_rows else -(-self.axes[lane].extent // (4 * self.threads * width)) * width
        order = [*others, row, lane, reduction]
        y = [f"y{n}" for n in order]
        i, j, k = f"y{row}", f"y{lane}", f"y{reduction}"
        head = [f"y{n}" for n in others] + ["ct", "it", "jt", "ib"]
        box = [
            f"{i} = {tile.rows} ib + ip and 0 <= ip < {tile.rows}", f"{rows} it <= {tile.rows} ib < {rows} it + {rows}",
            f"{j} = {width} jt + {self.lanes} v + l and 0 <= v < {tile.vectors} and 0 <= l < {self.lanes}",
            f"{share} ct <= {width} jt < {share} ct + {share}",
        ]  # fmt: skip
        inside = ["ip", "v", "l"]
        tiled = self.all_axes(order).apply_range(map_of(y, [*head, k, *inside], " and ".join(box)))
        whole = f"0 <= ip < {tile.rows} and 0 <= v < {tile.vectors} and 0 <= l < {self.lanes}"
        names = [self.label(f"y{n}") for n in others]
        names += [self.label("ct", SERIAL if by_rows else "parallel")]
        names += [self.label("it", "parallel" if by_rows and self.threads > 1 else SERIAL), self.label("jt"), self.label("ib"), "_"]
        names += [self.label("k", "sum"), self.label("r", UNROLLED, tile.rows), self.label("v", UNROLLED, tile.vectors)]
        names += [self.label("l", "lanes", self.lanes)]
        self.add(self.full_tiles_apart(tiled, inside, whole), names)

    def full_tiles_apart(self, tiled: isl.Map, inside: Sequence[str], whole: str) -> isl.Map:
        """Steps of the accumulation whose tiles are full, apart from those before and behind them: a dimension more, in front of the steps.
        `inside` are the last dimensions of `tiled`, those of one tile, which take all values of the condition `whole` where it is full."""
        points = self.x.domain.intersect_params(self.result.context).apply(tiled)
        first, count = points.dim(isl.dim_type.set) - len(inside), len(inside)
        *around, step = [f"z{d}" for d in range(first)]
        box = map_of([*around, step], [*around, step, *inside], whole)
        tiles = points.project_out(isl.dim_type.set, first, count)
        full = tiles.subtract(tiles.apply(box).subtract(points).project_out(isl.dim_type.set, first, count)).coalesce()
        rest = tiles.subtract(full)
        behind = rest.intersect(full.apply(map_of([*around, "a"], [*around, "b"], "a < b"))).coalesce()
        parts = isl.UnionMap("{}")
        for number, part in enumerate((rest.subtract(behind).coalesce(), full, behind)):
            numbered = map_of([*around, step, *inside], [*around, str(number), step, *inside]).intersect_domain(part.apply(box))
            parts = parts.union(isl.UnionMap.from_map(tiled.apply_range(numbered)))
        return isl.Map.from_union_map(parts).coalesce()

    def scaled(self, lane: int) -> bool:
        """Whether the factor that is the same for all lanes has to be computed, and cannot be loaded by the multiply-add itself."""
        assert self.steps is not None and isinstance(self.x.stmt, Store | Accumulate)
        value = self.x.stmt.value
        return value.op != "mul" or any(a.op != "read" and all(self.steps[r][lane] == 0 for r in E.reads(a)) for a in value.args)

    def matrix_vector(self, others: Sequence[int], lane: int, reduction: int) -> None:
        """Vector lanes along the result, several accumulations into it at a time."""
        size = 4
        if not worth_threads(self.axes[lane].extent * self.axes[reduction].extent // self.lanes):
            self.threads = 1
        chunk = max(self.lanes, min(256, -(-self.axes[lane].extent // (self.threads * self.lanes)) * self.lanes))
        order = [*others, lane, reduction]
        y = [f"y{n}" for n in order]
        j = f"y{lane}"
        rest, block, place = self.axes[reduction].blocks(f"y{reduction}", size)
        tiled = [*y[: len(others)], f"floor({j} / {chunk})", rest, block, j, place]
        names = [*(self.label(f"y{n}") for n in others), self.label("jt", "parallel" if self.threads > 1 else SERIAL), "_"]
        names += [self.label("kb"), self.label("j", "vector"), self.label("k", UNROLLED, size)]
        self.add(self.all_axes(order).apply_range(map_of(y, tiled)), names)


def _independent(rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The rows that are no combination of those before."""
    kept: list[Sequence[int]] = []
    basis: list[list[Fraction]] = []
    for row in rows:
        rest = [Fraction(v) for v in row]
        for b in basis:
            lead = next(k for k, v in enumerate(b) if v)
            rest = [r - rest[lead] / b[lead] * v for r, v in zip(rest, b, strict=True)]
        if any(rest):
            basis.append(rest)
            kept.append(row)
    return kept


def _inverse(rows: Sequence[Sequence[int]]) -> list[list[Fraction]] | None:
    """The columns of the inverse of a matrix; None where it has none."""
    n = len(rows)
    if any(len(r) != n for r in rows):
        return None
    work = [[Fraction(v) for v in row] + [Fraction(int(i == k)) for k in range(n)] for i, row in enumerate(rows)]
    for c in range(n):
        pivot = next((r for r in range(c, n) if work[r][c]), None)
        if pivot is None:
            return None
        work[c], work[pivot] = work[pivot], work[c]
        work[c] = [v / work[c][c] for v in work[c]]
        for r in range(n):
            if r != c and work[r][c]:
                work[r] = [a - work[r][c] * b for a, b in zip(work[r], work[c], strict=True)]
    return [[work[r][n + c] for r in range(n)] for c in range(n)]
