"""What derivatives look like, conventions, refusals, second derivatives, machine code."""

import numpy as np
import pytest

import tcomp
from tcomp import TcompError, te
from tcomp.ir import loops as L
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.te import print_te, tensors
from tcomp.ops import OPERATORS
from tests.ir.transforms.differences import check, placeholders
from tests.ir.transforms.random_expressions import compare


@pytest.mark.parametrize("seed", range(20))
def test_random_expressions(seed):
    compare(seed)


def matmul(m=5, k=7, n=3, dtype="float64"):
    a, b = te.placeholder((m, k), dtype, "a"), te.placeholder((k, n), dtype, "b")
    return a, b, OPERATORS["matmul"].apply([a, b], {})[0]


def test_the_adjoint_of_a_product_is_a_product():
    a, b, c = matmul()
    g = te.placeholder(c.shape, c.dtype, "g")
    text = print_te(te.vjp(c, [a, b], g))
    assert "sum(f0.0 in 0..3: g[a0, f0.0] * b[a1, f0.0])" in text
    assert "sum(f0.0 in 0..5: g[f0.0, a1] * a[f0.0, a0])" in text


def test_the_adjoint_of_a_permutation_is_a_gather():
    x = te.placeholder((4, 6), name="x")
    y = te.compute((6, 4), lambda i, j: x[3 - j, i] * 2.0, "y")
    g = te.placeholder(y.shape, name="g")
    assert "x.adjoint[a0 in 0..4, a1 in 0..6] = g[a1, a0 * -1 + 3] * 2.0f" in print_te([te.vjp(y, x, g)])


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
def test_borders_are_pieces_of_their_own(mode):
    """Not one sum over all elements for each, nor a scatter."""
    x = te.placeholder((50,), "float64", "x")
    (y,) = OPERATORS["pad"].apply([x, None], {"before": (3,), "after": (2,), "mode": mode})
    adjoint = te.vjp(y, x)
    assert all(t.extern is None for t in tensors([adjoint]))
    expected = np.bincount(np.pad(np.arange(50), (3, 2), mode))
    np.testing.assert_array_equal(evaluate([adjoint], {})[0], expected)


def test_data_dependent_reads_become_a_scatter():
    x, p = te.placeholder((5, 2), "float64", "x"), te.placeholder((4,), "int64", "p")
    (y,) = OPERATORS["gather"].apply([x, p], {"axis": 0})
    adjoint = te.vjp(y, x)
    assert any(t.extern is not None for t in tensors([adjoint]))
    np.testing.assert_array_equal(evaluate([adjoint], {p: np.array([1, 3, 1, -1])})[0][:, 0], [0, 2, 0, 1, 1])


def test_conventions():
    x = te.placeholder((4,), "float64", "x")
    values = np.array([0.0, 2.0, 2.0, -1.0])

    def gradient(y):
        return evaluate([te.vjp(y, x)], {x: values})[0].tolist()

    k = te.reduce_axis(4, "k")
    assert gradient(te.compute((), lambda: te.max(x[k], k))) == [0, 0.5, 0.5, 0]  # as torch's amax
    assert gradient(te.compute((4,), lambda i: te.maximum(x[i], 0.0))) == [0, 1, 1, 0]  # as torch's relu
    assert gradient(te.compute((4,), lambda i: te.abs(x[i]))) == [0, 1, 1, -1]
    assert gradient(te.compute((4,), lambda i: te.maximum(x[i], x[3 - i]))) == [2, 1, 1, 0]
    assert gradient(te.compute((), lambda: te.prod(x[k], k))) == [-4, 0, 0, 0]  # one zero
    assert gradient(te.compute((4,), lambda i: te.floor(x[i]))) == [0, 0, 0, 0]
    # Infinite derivatives of what is not chosen do not count.
    assert gradient(te.compute((4,), lambda i: te.select(x[i] > 0.0, te.sqrt(x[i]), 0.0))) == pytest.approx(
        [0, 0.5 / 2**0.5, 0.5 / 2**0.5, 0]
    )


