"""Whether every access of a program is in range: proved, refused with a witness, made a condition on sizes, or guarded.

The simplifier's ranges settle most accesses; isl decides the rest, given the loops and conditions around them. An access that leaves its
array in some iteration, whatever the sizes, is refused. One that does so for some sizes makes a `Requirement`, checked once in a call. What
depends on data, or is not affine, is over-approximated: proved all the same where conditions tell enough (`while j >= 0 and A[j] > x`);
else its index is guarded, and is checked when the program runs. Where that is needed for some sizes only, which nothing but data decides on
(`if A[0] > x: C[i] = ...`), `quick_kernel` makes another kernel for the sizes that do without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, NoReturn, TypeAlias

import islpy as isl

from tcomp.errors import InputError, IRError, OutOfRangeError
from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.access import clamped_check
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, const
from tcomp.ir.polyhedral.model import Formula, TooHard, limited
from tcomp.ir.polyhedral.scanning import condition_of
from tcomp.ir.simplify import as_dim, prove, simplify

MAX_SCOPES = 8  # of one expression that is used in several places; beyond, only the conditions that all of them share are known
FEW = 8  # iterations: code of its own pays for no size below, and loops without iterations are always in range
SMALL = 1 << 20  # the sizes of a witness are at most so large, if the access is out of range for such sizes

Values: TypeAlias = Mapping[Expr, int]  # of sizes and loop variables


@dataclass(frozen=True, eq=False, slots=True)
class Requirement:
    """A condition on sizes. `explain` raises the error for sizes that violate it."""

    condition: Expr
    explain: Callable[[Values], NoReturn]

    def check(self, sizes: Values) -> None:
        """Raises `OutOfRangeError` if an access would be out of range, `InputError` if an assumption does not hold."""
        if not prove(E.substitute(self.condition, {v: const(n) for v, n in sizes.items()})):
            self.explain(sizes)


@lru_cache(maxsize=16)  # a program is proved when it is made, and again when it is built
def safe_kernel(kernel: L.Kernel) -> tuple[L.Kernel, tuple[Requirement, ...]]:
    """The kernel with guards around the indices that are not proved to be in range (itself where there are none), and what its sizes must
    satisfy. Raises `IRError`, with an iteration as witness, for an access that is out of range whatever the sizes."""
    prover = _Prover(f"kernel `{kernel.name}`", kernel.assumptions)
    body = prover.statement(kernel.body, _Scope())
    return kernel if body is kernel.body else kernel.with_body(body), prover.required()


@lru_cache(maxsize=16)
def quick_kernel(kernel: L.Kernel) -> tuple[L.Kernel, Expr] | None:
    """One with fewer guards than a kernel that `safe_kernel` made has, and a condition on sizes for which it is as safe; None if there is
    none."""

    def bare(e: Expr) -> Expr | None:
        return None if (check := clamped_check(e)) is None else check.args[0]

    if all(e.op != "checked" for s in L.walk(kernel.body) for e in E.walk(*L.expressions(s))):
        return None
    prover = _Prover(f"kernel `{kernel.name}`", kernel.assumptions, conditional=True)
    body = prover.statement(L.map_expressions(kernel.body, lambda e: E.rewrite(e, bare)), _Scope())
    condition = simplify(reduce(lambda a, b: a & b, prover.conditions, const(True, "bool")))
    some = E.substitute(condition, {v: E.dim(v.name, max(v.attr.lo or 0, FEW)) for v in kernel.scalars})
    return None if not prover.conditions or prove(E.unary("not", simplify(some))) else (kernel.with_body(body), condition)


def safe_tensors(outputs: Sequence[te.Tensor], assumptions: Sequence[Expr] = ()) -> tuple[list[te.Tensor], tuple[Requirement, ...]]:
    """`safe_kernel` for tensor expressions: the same tensors, except those that need guards and those that depend on them."""
    prover = _Prover("", assumptions)
    new: dict[te.Tensor, te.Tensor] = {}
    programs: dict[te.Extern, te.Extern] = {}
    for t in te.tensors(outputs):
        prover.where = f"tensor `{t.name}`"
        if t.extern is not None:
            program = t.extern
            if program not in programs:
                inputs, body = tuple(new[u] for u in program.inputs), prover.statement(program.body, _Scope())
                same = inputs == program.inputs and body is program.body
                programs[program] = program if same else te.Extern(inputs, program.parameters, program.results, body)
            other = programs[program]
            new[t] = t if other is program else te.Tensor(t.name, t.shape, t.dtype, extern=other, index=t.index)
        else:
            loops = tuple(zip(t.axes, t.shape, strict=True)) if t.body is not None else ()
            replaced = prover.expressions([t.body] if t.body is not None else [], _Scope(loops), new)
            new[t] = t if t.body is None or not replaced else te.Tensor(t.name, t.shape, t.dtype, t.axes, replaced[t.body])
    return [new[t] for t in outputs], prover.required()


def assumed(condition: Expr, where: str) -> Requirement:
    """The requirement that an assumption of a program about its sizes holds."""

    def explain(sizes: Values) -> NoReturn:
        raise InputError(f"`{condition}` does not hold for {_shown(sizes)}", where=where, why="the program assumes it")

    return Requirement(condition, explain)


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where an expression is evaluated: in these loops (one without a known extent has None), where the conditions hold. Not `certain`: not
    everywhere there. `facts` are what is known of variables of the program, elements (x, op, value): x eq, le or ge value."""

    loops: tuple[tuple[Expr, Dim | None], ...] = ()
    conditions: tuple[Expr, ...] = ()
    certain: bool = True
    facts: tuple[tuple[Expr, str, Expr], ...] = ()

    def where(self, condition: Expr) -> _Scope:
        parts = [c for c in _parts(condition) if not (c.op == "const" and c.attr)]
        return replace(self, conditions=(*self.conditions, *parts)) if parts else self

    def after(self, stmt: L.Stmt) -> _Scope:
        """The scope after a statement that may have been executed: facts about elements that it writes are dropped."""
        known = (*self.conditions, *(as_expr(n) for _, n in self.loops if n is not None), *(e for x, _, y in self.facts for e in (x, y)))
        writes = [s for s in L.walk(stmt) if isinstance(s, L.Store | L.Accumulate)] if any(map(E.reads, known)) else []
        written = {s.buffer for s in writes}
        if written.isdisjoint(r.attr for e in known for r in E.reads(e)):
            return self

        def stays(e: Dim | None) -> bool:
            return e is None or written.isdisjoint(r.attr for r in E.reads(as_expr(e)))

        loops, conditions = tuple((v, n if stays(n) else None) for v, n in self.loops), tuple(filter(stays, self.conditions))
        facts = list[tuple[Expr, str, Expr]]()
        for x, op, value in self.facts:
            steps = [s for s in writes if s.buffer is x.attr]
            if stays(value) and (op := _still(op, steps)):
                facts.append((x, op, value))
        same = loops == self.loops and conditions == self.conditions
        return _Scope(loops, conditions, self.certain and same, tuple(facts))

    def stored(self, stmt: L.Stmt) -> _Scope:
        """The scope behind a statement: a store to an integer variable makes its value known."""
        after = self.after(stmt)
        match stmt:
            case L.Store(b, (), value) if b.dtype == INDEX and all(r.attr is not b for r in E.reads(value)):
                return replace(after, facts=(*after.facts, (E.read(b, ()), "eq", simplify(value))))
        return after


