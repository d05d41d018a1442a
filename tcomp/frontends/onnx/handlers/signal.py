"""Signals: Fourier transforms, windows, mel filters."""

from __future__ import annotations

import numpy as np

from tcomp.frontends.onnx.context import Context, Table
from tcomp.frontends.onnx.handlers.movement import reshaped
from tcomp.frontends.onnx.handlers.runtime_axes import chosen_axes, sized
from tcomp.ir.expr import Dim, as_expr, select
from tcomp.ir.graph import Value
from tcomp.ir.simplify import as_dim, same_dim
from tcomp.ops import signal as ops
from tcomp.ops.movement import VIEW

TABLE_LIMIT = 1 << 24  # elements of a transform's table; a longer signal wants a fast transform, which is not there


def transform(ctx: Context, x: Value, axis: int, length: Dim, inverse: bool, onesided: bool) -> Value:
    """A discrete Fourier transform of `length` points as a product with its matrix; the input is cut or zero-padded to them."""
    size, real = x.shape[axis], inverse and onesided
    count = as_dim(length if real or not onesided else as_expr(length) // 2 + 1)
    if all(isinstance(d, int) for d in (size, count)) and int(count) * int(size) > TABLE_LIMIT:
        raise ctx.unsupported(f"a transform of {size} to {count} points needs a table of {int(count) * int(size)} elements")
    attrs = {"points": count, "size": size, "length": length, "scale": "half" if real else "whole", "inverse": inverse}
    tables = (ctx.add(ops.DFT_TABLE, [], **attrs, sine=sine, dtype=x.dtype) for sine in (False, True))
    return ctx.add(ops.DFT, [x, *tables], axis=axis, real=real)


def _dft(ctx: Context) -> Value:
    x, inverse, onesided = ctx.value(0), bool(ctx.attrs["inverse"]), bool(ctx.attrs["onesided"])
    place: Dim = ctx.attrs["axis"] if ctx.opset < 20 else -2 if ctx.input(2) is None else ctx.given_dims(2, "the axis")[0]
    shape, chosen = x.shape, chosen_axes(ctx, (place,), len(x.shape) - 1, behind=1)
    if chosen is not None:
        if not all(d == 1 for d in x.shape[-1:]) and not all(d == 2 for d in x.shape[-1:]):
            raise ctx.unsupported("the last axis has an unknown extent")
        before, size, after = chosen.view_shape(ctx, x.shape[:-1])
        x = ctx.add(VIEW, [x], shape=(before, size, after, x.shape[-1]))
    axis = ctx.axis(place) if chosen is None else 1
    if ctx.input(1) is not None:
        (given,) = ctx.given_dims(1, "the length of the transform")
        length = ctx.size(given, "the length of the transform", least=1)
    else:
        length = as_dim(as_expr(x.shape[axis]) * 2 - 2) if inverse and onesided else x.shape[axis]
    if isinstance(length, int) and length < 1:
        raise ctx.unsupported(f"the transform has length {length}", "fix it with --dim")
    y = transform(ctx, x, axis, length, inverse, onesided)
    if chosen is None:
        return y
    extents = [select(hit, as_expr(y.shape[1]), as_expr(d)) for hit, d in zip(chosen.hits, shape, strict=False)]
    return ctx.add(VIEW, [y], shape=(*sized(ctx, extents, "the result", chosen.valid), y.shape[-1]))


def _stft(ctx: Context) -> Value:
    """Overlapping windowed frames of the signal, each transformed."""
    x, window = ctx.value(0), ctx.input(2)
    step = ctx.size(ctx.given_dims(1, "the frame step")[0], "the frame step", least=1)
    if ctx.input(3) is not None:
        length = ctx.size(ctx.given_dims(3, "the frame length")[0], "the frame length", least=1)
    else:
        length = x.shape[1] if window is None else window.shape[0]
    if any(isinstance(d, int) and d < 1 for d in (length, step)):
        raise ctx.unsupported("frame length or step is not positive")
    if len(x.shape) == 2:
        x = reshaped(ctx, x, (*x.shape, 1))
    count = ctx.size((as_expr(x.shape[1]) - length) // step + 1, "the number of frames")
    if window is not None and not same_dim(window.shape[0], length):
        ctx.require_same(window.shape[0], length)
        window = ctx.add(VIEW, [window], shape=(length,))
    frames = ctx.add(ops.FRAMES, [x, window], length=length, step=step, count=count)
    return transform(ctx, frames, 2, length, False, bool(ctx.attrs["onesided"]))


def _mel_weight_matrix(ctx: Context) -> Value:
    """Triangular filters, evenly spaced on the mel scale, over the bins of a spectrum [length // 2 + 1, filters]."""
    names = ("the number of filters", "the transform length", "the sample rate", "the lower edge", "the upper edge")
    numbers = [ctx.given_numbers(n, what)[0] for n, what in enumerate(names)]
    if unknown := [what for what, e in zip(names, numbers, strict=True) if e.op != "const"]:
        raise ctx.unsupported(f"{unknown[0]} is not known at compile time", "give its value when the model is compiled (values=, --value)")
    filters, length, rate, lower, upper = (float(e.attr) for e in numbers)
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


TABLE: Table = {"DFT": _dft, "STFT": _stft, "MelWeightMatrix": _mel_weight_matrix}
