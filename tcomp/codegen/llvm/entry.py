"""The entry functions of a model, on a CPU, that `emit_program` makes of a `Program`:

- `i32 tcomp_run(ptr call)`; call: a `tcomp_call` (runtime/include/tcomp.h), whose status it returns
- `i32 tcomp_run_profiled(ptr call, ptr ticks, ptr events)`: the same; adds the clock ticks of call n (see `calls`) to ticks[n], and records
  each call, unless `events` is null
- `i32 tcomp_bind(ptr inputs, ptr dims)`, in programs with dims that values of inputs give: writes these dims; tells which is out of range
- `void tcomp_plan(ptr dims, ptr sizes)`: sizes[0] = bytes of workspace, then all output extents; below 0 as tcomp.h says

Many calls in a row are a table that a loop goes through: code for each would take LLVM half a millisecond.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from tcomp.codegen.llvm.builder import CALL_FIELDS, Value, symbol
from tcomp.codegen.llvm.events import EVENT_IR
from tcomp.codegen.llvm.kernel import Function, define
from tcomp.codegen.llvm.kernel_module import KernelModule, bytes_constant
from tcomp.errors import CodegenError
from tcomp.ir import expr as E
from tcomp.ir.dims import upper_bound
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, substitute, with_sources
from tcomp.ir.loops import SERIAL, VECTORIZED, Buffer, Kernel, block, loop, store
from tcomp.ir.program import NUMBERED, Branch, Call, Copy, Program, Ref, Repeat, SetIndex, Step, calls, refs, walk
from tcomp.ir.verify.program import verify_program
from tcomp.target import CpuTarget

MANY_CALLS = 64  # in a row: from here on a table, when compiling their code would take tens of milliseconds
Known = tuple[str, int, Dim] | Expr  # what only a run knows: the address of a place (as in `Ref`), or a size
SLOTS = 1 << 11  # values that arguments in one table are computed from: 16 KiB of the stack


def emit_program(program: Program, target: CpuTarget) -> str:
    """LLVM IR text of the entry functions. Raises `IRError` for a malformed program."""
    verify_program(program)
    module = KernelModule("tcomp_run", target)
    for call in calls(program.steps):
        types = ["ptr"] * (1 + len(call.buffers)) + ["i64"] * len(call.scalars)
        module.declarations[call.symbol] = f"declare void {symbol(call.symbol)}({', '.join(types)})"
    if copies(program):
        module.declarations["tcomp_copy"] = "declare void @tcomp_copy(ptr, ptr, ptr, i64)"
    _Entry(module, program).emit("tcomp_run")
    _Entry(module, program).emit("tcomp_run_profiled", ", ptr %ticks, ptr %events")
    module.functions.append(EVENT_IR)
    _Plan(module, program).emit()
    if has_bind(program):
        _Bind(module, program).emit()
    return module.text()


def emit_copy(target: CpuTarget) -> str:
    """LLVM IR text of `tcomp_copy(call, src, dst, n)`, n in bytes, for the steps that copy. The same for all programs."""
    module, n = KernelModule("tcomp_copy", target), E.dim("n", 0)
    src, dst = Buffer("src", "uint8", (n,)), Buffer("dst", "uint8", (n,))
    lanes = loop("i", n // 64, lambda i: loop("l", 64, lambda v: store(dst, (i * 64 + v,), src[i * 64 + v]), VECTORIZED))
    rest = loop("j", n % 64, lambda j: store(dst, (n // 64 * 64 + j,), src[n // 64 * 64 + j]), SERIAL)
    define(module, Kernel("tcomp_copy", (src, dst), (dst,), (n,), block(lanes, rest)))
    return module.text()


def has_bind(program: Program) -> bool:
    """Whether there is a function `tcomp_bind`."""
    return any(d.attr.source is not None for d in program.dims)


def copies(program: Program) -> bool:
    """Whether the entry functions call `tcomp_copy`."""
    return any(isinstance(step, Copy) for step in walk(program.steps))


def _refs(steps: Sequence[Step]) -> Iterator[Ref]:
    return (ref for step in walk(steps) for ref in refs(step))


def _split(ref: Ref) -> tuple[tuple[str, int, Dim], int]:
    """A place as one that many share, and a number of bytes to add."""
    return ((ref.base, ref.index, 0), ref.offset) if isinstance(ref.offset, int) else ((ref.base, ref.index, ref.offset), 0)


def _rows(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Calls cut into rows whose arguments are computed from few values, or which are a single call."""
    row, values = list[Call](), set[Known]()
    for call in calls:
        own: set[Known] = {*(_split(ref)[0] for ref in call.buffers), *call.scalars}
        values |= own
        if row and len(values) > SLOTS:
            yield row
            row, values = [], own
        row.append(call)
    yield row


