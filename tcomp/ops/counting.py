"""Operators whose results have a size that the run counts: written into an array of the largest size, with a count of what is valid."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir import loops as L, te
from tcomp.ir.expr import Dim, Expr, as_expr, cast, const, row_major
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.elementwise import pick, widened
from tcomp.ops.movement import product


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """The row-major positions of elements that are not zero, in order, and their number (int64 scalar). Without a branch: each position is
    written where the next one belongs, and stays there if its element counts."""

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source,), (places, count) = inputs, outputs
        found = L.Buffer("found", "int64", (1,), "register")

        def one(i: tuple[Expr, ...]) -> L.Stmt:
            element = source[i]
            counts = element if x.dtype == "bool" else te.not_equal(widened(element), const(0, widened(element).dtype))
            write = L.store(places, (found[0],), row_major(i, x.shape))
            return L.block(write, L.store(found, (0,), found[0] + cast(counts, "int64")))

        return L.Allocate(found, L.block(L.store(found, (0,), 0), L.over(x.shape, one), L.store(count, (), found[0])))

    places, count = te.externs([((product(x.shape),), "int64"), ((), "int64")], [x], program, "positions")
    return places, count


def unravelled(places: Tensor, shape: Sequence[Dim], count: Dim) -> Tensor:
    """[rank, count]: the indices, axis by axis, of the first `count` row-major positions in an array of this shape."""

    def element(axis: Expr, k: Expr) -> Expr:
        inner = [places[k] // as_expr(product(shape[n + 1 :])) for n in range(len(shape))]
        return pick(axis, [q if n == 0 else q % as_expr(d) for n, (q, d) in enumerate(zip(inner, shape, strict=True))])

    return te.compute((len(shape), count), element, "unravelled")


POSITIONS, UNRAVELLED = Operator("positions", positions), Operator("unravelled", unravelled)
