"""Neighbouring loops as one, with the dimensions that they walk."""

from __future__ import annotations

from functools import partial
from itertools import compress

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import loop_extents
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.ir.simplify import as_dim, simplify
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import rebuild, replace_buffer

Pair = tuple[Expr, Expr]  # outer and inner loop variable
Closure = tuple[set[Pair], dict[L.Buffer, int]]  # pairs of loops, and the first of two dimensions of each buffer, to be merged together


def collapse(kernel: L.Kernel, apart: int | None = None) -> L.Kernel:
    """Merge all pairs of neighbouring dimensions that every nest walks together, and drop those of extent 1.

    Always legal: what cannot be merged stays, and programs with guards or while loops stay as they are. Good as the first step: long
    inner loops without tails are what vectorization, tiling and threads want. Parameters keep their memory, their shapes change. A loop
    whose extent is not known, a batch, stays outside of one that has `apart` iterations or more: that keeps an extent that is known.

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
    limits: list[int | None] = [None] if apart is None else [1, apart]  # known extents are merged with each other first
    for least in limits:
        failed = set[Pair]()
        while (found := _mergeable(kernel.body, failed, least)) is not None:
            kernel = _merge(kernel, *found)
    return kernel


def _without_units(kernel: L.Kernel) -> L.Kernel:
    """Dimensions and loops of extent one vanish, unless it is checked whether an index is 0."""
    places = [place for s in L.walk(kernel.body) for place in L.places(s)]
    checked = {(b, d) for b, indices in places for d, i in enumerate(indices) if any(e.op == "checked" for e in E.walk(i))}
    for b in editing.buffers_of(kernel).values():
        if 1 in b.shape:
            longer = [n != 1 or (b, d) in checked for d, n in enumerate(b.shape)]
            slim = L.Buffer(b.name, b.dtype, [*compress(b.shape, longer)], b.scope)
            kernel = replace_buffer(kernel, b, slim, partial(compress, selectors=longer))
    units = {v: as_expr(0) for v, extent in loop_extents(kernel.body).items() if extent == 1}

    def visit(s: L.Stmt) -> L.Stmt | None:
        return rebuild(s.body, visit) if isinstance(s, L.For) and s.var in units else None

    return kernel.with_body(editing.rebind(rebuild(kernel.body, visit), units))


def _mergeable(stmt: L.Stmt, failed: set[Pair], apart: int | None) -> Closure | None:
    """The loops and dimensions to be merged together with the first mergeable pair of neighbouring loops; None if no pair is. Pairs that
    cannot be merged are added to `failed`, and skipped. `apart`: see `collapse`."""
    extents, places, neighbours = loop_extents(stmt), list[L.Place](), dict[Pair, None]()
    pinned = set[Expr]()  # variables that occur in values or extents, not only in indices
    for s in L.walk(stmt):
        places += L.places(s)
        match s:
            case L.For(v, extent, body, kind):
                pinned.update(E.variables(as_expr(extent)))
                if isinstance(body, L.For) and kind == body.kind and v not in E.variables(as_expr(body.extent)):
                    neighbours[v, body.var] = None
            case L.Store(_, _, value) | L.Accumulate(_, _, value):
                pinned.update(e for e in E.walk(value, operands=E.value_operands) if e.op == "var")

    def closure(start: Pair) -> Closure | None:
        """The loop pairs and buffer dimensions that have to be merged together with `start`; None if some access forbids it."""
        pairs, dims, todo = {start}, dict[L.Buffer, int](), [start]
        while todo:
            outer, inner = todo.pop()
            if outer in pinned or inner in pinned:
                return None
            for buffer, indices in places:
                used = [d for d, i in enumerate(indices) if outer in (vs := E.variables(i)) or inner in vs]
                if not used:
                    continue
                d = used[0]
                if used != [d, d + 1] or indices[d : d + 2] != (outer, inner) or dims.get(buffer, d) != d:
                    return None
                if buffer not in dims:
                    dims[buffer] = d
                    joining = dict.fromkeys((at[d], at[d + 1]) for other, at in places if other is buffer)
                    if any(p not in neighbours or tuple(extents[v] for v in p) != buffer.shape[d : d + 2] for p in joining):
                        return None
                    todo += [p for p in joining if p not in pairs]
                    pairs.update(joining)
        return (pairs, dims) if dims else None

    def known_inside(pair: Pair) -> bool:
        outer, inner = (extents[v] for v in pair)
        return apart is not None and not isinstance(outer, int) and isinstance(inner, int) and inner >= apart

    for pair in (p for p in neighbours if p not in failed):
        if not known_inside(pair) and (found := closure(pair)) is not None:
            return found
        failed.add(pair)
    return None


def _merge(kernel: L.Kernel, pairs: set[Pair], dims: dict[L.Buffer, int]) -> L.Kernel:
    joined: dict[Expr, Expr] = {}  # outer variable -> joint variable

    def visit(s: L.Stmt) -> L.Stmt | None:
        if not isinstance(s, L.For) or not isinstance(s.body, L.For) or (s.var, s.body.var) not in pairs:
            return None
        extent = as_dim(simplify(as_expr(s.extent) * as_expr(s.body.extent)))
        joined[s.var] = loop_var(f"{s.var.name}_{editing.last_part(s.body.var.name)}", extent)
        return L.For(joined[s.var], extent, rebuild(s.body.body, visit), s.kind)

    def merged(d: int, at: editing.Indices) -> editing.Indices:
        return (*at[:d], joined[at[d]], *at[d + 2 :])

    kernel = kernel.with_body(rebuild(kernel.body, visit))
    for b, d in dims.items():
        extent = as_dim(as_expr(b.shape[d]) * as_expr(b.shape[d + 1]))
        new = L.Buffer(b.name, b.dtype, (*b.shape[:d], extent, *b.shape[d + 2 :]), b.scope)
        kernel = replace_buffer(kernel, b, new, partial(merged, d))
    return kernel
