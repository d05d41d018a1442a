"""Winograd's minimal filtering for convolutions: F(m, r) for r taps along an axis, nested for several axes.

    y = A' [ sum over c of (B' x B) * (G w G') ] A          x: tiles of m + r - 1 pixels along an axis, y: tiles of m

m + r - 1 multiplications for m outputs in place of m r, along each axis: for 3x3 taps 2.25 times fewer with m = 2, 4 times with m = 4; for 5
taps along one axis 2.5 times with m = 4. An axis with one tap is left as it is. The constants come from interpolation at the points 0, 1, -1,
2, -2, 1/2, -1/2 and infinity (Toom and Cook; Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015). Rounding errors
grow with the number of points: relative to the largest output about 1e-6 for 4x4 of them and 1e-5 for 6x6 in float32.

With a stride of s, the pixels and taps at places q, q + s, ... are a convolution of stride 1 for each q < s, and y the sum of these: an axis
then has the points of all of them. For 3 taps of stride 2 these are F(m, 2) and F(m, 1), which is the product of pixel and tap itself:
2 m + 1 multiplications in place of 3 m, so that 3x3 taps take 1.44 times fewer with m = 2, 1.78 times with m = 4.

Three operators: tiles are transformed, multiplied point by point (a batched product), and transformed back. Weights are transformed at
compile time (`transformed_weights`). Between them, tensors are (points of each axis, batch, tiles of each axis, channels).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache
from math import prod

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, const
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.broadcast import pick, require_same
from tcomp.ops.nn import sizes

POINTS = tuple(Fraction(*p) for p in ((0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1), (1, 2), (-1, 2)))  # and infinity

Matrix = tuple[tuple[Fraction, ...], ...]
_PART = 1 << 17  # points of weights that are made at once: 1 MiB in float64


@cache
def matrices(tile: int, taps: int) -> tuple[Matrix, Matrix, Matrix]:
    """(A', G, B') of F(tile, taps), which takes tile + taps - 1 points, 8 at most: shapes (tile, points), (points, taps), (points, points)."""
    size = tile + taps - 1
    points = list(POINTS[: size - 1])
    whole = _polynomial(points)
    to_outputs = tuple(tuple(p**i for p in points) + (Fraction(i == tile - 1),) for i in range(tile))
    of_weights, of_inputs = [], []
    for n, p in enumerate(points):
        others = points[:n] + points[n + 1 :]
        scale = prod(p - q for q in others)
        of_weights.append(tuple(p**k / scale for k in range(taps)))
        of_inputs.append((*_polynomial(others), Fraction(0)))
    of_weights.append(tuple(Fraction(k == taps - 1) for k in range(taps)))
    return to_outputs, tuple(of_weights), (*of_inputs, tuple(whole))


def phases(taps: int, stride: int) -> tuple[int, ...]:
    """The taps of each of the convolutions of stride 1 that an axis with this stride consists of."""
    return tuple(len(range(q, taps, stride)) for q in range(stride))


def points_of(tile: int, taps: int, stride: int = 1) -> int:
    """Points of an axis, which are as many as the pixels under a tile."""
    return 1 if taps == 1 else stride * tile + taps - stride


def tile_shape(tile: int, taps: Sequence[int]) -> tuple[int, ...]:
    """The pixels of a tile along each axis: those with one tap are not cut."""
    return tuple(tile if n > 1 else 1 for n in taps)


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, lowest first, of the product of (x - root)."""
    found = [Fraction(1)]
    for root in roots:
        found = [a - root * b for a, b in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


def transformed_weights(w: np.ndarray, tile: int, stride: int = 1) -> np.ndarray:
    """G w G' for weights (out, in, *taps), as (*points, in, out); computed in float64 and rounded once, a cache full at a time."""
    outputs, channels, *taps = w.shape
    shape = [points_of(tile, t, stride) for t in taps]
    to_points = {axis: _of_weights(tile, t, stride) for axis, t in enumerate(taps) if t > 1}
    found = np.empty((*shape, channels, outputs), w.dtype)
    step = max(1, _PART // max(1, outputs * prod(shape)))
    for start in range(0, channels, step):
        part = w[:, start : start + step]
        points = np.moveaxis(part, (0, 1), (-1, -2)).reshape(*taps, -1).astype(np.float64)
        for axis, matrix in to_points.items():
            points = np.moveaxis(np.tensordot(matrix, points, (1, axis)), 0, axis)
        found[..., start : start + step, :] = points.reshape(*shape, -1, outputs)
    return found


def _of_weights(tile: int, taps: int, stride: int) -> np.ndarray:
    """G of all phases, one after the other: (points, taps)."""
    found = []
    for q, n in enumerate(phases(taps, stride)):
        rows = np.zeros((tile + n - 1, taps))
        rows[:, q::stride] = np.array(matrices(tile, n)[1], np.float64) if n > 1 else 1
        found.append(rows)
    return np.concatenate(found)


def winograd_input(x: Tensor, tile: int, taps: Sequence[int], stride: int = 1) -> Tensor:
    """B' x B for every tile of x (batch, channels, *pixels), of one pixel along axes with one tap, which have no stride. Under n tiles along
    an axis lie n * tile * stride + taps - stride pixels; up to stride - 1 pixels behind them, which no window reaches, are left out."""
    rank = len(taps)
    if x.ndim != rank + 2:
        raise IRError(f"Winograd's algorithm for a {x.ndim}-dimensional input", why=f"its filter has {rank} spatial axes")
    steps, counts = [n * stride if t > 1 else 1 for n, t in zip(tile_shape(tile, taps), taps, strict=True)], []
    points = [points_of(tile, t, stride) for t in taps]
    for d, step, n in zip(x.shape[2:], steps, points, strict=True):
        counts.append(as_dim((as_expr(d) - (n - step)) // step))
        under = as_expr(counts[-1]) * step + (n - step)
        require_same(d, as_dim(under + (as_expr(d) - under) % stride), "pixels under whole tiles")

    def element(*index: Expr) -> Expr:
        which, n, place, c = index[:rank], index[rank], index[rank + 1 : -1], index[-1]

        def transformed(axis: int, pixel: tuple[int, ...]) -> Expr:
            """Along this axis and those before it, at a pixel of a tile along those behind."""
            if axis < 0:
                return x[n, c, *(p * t + i for p, t, i in zip(place, steps, pixel, strict=True))]
            values = [transformed(axis - 1, (i, *pixel)) for i in range(points[axis])]
            return values[0] if taps[axis] == 1 else pick(which[axis], _to_points(tile, taps[axis], stride, values))

        return transformed(rank - 1, ())

    return te.compute((*points, x.shape[0], *counts, x.shape[1]), element, "winograd_input")


def winograd_product(x: Tensor, w: Tensor) -> Tensor:
    """For every point, tiles times weights (*points, in channels, out channels)."""
    require_same(x.shape[-1], w.shape[-2], "channels of a convolution")
    c, rank = te.reduce_axis(w.shape[-2], "rc"), w.ndim - 2

    def element(*index: Expr) -> Expr:
        return te.sum(x[*index[:-1], c] * w[*index[:rank], c, index[-1]], c)

    return te.compute((*x.shape[:-1], w.shape[-1]), element, "winograd_product")


def winograd_output(p: Tensor, tile: int, shape: Sequence[Dim], stride: int = 1) -> Tensor:
    """A' p A for every tile, put together: (batch, channels, *shape), what lies beyond `shape` cut off."""
    rank = len(shape)
    points = sizes(p.shape[:rank], "points")
    tiles = tile_shape(tile, points)  # one point where there is one tap
    for d, count, n in zip(shape, p.shape[rank + 1 : -1], tiles, strict=True):
        require_same(as_dim((as_expr(d) + (n - 1)) // n), count, "tiles of a convolution")

    def element(n: Expr, o: Expr, *place: Expr) -> Expr:
        def transformed(axis: int, point: tuple[int, ...]) -> Expr:
            if axis < 0:
                return p[*point, n, *(i // t for i, t in zip(place, tiles, strict=True)), o]
            values = [transformed(axis - 1, (i, *point)) for i in range(points[axis])]
            if points[axis] == 1:
                return values[0]
            return pick(place[axis] % tile, _from_points(tile, points[axis] - stride * tile + stride, stride, values))

        return transformed(rank - 1, ())

    return te.compute((p.shape[rank], p.shape[-1], *shape), element, "winograd_output")


def _to_points(tile: int, taps: int, stride: int, values: Sequence[Expr]) -> list[Expr]:
    """B' * values of all phases. The rows of the points p and -p are the sum and the difference of their even and odd terms."""
    found: list[Expr] = []
    for q, n in enumerate(phases(taps, stride)):
        pixels = values[q::stride][: tile + n - 1]
        found += [combined([_scaled(row, pixels, 0), _scaled(row, pixels, 1)]) for row in matrices(tile, n)[2]] if n > 1 else pixels
    return found


def _scaled(row: Sequence[Fraction], values: Sequence[Expr], parity: int) -> tuple[Fraction, Expr | None]:
    """Every second term of a row, divided by the last factor: what it has in common with other rows."""
    terms = [(c, v) for c, v in list(zip(row, values, strict=True))[parity::2] if c]
    if not terms:
        return Fraction(0), None
    last = terms[-1][0]
    return last, combined([(c / last, v) for c, v in reversed(terms)])


def _from_points(tile: int, taps: int, stride: int, values: Sequence[Expr]) -> list[Expr]:
    """A' * values, summed up over all phases. The points p and -p come together as the sum and the difference of their values."""
    terms: list[list[tuple[Fraction, Expr]]] = [[] for _ in range(tile)]
    for n in phases(taps, stride):
        (zero, *finite), values = values[: tile + n - 1], values[tile + n - 1 :]
        if n == 1:
            for i, value in enumerate((zero, *finite)):
                terms[i].append((Fraction(1), value))
            continue
        *finite, infinity = finite
        pairs = [(a + b, a - b) for a, b in zip(finite[::2], finite[1::2], strict=False)]
        for i, row in enumerate(matrices(tile, n)[0]):
            terms[i] += [(row[0], zero), *((c, both[i % 2]) for c, both in zip(row[1:-1:2], pairs, strict=False))]
            if len(finite) % 2:  # a point without its opposite
                terms[i].append((row[-2], finite[-1]))
            terms[i].append((row[-1], infinity))
    return [combined(row) for row in terms]


def combined(terms: Iterable[tuple[Fraction | int, Expr | None]]) -> Expr:
    """The sum of factor * value, without what is zero or missing."""
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
