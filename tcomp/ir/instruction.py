"""Machine instructions as data: the meaning of one (a loop program), its requirements, its cost, and how it is emitted.

The *meaning* is a kernel over the operands: one perfect nest of serial loops of constant extent around one store or accumulation, in
which every index is a loop, such as `for k in 0..1 { for r in 0..1 { for j in 0..16 { acc[r, j] += a[r, k] * b[k, j] } } }`. `match` finds
the meaning in a loop nest of a program. A loop of the nest can stand for a loop of the meaning if it has the same extent, moves the
addresses of the same operands, and moves each of them by the stride that the instruction demands. Nests match up to the order of their
loops and of commutative operands; they must be equal otherwise.

In C[i * 6 + r, j * 16 + l] += A[i * 6 + r, k] * B[k, j * 16 + l], loops r, l, k stand for r (moves acc and a), j (acc and b), k (a and b).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

from tcomp.errors import IRError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import is_float, itemsize
from tcomp.ir.expr import Dim, Expr, as_expr, loop_var
from tcomp.ir.loops import SCOPES, SERIAL, Accumulate, Buffer, For, Kernel, LoopPrinter, Stmt, Store, perfect
from tcomp.ir.scalar_operators import COMMUTATIVE
from tcomp.ir.simplify import as_dim, difference, prove, simplify
from tcomp.ir.text.printer import quoted

WARP, WARPGROUP = 32, 128  # threads that execute an instruction together
CORE = (8, 16)  # rows and bytes of each that tensor cores read together from shared memory (a core matrix)
TILE = (16, 16)  # rows of a tile register of a CPU, and its lanes of 32 bits in each,
TILES = 8  # of which there are so many
ELEMENT = E.var("e", 0)  # one of the elements that a thread holds

Leaf = Store | Accumulate


def lane_of(threads: int) -> Expr:
    """One of the threads that execute an instruction together."""
    return loop_var("lane", threads)


@dataclass(frozen=True, slots=True)
class Fragment:
    """How an operand is distributed over the registers of the `threads` that execute an instruction together: thread `lane` holds `count`
    elements, and its element number `ELEMENT` is the one at `indices` of the operand."""

    indices: tuple[Expr, ...]
    count: int
    threads: int = WARP

    @property
    def lane(self) -> Expr:
        """The variable that numbers the threads."""
        return lane_of(self.threads)


@dataclass(frozen=True, slots=True)
class Operand:
    """Requirements on a buffer operand: its stride along each dimension of the operand, in elements (None: any), and its scopes.

    Operands of a `WarpOp` that its threads hold in registers have a `fragment`. Others are read from shared memory by the tensor cores
    themselves, in the background: rows of 32, 64, or 128 bytes that follow each other, which the code generator *swizzles*.
    """

    strides: tuple[int | None, ...]
    scopes: tuple[str, ...] = SCOPES
    fragment: Fragment | None = None


@dataclass(frozen=True, slots=True)
class VectorOp:
    """Emission for a CPU: an LLVM intrinsic, or one of `codegen.llvm.sequences`, on vector registers, once for each iteration of the loops
    that are not inside of them.

    The result has `lanes` elements along the last dimension of the operand that is written. Each lane reduces `group` elements of the other
    operands (over the innermost loop of the meaning, if there is more than one: a dot product). An operand that does not depend on the lane
    is broadcast. `arguments` names the operands in the order of the intrinsic.
    """

    code: str
    arguments: tuple[str, ...]
    lanes: int
    group: int = 1


@dataclass(frozen=True, slots=True)
class TileOp:
    """Emission for a CPU with registers of `TILE` (AMX): an LLVM intrinsic that adds the product of a tile of rows and one of columns to a
    tile of sums, which are in registers from the first product to the last.

    Each lane of 32 bits reduces `group` elements, over the innermost loop of the meaning. Of the other loops that the result does not have,
    the innermost walks the lanes of a tile, in which the first operand is contiguous. `arguments` names the result, the operand of the rows
    and that of the columns.
    """

    code: str
    arguments: tuple[str, ...]
    group: int


@dataclass(frozen=True, slots=True)
class WarpOp:
    """Emission for a GPU: a PTX instruction that the threads of a warp (or of a warpgroup, as the fragments say) execute together.

    `arguments` names the operands in its order, the result first. Without `code` each thread computes the elements of its own.
    """

    code: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """`meaning` over its buffers, an `Operand` for each; the last written one is the only output.

    A target must have one of `features` (for a GPU, an architecture at least as new as one of them). `cycles` is the time between two of
    them with operands in the first-level cache, `uops` counts micro-operations. With `reassociates` the sum of floats is in an order of its
    own. Raises `IRError` where the meaning is not of the form above or does not fit the emission.
    """

    name: str
    meaning: Kernel
    operands: tuple[Operand, ...]
    emission: VectorOp | TileOp | WarpOp
    features: tuple[str, ...]
    cycles: float
    uops: int
    reassociates: bool = False

    def __post_init__(self) -> None:
        if why := next((why for wrong, why in _faults(self) if wrong), ""):
            raise IRError(f"`{self.name}` is not an instruction", where=str(self.meaning), why=why)

    def __str__(self) -> str:
        return "\n".join(self.declaration(LoopPrinter(), ""))

    def __repr__(self) -> str:
        return self.name

    @property
    def loops(self) -> list[For]:
        """The loops of the meaning, outermost first."""
        return perfect(self.meaning.body)[0]

    @property
    def leaf(self) -> Leaf:
        """The store or accumulation of the meaning."""
        leaf = perfect(self.meaning.body)[1]
        assert isinstance(leaf, Leaf)
        return leaf

    @property
    def result(self) -> Buffer:
        """The buffer that the meaning writes."""
        return self.leaf.buffer

    def places(self) -> dict[Buffer, tuple[Expr, ...]]:
        """The loops that index each operand."""
        return {self.result: self.leaf.indices} | {r.attr: r.args for r in E.reads(self.leaf.value)}

    def operand(self, buffer: Buffer) -> Operand:
        """The requirements on a buffer of the meaning."""
        return self.operands[self.meaning.buffers.index(buffer)]

    def fragment(self, buffer: Buffer) -> Fragment:
        """Of an operand of a `WarpOp` that the threads hold."""
        found = self.operand(buffer).fragment
        assert found is not None
        return found

    @property
    def threads(self) -> int:
        """How many execute a `WarpOp` together."""
        return self.fragment(self.result).threads

    @property
    def background(self) -> bool:
        """Whether a `WarpOp` runs in the background, as those do that read shared memory themselves."""
        return any(o.fragment is None for o in self.operands)

    def factors(self) -> list[Expr]:
        """The operands of the product that is added, as they are before the conversion to its type."""
        return [x.args[0] if x.op == "cast" else x for x in self.leaf.value.args]

    def declaration(self, outer: LoopPrinter, indent: str) -> list[str]:
        """Its declaration, as lines, in a kernel that `outer` prints. It has a name space of its own, except for reducers."""
        inner, op = LoopPrinter(), self.emission
        inner.reducers = outer.reducers
        buffers = ", ".join(inner.buffer(b) for b in self.meaning.buffers)
        lines = [f"{indent}instruction {outer.instructions(self, self.name)}({buffers}) -> ({quoted(self.result.name)}) {{"]
        inside = indent + "  "
        for b, o in zip(self.meaning.buffers, self.operands, strict=True):
            strides, fragment = ", ".join("_" if s is None else str(s) for s in o.strides), ""
            scopes = "" if o.scopes == SCOPES else f" in {', '.join(o.scopes)}"
            if o.fragment is not None:
                lane, among = o.fragment.lane, "" if o.fragment.threads == WARP else f" among {o.fragment.threads}"
                inner.variables.bind(lane, lane.name)
                inner.variables.bind(ELEMENT, ELEMENT.name)
                with inner.variables.scope((lane, ELEMENT)):
                    fragment = f" holds {o.fragment.count}{among} at [{inner.listed(o.fragment.indices, '')}]"
            lines.append(f"{inside}operand {quoted(b.name)}[{strides}]{scopes}{fragment}")
        order, needs = " reassociates" if self.reassociates else "", f"needs {', '.join(map(json.dumps, self.features))}"
        lines.append(f"{inside}{needs} takes {float(self.cycles)!r} cycles {self.uops} uops{order}")
        kind = {VectorOp: "vector", TileOp: "tile", WarpOp: "warp"}[type(op)]
        lanes = f" lanes {op.lanes}" if isinstance(op, VectorOp) else ""
        lanes += "" if isinstance(op, WarpOp) else f" group {op.group}"
        lines.append(f"{inside}emits {kind} {json.dumps(op.code)}({', '.join(map(quoted, op.arguments))}){lanes}")
        return [*lines, *inner.statement(self.meaning.body, inside), indent + "}"]


def _faults(instruction: Instruction) -> Iterator[tuple[bool, str]]:
    """(whether it occurs, its description) of each possible fault of an instruction; one is evaluated only if none before it occurs."""
    meaning, op, names = instruction.meaning, instruction.emission, [b.name for b in instruction.meaning.buffers]
    legal = re.fullmatch(r"\w+(\([\w, ]*\))?", instruction.name, re.ASCII) and re.fullmatch(r"[\w.:]*", op.code, re.ASCII)
    yield not legal, "its name is not of the form f or f(1, x), or that of its code not of letters, digits, dots and colons"
    loops, leaf = perfect(meaning.body)
    serial = all(x.kind == SERIAL and isinstance(x.extent, int) and x.extent >= 1 for x in loops)
    yield not isinstance(leaf, Leaf) or not serial, "its meaning is not one store in serial loops of constant extent"
    assert isinstance(leaf, Leaf)
    extents, reads = {x.var: x.extent for x in loops}, E.reads(leaf.value)
    indexed, read = [leaf.indices, *(r.args for r in reads)], [r.attr for r in reads]
    yield any(not set(i) <= set(extents) or len(set(i)) < len(i) for i in indexed), "an index is not a loop of its own"
    yield len(set(read)) < len(read) or leaf.buffer in read, "it reads a buffer in two places"
    closed = set(meaning.buffers) == {leaf.buffer, *read} and meaning.outputs == (leaf.buffer,) and not meaning.scalars
    yield not closed, "its buffers are not the operands of the store"
    ranks = [len(o.strides) for o in instruction.operands] == [len(b.shape) for b in meaning.buffers]
    yield not ranks, "there is not one stride for each dimension of each operand"
    over = all(extents[i] == n for b, indices in instruction.places().items() for i, n in zip(indices, b.shape, strict=True))
    yield not over, "a loop does not run over the dimension that it indexes"
    yield not set(op.arguments) <= set(names), "its emission takes an operand that it does not have"
    if not isinstance(op, WarpOp):
        yield sorted(op.arguments) != sorted(names), "its emission does not take each operand once"
    if isinstance(op, VectorOp):
        yield from _vector_faults(instruction, op, loops, leaf)
    elif isinstance(op, TileOp):
        yield from _tile_faults(instruction, op, loops, leaf)
    else:
        yield from _fragment_faults(instruction, leaf)


def _vector_faults(instruction: Instruction, op: VectorOp, loops: list[For], leaf: Leaf) -> Iterator[tuple[bool, str]]:
    """Of what is computed in vector registers."""
    shape, group = leaf.buffer.shape, op.group
    fits = op.lanes >= 1 and group >= 1 and shape and isinstance(shape[-1], int) and shape[-1] % op.lanes == 0
    yield not fits, "the lanes do not divide the last dimension of the result"
    lane = leaf.indices[-1]
    grouped = group == 1 or (loops[-1].extent == group and loops[-1].var not in leaf.indices)
    yield not grouped, "its innermost loop is not the group that a lane reduces"
    for b, indices in instruction.places().items():
        needed = {lane: group if b is not leaf.buffer else 1} | ({loops[-1].var: 1} if group > 1 else {lane: 1})
        for i, stride in zip(indices, instruction.operand(b).strides, strict=True):
            yield stride != needed.get(i, stride), f"`{b.name}` does not lie side by side along `{i.name}`"


def _tile_faults(instruction: Instruction, op: TileOp, loops: list[For], leaf: Leaf) -> Iterator[tuple[bool, str]]:
    """Of what is computed in tile registers."""
    products = isinstance(leaf, Accumulate) and leaf.value.op == "mul" and all(len(E.reads(x)) == 1 for x in leaf.value.args)
    yield not products or len(leaf.indices) != 2, "tiles add products of two operands to sums in rows and columns"
    places, (row, column) = {b.name: (b, i) for b, i in instruction.places().items()}, leaf.indices
    (_, at), (a, of_rows), (b, of_columns) = (places[name] for name in op.arguments)
    yield at is not leaf.indices, "the first argument of its emission is not the result"
    whole = itemsize(leaf.buffer.dtype) == 4 and all(itemsize(x.dtype) * op.group == 4 for x in (a, b))
    yield not whole or loops[-1].extent != op.group, "its innermost loop is not over the elements of a lane of 32 bits"
    group, walked = loops[-1].var, [x.var for x in loops[:-1] if x.var not in (row, column)]
    sides = set(of_rows) == {row, *walked, group} and set(of_columns) == {column, *walked, group}
    yield not walked or not sides or at[-1] is not column, "an operand is not of rows or columns, and of all that is summed up"
    strides = [dict(zip(i, instruction.operand(x).strides, strict=True)) for x, i in ((leaf.buffer, at), (a, of_rows), (b, of_columns))]
    lanes = [strides[0][column], strides[1].get(walked[-1]), strides[1].get(group), strides[2][column], strides[2].get(group)]
    yield lanes != [1, op.group, 1, op.group, 1], "lanes do not lie side by side"
    down, across = (-(-int(n) // most) for n, most in zip(leaf.buffer.shape, TILE, strict=True))
    yield down * across + down + across > TILES, "it takes more tiles than there are registers"


def tile_depth(steps: int) -> int:
    """The lanes of a tile along a reduction of so many steps: the most that divide them."""
    return next(n for n in range(TILE[1], 0, -1) if steps % n == 0)


def _fragment_faults(instruction: Instruction, leaf: Leaf) -> Iterator[tuple[bool, str]]:
    """Of what the threads of a warp compute on the elements they hold."""
    op, result = instruction.emission, instruction.result
    for b, o in zip(instruction.meaning.buffers, instruction.operands, strict=True):
        if o.fragment is None and b is not result and op.code and _of_cores(b, o):
            continue
        f, undivided = o.fragment, f"the threads of a warp do not divide `{b.name}` among them"
        yield f is None or len(f.indices) != len(b.shape) or f.count * f.threads != _size(b), undivided
        assert f is not None
        unlike = f"`{b.name}` is divided among {f.threads} threads, `{result.name}` among {instruction.threads}"
        yield f.threads not in (WARP, WARPGROUP) or f.threads != instruction.threads, unlike
        given = all(set(E.variables(x)) <= {f.lane, ELEMENT} and x.dtype == E.INDEX and not E.reads(x) for x in f.indices)
        yield not given, f"the places of `{b.name}` are not given by the thread and the number of the element"
    if not op.code:
        copies = isinstance(leaf, Store) and leaf.value.op in ("read", "const") and len({o.fragment for o in instruction.operands}) == 1
        yield not copies, "without code, a thread copies its elements or stores a constant"
        return
    products = isinstance(leaf, Accumulate) and leaf.value.op == "mul" and all(len(E.reads(x)) == 1 for x in leaf.value.args)
    yield not products, "the code of a warp adds products of two operands"
    fragments = [(itemsize(x.dtype), instruction.operand(E.reads(x)[0].attr).fragment) for x in instruction.factors()]
    yield len({f is None for _, f in fragments}) > 1, "the threads hold one of the factors"
    whole = all(size <= 4 and (f is None or f.count * size % 4 == 0) for size, f in fragments)
    yield not whole or itemsize(leaf.buffer.dtype) != 4, "fragments do not fill registers of 32 bits"


def _of_cores(b: Buffer, operand: Operand) -> bool:
    """Whether an operand is a matrix in shared memory, indexed by core matrix: [rows / 8, columns / row, rows % 8, columns % row]."""
    rows, row = CORE[0], CORE[1] // itemsize(b.dtype)
    fixed = (*b.shape[1:], *operand.strides) == (2, rows, row, None, row, None, 1)
    return len(b.shape) == 4 and fixed and operand.scopes == ("shared",)


def _size(b: Buffer) -> int:
    return prod(map(int, b.shape))


# ---------------------------------------------------------------- matching


@dataclass(frozen=True, slots=True)
class Match:
    """How a nest equals the meaning of an instruction: `loops` maps each loop of the meaning that runs more than once to one of the nest,
    `accesses` each operand to its buffer and the indices there."""

    loops: Mapping[Expr, Expr]
    accesses: Mapping[Buffer, tuple[Buffer, tuple[Expr, ...]]]

    def indices(self, operand: Buffer, at: Mapping[Expr, Expr]) -> tuple[Expr, ...]:
        """Where in its buffer an operand's element lies, for values of the loops that index it in the meaning."""
        values = {v: at[meant] for meant, v in self.loops.items() if meant in at}
        return tuple(simplify(E.substitute(i, values)) for i in self.accesses[operand][1])


