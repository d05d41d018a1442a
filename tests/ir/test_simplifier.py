"""The simplifier and the ranges behind it, against exhaustive evaluation of random index expressions."""

import numpy as np
import pytest
from hypothesis import given, settings

from tcomp.ir import expr as E
from tcomp.ir.simplify import difference, prove, simplify
from tests.ir.index_programs import CONDITIONS, INDICES, N, X, Y, values

I = E.loop_var("i", 12)
J = E.loop_var("j", 4)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(INDICES)
def test_simplified_is_equal_and_canonical(e):
    short = simplify(e)
    (expected, defined), (actual, _) = values(e), values(short)
    np.testing.assert_array_equal(actual[defined], expected[defined], err_msg=f"{e}\n-> {short}")
    assert simplify(short) is short


@settings(max_examples=300, deadline=None, derandomize=True)
@given(INDICES)
def test_bounds_hold(e):
    (lo, hi), (actual, defined) = E.bounds(e), values(e)
    assert lo is None or (actual[defined] >= lo).all(), f"{e} >= {lo}"
    assert hi is None or (actual[defined] <= hi).all(), f"{e} <= {hi}"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(CONDITIONS)
def test_simplified_conditions_are_equal_and_proofs_hold(c):
    short = simplify(c)
    (expected, defined), (actual, _) = values(c), values(short)
    np.testing.assert_array_equal(actual[defined], expected[defined], err_msg=f"{c}\n-> {short}")
    if prove(c):
        assert expected[defined].all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(INDICES, INDICES)
def test_difference(a, b):
    (expected, defined), (actual, _) = values(E.binary("sub", a, b)), values(difference(a, b))
    np.testing.assert_array_equal(actual[defined], expected[defined])


@pytest.mark.parametrize(
    ("e", "expected"),
    [
        ((I * 4 + J) // 4, I),
        ((I * 4 + J) % 4, J),
        (I // 4 * 4 + I % 4, I),
        (I // 2 // 3, I // 6),
        (I % 8 % 4, I % 4),
        (I % 8 // 4, I // 4 % 2),
        ((N * 16 + J) // 64, N // 4),
        ((N * 16 + J) % 64, J + N % 4 * 16),
        ((I * 6 + J * 2) // 4, (I * 3 + J) // 2),
        ((N * 256 + 256) // (N * 64 + 64), 4),
        ((N * N - 1) // (N + 1), N - 1),
        ((N * X + X) % (N + 1), 0),
        (N // N, 1),
        (N - E.maximum(N - 2, 0), E.minimum(N, 2)),
        (E.maximum(N - 2, 0) + E.minimum(N, 2), N),
        (E.maximum(X, 0) - E.maximum(2, X + 2), -2),
        ((0 - N) // 4, 0 - (N + 3) // 4),
        (N + (0 - N) % 4, (N + 3) // 4 * 4),
        ((N + (0 - N) % 4) * (X + 1) // 4 // (X + 1), (N + 3) // 4),
        (E.minimum(I, 20), I),
        (E.maximum(I + 1, 0), I + 1),
        (E.minimum(X + N, X + 2 * N), X + N),
        ((N * X + Y - N * X) * 2 - Y, Y),
        ((X + Y) * (X - Y), X * X - Y * Y),
        (E.loop_var("q", N) // N, E.const(0)),
        ((E.loop_var("q", N) + N * I) % N, E.loop_var("q", N)),
        ((E.loop_var("q", N) + N * I) // N, I),
    ],
    ids=str,
)
def test_known_forms(e, expected):
    assert simplify(e) is simplify(expected)


@pytest.mark.parametrize(
    "condition",
    [
        I < 12,
        I * 4 + J < 48,
        (I + 3) // 4 * 4 < 16,
        I // 4 * 4 <= I,
        E.loop_var("q", N) < N,
        N >= 1,
        E.loop_var("q", N // 4) * 4 + J < N // 4 * 4,
        X // 4 * 4 + 3 >= X,
        E.loop_var("q", N * 6) // 3 * 4 + J < N * 8,
        E.loop_var("q", (X + 1) // 2 // 4) * 4 + J < (X + 1) // 2,
        (N + 26) // 7 - (N + 27) // 7 + 1 >= 0,
        E.maximum((N + 27) // 29 - 1, 0) <= (N + 26) // 29,
        E.maximum(0, E.minimum(N, Y)) <= N,
        N - E.maximum(0, E.minimum(N, E.maximum(Y, 0 - X))) >= 0,
    ],
    ids=str,
)
def test_provable(condition):
    assert prove(condition)


@pytest.mark.parametrize("condition", [I < 11, J * 3 <= I, X < N, E.equal(I % 2, 0), E.loop_var("q", N * 6) // 4 < N], ids=str)
def test_not_provable(condition):
    assert not prove(condition)


def test_products_of_sizes():
    h, w = E.dim("h", 1), E.dim("w", 2)
    area = (h * 4 - 1) * (w * 4 - 1)
    assert prove(area >= 21) and not prove(area >= 22)  # of h = 1, w = 2
    assert prove((area - 3) // 14 >= 0) and not prove(h * w - h * 3 >= 0)
