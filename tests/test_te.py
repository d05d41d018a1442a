"""Tensor expressions as users write them: operators on tensors, NumPy's functions and dtypes, Einstein sums, batches, messages."""

import math

import ml_dtypes
import numpy as np
import pytest

import tcomp
from tcomp import TcompError, te
from tcomp.ir.interpreters.te import evaluate
from tcomp.ops import OPERATORS

RNG = np.random.default_rng(0)
A, B, V = te.placeholder((3, 4), "float64", "A"), te.placeholder((4, 5), np.float64, "B"), te.placeholder(4, np.dtype("float64"), "V")
a, b, v = RNG.normal(size=(3, 4)), RNG.normal(size=(4, 5)), RNG.normal(size=4)


def value(t):
    return evaluate([t], {A: a, B: b, V: v})[0]


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda x, y, z: x @ y, (A, B, V)),
        (lambda x, y, z: x @ z, (A, B, V)),
        (lambda x, y, z: z @ y, (A, B, V)),
        (lambda x, y, z: (x + z) * 2.0 - 1.0 / (z * z + 1.0), (A, B, V)),
        (lambda x, y, z: -x // 0.5 + abs(x) % 0.3, (A, B, V)),
        (lambda x, y, z: (x < z) & ~(z <= 0.0) | (x > 1) ^ (x >= 2), (A, B, V)),
        (lambda x, y, z: abs(x) ** z + 2.0 ** z, (A, B, V)),
        (lambda x, y, z: np.exp(x) + np.arctan(z) + np.maximum(x, 0.0) + np.sqrt(np.absolute(x)), (A, B, V)),
        (lambda x, y, z: np.add(np.float64(2), x) * np.float64(0.5), (A, B, V)),
        (lambda x, y, z: np.matmul(x, y), (A, B, V)),
    ],
)  # fmt: skip
def test_operators_mean_what_they_mean_in_numpy(function, arrays):
    found = function(*arrays)
    assert isinstance(found, te.Tensor)
    np.testing.assert_allclose(value(found), function(a, b, v))


def test_functions_of_tensors():
    np.testing.assert_allclose(value(te.tanh(A @ B)), np.tanh(a @ b))
    np.testing.assert_allclose(value(te.maximum(A, V)), np.maximum(a, v))
    np.testing.assert_allclose(value(te.sigmoid(A)), 1 / (1 + np.exp(-a)))
    assert str(te.exp(A[0, 0])) == "exp(A[0, 0])"


def test_functions_of_numpy_on_expressions():
    t = te.compute((3, 4), lambda i, j: np.exp(A[i, j]) * np.float32(2) + np.maximum(A[i, j], 0.5) - np.power(V[j], 2))
    np.testing.assert_allclose(value(t), np.exp(a) * 2 + np.maximum(a, 0.5) - v**2)


def test_dtypes_of_numpy():
    assert te.placeholder((2,), np.int8).dtype == "int8" and te.placeholder((2,), ml_dtypes.bfloat16).dtype == "bfloat16"
    assert te.cast(A[0, 0], np.float16).dtype == "float16" and te.const(1, np.float32).dtype == "float32"


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,jk", "ij,jk->kij", "...j,jk->...k"])
def test_einsum(equation):
    np.testing.assert_allclose(value(te.einsum(equation, A, B)), np.einsum(equation, a, b))


def test_einsum_of_three():
    np.testing.assert_allclose(value(te.einsum("ij,jk,j->", A, B, V)), np.einsum("ij,jk,j->", a, b, v))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: te.compute((3,), lambda i: te.sum(A[i, te.reduce_axis(4)])), r"te.sum without an axis\n.*A\[i, k\]\n.*\n.*te.reduce_axis"),
        (lambda: te.sum(A), r"te.sum of a Tensor\n.*\n.*te.sum\(A\[i, k\], axis=k\)"),
        (lambda: te.compute((3, 4), lambda i, j: math.exp(A[i, j])), r"where Python needs a number\n.*A\[i, j\]\n.*te.exp"),
        (lambda: np.cbrt(A[0, 0]), "`np.cbrt` of an expression"),
        (lambda: np.cbrt(A), "`np.cbrt` of an expression"),
        (lambda: np.add.reduce(A), "`np.add.reduce` of an expression"),
        (lambda: A + a, "`add` of a tensor and a ndarray"),
        (lambda: A + te.placeholder((3, 5), "float64"), "do not broadcast: 4 against 5"),
        (lambda: A + te.placeholder((3, 4), "float32"), "`add` of float64 and float32"),
        (lambda: A @ A, "contraction of"),
        (lambda: list(A), "was used as a sequence"),
        (lambda: bool(A[0, 0] < 1), "has no truth value"),
        (lambda: te.placeholder((3,), "float33"), "unknown dtype `float33`"),
        (lambda: te.vmap(lambda x: x, in_axes=2)(A), "has no axis 2"),
        (lambda: te.vmap(lambda x, y: x, in_axes=(0,))(A, B), "1 axes for 2 inputs"),
        (lambda: te.vmap(lambda x, y: x)(A, B), "the size of a batch: 3 and 4"),
        (lambda: te.vmap(lambda x: x, in_axes=None)(A), "a batch without inputs"),
        (lambda: te.vmap(lambda x: x, out_axis=3)(A), "has no axis 3"),
    ],
)
def test_mistakes(wrong, message):
    with pytest.raises(TcompError, match=message):
        wrong()


