"""Algorithms: which of several ways to compute the same thing a node takes: convolutions directly, or Winograd's way; products of matrices
directly, or Strassen's way; transposed convolutions as a sum for each output, or as a product that is spread out.

Winograd's algorithm multiplies 1.2 to 4 times less, but moves tiles to and from points, and streams more weights. `fastest` weighs both, by
constants that were fitted to 34 convolutions of stride 1 in real networks (and found right for 13 of 15 of stride 2); who has timed them may
decide otherwise. Rounding errors are about ten times those of the direct sum and stay far below `MAX_ERROR` of the largest output, which tests
hold them to; more points, whose errors are larger, are not on offer.

Strassen's algorithm, for products with a matrix that is known, multiplies 8/7 times less, and streams 7/4 times the weights, which are kept
as its sums of quarters. Constants were fitted to 30 products on a Zen 5 core; where many rows share the weights it takes 0.89 to 0.95 of the
time. Rounding errors are about twice those of the direct sum, of each row for itself.

`tcomp.compile(..., direct=True)` and `--direct` do without both.

A transposed convolution whose windows lie side by side (the filter is as large as the stride) is a product with all taps as outputs, and a
rearrangement. Where outputs are no more than lanes of a vector, that fills vectors with taps; the sum for each output would gather pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tcomp.ir.expr import Dim, as_dim, as_expr
from tcomp.ir.graph import Graph, LazyConstant, Node, Value
from tcomp.ops.matmul import MATMUL
from tcomp.ops.movement import PAD, RESHAPE, TRANSPOSE
from tcomp.ops.nn import CONV
from tcomp.ops.strassen import PRODUCTS, STRASSEN_INPUT, STRASSEN_OUTPUT, STRASSEN_ROWS, similar_columns, strassen_weights
from tcomp.ops.winograd import WINOGRAD_INPUT, WINOGRAD_OUTPUT, WINOGRAD_PRODUCT, phases, points_of, tile_shape, transformed_weights
from tcomp.passes import contractions
from tcomp.passes.canonicalize import zero_padding
from tcomp.passes.rewrite import Notes, Rewriter, rewrite_graph

MOST_POINTS = {1: 8, 2: 6}  # along an axis, at most, by the number of axes that are cut into tiles
MOST_STRIDE = 2  # of three taps, a larger stride leaves nothing to save
MAX_ERROR = 1e-3  # of the largest output: no algorithm is chosen that may be less exact
STREAMED = 8.0  # bytes of weights a cycle, which are at home in no near cache: see `Target.streaming_bandwidth`
MOVED = 14  # bytes of tiles and points a cycle: they are transformed on the way
ADDED = 28  # bytes of quarters a cycle, and of what they add up to, where these are `KEPT` bytes at most
KEPT = 40 << 20
BEYOND = 6  # bytes of them a cycle where they are more
REACHED = 0.93  # of the peak of the multiply-adds
WORTHWHILE = 0.95  # of the time of the direct sum


@dataclass(frozen=True, slots=True)
class Convolution:
    """The sizes of a convolution: what tells which algorithm is faster. `extents` are those of the result, `taps` those of the filter, axis
    by axis; `stride` is that of the axes with more than one tap."""

    batch: int
    channels: int
    outputs: int
    extents: tuple[int, ...]
    taps: tuple[int, ...] = (3, 3)
    stride: int = 1

    def __str__(self) -> str:
        taps, extents = ("x".join(map(str, n)) for n in (self.taps, self.extents))
        apart = "" if self.stride == 1 else f" of stride {self.stride}"
        return f"{taps} convolution{apart} {self.batch}x{self.channels} -> {self.outputs}x{extents}"


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a product of `batch` matrices, rows x depth, with one that is known, depth x columns."""

    batch: int
    rows: int
    depth: int
    columns: int

    def __str__(self) -> str:
        return f"product {self.batch}x{self.rows}x{self.depth} by {self.depth}x{self.columns}"


Sizes = Convolution | Product

Choose = Callable[[Sizes, int], int]
"""The algorithm for a convolution (the edge of Winograd's tiles) or a product (the levels of Strassen's algorithm), told the one that the
model suggests; 0 for the direct sum."""


def as_suggested(sizes: Sizes, suggested: int) -> int:
    """The choice of the model."""
    return suggested


