"""The inverse of an affine access: the iterations that touch an element, as a gather over the elements.

An access `A[2 * p + k]` in iterations (p, k, o) touches the element x where p = (x - k) / 2, for every k and o for which that is an
iteration. k and o are the *fibre*: with them the element determines the iteration. The access is cut into pieces (of a clamped or mirrored
index: in the middle, at each border), each with a fibre of its own, as small as dropping one variable after the other makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import islpy as isl

from tcomp.ir import expr as E
from tcomp.ir.expr import Dim, Expr, as_expr, bounds, loop_var
from tcomp.ir.loops import Block, For
from tcomp.ir.polyhedral import inverse_maps
from tcomp.ir.polyhedral.model import Formula, TooHard, limited
from tcomp.ir.polyhedral.scanning import point_of
from tcomp.ir.simplify import simplify

MAX_PIECES = 32  # of one access: each is a term of the gather
MAX_CASES = 4  # of a quotient that takes one value in each, or of selects among indices
MAX_REDUNDANCY = 16  # iterations that a gather looks at for one that there is: it runs in parallel, and is simpler than a scatter

Axes = Mapping[Expr, Dim]  # variables that run from 0, with their extents
Choice = tuple[tuple[Expr, ...], Sequence[Expr]]  # conditions, and indices where they hold


@dataclass(frozen=True, slots=True)
class Piece:
    """Iterations that touch one element: the values of all variables, for each value of the axes `fibre`, where `condition` holds."""

    fibre: tuple[Expr, ...]
    values: Mapping[Expr, Expr]
    condition: Expr


def inverse(axes: Axes, indices: Sequence[Expr], guards: Sequence[Expr], shape: Sequence[Dim], place: Sequence[Expr]) -> list[Piece] | None:
    """The iterations of `axes` that touch the element `place` (variables over `shape`) by an access at `indices` where `guards` hold; those
    of different pieces are distinct. None where the indices are not affine, or a gather would do much more than a loop over the iterations.

    Guards that are not affine are left out: the caller tests all of them.
    """
    pieces = list[Piece]()
    try:
        with limited():
            for conditions, chosen in _choices(indices):
                access = _Access(axes, chosen, conditions, guards, shape, place, len(pieces))
                if not access.exact or (found := access.pieces()) is None:
                    return _by_digits(axes, indices, shape, place)
                pieces += found
    except TooHard:
        return None
    return pieces if len(pieces) <= MAX_PIECES else None


def _by_digits(axes: Axes, indices: Sequence[Expr], shape: Sequence[Dim], place: Sequence[Expr]) -> list[Piece] | None:
    """The only piece of an access whose indices determine all axes in them, also by quotients of symbolic sizes, as in a reshape."""
    loops = [For(v, n, Block(())) for v, n in axes.items()]
    found = inverse_maps.inverse(indices, shape, loops)
    used = set(E.variables(*indices)) & set(axes)
    if not used <= found.values.keys():
        return None
    values, conditions = found.at(place)
    fibre = {v: loop_var(f"f0.{n}", axes[v]) for n, v in enumerate(v for v in axes if v not in used)}
    return [Piece(tuple(fibre.values()), {**fibre, **{v: values[v] for v in used}}, E.all_of(conditions))]


def _choices(indices: Sequence[Expr]) -> list[Choice]:
    """The indices without selects, for each choice that these make, as far as there are few."""
    done, todo = list[Choice](), list[Choice]([((), indices)])
    while todo and len(todo) + len(done) <= MAX_CASES:
        conditions, chosen = todo.pop()
        found = next((e for e in E.walk(*chosen) if e.op == "select"), None)
        if found is None:
            done.append((conditions, chosen))
            continue
        c, *sides = found.args
        for where, side in zip((c, E.unary("not", c)), sides, strict=True):
            todo.append(((*conditions, simplify(where)), [E.substitute(i, {found: side}) for i in chosen]))
    return [*done, *todo]


def _cut(axes: Axes, expressions: Sequence[Expr]) -> tuple[dict[Expr, Dim], dict[Expr, Expr]]:
    """Axes without quotients and remainders by constants, as far as they are cut in two for these: (new axes, values of the given ones)."""
    new, values = dict(axes), {v: v for v in axes}
    for number in range(8):
        exprs = [simplify(E.substitute(e, values)) for e in expressions]
        cuts = [x.args for x in E.walk(*exprs) if x.op in ("floordiv", "mod") and x.args[0] in new and x.args[1].op == "const"]
        cut = next(((v, int(c.attr)) for v, c in cuts if c.attr > 1 and not (isinstance(n := new[v], int) and n <= c.attr)), None)
        if cut is None:
            break
        v, size = cut
        extent = simplify((as_expr(new.pop(v)) + (size - 1)) // size)
        outer = loop_var(f"{v.name}.o{number}", int(extent.attr) if extent.op == "const" else extent)
        inner = loop_var(f"{v.name}.i{number}", size)
        new |= {outer: int(extent.attr) if extent.op == "const" else extent, inner: size}
        values = {w: E.substitute(e, {v: outer * size + inner}) for w, e in values.items()}
    return new, values


class _Access:
    def __init__(
        self, axes: Axes, indices: Sequence[Expr], conditions: Sequence[Expr], guards: Sequence[Expr], shape: Sequence[Dim],
        place: Sequence[Expr], number: int,
    ) -> None:  # fmt: skip
        """`conditions` belong to the indices; pieces are numbered from `number` on."""
        self.axes, self.place, self.shape, self.number = axes, place, shape, number
        self.new, self.values = _cut(axes, [*indices, *conditions, *guards])
        sizes = [as_expr(n) for n in (*axes.values(), *shape)]
        free = [v for v in E.with_extents(*sizes, *indices, *conditions, *guards) if v not in axes]
        self.parameters = {v: f"p{n}" for n, v in enumerate(free)}
        self.names = self.parameters | {v: f"i{n}" for n, v in enumerate(self.new)}
        self.elements = {v: f"a{n}" for n, v in enumerate(place)}
        formula = Formula(self.names)
        self.ranges(formula, self.new)
        for v, extent in axes.items():
            if v not in self.new:  # what it was cut into may go beyond its end
                formula.add(simplify(self.values[v] < as_expr(extent)))
        for c in conditions:
            formula.add(simplify(E.substitute(c, self.values)))
        self.indices = [simplify(E.substitute(i, self.values)) for i in indices]
        self.at = [formula.value(i) for i in self.indices]
        inside = [f"0 <= {x} < {formula.value(simplify(as_expr(n)))}" for x, n in zip(self.at, shape, strict=True)]
        formula.constraints += inside
        self.exact = formula.exact and not formula.unknowns
        self.formula = formula
        self.guards = [simplify(E.substitute(g, self.values)) for g in guards]

    def ranges(self, formula: Formula, axes: Axes) -> None:
        """The ranges of axes, and of the symbolic sizes."""
        for v, name in self.parameters.items():
            formula.between(name, v.attr.lo, v.attr.hi)
        for v, extent in axes.items():
            formula.constraints.append(f"0 <= {formula.names[v]} < {formula.value(simplify(as_expr(extent)))}")

    def domain(self, guarded: bool, cut: bool) -> list[isl.BasicSet]:
        """The iterations, in disjoint convex parts: those where all affine guards hold, if `guarded`; with `cut`, where quotients that take
        few values, as those of an index that wraps around, have one."""
        formula = Formula(self.names, self.formula)
        for part in [c for g in self.guards for c in E.conjuncts(g)] if guarded else []:
            trial = Formula(self.names, formula)
            trial.add(part)
            if trial.exact:
                formula = trial
        point = ", ".join(self.names[v] for v in self.new)
        whole = isl.Set(f"{self.prefix()}{{ [{point}] : {formula.text()} }}").coalesce()
        if cut:
            cases = [self.cases(*x.args) for x in E.walk(*self.indices) if x.op in ("floordiv", "mod") and x.args[1].op == "const"]
            parts = [whole]
            for case in cases:
                sets = [isl.Set(f"{self.prefix()}{{ [{point}] : {text} }}") for text in case]
                parts = [p for part in parts for s in sets if not (p := part.intersect(s)).is_empty()][: MAX_PIECES + 1]
            return [b for part in parts for b in part.make_disjoint().get_basic_sets()]
        return whole.make_disjoint().get_basic_sets() if whole.n_basic_set() > 1 else whole.get_basic_sets()

    def cases(self, a: Expr, b: Expr) -> list[str]:
        """Conditions, one for each value of a // b, if it takes few."""
        (low, high), c = bounds(a), int(b.attr)
        if low is None or high is None or c < 1 or high // c - low // c >= MAX_CASES:
            return ["true"]
        return [f"{q * c} <= {self.formula.value(a)} < {q * c + c}" for q in range(low // c, high // c + 1)]

    def prefix(self, *more: str) -> str:
        return f"[{', '.join([*self.parameters.values(), *more])}] -> "

    def pieces(self) -> list[Piece] | None:
        """See `inverse`."""
        for cut, guarded in ((False, True), (True, True), (False, False)):
            if (found := self.linear_parts(self.domain(guarded, cut))) is not None and (pieces := self.cheap(found)) is not None:
                return pieces
        return None

    def cheap(self, parts: Sequence[isl.BasicSet]) -> list[Piece] | None:
        """A piece for each part; None where the gather would do much more than a loop over the iterations."""
        pieces = [self.piece(isl.Set.from_basic_set(part), n) for n, part in enumerate(parts, self.number)]
        work = [prod(_count(v) for v in piece.fibre) for piece in pieces]
        iterations = prod(n if isinstance(n, int) else 1 for n in self.axes.values())
        constant = all(isinstance(n, int) for n in (*self.axes.values(), *self.shape))
        elements = prod(n for n in self.shape if isinstance(n, int))
        return None if constant and sum(work) * elements > MAX_REDUNDANCY * max(iterations, elements) else pieces

    def linear_parts(self, parts: Sequence[isl.BasicSet]) -> list[isl.BasicSet] | None:
        """The parts cut further, so that the indices are affine on each; None if there are too many."""
        found = list[isl.BasicSet]()
        for part in parts if len(parts) <= MAX_PIECES else ():
            access = self.map_of(isl.Set.from_basic_set(part), ()).coalesce()
            maps = access.make_disjoint().get_basic_maps() if access.n_basic_map() > 1 else access.get_basic_maps()
            found += [m.domain() for m in maps]
        return found if len(parts) <= MAX_PIECES and len(found) <= MAX_PIECES else None

    def map_of(self, domain: isl.Set, fibre: Sequence[Expr]) -> isl.Map:
        """From iterations to elements, and the values of the axes `fibre`."""
        point = ", ".join(self.names[v] for v in self.new)
        image = ", ".join([*self.at, *(self.names[v] for v in fibre)])
        return isl.Map(f"{self.prefix()}{{ [{point}] -> [{image}] }}").intersect_domain(domain)

    def piece(self, domain: isl.Set, number: int) -> Piece:
        """The iterations of a part of the domain that touch an element."""
        fibre = [*self.new] if not self.map_of(domain, ()).is_injective() else []
        for v in sorted(fibre, key=lambda v: -_count(v)):  # the longest axes are dropped first
            rest = [w for w in fibre if w is not v]
            if self.map_of(domain, rest).is_injective():
                fibre = rest
        runs, shifts = list[Expr](), dict[Expr, Expr]()
        for n, v in enumerate(fibre):
            low, high = self.span(domain, v)
            runs.append(loop_var(f"f{number}.{n}", self.new[v] if high is None else high - low + 1))
            shifts[v] = runs[-1] + (low if high is not None else 0)
        names = [f"f{n}" for n in range(len(fibre))]
        here = [*self.elements.values(), *names]
        point = [self.names[v] for v in self.new]
        conditions = [f"{a} = {x}" for a, x in zip(self.elements.values(), self.at, strict=True)]
        conditions += [f"{f} = {self.names[v]}" for f, v in zip(names, fibre, strict=True)]
        points = isl.Set(f"{self.prefix(*here)}{{ [{', '.join(point)}] : {' and '.join(conditions) or 'true'} }}").intersect(domain)
        known = Formula(self.parameters | self.elements)
        self.ranges(known, dict(zip(self.place, self.shape, strict=True)))
        for f, v in zip(names, fibre, strict=True):
            low, high = self.span(domain, v)
            last = f"{known.value(simplify(as_expr(self.new[v])))} - 1" if high is None else high
            known.constraints.append(f"{low} <= {f} <= {last}")
        context = isl.Set(f"{self.prefix(*here)}{{ : {known.text()} }}")
        values: dict[str, Expr] = {name: v for v, name in (*self.parameters.items(), *self.elements.items())}
        values |= {f: shifts[v] for f, v in zip(names, fibre, strict=True)}
        coordinates, condition = point_of(points, context, values)
        found = dict(zip(self.new, coordinates, strict=True))
        return Piece(tuple(runs), {v: simplify(E.substitute(e, found)) for v, e in self.values.items()}, condition)

    def span(self, domain: isl.Set, v: Expr) -> tuple[int, int | None]:
        """The lowest and highest value of an axis in a part of the domain; None where the highest depends on symbolic sizes."""
        d = list(self.new).index(v)
        low, high = domain.dim_min_val(d), domain.dim_max_val(d)
        if self.parameters or not (low.is_int() and high.is_int()):
            return 0, None
        return int(low.to_str()), int(high.to_str())


def _count(v: Expr) -> int:
    """How many values an axis takes; very many where that is symbolic."""
    last = bounds(v)[1]
    return 1 << 40 if last is None else last + 1