def test_several_outputs_and_what_they_do_not_depend_on():
    x, y = te.placeholder((3,), "float64", "x"), te.placeholder((3,), "float64", "y")
    a = te.compute((3,), lambda i: x[i] * x[i], "a")
    b = te.compute((3,), lambda i: a[i] * 3.0, "b")
    dx, dy, da = te.vjp([a, b], [x, y, a])
    values = np.array([1.0, 2.0, 3.0])
    found = evaluate([dx, dy, da], {x: values})
    np.testing.assert_array_equal(found, [8 * values, np.zeros(3), np.full(3, 4.0)])


def test_second_derivatives():
    x, w = te.placeholder((1, 2, 5, 5), "float64", "x"), te.placeholder((3, 2, 3, 3), "float64", "w")
    rng = np.random.default_rng(0)
    (c,) = OPERATORS["conv"].apply([x, w], {"strides": (1, 1), "dilations": (1, 1), "group": 1})
    (y,) = OPERATORS["tanh"].apply([c], {})
    check(te.vjp(y, [x, w]), {x: rng.normal(size=x.shape), w: rng.normal(size=w.shape)})


@pytest.mark.parametrize("name", ["softmax", "cum_prod", "gather", "layer_norm"])
def test_second_derivatives_of_operators(name):
    rng = np.random.default_rng(1)
    arrays, attrs = {
        "softmax": ([rng.normal(size=(3, 5))], {"axes": (1,)}),
        "cum_prod": ([rng.normal(size=(3, 5))], {"axis": 1, "exclusive": False, "reverse": True}),
        "gather": ([rng.normal(size=(3, 5)), np.array([1, 1, 4])], {"axis": 1}),
        "layer_norm": ([rng.normal(size=(3, 5)), rng.normal(size=5), None], {"axis": 1, "epsilon": 1e-3}),
    }[name]
    inputs = placeholders(*arrays)
    (y,) = OPERATORS[name].apply(inputs, attrs)[:1]
    loss = te.compute(y.shape, lambda *i: y[i] * y[i] * y[i], "loss")
    given = {t: a for t, a in zip(inputs, arrays, strict=True) if t is not None}
    check(te.vjp(loss, [t for t, a in given.items() if a.dtype == np.float64]), given)


def test_symbolic_sizes():
    n, m = te.var("n"), te.var("m")
    x, w = te.placeholder((n, m), "float64", "x"), te.placeholder((m,), "float64", "w")
    k = te.reduce_axis(m, "k")
    y = te.compute((n,), lambda i: te.tanh(te.sum(x[i, k] * w[k], k)), "y")
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(4, 3)), rng.normal(size=3)
    dx, dw = evaluate(te.vjp(y, [x, w]), {x: a, w: b})
    slope = 1 - np.tanh(a @ b) ** 2
    np.testing.assert_allclose(dx, slope[:, None] * b)
    np.testing.assert_allclose(dw, slope @ a)


def test_a_reshape_of_symbolic_sizes_is_a_gather():
    """Its index is a quotient and a remainder by a symbolic size, which isl does not know."""
    n, m = te.var("n"), te.var("m")
    x = te.placeholder((n, m, 3), "float64", "x")
    (y,) = OPERATORS["reshape"].apply([x], {"shape": (n * m * 3,)})
    g = te.placeholder(y.shape, "float64", "g")
    adjoint = te.vjp(y, x, g)
    assert all(t.extern is None for t in tensors([adjoint]))
    given = np.arange(30.0)
    np.testing.assert_array_equal(evaluate([adjoint], {g: given}, {n: 5, m: 2})[0], given.reshape(5, 2, 3))


def test_half_floats_are_added_in_float32():
    x = te.placeholder((1,), "float16", "x")
    y = te.compute((4096,), lambda i: x[0], "y")
    assert evaluate([te.vjp(y, x)], {x: np.ones(1, np.float16)})[0].item() == 4096  # 1 + 2048 is 2048 in float16


