"""A loop program as C text, for other compilers: the loops as a person writes them, arrays as parameters of their natural shape.

    void gemm(double C[restrict 1000][1100], ...) {
      for (long i = 0; i < 1000; i++) {

Names are kept, `.` becomes `_`. Sizes must be fixed. Integers divide as in Python where they may be negative.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from tcomp.errors import CodegenError
from tcomp.ir import expr as E
from tcomp.ir.access import without
from tcomp.ir.dtypes import is_float, is_integer
from tcomp.ir.expr import Expr
from tcomp.ir.loops import Accumulate, Allocate, Block, Buffer, For, If, Kernel, Stmt, Store, While, expressions, map_expressions, walk
from tcomp.ir.simplify import simplify

TYPES = {
    "float32": "float", "float64": "double", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long", "bool": "_Bool",
}  # fmt: skip
INFIX = {
    "mul": ("*", 10), "div": ("/", 10), "truncdiv": ("/", 10), "truncmod": ("%", 10), "add": ("+", 9), "sub": ("-", 9), "shl": ("<<", 8),
    "shr": (">>", 8), "lt": ("<", 7), "le": ("<=", 7), "eq": ("==", 6), "ne": ("!=", 6), "and": ("&", 5), "xor": ("^", 4), "or": ("|", 3),
}  # fmt: skip
LOGICAL = {"and": ("&&", 2), "or": ("||", 1), "xor": ("!=", 6)}
FUNCTIONS = {"abs": "fabs", "round": "rint"} | {
    f: f for f in ("sqrt", "exp", "log", "tanh", "erf", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh")
} | {f: f for f in ("floor", "ceil", "trunc", "pow", "fma")}  # fmt: skip
UPDATES = {"sum": "+=", "prod": "*=", "all": "&=", "any": "|="}
PREFIX, CHOICE = 11, 0  # precedences of a sign, and of ?:

FLOOR = """\
static inline long floordiv(long a, long b) { return a / b - (a % b != 0 && (a % b < 0) != (b < 0)); }
static inline long floormod(long a, long b) { return a - b * floordiv(a, b); }
"""


def c_text(kernel: Kernel) -> str:
    """A C function of the kernel's name, which takes its buffers in order. Raises `CodegenError` for what is not in the subset."""
    if kernel.scalars:
        raise CodegenError(f"`{kernel.name}` has symbolic sizes", hint="fix them: kernel(n=...)")
    parameters = ", ".join(f"{'' if b in kernel.outputs else 'const '}{TYPES[b.dtype]} {_parameter(b)}" for b in kernel.buffers)
    body = "\n".join(_lines(kernel.body, "  "))
    return f"#include <math.h>\n{FLOOR}\nvoid {kernel.name}({parameters}) {{\n{body}\n}}\n"


def _name(name: str) -> str:
    return name.replace(".", "_")


def _parameter(b: Buffer) -> str:
    first, *others = b.shape or (1,)
    return f"{_name(b.name)}[restrict {first}]" + "".join(f"[{d}]" for d in others)


def _element(b: Buffer, indices: tuple[Expr, ...]) -> str:
    if not indices:
        return _name(b.name) if b.scope == "register" else f"*{_name(b.name)}"
    return _name(b.name) + "".join(f"[{_term(i)}]" for i in indices)


def _lines(stmt: Stmt, indent: str) -> Iterator[str]:
    match stmt:
        case Block(stmts):
            for s in stmts:
                yield from _lines(s, indent)
        case For():
            name = _name(stmt.var.name)
            step, start, body = _natural(stmt)
            end = _term(simplify(start + E.as_expr(stmt.extent) * step), 8)
            yield f"{indent}for (long {name} = {_term(start)}; {name} {'<' if step > 0 else '>'} {end}; {name}{'++' if step > 0 else '--'}) {{"
            yield from _lines(body, indent + "  ")
            yield f"{indent}}}"
        case While(cond, body):
            yield f"{indent}while ({_term(cond)}) {{"
            yield from _lines(body, indent + "  ")
            yield f"{indent}}}"
        case If(cond, then, otherwise):
            yield f"{indent}if ({_term(cond)}) {{"
            yield from _lines(then, indent + "  ")
            if otherwise is not None:
                yield f"{indent}}} else {{"
                yield from _lines(otherwise, indent + "  ")
            yield f"{indent}}}"
        case Store(b, indices, value):
            yield f"{indent}{_element(b, indices)} = {_term(value)};"
        case Accumulate(b, indices, value, reducer):
            place = _element(b, indices)
            if reducer.name == "sum" and _negative(value) is not None:
                yield f"{indent}{place} -= {_term(_negative(value))};"
            elif reducer.name in UPDATES:
                yield f"{indent}{place} {UPDATES[reducer.name]} {_term(value)};"
            else:
                yield f"{indent}{place} = {_term(reducer(E.read(b, indices), value))};"
        case Allocate(b, body):
            yield f"{indent}{TYPES[b.dtype]} {_name(b.name)}{''.join(f'[{d}]' for d in b.shape)};"
            yield from _lines(body, indent)
        case _:
            raise CodegenError(f"no C for a {type(stmt).__name__}")