class _Sized(Function):
    """A function that reads dims from the call's array, which kernels may write: what was read before is then forgotten."""

    def __init__(self, module: KernelModule, program: Program) -> None:
        super().__init__(module)
        self.dims = Buffer("dims", "int64", (max(1, len(program.dims)),))
        self.program, self.reads = program, {d: self.dims[n] for n, d in enumerate(program.dims)}

    def index(self, e: Dim) -> str:
        return self.value(substitute(as_expr(e), self.reads)).ref


class _Entry(_Sized):
    """`tcomp_run`, or with `ticks`, more parameters, `tcomp_run_profiled`."""

    def __init__(self, module: KernelModule, program: Program) -> None:
        super().__init__(module, program)
        self.uses_slots = False

    def emit(self, name: str, ticks: str = "") -> None:
        self.ticks, self.number, self.bases = ticks, 0, dict[tuple[str, int], str]()
        self.done = "0"  # calls so far, as LLVM says it
        self.exits = list[str]()  # blocks in which the run may end, and the number of the kernel before
        fields = {name: self.op(f"load ptr, ptr {self.field(name)}") for name in CALL_FIELDS[:5]}
        self.pointers[self.dims] = fields["dims"]
        self.counts = any(ref.base == "dims" for ref in _refs(self.program.steps))  # whether steps write dims
        for ref in _refs(self.program.steps):
            if (ref.base, ref.index) not in self.bases:
                numbered = ref.base in NUMBERED
                self.bases[ref.base, ref.index] = self.element(fields[ref.base + "s"], ref.index) if numbered else fields[ref.base]
        self.steps(self.program.steps)
        self.line("ret i32 0")
        if self.uses_slots:
            self.slots += [f"  %slots = alloca [{SLOTS} x i64]", "  %record = alloca ptr"]
        if self.can_stop:
            self.start("stopped")
            number = self.op(f"phi i64 {', '.join(self.exits)}")
            # Volatile as the tests are, or LLVM would take what one of them read, before another saw the run end.
            status = self.op(f"load atomic volatile i64, ptr {self.field('status')} unordered, align 8")
            result = self.op(f"select i1 {self.op(f'icmp sgt i64 {status}, 0')}, i64 {number}, i64 {status}")
            self.line(f"ret i32 {self.op(f'trunc i64 {result} to i32')}")
        self.module.functions.append(self.text(f"define i32 @{name}(ptr %call{ticks}) #0"))

    def stop_if_asked(self, label: str = "") -> None:
        self.exits.append(f"[ {self.done}, %{self.block} ]")
        super().stop_if_asked(label)

    def element(self, base: str, index: int) -> str:
        return self.op(f"load ptr, ptr {self.op(f'getelementptr ptr, ptr {base}, i64 {index}')}")

    def steps(self, steps: Sequence[Step]) -> None:
        for plain, group in groupby(steps, lambda step: isinstance(step, Call) and not self.writes_dims(step)):
            if plain:
                for row in _rows([step for step in group if isinstance(step, Call)]):
                    if len(row) >= MANY_CALLS and self.target.platform.pointer_bits == 64:
                        self.table(row)
                    else:
                        for call in row:
                            self.run(call)
            else:
                for step in group:
                    self.step(step)

    def step(self, step: Step) -> None:
        match step:
            case Call():
                self.run(step)
            case Branch(cond, then, otherwise):
                yes, no, end = self.labels("then", "else", "end")
                self.branch(self.flag(cond), yes, no)
                for label, inner in ((yes, then), (no, otherwise)):
                    self.start(label)
                    with self.scope():
                        self.steps(inner)
                    self.jump(end)
                self.start(end)
            case Repeat():
                self.repetition(step)
            case Copy(dst, src, size):
                count, source, target = self.index(size), self.place(src), self.place(dst)
                if (src.base, dst.base) == ("input", "output"):  # state may be where it is to go
                    count = self.op(f"select i1 {self.op(f'icmp eq ptr {source}, {target}')}, i64 0, i64 {count}")
                self.line(f'call void @"tcomp_copy"(ptr %call, ptr {source}, ptr {target}, i64 {count})')
            case SetIndex(dst, value):
                self.line(f"store i64 {self.index(value)}, ptr {self.place(dst)}")
        self.forget_dims(step)

    def writes_dims(self, step: Step) -> bool:
        return self.counts and any(ref.base == "dims" for ref in _refs((step,)))

    def forget_dims(self, step: Step) -> None:
        if self.writes_dims(step):
            self.forget((self.dims,))

    def run(self, call: Call) -> None:
        arguments = ["ptr %call"] + [f"ptr {self.place(r)}" for r in call.buffers] + [f"i64 {self.index(s)}" for s in call.scalars]
        self.timed(str(self.number), lambda: self.line(f"call void {symbol(call.symbol)}({', '.join(arguments)})"))
        self.number += 1
        self.done = str(self.number)
        self.stop_if_asked()

    def timed(self, number: str, calling: Callable[[], None]) -> None:
        """The code of a call, and of what a profile tells of it."""
        if not self.ticks:
            return calling()
        start = self.clock()
        calling()
        end = self.clock()
        self.line(f"call void @tcomp_event(ptr %events, i64 {number}, i64 0, i64 {start}, i64 {end})")
        taken = self.op(f"sub i64 {end}, {start}")
        place = self.op(f"getelementptr i64, ptr %ticks, i64 {number}")
        total = self.op(f"add i64 {self.op(f'load i64, ptr {place}')}, {taken}")
        self.line(f"store i64 {total}, ptr {place}")

    def table(self, row: Sequence[Call]) -> None:
        """A loop over records: number of the kernel, of its arguments, and for each argument the number of a slot and what to add to it.
        Slots hold addresses and sizes that only the run knows. Processors of 64 bits pass both alike, as int64; others have no tables."""
        kernels = {name: number for number, name in enumerate(dict.fromkeys(call.symbol for call in row))}
        words, counts, slots = list[int](), dict[int, None](), dict[Known, int]()

        def add(value: Known, more: int) -> None:
            words.extend((slots.setdefault(value, len(slots)), more))

        for call in row:
            count = len(call.buffers) + len(call.scalars)
            counts[count] = None
            words += kernels[call.symbol], count
            for ref in call.buffers:
                add(*_split(ref))
            for scalar in call.scalars:
                add(*((E.const(0), int(scalar.attr)) if scalar.op == "const" else (scalar, 0)))
        for value, number in slots.items():
            what = f"i64 {self.index(value)}" if isinstance(value, Expr) else f"ptr {self.place(Ref(*value))}"
            self.line(f"store {what}, ptr {self.op(f'getelementptr i64, ptr %slots, i64 {number}')}")
        records = self.module.constant(bytes_constant(struct.pack(f"<{len(words)}q", *words)), 8)
        functions = self.module.constant(f"[{len(kernels)} x ptr] [{', '.join(f'ptr {symbol(name)}' for name in kernels)}]", 8)
        self.line(f"store ptr {records}, ptr %record")
        self.uses_slots = True
        v, (head, end) = E.loop_var("call", len(row)), self.labels("calls", "end")

        def body() -> None:
            record = self.op("load ptr, ptr %record")
            number = self.op(f"add i64 {self.bound[v].ref}, {self.number}")
            function = self.op(f"load ptr, ptr {self.op(f'getelementptr ptr, ptr {functions}, i64 {self.word(record, 0)}')}")
            self.timed(number, lambda: self.call_of(record, function, [*counts]))
            self.done = self.op(f"add i64 {number}, 1")
            self.stop_if_asked()

        self.jump(head)
        self.counted(v, "0", str(len(row)), head, end, body)
        self.number += len(row)
        self.done = str(self.number)

    def call_of(self, record: str, function: str, counts: Sequence[int]) -> None:
        """The call that a record says, which has one of these numbers of arguments."""
        labels, (end,) = self.labels(*["arguments"] * len(counts)), self.labels("called")
        cases = " ".join(f"i64 {count}, label %{label}" for count, label in zip(counts, labels, strict=True))
        self.line(f"switch i64 {self.word(record, 1)}, label %{labels[0]} [ {cases} ]")
        for count, label in zip(counts, labels, strict=True):
            self.start(label)
            arguments = ["ptr %call"]
            for n in range(2, 2 + 2 * count, 2):
                slot = self.op(f"getelementptr i64, ptr %slots, i64 {self.word(record, n)}")
                start = self.op(f"load i64, ptr {slot}")
                arguments.append(f"i64 {self.op(f'add i64 {start}, {self.word(record, n + 1)}')}")
            self.line(f"call void {function}({', '.join(arguments)})")
            self.line(f"store ptr {self.op(f'getelementptr i64, ptr {record}, i64 {2 + 2 * count}')}, ptr %record")
            self.jump(end)
        self.start(end)

    def word(self, record: str, number: int) -> str:
        return self.op(f"load i64, ptr {self.op(f'getelementptr i64, ptr {record}, i64 {number}')}")

    def clock(self) -> str:
        # Arm's cycle counter is not for user programs; its system counter is.
        name = "llvm.readcyclecounter" if self.target.arch == "x86_64" else "llvm.readsteadycounter"  # 0 where there is none
        self.module.declarations[name] = f"declare i64 @{name}()"
        return self.op(f"call i64 @{name}()")

    def repetition(self, repeat: Repeat) -> None:
        def body() -> str | None:
            self.steps(repeat.body)
            self.stop_if_asked()
            return None if repeat.condition is None else self.flag(repeat.condition)

        self.forget_dims(repeat)
        count = self.index(repeat.trips)
        head, end = self.labels("loop", "end")
        self.branch(self.op(f"icmp sgt i64 {count}, 0"), head, end)
        self.counted(repeat.var, "0", count, head, end, body)

    def flag(self, ref: Ref) -> str:
        return self.op(f"icmp ne i8 {self.op(f'load i8, ptr {self.place(ref)}')}, 0")

    def place(self, ref: Ref) -> str:
        base, offset = self.bases[ref.base, ref.index], self.index(ref.offset)
        return base if offset == "0" else self.op(f"getelementptr i8, ptr {base}, i64 {offset}")


