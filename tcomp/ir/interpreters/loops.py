"""The interpreter of loop programs: serial, scalar by scalar, and suspicious.

Every read and store is checked against the shape of its buffer, and a read of an allocated buffer against what has been written.
All loop kinds run serially; parallel (and GPU) loops can run in a shuffled order, which exposes races. Expressions are compiled
to Python closures once. Scalar operators mean what `semantics.py` says.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isnan
from typing import Any, NoReturn

import numpy as np

from tcomp.errors import InputError, IRError
from tcomp.ir import expr as E
from tcomp.ir.dims import bind_dims
from tcomp.ir.dtypes import integer_range, is_float, to_numpy
from tcomp.ir.expr import Expr, as_expr, wrap
from tcomp.ir.interpreters import semantics
from tcomp.ir.loops import GPU_AXES, PARALLEL, Accumulate, Allocate, Block, Buffer, Call, For, If, Kernel, Prefetch, Stmt, Store, While

Run = Callable[[], Any]


def run_kernel(
    kernel: Kernel,
    buffers: Mapping[Buffer, semantics.Array],
    scalars: Mapping[Expr, int] | None = None,
    shuffle: int | None = None,
    garbage: bool = False,
) -> None:
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
    stmt: Stmt,
    buffers: Mapping[Buffer, semantics.Array],
    scalars: Mapping[Expr, int] | None = None,
    *,
    undefined: Collection[Buffer] = (),
    shuffle: int | None = None,
    garbage: bool = False,
) -> None:
    """Run a statement. `buffers` named in `undefined` may be read only where they have been written before."""
    program = _Program(scalars or {}, shuffle, garbage)
    for b, array in buffers.items():
        program.memory[b] = _Memory(array, b in undefined)
    with np.errstate(all="ignore"):
        program.statement(stmt)()


class _Memory:
    """The array behind a buffer, and which of its elements are defined (None: all)."""

    __slots__ = ("array", "written")

    def __init__(self, array: semantics.Array | None = None, undefined: bool = False) -> None:
        if array is not None:
            self.renew(array, undefined)

    def renew(self, array: semantics.Array, undefined: bool) -> None:
        self.array = array
        self.written = np.zeros(array.shape, bool) if undefined else None


class _Program:
    """Compiles statements to closures over `slots` (values of variables) and `memory`."""

    def __init__(self, scalars: Mapping[Expr, int], shuffle: int | None, garbage: bool) -> None:
        self.slots: list[int] = list(scalars.values())
        self.slot = {v: n for n, v in enumerate(scalars)}
        self.loops: list[Expr] = []  # around the statement being compiled, for messages
        self.memory: dict[Buffer, _Memory] = {}
        self.clock = 0  # number of statements executed: tells cached values of this one from older ones
        self.shuffle = None if shuffle is None else np.random.default_rng(shuffle)
        self.garbage = garbage

    # ------------------------------------------------------------ statements

    def statement(self, stmt: Stmt) -> Run:
        match stmt:
            case Block(stmts):
                parts = [self.statement(s) for s in stmts]

                def block() -> None:
                    for part in parts:
                        part()

                return block
            case For():
                return self._for(stmt)
            case If(cond, then, otherwise):
                (test,) = self.expressions([cond])
                yes, no = self.statement(then), self.statement(otherwise) if otherwise is not None else None

                def branch() -> None:
                    self.clock += 1
                    if test():
                        yes()
                    elif no is not None:
                        no()

                return branch
            case While(cond, body):
                (test,) = self.expressions([cond])
                inside = self.statement(body)

                def repeat() -> None:
                    self.clock += 1
                    while test():
                        inside()
                        self.clock += 1

                return repeat
            case Store(b, indices, value):
                return self._store(b, indices, value)
            case Accumulate(b, indices, value, reducer):
                return self._store(b, indices, reducer(E.read(b, indices), value))
            case Allocate(b, body):
                memory = self.memory[b] = _Memory()
                extents = self.expressions([as_expr(d) for d in b.shape])
                inside, dtype, checked = self.statement(body), to_numpy(b.dtype), not self.garbage
                content = 0 if checked or b.dtype == "bool" else np.nan if is_float(b.dtype) else 85

                def allocate() -> None:
                    self.clock += 1
                    memory.renew(np.full([f() for f in extents], content, dtype), checked)
                    inside()

                return allocate
            case Call(body=body):
                return self.statement(body)
            case Prefetch():
                return lambda: None
        raise IRError(f"no statement of the loop IR: {type(stmt).__name__}")

    def _for(self, stmt: For) -> Run:
        (extent,) = self.expressions([as_expr(stmt.extent)])
        number = self.slot[stmt.var] = len(self.slots)
        slots, shuffle = self.slots, self.shuffle if stmt.kind == PARALLEL or stmt.kind in GPU_AXES else None
        slots.append(0)
        self.loops.append(stmt.var)
        body = self.statement(stmt.body)
        self.loops.pop()

        def loop() -> None:
            self.clock += 1
            for i in range(extent()) if shuffle is None else map(int, shuffle.permutation(extent())):
                slots[number] = i
                body()

        return loop

    def _store(self, b: Buffer, indices: Sequence[Expr], value: Expr) -> Run:
        if len(indices) != len(b.shape):
            raise IRError(f"`{b.name}` has {len(b.shape)} dimensions and is written with {len(indices)} indices")
        *places, content = self.expressions([*indices, value])
        memory, loops = self._memory(b), tuple(self.loops)

        def store() -> None:
            self.clock += 1
            index = tuple([f() for f in places])
            result = content()
            try:
                if index and min(index) < 0:
                    raise IndexError
                memory.array[index] = result
            except IndexError:
                self._fail(b, "stores to", index, loops, f"its shape is {memory.array.shape}")
            if memory.written is not None:
                memory.written[index] = True

        return store

    def _memory(self, b: Buffer) -> _Memory:
        if b not in self.memory:
            raise IRError(f"the buffer `{b.name}` is used outside of its allocation, or has no array")
        return self.memory[b]

    def _fail(self, b: Buffer, verb: str, index: tuple[int, ...], loops: tuple[Expr, ...], why: str) -> NoReturn:
        values = ", ".join(f"{v.name} = {self.slots[self.slot[v]]}" for v in loops)
        place = ", ".join(map(str, index))
        raise IRError(f"the program {verb} {b.name}[{place}]", where=values and f"loops {values}", why=why)

    # ------------------------------------------------------------ expressions

    def expressions(self, roots: Sequence[Expr]) -> list[Run]:
        """Closures of the expressions of one statement; a sub-expression used several times is computed once, when needed."""
        uses = Counter(a for e in E.walk(*roots) for a in e.args)
        uses.update(roots)
        compiled: dict[Expr, Run] = {}
        for e in E.walk(*roots):
            run = self._expression(e, [compiled[a] for a in e.args])
            compiled[e] = self._cached(run) if uses[e] > 1 and e.args else run
        return [compiled[root] for root in roots]

    def _cached(self, run: Run) -> Run:
        at, value = -1, None

        def cached() -> Any:
            nonlocal at, value
            if at != self.clock:
                value = run()
                at = self.clock
            return value

        return cached

    def _expression(self, e: Expr, args: list[Run]) -> Run:
        match e.op:
            case "const":
                value = e.attr if not is_float(e.dtype) else to_numpy(e.dtype).type(e.attr)
                return lambda: value
            case "var":
                if e not in self.slot:
                    raise IRError(f"the variable `{e.name}` has no value here")
                slots, number = self.slots, self.slot[e]
                return lambda: slots[number]
            case "read":
                return self._read(e, args)
            case "select":
                cond, a, b = args
                return lambda: a() if cond() else b()
            case "reduce":
                raise IRError("a loop program contains a `reduce` expression", hint="lower it to a loop with Accumulate")
        fast = self._arithmetic(e, args)
        if fast is not None:
            return fast
        types, op, dtype = [to_numpy(a.dtype) for a in e.args], e.op, e.dtype
        if op == "cast" and (fast := _conversion(e.args[0].dtype, dtype, args[0])) is not None:
            return fast

        def general() -> Any:
            given = [np.asarray(f(), t) for f, t in zip(args, types, strict=True)]
            result = semantics.apply(op, dtype, given)
            return result[()] if is_float(dtype) else result.item()

        return general

    def _arithmetic(self, e: Expr, args: list[Run]) -> Run | None:
        """Plain Python operators: floats are NumPy scalars of the exact type, integers Python ints wrapped around."""
        kind = e.args[0].dtype
        function: Callable[[Any, Any], Any] | None = None
        if kind == "bool" and e.op in ("and", "or", "xor", "eq", "ne", "lt", "le"):
            function = _COMPARE.get(e.op) or _INTEGER[e.op]
        elif e.op in _COMPARE:
            function = _COMPARE[e.op]
        elif is_float(kind):
            function = _FLOAT.get(e.op)
        elif kind != "bool" and e.op in _INTEGER:
            combine, (lo, hi), dtype = _INTEGER[e.op], integer_range(e.dtype), e.dtype
            a, b = args

            def wrapped() -> int:
                result = combine(a(), b())
                return result if lo <= result <= hi else wrap(result, dtype)

            return wrapped
        if function is None:
            return None
        a, b = args
        if e.dtype == "bool":
            return lambda: bool(function(a(), b()))
        return lambda: function(a(), b())

    def _read(self, e: Expr, args: list[Run]) -> Run:
        b = e.attr
        memory, loops = self._memory(b), tuple(self.loops)
        scalar = not is_float(e.dtype)

        def read() -> Any:
            index = tuple([f() for f in args])
            try:
                if index and min(index) < 0:
                    raise IndexError
                if memory.written is not None and not memory.written[index]:
                    self._fail(b, "reads", index, loops, "this element has not been written yet")
                return memory.array.item(index) if scalar else memory.array[index]
            except IndexError:
                self._fail(b, "reads", index, loops, f"its shape is {memory.array.shape}")

        return read


def _conversion(kind: str, dtype: str, arg: Run) -> Run | None:
    """A cast without arrays, where plain constructors round as `semantics.cast` does."""
    if dtype == "bool" or (is_float(kind) and not is_float(dtype)) or (dtype == "bfloat16" and kind not in ("float16", "float32")):
        return None
    scalar, exact = to_numpy(dtype).type, 1 << 53  # larger integers would be rounded twice, by way of a Python float

    def rounded() -> Any:
        n = arg()
        return scalar(n) if -exact <= n <= exact else semantics.cast(np.asarray(n, to_numpy(kind)), dtype)[()]

    if is_float(kind):
        return lambda: scalar(arg())
    return rounded if is_float(dtype) else lambda: wrap(int(arg()), dtype)


def _shift_left(a: int, b: int) -> int:
    return a << b if 0 <= b < 64 else 0


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {"lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne}
_FLOAT: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "min": lambda a, b: a if a <= b or isnan(a) else b, "max": lambda a, b: a if a >= b or isnan(a) else b,
}  # fmt: skip
_INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max,
    "floordiv": lambda a, b: a // b if b else 0, "mod": lambda a, b: a % b if b else 0,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "shl": _shift_left, "shr": lambda a, b: a >> (b if 0 <= b < 64 else 64),
}  # fmt: skip
