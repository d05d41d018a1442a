import numpy as np
import pytest

from tcomp.ops.matmul import DET
from tcomp.ops.signal import DFT, FRAMES

RNG = np.random.default_rng(7)


def tables(n, inverse=False):
    angle = 2 * np.pi / n * np.outer(np.arange(n), np.arange(n))
    sign = 1 if inverse else -1
    scale = 1 / n if inverse else 1
    return (np.cos(angle) * scale).astype(np.float32), (np.sin(angle) * sign * scale).astype(np.float32)


def test_transform_and_back(apply):
    x = RNG.random((2, 6, 3, 2)).astype(np.float32)
    spectrum = apply(DFT, x, *tables(6), axis=1, real=False)
    expected = np.fft.fft(x[..., 0] + 1j * x[..., 1], axis=1)
    np.testing.assert_allclose(spectrum, np.stack([expected.real, expected.imag], -1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(apply(DFT, spectrum, *tables(6, True), axis=1, real=False), x, rtol=1e-4, atol=1e-5)


def test_transform_of_a_real_signal(apply):
    x = RNG.random((4, 1)).astype(np.float32)
    spectrum = apply(DFT, x, *tables(4), axis=0, real=False)
    np.testing.assert_allclose(spectrum[..., 0] + 1j * spectrum[..., 1], np.fft.fft(x[:, 0]), rtol=1e-4, atol=1e-5)


def test_frames_overlap(apply):
    x, window = np.arange(10, dtype=np.float32).reshape(1, 10, 1), np.array([1, 2, 1], np.float32)
    found = apply(FRAMES, x, window, length=3, step=2, count=4)
    np.testing.assert_array_equal(found[0, :, :, 0], [[n * window[k] for k, n in enumerate(range(s, s + 3))] for s in range(0, 8, 2)])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_det(apply, n):
    x = RNG.normal(size=(3, n, n)).astype(np.float32)
    x[0, 0] = 0  # singular
    if n > 1:
        x[1, 0, 0] = 0  # needs a pivot
    np.testing.assert_allclose(apply(DET, x), np.linalg.det(x.astype(np.float64)), rtol=1e-4, atol=1e-5)
