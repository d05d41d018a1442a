"""A loop program as C text, for C compilers: the loops as a person writes them, arrays as parameters of their natural shape.

    void gemm(double C[restrict 1000][1100], ...) {
      for (long i = 0; i < 1000; i++) {

Symbolic sizes are parameters before the arrays. Names are kept, `.` becomes `_`. Loops of all kinds run in order. Operators mean what
`ir.interpreters.semantics` says where integers wrap around (`FLAGS`). `PRELUDE` comes before all functions of a file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tcomp.errors import CodegenError
from tcomp.ir import expr as E
from tcomp.ir.access import without
from tcomp.ir.dtypes import BITS, UNSIGNED, integer_range, is_float, is_integer
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr
from tcomp.ir.loops import Accumulate, Allocate, Buffer, For, If, Kernel, Stmt, Store, While, children, map_expressions, places, walk
from tcomp.ir.simplify import simplify

FLAGS = ("-std=c11", "-fwrapv", "-fno-strict-aliasing")
TYPES = {
    "float32": "float", "float64": "double", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long", "bool": "_Bool",
}  # fmt: skip
INFIX = {
    "mul": ("*", 10), "div": ("/", 10), "add": ("+", 9), "sub": ("-", 9),
    "lt": ("<", 7), "le": ("<=", 7), "eq": ("==", 6), "ne": ("!=", 6), "and": ("&", 5), "xor": ("^", 4), "or": ("|", 3),
}  # fmt: skip
LOGICAL = {"and": ("&&", 2), "min": ("&&", 2), "mul": ("&&", 2), "or": ("||", 1), "max": ("||", 1), "add": ("||", 1), "xor": ("!=", 6)}
NAMED_ALIKE = (
    "sqrt", "exp", "log", "tanh", "erf", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "floor",
    "ceil", "trunc", "pow", "fma",
)  # fmt: skip
FUNCTIONS = {f: f for f in NAMED_ALIKE} | {"abs": "fabs", "round": "rint", "truncmod": "fmod"}
QUOTIENTS = {"floordiv": "/", "truncdiv": "/", "mod": "%", "truncmod": "%"}
UPDATES = {"sum": "+=", "prod": "*=", "all": "&=", "any": "|="}
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
static inline unsigned long to_unsigned(double x) { return x >= 0x1p64 ? -1ul : x > 0 ? (unsigned long)x : 0; }
"""
KEYWORDS = """auto break case char const continue default do double else enum extern float for goto if inline int long register restrict
return short signed sizeof static struct switch typedef union unsigned void volatile while main NAN INFINITY abs labs"""
RESERVED = {*re.findall(r"\w+", PRELUDE + KEYWORDS), *(f + s for f in (*FUNCTIONS.values(), "ldexp") for s in ("", "f"))} - {*"abnqrx"}


def c_text(kernel: Kernel) -> str:
    """A C file of one function. Raises `CodegenError` as `c_function`."""
    return f"{PRELUDE}\n{c_function(kernel)}"


def c_function(kernel: Kernel) -> str:
    """A C function of the kernel's name, which takes its scalars, then its buffers, in order. Raises `CodegenError` for what is not in the
    subset, above all floats of 16 bits."""
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