class _Mismatch(Exception):
    """Why a nest is not what an instruction computes."""


def match(instruction: Instruction, nest: Stmt) -> Match:
    """Which loops and buffers of a nest are those of the meaning, which it equals. Raises `IRError` that shows both and what differs."""
    try:
        return _match(instruction, nest)
    except _Mismatch as difference:
        sides = f"{nest}\nis not `{instruction.name}`:\n{instruction.meaning.body}"
        raise IRError(f"the loops are not what `{instruction.name}` computes", where="\n" + sides, why=str(difference)) from None


def _match(instruction: Instruction, nest: Stmt) -> Match:
    loops, leaf = perfect(nest)
    if not isinstance(leaf, Leaf):
        inside = str(leaf).split("\n", 1)[0] or "nothing"
        raise _Mismatch(f"inside the loops is not one store but `{inside}`")
    for x in loops:
        if x.kind != SERIAL:
            raise _Mismatch(f"loop `{x.var.name}` is {x.kind}, those of an instruction are serial")
        if not isinstance(x.extent, int):
            raise _Mismatch(f"loop `{x.var.name}` runs {x.extent} times, which is not constant")
    once: dict[Expr, Expr] = {x.var: as_expr(0) for x in loops if x.extent == 1}
    loops = [x for x in loops if x.extent != 1]
    meaning = instruction.leaf
    if isinstance(meaning, Accumulate) and isinstance(leaf, Accumulate):
        r, s = leaf.reducer, meaning.reducer
        if r(s.lhs, s.rhs) is not s.combine or r.identity is not s.identity:
            raise _Mismatch(f"it reduces by `{r.name}` of {r.identity.dtype}, the instruction by `{s.name}` of {s.identity.dtype}")
    elif type(meaning) is not type(leaf):
        verbs = ("accumulates", "stores") if isinstance(leaf, Accumulate) else ("stores", "accumulates")
        raise _Mismatch(f"it {verbs[0]}, the instruction {verbs[1]}")
    if leaf.buffer.dtype != meaning.buffer.dtype:
        raise _Mismatch(f"`{leaf.buffer.name}` is {leaf.buffer.dtype}, `{meaning.buffer.name}` is {meaning.buffer.dtype}")
    unlike: list[str] = []  # what keeps the value from being that of the meaning
    misplaced: list[str] = []  # what keeps the loops from it, where the value is
    for operands in _unified([(meaning.value, leaf.value)], {meaning.buffer: (leaf.buffer, leaf.indices)}, unlike):
        accesses = {b: (at, tuple(simplify(E.substitute(i, once)) for i in indices)) for b, (at, indices) in operands.items()}
        try:
            return Match(_assigned_loops(instruction, loops, accesses), accesses)
        except _Mismatch as difference:
            misplaced.append(str(difference))
    raise _Mismatch((misplaced or unlike)[0])


