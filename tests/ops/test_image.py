import numpy as np
import pytest

from tcomp.ops import image as ops

RNG = np.random.default_rng(5)


def test_repeat_and_resample(apply):
    x = RNG.random((2, 3)).astype(np.float32)
    np.testing.assert_array_equal(apply(ops.REPEAT, x, symbolic=True, factor=2, axis=1), np.repeat(x, 2, 1))
    indices, weights = np.array([[0, 1], [1, 2]]), np.array([[0.25, 0.75], [0.5, 0.5]], np.float32)
    expected = np.stack([0.25 * x[:, 0] + 0.75 * x[:, 1], 0.5 * x[:, 1] + 0.5 * x[:, 2]], 1)
    np.testing.assert_allclose(apply(ops.RESAMPLE, x, indices, weights, axis=1), expected, rtol=1e-6)
    np.testing.assert_array_equal(apply(ops.RESAMPLE, np.array([[10, 20, 31]], np.uint8), indices, weights, axis=1), [[17, 25]])


def identity_grid(h, w, align_corners):
    y, x = (np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in (h, w))
    return np.stack(np.broadcast_arrays(x[None, :], y[:, None]), -1)[None].astype(np.float32)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_sampling_at_the_elements_gives_them_back(apply, mode, padding, align_corners):
    x = RNG.random((1, 2, 4, 5)).astype(np.float32)
    grid = identity_grid(4, 5, align_corners)
    found = apply(ops.GRID_SAMPLE, x, grid, mode=mode, padding=padding, align_corners=align_corners)
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-5)


def test_sampling_outside(apply):
    x = np.array([[[[1, 2, 3]]]], np.float32)
    grid = np.array([[[[-9, 0], [1.9, 0], [9, 0], [np.nan, 0], [1e30, 0]]]], np.float32)

    def sample(padding, mode="nearest"):
        return apply(ops.GRID_SAMPLE, x, grid, mode=mode, padding=padding, align_corners=False)[0, 0, 0]

    np.testing.assert_array_equal(sample("zeros")[:3], [0, 0, 0])
    np.testing.assert_array_equal(sample("border")[:3], [1, 3, 3])
    np.testing.assert_array_equal(sample("reflection")[1:2], [2])  # position 3.85 mirrors at 2.5 to 1.15
    for padding in ("zeros", "border", "reflection"):
        assert sample(padding, "cubic").shape == (5,)  # nothing is read outside, whatever the position


def test_affine_grid_of_the_identity(apply):
    theta = np.array([[[1, 0, 0], [0, 1, 0]]], np.float32)
    for align_corners in (False, True):
        found = apply(ops.AFFINE_GRID, theta, spatial=(4, 5), align_corners=align_corners)
        np.testing.assert_allclose(found, identity_grid(4, 5, align_corners), atol=1e-6)


def test_roi_align_of_a_linear_image_is_exact(apply):
    """The mean of bilinear samples of a linear function is its value at the centre of the bin."""
    row = np.arange(8, dtype=np.float32)
    x = (row[:, None] * 10 + row[None, :])[None, None]
    rois, batch = np.array([[1, 2, 5, 6]], np.float32), np.array([0])
    found = apply(ops.ROI_ALIGN, x, rois, batch, size=(2, 2), samples=2, scale=1.0, mode="avg", half_pixel=False)
    np.testing.assert_allclose(found[0, 0], [[3 * 10 + 2, 3 * 10 + 4], [5 * 10 + 2, 5 * 10 + 4]], rtol=1e-6)
    away = apply(ops.ROI_ALIGN, x, rois + 100, batch, size=(2, 2), samples=1, scale=1.0, mode="max", half_pixel=True)
    np.testing.assert_array_equal(away, np.zeros((1, 1, 2, 2)))


def test_col2im_adds_what_im2col_copied(apply):
    """Folding the patches of ones counts how often each element was copied."""
    ones = np.ones((1, 2 * 3, 4 * 3), np.float32)
    found = apply(ops.COL2IM, ones, image=(5, 5), block=(2, 3), dilations=(1, 1), pads=(0, 0, 0, 0), strides=(1, 1), channels=1)
    np.testing.assert_array_equal(found[0, 0], np.outer([1, 2, 2, 2, 1], [1, 2, 3, 2, 1]))
