"""C: text and operators that CUDA C++ shares, and loop programs as C text, the loops as a person writes them, arrays of their natural
shape.

    void gemm(double C[restrict 1000][1100], ...) {
      for (long i = 0; i < 1000; i++) {

Symbolic sizes are parameters before the arrays. Names stay but for `.`, which becomes `_`. Loops of all kinds run in order. Operators mean
what `ir.interpreters.semantics` says where integers wrap around (`FLAGS`). `PRELUDE` comes before all functions of a file.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tcomp.errors import CodegenError
from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import without
from tcomp.ir.dtypes import BITS, NARROW, UNSIGNED, integer_range, is_float, is_integer
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.ir.scalar_operators import UNARY
from tcomp.ir.simplify import simplify

FLAGS = ("-std=c11", "-fwrapv", "-fno-strict-aliasing")
TYPES = {
    "float32": "float", "float64": "double", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long", "bool": "_Bool",
    **dict.fromkeys(NARROW, "unsigned char"),
}  # fmt: skip
INFIX = {
    "mul": ("*", 10), "div": ("/", 10), "add": ("+", 9), "sub": ("-", 9),
    "lt": ("<", 7), "le": ("<=", 7), "eq": ("==", 6), "ne": ("!=", 6), "and": ("&", 5), "xor": ("^", 4), "or": ("|", 3),
}  # fmt: skip
LOGICAL = {"and": ("&&", 2), "min": ("&&", 2), "mul": ("&&", 2), "or": ("||", 1), "max": ("||", 1), "add": ("||", 1), "xor": ("!=", 6)}
FUNCTIONS = {"abs": "fabs", "round": "rint", "truncmod": "fmod"} | {
    f: f for f in (*UNARY[UNARY.index("sqrt") : UNARY.index("isnan")], "floor", "ceil", "trunc", "pow", "fma")
}  # of float64; those of float32 end in f
FLOAT_HELPERS = {"floordiv": "floordiv_float", "mod": "floormod_float", "min": "minimum", "max": "maximum"}
SIGNED_HELPERS = {"floordiv": "floordiv", "mod": "floormod", "truncdiv": "truncdiv", "truncmod": "truncmod", "shr": "shr", "pow": "power"}
UNSIGNED_HELPERS = {
    "floordiv": "quotient", "mod": "modulus", "truncdiv": "quotient", "truncmod": "modulus", "shr": "shr_unsigned", "pow": "power_unsigned",
}  # fmt: skip
QUOTIENTS = {"floordiv": "/", "truncdiv": "/", "mod": "%", "truncmod": "%"}
UPDATES = {"add": "+=", "mul": "*=", "and": "&=", "or": "|="}
PREFIX, CHOICE = 11, 0  # precedences of a sign, and of ?:
LARGE = 200  # nodes of an expression, written as a tree, that is computed in several lines

PRELUDE = """\
#include <math.h>
#include <stdlib.h>

