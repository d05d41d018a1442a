"""Images: interpolation, sampling at given positions, regions of interest, images from columns; tables of separable interpolation that the
run makes, where sizes or scales are not known when the model is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from operator import add, mul

from tcomp.ir import te
from tcomp.ir.broadcasting import require_same, widened
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, cast, const, maximum, minimum, row_major, select
from tcomp.ir.graph import Operator
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor, rounded
from tcomp.ops.movement import clamped, reflected, valid_index


def repeat(x: Tensor, factor: int, axis: int) -> Tensor:
    """Every element `factor` times along `axis`: nearest-neighbour upsampling by an integer."""
    shape = [*x.shape[:axis], as_dim(as_expr(x.shape[axis]) * factor), *x.shape[axis + 1 :]]
    return te.compute(shape, lambda *i: x[(*i[:axis], i[axis] // factor, *i[axis + 1 :])], "repeat")


def resample(x: Tensor, indices: Tensor, weights: Tensor, axis: int) -> Tensor:
    """out[..., o, ...] = sum over t of weights[o, t] * x[..., indices[o, t], ...]: any separable interpolation. `indices` are int64,
    `weights` floats; both have shape [size along `axis`, elements that are weighted]. Integer results truncate and saturate."""
    size, count = indices.shape
    t = te.reduce_axis(count, "tap")

    def element(*i: Expr) -> Expr:
        at = clamped(indices[i[axis], t], x.shape[axis])  # in range as they are made: nothing to report
        value = cast(widened(x[(*i[:axis], at, *i[axis + 1 :])]), weights.dtype)
        return te.sum(weights[i[axis], t] * value, t)

    return rounded(te.compute((*x.shape[:axis], size, *x.shape[axis + 1 :]), element, "resample"), x.dtype)


def cubic_weight(distance: Expr, a: float) -> Expr:
    """Keys' cubic convolution kernel at |distance| < 2 (R. G. Keys, Cubic convolution interpolation, 1981)."""
    d = te.abs(distance)
    inner = ((a + 2) * d - (a + 3)) * d * d + 1.0
    outer = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return select(d <= 1.0, inner, outer)


