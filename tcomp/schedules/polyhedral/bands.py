"""From isl's tree of bands to a plan: where statements stand, which bands are wavefronts, and which are the nest of one statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import islpy as isl

from tcomp.ir.access import coefficient
from tcomp.ir.loops import SERIAL, UNROLLED, Accumulate, Store
from tcomp.ir.polyhedral.model import READ, REDUCE, WRITE, Instance, Model, TooHard, limited, map_of
from tcomp.schedules.polyhedral.nests import Nest, wavefront
from tcomp.schedules.polyhedral.plan import JAM, Axis, Loop, Plan, axis, component, union
from tcomp.target import CpuTarget

WALK_LIMIT = 400_000_000  # isl's operations (some seconds) for dependences, and for the shapes of all nests
RELAXED_LIMIT = 60_000_000  # isl's operations (about a second) for a schedule of relaxed dependences
EXACT_LIMIT = 200_000_000  # isl's operations (some seconds) for one of all dependences
NEST_LIMIT = 40_000_000  # isl's operations (less than a second) for another schedule of one statement
MAX_OFFSET = 4  # iterations between dependent instances that may matter to a schedule; larger constants are sizes
NODE = isl.schedule_node_type


class Planner:
    """Turns isl's tree of bands into a plan; `threads` and the target say for which machine."""

    def __init__(self, m: Model, target: CpuTarget, threads: int) -> None:
        self.model, self.target, self.threads = m, target, threads
        self.instances = {x.name: x for x in m.instances}
        self.result, self.nests, self.fused = Plan(self.instances, m.context), 0, False
        with limited(WALK_LIMIT):
            self.dependences = flow(m)
        self.trees: dict[bool, Any] = {}

    def plan(self, fused: bool | None = None) -> Plan:
        """The plan; statements share loops as `fused` says, or where many chains of dependent iterations would then run side by side."""
        self.result, self.nests, self.fused = Plan(self.instances, self.model.context), 0, bool(fused)
        tree = self.tree(self.fused)
        with limited(WALK_LIMIT):
            for band, names in placed_bands(self.result, tree, list(self.instances)):
                self.band(band, names, False)
        return self.plan(True) if fused is None and 2 * self.result.recurrences > self.result.work() else self.result

    def tree(self, fused: bool = False) -> Any:
        """isl's tree of bands."""
        if fused not in self.trees:
            domain = reduce(isl.UnionSet.union, (isl.UnionSet.from_set(x.domain) for x in self.model.instances), isl.UnionSet("{}"))
            try:
                with limited(RELAXED_LIMIT):
                    self.trees[fused] = isl_schedule(domain, relaxed(self.dependences), self.model.context, fused)
            except TooHard:
                with limited(EXACT_LIMIT):
                    self.trees[fused] = isl_schedule(domain, self.dependences, self.model.context, fused)
        return self.trees[fused]

    def band(self, node: Any, names: list[str], parallel: bool) -> None:
        """Plan a band: as a wavefront, as the nest of one statement, or as loops that several statements share. One of these may be
        *jammed* (unroll-and-jam): `JAM` of its independent iterations run innermost, where the body would otherwise be one dependent
        chain."""
        chain, below = nested(node)
        self.nests += 1
        nest, free, inner = f"n{self.nests}", _free(node), [*_bands(node.get_child(0))]
        values = {n: members(node, self.instances[n]) for n in names}
        if len(free) >= 2 and not any(free) and node.band_get_permutable() and not parallel and not inner:
            # No member of the band is independent, but all of them can be tiled.
            places = enumerate(_children(node.get_child(0)))
            ranks = dict.fromkeys(names, 0) | {n: k for k, child in places for n in names if holds(child, self.instances[n])}
            return wavefront(self.result, values, ranks, self.dependences, nest, self.target, self.threads)
        if len(names) == 1 and below.get_type() == NODE.leaf:
            return self.nest(self.instances[names[0]], chain, parallel)
        jammed = next((d for d, f in enumerate(free) if f), None) if self.fused and not any(any(_free(b)) for b in inner) else None
        for d, independent in enumerate(free):
            name = f"{nest}.b{d}"
            use = independent and not parallel and self.threads > 1
            self.result.loops[name] = Loop("parallel" if use else SERIAL)
            parallel = parallel or use
            if d == jammed:
                axes = [axis(self.instances[n], component(values[n], d), True, self.model.context) for n in names]
                low = min(a.low for a in axes)
                extent = max(a.low + a.extent for a in axes) - low
                rest, block, place = replace(axes[0], low=low, extent=extent).blocks("y", JAM)
            for n in names:
                value = component(values[n], d)
                if d == jammed:
                    self.result.add(n, value.apply_range(map_of("y", [rest, block])), ["_", name])
                else:
                    self.result.add(n, value, [name])
        for band, own in placed_bands(self.result, node.get_child(0), names):
            self.band(band, own, parallel)
        if jammed is not None:
            self.result.loops[f"{nest}.u"] = Loop(UNROLLED, JAM)
            for n in names:
                self.result.add(n, component(values[n], jammed).apply_range(map_of("y", [place])), [f"{nest}.u"])

    def nest(self, x: Instance, chain: Sequence[Any], parallel: bool) -> None:
        """Plan the nest of one statement."""
        axes = self.axes(x, chain)
        tilable = len(chain) == 1 and bool(chain[0].band_get_permutable())
        if len(chain) > 1 and (better := self.permutable(x)) is not None:
            axes, tilable = better, True
        if tilable:
            axes = [self.aligned(x, a, axes) for a in axes]
        Nest(self.result, x, axes, f"n{self.nests}", self.target, 1 if parallel else self.threads, tilable).plan()

    def aligned(self, x: Instance, own: Axis, axes: Sequence[Axis]) -> Axis:
        """An independent axis that runs relative to another one, `j - i`, as the index `j` itself: operands are then seen to be reused."""
        assert isinstance(x.stmt, Store | Accumulate)
        indices = [tuple(coefficient(i, loop.var) for loop in x.loops) for i in x.stmt.indices]
        for other in axes if own.free and own.row not in indices else ():
            if other.free and tuple(a + b for a, b in zip(own.row, other.row, strict=True)) in indices:
                total = own.value.flat_range_product(other.value).apply_range(map_of("ab", ["a + b"]))
                return axis(x, total, True, self.model.context)
        return own

    def axes(self, x: Instance, chain: Sequence[Any]) -> list[Axis]:
        """The axes of bands, for one statement."""
        return [axis(x, member(node, x, d), free, self.model.context) for node in chain for d, free in enumerate(_free(node))]

    def permutable(self, x: Instance) -> list[Axis] | None:
        """Axes that all may be interchanged, from the exact dependences of one statement."""
        own = isl.UnionSet.from_set(x.domain)
        d = self.dependences.intersect_domain(own).intersect_range(own)
        try:
            with limited(NEST_LIMIT):
                tree = isl_schedule(own, d, self.model.context)
        except TooHard:
            return None
        chain, below = nested(tree)
        return self.axes(x, chain) if len(chain) == 1 and below.get_type() == NODE.leaf and chain[0].band_get_permutable() else None


