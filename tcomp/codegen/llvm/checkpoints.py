"""How often a loop tests whether its run was stopped: seldom enough to cost nothing, often enough that the answer takes milliseconds.

Work is counted in operations: nodes of expressions, a vector counting as one, which take a core about a nanosecond each. Where a loop does
little in all, nothing is asked; so kernels of usual size contain no test, and the others one in thousands of operations.
"""

from __future__ import annotations

import math
from functools import lru_cache

from tcomp.ir import expr as E, loops as L
from tcomp.ir.expr import as_expr
from tcomp.ir.instruction import TILE, VectorOp, WarpOp

UNCHECKED = 1 << 22  # operations, some milliseconds: a loop that certainly does no more is not interrupted
INTERVAL = 1 << 16  # operations between two tests in a loop of small iterations: a test takes two or three of them
LARGE = 1 << 12  # operations of an iteration that may be followed by a test


def interval(loop: L.For) -> int | None:
    """The number of iterations between two tests of whether to stop the run; None: the loop needs no test."""
    body, extent = work(loop.body), _most(loop.extent)
    if body is not None and extent is not None and body * extent <= UNCHECKED:
        return None
    return 1 if body is None or body >= LARGE else INTERVAL // max(1, body)


@lru_cache(1 << 10)
def work(stmt: L.Stmt) -> int | None:
    """An upper bound of the operations of a statement; None if there is none."""
    own = sum(1 for _ in E.walk(*L.expressions(stmt)))
    match stmt:
        case L.While():
            return None
        case L.Call(instruction) if not isinstance(op := instruction.emission, WarpOp):
            at_once = op.lanes if isinstance(op, VectorOp) else math.prod(TILE)
            return math.prod(int(loop.extent) for loop in instruction.loops) // (at_once * op.group)
        case L.For(_, extent, body, kind):
            times, inside = 1 if kind == L.VECTORIZED else _most(extent), work(body)
            return None if times is None or inside is None else own + max(times, 0) * inside
    parts = [work(child) for child in L.children(stmt)]
    return None if None in parts else 1 + own + sum(p for p in parts if p is not None)


def _most(extent: E.Dim) -> int | None:
    return E.bounds(as_expr(extent))[1]
