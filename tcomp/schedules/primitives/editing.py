"""What primitives are made of: finding loops and buffers of a kernel, replacing them, and refusing a step."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import (
    GPU_AXES,
    SCOPES,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Allocate,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Prefetch,
    Stmt,
    While,
    children,
    map_expressions,
    places,
    redirect,
    walk,
    with_children,
)
from tcomp.ir.names import unused
from tcomp.ir.simplify import prove, simplify
from tcomp.schedules.analysis.legality import Conflict


def refuse(kernel: Kernel, step: str, why: str, hint: str = "") -> ScheduleError:
    """The error for a step that does not apply."""
    return ScheduleError(f"`{step}` does not apply to kernel `{kernel.name}`", where="\n" + str(kernel.body), why=why, hint=hint)


def refuse_conflict(kernel: Kernel, step: str, what: str, conflict: Conflict, hint: str = "") -> ScheduleError:
    """A refusal that carries the witness: `what` conflicts."""
    error = refuse(kernel, step, f"{what} {conflict}", hint)
    error.witness = conflict.witness
    return error


LONGEST = 1 << 31  # iterations of one tile: index arithmetic has 64 bits


def check_factor(kernel: Kernel, step: str, factor: int, what: str = "factor") -> None:
    """Refuse unless a loop may have this many iterations."""
    if not 1 <= factor <= LONGEST:
        raise refuse(kernel, step, f"{what} {factor} is not positive" if factor < 1 else f"{what} {factor} is more than {LONGEST}")


def find_loop(kernel: Kernel, name: str, step: str = "schedule step") -> For:
    """The loop of a name. Raises `ScheduleError`."""
    for s in walk(kernel.body):
        if isinstance(s, For) and s.var.attr.name == name:
            return s
    raise refuse(kernel, step, f"there is no loop `{name}`", near(name, loop_names(kernel), "loops"))


def loop_names(kernel: Kernel) -> list[str]:
    """The names of all loops, in program order."""
    return [s.var.attr.name for s in walk(kernel.body) if isinstance(s, For)]


def enclosing(kernel: Kernel, target: Stmt) -> list[For]:
    """The loops around a statement."""
    return [s for s in walk(kernel.body) if isinstance(s, For) and s is not target and any(x is target for x in walk(s.body))]


def find_buffer(kernel: Kernel, name: str, step: str = "schedule step") -> Buffer:
    """The buffer of a name. Raises `ScheduleError`."""
    buffers = {b.name: b for b in (*kernel.buffers, *(s.buffer for s in walk(kernel.body) if isinstance(s, Allocate)))}
    if name in buffers:
        return buffers[name]
    raise refuse(kernel, step, f"there is no buffer `{name}`", near(name, list(buffers), "buffers"))


def near(name: str, known: Sequence[str], what: str) -> str:
    """A hint for a name that is not known."""
    close = get_close_matches(name, known, n=1)
    return (f"did you mean `{close[0]}`? " if close else "") + f"{what}: {', '.join(known)}"


def rebuild(stmt: Stmt, edit: Callable[[Stmt], Stmt | None]) -> Stmt:
    """Top-down: `edit` returns a replacement (not descended into), or None to go on inside. What has no replacement inside stays itself."""
    edited = edit(stmt)
    if edited is not None:
        return edited
    inner = children(stmt)
    new = [rebuild(c, edit) for c in inner]
    return stmt if all(a is b for a, b in zip(inner, new, strict=True)) else with_children(stmt, new)


def replace_loop(kernel: Kernel, loop: For, new: Stmt) -> Kernel:
    """The kernel with another statement in the place of a loop."""
    return kernel.with_body(rebuild(kernel.body, lambda s: new if s is loop else None))


def nesting(kernel: Kernel, step: str, changed: Kernel) -> Kernel:
    """The changed kernel, if what stands inside its vectorized loops can run in lanes, and inside a GPU axis no loop has the same one."""
    for outer in walk(changed.body):
        if isinstance(outer, For) and (outer.kind == VECTORIZED or outer.kind in GPU_AXES):
            for inner in walk(outer.body):
                if isinstance(inner, For) and (
                    inner.kind not in (SERIAL, UNROLLED) if outer.kind == VECTORIZED else inner.kind == outer.kind
                ):
                    why = f"the {inner.kind} loop `{inner.var.name}` would stand inside the {outer.kind} loop `{outer.var.name}`"
                    raise refuse(kernel, step, why)
    return changed


def buffer_names(kernel: Kernel) -> list[str]:
    """The names of all buffers."""
    return [b.name for b in kernel.buffers] + [s.buffer.name for s in walk(kernel.body) if isinstance(s, Allocate)]


def fresh(kernel: Kernel, name: str) -> str:
    """A name that no loop and no buffer has."""
    return unused(name, {*loop_names(kernel), *buffer_names(kernel)}, "{}{}", 2)


def guard(conditions: Sequence[Expr], body: Stmt) -> Stmt:
    """`If` placed below the loops that stand directly inside, and inside of both branches of an `If`, so that nests stay perfect."""
    for condition in reversed(E.nested([c for c in map(simplify, conditions) if not prove(c)])):
        if condition.op != "const":
            body = _guarded(condition, body)
        elif not condition.attr:
            body = Block(())
    return body


def _guarded(condition: Expr, stmt: Stmt) -> Stmt:
    """Nothing is read before the condition is known to hold: a place may be out of range where it does not."""
    if isinstance(stmt, For) and not E.reads(as_expr(stmt.extent)):
        return replace(stmt, body=_guarded(condition, stmt.body))
    if isinstance(stmt, If) and stmt.otherwise is None and not E.reads(stmt.cond):
        return If(E.binary("and", stmt.cond, condition), stmt.then)
    if isinstance(stmt, If) and stmt.otherwise is not None and not E.reads(stmt.cond):
        return If(stmt.cond, _guarded(condition, stmt.then), _guarded(condition, stmt.otherwise))
    return If(condition, stmt)


def rebind(stmt: Stmt, mapping: Mapping[Expr, Expr]) -> Stmt:
    """Loop variables replaced by expressions, simplified. Loops and buffers inside whose extents depend on them take their ranges, and
    shapes, anew: proofs rely on those."""
    match stmt:
        case For(v, extent, body, kind) if _depends(extent, mapping):
            extent = as_dim(E.substitute(as_expr(extent), mapping))
            w = loop_var(v.attr.name, extent)
            return For(w, extent, rebind(body, {**mapping, v: w}), kind)
        case Allocate(b, body) if any(_depends(d, mapping) for d in b.shape):
            new = Buffer(b.name, b.dtype, [E.substitute(as_expr(d), mapping) for d in b.shape], b.scope)
            return Allocate(new, rebind(swap_buffer(body, b, new, lambda indices: indices), mapping))
    if children(stmt):
        stmt = with_children(stmt, [rebind(c, mapping) for c in children(stmt)])
        return replace(stmt, cond=simplify(E.substitute(stmt.cond, mapping))) if isinstance(stmt, If | While) else stmt
    return map_expressions(stmt, lambda e: simplify(E.substitute(e, mapping)))


def _depends(extent: Dim, variables: Container[Expr]) -> bool:
    return any(v in variables for v in E.variables(as_expr(extent)))


def renamed(stmt: Stmt, name: Callable[[str], str]) -> Stmt:
    """A copy whose loops and local buffers have other names."""
    match stmt:
        case For(v, extent, body, kind):
            w = loop_var(name(v.attr.name), extent)
            return For(w, extent, renamed(rebind(body, {v: w}), name), kind)
        case Allocate(b, body):
            new = Buffer(name(b.name), b.dtype, b.shape, b.scope)
            return Allocate(new, renamed(swap_buffer(body, b, new, lambda indices: indices), name))
    return with_children(stmt, [renamed(c, name) for c in children(stmt)])


def rename_inner(kernel: Kernel, stmt: Stmt, suffix: str) -> tuple[Stmt, dict[str, str]]:
    """A copy of a part of the kernel, to stand beside it, and the names in it of the loops and buffers of the original."""
    names: dict[str, str] = {}

    def name(old: str) -> str:
        return names.setdefault(old, fresh(kernel, old + suffix))

    return renamed(stmt, name), names


def swap_buffer(stmt: Stmt, old: Buffer, new: Buffer, indices: Callable[[tuple[Expr, ...]], tuple[Expr, ...]]) -> Stmt:
    """All accesses of `old` become accesses of `new` at mapped indices."""
    return redirect(stmt, lambda buffer, at: (new, tuple(map(simplify, indices(at)))) if buffer is old else None)


def replace_buffer(
    kernel: Kernel, old: Buffer, new: Buffer, indices: Callable[[tuple[Expr, ...]], tuple[Expr, ...]] = lambda indices: indices
) -> Kernel:
    """The kernel with another buffer in the place of a parameter or temporary, elements at mapped indices."""
    if old in kernel.buffers:
        buffers, outputs = (tuple(new if b is old else b for b in several) for several in (kernel.buffers, kernel.outputs))
        return replace(kernel, buffers=buffers, outputs=outputs, body=swap_buffer(kernel.body, old, new, indices))

    def edit(s: Stmt) -> Stmt | None:
        return Allocate(new, swap_buffer(s.body, old, new, indices)) if isinstance(s, Allocate) and s.buffer is old else None

    return kernel.with_body(rebuild(kernel.body, edit))


def touches(stmt: Stmt, buffer: Buffer) -> bool:
    """Whether the statement itself, not those inside, reads or writes a buffer."""
    return any(b is buffer for b, _ in places(stmt))


def is_local(buffer: Buffer, stmt: Stmt) -> bool:
    """Whether a buffer is allocated inside of a statement."""
    return any(isinstance(s, Allocate) and s.buffer is buffer for s in walk(stmt))


def temporary(kernel: Kernel, step: str, name: str, dtype: str, shape: Sequence[Dim], scope: str) -> Buffer:
    """A new buffer for a step. Raises `ScheduleError` where its name is taken or its scope unknown."""
    if scope not in SCOPES:
        raise refuse(kernel, step, f"unknown scope `{scope}`; one of {', '.join(SCOPES)}")
    new = Buffer(name, dtype, shape, scope)
    if scope == "register" and not all(isinstance(n, int) for n in new.shape):
        raise refuse(kernel, step, f"`{name}` has the symbolic shape [{', '.join(map(str, new.shape))}] and cannot live in registers")
    return new


def without_allocation(stmt: Stmt, buffer: Buffer) -> Stmt:
    """A buffer is no more: neither is there anything to be prefetched."""

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, Allocate) and s.buffer is buffer:
            return without_allocation(s.body, buffer)
        return Block(()) if isinstance(s, Prefetch) and s.buffer is buffer else None

    return rebuild(stmt, edit)


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