_Accesses = Mapping[Buffer, tuple[Buffer, tuple[Expr, ...]]]  # operand of the meaning -> buffer and indices of the nest
_Strides = Mapping[Buffer, Mapping[Expr, Dim]]  # operand of the meaning -> by how many elements each loop moves it


def _unified(pairs: Sequence[tuple[Expr, Expr]], bound: _Accesses, differences: list[str]) -> Iterator[_Accesses]:
    """The ways to read expressions as those of the meaning, with which they are paired; where there is none, `differences` says why."""
    if not pairs:
        yield bound
        return
    (m, e), *rest = pairs
    if m.op == "read" and e.op == "read" and m.dtype == e.dtype:
        yield from _unified(rest, {**bound, m.attr: (e.attr, e.args)}, differences)
    elif m.op == "read" and e.op == "read":
        differences.append(f"`{e}` is {e.dtype}, `{m}` is {m.dtype}")
    elif m.op in ("read", "const", "var") or (m.op, m.dtype, m.attr) != (e.op, e.dtype, e.attr):
        if m is e:
            yield from _unified(rest, bound, differences)
        else:
            differences.append(f"`{e}` of {e.dtype} stands where the instruction has `{m}` of {m.dtype}")
    else:
        swapped = m.op in COMMUTATIVE and e.args[0] is not e.args[1]
        for args in [e.args, e.args[::-1]] if swapped else [e.args]:
            yield from _unified([*zip(m.args, args, strict=True), *rest], bound, differences)


