"""Loop programs: how a kernel computes. One IR for every target.

A `Kernel` has buffers and integer scalars as parameters and one statement as body. A loop has a *kind*, a buffer has a *scope*;
code generators read them and decide nothing:

    serial      in order                                parallel    iterations divided among threads
    unrolled    copies, the variable a constant         vectorized  one vector lane per iteration (constant extent)
    block.x ... thread.x ...                            bound to a GPU axis

A vectorized loop means what the serial loop means, evaluated statement by statement for all lanes; an `If` inside it on a
lane-dependent condition masks the lanes.

    global      parameters, and temporaries of the kernel that live in the workspace
    shared      one copy per GPU block
    register    one copy per thread (per innermost parallel iteration); constant shape

Printed:

    kernel twice<M{1..}>(A: float32[M], C: float32[M]) -> (C) {
      parallel i in 0..M {
        C[i] = A[i] * 2.0f
      }
    }
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr
from tcomp.ir.reducers import Reducer, standard_reducers
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.printer import Names, Printer, as_html, quoted

if TYPE_CHECKING:
    from tcomp.ir.instruction import Instruction  # whose meaning is a loop program: the two data types are mutually recursive

SERIAL, PARALLEL, UNROLLED, VECTORIZED = "serial", "parallel", "unrolled", "vectorized"
BLOCK_AXES, THREAD_AXES = (tuple(f"{level}.{axis}" for axis in "xyz") for level in ("block", "thread"))
GPU_AXES = (*BLOCK_AXES, *THREAD_AXES)
KINDS = (SERIAL, PARALLEL, UNROLLED, VECTORIZED, *GPU_AXES)
SCOPES = ("global", "shared", "register")


class Buffer:
    """A dense row-major array: `name`, `dtype`, `shape` (ints or symbolic), `scope`. Compared by identity."""

    __slots__ = ("__weakref__", "dtype", "name", "scope", "shape")

    def __init__(self, name: str, dtype: str, shape: Sequence[Dim], scope: str = "global") -> None:
        self.name, self.dtype, self.shape, self.scope = name, dtype, tuple(as_dim(d) for d in shape), scope

    def __getitem__(self, indices: ExprLike | tuple[ExprLike, ...]) -> Expr:
        return E.read(self, indices if isinstance(indices, tuple) else (indices,))

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}] {self.scope}"


class Stmt:
    """Base of the statements; all are immutable."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(LoopPrinter().statement(self, ""))


@dataclass(frozen=True, eq=False, slots=True)
class Block(Stmt):
    """Statements in sequence."""

    stmts: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False, slots=True)
class For(Stmt):
    """`for var in range(extent)`: the variable runs from 0 and its name is unique within the kernel."""

    var: Expr
    extent: Dim
    body: Stmt
    kind: str = SERIAL


@dataclass(frozen=True, eq=False, slots=True)
class If(Stmt):
    """Conditional execution."""

    cond: Expr
    then: Stmt
    otherwise: Stmt | None = None


@dataclass(frozen=True, eq=False, slots=True)
class While(Stmt):
    """Repeats while the condition, read again each time, holds."""

    cond: Expr
    body: Stmt


@dataclass(frozen=True, eq=False, slots=True)
class Store(Stmt):
    """`buffer[indices] = value`. `streamed_above` is a hint: where the buffer has more bytes than that, the element is not needed soon, so
    that it need not enter any cache."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr
    streamed_above: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Accumulate(Stmt):
    """`buffer[indices] = reducer(buffer[indices], value)`: a store that may be reassociated where a schedule says so."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr
    reducer: Reducer


CACHE_LEVELS = (1, 2, 3)


