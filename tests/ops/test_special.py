"""Special functions against SciPy's, in both types of floats, in the interpreter and as machine code; and their derivatives."""

import numpy as np
import pytest

import tcomp
from tcomp import te
from tcomp.ops import special as ops

scipy = pytest.importorskip("scipy.special", reason="SciPy is not installed: pip install scipy")

UNARY = {
    ops.ERF_INV: (scipy.erfinv, -1, 1), ops.ERFC: (scipy.erfc, -6, 9), ops.ERFCX: (scipy.erfcx, -5, 60),
    ops.LGAMMA: (scipy.gammaln, -9.5, 200), ops.DIGAMMA: (scipy.digamma, -9.5, 200), ops.BESSEL_I0E: (scipy.i0e, -100, 100),
    ops.BESSEL_I1E: (scipy.i1e, -100, 100), ops.BESSEL_I0: (scipy.i0, -9, 9), ops.BESSEL_I1: (scipy.i1, -9, 9),
}  # fmt: skip
LIMITS = {"float32": 5e-5, "float64": 1e-12}  # relative to the result, or to 1 where that is less


def near(found, wanted, dtype, scale=1.0):
    error = np.abs(found - wanted) / np.maximum(np.abs(wanted), scale)
    assert error.max() < LIMITS[dtype], f"{error.max()} at {error.argmax()}"


def away_from_poles(x):
    """Functions that are infinite at 0, -1 and so on are not compared next to these, where the rounding of x decides."""
    return x[(x > 0) | (np.abs(x - np.rint(x)) > 0.05)]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.name)
def test_unary(apply, op, dtype):
    function, low, high = UNARY[op]
    x = away_from_poles(np.random.default_rng(0).uniform(low, high, 400).astype(dtype))
    A = te.placeholder(x.shape, dtype, name="A")
    wanted = function(x.astype(np.float64))
    scale = 1e-30 if op in (ops.ERFC, ops.ERFCX) and dtype == "float64" else 1.0
    near(tcomp.build([A, op.function(A)], threads=1)(x), wanted, dtype, scale)
    near(apply(op, x[:40]), wanted[:40], dtype, scale)


@pytest.mark.parametrize("dtype", LIMITS)
def test_zeta_and_derivatives_of_digamma(apply, dtype):
    rng = np.random.default_rng(0)
    s, q, order = rng.uniform(1.05, 15, 200).astype(dtype), rng.uniform(0.3, 30, 200).astype(dtype), rng.integers(0, 5, 200).astype(dtype)
    near(apply(ops.ZETA, s, q), scipy.zeta(s.astype(np.float64), q.astype(np.float64)), dtype)
    near(apply(ops.POLYGAMMA, order, q), scipy.polygamma(order.astype(int), q.astype(np.float64)), dtype)
    for n in range(1, 5):
        near(apply(ops.DIGAMMA_DERIVATIVE, q, order=n), scipy.polygamma(n, q.astype(np.float64)), dtype)


def test_reflection_of_derivatives_of_digamma(apply):
    """By what they are at x + 1, step by step."""
    x = away_from_poles(np.linspace(-7.3, 0.45, 97))
    for n in range(1, 5):
        steps = np.arange(9)[:, None]
        wanted = scipy.polygamma(n, x + 9) + (-1) ** (n + 1) * scipy.factorial(n) * np.sum((x + steps) ** (-n - 1.0), 0)
        near(apply(ops.DIGAMMA_DERIVATIVE, x, order=n), wanted, "float64")


def test_where_they_are_infinite_or_unknown(apply):
    inf, nan = np.inf, np.nan
    for op, x, wanted in (
        (ops.ERF_INV, [-1, 1, 1.5, 0, nan], [-inf, inf, nan, 0, nan]),
        (ops.ERFC, [-inf, inf, 0, 30, nan], [2, 0, 1, 0, nan]),
        (ops.ERFCX, [-inf, inf, 0], [inf, 0, 1]),
        (ops.LGAMMA, [0, -1, inf, -inf, 1, 2, nan], [inf, inf, inf, inf, 0, 0, nan]),
        (ops.DIGAMMA, [-1, -2, nan], [nan, nan, nan]),
        (ops.BESSEL_I0E, [0, nan], [1, nan]),
        (ops.BESSEL_I1E, [0, nan], [0, nan]),
    ):
        for dtype in LIMITS:
            with np.errstate(all="ignore"):
                np.testing.assert_allclose(apply(op, np.array(x, dtype)), wanted, atol=1e-6)


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.name)
def test_derivatives(op):
    """Against differences, where the approximations of each function join as well."""
    _, low, high = UNARY[op]
    x = away_from_poles(np.linspace(max(low, -9) * 0.99, min(high, 9) * 0.99, 101))
    A = te.placeholder(x.shape, "float64", name="A")
    y = op.function(A)
    value, slope = tcomp.build([A, y], threads=1), tcomp.build([A, te.vjp(y, A)], threads=1)
    near(slope(x), (value(x + 1e-6) - value(x - 1e-6)) / 2e-6, "float32", 1e-3)
