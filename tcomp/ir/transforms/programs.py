"""Derivatives of imperative programs: in forward mode next to the program, in reverse mode by running its loops backwards.

In reverse a program is run once, and then undone statement by statement (A. Griewank, A. Walther, Evaluating Derivatives, 2008, ch. 4 and
12): a store passes the adjoint of its element on to what its value was computed from, after the element has got back what it held before,
from a *tape* with a place for every iteration. Only what the adjoint asks for is run again and put on tape: nothing for a prefix sum, nor
for additions at places from data. A temporary that lives inside of a loop is computed again in each iteration, or kept for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tcomp.errors import IRError
from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_expr, bounds, cast, const, loop_var
from tcomp.ir.loops import Accumulate, Allocate, Block, Buffer, For, If, Stmt, Store, While
from tcomp.ir.simplify import as_dim, simplify
from tcomp.ir.te import Extern, Tensor
from tcomp.ir.transforms import scalar
from tcomp.ir.transforms.stages import accumulator, wide

Values = Mapping[Expr, Expr]  # of loop variables, in the new loops
Loops = tuple[tuple[Expr, Dim], ...]  # variables and extents, outermost first


def reversed_program(program: Extern, wanted: Sequence[int], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    """The adjoints of the inputs numbered `wanted`, given those of all results (None: zero).

    Raises `IRError` for a `while` that computes floats, and where a place or a condition depends on what is overwritten and not kept.
    """
    adjoints = {program.parameters[n]: _adjoint(program.parameters[n]) for n in wanted}
    reversal = _Reversal(program, adjoints)
    seeds = {n: Buffer(f"seed{n}", c.dtype, c.shape) for n, c in enumerate(cotangents) if c is not None}
    own = {n: reversal.adjoints[b] for n, b in enumerate(program.results) if b in reversal.adjoints}
    start = [*map(_cleared, adjoints.values()), *(_copied(b, seeds[n]) if n in seeds else _cleared(b) for n, b in own.items())]
    body = L.allocated(own.values(), L.block(*start, reversal.scope(program.body, {}, program.results)))

    used = {b for s in L.walk(body) for b, _ in L.places(s)}
    given = [*zip(program.inputs, program.parameters, strict=True), *((cotangents[n], b) for n, b in seeds.items())]
    inputs = [(t, b) for t, b in given if t is not None and b in used]

    def written(parameters: Sequence[Buffer], results: Sequence[Buffer]) -> Stmt:
        new = dict(zip((*(b for _, b in inputs), *adjoints.values()), (*parameters, *results), strict=True))
        return L.redirect(body, lambda b, indices: (new[b], indices) if b in new else None)

    found = te.externs([(b.shape, b.dtype) for b in adjoints.values()], [t for t, _ in inputs], written, "adjoint")
    return [_rounded(t, program.parameters[n].dtype) for t, n in zip(found, wanted, strict=True)]


def _adjoint(b: Buffer) -> Buffer:
    return Buffer(f"{b.name}.adjoint", accumulator(b.dtype), b.shape, b.scope)


def _rounded(t: Tensor, dtype: str) -> Tensor:
    return t if t.dtype == dtype else te.compute(t.shape, lambda *i: cast(t[i], dtype), t.name)


def _cleared(b: Buffer) -> Stmt:
    return L.over(b.shape, lambda i: L.store(b, i, 0), "z{}".format)


def _copied(b: Buffer, source: Buffer) -> Stmt:
    return L.over(b.shape, lambda i: L.store(b, i, cast(source[i], b.dtype)), "z{}".format)


def _active(body: Stmt, start: Iterable[Buffer]) -> set[Buffer]:
    """The buffers of floats whose values depend on those of the buffers `start`."""
    active, before = set(start), -1
    while len(active) != before:
        before = len(active)
        for s in L.walk(body):
            if isinstance(s, Store | Accumulate) and is_float(s.buffer.dtype) and any(r.attr in active for r in _value_reads(s.value)):
                active.add(s.buffer)
    return active


def _value_reads(e: Expr) -> list[Expr]:
    """The reads whose values an expression is computed from; those in indices are left out."""
    return [x for x in E.walk(e, operands=E.value_operands) if x.op == "read"]


def _stored(s: Store | Accumulate) -> Expr:
    """What an element becomes."""
    return s.value if isinstance(s, Store) else s.reducer(s.buffer[s.indices], s.value)


def _written(stmt: Stmt) -> set[Buffer]:
    return {s.buffer for s in L.walk(stmt) if isinstance(s, Store | Accumulate)}


class _Reversal:
    def __init__(self, program: Extern, adjoints: Mapping[Buffer, Buffer]) -> None:
        """`adjoints` are those of the inputs that count."""
        self.active = _active(program.body, adjoints)
        self.adjoints = {b: adjoints.get(b) or _adjoint(b) for b in self.active}
        self.written = _written(program.body)
        self.needed = self.asked_for(program.body)
        self.tapes: dict[Stmt, tuple[Buffer, tuple[Expr, ...]]] = {}  # of a store or branch: where its past is kept, and at which place
        self.lost: set[Buffer] = set()  # buffers that do not get back what they held

    def wanted(self, read: Expr) -> bool:
        return read.attr in self.active

    def asked_for(self, body: Stmt) -> set[Buffer]:
        """The written buffers that are read where the adjoint is computed, and those from which they are computed."""
        needed, before = set[Buffer](), -1
        while len(needed) != before:
            before = len(needed)
            for s in L.walk(body):
                counts = any(isinstance(x, Store | Accumulate) and (x.buffer in self.active or x.buffer in needed) for x in L.walk(s))
                used = list[Expr]()
                if isinstance(s, Store | Accumulate) and counts:
                    used += s.indices
                    if s.buffer in needed:
                        used.append(_stored(s))
                    if s.buffer in self.active:
                        seed = E.var("seed", dtype=s.buffer.dtype)
                        for read, guards, value in scalar.reverse(_stored(s), seed, (), self.wanted):
                            used += (*read.args, *guards, value)
                elif counts:
                    used += L.expressions(s)
                needed |= {r.attr for r in E.reads(*used)} & self.written
        return needed

    def scope(self, stmt: Stmt, values: Values, more: Sequence[Buffer] = ()) -> Stmt:
        """Runs a statement and undoes it, in a scope of the buffers that are allocated in it outside of its loops."""
        outer = self.tapes, self.lost
        self.tapes, self.lost = {}, set()
        local = list[Buffer]()
        body = self.lifted(stmt, (), local)
        run = self.run(body, values, ())
        undo = self.undo(body, values)
        own = [self.adjoints[b] for b in local if b in self.adjoints]
        kept = [b for b in (*local, *more) if b in self.needed]
        tapes = [tape for tape, _ in self.tapes.values()]
        self.tapes, self.lost = outer
        clear = [_cleared(b) for b in (*own, *kept)]  # what is put on tape before it was written is a number, too
        return L.allocated([*kept, *own, *tapes], L.block(*clear, run, undo))

    def lifted(self, stmt: Stmt, loops: Loops, found: list[Buffer]) -> Stmt:
        """The statement without the allocations that `found` gets: those outside of its loops, and those inside that go on with what is
        computed outside, for which there is an element for each iteration. The others are scopes of their own."""
        match stmt:
            case Allocate(b, body):
                if not loops:
                    found.append(b)
                    return self.lifted(body, loops, found)
                owned = {s.buffer for s in L.walk(stmt) if isinstance(s, Allocate)}
                if self.needed.isdisjoint({x for s in L.walk(stmt) for x, _ in L.places(s)} - owned):
                    return stmt
                wide = Buffer(b.name, b.dtype, [*_longest(loops, {}), *b.shape])
                for known in (self.active, self.needed, self.written):
                    if b in known:
                        known.add(wide)
                if b in self.active:
                    self.adjoints[wide] = _adjoint(wide)
                found.append(wide)
                at = tuple(v for v, _ in loops)
                return self.lifted(L.redirect(body, lambda x, i: (wide, (*at, *i)) if x is b else None), loops, found)
            case For(v, extent, body, kind):
                return For(v, extent, self.lifted(body, (*loops, (v, extent)), found), kind)
            case Block() | If():
                return L.with_children(stmt, [self.lifted(s, loops, found) for s in L.children(stmt)])
        return stmt

    def run(self, stmt: Stmt, values: Values, loops: Loops, taped: bool = True) -> Stmt:
        """The part of a statement that computes what is needed, with tapes; `loops` are those around it in its scope."""
        match stmt:
            case Block(stmts):
                return L.block(*(self.run(s, values, loops, taped) for s in stmts))
            case For(v, extent, body):
                n = as_dim(_in(as_expr(extent), values))
                new = loop_var(v.name, n)
                inner = self.run(body, {**values, v: new}, (*loops, (v, extent)), taped)
                return Block(()) if _is_empty(inner) else For(new, n, inner)
            case If(cond, then, otherwise):
                keep = taped and _depends(cond, stmt) and any(b in self.needed or b in self.active for b in _written(stmt))
                branches = [self.run(s, values, loops, taped) for s in (then, otherwise) if s is not None]
                test = _in(cond, values)
                if keep:
                    tape, place = self.tape(stmt, "bool", loops, values)
                    at = tuple(_in(p, values) for p in place)
                    return L.block(L.store(tape, at, test), If(tape[at], *branches))
                return Block(()) if all(map(_is_empty, branches)) else If(test, *branches)
            case While(cond, body):
                inner = self.run(body, values, loops, False)
                return Block(()) if _is_empty(inner) else While(_in(cond, values), inner)
            case Allocate(b, body):
                if not taped:
                    return Allocate(b, self.run(body, values, loops, False))
                return Block(())  # it is run again where it is undone
            case Store() | Accumulate():
                if stmt.buffer not in self.needed:
                    return Block(())
                index, value = (_in(e, values) for e in (stmt.buffer[stmt.indices], stmt.value))
                store: Stmt = replace(stmt, indices=index.args, value=value)
                if taped:
                    tape, place = self.tape(stmt, stmt.buffer.dtype, loops, values)
                    store = L.block(L.store(tape, tuple(_in(p, values) for p in place), index), store)
                return store
        return Block(())

    def tape(self, stmt: Stmt, dtype: str, loops: Loops, values: Values) -> tuple[Buffer, tuple[Expr, ...]]:
        extents = _longest(loops, values) or [1]
        self.tapes[stmt] = Buffer(f"tape{len(self.tapes)}", dtype, extents), tuple(v for v, _ in loops) or (const(0),)
        return self.tapes[stmt]

    def undo(self, stmt: Stmt, values: Values) -> Stmt:
        """The adjoint of a statement, which starts from the state behind it and leaves that before it."""
        if isinstance(stmt, Allocate):
            return self.scope(stmt, values)
        if self.active.isdisjoint(_written(stmt)) and self.needed.isdisjoint(_written(stmt)):
            return Block(())
        match stmt:
            case Block(stmts):
                return L.block(*[self.undo(s, values) for s in reversed(stmts)])
            case For(v, extent, body):
                self.check(stmt, as_expr(extent))
                self.lost |= {b for s in _in_scope(body) if isinstance(s, While) for b in _written(s)}
                n = as_dim(_in(as_expr(extent), values))
                new = loop_var(v.name, n)
                inner = self.undo(body, {**values, v: simplify(as_expr(n) - 1 - new)})
                return Block(()) if _is_empty(inner) else For(new, n, inner)
            case If(cond, then, otherwise):
                branches = [self.undo(s, values) for s in (then, otherwise) if s is not None]
                if all(map(_is_empty, branches)):
                    return Block(())
                if stmt in self.tapes:
                    tape, place = self.tapes[stmt]
                    return If(tape[tuple(_in(p, values) for p in place)], *branches)
                self.check(stmt, cond)
                return If(_in(cond, values), *branches)
            case While():
                if not self.active.isdisjoint(_written(stmt)):
                    why, hint = "a `while` computes floats, and how often it runs is not known", "use a loop over a range, with a condition"
                    raise IRError("a program cannot be reversed", where=str(stmt.cond), why=why, hint=hint)
                self.lost |= _written(stmt)
                return Block(())
            case Store() | Accumulate():
                return self.undo_store(stmt, values)
        return Block(())

    def check(self, stmt: Stmt | None, *used: Expr) -> None:
        """Raises `IRError` where something is read that does not get back what it held, or that the statement itself changes."""
        changed = set() if stmt is None else _written(stmt)
        for r in E.reads(*used):
            if r.attr in self.lost or r.attr in changed:
                why = f"`{r.attr.name}` is read, and overwritten where its values are not kept: by what they depend on, or in a `while`"
                raise IRError("a program cannot be reversed", where=str(r), why=why, hint="write to another array")

    def undo_store(self, stmt: Store | Accumulate, values: Values) -> Stmt:
        b, steps = stmt.buffer, list[Stmt]()
        self.check(stmt, *stmt.indices)
        at = tuple(_in(i, values) for i in stmt.indices)
        if stmt in self.tapes and b not in self.lost:
            tape, place = self.tapes[stmt]
            steps.append(L.store(b, at, tape[tuple(_in(p, values) for p in place)]))
        if b not in self.active:
            return L.block(*steps)
        own, held = self.adjoints[b], Buffer("held", self.adjoints[b].dtype, (1,), "register")
        steps += [L.store(held, (0,), own[at]), L.store(own, at, 0)]
        for read, guards, value in scalar.reverse(_stored(stmt), cast(held[0], b.dtype), (), self.wanted):
            self.check(None, value, *guards, *read.args)
            target = self.adjoints[read.attr]
            index, new = _in(target[read.args], values), _in(wide(value), values)
            step: Stmt = L.store(target, index.args, index + cast(new, target.dtype))
            for guard in reversed(guards):
                step = If(simplify(_in(guard, values)), step)
            steps.append(step)
        return Allocate(held, L.block(*steps))


def _in(e: Expr, values: Values) -> Expr:
    return E.substitute(e, values)


def _is_empty(stmt: Stmt) -> bool:
    return isinstance(stmt, Block) and not stmt.stmts


def _depends(cond: Expr, stmt: Stmt) -> bool:
    """Whether a statement may change what a condition reads."""
    return any(r.attr in _written(stmt) for r in E.reads(cond))


def _in_scope(stmt: Stmt) -> Iterable[Stmt]:
    """The statement and those inside of it, without those in scopes of their own."""
    yield stmt
    if not isinstance(stmt, Allocate):
        for child in L.children(stmt):
            yield from _in_scope(child)


def _longest(loops: Loops, values: Values) -> list[Dim]:
    """The extents of loops, the longest run of those whose length depends on others of them."""
    found = list[Dim]()
    for v, n in loops:
        alone = {w for w, _ in loops}.isdisjoint(E.variables(as_expr(n)))
        extent = as_dim(_in(as_expr(n), values)) if alone else bounds(n)[1]
        if extent is None:
            why = f"the loop `{v.name}` has a length that no size of the program bounds"
            raise IRError("a program cannot be reversed", where=v.name, why=why, hint="fix the sizes")
        found.append(extent)
    return found


def forward_program(program: Extern, tangents: Mapping[int, Tensor]) -> list[Tensor | None]:
    """The tangents of all results (None: zero), given those of inputs by their numbers."""
    active = _active(program.body, [program.parameters[n] for n in tangents])
    results = [n for n, b in enumerate(program.results) if b in active]

    def written(parameters: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        new = dict(zip(program.parameters, parameters, strict=False)) | dict(zip(program.results, outputs, strict=False))
        dots = {b: Buffer(f"{b.name}.tangent", b.dtype, b.shape, b.scope) for b in active}
        dots |= {program.parameters[n]: b for n, b in zip(tangents, parameters[len(program.inputs) :], strict=True)}
        dots |= {program.results[n]: b for n, b in zip(results, outputs[len(program.results) :], strict=True)}

        def tangent(read: Expr) -> Expr | None:
            return dots[read.attr][read.args] if read.attr in active else None

        def visit(s: Stmt) -> Stmt:
            s = L.with_children(s, [visit(c) for c in L.children(s)])
            if isinstance(s, Allocate) and s.buffer in active:
                return Allocate(dots[s.buffer], s)
            if isinstance(s, Store | Accumulate) and s.buffer in active:
                own = scalar.forward(_stored(s), tangent)
                return L.block(L.store(dots[s.buffer], s.indices, 0.0 if own is None else own), s)
            return s

        return L.redirect(visit(program.body), lambda b, indices: (new[b], indices) if b in new else None)

    types = [(b.shape, b.dtype) for b in (*program.results, *(program.results[n] for n in results))]
    found = te.externs(types, [*program.inputs, *tangents.values()], written, "tangent")
    own = dict(zip(results, found[len(program.results) :], strict=True))
    return [own.get(n) for n in range(len(program.results))]
