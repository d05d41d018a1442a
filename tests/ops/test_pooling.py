import itertools

import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ops import nn

X = np.random.default_rng(1).standard_normal((2, 3, 7, 6)).astype(np.float32)


def windows(x, kernel, strides, dilations):
    """(output index, window) of every window."""
    spatial = [(d - r * (k - 1) - 1) // s + 1 for d, k, s, r in zip(x.shape[2:], kernel, strides, dilations, strict=True)]
    for p in itertools.product(*map(range, spatial)):
        cut = tuple(slice(i * s, i * s + r * (k - 1) + 1, r) for i, s, k, r in zip(p, strides, kernel, dilations, strict=True))
        yield p, x[(slice(None), slice(None), *cut)].reshape(*x.shape[:2], -1)


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dilations", [(1, 1), (2, 1)])
def test_windows(apply, strides, dilations):
    attrs = {"kernel": (2, 3), "strides": strides, "dilations": dilations}
    largest, mean, norm = apply(nn.MAX_POOL, X, **attrs), None, apply(nn.LP_POOL, X, **attrs, p=3.0)
    mean = apply(nn.AVERAGE_POOL, X, **attrs, counted=(None, None))
    for p, window in windows(X, (2, 3), strides, dilations):
        at = (slice(None), slice(None), *p)
        np.testing.assert_array_equal(largest[at], window.max(-1))
        np.testing.assert_allclose(mean[at], window.mean(-1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(norm[at], (np.abs(window) ** 3).sum(-1) ** (1 / 3), rtol=1e-5)


def test_average_counts_only_what_counts(apply):
    padded = np.pad(X, ((0, 0), (0, 0), (1, 1), (1, 1)))
    attrs = {"kernel": (3, 3), "strides": (2, 2), "dilations": (1, 1)}
    y = apply(nn.AVERAGE_POOL, padded, **attrs, counted=((1, 8), (1, 7)))
    inside = np.pad(np.ones_like(X), ((0, 0), (0, 0), (1, 1), (1, 1)))
    counts = {p: w.sum(-1) for p, w in windows(inside, (3, 3), (2, 2), (1, 1))}
    for p, window in windows(padded, (3, 3), (2, 2), (1, 1)):
        np.testing.assert_allclose(y[(slice(None), slice(None), *p)], window.sum(-1) / counts[p], rtol=1e-5, atol=1e-6)


def test_nan_wins_the_maximum(apply):
    x = np.array([[[1.0, np.nan, 3.0, 2.0]]], np.float32)
    y = apply(nn.MAX_POOL, x, kernel=(2,), strides=(1,), dilations=(1,))
    np.testing.assert_array_equal(y, [[[np.nan, np.nan, 3.0]]])


def test_indices_name_the_first_of_equals_and_unpool_inverts(apply):
    x = np.array([[[[1, 5, 5, 2], [5, 0, 1, 7]]]], np.float32)
    attrs = {"kernel": (2, 2), "strides": (2, 2), "dilations": (1, 1)}
    places = apply(nn.MAX_POOL_INDICES, x, **attrs, before=(0, 0), shape=x.shape, column_major=False)
    np.testing.assert_array_equal(places, [[[[1, 7]]]])
    columns = apply(nn.MAX_POOL_INDICES, x, **attrs, before=(0, 0), shape=x.shape, column_major=True)
    np.testing.assert_array_equal(columns, [[[[1, 7]]]])  # column by column: 1 5 5 0 5 1 2 7
    back = apply(nn.MAX_UNPOOL, np.array([[[[5, 7]]]], np.float32), places, shape=x.shape, source=x.shape)
    np.testing.assert_array_equal(back, [[[[0, 5, 0, 0], [0, 0, 0, 7]]]])
    far = np.array([[[[99, 7]]]])
    np.testing.assert_array_equal(
        apply(nn.MAX_UNPOOL, np.array([[[[5, 7]]]], np.float32), far, shape=x.shape, source=x.shape), [[[[0] * 4, [0, 0, 0, 7]]]]
    )


def test_global_norm(apply):
    np.testing.assert_allclose(apply(nn.GLOBAL_LP_POOL, X, p=2.0), np.sqrt((X**2).sum((2, 3), keepdims=True)), rtol=1e-5)


def test_windows_that_do_not_fit():
    with pytest.raises(IRError):
        nn.max_pool(te.placeholder((1, 1, 4)), (2, 2), (1, 1), (1, 1))
    with pytest.raises(IRError):
        nn.max_pool(te.placeholder((1, 1, 4)), (2,), (0,), (1,))
