"""From isl's tree of bands to a plan: where statements stand, which bands are wavefronts, and which are the nest of one statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import islpy as isl

from tcomp.ir.access import coefficient
from tcomp.ir.loops import SERIAL, UNROLLED, Accumulate, Store
from tcomp.ir.polyhedral.model import Instance, Model, TooHard, limited, map_of
from tcomp.schedules.polyhedral.nests import Nest
from tcomp.schedules.polyhedral.plan import JAM, Axis, Loop, Plan, axis
from tcomp.schedules.polyhedral.trees import NODE, flow, has_band, has_free_band, holds, isl_schedule, member, members, nested, relaxed
from tcomp.schedules.polyhedral.wavefronts import wavefront
from tcomp.target import CpuTarget


class Planner:
    """Turns isl's tree of bands into a plan; `threads` and the target say for which machine."""

    def __init__(self, m: Model, target: CpuTarget, threads: int) -> None:
        self.model, self.target, self.threads = m, target, threads
        self.instances = {x.name: x for x in m.instances}
        self.result, self.nests, self.fused = Plan(self.instances, m.context), 0, False
        with limited(400_000_000):
            self.dependences = flow(m)
        self.trees: dict[bool, Any] = {}

    def plan(self, fused: bool | None = None) -> Plan:
        """The plan; statements share loops as `fused` says, or where chains of dependent iterations would profit from it."""
        self.build(bool(fused))
        if 2 * self.result.recurrences > self.result.work() and fused is None:
            self.build(True)
        return self.result

    def build(self, fused: bool) -> None:
        """The plan from the tree of all instances. `fused`: statements share loops where they can, which chains of dependent iterations
        profit from: many of them side by side."""
        self.result, self.nests, self.fused = Plan(self.instances, self.model.context), 0, fused
        tree = self.tree(fused)
        with limited(400_000_000):
            self.visit(tree, list(self.instances), False)

    def tree(self, fused: bool = False) -> Any:
        """isl's tree of bands."""
        if fused not in self.trees:
            self.trees[fused] = self._tree(fused)
        return self.trees[fused]

    def _tree(self, fused: bool) -> Any:
        domain = isl.UnionSet("{}")
        for x in self.model.instances:
            domain = domain.union(isl.UnionSet.from_set(x.domain))
        try:
            with limited(60_000_000):
                return isl_schedule(domain, relaxed(self.dependences), self.model.context, fused)
        except TooHard:
            with limited(200_000_000):
                return isl_schedule(domain, self.dependences, self.model.context, fused)

    # ------------------------------------------------------------ the tree

    def visit(self, node: Any, names: list[str], parallel: bool) -> None:
        """Plan what stands below a node of the tree."""
        match node.get_type():
            case NODE.sequence | NODE.set:
                for position in range(node.n_children()):
                    child = node.get_child(position)
                    inside = [n for n in names if holds(child, self.instances[n])]
                    self.result.place(inside, position)
                    self.visit(child.get_child(0), inside, parallel)
            case NODE.filter:
                self.visit(node.get_child(0), names, parallel)
            case NODE.band:
                self.band(node, names, parallel)

    def band(self, node: Any, names: list[str], parallel: bool) -> None:
        """A band is a wavefront, the nest of one statement, or loops that several share; of these one may be *jammed*: `JAM` of its
        independent iterations run side by side, innermost, where what stands inside would otherwise be one chain."""
        chain, below = nested(node)
        self.nests += 1
        free = [bool(node.band_member_get_coincident(d)) for d in range(node.band_n_member())]
        if len(free) >= 2 and not any(free) and node.band_get_permutable() and not parallel and not has_band(node.get_child(0)):
            return self.wavefront(node, names)
        if len(names) == 1 and below.get_type() == NODE.leaf:
            return self.nest(self.instances[names[0]], chain, parallel)
        jammed = next((d for d, f in enumerate(free) if f), None) if self.fused and not has_free_band(node.get_child(0)) else None
        nest = f"n{self.nests}"
        for d, independent in enumerate(free):
            name = f"{nest}.b{d}"
            use = independent and not parallel and self.threads > 1
            self.result.loops[name] = Loop("parallel" if use else SERIAL)
            parallel = parallel or use
            if d == jammed:
                axes = [axis(self.instances[n], member(node, self.instances[n], d), True, self.model.context) for n in names]
                low = min(a.low for a in axes)
                extent = max(a.low + a.extent for a in axes) - low
                rest, block, place = replace(axes[0], low=low, extent=extent).blocks("y", JAM)
            for n in names:
                value = member(node, self.instances[n], d)
                if d == jammed:
                    self.result.add(n, value.apply_range(map_of("y", [rest, block])), ["_", name])
                else:
                    self.result.add(n, value, [name])
        self.visit(node.get_child(0), names, parallel)
        if jammed is not None:
            self.result.loops[f"{nest}.u"] = Loop(UNROLLED, JAM)
            for n in names:
                self.result.add(n, member(node, self.instances[n], jammed).apply_range(map_of("y", [place])), [f"{nest}.u"])

    # ------------------------------------------------------------ one statement

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
        if not own.free or own.row in indices:
            return own
        for other in axes:
            if other.free and tuple(a + b for a, b in zip(own.row, other.row, strict=True)) in indices:
                total = own.value.flat_range_product(other.value).apply_range(map_of("ab", ["a + b"]))
                return axis(x, total, True, self.model.context)
        return own

    def axes(self, x: Instance, chain: Sequence[Any]) -> list[Axis]:
        """The axes of a band, for one statement."""
        places = [(node, d) for node in chain for d in range(node.band_n_member())]
        return [axis(x, member(node, x, d), bool(node.band_member_get_coincident(d)), self.model.context) for node, d in places]

    def permutable(self, x: Instance) -> list[Axis] | None:
        """Axes that all may be interchanged, from the exact dependences of one statement."""
        own = isl.UnionSet.from_set(x.domain)
        d = self.dependences.intersect_domain(own).intersect_range(own)
        try:
            with limited(40_000_000):
                tree = isl_schedule(own, d, self.model.context)
        except TooHard:
            return None
        chain, below = nested(tree)
        return self.axes(x, chain) if len(chain) == 1 and below.get_type() == NODE.leaf and chain[0].band_get_permutable() else None

    def wavefront(self, node: Any, names: list[str]) -> None:
        """No member of a band is independent, but all of them can be tiled."""
        band = {n: members(node, self.instances[n]) for n in names}
        below = node.get_child(0)
        ranks = {n: 0 for n in names}
        if below.get_type() in (NODE.sequence, NODE.set):
            ranks = {n: k for k in range(below.n_children()) for n in names if holds(below.get_child(k), self.instances[n])}
        wavefront(self.result, band, ranks, self.dependences, f"n{self.nests}", self.target, self.threads)
