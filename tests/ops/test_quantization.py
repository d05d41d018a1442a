import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ops import quantization as ops


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=8),
    st.sampled_from([0.5, 0.125, 3.0, 1e-3]),
    st.sampled_from(["int8", "uint8", "int16", "uint16"]),
    st.integers(0, 100),
)
def test_quantize_rounds_to_even_and_saturates(apply, values, scale, dtype, zero):
    x, s, z = np.array(values, np.float32), np.array(scale, np.float32), np.array(zero, dtype)
    info = np.iinfo(dtype)
    expected = np.clip(np.rint(x / s).astype(np.float64) + zero, info.min, info.max).astype(dtype)
    y = apply(ops.QUANTIZE, x, s, z, axis=0, block=0, dtype=dtype, precision="float32")
    np.testing.assert_array_equal(y, expected)


def test_per_axis_and_per_block(apply):
    x = np.arange(-12, 12, dtype=np.int8).reshape(2, 3, 4)
    scale, zero = np.array([0.5, 2, 4], np.float32), np.array([1, 0, -1], np.int8)
    y = apply(ops.DEQUANTIZE, x, scale, zero, axis=1, block=0, dtype="float32")
    np.testing.assert_array_equal(y, (x.astype(np.float32) - zero[:, None]) * scale[:, None])
    blocks = np.arange(1, 13, dtype=np.float32).reshape(2, 3, 2)
    y = apply(ops.DEQUANTIZE, x, blocks, None, axis=2, block=2, dtype="float32")
    np.testing.assert_array_equal(y, x * blocks.repeat(2, axis=2))
    back = apply(ops.QUANTIZE, y, blocks, None, axis=2, block=2, dtype="int8", precision="float32")
    np.testing.assert_array_equal(back, x)


def test_dynamic_range_covers_zero(apply):
    scale, zero = apply(ops.DYNAMIC_RANGE, np.array([1.0, 2.0, 5.1], np.float32))
    np.testing.assert_allclose(scale, 5.1 / 255, rtol=1e-6)
    assert zero == 0 and zero.dtype == np.uint8
    scale, zero = apply(ops.DYNAMIC_RANGE, np.array([-1.0, 3.0], np.float32))
    assert zero == 64  # 63.75


def test_integer_products(apply):
    a = np.array([[255, 0], [1, 2]], np.uint8)
    np.testing.assert_array_equal(apply(ops.CENTRED, a, np.array(3, np.uint8), axis=0), a.astype(np.int32) - 3)
    np.testing.assert_array_equal(apply(ops.CENTRED, a, np.array([1, 2], np.uint8), axis=0), a.astype(np.int32) - [[1], [2]])
    np.testing.assert_array_equal(apply(ops.CENTRED, a, None, axis=0), a.astype(np.int32))


def test_requantize_per_channel(apply):
    x = np.array([[[100, -100], [1000, 3]]], np.int32)
    one = np.array(0.5, np.float32)
    y = apply(ops.REQUANTIZE, x, one, np.array([0.1, 0.2], np.float32), np.array(1, np.float32), np.array(10, np.uint8), axis=1)
    np.testing.assert_array_equal(y, [[[15, 5], [110, 10]]])


@pytest.mark.parametrize("ones", [(), (1,), (1, 1)])
def test_requantize_of_a_scalar_takes_parameters_of_one_element(apply, ones):
    """As QLinearMatMul of two vectors has them."""
    scale, zero = np.full(ones, 0.5, np.float32), np.full(ones, 3, np.int8)
    y = apply(ops.REQUANTIZE, np.array(20, np.int32), scale, scale, scale, zero, axis=0)
    assert y.shape == () and y == 13


def test_parameters_that_do_not_fit():
    x, scales = te.placeholder((4, 4), "int8"), te.placeholder((2, 4), "float32")
    for block in (-1, -2):
        with pytest.raises(IRError, match=f"block {block}"):
            ops.dequantize(x, scales, None, 0, block, "float32")
    x = te.placeholder((2, 3))
    with pytest.raises(IRError):
        ops.quantize(x, te.placeholder((2,)), None, 1, 0, "int8", "float32")
    with pytest.raises(IRError):
        ops.quantize(x, te.placeholder((3,)), None, 5, 0, "int8", "float32")
