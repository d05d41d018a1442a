"""Resampling operators: interpolation along an axis, sampling at given positions, regions of interest, column folding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ops.broadcast import widened
from tcomp.ops.indexing import valid_index
from tcomp.ops.reduction import rounded

# ---------------------------------------------------------------- along one axis


def repeat(x: te.Tensor, factor: int, axis: int) -> te.Tensor:
    """Every element `factor` times along `axis`: nearest-neighbour upsampling by an integer."""
    shape = [*x.shape[:axis], as_dim(as_expr(x.shape[axis]) * factor), *x.shape[axis + 1 :]]
    return te.compute(shape, lambda *i: x[(*i[:axis], i[axis] // factor, *i[axis + 1 :])], "repeat")


def resample(x: te.Tensor, indices: te.Tensor, weights: te.Tensor, axis: int) -> te.Tensor:
    """out[..., o, ...] = sum over t of weights[o, t] * x[..., indices[o, t], ...]: any separable interpolation.

    `indices` are int64, `weights` floats; both have shape [size along `axis`, taps]. Integer results truncate and saturate.
    """
    size, taps = indices.shape
    t = te.reduce_axis(taps, "tap")

    def element(*i: Expr) -> Expr:
        at = valid_index(indices[i[axis], t], x.shape[axis])
        value = cast(widened(x[(*i[:axis], at, *i[axis + 1 :])]), weights.dtype)
        return te.sum(weights[i[axis], t] * value, t)

    return rounded(te.compute((*x.shape[:axis], size, *x.shape[axis + 1 :]), element, "resample"), x.dtype)


# ---------------------------------------------------------------- interpolation kernels


def cubic_weight(distance: Expr, a: float) -> Expr:
    """Keys' cubic convolution kernel at |distance| < 2 (R. G. Keys, Cubic convolution interpolation, 1981)."""
    d = te.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1.0
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return select(d <= 1.0, near, far)


def linear_weight(distance: Expr) -> Expr:
    """1 - |distance|."""
    return 1.0 - te.abs(distance)


# ---------------------------------------------------------------- sampling at given positions


