"""Hints to the caches: software prefetch of what a loop will touch some iterations later, and non-temporal stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.access import accesses, stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.ir.layout import LINE
from tcomp.ir.simplify import simplify
from tcomp.schedules.handles import Loop, Stage
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import find_buffer, find_loop, refuse, refuse_if, replaced


def prefetch(kernel: L.Kernel, buffer: Stage, loop: Loop, distance: int, at: Loop = "") -> L.Kernel:
    """Every iteration of a serial loop first prefetches the elements of `buffer` that it will read or write `distance` iterations later,
    one for each vector. With `at`, a serial loop inside of it, the prefetches are spread evenly over all iterations of that one, in order,
    one for each cache line.

    Legal where no index is read from memory: a prefetch reads nothing, and may point behind the end. Good for operands that no cache
    holds, such as weights: the hardware prefetcher stops at the end of a page. It costs an instruction for each vector, so it hurts where
    the operand is in a cache. `at` is for operands that are walked as a whole again and again before their next piece, which would be
    waited for if it were prefetched at once. Of loops in between whose extent is not known, the iterations with even numbers, and those
    with odd ones, prefetch the same.

    >>> A = te.placeholder((64, 8), name="A")
    >>> k = te.reduce_axis(64, "k")
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
    inside = find_loop(kernel, at) if at else target
    if inside.kind != L.SERIAL or distance < 1:
        raise refuse(f"`{inside.var.name}` is {inside.kind}, the distance {distance}", "a serial loop, and at least 1 iteration")
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
    hints = []
    for indices, inner in places.items():
        loops = [x for x in inner if x.kind != L.VECTORIZED]
        unrolled = [x for x in loops if x.kind == L.UNROLLED and x in together]
        steps = {x: _iterations_of_line(source, indices, x) for x in loops} if around else {}
        options = [*([[]] if around else []), unrolled]  # loops that are run through at once
        shares = ((at_once, _share(around, [(x, steps.get(x, 1)) for x in loops if x not in at_once])) for at_once in options)
        copied, share = next(((at_once, share) for at_once, share in shares if share is not None), ([], None))
        if share is None:
            raise refuse(f"what `{loop}` reads of `{buffer}` depends on a loop inside it", "prefetch in that loop, or `at` one inside that")
        copies = {x.var: loop_var(editing.fresh(kernel, f"{x.var.name}.p"), x.extent) for x in copied}
        moved = {target.var: target.var + distance, **{x.var: copies.get(x.var, as_expr(0)) for x in inner}, **share}
        hint = L.Prefetch(source, tuple(simplify(E.substitute(i, moved)) for i in indices))
        hints.append(editing.enclose([L.For(copies[x.var], x.extent, hint, L.UNROLLED) for x in copied], hint))
    return replaced(kernel, {inside: replace(inside, body=L.block(*hints, inside.body))})


def _iterations_of_line(buffer: L.Buffer, indices: tuple[Expr, ...], x: L.For) -> int:
    """How many iterations of a loop read one cache line."""
    step = abs(stride(E.read(buffer, indices), x.var) or 0) * itemsize(buffer.dtype)  # bytes
    return max(1, LINE // step) if step else 1


def _share(around: Sequence[L.For], walked: Sequence[tuple[L.For, int]]) -> dict[Expr, Expr] | None:
    """The iterations of the loops that a read walks, each in steps of so many, in order, for the iterations of the loops around (two of
    them, repeated, where their number is not known); None if these are fewer."""
    if not walked:
        return {}
    if not all(isinstance(x.extent, int) for x, _ in walked):
        return None
    given = {x: x.extent if isinstance(x.extent, int) else 2 for x in around}
    counts = {x: -(-int(x.extent) // step) for x, step in walked}
    rows = prod(counts.values())
    each = prod(given.values()) // rows if rows else 0
    if not each:
        return None
    number: Expr = as_expr(0)
    for x, n in given.items():
        number = number * n + (x.var if n == x.extent else x.var % n)
    number = E.minimum(number // each, as_expr(rows - 1))
    found: dict[Expr, Expr] = {}
    for x, step in reversed(walked):
        found[x.var], number = number % counts[x] * step, number // counts[x]
    return found


def stream(kernel: L.Kernel, buffer: Stage) -> L.Kernel:
    """Stores to `buffer` in whole vectors bypass the caches (non-temporal stores), where the machine has such stores; accumulations do not.

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
    return replaced(kernel, {s: replace(s, non_temporal=True) for s in stores})
