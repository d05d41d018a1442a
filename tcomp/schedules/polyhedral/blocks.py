"""Steps in blocks: programs that update a whole matrix at every step of an outer loop, like factorisations in place.

Step k of LU or Cholesky decomposition finishes row and column k and subtracts their product from everything behind them, so that the
matrix passes through the caches at every step. Here the steps run in blocks. Within a block only those elements are kept up to date that
some of its steps read or complete, the *panel*; all others are updated afterwards, by the sum over the block: a contraction.

Source: E. Anderson et al., "LAPACK Users' Guide" (1999), the right-looking blocked algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import islpy as isl

from tcomp.ir.loops import Block, For, If, Stmt, children
from tcomp.ir.polyhedral.model import REDUCE, Instance, Model, map_of
from tcomp.schedules.polyhedral.bands import NODE, member, placed_bands
from tcomp.schedules.polyhedral.plan import Plan, axis, union
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
    sums = ((n, a.relation, steps[n]) for n, x in instances.items() for a in x.accesses if a.kind == REDUCE)
    # Those that accumulate into the same element at different steps.
    updates = {n: e for n, e, t in sums if not e.apply_range(e.reverse()).subtract(t.apply_range(t.reverse())).is_empty()}
    if not updates or min(axis(instances[n], steps[n], False, m.context).extent for n in updates) < MIN_BLOCKS * BLOCK_STEPS:
        return []
    number = {n: step.apply_range(map_of("t", [f"floor(t / {BLOCK_STEPS})"])) for n, step in steps.items()}
    completed = ((n, a.relation) for n, x in instances.items() for a in x.accesses if a.kind != REDUCE or n not in updates)
    panel = union(number[n].reverse().apply_range(e) for n, e in completed).coalesce()  # from blocks to what their steps read or complete
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
    placed = list[isl.Map]()
    for n, when, place in parts:
        own = [f"t{d}" for d in range(len(plan.names[n]))]
        time = map_of(["b", *own], ["b", str(place), *own, *["0"] * (longest - len(own))])
        placed.append(when.flat_range_product(plan.time[n].intersect_domain(instances[n].domain)).apply_range(time))
    naming = "; ".join(f"{n}: {' '.join([BLOCK_LOOP, '_', *own, *['_'] * (longest - len(own))])}" for n, own in plan.names.items())
    made = s.affine(None, str(union(placed).coalesce()), naming)
    block = next(loop for loop, name in made.items() if name == BLOCK_LOOP)
    return [nest.var.name for nest in _nests(s.loops[block].body)]


def _times(tree: Any, instances: dict[str, Instance], context: isl.Set) -> Plan:
    plan = Plan(instances, context)

    def add(node: Any, names: list[str], depth: int) -> None:
        for band, own in placed_bands(plan, node, names):
            for d, n in product(range(band.band_n_member()), own):
                plan.add(n, member(band, instances[n], d), [f"l{depth + d}"])
            add(band.get_child(0), own, depth + band.band_n_member())

    add(tree, list(instances), 0)
    return plan


def _nests(stmt: Stmt) -> Iterator[For]:
    match stmt:
        case For():
            yield stmt
        case Block() | If(otherwise=None):
            for x in children(stmt):
                yield from _nests(x)
