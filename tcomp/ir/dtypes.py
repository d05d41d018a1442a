"""Element types: plain strings with NumPy's names ("float32", "int64", "bool", ...), plus "bfloat16"."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLOATS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
SIGNED = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
UNSIGNED = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
BITS = {**FLOATS, **SIGNED, **UNSIGNED, "bool": 8}


def is_float(dtype: str) -> bool:
    """Whether a dtype is one of `FLOATS`."""
    return dtype in FLOATS


def is_integer(dtype: str) -> bool:
    """True for signed and unsigned integers; False for bool."""
    return dtype in SIGNED or dtype in UNSIGNED


def itemsize(dtype: str) -> int:
    """Bytes per element (a bool takes one)."""
    return BITS[dtype] // 8


def to_numpy(dtype: str) -> np.dtype:
    """The NumPy dtype of an element type."""
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def integer_range(dtype: str) -> tuple[int, int]:
    """The smallest and largest value of an integer (or bool) type."""
    if dtype == "bool":
        return 0, 1
    bits = BITS[dtype]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype in SIGNED else (0, (1 << bits) - 1)


def lowest(dtype: str) -> float | int:
    """The identity of `max`: -inf for floats, the smallest integer otherwise."""
    return float("-inf") if is_float(dtype) else integer_range(dtype)[0]


def highest(dtype: str) -> float | int:
    """The identity of `min`: +inf for floats, the largest integer otherwise."""
    return float("inf") if is_float(dtype) else integer_range(dtype)[1]
