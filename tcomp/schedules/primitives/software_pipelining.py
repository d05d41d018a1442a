"""Software pipelining: what a loop copies is copied some iterations ahead, into several copies of the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.ir.loops import SERIAL, Accumulate, Allocate, Buffer, For, Kernel, Stmt, Store, block, walk
from tcomp.schedules.primitives.editing import (
    check_factor,
    find_buffer,
    find_loop,
    fresh,
    guard,
    is_local,
    nesting,
    rebind,
    rebuild,
    refuse,
    renamed,
    replace_loop,
    swap_buffer,
    without_allocation,
)
from tcomp.schedules.primitives.insertion_points import bounds_loops, reads, scope_of, sequence, writes


def pipeline(kernel: Kernel, loop: str, stages: int, *buffers: str) -> tuple[Kernel, str]:
    """Fill buffers of a loop's body `stages - 1` iterations before they are read.

    Each buffer gets a first dimension of `stages`, of which iteration i uses element i % stages. A loop before the loop (the prologue;
    its name is returned) fills the first ones; then each iteration fills, where it stood, the one for `stages - 1` iterations later, if
    there is such an iteration, and computes with its own. `partition` at the last `stages - 1` iterations makes those without a copy (the
    epilogue) a loop of their own, and takes the condition out of the steady state.

    Legal for serial loops with nests in their body that fill the buffers, before these are read, from what the loop does not write; the
    rest of the body only reads them.

    Good for hiding the latency of memory: copies run ahead of the computation. The price is the memory for the copies. On a GPU (below),
    phases that only copy from global to shared memory run in the background from sm_80 on (`cp.async`): the copies of one iteration are
    a group, and one barrier an iteration suffices, behind a wait for all groups but the newest `stages - 2`. So do copies in bulk (`bulk_copy`,
    from sm_90 on), each a run that one thread starts.

      >>> from tcomp import te
      >>> from tcomp.schedules import Schedule
      >>> A, k = te.placeholder((32,), name="A"), te.reduce_axis(32, "k")
      >>> s = Schedule(te.compute((), lambda: te.sum(A[k] * A[k], k), name="C"))
      >>> outer, inner = s.split("C.k", 4)
      >>> s.cache_read("A", outer, "P")
      'P'
      >>> s.pipeline(outer, 2, "P")
      'C.k.o.p'
      >>> print(s)
      kernel C(A: float32[32], C: float32[]) -> (C) {
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
      }

    Tiles of four rows in shared memory, two ahead of the one that the threads compute with:

      >>> A, k = te.placeholder((32, 64), name="A"), te.reduce_axis(32, "k")
      >>> s = Schedule(te.compute((64,), lambda i: te.sum(A[k, i], k), name="C"))
      >>> outer, inner = s.split("C.k", 4)
      >>> s.reorder(outer, "C.i", inner)
      >>> s.cache_read("A", outer, "P", "shared")
      'P'
      >>> s.reorder("P.1", "P.0")
      >>> for loop in ("C.init.i", "C.i", "P.1"):
      ...     s.bind(loop, "thread.x")
      >>> s.pipeline(outer, 3, "P")
      'C.k.o.p'
      >>> print(s)
      kernel C(A: float32[32, 64], C: float32[64]) -> (C) {
        thread.x C.init.i in 0..64 {
          C[C.init.i] = 0.0f
        }
        alloc P: float32[3, 4, 64] shared
        for C.k.o.p in 0..2 {
          thread.x P.1.p in 0..64 {
            for P.0.p in 0..4 {
              P[C.k.o.p, P.0.p, P.1.p] = A[C.k.o.p * 4 + P.0.p, P.1.p]
            }
          }
        }
        for C.k.o in 0..8 {
          thread.x P.1 in 0..64 {
            for P.0 in 0..4 {
              if C.k.o < 6 {
                P[(C.k.o + 2) % 3, P.0, P.1] = A[C.k.o * 4 + P.0 + 8, P.1]
              }
            }
          }
          thread.x C.i in 0..64 {
            for C.k.i in 0..4 {
              C[C.i] += P[C.k.o % 3, C.k.i, C.i]
            }
          }
        }
      }
    """
    target = find_loop(kernel, loop, "pipeline")
    if target.kind != SERIAL:
        raise refuse(kernel, "pipeline", f"`{loop}` is {target.kind}: its iterations do not follow each other")
    check_factor(kernel, "pipeline", stages, "a number of stages of")
    if stages < 2:
        raise refuse(kernel, "pipeline", f"{stages} stages: with two, one iteration runs ahead of another")
    olds = _inside(kernel, target, buffers)
    items = sequence(target.body)
    fills = [item for item in items if any(writes(item, b) for b in olds)]
    _check(kernel, target, olds, items, fills)
    ahead = stages - 1
    first = loop_var(fresh(kernel, loop + ".p"), ahead)
    extent = as_expr(target.extent)
    news = {b: Buffer(b.name, b.dtype, (stages, *b.shape), b.scope) for b in olds}

    def using(stmt: Stmt, slot: Expr) -> Stmt:
        for old, new in news.items():
            stmt = swap_buffer(stmt, old, new, lambda indices: (slot % stages, *indices))
        return stmt

    copies = {fill: _at(using(fill, target.var), target.var, target.var + ahead, target.var + ahead < extent) for fill in fills}
    prologue = [
        _at(using(renamed(fill, lambda name: fresh(kernel, name + ".p")), target.var), target.var, first, first < extent) for fill in fills
    ]
    body = using(rebuild(target.body, copies.get), target.var)
    for old in olds:
        body = without_allocation(body, old)
    new: Stmt = block(For(first, ahead, block(*prologue)), replace(target, body=body))
    for b in reversed(list(news.values())):
        new = Allocate(b, new)
    return nesting(kernel, "pipeline", replace_loop(kernel, target, new)), first.attr.name


def _at(fill: Stmt, var: Expr, moment: Expr, exists: Expr) -> Stmt:
    """What fills the buffers, for another iteration, if there is one."""
    return guard([exists], rebind(fill, {var: moment}))


def _inside(kernel: Kernel, target: For, names: tuple[str, ...]) -> list[Buffer]:
    """The buffers named, which are allocated anew for each iteration."""
    local = [b for b in map(_allocated, walk(target.body)) if b is not None and sequence(scope_of(kernel, b))[0] in sequence(target.body)]
    found = [find_buffer(kernel, name, "pipeline") for name in dict.fromkeys(names)]
    for b in found:
        if b not in local:
            raise refuse(
                kernel, "pipeline", f"`{b.name}` is not allocated in the body of `{target.var.name}`", "cache_read makes such a buffer"
            )
        if any(target.var in E.variables(as_expr(d)) for d in b.shape):
            raise refuse(kernel, "pipeline", f"the shape of `{b.name}` depends on `{target.var.name}`")
    if not found:
        raise refuse(kernel, "pipeline", "it needs the buffers that are filled ahead", "cache_read makes such a buffer")
    return found


def _allocated(s: Stmt) -> Buffer | None:
    return s.buffer if isinstance(s, Allocate) else None


def _check(kernel: Kernel, target: For, buffers: Sequence[Buffer], items: Sequence[Stmt], fills: Sequence[Stmt]) -> None:
    """Refuses fills that depend on what the loop computes, or that other statements wait for or stand between."""
    loop = target.var.name
    for b in buffers:
        if not any(writes(fill, b) for fill in fills):
            raise refuse(kernel, "pipeline", f"nothing in `{loop}` fills `{b.name}`")
        if bounds_loops(target, b):
            raise refuse(kernel, "pipeline", f"the extent of a loop is read from `{b.name}`")
    for s in (s for fill in fills for s in walk(fill)):
        if isinstance(s, Store | Accumulate) and s.buffer not in buffers and not any(is_local(s.buffer, fill) for fill in fills):
            raise refuse(kernel, "pipeline", f"what fills {_names(buffers)} computes `{s.buffer.name}` too")
    for source in sorted(reads(fills) | {r.attr for r in E.reads(as_expr(target.extent))}, key=lambda b: b.name):
        if source not in buffers and any(writes(item, source) for item in items if item not in fills):
            raise refuse(kernel, "pipeline", f"`{source.name}`, which {_names(buffers)} is filled from, is written in `{loop}`")
    for n, item in enumerate(items):
        if item not in fills and reads([item]) & set(buffers) and any(fill in items[n:] for fill in fills):
            raise refuse(kernel, "pipeline", f"{_names(buffers)} is read in `{loop}` before it is filled")


def _names(buffers: Sequence[Buffer]) -> str:
    return ", ".join(f"`{b.name}`" for b in buffers)