def test_expressions_with_a_value_are_numbers():
    assert math.sqrt(te.const(4.0, "float64")) == 2.0


class TestVmap:
    def test_matrix_vector_products(self):
        x = te.placeholder((4, 2), "float64", "x")
        y = te.vmap(lambda u: A @ u, in_axes=1, out_axis=-1)(x)
        given = RNG.normal(size=(4, 2))
        np.testing.assert_allclose(evaluate([y], {A: a, x: given})[0], a @ given)

    def test_nested(self):
        x, y = te.placeholder((2, 4), "float64", "x"), te.placeholder((3, 4), "float64", "y")
        k = te.reduce_axis(4, "k")
        outer = te.vmap(te.vmap(lambda p, q: te.compute((), lambda: te.sum(p[k] * q[k], k)), in_axes=(None, 0)), in_axes=(0, None))(x, y)
        given = RNG.normal(size=(2, 4)), RNG.normal(size=(3, 4))
        np.testing.assert_allclose(evaluate([outer], dict(zip((x, y), given, strict=True)))[0], given[0] @ given[1].T)

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_programs(self, axis):
        """Sorting, and prefix sums of what was sorted, in each part of a batch."""
        x = te.placeholder((3, 4, 5), "float64", "x")

        def function(t):
            values, places = OPERATORS["top_k"].apply([t], {"k": 3, "axis": 1, "largest": False})
            return OPERATORS["cum_sum"].apply([values], {"axis": 1, "exclusive": False, "reverse": False})[0], places

        given = RNG.normal(size=(3, 4, 5))
        sums, places = evaluate(te.vmap(function, in_axes=axis, out_axis=1)(x), {x: given})
        parts = np.moveaxis(given, axis, 0)
        np.testing.assert_allclose(sums, np.moveaxis(np.cumsum(np.sort(parts, -1)[..., :3], -1), 0, 1))
        np.testing.assert_array_equal(places, np.moveaxis(np.argsort(parts, -1)[..., :3], 0, 1))

    def test_what_does_not_depend_on_the_batch_is_repeated(self):
        y = te.vmap(lambda u: V * 2.0)(A)
        np.testing.assert_allclose(value(y), np.tile(v * 2, (3, 1)))

    def test_derivatives_of_each_part(self):
        def gradient(u):
            return te.vjp(te.tanh(u @ B), u)

        np.testing.assert_allclose(value(te.vmap(gradient)(A)), (1 - np.tanh(a @ b) ** 2) @ b.T)


def test_built_functions_show_what_they_are():
    x = te.placeholder((8,), name="x")
    f = tcomp.build([x, te.compute((8,), lambda i: x[i] * 2.0, "y")])
    assert repr(f) == "<tcomp function (x: float32[8]) -> y: float32[8]>"
    assert "y[" in f.loops() and "define" in f.source() and "kernel:" in f.asm()
    assert f.loops() == str(f.schedule.kernel)
    g = tcomp.build(f.schedule)
    assert g.loops().splitlines()[1:] == f.loops().splitlines()[1:] and "define" in g.source()


def test_notebooks_and_completion():
    x = te.placeholder((8,), name="x")
    s = tcomp.Schedule(te.compute((8,), lambda i: te.select(x[i] < 0.0, 0.0, x[i]), "y"))
    s.split("y.i", 4)
    shown = s._repr_html_()
    assert "s.split(&quot;y.i&quot;, 4)" in shown and "&lt; 0.0" in shown and "1 steps" in shown
    assert set(tcomp.__all__) <= set(dir(tcomp))
    assert {"vjp", "vmap", "einsum", "compute", "sum"} <= set(te.__all__)
