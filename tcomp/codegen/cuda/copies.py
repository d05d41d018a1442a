"""Copies from global to shared memory that run in the background, in groups (see `barriers`): the values pass no register.

Each thread copies 4, 8 or 16 bytes at a time (`cp.async`, from sm_80 on), zeros where a condition does not hold.

Source: PTX ISA 8.5, section 9.7.9 (cp.async).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tcomp.codegen.cuda.barriers import phases
from tcomp.codegen.cuda.function import FunctionBuilder
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import INDEX, Expr, as_expr
from tcomp.ir.linear import linear
from tcomp.ir.loops import Stmt
from tcomp.ir.simplify import difference, from_linear

OLDEST_ARCHITECTURE = 80  # `cp.async` exists from compute capability 8.0 on (PTX ISA 8.5, section 9.7.9.25.3)


@dataclass(frozen=True, slots=True)
class ThreadCopy:
    """The copy that one thread performs at once: `size` bytes, positions in both buffers, and the condition under which it is not zero."""

    target: L.Store
    start: Expr
    source: Expr
    source_start: Expr
    size: int
    condition: Expr | None


def copy_phases(f: FunctionBuilder, body: Stmt) -> Iterator[Stmt]:
    """The phases of a statement that only start copies."""

    def only_copies(s: Stmt, lanes: L.For | None = None) -> bool:
        match s:
            case L.Store():
                return copy_of(f, s, lanes) is not None or (lanes is not None and copy_of(f, s, None) is not None)
            case L.For(kind=kind) if not E.reads(as_expr(s.extent)):
                return only_copies(s.body, s if kind == L.VECTORIZED else None)
            case L.If(cond, then, None) if not E.reads(cond):
                return only_copies(then, None if lanes is None or lanes.var in E.variables(cond) else lanes)
            case L.Block(stmts):
                return bool(stmts) and all(map(only_copies, stmts))
        return False

    if f.target.compute_capability >= OLDEST_ARCHITECTURE:
        yield from filter(only_copies, phases(body))


def copy_of(f: FunctionBuilder, s: Stmt, lanes: L.For | None) -> ThreadCopy | None:
    """The copy that a store is, of all `lanes` together if given; None if it is none."""
    if not isinstance(s, L.Store) or s.buffer.scope != "shared":
        return None
    condition, source = None, s.value
    if source.op == "select" and (zero := source.args[2]).op == "const" and zero.attr == 0 and math.copysign(1, zero.attr) > 0:
        condition, source, _ = source.args
    conditions = [] if condition is None else [condition]
    if source.op != "read" or source.attr.scope != "global" or E.reads(*s.indices, *source.args, *conditions):
        return None
    count = 1 if lanes is None else lanes.extent
    if not isinstance(count, int) or (lanes is not None and not f.target.vector_access):
        return None
    if lanes is not None and condition is not None and lanes.var in E.variables(condition := without_lane(condition, lanes)):
        return None
    places = ((s.buffer, s.indices), (source.attr, source.args))
    first, second = (f.linear(b, i) if lanes is None else f.vector_start(b, i, lanes.var, count) for b, i in places)
    size = count * itemsize(s.buffer.dtype)
    return None if first is None or second is None or size not in (4, 8, 16) else ThreadCopy(s, first, source, second, size, condition)


def start_copy(f: FunctionBuilder, p: ThreadCopy) -> None:
    """Emit a copy."""
    f.begin_statement(p.start, p.source_start, *([] if p.condition is None else [p.condition]))
    size = "" if p.condition is None else f", {f.value(p.condition)} ? {p.size} : 0"
    target = f"{f.names[p.target.buffer]} + {f.place(p.target.buffer, p.start)}"
    source = f"{f.use(p.source.attr)} + {f.value(p.source_start)}"
    f.line(f"{f.helper('start_copy')}<{p.size}>({target}, {source}{size});")


def whole_vectors(s: Stmt) -> Stmt:
    """The statement, where conditions inside of vectorized loops do not depend on the lane unless they must."""
    s = L.with_children(s, [whole_vectors(c) for c in L.children(s)])
    if isinstance(s, L.For) and s.kind == L.VECTORIZED and isinstance(s.body, L.If):
        return replace(s, body=replace(s.body, cond=without_lane(s.body.cond, s)))
    return s


def without_lane(condition: Expr, lanes: L.For) -> Expr:
    """An equal condition, without the lane in those conjuncts that hold for all lanes or for none: `4 * i + lane < 12` is `4 * i < 12`."""
    lane, count = lanes.var, lanes.extent

    def without(c: Expr) -> Expr:
        if not isinstance(count, int) or c.op not in ("lt", "le") or c.args[0].dtype != INDEX or lane not in E.variables(c) or E.reads(c):
            return c
        terms = dict(linear(difference(c.args[1], c.args[0])))  # a < b is 0 < b - a
        terms[()] = terms.get((), 0) + (c.op == "le")
        step, whole = terms.pop((lane,), 0), not any(lane in E.variables(*m) or n % count for m, n in terms.items() if m)
        known = whole and (step, terms[()] % count) in ((-1, 0), (1, 1))  # lane < D or -D < lane: D is whole vectors, or one element more
        return E.binary("lt", 0, from_linear(terms)) if known else c

    return E.all_of([without(c) for c in E.conjuncts(condition)])
