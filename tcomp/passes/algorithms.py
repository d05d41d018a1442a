"""The choice among algorithms that compute the same result. `tcomp.compile(..., direct=True)` does without the first two.

- Winograd's algorithm, for convolutions (in groups of at least a vector of channels, too), multiplies 1.2 to 4 times less, but moves tiles
  to and from points, and reads more weights.
  Rounding errors are about ten times those of the direct sum and stay far below `MAX_ERROR` of the largest output; tests hold them to that.
- Strassen's algorithm, for products with a constant matrix, convolutions of single pixels included, multiplies 8/7 times less, and reads
  7/4 times the weights, which are stored as sums of its quarters. Rounding errors are about twice those of the direct sum, row by row (for
  pixels: relative to the largest output).
- Transposed convolutions whose windows are adjacent (the filter is as large as the stride) become products whose columns are the elements
  of the filter, and a rearrangement: where output channels do not fill a vector, elements of the filter do.
- Transposed convolutions of fewer pixels than channels by a computed filter (derivatives of convolutions) become products whose columns are
  added up: the matrix is read as it lies.
- Transposed convolutions otherwise become convolutions: every phase of the result, `q % stride`, sums its own elements of the filter over
  neighbouring elements of x, so that all phases are output channels of one convolution, which are spread out then. Source: W. Shi et al.,
  "Is the deconvolution layer the same as a convolutional layer?" (2016).
- matmul(softmax(x), v), attention say, becomes one operator, `softmax_product`, where the scores of one matrix exceed a core's cache. The
  schedule (`flash_attention`) then computes x block by block and never stores an array of queries x keys. Short rows stay separate
  operators, as do few rows on a GPU, whose threads share the elements of a row. Source: T. Dao et al., "FlashAttention" (2022).

`algorithm_costs.fastest` suggests one. Measured times, where there are any, decide otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np

from tcomp.ir.dtypes import FLOATS, is_float, itemsize
from tcomp.ir.expr import Dim, Expr, as_expr, bounds
from tcomp.ir.graph import Graph, LazyConstant, Node, Value
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.simplify import as_dim, prove, same_shape
from tcomp.ops import bilinear
from tcomp.ops.image import COL2IM, block_positions
from tcomp.ops.matmul import MATMUL, SOFTMAX_PRODUCT
from tcomp.ops.movement import PAD, RESHAPE, SLICE, TRANSPOSE
from tcomp.ops.nn import CONV, CONV_TRANSPOSE
from tcomp.passes import structure
from tcomp.passes.algorithm_costs import (
    TYPICAL,
    Product,
    Sizes,
    algorithm_costs,
    convolution_sizes,
    fastest,
    typical_dims,
    typical_size,
    winograd_tiles,
)
from tcomp.passes.canonicalize import zero_padding
from tcomp.passes.rewrite import Notes, Replacement, Rewriter, rewrite_graph, rule_for
from tcomp.target import CpuTarget

MAX_ERROR = 1e-3  # of the largest output: no algorithm is chosen that may be less exact
MIN_KEYS = 256  # elements of a row of scores: two blocks of the schedule; a shorter row is a single block
UNBOUNDED = 1 << 20  # elements of a symbolic extent: where it may be larger, its bound says nothing about likely sizes
MAX_ZEROS = 4  # elements of a filter, zeros included, for each element of it: with more, multiplying by zeros takes longest
MIN_PAIRED = 16  # rows of a matrix that are added in pairs: of fewer, a row without another one takes too much of the time
WORDS, MAX_BYTE = ("int16", "int8", "int32"), 255  # the types of products of bytes by integers of 16 bits, which are bytes as well
MIN_SAVED = 0.02  # of the multiplications of a model: code for two ranges of sizes takes twice as long to plan, and stores weights twice


Choose = Callable[[Sizes, int], int]
"""The algorithm for a convolution (the size of Winograd's tiles) or a product (the levels of Strassen's algorithm), told the one that the
model suggests; 0 for the direct sum."""


@dataclass(frozen=True, slots=True)
class FreeRows:
    """The sizes of a product with a known matrix, depth x columns, of rows whose number (of each matrix, and of all) is not known."""

    rows: Dim
    total: Expr
    depth: int
    columns: int
    words: bool

    def product(self, total: int) -> Product:
        """The sizes where there are so many rows."""
        rows = min(self.rows, total) if isinstance(self.rows, int) else total
        return Product(total // rows, rows, self.depth, self.columns, self.words)


def choose_algorithms(
    graph: Graph,
    target: CpuTarget,
    notes: Notes | None = None,
    choose: Choose | None = None,
    direct: bool = False,
    free: list[FreeRows] | None = None,
    least: Mapping[Expr, int] | None = None,
) -> Graph:
    """The graph with other algorithms where these are faster, by the model or as `choose` says: Winograd's for convolutions of stride 1 or
    2 in float32, and Strassen's for products and single pixels, unless all are to be `direct`; a product for transposed convolutions with
    few outputs. `free` receives the products that have too few rows for Strassen's algorithm at some sizes, and `least` says how many rows
    there are all the same, by the number of all rows: see `enough_rows`."""
    lanes, sample = target.lanes(32), typical_dims(graph)

    def chosen(sizes: Sizes) -> int:
        suggested = fastest(sizes, target)
        return suggested if choose is None else choose(sizes, suggested)

    def winograd(node: Node, rewriter: Rewriter) -> Replacement:
        """conv(x, w) = winograd_output(winograd_product(winograd_input(x), G w G'))"""
        form = structure.convolution(node)
        if form is None or (weights := _weights(node, rewriter)) is None:
            return None
        (x, w), output = node.inputs, node.outputs[0]
        assert x is not None and w is not None
        window, stride = weights.shape[2:], max(form.strides)
        even = all(n == (stride if size > 1 else 1) for n, size in zip(form.strides, window, strict=True))
        if not even or not winograd_tiles(window, stride, output.dtype == "int32") or any(n != 1 for n in form.dilations):
            return None
        extents, sizes = output.shape[2:], convolution_sizes(node, form, sample)
        channels, outputs = sizes.channels, sizes.outputs
        if not (tile := chosen(sizes)):
            return "the direct sum is faster"
        if not is_float(output.dtype) and not bilinear.exact_sums(weights, tile, stride, MAX_BYTE):
            return "sums may exceed 32 bits"
        whole = [(as_expr(d) + (n - 1)) // n * n for d, n in zip(extents, bilinear.tile_shape(tile, window), strict=True)]
        missing = [as_dim((n - d) * stride) for d, n in zip(extents, whole, strict=True)]
        steps = [stride if n > 1 else 1 for n in window]
        for d, more, n, size, step in zip(x.shape[2:], missing, whole, window, steps, strict=True):
            over = as_expr(d) + more - (n * step + size - step)  # pixels that no window reaches
            if not prove(over >= 0) or not prove(over < step):
                return "what lies under the last tiles is not known"
        source = _padded(x, missing, rewriter, node.name)
        attrs = {"tile": tile, "stride": stride} | ({} if form.group == 1 else {"group": form.group})
        attrs |= {} if target.fma else {"fused": False}  # emulated, they take ten times as long
        (points,) = rewriter.add(bilinear.WINOGRAD_INPUT, [source], {**attrs, "taps": window}, f"{node.name}.tiles")
        groups = () if form.group == 1 else (form.group,)
        shape = (*(bilinear.points_of(tile, n, stride) for n in window), *groups, channels, outputs)
        transformed = LazyConstant(shape, bilinear.transformed_weights, weights, (tile, stride, *groups))
        kernels = rewriter.constant(transformed, f"{w.name}.winograd")
        (products,) = rewriter.add(bilinear.WINOGRAD_PRODUCT, [points, kernels], {"dtype": output.dtype}, f"{node.name}.products")
        return rewriter.add(bilinear.WINOGRAD_OUTPUT, [products], {**attrs, "shape": extents}, node.name)

    def halves(w: Value, matrix: np.ndarray, transposed: bool, rank: int, rewriter: Rewriter) -> Value:
        """The right factors of the seven products, for those on the left of a tensor of this rank."""
        k, n = matrix.shape[::-1] if transposed else matrix.shape
        shape = (bilinear.PRODUCTS, *(1,) * (rank - 2), k // 2, n // 2)
        return rewriter.constant(LazyConstant(shape, bilinear.strassen_weights, matrix, (transposed,)), f"{w.name}.strassen")

    def strassen(node: Node, rewriter: Rewriter) -> Replacement:
        """matmul(x, w) = strassen_output(matmul(strassen_input(x, rows), sums of quarters of w), rows)"""
        form = structure.matrix_product(node)
        if form is None or form.transpose_left or (matrix := _weights(node, rewriter)) is None:
            return None
        (x, w), transposed, words = node.inputs, form.transpose_right, node.outputs[0].dtype == "int32"
        assert x is not None and w is not None
        if matrix.ndim != 2 or len(x.shape) < 2:
            return None
        depth, columns = matrix.shape[::-1] if transposed else matrix.shape
        *batch, rows = (max(1, bounds(as_expr(d))[0] or 1) for d in x.shape[:-1])  # for few rows it would take up to 7/4 of the time
        sizes, known = Product(prod(batch), rows, depth, columns, words), isinstance(x.shape[-2], int)
        total = as_dim(prod(map(as_expr, x.shape[:-1]), start=as_expr(1)))
        doubtful = FreeRows(x.shape[-2], total, depth, columns, words) if isinstance(total, Expr) else None
        if doubtful is not None and least and doubtful.total in least:
            sizes = doubtful.product(least[doubtful.total])
        if len(algorithm_costs(doubtful.product(MIN_PAIRED) if doubtful else sizes, target)) == 1:
            return None
        if len(algorithm_costs(sizes, target)) == 1 or not chosen(sizes):
            if free is not None and doubtful is not None and bilinear.similar_columns(matrix, transposed):
                free.append(doubtful)
            return "the direct sum is faster" if known else f"there may be too few rows: {rows}"
        if not bilinear.similar_columns(matrix, transposed):
            return "columns of the matrix differ too much in size"
        row_sizes = None if words else rewriter.add(bilinear.STRASSEN_ROWS, [x], {}, f"{node.name}.rows")[0]
        (factors,) = rewriter.add(bilinear.STRASSEN_INPUT, [x, row_sizes], {}, f"{node.name}.factors")
        weights = halves(w, matrix, transposed, len(x.shape), rewriter)
        (products,) = rewriter.add(MATMUL, [factors, weights], {"dtype": node.outputs[0].dtype}, f"{node.name}.products")
        return rewriter.add(bilinear.STRASSEN_OUTPUT, [products, row_sizes], {"rows": x.shape[-2]} if words else {}, node.name)

    def pointwise(node: Node, rewriter: Rewriter) -> Replacement:
        """conv1x1(x, w) = the product of the pixels of x, as rows, with w, by Strassen's algorithm"""
        form = structure.convolution(node)
        if form is None or form.group != 1 or max(form.strides) > 1 or (weights := _weights(node, rewriter)) is None:
            return None
        (x, w), output = node.inputs, node.outputs[0]
        assert x is not None and w is not None
        if prod(weights.shape[2:]) != 1:
            return None
        if not all(isinstance(d, int) for d in output.shape):
            return None
        batch, outputs, *extents = [int(d) for d in output.shape]
        channels = weights.shape[1]
        matrix = weights.reshape(outputs, channels)
        paired = min(range(len(extents)), key=lambda n: (extents[n] % 2, -n))  # pixels along this axis are pairs
        sizes = Product(batch * prod(extents) // extents[paired], extents[paired], channels, outputs, output.dtype == "int32")
        if len(algorithm_costs(sizes, target)) == 1 or not chosen(sizes):
            return "the direct sum is faster"
        if not bilinear.similar_columns(matrix, True):
            return "columns of the matrix differ too much in size"
        (factors,) = rewriter.add(bilinear.STRASSEN_PIXELS, [x], {"rows": 2 + paired}, f"{node.name}.factors")
        sums = halves(w, matrix, True, 2, rewriter)
        (products,) = rewriter.add(MATMUL, [factors, sums], {"dtype": output.dtype}, f"{node.name}.products")
        return rewriter.add(bilinear.STRASSEN_IMAGE, [products], {"shape": output.shape, "rows": 2 + paired}, node.name)

    def spread_product(node: Node, rewriter: Rewriter) -> Replacement:
        """conv_transpose(x, w) = conv1x1(x, all elements of w), spread out"""
        x, w = node.inputs if structure.adjacent_windows(node) else (None, None)
        if x is None or w is None or (weights := rewriter.array(w)) is None or weights.shape[1] > lanes:
            return None
        channels, outputs, *strides = weights.shape
        rank = len(strides)
        columns = np.moveaxis(weights, 0, -1).reshape(-1, channels, *(1,) * rank)
        plain = {"strides": (1,) * rank, "dilations": (1,) * rank, "group": 1}
        (products,) = rewriter.add(CONV, [x, rewriter.constant(columns, f"{w.name}.taps")], plain, f"{node.name}.products")
        (cut,) = rewriter.add(RESHAPE, [products], {"shape": (x.shape[0], outputs, *strides, *x.shape[2:])}, f"{node.name}.taps")
        perm = (0, 1, *(place for n in range(rank) for place in (2 + rank + n, 2 + n)))
        (spread,) = rewriter.add(TRANSPOSE, [cut], {"perm": perm}, f"{node.name}.turned")
        return rewriter.add(RESHAPE, [spread], {"shape": node.outputs[0].shape}, node.name)

    @rule_for(CONV_TRANSPOSE)
    def columns(node: Node, rewriter: Rewriter) -> Replacement:
        """conv_transpose(x, w) = col2im(x @ w), where that multiplies fewer rows than w has"""
        (x, w), attrs = node.inputs, node.attrs
        shapes = (*x.shape, *w.shape, *attrs["shape"], *attrs["before"]) if x is not None and w is not None else ("",)
        if x is None or w is None or w in rewriter.constants or attrs["group"] != 1 or not all(isinstance(d, int) for d in shapes):
            return None
        batch, inputs, *places = map(int, x.shape)
        outputs, window, before = int(w.shape[1]), w.shape[2:], attrs["before"]
        form = {
            "image": attrs["shape"],
            "block": window,
            "dilations": attrs["dilations"],
            "strides": attrs["strides"],
            "pads": (*before, *before),
        }
        if batch * prod(places) >= inputs or block_positions(**form) != places:
            return None
        (rows,) = rewriter.add(TRANSPOSE, [x], {"perm": (0, *range(2, 2 + len(places)), 1)}, f"{node.name}.rows")
        (rows,) = rewriter.add(RESHAPE, [rows], {"shape": (batch * prod(places), inputs)}, f"{node.name}.rows")
        (matrix,) = rewriter.add(RESHAPE, [w], {"shape": (inputs, outputs * prod(map(int, window)))}, f"{node.name}.matrix")
        (products,) = rewriter.add(MATMUL, [rows, matrix], {}, f"{node.name}.products")
        (blocks,) = rewriter.add(RESHAPE, [products], {"shape": (batch, prod(places), matrix.shape[1])}, f"{node.name}.blocks")
        (blocks,) = rewriter.add(TRANSPOSE, [blocks], {"perm": (0, 2, 1)}, f"{node.name}.blocks")
        return rewriter.add(COL2IM, [blocks], {**form, "channels": outputs}, node.name)

    @rule_for(CONV_TRANSPOSE)
    def phases(node: Node, rewriter: Rewriter) -> Replacement:
        """conv_transpose(x, w) = conv(x, the elements of w for each phase of the result), spread out and cut"""
        (x, w), attrs = node.inputs, node.attrs
        if x is None or w is None or not is_float(x.dtype) or structure.adjacent_windows(node):
            return None
        if not all(isinstance(d, int) for d in w.shape) or w in rewriter.constants and rewriter.array(w) is None:
            return None
        shape = [int(d) for d in w.shape]
        window, strides, cut, extents = shape[2:], attrs["strides"], attrs["before"], attrs["shape"]
        taps = tuple(-(-k // s) for k, s in zip(window, strides, strict=True))  # elements of the filter that a phase sums, along each axis
        dilations = attrs["dilations"]
        if (prod(dilations) != 1 and prod(strides) != 1) or not all(isinstance(n, int) for n in cut) or not prod(shape):
            return "dilated, or cut off by an unknown number of elements"
        if prod(taps) * prod(strides) > MAX_ZEROS * prod(window):
            return "most elements of the filter would be zeros"
        first = [n // s for n, s in zip(cut, strides, strict=True)]  # elements of x under the first windows, and under the last ones
        last = [(as_expr(d) + (n - 1)) // s for d, n, s in zip(extents, cut, strides, strict=True)]
        before = [(t - 1) * d - m for t, d, m in zip(taps, dilations, first, strict=True)]
        after = [as_dim(m - d + 1) for m, d in zip(last, x.shape[2:], strict=True)]
        if min(before) < 0 or not all(prove(as_expr(n) >= 0) for n in after):
            return "whole elements are cut off"
        group, rank = attrs["group"], len(window)
        outputs, lanes_of_phases = shape[1], shape[1] <= lanes
        pads = {"before": (0, 0, *before), "after": (0, 0, *after)}
        padded = x if set(before) == set(after) == {0} else rewriter.add(PAD, [x, None], pads, f"{node.name}.pad")[0]
        plain = {"strides": (1,) * rank, "dilations": dilations, "group": group}
        kernels = _phase_weights(rewriter, w, shape, strides, group, lanes_of_phases)
        (products,) = rewriter.add(CONV, [padded, kernels], plain, f"{node.name}.products")
        if prod(strides) == 1:
            return (products,)
        whole = products.shape[2:]
        inner = (outputs, *strides) if lanes_of_phases else (*strides, outputs)
        (parts,) = rewriter.add(RESHAPE, [products], {"shape": (x.shape[0], group, *inner, *whole)}, f"{node.name}.phases")
        channel, phase = (2, 3) if lanes_of_phases else (2 + rank, 2)
        perm = (0, 1, channel, *(place for n in range(rank) for place in (3 + rank + n, phase + n)))
        (spread,) = rewriter.add(TRANSPOSE, [parts], {"perm": perm}, f"{node.name}.turned")
        complete = (*node.outputs[0].shape[:2], *(as_dim(as_expr(d) * s) for d, s in zip(whole, strides, strict=True)))
        (joined,) = rewriter.add(RESHAPE, [spread], {"shape": complete}, f"{node.name}.spread")
        starts = (0, 0, *(n % s for n, s in zip(cut, strides, strict=True)))
        if same_shape(complete, node.outputs[0].shape):
            return (joined,)
        return rewriter.add(SLICE, [joined], {"starts": starts, "steps": (1,) * (2 + rank), "shape": node.outputs[0].shape}, node.name)

    rules = spread_product, columns, phases
    return rewrite_graph(graph, rules if direct else (winograd, strassen, pointwise, *rules), notes)


def _weights(node: Node, rewriter: Rewriter) -> np.ndarray | None:
    """The constant weights of a contraction in float32, or, as integers of 16 bits, of one of bytes (see `quantized.use_words`)."""
    x, w = node.inputs
    found, types = rewriter.array(w), (x and x.dtype, w and w.dtype, node.outputs[0].dtype)
    return found if types == ("float32",) * 3 else None if found is None or types != WORDS else found.astype(np.int16)


def _phase_weights(rewriter: Rewriter, w: Value, shape: Sequence[int], strides: Sequence[int], group: int, lanes_of_phases: bool) -> Value:
    """The filter of the convolution that computes all phases of a transposed one, whose filter `w` is [in, out / group, k...]. Its element
    j, counted from the end, of the output channel of a phase is the element j * stride + phase. Channels are ordered by groups, in each
    by outputs and phases, or phases and outputs. That of a constant is one."""
    rank, (channels, outputs, *window) = len(strides), shape
    taps = [-(-k // s) for k, s in zip(window, strides, strict=True)]
    missing = [t * s - k for t, s, k in zip(taps, strides, window, strict=True)]
    parts = (group, channels // group, outputs, *(n for both in zip(taps, strides, strict=True) for n in both))
    tap, phase = [3 + 2 * n for n in range(rank)], [4 + 2 * n for n in range(rank)]
    backwards = {"starts": tuple(n - 1 if k in tap else 0 for k, n in enumerate(parts)), "shape": parts}
    backwards["steps"] = tuple(-1 if k in tap else 1 for k in range(len(parts)))
    steps = [
        (PAD, {"before": (0,) * (2 + rank), "after": (0, 0, *missing)}),
        (RESHAPE, {"shape": parts}),
        (SLICE, backwards),
        (TRANSPOSE, {"perm": (0, *((2, *phase) if lanes_of_phases else (*phase, 2)), 1, *tap)}),
        (RESHAPE, {"shape": (outputs * group * prod(strides), channels // group, *taps)}),
    ]
    if (weights := rewriter.array(w)) is not None:
        tensor = given = w.placeholder()
        for op, attrs in steps:
            (tensor,) = op.apply([tensor, None] if op is PAD else [tensor], attrs)
        return rewriter.constant(evaluate([tensor], {given: weights})[0], f"{w.name}.phases")
    for op, attrs in steps:
        (w,) = rewriter.add(op, [w, None] if op is PAD else [w], attrs, f"{w.name}.phases")
    return w


def enough_rows(graph: Graph, free: Sequence[FreeRows], target: CpuTarget) -> tuple[Expr, Mapping[Expr, int]] | None:
    """(a condition on the dims of a graph, the least number of rows of its `free` products where that holds, by the number of all rows):
    from there on Strassen's algorithm is faster. None where that would save less than `MIN_SAVED` of the model at likely sizes."""
    sample = typical_dims(graph)
    saved, needed, rows = Counter[Expr](), dict[Expr, int](), defaultdict[Expr, dict[Dim, None]](dict)
    for product in free:
        likely = min(typical_size(product.total, sample), TYPICAL)
        totals = range(MIN_PAIRED, likely + 1, MIN_PAIRED // 2)
        if not (faster := [n for n in totals if fastest(product.product(n), target)]):
            continue
        costs, typical = algorithm_costs(product.product(totals[-1]), target), typical_size(product.total, sample)
        saved[product.total] += int(typical * product.depth * product.columns * (1 - costs[1] / costs[0]))
        needed[product.total] = max(needed.get(product.total, 0), faster[0])
        rows[product.total][product.rows] = None
    worthwhile = MIN_SAVED * sum(_multiplications(node, sample) for node in graph.nodes)
    if not (least := {total: needed[total] for total, n in saved.items() if n >= worthwhile}):
        return None
    paired = {d: MIN_PAIRED for total in least for d in rows[total] if isinstance(d, Expr) and d not in least}
    return reduce(lambda a, b: a & b, (d >= n for d, n in (least | paired).items())), least


def _multiplications(node: Node, sample: Mapping[Expr, int]) -> int:
    """Those of a product or convolution, at likely sizes; 0 for other nodes."""
    product, convolution = structure.matrix_product(node), structure.convolution(node)
    if product is None and convolution is None:
        return 0
    (x, w), output = node.inputs[:2], node.outputs[0]
    assert x is not None and w is not None
    summed = w.shape[1:] if product is None else (x.shape[-2 if product.transpose_left else -1],)
    return prod(typical_size(d, sample) for d in (*output.shape, *summed))


def _padded(x: Value, missing: Sequence[Dim], rewriter: Rewriter, name: str) -> Value:
    """x with more zeros behind its spatial axes, by widening its padding where there is one."""
    if all(isinstance(n, int) and n == 0 for n in missing):
        return x
    before, after = list[Dim]([0] * (2 + len(missing))), list[Dim]([0, 0, *missing])
    if (pad := zero_padding(x, rewriter)) is not None and (source := pad.inputs[0]) is not None:
        x, before, after = source, pad.attrs["before"], [as_dim(as_expr(a) + b) for a, b in zip(pad.attrs["after"], after, strict=True)]
    return rewriter.add(PAD, [x, None], {"before": tuple(before), "after": tuple(after)}, f"{name}.pad")[0]


@dataclass(frozen=True)
class AttentionTiles:
    """The tiles that blocks of a GPU compute in one pass: matrices with `min_rows` rows together, and one of some `widths`; 16-bit floats,
    too."""

    min_rows: int
    widths: Container[int]


def join_attention(graph: Graph, cache_bytes: int, notes: Notes | None = None, tiles: AttentionTiles | None = None) -> Graph:
    """The graph with products of float32 or float64 with a softmax as one operator each, where a matrix of scores may take more than
    `cache_bytes` (those of a core's own cache, or of the shared memory of a GPU with `tiles`). Symbolic sizes count with their upper
    bounds; without one they stay as they are, and a number of matrices counts as 1."""

    def upper_bound(extent: Dim) -> int | None:
        bound = bounds(extent)[1]
        return bound if isinstance(extent, int) or (bound is not None and bound < UNBOUNDED) else None

    def one_pass(node: Node, rewriter: Rewriter) -> Replacement:
        """matmul(softmax(x), v) = softmax_product(x, v)"""
        found = structure.matrix_product(node)
        softmax = rewriter.producer(node.inputs[0]) if found is not None else None
        axis = structure.softmax_axis(softmax)
        if found is None or softmax is None or axis is None:
            return None
        weights, (x, *_) = softmax.outputs[0], softmax.inputs
        assert x is not None
        transposed = found.transpose_left or found.transpose_right
        if axis != len(x.shape) - 1 or transposed or min(len(v.shape) for v in node.inputs if v) < 2:
            return "the sums are not along the rows of the softmax"
        if x.dtype not in (("float32", "float64") if tiles is None else FLOATS):
            return f"not for {x.dtype}"
        if not rewriter.used_once(weights):
            return "the softmax is used elsewhere"
        (rows, keys), columns = map(upper_bound, x.shape[-2:]), node.outputs[0].shape[-1]
        if rows is None or keys is None:
            return "the number of scores is not bounded"
        if keys < MIN_KEYS or rows * keys * itemsize(x.dtype) <= cache_bytes:
            return "the scores stay in the cache"
        if tiles is not None and prod(upper_bound(n) or 1 for n in x.shape[:-1]) < tiles.min_rows:
            return "there are too few rows to keep all processors busy"
        if tiles is not None and (not isinstance(columns, int) or columns not in tiles.widths):
            return f"a block does not compute {columns} columns at a time"
        return rewriter.add(SOFTMAX_PRODUCT, [x, node.inputs[1]], {}, node.name)

    return rewrite_graph(graph, (one_pass,), notes)
