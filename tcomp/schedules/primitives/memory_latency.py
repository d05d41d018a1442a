"""Hiding the latency of memory: copies made some iterations before they are used (software pipelining), software prefetches, and stores
that bypass the caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import accesses, affine, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.ir.layout import LINE
from tcomp.ir.simplify import simplify
from tcomp.schedules.handles import Loop, Stage
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import find_buffer, find_loop, reads, refuse, refuse_if, replaced, sequence, writes

UNKNOWN_ITERATIONS = 8  # of a loop of unknown extent, among which prefetches are shared out: with fewer, the last ones are not prefetched
MAX_TOGETHER = (
    8  # prefetches of one operand that an iteration makes one after the other, unless asked for more: bounds the length of the code
)


def pipeline(kernel: L.Kernel, loop: Loop, stages: int, *buffers: Stage, last: bool = False) -> tuple[L.Kernel, str]:
    """Fill buffers of a loop's body `stages - 1` iterations before they are read.

    Each buffer gets a first dimension of `stages`, of which iteration i uses element i % stages. A loop before the loop (the prologue;
    its name is returned) fills the first ones; then each iteration fills, where it stood or `last` of all, the one for `stages - 1`
    iterations later, if there is such an iteration, and computes with its own. `partition` at the last `stages - 1` iterations makes
    those without a copy (the epilogue) a loop of their own, and takes the condition out of the steady state.

    Legal for serial loops with nests in their body that fill the buffers, before these are read, from what the loop does not write; the
    rest of the body only reads them. Good for hiding the latency of memory; costs the memory for the copies. On a GPU, phases that
    only copy from global to shared memory run in the background from sm_80 on (`cp.async`): the copies of one iteration are a group, and
    one barrier an iteration suffices, behind a wait for all groups but the newest `stages - 2`.

      >>> A, k = te.placeholder((32,), name="A"), te.reduce_axis(32, "k")
      >>> s = Schedule(te.compute((), lambda: te.sum(A[k] * A[k], k), name="C"))
      >>> outer, inner = s.split("C.k", 4)
      >>> s.cache_read("A", outer, "P")
      'P'
      >>> s.pipeline(outer, 2, "P")
      'C.k.o.p'
      >>> print(s.kernel.body)
      C[] = 0.0f
      alloc P: float32[2, 4]
      for C.k.o.p in 0..1 {
        for P.0.p in 0..4 {
          P[C.k.o.p, P.0.p] = A[C.k.o.p * 4 + P.0.p]
        }
      }
      for C.k.o in 0..8 {
        for P.0 in 0..4 {
          if C.k.o < 7 {
            P[(C.k.o + 1) % 2, P.0] = A[C.k.o * 4 + P.0 + 4]
          }
        }
        for C.k.i in 0..4 {
          C[] += P[C.k.o % 2, C.k.i] * P[C.k.o % 2, C.k.i]
        }
      }
    """
    target = find_loop(kernel, loop)
    refuse_if(target.kind != L.SERIAL, f"`{loop}` is {target.kind}: its iterations do not follow each other")
    editing.check_factor(stages, "a number of stages of")
    refuse_if(stages < 2, f"{stages} stages: with two, one iteration fills what the next one reads")
    items, olds = sequence(target.body), _buffers_inside(kernel, target, buffers)
    fills = [item for item in items if any(writes(item, b) for b in olds)]
    _check_fills(target, olds, items, fills)
    distance = stages - 1
    first, extent = loop_var(editing.fresh(kernel, f"{target.var.name}.p"), distance), as_expr(target.extent)
    news = {b: L.Buffer(b.name, b.dtype, (stages, *b.shape), b.scope) for b in olds}

    def using(stmt: L.Stmt, slot: Expr) -> L.Stmt:
        for old, new in news.items():
            stmt = editing.swap_buffer(stmt, old, new, lambda indices: (slot % stages, *indices))
        return stmt

    def fill_for(fill: L.Stmt, iteration: Expr) -> L.Stmt:
        """The statement that fills the buffers for a later iteration, guarded by whether there is one."""
        return editing.guard([iteration < extent], editing.rebind(using(fill, target.var), {target.var: iteration}))

    copies = {fill: fill_for(fill, target.var + distance) for fill in fills}
    prologue = [fill_for(editing.renamed(fill, lambda name: editing.fresh(kernel, name + ".p")), first) for fill in fills]
    body = using(editing.rebuild(target.body, (lambda x: L.block() if x in copies else None) if last else copies.get), target.var)
    if last:
        body = L.block(body, *copies.values())
    for old in olds:
        body = editing.without_allocation(body, old)
    new = L.block(L.For(first, distance, L.block(*prologue)), replace(target, body=body))
    return editing.nesting(replaced(kernel, {target: L.allocated(news.values(), new)})), first.name


def _buffers_inside(kernel: L.Kernel, target: L.For, names: Sequence[Stage]) -> list[L.Buffer]:
    """The buffers named, which are allocated once more for each iteration."""
    found = [find_buffer(kernel, name) for name in dict.fromkeys(names)]
    hint = "cache_read makes such a buffer"
    for b in found:
        here = editing.is_local(b, target) and sequence(editing.scope_of(kernel, b))[0] in sequence(target.body)
        refuse_if(not here, f"`{b.name}` is not allocated in the body of `{target.var.name}`", hint)
        refuse_if(any(target.var in E.variables(as_expr(d)) for d in b.shape), f"the shape of `{b.name}` depends on `{target.var.name}`")
    refuse_if(not found, "it needs the buffers that earlier iterations fill", hint)
    return found


def _check_fills(target: L.For, buffers: Sequence[L.Buffer], items: Sequence[L.Stmt], fills: Sequence[L.Stmt]) -> None:
    """Refuses fills that depend on what the loop computes, or that other statements wait for or stand between."""
    loop, names = target.var.name, ", ".join(f"`{b.name}`" for b in buffers)
    for b in buffers:
        refuse_if(not any(writes(fill, b) for fill in fills), f"nothing in `{loop}` fills `{b.name}`")
        editing.check_bounds_no_loops(target, b)
    for computed in (s.buffer for fill in fills for s in editing.stores(fill) if s.buffer not in buffers):
        refuse_if(not any(editing.is_local(computed, fill) for fill in fills), f"what fills {names} computes `{computed.name}` too")
    for source in sorted(reads(fills) | {r.attr for r in E.reads(as_expr(target.extent))}, key=lambda b: b.name):
        changes = source not in buffers and any(writes(item, source) for item in items if item not in fills)
        refuse_if(changes, f"`{source.name}`, which {names} is filled from, is written in `{loop}`")
    for n, item in enumerate(items):
        early = item not in fills and reads([item]) & set(buffers) and any(fill in items[n:] for fill in fills)
        refuse_if(early, f"{names} is read in `{loop}` before it is filled")


def prefetch(
    kernel: L.Kernel, buffer: Stage, loop: Loop, distance: int, at: Loop = "", lines: int = MAX_TOGETHER, level: int = 1
) -> L.Kernel:
    """Every iteration of a serial loop first prefetches the elements of `buffer` that it will read or write `distance` iterations later,
    one for each vector. With `at`, a serial loop inside of it, the prefetches are spread evenly over all iterations of that one, in order,
    one for each cache line, at most so many `lines` an iteration. `level` is that of the cache.

    Of a window that moves along with the loop, what the iterations before read already is left out.

    Legal where no index is read from memory: a prefetch reads nothing, and may point behind the end. Good for operands that no cache
    holds, such as weights: the hardware prefetcher stops at the end of a page. It costs an instruction for each vector, so it hurts where
    the operand is in a cache. `at` is for operands that are walked as a whole again and again before their next piece, which would be
    waited for if it were prefetched at once. Of loops in between whose extent is not known, iterations `UNKNOWN_ITERATIONS` apart prefetch
    the same. A core waits for but a few lines of its first-level cache at a time (10 to 24; with memory 130 ns away, 5 to 12 GB/s), so that
    what streams from memory is for the second level.

    >>> A, k = te.placeholder((64, 8), name="A"), te.reduce_axis(64, "k")
    >>> s = Schedule(te.compute((8,), lambda i: te.sum(A[k, i], k), name="B"))
    >>> s.reorder("B.k", "B.i")
    >>> s.vectorize("B.i")
    >>> s.prefetch("A", "B.k", 4)
    >>> print(s.loops["B.k"])
    for B.k in 0..64 {
      prefetch A[B.k + 4, 0]
      vectorized B.i in 0..8 {
        B[B.i] += A[B.k, B.i]
      }
    }
    """
    source, target = find_buffer(kernel, buffer), find_loop(kernel, loop)
    inside = target if isinstance(at, str) and not at else find_loop(kernel, at)
    if inside.kind != L.SERIAL or distance < 1:
        raise refuse(f"`{inside.var.name}` is {inside.kind}, the distance {distance}", "a serial loop, and at least 1 iteration")
    refuse_if(level not in L.CACHE_LEVELS, f"a cache of level {level!r}: {L.CACHE_LEVELS[0]} to {L.CACHE_LEVELS[-1]}")
    refuse_if(editing.is_local(source, target), f"`{buffer}` is another one in every iteration of `{loop}`")
    around = [s for s in editing.path(target, inside) if isinstance(s, L.For)][1:]
    refuse_if(inside is not target and not around, f"`{at}` is not inside `{loop}`")
    places: dict[tuple[Expr, ...], tuple[L.For, ...]] = {}
    together: set[L.For] = set()  # loops of which one iteration of `inside` runs through all iterations that are unrolled
    for a in accesses(target.body):
        if a.buffer is source and target.var in E.variables(*a.indices):
            places[a.indices] = tuple(x for x in a.loops if x.var in E.variables(*a.indices))
            together.update(places[a.indices] if inside is target or inside in a.loops else ())
    data = E.reads(*(i for indices in places for i in indices))
    refuse_if(data, f"where `{loop}` reads `{buffer}` depends on data", "the address of a later iteration cannot be looked up")
    refuse_if(not places, f"nothing of `{buffer}` is read in another place at every iteration of `{loop}`")
    hints = list[L.Stmt]()
    for indices, inner in places.items():
        loops = [x for x in inner if x.kind != L.VECTORIZED]
        copied = [x for x in loops if x.kind == L.UNROLLED and x in together and not around]  # loops that are run through at once
        copies = {x.var: loop_var(editing.fresh(kernel, f"{x.var.name}.p"), x.extent) for x in copied}
        moves = {x: abs(stride(E.read(source, indices), x.var) or 0) * itemsize(source.dtype) for x in loops}  # bytes an iteration
        steps = {x: max(1, LINE // size) if size and around else 1 for x, size in moves.items()}  # iterations that read one cache line
        walks = _lines(indices, [x for x in loops if x not in copied], steps, target.var, distance)
        share = None if walks is None else _share(around, walks, lines, editing.fresh(kernel, f"{inside.var.name}.p{len(hints) or ''}"))
        if share is None:
            raise refuse(f"what `{loop}` reads of `{buffer}` depends on a loop inside it", "prefetch in that loop, or `at` one inside that")
        moved = {target.var: target.var + distance, **{x.var: copies.get(x.var, as_expr(0)) for x in inner}, **share.places}
        hint = L.Prefetch(source, tuple(simplify(E.substitute(i, moved)) for i in indices), level)
        repeated = [L.For(copies[x.var], x.extent, hint, L.UNROLLED) for x in copied]
        repeated += [L.For(v, share.each, hint, L.UNROLLED) for v in share.repeats]
        hints.append(editing.enclose(repeated, hint))
    return replaced(kernel, {inside: replace(inside, body=L.block(*hints, inside.body))})


@dataclass(frozen=True, slots=True)
class _Walk:
    """A loop that stands for all those that walk along an index: its iterations from `first` in `count` steps, beyond its extent if need
    be."""

    loop: L.For
    count: int
    step: int
    first: int = 0


def _lines(indices: Sequence[Expr], loops: Sequence[L.For], steps: Mapping[L.For, int], mover: Expr, distance: int) -> list[_Walk] | None:
    """How a read at `indices` walks the cache lines that it touches in `loops`, of which so many iterations read one line. Where a window
    moves along an index, `[row + tap]`, each of its elements is counted once, whichever row reads it, and those alone that it did not hold
    `distance` iterations of the variable `mover` before. None where extents are not known."""
    extents = {x.var: x.extent for x in loops if isinstance(x.extent, int)}
    if len(extents) < len(loops):
        return None
    loop_of, walks = {x.var: x for x in loops}, {x.var: _Walk(x, -(-extents[x.var] // steps[x]), steps[x]) for x in loops}
    for i in indices:
        moving = {v: c for v, c in form.terms.items() if v in walks} if (form := affine(i)) is not None else {}
        alone = all(v not in E.variables(other) for v in moving for other in indices if other is not i)
        if len(moving) > 1 and alone and min(moving.values()) > 0:
            finest, *others = sorted(moving, key=moving.__getitem__)
            unit, step = moving[finest], steps[loop_of[finest]]
            count = -(-(sum(c * (extents[v] - 1) for v, c in moving.items()) // unit + 1) // step)
            if all(c % unit == 0 for c in moving.values()) and count < prod(walks[v].count for v in moving):
                walks |= {finest: _Walk(loop_of[finest], count, step), **{v: _Walk(loop_of[v], 1, 1) for v in others}}
        if form is not None and (new := form.terms.get(mover, 0) * distance) > 0 and alone:
            for v, w in ((v, walks[v]) for v, c in moving.items() if c == 1 and walks[v].step == 1 and walks[v].count > new):
                walks[v] = replace(w, count=new, first=w.count - new)
    return list(walks.values())


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of the prefetches of one iteration: the iterations of the walks, by loop variable, `each` of them together (variable
    `repeats`)."""

    places: dict[Expr, Expr]
    each: int = 1
    repeats: tuple[Expr, ...] = ()


