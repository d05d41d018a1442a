"""Conversions from and to narrow types, in operations on integers and floats: all back ends and interpreters have them from here.

Floats are rounded once, to the nearest value (of two, the one with an even code), and keep the sign of zero and NaN where the type has one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tcomp.errors import IRError
from tcomp.ir.dtypes import BITS, MINI_FLOATS, NARROW, NARROW_INTEGERS, SCALE, SIGNED, UNSIGNED, MiniFloat, to_numpy
from tcomp.ir.expr import Expr, bitcast, cast, const, equal, not_equal, select, unary

_WIDE = {"float32": ("uint32", 23, 127), "float64": ("uint64", 52, 1023)}  # type of the bits, bits of the fraction, bias


def literal(value: Any, dtype: str) -> Expr:
    """A constant. Raises `IRError` if `value` is none of the type; 0 is the least value where the type has no 0."""
    with np.errstate(all="ignore"):
        given = np.asarray(value, np.float64)
        made = given.astype(np.int64).astype(to_numpy(dtype)) if dtype in NARROW_INTEGERS else given.astype(to_numpy(dtype))
    if dtype == SCALE and given == 0:
        return bitcast(const(0, "uint8"), dtype)
    if not np.array_equal(made.astype(np.float64), given, equal_nan=True):
        raise IRError(f"{value} is not a value of {dtype}")
    return bitcast(const(int(made.view(np.uint8)), "uint8"), dtype)


def convert(a: Expr, dtype: str, saturate: bool = True, rounding: str = "up") -> Expr:
    """`a` converted to `dtype`; at least one of the two types is narrow. Integers keep their low bits, floats are truncated to them. With
    `saturate`, floats out of range (infinities as well) become the largest finite value, else the infinity or NaN that the type has.
    `rounding` is that to powers of two: "up" (away from zero), "down", or "nearest" (ties up). Source: the tables of ONNX's Cast, which
    does not define negative numbers in an unsigned type (here NaN)."""
    if a.dtype == dtype:
        return a
    if a.dtype in NARROW:
        a = _integer(a) if a.dtype in NARROW_INTEGERS else _scale(a) if a.dtype == SCALE else _float(a, MINI_FLOATS[a.dtype])
    if dtype not in NARROW:
        return cast(a, dtype)
    if dtype in NARROW_INTEGERS:
        low = cast(a if a.dtype == "bool" or a.dtype in SIGNED or a.dtype in UNSIGNED else cast(a, "int32"), "uint8")
        return bitcast(low & ((1 << NARROW[dtype]) - 1), dtype)
    if dtype == SCALE:
        if a.dtype in ("int64", "uint64"):  # beyond 53 bits, those that float64 lacks are joined to one that says whether there are any
            low = a & 0x7FF
            a = select(a < 1 << 53, a, (a ^ low) | select(equal(low, 0), const(0, a.dtype), 0x800))
        return _to_scale(cast(a, "float64"), saturate, rounding)
    single = a.dtype == "float32" or BITS[a.dtype] <= 16  # holds it exactly
    return _to_float(cast(a, "float32" if single else "float64"), dtype, saturate)


def _integer(a: Expr) -> Expr:
    bits, unused = bitcast(a, "uint8"), 8 - NARROW[a.dtype]
    return bits & (0xFF >> unused) if a.dtype[0] == "u" else bitcast(bits << unused, "int8") >> unused


def _scale(a: Expr) -> Expr:
    code = cast(bitcast(a, "uint8"), "uint32")
    least, nan = const(1 << 22, "uint32"), const(0x7FC00000, "uint32")  # 2**-127 is subnormal in float32
    return bitcast(select(equal(code, 0), least, select(equal(code, 0xFF), nan, code << 23)), "float32")


def _float(a: Expr, f: MiniFloat) -> Expr:
    bits = cast(bitcast(a, "uint8"), "uint32")
    size, shift = bits & ((1 << (f.bits - 1)) - 1), 23 - f.fraction
    small = bitcast(cast(cast(size, "int32"), "float32") * 2.0 ** (1 - f.bias - f.fraction), "uint32")
    wide = select(size < 1 << f.fraction, small, (size << shift) + (127 - f.bias << 23))
    if f.infinity != f.top:
        special = equal(bits, f.nan) if f.nan == 0x80 else const(f.top, "uint32") < size
        nan = const(0x7FC00000, "uint32")
        wide = select(special, nan if f.nan in (f.infinity, 0x80) else select(equal(size, f.infinity), 0x7F800000, nan), wide)
    return bitcast(wide | ((bits & (1 << (f.bits - 1))) << (32 - f.bits)), "float32")


def _to_float(a: Expr, dtype: str, saturate: bool) -> Expr:
    f, (kind, fraction, bias) = MINI_FLOATS[dtype], _WIDE[a.dtype]
    width, shift = BITS[kind], fraction - f.fraction
    bits = bitcast(a, kind)
    size = bits & ((1 << (width - 1)) - 1)
    # The last bit of the sum with this power of two is that of the least subnormal number. Bits of floats count up with their size: no step
    # has to know whether a rounded number is a power of two larger.
    magic = fraction + 1 - f.bias - f.fraction
    small = bitcast(bitcast(size, a.dtype) + 2.0**magic, kind) - (magic + bias << fraction)
    normal = (size + ((size >> shift) & 1) + ((1 << (shift - 1)) - 1 - (bias - f.bias << fraction))) >> shift
    code = select(size < bias + 1 - f.bias << fraction, small, normal)
    code = select(const(f.top, kind) < code, const(f.top if saturate else f.infinity, kind), code)
    code = cast(select(unary("isnan", a), const(f.nan, kind), code), "uint8")
    sign = cast(bits >> (width - 1), "uint8") << (f.bits - 1)
    if f.nan == 0x80:  # a sign without a number would be NaN
        sign = select(not_equal(code & 0x7F, 0), sign, 0)
    return bitcast(code ^ sign, dtype)


def _to_scale(a: Expr, saturate: bool, rounding: str) -> Expr:
    _, fraction, bias = _WIDE["float64"]
    if rounding not in (added := {"up": (1 << fraction) - 1, "nearest": 1 << (fraction - 1), "down": 0}):
        raise IRError(f"there is no rounding `{rounding}`", hint=f"one of {', '.join(added)}")
    exponent = ((bitcast(a, "int64") + added[rounding]) >> fraction) - (bias - 127)  # of what is not negative
    code = select(exponent < 0, 0 if saturate else 255, select(const(254) < exponent, 254 if saturate else 255, exponent))
    return bitcast(cast(select(unary("isnan", a) | (a < 0.0), const(255), code), "uint8"), SCALE)