@dataclass(frozen=True, eq=False, slots=True)
class Prefetch(Stmt):
    """A hint that `buffer[indices]` will be read soon, from the cache of a `level`; it means nothing, and the element need not exist."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    level: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class Allocate(Stmt):
    """A buffer that lives during `body`; its content is undefined at the start."""

    buffer: Buffer
    body: Stmt


@dataclass(frozen=True, eq=False, slots=True)
class Call(Stmt):
    """A nest that one machine instruction executes: `body` equals the meaning of the instruction, so analyses can look at the body alone.

    `instruction.match(call.instruction, call.body)` maps the loops and buffers of the meaning to those of the body. It must succeed after
    every rewrite of the body: else the program is malformed.
    """

    instruction: Instruction
    body: Stmt


@dataclass(frozen=True, eq=False, slots=True)
class Kernel:
    """A loop program with a name: `buffers` in the order of the call, written ones among them listed in `outputs`.

    `scalars` are the symbolic dims it takes by value (after the buffers).
    """

    name: str
    buffers: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    scalars: tuple[Expr, ...]
    body: Stmt
    notes: tuple[str, ...] = field(default=())  # for people: what it computes, which schedule was used
    assumptions: tuple[Expr, ...] = field(default=())  # conditions on the scalars, which a call checks

    def __str__(self) -> str:
        return "\n".join(LoopPrinter().kernel(self))

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def with_body(self, body: Stmt) -> Kernel:
        """The same kernel with another body."""
        return replace(self, body=body)


def block(*stmts: Stmt) -> Stmt:
    """Statements in sequence, nested blocks flattened; a single statement stays itself."""
    flat = [inner for s in stmts for inner in (s.stmts if isinstance(s, Block) else (s,))]
    return flat[0] if len(flat) == 1 else Block(tuple(flat))


def allocated(buffers: Iterable[Buffer], body: Stmt) -> Stmt:
    """A statement during which buffers live; the first is allocated outermost."""
    for b in reversed([*buffers]):
        body = Allocate(b, body)
    return body


def where(conditions: Sequence[Expr], then: Stmt, guarded: Callable[[Expr, Stmt], Stmt] = If) -> Stmt:
    """`then` where all conditions hold: an `If` (or what `guarded` makes) for each of the `nested` conditions; empty if one never holds."""
    for condition in reversed(E.nested(conditions)):
        if condition.op != "const":
            then = guarded(condition, then)
        elif not condition.attr:
            then = Block(())
    return then


def store(buffer: Buffer, indices: Sequence[ExprLike], value: ExprLike) -> Store:
    """A store with Python numbers converted to the buffer's dtype."""
    return Store(buffer, tuple(as_expr(i) for i in indices), as_expr(value, buffer.dtype))


def loop(name: str, extent: Dim, body: Callable[[Expr], Stmt], kind: str = SERIAL) -> Stmt:
    """`for name in range(extent): body(name)`, for programs written by hand."""
    v = E.loop_var(name, extent)
    return For(v, as_dim(extent), body(v), kind)


def over(shape: Sequence[Dim], body: Callable[[tuple[Expr, ...]], Stmt], name: Callable[[int], str] = "i{}".format) -> Stmt:
    """One loop for each dimension of a shape, the last one innermost, around `body` of their variables; number n is called `name(n)`."""
    variables = tuple(E.loop_var(name(n), extent) for n, extent in enumerate(shape))
    stmt = body(variables)
    for v, extent in zip(reversed(variables), reversed(shape), strict=True):
        stmt = For(v, as_dim(extent), stmt)
    return stmt


def perfect(stmt: Stmt) -> tuple[list[For], Stmt]:
    """The perfectly nested loops, outermost first, and the statement inside the innermost."""
    loops = []
    while isinstance(stmt, For):
        loops.append(stmt)
        stmt = stmt.body
    return loops, stmt


def children(stmt: Stmt) -> tuple[Stmt, ...]:
    """The statements directly inside."""
    match stmt:
        case Block():
            return stmt.stmts
        case For() | While() | Allocate() | Call():
            return (stmt.body,)
        case If():
            return (stmt.then,) if stmt.otherwise is None else (stmt.then, stmt.otherwise)
    return ()


def guarded_children(stmt: Stmt) -> Iterator[tuple[Stmt, Expr]]:
    """The statements directly inside, each with the condition under which it is executed because of a loop or branch, which may be True."""
    if isinstance(stmt, If):
        yield stmt.then, stmt.cond
        if stmt.otherwise is not None:
            yield stmt.otherwise, E.unary("not", stmt.cond)
    else:
        condition = stmt.var < as_expr(stmt.extent) if isinstance(stmt, For) else E.const(True, "bool")
        for child in children(stmt):
            yield child, condition


def with_children(stmt: Stmt, new: Sequence[Stmt]) -> Stmt:
    """The statement with other inner statements."""
    match stmt:
        case Block():
            return block(*new)
        case For(v, extent, _, kind):
            return For(v, extent, new[0], kind)
        case If(cond):
            return If(cond, *new)
        case Allocate(buffer):
            return Allocate(buffer, new[0])
        case While() | Call():
            return replace(stmt, body=new[0])
    return stmt


