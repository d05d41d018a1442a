"""Division by a constant, in two operations, gives the bits of a division."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from tcomp.codegen.division import reciprocal
from tcomp.target import CpuTarget
from tests.codegen.jit import HOST
from tests.codegen.test_math import apply

DIVISORS = (6.0, 3.0, -7.0, 49.0, 768.0, 3136.0, float(np.float32(2**0.5)), float(np.float32(0.1)), 1e-9, 1e9, 0.25, -64.0, 1.0)
SIGNIFICANDS = np.arange(1 << 23, 1 << 24, dtype=np.int64).astype(np.float32)  # all of float32
HASWELL, BASELINE = CpuTarget.parse("cpu -mcpu=haswell"), CpuTarget.parse("cpu -mcpu=x86-64")
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:underflow")


def wrong(divisor: float, high: float, low: float, x: np.ndarray) -> int:
    """How many of x, float32, fma(x, high, x * low) does not divide as NumPy does."""
    product, small = x * np.float64(high), np.float64(x * np.float32(low))  # the product of two float32 is exact in float64
    total = product + small
    back = total - product
    lost = (product - (total - back)) + (small - back)  # what the sum has lost (Knuth), which tells the odd of the two neighbours:
    even = (total.view(np.int64) & 1 == 0) & (lost != 0)  # rounded to odd first, a number is rounded once
    total = np.where(even, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return int(np.count_nonzero(np.float32(total) != x / np.float32(divisor)))


@pytest.mark.parametrize("divisor", DIVISORS)
def test_all_significands(divisor):
    parts = reciprocal(divisor, "float32")
    assert parts is not None
    assert wrong(divisor, *parts, SIGNIFICANDS) == 0


def test_what_is_refused_would_be_wrong():
    """A divisor is refused for a quotient that comes out wrong, not out of caution."""
    numbers = random.Random(0)
    refused = [c for c in (float(np.float32(numbers.uniform(1, 2))) for _ in range(60)) if reciprocal(c, "float32") is None]
    assert 0 < len(refused) < 15
    exact = 1 / Fraction(refused[0])
    high = Fraction(int(exact * (1 << 24)), 1 << 24)  # 1 / 2 < exact < 1
    assert 0 < wrong(refused[0], float(high), float(exact - high), SIGNIFICANDS) < 10


@pytest.mark.parametrize("divisor", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 1e30])
def test_divisors_that_stay(divisor):
    assert reciprocal(float(divisor), "float32") is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("divisor", [6.0, -49.0, 0.1, 8.0, 1e30, 0.0])
@pytest.mark.parametrize("target", [HOST, HASWELL, BASELINE], ids=["host", "haswell", "baseline"])
def test_native(dtype, divisor, target):
    """All exponents but the least, and infinities, zeros, NaN."""
    rng, kind = np.random.default_rng(0), np.dtype(dtype).type
    least, most = (-90, 127) if dtype == "float32" else (-890, 1023)
    x = np.ldexp(rng.uniform(1, 2, 4096), rng.integers(least, most, 4096)).astype(dtype) * rng.choice([-1, 1], 4096).astype(dtype)
    x[:6] = 0, -0.0, np.inf, -np.inf, np.nan, kind(np.finfo(dtype).max)
    with np.errstate(all="ignore"):
        expected = x / kind(divisor)
    found = apply(lambda a: a / kind(divisor).item(), x, target=target, lanes=8)
    bits = np.int32 if dtype == "float32" else np.int64
    same = (found.view(bits) == expected.view(bits)) | (np.isnan(found) & np.isnan(expected))
    assert same.all(), (x[~same], found[~same], expected[~same])
