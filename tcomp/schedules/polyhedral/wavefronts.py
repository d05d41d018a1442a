"""Stencils in time: all loops of a band depend on each other, but its tiles run in parallel along a diagonal."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import islpy as isl

from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import SERIAL, Buffer
from tcomp.ir.polyhedral.model import map_of
from tcomp.schedules.analysis.access_patterns import extent_of
from tcomp.schedules.polyhedral.plan import Loop, Plan, axis, worth_threads
from tcomp.schedules.polyhedral.trees import component
from tcomp.target import CpuTarget


def wavefront(
    plan: Plan, band: Mapping[str, isl.Map], ranks: Mapping[str, int], dependences: isl.UnionMap, nest: str, target: CpuTarget, threads: int
) -> None:
    """Adds the time dimensions of a band of statements: tiles along a diagonal, and what is inside of one. `ranks` are the places of the
    statements in an iteration of the band, `nest` is what its loops are called after."""
    count = next(iter(band.values())).dim(isl.dim_type.out)
    y = [f"y{d}" for d in range(count)]
    last = _inner(band, ranks, count, dependences)
    buffers = {a.buffer for n in band for a in plan.instances[n].accesses}
    sizes = _tiles(buffers, count, target)
    name, first = next(iter(band.items()))
    extents = [axis(plan.instances[name], component(first, d), False, plan.context).extent for d in (0, 1)]
    steps = sum(-(-extent // size) for extent, size in zip(extents, sizes, strict=False))
    lanes = target.vector_bits // 8 // max(itemsize(b.dtype) for b in buffers) if last == "lanes" else 1
    shared = threads > 1 and worth_threads(plan.work(list(band)) // (2 * lanes * steps))
    if not shared and sum(itemsize(b.dtype) * prod(extent_of(d) for d in b.shape) for b in buffers) <= target.l2 // 2:
        sizes = [1 << 20] * count  # neither threads nor caches ask for tiles
    tiles = [f"floor(y{d} / {n})" for d, n in enumerate(sizes)]
    outer = map_of(y, [f"{tiles[0]} + {tiles[1]}", *tiles[1:]])
    plan.loops |= {f"{nest}.w": Loop(SERIAL), f"{nest}.p": Loop("parallel" if shared else SERIAL)}
    dims = [f"{nest}.w", f"{nest}.p", *(f"{nest}.t{d}" for d in range(2, count))]
    for n in band:
        plan.add(n, band[n].apply_range(outer), dims)
    for n in band:
        place = str(ranks[n])
        if last == "diagonal":
            inner = [*y[:-2], f"{y[-2]} + {y[-1]}", place, y[-2]]
        elif last == "lanes":
            inner = [*y[:-1], place, y[-1]]
        else:
            inner = [*y, place]
        points = [f"{nest}.y{d}" for d in range(count - 1)]
        points += ["_", f"{nest}.v"] if last else [f"{nest}.y{count - 1}", "_"]
        # Gathers along a diagonal gain nothing over the scalar code, whose iterations overlap as well.
        plan.loops[f"{nest}.v"] = Loop("vector" if last == "lanes" else SERIAL)
        plan.add(n, band[n].apply_range(map_of(y, inner)), points)


def _tiles(buffers: Collection[Buffer], count: int, target: CpuTarget) -> list[int]:
    """Tile sizes: time steps and rows whose data stay in the second-level cache; the innermost dimension is not cut."""
    widest = max(buffers, key=lambda b: prod(d for d in b.shape if isinstance(d, int)))
    row = sum(itemsize(b.dtype) * prod(d for d in b.shape[1:] if isinstance(d, int)) for b in buffers if len(b.shape) == len(widest.shape))
    if count == 2:
        return [64, 512]
    rows = max(4, min(64, target.l2 // 2 // max(row, 1)))
    return [max(4, rows // 2), rows, *([1 << 20] * (count - 2))]


def _inner(band: Mapping[str, isl.Map], ranks: Mapping[str, int], count: int, dependences: isl.UnionMap) -> str:
    """How the innermost loop can run in lanes: along the last dimension, statement by statement; along a diagonal; not at all."""
    y = [f"y{d}" for d in range(count)]
    for kind, outer, lane in (("lanes", y[:-1], y[-1]), ("diagonal", [*y[:-2], f"{y[-2]} + {y[-1]}"], y[-2])):
        time = isl.UnionMap("{}")
        for n, b in band.items():
            time = time.union(isl.UnionMap.from_map(b.apply_range(map_of(y, [*outer, str(ranks[n]), lane]))))
        pairs = dependences.apply_domain(time).apply_range(time)
        fixed = ", ".join(f"a{d}" for d in range(len(outer) + 1))
        across = isl.UnionMap(f"{{ [{fixed}, l] -> [{fixed}, m] : l != m }}")
        length = len(outer) + 2
        back = isl.UnionMap.from_map(isl.Map.lex_ge(isl.Space.set_alloc(isl.DEFAULT_CONTEXT, 0, length)))
        if pairs.intersect(across).is_empty() and pairs.intersect(back).is_empty():
            return kind
    return ""
