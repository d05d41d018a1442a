"""Derivatives of imperative programs: overwritten arrays, triangular loops, branches, temporaries inside of loops."""

import math

import numpy as np
import pytest

import tcomp
from tcomp import TcompError, te
from tcomp.ir import loops as L
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.te import print_te
from tcomp.ops import OPERATORS
from tests.ir.transforms.differences import check
from tests.ir.transforms.random_programs import compare

RNG = np.random.default_rng(0)


@tcomp.program(A="float64[n, n]")
def sweep(steps, n, A):
    for _t in range(steps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                A[i, j] = (A[i, j - 1] + A[i, j] * A[i, j] + A[i, j + 1] + A[i - 1, j] + A[i + 1, j]) / 5.0


@tcomp.program(A="float64[n, n]", x="float64[n]", b="float64[n]")
def solve(n, A, x, b):
    for i in range(n):
        x[i] = b[i]
        for j in range(i):
            x[i] -= A[i, j] * x[j]
        x[i] = x[i] / A[i, i]


@tcomp.program(A="float64[n, n]")
def cholesky(n, A):
    for i in range(n):
        for j in range(i):
            for k in range(j):
                A[i, j] -= A[i, k] * A[j, k]
            A[i, j] /= A[j, j]
        for k in range(i):
            A[i, i] -= A[i, k] * A[i, k]
        A[i, i] = math.sqrt(A[i, i])


@tcomp.program(x="float64[n]", y="float64[n]")
def branches(n, x, y):
    for i in range(n):
        s = x[i]
        m = 0
        if s > 0.3:
            s = s * s
            m = m + 1
        if m > 0:
            for _k in range(3):
                s = s * 1.5 + math.sin(s)
        y[i] = s


@tcomp.program(x="float64[n]", y="float64[n]")
def carried(n, x, y):
    """A temporary inside of the loop is computed from what the loop before it left."""
    s = 0.5
    for i in range(n):
        t = s * x[i]
        s = math.sin(t) + t * t
        y[i] = s * t


M = RNG.normal(size=(5, 5))
CASES = [
    (sweep.kernel(n=6, steps=3), [RNG.normal(size=(6, 6)) * 0.3]),
    (solve.kernel(n=5), [M + 5 * np.eye(5), np.zeros(5), RNG.normal(size=5)]),
    (cholesky.kernel(n=5), [M @ M.T + 5 * np.eye(5)]),
    (branches.kernel(n=7), [RNG.normal(size=7), np.zeros(7)]),
    (carried.kernel(n=7), [RNG.normal(size=7), np.zeros(7)]),
]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    compare(seed)


def called(kernel, arrays):
    tensors = [te.placeholder(a.shape, a.dtype, f"x{n}") for n, a in enumerate(arrays)]
    return list(te.call(kernel, *tensors)), dict(zip(tensors, arrays, strict=True))


@pytest.mark.parametrize(("kernel", "arrays"), CASES, ids=[k.name for k, _ in CASES])
def test_programs(kernel, arrays):
    check(*called(kernel, arrays))


def test_second_derivatives_of_programs():
    outputs, inputs = called(*CASES[-1])
    x = next(iter(inputs))
    check([te.vjp(outputs, x)], inputs)


def test_machine_code():
    outputs, inputs = called(*CASES[2])
    (x,), (a,) = inputs, inputs.values()
    dx = te.vjp(outputs, x)
    np.testing.assert_allclose(tcomp.build([x, dx])(a), evaluate([dx], inputs)[0], rtol=1e-9)


def test_a_prefix_sum_is_not_run_again():
    """Its derivative does not depend on values."""
    x = te.placeholder((7,), "float64", "x")
    (y,) = OPERATORS["cum_sum"].apply([x], {"axis": 0, "exclusive": False, "reverse": False})
    text = print_te([te.vjp(y, x)])
    assert "tape" not in text and " x:" not in text


def test_refusals():
    x = te.placeholder((7,), "float64", "x")
    with pytest.raises(TcompError, match="`branches` takes 2 arrays, got 1"):
        te.call(branches.kernel(n=7), x)
    with pytest.raises(TcompError, match="is not like the buffer"):
        te.call(branches.kernel(n=6), x, x)

    def moving(inputs, outputs):
        """Where it writes depends on what it wrote."""
        (a,), (y,) = inputs, outputs

        def step(i):
            return L.store(y, (te.maximum(te.minimum(te.cast(y[i], "int64"), 6), 0),), y[i] * y[i])

        return L.block(L.loop("c", 7, lambda i: L.store(y, (i,), a[i])), L.loop("i", 7, step))

    with pytest.raises(TcompError, match="`out0` is read, and overwritten where its values are not kept"):
        te.vjp(te.extern(((7,), "float64"), [x], moving), x)


def test_what_a_while_computes_for_each_iteration_is_not_kept():
    """The order of a lane, where lanes have a symbolic length and share the memory for it."""
    x = te.placeholder((3, te.var("n")), "float64", "x")
    values, _ = OPERATORS["top_k"].apply([x], {"k": 2, "axis": 1, "largest": True})
    with pytest.raises(TcompError, match="`order` is read, and overwritten where its values are not kept"):
        te.vjp(values, x)
