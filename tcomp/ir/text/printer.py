"""The printed form of expressions, tensor expressions, loop programs and graphs. `parser.py` reads it back.

    kernel matmul<M{1..}>(A: float32[M, 64], B: float32[64, 8], C: float32[M, 8]) -> (C) {
      parallel i in 0..M {
        vectorized j in 0..8 {
          C[i, j] = 0.0f
          for k in 0..64 {
            C[i, j] += A[i, k] * B[k, j]
          }
        }
      }
    }

Expressions are infix with Python's precedence. A literal shows its dtype: `3` int64, `3i32`, `3u8`, `1.5` float64, `1.5f` float32,
`1.5f16`, `1.5bf16`, `true`. `float32(x)` is a conversion, so `float32(inf)` is an infinity. A bound variable shows its extent
(`k in 0..K`), a symbolic dim its inclusive range (`n{1..512}`, `n{1..}`). A sub-expression that is used often, or nested deep, is
named once (`let t0 = ... in ...`), so that text stays linear in the size of the program.

The text depends on structure and names alone: it is the same in every process. Things of the same name in one scope get suffixes
(`i`, `i_1`); a name that is no identifier stands in backticks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir import te
from tcomp.ir.dtypes import BITS, SIGNED, is_float
from tcomp.ir.expr import INDEX, Dim, Expr, Reducer, as_expr
from tcomp.ir.graph import Graph, Node, Value
from tcomp.ir.instruction import ELEMENT, WARP, CopyOp, Instruction, VectorOp
from tcomp.ir.loops import SCOPES, SERIAL, Accumulate, Allocate, Block, Buffer, Call, For, If, Kernel, Prefetch, Stmt, Store, While

INFIX = {  # symbol and precedence; all associate to the left, comparisons not at all
    "mul": ("*", 7), "div": ("/", 7), "floordiv": ("//", 7), "mod": ("%", 7), "add": ("+", 6), "sub": ("-", 6),
    "shl": ("<<", 5), "shr": (">>", 5), "and": ("&", 4), "xor": ("^", 3), "or": ("|", 2),
    "lt": ("<", 1), "le": ("<=", 1), "eq": ("==", 1), "ne": ("!=", 1),
}  # fmt: skip
PREFIX = {"neg": "-", "not": "~"}
UNARY_PRECEDENCE = 8
SUFFIXES = {"float32": "f", "float64": "", "float16": "f16", "bfloat16": "bf16", INDEX: ""} | {
    d: f"{'i' if d in SIGNED else 'u'}{bits}" for d, bits in BITS.items() if "int" in d and d != INDEX
}
RESERVED = frozenset(
    (
        "_",
        "let",
        "in",
        "for",
        "if",
        "else",
        "while",
        "alloc",
        "call",
        "prefetch",
        "stream",
        "inf",
        "nan",
        "true",
        "false",
        "none",
        "return",
        "extern",
        "reducer",
    )
    + ("instruction", "const")
)
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
INLINE = 8  # constants of graphs up to this many elements are printed by value
_SHARED_WEIGHT = 10  # nodes of a sub-expression worth a name
_DEPTH = 40  # nesting at which a sub-expression gets a name


def print_expr(e: Expr) -> str:
    """An expression; variables and tensors by name."""
    return _Printer().expression(e)


def print_stmt(stmt: Stmt) -> str:
    """A statement, for people: buffers and variables from outside are not declared."""
    return "\n".join(_Printer().statement(stmt, ""))


def print_kernel(kernel: Kernel) -> str:
    """A loop program with its declarations."""
    return "\n".join(_Printer().kernel(kernel))


def print_instruction(instruction: Instruction) -> str:
    """An instruction: its operands, what it demands and costs, its emission, its meaning."""
    return "\n".join(_Printer().instruction(instruction, ""))


def print_te(outputs: Sequence[te.Tensor]) -> str:
    """Tensors and everything they depend on, producers first."""
    return "\n".join(_Printer().tensors(outputs))


def print_graph(graph: Graph) -> str:
    """A graph. Constants of more than `INLINE` elements are printed as their `content_hash`."""
    return "\n".join(_Printer().graph(graph, "", outermost=True))


def canonical_graph_text(graph: Graph) -> str:
    """`print_graph` with values renamed in order (v0, v1, ...), unused constants and the names of graph and nodes left out: equal
    for graphs that compute the same in the same way. The key of compiled kernels."""
    return "\n".join(_Printer(canonical=True).graph(graph, "", outermost=True))


def content_hash(array: np.ndarray) -> str:
    """The first 24 hex digits of the SHA-256 of dtype, shape and elements (row-major)."""
    digest = hashlib.sha256(f"{array.dtype.name}{list(array.shape)}".encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()[:24]


@cache
def standard_reducers(dtype: str) -> dict[str, Reducer]:
    """The folds of `te` for one dtype, by name: these need no declaration."""
    folds = {"sum": te.sum, "prod": te.prod, "max": te.max, "min": te.min, "all": te.all, "any": te.any}
    axis, body = E.loop_var("k", 2), E.var("x", dtype=dtype)
    return {name: fold(body, axis).attr[0] for name, fold in folds.items()}


def quoted(name: str, reserved: Collection[str] = RESERVED) -> str:
    """The name as it stands in the text."""
    if IDENTIFIER.fullmatch(name) and name not in reserved:
        return name
    return "`" + json.dumps(name)[1:-1].replace("`", "\\u0060") + "`"


def literal(value: Any, dtype: str) -> str:
    """A constant; the text reads back as exactly this value and dtype."""
    if dtype == "bool":
        return "true" if value else "false"
    if not is_float(dtype):
        return f"{value}{SUFFIXES.get(dtype, dtype)}"
    text = repr(float(value))
    if text in ("inf", "-inf", "nan"):
        return text if dtype == "float64" else f"{dtype}({text})"
    return text + SUFFIXES[dtype]


class _Names:
    """Unique names of the things in scope. What is named without having been bound is free."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.of: dict[Any, str] = {}
        self.taken = set(taken)
        self.free: list[Any] = []

    def bind(self, thing: Any, wanted: str, numbered: bool = False) -> str:
        """A name for `thing` (by identity); `numbered` always appends a number."""
        candidate, number = f"{wanted}0" if numbered else wanted, 0
        while candidate in self.taken:
            number += 1
            candidate = f"{wanted}{number}" if numbered else f"{wanted}_{number}"
        self.taken.add(candidate)
        self.of[thing] = candidate
        return quoted(candidate)

    def release(self, thing: Any) -> None:
        self.taken.discard(self.of.pop(thing, ""))  # malformed programs bind twice, and must be printed too

    def __call__(self, thing: Any, wanted: str) -> str:
        name = self.of.get(thing)
        if name is not None:
            return quoted(name)
        self.free.append(thing)
        return self.bind(thing, wanted)


