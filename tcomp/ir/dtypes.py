"""Element types: plain strings with NumPy's names ("float32", "int64", "bool", ...), plus those of ml_dtypes ("bfloat16", "int4", ...).

Narrow types (`NARROW`: integers of 2 and 4 bits, floats of 4 to 8) are types of storage: a program moves their elements and converts them,
and computes with what it converted them to. In memory each element takes a byte, whose upper bits mean nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

FLOATS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
SIGNED = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
UNSIGNED = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}


class MiniFloat(NamedTuple):
    """A float of `bits` bits: a sign, an exponent, and `fraction` bits of significand. Code 1 is the least subnormal number, `top` the code
    of the largest finite one. Larger numbers become the code `infinity` (an infinity, a NaN or `top`, whichever the type has), NaN becomes
    `nan`; if that is the code of -0, as in ml_dtypes, the type has no -0 (of 8 bits) or no NaN (of fewer)."""

    bits: int
    fraction: int
    bias: int
    top: int
    infinity: int
    nan: int


# Sources: P. Micikevicius et al., FP8 Formats for Deep Learning, 2022; B. Noune et al., 8-bit Numerical Formats for Deep Neural Networks,
# 2022 (fnuz); OCP Microscaling Formats (MX) Specification 1.0, 2023 (of 4 and 6 bits, e8m0).
MINI_FLOATS = {
    "float8_e4m3fn": MiniFloat(8, 3, 7, 0x7E, 0x7F, 0x7F), "float8_e4m3fnuz": MiniFloat(8, 3, 8, 0x7F, 0x80, 0x80),
    "float8_e5m2": MiniFloat(8, 2, 15, 0x7B, 0x7C, 0x7E), "float8_e5m2fnuz": MiniFloat(8, 2, 16, 0x7F, 0x80, 0x80),
    "float6_e2m3fn": MiniFloat(6, 3, 1, 0x1F, 0x1F, 0x20), "float6_e3m2fn": MiniFloat(6, 2, 3, 0x1F, 0x1F, 0x20),
    "float4_e2m1fn": MiniFloat(4, 1, 1, 0x7, 0x7, 0x8),
}  # fmt: skip
SCALE = "float8_e8m0fnu"  # powers of two, from 2**-127 (code 0) to 2**127; 255 is NaN
NARROW_INTEGERS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4}
NARROW_FLOATS = {**{dtype: f.bits for dtype, f in MINI_FLOATS.items()}, SCALE: 8}
NARROW = {**NARROW_INTEGERS, **NARROW_FLOATS}  # bits that mean something
BITS = {**FLOATS, **SIGNED, **UNSIGNED, "bool": 8, **dict.fromkeys(NARROW, 8)}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype: itself, or that of NumPy's or ml_dtypes' (`np.float32`, `np.dtype("int8")`, `float`)."""
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name


def is_float(dtype: str) -> bool:
    """Whether a dtype is one of `FLOATS`."""
    return dtype in FLOATS


def is_integer(dtype: str) -> bool:
    """True for signed and unsigned integers of a byte and more; False for bool."""
    return dtype in SIGNED or dtype in UNSIGNED


def itemsize(dtype: str) -> int:
    """Bytes per element (a bool takes one)."""
    return BITS[dtype] // 8


def to_numpy(dtype: str) -> np.dtype:
    """The NumPy dtype of an element type."""
    return np.dtype(getattr(ml_dtypes, dtype)) if dtype == "bfloat16" or dtype in NARROW else np.dtype(dtype)


def integer_range(dtype: str) -> tuple[int, int]:
    """The smallest and largest value of an integer (or bool) type."""
    if dtype == "bool":
        return 0, 1
    bits = NARROW_INTEGERS.get(dtype) or BITS[dtype]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype[0] == "i" else (0, (1 << bits) - 1)


def lowest(dtype: str) -> float | int:
    """The identity of `max`: -inf for floats, the smallest integer otherwise."""
    return float("-inf") if is_float(dtype) else integer_range(dtype)[0]


def highest(dtype: str) -> float | int:
    """The identity of `min`: +inf for floats, the largest integer otherwise."""
    return float("inf") if is_float(dtype) else integer_range(dtype)[1]