class _Bind(_Sized):
    """`tcomp_bind`."""

    def emit(self) -> None:
        """Add the function. Each dim is checked before others are computed from it."""
        self.pointers[self.dims] = "%dims"
        arrays: dict[tuple[int, str], Buffer] = {}
        sources = with_sources(d for d in self.program.dims if d.attr.source is not None)
        for v in sources:
            if (source := v.attr.source) is not None and source.value is None and (key := (source.input, source.dtype)) not in arrays:
                arrays[key] = Buffer(f"input{source.input}", source.dtype, (E.dim("n", 0),))
                self.pointers[arrays[key]] = self.op(f"load ptr, ptr {self.op(f'getelementptr ptr, ptr %inputs, i64 {source.input}')}")
        numbers = {d: n for n, d in enumerate(self.program.dims)}
        for v in sources:
            if (source := v.attr.source) is None:
                continue
            value = source.value if source.value is not None else arrays[source.input, source.dtype][source.element]
            if v not in numbers:  # a float, which is read again where it matters
                self.reads[v] = value
                continue
            found = self.index(E.cast(value, INDEX))
            self.line(f"store i64 {found}, ptr {self.op(f'getelementptr i64, ptr %dims, i64 {numbers[v]}')}")
            lo, hi = E.bounds(v)
            outside = [] if lo is None else [self.op(f"icmp slt i64 {found}, {lo}")]
            outside += [] if hi is None else [self.op(f"icmp sgt i64 {found}, {hi}")]
            if outside:
                refused, going_on = self.labels("refused", "next")
                self.branch(outside[0] if len(outside) == 1 else self.op(f"or i1 {outside[0]}, {outside[1]}"), refused, going_on)
                self.start(refused)
                self.line(f"ret i32 {numbers[v] + 1}")
                self.start(going_on)
        self.line("ret i32 0")
        self.module.functions.append(self.text("define i32 @tcomp_bind(ptr %inputs, ptr noalias %dims) #0"))


