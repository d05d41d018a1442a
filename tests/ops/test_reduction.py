import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.ops import reduction as ops

RNG = np.random.default_rng(1)
X = RNG.normal(size=(2, 3, 4)).astype(np.float32)

REFERENCE = {
    ops.REDUCE_SUM: np.sum, ops.REDUCE_PROD: np.prod, ops.REDUCE_MEAN: np.mean, ops.REDUCE_MAX: np.max, ops.REDUCE_MIN: np.min,
    ops.REDUCE_L1: lambda x, **k: np.abs(x).sum(**k), ops.REDUCE_L2: lambda x, **k: np.sqrt((x * x).sum(**k)),
    ops.REDUCE_SUM_SQUARE: lambda x, **k: (x * x).sum(**k), ops.REDUCE_LOG_SUM: lambda x, **k: np.log(x.sum(**k)),
    ops.REDUCE_LOG_SUM_EXP: lambda x, **k: np.log(np.exp(x).sum(**k)),
}  # fmt: skip


@pytest.mark.parametrize("op", REFERENCE, ids=lambda op: op.name)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, 1, 2)])
def test_reductions(apply, op, axes, keepdims):
    x = np.abs(X) if op is ops.REDUCE_LOG_SUM else X
    expected = REFERENCE[op](x.astype(np.float64), axis=axes, keepdims=keepdims)
    for symbolic in (False, True):
        np.testing.assert_allclose(apply(op, x, symbolic=symbolic, axes=axes, keepdims=keepdims), expected, rtol=1e-5)


def test_log_sum_exp_does_not_overflow(apply):
    x = np.array([[1000, 1000], [-np.inf, -np.inf]], np.float32)
    np.testing.assert_allclose(apply(ops.REDUCE_LOG_SUM_EXP, x, axes=(1,), keepdims=False), [1000 + np.log(2), -np.inf])


@pytest.mark.parametrize(
    ("op", "identity"), [(ops.REDUCE_SUM, 0), (ops.REDUCE_PROD, 1), (ops.REDUCE_MAX, -np.inf), (ops.REDUCE_MIN, np.inf)]
)
def test_empty_reductions_give_the_identity(apply, op, identity):
    np.testing.assert_array_equal(apply(op, np.zeros((2, 0), np.float32), axes=(1,), keepdims=True), np.full((2, 1), identity, np.float32))


def test_integers_and_bools(apply):
    x = np.array([[3, -7], [5, 4]], np.int32)
    np.testing.assert_array_equal(apply(ops.REDUCE_MEAN, x, axes=(1,), keepdims=False), [-2, 4])
    np.testing.assert_array_equal(apply(ops.REDUCE_L2, np.array([[3, 4]], np.int64), axes=(1,), keepdims=False), [5])
    b = np.array([[True, False], [False, False]])
    np.testing.assert_array_equal(apply(ops.REDUCE_MAX, b, axes=(1,), keepdims=False), [True, False])
    np.testing.assert_array_equal(apply(ops.REDUCE_MIN, b, axes=(0,), keepdims=False), [False, False])


def test_half_precision_is_accumulated_in_float32(apply):
    x = np.full(4096, 1.0, np.float16)  # a float16 sum stops growing at 2048
    assert apply(ops.REDUCE_SUM, x, axes=(0,), keepdims=False) == 4096


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.booleans())
def test_arg_max_of_ties(apply, values, last):
    x = np.array([values], np.float32)
    highest, lowest = max(values), min(values)
    place = (len(values) - 1 - values[::-1].index(highest), len(values) - 1 - values[::-1].index(lowest)) if last else (
        values.index(highest), values.index(lowest))  # fmt: skip
    assert apply(ops.ARG_MAX, x, axis=1, keepdims=False, last=last)[0] == place[0]
    np.testing.assert_array_equal(apply(ops.ARG_MIN, x, axis=1, keepdims=True, last=last), [[place[1]]])


def test_arg_max_finds_nan(apply):
    assert apply(ops.ARG_MAX, np.array([1, np.nan, 3], np.float32), axis=0, keepdims=False, last=False) == 1


@pytest.mark.parametrize("axes", [(1,), (0,), (1, 2)])
def test_softmax(apply, axes):
    x = X * 50
    e = np.exp(x.astype(np.float64) - x.max(axis=axes, keepdims=True))
    expected = e / e.sum(axis=axes, keepdims=True)
    for symbolic in (False, True):
        np.testing.assert_allclose(apply(ops.SOFTMAX, x, symbolic=symbolic, axes=axes), expected, rtol=1e-4, atol=1e-30)
        np.testing.assert_allclose(apply(ops.LOG_SOFTMAX, x, symbolic=symbolic, axes=axes), np.log(expected), rtol=1e-4, atol=1e-5)


def test_softmax_of_masked_rows_is_zero(apply):
    x = np.array([[-np.inf] * 3, [1, -np.inf, 2], [1, np.nan, 2]], np.float32)
    found = apply(ops.SAFE_SOFTMAX, x, axes=(1,))
    np.testing.assert_allclose(found[:2], [[0, 0, 0], [1 / (1 + np.e), 0, np.e / (1 + np.e)]], rtol=1e-6)
    assert np.isnan(found[2]).all()


def test_hardmax_marks_the_first_of_equals(apply):
    x = np.array([[1, 3, 3], [2, 2, 1]], np.float32)
    np.testing.assert_array_equal(apply(ops.HARDMAX, x, axes=(1,)), [[0, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal(apply(ops.HARDMAX, x, axes=(0, 1)), [[0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_prefix_sums(apply, axis, exclusive, reverse):
    x = np.flip(X, axis) if reverse else X
    expected = np.cumsum(x, axis, np.float64) - (x if exclusive else 0)
    expected = np.flip(expected, axis) if reverse else expected
    found = apply(ops.CUM_SUM, X, axis=axis, exclusive=exclusive, reverse=reverse)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_prefix_products(apply):
    x = np.array([[1, 2, 3]], np.int32)
    np.testing.assert_array_equal(apply(ops.CUM_PROD, x, axis=1, exclusive=False, reverse=False), [[1, 2, 6]])
    np.testing.assert_array_equal(apply(ops.CUM_PROD, x, axis=1, exclusive=True, reverse=True), [[6, 3, 1]])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_index", [None, 1, -100])
def test_nll_loss(apply, reduction, weighted, ignore_index):
    log_prob = np.log(np.random.default_rng(6).random((2, 3, 4)).astype(np.float32))
    target = np.random.default_rng(7).integers(0, 3, (2, 4))
    if ignore_index == -100:
        target[0, 0] = -100
    weight = np.array([0.5, 2, 1], np.float32) if weighted else None
    counts = target != ignore_index
    safe = np.where(counts, target, 0)
    w = np.where(counts, 1.0 if weight is None else weight[safe], 0.0)
    losses = -np.take_along_axis(log_prob, safe[:, None], 1)[:, 0] * w
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / w.sum()}[reduction]
    found = apply(ops.NLL_LOSS, log_prob, target, weight, ignore_index=ignore_index, reduction=reduction)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_ignored_impossible_class_does_not_make_nan(apply):
    log_prob = np.array([[-np.inf, -1.0]], np.float32)
    assert apply(ops.NLL_LOSS, log_prob, np.array([0]), None, ignore_index=0, reduction="sum") == 0