def _share(around: Sequence[L.For], walks: Sequence[_Walk], most: int, name: str) -> _Share | None:
    """The walks shared out evenly, in order, among the iterations of the loops around (once more in each iteration of a loop of unknown
    extent, or in `UNKNOWN_ITERATIONS` of it where the others are too few); a loop over those of one iteration is called `name`. None if
    each had more than `most`."""
    if not walks:
        return _Share({})
    lines, known = prod(w.count for w in walks), prod(x.extent for x in around if isinstance(x.extent, int))
    given = {x: x.extent if isinstance(x.extent, int) else UNKNOWN_ITERATIONS if known < lines else 1 for x in around}
    total = prod(given.values())
    each = -(-lines // max(1, total))
    if not around or not lines or not total or each > most:
        return None
    number: Expr = as_expr(0)
    for x, n in given.items():
        number = number * n + (x.var if n == x.extent else x.var % n)
    repeats = (loop_var(name, each),) if each > 1 else ()
    number = number * each + repeats[0] if repeats else number // (total // lines)
    number, found = E.minimum(number, as_expr(lines - 1)), dict[Expr, Expr]()
    for w in reversed(walks):
        found[w.loop.var], number = number % w.count * w.step + w.first, number // w.count
    return _Share(found, each, repeats)


def stream(kernel: L.Kernel, buffer: Stage, above: int = 0) -> L.Kernel:
    """Stores to `buffer` in whole vectors bypass the caches (non-temporal stores), where the machine has such stores; accumulations do not.
    With `above`, only in runs in which the buffer, whose size is symbolic, has more bytes than that.

    Always legal. Good for results that no cache could hold until they are read: a line is then not fetched before it is overwritten, a
    third of the traffic of an addition, and nothing else is evicted for it. Costs more than it saves where the next kernel would have
    found the result in a cache.

    >>> A = te.placeholder((64, 16), name="A")
    >>> s = Schedule(te.compute((64, 16), lambda i, j: A[i, j] * 2, name="B"))
    >>> s.vectorize("B.j")
    >>> s.stream("B")
    >>> print(s.loops["B.i"])
    for B.i in 0..64 {
      vectorized B.j in 0..16 {
        stream B[B.i, B.j] = A[B.i, B.j] * 2.0f
      }
    }
    """
    stored = find_buffer(kernel, buffer)
    stores = [s for s in L.walk(kernel.body) if isinstance(s, L.Store) and s.buffer is stored]
    refuse_if(not stores, f"nothing is stored to `{buffer}`", "accumulations read what is there before")
    return replaced(kernel, {s: replace(s, streamed_above=above) for s in stores})
