"""ONNX handlers of resampling operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tcomp.frontends.onnx.context import Context, Versions
from tcomp.frontends.onnx.handlers import resize
from tcomp.frontends.onnx.handlers.axes import axes_of
from tcomp.frontends.onnx.handlers.movement import sliced
from tcomp.frontends.onnx.handlers.resize import Resizing
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr
from tcomp.ir.graph import Value
from tcomp.ops import image as ops
from tcomp.ops.elementwise import WHERE
from tcomp.ops.indexing import GATHER

PROBE = 12  # size of a stand-in for a symbolic axis; large enough to tell index maps apart


def _resize(ctx: Context) -> Value:
    """Opset 10 has (x, scales); later ones (x, roi, scales, sizes)."""
    old = ctx.opset < 11
    scales = _floats(ctx, 1 if old else 2, "the scales")
    sizes = None if old or ctx.input(3) is None else ctx.require_dims(3, "the sizes")
    rule = Resizing(
        ctx.attrs["mode"],
        "asymmetric" if old else ctx.attrs["coordinate_transformation_mode"],
        "simple" if old else ctx.attrs["nearest_mode"],
        ctx.attrs.get("cubic_coeff_a", -0.75),
        bool(ctx.attrs.get("exclude_outside")),
        bool(ctx.attrs.get("antialias")),
    )
    return _resampled(ctx, rule, scales, sizes)


def _upsample(ctx: Context) -> Value:
    """Opset 7 has the scales as an attribute."""
    scales = ctx.attrs.get("scales") or _floats(ctx, 1, "the scales")
    if scales is None:
        raise ctx.invalid("the scales are missing")
    mode = {"bilinear": "linear"}.get(ctx.attrs.get("mode", "nearest"), ctx.attrs.get("mode", "nearest"))
    return _resampled(ctx, Resizing(mode, "asymmetric", "simple"), scales, None)


def _floats(ctx: Context, i: int, what: str) -> list[float] | None:
    if ctx.input(i) is None or ctx.value(i).shape == (0,):
        return None
    return [float(v) for v in ctx.require_known(i, what).ravel()]


_MAX_RESIZED = 1 << 24  # elements along one axis: a table of positions is made for each


def _resampled(ctx: Context, rule: Resizing, scales: Sequence[float] | None, sizes: Sequence[Dim] | None) -> Value:
    x = ctx.value(0)
    given = ctx.attrs.get("axes")
    axes = tuple(range(len(x.shape))) if given is None else axes_of(ctx, given, len(x.shape))
    if rule.mode not in ("nearest", "linear", "cubic"):
        raise ctx.invalid(f"unknown mode `{rule.mode}`")
    wanted = scales if sizes is None else sizes
    if wanted is None or len(wanted) != len(axes) or any(isinstance(s, float) and s <= 0 for s in wanted):
        raise ctx.invalid("one positive scale, or one size, for every resized axis is needed")
    before = [x.shape[axis] for axis in axes]
    if any(isinstance(d, Expr) for d in (*before, *(sizes or ()))):
        return _of_symbolic_size(ctx, rule, axes, scales, sizes)
    policy = ctx.attrs.get("keep_aspect_ratio_policy", "stretch")
    given_sizes = None if sizes is None else [int(d) for d in sizes]
    after, factors = resize.sizes_and_scales([int(d) for d in before], scales, given_sizes, policy)
    for n, axis in enumerate(axes):
        x = _along(ctx, _with_roi(ctx, rule, n, len(axes)), x, axis, after[n], factors[n])
    return x


def _with_roi(ctx: Context, rule: Resizing, n: int, count: int) -> Resizing:
    """The rule for resized axis number n."""
    if rule.coordinates != "tf_crop_and_resize":
        return rule
    roi = ctx.require_known(1, "the region").ravel()
    if roi.size != 2 * count:
        raise ctx.invalid("the region needs a start and an end for every resized axis")
    return replace(rule, roi=(float(roi[n]), float(roi[count + n])))


def _along(ctx: Context, rule: Resizing, x: Value, axis: int, result: int, scale: float) -> Value:
    """`x` resampled along one axis; whole-number maps become repetitions and slices."""
    size = int(x.shape[axis])
    if size == result and scale == 1.0 and rule.roi == (0.0, 1.0):
        return x
    if size == 0:
        raise ctx.invalid("an empty axis cannot be resized")
    if result > _MAX_RESIZED:
        raise ctx.invalid(f"an axis would get {result} elements")
    indices, weights = resize.table(rule, size, result, scale)
    if rule.mode == "nearest":
        y = _picked(ctx, x, axis, indices[:, 0])
    else:
        dtype = "float64" if x.dtype == "float64" else "float32"
        y = ctx.add(ops.RESAMPLE, [x, ctx.constant(indices), ctx.constant(weights, dtype)], axis=axis)
    if rule.coordinates == "tf_crop_and_resize" and (mask := resize.outside(rule, size, result, scale)).any():
        column = mask.reshape(-1, *(1,) * (len(x.shape) - axis - 1))
        y = ctx.add(WHERE, [ctx.constant(column), ctx.constant(ctx.attrs["extrapolation_value"], x.dtype), y])
    return y


def _picked(ctx: Context, x: Value, axis: int, indices: np.ndarray) -> Value:
    """Elements of one axis at known positions."""
    size, result = int(x.shape[axis]), len(indices)
    if result % size == 0 and np.array_equal(indices, np.arange(result) // (result // size)):
        return ctx.add(ops.REPEAT, [x], factor=result // size, axis=axis) if result != size else x
    step = int(indices[1] - indices[0]) if result > 1 else 1
    if step and np.array_equal(indices, indices[0] + step * np.arange(result)):
        starts, steps = [0] * len(x.shape), [1] * len(x.shape)
        starts[axis], steps[axis] = int(indices[0]), step
        return sliced(ctx, x, starts, steps, (*x.shape[:axis], result, *x.shape[axis + 1 :]))
    return ctx.add(GATHER, [x, ctx.constant(indices)], axis=axis)


def _of_symbolic_size(
    ctx: Context, rule: Resizing, axes: Sequence[int], scales: Sequence[float] | None, sizes: Sequence[Dim] | None
) -> Value:
    """Nearest-neighbour upsampling by whole numbers needs no table."""
    x = ctx.value(0)
    for n, axis in enumerate(axes):
        extent = x.shape[axis]
        if sizes is not None:
            factor = as_dim(as_expr(sizes[n]) // as_expr(extent))
            exact = isinstance(factor, int) and as_dim(as_expr(extent) * factor) == sizes[n]
        else:
            assert scales is not None
            exact, factor = scales[n] == int(scales[n]), int(scales[n])
        if exact and factor == 1:
            continue
        repeats = exact and rule.mode == "nearest" and rule.coordinates != "tf_crop_and_resize"
        if repeats:
            probe = resize.table(rule, PROBE, PROBE * int(factor), float(factor))[0][:, 0]
            repeats = np.array_equal(probe, np.arange(len(probe)) // int(factor))
        if not repeats:
            raise ctx.unsupported(
                f"an axis of symbolic size {extent} is resized other than by repeating its elements", "fix that size with --dim"
            )
        x = ctx.add(ops.REPEAT, [x], factor=int(factor), axis=axis)
    return x


# ---------------------------------------------------------------- sampling


def _grid_sample(ctx: Context) -> Value:
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(ctx.attrs["mode"], ctx.attrs["mode"])
    padding, align = ctx.attrs["padding_mode"], bool(ctx.attrs["align_corners"])
    x, grid = ctx.value(0), ctx.value(1)
    if grid.shape[-1] != len(x.shape) - 2 or len(grid.shape) != len(x.shape):
        raise ctx.invalid("the last axis of the grid must have one coordinate for every spatial axis")
    return ctx.add(ops.GRID_SAMPLE, [x, grid], mode=mode, padding=padding, align_corners=align)


def _affine_grid(ctx: Context) -> Value:
    theta, size = ctx.value(0), ctx.require_dims(1, "the size")
    return ctx.add(ops.AFFINE_GRID, [theta], spatial=size[2:], align_corners=bool(ctx.attrs["align_corners"]))


def _roi_align(ctx: Context) -> Value:
    samples = ctx.attrs["sampling_ratio"]
    if samples <= 0:
        raise ctx.unsupported("`sampling_ratio` 0 makes the number of samples depend on the data", "set it to 1 or more")
    half_pixel = ctx.attrs.get("coordinate_transformation_mode", "output_half_pixel") == "half_pixel"
    size = (ctx.attrs["output_height"], ctx.attrs["output_width"])
    return ctx.add(
        ops.ROI_ALIGN, [ctx.value(0), ctx.value(1), ctx.value(2)], size=size, samples=samples,
        scale=ctx.attrs["spatial_scale"], mode=ctx.attrs["mode"], half_pixel=half_pixel,
    )  # fmt: skip


def _col2im(ctx: Context) -> Value:
    image, block = ctx.require_dims(1, "the image shape"), ctx.require_dims(2, "the block shape")
    if any(isinstance(d, Expr) for d in (*image, *block)):
        raise ctx.unsupported("the image or block shape is symbolic", "fix the sizes with --dim")
    rank = len(image)
    dilations = tuple(ctx.attrs.get("dilations") or (1,) * rank)
    pads, strides = tuple(ctx.attrs.get("pads") or (0,) * 2 * rank), tuple(ctx.attrs.get("strides") or (1,) * rank)
    return ctx.add(ops.COL2IM, [ctx.value(0)], image=image, block=block, dilations=dilations, pads=pads, strides=strides)


TABLE: dict[str, Versions] = {
    "Resize": ((10, _resize),),
    "Upsample": ((7, _upsample),),
    "GridSample": ((16, _grid_sample),),
    "AffineGrid": ((20, _affine_grid),),
    "RoiAlign": ((10, _roi_align),),
    "Col2Im": ((18, _col2im),),
}
