"""How often statements run and which elements they touch, as numbers: exact for affine programs of known size.

The elements that *accesses* touch while some of their loops run (the others standing still, in the middle of their range) are counted
without walking the iterations: where each loop variable occurs in one dimension only, they are a product of sets, one a dimension, and a
sum of multiples of loop variables is nearly always an arithmetic progression. What is left (diagonals, triangular loops, conditions, other
integer functions) is enumerated up to `ENUMERATED` points; beyond that a box around the elements is counted.

A variable that occurs as f // n and f % n (`fuse` makes such loops) counts as its digits, each a variable of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import pairwise
from math import gcd, prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import Access, Loops, digit
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr, as_expr
from tcomp.ir.layout import LINE
from tcomp.ir.linear import linear
from tcomp.ir.simplify import simplify

ENUMERATED = 1 << 20  # points that are counted one by one: some 10 ms of NumPy

Ints: TypeAlias = npt.NDArray[np.int64]


def at_sizes(kernel: L.Kernel, dims: Mapping[Expr, int]) -> L.Kernel:
    """The kernel with numbers for its symbolic dims, those of its buffers included. Raises `IRError` for a dim without a number."""
    if not kernel.scalars and all(isinstance(n, int) for b in kernel.buffers for n in b.shape):
        return kernel
    known = {v: E.const(n) for v, n in dims.items()}

    @cache
    def fixed(b: L.Buffer) -> L.Buffer:
        return L.Buffer(b.name, b.dtype, [E.evaluate_int(d, dims) for d in b.shape], b.scope)

    def allocated(s: L.Stmt) -> L.Stmt:
        s = L.with_children(s, [allocated(child) for child in L.children(s)])
        return replace(s, buffer=fixed(s.buffer)) if isinstance(s, L.Allocate) else s

    body = L.map_expressions(kernel.body, lambda e: simplify(E.substitute(e, known)))
    body = allocated(L.redirect(body, lambda b, indices: (fixed(b), indices)))
    return replace(kernel, buffers=tuple(map(fixed, kernel.buffers)), outputs=tuple(map(fixed, kernel.outputs)), scalars=(), body=body)


def instances(loops: Loops, conditions: Sequence[Expr] = (), limit: int = ENUMERATED) -> float:
    """How many iterations of the nest `loops` satisfy the conditions.

    Exact up to `limit` iterations of those loops that conditions and other extents depend on; above, sampled on a regular grid.
    """
    asked = set(E.variables(*(as_expr(x.extent) for x in loops), *conditions))
    total = 1.0 * prod(max(0, x.extent) for x in loops if isinstance(x.extent, int) and x.var not in asked)
    coupled = [x for x in loops if not isinstance(x.extent, int) or x.var in asked]
    if not coupled and not conditions:
        return total
    values, count, weight = _grid([x for x in coupled if x.var in asked], conditions, {}, limit)
    count = count * weight
    for x in coupled:
        if x.var not in asked:  # nothing depends on which iteration it is
            count = count * np.maximum(_value(as_expr(x.extent), values), 0)
    return total * float(count.sum())


def _grid(loops: Sequence[L.For], conditions: Sequence[Expr], around: Mapping[Expr, int], limit: int) -> tuple[dict[Expr, Any], Any, float]:
    """All iterations of a nest: (an array of values for each variable, along an axis of its own; where they are iterations that satisfy the
    conditions; how many iterations each point stands for, as a nest of more than `limit` points is thinned out)."""
    most = [_most(x.extent, around) for x in loops]
    thinning = max(1.0, prod(most) / limit) ** (1 / max(1, len(loops)))
    points = [n if thinning == 1 else max(1, min(n, round(n / thinning))) for n in most]
    sizes = list(zip(points, most, strict=True))
    along = (np.arange(k) if k == n else ((np.arange(k) + 0.5) * n / k).astype(np.int64) for k, n in sizes)
    values: dict[Expr, Any] = {**around, **dict(zip((x.var for x in loops), np.ix_(*along), strict=True))}
    taken = [values[x.var] < _value(as_expr(x.extent), values) for x in loops] + [_value(c, values) for c in conditions]
    return values, reduce(np.logical_and, taken, np.array(True)), prod((n / max(1, k) for k, n in sizes), start=1.0)


def _most(extent: Dim, around: Mapping[Expr, int]) -> int:
    """The largest value of an extent, for all loops around it."""
    if isinstance(extent, int):
        return max(0, extent)
    e = simplify(E.substitute(extent, {v: E.const(around[v]) for v in E.variables(extent) if v in around}))
    return max(0, E.bounds(e)[1] or 0)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod, "min": np.minimum,
    "max": np.maximum, "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "and": np.logical_and,
    "or": np.logical_or, "not": np.logical_not, "neg": np.negative, "select": np.where, "abs": np.abs,
}  # fmt: skip


def _value(e: Expr, values: Mapping[Expr, Any]) -> Any:
    """An index expression or condition for arrays of variables; what depends on data is as large as it may be."""
    if e.op == "const":
        return np.asarray(e.attr)
    if e in values:
        return np.asarray(values[e])
    if e.op in _OPERATORS:
        return _OPERATORS[e.op](*(_value(a, values) for a in e.args))
    return np.asarray(E.bounds(e)[1] or 0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Distinct elements of a buffer, the cache lines and the rows (of the last dimension) that they lie on."""

    elements: int
    lines: int
    rows: int


