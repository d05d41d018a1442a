"""The canonical simplifier of index expressions.

An index expression becomes a sum of `coefficient * monomial`, a monomial being a product of atoms (variables, floor-divisions,
remainders, reads, ...). Sums are ordered, so two expressions that differ only by ring laws become the same object. The rules
for `//`, `%`, `min`, `max` and comparisons work on these sums and use the ranges of variables (`expr.bounds`, and
`0 <= i < extent` for loops of symbolic size). Rules hold for all integers within the ranges, barring 64-bit overflow.

Only `int64` arithmetic is reordered; other types keep their wrap-around (or rounding) and see only the identities of `expr.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import combinations
from math import gcd
from operator import mul

from tcomp.ir.expr import INDEX, Dim, Expr, ExprLike, binary, bounds, const, rewrite, select
from tcomp.ir.linear import MAX_DEGREE, Linear, Monomial, degree, forget, linear, order, plus, without

_memo: dict[Expr, Expr] = {}
_MAX_CASES = 3  # minima and maxima in one another of which each operand is looked at to compare sums
_MEMO_LIMIT = 200_000  # entries; the memo is dropped as a whole when full, so that long sessions do not grow


def simplify(e: Dim) -> Expr:
    """An equal expression in canonical form."""
    if not isinstance(e, Expr):
        return const(e)
    if (known := _memo.get(e)) is not None:
        return known
    if len(_memo) > _MEMO_LIMIT:
        _memo.clear()
        forget()
    return rewrite(e, _rule, _memo)


def as_dim(value: ExprLike) -> Dim:
    """Simplified; a plain int where the value is known."""
    if not isinstance(value, Expr):
        return int(value)
    value = simplify(value)
    return int(value.attr) if value.op == "const" else value


def prove(condition: Expr) -> bool:
    """True if `condition` holds for all values of its variables; False means "not known"."""
    return (result := simplify(condition)).op == "const" and bool(result.attr)


def difference(a: Dim, b: Dim) -> Expr:
    """Simplified a - b."""
    return simplify(binary("sub", simplify(a), simplify(b)))


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two extents are provably equal."""
    return a == b if isinstance(a, int) and isinstance(b, int) else difference(a, b) is const(0)


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are provably equal."""
    return len(a) == len(b) and all(map(same_dim, a, b))


def _rule(e: Expr) -> Expr | None:
    args = e.args
    if e.dtype == INDEX:
        match e.op:
            case "add" | "sub" | "mul" | "neg":
                return spread if (spread := _spread(terms := linear(e))) is not None else from_linear(terms)
            case "floordiv":
                return _floordiv(*args)
            case "mod":
                return _mod(*args)
            case "truncdiv" | "truncmod" if all(map(_nonnegative, args)):
                return (_floordiv if e.op == "truncdiv" else _mod)(*args)
            case "min" | "max":
                return _min_max(e)
            case "checked" if _nonnegative(args[0]) and prove(args[0] < args[1]):
                return args[0]
            case "select" if args[0].op == "not":
                return select(args[0].args[0], args[2], args[1])
    if e.op in ("lt", "le", "eq", "ne") and args[0].dtype == INDEX:
        return _compare(e)
    if e.op == "not" and args[0].op in _NEGATED and args[0].args[0].dtype == INDEX:
        op, swap = _NEGATED[args[0].op]
        return simplify(binary(op, *(args[0].args[::-1] if swap else args[0].args)))
    return None


_NEGATED = {"lt": ("le", True), "le": ("lt", True), "eq": ("ne", False), "ne": ("eq", False)}


def from_linear(terms: Linear) -> Expr:
    """The expression of a linear form: terms in order, constant last, negative terms subtracted."""
    terms = _paired(_joined(terms))
    result: Expr | None = None
    for monomial, c in sorted(terms.items(), key=lambda item: (not item[0], item[1] < 0, tuple(map(order, item[0])))):
        product = reduce(mul, monomial or (const(1),))
        magnitude = product if abs(c) == 1 else product * abs(c)
        if result is None:
            result = magnitude if c > 0 else product * c
        else:
            result = result + magnitude if c > 0 else result - magnitude
    return const(0) if result is None else result


def _joined(terms: Linear) -> Linear:
    """x // c * c + x % c == x, the inverse of splitting an index; and n + -n % c, n rounded up to a multiple of c."""
    for monomial, coefficient in terms.items():
        if len(monomial) != 1 or monomial[0].op != "mod":
            continue
        x, c = monomial[0].args
        whole, part = linear(_floordiv(x, c) * c), linear(x)
        if whole and all(terms.get(m) == coefficient * k for m, k in whole.items()):
            rest = plus(plus(terms, whole, -coefficient), {monomial: -coefficient})
            return _joined(plus(rest, part, coefficient))
        if part and all(terms.get(m) == -coefficient * k for m, k in part.items()):
            rest = plus(plus(terms, part, coefficient), {monomial: -coefficient})
            return _joined(plus(rest, whole, -coefficient))
    return terms


