"""The access algebra: which elements of a buffer (or tensor) a statement reads or writes, and how they move with the loops around it.

Expressions are taken as the simplifier leaves them (`ir.simplify`), and loop variables run from 0. Whether different iterations touch
different elements is asked of `ir.polyhedral.inverse_maps`; exact sets of elements, whatever it takes, of `ir.polyhedral`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_expr, bounds
from tcomp.ir.linear import linear
from tcomp.ir.loops import Accumulate, Allocate, Buffer, For, If, Stmt, Store, expressions, guarded_children, places, walk
from tcomp.ir.simplify import as_dim, difference, from_linear, prove, same_dim, same_shape, simplify

Loops: TypeAlias = tuple[For, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Access:
    """One read or write of `buffer[indices]` inside `loops`, outermost first, where all `conditions` hold."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    loops: Loops
    conditions: tuple[Expr, ...]
    writes: bool
    statement: Stmt


def accesses(stmt: Stmt) -> list[Access]:
    """Every access of a statement, in program order. A condition that depends on data is taken to hold, and so is its opposite."""
    found: list[Access] = []

    def visit(s: Stmt, loops: Loops, conditions: tuple[Expr, ...]) -> None:
        found.extend(Access(r.attr, r.args, loops, conditions, False, s) for r in E.reads(*expressions(s)))
        if isinstance(s, Store | Accumulate):
            found.append(Access(s.buffer, s.indices, loops, conditions, True, s))
        for child, inner, more in inside(s):
            visit(child, loops + inner, conditions + more)

    visit(stmt, (), ())
    return found


def inside(s: Stmt) -> Iterator[tuple[Stmt, Loops, tuple[Expr, ...]]]:
    """The statements directly inside `s`, each with the loop, if `s` is one, and the condition under which `s` executes it."""
    for child, condition in guarded_children(s):
        known = isinstance(s, If) and not E.reads(condition)
        yield child, (s,) if isinstance(s, For) else (), (simplify(condition),) if known else ()


def by_buffer(found: Iterable[Access]) -> dict[Buffer, list[Access]]:
    """Accesses by the buffer they touch."""
    groups: dict[Buffer, list[Access]] = {}
    for a in found:
        groups.setdefault(a.buffer, []).append(a)
    return groups


def indices_of(stmt: Stmt, buffer: Buffer) -> list[tuple[Expr, ...]]:
    """The distinct index tuples at which a statement, or one inside, reads or writes a buffer."""
    return list(dict.fromkeys(indices for s in walk(stmt) for b, indices in places(s) if b is buffer))


def loop_extents(stmt: Stmt) -> dict[Expr, Dim]:
    """The variables of all loops of a statement, its own included, with their extents."""
    return {s.var: s.extent for s in walk(stmt) if isinstance(s, For)}


@dataclass(frozen=True, slots=True)
class Affine:
    """A sum of `terms`, coefficients of variables, and a constant."""

    terms: Mapping[Expr, int]
    constant: int

    def span(self, extents: Mapping[Expr, int]) -> tuple[int, int]:
        """(lowest, highest) value for all values of the variables in `extents`, each from 0 to below its extent; other variables are 0."""
        ends = [c * (extents[v] - 1) for v, c in self.terms.items() if v in extents]
        return self.constant + sum(min(0, n) for n in ends), self.constant + sum(max(0, n) for n in ends)


def affine(index: Expr, variables: Collection[Expr] | None = None, clamped: bool = False) -> Affine | None:
    """The affine form of an index in `variables` (None: in any), such as that of `y * 2 + k - 1`; None if it has none. With `clamped` also
    that of an index clamped to bounds in which no variable occurs, the bounds left out."""
    sums = linear(index)
    terms, constant = dict[Expr, int](), sums.pop((), 0)
    for monomial, c in sums.items():
        atom = monomial[0] if len(monomial) == 1 else None
        if atom is not None and (atom.op == "var" if variables is None else atom in variables):
            terms[atom] = terms.get(atom, 0) + c
        elif clamped and atom is not None and atom.op in ("min", "max"):
            moving = [a for a in atom.args if variables is None or not set(E.variables(a)).isdisjoint(variables)]
            inner = affine(moving[0], variables, clamped) if len(moving) == 1 else None
            if inner is None:
                return None
            constant += c * inner.constant
            for v, k in inner.terms.items():
                terms[v] = terms.get(v, 0) + c * k
        else:
            return None
    return Affine(terms, constant)


