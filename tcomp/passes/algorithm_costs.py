"""The time of algorithms that compute the same result (see `algorithms`), by a model: what is computed is weighed against what is moved, by
figures of a core (`machines.Core`) that were fitted to 34 convolutions of stride 1 in real networks (and found right for 13 of 15 of stride
2) and to 30 products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tcomp.ir.expr import Dim, Expr, as_expr, bounds, evaluate_int, variables
from tcomp.ir.graph import Graph, Node
from tcomp.ops import bilinear
from tcomp.passes.structure import Convolution as Form
from tcomp.target import CpuTarget

MAX_POINTS = {1: 8, 2: 6}  # along an axis, by the number of axes that are cut into tiles: rounding errors grow with all points together
MAX_STRIDE = 2  # of a window of three, a larger stride leaves nothing to save
MIN_GROUP = 16  # channels of a group: products of shorter sums take as long to start and to store as to add up
WHOLE = 8  # of a product for Strassen's algorithm, depth and columns are multiples of so many: four steps of half a sum are unrolled
TYPICAL = 256  # elements of an axis of unknown size: pixels of an image; a power of two, so that no algorithm has a tile too many
WORDS_TOGETHER = 1.5  # products of 16-bit integers in the time of one of floats: an instruction adds up two, others add that to the sums
MAX_TIME = 0.95  # of the time of the direct sum: smaller differences are within the error of the model


@dataclass(frozen=True, slots=True)
class Convolution:
    """The sizes of a convolution, which decide on the fastest algorithm. `channels` and `outputs` are those of each of its groups,
    `extents` those of the result, `window` those of the filter, axis by axis; `stride` is that of the axes along which the window has more
    than one element. `words`: it multiplies integers of 16 bits."""

    batch: int
    channels: int
    outputs: int
    extents: tuple[int, ...]
    window: tuple[int, ...] = (3, 3)
    stride: int = 1
    groups: int = 1
    words: bool = False

    def __str__(self) -> str:
        window, extents = ("x".join(map(str, n)) for n in (self.window, self.extents))
        stride = ("" if self.stride == 1 else f" of stride {self.stride}") + ("" if self.groups == 1 else f" in {self.groups} groups")
        return f"{window} convolution{stride} {self.batch}x{self.channels} -> {self.outputs}x{extents}" + _of_words(self.words)


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a product of `batch` matrices, rows x depth, with one that is known, depth x columns; `words` as of `Convolution`."""

    batch: int
    rows: int
    depth: int
    columns: int
    words: bool = False

    def __str__(self) -> str:
        return f"product {self.batch}x{self.rows}x{self.depth} by {self.depth}x{self.columns}" + _of_words(self.words)


def _of_words(words: bool) -> str:
    return " of 16-bit integers" if words else ""


Sizes = Convolution | Product


def convolution_sizes(node: Node, form: Form, sample: Mapping[Expr, int]) -> Convolution:
    """Those of a node that computes a convolution of this form; symbolic ones are likely sizes, and a batch 1."""
    w, output = node.inputs[1], node.outputs[0]
    assert w is not None
    outputs, channels, *window = (typical_size(d, sample) for d in w.shape)
    batch, extents = output.shape[0], tuple(typical_size(d, sample) for d in output.shape[2:])
    batch, outputs, words = batch if isinstance(batch, int) else 1, outputs // form.group, output.dtype == "int32"
    return Convolution(batch, channels, outputs, extents, tuple(window), max(form.strides), form.group, words)


