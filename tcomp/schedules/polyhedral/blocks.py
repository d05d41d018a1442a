"""Steps in blocks: programs that update a whole matrix at every step of an outer loop, like factorisations in place.

Step k of LU or Cholesky decomposition finishes row and column k and subtracts their product from everything behind them, so that the
matrix passes through the caches at every step. Here the steps run in blocks. Within a block only those elements are kept up to date that
some of its steps read or complete, the *panel*; all others are updated afterwards, by the sum over the block: a contraction.

Source: E. Anderson et al., "LAPACK Users' Guide" (1999), the right-looking blocked algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import islpy as isl

from tcomp.ir.loops import Block, For, If, Stmt
from tcomp.ir.polyhedral.model import REDUCE, Instance, Model, map_of
from tcomp.schedules.polyhedral.bands import NODE, holds, member
from tcomp.schedules.polyhedral.plan import Plan, axis
from tcomp.schedules.schedule import Schedule

BLOCK_STEPS = 64  # in a block: sums so long hide the loads and stores of the tile they go to, and a panel stays in the second-level cache
MIN_BLOCKS = 4  # blocks for which it is worth it
BLOCK_LOOP = "block"


def in_blocks(s: Schedule, m: Model, tree: Any) -> list[str]:
    """Applies the order in blocks: within each iteration of the loop `block` the panel first, then each statement's part of the update.
    Returns the nests inside of it; none, and changes nothing, for other programs.

    Raises `ScheduleError` where the order would be wrong.
    """
    instances = {x.name: x for x in m.instances}
    if m.parameters or tree.get_type() != NODE.band or tree.band_member_get_coincident(0):
        return []  # with sizes that are not known, isl takes minutes
    steps = {n: member(tree, x, 0).intersect_domain(x.domain) for n, x in instances.items()}
    updates = {n: a.relation for n, x in instances.items() for a in x.accesses if a.kind == REDUCE and _repeats(a.relation, steps[n])}
    if not updates or min(axis(instances[n], steps[n], False, m.context).extent for n in updates) < MIN_BLOCKS * BLOCK_STEPS:
        return []
    number = {n: step.apply_range(map_of("t", [f"floor(t / {BLOCK_STEPS})"])) for n, step in steps.items()}
    panel = isl.UnionMap("{}")  # the block, and the elements that its steps read or complete
    for n, relation in ((n, a.relation) for n, x in instances.items() for a in x.accesses if a.kind != REDUCE or n not in updates):
        panel = panel.union(isl.UnionMap.from_map(number[n].reverse().apply_range(relation)))
    panel = panel.coalesce()
    parts = [(n, number[n], 0) for n in instances if n not in updates]
    for n, element in updates.items():
        at_once = isl.Map.from_union_map(isl.UnionMap.from_map(element).apply_range(panel.reverse()))
        parts.append((n, number[n].intersect(at_once).coalesce(), 0))
        for piece in number[n].subtract(at_once).coalesce().make_disjoint().get_basic_maps():
            parts.append((n, isl.Map.from_basic_map(piece), 1 + sum(place > 0 for _, _, place in parts)))
    if not any(place for _, _, place in parts):
        return []
    plan = _times(tree, instances, m.context)
    longest = max(map(len, plan.names.values()))
    order = isl.UnionMap("{}")
    for n, when, place in parts:
        own = [f"t{d}" for d in range(len(plan.names[n]))]
        time = ["b", str(place), *own, *["0"] * (longest - len(own))]
        placed = when.flat_range_product(plan.time[n].intersect_domain(instances[n].domain)).apply_range(map_of(["b", *own], time))
        order = order.union(isl.UnionMap.from_map(placed))
    naming = "; ".join(f"{n}: {' '.join([BLOCK_LOOP, '_', *own, *['_'] * (longest - len(own))])}" for n, own in plan.names.items())
    made = s.affine(None, str(order.coalesce()), naming)
    block = next(loop for loop, name in made.items() if name == BLOCK_LOOP)
    return [nest.var.name for nest in _nests(s.loops[block].body)]


def _repeats(element: isl.Map, step: isl.Map) -> bool:
    """Whether a statement accumulates into the same element at different steps."""
    return bool(not element.apply_range(element.reverse()).subtract(step.apply_range(step.reverse())).is_empty())


def _times(tree: Any, instances: dict[str, Instance], context: isl.Set) -> Plan:
    plan = Plan(instances, context)

    def visit(node: Any, inside: list[str], depth: int) -> None:
        match node.get_type():
            case NODE.sequence | NODE.set:
                for position in range(node.n_children()):
                    child = node.get_child(position)
                    part = [n for n in inside if holds(child, instances[n])]
                    plan.place(part, position)
                    visit(child.get_child(0), part, depth)
            case NODE.band:
                for d in range(node.band_n_member()):
                    for n in inside:
                        plan.add(n, member(node, instances[n], d), [f"l{depth + d}"])
                visit(node.get_child(0), inside, depth + node.band_n_member())

    visit(tree, list(instances), 0)
    return plan


def _nests(stmt: Stmt) -> Iterator[For]:
    match stmt:
        case For():
            yield stmt
        case Block(stmts):
            for x in stmts:
                yield from _nests(x)
        case If(_, then, None):
            yield from _nests(then)
