"""Operators whose results have a size that the run counts: written into an array of the largest size, with a count of what is valid."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.ir import loops as L, te
from tcomp.ir.broadcasting import require_same, widened
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast, const, maximum, minimum, row_major, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.elementwise import pick
from tcomp.ops.movement import merge_sort, product

_Buffers = Sequence[L.Buffer]


def _number(name: str, dtype: str = "int64") -> L.Buffer:
    """A local variable."""
    return L.Buffer(name, dtype, (1,), "register")


def _set(variable: L.Buffer, value: ExprLike) -> L.Stmt:
    return L.store(variable, (0,), value)


def _only(buffer: L.Buffer) -> Expr:
    """The element of a buffer that has one."""
    return buffer[(0,) * len(buffer.shape)]


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """The row-major positions of elements that are not zero, in order, and their number (int64 scalar). Without a branch: each position is
    written where the next one belongs, and stays there if its element counts."""

    def program(inputs: _Buffers, outputs: _Buffers) -> L.Stmt:
        (source,), (places, count), found = inputs, outputs, _number("found")

        def one(i: tuple[Expr, ...]) -> L.Stmt:
            element = widened(source[i])
            counts = element if x.dtype == "bool" else te.not_equal(element, const(0, element.dtype))
            write = L.store(places, (found[0],), row_major(i, x.shape))
            return L.block(write, _set(found, found[0] + cast(counts, "int64")))

        return L.Allocate(found, L.block(_set(found, 0), L.over(x.shape, one), L.store(count, (), found[0])))

    places, count = te.externs([((product(x.shape),), "int64"), ((), "int64")], [x], program, "positions")
    return places, count


def unravelled(places: Tensor, shape: Sequence[Dim], count: Dim) -> Tensor:
    """[rank, count]: the indices, axis by axis, of the first `count` row-major positions in an array of this shape."""

    def element(axis: Expr, k: Expr) -> Expr:
        inner = [places[k] // as_expr(product(shape[n + 1 :])) for n in range(len(shape))]
        return pick(axis, [q if n == 0 else q % as_expr(d) for n, (q, d) in enumerate(zip(inner, shape, strict=True))])

    return te.compute((len(shape), count), element, "unravelled")


def unique(x: Tensor, in_order: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The different rows of x[n, m]: for each its first position in `x` and its count; for each row of `x` its number among
    them; and their number (int64 scalar). They are sorted, axis by axis, with NaNs last and equal to each other, or `in_order` of their
    first places. By a stable merge sort of the rows, O(m n log n)."""
    n, m = map(as_expr, x.shape)

    def program(inputs: _Buffers, outputs: _Buffers) -> L.Stmt:
        (source,), (first, counts, inverse, count) = inputs, outputs
        order, merged, leader = (L.Buffer(name, "int64", (n,)) for name in ("order", "merged", "leader"))
        found, verdict, column = map(_number, ("found", "verdict", "column"))

        def compare(p: Expr, q: Expr) -> L.Stmt:
            """Sets `verdict`: 0 for equal rows, 1 where row p comes before row q, 2 where it comes after it."""
            a, b = (cast(source[r, column[0]], "uint8") if x.dtype == "bool" else widened(source[r, column[0]]) for r in (p, q))
            result = select(a < b, const(1), select(te.equal(a, b), const(0), const(2)))
            if is_float(a.dtype):
                result = select(te.isnan(a), select(te.isnan(b), const(0), const(2)), select(te.isnan(b), const(1), result))
            step = L.block(_set(verdict, result), _set(column, column[0] + 1))
            return L.block(_set(verdict, 0), _set(column, 0), L.While((column[0] < m) & te.equal(verdict[0], 0), step))

        def enter(p: Expr) -> L.Stmt:
            """Row p is a new one."""
            new = L.store(first, (found[0],), p), L.store(counts, (found[0],), 0)
            return L.block(*new, L.store(merged, (p,), found[0]), _set(found, found[0] + 1))

        def lead(k: Expr) -> L.Stmt:
            p, before = order[k], order[maximum(k - 1, 0)]
            start = L.store(leader, (p,), p) if in_order else L.block(enter(p), L.store(leader, (p,), p))
            differs = te.equal(k, 0) | te.not_equal(verdict[0], 0)
            return L.block(compare(before, p), L.If(differs, start, L.store(leader, (p,), leader[before])))

        def number(p: Expr) -> L.Stmt:
            own = merged[leader[p]]
            seen = L.block(L.store(inverse, (p,), own), L.store(counts, (own,), counts[own] + 1))
            return L.block(L.If(te.equal(leader[p], p), enter(p)), seen) if in_order else seen

        body = L.block(
            L.loop("p", n, lambda p: L.store(order, (p,), p)),
            merge_sort(order, merged, n, lambda p, q: te.not_equal(verdict[0], 2), compare),
            _set(found, 0),
            L.loop("k", n, lead),  # from here on, `merged` holds the numbers of the rows that come first
            L.loop("r", n, number),
            L.store(count, (), found[0]),
        )
        return L.allocated((order, merged, leader, found, verdict, column), body)

    results = [((n,), "int64"), ((n,), "int64"), ((n,), "int64"), ((), "int64")]
    first, counts, inverse, count = te.externs(results, [x], program, "unique")
    return first, counts, inverse, count


