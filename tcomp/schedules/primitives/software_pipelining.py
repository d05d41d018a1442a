"""Software pipelining: what a loop copies is copied some iterations ahead, into several copies of the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.schedules.handles import Loop, Stage
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import fresh, guard, reads, rebind, refuse_if, sequence, swap_buffer, writes


def pipeline(kernel: L.Kernel, loop: Loop, stages: int, *buffers: Stage) -> tuple[L.Kernel, str]:
    """Fill buffers of a loop's body `stages - 1` iterations before they are read.

    Each buffer gets a first dimension of `stages`, of which iteration i uses element i % stages. A loop before the loop (the prologue;
    its name is returned) fills the first ones; then each iteration fills, where it stood, the one for `stages - 1` iterations later, if
    there is such an iteration, and computes with its own. `partition` at the last `stages - 1` iterations makes those without a copy (the
    epilogue) a loop of their own, and takes the condition out of the steady state.

    Legal for serial loops with nests in their body that fill the buffers, before these are read, from what the loop does not write; the
    rest of the body only reads them. Good for hiding the latency of memory; costs the memory for the copies. On a GPU, phases that
    only copy from global to shared memory run in the background from sm_80 on (`cp.async`): the copies of one iteration are a group, and
    one barrier an iteration suffices, behind a wait for all groups but the newest `stages - 2`. So do copies in bulk (`bulk_copy`, from
    sm_90 on), each a run that one thread starts.

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
    target = editing.find_loop(kernel, loop)
    refuse_if(target.kind != L.SERIAL, f"`{loop}` is {target.kind}: its iterations do not follow each other")
    editing.check_factor(stages, "a number of stages of")
    refuse_if(stages < 2, f"{stages} stages: with two, one iteration runs ahead of another")
    items, olds = sequence(target.body), _inside(kernel, target, buffers)
    fills = [item for item in items if any(writes(item, b) for b in olds)]
    _check(target, olds, items, fills)
    ahead = stages - 1
    first, extent = loop_var(fresh(kernel, f"{target.var.name}.p"), ahead), as_expr(target.extent)
    news = {b: L.Buffer(b.name, b.dtype, (stages, *b.shape), b.scope) for b in olds}

    def using(stmt: L.Stmt, slot: Expr) -> L.Stmt:
        for old, new in news.items():
            stmt = swap_buffer(stmt, old, new, lambda indices: (slot % stages, *indices))
        return stmt

    def fill_for(fill: L.Stmt, iteration: Expr) -> L.Stmt:
        """What fills the buffers, for another iteration, if there is one."""
        return guard([iteration < extent], rebind(using(fill, target.var), {target.var: iteration}))

    copies = {fill: fill_for(fill, target.var + ahead) for fill in fills}
    prologue = [fill_for(editing.renamed(fill, lambda name: fresh(kernel, name + ".p")), first) for fill in fills]
    body = using(editing.rebuild(target.body, copies.get), target.var)
    for old in olds:
        body = editing.without_allocation(body, old)
    new = L.block(L.For(first, ahead, L.block(*prologue)), replace(target, body=body))
    return editing.nesting(editing.replaced(kernel, {target: editing.allocated(news.values(), new)})), first.name


def _inside(kernel: L.Kernel, target: L.For, names: Sequence[Stage]) -> list[L.Buffer]:
    """The buffers named, which are allocated once more for each iteration."""
    found = [editing.find_buffer(kernel, name) for name in dict.fromkeys(names)]
    hint = "cache_read makes such a buffer"
    for b in found:
        here = editing.is_local(b, target) and sequence(editing.scope_of(kernel, b))[0] in sequence(target.body)
        refuse_if(not here, f"`{b.name}` is not allocated in the body of `{target.var.name}`", hint)
        refuse_if(any(target.var in E.variables(as_expr(d)) for d in b.shape), f"the shape of `{b.name}` depends on `{target.var.name}`")
    refuse_if(not found, "it needs the buffers that are filled ahead", hint)
    return found


def _check(target: L.For, buffers: Sequence[L.Buffer], items: Sequence[L.Stmt], fills: Sequence[L.Stmt]) -> None:
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