def _paired(terms: Linear) -> Linear:
    """max(0, n - 2) + min(2, n) == n, what is cut off and the rest, and max(0, n) - max(2, n + 2) == -2: pairs whose operands differ by the
    same."""
    extremes = [(m, k) for m, k in terms.items() if len(m) == 1 and m[0].op in _FLIPPED and not _checks(m[0])]
    for (m, k), (n, c) in combinations(extremes, 2):
        same = m[0].op == n[0].op
        if c != (-k if same else k):
            continue
        (p, q), (r, s) = (map(linear, atom.args) for atom in (m[0], n[0]))
        for first, second in ((r, s), (s, r)):
            if plus(q, p, -1) == plus(second, first, -1):
                rest = plus(plus(terms, {m: -k}), {n: -c})
                return _paired(plus(plus(rest, p, k), first, -k) if same else plus(plus(rest, q, k), first, k))
    return terms


def _spread(terms: Linear) -> Expr | None:
    """n - max(0, n - 2) == min(n, 2): a sum goes into the operands of a minimum or maximum where it makes one of them a number."""
    for m, k in terms.items():
        if len(m) != 1 or m[0].op not in _FLIPPED or abs(k) != 1 or len(terms) == 1:
            continue
        options = [plus(plus(terms, {m: -k}), linear(a), k) for a in m[0].args]
        if any(not any(option) for option in options) and any(n for n in terms if n != m):
            return _min_max(binary(m[0].op if k > 0 else _FLIPPED[m[0].op], *map(from_linear, options)))
    return None


_FLIPPED = {"min": "max", "max": "min"}


def _split(x: Expr, c: Expr) -> tuple[Linear, Linear] | None:
    """x = c * quotient + rest, taking out every term that c divides. None unless c is a single positive term."""
    divisor = linear(c)
    if len(divisor) != 1 or not _positive(c):
        return None
    ((by, by_c),) = divisor.items()
    quotient, rest = Linear(), Linear()
    for m, k in linear(x).items():
        if k % by_c == 0 and (left := without(m, by)) is not None:
            quotient[left] = quotient.get(left, 0) + k // by_c
        elif not m and not by:
            quotient[()], rest[()] = quotient.get((), 0) + k // by_c, k % by_c
        else:
            rest[m] = k
    return {m: k for m, k in quotient.items() if k}, {m: k for m, k in rest.items() if k}


def quotient(e: Expr) -> tuple[Expr, int]:
    """(x, c) with e = x // c: a constant that is added to a quotient becomes part of x. (e, 1) if `e` is not a quotient."""
    terms = linear(e)
    shift = terms.pop((), 0)
    if len(terms) == 1:
        ((monomial, coefficient),) = terms.items()
        q = monomial[0]
        if len(monomial) == coefficient == 1 and q.op == "floordiv" and q.args[1].op == "const":
            return simplify(q.args[0] + q.args[1] * shift), int(q.args[1].attr)
    return e, 1