Position: TypeAlias = tuple[Expr, int]  # a digit, (variable, its power): (variable // power) % (next power // power)
Form: TypeAlias = tuple[Mapping[Position, int], int]  # an index as factors of digits, and a constant
Indices: TypeAlias = range | Ints  # distinct indices along one or several dimensions: an arithmetic progression, or a sorted array


class Footprints:
    """Counts what groups of accesses of one program touch; enumerates at most `limit` points to do so."""

    def __init__(self, found: Sequence[Access], limit: int = ENUMERATED) -> None:
        self.limit = limit
        self.extents = {x.var: x.extent for a in found for x in a.loops}
        self.middle: dict[Expr, int] = {}
        for v, extent in self.extents.items():
            self.middle[v] = max(0, int(_value(as_expr(extent), self.middle)) // 2)
        self.indices = {i: simplify(i) for a in found for i in a.indices}
        self.powers = self._powers()
        self.forms = {i: self._form(e) for i, e in self.indices.items()}

    def extent(self, loop: L.For) -> int:
        """The extent of a loop; if it depends on other loops, with these in the middle of their ranges."""
        return loop.extent if isinstance(loop.extent, int) else max(1, 2 * self.middle.get(loop.var, 0))

    def _form(self, index: Expr) -> Form | None:
        factors, constant = Counter[Position](), 0
        for monomial, factor in linear(index).items():
            if not monomial:
                constant = factor
                continue
            v, low, high = self._piece(monomial) or (None, 1, None)
            powers = () if v is None else self.powers.get(v, (1,) if monomial[0] is v else ())
            if v is None or not powers:
                return None
            factors.update({(v, p): factor * (p // low) for p in powers if low <= p and (high is None or p < high)})
        return factors, constant

    def _piece(self, monomial: Sequence[Expr]) -> tuple[Expr, int, int | None] | None:
        """(v, low, high) of a monomial that is the digits of a loop variable from a constant place up to another one."""
        found = digit(monomial[0]) if len(monomial) == 1 else None
        if found is None or found.whole not in self.extents or any(p is not None and p.op != "const" for p in (found.low, found.high)):
            return None
        return found.whole, int(found.low.attr), None if found.high is None else int(found.high.attr)

    def _powers(self) -> dict[Expr, tuple[int, ...]]:
        """The powers of the digits of a variable that occurs as digits: each divides the next."""
        cuts: dict[Expr, set[int]] = {}
        for monomial in (m for index in self.indices.values() for m in linear(index)):
            if len(monomial) == 1 and monomial[0].op != "var" and (piece := self._piece(monomial)) is not None:
                cuts.setdefault(piece[0], {1}).update(p for p in piece[1:] if p is not None)
        sized = [(v, n, sorted(found)) for v, found in cuts.items() if isinstance(n := self.extents[v], int)]
        chains = {v: tuple(p for p in found if p == 1 or p < n) for v, n, found in sized}
        return {v: chain for v, chain in chains.items() if all(b % a == 0 for a, b in pairwise(chain))}

    def _size(self, position: Position) -> int:
        v, power = position
        following = next((p for p in self.powers.get(v, ()) if p > power), None)
        return -(-int(_value(as_expr(self.extents[v]), self.middle)) // power) if following is None else following // power

    def touched(self, group: Sequence[Access], running: Collection[Expr]) -> Footprint:
        """The elements of one buffer that the accesses of `group` touch together in all iterations of the loops over `running`.

        The other loops are fixed at `middle`; conditions on them alone are assumed to hold.
        """
        shape, size = [int(n) for n in group[0].buffer.shape], itemsize(group[0].buffer.dtype)
        nests = [(a, [x for x in a.loops if x.var in running]) for a in group]
        points = [prod(_most(x.extent, self.middle) for x in loops) for _, loops in nests]
        countable = sum(points) <= self.limit and not any(E.reads(*a.indices) for a in group)
        if countable and any(self._irregular(a, loops) for a, loops in nests):
            places = np.unique(np.concatenate([self._enumerated(a, loops, shape) for a, loops in nests]))
            lines, rows = (len(np.unique(places * a // b)) for a, b in ((size, LINE), (1, shape[-1] if shape else 1)))
            return Footprint(len(places), lines, rows)
        blocks = self._blocks(group, running)
        boxes = [[self._indices(a, dims, shape, loops) for dims in blocks] for (a, loops), n in zip(nests, points, strict=True) if n]
        boxes = [box for box in boxes if all(map(len, box))]
        if not boxes:
            return Footprint(0, 0, 0)
        elements, last = _union(boxes), next((n for n, dims in enumerate(blocks) if len(shape) - 1 in dims), None)
        rows = _union([[s for n, s in enumerate(box) if n != last] for box in boxes])
        return Footprint(elements, _lines(boxes, last, shape, size, elements), rows)

    def _irregular(self, a: Access, loops: Sequence[L.For]) -> bool:
        """Whether the box of the running loops is not what the access touches."""
        own = {x.var for x in loops}
        if _deciding(a, own) or any(own & set(E.variables(as_expr(x.extent))) for x in loops):
            return True
        ragged = any(isinstance(n := self.extents[v], int) and n % p[-1] for v, p in self.powers.items() if v in own)
        return ragged or any(self.forms[i] is None and own & set(E.variables(i)) for i in a.indices)

    def _enumerated(self, a: Access, loops: Sequence[L.For], shape: Sequence[int]) -> Ints:
        """Row-major places of the elements, each once."""
        own = {x.var for x in loops}
        around = {v: n for v, n in self.middle.items() if v not in own}
        values, taken, _ = _grid(loops, _deciding(a, own), around, self.limit)
        return _places([_value(self.indices[i], values) for i in a.indices], shape, taken)

    def _blocks(self, group: Sequence[Access], running: Collection[Expr]) -> list[tuple[int, ...]]:
        """The dimensions, those together that a running digit couples."""
        blocks = [frozenset({d}) for d in range(len(group[0].indices))]
        for a in group:
            forms = [self.forms[i] for i in a.indices]
            moving = [{p for p in f[0] if p[0] in running and self._size(p) > 1} if f is not None else set() for f in forms]
            for position in set[Position]().union(*moving):
                dims = {d for d, positions in enumerate(moving) if position in positions}
                coupled = [b for b in blocks if b & dims]
                blocks = [*(b for b in blocks if b not in coupled), frozenset[int]().union(*coupled)]
        return [tuple(sorted(b)) for b in blocks]

    def _indices(self, a: Access, dims: tuple[int, ...], shape: Sequence[int], loops: Sequence[L.For]) -> Indices:
        """The indices in these dimensions (row-major, of several); as many of them where they are not exactly known."""
        running = {x.var for x in loops}
        forms = [f for d in dims if (f := self._moving(a.indices[d], running)) is not None]
        if len(forms) < len(dims) == 1:  # depends on data, or too many to enumerate
            most = prod(_most(x.extent, self.middle) for x in loops if x.var in E.variables(a.indices[dims[0]]))
            return range(min(shape[dims[0]], most))
        if len(dims) == 1:
            ((factors, start),) = forms
            return _sum(start, [(c, self._size(g)) for g, c in factors.items()], shape[dims[0]])
        digits = list(dict.fromkeys(g for factors, _ in forms for g in factors))
        sizes = [self._size(g) for g in digits]
        if len(forms) < len(dims) or prod(sizes) > self.limit:
            return range(prod(shape[d] for d in dims))
        steps = list(zip(digits, np.ix_(*map(np.arange, sizes)), strict=True))
        places = [sum((factors.get(g, 0) * step for g, step in steps), np.asarray(start)) for factors, start in forms]
        return _places(places, [shape[d] for d in dims])

    def _moving(self, index: Expr, running: set[Expr]) -> Form | None:
        """The form of an index in the digits of `running` alone, as the others stand still; None if it has none."""
        form = self.forms[index]
        if form is None:
            still = not E.reads(index) and running.isdisjoint(E.variables(index))
            return ({}, int(_value(self.indices[index], self.middle))) if still else None
        standing = (c * (self.middle[g[0]] // g[1] % max(1, self._size(g))) for g, c in form[0].items() if g[0] not in running)
        return {g: c for g, c in form[0].items() if g[0] in running}, form[1] + sum(standing)


def _deciding(a: Access, running: set[Expr]) -> list[Expr]:
    """The conditions that the running loops decide."""
    return [c for c in a.conditions if c.op == "const" or not running.isdisjoint(E.variables(c))]


def _places(indices: Sequence[Any], shape: Sequence[int], taken: Any = True) -> Ints:
    """Row-major places of elements inside of a shape, each once: of arrays of indices, those where `taken` holds."""
    place = np.asarray(0)
    for index, n in zip(indices, shape, strict=True):
        taken = taken & (index >= 0) & (index < n)
        place = place * n + index
    place, taken = np.broadcast_arrays(place, taken)
    return np.unique(place[taken])


def _sum(start: int, terms: Sequence[tuple[int, int]], size: int) -> Indices:
    """All values of start + sum(c * x for 0 <= x < n) in [0, size); those of a progression around them where they are too many."""
    if any(n == 0 for _, n in terms):
        return range(0)
    start += sum(c * (n - 1) for c, n in terms if c < 0)
    steps = sorted((abs(c), n) for c, n in terms if c and n > 1)
    unit = steps[0][0] if steps else 1
    count, listed = 1, None
    for c, n in steps:
        if listed is None and c % unit == 0 and c // unit <= count:
            count += c // unit * (n - 1)
            continue
        listed = unit * np.arange(count) if listed is None else listed
        if len(listed) * n > ENUMERATED:
            unit = gcd(*(s for s, _ in steps))
            count, listed = sum(s * (m - 1) for s, m in steps) // unit + 1, None
            break
        listed = np.unique(np.add.outer(listed, c * np.arange(n)))
    if listed is not None:
        return listed[(listed >= -start) & (listed < size - start)] + start
    first = start + max(0, -(start // unit)) * unit if start < 0 else start
    return range(first, max(first, min(start + count * unit, size)), unit)


def _union(boxes: Sequence[Sequence[Indices]]) -> int:
    """The size of a union of products of sets: indices along each block of dimensions are sorted by which boxes they belong to."""
    alive = Counter({(1 << len(boxes)) - 1: 1})
    for column in zip(*boxes, strict=True):
        classes, following = _classes(column), Counter[int]()
        for mask, number in alive.items():
            for members, size in classes.items():
                if both := mask & members:
                    following[both] += number * size
        alive = following
    return alive.total()


def _classes(sets: Sequence[Indices]) -> Counter[int]:
    """How many indices belong to exactly the sets of each bit mask."""
    bits: dict[Any, tuple[Indices, int]] = {}
    for n, s in enumerate(sets):
        key = s if isinstance(s, range) else s.tobytes()
        bits[key] = s, bits.get(key, (s, 0))[1] | 1 << n
    distinct = list(bits.values())
    if len(distinct) == 1:
        return Counter({distinct[0][1]: len(distinct[0][0])})
    ranges = [(s, mask) for s, mask in distinct if isinstance(s, range)]
    result, (first, _) = Counter[int](), distinct[0]
    if len(ranges) == len(distinct) and all(s.step == ranges[0][0].step and (s.start - first[0]) % s.step == 0 for s, _ in ranges):
        step = ranges[0][0].step
        ends = [(s.start, s.start + step * len(s), mask) for s, mask in ranges]
        for a, b in pairwise(sorted({end for low, high, _ in ends for end in (low, high)})):
            result[sum(mask for low, high, mask in ends if low <= a < high)] += (b - a) // step
    else:
        places = np.unique(np.concatenate([s for s, _ in distinct]))
        member = np.stack([np.isin(places, s, assume_unique=True) for s, _ in distinct])
        kinds, counts = np.unique(member, axis=1, return_counts=True)
        for kind, size in zip(kinds.T, counts.tolist(), strict=True):
            result[sum(mask for (_, mask), inside in zip(distinct, kind, strict=True) if inside)] += size
    del result[0]
    return result


def _lines(boxes: Sequence[Sequence[Indices]], last: int | None, shape: Sequence[int], width: int, elements: int) -> int:
    """Cache lines of elements of so many bytes, `last` being the block of the last dimension: each row of it is taken to begin on a line,
    unless rows are shorter than one or whole."""
    packed = -(-elements * width // LINE)
    if last is None:
        return 1
    per_line = max(1, LINE // width)
    if shape[-1] < per_line or all(isinstance(s := box[last], range) and s.step == 1 and len(s) == shape[-1] for box in boxes):
        return packed
    rows = [[_in_lines(s, per_line) if n == last else s for n, s in enumerate(box)] for box in boxes]
    return max(packed, min(elements, _union(rows)))


def _in_lines(s: Indices, per_line: int) -> Indices:
    if isinstance(s, range) and s.step == 1:
        return range(s.start // per_line, (s.stop - 1) // per_line + 1)
    if isinstance(s, range) and s.step % per_line == 0:
        step = s.step // per_line
        return range(s.start // per_line, s.start // per_line + step * len(s), step)
    return np.unique(np.asarray(s) // per_line)
