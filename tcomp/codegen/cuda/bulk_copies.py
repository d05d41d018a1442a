"""Bulk copies (`cp.async.bulk`, from sm_90 on): a thread starts a copy of a whole run from global to shared memory.

Which copies are of this kind the program says (`bulk_copy`, see `schedules.instructions`). They belong to the groups of `barriers`
like those of `async_copies`, of which there may be some in the same group: what differs is how a group is waited for.

- Each group that is under way has a barrier object in shared memory. A thread announces the bytes of a run there before it starts the copy,
  and arrives when the group is complete; the object completes a phase when all of these threads have arrived and all bytes announced are
  there. So what is not copied, as it stands under a condition, is not waited for.
- Groups are numbered, and every thread counts those that were started and those waited for. The objects are a ring that is as long as there
  are ever groups under way, rounded up to a power of two: group n has object n % ring, and completes its phase of parity n / ring % 2.
- All threads wait for all groups, one after the other, and then for each other: no object completes a phase while a thread still waits for
  the one before.
- Copies of one group arrive in any order: that no element is copied to twice in a phase is proved by integer sets.
- Copies in bulk pass by the orders of ordinary accesses (they are of the *asynchronous proxy* of the PTX ISA). What they have written is seen by
  whoever has waited; in front of each barrier, threads publish what they have done with shared memory before (`fence.proxy.async`).

Source: PTX ISA 8.5, sections 9.7.9 (cp.async.bulk), 9.7.13.15 (mbarrier: phases, expected bytes) and 9.7.15.4 (proxies).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tcomp.codegen.cuda.barriers import MAX_TRACKED, Placement, pending_groups
from tcomp.codegen.cuda.function import FunctionBuilder
from tcomp.codegen.cuda.phases import phases, threads_along
from tcomp.ir import loops as L
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import as_expr
from tcomp.ir.instruction import RUN, CopyOp, match
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.polyhedral.model import written_twice
from tcomp.ir.simplify import linear


def bulk_copies(s: Stmt) -> Iterator[L.Call]:
    """Those in a statement."""
    yield from (x for x in L.walk(s) if isinstance(x, L.Call) and isinstance(x.instruction.emission, CopyOp))


class BulkCopies:
    """The bulk copies of one `__global__` function; false if it has none. `threads`: those that start some arrive, along each axis the first
    ones."""

    def __init__(self, function: FunctionBuilder) -> None:
        self.function = function
        self.threads = [1, 1, 1]
        self.ring = 0
        self.objects = self.started = self.waited = ""

    def __bool__(self) -> bool:
        return self.ring > 0

    def survey(self, body: Stmt, barriers: Placement) -> None:
        """Count the threads and the groups of copies. Raises `CodegenError` for what cannot be copied in bulk."""
        f = self.function
        calls = list(bulk_copies(body))
        for s in calls:
            features = s.instruction.features
            if not any(map(f.target.executes, features)):
                raise f.fail(f"the target `{f.target}` has no instruction `{s.instruction.name}`", f"it needs {' or '.join(features)}")
            if not f.target.vector_access:
                raise f.fail(f"`{s.instruction.name}` on the target `{f.target}`", f"buffers need not be aligned to {RUN} bytes there")
            source = s.instruction.leaf.value.attr
            if (buffer := match(s.instruction, s.body).accesses[source][0]) in f.written:
                raise f.fail(f"`{buffer.name}` is written beside bulk copies of it", hint="copy it by threads")
        for phase in phases(body):
            if any(bulk_copies(phase)):
                if phase not in f.copies:
                    raise f.fail(
                        "a bulk copy stands beside statements that are no copies into shared memory", f"\n{phase}", "divide the loops"
                    )
                if (twice := written_twice(phase)) is not None:
                    why = "copies in the background arrive in any order"
                    raise f.fail(f"elements of `{twice.name}` may be copied to more than once between two barriers", f"{why}\n{phase}")
                threads_along(phase, self.threads)
        if calls:
            most = pending_groups(body, f.copies, barriers)
            if most > MAX_TRACKED:
                raise f.fail(f"more than {MAX_TRACKED} groups of copies may be under way", hint="wait for some earlier")
            self.ring = 1 << (most - 1).bit_length()

    # ------------------------------------------------------------ emission

    def begin(self) -> None:
        """The barrier objects, before anybody uses one."""
        f = self.function
        objects = Buffer("arrived", "uint64", (self.ring,), "shared")
        f.share(objects, self.ring)
        self.objects, self.started, self.waited = f.names[objects], f.fresh("started"), f.fresh("waited")
        f.line(f"{self.only([1, 1, 1])}{f.helper('prepare_groups')}<{self.ring}>({self.objects}, {math.prod(self.threads)});")
        if math.prod(f.block) > 1:
            f.line("__syncthreads();")
        f.line(f"unsigned int {self.started} = 0, {self.waited} = 0;  // groups of copies")

    def start(self, s: L.Call) -> None:
        """One thread announces the bytes of a run, and starts its copy."""
        f = self.function
        instruction, op = s.instruction, s.instruction.emission
        assert isinstance(op, CopyOp)
        roles = match(instruction, s.body)
        places = []
        for operand in (instruction.result, instruction.leaf.value.attr):
            buffer = roles.accesses[operand][0]
            start = f.linear(buffer, roles.indices(operand, dict.fromkeys(instruction.places()[operand], as_expr(0))))
            if any(c * itemsize(buffer.dtype) % RUN for c in linear(start).values()):
                why = f"the run begins at element {start}, which is not certainly a multiple of {RUN} bytes"
                raise f.fail(f"`{buffer.name}` cannot be copied by `{instruction.name}`", why, "copy it by threads, or pad its rows")
            f.used_buffers[buffer] = None
            f.begin_statement(start)
            places.append(f"{f.names[buffer]} + {f.value(start)}")
        size = instruction.loops[0].extent * itemsize(instruction.result.dtype)
        f.line(f"// {instruction.name}")
        to, source = f"(unsigned int)__cvta_generic_to_shared({places[0]})", f"__cvta_generic_to_global({places[1]})"
        group = f"{f.helper('announce')}({self.objects} + {self.started} % {self.ring}, {size})"
        f.line(f'asm volatile("{op.code} [%0], [%1], {size}, [%2];" :: "r"({to}), "l"({source}), "r"({group}) : "memory");')

    def complete(self) -> None:
        """The group, by the threads that start copies, whether they have started one of it or not."""
        f = self.function
        f.line(f"{self.only(self.threads)}{f.helper('arrive')}({self.objects} + {self.started} % {self.ring});")
        f.line(f"++{self.started};")

    def only(self, threads: Sequence[int]) -> str:
        """The condition of a statement that the first threads along each axis execute; nothing if these are all."""
        some = [f"threadIdx.{a} < {n}" for a, n, whole in zip("xyz", threads, self.function.block, strict=True) if n < whole]
        return f"if ({' && '.join(some)}) " if some else ""

    def wait(self, pending: int) -> None:
        """For all groups but the newest ones."""
        f = self.function
        newest = f" + {pending}" if pending else ""
        with f.braces(f"for (; {self.waited}{newest} < {self.started}; ++{self.waited})"):
            f.line(f"{f.helper('wait_for_group')}({self.objects} + {self.waited} % {self.ring}, {self.waited} / {self.ring} % 2);")
