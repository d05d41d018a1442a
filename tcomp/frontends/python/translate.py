"""The statements of a function, translated to those of the loop IR.

Loops start at 0 in the IR: the loop variable of the function becomes `start + step * v`. A local variable becomes a buffer without
dimensions in registers, allocated in the block where it lives; one that is assigned once, to an integer made of sizes and loop variables
or to a constant, is but a name for that expression, so that indices stay affine. What updates an element by its old value
(`A[i] += x`, `A[i] = max(A[i], x)`) becomes an `Accumulate`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np

from tcomp.errors import IRError
from tcomp.frontends.python import values as V
from tcomp.frontends.python.lifetimes import READ, Local, first_use, locals_of
from tcomp.frontends.python.source import Source
from tcomp.frontends.python.values import Type, Value
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.dtypes import BITS, is_float, is_integer, itemsize
from tcomp.ir.expr import INDEX, Expr, as_expr, standard_reducers
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.names import unused
from tcomp.ir.simplify import simplify

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.Pow: "pow",
    ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.LShift: "shl", ast.RShift: "shr",
}  # fmt: skip
_COMPARISONS: dict[type[ast.AST], str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "lt", ast.GtE: "le", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
_WORDS: dict[type[ast.AST], str] = {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
_FOLDS = {"min": "min", "max": "max", "mul": "prod", "and": "all", "or": "any"}
_OWN_NAMES = (
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.FunctionDef, ast.AsyncFunctionDef,
    ast.ClassDef, ast.Match,
)  # fmt: skip

_NOT_HERE: dict[type[ast.AST], tuple[str, str]] = {
    ast.Return: ("`return`", "write results into arrays that are parameters"),
    ast.Break: ("`break`", "use `while` with the condition to go on"),
    ast.Continue: ("`continue`", "put the rest of the body under `if not (...)`"),
    ast.With: ("`with`", ""),
    ast.Try: ("`try`", "test for the exceptional case with `if`"),
    ast.Raise: ("`raise`", "write a flag into an array"),
    ast.Assert: ("`assert`", "check before the call"),
    ast.Delete: ("`del`", ""),
    ast.Import: ("an import", "import at the top of the file"),
    ast.ImportFrom: ("an import", "import at the top of the file"),
    ast.Global: ("`global`", "pass an array"),
    ast.Nonlocal: ("`nonlocal`", "pass an array"),
    ast.FunctionDef: ("a function inside the function", "write its body where it is called"),
    ast.ClassDef: ("a class", ""),
    ast.Match: ("`match`", "use `if` and `elif`"),
    ast.AnnAssign: ("an annotated assignment", "leave the annotation out"),
    ast.Lambda: ("a lambda", "write out what it computes"),
    ast.List: ("a list", "use an array: np.empty(...)"),
    ast.Dict: ("a dict", "use arrays"),
    ast.Set: ("a set", "use arrays"),
    ast.Tuple: ("a tuple", "assign its elements one by one"),
    ast.ListComp: ("a comprehension", "write a loop"),
    ast.GeneratorExp: ("a generator", "write a loop"),
    ast.SetComp: ("a comprehension", "write a loop"),
    ast.DictComp: ("a comprehension", "write a loop"),
    ast.JoinedStr: ("a string", ""),
    ast.NamedExpr: ("`:=`", "assign on a line of its own"),
    ast.Slice: ("a slice", "write a loop over the elements"),
    ast.Starred: ("`*`", ""),
    ast.Attribute: ("an attribute", "of arrays there is `A.shape[0]`"),
}


class Assigned(NamedTuple):
    """What an assignment writes: an element of a buffer."""

    buffer: Buffer
    indices: tuple[Expr, ...]

    @property
    def current(self) -> Expr:
        """What the name stands for now."""
        return E.read(self.buffer, self.indices)


class Translator:
    """Translates one function, given its parameters: `arrays` and `numbers` by name, and the names visible from its module."""

    def __init__(self, source: Source, arrays: Mapping[str, Buffer], numbers: Mapping[str, Value], outside: Mapping[str, Any]) -> None:
        self.source, self.outside = source, outside
        self.parameters, self.sizes = dict(arrays), dict(numbers)
        body = source.function.body
        self.loop_names = {
            n.id for s in ast.walk(source.function) if isinstance(s, ast.For) for n in ast.walk(s.target) if isinstance(n, ast.Name)
        }
        self.local_arrays: dict[str, ast.Assign] = {}
        self.local_of: dict[ast.Name, Local] = {}
        self.homes: dict[int, list[Local]] = {}  # by the identity of a block
        self.types: dict[Local, Type] = {}
        self._declare(body)

    def _declare(self, body: Sequence[ast.stmt]) -> None:
        """Finds the local variables, and refuses what cannot be one."""
        stored: dict[str, None] = {}
        for node in (n for s in body for n in ast.walk(s)):
            if isinstance(node, _OWN_NAMES):  # bind names in ways that the analysis of local variables does not know
                self.refuse(node)
        for node in ast.walk(self.source.function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stored[node.id] = None
                if node.id in self.parameters or node.id in self.sizes:
                    hint = f"assign an element: {node.id}[...] = ..." if node.id in self.parameters else "use another name"
                    self.source.refuse(node, f"the parameter `{node.id}` is assigned", "a parameter keeps its value", hint)
            if isinstance(node, ast.Assign) and self._allocator(node.value) is not None:
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.local_arrays.setdefault(target.id, node)
        for name in stored:
            if name in self.local_arrays:
                continue
            if name in self.loop_names:
                for s in ast.walk(self.source.function):
                    if isinstance(s, ast.Assign | ast.AugAssign) and any(t.id == name for t in _stored(s)):
                        self.source.refuse(
                            s, f"the loop variable `{name}` is assigned", "its loop determines its value", "use another name"
                        )
                continue
            if first_use(body, name) == READ:
                first = next(n for n in ast.walk(self.source.function) if isinstance(n, ast.Name) and n.id == name)
                hint = f"assign `{name}` first, outside of loops and branches that may not run"
                self.source.refuse(first, f"`{name}` may be read before it is assigned", hint=hint)
            for local in locals_of(body, name):
                self.homes.setdefault(id(local.home), []).append(local)
                self.local_of.update(dict.fromkeys(local.uses, local))

    def translate(self) -> Stmt:
        """The body of the kernel. The types of locals follow from what is assigned to them: repeated until they stay as they are."""
        while True:
            before = dict(self.types)
            self.used = set(self.parameters)
            self.arrays, self.known = dict(self.parameters), dict[Local, Value]()
            self.buffers = dict[Local, Buffer]()
            self.variables = dict[str, Value]()
            self.depth = 0
            self.written: set[Buffer] = set()
            body = self.block(self.source.function.body)
            if self.types == before:
                return body

    # ------------------------------------------------------------ names

    def fresh(self, name: str) -> str:
        """A name that no buffer or loop has: Python's own, numbered where it stands for several."""
        name = unused(name, self.used)
        self.used.add(name)
        return name

    @contextmanager
    def at(self, node: ast.AST) -> Any:
        """Errors of the IR inside belong to this line."""
        try:
            yield
        except IRError as error:
            self.source.refuse(node, error.what, error.why, error.hint)

    def refuse(self, node: ast.AST) -> NoReturn:
        """The error for a node of the syntax tree."""
        what, hint = _NOT_HERE.get(type(node), (f"`{type(node).__name__}`", ""))
        self.source.refuse(node, f"{what} cannot stand in a loop program", hint=hint)

    # ------------------------------------------------------------ statements

    def block(self, stmts: Sequence[ast.stmt]) -> Stmt:
        """Statements in sequence, inside the allocations of what lives in this block."""
        done: list[Stmt] = []
        arrays: list[tuple[int, Buffer]] = []
        for stmt in stmts:
            with self.at(stmt):
                if isinstance(stmt, ast.Assign) and self._allocator(stmt.value) is not None:
                    arrays.append((len(done), self.array(stmt)))
                    done.extend(self.zeros(stmt, arrays[-1][1]))
                else:
                    done.extend(self.statement(stmt))
        for begin, buffer in reversed(arrays):
            done[begin:] = [L.Allocate(buffer, L.block(*done[begin:]))]
        body = L.block(*done)
        for local in reversed(self.homes.get(id(stmts), ())):
            if local in self.buffers:
                body = L.Allocate(self.buffers[local], body)
        return body

    def statement(self, stmt: ast.stmt) -> list[Stmt]:
        """The loops of one statement."""
        match stmt:
            case ast.Pass():
                return []
            case ast.Expr(value=ast.Constant()):  # a docstring
                return []
            case ast.Expr():
                self.source.refuse(stmt, "an expression whose value is not used", hint="assign it")
            case ast.For():
                return self.loop(stmt)
            case ast.While():
                if stmt.orelse:
                    self.source.refuse(stmt, "`else` of a loop cannot stand in a loop program", hint="write it behind the loop")
                test = V.truth(self.value(stmt.test), "the condition")
                return [L.While(test, self.inside(stmt.body))]
            case ast.If():
                return self.branch(stmt)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=sources)):
                return self.several(stmt, targets, sources)
            case ast.Assign(targets=[target]):
                return self.assign(stmt, target, self.value(stmt.value))
            case ast.Assign():
                self.source.refuse(stmt, "several targets in one assignment", hint="write one assignment for each")
            case ast.AugAssign():
                if type(stmt.op) not in _OPERATORS:
                    self.source.refuse(stmt, "`@` cannot stand in a loop program", hint="write loops")
                value = V.apply(_OPERATORS[type(stmt.op)], self.value(stmt.target), self.value(stmt.value))
                return self.assign(stmt, stmt.target, value)
        self.refuse(stmt)

    def inside(self, stmts: Sequence[ast.stmt]) -> Stmt:
        """The loops of a block of statements."""
        self.depth += 1
        body = self.block(stmts)
        self.depth -= 1
        return body

    def branch(self, stmt: ast.If) -> list[Stmt]:
        """The loops of an `if`."""
        test = simplify(V.truth(self.value(stmt.test), "the condition"))
        if test.op == "const":  # known by the sizes, or by the loops around
            chosen = stmt.body if test.attr else stmt.orelse
            return [self.block(chosen)] if chosen else []
        otherwise = self.block(stmt.orelse) if stmt.orelse else None
        return [L.If(test, self.block(stmt.body), otherwise)]

    def loop(self, stmt: ast.For) -> list[Stmt]:
        """The loops of a `for` or `while`."""
        target, header = stmt.target, stmt.iter
        if not isinstance(target, ast.Name):
            self.source.refuse(stmt, "a loop over several variables", hint="use one variable: for i in range(n)")
        if not isinstance(header, ast.Call) or not isinstance(header.func, ast.Name) or self.named(header.func) is not range:
            self.source.refuse(
                stmt, "a loop over something else than a range", hint=f"for {target.id} in range(...): and index with `{target.id}`"
            )
        if stmt.orelse:
            self.source.refuse(stmt, "`else` of a loop cannot stand in a loop program", hint="write it behind the loop")
        if target.id in self.variables:
            self.source.refuse(stmt, f"the variable `{target.id}` of an outer loop is used again", hint="use another name")
        if header.keywords or not 1 <= len(header.args) <= 3:
            self.source.refuse(stmt, "range takes one to three numbers")
        ends = [self.integer(a) for a in header.args]
        start, stop = (E.const(0), ends[0]) if len(ends) == 1 else ends[:2]
        if len(ends) == 3 and ends[2].op != "const":
            self.source.refuse(stmt, "the step of a range is not a constant", hint="make it one, or use `while`")
        step = int(ends[2].attr) if len(ends) == 3 else 1
        if step == 0:
            self.source.refuse(stmt, "the step of a range is 0")
        kept, start = self.kept(start, f"{target.id}.start")
        span = stop - start if step > 0 else start - stop
        extent = E.as_dim((span + (abs(step) - 1)) // abs(step))
        extent = max(extent, 0) if isinstance(extent, int) else extent
        name = self.fresh(target.id)
        # An extent that is read from a buffer is the range of the variable only until the buffer is written.
        v = E.var(name, 0) if E.reads(as_expr(extent)) else E.loop_var(name, extent)
        self.variables[target.id] = Value(simplify(start + v * step), True)
        loop: Stmt = L.For(v, extent, self.inside(stmt.body))
        del self.variables[target.id]
        return [loop] if kept is None else [L.Allocate(kept.buffer, L.block(kept, loop))]

    def kept(self, value: Expr, name: str) -> tuple[L.Store | None, Expr]:
        """A value that later stores must not change: in a temporary, where it is read from a buffer."""
        if not E.reads(value):
            return None, value
        buffer = Buffer(self.fresh(name), value.dtype, (), "register")
        return L.Store(buffer, (), value), buffer[()]

    def several(self, stmt: ast.Assign, targets: Sequence[ast.expr], sources: Sequence[ast.expr]) -> list[Stmt]:
        """`a, b = x, y`: all values are computed before the first is stored."""
        if len(targets) != len(sources):
            self.source.refuse(stmt, f"{len(sources)} values for {len(targets)} targets")
        first, *others = [self.value(s) for s in sources]
        saved, stores = [], self.assign(stmt, targets[0], first)
        for target, value in zip(targets[1:], others, strict=True):
            store, read = self.kept(value.expr, "swapped")
            saved += [store] if store is not None else []
            stores += self.assign(stmt, target, Value(read, value.weak))
        body = L.block(*saved, *stores)
        for store in reversed(saved):
            body = L.Allocate(store.buffer, body)
        return [body]

    def assign(self, stmt: ast.Assign | ast.AugAssign, target: ast.expr, value: Value) -> list[Stmt]:
        """The store of an assignment."""
        if isinstance(target, ast.Name):
            return self.assign_local(stmt, target, value)
        if not isinstance(target, ast.Subscript):
            self.refuse(target)
        place = Assigned(*self.element(target))
        if is_float(value.expr.dtype) and not is_float(place.buffer.dtype):
            why = f"`{place.buffer.name}` is {place.buffer.dtype}, the value {value.expr.dtype}"
            self.source.refuse(stmt, "a float is stored in an array of integers", why, "convert it: int(x)")
        self.written.add(place.buffer)
        return [update(place, value.to(place.buffer.dtype))]

    def assign_local(self, stmt: ast.Assign | ast.AugAssign, target: ast.Name, value: Value) -> list[Stmt]:
        """An assignment to a local name."""
        if target.id in self.arrays:
            self.source.refuse(stmt, f"the array `{target.id}` is assigned", hint=f"assign an element: {target.id}[...] = ...")
        local = self.local_of[target]
        plain = value.known or (value.weak and value.expr.dtype == INDEX and not E.reads(value.expr))
        if plain and len(local.assignments) == 1:
            self.known[local] = value
            return []
        kind = V.join(self.types.get(local, value.type), value.type)
        self.types[local] = kind
        buffer = self.buffers.get(local)
        if buffer is None or buffer.dtype != kind.dtype:
            name = buffer.name if buffer is not None else self.fresh(target.id)
            buffer = self.buffers[local] = Buffer(name, kind.dtype, (), "register")
        return [update(Assigned(buffer, ()), value.to(kind.dtype))]

    # ------------------------------------------------------------ local arrays

    def _allocator(self, node: ast.expr) -> Any:
        """np.empty or np.zeros, where `node` calls one."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            return None
        function = self.resolved(node.func)
        return function if function is np.empty or function is np.zeros else None

    def array(self, stmt: ast.Assign) -> Buffer:
        """The buffer of `A = np.empty(shape, dtype)`."""
        call, (target, *others) = stmt.value, stmt.targets
        assert isinstance(call, ast.Call)
        if others or not isinstance(target, ast.Name):
            self.source.refuse(stmt, "an array needs a name of its own", hint="A = np.empty(...)")
        if self.local_arrays[target.id] is not stmt or target in self.local_of:
            self.source.refuse(stmt, f"the array `{target.id}` is made anew", hint="use another name")
        options = {k.arg: k.value for k in call.keywords}
        if not 1 <= len(call.args) <= 2 or set(options) - {"dtype"} or (len(call.args) == 2 and options):
            self.source.refuse(stmt, "an array is made of a shape and a dtype", hint="np.empty((n, m), np.float32)")
        wanted = call.args[1] if len(call.args) == 2 else options.get("dtype")
        try:
            dtype = "float64" if wanted is None else np.dtype(self.resolved(wanted)).name
        except TypeError:
            dtype = ast.unparse(wanted) if wanted is not None else ""
        if dtype not in BITS:
            self.source.refuse(
                stmt, f"unknown dtype `{dtype}`", hint="one of " + ", ".join(f"np.{d}" for d in BITS if d not in ("bool", "bfloat16"))
            )
        shape = [self.integer(d) for d in (call.args[0].elts if isinstance(call.args[0], ast.Tuple) else [call.args[0]])]
        size = itemsize(dtype)
        for d in shape if self.depth else ():
            if d.op != "const":
                self.source.refuse(
                    stmt, f"the array `{target.id}` is made in a loop and has no constant size", hint="make it before the loops"
                )
            size *= int(d.attr)
        if self.depth and size > L.STACK_LIMIT:
            why = f"it takes {size} bytes, the stack holds {L.STACK_LIMIT}"
            self.source.refuse(stmt, f"the array `{target.id}` is too large for a loop", why, "make it before the loops")
        buffer = Buffer(self.fresh(target.id), dtype, [E.as_dim(d) for d in shape], "register" if self.depth else "global")
        self.arrays[target.id] = buffer
        return buffer

    def zeros(self, stmt: ast.Assign, buffer: Buffer) -> list[Stmt]:
        """What np.zeros does, and np.empty does not."""
        if self._allocator(stmt.value) is np.empty:
            return []
        return [L.over(buffer.shape, lambda at: L.store(buffer, at, 0), lambda n: self.fresh(f"{buffer.name}.d{n}"))]

    # ------------------------------------------------------------ expressions

    def value(self, node: ast.expr) -> Value:
        """The value of an expression."""
        match node:
            case ast.Constant():
                found = V.number(node.value)
                if found is None:
                    self.source.refuse(node, f"`{node.value!r}` is no number")
                return found
            case ast.Name():
                return self.name(node)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return V.apply(_OPERATORS[type(node.op)], self.value(node.left), self.value(node.right))
            case ast.UnaryOp():
                return self.unary(node)
            case ast.BoolOp():
                combine: Callable[[Expr, Expr], Expr] = V.both if isinstance(node.op, ast.And) else V.either
                word = "an operand of `and`" if isinstance(node.op, ast.And) else "an operand of `or`"
                result, *others = [V.truth(self.value(v), word) for v in node.values]
                for other in others:
                    result = combine(result, other)
                return Value(result, False)
            case ast.Compare():
                return self.compare(node)
            case ast.IfExp():
                test = V.truth(self.value(node.test), "the condition")
                return V.select(test, self.value(node.body), self.value(node.orelse))
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
            case ast.BinOp():
                self.source.refuse(node, "`@` cannot stand in a loop program", hint="write loops")
            case ast.Attribute():
                return self.outer(node)
        self.refuse(node)

    def unary(self, node: ast.UnaryOp) -> Value:
        """The value of a unary operator."""
        operand = self.value(node.operand)
        match node.op:
            case ast.USub():
                return V.negative(operand)
            case ast.Invert():
                return V.inverted(operand)
            case ast.Not():
                return Value(E.unary("not", V.truth(operand, "the operand of `not`")), False)
        return operand

    def compare(self, node: ast.Compare) -> Value:
        """The value of a comparison, chained or not."""
        operands = [self.value(v) for v in (node.left, *node.comparators)]
        result: Expr | None = None
        for op, a, b in zip(node.ops, operands, operands[1:], strict=False):
            if type(op) not in _COMPARISONS:
                self.source.refuse(node, f"`{_WORDS[type(op)]}` cannot stand in a loop program", hint="compare numbers with <, <=, ==, !=")
            if isinstance(op, ast.Gt | ast.GtE):
                a, b = b, a
            one = V.apply(_COMPARISONS[type(op)], a, b).expr
            result = one if result is None else V.both(result, one)
        assert result is not None
        return Value(result, False)

    def subscript(self, node: ast.Subscript) -> Value:
        """The element that a subscript reads."""
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return self.extent(node, node.value.value)
        buffer, indices = self.element(node)
        return Value(E.read(buffer, indices), False)

    def element(self, node: ast.Subscript) -> tuple[Buffer, tuple[Expr, ...]]:
        """The buffer and the indices of `A[i, j]`."""
        if isinstance(node.value, ast.Subscript):
            self.source.refuse(node, "an element of an element", hint="put all indices in one pair of brackets: A[i, j]")
        if not isinstance(node.value, ast.Name):
            self.source.refuse(node, "only arrays can be indexed")
        buffer = self.buffer(node.value)
        indices = tuple(self.integer(i) for i in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]))
        if len(indices) != len(buffer.shape):
            self.source.refuse(node, f"`{buffer.name}` has {len(buffer.shape)} dimensions and is indexed with {len(indices)}")
        for index, extent in zip(indices, buffer.shape, strict=True):
            if index.op == "const" and index.attr < 0:
                self.source.refuse(
                    node, f"the index {index.attr} of `{buffer.name}`", "Python counts it from the end", f"write {extent} - {-index.attr}"
                )
        return buffer, indices

    def buffer(self, node: ast.Name) -> Buffer:
        """The buffer that a name stands for."""
        if node.id not in self.arrays:
            known = ", ".join(self.arrays)
            why = (
                "it is made further down"
                if node.id in self.local_arrays
                else f"the arrays here are {known}"
                if known
                else "there are none here"
            )
            self.source.refuse(node, f"`{node.id}` is no array", why, f'declare it: @program({node.id}="float64[n]")')
        return self.arrays[node.id]

    def extent(self, node: ast.Subscript | ast.Call, array: ast.expr) -> Value:
        """`A.shape[0]` or `len(A)`."""
        if not isinstance(array, ast.Name):
            self.source.refuse(node, "only arrays have a shape")
        buffer = self.buffer(array)
        axis = self.integer(node.slice) if isinstance(node, ast.Subscript) else E.const(0)
        if axis.op != "const" or not 0 <= axis.attr < len(buffer.shape):
            self.source.refuse(node, f"`{buffer.name}` has {len(buffer.shape)} dimensions", hint="A.shape[k] with a constant k from 0")
        return Value(as_expr(buffer.shape[int(axis.attr)]), True)

    def integer(self, node: ast.expr) -> Expr:
        """An integer for indices, ranges and shapes."""
        value = self.value(node)
        if not is_integer(value.expr.dtype):
            self.source.refuse(
                node, f"`{ast.unparse(node)}` is {value.expr.dtype} instead of an integer", hint="`//` divides integers; int(x) converts"
            )
        return simplify(value.to(INDEX))

    def call(self, node: ast.Call) -> Value:
        """The value of a call."""
        function = self.resolved(node.func)
        if function is len and len(node.args) == 1:
            return self.extent(node, node.args[0])
        if function is None:
            self.source.refuse(node, f"the function `{ast.unparse(node.func)}` is not known here", hint=f"known are {V.FUNCTIONS}")
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            self.source.refuse(node, f"`{ast.unparse(node.func)}` with keywords or `*`", hint="pass plain arguments")
        if function is np.empty or function is np.zeros:
            self.source.refuse(node, "an array inside an expression", hint="A = np.empty(...) on a line of its own")
        return V.call(function, [self.value(a) for a in node.args])

    def name(self, node: ast.Name) -> Value:
        """What a name stands for."""
        local = self.local_of.get(node)
        if local is not None:
            known = self.known.get(local)
            return known if known is not None else Value(self.buffers[local][()], self.types[local].weak)
        found = self.variables.get(node.id) or self.sizes.get(node.id)
        if found is not None:
            return found
        if node.id in self.loop_names:
            self.source.refuse(
                node, f"the loop variable `{node.id}` is used outside of its loop", hint="keep its value in another variable"
            )
        if node.id in self.arrays or node.id in self.local_arrays:
            self.source.refuse(
                node, f"the array `{node.id}` is used as a number", hint=f"an element: {node.id}[...]; its length: {node.id}.shape[0]"
            )
        return self.outer(node)

    def outer(self, node: ast.Name | ast.Attribute) -> Value:
        """A constant of the module."""
        found = self.resolved(node)
        value = None if found is None else V.number(found)
        if value is None:
            text = ast.unparse(node)
            what = f"the name `{text}` is not known" if found is None else f"`{text}` is {_described(found)}"
            hint = "a loop program knows its parameters, its local variables, and numbers of the module"
            self.source.refuse(node, what, hint=hint)
        return value

    def named(self, node: ast.Name) -> Any:
        """What a name means outside of the function; None for what is unknown, or means something else here."""
        if node.id in self.parameters or node.id in self.sizes or node.id in self.loop_names or node in self.local_of:
            return None
        return self.outside.get(node.id, getattr(builtins, node.id, None))

    def resolved(self, node: ast.expr) -> Any:
        """The object that `np.sqrt` or `sqrt` names."""
        match node:
            case ast.Name():
                return self.named(node)
            case ast.Attribute():
                base = self.resolved(node.value)
                return None if base is None else getattr(base, node.attr, None)
            case ast.Constant(value=str()):
                return node.value
        return None


def update(place: Assigned, value: Expr) -> Stmt:
    """A store; where the value is the old one combined with something else by an associative operator, an accumulation."""
    old = place.current
    reducers = standard_reducers(place.buffer.dtype)
    if value.op == "sub" and value.args[0] is old and not _uses(value.args[1], old):
        return L.Accumulate(place.buffer, place.indices, _negated(value.args[1]), reducers["sum"])
    if value.op == "add" and old in value.args and place.buffer.dtype != "bool":
        other = value.args[1] if value.args[0] is old else value.args[0]
        if not _uses(other, old):
            return L.Accumulate(place.buffer, place.indices, other, reducers["sum"])
    name = _FOLDS.get(value.op)
    logical = name in ("all", "any")
    if name is not None and logical == (place.buffer.dtype == "bool"):
        # The least and the largest do not depend on the order of the operands; a product, being rounded, does.
        operands = _flat(value, value.op) if value.op != "mul" else list(value.args)
        others = [x for x in operands if x is not old]
        if len(others) == len(operands) - 1 and not any(_uses(x, old) for x in others):
            rest = others[0]
            for x in others[1:]:
                rest = E.binary(value.op, rest, x)
            return L.Accumulate(place.buffer, place.indices, rest, reducers[name])
    return L.Store(place.buffer, place.indices, value)


def _flat(e: Expr, op: str) -> list[Expr]:
    return [x for a in e.args for x in _flat(a, op)] if e.op == op else [e]


def _uses(e: Expr, part: Expr) -> bool:
    return any(node is part for node in E.walk(e))


def _negated(e: Expr) -> Expr:
    """-e; of a product the first factor, so that it is still a product to be fused with the addition."""
    if e.op == "mul":
        return E.binary("mul", _negated(e.args[0]), e.args[1])
    return e.args[0] if e.op == "neg" else E.unary("neg", e)


def _stored(stmt: ast.Assign | ast.AugAssign) -> list[ast.Name]:
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
    return [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _described(thing: Any) -> str:
    return "a module" if isinstance(thing, type(ast)) else "a function" if callable(thing) else f"a {type(thing).__name__}"
