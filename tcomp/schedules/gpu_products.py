"""Default GPU schedule of products: tiles of the result in registers, slices of both factors in shared memory, copied ahead.

What counts is the structure of the sum: some axes of the result move one factor and not the other (its *rows*), some the other one (its
*columns*), the rest both (batches). So matrix products, convolutions in any layout, and products of what other operators computed on the
fly are one family. A block computes a tile of rows x columns over the whole fold, in slices; `cache_factors` makes the slices, with zeros
where a tile hangs over an edge, and whatever the factors are: boxes of a matrix, shifted and padded boxes of an image (an implicit
product of matrices), values computed from either.

A side of a tile runs along one axis (each thread takes neighbouring elements), or along two, as the pixels of an image do: the threads
along the outer one, the elements of a thread along the inner one.

Where a result has too few tiles to fill the machine and its fold is long, the fold is divided among blocks first (`divide`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import Accumulate, For, Store, walk
from tcomp.ir.simplify import linear
from tcomp.schedules.gpu_loops import VECTOR_BYTES, fuse_all, lanes, vector_width
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import edit
from tcomp.schedules.primitives.factors import product_of
from tcomp.schedules.roles import Nest, extent_of, fold_nest, linear_index, result_nest, stage_axes, stride
from tcomp.schedules.schedule import Schedule
from tcomp.target import Target

STAGES = 4  # slices in shared memory at most
REGISTERS = 1 << 16  # of an SM
OTHER_REGISTERS = 48  # of a thread, beside its accumulators: addresses, and elements at hand
BACKGROUND = 80  # the first architecture whose copies into shared memory pass no register
LEAST = 16  # rows, columns, and elements of the fold: below, threads would copy more than they compute
LAUNCH = 3000  # nanoseconds that another launch takes, with the wait for the one before
DIVIDED = 1.15  # a fold is divided if that is certainly faster: by this factor
PART = 128  # elements of the fold that a part of a divided one has at least


@dataclass(frozen=True, slots=True)
class Product:
    """The axes of the result that move one factor only, by their numbers, and the number of that factor; the fold that is sliced."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    right: int
    sliced: For


@dataclass(frozen=True, slots=True)
class Side:
    """Of a tile: `threads` along the first axis, of which each has `each` elements along the last one."""

    axes: tuple[int, ...]
    threads: int
    each: int

    @property
    def size(self) -> int:
        return self.threads * self.each

    def extents(self) -> dict[int, int]:
        """How far a tile reaches along each axis."""
        return {self.axes[0]: self.size} if len(self.axes) == 1 else {self.axes[0]: self.threads, self.axes[1]: self.each}