def _natural(loop: For) -> tuple[int, Expr, Stmt]:
    """Direction, start, and body of the loop whose variable is the most frequent index that it occurs in: `A[i]` from 1, not `A[i + 1]`
    from 0."""
    v, inner = loop.var, {f.var for f in walk(loop.body) if isinstance(f, For)}
    found: Counter[tuple[int, Expr]] = Counter()
    for stmt in walk(loop.body):
        indices = [*stmt.indices] if isinstance(stmt, Store | Accumulate) else []
        for index in (*indices, *(i for r in E.reads(*expressions(stmt)) for i in r.args)):
            step, rest = without(simplify(index), v) or (0, index)
            if abs(step) == 1 and not inner & set(E.variables(rest)) and not E.reads(rest):
                found[step, rest] += 1
    plain = (1, E.const(0))  # among equals
    step, start = max(found, key=lambda form: (found[form], form == plain), default=plain)
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


def _term(e: Expr, precedence: int = CHOICE) -> str:
    """The expression as an operand of an operator of the given precedence."""
    match e.op:
        case "const":
            return _constant(e)
        case "var":
            return _name(e.name)
        case "read":
            return _element(e.attr, e.args)
        case "cast":
            return f"({TYPES[e.dtype]}){_term(e.args[0], PREFIX)}"
        case "select":
            return _choice(*e.args, precedence)
        case "min" | "max":
            a, b = e.args
            return _choice(a < b if e.op == "min" else a > b, a, b, precedence)
        case "floordiv" | "mod" if is_integer(e.dtype):
            if all((E.bounds(a)[0] or -1) >= low for a, low in zip(e.args, (0, 1), strict=True)):
                return _infix("/" if e.op == "floordiv" else "%", 10, e, precedence)
            return f"{'floordiv' if e.op == 'floordiv' else 'floormod'}({_term(e.args[0])}, {_term(e.args[1])})"
        case "add" if is_integer(e.dtype) and e.args[0].op == "mul" and E.bounds(e.args[0].args[1])[1] == -1:
            text = f"{_term(e.args[1], 9)} - {_term(e.args[0].args[0], 10)}"
            return f"({text})" if precedence > 9 else text
        case "neg" | "not":
            sign = "-" if e.op == "neg" else "!" if e.dtype == "bool" else "~"
            text = sign + _term(e.args[0], PREFIX)
            return f"({text})" if precedence >= PREFIX else text
    if e.dtype == "bool" and e.op in LOGICAL:
        return _infix(*LOGICAL[e.op], e, precedence)
    if e.op in INFIX:
        return _infix(*INFIX[e.op], e, precedence)
    if e.op in FUNCTIONS and is_float(e.dtype):
        suffix = "f" if e.dtype == "float32" else ""
        return f"{FUNCTIONS[e.op]}{suffix}({', '.join(map(_term, e.args))})"
    raise CodegenError(f"no C for `{e.op}` of {e.dtype}", where=str(e))


def _infix(symbol: str, own: int, e: Expr, precedence: int) -> str:
    text = f"{_term(e.args[0], own)} {symbol} {_term(e.args[1], own + 1)}"
    return f"({text})" if own < precedence else text


def _choice(cond: Expr, a: Expr, b: Expr, precedence: int) -> str:
    text = f"{_term(cond, 1)} ? {_term(a, 1)} : {_term(b, 1)}"
    return f"({text})" if precedence > CHOICE else text


def _constant(e: Expr) -> str:
    if e.dtype == "bool":
        return "1" if e.attr else "0"
    if not is_float(e.dtype):
        return str(e.attr) if e.attr >= 0 else f"({e.attr})"
    if not math.isfinite(e.attr):
        return "NAN" if math.isnan(e.attr) else "INFINITY" if e.attr > 0 else "(-INFINITY)"
    text = repr(e.attr) + ("f" if e.dtype == "float32" else "")
    return text if e.attr >= 0 else f"({text})"
