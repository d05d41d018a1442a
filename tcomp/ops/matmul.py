"""Matrices: products with broadcast batches, the product of attention, Einstein sums; determinants, factors, systems of equations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import mul

from tcomp.errors import IRError
from tcomp.ir import loops as L, te
from tcomp.ir.broadcasting import HALF, SizeMismatch, require_same, widened
from tcomp.ir.expr import Dim, Expr, ExprLike, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import as_dim, same_dim
from tcomp.ir.te import Tensor, broadcast_read, matmul, rounded
from tcomp.ops.reduction import softmax_weights


def softmax_product(x: Tensor, v: Tensor) -> Tensor:
    """matmul(softmax(x), v), the softmax along the last axis of x: [..., m, k] x [..., k, n] -> [..., m, n], batches broadcast.

    Exponentials are multiplied with v, and the sums divided by those of the exponentials at the end, so that a row of x is read by
    reductions alone, in any order (online softmax). Of 16-bit floats, exponentials are rounded before they are multiplied; sums are of
    float32.
    """
    if x.ndim < 2 or v.ndim < 2:
        raise IRError("the product of a softmax needs matrices")
    require_same(x.shape[-1], v.shape[-2], f"contraction of {x!r} with {v!r}")
    weight, total = softmax_weights(x, (x.ndim - 1,))
    left, right = weight, v
    if v.dtype in HALF:
        left = te.compute(weight.shape, lambda *i: widened(cast(weight[i], v.dtype)), "softmax.round")
        right = te.compute(v.shape, lambda *i: widened(v[i]), "values")
    product = matmul(left, right)
    return rounded(te.compute(product.shape, lambda *i: product[i] * (1.0 / broadcast_read(total, i)), "softmax_product"), v.dtype)


def einsum(*operands: Tensor, equation: str) -> Tensor:
    """Sum of products in Einstein's notation; letters repeated within an operand take its diagonal, `...` broadcasts. Without `->` the
    result has the letters that occur once, in alphabetical order, after the broadcast axes."""
    terms, output = _parsed(equation, [t.ndim for t in operands])
    extents: dict[str, Dim] = {}
    for letter, extent in ((n, d) for term, x in zip(terms, operands, strict=True) for n, d in zip(term, x.shape, strict=True)):
        if (known := extents.setdefault(letter, extent)) == 1:
            extents[letter] = extent
        elif extent != 1 and not same_dim(known, extent):
            raise SizeMismatch(f"einsum `{equation}`: index `{letter}` is {known} in one place and {extent} in another", (known, extent))
    summed = {letter: te.reduce_axis(d, f"k{n}") for n, (letter, d) in enumerate(extents.items()) if letter not in output}

    def element(*index: Expr) -> Expr:
        at = {**summed, **dict(zip(output, index, strict=True))}
        indices = (
            [0 if d == 1 != extents[n] else at[n] for n, d in zip(term, x.shape, strict=True)]
            for term, x in zip(terms, operands, strict=True)
        )
        product: Expr = reduce(mul, (widened(x[tuple(i)]) for x, i in zip(operands, indices, strict=True)))
        return te.sum(product, tuple(summed.values())) if summed else product

    return rounded(te.compute(tuple(extents[letter] for letter in output), element, "einsum"), operands[0].dtype)


def _parsed(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Letters of each operand and of the result; axes under `...` become the letters "0", "1", ... counted from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    sources = left.split(",")
    if len(sources) != len(ranks):
        raise IRError(f"einsum `{equation}` names {len(sources)} operands, {len(ranks)} are given")
    terms, hidden = [], ""
    for source, rank in zip(sources, ranks, strict=True):
        before, dots, after = source.partition("...")
        unnamed = rank - len(before) - len(after)
        if unnamed < 0 or (unnamed and not dots) or not (before + after).isalpha() and before + after:
            raise IRError(f"einsum `{equation}`: `{source}` does not name the axes of an operand of rank {rank}")
        if unnamed > 10:
            raise IRError("einsum: `...` stands for more than 10 axes")
        own = "9876543210"[10 - unnamed :]
        hidden = max(hidden, own, key=len)
        terms.append(before + own + after)
    letters = Counter("".join(terms))
    result = right.replace("...", hidden) if arrow else hidden + "".join(sorted(c for c, n in letters.items() if c.isalpha() and n == 1))
    if set(result) - set(letters) or len(set(result)) != len(result):
        raise IRError(f"einsum `{equation}`: the result `{right}` must name operand indices, each once")
    return terms, result


def det(x: Tensor) -> Tensor:
    """Determinants of the matrices in the last two axes, by elimination with partial pivoting (in the type of `x`)."""
    require_same(x.shape[-1], x.shape[-2], "determinant of a matrix that is not square")
    (factors, pivots, _), k = lu(x), te.reduce_axis(x.shape[-1], "k")

    def signed(*i: Expr) -> Expr:  # an element of the diagonal, negated where its row was exchanged
        return select(te.equal(pivots[(*i, k)], cast(k + 1, "int32")), factors[(*i, k, k)], -factors[(*i, k, k)])

    return te.compute(x.shape[:-2], lambda *i: te.prod(signed(*i), k), "det")


def inverse(x: Tensor) -> Tensor:
    """Inverses of the matrices in the last two axes, by elimination with partial pivoting (16-bit floats in float32)."""
    require_same(x.shape[-1], x.shape[-2], "inverse of a matrix that is not square")
    wide = te.compute(x.shape, lambda *i: widened(x[i]), "wide")
    factors, pivots, _ = lu(wide)
    order = row_order(pivots, x.shape[-1])
    unit = te.compute(x.shape, lambda *i: cast(te.equal(order[i[:-1]], i[-1]), wide.dtype), "rows")
    found = triangular_solve(factors, triangular_solve(factors, unit, False, True), True, False)
    return rounded(te.compute(x.shape, lambda *i: found[i], "inverse"), x.dtype)


def lu(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(factors, pivots, places) of the matrices [..., m, n]: P x = L U by elimination with partial pivoting, L below the diagonal (where it
    has ones), U from there on; the row (int32, from 1 on) that each of the first min(m, n) rows is exchanged with, in order; where on the
    diagonal of U the first zero is (int32, from 1 on), 0 where there is none."""
    m, n = map(as_expr, x.shape[-2:])
    steps = minimum(m, n)

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source,), (factors, pivots, places) = inputs, outputs
        work = L.Buffer("work", x.dtype, (m, n))
        pivot, held = L.Buffer("pivot", "int64", (1,), "register"), L.Buffer("held", x.dtype, (1,), "register")

        def eliminate(k: Expr, outer: Sequence[ExprLike]) -> L.Stmt:
            def search(row: Expr) -> L.Stmt:
                return L.If((k < row) & (te.abs(work[row, k]) > te.abs(work[pivot[0], k])), L.store(pivot, (0,), row))

            def swap(c: Expr) -> L.Stmt:
                row = pivot[0]
                return L.block(L.store(held, (0,), work[k, c]), L.store(work, (k, c), work[row, c]), L.store(work, (row, c), held[0]))

            def subtract(below: Expr) -> L.Stmt:
                row = k + 1 + below
                ratio = L.block(L.store(held, (0,), work[row, k] / work[k, k]), L.store(work, (row, k), held[0]))
                return L.block(
                    ratio,
                    L.loop("c2", n - 1 - k, lambda c: L.store(work, (row, k + 1 + c), work[row, k + 1 + c] - held[0] * work[k, k + 1 + c])),
                )

            return L.block(
                L.store(pivot, (0,), k),
                L.loop("r1", m, search),
                L.If(te.not_equal(pivot[0], k), L.loop("c1", n, swap)),
                L.store(pivots, (*outer, k), cast(pivot[0] + 1, "int32")),
                L.If(te.equal(work[k, k], 0) & te.equal(places[tuple(outer)], 0), L.store(places, outer, cast(k + 1, "int32"))),
                L.If(te.not_equal(work[k, k], 0), L.loop("r2", m - 1 - k, subtract)),
            )

        def matrix(outer: tuple[Expr, ...]) -> L.Stmt:
            copy = L.over((m, n), lambda at: L.store(work, at, source[(*outer, *at)]), "copy{}".format)
            back = L.over((m, n), lambda at: L.store(factors, (*outer, *at), work[at]), "back{}".format)
            first = L.store(places, outer, const(0, "int32"))
            return L.block(first, copy, L.loop("k", steps, lambda k: eliminate(k, outer)), back)

        return L.allocated((work, pivot, held), L.over(x.shape[:-2], matrix))

    batch = x.shape[:-2]
    factors, pivots, places = te.externs([(x.shape, x.dtype), ((*batch, as_dim(steps)), "int32"), (batch, "int32")], [x], program, "lu")
    return factors, pivots, places


