"""Building blocks of primitives: finding loops and buffers of a kernel, replacing them, building nests, and refusing a step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from tcomp.errors import ScheduleError
from tcomp.ir import expr as E, loops as L
from tcomp.ir.expr import Dim, Expr, as_expr, loop_var
from tcomp.ir.polyhedral.inverse_maps import inverse
from tcomp.ir.polyhedral.model import TooHard, limited
from tcomp.ir.simplify import as_dim, prove, simplify
from tcomp.ir.text.printer import unused
from tcomp.schedules.analysis.access_patterns import Nest, nest_of
from tcomp.schedules.analysis.legality import Conflict
from tcomp.schedules.handles import Loop, Stage

Indices = tuple[Expr, ...]
MAX_ITERATIONS = 1 << 31  # of one tile: their products with extents and strides still fit the 64 bits of index arithmetic


class Refusal(ScheduleError):
    """A step does not apply. `Schedule.apply` adds which step that is, and to which loops."""


def refuse(why: str, hint: str = "") -> Refusal:
    """The error for a step that does not apply."""
    return Refusal(why, hint=hint)


def refuse_if(condition: object, why: str, hint: str = "") -> None:
    """Raises the error for a step that does not apply, where a condition holds."""
    if condition:
        raise refuse(why, hint)


def refuse_conflict(what: str, conflict: Conflict | None) -> None:
    """Raises the error for a step that keeps `what` from conflicts no longer, with a witness, if there is a conflict."""
    if conflict is not None:
        error = refuse(f"{what} {conflict}")
        error.witness = conflict.witness
        raise error


def check_factor(factor: int, what: str = "factor") -> None:
    """Refuse unless a loop may have this many iterations."""
    if not 1 <= factor <= MAX_ITERATIONS:
        raise refuse(f"{what} {factor} is not positive" if factor < 1 else f"{what} {factor} is more than {MAX_ITERATIONS}")


@contextmanager
def proof(what: str, *budget: int) -> Iterator[None]:
    """Limits isl's operations inside to the `budget`, by default its usual one; refuses the step where that is not enough."""
    try:
        with limited(*budget):
            yield
    except TooHard as error:
        raise refuse(f"isl gave up on {what}: {error}") from None


def loops_of(kernel: L.Kernel) -> dict[str, L.For]:
    """The loops by name, in program order."""
    return {s.var.name: s for s in L.walk(kernel.body) if isinstance(s, L.For)}


def buffers_of(kernel: L.Kernel) -> dict[str, L.Buffer]:
    """The buffers by name: parameters, then temporaries in program order."""
    return {b.name: b for b in (*kernel.buffers, *(s.buffer for s in L.walk(kernel.body) if isinstance(s, L.Allocate)))}


def loop_name(kernel: L.Kernel, loop: Loop) -> str:
    """The name of a loop. An axis `k` of a tensor means the loop `k`, else the one `STAGE.k` there is. Raises `ScheduleError`."""
    if isinstance(loop, str):
        return loop
    loops, name = loops_of(kernel), str(loop)
    found = [known for b in buffers_of(kernel) if (known := f"{b}.{name}") in loops]
    if name not in loops and len(found) > 1:
        hint = f"name one of {', '.join(found)}"
        raise ScheduleError(f"several loops have the axis `{name}`", where=f"kernel `{kernel.name}`", hint=hint)
    return name if name in loops or not found else found[0]


def find_loop(kernel: L.Kernel, loop: Loop) -> L.For:
    """The loop of a name, or of an axis. Raises `ScheduleError`."""
    loops, name = loops_of(kernel), loop_name(kernel, loop)
    if name not in loops:
        raise refuse(f"there is no loop `{name}`", did_you_mean(name, loops, "loops"))
    return loops[name]


def find_buffer(kernel: L.Kernel, stage: Stage) -> L.Buffer:
    """The buffer of a name, or of a tensor. Raises `ScheduleError`."""
    buffers, name = buffers_of(kernel), stage if isinstance(stage, str) else stage.name
    if name not in buffers:
        raise refuse(f"there is no buffer `{name}`", did_you_mean(name, buffers, "buffers"))
    return buffers[name]