class CText:
    """Lines of C under construction, with the names in scope: of variables by their names, of buffers by identity."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = ""
        self.names: dict[str | Buffer, str] = {}
        self.taken = set(RESERVED)
        self.parameters: set[Buffer] = set()  # pointers, even without dimensions
        self.sizes: dict[Expr, int] = {}
        self.known: dict[Expr, str] = {}  # large expressions computed before, for the same statement

    def line(self, text: str) -> None:
        """One more line."""
        self.lines.append(self.indent + text)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        """A block, indented; an `else` goes on where another has ended."""
        if head == "else":
            self.lines.pop()
        self.line("} else {" if head == "else" else f"{head} {{")
        outer, self.indent = self.indent, self.indent + "  "
        yield
        self.indent = outer
        self.line("}")

    def name(self, wanted: str, thing: Buffer | None = None) -> str:
        """The C name of a variable, or of a buffer."""
        key = wanted if thing is None else thing
        return self.names[key] if key in self.names else self.names.setdefault(key, self.fresh(wanted))

    def fresh(self, wanted: str) -> str:
        """A name that nothing has yet."""
        plain = found = re.sub(r"^(?=\d)|\W", "_", wanted, flags=re.ASCII)
        number = 0
        while found in self.taken:
            number += 1
            found = f"{plain}_{number}"
        self.taken.add(found)
        return found

    # ------------------------------------------------------------ statements

    def statement(self, stmt: Stmt) -> None:
        """The lines of a statement."""
        self.known = {}
        match stmt:
            case For():
                name = self.name(stmt.var.name)
                step, start, body = _natural(stmt)
                first, end = self.term(start), self.term(simplify(start + as_expr(stmt.extent) * step), 8)
                less, next_one = ("<", "++") if step > 0 else (">", "--")
                with self.braces(f"for (long {name} = {first}; {name} {less} {end}; {name}{next_one})"):
                    self.statement(body)
            case While(cond, body):
                with self.braces("for (;;)"):
                    self.line(f"if (!({self.term(cond)})) break;")
                    self.statement(body)
            case If(cond, then, otherwise):
                with self.braces(f"if ({self.term(cond)})"):
                    self.statement(then)
                if otherwise is not None:
                    with self.braces("else"):
                        self.statement(otherwise)
            case Store(b, indices, value):
                self.line(f"{self.element(b, indices)} = {self.term(value)};")
            case Accumulate(b, indices, value, reducer):
                place = self.element(b, indices)
                if reducer.name == "sum" and (opposite := _negative(value)) is not None:
                    self.line(f"{place} -= {self.term(opposite)};")
                elif reducer.name in UPDATES:
                    self.line(f"{place} {UPDATES[reducer.name]} {self.term(value)};")
                else:
                    self.line(f"{place} = {self.term(reducer(E.read(b, indices), value))};")
            case Allocate(b, body):
                self.line(f"{c_type(b.dtype)} {self.name(b.name, b)}{''.join(f'[{self.term(as_expr(d))}]' for d in b.shape)};")
                self.statement(body)
            case _:  # a sequence, or what is to others a hint or an instruction
                for inner in children(stmt):
                    self.statement(inner)

    def element(self, b: Buffer, indices: tuple[Expr, ...]) -> str:
        """An element of a buffer, to be read or assigned."""
        name = self.name(b.name, b)
        return name + "".join(f"[{self.term(i)}]" for i in indices) if indices or b not in self.parameters else f"*{name}"

    # ------------------------------------------------------------ expressions

    def value(self, e: Dim) -> str:
        """An expression for a statement of its own."""
        self.known = {}
        return self.term(as_expr(e))

    def term(self, e: Expr, precedence: int = CHOICE) -> str:
        """The expression as an operand of an operator of the given precedence. A large one is computed in lines of its own before: shared
        expressions, written as trees, could be of any size."""
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
                source = f"{{ {self.term(e.args[0])} }}"
                return f"((union {{ {c_type(e.args[0].dtype)} from; {c_type(e.dtype)} to; }}){source}).to"
            case "select":
                return self.choice(e, precedence)
            case "isnan" | "isinf":
                return f"({e.op}({self.term(e.args[0])}) != 0)"
            case "ldexp":
                return f"ldexp{_suffix(e)}({self.term(e.args[0])}, (int)to_long({self.term(e.args[1])}, -5000, 5000))"
            case "abs" if e.dtype in UNSIGNED or e.dtype == "bool":
                return self.term(e.args[0], precedence)
            case "neg" | "not" if e.dtype == "bool" or BITS[e.dtype] > 16:
                sign = "-" if e.op == "neg" else "!" if e.dtype == "bool" else "~"
                text = sign + self.term(e.args[0], PREFIX)
                return f"({text})" if precedence >= PREFIX else text
        if e.args[0].dtype == "bool" and e.op in LOGICAL:
            return self.infix(*LOGICAL[e.op], e, precedence)
        if is_integer(e.dtype):
            return self.integer(e, precedence)
        if e.op in INFIX:
            return self.infix(*INFIX[e.op], e, precedence)
        args = ", ".join(map(self.term, e.args))
        if is_float(e.dtype):
            match e.op:
                case "truncdiv":
                    return f"trunc{_suffix(e)}({self.infix('/', 10, e, CHOICE)})"
                case "floordiv" | "mod":
                    return f"({c_type(e.dtype)})floor{e.op.removeprefix('floor')}_float({args})"
                case "min" | "max":
                    return f"({c_type(e.dtype)}){e.op}imum({args})"
                case name if name in FUNCTIONS:
                    return f"{FUNCTIONS[name]}{_suffix(e)}({args})"
        raise CodegenError(f"no C for `{e.op}` of {e.dtype}", where=str(e))

    def integer(self, e: Expr, precedence: int) -> str:
        """An operator with an integer result. C computes with 32 bits at least, helpers with 64."""
        unsigned, to = e.dtype in UNSIGNED, self.conversion(e)
        match e.op:
            case "floordiv" | "mod" | "truncdiv" | "truncmod":
                if all((least := E.bounds(a)[0]) is not None and least >= low for a, low in zip(e.args, (0, 1), strict=True)):
                    return self.infix(QUOTIENTS[e.op], 10, e, precedence)
                helper: str = ("quotient" if e.op.endswith("div") else "modulus") if unsigned else "floormod" if e.op == "mod" else e.op
                return f"{to}{helper}({self.term(e.args[0])}, {self.term(e.args[1])})"
            case "min" | "max":
                a, b = e.args
                return self.choice(E.select(a < b if e.op == "min" else a > b, a, b), precedence)
            case "abs":
                return f"{to}labs({self.term(e.args[0])})"
            case "popcount":
                return f"{to}popcount(({c_type('u' + e.dtype.removeprefix('u'))}){self.term(e.args[0], PREFIX)})"
            case "shl":
                return f"({c_type(e.dtype)})shl({self.term(e.args[0])}, {self.term(e.args[1])}, {BITS[e.dtype]})"
            case "shr" | "pow":
                helper = ("shr" if e.op == "shr" else "power") + ("_unsigned" if unsigned else "")
                return f"{to}{helper}({self.term(e.args[0])}, {self.term(e.args[1])})"
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


def _natural(loop: For) -> tuple[int, Expr, Stmt]:
    """Direction, start, and body of the loop whose variable is the most frequent index that it occurs in: `A[i]` from 1, not `A[i + 1]`
    from 0."""
    v, inner = loop.var, {f.var for f in walk(loop.body) if isinstance(f, For)}
    found: Counter[tuple[int, Expr]] = Counter()
    for stmt in walk(loop.body):
        for index in (i for _, indices in (*places(stmt)[-1:], *places(stmt)[:-1]) for i in indices):
            step, rest = without(simplify(index), v) or (0, index)
            if abs(step) == 1 and not inner & set(E.variables(rest)) and not E.reads(rest):
                found[step, rest] += 1
    plain = (1, E.const(0))  # among equals
    step, start = max(found, key=lambda form: (found[form], form == plain), default=plain)
    if (step, start) == plain:
        return 1, start, loop.body
    named = E.var(v.name)
    place = {v: simplify((named - start) * step)}
    return step, start, map_expressions(loop.body, lambda e: simplify(E.substitute(e, place)) if v in E.variables(e) else e)


def _negative(e: Expr) -> Expr | None:
    """x, where `e` is -x or the product of -x and something."""
    if e.op == "neg":
        return e.args[0]
    if e.op == "mul" and (first := _negative(e.args[0])) is not None:
        return first * e.args[1]
    return None


def _constant(e: Expr) -> str:
    if e.dtype == "bool":
        return "1" if e.attr else "0"
    if not is_float(e.dtype):
        if e.dtype in UNSIGNED:
            return f"{e.attr}u"
        least = integer_range(e.dtype)[0]
        return str(e.attr) if e.attr >= 0 else f"({e.attr + 1} - 1)" if e.attr == least else f"({e.attr})"
    c_type(e.dtype)
    if not math.isfinite(e.attr):
        return "NAN" if math.isnan(e.attr) else "INFINITY" if e.attr > 0 else "(-INFINITY)"
    text = repr(e.attr) + _suffix(e)
    return text if math.copysign(1, e.attr) > 0 else f"({text})"
