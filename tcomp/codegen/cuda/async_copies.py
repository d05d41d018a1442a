"""Copies from global to shared memory that run in the background (`cp.async`, from sm_80 on): the values pass no register.

A thread copies 4, 8 or 16 bytes at a time: neighbouring lanes where they are certainly aligned on both sides, single elements of 4 or 8
bytes elsewhere. A value that is zero under a condition is a copy, too: of no bytes then, what is left is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import copysign

from tcomp.codegen.cuda.function import FunctionBuilder
from tcomp.codegen.cuda.phases import phases
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import INDEX, Expr, as_expr
from tcomp.ir.instruction import CopyOp
from tcomp.ir.loops import Stmt
from tcomp.ir.simplify import difference, from_linear, linear

OLDEST_ARCHITECTURE = 80  # `cp.async` exists from compute capability 8.0 on (PTX ISA 8.5, section 9.7.9.25.3)


@dataclass(frozen=True, slots=True)
class ThreadCopy:
    """What one thread copies at once: positions in both buffers, and the condition that it is not zero."""

    target: L.Store
    start: Expr
    source: Expr
    source_start: Expr
    size: int
    condition: Expr | None


def copy_phases(f: FunctionBuilder, body: Stmt) -> Iterator[Stmt]:
    """The phases of a statement that only start copies."""
    if f.target.compute_capability >= OLDEST_ARCHITECTURE:
        yield from (s for s in phases(body) if _only_copies(f, s))


def _only_copies(f: FunctionBuilder, phase: Stmt) -> bool:
    found = 0

    def visit(s: Stmt, lanes: L.For | None) -> bool:
        nonlocal found
        match s:
            case L.Store():
                found += 1
                return copy_of(f, s, lanes) is not None or (lanes is not None and copy_of(f, s, None) is not None)
            case L.For(kind=kind) if not E.reads(as_expr(s.extent)):
                return visit(s.body, s if kind == L.VECTORIZED else None)
            case L.If(cond, then, None) if not E.reads(cond):
                return visit(then, None if lanes is None or lanes.var in E.variables(cond) else lanes)
            case L.Call(instruction):
                found += 1
                return isinstance(instruction.emission, CopyOp)
            case L.Block(stmts):
                return all(visit(inner, None) for inner in stmts)
        return False

    return visit(phase, None) and found > 0


def copy_of(f: FunctionBuilder, s: Stmt, lanes: L.For | None) -> ThreadCopy | None:
    """The copy that a store is, of all `lanes` together if given; None if it is none."""
    if not isinstance(s, L.Store) or s.buffer.scope != "shared":
        return None
    condition, source = None, s.value
    if source.op == "select" and _is_zero(source.args[2]):
        condition, source, _ = source.args
    if source.op != "read" or source.attr.scope != "global":
        return None
    if E.reads(*s.indices, *source.args, *([] if condition is None else [condition])):
        return None
    if lanes is None:
        starts = f.linear(s.buffer, s.indices), f.linear(source.attr, source.args)
        count = 1
    else:
        if not f.target.vector_access or not isinstance(lanes.extent, int):
            return None
        count = lanes.extent
        if condition is not None and lanes.var in E.variables(condition := without_lane(condition, lanes)):
            return None
        first, second = f.vector_start(s.buffer, s.indices, lanes.var, count), f.vector_start(source.attr, source.args, lanes.var, count)
        if first is None or second is None:
            return None
        starts = first, second
    size = count * itemsize(s.buffer.dtype)
    return ThreadCopy(s, starts[0], source, starts[1], size, condition) if size in (4, 8, 16) else None


def _is_zero(e: Expr) -> bool:
    return e.op == "const" and e.attr == 0 and copysign(1, e.attr) > 0


def start_copy(f: FunctionBuilder, p: ThreadCopy) -> None:
    """Emit a copy."""
    f.used_buffers[p.source.attr] = None
    f.begin_statement(p.start, p.source_start, *([] if p.condition is None else [p.condition]))
    size = "" if p.condition is None else f", {f.value(p.condition)} ? {p.size} : 0"
    target, source = f.names[p.target.buffer], f.names[p.source.attr]
    f.line(f"{f.helper('start_copy')}<{p.size}>({target} + {f.value(p.start)}, {source} + {f.value(p.source_start)}{size});")


# ---------------------------------------------------------------- conditions that hold for all lanes or for none


def whole_vectors(s: Stmt) -> Stmt:
    """The statement with conditions inside of vectorized loops that do not name the lane where they need not."""
    s = L.with_children(s, [whole_vectors(c) for c in L.children(s)])
    if isinstance(s, L.For) and s.kind == L.VECTORIZED and isinstance(s.body, L.If):
        return replace(s, body=replace(s.body, cond=without_lane(s.body.cond, s)))
    return s


def without_lane(condition: Expr, lanes: L.For) -> Expr:
    """An equal condition, without the lane in those parts that hold for all lanes or for none: `4 * i + lane < 12` is `4 * i < 12`."""
    return E.all_of([_without_lane(c, lanes.var, lanes.extent) if isinstance(lanes.extent, int) else c for c in E.conjuncts(condition)])


def _without_lane(c: Expr, lane: Expr, lanes: int) -> Expr:
    if c.op not in ("lt", "le") or c.args[0].dtype != INDEX or lane not in E.variables(c) or E.reads(c):
        return c
    terms = dict(linear(difference(c.args[1], c.args[0])))  # a < b is 0 < b - a
    terms[()] = terms.get((), 0) + (c.op == "le")
    step = terms.pop((lane,), 0)
    if any(lane in E.variables(*m) or n % lanes for m, n in terms.items() if m):
        return c
    if (step, terms[()] % lanes) not in ((-1, 0), (1, 1)):  # lane < D or -D < lane, where D is that many vectors, or one element more
        return c
    return E.binary("lt", 0, from_linear(terms))