def find_temporary(kernel: L.Kernel, stage: Stage, otherwise: str, hint: str = "") -> L.Buffer:
    """The temporary of a name. Raises `ScheduleError` where it is a parameter, and says `otherwise`."""
    buffer = find_buffer(kernel, stage)
    refuse_if(buffer in kernel.buffers, f"`{buffer.name}` is a parameter{otherwise}", hint)
    return buffer


def did_you_mean(name: str, known: Iterable[str], what: str) -> str:
    """A hint for a name that is not known."""
    close = get_close_matches(name, known := list(known), n=1)
    return (f"did you mean `{close[0]}`? " if close else "") + f"{what}: {', '.join(known)}"


def fresh(kernel: L.Kernel, name: str) -> str:
    """A name that no loop and no buffer has."""
    return unused(name, {*loops_of(kernel), *buffers_of(kernel)}, "{}{}", 2)


def part_name(kernel: L.Kernel, part: str, stage: L.Buffer, loop: str) -> str:
    """A name for the copy of a stage's loop in another nest, called `part`: `C.init.i` for the loop `C.i` in the part `C.init`."""
    return fresh(kernel, f"{part}.{loop.removeprefix(f'{stage.name}.')}")


def path(root: L.Stmt, target: L.Stmt) -> list[L.Stmt]:
    """The statements from `root` down to `target`, both included; empty if it is not inside."""
    if root is target:
        return [root]
    below = next(filter(None, (path(c, target) for c in L.children(root))), [])
    return [root, *below] if below else []


def enclosing(kernel: L.Kernel, target: L.Stmt) -> list[L.For]:
    """The loops around a statement."""
    return [s for s in path(kernel.body, target)[:-1] if isinstance(s, L.For)]


def sequence(stmt: L.Stmt) -> tuple[L.Stmt, ...]:
    """The statements in a sequence, through blocks and allocations."""
    if isinstance(stmt, L.Block | L.Allocate):
        return tuple(item for c in L.children(stmt) for item in sequence(c))
    return (stmt,)


def scope_of(kernel: L.Kernel, buffer: L.Buffer) -> L.Stmt:
    """The statement during which a buffer lives."""
    return next((s.body for s in L.walk(kernel.body) if isinstance(s, L.Allocate) and s.buffer is buffer), kernel.body)


def stores(stmt: L.Stmt) -> list[L.Store | L.Accumulate]:
    """The writes in a statement, in program order."""
    return [s for s in L.walk(stmt) if isinstance(s, L.Store | L.Accumulate)]


def writes(stmt: L.Stmt, buffer: L.Buffer) -> bool:
    """Whether a statement, or one inside, stores to a buffer."""
    return any(s.buffer is buffer for s in stores(stmt))


def reads(stmts: Iterable[L.Stmt]) -> set[L.Buffer]:
    """The buffers that statements read, in values, indices, conditions and bounds of loops."""
    return {r.attr for stmt in stmts for s in L.walk(stmt) for r in E.reads(*L.expressions(s))}


def check_bounds_no_loops(stmt: L.Stmt, buffer: L.Buffer) -> None:
    """Refuse if the extent of a loop is read from the buffer."""
    if any(isinstance(s, L.For) and any(r.attr is buffer for r in E.reads(as_expr(s.extent))) for s in L.walk(stmt)):
        raise refuse(f"the extent of a loop is read from `{buffer.name}`")


def is_local(buffer: L.Buffer, stmt: L.Stmt) -> bool:
    """Whether a buffer is allocated inside of a statement."""
    return any(isinstance(s, L.Allocate) and s.buffer is buffer for s in L.walk(stmt))


def enclose(loops: Iterable[L.For], leaf: L.Stmt) -> L.Stmt:
    """A statement inside of copies of loops, which are given outermost first."""
    for x in reversed([*loops]):
        leaf = replace(x, body=leaf)
    return leaf


def nest_over(kernel: L.Kernel, name: str, shape: Sequence[Dim], leaf: Callable[[Indices], L.Stmt]) -> tuple[L.Stmt, list[str]]:
    """A nest over all elements of a shape, and the names of its loops: `name.0`, `name.1`, ..."""
    names = [fresh(kernel, f"{name}.{d}") for d in range(len(shape))]
    return L.over(shape, leaf, names.__getitem__), names


