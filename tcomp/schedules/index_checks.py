"""Indices that are looked up are checked before the loops that use them, where these use each of them often: once, in vectors. Where all
are in range, the loops run without their guards; else with them, and the first index that is used and is out of range is reported. As
for all inputs, nobody may write the array of indices meanwhile. Of an array of which all iterations look up the same element, that one is
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.access import clamped_check
from tcomp.ir.expr import Expr, as_expr, cast
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.ir.simplify import prove, simplify
from tcomp.schedules.lowering import lower

OFTEN = 8  # uses of each element: to check one in a vector takes about a tenth of what a use of it takes in the shortest of loops


def checked_first(kernel: Kernel, scheduled: Callable[[Kernel], Kernel]) -> Kernel:
    """The kernel with its loops twice, without and with guards, and what decides between them; itself where nothing can be checked before,
    or that certainly does not pay. `scheduled` gives the loops of a kernel that is as it was lowered."""
    written = {s.buffer for s in L.walk(kernel.body) if isinstance(s, L.Store | L.Accumulate)}
    given, sizes, uses = {*kernel.buffers} - written, {*kernel.scalars}, dict[_LookUp, Expr]()
    for guard, loops in _guards(kernel.body, ()):
        if (found := _looked_up(guard, given, sizes)) is not None:
            uses[found] = uses.get(found, as_expr(0)) + _iterations(loops, sizes)
    often = {found: simplify(found.pays(count)) for found, count in uses.items()}
    often = {found: test for found, test in often.items() if not prove(E.unary("not", test))}
    if not often:
        return kernel

    def bare(e: Expr) -> Expr | None:
        check = clamped_check(e)
        return check.args[0] if check is not None and _looked_up(e, given, sizes) in often else None

    fast = L.map_expressions(kernel.body, lambda e: E.rewrite(e, bare))
    outside = [Buffer(f"outside{n}", "int32", (), "register") for n in range(len(often))]
    checks = L.block(*(_check(found, result, scheduled) for found, result in zip(often, outside, strict=True)))
    unknown = L.block(*(L.store(result, (), 1) for result in outside))
    pays, fine = _all(list(often.values())), _all([result[()] <= 0 for result in outside])
    return kernel.with_body(L.allocated(outside, L.block(L.If(pays, checks, unknown), L.If(fine, fast, kernel.body))))


def _all(conditions: Sequence[Expr]) -> Expr:
    return reduce(lambda a, b: a & b, conditions)


def _guards(s: Stmt, loops: tuple[L.For, ...]) -> Iterator[tuple[Expr, tuple[L.For, ...]]]:
    """The clamped checks of a statement, and the loops around each."""
    yield from ((e, loops) for e in E.walk(*L.expressions(s)) if clamped_check(e) is not None)
    for child in L.children(s):
        yield from _guards(child, (*loops, s) if isinstance(s, L.For) else loops)


@dataclass(frozen=True, slots=True)
class _LookUp:
    """Elements of a given buffer from which an index is computed, by sizes and nothing else: all of them, or the one at `place`, if that
    depends on sizes alone. `outside`: whether the index is out of range, for the element `_element(buffer)`."""

    buffer: Buffer
    outside: Expr
    place: tuple[Expr, ...] | None

    def pays(self, count: Expr) -> Expr:
        """Whether to check them before about `count` uses; an element that is checked has to be there, even if it is never used."""
        if self.place is None:
            return _elements(self.buffer) * OFTEN <= count
        there = [test for i, n in zip(self.place, self.buffer.shape, strict=True) for test in (0 <= i, i < as_expr(n))]
        return _all([as_expr(OFTEN) <= count, *there])


def _looked_up(guard: Expr, given: set[Buffer], sizes: set[Expr]) -> _LookUp | None:
    """The lookup behind an index that depends on one element of a given buffer, and on sizes; None for any other."""
    check = clamped_check(guard)
    assert check is not None
    for read in E.reads(check.args[0]):
        element = _element(read.attr)
        index, extent = E.rewrite(check.args[0], lambda e: e, {read: element}), check.args[1]
        known = not E.reads(index, extent) and sizes.issuperset({*E.variables(index, extent)} - {element})
        if known and read.attr in given and read.attr.shape:
            fixed = not E.reads(*read.args) and sizes.issuperset(E.variables(*read.args))
            outside = cast(extent, "uint64") <= cast(index, "uint64")  # negative numbers are then the largest
            return _LookUp(read.attr, outside, read.args if fixed else None)
    return None


def _element(buffer: Buffer) -> Expr:
    """The variable that represents any element of a buffer."""
    return E.var("element", dtype=buffer.dtype)


def _check(found: _LookUp, result: Buffer, scheduled: Callable[[Kernel], Kernel]) -> Stmt:
    """The statement that stores in `result` whether any of the elements is out of range: 1, or less."""
    buffer = found.buffer
    if found.place is not None:
        return L.store(result, (), cast(E.substitute(found.outside, {_element(buffer): buffer[found.place]}), result.dtype))
    source = te.placeholder(buffer.shape, buffer.dtype, buffer.name)
    axes = [te.reduce_axis(n, f"k{axis}") for axis, n in enumerate(buffer.shape)]
    test = E.substitute(found.outside, {_element(buffer): source[tuple(axes)]})
    kernel = scheduled(lower(result.name, [source], [te.compute((), lambda: te.max(cast(test, result.dtype), axes), result.name)]))
    places = dict(zip(kernel.buffers, (buffer, result), strict=True))
    return L.redirect(kernel.body, lambda b, indices: (places[b], indices) if b in places else None)


def _iterations(loops: Sequence[L.For], sizes: set[Expr]) -> Expr:
    """About how often is executed what stands in these loops, by sizes alone: the variable of a loop around counts as half of its extent,
    and a loop whose extent depends on data as one iteration."""
    halves, extents = dict[Expr, Expr](), list[Expr]()
    for loop in loops:
        extent = E.substitute(as_expr(loop.extent), halves)
        extents.append(extent if not E.reads(extent) and sizes.issuperset(E.variables(extent)) else as_expr(1))
        halves[loop.var] = extents[-1] // 2
    return simplify(prod(extents, start=as_expr(1)))


def _elements(buffer: Buffer) -> Expr:
    return prod(map(as_expr, buffer.shape), start=as_expr(1))
