"""Loop programs to LLVM IR text, statement by statement: one `Kernel`, one function.

    void @NAME(ptr call, ptr buffer0, ..., i64 scalar0, ...)         kernel.buffers, then kernel.scalars

`call` is the `tcomp_call` of the run (runtime/include/tcomp.h): the thread pool, and the status by which a run is stopped.

Nothing is left to LLVM's vectorizers or unroller. Register buffers are stack slots that are accessed at constant offsets, so that LLVM
promotes them to registers. Parameters are aligned as their elements are. Objects import nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tcomp.codegen.llvm.addresses import ALIGN, Address
from tcomp.codegen.llvm.builder import Value, iota, symbol
from tcomp.codegen.llvm.counted_loops import CountedLoops
from tcomp.codegen.llvm.kernel_module import KernelModule
from tcomp.codegen.llvm.sequences import SEQUENCES
from tcomp.codegen.llvm.tiles import ask_for_tiles, clears, configured, emit_tiles, is_whole, release_tiles
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import INDEX, Expr, as_expr
from tcomp.ir.instruction import TileOp, WarpOp, match
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.target import CpuTarget

MAX_LANES = 64  # of a vectorized loop: bytes of the widest vector register
MAX_OPERATIONS = 1 << 12  # intrinsics that one instruction of a program may become: code beyond takes LLVM minutes


def emit_kernel(
    kernel: Kernel,
    target: CpuTarget,
    over: Collection[tuple[Buffer, Buffer]] = (),
    versions: Sequence[tuple[Mapping[Expr, int], Kernel]] = (),
) -> str:
    """LLVM IR text of a kernel. The two of a pair in `over` may lie in the same memory: they are read and written in the order of the
    program. `versions` are loops for certain sizes of its scalars: their buffers are the first ones of the kernel, in its order. Raises
    `CodegenError` naming the loop or buffer for what a CPU kernel cannot be."""
    names = {b.name for pair in over for b in pair}
    overlapping = frozenset(b for k in (kernel, *(k for _, k in versions)) for b in k.buffers if b.name in names)
    module = KernelModule(kernel.name, target, kernel.notes, overlapping)
    if versions:
        _choose(module, kernel, versions)
    else:
        define(module, kernel)
    return module.text()


def _choose(module: KernelModule, kernel: Kernel, versions: Sequence[tuple[Mapping[Expr, int], Kernel]]) -> None:
    """Add a function that calls the first version whose sizes are those of the call, else the kernel, each a function of its own."""
    several = [*versions, ({}, replace(kernel, name=f"{kernel.name}.any"))]
    chooser = Function(module, (), kernel.scalars)
    for sizes, version in several:
        define(module, version, "internal")
        arguments = ["ptr %call", *(f"ptr %b{n}" for n in range(len(version.buffers)))]
        arguments += [f"i64 {chooser.bound[scalar].ref}" for scalar in version.scalars]
        other = ""
        for scalar, size in sizes.items():
            this, other = chooser.labels("then", "else") if not other else (chooser.labels("then")[0], other)
            chooser.branch(chooser.op(f"icmp eq i64 {chooser.bound[scalar].ref}, {size}"), this, other)
            chooser.start(this)
        chooser.line(f"tail call void {symbol(version.name)}({', '.join(arguments)}) noinline")
        chooser.line("ret void")
        if other:
            chooser.start(other)
    parameters = ["ptr %call", *(f"ptr %b{n}" for n in range(len(kernel.buffers)))]
    parameters += [f"i64 {chooser.bound[scalar].ref}" for scalar in kernel.scalars]
    module.functions.append(chooser.text(f"define void {symbol(kernel.name)}({', '.join(parameters)}) #0"))


def define(module: KernelModule, kernel: Kernel, linkage: str = "") -> None:
    """Add the function of a kernel to a module."""
    function = Function(module, kernel.buffers, kernel.scalars)
    parameters = ["ptr %call", *(module.parameter(b, ref, b in kernel.outputs) for b, ref in function.pointers.items())]
    parameters += [f"i64 {function.bound[scalar].ref}" for scalar in kernel.scalars]
    function.statement(kernel.body)
    function.finish()
    if module.has_tiles:
        ask_for_tiles(function)
    module.functions.append(function.text(f"define {linkage} void {symbol(kernel.name)}({', '.join(parameters)}) #0"))


def _accumulates_in_registers(s: L.For) -> bool:
    """Whether each iteration of a loop adds to all vectors of a register tile."""
    inside = [*L.walk(s.body)]
    sums = [x for x in inside if isinstance(x, L.Accumulate)]
    vectors = any(isinstance(x, L.For) and x.kind == L.VECTORIZED for x in inside)
    return vectors and bool(sums) and all(x.buffer.scope == "register" and s.var not in E.variables(*x.indices) for x in sums)


class Function(CountedLoops):
    """The LLVM function of a loop program, whose parameters are pointers to buffers and scalars."""

    def __init__(self, module: KernelModule, buffers: Sequence[Buffer] = (), scalars: Sequence[Expr] = ()) -> None:
        super().__init__(module)
        self.pointers = {buffer: f"%b{n}" for n, buffer in enumerate(buffers)}
        for n, scalar in enumerate(scalars):
            self.bind(scalar, Value(f"%s{n}", INDEX))
        self.inside_parallel = False
        self.has_tiles = False  # whether tile registers are used,
        self.tiles: bytes | None = None  # as they are configured for all that is inside of a loop here, or of one around the call,
        self.cleared: L.Call | None = None  # by an instruction whose sums were just cleared

    def finish(self) -> None:
        """Return, here and where a test of the status leads to."""
        self.leave()
        if self.can_stop:
            self.start("stopped")
            self.leave()

    def leave(self) -> None:
        """Return. On x86 a fence orders non-temporal stores before the stores by which threads signal that they are done."""
        if self.has_tiles and self.tiles is None:
            release_tiles(self)
        if self.has_non_temporal and self.target.arch == "x86_64":
            self.module.declarations.setdefault("llvm.x86.sse.sfence", "declare void @llvm.x86.sse.sfence()")
            self.line("call void @llvm.x86.sse.sfence()")
        self.line("ret void")

    def statement(self, s: Stmt) -> None:
        """Emit a statement."""
        match s:
            case L.Block(stmts):
                for inner, following in itertools.zip_longest(stmts, stmts[1:]):
                    if isinstance(following, L.Call) and clears(inner, following):
                        self.cleared = following
                        if is_whole(following):
                            continue
                    self.statement(inner)
            case L.For():
                self.loop(s)
            case L.If(cond, then, otherwise):
                self.conditional(self.fold(cond), then, otherwise)
            case L.While(cond, body):
                self.repeat(cond, body)
            case L.Store():
                self.store(s)
            case L.Accumulate(buffer, indices, value, reducer):
                self.accumulate(s, buffer, indices, value, reducer)
            case L.Allocate(buffer, body):
                self.allocate(buffer)
                self.statement(body)
            case L.Prefetch() if self.target.arch == "wasm32":
                pass  # there is no such instruction
            case L.Prefetch(buffer, indices, level):
                place, how = self.address(buffer, indices).pointer, (("i32", "0"), ("i32", str(4 - level)), ("i32", "1"))  # to read, data
                self.call("prefetch", "void", ("ptr", place), *how, suffix=("ptr",))
            case L.Call():
                self.instruction(s)
            case _:
                raise self.error(f"a {type(s).__name__} cannot be compiled for a CPU")

    def loop(self, s: L.For) -> None:
        """Emit a loop by its kind; those of one iteration vanish."""
        extent = self.fold(as_expr(s.extent))
        known = int(extent.attr) if extent.op == "const" else None
        if known is not None and (known <= 0 or s.kind == L.UNROLLED or (known == 1 and s.kind in L.KINDS[:4])):
            apart = known > 1 and self.target.arch == "x86_64" and _accumulates_in_registers(s)
            for n in range(known):
                if apart and n:  # LLVM brings up to four loads of neighbours together: of several steps, whose operands spill the sums then
                    self.line('call void asm sideeffect "", ""()')
                self.constants[s.var] = n
                self.statement(s.body)
            self.constants.pop(s.var, None)
        elif s.kind == L.PARALLEL and self.target.platform.threaded and not self.inside_parallel and self.lane is None:
            self.parallel(s, extent)
        elif s.kind in (L.SERIAL, L.PARALLEL):
            self.serial(s, extent, known)
        elif s.kind not in (L.UNROLLED, L.VECTORIZED):
            raise self.error(f"loop `{s.var.name}` is bound to `{s.kind}`", why="a CPU has no such axis")
        elif known is None:
            raise self.error(
                f"{s.kind} loop `{s.var.name}` has the extent {extent}, which is not constant", hint="split it by a constant first"
            )
        else:
            self.vectorized(s, known)

    def serial(self, s: L.For, extent: Expr, known: int | None) -> None:
        """A loop that is a loop in LLVM IR."""
        self.forget(self.module.written(s.body))
        count = self.scalar(extent, f"the extent of loop `{s.var.name}`")
        head, end = self.labels("loop", "end")
        with self.scope():
            if known is None and (E.bounds(extent)[0] or 0) < 1:
                (some,) = self.labels("some")
                self.branch(self.op(f"icmp sgt i64 {count}, 0"), some, end)
                self.start(some)
            self.hoist_checks(s.body, self.module.written(s.body))
            if isinstance(s.body, L.Accumulate) and not any(s.var in self.module.variables(i) for i in s.body.indices):
                self.chain = s.body
            with configured(self, s.body):
                self.iterate(s, "0", count, head, end)

    def hoist_checks(self, s: Stmt, written: set[Buffer]) -> None:
        """Hoist the checks that a statement certainly performs, and that are invariant in the loop around it, in front of that loop. LLVM
        does not, as a check may report."""
        match s:
            case L.Block(stmts):
                for inner in stmts:
                    self.hoist_checks(inner, written)
            case L.Allocate(_, body):
                self.hoist_checks(body, written)
            case L.For(extent=extent, body=body) if s.kind != L.PARALLEL and (E.bounds(as_expr(extent))[0] or 0) >= 1:
                self.hoist_checks(body, written)
            case L.Store() | L.Accumulate():
                for check in (check for e in L.expressions(s) for check in self.module.checks(e)):
                    known = all(v in self.bound or v in self.constants for v in self.module.variables(check))
                    if known and written.isdisjoint(self.module.buffers(check)):
                        self.value(check)

    def vectorized(self, s: L.For, lanes: int) -> None:
        """A loop whose iterations are the lanes of vectors."""
        if self.lane is not None:
            raise self.error(f"vectorized loop `{s.var.name}` inside vectorized loop `{self.lane.name}`")
        if lanes > MAX_LANES or lanes & (lanes - 1):
            hint = f"a power of two up to {MAX_LANES}; split it, and mask the rest with an `If`"
            raise self.error(f"vectorized loop `{s.var.name}` has {lanes} iterations", hint=hint)
        self.lane, self.lanes = s.var, lanes
        self.bind(s.var, Value(iota(lanes, "i64"), INDEX, lanes))
        self.statement(s.body)
        del self.bound[s.var], self.depth[s.var]
        self.lane, self.lanes = None, 1

    def conditional(self, cond: Expr, then: Stmt, otherwise: Stmt | None) -> None:
        """A condition: a branch, or a mask where lanes differ."""
        if cond.op == "const":
            return self.statement((then if cond.attr else otherwise) or L.block())
        narrow = otherwise is None and isinstance(then, L.Store) and itemsize(then.buffer.dtype) < 4
        if narrow and (only := self.only_lane(cond)) is not None:
            return self.lane_by_lane(then, (only,))  # LLVM 22 narrows the store of a single lane wrongly: four bytes are written
        test = self.value(cond)
        if test.lanes > 1:
            limit = cond.args[1] if cond.op == "lt" and cond.args[0] is self.lane else cond
            with self.masked(test, int(limit.attr) if limit.op == "const" else None):
                self.statement(then)
            if otherwise is not None:
                with self.masked(self.negated(test)):
                    self.statement(otherwise)
            return
        yes, end = self.labels("then", "end")
        no = end if otherwise is None else self.labels("else")[0]
        # Of two copies of loops, the one that checks its indices is for runs in which some are out of range.
        unlikely = otherwise is not None and self.lane is None and _checks(otherwise) and not _checks(then)
        self.branch(test.ref, yes, no, expected=unlikely)
        for label, body in ((yes, then), (no, otherwise)):
            if body is not None:
                self.start(label)
                with self.scope():
                    if unlikely and body is otherwise:
                        self.called(body)
                    else:
                        self.statement(body)
                self.jump(end)
        self.start(end)

    def only_lane(self, cond: Expr) -> int | None:
        """The lane for which alone a condition holds, if that is known."""
        if self.lane is None or self.mask is not None or set(self.module.variables(cond)) != {self.lane}:
            return None
        active = [n for n in range(self.lanes) if self.fold(E.substitute(cond, {self.lane: as_expr(n)})) is not E.const(False, "bool")]
        return active[0] if len(active) == 1 else None

    def repeat(self, cond: Expr, body: Stmt) -> None:
        """A while loop."""
        self.forget(self.module.written(body))
        head, inside, end = self.labels("while", "do", "end")
        self.jump(head)
        self.start(head)
        with self.scope():
            self.branch(self.scalar(self.fold(cond), "the condition of a while loop"), inside, end)
            self.start(inside)
            self.statement(body)
            self.stop_if_asked(head)
        self.start(end)

    def allocate(self, buffer: Buffer) -> None:
        """A temporary on the stack, which LLVM keeps in registers where it can."""
        extents = [self.fold(as_expr(d)) for d in buffer.shape]
        if any(extent.op != "const" for extent in extents):
            raise self.error(f"temporary `{buffer.name}` has no constant shape", where=repr(buffer), hint="pass it as a workspace buffer")
        if buffer.scope == "shared":
            raise self.error(f"temporary `{buffer.name}` is in shared memory", where=repr(buffer), why="a CPU has none")
        size = math.prod(int(extent.attr) for extent in extents) * self.lanes
        if self.lane is not None:  # every lane has its own
            self.module.per_lane[buffer] = self.lane, self.lanes
        taken = size * itemsize(buffer.dtype)
        if taken > L.STACK_LIMIT:
            hint = f"at most {L.STACK_LIMIT}; pass larger ones as workspace buffers"
            raise self.error(f"temporary `{buffer.name}` takes {taken} bytes of the stack", where=repr(buffer), hint=hint)
        if buffer not in self.pointers:  # a second copy of an unrolled body shares the slot
            self.count += 1
            slot = self.pointers[buffer] = f"%a{self.count}"
            # Padding: a masked access may read, and write back, what lies beyond the last element.
            element = self.module.memory_type(buffer.dtype)
            self.slots.append(f"  {slot} = alloca [{size + MAX_LANES} x {element}], align {ALIGN}")
            if buffer.scope != "register" and is_float(buffer.dtype) and taken % ALIGN:
                # Lanes that nobody looks at compute with it: subnormal numbers, as what lies on a stack by chance may be, would take long.
                self.slots.append(f"  {slot}.end = getelementptr {element}, ptr {slot}, i64 {size}")
                self.slots.append(f"  store <{MAX_LANES} x {element}> zeroinitializer, ptr {slot}.end, align {itemsize(buffer.dtype)}")
            self.private.add(buffer)

    def instruction(self, s: L.Call) -> None:
        """A machine instruction, once for each iteration of the loops outside of its registers."""
        instruction, op = s.instruction, s.instruction.emission
        if isinstance(op, WarpOp) or not any(map(self.target.has, instruction.features)):
            why = f"it needs {' or '.join(instruction.features)}"
            raise self.error(f"the target has no instruction `{instruction.name}`", why, where=f"for `{self.target}`")
        if self.lane is not None:
            raise self.error(f"an instruction inside of the vectorized loop `{self.lane.name}`", where=instruction.name)
        matched = match(instruction, s.body)
        if isinstance(op, TileOp):
            return emit_tiles(self, instruction, op, matched, self.cleared is s)
        loops, places, result = instruction.loops, instruction.places(), instruction.result
        inside = {instruction.leaf.indices[-1]: op.lanes} | ({loops[-1].var: op.group} if op.group > 1 else {})
        steps = [range(0, int(x.extent), inside.get(x.var, 1)) for x in loops]
        if (operations := math.prod(map(len, steps))) > MAX_OPERATIONS:
            hint = f"at most {MAX_OPERATIONS}; take a smaller tile"
            raise self.error(f"`{instruction.name}` would be {operations} operations", hint=hint, where=instruction.name)
        operands = {b.name: b for b in instruction.meaning.buffers}
        registers: dict[Any, str] = {}
        addresses: dict[Any, Address] = {}  # of the results
        total = self.module.type(result.dtype, op.lanes)
        for point in itertools.product(*steps):
            at = dict(zip((x.var for x in loops), point, strict=True))
            self.constants |= {v: at[own] for own, v in matched.loops.items()}
            types, arguments = [], []
            for b in (operands[name] for name in op.arguments):
                key, width = (b, *(at[i] for i in places[b])), 1 if b is result else op.group
                if key not in registers:
                    address = self.address(*matched.accesses[b])
                    count = width * op.lanes if instruction.leaf.indices[-1] in places[b] else width
                    registers[key] = self.register(b.dtype, width * op.lanes, count, address)
                    if b is result:
                        addresses[key] = address
                types.append(self.module.type(b.dtype, op.lanes * width))
                arguments.append(registers[key])
            to = (result, *(at[i] for i in places[result]))
            if op.code in SEQUENCES:
                registers[to] = SEQUENCES[op.code](self.op, self.module.declarations.setdefault, arguments)
            else:
                self.module.declarations.setdefault(op.code, f"declare {total} @{op.code}({', '.join(types)})")
                given = ", ".join(f"{type_} {register}" for type_, register in zip(types, arguments, strict=True))
                registers[to] = self.op(f"call {total} @{op.code}({given})")
        for v in matched.loops.values():
            del self.constants[v]
        for key, address in addresses.items():
            self.line(f"store {total} {registers[key]}, ptr {address.pointer}, align {address.align}")
        self.forget((matched.accesses[result][0],))

    def register(self, dtype: str, lanes: int, count: int, address: Address) -> str:
        """A register of `lanes` elements, loaded from `count` elements in memory that are repeated."""
        type_ = self.module.memory_type(dtype, lanes)
        if count == lanes:
            return self.op(f"load {type_}, ptr {address.pointer}, align {address.align}")
        bits, copies = f"uint{8 * itemsize(dtype) * count}", lanes // count
        part = Value(self.op(f"load {self.module.type(bits)}, ptr {address.pointer}, align {address.align}"), bits)
        return self.op(f"bitcast {self.module.type(bits, copies)} {self.spread(part, copies)} to {type_}")

    def outlined(self, s: L.For) -> tuple[str, list[tuple[str, str]]]:
        """The body of a parallel loop as functions: the name of the one that the pool calls, and what its closure holds: (type, reference
        here)."""
        name, inner, captured = self.function_of(s.body, (s.var,))
        inner.inside_parallel = True
        inner.branch(inner.op("icmp slt i64 %begin, %end"), "some", "done")
        inner.start("some")
        with configured(inner, s.body):
            inner.iterate(s, "%begin", "%end", "chunk", "done")
        inner.finish()
        # A function with parameters of its own: `noalias` would be lost if the body read its pointers from the closure.
        parameters, module = ", ".join([*(p for _, _, p in captured), "i64 %begin", "i64 %end"]), self.module
        module.functions.append(inner.text(f"define internal void {symbol(name)}({parameters}) noinline #0"))
        types = [*enumerate(type_ for type_, _, _ in captured)]
        loads = [f"  %p{n} = getelementptr i64, ptr %closure, i64 {n}\n  %c{n} = load {type_}, ptr %p{n}" for n, type_ in types]
        arguments = ", ".join([*(f"{type_} %c{n}" for n, type_ in types), "i64 %begin", "i64 %end"])
        head = f"define internal void {symbol(name + '.body')}(ptr %closure, i64 %begin, i64 %end) #0 {{"
        module.functions.append("\n".join([head, *loads, f"  call void {symbol(name)}({arguments})", "  ret void", "}"]))
        return symbol(name + ".body"), [(type_, ref) for type_, ref, _ in captured]

    def function_of(self, s: Stmt, bound: Sequence[Expr] = ()) -> tuple[str, Function, list[tuple[str, str, str]]]:
        """A name and a function for a statement in which `bound` variables have values, and what the function gets from here: (type,
        reference here, parameter)."""
        module = self.module
        name = f"{module.name}.{module.regions}"
        module.regions += 1
        buffers, variables = _free(s, bound)
        unknown = [b.name for b in buffers if b not in self.pointers]
        unknown += [v.name for v in variables if v not in self.bound and v not in self.constants]
        if unknown:
            raise self.error(f"`{unknown[0]}` is used but is not a parameter")
        values = [v for v in variables if v not in self.constants]
        inner = Function(module, buffers, values)
        inner.inside_parallel = self.inside_parallel
        inner.constants = dict(self.constants)
        inner.private = self.private & set(buffers)
        written = module.written(s)
        captured = [("ptr", "%call", "ptr %call")]
        captured += [("ptr", self.pointers[b], module.parameter(b, ref, b in written)) for b, ref in inner.pointers.items()]
        captured += [("i64", self.bound[v].ref, f"i64 {inner.bound[v].ref}") for v in values]
        return name, inner, captured

    def called(self, s: Stmt) -> None:
        """A rarely executed statement, outlined into a function of its own, so that it takes no registers from the code around it."""
        name, inner, captured = self.function_of(s)
        inner.tiles = self.tiles
        inner.statement(s)
        inner.finish()
        self.module.functions.append(
            inner.text(f"define internal void {symbol(name)}({', '.join(p for _, _, p in captured)}) noinline cold #0")
        )
        self.line(f"call void {symbol(name)}({', '.join(f'{type_} {ref}' for type_, ref, _ in captured)})")
        self.stop_if_asked()
        self.forget(self.module.written(s))

    def parallel(self, s: L.For, extent: Expr) -> None:
        """Call the body of a parallel loop through the thread pool, or in place without one."""
        body, captured = self.outlined(s)
        self.count += 1
        closure = f"%c{self.count}"
        self.slots.append(f"  {closure} = alloca [{len(captured)} x i64], align 16")
        for n, (type_, ref) in enumerate(captured):
            self.line(f"store {type_} {ref}, ptr {self.op(f'getelementptr i64, ptr {closure}, i64 {n}')}")
        count = self.scalar(extent, f"the extent of loop `{s.var.name}`")
        direct, pooled, end = self.labels("direct", "pooled", "end")
        pool = self.op(f"load ptr, ptr {self.field('pool')}")
        alone, short = self.op(f"icmp eq ptr {pool}, null"), self.op(f"icmp sle i64 {count}, 1")
        self.branch(self.op(f"or i1 {alone}, {short}"), direct, pooled)
        self.start(direct)
        self.line(f"call void {body}(ptr {closure}, i64 0, i64 {count})")
        self.jump(end)
        self.start(pooled)
        self.line(f"call void {self.op(f'load ptr, ptr {pool}')}(ptr {pool}, ptr {body}, ptr {closure}, i64 {count})")
        self.jump(end)
        self.start(end)
        self.stop_if_asked()
        self.forget(self.module.written(s.body))


def _checks(stmt: Stmt) -> bool:
    """Whether an index is checked in it."""
    return any(e.op == "checked" for s in L.walk(stmt) for e in E.walk(*L.expressions(s)))


def _free(s: Stmt, bound: Sequence[Expr]) -> tuple[list[Buffer], list[Expr]]:
    """The buffers and variables that a statement takes from outside, but for `bound` ones, in order of first use."""
    buffers: list[Buffer] = []
    variables: list[Expr] = []
    inside = set[Any](bound)
    for stmt in L.walk(s):
        inside |= {stmt.var} if isinstance(stmt, L.For) else {stmt.buffer} if isinstance(stmt, L.Allocate) else set()
        buffers += [stmt.buffer] if isinstance(stmt, L.Store | L.Accumulate) else []
        buffers += [r.attr for r in E.reads(*L.expressions(stmt))]
        variables += E.variables(*L.expressions(stmt))
    variables += [v for b in dict.fromkeys(buffers) for d in b.shape for v in E.variables(as_expr(d))]
    return [b for b in dict.fromkeys(buffers) if b not in inside], [v for v in dict.fromkeys(variables) if v not in inside]
