"""The polyhedral scheduler: an order of all instances that isl proposes from the dependences, shaped for the machine.

isl's scheduler (Pluto's algorithm, U. Bondhugula et al., "A practical automatic polyhedral parallelizer and locality optimizer", 2008)
distributes the statements into a tree of *bands*: loops that may be interchanged and tiled. Each band becomes one of

    contraction   accumulation over a loop inside: a tile of rows x vectors stays in registers, blocks of the operands in the caches
    columns       no axis runs along memory except the accumulated one: rows side by side, so that their sums do not wait for each other
    elementwise   vector lanes along memory, threads along the outermost independent loop
    wavefront     no independent loop at all (stencils in time): tiles that run in parallel along a diagonal

and enters the schedule through `affine`, the primitive that proves it; `split`, `vectorize`, `unroll` and `parallel` do the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from typing import Any

import islpy as isl

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr
from tcomp.ir.loops import SERIAL, UNROLLED, Accumulate, Buffer, For, Kernel, Stmt, Store, children, expressions, walk
from tcomp.ir.polyhedral import FOLD, READ, WRITE, Instance, Model, TooHard, limited, model
from tcomp.schedules.primitives.storage import computed_from
from tcomp.schedules.roles import coefficient, extent_of, linear_index
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import choose_tile
from tcomp.target import Target

WORK = 1 << 14  # instances below which threads cost more than they save
JAM = 8  # independent chains side by side that hide the latency of each
LANE_COST: dict[int | None, float] = {0: 0.2, 1: 1.0, -1: 2.0}  # of an access by the distance between lanes, in elements
FAR = 9.0  # of one with any other distance
UNKNOWN = 512  # iterations of a loop of symbolic extent
CHUNK = 1024  # elements of a vector that one thread takes at a time
ROWS = 6  # at most of a register tile: the others are vectors side by side, of which fewer pages are touched
REUSE = 16  # times that an element is read for which it is copied first
NEAR = 4  # constants in dependences that may matter to a schedule; larger ones are sizes
_NODE = isl.schedule_node_type


def polyhedral(program: Kernel | Schedule, target: Target, threads: int = 1) -> Schedule:
    """The schedule of an affine loop program, made in place where a schedule is given.

    Raises `ScheduleError` where isl finds no order within its limits, or none that gains threads, lanes or chains side by side; the
    schedule is then as it was.
    """
    s = program if isinstance(program, Schedule) else Schedule(program)
    for x in model(s.kernel.body).instances:
        if not x.exact or not isinstance(x.stmt, Store | Accumulate):
            raise ScheduleError(f"no polyhedral schedule of kernel `{s.kernel.name}`", why=f"whether `{x.stmt}` is executed depends on data")
    before = s.copy()
    try:
        _pack(s)
        return _scheduled(s, target, threads)
    except ScheduleError:
        s.kernel, s.trace = before.kernel, before.trace
        raise


def _scheduled(s: Schedule, target: Target, threads: int) -> Schedule:
    for fused in (None, False):
        try:
            plan = _Planner(model(s.kernel.body), target, threads).plan(fused)
            if not plan.gains():
                raise ScheduleError(f"no polyhedral schedule of kernel `{s.kernel.name}`", why="the loops that do most of the work depend on each other")
            s.affine(None, plan.order(), plan.naming(), plan.parallel())
            break
        except TooHard as error:
            raise ScheduleError(f"no polyhedral schedule of kernel `{s.kernel.name}`", why=f"isl gave up: {error}") from None
        except ScheduleError:
            if fused is False:
                raise
    _Shaper(s, plan, target).shape()
    s.clean()
    return s


def polyhedral_or_not(s: Schedule, target: Target, threads: int) -> Schedule:
    """The default for programs of which the structural schedules know nothing: as written, with a note, where there is nothing to gain."""
    if sum(prod(extent_of(x.extent) for x in loops) for _, loops in _stores(s.kernel.body)) < 2 * WORK:
        return s
    try:
        return polyhedral(s, target, threads)
    except (ScheduleError, isl.Error) as error:
        why = (error.why or error.what) if isinstance(error, ScheduleError) else "isl gave up"
        s.note(f"runs as written: {why}".splitlines()[0][:200])
        return s


def _stores(stmt: Stmt, loops: tuple[For, ...] = ()) -> Iterator[tuple[Stmt, tuple[For, ...]]]:
    """The stores of a statement with the loops around them."""
    if isinstance(stmt, Store | Accumulate):
        yield stmt, loops
    for c in children(stmt):
        yield from _stores(c, (*loops, stmt) if isinstance(stmt, For) else loops)


# ---------------------------------------------------------------- operands


def _pack(s: Schedule) -> None:
    """Operands of contractions that are read often, as the inner loops want them: factors computed once, and the axis along memory of
    the result along memory in them as well."""
    contractions = _contractions(s.kernel)
    for b in {r.attr: None for x in contractions for r in _reused(s.kernel, x)}:
        if computed_from(b, *(e for x in contractions for e in expressions(x.stmt))) is not None:
            with suppress(ScheduleError):  # temporaries and integers are left as they are
                s.precompute(b.name, f"{b.name}.f")
    contractions = _contractions(s.kernel)
    for b in {r.attr: None for x in contractions for r in _reused(s.kernel, x)}:
        along = _along_memory(contractions, b)
        if len(along) == 1 and (last := along.pop()) != len(b.shape) - 1:
            axes = [*(d for d in range(len(b.shape)) if d != last), last]
            layout = f"({','.join('abcdefghijklmnop'[d] for d in axes)})"
            with suppress(ScheduleError):
                if b in s.kernel.buffers:
                    s.cache_read(b.name, None, f"{b.name}.t", layout=layout)
                else:
                    s.relayout(b.name, layout)


def _contractions(kernel: Kernel) -> list[Instance]:
    """Accumulations into a matrix at least, each element many times."""
    found = [x for x in model(kernel.body).instances if isinstance(x.stmt, Accumulate) and len(x.stmt.indices) >= 2]
    return [x for x in found if any(loop.var not in _written_at(x) and extent_of(loop.extent) >= REUSE for loop in x.loops)]


def _written_at(x: Instance) -> tuple[Expr, ...]:
    """The variables in the indices of the element that a statement writes."""
    assert isinstance(x.stmt, Store | Accumulate)
    return E.variables(*x.stmt.indices)


def _reused(kernel: Kernel, x: Instance) -> list[Expr]:
    """Reads of elements that the program does not write, each of them many times in one contraction."""
    assert isinstance(x.stmt, Accumulate)
    written = {s.buffer for s in walk(kernel.body) if isinstance(s, Store | Accumulate) and s.buffer in kernel.buffers}
    reads = [r for r in E.reads(x.stmt.value) if r.attr not in written]
    return [r for r in reads if any(loop.var not in E.variables(*r.args) and extent_of(loop.extent) >= REUSE for loop in x.loops)]


def _along_memory(contractions: Sequence[Instance], b: Buffer) -> set[int]:
    """The dimensions of an operand that follow the last index of the result."""
    found = set()
    for x in contractions:
        assert isinstance(x.stmt, Accumulate)
        lane = set(E.variables(x.stmt.indices[-1]))
        found |= {d for r in E.reads(x.stmt.value) if r.attr is b for d, i in enumerate(r.args) if lane & set(E.variables(i))}
    return found


# ---------------------------------------------------------------- dependences


def flow(m: Model) -> isl.UnionMap:
    """Dependences without those that follow from others: every access depends on the last write (and a write on the reads since)."""
    union = isl.UnionMap
    reads, writes, certain, order = (union("{}") for _ in range(4))
    for x in m.instances:
        order = order.union(union.from_map(x.order))
        for a in x.accesses:
            relation = union.from_map(a.relation)
            if a.kind in (READ, FOLD):
                reads = reads.union(relation)
            if a.kind in (WRITE, FOLD):
                writes = writes.union(relation)
                if a.exact and x.exact:
                    certain = certain.union(relation)
    reads, writes, certain = reads.coalesce(), writes.coalesce(), certain.coalesce()
    possible = writes.subtract(certain)

    def last(sink: isl.UnionMap, may: isl.UnionMap) -> isl.UnionMap:
        access = isl.UnionAccessInfo.from_sink(sink).set_must_source(certain).set_may_source(may).set_schedule_map(order)
        return access.compute_flow().get_may_dependence()

    return last(writes, reads.union(possible)).union(last(reads, possible)).coalesce()


def relaxed(dependences: isl.UnionMap) -> isl.UnionMap:
    """More dependences, in fewer and smaller constraints: those that mention sizes are dropped. isl's linear programs take time with the
    magnitude of their numbers, and a good schedule does not depend on the sizes."""
    result = isl.UnionMap("{}")
    maps = dependences.get_map_list()
    for n in range(maps.n_map()):
        pieces = maps.get_at(n).remove_divs().coalesce().get_basic_map_list()
        for k in range(pieces.n_basic_map()):
            piece = pieces.get_at(k).remove_redundancies()
            kept = isl.BasicMap.universe(piece.get_space())
            for c in piece.get_constraints():
                if c.is_equality() or abs(c.get_constant_val().to_python()) <= NEAR:
                    kept = kept.add_constraint(c)
            result = result.union(isl.UnionMap.from_map(isl.Map.from_basic_map(kept)))
    return result.coalesce()


def isl_schedule(domain: isl.UnionSet, dependences: isl.UnionMap, context: isl.Set, fused: bool = False) -> Any:
    """The schedule tree for a domain; unless `fused`, statements share loops only where dependences ask for it."""
    constraints = isl.ScheduleConstraints.on_domain(domain).set_validity(dependences).set_coincidence(dependences).set_context(context)
    constraints = constraints.set_proximity(dependences)
    isl.DEFAULT_CONTEXT.set_schedule_serialize_sccs(0 if fused else 1)
    try:
        return constraints.compute_schedule().get_root().get_child(0)
    finally:
        isl.DEFAULT_CONTEXT.set_schedule_serialize_sccs(0)


# ---------------------------------------------------------------- the plan


@dataclass(slots=True)
class Loop:
    """What becomes of the loops of one time dimension. `role`: parallel, serial, unroll (`size` iterations), lanes (`size` of them), or
    vector (any number of iterations, in lanes)."""

    role: str
    size: int = 0


@dataclass(slots=True)
class Plan:
    """Time vectors of the instances, built up dimension by dimension, and what the dimensions are for."""

    instances: dict[str, Instance]
    time: dict[str, isl.Map] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    loops: dict[str, Loop] = field(default_factory=dict)

    def add(self, name: str, more: isl.Map, names: Sequence[str]) -> None:
        self.time[name] = self.time[name].flat_range_product(more) if name in self.time else more
        self.names.setdefault(name, []).extend(names)

    def place(self, names: Sequence[str], position: int) -> None:
        for n in names:
            space = self.instances[n].domain.get_space()
            zero = isl.Aff.val_on_domain(isl.LocalSpace.from_space(space), isl.Val(position))
            self.add(n, isl.Map.from_aff(zero), ["_"])

    def order(self) -> str:
        longest = max(len(n) for n in self.names.values())
        result = isl.UnionMap("{}")
        for name in self.instances:
            while len(self.names[name]) < longest:
                self.place([name], 0)
            result = result.union(isl.UnionMap.from_map(self.time[name].intersect_domain(self.instances[name].domain).coalesce()))
        return str(result)

    def naming(self) -> str:
        return "; ".join(f"{name}: {' '.join(names)}" for name, names in self.names.items())

    def gains(self) -> bool:
        """Whether most of the work runs on threads, in lanes, or side by side."""
        shaped = [n for n, names in self.names.items() if any(name in self.loops and self.loops[name].role != SERIAL for name in names)]
        return 2 * self.work(shaped) > self.work()

    def work(self, names: Sequence[str] | None = None) -> int:
        """About how many instances there are."""
        return sum(prod(extent_of(loop.extent) for loop in x.loops) for n, x in self.instances.items() if names is None or n in names)

    def parallel(self) -> str:
        return " ".join(name for name, loop in self.loops.items() if loop.role == "parallel")

    def loop(self, name: str) -> tuple[str, Loop] | None:
        """What a loop of the kernel is for; those that the scanner made several of end in a number."""
        base = name if name in self.loops else name.rsplit(".", 1)[0]
        return (base, self.loops[base]) if base in self.loops else None


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


class _Planner:
    def __init__(self, m: Model, target: Target, threads: int) -> None:
        self.model, self.target, self.threads = m, target, threads
        self.instances = {x.name: x for x in m.instances}
        self.result = Plan(self.instances)
        self.nests = 0
        self.dependences = isl.UnionMap("{}")

    def plan(self, fused: bool | None = None) -> Plan:
        """The plan; statements share loops as `fused` says, or where chains of dependent iterations would profit from it."""
        with limited(400_000_000):
            self.dependences = flow(self.model)
        self.build(bool(fused))
        if 2 * self.recurrences > self.result.work() and fused is None:
            self.build(True)
        return self.result

    def build(self, fused: bool) -> None:
        """The plan from the tree of all instances. `fused`: statements share loops where they can, which chains of dependent iterations
        profit from: many of them side by side."""
        self.result, self.nests, self.fused, self.recurrences = Plan(self.instances), 0, fused, 0
        domain = isl.UnionSet("{}")
        for x in self.model.instances:
            domain = domain.union(isl.UnionSet.from_set(x.domain))
        try:
            with limited(60_000_000):
                tree = isl_schedule(domain, relaxed(self.dependences), self.model.context, fused)
        except TooHard:
            with limited(200_000_000):
                tree = isl_schedule(domain, self.dependences, self.model.context, fused)
        with limited(400_000_000):
            self.visit(tree, list(self.instances), False)

    # ------------------------------------------------------------ the tree

    def visit(self, node: Any, names: list[str], parallel: bool) -> None:
        match node.get_type():
            case _NODE.sequence | _NODE.set:
                for position in range(node.n_children()):
                    child = node.get_child(position)
                    inside = [n for n in names if self.inside(child, n)]
                    self.result.place(inside, position)
                    self.visit(child.get_child(0), inside, parallel)
            case _NODE.filter:
                self.visit(node.get_child(0), names, parallel)
            case _NODE.band:
                self.band(node, names, parallel)

    def inside(self, node: Any, name: str) -> bool:
        return not node.filter_get_filter().intersect(isl.UnionSet.from_set(self.instances[name].domain)).is_empty()

    def band(self, node: Any, names: list[str], parallel: bool) -> None:
        chain, below = _chain(node)
        self.nests += 1
        free = [bool(node.band_member_get_coincident(d)) for d in range(node.band_n_member())]
        if len(free) >= 2 and not any(free) and node.band_get_permutable() and not parallel and not _has_band(node.get_child(0)):
            return self.wavefront(node, names)
        if len(names) == 1 and below.get_type() == _NODE.leaf:
            return self.nest(self.instances[names[0]], chain, parallel)
        jammed = next((d for d, f in enumerate(free) if f), None) if self.fused and not _has_free_band(node.get_child(0)) else None
        nest = f"n{self.nests}"
        for d, independent in enumerate(free):
            name = f"{nest}.b{d}"
            use = independent and not parallel and self.threads > 1
            self.result.loops[name] = Loop("parallel" if use else SERIAL)
            parallel = parallel or use
            if d == jammed:
                axes = [self.axis(self.instances[n], _member(node, self.instances[n], d), True) for n in names]
                low = min(a.low for a in axes)
                extent = max(a.low + a.extent for a in axes) - low
                rest, block, place = replace(axes[0], low=low, extent=extent).blocks("y", JAM)
            for n in names:
                value = _member(node, self.instances[n], d)
                if d == jammed:
                    self.result.add(n, value.apply_range(isl.Map(f"{{ [y] -> [{rest}, {block}] }}")), ["_", name])
                else:
                    self.result.add(n, value, [name])
        self.visit(node.get_child(0), names, parallel)
        if jammed is not None:
            self.result.loops[f"{nest}.u"] = Loop(UNROLLED, JAM)
            for n in names:
                self.result.add(n, _member(node, self.instances[n], jammed).apply_range(isl.Map(f"{{ [y] -> [{place}] }}")), [f"{nest}.u"])

    # ------------------------------------------------------------ one statement

    def nest(self, x: Instance, chain: Sequence[Any], parallel: bool) -> None:
        axes = self.axes(x, chain)
        tilable = len(chain) == 1 and bool(chain[0].band_get_permutable())
        if len(chain) > 1 and (better := self.permutable(x)) is not None:
            axes, tilable = better, True
        if tilable:
            axes = [self.aligned(x, a, axes) for a in axes]
        _Nest(self, x, axes, f"n{self.nests}", parallel, tilable).plan()

    def aligned(self, x: Instance, axis: Axis, axes: Sequence[Axis]) -> Axis:
        """An independent axis that runs relative to another one, `j - i`, as the index `j` itself: operands are then seen to be reused."""
        assert isinstance(x.stmt, Store | Accumulate)
        indices = [tuple(coefficient(i, loop.var) for loop in x.loops) for i in x.stmt.indices]
        if not axis.free or axis.row in indices:
            return axis
        for other in axes:
            if other.free and tuple(a + b for a, b in zip(axis.row, other.row, strict=True)) in indices:
                total = axis.value.flat_range_product(other.value).apply_range(isl.Map("{ [a, b] -> [a + b] }"))
                return self.axis(x, total, True)
        return axis

    def axes(self, x: Instance, chain: Sequence[Any]) -> list[Axis]:
        return [
            self.axis(x, _member(node, x, d), bool(node.band_member_get_coincident(d))) for node in chain for d in range(node.band_n_member())
        ]  # fmt: skip

    def axis(self, x: Instance, value: isl.Map, free: bool) -> Axis:
        aff = isl.PwMultiAff.from_map(value).get_pw_aff(0).get_pieces()[0][1]
        row = tuple(aff.get_coefficient_val(isl.dim_type.in_, k).to_python() for k in range(len(x.loops)))
        hull = x.domain.apply(value).intersect_params(self.model.context)
        low, high = hull.dim_min_val(0), hull.dim_max_val(0)
        if not (low.is_int() and high.is_int()):
            return Axis(value, row, free, 0, UNKNOWN)
        return Axis(value, row, free, low.to_python(), high.sub(low).to_python() + 1)

    def rows(self, x: Instance) -> list[tuple[int, ...]]:
        """The coefficients of the time dimensions that are planned already."""
        if x.name not in self.result.time:
            return []
        time = isl.PwMultiAff.from_map(self.result.time[x.name])
        affs = [time.get_pw_aff(d).get_pieces()[0][1] for d in range(time.dim(isl.dim_type.out))]
        return [tuple(a.get_coefficient_val(isl.dim_type.in_, k).to_python() for k in range(len(x.loops))) for a in affs]

    def permutable(self, x: Instance) -> list[Axis] | None:
        """Axes that all may be interchanged, from the exact dependences of one statement."""
        own = isl.UnionSet.from_set(x.domain)
        d = self.dependences.intersect_domain(own).intersect_range(own)
        try:
            with limited(40_000_000):
                tree = isl_schedule(own, d, self.model.context)
        except TooHard:
            return None
        chain, below = _chain(tree)
        return self.axes(x, chain) if len(chain) == 1 and below.get_type() == _NODE.leaf and chain[0].band_get_permutable() else None

    # ------------------------------------------------------------ stencils

    def wavefront(self, node: Any, names: list[str]) -> None:
        count = node.band_n_member()
        nest = f"n{self.nests}"
        y = [f"y{d}" for d in range(count)]
        band = {n: _members(node, self.instances[n]) for n in names}
        below = node.get_child(0)
        ranks = {n: 0 for n in names}
        if below.get_type() in (_NODE.sequence, _NODE.set):
            ranks = {n: k for k in range(below.n_children()) for n in names if self.inside(below.get_child(k), n)}
        last = self.inner(band, ranks, count)
        sizes = self.tiles(names, count)
        buffers = {a.buffer for n in names for a in self.instances[n].accesses}
        extents = [self.axis(self.instances[names[0]], _member(node, self.instances[names[0]], d), False).extent for d in (0, 1)]
        steps = sum(-(-extent // size) for extent, size in zip(extents, sizes, strict=False))
        lanes = self.target.vector_bits // 8 // max(itemsize(b.dtype) for b in buffers) if last == "lanes" else 1
        shared = self.threads > 1 and self.result.work(names) // lanes >= 2 * WORK * steps
        if not shared and sum(itemsize(b.dtype) * prod(extent_of(d) for d in b.shape) for b in buffers) <= self.target.l2 // 2:
            sizes = [1 << 20] * count  # neither threads nor caches ask for tiles
        tiles = [f"floor(y{d} / {n})" for d, n in enumerate(sizes)]
        outer = isl.Map(f"{{ [{', '.join(y)}] -> [{', '.join([f'{tiles[0]} + {tiles[1]}', *tiles[1:]])}] }}")
        self.result.loops |= {f"{nest}.w": Loop(SERIAL), f"{nest}.p": Loop("parallel" if shared else SERIAL)}
        dims = [f"{nest}.w", f"{nest}.p", *(f"{nest}.t{d}" for d in range(2, count))]
        for n in names:
            self.result.add(n, band[n].apply_range(outer), dims)
        for n in names:
            if last == "diagonal":
                inner = f"{{ [{', '.join(y)}] -> [{', '.join([*y[:-2], f'{y[-2]} + {y[-1]}', str(ranks[n]), y[-2]])}] }}"
            elif last == "lanes":
                inner = f"{{ [{', '.join(y)}] -> [{', '.join([*y[:-1], str(ranks[n]), y[-1]])}] }}"
            else:
                inner = f"{{ [{', '.join(y)}] -> [{', '.join([*y, str(ranks[n])])}] }}"
            points = [f"{nest}.y{d}" for d in range(count - 1)]
            points += ["_", f"{nest}.v"] if last else [f"{nest}.y{count - 1}", "_"]
            # Gathers along a diagonal gain nothing over the scalar code, whose iterations overlap as well.
            self.result.loops[f"{nest}.v"] = Loop("vector" if last == "lanes" else SERIAL)
            self.result.add(n, band[n].apply_range(isl.Map(inner)), points)

    def tiles(self, names: Sequence[str], count: int) -> list[int]:
        """Tile sizes: time steps and rows whose data stay in the second-level cache; the innermost dimension is not cut."""
        buffers = {a.buffer for n in names for a in self.instances[n].accesses}
        widest = max(buffers, key=lambda b: prod(d for d in b.shape if isinstance(d, int)))
        row = sum(itemsize(b.dtype) * prod(d for d in b.shape[1:] if isinstance(d, int)) for b in buffers if len(b.shape) == len(widest.shape))
        if count == 2:
            return [64, 512]
        rows = max(4, min(64, self.target.l2 // 2 // max(row, 1)))
        return [max(4, rows // 2), rows, *([1 << 20] * (count - 2))]

    def inner(self, band: dict[str, isl.Map], ranks: dict[str, int], count: int) -> str:
        """How the innermost loop can run in lanes: along the last dimension, statement by statement; along a diagonal; not at all."""
        y = [f"y{d}" for d in range(count)]
        for kind, outer, lane in (("lanes", y[:-1], y[-1]), ("diagonal", [*y[:-2], f"{y[-2]} + {y[-1]}"], y[-2])):
            time = isl.UnionMap("{}")
            for n, b in band.items():
                t = isl.Map(f"{{ [{', '.join(y)}] -> [{', '.join([*outer, str(ranks[n]), lane])}] }}")
                time = time.union(isl.UnionMap.from_map(b.apply_range(t)))
            pairs = self.dependences.apply_domain(time).apply_range(time)
            fixed = ", ".join(f"a{d}" for d in range(len(outer) + 1))
            across = isl.UnionMap(f"{{ [{fixed}, l] -> [{fixed}, m] : l != m }}")
            length = len(outer) + 2
            back = isl.UnionMap.from_map(isl.Map.lex_ge(isl.Space.set_alloc(isl.DEFAULT_CONTEXT, 0, length)))
            if pairs.intersect(across).is_empty() and pairs.intersect(back).is_empty():
                return kind
        return ""


def _chain(node: Any) -> tuple[list[Any], Any]:
    """Bands directly inside each other, and what stands below."""
    chain = []
    while node.get_type() == _NODE.band:
        chain.append(node)
        node = node.get_child(0)
    return chain, node


def _has_free_band(node: Any) -> bool:
    """Whether a band below has independent iterations."""
    if node.get_type() == _NODE.band and any(node.band_member_get_coincident(d) for d in range(node.band_n_member())):
        return True
    return any(_has_free_band(node.get_child(k)) for k in range(node.n_children()))


def _has_band(node: Any) -> bool:
    return node.get_type() == _NODE.band or any(_has_band(node.get_child(k)) for k in range(node.n_children()))


def _members(node: Any, x: Instance) -> isl.Map:
    """The values of all members of a band for an instance."""
    return isl.Map.from_union_map(node.band_get_partial_schedule_union_map().intersect_domain(isl.UnionSet.from_set(x.domain)))


def _member(node: Any, x: Instance, d: int) -> isl.Map:
    whole = _members(node, x)
    count = whole.dim(isl.dim_type.out)
    return whole.project_out(isl.dim_type.out, d + 1, count - d - 1).project_out(isl.dim_type.out, 0, d)


class _Nest:
    """The plan for the loops around one statement."""

    def __init__(self, planner: _Planner, x: Instance, axes: Sequence[Axis], name: str, parallel: bool, tilable: bool) -> None:
        self.tilable = tilable  # all axes may be tiled together
        self.planner, self.x, self.axes, self.name = planner, x, list(axes), name
        self.result = planner.result
        work = prod(a.extent for a in axes)
        self.threads = 1 if parallel or work < WORK else planner.threads
        assert isinstance(x.stmt, Store | Accumulate)
        self.write = E.read(x.stmt.buffer, x.stmt.indices)
        self.reads = E.reads(x.stmt.value)
        outer = _independent([*planner.rows(x), *(a.row for a in axes)])[: -len(axes)]
        inverse = _inverse([*outer, *(a.row for a in axes)])
        self.steps = {e: [self.step(e, column) for column in inverse[len(outer) :]] for e in {self.write, *self.reads}} if inverse else None
        widest = max(itemsize(e.attr.dtype) for e in [self.write, *self.reads])
        self.lanes = planner.target.vector_bits // 8 // widest

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
        if self.steps is None:
            return self.plain()
        lane = self.lane()
        folds = [n for n, a in enumerate(self.axes) if self.steps[self.write][n] == 0]
        if lane is not None and folds and self.tilable:
            rows = [
                n for n, a in enumerate(self.axes)
                if n != lane and n not in folds and any(s[lane] and s[n] == 0 for s in self.steps.values())
            ]  # fmt: skip
            return self.contraction(lane, max(rows, key=lambda n: self.axes[n].extent, default=None), folds[-1])
        if lane is None and folds and self.tilable and any(a.free for a in self.axes):
            return self.columns(next(n for n, a in enumerate(self.axes) if a.free), folds[-1])
        if lane is None and self.x.name not in self.result.time and (cuts := self.cuts()):
            return self.cut(cuts)
        if lane is None and not folds and any(a.free for a in self.axes):
            self.planner.recurrences += self.result.work([self.x.name])
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
            cost = sum(LANE_COST.get(s[n], FAR) for s in self.steps.values())
            if cost < FAR and (best is None or cost <= best[0]):
                best = cost, n
        return best[1] if best else None

    def add(self, pieces: isl.Map, names: Sequence[str]) -> None:
        self.result.add(self.x.name, pieces, names)

    def label(self, suffix: str, role: str = SERIAL, size: int = 0) -> str:
        name = f"{self.name}.{suffix}"
        self.result.loops[name] = Loop(role, size)
        return name

    def all_axes(self, order: Sequence[int]) -> isl.Map:
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
            time = time.apply_range(isl.Map(f"{{ [{', '.join(y)}] -> [{', '.join([*y[:-1], f'floor({y[-1]} / {CHUNK})', y[-1]])}] }}"))
            names.insert(-1, self.label("yt", "parallel"))
        self.add(time, names)

    def columns(self, row: int, fold: int) -> None:
        """Several rows side by side, each with a chain of accumulations of its own; those that make no full block, one by one."""
        others = [n for n in range(len(self.axes)) if n not in (row, fold)]
        i, k = f"y{row}", f"y{fold}"
        _, block, place = self.axes[row].blocks(i, JAM)
        own, outer = [f"y{n}" for n in others], f"floor({block} / 8)"
        rows, around = self.all_axes([*others, row, fold]), []
        if (before := self.result.time.get(self.x.name)) is not None:
            rows, around = before.flat_range_product(rows), [f"t{n}" for n in range(before.dim(isl.dim_type.out))]
        head = [*around, *own]
        y = [*head, i, k]
        points = self.x.domain.intersect_params(self.planner.model.context).apply(rows)
        blocks = isl.Map(f"{{ [{', '.join(y)}] -> [{', '.join([*head, block, k, place])}] }}")
        places = points.apply(blocks)
        z = [*head, "b", "k"]
        box = isl.Map(f"{{ [{', '.join([*z, 'p'])}] -> [{', '.join([*z, 'q'])}] : 0 <= q < {JAM} }}")
        broken = places.apply(box).subtract(places).apply(isl.Map(f"{{ [{', '.join([*z, 'p'])}] -> [{', '.join(z[:-1])}] }}"))
        single = points.intersect(broken.apply(isl.Map(f"{{ [{', '.join(y)}] -> [{', '.join([*head, block])}] }}").reverse()))
        full, rest = (
            isl.Map(f"{{ [{', '.join(y)}] -> [{', '.join([*own, *tail])}] }}")
            for tail in (("0", outer, block, k, place), ("1", outer, i, k, "0"))
        )
        names = [self.label(f"y{n}") for n in others]
        names += ["_", self.label("rt", "parallel" if self.threads > 1 else SERIAL), self.label("rb"), self.label("k"), self.label("r", UNROLLED, JAM)]
        pieces = full.intersect_domain(points.subtract(single)).union(rest.intersect_domain(single))
        self.add(rows.apply_range(pieces).coalesce(), names)

    def contraction(self, lane: int, row: int | None, fold: int) -> None:
        target = self.planner.target
        others = [n for n in range(len(self.axes)) if n not in (lane, row, fold)]
        if row is None:
            return self.matrix_vector(others, lane, fold)
        tile = choose_tile(self.axes[row].extent, self.axes[lane].extent, self.lanes, target.vector_registers, 4 if self.scaled(lane) else ROWS)
        width = tile.vectors * self.lanes
        share = max(1, -(-self.axes[row].extent // self.threads))
        rows = max(1, min(96, share) // tile.rows) * tile.rows
        # The threads share the rows, or columns where rows depend on each other.
        by_rows = self.axes[row].free or self.threads == 1
        share = 1 << 40 if by_rows else -(-self.axes[lane].extent // (4 * self.threads * width)) * width
        order = [*others, row, lane, fold]
        y = [f"y{n}" for n in order]
        i, j, k = f"y{row}", f"y{lane}", f"y{fold}"
        head = [f"y{n}" for n in others] + ["ct", "it", "jt", "ib"]
        box = [
            f"{i} = {tile.rows} ib + ip and 0 <= ip < {tile.rows}", f"{rows} it <= {tile.rows} ib < {rows} it + {rows}",
            f"{j} = {width} jt + {self.lanes} v + l and 0 <= v < {tile.vectors} and 0 <= l < {self.lanes}",
            f"{share} ct <= {width} jt < {share} ct + {share}",
        ]  # fmt: skip
        coordinates = isl.Map(f"{{ [{', '.join(y)}] -> [{', '.join([*head, k, 'ip', 'v', 'l'])}] : {' and '.join(box)} }}")
        tiled = self.all_axes(order).apply_range(coordinates)
        points = self.x.domain.intersect_params(self.planner.model.context).apply(tiled)
        n = len(head) + 1
        whole = f"0 <= ip < {tile.rows} and 0 <= v < {tile.vectors} and 0 <= l < {self.lanes}"
        tiles = points.project_out(isl.dim_type.set, n, 3)
        z = [f"z{d}" for d in range(n)]
        full_box = isl.Map(f"{{ [{', '.join(z)}] -> [{', '.join([*z, 'ip', 'v', 'l'])}] : {whole} }}")
        full = tiles.subtract(tiles.apply(full_box).subtract(points).project_out(isl.dim_type.set, n, 3)).coalesce()
        later = isl.Map(f"{{ [{', '.join([*z[:-1], 'a'])}] -> [{', '.join([*z[:-1], 'b'])}] : a < b }}")
        rest = tiles.subtract(full)
        behind = rest.intersect(full.apply(later)).coalesce()
        before = rest.subtract(behind).coalesce()
        parts = []
        for number, part in enumerate((before, full, behind)):
            if not part.is_empty():
                out = [*z[:-1], str(number), z[-1], "ip", "v", "l"]
                flag = isl.Map(f"{{ [{', '.join([*z, 'ip', 'v', 'l'])}] -> [{', '.join(out)}] }}")
                parts.append(tiled.apply_range(flag.intersect_domain(part.apply(full_box))))
        stage = parts[0]
        for p in parts[1:]:
            stage = stage.union(p)
        names = [self.label(f"y{n}") for n in others]
        names += [self.label("ct", SERIAL if by_rows else "parallel"), self.label("it", "parallel" if by_rows and self.threads > 1 else SERIAL)]
        names += [self.label("jt"), self.label("ib"), "_"]
        names += [self.label("k"), self.label("r", UNROLLED, tile.rows), self.label("v", UNROLLED, tile.vectors), self.label("l", "lanes", self.lanes)]
        self.add(stage.coalesce(), names)

    def scaled(self, lane: int) -> bool:
        """Whether the factor that is the same for all lanes has to be computed, and cannot be loaded by the multiply-add itself."""
        assert self.steps is not None and isinstance(self.x.stmt, Store | Accumulate)
        value = self.x.stmt.value
        return value.op != "mul" or any(a.op != "read" and all(self.steps[r][lane] == 0 for r in E.reads(a)) for a in value.args)

    def matrix_vector(self, others: Sequence[int], lane: int, fold: int) -> None:
        """Vector lanes along the result, several accumulations into it at a time."""
        size = 4
        if self.axes[lane].extent * self.axes[fold].extent < WORK * self.lanes:
            self.threads = 1
        chunk = max(self.lanes, min(256, -(-self.axes[lane].extent // (self.threads * self.lanes)) * self.lanes))
        order = [*others, lane, fold]
        y = [f"y{n}" for n in order]
        j = f"y{lane}"
        rest, block, place = self.axes[fold].blocks(f"y{fold}", size)
        tiled = [*y[: len(others)], f"floor({j} / {chunk})", rest, block, j, place]
        names = [self.label(f"y{n}") for n in others]
        names += [self.label("jt", "parallel" if self.threads > 1 else SERIAL), "_", self.label("kb"), self.label("j", "vector"), self.label("k", UNROLLED, size)]
        self.add(self.all_axes(order).apply_range(isl.Map(f"{{ [{', '.join(y)}] -> [{', '.join(tiled)}] }}")), names)


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


# ---------------------------------------------------------------- the loops


class _Shaper:
    """Splits, vectorizes, unrolls and distributes the loops that `affine` made, as planned."""

    def __init__(self, s: Schedule, plan: Plan, target: Target) -> None:
        self.s, self.plan, self.target = s, plan, target

    def shape(self) -> None:
        for role in ("lanes", "vector", UNROLLED):
            for name, loop in list(self.s.loops.items()):
                found = self.plan.loop(name)
                if found is None or found[1].role != role or name not in self.s.loops:
                    continue
                with suppress(ScheduleError):  # a loop that cannot be shaped runs in order
                    self.apply(name, loop, found[1])

    def apply(self, name: str, loop: For, plan: Loop) -> None:
        match plan.role:
            case "unrolled":
                if loop.extent == plan.size:
                    self.s.unroll(name)
            case "lanes":
                if loop.extent == plan.size:
                    self.s.vectorize(name)
                else:
                    self.masked(name, plan.size)
            case "vector":
                self.vectorize(name)

    def vectorize(self, name: str) -> None:
        lanes = self.lanes(name)
        before = self.s.copy()
        try:
            if self.s.loops[name].extent == lanes:
                return self.s.vectorize(name)
            _, inner, rest = self.s.split(name, lanes, "peel")
            self.s.vectorize(inner)
        except ScheduleError:
            self.s.kernel, self.s.trace = before.kernel, before.trace
            raise
        self.masked(rest, lanes)

    def masked(self, name: str, lanes: int) -> None:
        before = self.s.copy()
        try:
            _, inner = self.s.split(name, lanes)
            self.s.vectorize(inner)
        except ScheduleError:
            self.s.kernel, self.s.trace = before.kernel, before.trace
            raise

    def lanes(self, name: str) -> int:
        sizes = [itemsize(b.dtype) for x in walk(self.s.loops[name].body) for b in _touched(x)]
        return self.target.vector_bits // 8 // max(sizes)


def _touched(x: Any) -> list[Any]:
    written = [x.buffer] if isinstance(x, Store | Accumulate) else []
    return [*written, *(r.attr for r in E.reads(x.value))] if written else []
