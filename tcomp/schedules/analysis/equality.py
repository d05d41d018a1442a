"""Equality of loop programs, one of them specialised to sizes of its dims: equal programs share machine code."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import TypeAlias

from tcomp.ir import expr as E, loops as L
from tcomp.ir.expr import Dim, Expr, as_expr, loop_var
from tcomp.ir.simplify import as_dim, simplify

Form: TypeAlias = "tuple[object, ...]"  # of a statement: equal for statements that do the same, but for the names of loops


def same_loops(kernel: L.Kernel, sizes: Mapping[Expr, int], other: L.Kernel) -> bool:
    """Whether the loops of a kernel, where its dims have these sizes, are those of `other`, apart from the names of loops, loops
    and dimensions of one element, threads, and prefetches: code for all sizes has those of large ones, which cost small ones nothing."""
    shared = dict[Form, L.Buffer]()
    return _form(kernel, sizes, shared) == _form(other, {}, shared)


def _form(kernel: L.Kernel, sizes: Mapping[Expr, int], shared: dict[Form, L.Buffer]) -> Form:
    """The form of what a kernel does at certain sizes; equal buffers of several kernels are `shared`."""
    values: dict[Expr, Expr] = {v: as_expr(n) for v, n in sizes.items()}  # of dims, and of loop variables under their new names
    numbers = count()
    slim = dict[L.Buffer, tuple[L.Buffer, list[int]]]()  # each buffer without dimensions of one element, and those that are left

    def buffer(b: L.Buffer) -> tuple[L.Buffer, list[int]]:
        if b not in slim:
            shape = [size(d) for d in b.shape]
            kept = [n for n, d in enumerate(shape) if d != 1]
            key = b.name, b.dtype, tuple(shape[n] for n in kept), b.scope
            slim[b] = shared.setdefault(key, L.Buffer(*key)), kept
        return slim[b]

    def size(d: Dim) -> Dim:
        return as_dim(value(as_expr(d)))

    def value(e: Expr) -> Expr:
        return simplify(E.substitute(E.rewrite(e, slim_read), values))

    def slim_read(e: Expr) -> Expr | None:
        if e.op != "read" or not isinstance(e.attr, L.Buffer):
            return None
        b, kept = buffer(e.attr)
        return E.read(b, [e.args[n] for n in kept])

    def access(b: L.Buffer, indices: tuple[Expr, ...]) -> Form:
        small, kept = buffer(b)
        return small, *(value(indices[n]) for n in kept)

    def form(stmt: L.Stmt) -> Form:
        match stmt:
            case L.For(v, extent, body, kind):
                extent = size(extent)
                if extent == 1:
                    values[v] = as_expr(0)
                    return form(body)
                values[v] = loop_var(f"i{next(numbers)}", extent)
                return "for", values[v], extent, L.SERIAL if kind == L.PARALLEL else kind, form(body)
            case L.Block(stmts):
                forms = tuple(form(s) for s in stmts if not _prefetches(s))
                return forms[0] if len(forms) == 1 else forms
            case L.Allocate(b, body):
                return "alloc", buffer(b)[0], form(body)
            case L.If(cond, then, None):
                cond = value(cond)
                return form(then) if cond.op == "const" and cond.attr else ("if", cond, form(then))
            case L.Store(b, indices, stored, above):
                space = size(L.buffer_size(b))
                streamed = space > above if isinstance(space, int) and above is not None else above
                return "store", *access(b, indices), value(stored), streamed or None
            case L.Accumulate(b, indices, added, reducer):
                return "accumulate", *access(b, indices), value(added), reducer
        return "other", id(stmt)  # equal to nothing else

    return tuple(buffer(b)[0] for b in kernel.buffers), form(kernel.body)


def _prefetches(stmt: L.Stmt) -> bool:
    """Whether a statement does nothing but prefetch."""
    while isinstance(stmt, L.For):
        stmt = stmt.body
    return isinstance(stmt, L.Prefetch)
