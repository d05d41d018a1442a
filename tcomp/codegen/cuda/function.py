"""A `__global__` function under construction: its text, the names in it, what it declares, and the values that its statements compute.

Subexpressions that are used several times, or are long, get names on lines of their own. Index arithmetic is done in 32 bits
where the ranges of the variables prove that it fits. Floats are never contracted or flushed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tcomp.codegen.c import FUNCTIONS, INFIX, KEYWORDS, LOGICAL, QUOTIENTS, SourceText
from tcomp.codegen.cuda.math import HALF, HELPERS, REGISTER, literal
from tcomp.errors import CodegenError
from tcomp.ir import expr as E
from tcomp.ir.access import in_range
from tcomp.ir.dtypes import integer_range, is_float, is_integer, itemsize
from tcomp.ir.expr import INDEX, Dim, Expr, bounds
from tcomp.ir.linear import linear
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.ir.simplify import from_linear, simplify
from tcomp.target import CudaTarget

_MAX_LENGTH = 110  # characters: longer expressions are cut into named parts, so that the text stays readable
_MAX_DEPTH = 30  # operators: deeper expressions are computed operands first, as Python's stack is limited
_RESERVED = f"""{KEYWORDS} bool class delete false friend new operator private protected public template this true using virtual
min max and or xor not report call"""
_SIGNS = {op: sign for op, (sign, _) in INFIX.items()}
_FLOAT_HELPERS = {"min": "minimum", "max": "maximum", "floordiv": "float_floor_div", "mod": "float_mod"}
_INTEGER_HELPERS = {
    "min": "minimum", "max": "maximum", "floordiv": "floor_div", "mod": "floor_mod", "truncdiv": "trunc_div", "truncmod": "trunc_mod",
    "pow": "power", "shl": "shift_left", "shr": "shift_right",
}  # fmt: skip


class FunctionBuilder(SourceText):
    """The text of a function and what it declares, to which the emitters of statements, copies and warp instructions add."""

    def __init__(self, kernel: Kernel, target: CudaTarget, helpers: set[str]) -> None:
        super().__init__({*_RESERVED.split(), *HELPERS}, indent=1)
        self.kernel, self.target, self.helpers = kernel, target, helpers
        self.names: dict[Buffer | Expr, str] = {}  # of buffers and variables
        self.used_buffers: dict[Buffer, None] = {}
        self.used_scalars: dict[Expr, None] = {}
        self.private_dims: dict[Buffer, tuple[int, ...]] = {}  # the dimensions of register buffers that are private to a thread
        self.scopes: list[dict[Expr, str]] = [{}]  # names of the values of the current statement, by nesting
        self.loaded_lanes: dict[Expr, str] = {}  # elements of vectors that have been loaded
        self.uses: Counter[Expr] = Counter()
        self.depth = 0
        self.declarations: list[str] = []
        self.block = [1, 1, 1]  # its threads along x, y, z
        self.shared: dict[Buffer, int] = {}  # buffers in shared memory, with the elements of each
        self.swizzled: dict[Buffer, int] = {}  # those that tensor cores read themselves, with the pieces of 16 bytes in a row
        self.copies: set[Stmt] = set()  # the phases that only start copies in the background
        self.variables: set[Expr] = set()  # of its loops
        self.reports = False  # whether it reports values that are out of range

    def fail(self, what: str, why: str = "", hint: str = "") -> CodegenError:
        """The error that the kernel cannot be compiled."""
        return CodegenError(what, where=self.kernel.name, why=why, hint=hint)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        """A block of lines behind a head: what is named within is unknown outside."""
        self.scopes.append({})
        with super().braces(head):
            yield
        self.scopes.pop()

    def share(self, buffer: Buffer, size: int) -> None:
        """Allocate a buffer of this many elements in shared memory, and give it a name."""
        self.names[buffer] = self.fresh(buffer.name)
        self.shared[buffer] = max(1, size)

    def constant(self, buffer: Buffer, extent: Dim) -> int:
        """An extent of a temporary. Raises `CodegenError` for a symbolic one."""
        if not isinstance(extent, int):
            raise self.fail(f"temporary `{buffer.name}` has no constant shape: {extent}", hint="pass it as a workspace buffer")
        return extent

    def declare(self, var: Expr, source: str) -> None:
        """Declare a loop variable whose value is known, such as `threadIdx.x`."""
        self.names[var] = self.fresh(var.name)
        self.variables.add(var)
        self.line(f"const {self.type_of(var)} {self.names[var]} = {source};")

    def note_scalars(self, *roots: Expr) -> None:
        """Remember which scalar parameters of the kernel expressions use."""
        self.used_scalars |= dict.fromkeys(v for v in E.variables(*roots) if v in self.kernel.scalars)

    def loaded(self, dtype: str, place: str) -> str:
        """The value of what lies at a place in memory."""
        if dtype in HALF:
            return f"{self.helper('load_' + HALF[dtype])}({place})"
        return f"({place} != 0)" if dtype == "bool" else place

    def stored(self, dtype: str, value: str) -> str:
        """A value converted to its type in memory."""
        return f"{self.helper('store_' + HALF[dtype])}({value})" if dtype in HALF else value

    def helper(self, name: str) -> str:
        """The name of a device function of `HELPERS`, which the program then defines."""
        self.helpers.add(name)
        return name

    def linear(self, buffer: Buffer, indices: Sequence[Expr]) -> Expr:
        """The row-major position of an element."""
        dims = self.private_dims.get(buffer, range(len(buffer.shape)))
        return simplify(E.row_major([indices[d] for d in dims], [buffer.shape[d] for d in dims]))

    def vector_start(self, buffer: Buffer, indices: Sequence[Expr], lane: Expr, lanes: int) -> Expr | None:
        """The position of the first lane where the lanes are contiguous and certainly aligned to the size of the vector."""
        if lanes * itemsize(buffer.dtype) not in (2, 4, 8, 16) or lanes == 1:
            return None
        terms = dict(linear(self.linear(buffer, indices)))
        if terms.pop((lane,), 0) != 1 or any(lane in E.variables(*m) for m in terms) or any(c % lanes for c in terms.values()):
            return None
        return simplify(from_linear(terms))

    def use(self, buffer: Buffer) -> str:
        """The name of a buffer, which the function then takes as a parameter."""
        if buffer not in self.names:
            raise self.fail(f"buffer `{buffer.name}` is used but is neither parameter nor allocated")
        self.used_buffers[buffer] = None
        return self.names[buffer]

    def address(self, buffer: Buffer, indices: Sequence[Expr]) -> str:
        """The text of the place of an element that a statement touches."""
        self.use(buffer)
        position = self.linear(buffer, indices)
        self.begin_statement(position)
        return self.place(buffer, position)

    def place(self, buffer: Buffer, position: Expr) -> str:
        """The text of where the element at a position lies in memory; of a vector, its first one."""
        pieces = self.swizzled.get(buffer)
        text = self.value(position)
        return text if pieces is None else f"{self.helper('swizzled')}<{pieces}, {itemsize(buffer.dtype)}>({text})"

    def narrow(self, e: Expr) -> bool:
        """Whether an index fits 32 bits, and whatever it is made of."""
        low, high = bounds(e) if e.dtype == INDEX and e.op != "read" else (None, None)
        if low is None or high is None or low < -(1 << 31) or high >= 1 << 31:
            return False
        return e.op in ("var", "const", "cast") or all(self.narrow(a) for a in e.args if a.dtype == INDEX)

    def expression(self, e: Expr) -> str:
        """The text of an expression of a new statement; parts that are used several times or are long get names, on lines of their own."""
        self.begin_statement(e)
        return self.value(e)

    def begin_statement(self, *roots: Expr) -> None:
        """A new statement, of these expressions: what was read before may be out of date."""
        self.scopes = [{} for _ in self.scopes]
        self.uses = Counter([*(a for e in E.walk(*roots) for a in e.args), *roots])
        self.note_scalars(*roots)

    def find(self, e: Expr) -> str | None:
        """The name of a value of this statement, if it has one here."""
        return next((scope[e] for scope in reversed(self.scopes) if e in scope), None)

    def value(self, e: Expr) -> str:
        """The text of an expression within a statement."""
        if (found := self.loaded_lanes.get(e) or self.find(e)) is not None:
            return found
        if e.op == "var":
            if e not in self.names:
                raise self.fail(f"`{e.name}` is used, and is neither a parameter nor the variable of a loop around")
            return self.names[e]
        if e.op == "const":
            if not math.isfinite(e.attr):
                self.helper("bits")
            return literal(e.attr, "int32" if self.narrow(e) else e.dtype)
        depth, self.depth = self.depth, self.depth + 1
        if depth > _MAX_DEPTH:  # a long chain: operands first, or it would exhaust Python's stack
            self.depth = 0
            for node in E.needed_operands(e):
                if node.args and self.find(node) is None:
                    self.give_name(node, self.value(node))
        text = self.compute(e)
        self.depth = depth
        shared = self.uses[e] > 1 and bool(e.args) and not (e.op == "cast" and e.args[0].op in ("var", "const"))
        return self.give_name(e, text) if shared or len(text) > _MAX_LENGTH else text

    def give_name(self, e: Expr, text: str) -> str:
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
                name, position = self.use(e.attr), self.linear(e.attr, e.args)
                self.note_scalars(position)
                return self.loaded(e.dtype, f"{name}[{self.place(e.attr, position)}]")
            case "select":
                return self.select(e)
            case "checked" if self.target.unchecked:
                return self.value(e.args[0])
            case "checked":
                self.reports = True
                return f"{self.helper('checked')}({', '.join(map(self.value, e.args))}, report, call)"
            case "cast":
                return self.cast(e, e.args[0], e.dtype)
            case "bitcast":
                x, given = self.value(e.args[0]), e.args[0].dtype
                x = self.stored(given, x) if given in HALF else f"(long long){x}" if given == INDEX else x
                return (
                    self.loaded(e.dtype, f"(unsigned short){x}") if e.dtype in HALF else f"{self.helper('bits')}<{REGISTER[e.dtype]}>({x})"
                )
            case "reduce":
                raise self.fail("a loop program contains a `reduce` expression")
        if e.args[0].dtype == INDEX and (e.dtype == INDEX or e.dtype == "bool") and len(e.args) == 2:
            return self.index_arithmetic(e)
        return self.operator(e.op, e.args[0].dtype, [self.value(a) for a in e.args])

    def select(self, e: Expr) -> str:
        """A choice: one expression, or branches where a side may only be evaluated if it is chosen."""
        cond, *sides = e.args
        test = self.value(cond)
        safe = not self.reporting(*sides) and all(in_range(r.args, r.attr.shape) for r in E.reads(*sides))
        before = len(self.lines)
        self.scopes += [] if safe else [{}]
        a, b = (self.value(x) for x in sides)
        if not safe:
            self.scopes.pop()
        if safe or len(self.lines) == before:
            return f"({test} ? {self.widened(e, sides[0], a)} : {self.widened(e, sides[1], b)})"
        del self.lines[before:]  # nothing may be evaluated before the condition
        name = self.fresh("t")
        self.line(f"{self.type_of(e)} {name};")
        for head, side in ((f"if ({test})", sides[0]), ("else", sides[1])):
            with self.braces(head):
                self.line(f"{name} = {self.value(side)};")
        self.scopes[-1][e] = name
        return name

    def reporting(self, *roots: Expr) -> bool:
        """Whether the evaluation of expressions may report an index."""
        return not self.target.unchecked and any(e.op == "checked" for e in E.walk(*roots))

    def widened(self, whole: Expr, part: Expr, text: str) -> str:
        """An operand in 64 bits where the whole has them."""
        return f"(long long){text}" if whole.dtype == INDEX and not self.narrow(whole) and self.narrow(part) else text

    def index_arithmetic(self, e: Expr) -> str:
        """64-bit integers, in 32 bits where they fit; plain where they are indices, wrapping around where they are data."""
        small = all(self.narrow(a) for a in e.args) and (e.dtype == "bool" or self.narrow(e))
        a, b = (x if small or not self.narrow(y) else f"(long long){x}" for x, y in zip(map(self.value, e.args), e.args, strict=True))
        low, divisor = bounds(e.args[0])[0], bounds(e.args[1])[0]
        plain = low is not None and low >= 0 and divisor is not None and divisor > 0
        if plain and e.op in QUOTIENTS:
            return f"({a} {QUOTIENTS[e.op]} {b})"
        if e.op in ("add", "sub", "mul") and (small or not any(n.op == "read" for n in E.walk(e))):
            return f"({a} {_SIGNS[e.op]} {b})"
        return self.operator(e.op, "int32" if small else INDEX, [a, b])

    def operator(self, op: str, dtype: str, args: list[str]) -> str:
        """An operator on values of one type."""
        if op in ("lt", "le", "eq", "ne"):
            return f"({args[0]} {_SIGNS[op]} {args[1]})"
        if dtype == "bool":
            if op not in LOGICAL and op not in ("not", "abs"):
                raise self.fail(f"`{op}` of bool cannot be compiled")
            return f"({args[0]} {LOGICAL[op][0]} {args[1]})" if op in LOGICAL else "!" * (op == "not") + args[0]
        if op == "isnan":
            return f"({args[0]} != {args[0]})"
        if op == "isinf":
            return f"(fabs{_suffix(dtype)}({args[0]}) == {self.value(E.const(math.inf, dtype))})"
        if is_float(dtype):
            text = self.float_operator(op, dtype, args)
            exact = op in ("neg", "abs", "min", "max")  # the result is one of the values that the type has
            return f"{self.helper(HALF[dtype])}({text})" if dtype in HALF and not exact else text
        return self.integer_operator(op, dtype, args)

    def float_operator(self, op: str, dtype: str, args: list[str]) -> str:
        """An operator on floats; of 16 bits, in float32."""
        match op:
            case "add" | "sub" | "mul" | "div":
                return f"({args[0]} {_SIGNS[op]} {args[1]})"
            case "truncdiv":
                quotient = f"{args[0]} / {args[1]}"
                return f"trunc{_suffix(dtype)}({self.helper(HALF[dtype]) + f'({quotient})' if dtype in HALF else quotient})"
            case "neg":
                return f"(-{args[0]})"
            case "fma" if dtype in HALF:
                return f"{self.helper('odd')}((double){args[0]} * (double){args[1]} + (double){args[2]})"
        if op not in FUNCTIONS and op not in _FLOAT_HELPERS:
            raise self.fail(f"`{op}` of {dtype} cannot be compiled")
        name = self.helper(_FLOAT_HELPERS[op]) if op in _FLOAT_HELPERS else FUNCTIONS[op] + _suffix(dtype)
        return f"{name}({', '.join(args)})"

    def integer_operator(self, op: str, dtype: str, args: list[str]) -> str:
        """An operator on integers, which wrap around."""
        kind, wide = REGISTER[dtype], "unsigned long long" if itemsize(dtype) == 8 else "unsigned int"
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


def _suffix(dtype: str) -> str:
    """How the name of a function of `FUNCTIONS` ends: CUDA's names are those of C, in their accurate versions."""
    return "" if dtype == "float64" else "f"
