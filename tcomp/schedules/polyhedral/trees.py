"""isl's schedule trees: the dependences that they are computed from, and what can be read off their bands."""

from __future__ import annotations

from typing import Any

import islpy as isl

from tcomp.ir.polyhedral.model import READ, REDUCE, WRITE, Instance, Model

LARGEST_OFFSET = 4  # iterations between dependent instances that may matter to a schedule; larger constants are sizes
NODE = isl.schedule_node_type


def flow(m: Model) -> isl.UnionMap:
    """Dependences without those that follow from others: every access depends on the last write (and a write on the reads since)."""
    union = isl.UnionMap
    reads, writes, certain, order = (union("{}") for _ in range(4))
    for x in m.instances:
        order = order.union(union.from_map(x.order))
        for a in x.accesses:
            relation = union.from_map(a.relation)
            if a.kind in (READ, REDUCE):
                reads = reads.union(relation)
            if a.kind in (WRITE, REDUCE):
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
                if c.is_equality() or abs(c.get_constant_val().to_python()) <= LARGEST_OFFSET:
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


def nested(node: Any) -> tuple[list[Any], Any]:
    """Bands directly inside each other, and what stands below."""
    chain = []
    while node.get_type() == NODE.band:
        chain.append(node)
        node = node.get_child(0)
    return chain, node


def has_free_band(node: Any) -> bool:
    """Whether a band below has independent iterations."""
    if node.get_type() == NODE.band and any(node.band_member_get_coincident(d) for d in range(node.band_n_member())):
        return True
    return any(has_free_band(node.get_child(k)) for k in range(node.n_children()))


def has_band(node: Any) -> bool:
    """Whether a node of the tree is a band."""
    return node.get_type() == NODE.band or any(has_band(node.get_child(k)) for k in range(node.n_children()))


def holds(node: Any, x: Instance) -> bool:
    """Whether a filter lets an instance through."""
    return not node.filter_get_filter().intersect(isl.UnionSet.from_set(x.domain)).is_empty()


def members(node: Any, x: Instance) -> isl.Map:
    """The values of all members of a band for an instance."""
    return isl.Map.from_union_map(node.band_get_partial_schedule_union_map().intersect_domain(isl.UnionSet.from_set(x.domain)))


def member(node: Any, x: Instance, d: int) -> isl.Map:
    """The values of one member."""
    return component(members(node, x), d)


def component(band: isl.Map, d: int) -> isl.Map:
    """One dimension of what a band maps to."""
    count = band.dim(isl.dim_type.out)
    return band.project_out(isl.dim_type.out, d + 1, count - d - 1).project_out(isl.dim_type.out, 0, d)
