"""Which iteration touches an element: loop variables as functions of the indices.

An access `B[i * 4 + j, k // 3, k % 3]` with j < 4 touches the element (x, y, z) in one iteration: i = x // 4, j = x % 4, k = y * 3 + z.
An index is decomposed like a number into digits: the term that weighs more than all others together is the highest. Terms may be
loop variables, or quotients and remainders of sums of them, as splitting and fusing leave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tcomp.ir import expr as E
from tcomp.ir.access import Digit, digit
from tcomp.ir.expr import Dim, Expr, as_expr, loop_var
from tcomp.ir.linear import Linear, linear
from tcomp.ir.loops import For
from tcomp.ir.simplify import from_linear, prove, quotient, simplify


@dataclass(frozen=True, slots=True)
class Inverse:
    """The iteration that touches the element `places` of a buffer; the places are variables that run over its shape.

    `values` are the loop variables that the element determines. An element that no iteration touches violates one of `conditions`.
    """

    places: tuple[Expr, ...]
    values: dict[Expr, Expr]
    conditions: tuple[Expr, ...]

    def at(self, element: Sequence[Expr]) -> tuple[dict[Expr, Expr], list[Expr]]:
        """(values, conditions) for one element."""
        here = dict(zip(self.places, element, strict=True))
        values = {v: simplify(E.substitute(e, here)) for v, e in self.values.items()}
        return values, [simplify(E.substitute(c, here)) for c in self.conditions]


def inverse(indices: Sequence[Expr], shape: Sequence[Dim], loops: Sequence[For]) -> Inverse:
    """The inverse of an access to a buffer of the given shape inside `loops`; all other variables are taken as given."""
    places = tuple(loop_var(f"[{d}]", n) for d, n in enumerate(shape))
    solution = Solution({x.var for x in loops})
    solution.solve([(simplify(i), p) for i, p in zip(indices, places, strict=True)])
    solution.check_digits()
    values = solution.values
    found = [(values[x.var], E.substitute(as_expr(x.extent), values)) for x in loops if x.var in values]
    found = [(value, extent) for value, extent in found if value not in places or value.attr.extent is not extent]  # in range as it is
    ranges = (c for value, extent in found for c in (value >= 0, value < extent) if not holds(c))
    return Inverse(places, values, (*solution.conditions, *ranges))


@dataclass(slots=True)
class Digits:
    """Digits of expressions that are known, with their values."""

    found: dict[Expr, dict[Digit, Expr]] = field(default_factory=dict)

    def add(self, d: Digit, value: Expr) -> Expr:
        """Remember the value of a digit; the value that was known before, if there was one."""
        return self.found.setdefault(d.whole, {}).setdefault(d, value)

    def chain(self, e: Expr) -> dict[Digit, Expr] | None:
        """All digits of an expression, from the lowest to the highest; None while one is missing."""
        chain: dict[Digit, Expr] = {}
        reach: Expr | None = as_expr(1)
        while reach is not None:
            following = next((d for d in self.found[e] if d.low is reach), None)
            if following is None:
                return None
            chain[following] = self.found[e][following]
            reach = following.high
            if reach is not None and prove(e >= 0) and prove(e < reach):
                break
        return chain


@dataclass(slots=True)
class Solution:
    """The solution of equations of index expressions: `values` of variables, `digits` of expressions that are known in part, and
    `conditions` that are necessary for a solution to exist."""

    unknown: set[Expr]
    values: dict[Expr, Expr] = field(default_factory=dict)
    conditions: list[Expr] = field(default_factory=list)
    digits: Digits = field(default_factory=Digits)
    composed: set[Digit] = field(default_factory=set)  # digits from which the value of their expression was composed

    def solve(self, equations: list[tuple[Expr, Expr]]) -> None:
        """Adds equations expression == value. An expression that cannot be decomposed yet waits until more variables are known."""
        waiting: list[tuple[Expr, Expr]] = []
        while equations:
            e, value = equations.pop(0)
            e = simplify(E.substitute(e, self.values))
            terms = {m: c for m, c in linear(e).items() if self._open(m)}
            if not terms:
                self._require(E.equal(e, value))
                continue
            known = from_linear({m: c for m, c in linear(e).items() if m not in terms})
            found = self._digits(terms, simplify(value - known))
            if found is None:
                waiting.append((e, value))
                continue
            equations += [whole for atom, v in found for whole in self._learn(atom, v)] + waiting
            waiting = []

    def check_digits(self) -> None:
        """Requires the digits of what other equations determined."""
        for e, digits in self.digits.found.items():
            if not self._open([e]):
                known = simplify(E.substitute(e, self.values))
                for d, value in digits.items():
                    if d not in self.composed:
                        self._require(E.equal(simplify(known // d.low if d.high is None else known // d.low % d.size), value))

    def _open(self, monomial: Sequence[Expr]) -> bool:
        return any(v in self.unknown and v not in self.values for v in E.variables(*monomial))

    def _require(self, condition: Expr) -> None:
        if not holds(condition):
            self.conditions.append(simplify(condition))

    def _digits(self, terms: Linear, value: Expr) -> list[tuple[Expr, Expr]] | None:
        """The atoms of a sum, each with its value, if the sum determines them."""
        found, terms = list[tuple[Expr, Expr]](), dict(terms)
        while terms:
            if (highest := self._highest(terms)) is None:
                return None
            atom, weight, shift, monomial = highest
            del terms[monomial]
            value = simplify(value - shift)
            size = _size(weight)
            digit = simplify(value // size)
            found.append((atom, digit if weight is size else simplify(-digit)))
            value = simplify(value % size + shift)  # of the terms that are left
        self._require(E.equal(value, 0))
        return found

    def _highest(self, terms: Linear) -> tuple[Expr, Expr, Expr, tuple[Expr, ...]] | None:
        """(atom, weight, shift, monomial) with 0 <= all other terms - shift < |weight|."""
        for m, c in terms.items():
            unknown = [a for a in m if self._open([a])]
            if len(unknown) == 1:
                factors = list(m)
                factors.remove(unknown[0])
                weight = simplify(from_linear({tuple(factors): c}))
                size, rest = _size(weight), from_linear({n: k for n, k in terms.items() if n != m})
                low = E.bounds(rest)[0] or 0
                for shift in dict.fromkeys((low - low % size.attr if size.op == "const" else 0, low)) if prove(size > 0) else ():
                    if prove(rest - shift >= 0) and prove(rest - shift < size):
                        return unknown[0], weight, E.const(shift), m
        return None

    def _learn(self, atom: Expr, value: Expr) -> list[tuple[Expr, Expr]]:
        """Equations that follow from the value of an atom: those of expressions all of whose digits are known now."""
        if atom.op == "var":
            self._require(E.equal(self.values.setdefault(atom, value), value))
            return []
        found = digit(atom)
        self._require(E.equal(self.digits.add(found, value), value))
        # A clamped variable, for example, is its own only digit: it determines nothing, but has to agree with other equations.
        chain = None if found.whole is atom else self.digits.chain(found.whole)
        if chain is None:
            return []
        total = as_expr(0)
        for d, known in chain.items():
            total = simplify(total + known * d.low)
            for condition in () if d.high is None else (known >= 0, known < d.size):
                self._require(condition)
        self.composed |= chain.keys()
        return [(found.whole, total)]


def _size(weight: Expr) -> Expr:
    """The absolute value of a weight whose sign is known."""
    return simplify(weight if prove(weight > 0) else -weight)


def holds(condition: Expr) -> bool:
    """Whether a condition can be proved: equality by two inequalities, and x // c < y // c where x + c <= y as well (the last digit of
    a number is below the extent of a loop over quotients rounded up)."""
    if prove(condition):
        return True
    if condition.op == "eq":
        a, b = condition.args
        return prove(a <= b) and prove(b <= a)
    if (condition := simplify(condition)).op != "lt":
        return False
    (x, c), (y, d) = (quotient(simplify(e)) for e in condition.args)
    return c == d and prove(x + c <= y)
