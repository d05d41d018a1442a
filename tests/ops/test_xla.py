"""Operators of XLA: windows, places, sorts, quotients and shifts, against loops and NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ops import xla as ops

X = np.random.default_rng(0).normal(size=(5, 4, 6)).astype(np.float32)
PLACES = np.array([[1, 0], [4, 5], [-1, 2], [2, 9]])  # along axes 0 and 2; the last two windows are outside
GATHER = {"collapsed": (0,), "batching": (), "index_batching": (), "index_map": (0, 2), "sizes": (1, 4, 2)}


@pytest.mark.parametrize("fill", [None, -3.0])
def test_gather_windows(apply, fill):
    wanted = np.empty((4, 4, 2), np.float32)
    for n, (a, b) in enumerate(PLACES):
        inside = 0 <= a <= 4 and 0 <= b <= 4
        a, b = np.clip(a, 0, 4), np.clip(b, 0, 4)
        wanted[n] = X[a, :, b : b + 2] if inside or fill is None else fill
    np.testing.assert_array_equal(apply(ops.GATHER_WINDOWS, X, PLACES, offset_dims=(1, 2), fill=fill, **GATHER), wanted)


def test_gather_windows_of_batches(apply):
    places = np.array([[2], [0], [5], [1], [3]])
    found = apply(
        ops.GATHER_WINDOWS,
        X,
        places,
        offset_dims=(0,),
        collapsed=(2,),
        batching=(0,),
        index_batching=(0,),
        index_map=(2,),
        sizes=(1, 4, 1),
        fill=None,
    )
    np.testing.assert_array_equal(found, X[np.arange(5), :, places[:, 0]].T)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("reduction", ["none", "add", "max"])
def test_scatter_windows(apply, clip, reduction):
    updates = np.random.default_rng(1).normal(size=(4, 4, 2)).astype(np.float32)
    wanted = X.copy()
    for n, (a, b) in enumerate(PLACES):
        if not clip and not (0 <= a <= 4 and 0 <= b <= 4):
            continue
        a, b = np.clip(a, 0, 4), np.clip(b, 0, 4)
        old, new = wanted[a, :, b : b + 2], updates[n]
        wanted[a, :, b : b + 2] = {"none": new, "add": old + new, "max": np.maximum(old, new)}[reduction]
    found = apply(
        ops.SCATTER_WINDOWS, X, PLACES, updates, window_dims=(1, 2), inserted=(0,), batching=(), index_batching=(), index_map=(0, 2),
        reduction=reduction, clip=clip,
    )  # fmt: skip
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("place", [[1, 3], [-1, 2], [0, 9]])
@pytest.mark.parametrize("clip", [True, False])
def test_scatter_of_one_window(apply, place, clip):
    updates, wanted = np.full((4, 2), 5, np.float32), X.copy()
    if clip or (0 <= place[0] <= 4 and 0 <= place[1] <= 4):
        a, b = np.clip(place, 0, 4)
        wanted[a, :, b : b + 2] += updates
    found = apply(
        ops.SCATTER_WINDOWS, X, np.array(place), updates, window_dims=(0, 1), inserted=(0,), batching=(), index_batching=(), index_map=(0, 2),
        reduction="add", clip=clip,
    )  # fmt: skip
    np.testing.assert_array_equal(found, wanted)


def test_slices_that_a_run_knows(apply):
    starts = [np.array(n) for n in (9, 1, -2)]  # moved to 3, 1, 0
    np.testing.assert_array_equal(apply(ops.SLICE_AT, X, *starts, shape=(2, 3, 5)), X[3:5, 1:4, :5])
    wanted = X.copy()
    wanted[3:5, 1:4, :5] = 7
    np.testing.assert_array_equal(apply(ops.STORE_AT, X, np.full((2, 3, 5), 7, np.float32), *starts), wanted)


def test_dilate(apply):
    wanted = np.full((9, 4, 16), 2, np.float32)
    wanted[::2, :, ::3] = X
    np.testing.assert_array_equal(apply(ops.DILATE, X, np.float32(2), steps=(2, 1, 3)), wanted)


def windows(shape, kernel, strides, before, counts):
    """(number of a window, the indices of its elements that are inside) of all windows."""
    for at in itertools.product(*map(range, counts)):
        offsets = itertools.product(*map(range, kernel))
        places = [tuple(p * s + o - b for p, s, o, b in zip(at, strides, off, before, strict=True)) for off in offsets]
        yield at, [(n, p) for n, p in enumerate(places) if all(0 <= i < d for i, d in zip(p, shape, strict=True))]


@pytest.mark.parametrize("reduction", ["sum", "max", "prod"])
def test_reduce_windows(apply, reduction):
    found = apply(ops.REDUCE_WINDOWS, X, kernel=(2, 1, 3), strides=(1, 2, 2), dilations=(2, 1, 1), reduction=reduction)
    assert found.shape == (3, 2, 2)
    for a, b, c in np.ndindex(found.shape):
        window = X[a : a + 3 : 2, 2 * b, 2 * c : 2 * c + 3]
        np.testing.assert_allclose(found[a, b, c], getattr(np, reduction)(window), rtol=1e-5)


def test_the_largest_of_a_window(apply):
    about = {"kernel": (3, 1, 2), "strides": (2, 1, 2), "before": (1, 0, 0)}
    place = apply(ops.WINDOW_ARGMAX, X, dilations=(1, 1, 1), after=(1, 0, 0), **about)
    source = np.random.default_rng(2).normal(size=place.shape).astype(np.float32)
    best, spread = np.empty_like(source), np.zeros_like(X)
    for at, inside in windows(X.shape, about["kernel"], about["strides"], about["before"], place.shape):
        n, where = max(inside, key=lambda item: X[item[1]])
        assert place[at] == n
        best[at] = X[where]
        spread[where] += source[at]
    np.testing.assert_array_equal(apply(ops.GATHER_ARGMAX, place, X, dilations=(1, 1, 1), **about), best)
    np.testing.assert_allclose(apply(ops.SCATTER_TO_ARGMAX, place, source, shape=X.shape, **about), spread, rtol=1e-6)


def test_sort_by_two_keys(apply):
    first = np.array([[2, 1, 2, 1, 1]], np.int32).T
    second = np.array([[0.0, np.nan, -1.0, np.inf, -0.0]], np.float32).T
    found = apply(ops.SORT_BY, first, second, np.arange(5)[:, None], axis=0, keys=2)
    np.testing.assert_array_equal(found[2][:, 0], [4, 3, 1, 2, 0])


def test_quotients_of_all_integers(apply):
    x = np.array([7, -7, 7, -128, 0, 5], np.int8)
    y = np.array([2, 2, 0, -1, 0, -2], np.int8)
    np.testing.assert_array_equal(apply(ops.QUOTIENT, x, y), [3, -3, -1, -128, -1, -2])
    np.testing.assert_array_equal(apply(ops.REMAINDER, x, y), [1, -1, 7, 0, 0, 1])
    np.testing.assert_array_equal(apply(ops.QUOTIENT, x.view(np.uint8), np.zeros(6, np.uint8)), np.full(6, 255))


def test_shifts_by_any_number(apply):
    x, y = np.array([-5, 5, 1, -1], np.int32), np.array([1, 31, 32, -1], np.int32)
    np.testing.assert_array_equal(apply(ops.SHIFT_BITS_LEFT, x, y), [-10, np.int32(-(2**31)), 0, 0])
    np.testing.assert_array_equal(apply(ops.SHIFT_BITS_RIGHT, x, y), [-3, 0, 0, -1])
    np.testing.assert_array_equal(apply(ops.SHIFT_BITS_RIGHT, x.view(np.uint32), y.view(np.uint32)), [0x7FFFFFFD, 0, 0, 0])
    np.testing.assert_array_equal(apply(ops.POPCOUNT, x.view(np.uint32)), [31, 2, 1, 32])


def test_bits_of_integers(apply):
    x = np.array([0, 1, -1, 100, -128], np.int8)
    np.testing.assert_array_equal(apply(ops.LEADING_ZEROS, x), [8, 7, 0, 1, 0])
    np.testing.assert_array_equal(apply(ops.SHIFT_RIGHT_LOGICAL, x, np.full(5, 1, np.int8)), [0, 0, 127, 50, 64])
    for kind in (np.int8, np.uint8, np.int32, np.uint32):
        info = np.iinfo(kind)
        a, b = (np.random.default_rng(n).integers(info.min, info.max, 40, kind) for n in (0, 1))
        wanted = [int(p) * int(q) >> info.bits for p, q in zip(a, b, strict=True)]
        np.testing.assert_array_equal(apply(ops.HIGH_PRODUCT, a, b), wanted)
    with pytest.raises(IRError, match="128 bits"):
        apply(ops.HIGH_PRODUCT, np.ones(1, np.int64), np.ones(1, np.int64))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_bit_by_bit(apply, dtype):
    info = np.finfo(dtype)
    values = np.array([0.0, -0.0, 1, -1, info.tiny, info.max, np.inf, -np.inf, np.nan, 0.5, 2.5, -2.5, 1e30, 0.49999997], dtype)
    x, y = (v.ravel().copy() for v in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        found, wanted = apply(ops.NEXT_AFTER, x, y), np.nextafter(x, y)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    np.testing.assert_array_equal(apply(ops.IS_FINITE, values), np.isfinite(values))
    cubes = np.append(values[:9], np.random.default_rng(0).normal(size=50) * 1e3).astype(dtype)
    np.testing.assert_allclose(apply(ops.CBRT, cubes), np.cbrt(cubes), rtol=4 * info.eps)
    np.testing.assert_array_equal(apply(ops.ROUND_AWAY, values[9:]), [1, 3, -3, np.array(1e30, dtype), 0])
    order = [-np.inf, -1, -0.0, 0.0, 1, np.inf, np.nan]
    assert (np.diff(apply(ops.TOTAL_ORDER, np.array(order, dtype))) > 0).all()


def test_bits_in_wider_and_narrower_types(apply):
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    for kind in (np.uint8, np.int16, np.float16):
        parts = apply(ops.BITCAST_PARTS, x, dtype=np.dtype(kind).name)
        np.testing.assert_array_equal(parts, x.view(kind).reshape(3, 4, -1), strict=True)
        np.testing.assert_array_equal(apply(ops.BITCAST_PARTS, parts, dtype="float32"), x, strict=True)
    with pytest.raises(IRError, match="bits of bool"):
        apply(ops.BITCAST_PARTS, np.ones(4, bool), dtype="int32")


def test_numbers_with_fewer_bits(apply):
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, 70000, -1e9, 1e-9, np.nan, np.inf], np.float32)
    with np.errstate(all="ignore"):
        wanted = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(apply(ops.REDUCE_PRECISION, x, exponent_bits=5, mantissa_bits=10)[:6], wanted[:6])
    found = apply(ops.REDUCE_PRECISION, x, exponent_bits=8, mantissa_bits=7)
    np.testing.assert_array_equal(found[[0, 1, 2, 3, 7, 8]], np.float32([1, 1, 1 + 2**-6, 1, np.nan, np.inf]))


def test_powers_and_choices(apply):
    x = np.array([1.5, -2.0, 0.0], np.float32)
    for n in (-3, -1, 0, 1, 2, 7):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(apply(ops.INTEGER_POW, x, exponent=n), x.astype(np.float64) ** n, rtol=1e-6)
    np.testing.assert_array_equal(apply(ops.INTEGER_POW, np.int32([3, -2]), exponent=5), [243, -32])
    np.testing.assert_array_equal(apply(ops.SELECT_N, np.int32([2, 0, 1]), x, x + 10, x + 20), [21.5, -2, 10])
