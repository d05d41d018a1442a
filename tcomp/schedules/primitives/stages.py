"""Where a stage is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import (
    Accumulate,
    Allocate,
    Block,
    Buffer,
    For,
    Kernel,
    Stmt,
    Store,
    block,
    expressions,
    map_expressions,
    walk,
)
from tcomp.ir.simplify import difference, prove, simplify
from tcomp.schedules.primitives.edit import (
    find_buffer,
    find_loop,
    guard,
    is_local,
    nesting,
    perfect,
    producers,
    rebuild,
    refuse,
    swap_buffer,
    temporary,
    without_allocation,
)
from tcomp.schedules.regions import accesses, region


def compute_at(kernel: Kernel, stage: str, loop: str, scope: str = "global") -> Kernel:
    """Move the computation of a temporary into a loop of its reader, restricted to the part the loop's body reads.

    The stage must still be as lowered (one loop per dimension outside, folds inside). Its buffer shrinks to the part computed
    and takes the scope given. Legal when all readers stand inside the loop; elements used in several iterations are computed
    again in each.
    """
    target, buffer = find_loop(kernel, loop, "compute_at"), find_buffer(kernel, stage, "compute_at")
    if buffer in kernel.buffers:
        raise refuse(kernel, "compute_at", f"`{stage}` is a parameter, only temporaries move")
    nests = producers(kernel.body, buffer)
    if not nests or any(is_local(buffer, nest) for nest in nests):
        raise refuse(kernel, "compute_at", f"`{stage}` is not computed at the top level (has it been moved already?)")
    if any(s is target for nest in nests for s in walk(nest)):
        raise refuse(kernel, "compute_at", f"loop `{loop}` is one of those that compute `{stage}`")
    outside = rebuild(kernel.body, lambda s: Block(()) if s is target or s in nests else None)
    if accesses(outside, buffer):
        raise refuse(kernel, "compute_at", f"`{stage}` is also read outside of loop `{loop}`")
    if not accesses(target.body, buffer):
        raise refuse(kernel, "compute_at", f"loop `{loop}` does not read `{stage}`")
    if any(r.attr is buffer for nest in nests for s in walk(nest) for r in E.reads(*expressions(s))):
        raise refuse(kernel, "compute_at", f"`{stage}` is computed from its own elements")
    box = region(target.body, buffer, clip=scope != "register")
    local = temporary(kernel, "compute_at", buffer.name, buffer.dtype, box.extent, scope)
    moved = [_restricted(kernel, nest, buffer, local, box.base) for nest in nests]
    readers = swap_buffer(target.body, buffer, local, lambda indices: tuple(i - b for i, b in zip(indices, box.base, strict=True)))
    body = Allocate(local, block(*moved, readers))
    stripped = rebuild(kernel.body, lambda s: Block(()) if s in nests else (replace(target, body=body) if s is target else None))
    return nesting(kernel, "compute_at", kernel.with_body(without_allocation(stripped, buffer)))


def _restricted(kernel: Kernel, nest: Stmt, buffer: Buffer, local: Buffer, base: Sequence[Expr]) -> Stmt:
    """A stage's nest over a box of its buffer, writing into the box."""
    loops, leaf = perfect(nest)
    write = next(s for s in walk(leaf) if isinstance(s, Store | Accumulate) and s.buffer is buffer)
    by_var = {x.var: x for x in loops}
    complete = all(i in by_var and _equal(by_var[i].extent, n) for i, n in zip(write.indices, buffer.shape, strict=True))
    if not complete or len(set(write.indices)) < len(write.indices):
        raise refuse(kernel, "compute_at", f"the loops of `{buffer.name}` have been changed already", "move stages before reshaping them")
    mapping: dict[Expr, Expr] = {}
    outer: list[tuple[Expr, Dim]] = []
    conditions = []
    for index, start, extent, whole in zip(write.indices, base, local.shape, buffer.shape, strict=True):
        v = loop_var(index.attr.name, extent)
        mapping[index] = start + v
        outer.append((v, extent))
        conditions += [start + v >= 0, start + v < as_expr(whole)]
    folds = [x for x in loops if x.var not in mapping]
    body = map_expressions(leaf, lambda e: simplify(E.substitute(e, mapping)))
    places = tuple(v for v, _ in outer)
    body = rebuild(
        body, lambda s: replace(s, buffer=local, indices=places) if isinstance(s, Store | Accumulate) and s.buffer is buffer else None
    )
    if not _reads_in_range(body):  # elements outside of the stage may be computed as well, as nobody uses them
        body = guard(conditions, body)
    for fold in reversed(folds):
        body = replace(fold, body=body)
    for v, extent in reversed(outer):
        body = For(v, extent, body)
    return body


def _equal(a: Dim, b: Dim) -> bool:
    return a == b if isinstance(a, int) and isinstance(b, int) else as_dim(difference(as_expr(a), as_expr(b))) == 0


def _reads_in_range(stmt: Stmt) -> bool:
    """Whether every read is inside its buffer for all values of the loops around it, whatever guards say."""
    return all(
        prove(i >= 0) and prove(i < as_expr(n))
        for s in walk(stmt)
        for r in E.reads(*expressions(s))
        for i, n in zip(r.args, r.attr.shape, strict=True)
    )