def choose_algorithms(
    graph: Graph,
    lanes: int,
    notes: Notes | None = None,
    choose: Choose = as_suggested,
    streamed: float = STREAMED,
    direct: bool = False,
) -> Graph:
    """The graph with other algorithms where these are faster, on a machine whose vectors have so many `lanes` and to whose cores so many bytes
    of weights come a cycle (`streamed`): Winograd's for convolutions of stride 1 or 2 in float32, and Strassen's for products, unless all
    are to be `direct`; a product for transposed convolutions with few outputs."""

    def winograd(node: Node, rewriter: Rewriter) -> Sequence[Value] | str | None:
        """conv(x, w) = winograd_output(winograd_product(winograd_input(x), G w G'))"""
        found = contractions.convolution(node)
        return None if found is None else _winograd(node, found, rewriter, choose, lanes, streamed)

    def strassen(node: Node, rewriter: Rewriter) -> Sequence[Value] | str | None:
        """matmul(x, w) = strassen_output(matmul(strassen_input(x, rows), sums of quarters of w), rows)"""
        found = contractions.matrix_product(node)
        return None if found is None else _strassen(node, found, rewriter, choose, lanes, streamed)

    def side_by_side(node: Node, rewriter: Rewriter) -> Sequence[Value] | None:
        """conv_transpose(x, w) = conv1x1(x, all taps of w), spread out"""
        return _side_by_side(node, rewriter, lanes) if contractions.adjacent_windows(node) else None

    return rewrite_graph(graph, (side_by_side,) if direct else (winograd, strassen, side_by_side), notes)


def _winograd(
    node: Node, found: contractions.Convolution, rewriter: Rewriter, choose: Choose, lanes: int, streamed: float
) -> Sequence[Value] | str | None:
    x, w = node.inputs
    assert x is not None and w is not None
    weights, output = rewriter.array(w), node.outputs[0]
    if weights is None or found.groups != 1 or output.dtype != "float32":
        return None
    taps = weights.shape[2:]
    stride = max(found.strides)
    even = all(n == (stride if t > 1 else 1) for n, t in zip(found.strides, taps, strict=True))
    if not even or not _tiles(taps, stride) or any(n != 1 for n in found.dilations):
        return None
    batch, extents = output.shape[0], [d for d in output.shape[2:] if isinstance(d, int)]
    if len(extents) != len(taps):
        return "the number of tiles is not known"
    sizes = Convolution(batch if isinstance(batch, int) else 1, weights.shape[1], weights.shape[0], tuple(extents), taps, stride)
    tile = choose(sizes, fastest(sizes, lanes, streamed))
    if not tile:
        return "the direct sum is faster"
    missing = [stride * (-d % n) for d, n in zip(extents, tile_shape(tile, taps), strict=True)]
    source = _padded(x, missing, rewriter, node.name)
    (points,) = rewriter.add(WINOGRAD_INPUT, [source], {"tile": tile, "taps": taps, "stride": stride}, f"{node.name}.tiles")
    shape = (*(points_of(tile, t, stride) for t in taps), sizes.channels, sizes.outputs)
    kernels = rewriter.constant(LazyConstant(shape, transformed_weights, weights, (tile, stride)), f"{w.name}.winograd")
    (products,) = rewriter.add(WINOGRAD_PRODUCT, [points, kernels], {}, f"{node.name}.products")
    return rewriter.add(WINOGRAD_OUTPUT, [products], {"tile": tile, "shape": tuple(extents), "stride": stride}, node.name)


