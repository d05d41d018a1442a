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

_LINE = 110  # longer expressions are cut into named parts
_DEEP = 30
_RESERVED = """
    auto bool break case char class const continue default delete do double else enum extern false float for friend goto
    if inline int long new operator private protected public register return short signed sizeof static struct
    switch template this true typedef union unsigned using virtual void volatile while min max and or xor not
"""
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^"}


class Expressions:
    """Lines of text, and the values computed on them.

    `names`: of buffers and variables. `scopes`: names of values of the statement at hand, by nesting. `lanes`: elements of vectors that
    have been loaded. `kept`: the dimensions that are left of register buffers which each thread has a part of.
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
        self.lanes: dict[Expr, str] = {}
        self.uses: Counter[Expr] = Counter()
        self.depth = 0

    def fail(self, what: str, why: str = "", hint: str = "") -> CodegenError:
        return CodegenError(what, where=self.kernel.name, why=why, hint=hint)

    # ------------------------------------------------------------ text

    def line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        self.line(f"{head} {{".lstrip())
        with self.scope():
            yield
        self.line("}")

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.indent += 1
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.indent -= 1

    def fresh(self, name: str) -> str:
        name = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII) or "_"
        candidate, number = name, 1
        while candidate in self.taken or candidate.startswith("__"):
            number += 1
            candidate = f"{name.lstrip('_') or 'v'}_{number}"
        self.taken.add(candidate)
        return candidate

    def note(self, e: Expr) -> None:
        for v in E.variables(e):
            if v in self.kernel.scalars:
                self.used_scalars[v] = None

    def loaded(self, dtype: str, place: str) -> str:
        if dtype in HALF:
            return f"{self.helper('load_' + HALF[dtype])}({place})"
        return f"({place} != 0)" if dtype == "bool" else place

    def stored(self, dtype: str, value: str) -> str:
        return f"{self.helper('store_' + HALF[dtype])}({value})" if dtype in HALF else value

    def helper(self, name: str) -> str:
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
        return "int" if self.narrow(e) else "long long"

    # ------------------------------------------------------------ expressions

    def expression(self, e: Expr) -> str:
        """The text of an expression; parts that are used several times or are long get names, on lines of their own."""
        self.count(e)
        return self.value(e)

    def count(self, *roots: Expr) -> None:
        """A new statement: what was read before may be out of date."""
        self.scopes = [{} for _ in self.scopes]
        self.uses = Counter(a for e in E.walk(*roots) for a in e.args)
        self.uses.update(roots)
        for root in roots:
            self.note(root)

    def find(self, e: Expr) -> str | None:
        return next((scope[e] for scope in reversed(self.scopes) if e in scope), None)

    def value(self, e: Expr) -> str:
        found = self.lanes.get(e) or self.find(e)
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
        if depth > _DEEP:  # a long chain: operands first, or it would exhaust Python's stack
            self.depth = 0
            for node in E.needed_operands(e):
                if node.args and self.find(node) is None:
                    self.keep(node, self.value(node))
        text = self.compute(e)
        self.depth = depth
        if self.named(e) or len(text) > _LINE:
            return self.keep(e, text)
        return text

    def named(self, e: Expr) -> bool:
        return self.uses[e] > 1 and bool(e.args) and not (e.op == "cast" and e.args[0].op in ("var", "const"))

    def keep(self, e: Expr, text: str) -> str:
        if text.isidentifier():
            return text
        name = self.fresh({"read": e.attr.name if e.op == "read" else ""}.get(e.op, "t") or "t")
        self.line(f"const {self.type_of(e)} {name} = {text};")
        self.scopes[-1][e] = name
        return name

    def type_of(self, e: Expr) -> str:
        return "int" if self.narrow(e) else REGISTER[e.dtype]

    def compute(self, e: Expr) -> str:
        match e.op:
            case "read":
                if e.attr not in self.names:
                    raise self.fail(f"buffer `{e.attr.name}` is used but is neither parameter nor allocated")
                self.used_buffers[e.attr] = None
                position = self.linear(e.attr, e.args)
                self.note(position)
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
        match op:
            case "add" | "sub" | "mul" | "div":
                return f"({args[0]} {_SIGNS[op]} {args[1]})"
            case "min" | "max":
                return f"{self.helper(op + 'imum')}({args[0]}, {args[1]})"
            case "floordiv":
                return f"{self.helper('float_floor_div')}({args[0]}, {args[1]})"
            case "mod":
                return f"{self.helper('float_mod')}({args[0]}, {args[1]})"
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
        kind = REGISTER[dtype]
        wide = "unsigned long long" if itemsize(dtype) == 8 else "unsigned int"
        match op:
            case "add" | "sub" | "mul":
                return f"({kind})(({wide}){args[0]} {_SIGNS[op]} ({wide}){args[1]})"
            case "and" | "or" | "xor":
                return f"({kind})({args[0]} {_SIGNS[op]} {args[1]})"
            case "min" | "max":
                return f"{self.helper(op + 'imum')}<{kind}>({args[0]}, {args[1]})"
            case "floordiv" | "mod" | "truncdiv" | "truncmod" | "pow" | "shl" | "shr":
                name = {"floordiv": "floor_div", "mod": "floor_mod", "truncdiv": "trunc_div", "truncmod": "trunc_mod", "pow": "power",
                        "shl": "shift_left", "shr": "shift_right"}[op]  # fmt: skip
                return f"{self.helper(name)}<{kind}>({args[0]}, {args[1]})"
            case "neg":
                return f"({kind})(0u - ({wide}){args[0]})"
            case "not":
                return f"({kind})(~{args[0]})"
            case "abs":
                return args[0] if kind.startswith("unsigned") else f"({kind})({args[0]} < 0 ? 0u - ({wide}){args[0]} : ({wide}){args[0]})"
            case "popcount":
                unsigned = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}[itemsize(dtype)]
                return f"({kind})__popcll(({unsigned}){args[0]})"
            case "fma":
                return f"({kind})(({wide}){args[0]} * ({wide}){args[1]} + ({wide}){args[2]})"
        raise self.fail(f"`{op}` of {dtype} cannot be compiled")

    def cast(self, whole: Expr, source: Expr, dtype: str) -> str:
        x, given = self.value(source), source.dtype
        if dtype == "bool":
            return f"({x} != 0)"
        if given == "bool":
            return f"({x} ? {literal(1, dtype)} : {literal(0, dtype)})"
        if dtype in HALF:
            rounded = self.helper(HALF[dtype])
            return f"{rounded}({x})" if given in HALF or given == "float32" else f"{rounded}({self.odd(x, given)})"
        kind = REGISTER[dtype]
        if is_float(given) and is_integer(dtype):
            least, most = (literal(n, dtype) for n in integer_range(dtype))
            return f"{self.helper('saturate')}<{kind}>({x}, ({kind}){least}, ({kind}){most})"
        return f"({'int' if self.narrow(whole) else kind}){x}"

    def odd(self, x: str, given: str) -> str:
        return f"{self.helper('odd')}({x})" if given == "float64" else f"(float){x}"

    def bitcast(self, source: Expr, dtype: str) -> str:
        x = self.value(source)
        if source.dtype in HALF:
            x = self.stored(source.dtype, x)
        elif source.dtype == INDEX:
            x = f"(long long){x}"
        if dtype in HALF:
            return self.loaded(dtype, f"(unsigned short){x}")
        return f"{self.helper('bits')}<{REGISTER[dtype]}>({x})"


def _in_bounds(read: Expr) -> bool:
    return all(
        prove(E.binary("le", 0, i)) and prove(E.binary("lt", i, as_expr(n))) for i, n in zip(read.args, read.attr.shape, strict=True)
    )
