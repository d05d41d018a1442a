import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ops.matmul import EINSUM, MATMUL

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
