"""Overlapped tiles for chains of stencils: pipelines whose stages read windows of each other (image filters, time steps written out).

A tile of the results is computed together with all that it needs of the stages before, which stays in the cache; what lies in the windows
of neighbouring tiles is computed by each of them, so that tiles run in parallel (S. Krishnamoorthy et al., "Effective automatic
parallelization of stencil computations", 2007; J. Ragan-Kelley et al., "Halide", 2013). Sizes follow from the accesses, from a count of
what is computed twice and from the caches; `compute_at` proves every move. A chain is recognised by its accesses: stages that write each
element in one place, `S[y, x]`, and read each other at `[y + c, x + c]`, clamped to the edges or not, or in a small reduced window; at
least one at several places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, inf, prod

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.access import Affine, affine
from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import STACK_LIMIT, Accumulate, Kernel, Store, walk
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, iterations, nests, result_nest, stage_axes
from tcomp.schedules.cpu.common import extent, lanes_of, partition_tails, size, threads, vector_tail, whole_tiles
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.schedules.tiles import unroll
from tcomp.target import CpuTarget

MIN_ELEMENTS = 1 << 16  # of all stages: fewer stay in the cache without tiles
MAX_WINDOW = 64  # elements of a window that is reduced: of a larger one, tiles share too little
MAX_UNROLLED = 32  # elements of a window in straight-line code: bounds its length
HEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)  # elements of tiles on offer, in all dimensions but the last
WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # vectors of tiles on offer, in the last dimension
ROW_START = 2  # vectors that might be computed while a row of a tile begins and ends (an estimate)
CACHE_SHARE = 2  # all stages of a tile take at most 1 / CACHE_SHARE of the second-level cache: inputs and results pass through it


@dataclass(frozen=True, slots=True)
class Reach:
    """The part of one dimension of a stage that a tile needs: where the tile has `size` elements from `i` along dimension `dim` of the
    results, those from `i * step + low` to `(i + size - 1) * step + high`."""

    dim: int
    step: int = 1
    low: int = 0
    high: int = 0

    def extent(self, tile: Sequence[int]) -> int:
        """Elements from the lowest to the highest that are read."""
        return (tile[self.dim] - 1) * self.step + self.high - self.low + 1


Box = tuple[Reach, ...]


@dataclass(slots=True)
class Chain:
    """Results of one shape, in the order of the program, and the stages that only they need, each with the part that a tile needs. Of a
    result, others in the chain may need the element at their own place."""

    shape: tuple[E.Dim, ...]
    results: list[str]
    needs: dict[str, Box]


def chains(kernel: Kernel) -> list[Chain]:
    """The chains of stencils of a kernel that are worth tiles."""
    stages, outputs = _stages(kernel), {b.name for b in kernel.outputs}
    homes: dict[str, Chain] = {}
    for name, stage in reversed(stages.items()):
        shape = stage.writes.shape
        readers = dict.fromkeys(n.writes.name for n in nests(kernel) if n.writes.name != name and any(r.attr.name == name for r in n.reads))
        places, box = list({id(homes[r]): homes[r] for r in readers if r in homes}.values()), None
        if readers and readers.keys() <= homes.keys() and len({p.shape for p in places}) == 1:
            boxes = [_needs(stages[r], name, homes[r].needs.get(r) or _whole(homes[r].shape)) for r in readers]
            box = _hull([b for b in boxes if b is not None]) if None not in boxes else None
        if box is None or (name in outputs and (places[0].shape != shape or box != _whole(shape))):
            homes[name] = Chain(shape, [name], {})
            continue
        home, *others = places
        for other in others:
            home.results += other.results
            home.needs |= other.needs
            homes.update((n, home) for n, c in homes.items() if c is other)
        homes[name] = home
        if name in outputs:
            home.results.append(name)
        else:
            home.needs[name] = box
    found = list({id(c): c for c in homes.values()}.values())[::-1]
    for c in found:
        c.results.sort(key=list(stages).index)
    elements = {name: prod(map(extent_of, stage.writes.shape)) for name, stage in stages.items()}
    found = [c for c in found if any(r.high > r.low for box in c.needs.values() for r in box)]
    return [c for c in found if sum(elements[n] for n in {*c.results, *c.needs}) >= MIN_ELEMENTS]


def _stages(kernel: Kernel) -> dict[str, Nest]:
    """The buffers that are computed one element at a time, each with the nest that stores it or, of a reduction, accumulates it."""
    by_name: dict[str, list[Nest]] = {}
    for n in nests(kernel):
        by_name.setdefault(n.writes.name, []).append(n)

    def is_stage(found: Sequence[Nest]) -> bool:
        nest, indices = found[-1], found[-1].leaf.indices
        loops, reduced = {x.var: x.extent for x in nest.loops}, [x.extent for x in nest.reduction_loops]
        plain = len(set(indices)) == len(indices) > 0 and all(loops.get(i) == n for i, n in zip(indices, nest.writes.shape, strict=True))
        small = all(isinstance(n, int) for n in reduced) and prod(map(extent_of, reduced)) <= MAX_WINDOW
        return plain and small and [n.is_reduction for n in found] == ([False, True] if reduced else [False])

    return {name: found[-1] for name, found in by_name.items() if is_stage(found)}


def _needs(stage: Nest, buffer: str, own: Box) -> Box | None:
    """The part of a buffer that is read where `own` is the part of a stage; None where that is not a box, or all of a dimension."""
    variables = dict(zip(stage.leaf.indices, own, strict=True))
    reduced = {x.var: extent_of(x.extent) for x in stage.reduction_loops}

    def side(index: Affine | None) -> Reach | None:
        """Where an index lies that is a multiple of one variable plus reduction loops and a constant."""
        moving = [v for v in index.terms if v in variables] if index is not None else []
        if index is None or len(moving) != 1 or index.terms[moving[0]] < 1:
            return None
        at, step = variables[moving[0]], index.terms[moving[0]]
        low, high = index.span(reduced)
        return Reach(at.dim, at.step * step, at.low * step + low, at.high * step + high)

    reads = (r for r in stage.reads if r.attr.name == buffer)
    return _hull([[side(affine(i, {*variables, *reduced}, clamped=True)) for i in r.args] for r in reads])


def _hull(boxes: Sequence[Sequence[Reach | None]]) -> Box | None:
    """A box around all; None where a side is not known, or they move differently with the tile."""
    known = [[r for r in sides if r is not None] for sides in zip(*boxes, strict=True)]
    if any(len(sides) < len(boxes) or len({(r.dim, r.step) for r in sides}) > 1 for sides in known):
        return None
    return tuple(Reach(sides[0].dim, sides[0].step, min(r.low for r in sides), max(r.high for r in sides)) for sides in known)


def _whole(shape: Sequence[E.Dim]) -> Box:
    return tuple(map(Reach, range(len(shape))))


def _tile(chain: Chain, stages: Mapping[str, Nest], target: CpuTarget, knobs: Knobs) -> tuple[int, ...]:
    """Elements of a tile along each dimension of the results: 1 in dimensions outside of all windows, the whole of those between."""
    lanes = max(lanes_of(target, [stages[n].writes]) for n in chain.results)
    extents = [extent_of(n) for n in chain.shape]
    last = len(extents) - 1
    windows = [r for box in chain.needs.values() for r in box if r.high > r.low or r.step > 1]
    cut = {r.dim for r in windows} | {last}
    halos = {0, *(r.high - r.low for r in windows if r.dim == last and r.step == 1)}
    options: list[list[int]] = []
    for d, n in enumerate(extents):
        if d not in cut:
            options.append([1 if d < min(cut) else n])
        elif d < last:
            options.append([*(h for h in HEIGHTS if h < n), *([n] if n <= HEIGHTS[-1] and d > min(cut) else [])])
        else:
            widths = {w * lanes - halo for w in WIDTHS for halo in halos}
            options.append([*sorted(w for w in widths if 1 < w < n), *([n] if isinstance(chain.shape[-1], int) else [])])
    costs = {tile: _cost(tile, chain, stages, extents, lanes, target) for tile in product(*options)}
    possible = [tile for tile, cost in costs.items() if cost < inf]
    if not possible:
        raise ScheduleError("no tiles", why="what a tile needs of all stages does not fit into the cache")
    return knobs.choice((chain.results[-1], "tile"), possible, min(possible, key=costs.__getitem__))


def _cost(tile: tuple[int, ...], chain: Chain, stages: Mapping[str, Nest], extents: Sequence[int], lanes: int, target: CpuTarget) -> float:
    """Operations for one element of the results, in vectors; infinite where a tile does not fit."""
    boxes = {n: [r.extent(tile) for r in box] for n, box in chain.needs.items()}
    sizes = [prod(box) * itemsize(stages[n].writes.dtype) for n, box in boxes.items()]
    if list(tile) == list(extents) or max(sizes) > STACK_LIMIT or sum(sizes) > target.l2 // CACHE_SHARE:
        return inf
    boxes |= {n: list(tile) for n in chain.results}

    def operations(stage: Nest) -> int:  # of one element, about: arithmetic and accesses
        values = sum(e.op not in ("var", "const") and e.dtype != E.INDEX for e in E.walk(stage.leaf.value))
        return iterations(stage.reduction_loops) * values + 1

    work = sum(operations(stages[n]) * prod(box[:-1]) * (-(-box[-1] // lanes) + ROW_START) for n, box in boxes.items())
    split = [d for d, (t, n) in enumerate(zip(tile, extents, strict=True)) if t < n]
    again = prod(-(-extents[d] // tile[d]) * tile[d] / extents[d] for d in split)
    tasks = prod(-(-extents[d] // tile[d]) for d in split if d == split[0] or tile[d] == 1)
    idle = ceil(tasks / target.cores) * target.cores / tasks
    return work / prod(tile) * again * idle


def schedule(s: Schedule, chain: Chain, target: CpuTarget, knobs: Knobs) -> None:
    """Tiles of a chain, in place. Raises `ScheduleError` where a step is refused; the schedule is then half done."""
    stages = {n: stage for n, stage in _stages(s.kernel).items() if n in chain.needs or n in chain.results}
    readers = {n: [r for r, stage in stages.items() if any(read.attr.name == n for read in stage.reads)] for n in stages}
    loops = {n: [x.var.name for x in stage.reduction_loops] for n, stage in stages.items()}
    tile = _tile(chain, stages, target, knobs)
    sums = {name: s.cache_write(name, f"{name}.acc") for name in stages if loops[name]}
    homes = {name: _Tiles(s, name, tile) for name in chain.results}
    for name in reversed(stages):
        around = [homes[name]] if name in homes else []
        home, *others = dict.fromkeys([*around, *(h for h in homes.values() if any(homes[r] is h for r in readers[name]))])
        for other in others:
            home.join(other)
            homes.update((n, home) for n, h in homes.items() if h is other)
        if name in chain.needs:
            homes[name] = home
            home.admit(name)
        if name in sums:
            home.admit(sums[name])
    for home in dict.fromkeys(homes.values()):
        for name in (n for n in home.lanes if n in stages):
            _in_lanes(s, name, home.lanes[name], sums.get(name, name), loops[name], target)
        threads(s, home.shared, True, knobs, home.whole)


class _Tiles:
    """The loops over tiles of some results, and the stages inside."""

    def __init__(self, s: Schedule, result: str, tile: Sequence[int]) -> None:
        nest = result_nest(s.kernel, result)
        self.s, self.whole = s, dict[str, E.Dim | None]()  # `whole`: loops whose last tile may be cut off, with the number of whole tiles
        single, shifted, inner = [], [], []
        for i, side, n in zip(nest.leaf.indices, tile, nest.writes.shape, strict=True):
            loop = i.name
            if side == n:
                inner.append(loop)
            elif side == 1:
                single.append(loop)
            else:
                overlap = bool(self.whole) and isinstance(n, int)  # such tiles are all alike, but do not run in parallel
                outer, loop = s.split(loop, side, "shift_inwards" if overlap else "guard")
                inner.append(loop)
                if overlap:
                    shifted.append(outer)
                else:
                    self.whole[outer] = whole_tiles(n, side)
        self.shared = [*list(self.whole)[:1], *single, *list(self.whole)[1:]]
        self.loops = [*self.shared, *shifted]
        s.reorder(*self.loops, *inner)
        self.lanes = {result: inner[-1]}  # stages, each with its loop along memory

    def join(self, other: _Tiles) -> None:
        """Compute the results of others in the same loops."""
        for mine, its in zip(self.loops, other.loops, strict=True):
            self.s.fuse_loops(mine, its)
        self.lanes |= other.lanes

    def admit(self, stage: str) -> None:
        """Compute a stage inside."""
        self.s.compute_at(stage, self.loops[-1])
        if not all(isinstance(n, int) for n in editing.find_buffer(self.s.kernel, stage).shape):
            raise ScheduleError("no tiles", why=f"the part of `{stage}` that a tile needs has no constant size")
        self.lanes[stage] = stage_axes(self.s.kernel, stage, False)[-1]


def _in_lanes(s: Schedule, stage: str, loop: str, acc: str, loops: Sequence[str], target: CpuTarget) -> None:
    """Vector lanes along a loop of a stage; what its reduction loops sum up is accumulated in registers, its buffer `acc`."""
    written = [x for x in walk(s.kernel.body) if isinstance(x, Store | Accumulate) and x.buffer.name in (stage, acc)]
    lanes = lanes_of(target, [b for x in written for b in (x.buffer, *(r.attr for r in E.reads(x.value)))])
    if not loops:
        vector_tail(s, loop, lanes)
        return
    whole = extent(s, loop)
    outer, lane = s.split(loop, lanes)
    s.compute_at(acc, outer, "register")
    s.vectorize(lane)
    s.vectorize(stage_axes(s.kernel, acc, False)[-1])
    along = stage_axes(s.kernel, acc, True)[-1]
    s.reorder(*loops, along, reassociate=True)
    unroll(s, loops if prod(size(s, x) for x in loops) <= MAX_UNROLLED else ())
    s.vectorize(along)
    partition_tails(s, [outer], {outer: whole_tiles(whole, lanes)})
