"""Equations between sizes: the constraints on symbolic dims that follow from extents that have to be equal.

`Sizes` collects such equations while a model is imported. One that can be solved replaces dims (x by 4; seq by a dim of 1..512, where
min(seq, 512) has to be seq; w by 32 * w, where w // 32 * 32 has to be w); any other is a check to be made before a run. All steps are
exact: sizes are excluded only where the equation does not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from math import gcd, lcm

from tcomp.errors import IRError
from tcomp.ir.expr import INDEX, Dim, Expr, bounds, const, equal, evaluate_int, substitute, unary, var, variables, walk
from tcomp.ir.linear import Linear, linear
from tcomp.ir.simplify import as_dim, difference, from_linear, prove, simplify

MAX_PERIOD = 1024  # residues that are tried: far more than the product of all strides of an image network


class Contradiction(IRError):
    """Two sizes have to be equal, and cannot be."""


@dataclass
class _Solution:
    """Dims and what they are in terms of others, one after the other; conditions that remain."""

    values: list[tuple[Expr, Expr]] = field(default_factory=list)
    conditions: list[Expr] = field(default_factory=list)


@dataclass
class Sizes:
    """Constraints on symbolic dims besides their ranges.

    unlimited: the upper bound of dims that have none of their own
    dims: those that follow from the inputs of a model, in order; equations about others are ignored
    values: (dim, its value in terms of others), in the order of substitution
    checks: conditions on dims that could not be decided, and where each comes from
    """

    unlimited: int
    dims: list[Expr] = field(default_factory=list)
    values: list[tuple[Expr, Expr]] = field(default_factory=list)
    checks: dict[Expr, str] = field(default_factory=dict)

    def start(self, shapes: Iterable[Sequence[Dim]]) -> None:
        """Begin an import, with inputs of these shapes."""
        self.dims, self.checks = list(variables(*(d for shape in shapes for d in shape if isinstance(d, Expr)))), {}

    def now(self, d: Dim) -> Dim:
        """A size in terms of the dims that are left."""
        return as_dim(_replaced(d, self.values)) if isinstance(d, Expr) else d

    def conditions(self) -> dict[Expr, str]:
        """The checks in terms of the dims that are left, without those that hold for sure."""
        found = {simplify(_replaced(c, self.values)): where for c, where in self.checks.items()}
        return {c: where for c, where in found.items() if not prove(c)}

    def solves(self, a: Dim, b: Dim) -> bool:
        """Whether dims can be replaced so that two sizes are equal, by more than a narrower range of one."""
        gap = difference(self.now(a), self.now(b))
        try:
            solution = None if any(v.attr.source is not None for v in variables(gap)) else self._solved(gap)
        except Contradiction:
            return False
        return solution is not None and not any(value.op == "var" for _, value in solution.values)

    def meet(self, a: Dim, b: Dim, where: str) -> bool:
        """Take note that two sizes are equal; False if nothing can be done about it. Raises `Contradiction` where they cannot be."""
        gap = difference(self.now(a), self.now(b))
        if gap is const(0):
            return True
        given = {v for v in variables(gap) if v.attr.source is not None}  # by values of inputs: nothing to be solved for
        if not set(variables(gap)) - given <= set(self.dims):
            return False
        if given and prove(unary("not", equal(gap, 0))):
            raise Contradiction(f"{gap} is never 0")
        solution = None if given else self._solved(gap)
        self._take(_Solution([], [simplify(equal(self.now(a), self.now(b)))]) if solution is None else solution, where)
        return True

    def assume(self, condition: Expr, where: str) -> bool:
        """The same for a condition that holds."""
        condition = simplify(_replaced(condition, self.values))
        if condition.op == "eq" and condition.args[0].dtype == INDEX:
            return self.meet(condition.args[0], condition.args[1], where)
        if prove(unary("not", condition)):
            raise Contradiction(f"{condition} never holds")
        given = {v for v in variables(condition) if v.attr.source is not None}
        if not set(variables(condition)) - given <= set(self.dims):
            return False
        self._take(_Solution([], [condition]) if given else self._assumed(condition), where)
        return True

    def _take(self, solution: _Solution, where: str) -> None:
        for v, value in solution.values:
            self.values.append((v, value))
            at = self.dims.index(v)
            self.dims[at : at + 1] = [new for new in variables(value) if new not in self.dims]
        self.checks |= dict.fromkeys(solution.conditions, where)

    def _solved(self, gap: Expr) -> _Solution | None:
        """The solution of gap == 0."""
        terms = _reduced(linear(gap))
        gap = from_linear(terms)
        lo, hi = bounds(gap)
        if (lo is not None and lo > 0) or (hi is not None and hi < 0) or prove(unary("not", equal(gap, 0))):
            raise Contradiction(f"{gap} is never 0")
        if not variables(gap):
            return _Solution()
        if (found := self._eliminated(terms)) is not None:
            return found
        choice = next((e for e in walk(gap) if e.op in ("min", "max", "select")), None)
        return self._periodic(gap) if choice is None else self._chosen(gap, choice)

    def _eliminated(self, terms: Linear) -> _Solution | None:
        """A dim that occurs once, with the factor 1 or -1, in terms of the others: the last one, and none by a difference if possible."""
        found = []
        for order, v in enumerate(self.dims):
            if abs(c := terms.get((v,), 0)) == 1:
                others = {m: -k * c for m, k in terms.items() if m != (v,)}
                if not any(v in variables(a) for m in others for a in m):
                    found.append((sum(k < 0 for k in others.values()), -order, v, others))
        if not found:
            return None
        _, _, v, others = min(found, key=lambda item: item[:2])
        value, lo, hi = from_linear(others), v.attr.lo, v.attr.hi
        if value.op == "const":
            if not lo <= int(value.attr) <= hi:
                raise Contradiction(f"{v} is {value}", why=f"its range is {lo}..{hi}")
            return _Solution([(v, value)])
        solution = self._limited(value, lo, hi)
        solution.values.insert(0, (v, value))
        return solution

    def _limited(self, e: Expr, lo: int, hi: int) -> _Solution:
        """The consequences of lo <= e <= hi."""
        terms = linear(simplify(e))
        offset = terms.pop((), 0)
        (m, c), *others = [*terms.items()] or [((), 0)]
        if len(m) == 1 and not others and m[0].op == "var":
            v, ends = m[0], (lo - offset, hi - offset)
            least, most = (-(-ends[0] // c), ends[1] // c) if c > 0 else (-(-ends[1] // c), ends[0] // c)
            most = v.attr.hi if hi >= self.unlimited and c > 0 else most
            return self._narrowed(v, max(least, v.attr.lo), min(most, v.attr.hi))
        wanted = [e >= lo, *([e <= hi] if hi < self.unlimited else [])]
        return _Solution([], [simplify(c) for c in wanted if not prove(c)])

    def _narrowed(self, v: Expr, lo: int, hi: int) -> _Solution:
        if lo > hi:
            raise Contradiction(f"{v} would be {lo} at least, and {hi} at most")
        if (lo, hi) == (v.attr.lo, v.attr.hi):
            return _Solution()
        return _Solution([(v, const(lo) if lo == hi else var(v.name, lo, hi, exact=tuple(n for n in v.attr.exact if lo <= n <= hi)))])

    def _chosen(self, gap: Expr, choice: Expr) -> _Solution | None:
        """`choice` is a minimum, maximum or select: the operand of which the equation says that it is this one."""
        if choice.op == "select":
            condition, a, b = choice.args
            options = [(a, condition), (b, simplify(unary("not", condition)))]
        else:
            a, b = choice.args
            less = (a <= b, b <= a)
            options = list(zip((a, b), less if choice.op == "min" else less[::-1], strict=True))
        rests = [(simplify(substitute(gap, {choice: value})), condition) for value, condition in options]
        if all(rest is const(0) for rest, _ in rests):
            return _Solution()
        possible = [(rest, condition) for rest, condition in rests if not prove(unary("not", equal(rest, 0)))]
        for (rest, condition), (other, _) in (rests, rests[::-1]):
            # Where an operand solves the equation, it is this one, unless the other may solve it elsewhere than where both are equal.
            if rest is const(0) and (choice.op == "select" or len(possible) == 1 or _proportional(other, simplify(a - b))):
                return self._assumed(condition)
        if not possible:
            raise Contradiction(f"{gap} is never 0")
        if len(possible) > 1:
            return None
        rest, condition = possible[0]
        if (solution := self._solved(rest)) is None:
            return None
        assumed = self._assumed(_replaced(condition, solution.values))
        return _Solution(solution.values + assumed.values, solution.conditions + assumed.conditions)

    def _assumed(self, condition: Expr) -> _Solution:
        condition = simplify(condition)
        if prove(condition):
            return _Solution()
        if condition.op in ("lt", "le") and condition.args[0].dtype == INDEX:
            room = difference(condition.args[1], condition.args[0])
            return self._limited(room, int(condition.op == "lt"), self.unlimited)
        return _Solution([], [condition])

    def _periodic(self, gap: Expr) -> _Solution | None:
        """An equation of one dim v, in quotients by constants: by the values that it takes while v goes through a period."""
        if len(found := variables(gap)) != 1 or (period := _period(gap)) is None or period[0] > MAX_PERIOD:
            return None
        (v,), (length, growth) = found, period
        lo, hi = v.attr.lo, v.attr.hi
        values = [evaluate_int(gap, {v: r}) for r in range(length)]
        if growth:
            sizes = sorted(r - g // growth * length for r, g in enumerate(values) if g % growth == 0)
            sizes = [size for size in sizes if lo <= size <= hi]
            if not sizes:
                raise Contradiction(f"{gap} is never 0")
            return self._narrowed(v, sizes[0], sizes[-1]) if sizes[-1] - sizes[0] + 1 == len(sizes) else None
        length = next(n for n in range(1, length + 1) if length % n == 0 and values == values[:n] * (length // n))
        residues = [r for r in range(length) if values[r] == 0]
        if not residues:
            raise Contradiction(f"{gap} is never 0")
        if len(residues) == length:
            return _Solution()
        first = next(r for r in residues if values[r - 1])  # of the run of residues, which may pass the end of the period
        if any(values[(first + n) % length] for n in range(len(residues))):
            return None
        first -= length if first + len(residues) > length else 0
        last = first + len(residues) - 1
        number = _dim(v.name, -(-(lo - last) // length), (hi - first) // length)
        rest = _dim(f"{v.name}_rest", first, last)
        value = simplify(number * length + rest)
        return _Solution([(v, value)], [c for c in (simplify(value >= lo), simplify(value <= hi)) if not prove(c)])


def _proportional(x: Expr, y: Expr) -> bool:
    """Whether x = 0 only where y = 0, as x is y times a number."""
    mine, theirs = linear(x), linear(y)
    return mine.keys() == theirs.keys() and len({Fraction(mine[m], theirs[m]) for m in mine}) == 1


def _replaced(e: Expr, values: Iterable[tuple[Expr, Expr]]) -> Expr:
    for v, value in values:
        e = substitute(e, {v: value})
    return e


def _dim(name: str, lo: int, hi: int) -> Expr:
    return const(lo) if lo == hi else var(name, lo, hi)


def _reduced(terms: Linear) -> Linear:
    """An equation divided by what all its terms have in common, as far as that is certainly not 0."""
    if not terms:
        return terms
    shared = reduce(lambda x, y: x & y, map(Counter, terms))
    factors = [a for a in shared.elements() if (lo := bounds(a)[0]) is not None and lo >= 1]
    common = gcd(*terms.values())
    result: Linear = {}
    for m, c in terms.items():
        left = list(m)
        for a in factors:
            left.remove(a)
        result[tuple(left)] = c // common
    return result


def _period(e: Expr) -> tuple[int, int] | None:
    """(n, k) with e(v + n) == e(v) + k for every v, where v is the only variable; None where there may be none."""
    if e.op == "const":
        return 1, 0
    if e.op == "var":
        return 1, 1
    inner = [_period(a) for a in e.args] if e.op in ("add", "sub", "mul", "neg", "floordiv", "mod") else [None]
    if any(p is None or p[0] > MAX_PERIOD for p in inner):
        return None
    parts = [p for p in inner if p is not None]
    n = lcm(*(p[0] for p in parts))
    grown = [k * (n // own) for own, k in parts]
    match e.op:
        case "add" | "sub":
            return n, grown[0] + (grown[1] if e.op == "add" else -grown[1])
        case "neg":
            return n, -grown[0]
        case "mul" if "const" in (e.args[0].op, e.args[1].op):
            factor, other = (0, 1) if e.args[0].op == "const" else (1, 0)
            return n, int(e.args[factor].attr) * grown[other]
        case "floordiv" | "mod" if e.args[1].op == "const" and e.args[1].attr > 0:
            c = int(e.args[1].attr)
            times = c // gcd(grown[0], c)
            return n * times, 0 if e.op == "mod" else grown[0] * times // c
    return None
