import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import IRError, TcompError
from tcomp.ops import movement as ops

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("symbolic", [False, True])
def test_gather(apply, axis, symbolic):
    indices = np.array([[0, -1], [1, -2]], np.int32)
    np.testing.assert_array_equal(apply(ops.GATHER, X, indices, symbolic=symbolic, axis=axis), np.take(X, indices, axis))


@pytest.mark.parametrize("wild", [10**18, -(10**18), 4, -5])
def test_indices_out_of_range_are_refused(apply, wild):
    """By the reference as by machine code (`tests/codegen/test_checked.py`)."""
    calls = [
        (ops.GATHER, (X, np.array([0, wild])), {"axis": 2}),
        (ops.GATHER_ELEMENTS, (X, np.full(X.shape, wild)), {"axis": 2}),
        (ops.GATHER_ND, (X, np.array([[0, wild]])), {"batch_dims": 0}),
        (ops.SCATTER_ND, (X, np.array([[wild, 0]]), np.zeros((1, 4), np.float32)), {"reduction": "none"}),
    ]
    for operator, arrays, attrs in calls:
        with pytest.raises(TcompError, match="out of range|outside of a tensor"):
            apply(operator, *arrays, **attrs)


def test_nothing_can_be_gathered_from_nothing(apply):
    wild = np.array([0])
    with pytest.raises(IRError, match="empty"):
        apply(ops.GATHER, np.zeros((0, 2), np.float32), wild, axis=0)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gather_and_scatter_elements(apply, axis):
    rng = np.random.default_rng(0)
    order = np.argsort(rng.random(X.shape), axis)
    np.testing.assert_array_equal(apply(ops.GATHER_ELEMENTS, X, order, axis=axis), np.take_along_axis(X, order, axis))
    values, expected = rng.random(X.shape).astype(np.float32), X.copy()
    np.put_along_axis(expected, order, values, axis)
    np.testing.assert_array_equal(apply(ops.SCATTER_ELEMENTS, X, order, values, axis=axis, reduction="none"), expected)


@pytest.mark.parametrize(("reduction", "ufunc"), [("add", np.add), ("mul", np.multiply), ("max", np.maximum), ("min", np.minimum)])
def test_scatter_combines_repeated_positions(apply, reduction, ufunc):
    indices, values = np.array([[1], [0], [1]]), np.array([[3], [-2], [5]], np.float32)
    expected = np.array([[10], [20]], np.float32)
    ufunc.at(expected, (indices, 0), values)
    x = np.array([[10], [20]], np.float32)
    np.testing.assert_array_equal(apply(ops.SCATTER_ELEMENTS, x, indices, values, axis=0, reduction=reduction), expected)
    np.testing.assert_array_equal(apply(ops.SCATTER_ND, x, indices, values, reduction=reduction), expected)


def test_gather_nd_with_batches(apply):
    indices = np.array([[[2, 1]], [[0, 3]]])
    np.testing.assert_array_equal(apply(ops.GATHER_ND, X, indices, batch_dims=1), [[X[0, 2, 1]], [X[1, 0, 3]]])
    np.testing.assert_array_equal(apply(ops.GATHER_ND, X, np.array([[1, 2], [0, -1]]), batch_dims=0), X[[1, 0], [2, 2]])


def test_tensor_scatter_writes_into_a_cache(apply):
    past, update = np.zeros((2, 4, 1), np.float32), np.array([[[1], [2]], [[3], [4]]], np.float32)
    found = apply(ops.TENSOR_SCATTER, past, update, np.array([1, 3]), axis=1, circular=True)
    np.testing.assert_array_equal(found[..., 0], [[0, 1, 2, 0], [4, 0, 0, 3]])
    np.testing.assert_array_equal(
        apply(ops.TENSOR_SCATTER, past, update, None, axis=1, circular=False)[..., 0], [[1, 2, 0, 0], [3, 4, 0, 0]]
    )


def test_one_hot(apply):
    found = apply(ops.ONE_HOT, np.array([1, -1, 7]), np.array([0, 5], np.float32), depth=3, axis=1)
    np.testing.assert_array_equal(found, [[0, 5, 0], [0, 0, 5], [0, 0, 0]])
    np.testing.assert_array_equal(apply(ops.ONE_HOT, np.array([1, -1, 7]), np.array([0, 5], np.float32), depth=3, axis=0), found.T)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=17), st.data())
def test_top_k_is_sorted_and_stable(apply, values, data):
    k = data.draw(st.integers(0, len(values)))
    x = np.array(values, np.float32)
    for largest in (True, False):
        order = np.argsort(-x if largest else x, kind="stable")[:k]
        found, positions = apply(ops.TOP_K, x, k=k, axis=0, largest=largest)
        np.testing.assert_array_equal(positions, order)
        np.testing.assert_array_equal(found, x[order])


def test_top_k_of_numbers_among_others_that_are_none(apply):
    x = np.array([np.nan, 3, np.nan, np.nan, 1, 2, np.nan, 5, 4], np.float32)
    for largest, expected in ((True, [5, 4, 3]), (False, [1, 2, 3])):
        found, positions = apply(ops.TOP_K, x, k=3, axis=0, largest=largest)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(x[positions], expected)


def test_top_k_along_a_middle_axis(apply):
    x = np.random.default_rng(3).random((2, 5, 3)).astype(np.float32)
    order = np.argsort(-x, 1, kind="stable")[:, :2]
    found, positions = apply(ops.TOP_K, x, k=2, axis=1, largest=True)
    np.testing.assert_array_equal(positions, order)
    np.testing.assert_array_equal(found, np.take_along_axis(x, order, 1))
