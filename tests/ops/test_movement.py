import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.expr import walk
from tcomp.ir.interpreters.te import evaluate
from tcomp.ops import movement as ops

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("perm", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_transpose(apply, perm):
    np.testing.assert_array_equal(apply(ops.TRANSPOSE, X, symbolic=True, perm=perm), X.transpose(perm))


# ---------------------------------------------------------------- reshape

FACTORS = st.lists(st.sampled_from([1, 2, 3]), min_size=0, max_size=5)


def joined(factors, cuts):
    """Products of consecutive factors between the cuts."""
    shape, n = [], 0
    for cut in sorted(c % (len(factors) + 1) for c in cuts):
        shape.append(int(np.prod(factors[n:cut], dtype=int)))
        n = cut
    return (*shape, int(np.prod(factors[n:], dtype=int)))


@settings(max_examples=120, deadline=None)
@given(FACTORS, st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 5), max_size=4), st.randoms())
def test_reshape_keeps_row_major_order(apply, factors, before, after, random):
    shuffled = list(factors)
    random.shuffle(shuffled)
    x = np.arange(int(np.prod(factors, dtype=int))).reshape(joined(factors, before))
    shape = joined(shuffled, after)
    np.testing.assert_array_equal(apply(ops.RESHAPE, x, shape=shape), x.reshape(shape))


def test_kept_axes_keep_their_index():
    """Attention's [b, s, h * d] -> [b, s, h, d]: only the last axis is split, whatever the sizes of the others."""
    b, s = te.var("b"), te.var("s")
    y = ops.reshape(te.placeholder((b, s, 96)), (b, s, 8, 12))
    assert y.body.args[:2] == y.axes[:2]
    assert not any(e.op in ("floordiv", "mod") for e in walk(y.body))
    back = ops.reshape(te.placeholder((b, s, 8, 12)), (b * s, 96))
    assert [str(i) for i in back.body.args[2:]] == [str(back.axes[1] // 12), str(back.axes[1] % 12)]


def test_reshape_refuses_other_sizes_and_takes_empty_ones(apply):
    with pytest.raises(IRError, match="reshape of"):
        apply(ops.RESHAPE, X, shape=(5, 5))
    with pytest.raises(IRError, match="reshape of"):
        ops.reshape(te.placeholder((te.var("n"), 3)), (12,))
    assert apply(ops.RESHAPE, np.zeros((0, 3)), shape=(3, 0, 2)).shape == (3, 0, 2)


# ---------------------------------------------------------------- repeat and cut


def test_expand_and_tile(apply):
    x = X[:, :1]
    np.testing.assert_array_equal(apply(ops.EXPAND, x, shape=(7, 1)), np.broadcast_to(x, (2, 7, 4)))
    np.testing.assert_array_equal(apply(ops.EXPAND, x, shape=(6, 1, 7, 1)), np.broadcast_to(x, (6, 2, 7, 4)))
    np.testing.assert_array_equal(apply(ops.TILE, X, repeats=(2, 1, 3)), np.tile(X, (2, 1, 3)))


def test_slice_with_strides_and_symbolic_start():
    x, n = te.placeholder((8, 6), name="x"), te.var("n", 1, 5)
    y = ops.slice_(x, (7, n), (-2, 1), (4, 6 - n))
    data = np.arange(48, dtype=np.float32).reshape(8, 6)
    np.testing.assert_array_equal(evaluate([y], {x: data}, {n: 2})[0], data[7::-2, 2:])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("symbolic", [False, True])
def test_concat(apply, axis, symbolic):
    parts = [X[0], X[1], np.zeros((0, 4) if axis == 0 else (3, 0), np.float32), X[0] + 100]
    np.testing.assert_array_equal(apply(ops.CONCAT, *parts, symbolic=symbolic, axis=axis), np.concatenate(parts, axis))


def test_concat_of_nothing_and_of_what_does_not_fit(apply):
    empty = np.zeros((2, 0), np.float32)
    assert apply(ops.CONCAT, empty, empty, axis=1).shape == (2, 0)
    with pytest.raises(IRError, match="concat of"):
        apply(ops.CONCAT, X[0], X[0].T, axis=0)
    with pytest.raises(IRError, match="concat of"):
        apply(ops.CONCAT, X[0], X[0].astype(np.float64), axis=0)


# ---------------------------------------------------------------- pad


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["edge", "reflect", "wrap"]), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_pad_from_the_border_follows_numpy(apply, mode, size, before, after, symbolic):
    x = np.arange(size)
    expected = np.pad(x, (before, after), mode)
    np.testing.assert_array_equal(apply(ops.PAD, x, None, symbolic=symbolic, before=(before,), after=(after,), mode=mode), expected)


def test_pad_with_a_value_and_cropping(apply):
    x = X[0]
    padded = apply(ops.PAD, x, np.float32(9), before=(1, -1), after=(0, 2))
    np.testing.assert_array_equal(padded, np.pad(x[:, 1:], ((1, 0), (0, 2)), constant_values=9))
    np.testing.assert_array_equal(apply(ops.PAD, x, None, before=(0, 1), after=(-1, 0)), np.pad(x[:-1], ((0, 0), (1, 0))))


# ---------------------------------------------------------------- blocks, triangles, sequences


@pytest.mark.parametrize("channels_first", [False, True])
def test_depth_and_space(apply, channels_first):
    x = np.arange(2 * 12 * 2 * 3, dtype=np.float32).reshape(2, 12, 2, 3)
    split = x.reshape(2, 3, 2, 2, 2, 3).transpose(0, 1, 4, 2, 5, 3) if channels_first else (
        x.reshape(2, 2, 2, 3, 2, 3).transpose(0, 3, 4, 1, 5, 2))  # fmt: skip
    wide = apply(ops.DEPTH_TO_SPACE, x, block=2, channels_first=channels_first)
    np.testing.assert_array_equal(wide, split.reshape(2, 3, 4, 6))
    np.testing.assert_array_equal(apply(ops.SPACE_TO_DEPTH, wide, block=2, channels_first=channels_first), x)


@pytest.mark.parametrize("k", [-2, 0, 1, 9])
def test_triangles(apply, k):
    for upper, function in ((True, np.triu), (False, np.tril)):
        np.testing.assert_array_equal(apply(ops.TRILU, X, None, diagonal=k, upper=upper), function(X, k))
        np.testing.assert_array_equal(apply(ops.TRILU, X, np.array(k), diagonal=0, upper=upper), function(X, k))


def test_reverse_sequence(apply):
    x = np.arange(12).reshape(4, 3)
    lengths = np.array([4, 1, 2])
    expected = x.copy()
    for b, n in enumerate(lengths):
        expected[:n, b] = x[:n, b][::-1]
    np.testing.assert_array_equal(apply(ops.REVERSE_SEQUENCE, x, lengths, batch_axis=1, time_axis=0), expected)
    np.testing.assert_array_equal(apply(ops.REVERSE_SEQUENCE, x.T.copy(), lengths, batch_axis=0, time_axis=1), expected.T)


def test_made_from_nothing(apply):
    np.testing.assert_array_equal(apply(ops.EYE, shape=(3, 4), diagonal=1, dtype="int32"), np.eye(3, 4, 1, np.int32), strict=True)
    np.testing.assert_array_equal(apply(ops.ARANGE, start=5, step=-2, count=3, dtype="int64"), [5, 3, 1])
