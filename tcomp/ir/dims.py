"""Symbolic dims, from the sizes of actual arrays: as numbers (`bind_dims`), or as formulas of these sizes (`solved_dims`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tcomp.errors import InputError
from tcomp.ir.expr import Dim, Expr, as_expr, bounds, const, equal, evaluate_int, maximum, minimum, substitute, var, variables
from tcomp.ir.linear import Linear, linear
from tcomp.ir.simplify import as_dim, from_linear, prove, simplify


def bind_dims(shapes: Iterable[tuple[str, Sequence[Dim], Sequence[int]]], dims: Mapping[Expr, int] | None = None) -> dict[Expr, int]:
    """Values of the symbolic dims, given (name, declared shape, actual shape) of arrays; `dims` are known beforehand.

    An extent with a single unknown that is linear in it, such as 2 * n + 1, is solved; one with several unknowns waits until
    they are known, and is left unchecked if they never are. Raises `InputError` on a contradiction.
    """
    bound = dict(dims or {})
    for v, value in bound.items():
        _check_range(v, value, "the given dims")
    waiting: list[tuple[str, int, Expr, int]] = []
    for name, declared, actual in shapes:
        what = "" if len(declared) == len(actual) else f"`{name}` has {len(actual)} dimensions instead of {len(declared)}"
        for position, (extent, size) in enumerate(zip(declared, actual, strict=False)):
            if isinstance(extent, Expr):
                waiting.append((name, position, extent, int(size)))
            elif extent != size:
                what = what or f"dimension {position} of `{name}` is {size} instead of {extent}"
        if what:
            raise InputError(what, why=f"it is declared as ({', '.join(map(str, declared))})")
    before = -1
    while len(waiting) != before:
        before, waiting = len(waiting), [item for item in waiting if not _solve(*item, bound)]
    return bound


def _solve(name: str, position: int, extent: Expr, size: int, bound: dict[Expr, int]) -> bool:
    """Whether `extent == size` could be decided or solved for its one unknown, which is then added to `bound`."""
    where = f"dimension {position} of `{name}`"
    terms = linear(simplify(substitute(extent, {v: const(n) for v, n in bound.items()})))
    offset = terms.get((), 0)
    unknown = [(m, c) for m, c in terms.items() if m]
    if not unknown:
        if offset != size:
            raise InputError(f"{where} is {size} instead of {offset}", why=f"it is declared as {extent}")
        return True
    if (pair := _digits(terms)) is not None:
        t, c, least = pair
        bound[t] = (size - offset - least) // c
        return _solve(name, position, extent, size, bound)
    monomial, c = unknown[0]
    if len(unknown) > 1 or len(monomial) > 1 or monomial[0].op != "var":
        return False
    value, rest = divmod(size - offset, c)
    if rest:
        raise InputError(f"{where} is {size}", why=f"no integer {monomial[0].name} makes {extent} equal to it")
    _check_range(monomial[0], value, where)
    bound[monomial[0]] = value
    return True


def _digits(terms: Linear) -> tuple[Expr, int, int] | None:
    """(t, c, least) of a sum c * t + r + ... of two variables, where r >= least has at most c values: the sum tells both."""
    unknown = sorted(((c, m[0]) for m, c in terms.items() if len(m) == 1 and m[0].op == "var"), key=lambda term: term[0])
    if len(unknown) != 2 or len(terms) - (() in terms) != 2 or unknown[0][0] != 1:
        return None
    (_, r), (c, t) = unknown
    lo, hi = bounds(r)
    return (t, c, lo) if lo is not None and hi is not None and hi - lo < c else None


@dataclass
class SolvedDims:
    """Symbolic dims as formulas of the extents that arrays have.

    extents: the variable of each different extent; a dim that is an extent itself is its own variable
    values: what other dims are in terms of these
    checks: conditions on these, each with the extent that it is about
    """

    extents: dict[Expr, Expr] = field(default_factory=dict)
    values: dict[Expr, Expr] = field(default_factory=dict)
    checks: list[tuple[Expr, Expr]] = field(default_factory=list)

    def define(self, v: Expr, value: Expr, extent: Expr) -> None:
        """Set a dim; its range is checked where it does not follow from those of the extents."""
        self.values[v] = value = simplify(value)
        self.require(value >= v.attr.lo, extent)
        if v.attr.hi is not None:
            self.require(value <= v.attr.hi, extent)

    def require(self, condition: Expr, extent: Expr) -> None:
        """Add a check, unless it holds for sure."""
        if not prove(condition):
            self.checks.append((simplify(condition), extent))


def solved_dims(extents: Sequence[Dim]) -> SolvedDims:
    """See `SolvedDims`; dims that do not follow from the extents have no value."""
    result = SolvedDims()
    taken: set[str] = {v.name for d in extents if isinstance(d, Expr) for v in variables(d)}
    for d in extents:
        if isinstance(d, Expr) and d not in result.extents:
            name = f"size{len(result.extents)}" + "_" * len(taken)  # longer than all others with this beginning
            lo, hi = bounds(d)
            result.extents[d] = d if d.op == "var" else var(name, max(lo or 0, 0), hi)
    result.values.update((d, d) for d, raw in result.extents.items() if d is raw)
    waiting, before = [item for item in result.extents.items() if item[0] is not item[1]], -1
    while len(waiting) != before:
        before, waiting = len(waiting), [item for item in waiting if not _solved(*item, result)]
    return result


def _solved(extent: Expr, raw: Expr, result: SolvedDims) -> bool:
    """Whether all of `extent`, which is `raw`, is known, after it was solved for what is not."""
    e = simplify(substitute(extent, result.values))
    known = set(result.extents.values())
    terms = {m: c for m, c in linear(e).items() if not all(v in known for a in m for v in variables(a))}
    rest = raw - simplify(e - from_linear(terms))
    if not terms:
        result.require(equal(e, raw), extent)
        return True
    if (pair := _digits(terms)) is not None:
        t, c, least = pair
        (r,) = {v for m in terms for v in m} - {t}
        result.define(t, (rest - least) // c, extent)
        result.define(r, rest - result.values[t] * c, extent)
        return True
    ((monomial, c), *others) = terms.items()
    if others or len(monomial) > 1 or monomial[0].op != "var":
        return False
    result.define(monomial[0], rest // c, extent)
    return _solved(extent, raw, result)


def _check_range(v: Expr, value: int, where: str) -> None:
    lo, hi = v.attr.lo, v.attr.hi
    if (lo is not None and value < lo) or (hi is not None and value > hi):
        ends = f"{'' if lo is None else lo}..{'' if hi is None else hi}"
        raise InputError(f"the dim `{v.name}` is {value}", where=where, why=f"its range is {ends}")


def upper_bound(size: Dim, limits: Mapping[Expr, Dim]) -> Dim | None:
    """An upper bound of `size` in terms of the variables that are not in `limits`; each variable in `limits` ranges from its lowest value
    to its limit. None if there is no bound."""
    if not isinstance(size, Expr) or limits.keys().isdisjoint(variables(size)):
        return size
    total = const(0)
    for monomial, coefficient in linear(simplify(size)).items():
        term = const(coefficient)
        limited = [atom for atom in monomial if not limits.keys().isdisjoint(variables(atom))]
        for atom in monomial:
            low = bounds(atom)[0]
            if atom not in limited:
                term = term * (maximum(atom, 0) if limited and (low is None or low < 0) else atom)
                continue
            end = _largest(atom, limits) if coefficient > 0 else low
            if end is None or low is None or low < 0:
                return None
            term = term * end
        total = total + term
    return as_dim(total)


def _largest(atom: Expr, limits: Mapping[Expr, Dim]) -> Dim | None:
    ends = [upper_bound(a, limits) for a in atom.args]
    known = [as_expr(end) for end in ends if end is not None]
    if atom in limits:
        return limits[atom]
    if atom.op == "min" and known:
        return as_dim(minimum(*known) if len(known) > 1 else known[0])
    if atom.op == "max" and len(known) == 2:
        return as_dim(maximum(*known))
    if atom.op == "floordiv" and atom.args[1].op == "const" and atom.args[1].attr > 0 and ends[0] is not None:
        return as_dim(known[0] // atom.args[1])
    if atom.op == "select" and len(branches := [as_expr(end) for end in ends[1:] if end is not None]) == 2:
        return as_dim(maximum(*branches))
    return bounds(atom)[1]


def extent_of(axis: Expr, dims: Mapping[Expr, int]) -> int:
    """The number of values an axis takes, given the symbolic dims."""
    return evaluate_int(axis.attr.extent, dims) if axis.attr.extent is not None else int(axis.attr.hi) + 1
