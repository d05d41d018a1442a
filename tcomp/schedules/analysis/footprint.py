"""How often statements run and which elements they touch, as numbers: exact for affine programs of known size.

A loop program is taken apart into *accesses*: one element of one buffer, the loops around it and the conditions it stands under. The
elements that accesses touch while some of their loops run (the others standing still, in the middle of their range) are counted without
walking the iterations: where each loop variable occurs in one dimension only, the touched elements are a product of sets, one a
dimension, and a sum of multiples of loop variables is nearly always an arithmetic progression. What is left (diagonals, triangular
loops, conditions, other integer functions) is enumerated up to `ENUMERATED` points; beyond that a box around the elements is counted.

A variable that occurs as f // n and f % n (`fuse` makes such loops) counts as its digits, each a variable of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from math import gcd, prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.ir import expr as E
from tcomp.ir.access import Access, Loops, digit
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim, Expr, as_expr, evaluate_int, substitute
from tcomp.ir.layout import LINE
from tcomp.ir.loops import (
    Allocate,
    Buffer,
    For,
    Kernel,
    Stmt,
    children,
    map_expressions,
    redirect,
    with_children,
)
from tcomp.ir.simplify import linear, simplify

ENUMERATED = 1 << 20  # points

Ints: TypeAlias = npt.NDArray[np.int64]


# ---------------------------------------------------------------- programs of known size


def at_sizes(kernel: Kernel, dims: Mapping[Expr, int]) -> Kernel:
    """The kernel with numbers for its symbolic dims, those of its buffers included. Raises `IRError` for a dim without a number."""
    if not kernel.scalars and all(isinstance(n, int) for b in kernel.buffers for n in b.shape):
        return kernel
    known = {v: E.const(n) for v, n in dims.items()}
    made: dict[Buffer, Buffer] = {}

    def fixed(b: Buffer) -> Buffer:
        if b not in made:
            made[b] = Buffer(b.name, b.dtype, [evaluate_int(d, dims) for d in b.shape], b.scope)
        return made[b]

    def allocated(s: Stmt) -> Stmt:
        s = with_children(s, [allocated(child) for child in children(s)])
        return replace(s, buffer=fixed(s.buffer)) if isinstance(s, Allocate) else s

    body = map_expressions(kernel.body, lambda e: simplify(substitute(e, known)))
    body = allocated(redirect(body, lambda b, indices: (fixed(b), indices)))
    return replace(kernel, buffers=tuple(map(fixed, kernel.buffers)), outputs=tuple(map(fixed, kernel.outputs)), scalars=(), body=body)


# ---------------------------------------------------------------- how often


def instances(loops: Loops, conditions: Sequence[Expr] = (), limit: int = ENUMERATED) -> float:
    """How many iterations of the nest `loops` satisfy the conditions.

    Exact up to `limit` iterations of those loops that conditions and other extents depend on; above, sampled on a regular grid.
    """
    asked = set(E.variables(*(as_expr(x.extent) for x in loops), *conditions))
    total, coupled = 1.0, []
    for x in loops:
        if isinstance(x.extent, int) and x.var not in asked:
            total *= max(0, x.extent)
        else:
            coupled.append(x)
    if not coupled and not conditions:
        return total
    counted = [x for x in coupled if x.var not in asked]  # nothing depends on which iteration it is
    grid = _Grid([x for x in coupled if x.var in asked], {}, limit)
    weight = grid.holds(conditions) * grid.weight
    for x in counted:
        weight = weight * np.maximum(_value(as_expr(x.extent), grid.values), 0)
    return total * float(np.broadcast_to(weight, grid.shape).sum())


class _Grid:
    """All iterations of a nest: an array of values for each variable, along an axis of its own, and which of them are iterations.

    A nest of more than `limit` points is thinned out; each point then stands for `weight` iterations.
    """

    def __init__(self, loops: Sequence[For], around: Mapping[Expr, int], limit: int) -> None:
        self.values: dict[Expr, Any] = dict(around)
        self.weight, self.taken = 1.0, np.array(True)
        most = [_most(x.extent, around) for x in loops]
        thinning = max(1.0, prod(most) / limit) ** (1 / max(1, len(loops)))
        self.shape: tuple[int, ...] = ()
        for axis, (x, n) in enumerate(zip(loops, most, strict=True)):
            points = n if thinning == 1 else max(1, min(n, round(n / thinning)))
            self.weight *= n / max(1, points)
            along = np.arange(points) if points == n else ((np.arange(points) + 0.5) * n / points).astype(np.int64)
            self.values[x.var] = along.reshape(-1, *[1] * (len(loops) - 1 - axis))
            self.shape += (points,)
            self.taken = self.taken & (self.values[x.var] < _value(as_expr(x.extent), self.values))

    def holds(self, conditions: Sequence[Expr]) -> Any:
        return reduce(lambda a, b: a & b, [_value(c, self.values) for c in conditions], self.taken)


def _most(extent: Dim, around: Mapping[Expr, int]) -> int:
    """The largest value of an extent, for all loops around it."""
    if isinstance(extent, int):
        return max(0, extent)
    e = simplify(substitute(extent, {v: E.const(around[v]) for v in E.variables(extent) if v in around}))
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


# ---------------------------------------------------------------- which elements


@dataclass(frozen=True, slots=True)
class Footprint:
    """Distinct elements of a buffer, the cache lines and the rows (of the last dimension) that they lie on; `exact` as to the elements."""

    elements: int
    lines: int
    rows: int
    exact: bool


Position: TypeAlias = tuple[Expr, int]  # (variable, the power it stands for): (variable // power) % (next power // power)


@dataclass(frozen=True, slots=True)
class _Set:
    """Indices along one or several dimensions: an arithmetic progression, or an array of distinct positions."""

    start: int = 0
    step: int = 1
    count: int = 1
    listed: Ints | None = None

    def all(self) -> Ints:
        return self.start + self.step * np.arange(self.count) if self.listed is None else self.listed

    def key(self) -> Any:
        return (self.start, self.step, self.count) if self.listed is None else self.listed.tobytes()


class Footprints:
    """Counts what groups of accesses of one program touch; enumerates at most `limit` points to do so."""

    def __init__(self, found: Sequence[Access], limit: int = ENUMERATED) -> None:
        self.limit = limit
        self.extents = {x.var: x.extent for a in found for x in a.loops}
        self.middle: dict[Expr, int] = {}
        for a in found:
            for x in a.loops:
                if x.var not in self.middle:
                    self.middle[x.var] = max(0, int(_value(as_expr(x.extent), self.middle)) // 2)
        self.indices = {i: simplify(i) for a in found for i in a.indices}
        self.powers = self._powers()
        self.forms = {i: self._form(e) for i, e in self.indices.items()}

    def _form(self, index: Expr) -> tuple[dict[Position, int], int] | None:
        """(factor of each digit, constant) of an index; None if it is nothing of the kind."""
        factors: dict[Position, int] = {}
        constant = 0
        for monomial, factor in linear(index).items():
            if not monomial:
                constant = factor
                continue
            piece = self._piece(monomial)
            if piece is None:
                return None
            v, low, high = piece
            powers = self.powers.get(v, (1,) if monomial[0] is v else ())
            if not powers:
                return None
            for power in powers:
                if low <= power and (high is None or power < high):
                    factors[v, power] = factors.get((v, power), 0) + factor * (power // low)
        return factors, constant

    def _piece(self, monomial: Sequence[Expr]) -> tuple[Expr, int, int | None] | None:
        """(v, low, high) of a monomial that is the digits of a loop variable from a constant place up to another one."""
        found = digit(monomial[0]) if len(monomial) == 1 else None
        if found is None or found.whole not in self.extents or any(p is not None and p.op != "const" for p in (found.low, found.high)):
            return None
        return found.whole, int(found.low.attr), None if found.high is None else int(found.high.attr)

    def _powers(self) -> dict[Expr, tuple[int, ...]]:
        """The powers of the digits that a variable is taken apart into, where it is: each divides the next."""
        cuts: dict[Expr, set[int]] = {}
        for index in self.indices.values():
            for monomial in linear(index):
                piece = self._piece(monomial) if len(monomial) == 1 and monomial[0].op != "var" else None
                if piece is not None:
                    cuts.setdefault(piece[0], {1}).update(p for p in piece[1:] if p is not None)
        powers = {}
        for v, found in cuts.items():
            n = self.extents[v]
            chain = tuple(sorted(p for p in found if p == 1 or not isinstance(n, int) or p < n))
            if isinstance(n, int) and all(b % a == 0 for a, b in pairwise(chain)):
                powers[v] = chain
        return powers

    def _size(self, position: Position) -> int:
        v, power = position
        extent = self.extents[v]
        n = extent if isinstance(extent, int) else int(_value(as_expr(extent), self.middle))
        following = [p for p in self.powers.get(v, (1,)) if p > power]
        return following[0] // power if following else -(-n // power)

    def touched(self, group: Sequence[Access], running: Collection[Expr]) -> Footprint:
        """What accesses of one buffer touch together while the loops over the variables `running` run.

        The other loops stand at `middle`; conditions on them alone are taken to hold.
        """
        buffer = group[0].buffer
        shape = [int(n) for n in buffer.shape]
        moving = [[x for x in a.loops if x.var in running] for a in group]
        irregular = any(self._irregular(a, loops) for a, loops in zip(group, moving, strict=True))
        data = any(E.reads(*a.indices) for a in group)
        if irregular and not data and sum(prod(_most(x.extent, self.middle) for x in loops) for loops in moving) <= self.limit:
            found = [self._enumerated(a, loops, shape) for a, loops in zip(group, moving, strict=True)]
            places = np.unique(np.concatenate(found))
            lines, rows = (len(np.unique(places * a // b)) for a, b in ((itemsize(buffer.dtype), LINE), (1, shape[-1] if shape else 1)))
            return Footprint(len(places), lines, rows, True)
        blocks = self._blocks(group, running)
        exact = not (irregular or data)
        boxes: list[list[_Set]] = []
        for a, loops in zip(group, moving, strict=True):
            sets = []
            for dims in blocks:
                made, sure = self._set(a, dims, shape, loops)
                sets.append(made)
                exact &= sure
            if all(s.count for s in sets) and all(_most(x.extent, self.middle) for x in loops):
                boxes.append(sets)
        if not boxes:
            return Footprint(0, 0, 0, exact)
        elements = _union(boxes)
        last = [n for n, dims in enumerate(blocks) if len(shape) - 1 in dims]
        rows = _union([[s for n, s in enumerate(box) if n not in last] for box in boxes])
        return Footprint(elements, _lines(boxes, blocks, shape, itemsize(buffer.dtype)), rows, exact)

    def _irregular(self, a: Access, loops: Sequence[For]) -> bool:
        """Whether the box of the running loops is not what the access touches."""
        own = {x.var for x in loops}
        if any(self._decides(c, own) for c in a.conditions) or any(own & set(E.variables(as_expr(x.extent))) for x in loops):
            return True
        ragged = any(isinstance(n := self.extents[v], int) and n % p[-1] for v, p in self.powers.items() if v in own)
        return ragged or any(self.forms[i] is None and own & set(E.variables(i)) for i in a.indices)

    @staticmethod
    def _decides(condition: Expr, running: Collection[Expr]) -> bool:
        return condition.op == "const" or any(v in running for v in E.variables(condition))

    def _enumerated(self, a: Access, loops: Sequence[For], shape: Sequence[int]) -> Ints:
        grid = _Grid(loops, {v: n for v, n in self.middle.items() if all(v is not x.var for x in loops)}, self.limit)
        own = {x.var for x in loops}
        taken, place = grid.holds([c for c in a.conditions if self._decides(c, own)]), np.asarray(0)
        for i, n in zip(a.indices, shape, strict=True):
            index = _value(self.indices[i], grid.values)
            taken = taken & (index >= 0) & (index < n)
            place = place * n + index
        return np.unique(np.broadcast_to(place, grid.shape)[np.broadcast_to(taken, grid.shape)])

    def _blocks(self, group: Sequence[Access], running: Collection[Expr]) -> list[tuple[int, ...]]:
        """The dimensions, those together that a running digit couples."""
        blocks = [{d} for d in range(len(group[0].indices))]
        for a in group:
            used: dict[Position, int] = {}
            for d, i in enumerate(a.indices):
                form = self.forms[i]
                for position in form[0] if form is not None else ():
                    if position[0] in running and self._size(position) > 1:
                        first = used.setdefault(position, d)
                        one, other = (next(b for b in blocks if x in b) for x in (first, d))
                        if one is not other:
                            one |= other
                            blocks.remove(other)
        return [tuple(sorted(b)) for b in blocks]

    def _set(self, a: Access, dims: tuple[int, ...], shape: Sequence[int], loops: Sequence[For]) -> tuple[_Set, bool]:
        """The positions in these dimensions, and whether they are exactly known."""
        running = {x.var for x in loops}
        if len(dims) > 1:
            forms = [self._form_while(a.indices[d], running) for d in dims]
            digits = list(dict.fromkeys(g for f in forms if f is not None for g in f[0] if g[0] in running))
            if None in forms or prod(map(self._size, digits)) > self.limit:
                return _Set(0, 1, prod(shape[d] for d in dims)), False
            taken, place = np.array(True), np.asarray(0)
            for d, form in zip(dims, forms, strict=True):
                assert form is not None
                index = np.asarray(form[1] + self._standing(form[0], running))
                for axis, g in enumerate(digits):
                    steps = np.arange(self._size(g)) * form[0].get(g, 0)
                    index = index + steps.reshape(-1, *[1] * (len(digits) - 1 - axis))
                taken = taken & (index >= 0) & (index < shape[d])
                place = place * shape[d] + index
            listed = np.unique(place[np.broadcast_to(taken, place.shape)])
            return _Set(count=len(listed), listed=listed), True
        only, size = a.indices[dims[0]], shape[dims[0]]
        form = self._form_while(only, running)
        if form is None:  # depends on data, or too many to enumerate
            most = prod(_most(x.extent, self.middle) for x in loops if x.var in E.variables(only))
            return _Set(0, 1, min(size, most)), most <= 1
        start = form[1] + self._standing(form[0], running)
        return _sum(start, [(c, self._size(g)) for g, c in form[0].items() if g[0] in running], size)

    def _form_while(self, index: Expr, running: Collection[Expr]) -> tuple[dict[Position, int], int] | None:
        """The form of an index while `running` run: what has none, but stands still, is a constant."""
        form = self.forms[index]
        if form is None and not E.reads(index) and not set(running) & set(E.variables(index)):
            return {}, int(_value(self.indices[index], self.middle))
        return form

    def _standing(self, factors: Mapping[Position, int], running: Collection[Expr]) -> int:
        """What the digits of loops that stand still add to an index."""
        return sum(c * (self.middle[g[0]] // g[1] % max(1, self._size(g))) for g, c in factors.items() if g[0] not in running)


def _sum(start: int, terms: Sequence[tuple[int, int]], size: int) -> tuple[_Set, bool]:
    """All values of start + sum(c * x for 0 <= x < n) in [0, size), and whether they are exactly these."""
    start += sum(c * (n - 1) for c, n in terms if c < 0 and n > 0)
    if any(n == 0 for _, n in terms):
        return _Set(count=0), True
    steps = sorted((abs(c), n) for c, n in terms if c and n > 1)
    unit = steps[0][0] if steps else 1
    count, listed, exact = 1, None, True
    for c, n in steps:
        if listed is None and c % unit == 0 and c // unit <= count:
            count += c // unit * (n - 1)
            continue
        listed = unit * np.arange(count) if listed is None else listed
        if len(listed) * n > ENUMERATED:
            unit, exact = reduce(gcd, (s for s, _ in steps)), False
            count, listed = sum(s * (m - 1) for s, m in steps) // unit + 1, None
            break
        listed = np.unique(np.add.outer(listed, c * np.arange(n)))
    if listed is not None:
        listed = listed[(listed >= -start) & (listed < size - start)] + start
        return _Set(count=len(listed), listed=listed), exact
    skipped = max(0, -(start // unit)) if start < 0 else 0
    first = start + skipped * unit
    return _Set(first, unit, max(0, min(count - skipped, -(-(size - first) // unit)))), exact


def _union(boxes: Sequence[Sequence[_Set]]) -> int:
    """The size of a union of products of sets: positions along each block of dimensions are sorted by which boxes they belong to."""
    alive = {(1 << len(boxes)) - 1: 1}
    for column in zip(*boxes, strict=True):
        classes = _classes(column)
        following: dict[int, int] = {}
        for mask, number in alive.items():
            for members, size in classes.items():
                if both := mask & members:
                    following[both] = following.get(both, 0) + number * size
        alive = following
    return sum(alive.values())


def _classes(sets: Sequence[_Set]) -> dict[int, int]:
    """How many positions belong to exactly the sets of each bit mask."""
    bits: dict[Any, tuple[_Set, int]] = {}
    for n, s in enumerate(sets):
        key = s.key()
        bits[key] = s, (bits[key][1] if key in bits else 0) | 1 << n
    distinct = list(bits.values())
    if len(distinct) == 1:
        return {distinct[0][1]: distinct[0][0].count}
    first = distinct[0][0]
    if all(s.listed is None and s.step == first.step and (s.start - first.start) % s.step == 0 for s, _ in distinct):
        ends = sorted({end for s, _ in distinct for end in (s.start, s.start + s.step * s.count)})
        spans = [
            (sum(m for s, m in distinct if s.start <= a < s.start + s.step * s.count), (b - a) // first.step) for a, b in pairwise(ends)
        ]
    else:
        places = np.unique(np.concatenate([s.all() for s, _ in distinct]))
        kinds, found = np.zeros(len(places), np.int64), {}
        for n, (s, _) in enumerate(distinct):
            kinds[np.searchsorted(places, s.all())] |= 1 << n
        found = dict(zip(*(x.tolist() for x in np.unique(kinds, return_counts=True)), strict=True))
        spans = [(sum(m for n, (_, m) in enumerate(distinct) if kind >> n & 1), size) for kind, size in found.items()]
    result: dict[int, int] = {}
    for mask, size in spans:
        if mask:
            result[mask] = result.get(mask, 0) + size
    return result


def _lines(boxes: Sequence[Sequence[_Set]], blocks: Sequence[tuple[int, ...]], shape: Sequence[int], width: int) -> int:
    """Cache lines, taking each row of the last dimension to begin on one unless rows are shorter than a line or whole."""
    elements = _union(boxes)
    packed = -(-elements * width // LINE)
    if not shape:
        return 1
    last = next(n for n, dims in enumerate(blocks) if len(shape) - 1 in dims)
    per_line = max(1, LINE // width)
    whole = all(s[last].listed is None and s[last].step == 1 and s[last].count == shape[-1] for s in boxes)
    if whole or shape[-1] < per_line:
        return packed
    rows = [[_in_lines(s, per_line) if n == last else s for n, s in enumerate(box)] for box in boxes]
    return max(packed, min(elements, _union(rows)))


def _in_lines(s: _Set, per_line: int) -> _Set:
    if s.listed is None and s.step == 1:
        first = s.start // per_line
        return _Set(first, 1, (s.start + s.count - 1) // per_line - first + 1)
    if s.listed is None and s.step % per_line == 0:
        return _Set(s.start // per_line, s.step // per_line, s.count)
    listed = np.unique(s.all() // per_line)
    return _Set(count=len(listed), listed=listed)
