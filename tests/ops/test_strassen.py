"""Strassen's algorithm against the definition of products: the identity, operators, schedules, errors."""

import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.loops import For, walk
from tcomp.ops import bilinear
from tcomp.ops.matmul import MATMUL
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget


def seven(apply, x, w):
    """The four operators, one after the other."""
    sizes = apply(bilinear.STRASSEN_ROWS, x)
    factors = apply(bilinear.STRASSEN_INPUT, x, sizes)
    weights = bilinear.strassen_weights(w)
    products = apply(MATMUL, factors, weights.reshape(7, *(1,) * (x.ndim - 2), *weights.shape[1:]))
    return apply(bilinear.STRASSEN_OUTPUT, products, sizes)


def error(found, exact):
    return np.abs(found - exact).max() / np.abs(exact).max()


def test_the_identity_holds_for_any_quarters():
    """The sum over products of what they take of A, take of B and give to C is the product of 2x2 matrices, coefficient by coefficient."""
    left, right, result = (np.array(m) for m in (bilinear.OF_LEFT, bilinear.OF_RIGHT, bilinear.TO_RESULT))
    found = np.einsum("rp,pa,pb->rab", result, left, right).reshape(2, 2, 2, 2, 2, 2)  # C[i, j], A[k, l], B[m, n]
    i = np.eye(2, dtype=int)
    assert np.array_equal(found, np.einsum("ik,lm,jn->ijklmn", i, i, i))


@pytest.mark.parametrize("shape, n", [((2, 2), 2), ((1, 4), 6), ((7, 6), 4), ((2, 5, 8), 10), ((3, 2, 4, 34), 32), ((33, 64), 66)], ids=str)
def test_the_operators_multiply(apply, shape, n):
    rng = np.random.default_rng(n)
    x, w = rng.standard_normal(shape, np.float32), rng.standard_normal((shape[-1], n), np.float32)
    found = seven(apply, x, w)
    assert found.dtype == np.float32 and found.shape == (*shape[:-1], n)
    assert error(found, x.astype(float) @ w.astype(float)) < 2e-6


@pytest.mark.parametrize(
    "shape, n, rows", [((1, 4, 3, 2), 6, 3), ((2, 6, 4, 5), 4, 2), ((2, 4, 5), 2, 2), ((1, 2, 2, 3, 3), 4, 4)], ids=str
)
def test_the_operators_multiply_pixels(apply, shape, n, rows):
    """Images of one to three axes, even and odd numbers of pixels along the one whose neighbours are pairs, several images."""
    rng = np.random.default_rng(n)
    x, w = rng.standard_normal(shape, np.float32), rng.standard_normal((n, shape[1]), np.float32)
    factors = apply(bilinear.STRASSEN_PIXELS, x, rows=rows)
    products = apply(MATMUL, factors, bilinear.strassen_weights(w, True))
    found = apply(bilinear.STRASSEN_IMAGE, products, shape=(shape[0], n, *shape[2:]), rows=rows)
    assert found.dtype == np.float32 and error(found, np.einsum("oc,bc...->bo...", w.astype(float), x.astype(float))) < 2e-6


def test_errors_of_values_of_one_sign(apply):
    rng = np.random.default_rng(1)
    x, w = rng.random((8, 512), np.float32), rng.random((512, 32), np.float32)
    assert error(seven(apply, x, w), x.astype(float) @ w.astype(float)) < 2e-6


@pytest.mark.parametrize("factor", (1e3, 1e30, 1e-30, 1e-38, 0.0))
def test_rows_keep_their_errors(apply, factor):
    """One of a pair of rows is far larger, in every element or in one: the other is as exact as ever."""
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((8, 64), np.float32), rng.standard_normal((64, 32), np.float32)
    x[::2] *= np.float32(factor)
    x[5, 7] = 1e20
    found, exact = seven(apply, x, w), x.astype(float) @ w.astype(float)
    sizes = np.abs(x).max(1, keepdims=True).astype(float)
    assert np.all(np.abs(found - exact) <= 1e-5 * sizes)


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_stays_in_its_row(apply, value):
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((7, 16), np.float32), rng.standard_normal((16, 8), np.float32)
    x[2, 3] = x[6, 9] = value
    found, finite = seven(apply, x, w), [0, 1, 3, 4, 5]
    assert np.isnan(found[[2, 6]]).all() and np.allclose(found[finite], (x @ w)[finite], rtol=0, atol=1e-5)


