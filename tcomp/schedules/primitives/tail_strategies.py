"""What a split does with the iterations that do not fill a tile: the strategies `shift_inwards`, `round_up` and `mask`.

(`guard` is an `If`, `peel` is `partition`: both are at hand in `edit.py` and `shape.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.access import in_range, within
from tcomp.ir.expr import Expr, as_expr
from tcomp.ir.loops import (
    GPU_AXES,
    PARALLEL,
    Accumulate,
    Allocate,
    Block,
    Buffer,
    For,
    Kernel,
    Stmt,
    Store,
    While,
    children,
    expressions,
    places,
    walk,
    with_children,
)
from tcomp.ir.simplify import prove, same_dim
from tcomp.schedules.primitives.editing import guard, refuse, replace_buffer, temporary
from tcomp.schedules.primitives.insertion_points import reads


def masked(kernel: Kernel, conditions: Sequence[Expr], stmt: Stmt) -> Stmt:
    """Every statement inside under conditions of its own. An accumulation adds the identity where they do not hold, if its place is in
    range all the same, and then needs no `If`."""
    match stmt:
        case For(_, extent, body) if not E.reads(as_expr(extent)):
            return replace(stmt, body=masked(kernel, conditions, body))
        case Block() | Allocate():
            return with_children(stmt, [masked(kernel, conditions, s) for s in children(stmt)])
        case Accumulate():
            return masked_accumulation(kernel, conditions, stmt)
    return guard(conditions, stmt)


def masked_accumulation(kernel: Kernel, conditions: Sequence[Expr], stmt: Accumulate) -> Stmt:
    """`if c: s += v` as `s += c ? v : identity`. Conditions that may keep the place of `s` in range stay an `If`; and so do those that
    may keep concurrent iterations apart, as the place is now read and written where they do not hold as well."""
    together = {s.var for s in walk(kernel.body) if isinstance(s, For) and s.kind in (PARALLEL, *GPU_AXES)}
    needed = range_depends_on(stmt, conditions) if not together else _related(stmt.indices, conditions) | together
    free = [c for c in conditions if needed.isdisjoint(E.variables(c)) and (E.variables(c) or always_in_range(stmt))]
    kept = [c for c in conditions if c not in free]
    if any(E.reads(c) for c in kept):  # it may be in range only where the others hold
        return guard(conditions, stmt)
    return guard(kept, replace(stmt, value=E.select_where(free, stmt.value, stmt.reducer.identity)))


def always_in_range(stmt: Accumulate) -> bool:
    """Whether the place of an accumulation is in range whatever conditions say; what its indices read may be out of range themselves."""
    return not E.reads(*stmt.indices) and in_range(stmt.indices, stmt.buffer.shape)


def range_depends_on(stmt: Accumulate, conditions: Sequence[Expr]) -> set[Expr]:
    """The variables that, under the conditions, decide whether the place of an accumulation is in range; none if it always is."""
    return set() if always_in_range(stmt) else _related(stmt.indices, conditions)


def _related(indices: Sequence[Expr], conditions: Sequence[Expr]) -> set[Expr]:
    """The variables that the range of indices may depend on, through conditions and through extents of loops."""
    found: set[Expr] = set()
    todo = [v for i in indices for v in E.variables(i)]
    while todo:
        v = todo.pop()
        if v not in found:
            found.add(v)
            mates = [c for c in conditions if v in E.variables(c)]
            todo += E.variables(*mates, *([] if v.attr.extent is None else [v.attr.extent]))
    return found


def repeatable(kernel: Kernel, loop: For) -> None:
    """Refuse unless iterations of the loop may be executed twice: the last ones again, in order, after all of them."""
    local = {s.buffer for s in walk(loop.body) if isinstance(s, Allocate)}
    name = loop.var.attr.name
    for s in walk(loop.body):
        if isinstance(s, Accumulate) and s.buffer not in local:
            why = f"iterations of `{name}` accumulate into `{s.buffer.name}`: one that is executed twice would count twice"
            raise refuse(kernel, "split", why, "the tails guard, mask and peel execute each iteration once")
        if isinstance(s, Store) and s.buffer not in local and s.buffer in reads([loop.body]):
            why = f"iterations of `{name}` read `{s.buffer.name}`, which they write: executed twice, one may find what it wrote"
            raise refuse(kernel, "split", why, "the tails guard, mask and peel execute each iteration once")


def padded(kernel: Kernel, loop: For, end: Expr) -> Kernel:
    """The kernel with temporaries large enough for the loop to run up to `end`, the additional iterations writing nothing but padding.

    Refuses where an additional iteration could write what somebody reads.
    """
    name, inside = loop.var.attr.name, list(walk(loop.body))
    if any(isinstance(s, While) for s in inside):
        raise refuse(kernel, "split", f"there is a while loop inside `{name}`, which may not end in additional iterations")
    local = {s.buffer for s in inside if isinstance(s, Allocate)}
    outside = {s.buffer for s in walk(kernel.body) if isinstance(s, Allocate)} - local
    sides: dict[tuple[Buffer, int], None] = {}  # dimensions of temporaries that the loop walks along
    for s in inside:
        sides |= {(b, d): None for b, indices in places(s) if b in outside for d, i in enumerate(indices) if i is loop.var}
    for s in inside:
        if isinstance(s, Store | Accumulate) and s.buffer not in local:
            if s.buffer not in outside:
                why = f"additional iterations of `{name}` would write beyond the end of the parameter `{s.buffer.name}`"
                raise refuse(kernel, "split", why, "compute it into a temporary first, with cache_write")
            if not any(i is loop.var and _only_padding(kernel, loop, s.buffer, d) for d, i in enumerate(s.indices)):
                why = f"additional iterations of `{name}` may write elements of `{s.buffer.name}` that are read"
                raise refuse(kernel, "split", why, "`round_up` the loops that write a temporary before those that read it")
    for b in dict.fromkeys(b for b, _ in sides):
        shape = [E.maximum(as_expr(n), end) if (b, d) in sides else n for d, n in enumerate(b.shape)]
        kernel = replace_buffer(kernel, b, temporary(kernel, "split", b.name, b.dtype, [E.as_dim(n) for n in shape], b.scope))
    return kernel


def _only_padding(kernel: Kernel, loop: For, buffer: Buffer, d: int) -> bool:
    """Whether nobody reads elements at and beyond the extent of the loop along a dimension, but additional iterations themselves."""
    extent = as_expr(loop.extent)
    if same_dim(buffer.shape[d], extent):
        return True  # there are none yet
    within = {id(s) for s in walk(loop.body)}
    return all(
        prove(r.args[d] < extent) or (r.args[d] is loop.var and id(s) in within)
        for s in walk(kernel.body)
        for r in E.reads(*expressions(s))
        if r.attr is buffer
    )


def check_in_range(kernel: Kernel, loop: For, *variables: Expr) -> None:
    """Refuse unless all places inside a loop that depend on the variables are in range whatever their values, and whatever guards say."""
    affected = set(variables)
    for s in walk(loop):
        if isinstance(s, For) and not affected.isdisjoint(E.variables(as_expr(s.extent))):
            affected.add(s.var)
        for b, indices in places(s):
            for i, n in zip(indices, b.shape, strict=True):
                if not affected.isdisjoint(E.variables(i)) and not within(i, n):
                    why = f"cannot prove that `{E.read(b, indices)}` is in range in additional iterations of `{loop.var.attr.name}`"
                    raise refuse(kernel, "split", why, "the other tails (guard, mask, peel, shift_inwards) have none")