def row_order(pivots: Tensor, rows: Dim) -> Tensor:
    """The rows (int64 [..., rows]) that stand one after the other once rows are exchanged by the pivots of `lu`."""

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source,), (order,) = inputs, outputs
        held = L.Buffer("held", "int64", (2,), "register")

        def lane(outer: tuple[Expr, ...]) -> L.Stmt:
            def exchange(k: Expr) -> L.Stmt:
                other = held[1]
                last = minimum(maximum(cast(source[(*outer, k)], "int64") - 1, 0), as_expr(rows) - 1)
                return L.block(
                    L.store(held, (0,), order[(*outer, k)]),
                    L.store(held, (1,), last),
                    L.store(order, (*outer, k), order[(*outer, other)]),
                    L.store(order, (*outer, other), held[0]),
                )

            start = L.loop("r", rows, lambda r: L.store(order, (*outer, r), r))
            return L.block(start, L.loop("k", pivots.shape[-1], exchange))

        return L.allocated((held,), L.over(pivots.shape[:-1], lane))

    return te.extern(((*pivots.shape[:-1], rows), "int64"), [pivots], program, "row_order")


def triangular_solve(a: Tensor, b: Tensor, upper: bool, unit: bool) -> Tensor:
    """The x of a x = b, [..., n, n] and [..., n, k] of equal batches, row by row; only a triangle of `a` is read, without its diagonal if
    that is `unit`."""
    require_same(a.shape[-1], a.shape[-2], "system of equations whose matrix is not square")
    require_same(a.shape[-1], b.shape[-2], "rows of a system of equations")
    n, columns = as_expr(a.shape[-1]), b.shape[-1]

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (matrix, given), (x,) = inputs, outputs
        rest, held = L.Buffer("rest", b.dtype, (columns,)), L.Buffer("held", b.dtype, (1,), "register")

        def solve(outer: tuple[Expr, ...]) -> L.Stmt:
            def row(step: Expr) -> L.Stmt:
                i = n - 1 - step if upper else step

                def known(before: Expr) -> L.Stmt:
                    j = n - 1 - before if upper else before
                    line = L.loop("c2", columns, lambda c: L.store(rest, (c,), rest[c] - held[0] * x[(*outer, j, c)]))
                    return L.block(L.store(held, (0,), matrix[(*outer, i, j)]), line)

                scale = const(1, b.dtype) if unit else matrix[(*outer, i, i)]
                return L.block(
                    L.loop("c1", columns, lambda c: L.store(rest, (c,), given[(*outer, i, c)])),
                    L.loop("j", step, known),
                    L.store(held, (0,), scale),
                    L.loop("c3", columns, lambda c: L.store(x, (*outer, i, c), rest[c] / held[0])),
                )

            return L.loop("i", n, row)

        return L.allocated((rest, held), L.over(b.shape[:-2], solve))

    return te.extern((b.shape, b.dtype), [a, b], program, "triangular_solve")


