"""A product C[i, j] = sum over k in tiles, of which each thread of a block has an element: what tests stage in shared memory."""

from __future__ import annotations

from tcomp.schedules import Schedule

TILE = 8  # rows, columns, and threads along each


def tile(s: Schedule, depth: int) -> str:
    """The loop over slices, of `depth` elements of the fold."""
    s.cache_write("C", "acc")
    rows, i = s.split("C.0", TILE)
    columns, j = s.split("C.1", TILE)
    s.reorder(rows, columns, i, j)
    s.bind(rows, "block.y")
    s.bind(columns, "block.x")
    s.compute_at("acc", columns, "register")
    ko, ki = s.split("C.k", depth)
    s.reorder(ko, "C.i", "C.j", ki)
    for y, x in ((i, j), ("C.init.i", "C.init.j"), ("C.i", "C.j")):
        s.bind(y, "thread.y")
        s.bind(x, "thread.x")
    return ko