def expressions(stmt: Stmt) -> tuple[Expr, ...]:
    """The expressions directly in a statement (not in inner ones)."""
    match stmt:
        case For(extent=extent):
            return (as_expr(extent),)
        case If(cond=cond) | While(cond=cond):
            return (cond,)
        case Store(_, indices, value) | Accumulate(_, indices, value, _):
            return (*indices, value)
        case Prefetch(_, indices):
            return indices
    return ()


def buffer_size(buffer: Buffer) -> Dim:
    """The size of a buffer in bytes."""
    return as_dim(prod(map(as_expr, buffer.shape), start=as_expr(itemsize(buffer.dtype))))


def bypasses_caches(store: Store) -> bool:
    """Whether what is stored certainly need not enter any cache."""
    return store.streamed_above is not None and (E.bounds(buffer_size(store.buffer))[0] or 0) > store.streamed_above


def walk(stmt: Stmt) -> Iterator[Stmt]:
    """The statement and all inner ones, outermost first, in program order."""
    return iter(_statements(stmt) if children(stmt) else (stmt,))


@lru_cache(maxsize=64)  # every schedule primitive walks over the same few kernels again and again
def _statements(stmt: Stmt) -> tuple[Stmt, ...]:
    found, stack = list[Stmt](), [stmt]
    while stack:
        inner = stack.pop()
        found.append(inner)
        stack += children(inner)[::-1]
    return tuple(found)


def map_expressions(stmt: Stmt, function: Callable[[Expr], Expr]) -> Stmt:
    """Apply `function` to every expression, inside out; loop variables themselves are left alone."""
    stmt = with_children(stmt, [map_expressions(child, function) for child in children(stmt)])
    match stmt:
        case For(v, extent, body, kind):
            return For(v, as_dim(function(as_expr(extent))), body, kind)
        case If(cond=cond) | While(cond=cond):
            return replace(stmt, cond=function(cond))
        case Store(buffer, indices, value, above):
            return Store(buffer, tuple(map(function, indices)), function(value), above)
        case Accumulate(buffer, indices, value, reducer):
            return Accumulate(buffer, tuple(map(function, indices)), function(value), reducer)
        case Prefetch(_, indices):
            return replace(stmt, indices=tuple(map(function, indices)))
    return stmt


Place = tuple[Buffer, tuple[Expr, ...]]


def places(stmt: Stmt) -> list[Place]:
    """The elements that a statement itself, without those inside it, reads and then writes."""
    written = [(stmt.buffer, stmt.indices)] if isinstance(stmt, Store | Accumulate) else []
    return [*((r.attr, r.args) for r in E.reads(*expressions(stmt))), *written]


def redirect(stmt: Stmt, place: Callable[[Buffer, tuple[Expr, ...]], Place | None]) -> Stmt:
    """The statement with other accesses: `place` gives the new buffer and indices of a read, write or prefetch, or None to keep it."""

    def rule(e: Expr) -> Expr | None:
        return E.read(*found) if e.op == "read" and (found := place(e.attr, e.args)) is not None else None

    def visit(s: Stmt) -> Stmt:
        s = with_children(s, [visit(c) for c in children(s)])
        if isinstance(s, Store | Accumulate | Prefetch) and (found := place(s.buffer, s.indices)) is not None:
            s = replace(s, buffer=found[0], indices=found[1])
        return s

    def redirected(e: Expr) -> Expr:
        return E.rewrite(e, rule) if any(place(r.attr, r.args) is not None for r in E.reads(e)) else e

    return visit(map_expressions(stmt, redirected))


STACK_LIMIT = 64 << 10  # bytes of one temporary that lives on the stack of a thread


def hoist_temporaries(kernel: Kernel) -> tuple[Kernel, tuple[Buffer, ...]]:
    """The kernel with global temporaries as parameters, behind the others, and these temporaries: those allocated outside of all loops, and
    those inside of serial loops that are too large for a stack. So their memory can be planned together with that of other kernels."""
    found: list[Buffer] = []

    def visit(stmt: Stmt, inside: bool) -> Stmt:
        if isinstance(stmt, Allocate) and stmt.buffer.scope == "global":
            b, sizes = stmt.buffer, [n for n in stmt.buffer.shape if isinstance(n, int)]
            if not inside or (len(sizes) == len(b.shape) and prod(sizes) * itemsize(b.dtype) > STACK_LIMIT):
                found.append(b)
                return visit(stmt.body, inside)
        if isinstance(stmt, Block | Allocate | If) or (isinstance(stmt, For) and stmt.kind == SERIAL):
            return with_children(stmt, [visit(child, inside or isinstance(stmt, For | If)) for child in children(stmt)])
        return stmt

    body = visit(kernel.body, False)
    extended = replace(kernel, buffers=(*kernel.buffers, *found), outputs=(*kernel.outputs, *found), body=body)
    return extended, tuple(found)


