import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ops import reduction as ops

RNG = np.random.default_rng(2)
X = RNG.standard_normal((2, 6, 4, 3)).astype(np.float32) * 3 + 1
SCALE, BIAS = RNG.standard_normal((2, 6)).astype(np.float32)
EPSILON = 1e-3


def normal(x, axes):
    x = x.astype(np.float64)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + EPSILON)


def channels(v):
    return v[:, None, None]


def test_batch_norm_is_scale_and_shift(apply):
    mean, variance = X.mean((0, 2, 3)), X.var((0, 2, 3))
    scale = apply(ops.BATCH_SCALE, SCALE, variance, epsilon=EPSILON)
    y = apply(ops.SCALE_SHIFT, X, scale, apply(ops.BATCH_SHIFT, BIAS, mean, scale))
    np.testing.assert_allclose(y, normal(X, (0, 2, 3)) * channels(SCALE) + channels(BIAS), rtol=1e-4, atol=1e-5)


def test_moments(apply):
    mean, variance = apply(ops.BATCH_MOMENTS, X)
    np.testing.assert_allclose(mean, X.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(variance, X.var((0, 2, 3)), rtol=1e-5)


def test_variance_does_not_cancel(apply):
    """mean(x^2) - mean(x)^2 would be 0 here in float32."""
    x = np.array([[[10000.0, 10001.0]]], np.float32)
    y = apply(ops.INSTANCE_NORM, x, np.ones(1, np.float32), np.zeros(1, np.float32), epsilon=0.0)
    np.testing.assert_allclose(y, [[[-1, 1]]], rtol=1e-6)


def test_instance_norm(apply):
    y = apply(ops.INSTANCE_NORM, X, SCALE, BIAS, epsilon=EPSILON)
    np.testing.assert_allclose(y, normal(X, (2, 3)) * channels(SCALE) + channels(BIAS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(apply, groups):
    grouped = normal(X.reshape(2, groups, -1), 2).reshape(X.shape)
    y = apply(ops.GROUP_NORM, X, SCALE, BIAS, groups=groups, epsilon=EPSILON)
    np.testing.assert_allclose(y, grouped * channels(SCALE) + channels(BIAS), rtol=1e-4, atol=1e-5)


def test_group_norm_with_a_scale_per_group(apply):
    y = apply(ops.GROUP_NORM, X, SCALE[:2], BIAS[:2], groups=2, epsilon=EPSILON)
    grouped = normal(X.reshape(2, 2, -1), 2).reshape(X.shape)
    np.testing.assert_allclose(y, grouped * channels(SCALE[:2].repeat(3)) + channels(BIAS[:2].repeat(3)), rtol=1e-4, atol=1e-5)


def test_layer_and_rms_norm(apply):
    scale, bias = RNG.standard_normal((2, 4, 3)).astype(np.float32)
    y, mean, inverse = apply(ops.LAYER_NORM, X, scale, bias, axis=2, epsilon=EPSILON)
    np.testing.assert_allclose(y, normal(X, (2, 3)) * scale + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean, X.mean((2, 3), keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(X.var((2, 3), keepdims=True) + EPSILON), rtol=1e-5)
    rms = apply(ops.RMS_NORM, X, scale[0], axis=3, epsilon=EPSILON)
    np.testing.assert_allclose(rms, X / np.sqrt((X**2).mean(-1, keepdims=True) + EPSILON) * scale[0], rtol=1e-5)


def test_statistics_over_a_symbolic_extent():
    n = te.var("n", 1, 100)
    y, mean, _ = ops.layer_norm(te.placeholder((2, n)), te.placeholder((n,)), None, 1, 1e-5)
    assert y.shape == (2, n) and mean.shape == (2, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_local_response(apply, size):
    squares = np.stack([(X[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1] ** 2).sum(1) for c in range(6)], 1)
    y = apply(ops.LRN, X, size=size, alpha=0.1, beta=0.75, bias=2.0)
    np.testing.assert_allclose(y, X / (2 + 0.1 / size * squares) ** 0.75, rtol=1e-5)


def test_lp_normalization_of_zero_is_zero(apply):
    x = np.array([[3, 4], [0, 0]], np.float32)
    np.testing.assert_allclose(apply(ops.LP_NORMALIZE, x, axis=1, p=2), [[0.6, 0.8], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(apply(ops.LP_NORMALIZE, x, axis=1, p=1), [[3 / 7, 4 / 7], [0, 0]], rtol=1e-6)


def test_refusals():
    x = te.placeholder((1, 6, 4))
    with pytest.raises(IRError):
        ops.group_norm(x, te.placeholder((6,)), te.placeholder((6,)), 4, 1e-5)
    with pytest.raises(IRError):
        ops.scale_shift(x, te.placeholder((4,)), te.placeholder((4,)))