def typical_dims(graph: Graph) -> dict[Expr, int]:
    """A likely value of each symbolic dim in the shapes of a graph's inputs: what makes an axis of an input `TYPICAL` long."""
    found = dict[Expr, int]()
    for d in (as_expr(d) for value in graph.inputs for d in value.shape):
        for v in variables(d):
            ones = dict.fromkeys(variables(d), 1)
            unit = evaluate_int(d, ones | {v: 2}) - evaluate_int(d, ones)  # 32 of 32 * v, and of 32 * v + rest
            lo, hi = bounds(v)
            likely = max(TYPICAL // max(unit, 1), lo or 0)
            found[v] = max(v.attr.exact, default=min(likely, found.get(v, likely)) if hi is None else min(likely, hi))
    return found


def typical_size(extent: Dim, sample: Mapping[Expr, int]) -> int:
    """A likely value of an extent; `TYPICAL` is taken for what a run counts."""
    return max(1, evaluate_int(as_expr(extent), {v: sample.get(v, TYPICAL) for v in variables(as_expr(extent))}))


def fastest(x: Sizes, target: CpuTarget) -> int:
    """The fastest algorithm by the model: the size of Winograd's tiles, 2 or 4, for a convolution, 1 for Strassen's; else 0."""
    costs = algorithm_costs(x, target)
    return min(costs, key=lambda n: costs[n] * (1 if n else MAX_TIME))


def algorithm_costs(x: Sizes, target: CpuTarget, together: float = 1) -> dict[int, float]:
    """Modelled cycles of the direct sum, of which an instruction adds up so many products `together` in a lane of 32 bits, and of the
    alternatives that may be faster, in float32 or by integers of 16 bits, by the number of the algorithm (see `fastest`)."""
    core, lanes = target.core, target.lanes(32)
    together, otherwise = (WORDS_TOGETHER, WORDS_TOGETHER) if x.words else (together, 1.0)  # of the direct sum, and of the alternatives
    size = 2 if x.words else 4  # bytes of an element, and of one of the weights

    def cycles(products: int, weights: int, channels: int, outputs: int, together: float) -> float:
        """Of a core; `products` and `weights` are those of one pair of channels. Of weights some arrive while products are computed."""
        vectors = channels * -(-outputs // lanes) / together
        computing, arriving = vectors * products / core.fma, vectors * weights * lanes * size / target.streaming_bandwidth
        exposed = min(1.0, arriving / computing) if computing else 1.0  # an operand may have no rows
        return computing / core.product_efficiency + arriving * exposed

    if isinstance(x, Product):
        costs = {0: cycles(x.batch * x.rows, 1, x.depth, x.columns, together)}
        if x.rows > 1 and min(x.depth, x.columns) >= 2 * lanes and x.depth % WHOLE == x.columns % WHOLE == 0:
            pairs, depth, columns = x.batch * -(-x.rows // 2), x.depth // 2, x.columns // 2
            whole = -(-columns // (2 * lanes)) * 2 * lanes  # tiles are two vectors wide: one that is left over takes as long
            moved = pairs * (size * depth * (4 + bilinear.PRODUCTS) + 4 * columns * 2 * bilinear.PRODUCTS)  # products are written and read
            bandwidth = core.quarters_bandwidth if moved <= core.cached_quarters else core.large_quarters_bandwidth
            costs[1] = cycles(bilinear.PRODUCTS * pairs, bilinear.PRODUCTS, depth, whole, otherwise) + moved / bandwidth
        return costs
    pixels, elements = x.batch * prod(x.extents), prod(x.window)
    read = prod(x.stride for n in x.window if n > 1)  # pixels of the input for one of the result
    costs = {0: x.groups * cycles(elements * pixels, elements, x.channels, x.outputs, together)}
    least = lanes if x.groups == 1 else max(lanes, MIN_GROUP)
    for tile in winograd_tiles(x.window, x.stride, x.words) if min(x.channels, x.outputs) >= least else ():
        points = prod(bilinear.points_of(tile, n, x.stride) for n in x.window)
        tiles = x.batch * prod(-(-d // n) for d, n in zip(x.extents, bilinear.tile_shape(tile, x.window), strict=True))
        moved = size * pixels * (x.channels * read + x.outputs)
        moved += 2 * points * tiles * (size * x.channels + 4 * x.outputs)  # each is written and read once
        costs[tile] = x.groups * (cycles(points * tiles, points, x.channels, x.outputs, otherwise) + moved / core.tile_bandwidth)
    return costs


def winograd_tiles(window: Sequence[int], stride: int, words: bool = False) -> tuple[int, ...]:
    """The tile sizes on offer for a filter: those whose rounding errors stay small (the phases of a stride have fewer points each), and of
    `words`, whose points are their sums and differences."""
    wide = [n for n in window if n > 1]
    most = MAX_POINTS.get(len(wide), 0)
    fitting = (tile for tile in (2, 4) if all(n % 2 == 1 and tile + max(bilinear.phases(n, stride)) - 1 <= most for n in wide))
    fitting = (tile for tile in fitting if not words or all(bilinear.denominator(tile, n, stride) for n in wide))
    return tuple(fitting) if wide and stride <= MAX_STRIDE else ()
