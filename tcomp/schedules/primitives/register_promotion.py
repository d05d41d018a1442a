"""Promotion: what a loop accumulates into stays in registers while the loop runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import islpy as isl

from tcomp.ir import expr as E
from tcomp.ir.expr import as_expr
from tcomp.ir.loops import SERIAL, UNROLLED, VECTORIZED, Accumulate, Allocate, For, If, Kernel, Stmt, Store, block, walk
from tcomp.ir.polyhedral.model import REDUCE, Relation, TooHard, limited, model
from tcomp.ir.simplify import prove
from tcomp.schedules.analysis.legality import conflict_of, dependences
from tcomp.schedules.handles import BufferCopy
from tcomp.schedules.primitives.editing import (
    find_buffer,
    find_loop,
    fresh,
    is_local,
    rebuild,
    refuse,
    refuse_conflict,
    renamed,
    replace_loop,
    temporary,
)
from tcomp.schedules.primitives.insertion_points import path


def promote(kernel: Kernel, loop: str, buffer: str, name: str, anew: bool = False) -> tuple[Kernel, BufferCopy]:
    """The elements of `buffer` that each iteration of a serial loop accumulates into are loaded into registers before the loop, the new
    buffer `name`, and stored after it. With `anew` the registers start from nothing, and are accumulated into `buffer` after the loop.

    The copies have the loops and guards that stand around the accumulation inside of `loop`; what starts from nothing does so everywhere.
    Returns the name of the registers, which knows these loops.

    Legal when the loop has an iteration, all its iterations accumulate into the same elements, by one statement, and it touches them
    in no other way. Good for programs that update a matrix in place: the code generator cannot tell the elements that are accumulated
    into from others of the same buffer that are read, and would store and load them at every step. `anew` sums up in blocks, the loop being
    one of them: rounding errors grow with the length of a block and the number of blocks, not with their product.

    Sources: S. Carr and K. Kennedy, "Scalar replacement in the presence of conditional control flow" (1994); N. Higham, "The accuracy of
    floating point summation" (1993).

      >>> from tcomp import te
      >>> from tcomp.schedules import Schedule
      >>> A, k = te.placeholder((9, 4), name="A"), te.reduce_axis(9, "k")
      >>> s = Schedule(te.compute((4,), lambda i: te.sum(A[k, i], k), name="C"))
      >>> s.reorder("C.k", "C.i")
      >>> s.promote("C.k", "C", "acc")
      'acc'
      >>> print(s)
      kernel C(A: float32[9, 4], C: float32[4]) -> (C) {
        for C.init.i in 0..4 {
          C[C.init.i] = 0.0f
        }
        alloc acc: float32[4] register
        for acc.0 in 0..4 {
          acc[acc.0] = C[acc.0]
        }
        for C.k in 0..9 {
          for C.i in 0..4 {
            acc[C.i] += A[C.k, C.i]
          }
        }
        for C.0 in 0..4 {
          C[C.0] = acc[C.0]
        }
      }
    """
    step = "promote"
    target, source = find_loop(kernel, loop, step), find_buffer(kernel, buffer, step)
    if target.kind != SERIAL:
        raise refuse(kernel, step, f"`{loop}` is {target.kind}", "it is for loops whose iterations follow each other")
    if not prove(1 <= as_expr(target.extent)):
        raise refuse(kernel, step, f"`{loop}` may have no iteration: its extent is {target.extent}")
    if is_local(source, target):
        raise refuse(kernel, step, f"`{buffer}` is another one in every iteration of `{loop}`")
    found = [s for s in walk(target) if isinstance(s, Accumulate) and s.buffer is source]
    if len(found) != 1:
        raise refuse(kernel, step, f"{len(found) or 'no'} statements in `{loop}` accumulate into `{buffer}`", "it is for exactly one")
    update = found[0]
    around = [s for s in path(target.body, update) if isinstance(s, For | If)]
    conditions = [s.cond for s in around if isinstance(s, If)]
    if E.reads(*update.indices, *conditions) or any(isinstance(s, If) and s.otherwise is not None for s in around):
        raise refuse(kernel, step, f"which elements of `{buffer}` are accumulated into depends on data, or on a branch")
    used = E.variables(*update.indices, *conditions)
    places = [s for s in around if isinstance(s, For) and s.var in used]
    if target.var in used or any(target.var in E.variables(as_expr(x.extent)) for x in places):
        raise refuse(kernel, step, f"the iterations of `{loop}` accumulate into different elements of `{buffer}`")
    if idle := next((s for s in around if isinstance(s, For) and s not in places and not prove(1 <= as_expr(s.extent))), None):
        raise refuse(kernel, step, f"`{idle.var.name}` may have no iteration: its extent is {idle.extent}")
    if odd := next((x for x in places if x.kind not in (SERIAL, UNROLLED, VECTORIZED) or not isinstance(x.extent, int)), None):
        raise refuse(kernel, step, f"`{odd.var.name}` is {odd.kind}, its extent {odd.extent}", "registers are for loops of constant extent")
    _check_alone(kernel, target, update, places)

    local = temporary(kernel, step, fresh(kernel, name), source.dtype, [x.extent for x in places], "register")
    cells = tuple(x.var for x in places)

    def copy(prefix: str, move: Stmt, guarded: bool = True) -> tuple[Stmt, list[str]]:
        for s in reversed(around):
            move = replace(s, body=move) if s in places else If(s.cond, move) if isinstance(s, If) and guarded else move
        names = {x.var.name: fresh(kernel, f"{prefix}.{n}") for n, x in enumerate(places)}
        return renamed(move, names.__getitem__), list(names.values())

    sums = E.read(local, cells)
    start = update.reducer.identity if anew else E.read(source, update.indices)
    load, loads = copy(local.name, Store(local, cells, start), guarded=not anew)
    save, saves = copy(source.name, Accumulate(source, update.indices, sums, update.reducer) if anew else Store(source, update.indices, sums))
    kept = rebuild(target, lambda s: replace(update, buffer=local, indices=cells) if s is update else None)
    return replace_loop(kernel, target, Allocate(local, block(load, kept, save))), BufferCopy(local.name, loads, saves)


def _check_alone(kernel: Kernel, target: For, update: Accumulate, places: Sequence[For]) -> None:
    """Refuses unless each element that a run of the loop accumulates into has one register, and is touched in no other way."""
    m = model(target, kernel.body)
    try:
        with limited():
            for d in dependences(m):
                sides = [a.kind == REDUCE and i.stmt is update for i, a in ((d.source, d.first), (d.target, d.second))]
                bad = d.relation
                if all(sides):
                    bad = bad.subtract(_same(d.relation, [n for n, x in enumerate(d.source.loops) if x in places]))
                if any(sides) and (conflict := conflict_of(m, d, bad)) is not None:
                    raise refuse_conflict(kernel, "promote", f"uses of what `{target.var.name}` accumulates into", conflict)
    except TooHard as error:
        raise refuse(kernel, "promote", f"isl gave up on the uses of `{update.buffer.name}`: {error}") from None


def _same(pairs: Relation, dims: Sequence[int]) -> Relation:
    """Those of the pairs that agree in some dimensions."""
    for n in dims:
        pairs = pairs.equate(isl.dim_type.in_, n, isl.dim_type.out, n)
    return pairs
