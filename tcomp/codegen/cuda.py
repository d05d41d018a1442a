"""Loop programs to CUDA C++ text.

The statements at the top level of a kernel become `__global__` functions, launched one after the other:

- A statement with loops bound to `block.x`, ... is a function of its own; those loops become its grid.
- Neighbouring statements without are one function of a single block.

Within a function, a loop bound to `thread.x`, ... is a *phase*: its iterations run on the threads of the block (the first ones, where
the block has more). What stands outside of phases is done by all threads alike (loops, conditions), stores by thread 0. A barrier
separates two phases whenever one touches what another thread may have written in the other; it is found from the buffers that each
reads and writes, and from the indices that keep a thread to elements of its own.

- In a phase that is a thread loop around one `Accumulate` into an element that does not depend on the thread, the threads meet in
  that element: they are folded as a binary tree in shared memory, always in the same order.
- A register buffer allocated outside of a phase exists once per thread: its dimensions that are indexed by the thread's own number
  vanish.
- A vectorized loop is unrolled; contiguous, aligned accesses of up to 16 bytes become one load or store. Kernels compiled for a target
  with the feature "scalar" do without (buffers need not be aligned to 16 bytes then).
- An accumulation into one element over inner loops stays in a register.
- An *instruction* (`Call`) of a warp is executed by the first 32 threads along x (warps are numbered by y and z). A register buffer that
  it touches is divided among them: a thread holds its elements of each tile, as the fragments of the instruction say.

Index arithmetic is done in 32 bits where the ranges of the variables prove that it fits. Floats are never contracted or flushed:
sums of products accumulate with an explicit fused multiply-add.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tcomp.codegen.cuda_instructions import Warps
from tcomp.codegen.cuda_math import HALF, MEMORY, REGISTER, function, helper_texts, literal
from tcomp.errors import CodegenError
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.dtypes import integer_range, is_float, is_integer, itemsize
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, bounds
from tcomp.ir.instruction import WARP
from tcomp.ir.loops import Buffer, Kernel, Stmt
from tcomp.ir.simplify import from_linear, linear, prove, simplify
from tcomp.target import Target

MOST_THREADS = 1024  # of a block
SHARED_LIMIT = 48 << 10  # bytes of shared memory that a block may have without asking for more
LOCAL_LIMIT = 64 << 10  # bytes of one array that a thread keeps to itself
_LINE = 110  # longer expressions are cut into named parts
_DEEP = 30
_RESERVED = """
    auto bool break case char class const continue default delete do double else enum extern false float for friend goto
    half if inline int long new odd operator private protected public register return short signed sizeof static struct
    switch template this true typedef union unsigned using virtual void volatile while bits power saturate minimum maximum
    bfloat min max and or xor not
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """One `__global__` function: `grid` and `block` by axis, the buffers and scalars of the kernel it takes, by number, in order."""

    function: str
    grid: tuple[Dim, Dim, Dim]
    block: tuple[int, int, int]
    buffers: tuple[int, ...]
    scalars: tuple[int, ...]


def emit_kernel(kernel: Kernel, target: Target, trace: Sequence[object] = ()) -> tuple[str, tuple[Launch, ...]]:
    """CUDA C++ of a kernel (temporaries hoisted), and its launches in order. `trace`, the schedule, is printed as a comment.

    Raises `CodegenError` naming the loop or buffer for what a GPU kernel cannot be.
    """
    used: set[str] = set()
    functions, launches = [], []
    for number, stmts in enumerate(_launches(kernel.body)):
        emitter = Function(kernel, f"{kernel.name}_{number}", target, used)
        text, launch = emitter.emit(stmts)
        functions.append(text)
        launches.append(launch)
    head = [f"// {line}" for line in (f"kernel {kernel.name}", *kernel.notes, *map(str, trace))]
    return "\n\n".join(["\n".join(head), *helper_texts(used), *functions]) + "\n", tuple(launches)


def _launches(body: Stmt) -> Iterator[list[Stmt]]:
    single: list[Stmt] = []
    for s in body.stmts if isinstance(body, L.Block) else (body,):
        if any(isinstance(x, L.For) and x.kind.startswith("block") for x in L.walk(s)):
            if single:
                yield single
            yield [s]
            single = []
        else:
            single.append(s)
    if single:
        yield single


# ---------------------------------------------------------------- what a phase touches


_Own = frozenset[tuple[int, str]]  # (dimension, axis)


@dataclass(slots=True)
class _Touched:
    """Buffers read and written; each with the dimensions that every access indexes by the number of the thread, if there are any:
    then threads stay with elements of their own."""

    reads: dict[Buffer, _Own | None]
    writes: dict[Buffer, _Own | None]

    def conflicts(self, later: _Touched) -> bool:
        """Whether some thread of `later` may touch what another thread of this wrote, or write what it read."""

        def meet(a: dict[Buffer, _Own | None], b: dict[Buffer, _Own | None]) -> bool:
            return any(own is None or own != b[buffer] for buffer, own in a.items() if buffer in b)

        return meet(self.writes, later.reads) or meet(self.writes, later.writes) or meet(self.reads, later.writes)

    def add(self, other: _Touched) -> None:
        for mine, theirs in ((self.reads, other.reads), (self.writes, other.writes)):
            for buffer, own in theirs.items():
                mine[buffer] = own if mine.get(buffer, own) == own else None


