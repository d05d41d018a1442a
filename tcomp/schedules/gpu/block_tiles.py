"""Tiles of products on a GPU: which axes of a result a block takes, how far, by which threads; by structure and by an analytic model.

A side of a tile (its rows, its columns) runs along one axis of the result, or along two, as the pixels of an image do.

    float32        `threads` along the side, each with `per_thread` neighbouring elements (along two axes: threads along the outer one)
    tensor cores   `threads` are warps, each with `per_thread` elements, in tiles of 16 rows or 8 columns of an `mma` (`unit`)
    sm_90a         `threads` are warpgroups, each with `per_thread` elements: any number of times 64 rows, columns of one `wgmma` (see
                   `wgmma`); along two axes, 8 of them (`unit`) along the inner one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.instruction import CORE, WARP, WARPGROUP, Instruction
from tcomp.ir.loops import Accumulate, For
from tcomp.schedules.analysis.access_patterns import Nest, extent_of
from tcomp.schedules.cost.gpu import LAUNCH_TIME
from tcomp.schedules.instructions import mma, tf32, wgmma
from tcomp.schedules.primitives.cache_factors import core_of, product_of
from tcomp.target import CudaTarget

MIN_EXTENT = 16  # rows, columns, and elements of the reduction: below, threads would copy more than they compute
MMA_ARCHITECTURE = 80  # compute capability (times 10) from which on there is the `mma` of `schedules.instructions`
SLICE_WAIT = 40  # cycles that the threads of a block wait for each other and for copies, for each slice: two barriers
WGMMA_ARCHITECTURE = "sm_90a"  # the only architecture with `wgmma`


@dataclass(frozen=True, slots=True)
class Product:
    """The axes of the result that move one factor only, by their numbers, and the number of that factor; the reduction that is sliced; the
    dtype of the `mma` that computes such products, if there is one."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    right: int
    sliced: For
    tensor: str


