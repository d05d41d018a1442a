"""Online softmax: a maximum, and sums of exponentials relative to it, in one pass over blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tcomp.ir import expr as E
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import PARALLEL, SERIAL, Accumulate, Allocate, Block, Buffer, For, Kernel, Stmt, Store, block, children, perfect
from tcomp.ir.simplify import prove, same_dim, simplify
from tcomp.schedules.analysis.inverse_maps import holds, inverse
from tcomp.schedules.instructions import tf32
from tcomp.schedules.primitives.editing import check_factor, enclosing, find_buffer, find_loop, fresh, guard, rebuild, refuse, renamed
from tcomp.schedules.primitives.insertion_points import Chain, chain_of, path, reads, sequence, stores_all, writes

FLOATS = ("float16", "float32", "float64")


def online(kernel: Kernel, stage: str, loop: str, factor: int) -> tuple[Kernel, str, str, str, str]:
    """A maximum M = max(x[k]), and the sums A = sum(exp(x[k] - M) * v[k]) that follow it, in one loop over blocks of k, `factor` long.

    Each block raises the maximum so far, scales down what has been summed up so far by exp(maximum before - maximum now), and adds its own
    terms. So x and the exponentials are needed block by block, and never as a whole. Returns the names of (the loop over blocks, the
    block's x, its exponentials, the scale).

    Legal where `loop` is the only reduction loop of the maximum `stage`, and stands beside the nests of the sums: those that read the maximum, each
    of them once, in exp(x - maximum), rounded or not, with the x of the maximum. Nothing else may use the sums, or change what they are
    computed from, in between. Floats are rounded otherwise (always in the same way, for one factor). Elements of -inf, infinite maxima and NaN give what
    they gave: no difference is taken to a maximum below all finite numbers, and a sum of nothing but -inf becomes NaN at the end.

    Good for long rows, attention above all: what is computed for a block of the row is used up while it is near.

    Sources: M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax" (2018); T. Dao et al., "FlashAttention" (2022).

    >>> from tcomp import te
    >>> from tcomp.schedules import Schedule
    >>> A, k = te.placeholder((12,), name="A"), te.reduce_axis(12, "k")
    >>> M = te.compute((), lambda: te.max(A[k], k), "M")
    >>> T = te.compute((), lambda: te.sum(te.exp(A[k] - M[()]), k), "T")
    >>> s = Schedule([A, T, M])
    >>> s.online("M", "M.k", 4)
    ('M.k.o', 'M.terms', 'M.weights', 'M.scale')
    >>> print(s.kernel.body)
    M[] = float32(-inf)
    T[] = 0.0f
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
    T[] = select(M[] == float32(-inf), M[] - M[], T[])
    """
    step = "online"
    buffer, target = find_buffer(kernel, stage, step), find_loop(kernel, loop, step)
    check_factor(kernel, step, factor, "length of a block")
    home, items = _sequence_around(kernel, target)
    top = _maximum(kernel, items, buffer, target)
    start = items.index(top.nest)
    sums = [_sum(kernel, top, items, item) for item in items[start + 1 :] if _reduces_with(item, buffer)]
    if not sums:
        raise refuse(kernel, step, f"nothing beside `{loop}` sums up exponentials relative to `{stage}`", "`inline` them into the sums")
    _check_between(kernel, items, top, sums)
    parts = _Parts(kernel, top, factor)
    moved = {top.nest, *(a.nest for a in sums)}
    last = max(items.index(a.nest) for a in sums)
    new: list[Stmt] = [x for x in items[:last] if x not in moved]
    new += [parts.loop(sums), *(parts.final(a) for a in sums), *items[last + 1 :]]
    body = block(*new)
    for allocated in reversed([s.buffer for s in _allocations(home)]):
        body = Allocate(allocated, body)
    return kernel.with_body(rebuild(kernel.body, lambda s: body if s is home else None)), *parts.names


# ---------------------------------------------------------------- what is there


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A nest around one accumulation: its loops but the one that is cut into blocks, that one, conditions, and the accumulation."""

    nest: Stmt
    chain: Chain
    update: Accumulate
    along: For

    @property
    def rows(self) -> list[For]:
        """The loops over elements."""
        return [x for x in self.chain.loops if x.var in E.variables(*self.update.indices)]

    @property
    def conditions(self) -> list[Expr]:
        return [part for c in self.chain.conditions for part in E.conjuncts(c)]

    @property
    def of_rows(self) -> list[Expr]:
        """The conditions that say which elements are accumulated into."""
        reduced = {x.var for x in self.chain.loops} - {x.var for x in self.rows}
        return [c for c in self.conditions if reduced.isdisjoint(E.variables(c))]


@dataclass(frozen=True, slots=True)
class _Sum(_Reduction):
    """A sum of terms that have the factor `weight`, the exponential of x minus the element `at` of the maximum."""

    weight: Expr
    at: tuple[Expr, ...]


def _sequence_around(kernel: Kernel, target: For) -> tuple[Stmt, tuple[Stmt, ...]]:
    """The innermost sequence with an item that is a nest around one statement, `target` being one of its loops."""
    home: Stmt = kernel.body
    while True:
        items = sequence(home)
        item = next(x for x in items if path(x, target))
        if chain_of(item) is not None or not children(item) or item is target:
            return home, items
        home = next(c for c in children(item) if path(c, target))


def _allocations(stmt: Stmt) -> list[Allocate]:
    """Those that stand in a sequence itself."""
    here = [stmt] if isinstance(stmt, Allocate) else []
    return [*here, *(s for c in children(stmt) for s in _allocations(c))] if isinstance(stmt, Block | Allocate) else []


def _reduction(kernel: Kernel, items: Sequence[Stmt], nest: Stmt, along: For, reducer: str) -> _Reduction:
    """A nest that accumulates by the reducer, over `along`, into a buffer that another item sets to the identity, and no one else
    writes."""
    found = chain_of(nest)
    if found is None or not isinstance(found.write, Accumulate):
        raise refuse(kernel, "online", f"`{along.var.name}` is no loop of a nest around a single accumulation")
    update, buffer = found.write, found.write.buffer
    r, name = update.reducer, update.buffer.name
    combined = (r.lhs + r.rhs, r.rhs + r.lhs) if reducer == "+" else (E.maximum(r.lhs, r.rhs), E.maximum(r.rhs, r.lhs))
    if r.combine not in combined or buffer.dtype not in FLOATS:
        raise refuse(kernel, "online", f"`{name}` is no {'sum' if reducer == '+' else 'maximum'} of {', '.join(FLOATS)}")
    used = E.variables(*update.indices)
    if along.var in used or E.reads(*update.indices):
        raise refuse(kernel, "online", f"`{along.var.name}` is no reduction loop of `{name}`")
    variables = {x.var for x in found.loops}
    for x in found.loops:
        if x.kind != SERIAL or not variables.isdisjoint(E.variables(as_expr(x.extent))) or E.reads(as_expr(x.extent)):
            why = f"the loop `{x.var.name}` is {x.kind}, with the extent {x.extent}"
            raise refuse(kernel, "online", why, "loops of its nests have to be serial, and their extents the same in all iterations")
    places = inverse(update.indices, buffer.shape, [x for x in found.loops if x.var in used])
    if not all(x.var in places.values for x in found.loops if x.var in used):
        raise refuse(kernel, "online", f"the index of `{name}` does not tell the iteration")
    writers = [x for x in items if writes(x, buffer) and x is not nest]
    clear = perfect(writers[0])[1] if writers else None
    if len(writers) != 1 or not isinstance(clear, Store) or clear.value is not r.identity or not stores_all(writers[0], buffer):
        raise refuse(kernel, "online", f"the nest that sets `{name}` to {r.identity} does not stand beside `{along.var.name}`")
    if items.index(writers[0]) > items.index(nest):
        raise refuse(kernel, "online", f"`{name}` is written after it has been accumulated")
    return _Reduction(nest, found, update, along)


def _maximum(kernel: Kernel, items: Sequence[Stmt], buffer: Buffer, target: For) -> _Reduction:
    nest = next(x for x in items if path(x, target))
    found = _reduction(kernel, items, nest, target, "max")
    if found.update.buffer is not buffer:
        raise refuse(kernel, "online", f"`{target.var.name}` is a reduction loop of `{found.update.buffer.name}`, not of `{buffer.name}`")
    if len(found.rows) + 1 != len(found.chain.loops) or len(found.of_rows) != len(found.conditions):
        raise refuse(kernel, "online", f"`{target.var.name}` is not the only reduction loop of `{buffer.name}`, or not all elements are reduced")
    if buffer in reads([nest]):
        raise refuse(kernel, "online", f"`{buffer.name}` is computed from its own elements")
    for x in enclosing(kernel, nest):
        if x.kind not in (SERIAL, PARALLEL):
            raise refuse(kernel, "online", f"the loop `{x.var.name}` around the maximum is {x.kind} already")
    return found


def _reduces_with(item: Stmt, buffer: Buffer) -> bool:
    found = chain_of(item)
    return buffer in reads([item]) and found is not None and isinstance(found.write, Accumulate)


def _sum(kernel: Kernel, top: _Reduction, items: Sequence[Stmt], nest: Stmt) -> _Sum:
    """A nest that reads the maximum, as a sum of exponentials relative to it."""
    maximum = top.update.buffer
    found = chain_of(nest)
    assert found is not None
    value, name = found.write.value, found.write.buffer.name
    weights = [e for e in E.walk(value) if e.op == "exp" and any(r.attr is maximum for r in E.reads(e))]
    uses = {r for r in E.reads(value, *found.conditions, *found.write.indices) if r.attr is maximum}
    exponent = weights[0].args[0] if len(weights) == 1 else None
    if exponent is None or exponent.op != "sub" or exponent.args[1] not in uses or len(uses) != 1 or not _linear(value, weights[0]):
        why = f"`{name}` is no sum of products with one exponential of a difference to `{maximum.name}`"
        raise refuse(kernel, "online", why, "`inline` exponentials; a sum that is divided by another one is divided after the reduction")
    rest = E.rewrite(value, lambda e: E.const(1, e.dtype) if e is weights[0] else None)
    if any(r.attr is maximum for r in E.reads(exponent.args[0], rest, *found.conditions, *found.write.indices)):
        raise refuse(kernel, "online", f"`{name}` uses `{maximum.name}` for more than one difference", "the maximum rises until the end")
    at = exponent.args[1].args
    values, conditions = inverse(top.update.indices, maximum.shape, top.rows).at(at)
    if not all(map(holds, conditions)):
        raise refuse(kernel, "online", f"`{name}` may use elements of `{maximum.name}` that are not computed")

    def term(x: For) -> Expr:
        return simplify(E.substitute(top.update.value, {**values, top.along.var: x.var}))

    matching = [x for x in found.loops if same_dim(x.extent, top.along.extent) and term(x) is simplify(exponent.args[0])]
    if not matching:
        why = f"cannot see that what `{name}` takes the difference of is what `{maximum.name}` is the maximum of"
        raise refuse(kernel, "online", f"{why}: {exponent.args[0]} and {top.update.value}")
    found_sum = _reduction(kernel, items, nest, matching[0], "+")
    result = _Sum(found_sum.nest, found_sum.chain, found_sum.update, found_sum.along, weights[0], at)
    elements = {x.var for x in found_sum.rows}
    if len(found_sum.of_rows) < len(found_sum.conditions):
        raise refuse(kernel, "online", f"some terms of `{name}` are left out", "where all of them are, the sum has to stay 0")
    if idle := next((x for x in found.loops if x is not found_sum.along and x.var not in elements and not prove(as_expr(x.extent) >= 1)), None):
        raise refuse(kernel, "online", f"`{idle.var.name}` may have no iteration: its extent is {idle.extent}")
    if any(x.var in E.variables(*at) for x in found.loops if x.var not in elements):
        raise refuse(kernel, "online", f"an element of `{name}` is a sum over several maxima")
    needed = {simplify(E.substitute(c, values)) for c in top.conditions}
    if not {c for c in needed if not holds(c)} <= set(map(simplify, found_sum.of_rows)):
        raise refuse(kernel, "online", f"`{name}` may be summed up where `{maximum.name}` is not computed")
    return result


def _linear(value: Expr, factor: Expr) -> bool:
    """Whether a value is the factor times something. The factor may be rounded to other floats first: it is at most 1."""
    if value is factor or (factor.dtype == "float32" and value is tf32(factor)):
        return True
    if value.op == "cast" and is_float(value.dtype) and is_float(value.args[0].dtype) and value.args[0].op in ("cast", "exp"):
        return _linear(value.args[0], factor)
    having = [a for a in value.args if factor in E.walk(a)]
    return value.op == "mul" and len(having) == 1 and _linear(having[0], factor)


def _check_between(kernel: Kernel, items: Sequence[Stmt], top: _Reduction, sums: Sequence[_Sum]) -> None:
    """Refuses unless the sums are independent of each other, and of all that stands between them and the maximum."""
    reductions: list[_Reduction] = [top, *sums]
    made = {f.update.buffer for f in reductions}
    first, last = items.index(top.nest), max(items.index(a.nest) for a in sums)
    sources = reads([f.nest for f in reductions])
    for a in sums:
        for b in (reads([a.nest]) & made) - {top.update.buffer}:
            why = f"`{a.update.buffer.name}` is computed from `{b.name}`"
            raise refuse(kernel, "online", why, "divide after the reduction, not inside of it")
    clears = {x for x in items if any(writes(x, b) for b in made)}
    for x in items[first : last + 1]:
        if x in clears:
            continue
        if reads([x]) & made or any(writes(x, b) for b in sources):
            used = ", ".join(sorted(b.name for b in (reads([x]) & made) | {b for b in sources if writes(x, b)}))
            raise refuse(kernel, "online", f"something between the maximum and the last sum uses {used}", "move or `inline` it first")


# ---------------------------------------------------------------- what is made


class _Parts:
    """The statements of the loop over blocks."""

    def __init__(self, kernel: Kernel, top: _Reduction, factor: int) -> None:
        self.kernel, self.top, self.factor = kernel, top, factor
        self.maximum, along = top.update.buffer, top.along
        name, dtype, shape = self.maximum.name, self.maximum.dtype, self.maximum.shape
        self.terms = Buffer(fresh(kernel, f"{name}.terms"), dtype, (*shape, factor))
        self.weights = Buffer(fresh(kernel, f"{name}.weights"), dtype, (*shape, factor))
        self.scale = Buffer(fresh(kernel, f"{name}.scale"), dtype, shape)
        extent = as_expr(along.extent)
        self.extent = extent
        self.blocks = as_dim((extent + (factor - 1)) // factor)
        self.outer = loop_var(fresh(kernel, f"{along.var.name}.o"), self.blocks)
        self.names = (self.outer.name, self.terms.name, self.weights.name, self.scale.name)

    def loop(self, sums: Sequence[_Sum]) -> Stmt:
        top, places = self.top, self.top.update.indices
        here = E.read(self.maximum, places)
        kept, lowered = E.read(self.scale, places), _no_lower_than_finite

        def by_place(buffer: Buffer, value: Callable[[Expr], Expr]) -> Stmt:
            """A buffer that has an element for each one of the block."""
            v = loop_var(f"{buffer.name}.{_tail(top.along, self.maximum)}", self.factor)
            store = Store(buffer, (*places, v), value(v))
            return self._named(self._nest([*top.rows, For(v, self.factor, store)], [*top.conditions, self._inside(v)], store), buffer.name)

        def by_row(value: Expr, name: str) -> Stmt:
            return self._named(self._nest(top.rows, top.conditions, Store(self.scale, places, value)), name)

        inner = loop_var(fresh(self.kernel, f"{top.along.var.name}.i"), self.factor)
        raised = replace(top.update, value=E.read(self.terms, (*places, inner)))
        loops = [For(inner, self.factor, x.body) if x is top.along else x for x in top.chain.loops]
        body = block(
            by_place(self.terms, lambda v: self._moved(top.update.value, top.along, v)),
            by_row(here, f"{self.scale.name}.init"),
            self._nest(loops, [*top.conditions, self._inside(inner)], raised),
            by_row(E.unary("exp", lowered(kept) - lowered(here)), self.scale.name),
            by_place(self.weights, lambda v: E.unary("exp", E.read(self.terms, (*places, v)) - lowered(here))),
            *(s for a in sums for s in (self._scaled(a), self._added(a))),
        )
        for b in (self.scale, self.weights, self.terms):
            body = Allocate(b, body)
        return For(self.outer, self.blocks, body)

    def _scaled(self, a: _Sum) -> Stmt:
        """What has been summed up so far, relative to the new maximum."""
        sums = E.read(a.update.buffer, a.update.indices)
        store = Store(a.update.buffer, a.update.indices, sums * E.read(self.scale, a.at))
        return self._named(self._nest(a.rows, a.of_rows, store), f"{a.update.buffer.name}.scaled", a.update.buffer)

    def _added(self, a: _Sum) -> Stmt:
        """The terms of the block."""
        v = loop_var(fresh(self.kernel, f"{a.along.var.name}.i"), self.factor)
        weight = E.read(self.weights, (*a.at, v))
        value = self._moved(E.rewrite(a.update.value, lambda e: weight if e is a.weight else None), a.along, v)
        loops = [For(v, self.factor, x.body) if x is a.along else x for x in a.chain.loops]
        conditions = [self._moved(c, a.along, v) for c in a.conditions]
        return self._nest(loops, [*conditions, self._inside(v)], replace(a.update, value=value))

    def final(self, a: _Sum) -> Stmt:
        """NaN where all x are -inf: there the differences are."""
        maximum, sums = E.read(self.maximum, a.at), E.read(a.update.buffer, a.update.indices)
        value = E.select(E.equal(maximum, self.top.update.reducer.identity), maximum - maximum, sums)
        store = Store(a.update.buffer, a.update.indices, value)
        nest = self._nest(a.rows, [*a.of_rows, self.extent >= 1], store)
        return self._named(nest, f"{a.update.buffer.name}.final", a.update.buffer)

    def _moved(self, e: Expr, along: For, v: Expr) -> Expr:
        return simplify(E.substitute(e, {along.var: self.outer * self.factor + v}))

    def _inside(self, v: Expr) -> Expr:
        return self.outer * self.factor + v < self.extent

    def _nest(self, loops: Sequence[For], conditions: Iterable[Expr], leaf: Stmt) -> Stmt:
        for x in reversed(loops):
            leaf = replace(x, body=leaf)
        return guard(list(conditions), leaf)

    def _named(self, nest: Stmt, prefix: str, stage: Buffer | None = None) -> Stmt:
        """The nest with names of its own for the loops of a stage."""
        old = (stage or self.maximum).name
        return renamed(nest, lambda n: n if n.startswith(f"{prefix}.") else fresh(self.kernel, f"{prefix}.{n.removeprefix(f'{old}.')}"))


def _tail(loop: For, stage: Buffer) -> str:
    return str(loop.var.name).removeprefix(f"{stage.name}.")


def _no_lower_than_finite(x: Expr) -> Expr:
    """The maximum, or the lowest finite number: exp(-inf - it) is 0 then, where exp(-inf - -inf) would be NaN."""
    return E.maximum(x, E.const(float(np.finfo(x.dtype).min), x.dtype))
