"""Tables of separable interpolation that are made by the run: where sizes or scales are not known when the model is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from tcomp.ir import te
from tcomp.ir.expr import INDEX, Dim, Expr, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.te import Tensor
from tcomp.ops.image import cubic_weight

WIDE = "float64"


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