def test_weights_are_sums_of_quarters():
    w = np.array([[1, 2**-24], [1, 1]], np.float32)
    assert bilinear.strassen_weights(w)[5, 0, 0] == np.float32(1 + 2**-24) and bilinear.strassen_weights(w).dtype == np.float32
    assert np.array_equal(bilinear.strassen_weights(w)[:, 0, 0], np.array([2, 1, 2**-24 - 1, 0, 1, 1 + 2**-24, 2], np.float32))
    assert np.array_equal(bilinear.strassen_weights(np.ascontiguousarray(w.T), True), bilinear.strassen_weights(w))


@pytest.mark.parametrize("right, fine", [
    ([1, 1], True), ([-800, 2e-3], True), ([1500, 1], False), ([1, 4e-4], False), ([1, 0], False), ([1, np.nan], False), ([1, -np.inf], False),
], ids=str)  # fmt: skip
def test_columns_that_are_added_have_to_be_of_similar_size(right, fine):
    w = np.array([[1, 1, *right], [-1, 0.5, 0, 0]], np.float32)
    assert bilinear.similar_columns(w) is fine and bilinear.similar_columns(np.ascontiguousarray(w.T), transposed=True) is fine


def test_sums_of_columns_have_to_be_finite():
    assert bilinear.similar_columns(np.full((2, 4), 7e37, np.float32)) and not bilinear.similar_columns(np.full((2, 4), 9e37, np.float32))


def test_what_cannot_be_halved_is_refused():
    with pytest.raises(IRError, match="rows of 7 elements"):
        bilinear.strassen_input(te.placeholder((4, 7)), te.placeholder((4,)))
    with pytest.raises(IRError, match="pairs of rows"):
        bilinear.strassen_output(te.placeholder((7, 3, 8)), te.placeholder((8,)))
    with pytest.raises(IRError, match="pixels of 7 channels"):
        bilinear.strassen_pixels(te.placeholder((1, 7, 4)), 2)
    with pytest.raises(IRError, match="pairs of pixels"):
        bilinear.strassen_image(te.placeholder((7, 3, 8)), (1, 16, 4), 2)
    with pytest.raises(IRError, match="channels"):
        bilinear.strassen_image(te.placeholder((7, 2, 8)), (1, 12, 4), 2)


@pytest.mark.parametrize("rows", (8, 9))
def test_both_ends_are_straight_line_code_over_vectors(rows):
    """The default schedule: what is made of four quarters, and the quarters made of seven products, side by side and without divisions."""
    half = (rows + 1) // 2
    shapes = {"x": (rows, 64), "p": (7, half, 48), "sizes": (rows,), "pixels": (1, rows, 6, 64), "q": (7, 6 * half, 48)}
    x, p, sizes, pixels, q = (te.placeholder(shape, name=name) for name, shape in shapes.items())
    last = te.compute((1, 64, rows, 6), lambda b, c, i, j: pixels[b, i, j, c], "last")  # channels that are neighbours, as layouts have them
    image = bilinear.strassen_image(q, (1, 96, rows, 6), 2)
    turned = te.compute((1, rows, 6, 96), lambda b, i, j, c: image[b, c, i, j], "turned")
    to, back = bilinear.strassen_input(x, sizes), bilinear.strassen_output(p, sizes)
    kernels = [("to", [x, sizes], to, [7]), ("back", [p, sizes], back, [2, 2])]
    kernels += [("of_pixels", [pixels], bilinear.strassen_pixels(last, 2), [7]), ("to_pixels", [q], turned, [2, 2])]
    for name, sources, result, cases in kernels:
        kernel = cpu.schedule(lower(name, sources, [result], {}), CpuTarget.parse("cpu -mcpu=skylake-avx512")).kernel
        kinds = [(x.kind, x.extent) for x in walk(kernel.body) if isinstance(x, For)]
        assert [n for kind, n in kinds if kind == "unrolled"][: len(cases)] == cases and ("vectorized", 16) in kinds
        assert "note" not in str(kernel)
        if name in ("to", "back"):  # pixels have places in their image, one for each row of vectors
            assert "//" not in str(kernel) and "%" not in str(kernel)