def linear_index(buffer: Buffer, indices: Sequence[Expr]) -> Expr:
    """The row-major address of an element, in elements: that of [y, x] in an [8, 16] is y * 16 + x."""
    return simplify(E.row_major(indices, buffer.shape))


def without(index: Expr, v: Expr) -> tuple[int, Expr] | None:
    """(c, rest) with index == c * v + rest, where `v` does not occur in the rest; None if there are none."""
    step = coefficient(index, v)
    return None if step is None else (step, from_linear({m: c for m, c in linear(index).items() if m != (v,)}))


def coefficient(index: Expr, v: Expr) -> int | None:
    """The constant factor of `v` in an index; None if `v` occurs in any other way."""
    terms = linear(index)
    return None if any(v in E.variables(*m) for m in terms if m != (v,)) else terms.get((v,), 0)


def is_multiple(index: Expr, n: int) -> bool:
    """Whether an index is certainly a multiple of a number, as all its coefficients are."""
    return all(c % n == 0 for c in linear(index).values())


def stride(read: Expr, v: Expr) -> int | None:
    """How many elements the address of a read moves when `v` grows by one; None if that is not a constant."""
    return coefficient(linear_index(read.attr, read.args), v)


def lane_span(place: Expr, v: Expr, lanes: int) -> float:
    """The distance in elements between the addresses that the first and the last of `lanes` values of `v` give; infinity where it
    varies."""
    first, last = (simplify(E.substitute(place, {v: E.const(n)})) for n in (0, lanes - 1))
    gap = difference(last, first)
    return abs(int(gap.attr)) if gap.op == "const" else inf