def grid_sample(x: te.Tensor, grid: te.Tensor, mode: str, padding: str, align_corners: bool) -> te.Tensor:
    """x [n, c, *spatial] at the positions grid [n, *out, len(spatial)] (last axis: x, y, ... in [-1, 1]) -> [n, c, *out].

    mode: linear, nearest, cubic; padding: zeros, border, reflection. -1 and 1 are the centres of the border elements if
    `align_corners`, else their outer edges.
    """
    spatial = x.shape[2:]
    rank = len(spatial)

    def place(*i: Expr) -> Expr:
        # Position i[-1] counts the axes of x; the grid lists them in reverse.
        result: Expr | None = None
        for d in range(rank):
            c = widened(grid[(*i[:-1], rank - 1 - d)])
            size = cast(as_expr(spatial[d]), c.dtype)
            at = (c + 1.0) * 0.5 * (size - 1.0) if align_corners else ((c + 1.0) * size - 1.0) * 0.5
            at = _kept(te.round(at) if mode == "nearest" else at, size, padding, align_corners)
            result = at if result is None else select(te.equal(i[-1], d), at, result)
        assert result is not None
        return result

    position = te.compute((*grid.shape[:-1], rank), place, "grid_sample.position")
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[mode]
    axes = [te.reduce_axis(taps, f"tap{d}") for d in range(rank)] if taps > 1 else []

    def element(*i: Expr) -> Expr:
        n, c, out = i[0], i[1], i[2:]
        weight: Expr | None = None
        at: list[Expr] = []
        inside: list[Expr] = []
        for d in range(rank):
            exact = position[(n, *out, d)]
            index = cast(te.floor(exact), "int64")
            if taps > 1:
                shift = axes[d] - (taps // 2 - 1)
                distance = (exact - te.floor(exact)) - cast(shift, exact.dtype)
                factor = linear_weight(distance) if mode == "linear" else cubic_weight(distance, -0.75)
                weight = factor if weight is None else weight * factor
                index = index + shift
            extent = as_expr(spatial[d])
            if padding == "zeros":
                inside += [index >= 0, index < extent]
            elif padding == "reflection":
                index = _mirrored(index, extent, align_corners)
            else:
                index = maximum(minimum(index, extent - 1), 0)
            at.append(index)
        value = widened(x[(n, c, *at)])
        value = select(te.all_of(inside), value, 0)
        if weight is None:
            return value
        return te.sum(cast(weight, value.dtype) * value, axes)

    return rounded(te.compute((*x.shape[:2], *grid.shape[1:-1]), element, "grid_sample"), x.dtype)


def _kept(at: Expr, size: Expr, padding: str, align_corners: bool) -> Expr:
    """A position outside of the image moved back into it."""
    if padding == "zeros":
        return at
    if padding == "border":
        return maximum(minimum(at, size - 1.0), 0.0)
    low = 0.0 if align_corners else -0.5
    span = maximum(size - 1.0, 1.0) if align_corners else size
    folded = te.abs(at - low)
    turns = te.floor(folded / span)
    rest = folded - turns * span
    odd = te.not_equal(turns - 2.0 * te.floor(turns * 0.5), 0.0)
    return select(odd, span - rest, rest) + low


def _mirrored(index: Expr, extent: Expr, align_corners: bool) -> Expr:
    """An index reflected at the centres (or the outer edges) of the border elements."""
    period = maximum(extent * 2 - 2, 1) if align_corners else extent * 2
    folded = index % period
    turned = period - folded if align_corners else period - 1 - folded
    return maximum(minimum(select(folded < extent, folded, turned), extent - 1), 0)


def affine_grid(theta: te.Tensor, spatial: Sequence[Dim], align_corners: bool) -> te.Tensor:
    """Sampling positions [n, *spatial, d] of the affine maps theta [n, d, d + 1] applied to the normalised output positions."""
    rank = len(spatial)
    k = te.reduce_axis(rank + 1, "k")

    def element(*i: Expr) -> Expr:
        base = const(1.0, theta.dtype)
        for d in range(rank):  # component k is the coordinate along spatial axis rank - 1 - k
            size = cast(as_expr(spatial[d]), theta.dtype)
            index = cast(i[1 + d], theta.dtype)
            at = index * 2.0 / maximum(size - 1.0, 1.0) - 1.0 if align_corners else (index * 2.0 + 1.0) / size - 1.0
            base = select(te.equal(k, rank - 1 - d), at, base)
        return te.sum(theta[i[0], i[-1], k] * base, k)

    return te.compute((theta.shape[0], *spatial, rank), element, "affine_grid")


# ---------------------------------------------------------------- regions of interest


def roi_align(
    x: te.Tensor, rois: te.Tensor, batch: te.Tensor, size: tuple[int, int], samples: int, scale: float, mode: str, half_pixel: bool
) -> te.Tensor:
    """Regions rois [r, 4] (x1, y1, x2, y2) of the images `x[batch[r]]`, of shape `[n, c, h, w]`, resampled to [r, c, *size].

    Every output element pools samples x samples bilinear samples, by their mean ("avg") or by the largest of the weighted
    corner values ("max"). Source: He et al., Mask R-CNN, 2017, and the ONNX reference.
    """
    height, width = x.shape[2:]
    iy, ix = te.reduce_axis(samples, "iy"), te.reduce_axis(samples, "ix")
    dtype = rois.dtype

    def along(r: Expr, cell: Expr, sample: Expr, first: int, count: int) -> Expr:
        """The sampling position along one axis; `first` is the column of its lower bound."""
        offset = 0.5 if half_pixel else 0.0
        start, end = rois[r, first] * scale - offset, rois[r, first + 2] * scale - offset
        extent = end - start if half_pixel else maximum(end - start, 1.0)
        step = extent / float(count)
        return start + cast(cell, dtype) * step + (cast(sample, dtype) + 0.5) * step / float(samples)

    def corners(at: Expr, extent: Dim) -> tuple[Expr, Expr, Expr]:
        """Lower index, upper index, weight of the upper one."""
        top = as_expr(extent) - 1
        at = maximum(at, 0.0)
        low = maximum(minimum(cast(te.floor(at), "int64"), top), 0)
        fraction = select(low >= top, 0.0 * at, at - cast(low, dtype))
        return low, minimum(low + 1, top), fraction

    def element(r: Expr, c: Expr, ph: Expr, pw: Expr) -> Expr:
        y, z = along(r, ph, iy, 1, size[0]), along(r, pw, ix, 0, size[1])
        outside = (y < -1.0) | (cast(as_expr(height), dtype) < y) | (z < -1.0) | (cast(as_expr(width), dtype) < z)
        y0, y1, fy = corners(y, height)
        x0, x1, fx = corners(z, width)
        n = valid_index(batch[r], x.shape[0])
        parts = [
            wy * wx * cast(x[n, c, row, column], dtype)
            for (row, wy), (column, wx) in itertools.product(((y0, 1.0 - fy), (y1, fy)), ((x0, 1.0 - fx), (x1, fx)))
        ]
        joined = parts[0]
        for part in parts[1:]:
            joined = joined + part if mode == "avg" else maximum(joined, part)
        joined = select(outside, 0.0 * joined, joined)
        return te.sum(joined, (iy, ix)) / float(samples * samples) if mode == "avg" else te.max(joined, (iy, ix))

    return rounded(te.compute((rois.shape[0], x.shape[1], *size), element, "roi_align"), x.dtype)


# ---------------------------------------------------------------- col2im


def col2im(
    x: te.Tensor, image: Sequence[int], block: Sequence[int], dilations: Sequence[int], pads: Sequence[int], strides: Sequence[int]
) -> te.Tensor:
    """Overlapping blocks x [n, c * prod(block), positions] summed into images [n, c, *image], the adjoint of im2col."""
    rank = len(image)
    if len(x.shape) != 3 or not isinstance(x.shape[1], int) or x.shape[1] % prod(block):
        raise IRError(f"col2im of {x!r}: the second axis must be a multiple of the block size {prod(block)}")
    counts = [(image[d] + pads[d] + pads[rank + d] - dilations[d] * (block[d] - 1) - 1) // strides[d] + 1 for d in range(rank)]
    if x.shape[2] != prod(counts):
        raise IRError(f"col2im of {x!r}: {prod(counts)} block positions are needed")
    offsets = [te.reduce_axis(block[d], f"k{d}") for d in range(rank)]

    def element(*i: Expr) -> Expr:
        n, row, at, column = i[0], i[1], i[2:], const(0)
        inside = []
        for d in range(rank):
            row = row * block[d] + offsets[d]
            shifted = at[d] + pads[d] - offsets[d] * dilations[d]
            inside += [te.equal(shifted % strides[d], 0), shifted >= 0, shifted < counts[d] * strides[d]]
            column = column * counts[d] + shifted // strides[d]
        return te.sum(select(te.all_of(inside), x[n, row, column], 0), offsets)

    shape = (x.shape[0], x.shape[1] // prod(block), *image)
    return te.compute(shape, element, "col2im")


REPEAT, RESAMPLE = Operator("repeat", repeat), Operator("resample", resample)
GRID_SAMPLE, AFFINE_GRID = Operator("grid_sample", grid_sample), Operator("affine_grid", affine_grid)
ROI_ALIGN, COL2IM = Operator("roi_align", roi_align), Operator("col2im", col2im)