def launches(body: Stmt) -> Iterator[list[Stmt]]:
    """The statements of each GPU kernel launch of a body (temporaries hoisted): one for each statement with loops over blocks, and one for
    the statements between two of those."""
    stmts = body.stmts if isinstance(body, Block) else (body,)
    for blocks, group in groupby(stmts, lambda s: any(isinstance(x, For) and x.kind in BLOCK_AXES for x in walk(s))):
        together = list(group)
        yield from ([s] for s in together) if blocks else [together]


class LoopPrinter(Printer):
    """Text of statements and kernels, in lines; `text.parser` reads it back."""

    def __init__(self) -> None:
        super().__init__()
        self.instructions = Names()

    def buffer(self, b: Buffer) -> str:
        """The declaration of a buffer, which is now in scope."""
        scope = "" if b.scope == "global" else f" {b.scope}"
        return f"{self.arrays.bind(b, b.name)}: {b.dtype}{self.shape(b.shape)}{scope}"

    def kernel(self, kernel: Kernel) -> list[str]:
        """The lines of a kernel."""
        dims = self.dims(list(kernel.scalars))
        buffers = ", ".join(self.buffer(b) for b in kernel.buffers)
        outputs = ", ".join(self.arrays(b, b.name) for b in kernel.outputs)
        lines = [f"kernel {quoted(kernel.name)}{dims}({buffers}) -> ({outputs}) {{"]
        lines += [f"  note {json.dumps(note)}" for note in kernel.notes]
        lines += [f"  assume {self.expression(condition)}" for condition in kernel.assumptions]
        body = self.statement(kernel.body, "  ")
        instructions = [line for i in self.instructions.free for line in i.declaration(self, "  ")]
        return [*lines, *self.reducer_lines(), *instructions, *body, "}"]

    def statement(self, stmt: Stmt, indent: str) -> list[str]:
        """The lines of a statement."""
        match stmt:
            case Block(stmts):
                lines = []
                for n, s in enumerate(stmts):
                    if isinstance(s, Allocate) and n < len(stmts) - 1:
                        with self.arrays.scope([s.buffer]):
                            lines += self.braced(f"{indent}alloc {self.buffer(s.buffer)}", s.body, indent)
                    else:
                        lines += self.statement(s, indent)
                return lines
            case For(v, extent, body, kind):
                with self.bindings([(v, extent)]) as binding:
                    return self.braced(f"{indent}{'for' if kind == SERIAL else kind} {binding}", body, indent)
            case If(cond, then, otherwise):
                lines = self.braced(f"{indent}if {self.expression(cond, indent)}", then, indent)
                if otherwise is not None:
                    lines[-1] += " else {"
                    lines += [*self.statement(otherwise, indent + "  "), indent + "}"]
                return lines
            case While(cond, body):
                return self.braced(f"{indent}while {self.expression(cond, indent)}", body, indent)
            case Store(b, indices, value, above):
                hint = "" if above is None else f"stream({above}) " if above else "stream "
                return [f"{indent}{hint}{self.place(b, indices)} = {self.expression(value, indent)}"]
            case Accumulate(b, indices, value, reducer):
                sign = "+=" if reducer == standard_reducers(value.dtype)["sum"] else f"{self.reducer(reducer)}="
                return [f"{indent}{self.place(b, indices)} {sign} {self.expression(value, indent)}"]
            case Allocate(b, body):
                # Without braces it lives to the end of the block.
                with self.arrays.scope([b]):
                    return [f"{indent}alloc {self.buffer(b)}", *self.statement(body, indent)]
            case Prefetch(b, indices, level):
                return [f"{indent}prefetch {self.place(b, indices)}{'' if level == 1 else f' in l{level}'}"]
            case Call(instruction, body):
                return self.braced(f"{indent}call {self.instructions(instruction, instruction.name)}", body, indent)
        raise IRError(f"no statement of the loop IR: {type(stmt).__name__}")

    def braced(self, head: str, body: Stmt, indent: str) -> list[str]:
        """A head line, and the indented body in braces."""
        return [head + " {", *self.statement(body, indent + "  "), indent + "}"]

    def place(self, b: Buffer, indices: Sequence[Expr]) -> str:
        """An element of a buffer."""
        return f"{self.arrays(b, b.name)}[{self.listed(indices, '')}]"
