"""Loops over statements in sequence: one loop around them, or one around each."""

from __future__ import annotations

from dataclasses import replace

from tcomp.ir.expr import loop_var
from tcomp.ir.loops import SERIAL, Block, Kernel, Stmt, block
from tcomp.ir.polyhedral.model import TooHard, limited, model
from tcomp.ir.simplify import same_dim
from tcomp.schedules.analysis.legality import Conflict, dependences, violated
from tcomp.schedules.primitives.editing import find_loop, fresh, rebind, rebuild, refuse, refuse_conflict, replace_loop


def fission(kernel: Kernel, loop: str) -> tuple[Kernel, *tuple[str, ...]]:
    """A loop around statements in sequence becomes one loop around each (loop distribution).

    Legal when no iteration of a statement needs what an earlier iteration of a later statement did. Good for giving the statements
    different schedules, and for freeing one that has independent iterations from one that has not. The first loop keeps the name;
    returns the names of all.

      >>> from tcomp.ir.loops import Buffer, Kernel, block, loop, store
      >>> from tcomp.schedules import Schedule
      >>> A, B, C = (Buffer(name, "float32", (9,)) for name in "ABC")
      >>> body = loop("i", 8, lambda i: block(store(B, (i + 1,), A[i] * 2.0), store(C, (i,), B[i] + 1.0)))
      >>> s = Schedule(Kernel("k", (A, B, C), (B, C), (), body))
      >>> s.fission("i")
      ('i', 'i.1')
      >>> print(s)
      kernel k(A: float32[9], B: float32[9], C: float32[9]) -> (B, C) {
        for i in 0..8 {
          B[i + 1] = A[i] * 2.0f
        }
        for i.1 in 0..8 {
          C[i.1] = B[i.1] + 1.0f
        }
      }
    """
    target = find_loop(kernel, loop, "fission")
    if not isinstance(target.body, Block) or len(target.body.stmts) < 2 or target.kind != SERIAL:
        raise refuse(kernel, "fission", f"`{loop}` is no serial loop around several statements")
    names, parts = [loop], [replace(target, body=target.body.stmts[0])]
    for number, s in enumerate(target.body.stmts[1:], 1):
        v = loop_var(fresh(kernel, f"{loop}.{number}"), target.extent)
        names.append(v.name)
        parts.append(replace(target, var=v, body=rebind(s, {target.var: v})))
    conflict = _reversed(kernel, "fission", target, block(*parts), kernel.body)
    if conflict is not None:
        raise refuse_conflict(kernel, "fission", f"in loops of their own, iterations of `{loop}` would change places that", conflict)
    return replace_loop(kernel, target, block(*parts)), *names


def fuse_loops(kernel: Kernel, first: str, second: str) -> Kernel:
    """Two loops of one extent that follow each other become one, around both bodies (loop fusion).

    Legal when no iteration of the second needs what a later iteration of the first does. Good for values that are then still in
    registers or caches when they are used. The loop has the name of the first.

      >>> from tcomp.ir.loops import Buffer, Kernel, block, loop, store
      >>> from tcomp.schedules import Schedule
      >>> A, B, C = (Buffer(name, "float32", (8,)) for name in "ABC")
      >>> body = block(loop("i", 8, lambda i: store(B, (i,), A[i] * 2.0)), loop("j", 8, lambda j: store(C, (j,), B[j] + 1.0)))
      >>> s = Schedule(Kernel("k", (A, B, C), (B, C), (), body))
      >>> s.fuse_loops("i", "j")
      >>> print(s)
      kernel k(A: float32[8], B: float32[8], C: float32[8]) -> (B, C) {
        for i in 0..8 {
          B[i] = A[i] * 2.0f
          C[i] = B[i] + 1.0f
        }
      }
    """
    one, two = find_loop(kernel, first, "fuse_loops"), find_loop(kernel, second, "fuse_loops")
    if one.kind != SERIAL or two.kind != SERIAL:
        raise refuse(kernel, "fuse_loops", f"`{first}` is {one.kind}, `{second}` is {two.kind}; both should be serial")
    if not same_dim(one.extent, two.extent):
        raise refuse(kernel, "fuse_loops", f"`{first}` has {one.extent} iterations, `{second}` has {two.extent}")
    joint = replace(one, body=block(one.body, rebind(two.body, {two.var: one.var})))
    pair = Block((one, two))
    found: list[Stmt] = []

    def edit(s: Stmt) -> Stmt | None:
        if not isinstance(s, Block) or one not in s.stmts or two not in s.stmts:
            return None
        n = s.stmts.index(one)
        if s.stmts[n + 1 : n + 2] != (two,):
            return None
        found.append(Block((*s.stmts[:n], pair, *s.stmts[n + 2 :])))
        return found[0]

    before = rebuild(kernel.body, edit)
    if not found:
        raise refuse(kernel, "fuse_loops", f"`{second}` does not follow `{first}` directly")
    conflict = _reversed(kernel, "fuse_loops", pair, joint, before)
    if conflict is not None:
        raise refuse_conflict(
            kernel, "fuse_loops", f"in one loop, iterations of `{first}` and `{second}` would change places that", conflict
        )
    return kernel.with_body(rebuild(before, lambda s: joint if s is pair else None))


def _reversed(kernel: Kernel, step: str, old: Stmt, new: Stmt, within: Stmt) -> Conflict | None:
    """A dependence of `old`, a part of `within`, that `new`, which has the same statements in the same sequence, does not keep."""
    try:
        with limited():
            m = model(old, within)
            return violated(m, dependences(m), {x.name: x.order for x in model(new, like=m).instances})
    except TooHard as error:
        raise refuse(kernel, step, f"isl gave up on the proof: {error}") from None
