"""6. Schedule a convolution by hand: 3 x 3, in a blocked layout, as fast as the processor can multiply and add.

Run me:  python tutorials/06_conv.py
"""

import time

import numpy as np

import tcomp
from tcomp import te
from tcomp.calibration import peak_flops

# Channels in blocks of one vector, innermost: the 16 output channels of a pixel are one vector register, one load of weights serves every
# pixel, and the image is read one element at a time, broadcast. (A network is brought into this layout once; see `tcomp explain`.)
# The border of zeros is part of the image here, as it is where the operator before writes into the middle of a larger buffer.
target = tcomp.Target.host()
V = target.lanes(32)


def convolution(size: int, channels: int) -> list[te.Tensor]:
    blocks = channels // V
    image = te.placeholder((blocks, size + 2, size + 2, V), name="image")
    weights = te.placeholder((blocks, blocks, 3, 3, V, V), name="weights")
    c, y, x, i = (te.reduce_axis(n, name=name) for n, name in ((blocks, "c"), (3, "y"), (3, "x"), (V, "i")))
    return [
        image,
        weights,
        te.compute(
            (blocks, size, size, V),
            lambda o, h, w, v: te.sum(image[c, h + y, w + x, i] * weights[o, c, y, x, i, v], axis=(c, y, x, i)),
            name="out",
        ),
    ]


def schedule(program: list[te.Tensor]) -> tcomp.Schedule:
    s = tcomp.Schedule(program)
    # The tile of sums: 7 neighbouring pixels of a row, in 2 blocks of output channels, 14 registers. A vector of weights is used for 7 pixels,
    # an element of the image for 2 blocks, and 14 sums are more than the 8 that keep the units busy while each sum waits for its last.
    # 7 divides the widths of such networks (112, 56, 28, 14, 7): there are no tails.
    s.cache_write("out", "sums")
    blocks, block = s.split("out.0", 2)
    pixels, pixel = s.split("out.2", 7)
    # Blocks of output channels are the outer loop, rows and pixels inside: the weights of two blocks stay in the cache next to the core
    # (or the one behind it) while the image passes by.
    s.reorder(blocks, "out.1", pixels, block, pixel, "out.3")
    s.compute_at("sums", pixels, "register")
    # Inside, the sums over input channels and the window run around the tile. Four input channels are written out, so that counting and
    # jumping cost little; they lie side by side in memory, as do their weights.
    channels, channel = s.split("out.i", 4)
    s.reorder("out.c", "out.y", "out.x", channels, channel, "out.w", "out.o", "out.v")
    for loop in (channel, "out.w", "out.o", "out.init.w", "out.init.o", pixel, block):
        s.unroll(loop)
    for lanes in ("out.v", "out.init.v", "out.3"):
        s.vectorize(lanes)
    return s


def data(program: list[te.Tensor]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal([int(n) for n in t.shape], np.float32) for t in program]


def expected(image: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
    shifted = ((y, x, image[:, y : y + size, x : x + size]) for y in range(3) for x in range(3))
    terms = [np.einsum("chwi,ociv->ohwv", part, weights[:, :, y, x], optimize=True) for y, x, part in shifted]
    return np.asarray(sum(terms[1:], terms[0]))


print(schedule(convolution(56, 64)).trace)
layers = {}
for size, channels in ((56, 64), (28, 128)):  # of ResNet
    program = convolution(size, channels)
    f, arrays = tcomp.build(schedule(program), threads=1), data(program)
    f(*arrays)
    assert np.allclose(arrays[2], expected(arrays[0], arrays[1], size), atol=1e-2)
    layers[size, channels] = f, arrays

# As in the tutorial before: peak and layers in turns, best of several, in time of this thread.
peak, seconds = 0.0, {layer: list[float]() for layer in layers}
for _ in range(8):
    peak = max(peak, peak_flops(target))
    for layer, (f, arrays) in layers.items():
        for _ in range(10):
            start = time.thread_time()
            f(*arrays)
            seconds[layer].append(time.thread_time() - start)
print()
for (size, channels), times in seconds.items():
    speed = 2 * 9 * (size * channels) ** 2 / min(times)
    print(f"{size} x {size} x {channels}: {speed / 1e9:.0f} GFLOP/s of {peak / 1e9:.0f} at one thread: {speed / peak:.0%} of the peak")
