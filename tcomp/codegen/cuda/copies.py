"""Copies from global to shared memory that run in the background, in groups (see `barriers`): the values pass no register.

Each thread copies 4, 8 or 16 bytes at a time (`cp.async`, from sm_80 on), zeros where a condition does not hold; or one thread copies a
whole run (`cp.async.bulk`, from sm_90 on). Of those, each group in flight has a barrier object in shared memory: a thread announces the
bytes of a run there before it starts the copy, and arrives when the group is complete; the object completes a phase when all threads have
arrived and all bytes. The objects are a ring of a power of two: group n has object n % ring and completes its phase of parity n / ring % 2;
all threads wait for all groups in order, then for each other, so that no object completes a phase while a thread waits for the one before.

Source: PTX ISA 8.5, sections 9.7.9 (cp.async, cp.async.bulk), 9.7.13.15 (mbarrier: phases, expected bytes) and 9.7.15.4 (proxies).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tcomp.codegen.cuda.barriers import MAX_TRACKED, Placement, pending_groups, phases, threads_along
from tcomp.codegen.cuda.function import FunctionBuilder
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import INDEX, Expr, as_expr
from tcomp.ir.instruction import RUN, CopyOp, match
from tcomp.ir.linear import linear
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.polyhedral.model import written_twice
from tcomp.ir.simplify import difference, from_linear

OLDEST_ARCHITECTURE = 80  # `cp.async` exists from compute capability 8.0 on (PTX ISA 8.5, section 9.7.9.25.3)


@dataclass(frozen=True, slots=True)
class ThreadCopy:
    """The copy that one thread performs at once: `size` bytes, positions in both buffers, and the condition under which it is not zero."""

    target: L.Store
    start: Expr
    source: Expr
    source_start: Expr
    size: int
    condition: Expr | None


def copy_phases(f: FunctionBuilder, body: Stmt) -> Iterator[Stmt]:
    """The phases of a statement that only start copies."""

    def only_copies(s: Stmt, lanes: L.For | None = None) -> bool:
        match s:
            case L.Store():
                return copy_of(f, s, lanes) is not None or (lanes is not None and copy_of(f, s, None) is not None)
            case L.For(kind=kind) if not E.reads(as_expr(s.extent)):
                return only_copies(s.body, s if kind == L.VECTORIZED else None)
            case L.If(cond, then, None) if not E.reads(cond):
                return only_copies(then, None if lanes is None or lanes.var in E.variables(cond) else lanes)
            case L.Call(instruction):
                return isinstance(instruction.emission, CopyOp)
            case L.Block(stmts):
                return bool(stmts) and all(map(only_copies, stmts))
        return False

    if f.target.compute_capability >= OLDEST_ARCHITECTURE:
        yield from filter(only_copies, phases(body))


def copy_of(f: FunctionBuilder, s: Stmt, lanes: L.For | None) -> ThreadCopy | None:
    """The copy that a store is, of all `lanes` together if given; None if it is none."""
    if not isinstance(s, L.Store) or s.buffer.scope != "shared":
        return None
    condition, source = None, s.value
    if source.op == "select" and (zero := source.args[2]).op == "const" and zero.attr == 0 and math.copysign(1, zero.attr) > 0:
        condition, source, _ = source.args
    conditions = [] if condition is None else [condition]
    if source.op != "read" or source.attr.scope != "global" or E.reads(*s.indices, *source.args, *conditions):
        return None
    count = 1 if lanes is None else lanes.extent
    if not isinstance(count, int) or (lanes is not None and not f.target.vector_access):
        return None
    if lanes is not None and condition is not None and lanes.var in E.variables(condition := without_lane(condition, lanes)):
        return None
    places = ((s.buffer, s.indices), (source.attr, source.args))
    first, second = (f.linear(b, i) if lanes is None else f.vector_start(b, i, lanes.var, count) for b, i in places)
    size = count * itemsize(s.buffer.dtype)
    return None if first is None or second is None or size not in (4, 8, 16) else ThreadCopy(s, first, source, second, size, condition)


def start_copy(f: FunctionBuilder, p: ThreadCopy) -> None:
    """Emit a copy."""
    f.begin_statement(p.start, p.source_start, *([] if p.condition is None else [p.condition]))
    size = "" if p.condition is None else f", {f.value(p.condition)} ? {p.size} : 0"
    target, source = f.names[p.target.buffer], f.use(p.source.attr)
    f.line(f"{f.helper('start_copy')}<{p.size}>({target} + {f.value(p.start)}, {source} + {f.value(p.source_start)}{size});")


def whole_vectors(s: Stmt) -> Stmt:
    """The statement, where conditions inside of vectorized loops do not depend on the lane unless they must."""
    s = L.with_children(s, [whole_vectors(c) for c in L.children(s)])
    if isinstance(s, L.For) and s.kind == L.VECTORIZED and isinstance(s.body, L.If):
        return replace(s, body=replace(s.body, cond=without_lane(s.body.cond, s)))
    return s


def without_lane(condition: Expr, lanes: L.For) -> Expr:
    """An equal condition, without the lane in those conjuncts that hold for all lanes or for none: `4 * i + lane < 12` is `4 * i < 12`."""
    lane, count = lanes.var, lanes.extent

    def without(c: Expr) -> Expr:
        if not isinstance(count, int) or c.op not in ("lt", "le") or c.args[0].dtype != INDEX or lane not in E.variables(c) or E.reads(c):
            return c
        terms = dict(linear(difference(c.args[1], c.args[0])))  # a < b is 0 < b - a
        terms[()] = terms.get((), 0) + (c.op == "le")
        step, whole = terms.pop((lane,), 0), not any(lane in E.variables(*m) or n % count for m, n in terms.items() if m)
        known = whole and (step, terms[()] % count) in ((-1, 0), (1, 1))  # lane < D or -D < lane: D is whole vectors, or one element more
        return E.binary("lt", 0, from_linear(terms)) if known else c

    return E.all_of([without(c) for c in E.conjuncts(condition)])


def bulk_copies(s: Stmt) -> list[L.Call]:
    """The bulk copies in a statement."""
    return [x for x in L.walk(s) if isinstance(x, L.Call) and isinstance(x.instruction.emission, CopyOp)]


class BulkCopies:
    """The bulk copies of one `__global__` function; false if it has none. `threads`: how many along each axis start some, and arrive."""

    def __init__(self, function: FunctionBuilder) -> None:
        self.function, self.threads, self.ring = function, [1, 1, 1], 0
        self.objects = self.started = self.waited = ""

    def __bool__(self) -> bool:
        return self.ring > 0

    def survey(self, body: Stmt, barriers: Placement) -> None:
        """Count the threads and the groups of copies. Raises `CodegenError` for what cannot be copied in bulk."""
        f, calls = self.function, bulk_copies(body)
        for s in calls:
            features = s.instruction.features
            if not any(map(f.target.executes, features)):
                raise f.fail(f"the target `{f.target}` has no instruction `{s.instruction.name}`", f"it needs {' or '.join(features)}")
            if not f.target.vector_access:
                raise f.fail(f"`{s.instruction.name}` on the target `{f.target}`", f"buffers need not be aligned to {RUN} bytes there")
            source = s.instruction.leaf.value.attr
            if (buffer := match(s.instruction, s.body).accesses[source][0]) in f.written:
                raise f.fail(f"`{buffer.name}` is written in a function that copies it in bulk", hint="copy it by threads")
        for phase in filter(bulk_copies, phases(body)):
            if phase not in f.copies:
                what = "a bulk copy is in one phase with statements that are not copies into shared memory"
                raise f.fail(what, f"\n{phase}", "divide the loops")
            if (twice := written_twice(phase)) is not None:
                why = f"copies in the background arrive in any order\n{phase}"
                raise f.fail(f"elements of `{twice.name}` may be copied to more than once between two barriers", why)
            threads_along(phase, self.threads)
        if calls:
            if (most := pending_groups(body, f.copies, barriers)) > MAX_TRACKED:
                raise f.fail(f"more than {MAX_TRACKED} groups of copies may be under way", hint="wait for some earlier")
            self.ring = 1 << (most - 1).bit_length()

    def begin(self) -> None:
        """The barrier objects, before anybody uses one."""
        f, objects = self.function, Buffer("arrived", "uint64", (self.ring,), "shared")
        f.share(objects, self.ring)
        self.objects, self.started, self.waited = f.names[objects], f.fresh("started"), f.fresh("waited")
        f.line(f"{self.only([1, 1, 1])}{f.helper('prepare_groups')}<{self.ring}>({self.objects}, {math.prod(self.threads)});")
        if math.prod(f.block) > 1:
            f.line("__syncthreads();")
        f.line(f"unsigned int {self.started} = 0, {self.waited} = 0;  // groups of copies")

    def start(self, s: L.Call) -> None:
        """One thread announces the bytes of a run, and starts its copy."""
        f, instruction, matched, places = self.function, s.instruction, match(s.instruction, s.body), []
        for operand in (instruction.result, instruction.leaf.value.attr):
            buffer = matched.accesses[operand][0]
            start = f.linear(buffer, matched.indices(operand, dict.fromkeys(instruction.places()[operand], as_expr(0))))
            if any(c * itemsize(buffer.dtype) % RUN for c in linear(start).values()):
                why = f"the run begins at element {start}, which is not certainly a multiple of {RUN} bytes"
                raise f.fail(f"`{buffer.name}` cannot be copied by `{instruction.name}`", why, "copy it by threads, or pad its rows")
            f.begin_statement(start)
            places.append(f"{f.use(buffer)} + {f.value(start)}")
        size = instruction.loops[0].extent * itemsize(instruction.result.dtype)
        f.line(f"// {instruction.name}")
        to, source = f"(unsigned int)__cvta_generic_to_shared({places[0]})", f"__cvta_generic_to_global({places[1]})"
        group = f"{f.helper('announce')}({self.objects} + {self.started} % {self.ring}, {size})"
        f.line(
            f'asm volatile("{instruction.emission.code} [%0], [%1], {size}, [%2];" :: "r"({to}), "l"({source}), "r"({group}) : "memory");'
        )

    def complete(self) -> None:
        """The group, by the threads that start copies, whether they have started one of it or not."""
        arrive = self.function.helper("arrive")
        self.function.line(f"{self.only(self.threads)}{arrive}({self.objects} + {self.started} % {self.ring});")
        self.function.line(f"++{self.started};")

    def only(self, threads: Sequence[int]) -> str:
        """The condition of a statement that the first threads along each axis execute; nothing if these are all."""
        some = [f"threadIdx.{a} < {n}" for a, n, whole in zip("xyz", threads, self.function.block, strict=True) if n < whole]
        return f"if ({' && '.join(some)}) " if some else ""

    def wait(self, pending: int) -> None:
        """For all groups but the newest ones."""
        f, newest = self.function, f" + {pending}" if pending else ""
        with f.braces(f"for (; {self.waited}{newest} < {self.started}; ++{self.waited})"):
            f.line(f"{f.helper('wait_for_group')}({self.objects} + {self.waited} % {self.ring}, {self.waited} / {self.ring} % 2);")