def _still(op: str, writes: Sequence[L.Store | L.Accumulate]) -> str:
    """The comparison with a variable that still holds after some of these writes: it stays below its old value if it only decreases."""
    for s in writes:
        down, up = (isinstance(s, L.Accumulate) and s.reducer.op == "add" and prove(c) for c in (s.value <= 0, s.value >= 0))
        op = "le" if down and op in ("eq", "le") else "ge" if up and op in ("eq", "ge") else ""
    return op


class _Points(Formula):
    """The iterations of a scope. Its unknowns, such as elements of arrays, are dimensions like others."""

    compares_unknowns = True

    def unknown(self, e: Expr) -> str:
        """A remainder is less than its divisor, known or not, and no more than what is divided."""
        new, name = e not in self.unknowns, super().unknown(e)
        if new and e.op == "mod" and prove(e.args[1] > 0):
            self.constraints.append(f"0 <= {name} < {self.value(e.args[1])}")
            self.constraints += [f"{name} <= {self.value(e.args[0])}"] * prove(0 <= e.args[0])
        return name


class _Prover:
    """Puts guards where they are needed. `conditional`: not where an access is in range for some sizes, which makes one of `conditions`."""

    def __init__(self, where: str, assumptions: Sequence[Expr], conditional: bool = False) -> None:
        self.where, self.assumptions, self.conditional = where, assumptions, conditional
        self.requirements: dict[Expr, Requirement] = {}
        self.conditions: dict[Expr, None] = {}
        self.judged: dict[tuple[Expr, _Scope], frozenset[int]] = {}

    def required(self) -> tuple[Requirement, ...]:
        return (*(assumed(c, self.where) for c in self.assumptions), *self.requirements.values())

    # ------------------------------------------------------------ what is evaluated, and where

    def statement(self, s: L.Stmt, scope: _Scope) -> L.Stmt:
        """The statement with the guards that it needs."""
        match s:
            case L.Prefetch():  # the element need not exist
                return s
            case L.While(cond):
                inside = replace(scope.after(s.body), certain=False)
                replaced, scopes = self.expressions([cond], inside), [inside.where(simplify(cond))]
            case L.For(v, extent, body):
                replaced = self.expressions([as_expr(extent)], scope)
                scopes = [replace(scope, loops=(*scope.loops, (v, extent))).after(body)]
            case L.Store(b, indices, value) | L.Accumulate(b, indices, value, _):
                replaced, scopes = self.expressions([*indices, value, E.read(b, indices)], scope), []
            case _:
                replaced = self.expressions(L.expressions(s), scope)
                scopes = [scope.where(simplify(condition)) for _, condition in L.guarded_children(s)]
        new = list[L.Stmt]()
        for child, inner in zip(L.children(s), scopes, strict=True):
            new.append(self.statement(child, inner))
            if isinstance(s, L.Block):
                scopes[len(new) :] = [inner.stored(child)] * (len(scopes) - len(new))
        changed = s if all(a is b for a, b in zip(new, L.children(s), strict=True)) else L.with_children(s, new)
        return _redirected(changed, replaced) if replaced else changed

    def expressions(self, roots: Sequence[Expr], scope: _Scope, tensors: Mapping[Any, Any] | None = None) -> dict[Expr, Expr]:
        """The replacements of expressions that need guards, or that read `tensors` that were replaced."""
        order, scopes = [*E.walk(*roots)], dict[Expr, dict[_Scope, None]]()
        for root in roots:
            scopes[root] = {scope: None}
        for e in reversed(order):
            for operand, inner in (pair for s in scopes[e] for pair in _operands(e, s)):
                known = scopes.setdefault(operand, {})
                known[inner] = None
                if len(known) > MAX_SCOPES:
                    scopes[operand] = {_common(known): None}
        replaced: dict[Expr, Expr] = {}
        for e in order:
            args = tuple(replaced.get(a, a) for a in e.args)
            source = e.attr
            if e.op == "read":
                doubtful = frozenset[int]().union(*(self.doubtful(e, s) for s in scopes[e]))
                args = tuple(_guarded(a, n) if d in doubtful else a for d, (a, n) in enumerate(zip(args, source.shape, strict=True)))
                source = (tensors or {}).get(source, source)
            if args != e.args or source is not e.attr:
                replaced[e] = E.read(source, args) if e.op == "read" else E.with_args(e, args)
        return replaced

    # ------------------------------------------------------------ whether it is in range

    def doubtful(self, read: Expr, scope: _Scope) -> frozenset[int]:
        """The dimensions in which an access is not proved to be in range."""
        if (read, scope) not in self.judged:
            sides = enumerate(zip(map(simplify, read.args), map(simplify, read.attr.shape), strict=True))
            open_ = [(d, i, n) for d, (i, n) in sides if not (prove(0 <= i) and prove(i < n))]
            doubtful = frozenset(d for d, i, n in open_ if not self.decided(read, d, i, n, scope))
            for n in (read.attr.shape[d] for d in doubtful):
                self.require_element(read.attr.name, as_expr(n))
            self.judged[read, scope] = doubtful
        return self.judged[read, scope]

    def require_element(self, name: str, extent: Expr) -> None:
        """Of an array without elements no index is in range, so that guards have none to fall back on."""
        where = self.where

        def explain(sizes: Values) -> NoReturn:
            raise OutOfRangeError(f"`{name}` is empty for {_shown(sizes)}", where=where, why="its indices depend on data")

        if not prove(condition := simplify(1 <= extent)):
            self.requirements.setdefault(condition, Requirement(condition, explain))

    def decided(self, read: Expr, d: int, index: Expr, extent: Expr, scope: _Scope) -> bool:
        """Whether one index is in range in all iterations, for the sizes that satisfy the requirements."""
        loops = [v for v, _ in scope.loops]
        given = [*scope.conditions, *self.assumptions, *(as_expr(n) for _, n in scope.loops if n is not None)]
        given += [value for _, _, value in scope.facts]
        if any(e.op == "checked" and e.args[1] is extent for e in E.walk(index)):  # guarded before
            self.require_element(read.attr.name, extent)
            return True
        sizes = [v for v in E.with_extents(index, extent, *given) if v not in loops and v.dtype == INDEX]
        names = {v: f"i{n}" for n, v in enumerate(loops)} | {v: f"p{n}" for n, v in enumerate(sizes)}
        prefix = f"[{', '.join(names[v] for v in sizes)}] -> "
        known = _Points(names)
        for v in sizes:
            known.between(names[v], v.attr.lo, v.attr.hi)
            if v.attr.extent is not None:
                known.add(v < v.attr.extent)
        for condition in self.assumptions:
            known.add(simplify(condition))
        context, points = f"{prefix}{{ : {known.text()} }}", _Points(names, known)
        for v, n in scope.loops:
            points.constraints.append(f"0 <= {names[v]}" + ("" if n is None else f" < {points.value(simplify(n))}"))
        for condition in scope.conditions:
            points.add(condition)
        place, limit = points.value(index), points.value(extent)
        exact, point = scope.certain and points.exact, f"[{', '.join(names[v] for v in loops)}]"
        for x, op, value in () if exact else scope.facts:
            points.add(E.binary("eq", x, value) if op == "eq" else x <= value if op == "le" else value <= x)
        try:
            with limited():
                bad = isl.Set(f"{prefix}{{ {point} : {points.text(f'({place} < 0 or {place} >= {limit})')} }}")
                if bad.is_empty():
                    return True
                everywhere = isl.Set(context)
                fits = everywhere.subtract(bad.params()).coalesce()
                if not exact and (fits.is_empty() or not self.conditional):
                    return False
                executed = isl.Set(f"{prefix}{{ {point} : {points.text()} }}").params()
                why = _Outside(self.where, read, d, bad, [*sizes, *loops])
                if exact and executed.is_subset(bad.params()):
                    raise why.error(IRError, {})
                condition = simplify(condition_of(fits.gist(everywhere), {names[v]: v for v in sizes}))
        except TooHard:
            return False
        if exact:
            self.requirements.setdefault(condition, Requirement(condition, why.explain))
        else:
            self.conditions[condition] = None
        return True


