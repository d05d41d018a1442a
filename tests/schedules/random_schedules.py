"""Random schedule steps: for each primitive, arguments that are likely, but not sure, to be legal, and now and then senseless ones.

Arguments are drawn by the names of a primitive's parameters. Where several of them belong together, `TOGETHER` draws them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from tcomp.ir import expr as E
from tcomp.ir.loops import GPU_AXES, KINDS, SCOPES, Accumulate, Allocate, Block, For, If, Kernel, Store, expressions, perfect, walk
from tcomp.ir.polyhedral.model import model
from tcomp.ir.simplify import as_dim
from tcomp.schedules.primitives.editing import find_buffer, find_loop, loops_of, sequence, writes
from tcomp.schedules.primitives.loop_structure import TAILS
from tcomp.schedules.schedule import PRIMITIVES
from tcomp.schedules.trace import Step
from tests.schedules.dice import Dice

# 1000: more than any extent; as a factor it is accepted, and the interpreter then walks so many iterations
STRANGE = ("nowhere", "", "n + 1", "n // 0", 0, -1, 1000, 2**70, None, True, 1.5, ("i1", "i2"), "y0", "t")


@dataclass(frozen=True)
class Drawing:
    """What arguments are drawn from."""

    dice: Dice
    kernel: Kernel

    def loops(self) -> list[str]:
        return list(loops_of(self.kernel))

    def loop(self) -> str:
        return self.dice.pick(*self.loops())

    def temporaries(self) -> list[str]:
        return [s.buffer.name for s in walk(self.kernel.body) if isinstance(s, Allocate)]

    def buffer(self) -> str:
        return self.dice.pick(*(b.name for b in self.kernel.buffers), *self.temporaries() * 2)

    def stage(self) -> str:
        return self.dice.pick(*(self.temporaries() or [self.buffer()]))

    def pick_stage(self) -> str:
        """A buffer that is computed, temporary or not."""
        return self.dice.pick(*dict.fromkeys(s.buffer.name for s in walk(self.kernel.body) if isinstance(s, Store | Accumulate)))

    def factor(self) -> int:
        return self.dice.number(1, 5)

    def nest(self) -> list[str]:
        """Loops directly inside each other."""
        return [x.var.name for x in perfect(find_loop(self.kernel, self.loop()))[0]]

    def readers(self, buffer: str) -> list[str]:
        """Loops around a read of a buffer that do not write it."""
        found = []
        for s in walk(self.kernel.body):
            if isinstance(s, For):
                inside = list(walk(s.body))
                read = any(r.attr.name == buffer for x in inside for r in E.reads(*expressions(x)))
                if read and not any(isinstance(x, Store | Accumulate) and x.buffer.name == buffer for x in inside):
                    found.append(s.var.name)
        return found

    def layout(self, rank: int) -> str:
        """Dimensions in any order, one of them perhaps in blocks or with a pitch."""
        names = [chr(ord("a") + d) for d in range(rank)]
        n = self.dice.number(0, max(0, rank - 1))
        order = self.dice.shuffled(names)
        if rank and self.dice.flip():
            block = self.dice.number(1, 4)
            order = [x if x != names[n] else f"{x}/{block}" for x in order] + [f"{names[n]}%{block}"]
        elif rank and self.dice.flip():
            order = [x if x != names[n] else f"{x}%{self.dice.number(1, 9)}" for x in order]
        return f"({','.join(order)})"

    def folds(self) -> list[tuple[str, str]]:
        """(stage, loop around its accumulation)"""
        loops = [s for s in walk(self.kernel.body) if isinstance(s, For)]
        return [(x.buffer.name, f.var.name) for f in loops for x in walk(f.body) if isinstance(x, Accumulate)]


SINGLE: dict[str, Callable[[Drawing], Any]] = {
    "loop": Drawing.loop,
    "at": Drawing.loop,
    "fold": Drawing.loop,
    "stage": Drawing.stage,
    "buffer": Drawing.buffer,
    "factor": Drawing.factor,
    "distance": lambda d: d.dice.number(0, 4),
    "lanes": lambda d: d.dice.pick(1, 2, 3, 4, 4, 8),
    "kind": lambda d: d.dice.pick(*KINDS[:4], *KINDS[:4], *KINDS),
    "scope": lambda d: d.dice.pick(*SCOPES),
    "dim": lambda d: d.dice.number(0, 2),
    "layout": lambda d: d.layout(d.dice.number(0, 3)),
    "name": lambda d: d.dice.pick("cached", "written"),
    "reassociate": lambda d: d.dice.flip(),
    "strided": lambda d: d.dice.flip(),
    "tail": lambda d: d.dice.pick(*TAILS),
    "parallel": lambda d: d.dice.pick("", "t0", "t1"),
    "text": lambda d: "a note",
}


def _reorder(d: Drawing) -> tuple[Any, ...]:
    nest = d.dice.shuffled(d.nest())
    return tuple(nest[: d.dice.number(1, len(nest))])


def _fuse(d: Drawing) -> tuple[Any, ...]:
    nest = d.nest()
    return tuple(nest[:2]) if len(nest) > 1 else (nest[0], d.loop())


def _partition(d: Drawing) -> tuple[Any, ...]:
    loop = d.loop()
    extent = find_loop(d.kernel, loop).extent
    if isinstance(extent, int):
        return loop, d.dice.number(0, max(0, extent))
    return loop, d.dice.pick(str(as_dim(extent // d.factor())), str(as_dim(extent - d.factor())), d.factor())


def _compute_at(d: Drawing) -> tuple[Any, ...]:
    stage = d.stage()
    loops = [x for s in walk(d.kernel.body) if isinstance(s, Allocate) and s.buffer.name == stage for x in walk(s) if isinstance(x, For)]
    return stage, d.dice.pick(*([x.var.name for x in loops if x.var.name in d.readers(stage)] or d.loops()))


def _reverse_compute_at(d: Drawing) -> tuple[Any, ...]:
    """A stage, and a loop around something that computes what its nests read."""
    stage, loops = d.pick_stage(), [s for s in walk(d.kernel.body) if isinstance(s, For)]
    around = [s for s in loops if writes(s.body, find_buffer(d.kernel, stage))]
    sources = {r.attr for s in around for x in walk(s) for r in E.reads(*expressions(x))}
    found = [s.var.name for s in loops if s not in around and any(writes(s, b) for b in sources)]
    return stage, d.dice.pick(*(found or d.loops()))


def _pipeline(d: Drawing) -> tuple[Any, ...]:
    loops = [(s.var.name, x.buffer.name) for s in walk(d.kernel.body) if isinstance(s, For) for x in walk(s) if isinstance(x, Allocate)]
    loop, buffer = d.dice.pick(*(loops or [(d.loop(), d.buffer())]))
    return loop, d.dice.number(1, 4), buffer


def _cache_read(d: Drawing) -> tuple[Any, ...]:
    buffer = d.buffer()
    return buffer, d.dice.pick(None, *(d.readers(buffer) or d.loops())), "cached"


def _cache_factors(d: Drawing) -> tuple[Any, ...]:
    """A loop around one sum of products, most often."""
    return d.dice.pick(*([f for _, f in d.folds()] or d.loops())), "left", "right"


def _relayout(d: Drawing) -> tuple[Any, ...]:
    stage = d.stage()
    return stage, d.layout(len(find_buffer(d.kernel, stage).shape))


def _rfactor(d: Drawing) -> tuple[Any, ...]:
    return *d.dice.pick(*(d.folds() or [(d.buffer(), d.loop())])), d.dice.number(1, 4)


def _decompose_reduction(d: Drawing) -> tuple[Any, ...]:
    return d.dice.pick(*(d.folds() or [(d.buffer(), d.loop())]))


def _distribute(d: Drawing) -> tuple[Any, ...]:
    return d.loop(), d.factor(), d.dice.pick("serial", *GPU_AXES), d.dice.pick("serial", *GPU_AXES)


def _affine(d: Drawing) -> tuple[Any, ...]:
    """A nest under a unimodular map, the same for all statements but for shifts; what stands in one iteration keeps its order."""
    loop = d.loop()
    instances = model(find_loop(d.kernel, loop)).instances
    depth = max((len(i.loops) for i in instances), default=1)
    rows = [[int(n == m) for m in range(depth)] for n in range(depth)]
    for _ in range(d.dice.number(0, 2)):
        a, b = d.dice.number(0, depth - 1), d.dice.number(0, depth - 1)
        match d.dice.pick("skew", "skew", "swap", "reverse"):
            case "skew" if a != b:
                rows[a] = [x + d.dice.pick(1, 1, 2, -1) * y for x, y in zip(rows[a], rows[b], strict=True)]
            case "swap":
                rows[a], rows[b] = rows[b], rows[a]
            case "reverse":
                rows[a] = [-x for x in rows[a]]
    maps = []
    for n, i in enumerate(instances):
        point = [f"i{m}" for m in range(len(i.loops))]
        shift = d.dice.pick(0, 0, 0, 1, -1)
        times = [" + ".join([*(f"{c}*{x}" for c, x in zip(row, point, strict=False)), str(shift)]) for row in rows]
        maps.append(f"{i.name}[{', '.join(point)}] -> [{', '.join([*times, str(n)])}]")
    return loop, f"{{ {'; '.join(maps)} }}", " ".join(f"t{n}" for n in range(depth + 1))


def _fission(d: Drawing) -> tuple[Any, ...]:
    """A loop around several statements."""
    return (d.dice.pick(*([s.var.name for s in walk(d.kernel.body) if isinstance(s, For) and isinstance(s.body, Block)] or d.loops())),)


def _expand(d: Drawing) -> tuple[Any, ...]:
    buffer = find_buffer(d.kernel, d.buffer())
    n = d.dice.number(0, max(0, len(buffer.shape) - 1))
    return buffer.name, n, d.dice.pick(2, 3, *buffer.shape[n : n + 1])


def _promote(d: Drawing) -> tuple[Any, ...]:
    """A loop around an accumulation that does not choose its element, most often."""
    loops = [s for s in walk(d.kernel.body) if isinstance(s, For)]
    found = [(s.var, x) for s in loops for x in walk(s) if isinstance(x, Accumulate)]
    likely = [(v, x) for v, x in found if v not in E.variables(*x.indices)]
    v, x = d.dice.pick(*(likely or found or [(loops[0].var, None)]))
    return v.name, x.buffer.name if x is not None else d.buffer(), "kept", d.dice.pick(False, True)


def _unguard(d: Drawing) -> tuple[Any, ...]:
    """A loop around an accumulation under conditions, where there is one."""
    loops = [s for s in walk(d.kernel.body) if isinstance(s, For)]
    likely = [s for s in loops if isinstance(s.body, If) and isinstance(s.body.then, Accumulate)]
    return (d.dice.pick(*(likely or loops)).var.name,)


def _skew(d: Drawing) -> tuple[Any, ...]:
    nest = d.nest()
    return *(nest[:2] if len(nest) > 1 else (nest[0], d.loop())), d.dice.pick(1, 1, 2, -1)


def _shift(d: Drawing) -> tuple[Any, ...]:
    loops = [(s.var.name, x.buffer.name) for s in walk(d.kernel.body) if isinstance(s, For) for x in walk(s) if isinstance(x, Store)]
    return *d.dice.pick(*(loops or [(d.loop(), d.buffer())])), d.dice.number(-2, 2)


def _fuse_loops(d: Drawing) -> tuple[Any, ...]:
    """Two loops, one behind the other."""
    sequences = [[x.var.name for x in sequence(s) if isinstance(x, For)] for s in walk(d.kernel.body)]
    return d.dice.pick(*(pair for names in sequences for pair in pairwise(names)), (d.loop(), d.loop()))


def _tensorize(d: Drawing) -> tuple[Any, ...]:
    return d.loop(), d.dice.pick("fma_tile(2, 1, 1, avx2, float32)", "fma_tile(1, 1, 1, avx512, float32)", "vpdpbusd")


TOGETHER: dict[str, Callable[[Drawing], tuple[Any, ...]]] = {
    "reorder": _reorder,
    "fuse": _fuse,
    "partition": _partition,
    "compute_at": _compute_at,
    "reverse_compute_at": _reverse_compute_at,
    "pipeline": _pipeline,
    "cache_read": _cache_read,
    "cache_factors": _cache_factors,
    "relayout": _relayout,
    "rfactor": _rfactor,
    "decompose_reduction": _decompose_reduction,
    "distribute": _distribute,
    "affine": _affine,
    "tensorize": _tensorize,
    "skew": _skew,
    "shift": _shift,
    "fuse_loops": _fuse_loops,
    "fission": _fission,
    "expand": _expand,
    "promote": _promote,
    "unguard": _unguard,
}

LIKELY = ("split", "split", "reorder", "set_kind", "set_kind")
OF_TEMPORARIES = ("compute_at", "compute_at", "inline", "reverse_compute_at", "relayout", "set_scope", "pipeline")


@cache
def parameters(primitive: str) -> tuple[list[str], list[str]]:
    """Names of those it must be given, without the kernel, and of the optional ones."""
    every = list(inspect.signature(PRIMITIVES[primitive]).parameters.values())[1:]
    return [p.name for p in every if p.default is p.empty], [p.name for p in every if p.default is not p.empty]


def is_drawn(primitive: str) -> bool:
    """Whether arguments for it are known how to draw."""
    return primitive in TOGETHER or SINGLE.keys() >= set(parameters(primitive)[0])


def _likely(d: Drawing) -> list[str]:
    drawn = [*filter(is_drawn, PRIMITIVES), *LIKELY]
    if d.temporaries():
        return [*drawn, *OF_TEMPORARIES]
    return [p for p in drawn if p not in OF_TEMPORARIES] if d.dice.one_in(2) else drawn


def draw_step(dice: Dice, kernel: Kernel, among: Sequence[str] = ()) -> Step:
    """A step of one of the primitives listed, or of any."""
    d = Drawing(dice, kernel)
    if not d.loops():
        return Step("clean", ())
    name = dice.pick(*(among or _likely(d)))
    wanted, optional = parameters(name)
    arguments = TOGETHER[name](d) if name in TOGETHER else tuple(SINGLE[p](d) for p in wanted)
    options = tuple((p, SINGLE[p](d)) for p in optional if p in SINGLE and dice.one_in(2))
    if arguments and dice.one_in(40):
        n = dice.number(0, len(arguments) - 1)
        arguments = (*arguments[:n], dice.pick(*STRANGE, *d.loops()), *arguments[n + 1 :])
    return Step(name, arguments, options)
