"""The statements of a function, translated to those of the loop IR.

Loops start at 0 in the IR: the loop variable of the function becomes `start + step * v`. A local variable becomes a buffer without
dimensions in registers, allocated in the block where it lives; one that is assigned once, to an integer made of sizes and loop variables
or to a constant, is but a name for that expression, so that indices stay affine. What updates an element by its old value
(`A[i] += x`, `A[i] = max(A[i], x)`) becomes an `Accumulate`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from math import prod
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from tcomp.errors import IRError
from tcomp.frontends.python import values as V
from tcomp.frontends.python.source import READ, Local, Source, assignments, first_use, locals_of, names
from tcomp.frontends.python.values import DOUBLE, Type, Value
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import BITS, NARROW, is_float, is_integer, itemsize
from tcomp.ir.expr import INDEX, Expr, as_expr
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.reducers import standard_reducers
from tcomp.ir.simplify import as_dim, simplify
from tcomp.ir.text.printer import unused

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.Pow: "pow",
    ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.LShift: "shl", ast.RShift: "shr",
}  # fmt: skip
_COMPARISONS: dict[type[ast.AST], str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "lt", ast.GtE: "le", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
_WORDS: dict[type[ast.AST], str] = {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
_REDUCERS = {"add": "sum", "sub": "sum", "min": "min", "max": "max", "mul": "prod", "and": "all", "or": "any"}
_OWN_NAMES = (  # bind names in ways that the analysis of local variables does not know
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.FunctionDef, ast.AsyncFunctionDef,
    ast.ClassDef, ast.Match,
)  # fmt: skip

_NOT_HERE: dict[type[ast.AST], tuple[str, str]] = {  # what it is called, and what to write instead
    ast.Return: ("`return`", "write results into arrays that are parameters"),
    ast.Break: ("`break`", "use `while` with the condition to go on"),
    ast.Continue: ("`continue`", "put the rest of the body under `if not (...)`"), ast.With: ("`with`", ""),
    ast.Try: ("`try`", "test for the exceptional case with `if`"), ast.Raise: ("`raise`", "write a flag into an array"),
    ast.Assert: ("`assert`", "check before the call"), ast.Delete: ("`del`", ""), ast.Global: ("`global`", "pass an array"),
    ast.Nonlocal: ("`nonlocal`", "pass an array"), ast.FunctionDef: ("a function inside the function", "write its body where it is called"),
    **dict.fromkeys((ast.Import, ast.ImportFrom), ("an import", "import at the top of the file")), ast.ClassDef: ("a class", ""),
    ast.Match: ("`match`", "use `if` and `elif`"), ast.AnnAssign: ("an annotated assignment", "leave the annotation out"),
    ast.Lambda: ("a lambda", "write out what it computes"), ast.List: ("a list", "use an array: np.empty(...)"),
    ast.Dict: ("a dict", "use arrays"), ast.Set: ("a set", "use arrays"), ast.Tuple: ("a tuple", "assign its elements one by one"),
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp), ("a comprehension", "write a loop")),
    ast.GeneratorExp: ("a generator", "write a loop"), ast.NamedExpr: ("`:=`", "assign on a line of its own"),
    ast.JoinedStr: ("a string", ""), ast.Slice: ("a slice", "write a loop over the elements"), ast.Starred: ("`*`", ""),
    ast.Attribute: ("an attribute", "of arrays there is `A.shape[0]`"), ast.MatMult: ("`@`", "write loops"),
}  # fmt: skip


def translate(
    source: Source, arrays: Mapping[str, Buffer], numbers: Mapping[str, Value], outside: Mapping[str, Any]
) -> tuple[Stmt, set[Buffer], list[Expr]]:
    """(the body of the kernel of a function, the buffers that it writes, what it assumes), given the parameters of the function, `arrays`
    and `numbers` by name, and the names that it sees from outside. Raises `ProgramError` for what cannot be translated."""
    return _Translator(source, arrays, numbers, outside).translate()


class _Translator:
    def __init__(self, source: Source, arrays: Mapping[str, Buffer], numbers: Mapping[str, Value], outside: Mapping[str, Any]) -> None:
        self.function, self.refuse, self.outside = source.function, source.refuse, outside
        self.parameters, self.sizes = arrays, numbers
        self.loop_names = {n.id for s in ast.walk(source.function) if isinstance(s, ast.For) for n in names(s.target)}
        self.hidden = {*arrays, *numbers, *self.loop_names}  # names that mean something else here than outside
        self.local_arrays: dict[str, ast.Assign] = {}
        self.local_of: dict[ast.Name, Local] = {}
        self.homes: dict[int, list[Local]] = {}  # by the identity of a block
        self.types: dict[Local, Type] = {}
        self.find_locals(source.function)

    def find_locals(self, function: ast.FunctionDef) -> None:
        """Finds the local variables, and refuses what cannot be one."""
        if (binder := next((n for s in function.body for n in ast.walk(s) if isinstance(n, _OWN_NAMES)), None)) is not None:
            self.not_here(binder)
        stored: dict[str, None] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stored[node.id] = None
                if node.id in self.parameters or node.id in self.sizes:
                    hint = f"assign an element: {node.id}[...] = ..." if node.id in self.parameters else "use another name"
                    self.refuse(node, f"the parameter `{node.id}` is assigned", "a parameter keeps its value", hint)
            if isinstance(node, ast.Assign) and self._allocator(node.value) is not None:
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.local_arrays.setdefault(target.id, node)
        for name in stored:
            if name in self.local_arrays:
                continue
            if name in self.loop_names:
                for s in assignments(function, name):
                    self.refuse(s, f"the loop variable `{name}` is assigned", "its loop determines its value", "use another name")
                continue
            if first_use(function.body, name) == READ:
                hint = f"assign `{name}` first, outside of loops and branches that may not run"
                self.refuse(names(function, name)[0], f"`{name}` may be read before it is assigned", hint=hint)
            for local in locals_of(function.body, name):
                self.homes.setdefault(id(local.home), []).append(local)
                self.local_of.update(dict.fromkeys(local.uses, local))

    def translate(self) -> tuple[Stmt, set[Buffer], list[Expr]]:
        """The types of locals follow from what is assigned to them: repeated until they stay as they are."""
        while True:
            before = dict(self.types)
            self.used, self.arrays = set(self.parameters), dict(self.parameters)
            self.known, self.buffers = dict[Local, Value](), dict[Local, Buffer]()
            self.variables, self.depth = dict[str, Value](), 0
            self.written, self.assumptions = set[Buffer](), list[Expr]()
            body = self.block(self.function.body)
            if self.types == before:
                return body, self.written, self.assumptions

    def fresh(self, name: str) -> str:
        """A name that no buffer or loop has: Python's own, numbered where it stands for several."""
        name = unused(name, self.used)
        self.used.add(name)
        return name

    def not_here(self, node: ast.AST, kind: ast.AST | None = None) -> NoReturn:
        """The error for a node (or the operator `kind` in it) that no loop program has."""
        name = type(kind or node)
        what, hint = _NOT_HERE.get(name, (f"`{name.__name__}`", ""))
        self.refuse(node, f"{what} cannot stand in a loop program", hint=hint)

    def block(self, stmts: Sequence[ast.stmt]) -> Stmt:
        """Statements in sequence, inside the allocations of what lives in this block."""
        done: list[Stmt] = []
        arrays: list[tuple[int, Buffer]] = []
        for stmt in stmts:
            try:
                if isinstance(stmt, ast.Assign) and (allocator := self._allocator(stmt.value)) is not None:
                    arrays.append((len(done), made := self.array(stmt)))
                    if allocator is np.zeros:
                        done.append(self.zeros(made))
                else:
                    done.extend(self.statement(stmt))
            except IRError as error:
                self.refuse(stmt, error.what, error.why, error.hint)
        for begin, buffer in reversed(arrays):
            done[begin:] = [L.Allocate(buffer, L.block(*done[begin:]))]
        body = L.block(*done)
        return L.allocated([self.buffers[local] for local in self.homes.get(id(stmts), ()) if local in self.buffers], body)

    def statement(self, stmt: ast.stmt) -> list[Stmt]:
        match stmt:
            case ast.Pass() | ast.Expr(value=ast.Constant()):  # a docstring
                return []
            case ast.Expr(value=ast.Call(func=function, args=[condition], keywords=[])) if self.resolved(function) is V.assume:
                return self.assume(stmt, self.condition(condition))
            case ast.Expr():
                self.refuse(stmt, "an expression whose value is not used", hint="assign it")
            case ast.For(orelse=[_, *_]) | ast.While(orelse=[_, *_]):
                self.refuse(stmt, "`else` of a loop cannot stand in a loop program", hint="write it behind the loop")
            case ast.For():
                return self.loop(stmt)
            case ast.While():
                return [L.While(self.condition(stmt.test), self.inside(stmt.body))]
            case ast.If():
                test = simplify(self.condition(stmt.test))
                if test.op == "const":  # known by the sizes, or by the loops around
                    chosen = stmt.body if test.attr else stmt.orelse
                    return [self.block(chosen)] if chosen else []
                otherwise = self.block(stmt.orelse) if stmt.orelse else None
                return [L.If(test, self.block(stmt.body), otherwise)]
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=sources)):
                return self.several(stmt, targets, sources)
            case ast.Assign(targets=[target]):
                return self.assign(stmt, target, self.value(stmt.value))
            case ast.Assign():
                self.refuse(stmt, "several targets in one assignment", hint="write one assignment for each")
            case ast.AugAssign():
                return self.assign(stmt, stmt.target, self.binary(stmt, stmt.target, stmt.value))
        self.not_here(stmt)

    def assume(self, stmt: ast.Expr, condition: Expr) -> list[Stmt]:
        if stmt not in self.function.body or E.reads(condition):
            self.refuse(stmt, "an assumption about something else than sizes", hint="tcomp.assume(n <= m), outside of loops and branches")
        if (condition := simplify(condition)).op == "const" and not condition.attr:
            self.refuse(stmt, "the program assumes what does not hold")
        if condition.op != "const":
            self.assumptions.append(condition)
        return []

    def inside(self, stmts: Sequence[ast.stmt]) -> Stmt:
        """The statements of a loop."""
        self.depth += 1
        body = self.block(stmts)
        self.depth -= 1
        return body

    def condition(self, node: ast.expr) -> Expr:
        return V.truth(self.value(node), "the condition")

    def loop(self, stmt: ast.For) -> list[Stmt]:
        target, header = stmt.target, stmt.iter
        if not isinstance(target, ast.Name):
            self.refuse(stmt, "a loop over several variables", hint="use one variable: for i in range(n)")
        if not isinstance(header, ast.Call) or self.resolved(header.func) is not range:
            hint = f"for {target.id} in range(...): and index with `{target.id}`"
            self.refuse(stmt, "a loop over something else than a range", hint=hint)
        if target.id in self.variables:
            self.refuse(stmt, f"the variable `{target.id}` of an outer loop is used again", hint="use another name")
        if header.keywords or not 1 <= len(header.args) <= 3:
            self.refuse(stmt, "range takes one to three numbers")
        ends = [self.integer(a) for a in header.args]
        start, stop = (E.const(0), ends[0]) if len(ends) == 1 else ends[:2]
        by = ends[2] if len(ends) == 3 else E.const(1)
        if by.op != "const":
            self.refuse(stmt, "the step of a range is not a constant", hint="make it one, or use `while`")
        if (step := int(by.attr)) == 0:
            self.refuse(stmt, "the step of a range is 0")
        saved, start = self.saved(start, f"{target.id}.start")
        span = stop - start if step > 0 else start - stop
        extent = as_dim((span + (abs(step) - 1)) // abs(step))
        extent, name = max(extent, 0) if isinstance(extent, int) else extent, self.fresh(target.id)
        # An extent that is read from a buffer is the range of the variable only until the buffer is written.
        v = E.var(name, 0) if E.reads(as_expr(extent)) else E.loop_var(name, extent)
        self.variables[target.id] = Value(simplify(start + v * step), True)
        loop: Stmt = L.For(v, extent, self.inside(stmt.body))
        del self.variables[target.id]
        return [L.allocated([s.buffer for s in saved], L.block(*saved, loop))]

    def saved(self, value: Expr, name: str) -> tuple[list[L.Store], Expr]:
        """A value that later stores must not change: in a temporary, where it is read from a buffer."""
        if not E.reads(value):
            return [], value
        buffer = Buffer(self.fresh(name), value.dtype, (), "register")
        return [L.Store(buffer, (), value)], buffer[()]

    def several(self, stmt: ast.Assign, targets: Sequence[ast.expr], sources: Sequence[ast.expr]) -> list[Stmt]:
        """`a, b = x, y`: all values are computed before the first is stored."""
        if len(targets) != len(sources):
            self.refuse(stmt, f"{len(sources)} values for {len(targets)} targets")
        first, *others = [self.value(s) for s in sources]
        saved: list[L.Store] = []
        stores = self.assign(stmt, targets[0], first)
        for target, value in zip(targets[1:], others, strict=True):
            temporaries, read = self.saved(value.expr, "swapped")
            saved += temporaries
            stores += self.assign(stmt, target, Value(read, value.weak))
        return [L.allocated([s.buffer for s in saved], L.block(*saved, *stores))]

    def assign(self, stmt: ast.Assign | ast.AugAssign, target: ast.expr, value: Value) -> list[Stmt]:
        if isinstance(target, ast.Name):
            return self.assign_local(stmt, target, value)
        if not isinstance(target, ast.Subscript):
            self.not_here(target)
        buffer, indices = self.element(target)
        if is_float(value.expr.dtype) and not is_float(buffer.dtype):
            why = f"`{buffer.name}` is {buffer.dtype}, the value {value.expr.dtype}"
            self.refuse(stmt, "a float is stored in an array of integers", why, "convert it: int(x)")
        self.written.add(buffer)
        return [_update(buffer, indices, value.to(buffer.dtype))]

    def assign_local(self, stmt: ast.Assign | ast.AugAssign, target: ast.Name, value: Value) -> list[Stmt]:
        if target.id in self.arrays:
            self.refuse(stmt, f"the array `{target.id}` is assigned", hint=f"assign an element: {target.id}[...] = ...")
        local = self.local_of[target]
        plain = value.known or (value.weak and value.expr.dtype == INDEX and not E.reads(value.expr))
        if plain and len(local.assignments) == 1:
            self.known[local] = value
            return []
        kind = self.types[local] = V.join(self.types.get(local, value.type), value.type)
        buffer = self.buffers.get(local)
        if buffer is None or buffer.dtype != kind.dtype:
            name = buffer.name if buffer is not None else self.fresh(target.id)
            buffer = self.buffers[local] = Buffer(name, kind.dtype, (), "register")
        return [_update(buffer, (), value.to(kind.dtype))]

    def _allocator(self, node: ast.expr) -> Any:
        """np.empty or np.zeros, where `node` calls one."""
        function = self.resolved(node.func) if isinstance(node, ast.Call) else None
        return function if function is np.empty or function is np.zeros else None

    def array(self, stmt: ast.Assign) -> Buffer:
        """The buffer of `A = np.empty(shape, dtype)`."""
        call, (target, *others) = stmt.value, stmt.targets
        assert isinstance(call, ast.Call)
        if others or not isinstance(target, ast.Name):
            self.refuse(stmt, "an array needs a name of its own", hint="A = np.empty(...)")
        if self.local_arrays[target.id] is not stmt or target in self.local_of:
            self.refuse(stmt, f"the array `{target.id}` is made a second time", hint="use another name")
        dtypes = [*call.args[1:], *(k.value for k in call.keywords if k.arg == "dtype")]
        if not call.args or len(dtypes) > 1 or len(call.args) + len(call.keywords) > 1 + len(dtypes):
            self.refuse(stmt, "an array is made of a shape and a dtype", hint="np.empty((n, m), np.float32)")
        try:
            dtype = np.dtype(self.resolved(dtypes[0])).name if dtypes else DOUBLE
        except TypeError:
            dtype = ast.unparse(dtypes[0])
        if dtype not in BITS:
            hint = "one of " + ", ".join(f"np.{d}" for d in BITS if d not in ("bool", "bfloat16", *NARROW))
            self.refuse(stmt, f"unknown dtype `{dtype}`", hint=hint)
        shape = [self.integer(d) for d in _elements(call.args[0])]
        if self.depth:
            if any(d.op != "const" for d in shape):
                self.refuse(stmt, f"the array `{target.id}` is made in a loop and has no constant size", hint="make it before the loops")
            if (size := itemsize(dtype) * prod(int(d.attr) for d in shape)) > L.STACK_LIMIT:
                why = f"it takes {size} bytes, the stack holds {L.STACK_LIMIT}"
                self.refuse(stmt, f"the array `{target.id}` is too large for a loop", why, "make it before the loops")
        scope = "register" if self.depth else "global"
        made = self.arrays[target.id] = Buffer(self.fresh(target.id), dtype, [as_dim(d) for d in shape], scope)
        return made

    def zeros(self, buffer: Buffer) -> Stmt:
        return L.over(buffer.shape, lambda at: L.store(buffer, at, 0), lambda n: self.fresh(f"{buffer.name}.d{n}"))

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant():
                if (found := V.number(node.value)) is None:
                    self.refuse(node, f"`{node.value!r}` is not a number")
                return found
            case ast.Name():
                return self.name(node)
            case ast.Attribute():
                return self.outer(node)
            case ast.BinOp():
                return self.binary(node, node.left, node.right)
            case ast.UnaryOp(op=ast.Not()):
                return Value(E.unary("not", V.truth(self.value(node.operand), "the operand of `not`")), False)
            case ast.UnaryOp(op=ast.USub() | ast.Invert() as op):
                return V.unary("neg" if isinstance(op, ast.USub) else "not", self.value(node.operand))
            case ast.UnaryOp():  # +x
                return self.value(node.operand)
            case ast.BoolOp():
                combine, word = (V.both, "and") if isinstance(node.op, ast.And) else (V.either, "or")
                return Value(reduce(combine, [V.truth(self.value(v), f"an operand of `{word}`") for v in node.values]), False)
            case ast.Compare():
                return self.compare(node)
            case ast.IfExp():
                return V.select(self.condition(node.test), self.value(node.body), self.value(node.orelse))
            case ast.Subscript(value=ast.Attribute(value=array, attr="shape")):
                return self.extent(node, array, self.integer(node.slice))
            case ast.Subscript():
                return Value(E.read(*self.element(node)), False)
            case ast.Call():
                return self.call(node)
        self.not_here(node)

    def binary(self, node: ast.BinOp | ast.AugAssign, left: ast.expr, right: ast.expr) -> Value:
        """The value of the operator of `node` on two operands."""
        if type(node.op) not in OPERATORS:
            self.not_here(node, node.op)
        return V.apply(OPERATORS[type(node.op)], self.value(left), self.value(right))

    def compare(self, node: ast.Compare) -> Value:
        operands = [self.value(v) for v in (node.left, *node.comparators)]
        results: list[Expr] = []
        for op, a, b in zip(node.ops, operands, operands[1:], strict=False):
            if type(op) not in _COMPARISONS:
                self.refuse(node, f"`{_WORDS[type(op)]}` cannot stand in a loop program", hint="compare numbers with <, <=, ==, !=")
            if isinstance(op, ast.Gt | ast.GtE):
                a, b = b, a
            results.append(V.apply(_COMPARISONS[type(op)], a, b).expr)
        return Value(reduce(V.both, results), False)

    def element(self, node: ast.Subscript) -> tuple[Buffer, tuple[Expr, ...]]:
        """The buffer and the indices of `A[i, j]`."""
        if isinstance(node.value, ast.Subscript):
            self.refuse(node, "an element of an element", hint="put all indices in one pair of brackets: A[i, j]")
        if not isinstance(node.value, ast.Name):
            self.refuse(node, "only arrays can be indexed")
        buffer = self.buffer(node.value)
        indices = tuple(self.integer(i) for i in _elements(node.slice))
        if len(indices) != len(buffer.shape):
            self.refuse(node, f"`{buffer.name}` has {len(buffer.shape)} dimensions and is indexed with {len(indices)}")
        for index, extent in zip(indices, buffer.shape, strict=True):
            if index.op == "const" and index.attr < 0:
                what, why = f"the index {index.attr} of `{buffer.name}`", "Python counts it from the end"
                self.refuse(node, what, why, f"write {extent} - {-index.attr}")
        return buffer, indices

    def buffer(self, node: ast.Name) -> Buffer:
        if (found := self.arrays.get(node.id)) is None:
            why = f"the arrays here are {', '.join(self.arrays)}" if self.arrays else "there are none here"
            why = "it is made further down" if node.id in self.local_arrays else why
            self.refuse(node, f"`{node.id}` is not an array", why, f'declare it: @program({node.id}="float64[n]")')
        return found

    def extent(self, node: ast.expr, array: ast.expr, axis: Expr) -> Value:
        """`A.shape[axis]` or `len(A)`."""
        if not isinstance(array, ast.Name):
            self.refuse(node, "only arrays have a shape")
        buffer = self.buffer(array)
        if axis.op != "const" or not 0 <= axis.attr < len(buffer.shape):
            self.refuse(node, f"`{buffer.name}` has {len(buffer.shape)} dimensions", hint="A.shape[k] with a constant k from 0")
        return Value(as_expr(buffer.shape[int(axis.attr)]), True)

    def integer(self, node: ast.expr) -> Expr:
        """An integer for indices, ranges and shapes."""
        if not is_integer((value := self.value(node)).expr.dtype):
            what = f"`{ast.unparse(node)}` is {value.expr.dtype} instead of an integer"
            self.refuse(node, what, hint="`//` divides integers; int(x) converts")
        return simplify(value.to(INDEX))

    def call(self, node: ast.Call) -> Value:
        function, text = self.resolved(node.func), ast.unparse(node.func)
        if function is len and len(node.args) == 1:
            return self.extent(node, node.args[0], E.const(0))
        if function is None:
            self.refuse(node, f"the function `{text}` is not known here", hint=f"known are {V.FUNCTIONS}")
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            self.refuse(node, f"`{text}` with keywords or `*`", hint="pass plain arguments")
        if function is np.empty or function is np.zeros:
            self.refuse(node, "an array inside an expression", hint="A = np.empty(...) on a line of its own")
        return V.call(function, [self.value(a) for a in node.args])

    def name(self, node: ast.Name) -> Value:
        name = node.id
        if (local := self.local_of.get(node)) is not None:
            return self.known.get(local) or Value(self.buffers[local][()], self.types[local].weak)
        if (found := self.variables.get(name) or self.sizes.get(name)) is not None:
            return found
        if name in self.loop_names:
            self.refuse(node, f"the loop variable `{name}` is used outside of its loop", hint="keep its value in another variable")
        if name in self.arrays or name in self.local_arrays:
            self.refuse(node, f"the array `{name}` is used as a number", hint=f"an element: {name}[...]; its length: {name}.shape[0]")
        return self.outer(node)

    def outer(self, node: ast.Name | ast.Attribute) -> Value:
        """A constant of the module."""
        found = self.resolved(node)
        if (value := V.number(found)) is None:
            text = ast.unparse(node)
            kind = "a module" if isinstance(found, ModuleType) else "a function" if callable(found) else f"a {type(found).__name__}"
            what = f"the name `{text}` is not known" if found is None else f"`{text}` is {kind}"
            self.refuse(node, what, hint="a loop program knows its parameters, its local variables, and numbers of the module")
        return value

    def resolved(self, node: ast.expr) -> Any:
        """The object that `np.sqrt` or `sqrt` names outside of the function; None for what is unknown, or means something else here."""
        match node:
            case ast.Name(id=name) if not (name in self.hidden or node in self.local_of):
                return self.outside.get(name, getattr(builtins, name, None))
            case ast.Attribute() if (base := self.resolved(node.value)) is not None:
                return getattr(base, node.attr, None)
            case ast.Constant(value=str()):
                return node.value
        return None


def _update(buffer: Buffer, indices: tuple[Expr, ...], value: Expr) -> Stmt:
    """A store; where the value is the old one combined with something else by an associative operator, an accumulation."""
    old, operands, name = E.read(buffer, indices), list(value.args), _REDUCERS.get(value.op, "")
    match value.op:
        case "sub":
            operands = [operands[0], _negated(operands[1])]
        case "min" | "max" | "and" | "or":  # these do not depend on the order of the operands; sums and products, being rounded, do
            operands = _flat(value, value.op)
    others = [x for x in operands if x is not old]
    reducer = standard_reducers(buffer.dtype).get(name) if (name in ("all", "any")) == (buffer.dtype == "bool") else None
    if reducer is None or len(others) != len(operands) - 1 or any(node is old for x in others for node in E.walk(x)):
        return L.Store(buffer, indices, value)
    return L.Accumulate(buffer, indices, reduce(partial(E.binary, value.op), others), reducer)


def _flat(e: Expr, op: str) -> list[Expr]:
    return [x for a in e.args for x in _flat(a, op)] if e.op == op else [e]


def _negated(e: Expr) -> Expr:
    """-e; of a product the first factor, so that it is still a product to be fused with the addition."""
    if e.op == "mul":
        return E.binary("mul", _negated(e.args[0]), e.args[1])
    return e.args[0] if e.op == "neg" else E.unary("neg", e)


def _elements(node: ast.expr) -> Sequence[ast.expr]:
    """The elements of a tuple; a node that is none by itself."""
    return node.elts if isinstance(node, ast.Tuple) else [node]