def test_machine_code_computes_the_same():
    a, b, c = matmul(dtype="float32")
    loss = te.compute(c.shape, lambda i, j: te.tanh(c[i, j]), "loss")
    f = tcomp.build([a, b, loss, *te.vjp(loss, [a, b])])
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(5, 7)).astype(np.float32), rng.normal(size=(7, 3)).astype(np.float32)
    value, dx, dy = f(x, y)
    slope = 1 - np.tanh(x @ y) ** 2
    np.testing.assert_allclose(value, np.tanh(x @ y), atol=1e-5)
    np.testing.assert_allclose(dx, slope @ y.T, atol=1e-5)
    np.testing.assert_allclose(dy, x.T @ slope, atol=1e-5)


def test_results_are_tensors_of_their_own():
    """Also where they are a cotangent, or the same."""
    a, b, g = (te.placeholder((3,), name=n) for n in "abg")
    total = te.compute((3,), lambda i: a[i] + b[i], "total")
    f = tcomp.build([g, *te.vjp(total, [a, b], g), *te.jvp([total, total], [a], [g])])
    ones = np.ones(3, np.float32)
    assert all(np.array_equal(r, ones) for r in f(ones))


def test_machine_code_of_scatters_and_programs():
    x, p = te.placeholder((5, 4), name="x"), te.placeholder((3,), "int64", "p")
    (rows,) = OPERATORS["gather"].apply([x, p], {"axis": 0})
    (y,) = OPERATORS["cum_prod"].apply([rows], {"axis": 1, "exclusive": False, "reverse": False})
    dx = te.vjp(y, x)
    values, places = np.random.default_rng(4).normal(size=(5, 4)).astype(np.float32), np.array([1, 4, 1])
    np.testing.assert_allclose(tcomp.build([x, p, dx])(values, places), evaluate([dx], {x: values, p: places})[0], rtol=1e-5)


def test_a_scatter_can_be_reversed():
    """The gather of a gather: the adjoint of the program that the first derivative is."""
    x, p = te.placeholder((5,), "float64", "x"), te.placeholder((4,), "int64", "p")
    (rows,) = OPERATORS["gather"].apply([x, p], {"axis": 0})
    cubes = te.compute((4,), lambda i: rows[i] * rows[i] * rows[i], "cubes")
    check([te.vjp(cubes, x)], {x: np.arange(1.0, 6.0), p: np.array([1, 3, 1, 0])})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, n: te.vjp(te.compute((3,), lambda i: te.cast(x[i], "int32")), x), "elements of type int32"),
        (lambda x, n: te.vjp(te.compute((3,), lambda i: x[i] * 2.0), n), "elements of type int64"),
        (lambda x, n: te.vjp(te.compute((3,), lambda i: x[i] * 2.0), x, te.placeholder((4,), "float64")), "is not like the output"),
        (lambda x, n: te.vjp([x, x], x, [x]), "1 cotangents for 2 outputs"),
        (lambda x, n: te.jvp(x, [x], [n]), "is not like the variable"),
        (lambda x, n: te.jvp(x, [x], []), "0 tangents for 1 variables"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(TcompError, match=message):
        make(te.placeholder((3,), "float64", "x"), te.placeholder((3,), "int64", "n"))


def test_own_reductions_have_none():
    x, k = te.placeholder((3,), "float64", "x"), te.reduce_axis(3, "k")
    hypot = te.comm_reducer(lambda a, b: te.sqrt(a * a + b * b), lambda dtype: 0, "hypot")
    with pytest.raises(TcompError, match="the reduction `hypot` has no derivative"):
        te.vjp(te.compute((), lambda: hypot(x[k], k)), x)


def test_a_while_over_floats_cannot_be_reversed():
    x = te.placeholder((1,), "float64", "x")

    def newton(inputs, outputs):
        (a,), (y,) = inputs, outputs
        step = L.store(y, (0,), (y[0] + a[0] / y[0]) * 0.5)
        return L.block(L.store(y, (0,), a[0]), L.While(te.abs(y[0] * y[0] - a[0]) > 1e-9, step))

    root = te.extern(((1,), "float64"), [x], newton, "root")
    with pytest.raises(TcompError, match="a `while` computes floats"):
        te.vjp(root, x)
    one = te.compute((1,), lambda i: te.const(1.0, "float64"))
    assert evaluate([te.jvp(root, x, one)], {x: np.array([4.0])})[0].item() == pytest.approx(0.25)
