"""The interpreter of loop programs: they become the text of a Python function, with NumPy scalars for floats and Python's integers, wrapped
around. Every access is checked. All loops run serially; parallel (and GPU) loops can run in a shuffled order, which exposes races. The text
only notices that some index is out of range: which one is found by running the statement once more in its *watched* form, in which every
access is a call of a `Watcher`. To observe all accesses, the whole program is run in that form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from traceback import walk_tb
from typing import Any, NoReturn, TypeAlias

import numpy as np

from tcomp.errors import InputError, IRError
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dims import bind_dims
from tcomp.ir.dtypes import NARROW, integer_range, is_float, is_integer, to_numpy
from tcomp.ir.expr import INDEX, Expr, as_expr
from tcomp.ir.interpreters import semantics
from tcomp.ir.interpreters.semantics import Array
from tcomp.ir.scalar_operators import wrap

_FILE = "<loop program>"
_BLOCKS = 15  # loops of one Python function: the compiler of Python refuses more than 20
_DEPTH = 40  # operators nested in one Python expression: its parser refuses some 100 parentheses
_EXACT = 1 << 53  # larger integers would be rounded twice on their way to a float, by way of Python's

Arrays: TypeAlias = Mapping[L.Buffer, Array]
Sizes: TypeAlias = Mapping[Expr, int]  # of symbolic dims
Index: TypeAlias = tuple[int, ...]
Iteration: TypeAlias = Mapping[str, int]  # values of the loops around a statement, by name


def run_kernel(kernel: L.Kernel, buffers: Arrays, scalars: Sizes | None = None, shuffle: int | None = None, garbage: bool = False) -> None:
    """Run a kernel on arrays, which must have the dtypes and shapes of its buffers; outputs are written in place.

    Symbolic dims are bound by the shapes, or given in `scalars`. `shuffle` is a seed for the order of parallel iterations. With
    `garbage` an element that has not been written may be read, and is NaN (85 in integers): padding may be moved, but not used.
    Raises `InputError` if an array does not fit, `IRError` on an out-of-range access or an undefined read.
    """
    for b in kernel.buffers:
        if b not in buffers:
            raise InputError(f"no array for the buffer `{b.name}` of kernel `{kernel.name}`")
        if buffers[b].dtype != to_numpy(b.dtype):
            raise InputError(f"`{b.name}` is {buffers[b].dtype.name} instead of {b.dtype}")
    dims = bind_dims([(b.name, b.shape, buffers[b].shape) for b in kernel.buffers], scalars)
    run_stmt(kernel.body, buffers, dims, shuffle=shuffle, garbage=garbage)


def run_stmt(
    stmt: L.Stmt, buffers: Arrays, scalars: Sizes | None = None, *, undefined: Collection[L.Buffer] = (), shuffle: int | None = None,
    garbage: bool = False, watcher: Watcher | None = None,
) -> None:  # fmt: skip
    """Run a statement. `buffers` named in `undefined` may be read only where they have been written before. A `watcher` is called for every
    access. Raises as `run_kernel` does."""
    text = _Text(None if shuffle is None else np.random.default_rng(shuffle), garbage, watcher)
    text.names = {v: text.constant(size, "n") for v, size in (scalars or {}).items()}
    for b, array in buffers.items():
        written = text.constant(np.zeros(array.shape, bool), "w") if b in undefined else ""
        text.memory[b] = text.constant(array, "b"), written
    text.run(stmt)


class Watcher:
    """Callbacks of a program that is interpreted under observation. This class only checks; others override its methods and call them."""

    def enter(self, stmt: L.Stmt) -> None:
        """A loop, a branch, an allocation or a store begins; its extents, conditions and operands are computed inside."""

    def leave(self, stmt: L.Stmt) -> None:
        """It ends."""

    def read(self, b: L.Buffer, array: Array, written: Array | None, index: Index, loops: Iteration) -> Any:
        """The value of an element. Raises `IRError` if there is none, or if it has not been written."""
        value = self.element(b, array, index, loops, "reads")
        if written is not None and not written[index]:
            self.fail(b, "reads", index, loops, "this element has not been written yet")
        return value

    def store(self, stmt: L.Store | L.Accumulate, array: Array, index: Index, loops: Iteration) -> None:
        """An element is about to be stored. Raises `IRError` if there is none."""
        self.element(stmt.buffer, array, index, loops, "stores to")

    def element(self, b: L.Buffer, array: Array, index: Index, loops: Iteration, verb: str) -> Any:
        """The value of an element. Raises `IRError` if the index is out of range."""
        if all(0 <= i < n for i, n in zip(index, array.shape, strict=True)):
            return array[index] if _is_scalar(b.dtype) else array.item(index)
        self.fail(b, verb, index, loops, f"its shape is {array.shape}")

    def fail(self, b: L.Buffer, verb: str, index: Index, loops: Iteration, why: str) -> NoReturn:
        """Raises `IRError` that names the element and the iteration."""
        values = ", ".join(f"{name} = {value}" for name, value in loops.items())
        raise IRError(f"the program {verb} {b.name}[{', '.join(map(str, index))}]", where=values and f"loops {values}", why=why)


class _Text:
    """The Python text of a program under construction, and what its names stand for."""

    def __init__(self, shuffle: np.random.Generator | None, garbage: bool, watcher: Watcher | None) -> None:
        self.shuffle, self.garbage, self.watcher = shuffle, garbage, watcher
        self.lines: list[str] = []
        self.indent = self.blocks = 0
        self.count = Counter[str]()  # names made so far, by their first letter
        self.known: dict[str, Any] = {"range": range, "bad": _bad, "wrap": wrap, "none": _NONE}  # globals of the function
        self.names: dict[Expr, str] = {}  # of variables
        self.memory: dict[L.Buffer, tuple[str, str]] = {}  # names of arrays, and of what tells which elements are written ("": all are)
        self.loops: tuple[Expr, ...] = ()  # around the statement
        self.sources: list[tuple[L.Stmt, dict[Expr, str]]] = []  # for each line, its statement and the loops around that, with their names

    def run(self, stmt: L.Stmt) -> None:
        """Make the text of a whole program and run it."""
        try:
            with np.errstate(all="ignore"):
                self.execute(stmt, self.statement)
        except IndexError as error:
            self.explain(error)

    def execute(self, stmt: L.Stmt, write: Callable[[L.Stmt], None]) -> None:
        """Run the text that `write` makes of a statement."""
        self.lines = []
        self.line("def program():", stmt)
        with self.indented():
            self.line("pass", stmt)  # a program may have no statement
            write(stmt)
        space = dict(self.known)
        exec(compile("\n".join(self.lines), _FILE, "exec"), space)  # noqa: S102  made above, of numbers and names made here alone
        space["program"]()

    def explain(self, error: IndexError) -> NoReturn:
        """Say which access was out of range: by the watched form of the statement, at the values that its variables had."""
        frames = [(frame, line) for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
        if not frames:
            raise error
        stmt, around = self.sources[frames[-1][1] - 1]
        self.loops, self.names = tuple(around), self.names | around  # a variable has another name in another nest
        live = {*self.names.values(), *chain.from_iterable(self.memory.values())}  # names of loop variables, and of arrays
        for frame, _ in frames:
            self.known |= {name: value for name, value in frame.f_locals.items() if name in live}
        self.watcher = Watcher()
        store = isinstance(stmt, L.Store | L.Accumulate)
        self.execute(stmt, self.statement if store else lambda s: self.line(_tuple(self.heading(s)), s))
        raise error

    def line(self, text: str, stmt: L.Stmt) -> None:
        self.lines.append("    " * self.indent + text)
        self.sources.append((stmt, {v: self.names[v] for v in self.loops}))

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.indent += 1
        yield
        self.indent -= 1

    def name(self, kind: str) -> str:
        self.count[kind] += 1
        return f"{kind}{self.count[kind]}"

    def constant(self, value: Any, kind: str = "c") -> str:
        self.known[name := self.name(kind)] = value
        return name

    def hook(self, method: str, *args: str) -> str:
        """Text of a call of the watcher."""
        return f"{self.constant(self.watcher)}.{method}({', '.join(args)})"

    def values(self) -> str:
        """Text for the values of the loops around a statement, by name."""
        return "{" + ", ".join(f"{v.name!r}: {self.names[v]}" for v in self.loops) + "}"

    def arrays(self, b: L.Buffer) -> tuple[str, str]:
        if b not in self.memory:
            raise IRError(f"the buffer `{b.name}` is used outside of its allocation, or has no array")
        return self.memory[b]

    def statement(self, stmt: L.Stmt) -> None:
        watched = self.watcher is not None and not isinstance(stmt, L.Block | L.Call | L.Prefetch)
        if watched:
            self.line(self.hook("enter", me := self.constant(stmt)), stmt)
        match stmt:
            case L.Block() | L.Call():
                for s in L.children(stmt):
                    self.statement(s)
            case L.For(var, _, body):
                (extent,) = self.heading(stmt)
                self.names[var] = self.name("i")
                order = f"range({extent})"
                if self.shuffle is not None and stmt.kind in (L.PARALLEL, *L.GPU_AXES):
                    order = f"{self.constant(self.shuffle.permutation)}({extent}).tolist()"
                self.line(f"for {self.names[var]} in {order}:", stmt)
                self.loops = (*self.loops, var)
                self.body(body)
                self.loops = self.loops[:-1]
            case L.If(_, then, otherwise):
                (test,) = self.heading(stmt)
                self.line(f"if {test}:", stmt)
                self.inside(then)
                if otherwise is not None:
                    self.line("else:", stmt)
                    self.inside(otherwise)
            case L.While(_, body):
                self.line("while True:", stmt)
                with self.indented():
                    (test,) = self.heading(stmt)
                    self.line(f"if not {test}: break", stmt)
                self.body(body)
            case L.Store() | L.Accumulate():
                *index, value = self.heading(stmt)
                (array, written), place = self.arrays(stmt.buffer), _tuple(index)
                if self.watcher is not None:
                    self.line(f"x = {value}", stmt)
                    self.line(self.hook("store", self.constant(stmt), array, f"({place})", self.values()), stmt)
                    value = "x"
                self.line(f"{array}[{place}] = {value}", stmt)
                if written:
                    self.line(f"{written}[{place}] = True", stmt)
            case L.Allocate(b, body):
                shape, dtype = f"({_tuple(self.heading(stmt))})", self.constant(to_numpy(b.dtype))
                content = self.constant(0 if not self.garbage or b.dtype == "bool" else np.nan if is_float(b.dtype) else 85)
                array, written = self.memory[b] = self.name("b"), "" if self.garbage else self.name("w")
                self.line(f"{array} = {self.constant(np.full)}({shape}, {content}, {dtype})", stmt)
                if written:
                    self.line(f"{written} = {self.constant(np.zeros)}({array}.shape, bool)", stmt)
                self.statement(body)
            case L.Prefetch():
                pass
            case _:
                raise IRError(f"no statement of the loop IR: {type(stmt).__name__}")
        if watched:
            self.line(self.hook("leave", me), stmt)

    def body(self, stmt: L.Stmt) -> None:
        """The body of a loop; where loops nest too deeply for one Python function, in a function of its own."""
        self.blocks += 1
        if self.blocks % _BLOCKS == 0:
            part = self.name("part")
            with self.indented():
                self.line(f"def {part}():", stmt)
                self.inside(stmt)
                self.line(f"{part}()", stmt)
        else:
            self.inside(stmt)
        self.blocks -= 1

    def inside(self, stmt: L.Stmt) -> None:
        with self.indented():
            self.line("pass", stmt)
            self.statement(stmt)

    def heading(self, stmt: L.Stmt) -> list[str]:
        """Texts of what a statement computes itself, without the statements inside of it."""
        if isinstance(stmt, L.Allocate):
            return self.expressions([as_expr(d) for d in stmt.buffer.shape], stmt)
        if not isinstance(stmt, L.Store | L.Accumulate):
            return self.expressions(L.expressions(stmt), stmt)
        b, indices = stmt.buffer, stmt.indices
        value = stmt.value if isinstance(stmt, L.Store) else stmt.reducer(E.read(b, indices), stmt.value)
        if len(indices) != len(b.shape):
            raise IRError(f"`{b.name}` has {len(b.shape)} dimensions and is written with {len(indices)} indices")
        *places, content = self.expressions([*indices, value], stmt)
        return [*[self.place(i, text) for i, text in zip(indices, places, strict=True)], content]

    def expressions(self, roots: Sequence[Expr], stmt: L.Stmt) -> list[str]:
        """Texts of the expressions of one statement. What is used several times is computed once: before the statement where it is needed
        for certain, and when it is first asked for where that depends on a selection."""
        uses = Counter(a for e in E.walk(*roots) for a in e.args)
        uses.update(roots)
        certain = set(E.walk(*roots, operands=lambda e: e.args[:1] if e.op == "select" else e.args))
        texts, depths = dict[Expr, str](), dict[Expr, int]()
        for e in E.walk(*roots):
            texts[e] = text = self.expression(e, [texts[a] for a in e.args])
            depths[e] = 1 + max((depths[a] for a in e.args), default=0)
            if not e.args or (uses[e] == 1 and depths[e] < _DEPTH):
                continue
            depths[e], texts[e] = 0, self.name("t")
            if e in certain:
                self.line(f"{texts[e]} = {text}", stmt)
                continue
            value, texts[e] = texts[e], f"{texts[e]}f()"
            inside = f"nonlocal {value}", f"if {value} is none: {value} = {text}", f"return {value}"
            for line in (f"{value} = none", f"def {texts[e]}:", *("    " + one for one in inside)):
                self.line(line, stmt)
        return [texts[root] for root in roots]

    def expression(self, e: Expr, args: list[str]) -> str:
        """The text of one operator on the texts of its operands."""
        match e.op:
            case "const":
                return self.constant(to_numpy(e.dtype).type(e.attr)) if is_float(e.dtype) else f"({e.attr!r})"
            case "var":
                if e not in self.names:
                    raise IRError(f"the variable `{e.name}` has no value here")
                return self.names[e]
            case "read":
                return self.read(e, args)
            case "select":
                return f"({args[1]} if {args[0]} else {args[2]})"
            case "cast" if (fast := self.conversion(e, args[0])) is not None:
                return fast
            case "checked":
                return f"{self.constant(_checked)}({', '.join(args)})"
            case "reduce":
                raise IRError("a loop program contains a `reduce` expression", hint="lower it to a loop with L.Accumulate")
        kind = e.args[0].dtype
        form = _COMPARE.get(e.op) or (_BITS if kind == "bool" else _FLOAT if is_float(kind) else _INTEGER | _BITS).get(e.op)
        if form is not None:
            text = form.format(a=args[0], b=args[1], x=self.name("x"), y=self.name("x"))
            small = e.op in _COMPARE or e.op in ("min", "max") or (e.dtype == INDEX and not E.reads(e))  # sums and products of loops fit
            return text if small or not is_integer(kind) else self.wrapped(text, e.dtype)
        return f"{self.constant(_general(e))}({', '.join(args)})"

    def wrapped(self, text: str, dtype: str) -> str:
        (lo, hi), x = integer_range(dtype), self.name("x")
        return f"({x} if {lo} <= ({x} := {text}) <= {hi} else wrap({x}, {dtype!r}))"

    def conversion(self, e: Expr, arg: str) -> str | None:
        """A cast without arrays, where plain constructors round as `semantics.cast` does."""
        kind, dtype = e.args[0].dtype, e.dtype
        if dtype == "bool" or (is_float(kind) and not is_float(dtype)) or (dtype == "bfloat16" and kind not in ("float16", "float32")):
            return None
        if not is_float(dtype):
            return self.wrapped(f"int({arg})", dtype)
        scalar, x = self.constant(to_numpy(dtype).type), self.name("x")
        if is_float(kind):
            return f"{scalar}({arg})"
        return f"({scalar}({x}) if {-_EXACT} <= ({x} := {arg}) <= {_EXACT} else {self.constant(_general(e))}({x}))"

    def read(self, e: Expr, args: list[str]) -> str:
        b: L.Buffer = e.attr
        (array, written), place = self.arrays(b), _tuple([self.place(i, text) for i, text in zip(e.args, args, strict=True)])
        if self.watcher is not None:
            return self.hook("read", self.constant(b), array, written or "None", f"({_tuple(args)})", self.values())
        if written:
            x = self.name("x")
            value = f"{array}[{x}]" if _is_scalar(e.dtype) else f"{array}.item({x})"
            return f"({value} if {written}[({x} := ({place}))] else bad())"
        return f"{array}[{place}]" if _is_scalar(e.dtype) else f"{array}.item(({place}))"

    def place(self, index: Expr, text: str) -> str:
        """An index, refused where it is negative: NumPy would count from the end."""
        if self.watcher is not None or index.op == "var" or (index.op == "const" and index.attr >= 0):
            return text
        x = self.name("x")
        return f"({x} if ({x} := {text}) >= 0 else bad())"


_NONE = object()  # no value yet


def _is_scalar(dtype: str) -> bool:
    """Whether values are scalars of NumPy; integers and bools are Python's."""
    return is_float(dtype) or dtype in NARROW


