"""Loop programs to CUDA C++ text: the statements at the top level of a kernel become `__global__` functions, launched in order.

Loops bound to `block.x`, ... become the grid; neighbouring statements without are one function of a single block. A loop bound to
`thread.x`, ... is a *phase*: its iterations run on the (first) threads of the block. Outside of phases all threads do the same, stores by
thread 0. Barriers separate phases where they have to (`barriers`); phases that only copy into shared memory run in the background
(`copies`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from tcomp.codegen.cuda.barriers import Placement, has_threads, is_phase, is_thread_loop, place, plain_statements, threads_along, unproved
from tcomp.codegen.cuda.copies import copy_of, copy_phases, start_copy, whole_vectors
from tcomp.codegen.cuda.function import FunctionBuilder
from tcomp.codegen.cuda.math import MEMORY, REGISTER, helper_texts
from tcomp.codegen.cuda.warp_instructions import WarpInstructions
from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import accesses
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.ir.reducers import Reducer
from tcomp.target import CudaTarget

MAX_BLOCK_THREADS = 1024  # a limit of CUDA on every architecture
MAX_STATIC_SHARED = 48 << 10  # bytes of shared memory that a block may declare; the launch requests more (a limit of CUDA)
MAX_LOCAL = 64 << 10  # bytes of one array of a thread: local memory is reserved for all threads that a GPU can hold, 14 GB of an A100


@dataclass(frozen=True, slots=True)
class Launch:
    """One `__global__` function: `grid` and `block` by axis, the buffers and scalars of the kernel it takes, by number, in order, and the
    bytes of shared memory that a launch requests. `barriers` in its text, all of them proved. One that `reports` values that are out of
    range takes the address of three int64 behind all that, and the number of its kernel's call in the model."""

    function: str
    grid: tuple[Dim, Dim, Dim]
    block: tuple[int, int, int]
    buffers: tuple[int, ...]
    scalars: tuple[int, ...]
    shared: int = 0
    barriers: int = 0
    reports: bool = False


def emit_kernel(kernel: Kernel, target: CudaTarget, trace: Sequence[object] = ()) -> tuple[str, tuple[Launch, ...]]:
    """CUDA C++ of a kernel (temporaries hoisted), and its launches in order. `trace`, the schedule, is printed as a comment. Raises
    `CodegenError` naming the loop or buffer for what a GPU kernel cannot be."""
    used: set[str] = set()
    emitted = [Function(kernel, f"{kernel.name}_{n}", target, used).emit(stmts) for n, stmts in enumerate(L.launches(kernel.body))]
    head = "\n".join(f"// {line}" for line in (f"kernel {kernel.name}", *kernel.notes, *map(str, trace)))
    return "\n\n".join([head, *helper_texts(used), *(text for text, _ in emitted)]) + "\n", tuple(launch for _, launch in emitted)


