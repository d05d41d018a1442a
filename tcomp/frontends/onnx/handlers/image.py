"""Images: interpolation, sampling at given positions, regions of interest, images from columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from tcomp.frontends.onnx.context import Context, Table, flag, forward
from tcomp.frontends.onnx.handlers.movement import cut, reshaped
from tcomp.frontends.onnx.handlers.runtime_axes import sized
from tcomp.frontends.onnx.symbolic import computed
from tcomp.ir import te
from tcomp.ir.expr import INDEX, Dim, as_expr, cast
from tcomp.ir.graph import Value
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.simplify import as_dim
from tcomp.ops import image as ops
from tcomp.ops.elementwise import WHERE
from tcomp.ops.image import RESIZE_TABLE, ratio, real, resize_table, window_width
from tcomp.ops.movement import GATHER, product

PROBE = 12  # elements of a stand-in for any axis: enough to tell index maps apart
_MAX_RESIZED = 1 << 24  # elements along one axis: a table of positions is made for each


@dataclass(frozen=True)
class Resizing:
    """The attributes of a Resize node that say how elements are interpolated."""

    mode: str
    coordinates: str
    nearest: str
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False


def _resize(ctx: Context) -> Value:
    """Opset 10 has (x, scales); later ones (x, roi, scales, sizes)."""
    if ctx.opset < 11:
        return _resampled(ctx, Resizing(ctx.attrs["mode"], "asymmetric", "simple"), 1)
    names = ("mode", "coordinate_transformation_mode", "nearest_mode", "cubic_coeff_a")
    rule = Resizing(*(ctx.attrs[n] for n in names), *(bool(ctx.attrs.get(n)) for n in ("exclude_outside", "antialias")))
    return _resampled(ctx, rule, 2, () if ctx.input(3) is None or ctx.value(3).shape == (0,) else ctx.given_dims(3, "the sizes"))


def _upsample(ctx: Context) -> Value:
    """Opset 7 has the scales as an attribute."""
    mode = ctx.attrs["mode"]
    if scales := ctx.attrs.get("scales"):
        ctx = replace(ctx, inputs=(ctx.value(0), ctx.constant(scales, "float32")))
    return _resampled(ctx, Resizing("linear" if mode == "bilinear" else mode, "asymmetric", "simple"), 1)


def _resampled(ctx: Context, rule: Resizing, scales_at: int, sizes: Sequence[Dim] = ()) -> Value:
    """One axis after the other, by input `scales_at` or by `sizes`: as every mode is separable, a table for each says everything."""
    x, axes, policy = ctx.value(0), ctx.axes(ctx.attrs.get("axes")), ctx.attrs.get("keep_aspect_ratio_policy", "stretch")
    scales = ctx.input(scales_at)
    numbers = () if sizes or scales is None else ctx.given_numbers(scales_at, "the scales")
    if rule.mode not in ("nearest", "linear", "cubic") or rule.coordinates not in ops.COORDINATES:
        raise ctx.invalid(f"unknown mode `{rule.mode}`, or way to transform coordinates `{rule.coordinates}`")
    if len(sizes or numbers) != len(axes) or any(s.op == "const" and s.attr <= 0 for s in numbers):
        raise ctx.invalid("one positive scale, or one size, for every resized axis is needed")
    roi = ctx.value(1) if rule.coordinates == "tf_crop_and_resize" else None
    if roi is not None and roi.shape != (2 * len(axes),):
        raise ctx.invalid("the region needs a start and an end for every resized axis")
    region = None if roi is None or (known := ctx.scope.known(roi)) is None else known.reshape(2, -1)
    extents = tuple(x.shape[axis] for axis in axes)
    wanted = tuple(ctx.size(d, f"size {n}", least=1) for n, d in enumerate(sizes))
    for n, axis in enumerate(axes):
        crops = roi is not None and (region is None or tuple(region[:, n]) != (0.0, 1.0))
        stretched = bool(wanted) and policy == "stretch"
        if stretched and not crops and wanted[n] == extents[n]:
            continue
        if extents[n] == 0:
            raise ctx.invalid("an empty axis cannot be resized")
        scale = computed(ratio(wanted, extents, n, policy) if wanted else real(numbers[n]))
        if stretched:
            result, factor = wanted[n], as_dim(as_expr(wanted[n]) // as_expr(extents[n]))
            whole = isinstance(factor, int) and as_dim(as_expr(extents[n]) * factor) == result
        else:
            exact = computed(scale * real(extents[n]) + (0.5 if wanted else 0.0))
            valid = (real(0.0) < scale) & (exact < float(_MAX_RESIZED))  # and no NaN
            result = ctx.size(cast(te.floor(exact), INDEX), f"extent {axis} of the result", most=_MAX_RESIZED, valid=valid)
            factor = scale.attr if scale.op == "const" else 0
            whole = factor == int(factor) > 0
        if not crops and whole and (factor == 1 or _repeats(rule, int(factor))):
            x = x if factor == 1 else ctx.add(ops.REPEAT, [x], factor=int(factor), axis=axis)
            continue
        if isinstance(result, int) and result > _MAX_RESIZED:
            raise ctx.invalid(f"an axis would get {result} elements")
        if result == 0:
            x = cut(ctx, x, axis, 0, 0, 1)
            continue
        width = ctx.size(window_width(rule.mode, scale, rule.antialias), f"the width of the window along axis {axis}", least=1)
        attrs = {"number": n, "wanted": wanted, "extents": extents, "policy": policy, "result": result, "width": width, **asdict(rule)}
        table = [None if wanted else scales, roi if crops else None]
        indices, weights, outside = ctx.add_several(RESIZE_TABLE, table, **attrs, dtype="float64" if x.dtype == "float64" else "float32")
        y = _picked(ctx, x, axis, indices) if rule.mode == "nearest" else ctx.add(ops.RESAMPLE, [x, indices, weights], axis=axis)
        if crops:
            column = reshaped(ctx, outside, (result, *(1,) * (len(x.shape) - axis - 1)))
            y = ctx.add(WHERE, [column, ctx.constant(ctx.attrs["extrapolation_value"], x.dtype), y])
        x = y
    return x


@cache
def _repeats(rule: Resizing, factor: int) -> bool:
    """Whether an axis that gets `factor` times as long, and is longer than a few elements, has each of its elements `factor` times."""
    sizes: dict[str, Any] = {
        "number": 0,
        "wanted": (PROBE * factor,),
        "extents": (PROBE,),
        "policy": "stretch",
        "result": PROBE * factor,
        "width": 1,
    }
    if rule.mode != "nearest":
        return False
    (indices,) = evaluate(resize_table(None, None, **sizes, **asdict(rule), dtype="float32")[:1], {})
    return np.array_equal(indices[:, 0], np.arange(PROBE * factor) // factor)


def _picked(ctx: Context, x: Value, axis: int, indices: Value) -> Value:
    """The elements of one axis at positions [n, 1]: a slice, where these are known and evenly spaced."""
    if (known := ctx.scope.known(indices)) is not None:
        step = int(known[1, 0] - known[0, 0]) if len(known) > 1 else 1
        if step and np.array_equal(known[:, 0], known[0, 0] + step * np.arange(len(known))):
            return cut(ctx, x, axis, int(known[0, 0]), len(known), step)
    return ctx.add(GATHER, [x, reshaped(ctx, indices, indices.shape[:1])], axis=axis)


def _grid_sample(ctx: Context) -> Value:
    x, grid = ctx.value(0), ctx.value(1)
    if grid.shape[-1] != len(x.shape) - 2 or len(grid.shape) != len(x.shape):
        raise ctx.invalid("the last axis of the grid must have one coordinate for every spatial axis")
    mode, align = ctx.attrs["mode"].removeprefix("bi"), bool(ctx.attrs["align_corners"])  # before opset 20: bilinear, bicubic
    return ctx.add(ops.GRID_SAMPLE, [x, grid], mode=mode, padding=ctx.attrs["padding_mode"], align_corners=align)


def _roi_align(ctx: Context) -> Value:
    samples = ctx.attrs["sampling_ratio"]
    if samples <= 0:
        raise ctx.unsupported("`sampling_ratio` 0 makes the number of samples depend on the data", "set it to 1 or more")
    half_pixel = ctx.attrs.get("coordinate_transformation_mode", "output_half_pixel") == "half_pixel"
    attrs = {"size": (ctx.attrs["output_height"], ctx.attrs["output_width"]), "scale": ctx.attrs["spatial_scale"]}
    return ctx.add(ops.ROI_ALIGN, ctx.inputs, **attrs, samples=samples, mode=ctx.attrs["mode"], half_pixel=half_pixel)


def _col2im(ctx: Context) -> Value:
    x = ctx.value(0)
    image = tuple(ctx.size(d, f"extent {n} of the image", least=1) for n, d in enumerate(ctx.given_dims(1, "the image shape")))
    block = tuple(ctx.size(d, f"extent {n} of the block", least=1) for n, d in enumerate(ctx.given_dims(2, "the block shape")))
    if len(image) != len(block) or len(x.shape) != 3:
        raise ctx.invalid("image and block have different ranks, or the input has not 3 axes")
    defaults = {"dilations": (1,) * len(image), "pads": (0,) * 2 * len(image), "strides": (1,) * len(image)}
    attrs = {name: tuple(ctx.attrs.get(name) or default) for name, default in defaults.items()}
    size, positions = product(block), product(ops.block_positions(image, block, **attrs))
    channels = ctx.size(as_expr(x.shape[1]) // size, "the number of channels")
    ctx.require_same(x.shape[1], as_dim(as_expr(channels) * size))
    ctx.require_same(x.shape[2], positions)
    return ctx.add(ops.COL2IM, [x], image=image, block=block, channels=channels, **attrs)


TABLE: Table = {
    "Resize": _resize, "Upsample": ((7, _upsample),), "GridSample": _grid_sample, "RoiAlign": _roi_align, "Col2Im": _col2im,
    "AffineGrid": forward(
        ops.AFFINE_GRID,
        inputs=1,
        spatial=lambda ctx: sized(ctx, ctx.given_dims(1, "the size")[2:], "the grid"),
        align_corners=flag("align_corners"),
    ),
}  # fmt: skip
