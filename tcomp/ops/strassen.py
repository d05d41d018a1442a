"""Strassen's algorithm, one level of it: a product of matrices cut in quarters takes 7 products of quarters in place of 8.

    [C11 C12]   [A11 A12] [B11 B12]     M1 = (A11 + A22) (B11 + B22)     M5 = (A11 + A12) B22            C11 = M1 + M4 - M5 + M7
    [C21 C22] = [A21 A22] [B21 B22]     M2 = (A21 + A22) B11             M6 = (A21 - A11) (B11 + B12)    C12 = M3 + M5
                                        M3 = A11 (B12 - B22)             M7 = (A12 - A22) (B21 + B22)    C21 = M2 + M4
                                        M4 = A22 (B21 - B11)                                             C22 = M1 - M2 + M3 + M6

(V. Strassen, "Gaussian elimination is not optimal", Numerische Mathematik 13, 1969.) Quarters are the even and the odd rows of A, and halves of
the other two axes. Three operators, with a batched product before the last; what stands for B, which is known at compile time, is
`strassen_weights`.

Rounding errors are those of what is added, so that a large row of A would leave its errors in the small one that it makes a pair with (and all
of itself, where it is not finite). Rows are added as multiples of their largest elements, therefore (the outer scaling of G. Ballard et al.,
"Improving the numerical stability of fast matrix multiplication", SIAM J. Matrix Anal. Appl. 37, 2016): errors are about twice those of the
direct sum, of each row for itself. The columns of B are to be of similar size from the start: see `similar_columns`.
"""

from __future__ import annotations

from math import inf, nan

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Expr, as_dim, as_expr, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.broadcast import pick, require_same
from tcomp.ops.reduction import reduce
from tcomp.ops.winograd import combined

PRODUCTS = 7
MAX_COLUMN_RATIO = 1000  # times that columns may differ: errors of the smaller one then are about 1e-4 of its size
# What the factors of each product are made of: (11, 12, 21, 22), and what the quarters of the result are made of.
OF_LEFT = ((1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (-1, 0, 1, 0), (0, 1, 0, -1))
OF_RIGHT = ((1, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1))
TO_RESULT = ((1, 0, 0, 1, -1, 0, 1), (0, 0, 1, 0, 1, 0, 0), (0, 1, 0, 1, 0, 0, 0), (1, -1, 1, 0, 0, 1, 0))


def similar_columns(w: np.ndarray, transposed: bool = False) -> bool:
    """Whether the columns of a matrix (k, n), or of its transpose, that are added differ in size by `MAX_COLUMN_RATIO` times at most, and sums are finite."""
    axis = 1 if transposed else 0
    left, right = np.split(np.maximum(w.max(axis), -w.min(axis)), 2)
    with np.errstate(over="ignore"):
        return bool(np.all((left <= MAX_COLUMN_RATIO * right) & (right <= MAX_COLUMN_RATIO * left) & (2 * (left + right) < inf)))


def strassen_weights(w: np.ndarray, transposed: bool = False) -> np.ndarray:
    """The right factors of the seven products, for a matrix (k, n) of even sizes, or its transpose: (7, k / 2, n / 2). Each is a quarter or
    adds two."""
    if transposed:
        w = w.T
    k, n = (d // 2 for d in w.shape)
    quarters = [w[a : a + k, b : b + n] for a in (0, k) for b in (0, n)]
    found = np.empty((PRODUCTS, k, n), w.dtype)
    for factor, row in zip(found, OF_RIGHT, strict=True):
        plus, minus = ([q for c, q in zip(row, quarters, strict=True) if c == sign] for sign in (1, -1))
        if minus:
            np.subtract(plus[0], minus[0], factor)
        elif len(plus) == 2:
            np.add(plus[0], plus[1], factor)
        else:
            factor[:] = plus[0]
    return found


def strassen_rows(x: Tensor) -> Tensor:
    """The size of each row of x (..., rows, k): (..., rows). That is its largest magnitude, but at least what has a finite reciprocal; 0 for
    zeros, NaN where an element is not finite."""
    tiny = float(np.finfo(x.dtype).tiny)

    def size(largest: Expr) -> Expr:
        return select(te.equal(largest, 0.0), 0.0, select(largest < inf, te.maximum(largest, tiny), nan))

    return reduce(x, [x.ndim - 1], False, te.max, "strassen_rows", te.abs, size)


def strassen_input(x: Tensor, sizes: Tensor) -> Tensor:
    """The left factors of the seven products, for matrices x (..., rows, k) with k even, of which each row is divided by its size (..., rows),
    zeros where that is 0 or NaN: (7, ..., ceil(rows / 2), k / 2). The last row stands for the one that an odd number of rows lacks."""
    *batch, rows, k = x.shape
    if not isinstance(k, int) or k % 2:
        raise IRError(f"Strassen's algorithm for rows of {k} elements", why="they are cut in halves")
    half = k // 2

    def scaled(*index: Expr) -> Expr:
        size = sizes[index[:-1]]
        return select(size > 0.0, x[index] * (1.0 / size), 0.0)

    def element(which: Expr, *index: Expr) -> Expr:
        *outer, i, j = index
        quarters = [scaled(*outer, row, j + place) for row in (i * 2, te.minimum(i * 2 + 1, as_expr(rows) - 1)) for place in (0, half)]
        return pick(which, [combined(zip(row, quarters, strict=True)) for row in OF_LEFT])

    return te.compute((PRODUCTS, *batch, as_dim((as_expr(rows) + 1) // 2), half), element, "strassen_input")


def strassen_output(p: Tensor, sizes: Tensor) -> Tensor:
    """The result, from the seven products p (7, ..., ceil(rows / 2), n / 2) and the sizes of its rows (..., rows): (..., rows, n)."""
    _, *batch, pairs, half = p.shape
    rows = sizes.shape[-1]
    require_same(pairs, as_dim((as_expr(rows) + 1) // 2), "pairs of rows")

    def element(*index: Expr) -> Expr:
        *outer, i, j = index
        products = [p[n, *outer, i // 2, j % half] for n in range(PRODUCTS)]
        quarters = [combined(zip(row, products, strict=True)) for row in TO_RESULT]
        return pick(i % 2, [pick(j // half, quarters[:2]), pick(j // half, quarters[2:])]) * sizes[*outer, i]

    return te.compute((*batch, rows, as_dim(as_expr(half) * 2)), element, "strassen_output")


STRASSEN_ROWS = Operator("strassen_rows", strassen_rows)
STRASSEN_INPUT, STRASSEN_OUTPUT = Operator("strassen_input", strassen_input), Operator("strassen_output", strassen_output)
