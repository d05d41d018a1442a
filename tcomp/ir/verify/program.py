"""Verifies host programs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from tcomp.ir import expr as E, program as P
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, bounds
from tcomp.ir.simplify import difference
from tcomp.ir.verify.expressions import require_at, verify_expr, verify_loop_range


def verify_program(program: P.Program) -> None:
    """Known memories that may be written where they are, places and sizes over dims and loops around, kernels called alike everywhere."""
    fits = len({v.name for v in program.dims}) == len(program.dims) and all(v.op == "var" and v.dtype == INDEX for v in program.dims)
    require_at("program", fits, "the dims are not different {} variables", INDEX, why=", ".join(map(str, program.dims)))
    known = frozenset(program.dims)
    for size in (program.workspace, *program.sizes, *program.checks, *(d for shape in program.output_shapes for d in shape)):
        _verify_size(size, known, "program")
    parameters: dict[str, tuple[int, int]] = {}
    for call in P.calls(program.steps):
        count = len(call.buffers), len(call.scalars)
        alike = parameters.setdefault(call.symbol, count) == count
        require_at(f"call `{call.label}`", alike, "kernel `{}` is called with different parameters", call.symbol)
    _verify_steps(program, program.steps, known)


def _verify_steps(program: P.Program, steps: Sequence[P.Step], known: frozenset[Expr]) -> None:
    place = partial(_verify_ref, program, known=known)
    for step in steps:
        match step:
            case P.Call(symbol, buffers, scalars, label):
                where = f"call `{label}` of `{symbol}`"
                for size in scalars:
                    _verify_size(size, known, where)
                for ref in buffers:
                    place(ref, where)
            case P.Branch(cond, then, otherwise):
                place(cond, f"if {cond}", 1)
                _verify_steps(program, then, known)
                _verify_steps(program, otherwise, known)
            case P.Repeat(var, trips, body, condition):
                where = f"for {var}"
                _verify_size(trips, known, where)
                verify_loop_range(var, trips, partial(require_at, where))
                require_at(where, var.name not in {v.name for v in known}, "`{}` is the name of a dim, or of a loop around", var)
                if condition is not None:
                    place(condition, where, 1, known=known | {var})
                _verify_steps(program, body, known | {var})
            case P.Copy(dst, src, count):
                where = f"copy from {src} to {dst}"
                _verify_size(count, known, where)
                lo, hi = bounds(count)
                require_at(where, hi is None or hi >= 0, "{} bytes are copied", count)
                place(src, where, lo or 0)
                place(dst, where, lo or 0, written=True)
                least, most = bounds(difference(dst.offset, src.offset))
                distance = None if least is None or most is None else max(-least, most)
                disjoint = (dst.base, dst.index) != (src.base, src.index) or distance is None or distance >= (lo or 0)
                require_at(where, disjoint, "a copy of {} bytes overlaps itself", count)
            case P.SetIndex(dst, value):
                where = f"set {dst}"
                _verify_size(value, known, where)
                place(dst, where, 8, written=True)


def _verify_ref(program: P.Program, ref: P.Ref, where: str, size: int = 0, written: bool = False, *, known: frozenset[Expr]) -> None:
    """A place of `size` bytes at least; what a kernel writes is not known here."""
    require = partial(require_at, where)
    require(ref.base in P.MEMORIES, "unknown memory `{}`", ref.base, hint=f"one of {', '.join(P.MEMORIES)}")
    count = {"output": len(program.output_shapes), "input": None}.get(ref.base, 1)
    require(ref.index >= 0 and (count is None or ref.index < count), "there is no {} {}", ref.base, ref.index)
    require(not written or ref.base not in ("input", "weights"), "`{}` is written", ref, why="inputs and weights are read only")
    _verify_size(ref.offset, known, where)
    lo, hi = bounds(ref.offset)
    end = bounds(program.workspace)[1] if ref.base == "workspace" else 8 * len(program.dims) if ref.base == "dims" else None
    inside = (hi is None or hi >= 0) and (lo is None or end is None or lo + size <= end)
    require(inside, "`{}` is never inside of the memory", ref, why="" if end is None else f"it has {end} bytes at most")


def _verify_size(size: Dim, known: Collection[Expr], where: str) -> None:
    e = as_expr(size)
    verify_expr(e, where)
    fits, why = e.dtype == INDEX and not E.reads(e), f"a size is an {INDEX} over dims and loops, and looks nothing up"
    require_at(where, fits, "`{}` is not a size", e, why=why)
    for v in E.variables(e):
        require_at(where, v in known, "the variable `{}` is not bound", v.name, why="it is not a dim, and no loop around binds it")
