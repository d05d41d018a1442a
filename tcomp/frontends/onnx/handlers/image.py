"""Images: interpolation, sampling at given positions, regions of interest, images from columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor

import numpy as np

from tcomp.frontends.onnx.context import Context, Table, flag, forward
from tcomp.frontends.onnx.handlers.movement import cut
from tcomp.frontends.onnx.handlers.runtime_axes import sized
from tcomp.ir import te
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, cast
from tcomp.ir.graph import Value
from tcomp.ir.shape_operands import depends_on_values
from tcomp.ir.simplify import as_dim, same_dim
from tcomp.ops import image as ops
from tcomp.ops.elementwise import WHERE
from tcomp.ops.image import RESIZE_TABLE, ratio, real, window_width
from tcomp.ops.movement import GATHER, RESHAPE, product

PROBE = 12  # elements of a stand-in for a symbolic axis: enough to tell index maps apart
_MAX_RESIZED = 1 << 24  # elements along one axis: a table of positions is made for each


@dataclass(frozen=True)
class Resizing:
    """The attributes of a Resize node, and its `roi` (start, end) along the axis for tf_crop_and_resize."""

    mode: str
    coordinates: str
    nearest: str
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, float] = (0.0, 1.0)


def _positions(rule: Resizing, size: int, result: int, scale: float) -> np.ndarray:
    """Where the elements of the result lie on the input axis (float64 [result]); `scale` may differ from result / size."""
    i = np.arange(result, dtype=np.float64)
    length = scale * size  # what the result would measure without rounding
    match rule.coordinates:
        case "asymmetric":
            return i / scale
        case "tf_half_pixel_for_nn":
            return (i + 0.5) / scale
        case "half_pixel":
            return (i + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            return size / 2 * (1 - result / length) + (i + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (i + 0.5) / scale - 0.5 if length > 1 else np.full(result, -0.5)
        case "align_corners":
            return i * (size - 1) / (length - 1) if length != 1 else np.zeros(result)
        case "tf_crop_and_resize":
            start, end = rule.roi
            first, reach = start * (size - 1), (end - start) * (size - 1)
            return i * (end - start) * (size - 1) / (length - 1) + first if length != 1 else np.full(result, reach / 2 + first)
    raise ValueError(f"unknown coordinate_transformation_mode `{rule.coordinates}`")


_NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5), "round_prefer_ceil": lambda x: np.floor(x + 0.5), "floor": np.floor, "ceil": np.ceil,
}  # fmt: skip


def _table(rule: Resizing, at: np.ndarray, size: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Which elements of an axis an element of the result at position `at` reads, and with which weights: (indices int64, weights float64),
    both [result, window size]. As every mode is separable, one such table a resized axis says everything."""
    if rule.mode == "nearest":
        simple = "ceil" if scale < 1 else "floor"  # Upsample, and Resize at opset 10: never an element that is not needed
        nearest = _NEAREST[simple if rule.nearest == "simple" else rule.nearest](at)
        return np.clip(nearest, 0, size - 1).astype(np.int64)[:, None], np.ones((len(at), 1))
    shrink = min(scale, 1.0) if rule.antialias else 1.0  # antialiasing widens the kernel when the image gets smaller
    first, base = floor((-1 if rule.mode == "linear" else -2) / shrink) + 1, np.floor(at)
    offsets = np.arange(first, 2 - first)
    d, a = np.abs((offsets[None, :] - (at - base)[:, None]) * shrink), rule.cubic_a
    if rule.mode == "linear":
        weights = np.clip(1 - d, 0, None)
    else:  # R. G. Keys, Cubic convolution interpolation, 1981
        outer = np.where(d < 2, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a, 0.0)
        weights = np.where(d <= 1, ((a + 2) * d - (a + 3)) * d * d + 1, outer)
    indices = base[:, None].astype(np.int64) + offsets[None, :]
    if rule.antialias:
        weights = weights / weights.sum(axis=1, keepdims=True)
    if rule.exclude_outside:
        weights = np.where((indices < 0) | (indices >= size), 0.0, weights)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return np.clip(indices, 0, size - 1), weights


def _resize(ctx: Context) -> Value:
    """Opset 10 has (x, scales); later ones (x, roi, scales, sizes)."""
    if ctx.opset < 11:
        return _resampled(ctx, Resizing(ctx.attrs["mode"], "asymmetric", "simple"), *_floats(ctx, 1, "the scales"), None)
    names = ("mode", "coordinate_transformation_mode", "nearest_mode", "cubic_coeff_a")
    rule = Resizing(*(ctx.attrs[n] for n in names), *(bool(ctx.attrs.get(n)) for n in ("exclude_outside", "antialias")))
    sizes = None if ctx.input(3) is None or ctx.value(3).shape == (0,) else ctx.given_dims(3, "the sizes")
    return _resampled(ctx, rule, *_floats(ctx, 2, "the scales"), sizes)


