"""The shape of loop nests: split, reorder, fuse, partition."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import (
    For,
    Kernel,
    block,
    map_expressions,
    walk,
)
from tcomp.ir.simplify import linear, prove, simplify
from tcomp.schedules.dependence import conflict
from tcomp.schedules.primitives.edit import find_loop, fresh, guard, nesting, perfect, refuse, rename_inner, replace_loop


def split(kernel: Kernel, loop: str, factor: int) -> tuple[Kernel, str, str]:
    """`for i in n` becomes `for i.o in ceil(n / factor): for i.i in factor`, guarded where factor does not divide n.

    Always legal. Returns the kernel and the names of the two loops.
    """
    target = find_loop(kernel, loop, "split")
    if factor < 1:
        raise refuse(kernel, "split", f"factor {factor} is not positive")
    extent = as_expr(target.extent)
    outer_extent = as_dim((extent + (factor - 1)) // factor)
    outer = loop_var(fresh(kernel, loop + ".o"), outer_extent)
    inner = loop_var(fresh(kernel, loop + ".i"), factor)
    index = outer * factor + inner
    body = map_expressions(target.body, lambda e: simplify(E.substitute(e, {target.var: index})))
    body = guard([index < extent], body)
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
    loops, leaf = perfect(top)
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
    return nesting(kernel, "reorder", replace_loop(kernel, top, body))


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
    v = loop_var(fresh(kernel, f"{outer}_{inner.rsplit('.', 1)[-1]}"), extent)
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
    name = fresh(kernel, loop + ".t")
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
