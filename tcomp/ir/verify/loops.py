"""Verifies tensor expressions and loop programs, which are what some tensors are computed by."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.dtypes import BITS
from tcomp.ir.expr import INDEX, Expr, as_expr
from tcomp.ir.instruction import match
from tcomp.ir.simplify import prove, same_shape
from tcomp.ir.verify.expressions import Place, Require, dtypes, is_empty, require_at, verify_expr, verify_loop_range, verify_range


def verify_te(outputs: Sequence[te.Tensor], known: Iterable[Expr] = ()) -> None:
    """Axes that agree with shapes, bodies of the declared dtype, no unbound axes, externs that fit their tensors. `known` are dims
    that may be used in addition to those of the shapes."""
    found = [*E.postorder(outputs, lambda t: [source for source in t.inputs if isinstance(source, te.Tensor)])]
    dims = {*known, *(v for t in found for d in t.shape if isinstance(d, Expr) for v in E.variables(d))}
    for t in found:
        where = f"tensor `{t.name}`"
        require = partial(require_at, where)
        require(t.dtype in BITS, "unknown dtype `{}`", t.dtype)
        for source in t.inputs:
            require(isinstance(source, te.Tensor), "a tensor expression reads the buffer `{}`", source.name)
        if (program := t.extern) is not None:
            fits = len(program.inputs) == len(program.parameters) and 0 <= t.index < len(program.results)
            require(fits, "an extern has one parameter for each input, and its tensors are its results")
            for source, b in [*zip(program.inputs, program.parameters, strict=True), (t, program.results[t.index])]:
                require(source.dtype == b.dtype and same_shape(source.shape, b.shape), "`{!r}` does not fit `{!r}`", source, b)
            _Loops(where, None, (*program.parameters, *program.results), program.results).statement(program.body)
        elif t.body is not None:
            _verify_compute(t, t.body, dims, where, require)


def _verify_compute(t: te.Tensor, body: Expr, dims: Collection[Expr], where: str, require: Require) -> None:
    different = len(set(t.axes))
    require(len(t.axes) == len(t.shape) == different, "{} different axes for {} dimensions", different, len(t.shape))
    for v, extent in zip(t.axes, t.shape, strict=True):
        verify_loop_range(v, extent, require)
    require(body.dtype == t.dtype, "the body is {}, the tensor {}", body.dtype, t.dtype)
    verify_expr(body, where, guarded=any(map(is_empty, t.axes)))
    own = all(e.op != "reduce" or set(t.axes).isdisjoint(e.attr[1]) for e in E.walk(body))
    require(own, "an axis of the tensor is reduced over as well", hint="give te.reduce_axis another name")
    for v in E.free_variables(body):
        looks_like_axis = v.attr.extent is not None or (v.attr.lo == 0 and v.attr.hi is not None)
        bound = v in t.axes or v in dims or (v.dtype == INDEX and not looks_like_axis)
        require(bound, "the variable `{}` is not bound", v.name, why="it is not an axis of this tensor and no symbolic dim")


def verify_kernel(kernel: L.Kernel) -> None:
    """Scopes of buffers and variables, unique names, loop kinds and ranges, dtypes and index counts of accesses."""
    where = f"kernel `{kernel.name}`"
    require = partial(require_at, where)
    for what, names in (("buffers", [b.name for b in kernel.buffers]), ("scalars", [v.name for v in kernel.scalars])):
        require(len(set(names)) == len(names), "two {} have the same name", what, why=", ".join(names))
    require(all(v.op == "var" and v.dtype == INDEX for v in kernel.scalars), "a scalar is not an {} variable", INDEX)
    require(set(kernel.outputs) <= set(kernel.buffers), "an output is not among the buffers")
    for c in kernel.assumptions:
        closed = c.dtype == "bool" and set(E.variables(c)) <= set(kernel.scalars) and not E.reads(c)
        require(closed, "`{}` is assumed, and is not a condition on the scalars", c)
    checker = _Loops(where, set(kernel.scalars), (), kernel.outputs)
    for b in kernel.buffers:
        require(b.scope == "global", "the parameter `{}` is in {} memory", b.name, b.scope)
        checker.declare(b, where)
    checker.statement(kernel.body)


_NOT_HERE = "it is not a parameter and not allocated here"


class _Loops:
    """Walks statements with the scopes around them. `scalars` None: any variable that no loop binds is a symbolic dim."""

    def __init__(self, where: str, scalars: set[Expr] | None, buffers: Sequence[L.Buffer], writable: Sequence[L.Buffer]) -> None:
        self.where, self.scalars, self.buffers, self.writable = where, scalars, set(buffers), set(writable)
        self.loops: list[L.For] = []
        self.names: set[str] = set()
        self.guarded = False  # whether the statement may be skipped

    def declare(self, b: L.Buffer, place: Place) -> None:
        require = partial(require_at, place)
        require(b.dtype in BITS, "unknown dtype `{}` of `{}`", b.dtype, b.name)
        require(b.scope in L.SCOPES, "unknown scope `{}` of `{}`", b.scope, b.name, hint=f"one of {', '.join(L.SCOPES)}")
        require(b not in self.buffers, "the buffer `{}` is declared twice", b.name)
        fixed = b.scope != "register" or all(isinstance(d, int) for d in b.shape)
        require(fixed, "the register buffer `{}` has a symbolic shape", b.name, why="registers cannot be indexed by size")
        for d in b.shape:
            require(not isinstance(d, int) or d >= 0, "the buffer `{}` has an extent of {}", b.name, d)
            self.expression(as_expr(d), place)
            what = "an extent of the buffer `{}` is looked up in another one: {}"
            require(not E.reads(as_expr(d)), what, b.name, d, why="room is made before anything is computed")
        self.buffers.add(b)

    def expression(self, e: Expr, place: Place) -> None:
        verify_expr(e, place, self.guarded)
        require, bound = partial(require_at, place), {f.var for f in self.loops}
        for node in E.walk(e):
            if node.op == "var":
                free = node in self.scalars if self.scalars is not None else node.attr.extent is None
                require(free or node in bound, "the variable `{}` is not bound", node.name, why="it is neither a scalar nor a loop around")
            elif node.op == "read":
                require(node.attr in self.buffers, "`{}` is read outside of its scope", node.attr.name, why=_NOT_HERE)
            require(node.op != "reduce", "a loop program contains a reduction", hint="lower it to a loop with Accumulate")

    def statement(self, stmt: L.Stmt) -> None:
        names = ", ".join(f.var.name for f in self.loops)
        place = f"{self.where}, loops {names}" if names else self.where, stmt
        require = partial(require_at, place)
        for e in L.expressions(stmt):
            self.expression(e, place)
        match stmt:
            case L.Block():
                self.inside(stmt, self.guarded)
            case L.For():
                self.loop(stmt, require)
            case L.If(cond) | L.While(cond):
                require(cond.dtype == "bool", "a condition is {} instead of bool", cond.dtype)
                self.inside(stmt, guarded=True)
            case L.Store(b, indices, value) | L.Accumulate(b, indices, value, _):
                require(b in self.buffers, "`{}` is written outside of its scope", b.name, why=_NOT_HERE)
                require(b in self.writable, "`{}` is written but not an output", b.name)
                rank = len(b.shape)
                require(len(indices) == rank, "`{}` has {} dimensions and is written with {} indices", b.name, rank, len(indices))
                for index in indices:
                    require(index.dtype == INDEX, "an index of `{}` is {} instead of {}", b.name, index.dtype, INDEX)
                require(value.dtype == b.dtype, "a {} is stored in `{}` of {}", value.dtype, b.name, b.dtype)
                if not self.guarded:
                    verify_range(b, indices, require)
                if isinstance(stmt, L.Accumulate):
                    fits = set(dtypes(stmt.reducer)) == {b.dtype}
                    require(fits, "the reducer `{}` is not one of {}", stmt.reducer.name, b.dtype)
            case L.Allocate(b, body):
                self.declare(b, place)
                self.writable.add(b)
                self.statement(body)
                self.buffers.discard(b)
            case L.Prefetch(b, indices, level):
                require(level in L.CACHE_LEVELS, "there is no cache of the level {}", level)
                fits = b in self.buffers and [i.dtype for i in indices] == [INDEX] * len(b.shape)
                require(fits, "no element of `{}` is prefetched", b.name)
            case L.Call(instruction, body):
                self.statement(body)
                match(instruction, body)
            case _:
                require_at(self.where, False, "{} is not a statement", type(stmt).__name__)

    def loop(self, stmt: L.For, require: Require) -> None:
        v, extent, kind, kinds = stmt.var, as_expr(stmt.extent), stmt.kind, [f.kind for f in self.loops]
        require(kind in L.KINDS, "unknown kind of loop `{}`", kind, hint=f"one of {', '.join(L.KINDS)}")
        require(extent.dtype == INDEX, "the extent of a loop is {}", extent.dtype)
        verify_loop_range(v, stmt.extent, require)
        require(v.name not in self.names, "two loops have the name `{}`", v.name, why="loop names are unique within a kernel")
        self.names.add(v.name)
        fixed = kind not in (L.VECTORIZED, L.UNROLLED) or isinstance(stmt.extent, int)
        require(fixed, "the {} loop `{}` has the symbolic extent {}", kind, v.name, extent, hint="split it first")
        require(kind not in L.GPU_AXES or kind not in kinds, "two nested loops are bound to {}", kind)
        require(kind != L.PARALLEL or L.VECTORIZED not in kinds, "the parallel loop `{}` is inside a vectorized one", v.name)
        # A loop that has no iteration, or none in some iterations of the loops around: nothing in it is sure to happen.
        varies = any(f.var in E.variables(extent) for f in self.loops)
        self.loops.append(stmt)
        self.inside(stmt, self.guarded or stmt.extent == 0 or (varies and not prove(1 <= extent)))
        self.loops.pop()

    def inside(self, stmt: L.Stmt, guarded: bool) -> None:
        outer, self.guarded = self.guarded, guarded
        for child in L.children(stmt):
            self.statement(child)
        self.guarded = outer
