"""Reads the printed form of all IRs (expressions, loops, instructions, tensor expressions, graphs, programs): str(parse(str(x))) == str(x).

Recursive descent; for expressions see `expression_parser`. Text is only ever read, never evaluated; bad
text is refused with a `ParseError` that shows the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import loops as L, program as P
from tcomp.ir.dtypes import NARROW_INTEGERS, integer_range, is_integer, to_numpy
from tcomp.ir.expr import Dim, Expr, as_expr
from tcomp.ir.graph import STRUCTURAL, Graph, Node, Operator, Value
from tcomp.ir.instruction import ELEMENT, WARP, Fragment, Instruction, Operand, TileOp, VectorOp, WarpOp, lane_of
from tcomp.ir.layout import Layout, Piece
from tcomp.ir.te import Extern, Tensor
from tcomp.ir.text.expression_parser import ExpressionParser


def parse_kernel(text: str) -> L.Kernel:
    """A printed kernel."""
    return (parser := _Parser(text)).whole(parser.kernel)


def parse_instruction(text: str) -> Instruction:
    """A printed instruction."""
    return (parser := _Parser(text)).whole(parser.instruction)


def parse_te(text: str, given: Mapping[str, Any] | None = None) -> tuple[Tensor, ...]:
    """The outputs of tensor expressions printed by `print_te`. `given` are tensors and sizes to be used for placeholders and
    symbolic dims, by printed name."""
    parser = _Parser(text)
    parser.given = given or {}
    return parser.whole(parser.tensors)


def parse_program(text: str) -> P.Program:
    """A printed host program."""
    return (parser := _Parser(text)).whole(parser.program)


def parse_layout(text: str, rank: int) -> Layout:
    """A printed layout, `(a/16,b,a%16)`, of tensors with `rank` dimensions."""
    parser = _Parser(text)
    return parser.whole(lambda: parser.layout(rank))


def parse_graph(text: str, operators: Mapping[str, Operator], constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """A printed graph. `operators` are looked up by name, large constants by their `content_hash`."""
    parser = _Parser(text)
    parser.operators, parser.constants = {**operators, **{op.name: op for op in STRUCTURAL}}, constants or {}
    return parser.whole(lambda: parser.graph(outermost=True))


class _Parser(ExpressionParser):
    """Statements, instructions, tensor expressions, programs and graphs. Each method reads what it is called after."""

    operators: Mapping[str, Operator]  # of graphs, as are the constants
    constants: Mapping[str, np.ndarray]
    given: Mapping[str, Any]  # to tensor expressions

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.values, self.instructions = dict[str, Value](), dict[str, Instruction]()

    def buffer(self) -> L.Buffer:
        """The declaration of a buffer, which is in scope from now on."""
        name, dtype, shape = self.sequence(self.name, ":", self.dtype, self.shape)
        b = self.arrays[name] = L.Buffer(name, dtype, shape, self.take() if self.token.text in L.SCOPES else "global")
        return b

    def signature(self) -> tuple[tuple[L.Buffer, ...], tuple[L.Buffer, ...]]:
        """`(buffers) -> (outputs)`: the buffers, which are now in scope, and the outputs among them."""
        buffers = self.bracketed(self.buffer, "()")
        self.expect("->")
        return buffers, self.bracketed(self.array, "()")

    def kernel(self) -> L.Kernel:
        name, scalars, (buffers, outputs) = self.sequence("kernel", self.name, self.dims, self.signature, "{")
        notes = tuple(iter(lambda: self.string() if self.accept("note") else None, None))
        assumptions = tuple(iter(lambda: self.expression() if self.accept("assume") else None, None))
        self.reducer_declarations()
        while self.peek("instruction"):
            i = self.instruction()
            self.instructions[i.name] = i
        return L.Kernel(name, buffers, outputs, scalars, self.body(), notes, assumptions)

    def instruction(self) -> Instruction:
        self.expect("instruction")
        start, name = self.token.start, self.name()
        with self.scope():
            self.arrays, self.variables = {}, {}
            buffers, outputs = self.signature()
            self.expect("{")
            operands = tuple([self.operand(b) for b in buffers])
            features, cycles, uops, reassociates, emission = self.sequence(
                "needs", lambda: self.several(self.string), "takes", self.number, "cycles", self.integer, "uops",
                lambda: self.accept("reassociates"), "emits", self.emission,
            )  # fmt: skip
            meaning = L.Kernel("meaning", buffers, outputs, (), self.body())
        try:
            return Instruction(name, meaning, operands, emission, features, float(cycles.attr), uops, reassociates)
        except IRError as error:
            self.fail(f"{error.what}: {error.why}", start)

    def emission(self) -> VectorOp | TileOp | WarpOp:
        kind = self.name()
        if kind not in ("vector", "tile", "warp"):
            self.fail(f"expected `vector`, `tile` or `warp`, found `{kind}`")
        code, arguments = self.string(), self.bracketed(self.name, "()")
        if kind == "tile":
            return TileOp(code, arguments, *self.sequence("group", self.integer))
        if kind == "warp":
            return WarpOp(code, arguments)
        return VectorOp(code, arguments, *self.sequence("lanes", self.integer, "group", self.integer))

    def operand(self, b: L.Buffer) -> Operand:
        self.expect("operand")
        start = self.token.start
        if self.array() is not b:
            self.fail(f"the operands are in the order of the buffers, next is `{b.name}`", start)
        fragment = None
        strides = self.bracketed(lambda: None if self.accept("_") else self.integer(), "[]")
        scopes = self.several(self.name) if self.accept("in") else L.SCOPES
        if self.accept("holds"):
            count, threads = self.integer(), self.integer() if self.accept("among") else WARP
            lane = lane_of(threads)
            self.expect("at")
            with self.scope():
                self.variables |= {lane.name: lane, ELEMENT.name: ELEMENT}
                fragment = Fragment(self.bracketed(self.expression, "[]"), count, threads)
        return Operand(strides, scopes, fragment)

    def body(self) -> L.Stmt:
        """Statements up to and including the closing brace."""
        with self.scope():
            return L.block(*self.until("}", self.statement))

    def braced(self) -> L.Stmt:
        self.expect("{")
        return self.body()

    def statement(self) -> L.Stmt:
        keyword = self.token.text if self.token.kind == "name" and not self.peek("[", 1) else ""
        if keyword in ("if", "call", "while", "alloc", "prefetch", "stream", "for", *L.KINDS):
            self.take()
        match keyword:
            case "if":
                cond, then = self.expression(), self.braced()
                return L.If(cond, then, self.braced() if self.accept("else") else None)
            case "call":
                return L.Call(self.known(self.instructions, "no instruction is called `{}` here"), self.braced())
            case "while":
                return L.While(self.expression(), self.braced())
            case "alloc":
                with self.scope():
                    b = self.buffer()
                    if self.accept("{"):
                        return L.Allocate(b, self.body())
                    rest = []
                    while not self.peek("}") and self.token.kind != "end":
                        rest.append(self.statement())
                    return L.Allocate(b, L.block(*rest))
            case "prefetch":
                return L.Prefetch(*self.place(), self.cache_level() if self.accept("in") else 1)
            case "stream":
                above = self.sequence(self.integer, ")")[0] if self.accept("(") else 0
                (b, indices), value = self.sequence(self.place, "=", self.expression)
                return L.Store(b, indices, value, above)
        if keyword == "for" or keyword in L.KINDS:
            with self.scope():
                v, extent = self.binding()
                return L.For(v, extent, self.braced(), L.SERIAL if keyword == "for" else keyword)
        b, indices = self.place()
        if self.accept("="):
            return L.Store(b, indices, self.expression())
        start = self.token.start
        name, value = ("sum", self.expression()) if self.accept("+=") else self.sequence(self.name, "=", self.expression)
        return L.Accumulate(b, indices, value, self.reducer(name, value.dtype, start))

    def cache_level(self) -> int:
        start, name = self.token.start, self.name()
        return int(name[1:]) if name in [f"l{n}" for n in L.CACHE_LEVELS] else self.fail("a cache is called l1, l2 or l3", start)

    def tensors(self) -> tuple[Tensor, ...]:
        self.sequence("te", self.dims)
        self.variables |= {name: d for name, d in self.given.items() if name in self.variables}
        self.sequence("{", self.reducer_declarations)
        while not self.accept("return"):
            if self.peek(",", 1) or self.peek("=", 1):
                self.extern()
                continue
            name = self.name()
            if self.accept(":"):
                dtype = self.dtype()
                declared = Tensor(name, self.shape(), dtype)
                self.arrays[name] = self.given.get(name, declared)
                continue
            with self.scope():
                axes, body = self.sequence(lambda: self.bracketed(self.binding, "[]"), "=", self.expression)
            self.arrays[name] = Tensor(name, [extent for _, extent in axes], body.dtype, tuple(v for v, _ in axes), body)
        outputs = self.several(self.array)
        self.expect("}")
        return outputs

    def extern(self) -> None:
        names = self.several(self.name)
        self.expect("=", "extern")
        inputs = self.bracketed(self.array, "()")
        with self.scope():
            buffers = partial(self.bracketed, self.buffer, "()")
            parameters, results, body = self.sequence("as", buffers, "->", buffers, self.braced)
        if len(inputs) != len(parameters) or len(names) != len(results):
            self.fail("an extern has one parameter for each input and one result for each output")
        program = Extern(inputs, parameters, results, body)
        for n, (name, b) in enumerate(zip(names, results, strict=True)):
            if name != "_":
                self.arrays[name] = Tensor(name, b.shape, b.dtype, extern=program, index=n)

    def program(self) -> P.Program:
        (dims,) = self.sequence("program", self.dims)
        counted = self.bracketed(self.limit, "()") if self.accept("counted") else ()
        (workspace,) = self.sequence("workspace", self.size)
        sizes = self.bracketed(self.size, "()") if self.accept("sizes") else ()
        checks = self.bracketed(self.size, "()") if self.accept("checks") else ()
        outputs, steps = self.sequence("->", partial(self.bracketed, self.shape, "()"), self.steps)
        return P.Program(dims, workspace, outputs, steps, sizes, checks, counted)

    def limit(self) -> tuple[Expr, Dim]:
        d = self.known(self.variables)
        return d, *self.sequence("<=", self.size)

    def steps(self) -> tuple[P.Step, ...]:
        self.expect("{")
        return self.until("}", self.step)

    def step(self) -> P.Step:
        if self.accept("call"):
            symbol = self.name()
            self.expect("(")
            buffers = () if self.peek(")") or self.peek(";") else self.several(self.ref)
            scalars = self.several(lambda: as_expr(self.size())) if self.accept(";") else ()
            self.expect(")", "@")
            return P.Call(symbol, buffers, scalars, self.name())
        if self.accept("if"):
            cond, then = self.ref(), self.steps()
            return P.Branch(cond, then, self.steps() if self.accept("else") else ())
        if self.accept("for"):
            with self.scope():
                var, trips = self.binding()
                condition = self.ref() if self.accept("while") else None
                return P.Repeat(var, trips, self.steps(), condition)
        if self.accept("copy"):
            count, src, dst = self.sequence(self.size, "bytes", "from", self.ref, "to", self.ref)
            return P.Copy(dst, src, count)
        dst, value = self.sequence("set", self.ref, "=", self.size)
        return P.SetIndex(dst, as_expr(value))

    def ref(self) -> P.Ref:
        start, name = self.token.start, self.name()
        base = name.rstrip("0123456789")
        number = name[len(base) :]
        if base not in P.MEMORIES or (base in P.NUMBERED) != bool(number) or len(number) > 9:
            self.fail(f"`{name}` is not a memory", start, hint="one of input0, input1, ..., output0, ..., weights, workspace, dims")
        return P.Ref(base, int(number or 0), *self.sequence("[", self.size, "]"))

    def graph(self, outermost: bool = False) -> Graph:
        outer, self.values = self.values, {}
        self.expect("graph")
        name = self.name()
        if outermost:
            self.dims()
        inputs = self.bracketed(self.value_declaration, "()")
        self.expect("->")  # outputs are named before their nodes, and looked up at the end
        results = self.bracketed(lambda: self.sequence("%", lambda: self.token.start, self.name), "()")
        checks = dict[Expr, str]()
        while self.accept("check"):
            condition, where = self.sequence("(", self.expression, ")", "@", self.name)
            checks[condition] = where
        self.expect("{")
        constants, nodes = dict[Value, np.ndarray](), list[Node]()
        while not self.accept("}"):
            if self.accept("const"):
                (value,) = self.sequence(self.value_declaration, "=")
                constants[value] = self.constant(value)
            else:
                nodes.append(self.node())
        for start, result in results:
            if result not in self.values:
                self.fail(f"no value `%{result}` is known here", start)
        outputs = tuple(self.values[result] for _, result in results)
        self.values = outer
        return Graph(name, inputs, outputs, tuple(nodes), constants, checks)

    def value(self) -> Value:
        self.expect("%")
        return self.known(self.values, "no value `%{}` is known here")

    def value_declaration(self) -> Value:
        """`%name: dtype[shape] layout`, in scope from now on."""
        self.expect("%")
        start, name = self.token.start, self.name()
        if name in self.values:
            self.fail(f"the value `%{name}` is defined twice", start)
        dtype, shape = self.sequence(":", self.dtype, self.shape)
        layout = self.layout(len(shape)) if self.peek("(") else None
        v = self.values[name] = Value(name, dtype, shape, layout)
        return v

    def layout(self, rank: int) -> Layout:
        """`(a+1+1,b/16,c%16)`."""

        def piece() -> Piece:
            letter = self.name()
            axis = ord(letter[0]) - ord("a")
            if len(letter) > 1 or not 0 <= axis < rank:
                self.fail(f"`{letter}` is not an axis of {rank} dimensions")
            div = self.integer() if self.accept("/") else 1
            mod = self.integer() if self.accept("%") else None
            if div < 1 or (mod is not None and mod < 1):
                self.fail("the pieces of a layout are positive")
            halo = self.sequence("+", self.integer, "+", self.integer) if self.peek("+") else ()
            return Piece(axis, div, mod, *halo)

        return Layout(rank, self.bracketed(piece, "()"))

    def node(self) -> Node:
        # Its own outputs are not in scope in the arguments: they are entered when the node is complete.
        known = dict(self.values)
        outputs = self.several(self.value_declaration) if self.peek("%") else ()
        defined, self.values = self.values, known
        self.expect(*["="] * bool(outputs))
        operator = self.known(self.operators, "there is no operator `{}`")
        inputs, attrs = list[Value | None](), dict[str, Any]()

        def argument() -> None:
            if self.peek("%"):
                inputs.append(self.value())
            elif self.peek("_") and not self.peek("=", 1):
                self.take()
                inputs.append(None)
            else:
                key, value = self.sequence(self.name, "=", self.attribute)
                attrs[key] = value

        self.bracketed(argument, "()")
        label = self.name() if self.accept("@") else ""
        bodies = self.until("}", self.graph) if self.accept("{") else ()
        self.values = defined
        return Node(operator, tuple(inputs), outputs, attrs, label, bodies)

    def attribute(self) -> Any:
        if self.token.kind == "string":
            return self.string()
        if self.accept("none"):
            return None
        if self.peek("{"):
            return self.sequence("{", self.expression, "}")[0]
        if self.accept("("):
            items: list[Any] = []
            while not self.accept(")"):
                items.append(self.attribute())
                if not self.peek(")"):
                    self.expect(",")
            return tuple(items)
        literal = self.prefixed()
        if literal.op != "const":
            self.fail("expected an attribute: a number, string, `{dim}` or tuple of these")
        return literal.attr

    def constant(self, value: Value) -> np.ndarray:
        if any(isinstance(d, Expr) for d in value.shape):
            self.fail(f"the constant `%{value.name}` has a symbolic shape")
        shape = tuple(int(d) for d in value.shape)
        if self.accept("sha256"):
            key = self.string()
            if key not in self.constants:
                self.fail(f"the constant {key} is not among those given", self.tokens[self.position - 1].start)
            array = self.constants[key]
            if array.shape != shape or array.dtype != to_numpy(value.dtype):
                self.fail(f"the constant {key} is {array.dtype.name}{list(array.shape)}")
            return array
        items = self.bracketed(self.attribute, "[]")
        if not all(isinstance(x, int | float) for x in items) or len(items) != prod(shape):
            self.fail(f"`%{value.name}` needs {prod(shape)} numbers")
        if is_integer(value.dtype) or value.dtype in NARROW_INTEGERS:
            lo, hi = integer_range(value.dtype)
            if not all(isinstance(x, int) and lo <= x <= hi for x in items):
                self.fail(f"`%{value.name}` needs integers in {lo}..{hi}")
        return np.array(items, to_numpy(value.dtype)).reshape(shape)
