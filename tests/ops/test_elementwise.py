import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.broadcasting import broadcast_shape
from tcomp.ops import elementwise as ops

X = np.array([-3.5, -1.0, -0.25, -0.0, 0.0, 0.25, 0.5, 1.5, 2.5, 4.0, np.inf, -np.inf, np.nan], np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


REFERENCE = {
    ops.ABS: np.abs, ops.NEG: np.negative, ops.CEIL: np.ceil, ops.FLOOR: np.floor, ops.ROUND: np.rint, ops.EXP: np.exp,
    ops.SIGN: np.sign, ops.RECIPROCAL: np.reciprocal, ops.RELU: lambda x: np.maximum(x, 0), ops.TANH: np.tanh, ops.SQRT: np.sqrt,
    ops.SIGMOID: sigmoid, ops.SOFTPLUS: lambda x: np.logaddexp(x, 0), ops.SOFTSIGN: lambda x: x / (1 + np.abs(x)),
    ops.MISH: lambda x: x * np.tanh(np.logaddexp(x, 0)), ops.HARD_SWISH: lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    ops.ISNAN: np.isnan, ops.TRUNC: np.trunc, ops.EXPM1: np.expm1, ops.SIGN_BIT: np.signbit,
    ops.LOG1P: lambda x: np.log1p(np.where(x < -1, np.nan, x)), ops.EXP2: np.exp2, ops.LOG2: np.log2, ops.LOG10: np.log10,
    ops.RSQRT: lambda x: 1 / np.sqrt(x), ops.ANGLE: lambda x: np.where(np.isnan(x), x, np.where(x < 0, np.pi, 0)),
}  # fmt: skip


def test_functions_of_two_numbers(apply):
    """At all signs of zero and infinity, and where squares would overflow."""
    values = np.float32([0, -0.0, 1e-30, 1, -2, 1e30, np.inf, -np.inf, np.nan])
    y, x = (a.ravel().copy() for a in np.meshgrid(values, values))
    known = np.isfinite(y) & np.isfinite(x)
    np.testing.assert_allclose(apply(ops.ATAN2, y, x), np.arctan2(y, x), rtol=1e-6)
    np.testing.assert_allclose(apply(ops.HYPOT, y, x)[known], np.hypot(y, x)[known], rtol=1e-6)
    np.testing.assert_array_equal(apply(ops.FMAX, y, x), np.fmax(y, x))
    np.testing.assert_array_equal(apply(ops.FMIN, y, x), np.fmin(y, x))
    found = apply(ops.COPY_SIGN, y, x)
    np.testing.assert_array_equal(found[~np.isnan(y)], np.copysign(y, x)[~np.isnan(y)])


@pytest.mark.parametrize("op", REFERENCE, ids=lambda op: op.name)
def test_unary(apply, op):
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(apply(op, X), REFERENCE[op](X), rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "attrs", "reference"),
    [
        (ops.LEAKY_RELU, {"alpha": 0.1}, lambda x: np.where(x < 0, 0.1 * x, x)),
        (ops.THRESHOLDED_RELU, {"alpha": 1.0}, lambda x: np.where(x > 1, x, 0)),
        (ops.ELU, {"alpha": 2.0}, lambda x: np.where(x < 0, 2 * np.expm1(x), x)),
        (ops.CELU, {"alpha": 2.0}, lambda x: np.maximum(x, 0) + np.minimum(0, 2 * np.expm1(x / 2))),
        (ops.SELU, {"alpha": 1.6, "gamma": 1.05}, lambda x: 1.05 * np.where(x > 0, x, 1.6 * np.expm1(x))),
        (ops.SWISH, {"alpha": 2.0}, lambda x: x * sigmoid(2 * x)),
        (ops.GELU, {"approximate": "none"}, lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
        (ops.GELU, {"approximate": "tanh"}, lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        (ops.HARD_SIGMOID, {"alpha": 0.25, "beta": 0.4}, lambda x: np.clip(0.25 * x + 0.4, 0, 1)),
        (ops.SHRINK, {"lambd": 1.0, "bias": 0.5}, lambda x: np.where(x < -1, x + 0.5, np.where(x > 1, x - 0.5, 0))),
        (ops.CLIP_CONST, {"low": -1.0, "high": None}, lambda x: np.maximum(x, -1)),
        (ops.SCALE, {"factor": 0.5}, lambda x: x * 0.5),
        (ops.ISINF, {"positive": False, "negative": True}, np.isneginf),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_unary_with_attributes(apply, op, attrs, reference):
    x = X[np.isfinite(X)]
    np.testing.assert_allclose(apply(op, x, **attrs), reference(x.astype(np.float64)), rtol=2e-6, atol=1e-7)


def test_gradual_underflow_of_softplus(apply):
    x = np.array([-20.0, -30.0, 90.0], np.float32)
    np.testing.assert_allclose(apply(ops.SOFTPLUS, x), np.logaddexp(x.astype(np.float64), 0), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint8", "int64"])
@pytest.mark.parametrize("symbolic", [False, True])
def test_arithmetic_broadcasts(apply, dtype, symbolic):
    rng = np.random.default_rng(0)
    x, y = (rng.integers(1, 100, shape).astype(dtype) for shape in ((2, 1, 5), (3, 1)))
    for op, function in ((ops.ADD, np.add), (ops.SUB, np.subtract), (ops.MUL, np.multiply), (ops.MAX, np.maximum)):
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(apply(op, x, y, symbolic=symbolic), function(x, y), strict=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(-128, 127), st.integers(-128, 127))
def test_integer_division_truncates(apply, a, b):
    x, y = np.array(a, np.int8), np.array(b, np.int8)
    if b == 0 or (a, b) == (-128, -1):
        return
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    assert apply(ops.DIV, x, y) == quotient
    assert apply(ops.FMOD, x, y) == a - quotient * b
    assert apply(ops.MOD, x, y) == a % b


def test_quotients_are_rounded_down_or_towards_zero(apply):
    x, y = np.float32([7, -7, 7, -7, 0.3, 6]), np.float32([2, 2, -2, -2, 0.1, 3])
    np.testing.assert_array_equal(apply(ops.FLOOR_DIVIDE, x, y), np.floor_divide(x, y))
    np.testing.assert_array_equal(apply(ops.TRUNC_DIVIDE, x, y), np.trunc(x / y))
    whole = [v.astype(np.int32) for v in (x[:4], y[:4])]
    np.testing.assert_array_equal(apply(ops.FLOOR_DIVIDE, *whole), [3, -4, -4, 3], strict=False)
    np.testing.assert_array_equal(apply(ops.TRUNC_DIVIDE, *whole), [3, -3, -3, 3], strict=False)


def test_functions_of_floats_take_other_numbers(apply):
    """Integers are whole and known, False is less than True, and no bool is negative."""
    x, flags = np.int32([-3, 0, 4]), np.array([False, True])
    for op, wanted in ((ops.FLOOR, x), (ops.ROUND, x), (ops.ISNAN, [False] * 3), (ops.SIGN_BIT, [True, False, False])):
        np.testing.assert_array_equal(apply(op, x), wanted)
    np.testing.assert_array_equal(apply(ops.ISINF, x, positive=True, negative=True), [False] * 3)
    np.testing.assert_array_equal(apply(ops.SIGN_BIT, flags), [False] * 2)
    np.testing.assert_array_equal(apply(ops.LESS, flags[:, None], flags), [[False, True], [False, False]])
    np.testing.assert_array_equal(apply(ops.GREATER_EQUAL, flags[:, None], flags), [[True, False], [True, True]])
    np.testing.assert_array_equal(apply(ops.NOT_EQUAL, X, X), np.isnan(X))


def test_power_keeps_the_type_of_the_base(apply):
    np.testing.assert_array_equal(
        apply(ops.POW, np.array([2, -3], np.int32), np.array([3.0, 2.0], np.float32)), np.array([8, 9], np.int32), strict=True
    )
    np.testing.assert_allclose(
        apply(ops.POW, np.array([4.0], np.float32), np.array([-1], np.int64)), np.array([0.25], np.float32), strict=True
    )


def test_where_and_clip_by_tensors(apply):
    c, x, y = np.array([True, False]), np.array([[1], [2]], np.float32), np.float32(7)
    np.testing.assert_array_equal(apply(ops.WHERE, c, x, y), [[1, 7], [2, 7]])
    np.testing.assert_array_equal(apply(ops.CLIP, x, np.float32(1.5), None), [[1.5], [2]])
    with pytest.raises(IRError, match="more than one element"):
        apply(ops.CLIP, x, np.array([1, 2], np.float32), None)


def test_means_and_sums_of_many(apply):
    a, b, c = np.array([1, 2], np.float32), np.array([[3], [5]], np.float32), np.float32(6)
    np.testing.assert_array_equal(apply(ops.SUM, a, b, c), a + b + c)
    np.testing.assert_allclose(apply(ops.MEAN, a, b, c), (a + b + c) / 3)


def test_half_precision_is_rounded_once(apply):
    """2048 + 1 is 2048 in float16, twice; the sum of the three is not."""
    assert apply(ops.SUM, np.array([2048], np.float16), np.array([1], np.float16), np.array([1], np.float16)) == 2050


@pytest.mark.parametrize(("source", "target"), [("float32", "int8"), ("float64", "float16"), ("bool", "float32"), ("int64", "bool")])
def test_cast(apply, source, target):
    x = np.array([-2.7, 0, 1.2, 100]).astype(source)
    np.testing.assert_array_equal(apply(ops.CAST, x, dtype=target), x.astype(target), strict=True)


def test_bitcast_needs_equal_widths(apply):
    assert apply(ops.BITCAST, np.array([1.0], np.float32), dtype="int32") == 0x3F800000
    with pytest.raises(IRError, match="different width"):
        apply(ops.BITCAST, np.array([1.0], np.float32), dtype="int64")


def test_shifts_by_the_width_or_more_give_zero(apply):
    x, y = np.array([255, 255, 1], np.uint8), np.array([1, 8, 200], np.uint8)
    np.testing.assert_array_equal(apply(ops.SHIFT_LEFT, x, y), [254, 0, 0])
    np.testing.assert_array_equal(apply(ops.SHIFT_RIGHT, x, y), [127, 0, 0])


def test_broadcasting_of_symbolic_sizes():
    n, m = te.var("n"), te.var("m")
    assert broadcast_shape((n, 1), (m,), (1, m)) == (n, m)
    assert broadcast_shape((n + n, 1), (2 * n, 3)) == (n + n, 3)
    for shapes in (((n,), (m,)), ((n,), (4,)), ((3,), (4,))):
        with pytest.raises(IRError, match="do not broadcast"):
            broadcast_shape(*shapes)