def _touched(stmt: Stmt) -> _Touched:
    found = _Touched({}, {})
    alone = None if _has_threads(stmt) else frozenset({(0, "one thread")})

    def visit(s: Stmt, threads: tuple[L.For, ...], together: bool = False) -> None:
        def touch(where: dict[Buffer, _Own | None], buffer: Buffer, indices: Sequence[Expr]) -> None:
            places = frozenset((d, t.kind) for t in threads for d, i in enumerate(indices) if i is t.var)
            own = places if {kind for _, kind in places} == {t.kind for t in threads} else None
            own = None if together else own if threads else alone
            where[buffer] = own if where.get(buffer, own) == own else None

        for r in E.reads(*L.expressions(s)):
            touch(found.reads, r.attr, r.args)
        if isinstance(s, L.Store | L.Accumulate):
            touch(found.writes, s.buffer, s.indices)
        if isinstance(s, L.Accumulate):
            touch(found.reads, s.buffer, s.indices)
        if isinstance(s, L.For) and s.kind.startswith("thread"):
            threads = (*threads, s)
        for child in L.children(s):
            visit(child, threads, together or isinstance(s, L.Call))

    visit(stmt, ())
    for where in (found.reads, found.writes):
        for buffer in [b for b in where if b.scope == "register"]:
            del where[buffer]
    return found


def _has_threads(s: Stmt) -> bool:
    return any(isinstance(x, L.For) and x.kind.startswith("thread") for x in L.walk(s))


# ---------------------------------------------------------------- one function