@dataclass(frozen=True, slots=True)
class Side:
    """Of a tile: `threads` (or warps) along the first axis, of which each has `per_thread` elements, `unit` of them along the last axis."""

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
    def instruction(self) -> Instruction:
        """The instruction of the tensor cores that computes the tile."""
        return mma(self.tensor) if self.instruction_threads == WARP else wgmma(self.tensor, self.columns.per_thread)

    @property
    def instruction_shape(self) -> tuple[int, int]:
        """Rows and columns of an instruction."""
        return (16, 8) if self.instruction_threads == WARP else (64, self.columns.per_thread)

    @property
    def instruction_depth(self) -> int:
        """Elements of the reduction that an instruction takes."""
        return tensor_depth(self.tensor)

    @property
    def axes(self) -> list[int]:
        """The axes of the result along which the tile reaches."""
        return sorted(self.rows.axes + self.columns.axes)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows.threads * self.columns.threads * self.instruction_threads

    @property
    def accumulators(self) -> int:
        """Of a thread."""
        return self.rows.per_thread * self.columns.per_thread // self.instruction_threads

    def blocks(self, reduction: Nest) -> int:
        """Of the whole result; each axis rounds up to tiles."""
        reach = self.rows.extents() | self.columns.extents()
        return prod(-(-extent_of(x.extent) // reach.get(d, 1)) for d, x in enumerate(reduction.spatial))


# ---------------------------------------------------------------- the structure


def find(reduction: Nest, out: Nest, target: CudaTarget) -> Product | None:
    """The roles of the axes of a sum of products, if it is large enough along all of them."""
    factors = _factors(reduction)
    if len(factors) != 2 or not all(E.reads(factor) for factor in factors) or not reduction.reduction_loops or not reduction.spatial:
        return None
    if reduction.leaf.indices != tuple(x.var for x in reduction.spatial):
        return None
    used = [set(E.variables(factor)) for factor in factors]
    alone = [tuple(d for d, x in enumerate(reduction.spatial) if x.var in used[n] and x.var not in used[1 - n]) for n in (0, 1)]
    if not all(alone) or not all(x.var in used[0] and x.var in used[1] for x in reduction.reduction_loops):
        return None
    right = 0 if alone[0][-1] > alone[1][-1] else 1
    rows, columns = alone[1 - right], alone[right]
    lane = out.loops[columns[-1]].var
    if stride(E.read(out.writes, out.leaf.indices), lane) != 1:
        return None
    sizes = [prod(extent_of(reduction.spatial[d].extent) for d in axes[-2:]) for axes in (rows, columns)]
    depth = prod(extent_of(x.extent) for x in reduction.reduction_loops)
    if min(*sizes, depth) < MIN_EXTENT:
        return None
    along = [x for x in reduction.reduction_loops if extent_of(x.extent) >= 8 and any(stride(r, x.var) == 1 for r in reduction.reads)]
    sliced = max(along or reduction.reduction_loops, key=lambda x: extent_of(x.extent))
    return Product(rows, columns, right, sliced, _tensor(reduction, right, target))


def _tensor(reduction: Nest, right: int, target: CudaTarget) -> str:
    """The dtype of the tensor cores' instruction for the products that are summed; none if they have none that computes the same."""
    if target.compute_capability < MMA_ARCHITECTURE:
        return ""
    factors = _factors(reduction)
    cores = [core_of(f) for f in factors]
    dtype = cores[1 - right].dtype
    if dtype not in ("float16", "bfloat16", "float32", "int8", "uint8"):
        return ""
    total, second = mma(dtype).result.dtype, mma(dtype).meaning.buffers[2].dtype
    convert = tf32 if dtype == "float32" else lambda x: E.cast(x, total)
    same = all(f is convert(c) for f, c in zip(factors, cores, strict=True))
    return dtype if same and cores[right].dtype == second and reduction.writes.dtype == total else ""


def tiles(reduction: Nest, product: Product, target: CudaTarget) -> list[Tile]:
    """The best tiles, best first; those of warpgroups behind the others."""

    def best(candidates: Iterator[Tile]) -> list[Tile]:
        return sorted(candidates, key=lambda tile: _cycles(reduction, product, tile, 1, target))[:8]

    wgmma_runs = product.tensor and target.executes(WGMMA_ARCHITECTURE)
    return best(_candidates(reduction, product)) + (best(_wgmma_candidates(product)) if wgmma_runs else [])


def best_split(reduction: Nest, product: Product, target: CudaTarget, least: int, certain: float) -> int:
    """Into how many parts of at least `least` elements a reduction is best split (split-K), if that is faster by the factor `certain`."""
    length = prod(extent_of(x.extent) for x in reduction.reduction_loops)
    options = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if n == 1 or n * least <= length]
    candidates = list(_candidates(reduction, product))
    return min((_cycles(reduction, product, tile, n, target) * (1 if n == 1 else certain), n) for tile in candidates for n in options)[1]


def _candidates(reduction: Nest, product: Product) -> Iterator[Tile]:
    if product.tensor:
        depth = tensor_depth(product.tensor)
        for wy, wx in ((2, 2), (4, 2), (2, 4), (1, 4), (4, 1), (1, 2), (2, 1)):
            for rows in _sides(product.rows, wy, [(16 * n, 16) for n in (1, 2, 4)]):
                for columns in _sides(product.columns, wx, [(8 * n, 8) for n in (1, 2, 4, 8)]):
                    yield Tile(rows, columns, 2 * depth, product.tensor, WARP)
        return
    for ty, tx in ((16, 16), (32, 8), (8, 32)):
        for rows in _sides(product.rows, ty, [(n, n) for n in range(1, 9)]):
            for columns in _sides(product.columns, tx, [(n, n) for n in range(1, 9)]):
                if 4 <= rows.per_thread * columns.per_thread <= 64:
                    yield Tile(
                        rows, columns, min(extent_of(product.sliced.extent), 16 if rows.per_thread * columns.per_thread <= 32 else 8), "", 1
                    )


def _wgmma_candidates(product: Product) -> Iterator[Tile]:
    """Slices are 128 bytes deep, and shorter ones where the reduction is."""
    length = -(-extent_of(product.sliced.extent) // tensor_depth(product.tensor))
    for wy, wz in ((1, 1), (2, 1), (1, 2)):
        for rows in _sides(product.rows, wy, [(64 * n, CORE[0]) for n in (1, 2)]):
            for columns in _sides(product.columns, wz, [(n, CORE[0]) for n in (16, 32, 64, 128, 256)]):
                if rows.per_thread * columns.per_thread <= 128 * WARPGROUP:
                    yield Tile(rows, columns, min(4, length) * tensor_depth(product.tensor), product.tensor, WARPGROUP)


def tensor_depth(dtype: str) -> int:
    """Elements of the reduction that an instruction of the tensor cores takes."""
    return 32 // itemsize(dtype)


def _sides(axes: tuple[int, ...], threads: int, sizes: Sequence[tuple[int, int]]) -> Iterator[Side]:
    """Along the last axis, or along the last two."""
    for each, unit in sizes:
        if each & (each - 1) == 0:
            yield Side(axes[-1:], threads, each, unit)
        if len(axes) > 1:
            yield Side(axes[-2:], threads, each, unit)


def _cycles(reduction: Nest, product: Product, tile: Tile, parts: int, target: CudaTarget) -> float:
    """How long the busiest SM computes, if the reduction is divided into parts: of a warp, multiplications of 128 lanes, beside 128 bytes
    from shared memory, a cycle."""
    blocks = tile.blocks(reduction) * parts
    waves = -(-blocks // target.gpu.sms) if blocks > target.gpu.sms else 1.5  # a block alone waits more
    length = prod(extent_of(x.extent) for x in reduction.reduction_loops) / parts
    return (cycles_of_block(reduction, product, tile, target) + SLICE_WAIT / tile.depth) * waves * length + (
        _split_k_cycles(reduction, parts, target) if parts > 1 else 0
    )


def cycles_of_block(reduction: Nest, product: Product, tile: Tile, target: CudaTarget) -> float:
    """For each element of the reduction."""
    return _tensor_cycles(tile, target) if tile.tensor else _cycles_of_warp(reduction, product, tile) * (tile.threads // 32)


def _tensor_cycles(tile: Tile, target: CudaTarget) -> float:
    """Of a block, for each element of the reduction: tensor cores, beside fragments of 4 bytes a lane (or what they read themselves, for
    each instruction), and copies of 128 bytes a cycle."""
    rows, columns, size = tile.rows, tile.columns, itemsize(tile.tensor)
    warps, wgmma_runs = rows.threads * columns.threads, tile.instruction_threads == WARPGROUP
    multiplies = rows.size * columns.size * size / 2 / target.gpu.tensor / (2 if wgmma_runs else 1)
    reads = (
        warps * (rows.per_thread + columns.per_thread * (rows.per_thread // tile.instruction_shape[0] if wgmma_runs else 1)) * size / 128
    )
    return max(multiplies, reads) + 0.25 * min(multiplies, reads) + (rows.size + columns.size) * size / 128


def _cycles_of_warp(reduction: Nest, product: Product, tile: Tile) -> float:
    rows, columns = tile.rows, tile.columns
    along = [all_contiguous(r, product.sliced) for r in reads_of(reduction, product)]
    reads = rows.per_thread * (0.25 if along[0] else 1 / _power_in(rows.per_thread, 4)) + columns.per_thread / _power_in(
        columns.per_thread, 2
    )
    multiplies = tile.accumulators / 4
    copied = sum(side.size / tile.threads * (0.25 if a else 1) for side, a in zip((rows, columns), along, strict=True))
    return max(multiplies, reads) + 0.25 * min(multiplies, reads) + copied


def _split_k_cycles(reduction: Nest, parts: int, target: CudaTarget) -> float:
    """Cycles that it takes to store the sums of parts, to load them again, and to start the launch that does it."""
    results = prod(extent_of(x.extent) for x in reduction.spatial)
    return (results * parts * 2 * itemsize(reduction.writes.dtype) / target.gpu.cache + LAUNCH_TIME) * target.gpu.ghz


def _power_in(n: int, most: int) -> int:
    """The largest power of two up to `most` that divides a number."""
    while n % most:
        most //= 2
    return most


def reads_of(reduction: Nest, product: Product) -> list[tuple[E.Expr, ...]]:
    """What the factors of the rows and of the columns are read from."""
    factors = _factors(reduction)
    return [E.reads(factors[1 - product.right]), E.reads(factors[product.right])]


def copied_along_reduction(reduction: Nest, product: Product) -> list[E.Expr]:
    """The reads of the factors whose slices best lie along the reduction: the rows, and whatever narrow elements tensor cores multiply."""
    rows, columns = reads_of(reduction, product)
    return [*rows, *(columns if product.tensor and itemsize(product.tensor) < 4 else ())]


def _factors(reduction: Nest) -> tuple[E.Expr, ...]:
    """Of the product that is summed; none for other reductions."""
    product = product_of(reduction.leaf)[0] if isinstance(reduction.leaf, Accumulate) else None
    return () if product is None else product.args


def all_contiguous(reads: Sequence[E.Expr], axis: For) -> bool:
    """Whether neighbours along an axis lie side by side in all that is read."""
    return all(stride(r, axis.var) == 1 for r in reads)
