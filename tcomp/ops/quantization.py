"""Quantisation: real = (quantised - zero point) * scale, per tensor, per slice of one axis, or per block along it.

Scales and zero points are scalars (or one element), vectors along `axis`, or of the rank of the tensor with its `axis` extent
divided by `block`.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.broadcasting import BYTES, broadcast_shape, require_same, require_same_shape, widened
from tcomp.ir.dtypes import NARROW_FLOATS, NARROW_INTEGERS, integer_range, is_float
from tcomp.ir.expr import Expr, as_expr, cast, const, maximum, minimum, select
from tcomp.ir.graph import Operator
from tcomp.ir.narrow import convert
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor, broadcast_read
from tcomp.ops.movement import valid_index

MANY_ROWS = 32  # of activations: from here on writing the weights out once costs less than unpacking them for each tile of rows


def _parameter(p: Tensor, i: tuple[Expr, ...], x: Tensor, axis: int, block: int | None = None) -> Expr:
    """The scale or zero point that belongs to element `i` of `x`; without blocks (None), one of the rank of `x` broadcasts."""
    if all(d == 1 for d in p.shape) and (p.ndim != x.ndim or not block):
        return p[(0,) * p.ndim]
    if block is None and p.ndim == x.ndim > 1:
        return broadcast_read(p, i)
    if not 0 <= axis < x.ndim:
        raise IRError(f"quantisation along axis {axis} of {x}")
    if p.ndim == 1 and not block:
        require_same(p.shape[0], x.shape[axis], "a scale for each slice")
        return p[i[axis]]
    if p.ndim != x.ndim or block is None or block < 1:
        raise IRError(f"scales or zero points {p} do not fit {x}", why=f"axis {axis}, block {block}")
    blocks = [as_dim((as_expr(d) + (block - 1)) // block) if a == axis else d for a, d in enumerate(x.shape)]
    require_same_shape(p.shape, blocks, "scales and blocks")
    return p[tuple(index // block if a == axis else index for a, index in enumerate(i))]


def quantize(
    x: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int, dtype: str, precision: str, saturate: bool = True
) -> Tensor:
    """saturate(round(x / scale) + zero), ties to even; the division in type `precision`. Floats are rounded once, to `dtype`; where not
    `saturate`, those out of range become infinities or NaN."""

    def element(*i: Expr) -> Expr:
        value = widened(cast(x[i], precision) / cast(_parameter(scale, i, x, axis, block), precision))
        value = value if dtype in NARROW_FLOATS else te.round(value)
        value = value if zero is None else value + cast(_parameter(zero, i, x, axis, block), value.dtype)
        if dtype in NARROW_FLOATS:
            return convert(value, dtype, saturate)
        if dtype in NARROW_INTEGERS:
            low, high = integer_range(dtype)
            value = minimum(maximum(value, float(low)), float(high))
        return cast(value, dtype)  # saturates

    return te.compute(x.shape, element, "quantize")


def dequantize(x: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int, dtype: str) -> Tensor:
    """(x - zero) * scale, as `dtype`; `zero` may be a float."""

    wide = "float32" if x.dtype in NARROW_FLOATS else "int32"

    def element(*i: Expr) -> Expr:
        value, factor = cast(x[i], wide), widened(_parameter(scale, i, x, axis, block))
        if zero is not None:
            exact = factor.dtype if is_float(zero.dtype) else wide
            value = cast(value, exact) - cast(_parameter(zero, i, x, axis, block), exact)
        return cast(cast(value, factor.dtype) * factor, dtype)

    return te.compute(x.shape, element, "dequantize")


def dynamic_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, zero point as uint8) that map [min(x, 0), max(x, 0)] onto 0..255; zeros alone have a range of 1, as in ONNX's reference."""
    axes = tuple(te.reduce_axis(d, f"r{n}") for n, d in enumerate(x.shape))
    low = te.compute((), lambda: minimum(te.min(x[axes], axes), 0.0), "low")
    high = te.compute((), lambda: maximum(te.max(x[axes], axes), 0.0), "high")
    span = te.compute((), lambda: select(te.equal(high[()], low[()]), 1.0, high[()] - low[()]), "span")
    scale = te.compute((), lambda: span[()] / 255.0, "scale")
    zero = te.compute((), lambda: cast(te.round(minimum(maximum((0.0 - low[()]) / scale[()], 0.0), 255.0)), "uint8"), "zero_point")
    return scale, zero