class Function:
    """Emits one `__global__` function."""

    def __init__(self, kernel: Kernel, name: str, target: Target, helpers: set[str]) -> None:
        self.kernel, self.name, self.target, self.helpers = kernel, name, target, helpers
        self.lines: list[str] = []
        self.declarations: list[str] = []
        self.indent = 1
        self.taken = set(_RESERVED.split())
        self.names: dict[Buffer | Expr, str] = {}  # of buffers and variables
        self.used_buffers: dict[Buffer, None] = {}
        self.used_scalars: dict[Expr, None] = {}
        self.grid: list[Dim] = [1, 1, 1]
        self.block = [1, 1, 1]
        self.shared = 0
        self.kept: dict[Buffer, tuple[int, ...]] = {}  # of register buffers of the block: the dimensions that are left
        self.warps = Warps(self)
        self.scopes: list[dict[Expr, str]] = [{}]  # names of values of the statement at hand
        self.lanes: dict[Expr, str] = {}  # elements of vectors that have been loaded
        self.uses: Counter[Expr] = Counter()
        self.pending = _Touched({}, {})
        self.written: set[Buffer] = set()
        self.depth = 0
        self.variables: dict[Expr, None] = {}

    def fail(self, what: str, why: str = "", hint: str = "") -> CodegenError:
        return CodegenError(what, where=self.kernel.name, why=why, hint=hint)

    def emit(self, stmts: Sequence[Stmt]) -> tuple[str, Launch]:
        body = L.block(*stmts)
        for s in L.walk(body):
            if isinstance(s, L.For) and s.kind.startswith("thread"):
                axis = "xyz".index(s.kind[-1])
                if not isinstance(s.extent, int):
                    raise self.fail(f"thread loop `{s.var.name}` has the symbolic extent {s.extent}", hint="split it by a constant first")
                self.block[axis] = max(self.block[axis], s.extent)
            if isinstance(s, L.Store | L.Accumulate):
                self.written.add(s.buffer)
            if isinstance(s, L.Call):
                self.block[0] = max(self.block[0], WARP)
        self.warps.survey(body)
        threads = math.prod(self.block)
        if threads > MOST_THREADS:
            raise self.fail(f"a block would have {threads} threads", why=f"at most {MOST_THREADS} are possible")
        for b in self.kernel.buffers:
            self.names[b] = self.fresh(b.name)
        for v in self.kernel.scalars:
            self.names[v] = self.fresh(v.name)
        self.outside(body)
        if self.shared > SHARED_LIMIT:
            raise self.fail(f"a block would take {self.shared} bytes of shared memory", why=f"at most {SHARED_LIMIT} are possible")
        for d in self.grid:
            self.note(as_expr(d))
        buffers = [b for b in self.kernel.buffers if b in self.used_buffers]
        scalars = [v for v in self.kernel.scalars if v in self.used_scalars]
        parameters = [self.parameter(b) for b in buffers] + [f"const long long {self.names[v]}_" for v in scalars]
        head = [f"  const {self.index_type(v)} {self.names[v]} = ({self.index_type(v)}){self.names[v]}_;" for v in scalars]
        signature = f'extern "C" __global__ void __launch_bounds__({threads}) {self.name}({", ".join(parameters)}) {{'
        text = "\n".join([signature, *head, *self.declarations, *self.lines, "}"])
        numbers = {b: n for n, b in enumerate(self.kernel.buffers)} | {v: n for n, v in enumerate(self.kernel.scalars)}
        x, y, z = self.block
        grid = (self.grid[0], self.grid[1], self.grid[2])
        return text, Launch(self.name, grid, (x, y, z), tuple(numbers[b] for b in buffers), tuple(numbers[v] for v in scalars))

    def parameter(self, b: Buffer) -> str:
        const = "" if b in self.written else "const "
        return f"{const}{MEMORY[b.dtype]}* __restrict__ {self.names[b]}"

    # ------------------------------------------------------------ text

    def line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        self.line(f"{head} {{".lstrip())
        with self.scope():
            yield
        self.line("}")

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.indent += 1
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.indent -= 1

    def fresh(self, name: str) -> str:
        name = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII) or "_"
        candidate, number = name, 1
        while candidate in self.taken or candidate.startswith("__"):
            number += 1
            candidate = f"{name.lstrip('_') or 'v'}_{number}"
        self.taken.add(candidate)
        return candidate

    def note(self, e: Expr) -> None:
        for v in E.variables(e):
            if v in self.kernel.scalars:
                self.used_scalars[v] = None

    # ------------------------------------------------------------ outside of phases: all threads alike

    def outside(self, s: Stmt) -> None:
        match s:
            case L.Block(stmts):
                for inner in stmts:
                    self.outside(inner)
            case L.Allocate(buffer, body) if buffer.scope == "shared" or _has_threads(body):
                self.allocate_block(buffer, body)
                self.outside(body)
            case L.For(var, extent, body, kind) if kind.startswith("block"):
                axis = "xyz".index(kind[-1])
                if any(v.attr.extent is not None or v.name in {x.name for x in self.variables} for v in E.variables(as_expr(extent))):
                    raise self.fail(f"the extent of block loop `{var.name}` depends on a loop", hint="guard the inside instead")
                if self.grid[axis] != 1:
                    raise self.fail(f"two loops are bound to {kind}")
                self.grid[axis] = extent
                self.declare(var, f"blockIdx.{kind[-1]}")
                self.outside(body)
            case L.For(var, extent, body) if not s.kind.startswith("thread") and _has_threads(body):
                with self.loop_of(var, extent, s.kind):
                    self.outside(body)
                    if self.pending.conflicts(_touched(body)):
                        self.barrier()  # the next iteration begins anew
            case L.If(cond, then, otherwise) if _has_threads(s):
                self.before(_Touched({r.attr: None for r in E.reads(cond)}, {}))
                head = self.expression(cond)
                for word, part in (("if (" + head + ")", then), ("else", otherwise)):
                    if part is not None:
                        with self.braces(word):
                            self.outside(part)
            case L.While() if _has_threads(s):
                raise self.fail("a while loop around thread loops cannot be compiled for a GPU")
            case _:
                self.phase(s)

    def allocate_block(self, buffer: Buffer, body: Stmt) -> None:
        if buffer.scope == "register" and _has_threads(body):
            kept = self.private_dimensions(buffer, body)
            self.kept[buffer] = kept
            size = math.prod(self.constant(buffer, buffer.shape[d]) for d in kept) // self.warps.sharing(buffer)
            self.names[buffer] = self.fresh(buffer.name)
            self.declarations.append(f"  {MEMORY[buffer.dtype]} {self.names[buffer]}[{size}];")
            return
        size = math.prod(self.constant(buffer, d) for d in buffer.shape)
        self.share(buffer, size)

    def share(self, buffer: Buffer, size: int) -> None:
        self.shared += -(-size * itemsize(buffer.dtype) // 16) * 16
        self.names[buffer] = self.fresh(buffer.name)
        self.declarations.append(f"  __shared__ __align__(16) {MEMORY[buffer.dtype]} {self.names[buffer]}[{max(1, size)}];")

    def constant(self, buffer: Buffer, extent: Dim) -> int:
        if not isinstance(extent, int):
            raise self.fail(f"temporary `{buffer.name}` has no constant shape: {extent}", hint="pass it as a workspace buffer")
        return extent

    def private_dimensions(self, buffer: Buffer, body: Stmt) -> tuple[int, ...]:
        """The dimensions of a register buffer of the block that a thread has to itself: all but those that number the threads."""
        dropped: set[int] | None = None

        def visit(s: Stmt, threads: frozenset[Expr]) -> None:
            nonlocal dropped
            accesses = [r.args for r in E.reads(*L.expressions(s)) if r.attr is buffer]
            if isinstance(s, L.Store | L.Accumulate) and s.buffer is buffer:
                accesses.append(s.indices)
            for indices in accesses:
                own = {d for d, i in enumerate(indices) if i in threads}
                if len({indices[d] for d in own}) < len(threads):
                    raise self.fail(f"register buffer `{buffer.name}` is accessed by threads that it does not belong to")
                if dropped not in (None, own):
                    raise self.fail(f"register buffer `{buffer.name}` is divided among the threads in several ways")
                dropped = own
            if isinstance(s, L.For) and s.kind.startswith("thread"):
                threads = threads | {s.var}
            for child in L.children(s):
                visit(child, threads)

        visit(body, frozenset())
        return tuple(d for d in range(len(buffer.shape)) if d not in (dropped or ()))

    def barrier(self) -> None:
        if math.prod(self.block) > 1:
            self.line("__syncthreads();")
        self.pending = _Touched({}, {})

    def before(self, touched: _Touched) -> None:
        """A barrier, if what follows touches what other threads did since the last one."""
        if self.pending.conflicts(touched):
            self.barrier()
        self.pending.add(touched)

    def phase(self, s: Stmt) -> None:
        if isinstance(s, L.Block) and not s.stmts:
            return
        self.before(_touched(s))
        if isinstance(s, L.For) and (leaf := _meeting(s)) is not None:
            self.tree(s, *leaf)
            return
        axes = {x.kind for x in L.walk(s) if isinstance(x, L.For) and x.kind.startswith("thread")}
        idle = [f"threadIdx.{a} == 0" for a, n in zip("xyz", self.block, strict=True) if n > 1 and f"thread.{a}" not in axes]
        if self.warps.execute(s):
            idle = [f"threadIdx.x < {WARP}"] * (self.block[0] > WARP) + [test for test in idle if "x" not in test[:11]]
        if idle:
            with self.braces(f"if ({' && '.join(idle)})"):
                self.inside(s)
        else:
            with self.braces(""):
                self.inside(s)

    def tree(self, s: L.For, leaf: L.Accumulate, guard: Expr | None) -> None:
        """All threads accumulate into one element: values side by side in shared memory, folded in halves."""
        if self.block != [self.block[0], 1, 1] or s.kind != "thread.x":
            raise self.fail(f"thread loop `{s.var.name}` accumulates into one element of `{leaf.buffer.name}` and is not the only axis")
        assert isinstance(s.extent, int)
        width = 1 << (s.extent - 1).bit_length()
        parts = Buffer(f"{leaf.buffer.name}_tree", leaf.value.dtype, (width,), "shared")
        self.share(parts, width)
        lane = E.loop_var(self.fresh("lane"), width)
        self.names[lane] = lane.name
        whole = s.extent == self.block[0]
        with self.braces("" if whole else f"if (threadIdx.x < {s.extent})"):
            self.declare(s.var, "threadIdx.x")
            value = leaf.value if guard is None else E.select(guard, leaf.value, leaf.reducer.identity)
            self.assign(parts, (s.var,), value)
        half = self.fresh("half")
        self.line("__syncthreads();")
        with self.braces(f"for (int {half} = {width // 2}; {half} > 0; {half} /= 2)"):
            reach = f"threadIdx.x < {half}" + (f" && threadIdx.x + {half} < {s.extent}" if width != s.extent else "")
            name, dtype = self.names[parts], parts.dtype
            with self.braces(f"if ({reach})"):
                a, b = (self.loaded(dtype, f"{name}[threadIdx.x{more}]") for more in ("", f" + {half}"))
                self.line(f"{name}[threadIdx.x] = {self.stored(dtype, self.combined(leaf.reducer, a, b))};")
            self.line("__syncthreads();")
        with self.braces("if (threadIdx.x == 0)"):
            self.assign(leaf.buffer, leaf.indices, leaf.reducer(E.read(leaf.buffer, leaf.indices), E.read(parts, (E.const(0, INDEX),))))

    # ------------------------------------------------------------ inside of a phase: one thread

    def inside(self, s: Stmt) -> None:
        match s:
            case L.Block(stmts):
                for inner in stmts:
                    self.inside(inner)
            case L.For():
                self.loop(s)
            case L.If(cond, then, otherwise):
                with self.braces(f"if ({self.expression(cond)})"):
                    self.inside(then)
                if otherwise is not None:
                    with self.braces("else"):
                        self.inside(otherwise)
            case L.While(cond, body):
                with self.braces("while (true)"):
                    self.line(f"if (!({self.expression(cond)})) break;")
                    self.inside(body)
            case L.Store(buffer, indices, value):
                self.assign(buffer, indices, value)
            case L.Accumulate(buffer, indices, value, reducer):
                place = f"{self.names[buffer]}[{self.address(buffer, indices)}]"
                self.accumulate(self.memory_of(buffer, place), value, reducer)
            case L.Prefetch():
                pass  # other threads run while one waits
            case L.Allocate(buffer, body):
                size = math.prod(self.constant(buffer, d) for d in buffer.shape) // self.warps.sharing(buffer)
                if buffer.scope == "shared":
                    raise self.fail(f"shared buffer `{buffer.name}` is allocated by one thread")
                if size * itemsize(buffer.dtype) > LOCAL_LIMIT:
                    raise self.fail(
                        f"temporary `{buffer.name}` takes {size * itemsize(buffer.dtype)} bytes of each thread", why=f"at most {LOCAL_LIMIT}"
                    )
                self.kept[buffer] = tuple(range(len(buffer.shape)))
                self.names[buffer] = self.fresh(buffer.name)
                self.line(f"{MEMORY[buffer.dtype]} {self.names[buffer]}[{max(1, size)}];")
                self.inside(body)
            case L.Call():
                self.warps.instruction(s)
            case _:
                raise self.fail(f"a {type(s).__name__} cannot be compiled for a GPU")

    def loop(self, s: L.For) -> None:
        if s.kind.startswith("block"):
            raise self.fail(f"loop `{s.var.name}` is bound to {s.kind} inside a thread")
        if s.kind.startswith("thread"):
            axis = "xyz".index(s.kind[-1])
            if s.extent == self.block[axis]:
                self.declare(s.var, f"threadIdx.{s.kind[-1]}")
                self.inside(s.body)
            else:
                with self.braces(f"if (threadIdx.{s.kind[-1]} < {s.extent})"):
                    self.declare(s.var, f"threadIdx.{s.kind[-1]}")
                    self.inside(s.body)
            return
        outer, inner = _hoisted(s)
        if outer is not None:  # a condition that no iteration changes
            with self.braces(f"if ({self.expression(outer)})"):
                self.inside(inner)
            return
        assert isinstance(inner, L.For)
        chain = _chain(inner)
        if chain is not None and chain.buffer.scope != "register":
            self.folded(inner, chain)
        elif s.kind == L.VECTORIZED and (leaf := _leaf(inner.body)) is not None and not self.target.has("scalar"):
            self.vectorized(inner, leaf)
        else:
            with self.loop_of(inner.var, inner.extent, inner.kind):
                self.inside(inner.body)

    @contextmanager
    def loop_of(self, var: Expr, extent: Dim, kind: str) -> Iterator[None]:
        limit = self.expression(as_expr(extent))
        name = self.names[var] = self.fresh(var.name)
        self.variables[var] = None
        if kind in (L.UNROLLED, L.VECTORIZED):
            self.line("#pragma unroll")
        with self.braces(f"for ({self.index_type(var)} {name} = 0; {name} < {limit}; ++{name})"):
            yield

    def declare(self, var: Expr, source: str) -> None:
        self.names[var] = self.fresh(var.name)
        self.variables[var] = None
        self.line(f"const {self.index_type(var)} {self.names[var]} = {source};")

    def folded(self, s: L.For, leaf: L.Accumulate) -> None:
        """Loops that accumulate into one element: it is loaded before and stored after."""
        with self.braces(""):
            at = self.fresh("at")
            self.line(f"const {'int' if self.narrow(self.linear(leaf.buffer, leaf.indices)) else 'long long'} {at} = "
                      f"{self.address(leaf.buffer, leaf.indices)};")  # fmt: skip
            place = f"{self.names[leaf.buffer]}[{at}]"
            total = self.fresh("total")
            self.line(f"{REGISTER[leaf.buffer.dtype]} {total} = {self.loaded(leaf.buffer.dtype, place)};")

            def visit(x: Stmt) -> None:
                if isinstance(x, L.For):
                    outer, inner = _hoisted(x)
                    if outer is not None:
                        visit(L.If(outer, inner))
                        return
                    assert isinstance(inner, L.For)
                    with self.loop_of(inner.var, inner.extent, inner.kind):
                        visit(inner.body)
                elif isinstance(x, L.If):
                    with self.braces(f"if ({self.expression(x.cond)})"):
                        visit(x.then)
                else:
                    assert isinstance(x, L.Accumulate)
                    self.accumulate(_Memory(leaf.buffer.dtype, total, register=True), x.value, x.reducer)

            visit(s)
            self.line(f"{place} = {self.stored(leaf.buffer.dtype, total)};")

    def vectorized(self, s: L.For, leaf: L.Store | L.Accumulate) -> None:
        """Lanes side by side: contiguous operands are loaded as vectors first, a contiguous result is stored as one last."""
        assert isinstance(s.extent, int)
        lanes = s.extent
        guarded = isinstance(s.body, L.If)
        vectors: dict[Expr, str] = {}
        for r in [] if guarded else _unconditional(leaf.value):
            if r.attr.scope != "register" and (start := self.vector_start(r.attr, r.args, s.var, lanes)) is not None:
                self.used_buffers[r.attr] = None
                kind, name = f"Vector<{MEMORY[r.attr.dtype]}, {lanes}>", self.fresh(f"{r.attr.name}_v")
                at = self.expression(start)
                self.line(f"const {kind} {name} = *reinterpret_cast<const {kind}*>({self.names[r.attr]} + {at});")
                self.helpers.add("Vector")
                vectors[r] = name
        result = start = None
        if isinstance(leaf, L.Store) and not guarded and leaf.buffer.scope != "register":
            start = self.vector_start(leaf.buffer, leaf.indices, s.var, lanes)
        if start is not None:
            self.helpers.add("Vector")
            self.used_buffers[leaf.buffer] = None
            result = self.fresh(f"{leaf.buffer.name}_v")
            kind = f"Vector<{MEMORY[leaf.buffer.dtype]}, {lanes}>"
            self.line(f"{kind} {result};")
        with self.loop_of(s.var, lanes, s.kind):
            lane = self.names[s.var]
            self.lanes = {r: self.loaded(r.dtype, f"{name}.v[{lane}]") for r, name in vectors.items()}
            if result is not None:
                self.line(f"{result}.v[{lane}] = {self.stored(leaf.buffer.dtype, self.expression(leaf.value))};")
            else:
                self.inside(s.body)
            self.lanes = {}
        if result is not None and start is not None:
            self.line(f"*reinterpret_cast<{kind}*>({self.names[leaf.buffer]} + {self.expression(start)}) = {result};")

    def vector_start(self, buffer: Buffer, indices: Sequence[Expr], lane: Expr, lanes: int) -> Expr | None:
        """The position of the first lane where the lanes are contiguous and certainly aligned to the size of the vector."""
        if lanes * itemsize(buffer.dtype) not in (2, 4, 8, 16) or lanes == 1:
            return None
        terms = dict(linear(self.linear(buffer, indices)))
        if terms.pop((lane,), 0) != 1 or any(lane in E.variables(*m) for m in terms) or any(c % lanes for c in terms.values()):
            return None
        return simplify(from_linear(terms))

    # ------------------------------------------------------------ stores

    def memory_of(self, buffer: Buffer, place: str) -> _Memory:
        return _Memory(buffer.dtype, place, register=False)

    def assign(self, buffer: Buffer, indices: Sequence[Expr], value: Expr) -> None:
        self.count(value, self.linear(buffer, indices))
        text = self.value(value)
        at = self.value(self.linear(buffer, indices))
        self.used_buffers[buffer] = None
        self.line(f"{self.names[buffer]}[{at}] = {self.stored(buffer.dtype, text)};")

    def accumulate(self, memory: _Memory, value: Expr, reducer: E.Reducer) -> None:
        """`memory` = reducer(`memory`, value)."""
        old = memory.place if memory.register else self.loaded(memory.dtype, memory.place)
        sums = reducer.combine.op == "add" and set(reducer.combine.args) == {reducer.lhs, reducer.rhs}
        if sums and value.dtype in ("float32", "float64") and value.op == "mul":
            self.count(*value.args)
            a, b = (self.value(x) for x in value.args)
            new = f"fma{'f' if value.dtype == 'float32' else ''}({a}, {b}, {old})"
        else:
            new = self.combined(reducer, old, self.expression(value))
        self.line(f"{memory.place} = {new if memory.register else self.stored(memory.dtype, new)};")

    def combined(self, reducer: E.Reducer, old: str, term: str) -> str:
        uses = Counter(a for e in E.walk(reducer.combine) for a in e.args)
        texts = {}
        for v, text in ((reducer.lhs, old), (reducer.rhs, term)):
            if uses[v] > 1 and not text.isidentifier():
                name = self.fresh("part")
                self.line(f"const {REGISTER[v.dtype]} {name} = {text};")
                text = name
            texts[v] = text
        self.count(reducer.combine)
        self.scopes.append(texts)
        result = self.value(reducer.combine)
        self.scopes.pop()
        return result

    def loaded(self, dtype: str, place: str) -> str:
        if dtype in HALF:
            return f"{self.helper('load_' + HALF[dtype])}({place})"
        return f"({place} != 0)" if dtype == "bool" else place

    def stored(self, dtype: str, value: str) -> str:
        return f"{self.helper('store_' + HALF[dtype])}({value})" if dtype in HALF else value

    def helper(self, name: str) -> str:
        self.helpers.add(name)
        return name

    # ------------------------------------------------------------ addresses

    def linear(self, buffer: Buffer, indices: Sequence[Expr]) -> Expr:
        """The row-major position of an element."""
        kept = self.kept.get(buffer, tuple(range(len(buffer.shape))))
        position: Expr = as_expr(0)
        for d in kept:
            position = position * as_expr(buffer.shape[d]) + indices[d]
        return simplify(position)

    def address(self, buffer: Buffer, indices: Sequence[Expr]) -> str:
        if buffer not in self.names:
            raise self.fail(f"buffer `{buffer.name}` is used but is neither parameter nor allocated")
        self.used_buffers[buffer] = None
        return self.expression(self.linear(buffer, indices))

    def narrow(self, e: Expr) -> bool:
        """Whether an index fits 32 bits, and whatever it is made of."""
        if e.dtype != INDEX or e.op == "read":
            return False
        low, high = bounds(e)
        if low is None or high is None or low < -(1 << 31) or high >= 1 << 31:
            return False
        return e.op in ("var", "const", "cast") or all(self.narrow(a) for a in e.args if a.dtype == INDEX)

    def index_type(self, e: Expr) -> str:
        return "int" if self.narrow(e) else "long long"

    # ------------------------------------------------------------ expressions

    def expression(self, e: Expr) -> str:
        """The text of an expression; parts that are used several times or are long get names, on lines of their own."""
        self.count(e)
        return self.value(e)

    def count(self, *roots: Expr) -> None:
        """A new statement: what was read before may be out of date."""
        self.scopes = [{} for _ in self.scopes]
        self.uses = Counter(a for e in E.walk(*roots) for a in e.args)
        self.uses.update(roots)
        for root in roots:
            self.note(root)

    def find(self, e: Expr) -> str | None:
        return next((scope[e] for scope in reversed(self.scopes) if e in scope), None)

    def value(self, e: Expr) -> str:
        found = self.lanes.get(e) or self.find(e)
        if found is not None:
            return found
        if e.op == "var":
            if e not in self.names:
                raise self.fail(f"`{e.name}` is used but is no parameter and no loop around")
            return self.names[e]
        if e.op == "const":
            text = literal(e.attr, "int32" if self.narrow(e) else e.dtype)
            return self.helper("bits") + text[4:] if text.startswith("bits<") else text
        depth, self.depth = self.depth, self.depth + 1
        if depth > _DEEP:  # a long chain: operands first, or it would exhaust Python's stack
            self.depth = 0
            for node in E.needed_operands(e):
                if node.args and self.find(node) is None:
                    self.keep(node, self.value(node))
        text = self.compute(e)
        self.depth = depth
        if self.named(e) or len(text) > _LINE:
            return self.keep(e, text)
        return text

    def named(self, e: Expr) -> bool:
        return self.uses[e] > 1 and bool(e.args) and not (e.op == "cast" and e.args[0].op in ("var", "const"))

    def keep(self, e: Expr, text: str) -> str:
        if text.isidentifier():
            return text
        name = self.fresh({"read": e.attr.name if e.op == "read" else ""}.get(e.op, "t") or "t")
        self.line(f"const {self.type_of(e)} {name} = {text};")
        self.scopes[-1][e] = name
        return name

    def type_of(self, e: Expr) -> str:
        return "int" if self.narrow(e) else REGISTER[e.dtype]

    def compute(self, e: Expr) -> str:
        match e.op:
            case "read":
                if e.attr not in self.names:
                    raise self.fail(f"buffer `{e.attr.name}` is used but is neither parameter nor allocated")
                self.used_buffers[e.attr] = None
                position = self.linear(e.attr, e.args)
                self.note(position)
                return self.loaded(e.dtype, f"{self.names[e.attr]}[{self.value(position)}]")
            case "select":
                return self.select(e)
            case "cast":
                return self.cast(e, e.args[0], e.dtype)
            case "bitcast":
                return self.bitcast(e.args[0], e.dtype)
            case "reduce":
                raise self.fail("a loop program contains a `reduce` expression")
        if e.args[0].dtype == INDEX and (e.dtype == INDEX or e.dtype == "bool") and len(e.args) == 2:
            return self.index_arithmetic(e)
        args = [self.value(a) for a in e.args]
        return self.operator(e.op, e.args[0].dtype, args)

    def select(self, e: Expr) -> str:
        cond, *sides = e.args
        test = self.value(cond)
        safe = all(n.op != "read" or _in_bounds(n) for side in sides for n in E.walk(side))
        before = len(self.lines)
        if not safe:
            self.scopes.append({})
        a, b = (self.value(x) for x in sides)
        if not safe:
            self.scopes.pop()
        if safe or len(self.lines) == before:
            return f"({test} ? {self.widened(e, sides[0], a)} : {self.widened(e, sides[1], b)})"
        del self.lines[before:]  # nothing may be evaluated ahead of the condition
        name = self.fresh("t")
        self.line(f"{self.type_of(e)} {name};")
        for head, side in ((f"if ({test})", sides[0]), ("else", sides[1])):
            with self.braces(head):
                self.line(f"{name} = {self.value(side)};")
        self.scopes[-1][e] = name
        return name

    def widened(self, whole: Expr, part: Expr, text: str) -> str:
        return f"(long long){text}" if whole.dtype == INDEX and not self.narrow(whole) and self.narrow(part) else text

    def index_arithmetic(self, e: Expr) -> str:
        """64-bit integers, in 32 bits where they fit; plain where they are indices, wrapping around where they are data."""
        small = all(self.narrow(a) for a in e.args) and (e.dtype == "bool" or self.narrow(e))
        a, b = (x if small or not self.narrow(y) else f"(long long){x}" for x, y in zip(map(self.value, e.args), e.args, strict=True))
        low, divisor = bounds(e.args[0])[0], bounds(e.args[1])[0]
        plain = low is not None and low >= 0 and divisor is not None and divisor > 0
        match e.op:
            case "floordiv" | "truncdiv" if plain:
                return f"({a} / {b})"
            case "mod" | "truncmod" if plain:
                return f"({a} % {b})"
            case "add" | "sub" | "mul" if small or not any(n.op == "read" for n in E.walk(e)):
                return f"({a} {_SIGNS[e.op]} {b})"
        return self.operator(e.op, "int32" if small else INDEX, [a, b])

    def operator(self, op: str, dtype: str, args: list[str]) -> str:
        """An operator on values of one type."""
        if op in ("lt", "le", "eq", "ne"):
            return f"({args[0]} {_SIGNS[op]} {args[1]})"
        if dtype == "bool":
            return self.logical(op, args)
        if op == "isnan":
            return f"({args[0]} != {args[0]})"
        if op == "isinf":
            return f"({'fabs' if dtype == 'float64' else 'fabsf'}({args[0]}) == {self.value(E.const(math.inf, dtype))})"
        if is_float(dtype):
            text = self.float_operator(op, dtype, args)
            exact = op in ("neg", "abs", "min", "max")  # the result is one of the values that the type has
            return f"{self.helper(HALF[dtype])}({text})" if dtype in HALF and not exact else text
        return self.integer_operator(op, dtype, args)

    def logical(self, op: str, args: list[str]) -> str:
        match op:
            case "and" | "min" | "mul":
                return f"({args[0]} && {args[1]})"
            case "or" | "max" | "add":
                return f"({args[0]} || {args[1]})"
            case "xor":
                return f"({args[0]} != {args[1]})"
            case "not":
                return f"!{args[0]}"
            case "abs":
                return args[0]
        raise self.fail(f"`{op}` of bool cannot be compiled")

    def float_operator(self, op: str, dtype: str, args: list[str]) -> str:
        match op:
            case "add" | "sub" | "mul" | "div":
                return f"({args[0]} {_SIGNS[op]} {args[1]})"
            case "min" | "max":
                return f"{self.helper(op + 'imum')}({args[0]}, {args[1]})"
            case "floordiv":
                return f"{self.helper('float_floor_div')}({args[0]}, {args[1]})"
            case "mod":
                return f"{self.helper('float_mod')}({args[0]}, {args[1]})"
            case "truncdiv":
                quotient = f"{args[0]} / {args[1]}"
                return f"{function('trunc', dtype)}({self.helper(HALF[dtype]) + f'({quotient})' if dtype in HALF else quotient})"
            case "truncmod":
                return f"{'fmod' if dtype == 'float64' else 'fmodf'}({args[0]}, {args[1]})"
            case "neg":
                return f"(-{args[0]})"
            case "fma" if dtype in HALF:
                return f"{self.helper('odd')}((double){args[0]} * (double){args[1]} + (double){args[2]})"
            case "fma":
                return f"fma{'' if dtype == 'float64' else 'f'}({', '.join(args)})"
        name = function(op, dtype)
        if name is None:
            raise self.fail(f"`{op}` of {dtype} cannot be compiled")
        return f"{name}({', '.join(args)})"

    def integer_operator(self, op: str, dtype: str, args: list[str]) -> str:
        kind = REGISTER[dtype]
        wide = "unsigned long long" if itemsize(dtype) == 8 else "unsigned int"
        match op:
            case "add" | "sub" | "mul":
                return f"({kind})(({wide}){args[0]} {_SIGNS[op]} ({wide}){args[1]})"
            case "and" | "or" | "xor":
                return f"({kind})({args[0]} {_SIGNS[op]} {args[1]})"
            case "min" | "max":
                return f"{self.helper(op + 'imum')}<{kind}>({args[0]}, {args[1]})"
            case "floordiv" | "mod" | "truncdiv" | "truncmod" | "pow" | "shl" | "shr":
                name = {"floordiv": "floor_div", "mod": "floor_mod", "truncdiv": "trunc_div", "truncmod": "trunc_mod", "pow": "power",
                        "shl": "shift_left", "shr": "shift_right"}[op]  # fmt: skip
                return f"{self.helper(name)}<{kind}>({args[0]}, {args[1]})"
            case "neg":
                return f"({kind})(0u - ({wide}){args[0]})"
            case "not":
                return f"({kind})(~{args[0]})"
            case "abs":
                return args[0] if kind.startswith("unsigned") else f"({kind})({args[0]} < 0 ? 0u - ({wide}){args[0]} : ({wide}){args[0]})"
            case "popcount":
                unsigned = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}[itemsize(dtype)]
                return f"({kind})__popcll(({unsigned}){args[0]})"
            case "fma":
                return f"({kind})(({wide}){args[0]} * ({wide}){args[1]} + ({wide}){args[2]})"
        raise self.fail(f"`{op}` of {dtype} cannot be compiled")

    def cast(self, whole: Expr, source: Expr, dtype: str) -> str:
        x, given = self.value(source), source.dtype
        if dtype == "bool":
            return f"({x} != 0)"
        if given == "bool":
            return f"({x} ? {literal(1, dtype)} : {literal(0, dtype)})"
        if dtype in HALF:
            rounded = self.helper(HALF[dtype])
            return f"{rounded}({x})" if given in HALF or given == "float32" else f"{rounded}({self.odd(x, given)})"
        kind = REGISTER[dtype]
        if is_float(given) and is_integer(dtype):
            least, most = (literal(n, dtype) for n in integer_range(dtype))
            return f"{self.helper('saturate')}<{kind}>({x}, ({kind}){least}, ({kind}){most})"
        return f"({'int' if self.narrow(whole) else kind}){x}"

    def odd(self, x: str, given: str) -> str:
        return f"{self.helper('odd')}({x})" if given == "float64" else f"(float){x}"

    def bitcast(self, source: Expr, dtype: str) -> str:
        x = self.value(source)
        if source.dtype in HALF:
            x = self.stored(source.dtype, x)
        elif source.dtype == INDEX:
            x = f"(long long){x}"
        if dtype in HALF:
            return self.loaded(dtype, f"(unsigned short){x}")
        return f"{self.helper('bits')}<{REGISTER[dtype]}>({x})"