def _bad() -> NoReturn:
    raise IndexError


def _tuple(items: Sequence[str]) -> str:
    return "".join(f"{item}, " for item in items) if items else "()"


def _checked(index: int, extent: int, given: int) -> int:
    if not 0 <= index < extent:
        if 0 <= given < extent:  # what divisors report
            raise InputError("an integer is divided by zero")
        raise InputError(f"index {given} is out of range", why=f"there are {extent} elements")
    return index


def _general(e: Expr) -> Callable[..., Any]:
    """An operator by its definition, which is for arrays."""
    types, op, dtype = [to_numpy(a.dtype) for a in e.args], e.op, e.dtype

    def general(*args: Any) -> Any:
        result = semantics.apply(op, dtype, [np.asarray(x, t) for x, t in zip(args, types, strict=True)])
        return result[()] if _is_scalar(dtype) else result.item()

    return general


# Texts of two operands and two free names.
_COMPARE = {"lt": "({a} < {b})", "le": "({a} <= {b})", "eq": "({a} == {b})", "ne": "({a} != {b})"}
_BITS = {"and": "({a} & {b})", "or": "({a} | {b})", "xor": "({a} ^ {b})"}
_FLOAT = {  # a NaN wins
    "add": "({a} + {b})", "sub": "({a} - {b})", "mul": "({a} * {b})", "div": "({a} / {b})",
    "min": "({x} if ({x} := {a}) <= ({y} := {b}) or {x} != {x} else {y})",
    "max": "({x} if ({x} := {a}) >= ({y} := {b}) or {x} != {x} else {y})",
}  # fmt: skip
_INTEGER = {
    "add": "({a} + {b})", "sub": "({a} - {b})", "mul": "({a} * {b})",
    "min": "({x} if ({x} := {a}) <= ({y} := {b}) else {y})", "max": "({x} if ({x} := {a}) >= ({y} := {b}) else {y})",
    "floordiv": "({a} // {y} if ({y} := {b}) else 0)", "mod": "({a} % {y} if ({y} := {b}) else 0)",
    "shl": "({a} << {y} if 0 <= ({y} := {b}) < 64 else 0)", "shr": "({a} >> ({y} if 0 <= ({y} := {b}) < 64 else 64))",
}  # fmt: skip