def _exact_quotient(x: Linear, c: Linear) -> Linear | None:
    """q with x == c * q, by long division of polynomials; None if there is none. Where c is 0, x // c means nothing anyway."""
    lead = max(c, key=degree)
    quotient, rest = Linear(), x
    for _ in range(MAX_DEGREE):
        if not rest:
            return quotient
        top = max(rest, key=degree)
        if rest[top] % c[lead] or (left := without(top, lead)) is None:
            return None
        quotient[left] = rest[top] // c[lead]
        rest = plus(rest, linear(simplify(from_linear(c) * from_linear({left: 1}))), -quotient[left])
    return None


def _floordiv(x: Expr, c: Expr) -> Expr:
    if c.op != "const" and (exact := _exact_quotient(linear(x), linear(c))) is not None:
        return from_linear(exact)
    if (split := _split(x, c)) is None:
        return binary("floordiv", x, c)
    quotient, remainder = split[0], from_linear(split[1])
    return from_linear(quotient if _within(remainder, c) else plus(quotient, linear(_small_floordiv(remainder, c))))


def _small_floordiv(x: Expr, c: Expr) -> Expr:
    """x // c with no term of x divisible by c."""
    if c.op != "const":
        return binary("floordiv", x, c)
    n = int(c.attr)
    lo, hi = bounds(x)
    if lo is not None and hi is not None and lo // n == hi // n:
        return const(lo // n)
    if x.op == "floordiv" and x.args[1].op == "const" and x.args[1].attr > 0:
        return _floordiv(x.args[0], const(int(x.args[1].attr) * n))  # (x // a) // b == x // (a * b)
    if x.op == "mod" and x.args[1].op == "const" and x.args[1].attr % n == 0:
        return _mod(_floordiv(x.args[0], c), const(int(x.args[1].attr) // n))  # x % (a*b) // b == x // b % a
    if (common := _common_factor(terms := linear(x), n)) > 1:  # (g*x + r) // (g*c) == (x + r // g) // c
        return _floordiv(from_linear({m: k // common for m, k in terms.items() if k // common}), const(n // common))
    if (digits := _digits(terms, n)) is not None:  # (g*x + r) // (g*c) == x // c where 0 <= r < g
        step, high, _ = digits
        return _floordiv(from_linear({m: k // step for m, k in high.items()}), const(n // step))
    if n > 0 and any(terms) and all(k < 0 for m, k in terms.items() if m):  # -x // c == -((x + c - 1) // c), as rounding up is written
        return from_linear(plus({}, linear(_floordiv(from_linear(plus({(): n - 1}, terms, -1)), c)), -1))
    return binary("floordiv", x, c)


def _common_factor(terms: Linear, n: int) -> int:
    """The largest number that divides n and all coefficients but the constant."""
    return gcd(n, *(k for m, k in terms.items() if m))


def _digits(terms: Linear, n: int) -> tuple[int, Linear, Linear] | None:
    """(g, the terms that g divides, the others), for a divisor g of n such that the others are within 0..g-1 together: what lanes of a
    vector add to a multiple of their number."""
    for step in sorted({gcd(n, k) for m, k in terms.items() if m} - {1, n}, reverse=True):
        low = {m: k for m, k in terms.items() if k % step}
        lo, hi = bounds(from_linear(low)) if 0 < len(low) < len(terms) else (None, None)
        if lo is not None and hi is not None and 0 <= lo and hi < step:
            return step, {m: k for m, k in terms.items() if m not in low}, low
    return None


def _mod(x: Expr, c: Expr) -> Expr:
    if c.op != "const" and _exact_quotient(linear(x), linear(c)) is not None:
        return const(0)
    if (split := _split(x, c)) is None:
        return binary("mod", x, c)
    rest = from_linear(split[1])
    if _within(rest, c):
        return rest
    if c.op == "const":
        n = int(c.attr)
        lo, hi = bounds(rest)
        if lo is not None and hi is not None and lo // n == hi // n:
            return from_linear(plus(linear(rest), {(): lo // n * n}, -1))
        if rest.op == "mod" and rest.args[1].op == "const" and rest.args[1].attr % n == 0:
            return _mod(rest.args[0], c)  # x % (a*b) % b == x % b
        # Terms such as (x % (a*n)) inside a sum: the inner remainder by a multiple of n is redundant under % n.
        terms = plain = linear(rest)
        for m, k in terms.items():
            if len(m) == 1 and m[0].op == "mod" and m[0].args[1].op == "const" and (k * m[0].args[1].attr) % n == 0:
                plain = plus(plus(plain, {m: k}, -1), linear(m[0].args[0]), k)
        if plain != terms:
            return _mod(from_linear(plain), c)
        common = _common_factor(terms, n)
        if common > 1 and terms.get((), 0) % common == 0:  # (g*x) % (g*c) == g * (x % c)
            return simplify(_mod(from_linear({m: k // common for m, k in terms.items()}), const(n // common)) * common)
        if n > 0 and (digits := _digits(terms, n)) is not None:  # (g*x + r) % (g*c) == g * (x % c) + r where 0 <= r < g
            step, high, low = digits
            whole = _mod(from_linear({m: k // step for m, k in high.items()}), const(n // step))
            return from_linear(plus(low, linear(whole), step))
    return binary("mod", rest, c)


def _nonnegative(e: Expr, least: int = 0) -> bool:
    return (lo := bounds(e)[0]) is not None and lo >= least


def _positive(e: Expr) -> bool:
    return _nonnegative(e, 1)


def _within(x: Expr, c: Expr) -> bool:
    lo, hi = bounds(x)
    if (lo is None or lo < 0) and not _at_least(linear(x), 0):
        return False
    return (c.op == "const" and hi is not None and hi < c.attr) or _at_least(plus(linear(c), linear(x), -1), 1)


def _at_least(terms: Linear, value: int, cases: int = _MAX_CASES) -> bool:
    """Whether the sum is provably >= value: by numeric ranges, then with atoms replaced by bounds of them, then in each of the cases of a
    minimum or maximum, of which a limited number is split."""
    return (
        _weakened_at_least(terms, value, False)
        or (any(a.op != "var" for m in terms for a in m) and _weakened_at_least(terms, value, True))
        or ((topped := _topped(terms)) is not terms and _weakened_at_least(topped, value, False))
        or (any(len(m) > 1 or (m and m[0].op == "floordiv") for m in terms) and (least := _least_sum(terms)) is not None and least >= value)
        or (cases > 0 and _at_least_in_cases(terms, value, cases - 1))
    )


def _at_least_in_cases(terms: Linear, value: int, cases: int) -> bool:
    """Whether the sum is >= value whichever operand the first minimum or maximum in it is: n - max(0, min(n, k)) >= 0 where n >= 0."""
    for m, k in terms.items():
        if len(m) == 1 and m[0].op in _FLIPPED:
            rest, enough = plus(terms, {m: -k}), any if (m[0].op == "min") == (k < 0) else all  # a smaller sum is enough
            return enough(_at_least(plus(rest, linear(a), k), value, cases) for a in m[0].args)
    return False


def _least_sum(terms: Linear) -> int | None:
    """A lower bound of a sum of products: with each atom written as the least that it can be plus a rest, no coefficient is negative, as of
    4 * h * w - h - w, which is at least 2 where h and w are at least 1."""
    total: Linear = {}
    for m, k in terms.items():
        parts: Linear = {(): k}
        for atom in m:
            if (least := _least(atom)) is None:
                return None
            parts = plus({(*rest, atom): c for rest, c in parts.items()}, parts, least)
        total = plus(total, parts)
    return total.get((), 0) if all(k > 0 for m, k in total.items() if m) else None


def _least(atom: Expr) -> int | None:
    """A lower bound of an atom."""
    lo = bounds(atom)[0]
    if atom.op != "floordiv" or atom.args[1].op != "const" or atom.args[1].attr <= 0:
        return lo
    least = _least_sum(linear(atom.args[0]))
    return lo if least is None else least // int(atom.args[1].attr) if lo is None else max(least // int(atom.args[1].attr), lo)


def _topped(terms: Linear) -> Linear:
    """A sum that is never larger: where x // c is subtracted and x has a symbolic extent n, its largest value (n - 1) // c is."""
    for m, k in terms.items():
        atom = m[0] if len(m) == 1 else None
        if k > 0 or atom is None or atom.op != "floordiv" or atom.args[1].op != "const" or atom.args[0].op != "var":
            continue
        if (last := _last(atom.args[0])) is not None and _positive(atom.args[1]):
            largest = linear(simplify(last // atom.args[1]))
            return _topped(plus(plus(terms, {m: k}, -1), largest, k))
    return terms


def _weakened_at_least(terms: Linear, value: int, variables_first: bool, steps: int = 5) -> bool:
    if (lo := _lower_bound(terms)) is not None and lo >= value:
        return True
    return steps > 0 and any(_weakened_at_least(t, value, variables_first, steps - 1) for t in _weaken(terms, variables_first))


def _lower_bound(terms: Linear) -> int | None:
    total = 0
    for m, k in terms.items():
        if (end := bounds(reduce(mul, m, const(1)))[k < 0]) is None:
            return None
        total += k * end
    return total


def _weaken(terms: Linear, variables_first: bool) -> list[Linear]:
    """Sums that are never larger, with one atom, or two, replaced by a bound; none when no rule applies.

    What is replaced first decides what can be proved. n // 4 * 4 - i * 4 > 0, where i < n // 4, needs the variable i replaced before
    n // 4; x // 4 * 4 - x >= -3 needs x // 4 replaced before x. So `_at_least` tries both orders.
    """
    if variables_first and (weaker := _without_atom(terms, [m for m in terms if all(a.op == "var" for a in m)])):
        return weaker
    without = _without_quotients(terms)
    return _without_atom(terms, list(terms)) if without is None else [without]


def _without_quotients(terms: Linear) -> Linear | None:
    """A sum that is never larger, with two quotients replaced."""
    for m, k in terms.items():
        for n, c in terms.items():
            if not (k > 0 > c and len(m) == len(n) == 1 and m[0].op == n[0].op == "floordiv"):
                continue
            (x, a), (y, b) = m[0].args, n[0].args
            ahead = plus(linear(y), linear(x), -1)
            if a is b and _positive(a) and _at_least(plus({}, ahead, -1), 0):  # x // a - y // a >= 0 where x >= y
                return plus(terms, {m: -1, n: 1}, min(k, -c))
            if a is b and a.op == "const" and a.attr > 0 and ahead.keys() == {()}:  # x // a - (x + r) // a >= -ceil(r / a)
                return plus(terms, {m: -1, n: 1, (): ahead[()] // -a.attr}, min(k, -c))
            if x is y and a.op == b.op == "const" and 0 < a.attr < b.attr and b.attr % a.attr == 0 and c % (by := b.attr // a.attr) == 0:
                return plus(terms, {n: -c, m: c // by})  # x // (a * by) * by <= x // a
    return None


def _without_atom(terms: Linear, monomials: Sequence[Monomial]) -> list[Linear]:
    """Sums that are never larger, with an atom of one of its monomials replaced by each of its bounds."""
    for m in monomials:
        for position, atom in enumerate(m):
            others = m[:position] + m[position + 1 :]
            if (found := _bounds_of_atom(atom, terms[m])) and all(map(_nonnegative, others)):
                rest = plus(terms, {m: terms[m]}, -1)
                return [plus(rest, linear(simplify(bound * from_linear({others: 1}))), scale) for scale, bound in found]
    return []


def _last(v: Expr) -> Expr | None:
    """The largest value of a loop variable with a symbolic extent. Of max(0, n) iterations there are n where there are any."""
    extent = v.attr.extent
    if extent is not None and extent.op == "max" and const(0) in extent.args:
        extent = next(a for a in extent.args if a is not const(0))
    return None if extent is None else extent - 1


def _bounds_of_atom(atom: Expr, k: int) -> list[tuple[int, Expr]]:
    """All (scale, bound) that are known with scale * bound <= k * atom."""
    if atom.op == "var" and (last := _last(atom)) is not None:
        return [(k, last if k < 0 else const(0))]
    if atom.op == "floordiv" and atom.args[1].op == "const" and atom.args[1].attr > 0 and k % atom.args[1].attr == 0:
        x, c = atom.args[0], int(atom.args[1].attr)
        return [(k // c, x if k < 0 else x - (c - 1))]  # x - c + 1 <= c * (x // c) <= x
    sides = [x for x in atom.args if x.op != "const"]  # constants are bounds of the atom already
    return [(k, x) for x in sides] if (atom.op == "min" and k < 0) or (atom.op == "max" and k > 0) else []


def _compare(e: Expr) -> Expr:
    a, b = e.args
    gap = plus(linear(b), linear(a), -1)  # b - a
    back = plus({}, gap, -1)
    if e.op in ("eq", "ne"):
        if not gap:
            return const(e.op == "eq", "bool")
        if _at_least(gap, 1) or _at_least(back, 1):
            return const(e.op == "ne", "bool")
        return _equation(e.op, gap)
    least = 1 if e.op == "lt" else 0
    if _at_least(gap, least):
        return const(True, "bool")
    if _at_least(back, 1 - least):
        return const(False, "bool")
    # Variables on the left, one constant on the right, divided by the common factor.
    common = max(1, _common_factor(gap, 0))
    slack = (gap.get((), 0) - least) // common  # 0 <= terms / common + slack
    left = {m: -k // common for m, k in gap.items() if m and k < 0}
    right = {m: k // common for m, k in gap.items() if m and k > 0}
    return binary("lt", from_linear(left), from_linear(plus(right, {(): slack + 1})))


def _equation(op: str, gap: Linear) -> Expr:
    """`gap == 0` (or !=) divided by the common factor, positive terms on the left, the first term among them."""
    terms, constant, common = {m: k for m, k in gap.items() if m}, gap.get((), 0), _common_factor(gap, 0)
    if constant % common:
        return const(op == "ne", "bool")
    if terms[min(terms, key=lambda m: tuple(map(order, m)))] < 0:
        common = -common
    left = from_linear({m: k // common for m, k in terms.items() if k // common > 0})
    right = {m: -k // common for m, k in terms.items() if k // common < 0}
    return binary(op, left, from_linear(plus(right, {(): constant // common}, -1)))


def _checks(a: Expr) -> bool:
    return a.op == "checked" or (a.op in _FLIPPED and any(x.op == "checked" for x in a.args))


def _min_max(e: Expr) -> Expr:
    """One flat chain in canonical order, without operands that another operand makes redundant. What is checked is not redundant: clamped
    to the only place there is, it reports other indices."""

    def precedes(a: Expr, b: Expr) -> bool:
        low, high = (a, b) if e.op == "min" else (b, a)
        return _at_least(plus(linear(high), linear(low), -1), 0)

    needed, stack = list[Expr](), list(e.args)
    while stack:
        a = stack.pop()
        if a.op == e.op:
            stack.extend(a.args)
        elif _checks(a) or not any(precedes(other, a) for other in needed):
            needed = [other for other in needed if _checks(other) or not precedes(a, other)] + [a]
    return reduce(partial(binary, e.op), sorted(needed, key=order))
