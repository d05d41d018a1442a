"""The meaning of scalar operators, against Python's exact arithmetic."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import IRError
from tcomp.ir.interpreters import semantics
from tcomp.ir.scalar_operators import fold_binary, wrap

INT8 = np.arange(-128, 128).astype(np.int8)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "min", "max", "floordiv", "mod", "truncdiv", "truncmod", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_all_pairs_of_bytes(op, dtype):
    a = INT8.astype(dtype)
    result = semantics.apply(op, dtype, [a[:, None], a[None, :]])
    assert result.dtype == dtype
    for x in range(0, 256, 5):
        for y in range(256):
            exact = fold_binary(op, int(a[x]), int(a[y]), dtype)
            assert result[x, y] == (0 if exact is None else wrap(exact, dtype)), (op, a[x], a[y])


def test_erf_is_accurate():
    x = np.concatenate([np.linspace(-7, 7, 20001), [0.0, -0.0, np.inf, -np.inf, 1e-300]])
    exact = np.array([math.erf(v) for v in x])
    assert np.abs(semantics.erf(x) - exact).max() < 3e-16
    assert np.isnan(semantics.erf(np.array([np.nan])))


@pytest.mark.parametrize("op", ["exp", "log", "tanh", "sin", "cos", "tan", "asinh", "atan", "sinh", "cosh", "sqrt", "erf"])
def test_float32_functions_round_correctly(op):
    x = np.random.default_rng(0).uniform(0.01, 5, 500).astype(np.float32)
    exact = np.array([getattr(math, op)(float(v)) for v in x])
    result = semantics.apply(op, "float32", [x])
    assert result.dtype == np.float32
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(result - exact) / ulp).max() <= 0.5 + 1e-6


def test_conversions_saturate_and_truncate():
    x = np.array([np.nan, np.inf, -np.inf, 3.99, -3.99, 1e20, -1e20, 255.5, -0.5])
    expected = {"int8": [0, 127, -128, 3, -3, 127, -128, 127, 0], "uint8": [0, 255, 0, 3, 0, 255, 0, 255, 0]}
    for dtype, values in expected.items():
        np.testing.assert_array_equal(semantics.cast(x, dtype), np.array(values, dtype))
    np.testing.assert_array_equal(semantics.cast(x, "int64")[5:7], [2**63 - 1, -(2**63)])
    np.testing.assert_array_equal(semantics.cast(np.array([300, -1]), "uint8"), np.array([44, 255], np.uint8))
    np.testing.assert_array_equal(semantics.cast(np.array([0.0, -0.0, np.nan, 0.1]), "bool"), [False, False, True, True])
    assert semantics.cast(np.array([3.14159], np.float32), "bfloat16").dtype == ml_dtypes.bfloat16


def test_min_and_max_propagate_nan():
    a, b = np.array([np.nan, 1, np.nan], np.float32), np.array([1, np.nan, np.nan], np.float32)
    assert np.isnan(semantics.apply("min", "float32", [a, b])).all()
    assert np.isnan(semantics.apply("max", "float32", [a, b])).all()


def test_shifts_and_bits():
    a, by = np.array([1, -1, -8, 5], np.int32), np.array([31, 40, 1, 0], np.int32)
    np.testing.assert_array_equal(semantics.apply("shl", "int32", [a, by]), np.array([-(2**31), 0, -16, 5], np.int32))
    np.testing.assert_array_equal(semantics.apply("shr", "int32", [a, by]), np.array([0, -1, -4, 5], np.int32))
    np.testing.assert_array_equal(semantics.apply("popcount", "int32", [a]), np.array([1, 32, 29, 2], np.int32))
    np.testing.assert_array_equal(semantics.apply("bitcast", "int32", [np.array([1.0], np.float32)]), [0x3F800000])


def test_float16_rounds_after_every_step():
    x = np.array([2048.0], np.float16)
    one = np.array([1.0], np.float16)
    step = semantics.apply("add", "float16", [x, one])
    assert semantics.apply("add", "float16", [step, one]) == 2048  # each + 1 is lost


floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(floats32, floats32, floats32)
def test_fma_rounds_once(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    result = float(semantics.apply("fma", "float32", [np.array([v], np.float32) for v in (a, b, c)])[0])
    if math.isinf(result):
        assert abs(exact) >= Fraction(2) ** 127
        return
    with np.errstate(over="ignore"):
        below, above = (float(np.nextafter(np.float32(result), np.float32(d))) for d in (-np.inf, np.inf))
    distance = abs(Fraction(result) - exact)
    assert all(math.isinf(v) or distance <= abs(Fraction(v) - exact) for v in (below, above))


@pytest.mark.parametrize(
    ("op", "dtype"), [("div", "int32"), ("sub", "bool"), ("and", "float32"), ("not", "float32"), ("exp", "int64"), ("neg", "bool")]
)
def test_undefined_operators_are_refused(op, dtype):
    x = np.ones(2, dtype)
    with pytest.raises(IRError, match=f"`{op}` is not defined for {dtype}"):
        semantics.apply(op, dtype, [x, x][: 2 if op in ("div", "sub", "and") else 1])
