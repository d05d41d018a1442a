"""Winograd's algorithm against the definition of convolution: matrices, operators, native kernels, errors."""

from fractions import Fraction

import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ir import te
from tcomp.ir.layout import Layout
from tcomp.ir.loops import For, walk
from tcomp.ops import bilinear
from tcomp.passes.algorithms import MAX_ERROR
from tcomp.schedules.cpu import default as cpu
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget

TILES = (2, 4)
SIZES = [(1, 5, 3, 4, 4), (2, 8, 6, 5, 7), (1, 17, 19, 9, 3), (3, 16, 32, 14, 14)]  # batch, channels in and out, output


def windowed(x, w, extents, stride=1):
    """The sum over taps and channels, in float64, for filters of any shape; axes with one tap have no stride."""
    taps = w.shape[2:]
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(float), taps, tuple(range(2, x.ndim)))
    windows = windows[:, :, *(slice(None, None, stride if t > 1 else 1) for t in taps)][:, :, *map(slice, extents)]
    return np.einsum("nc...t,oct->no...", windows.reshape(*windows.shape[: x.ndim], -1), w.astype(float).reshape(*w.shape[:2], -1))


def example(batch, channels, outputs, height, width, tile):
    """Input padded to whole tiles, weights, and the exact result."""
    rng = np.random.default_rng(height * width)
    x = np.zeros((batch, channels, *(-(-d // tile) * tile + 2 for d in (height, width))), np.float32)
    x[:, :, : height + 2, : width + 2] = rng.standard_normal((batch, channels, height + 2, width + 2))
    w = rng.standard_normal((outputs, channels, 3, 3)).astype(np.float32)
    return x, w, windowed(x, w, (height, width))


def by_points(apply, x, w, tile, extents, stride=1, group=1):
    """The three operators, one after the other."""
    points = apply(bilinear.WINOGRAD_INPUT, x, tile=tile, taps=w.shape[2:], stride=stride, group=group)
    products = apply(bilinear.WINOGRAD_PRODUCT, points, bilinear.transformed_weights(w, tile, stride, group))
    return apply(bilinear.WINOGRAD_OUTPUT, products, tile=tile, shape=extents, stride=stride, group=group)


def error(found, exact):
    return np.abs(found - exact).max() / np.abs(exact).max()


@pytest.mark.parametrize("tile, taps", [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5), (2, 7)])
def test_matrices_are_exact(tile, taps):
    """A' [(G w) * (B' x)] = the filter, in fractions."""
    a, g, b = (np.array(m, dtype=object) for m in bilinear.matrices(tile, taps))
    x, w = [Fraction(n * n - 3 * n + 1) for n in range(tile + taps - 1)], [Fraction(n + 2, 3) for n in range(taps)]
    assert list(a @ ((g @ w) * (b @ x))) == [sum(w[k] * x[i + k] for k in range(taps)) for i in range(tile)]


@pytest.mark.parametrize("outputs, channels", [(1000, 11), (4000, 3), (1, 1)])
def test_weights_that_are_made_in_parts(outputs, channels):
    """3 channels at a time and 2 at the end, one at a time, all at once."""
    w = np.random.default_rng(0).standard_normal((outputs, channels, 3, 3)).astype(np.float32)
    g = np.array(bilinear.matrices(4, 3)[1], np.float64)
    exact = np.einsum("pk,ql,oikl->pqio", g, g, w.astype(np.float64))
    found = bilinear.transformed_weights(w, 4)
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, exact, rtol=2**-24, atol=1e-12)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_operators_convolve(apply, sizes, tile):
    x, w, exact = example(*sizes, tile=tile)
    found = by_points(apply, x, w, tile, sizes[3:])
    assert found.dtype == np.float32 and found.shape == exact.shape
    assert error(found, exact) < {2: 2e-6, 4: 2e-5}[tile]


@pytest.mark.parametrize(
    "tile, taps, extents",
    [(4, (5, 1), (20, 1)), (2, (1, 7), (2, 9)), (4, (3,), (11,)), (4, (1, 3), (3, 8)), (2, (5, 5), (7, 6)), (2, (3, 1, 5), (4, 2, 5)), (4, (5,), (30,))],
    ids=str,
)  # fmt: skip
def test_filters_of_other_shapes(apply, tile, taps, extents):
    """Axes with one tap are left as they are."""
    rng = np.random.default_rng(len(taps))
    cut = bilinear.tile_shape(tile, taps)
    padded = [-(-d // n) * n + t - 1 for d, n, t in zip(extents, cut, taps, strict=True)]
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 9, *padded), (6, 9, *taps)))
    found, exact = by_points(apply, x, w, tile, extents), windowed(x, w, extents)
    assert found.shape == exact.shape and error(found, exact) < 2e-5


@pytest.mark.parametrize("tile", TILES)
def test_errors_stay_below_the_bound_for_many_channels_and_values_of_one_sign(apply, tile):
    """Positive inputs, as after a rectifier, and positive weights: no cancellation in the direct sum, much in the transforms."""
    rng = np.random.default_rng(tile)
    x, w = rng.random((1, 512, 10, 10)).astype(np.float32) * 100, rng.standard_normal((8, 512, 3, 3)).astype(np.float32)
    for weights in (w, np.abs(w)):
        assert error(by_points(apply, x, weights, tile, (8, 8)), windowed(x, weights, (8, 8))) < MAX_ERROR / 10


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("behind", (0, 1), ids="{} pixels behind the windows".format)
@pytest.mark.parametrize(
    "taps, extents", [((3, 3), (8, 4)), ((3, 3), (7, 9)), ((3,), (9,)), ((1, 3), (3, 8)), ((5, 1), (6, 2)), ((5, 3), (8, 5))], ids=str
)
def test_a_stride_of_two(apply, tile, behind, taps, extents):
    """Two convolutions along each axis with a stride, of the even and of the odd pixels; what no window reaches is not a number."""
    rng = np.random.default_rng(len(taps))
    pixels = [(-(-d // tile) * tile * 2 + t - 2 if t > 1 else d) for d, t in zip(extents, taps, strict=True)]
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 9, *pixels), (6, 9, *taps)))
    exact = windowed(x, w, extents, 2)
    x = np.pad(x, [(0, 0), (0, 0), *((0, behind if t > 1 else 0) for t in taps)], constant_values=np.nan)
    found = by_points(apply, x, w, tile, extents, 2)
    assert found.shape == exact.shape and error(found, exact) < 1e-5


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize("channels, outputs, group", [(12, 12, 4), (32, 64, 2), (48, 48, 2), (10, 15, 5)])
def test_groups_of_channels(apply, tile, stride, channels, outputs, group):
    rng = np.random.default_rng(channels)
    x, w = (
        rng.standard_normal((2, channels, *(n * tile * stride + 3 - stride for n in (2, 3)))),
        rng.standard_normal((outputs, channels // group, 3, 3)),
    )
    x, w, extents = x.astype(np.float32), w.astype(np.float32), (2 * tile, 3 * tile - 1)
    exact = np.concatenate([windowed(*pair, extents, stride) for pair in zip(np.split(x, group, 1), np.split(w, group), strict=True)], 1)
    found = by_points(apply, x, w, tile, extents, stride, group)
    assert found.shape == exact.shape and error(found, exact) < 2e-5


def test_tiles_are_whole():
    with pytest.raises(IRError, match="pixels under whole tiles"):
        bilinear.winograd_input(te.placeholder((1, 3, 9, 10)), 4, (3, 3))
    with pytest.raises(IRError, match="pixels under whole tiles"):
        bilinear.winograd_input(te.placeholder((1, 3, 9, 11)), 4, (3, 3), 2)
    with pytest.raises(IRError, match="2 spatial axes"):
        bilinear.winograd_input(te.placeholder((1, 3, 10)), 4, (3, 3))
    with pytest.raises(IRError, match="tiles of a convolution"):
        bilinear.winograd_output(te.placeholder((6, 6, 1, 2, 2, 3)), 4, (9, 8))


@pytest.mark.parametrize("taps, stride", [(3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("tile", TILES)
def test_transforms_are_straight_line_code_over_vectors_of_channels(tile, taps, stride):
    """The default schedule: all points of a tile unrolled around lanes of channels, no guards but in the tail of the channels."""
    x = te.placeholder((1, 32, *(n * tile * stride + taps - stride for n in (2, 3))), name="x")
    points = bilinear.winograd_input(x, tile, (taps, taps), stride)
    p = te.placeholder(points.shape, name="p")
    last = Layout.permuted((0, 2, 3, 1))
    for name, source, result in (("to", x, points), ("back", p, bilinear.winograd_output(p, tile, (2 * tile, 3 * tile - 1), stride))):
        layouts = {t: last for t in (source, result) if t.ndim == 4}
        kernel = cpu.schedule(lower(name, [source], [result], layouts), CpuTarget.parse("cpu -mcpu=skylake-avx512")).kernel
        kinds = [(x.kind, x.extent) for x in walk(kernel.body) if isinstance(x, For)]
        points_or_pixels = bilinear.points_of(tile, taps, stride) if name == "to" else tile
        assert kinds.count(("unrolled", points_or_pixels)) >= 2 and ("vectorized", 16) in kinds
        assert "note" not in str(kernel) and "if " not in str(kernel)
