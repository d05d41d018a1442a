"""Instructions of a warp or a warpgroup in CUDA C++: the threads hold fragments of the operands, inline PTX combines them.

Factors in shared memory are read by the tensor cores in the background (`wgmma`), by the *asynchronous proxy*: threads publish what they
wrote in front of each barrier, and wait for a phase of such instructions before the next barrier, and before any phase but copies, so that
the usual barriers are enough. Rows of such factors are swizzled: otherwise 8 rows of 16 bytes, which are read together, lie in few banks.
Source: PTX ISA 8.5, sections 9.7.15.4 (proxies), 9.7.15.5.1 (descriptors, swizzling) and 9.7.15.7 (fences and groups).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from tcomp.codegen.cuda.barriers import plain_statements
from tcomp.codegen.cuda.function import FunctionBuilder
from tcomp.codegen.cuda.math import REGISTER
from tcomp.ir import expr as E, loops as L
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import Expr, as_expr, bounds
from tcomp.ir.instruction import CORE, ELEMENT, Fragment, Match, WarpOp, match
from tcomp.ir.linear import linear
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.simplify import difference, from_linear, simplify
from tcomp.target import capability

SWIZZLED = (2, 4, 8)  # pieces of 16 bytes of a row, for which there is a mode of swizzling (PTX ISA 8.5, section 9.7.15.5.1)


@dataclass(frozen=True)
class Distribution:
    """How a register buffer is distributed over the threads of an instruction: tiles of `sizes` elements along the dimensions `dims`, each
    as `fragment` says."""

    fragment: Fragment
    sizes: tuple[int, ...]
    dims: tuple[int, ...]

    @cached_property
    def steps(self) -> Mapping[tuple[Expr, ...], int]:
        """The distance of an element of a thread from its first one -> its number."""
        f = self.fragment
        places = [[E.substitute(i, {f.lane: as_expr(0), ELEMENT: E.const(n)}) for i in f.indices] for n in range(f.count)]
        return {tuple(simplify(i - o) for i, o in zip(place, places[0], strict=True)): n for n, place in enumerate(places)}


class WarpInstructions:
    """The instructions of one `__global__` function. `distributions`: of the register buffers that they touch. `background`: whether some
    run in the background."""

    def __init__(self, function: FunctionBuilder) -> None:
        self.function = function
        self.distributions: dict[Buffer, Distribution] = {}
        self.lanes: set[Expr] = set()  # loops over the threads of a warp
        self.background = False
        self.pending: list[Buffer] = []  # sums to which instructions that are under way add

    def survey(self, body: Stmt) -> None:
        """Find which register buffers the threads of a warp share, and how wide that makes a block."""
        f, calls = self.function, _warp_calls(body)
        for s in calls:
            self.distribute(s)
        together = max((s.instruction.threads for s in calls), default=1)
        f.block[0] = max(f.block[0], together)
        if f.block[0] % together:
            raise f.fail(f"a block is {f.block[0]} threads wide", why=f"an instruction takes {together} that stand side by side")
        self.lanes = {s.var for s in L.walk(body) if isinstance(s, L.For) and s.kind == "thread.x"}
        self.background = any(s.instruction.background for s in calls)

    def distribute(self, s: L.Call) -> None:
        """The register buffers that an instruction touches are distributed over the threads as it says."""
        f, instruction = self.function, s.instruction
        archs = [x for x in instruction.features if x.startswith("sm_")]
        if not isinstance(instruction.emission, WarpOp) or not any(map(f.target.executes, archs)):
            why = f"it needs {' or '.join(instruction.features)}" + " alone" * any(capability(x)[1] for x in archs)
            raise f.fail(f"the target `{f.target}` has no instruction `{instruction.name}`", why)
        matched = match(instruction, s.body)
        for operand, (buffer, indices) in matched.accesses.items():
            if instruction.operand(operand).fragment is None:
                pieces = _pieces(f, s, matched, operand)
                if f.swizzled.setdefault(buffer, pieces) != pieces:
                    raise f.fail(f"`{buffer.name}` is swizzled in two ways")
            if buffer.scope != "register":
                continue
            fragment = instruction.fragment(operand)
            moving = [matched.loops.get(v) for v in instruction.places()[operand]]  # nothing where it has one element
            dims = [next((d for d, i in enumerate(indices) if v in E.variables(i)), None) for v in moving]
            parts = [(d, int(n), i) for d, n, i in zip(dims, operand.shape, fragment.indices, strict=True) if d is not None]
            found = Distribution(
                replace(fragment, indices=tuple(i for *_, i in parts)), tuple(n for _, n, _ in parts), tuple(d for d, *_ in parts)
            )
            if self.distributions.setdefault(buffer, found) != found:
                raise f.fail(f"register buffer `{buffer.name}` is distributed over the threads of a warp in two ways")

    def threads_of(self, phase: Stmt) -> int:
        """How many neighbouring threads execute a phase of instructions; 0 if it has none. Nothing else may be in it then."""
        fail = self.function.fail
        if not (instructions := [s.instruction for s in _warp_calls(phase)]):
            return 0
        for x in plain_statements(phase):
            if isinstance(x, L.For) and x.kind == "thread.x":
                raise fail(f"an instruction of a warp stands in loop `{x.var.name}`, bound to thread.x", why="the warp is those threads")
            if isinstance(x, L.Store | L.Accumulate):
                raise fail(f"a plain store into `{x.buffer.name}` is in one phase with an instruction of a warp", hint="divide the loops")
        if len({(i.threads, i.background) for i in instructions}) > 1:
            names = ", ".join(dict.fromkeys(f"`{i.name}`" for i in instructions))
            raise fail(f"{names} are in one phase", why="they are executed by other threads, or in the background", hint="divide the loops")
        return instructions[0].threads

    def threads_sharing(self, buffer: Buffer) -> int:
        """Over how many threads a register buffer is distributed."""
        return self.distributions[buffer].fragment.threads if buffer in self.distributions else 1

    def register_of(self, buffer: Buffer, indices: Sequence[Expr]) -> Expr:
        """Which register of a distributed buffer holds an element that a plain statement touches. That it is one of this thread is proved
        from the fragment."""
        f, distribution, place, number = self.function, self.distributions[buffer], as_expr(0), as_expr(0)
        fragment, dims = distribution.fragment, distribution.dims
        lane = next((v for v in E.variables(*indices) if v in self.lanes), as_expr(0))
        sizes, last = dict(zip(dims, distribution.sizes, strict=False)), bounds(lane)[1]
        for v in E.variables(*(indices[d] for d in dims)):
            step = tuple(simplify(E.substitute(indices[d], {v: v + 1}) - indices[d]) for d in dims)
            number = number + v * distribution.steps.get(step, 0)
        proved = len(sizes) == len(fragment.indices) and last is not None and last < fragment.threads
        for d in f.private_dims[buffer]:
            size, whole = sizes.get(d, 1), f.constant(buffer, buffer.shape[d])
            place = place * (whole // size) + simplify(indices[d] // size)
            if proved and d in sizes:
                held = E.substitute(fragment.indices[dims.index(d)], {fragment.lane: lane, ELEMENT: number})
                proved = whole % size == 0 and simplify(held - indices[d] % size) is as_expr(0)
        if not proved:
            why = f"`{E.read(buffer, tuple(indices))}` is not certainly held by the thread that touches it"
            what = f"register buffer `{buffer.name}` is distributed over the threads of a warp"
            raise f.fail(what, why, "touch it in the order of the fragments")
        return simplify(place * fragment.count + number)

    @property
    def alignment(self) -> int:
        """Bytes to whose multiples buffers in shared memory are aligned: those of a vector, or those after which swizzling repeats."""
        return math.prod(CORE) * max(SWIZZLED) if self.background else CORE[1]

    @contextmanager
    def around(self, phase: Stmt) -> Iterator[None]:
        """Around a phase: if its instructions run in the background, what they need in front of them, and that they are a group."""
        f, calls = self.function, [s for s in _warp_calls(phase) if s.instruction.background]
        sums = list(dict.fromkeys(match(s.instruction, s.body).accesses[s.instruction.result][0] for s in calls))
        for b in sums:
            if b not in f.names:
                what = f"register buffer `{b.name}` is allocated in one phase with the instructions that add to it in the background"
                raise f.fail(what, hint="outside")
            f.line(f"{f.helper('settle')}({f.names[b]});")
        if calls:
            f.line(f"{f.helper('begin_products')}();")
        yield
        if calls:
            f.line(f"{f.helper('complete_products')}();")
            self.pending = sums

    def finish(self) -> None:
        """Wait for the instructions that are under way."""
        f = self.function
        if self.pending:
            f.line(f"{f.helper('finish_products')}();")
        for b in self.pending:
            f.line(f"settle({f.names[b]});")
        self.pending = []

    def emit(self, s: L.Call) -> None:
        """An instruction, by the threads that execute it together."""
        f, instruction = self.function, s.instruction
        f.line(f"// {instruction.name}")
        with f.braces(""):
            call = _Operation(self, s)
            if instruction.background:
                return call.multiply_in_background()
            f.declare(instruction.fragment(instruction.result).lane, "threadIdx.x")
            return call.multiply() if call.op.code else call.assign()


def _pieces(f: FunctionBuilder, s: L.Call, matched: Match, operand: Buffer) -> int:
    """How many pieces of 16 bytes the rows of an operand in shared memory have. Raises `CodegenError` where it has no such rows."""
    buffer, indices = matched.accesses[operand][0], s.instruction.places()[operand]
    zero = dict.fromkeys(indices, as_expr(0))
    start = f.linear(buffer, matched.indices(operand, zero))
    group, row = (difference(f.linear(buffer, matched.indices(operand, zero | {indices[d]: as_expr(1)})), start) for d in (0, 2))
    size = itemsize(buffer.dtype)
    for pieces in SWIZZLED:
        if row is as_expr(CORE[1] * pieces // size) and group in (as_expr(0), as_expr(CORE[0] * CORE[1] * pieces // size)):
            return pieces
    why = f"its rows lie {row} elements apart, and 8 rows {group}"
    raise f.fail(f"`{buffer.name}` cannot be described to `{s.instruction.name}`", why, "rows of 32, 64, or 128 bytes, side by side")


def _warp_calls(s: Stmt) -> list[L.Call]:
    return [x for x in L.walk(s) if isinstance(x, L.Call)]


class _Operation:
    """One `Call` of an instruction: where its operands lie, and its text."""

    def __init__(self, warps: WarpInstructions, s: L.Call) -> None:
        self.function, self.distributions, self.instruction = warps.function, warps.distributions, s.instruction
        self.matched, self.op, self.result = match(s.instruction, s.body), s.instruction.emission, s.instruction.result
        operands = {b.name: b for b in s.instruction.meaning.buffers}
        self.factors = [operands[name] for name in dict.fromkeys(self.op.arguments) if name != self.result.name]
        self.constraint = "+f" if is_float(self.result.dtype) else "+r"

    def multiply(self) -> None:
        """Fragments into registers, the PTX instruction, the result back."""
        f, result = self.function, self.result
        total, places = f.fresh("d"), self.elements(result)
        f.line(f"{REGISTER[result.dtype]} {total}[{len(places)}] = {{{', '.join(places)}}};")
        registers = {result.name: [f"{total}[{n}]" for n in range(len(places))]}
        for factor in self.factors:
            packed, array = self.packed(factor), f.fresh(factor.name)
            f.line(f"const unsigned int {array}[{len(packed)}] = {{{', '.join(packed)}}};")
            registers[factor.name] = [f"{array}[{n}]" for n in range(len(packed))]
        numbers, lists = itertools.count(), {}
        for name in dict.fromkeys(self.op.arguments):
            lists[name] = "{" + ", ".join(f"%{next(numbers)}" for _ in registers[name]) + "}"
        outputs = ", ".join(f'"{self.constraint}"({r})' for r in registers[result.name])
        inputs = ", ".join(f'"r"({r})' for factor in self.factors for r in registers[factor.name])
        f.line(f'asm("{self.op.code} {", ".join(lists[name] for name in self.op.arguments)};" : {outputs} : {inputs});')
        for n, place in enumerate(places):
            f.line(f"{place} = {total}[{n}];")

    def multiply_in_background(self) -> None:
        """The PTX instruction, on registers of the sum and on descriptors of the factors."""
        places, descriptors = self.elements(self.result), [self.descriptor(b) for b in self.factors]
        numbers = [f"%{n}" for n in range(len(places) + len(descriptors))]
        listed = [f"{{{', '.join(numbers[: len(places)])}}}", *numbers[len(places) :], "add"]
        # Neither factor is negated; of two bytes, both could be transposed, and are not.
        listed += {2: ["1", "1", "0", "0"], 4: ["1", "1"], 1: []}[itemsize(self.instruction.factors()[0].dtype)]
        outputs = ", ".join(f'"{self.constraint}"({place})' for place in places)
        inputs = ", ".join(f'"l"({x})' for x in descriptors)
        code = f"{{ .reg .pred add; setp.eq.b32 add, 0, 0; {self.op.code} {', '.join(listed)}; }}"
        self.function.line(f'asm volatile("{code}" : {outputs} : {inputs});')

    def assign(self) -> None:
        """The store of an instruction that is not an operation of the machine, for each element of this thread."""
        f, leaf = self.function, self.instruction.leaf
        for n in range(self.instruction.fragment(self.result).count):
            place, read = self.element(leaf.buffer, n), leaf.value.op == "read"
            value = self.element(leaf.value.attr, n) if read else f.stored(leaf.buffer.dtype, f.expression(leaf.value))
            f.line(f"{place} = {value};")

    def descriptor(self, operand: Buffer) -> str:
        """Where an operand in shared memory starts, and the size of its rows."""
        f, buffer = self.function, self.matched.accesses[operand][0]
        pieces, size = f.swizzled[buffer], itemsize(buffer.dtype)
        start = f.linear(buffer, self.matched.indices(operand, dict.fromkeys(self.instruction.places()[operand], as_expr(0))))
        terms = {m: c for m, c in linear(start).items() if c * size % (CORE[0] * CORE[1] * pieces)}  # 8 rows have their own terms
        low, high = bounds(from_linear(terms))
        within = low is not None and high is not None and 0 <= low and high * size <= CORE[1] * (pieces - 2)
        if not within or any(c * size % CORE[1] for c in terms.values()):
            why = f"it starts at element {start}, not certainly in the first of 8 rows, {CORE[1] * pieces} bytes long, at a multiple of 16"
            raise f.fail(f"`{buffer.name}` cannot be described to `{self.instruction.name}`", why)
        return f"{f.helper('matrix')}<{pieces}>({f.use(buffer)} + {f.expression(start)})"

    def packed(self, operand: Buffer) -> list[str]:
        """The 32-bit registers of an operand, elements in order from the lowest bits."""
        f, buffer, found = self.function, self.matched.accesses[operand][0], []
        factor = next(e for e in self.instruction.factors() if any(r.attr is operand for r in E.reads(e)))
        per, name = 4 // itemsize(factor.dtype), f.use(buffer)
        for first in range(0, self.instruction.fragment(operand).count, per):
            places = [self.indices(operand, n) for n in range(first, first + per)]
            starts = [f.linear(buffer, i) for i in places]
            together = [simplify(x - starts[0]) for x in starts] == [as_expr(n) for n in range(per)]
            aligned = all(c % per == 0 for c in linear(starts[0]).values()) and f.target.vector_access
            if factor.op != "read":
                at = {E.read(operand, self.instruction.places()[operand]): E.read(buffer, places[0])}
                found.append(f"{f.helper('bits')}<unsigned int>({f.expression(E.substitute(factor, at))})")
            elif per > 1 and together and aligned:
                found.append(f"*reinterpret_cast<const unsigned int*>({name} + {f.expression(starts[0])})")
            else:
                elements = [f"(unsigned int)({REGISTER[f'uint{32 // per}']}){name}[{f.expression(x)}]" for x in starts]
                found.append(" | ".join(f"{element} << {n * 32 // per}" for n, element in enumerate(elements)))
        return found

    def indices(self, operand: Buffer, number: int) -> tuple[Expr, ...]:
        """Where in its buffer an element lies that this thread holds."""
        places = [E.substitute(i, {ELEMENT: E.const(number)}) for i in self.instruction.fragment(operand).indices]
        return self.matched.indices(operand, dict(zip(self.instruction.places()[operand], places, strict=True)))

    def elements(self, operand: Buffer) -> list[str]:
        return [self.element(operand, n) for n in range(self.instruction.fragment(operand).count)]

    def element(self, operand: Buffer, number: int) -> str:
        """The place of an element: in memory, or in the registers of this thread."""
        f, buffer = self.function, self.matched.accesses[operand][0]
        if buffer in self.distributions:  # an operand of the instruction
            return f"{f.names[buffer]}[{f.expression(self.tile(operand) * self.distributions[buffer].fragment.count + number)}]"
        return f"{f.names[buffer]}[{f.address(buffer, self.indices(operand, number))}]"

    def tile(self, operand: Buffer) -> Expr:
        """The number of the tile that the instruction touches, among those of a register buffer."""
        f, instruction, (buffer, indices) = self.function, self.instruction, self.matched.accesses[operand]
        extents = {x.var: int(x.extent) for x in instruction.loops}
        moving = {self.matched.loops[i]: extents[i] for i in instruction.places()[operand] if i in self.matched.loops}
        at, number = dict.fromkeys(moving, as_expr(0)), as_expr(0)
        for d in f.private_dims[buffer]:
            size = math.prod(n for v, n in moving.items() if v in E.variables(indices[d]))
            start, whole = simplify(E.substitute(indices[d], at)), f.constant(buffer, buffer.shape[d])
            inside = {simplify(indices[d] - start)} <= {as_expr(0), *moving}
            if whole % size or simplify(start % size) is not as_expr(0) or not inside:
                what = f"register buffer `{buffer.name}` is not made of the tiles of `{instruction.name}`"
                raise f.fail(what, f"index {indices[d]} of {whole}")
            number = number * (whole // size) + simplify(start // size)
        return simplify(number)