def _upsample(ctx: Context) -> Value:
    """Opset 7 has the scales as an attribute."""
    scales, value = (ctx.attrs["scales"], None) if ctx.attrs.get("scales") else _floats(ctx, 1, "the scales")
    if scales is None:
        raise ctx.invalid("the scales are missing")
    mode = ctx.attrs["mode"]
    return _resampled(ctx, Resizing("linear" if mode == "bilinear" else mode, "asymmetric", "simple"), scales, value, None)


def _floats(ctx: Context, i: int, what: str) -> tuple[Sequence[float | Expr] | None, Value | None]:
    """The elements of an input, floats where they are known; and, where they are not, itself."""
    given = ctx.input(i)
    if given is None or given.shape == (0,):
        return None, None
    if (known := ctx.known(i)) is not None:
        return [float(v) for v in known.ravel()], None
    return ctx.given_numbers(i, what), given


def _resampled(
    ctx: Context, rule: Resizing, scales: Sequence[float | Expr] | None, value: Value | None, sizes: Sequence[Dim] | None
) -> Value:
    x, axes = ctx.value(0), ctx.axes(ctx.attrs.get("axes"))
    if rule.mode not in ("nearest", "linear", "cubic"):
        raise ctx.invalid(f"unknown mode `{rule.mode}`")
    wanted = scales if sizes is None else sizes
    if wanted is None or len(wanted) != len(axes) or any(isinstance(s, float) and s <= 0 for s in wanted):
        raise ctx.invalid("one positive scale, or one size, for every resized axis is needed")
    policy, cropped = ctx.attrs.get("keep_aspect_ratio_policy", "stretch"), rule.coordinates == "tf_crop_and_resize"
    if (sizes is None and value is not None) or any(map(depends_on_values, sizes or ())) or (cropped and ctx.known(1) is None):
        return _by_tables(ctx, rule, axes, scales, value, sizes)
    factors = [s for s in scales or () if isinstance(s, float)]
    if any(isinstance(d, Expr) for d in (*(x.shape[axis] for axis in axes), *(sizes or ()))):
        repeated = _of_symbolic_size(ctx, rule, axes, factors, sizes) if sizes is None or policy == "stretch" else None
        return _by_tables(ctx, rule, axes, scales, value, sizes) if repeated is None else repeated
    before = [int(x.shape[axis]) for axis in axes]
    if sizes is None:
        after = [floor(d * s) for d, s in zip(before, factors, strict=True)]
    else:
        after = [int(d) for d in sizes]
        factors = [s / d for s, d in zip(after, before, strict=True)]
        if policy != "stretch":
            factors = [min(factors) if policy == "not_larger" else max(factors)] * len(axes)
            after = [floor(factors[0] * d + 0.5) for d in before]
    rules = [rule] * len(axes)
    if cropped:
        roi = ctx.require_known(1, "the region").ravel().tolist()
        if len(roi) != 2 * len(axes):
            raise ctx.invalid("the region needs a start and an end for every resized axis")
        rules = [replace(rule, roi=ends) for ends in zip(roi[: len(axes)], roi[len(axes) :], strict=True)]
    for axis, own, extent, factor in zip(axes, rules, after, factors, strict=True):
        x = _along(ctx, own, x, axis, extent, factor)
    return x