@dataclass(frozen=True, slots=True)
class Digit:
    """(whole // low) % (high // low): the digits of `whole`, a number with the bases of its splits, from the place `low` up to `high`; all
    from `low` on where `high` is None."""

    whole: Expr
    low: Expr
    high: Expr | None

    @property
    def size(self) -> Expr:
        """How many values it takes, where it is not the highest."""
        assert self.high is not None
        return simplify(self.high // self.low)


def digit(e: Expr) -> Digit:
    """An expression as a digit of another one: a quotient or remainder of what it divides, if the divisor is certainly positive; any other
    expression is the only digit of itself.

    Splitting and fusing loops leaves digits of an index, such as i // 12, i // 3 % 4, i % 3.
    """
    if e.op in ("floordiv", "mod"):
        inner = digit(e.args[0])
        place = simplify(inner.low * e.args[1])
        nested = inner.whole is e.args[0] or (bounds(e.args[1])[0] or 0) > 0
        if not nested or (inner.high is not None and not prove(E.equal(inner.high % place, 0))):
            inner, place = Digit(e.args[0], as_expr(1), None), e.args[1]
        return replace(inner, low=place) if e.op == "floordiv" else replace(inner, high=place)
    return Digit(e, as_expr(1), None)


Interval: TypeAlias = tuple[Expr, Expr]  # lowest and highest value


def interval(index: Expr, inner: Mapping[Expr, Dim]) -> Interval | None:
    """(lowest, highest) value of an index while the loops `inner` (extents by variable) run, by the outer ones; None if unknown.

    The highest is the lowest plus something that does not depend on outer loops, wherever that can be had.
    """
    low = high = as_expr(0)
    for monomial, c in linear(simplify(index)).items():
        varying = [a for a in monomial if not inner.keys().isdisjoint(E.variables(a))]
        factor = from_linear({tuple(a for a in monomial if a not in varying): c})
        if not varying:
            low, high = low + factor, high + factor
            continue
        reach = _interval_of_atom(varying[0], inner) if len(varying) == 1 else None
        if reach is not None and ((rising := prove(factor >= 0)) or prove(factor <= 0)):
            first, last = reach if rising else reach[::-1]
            low, high = low + first * factor, high + last * factor
        else:
            lo, hi = bounds(from_linear({monomial: c}))
            if lo is None or hi is None:
                return None
            low, high = low + lo, high + hi
    return simplify(low), simplify(high)


def _interval_of_atom(atom: Expr, inner: Mapping[Expr, Dim]) -> Interval | None:
    """The range of a loop variable, or of a function that never moves further than its operands do."""
    if atom in inner:
        last = interval(as_expr(inner[atom]) - 1, inner)  # of a triangular loop: that of its longest run
        return None if last is None else (as_expr(0), last[1])
    if atom.op in ("floordiv", "mod") and atom.args[1].op == "const" and atom.args[1].attr > 0:
        x = interval(atom.args[0], inner)
        return None if x is None else _interval_of_quotient(x, int(atom.args[1].attr), atom.op)
    if atom.op in ("min", "max") and (x := interval(atom.args[0], inner)) is not None and (y := interval(atom.args[1], inner)) is not None:
        (a, b), (c, d) = x, y
        low = simplify(E.binary(atom.op, a, c))
        return low, simplify(low + E.maximum(b - a, d - c))
    return None


def _interval_of_quotient(x: Interval, divisor: int, op: str) -> Interval:
    low, high = x
    reach = difference(high, low)
    aligned = prove(E.equal(low % divisor, 0))
    if op == "mod":
        fits = prove(reach < divisor) and (aligned or prove(E.equal(low // divisor, high // divisor)))
        return (simplify(low % divisor), simplify(low % divisor + reach)) if fits else (as_expr(0), as_expr(divisor - 1))
    first, last = simplify(low // divisor), simplify(high // divisor)
    if difference(last, first).op == "const":
        return first, last
    return first, simplify(first + (reach if aligned else reach + (divisor - 1)) // divisor)


def union(intervals: Sequence[Interval | None]) -> Interval | None:
    """An interval around all; None where one is unknown, or it is unknown which of them begins first or ends last."""
    around = intervals[0] if intervals else None
    for other in intervals[1:]:
        if around is None or other is None:
            return None
        lows, highs = _ordered(other[0], around[0]), _ordered(around[1], other[1])
        around = None if lows is None or highs is None else (lows[0], highs[1])
    return around


def _ordered(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """The smaller and the larger one; None where that is unknown."""
    for low, high in ((a, b), (b, a)):
        if prove(low <= high) or ((largest := _upper_bound(difference(low, high))) is not None and largest <= 0):
            return low, high
    return None


def _upper_bound(e: Expr) -> int | None:
    """A number that an expression does not exceed; a clamped index next to another one is replaced by each of its bounds."""
    for monomial, c in linear(e).items():
        if len(monomial) == 1 and monomial[0].op in ("min", "max"):
            ends = [_upper_bound(simplify(E.substitute(e, {monomial[0]: a}))) for a in monomial[0].args]
            known = [end for end in ends if end is not None]
            if (monomial[0].op == "min") == (c > 0):
                return min(known, default=None)
            return max(known) if len(known) == len(ends) else None
    return bounds(e)[1]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements base[d] <= index[d] < base[d] + extent[d]."""

    base: tuple[Expr, ...]
    extent: tuple[Dim, ...]

    @classmethod
    def whole(cls, shape: Sequence[Dim]) -> Box:
        """All elements of a shape."""
        return cls((as_expr(0),) * len(shape), tuple(map(as_dim, shape)))

    def is_whole(self, shape: Sequence[Dim]) -> bool:
        """Whether these are certainly all elements of a shape."""
        return same_shape(self.extent, shape)

    def replaced(self, dims: Mapping[int, tuple[Expr, Dim]]) -> Box:
        """The box with another (base, extent) in some dimensions."""
        sides = [dims.get(d, side) for d, side in enumerate(zip(self.base, self.extent, strict=True))]
        return Box(tuple(base for base, _ in sides), tuple(extent for _, extent in sides))

    def union(self, other: Box, shape: Sequence[Dim]) -> Box:
        """A box around both, all of a dimension of the `shape` where it is not known which of them begins first."""
        if self == other:
            return self
        mine, others = ([(b, difference(b + n, 1)) for b, n in zip(x.base, x.extent, strict=True)] for x in (self, other))
        hulls = enumerate(map(union, zip(mine, others, strict=True)))
        return Box.whole(shape).replaced({d: (h[0], as_dim(difference(h[1], h[0]) + 1)) for d, h in hulls if h is not None})


def box_touched(stmt: Stmt, buffer: Buffer, clip: bool = True, sizes: Collection[Expr] = ()) -> Box:
    """The box of `buffer` that `stmt` touches for one iteration of the loops around it.

    Exact for sums of loop variables and for what splitting, fusing, strides, dilation and clamping make of them, where one access has the
    lowest index and one the highest. Indices of other forms (gathers), and boxes that cannot be compared, widen to the whole dimension.
    Extents do not depend on the base. With `clip` a box is not larger than the buffer; without, it keeps the size of the loops' tile, which
    guards may cut. `sizes` are the symbolic dims of the kernel."""
    inner, written = loop_extents(stmt), {s.buffer for s in walk(stmt) if isinstance(s, Allocate | Store | Accumulate)}
    found = [[interval(i, inner) for i in indices] for indices in indices_of(stmt, buffer)]
    sides: dict[int, tuple[Expr, Dim]] = {}
    for d, size in enumerate(buffer.shape):
        hull = union([box[d] for box in found])
        extent = None if hull is None else _constant_extent(hull, sizes)
        if hull is None or extent is None or (clip and isinstance(size, int) and prove(as_expr(extent) >= size)):
            continue
        if any(r.attr in written or not in_range(r.args, r.attr.shape) for r in E.reads(hull[0])):
            continue  # the base is not known before the statement, or undefined where its conditions do not hold
        sides[d] = hull[0], extent
    return Box.whole(buffer.shape).replaced(sides)


def _constant_extent(hull: Interval, sizes: Collection[Expr]) -> Dim | None:
    """How many values there are at most, whatever the loops: a number, or an expression of symbolic dims alone."""
    extent = as_dim(difference(hull[1], hull[0]) + 1)
    if isinstance(extent, int):
        return max(extent, 0)  # loops that never run touch nothing
    if not E.reads(extent) and all(v in sizes or (v.attr.extent is None and v.attr.lo != 0) for v in E.variables(extent)):
        return extent
    largest = _upper_bound(extent)
    return None if largest is None else max(largest, 0)


def within(index: Expr, extent: Dim) -> bool:
    """Whether 0 <= index < extent for all values of the loops around, ignoring conditions."""
    return prove(index >= 0) and prove(index < as_expr(extent))


def clamped_check(e: Expr) -> Expr | None:
    """The check in `max(min(checked(i, n), n - 1), 0)`, which clamps what is checked."""
    if e.op != "max" or E.const(0) not in e.args:
        return None
    inner = next((a for a in e.args if a.op == "min"), e)
    check = next((a for a in inner.args if a.op == "checked"), None)
    return check if check is not None and any(same_dim(check.args[1] - 1, a) for a in inner.args) else None


def in_range(indices: Sequence[Expr], shape: Sequence[Dim]) -> bool:
    """Whether all indices are within the shape for all values of the loops around, ignoring conditions."""
    return all(map(within, indices, shape))


# ---------------------------------------------------------------- accesses that leave a tensor


def out_of_bounds_reads(e: Expr, axes: Sequence[Expr]) -> Iterator[tuple[Expr, int, Dim]]:
    """(read, axis, extent that would be needed) for reads of an expression over `axes` that certainly leave their tensor, or whose index is
    a loop variable of another extent than the tensor has. Not if a condition around the read constrains that variable, and where extents
    are symbolic, only if both are plain sizes of inputs: of computed ones, one may be known to be the smaller one."""
    loops = frozenset(axes).union(*(x.attr[1] for x in E.walk(e) if x.op == "reduce"))
    return _out_of_bounds([e], loops, frozenset())


def out_of_bounds_accesses(
    stmt: Stmt, loops: frozenset[Expr] = frozenset(), bounded: frozenset[Expr] = frozenset()
) -> Iterator[tuple[Expr, int, Dim]]:
    """`out_of_bounds_reads` for all reads and writes of a statement."""
    inner = loops | {stmt.var} if isinstance(stmt, For) else loops
    found = [*expressions(stmt), *(E.read(b, indices) for b, indices in places(stmt))]
    yield from _out_of_bounds(found, inner, bounded)
    for child, condition in guarded_children(stmt):
        yield from out_of_bounds_accesses(child, inner, bounded if isinstance(stmt, For) else bounded | _constrained(condition))


def _out_of_bounds(roots: Sequence[Expr], loops: frozenset[Expr], bounded: frozenset[Expr]) -> Iterator[tuple[Expr, int, Dim]]:
    seen, stack = set[tuple[Expr, frozenset[Expr]]](), [(e, bounded) for e in roots]
    while stack:
        if (place := stack.pop()) in seen:
            continue
        seen.add(place)
        e, known = place
        match e.op:
            case "select":
                stack.append((e.args[0], known))
                known |= _constrained(e.args[0])
                stack += [(a, known) for a in e.args[1:]]
                continue
            case "and" | "or":  # the first decides whether the other one counts
                known |= _constrained(e)
            case "read":
                for axis, (index, extent) in enumerate(zip(e.args, e.attr.shape, strict=True)):
                    if (needed := _needed(index, extent, loops, known)) is not None:
                        yield e, axis, needed
        stack += [(a, known) for a in e.args]


def _constrained(condition: Expr) -> frozenset[Expr]:
    """The variables in a condition, but for those that it only uses to read something."""
    return frozenset(x for x in E.walk(condition, operands=E.value_operands) if x.op == "var")


def _needed(index: Expr, extent: Dim, loops: frozenset[Expr], bounded: frozenset[Expr]) -> Dim | None:
    """The extent that an index needs, if that is not `extent` or less."""
    if index.op == "var" and index in loops and not (index.attr.extent is None and isinstance(extent, int)):
        own = index.attr.hi + 1 if index.attr.extent is None else index.attr.extent
        if own is extent or index in bounded or not (_plain(own) and _plain(extent)):
            return None
        return None if same_dim(own, extent) or prove(as_expr(own) <= extent) else own
    high = bounds(index)[1]
    if not isinstance(extent, int) or high is None or high < extent or (variables := _attained(index, loops)) is None:
        return None
    return high + 1 if bounded.isdisjoint(variables) else None


def _plain(extent: Dim) -> bool:
    """Whether an extent is a number or the size of an input; it is neither computed nor counted by the run."""
    return not isinstance(extent, Expr) or (extent.op == "var" and extent.attr.source is None and extent.attr.lo != 0)


def _attained(index: Expr, loops: frozenset[Expr]) -> list[Expr] | None:
    """The variables of an index that takes the largest value that their ranges allow: a sum of multiples and rounded parts of different
    loop variables."""
    variables, stack = list[Expr](), [index]
    while stack:
        e = stack.pop()
        match e.op:
            case "add" | "sub":
                stack += e.args
            case "mul" if any(a.op == "const" for a in e.args):
                stack += [a for a in e.args if a.op != "const"]
            case "floordiv" if e.args[1].op == "const" and e.args[1].attr > 0:
                stack.append(e.args[0])
            case "var" if e in loops and e not in variables and e.attr.extent is None and e.attr.hi >= 0:
                variables.append(e)
            case "const":
                pass
            case _:
                return None
    return variables