def guard(conditions: Sequence[Expr], body: L.Stmt) -> L.Stmt:
    """Guard a statement; the `If` is placed inside of its loops, and in both branches of an `If`, so that nests stay perfect."""
    return L.where([c for c in map(simplify, conditions) if not prove(c)], body, _guarded)


def _guarded(condition: Expr, stmt: L.Stmt) -> L.Stmt:
    """Nothing is read before the condition is known to hold: a place may be out of range where it does not."""
    match stmt:
        case L.For() if not E.reads(as_expr(stmt.extent)):
            return replace(stmt, body=_guarded(condition, stmt.body))
        case L.If(cond, then, None) if not E.reads(cond):
            return L.If(E.binary("and", cond, condition), then)
        case L.If(cond, then, otherwise) if otherwise is not None and not E.reads(cond):
            return L.If(cond, _guarded(condition, then), _guarded(condition, otherwise))
    return L.If(condition, stmt)


def rebuild(stmt: L.Stmt, edit: Callable[[L.Stmt], L.Stmt | None]) -> L.Stmt:
    """Top-down: `edit` returns a replacement (not descended into), or None to descend. A statement in which nothing is replaced stays the
    same object."""
    if (edited := edit(stmt)) is not None:
        return edited
    inner = L.children(stmt)
    new = tuple(rebuild(c, edit) for c in inner)
    return stmt if new == inner else L.with_children(stmt, new)


def replaced(kernel: L.Kernel, new: Mapping[Any, L.Stmt]) -> L.Kernel:
    """The kernel with other statements in the places of some."""
    return kernel.with_body(rebuild(kernel.body, new.get))


def nesting(changed: L.Kernel) -> L.Kernel:
    """The kernel, if the statements in its vectorized loops can run in lanes, and no loop inside a GPU axis is bound to the same axis;
    refuses otherwise."""
    loops = [s for s in L.walk(changed.body) if isinstance(s, L.For)]
    for outer in (x for x in loops if x.kind == L.VECTORIZED or x.kind in L.GPU_AXES):
        allowed = (L.SERIAL, L.UNROLLED) if outer.kind == L.VECTORIZED else {*L.KINDS} - {outer.kind}
        for x in (x for x in L.walk(outer.body) if isinstance(x, L.For) and x.kind not in allowed):
            raise refuse(f"the {x.kind} loop `{x.var.name}` would stand inside the {outer.kind} loop `{outer.var.name}`")
    return changed


def rebind(stmt: L.Stmt, mapping: Mapping[Expr, Expr]) -> L.Stmt:
    """Loop variables replaced by expressions, simplified. Loops and buffers inside whose extents depend on them get new ranges and
    shapes: proofs rely on those."""
    match stmt:
        case L.For(v, extent, body, kind) if _depends(extent, mapping):
            extent = as_dim(E.substitute(as_expr(extent), mapping))
            w = loop_var(v.name, extent)
            return L.For(w, extent, rebind(body, {**mapping, v: w}), kind)
        case L.Allocate(b, body) if any(_depends(d, mapping) for d in b.shape):
            new = L.Buffer(b.name, b.dtype, [E.substitute(as_expr(d), mapping) for d in b.shape], b.scope)
            return L.Allocate(new, rebind(swap_buffer(body, b, new), mapping))
    if L.children(stmt):
        stmt = L.with_children(stmt, [rebind(c, mapping) for c in L.children(stmt)])
        return replace(stmt, cond=simplify(E.substitute(stmt.cond, mapping))) if isinstance(stmt, L.If | L.While) else stmt
    return L.map_expressions(stmt, lambda e: simplify(E.substitute(e, mapping)))


def _depends(extent: Dim, variables: Container[Expr]) -> bool:
    return any(v in variables for v in E.variables(as_expr(extent)))


def renamed(stmt: L.Stmt, name: Callable[[str], str]) -> L.Stmt:
    """A copy whose loops and local buffers have other names."""
    match stmt:
        case L.For(v, extent, body, kind):
            w = loop_var(name(v.name), extent)
            return L.For(w, extent, renamed(rebind(body, {v: w}), name), kind)
        case L.Allocate(b, body):
            new = L.Buffer(name(b.name), b.dtype, b.shape, b.scope)
            return L.Allocate(new, renamed(swap_buffer(body, b, new), name))
    return L.with_children(stmt, [renamed(c, name) for c in L.children(stmt)])


