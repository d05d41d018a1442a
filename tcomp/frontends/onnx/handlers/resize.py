"""Interpolation tables of ONNX Resize: which elements an output element reads along one axis, and with which weights.

Every mode is separable, so one table a resized axis says everything: `indices` and `weights` of shape [output size, taps].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor

import numpy as np

Array = np.ndarray


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


def positions(rule: Resizing, size: int, result: int, scale: float) -> Array:
    """Where the elements of the result lie on the input axis (float64 [result]); `scale` may differ from result / size."""
    i = np.arange(result, dtype=np.float64)
    length = scale * size  # what the result would measure without rounding
    start, end = rule.roi
    match rule.coordinates:
        case "half_pixel":
            return (i + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            return size / 2 * (1 - result / length) + (i + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (i + 0.5) / scale - 0.5 if length > 1 else np.full(result, -0.5)
        case "tf_half_pixel_for_nn":
            return (i + 0.5) / scale
        case "align_corners":
            return i * (size - 1) / (length - 1) if length != 1 else np.zeros(result)
        case "asymmetric":
            return i / scale
        case "tf_crop_and_resize":
            if length == 1:
                return np.full(result, (end - start) * (size - 1) / 2 + start * (size - 1))
            return i * (end - start) * (size - 1) / (length - 1) + start * (size - 1)
    raise ValueError(f"unknown coordinate_transformation_mode `{rule.coordinates}`")


_NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def table(rule: Resizing, size: int, result: int, scale: float) -> tuple[Array, Array]:
    """(indices int64, weights float64) of one axis, both [result, taps]."""
    at = positions(rule, size, result, scale)
    if rule.mode == "nearest":
        rounding = rule.nearest
        if rounding == "simple":  # Upsample, and Resize at opset 10: never an element that is not needed
            rounding = "ceil" if scale < 1 else "floor"
        indices = np.clip(_NEAREST[rounding](at), 0, size - 1).astype(np.int64)
        return indices[:, None], np.ones((result, 1))
    reach = 1 if rule.mode == "linear" else 2
    shrink = min(scale, 1.0) if rule.antialias else 1.0  # antialiasing widens the kernel when the image gets smaller
    first = floor(-reach / shrink) + 1
    taps = np.arange(first, 2 - first)
    base = np.floor(at)
    distance = (taps[None, :] - (at - base)[:, None]) * shrink
    weights = np.clip(1 - np.abs(distance), 0, None) if rule.mode == "linear" else _keys(np.abs(distance), rule.cubic_a)
    indices = base[:, None].astype(np.int64) + taps[None, :]
    if rule.antialias:
        weights = weights / weights.sum(axis=1, keepdims=True)
    if rule.exclude_outside:
        weights = np.where((indices < 0) | (indices >= size), 0.0, weights)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return np.clip(indices, 0, size - 1), weights


def _keys(d: Array, a: float) -> Array:
    """Cubic convolution kernel (R. G. Keys, Cubic convolution interpolation, 1981)."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def outside(rule: Resizing, size: int, result: int, scale: float) -> Array:
    """Which elements of the result tf_crop_and_resize takes from outside of the image (bool [result])."""
    at = positions(rule, size, result, scale)
    return (at < 0) | (at > size - 1)


def sizes_and_scales(
    extents: Sequence[int], scales: Sequence[float] | None, sizes: Sequence[int] | None, policy: str
) -> tuple[list[int], list[float]]:
    """Result extents and scales of the resized axes; `policy` (stretch, not_larger, not_smaller) applies to `sizes`."""
    if sizes is None:
        assert scales is not None
        return [floor(d * s) for d, s in zip(extents, scales, strict=True)], list(scales)
    if policy == "stretch":
        return list(sizes), [s / d for s, d in zip(sizes, extents, strict=True)]
    pick = min if policy == "not_larger" else max
    scale = pick(s / d for s, d in zip(sizes, extents, strict=True))
    return [floor(scale * d + 0.5) for d in extents], [scale] * len(extents)
