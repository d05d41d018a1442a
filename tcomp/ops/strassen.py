"""Strassen's algorithm, one level of it: a product of matrices cut in quarters takes 7 products of quarters in place of 8.

    [C11 C12]   [A11 A12] [B11 B12]     M1 = (A11 + A22) (B11 + B22)     M5 = (A11 + A12) B22            C11 = M1 + M4 - M5 + M7
    [C21 C22] = [A21 A22] [B21 B22]     M2 = (A21 + A22) B11             M6 = (A21 - A11) (B11 + B12)    C12 = M3 + M5
                                        M3 = A11 (B12 - B22)             M7 = (A12 - A22) (B21 + B22)    C21 = M2 + M4
                                        M4 = A22 (B21 - B11)                                             C22 = M1 - M2 + M3 + M6

(V. Strassen, "Gaussian elimination is not optimal", Numerische Mathematik 13, 1969.) Rounding errors are about twice those of the direct sum,
relative to the largest elements of rows and columns that are added (N. Higham, "Accuracy and Stability of Numerical Algorithms", chapter 23).

Quarters are the even and the odd rows of A, and halves of the other two axes. Two operators, with a batched product between them; what
stands for B, which is known at compile time, is `strassen_weights`.
"""

from __future__ import annotations

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr
from tcomp.ir.graph import Operator
from tcomp.ops.broadcast import require_same
from tcomp.ops.winograd import chosen, combined

PRODUCTS = 7
# What the factors of each product are made of: (11, 12, 21, 22), and what the quarters of the result are made of.
OF_LEFT = ((1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (-1, 0, 1, 0), (0, 1, 0, -1))
OF_RIGHT = ((1, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1))
TO_RESULT = ((1, 0, 0, 1, -1, 0, 1), (0, 0, 1, 0, 1, 0, 0), (0, 1, 0, 1, 0, 0, 0), (1, -1, 1, 0, 0, 1, 0))


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


def strassen_input(x: te.Tensor) -> te.Tensor:
    """The left factors of the seven products, for matrices x (..., rows, k) with k even: (7, ..., ceil(rows / 2), k / 2). The last row stands
    for the one that an odd number of rows lacks."""
    *batch, rows, k = x.shape
    half = _half(k)

    def element(which: Expr, *index: Expr) -> Expr:
        *outer, i, j = index
        quarters = [x[*outer, row, j + place] for row in (i * 2, te.minimum(i * 2 + 1, as_expr(rows) - 1)) for place in (0, half)]
        return chosen(which, [combined(zip(row, quarters, strict=True)) for row in OF_LEFT])

    return te.compute((PRODUCTS, *batch, as_dim((as_expr(rows) + 1) // 2), half), element, "strassen_input")


def strassen_output(p: te.Tensor, rows: Dim) -> te.Tensor:
    """The result, from the seven products p (7, ..., ceil(rows / 2), n / 2): (..., rows, n)."""
    _, *batch, pairs, half = p.shape
    require_same(pairs, as_dim((as_expr(rows) + 1) // 2), "pairs of rows")

    def element(*index: Expr) -> Expr:
        *outer, i, j = index
        products = [p[n, *outer, i // 2, j % half] for n in range(PRODUCTS)]
        quarters = [combined(zip(row, products, strict=True)) for row in TO_RESULT]
        return chosen(i % 2, [chosen(j // half, quarters[:2]), chosen(j // half, quarters[2:])])

    return te.compute((*batch, rows, as_dim(as_expr(half) * 2)), element, "strassen_output")


def _half(k: Dim) -> int:
    if not isinstance(k, int) or k % 2:
        raise IRError(f"Strassen's algorithm for rows of {k} elements", why="they are cut in halves")
    return k // 2


STRASSEN_INPUT, STRASSEN_OUTPUT = Operator("strassen_input", strassen_input), Operator("strassen_output", strassen_output)