def placed_bands(plan: Plan, node: Any, names: list[str]) -> Iterator[tuple[Any, list[str]]]:
    """The outermost bands below a node of the tree, each with those of the statements `names` that are in it, placed as the sequences
    around it say."""
    if node.get_type() == NODE.band:
        yield node, names
    elif node.get_type() in (NODE.sequence, NODE.set):
        for position, child in enumerate(_children(node)):
            inside = [n for n in names if holds(child, plan.instances[n])]
            plan.place(inside, position)
            yield from placed_bands(plan, child.get_child(0), inside)


def flow(m: Model) -> isl.UnionMap:
    """Dependences without those that follow from others: every access depends on the last write (and a write on the reads since)."""
    accesses = [(a, a.exact and x.exact) for x in m.instances for a in x.accesses]
    reads = union(a.relation for a, _ in accesses if a.kind in (READ, REDUCE)).coalesce()
    writes = union(a.relation for a, _ in accesses if a.kind in (WRITE, REDUCE)).coalesce()
    certain = union(a.relation for a, exact in accesses if a.kind in (WRITE, REDUCE) and exact).coalesce()
    order = union(x.order for x in m.instances)
    possible = writes.subtract(certain)

    def last(sink: isl.UnionMap, may: isl.UnionMap) -> isl.UnionMap:
        access = isl.UnionAccessInfo.from_sink(sink).set_must_source(certain).set_may_source(may).set_schedule_map(order)
        return access.compute_flow().get_may_dependence()

    return last(writes, reads.union(possible)).union(last(reads, possible)).coalesce()


def relaxed(dependences: isl.UnionMap) -> isl.UnionMap:
    """More dependences, in fewer and smaller constraints: those that mention sizes are dropped. isl's linear programs take time with the
    magnitude of their numbers, and a good schedule does not depend on the sizes."""
    maps, result = dependences.get_map_list(), list[isl.Map]()
    for n in range(maps.n_map()):
        for piece in maps.get_at(n).remove_divs().coalesce().get_basic_maps():
            constraints = piece.remove_redundancies().get_constraints()
            kept = (c for c in constraints if c.is_equality() or abs(c.get_constant_val().to_python()) <= MAX_OFFSET)
            result.append(isl.Map.from_basic_map(reduce(isl.BasicMap.add_constraint, kept, isl.BasicMap.universe(piece.get_space()))))
    return union(result).coalesce()


def isl_schedule(domain: isl.UnionSet, dependences: isl.UnionMap, context: isl.Set, fused: bool = False) -> Any:
    """The schedule tree for a domain; unless `fused`, statements share loops only where dependences require it."""
    constraints = isl.ScheduleConstraints.on_domain(domain).set_validity(dependences).set_coincidence(dependences)
    constraints = constraints.set_context(context).set_proximity(dependences)
    isl.DEFAULT_CONTEXT.set_schedule_serialize_sccs(0 if fused else 1)
    try:
        return constraints.compute_schedule().get_root().get_child(0)
    finally:
        isl.DEFAULT_CONTEXT.set_schedule_serialize_sccs(0)


def nested(node: Any) -> tuple[list[Any], Any]:
    """Bands directly inside each other, and the node below the innermost."""
    chain = []
    while node.get_type() == NODE.band:
        chain.append(node)
        node = node.get_child(0)
    return chain, node


def holds(node: Any, x: Instance) -> bool:
    """Whether a filter lets an instance through."""
    return not node.filter_get_filter().intersect(isl.UnionSet.from_set(x.domain)).is_empty()


def members(node: Any, x: Instance) -> isl.Map:
    """The values of all members of a band for an instance."""
    return isl.Map.from_union_map(node.band_get_partial_schedule_union_map().intersect_domain(isl.UnionSet.from_set(x.domain)))


def member(node: Any, x: Instance, d: int) -> isl.Map:
    """The values of one member."""
    return component(members(node, x), d)


def _children(node: Any) -> list[Any]:
    return [node.get_child(k) for k in range(node.n_children())]


def _bands(node: Any) -> Iterator[Any]:
    if node.get_type() == NODE.band:
        yield node
    for child in _children(node):
        yield from _bands(child)


def _free(band: Any) -> list[bool]:
    """Whether the iterations of each member are independent."""
    return [bool(band.band_member_get_coincident(d)) for d in range(band.band_n_member())]