@dataclass(frozen=True, slots=True)
class _Memory:
    """A place that is accumulated into: an element in memory, or a register that holds its value."""

    dtype: str
    place: str
    register: bool


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^"}


# ---------------------------------------------------------------- structure


def _meeting(s: L.For) -> tuple[L.Accumulate, Expr | None] | None:
    """The accumulation (and the condition it stands under) in which all iterations of a thread loop meet."""
    if not s.kind.startswith("thread"):
        return None
    body, guard = s.body, None
    if isinstance(body, L.If) and body.otherwise is None:
        guard, body = body.cond, body.then
    if isinstance(body, L.Accumulate) and s.var not in E.variables(*body.indices):
        return body, guard
    return None


def _leaf(body: Stmt) -> L.Store | L.Accumulate | None:
    if isinstance(body, L.If) and body.otherwise is None:
        body = body.then
    return body if isinstance(body, L.Store | L.Accumulate) else None


def _chain(s: L.For) -> L.Accumulate | None:
    """The accumulation below loops (and conditions) that do not move the element it goes to."""
    loops: set[Expr] = set()
    x: Stmt = s
    while True:
        if isinstance(x, L.For) and not x.kind.startswith("thread"):
            loops.add(x.var)
            x = x.body
        elif isinstance(x, L.If) and x.otherwise is None:
            if any(r.attr.scope == "register" for r in E.reads(x.cond)):
                return None
            x = x.then
        else:
            break
    if not isinstance(x, L.Accumulate) or loops & set(E.variables(*x.indices)) or E.reads(*x.indices):
        return None
    return None if any(r.attr is x.buffer for r in E.reads(x.value)) else x


