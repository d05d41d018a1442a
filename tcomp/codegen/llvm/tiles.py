"""Products in the tile registers of x86 processors (AMX): 8 registers of up to 16 rows of 64 bytes, of the shapes in a configuration.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18 (tiles, palettes, LDTILECFG); Linux,
Documentation/arch/x86/xstate.rst (a process asks for the registers before it uses them).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

from tcomp.codegen.llvm.builder import Value
from tcomp.codegen.llvm.kernel_module import bytes_constant
from tcomp.ir.access import coefficient, linear_index
from tcomp.ir.expr import INDEX, Expr, const, loop_var
from tcomp.ir.instruction import TILE, Instruction, Match, TileOp, tile_depth
from tcomp.ir.loops import PARALLEL, Accumulate, Buffer, Call, For, Stmt, Store, perfect, walk

if TYPE_CHECKING:
    from tcomp.codegen.llvm.kernel import Function

LANE = 4  # bytes of a lane
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA = 158, 0x1023, 18  # the number of the system call on x86-64, and its arguments


def ask_for_tiles(f: Function) -> None:
    """Ask Linux, at the start of a kernel, to let the process use tile registers. Where it does already, that takes a tenth of a
    microsecond."""
    if f.target.platform.os != "linux":
        return
    f.module.declarations["syscall"] = "declare i64 @syscall(i64, ...)"
    f.slots.append(f"  %tiles = call i64 (i64, ...) @syscall(i64 {ARCH_PRCTL}, i64 {ARCH_REQ_XCOMP_PERM}, i64 {TILE_DATA})")


def release_tiles(f: Function) -> None:
    """Clear the registers, so that the system need not save them when it runs another thread."""
    _intrinsic(f, "llvm.x86.tilerelease")


@contextmanager
def configured(f: Function, s: Stmt) -> Iterator[None]:
    """Configure the tile registers in front of a statement, if all products in it need the same: to do so takes longer than a product.
    Parallel loops configure those of their threads, which may be this one."""
    calls = (x.instruction for x in walk(s) if isinstance(x, Call) and isinstance(x.instruction.emission, TileOp))
    needed, before = {_Blocks(i, i.emission).configuration for i in calls if isinstance(i.emission, TileOp)}, f.tiles
    if before is None and len(needed) == 1 and not any(isinstance(x, For) and x.kind == PARALLEL for x in walk(s)):
        (f.tiles,) = needed
        _configure(f, f.tiles)
    yield
    f.tiles = before


class _Blocks:
    """How the operands of an instruction are cut into tiles: (start, size) along rows and columns; sums, rows, and columns take the first
    registers, in this order."""

    def __init__(self, instruction: Instruction, op: TileOp) -> None:
        self.extents, (self.row, self.column) = {x.var: int(x.extent) for x in instruction.loops}, instruction.leaf.indices
        *self.windows, self.steps = [v for v in self.extents if v not in (self.row, self.column, instruction.loops[-1].var)]
        operands = {b.name: b for b in instruction.meaning.buffers}
        self.operands = [operands[name] for name in op.arguments]
        self.depth = tile_depth(self.extents[self.steps])
        self.down, self.across = (
            [(n, min(most, self.extents[v] - n)) for n in range(0, self.extents[v], most)]
            for v, most in zip((self.row, self.column), TILE, strict=True)
        )
        self.sums = [(r, c) for r in range(len(self.down)) for c in range(len(self.across))]

    @property
    def configuration(self) -> bytes:
        """What LDTILECFG reads: palette 1, and of each tile the bytes of a row, and the rows."""
        shapes = [(self.down[r][1], self.across[c][1]) for r, c in self.sums]
        shapes += [(n, self.depth) for _, n in self.down] + [(self.depth, n) for _, n in self.across]
        rest = [0] * (16 - len(shapes))
        return struct.pack("<BB14x16H16B", 1, 0, *(LANE * lanes for _, lanes in shapes), *rest, *(rows for rows, _ in shapes), *rest)


def emit_tiles(f: Function, instruction: Instruction, op: TileOp, matched: Match, cleared: bool) -> None:
    """The product of an instruction: sums are loaded, unless they were just `cleared`, products of all steps added, and sums stored."""
    at = _Blocks(instruction, op)
    sums, rows, columns = at.operands
    f.has_tiles = f.module.has_tiles = True
    if f.tiles != at.configuration:
        _configure(f, at.configuration)
    along = ((sums, at.row), (rows, at.row), (columns, at.steps))
    pitches = {b: _pitch(f, matched, b, v, at.extents[v]) for b, v in along}
    of_rows, of_columns = len(at.sums), len(at.sums) + len(at.down)

    def move(name: str, tile: int, b: Buffer, place: Mapping[Expr, int]) -> None:
        _intrinsic(f, f"llvm.x86.{name}64", ("i8", tile), ("ptr", _pointer(f, matched, b, place)), ("i64", pitches[b]))

    def products() -> None:
        for n, (r, _) in enumerate(at.down, of_rows):
            move("tileloadd", n, rows, {at.row: r})
        for n, (c, _) in enumerate(at.across, of_columns):
            move("tileloadd", n, columns, {at.column: c})
        for tile, (r, c) in enumerate(at.sums):
            _intrinsic(f, op.code, ("i8", tile), ("i8", of_rows + r), ("i8", of_columns + c))

    places = [{at.row: at.down[r][0], at.column: at.across[c][0]} for r, c in at.sums]
    for tile, place in enumerate(places):
        _intrinsic(f, "llvm.x86.tilezero", ("i8", tile)) if cleared else move("tileloadd", tile, sums, place)
    walks = [(matched.loops[v], at.extents[v], 1) for v in at.windows if v in matched.loops]
    if at.steps in matched.loops:
        walks.append((matched.loops[at.steps], at.extents[at.steps] // at.depth, at.depth))
    _nest(f, walks, products)
    for tile, place in enumerate(places):
        move("tilestored", tile, sums, place)
    f.forget((matched.accesses[sums][0],))


def clears(s: Stmt, call: Stmt) -> bool:
    """Whether a statement sets all elements of a buffer to 0, to which tiles are then added."""
    loops, leaf = perfect(s)
    if not isinstance(call, Call) or not isinstance(call.instruction.emission, TileOp) or not isinstance(leaf, Store):
        return False
    place, size = linear_index(leaf.buffer, leaf.indices), 1
    for step, extent in sorted((coefficient(place, x.var) or 0, x.extent) for x in loops if x.extent != 1 and isinstance(x.extent, int)):
        if step != size:
            return False
        size *= extent
    same = any(isinstance(x, Accumulate) and x.buffer is leaf.buffer for x in walk(call.body))
    return same and leaf.value in (const(0, "int32"), const(0.0, "float32")) and size == prod(leaf.buffer.shape)


def is_whole(call: Call) -> bool:
    """Whether an instruction adds to all elements of a buffer."""
    leaf = next(x for x in walk(call.body) if isinstance(x, Accumulate))
    return prod(leaf.buffer.shape) == prod(call.instruction.result.shape)


def _configure(f: Function, configuration: bytes) -> None:
    _intrinsic(f, "llvm.x86.ldtilecfg", ("ptr", f.module.constant(bytes_constant(configuration), 64)))


def _intrinsic(f: Function, name: str, *arguments: tuple[str, object]) -> None:
    types = ", ".join(type_ + " immarg" * (type_ == "i8") for type_, _ in arguments)
    f.module.declarations.setdefault(name, f"declare void @{name}({types})")
    f.line(f"call void @{name}({', '.join(f'{type_} {value}' for type_, value in arguments)})")


def _pointer(f: Function, matched: Match, b: Buffer, at: Mapping[Expr, int]) -> str:
    """The address of an operand's element for values of loops of the meaning; others have values already, or are at their start."""
    own = [(meant, v) for meant, v in matched.loops.items() if v not in f.bound]
    f.constants |= {v: at.get(meant, 0) for meant, v in own}
    pointer = f.address(*matched.accesses[b]).pointer
    for _, v in own:
        del f.constants[v]
    return pointer


def _pitch(f: Function, matched: Match, b: Buffer, v: Expr, extent: int) -> str:
    """Bytes from one iteration of a loop of the meaning to the next."""
    if extent == 1:
        return "0"
    start, following = (f.op(f"ptrtoint ptr {_pointer(f, matched, b, {v: n})} to i64") for n in (0, 1))
    return f.op(f"sub i64 {following}, {start}")


def _nest(f: Function, loops: Sequence[tuple[Expr, int, int]], body: Callable[[], None]) -> None:
    """Nested loops, each (variable, iterations, by how much one iteration moves the variable)."""
    if not loops:
        return body()
    (v, count, step), *rest = loops
    if count == 1:
        return _nest(f, rest, body)

    def iteration() -> None:
        f.bind(v, f.arithmetic("mul", [f.bound[counter], Value(str(step), INDEX)], INDEX))
        _nest(f, rest, body)
        del f.bound[v], f.depth[v]

    counter, (head, end) = loop_var(f"{v.name}.tile", count), f.labels("tiles", "end")
    f.jump(head)
    f.counted(counter, "0", str(count), head, end, iteration)