def non_max_suppression(
    boxes: Tensor, scores: Tensor, most: Tensor, overlap: Tensor, least: Tensor | None, centered: bool, bound: Dim
) -> tuple[Tensor, Tensor]:
    """(batch, class, box) of what is selected, in an array of `bound` rows, and their number (int64 scalar).

    boxes [batch, n, 4]: two corners (y, x, y, x), or if `centered`, (x, y, width, height). scores [batch, classes, n]. Of each class, boxes
    whose score is above `least` are taken by falling score, the first of equal ones first, unless their intersection with one taken before
    is more than `overlap` of their union; `most` at most. All three are tensors of one element. (ONNX, NonMaxSuppression-11.)"""
    batch, classes, n = scores.shape
    require_same(batch, boxes.shape[0], "batch of boxes and scores")
    require_same(n, boxes.shape[1], "number of boxes and scores")
    inputs = [t for t in (boxes, scores, most, overlap, least) if t is not None]

    def program(inputs: _Buffers, outputs: _Buffers) -> L.Stmt:
        box, score, limit, share, *floor = inputs
        selected, count = outputs
        order, merged = (L.Buffer(name, "int64", (as_expr(n),)) for name in ("order", "merged"))
        found, start, found_candidates, candidate, other = map(_number, ("found", "start", "candidates", "candidate", "other"))
        keep = _number("keep", "bool")
        one = [_only(floor[0])] if floor else []

        def corners(b: Expr, i: Expr) -> tuple[list[Expr], list[Expr]]:
            """The lowest and the highest coordinate along both axes."""
            at = [widened(box[b, i, k]) for k in range(4)]
            if centered:
                return [at[0] - at[2] / 2, at[1] - at[3] / 2], [at[0] + at[2] / 2, at[1] + at[3] / 2]
            return [minimum(at[0], at[2]), minimum(at[1], at[3])], [maximum(at[0], at[2]), maximum(at[1], at[3])]

        def overlaps(b: Expr, i: Expr, j: Expr) -> Expr:
            (low, high), (low2, high2) = corners(b, i), corners(b, j)
            sides = [maximum(minimum(h, h2) - maximum(lo, lo2), 0) for lo, lo2, h, h2 in zip(low, low2, high, high2, strict=True)]
            both = sides[0] * sides[1]
            areas = [(h[0] - lo[0]) * (h[1] - lo[1]) for lo, h in ((low, high), (low2, high2))]
            valid = te.all_of([0 < both, 0 < areas[0], 0 < areas[1]])
            return valid & (cast(_only(share), both.dtype) < both / (areas[0] + areas[1] - both))

        def one_class(b: Expr, c: Expr) -> L.Stmt:
            def admit(i: Expr) -> L.Stmt:
                counts = te.all_of([f < score[b, c, i] for f in one])
                return L.block(
                    L.store(order, (found_candidates[0],), i), _set(found_candidates, found_candidates[0] + cast(counts, "int64"))
                )

            box_number = order[candidate[0]]
            check = L.block(_set(keep, te.all_of([~overlaps(b, box_number, selected[other[0], 2])])), _set(other, other[0] + 1))
            take = [L.store(selected, (found[0], k), value) for k, value in enumerate((b, c, box_number))]
            step = L.block(
                _set(keep, const(True, "bool")),
                _set(other, start[0]),
                L.While((other[0] < found[0]) & keep[0], check),
                L.If(keep[0], L.block(*take, _set(found, found[0] + 1))),
                _set(candidate, candidate[0] + 1),
            )
            wanted = minimum(cast(_only(limit), "int64"), as_expr(n))
            return L.block(
                _set(found_candidates, 0),
                L.loop("i", n, admit),
                merge_sort(order, merged, found_candidates[0], lambda p, q: score[b, c, q] <= score[b, c, p]),
                _set(start, found[0]),
                _set(candidate, 0),
                L.While((candidate[0] < found_candidates[0]) & (found[0] - start[0] < wanted), step),
            )

        body = L.over((batch, classes), lambda at: one_class(*at), "class{}".format)
        local = (order, merged, found, start, found_candidates, candidate, other, keep)
        return L.allocated(local, L.block(_set(found, 0), body, L.store(count, (), found[0])))

    selected, count = te.externs([((bound, 3), "int64"), ((), "int64")], inputs, program, "non_max_suppression")
    return selected, count


POSITIONS, UNRAVELLED = Operator("positions", positions), Operator("unravelled", unravelled)
UNIQUE, NON_MAX_SUPPRESSION = Operator("unique", unique), Operator("non_max_suppression", non_max_suppression)
