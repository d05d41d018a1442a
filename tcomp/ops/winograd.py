"""Winograd's minimal filtering for 3x3 convolutions of stride 1: F(m x m, 3x3) with m + 2 points per axis.

    y = A' [ sum over c of (B' x B) * (G w G') ] A          x: tiles of (m+2) x (m+2) pixels, y: tiles of m x m

(m+2)^2 multiplications for m^2 outputs in place of 9 m^2: 2.25 times fewer for m = 2, 4 times for m = 4. The constants come from
interpolation at the points 0, 1, -1, 2, -2, ... and infinity (Toom and Cook; Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", 2015). Rounding errors grow with m: relative to the largest output about 1e-6 for m = 2 and 1e-5 for m = 4 in float32.

Three operators: tiles are transformed, multiplied point by point (a batched product), and transformed back. Weights are transformed at
compile time (`transformed_weights`). Between them, tensors are (m+2, m+2, batch, tile rows, tile columns, channels).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import prod

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, const, select
from tcomp.ir.graph import Operator
from tcomp.ops.broadcast import require_same
from tcomp.ops.nn import sizes

TAPS = 3  # of the filter, along each axis

Matrix = tuple[tuple[Fraction, ...], ...]


@cache
def matrices(tile: int) -> tuple[Matrix, Matrix, Matrix]:
    """(A', G, B') of F(tile, 3): shapes (tile, tile + 2), (tile + 2, 3), (tile + 2, tile + 2)."""
    size = tile + TAPS - 1
    points = [Fraction((n + 1) // 2 * (1 if n % 2 else -1)) for n in range(size - 1)]  # 0, 1, -1, 2, -2, ...
    whole = _polynomial(points)
    to_outputs = tuple(tuple(p**i for p in points) + (Fraction(i == tile - 1),) for i in range(tile))
    of_weights, of_inputs = [], []
    for n, p in enumerate(points):
        others = points[:n] + points[n + 1 :]
        scale = prod(p - q for q in others)
        of_weights.append(tuple(p**k / scale for k in range(TAPS)))
        of_inputs.append((*_polynomial(others), Fraction(0)))
    of_weights.append(tuple(Fraction(k == TAPS - 1) for k in range(TAPS)))
    return to_outputs, tuple(of_weights), (*of_inputs, tuple(whole))


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, lowest first, of the product of (x - root)."""
    found = [Fraction(1)]
    for root in roots:
        found = [a - root * b for a, b in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


def transformed_weights(w: np.ndarray, tile: int) -> np.ndarray:
    """G w G' for weights (out, in, 3, 3), as (tile + 2, tile + 2, in, out); computed in float64 and rounded once."""
    g = np.array(matrices(tile)[1], np.float64)
    points = np.kron(g, g) @ w.reshape(-1, TAPS * TAPS).T.astype(np.float64)
    return np.ascontiguousarray(points.reshape(tile + 2, tile + 2, *w.shape[:2]).swapaxes(2, 3), w.dtype)


def tile_count(extent: Dim, tile: int) -> Dim:
    """How many tiles cover `extent` outputs."""
    return as_dim((as_expr(extent) + (tile - 1)) // tile)


def winograd_input(x: te.Tensor, tile: int) -> te.Tensor:
    """B' x B for every tile of x (batch, channels, tile * rows + 2, tile * columns + 2)."""
    if x.ndim != 4:
        raise IRError(f"Winograd's algorithm for a {x.ndim}-dimensional input", why="it is one for two spatial axes")
    rows, columns = (as_dim((as_expr(d) - (TAPS - 1)) // tile) for d in x.shape[2:])
    for d, count in zip(x.shape[2:], (rows, columns), strict=True):
        require_same(d, as_dim(as_expr(count) * tile + (TAPS - 1)), "pixels under whole tiles")
    transform = matrices(tile)[2]

    def element(a: Expr, b: Expr, n: Expr, h: Expr, w: Expr, c: Expr) -> Expr:
        pixels = [[x[n, c, h * tile + i, w * tile + j] for i in range(tile + 2)] for j in range(tile + 2)]
        return _chosen(b, _to_points(transform, [_chosen(a, _to_points(transform, column)) for column in pixels]))

    return te.compute((tile + 2, tile + 2, x.shape[0], rows, columns, x.shape[1]), element, "winograd_input")


def winograd_product(x: te.Tensor, w: te.Tensor) -> te.Tensor:
    """For every point, tiles times weights (tile + 2, tile + 2, in channels, out channels)."""
    require_same(x.shape[-1], w.shape[2], "channels of a convolution")
    c = te.reduce_axis(w.shape[2], "rc")

    def element(a: Expr, b: Expr, n: Expr, h: Expr, v: Expr, o: Expr) -> Expr:
        return te.sum(x[a, b, n, h, v, c] * w[a, b, c, o], c)

    return te.compute((*x.shape[:-1], w.shape[3]), element, "winograd_product")


def winograd_output(p: te.Tensor, shape: Sequence[Dim]) -> te.Tensor:
    """A' p A for every tile, put together: (batch, channels, *shape), what lies beyond `shape` cut off."""
    tile = sizes(p.shape[:1], "points")[0] - TAPS + 1
    for d, count in zip(shape, p.shape[3:5], strict=True):
        require_same(tile_count(d, tile), count, "tiles of a convolution")
    transform = matrices(tile)[0]

    def element(n: Expr, o: Expr, h: Expr, w: Expr) -> Expr:
        points = [[p[a, b, n, h // tile, w // tile, o] for a in range(tile + 2)] for b in range(tile + 2)]
        rows = [_chosen(h % tile, _from_points(transform, column)) for column in points]
        return _chosen(w % tile, _from_points(transform, rows))

    return te.compute((p.shape[2], p.shape[5], *shape), element, "winograd_output")


def _chosen(row: Expr, rows: Sequence[Expr]) -> Expr:
    """rows[row]; which one is known where the loop over rows is unrolled."""
    *others, found = rows
    for n in reversed(range(len(others))):
        found = select(te.equal(row, n), others[n], found)
    return found


def _to_points(matrix: Matrix, values: Sequence[Expr]) -> list[Expr]:
    """B' * values. The rows of the points p and -p are the sum and the difference of their even and odd terms."""
    return [_sum([_scaled(row, values, 0), _scaled(row, values, 1)]) for row in matrix]


def _scaled(row: Sequence[Fraction], values: Sequence[Expr], parity: int) -> tuple[Fraction, Expr | None]:
    """Every second term of a row, divided by the last factor: what it has in common with other rows."""
    terms = [(c, v) for c, v in list(zip(row, values, strict=True))[parity::2] if c]
    if not terms:
        return Fraction(0), None
    last = terms[-1][0]
    return last, _sum([(c / last, v) for c, v in reversed(terms)])


def _from_points(matrix: Matrix, values: Sequence[Expr]) -> list[Expr]:
    """A' * values. The points p and -p come together as the sum and the difference of their values."""
    zero, *pairs, infinity = values
    together = [(a + b, a - b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    result = []
    for i, row in enumerate(matrix):
        terms = [(c, both[i % 2]) for c, both in zip(row[1:-1:2], together, strict=True)]
        result.append(_sum([(row[0], zero), *terms, (row[-1], infinity)]))
    return result


def _sum(terms: Sequence[tuple[Fraction, Expr | None]]) -> Expr:
    found: Expr | None = None
    for c, v in terms:
        if c and v is not None:
            if found is None:
                found = v if c == 1 else v * float(c)
            else:
                found = found + v if c == 1 else found - v if c == -1 else te.fma(v, const(float(c), v.dtype), found)
    assert found is not None
    return found


WINOGRAD_INPUT, WINOGRAD_PRODUCT = Operator("winograd_input", winograd_input), Operator("winograd_product", winograd_product)
WINOGRAD_OUTPUT = Operator("winograd_output", winograd_output)
