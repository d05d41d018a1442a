"""Online softmax: a maximum, and sums of exponentials relative to it, in one pass over blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Expr, as_expr, loop_var
from tcomp.ir.polyhedral.inverse_maps import holds, inverse
from tcomp.ir.simplify import as_dim, prove, same_dim, simplify
from tcomp.schedules.analysis.access_patterns import Nest, nest_of
from tcomp.schedules.handles import Loop, Stage
from tcomp.schedules.instructions import tf32
from tcomp.schedules.primitives import editing
from tcomp.schedules.primitives.editing import enclose, fresh, guard, path, reads, refuse, refuse_if, renamed, sequence
from tcomp.schedules.primitives.guards import iterations

FLOATS = ("float16", "float32", "float64")


def online(kernel: L.Kernel, stage: Stage, loop: Loop, factor: int) -> tuple[L.Kernel, str, str, str, str]:
    """A maximum M = max(x[k]), and the sums A = sum(exp(x[k] - M) * v[k]) that follow it, in one loop over blocks of k, `factor` long.

    Each block raises the maximum so far, scales what has been summed up so far by exp(maximum before - maximum now), and adds its own
    terms. So x and the exponentials are needed block by block, and never as a whole. Returns the names of (the loop over blocks, the
    block's x, its exponentials, the scale).

    Legal where `loop` is the only reduction loop of the maximum `stage`, and stands next to the nests of the sums: those that read the
    maximum, each of them once, in exp(x - maximum), rounded or not, with the x of the maximum. Nothing else may use the sums, or change
    what they are computed from, in between. Floats are rounded otherwise (always in the same way, for one factor). -inf, infinite maxima
    and NaN give what they gave: no difference is taken to a maximum below all finite numbers, and a sum of nothing but -inf becomes NaN at
    the end. Blocks at the end in which x is -inf, by a condition on the loops, are left out: their exponentials are 0 (a causal mask: about
    half of all blocks; what is not finite there is not multiplied by 0). Good for long rows, attention above all: what is computed for a
    block is used while it is in a cache.

    Sources: M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax" (2018); T. Dao et al., "FlashAttention" (2022).

    >>> A, k = te.placeholder((12,), name="A"), te.reduce_axis(12, "k")
    >>> M = te.compute((), lambda: te.max(A[k], k), "M")
    >>> T = te.compute((), lambda: te.sum(te.exp(A[k] - M[()]), k), "T")
    >>> s = Schedule([A, T, M])
    >>> s.online("M", "M.k", 4)
    ('M.k.o', 'M.terms', 'M.weights', 'M.scale')
    >>> print(s.loops["M.k.o"])
    for M.k.o in 0..3 {
      alloc M.terms: float32[4]
      alloc M.weights: float32[4]
      alloc M.scale: float32[]
      for M.terms.k in 0..4 {
        M.terms[M.terms.k] = A[M.k.o * 4 + M.terms.k]
      }
      M.scale[] = M[]
      for M.k.i in 0..4 {
        M[] max= M.terms[M.k.i]
      }
      M.scale[] = exp(max(M.scale[], -3.4028234663852886e+38f) - max(M[], -3.4028234663852886e+38f))
      for M.weights.k in 0..4 {
        M.weights[M.weights.k] = exp(M.terms[M.weights.k] - max(M[], -3.4028234663852886e+38f))
      }
      T[] = T[] * M.scale[]
      for T.k.i in 0..4 {
        T[] += M.weights[T.k.i]
      }
    }
    """
    buffer, target = editing.find_buffer(kernel, stage), editing.find_loop(kernel, loop)
    editing.check_factor(factor, "length of a block")
    home, items = _sequence_around(kernel, target)
    top = _maximum(kernel, items, buffer, target)
    users = [(x, nest_of(x)) for x in items[items.index(top.stmt) + 1 :] if buffer in reads([x])]
    sums = [_sum(top, items, x, found) for x, found in users if found is not None and found.is_reduction]
    refuse_if(not sums, f"nothing next to `{loop}` sums up exponentials relative to `{stage}`", "`inline` them into the sums")
    _check_between(items, top, sums)
    over_blocks, finals, (outer, terms, weights, scale) = _in_blocks(kernel, top, sums, factor)
    moved = {top.stmt, *(a.stmt for a in sums)}
    last = max(items.index(a.stmt) for a in sums)
    new = L.block(*(x for x in items[:last] if x not in moved), over_blocks, *finals, *items[last + 1 :])
    inside = {s for x in items for s in L.walk(x)}
    here = [s.buffer for s in L.walk(home) if isinstance(s, L.Allocate) and s not in inside]
    return editing.replaced(kernel, {home: L.allocated(here, new)}), outer, terms, weights, scale


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A nest around one accumulation, and the loop of it that is cut into blocks."""

    stmt: L.Stmt
    nest: Nest
    update: L.Accumulate
    along: L.For


@dataclass(frozen=True, slots=True)
class _Sum(_Reduction):
    """A sum of terms that have the factor `weight`, the exponential of x minus the element `at` of the maximum."""

    weight: Expr
    at: tuple[Expr, ...]


def _sequence_around(kernel: L.Kernel, target: L.For) -> tuple[L.Stmt, tuple[L.Stmt, ...]]:
    """The innermost sequence with an item that is a nest around one statement, `target` being one of its loops."""
    home: L.Stmt = kernel.body
    while True:
        items = sequence(home)
        item = next(x for x in items if path(x, target))
        if nest_of(item) is not None or not L.children(item) or item is target:
            return home, items
        home = next(c for c in L.children(item) if path(c, target))


def _reduction(items: Sequence[L.Stmt], nest: L.Stmt, along: L.For, op: str) -> _Reduction:
    """A nest that accumulates by `add` or `max`, over `along`, into a buffer that one other item writes, setting it to the identity."""
    found = nest_of(nest)
    if found is None or not isinstance(found.leaf, L.Accumulate):
        raise refuse(f"`{along.var.name}` is not a loop of a nest around a single accumulation")
    update, buffer = found.leaf, found.leaf.buffer
    r, name = update.reducer, update.buffer.name
    refuse_if(r.op != op or buffer.dtype not in FLOATS, f"`{name}` is not a {'sum' if op == 'add' else 'maximum'} of {', '.join(FLOATS)}")
    refuse_if(along in found.spatial or E.reads(*update.indices), f"`{along.var.name}` is not a reduction loop of `{name}`")
    variables = {x.var for x in found.loops}
    for x in found.loops:
        moving = x.kind != L.SERIAL or variables & set(E.variables(as_expr(x.extent))) or E.reads(as_expr(x.extent))
        why = f"the loop `{x.var.name}` is {x.kind}, with the extent {x.extent}"
        refuse_if(moving, why, "loops of its nests have to be serial, and their extents the same in all iterations")
    known = inverse(update.indices, buffer.shape, found.spatial).values
    refuse_if(any(x.var not in known for x in found.spatial), f"the index of `{name}` does not tell the iteration")
    writers = [x for x in items if editing.writes(x, buffer) and x is not nest]
    clear = L.perfect(writers[0])[1] if writers else None
    if len(writers) != 1 or not isinstance(clear, L.Store) or clear.value is not r.identity or not editing.stores_all(writers[0], buffer):
        raise refuse(f"the nest that sets `{name}` to {r.identity} does not stand next to `{along.var.name}`")
    refuse_if(items.index(writers[0]) > items.index(nest), f"`{name}` is written after it has been accumulated")
    return _Reduction(nest, found, update, along)


def _maximum(kernel: L.Kernel, items: Sequence[L.Stmt], buffer: L.Buffer, target: L.For) -> _Reduction:
    nest = next(x for x in items if path(x, target))
    found = _reduction(items, nest, target, "max")
    name, reduced = target.var.name, found.update.buffer
    refuse_if(reduced is not buffer, f"`{name}` is a reduction loop of `{reduced.name}`, not of `{buffer.name}`")
    partly = found.nest.reduction_loops != (target,) or len(found.nest.element_conditions) != len(found.nest.conditions)
    refuse_if(partly, f"`{name}` is not the only reduction loop of `{buffer.name}`, or not all elements are reduced")
    refuse_if(buffer in reads([nest]), f"`{buffer.name}` is computed from its own elements")
    for x in editing.enclosing(kernel, nest):
        refuse_if(x.kind not in (L.SERIAL, L.PARALLEL), f"the loop `{x.var.name}` around the maximum is {x.kind} already")
    return found


def _sum(top: _Reduction, items: Sequence[L.Stmt], stmt: L.Stmt, found: Nest) -> _Sum:
    """A nest that reads the maximum, as a sum of exponentials relative to it."""
    maximum, value, name = top.update.buffer, found.leaf.value, found.writes.name
    weights = [e for e in E.walk(value) if e.op == "exp" and any(r.attr is maximum for r in E.reads(e))]
    uses = {r for r in E.reads(value, *found.conditions, *found.leaf.indices) if r.attr is maximum}
    exponent = weights[0].args[0] if len(weights) == 1 else None
    if exponent is None or exponent.op != "sub" or exponent.args[1] not in uses or len(uses) != 1 or not _linear(value, weights[0]):
        why = f"`{name}` is not a sum of products with one exponential of a difference to `{maximum.name}`"
        raise refuse(why, "`inline` exponentials; a sum that is divided by another one is divided after the reduction")
    rest = E.rewrite(value, lambda e: E.const(1, e.dtype) if e is weights[0] else None)
    again = any(r.attr is maximum for r in E.reads(exponent.args[0], rest, *found.conditions, *found.leaf.indices))
    refuse_if(again, f"`{name}` uses `{maximum.name}` for more than one difference", "the maximum rises until the end")
    at = exponent.args[1].args
    values, conditions = inverse(top.update.indices, maximum.shape, top.nest.spatial).at(at)
    refuse_if(not all(map(holds, conditions)), f"`{name}` may use elements of `{maximum.name}` that are not computed")

    def term(x: L.For) -> Expr:
        return simplify(E.substitute(top.update.value, {**values, top.along.var: x.var}))

    matching = [x for x in found.loops if same_dim(x.extent, top.along.extent) and term(x) is simplify(exponent.args[0])]
    if not matching:
        why = f"cannot see that what `{name}` takes the difference of is what `{maximum.name}` is the maximum of"
        raise refuse(f"{why}: {exponent.args[0]} and {top.update.value}")
    total = _reduction(items, stmt, matching[0], "add")
    partly = len(found.element_conditions) < len(found.conditions)
    refuse_if(partly, f"some terms of `{name}` are left out", "where all of them are, the sum has to stay 0")
    for x in found.reduction_loops:
        idle = x is not total.along and not prove(as_expr(x.extent) >= 1)
        refuse_if(idle, f"`{x.var.name}` may have no iteration: its extent is {x.extent}")
    refuse_if(any(x.var in E.variables(*at) for x in found.reduction_loops), f"an element of `{name}` is a sum over several maxima")
    needed = {c for c in (simplify(E.substitute(c, values)) for c in top.nest.conditions) if not holds(c)}
    refuse_if(needed - set(map(simplify, found.element_conditions)), f"`{name}` may be summed up where `{maximum.name}` is not computed")
    return _Sum(stmt, found, total.update, total.along, weights[0], at)


def _linear(value: Expr, factor: Expr) -> bool:
    """Whether a value is the factor times something. The factor may be rounded to other floats first: it is at most 1."""
    if value is factor or (factor.dtype == "float32" and value is tf32(factor)):
        return True
    if value.op == "cast" and is_float(value.dtype) and is_float(value.args[0].dtype) and value.args[0].op in ("cast", "exp"):
        return _linear(value.args[0], factor)
    having = [a for a in value.args if factor in E.walk(a)]
    return value.op == "mul" and len(having) == 1 and _linear(having[0], factor)


def _check_between(items: Sequence[L.Stmt], top: _Reduction, sums: Sequence[_Sum]) -> None:
    """Refuses unless the sums are independent of each other, and of all that stands between them and the maximum."""
    nests = [top.stmt, *(a.stmt for a in sums)]
    results = {top.update.buffer, *(a.update.buffer for a in sums)}
    sources = reads(nests)
    for a in sums:
        for b in (reads([a.stmt]) & results) - {top.update.buffer}:
            raise refuse(f"`{a.update.buffer.name}` is computed from `{b.name}`", "divide after the reduction, not inside of it")
    for x in items[items.index(top.stmt) : max(map(items.index, nests)) + 1]:
        used = (reads([x]) & results) | {b for b in sources if editing.writes(x, b)}
        if used and not any(editing.writes(x, b) for b in results):  # what clears a sum may stand there
            names = ", ".join(sorted(b.name for b in used))
            raise refuse(f"something between the maximum and the last sum uses {names}", "move or `inline` it first")


def _in_blocks(kernel: L.Kernel, top: _Reduction, sums: Sequence[_Sum], factor: int) -> tuple[L.Stmt, list[L.Stmt], list[str]]:
    """The loop over blocks, what stands behind it for each sum, and the names of the loop, the block's x, its exponentials, the scale."""
    maximum, places, conditions = top.update.buffer, top.update.indices, top.nest.conditions
    extent = as_expr(top.along.extent)
    count = as_dim((extent + (factor - 1)) // factor)
    shapes = {"terms": (*maximum.shape, factor), "weights": (*maximum.shape, factor), "scale": maximum.shape}
    local = [L.Buffer(fresh(kernel, f"{maximum.name}.{part}"), maximum.dtype, shape) for part, shape in shapes.items()]
    terms, weights, scale = local
    inner = loop_var(fresh(kernel, f"{top.along.var.name}.i"), factor)
    outer = loop_var(fresh(kernel, f"{top.along.var.name}.o"), count)
    if (end := _end_of_finite(top, outer, inner, factor)) is not None:
        count = as_dim(E.minimum(as_expr(count), end if prove(end >= 0) else E.maximum(end, 0)))
        outer = loop_var(outer.name, count)
    current, previous = E.read(maximum, places), E.read(scale, places)

    def moved(e: Expr, along: L.For, v: Expr) -> Expr:
        return simplify(E.substitute(e, {along.var: outer * factor + v}))

    def nest(a: _Reduction, leaf: L.Stmt, part: str) -> L.Stmt:
        """A statement for each element of a reduction; the loops have names of their own, after what the nest is called."""
        names = {x.var.name: editing.part_name(kernel, part, a.update.buffer, x.var.name) for x in a.nest.spatial}
        return renamed(enclose(a.nest.spatial, leaf), lambda name: names.get(name, name))

    def by_place(buffer: L.Buffer, value: Callable[[Expr], Expr]) -> L.Stmt:
        """A nest that stores an element of a buffer for each element of the block."""
        v = loop_var(editing.part_name(kernel, buffer.name, maximum, top.along.var.name), factor)
        store = L.For(v, factor, L.Store(buffer, (*places, v), value(v)))
        return nest(top, guard([*conditions, outer * factor + v < extent], store), buffer.name)

    def by_row(value: Expr, part: str) -> L.Stmt:
        return nest(top, guard(conditions, L.Store(scale, places, value)), part)

    def accumulated(a: _Reduction, v: Expr, value: Expr) -> L.Stmt:
        """The reduction over a block, in a loop over `v`."""
        loops = [L.For(v, factor, x.body) if x is a.along else x for x in a.nest.loops]
        inside = [*(moved(c, a.along, v) for c in a.nest.conditions), outer * factor + v < extent]
        return guard(inside, enclose(loops, replace(a.update, value=value)))

    def raised(a: _Sum) -> Iterator[L.Stmt]:
        """The update of a sum: its old value relative to the new maximum, and the terms of the block."""
        store = L.Store(a.update.buffer, a.update.indices, E.read(a.update.buffer, a.update.indices) * E.read(scale, a.at))
        yield nest(a, guard(a.nest.element_conditions, store), f"{a.update.buffer.name}.scaled")
        v = loop_var(fresh(kernel, f"{a.along.var.name}.i"), factor)
        weight = E.read(weights, (*a.at, v))
        yield accumulated(a, v, moved(E.rewrite(a.update.value, lambda e: weight if e is a.weight else None), a.along, v))

    def final(a: _Sum) -> L.Stmt:
        """The sum, or NaN where all x are -inf: there their differences to the maximum are NaN."""
        result, highest = E.read(a.update.buffer, a.update.indices), E.read(maximum, a.at)
        value = E.select(E.equal(highest, top.update.reducer.identity), highest - highest, result)
        store = L.Store(a.update.buffer, a.update.indices, value)
        return nest(a, guard([*a.nest.element_conditions, extent >= 1], store), f"{a.update.buffer.name}.final")

    body = L.block(
        by_place(terms, lambda v: moved(top.update.value, top.along, v)),
        by_row(current, f"{scale.name}.init"),
        accumulated(top, inner, E.read(terms, (*places, inner))),
        by_row(E.unary("exp", _at_least_finite(previous) - _at_least_finite(current)), scale.name),
        by_place(weights, lambda v: E.unary("exp", E.read(terms, (*places, v)) - _at_least_finite(current))),
        *(s for a in sums for s in raised(a)),
    )
    return L.For(outer, count, L.allocated(local, body)), [*map(final, sums)], [outer.name, *(b.name for b in local)]


def _end_of_finite(top: _Reduction, outer: Expr, inner: Expr, factor: int) -> Expr | None:
    """The block from which on all elements are -inf: they are so where a condition does not hold. None if that is not known."""
    value = top.update.value
    if value.op != "select" or value.args[2] is not top.update.reducer.identity:
        return None
    inside = {inner: as_expr(factor), **{x.var: as_expr(x.extent) for x in top.nest.spatial}}
    ends = [iterations(E.substitute(c, {top.along.var: outer * factor + inner}), outer, inside) for c in E.conjuncts(value.args[0])]
    return next((end for end in ends if end is not None), None)


def _at_least_finite(x: Expr) -> Expr:
    """The larger of a maximum and the lowest finite number: exp(-inf - lowest) is 0, where exp(-inf - -inf) would be NaN."""
    return E.maximum(x, E.const(float(np.finfo(x.dtype).min), x.dtype))
