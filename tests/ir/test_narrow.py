"""Conversions from and to narrow types, against ml_dtypes: all codes, all numbers of 16 bits, and float32 near every tie and limit.

ml_dtypes does not saturate floats of 8 bits. To powers of two it rounds numbers below 2**-126, subnormal in float32, in another way; numbers
that round to less than 2**-127 become NaN here, and 2**-127 there.
"""

import ml_dtypes
import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ir import dtypes, narrow, te
from tcomp.ir.interpreters.te import evaluate

FLOATS = tuple(dtypes.MINI_FLOATS)


def codes(dtype):
    """Every element of a narrow type."""
    return np.arange(1 << dtypes.NARROW[dtype], dtype=np.uint8).view(dtypes.to_numpy(dtype))


def numbers(dtype):
    """float32 numbers where rounding to `dtype` is decided: its values, those halfway between two, their neighbours, and random ones."""
    with np.errstate(all="ignore"):
        values = np.unique(codes(dtype).astype(np.float32))
    values = values[np.isfinite(values)]
    ties = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1:] + (values[-1:] - values[-2:-1]) / 2])
    near = np.concatenate([np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)])
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 14, np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 3.4e38], np.float32)
    return np.concatenate([special, ties, -ties, near, -near, random])


def run(x, function):
    t = te.placeholder(x.shape, x.dtype.name, "x")
    return evaluate([te.compute(x.shape, lambda *i: function(t[i]), "y")], {t: x})[0]


def bits(x):
    return x.view(f"u{x.itemsize}")


def same(got, want):
    assert got.dtype == want.dtype
    a, b = (x.astype(np.float64) for x in (got, want))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a) & ~np.isnan(a), np.signbit(b) & ~np.isnan(b))