class _Printer:
    def __init__(self, canonical: bool = False) -> None:
        self.variables, self.arrays, self.values = _Names(), _Names(), _Names()
        self.reducers = _Names(standard_reducers("bool"))
        self.instructions = _Names()
        self.canonical = canonical

    @contextmanager
    def scope(self, names: _Names, things: Iterable[Any]) -> Iterator[None]:
        """Names of `things`, which are bound inside the block, are free again after it."""
        yield
        for thing in things:
            names.release(thing)

    # ------------------------------------------------------------ expressions

    def expression(self, e: Expr, indent: str = "") -> str:
        """An expression of a scope of its own, with what it shares named in front."""
        uses, weight, depth, named = Counter[Expr](), dict[Expr, int](), dict[Expr, int](), list[Expr]()
        nodes = list(self.scope_of(e))
        for _, operands in nodes:
            uses.update(operands)
        for node, operands in nodes:
            weight[node] = min(1 << 30, 1 + sum(weight[a] for a in operands))
            depth[node] = 1 + max((depth[a] for a in operands), default=0)
            if node is not e and (depth[node] >= _DEPTH or (uses[node] > 1 and weight[node] >= _SHARED_WEIGHT)):
                named.append(node)
                depth[node] = 0
        if not named:
            return self.term(e, 0, indent)
        lines = []
        for node in named:
            text = self.term(node, 0, indent + "    ")
            lines.append(f"{self.variables.bind(node, 't', numbered=True)} = {text}")
        with self.scope(self.variables, named):
            body = self.term(e, 0, indent)
            return "let " + f";\n{indent}    ".join(lines) + f"\n{indent}in {body}"

    def scope_of(self, root: Expr) -> Iterator[tuple[Expr, tuple[Expr, ...]]]:
        """Sub-expressions with their operands, operands first; what has a name, and bodies of reductions, are not entered."""
        seen: set[Expr] = set()
        stack = [(root, False)]
        while stack:
            e, ready = stack.pop()
            operands = () if e.op == "reduce" or e in self.variables.of else e.args
            if ready:
                yield e, operands
            elif e not in seen:
                seen.add(e)
                stack.append((e, True))
                stack.extend((a, False) for a in reversed(operands))

    def term(self, e: Expr, precedence: int, indent: str) -> str:
        """`e` as an operand of an operator of the given precedence."""
        name = self.variables.of.get(e)
        if name is not None:
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
        return ", ".join(self.term(a, 0, indent) for a in items)

    def reduction(self, e: Expr, indent: str) -> str:
        reducer, axes = e.attr
        bound: list[Expr] = []
        extents = [v.attr.extent if v.attr.extent is not None else (v.attr.hi or 0) + 1 for v in axes]
        listed = ", ".join(self.binding(v, extent, bound) for v, extent in zip(axes, extents, strict=True))
        with self.scope(self.variables, bound):
            return f"{self.reducer(reducer)}({listed}: {self.expression(e.args[0], indent + '    ')})"

    def reducer(self, reducer: Reducer) -> str:
        standard = reducer == standard_reducers(reducer.identity.dtype).get(reducer.name)
        return reducer.name if standard else self.reducers(reducer, reducer.name)

    def binding(self, v: Expr, extent: Dim, bound: list[Expr]) -> str:
        """`v in 0..extent`; v is added to `bound` unless it is in scope already. Its range is shown if the extent does not give it."""
        end = self.dim(extent)
        declared = "" if E.loop_var(v.name, extent) is v else self.range(v)
        if v not in self.variables.of:
            self.variables.bind(v, v.name)
            bound.append(v)
        return f"{self.variables(v, v.name)}{declared} in 0..{end}"

    def range(self, v: Expr) -> str:
        lo, hi, extent = v.attr.lo, v.attr.hi, v.attr.extent
        cut = "" if extent is None else f" < {self.dim(extent)}"
        dtype = "" if v.dtype == INDEX else f": {v.dtype}"
        return f"{{{'' if lo is None else lo}..{'' if hi is None else hi}{cut}{dtype}}}"

    def dim(self, d: Dim) -> str:
        return self.term(as_expr(d), UNARY_PRECEDENCE + 1, "") if isinstance(d, Expr) else str(d)

    def shape(self, shape: Sequence[Dim]) -> str:
        return f"[{', '.join(self.term(d, 0, '') if isinstance(d, Expr) else str(d) for d in shape)}]"

    def dims(self, dims: list[Expr]) -> str:
        """The declaration of symbolic dims; while their ranges are printed, more may be added to the list."""
        declared = [self.variables(v, v.name) + self.range(v) for v in dims]
        return f"<{', '.join(declared)}>" if declared else ""

    def reducer_lines(self) -> list[str]:
        """Declarations of the reducers used so far that are not standard."""
        lines = []
        for reducer in self.reducers.free:
            pair = (reducer.lhs, reducer.rhs)
            listed = ", ".join(self.variables.bind(v, v.name) + self.range(v) for v in pair)
            with self.scope(self.variables, pair):
                combine, identity = self.expression(reducer.combine, "  "), self.expression(reducer.identity)
                lines.append(f"  reducer {self.reducer(reducer)}({listed}) = {combine} from {identity}")
        return lines

    # ------------------------------------------------------------ loop programs

    def buffer(self, b: Buffer) -> str:
        scope = "" if b.scope == "global" else f" {b.scope}"
        return f"{self.arrays.bind(b, b.name)}: {b.dtype}{self.shape(b.shape)}{scope}"

    def kernel(self, kernel: Kernel) -> list[str]:
        dims = self.dims(list(kernel.scalars))
        buffers = ", ".join(self.buffer(b) for b in kernel.buffers)
        outputs = ", ".join(self.arrays(b, b.name) for b in kernel.outputs)
        lines = [f"kernel {quoted(kernel.name)}{dims}({buffers}) -> ({outputs}) {{"]
        lines += [f"  note {json.dumps(note)}" for note in kernel.notes]
        body = self.statement(kernel.body, "  ")
        instructions = [line for i in self.instructions.free for line in self.instruction(i, "  ")]
        return [*lines, *self.reducer_lines(), *instructions, *body, "}"]

    def instruction(self, i: Instruction, indent: str) -> list[str]:
        """A declaration, in scopes of its own; reducers are those of the kernel."""
        inner, op = _Printer(), i.emission
        inner.reducers = self.reducers
        buffers = ", ".join(inner.buffer(b) for b in i.meaning.buffers)
        lines = [f"{indent}instruction {self.instructions(i, i.name)}({buffers}) -> ({quoted(i.result.name)}) {{"]
        inside = indent + "  "
        for b, o in zip(i.meaning.buffers, i.operands, strict=True):
            strides = ", ".join("_" if s is None else str(s) for s in o.strides)
            scopes = "" if o.scopes == SCOPES else f" in {', '.join(o.scopes)}"
            fragment = ""
            if o.fragment is not None:
                lane, among = o.fragment.lane, "" if o.fragment.threads == WARP else f" among {o.fragment.threads}"
                inner.variables.bind(lane, lane.name)
                inner.variables.bind(ELEMENT, ELEMENT.name)
                with inner.scope(inner.variables, (lane, ELEMENT)):
                    fragment = f" holds {o.fragment.count}{among} at [{inner.listed(o.fragment.indices, '')}]"
            lines.append(f"{inside}operand {quoted(b.name)}[{strides}]{scopes}{fragment}")
        order = " reassociates" if i.reassociates else ""
        lines.append(f"{inside}needs {', '.join(map(json.dumps, i.features))} takes {float(i.cycles)!r} cycles {i.uops} uops{order}")
        called = f"({', '.join(map(quoted, op.arguments))})"
        if isinstance(op, VectorOp):
            lines.append(f"{inside}emits vector {json.dumps(op.intrinsic)}{called} lanes {op.lanes} group {op.group}")
        else:
            lines.append(f"{inside}emits {'copy' if isinstance(op, CopyOp) else 'warp'} {json.dumps(op.ptx)}{called}")
        return [*lines, *inner.statement(i.meaning.body, inside), indent + "}"]

    def statement(self, stmt: Stmt, indent: str) -> list[str]:
        """The lines of a statement."""
        match stmt:
            case Block(stmts):
                lines = []
                for n, s in enumerate(stmts):
                    if isinstance(s, Allocate) and n < len(stmts) - 1:
                        lines += self.braced(f"{indent}alloc {self.buffer(s.buffer)}", s.body, indent)
                        self.arrays.release(s.buffer)
                    else:
                        lines += self.statement(s, indent)
                return lines
            case For(v, extent, body, kind):
                bound: list[Expr] = []
                head = f"{indent}{'for' if kind == SERIAL else kind} {self.binding(v, extent, bound)}"
                with self.scope(self.variables, bound):
                    return self.braced(head, body, indent)
            case If(cond, then, otherwise):
                lines = self.braced(f"{indent}if {self.expression(cond, indent)}", then, indent)
                if otherwise is not None:
                    lines[-1] += " else {"
                    lines += [*self.statement(otherwise, indent + "  "), indent + "}"]
                return lines
            case While(cond, body):
                return self.braced(f"{indent}while {self.expression(cond, indent)}", body, indent)
            case Store(b, indices, value, streamed):
                return [f"{indent}{'stream ' if streamed else ''}{self.place(b, indices)} = {self.expression(value, indent)}"]
            case Accumulate(b, indices, value, reducer):
                sign = "+=" if reducer == standard_reducers(value.dtype)["sum"] else f"{self.reducer(reducer)}="
                return [f"{indent}{self.place(b, indices)} {sign} {self.expression(value, indent)}"]
            case Allocate(b, body):
                # Without braces it lives to the end of the block.
                head = f"{indent}alloc {self.buffer(b)}"
                with self.scope(self.arrays, [b]):
                    return [head, *self.statement(body, indent)]
            case Prefetch(b, indices):
                return [f"{indent}prefetch {self.place(b, indices)}"]
            case Call(instruction, body):
                return self.braced(f"{indent}call {self.instructions(instruction, instruction.name)}", body, indent)
        raise IRError(f"no statement of the loop IR: {type(stmt).__name__}")

    def braced(self, head: str, body: Stmt, indent: str) -> list[str]:
        return [head + " {", *self.statement(body, indent + "  "), indent + "}"]

    def place(self, b: Buffer, indices: Sequence[Expr]) -> str:
        return f"{self.arrays(b, b.name)}[{self.listed(indices, '')}]"

    # ------------------------------------------------------------ tensor expressions

    def tensors(self, outputs: Sequence[te.Tensor]) -> list[str]:
        tensors = list(te.tensors(outputs))
        lines, done = [], set[int]()
        for t in tensors:
            if t.extern is not None:
                if id(t.extern) not in done:
                    done.add(id(t.extern))
                    lines += self.extern(t.extern, [u for u in tensors if u.extern is t.extern])
            elif t.body is None:
                lines.append(f"  {self.arrays.bind(t, t.name)}: {t.dtype}{self.shape(t.shape)}")
            else:
                bound: list[Expr] = []
                axes = ", ".join(self.binding(v, extent, bound) for v, extent in zip(t.axes, t.shape, strict=True))
                with self.scope(self.variables, bound):
                    body = self.expression(t.body, "    ")
                lines.append(f"  {self.arrays.bind(t, t.name)}[{axes}] = {body}")
        reducers = self.reducer_lines()
        head = f"te{self.dims(self.variables.free)} {{"
        return [head, *reducers, *lines, f"  return {', '.join(self.arrays(t, t.name) for t in outputs)}", "}"]

    def extern(self, program: te.Extern, used: Sequence[te.Tensor]) -> list[str]:
        by_index = {t.index: t for t in used}
        inputs = [self.arrays(t, t.name) for t in program.inputs]
        names = [self.arrays.bind(by_index[n], by_index[n].name) if n in by_index else "_" for n in range(len(program.results))]
        parameters = [self.buffer(b) for b in program.parameters]
        results = [self.buffer(b) for b in program.results]
        with self.scope(self.arrays, (*program.parameters, *program.results)):
            head = f"  {', '.join(names)} = extern({', '.join(inputs)}) as ({', '.join(parameters)}) -> ({', '.join(results)})"
            return self.braced(head, program.body, "  ")

    # ------------------------------------------------------------ graphs

    def graph(self, graph: Graph, indent: str, outermost: bool = False) -> list[str]:
        outer, self.values = self.values, _Names()
        inputs = ", ".join(self.declared(v) for v in graph.inputs)
        inside = indent + "  "
        lines = []
        if self.canonical:
            used = [v for node in graph.nodes for v in node.inputs if v is not None] + list(graph.outputs)
            constants = {v: graph.constants[v] for v in dict.fromkeys(used) if v in graph.constants}
        else:
            constants = dict(graph.constants)
        for v, array in constants.items():
            lines.append(f"{inside}const {self.declared(v)} = {self.constant(np.asarray(array), v.dtype)}")
        for node in graph.nodes:
            lines += self.node(node, inside)
        outputs = ", ".join(self.value(v) for v in graph.outputs)
        name = "g" if self.canonical else quoted(graph.name)
        dims = self.dims(self.variables.free) if outermost else ""
        self.values = outer
        return [f"{indent}graph {name}{dims}({inputs}) -> ({outputs}) {{", *lines, indent + "}"]

    def value(self, v: Value) -> str:
        return "%" + (self.values(v, v.name) if not self.canonical or v in self.values.of else self.values.bind(v, "v", numbered=True))

    def declared(self, v: Value) -> str:
        layout = "" if v.layout is None else f" {v.layout}"
        return f"{self.value(v)}: {v.dtype}{self.shape(v.shape)}{layout}"

    def node(self, node: Node, indent: str) -> list[str]:
        arguments = ["_" if v is None else self.value(v) for v in node.inputs]
        arguments += [f"{quoted(name, ())}={self.attribute(value)}" for name, value in sorted(node.attrs.items())]
        outputs = ", ".join(self.declared(v) for v in node.outputs)
        label = f" @{quoted(node.name)}" if node.name and not self.canonical else ""
        line = f"{indent}{outputs} = {quoted(node.op.name, ())}({', '.join(arguments)}){label}"
        if not node.bodies:
            return [line]
        return [line + " {", *(text for body in node.bodies for text in self.graph(body, indent + "  ")), indent + "}"]

    def attribute(self, value: Any) -> str:
        match value:
            case None:
                return "none"
            case bool() | np.bool_():
                return "true" if value else "false"
            case int() | np.integer():
                return str(int(value))
            case float() | np.floating():
                return repr(float(value))
            case str():
                return json.dumps(value)
            case Expr():
                return f"{{{self.term(value, 0, '')}}}" if value.op != "const" else self.attribute(value.attr)
            case tuple() | list():
                return f"({', '.join(map(self.attribute, value))}{',' if len(value) == 1 else ''})"
        raise IRError(f"an attribute is a {type(value).__name__}", hint="attributes are None, bool, int, float, str, dims and tuples")

    def constant(self, array: np.ndarray, dtype: str) -> str:
        if array.size > INLINE:
            return f'sha256 "{content_hash(array)}"'
        show: Callable[[Any], str] = str
        if dtype == "bool":
            show = lambda x: "true" if x else "false"
        elif dtype == "bfloat16":
            show = lambda x: repr(float(x))
        return f"[{', '.join(show(x) for x in array.reshape(-1))}]"