def _assigned_loops(instruction: Instruction, loops: Sequence[For], accesses: _Accesses) -> dict[Expr, Expr]:
    """Loop of the meaning -> loop of the nest; those that run once have been taken out."""
    result = instruction.result
    written, written_at = accesses[result]
    for operand, (buffer, indices) in accesses.items():
        if any(r.attr is written for r in E.reads(*indices)):
            raise _Mismatch(f"`{written.name}` is written, and read to find the place in `{buffer.name}`")
        if buffer is written and operand is not result:
            raise _Mismatch(f"`{buffer.name}` is written and read, `{result.name}` and `{operand.name}` are different buffers")
        scopes = instruction.operand(operand).scopes
        if buffer.scope not in scopes:
            raise _Mismatch(f"`{buffer.name}` is in {buffer.scope} memory, `{operand.name}` must be in {' or '.join(scopes)} memory")
    meant = [x for x in instruction.loops if x.extent != 1]
    if len(meant) != len(loops):
        here, there = (", ".join(f"{x.var.name} ({x.extent})" for x in side) or "none" for side in (loops, meant))
        raise _Mismatch(f"its loops that run more than once are {here}; those of the instruction {there}")
    strides = {operand: _strides(buffer, indices, [x.var for x in loops]) for operand, (buffer, indices) in accesses.items()}
    misfits = {(x, m): _misfit(x, m, instruction, strides, accesses) for x in loops for m in meant}
    found = next((p for p in permutations(loops) if all(misfits[pair] is None for pair in zip(p, meant, strict=True))), None)
    if found is None:
        for m in meant:
            reasons = [misfit for x in loops if (misfit := misfits[x, m]) is not None]
            if len(reasons) == len(loops):  # the reason of the loop that meets most conditions
                raise _Mismatch(max(reasons, key=lambda reason: reason[0])[1])
        names = ", ".join(m.var.name for m in meant)
        raise _Mismatch(f"each of its loops can stand for one of {names}, but not for all of them at once")
    mapping = {m.var: x.var for m, x in zip(meant, found, strict=True)}
    leaf = instruction.leaf
    if not instruction.reassociates and isinstance(leaf, Accumulate) and is_float(leaf.value.dtype):
        reductions = [x for x, m in zip(found, meant, strict=True) if m.var not in leaf.indices]
        if reductions != sorted(reductions, key=loops.index):
            names = ", ".join(x.var.name for x in reductions)
            raise _Mismatch(f"sums of {leaf.value.dtype} depend on their order: the reduction loops must be nested as {names}")
    if not _distinct([(step, int(x.extent)) for x in found if (step := strides[result][x.var]) != 0]):
        place = ", ".join(map(str, written_at))
        raise _Mismatch(f"`{written.name}[{place}]` is the same element in several iterations, `{result.name}` has one for each")
    return mapping


