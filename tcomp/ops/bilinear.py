"""Bilinear algorithms, which multiply less than the sum they compute: Winograd's for convolutions, Strassen's for products of matrices.

Each is three linear maps: of the input, of the weights (at compile time), and of their products back to the result.

**Winograd's minimal filtering** F(m, r) for windows of r elements along an axis, nested for several axes:

    y = A' [ sum over c of (B' x B) * (G w G') ] A          x: tiles of m + r - 1 pixels along an axis, y: tiles of m

m + r - 1 multiplications for m outputs in place of m r, along each axis: for 3x3 windows 2.25 times fewer with m = 2, 4 times with m = 4.
An axis with a window of 1 is left as it is. The constants come from interpolation at the points 0, 1, -1, 2, -2, 1/2, -1/2 and infinity
(Toom and Cook; Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015). Rounding errors grow with the number of points:
relative to the largest output about 1e-6 for 4x4 of them and 1e-5 for 6x6 in float32. With a stride of s, the pixels and weights at places
q, q + s, ... are a convolution of stride 1 for each q < s, and y the sum of these: an axis then has the points of all of them. For windows
of 3 and stride 2 these are F(m, 2) and F(m, 1), the product of pixel and weight itself: 3x3 windows take 1.44 times fewer with m = 2, 1.78
times with m = 4. For integers of 16 bits, G is multiplied by the denominator that its elements have in common, and the result divided by
it: exact as long as the sums times that denominator (squared, for two axes) are below 2**31 (`exact_sums`).

Between the operators, tensors are (points of each axis, batch, tiles of each axis, channels); with channels in groups, (points, group,
batch, tiles, channels of a group), so that the products of a group find its channels next to each other.

**Strassen's algorithm**, one level: a product of matrices cut in quarters takes 7 products of quarters in place of 8.

    [C11 C12]   [A11 A12] [B11 B12]     M1 = (A11 + A22) (B11 + B22)     M5 = (A11 + A12) B22            C11 = M1 + M4 - M5 + M7
    [C21 C22] = [A21 A22] [B21 B22]     M2 = (A21 + A22) B11             M6 = (A21 - A11) (B11 + B12)    C12 = M3 + M5
                                        M3 = A11 (B12 - B22)             M7 = (A12 - A22) (B21 + B22)    C21 = M2 + M4
                                        M4 = A22 (B21 - B11)                                             C22 = M1 - M2 + M3 + M6

(V. Strassen, "Gaussian elimination is not optimal", Numerische Mathematik 13, 1969.) Quarters are the even and the odd rows of A, and
halves of the other two axes. Rounding errors are those of what is added: a large row of A would leave its errors in the small one it is
paired with. Therefore rows are added as multiples of their largest elements (outer scaling: G. Ballard et al., "Improving the numerical
stability of fast matrix multiplication", SIAM J. Matrix Anal. Appl. 37, 2016): errors are about twice those of the direct sum, of each row
for itself. The columns of B are to be of similar size from the start: see `similar_columns`. Rows that are pixels of an image, next to each
other, are added as they are, as in the tiles of Winograd's algorithm: errors are relative to the largest output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache
from math import inf, lcm, nan, prod

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.broadcasting import require_same, term
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_expr, const, select
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor
from tcomp.ops.elementwise import pick
from tcomp.ops.nn import sizes
from tcomp.ops.reduction import reduce

Matrix = tuple[tuple[Fraction, ...], ...]
POINTS = tuple(Fraction(*p) for p in ((0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1), (1, 2), (-1, 2)))  # of Winograd's algorithm; and infinity
_BLOCK = 1 << 17  # points of weights that are computed at once: 1 MiB in float64, which the L2 cache holds


@cache
def matrices(tile: int, window: int) -> tuple[Matrix, Matrix, Matrix]:
    """(A', G, B') of F(tile, window), whose n = tile + window - 1 points are 8 at most: shapes (tile, n), (n, window), (n, n)."""
    points = list(POINTS[: tile + window - 2])
    to_outputs = tuple(tuple(p**i for p in points) + (Fraction(i == tile - 1),) for i in range(tile))
    of_weights, of_inputs = [], []
    for n, p in enumerate(points):
        others = points[:n] + points[n + 1 :]
        scale = prod(p - q for q in others)
        of_weights.append(tuple(p**k / scale for k in range(window)))
        of_inputs.append((*_polynomial(others), Fraction(0)))
    of_weights.append(tuple(Fraction(k == window - 1) for k in range(window)))
    return to_outputs, tuple(of_weights), (*of_inputs, tuple(_polynomial(points)))


def phases(window: int, stride: int) -> tuple[int, ...]:
    """The window sizes of the convolutions of stride 1 that an axis with this stride consists of."""
    return tuple(len(range(q, window, stride)) for q in range(stride))


def points_of(tile: int, window: int, stride: int = 1) -> int:
    """Points of an axis, which are as many as the pixels under a tile."""
    return 1 if window == 1 else stride * tile + window - stride


def tile_shape(tile: int, window: Sequence[int]) -> tuple[int, ...]:
    """The pixels of a tile along each axis: those with a window of 1 are not cut."""
    return tuple(tile if n > 1 else 1 for n in window)


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, lowest first, of the product of (x - root)."""
    found = [Fraction(1)]
    for root in roots:
        found = [a - root * b for a, b in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


@cache
def denominator(tile: int, window: int, stride: int = 1) -> int:
    """What makes integers of G for this axis; 0 where A' or B' has elements besides 0, 1, and -1, so that pixels grow by more than sums."""
    found = 1
    for n in phases(window, stride):
        to_outputs, of_weights, of_inputs = matrices(tile, n) if n > 1 else ((), (), ())
        if any(abs(e) > 1 for row in (*to_outputs, *of_inputs) for e in row):
            return 0
        found = lcm(found, *(e.denominator for row in of_weights for e in row))
    return found


def exact_sums(w: np.ndarray, tile: int, stride: int, largest: int) -> bool:
    """Whether integer weights (out, in, *window) times pixels from 0 to `largest` are summed exactly in int32 by integers of 16 bits."""
    scales = [denominator(tile, n, stride) for n in w.shape[2:]]
    sums = np.abs(w.astype(np.int64)).reshape(w.shape[0], -1).sum(1).max(initial=0)
    grown = prod(2 if n > 1 else 1 for n in w.shape[2:])  # a point adds or subtracts two pixels along an axis, and less than `n` weights
    point = prod(n * scale for n, scale in zip(w.shape[2:], scales, strict=True)) * np.abs(w.astype(np.int64)).max(initial=0)
    return 0 not in scales and prod(scales) * sums * largest < 1 << 31 and max(grown * largest, point) < 1 << 15


def transformed_weights(w: np.ndarray, tile: int, stride: int = 1, group: int = 1) -> np.ndarray:
    """G w G' for weights (out, in, *window), as (*points, in, out), with several groups (*points, group, in, out); computed in float64 and
    rounded once, a cache full at a time. Integers are multiplied by the `denominator` of each axis."""
    if group > 1:
        return np.stack([transformed_weights(part, tile, stride) for part in np.split(w, group)], axis=w.ndim - 2)
    outputs, channels, *window = w.shape
    shape = [points_of(tile, n, stride) for n in window]
    to_points = {axis: _of_weights(tile, n, stride) for axis, n in enumerate(window) if n > 1}
    if np.issubdtype(w.dtype, np.integer):
        to_points = {axis: matrix * denominator(tile, window[axis], stride) for axis, matrix in to_points.items()}
    found = np.empty((*shape, channels, outputs), w.dtype)
    step = max(1, _BLOCK // max(1, outputs * prod(shape)))
    for start in range(0, channels, step):
        points = np.moveaxis(w[:, start : start + step], (0, 1), (-1, -2)).reshape(*window, -1).astype(np.float64)
        for axis, matrix in to_points.items():
            points = np.moveaxis(np.tensordot(matrix, points, (1, axis)), 0, axis)
        found[..., start : start + step, :] = points.reshape(*shape, -1, outputs)
    return found


def _of_weights(tile: int, window: int, stride: int) -> np.ndarray:
    """G of all phases, one after the other: (points, window)."""
    found = np.zeros((points_of(tile, window, stride), window))
    row = 0
    for q, n in enumerate(phases(window, stride)):
        found[row : (row := row + tile + n - 1), q::stride] = np.array(matrices(tile, n)[1], np.float64) if n > 1 else 1
    return found


def winograd_input(x: Tensor, tile: int, taps: Sequence[int], stride: int = 1, fused: bool = True, group: int = 1) -> Tensor:
    """B' x B for every tile of x (batch, channels, *pixels); `taps` is the window, and axes where it is 1 have tiles of one pixel and no
    stride. With more groups than one the result is (*points, group, batch, *tiles, channels of the group). Under n tiles along an axis lie
    n * tile * stride + window - stride pixels; up to stride - 1 behind them, which no window reaches, are left out. `fused`: by
    multiply-adds that round once, as most processors have."""
    rank = len(taps)
    if x.ndim != rank + 2:
        raise IRError(f"Winograd's algorithm for a {x.ndim}-dimensional input", why=f"its filter has {rank} spatial axes")
    steps, counts = [n * stride if size > 1 else 1 for n, size in zip(tile_shape(tile, taps), taps, strict=True)], []
    points = [points_of(tile, size, stride) for size in taps]
    for d, step, n in zip(x.shape[2:], steps, points, strict=True):
        counts.append(as_dim((as_expr(d) - (n - step)) // step))
        under = as_expr(counts[-1]) * step + (n - step)
        require_same(d, as_dim(under + (as_expr(d) - under) % stride), "pixels under whole tiles")

    each = as_expr(x.shape[1]) // group

    def element(*index: Expr) -> Expr:
        which, (*of, n), place, c = index[:rank], index[rank : -rank - 1], index[-rank - 1 : -1], index[-1]
        channel = of[0] * each + c if of else c

        def transformed(axis: int, pixel: tuple[int, ...]) -> Expr:
            """Along this axis and those before it, at a pixel of a tile along those behind."""
            if axis < 0:
                return x[n, channel, *(p * t + i for p, t, i in zip(place, steps, pixel, strict=True))]
            values = [transformed(axis - 1, (i, *pixel)) for i in range(points[axis])]
            return values[0] if taps[axis] == 1 else pick(which[axis], _to_points(tile, taps[axis], stride, values, fused))

        return transformed(rank - 1, ())

    groups = () if group == 1 else (group,)
    return te.compute((*points, *groups, x.shape[0], *counts, as_dim(each)), element, "winograd_input")


def winograd_product(x: Tensor, w: Tensor, dtype: str | None = None) -> Tensor:
    """For every point, and group, tiles times weights (*points, in channels, out channels), or (*points, group, in, out). Integers are
    summed in `dtype`."""
    require_same(x.shape[-1], w.shape[-2], "channels of a convolution")
    c, shape = te.reduce_axis(w.shape[-2], "rc"), (*x.shape[:-1], w.shape[-1])
    return te.compute(shape, lambda *i: te.sum(term(x[*i[:-1], c], w[*i[: w.ndim - 2], c, i[-1]], dtype), c), "winograd_product")


def winograd_output(p: Tensor, tile: int, shape: Sequence[Dim], stride: int = 1, fused: bool = True, group: int = 1) -> Tensor:
    """A' p A for every tile, put together: (batch, channels, *shape), what lies beyond `shape` cut off. Integers are divided by the
    denominators of the weights. `fused` and `group` as of `winograd_input`."""
    rank = len(shape)
    points = sizes(p.shape[:rank], "points")
    tiles = tile_shape(tile, points)  # one point where the window is 1
    for d, count, n in zip(shape, p.shape[-rank - 1 : -1], tiles, strict=True):
        require_same(as_dim((as_expr(d) + (n - 1)) // n), count, "tiles of a convolution")

    each = as_expr(p.shape[-1])
    windows = [n - stride * tile + stride if n > 1 else 1 for n in points]
    scale = 1 if is_float(p.dtype) else prod(denominator(tile, n, stride) for n in windows)

    def element(n: Expr, o: Expr, *place: Expr) -> Expr:
        def transformed(axis: int, point: tuple[int, ...]) -> Expr:
            if axis < 0:
                of, channel = ((), o) if group == 1 else ((o // each,), o % each)
                return p[*point, *of, n, *(i // t for i, t in zip(place, tiles, strict=True)), channel]
            values = [transformed(axis - 1, (i, *point)) for i in range(points[axis])]
            if points[axis] == 1:
                return values[0]
            return pick(place[axis] % tile, _from_points(tile, windows[axis], stride, values, fused))

        found = transformed(rank - 1, ())
        return found if scale == 1 else found // scale

    return te.compute((p.shape[-rank - 2], as_dim(each * group), *shape), element, "winograd_output")


def _to_points(tile: int, window: int, stride: int, values: Sequence[Expr], fused: bool) -> list[Expr]:
    """B' * values of all phases. The rows of the points p and -p are the sum and the difference of their even and odd terms."""
    found: list[Expr] = []
    for q, n in enumerate(phases(window, stride)):
        pixels = values[q::stride][: tile + n - 1]
        if n == 1:
            found += pixels
            continue
        for row in matrices(tile, n)[2]:
            found.append(combined([_scaled(row, pixels, parity, fused) for parity in (0, 1)], fused))
    return found


def _scaled(row: Sequence[Fraction], values: Sequence[Expr], parity: int, fused: bool) -> tuple[Fraction, Expr | None]:
    """Every second term of a row, divided by the last factor: what it has in common with other rows."""
    terms = [(c, v) for c, v in zip(row[parity::2], values[parity::2], strict=True) if c]
    last = terms[-1][0] if terms else Fraction(0)
    return last, combined([(c / last, v) for c, v in reversed(terms)], fused) if terms else None


def _from_points(tile: int, window: int, stride: int, values: Sequence[Expr], fused: bool) -> list[Expr]:
    """A' * values, summed up over all phases. The points p and -p come together as the sum and the difference of their values."""
    terms: list[list[tuple[Fraction, Expr]]] = [[] for _ in range(tile)]
    for n in phases(window, stride):
        (zero, *finite), values = values[: tile + n - 1], values[tile + n - 1 :]
        if n == 1:
            for own, value in zip(terms, (zero, *finite), strict=True):
                own.append((Fraction(1), value))
            continue
        *finite, infinity = finite
        pairs = [(a + b, a - b) for a, b in zip(finite[::2], finite[1::2], strict=False)]
        for i, row in enumerate(matrices(tile, n)[0]):
            terms[i] += [(row[0], zero), *((c, both[i % 2]) for c, both in zip(row[1:-1:2], pairs, strict=False))]
            if len(finite) % 2:  # a point without its opposite
                terms[i].append((row[-2], finite[-1]))
            terms[i].append((row[-1], infinity))
    return [combined(row, fused) for row in terms]


def combined(terms: Iterable[tuple[Fraction | int, Expr | None]], fused: bool = True) -> Expr:
    """The sum of factor * value, without what is zero or missing; `fused`: products are added before they are rounded."""
    (c, first), *rest = ((c, v) for c, v in terms if c and v is not None)
    found = first if c == 1 else first * float(c)
    for c, v in rest:
        factor = const(float(c), v.dtype)
        found = found + v if c == 1 else found - v if c == -1 else te.fma(v, factor, found) if fused else v * factor + found
    return found


PRODUCTS = 7  # of Strassen's algorithm
MAX_COLUMN_RATIO = 1000  # times that columns may differ: errors of the smaller one then are about 1e-4 of its size
# What the factors of each product are made of: (11, 12, 21, 22), and what the quarters of the result are made of.
OF_LEFT = ((1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (-1, 0, 1, 0), (0, 1, 0, -1))
OF_RIGHT = ((1, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1))
TO_RESULT = ((1, 0, 0, 1, -1, 0, 1), (0, 0, 1, 0, 1, 0, 0), (0, 1, 0, 1, 0, 0, 0), (1, -1, 1, 0, 0, 1, 0))


def similar_columns(w: np.ndarray, transposed: bool = False) -> bool:
    """Whether those columns of a matrix (k, n), or of its transpose, that are added differ in size by at most `MAX_COLUMN_RATIO` times, and
    sums are finite; those of integers are exact."""
    if np.issubdtype(w.dtype, np.integer):
        return True
    axis = 1 if transposed else 0
    left, right = np.split(np.maximum(w.max(axis), -w.min(axis)), 2)
    with np.errstate(over="ignore"):
        return bool(np.all((left <= MAX_COLUMN_RATIO * right) & (right <= MAX_COLUMN_RATIO * left) & (2 * (left + right) < inf)))


def strassen_weights(w: np.ndarray, transposed: bool = False) -> np.ndarray:
    """The right factors of the seven products, for a matrix (k, n) of even sizes, or its transpose: (7, k / 2, n / 2). Each is a quarter,
    or adds two, rounded in the type of `w`."""
    w = w.T if transposed else w
    k, n = (d // 2 for d in w.shape)
    quarters = [w[a : a + k, b : b + n] for a in (0, k) for b in (0, n)]
    found = np.empty((PRODUCTS, k, n), w.dtype)
    for factor, row in zip(found, OF_RIGHT, strict=True):
        plus, minus = ([q for c, q in zip(row, quarters, strict=True) if c == sign] for sign in (1, -1))
        factor[:] = plus[0]
        for q in plus[1:]:
            factor += q
        for q in minus:
            factor -= q
    return found


def strassen_rows(x: Tensor) -> Tensor:
    """The size of each row of x (..., rows, k): (..., rows), its largest magnitude, but at least what has a finite reciprocal; 0 for zeros,
    NaN where an element is not finite."""
    tiny = float(np.finfo(x.dtype).tiny)

    def size(largest: Expr) -> Expr:
        return select(te.equal(largest, 0.0), 0.0, select(largest < inf, te.maximum(largest, tiny), nan))

    return reduce(x, [x.ndim - 1], False, te.max, "strassen_rows", te.abs, size)


def strassen_input(x: Tensor, sizes: Tensor | None) -> Tensor:
    """The left factors of the seven products, for matrices x (..., rows, k) with k even: (7, ..., ceil(rows / 2), k / 2). Each row is
    divided by its size (..., rows), zeros where that is 0 or NaN; integers have None. The last row stands for the one that an odd number of
    rows lacks."""
    *batch, rows, k = x.shape
    if not isinstance(k, int) or k % 2:
        raise IRError(f"Strassen's algorithm for rows of {k} elements", why="they are cut in halves")
    half = k // 2

    def scaled(*index: Expr) -> Expr:
        if sizes is None:
            return x[index]
        size = sizes[index[:-1]]
        return select(size > 0.0, x[index] * (1.0 / size), 0.0)

    def element(which: Expr, *index: Expr) -> Expr:
        *outer, i, j = index
        return _left_factor(which, [scaled(*outer, row, j + place) for row in _pair(i, rows) for place in (0, half)])

    return te.compute((PRODUCTS, *batch, as_dim((as_expr(rows) + 1) // 2), half), element, "strassen_input")


def strassen_output(p: Tensor, sizes: Tensor | None, rows: Dim | None = None) -> Tensor:
    """The result, from the seven products p (7, ..., ceil(rows / 2), n / 2) and the sizes of its rows (..., rows), or their number where
    they have none: (..., rows, n)."""
    _, *batch, pairs, half = p.shape
    rows = rows if sizes is None else sizes.shape[-1]
    if rows is None:
        raise IRError("the number of rows is not known", hint="give it where rows have no sizes")
    require_same(pairs, as_dim((as_expr(rows) + 1) // 2), "pairs of rows")

    def element(*index: Expr) -> Expr:
        *outer, i, j = index
        found = _quarter([p[n, *outer, i // 2, j % half] for n in range(PRODUCTS)], i % 2, j // half)
        return found if sizes is None else found * sizes[*outer, i]

    return te.compute((*batch, rows, as_dim(as_expr(half) * 2)), element, "strassen_output")


def strassen_pixels(x: Tensor, rows: int) -> Tensor:
    """The left factors of the seven products, for the matrix of all pixels of x (batch, k, pixels...) with k even:
    (7, batch * pairs of pixels, k / 2). Pixels that are neighbours along the axis `rows` are pairs; the last one stands for the one that an
    odd number lacks."""
    k = x.shape[1]
    if not isinstance(k, int) or k % 2:
        raise IRError(f"Strassen's algorithm for pixels of {k} channels", why="they are cut in halves")
    half, pairs = k // 2, _pairs(x.shape, rows)

    def element(which: Expr, place: Expr, j: Expr) -> Expr:
        found = list[Expr]()
        for extent in pairs[:0:-1]:
            found, place = [place % extent, *found], place // extent
        outer = (place, *found)

        def pixel(i: Expr, channel: Expr) -> Expr:
            at = [i if axis == rows else n for axis, n in zip((0, *range(2, x.ndim)), outer, strict=True)]
            return x[at[0], channel, *at[1:]]

        return _left_factor(which, [pixel(i, j + n) for i in _pair(outer[rows - 1], x.shape[rows]) for n in (0, half)])

    return te.compute((PRODUCTS, as_dim(prod(map(as_expr, pairs), start=as_expr(1))), half), element, "strassen_pixels")


def strassen_image(p: Tensor, shape: Sequence[Dim], rows: int) -> Tensor:
    """The result of a `shape` (batch, n, pixels...), from the seven products p (7, batch * pairs of pixels, n / 2); see
    `strassen_pixels`."""
    half, pairs = p.shape[-1], _pairs(shape, rows)
    require_same(p.shape[1], as_dim(prod(map(as_expr, pairs), start=as_expr(1))), "pairs of pixels")
    require_same(shape[1], as_dim(as_expr(half) * 2), "channels")

    def element(*index: Expr) -> Expr:
        batch, j, *pixel = (n // 2 if axis == rows else n for axis, n in enumerate(index))
        place = batch
        for n, extent in zip(pixel, pairs[1:], strict=True):
            place = place * extent + n
        return _quarter([p[n, place, j % half] for n in range(PRODUCTS)], index[rows] % 2, j // half)

    return te.compute(tuple(shape), element, "strassen_image")


def _pairs(shape: Sequence[Dim], rows: int) -> list[Dim]:
    """The extents of an image (batch, channels, pixels...) without the channels, where pixels are pairs along the axis `rows`."""
    return [as_dim((as_expr(d) + 1) // 2) if axis == rows else d for axis, d in enumerate(shape) if axis != 1]


def _pair(i: Expr, rows: Dim) -> tuple[Expr, Expr]:
    """The two rows of a pair."""
    return i * 2, te.minimum(i * 2 + 1, as_expr(rows) - 1)


def _left_factor(which: Expr, quarters: Sequence[Expr]) -> Expr:
    """That of the product `which`."""
    return pick(which, [combined(zip(row, quarters, strict=True)) for row in OF_LEFT])


def _quarter(products: Sequence[Expr], lower: Expr, right: Expr) -> Expr:
    """The element of the result in the upper (0) or lower (1) and left (0) or right (1) quarter."""
    quarters = [combined(zip(row, products, strict=True)) for row in TO_RESULT]
    return pick(lower, [pick(right, quarters[:2]), pick(right, quarters[2:])])


WINOGRAD_INPUT, WINOGRAD_PRODUCT = Operator("winograd_input", winograd_input), Operator("winograd_product", winograd_product)
WINOGRAD_OUTPUT, STRASSEN_ROWS = Operator("winograd_output", winograd_output), Operator("strassen_rows", strassen_rows)
STRASSEN_INPUT, STRASSEN_OUTPUT = Operator("strassen_input", strassen_input), Operator("strassen_output", strassen_output)
STRASSEN_PIXELS, STRASSEN_IMAGE = Operator("strassen_pixels", strassen_pixels), Operator("strassen_image", strassen_image)
