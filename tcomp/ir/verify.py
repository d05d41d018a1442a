"""Verifiers: the invariants of expressions, tensor expressions, loop programs, graphs and host programs between passes.

Each raises `IRError` that names the place and the rule. They check types, scopes, ranges that later proofs rely on, and
accesses that are out of range for certain; they do not prove accesses in range.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from tcomp.errors import IRError, TcompError
from tcomp.ir import expr as E, loops as L, program as P, te
from tcomp.ir.dtypes import BITS, NARROW, is_float, is_integer, to_numpy
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, bounds
from tcomp.ir.graph import APPEND, IF, KERNEL, SIZE, STRUCTURAL, Graph, Node, Value, infer, needs
from tcomp.ir.instruction import match
from tcomp.ir.layout import Layout
from tcomp.ir.reducers import Reducer
from tcomp.ir.scalar_operators import ARITHMETIC, ARITY, BITWISE, COMPARISON, PREDICATES, wrap
from tcomp.ir.simplify import as_dim, difference, prove, same_dim, same_shape

Place: TypeAlias = object  # printed only if something is wrong there: a string, expression, statement, or tuple of places, outermost first
Require: TypeAlias = Callable[..., None]  # `_require` at one place: (whether a rule holds, what is wrong, its arguments, why, hint)


def _require(place: Place, holds: object, rule: str, *args: object, why: str = "", hint: str = "") -> None:
    """Raises `IRError` if a rule does not hold; `rule` says what is wrong, with `{}` for each of `args`, which are printed only then."""
    if not holds:
        where = _shown(place)
        raise IRError(rule.format(*args), where=where if len(where) <= 300 else where[:300] + " ...", why=why, hint=hint)


def _shown(place: Place) -> str:
    return ": ".join(filter(None, map(_shown, place))) if isinstance(place, tuple) else str(place).split("\n", 1)[0]


# ---------------------------------------------------------------- expressions


def verify_expr(e: Expr, where: Place = "", guarded: bool = False) -> None:
    """Operators, operand counts and dtypes; reads with one index per dimension; no access that is certainly out of range.

    `guarded` says that a condition outside may keep the expression from being evaluated: then ranges are not checked.
    """

    def evaluated(x: Expr) -> Sequence[Expr]:
        """The operands that are evaluated whenever `x` is."""
        return () if x.op == "reduce" and any(map(_empty, x.attr[1])) else x.args[:1] if x.op == "select" else x.args

    require = partial(_require, (where, e))
    for node in E.walk(e):
        _verify_node(node, require)
    for node in () if guarded else E.walk(e, operands=evaluated):
        if node.op == "read":
            _verify_range(node.attr, node.args, require)


def _verify_node(e: Expr, require: Require) -> None:
    types = [a.dtype for a in e.args]
    require(e.dtype in BITS, "unknown dtype `{}`", e.dtype)
    match e.op:
        case "const":
            kind = float if is_float(e.dtype) else bool if e.dtype == "bool" else int
            fits = not e.args and type(e.attr) is kind and (kind is not int or wrap(int(e.attr), e.dtype) == e.attr)
            require(fits, "the constant {!r} is no {}", e.attr, e.dtype)
        case "var":
            pass
        case "read":
            name, rank = e.attr.name, len(e.attr.shape)
            require(len(types) == rank, "`{}` has {} dimensions and is read with {} indices", name, rank, len(types))
            for t in types:
                require(t == INDEX, "an index of `{}` is {} instead of {}", name, t, INDEX)
            require(e.dtype == e.attr.dtype, "a read of `{}` is {} instead of {}", name, e.dtype, e.attr.dtype)
        case "reduce":
            reducer, axes = e.attr
            require(types == [e.dtype], "a reduction of {} gives {}", ", ".join(types), e.dtype)
            for t in _dtypes(reducer):
                require(t == e.dtype, "the reducer `{}` of {} reduces {}", reducer.name, t, e.dtype)
            closed = reducer.identity.op == "const" and set(E.variables(reducer.combine)) <= {reducer.lhs, reducer.rhs}
            why = "its identity must be a constant, its combination must use nothing but lhs and rhs"
            require(closed, "the reducer `{}` depends on something outside of it", reducer.name, why=why)
            different = len(set(axes)) == len(axes) and all(v.op == "var" and v.dtype == INDEX and v.attr.lo == 0 for v in axes)
            require(different, "reduction axes must be different variables that start at 0")
        case "cast" | "bitcast":
            fits = len(types) == 1 and (e.op == "cast" or BITS[types[0]] == BITS[e.dtype])
            why = "it takes one operand, and a bitcast keeps its width"
            require(fits, "{} of {} to {}", e.op, ", ".join(types), e.dtype, why=why)
        case op if op in ARITY:
            operands = types[1:] if op == "select" and types[:1] == ["bool"] else types
            fits = len(types) == ARITY[op] and len(set(operands)) == 1
            fits = fits and e.dtype == ("bool" if op in COMPARISON or op in PREDICATES else operands[0])
            require(fits, "`{}` of ({}) gives {}", op, ", ".join(types), e.dtype)
            require(_defined(op, operands[0]), "`{}` is not defined for {}", op, operands[0])
        case _:
            require(False, "unknown operator `{}`", e.op)


def _defined(op: str, dtype: str) -> bool:
    if op == "checked":
        return dtype == INDEX
    if dtype in NARROW:
        return op == "select"
    if op in COMPARISON or op in ("min", "max", "select"):
        return True
    if dtype == "bool":
        return op in ("and", "or", "xor", "not")
    if op in BITWISE or op in ("not", "popcount"):
        return is_integer(dtype)
    return is_float(dtype) or (op in ("neg", "abs", *ARITHMETIC) and op != "div")


def _dtypes(reducer: Reducer) -> list[str]:
    return [part.dtype for part in (reducer.lhs, reducer.rhs, reducer.combine, reducer.identity)]


def _empty(v: Expr) -> bool:
    """Whether the variable has no value at all."""
    return v.attr.hi is not None and v.attr.lo is not None and v.attr.lo > v.attr.hi


def _verify_range(source: Any, indices: Sequence[Expr], require: Require) -> None:
    for position, (index, extent) in enumerate(zip(indices, source.shape, strict=True)):
        (lo, hi), largest = bounds(index), bounds(extent)[1]
        outside = (hi is not None and hi < 0) or (lo is not None and largest is not None and lo >= largest)
        possible, what = not outside or any(map(_empty, E.variables(index))), "index {} of `{}` is {}, its extent is {}"
        require(possible, what, position, source.name, index, extent, why="this is never in range")


def _verify_loop_range(v: Expr, extent: Dim, require: Require) -> None:
    """The range of a loop variable must cover its loop: proofs rely on it."""
    fits = v.op == "var" and v.dtype == INDEX and v.attr.lo is not None and v.attr.lo <= 0
    require(fits, "`{}` cannot be the variable of a loop", v, why=f"it must be an {INDEX} variable whose range holds 0")
    for limit in (v.attr.extent, None if v.attr.hi is None else v.attr.hi + 1):
        covers, what = limit is None or same_dim(limit, extent) or prove(as_expr(extent) <= limit), "its declared range ends below {}"
        require(covers, "`{}` runs below {}, " + what, v.name, extent, limit, why="proofs rely on the range")


# ---------------------------------------------------------------- tensor expressions


def verify_te(outputs: Sequence[te.Tensor], known: Iterable[Expr] = ()) -> None:
    """Axes that agree with shapes, bodies of the declared dtype, no unbound axes, externs that fit their tensors. `known` are dims
    that may be used in addition to those of the shapes."""
    found = [*E.postorder(outputs, lambda t: [source for source in t.inputs if isinstance(source, te.Tensor)])]
    dims = {*known, *(v for t in found for d in t.shape if isinstance(d, Expr) for v in E.variables(d))}
    for t in found:
        where = f"tensor `{t.name}`"
        require = partial(_require, where)
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
        _verify_loop_range(v, extent, require)
    require(body.dtype == t.dtype, "the body is {}, the tensor {}", body.dtype, t.dtype)
    verify_expr(body, where, guarded=any(map(_empty, t.axes)))
    own = all(e.op != "reduce" or set(t.axes).isdisjoint(e.attr[1]) for e in E.walk(body))
    require(own, "an axis of the tensor is reduced over as well", hint="give te.reduce_axis another name")
    for v in E.free_variables(body):
        looks_like_axis = v.attr.extent is not None or (v.attr.lo == 0 and v.attr.hi is not None)
        bound = v in t.axes or v in dims or (v.dtype == INDEX and not looks_like_axis)
        require(bound, "the variable `{}` is not bound", v.name, why="it is not an axis of this tensor and no symbolic dim")


# ---------------------------------------------------------------- loop programs


def verify_kernel(kernel: L.Kernel) -> None:
    """Scopes of buffers and variables, unique names, loop kinds and ranges, dtypes and index counts of accesses."""
    where = f"kernel `{kernel.name}`"
    require = partial(_require, where)
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


_NOT_HERE = "it is no parameter and not allocated here"


class _Loops:
    """Walks statements with the scopes around them. `scalars` None: any variable that no loop binds is a symbolic dim."""

    def __init__(self, where: str, scalars: set[Expr] | None, buffers: Sequence[L.Buffer], writable: Sequence[L.Buffer]) -> None:
        self.where, self.scalars, self.buffers, self.writable = where, scalars, set(buffers), set(writable)
        self.loops: list[L.For] = []
        self.names: set[str] = set()
        self.guarded = False  # whether the statement may be skipped

    def declare(self, b: L.Buffer, place: Place) -> None:
        require = partial(_require, place)
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
        require, bound = partial(_require, place), {f.var for f in self.loops}
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
        require = partial(_require, place)
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
                    _verify_range(b, indices, require)
                if isinstance(stmt, L.Accumulate):
                    fits = set(_dtypes(stmt.reducer)) == {b.dtype}
                    require(fits, "the reducer `{}` is not one of {}", stmt.reducer.name, b.dtype)
            case L.Allocate(b, body):
                self.declare(b, place)
                self.writable.add(b)
                self.statement(body)
                self.buffers.discard(b)
            case L.Prefetch(b, indices):
                fits = b in self.buffers and [i.dtype for i in indices] == [INDEX] * len(b.shape)
                require(fits, "no element of `{}` is prefetched", b.name)
            case L.Call(instruction, body):
                self.statement(body)
                match(instruction, body)
            case _:
                _require(self.where, False, "{} is not a statement", type(stmt).__name__)

    def loop(self, stmt: L.For, require: Require) -> None:
        v, extent, kind, kinds = stmt.var, as_expr(stmt.extent), stmt.kind, [f.kind for f in self.loops]
        require(kind in L.KINDS, "unknown kind of loop `{}`", kind, hint=f"one of {', '.join(L.KINDS)}")
        require(extent.dtype == INDEX, "the extent of a loop is {}", extent.dtype)
        _verify_loop_range(v, stmt.extent, require)
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


# ---------------------------------------------------------------- graphs


def verify_graph(graph: Graph) -> None:
    """Single assignment, definition before use, outputs that operators really give, closed bodies with fitting signatures."""
    where = f"graph `{graph.name}`"
    known: set[Value] = set()
    _require(where, len({v.name for v in graph.inputs}) == len(graph.inputs), "two inputs have the same name")

    def define(v: Value, place: str) -> None:
        require = partial(_require, place)
        require(v not in known, "`{}` is defined twice", v.name)
        known.add(v)
        require(v.dtype in BITS, "unknown dtype `{}` of `{}`", v.dtype, v.name)
        for d in v.shape:
            if isinstance(d, Expr):
                verify_expr(d, f"{place}, shape of `{v.name}`")
            else:
                require(d >= 0, "`{}` has an extent of {}", v.name, d)
        if v.layout is not None:
            _verify_layout(v.layout, v, require)

    for v in (*graph.inputs, *graph.constants):
        define(v, where)
    for v, array in graph.constants.items():
        fits = array.shape == v.shape and array.dtype == to_numpy(v.dtype)
        _require(where, fits, "the constant `{!r}` holds {}{}", v, array.dtype.name, list(array.shape))
    counted: set[Any] = {node.attrs.get("dim") for node in graph.nodes if node.op is SIZE}
    for node in graph.nodes:
        place = f"{where}, node `{node.name}` ({node.op.name})"
        for value in filter(None, node.inputs):
            _require(place, value in known, "`{}` is used but not defined before", value.name, why="bodies are closed: pass it in")
        for v in node.outputs:
            define(v, place)
        for attr in node.attrs.values():
            _verify_attribute(attr, place)
        if node.op in STRUCTURAL:
            _verify_structural(node, place, counted)
        else:
            _verify_application(node, place)
    for v in graph.outputs:
        _require(where, v in known, "the output `{}` is not defined", v.name)


def _verify_layout(layout: Layout, v: Value, require: Require) -> None:
    """Every axis is stored exactly once: its pieces, innermost first, continue each other up to an uncut one."""
    why = f"the value has {len(v.shape)}"
    require(layout.rank == len(v.shape), "the layout {} of `{}` is for {} dimensions", layout, v.name, layout.rank, why=why)
    for axis in range(layout.rank):
        pieces = sorted((p for p in layout.pieces if p.axis == axis), key=lambda p: p.div)
        ends = [1, *(p.div * (p.mod or 1) for p in pieces)]
        once = pieces and all(p.div == end and (p.mod is None) == (p is pieces[-1]) for p, end in zip(pieces, ends, strict=False))
        require(once, "the layout {} of `{}` does not store axis {} exactly once", layout, v.name, axis)
        halo = all(min(p.before, p.after) >= 0 and (len(pieces) == 1 or p.before == p.after == 0) for p in pieces)
        require(halo, "the layout {} of `{}` has a halo around a part of axis {}", layout, v.name, axis)


def _verify_attribute(value: Any, place: str) -> None:
    for item in value if isinstance(value, tuple) else ():
        _verify_attribute(item, place)
    fits = value is None or (isinstance(value, tuple | bool | int | float | str | Expr) and not isinstance(value, np.generic))
    _require(place, fits, "an attribute is a {}", type(value).__name__, hint="None, bool, int, float, str, dims and tuples of these")


def _verify_application(node: Node, place: str) -> None:
    _require(place, not node.bodies, "only structural operators have bodies")
    _require(place, node.op.function is not None, "the operator `{}` has no definition", node.op.name)
    try:
        derived = infer(node.op, node.inputs, node.attrs, node.name).outputs
        verify_te(derived, (d for d in needs(node) if isinstance(d, Expr)))
    except TcompError as error:
        raise error.restated(IRError, where=f"{place}: {error.where}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        raise IRError(f"the operator does not take these inputs and attributes: {error}", where=place) from error
    _verify_types("the operator", derived, "the node declares", node.outputs, place)


def _verify_types(
    giver: str, given: Sequence[Any], taker: str, taken: Sequence[Any], place: str, layouts: bool = False, counted: Container[Dim] = ()
) -> None:
    """Where a size of the taker is `counted`, any will do."""
    _require(place, len(given) == len(taken), "{} gives {} values, {} {}", giver, len(given), taker, len(taken))
    for a, b in zip(given, taken, strict=True):
        shape = [e if e in counted else d for d, e in zip(a.shape, b.shape, strict=False)]
        same = a.dtype == b.dtype and len(a.shape) == len(b.shape) and same_shape(shape, b.shape) and (not layouts or a.layout == b.layout)
        _require(place, same, "{} gives {!r}, {} {!r}", giver, a, taker, b)


def _verify_structural(node: Node, place: str, counted: Container[Dim]) -> None:
    require, wanted, is_kernel = partial(_require, place), 2 if node.op is IF else 1, node.op is KERNEL
    if node.op is SIZE:
        count, *others = node.inputs
        fits = count is not None and (count.dtype, count.shape, others, node.outputs) == (INDEX, (), [], ())
        require(fits and node.attrs.keys() == {"dim", "bound"}, "a size is one int64 scalar, with `dim` and `bound`")
        require(isinstance(d := node.attrs["dim"], Expr) and d.op == "var", "`{}` is not a symbolic dim", node.attrs["dim"])
        return
    if node.op is APPEND:
        _verify_append(node, place)
        return
    require(len(node.bodies) == wanted, "`{}` has {} bodies instead of {}", node.op.name, len(node.bodies), wanted)
    inputs = [v for v in node.inputs if v is not None]
    require(len(inputs) == len(node.inputs), "an input of a structural operator is left out")
    for body in node.bodies:
        try:
            verify_graph(body)
        except IRError as error:
            raise error.restated(IRError, where=f"{place}: {error.where}") from error
    if node.op is IF:
        require(inputs and inputs[0].dtype == "bool" and all(d == 1 for d in inputs[0].shape), "the condition is not one bool")
        inputs = inputs[1:]
    elif is_kernel:
        require(all(inner.op not in STRUCTURAL for inner in node.bodies[0].nodes), "a kernel contains a structural operator")
    else:
        _verify_loop(node, inputs, place)
        return
    for body in node.bodies:
        _verify_types("the node", inputs, "the body takes", body.inputs, place, layouts=is_kernel)
        _verify_types("the body", body.outputs, "the node declares", node.outputs, place, is_kernel, () if is_kernel else counted)


def _verify_append(node: Node, place: str) -> None:
    require, (old, new) = partial(_require, place), node.inputs if len(node.inputs) == 2 else (None, None)
    require(old is not None and new is not None and len(node.outputs) == 1, "state and new rows are appended, to one value")
    assert old is not None and new is not None
    (whole,) = node.outputs
    axes = [n for n, (a, b) in enumerate(zip(old.shape, whole.shape, strict=False)) if not same_shape((a,), (b,))]
    axis = axes[0] if axes else 0
    sizes = [(*v.shape[:axis], as_dim(as_expr(old.shape[axis]) + new.shape[axis]), *v.shape[axis + 1 :]) for v in (old, new)]
    fits = old.dtype == new.dtype == whole.dtype and all(len(v.shape) == len(whole.shape) for v in (old, new))
    require(fits and all(same_shape(s, whole.shape) for s in sizes), "`{!r}` and `{!r}` do not make `{!r}`", old, new, whole)
    require(all(d == 1 for d in old.shape[:axis]), "rows that are appended do not stand behind each other")


def _verify_loop(node: Node, inputs: Sequence[Value], place: str) -> None:
    require, body, attrs, outputs = partial(_require, place), node.bodies[0], node.attrs, node.outputs
    missing = {"trips", "carried", "scanned", "reverse_in", "reverse_out", "condition"} - set(attrs)
    require(not missing, "a loop lacks the attribute `{}`", min(missing, default=""))
    trips, carried, scanned = attrs["trips"], attrs["carried"], attrs["scanned"]
    stacked = len(outputs) - carried
    what = "{} carried and {} scanned values do not fit {} inputs, {} outputs"
    require(len(inputs) >= carried + scanned and stacked >= 0, what, carried, scanned, len(inputs), len(outputs))
    flags = len(attrs["reverse_in"]) == scanned and len(attrs["reverse_out"]) == stacked
    require(flags, "reverse_in and reverse_out need one flag for each scanned input and stacked output")

    def rows(values: Sequence[Value]) -> list[Value]:
        for v in values:
            whole = v.shape and same_dim(v.shape[0], trips)
            require(whole, "`{!r}` does not have one row for each of the {} iterations", v, trips)
        return [Value(v.name, v.dtype, v.shape[1:]) for v in values]

    given = [Value("iteration", INDEX, ()), *inputs[:carried], *rows(inputs[carried : carried + scanned]), *inputs[carried + scanned :]]
    sizes = attrs.get("sizes", ())
    results = [*outputs[:carried], *rows(outputs[carried:]), *([Value("condition", "bool", ())] if attrs["condition"] else [])]
    results += [Value("size", INDEX, ()) for _ in sizes]
    _verify_types("the node", given, "the body takes", body.inputs, place, counted=sizes)
    _verify_types("the body", body.outputs, "the node declares", results, place, counted=sizes)
    _verify_types("the node", inputs[:carried], "the carried outputs are", outputs[:carried], place, counted=sizes)


# ---------------------------------------------------------------- programs


def verify_program(program: P.Program) -> None:
    """Known memories that may be written where they are, places and sizes over dims and loops around, kernels called alike everywhere."""
    fits = len({v.name for v in program.dims}) == len(program.dims) and all(v.op == "var" and v.dtype == INDEX for v in program.dims)
    _require("program", fits, "the dims are not different {} variables", INDEX, why=", ".join(map(str, program.dims)))
    known = frozenset(program.dims)
    for size in (program.workspace, *program.sizes, *program.checks, *(d for shape in program.output_shapes for d in shape)):
        _verify_size(size, known, "program")
    parameters: dict[str, tuple[int, int]] = {}
    for call in P.calls(program.steps):
        count = len(call.buffers), len(call.scalars)
        alike = parameters.setdefault(call.symbol, count) == count
        _require(f"call `{call.label}`", alike, "kernel `{}` is called with different parameters", call.symbol)
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
                _verify_loop_range(var, trips, partial(_require, where))
                _require(where, var.name not in {v.name for v in known}, "`{}` is the name of a dim, or of a loop around", var)
                if condition is not None:
                    place(condition, where, 1, known=known | {var})
                _verify_steps(program, body, known | {var})
            case P.Copy(dst, src, count):
                where = f"copy from {src} to {dst}"
                _verify_size(count, known, where)
                lo, hi = bounds(count)
                _require(where, hi is None or hi >= 0, "{} bytes are copied", count)
                place(src, where, lo or 0)
                place(dst, where, lo or 0, written=True)
                least, most = bounds(difference(dst.offset, src.offset))
                distance = None if least is None or most is None else max(-least, most)
                disjoint = (dst.base, dst.index) != (src.base, src.index) or distance is None or distance >= (lo or 0)
                _require(where, disjoint, "a copy of {} bytes overlaps itself", count)
            case P.SetIndex(dst, value):
                where = f"set {dst}"
                _verify_size(value, known, where)
                place(dst, where, 8, written=True)


def _verify_ref(program: P.Program, ref: P.Ref, where: str, size: int = 0, written: bool = False, *, known: frozenset[Expr]) -> None:
    """A place of `size` bytes at least; what a kernel writes is not known here."""
    require = partial(_require, where)
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
    _require(where, fits, "`{}` is no size", e, why=why)
    for v in E.variables(e):
        _require(where, v in known, "the variable `{}` is not bound", v.name, why="it is not a dim, and no loop around binds it")