def rename_inner(kernel: L.Kernel, stmt: L.Stmt, suffix: str) -> tuple[L.Stmt, dict[str, str]]:
    """A copy of a part of the kernel with fresh names, and the new name of each loop and buffer of the original."""
    names: dict[str, str] = {}
    return renamed(stmt, lambda old: names.setdefault(old, fresh(kernel, old + suffix))), names


def last_part(name: str) -> str:
    """The last component of the name of a loop: its name within its stage."""
    return name.rpartition(".")[2]


def swap_buffer(stmt: L.Stmt, old: L.Buffer, new: L.Buffer, indices: Callable[[Indices], Iterable[Expr]] = lambda at: at) -> L.Stmt:
    """All accesses of `old` become accesses of `new` at mapped indices."""
    return L.redirect(stmt, lambda buffer, at: (new, tuple(map(simplify, indices(at)))) if buffer is old else None)


def replace_buffer(kernel: L.Kernel, old: L.Buffer, new: L.Buffer, indices: Callable[[Indices], Iterable[Expr]] = tuple) -> L.Kernel:
    """The kernel with another buffer in the place of a parameter or temporary, elements at mapped indices."""
    if old in kernel.buffers:
        buffers, outputs = (tuple(new if b is old else b for b in several) for several in (kernel.buffers, kernel.outputs))
        return replace(kernel, buffers=buffers, outputs=outputs, body=swap_buffer(kernel.body, old, new, indices))
    life = next(s for s in L.walk(kernel.body) if isinstance(s, L.Allocate) and s.buffer is old)
    return replaced(kernel, {life: L.Allocate(new, swap_buffer(life.body, old, new, indices))})


def temporary(name: str, dtype: str, shape: Sequence[Dim], scope: str) -> L.Buffer:
    """A new buffer for a step. Raises `ScheduleError` where its scope is unknown, or does not hold buffers of that shape."""
    refuse_if(scope not in L.SCOPES, f"unknown scope `{scope}`; one of {', '.join(L.SCOPES)}")
    new = L.Buffer(name, dtype, shape, scope)
    if scope == "register" and not all(isinstance(n, int) for n in new.shape):
        raise refuse(f"`{name}` has the symbolic shape [{', '.join(map(str, new.shape))}] and cannot live in registers")
    return new


def check_shared_memory(kernel: L.Kernel, scope: str, target: L.Stmt) -> None:
    """Refuses memory shared by the threads of a block inside a loop over them: each iteration would fill the one copy again."""
    for x in (s for s in path(kernel.body, target) if isinstance(s, L.For) and s.kind in L.THREAD_AXES):
        refuse_if(scope == "shared", f"shared memory cannot be filled inside the {x.kind} loop `{x.var.name}`", "name a loop outside of it")


def without_allocation(stmt: L.Stmt, buffer: L.Buffer) -> L.Stmt:
    """The statement without the allocation of a buffer, and without prefetches of it."""

    def edit(s: L.Stmt) -> L.Stmt | None:
        if isinstance(s, L.Allocate) and s.buffer is buffer:
            return without_allocation(s.body, buffer)
        return L.Block(()) if isinstance(s, L.Prefetch) and s.buffer is buffer else None

    return rebuild(stmt, edit)


def single_write(nest: L.Stmt, buffer: L.Buffer) -> Nest:
    """A nest that computes a stage by one statement."""
    if (found := nest_of(nest)) is None:
        raise refuse(f"one nest computes `{buffer.name}` by several statements", "give each statement loops of its own")
    return found


def stores_all(nest: L.Stmt, buffer: L.Buffer) -> bool:
    """Whether a nest stores to every element of a buffer, and reads none."""
    found = nest_of(nest)
    if found is None or found.is_reduction or found.writes is not buffer or found.conditions:
        return False
    inverted = inverse(found.leaf.indices, buffer.shape, found.loops)
    runs = all(x.var in inverted.values or prove(as_expr(x.extent) > 0) for x in found.loops)
    return runs and not inverted.conditions and {x.var for x in found.spatial} <= inverted.values.keys() and buffer not in reads([nest])
