"""The printed form of expressions, the base of the printers of all nouns. `parser.py` reads it back.

Expressions are infix with Python's precedence. A literal shows its dtype: `3` int64, `3i32`, `3u8`, `1.5` float64, `1.5f` float32,
`1.5f16`, `1.5bf16`, `true`. `float32(x)` is a conversion, so `float32(inf)` is an infinity. A bound variable shows its extent
(`k in 0..K`), a symbolic dim its inclusive range (`n{1..512}`, `n{1..}`). A sub-expression that is used often, or nested deep, is
named once (`let t0 = ... in ...`), so that text stays linear in the size of the program.

The text depends on structure and names alone: it is the same in every process. What has the same name in one scope get suffixes
(`i`, `i_1`); a name that is not an identifier is in backticks.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from tcomp.ir import expr as E
from tcomp.ir.dtypes import SIGNED, UNSIGNED, is_float
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr
from tcomp.ir.reducers import Reducer, standard_reducers

INFIX = {  # symbol and precedence; all associate to the left, comparisons not at all
    "mul": ("*", 7), "div": ("/", 7), "floordiv": ("//", 7), "mod": ("%", 7), "add": ("+", 6), "sub": ("-", 6),
    "shl": ("<<", 5), "shr": (">>", 5), "and": ("&", 4), "xor": ("^", 3), "or": ("|", 2),
    "lt": ("<", 1), "le": ("<=", 1), "eq": ("==", 1), "ne": ("!=", 1),
}  # fmt: skip
PREFIX = {"neg": "-", "not": "~"}
UNARY_PRECEDENCE = 8
SUFFIXES = {"float32": "f", "float64": "", "float16": "f16", "bfloat16": "bf16", INDEX: ""} | {
    d: f"{'i' if d in SIGNED else 'u'}{bits}" for d, bits in (SIGNED | UNSIGNED).items() if d != INDEX
}
RESERVED = frozenset([
    "_", "let", "in", "for", "if", "else", "while", "alloc", "call", "prefetch", "stream", "inf", "nan", "true", "false", "none", "return",
    "extern", "reducer", "instruction", "const",
])  # fmt: skip
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_SHARED_WEIGHT = 10  # nodes of a sub-expression worth a name
_DEPTH = 40  # nesting at which a sub-expression gets a name


def quoted(name: str, reserved: Collection[str] = RESERVED) -> str:
    """A name as printed: in backticks unless it is an identifier."""
    if IDENTIFIER.fullmatch(name) and name not in reserved:
        return name
    return "`" + json.dumps(name)[1:-1].replace("`", "\\u0060") + "`"


def literal(value: Any, dtype: str) -> str:
    """A constant; the text reads back as exactly this value and dtype."""
    if dtype == "bool":
        return "true" if value else "false"
    text = repr(float(value)) if is_float(dtype) else str(value)
    if text in ("inf", "-inf", "nan"):
        return text if dtype == "float64" else f"{dtype}({text})"
    return text + SUFFIXES.get(dtype, dtype)


def as_html(text: str, title: str = "") -> str:
    """A text as notebooks show it; with a title it is folded away below that."""
    block = f"<pre>{html.escape(text)}</pre>"
    return f"<details><summary>{html.escape(title)}</summary>{block}</details>" if title else block


def unused(name: str, taken: Container[str], numbered: str = "{}_{}", first: int = 1) -> str:
    """`name`, or where it is taken the first free name with a number from `first` on behind it; `numbered` is their format."""
    return name if name not in taken else next(c for n in count(first) if (c := numbered.format(name, n)) not in taken)


class Names:
    """Unique names of the objects in scope. An object that is named without having been bound is free."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.of: dict[Any, str] = {}
        self.taken = set(taken)
        self.free: list[Any] = []

    def bind(self, named: Any, wanted: str, numbered: bool = False) -> str:
        """A name for `named` (by identity); `numbered` always appends a number."""
        name = unused(f"{wanted}0", self.taken, wanted + "{1}") if numbered else unused(wanted, self.taken)
        self.taken.add(name)
        self.of[named] = name
        return quoted(name)

    @contextmanager
    def scope(self, named: Iterable[Any]) -> Iterator[None]:
        """Releases, at the end, the names of what is `named`, which may be bound inside."""
        yield
        for one in named:
            self.taken.discard(self.of.pop(one, ""))  # malformed programs bind twice, and must be printed too

    def __call__(self, named: Any, wanted: str) -> str:
        if (name := self.of.get(named)) is not None:
            return quoted(name)
        self.free.append(named)
        return self.bind(named, wanted)


