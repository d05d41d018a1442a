"""Binding symbolic dims to the sizes of actual arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tcomp.errors import InputError
from tcomp.ir.expr import Dim, Expr, const, evaluate_int, substitute
from tcomp.ir.simplify import linear, simplify


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
    monomial, c = unknown[0]
    if len(unknown) > 1 or len(monomial) > 1 or monomial[0].op != "var":
        return False
    value, rest = divmod(size - offset, c)
    if rest:
        raise InputError(f"{where} is {size}", why=f"no integer {monomial[0].name} makes {extent} equal to it")
    _check_range(monomial[0], value, where)
    bound[monomial[0]] = value
    return True


def _check_range(v: Expr, value: int, where: str) -> None:
    lo, hi = v.attr.lo, v.attr.hi
    if (lo is not None and value < lo) or (hi is not None and value > hi):
        ends = f"{'' if lo is None else lo}..{'' if hi is None else hi}"
        raise InputError(f"the dim `{v.name}` is {value}", where=where, why=f"its range is {ends}")


def extent_of(axis: Expr, dims: Mapping[Expr, int]) -> int:
    """The number of values an axis takes, given the symbolic dims."""
    return evaluate_int(axis.attr.extent, dims) if axis.attr.extent is not None else int(axis.attr.hi) + 1
