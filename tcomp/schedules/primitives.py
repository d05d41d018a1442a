"""Schedule primitives: pure functions from a kernel to an equivalent kernel.

Loops are addressed by the name of their variable, stages by the name of the buffer they compute; both are unique in a kernel and
survive other steps. A primitive that does not apply raises `ScheduleError` and shows the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import gcd

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import (
    KINDS,
    PARALLEL,
    SCOPES,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Accumulate,
    Allocate,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Stmt,
    Store,
    block,
    children,
    expressions,
    map_expressions,
    walk,
    with_children,
)
from tcomp.ir.simplify import difference, linear, prove, simplify
from tcomp.schedules.dependence import conflict
from tcomp.schedules.regions import accesses, region


def refuse(kernel: Kernel, step: str, why: str, hint: str = "") -> ScheduleError:
    return ScheduleError(f"`{step}` does not apply to kernel `{kernel.name}`", where="\n" + str(kernel.body), why=why, hint=hint)


# ---------------------------------------------------------------- finding and replacing


def find_loop(kernel: Kernel, name: str, step: str = "schedule step") -> For:
    for s in walk(kernel.body):
        if isinstance(s, For) and s.var.attr.name == name:
            return s
    raise refuse(kernel, step, f"there is no loop `{name}`", "loops: " + ", ".join(loop_names(kernel)))


def loop_names(kernel: Kernel) -> list[str]:
    return [s.var.attr.name for s in walk(kernel.body) if isinstance(s, For)]


def find_buffer(kernel: Kernel, name: str, step: str = "schedule step") -> Buffer:
    for b in [*kernel.buffers, *(s.buffer for s in walk(kernel.body) if isinstance(s, Allocate))]:
        if b.name == name:
            return b
    raise refuse(kernel, step, f"there is no buffer `{name}`")


def rebuild(stmt: Stmt, edit: Callable[[Stmt], Stmt | None]) -> Stmt:
    """Top-down: `edit` returns a replacement (not descended into), or None to go on inside."""
    edited = edit(stmt)
    if edited is not None:
        return edited
    return with_children(stmt, [rebuild(c, edit) for c in children(stmt)])


def replace_loop(kernel: Kernel, loop: For, new: Stmt) -> Kernel:
    return kernel.with_body(rebuild(kernel.body, lambda s: new if s is loop else None))


def _nesting(kernel: Kernel, step: str, changed: Kernel) -> Kernel:
    """The changed kernel, if what stands inside its vectorized loops can run in lanes."""
    for outer in walk(changed.body):
        if isinstance(outer, For) and outer.kind == VECTORIZED:
            for inner in walk(outer.body):
                if isinstance(inner, For) and inner.kind not in (SERIAL, UNROLLED):
                    why = f"the {inner.kind} loop `{inner.var.name}` would stand inside the vectorized loop `{outer.var.name}`"
                    raise refuse(kernel, step, why)
    return changed


def _fresh(kernel: Kernel, name: str) -> str:
    taken = {*loop_names(kernel), *(b.name for b in kernel.buffers)}
    taken |= {s.buffer.name for s in walk(kernel.body) if isinstance(s, Allocate)}
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}{number}"
    return candidate


def _perfect(loop: Stmt) -> tuple[list[For], Stmt]:
    """The loops nested directly in each other, and what stands inside the last."""
    loops = []
    while isinstance(loop, For):
        loops.append(loop)
        loop = loop.body
    return loops, loop


def _guard(conditions: Sequence[Expr], body: Stmt) -> Stmt:
    """`If` placed below the loops that stand directly inside, so that nests stay perfect."""
    condition = E.all_of([c for c in map(simplify, conditions) if not prove(c)])
    if condition.op == "const":
        return body if condition.attr else Block(())
    loops, leaf = _perfect(body)
    if isinstance(leaf, If) and leaf.otherwise is None:
        leaf = If(E.binary("and", leaf.cond, condition), leaf.then)
    else:
        leaf = If(condition, leaf)
    for outer in reversed(loops):
        leaf = replace(outer, body=leaf)
    return leaf


# ---------------------------------------------------------------- loop shape


def split(kernel: Kernel, loop: str, factor: int) -> tuple[Kernel, str, str]:
    """`for i in n` becomes `for i.o in ceil(n / factor): for i.i in factor`, guarded where factor does not divide n.

    Always legal. Returns the kernel and the names of the two loops.
    """
    target = find_loop(kernel, loop, "split")
    if factor < 1:
        raise refuse(kernel, "split", f"factor {factor} is not positive")
    extent = as_expr(target.extent)
    outer_extent = as_dim((extent + (factor - 1)) // factor)
    outer = loop_var(_fresh(kernel, loop + ".o"), outer_extent)
    inner = loop_var(_fresh(kernel, loop + ".i"), factor)
    index = outer * factor + inner
    body = map_expressions(target.body, lambda e: simplify(E.substitute(e, {target.var: index})))
    body = _guard([index < extent], body)
    new = For(outer, outer_extent, For(inner, factor, body), target.kind)
    return replace_loop(kernel, target, new), outer.attr.name, inner.attr.name


def reorder(kernel: Kernel, *order: str) -> Kernel:
    """Perfectly nested loops take the given order; loops of the nest that are not named keep their places.

    Legal for loops whose iterations are independent and for accumulations (which are commutative up to rounding).
    """
    if len(set(order)) != len(order) or not order:
        raise refuse(kernel, "reorder", f"the order ({', '.join(order)}) should name some loops, each once")
    wanted = [find_loop(kernel, name, "reorder") for name in order]
    top = next(s for s in walk(kernel.body) if s in wanted)
    loops, leaf = _perfect(top)
    if any(w not in loops for w in wanted):
        missing = [w.var.attr.name for w in wanted if w not in loops]
        raise refuse(kernel, "reorder", f"{', '.join(missing)} is not in one perfect nest with {top.var.attr.name}")
    places = iter(wanted)
    arranged = [next(places) if outer in wanted else outer for outer in loops]
    seen: set[Expr] = set()
    for outer in arranged:
        if set(E.variables(as_expr(outer.extent))) & {x.var for x in loops if x.var not in seen}:
            raise refuse(kernel, "reorder", f"the extent of {outer.var.attr.name} depends on a loop that would stand inside it")
        seen.add(outer.var)
    moved = [new.var for old, new in zip(loops, arranged, strict=True) if old is not new]
    if moved and (shared := conflict(leaf, moved, may_fold=True)) is not None:
        raise refuse(kernel, "reorder", f"iterations of {', '.join(v.name for v in moved)} may touch the same element of `{shared.name}`")
    body = leaf
    for outer in reversed(arranged):
        body = replace(outer, body=body)
    return _nesting(kernel, "reorder", replace_loop(kernel, top, body))


def fuse(kernel: Kernel, outer: str, inner: str) -> tuple[Kernel, str]:
    """`for i: for j` directly inside each other become one loop over i * n + j. Legal for loops of one kind."""
    first = find_loop(kernel, outer, "fuse")
    second = first.body
    if not isinstance(second, For) or second.var.attr.name != inner:
        raise refuse(kernel, "fuse", f"`{inner}` does not stand directly inside `{outer}`")
    if first.kind != second.kind:
        raise refuse(kernel, "fuse", f"`{outer}` is {first.kind}, `{inner}` is {second.kind}")
    if first.var in E.variables(as_expr(second.extent)):
        raise refuse(kernel, "fuse", f"the extent of `{inner}` depends on `{outer}`")
    extent = as_dim(as_expr(first.extent) * as_expr(second.extent))
    v = loop_var(_fresh(kernel, f"{outer}_{inner.rsplit('.', 1)[-1]}"), extent)
    mapping = {first.var: v // as_expr(second.extent), second.var: v % as_expr(second.extent)}
    body = map_expressions(second.body, lambda e: simplify(E.substitute(e, mapping)))
    return replace_loop(kernel, first, For(v, extent, body, first.kind)), v.attr.name


def partition(kernel: Kernel, loop: str, point: Dim) -> tuple[Kernel, str, str]:
    """The first `point` iterations and the rest become two loops, each simplified for its range: guards vanish from the first.

    Legal where point <= extent can be proved; a symbolic point is taken to be >= 0, as sizes are. Returns the names of the loops; the
    second is renamed with `.t` (tail).
    """
    target = find_loop(kernel, loop, "partition")
    if prove(as_expr(point) < 0) or not _at_most(as_expr(point), as_expr(target.extent)):
        raise refuse(kernel, "partition", f"cannot prove that {point} lies between 0 and the extent of `{loop}`, {target.extent}")
    head_var = loop_var(loop, point)
    head_body = map_expressions(target.body, lambda e: simplify(E.substitute(e, {target.var: head_var})))
    head = For(head_var, as_dim(point), head_body, target.kind)
    rest = as_dim(as_expr(target.extent) - as_expr(point))
    name = _fresh(kernel, loop + ".t")
    tail_var = loop_var(name, rest)
    tail = rename_inner(kernel, target.body, ".t")
    tail = map_expressions(tail, lambda e: simplify(E.substitute(e, {target.var: tail_var + as_expr(point)})))
    kernel = replace_loop(kernel, target, block(head, For(tail_var, rest, tail, target.kind)))
    return kernel, loop, name


def _at_most(a: Expr, b: Expr) -> bool:
    """Whether a <= b can be proved. x // (c * d) <= y // d follows from x // c <= y, x // d <= y // (c * d) from x <= y // c."""
    if prove(a <= b):
        return True
    (x, m), (y, d) = _quotient(a), _quotient(b)
    common = gcd(m, d)
    return common > 1 and _at_most(simplify(x // (m // common)), simplify(y // (d // common)))


def _quotient(e: Expr) -> tuple[Expr, int]:
    """x and d such that e = x // d: a constant beside a quotient belongs to x."""
    terms = linear(e)
    shift = terms.pop((), 0)
    if len(terms) == 1:
        ((monomial, coefficient),) = terms.items()
        q = monomial[0]
        if len(monomial) == coefficient == 1 and q.op == "floordiv" and q.args[1].op == "const":
            return simplify(q.args[0] + q.args[1] * shift), q.args[1].attr
    return e, 1


def rename_inner(kernel: Kernel, stmt: Stmt, suffix: str) -> Stmt:
    """A copy whose loops and local buffers have names of their own."""
    if isinstance(stmt, For):
        v = loop_var(_fresh(kernel, stmt.var.attr.name + suffix), stmt.extent)
        body = map_expressions(stmt.body, lambda e: E.substitute(e, {stmt.var: v}))
        return For(v, stmt.extent, rename_inner(kernel, body, suffix), stmt.kind)
    if isinstance(stmt, Allocate):
        old = stmt.buffer
        new = Buffer(_fresh(kernel, old.name + suffix), old.dtype, old.shape, old.scope)
        return Allocate(new, rename_inner(kernel, swap_buffer(stmt.body, old, new, lambda indices: indices), suffix))
    return with_children(stmt, [rename_inner(kernel, c, suffix) for c in children(stmt)])


def set_kind(kernel: Kernel, loop: str, kind: str, reassociate: bool = False) -> Kernel:
    """parallel, vectorized, unrolled or serial.

    vectorized and unrolled need a constant extent; parallel and vectorized need iterations that do not write what others touch. A
    loop that accumulates into one element may be vectorized, or bound to thread.x, with `reassociate`: the lanes (threads) are then folded as a binary tree.
    """
    target = find_loop(kernel, loop, kind)
    if kind not in KINDS:
        raise refuse(kernel, kind, f"unknown loop kind; one of {', '.join(KINDS)}")
    if kind in (VECTORIZED, UNROLLED) and not isinstance(target.extent, int):
        raise refuse(kernel, kind, f"the extent of `{loop}` is symbolic: {target.extent}", "split it by a constant first")
    if kind in (PARALLEL, VECTORIZED):
        shared = conflict(target.body, [target.var], may_fold=kind in (VECTORIZED, "thread.x") and reassociate)
        if shared is not None:
            raise refuse(kernel, kind, f"iterations of `{loop}` may touch the same element of `{shared.name}`")
    return _nesting(kernel, kind, replace_loop(kernel, target, replace(target, kind=kind)))


def _local(buffer: Buffer, stmt: Stmt) -> bool:
    return any(isinstance(s, Allocate) and s.buffer is buffer for s in walk(stmt))


# ---------------------------------------------------------------- stages


def producers(stmt: Stmt, buffer: Buffer) -> list[Stmt]:
    """The top-level nests below `stmt` (through blocks and allocations) that write `buffer`, in order."""
    if isinstance(stmt, Block):
        return [p for c in stmt.stmts for p in producers(c, buffer)]
    if isinstance(stmt, Allocate):
        return producers(stmt.body, buffer)
    writes = any(isinstance(s, Store | Accumulate) and s.buffer is buffer for s in walk(stmt))
    return [stmt] if writes else []


def swap_buffer(stmt: Stmt, old: Buffer, new: Buffer, indices: Callable[[tuple[Expr, ...]], tuple[Expr, ...]]) -> Stmt:
    """All accesses of `old` become accesses of `new` at mapped indices."""

    def rule(e: Expr) -> Expr | None:
        return E.read(new, [simplify(i) for i in indices(e.args)]) if e.op == "read" and e.attr is old else None

    stmt = map_expressions(stmt, lambda e: E.rewrite(e, rule))

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, Store | Accumulate) and s.buffer is old:
            return replace(s, buffer=new, indices=tuple(simplify(i) for i in indices(s.indices)))
        return None

    return rebuild(stmt, edit)


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
    if not nests or any(_local(buffer, nest) for nest in nests):
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
    local = _temporary(kernel, "compute_at", buffer.name, buffer.dtype, box.extent, scope)
    moved = [_restricted(kernel, nest, buffer, local, box.base) for nest in nests]
    readers = swap_buffer(target.body, buffer, local, lambda indices: tuple(i - b for i, b in zip(indices, box.base, strict=True)))
    body = Allocate(local, block(*moved, readers))
    stripped = rebuild(kernel.body, lambda s: Block(()) if s in nests else (replace(target, body=body) if s is target else None))
    return _nesting(kernel, "compute_at", kernel.with_body(_without_allocation(stripped, buffer)))


def _temporary(kernel: Kernel, step: str, name: str, dtype: str, shape: Sequence[Dim], scope: str) -> Buffer:
    if scope not in SCOPES:
        raise refuse(kernel, step, f"unknown scope `{scope}`; one of {', '.join(SCOPES)}")
    new = Buffer(name, dtype, shape, scope)
    if scope == "register" and not all(isinstance(n, int) for n in new.shape):
        raise refuse(kernel, step, f"`{name}` has the symbolic shape [{', '.join(map(str, new.shape))}] and cannot live in registers")
    return new


def _without_allocation(stmt: Stmt, buffer: Buffer) -> Stmt:
    return rebuild(stmt, lambda s: _without_allocation(s.body, buffer) if isinstance(s, Allocate) and s.buffer is buffer else None)


def _restricted(kernel: Kernel, nest: Stmt, buffer: Buffer, local: Buffer, base: Sequence[Expr]) -> Stmt:
    """A stage's nest over a box of its buffer, writing into the box."""
    loops, leaf = _perfect(nest)
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
        body = _guard(conditions, body)
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


def cache_write(kernel: Kernel, stage: str, name: str) -> Kernel:
    """Compute a stage into a new temporary `name` and copy it: the temporary can then be moved into the loops of the copy.

    Always legal. The copy is one nest with the loops `stage.0`, `stage.1`, ...
    """
    target = find_buffer(kernel, stage, "cache_write")
    nests = producers(kernel.body, target)
    if not nests or any(_local(target, nest) for nest in nests):
        raise refuse(kernel, "cache_write", f"`{stage}` is not computed at the top level")
    local = Buffer(_fresh(kernel, name), target.dtype, target.shape)
    loops = [(loop_var(_fresh(kernel, f"{stage}.{d}"), extent), extent) for d, extent in enumerate(target.shape)]
    places = tuple(v for v, _ in loops)
    copy: Stmt = Store(target, places, E.read(local, places))
    for v, extent in reversed(loops):
        copy = For(v, extent, copy)

    def edit(s: Stmt) -> Stmt | None:
        if s not in nests:
            return None
        moved = swap_buffer(s, target, local, lambda indices: indices)
        return block(moved, copy) if s is nests[-1] else moved

    return kernel.with_body(Allocate(local, rebuild(kernel.body, edit)))


def cache_read(kernel: Kernel, buffer: str, loop: str | None, name: str, scope: str = "global") -> Kernel:
    """Copy the part of a buffer that a loop's body reads into a new buffer first, and read that instead.

    With `loop` None the whole buffer is copied before everything else. Legal when the body does not write the buffer.
    The copy is a stage called `name`, one loop per dimension.
    """
    source = find_buffer(kernel, buffer, "cache_read")
    where = kernel.body if loop is None else find_loop(kernel, loop, "cache_read").body
    if any(isinstance(s, Store | Accumulate) and s.buffer is source for s in walk(where)):
        raise refuse(kernel, "cache_read", f"`{buffer}` is written where the copy would be read")
    if not accesses(where, source):
        raise refuse(kernel, "cache_read", f"`{buffer}` is not read there")
    name = _fresh(kernel, name)
    box = region(where, source)
    local = _temporary(kernel, "cache_read", name, source.dtype, box.extent, scope)
    loops = [(loop_var(f"{name}.{d}", extent), extent) for d, extent in enumerate(box.extent)]
    places = tuple(v for v, _ in loops)
    index = [simplify(b + v) for b, v in zip(box.base, places, strict=True)]
    copy: Stmt = _guard(
        [c for i, n in zip(index, source.shape, strict=True) for c in (i >= 0, i < as_expr(n))], Store(local, places, E.read(source, index))
    )
    for v, extent in reversed(loops):
        copy = For(v, extent, copy)
    inside = swap_buffer(where, source, local, lambda indices: tuple(i - b for i, b in zip(indices, box.base, strict=True)))
    body = Allocate(local, block(copy, inside))
    if loop is None:
        return kernel.with_body(body)
    return replace_loop(kernel, (target := find_loop(kernel, loop)), replace(target, body=body))


def relayout(kernel: Kernel, buffer: str, dim: int, factor: int) -> Kernel:
    """Block one dimension of a temporary: element [.., i, ..] moves to [i // factor, .., i % factor] (a packed panel).

    The block index comes first and the inside last; the extent is padded up. Always legal for temporaries.
    """
    old = find_buffer(kernel, buffer, "relayout")
    if old in kernel.buffers:
        raise refuse(kernel, "relayout", f"`{buffer}` is a parameter; its layout is part of the kernel's signature")
    if not 0 <= dim < len(old.shape) or factor < 1:
        raise refuse(kernel, "relayout", f"`{buffer}` of {len(old.shape)} dimensions cannot be blocked by {factor} along dimension {dim}")
    blocks = as_dim((as_expr(old.shape[dim]) + (factor - 1)) // factor)
    rest = tuple(n for d, n in enumerate(old.shape) if d != dim)
    new = Buffer(old.name, old.dtype, (blocks, *rest, factor), old.scope)

    def mapped(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        others = tuple(i for d, i in enumerate(indices) if d != dim)
        return (indices[dim] // factor, *others, indices[dim] % factor)

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, Allocate) and s.buffer is old:
            return Allocate(new, swap_buffer(s.body, old, new, mapped))
        return None

    return kernel.with_body(rebuild(kernel.body, edit))


def rfactor(kernel: Kernel, stage: str, fold: str, lanes: int) -> tuple[Kernel, str]:
    """Split a fold into `lanes` interleaved partial folds: partial[.., l] folds the elements congruent to l, then the partial
    results are folded in order of l.

    Reassociates the reduction (in a fixed way). The stage must be as lowered. Returns the kernel and the new stage's name.
    """
    buffer = find_buffer(kernel, stage, "rfactor")
    nests = producers(kernel.body, buffer)
    if len(nests) != 2:
        raise refuse(kernel, "rfactor", f"`{stage}` is not a plain reduction (a nest that clears and one that accumulates)")
    loops, leaf = _perfect(nests[1])
    if not isinstance(leaf, Accumulate) or any(i not in [x.var for x in loops] for i in leaf.indices):
        raise refuse(kernel, "rfactor", f"`{stage}` has been scheduled already")
    if any(r.attr is buffer for r in E.reads(leaf.value)):
        raise refuse(kernel, "rfactor", f"`{stage}` is computed from its own elements")
    target = next((x for x in loops if x.var.attr.name == fold), None)
    if target is None or target.var in leaf.indices:
        raise refuse(kernel, "rfactor", f"`{fold}` is not a fold of `{stage}`")
    if lanes < 1:
        raise refuse(kernel, "rfactor", f"{lanes} lanes")
    name = _fresh(kernel, stage + ".p")
    partial = Buffer(name, buffer.dtype, (*buffer.shape, lanes))
    extent = as_expr(target.extent)
    outer_extent = as_dim((extent + (lanes - 1)) // lanes)
    outer, lane = loop_var(_fresh(kernel, fold + ".o"), outer_extent), loop_var(f"{name}.lane", lanes)
    index = outer * lanes + lane
    value = simplify(E.substitute(leaf.value, {target.var: index}))
    update: Stmt = _guard([index < extent], Accumulate(partial, (*leaf.indices, lane), value, leaf.reducer))
    for x in reversed([x for x in loops if x.var not in leaf.indices]):
        update = For(outer, outer_extent, update) if x is target else replace(x, body=update)
    spatial = [x for x in loops if x.var in leaf.indices]

    def renamed(suffix: str) -> dict[Expr, Expr]:
        tails = [x.var.attr.name.rsplit(".", 1)[-1] for x in spatial]
        tails = [t if [*tails, "lane"].count(t) == 1 else f"{t}{n}" for n, t in enumerate(tails)]
        return {x.var: loop_var(_fresh(kernel, f"{name}.{suffix}{t}"), x.extent) for x, t in zip(spatial, tails, strict=True)}

    def nest(mapping: Mapping[Expr, Expr], inner: Stmt, lane_var: Expr) -> Stmt:
        inner = map_expressions(inner, lambda e: E.substitute(e, mapping))
        inner = For(lane_var, lanes, inner)
        for x in reversed(spatial):
            inner = For(mapping[x.var], x.extent, inner)
        return inner

    init_lane = loop_var(f"{name}.init.lane", lanes)
    init = nest(renamed("init."), Store(partial, (*leaf.indices, init_lane), leaf.reducer.identity), init_lane)
    accumulate = nest(renamed(""), update, lane)
    final_lane = loop_var(_fresh(kernel, f"{stage}.lane"), lanes)
    final: Stmt = Accumulate(buffer, leaf.indices, E.read(partial, (*leaf.indices, final_lane)), leaf.reducer)
    final = For(final_lane, lanes, final)
    for x in reversed(spatial):
        final = replace(x, body=final)
    new = Allocate(partial, block(init, accumulate, nests[0], final))
    body = rebuild(kernel.body, lambda s: new if s is nests[1] else (Block(()) if s is nests[0] else None))
    return kernel.with_body(_hoist_allocation(body, partial)), name


def _hoist_allocation(stmt: Stmt, buffer: Buffer) -> Stmt:
    """Allocations of temporaries enclose the whole body, so that all nests stay siblings in one block."""
    body = _without_allocation(stmt, buffer)
    allocations = []
    while isinstance(body, Allocate):
        allocations.append(body.buffer)
        body = body.body
    for b in reversed([*allocations, buffer]):
        body = Allocate(b, body)
    return body


def set_scope(kernel: Kernel, buffer: str, scope: str) -> Kernel:
    """Where a temporary lives: `global`, `shared` or `register` (constant shape)."""
    old = find_buffer(kernel, buffer, "set_scope")
    if old in kernel.buffers:
        raise refuse(kernel, "set_scope", f"`{buffer}` is a parameter, it is in global memory")
    new = _temporary(kernel, "set_scope", old.name, old.dtype, old.shape, scope)
    return kernel.with_body(
        rebuild(
            kernel.body,
            lambda s: Allocate(new, swap_buffer(s.body, old, new, lambda i: i)) if isinstance(s, Allocate) and s.buffer is old else None,
        )
    )


# ---------------------------------------------------------------- clean-up


def clean(kernel: Kernel) -> Kernel:
    """Simplify expressions, turn guards on a loop variable into shorter extents, drop empty and one-trip loops."""
    return kernel.with_body(_clean(kernel.body))


def _clean(s: Stmt) -> Stmt:
    match s:
        case Block(stmts):
            return block(*(c for c in map(_clean, stmts) if not _empty(c)))
        case For(v, extent, body, kind):
            extent = as_dim(simplify(as_expr(extent)))
            if extent == 0:
                return Block(())
            if extent == 1 and kind != VECTORIZED:
                return _clean(map_expressions(body, lambda e: simplify(E.substitute(e, {v: as_expr(0)}))))
            body = _clean(body)
            if _empty(body):
                return Block(())
            if kind != VECTORIZED and (shorter := _limit(v, extent, body)) is not None:
                w = loop_var(v.attr.name, shorter)
                return _clean(For(w, shorter, map_expressions(body, lambda e: simplify(E.substitute(e, {v: w}))), kind))
            return For(v, extent, body, kind)
        case If(cond, then, otherwise):
            cond = simplify(cond)
            if cond.op == "const":
                return _clean(then) if cond.attr else (Block(()) if otherwise is None else _clean(otherwise))
            then = _clean(then)
            return Block(()) if _empty(then) and otherwise is None else If(cond, then, None if otherwise is None else _clean(otherwise))
        case Allocate(b, body):
            body = _clean(body)
            return body if not any(True for x in walk(body) if _touches(x, b)) else Allocate(b, body)
    stmt = map_expressions(s, simplify) if expressions(s) and not children(s) else s
    return stmt if not children(stmt) else with_children(stmt, [_clean(c) for c in children(stmt)])


def _touches(s: Stmt, b: Buffer) -> bool:
    return (isinstance(s, Store | Accumulate) and s.buffer is b) or any(e.attr is b for e in E.reads(*expressions(s)))


def _empty(s: Stmt) -> bool:
    return isinstance(s, Block) and not s.stmts


def _limit(v: Expr, extent: Dim, body: Stmt) -> Dim | None:
    """A smaller extent, where everything inside the loop stands under a guard `v < constant`."""
    _, leaf = _perfect(body)
    if not isinstance(leaf, If) or leaf.otherwise is not None or not isinstance(extent, int):
        return None
    for condition in _conjuncts(leaf.cond):
        if condition.op == "lt" and condition.args[0] is v and condition.args[1].op == "const" and 0 <= condition.args[1].attr < extent:
            return int(condition.args[1].attr)
    return None


def _conjuncts(e: Expr) -> list[Expr]:
    return [*_conjuncts(e.args[0]), *_conjuncts(e.args[1])] if e.op == "and" and e.dtype == "bool" else [e]