class Printer:
    """Text of expressions, with the names that are in scope."""

    sources = False  # whether the sources of sizes are shown: where they are known, not in the kernels that just get them

    def __init__(self) -> None:
        self.variables, self.arrays = Names(), Names()  # arrays: tensors and buffers
        self.reducers = Names(standard_reducers("bool"))

    def expression(self, e: Expr, indent: str = "") -> str:
        """An expression of a scope of its own, with what it shares named in front."""
        nodes = list(E.walk(e, operands=self.operands))
        uses = Counter(a for node in nodes for a in self.operands(node))
        weight, depth, named = dict[Expr, int](), dict[Expr, int](), list[Expr]()
        for node in nodes:
            operands = self.operands(node)
            weight[node] = min(1 << 30, 1 + sum(weight[a] for a in operands))
            depth[node] = 1 + max((depth[a] for a in operands), default=0)
            if node is not e and (depth[node] >= _DEPTH or (uses[node] > 1 and weight[node] >= _SHARED_WEIGHT)):
                named.append(node)
                depth[node] = 0
        lines = []
        for node in named:
            text = self.term(node, 0, indent + "    ")
            lines.append(f"{self.variables.bind(node, 't', numbered=True)} = {text}")
        with self.variables.scope(named):
            body = self.term(e, 0, indent)
            return "let " + f";\n{indent}    ".join(lines) + f"\n{indent}in {body}" if lines else body

    def operands(self, e: Expr) -> tuple[Expr, ...]:
        """The operands that are printed in the same scope: not those of what has a name, nor bodies of reductions."""
        return () if e.op == "reduce" or e in self.variables.of else e.args

    def term(self, e: Expr, precedence: int, indent: str) -> str:
        """`e` as an operand of an operator of the given precedence."""
        if (name := self.variables.of.get(e)) is not None:
            return quoted(name)
        match e.op:
            case "const":
                return literal(e.attr, e.dtype)
            case "var":
                return self.variables(e, e.name)
            case "read":
                return f"{self.arrays(e.attr, e.attr.name)}[{self.listed(e.args, indent)}]"
            case "reduce":
                return self.reduction(e, indent)
            case "cast":
                return f"{e.dtype}({self.term(e.args[0], 0, indent)})"
            case "bitcast":
                return f"bitcast({self.term(e.args[0], 0, indent)}, {e.dtype})"
        if e.op in INFIX:
            symbol, own = INFIX[e.op]
            left = self.term(e.args[0], own + (own == 1), indent)
            text = f"{left} {symbol} {self.term(e.args[1], own + 1, indent)}"
        elif e.op in PREFIX:
            own, text = UNARY_PRECEDENCE, PREFIX[e.op] + self.term(e.args[0], UNARY_PRECEDENCE, indent)
        else:
            return f"{e.op}({self.listed(e.args, indent)})"
        return f"({text})" if own < precedence else text

    def listed(self, items: Sequence[Expr], indent: str) -> str:
        """Expressions separated by commas."""
        return ", ".join(self.term(a, 0, indent) for a in items)

    def reduction(self, e: Expr, indent: str) -> str:
        """A reduction, `sum(k in 0..K: body)`."""
        reducer, axes = e.attr
        extents = [v.attr.extent if v.attr.extent is not None else (v.attr.hi or 0) + 1 for v in axes]
        with self.bindings(zip(axes, extents, strict=True)) as listed:
            return f"{self.reducer(reducer)}({listed}: {self.expression(e.args[0], indent + '    ')})"

    def reducer(self, reducer: Reducer) -> str:
        """The name of a reducer."""
        standard = reducer == standard_reducers(reducer.identity.dtype).get(reducer.name)
        return reducer.name if standard else self.reducers(reducer, reducer.name)

    @contextmanager
    def bindings(self, variables: Iterable[tuple[Expr, Dim]]) -> Iterator[str]:
        """`v in 0..extent, ...`, with the variables in scope inside. A range is shown if the extent does not give it."""
        texts, bound = [], []
        for v, extent in variables:
            end, declared = self.dim(extent), "" if E.loop_var(v.name, extent) is v else self.range(v)
            if v not in self.variables.of:
                self.variables.bind(v, v.name)
                bound.append(v)
            texts.append(f"{self.variables(v, v.name)}{declared} in 0..{end}")
        with self.variables.scope(bound):
            yield ", ".join(texts)

    def range(self, v: Expr) -> str:
        """The range of a variable in braces, with its exact sizes, and its dtype if it is not an index."""
        lo, hi, extent = v.attr.lo, v.attr.hi, v.attr.extent
        cut = "" if extent is None else f" < {self.dim(extent)}"
        dtype = "" if v.dtype == INDEX else f": {v.dtype}"
        exact = f" | {', '.join(map(str, v.attr.exact))}" if v.attr.exact else ""
        return f"{{{'' if lo is None else lo}..{'' if hi is None else hi}{cut}{exact}{dtype}}}"

    def dim(self, d: Dim) -> str:
        """An extent, in parentheses where another operator could follow."""
        return self.term(as_expr(d), UNARY_PRECEDENCE + 1, "") if isinstance(d, Expr) else str(d)

    def shape(self, shape: Sequence[Dim]) -> str:
        """Extents in brackets."""
        return f"[{', '.join(self.term(d, 0, '') if isinstance(d, Expr) else str(d) for d in shape)}]"

    def dims(self, dims: list[Expr]) -> str:
        """The declaration of symbolic dims; while their ranges are printed, more may be added to the list."""
        if self.sources and any(v.attr.source is not None for v in dims):
            dims = E.with_sources(dims)
        declared = [self.variables(v, v.name) + self.range(v) + self.source(v) for v in dims]
        return f"<{', '.join(declared)}>" if declared else ""

    def source(self, v: Expr) -> str:
        """The origin of a size that follows from no shape: ` = input1[0]: int64`, or ` = n * 2 "its name in messages"`."""
        if not self.sources or (source := v.attr.source) is None:
            return ""
        origin = f"input{source.input}[{source.element}]: {source.dtype}" if source.value is None else self.term(source.value, 0, "")
        return f" = {origin} {json.dumps(source.what)}"

    def reducer_lines(self) -> list[str]:
        """Declarations of the reducers used so far that are not standard."""
        lines = []
        for reducer in self.reducers.free:
            listed = ", ".join(self.variables.bind(v, v.name) + self.range(v) for v in (reducer.lhs, reducer.rhs))
            with self.variables.scope((reducer.lhs, reducer.rhs)):
                combine, identity = self.expression(reducer.combine, "  "), self.expression(reducer.identity)
                lines.append(f"  reducer {self.reducer(reducer)}({listed}) = {combine} from {identity}")
        return lines
