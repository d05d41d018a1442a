"""Instructions of a warp in CUDA C++: the threads hold fragments of the operands, inline PTX combines them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tcomp.codegen.cuda_math import REGISTER
from tcomp.ir import expr as E
from tcomp.ir import loops as L
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import Expr, as_expr
from tcomp.ir.instruction import ELEMENT, LANE, WARP, Fragment, Instruction, Match, WarpOp, match
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.simplify import linear, simplify

if TYPE_CHECKING:
    from tcomp.codegen.cuda import Function


class Warps:
    """The instructions of one `__global__` function. `fragments`: how register buffers are divided among the threads of a warp, and the
    sizes of the tiles that they are made of. Plain statements may touch what the thread itself holds."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.fragments: dict[Buffer, Fragment] = {}
        self.sizes: dict[Buffer, tuple[int, ...]] = {}
        self.lanes: set[Expr] = set()  # loops over the threads of a warp

    # ------------------------------------------------------------ what stands where

    def survey(self, body: Stmt) -> None:
        """Finds what the threads of a warp share; only instructions may touch it."""
        calls = [s for s in L.walk(body) if isinstance(s, L.Call)]
        for s in calls:
            self.divide(s)
        fail, width = self.function.fail, self.function.block[0]
        if calls and width % WARP:
            raise fail(f"a block is {width} threads wide", why=f"instructions of a warp take {WARP} that stand side by side")
        self.lanes = {s.var for s in L.walk(body) if isinstance(s, L.For) and s.kind == "thread.x"}

    def divide(self, s: L.Call) -> None:
        """The register buffers that an instruction touches are divided among the threads as it says."""
        f = self.function
        instruction, op = s.instruction, s.instruction.emission
        needed = [int(x[3:]) for x in instruction.features if re.fullmatch(r"sm_\d+", x)]
        if not isinstance(op, WarpOp) or not needed or f.target.compute_capability < min(needed):
            why = f"it needs {' or '.join(instruction.features)}"
            raise f.fail(f"the target `{f.target}` has no instruction `{instruction.name}`", why)
        for operand, (buffer, _) in match(instruction, s.body).accesses.items():
            if buffer.scope != "register":
                continue
            self.sizes[buffer] = tuple(int(n) for n in operand.shape)
            if self.fragments.setdefault(buffer, instruction.fragment(operand)) != instruction.fragment(operand):
                raise f.fail(f"register buffer `{buffer.name}` is divided among the threads of a warp in two ways")

    def execute(self, phase: Stmt) -> bool:
        """Whether a phase consists of instructions. Nothing else may be in it then: its statements are executed by 32 threads."""
        if not any(isinstance(s, L.Call) for s in L.walk(phase)):
            return False
        fail = self.function.fail
        for x in _plain(phase):
            if isinstance(x, L.For) and x.kind == "thread.x":
                raise fail(f"an instruction of a warp stands in loop `{x.var.name}`, bound to thread.x", why="the warp is those threads")
            if isinstance(x, L.Store | L.Accumulate):
                raise fail(f"a plain store into `{x.buffer.name}` stands beside an instruction of a warp", hint="divide the loops")
        return True

    def sharing(self, buffer: Buffer) -> int:
        """How many threads divide a register buffer among them."""
        return WARP if buffer in self.fragments else 1

    def own(self, buffer: Buffer, indices: Sequence[Expr]) -> Expr:
        """Which register of a divided buffer holds an element that a plain statement touches: it must be this thread's.

        The numbers of the element and of the tile are read off the steps of the loops; that the fragment then says the same is proved.
        """
        f, fragment = self.function, self.fragments[buffer]
        lane = next((v for v in E.variables(*indices) if v in self.lanes), as_expr(0))
        moving = [d for d in f.kept[buffer] if lane in E.variables(indices[d])]
        sizes = dict(zip(moving, self.sizes[buffer], strict=False))
        origin = [E.substitute(i, {LANE: as_expr(0), ELEMENT: as_expr(0)}) for i in fragment.indices]
        steps = {
            tuple(
                simplify(E.substitute(i, {LANE: as_expr(0), ELEMENT: E.const(n)}) - o)
                for i, o in zip(fragment.indices, origin, strict=True)
            ): n
            for n in range(fragment.count)
        }
        number: Expr = as_expr(0)
        for v in dict.fromkeys(E.variables(*(indices[d] for d in moving))):
            step = tuple(simplify(E.substitute(indices[d], {v: v + 1}) - indices[d]) for d in moving)
            number = number + v * steps.get(step, 0)
        place: Expr = as_expr(0)
        proved = len(moving) == len(fragment.indices)
        for d in f.kept[buffer]:
            size, whole = sizes.get(d, 1), f.constant(buffer, buffer.shape[d])
            place = place * (whole // size) + simplify(indices[d] // size)
            if proved and d in sizes:
                held = E.substitute(fragment.indices[moving.index(d)], {LANE: lane, ELEMENT: number})
                proved = whole % size == 0 and simplify(held - indices[d] % size) is as_expr(0)
        if not proved:
            place_text = ", ".join(map(str, indices))
            why = f"`{buffer.name}[{place_text}]` is not certainly held by the thread that touches it"
            raise f.fail(
                f"register buffer `{buffer.name}` is divided among the threads of a warp", why, "touch it in the order of the fragments"
            )
        return simplify(place * fragment.count + number)

    # ------------------------------------------------------------ emission

    def instruction(self, s: L.Call) -> None:
        f = self.function
        instruction, op = s.instruction, s.instruction.emission
        assert isinstance(op, WarpOp)
        roles = match(instruction, s.body)
        f.line(f"// {instruction.name}")
        with f.braces(""):
            f.declare(LANE, "threadIdx.x")
            if op.ptx:
                self.warp_operation(instruction, op, roles)
            else:
                for n in range(instruction.fragment(instruction.result).count):
                    self.assign_element(instruction, roles, n)

    def warp_operation(self, instruction: Instruction, op: WarpOp, roles: Match) -> None:
        """Fragments into registers, the PTX instruction, the result back."""
        f = self.function
        operands = {b.name: b for b in instruction.meaning.buffers}
        result = instruction.result
        kind = REGISTER[result.dtype]
        total = f.fresh("d")
        places = [self.element(instruction, roles, result, n) for n in range(instruction.fragment(result).count)]
        f.line(f"{kind} {total}[{len(places)}] = {{{', '.join(places)}}};")
        registers = {result.name: [f"{total}[{n}]" for n in range(len(places))]}
        for name in dict.fromkeys(op.arguments):
            if name != result.name:
                packed = self.packed(instruction, roles, operands[name])
                array = f.fresh(name)
                f.line(f"const unsigned int {array}[{len(packed)}] = {{{', '.join(packed)}}};")
                registers[name] = [f"{array}[{n}]" for n in range(len(packed))]
        letter = "f" if is_float(result.dtype) else "r"
        numbers: dict[str, str] = {}
        count = 0
        for name in dict.fromkeys(op.arguments):
            listed = [f"%{count + n}" for n in range(len(registers[name]))]
            numbers[name] = "{" + ", ".join(listed) + "}"
            count += len(listed)
        outputs = ", ".join(f'"+{letter}"({r})' for r in registers[result.name])
        inputs = ", ".join(f'"r"({r})' for name, rs in registers.items() if name != result.name for r in rs)
        f.line(f'asm("{op.ptx} {", ".join(numbers[name] for name in op.arguments)};" : {outputs} : {inputs});')
        for n, place in enumerate(places):
            f.line(f"{place} = {total}[{n}];")

    def packed(self, instruction: Instruction, roles: Match, operand: Buffer) -> list[str]:
        """The 32-bit registers of an operand, elements in order from the lowest bits."""
        f = self.function
        factor = next(e for e in instruction.factors() if any(r.attr is operand for r in E.reads(e)))
        per = 4 // itemsize(factor.dtype)
        found = []
        for first in range(0, instruction.fragment(operand).count, per):
            elements = [self.located(instruction, roles, operand, n) for n in range(first, first + per)]
            buffer, indices = elements[0]
            starts = [f.linear(buffer, i) for _, i in elements]
            f.used_buffers[buffer] = None
            together = [simplify(x - starts[0]) for x in starts] == [as_expr(n) for n in range(per)]
            aligned = all(c % per == 0 for c in linear(starts[0]).values()) and not f.target.has("scalar")
            if factor.op != "read":
                at = {E.read(operand, instruction.places()[operand]): E.read(buffer, indices)}
                found.append(f"{f.helper('bits')}<unsigned int>({f.expression(E.substitute(factor, at))})")
            elif per > 1 and together and aligned:
                found.append(f"*reinterpret_cast<const unsigned int*>({f.names[buffer]} + {f.expression(starts[0])})")
            else:
                width = 32 // per
                kind = {8: "unsigned char", 16: "unsigned short", 32: "unsigned int"}[width]
                parts = [f"{f.names[buffer]}[{f.expression(x)}]" for x in starts]
                found.append(" | ".join(f"(unsigned int)({kind}){part} << {n * width}" for n, part in enumerate(parts)))
        return found

    def located(self, instruction: Instruction, roles: Match, operand: Buffer, number: int) -> tuple[Buffer, tuple[Expr, ...]]:
        """Where an element that this thread holds lies."""
        places = [E.substitute(i, {ELEMENT: E.const(number)}) for i in instruction.fragment(operand).indices]
        at = dict(zip(instruction.places()[operand], places, strict=True))
        return roles.accesses[operand][0], roles.indices(operand, at)

    def element(self, instruction: Instruction, roles: Match, operand: Buffer, number: int) -> str:
        """The place of such an element: in memory, or in the registers of this thread."""
        f = self.function
        buffer, indices = self.located(instruction, roles, operand, number)
        if buffer in self.fragments:  # an operand of the instruction
            return f"{f.names[buffer]}[{f.expression(self.tile(instruction, roles, operand) * self.fragments[buffer].count + number)}]"
        return f"{f.names[buffer]}[{f.address(buffer, indices)}]"

    def tile(self, instruction: Instruction, roles: Match, operand: Buffer) -> Expr:
        """The number of the tile that an instruction touches, among those of a register buffer."""
        f = self.function
        buffer, indices = roles.accesses[operand]
        extents = {x.var: int(x.extent) for x in instruction.loops}
        moving = {roles.loops[i]: extents[i] for i in instruction.places()[operand] if i in roles.loops}
        at = {v: as_expr(0) for v in moving}
        number: Expr = as_expr(0)
        for d in f.kept[buffer]:
            size = math.prod(n for v, n in moving.items() if v in E.variables(indices[d]))
            start, whole = simplify(E.substitute(indices[d], at)), f.constant(buffer, buffer.shape[d])
            inside = {simplify(indices[d] - start)} <= {as_expr(0), *moving}
            if whole % size or simplify(start % size) is not as_expr(0) or not inside:
                raise f.fail(
                    f"register buffer `{buffer.name}` is not made of the tiles of `{instruction.name}`", f"index {indices[d]} of {whole}"
                )
            number = number * (whole // size) + simplify(start // size)
        return simplify(number)

    def assign_element(self, instruction: Instruction, roles: Match, number: int) -> None:
        """The store of an instruction that is no operation of the machine, for one element of this thread."""
        f = self.function
        leaf = instruction.leaf
        place = self.element(instruction, roles, leaf.buffer, number)
        if leaf.value.op == "read":
            value = self.element(instruction, roles, leaf.value.attr, number)
        else:
            value = f.stored(leaf.buffer.dtype, f.expression(leaf.value))
        f.line(f"{place} = {value};")


def _plain(s: Stmt) -> Iterator[Stmt]:
    """The statements that are not executed by an instruction."""
    if not isinstance(s, L.Call):
        yield s
        for child in L.children(s):
            yield from _plain(child)