@dataclass(frozen=True, eq=False, slots=True)
class _Outside:
    """An access that is out of range: in dimension `axis`, at the points `bad` of the `variables`, which are sizes and then loops."""

    where: str
    read: Expr
    axis: int
    bad: isl.Set
    variables: list[Expr]

    def error(self, kind: type[IRError | OutOfRangeError], sizes: Values) -> IRError | OutOfRangeError:
        values = self.point(sizes)
        both = self.read.args[self.axis], as_expr(self.read.attr.shape[self.axis])
        known = dict.fromkeys(E.variables(*both), 0) | dict(sizes) | values  # what the model does not mention makes no difference
        index, extent = (E.evaluate_int(x, known) for x in both)
        name, what = self.read.attr.name, f"index {self.axis}" if len(self.read.args) > 1 else "the index"
        at = f" at {_shown(values)}" if values else ""
        why = f"{at[1:] and f'{at[1:]}, '}{what} is {index}, the extent is {extent}"
        hint = (
            f"Python counts from the end; write {self.read.attr.shape[self.axis]} - {-index}"
            if -extent <= index < 0
            else "shorten the loop, or enlarge the array"
        )
        return kind(f"`{self.read}` is outside of `{name}`{at}", where=self.where, why=why, hint=hint)

    def explain(self, sizes: Values) -> NoReturn:
        raise self.error(OutOfRangeError, sizes)

    def point(self, sizes: Values) -> dict[Expr, int]:
        """The first point, for given or for the smallest sizes."""
        count = self.bad.dim(isl.dim_type.param)
        bad = self.bad.move_dims(isl.dim_type.set, 0, isl.dim_type.param, 0, count)
        for n, v in enumerate(self.variables[:count]):
            if v in sizes:
                bad = bad.fix_val(isl.dim_type.set, n, isl.Val(sizes[v]))
        small = bad
        for n in range(count):
            small = small.lower_bound_val(isl.dim_type.set, n, isl.Val(0)).upper_bound_val(isl.dim_type.set, n, isl.Val(SMALL))
        point = bad.sample_point() if small.is_empty() else small.lexmin().sample_point()
        return {v: point.get_coordinate_val(isl.dim_type.set, n).to_python() for n, v in enumerate(self.variables)}


