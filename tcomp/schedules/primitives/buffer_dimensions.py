"""Dimensions of buffers: neighbouring ones collapsed into one, so that [n, h, w, c] becomes [n*h*w*c]; one expanded into two.

Buffers are dense and row-major, so both are only another view of the same memory. Dimensions are collapsed where each access to a buffer
indexes the pair by two neighbouring loops of its nest, each alone and over the full extent.
"""

from __future__ import annotations

from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.access import loop_extents
from tcomp.ir.expr import Expr, as_dim, as_expr, loop_var
from tcomp.ir.simplify import simplify
from tcomp.schedules.handles import Stage
from tcomp.schedules.primitives.editing import Indices, buffers_of, find_buffer, rebind, refuse, replace_buffer

Pair = tuple[Expr, Expr]  # outer and inner loop variable
Closure = tuple[set[Pair], dict[L.Buffer, int]]  # pairs of loops, and the first of two dimensions of each buffer, to be merged together


def collapse(kernel: L.Kernel) -> L.Kernel:
    """Merge all pairs of neighbouring dimensions that every nest walks together, and drop those of extent 1.

    Always legal: what cannot be merged stays, and programs with guards or while loops stay as they are. Good as the first step: long
    inner loops without tails are what vectorization, tiling and threads want. Parameters keep their memory, their shapes change.

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
    if any(isinstance(s, L.While | L.If | L.Call | L.Prefetch) for s in L.walk(kernel.body)):
        return kernel  # imperative programs keep their shape
    kernel = _without_units(kernel)
    failed, accesses = set[Pair](), _Accesses(kernel.body)
    while (pair := next((p for p in accesses.neighbours if p not in failed), None)) is not None:
        if (closure := accesses.closure(pair)) is None:
            failed.add(pair)
        else:
            kernel = _merge(kernel, *closure)
            accesses = _Accesses(kernel.body)
    return kernel


def _without_units(kernel: L.Kernel) -> L.Kernel:
    """Dimensions and loops of extent one vanish."""
    for b in buffers_of(kernel).values():
        if 1 in b.shape:
            kept = [d for d, n in enumerate(b.shape) if n != 1]
            slim = L.Buffer(b.name, b.dtype, [b.shape[d] for d in kept], b.scope)
            # mypy cannot infer lambdas with defaults.
            kernel = replace_buffer(kernel, b, slim, lambda at, kept=kept: tuple(at[d] for d in kept))  # type: ignore[misc]
    units = {v: as_expr(0) for v, extent in loop_extents(kernel.body).items() if extent == 1}

    def visit(s: L.Stmt) -> L.Stmt:
        if isinstance(s, L.For) and s.var in units:
            return visit(s.body)
        return L.with_children(s, [visit(c) for c in L.children(s)])

    return kernel.with_body(rebind(visit(kernel.body), units))


class _Accesses:
    """The accesses of a program, and which of its loops could be merged."""

    def __init__(self, stmt: L.Stmt) -> None:
        self.extents = loop_extents(stmt)
        self.neighbours: dict[Pair, None] = {}
        self.places: list[L.Place] = []
        self.pinned: set[Expr] = set()  # variables that occur in values or extents, not only in indices
        for s in L.walk(stmt):
            self.places += L.places(s)
            match s:
                case L.For(v, extent, body, kind):
                    self.pinned.update(E.variables(as_expr(extent)))
                    if isinstance(body, L.For) and kind == body.kind and v not in E.variables(as_expr(body.extent)):
                        self.neighbours[v, body.var] = None
                case L.Store(_, _, value) | L.Accumulate(_, _, value):
                    outside_of_reads = E.walk(value, operands=lambda e: () if e.op == "read" else e.args)
                    self.pinned.update(e for e in outside_of_reads if e.op == "var")

    def closure(self, start: Pair) -> Closure | None:
        """The loop pairs and buffer dimensions that have to be merged together with `start`; None if some access forbids it."""
        pairs, dims, todo = {start}, dict[L.Buffer, int](), [start]
        while todo:
            outer, inner = todo.pop()
            if outer in self.pinned or inner in self.pinned:
                return None
            for buffer, indices in self.places:
                used = [d for d, i in enumerate(indices) if outer in (vs := E.variables(i)) or inner in vs]
                if not used:
                    continue
                d = used[0]
                if used != [d, d + 1] or indices[d : d + 2] != (outer, inner) or dims.get(buffer, d) != d:
                    return None
                if buffer not in dims:
                    dims[buffer] = d
                    joining = dict.fromkeys((at[d], at[d + 1]) for other, at in self.places if other is buffer)
                    if any(p not in self.neighbours or tuple(self.extents[v] for v in p) != buffer.shape[d : d + 2] for p in joining):
                        return None
                    todo += [p for p in joining if p not in pairs]
                    pairs.update(joining)
        return (pairs, dims) if dims else None


def _merge(kernel: L.Kernel, pairs: set[Pair], dims: dict[L.Buffer, int]) -> L.Kernel:
    joined: dict[Expr, Expr] = {}  # outer variable -> joint variable

    def visit(s: L.Stmt) -> L.Stmt:
        if isinstance(s, L.For) and isinstance(s.body, L.For) and (s.var, s.body.var) in pairs:
            extent = as_dim(simplify(as_expr(s.extent) * as_expr(s.body.extent)))
            joined[s.var] = loop_var(f"{s.var.name}_{s.body.var.name.rsplit('.', 1)[-1]}", extent)
            return L.For(joined[s.var], extent, visit(s.body.body), s.kind)
        return L.with_children(s, [visit(c) for c in L.children(s)])

    kernel = kernel.with_body(visit(kernel.body))
    for b, d in dims.items():
        extent = as_dim(as_expr(b.shape[d]) * as_expr(b.shape[d + 1]))
        new = L.Buffer(b.name, b.dtype, (*b.shape[:d], extent, *b.shape[d + 2 :]), b.scope)
        # mypy cannot infer lambdas with defaults.
        kernel = replace_buffer(kernel, b, new, lambda at, d=d: (*at[:d], joined[at[d]], *at[d + 2 :]))  # type: ignore[misc]
    return kernel


def expand(kernel: L.Kernel, buffer: Stage, dim: int, factor: int) -> L.Kernel:
    """Dimension `dim` of a buffer becomes two: element [.., i, ..] is [.., i // factor, i % factor, ..] of the same memory.

    Legal when the extent is constant and `factor` divides it, for parameters as well. Good for indices that are quotients: after splitting
    the loops, the channels of a grouped convolution are two plain loops.

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
    old = find_buffer(kernel, buffer)
    if not 0 <= dim < len(old.shape):
        raise refuse(f"`{buffer}` has {len(old.shape)} dimensions, none is number {dim}")
    extent = old.shape[dim]
    if not isinstance(extent, int) or factor < 1 or extent % factor:
        raise refuse(f"{factor} is no divisor of the extent {extent} of dimension {dim} of `{buffer}`")
    new = L.Buffer(old.name, old.dtype, (*old.shape[:dim], extent // factor, factor, *old.shape[dim + 1 :]), old.scope)

    def places(indices: Indices) -> Indices:
        i = indices[dim]
        return (*indices[:dim], i // factor, i % factor, *indices[dim + 1 :])

    return replace_buffer(kernel, old, new, places)
