"""Matrix products that are scheduled onto tensor cores."""

from __future__ import annotations

from tcomp.ir import te
from tcomp.schedules import Schedule
from tcomp.schedules.instructions import mma, mma_fill, mma_store, tf32


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
