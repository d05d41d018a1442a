"""Promotion: what a loop accumulates into stays in registers while the loop runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import islpy as isl

from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.expr import as_expr
from tcomp.ir.polyhedral.model import REDUCE, model
from tcomp.ir.simplify import prove
from tcomp.schedules.analysis.legality import conflict_of, dependences
from tcomp.schedules.handles import BufferCopy
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import find_buffer, find_loop, fresh, refuse


def promote(kernel: L.Kernel, loop: str, buffer: str, name: str, anew: bool = False) -> tuple[L.Kernel, BufferCopy]:
    """Keep the elements of `buffer` that each iteration of a serial loop accumulates into in registers, the new buffer `name`: they are
    loaded before the loop and stored after it. With `anew` (zero-initialised promotion) the registers start from the identity of the reduction,
    and are accumulated into `buffer` after the loop.

    The copies have the loops and guards that stand around the accumulation inside of `loop`; initialisation has no guards. Returns the
    name of the registers, which knows these loops.

    Legal when the loop has an iteration, all its iterations accumulate into the same elements, by one statement, and it touches them
    in no other way. Good for programs that update a matrix in place: the code generator cannot tell the elements that are accumulated
    into from others of the same buffer that are read, and would store and load them at every step. `anew` sums up in blocks, the loop being
    one of them: rounding errors grow with the length of a block and the number of blocks, not with their product.

    Sources: S. Carr and K. Kennedy, "Scalar replacement in the presence of conditional control flow" (1994); N. Higham, "The accuracy of
    floating point summation" (1993).

      >>> A, k = te.placeholder((9, 4), name="A"), te.reduce_axis(9, "k")
      >>> s = Schedule(te.compute((4,), lambda i: te.sum(A[k, i], k), name="C"))
      >>> s.reorder("C.k", "C.i")
      >>> s.promote("C.k", "C", "acc")
      'acc'
      >>> print(s.kernel.body)
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
    """
    target, source = find_loop(kernel, loop), find_buffer(kernel, buffer)
    if target.kind != L.SERIAL:
        raise refuse(f"`{loop}` is {target.kind}", "it is for loops whose iterations follow each other")
    if not prove(1 <= as_expr(target.extent)):
        raise refuse(f"`{loop}` may have no iteration: its extent is {target.extent}")
    if editing.is_local(source, target):
        raise refuse(f"`{buffer}` is another one in every iteration of `{loop}`")
    found = [s for s in L.walk(target) if isinstance(s, L.Accumulate) and s.buffer is source]
    if len(found) != 1:
        raise refuse(f"{len(found) or 'no'} statements in `{loop}` accumulate into `{buffer}`", "it is for exactly one")
    update = found[0]
    around = [s for s in editing.path(target.body, update) if isinstance(s, L.For | L.If)]
    conditions = [s.cond for s in around if isinstance(s, L.If)]
    if E.reads(*update.indices, *conditions) or any(isinstance(s, L.If) and s.otherwise is not None for s in around):
        raise refuse(f"which elements of `{buffer}` are accumulated into depends on data, or on a branch")
    used = E.variables(*update.indices, *conditions)
    places = [s for s in around if isinstance(s, L.For) and s.var in used]
    if target.var in used or any(target.var in E.variables(as_expr(x.extent)) for x in places):
        raise refuse(f"the iterations of `{loop}` accumulate into different elements of `{buffer}`")
    for x in (s for s in around if isinstance(s, L.For)):
        if x not in places and not prove(1 <= as_expr(x.extent)):
            raise refuse(f"`{x.var.name}` may have no iteration: its extent is {x.extent}")
        if x in places and (x.kind not in (L.SERIAL, L.UNROLLED, L.VECTORIZED) or not isinstance(x.extent, int)):
            raise refuse(f"`{x.var.name}` is {x.kind}, its extent {x.extent}", "registers are for loops of constant extent")
    _check_alone(kernel, target, update, places)

    local = editing.temporary(fresh(kernel, name), source.dtype, [x.extent for x in places], "register")
    cells = tuple(x.var for x in places)

    def copy(prefix: str, move: L.Stmt, guarded: bool = True) -> tuple[L.Stmt, list[str]]:
        for s in reversed(around):
            move = replace(s, body=move) if s in places else L.If(s.cond, move) if isinstance(s, L.If) and guarded else move
        names = {x.var.name: fresh(kernel, f"{prefix}.{n}") for n, x in enumerate(places)}
        return editing.renamed(move, names.__getitem__), list(names.values())

    sums = E.read(local, cells)
    start = update.reducer.identity if anew else E.read(source, update.indices)
    load, loads = copy(local.name, L.Store(local, cells, start), guarded=not anew)
    result = L.Accumulate(source, update.indices, sums, update.reducer) if anew else L.Store(source, update.indices, sums)
    save, saves = copy(source.name, result)
    kept = editing.rebuild(target, lambda s: replace(update, buffer=local, indices=cells) if s is update else None)
    return editing.replaced(kernel, {target: L.Allocate(local, L.block(load, kept, save))}), BufferCopy(
        local.name, loads=loads, stores=saves
    )


def _check_alone(kernel: L.Kernel, target: L.For, update: L.Accumulate, places: Sequence[L.For]) -> None:
    """Refuses unless each element that a run of the loop accumulates into has one register, and is touched in no other way."""
    m = model(target, kernel.body)
    with editing.proof(f"the uses of `{update.buffer.name}`"):
        for d in dependences(m):
            sides = [a.kind == REDUCE and i.stmt is update for i, a in ((d.source, d.first), (d.target, d.second))]
            bad = same = d.relation
            if all(sides):
                for n in (n for n, x in enumerate(d.source.loops) if x in places):
                    same = same.equate(isl.dim_type.in_, n, isl.dim_type.out, n)
                bad = bad.subtract(same)
            if any(sides) and (conflict := conflict_of(m, d, bad)) is not None:
                raise refuse(f"uses of what `{target.var.name}` accumulates into", conflict=conflict)
