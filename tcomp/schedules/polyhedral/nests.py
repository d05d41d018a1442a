"""The nest of one statement: the template that suits its accesses (see `polyhedral`), as time dimensions made of its axes; and stencils in
time: all loops of a band depend on each other, but its tiles run in parallel along a diagonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import reduce
from math import prod

import islpy as isl

from tcomp.ir import expr as E
from tcomp.ir.access import coefficient, linear_index
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr
from tcomp.ir.loops import SERIAL, UNROLLED, Accumulate, Store
from tcomp.ir.polyhedral.model import Instance, map_of
from tcomp.schedules.analysis.access_patterns import extent_of
from tcomp.schedules.cost.register_tiles import choose_tile
from tcomp.schedules.polyhedral.plan import JAM, Axis, Loop, Plan, axis, component, union, worth_threads
from tcomp.target import CpuTarget

# The cost of a vector access relative to one vector load, by the stride between lanes in elements: multiply-adds broadcast scalars,
# a reversed vector is loaded and permuted, and any other stride takes a load and an insertion for each of some 8 lanes.
LANE_COST: dict[int | None, float] = {0: 0.2, 1: 1.0, -1: 2.0}
GATHER_COST = 9.0  # of a vector, as a load is 1
CHUNK = 1024  # elements of an array that one thread takes at a time: some 4 KiB, so that threads share no cache line or page for long
MAX_TILE_ROWS = 6  # rows of a register tile, at most: the other registers hold more vectors of a row, so that fewer pages are touched
MAX_SCALED_ROWS = 4  # the same where the factor of a row is computed and takes a register of its own
MAX_BLOCK_ROWS = 96  # rows of an operand that are reused from the second-level cache: 16 of the largest register tiles
COLUMN_BLOCKS = 4  # blocks of columns for each thread, so that the last ones to finish wait for a quarter of the work at most
MATRIX_VECTOR_STEPS = 4  # steps of the reduction in one pass over the result: a load and a store of it for 4 multiply-adds
MAX_RESULT_CHUNK = 256  # elements of the result that stay in the first-level cache for the whole reduction, with the lines of the matrix
ROW_GROUP = 8  # blocks of `JAM` rows that one thread takes at a time
UNCUT = 1 << 20  # iterations of a tile in a dimension that is not tiled: more than any loop of a stencil has
TILE_2D = (64, 512)  # time steps and elements of a tile of a stencil over one dimension: 4 KiB of elements, reused in the first-level cache
MIN_TILE, MAX_TILE = 4, 64  # rows of a tile of another stencil: fewer are mostly skewed border, more leave too few tiles along a diagonal


class Nest:
    """The plan for the loops around one statement."""

    def __init__(self, plan: Plan, x: Instance, axes: Sequence[Axis], name: str, target: CpuTarget, threads: int, tilable: bool) -> None:
        self.tilable = tilable  # all axes may be tiled together
        self.result, self.x, self.axes, self.name, self.target = plan, x, list(axes), name, target
        self.threads = threads if worth_threads(prod(a.extent for a in axes)) else 1
        assert isinstance(x.stmt, Store | Accumulate)
        self.write = E.read(x.stmt.buffer, x.stmt.indices)
        self.reads = E.reads(x.stmt.value)
        rows = [*plan.rows(x.name), *(a.row for a in axes)]
        outer = [rows[k] for k in _reduced([*zip(*rows, strict=True)])[1]][: -len(axes)]  # those that are not combinations of others before
        inverse = _inverse([*outer, *(a.row for a in axes)])
        self.steps = {e: [self.step(e, column) for column in inverse[len(outer) :]] for e in {self.write, *self.reads}} if inverse else None
        widest = max(itemsize(e.attr.dtype) for e in [self.write, *self.reads])
        self.lanes = target.vector_bits // 8 // widest

    def step(self, e: Expr, delta: Sequence[Fraction]) -> int | None:
        """How far the address moves along an axis; None if that varies."""
        index = linear_index(e.attr, e.args)
        terms = [(d, coefficient(index, x.var)) for x, d in zip(self.x.loops, delta, strict=True) if d]
        if any(c is None for _, c in terms):
            return None
        total = sum((d * (c or 0) for d, c in terms), Fraction(0))
        return int(total) if total.denominator == 1 else None

    def plan(self) -> None:
        """Choose the template, and add its time dimensions."""
        if self.steps is None:
            return self.plain()
        lane = self.lane()
        reduced = [n for n, a in enumerate(self.axes) if self.steps[self.write][n] == 0]
        if lane is not None and reduced and self.tilable:
            others = [n for n in range(len(self.axes)) if n != lane and n not in reduced]
            rows = [n for n in others if any(s[lane] and s[n] == 0 for s in self.steps.values())]
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
        reads = (zip(self.write.args, r.args, strict=True) for r in self.reads if r.attr is self.write.attr)
        differing = ([(a, b) for a, b in indices if a is not b] for indices in reads)
        pairs = (found[0] for found in differing if len(found) == 1 and all(e in loops for e in found[0]))
        return {(max(i, j), min(i, j)) for i, j in ((loops.index(a), loops.index(b)) for a, b in pairs)}

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
            names.append(self.label(f"y{d}", "vector" if d == count - 1 else self.shared if d == 1 else SERIAL))
        texts = (f"{self.x.name}[{', '.join(point)}] -> [{', '.join(time)}] : {' and '.join(known)}" for time, known in parts)
        self.result.add(self.x.name, isl.Map(f"{{ {'; '.join(texts)} }}").intersect_domain(self.x.domain), names)

    def lane(self) -> int | None:
        """The independent axis along which lanes cost least."""
        assert self.steps is not None
        able = [n for n, a in enumerate(self.axes) if a.free and a.extent >= 2 and self.steps[self.write][n] not in (0, None)]
        costs = {n: sum(LANE_COST.get(s[n], GATHER_COST) for s in self.steps.values()) for n in reversed(able)}
        best = min(costs, key=costs.__getitem__, default=None)  # of equal ones, the innermost
        return best if best is not None and costs[best] < GATHER_COST else None

    @property
    def shared(self) -> str:
        """The role of a loop that threads share, if there are any."""
        return "parallel" if self.threads > 1 else SERIAL

    def label(self, suffix: str, role: str = SERIAL, size: int = 0) -> str:
        """The name of a new time dimension, and what its loop is for."""
        name = f"{self.name}.{suffix}"
        self.result.loops[name] = Loop(role, size)
        return name

    def all_axes(self, order: Sequence[int]) -> isl.Map:
        """The axes in this order, as a map."""
        return reduce(isl.Map.flat_range_product, (self.axes[n].value for n in order))

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
        self.result.add(self.x.name, time, names)

    def columns(self, row: int, reduction: int) -> None:
        """Several rows side by side, each with a chain of accumulations of its own; those that make no full block, one by one."""
        others = [n for n in range(len(self.axes)) if n not in (row, reduction)]
        i, k = f"y{row}", f"y{reduction}"
        _, block, place = self.axes[row].blocks(i, JAM)
        own, outer = [f"y{n}" for n in others], f"floor({block} / {ROW_GROUP})"
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
        names = [*(self.label(f"y{n}") for n in others), "_", self.label("rt", self.shared)]
        names += [self.label("rb"), self.label("k", "sum"), self.label("r", UNROLLED, JAM)]
        pieces = full.intersect_domain(points.subtract(single)).union(rest.intersect_domain(single))
        self.result.add(self.x.name, rows.apply_range(pieces).coalesce(), names)

    def contraction(self, lane: int, row: int | None, reduction: int) -> None:
        """The template of a contraction: register tiles along a row and lanes."""
        others = [n for n in range(len(self.axes)) if n not in (lane, row, reduction)]
        if row is None:
            return self.matrix_vector(others, lane, reduction)
        max_rows = MAX_SCALED_ROWS if self.scaled(lane) else MAX_TILE_ROWS
        height, columns, target = self.axes[row].extent, self.axes[lane].extent, self.target
        tile = choose_tile(height, columns, self.lanes, target.vector_registers, target.core, max_rows)
        width = tile.vectors * self.lanes
        share = max(1, -(-self.axes[row].extent // self.threads))
        rows = max(1, min(MAX_BLOCK_ROWS, share) // tile.rows) * tile.rows
        # The threads share the rows, or columns where rows depend on each other.
        by_rows = self.axes[row].free or self.threads == 1
        share = 1 << 40 if by_rows else -(-self.axes[lane].extent // (COLUMN_BLOCKS * self.threads * width)) * width
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
        names = [*(self.label(f"y{n}") for n in others), self.label("ct", SERIAL if by_rows else "parallel")]
        names += [self.label("it", self.shared if by_rows else SERIAL), self.label("jt"), self.label("ib"), "_", self.label("k", "sum")]
        names += [self.label("r", UNROLLED, tile.rows), self.label("v", UNROLLED, tile.vectors), self.label("l", "lanes", self.lanes)]
        self.result.add(self.x.name, self.separate_full_tiles(tiled, inside, whole), names)

    def separate_full_tiles(self, tiled: isl.Map, inside: Sequence[str], whole: str) -> isl.Map:
        """Separates the steps of the reduction whose tiles are full from those before and after them: a dimension more, in front of the
        steps. `inside` are the last dimensions of `tiled`, those of one tile, which take all values of the condition `whole` where it is
        full."""
        points = self.x.domain.intersect_params(self.result.context).apply(tiled)
        first, count = points.dim(isl.dim_type.set) - len(inside), len(inside)
        *around, step = [f"z{d}" for d in range(first)]
        box = map_of([*around, step], [*around, step, *inside], whole)
        tiles = points.project_out(isl.dim_type.set, first, count)
        full = tiles.subtract(tiles.apply(box).subtract(points).project_out(isl.dim_type.set, first, count)).coalesce()
        rest = tiles.subtract(full)
        behind = rest.intersect(full.apply(map_of([*around, "a"], [*around, "b"], "a < b"))).coalesce()
        numbers = [map_of([*around, step, *inside], [*around, str(number), step, *inside]) for number in range(3)]
        parts = zip(numbers, (rest.subtract(behind).coalesce(), full, behind), strict=True)
        return isl.Map.from_union_map(union(tiled.apply_range(n.intersect_domain(part.apply(box))) for n, part in parts)).coalesce()

    def scaled(self, lane: int) -> bool:
        """Whether the factor that all lanes share is computed, so that the multiply-add cannot load and broadcast it itself."""
        assert self.steps is not None and isinstance(self.x.stmt, Store | Accumulate)
        value = self.x.stmt.value
        return value.op != "mul" or any(a.op != "read" and all(self.steps[r][lane] == 0 for r in E.reads(a)) for a in value.args)

    def matrix_vector(self, others: Sequence[int], lane: int, reduction: int) -> None:
        """Vector lanes along the result, several accumulations into it at a time."""
        if not worth_threads(self.axes[lane].extent * self.axes[reduction].extent // self.lanes):
            self.threads = 1
        chunk = max(self.lanes, min(MAX_RESULT_CHUNK, -(-self.axes[lane].extent // (self.threads * self.lanes)) * self.lanes))
        order = [*others, lane, reduction]
        y = [f"y{n}" for n in order]
        j = f"y{lane}"
        rest, block, place = self.axes[reduction].blocks(f"y{reduction}", MATRIX_VECTOR_STEPS)
        tiled = [*y[: len(others)], f"floor({j} / {chunk})", rest, block, j, place]
        names = [*(self.label(f"y{n}") for n in others), self.label("jt", self.shared), "_"]
        names += [self.label("kb"), self.label("j", "vector"), self.label("k", UNROLLED, MATRIX_VECTOR_STEPS)]
        self.result.add(self.x.name, self.all_axes(order).apply_range(map_of(y, tiled)), names)


def _reduced(rows: Sequence[Sequence[int]]) -> tuple[list[list[Fraction]], list[int]]:
    """The reduced row echelon form of a matrix, and its pivot columns."""
    work, pivots = [[Fraction(v) for v in row] for row in rows], list[int]()
    for c in range(len(work[0]) if work else 0):
        r = len(pivots)
        if (pivot := next((k for k in range(r, len(work)) if work[k][c]), None)) is None:
            continue
        work[r], work[pivot] = work[pivot], work[r]
        lead = [v / work[r][c] for v in work[r]]
        work = [lead if k == r else [a - row[c] * b for a, b in zip(row, lead, strict=True)] for k, row in enumerate(work)]
        pivots.append(c)
    return work, pivots


def _inverse(rows: Sequence[Sequence[int]]) -> list[list[Fraction]] | None:
    """The columns of the inverse of a matrix; None where it has none."""
    n = len(rows)
    if any(len(r) != n for r in rows):
        return None
    work, pivots = _reduced([[*row, *(int(i == k) for k in range(n))] for i, row in enumerate(rows)])
    return [[row[n + c] for row in work] for c in range(n)] if pivots == [*range(n)] else None


def wavefront(
    plan: Plan, band: Mapping[str, isl.Map], ranks: Mapping[str, int], dependences: isl.UnionMap, nest: str, target: CpuTarget, threads: int
) -> None:
    """Adds the time dimensions of a band of statements: tiles along a diagonal, and what is inside of one. `ranks` are the places of the
    statements in an iteration of the band, `nest` is what its loops are called after."""
    count = next(iter(band.values())).dim(isl.dim_type.out)
    y = [f"y{d}" for d in range(count)]
    last = _inner(band, ranks, count, dependences)
    buffers = {a.buffer for n in band for a in plan.instances[n].accesses}
    # Tiles of time steps and rows whose data stay in the second-level cache; the innermost dimension is not cut.
    rank = len(max(buffers, key=lambda b: prod(d for d in b.shape if isinstance(d, int))).shape)
    row = sum(itemsize(b.dtype) * prod(d for d in b.shape[1:] if isinstance(d, int)) for b in buffers if len(b.shape) == rank)
    rows = max(MIN_TILE, min(MAX_TILE, target.l2 // 2 // max(row, 1)))
    sizes = [*TILE_2D] if count == 2 else [max(MIN_TILE, rows // 2), rows, *([UNCUT] * (count - 2))]
    name, first = next(iter(band.items()))
    extents = [axis(plan.instances[name], component(first, d), False, plan.context).extent for d in (0, 1)]
    steps = sum(-(-extent // size) for extent, size in zip(extents, sizes, strict=False))
    lanes = target.vector_bits // 8 // max(itemsize(b.dtype) for b in buffers) if last == "lanes" else 1
    shared = threads > 1 and worth_threads(plan.work(list(band)) // (2 * lanes * steps))
    if not shared and sum(itemsize(b.dtype) * prod(extent_of(d) for d in b.shape) for b in buffers) <= target.l2 // 2:
        sizes = [UNCUT] * count  # neither threads nor caches ask for tiles
    tiles = [f"floor(y{d} / {n})" for d, n in enumerate(sizes)]
    outer = map_of(y, [f"{tiles[0]} + {tiles[1]}", *tiles[1:]])
    plan.loops |= {f"{nest}.w": Loop(SERIAL), f"{nest}.p": Loop("parallel" if shared else SERIAL)}
    dims = [f"{nest}.w", f"{nest}.p", *(f"{nest}.t{d}" for d in range(2, count))]
    points = [*(f"{nest}.y{d}" for d in range(count - 1)), *(["_", f"{nest}.v"] if last else [f"{nest}.y{count - 1}", "_"])]
    # Gathers along a diagonal gain nothing over the scalar code, whose iterations overlap as well.
    plan.loops[f"{nest}.v"] = Loop("vector" if last == "lanes" else SERIAL)
    for n in band:
        place = str(ranks[n])
        inner = {"diagonal": [*y[:-2], f"{y[-2]} + {y[-1]}", place, y[-2]], "lanes": [*y[:-1], place, y[-1]], "": [*y, place]}[last]
        plan.add(n, band[n].apply_range(outer), dims)
        plan.add(n, band[n].apply_range(map_of(y, inner)), points)


def _inner(band: Mapping[str, isl.Map], ranks: Mapping[str, int], count: int, dependences: isl.UnionMap) -> str:
    """How the innermost loop can run in lanes: along the last dimension, statement by statement; along a diagonal; not at all."""
    y = [f"y{d}" for d in range(count)]
    for kind, outer, lane in (("lanes", y[:-1], y[-1]), ("diagonal", [*y[:-2], f"{y[-2]} + {y[-1]}"], y[-2])):
        time = union(b.apply_range(map_of(y, [*outer, str(ranks[n]), lane])) for n, b in band.items())
        pairs = dependences.apply_domain(time).apply_range(time)
        fixed = [f"a{d}" for d in range(len(outer) + 1)]
        across = union([map_of([*fixed, "l"], [*fixed, "m"], "l != m")])
        back = union([isl.Map.lex_ge(isl.Space.set_alloc(isl.DEFAULT_CONTEXT, 0, len(outer) + 2))])
        if pairs.intersect(across).is_empty() and pairs.intersect(back).is_empty():
            return kind
    return ""
