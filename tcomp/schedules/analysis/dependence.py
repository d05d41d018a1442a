"""A quick dependence test: loops may run in any order if no iteration touches an element that another one writes.

The test is sufficient, not necessary. The indices of all accesses to a written buffer must determine the iteration they belong to,
all outer variables being fixed. Those of `i` do in

    [i, j]                                 whatever j is
    [8 * i + j], [8 * i + k + 2]           with j < 8, k < 6
    [i // 12, i // 3 % 4, i % 3]           the digits of i, as left by fusing loops
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from tcomp.ir import expr as E
from tcomp.ir.access import digit, indices_of
from tcomp.ir.expr import Expr, bounds
from tcomp.ir.linear import linear
from tcomp.ir.loops import Accumulate, Allocate, Buffer, For, Stmt, Store, expressions, places, walk
from tcomp.ir.polyhedral.inverse_maps import Digits
from tcomp.ir.simplify import from_linear

UNBOUNDED = 1 << 63  # stands for the range of an index without bounds: more than any coefficient


def conflict(body: Stmt, variables: Collection[Expr], may_reassociate: bool) -> Buffer | None:
    """A buffer that may keep iterations over `variables` around `body` from running in any order; None if there is none.

    Buffers allocated inside are of no concern. With `may_reassociate`, several iterations may accumulate into the same element.
    """
    wanted = set(variables)
    return next((buffer for buffer, known in _determined_by(body, variables, may_reassociate) if not wanted <= known), None)


def disorder(body: Stmt, before: Sequence[Expr], after: Sequence[Expr], may_reassociate: bool) -> Buffer | None:
    """A buffer that may forbid that loops over the variables `before`, directly nested around `body`, take the order `after`.

    Iterations that touch one element differ only in variables which its indices do not determine; as long as these keep their order
    among each other, so do the iterations.
    """
    found = _determined_by(body, before, may_reassociate)
    return next((buffer for buffer, known in found if [v for v in before if v not in known] != [v for v in after if v not in known]), None)


def _determined_by(body: Stmt, variables: Collection[Expr], may_reassociate: bool) -> Iterator[tuple[Buffer, set[Expr]]]:
    """The buffers whose accesses matter, each with the variables that its indices determine."""
    statements = list(walk(body))
    inner = {*variables, *(s.var for s in statements if isinstance(s, For))}
    local = {s.buffer for s in statements if isinstance(s, Allocate)}
    for buffer in dict.fromkeys(s.buffer for s in statements if isinstance(s, Store | Accumulate)):
        if buffer not in local and not (may_reassociate and _only_reduced(statements, buffer)):
            yield buffer, determined(indices_of(body, buffer), inner)


def _only_reduced(statements: Iterable[Stmt], buffer: Buffer) -> bool:
    """Every access is an accumulation, all with one reducer."""
    touching = [s for s in statements if any(b is buffer for b, _ in places(s))]
    reducers = {s.reducer for s in touching if isinstance(s, Accumulate) and s.buffer is buffer}
    read = any(r.attr is buffer for s in touching for r in E.reads(*expressions(s)))
    return len(reducers) == 1 and not read and all(isinstance(s, Accumulate) for s in touching)


def determined(places: Sequence[tuple[Expr, ...]], inner: Collection[Expr]) -> set[Expr]:
    """The variables among `inner` that are equal wherever two of the places are, all other variables being fixed."""
    digits = Digits()
    known = {v for v in inner if bounds(v) == (0, 0)}
    todo = [atom for index in zip(*places, strict=True) for atom in _common_terms(index, inner)]
    while todo:
        atom = todo.pop()
        if atom in inner:
            known.add(atom)
        elif atom.op in ("floordiv", "mod"):
            d = digit(atom)
            digits.add(d, atom)
            if digits.chain(d.whole) is not None:
                todo += _common_terms([d.whole], inner)
    return known


def _common_terms(indices: Sequence[Expr], inner: Collection[Expr]) -> list[Expr]:
    """The terms that must be equal where sums are equal: each weighs more than all smaller ones, and what is not common, together."""
    sums = [linear(i) for i in indices]
    common = {m: c for m, c in sums[0].items() if all(s.get(m) == c for s in sums)}
    rest = [from_linear({m: c for m, c in s.items() if m not in common}) for s in sums]
    lows, highs = zip(*(bounds(e) for e in rest), strict=True)
    if None in lows or None in highs:
        return []
    reach = max(highs) - min(lows)
    varying = [(abs(c), m) for m, c in common.items() if not set(inner).isdisjoint(E.variables(*m))]
    if len(varying) == 1 and reach == 0:
        atoms = [a for a in varying[0][1] if not set(inner).isdisjoint(E.variables(a))]
        positive = all((bounds(a)[0] or 0) > 0 for a in varying[0][1] if a not in atoms)
        return atoms if len(atoms) == 1 and positive else []
    found: list[Expr] = []
    for weight, monomial in sorted(varying, key=lambda term: term[0]):
        if len(monomial) != 1:
            return []
        found = [*found, monomial[0]] if weight > reach else []  # a term too light makes all so far ambiguous
        lo, hi = bounds(monomial[0])
        reach = UNBOUNDED if lo is None or hi is None else reach + weight * (hi - lo)
    return found