@pytest.mark.parametrize("dtype", dtypes.NARROW)
@pytest.mark.parametrize("to", ["float32", "float64", "float16", "bfloat16", "int8", "int32", "uint8", "bool"])
def test_from_every_code(dtype, to):
    x = codes(dtype)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32)
        if to in ("int8", "int32", "uint8") and dtype not in dtypes.NARROW_INTEGERS:
            info = np.iinfo(to)
            expected = np.clip(np.nan_to_num(np.trunc(wide.astype(np.float64)), posinf=info.max, neginf=info.min), info.min, info.max)
            expected = expected.astype(to)
        else:
            expected = (wide != 0) if to == "bool" else x.astype(dtypes.to_numpy(to))
    same(run(x, lambda e: te.cast(e, to)), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_rounded_once(dtype):
    x, kind = numbers(dtype), dtypes.to_numpy(dtype)
    halves = np.arange(1 << 16, dtype=np.uint16)
    top = float(ml_dtypes.finfo(kind).max)
    with np.errstate(all="ignore"):
        for values in (x, halves.view(np.float16), halves.view(ml_dtypes.bfloat16), x.astype(np.float64)):
            plain = values.astype(kind)  # bit for bit, NaN and -0 included
            np.testing.assert_array_equal(bits(run(values, lambda e: narrow.convert(e, dtype, saturate=False))), bits(plain))
            clipped = np.clip(values.astype(np.float64), -top, top).astype(kind)
            np.testing.assert_array_equal(bits(run(values, lambda e: te.cast(e, dtype))), bits(np.where(np.isnan(values), plain, clipped)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_float64_is_not_rounded_to_float32_first(dtype):
    wide = codes(dtype).astype(np.float64)
    values = np.unique(wide[np.isfinite(wide)])
    above = (values[1:] + values[:-1]) / 2 * (1 + 2.0**-50)
    expected = np.where(above > 0, values[1:], values[:-1])
    expected = np.where(above == 0, 0, expected)
    np.testing.assert_array_equal(run(above, lambda e: te.cast(te.cast(e, dtype), "float64")), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source", ["int8", "uint8", "int32", "uint32", "int64", "bool"])
def test_integers_to_floats(dtype, source):
    x = np.array([0, 1, 2, 3, 5, 17, 100, 127, 300, 4097, 70000, -1, -9, -300, 1 << 31, -(1 << 31)]).astype(source)
    with np.errstate(all="ignore"):
        expected = np.clip(x.astype(np.float64), *(float(f(ml_dtypes.finfo(dtype))) for f in (lambda i: i.min, lambda i: i.max)))
        np.testing.assert_array_equal(bits(run(x, lambda e: te.cast(e, dtype))), bits(expected.astype(dtypes.to_numpy(dtype))))


@pytest.mark.parametrize("dtype", dtypes.NARROW_INTEGERS)
def test_integers_keep_their_low_bits(dtype):
    kind = dtypes.to_numpy(dtype)
    for x in (np.arange(-128, 128).astype(np.int8), np.arange(-300, 300), np.arange(600, dtype=np.uint64), np.array([True, False])):
        same(run(x, lambda e: te.cast(e, dtype)), x.astype(np.int64).astype(kind))
    floats = np.array([0, -0.9, 1.9, -8, 7.5, np.nan, -1.5, 3], np.float32)
    same(run(floats, lambda e: te.cast(e, dtype)), np.nan_to_num(floats).astype(np.int64).astype(kind))
    same(run(codes("int4"), lambda e: te.cast(e, dtype)), codes("int4").astype(np.int64).astype(kind))


def test_upper_bits_mean_nothing():
    for dtype in dtypes.NARROW:
        if (width := dtypes.NARROW[dtype]) < 8:
            x = np.arange(256, dtype=np.uint8)
            low = (x & ((1 << width) - 1)).view(dtypes.to_numpy(dtype)).astype(np.float32)
            same(run(x.view(dtypes.to_numpy(dtype)), lambda e: te.cast(e, "float32")), low)


@pytest.mark.parametrize("rounding", ["up", "down", "nearest"])
@pytest.mark.parametrize("saturate", [True, False])
def test_powers_of_two(rounding, saturate):
    x = np.concatenate([numbers("float8_e8m0fnu"), 2.0 ** np.arange(-149, 128).astype(np.float32) * np.float32(1.25)])
    with np.errstate(all="ignore"):
        double = x.astype(np.float64)
    fraction, exponent = np.frexp(np.abs(double))  # fraction in [1/2, 1)
    power = exponent - 1 + {"up": fraction > 0.5, "down": fraction < 0, "nearest": fraction >= 0.75}[rounding]
    power = np.where(x == 0, -1000, np.where(np.isinf(x), 1000, power))
    code = np.where((power < -127) & saturate, 0, np.where((power > 127) & saturate, 254, power + 127))
    code = np.where(np.isnan(x) | (x < 0) | (code < 0) | (code > 254), 255, code)
    for values in (x, double):
        np.testing.assert_array_equal(bits(run(values, lambda e: narrow.convert(e, "float8_e8m0fnu", saturate, rounding))), code)
    with np.errstate(all="ignore"):
        normal = np.isnan(x) | (x >= 2.0**-126)
        if rounding == "nearest" and not saturate:
            np.testing.assert_array_equal(code[normal], bits(x[normal].astype(ml_dtypes.float8_e8m0fnu)))
    large = np.array([1 << 60, (1 << 60) + 1, (1 << 53) + 1, 1, 0, -5], np.int64)
    expected = {"up": [60, 61, 54, 0], "down": [60, 60, 53, 0], "nearest": [60, 60, 53, 0]}[rounding]
    found = bits(run(large, lambda e: narrow.convert(e, "float8_e8m0fnu", saturate, rounding)))
    np.testing.assert_array_equal(found, [*(127 + n for n in expected), 0 if saturate else 255, 255])


def test_constants_are_values_of_the_type():
    for dtype in dtypes.NARROW:
        for x in codes(dtype):
            same(run(np.zeros(1), lambda _, x=x, d=dtype: te.const(x.item(), d)), x[None])
    with pytest.raises(IRError, match="is not a value of int4"):
        te.const(8, "int4")
    with pytest.raises(IRError, match="is not a value of float4_e2m1fn"):
        te.const(1.25, "float4_e2m1fn")


def test_arithmetic_is_refused():
    x = te.placeholder((4,), "float8_e5m2", "x")
    for function in (lambda e: e + e, lambda e: -e, lambda e: te.equal(e, e), lambda e: te.maximum(e, 0), te.exp, te.isnan):
        with pytest.raises(IRError, match="stored, moved and converted"):
            te.compute((4,), lambda i, f=function: f(x[i]), "y")
