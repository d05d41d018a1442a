"""Matrix products that are scheduled onto tensor cores."""

from __future__ import annotations

from tcomp.ir import te
from tcomp.schedules import Schedule
from tcomp.schedules.instructions import mma, mma_fill, mma_store, tf32, wgmma


def product(dtype: str, m: int, n: int, depth: int, along: bool = True) -> Schedule:
    """A product whose tiles of 32 x 16 results are computed by one warp each, in registers. `along`: B lies along k."""
    step = {"int8": 32, "float32": 8}.get(dtype, 16)
    total = "int32" if dtype == "int8" else "float32"
    k = te.reduce_axis(depth, "k")
    a = te.placeholder((m, depth), dtype, "A")
    b = te.placeholder((n, depth) if along else (depth, n), dtype, "B")
    convert = tf32 if dtype == "float32" else lambda x: te.cast(x, total)
    s = Schedule([a, b, te.compute((m, n), lambda i, j: te.sum(convert(a[i, k]) * convert(b[(j, k) if along else (k, j)]), k), "C")])
    s.cache_write("C", "acc")
    rows, i = s.split("C.0", 32)
    columns, j = s.split("C.1", 16)
    s.reorder(rows, columns, i, j)
    s.compute_at("acc", columns, "register")
    tiles = []
    for first, second, fold in ((i, j, None), ("C.init.i", "C.init.j", None), ("C.i", "C.j", "C.k")):
        (io, ii), (jo, ji) = s.split(first, 16), s.split(second, 8)
        ko, ki = s.split(fold, step) if fold else ("", "")
        s.reorder(*filter(None, (ko, io, jo, ii, ji, ki)))
        tiles.append(ii)
    s.set_kind(rows, "block.x")
    s.set_kind(columns, "thread.y")
    s.clean()
    for tile, instruction in zip(tiles, (mma_store(total), mma_fill(total), mma(dtype)), strict=True):
        s.tensorize(tile, instruction, reassociate=instruction.reassociates)
    return s


def product_of_groups(dtype: str, m: int, n: int, depth: int, width: int, steps: int = 2, stages: int = 1) -> Schedule:
    """A product whose tiles of 128 x `width` results are computed by two warpgroups, in registers, from core matrices in shared memory.

    `steps` instructions follow each other on each slice of the fold, of which `stages` are in shared memory.
    """
    size = {"int8": 1, "uint8": 1, "float32": 4}.get(dtype, 2)
    total = "int32" if size == 1 else "float32"
    row = 16 // size
    k = te.reduce_axis(depth, "k")
    second, deep = "int8" if dtype == "uint8" else dtype, 2 * row * steps
    a, b = te.placeholder((m, depth), dtype, "A"), te.placeholder((n, depth), second, "B")
    convert = tf32 if dtype == "float32" else lambda x: te.cast(x, total)

    s = Schedule([a, b, te.compute((m, n), lambda i, j: te.sum(convert(a[i, k]) * convert(b[j, k]), k), "C")])
    s.cache_write("C", "acc")
    rows, i = s.split("C.0", 128)
    columns, j = s.split("C.1", width)
    s.reorder(rows, columns, i, j)
    s.compute_at("acc", columns, "register")
    step, slice_ = s.split("C.k", deep)
    s.reorder(step, "C.i", "C.j", slice_)
    s.cache_factors(step, "A.shared", "B.shared", "shared")
    for name in ("A.shared", "B.shared"):
        outer, lane = s.split(f"{name}.1", row)
        s.vectorize(lane)
        rest, thread = s.split(s.fuse(f"{name}.0", outer), 256)
        group, thread = s.split(thread, 128)
        s.reorder(group, thread, rest, lane)
        s.set_kind(group, "thread.y")
        s.set_kind(thread, "thread.x")
    for first, second in ((i, j), ("C.init.i", "C.init.j")):
        group, first = s.split(first, 64)
        (warp, first), (many, second) = s.split(first, 16), s.split(second, 8)
        (high, quad), (pair, low) = s.split(first, 8), s.split(second, 2)
        s.reorder(group, warp, quad, pair, many, high, low)
        s.set_kind(s.fuse(s.fuse(warp, quad), pair), "thread.x")
        s.set_kind(group, "thread.y")
    group, first = s.split("C.i", 64)
    (io, ii), (jo, ji) = s.split(first, 8), s.split("C.j", 8)
    many, inner = s.split(slice_, 2 * row)
    ko, ki = s.split(inner, row)
    s.reorder(group, many, io, ii, jo, ji, ko, ki, reassociate=True)
    s.set_kind(group, "thread.y")
    s.unroll(many)
    s.tensorize(io, wgmma(dtype, width), reassociate=True)
    s.relayout("acc", "(a/64,a/8%8,a%8,b/8,b%8)")
    s.set_kind(rows, "block.y")
    s.set_kind(columns, "block.x")
    if stages > 1:
        s.pipeline(step, stages, "A.shared", "B.shared")
    s.clean()
    return s