def _by_tables(
    ctx: Context,
    rule: Resizing,
    axes: Sequence[int],
    scales: Sequence[float | Expr] | None,
    value: Value | None,
    sizes: Sequence[Dim] | None,
) -> Value:
    """The same by tables that the run makes."""
    x, policy, cropped = ctx.value(0), ctx.attrs.get("keep_aspect_ratio_policy", "stretch"), rule.coordinates == "tf_crop_and_resize"
    extents, roi = tuple(x.shape[axis] for axis in axes), ctx.value(1) if cropped else None
    if any(d == 0 for d in extents) or (roi is not None and roi.shape != (2 * len(axes),)):
        raise ctx.invalid("an empty axis, or a region without a start and an end for every resized axis")
    wanted = tuple(ctx.size(d, f"size {n}", least=1) for n, d in enumerate(sizes or ()))
    if sizes is None and value is None:
        value = ctx.constant(np.array(scales, np.float64))
    for n, axis in enumerate(axes):
        scale = ratio(wanted, extents, n, policy) if scales is None or sizes is not None else real(scales[n])
        if sizes is not None and policy == "stretch":
            result = wanted[n]
        else:
            exact = scale * real(extents[n]) + (0.0 if sizes is None else 0.5)
            valid = (real(0.0) < scale) & (exact < float(_MAX_RESIZED))  # and no NaN
            result = ctx.size(cast(te.floor(exact), INDEX), f"extent {axis} of the result", most=_MAX_RESIZED, valid=valid)
        one = same_dim(result, extents[n]) if sizes is not None else scale.op == "const" and scale.attr == 1.0
        if one and policy == "stretch" and not cropped:
            continue
        width = ctx.size(window_width(rule.mode, scale, rule.antialias), f"the width of the window along axis {axis}", least=1)
        attrs = {"number": n, "wanted": wanted, "extents": extents, "policy": policy, "result": result, "width": width}
        fields = ("mode", "coordinates", "nearest", "cubic_a", "exclude_outside", "antialias")
        attrs |= {"dtype": "float64" if x.dtype == "float64" else "float32"} | {f: getattr(rule, f) for f in fields}
        indices, weights, outside = ctx.add_several(RESIZE_TABLE, [None if sizes is not None else value, roi], **attrs)
        if rule.mode == "nearest":
            y = ctx.add(GATHER, [x, ctx.add(RESHAPE, [indices], shape=(result,))], axis=axis)
        else:
            y = ctx.add(ops.RESAMPLE, [x, indices, weights], axis=axis)
        if cropped:
            column = ctx.add(RESHAPE, [outside], shape=(result, *(1,) * (len(x.shape) - axis - 1)))
            y = ctx.add(WHERE, [column, ctx.constant(ctx.attrs["extrapolation_value"], x.dtype), y])
        x = y
    return x


def _along(ctx: Context, rule: Resizing, x: Value, axis: int, result: int, scale: float) -> Value:
    """`x` resampled along one axis; whole-number maps become repetitions and slices."""
    size = int(x.shape[axis])
    if size == result and scale == 1.0 and rule.roi == (0.0, 1.0):
        return x
    if size == 0 or result > _MAX_RESIZED:
        raise ctx.invalid("an empty axis cannot be resized" if size == 0 else f"an axis would get {result} elements")
    if not result:
        return cut(ctx, x, axis, 0, 0, 1)
    at = _positions(rule, size, result, scale)
    indices, weights = _table(rule, at, size, scale)
    if rule.mode == "nearest":
        y = _picked(ctx, x, axis, indices[:, 0])
    else:
        table = [ctx.constant(indices), ctx.constant(weights, "float64" if x.dtype == "float64" else "float32")]
        y = ctx.add(ops.RESAMPLE, [x, *table], axis=axis)
    outside = (at < 0) | (at > size - 1)
    if rule.coordinates == "tf_crop_and_resize" and outside.any():
        column = outside.reshape(-1, *(1,) * (len(x.shape) - axis - 1))
        y = ctx.add(WHERE, [ctx.constant(column), ctx.constant(ctx.attrs["extrapolation_value"], x.dtype), y])
    return y


def _picked(ctx: Context, x: Value, axis: int, indices: np.ndarray) -> Value:
    """Elements of one axis at known positions."""
    size, result = int(x.shape[axis]), len(indices)
    if result % size == 0 and np.array_equal(indices, np.arange(result) // (result // size)):
        return ctx.add(ops.REPEAT, [x], factor=result // size, axis=axis) if result != size else x
    step = int(indices[1] - indices[0]) if result > 1 else 1
    if step and np.array_equal(indices, indices[0] + step * np.arange(result)):
        return cut(ctx, x, axis, int(indices[0]), result, step)
    return ctx.add(GATHER, [x, ctx.constant(indices)], axis=axis)


def _of_symbolic_size(
    ctx: Context, rule: Resizing, axes: Sequence[int], scales: Sequence[float], sizes: Sequence[Dim] | None
) -> Value | None:
    """Nearest-neighbour upsampling by whole numbers needs no table; None for any other."""
    x = ctx.value(0)
    for n, axis in enumerate(axes):
        extent = x.shape[axis]
        if sizes is not None:
            factor = as_dim(as_expr(sizes[n]) // as_expr(extent))
            exact = isinstance(factor, int) and as_dim(as_expr(extent) * factor) == sizes[n]
        else:
            exact, factor = scales[n] == int(scales[n]), int(scales[n])
        if exact and factor == 1:
            continue
        repeats = exact and rule.mode == "nearest" and rule.coordinates != "tf_crop_and_resize"
        if repeats:
            at = _positions(rule, PROBE, PROBE * int(factor), float(factor))
            repeats = np.array_equal(_table(rule, at, PROBE, float(factor))[0][:, 0], np.arange(len(at)) // int(factor))
        if not repeats:
            return None
        x = ctx.add(ops.REPEAT, [x], factor=int(factor), axis=axis)
    return x


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
