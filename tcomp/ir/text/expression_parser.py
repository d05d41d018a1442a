"""Reads printed expressions, by precedence climbing, with the declarations of variables and reducers in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS, SIGNED, integer_range, is_float
from tcomp.ir.expr import INDEX, Dim, Expr, const, reduce
from tcomp.ir.reducers import Reducer, standard_reducers
from tcomp.ir.scalar_operators import ARITY
from tcomp.ir.text.printer import INFIX, PREFIX, SUFFIXES, UNARY_PRECEDENCE
from tcomp.ir.text.tokens import DIGITS, T, Tokens

_INFIX = {symbol: (op, precedence) for op, (symbol, precedence) in INFIX.items()}
_PREFIX = {symbol: op for op, symbol in PREFIX.items()}
_SUFFIXES = {suffix: dtype for dtype, suffix in SUFFIXES.items() if suffix}


def parse_expr(text: str, names: Mapping[str, Any] | None = None) -> Expr:
    """An expression. `names` gives the variables, tensors or buffers, and reducers that are not standard, by printed name."""
    parser = ExpressionParser(text)
    for name, meant in (names or {}).items():
        (parser.variables if isinstance(meant, Expr) else parser.reducers if isinstance(meant, Reducer) else parser.arrays)[name] = meant
    return parser.whole(parser.expression)


class ExpressionParser(Tokens):
    """Recursive descent over the tokens; objects in scope are known by name: variables, arrays (tensors or buffers), reducers."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.variables, self.arrays, self.reducers = dict[str, Expr](), dict[str, Any](), dict[str, Reducer]()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Names that come into scope inside are dropped at the end."""
        before = dict(self.variables), dict(self.arrays)
        yield
        self.variables, self.arrays = before

    def known(self, names: Mapping[str, T], what: str = "nothing is called `{}` here") -> T:
        """The object of the next name, among `names`."""
        start, name = self.token.start, self.name()
        if name not in names:
            self.fail(what.format(name), start)
        return names[name]

    def dtype(self) -> str:
        """The name of a dtype."""
        if self.token.text not in BITS:
            self.fail(f"expected a dtype, found {self.found()}", hint=f"one of {', '.join(BITS)}")
        return self.take()

    def expression(self) -> Expr:
        """An expression, with the names that `let` gives to its parts."""
        if not self.accept("let"):
            return self.operators_above(0)
        with self.scope():
            more = True
            while more:
                name, value = self.sequence(self.name, "=", self.expression)
                self.variables[name] = value
                more = self.accept(";")
            self.expect("in")
            return self.expression()

    def operators_above(self, precedence: int) -> Expr:
        """Operands joined by infix operators of at least this precedence."""
        left = self.prefixed()
        while self.token.kind == "sign" and (infix := _INFIX.get(self.token.text)) and infix[1] >= precedence:
            self.take()
            left = self.made(E.binary, infix[0], left, self.operators_above(infix[1] + 1))
        return left

    def prefixed(self) -> Expr:
        """An operand: a literal, name, call, read or parenthesised expression, behind any prefix operators."""
        token = self.token
        if token.kind == "sign" and token.text in _PREFIX:
            smallest = self.take() == "-" and self.token.kind == "number"
            return self.made(E.unary, _PREFIX[token.text], self.number(smallest) if smallest else self.operators_above(UNARY_PRECEDENCE))
        if token.kind == "number":
            return self.number()
        if self.accept("("):
            inside: Expr = self.sequence(self.expression, ")")[0]
            return inside
        if token.kind == "name":
            if token.text in ("true", "false"):
                return const(self.take() == "true", "bool")
            if token.text in ("inf", "nan"):
                return const(float(self.take()), "float64")
            if self.peek("(", 1):
                return self.call()
        return self.made(E.read, *self.place()) if self.peek("[", 1) else self.known(self.variables)

    def number(self, negated: bool = False) -> Expr:
        """A literal, whose suffix says its dtype; behind a minus sign (`negated`) it may be one more than the largest."""
        if self.token.kind != "number":
            self.fail(f"expected a number, found {self.found()}")
        suffix = self.token.suffix
        digits = self.token.text.removesuffix(suffix)
        if len(digits) > DIGITS:
            self.fail(f"a number of more than {DIGITS} digits")
        whole = digits.isdigit() and not suffix.endswith("f")
        dtype = _SUFFIXES.get(suffix, INDEX if whole else "float64")
        if not whole and not is_float(dtype):
            self.fail(f"a fraction of type {dtype}")
        if not is_float(dtype) and int(digits) > integer_range(dtype)[1] + (negated and dtype in SIGNED):
            self.fail(f"{digits} does not fit in {dtype}")
        self.take()
        return const(float(digits) if is_float(dtype) else int(digits), dtype)

    def call(self) -> Expr:
        """A function, conversion or reduction of operands."""
        start, name = self.token.start, self.take()
        self.expect("(")
        if self.token.kind in ("name", "quoted") and (self.peek("in", 1) or self.peek("{", 1)):
            return self.reduction(name, start)
        if name == "bitcast":
            return E.bitcast(*self.sequence(self.expression, ",", self.dtype, ")"))
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
            axes, body = self.sequence(lambda: self.listed(axis, ":"), self.expression, ")")
        return reduce(self.reducer(name, body.dtype, start), body, axes)

    def reducer(self, name: str, dtype: str, start: int) -> Reducer:
        """The reducer of a name in scope, or the standard one; `start` is where the name begins."""
        found = self.reducers.get(name) or standard_reducers(dtype).get(name)
        if found is None or found.identity.dtype != dtype:
            self.fail(f"there is no reducer `{name}` of {dtype}", start)
        return found

    def binding(self) -> tuple[Expr, Dim]:
        """`name in 0..extent`: the variable, which is now in scope, and its extent."""
        name = self.name()
        declared = self.variable(name) if self.peek("{") else None
        self.expect("in")
        if self.take() != "0":
            self.fail("a loop starts at 0", self.tokens[self.position - 1].start)
        self.expect("..")
        extent = self.dim(self.operators_above(UNARY_PRECEDENCE + 1))
        v = self.variables[name] = declared if declared is not None else E.loop_var(name, extent)
        return v, extent

    def dim(self, e: Expr) -> Dim:
        """An expression as an extent: an int where it is constant."""
        if e.dtype != INDEX:
            self.fail(f"an extent is {INDEX}, not {e.dtype}")
        return int(e.attr) if e.op == "const" else e

    def size(self) -> Dim:
        """An extent."""
        return self.dim(self.expression())

    def shape(self) -> tuple[Dim, ...]:
        """Extents in brackets."""
        return self.bracketed(self.size, "[]")

    def variable(self, name: str = "") -> Expr:
        """The variable `name{lo..hi < extent | exact sizes: dtype}`, whose name may have been read already; it is in scope from now on."""
        name = name or self.name()
        self.expect("{")
        lo = None if self.peek("..") else self.integer()
        self.expect("..")
        hi = self.integer() if self.token.kind == "number" or self.peek("-") else None
        extent = self.operators_above(UNARY_PRECEDENCE + 1) if self.accept("<") else None
        exact = [self.integer()] if self.accept("|") else []
        while exact and self.accept(","):
            exact.append(self.integer())
        dtype = self.dtype() if self.accept(":") else INDEX
        self.expect("}")
        v = self.variables[name] = E.var(name, lo, hi, dtype, extent, self.source() if self.accept("=") else None, tuple(exact))
        return v

    def source(self) -> E.Source:
        """`input1[0]: int64 "what"`, or `n * 2 "what"`."""
        if self.peek("[", 1):
            start, memory, (number,), dtype, what = self.sequence(
                lambda: self.token.start, self.name, partial(self.bracketed, self.integer, "[]"), ":", self.dtype, self.string
            )
            if not (position := memory.removeprefix("input")).isdecimal() or len(position) > 9:
                self.fail(f"`{memory}` is not an input", start)
            return E.Source(None, int(position), number, dtype, what)
        value = self.expression()
        return E.Source(value, what=self.string())

    def dims(self) -> tuple[Expr, ...]:
        """`<n{lo..hi}, ...>`: symbolic dims, which are in scope from now on."""
        return self.listed(self.variable, ">") if self.accept("<") else ()

    def reducer_declarations(self) -> None:
        """Declarations of reducers that are not standard, which are in scope from now on."""
        while self.accept("reducer"):
            name = self.name()
            with self.scope():
                operands = partial(self.bracketed, self.variable, "()")
                (lhs, rhs), combine, identity = self.sequence(operands, "=", self.expression, "from", self.expression)
            if {lhs.dtype, rhs.dtype, combine.dtype} != {identity.dtype} or identity.op != "const":
                self.fail(f"the reducer `{name}` mixes dtypes, or its identity is not a constant")
            self.reducers[name] = Reducer(name, lhs, rhs, combine, identity)

    def array(self) -> Any:
        """The tensor or buffer of a name in scope."""
        return self.known(self.arrays)

    def place(self) -> tuple[Any, tuple[Expr, ...]]:
        """(array, indices) of an element, `name[indices]`."""
        return self.array(), self.bracketed(self.expression, "[]")
