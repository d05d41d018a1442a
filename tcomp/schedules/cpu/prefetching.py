"""What default schedules for a CPU do about memory: large results are stored past the caches, operands prefetched."""

from __future__ import annotations

from math import prod

from tcomp.ir import expr as E
from tcomp.ir.access import stride
from tcomp.ir.dtypes import itemsize
from tcomp.ir.loops import Buffer, expressions, walk
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.primitives import editing
from tcomp.schedules.schedule import Schedule
from tcomp.target import CpuTarget

PREFETCH_DISTANCE = 4096  # bytes: hardware prefetches up to the end of a page of its own accord, which has that size on nearly all machines
STREAM_CACHES = 8  # second-level caches that a result exceeds, where it is to be stored past them: no reader finds it there


def size_of(b: Buffer) -> int:
    """Bytes; 0 where the shape is symbolic."""
    sizes = [d for d in b.shape if isinstance(d, int)]
    return prod(sizes) * itemsize(b.dtype) if len(sizes) == len(b.shape) else 0


def is_streamed(s: Schedule, b: Buffer, target: CpuTarget, knobs: Knobs) -> bool:
    """Whether a buffer is a result that is stored past the caches: the last-level cache is shared, and on a virtual machine often slower than
    its size promises, hence the limit by the core's own. Rows have to begin with a whole vector: such stores are aligned."""
    size = size_of(b) if b.name in {result.name for result in s.kernel.outputs} else 0
    aligned = size > target.l2 and (len(b.shape) == 1 or int(b.shape[-1]) * itemsize(b.dtype) * 8 % target.vector_bits == 0)
    return aligned and knobs.flag(f"{b.name}.stream", size > min(target.l3 // 2, STREAM_CACHES * target.l2))


def prefetch_vectors(s: Schedule, loop: str, vectors: int, done: set[Buffer], target: CpuTarget, knobs: Knobs) -> set[Buffer]:
    """Prefetch operands that come from memory `vectors` iterations before a serial loop reads them, one vector each; returns them.
    Those in `done` have been prefetched. Memory then works on while the core does, and goes on across pages."""
    x = editing.find_loop(s.kernel, loop)
    read = {r.attr: r for statement in walk(x.body) for r in E.reads(*expressions(statement))}
    found = set()
    for b, r in read.items():
        dense = stride(r, x.var) == target.vector_bits // 8 // itemsize(b.dtype) and not E.reads(*r.args)
        large = b not in done and dense and size_of(b) > target.l2
        if large and (distance := knobs.choice(f"{b.name}.prefetch", (0, vectors, 2 * vectors), vectors)):
            s.prefetch(b.name, loop, distance)
            found.add(b)
    return found