@dataclass(frozen=True, slots=True)
class Tile:
    rows: Side
    columns: Side
    depth: int

    @property
    def axes(self) -> list[int]:
        return sorted(self.rows.axes + self.columns.axes)

    @property
    def threads(self) -> int:
        return self.rows.threads * self.columns.threads

    @property
    def accumulators(self) -> int:
        return self.rows.each * self.columns.each

    def blocks(self, fold: Nest) -> int:
        """Of the whole result; each axis rounds up to tiles."""
        reach = self.rows.extents() | self.columns.extents()
        return prod(-(-extent_of(x.extent) // reach.get(d, 1)) for d, x in enumerate(fold.spatial))


# ---------------------------------------------------------------- the structure


def find(fold: Nest, out: Nest) -> Product | None:
    """The roles of the axes of a sum of products, if it is large enough along all of them."""
    factors = _factors(fold)
    if len(factors) != 2 or not all(E.reads(factor) for factor in factors) or not fold.folds or not fold.spatial:
        return None
    if fold.leaf.indices != tuple(x.var for x in fold.spatial):
        return None
    used = [set(E.variables(factor)) for factor in factors]
    alone = [tuple(d for d, x in enumerate(fold.spatial) if x.var in used[n] and x.var not in used[1 - n]) for n in (0, 1)]
    if not all(alone) or not all(x.var in used[0] and x.var in used[1] for x in fold.folds):
        return None
    right = 0 if alone[0][-1] > alone[1][-1] else 1
    rows, columns = alone[1 - right], alone[right]
    lane = out.loops[columns[-1]].var
    if stride(E.read(out.writes, out.leaf.indices), lane) != 1:
        return None
    sizes = [prod(extent_of(fold.spatial[d].extent) for d in axes[-2:]) for axes in (rows, columns)]
    depth = prod(extent_of(x.extent) for x in fold.folds)
    if min(*sizes, depth) < LEAST:
        return None
    along = [x for x in fold.folds if extent_of(x.extent) >= 8 and any(stride(r, x.var) == 1 for r in fold.reads)]
    return Product(rows, columns, right, max(along or fold.folds, key=lambda x: extent_of(x.extent)))


def tiles(fold: Nest, product: Product, target: Target) -> list[Tile]:
    """The best tiles, best first."""
    found = list(_candidates(fold, product))
    return sorted(found, key=lambda tile: _cycles(fold, product, tile, 1, target))[:8]


def _candidates(fold: Nest, product: Product) -> Iterator[Tile]:
    for ty, tx in ((16, 16), (32, 8), (8, 32)):
        for rows in _sides(product.rows, ty):
            for columns in _sides(product.columns, tx):
                if 4 <= rows.each * columns.each <= 64:
                    yield Tile(rows, columns, min(extent_of(product.sliced.extent), 16 if rows.each * columns.each <= 32 else 8))


def _sides(axes: tuple[int, ...], threads: int) -> Iterator[Side]:
    """Along the last axis, or along the last two."""
    for each in range(1, 9):
        if each in (1, 2, 4, 8):
            yield Side(axes[-1:], threads, each)
        if len(axes) > 1:
            yield Side(axes[-2:], threads, each)


def _cycles(fold: Nest, product: Product, tile: Tile, parts: int, target: Target) -> float:
    """How long the busiest SM computes, if the fold is divided into parts: of a warp, multiplications of 128 lanes, beside 128 bytes from
    shared memory, a cycle."""
    rows, columns = tile.rows, tile.columns
    along = [_contiguous(r, product.sliced) for r in _reads(fold, product)]
    reads = rows.each * (0.25 if along[0] else 1 / _power_in(rows.each, 4)) + columns.each / _power_in(columns.each, 2)
    multiplies = tile.accumulators / 4
    copied = sum(side.size / tile.threads * (0.25 if a else 1) for side, a in zip((rows, columns), along, strict=True))
    each = max(multiplies, reads) + 0.25 * min(multiplies, reads) + copied
    blocks = tile.blocks(fold) * parts
    together = -(-blocks // target.gpu.sms) if blocks > target.gpu.sms else 1.5  # a block alone waits more
    length = prod(extent_of(x.extent) for x in fold.folds) / parts
    return each * (tile.threads // 32) * together * length + (_meeting(fold, parts, target) if parts > 1 else 0)


def _meeting(fold: Nest, parts: int, target: Target) -> float:
    """Cycles that it takes to store the sums of parts, to load them again, and to start the launch that does it."""
    results = prod(extent_of(x.extent) for x in fold.spatial)
    return (results * parts * 2 * itemsize(fold.writes.dtype) / target.gpu.cache + LAUNCH) * target.gpu.ghz


def _power_in(n: int, most: int) -> int:
    """The largest power of two up to `most` that divides a number."""
    while n % most:
        most //= 2
    return most


def _reads(fold: Nest, product: Product) -> list[tuple[E.Expr, ...]]:
    """What the factors of the rows and of the columns are read from."""
    factors = _factors(fold)
    return [E.reads(factors[1 - product.right]), E.reads(factors[product.right])]


def _factors(fold: Nest) -> tuple[E.Expr, ...]:
    """Of the product that is summed; none for other folds."""
    product = product_of(fold.leaf)[0] if isinstance(fold.leaf, Accumulate) else None
    return () if product is None else product.args


def _contiguous(reads: Sequence[E.Expr], axis: For) -> bool:
    return all(stride(r, axis.var) == 1 for r in reads)


# ---------------------------------------------------------------- folds divided among blocks


def divide(s: Schedule, acc: str, target: Target) -> str | None:
    """Cut the fold of a product with few tiles into parts that fill the machine; the name of the stage of their sums."""
    fold = fold_nest(s.kernel, acc)
    product = find(fold, result_nest(s.kernel, acc))
    if product is None or not all(isinstance(x.extent, int) for x in fold.loops):
        return None
    length = prod(extent_of(x.extent) for x in fold.folds)
    options = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if n == 1 or n * PART <= length]
    candidates = list(_candidates(fold, product))
    _, parts = min((_cycles(fold, product, tile, n, target) * (1 if n == 1 else DIVIDED), n) for tile in candidates for n in options)
    if parts < 2:
        return None
    cut = max(fold.folds, key=lambda x: extent_of(x.extent))
    chunk = -(-extent_of(cut.extent) // parts)
    chunk = -(-chunk // 16) * 16 if chunk >= 16 else chunk
    outer, _ = s.split(cut.var.attr.name, chunk)
    number = extent_of(edit.find_loop(s.kernel, outer).extent)
    if number < 2:
        return None
    partial = s.rfactor(acc, outer, number)
    s.apply("mask", partial)
    rank = len(edit.find_buffer(s.kernel, partial).shape)
    letters = "abcdefghijklmnop"[:rank]
    s.relayout(partial, f"({','.join([letters[-1], *letters[:-1]])})")
    for is_fold in (False, True):
        s.reorder(*stage_axes(s.kernel, partial, is_fold))
    return str(partial)


# ---------------------------------------------------------------- the schedule


def schedule(s: Schedule, result: str, acc: str, target: Target, knobs: Knobs) -> None:
    """One block a tile. Raises `ScheduleError` where a step is refused."""
    fold, out = fold_nest(s.kernel, acc), result_nest(s.kernel, result)
    product = find(fold, out)
    assert product is not None
    best = tiles(fold, product, target)
    options = tuple((t.rows.axes, t.rows.threads, t.rows.each, t.columns.axes, t.columns.threads, t.columns.each) for t in best)
    tile = best[options.index(knobs.choice(f"{acc}.tile", options, options[0]))]
    reads = _reads(fold, product)
    along = [_contiguous(r, product.sliced) for r in reads]
    names = [f"{r[0].attr.name}.shared" for r in reads]
    width = vector_width(fold, out, tile.columns.each)
    widths = (1, 1 if along[1] or len(tile.columns.axes) > 1 and tile.columns.each != width else width)

    home, spatial = _blocks(s, [x.var.attr.name for x in out.loops], tile)
    s.compute_at(acc, home, "register")
    _threads(s, tile, spatial, widths, width)
    spatial = dict(enumerate(stage_axes(s.kernel, acc, False)))
    s.reorder(*(x for d, x in spatial.items() if d not in tile.axes), *(spatial[d] for d in tile.axes))
    _threads(s, tile, spatial, widths, width)
    step = _steps(s, acc, fold, product, tile)
    left, right = names if product.right == 1 else names[::-1]
    s.cache_factors(step, left, right, "shared")
    for name, side, reads_along in zip(names, (tile.rows, tile.columns), along, strict=True):
        _slice(s, name, tile, reads_along, side is tile.columns)
    spatial = dict(enumerate(stage_axes(s.kernel, acc, True)))
    _threads(s, tile, spatial, widths, width, _fold_of(s, acc))
    _registers(s, acc, tile, widths)
    _ahead(s, acc, step, names, tile, target, knobs)


def _blocks(s: Schedule, names: list[str], tile: Tile) -> tuple[str, dict[int, str]]:
    """The loop over tiles, and the loops inside of a tile by their axes."""
    inside = {}
    for d, n in (tile.rows.extents() | tile.columns.extents()).items():
        names[d], inside[d] = s.split(names[d], n)
    s.reorder(*names, *inside.values())
    home = fuse_all(s, names)
    s.apply("set_kind", home, "block.x")
    return home, inside


def _threads(
    s: Schedule, tile: Tile, axes: dict[int, str], widths: tuple[int, int], lane: int, slice_: str | None = None
) -> None:
    """The loops inside of a tile: threads outside, then the slice of the fold if there is one, the elements of a thread inside."""
    threads, elements = [], []
    for side, width in zip((tile.rows, tile.columns), widths, strict=True):
        if len(side.axes) == 2:
            thread, inner = axes[side.axes[0]], [axes[side.axes[1]]]
        elif side.each == width or width == 1 and side is tile.rows:
            thread, one = s.split(axes[side.axes[0]], side.each)
            inner = [one]
        else:  # as many elements side by side as an access takes, the next ones behind those of the other threads
            many, rest = s.split(axes[side.axes[0]], side.threads * width)
            if width > 1:
                thread, one = s.split(rest, width)
                inner = [many, one]
            else:
                thread, inner = rest, [many]
        threads.append(thread)
        elements += inner
    s.reorder(*threads, *([slice_] if slice_ else []), *elements)
    s.apply("set_kind", threads[0], "thread.y")
    s.apply("set_kind", threads[1], "thread.x")
    if slice_:
        s.unroll(slice_)
    lanes(s, elements, widths[1])


def _steps(s: Schedule, acc: str, fold: Nest, product: Product, tile: Tile) -> str:
    """The loop over slices of the fold, outside of all that is inside of a tile."""
    spatial = stage_axes(s.kernel, acc, True)
    step, slice_ = s.split(product.sliced.var.attr.name, tile.depth)
    others = [x.var.attr.name for x in fold.folds if x is not product.sliced]
    units = [spatial[d] for d in range(len(spatial)) if d not in tile.axes]
    s.reorder(*units, *others, step, *(spatial[d] for d in tile.axes), slice_, reassociate=True)
    return fuse_all(s, [*others, step])


def _fold_of(s: Schedule, acc: str) -> str:
    """The innermost loop around the sum: the slice."""
    found = ""
    for x in walk(s.kernel.body):
        if isinstance(x, For):
            found = x.var.attr.name
        if isinstance(x, Accumulate) and x.buffer.name == acc:
            break
    return found


def _slice(s: Schedule, name: str, tile: Tile, along: bool, strided: bool) -> None:
    """How a slice lies in shared memory, and by whom it is copied.

    One that lies along the fold in memory does so here, and is copied in vectors; others lie along the tile. `strided`: neighbouring
    threads read neighbouring rows of it, so that these begin in different banks.
    """
    buffer = edit.find_buffer(s.kernel, name)
    rank = len(buffer.shape)
    loops = [f"{name}.{d}" for d in range(rank)]
    letters = "abcdefghijklmnop"[:rank]
    if not along:
        s.relayout(name, f"({','.join([letters[-1], *letters[:-1]])})")
        s.reorder(loops[-1], *loops[:-1])
        loops = [loops[-1], *loops[:-1]]
    elif strided and VECTOR_BYTES % itemsize(buffer.dtype) == 0:
        s.relayout(name, f"({','.join([*letters[:-1], f'{letters[-1]}+0+{VECTOR_BYTES // itemsize(buffer.dtype)}'])})")
    _copied(s, name, loops, tile)


def _copied(s: Schedule, name: str, loops: list[str], tile: Tile) -> None:
    """By all threads of the block, in vectors."""
    width = _copy_width(s, name, edit.find_loop(s.kernel, loops[-1]))
    lane = None
    if width > 1:
        loops[-1], lane = s.split(loops[-1], width)
        s.vectorize(lane)
    flat = fuse_all(s, loops)
    rest, thread = s.split(flat, tile.threads)
    y, x = s.split(thread, tile.columns.threads)
    s.reorder(y, x, rest, *([lane] if lane else []))
    s.apply("set_kind", y, "thread.y")
    s.apply("set_kind", x, "thread.x")


def _copy_width(s: Schedule, name: str, last: For) -> int:
    """How many neighbours a thread copies at once: as many as certainly lie aligned in a row, and are there or not together."""
    store = next(x for x in walk(s.kernel.body) if isinstance(x, Store) and x.buffer.name == name)
    width = VECTOR_BYTES // itemsize(store.buffer.dtype)
    while extent_of(last.extent) % width:
        width //= 2
    for r in E.reads(store.value):
        terms = dict(linear(linear_index(r.attr, r.args)))
        if terms.pop((last.var,), 0) != 1 or any(last.var in E.variables(*m) for m in terms):
            return 1
        while any(c % width for c in (*terms.values(), extent_of(r.attr.shape[-1]))):
            width //= 2
    return width


def _registers(s: Schedule, acc: str, tile: Tile, widths: tuple[int, int]) -> None:
    """The accumulators lie thread by thread: the loops over threads index dimensions of their own."""
    rank = len(edit.find_buffer(s.kernel, acc).shape)
    threads, elements = [], []
    letters = "abcdefghijklmnop"
    for side, width in zip((tile.rows, tile.columns), widths, strict=True):
        axis = letters[side.axes[0]]
        if len(side.axes) == 2:
            threads.append(axis)
            elements.append(letters[side.axes[1]])
        elif side.each == width or width == 1 and side is tile.rows:
            threads.append(f"{axis}/{side.each}")
            elements.append(f"{axis}%{side.each}")
        elif width > 1:
            threads.append(f"{axis}/{width}%{side.threads}")
            elements += [f"{axis}/{side.threads * width}", f"{axis}%{width}"]
        else:
            threads.append(f"{axis}%{side.threads}")
            elements.append(f"{axis}/{side.threads}")
    units = [letters[d] for d in range(rank) if d not in tile.axes]
    s.relayout(acc, f"({','.join([*units, *threads, *elements])})")


def _ahead(s: Schedule, acc: str, step: str, copies: Sequence[str], tile: Tile, target: Target, knobs: Knobs) -> None:
    """Copy some slices ahead: as many as leave room for all blocks that the registers of an SM have room for.

    GPUs without copies in the background have one slice: a thread would keep what it copies in registers meanwhile.
    """
    size = sum(prod(extent_of(n) for n in b.shape) * itemsize(b.dtype) for b in (edit.find_buffer(s.kernel, copy) for copy in copies))
    steps = extent_of(edit.find_loop(s.kernel, step).extent)
    most = target.shared_of_block
    options = tuple(n for n in range(1, STAGES + 1) if n == 1 or (n <= steps and n * size <= most))
    blocks = max(1, REGISTERS // (tile.threads * (tile.accumulators + OTHER_REGISTERS)))
    fitting = [n for n in options if n == 1 or (n * size * blocks <= target.gpu.shared << 10 and target.compute_capability >= BACKGROUND)]
    stages = knobs.choice(f"{acc}.stages", options, max(fitting))
    if stages > 1:
        s.pipeline(step, stages, *copies)
