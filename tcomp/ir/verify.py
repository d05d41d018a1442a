"""Verifiers: what must hold of every expression, tensor expression, loop program, graph and host program between passes.

Each raises `IRError` that names the place and the rule. They check types, scopes, ranges that later proofs rely on, and
accesses that are out of range for certain; they do not prove accesses in range.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tcomp.errors import IRError, TcompError
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir import program as P
from tcomp.ir import te
from tcomp.ir.dtypes import BITS, integer_range, is_float, is_integer, to_numpy
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, bounds
from tcomp.ir.graph import IF, KERNEL, STRUCTURAL, Graph, Node, Value, infer
from tcomp.ir.instruction import match
from tcomp.ir.layout import Layout
from tcomp.ir.simplify import difference, prove, same_dim, same_shape

Place = object  # printed only when something is wrong there: a string, an expression, a statement, or a tuple of places, outermost first


def _require(holds: object, place: Place, rule: str, *args: object, why: str = "", hint: str = "") -> None:
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
    place = where, e
    for node in E.walk(e):
        _verify_node(node, place)
    for node in () if guarded else E.walk(e, operands=_evaluated):
        if node.op == "read":
            _verify_range(node.attr, node.args, place)


def _verify_node(e: Expr, place: Place) -> None:
    types = [a.dtype for a in e.args]
    _require(e.dtype in BITS, place, "unknown dtype `{}`", e.dtype)
    match e.op:
        case "const":
            _require(not e.args and _representable(e.attr, e.dtype), place, "the constant {!r} is no {}", e.attr, e.dtype)
        case "var":
            pass
        case "read":
            name, rank = e.attr.name, len(e.attr.shape)
            _require(len(types) == rank, place, "`{}` has {} dimensions and is read with {} indices", name, rank, len(types))
            for t in types:
                _require(t == INDEX, place, "an index of `{}` is {} instead of {}", name, t, INDEX)
            _require(e.dtype == e.attr.dtype, place, "a read of `{}` is {} instead of {}", name, e.dtype, e.attr.dtype)
        case "reduce":
            reducer, axes = e.attr
            _require(types == [e.dtype], place, "a reduction of {} gives {}", ", ".join(types), e.dtype)
            for t in _dtypes(reducer):
                _require(t == e.dtype, place, "the reducer `{}` of {} reduces {}", reducer.name, t, e.dtype)
            closed = reducer.identity.op == "const" and set(E.variables(reducer.combine)) <= {reducer.lhs, reducer.rhs}
            why = "its identity must be a constant, its combination must use nothing but lhs and rhs"
            _require(closed, place, "the reducer `{}` depends on something outside of it", reducer.name, why=why)
            different = len(set(axes)) == len(axes) and all(v.op == "var" and v.dtype == INDEX and v.attr.lo == 0 for v in axes)
            _require(different, place, "reduction axes must be different variables that start at 0")
        case "cast" | "bitcast":
            fits = len(types) == 1 and (e.op == "cast" or BITS[types[0]] == BITS[e.dtype])
            why = "it takes one operand, and a bitcast keeps its width"
            _require(fits, place, "{} of {} to {}", e.op, ", ".join(types), e.dtype, why=why)
        case op if op in E.ARITY:
            operands = types[1:] if op == "select" and types[:1] == ["bool"] else types
            fits = len(types) == E.ARITY[op] and len(set(operands)) == 1
            fits = fits and e.dtype == ("bool" if op in E.COMPARISON or op in E.PREDICATES else operands[0])
            _require(fits, place, "`{}` of ({}) gives {}", op, ", ".join(types), e.dtype)
            _require(_defined(op, operands[0]), place, "`{}` is not defined for {}", op, operands[0])
        case _:
            _require(False, place, "unknown operator `{}`", e.op)


def _defined(op: str, dtype: str) -> bool:
    if op in E.COMPARISON or op in ("min", "max", "select"):
        return True
    if dtype == "bool":
        return op in ("and", "or", "xor", "not")
    if op in E.BITWISE or op in ("not", "popcount"):
        return is_integer(dtype)
    return is_float(dtype) or (op in ("neg", "abs", *E.ARITHMETIC) and op != "div")


def _representable(value: object, dtype: str) -> bool:
    if is_float(dtype) or dtype == "bool":
        return type(value) is (bool if dtype == "bool" else float)
    lo, hi = integer_range(dtype)
    return type(value) is int and lo <= value <= hi


def _dtypes(reducer: E.Reducer) -> list[str]:
    return [part.dtype for part in (reducer.lhs, reducer.rhs, reducer.combine, reducer.identity)]


def _evaluated(e: Expr) -> Sequence[Expr]:
    """The operands that are evaluated whenever an expression is."""
    if e.op == "reduce" and any(map(_empty, e.attr[1])):
        return ()
    return e.args[:1] if e.op == "select" else e.args


def _empty(v: Expr) -> bool:
    """Whether the variable has no value at all."""
    return v.attr.hi is not None and v.attr.lo is not None and v.attr.lo > v.attr.hi


def _verify_range(source: Any, indices: Sequence[Expr], place: Place) -> None:
    for position, (index, extent) in enumerate(zip(indices, source.shape, strict=True)):
        (lo, hi), largest = bounds(index), bounds(extent)[1]
        outside = (hi is not None and hi < 0) or (lo is not None and largest is not None and lo >= largest)
        possible = not outside or any(map(_empty, E.variables(index)))
        what = "index {} of `{}` is {}, its extent is {}"
        _require(possible, place, what, position, source.name, index, extent, why="this is never in range")


def _verify_loop_range(v: Expr, extent: Dim, where: Place) -> None:
    """The range of a loop variable must cover its loop: proofs rely on it."""
    fits = v.op == "var" and v.dtype == INDEX and v.attr.lo is not None and v.attr.lo <= 0
    _require(fits, where, "`{}` cannot be the variable of a loop", v, why=f"it must be an {INDEX} variable whose range holds 0")
    for limit in (v.attr.extent, None if v.attr.hi is None else v.attr.hi + 1):
        covers = limit is None or same_dim(limit, extent) or prove(as_expr(extent) <= limit)
        why = "proofs rely on the range"
        _require(covers, where, "`{}` runs below {}, its declared range ends below {}", v.name, extent, limit, why=why)


# ---------------------------------------------------------------- tensor expressions


def verify_te(outputs: Sequence[te.Tensor]) -> None:
    """Axes that agree with shapes, bodies of the declared dtype, no unbound axes, externs that fit their tensors."""
    found = dict.fromkeys(outputs)
    stack = list(found)
    while stack:
        t = stack.pop()
        for source in t.inputs:
            read = isinstance(source, te.Tensor)
            _require(read, f"tensor `{t.name}`", "a tensor expression reads the buffer `{}`", source.name)
        stack += (new := [source for source in t.inputs if source not in found])
        found |= dict.fromkeys(new)
    dims = {v for t in found for d in t.shape if isinstance(d, Expr) for v in E.variables(d)}
    for t in found:
        where = f"tensor `{t.name}`"
        _require(t.dtype in BITS, where, "unknown dtype `{}`", t.dtype)
        if t.extern is not None:
            _verify_extern(t.extern, t, where)
        elif t.body is not None:
            _verify_compute(t, t.body, dims, where)


def _verify_compute(t: te.Tensor, body: Expr, dims: Collection[Expr], where: str) -> None:
    different = len(set(t.axes))
    _require(len(t.axes) == len(t.shape) == different, where, "{} different axes for {} dimensions", different, len(t.shape))
    for v, extent in zip(t.axes, t.shape, strict=True):
        _verify_loop_range(v, extent, where)
    _require(body.dtype == t.dtype, where, "the body is {}, the tensor {}", body.dtype, t.dtype)
    verify_expr(body, where, guarded=any(map(_empty, t.axes)))
    for e in E.walk(body):
        own = e.op != "reduce" or set(t.axes).isdisjoint(e.attr[1])
        _require(own, where, "an axis of the tensor is reduced over as well", hint="give te.reduce_axis another name")
    for v in E.free_variables(body):
        looks_like_axis = v.attr.extent is not None or (v.attr.lo == 0 and v.attr.hi is not None)
        bound = v in t.axes or v in dims or (v.dtype == INDEX and not looks_like_axis)
        _require(bound, where, "the variable `{}` is not bound", v.name, why="it is no axis of this tensor and no symbolic dim")


def _verify_extern(program: te.Extern, t: te.Tensor, where: str) -> None:
    fits = len(program.inputs) == len(program.parameters) and 0 <= t.index < len(program.results)
    _require(fits, where, "an extern has one parameter for each input, and its tensors are its results")
    for source, b in [*zip(program.inputs, program.parameters, strict=True), (t, program.results[t.index])]:
        _require(source.dtype == b.dtype and same_shape(source.shape, b.shape), where, "`{!r}` does not fit `{!r}`", source, b)
    _Loops(where, None, (*program.parameters, *program.results), program.results).statement(program.body)


# ---------------------------------------------------------------- loop programs


def verify_kernel(kernel: L.Kernel) -> None:
    """Scopes of buffers and variables, unique names, loop kinds and ranges, dtypes and index counts of accesses."""
    where = f"kernel `{kernel.name}`"
    for what, names in (("buffers", [b.name for b in kernel.buffers]), ("scalars", [v.name for v in kernel.scalars])):
        _require(len(set(names)) == len(names), where, "two {} have the same name", what, why=", ".join(names))
    _require(all(v.op == "var" and v.dtype == INDEX for v in kernel.scalars), where, "a scalar is not an {} variable", INDEX)
    _require(set(kernel.outputs) <= set(kernel.buffers), where, "an output is not among the buffers")
    checker = _Loops(where, set(kernel.scalars), (), kernel.outputs)
    for b in kernel.buffers:
        _require(b.scope == "global", where, "the parameter `{}` is in {} memory", b.name, b.scope)
        checker.declare(b, where)
    checker.statement(kernel.body)


class _Loops:
    """Walks statements with the scopes around them. `scalars` None: any variable that no loop binds is a symbolic dim."""

    def __init__(self, where: str, scalars: set[Expr] | None, buffers: Sequence[L.Buffer], writable: Sequence[L.Buffer]) -> None:
        self.where, self.scalars, self.buffers, self.writable = where, scalars, set(buffers), set(writable)
        self.loops: list[L.For] = []
        self.names: set[str] = set()
        self.guarded = False

    def declare(self, b: L.Buffer, place: Place) -> None:
        _require(b.dtype in BITS, place, "unknown dtype `{}` of `{}`", b.dtype, b.name)
        _require(b.scope in L.SCOPES, place, "unknown scope `{}` of `{}`", b.scope, b.name, hint=f"one of {', '.join(L.SCOPES)}")
        _require(b not in self.buffers, place, "the buffer `{}` is declared twice", b.name)
        fixed = b.scope != "register" or all(isinstance(d, int) for d in b.shape)
        _require(fixed, place, "the register buffer `{}` has a symbolic shape", b.name, why="registers cannot be indexed by size")
        for d in b.shape:
            _require(not isinstance(d, int) or d >= 0, place, "the buffer `{}` has an extent of {}", b.name, d)
            self.expression(as_expr(d), place)
            what = "an extent of the buffer `{}` is looked up in another one: {}"
            _require(not E.reads(as_expr(d)), place, what, b.name, d, why="room is made before anything is computed")
        self.buffers.add(b)

    def expression(self, e: Expr, place: Place) -> None:
        verify_expr(e, place, self.guarded)
        bound = {f.var for f in self.loops}
        for node in E.walk(e):
            if node.op == "var":
                free = node in self.scalars if self.scalars is not None else node.attr.extent is None
                why = "it is no scalar, and no loop around binds it"
                _require(free or node in bound, place, "the variable `{}` is not bound", node.name, why=why)
            elif node.op == "read":
                why = "it is no parameter and not allocated here"
                _require(node.attr in self.buffers, place, "`{}` is read outside of its scope", node.attr.name, why=why)
            _require(node.op != "reduce", place, "a loop program contains a reduction", hint="lower it to a loop with Accumulate")

    def statement(self, stmt: L.Stmt) -> None:
        names = ", ".join(f.var.name for f in self.loops)
        place = f"{self.where}, loops {names}" if names else self.where, stmt
        match stmt:
            case L.Block(stmts):
                for s in stmts:
                    self.statement(s)
            case L.For():
                self.loop(stmt, place)
            case L.If(cond) | L.While(cond):
                _require(cond.dtype == "bool", place, "a condition is {} instead of bool", cond.dtype)
                self.expression(cond, place)
                self.inside(stmt, guarded=True)
            case L.Store(b, indices, value):
                self.store(place, b, indices, value)
            case L.Accumulate(b, indices, value, reducer):
                self.store(place, b, indices, value)
                _require(set(_dtypes(reducer)) == {b.dtype}, place, "the reducer `{}` is not one of {}", reducer.name, b.dtype)
            case L.Allocate(b, body):
                self.declare(b, place)
                self.writable.add(b)
                self.statement(body)
                self.buffers.discard(b)
            case L.Prefetch(b, indices):
                for i in indices:
                    self.expression(i, place)
                fits = b in self.buffers and [i.dtype for i in indices] == [INDEX] * len(b.shape)
                _require(fits, place, "no element of `{}` is prefetched", b.name)
            case L.Call(instruction, body):
                self.statement(body)
                match(instruction, body)
            case _:
                _require(False, self.where, "{} is no statement", type(stmt).__name__)

    def loop(self, stmt: L.For, place: Place) -> None:
        v, extent, kind, kinds = stmt.var, as_expr(stmt.extent), stmt.kind, [f.kind for f in self.loops]
        _require(kind in L.KINDS, place, "unknown kind of loop `{}`", kind, hint=f"one of {', '.join(L.KINDS)}")
        self.expression(extent, place)
        _require(extent.dtype == INDEX, place, "the extent of a loop is {}", extent.dtype)
        _verify_loop_range(v, stmt.extent, place)
        _require(v.name not in self.names, place, "two loops have the name `{}`", v.name, why="loop names are unique within a kernel")
        self.names.add(v.name)
        fixed = kind not in (L.VECTORIZED, L.UNROLLED) or isinstance(stmt.extent, int)
        _require(fixed, place, "the {} loop `{}` has the symbolic extent {}", kind, v.name, extent, hint="split it first")
        _require(kind not in L.GPU_AXES or kind not in kinds, place, "two nested loops are bound to {}", kind)
        outside = kind != L.PARALLEL or L.VECTORIZED not in kinds
        _require(outside, place, "the parallel loop `{}` is inside a vectorized one", v.name)
        # A loop that has no iteration, or none in some iterations of the loops around: nothing in it is sure to happen.
        varies = not {f.var for f in self.loops}.isdisjoint(E.variables(extent))
        may_be_empty = stmt.extent == 0 or (varies and not prove(1 <= extent))
        self.loops.append(stmt)
        self.inside(stmt, self.guarded or may_be_empty)
        self.loops.pop()

    def inside(self, stmt: L.Stmt, guarded: bool) -> None:
        """The statements directly inside, which `guarded` says may be skipped."""
        outer, self.guarded = self.guarded, guarded
        for child in L.children(stmt):
            self.statement(child)
        self.guarded = outer

    def store(self, place: Place, b: L.Buffer, indices: Sequence[Expr], value: Expr) -> None:
        why = "it is no parameter and not allocated here"
        _require(b in self.buffers, place, "`{}` is written outside of its scope", b.name, why=why)
        _require(b in self.writable, place, "`{}` is written but not an output", b.name)
        rank = len(b.shape)
        _require(len(indices) == rank, place, "`{}` has {} dimensions and is written with {} indices", b.name, rank, len(indices))
        for index in indices:
            _require(index.dtype == INDEX, place, "an index of `{}` is {} instead of {}", b.name, index.dtype, INDEX)
            self.expression(index, place)
        _require(value.dtype == b.dtype, place, "a {} is stored in `{}` of {}", value.dtype, b.name, b.dtype)
        self.expression(value, place)
        if not self.guarded:
            _verify_range(b, indices, place)


# ---------------------------------------------------------------- graphs


def verify_graph(graph: Graph) -> None:
    """Single assignment, definition before use, outputs that operators really give, closed bodies with fitting signatures."""
    where = f"graph `{graph.name}`"
    known: set[Value] = set()
    _require(len({v.name for v in graph.inputs}) == len(graph.inputs), where, "two inputs have the same name")

    def define(v: Value, place: str) -> None:
        _require(v not in known, place, "`{}` is defined twice", v.name)
        known.add(v)
        _require(v.dtype in BITS, place, "unknown dtype `{}` of `{}`", v.dtype, v.name)
        for d in v.shape:
            if isinstance(d, Expr):
                verify_expr(d, f"{place}, shape of `{v.name}`")
            else:
                _require(d >= 0, place, "`{}` has an extent of {}", v.name, d)
        if v.layout is not None:
            _verify_layout(v.layout, v, place)

    for v in graph.inputs:
        define(v, where)
    for v, array in graph.constants.items():
        define(v, where)
        fits = array.shape == v.shape and array.dtype == to_numpy(v.dtype)
        _require(fits, where, "the constant `{!r}` holds {}{}", v, array.dtype.name, list(array.shape))
    for node in graph.nodes:
        place = f"{where}, node `{node.name}` ({node.op.name})"
        for value in node.inputs:
            if value is not None:
                why = "bodies are closed: pass it in"
                _require(value in known, place, "`{}` is used but not defined before", value.name, why=why)
        for v in node.outputs:
            define(v, place)
        for attr in node.attrs.values():
            _verify_attribute(attr, place)
        if node.op in STRUCTURAL:
            _verify_structural(node, place)
        else:
            _verify_application(node, place)
    for v in graph.outputs:
        _require(v in known, where, "the output `{}` is not defined", v.name)


def _verify_layout(layout: Layout, v: Value, place: str) -> None:
    """Every axis is stored exactly once: its pieces, innermost first, continue each other up to an uncut one."""
    fits, why = layout.rank == len(v.shape), f"the value has {len(v.shape)}"
    _require(fits, place, "the layout {} of `{}` is for {} dimensions", layout, v.name, layout.rank, why=why)
    for axis in range(layout.rank):
        pieces = sorted((p for p in layout.pieces if p.axis == axis), key=lambda p: p.div)
        ends = [1, *(p.div * (p.mod or 1) for p in pieces)]
        once = pieces and all(p.div == end and (p.mod is None) == (p is pieces[-1]) for p, end in zip(pieces, ends, strict=False))
        _require(once, place, "the layout {} of `{}` does not store axis {} exactly once", layout, v.name, axis)
        halo = all(min(p.before, p.after) >= 0 and (len(pieces) == 1 or p.before == p.after == 0) for p in pieces)
        _require(halo, place, "the layout {} of `{}` has a halo around a part of axis {}", layout, v.name, axis)


def _verify_attribute(value: Any, place: str) -> None:
    if isinstance(value, tuple):
        for item in value:
            _verify_attribute(item, place)
        return
    fits = value is None or (isinstance(value, bool | int | float | str | Expr) and not isinstance(value, np.generic))
    _require(fits, place, "an attribute is a {}", type(value).__name__, hint="None, bool, int, float, str, dims and tuples of these")


def _verify_application(node: Node, place: str) -> None:
    _require(not node.bodies, place, "only structural operators have bodies")
    _require(node.op.function is not None, place, "the operator `{}` has no definition", node.op.name)
    try:
        derived = infer(node.op, node.inputs, node.attrs, node.name).outputs
        verify_te(derived)
    except TcompError as error:
        raise error.restated(IRError, where=f"{place}: {error.where}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        raise IRError(f"the operator does not take these inputs and attributes: {error}", where=place) from error
    _verify_types("the operator", derived, "the node declares", node.outputs, place)


def _verify_types(giver: str, given: Sequence[Any], taker: str, taken: Sequence[Any], place: str, layouts: bool = False) -> None:
    _require(len(given) == len(taken), place, "{} gives {} values, {} {}", giver, len(given), taker, len(taken))
    for a, b in zip(given, taken, strict=True):
        same = a.dtype == b.dtype and same_shape(a.shape, b.shape) and (not layouts or a.layout == b.layout)
        _require(same, place, "{} gives {!r}, {} {!r}", giver, a, taker, b)


def _verify_structural(node: Node, place: str) -> None:
    wanted = 2 if node.op is IF else 1
    _require(len(node.bodies) == wanted, place, "`{}` has {} bodies instead of {}", node.op.name, len(node.bodies), wanted)
    inputs = [v for v in node.inputs if v is not None]
    _require(len(inputs) == len(node.inputs), place, "an input of a structural operator is left out")
    for body in node.bodies:
        try:
            verify_graph(body)
        except IRError as error:
            raise error.restated(IRError, where=f"{place}: {error.where}") from error
    if node.op not in (KERNEL, IF):
        _verify_loop(node, inputs, place)
        return
    if node.op is KERNEL:
        _require(all(inner.op not in STRUCTURAL for inner in node.bodies[0].nodes), place, "a kernel contains a structural operator")
    else:
        single = inputs and inputs[0].dtype == "bool" and all(d == 1 for d in inputs[0].shape)
        _require(single, place, "the condition is not one bool")
        inputs = inputs[1:]
    for body in node.bodies:
        _verify_types("the node", inputs, "the body takes", body.inputs, place, layouts=node.op is KERNEL)
        _verify_types("the body", body.outputs, "the node declares", node.outputs, place, layouts=node.op is KERNEL)


def _verify_loop(node: Node, inputs: Sequence[Value], place: str) -> None:
    body, attrs, outputs = node.bodies[0], node.attrs, node.outputs
    missing = {"trips", "carried", "scanned", "reverse_in", "reverse_out", "condition"} - set(attrs)
    _require(not missing, place, "a loop lacks the attribute `{}`", min(missing, default=""))
    trips, carried, scanned = attrs["trips"], attrs["carried"], attrs["scanned"]
    stacked = len(outputs) - carried
    what = "{} carried and {} scanned values do not fit {} inputs, {} outputs"
    _require(len(inputs) >= carried + scanned and stacked >= 0, place, what, carried, scanned, len(inputs), len(outputs))
    flags = len(attrs["reverse_in"]) == scanned and len(attrs["reverse_out"]) == stacked
    _require(flags, place, "reverse_in and reverse_out need one flag for each scanned input and stacked output")

    def rows(values: Sequence[Value]) -> list[Value]:
        for v in values:
            whole = v.shape and same_dim(v.shape[0], trips)
            _require(whole, place, "`{!r}` does not have one row for each of the {} iterations", v, trips)
        return [Value(v.name, v.dtype, v.shape[1:]) for v in values]

    given = [Value("iteration", INDEX, ()), *inputs[:carried], *rows(inputs[carried : carried + scanned]), *inputs[carried + scanned :]]
    results = [*outputs[:carried], *rows(outputs[carried:]), *([Value("condition", "bool", ())] if attrs["condition"] else [])]
    _verify_types("the node", given, "the body takes", body.inputs, place)
    _verify_types("the body", body.outputs, "the node declares", results, place)
    _verify_types("the node", inputs[:carried], "the carried outputs are", outputs[:carried], place)


# ---------------------------------------------------------------- programs


def verify_program(program: P.Program) -> None:
    """Known memories that may be written where they are, places and sizes over dims and loops around, kernels called alike everywhere."""
    fits = len({v.name for v in program.dims}) == len(program.dims) and all(v.op == "var" and v.dtype == INDEX for v in program.dims)
    _require(fits, "program", "the dims are not different {} variables", INDEX, why=", ".join(map(str, program.dims)))
    known = frozenset(program.dims)
    for size in (program.workspace, *(d for shape in program.output_shapes for d in shape)):
        _verify_size(size, known, "program")
    parameters: dict[str, tuple[int, int]] = {}
    for call in P.calls(program.steps):
        count = len(call.buffers), len(call.scalars)
        alike = parameters.setdefault(call.symbol, count) == count
        _require(alike, f"call `{call.label}`", "kernel `{}` is called with different parameters", call.symbol)
    _verify_steps(program, program.steps, known)


def _verify_steps(program: P.Program, steps: Sequence[P.Step], known: frozenset[Expr]) -> None:
    for step in steps:
        match step:
            case P.Call(symbol, buffers, scalars, label):
                where = f"call `{label}` of `{symbol}`"
                for size in scalars:
                    _verify_size(size, known, where)
                for ref in buffers:
                    _verify_ref(program, ref, known, where)
            case P.Branch(cond, then, otherwise):
                _verify_ref(program, cond, known, f"if {cond}", 1)
                _verify_steps(program, then, known)
                _verify_steps(program, otherwise, known)
            case P.Repeat(var, trips, body, condition):
                where = f"for {var}"
                _verify_size(trips, known, where)
                _verify_loop_range(var, trips, where)
                _require(var.name not in {v.name for v in known}, where, "`{}` is the name of a dim, or of a loop around", var)
                if condition is not None:
                    _verify_ref(program, condition, known | {var}, where, 1)
                _verify_steps(program, body, known | {var})
            case P.Copy(dst, src, count):
                where = f"copy from {src} to {dst}"
                _verify_size(count, known, where)
                lo, hi = bounds(count)
                _require(hi is None or hi >= 0, where, "{} bytes are copied", count)
                _verify_ref(program, src, known, where, lo or 0)
                _verify_ref(program, dst, known, where, lo or 0, written=True)
                behind, ahead = bounds(difference(dst.offset, src.offset))
                distance = None if behind is None or ahead is None else max(-behind, ahead)
                disjoint = (dst.base, dst.index) != (src.base, src.index) or distance is None or distance >= (lo or 0)
                _require(disjoint, where, "a copy of {} bytes overlaps itself", count)
            case P.SetIndex(dst, value):
                where = f"set {dst}"
                _verify_size(value, known, where)
                _verify_ref(program, dst, known, where, 8, written=True)


def _verify_ref(program: P.Program, ref: P.Ref, known: frozenset[Expr], where: str, size: int = 0, written: bool = False) -> None:
    """A place of `size` bytes at least; what a kernel writes is not known here."""
    _require(ref.base in P.MEMORIES, where, "unknown memory `{}`", ref.base, hint=f"one of {', '.join(P.MEMORIES)}")
    count = {"output": len(program.output_shapes), "input": None}.get(ref.base, 1)
    _require(ref.index >= 0 and (count is None or ref.index < count), where, "there is no {} {}", ref.base, ref.index)
    _require(not written or ref.base not in ("input", "weights"), where, "`{}` is written", ref, why="inputs and weights are read only")
    _verify_size(ref.offset, known, where)
    lo, hi = bounds(ref.offset)
    end = bounds(program.workspace)[1] if ref.base == "workspace" else 8 * len(program.dims) if ref.base == "dims" else None
    inside = (hi is None or hi >= 0) and (lo is None or end is None or lo + size <= end)
    _require(inside, where, "`{}` is never inside of the memory", ref, why="" if end is None else f"it has {end} bytes at most")


def _verify_size(size: Dim, known: Collection[Expr], where: str) -> None:
    e = as_expr(size)
    verify_expr(e, where)
    why = f"a size is an {INDEX} over dims and loops, and looks nothing up"
    _require(e.dtype == INDEX and not E.reads(e), where, "`{}` is no size", e, why=why)
    for v in E.variables(e):
        _require(v in known, where, "the variable `{}` is not bound", v.name, why="it is no dim, and no loop around binds it")
