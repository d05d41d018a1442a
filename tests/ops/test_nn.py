import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.simplify import as_dim
from tcomp.ops import nn


def reference_conv(x, w, strides, dilations, group):
    """The definition, window by window."""
    kernel = w.shape[2:]
    spatial = [(d - r * (k - 1) - 1) // s + 1 for d, k, s, r in zip(x.shape[2:], kernel, strides, dilations, strict=True)]
    y = np.zeros((x.shape[0], w.shape[0], *spatial), np.float64)
    per_in, per_out = w.shape[1], w.shape[0] // group
    for o in range(w.shape[0]):
        g = o // per_out
        for p in itertools.product(*map(range, spatial)):
            cut = tuple(slice(i * s, i * s + r * (k - 1) + 1, r) for i, s, k, r in zip(p, strides, kernel, dilations, strict=True))
            y[(slice(None), o, *p)] = (x[(slice(None), slice(g * per_in, (g + 1) * per_in), *cut)] * w[o]).reshape(x.shape[0], -1).sum(1)
    return y


def scatter_transposed(x, w, strides, dilations, group, before, shape):
    """The adjoint of convolution by scattering, then cutting."""
    kernel, per_in, per_out = w.shape[2:], w.shape[0] // group, w.shape[1]
    full = [(d - 1) * s + r * (k - 1) + 1 for d, k, s, r in zip(x.shape[2:], kernel, strides, dilations, strict=True)]
    y = np.zeros((x.shape[0], per_out * group, *(max(f, b + n) for f, b, n in zip(full, before, shape, strict=True))))
    for c in range(w.shape[0]):
        g = c // per_in
        for p in itertools.product(*map(range, x.shape[2:])):
            for k in itertools.product(*map(range, kernel)):
                at = tuple(i * s + j * r for i, s, j, r in zip(p, strides, k, dilations, strict=True))
                y[(slice(None), slice(g * per_out, (g + 1) * per_out), *at)] += x[(slice(None), c, *p)][:, None] * w[(c, slice(None), *k)]
    return y[(slice(None), slice(None), *(slice(b, b + n) for b, n in zip(before, shape, strict=True)))]


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 3))
    size = st.integers(1, 3)
    kernel, strides, dilations = ([draw(size) for _ in range(rank)] for _ in range(3))
    extents = [draw(st.integers(r * (k - 1) + 1, r * (k - 1) + 4)) for k, r in zip(kernel, dilations, strict=True)]
    group, per_in, per_out = draw(size), draw(size), draw(size)
    return rank, kernel, tuple(strides), tuple(dilations), extents, group, per_in, per_out


@settings(max_examples=40, deadline=None, derandomize=True)
@given(convolutions(), st.integers(0, 2**31))
def test_convolution_of_any_rank(apply, case, seed):
    _, kernel, strides, dilations, extents, group, per_in, per_out = case
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, group * per_in, *extents)).astype(np.float32)
    w = rng.standard_normal((group * per_out, per_in, *kernel)).astype(np.float32)
    y = apply(nn.CONV, x, w, strides=strides, dilations=dilations, group=group)
    np.testing.assert_allclose(y, reference_conv(x, w, strides, dilations, group), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(convolutions(), st.data())
def test_transposed_convolution_of_any_rank(apply, case, data):
    rank, kernel, strides, dilations, extents, group, per_in, per_out = case
    extents = [min(e, 3) for e in extents]
    full = [(d - 1) * s + r * (k - 1) + 1 for d, k, s, r in zip(extents, kernel, strides, dilations, strict=True)]
    before = tuple(data.draw(st.integers(0, (f - 1) // 2)) for f in full)
    shape = tuple(f - b + data.draw(st.integers(-((f - b - 1) // 2), 1)) for f, b in zip(full, before, strict=True))
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((2, group * per_in, *extents)).astype(np.float32)
    w = rng.standard_normal((group * per_in, per_out, *kernel)).astype(np.float32)
    y = apply(nn.CONV_TRANSPOSE, x, w, strides=strides, dilations=dilations, group=group, before=before, shape=shape)
    np.testing.assert_allclose(y, scatter_transposed(x, w, strides, dilations, group, before, shape), rtol=1e-5, atol=1e-5)


def test_structure_of_convolution():
    """What schedules look for: one reduction, reads in range without a guard, no axis of extent 1 folded."""
    x = te.placeholder((1, 8, 10, 10))
    plain = nn.conv(x, te.placeholder((16, 8, 3, 3)), (1, 1), (1, 1), 1)
    assert plain.body.op == "reduce" and len(plain.body.attr[1]) == 3 and "select" not in str(plain.body)
    depthwise = nn.conv(x, te.placeholder((8, 1, 3, 3)), (1, 1), (1, 1), 8)
    assert len(depthwise.body.attr[1]) == 2
    pointwise = nn.conv(x, te.placeholder((16, 8, 1, 1)), (1, 1), (1, 1), 1)
    assert len(pointwise.body.attr[1]) == 1


def test_convolution_over_a_symbolic_batch_and_size():
    n, h = te.var("n", 1, 64), te.var("h", 8, 64)
    y = nn.conv(te.placeholder((n, 3, h, 10)), te.placeholder((4, 3, 3, 3)), (2, 2), (1, 1), 1)
    assert y.shape == (n, 4, as_dim((h - 3) // 2 + 1), 4)


def test_half_precision_accumulates_in_float32(apply):
    x = np.full((1, 4096, 1), 1.0, np.float16)
    w = np.full((1, 4096, 1), 1.0, np.float16)
    y = apply(nn.CONV, x, w, strides=(1,), dilations=(1,), group=1)
    assert y.dtype == np.float16 and y.item() == 4096  # a float16 accumulator stops at 2048


@pytest.mark.parametrize(
    ("shape", "weights", "group"), [((1, 4, 8), (4, 3, 3), 1), ((1, 4, 8), (3, 2, 3), 2), ((1, 4), (4, 4), 1), ((1, 4, 8), (4, 4, 3), 0)]
)
def test_shapes_that_do_not_fit(shape, weights, group):
    with pytest.raises(IRError):
        nn.conv(te.placeholder(shape), te.placeholder(weights), (1,) * (len(shape) - 2), (1,) * (len(shape) - 2), group)


def test_bias(apply):
    x = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    bias = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(apply(nn.ADD_CHANNELS, x, bias), x + bias[:, None])
