"""What a split does with the iterations that do not fill a tile: the strategies `shift_inwards`, `round_up` and `mask`.

(`guard` is an `If`, `peel` is `partition`: both are at hand in `editing.py` and `loop_structure.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.access import in_range, within
from tcomp.ir.expr import Expr, as_expr
from tcomp.ir.simplify import prove, same_dim
from tcomp.schedules.primitives.editing import guard, reads, refuse, replace_buffer, temporary


def masked(kernel: L.Kernel, conditions: Sequence[Expr], stmt: L.Stmt) -> L.Stmt:
    """Every statement inside under conditions of its own. An accumulation adds the identity where they do not hold, if its place is in
    range all the same, and then needs no `If`."""
    match stmt:
        case L.For(_, extent, body) if not E.reads(as_expr(extent)):
            return replace(stmt, body=masked(kernel, conditions, body))
        case L.Block() | L.Allocate():
            return L.with_children(stmt, [masked(kernel, conditions, s) for s in L.children(stmt)])
        case L.Accumulate():
            return masked_accumulation(kernel, conditions, stmt)
    return guard(conditions, stmt)


def masked_accumulation(kernel: L.Kernel, conditions: Sequence[Expr], stmt: L.Accumulate) -> L.Stmt:
    """`if c: s += v` as `s += c ? v : identity`. Conditions that may keep the place of `s` in range stay an `If`; and so do those that
    may keep concurrent iterations apart, as the place is now read and written where they do not hold as well."""
    together = {s.var for s in L.walk(kernel.body) if isinstance(s, L.For) and s.kind in (L.PARALLEL, *L.GPU_AXES)}
    needed = range_depends_on(stmt, conditions) if not together else _related(stmt.indices, conditions) | together
    free = [c for c in conditions if needed.isdisjoint(E.variables(c)) and (E.variables(c) or always_in_range(stmt))]
    kept = [c for c in conditions if c not in free]
    if any(E.reads(c) for c in kept):  # it may be in range only where the others hold
        return guard(conditions, stmt)
    return guard(kept, replace(stmt, value=E.select_where(free, stmt.value, stmt.reducer.identity)))


def always_in_range(stmt: L.Accumulate) -> bool:
    """Whether the place of an accumulation is in range whatever conditions say; what its indices read may be out of range themselves."""
    return not E.reads(*stmt.indices) and in_range(stmt.indices, stmt.buffer.shape)


def range_depends_on(stmt: L.Accumulate, conditions: Sequence[Expr]) -> set[Expr]:
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
            todo += E.variables(*(c for c in conditions if v in E.variables(c)), *([] if v.attr.extent is None else [v.attr.extent]))
    return found


def check_repeatable(loop: L.For) -> None:
    """Refuse unless iterations of the loop may be executed twice: the last ones again, in order, after all of them."""
    local = {s.buffer for s in L.walk(loop.body) if isinstance(s, L.Allocate)}
    for s in L.walk(loop.body):
        if isinstance(s, L.Store | L.Accumulate) and s.buffer not in local:
            start, name = f"iterations of `{loop.var.name}`", s.buffer.name
            if isinstance(s, L.Accumulate):
                why = f"{start} accumulate into `{name}`: one that is executed twice would count twice"
            elif s.buffer in reads([loop.body]):
                why = f"{start} read `{name}`, which they write: executed twice, one may find what it wrote"
            else:
                continue
            raise refuse(why, "the tails guard, mask and peel execute each iteration once")


def padded(kernel: L.Kernel, loop: L.For, end: Expr) -> L.Kernel:
    """The kernel with temporaries large enough for the loop to run up to `end`, the additional iterations writing nothing but padding.
    Refuses where an additional iteration could write what somebody reads."""
    name, inside = loop.var.name, list(L.walk(loop.body))
    if any(isinstance(s, L.While) for s in inside):
        raise refuse(f"there is a while loop inside `{name}`, which may not end in additional iterations")
    local = {s.buffer for s in inside if isinstance(s, L.Allocate)}
    outside = {s.buffer for s in L.walk(kernel.body) if isinstance(s, L.Allocate)} - local
    for s in inside:
        if isinstance(s, L.Store | L.Accumulate) and s.buffer not in local:
            if s.buffer not in outside:
                why = f"additional iterations of `{name}` would write beyond the end of the parameter `{s.buffer.name}`"
                raise refuse(why, "compute it into a temporary first, with cache_write")
            if not any(i is loop.var and _only_padding(kernel, loop, s.buffer, d) for d, i in enumerate(s.indices)):
                why = f"additional iterations of `{name}` may write elements of `{s.buffer.name}` that are read"
                raise refuse(why, "`round_up` the loops that write a temporary before those that read it")
    walked: dict[L.Buffer, set[int]] = {}  # dimensions of temporaries along which the loop runs
    for b, indices in (place for s in inside for place in L.places(s)):
        if b in outside and loop.var in indices:
            walked.setdefault(b, set()).update(d for d, i in enumerate(indices) if i is loop.var)
    for b, dims in walked.items():
        shape = [E.as_dim(E.maximum(as_expr(n), end)) if d in dims else n for d, n in enumerate(b.shape)]
        kernel = replace_buffer(kernel, b, temporary(b.name, b.dtype, shape, b.scope))
    return kernel


def _only_padding(kernel: L.Kernel, loop: L.For, buffer: L.Buffer, d: int) -> bool:
    """Whether nobody reads elements at and beyond the extent of the loop along a dimension, but additional iterations themselves."""
    extent = as_expr(loop.extent)
    if same_dim(buffer.shape[d], extent):
        return True  # there are none yet
    inside = set(L.walk(loop.body))
    reading = ((s, r.args[d]) for s in L.walk(kernel.body) for r in E.reads(*L.expressions(s)) if r.attr is buffer)
    return all(prove(i < extent) or (i is loop.var and s in inside) for s, i in reading)


def check_in_range(loop: L.For, *variables: Expr) -> None:
    """Refuse unless all places inside a loop that depend on the variables are in range whatever their values, and whatever guards say."""
    affected = set(variables)
    for s in L.walk(loop):
        if isinstance(s, L.For) and not affected.isdisjoint(E.variables(as_expr(s.extent))):
            affected.add(s.var)
        for b, indices in L.places(s):
            for i, n in zip(indices, b.shape, strict=True):
                if not affected.isdisjoint(E.variables(i)) and not within(i, n):
                    why = f"cannot prove that `{E.read(b, indices)}` is in range in additional iterations of `{loop.var.name}`"
                    raise refuse(why, "the other tails (guard, mask, peel, shift_inwards) have none")
