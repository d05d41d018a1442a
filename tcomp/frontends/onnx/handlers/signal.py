"""Signals: Fourier transforms, windows, mel filters."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Handler, Table
from tcomp.frontends.onnx.handlers.movement import reshaped
from tcomp.ir.expr import as_dim, as_expr
from tcomp.ir.graph import Value
from tcomp.ops import signal as ops

TABLE_LIMIT = 1 << 24  # elements of a transform's table; a longer signal wants a fast transform, which is not there


def _transform(ctx: Context, x: Value, axis: int, length: int, inverse: bool, onesided: bool) -> Value:
    """A discrete Fourier transform of `length` points as a product with its matrix; the input is cut or zero-padded to them."""
    size = x.shape[axis]
    if not isinstance(size, int):
        raise ctx.unsupported(f"the transformed axis has symbolic size {size}", "fix it with --dim")
    real = inverse and onesided
    count = length if real or not onesided else length // 2 + 1
    if count * size > TABLE_LIMIT:
        raise ctx.unsupported(f"a transform of {size} to {count} points needs a table of {count * size} elements")
    n, k = np.arange(size), np.arange(count)
    angle = 2 * np.pi / length * ((k[:, None] * n[None, :]) % length)
    if real:  # the missing half of the spectrum is the conjugate of the given one
        scale = np.where(n <= length // 2, np.where((n > 0) & (2 * n < length), 2.0, 1.0), 0.0)
    else:
        scale = np.where(n < length, 1.0, 0.0)
    scale = scale / length if inverse else scale
    tables = np.cos(angle) * scale, np.sin(angle) * scale * (1 if inverse else -1)
    return ctx.add(ops.DFT, [x, *(ctx.constant(t, x.dtype) for t in tables)], axis=axis, real=real)


def _dft(ctx: Context) -> Value:
    x, inverse, onesided = ctx.value(0), bool(ctx.attrs["inverse"]), bool(ctx.attrs["onesided"])
    axis = ctx.axis(ctx.attrs["axis"] if ctx.opset < 20 else -2 if ctx.input(2) is None else ctx.require_dims(2, "the axis")[0])
    if ctx.input(1) is not None:
        (length,) = ctx.require_dims(1, "the length of the transform")
    else:
        length = as_dim(as_expr(x.shape[axis]) * 2 - 2) if inverse and onesided else x.shape[axis]
    if not isinstance(length, int) or length < 1:
        raise ctx.unsupported(f"the transform has length {length}", "fix it with --dim")
    return _transform(ctx, x, axis, length, inverse, onesided)


def _stft(ctx: Context) -> Value:
    """Overlapping windowed frames of the signal, each transformed."""
    x, (step,), window = ctx.value(0), ctx.require_dims(1, "the frame step"), ctx.input(2)
    if ctx.input(3) is not None:
        (length,) = ctx.require_dims(3, "the frame length")
    else:
        length = x.shape[1] if window is None else window.shape[0]
    if not isinstance(length, int) or not isinstance(step, int) or step < 1 or length < 1:
        raise ctx.unsupported("frame length or step is symbolic or not positive")
    if len(x.shape) == 2:
        x = reshaped(ctx, x, (*x.shape, 1))
    count = as_dim((as_expr(x.shape[1]) - length) // step + 1)
    frames = ctx.add(ops.FRAMES, [x, window], length=length, step=step, count=count)
    return _transform(ctx, frames, 2, length, False, bool(ctx.attrs["onesided"]))


def _window(*coefficients: float) -> Handler:
    """A sum of cosines over one period."""

    def handler(ctx: Context) -> Value:
        (size,) = ctx.require_dims(0, "the size")
        if not isinstance(size, int):
            raise ctx.unsupported("the size is symbolic", "fix it with --dim")
        period = size if ctx.attrs["periodic"] else max(size - 1, 1)
        angle = 2 * np.pi * np.arange(size) / period
        values = sum((c * np.cos(n * angle) for n, c in enumerate(coefficients)), np.zeros(size))
        return ctx.constant(values, ctx.dtype("output_datatype"))

    return handler


def _mel_weight_matrix(ctx: Context) -> Value:
    """Triangular filters, evenly spaced on the mel scale, over the bins of a spectrum [length // 2 + 1, filters]."""
    names = ("the number of filters", "the transform length", "the sample rate", "the lower edge", "the upper edge")
    filters, length, rate, lower, upper = (float(ctx.require_known(n, what).reshape(())) for n, what in enumerate(names))
    count, size = int(filters), int(length) // 2 + 1
    if not (0 < count and 0 < size and count * size <= TABLE_LIMIT and rate > 0):
        raise ctx.invalid(f"{count} filters over {size} bins at {rate} Hz")
    low, high = (2595 * np.log10(1 + edge / 700) for edge in (lower, upper))
    mel = low + np.arange(count + 2) * ((high - low) / (count + 2))
    hertz = 700 * (10 ** (mel / 2595) - 1)
    edges = ((int(length) + 1) * hertz // rate).astype(np.int64)
    if edges[0] < 0 or edges[-1] > size:
        raise ctx.invalid(f"the filters from {lower} to {upper} Hz leave the spectrum of {size} bins")
    bins, matrix = np.arange(size), np.zeros((size, count))
    for n, (left, centre, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        rising = (left <= bins) & (bins <= centre)
        matrix[rising, n] = (bins[rising] - left) / (centre - left) if centre > left else 1.0
        falling = (centre <= bins) & (bins < right)
        matrix[falling, n] = (right - bins[falling]) / max(right - centre, 1)
    return ctx.constant(matrix, ctx.dtype("output_datatype"))


TABLE: Table = {
    "DFT": _dft,
    "STFT": _stft,
    "HannWindow": _window(0.5, -0.5),
    "HammingWindow": _window(25 / 46, -21 / 46),
    "BlackmanWindow": _window(0.42, -0.5, 0.08),
    "MelWeightMatrix": _mel_weight_matrix,
}
