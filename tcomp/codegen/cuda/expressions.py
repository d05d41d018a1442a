"""Expressions in CUDA C++: the text of a function under construction, the names in it, and the values that its statements compute.

Parts of an expression that are used several times, or are long, get names on lines of their own. Index arithmetic is done in 32 bits
where the ranges of the variables prove that it fits. Floats are never contracted or flushed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tcomp.codegen.cuda.math import HALF, HELPERS, REGISTER, function, literal
from tcomp.errors import CodegenError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import integer_range, is_float, is_integer, itemsize
from tcomp.ir.expr import INDEX, Expr, as_expr, bounds
from tcomp.ir.loops import Buffer, Kernel
from tcomp.ir.simplify import prove, simplify

_MAX_LENGTH = 110  # characters: longer expressions are cut into named parts, so that the text stays readable
_MAX_DEPTH = 30  # operators: deeper expressions are computed operands first, as Python's stack is limited
_RESERVED = """
    auto bool break case char class const continue default delete do double else enum extern false float for friend goto
    if inline int long new operator private protected public register return short signed sizeof static struct
    switch template this true typedef union unsigned using virtual void volatile while min max and or xor not
"""
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^"}
_FLOAT_HELPERS = {"min": "minimum", "max": "maximum", "floordiv": "float_floor_div", "mod": "float_mod"}
_INTEGER_HELPERS = {
    "min": "minimum", "max": "maximum", "floordiv": "floor_div", "mod": "floor_mod", "truncdiv": "trunc_div", "truncmod": "trunc_mod",
    "pow": "power", "shl": "shift_left", "shr": "shift_right",
}  # fmt: skip


class Expressions:
    """Lines of text, and the values computed on them.

    `names`: of buffers and variables. `scopes`: names of values of the statement at hand, by nesting. `loaded_lanes`: elements of vectors
    that have been loaded. `kept`: the dimensions that are left of register buffers which each thread has a part of.
    """

    def __init__(self, kernel: Kernel, helpers: set[str]) -> None:
        self.kernel, self.helpers = kernel, helpers
        self.lines: list[str] = []
        self.indent = 1
        self.taken = {*_RESERVED.split(), *HELPERS}
        self.names: dict[Buffer | Expr, str] = {}
        self.used_buffers: dict[Buffer, None] = {}
        self.used_scalars: dict[Expr, None] = {}
        self.kept: dict[Buffer, tuple[int, ...]] = {}
        self.scopes: list[dict[Expr, str]] = [{}]
        self.loaded_lanes: dict[Expr, str] = {}
        self.uses: Counter[Expr] = Counter()
        self.depth = 0

    def fail(self, what: str, why: str = "", hint: str = "") -> CodegenError:
        """The error that the kernel cannot be compiled."""
        return CodegenError(what, where=self.kernel.name, why=why, hint=hint)

    # ------------------------------------------------------------ text

    def line(self, text: str) -> None:
        """Add a line of text."""
        self.lines.append("  " * self.indent + text)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        """A block of lines behind a head: what is named within is unknown outside."""
        self.line(f"{head} {{".lstrip())
        self.indent += 1
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.indent -= 1
        self.line("}")

    def fresh(self, name: str) -> str:
        """A C++ identifier like `name` that is not taken yet."""
        name = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII) or "_"
        candidate, number = name, 1
        while candidate in self.taken or candidate.startswith("__"):
            number += 1
            candidate = f"{name.lstrip('_') or 'v'}_{number}"
        self.taken.add(candidate)
        return candidate

    def note_scalars(self, e: Expr) -> None:
        """Remember which scalar parameters of the kernel an expression uses."""
        for v in E.variables(e):
            if v in self.kernel.scalars:
                self.used_scalars[v] = None

    def loaded(self, dtype: str, place: str) -> str:
        """The value of what lies at a place in memory."""
        if dtype in HALF:
            return f"{self.helper('load_' + HALF[dtype])}({place})"
        return f"({place} != 0)" if dtype == "bool" else place

    def stored(self, dtype: str, value: str) -> str:
        """A value as it is kept in memory."""
        return f"{self.helper('store_' + HALF[dtype])}({value})" if dtype in HALF else value

    def helper(self, name: str) -> str:
        """The name of a device function of `HELPERS`, which the program then defines."""
        self.helpers.add(name)
        return name

    # ------------------------------------------------------------ addresses

    def linear(self, buffer: Buffer, indices: Sequence[Expr]) -> Expr:
        """The row-major position of an element."""
        kept = self.kept.get(buffer, tuple(range(len(buffer.shape))))
        position: Expr = as_expr(0)
        for d in kept:
            position = position * as_expr(buffer.shape[d]) + indices[d]
        return simplify(position)

    def address(self, buffer: Buffer, indices: Sequence[Expr]) -> str:
        """The text of the position of an element that a statement touches."""
        if buffer not in self.names:
            raise self.fail(f"buffer `{buffer.name}` is used but is neither parameter nor allocated")
        self.used_buffers[buffer] = None
        return self.expression(self.linear(buffer, indices))

    def narrow(self, e: Expr) -> bool:
        """Whether an index fits 32 bits, and whatever it is made of."""
        if e.dtype != INDEX or e.op == "read":
            return False
        low, high = bounds(e)
        if low is None or high is None or low < -(1 << 31) or high >= 1 << 31:
            return False
        return e.op in ("var", "const", "cast") or all(self.narrow(a) for a in e.args if a.dtype == INDEX)

    def index_type(self, e: Expr) -> str:
        """The C++ type of an index."""
        return "int" if self.narrow(e) else "long long"

    # ------------------------------------------------------------ expressions

    def expression(self, e: Expr) -> str:
        """The text of an expression of a new statement; parts that are used several times or are long get names, on lines of their own."""
        self.begin_statement(e)
        return self.value(e)

    def begin_statement(self, *roots: Expr) -> None:
        """A new statement, of these expressions: what was read before may be out of date."""
        self.scopes = [{} for _ in self.scopes]
        self.uses = Counter(a for e in E.walk(*roots) for a in e.args)
        self.uses.update(roots)
        for root in roots:
            self.note_scalars(root)

    def find(self, e: Expr) -> str | None:
        """The name of a value of this statement, if it has one here."""
        return next((scope[e] for scope in reversed(self.scopes) if e in scope), None)

    def value(self, e: Expr) -> str:
        """The text of an expression within a statement."""
        found = self.loaded_lanes.get(e) or self.find(e)
        if found is not None:
            return found
        if e.op == "var":
            if e not in self.names:
                raise self.fail(f"`{e.name}` is used but is no parameter and no loop around")
            return self.names[e]
        if e.op == "const":
            text = literal(e.attr, "int32" if self.narrow(e) else e.dtype)
            return self.helper("bits") + text[4:] if text.startswith("bits<") else text
        depth, self.depth = self.depth, self.depth + 1
        if depth > _MAX_DEPTH:  # a long chain: operands first, or it would exhaust Python's stack
            self.depth = 0
            for node in E.needed_operands(e):
                if node.args and self.find(node) is None:
                    self.keep(node, self.value(node))
        text = self.compute(e)
        self.depth = depth
        shared = self.uses[e] > 1 and bool(e.args) and not (e.op == "cast" and e.args[0].op in ("var", "const"))
        return self.keep(e, text) if shared or len(text) > _MAX_LENGTH else text

    def keep(self, e: Expr, text: str) -> str:
        """Give a value a name, on a line of its own."""
        if text.isidentifier():
            return text
        name = self.fresh((e.attr.name if e.op == "read" else "") or "t")
        self.line(f"const {self.type_of(e)} {name} = {text};")
        self.scopes[-1][e] = name
        return name

    def type_of(self, e: Expr) -> str:
        """The C++ type of a value."""
        return "int" if self.narrow(e) else REGISTER[e.dtype]

    def compute(self, e: Expr) -> str:
        """The text of an operator on the texts of its operands."""
        match e.op:
            case "read":
                if e.attr not in self.names:
                    raise self.fail(f"buffer `{e.attr.name}` is used but is neither parameter nor allocated")
                self.used_buffers[e.attr] = None
                position = self.linear(e.attr, e.args)
                self.note_scalars(position)
                return self.loaded(e.dtype, f"{self.names[e.attr]}[{self.value(position)}]")
            case "select":
                return self.select(e)
            case "cast":
                return self.cast(e, e.args[0], e.dtype)
            case "bitcast":
                return self.bitcast(e.args[0], e.dtype)
            case "reduce":
                raise self.fail("a loop program contains a `reduce` expression")
        if e.args[0].dtype == INDEX and (e.dtype == INDEX or e.dtype == "bool") and len(e.args) == 2:
            return self.index_arithmetic(e)
        args = [self.value(a) for a in e.args]
        return self.operator(e.op, e.args[0].dtype, args)

    def select(self, e: Expr) -> str:
        """A choice: one expression, or branches where a side may only be evaluated if it is chosen."""
        cond, *sides = e.args
        test = self.value(cond)
        safe = all(n.op != "read" or _in_bounds(n) for side in sides for n in E.walk(side))
        before = len(self.lines)
        if not safe:
            self.scopes.append({})
        a, b = (self.value(x) for x in sides)
        if not safe:
            self.scopes.pop()
        if safe or len(self.lines) == before:
            return f"({test} ? {self.widened(e, sides[0], a)} : {self.widened(e, sides[1], b)})"
        del self.lines[before:]  # nothing may be evaluated ahead of the condition
        name = self.fresh("t")
        self.line(f"{self.type_of(e)} {name};")
        for head, side in ((f"if ({test})", sides[0]), ("else", sides[1])):
            with self.braces(head):
                self.line(f"{name} = {self.value(side)};")
        self.scopes[-1][e] = name
        return name

    def widened(self, whole: Expr, part: Expr, text: str) -> str:
        """An operand in 64 bits where the whole has them."""
        return f"(long long){text}" if whole.dtype == INDEX and not self.narrow(whole) and self.narrow(part) else text

    def index_arithmetic(self, e: Expr) -> str:
        """64-bit integers, in 32 bits where they fit; plain where they are indices, wrapping around where they are data."""
        small = all(self.narrow(a) for a in e.args) and (e.dtype == "bool" or self.narrow(e))
        a, b = (x if small or not self.narrow(y) else f"(long long){x}" for x, y in zip(map(self.value, e.args), e.args, strict=True))
        low, divisor = bounds(e.args[0])[0], bounds(e.args[1])[0]
        plain = low is not None and low >= 0 and divisor is not None and divisor > 0
        match e.op:
            case "floordiv" | "truncdiv" if plain:
                return f"({a} / {b})"
            case "mod" | "truncmod" if plain:
                return f"({a} % {b})"
            case "add" | "sub" | "mul" if small or not any(n.op == "read" for n in E.walk(e)):
                return f"({a} {_SIGNS[e.op]} {b})"
        return self.operator(e.op, "int32" if small else INDEX, [a, b])

    def operator(self, op: str, dtype: str, args: list[str]) -> str:
        """An operator on values of one type."""
        if op in ("lt", "le", "eq", "ne"):
            return f"({args[0]} {_SIGNS[op]} {args[1]})"
        if dtype == "bool":
            return self.logical(op, args)
        if op == "isnan":
            return f"({args[0]} != {args[0]})"
        if op == "isinf":
            return f"({'fabs' if dtype == 'float64' else 'fabsf'}({args[0]}) == {self.value(E.const(math.inf, dtype))})"
        if is_float(dtype):
            text = self.float_operator(op, dtype, args)
            exact = op in ("neg", "abs", "min", "max")  # the result is one of the values that the type has
            return f"{self.helper(HALF[dtype])}({text})" if dtype in HALF and not exact else text
        return self.integer_operator(op, dtype, args)

    def logical(self, op: str, args: list[str]) -> str:
        """An operator on bools."""
        match op:
            case "and" | "min" | "mul":
                return f"({args[0]} && {args[1]})"
            case "or" | "max" | "add":
                return f"({args[0]} || {args[1]})"
            case "xor":
                return f"({args[0]} != {args[1]})"
            case "not":
                return f"!{args[0]}"
            case "abs":
                return args[0]
        raise self.fail(f"`{op}` of bool cannot be compiled")

    def float_operator(self, op: str, dtype: str, args: list[str]) -> str:
        """An operator on floats; of 16 bits, in float32."""
        match op:
            case "add" | "sub" | "mul" | "div":
                return f"({args[0]} {_SIGNS[op]} {args[1]})"
            case _ if op in _FLOAT_HELPERS:
                return f"{self.helper(_FLOAT_HELPERS[op])}({args[0]}, {args[1]})"
            case "truncdiv":
                quotient = f"{args[0]} / {args[1]}"
                return f"{function('trunc', dtype)}({self.helper(HALF[dtype]) + f'({quotient})' if dtype in HALF else quotient})"
            case "truncmod":
                return f"{'fmod' if dtype == 'float64' else 'fmodf'}({args[0]}, {args[1]})"
            case "neg":
                return f"(-{args[0]})"
            case "fma" if dtype in HALF:
                return f"{self.helper('odd')}((double){args[0]} * (double){args[1]} + (double){args[2]})"
            case "fma":
                return f"fma{'' if dtype == 'float64' else 'f'}({', '.join(args)})"
        name = function(op, dtype)
        if name is None:
            raise self.fail(f"`{op}` of {dtype} cannot be compiled")
        return f"{name}({', '.join(args)})"

    def integer_operator(self, op: str, dtype: str, args: list[str]) -> str:
        """An operator on integers, which wrap around."""
        kind = REGISTER[dtype]
        wide = "unsigned long long" if itemsize(dtype) == 8 else "unsigned int"
        match op:
            case "add" | "sub" | "mul":
                return f"({kind})(({wide}){args[0]} {_SIGNS[op]} ({wide}){args[1]})"
            case "and" | "or" | "xor":
                return f"({kind})({args[0]} {_SIGNS[op]} {args[1]})"
            case _ if op in _INTEGER_HELPERS:
                return f"{self.helper(_INTEGER_HELPERS[op])}<{kind}>({args[0]}, {args[1]})"
            case "neg":
                return f"({kind})(0u - ({wide}){args[0]})"
            case "not":
                return f"({kind})(~{args[0]})"
            case "abs":
                return args[0] if kind.startswith("unsigned") else f"({kind})({args[0]} < 0 ? 0u - ({wide}){args[0]} : ({wide}){args[0]})"
            case "popcount":
                return f"({kind})__popcll(({REGISTER[f'uint{8 * itemsize(dtype)}']}){args[0]})"
            case "fma":
                return f"({kind})(({wide}){args[0]} * ({wide}){args[1]} + ({wide}){args[2]})"
        raise self.fail(f"`{op}` of {dtype} cannot be compiled")

    def cast(self, whole: Expr, source: Expr, dtype: str) -> str:
        """A conversion; from floats to integers it saturates."""
        x, given = self.value(source), source.dtype
        if dtype == "bool":
            return f"({x} != 0)"
        if given == "bool":
            return f"({x} ? {literal(1, dtype)} : {literal(0, dtype)})"
        if dtype in HALF:
            if given not in HALF and given != "float32":  # by way of float32, without rounding twice
                x = f"{self.helper('odd')}({x})" if given == "float64" else f"(float){x}"
            return f"{self.helper(HALF[dtype])}({x})"
        kind = REGISTER[dtype]
        if is_float(given) and is_integer(dtype):
            least, most = (literal(n, dtype) for n in integer_range(dtype))
            return f"{self.helper('saturate')}<{kind}>({x}, ({kind}){least}, ({kind}){most})"
        return f"({'int' if self.narrow(whole) else kind}){x}"

    def bitcast(self, source: Expr, dtype: str) -> str:
        """The same bits as another type."""
        x = self.value(source)
        if source.dtype in HALF:
            x = self.stored(source.dtype, x)
        elif source.dtype == INDEX:
            x = f"(long long){x}"
        if dtype in HALF:
            return self.loaded(dtype, f"(unsigned short){x}")
        return f"{self.helper('bits')}<{REGISTER[dtype]}>({x})"


def _in_bounds(read: Expr) -> bool:
    """Whether a read certainly lies inside its buffer."""
    return all(
        prove(E.binary("le", 0, i)) and prove(E.binary("lt", i, as_expr(n))) for i, n in zip(read.args, read.attr.shape, strict=True)
    )
