"""Index expressions as sums of `coefficient * monomial`, a monomial being a product of atoms: the form that `simplify` works on."""

from __future__ import annotations

from hashlib import sha256
from math import gcd

from tcomp.ir.expr import Dim, Expr, as_expr, walk

Monomial = tuple[Expr, ...]  # sorted atoms; () is the constant term
Linear = dict[Monomial, int]  # monomial -> coefficient, no zero coefficients

_MAX_TERMS, MAX_DEGREE = 4096, 64  # of a product that is multiplied out: squares of squares grow without bound; beyond, it is an atom
_LONGEST_KEY = 2000  # characters; a digest stands for the rest

_keys: dict[Expr, str] = {}  # see `forget`
_opaque: set[Expr] = set()  # products that are not multiplied out


def linear(e: Expr) -> Linear:
    """Sum-of-monomials form of an index expression whose operands are already canonical."""
    match e.op:
        case "const":
            return {(): int(e.attr)} if e.attr else {}
        case "add" | "sub":
            return _sum(e)
        case "neg":
            return plus({}, linear(e.args[0]), -1)
        case "mul" if e not in _opaque:
            left, right = linear(e.args[0]), linear(e.args[1])
            if len(left) * len(right) > _MAX_TERMS or sum(max(map(len, side), default=0) for side in (left, right)) > MAX_DEGREE:
                _opaque.add(e)  # not entered again: what squares share would be walked once for each way to it
                return {(e,): 1}
            product: Linear = {}
            for m, c in left.items():
                for n, d in right.items():
                    key = tuple(sorted(m + n, key=order)) if m and n else m or n
                    product[key] = product.get(key, 0) + c * d
            return {m: c for m, c in product.items() if c}
    return {(e,): 1}


def _sum(e: Expr) -> Linear:
    """The linear form of a sum, a chain as long as it has terms: without recursion along it, and in one pass."""
    total: Linear = {}
    stack = [(e, 1)]
    while stack:
        part, sign = stack.pop()
        if part.op in ("add", "sub"):
            stack += [(part.args[1], sign if part.op == "add" else -sign), (part.args[0], sign)]
        else:
            for m, c in linear(part).items():
                total[m] = total.get(m, 0) + sign * c
    return {m: c for m, c in total.items() if c}


def known_factor(extent: Dim) -> int:
    """The largest number that an extent is certainly a multiple of, as far as its terms tell; 0 for the extent 0."""
    return gcd(*linear(as_expr(extent)).values())


def plus(a: Linear, b: Linear, factor: int = 1) -> Linear:
    """a + factor * b."""
    total = a | {m: a.get(m, 0) + factor * c for m, c in b.items()}
    return {m: c for m, c in total.items() if c}


def order(atom: Expr) -> str:
    """A sort key that depends on structure and names only, so that printed programs are the same in every process."""
    if atom.op == "var":
        return str(atom.attr.name)
    for e in walk(atom, operands=lambda e: () if e in _keys else e.args):
        if e not in _keys:
            label = e.attr.name if e.op == "read" else repr(e.attr) if e.op == "const" else ""
            operands = (a.attr.name if a.op == "var" else _keys[a] for a in e.args)
            key = f"~{e.op}:{e.dtype}:{label}({','.join(operands)})"
            # Written out, what has shared operands may be exponentially long.
            _keys[e] = key if len(key) <= _LONGEST_KEY else key[:_LONGEST_KEY] + sha256(key.encode()).hexdigest()
    return _keys[atom]


def degree(m: Monomial) -> tuple[int, tuple[str, ...]]:
    """An order of monomials that products keep: by degree, then by names."""
    return len(m), tuple(map(order, m))


def without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    """The quotient of a product by these factors; None if they are not all in it."""
    left = list(monomial)
    for atom in factors:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def forget() -> None:
    """Drop what is kept of expressions."""
    _keys.clear()
    _opaque.clear()