def grid_sample(x: Tensor, grid: Tensor, mode: str, padding: str, align_corners: bool) -> Tensor:
    """x [n, c, *spatial] at the positions grid [n, *out, len(spatial)] (last axis: x, y, ... in [-1, 1]) -> [n, c, *out].

    mode: linear, nearest, cubic; padding: zeros, reflection, border (positions outside are moved to the border), edge (elements outside
    equal the nearest ones). -1 and 1 are the centres of the border elements if `align_corners`, else their outer edges.
    """
    spatial, rank = x.shape[2:], x.ndim - 2

    def place(*i: Expr) -> Expr:
        # Position i[-1] counts the axes of x; the grid lists them in reverse.
        found: list[Expr] = []
        for d, extent in enumerate(spatial):
            c = widened(grid[(*i[:-1], rank - 1 - d)])
            size = cast(as_expr(extent), c.dtype)
            at = (c + 1.0) * 0.5 * (size - 1.0) if align_corners else ((c + 1.0) * size - 1.0) * 0.5
            found.append(_inside(te.round(at) if mode == "nearest" else at, size, padding, align_corners))
        return reduce(lambda result, d: select(te.equal(i[-1], d), found[d], result), range(1, rank), found[0])

    position = te.compute((*grid.shape[:-1], rank), place, "grid_sample.position")
    window = {"nearest": 1, "linear": 2, "cubic": 4}[mode]
    axes = [te.reduce_axis(window, f"tap{d}") for d in range(rank)] if window > 1 else []

    def element(*i: Expr) -> Expr:
        n, c, out = i[0], i[1], i[2:]
        weights, at, inside = list[Expr](), list[Expr](), list[Expr]()
        for d, size in enumerate(spatial):
            exact, extent = position[n, *out, d], as_expr(size)
            index = cast(te.floor(exact), "int64")
            if window > 1:
                shift = axes[d] - (window // 2 - 1)
                distance = (exact - te.floor(exact)) - cast(shift, exact.dtype)
                weights.append(1.0 - te.abs(distance) if mode == "linear" else cubic_weight(distance, -0.75))
                index = index + shift
            if padding == "zeros":
                inside += [index >= 0, index < extent]
            else:
                index = clamped(reflected(index, extent, align_corners) if padding == "reflection" else index, extent)
            at.append(index)
        value = select(te.all_of(inside), widened(x[(n, c, *at)]), 0)
        return te.sum(cast(reduce(mul, weights), value.dtype) * value, axes) if weights else value

    return rounded(te.compute((*x.shape[:2], *grid.shape[1:-1]), element, "grid_sample"), x.dtype)


def _inside(at: Expr, size: Expr, padding: str, align_corners: bool) -> Expr:
    """A position outside of the image moved back into it."""
    if padding in ("zeros", "edge"):
        return at
    if padding == "border":
        return maximum(minimum(at, size - 1.0), 0.0)
    low = 0.0 if align_corners else -0.5
    span = maximum(size - 1.0, 1.0) if align_corners else size
    distance = te.abs(at - low)
    reflections = te.floor(distance / span)
    rest = distance - reflections * span
    odd = te.not_equal(reflections - 2.0 * te.floor(reflections * 0.5), 0.0)
    return select(odd, span - rest, rest) + low


def affine_grid(theta: Tensor, spatial: Sequence[Dim], align_corners: bool) -> Tensor:
    """Sampling positions [n, *spatial, d] of the affine maps theta [n, d, d + 1] applied to the normalised output positions."""
    rank = len(spatial)
    k = te.reduce_axis(rank + 1, "k")

    def element(*i: Expr) -> Expr:
        base = const(1.0, theta.dtype)
        for d in range(rank):  # component k is the coordinate along spatial axis rank - 1 - k
            size, index = cast(as_expr(spatial[d]), theta.dtype), cast(i[1 + d], theta.dtype)
            at = index * 2.0 / maximum(size - 1.0, 1.0) - 1.0 if align_corners else (index * 2.0 + 1.0) / size - 1.0
            base = select(te.equal(k, rank - 1 - d), at, base)
        return te.sum(theta[i[0], i[-1], k] * base, k)

    return te.compute((theta.shape[0], *spatial, rank), element, "affine_grid")


def roi_align(
    x: Tensor, rois: Tensor, batch: Tensor, size: tuple[int, int], samples: int, scale: float, mode: str, half_pixel: bool
) -> Tensor:
    """Regions rois [r, 4] (x1, y1, x2, y2) of the images `x[batch[r]]`, of shape `[n, c, h, w]`, resampled to [r, c, *size].

    Every output element pools samples x samples bilinear samples, by their mean ("avg") or by the largest of the weighted
    corner values ("max"). Source: He et al., Mask R-CNN, 2017, and the ONNX reference.
    """
    require_same(rois.shape[0], batch.shape[0], "regions and their images")
    (height, width), dtype = x.shape[2:], rois.dtype
    iy, ix = te.reduce_axis(samples, "iy"), te.reduce_axis(samples, "ix")

    def along(r: Expr, cell: Expr, sample: Expr, first: int, count: int) -> Expr:
        """The sampling position along one axis; `first` is the column of its lower bound."""
        start, end = (rois[r, n] * scale - (0.5 if half_pixel else 0.0) for n in (first, first + 2))
        step = (end - start if half_pixel else maximum(end - start, 1.0)) / float(count)
        return start + cast(cell, dtype) * step + (cast(sample, dtype) + 0.5) * step / float(samples)

    def corners(at: Expr, extent: Dim) -> tuple[tuple[Expr, Expr], tuple[Expr, Expr]]:
        """(index, weight) of the elements below and above a position."""
        top, at = as_expr(extent) - 1, maximum(at, 0.0)
        low = clamped(cast(te.floor(at), "int64"), extent)
        fraction = select(low >= top, 0.0 * at, at - cast(low, dtype))
        return (low, 1.0 - fraction), (minimum(low + 1, top), fraction)

    def element(r: Expr, c: Expr, ph: Expr, pw: Expr) -> Expr:
        y, z = along(r, ph, iy, 1, size[0]), along(r, pw, ix, 0, size[1])
        outside = (y < -1.0) | (cast(as_expr(height), dtype) < y) | (z < -1.0) | (cast(as_expr(width), dtype) < z)
        n, pairs = valid_index(batch[r], x.shape[0]), product(corners(y, height), corners(z, width))
        weighted = (wy * wx * cast(x[n, c, row, column], dtype) for (row, wy), (column, wx) in pairs)
        sample = reduce(add if mode == "avg" else maximum, weighted)
        sample = select(outside, 0.0 * sample, sample)
        return te.sum(sample, (iy, ix)) / float(samples * samples) if mode == "avg" else te.max(sample, (iy, ix))

    return rounded(te.compute((rois.shape[0], x.shape[1], *size), element, "roi_align"), x.dtype)


def crop_and_resize(x: Tensor, rois: Tensor, batch: Tensor, size: tuple[int, int], mode: str, outside: float) -> Tensor:
    """Regions rois [r, 4] (y1, x1, y2, x2, of which 1 is the last element) of the images `x[batch[r]]`, of shape `[n, c, h, w]`, resampled
    to [r, c, *size], bilinearly or by the nearest element; `outside` is read where a position is not in the image."""
    require_same(rois.shape[0], batch.shape[0], "regions and their images")
    dtype = rois.dtype

    def along(r: Expr, cell: Expr, first: int, count: int, extent: Dim) -> Expr:
        start, end, last = rois[r, first], rois[r, first + 2], cast(as_expr(extent) - 1, dtype)
        return start * last + cast(cell, dtype) * ((end - start) * last / float(count - 1)) if count > 1 else (start + end) * 0.5 * last

    def element(r: Expr, c: Expr, *cell: Expr) -> Expr:
        n, taps, inside = valid_index(batch[r], x.shape[0]), [], []
        for axis, extent in enumerate(x.shape[2:]):
            at = along(r, cell[axis], axis, size[axis], extent)
            inside += [at >= 0.0, at <= cast(as_expr(extent) - 1, dtype)]
            low = te.floor(at + 0.5 if mode == "nearest" else at)
            index, fraction = cast(low, "int64"), at - low
            taps.append([(clamped(index + m, extent), weight) for m, weight in enumerate((1.0 - fraction, fraction))])
        if mode == "nearest":
            value = cast(x[n, c, taps[0][0][0], taps[1][0][0]], dtype)
        else:
            value = reduce(add, (cast(x[n, c, i, j], dtype) * (a * b) for (i, a), (j, b) in product(*taps)))
        return select(te.all_of(inside), value, outside)

    return rounded(te.compute((rois.shape[0], x.shape[1], *size), element, "crop_and_resize"), x.dtype)


def col2im(
    x: Tensor, image: Sequence[Dim], block: Sequence[Dim], dilations: Sequence[int], pads: Sequence[int], strides: Sequence[int],
    channels: Dim,
) -> Tensor:  # fmt: skip
    """Overlapping blocks x [n, channels * prod(block), positions] summed into images [n, channels, *image], the adjoint of im2col. The
    caller guarantees that there are as many positions as `block_positions` says."""
    rank, counts = len(image), block_positions(image, block, dilations, pads, strides)
    offsets = [te.reduce_axis(b, f"k{d}") for d, b in enumerate(block)]

    def element(*i: Expr) -> Expr:
        inside, places = [], []
        for p, k, pad, r, stride, count in zip(i[2:], offsets, pads[:rank], dilations, strides, counts, strict=True):
            shifted = p + pad - k * r
            inside += [te.equal(shifted % stride, 0), shifted >= 0, shifted < count * stride]
            places.append(shifted // stride)
        row = row_major((i[1], *offsets), (1, *block))
        return te.sum(select(te.all_of(inside), x[i[0], row, row_major(places, counts)], 0), offsets)

    return te.compute((x.shape[0], channels, *image), element, "col2im")


def block_positions(
    image: Sequence[Dim], block: Sequence[Dim], dilations: Sequence[int], pads: Sequence[int], strides: Sequence[int]
) -> list[Dim]:
    """How many blocks lie along each axis of a padded image."""
    room = [as_expr(d) + pads[n] + pads[len(image) + n] - (as_expr(block[n]) - 1) * dilations[n] - 1 for n, d in enumerate(image)]
    return [as_dim(free // stride + 1) for free, stride in zip(room, strides, strict=True)]


REPEAT, RESAMPLE = Operator("repeat", repeat), Operator("resample", resample)
GRID_SAMPLE, AFFINE_GRID = Operator("grid_sample", grid_sample), Operator("affine_grid", affine_grid)
CROP_AND_RESIZE = Operator("crop_and_resize", crop_and_resize)
ROI_ALIGN, COL2IM = Operator("roi_align", roi_align), Operator("col2im", col2im)


# ---------------------------------------------------------------- tables that the run makes

WIDE = "float64"
COORDINATES = ("asymmetric", "tf_half_pixel_for_nn", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners",
               "tf_crop_and_resize")  # fmt: skip


def real(e: Dim | float | Expr) -> Expr:
    """A number as float64."""
    return const(e, WIDE) if isinstance(e, float) else cast(as_expr(e), WIDE)


def ratio(sizes: Sequence[Dim], extents: Sequence[Dim], number: int, policy: str) -> Expr:
    """The scale of axis `number` of axes with `extents` that get `sizes`: its own, or under a policy that keeps the aspect ratio the least
    ("not_larger") or largest ("not_smaller") of all."""
    ratios = [real(s) / real(d) for s, d in zip(sizes, extents, strict=True)]
    return ratios[number] if policy == "stretch" else reduce(minimum if policy == "not_larger" else maximum, ratios)


def window_width(mode: str, scale: Expr, antialias: bool) -> Expr | int:
    """How many elements an element of the result is made of; antialiasing widens the kernel when the image gets smaller."""
    half = {"nearest": 0, "linear": 1, "cubic": 2}[mode]
    if mode == "nearest" or not antialias:
        return max(1, 2 * half)
    return cast(te.floor(const(-float(half), WIDE) / minimum(scale, const(1.0, WIDE))), INDEX) * -2


def _position(i: Expr, rule: str, size: Expr, result: Expr, scale: Expr, start: Expr, end: Expr) -> Expr:
    """Where element `i` of the result lies on the input axis; `scale` may differ from result / size."""
    length, half = scale * size, const(0.5, WIDE)  # `length`: what the result would measure without rounding
    match rule:
        case "asymmetric":
            return i / scale
        case "tf_half_pixel_for_nn":
            return (i + half) / scale
        case "half_pixel":
            return (i + half) / scale - half
        case "half_pixel_symmetric":
            return size / 2.0 * (real(1.0) - result / length) + (i + half) / scale - half
        case "pytorch_half_pixel":
            return select(real(1.0) < length, (i + half) / scale - half, -0.5)
        case "align_corners":
            return select(te.equal(length, 1.0), 0.0, i * (size - 1.0) / (length - 1.0))
    first, reach = start * (size - 1.0), (end - start) * (size - 1.0)  # tf_crop_and_resize
    return select(te.equal(length, 1.0), reach / 2.0 + first, i * reach / (length - 1.0) + first)


def _nearest(at: Expr, rule: str, scale: Expr) -> Expr:
    match rule:
        case "round_prefer_floor":
            return te.ceil(at - 0.5)
        case "round_prefer_ceil":
            return te.floor(at + 0.5)
        case "simple":  # Upsample, and Resize at opset 10: never an element that is not needed
            return select(scale < 1.0, te.ceil(at), te.floor(at))
    return te.ceil(at) if rule == "ceil" else te.floor(at)


def resize_table(
    scales: Tensor | None, roi: Tensor | None, *, number: int, wanted: Sequence[Dim], extents: Sequence[Dim], policy: str, result: Dim,
    width: Dim, mode: str, coordinates: str, nearest: str, cubic_a: float, exclude_outside: bool, antialias: bool, dtype: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """How the elements of a resized axis are made, for `resample`: (indices int64, weights `dtype`), both [result, width]; and whether they
    lie outside of the input (bool [result]). The scale of axis `number` is that of `scales`, else the one by which `extents` get what is
    `wanted`; `roi` holds starts and ends of all axes."""
    size = real(extents[number])
    scale = ratio(wanted, extents, number, policy) if scales is None else cast(scales[number], WIDE)
    start, end = (real(0.0), real(1.0)) if roi is None else (cast(roi[number + n], WIDE) for n in (0, len(extents)))
    first = 1 - as_expr(width) // 2

    def at(i: Expr) -> Expr:
        return _position(real(i), coordinates, size, real(result), scale, start, end)

    def place(i: Expr, t: Expr) -> Expr:
        base = _nearest(at(i), nearest, scale) if mode == "nearest" else te.floor(at(i))
        return cast(base, INDEX) + (0 if mode == "nearest" else first + t)

    def weight(i: Expr, t: Expr) -> Expr:
        if mode == "nearest":
            return real(1.0)
        distance = te.abs((real(first + t) - (at(i) - te.floor(at(i)))) * (minimum(scale, 1.0) if antialias else 1.0))
        found = maximum(real(1.0) - distance, 0.0) if mode == "linear" else select(distance < 2.0, cubic_weight(distance, cubic_a), 0.0)
        inside = (as_expr(0) <= place(i, t)) & (place(i, t) < as_expr(extents[number]))
        return select(inside, found, 0.0) if exclude_outside else found

    weights = te.compute((result, width), weight, "weights")
    if mode != "nearest" and (antialias or exclude_outside):
        t, raw = te.reduce_axis(width, "t"), weights
        total = te.compute((result,), lambda i: te.sum(raw[i, t], t), "total")
        weights = te.compute((result, width), lambda i, t: raw[i, t] / select(te.equal(total[i], 0.0), 1.0, total[i]), "shares")
    indices = te.compute((result, width), lambda i, t: maximum(minimum(place(i, t), as_expr(extents[number]) - 1), 0), "indices")
    outside = te.compute((result,), lambda i: (at(i) < 0.0) | (size - 1.0 < at(i)), "outside")
    return indices, te.compute((result, width), lambda i, t: cast(weights[i, t], dtype), "resize_table"), outside


RESIZE_TABLE = Operator("resize_table", resize_table)