static inline long truncdiv(long a, long b) { return b == 0 ? 0 : b == -1 ? -a : a / b; }
static inline long truncmod(long a, long b) { return b == 0 || b == -1 ? 0 : a % b; }
static inline long floordiv(long a, long b) { return truncdiv(a, b) - (truncmod(a, b) != 0 && (a < 0) != (b < 0)); }
static inline long floormod(long a, long b) { return b == 0 ? 0 : a - b * floordiv(a, b); }
static inline unsigned long quotient(unsigned long a, unsigned long b) { return b == 0 ? 0 : a / b; }
static inline unsigned long modulus(unsigned long a, unsigned long b) { return b == 0 ? 0 : a % b; }
static inline unsigned long shl(unsigned long a, unsigned long b, unsigned long bits) { return b < bits ? a << b : 0; }
static inline long shr(long a, unsigned long b) { return a >> (b < 64 ? b : 63); }
static inline unsigned long shr_unsigned(unsigned long a, unsigned long b) { return b < 64 ? a >> b : 0; }
static inline unsigned long popcount(unsigned long a) { unsigned long n = 0; for (; a; a &= a - 1) n++; return n; }
static inline unsigned long power_unsigned(unsigned long a, unsigned long n) {
  unsigned long result = 1;
  for (; n; n >>= 1, a *= a) if (n & 1) result *= a;
  return result;
}
static inline long power(long a, long n) {
  return n >= 0 ? (long)power_unsigned(a, n) : a == 1 ? 1 : a == -1 ? 1 - 2 * (n & 1) : 0;
}
static inline double floormod_float(double a, double b) {
  const double r = fmod(a, b);
  return r == 0 ? copysign(0, b) : (r < 0) != (b < 0) ? r + b : r;
}
static inline double floordiv_float(double a, double b) {
  const double r = fmod(a, b), q = (a - r) / b - (r != 0 && (r < 0) != (b < 0));
  return b == 0 ? a / b : q == 0 ? copysign(0, a / b) : floor(q + 0.5);
}
static inline double minimum(double a, double b) { return a < b || a != a ? a : b; }
static inline double maximum(double a, double b) { return a > b || a != a ? a : b; }
static inline long to_long(double x, long low, long high) {
  return x != x ? 0 : x <= (double)low ? low : x >= (double)high ? high : (long)x;
}
static _Thread_local struct { long status, index, extent; } outside;  // the first value that was out of range, if status is not 0
static inline long checked(long i, long n, long given) {
  if ((unsigned long)i >= (unsigned long)n && !outside.status) { outside.status = 1; outside.index = given; outside.extent = n; }
  return i;
}
static inline unsigned long to_unsigned(double x) { return x >= 0x1p64 ? -1ul : x > 0 ? (unsigned long)x : 0; }
"""
KEYWORDS = """auto break case char const continue default do double else enum extern float for goto if inline int long register restrict
return short signed sizeof static struct switch typedef union unsigned void volatile while main NAN INFINITY abs labs"""
RESERVED = {*re.findall(r"\w+", PRELUDE + KEYWORDS), *(f + s for f in (*FUNCTIONS.values(), "ldexp") for s in ("", "f"))} - {
    *"abinqrx", "given", "status", "index", "extent",
}  # fmt: skip


def c_text(kernel: Kernel) -> str:
    """A C file of one function. Raises `CodegenError` as `c_function`."""
    return f"{PRELUDE}\n{c_function(kernel)}"


def c_function(kernel: Kernel) -> str:
    """A C function of the kernel's name: of its scalars, then its buffers. Raises `CodegenError` for what C lacks, such as floats of 16
    bits."""
    out = CText()
    parameters = [f"long {out.name(v.name)}" for v in kernel.scalars]
    for b in kernel.buffers:
        first, *others = b.shape or (1,)
        shape = f"[restrict {out.value(first)}]" + "".join(f"[{out.value(d)}]" for d in others)
        parameters.append(f"{'' if b in kernel.outputs else 'const '}{c_type(b.dtype)} {out.name(b.name, b)}{shape}")
    out.parameters = {*kernel.buffers}
    with out.braces(f"void {kernel.name}({', '.join(parameters)})"):
        out.statement(kernel.body)
    return "\n".join(out.lines) + "\n"


def c_type(dtype: str) -> str:
    """The C type of an element type. Raises `CodegenError` if there is none."""
    if dtype not in TYPES:
        raise CodegenError(f"no C type for {dtype}", hint="use float32")
    return TYPES[dtype]


class SourceText:
    """Lines of a C or C++ program under construction, and the names that are taken. `first_number`: of the names that occur again."""

    first_number = 2

    def __init__(self, taken: set[str], indent: int = 0) -> None:
        self.lines: list[str] = []
        self.taken, self.indent = taken, indent
        self.numbers: dict[str, itertools.count[int]] = {}  # those not tried yet, by the name in front of them

    def line(self, text: str) -> None:
        """One more line."""
        self.lines.append("  " * self.indent + text)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        """A block of lines behind a head."""
        self.line(f"{head} {{".lstrip())
        self.indent += 1
        yield
        self.indent -= 1
        self.line("}")

    def fresh(self, wanted: str) -> str:
        """An identifier like a name, which is not taken yet."""
        found = plain = re.sub(r"\W|^(?=\d)", "_", wanted, flags=re.ASCII) or "_"
        stem = re.sub(r"^_+(?!\d)", "", plain) or "v"  # an underscore before a digit stays: without it this is not an identifier
        numbers = self.numbers.setdefault(stem, itertools.count(self.first_number))  # names are never given back
        while found in self.taken or found.startswith("__"):
            found = f"{stem}_{next(numbers)}"
        self.taken.add(found)
        return found


class CText(SourceText):
    """Lines of C under construction, with the names in scope: of variables by their names, of buffers by identity."""

    first_number = 1

    def __init__(self) -> None:
        super().__init__(set(RESERVED))
        self.names: dict[str | Buffer, str] = {}
        self.parameters: set[Buffer] = set()  # pointers, even without dimensions
        self.sizes: dict[Expr, int] = {}
        self.known: dict[Expr, str] = {}  # large expressions computed before, for the same statement

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        """A block of lines; an `else` continues on the line where the `if` ended."""
        if head == "else":
            self.lines.pop()
            head = "} else"
        with super().braces(head):
            yield

    def name(self, wanted: str, buffer: Buffer | None = None) -> str:
        """The C name of a variable, or of a buffer."""
        key = wanted if buffer is None else buffer
        return self.names[key] if key in self.names else self.names.setdefault(key, self.fresh(wanted))

    def statement(self, stmt: Stmt) -> None:
        """The lines of a statement."""
        self.known = {}
        match stmt:
            case L.For():
                name = self.name(stmt.var.name)
                step, start, body = _natural(stmt)
                first, end = self.term(start), self.term(simplify(start + as_expr(stmt.extent) * step), 8)
                less, next_one = ("<", "++") if step > 0 else (">", "--")
                with self.braces(f"for (long {name} = {first}; {name} {less} {end}; {name}{next_one})"):
                    self.statement(body)
            case L.While(cond, body):
                with self.braces("for (;;)"):
                    self.line(f"if (!({self.term(cond)})) break;")
                    self.statement(body)
            case L.If(cond):
                for head, branch in zip((f"if ({self.term(cond)})", "else"), L.children(stmt), strict=False):
                    with self.braces(head):
                        self.statement(branch)
            case L.Store(b, indices, value):
                self.line(f"{self.element(b, indices)} = {self.term(value)};")
            case L.Accumulate(b, indices, value, reducer):
                place, update = self.element(b, indices), UPDATES.get(reducer.op, "=")
                if reducer.op == "add" and (opposite := _negative(value)) is not None:
                    value, update = opposite, "-="
                self.line(f"{place} {update} {self.term(value if update != '=' else reducer(E.read(b, indices), value))};")
            case L.Allocate(b, body):
                self.line(f"{c_type(b.dtype)} {self.name(b.name, b)}{''.join(f'[{self.term(as_expr(d))}]' for d in b.shape)};")
                self.statement(body)
            case _:  # a sequence, or what is to others a hint or an instruction
                for inner in L.children(stmt):
                    self.statement(inner)

    def element(self, b: Buffer, indices: tuple[Expr, ...]) -> str:
        """An element of a buffer, to be read or assigned."""
        name = self.name(b.name, b)
        return name + "".join(f"[{self.term(i)}]" for i in indices) if indices or b not in self.parameters else f"*{name}"

    def value(self, e: Dim) -> str:
        """An expression for a statement of its own."""
        self.known = {}
        return self.term(as_expr(e))

    def term(self, e: Expr, precedence: int = CHOICE) -> str:
        """The expression as an operand of an operator of the given precedence. A large one, as shared expressions may be, is named
        before."""
        if e not in self.sizes:
            for x in E.walk(e):
                copies = 3 if x.op in ("min", "max") else 1
                self.sizes[x] = min(1 + copies * sum(self.sizes[a] for a in x.args), LARGE + 1)
        if self.sizes[e] <= LARGE:
            return self.operation(e, precedence)
        if e in self.known:
            return self.known[e]
        name = self.fresh("t")
        if e.op == "select":  # only one side may be defined
            cond, known = self.term(e.args[0]), self.known
            self.line(f"{c_type(e.dtype)} {name};")
            for head, side in ((f"if ({cond})", e.args[1]), ("else", e.args[2])):
                self.known = {**known}
                with self.braces(head):
                    self.line(f"{name} = {self.term(side)};")
            self.known = known
        else:
            text = self.operation(e, CHOICE)
            self.line(f"const {c_type(e.dtype)} {name} = {text};")
        self.known[e] = name
        return name

    def operation(self, e: Expr, precedence: int) -> str:
        """One operator on the texts of its operands."""
        match e.op:
            case "const":
                return _constant(e)
            case "var":
                return self.name(e.name)
            case "read":
                return self.element(e.attr, e.args)
            case "cast" if is_float(e.args[0].dtype) and is_integer(e.dtype):
                limits = "" if e.dtype == "uint64" else "".join(f", {_constant(E.const(n))}" for n in integer_range(e.dtype))
                return f"{self.conversion(e)}to_{'long' if limits else 'unsigned'}({self.term(e.args[0])}{limits})"
            case "cast":
                return f"({c_type(e.dtype)}){self.term(e.args[0], PREFIX)}"
            case "bitcast":
                return f"((union {{ {c_type(e.args[0].dtype)} from; {c_type(e.dtype)} to; }}){{ {self.term(e.args[0])} }}).to"
            case "checked":
                return f"checked({', '.join(map(self.term, e.args))})"
            case "select":
                return self.choice(e, precedence)
            case "isnan" | "isinf":
                return f"({e.op}({self.term(e.args[0])}) != 0)"
            case "ldexp":
                return f"ldexp{_suffix(e)}({self.term(e.args[0])}, (int)to_long({self.term(e.args[1])}, -5000, 5000))"
            case "abs" if e.dtype in UNSIGNED or e.dtype == "bool":
                return self.term(e.args[0], precedence)
            case "neg" | "not" if e.dtype == "bool" or BITS[e.dtype] > 16:
                text = ("-" if e.op == "neg" else "!" if e.dtype == "bool" else "~") + self.term(e.args[0], PREFIX)
                return f"({text})" if precedence >= PREFIX else text
        if e.args[0].dtype == "bool" and e.op in LOGICAL:
            return self.infix(*LOGICAL[e.op], e, precedence)
        if is_integer(e.dtype):
            return self.integer(e, precedence)
        if e.op in INFIX:
            return self.infix(*INFIX[e.op], e, precedence)
        args = ", ".join(map(self.term, e.args))
        if is_float(e.dtype):
            if e.op == "truncdiv":
                return f"trunc{_suffix(e)}({self.infix('/', 10, e, CHOICE)})"
            if e.op in FLOAT_HELPERS:
                return f"({c_type(e.dtype)}){FLOAT_HELPERS[e.op]}({args})"
            if e.op in FUNCTIONS:
                return f"{FUNCTIONS[e.op]}{_suffix(e)}({args})"
        raise CodegenError(f"no C for `{e.op}` of {e.dtype}", where=str(e))

    def integer(self, e: Expr, precedence: int) -> str:
        """An operator with an integer result. C computes with 32 bits at least, helpers with 64."""
        helpers, to = UNSIGNED_HELPERS if e.dtype in UNSIGNED else SIGNED_HELPERS, self.conversion(e)
        if e.op in QUOTIENTS and all((low := E.bounds(a)[0]) is not None and low >= n for n, a in enumerate(e.args)):
            return self.infix(QUOTIENTS[e.op], 10, e, precedence)
        if e.op in helpers:
            return f"{to}{helpers[e.op]}({self.term(e.args[0])}, {self.term(e.args[1])})"
        match e.op:
            case "min" | "max":
                a, b = e.args
                return self.choice(E.select(a < b if e.op == "min" else a > b, a, b), precedence)
            case "abs":
                return f"{to}labs({self.term(e.args[0])})"
            case "popcount":
                return f"{to}popcount(({TYPES[f'uint{BITS[e.dtype]}']}){self.term(e.args[0], PREFIX)})"
            case "shl":
                return f"({c_type(e.dtype)})shl({self.term(e.args[0])}, {self.term(e.args[1])}, {BITS[e.dtype]})"
            case "neg" | "not":
                return f"{to}({'-' if e.op == 'neg' else '~'}{self.term(e.args[0], PREFIX)})"
            case "add" if e.args[0].op == "mul" and e.args[0].args[1] is E.const(-1, e.dtype) and BITS[e.dtype] > 16:
                text = f"{self.term(e.args[1], 9)} - {self.term(e.args[0].args[0], 10)}"
                return f"({text})" if precedence > 9 else text
            case name if name in INFIX:
                narrow = BITS[e.dtype] <= 16 and name in ("add", "sub", "mul")
                return f"{to}({self.infix(*INFIX[name], e, CHOICE)})" if narrow else self.infix(*INFIX[name], e, precedence)
        raise CodegenError(f"no C for `{e.op}` of {e.dtype}", where=str(e))

    def conversion(self, e: Expr) -> str:
        """Wraps around what was computed with 64 bits."""
        return "" if e.dtype == INDEX else f"({c_type(e.dtype)})"

    def infix(self, symbol: str, own: int, e: Expr, precedence: int) -> str:
        """An operator between its operands; `own` is its precedence."""
        text = f"{self.term(e.args[0], own)} {symbol} {self.term(e.args[1], own + 1)}"
        return f"({text})" if own < precedence else text

    def choice(self, e: Expr, precedence: int) -> str:
        """A select. Of two constants that are operands, one says that they are long."""
        cond, a, b = e.args
        wide = "(long)" if a.op == b.op == "const" and a.dtype == INDEX and precedence > CHOICE else ""
        text = f"{self.term(cond, 1)} ? {wide}{self.term(a, 1)} : {self.term(b, 1)}"
        return f"({text})" if precedence > CHOICE else text


def _suffix(e: Expr) -> str:
    return "f" if e.dtype == "float32" else ""


def _natural(loop: L.For) -> tuple[int, Expr, Stmt]:
    """Direction, start and body of the loop over the most frequent index with its variable: `A[i]` from 1, not `A[i + 1]` from 0."""
    v, inner = loop.var, {f.var for f in L.walk(loop.body) if isinstance(f, L.For)}
    found: Counter[tuple[int, Expr]] = Counter()
    for stmt in L.walk(loop.body):
        for index in (i for _, indices in (*L.places(stmt)[-1:], *L.places(stmt)[:-1]) for i in indices):
            step, rest = without(simplify(index), v) or (0, index)
            if abs(step) == 1 and not inner & set(E.variables(rest)) and not E.reads(rest):
                found[step, rest] += 1
    plain = (1, E.const(0))  # among equals
    step, start = max(found, key=lambda form: (found[form], form == plain), default=plain)
    if (step, start) == plain:
        return 1, start, loop.body
    place = {v: simplify((E.var(v.name) - start) * step)}
    return step, start, L.map_expressions(loop.body, lambda e: simplify(E.substitute(e, place)) if v in E.variables(e) else e)


def _negative(e: Expr) -> Expr | None:
    """x, where `e` is -x or the product of -x and something."""
    if e.op != "mul":
        return e.args[0] if e.op == "neg" else None
    return None if (first := _negative(e.args[0])) is None else first * e.args[1]


def _constant(e: Expr) -> str:
    if e.dtype == "bool":
        return "1" if e.attr else "0"
    if not is_float(e.dtype):
        if e.dtype in UNSIGNED:
            return f"{e.attr}u"
        return str(e.attr) if e.attr >= 0 else f"({e.attr + 1} - 1)" if e.attr == integer_range(e.dtype)[0] else f"({e.attr})"
    c_type(e.dtype)
    if not math.isfinite(e.attr):
        return "NAN" if math.isnan(e.attr) else "INFINITY" if e.attr > 0 else "(-INFINITY)"
    text = repr(e.attr) + _suffix(e)
    return text if math.copysign(1, e.attr) > 0 else f"({text})"
