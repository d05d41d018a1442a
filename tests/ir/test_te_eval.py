"""The NumPy reference of tensor expressions: against NumPy, against the loop interpreter, and its two ways of reducing against each other."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import InputError, IRError
from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.interpreters import te as te_eval
from tcomp.ir.interpreters.loops import run_stmt
from tcomp.ir.interpreters.te import Evaluator, evaluate
from tcomp.ir.scalar_operators import wrap
from tests.ir.value_programs import BODIES, INPUTS, SHAPE, I, J, arrays, tensor

RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def both(output, inputs, dims=None):
    """The value, after checking that sums of products and the general way agree."""
    fast = Evaluator(inputs, dims).run([output])[0]
    slow = Evaluator(inputs, dims, structural=False).run([output])[0]
    assert fast.dtype == slow.dtype and fast.shape == slow.shape
    if fast.dtype.kind == "f":
        largest = np.abs(slow[np.isfinite(slow)]).max(initial=1)  # of terms that cancel, little is left
        np.testing.assert_allclose(fast, slow, rtol=1e-5, atol=1e-5 * largest)
    else:
        np.testing.assert_array_equal(fast, slow)
    return fast


@settings(max_examples=100, deadline=None, derandomize=True)
@given(BODIES, st.integers(0, 5))
def test_bodies_agree_with_the_loop_interpreter(body, seed):
    given_arrays = arrays(seed)
    expected = evaluate([tensor(body)], {INPUTS[n]: a for n, a in given_arrays.items()})[0]
    buffers = {t: L.Buffer(n, t.dtype, t.shape) for n, t in INPUTS.items()}
    out = L.Buffer("out", body.dtype, SHAPE)
    body = E.rewrite(body, lambda e: E.read(buffers[e.attr], e.args) if e.op == "read" else None)
    nest = L.For(I, SHAPE[0], L.For(J, SHAPE[1], L.Store(out, (I, J), body)))
    result = np.zeros(SHAPE, expected.dtype)
    run_stmt(nest, {out: result} | {buffers[INPUTS[n]]: a for n, a in given_arrays.items()})
    np.testing.assert_array_equal(result, expected)


def test_reduce_axes_are_given_as_ranges_too():
    a, r = te.placeholder((5, 9), name="A"), te.reduce_axis((0, 9), "r")
    x = random(5, 9)
    np.testing.assert_allclose(both(te.compute((5,), lambda i: te.sum(a[i, r], axis=r)), {a: x}), x.sum(1), rtol=1e-5)
    with pytest.raises(IRError, match="reduce axis `r` starts at 1"):
        te.reduce_axis((1, 9), "r")


def test_matmul_of_symbolic_size():
    m, k = te.var("m"), te.var("k")
    a, b = te.placeholder((m, 2 * k + 1), name="A"), te.placeholder((2 * k + 1, 7), name="B")
    r = te.reduce_axis(2 * k + 1, "r")
    c = te.compute((m, 7), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), "C")
    for rows, inner in ((1, 3), (5, 9), (4, 5)):
        x, y = random(rows, inner), random(inner, 7)
        np.testing.assert_allclose(both(c, {a: x, b: y}), x @ y, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="no integer k makes"):
        evaluate([c], {a: random(2, 4), b: random(4, 7)})
    with pytest.raises(InputError, match="dimension 0 of `B` is 3 instead of 5"):
        evaluate([c], {a: random(2, 5), b: random(3, 7)})
    with pytest.raises(InputError, match="the dim `m` is 0"):
        evaluate([c], {a: random(0, 5), b: random(5, 7)})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    st.tuples(st.integers(3, 7), st.integers(3, 7)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.booleans(), st.sampled_from(["float32", "int8", "float64"]),
)  # fmt: skip
def test_convolutions(sizes, image, kernel, stride, pad, dilation, guard_product, dtype):
    n, groups, per_group, out_per_group = sizes
    (h, w), (kh, kw) = image, kernel
    x = te.placeholder((n, groups * per_group, h, w), dtype, "X")
    f = te.placeholder((groups * out_per_group, per_group, kh, kw), dtype, "W")
    oh, ow = ((size + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for size, k in zip(image, kernel, strict=True))
    if oh < 1 or ow < 1:
        return
    rc, rh, rw = te.reduce_axis(per_group, "rc"), te.reduce_axis(kh, "rh"), te.reduce_axis(kw, "rw")

    def element(b, o, y, z):
        row, column = y * stride + rh * dilation - pad, z * stride + rw * dilation - pad
        inside = te.all_of([row >= 0, row < h, column >= 0, column < w])
        pixel = x[b, o // out_per_group * per_group + rc, row, column]
        if guard_product:
            return te.sum(te.select(inside, pixel * f[o, rc, rh, rw], 0), axis=(rc, rh, rw))
        return te.sum(te.select(inside, pixel, 0) * f[o, rc, rh, rw], axis=(rc, rh, rw))

    y = te.compute((n, groups * out_per_group, oh, ow), element, "Y")
    values = [random(*t.shape) * 40 for t in (x, f)]
    result = both(y, {x: values[0].astype(dtype), f: values[1].astype(dtype)})
    padded = np.pad(values[0].astype(dtype).astype(np.float64), [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    at = (0, groups * out_per_group - 1, oh - 1, ow - 1)
    first = (groups - 1) * per_group
    window = padded[0, first:, (oh - 1) * stride :: dilation, (ow - 1) * stride :: dilation][:, :kh, :kw]
    exact = (window * values[1].astype(dtype)[-1]).sum()
    if dtype == "int8":
        assert result[at] == np.int64(exact).astype(np.int8)
    else:
        np.testing.assert_allclose(result[at], exact, rtol=1e-4, atol=1e-2)


def test_pools():
    x = te.placeholder((2, 3, 7, 6), name="X")
    rh, rw = te.reduce_axis(3, "rh"), te.reduce_axis(2, "rw")

    def read(b, c, y, z, outside):
        row, column = y * 2 + rh - 1, z + rw
        return te.select(te.all_of([row >= 0, row < 7, column < 6]), x[b, c, row, column], outside)

    biggest = te.compute((2, 3, 4, 6), lambda b, c, y, z: te.max(read(b, c, y, z, float("-inf")), axis=(rh, rw)), "max")
    average = te.compute((2, 3, 4, 6), lambda b, c, y, z: te.sum(read(b, c, y, z, 0.0), axis=(rh, rw)) / 6.0, "avg")
    value = random(2, 3, 7, 6)
    value[0, 0, 3, 3] = np.nan
    padded = np.pad(value, [(0, 0), (0, 0), (1, 1), (0, 1)], constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 2), (2, 3))[:, :, ::2]
    np.testing.assert_array_equal(both(biggest, {x: value}), windows.max((4, 5)))
    windows = np.where(np.isneginf(windows), 0, windows)
    np.testing.assert_allclose(both(average, {x: value}), windows.sum((4, 5)) / 6, rtol=1e-5, atol=1e-6)


def test_softmax_and_shared_sub_expressions(monkeypatch):
    x = te.placeholder((5, 9), name="X")
    k, q = te.reduce_axis(9, "k"), te.reduce_axis(9, "q")

    def top(i):
        return te.max(x[i, q], axis=q)

    y = te.compute((5, 9), lambda i, j: te.exp(x[i, j] - top(i)) / te.sum(te.exp(x[i, k] - top(i)), axis=k), "softmax")
    value = random(5, 9)
    e = np.exp(value - value.max(1, keepdims=True))
    np.testing.assert_allclose(both(y, {x: value}), e / e.sum(1, keepdims=True), rtol=1e-6)
    monkeypatch.setattr(te_eval, "CHUNK", 16)  # several chunks of the reduction grid
    np.testing.assert_allclose(both(y, {x: value}), e / e.sum(1, keepdims=True), rtol=1e-6)


def test_chunks_of_contractions(monkeypatch):
    monkeypatch.setattr(te_eval, "CHUNK", 64)
    a, b, k = te.placeholder((3, 8, 10), name="A"), te.placeholder((3, 10, 6), name="B"), te.reduce_axis(10, "k")
    c = te.compute((3, 8, 6), lambda n, i, j: te.sum(a[n, i, k] * b[n, k, j], axis=k), "C")
    x, y = random(3, 8, 10), random(3, 10, 6)
    np.testing.assert_allclose(both(c, {a: x, b: y}), x @ y, rtol=1e-5, atol=1e-5)


def test_products_of_several_factors_and_diagonals():
    a, b, s = te.placeholder((4, 6), name="A"), te.placeholder((6, 5), name="B"), te.placeholder((6,), name="S")
    k, r = te.reduce_axis(6, "k"), te.reduce_axis(4, "r")
    x, y, z = random(4, 6), random(6, 5), random(6)
    c = te.compute((4, 5), lambda i, j: te.sum(a[i, k] * s[k] * b[k, j], axis=k), "C")
    np.testing.assert_allclose(both(c, {a: x, b: y, s: z}), (x * z) @ y, rtol=1e-5, atol=1e-5)
    trace = te.compute((), lambda: te.sum(a[r, r] * s[r + 1], axis=r), "trace")
    np.testing.assert_allclose(both(trace, {a: x, s: z}), (np.diag(x) * z[1:5]).sum(), rtol=1e-5)
    square = te.compute((4,), lambda i: te.sum(a[i, k] * a[i, k], axis=k), "square")
    np.testing.assert_allclose(both(square, {a: x}), (x * x).sum(1), rtol=1e-6)


def test_integer_contractions_are_exact_and_wrap():
    a, b, k = te.placeholder((3, 50), "int32", "A"), te.placeholder((50, 4), "int32", "B"), te.reduce_axis(50, "k")
    c = te.compute((3, 4), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "C")
    x = RNG.integers(-(2**31), 2**31, (3, 50)).astype(np.int32)
    y = RNG.integers(-(2**31), 2**31, (50, 4)).astype(np.int32)
    exact = x.astype(object) @ y.astype(object)
    wrapped = np.array([[wrap(v, "int32") for v in row] for row in exact.tolist()], np.int32)
    np.testing.assert_array_equal(both(c, {a: x, b: y}), wrapped)


def test_empty_reductions_and_tensors():
    n = te.var("n", 0, 5)
    a, k = te.placeholder((3, n), name="A"), te.reduce_axis(n, "k")
    total = te.compute((3,), lambda i: te.sum(a[i, k], axis=k), "total")
    top = te.compute((3,), lambda i: te.max(a[i, k], axis=k), "top")
    copy = te.compute((3, n), lambda i, j: a[i, j] + 1.0, "copy")
    nothing = np.zeros((3, 0), np.float32)
    np.testing.assert_array_equal(both(total, {a: nothing}), np.zeros(3))
    np.testing.assert_array_equal(both(top, {a: nothing}), np.full(3, -np.inf))
    assert both(copy, {a: nothing}).shape == (3, 0)


def test_own_reducers_keep_the_order():
    last = te.comm_reducer(lambda a, b: te.select(te.equal(b, -1), a, b), lambda dtype: -1, "last")
    x, k = te.placeholder((3, 7), "int32", "X"), te.reduce_axis(7, "k")
    y = te.compute((3,), lambda i: last(x[i, k], k), "Y")
    value = np.array([[1, -1, 2, -1, -1, -1, -1], [-1] * 7, [5, 6, 7, 8, 9, 10, 11]], np.int32)
    np.testing.assert_array_equal(both(y, {x: value}), [2, -1, 11])


def test_float32_sums_are_accumulated_in_float64():
    x, k = te.placeholder((1 << 16,), name="X"), te.reduce_axis(1 << 16, "k")
    y = te.compute((), lambda: te.sum(x[k], axis=k), "Y")
    value = np.full(1 << 16, 0.1, np.float32)
    assert both(y, {x: value}) == np.float32(value.astype(np.float64).sum())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_every_operator(dtype):
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    x = te.placeholder((40,), dtype, "X")
    y = te.compute((40,), lambda i: (x[i] + 1.0) * x[i] - 3.0, "Y")
    value = RNG.normal(size=40).astype(kind)
    result = evaluate([y], {x: value})[0]
    assert result.dtype == kind
    step = (value + kind(1)).astype(kind)
    np.testing.assert_array_equal(result, ((step * value).astype(kind) - kind(3)).astype(kind))


def test_several_outputs_and_intermediate_overrides():
    x = te.placeholder((4,), name="X")
    low, high = te.compute((4,), lambda i: (te.minimum(x[i], 0.0), te.maximum(x[i], 0.0)), "parts")
    total = te.compute((4,), lambda i: low[i] + high[i], "total")
    value = random(4)
    np.testing.assert_array_equal(evaluate([low, high, total], {x: value})[2], value)
    np.testing.assert_array_equal(evaluate([total], {low: value, high: value})[0], 2 * value)


def test_extern():
    x = te.placeholder((6,), name="X")

    def program(inputs, outputs):
        (source,), (running, count) = inputs, outputs
        step = L.loop("i", 6, lambda i: L.store(running, (i,), source[i] + te.select(i > 0, running[i - 1], 0.0)))
        return L.block(L.store(count, (), 6), step)

    running, count = te.externs([((6,), "float32"), ((), "int32")], [x], program, "scan")
    value = random(6)
    results = evaluate([count, running], {x: value})
    assert results[0] == 6
    np.testing.assert_allclose(results[1], np.cumsum(value), rtol=1e-6, atol=1e-6)


def test_dims_in_bodies():
    n, x = te.var("n"), te.placeholder((te.var("n"),), "int64", "X")
    y = te.compute((n,), lambda i: x[n - 1 - i] * n, "Y")
    np.testing.assert_array_equal(evaluate([y], {x: np.arange(5)})[0], np.arange(5)[::-1] * 5)
    z = te.compute((n + 1,), lambda i: i * n, "Z")
    np.testing.assert_array_equal(evaluate([z], {}, {n: 3})[0], np.arange(4) * 3)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda x: te.compute((4,), lambda i: x[i + 1]), IRError, r"element \(3,\) of `compute` reads outside"),
        (
            lambda x: te.compute((4,), lambda i: te.sum(x[i + te.reduce_axis(2, "k")], axis=te.reduce_axis(2, "k"))),
            IRError,
            "reads outside",
        ),
        (lambda x: te.compute((te.var("m"),), lambda i: x[0]), IRError, "not all variables"),
        (lambda x: te.placeholder((3,), name="P"), IRError, "placeholder `P` has no value"),
        (lambda x: te.compute((4,), lambda i: E.binary("div", i, 2)), IRError, "`div` is not defined for int64"),
    ],
)
def test_refused(build, error, message):
    x = te.placeholder((4,), name="X")
    with pytest.raises(error, match=message):
        evaluate([build(x)], {x: random(4)})


def test_wrong_inputs():
    x = te.placeholder((4,), name="X")
    with pytest.raises(InputError, match="`X` is float64 instead of float32"):
        evaluate([x], {x: np.zeros(4)})
    with pytest.raises(InputError, match="dimension 0 of `X` is 5 instead of 4"):
        evaluate([x], {x: random(5)})
    with pytest.raises(InputError, match="`X` has 2 dimensions instead of 1"):
        evaluate([x], {x: random(4, 1)})


def test_selects_hide_only_what_they_do_not_choose():
    x = te.placeholder((4,), name="X")
    value = random(4)
    shifted = te.compute((4,), lambda i: te.select(i < 3, x[i + 1], 0.0), "shifted")
    np.testing.assert_array_equal(both(shifted, {x: value}), [*value[1:], 0])
    wrong = te.compute((4,), lambda i: te.select(i < 2, 0.0, x[i + 1]), "wrong")
    with pytest.raises(IRError, match=r"element \(3,\) of `wrong`"):
        evaluate([wrong], {x: value})


NUMBERS = ["float16", "bfloat16", "float64", "int8", "uint16"]


@pytest.mark.parametrize(
    ("reduction", "dtype"), [(f, d) for f in (te.sum, te.prod, te.max, te.min) for d in NUMBERS] + [(te.all, "bool"), (te.any, "bool")]
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_reductions_of_every_type(reduction, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype).type
    x, k = te.placeholder((6, 10), dtype, "X"), te.reduce_axis(3, "k")
    rows = te.compute((6,), lambda i: reduction(x[i, te.reduce_axis(10, "r")], axis=te.reduce_axis(10, "r")), "rows")
    windows = te.compute((6, 4), lambda i, j: reduction(x[i, j * 2 + k], axis=k), "windows")
    value = (RNG.normal(size=(6, 10)) * (2 if dtype[0] == "b" else 9)).astype(kind)
    ufunc = {te.sum: np.add, te.prod: np.multiply, te.max: np.maximum, te.min: np.minimum, te.all: np.logical_and, te.any: np.logical_or}[
        reduction
    ]
    wide = value.astype(np.float64) if "float" in dtype else value
    expected = ufunc.reduce(wide, axis=1, dtype=wide.dtype).astype(kind)
    np.testing.assert_array_equal(both(rows, {x: value}), expected)
    expected = np.stack([ufunc.reduce(wide[:, s : s + 3], axis=1, dtype=wide.dtype) for s in (0, 2, 4, 6)], 1).astype(kind)
    np.testing.assert_array_equal(both(windows, {x: value}), expected)


def test_a_sum_of_products_along_an_axis_that_is_named_but_does_not_count():
    """k // 2 is 0 for all k: the products count twice."""
    a, b, k, m = (
        te.placeholder((3, 1), "float64", "a"),
        te.placeholder((4,), "float64", "b"),
        te.reduce_axis(2, "k"),
        te.reduce_axis(4, "m"),
    )
    t = te.compute((3,), lambda i: te.sum(a[i, k // 2] * b[m], (k, m)))
    x, y = np.arange(3.0).reshape(3, 1), np.arange(4.0)
    np.testing.assert_array_equal(evaluate([t], {a: x, b: y})[0], x[:, 0] * 12.0)
