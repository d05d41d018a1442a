"""Verifiers: what must hold of every expression, tensor expression, loop program and graph between passes.

Each raises `IRError` that names the place and the rule. They check types, scopes, ranges that later proofs rely on, and
accesses that are out of range for certain; they do not prove accesses in range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from tcomp.errors import IRError, TcompError
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir import te
from tcomp.ir.dtypes import BITS, integer_range, is_float, is_integer, to_numpy
from tcomp.ir.expr import ARITHMETIC, ARITY, BITWISE, COMPARISON, INDEX, PREDICATES, Dim, Expr, as_expr, bounds
from tcomp.ir.graph import IF, KERNEL, STRUCTURAL, Graph, Node, Value, infer
from tcomp.ir.instruction import match
from tcomp.ir.layout import Layout
from tcomp.ir.program import MEMORIES, NUMBERED, Branch, Call, Copy, Program, Ref, Repeat, SetIndex, Step, calls
from tcomp.ir.simplify import difference, prove, same_dim, same_shape


def _fail(what: str, where: object, why: str = "", hint: str = "") -> NoReturn:
    text = str(where)
    raise IRError(what, where=text if len(text) <= 300 else text[:300] + " ...", why=why, hint=hint)


class _At:
    """A place inside another, printed only when something is wrong there: its first line is enough."""

    __slots__ = ("outer", "subject")

    def __init__(self, outer: object, subject: object) -> None:
        self.outer, self.subject = outer, subject

    def __str__(self) -> str:
        outer, subject = str(self.outer), str(self.subject).split("\n", 1)[0]
        return f"{outer}: {subject}" if outer else subject


# ---------------------------------------------------------------- expressions


def verify_expr(e: Expr, where: object = "", guarded: bool = False) -> None:
    """Operators, operand counts and dtypes; reads with one index per dimension; no access that is certainly out of range.

    `guarded` says that a condition outside may keep the expression from being evaluated: then ranges are not checked.
    """
    place = _At(where, e)
    for node in E.walk(e):
        _verify_node(node, place)
    if guarded:
        return
    for node in _unguarded(e):
        if node.op == "read":
            _verify_range(node.attr, node.args, place)


def _verify_node(e: Expr, place: object) -> None:
    types = [a.dtype for a in e.args]
    if e.dtype not in BITS:
        _fail(f"unknown dtype `{e.dtype}`", place)
    match e.op:
        case "const":
            _verify_const(e, place)
        case "var":
            pass
        case "read":
            if len(e.args) != len(e.attr.shape):
                _fail(f"`{e.attr.name}` has {len(e.attr.shape)} dimensions and is read with {len(e.args)} indices", place)
            if any(t != INDEX for t in types):
                _fail(f"an index of `{e.attr.name}` is {next(t for t in types if t != INDEX)} instead of {INDEX}", place)
            if e.dtype != e.attr.dtype:
                _fail(f"a read of `{e.attr.name}` is {e.dtype} instead of {e.attr.dtype}", place)
        case "reduce":
            _verify_reduce(e, place)
        case "cast" | "bitcast":
            if len(types) != 1 or (e.op == "bitcast" and BITS[types[0]] != BITS[e.dtype]):
                _fail(f"{e.op} of {', '.join(types)} to {e.dtype}", place, why="it takes one operand, and a bitcast keeps its width")
        case op if op in ARITY:
            operands = types[1:] if op == "select" and types[:1] == ["bool"] else types
            fits = len(types) == ARITY[op] and len(set(operands)) == 1
            if not fits or e.dtype != ("bool" if op in COMPARISON or op in PREDICATES else operands[0]):
                _fail(f"`{op}` of ({', '.join(types)}) gives {e.dtype}", place)
            if not _defined(op, operands[0]):
                _fail(f"`{op}` is not defined for {operands[0]}", place)
        case _:
            _fail(f"unknown operator `{e.op}`", place)


def _defined(op: str, dtype: str) -> bool:
    """Whether an operator takes operands of a type."""
    if op in COMPARISON or op in ("min", "max", "select"):
        return True
    if op in BITWISE:
        return is_integer(dtype) or (dtype == "bool" and op in ("and", "or", "xor"))
    if op == "not":
        return not is_float(dtype)
    if op == "popcount":
        return is_integer(dtype)
    return is_float(dtype) or (is_integer(dtype) and op in ("neg", "abs", *ARITHMETIC) and op != "div")


def _verify_const(e: Expr, place: object) -> None:
    if is_float(e.dtype):
        fits = isinstance(e.attr, float)
    elif e.dtype == "bool":
        fits = isinstance(e.attr, bool)
    else:
        lo, hi = integer_range(e.dtype)
        fits = isinstance(e.attr, int) and not isinstance(e.attr, bool) and lo <= e.attr <= hi
    if not fits or e.args:
        _fail(f"the constant {e.attr!r} is no {e.dtype}", place)


def _verify_reduce(e: Expr, place: object) -> None:
    reducer, axes = e.attr
    if len(e.args) != 1 or e.dtype != e.args[0].dtype:
        _fail(f"a reduction of {e.args[0].dtype} gives {e.dtype}", place)
    for part in (reducer.lhs, reducer.rhs, reducer.combine, reducer.identity):
        if part.dtype != e.dtype:
            _fail(f"the reducer `{reducer.name}` of {part.dtype} reduces {e.dtype}", place)
    if reducer.identity.op != "const" or not set(E.variables(reducer.combine)) <= {reducer.lhs, reducer.rhs}:
        why = "its identity must be a constant, its combination must use nothing but lhs and rhs"
        _fail(f"the reducer `{reducer.name}` depends on something outside of it", place, why=why)
    if len(set(axes)) != len(axes) or any(v.op != "var" or v.dtype != INDEX or v.attr.lo != 0 for v in axes):
        _fail("reduction axes must be different variables that start at 0", place)


def _unguarded(root: Expr) -> Iterator[Expr]:
    """Sub-expressions that are evaluated whenever the whole is: the sides of a select are not entered."""
    seen, stack = {root}, [root]
    while stack:
        e = stack.pop()
        yield e
        if e.op == "reduce" and any(_empty(v) for v in e.attr[1]):
            continue
        for a in e.args[:1] if e.op == "select" else e.args:
            if a not in seen:
                seen.add(a)
                stack.append(a)


def _empty(v: Expr) -> bool:
    """Whether the variable has, or may have, no value at all."""
    return v.attr.hi is not None and v.attr.lo is not None and v.attr.lo > v.attr.hi


def _verify_range(source: Any, indices: Sequence[Expr], place: object) -> None:
    for position, (index, extent) in enumerate(zip(indices, source.shape, strict=True)):
        (lo, hi), largest = bounds(index), bounds(extent)[1]
        outside = (hi is not None and hi < 0) or (lo is not None and largest is not None and lo >= largest)
        if outside and not any(map(_empty, E.variables(index))):
            _fail(f"index {position} of `{source.name}` is {index}, its extent is {extent}", place, why="this is never in range")


# ---------------------------------------------------------------- tensor expressions


def verify_te(outputs: Sequence[te.Tensor]) -> None:
    """Axes that agree with shapes, bodies of the declared dtype, no unbound axes, externs that fit their tensors."""
    tensors = _reachable(outputs)
    dims = {v for t in tensors for d in t.shape if isinstance(d, Expr) for v in E.variables(d)}
    for t in tensors:
        where = f"tensor `{t.name}`"
        if t.dtype not in BITS:
            _fail(f"unknown dtype `{t.dtype}`", where)
        if t.extern is not None:
            _verify_extern(t.extern, t, where)
        elif t.body is not None:
            _verify_compute(t, t.body, dims, where)


def _reachable(outputs: Sequence[te.Tensor]) -> list[te.Tensor]:
    """The outputs and all that they read, which must be tensors."""
    found = dict.fromkeys(outputs)
    stack = list(found)
    while stack:
        t = stack.pop()
        for source in t.inputs:
            if not isinstance(source, te.Tensor):
                _fail(f"a tensor expression reads the buffer `{source.name}`", f"tensor `{t.name}`")
            if source not in found:
                found[source] = None
                stack.append(source)
    return list(found)


def _verify_compute(t: te.Tensor, body: Expr, dims: Collection[Expr], where: str) -> None:
    if len(t.axes) != len(t.shape) or len(set(t.axes)) != len(t.axes):
        _fail(f"{len(set(t.axes))} different axes for {len(t.shape)} dimensions", where)
    for v, extent in zip(t.axes, t.shape, strict=True):
        _verify_loop_range(v, extent, where)
    if body.dtype != t.dtype:
        _fail(f"the body is {body.dtype}, the tensor {t.dtype}", where)
    verify_expr(body, where, guarded=any(map(_empty, t.axes)))
    for e in E.walk(body):
        if e.op == "reduce" and set(e.attr[1]) & set(t.axes):
            _fail("an axis of the tensor is reduced over as well", where, hint="give te.reduce_axis another name")
    for v in E.free_variables(body):
        bound = v in t.axes or v in dims
        looks_like_axis = v.attr.extent is not None or (v.attr.lo == 0 and v.attr.hi is not None)
        if not bound and (looks_like_axis or v.dtype != INDEX):
            _fail(f"the variable `{v.name}` is not bound", where, why="it is no axis of this tensor and no symbolic dim")


def _verify_loop_range(v: Expr, extent: Dim, where: object) -> None:
    """The range of a loop variable must cover its loop: proofs rely on it."""
    if v.op != "var" or v.dtype != INDEX or v.attr.lo is None or v.attr.lo > 0:
        _fail(f"`{v}` cannot be the variable of a loop", where, why=f"it must be an {INDEX} variable whose range holds 0")
    limits = [d for d in (v.attr.extent, None if v.attr.hi is None else v.attr.hi + 1) if d is not None]
    for limit in limits:
        if not same_dim(limit, extent) and not prove(as_expr(extent) <= limit):
            _fail(f"`{v.name}` runs below {extent}, its declared range ends below {limit}", where, why="proofs rely on the range")


def _verify_extern(program: te.Extern, t: te.Tensor, where: str) -> None:
    pairs = [*zip(program.inputs, program.parameters, strict=False)]
    if len(program.inputs) != len(program.parameters) or not 0 <= t.index < len(program.results):
        _fail("an extern has one parameter for each input, and its tensors are its results", where)
    for source, b in [*pairs, (t, program.results[t.index])]:
        if source.dtype != b.dtype or not same_shape(source.shape, b.shape):
            _fail(f"`{source!r}` does not fit `{b!r}`", where)
    checker = _Loops(where, None)
    checker.buffers.update(program.parameters)
    checker.buffers.update(program.results)
    checker.writable.update(program.results)
    checker.statement(program.body)


# ---------------------------------------------------------------- loop programs


def verify_kernel(kernel: L.Kernel) -> None:
    """Scopes of buffers and variables, unique names, loop kinds and ranges, dtypes and index counts of accesses."""
    where = f"kernel `{kernel.name}`"
    for what, names in (("buffers", [b.name for b in kernel.buffers]), ("scalars", [v.name for v in kernel.scalars])):
        if len(set(names)) != len(names):
            _fail(f"two {what} have the same name", where, why=", ".join(names))
    if any(v.op != "var" or v.dtype != INDEX for v in kernel.scalars):
        _fail(f"a scalar is not an {INDEX} variable", where)
    if not set(kernel.outputs) <= set(kernel.buffers):
        _fail("an output is not among the buffers", where)
    checker = _Loops(where, set(kernel.scalars))
    for b in kernel.buffers:
        if b.scope != "global":
            _fail(f"the parameter `{b.name}` is in {b.scope} memory", where)
        checker.declare(b, where)
    checker.writable.update(kernel.outputs)
    checker.statement(kernel.body)


class _Loops:
    """Walks statements with the scopes around them. `scalars` None: any variable that no loop binds is a symbolic dim."""

    def __init__(self, where: str, scalars: set[Expr] | None) -> None:
        self.where, self.scalars = where, scalars
        self.buffers: set[L.Buffer] = set()
        self.writable: set[L.Buffer] = set()
        self.loops: list[L.For] = []
        self.names: set[str] = set()
        self.guarded = False

    def place(self, stmt: L.Stmt) -> _At:
        loops = ", ".join(f.var.name for f in self.loops)
        return _At(f"{self.where}, loops {loops}" if loops else self.where, stmt)

    def declare(self, b: L.Buffer, place: object) -> None:
        if b.dtype not in BITS:
            _fail(f"unknown dtype `{b.dtype}` of `{b.name}`", place)
        if b.scope not in L.SCOPES:
            _fail(f"unknown scope `{b.scope}` of `{b.name}`", place, hint=f"one of {', '.join(L.SCOPES)}")
        if b in self.buffers:
            _fail(f"the buffer `{b.name}` is declared twice", place)
        if b.scope == "register" and not all(isinstance(d, int) for d in b.shape):
            _fail(f"the register buffer `{b.name}` has a symbolic shape", place, why="registers cannot be indexed by size")
        for d in b.shape:
            if isinstance(d, int) and d < 0:
                _fail(f"the buffer `{b.name}` has an extent of {d}", place)
            self.expression(as_expr(d), place)
            if E.reads(as_expr(d)):
                _fail(f"an extent of the buffer `{b.name}` is looked up in another one: {d}", place, why="room is made before anything is computed")
        self.buffers.add(b)

    def expression(self, e: Expr, place: object) -> None:
        verify_expr(e, place, self.guarded)
        bound = {f.var for f in self.loops}
        for node in E.walk(e):
            if node.op == "reduce":
                _fail("a loop program contains a reduction", place, hint="lower it to a loop with Accumulate")
            if node.op == "read" and node.attr not in self.buffers:
                _fail(f"`{node.attr.name}` is read outside of its scope", place, why="it is no parameter and not allocated here")
            if node.op == "var" and node not in bound and not self.free(node):
                _fail(f"the variable `{node.name}` is not bound", place, why="it is no scalar, and no loop around binds it")

    def free(self, v: Expr) -> bool:
        """Whether a variable that no loop binds is a symbolic dim."""
        return v in self.scalars if self.scalars is not None else v.attr.extent is None

    def statement(self, stmt: L.Stmt) -> None:
        match stmt:
            case L.Block(stmts):
                for s in stmts:
                    self.statement(s)
            case L.For():
                self.loop(stmt)
            case L.If(cond) | L.While(cond):
                self.condition(cond, stmt)
                self.inside(stmt, guarded=True)
            case L.Store(b, indices, value):
                self.store(stmt, b, indices, value)
            case L.Accumulate(b, indices, value, reducer):
                self.store(stmt, b, indices, value)
                if {x.dtype for x in (reducer.lhs, reducer.rhs, reducer.combine, reducer.identity)} != {b.dtype}:
                    _fail(f"the reducer `{reducer.name}` is not one of {b.dtype}", self.place(stmt))
            case L.Allocate(b, body):
                self.declare(b, self.place(stmt))
                self.writable.add(b)
                self.statement(body)
                self.buffers.discard(b)
            case L.Prefetch(b, indices):
                for i in indices:
                    self.expression(i, self.place(stmt))
                if b not in self.buffers or len(indices) != len(b.shape) or any(i.dtype != INDEX for i in indices):
                    _fail(f"no element of `{b.name}` is prefetched", self.place(stmt))
            case L.Call(instruction, body):
                self.statement(body)
                match(instruction, body)
            case _:
                _fail(f"{type(stmt).__name__} is no statement", self.where)

    def condition(self, cond: Expr, stmt: L.Stmt) -> None:
        if cond.dtype != "bool":
            _fail(f"a condition is {cond.dtype} instead of bool", self.place(stmt))
        self.expression(cond, self.place(stmt))

    def loop(self, stmt: L.For) -> None:
        place = self.place(stmt)
        if stmt.kind not in L.KINDS:
            _fail(f"unknown kind of loop `{stmt.kind}`", place, hint=f"one of {', '.join(L.KINDS)}")
        self.expression(as_expr(stmt.extent), place)
        if as_expr(stmt.extent).dtype != INDEX:
            _fail(f"the extent of a loop is {as_expr(stmt.extent).dtype}", place)
        _verify_loop_range(stmt.var, stmt.extent, place)
        if stmt.var.name in self.names:
            _fail(f"two loops have the name `{stmt.var.name}`", place, why="loop names are unique within a kernel")
        self.names.add(stmt.var.name)
        if stmt.kind in (L.VECTORIZED, L.UNROLLED) and not isinstance(stmt.extent, int):
            _fail(f"the {stmt.kind} loop `{stmt.var.name}` has the symbolic extent {stmt.extent}", place, hint="split it first")
        kinds = [f.kind for f in self.loops]
        if stmt.kind in L.GPU_AXES and stmt.kind in kinds:
            _fail(f"two nested loops are bound to {stmt.kind}", place)
        if stmt.kind == L.PARALLEL and L.VECTORIZED in kinds:
            _fail(f"the parallel loop `{stmt.var.name}` is inside a vectorized one", place)
        self.loops.append(stmt)
        self.inside(stmt, self.guarded or self.may_be_empty(stmt))
        self.loops.pop()

    def inside(self, stmt: L.Stmt, guarded: bool) -> None:
        """The statements directly inside, which `guarded` says may be skipped."""
        outer, self.guarded = self.guarded, guarded
        for child in L.children(stmt):
            self.statement(child)
        self.guarded = outer

    def may_be_empty(self, stmt: L.For) -> bool:
        """Whether the loop has no iteration, or none in some iterations of the loops around: nothing in it is sure to happen."""
        around = {f.var for f in self.loops[:-1]}
        depends = any(v in around for v in E.variables(as_expr(stmt.extent)))
        return stmt.extent == 0 or (depends and not prove(1 <= as_expr(stmt.extent)))

    def store(self, stmt: L.Stmt, b: L.Buffer, indices: Sequence[Expr], value: Expr) -> None:
        place = self.place(stmt)
        if b not in self.buffers:
            _fail(f"`{b.name}` is written outside of its scope", place, why="it is no parameter and not allocated here")
        if b not in self.writable:
            _fail(f"`{b.name}` is written but not an output", place)
        if len(indices) != len(b.shape):
            _fail(f"`{b.name}` has {len(b.shape)} dimensions and is written with {len(indices)} indices", place)
        for index in indices:
            if index.dtype != INDEX:
                _fail(f"an index of `{b.name}` is {index.dtype} instead of {INDEX}", place)
            self.expression(index, place)
        if value.dtype != b.dtype:
            _fail(f"a {value.dtype} is stored in `{b.name}` of {b.dtype}", place)
        self.expression(value, place)
        if not self.guarded:
            _verify_range(b, indices, place)


# ---------------------------------------------------------------- graphs


def verify_graph(graph: Graph) -> None:
    """Single assignment, definition before use, outputs that operators really give, closed bodies with fitting signatures."""
    where = f"graph `{graph.name}`"
    known: set[Value] = set()
    if len({v.name for v in graph.inputs}) != len(graph.inputs):
        _fail("two inputs have the same name", where)

    def define(v: Value, place: str) -> None:
        if v in known:
            _fail(f"`{v.name}` is defined twice", place)
        known.add(v)
        _verify_value(v, place)

    for v in graph.inputs:
        define(v, where)
    for v, array in graph.constants.items():
        define(v, where)
        if array.shape != v.shape or array.dtype != to_numpy(v.dtype):
            _fail(f"the constant `{v!r}` holds {array.dtype.name}{list(array.shape)}", where)
    for node in graph.nodes:
        place = f"{where}, node `{node.name}` ({node.op.name})"
        for value in node.inputs:
            if value is not None and value not in known:
                _fail(f"`{value.name}` is used but not defined before", place, why="bodies are closed: pass it in")
        for v in node.outputs:
            define(v, place)
        for value in node.attrs.values():
            _verify_attribute(value, place)
        if node.op in STRUCTURAL:
            _verify_structural(node, place)
        else:
            _verify_application(node, place)
    for v in graph.outputs:
        if v not in known:
            _fail(f"the output `{v.name}` is not defined", where)


def _verify_value(v: Value, place: str) -> None:
    if v.dtype not in BITS:
        _fail(f"unknown dtype `{v.dtype}` of `{v.name}`", place)
    for d in v.shape:
        if isinstance(d, int) and d < 0:
            _fail(f"`{v.name}` has an extent of {d}", place)
        if isinstance(d, Expr):
            verify_expr(d, f"{place}, shape of `{v.name}`")
    if v.layout is not None:
        _verify_layout(v.layout, v, place)


def _verify_layout(layout: Layout, v: Value, place: str) -> None:
    """Every axis is stored exactly once: its pieces, innermost first, continue each other up to an uncut one."""
    if layout.rank != len(v.shape):
        _fail(f"the layout {layout} of `{v.name}` is for {layout.rank} dimensions", place, why=f"the value has {len(v.shape)}")
    for axis in range(layout.rank):
        expected = 1
        pieces = sorted((p for p in layout.pieces if p.axis == axis), key=lambda p: p.div)
        for n, piece in enumerate(pieces):
            if piece.div != expected or (piece.mod is None) != (n == len(pieces) - 1):
                pieces = []
                break
            if min(piece.before, piece.after) < 0 or ((piece.before or piece.after) and len(pieces) > 1):
                _fail(f"the layout {layout} of `{v.name}` has a halo around a part of axis {axis}", place)
            expected = piece.div * (piece.mod or 1)
        if not pieces:
            _fail(f"the layout {layout} of `{v.name}` does not store axis {axis} exactly once", place)


def _verify_attribute(value: Any, place: str) -> None:
    if isinstance(value, tuple):
        for item in value:
            _verify_attribute(item, place)
    elif not (value is None or isinstance(value, bool | int | float | str | Expr)) or isinstance(value, np.generic):
        _fail(f"an attribute is a {type(value).__name__}", place, hint="None, bool, int, float, str, dims and tuples of these")


def _verify_application(node: Node, place: str) -> None:
    if node.bodies:
        _fail("only structural operators have bodies", place)
    if node.op.function is None:
        _fail(f"the operator `{node.op.name}` has no definition", place)
    try:
        derived = infer(node.op, node.inputs, node.attrs, node.name).outputs
        verify_te(derived)
    except TcompError as error:
        _fail(error.what, f"{place}: {error.where}", error.why, error.hint)
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        _fail(f"the operator does not take these inputs and attributes: {error}", place)
    _verify_types("the operator", derived, "the node declares", node.outputs, place)


def _verify_types(giver: str, given: Sequence[Any], taker: str, taken: Sequence[Any], place: str, layouts: bool = False) -> None:
    """Equal dtypes and shapes (and layouts) of two lists of values or tensors."""
    if len(given) != len(taken):
        _fail(f"{giver} gives {len(given)} values, {taker} {len(taken)}", place)
    for a, b in zip(given, taken, strict=True):
        if a.dtype != b.dtype or not same_shape(a.shape, b.shape) or (layouts and a.layout != b.layout):
            _fail(f"{giver} gives {a!r}, {taker} {b!r}", place)


def _verify_structural(node: Node, place: str) -> None:
    wanted = 2 if node.op is IF else 1
    if len(node.bodies) != wanted:
        _fail(f"`{node.op.name}` has {len(node.bodies)} bodies instead of {wanted}", place)
    inputs = [v for v in node.inputs if v is not None]
    if len(inputs) != len(node.inputs):
        _fail("an input of a structural operator is left out", place)
    for body in node.bodies:
        try:
            verify_graph(body)
        except IRError as error:
            raise IRError(error.what, where=f"{place}: {error.where}", why=error.why, hint=error.hint) from error
    if node.op is KERNEL:
        body = node.bodies[0]
        if any(inner.op in STRUCTURAL for inner in body.nodes):
            _fail("a kernel contains a structural operator", place)
        _verify_types("the node", inputs, "the body takes", body.inputs, place, layouts=True)
        _verify_types("the body", body.outputs, "the node declares", node.outputs, place, layouts=True)
    elif node.op is IF:
        if not inputs or inputs[0].dtype != "bool" or any(d != 1 for d in inputs[0].shape):
            _fail("the condition is not one bool", place)
        for body in node.bodies:
            _verify_types("the node", inputs[1:], "the body takes", body.inputs, place)
            _verify_types("the body", body.outputs, "the node declares", node.outputs, place)
    else:
        _verify_loop(node, inputs, place)


def _verify_loop(node: Node, inputs: Sequence[Value], place: str) -> None:
    body, attrs = node.bodies[0], node.attrs
    missing = {"trips", "carried", "scanned", "reverse_in", "reverse_out", "condition"} - set(attrs)
    if missing:
        _fail(f"a loop lacks the attribute `{min(missing)}`", place)
    trips, carried, scanned = attrs["trips"], attrs["carried"], attrs["scanned"]
    stacked = len(node.outputs) - carried
    if len(inputs) < carried + scanned or stacked < 0:
        _fail(f"{carried} carried and {scanned} scanned values do not fit {len(inputs)} inputs, {len(node.outputs)} outputs", place)
    if len(attrs["reverse_in"]) != scanned or len(attrs["reverse_out"]) != stacked:
        _fail("reverse_in and reverse_out need one flag for each scanned input and stacked output", place)
    for v in (*inputs[carried : carried + scanned], *node.outputs[carried:]):
        if not v.shape or not same_dim(v.shape[0], trips):
            _fail(f"`{v!r}` does not have one row for each of the {trips} iterations", place)
    rows = [Value(v.name, v.dtype, v.shape[1:]) for v in inputs[carried : carried + scanned]]
    number = Value("iteration", INDEX, ())
    given = [number, *inputs[:carried], *rows, *inputs[carried + scanned :]]
    _verify_types("the node", given, "the body takes", body.inputs, place)
    results = [*node.outputs[:carried], *(Value(v.name, v.dtype, v.shape[1:]) for v in node.outputs[carried:])]
    results += [Value("condition", "bool", ())] if attrs["condition"] else []
    _verify_types("the body", body.outputs, "the node declares", results, place)
    _verify_types("the node", inputs[:carried], "the carried outputs are", node.outputs[:carried], place)


# ---------------------------------------------------------------- programs


def verify_program(program: Program) -> None:
    """Known memories that may be written where they are, places and sizes over dims and loops around, kernels called alike everywhere."""
    if len({v.name for v in program.dims}) != len(program.dims) or any(v.op != "var" or v.dtype != INDEX for v in program.dims):
        _fail(f"the dims are not different {INDEX} variables", "program", why=", ".join(map(str, program.dims)))
    known = frozenset(program.dims)
    for size in (program.workspace, *(d for shape in program.output_shapes for d in shape)):
        _verify_size(size, known, "program")
    parameters: dict[str, tuple[int, int]] = {}
    for call in calls(program.steps):
        count = len(call.buffers), len(call.scalars)
        if parameters.setdefault(call.symbol, count) != count:
            _fail(f"kernel `{call.symbol}` is called with different parameters", f"call `{call.label}`")
    _verify_steps(program, program.steps, known)


def _verify_steps(program: Program, steps: Sequence[Step], known: frozenset[Expr]) -> None:
    for step in steps:
        match step:
            case Call(symbol, buffers, scalars, label):
                where = f"call `{label}` of `{symbol}`"
                for size in scalars:
                    _verify_size(size, known, where)
                for ref in buffers:
                    _verify_ref(program, ref, known, where)
            case Branch(cond, then, otherwise):
                _verify_ref(program, cond, known, f"if {cond}", 1)
                _verify_steps(program, then, known)
                _verify_steps(program, otherwise, known)
            case Repeat(var, trips, body, condition):
                where = f"for {var}"
                _verify_size(trips, known, where)
                _verify_loop_range(var, trips, where)
                if var.name in {v.name for v in known}:
                    _fail(f"`{var}` is the name of a dim, or of a loop around", where)
                inside = known | {var}
                if condition is not None:
                    _verify_ref(program, condition, inside, where, 1)
                _verify_steps(program, body, inside)
            case Copy(dst, src, count):
                where = f"copy from {src} to {dst}"
                _verify_size(count, known, where)
                least, most = bounds(count)
                if most is not None and most < 0:
                    _fail(f"{count} bytes are copied", where)
                _verify_ref(program, src, known, where, least or 0)
                _verify_ref(program, dst, known, where, least or 0, written=True)
                lo, hi = bounds(difference(dst.offset, src.offset))
                if (dst.base, dst.index) == (src.base, src.index) and least and lo is not None and hi is not None and max(-lo, hi) < least:
                    _fail(f"a copy of {count} bytes overlaps itself", where)
            case SetIndex(dst, value):
                where = f"set {dst}"
                _verify_size(value, known, where)
                _verify_ref(program, dst, known, where, 8, written=True)


def _verify_ref(program: Program, ref: Ref, known: frozenset[Expr], where: str, size: int = 0, written: bool = False) -> None:
    """A place of `size` bytes at least; what a kernel writes is not known here."""
    if ref.base not in MEMORIES:
        _fail(f"unknown memory `{ref.base}`", where, hint=f"one of {', '.join(MEMORIES)}")
    outputs = len(program.output_shapes)
    if ref.index < 0 or (ref.index and ref.base not in NUMBERED) or (ref.base == "output" and ref.index >= outputs):
        _fail(f"there is no {ref.base} {ref.index}", where)
    if written and ref.base in ("input", "weights"):
        _fail(f"`{ref}` is written", where, why="inputs and weights are read only")
    _verify_size(ref.offset, known, where)
    least, most = bounds(ref.offset)
    end = bounds(program.workspace)[1] if ref.base == "workspace" else 8 * len(program.dims) if ref.base == "dims" else None
    if (most is not None and most < 0) or (least is not None and end is not None and least + size > end):
        _fail(f"`{ref}` is never inside of the memory", where, why="" if end is None else f"it has {end} bytes at most")


def _verify_size(size: Dim, known: Collection[Expr], where: str) -> None:
    """An integer over dims and the loops around."""
    e = as_expr(size)
    verify_expr(e, where)
    if e.dtype != INDEX or E.reads(e):
        _fail(f"`{e}` is no size", where, why=f"a size is an {INDEX} over dims and loops, and looks nothing up")
    for v in E.variables(e):
        if v not in known:
            _fail(f"the variable `{v.name}` is not bound", where, why="it is no dim, and no loop around binds it")
