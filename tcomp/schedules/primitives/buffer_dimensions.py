"""Dimensions of buffers: neighbouring ones collapsed into one (`collapse_dims`), one expanded into two (`expand`).

Collapse neighbouring dimensions that every nest walks together: [n, h, w, c] read and written whole becomes [n*h*w*c].

Buffers are dense and row-major, so merging two neighbouring dimensions is only another view of the same memory. It is done where
each access to a buffer indexes the pair by two neighbouring loops of its nest, each alone and over the full extent. Long inner
loops without tails are what vectorization, tiling and thread partitioning want.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import (
    Accumulate,
    Allocate,
    Buffer,
    Call,
    For,
    If,
    Kernel,
    Place,
    Prefetch,
    Stmt,
    Store,
    While,
    children,
    places,
    redirect,
    walk,
    with_children,
)
from tcomp.ir.simplify import simplify
from tcomp.schedules.primitives.editing import find_buffer, rebind, refuse, replace_buffer

Pair = tuple[Expr, Expr]  # outer and inner loop variable
Closure = tuple[set[Pair], dict[Buffer, int]]  # pairs of loops, and the first of two dimensions of each buffer, to be merged together


def collapse(kernel: Kernel) -> Kernel:
    """Merge all pairs of neighbouring dimensions that every nest walks together, and drop those of extent 1.

    Always legal: what cannot be merged stays, and programs with guards or while loops stay as they are. Good as the first step: long
    inner loops without tails are what vectorization, tiling and threads want. Parameters keep their memory, their shapes change.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A, b = te.placeholder((2, 4, 5), name="A"), te.placeholder((5,), name="b")
    >>> s = Schedule(te.compute((2, 4, 5), lambda n, i, j: A[n, i, j] + b[j], name="B"))
    >>> s.collapse()
    >>> print(s)
    kernel B(A: float32[8, 5], b: float32[5], B: float32[8, 5]) -> (B) {
      for B.n_i in 0..8 {
        for B.j in 0..5 {
          B[B.n_i, B.j] = A[B.n_i, B.j] + b[B.j]
        }
      }
    }
    """
    if any(isinstance(s, While | If | Call | Prefetch) for s in walk(kernel.body)):
        return kernel  # imperative programs keep their shape
    kernel = _without_units(kernel)
    failed: set[Pair] = set()
    while (closure := _mergeable(kernel.body, failed)) is not None:
        kernel = _merge(kernel, *closure)
    return kernel


def _mergeable(stmt: Stmt, failed: set[Pair]) -> Closure | None:
    """The first pair that can be merged, with what has to be merged with it; adds those that cannot to `failed`."""
    walked = _Walked(stmt)
    for pair in walked.neighbours:
        if pair not in failed:
            if (closure := walked.closure(pair)) is not None:
                return closure
            failed.add(pair)
    return None


def _without_units(kernel: Kernel) -> Kernel:
    """Dimensions and loops of extent one vanish."""
    buffers = {*kernel.buffers, *(s.buffer for s in walk(kernel.body) if isinstance(s, Allocate))}
    slim = {b: Buffer(b.name, b.dtype, [n for n in b.shape if n != 1], b.scope) for b in buffers if 1 in b.shape}
    units = {s.var: as_expr(0) for s in walk(kernel.body) if isinstance(s, For) and s.extent == 1}

    def kept(buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(i for i, n in zip(indices, buffer.shape, strict=True) if n != 1)

    def visit(s: Stmt) -> Stmt:
        if isinstance(s, For) and s.var in units:
            return visit(s.body)
        s = with_children(s, [visit(c) for c in children(s)])
        return Allocate(slim.get(s.buffer, s.buffer), s.body) if isinstance(s, Allocate) else s

    body = redirect(visit(kernel.body), lambda b, indices: (slim[b], kept(b, indices)) if b in slim else None)
    return _with_buffers(kernel, slim, rebind(body, units))


def _with_buffers(kernel: Kernel, new: dict[Buffer, Buffer], body: Stmt) -> Kernel:
    return replace(
        kernel,
        buffers=tuple(new.get(b, b) for b in kernel.buffers),
        outputs=tuple(new.get(b, b) for b in kernel.outputs),
        body=body,
    )


class _Walked:
    """What the loops of a program walk, and how."""

    def __init__(self, stmt: Stmt) -> None:
        self.extents: dict[Expr, Dim] = {}
        self.neighbours: dict[Pair, None] = {}
        self.accesses: list[tuple[Buffer, tuple[Expr, ...]]] = []
        self.pinned: set[Expr] = set()  # variables that occur in values or extents, not only in indices
        for s in walk(stmt):
            self.accesses += places(s)
            match s:
                case For(v, extent, body, kind):
                    self.extents[v] = extent
                    self.pinned.update(E.variables(as_expr(extent)))
                    if isinstance(body, For) and kind == body.kind and v not in E.variables(as_expr(body.extent)):
                        self.neighbours[v, body.var] = None
                case Store(_, _, value) | Accumulate(_, _, value):
                    self.pinned.update(_outside_of_reads(value))

    def closure(self, start: Pair) -> Closure | None:
        """The loop pairs and buffer dimensions that have to be merged together with `start`; None if some access forbids it."""
        pairs, dims, todo = {start}, dict[Buffer, int](), [start]
        while todo:
            outer, inner = todo.pop()
            if outer in self.pinned or inner in self.pinned:
                return None
            for buffer, indices in self.accesses:
                used = [d for d, i in enumerate(indices) if outer in (vs := E.variables(i)) or inner in vs]
                if not used:
                    continue
                d = used[0]
                whole = used == [d, d + 1] and indices[d] is outer and indices[d + 1] is inner
                if not whole or dims.get(buffer, d) != d:
                    return None
                if buffer not in dims:
                    dims[buffer] = d
                    for other, at in self.accesses:  # every other access to this buffer joins
                        if other is buffer:
                            pair = (at[d], at[d + 1])
                            if pair not in self.neighbours or any(
                                as_dim(n) != self.extents[v] for n, v in zip(buffer.shape[d : d + 2], pair, strict=True)
                            ):
                                return None
                            if pair not in pairs:
                                pairs.add(pair)
                                todo.append(pair)
        return (pairs, dims) if dims else None


def _outside_of_reads(e: Expr) -> Iterator[Expr]:
    """The variables that a value mentions other than in the indices of what it reads."""
    seen, todo = {e}, [e]
    while todo:
        x = todo.pop()
        if x.op == "var":
            yield x
        elif x.op != "read":
            todo += [a for a in x.args if a not in seen]
            seen.update(x.args)


def _merge(kernel: Kernel, pairs: set[Pair], dims: dict[Buffer, int]) -> Kernel:
    merged: dict[Buffer, Buffer] = {}
    for b, d in dims.items():
        extent = as_dim(as_expr(b.shape[d]) * as_expr(b.shape[d + 1]))
        merged[b] = Buffer(b.name, b.dtype, (*b.shape[:d], extent, *b.shape[d + 2 :]), b.scope)
    joined: dict[Expr, Expr] = {}  # outer variable -> joint variable

    def place(buffer: Buffer, indices: tuple[Expr, ...]) -> Place | None:
        if buffer not in merged:
            return None
        d = dims[buffer]
        return merged[buffer], (*indices[:d], joined[indices[d]], *indices[d + 2 :])

    def visit(s: Stmt) -> Stmt:
        if isinstance(s, For) and isinstance(s.body, For) and (s.var, s.body.var) in pairs:
            extent = as_dim(simplify(as_expr(s.extent) * as_expr(s.body.extent)))
            name = f"{s.var.attr.name}_{s.body.var.attr.name.rsplit('.', 1)[-1]}"
            joined[s.var] = loop_var(name, extent)
            return For(joined[s.var], extent, visit(s.body.body), s.kind)
        s = with_children(s, [visit(c) for c in children(s)])
        return Allocate(merged.get(s.buffer, s.buffer), s.body) if isinstance(s, Allocate) else s

    return _with_buffers(kernel, merged, redirect(visit(kernel.body), place))


def expand(kernel: Kernel, buffer: str, dim: int, factor: int) -> Kernel:
    """Dimension `dim` of a buffer becomes two: element [.., i, ..] is [.., i // factor, i % factor, ..] of the same memory.

    Legal when the extent is constant and `factor` divides it: buffers are dense and row-major, so it is only another view, of parameters
    as well. Good for indices that are quotients: after splitting the loops, the channels of a grouped convolution are two plain loops.

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A = te.placeholder((3,), name="A")
    >>> s = Schedule(te.compute((12,), lambda i: A[i // 4], name="B"))
    >>> s.expand("B", 0, 4)
    >>> s.split("B.i", 4)
    ('B.i.o', 'B.i.i')
    >>> print(s)
    kernel B(A: float32[3], B: float32[3, 4]) -> (B) {
      for B.i.o in 0..3 {
        for B.i.i in 0..4 {
          B[B.i.o, B.i.i] = A[B.i.o]
        }
      }
    }
    """
    old = find_buffer(kernel, buffer, "expand")
    if not 0 <= dim < len(old.shape):
        raise refuse(kernel, "expand", f"`{buffer}` has {len(old.shape)} dimensions, none is number {dim}")
    extent = old.shape[dim]
    if not isinstance(extent, int) or factor < 1 or extent % factor:
        raise refuse(kernel, "expand", f"{factor} is no divisor of the extent {extent} of dimension {dim} of `{buffer}`")
    new = Buffer(old.name, old.dtype, (*old.shape[:dim], extent // factor, factor, *old.shape[dim + 1 :]), old.scope)

    def places(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        i = indices[dim]
        return (*indices[:dim], i // factor, i % factor, *indices[dim + 1 :])

    return replace_buffer(kernel, old, new, places)
