"""What primitives are made of: finding loops and buffers of a kernel, replacing them, and refusing a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, loop_var
from tcomp.ir.loops import (
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
    children,
    map_expressions,
    walk,
    with_children,
)
from tcomp.ir.simplify import prove, simplify


def refuse(kernel: Kernel, step: str, why: str, hint: str = "") -> ScheduleError:
    return ScheduleError(f"`{step}` does not apply to kernel `{kernel.name}`", where="\n" + str(kernel.body), why=why, hint=hint)


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


def nesting(kernel: Kernel, step: str, changed: Kernel) -> Kernel:
    """The changed kernel, if what stands inside its vectorized loops can run in lanes."""
    for outer in walk(changed.body):
        if isinstance(outer, For) and outer.kind == VECTORIZED:
            for inner in walk(outer.body):
                if isinstance(inner, For) and inner.kind not in (SERIAL, UNROLLED):
                    why = f"the {inner.kind} loop `{inner.var.name}` would stand inside the vectorized loop `{outer.var.name}`"
                    raise refuse(kernel, step, why)
    return changed


def fresh(kernel: Kernel, name: str) -> str:
    taken = {*loop_names(kernel), *(b.name for b in kernel.buffers)}
    taken |= {s.buffer.name for s in walk(kernel.body) if isinstance(s, Allocate)}
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}{number}"
    return candidate


def perfect(loop: Stmt) -> tuple[list[For], Stmt]:
    """The loops nested directly in each other, and what stands inside the last."""
    loops = []
    while isinstance(loop, For):
        loops.append(loop)
        loop = loop.body
    return loops, loop


def guard(conditions: Sequence[Expr], body: Stmt) -> Stmt:
    """`If` placed below the loops that stand directly inside, so that nests stay perfect."""
    condition = E.all_of([c for c in map(simplify, conditions) if not prove(c)])
    if condition.op == "const":
        return body if condition.attr else Block(())
    loops, leaf = perfect(body)
    if isinstance(leaf, If) and leaf.otherwise is None:
        leaf = If(E.binary("and", leaf.cond, condition), leaf.then)
    else:
        leaf = If(condition, leaf)
    for outer in reversed(loops):
        leaf = replace(outer, body=leaf)
    return leaf


def conjuncts(e: Expr) -> list[Expr]:
    return [*conjuncts(e.args[0]), *conjuncts(e.args[1])] if e.op == "and" and e.dtype == "bool" else [e]


def rename_inner(kernel: Kernel, stmt: Stmt, suffix: str) -> Stmt:
    """A copy whose loops and local buffers have names of their own."""
    if isinstance(stmt, For):
        v = loop_var(fresh(kernel, stmt.var.attr.name + suffix), stmt.extent)
        body = map_expressions(stmt.body, lambda e: E.substitute(e, {stmt.var: v}))
        return For(v, stmt.extent, rename_inner(kernel, body, suffix), stmt.kind)
    if isinstance(stmt, Allocate):
        old = stmt.buffer
        new = Buffer(fresh(kernel, old.name + suffix), old.dtype, old.shape, old.scope)
        return Allocate(new, rename_inner(kernel, swap_buffer(stmt.body, old, new, lambda indices: indices), suffix))
    return with_children(stmt, [rename_inner(kernel, c, suffix) for c in children(stmt)])


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


def producers(stmt: Stmt, buffer: Buffer) -> list[Stmt]:
    """The top-level nests below `stmt` (through blocks and allocations) that write `buffer`, in order."""
    if isinstance(stmt, Block):
        return [p for c in stmt.stmts for p in producers(c, buffer)]
    if isinstance(stmt, Allocate):
        return producers(stmt.body, buffer)
    writes = any(isinstance(s, Store | Accumulate) and s.buffer is buffer for s in walk(stmt))
    return [stmt] if writes else []


def is_local(buffer: Buffer, stmt: Stmt) -> bool:
    return any(isinstance(s, Allocate) and s.buffer is buffer for s in walk(stmt))


def temporary(kernel: Kernel, step: str, name: str, dtype: str, shape: Sequence[Dim], scope: str) -> Buffer:
    if scope not in SCOPES:
        raise refuse(kernel, step, f"unknown scope `{scope}`; one of {', '.join(SCOPES)}")
    new = Buffer(name, dtype, shape, scope)
    if scope == "register" and not all(isinstance(n, int) for n in new.shape):
        raise refuse(kernel, step, f"`{name}` has the symbolic shape [{', '.join(map(str, new.shape))}] and cannot live in registers")
    return new


def without_allocation(stmt: Stmt, buffer: Buffer) -> Stmt:
    return rebuild(stmt, lambda s: without_allocation(s.body, buffer) if isinstance(s, Allocate) and s.buffer is buffer else None)


def hoist_allocation(stmt: Stmt, buffer: Buffer) -> Stmt:
    """Allocations of temporaries enclose the whole body, so that all nests stay siblings in one block."""
    body = without_allocation(stmt, buffer)
    allocations = []
    while isinstance(body, Allocate):
        allocations.append(body.buffer)
        body = body.body
    for b in reversed([*allocations, buffer]):
        body = Allocate(b, body)
    return body
