"""Reads the printed form of expressions, loop programs, instructions and tensor expressions: str(parse(str(x))) == str(x).

Precedence climbing for expressions, recursive descent for the rest. Text is only ever read, never evaluated; bad
text is refused with a `ParseError` that shows the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tcomp.errors import IRError, ParseError
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.dtypes import BITS, integer_range
from tcomp.ir.expr import ARITY, INDEX, Dim, Expr, Reducer, const, standard_reducers
from tcomp.ir.instruction import ELEMENT, WARP, CopyOp, Fragment, Instruction, Operand, VectorOp, WarpOp, lane_of
from tcomp.ir.te import Extern, Tensor
from tcomp.ir.text.printer import INFIX, PREFIX, SUFFIXES, UNARY_PRECEDENCE
from tcomp.ir.text.tokens import DIGITS, Tokens

_INFIX = {symbol: (op, precedence) for op, (symbol, precedence) in INFIX.items()}
_PREFIX = {symbol: op for op, symbol in PREFIX.items()}
_SUFFIXES = {suffix: dtype for dtype, suffix in SUFFIXES.items() if suffix}


def parse_expr(text: str, names: Mapping[str, Any] | None = None) -> Expr:
    """An expression. `names` gives the variables, tensors or buffers, and reducers that are not standard, by printed name."""
    parser = Parser(text)
    for name, thing in (names or {}).items():
        (parser.variables if isinstance(thing, Expr) else parser.reducers if isinstance(thing, Reducer) else parser.arrays)[name] = thing
    return parser.whole(parser.expression)


def parse_kernel(text: str) -> L.Kernel:
    """A printed kernel."""
    parser = Parser(text)
    return parser.whole(parser.kernel)


def parse_instruction(text: str) -> Instruction:
    """A printed instruction."""
    parser = Parser(text)
    return parser.whole(parser.instruction)


def parse_te(text: str) -> list[Tensor]:
    """The outputs of tensor expressions printed by `print_te`."""
    parser = Parser(text)
    return parser.whole(parser.tensors)


class Parser(Tokens):
    """Recursive descent over the tokens, with the things in scope by name."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.variables: dict[str, Expr] = {}
        self.arrays: dict[str, Any] = {}
        self.reducers: dict[str, Reducer] = {}
        self.instructions: dict[str, Instruction] = {}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What comes into scope inside leaves it at the end."""
        before = dict(self.variables), dict(self.arrays)
        yield
        self.variables, self.arrays = before

    def dtype(self) -> str:
        """The name of an element type."""
        if self.token.text not in BITS:
            self.fail(f"expected a dtype, found {self.found()}", hint=f"one of {', '.join(BITS)}")
        return self.take()

    # ------------------------------------------------------------ expressions

    def expression(self) -> Expr:
        """An expression, with the names that `let` gives to its parts."""
        if not self.accept("let"):
            return self.operators_above(0)
        with self.scope():
            more = True
            while more:
                name = self.name()
                self.expect("=")
                self.variables[name] = self.expression()
                more = self.accept(";")
            self.expect("in")
            return self.expression()

    def operators_above(self, precedence: int) -> Expr:
        """A chain of infix operators that bind at least as tightly as `precedence`."""
        left = self.prefixed()
        while self.token.kind == "sign":
            found = _INFIX.get(self.token.text)
            if found is None or found[1] < precedence:
                break
            op, own = found
            self.take()
            right = self.operators_above(own + 1)
            left = self.made(E.binary, op, left, right)
        return left

    def made(self, function: Callable[..., Expr], *args: Any) -> Expr:
        """An expression; what its constructor refuses is shown in place."""
        try:
            return function(*args)
        except ParseError:
            raise
        except IRError as error:
            self.fail(error.what, hint=error.hint)

    def prefixed(self) -> Expr:
        """An operand with the prefix operators before it."""
        op = _PREFIX.get(self.token.text) if self.token.kind == "sign" else None
        if op is None:
            return self.primary()
        self.take()
        return self.made(E.unary, op, self.operators_above(UNARY_PRECEDENCE))

    def primary(self) -> Expr:
        """A number, name, read, call, or expression in parentheses."""
        token = self.token
        if token.kind == "number":
            return self.number()
        if self.accept("("):
            inside = self.expression()
            self.expect(")")
            return inside
        if token.kind == "name":
            if token.text in ("true", "false"):
                return const(self.take() == "true", "bool")
            if token.text in ("inf", "nan"):
                return const(float(self.take()), "float64")
            if self.peek("(", 1):
                return self.call(self.take())
        name = self.name()
        if self.accept("["):
            if name not in self.arrays:
                self.fail(f"nothing is called `{name}` here", token.start)
            indices = self.listed(self.expression, "]")
            return self.made(E.read, self.arrays[name], indices)
        if name not in self.variables:
            self.fail(f"nothing is called `{name}` here", token.start)
        return self.variables[name]

    def number(self) -> Expr:
        """A literal, whose suffix says its dtype."""
        suffix = self.token.suffix
        digits = self.token.text.removesuffix(suffix)
        if len(digits) > DIGITS:
            self.fail(f"a number of more than {DIGITS} digits")
        if digits.isdigit() and not suffix.endswith("f"):
            dtype = _SUFFIXES.get(suffix, INDEX)
            if dtype in ("float16", "bfloat16"):
                value: int | float = float(digits)
            else:
                value = int(digits)
                if value > integer_range(dtype)[1] + (dtype[0] == "i"):  # one more, for the smallest behind a minus sign
                    self.fail(f"{digits} does not fit in {dtype}")
        else:
            dtype, value = _SUFFIXES.get(suffix, "float64"), float(digits)
            if dtype not in ("float16", "bfloat16", "float32", "float64"):
                self.fail(f"a fraction of type {dtype}")
        self.take()
        return const(value, dtype)

    def call(self, name: str) -> Expr:
        """`name(...)` from the opening parenthesis on."""
        start = self.tokens[self.position - 1].start
        self.expect("(")
        if self.token.kind in ("name", "quoted") and (self.peek("in", 1) or self.peek("{", 1)):
            return self.reduction(name, start)
        if name == "bitcast":
            inside = self.expression()
            self.expect(",")
            dtype = self.dtype()
            self.expect(")")
            return E.bitcast(inside, dtype)
        args = self.listed(self.expression, ")")
        count = 1 if name in BITS else ARITY.get(name)
        if count is None:
            self.fail(f"there is no function `{name}`", start)
        if len(args) != count:
            self.fail(f"`{name}` takes {count} operands and was given {len(args)}", start)
        return self.made(E.cast, args[0], name) if name in BITS else self.made(E.operation, name, *args)

    def reduction(self, name: str, start: int) -> Expr:
        """A reduction, `sum(k in 0..K: body)`, from behind its parenthesis."""

        def axis() -> Expr:
            v, extent = self.binding()
            if extent != (v.attr.extent if v.attr.extent is not None else v.attr.hi + 1 if v.attr.hi is not None else None):
                self.fail(f"the range of `{v.name}` does not end below {extent}")
            return v

        with self.scope():
            axes = self.listed(axis, ":")
            body = self.expression()
            self.expect(")")
        return E.reduce(self.reducer(name, body.dtype, start), body, axes)

    def reducer(self, name: str, dtype: str, start: int) -> Reducer:
        """The reducer of that name and dtype."""
        found = self.reducers.get(name) or standard_reducers(dtype).get(name)
        if found is None or found.identity.dtype != dtype:
            self.fail(f"there is no reducer `{name}` of {dtype}", start)
        return found

    def binding(self) -> tuple[Expr, Dim]:
        """`name in 0..extent`: the variable, which is now in scope, and its extent."""
        name = self.name()
        declared = self.range(name) if self.peek("{") else None
        self.expect("in")
        if self.token.text != "0":
            self.fail("a loop starts at 0")
        self.take()
        self.expect("..")
        extent = self.dim(self.operators_above(UNARY_PRECEDENCE + 1))
        v = self.variables[name] = declared if declared is not None else E.loop_var(name, extent)
        return v, extent

    def dim(self, e: Expr) -> Dim:
        """The extent that an expression is: an int where it is constant."""
        if e.dtype != INDEX:
            self.fail(f"an extent is {INDEX}, not {e.dtype}")
        return int(e.attr) if e.op == "const" else e

    def range(self, name: str) -> Expr:
        """`{lo..hi < extent: dtype}` behind the name of a variable."""
        self.expect("{")
        lo = None if self.peek("..") else self.integer()
        self.expect("..")
        hi = self.integer() if self.token.kind == "number" or self.peek("-") else None
        extent = self.operators_above(UNARY_PRECEDENCE + 1) if self.accept("<") else None
        dtype = self.dtype() if self.accept(":") else INDEX
        self.expect("}")
        return E.var(name, lo, hi, dtype, extent)

    def dims(self) -> tuple[Expr, ...]:
        """`<n{lo..hi}, ...>`: symbolic dims, which are in scope from now on."""

        def declared() -> Expr:
            name = self.name()
            self.variables[name] = v = self.range(name)
            return v

        return tuple(self.listed(declared, ">")) if self.accept("<") else ()

    def shape(self) -> list[Dim]:
        """Extents in brackets."""
        self.expect("[")
        return [self.dim(e) for e in self.listed(self.expression, "]")]

    def reducer_declarations(self) -> None:
        """Declarations of reducers that are not standard, which are in scope from now on."""

        def operand() -> Expr:
            name = self.name()
            v = self.variables[name] = self.range(name)
            return v

        while self.accept("reducer"):
            name = self.name()
            self.expect("(")
            with self.scope():
                lhs = operand()
                self.expect(",")
                rhs = operand()
                self.expect(")", "=")
                combine = self.expression()
                self.expect("from")
                identity = self.expression()
            if {lhs.dtype, rhs.dtype, combine.dtype} != {identity.dtype} or identity.op != "const":
                self.fail(f"the reducer `{name}` mixes dtypes, or its identity is no constant")
            self.reducers[name] = Reducer(name, lhs, rhs, combine, identity)

    # ------------------------------------------------------------ loop programs

    def buffer(self) -> L.Buffer:
        """The declaration of a buffer, which is in scope from now on."""
        name = self.name()
        self.expect(":")
        dtype, shape = self.dtype(), self.shape()
        scope = self.take() if self.token.text in L.SCOPES else "global"
        made = self.arrays[name] = L.Buffer(name, dtype, shape, scope)
        return made

    def array(self) -> Any:
        """A buffer or tensor in scope."""
        start, name = self.token.start, self.name()
        if name not in self.arrays:
            self.fail(f"nothing is called `{name}` here", start)
        return self.arrays[name]

    def signature(self) -> tuple[tuple[L.Buffer, ...], tuple[L.Buffer, ...]]:
        """`(buffers) -> (outputs) {`: the buffers, which are now in scope, and the outputs among them."""
        self.expect("(")
        buffers = tuple(self.listed(self.buffer, ")"))
        self.expect("->", "(")
        outputs = tuple(self.listed(self.array, ")"))
        self.expect("{")
        return buffers, outputs

    def kernel(self) -> L.Kernel:
        """A kernel."""
        self.expect("kernel")
        name, scalars = self.name(), self.dims()
        buffers, outputs = self.signature()
        notes = []
        while self.accept("note"):
            notes.append(self.string())
        self.reducer_declarations()
        while self.peek("instruction"):
            i = self.instruction()
            self.instructions[i.name] = i
        return L.Kernel(name, buffers, outputs, scalars, self.body(), tuple(notes))

    def instruction(self) -> Instruction:
        """The declaration of an instruction, in a scope of its own."""
        self.expect("instruction")
        start, name = self.token.start, self.name()
        with self.scope():
            self.arrays, self.variables = {}, {}
            buffers, outputs = self.signature()
            operands = tuple([self.operand(b) for b in buffers])
            self.expect("needs")
            features = tuple(self.several(self.string))
            self.expect("takes")
            cycles = float(self.number().attr)
            self.expect("cycles")
            uops = self.integer()
            self.expect("uops")
            reassociates = self.accept("reassociates")
            self.expect("emits")
            emission = self.emission()
            meaning = L.Kernel("meaning", buffers, outputs, (), self.body())
        try:
            return Instruction(name, meaning, operands, emission, features, cycles, uops, reassociates)
        except IRError as error:
            self.fail(f"{error.what}: {error.why}", start)

    def emission(self) -> VectorOp | WarpOp | CopyOp:
        """How an instruction is emitted."""
        kind = self.name()
        if kind not in ("vector", "warp", "copy"):
            self.fail(f"expected `vector`, `warp` or `copy`, found `{kind}`")
        code = self.string()
        self.expect("(")
        arguments = tuple(self.listed(self.name, ")"))
        if kind != "vector":
            return WarpOp(code, arguments) if kind == "warp" else CopyOp(code, arguments)
        self.expect("lanes")
        lanes = self.integer()
        self.expect("group")
        return VectorOp(code, arguments, lanes, self.integer())

    def operand(self, b: L.Buffer) -> Operand:
        """What an instruction demands of one of its buffers."""
        self.expect("operand")
        start = self.token.start
        if self.array() is not b:
            self.fail(f"the operands are in the order of the buffers, next is `{b.name}`", start)
        self.expect("[")
        strides = tuple(self.listed(lambda: None if self.accept("_") else self.integer(), "]"))
        scopes = tuple(self.several(self.name)) if self.accept("in") else L.SCOPES
        if not self.accept("holds"):
            return Operand(strides, scopes)
        count = self.integer()
        threads = self.integer() if self.accept("among") else WARP
        self.expect("at", "[")
        lane = lane_of(threads)
        with self.scope():
            self.variables |= {lane.name: lane, ELEMENT.name: ELEMENT}
            indices = tuple(self.listed(self.expression, "]"))
        return Operand(strides, scopes, Fragment(indices, count, threads))

    def body(self) -> L.Stmt:
        """Statements up to and including the closing brace."""
        with self.scope():
            stmts = []
            while not self.accept("}"):
                stmts.append(self.statement())
            return L.block(*stmts)

    def braced(self) -> L.Stmt:
        """Statements in braces."""
        self.expect("{")
        return self.body()

    def statement(self) -> L.Stmt:
        """A statement."""
        keyword = self.token.text if self.token.kind == "name" and not self.peek("[", 1) else ""
        if keyword in ("if", "call", "while", "alloc", "prefetch", "stream", "for", *L.KINDS):
            self.take()
        match keyword:
            case "if":
                cond, then = self.expression(), self.braced()
                return L.If(cond, then, self.braced() if self.accept("else") else None)
            case "call":
                start, name = self.token.start, self.name()
                if name not in self.instructions:
                    self.fail(f"no instruction is called `{name}` here", start)
                return L.Call(self.instructions[name], self.braced())
            case "while":
                return L.While(self.expression(), self.braced())
            case "alloc":
                outside = dict(self.arrays)
                b = self.buffer()
                if self.accept("{"):
                    body = self.body()
                    self.arrays = outside
                    return L.Allocate(b, body)
                rest = []
                while not self.peek("}") and self.token.kind != "end":
                    rest.append(self.statement())
                return L.Allocate(b, L.block(*rest))
            case "prefetch":
                return L.Prefetch(*self.place())
            case "stream":
                b, indices = self.place()
                self.expect("=")
                return L.Store(b, indices, self.expression(), True)
        if keyword == "for" or keyword in L.KINDS:
            with self.scope():
                v, extent = self.binding()
                return L.For(v, extent, self.braced(), L.SERIAL if keyword == "for" else keyword)
        return self.store()

    def place(self) -> tuple[L.Buffer, tuple[Expr, ...]]:
        """An element of a buffer."""
        b = self.array()
        self.expect("[")
        return b, tuple(self.listed(self.expression, "]"))

    def store(self) -> L.Stmt:
        """A store or an accumulation."""
        b, indices = self.place()
        if self.accept("="):
            return L.Store(b, indices, self.expression())
        start = self.token.start
        if self.accept("+="):
            name = "sum"
        else:
            name = self.name()
            self.expect("=")
        value = self.expression()
        return L.Accumulate(b, indices, value, self.reducer(name, value.dtype, start))

    # ------------------------------------------------------------ tensor expressions

    def tensors(self) -> list[Tensor]:
        """Tensor expressions: the tensors that they return."""
        self.expect("te")
        self.dims()
        self.expect("{")
        self.reducer_declarations()
        while not self.accept("return"):
            if self.peek(",", 1) or self.peek("=", 1):
                self.extern()
                continue
            name = self.name()
            if self.accept(":"):
                dtype = self.dtype()
                self.arrays[name] = Tensor(name, self.shape(), dtype)
                continue
            with self.scope():
                self.expect("[")
                axes = self.listed(self.binding, "]")
                self.expect("=")
                body = self.expression()
            self.arrays[name] = Tensor(name, [extent for _, extent in axes], body.dtype, tuple(v for v, _ in axes), body)
        outputs = self.several(self.array)
        self.expect("}")
        return outputs

    def extern(self) -> None:
        """An extern, whose results are in scope from now on."""
        names = self.several(self.name)
        self.expect("=", "extern", "(")
        inputs = tuple(self.listed(self.array, ")"))
        with self.scope():
            self.expect("as", "(")
            parameters = tuple(self.listed(self.buffer, ")"))
            self.expect("->", "(")
            results = tuple(self.listed(self.buffer, ")"))
            body = self.braced()
        if len(inputs) != len(parameters) or len(names) != len(results):
            self.fail("an extern has one parameter for each input and one result for each output")
        program = Extern(inputs, parameters, results, body)
        for n, (name, b) in enumerate(zip(names, results, strict=True)):
            if name != "_":
                self.arrays[name] = Tensor(name, b.shape, b.dtype, extern=program, index=n)