def centred(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """x - zero as int32; `zero` is a scalar, a vector along `axis`, or broadcasts to x."""
    if x.dtype in NARROW_FLOATS:
        raise IRError(f"integers are wanted, and {x} holds floats")
    if zero is not None and zero.ndim == x.ndim:
        broadcast_shape(x.shape, zero.shape)

    def element(*i: Expr) -> Expr:
        value = cast(x[i], "int32")
        return value if zero is None else value - cast(_parameter(zero, i, x, axis), "int32")

    return te.compute(x.shape, element, "centred")


def unpack(x: Tensor, bits: int, count: int) -> Tensor:
    """Numbers of `bits` (1, 2, 4 or 8) bits in bytes, the lowest bits first: uint8 [..., bytes] -> uint8 [..., count]."""
    each = 8 // bits
    if x.dtype != "uint8" or 8 % bits or not isinstance(x.shape[-1], int) or count > x.shape[-1] * each:
        raise IRError(f"{count} numbers of {bits} bits in {x!r}")

    def element(*i: Expr) -> Expr:
        byte = cast(x[(*i[:-1], i[-1] // each)], "int32")
        return cast((byte >> cast(i[-1] % each * bits, "int32")) & ((1 << bits) - 1), "uint8")

    return te.compute((*x.shape[:-1], count), element, "unpack")


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of `bits` bits, one in each element of uint8 [..., n], as bytes, the lowest bits first: what `unpack` takes apart."""
    each = 8 // bits
    parts = numbers.reshape(*numbers.shape[:-1], -1, each)
    return np.bitwise_or.reduce([parts[..., p] << np.uint8(p * bits) for p in range(each)]) if each > 1 else np.ascontiguousarray(numbers)


def block_product(
    x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor, choice: Tensor | None, bits: int, block: int, rounded: int = 0
) -> Tensor:
    """y[..., o] = sum over k of x[..., k] * (w[o, k] - zeros[o, k // block]) * scales[o, k // block], w being numbers of `bits` bits.

    w uint8 [out, bytes] is packed as `unpack` says; x [..., in] has as many elements as a row of it. With `choice` [rows, slots] the
    weights have experts in front, each element of `choice` has its own, and x is [rows, slots or 1, in]. Weights are never written out.
    x may be rounded to integers of `rounded` bits (8 or 16; 0: not), block by block (`passes.stored_weights`); here it is not.
    """
    each, size = 8 // bits, w.shape[-1]
    if rounded not in (0, 8, 16):
        raise IRError(f"activations rounded to {rounded} bits")
    if w.dtype != "uint8" or not isinstance(size, int) or block % each or size * each % block:
        raise IRError(f"weights {w!r} are not blocks of {block} numbers of {bits} bits")
    require_same(x.shape[-1], size * each, "features of quantised weights")
    own, count = block // each, size * each // block  # bytes of a block, blocks of a row
    at, number = te.reduce_axis(own, "rk"), te.reduce_axis(count, "rb") if count > 1 else const(0)
    over, rows = [number, at] if count > 1 else [at], x.shape[:-1] if choice is None else choice.shape

    def part(p: int) -> Tensor:  # of each byte, the numbers at position p: plain loads of the weights
        def element(*i: Expr) -> Expr:
            row = i[-1:] if choice is None else (valid_index(choice[i[:-1]], w.shape[0]), i[-1])
            lead = tuple(0 if d == 1 else n for d, n in zip(x.shape[:-1], i[:-1], strict=True))
            value = (cast(w[(*row, number * own + at)], "int32") >> (p * bits)) & ((1 << bits) - 1)
            factor = widened(scales[(*row, number)])
            weight = (cast(value, factor.dtype) - cast(zeros[(*row, number)], factor.dtype)) * factor
            return te.sum(widened(x[(*lead, (number * own + at) * each + p)]) * weight, over)

        return te.compute((*rows, w.shape[-2]), element, f"part{p}")

    parts = [part(p) for p in range(each)]
    return te.compute((*rows, w.shape[-2]), lambda *i: cast(reduce(add, [t[i] for t in parts]), x.dtype), "block_product")


def swap_sign(x: Tensor) -> Tensor:
    """uint8 as int8 or the reverse, shifted by 128: the same quantised numbers once the zero point is shifted by 128 as well."""
    if x.dtype not in BYTES:
        raise IRError(f"{x} does not hold bytes")
    other, offset = ("int8", -128) if x.dtype == "uint8" else ("uint8", 128)
    return te.compute(x.shape, lambda *i: cast(cast(x[i], "int32") + offset, other), "swap_sign")


def requantize(x: Tensor, a_scale: Tensor, b_scale: Tensor, y_scale: Tensor, zero: Tensor, axis: int) -> Tensor:
    """saturate(round(x * a_scale * b_scale / y_scale) + zero) of an int32 accumulator; `b_scale` may be a vector along `axis`."""
    if x.dtype != "int32" or is_float(zero.dtype):
        raise IRError(f"requantisation of {x.dtype} to {zero.dtype}")

    def element(*i: Expr) -> Expr:
        a, b, y = (widened(_parameter(p, i, x, axis)) for p in (a_scale, b_scale, y_scale))
        factor = a * b / y
        return cast(te.round(cast(x[i], factor.dtype) * factor) + cast(_parameter(zero, i, x, axis), factor.dtype), zero.dtype)  # saturates

    return te.compute(x.shape, element, "requantize")


QUANTIZE, DEQUANTIZE = Operator("quantize", quantize), Operator("dequantize", dequantize)
CENTRED, REQUANTIZE = Operator("centred", centred), Operator("requantize", requantize)
DYNAMIC_RANGE, SWAP_SIGN = Operator("dynamic_range", dynamic_range), Operator("swap_sign", swap_sign)
UNPACK, BLOCK_PRODUCT = Operator("unpack", unpack), Operator("block_product", block_product)
