"""The shape of loop nests: split, reorder, fuse, partition."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import Accumulate, Allocate, For, Kernel, Store, block, walk
from tcomp.ir.simplify import linear, prove, simplify
from tcomp.schedules.legality import disorder
from tcomp.schedules.primitives.edit import (
    enclosing,
    find_loop,
    fresh,
    guard,
    nesting,
    perfect,
    rebind,
    refuse,
    refuse_conflict,
    renamed,
    replace_loop,
)
from tcomp.schedules.primitives.tails import in_range, masked, padded, repeatable

TAILS = ("guard", "mask", "peel", "shift_inwards", "round_up")


def split(kernel: Kernel, loop: str, factor: int, tail: str = "guard") -> tuple[Kernel, *tuple[str, ...]]:
    """DOC_SPLIT"""
    target = find_loop(kernel, loop, "split")
    if factor < 1:
        raise refuse(kernel, "split", f"factor {factor} is not positive")
    if tail not in TAILS:
        raise refuse(kernel, "split", f"unknown tail `{tail}`; one of {', '.join(TAILS)}")
    _steady(kernel, target, "split")
    if tail == "peel":
        point = _size(kernel, target.extent) // factor * factor
        kernel, head, rest = _parted(kernel, target, as_dim(point))
        kernel, *(outer_name, inner_name) = split(kernel, head, factor)
        return kernel, outer_name, inner_name, rest
    extent = as_expr(target.extent)
    outer_extent = as_dim((extent + (factor - 1)) // factor)
    outer = loop_var(fresh(kernel, loop + ".o"), outer_extent)
    inner = loop_var(fresh(kernel, loop + ".i"), factor)
    index = outer * factor + inner
    whole = prove(index < extent)
    if tail == "shift_inwards" and not whole:
        if not prove(extent >= factor):
            raise refuse(kernel, "split", f"cannot prove that `{loop}` has the {factor} iterations of one tile; its extent is {extent}")
        repeatable(kernel, target)
        index = E.minimum(outer * factor, extent - factor) + inner
    if tail == "round_up" and not whole:
        if not set(E.variables(extent)) <= set(kernel.scalars):
            raise refuse(kernel, "split", f"the extent of `{loop}` depends on a loop: {extent}", "`round_up` pads buffers, whose sizes are fixed")
        kernel = padded(kernel, target, as_expr(outer_extent) * factor)
        target = find_loop(kernel, loop)
    body = rebind(target.body, {target.var: index})
    if tail == "guard":
        body = guard([index < extent], body)
    if tail == "mask" and not whole:
        body = masked(kernel, [simplify(index < extent)], body)
    new = For(outer, outer_extent, For(inner, factor, body), target.kind)
    if tail == "round_up" and not whole:
        in_range(kernel, new, outer, inner)
    return replace_loop(kernel, target, new), outer.attr.name, inner.attr.name


def reorder(kernel: Kernel, *order: str, reassociate: bool = False) -> Kernel:
    """Perfectly nested loops take the given order; loops of the nest that are not named keep their places.

    Legal when iterations that touch one element, at least one of them writing, stay in order; with `reassociate`, accumulations into
    one element may change theirs (which changes the rounding of floats).
    """
    if len(set(order)) != len(order) or not order:
        raise refuse(kernel, "reorder", f"the order ({', '.join(order)}) should name some loops, each once")
    wanted = [find_loop(kernel, name, "reorder") for name in order]
    top = next(s for s in walk(kernel.body) if s in wanted)
    loops, leaf = perfect(top)
    if any(w not in loops for w in wanted):
        missing = [w.var.attr.name for w in wanted if w not in loops]
        raise refuse(kernel, "reorder", f"{', '.join(missing)} is not in one perfect nest with {top.var.attr.name}")
    for x in loops:
        _steady(kernel, x, "reorder")
    places = iter(wanted)
    arranged = [next(places) if outer in wanted else outer for outer in loops]
    seen: set[Expr] = set()
    for outer in arranged:
        if set(E.variables(as_expr(outer.extent))) & {x.var for x in loops if x.var not in seen}:
            raise refuse(kernel, "reorder", f"the extent of {outer.var.attr.name} depends on a loop that would stand inside it")
        seen.add(outer.var)
    if arranged != loops and (conflict := disorder(loops, arranged, reassociate, kernel.body)) is not None:
        moved = [new.var.name for old, new in zip(loops, arranged, strict=True) if old is not new]
        raise refuse_conflict(kernel, "reorder", f"iterations of {', '.join(moved)}", conflict)
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
    _steady(kernel, first, "fuse")
    _steady(kernel, second, "fuse")
    rows, columns = _size(kernel, first.extent), _size(kernel, second.extent)
    extent = as_dim(rows * columns)
    v = loop_var(fresh(kernel, f"{outer}_{inner.rsplit('.', 1)[-1]}"), extent)
    body = rebind(second.body, {first.var: v // columns, second.var: v % columns})
    return replace_loop(kernel, first, For(v, extent, body, first.kind)), v.attr.name


def partition(kernel: Kernel, loop: str, point: Dim) -> tuple[Kernel, str, str]:
    """The first `point` iterations and the rest become two loops, each simplified for its range: guards vanish from the first.

    Legal where 0 <= point <= extent can be proved. Returns the names of the loops; the second is renamed with `.t` (tail).
    """
    target = find_loop(kernel, loop, "partition")
    _steady(kernel, target, "partition")
    around = {x.var for x in enclosing(kernel, target)}
    for v in E.variables(as_expr(point)):
        if v not in around and v not in kernel.scalars:
            raise refuse(kernel, "partition", f"`{v.name}` is neither a size nor a loop around `{loop}`")
    if _size(kernel, point) is not as_expr(point) or not _at_most(as_expr(point), as_expr(target.extent)):
        raise refuse(kernel, "partition", f"cannot prove that {point} lies between 0 and the extent of `{loop}`, {target.extent}")
    return _parted(kernel, target, point)


def _parted(kernel: Kernel, target: For, point: Dim) -> tuple[Kernel, str, str]:
    """A loop in two: the first `point` iterations, and the others."""
    loop = target.var.attr.name
    head_var = loop_var(loop, point)
    head = For(head_var, as_dim(point), rebind(target.body, {target.var: head_var}), target.kind)
    rest = as_dim(as_expr(target.extent) - as_expr(point))
    name = fresh(kernel, loop + ".t")
    tail_var = loop_var(name, rest)
    tail = rebind(renamed(target.body, lambda n: fresh(kernel, n + ".t")), {target.var: tail_var + as_expr(point)})
    return replace_loop(kernel, target, block(head, For(tail_var, rest, tail, target.kind))), loop, name


def _steady(kernel: Kernel, loop: For, step: str) -> None:
    """Refuse if the loop changes its own extent, which is computed once, before the first iteration."""
    written = {s.buffer for s in walk(loop.body) if isinstance(s, Store | Accumulate)}
    for r in E.reads(as_expr(loop.extent)):
        if r.attr in written:
            raise refuse(kernel, step, f"the extent of `{loop.var.attr.name}` reads `{r.attr.name}`, which is written inside the loop")


def _size(kernel: Kernel, extent: Dim) -> Expr:
    """The number of iterations: the extent, or 0 where it may be negative."""
    dims = [as_expr(d) for s in walk(kernel.body) if isinstance(s, Allocate) for d in s.buffer.shape]
    dims += [as_expr(d) for b in kernel.buffers for d in b.shape]  # no buffer has a negative size

    def counts(e: Expr) -> bool:
        if e.op == "floordiv" and e.args[1].op == "const" and e.args[1].attr > 0:
            return counts(e.args[0])
        return prove(e >= 0) or (e.op == "mul" and all(map(counts, e.args))) or any(prove(e >= d) for d in dims)

    e = as_expr(extent)
    return e if counts(e) else simplify(E.maximum(e, 0))


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