def _strides(buffer: Buffer, indices: Sequence[Expr], variables: Sequence[Expr]) -> dict[Expr, Dim]:
    """By how many elements the place moves along each loop. It must not depend on where the loops are."""
    position = simplify(E.row_major(indices, buffer.shape))
    steps = {v: difference(E.substitute(position, {v: v + 1}), position) for v in variables}
    for v, step in steps.items():
        if set(E.variables(step)) & set(variables) or E.reads(step):
            raise _Mismatch(f"`{buffer.name}` does not move by equal steps along `{v.name}`")
    return {v: as_dim(step) for v, step in steps.items()}


def _misfit(x: For, meant: For, instruction: Instruction, strides: _Strides, accesses: _Accesses) -> tuple[int, str] | None:
    """Why a loop cannot stand for one of the meaning, with the number of conditions that it does meet; None if it can."""
    demands = {b: dict(zip(indices, instruction.operand(b).strides, strict=True)) for b, indices in instruction.places().items()}
    wanted = {operand: strides_of[meant.var] for operand, strides_of in demands.items() if meant.var in strides_of}
    moved = {operand for operand, steps in strides.items() if steps[x.var] != 0}
    if moved != set(wanted):
        here, there = (" and ".join(sorted({accesses[o][0].name for o in side})) or "nothing" for side in (moved, wanted))
        return 0, f"loop `{x.var.name}` moves {here}, `{meant.var.name}` of the instruction would move {there}"
    if x.extent != meant.extent:
        return 1, f"loop `{x.var.name}` runs {x.extent} times, `{meant.var.name}` of the instruction {meant.extent} times"
    for operand, stride in wanted.items():
        step = strides[operand][x.var]
        if stride is not None and step != stride:
            here = f"`{accesses[operand][0].name}` moves by {step} elements along `{x.var.name}`"
            return 2, f"{here}, `{operand.name}` must move by {stride} along `{meant.var.name}`"
    return None


def _distinct(moved: Sequence[tuple[Dim, int]]) -> bool:
    """Whether all iterations of loops with these (stride, iterations) certainly access different elements."""
    known = sorted((abs(s), n) for s, n in moved if isinstance(s, int))
    reach = as_expr(0)
    for step, extent in [*((as_expr(s), n) for s, n in known), *((s, n) for s, n in moved if isinstance(s, Expr))]:
        if not prove(reach < step):
            return False
        reach = simplify(reach + step * (extent - 1))
    return True