def _hoisted(s: L.For) -> tuple[Expr | None, Stmt]:
    """The conditions at the top of a loop's body that do not depend on it, and the loop without them."""
    loops = [s]
    while isinstance(loops[-1].body, L.For) and not loops[-1].body.kind.startswith(("thread", "block")):
        loops.append(loops[-1].body)
    body = loops[-1].body
    if not isinstance(body, L.If) or body.otherwise is not None:
        return None, s
    fixed: list[Expr] = []
    rest: list[Expr] = []
    for condition in E.conjuncts(body.cond):
        inner = any(x.var in E.variables(condition) for x in loops) or bool(E.reads(condition))
        (rest if inner else fixed).append(condition)
    if not fixed or any(E.reads(as_expr(x.extent)) for x in loops):
        return None, s
    new: Stmt = body.then if not rest else L.If(E.all_of(rest), body.then)
    for x in reversed(loops):
        new = replace(x, body=new)
    return E.all_of(fixed), new


def _unconditional(value: Expr) -> Iterable[Expr]:
    """Reads that are evaluated whenever the value is."""
    found: dict[Expr, None] = {}
    stack = [value]
    seen: set[Expr] = set()
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        if e.op == "read":
            found[e] = None
        else:
            stack.extend(e.args[:1] if e.op == "select" else e.args)
    return found


def _in_bounds(read: Expr) -> bool:
    return all(prove(E.binary("le", 0, i)) and prove(E.binary("lt", i, as_expr(n))) for i, n in zip(read.args, read.attr.shape, strict=True))
