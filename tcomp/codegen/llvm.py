"""Loop programs to LLVM IR text: one `Kernel`, one function.

    void @NAME(ptr pool, ptr buffer0, ..., i64 scalar0, ...)         kernel.buffers, then kernel.scalars

The text follows the loop program statement by statement; nothing is left to LLVM's vectorizers or unroller:

- An *unrolled* loop is emitted once per iteration with its variable a known constant (`constants`).
- In a *vectorized* loop a value is either one scalar, the same for all lanes, or a vector of `lanes` elements (`Value.lanes`).
  An address is the linear form of its index: the coefficient of the lane variable is the stride between lanes. A condition that
  differs between lanes becomes a mask.
- A *parallel* loop becomes a function of its own, `body(closure, begin, end)`, called through the pool, whose first field is
  `void parallel_for(ptr pool, ptr body, ptr closure, i64 extent)`. A null pool runs it in place. Parallel loops inside are serial.
- A buffer of scope *register* is a stack slot in the entry block. Every access to a tile whose indices are known is at a
  constant offset with one vector type, which lets LLVM promote it to SSA values, so that accumulators stay in registers over
  the whole reduction.

- An *instruction* (`Call`) is emitted as its data says: an intrinsic on vector registers, once for each iteration of the loops that do
  not run inside of a register, in the order of its meaning. Each register is loaded when it is first needed, each result stored at
  the end.

Values are memoised (expressions are hash-consed), in scopes: what is computed inside a branch or loop is unknown outside of it,
and what was read from a buffer is forgotten when the buffer is written. Sums of products accumulate with fused multiply-add where
the target has it, but for a loop of nothing else: there each step waits for the one before, and an addition alone takes no longer
than a multiply-add, or less (3 cycles for 4 on Golden Cove and Zen). Objects import nothing.

Parameters point to disjoint memory, aligned as their elements are. Variables stay within their stated ranges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tcomp.codegen.builder import Builder, Module, Value, iota, literal, symbol
from tcomp.codegen.math import ELEMENTARY, lower
from tcomp.errors import CodegenError
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.dtypes import is_integer, itemsize
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, const, substitute
from tcomp.ir.instruction import VectorOp, match
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.ir.simplify import Linear, difference, from_linear, linear, prove, simplify
from tcomp.target import Target

MAX_LANES = 64
MAX_OPERATIONS = 1 << 12  # of one instruction
_ALIGN = 64  # of stack slots


def emit_kernel(kernel: Kernel, target: Target) -> str:
    """LLVM IR text of a kernel. Raises `CodegenError` naming the loop or buffer for what a CPU kernel cannot be."""
    module = KernelModule(kernel.name, target, kernel.notes)
    module.define(kernel)
    return module.text()


def _parameter(ref: str, written: bool) -> str:
    return f"ptr noalias nonnull {ref}" if written else f"ptr noalias nonnull readonly {ref}"


class Address(NamedTuple):
    """Where the elements of one access lie: at `pointer`, `pointer + stride`, ... per lane, or
    at `pointer[indices]` for a vector of indices."""

    pointer: str
    stride: int
    indices: str | None
    align: int


class Form(NamedTuple):
    """The linear form of an index, outermost loops first. `inner`: the variables that occur in anything but `c * variable`."""

    terms: tuple[tuple[tuple[Expr, ...], int], ...]
    offset: int
    inner: frozenset[Expr]


class KernelModule(Module):
    """A module made of loop programs, with what is known about their expressions."""

    def __init__(self, name: str, target: Target, notes: Sequence[str] = ()) -> None:
        super().__init__(name, target, notes)
        self.regions = 0
        self.forms: dict[Any, Form] = {}
        self.per_lane: dict[Buffer, tuple[Expr, int]] = {}  # buffers allocated inside a vectorized loop: lane variable, lanes
        self._variables: dict[Expr, tuple[Expr, ...]] = {}
        self._buffers: dict[Expr, frozenset[Buffer]] = {}
        self._written: dict[Stmt, frozenset[Buffer]] = {}
        self._lowered: dict[Expr, Expr | None] = {}
        self._in_bounds: dict[Expr, bool] = {}

    def define(self, kernel: Kernel, linkage: str = "") -> None:
        """Adds the function of a kernel."""
        function = Function(self)
        parameters = ["ptr %pool"]
        for n, buffer in enumerate(kernel.buffers):
            function.pointers[buffer] = f"%b{n}"
            parameters.append(_parameter(f"%b{n}", buffer in kernel.outputs))
        for n, scalar in enumerate(kernel.scalars):
            function.bind(scalar, Value(f"%s{n}", INDEX))
            parameters.append(f"i64 %s{n}")
        function.statement(kernel.body)
        function.line("ret void")
        self.functions.append(function.text(f"define {linkage} void {symbol(kernel.name)}({', '.join(parameters)}) #0"))

    def lowered(self, e: Expr) -> Expr | None:
        """`e` in terms of operations that the target has; None where it has `e` itself."""
        if e not in self._lowered:
            self._lowered[e] = lower(e, self.target)
        return self._lowered[e]

    def variables(self, e: Expr) -> tuple[Expr, ...]:
        """The variables that a value depends on."""
        for node in _unknown(e, self._variables):
            own = [node] if node.op == "var" else []
            if node.op == "read" and node.attr in self.per_lane:
                own = [self.per_lane[node.attr][0]]
            if len(node.args) == 1 and not own:
                self._variables[node] = self._variables[node.args[0]]
            else:
                self._variables[node] = tuple(dict.fromkeys([v for a in node.args for v in self._variables[a]] + own))
        return self._variables[e]

    def buffers(self, e: Expr) -> frozenset[Buffer]:
        """The buffers that a value is read from."""
        for node in _unknown(e, self._buffers):
            own = frozenset((node.attr,)) if node.op == "read" else frozenset()
            self._buffers[node] = own.union(*(self._buffers[a] for a in node.args))
        return self._buffers[e]

    def written(self, stmt: Stmt) -> frozenset[Buffer]:
        """The buffers that a statement may write."""
        if stmt not in self._written:
            own = [stmt.buffer] if isinstance(stmt, L.Store | L.Accumulate) else []
            self._written[stmt] = frozenset(own).union(*(self.written(child) for child in L.children(stmt)))
        return self._written[stmt]

    def in_bounds(self, read: Expr) -> bool:
        """Whether a read lies inside its buffer for all values of its variables."""
        if read not in self._in_bounds:
            self._in_bounds[read] = all(
                prove(E.binary("le", 0, i)) and prove(E.binary("lt", i, as_expr(n)))
                for i, n in zip(read.args, read.attr.shape, strict=True)
            )
        return self._in_bounds[read]

    def unsafe(self, e: Expr) -> bool:
        """Whether evaluating `e` where it is not wanted might fault."""
        return bool(self.buffers(e)) and any(n.op == "read" and not self.in_bounds(n) for n in E.walk(e))


class Function(Builder):
    """The LLVM function of a loop program."""

    module: KernelModule

    def __init__(self, module: KernelModule) -> None:
        super().__init__(module)
        self.readers: dict[Buffer, list[Any]] = {}  # keys of memoised values that depend on the content of a buffer
        self.constants: dict[Expr, int] = {}
        self.bound: dict[Expr, Value] = {}
        self.depth: dict[Expr, int] = {}
        self.pointers: dict[Buffer, str] = {}
        self.private: set[Buffer] = set()  # stack slots, padded by a whole vector
        self.lane: Expr | None = None
        self.lanes = 1
        self.mask: Value | None = None  # active lanes; None: all
        self.chain: Stmt | None = None  # an accumulation into one element that is all that its loop does
        self.inside_parallel = False
        self.nesting = 0

    # ------------------------------------------------------------ scopes

    def bind(self, v: Expr, value: Value) -> None:
        self.bound[v] = value
        self.depth[v] = len(self.depth)

    @contextmanager
    def masked(self, mask: Value | None) -> Iterator[None]:
        before, self.mask = self.mask, mask
        with self.scope():
            yield
        self.mask = before

    def key(self, e: Expr) -> Any:
        """What identifies the value of `e` here: the expression, and the constants that unrolled variables stand for."""
        if not self.constants:
            return e
        known = tuple([self.constants[v] for v in self.module.variables(e) if v in self.constants])
        return (e, known) if known else e

    def forget(self, buffers: Iterable[Buffer]) -> None:
        """Values read from these buffers are out of date."""
        for buffer in buffers:
            for key in self.readers.pop(buffer, ()):
                for scope in self.scopes:
                    scope.pop(key, None)

    # ------------------------------------------------------------ statements

    def statement(self, s: Stmt) -> None:
        match s:
            case L.Block(stmts):
                for inner in stmts:
                    self.statement(inner)
            case L.For():
                self.loop(s)
            case L.If(cond, then, otherwise):
                self.branch(cond, then, otherwise)
            case L.While(cond, body):
                self.repeat(cond, body)
            case L.Store(buffer, indices, value):
                self.store(s, buffer, indices, value)
            case L.Accumulate(buffer, indices, value, reducer):
                self.accumulate(s, buffer, indices, value, reducer)
            case L.Allocate(buffer, body):
                self.allocate(buffer)
                self.statement(body)
            case L.Prefetch(buffer, indices):
                self.module.declarations.setdefault("llvm.prefetch.p0", "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
                self.line(f"call void @llvm.prefetch.p0(ptr {self.address(buffer, indices).pointer}, i32 0, i32 3, i32 1)")
            case L.Call():
                self.instruction(s)
            case _:
                raise CodegenError(f"a {type(s).__name__} cannot be compiled for a CPU", where=self.module.name)

    def loop(self, s: L.For) -> None:
        extent = self.extent(s.extent)
        known = int(extent.attr) if extent.op == "const" else None
        if known is not None and known <= 0:
            return
        if known == 1 and s.kind in L.KINDS[:4]:
            self.constants[s.var] = 0
            self.statement(s.body)
            del self.constants[s.var]
        elif s.kind == L.PARALLEL and not self.inside_parallel and self.lane is None:
            self.parallel(s, extent)
        elif s.kind in (L.SERIAL, L.PARALLEL):
            self.serial(s, extent, known)
        elif s.kind not in (L.UNROLLED, L.VECTORIZED):
            raise CodegenError(
                f"loop `{s.var.name}` is bound to `{s.kind}`", where=self.module.name, why="a CPU has no such axis"
            )
        elif known is None:
            raise CodegenError(
                f"{s.kind} loop `{s.var.name}` has the extent {extent}, which is not constant",
                where=self.module.name,
                hint="split it by a constant first",
            )
        elif s.kind == L.UNROLLED:
            for n in range(known):
                self.constants[s.var] = n
                self.statement(s.body)
            del self.constants[s.var]
        else:
            self.vectorized(s, known)

    def extent(self, extent: Dim) -> Expr:
        return self.fold(as_expr(extent))

    def serial(self, s: L.For, extent: Expr, known: int | None) -> None:
        self.forget(self.module.written(s.body))
        count = self.scalar(extent, f"the extent of loop `{s.var.name}`")
        head, end = self.label("loop"), self.label("end")
        if known is None and (E.bounds(extent)[0] or 0) < 1:
            some = self.op(f"icmp sgt i64 {count}, 0")
            self.line(f"br i1 {some}, label %{head}, label %{end}")
        else:
            self.line(f"br label %{head}")
        if isinstance(s.body, L.Accumulate) and not any(s.var in self.module.variables(i) for i in s.body.indices):
            self.chain = s.body
        self.counted(s.var, "0", count, head, end, lambda: self.statement(s.body))

    def counted(self, v: Expr, begin: str, count: str, head: str, end: str, body: Callable[[], str | None]) -> None:
        """`do { body } while (++v < count && condition)`, entered by a jump to `head` from the current block.

        `body` emits the body and may return a condition.
        """
        before = self.block
        self.start(head)
        self.count += 1
        i, after = f"%i{self.count}", f"%n{self.count}"
        place = len(self.lines)
        self.lines.append("")  # the phi, when the last block of the body is known
        with self.scope():
            self.bind(v, Value(i, INDEX))
            condition = body()
            del self.bound[v], self.depth[v]
        self.line(f"{after} = add nuw nsw i64 {i}, 1")
        self.lines[place] = f"  {i} = phi i64 [ {begin}, %{before} ], [ {after}, %{self.block} ]"
        more = self.op(f"icmp slt i64 {after}, {count}")
        if condition is not None:
            more = self.op(f"and i1 {more}, {condition}")
        self.line(f"br i1 {more}, label %{head}, label %{end}")
        self.start(end)

    def vectorized(self, s: L.For, lanes: int) -> None:
        if self.lane is not None:
            raise CodegenError(
                f"vectorized loop `{s.var.name}` inside vectorized loop `{self.lane.name}`", where=self.module.name
            )
        if lanes > MAX_LANES or lanes & (lanes - 1):
            raise CodegenError(
                f"vectorized loop `{s.var.name}` has {lanes} iterations",
                where=self.module.name,
                hint=f"a power of two up to {MAX_LANES}; split it, and mask the rest with an `If`",
            )
        self.lane, self.lanes = s.var, lanes
        self.bind(s.var, Value(iota(lanes, "i64"), INDEX, lanes))
        self.statement(s.body)
        del self.bound[s.var], self.depth[s.var]
        self.lane, self.lanes = None, 1

    def branch(self, cond: Expr, then: Stmt, otherwise: Stmt | None) -> None:
        cond = self.fold(cond)
        if cond.op == "const":
            chosen = then if cond.attr else otherwise
            if chosen is not None:
                self.statement(chosen)
            return
        if otherwise is None and isinstance(then, L.Store) and itemsize(then.buffer.dtype) < 4 and (only := self.only_lane(cond)) is not None:
            self.lane_by_lane(then, (only,))  # LLVM 22 narrows the store of a single lane wrongly: four bytes are written
            return
        test = self.value(cond)
        if test.lanes > 1:
            outer = self.mask
            with self.masked(self.both(outer, test)):
                self.statement(then)
            if otherwise is not None:
                with self.masked(self.both(outer, self.negated(test))):
                    self.statement(otherwise)
            return
        yes, end = self.label("then"), self.label("end")
        no = end if otherwise is None else self.label("else")
        self.line(f"br i1 {test.ref}, label %{yes}, label %{no}")
        for label, body in ((yes, then), (no, otherwise)):
            if body is not None:
                self.start(label)
                with self.scope():
                    self.statement(body)
                self.line(f"br label %{end}")
        self.start(end)

    def only_lane(self, cond: Expr) -> int | None:
        """The lane for which alone a condition holds, if that is known."""
        if self.lane is None or self.mask is not None or set(self.module.variables(cond)) != {self.lane}:
            return None
        active = [n for n in range(self.lanes) if self.fold(E.substitute(cond, {self.lane: as_expr(n)})) is not E.const(False, "bool")]
        return active[0] if len(active) == 1 else None

    def repeat(self, cond: Expr, body: Stmt) -> None:
        self.forget(self.module.written(body))
        head, inside, end = self.label("while"), self.label("do"), self.label("end")
        self.line(f"br label %{head}")
        self.start(head)
        with self.scope():
            test = self.scalar(self.fold(cond), "the condition of a while loop")
            self.line(f"br i1 {test}, label %{inside}, label %{end}")
            self.start(inside)
            self.statement(body)
            self.line(f"br label %{head}")
        self.start(end)

    def allocate(self, buffer: Buffer) -> None:
        where = f"{self.module.name}: {buffer!r}"
        size = 1
        for d in buffer.shape:
            extent = self.extent(d)
            if extent.op != "const":
                raise CodegenError(
                    f"temporary `{buffer.name}` has no constant shape", where=where, hint="pass it as a workspace buffer"
                )
            size *= int(extent.attr)
        if buffer.scope == "shared":
            raise CodegenError(f"temporary `{buffer.name}` is in shared memory", where=where, why="a CPU has none")
        if self.lane is not None:  # every lane has its own
            self.module.per_lane[buffer] = self.lane, self.lanes
            size *= self.lanes
        if size * itemsize(buffer.dtype) > L.STACK_LIMIT:
            raise CodegenError(
                f"temporary `{buffer.name}` takes {size * itemsize(buffer.dtype)} bytes of the stack",
                where=where,
                hint=f"at most {L.STACK_LIMIT}; pass larger ones as workspace buffers",
            )
        if buffer not in self.pointers:  # a second copy of an unrolled body shares the slot
            self.count += 1
            self.pointers[buffer] = f"%a{self.count}"
            # Padding: a masked access may read, and write back, what lies beyond the last element.
            self.slots.append(
                f"  %a{self.count} = alloca [{size + MAX_LANES} x {self.module.memory_type(buffer.dtype)}], align {_ALIGN}"
            )
            self.private.add(buffer)

    # ------------------------------------------------------------ instructions

    def instruction(self, s: L.Call) -> None:
        instruction, op = s.instruction, s.instruction.emission
        where = f"{self.module.name}: {instruction.name}"
        if not isinstance(op, VectorOp) or not any(map(self.target.has, instruction.features)):
            raise CodegenError(
                f"the target has no instruction `{instruction.name}`",
                where=f"{self.module.name} for `{self.target}`",
                why=f"it needs {' or '.join(instruction.features)}",
            )
        if self.lane is not None:
            raise CodegenError(f"an instruction inside of the vectorized loop `{self.lane.name}`", where=where)
        roles = match(instruction, s.body)
        loops, places, result = instruction.loops, instruction.places(), instruction.result
        inside = {instruction.leaf.indices[-1]: op.lanes} | ({loops[-1].var: op.group} if op.group > 1 else {})
        steps = [range(0, int(x.extent), inside.get(x.var, 1)) for x in loops]
        if (operations := math.prod(map(len, steps))) > MAX_OPERATIONS:
            raise CodegenError(f"`{instruction.name}` would be {operations} operations", where=where, hint=f"at most {MAX_OPERATIONS}; take a smaller tile")
        operands = {b.name: b for b in instruction.meaning.buffers}
        registers: dict[Any, str] = {}
        addresses: dict[Any, tuple[str, int]] = {}  # of the results: pointer, alignment
        total = self.module.type(result.dtype, op.lanes)
        for point in itertools.product(*steps):
            at = dict(zip((x.var for x in loops), point, strict=True))
            self.constants |= {v: at[role] for role, v in roles.loops.items()}
            arguments = []
            for name in op.arguments:
                b = operands[name]
                key = (b, *(at[i] for i in places[b]))
                if key not in registers:
                    address = self.address(*roles.accesses[b])
                    width = op.group if b is not result else 1
                    count = width * op.lanes if instruction.leaf.indices[-1] in places[b] else width
                    registers[key] = self.register(b.dtype, width * op.lanes, count, address)
                    if b is result:
                        addresses[key] = address.pointer, address.align
                arguments.append(f"{self.module.type(b.dtype, op.lanes * (1 if b is result else op.group))} {registers[key]}")
            types = ", ".join(a.rsplit(" ", 1)[0] for a in arguments)
            self.module.declarations.setdefault(op.intrinsic, f"declare {total} @{op.intrinsic}({types})")
            written = (result, *(at[i] for i in places[result]))
            registers[written] = self.op(f"call {total} @{op.intrinsic}({', '.join(arguments)})")
        for v in roles.loops.values():
            del self.constants[v]
        for key, (pointer, align) in addresses.items():
            self.line(f"store {total} {registers[key]}, ptr {pointer}, align {align}")
        self.forget((roles.accesses[result][0],))

    def register(self, dtype: str, lanes: int, count: int, address: Address) -> str:
        """A register of `lanes` elements, of which `count` lie in memory: repeated from there on."""
        type_ = self.module.memory_type(dtype, lanes)
        if count == lanes:
            return self.op(f"load {type_}, ptr {address.pointer}, align {address.align}")
        bits, copies = f"uint{8 * itemsize(dtype) * count}", lanes // count
        part = Value(self.op(f"load {self.module.type(bits)}, ptr {address.pointer}, align {address.align}"), bits)
        return self.op(f"bitcast {self.module.type(bits, copies)} {self.spread(part, copies)} to {type_}")

    # ------------------------------------------------------------ parallel loops

    def parallel(self, s: L.For, extent: Expr) -> None:
        module = self.module
        name = f"{module.name}.{module.regions}"
        module.regions += 1
        buffers, variables = _free(s)
        unknown = [b.name for b in buffers if b not in self.pointers]
        unknown += [v.name for v in variables if v not in self.bound and v not in self.constants]
        if unknown:
            raise CodegenError(f"`{unknown[0]}` is used but is no parameter", where=module.name)
        values = [v for v in variables if v not in self.constants]

        inner = Function(module)
        inner.inside_parallel = True
        inner.constants = dict(self.constants)
        inner.private = self.private & set(buffers)
        captured: list[tuple[str, str, str]] = []  # type, outer reference, parameter
        written = module.written(s.body)
        for n, buffer in enumerate(buffers):
            captured.append(("ptr", self.pointers[buffer], _parameter(f"%b{n}", buffer in written)))
            inner.pointers[buffer] = f"%b{n}"
        for n, v in enumerate(values):
            captured.append(("i64", self.bound[v].ref, f"i64 %s{n}"))
            inner.bind(v, Value(f"%s{n}", INDEX))
        some = inner.op("icmp slt i64 %begin, %end")
        inner.line(f"br i1 {some}, label %chunk, label %done")
        inner.counted(s.var, "%begin", "%end", "chunk", "done", lambda: inner.statement(s.body))
        inner.line("ret void")
        # A function with parameters of its own: `noalias` would be lost if the body read its pointers from the closure.
        parameters = ", ".join([p for _, _, p in captured] + ["i64 %begin", "i64 %end"])
        module.functions.append(inner.text(f"define internal void {symbol(name)}({parameters}) noinline #0"))
        loads, arguments = [], []
        for n, (type_, _, _) in enumerate(captured):
            loads.append(f"  %p{n} = getelementptr i64, ptr %closure, i64 {n}\n  %c{n} = load {type_}, ptr %p{n}")
            arguments.append(f"{type_} %c{n}")
        arguments += ["i64 %begin", "i64 %end"]
        module.functions.append(
            f"define internal void {symbol(name + '.body')}(ptr %closure, i64 %begin, i64 %end) #0 {{\n"
            + "\n".join([*loads, f"  call void {symbol(name)}({', '.join(arguments)})", "  ret void", "}"])
        )

        self.count += 1
        closure = f"%c{self.count}"
        self.slots.append(f"  {closure} = alloca [{max(1, len(captured))} x i64], align 16")
        for n, (type_, ref, _) in enumerate(captured):
            place = self.op(f"getelementptr i64, ptr {closure}, i64 {n}")
            self.line(f"store {type_} {ref}, ptr {place}")
        count = self.scalar(extent, f"the extent of loop `{s.var.name}`")
        direct, pooled, end = self.label("direct"), self.label("pooled"), self.label("end")
        alone = self.op("icmp eq ptr %pool, null")
        short = self.op(f"icmp sle i64 {count}, 1")
        self.line(f"br i1 {self.op(f'or i1 {alone}, {short}')}, label %{direct}, label %{pooled}")
        self.start(direct)
        self.line(f"call void {symbol(name + '.body')}(ptr {closure}, i64 0, i64 {count})")
        self.line(f"br label %{end}")
        self.start(pooled)
        entry = self.op("load ptr, ptr %pool")
        self.line(f"call void {entry}(ptr %pool, ptr {symbol(name + '.body')}, ptr {closure}, i64 {count})")
        self.line(f"br label %{end}")
        self.start(end)
        self.forget(written)

    # ------------------------------------------------------------ stores

    def store(self, s: Stmt, buffer: Buffer, indices: tuple[Expr, ...], value: Expr) -> None:
        address = self.address(buffer, indices)
        if self.lane is not None and address.stride == 0 and address.indices is None:
            stored = self.value(value)
            if stored.lanes > 1 or self.mask is not None:
                return self.lane_by_lane(s)
            self.write(buffer, address, stored)
        else:
            self.write(buffer, address, self.value(value))
        self.forget((buffer,))

    def accumulate(self, s: Stmt, buffer: Buffer, indices: tuple[Expr, ...], value: Expr, reducer: E.Reducer) -> None:
        address = self.address(buffer, indices)
        if self.lane is not None and address.stride == 0 and address.indices is None:
            return self.across(s, buffer, address, value, reducer)
        if self.lane is not None and not self.distinct(buffer, indices, address):
            return self.lane_by_lane(s)  # lanes may meet in one element: in order
        sums = reducer.combine.op == "add" and set(reducer.combine.args) == {reducer.lhs, reducer.rhs}
        native = value.dtype in ("float32", "float64") or (value.dtype == "float16" and self.module.native_half)
        if sums and native and self.target.fma and value.op == "mul" and s is not self.chain:
            a, b = (self.value(factor) for factor in value.args)
            new = self.fma(a, b, self.load(buffer, address))
        else:
            term = self.value(value)
            old = self.load(buffer, address)
            new = self.combined(reducer, old, term)
        self.write(buffer, address, new)
        self.forget((buffer,))

    def across(self, s: Stmt, buffer: Buffer, address: Address, value: Expr, reducer: E.Reducer) -> None:
        """All lanes meet in one element: folded in halves, as a binary tree (schedules ask for it by `reassociate`)."""
        if value.dtype == "bool":
            return self.lane_by_lane(s)
        lane, lanes, mask = self.lane, self.lanes, self.mask
        folded = Value(self.spread(self.value(value), lanes), value.dtype, lanes)
        if mask is not None:
            folded = self.choose(mask, folded, self.value(reducer.identity))
        self.lane, self.mask = None, None
        while folded.lanes > 1:
            width = folded.lanes // 2
            halves = [self.half(folded, start, width) for start in (0, width)]
            folded = self.combined(reducer, *halves)
        self.write(buffer, address, self.combined(reducer, self.load(buffer, address), folded))
        self.lane, self.mask = lane, mask
        self.forget((buffer,))

    def half(self, value: Value, start: int, width: int) -> Value:
        """Lanes [start, start + width) of a vector."""
        type_ = self.module.type(value.dtype, value.lanes)
        if width == 1:
            return Value(self.op(f"extractelement {type_} {value.ref}, i64 {start}"), value.dtype)
        return Value(self.shuffle(type_, value.ref, "poison", range(start, start + width)), value.dtype, width)

    def combined(self, reducer: E.Reducer, old: Value, term: Value) -> Value:
        with self.scope():
            self.bound[reducer.lhs], self.bound[reducer.rhs] = old, term
            new = self.value(reducer.combine)
            del self.bound[reducer.lhs], self.bound[reducer.rhs]
        return new

    def distinct(self, buffer: Buffer, indices: tuple[Expr, ...], address: Address) -> bool:
        """Whether the lanes certainly access different elements."""
        if address.indices is None:
            return address.stride != 0
        varying = [t for t, _ in self.form(buffer, indices).terms if self.varies(t)]
        factors = [a for a in varying[0] if a is not self.lane] if len(varying) == 1 and self.lane in varying[0] else None
        return factors is not None and all((E.bounds(a)[0] or 0) > 0 and not self.varies((a,)) for a in factors)

    def lane_by_lane(self, s: Stmt, some: Sequence[int] | None = None) -> None:
        """A statement of a vectorized loop for one lane after the other: `some` of them, or all."""
        lane, lanes, mask = self.lane, self.lanes, self.mask
        assert lane is not None
        vector = self.bound.pop(lane)
        self.lane, self.lanes, self.mask = None, 1, None
        for n in range(lanes) if some is None else some:
            self.constants[lane] = n
            end = None
            if mask is not None:
                active = (
                    mask.ref
                    if mask.lanes == 1
                    else self.op(f"extractelement {self.module.type('bool', lanes)} {mask.ref}, i64 {n}")
                )
                yes, end = self.label("lane"), self.label("end")
                self.line(f"br i1 {active}, label %{yes}, label %{end}")
                self.start(yes)
            with self.scope():
                self.statement(s)
            if end is not None:
                self.line(f"br label %{end}")
                self.start(end)
        del self.constants[lane]
        self.bound[lane] = vector
        self.lane, self.lanes, self.mask = lane, lanes, mask

    def write(self, buffer: Buffer, address: Address, value: Value) -> None:
        scalar = self.lane is None or (address.stride == 0 and address.indices is None)
        lanes = 1 if scalar else self.lanes
        type_ = self.module.memory_type(buffer.dtype, lanes)
        ref = self.spread(value, lanes)
        if buffer.dtype == "bool":
            ref = self.op(f"zext {self.module.type('bool', lanes)} {ref} to {type_}")
        bits = self.module.type("bool", lanes)
        mask = "splat (i1 true)" if self.mask is None else self.mask.ref
        if scalar or (address.stride == 1 and address.indices is None and self.mask is None):
            self.line(f"store {type_} {ref}, ptr {address.pointer}, align {address.align}")
        elif address.stride == 1 and address.indices is None and buffer in self.private:
            old = self.op(f"load {type_}, ptr {address.pointer}, align {address.align}")
            new = self.op(f"select {bits} {mask}, {type_} {ref}, {type_} {old}")
            self.line(f"store {type_} {new}, ptr {address.pointer}, align {address.align}")
        elif address.stride == 1 and address.indices is None:
            args = ((type_, ref), ("ptr", address.pointer), ("i32", str(address.align)), (bits, mask))
            self.call("masked.store", "void", *args, suffix=(type_, "ptr"))
        else:
            pointers, vector = f"<{lanes} x ptr>", self.pointer_vector(buffer, address)
            args = ((type_, ref), (pointers, vector), ("i32", str(itemsize(buffer.dtype))), (bits, mask))
            self.call("masked.scatter", "void", *args, suffix=(type_, pointers))

    # ------------------------------------------------------------ loads

    def read(self, e: Expr) -> Value:
        buffer = e.attr
        address = self.address(buffer, e.args)
        together = self.lane is None or (address.stride == 0 and address.indices is None)
        if self.mask is not None and (buffer in self.private or self.module.in_bounds(e)):
            mask, self.mask = self.mask, None
            value = self.load(buffer, address)
            self.mask = mask
            return value
        if together and self.mask is not None:  # one element for all lanes, wanted only if any lane is active
            test = self.mask.ref
            if self.mask.lanes > 1:
                test = self.call(
                    "vector.reduce.or",
                    "i1",
                    (self.module.type("bool", self.mask.lanes), test),
                    suffix=(f"<{self.mask.lanes} x i1>",),
                )
            yes, end, before = self.label("any"), self.label("end"), self.block
            self.line(f"br i1 {test}, label %{yes}, label %{end}")
            self.start(yes)
            value = self.load(buffer, address)
            self.line(f"br label %{end}")
            self.start(end)
            type_ = self.module.type(buffer.dtype)
            ref = self.op(f"phi {type_} [ zeroinitializer, %{before} ], [ {value.ref}, %{yes} ]")
            return Value(ref, buffer.dtype)
        return self.load(buffer, address)

    def load(self, buffer: Buffer, address: Address) -> Value:
        scalar = self.lane is None or (address.stride == 0 and address.indices is None)
        lanes = 1 if scalar else self.lanes
        type_ = self.module.memory_type(buffer.dtype, lanes)
        if scalar or (address.stride == 1 and address.indices is None and (self.mask is None or buffer in self.private)):
            ref = self.op(f"load {type_}, ptr {address.pointer}, align {address.align}")
        elif address.stride == 1 and address.indices is None:
            assert self.mask is not None
            args = (
                ("ptr", address.pointer),
                ("i32", str(address.align)),
                (f"<{lanes} x i1>", self.mask.ref),
                (type_, "zeroinitializer"),
            )
            ref = self.call("masked.load", type_, *args, suffix=(type_, "ptr"))
        elif address.indices is None and self.mask is None and address.stride in (-1, 2, 3, 4):
            ref = self.strided(buffer, address, lanes)
        else:
            pointers, vector = f"<{lanes} x ptr>", self.pointer_vector(buffer, address)
            mask = "splat (i1 true)" if self.mask is None else self.mask.ref
            args = (
                (pointers, vector),
                ("i32", str(itemsize(buffer.dtype))),
                (f"<{lanes} x i1>", mask),
                (type_, "zeroinitializer"),
            )
            ref = self.call("masked.gather", type_, *args, suffix=(type_, pointers))
        if buffer.dtype == "bool":
            ref = self.op(f"icmp ne {type_} {ref}, zeroinitializer")
        return Value(ref, buffer.dtype, lanes)

    def strided(self, buffer: Buffer, address: Address, lanes: int) -> str:
        """Every `stride`-th element, by contiguous loads that stay within the first and last element, and shuffles."""
        scalar, type_ = self.module.memory_type(buffer.dtype), self.module.memory_type(buffer.dtype, lanes)
        stride = address.stride
        starts = [n * lanes for n in range(stride - 1)] + [(lanes - 1) * (stride - 1)] if stride > 0 else [1 - lanes]
        parts = []
        for start in starts:
            place = self.op(f"getelementptr {scalar}, ptr {address.pointer}, i64 {start}")
            parts.append(self.op(f"load {type_}, ptr {place}, align {itemsize(buffer.dtype)}"))
        if stride < 0:
            return self.shuffle(type_, parts[0], parts[0], range(lanes - 1, -1, -1))
        result, owner = parts[0], [lane * stride // lanes for lane in range(lanes)]  # the part with the element of each lane
        for n in range(1, stride):
            picks = [
                lanes + lane * stride - starts[n]
                if owner[lane] == n
                else lane * stride
                if n == 1 and owner[lane] == 0
                else lane
                for lane in range(lanes)
            ]
            result = self.shuffle(type_, result, parts[n], picks)
        return result

    def shuffle(self, type_: str, a: str, b: str, picks: Sequence[int]) -> str:
        return self.op(f"shufflevector {type_} {a}, {type_} {b}, <{len(picks)} x i32> <{', '.join(f'i32 {p}' for p in picks)}>")

    def pointer_vector(self, buffer: Buffer, address: Address) -> str:
        index = address.indices or iota(self.lanes, "i64", address.stride)
        return self.op(
            f"getelementptr {self.module.memory_type(buffer.dtype)}, ptr {address.pointer}, <{self.lanes} x i64> {index}"
        )

    # ------------------------------------------------------------ addresses

    def address(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Address:
        form = self.form(buffer, indices)
        offset, stride = form.offset, 0
        shared: list[tuple[tuple[Expr, ...], int]] = []
        varying: list[tuple[tuple[Expr, ...], int]] = []
        for term in form.terms:
            monomial, c = term
            first = monomial[0]
            if len(monomial) == 1 and first.op == "var":
                known = self.constants.get(first)
                if known is not None:
                    offset += c * known
                elif first is self.lane:
                    stride += c
                else:
                    shared.append(term)
            else:
                (varying if self.varies(monomial) else shared).append(term)
        index = None
        if varying:
            index = self.index_vector(varying, stride)
            stride = 0
        align = itemsize(buffer.dtype)
        if buffer in self.private:
            align = math.gcd(align * math.gcd(offset, *(c for _, c in shared)), _ALIGN) or _ALIGN
        return Address(self.pointer(buffer, tuple(shared), offset), stride, index, align)

    def varies(self, monomial: tuple[Expr, ...]) -> bool:
        return self.lane is not None and any(self.lane in self.module.variables(a) for a in monomial)

    def form(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Form:
        """The linear form of the row-major index, in which only plain variables are known constants."""
        form = self.module.forms.get((buffer, indices))
        if form is None:
            index: Expr = const(0)
            for i, d in zip(indices, buffer.shape, strict=True):
                index = index * d + i
            form = self.module.forms[buffer, indices] = self.sorted_form(linear(simplify(index)), buffer)
        if form.inner and any(v in form.inner for v in self.constants):
            known = {v: n for v, n in self.constants.items() if v in form.inner}
            key = (buffer, indices, tuple(known.items()))
            refined = self.module.forms.get(key)
            if refined is None:
                index = const(form.offset)
                for monomial, c in form.terms:
                    index = index + math.prod(monomial[1:], start=monomial[0]) * c
                index = substitute(index, {v: const(n) for v, n in known.items()})
                refined = self.module.forms[key] = self.sorted_form(linear(simplify(index)), None)
            return refined
        return form

    def sorted_form(self, terms: Linear, buffer: Buffer | None) -> Form:
        if buffer is not None and buffer in self.module.per_lane:
            lane, lanes = self.module.per_lane[buffer]
            terms = {m: c * lanes for m, c in terms.items()}
            terms[(lane,)] = terms.get((lane,), 0) + 1
        depth = {m: max((self.depth.get(v, 0) for a in m for v in self.module.variables(a)), default=0) for m in terms}
        ordered = tuple(sorted(((m, c) for m, c in terms.items() if m), key=lambda item: depth[item[0]]))
        inner = [v for m, _ in ordered if len(m) > 1 or m[0].op != "var" for a in m for v in self.module.variables(a)]
        return Form(ordered, terms.get((), 0), frozenset(inner))

    def pointer(self, buffer: Buffer, terms: tuple[tuple[tuple[Expr, ...], int], ...], offset: int) -> str:
        """`buffer + terms + offset`, added up from the outermost loop inwards so that LLVM can hoist each part."""
        whole = (buffer, terms, offset)
        found = self.find(whole)
        if found is not None:
            return found.ref
        if buffer not in self.pointers:
            raise CodegenError(f"buffer `{buffer.name}` is used but is neither parameter nor allocated", where=self.module.name)
        ref, scalar = self.pointers[buffer], self.module.memory_type(buffer.dtype)
        for n, (monomial, c) in enumerate(terms, start=1):
            key = (buffer, terms[:n])
            found = self.find(key)
            if found is None:
                ref = self.op(f"getelementptr {scalar}, ptr {ref}, i64 {self.scaled(monomial, c).ref}")
                self.keep(key, Value(ref, "ptr"), monomial)
            else:
                ref = found.ref
        if offset:
            ref = self.op(f"getelementptr {scalar}, ptr {ref}, i64 {offset}")
        self.keep(whole, Value(ref, "ptr"), [a for monomial, _ in terms for a in monomial])
        return ref

    def keep(self, key: Any, value: Value, sources: Iterable[Expr]) -> None:
        self.scopes[-1][key] = value
        for source in sources:
            for buffer in self.module.buffers(source):
                self.readers.setdefault(buffer, []).append(key)

    def scaled(self, monomial: tuple[Expr, ...], c: int) -> Value:
        """c times the product of the atoms."""
        values = [self.value(atom) for atom in monomial]
        result = values[0]
        for factor in values[1:]:
            result = self.arithmetic("mul", [result, factor], INDEX)
        return result if c == 1 else self.arithmetic("mul", [result, Value(str(c), INDEX)], INDEX)

    def index_vector(self, terms: Sequence[tuple[tuple[Expr, ...], int]], stride: int) -> str:
        result = Value(iota(self.lanes, "i64", stride), INDEX, self.lanes) if stride else None
        for monomial, c in terms:
            part = self.scaled(monomial, c)
            result = part if result is None else self.arithmetic("add", [result, part], INDEX)
        assert result is not None
        return self.spread(result, self.lanes)

    # ------------------------------------------------------------ expressions

    def fold(self, e: Expr) -> Expr:
        """`e` with the known constants put in, simplified where there are any."""
        if e.op == "const" or not self.constants:
            return e
        known = {v: const(self.constants[v]) for v in self.module.variables(e) if v in self.constants}
        return simplify(substitute(e, known)) if known else e

    def scalar(self, e: Expr, what: str) -> str:
        value = self.value(e)
        if value.lanes != 1:
            assert self.lane is not None
            raise CodegenError(f"{what} differs between the lanes of `{self.lane.name}`", where=f"{self.module.name}: {e}")
        return value.ref

    def value(self, e: Expr) -> Value:
        key = self.key(e)
        found = self.find(key)
        if found is not None:
            return found
        depth, self.nesting = self.nesting, self.nesting + 1
        if depth > 60:  # a long chain: operands first, or it would exhaust Python's stack
            self.nesting = 0
            for node in E.needed_operands(e):
                self.value(node)
        result = self.compute(e)
        self.nesting = depth
        self.scopes[-1][key] = result
        for buffer in self.module.buffers(e):
            self.readers.setdefault(buffer, []).append(key)
        return result

    def compute(self, e: Expr) -> Value:
        match e.op:
            case "const":
                return Value(literal(e.attr, e.dtype, self.module.native_half), e.dtype)
            case "var":
                return self.variable(e)
            case "read":
                return self.read(e)
            case "select":
                return self.select(e)
            case "lt" | "le" if e.args[0].dtype == INDEX and self.varies((e,)):
                return self.compare_lanes(e)
        other = self.module.lowered(e)
        if other is not None:
            return self.value(other)
        if e.op in ELEMENTARY or e.op == "reduce":
            raise CodegenError(f"`{e.op}` of {e.dtype} cannot be compiled", where=f"{self.module.name}: {e}")
        args = [self.value(a) for a in e.args]
        match e.op:
            case "cast":
                return self.cast(args[0], e.dtype)
            case "bitcast":
                return self.bitcast(args[0], e.dtype)
            case "fma":
                return self.fma(*args)
            case "lt" | "le" | "eq" | "ne":
                return self.compare(e.op, *args)
            case "floordiv" | "mod" | "truncdiv" | "truncmod" if is_integer(e.dtype):
                return self.divide(e, *args)
            case "shl" | "shr":
                return self.shift(e, *args)
            case _ if len(args) == 1:
                return self.unary(e.op, args[0])
        return self.arithmetic(e.op, args, e.dtype)

    def variable(self, v: Expr) -> Value:
        known = self.constants.get(v)
        if known is not None:
            return Value(str(known), v.dtype)
        if v not in self.bound:
            raise CodegenError(f"`{v.name}` is used but is no parameter and no loop around", where=self.module.name)
        return self.bound[v]

    def compare_lanes(self, e: Expr) -> Value:
        """`rest + slope * lane > 0` (or >= 0): vectors of 32 bits instead of 64 where the values fit."""
        folded = self.fold(e)
        if folded.op not in ("lt", "le"):
            return self.value(folded) if folded is not e else self.compare(e.op, *(self.value(a) for a in e.args))
        a, b = folded.args
        terms = linear(difference(b, a))
        rest = {m: c for m, c in terms.items() if not self.varies(m)}
        lane_only = {m: c for m, c in terms.items() if self.varies(m)}
        assert self.lane is not None
        slope = lane_only.get((self.lane,), 0)
        strict = folded.op == "lt"
        if len(lane_only) == 1 and abs(slope) == 1:
            # slope -1: lane < rest (+ 1 for le); slope 1: lane >= 1 - rest (- rest for le), the negation of lane < that.
            limit = from_linear(rest) + (0 if strict else 1) if slope < 0 else const(1 if strict else 0) - from_linear(rest)
            limit = E.minimum(E.maximum(limit, 0), self.lanes)
            lanes, test = iota(self.lanes, "i32"), "ult" if slope < 0 else "uge"
        elif slope and len(lane_only) == 1 and _small(slope * self.lanes, *E.bounds(from_linear(rest))):
            # slope * lane > -rest
            limit, lanes, test = const(0) - from_linear(rest), iota(self.lanes, "i32", slope), "sgt" if strict else "sge"
        else:
            return self.compare(folded.op, self.value(a), self.value(b))
        count = self.value(simplify(limit))
        narrow = self.op(f"trunc i64 {count.ref} to i32") if count.ref[0] == "%" else count.ref
        vector = self.spread(Value(narrow, "int32"), self.lanes)
        return Value(self.op(f"icmp {test} <{self.lanes} x i32> {lanes}, {vector}"), "bool", self.lanes)

    def select(self, e: Expr) -> Value:
        cond = self.fold(e.args[0])
        if cond.op == "const":
            return self.value(e.args[1] if cond.attr else e.args[2])
        test = self.value(cond)
        if not (self.module.unsafe(e.args[1]) or self.module.unsafe(e.args[2])):
            return self.choose(test, self.value(e.args[1]), self.value(e.args[2]))
        if test.lanes == 1:
            return self.select_by_branch(test, e.args[1], e.args[2])
        outer = self.mask
        with self.masked(self.both(outer, test)):
            a = self.value(e.args[1])
        with self.masked(self.both(outer, self.negated(test))):
            b = self.value(e.args[2])
        return self.choose(test, a, b)

    def select_by_branch(self, test: Value, a: Expr, b: Expr) -> Value:
        yes, no, end = self.label("then"), self.label("else"), self.label("end")
        self.line(f"br i1 {test.ref}, label %{yes}, label %{no}")
        outer, sides = self.lines, []
        for label, side in ((yes, a), (no, b)):
            self.lines = []
            self.start(label)
            with self.scope():
                sides.append((self.value(side), self.lines, self.block))
        lanes = max(value.lanes for value, _, _ in sides)
        arms = []
        for value, lines, block in sides:
            self.lines = lines
            with self.scope():
                arms.append(f"[ {self.spread(value, lanes)}, %{block} ]")
            self.line(f"br label %{end}")
            outer.extend(lines)
        self.lines = outer
        self.start(end)
        return Value(self.op(f"phi {self.module.type(a.dtype, lanes)} {', '.join(arms)}"), a.dtype, lanes)


def _small(*values: int | None) -> bool:
    """Whether sums of two of the values surely fit 32 bits."""
    return all(v is not None and abs(v) < 1 << 30 for v in values)


def _unknown(e: Expr, facts: Mapping[Expr, Any]) -> Iterable[Expr]:
    """The sub-expressions that `facts` lacks, operands before users."""
    if e in facts:
        return ()
    if all(a in facts for a in e.args):
        return (e,)
    return [node for node in E.walk(e) if node not in facts]


def _free(s: L.For) -> tuple[list[Buffer], list[Expr]]:
    """The buffers and variables that the body of a loop takes from outside, in order of first use."""
    buffers: dict[Buffer, None] = {}
    variables: dict[Expr, None] = {}
    inside: set[Any] = {s.var}
    for stmt in L.walk(s.body):
        if isinstance(stmt, L.For):
            inside.add(stmt.var)
        elif isinstance(stmt, L.Allocate):
            inside.add(stmt.buffer)
        elif isinstance(stmt, L.Store | L.Accumulate):
            buffers[stmt.buffer] = None
        for e in E.walk(*L.expressions(stmt)):
            if e.op == "read":
                buffers[e.attr] = None
            elif e.op == "var":
                variables[e] = None
    for buffer in buffers:
        variables.update(dict.fromkeys(v for d in buffer.shape for v in E.variables(as_expr(d))))
    return [b for b in buffers if b not in inside], [v for v in variables if v not in inside]