def _operands(e: Expr, scope: _Scope) -> Iterator[tuple[Expr, _Scope]]:
    """The operands of an expression, each with where it is evaluated."""
    match e.op:
        case "select":
            condition = simplify(e.args[0])
            sides = scope, scope.where(condition), scope.where(simplify(E.unary("not", condition)))
            yield from zip(e.args, sides, strict=True)
        case "reduce":
            axes = ((v, v.attr.hi + 1 if v.attr.extent is None else v.attr.extent) for v in e.attr[1])
            yield e.args[0], replace(scope, loops=(*scope.loops, *axes))
        case _:
            yield from ((a, scope) for a in e.args)


def _parts(condition: Expr) -> list[Expr]:
    """The conditions that hold where this one does; `a and b` of a program is a select, where `b` reads."""
    negated = condition.op == "not"
    inner = condition.args[0] if negated else condition
    if inner.op == ("or" if negated else "and"):
        sides = inner.args
    elif inner.op == "select" and inner.args[1 if negated else 2] is const(negated, "bool"):
        sides = inner.args[0], inner.args[2 if negated else 1]
    else:
        return [condition]
    return [part for side in sides for part in _parts(simplify(E.unary("not", side) if negated else side))]


def _common(scopes: Collection[_Scope]) -> _Scope:
    conditions = reduce(lambda a, b: tuple(c for c in a if c in b), [s.conditions for s in scopes])
    return _Scope(tuple(dict.fromkeys(x for s in scopes for x in s.loops)), conditions, False, next(iter(scopes)).facts)


def _guarded(index: Expr, extent: Dim) -> Expr:
    """The index, checked when the program runs; what is accessed where it is out of range is some other element. Simplified, as indices are
    before code is made of them: what is the same in all iterations of a loop is found again where it was checked before the loop."""
    return simplify(E.maximum(E.minimum(E.checked(index, extent), as_expr(extent) - 1), 0))


def _redirected(s: L.Stmt, replaced: Mapping[Expr, Expr]) -> L.Stmt:
    """The statement itself, without those inside it, with replaced expressions."""

    def new(e: Expr) -> Expr:
        return replaced.get(e, e)

    match s:
        case L.For(extent=extent):
            return replace(s, extent=as_dim(new(as_expr(extent))))
        case L.If(cond=cond) | L.While(cond=cond):
            return replace(s, cond=new(cond))
        case L.Store(b, indices, value) | L.Accumulate(b, indices, value, _):
            return replace(s, indices=new(E.read(b, indices)).args, value=new(value))
    return s


def _shown(values: Values) -> str:
    return ", ".join(f"{v.name} = {n}" for v, n in values.items())