def _strassen(
    node: Node, found: contractions.MatrixProduct, rewriter: Rewriter, choose: Choose, lanes: int, streamed: float
) -> Sequence[Value] | str | None:
    x, w = node.inputs
    assert x is not None and w is not None
    matrix, output, transposed = rewriter.array(w), node.outputs[0], found.transpose_right
    if matrix is None or matrix.ndim != 2 or len(x.shape) < 2 or output.dtype != "float32" or found.transpose_left:
        return None
    *batch, rows, _ = x.shape
    if not isinstance(rows, int):
        return "the number of rows is not known"
    sizes = Product(prod(d if isinstance(d, int) else 1 for d in batch), rows, *(matrix.shape[::-1] if transposed else matrix.shape))
    if len(algorithm_costs(sizes, lanes, streamed)) == 1:
        return None
    if not choose(sizes, fastest(sizes, lanes, streamed)):
        return "the direct sum is faster"
    if not similar_columns(matrix, transposed):
        return "columns of the matrix differ too much in size"
    (row_sizes,) = rewriter.add(STRASSEN_ROWS, [x], {}, f"{node.name}.rows")
    (factors,) = rewriter.add(STRASSEN_INPUT, [x, row_sizes], {}, f"{node.name}.factors")
    shape = (PRODUCTS, *(1 for _ in batch), sizes.depth // 2, sizes.columns // 2)
    weights = rewriter.constant(LazyConstant(shape, strassen_weights, matrix, (transposed,)), f"{w.name}.strassen")
    (products,) = rewriter.add(MATMUL, [factors, weights], {}, f"{node.name}.products")
    return rewriter.add(STRASSEN_OUTPUT, [products, row_sizes], {}, node.name)


def _side_by_side(node: Node, rewriter: Rewriter, lanes: int) -> Sequence[Value] | None:
    x, w = node.inputs
    assert x is not None and w is not None
    weights = rewriter.array(w)
    if weights is None or weights.shape[1] > lanes:
        return None
    channels, outputs, *strides = weights.shape
    axes = range(len(strides))
    taps = np.moveaxis(weights, 0, -1).reshape(-1, channels, *(1 for _ in axes))
    plain = {"strides": tuple(1 for _ in axes), "dilations": tuple(1 for _ in axes), "group": 1}
    (products,) = rewriter.add(CONV, [x, rewriter.constant(taps, f"{w.name}.taps")], plain, f"{node.name}.products")
    (cut,) = rewriter.add(RESHAPE, [products], {"shape": (x.shape[0], outputs, *strides, *x.shape[2:])}, f"{node.name}.taps")
    perm = (0, 1, *(place for n in axes for place in (2 + len(strides) + n, 2 + n)))
    (turned,) = rewriter.add(TRANSPOSE, [cut], {"perm": perm}, f"{node.name}.turned")
    return rewriter.add(RESHAPE, [turned], {"shape": node.outputs[0].shape}, node.name)


def _padded(x: Value, missing: Sequence[int], rewriter: Rewriter, name: str) -> Value:
    """x with so many more zeros behind its spatial axes, by a wider pad where there is one."""
    if not any(missing):
        return x
    before: Sequence[Dim] = (0,) * (2 + len(missing))
    after: Sequence[Dim] = (0, 0, *missing)
    pad = zero_padding(x, rewriter)
    if pad is not None and (source := pad.inputs[0]) is not None:
        before, after = pad.attrs["before"], [as_dim(as_expr(a) + b) for a, b in zip(pad.attrs["after"], after, strict=True)]
        x = source
    return rewriter.add(PAD, [x, None], {"before": tuple(before), "after": tuple(after)}, f"{name}.pad")[0]


def fastest(x: Sizes, lanes: int, streamed: float = STREAMED) -> int:
    """The fastest algorithm by the model: for a convolution the edge of Winograd's tiles, 2 or 4, for a product 1 for Strassen's; 0 for the
    direct sum."""
    costs = algorithm_costs(x, lanes, streamed)
    return min(costs, key=lambda n: costs[n] * (1 if n else WORTHWHILE))


def algorithm_costs(x: Sizes, lanes: int, streamed: float = STREAMED) -> dict[int, float]:
    """Cycles by the model of all algorithms that are worth considering, by the numbers that stand for them (see `fastest`)."""
    return _convolution_costs(x, lanes, streamed) if isinstance(x, Convolution) else _product_costs(x, lanes, streamed)


def _product_costs(x: Product, lanes: int, streamed: float) -> dict[int, float]:
    costs = {0: _cycles(x.batch * x.rows, 1, x.depth, x.columns, lanes, streamed)}
    if x.rows > 1 and x.depth % (2 * lanes) == 0 and x.columns % (2 * lanes) == 0:
        pairs, depth, columns = x.batch * -(-x.rows // 2), x.depth // 2, x.columns // 2
        moved = 4 * pairs * (depth * (4 + PRODUCTS) + columns * 2 * PRODUCTS)  # products are written and read
        costs[1] = _cycles(PRODUCTS * pairs, PRODUCTS, depth, columns, lanes, streamed) + moved / (ADDED if moved <= KEPT else BEYOND)
    return costs


def _convolution_costs(x: Convolution, lanes: int, streamed: float) -> dict[int, float]:
    pixels, taps = x.batch * prod(x.extents), prod(x.taps)
    read = prod(x.stride for t in x.taps if t > 1)  # pixels of the input for one of the result
    costs = {0: _cycles(taps * pixels, taps, x.channels, x.outputs, lanes, streamed)}
    for tile in _tiles(x.taps, x.stride) if min(x.channels, x.outputs) >= lanes else ():
        cut = tile_shape(tile, x.taps)
        points = prod(points_of(tile, t, x.stride) for t in x.taps)
        tiles = x.batch * prod(-(-d // n) for d, n in zip(x.extents, cut, strict=True))
        moved = pixels * (x.channels * read + x.outputs) + 2 * points * tiles * (x.channels + x.outputs)  # each is written and read once
        costs[tile] = _cycles(points * tiles, points, x.channels, x.outputs, lanes, streamed) + moved * 4 / MOVED
    return costs


def _tiles(taps: Sequence[int], stride: int) -> tuple[int, ...]:
    """The tile edges on offer for a filter: those whose rounding errors stay small, which grow with the points of all axes together. (The
    phases of a stride have fewer each.)"""
    wide = [n for n in taps if n > 1]
    most = MOST_POINTS.get(len(wide), 0)
    fitting = (tile for tile in (2, 4) if all(n % 2 == 1 and tile + max(phases(n, stride)) - 1 <= most for n in wide))
    return tuple(fitting) if wide and stride <= MOST_STRIDE else ()


def _cycles(products: int, weights: int, channels: int, outputs: int, lanes: int, streamed: float) -> float:
    """Of a core with two multiply-add units: `products` and `weights` are those of one pair of channels. Weights are asked for ahead: the
    more is computed with each, the more of them arrive meanwhile."""
    vectors = channels * -(-outputs // lanes)
    computing, arriving = vectors * products / 2, vectors * weights * lanes * 4 / streamed
    return computing / REACHED + arriving * min(1.0, arriving / computing)