class Function(FunctionBuilder):
    """Emits one `__global__` function."""

    def __init__(self, kernel: Kernel, name: str, target: CudaTarget, helpers: set[str]) -> None:
        super().__init__(kernel, target, helpers)
        self.name = name
        self.grid: list[Dim] = [1, 1, 1]
        self.warps = WarpInstructions(self)
        self.threads_copy = False  # whether threads copy elements in some of the phases that are copies
        self.current: Stmt | None = None  # the current phase
        self.total: str | None = None  # the register into which loops accumulate
        self.barriers = Placement({}, set())

    def emit(self, stmts: Sequence[Stmt]) -> tuple[str, Launch]:
        """The text of the function, and how it is launched."""
        body = whole_vectors(L.block(*stmts))
        if symbolic := [s for s in L.walk(body) if isinstance(s, L.For) and is_thread_loop(s) and not isinstance(s.extent, int)]:
            what = f"thread loop `{symbolic[0].var.name}` has the symbolic extent {symbolic[0].extent}"
            raise self.fail(what, hint="split it by a constant first")
        threads_along(body, self.block)
        self.warps.survey(body)
        threads = math.prod(self.block)
        if threads > MAX_BLOCK_THREADS:
            raise self.fail(f"a block would have {threads} threads", why=f"at most {MAX_BLOCK_THREADS} are possible")
        self.names = {x: self.fresh(x.name) for xs in (self.kernel.buffers, self.kernel.scalars) for x in xs}
        self.copies = set(copy_phases(self, body))
        self.threads_copy = any(isinstance(x, L.Store) for s in self.copies for x in plain_statements(s))
        self.barriers = place(body, self.copies)
        if missing := unproved(body, self.copies, self.barriers):
            raise self.fail(f"a barrier is not proved in front of\n{missing[0]}", hint="report this kernel as a bug of tcomp")
        self.statement(body)
        self.warps.finish()
        dynamic = self.declare_shared()
        self.note_scalars(*map(as_expr, self.grid))
        buffers = [b for b in self.kernel.buffers if b in self.used_buffers]
        scalars = [v for v in self.kernel.scalars if v in self.used_scalars]
        # What one thread writes and another reads is not `__restrict__`: the compiler would move loads of it across barriers.
        found = accesses(body)
        written = {a.buffer for a in found if a.writes}
        exchanged = written & {a.buffer for a in found if not a.writes or isinstance(a.statement, L.Accumulate)}
        qualified = [("" if b in written else "const ", "" if b in exchanged else "__restrict__ ") for b in buffers]
        parameters = [f"{c}{MEMORY[b.dtype]}* {r}{self.names[b]}" for b, (c, r) in zip(buffers, qualified, strict=True)]
        parameters += [f"const long long {self.names[v]}_" for v in scalars]
        parameters += ["unsigned long long* report", "const long long call"] if self.reports else []
        head = [f"  const {self.type_of(v)} {self.names[v]} = ({self.type_of(v)}){self.names[v]}_;" for v in scalars]
        signature = f'extern "C" __global__ void __launch_bounds__({threads}) {self.name}({", ".join(parameters)}) {{'
        text = "\n".join([signature, *head, *self.declarations, *self.lines, "}"])
        grid, block = (self.grid[0], self.grid[1], self.grid[2]), (self.block[0], self.block[1], self.block[2])
        numbers = tuple(map(self.kernel.buffers.index, buffers)), tuple(map(self.kernel.scalars.index, scalars))
        return text, Launch(self.name, grid, block, *numbers, dynamic, text.count("__syncthreads();"), self.reports)

    def statement(self, s: Stmt) -> None:
        """A statement: outside of phases, behind the barrier that it needs, by all threads alike; inside of a phase as one thread executes
        it."""
        if self.current is None:
            if s in self.barriers.before or (is_phase(s) and s not in self.copies):
                self.warps.finish()
            self.synchronize(s)
            if isinstance(s, L.While) and has_threads(s):
                raise self.fail("a while loop around thread loops cannot be compiled for a GPU")
            if is_phase(s):
                self.phase(s)
                return
        copying = self.current in self.copies
        match s:
            case L.Block(stmts):
                for inner in stmts:
                    self.statement(inner)
            case L.For(var, extent, body, kind) if kind in L.BLOCK_AXES:
                self.block_loop(var, extent, L.BLOCK_AXES.index(kind))
                self.statement(body)
            case L.For(var, extent, body, kind) if self.current is None:
                with self.loop_over(var, extent, kind):
                    self.statement(body)
                    self.warps.finish()
            case L.For():
                self.loop(s)
            case L.If(cond, then, otherwise):
                head = f"if ({self.expression(cond)})"
                for word, branch in ((head, then), ("else", otherwise)):
                    if branch is not None:
                        with self.braces(word):
                            self.statement(branch)
                            if self.current is None:
                                self.warps.finish()
            case L.While(cond, body):
                with self.braces("while (true)"):
                    self.line(f"if (!({self.expression(cond)})) break;")
                    self.statement(body)
            case L.Store() if copying and (copy := copy_of(self, s, None)) is not None:
                start_copy(self, copy)
            case L.Store(buffer, indices, value):
                self.assign(buffer, indices, value)
            case L.Accumulate(_, _, value, reducer) if self.total is not None:
                self.line(f"{self.total} = {self.accumulated(self.total, value, reducer)};")
            case L.Accumulate(buffer, indices, value, reducer):
                place = f"{self.names[buffer]}[{self.address(buffer, indices)}]"
                new = self.accumulated(self.loaded(buffer.dtype, place), value, reducer)
                self.line(f"{place} = {self.stored(buffer.dtype, new)};")
            case L.Prefetch():
                pass  # other threads run while one waits
            case L.Allocate(buffer, body):
                if self.current is None:
                    self.allocate_in_block(buffer, body)
                else:
                    self.allocate_in_thread(buffer)
                self.statement(body)
            case L.Call():
                self.warps.emit(s)
            case _:
                raise self.fail(f"a {type(s).__name__} cannot be compiled for a GPU")

    def block_loop(self, var: Expr, extent: Dim, axis: int) -> None:
        """A loop whose iterations are blocks of the grid."""
        if self.current is not None:
            raise self.fail(f"loop `{var.name}` is bound to {L.BLOCK_AXES[axis]} inside a thread")
        if any(v.attr.extent is not None or v.name in {x.name for x in self.variables} for v in E.variables(as_expr(extent))):
            raise self.fail(f"the extent of block loop `{var.name}` depends on a loop", hint="guard the inside instead")
        if self.grid[axis] != 1:
            raise self.fail(f"two loops are bound to {L.BLOCK_AXES[axis]}")
        self.grid[axis] = extent
        self.declare(var, f"blockIdx.{'xyz'[axis]}")

    def synchronize(self, s: Stmt) -> None:
        """In front of a statement: the wait for the copies of this thread, and the barrier behind which all copies have arrived."""
        if s in self.barriers.before:
            pending = self.barriers.before[s]
            if pending is not None and self.threads_copy:
                self.line(f"{self.helper('wait_for_copies')}<{pending}>();")
            if self.warps.background:
                self.line(f"{self.helper('publish')}();")
            if math.prod(self.block) > 1:
                self.line("__syncthreads();")

    def allocate_in_block(self, buffer: Buffer, body: Stmt) -> None:
        """A temporary that several phases use: registers of each thread, or shared memory."""
        if buffer.scope != "register" or not has_threads(body):
            return self.share(buffer, math.prod(self.constant(buffer, d) for d in buffer.shape))
        own = self.private_dims[buffer] = self.private_dimensions(buffer, body)
        size = math.prod(self.constant(buffer, buffer.shape[d]) for d in own) // self.warps.threads_sharing(buffer)
        self.names[buffer] = self.fresh(buffer.name)
        self.declarations.append(f"  {MEMORY[buffer.dtype]} {self.names[buffer]}[{size}];")

    def declare_shared(self) -> int:
        """Declare the buffers in shared memory: as arrays, or as parts of memory that the launch requests if large; returns its size in
        bytes."""
        aligned = self.warps.alignment
        sizes = {b: -(-count * itemsize(b.dtype) // aligned) * aligned for b, count in self.shared.items()}
        total, most = sum(sizes.values()), self.target.shared_per_block
        if total > most:
            raise self.fail(f"a block would take {total} bytes of shared memory", f"at most {most} are possible on {self.target}")
        if total <= MAX_STATIC_SHARED:
            for b, count in self.shared.items():
                self.declarations.append(f"  __shared__ __align__({aligned}) {MEMORY[b.dtype]} {self.names[b]}[{count}];")
            return 0
        whole, start = self.fresh("block_memory"), 0
        self.declarations.append(f"  extern __shared__ __align__({aligned}) unsigned char {whole}[];")
        for b, size in sizes.items():
            kind = MEMORY[b.dtype]
            self.declarations.append(f"  {kind}* const {self.names[b]} = reinterpret_cast<{kind}*>({whole} + {start});")
            start += size
        return total

    def private_dimensions(self, buffer: Buffer, body: Stmt) -> tuple[int, ...]:
        """The dimensions of a register buffer that are private to a thread: those that are not indexed by the thread's number or its
        digits."""
        numbered: dict[int, Expr] | None = None
        within_warp = self.warps.lanes if buffer in self.warps.distributions else set()
        for a in (a for a in accesses(body) if a.buffer is buffer):
            threads = {x.var: E.var(x.kind) for x in a.loops if is_thread_loop(x)}
            own = {d: threads[i] for d, i in enumerate(a.indices) if i in threads}
            for v in (v for v in threads if v not in within_warp and v not in a.indices):
                if not (digits := _thread_digits(v, a.indices)):
                    raise self.fail(f"register buffer `{buffer.name}` is accessed by threads that it does not belong to")
                own |= {d: E.substitute(a.indices[d], {v: threads[v]}) for d in digits}
            if numbered not in (None, own):
                raise self.fail(f"register buffer `{buffer.name}` is divided among the threads in several ways")
            numbered = own
        return tuple(d for d in range(len(buffer.shape)) if d not in (numbered or ()))

    def phase(self, s: Stmt) -> None:
        """A phase, by the threads that it has iterations for."""
        if (
            isinstance(s, L.For)
            and is_thread_loop(s)
            and isinstance(leaf := _leaf(s.body), L.Accumulate)
            and s.var not in E.variables(*leaf.indices)
        ):
            return self.reduce_across_threads(s, leaf)
        axes = {x.kind for x in L.walk(s) if isinstance(x, L.For) and is_thread_loop(x)}
        sizes = zip("xyz", self.block, L.THREAD_AXES, strict=True)
        tests = {a: f"threadIdx.{a} == 0" for a, n, kind in sizes if n > 1 and kind not in axes}
        if together := self.warps.threads_of(s):
            tests.pop("x", None)
            tests = ({"x": f"threadIdx.x < {together}"} if self.block[0] > together else {}) | tests
        self.current = s
        with self.braces(f"if ({' && '.join(tests.values())})" if tests else ""), self.warps.around(s):
            self.statement(s)
        self.current = None
        if s in self.barriers.groups and self.threads_copy:
            self.line(f"{self.helper('complete_group')}();")

    def reduce_across_threads(self, s: L.For, leaf: L.Accumulate) -> None:
        """All threads accumulate into one element: their values lie side by side in shared memory and are combined in halves, as a binary
        tree."""
        if self.block != [self.block[0], 1, 1] or s.kind != "thread.x":
            raise self.fail(f"thread loop `{s.var.name}` accumulates into one element of `{leaf.buffer.name}` and is not the only axis")
        assert isinstance(s.extent, int)
        width = 1 << (s.extent - 1).bit_length()
        parts = Buffer(f"{leaf.buffer.name}_tree", leaf.value.dtype, (width,), "shared")
        self.share(parts, width)
        lane = E.loop_var(self.fresh("lane"), width)
        self.names[lane] = lane.name
        with self.braces("" if s.extent == self.block[0] else f"if (threadIdx.x < {s.extent})"):
            self.declare(s.var, "threadIdx.x")
            value = E.select(s.body.cond, leaf.value, leaf.reducer.identity) if isinstance(s.body, L.If) else leaf.value
            self.assign(parts, (s.var,), value)
        half, name, dtype = self.fresh("half"), self.names[parts], parts.dtype
        self.line("__syncthreads();")
        with self.braces(f"for (int {half} = {width // 2}; {half} > 0; {half} /= 2)"):
            reach = f"threadIdx.x < {half}" + (f" && threadIdx.x + {half} < {s.extent}" if width != s.extent else "")
            with self.braces(f"if ({reach})"):
                a, b = (self.loaded(dtype, f"{name}[threadIdx.x{more}]") for more in ("", f" + {half}"))
                self.line(f"{name}[threadIdx.x] = {self.stored(dtype, self.combined(leaf.reducer, a, b))};")
            self.line("__syncthreads();")
        with self.braces("if (threadIdx.x == 0)"):
            self.assign(leaf.buffer, leaf.indices, leaf.reducer(E.read(leaf.buffer, leaf.indices), E.read(parts, (E.const(0, INDEX),))))

    def allocate_in_thread(self, buffer: Buffer) -> None:
        """A temporary that is private to a thread."""
        size = math.prod(self.constant(buffer, d) for d in buffer.shape) // self.warps.threads_sharing(buffer)
        taken = size * itemsize(buffer.dtype)
        if buffer.scope == "shared":
            raise self.fail(f"shared buffer `{buffer.name}` is allocated by one thread")
        if taken > MAX_LOCAL:
            raise self.fail(f"temporary `{buffer.name}` takes {taken} bytes of each thread", why=f"at most {MAX_LOCAL}")
        self.private_dims[buffer] = tuple(range(len(buffer.shape)))
        self.names[buffer] = self.fresh(buffer.name)
        self.line(f"{MEMORY[buffer.dtype]} {self.names[buffer]}[{max(1, size)}];")

    def loop(self, s: L.For) -> None:
        """A loop inside of a phase, by its kind."""
        if is_thread_loop(s):
            axis, thread = L.THREAD_AXES.index(s.kind), f"threadIdx.{s.kind[-1]}"
            with nullcontext() if s.extent == self.block[axis] else self.braces(f"if ({thread} < {s.extent})"):
                self.declare(s.var, thread)
                self.statement(s.body)
            return
        outer, inner = _hoisted_conditions(s)
        if outer is not None:  # a condition that no iteration changes
            self.statement(L.If(outer, inner))
            return
        assert isinstance(inner, L.For)
        copying, plain = self.current in self.copies, self.total is None
        if plain and (reduction := _reduction_into_element(inner)) is not None and reduction.buffer.scope != "register":
            self.reduce_in_register(inner, reduction)
        elif copying and s.kind == L.VECTORIZED and (copy := copy_of(self, inner.body, inner)) is not None:
            start_copy(self, copy)
        elif plain and not copying and s.kind == L.VECTORIZED and (leaf := _leaf(inner.body)) is not None and self.target.vector_access:
            self.vectorized(inner, leaf)
        else:
            with self.loop_over(inner.var, inner.extent, inner.kind):
                self.statement(inner.body)

    @contextmanager
    def loop_over(self, var: Expr, extent: Dim, kind: str) -> Iterator[None]:
        """A `for` loop, unrolled by the compiler where its kind says so."""
        limit = self.expression(as_expr(extent))
        name = self.names[var] = self.fresh(var.name)
        self.variables.add(var)
        if kind in (L.UNROLLED, L.VECTORIZED):
            self.line("#pragma unroll")
        with self.braces(f"for ({self.type_of(var)} {name} = 0; {name} < {limit}; ++{name})"):
            yield

    def reduce_in_register(self, s: L.For, leaf: L.Accumulate) -> None:
        """Loops that accumulate into one element: it is loaded before and stored after."""
        dtype = leaf.buffer.dtype
        with self.braces(""):
            at, kind = self.fresh("at"), self.type_of(self.linear(leaf.buffer, leaf.indices))
            self.line(f"const {kind} {at} = {self.address(leaf.buffer, leaf.indices)};")
            place, total = f"{self.names[leaf.buffer]}[{at}]", self.fresh("total")
            self.line(f"{REGISTER[dtype]} {total} = {self.loaded(dtype, place)};")
            self.total = total
            self.loop(s)
            self.total = None
            self.line(f"{place} = {self.stored(dtype, total)};")

    def vectorized(self, s: L.For, leaf: L.Store | L.Accumulate) -> None:
        """Lanes side by side: contiguous operands are loaded as vectors first, a contiguous result is stored as one last."""
        assert isinstance(s.extent, int)
        lanes, guarded = s.extent, isinstance(s.body, L.If)
        vectors: dict[Expr, str] = {}
        for r in (
            [] if guarded else [e for e in (*E.needed_operands(leaf.value), leaf.value) if e.op == "read" and e.attr.scope != "register"]
        ):
            if (at := self.vector_start(r.attr, r.args, s.var, lanes)) is not None:
                kind, name = f"{self.helper('Vector')}<{MEMORY[r.attr.dtype]}, {lanes}>", self.fresh(f"{r.attr.name}_v")
                self.begin_statement(at)
                begin = self.place(r.attr, at)
                self.line(f"const {kind} {name} = *reinterpret_cast<const {kind}*>({self.use(r.attr)} + {begin});")
                vectors[r] = name
        first = None
        if isinstance(leaf, L.Store) and not guarded and leaf.buffer.scope != "register":
            first = self.vector_start(leaf.buffer, leaf.indices, s.var, lanes)
        if first is not None:
            result, kind = self.fresh(f"{leaf.buffer.name}_v"), f"{self.helper('Vector')}<{MEMORY[leaf.buffer.dtype]}, {lanes}>"
            self.line(f"{kind} {result};")
        with self.loop_over(s.var, lanes, s.kind):
            lane = self.names[s.var]
            self.loaded_lanes = {r: self.loaded(r.dtype, f"{name}.v[{lane}]") for r, name in vectors.items()}
            if first is not None:
                self.line(f"{result}.v[{lane}] = {self.stored(leaf.buffer.dtype, self.expression(leaf.value))};")
            else:
                self.statement(s.body)
            self.loaded_lanes = {}
        if first is not None:
            self.begin_statement(first)
            self.line(f"*reinterpret_cast<{kind}*>({self.use(leaf.buffer)} + {self.place(leaf.buffer, first)}) = {result};")

    def linear(self, buffer: Buffer, indices: Sequence[Expr]) -> Expr:
        """The position of an element: row-major, or that of the register that holds it."""
        return self.warps.register_of(buffer, indices) if buffer in self.warps.distributions else super().linear(buffer, indices)

    def assign(self, buffer: Buffer, indices: Sequence[Expr], value: Expr) -> None:
        """Store a value."""
        position = self.linear(buffer, indices)
        self.begin_statement(value, position)
        text = self.value(value)
        self.line(f"{self.use(buffer)}[{self.place(buffer, position)}] = {self.stored(buffer.dtype, text)};")

    def accumulated(self, old: str, value: Expr, reducer: Reducer) -> str:
        """The text of reducer(`old`, value)."""
        if reducer.op == "add" and value.dtype in ("float32", "float64") and value.op == "mul":
            self.begin_statement(*value.args)
            a, b = (self.value(x) for x in value.args)
            return self.float_operator("fma", value.dtype, [a, b, old])
        return self.combined(reducer, old, self.expression(value))

    def combined(self, reducer: Reducer, old: str, term: str) -> str:
        """The text of what a reducer makes of two values, which are named first where it uses them more than once."""
        uses = Counter(a for e in E.walk(reducer.combine) for a in e.args)
        texts = {}
        for v, text in ((reducer.lhs, old), (reducer.rhs, term)):
            if uses[v] > 1 and not text.isidentifier():
                name = self.fresh("part")
                self.line(f"const {REGISTER[v.dtype]} {name} = {text};")
                text = name
            texts[v] = text
        self.begin_statement(reducer.combine)
        self.scopes.append(texts)
        result = self.value(reducer.combine)
        self.scopes.pop()
        return result


def _thread_digits(v: Expr, indices: Sequence[Expr]) -> list[int]:
    """The indices that depend on the number of a thread alone, if they tell it from all others."""
    found, last = [d for d, i in enumerate(indices) if E.variables(i) == (v,) and not E.reads(i)], E.bounds(v)[1]
    values = [tuple(E.evaluate_int(indices[d], {v: n}) for d in found) for n in range(0 if last is None else last + 1)]
    return found if values and len(set(values)) == len(values) else []


def _leaf(body: Stmt) -> L.Store | L.Accumulate | None:
    """The store that is all of a body, under a condition or not."""
    if isinstance(body, L.If) and body.otherwise is None:
        body = body.then
    return body if isinstance(body, L.Store | L.Accumulate) else None


def _reduction_into_element(s: L.For) -> L.Accumulate | None:
    """The accumulation below loops (and conditions) that do not move the element it goes to."""
    loops: set[Expr] = set()
    x: Stmt = s
    while True:
        match x:
            case L.For(var, _, body) if not is_thread_loop(x):
                loops.add(var)
                x = body
            case L.If(cond, then, None):
                if any(r.attr.scope == "register" for r in E.reads(cond)):
                    return None
                x = then
            case _:
                break
    if not isinstance(x, L.Accumulate) or loops & set(E.variables(*x.indices)) or E.reads(*x.indices):
        return None
    return None if any(r.attr is x.buffer for r in E.reads(x.value)) else x


def _hoisted_conditions(s: L.For) -> tuple[Expr | None, Stmt]:
    """The conditions at the top of a loop's body that do not depend on it, and the loop without them."""
    loops = [s]
    while isinstance(loops[-1].body, L.For) and loops[-1].body.kind not in L.GPU_AXES:
        loops.append(loops[-1].body)
    body = loops[-1].body
    if not isinstance(body, L.If) or body.otherwise is not None:
        return None, s
    conditions = E.conjuncts(body.cond)
    fixed = [c for c in conditions if not E.reads(c) and not any(x.var in E.variables(c) for x in loops)]
    if not fixed or any(E.reads(as_expr(x.extent)) for x in loops):
        return None, s
    rest = [c for c in conditions if c not in fixed]
    new: Stmt = L.If(E.all_of(rest), body.then) if rest else body.then
    for x in reversed(loops):
        new = replace(x, body=new)
    return E.all_of(fixed), new