class _Plan(_Sized):
    """`tcomp_plan`."""

    faults = "false"  # whether an operation so far did not fit

    def arithmetic(self, op: str, args: Sequence[Value], dtype: str) -> Value:
        """Sums and products of sizes tell whether they fit an int64."""
        if op not in ("add", "sub", "mul") or dtype != INDEX:
            return super().arithmetic(op, args, dtype)
        a, b = args
        name = f"llvm.s{op}.with.overflow.i64"
        self.module.declarations.setdefault(name, f"declare {{ i64, i1 }} @{name}(i64, i64)")
        both = self.op(f"call {{ i64, i1 }} @{name}(i64 {a.ref}, i64 {b.ref})")
        self.faults = self.op(f"or i1 {self.faults}, {self.op(f'extractvalue {{ i64, i1 }} {both}, 1')}")
        return Value(self.op(f"extractvalue {{ i64, i1 }} {both}, 0"), dtype)

    def emit(self) -> None:
        """Add the function. A dim that only a run will tell is -1 before: what depends on it is planned with its upper bound."""
        self.pointers[self.dims] = "%dims"
        limits = dict(self.program.counted)

        def known(size: Dim) -> Expr:
            """Whether the dims of a size are known."""
            return E.all_of([d >= 0 for d in E.variables(as_expr(size)) if d in limits])

        def planned(size: Dim) -> Dim:
            if (largest := upper_bound(size, limits)) is None:
                raise CodegenError(f"the extent {size} of an output has no bound")
            return size if largest is size else E.select(known(size), as_expr(size), largest)

        def flag(condition: Expr) -> str:
            return self.value(substitute(condition, self.reads)).ref

        extents = (planned(d) for shape in self.program.output_shapes for d in shape)
        sizes = [self.index(size) for size in (self.program.workspace, *extents)]
        negative = "false"
        for limited in self.program.sizes:
            negative = self.op(f"or i1 {negative}, {flag(known(limited) & (as_expr(limited) < 0))}")
        for number, zero in reversed([*enumerate(self.program.checks)]):  # the first that fails is the one that is reported
            wrong = flag(known(zero) & E.not_equal(as_expr(zero), 0))
            sizes[0] = self.op(f"select i1 {wrong}, i64 {-3 - number}, i64 {sizes[0]}")
        sizes[0] = self.op(f"select i1 {negative}, i64 -1, i64 {sizes[0]}")
        sizes[0] = self.op(f"select i1 {self.faults}, i64 -2, i64 {sizes[0]}")
        for n, size in enumerate(sizes):
            self.line(f"store i64 {size}, ptr {self.op(f'getelementptr i64, ptr %sizes, i64 {n}')}")
        self.line("ret void")
        self.module.functions.append(self.text("define void @tcomp_plan(ptr noalias %dims, ptr noalias %sizes) #0"))
