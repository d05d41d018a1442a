"""Tiles of products on a GPU: which axes of a result a block takes, how far, by which threads; by structure and by an analytic model.

A side of a tile (its rows, its columns) runs along one axis of the result, or along two, as the pixels of an image do.

    float32        `threads` along the side, each with `per_thread` neighbouring elements (along two axes: threads along the outer one)
    tensor cores   `threads` are warps, each with `per_thread` elements, in tiles of 16 rows or 8 columns of an `mma` (`unit`)
    sm_90a         `threads` are warpgroups, each with `per_thread` elements: any number of times 64 rows, columns of one `wgmma` (see
                   `tensor_cores`); along two axes, 8 of them (`unit`) along the inner one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product as all_pairs
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.instruction import CORE, WARP, WARPGROUP, Instruction
from tcomp.ir.loops import Accumulate, For
from tcomp.schedules.analysis.access_patterns import Nest, extent_of, iterations
from tcomp.schedules.gpu.thread_mapping import LETTERS, longest, power_of_two
from tcomp.schedules.instructions import mma, tf32, wgmma
from tcomp.schedules.primitives.reductions import core_of, product_of
from tcomp.target import CudaTarget

MIN_EXTENT = 16  # rows, columns, and elements of the reduction: below, threads would copy more than they compute
MMA_ARCHITECTURE = 80  # compute capability (times 10) from which on there is the `mma` of `schedules.instructions`
SLICE_WAIT = 40  # cycles that the threads of a block wait for each other and for copies, for each slice: two barriers (an estimate)
WGMMA_ARCHITECTURE = "sm_90a"  # the only architecture with `wgmma`
MAX_OPTIONS = 8  # tiles of a kind that a decision chooses among: bounds the search of the tuner
HIDDEN = 0.75  # share of the shorter of multiplications and reads that the longer one hides (an estimate)
SINGLE_WAVE = 1.5  # waves that one wave counts as: a block that is alone on its SM waits more (an estimate)
# Of an instruction that so many threads execute together: threads (or warps, warpgroups) along rows and columns, elements of one along
# rows and along columns, and what these are multiples of along the last axis: they bound the search
_SHAPES: dict[int, tuple[Sequence[tuple[int, int]], Sequence[int], Sequence[int], tuple[int, int]]] = {
    1: (((16, 16), (32, 8), (8, 32)), range(1, 9), range(1, 9), (0, 0)),
    WARP: (((2, 2), (4, 2), (2, 4), (1, 4), (4, 1), (1, 2), (2, 1)), (16, 32, 64), (8, 16, 32, 64), (16, 8)),
    WARPGROUP: (((1, 1), (2, 1), (1, 2)), (64, 128), (16, 32, 64, 128, 256), (CORE[0], CORE[0])),
}
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of a split reduction: bounds the search


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a tile: `threads` (or warps) along the first axis, each with `per_thread` elements, `unit` of them along the last
    axis."""

    axes: tuple[int, ...]
    threads: int
    per_thread: int
    unit: int

    @property
    def size(self) -> int:
        """Elements of the side."""
        return self.threads * self.per_thread

    def extents(self) -> dict[int, int]:
        """How far a tile reaches along each axis."""
        return {self.axes[0]: self.size} if len(self.axes) == 1 else {self.axes[0]: self.size // self.unit, self.axes[1]: self.unit}


@dataclass(frozen=True, slots=True)
class Tile:
    """`depth`: of the slice of the reduction that is staged at a time; `tensor`: the dtype of the instruction that computes it, if one
    does, and `instruction_threads`: how many threads execute it together (else 1)."""

    rows: Side
    columns: Side
    depth: int
    tensor: str
    instruction_threads: int

    @property
    def by_warpgroups(self) -> bool:
        """Whether its instructions are those of warpgroups."""
        return self.instruction_threads == WARPGROUP

    @property
    def instruction(self) -> Instruction:
        """The instruction of the tensor cores that computes the tile."""
        return wgmma(self.tensor, self.columns.per_thread) if self.by_warpgroups else mma(self.tensor)

    @property
    def instruction_shape(self) -> tuple[int, int]:
        """Rows and columns of an instruction."""
        return (64, self.columns.per_thread) if self.by_warpgroups else (16, 8)

    @property
    def axes(self) -> list[int]:
        """The axes of the result along which the tile reaches."""
        return sorted(self.rows.axes + self.columns.axes)

    def outer_dims(self, rank: int) -> list[str]:
        """The other dimensions of a buffer of this rank, as layouts name them."""
        return [LETTERS[d] for d in range(rank) if d not in self.axes]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows.threads * self.columns.threads * self.instruction_threads

    @property
    def accumulators(self) -> int:
        """Of a thread."""
        return self.rows.per_thread * self.columns.per_thread // self.instruction_threads

    def pieces(self, cut: Callable[..., list[str]], width: int, by_instruction: bool = False) -> tuple[list[str], list[str]]:
        """The pieces into which `cut(axis, *factors)` splits the axes of the rows, and of the columns: first the piece over threads (or
        warps), then the elements of one; with `by_instruction` further split into the shape of an instruction.

        Of columns a thread has as many side by side as an access takes (`width`), the next ones behind those of the other threads.
        """
        found = []
        for side, unit in zip((self.rows, self.columns), self.instruction_shape, strict=True):
            factors, thread = tuple[int, ...]([side.per_thread]), 0
            if self.tensor:
                factors += (unit,) * by_instruction + CORE[:1] * self.by_warpgroups
                if len(side.axes) > 1:
                    factors = (side.per_thread // side.unit, *(n // side.unit for n in factors[1:] if n > side.unit))
            elif len(side.axes) > 1:
                factors = ()
            elif side is self.columns and side.per_thread != width:
                factors, thread = ((side.threads * width, width) if width > 1 else (side.threads,)), 1
            own = [*cut(side.axes[0], *factors), *(x for d in side.axes[1:] for x in cut(d))]
            found.append([own.pop(thread), *own])
        return found[0], found[1]


@dataclass(frozen=True)
class Product:
    """The access patterns of a sum of products: the axes of the result that move one factor only, by their numbers, and the number of the
    factor of the columns; the reduction that is sliced; the dtype of the `mma` that computes such products, if there is one."""

    reduction: Nest
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    right: int
    sliced: For
    tensor: str
    target: CudaTarget

    @cached_property
    def reads(self) -> list[tuple[E.Expr, ...]]:
        """The reads in the factor of the rows, and in that of the columns."""
        factors = factors_of(self.reduction)
        return [E.reads(factors[1 - self.right]), E.reads(factors[self.right])]

    @cached_property
    def along_reduction(self) -> list[bool]:
        """Of the rows and of the columns: whether neighbours along the sliced reduction lie side by side in all that is read."""
        return [all(stride(r, self.sliced.var) == 1 for r in reads) for reads in self.reads]

    @property
    def copied_along_reduction(self) -> list[E.Expr]:
        """The reads whose slices best lie along the reduction: the rows, and whatever narrow elements tensor cores multiply."""
        return [*self.reads[0], *(self.reads[1] if self.tensor and itemsize(self.tensor) < 4 else ())]

    @property
    def length(self) -> int:
        """Elements of the whole reduction."""
        return iterations(self.reduction.reduction_loops)

    def blocks(self, tile: Tile) -> int:
        """Of the whole result; each axis rounds up to tiles."""
        reach = tile.rows.extents() | tile.columns.extents()
        return prod(-(-extent_of(x.extent) // reach.get(d, 1)) for d, x in enumerate(self.reduction.spatial))

    def tiles(self) -> list[Tile]:
        """The best tiles of each kind, best first."""
        kinds = [_candidates(self), *([_candidates(self, True)] if self.tensor and self.target.executes(WGMMA_ARCHITECTURE) else [])]
        return sorted((tile for kind in kinds for tile in sorted(kind, key=self._cycles)[:MAX_OPTIONS]), key=self._cycles)

    def best_split(self, least: int, gain: float) -> int:
        """Into how many parts of at least `least` elements a reduction is best split (split-K), if that is faster by the factor `gain`."""
        pairs = all_pairs(_candidates(self), (n for n in PARTS if n == 1 or n * least <= self.length))
        return min((self._cycles(tile, n) * (1 if n == 1 else gain), n) for tile, n in pairs)[1]

    def _cycles(self, tile: Tile, parts: int = 1) -> float:
        """How long the busiest SM computes, if the reduction is split into parts, whose sums are then stored, loaded and added by another
        launch."""
        gpu, results = self.target.gpu, iterations(self.reduction.spatial)
        second_launch = (results * parts * 2 * itemsize(self.reduction.writes.dtype) / gpu.cache + gpu.launch) * gpu.ghz
        of_block = self.cycles_of_block(tile) + SLICE_WAIT / tile.depth
        return of_block * waves(self.blocks(tile) * parts, self.target) * (self.length / parts) + (second_launch if parts > 1 else 0)

    def cycles_of_block(self, tile: Tile) -> float:
        """Cycles of a block for each element of the reduction: multiplications, overlapped with reads of shared memory; and copies to it.

        Tensor cores read fragments of 4 bytes a lane (or the factors themselves, for each instruction). Others multiply 128 lanes a cycle.
        """
        rows, columns, warps, gpu = tile.rows, tile.columns, tile.threads // WARP, self.target.gpu
        if tile.tensor:
            size, groups = itemsize(tile.tensor), rows.threads * columns.threads
            multiplies = rows.size * columns.size * size / 2 / gpu.tensor / (2 if tile.by_warpgroups else 1)
            again = rows.per_thread // tile.instruction_shape[0] if tile.by_warpgroups else 1
            reads = groups * (rows.per_thread + columns.per_thread * again) * size / gpu.shared_bandwidth
            return _overlapped(multiplies, reads) + (rows.size + columns.size) * size / gpu.shared_bandwidth
        along = self.along_reduction
        of_rows = rows.per_thread * (0.25 if along[0] else 1 / power_of_two(rows.per_thread, 4))
        reads = of_rows + columns.per_thread / power_of_two(columns.per_thread, 2)
        copied = sum(side.size / tile.threads * (0.25 if a else 1) for side, a in zip((rows, columns), along, strict=True))
        return (_overlapped(tile.accumulators / 4, reads) + copied) * warps


def _overlapped(a: float, b: float) -> float:
    return max(a, b) + (1 - HIDDEN) * min(a, b)


def waves(blocks: int, target: CudaTarget) -> float:
    """The number of blocks that the busiest SM computes one after the other."""
    return -(-blocks // target.gpu.sms) if blocks > target.gpu.sms else SINGLE_WAVE


def find(reduction: Nest, out: Nest, target: CudaTarget) -> Product | None:
    """The access patterns of a sum of products, if it is large enough along all axes."""
    factors, axes = factors_of(reduction), reduction.spatial
    if not factors or not reduction.reduction_loops or not axes or reduction.leaf.indices != tuple(x.var for x in axes):
        return None
    first, second = (set(E.variables(factor)) for factor in factors)
    one, other = (tuple(d for d, x in enumerate(axes) if x.var in own) for own in (first - second, second - first))
    if not one or not other or not all(x.var in first & second for x in reduction.reduction_loops):
        return None
    right, rows, columns = (0, other, one) if one[-1] > other[-1] else (1, one, other)
    if stride(E.read(out.writes, out.leaf.indices), out.loops[columns[-1]].var) != 1:
        return None
    sizes = [iterations(axes[d] for d in side[-2:]) for side in (rows, columns)]
    if min(*sizes, iterations(reduction.reduction_loops)) < MIN_EXTENT:
        return None
    along = [x for x in reduction.reduction_loops if extent_of(x.extent) >= 8 and any(stride(r, x.var) == 1 for r in reduction.reads)]
    tensor = _tensor_dtype(reduction, right) if target.compute_capability >= MMA_ARCHITECTURE else ""
    return Product(reduction, rows, columns, right, longest(along or reduction.reduction_loops), tensor, target)


def _tensor_dtype(reduction: Nest, right: int) -> str:
    """The dtype of the tensor cores' instruction for the products that are summed; none if they have none that computes the same."""
    factors = factors_of(reduction)
    cores = [core_of(f) for f in factors]
    dtype = cores[1 - right].dtype
    if dtype not in ("float16", "bfloat16", "float32", "int8", "uint8"):
        return ""
    total, second = mma(dtype).result.dtype, mma(dtype).meaning.buffers[2].dtype
    convert = tf32 if dtype == "float32" else lambda x: E.cast(x, total)
    same = all(f is convert(c) for f, c in zip(factors, cores, strict=True))
    return dtype if same and cores[right].dtype == second and reduction.writes.dtype == total else ""


def factors_of(reduction: Nest) -> tuple[E.Expr, ...]:
    """The two factors of a sum of products, if both read; empty for other reductions."""
    product = product_of(reduction.leaf)[0] if isinstance(reduction.leaf, Accumulate) else None
    return product.args if product is not None and all(map(E.reads, product.args)) else ()


def tensor_depth(dtype: str) -> int:
    """Elements of the reduction that an instruction of the tensor cores takes."""
    return 32 // itemsize(dtype)


def _candidates(product: Product, by_warpgroups: bool = False) -> Iterator[Tile]:
    """Tiles whose instructions a warp or a warpgroup executes together; each thread its own where tensor cores have none."""
    together = WARPGROUP if by_warpgroups else WARP if product.tensor else 1
    shapes, heights, widths, units = _SHAPES[together]
    unit = tensor_depth(product.tensor) if product.tensor else 1
    length = -(-extent_of(product.sliced.extent) // unit)
    for y, x in shapes:
        for rows, columns in all_pairs(_sides(product.rows, y, heights, units[0]), _sides(product.columns, x, widths, units[1])):
            own = rows.per_thread * columns.per_thread // together
            if 4 <= own <= (128 if product.tensor else 64):
                power = 1 << (min(4, length) - 1).bit_length()  # rows of 32, 64, or 128 bytes, for `wgmma`
                steps = {1: min(length, 16 if own <= 32 else 8), WARP: 2, WARPGROUP: power}[together]
                yield Tile(rows, columns, steps * unit, product.tensor, together)


def _sides(axes: tuple[int, ...], threads: int, sizes: Sequence[int], unit: int = 0) -> Iterator[Side]:
    """Along the last axis (powers of two), or along the last two; without a `unit` all of a thread's elements are one."""
    for each in sizes:
        if each & (each - 1) == 0:
            yield Side(axes[-1:], threads, each, unit or each)
        if len(axes) > 1:
            yield Side(axes[-2:], threads, each, unit or each)
