import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ops.matmul import CHOLESKY, EINSUM, LU, MATMUL, ROW_ORDER, TRIANGULAR_SOLVE

RNG = np.random.default_rng(2)


def array(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)), ((2, 1, 3, 4), (5, 4, 6)), ((2, 3, 4), (4,)), ((4,), (2, 4, 3))],
)
def test_matmul_follows_numpy(apply, a, b):
    x, y = array(*a), array(*b)
    for symbolic in (False, True):
        np.testing.assert_allclose(apply(MATMUL, x, y, symbolic=symbolic), np.matmul(x, y), rtol=1e-5, atol=1e-6)


def test_transposed_operands_are_read_in_place(apply):
    x, y = array(4, 3), array(5, 4)
    np.testing.assert_allclose(apply(MATMUL, x, y, transpose_a=True, transpose_b=True), x.T @ y.T, rtol=1e-5, atol=1e-6)


def test_bytes_give_int32_others_wrap_and_halves_accumulate_in_float32(apply):
    x = np.full((1, 2), 30000, np.int16)
    np.testing.assert_array_equal(apply(MATMUL, x, x.T), np.matmul(x, x.T), strict=True)
    left, right = np.full((1, 3), 255, np.uint8), np.full((3, 1), -128, np.int8)
    np.testing.assert_array_equal(apply(MATMUL, left, right), np.array([[-97920]], np.int32), strict=True)
    ones = np.ones((1, 4096), np.float16)
    assert apply(MATMUL, ones, ones.T)[0, 0] == 4096


def test_contracted_extents_must_agree(apply):
    with pytest.raises(IRError, match="4 and 5"):
        apply(MATMUL, array(3, 4), array(5, 2))
    with pytest.raises(IRError, match="n4 and n5"):
        apply(MATMUL, array(3, 4), array(5, 2), symbolic=True)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(2, 3), (3, 4)]), ("ij,jk", [(2, 3), (3, 4)]), ("ii->i", [(3, 3)]), ("ii", [(3, 3)]), ("ij->ji", [(2, 3)]),
        ("...ij,...jk->...ik", [(5, 2, 3), (1, 3, 4)]), ("b...,b...->...", [(2, 3, 4), (2, 3, 4)]), ("i,j,k->kji", [(2,), (3,), (4,)]),
        ("bhwi,hki->bhwk", [(2, 3, 4, 5), (3, 6, 5)]), ("ij->", [(2, 3)]), ("...i->...", [(2, 3)]),
    ],
)  # fmt: skip
def test_einsum_follows_numpy(apply, equation, shapes):
    operands = [array(*shape) for shape in shapes]
    np.testing.assert_allclose(apply(EINSUM, *operands, equation=equation), np.einsum(equation, *operands), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("equation", ["ij->ik", "ij,jk->ik", "ijk->i", "ij->ii", "i1->i"])
def test_wrong_equations_are_refused(apply, equation):
    with pytest.raises(IRError, match="einsum"):
        apply(EINSUM, array(2, 3), equation=equation)


@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5), (1, 1)])
def test_factors_with_pivots(apply, shape):
    """P x = L U, with factors of L that are at most 1."""
    x, k = array(*shape), min(shape[-2:])
    for symbolic in (False, True):
        factors, pivots, place = apply(LU, x, symbolic=symbolic)
        order = apply(ROW_ORDER, pivots, rows=shape[-2])
        lower, upper = np.tril(factors[..., :k], -1) + np.eye(shape[-2], k, dtype=np.float32), np.triu(factors[..., :k, :])
        np.testing.assert_allclose(lower @ upper, np.take_along_axis(x, order[..., None], -2), atol=1e-5)
        assert np.abs(lower).max() <= 1
        assert pivots.dtype == place.dtype == np.int32
        assert not place.any()


def test_pivots_of_a_singular_matrix_are_zero(apply):
    factors, pivots, place = apply(LU, np.array([[1, 2], [2, 4]], np.float32))
    assert factors[1, 1] == 0
    assert pivots.tolist() == [2, 2]
    assert place == 2
    assert apply(LU, np.zeros((2, 3, 3), np.float32))[2].tolist() == [1, 1]


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_triangular_systems(apply, upper, unit):
    a, b = array(2, 5, 5) + 4 * np.eye(5, dtype=np.float32), array(2, 5, 3)
    x = apply(TRIANGULAR_SOLVE, a, b, upper=upper, unit=unit)
    triangle = np.triu(a) if upper else np.tril(a)
    if unit:
        triangle = triangle * (1 - np.eye(5)) + np.eye(5)
    np.testing.assert_allclose(triangle @ x, b, atol=1e-4)


@pytest.mark.parametrize("upper", [False, True])
def test_factors_of_definite_matrices(apply, upper):
    root = array(2, 4, 4)
    x = root @ np.swapaxes(root, -1, -2) + np.eye(4, dtype=np.float32)
    x[1, 2, 2] = -1
    given = np.where(np.tri(4, dtype=bool).T if upper else np.tri(4, dtype=bool), x, 77)  # the other triangle is not read
    factors, places = apply(CHOLESKY, given.astype(np.float32), upper=upper)
    lower = np.swapaxes(factors, -1, -2) if upper else factors
    np.testing.assert_allclose(lower[0], np.linalg.cholesky(x[0]), rtol=1e-4, atol=1e-5)
    assert places.tolist() == [0, 3]
    assert np.isnan(lower[1, 2, 2])