def cholesky(x: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    """(factors, places) of symmetric matrices [..., n, n]: x = L L^T, or U^T U if `upper`, of which that triangle is read alone; the first
    row (int32, from 1 on) where a matrix is not positive definite, from which on factors are NaN, 0 where there is none."""
    require_same(x.shape[-1], x.shape[-2], "factors of a matrix that is not square")
    n = as_expr(x.shape[-1])

    def program(inputs: Sequence[L.Buffer], outputs: Sequence[L.Buffer]) -> L.Stmt:
        (source,), (factors, places) = inputs, outputs
        rows, held = L.Buffer("rows", x.dtype, (n, n)), L.Buffer("held", x.dtype, (1,), "register")

        def matrix(outer: tuple[Expr, ...]) -> L.Stmt:
            def row(j: Expr) -> L.Stmt:
                def subtract(k: Expr) -> L.Stmt:
                    line = L.loop("c2", n - j, lambda c: L.store(rows, (j, j + c), rows[j, j + c] - held[0] * rows[k, j + c]))
                    return L.block(L.store(held, (0,), rows[k, j]), line)

                start = L.loop("c1", n - j, lambda c: L.store(rows, (j, j + c), source[(*outer, *((j, j + c) if upper else (j + c, j)))]))
                bad = te.equal(places[outer], 0) & ~(rows[j, j] > 0)
                return L.block(
                    start,
                    L.loop("k", j, subtract),
                    L.If(bad, L.store(places, outer, cast(j + 1, "int32"))),
                    L.store(held, (0,), te.sqrt(rows[j, j])),
                    L.loop("c3", n - j, lambda c: L.store(rows, (j, j + c), rows[j, j + c] / held[0])),
                )

            def finish(at: tuple[Expr, ...]) -> L.Stmt:
                i, j = at if upper else at[::-1]
                return L.store(factors, (*outer, *at), select(i <= j, rows[minimum(i, j), j], 0))

            first = L.store(places, outer, const(0, "int32"))
            return L.block(first, L.loop("i", n, row), L.over((n, n), finish, "f{}".format))

        return L.allocated((rows, held), L.over(x.shape[:-2], matrix))

    factors, places = te.externs([(x.shape, x.dtype), (x.shape[:-2], "int32")], [x], program, "cholesky")
    return factors, places


MATMUL, SOFTMAX_PRODUCT = Operator("matmul", matmul), Operator("softmax_product", softmax_product)
EINSUM, DET = Operator("einsum", einsum), Operator("det", det)
INVERSE = Operator("inverse", inverse)
LU, ROW_ORDER = Operator("lu", lu), Operator("row_order", row_order)
TRIANGULAR_SOLVE, CHOLESKY = Operator("triangular_solve", triangular_solve), Operator("cholesky", cholesky)
